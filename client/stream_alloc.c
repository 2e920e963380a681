/* Allocations on streams; see stream_alloc.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_alloc.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

struct use {
        uintptr_t stream;
        struct stream_ending *ending; /* NULL: the stream has not ended */
        struct stream_mark mark;      /* else this; upto != 0: it was recorded */
};

struct stream_alloc {
        LIST_ENTRY(stream_alloc) in_all;
        TAILQ_ENTRY(stream_alloc) waiting;
        struct stream_pool *pool; /* NULL: of no stream */
        struct stream_part *part; /* whose cache cut the block; NULL: it is all of its slab */
        struct stream_slab *slab; /* where it is */
        struct block block;       /* in part->cache */
        uint32_t partition;
        uint64_t since; /* freed: the wait that covers all work before that */
        struct use *uses;
        size_t n_uses, n_room;
};

struct stream_pools {
        struct stream_pool_set set;
        TAILQ_HEAD(, stream_alloc) waiting;
        size_t n_waiting;
        LIST_HEAD(, stream_alloc) allocs; /* all of them */
};

int stream_pools_new(const struct stream_pools_options *options, struct stream_pools **ret)
{
        struct stream_pools *sp = calloc(1, sizeof(*sp));

        if (!sp)
                return -ENOMEM;
        TAILQ_INIT(&sp->waiting);
        if (stream_pool_set_init(&sp->set, options) < 0) {
                stream_pools_free(sp);
                return -ENOMEM;
        }
        *ret = sp;
        return 0;
}

void stream_pools_show(struct stream_pools *sp, uint32_t partition, _Atomic uint64_t *word)
{
        sp->set.shown[partition] = word;
}

/* Forgets all but the first so many. */
static void forget_uses(struct stream_pools *sp, struct stream_alloc *alloc, size_t n_kept)
{
        while (alloc->n_uses > n_kept) {
                struct use *use = &alloc->uses[--alloc->n_uses];

                stream_mark_forget(&sp->set.tracker, alloc->partition, &use->mark);
                stream_ending_put(&sp->set.tracker, alloc->partition, use->ending);
        }
}

static void alloc_free(struct stream_pools *sp, struct stream_alloc *alloc)
{
        forget_uses(sp, alloc, 0);
        LIST_REMOVE(alloc, in_all);
        free(alloc->uses);
        free(alloc);
}

/* Frees its place. */
static void alloc_end(struct stream_pools *sp, struct stream_alloc *alloc)
{
        struct stream_pool *pool = alloc->pool;

        if (alloc->part) {
                cache_dealloc(&alloc->block);
                stream_part_mark(&sp->set, pool, alloc->part);
        } else {
                stream_slab_leave(&sp->set, alloc->partition, pool, alloc->slab);
        }
        alloc_free(sp, alloc);
        if (pool) {
                pool->n_allocs--;
                stream_pool_update(&sp->set, pool);
        }
}

static uint64_t alloc_bytes(const struct stream_alloc *alloc)
{
        return alloc->part ? alloc->block.n_bytes : alloc->slab->block.n_bytes;
}

static void alloc_begin(struct stream_pools *sp, struct stream_alloc *alloc, struct stream_pool *pool)
{
        alloc->pool = pool;
        LIST_INSERT_HEAD(&sp->allocs, alloc, in_all);
        if (!pool)
                return;
        pool->n_allocs++;
        stream_pool_count_alloc(pool, alloc_bytes(alloc));
        stream_pools_count_idle(&sp->set, alloc->partition, -alloc_bytes(alloc));
        stream_pool_update(&sp->set, pool);
}

/* ---- allocating --------------------------------------------------------------- */

