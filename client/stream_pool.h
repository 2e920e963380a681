/* The pool of one stream in one partition: slabs over which a cache runs, for the stream's next work.
 *
 * A pool has two parts, for work and for captures. In the second, places are free only when no work uses
 * them. A part's cache has stamps that tell when its slabs became idle; a mark is an event and the stamp
 * up to which it is valid. Marks are in order. If all STREAM_MARKS are used, the newest mark is recorded
 * again. It then covers the later slabs and still covers its earlier ones. A slab needs no event of its own
 * if nothing in the part was freed on a stream since the newest mark. If no event can be recorded because no
 * call names the stream, the slab stays until one does, or until all work has been waited for.
 *
 * An empty pool keeps only its statistics. At most MAX_EMPTY are kept, and the oldest is dropped first. A
 * pool whose stream has ended waits for one event, and is then freed. Allocations that the stream used
 * wait for the same event.
 *
 * Invariants: is_empty is set exactly while the pool has no allocation and no slab; a part has a cache
 * exactly while it has slabs; the marks of a part have rising stamps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_POOL_H
#define BFC_CLIENT_STREAM_POOL_H

#include "client/blocks.h"
#include "client/cache.h"
#include "client/stream_tracker.h"
#include "proto/pages.h"

#define STREAM_MARKS 8u

enum { STREAM_WORK, STREAM_CAPTURE, STREAM_N_PARTS };

/* A block of the partition that a stream has; malloc()ed. */
struct stream_slab {
        LIST_ENTRY(stream_slab) next;
        struct block block;
        uint64_t region_bytes;
};
LIST_HEAD(stream_slabs, stream_slab);

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

struct stream_part {
        struct cache *cache;
        size_t n_slabs;
        struct stream_mark marks[STREAM_MARKS];
        unsigned n_marks;
        bool is_unmarked; /* work may have been given since the last mark */
        uint64_t since;   /* the wait that covers all work before the last free */
};

struct stream_pool {
        LIST_ENTRY(stream_pool) by_name;
        TAILQ_ENTRY(stream_pool) in_list; /* used or empty */
        uint32_t partition;
        uintptr_t stream;
        struct stream_part parts[STREAM_N_PARTS];
        size_t n_allocs;              /* including waiting ones */
        struct stream_ending *ending; /* NULL: the stream has not ended */
        bool is_empty;
        struct stream_stats stats;
};

TAILQ_HEAD(stream_pool_list, stream_pool);

/* All pools of a client. */
struct stream_pool_set {
        struct stream_tracker tracker;
        LIST_HEAD(, stream_pool) buckets[STREAM_BUCKETS];
        struct stream_pool_list used, empty;
        size_t n_used, n_empty;
        struct stream_slabs owned, leaving;
        _Atomic uint64_t **shown; /* by partition: where idle bytes are published */
        _Atomic uint64_t unseen;
};

int stream_pool_set_init(struct stream_pool_set *sp,
                         const struct stream_pools_options *options); /* -ENOMEM */
void stream_pool_set_clear(struct stream_pool_set *sp);
int stream_pool_set_check(const struct stream_pool_set *sp, const char **ret_why);

/* Adds n_bytes to the idle bytes of the pools; subtracts by wrapping around. */
void stream_pools_count_idle(struct stream_pool_set *sp, uint32_t partition, uint64_t n_bytes);

struct stream_pool *stream_pool_find(const struct stream_pool_set *sp, uint32_t partition, uintptr_t stream);
int stream_pool_get(struct stream_pool_set *sp, uint32_t partition, uintptr_t stream,
                    struct stream_pool **ret); /* -ENOMEM */
/* Frees what an empty pool or part does not need, after its allocations or slabs have changed. May free
 * the pool. */
void stream_pool_update(struct stream_pool_set *sp, struct stream_pool *pool);
/* Releases idle slabs whose work is complete. May free the pool. */
void stream_pool_look(struct stream_pool_set *sp, struct stream_pool *pool);
/* Its stream has ended without an event. -ENOMEM: nothing has changed. May free the pool. */
int stream_pool_lose(struct stream_pool_set *sp, struct stream_pool *pool);
/* True: it has a slab that would leave if its stream's work were complete. */
bool stream_pool_has_idle(const struct stream_pool *pool);
void stream_pool_count_alloc(struct stream_pool *pool, uint64_t n_bytes);

/* The pool owns the slab; NULL: no pool does. */
void stream_pool_add_slab(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
                          struct stream_slab *slab);
void stream_slab_leave(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
                       struct stream_slab *slab);
/* A part's cache has the slab's address as the id of the block. */
struct stream_slab *stream_slab_of(uint64_t cookie);

/* -ENOMEM. */
int stream_part_add(struct stream_part *part, struct stream_slab *slab);
/* Records a mark after each idle slab, as far as possible now. */
void stream_part_mark(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part);

#endif
