/* The client's pools of streams (stream_alloc.h), and their lock. stream_alloc.c knows which memory is free when.
 *
 * A driver may be asked for an event under the pools' lock; the client's lock is taken inside of it, never the other
 * way round. Neither is held while the daemon is asked, while slabs are returned, or while a device's work is waited for.
 *
 * A block of a stream is in the client's table like any other, so copies, statistics and bfc_free() find it. It refers
 * to its stream_alloc. The memory comes from slabs that the partition's cache cut, or the daemon granted. Without a
 * cache each block is the daemon's own.
 *
 * The thread whose check makes slabs leave the pools returns them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAMS_H
#define BFC_CLIENT_STREAMS_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "client/stream_alloc.h"

struct block;

/* Slabs that left the pools and are being returned to the cache or the daemon. */
struct stream_batch {
        TAILQ_ENTRY(stream_batch) in_all; /* if it is not empty */
        struct stream_slabs slabs;
        uint64_t number;
};

struct streams {
        pthread_mutex_t lock;
        struct stream_pools *pools;
        TAILQ_HEAD(, stream_batch) batches; /* oldest first */
        uint64_t n_batches;                 /* so far */
        bool is_waiting;                    /* a thread waits for all work of devices */
        pthread_cond_t changed;             /* a batch was returned, or that wait has ended */
        int watch_ms; /* until the client's thread checks again; 0: it sleeps until it is woken */
};

int streams_new(bfc_client *client); /* -ENOMEM */
void streams_free(bfc_client *client);

/* Between these the pools do not change. */
void streams_lock(bfc_client *client);
void streams_unlock(bfc_client *client);

/* True: freed memory waits for incomplete work. */
bool streams_check_pending(bfc_client *client);

/* True: a known stream may be being captured, so the partition's device must not be waited for. */
bool streams_check_captured(bfc_client *client, uint32_t partition);

/* The daemon's block, and the offset in it. The lock is held. */
uint64_t streams_block_id(const struct block *block);
uint64_t streams_offset(const struct block *block);

void streams_reset_peaks(bfc_client *client);

/* Every invariant of the streams' pools; slow. 0, or -EBADMSG and a sentence (static). */
int streams_check(bfc_client *client, const char **ret_why);

/* The messages of an error that the pools returned for a stream, and of a block that does not exist. */
int streams_failed(int error, uintptr_t stream);
int streams_no_such_block(const void *ptr);

#endif