/* From a part that may be new; slab: NULL, or one that is added. */
static int pool_alloc(struct stream_pools *sp, struct stream_pool *pool, struct stream_part *part,
                      uint64_t n_bytes, struct stream_slab *slab, struct stream_alloc **ret)
{
        struct stream_alloc *alloc = calloc(1, sizeof(*alloc));
        int r = alloc ? 0 : -ENOMEM;

        if (r == 0 && slab)
                r = stream_part_add(part, slab);
        if (r < 0) {
                free(alloc);
                stream_pool_update(&sp->set, pool);
                return r;
        }
        if (slab)
                stream_pool_add_slab(&sp->set, pool->partition, pool, slab);
        r = part->cache ? cache_alloc(part->cache, 0, n_bytes, &alloc->block) : CACHE_MISS;
        stream_part_mark(&sp->set, pool, part); /* the new slab, if another had room */
        if (r != 0) {
                free(alloc);
                stream_pool_update(&sp->set, pool);
                return slab && r == -ENOMEM ? CACHE_MISS : r;
        }
        alloc->part = part;
        alloc->partition = pool->partition;
        alloc_begin(sp, alloc, pool);
        *ret = alloc;
        return 0;
}

int stream_pools_alloc(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                       uint64_t n_bytes, struct stream_alloc **ret)
{
        struct stream_pool *pool = stream_pool_find(&sp->set, partition, stream);

        if (!pool)
                return CACHE_MISS;
        return pool_alloc(sp, pool, &pool->parts[is_captured ? STREAM_CAPTURE : STREAM_WORK], n_bytes, NULL,
                          ret);
}

int stream_pools_alloc_with(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                            uint64_t n_bytes, struct stream_slab *slab, struct stream_alloc **ret)
{
        struct stream_pool *pool;
        int r = stream_pool_get(&sp->set, partition, stream, &pool);

        return r < 0 ? r
                     : pool_alloc(sp, pool, &pool->parts[is_captured ? STREAM_CAPTURE : STREAM_WORK], n_bytes,
                                  slab, ret);
}

int stream_pools_alloc_whole(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_alien,
                             struct stream_slab *slab, struct stream_alloc **ret)
{
        struct stream_alloc *alloc = calloc(1, sizeof(*alloc));
        struct stream_pool *pool = NULL;
        int r = alloc ? 0 : -ENOMEM;

        if (r == 0 && !is_alien)
                r = stream_pool_get(&sp->set, partition, stream, &pool);
        if (r < 0) {
                free(alloc);
                return r;
        }
        alloc->slab = slab;
        alloc->partition = partition;
        stream_pool_add_slab(&sp->set, partition, pool, slab);
        alloc_begin(sp, alloc, pool);
        *ret = alloc;
        return 0;
}

static const struct stream_slab *alloc_slab(const struct stream_alloc *alloc)
{
        return alloc->part ? stream_slab_of(alloc->block.block_id) : alloc->slab;
}

void stream_alloc_block(const struct stream_alloc *alloc, struct block *ret)
{
        const struct block *in = &alloc_slab(alloc)->block;

        *ret = alloc->part ? alloc->block : *in;
        ret->block_id = 0; /* see stream_alloc_block_id() */
        ret->partition = in->partition;
        ret->slab = NULL;
        ret->is_slab = false;
        ret->handle = 0;
}

uint64_t stream_alloc_block_id(const struct stream_alloc *alloc)
{
        const struct block *in = &alloc_slab(alloc)->block;

        return in->slab ? cache_block_id(in) : in->block_id;
}

uint64_t stream_alloc_offset(const struct stream_alloc *alloc)
{
        const struct block *in = &alloc_slab(alloc)->block;

        return (alloc->part ? alloc->block.offset - in->offset : 0) + (in->slab ? cache_offset(in) : 0);
}

uint32_t stream_alloc_partition(const struct stream_alloc *alloc)
{
        return alloc->partition;
}

void stream_alloc_undo(struct stream_pools *sp, struct stream_alloc *alloc)
{
        if (alloc->pool) {
                alloc->pool->stats.num_allocs--;
                alloc->pool->stats.bytes_in_use -= alloc_bytes(alloc);
                stream_pools_count_idle(&sp->set, alloc->partition, alloc_bytes(alloc));
        }
        alloc_end(sp, alloc);
}

