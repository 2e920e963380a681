/* Pools of streams: memory that is used again in the order of a stream's work, and leaves it
 * when that work is done.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What a stream frees, its next work may have at once: it comes behind. Everybody else
 * must wait until the work is done, which an event tells. Events cost time, so there is none
 * for each free: a stream has a pool over slabs of its own (a cache.h), and an event is
 * recorded when a whole slab became idle. When it has passed, and the slab still is, the slab
 * leaves.
 *
 * A life is a block from its allocation until its place is nobody's. Freed by another stream
 * than its own, or used by others, its place in its own pool is free when events of these have
 * passed. A life may have a slab for itself, that no pool holds; then its own stream's work must
 * have ended too.
 *
 * While a stream is being captured nothing that it is given runs, so no event is recorded: that
 * is done later. What is allocated meanwhile comes from a part of the pool for that, of slabs
 * that no work of the stream touches, because the graph may run in another.
 *
 * Where an event says that the device is lost or that the process's context is broken, no work
 * of this process goes on: so it counts as passed. Where the driver could not for another reason
 * it is tried again.
 *
 * A stream's number is good as long as the stream is: drivers may crash on another. So there is an
 * end, told by who destroys it: from then on one event stands for all work that it had, and the
 * number is another stream's. Where the driver finds that a stream is no more without that, its work
 * may go on, and all work of the device is waited for, when no stream is being captured.
 *
 * Bookkeeping and events only: whoever calls holds a lock around each of these, gets
 * slabs, and takes away those that leave. */
#ifndef BFC_CLIENT_STREAM_POOL_H
#define BFC_CLIENT_STREAM_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "client/blocks.h"
#include "client/cache.h"
#include "device/device.h"
#include "proto/pages.h"

struct stream_pools;
struct stream_pool; /* of one stream, in one partition */

/* A block of the partition's, as a stream has it; malloc()ed. */
struct stream_slab {
        LIST_ENTRY(stream_slab) next;
        struct block block;
        uint64_t region_bytes;
};
LIST_HEAD(stream_slabs, stream_slab);

struct stream_life;

struct stream_stats {
        uint64_t num_allocs;
        uint64_t num_frees;
        uint64_t bytes_in_use;
        uint64_t peak_bytes_in_use;
        uint64_t bytes_reserved; /* slabs of the stream */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_pending; /* freed, and waiting for other streams */
        uint64_t largest_alloc_size;
};

struct stream_pools_options {
        const struct device_view *places; /* one for each partition; constant */
        uint32_t n_partitions;
        /* Waits for all work on the device of a region, as bfc_free() does: 0, or -EBUSY and
         * others: later. No stream that is known is being captured. */
        int (*finish)(void *userdata, uint64_t region_id);
        void *userdata;
};

int stream_pools_new(const struct stream_pools_options *options, struct stream_pools **ret); /* -ENOMEM */
/* Forgets everything, slabs and lives too; waits for nothing. Takes NULL. */
struct stream_pools *stream_pools_free(struct stream_pools *sp);

/* From now on this word, one thread's at a time, grows and shrinks by what the pools have of the partition
 * and nobody uses: free for a stream's next work, or waiting for some. Before anything is there. */
void stream_pools_show(struct stream_pools *sp, uint32_t partition, _Atomic uint64_t *word);

/* What device_streams_new() and is_captured() say; 1: it is being captured, which is noted:
 * no event is asked until that has ended. The stream is known from then on. */
int stream_pools_look_at(struct stream_pools *sp, uint32_t partition, uintptr_t stream);

/* Whether one that was noted goes on. */
bool stream_pools_captures_go_on(struct stream_pools *sp);

/* Whether one that is known is being captured, which is noted, so that to wait for the partition's device
 * would spoil that: all are asked, but for those of the host where it is a GPU, and the other way round. */
bool stream_pools_are_captured(struct stream_pools *sp, uint32_t partition);

/* Whether memory of this stream can be pooled: not of CUDA's number for each thread's own. */
bool stream_pools_can(const struct stream_pools *sp, uint32_t partition, uintptr_t stream);

/* A life of n_bytes in the stream's pool, which there is from then on. CACHE_MISS. -ENOMEM. */
int stream_pools_alloc(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                       uint64_t n_bytes, struct stream_life **ret);
/* The same after the slab, free, was put into the pool; never CACHE_MISS for what it can hold. The
 * slab is taken over, unless this fails. -ENOMEM, -EINVAL. */
int stream_pools_alloc_with(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                            uint64_t n_bytes, struct stream_slab *slab, struct stream_life **ret);
/* A life that is its slab. is_alien: no stream's so far. -ENOMEM: the slab is the caller's still. */
int stream_pools_alloc_whole(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_alien,
                             struct stream_slab *slab, struct stream_life **ret);

/* Its region and its offset there; without the broker's block. */
void stream_life_block(const struct stream_life *life, struct block *ret);

/* The broker's block, which changes where the cache splits it, and the place in that. The lock of the cache
 * is held. */
uint64_t stream_life_block_id(const struct stream_life *life);
uint64_t stream_life_offset(const struct stream_life *life);

uint32_t stream_life_partition(const struct stream_life *life);

/* The life was never handed out: undoes the allocation. */
void stream_life_undo(struct stream_pools *sp, struct stream_life *life);
/* One that is alien: it is forgotten, and its slab is the caller's. */
void stream_life_drop(struct stream_pools *sp, struct stream_life *life);

/* Another stream uses it from now on, too. -ENOMEM. */
int stream_life_record(struct stream_pools *sp, struct stream_life *life, uintptr_t stream);

/* The stream's work so far was the last that its owner gives it; the life is the pools' from
 * then on. -EINVAL: no stream of this device; -ENOMEM: it lives on, after both. */
int stream_life_free(struct stream_pools *sp, struct stream_life *life, uintptr_t stream);
/* The same where all work on the device could touch it, of whatever streams, and is to be waited for
 * later. -ENOMEM. */
int stream_life_put_aside(struct stream_pools *sp, struct stream_life *life);
/* The same where all work is done. */
void stream_life_free_done(struct stream_pools *sp, struct stream_life *life);

/* Looks at lives that wait and at pools that may, at most so many; the next time at the next. Where
 * a noted capture goes on: at none. may_wait: also where that means to wait for all work. */
void stream_pools_look(struct stream_pools *sp, size_t max_lives, size_t max_pools, bool may_wait);

/* Whether looking again later will make slabs leave, or places free. */
bool stream_pools_wait(struct stream_pools *sp);

/* The same also while a capture goes on, during which nothing is looked at. */
bool stream_pools_is_pending(const struct stream_pools *sp);

/* Slabs that left since the last call; the caller's. */
void stream_pools_take_leaving(struct stream_pools *sp, struct stream_slabs *ret);

/* The stream will be no more, and is not touched after this; of a later one of the same number its
 * memory is none. -EBUSY: it is being captured. -ENOENT: nothing was its. -ENOMEM, -EAGAIN. */
int stream_pools_end_stream(struct stream_pools *sp, uint32_t partition, uintptr_t stream);

/* -ENOENT: nothing is known of it. */
int stream_pools_stats(const struct stream_pools *sp, uint32_t partition, uintptr_t stream,
                       struct stream_stats *ret);
void stream_pools_reset_peaks(struct stream_pools *sp);

/* Every invariant; slow. 0, or -EBADMSG and a sentence (static). */
int stream_pools_check(const struct stream_pools *sp, const char **ret_why);

#endif
