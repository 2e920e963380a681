/* Allocations on streams: memory that is reused in the order of a stream's work, and leaves the pool when
 * that work is complete.
 *
 * The stream's next work can reuse what the stream frees at once, because it runs later. Other streams
 * and processes must wait until the work is complete, as an event shows. Events cost time, so there is
 * not one for each free: a stream has a pool over its own slabs (stream_pool.h), and an event is recorded
 * when a whole slab has become idle. When it has completed, and the slab is still idle, the slab leaves.
 *
 * An allocation stays allocated until its place is free. If another stream frees or uses it, its place in
 * its own pool is free when events of these streams have completed. An allocation may have a slab of its
 * own, which is in no pool; then its own stream's work must be complete too.
 *
 * Allocations during a capture come from another part of the pool, of slabs that no work of the stream
 * uses, because the graph may run in another stream.
 *
 * Bookkeeping and events only: the caller holds a lock during each of these functions, provides slabs,
 * and removes those that leave.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_ALLOC_H
#define BFC_CLIENT_STREAM_ALLOC_H

#include "client/blocks.h"
#include "client/stream_pool.h"

struct stream_pools;
struct stream_alloc;

int stream_pools_new(const struct stream_pools_options *options, struct stream_pools **ret); /* -ENOMEM */
/* Frees everything, with slabs and allocations, without waiting. Takes NULL. */
struct stream_pools *stream_pools_free(struct stream_pools *sp);

/* From now on this word, changed by one thread at a time, counts the bytes of the pools that the program
 * does not use: free for a stream's next work, or waiting for work. Before the first allocation. */
void stream_pools_show(struct stream_pools *sp, uint32_t partition, _Atomic uint64_t *word);

/* A call names this stream, so the driver may get it until stream_pools_unname(), or always if it
 * is_permanent. 1: it is being captured. -ENOBUFS: this process has no memory, and the stream is not named.
 * Results of device_streams_new() and device_stream_check_captured(). */
int stream_pools_look_at(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_permanent);
void stream_pools_unname(struct stream_pools *sp);

/* See stream_tracker_check_captured(). */
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

/* The daemon's block, which changes when the cache splits it, and the offset in it. The lock of the cache is
 * held. */
uint64_t stream_alloc_block_id(const struct stream_alloc *alloc);
uint64_t stream_alloc_offset(const struct stream_alloc *alloc);

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

/* Whether a later check can free slabs or places. */
bool stream_pools_check_pending(struct stream_pools *sp);

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
void stream_pools_reset_peaks(struct stream_pools *sp);

/* Every invariant; slow. 0, or -EBADMSG and a sentence (static). */
int stream_pools_check(const struct stream_pools *sp, const char **ret_why);

#endif