void stream_alloc_drop(struct stream_pools *sp, struct stream_alloc *alloc)
{
        LIST_REMOVE(alloc->slab, next);
        stream_pools_count_idle(&sp->set, alloc->partition, -alloc->slab->block.n_bytes);
        alloc_free(sp, alloc);
}

/* ---- freeing ------------------------------------------------------------------ */

static int use_new(struct stream_alloc *alloc, uintptr_t stream, struct use **ret)
{
        if (alloc->n_uses == alloc->n_room) {
                size_t n_room = alloc->n_room ? alloc->n_room * 2 : 2;
                struct use *uses = realloc(alloc->uses, n_room * sizeof(*uses));

                if (!uses)
                        return -ENOMEM;
                alloc->uses = uses;
                alloc->n_room = n_room;
        }
        alloc->uses[alloc->n_uses] = (struct use){ .stream = stream };
        *ret = &alloc->uses[alloc->n_uses++];
        return 0;
}

static struct use *use_find(const struct stream_alloc *alloc, uintptr_t stream)
{
        for (size_t i = 0; i < alloc->n_uses; i++)
                if (alloc->uses[i].stream == stream && !alloc->uses[i].ending)
                        return &alloc->uses[i];
        return NULL;
}

static int use_add(struct stream_alloc *alloc, uintptr_t stream, struct use **ret)
{
        *ret = use_find(alloc, stream);
        return *ret ? 0 : use_new(alloc, stream, ret);
}

/* The stream's own order is enough for the next user. Not for a capture: its graph may run in another stream.
 * */
static bool is_ordered(const struct stream_alloc *alloc, uintptr_t stream)
{
        return alloc->part && alloc->part == &alloc->pool->parts[STREAM_WORK] &&
               stream == alloc->pool->stream && !alloc->pool->ending;
}

int stream_alloc_record(struct stream_alloc *alloc, uintptr_t stream)
{
        struct use *use;

        return is_ordered(alloc, stream) ? 0 : use_add(alloc, stream, &use);
}

bool stream_pools_can(const struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        return !stream_tracker_is_per_thread(&sp->set.tracker, partition, stream);
}

/* True: the work that was given before the free is done. */
static bool use_look(struct stream_pools *sp, const struct stream_alloc *alloc, struct use *use)
{
        const struct stream_slab *slab = alloc_slab(alloc);
        int r;

        if (use->ending)
                return stream_ending_query(&sp->set.tracker, alloc->partition, slab, use->ending);
        if (use->mark.upto == 0 &&
            stream_tracker_is_per_thread(&sp->set.tracker, alloc->partition, use->stream)) {
                use->mark.upto = 1; /* only that thread could record */
                use->mark.is_lost = true;
                use->mark.since = alloc->since;
        }
        if (use->mark.upto == 0 &&
            stream_mark_record(&sp->set.tracker, alloc->partition, use->stream, 1, &use->mark) < 0)
                return !stream_tracker_can_use(&sp->set.tracker, alloc->partition, use->stream) &&
                       stream_tracker_finish(&sp->set.tracker, alloc->partition, slab, STREAM_WAIT_ALL,
                                             alloc->since);
        r = stream_mark_query(&sp->set.tracker, alloc->partition, slab, &use->mark);
        if (r == -ESTALE)
                use->mark.upto = 0;
        else if (r == 0)
                use->mark.is_done = true;
        return r == 0;
}

static bool alloc_look(struct stream_pools *sp, struct stream_alloc *alloc)
{
        for (size_t i = 0; i < alloc->n_uses; i++)
                if (!use_look(sp, alloc, &alloc->uses[i]))
                        return false;
        return !alloc->pool || alloc->part == &alloc->pool->parts[STREAM_WORK] || !alloc->pool->ending ||
               stream_ending_query(&sp->set.tracker, alloc->partition, alloc_slab(alloc),
                                   alloc->pool->ending);
}

