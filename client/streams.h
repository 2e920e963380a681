/* Memory of streams: it is reused in the order of a stream's work, and leaves the pools when that work is complete.
 *
 * The stream's next work can reuse what the stream frees at once, because it runs later. Other streams
 * and processes must wait until the work is complete, as an event shows. Events cost time, so there is
 * not one for each free: a stream has a pool over its own slabs, and an event is recorded
 * when a whole slab has become idle. When it has completed, and the slab is still idle, the slab leaves.
 *
 * Two layers: `struct stream_pools` knows which memory is free when. It is bookkeeping and events only: the caller
 * holds a lock during each of its functions, provides slabs, and removes those that leave. `struct streams` is a
 * client's pools with their lock.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAMS_H
#define BFC_CLIENT_STREAMS_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "client/blocks.h"
#include "client/cache.h"
#include "device/device.h"
#include "proto/pages.h"

/* ---- which memory is free when ------------------------------------------------- */

/* A block of the partition that a stream has; malloc()ed. */
struct stream_slab {
        LIST_ENTRY(stream_slab) next;
        struct block block;
        uint64_t region_bytes;
};
LIST_HEAD(stream_slabs, stream_slab);

/* Whether a round of queries may wait for all work of a device. */
enum stream_wait {
        STREAM_WAIT_NONE,
        STREAM_WAIT_ASIDE, /* for memory that bfc_free() put aside */
        STREAM_WAIT_ALL,   /* also for memory of streams that have no event */
};

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

struct stream_pools;
struct stream_alloc;

/* A call names this stream, so the driver may get it until stream_pools_unname(), or always if it
 * is_permanent. 1: it is being captured. -ENOBUFS: this process has no memory, and the stream is not named.
 * Results of device_streams_new() and device_stream_check_captured(). */
int stream_pools_look_at(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_permanent);
void stream_pools_unname(struct stream_pools *sp);

/* Whether a known stream may be being captured: waiting for the partition's device would invalidate the capture. */
bool stream_pools_check_captured(struct stream_pools *sp, uint32_t partition);

/* True: memory of this stream can be pooled. False for the per-thread default stream. */
bool stream_pools_can(const struct stream_pools *sp, uint32_t partition, uintptr_t stream);

/* An allocation of n_bytes in the stream's pool. CACHE_MISS. -ENOMEM. */
int stream_pools_alloc(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                       uint64_t n_bytes, struct stream_alloc **ret);
/* stream_pools_alloc() after adding this slab to the pool, which is made if necessary; no CACHE_MISS if n_bytes fit
 * into it. The slab is taken over, unless this fails. -ENOMEM, -EINVAL. */
int stream_pools_alloc_with(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                            uint64_t n_bytes, struct stream_slab *slab, struct stream_alloc **ret);
/* An allocation that is its slab. is_alien: on no stream. -ENOMEM: the caller keeps the slab. */
int stream_pools_alloc_whole(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_alien,
                             struct stream_slab *slab, struct stream_alloc **ret);

/* Its region and offset; without the daemon's block. */
void stream_alloc_block(const struct stream_alloc *alloc, struct block *ret);

uint32_t stream_alloc_partition(const struct stream_alloc *alloc);

/* Undoes an allocation that was not returned to the program. */
void stream_alloc_undo(struct stream_pools *sp, struct stream_alloc *alloc);
/* Drops an alien one; the caller then owns its slab. */
void stream_alloc_drop(struct stream_pools *sp, struct stream_alloc *alloc);

/* Another stream uses it from now on, too. -ENOMEM. */
int stream_alloc_record(struct stream_alloc *alloc, uintptr_t stream);

/* Frees it after the work that is queued on the stream so far; the pools then own it. -EINVAL: no stream
 * of this device; -ENOMEM. After both it is still allocated. */
int stream_alloc_free(struct stream_pools *sp, struct stream_alloc *alloc, uintptr_t stream);
/* Frees an allocation that any work on the device, on any stream, could use; that work is waited for later.
 * -ENOMEM. */
int stream_alloc_put_aside(struct stream_pools *sp, struct stream_alloc *alloc);
/* Frees it when all work is complete already. */
void stream_alloc_free_done(struct stream_pools *sp, struct stream_alloc *alloc);

/* Checks waiting allocations and used pools, at most this many; the next call continues with the next
 * ones. None during a capture. If it may ask for waits, these must follow at once. */
void stream_pools_look(struct stream_pools *sp, size_t max_allocs, size_t max_pools, enum stream_wait wait);

/* A wait for all work, one at a time, during which the lock need not be held: begin, wait for the device of
 * each region that is wanted, end for its partition, and check again. False: nothing asks for it. */
bool stream_pools_begin_wait(struct stream_pools *sp, uint64_t *ret);
bool stream_pools_is_wanted(struct stream_pools *sp, uint32_t partition, uint64_t *ret_region_id);
void stream_pools_end_wait(struct stream_pools *sp, uint32_t partition, uint64_t wait, bool is_done);

/* Whether anything waits to be freed, also during a capture, while nothing is checked. */
bool stream_pools_is_pending(const struct stream_pools *sp);

/* Slabs that left since the last call, which the caller then owns. Those that a wait needs stay until its end. */
void stream_pools_take_leaving(struct stream_pools *sp, struct stream_slabs *ret);

/* The stream will be destroyed, and is not used after this. A later one of the same number does not get
 * its memory. -EBUSY: it is being captured. -ENOENT: it has no memory. -ENOMEM, -EAGAIN. */
int stream_pools_end_stream(struct stream_pools *sp, uint32_t partition, uintptr_t stream);

/* -ENOENT: there is no pool. */
int stream_pools_stats(const struct stream_pools *sp, uint32_t partition, uintptr_t stream,
                       struct stream_stats *ret);

/* ---- the pools of a client ---------------------------------------------------
 *
 * A driver may be asked for an event under the pools' lock; the client's lock is taken inside of it, never the other
 * way round. Neither is held while the daemon is asked, while slabs are returned, or while a device's work is waited for.
 *
 * A block of a stream is in the client's table like any other, so copies, statistics and bfc_free() find it. It refers
 * to its stream_alloc. The memory comes from slabs that the partition's cache cut, or the daemon granted. Without a
 * cache each block is the daemon's own.
 *
 * The thread whose check makes slabs leave the pools returns them. */

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

/* The daemon's block, which changes when the cache splits it, and the offset in it. The client's lock is held. */
uint64_t streams_block_id(const struct block *block);
uint64_t streams_offset(const struct block *block);

void streams_reset_peaks(bfc_client *client);

/* Every invariant of the streams' pools; slow. 0, or -EBADMSG and a sentence (static). */
int streams_check(bfc_client *client, const char **ret_why);

/* The messages of an error that the pools returned for a stream, and of a block that does not exist. */
int streams_failed(int error, uintptr_t stream);
int streams_no_such_block(const void *ptr);

#endif