static void count_free(struct stream_pools *sp, struct stream_alloc *alloc, bool waits)
{
        uint64_t n_bytes = alloc_bytes(alloc);

        if (!alloc->pool)
                return;
        alloc->pool->stats.num_frees++;
        alloc->pool->stats.bytes_in_use -= n_bytes;
        alloc->pool->stats.bytes_pending += waits ? n_bytes : 0;
        stream_pools_count_idle(&sp->set, alloc->partition, n_bytes);
}

/* The streams whose events have to pass; *ret_use: that of the freeing stream, NULL: none. If its own
 * stream's order does not count, that is one of them. */
static int add_uses(struct stream_alloc *alloc, uintptr_t stream, struct use **ret_use)
{
        struct use *use;
        int r = 0;

        *ret_use = NULL;
        if (alloc->pool && alloc->part != &alloc->pool->parts[STREAM_WORK] && !alloc->pool->ending)
                r = use_add(alloc, alloc->pool->stream, &use);
        if (r == 0 && !is_ordered(alloc, stream))
                r = use_add(alloc, stream, ret_use);
        return r;
}

static void alloc_wait(struct stream_pools *sp, struct stream_alloc *alloc)
{
        count_free(sp, alloc, true);
        alloc->since = sp->set.tracker.next_wait;
        TAILQ_INSERT_TAIL(&sp->waiting, alloc, waiting);
        sp->n_waiting++;
}

int stream_alloc_free(struct stream_pools *sp, struct stream_alloc *alloc, uintptr_t stream)
{
        size_t n_before = alloc->n_uses;
        struct use *use;
        int r = add_uses(alloc, stream, &use);

        if (r == 0 && use &&
            stream_mark_try(&sp->set.tracker, alloc->partition, stream, 1, &use->mark) == -EINVAL) {
                forget_uses(sp, alloc, n_before);
                r = -EINVAL;
        }
        if (r < 0)
                return r;
        if (alloc->part) {
                alloc->part->is_unmarked = true;
                alloc->part->since = sp->set.tracker.next_wait;
        }
        if (alloc->n_uses == 0) {
                stream_alloc_free_done(sp, alloc);
                return 0;
        }
        for (size_t i = 0; i < alloc->n_uses; i++) {
                struct use *u = &alloc->uses[i];

                if (u != use && !u->ending &&
                    !stream_tracker_is_per_thread(&sp->set.tracker, alloc->partition, u->stream))
                        stream_mark_record(&sp->set.tracker, alloc->partition, u->stream, 1, &u->mark);
        }
        alloc_wait(sp, alloc);
        return 0;
}

int stream_alloc_put_aside(struct stream_pools *sp, struct stream_alloc *alloc)
{
        struct stream_ending *ending = stream_ending_new(&sp->set.tracker, NULL);
        struct use *use;
        int r = ending ? use_new(alloc, 0, &use) : -ENOMEM;

        if (r < 0) {
                free(ending);
                return r;
        }
        ending->mark.is_aside = true;
        *use = alloc->uses[0]; /* which includes all others */
        alloc->uses[0] = (struct use){ .ending = ending };
        forget_uses(sp, alloc, 1);
        alloc_wait(sp, alloc);
        return 0;
}

void stream_alloc_free_done(struct stream_pools *sp, struct stream_alloc *alloc)
{
        count_free(sp, alloc, false);
        alloc_end(sp, alloc);
}

/* ---- checking streams --------------------------------------------------------- */

/* A stream has ended, or must be dropped. Its events count, and without one all work. -ENOMEM: call it
 * again. */
static int lose_stream(struct stream_pools *sp, const struct stream_key *key)
{
        struct stream_pool *pool = stream_pool_find(&sp->set, key->partition, key->stream);
        struct stream_alloc *alloc;

        LIST_FOREACH(alloc, &sp->allocs, in_all)
        {
                struct use *use = alloc->partition == key->partition ? use_find(alloc, key->stream) : NULL;

                if (!use)
                        continue;
                use->ending = stream_ending_new(&sp->set.tracker, &use->mark);
                if (!use->ending)
                        return -ENOMEM;
        }
        if (pool && stream_pool_lose(&sp->set, pool) < 0)
                return -ENOMEM;
        stream_tracker_forget(&sp->set.tracker, key->partition, key->stream);
        return 0;
}

/* If the driver fails in another way than by not knowing the stream, none of its work may run, which an
 * event shows. */
int stream_pools_look_at(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_permanent)
{
        const struct stream_key named = { partition, stream };
        struct stream_key ended;
        uint64_t id;
        int r = stream_tracker_look_at(&sp->set.tracker, partition, stream, &id);

        if (r == -EINVAL)
                return r;
        while (stream_tracker_find_ended(&sp->set.tracker, partition, stream, id, &ended))
                if (lose_stream(sp, &ended) < 0)
                        return -ENOBUFS;
        return stream_tracker_name(&sp->set.tracker, &named, id, r > 0, is_permanent) < 0 ? -ENOBUFS : r;
}

void stream_pools_unname(struct stream_pools *sp)
{
        stream_tracker_unname(&sp->set.tracker);
}

bool stream_pools_check_captured(struct stream_pools *sp, uint32_t partition)
{
        return stream_tracker_check_captured(&sp->set.tracker, partition);
}

static void look_at_allocs(struct stream_pools *sp, size_t max)
{
        size_t n = sp->n_waiting < max ? sp->n_waiting : max;

        for (; n > 0; n--) {
                struct stream_alloc *alloc = TAILQ_FIRST(&sp->waiting);

                TAILQ_REMOVE(&sp->waiting, alloc, waiting);
                if (alloc_look(sp, alloc)) {
                        sp->n_waiting--;
                        if (alloc->pool)
                                alloc->pool->stats.bytes_pending -= alloc_bytes(alloc);
                        alloc_end(sp, alloc);
                } else {
                        TAILQ_INSERT_TAIL(&sp->waiting, alloc, waiting);
                }
        }
}

void stream_pools_look(struct stream_pools *sp, size_t max_allocs, size_t max_pools, enum stream_wait wait)
{
        size_t n = sp->set.n_used < max_pools ? sp->set.n_used : max_pools;

        if (stream_tracker_check_captures(&sp->set.tracker))
                return;
        stream_tracker_begin(&sp->set.tracker, wait);
        look_at_allocs(sp, max_allocs);
        for (; n > 0 && sp->set.n_used > 0; n--) {
                struct stream_pool *pool = TAILQ_FIRST(&sp->set.used);

                TAILQ_REMOVE(&sp->set.used, pool, in_list);
                TAILQ_INSERT_TAIL(&sp->set.used, pool, in_list);
                stream_pool_look(&sp->set, pool);
        }
}

bool stream_pools_is_pending(const struct stream_pools *sp)
{
        const struct stream_pool *pool;

        if (sp->n_waiting > 0)
                return true;
        TAILQ_FOREACH(pool, &sp->set.used, in_list)
        if (stream_pool_has_idle(pool))
                return true;
        return false;
}

bool stream_pools_check_pending(struct stream_pools *sp)
{
        return !stream_tracker_check_captures(&sp->set.tracker) && stream_pools_is_pending(sp);
}

void stream_pools_take_leaving(struct stream_pools *sp, struct stream_slabs *ret)
{
        struct stream_slab *slab, *next;

        LIST_INIT(ret);
        for (slab = LIST_FIRST(&sp->set.leaving); slab; slab = next) {
                next = LIST_NEXT(slab, next);
                if (stream_tracker_keeps(&sp->set.tracker, slab))
                        continue;
                LIST_REMOVE(slab, next);
                LIST_INSERT_HEAD(ret, slab, next);
        }
}

bool stream_pools_begin_wait(struct stream_pools *sp, uint64_t *ret)
{
        const struct stream_tracker *t = &sp->set.tracker;

        for (uint32_t i = 0; i < t->options.n_partitions; i++)
                if (t->finishes[i].slab) {
                        *ret = sp->set.tracker.next_wait++;
                        return true;
                }
        return false;
}

bool stream_pools_is_wanted(struct stream_pools *sp, uint32_t partition, uint64_t *ret_region_id)
{
        struct stream_finish *f = &sp->set.tracker.finishes[partition];

        if (f->slab && stream_tracker_check_captured(&sp->set.tracker, partition))
                f->slab = NULL; /* later */
        if (f->slab)
                *ret_region_id = f->slab->block.region_id;
        return f->slab;
}

void stream_pools_end_wait(struct stream_pools *sp, uint32_t partition, uint64_t wait, bool is_done)
{
        struct stream_finish *f = &sp->set.tracker.finishes[partition];

        f->slab = NULL;
        if (is_done)
                f->upto = wait;
}

/* Allocations that the stream has used wait for this event from now on. Returns how many there are. */
static size_t end_uses(struct stream_pools *sp, uint32_t partition, uintptr_t stream,
                       struct stream_ending *ending)
{
        struct stream_alloc *alloc;
        struct use *use;
        size_t n = 0;

        LIST_FOREACH(alloc, &sp->allocs, in_all)
        {
                use = alloc->partition == partition ? use_find(alloc, stream) : NULL;
                if (!use)
                        continue;
                n++;
                if (!ending)
                        continue;
                stream_mark_forget(&sp->set.tracker, partition, &use->mark);
                use->ending = ending;
                ending->n_refs++;
        }
        return n;
}

int stream_pools_end_stream(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        struct stream_pool *pool;
        struct stream_ending *ending;
        int r;

        if (!stream_tracker_knows(&sp->set.tracker, partition, stream))
                return -ENOENT;
        if (stream_pools_look_at(sp, partition, stream, false) == -ENOBUFS)
                return -ENOMEM;
        pool = stream_pool_find(&sp->set, partition, stream);
        /* The number for a thread's own stream is the same in every thread. */
        if (stream_tracker_is_per_thread(&sp->set.tracker, partition, stream) ||
            (!pool && end_uses(sp, partition, stream, NULL) == 0)) {
                stream_tracker_forget(&sp->set.tracker, partition, stream);
                return -ENOENT;
        }
        ending = calloc(1, sizeof(*ending));
        if (!ending)
                return -ENOMEM;
        ending->n_refs = 1;
        r = stream_mark_record(&sp->set.tracker, partition, stream, 1, &ending->mark);
        if (r < 0) {
                stream_ending_put(&sp->set.tracker, partition, ending);
                return r;
        }
        stream_tracker_forget(&sp->set.tracker, partition, stream);
        end_uses(sp, partition, stream, ending);
        if (pool) {
                LIST_REMOVE(pool, by_name);
                pool->ending = ending; /* and its reference */
                stream_pool_update(&sp->set, pool);
        } else {
                stream_ending_put(&sp->set.tracker, partition, ending);
        }
        return 0;
}

/* ---- statistics ----------------------------------------------------------------- */

int stream_pools_stats(const struct stream_pools *sp, uint32_t partition, uintptr_t stream,
                       struct stream_stats *ret)
{
        const struct stream_pool *pool = stream_pool_find(&sp->set, partition, stream);

        if (!pool)
                return -ENOENT;
        *ret = pool->stats;
        return 0;
}

void stream_pools_reset_peaks(struct stream_pools *sp)
{
        struct stream_pool_list *const lists[] = { &sp->set.used, &sp->set.empty };
        struct stream_pool *pool;

        for (int i = 0; i < 2; i++) {
                TAILQ_FOREACH(pool, lists[i], in_list)
                {
                        pool->stats.peak_bytes_in_use = pool->stats.bytes_in_use;
                        pool->stats.peak_bytes_reserved = pool->stats.bytes_reserved;
                }
        }
}

int stream_pools_check(const struct stream_pools *sp, const char **ret_why)
{
        return stream_pool_set_check(&sp->set, ret_why);
}

struct stream_pools *stream_pools_free(struct stream_pools *sp)
{
        struct stream_alloc *alloc;

        if (!sp)
                return NULL;
        while ((alloc = LIST_FIRST(&sp->allocs)))
                alloc_free(sp, alloc);
        stream_pool_set_clear(&sp->set);
        free(sp);
        return NULL;
}
