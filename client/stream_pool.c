/* Pools of streams; see stream_pool.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_EMPTY 64u

int stream_pool_set_init(struct stream_pool_set *sp, const struct stream_pools_options *options)
{
        TAILQ_INIT(&sp->used);
        TAILQ_INIT(&sp->empty);
        sp->shown = calloc(options->n_partitions + 1, sizeof(*sp->shown));
        for (uint32_t i = 0; sp->shown && i < options->n_partitions; i++)
                sp->shown[i] = &sp->unseen;
        return stream_tracker_init(&sp->tracker, options) < 0 || !sp->shown ? -ENOMEM : 0;
}

struct stream_slab *stream_slab_of(uint64_t cookie)
{
        return (struct stream_slab *)(uintptr_t)cookie;
}

void stream_pools_count_idle(struct stream_pool_set *sp, uint32_t partition, uint64_t n_bytes)
{
        pages_add(sp->shown[partition], n_bytes);
}

struct stream_pool *stream_pool_find(const struct stream_pool_set *sp, uint32_t partition, uintptr_t stream)
{
        struct stream_pool *pool;

        LIST_FOREACH(pool, &sp->buckets[stream_bucket(partition, stream)], by_name)
        if (pool->partition == partition && pool->stream == stream)
                return pool;
        return NULL;
}

static void part_clear(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
{
        for (unsigned i = 0; i < STREAM_MARKS; i++)
                stream_mark_forget(&sp->tracker, pool->partition, &part->marks[i]);
        part->n_marks = 0;
        part->is_unmarked = false;
        part->cache = cache_free(part->cache);
}

static void stream_pool_free(struct stream_pool_set *sp, struct stream_pool *pool)
{
        for (int i = 0; i < STREAM_N_PARTS; i++)
                part_clear(sp, pool, &pool->parts[i]);
        if (!pool->ending)
                LIST_REMOVE(pool, by_name);
        stream_ending_put(&sp->tracker, pool->partition, pool->ending);
        TAILQ_REMOVE(pool->is_empty ? &sp->empty : &sp->used, pool, in_list);
        *(pool->is_empty ? &sp->n_empty : &sp->n_used) -= 1;
        free(pool);
}

int stream_pool_get(struct stream_pool_set *sp, uint32_t partition, uintptr_t stream,
                    struct stream_pool **ret)
{
        struct stream_pool *pool = stream_pool_find(sp, partition, stream);

        if (!pool) {
                pool = calloc(1, sizeof(*pool));
                if (!pool)
                        return -ENOMEM;
                pool->partition = partition;
                pool->stream = stream;
                pool->is_empty = true;
                TAILQ_INSERT_TAIL(&sp->empty, pool, in_list);
                sp->n_empty++;
                LIST_INSERT_HEAD(&sp->buckets[stream_bucket(partition, stream)], pool, by_name);
        }
        *ret = pool;
        return 0;
}

static bool stream_pool_is_empty(const struct stream_pool *pool)
{
        return pool->n_allocs == 0 && pool->parts[STREAM_WORK].n_slabs == 0 &&
               pool->parts[STREAM_CAPTURE].n_slabs == 0;
}

void stream_pool_update(struct stream_pool_set *sp, struct stream_pool *pool)
{
        bool is_empty = stream_pool_is_empty(pool);

        for (int i = 0; i < STREAM_N_PARTS; i++)
                if (pool->parts[i].n_slabs == 0)
                        part_clear(sp, pool, &pool->parts[i]);
        if (is_empty && pool->ending) {
                stream_pool_free(sp, pool);
                return;
        }
        if (is_empty != pool->is_empty) {
                TAILQ_REMOVE(pool->is_empty ? &sp->empty : &sp->used, pool, in_list);
                pool->is_empty = is_empty;
                TAILQ_INSERT_TAIL(is_empty ? &sp->empty : &sp->used, pool, in_list);
                sp->n_empty += is_empty ? 1 : (size_t)-1;
                sp->n_used += is_empty ? (size_t)-1 : 1;
        }
        if (sp->n_empty > MAX_EMPTY)
                stream_pool_free(sp, TAILQ_FIRST(&sp->empty));
}

void stream_pool_add_slab(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
                          struct stream_slab *slab)
{
        LIST_INSERT_HEAD(&sp->owned, slab, next);
        stream_pools_count_idle(sp, partition, slab->block.n_bytes);
        if (!pool)
                return;
        pool->stats.bytes_reserved += slab->block.n_bytes;
        if (pool->stats.bytes_reserved > pool->stats.peak_bytes_reserved)
                pool->stats.peak_bytes_reserved = pool->stats.bytes_reserved;
}

void stream_pool_count_alloc(struct stream_pool *pool, uint64_t n_bytes)
{
        struct stream_stats *s = &pool->stats;

        s->num_allocs++;
        s->bytes_in_use += n_bytes;
        if (s->bytes_in_use > s->peak_bytes_in_use)
                s->peak_bytes_in_use = s->bytes_in_use;
        if (n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = n_bytes;
}

/* ---- idle slabs ------------------------------------------------------------- */

void stream_slab_leave(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
                       struct stream_slab *slab)
{
        stream_pools_count_idle(sp, partition, -slab->block.n_bytes);
        if (pool)
                pool->stats.bytes_reserved -= slab->block.n_bytes;
        LIST_REMOVE(slab, next);
        LIST_INSERT_HEAD(&sp->leaving, slab, next);
}

static void part_drop_first(struct stream_part *part)
{
        struct stream_mark first = part->marks[0];

        memmove(part->marks, part->marks + 1, (STREAM_MARKS - 1) * sizeof(part->marks[0]));
        part->marks[STREAM_MARKS - 1] = (struct stream_mark){ .event = first.event }; /* to be used again */
        part->n_marks--;
}

/* False: there was no memory for it. */
static bool part_release(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part,
                         uint64_t upto)
{
        uint64_t cookie, n_bytes;
        struct cache_idle idle;

        for (;;) {
                cache_look_idle(part->cache, 0, &idle);
                if (idle.first == 0 || idle.first > upto)
                        return true;
                if (cache_take_idle(part->cache, 0, NULL, 1, &cookie, 1, &n_bytes) == 0)
                        return false;
                part->n_slabs--;
                stream_slab_leave(sp, pool->partition, pool, stream_slab_of(cookie));
        }
}

/* Marks of slabs that were used again do not count. The work before the last of them may be incomplete. */
static void part_drop_old(struct stream_part *part, const struct cache_idle *idle)
{
        while (part->n_marks > 0 && (idle->first == 0 || part->marks[0].upto < idle->first)) {
                part_drop_first(part);
                if (part->n_marks == 0)
                        part->is_unmarked = true;
        }
}

static bool part_is_covered(const struct stream_part *part, const struct cache_idle *idle)
{
        return idle->last == 0 || (part->n_marks > 0 && part->marks[part->n_marks - 1].upto >= idle->last);
}

void stream_part_mark(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
{
        struct cache_idle idle;
        unsigned i;

        if (!part->cache || pool->ending)
                return;
        cache_look_idle(part->cache, 0, &idle);
        part_drop_old(part, &idle);
        if (part_is_covered(part, &idle))
                return;
        if (!part->is_unmarked && part->n_marks > 0) {
                part->marks[part->n_marks - 1].upto = idle.last;
                return;
        }
        i = part->n_marks < STREAM_MARKS ? part->n_marks : STREAM_MARKS - 1;
        if (!part->is_unmarked)
                stream_mark_set_done(&part->marks[i], idle.last);
        else if (stream_mark_record(&sp->tracker, pool->partition, pool->stream, idle.last, &part->marks[i]) <
                 0)
                return;
        part->n_marks = i + 1;
        part->is_unmarked = false;
}

/* Without events, which the stream did not get: all work is waited for. */
static void part_finish(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
{
        struct cache_idle idle;

        cache_look_idle(part->cache, 0, &idle);
        if (part_is_covered(part, &idle) ||
            stream_tracker_can_use(&sp->tracker, pool->partition, pool->stream))
                return;
        if (!stream_tracker_finish(&sp->tracker, pool->partition, stream_slab_of(idle.first_block_id),
                                   STREAM_WAIT_ALL, part->since))
                return;
        while (part->n_marks > 0)
                part_drop_first(part);
        part->is_unmarked = !part_release(sp, pool, part, idle.last);
}

static void part_look(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
{
        struct cache_idle idle;

        stream_part_mark(sp, pool, part);
        while (part->n_marks > 0) {
                struct stream_mark *m = &part->marks[0];
                int r;

                cache_look_idle(part->cache, 0, &idle);
                r = stream_mark_query(&sp->tracker, pool->partition, stream_slab_of(idle.first_block_id), m);
                if (r > 0 || (r == 0 && !part_release(sp, pool, part, m->upto)))
                        break;
                part->is_unmarked |= r < 0;
                part_drop_first(part);
                stream_part_mark(sp, pool, part);
        }
        part_finish(sp, pool, part);
}

/* All idle slabs of a stream that has ended leave when its last work is done. */
static void part_look_ended(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
{
        struct cache_idle idle;

        cache_look_idle(part->cache, 0, &idle);
        if (idle.first > 0 && stream_ending_query(&sp->tracker, pool->partition,
                                                  stream_slab_of(idle.first_block_id), pool->ending))
                part_release(sp, pool, part, UINT64_MAX);
}

void stream_pool_look(struct stream_pool_set *sp, struct stream_pool *pool)
{
        for (int i = 0; i < STREAM_N_PARTS; i++) {
                struct stream_part *part = &pool->parts[i];

                if (part->cache && pool->ending)
                        part_look_ended(sp, pool, part);
                else if (part->cache)
                        part_look(sp, pool, part);
        }
        stream_pool_update(sp, pool);
}

/* If all is idle, the newest event tells when the work is complete. */
int stream_pool_lose(struct stream_pool_set *sp, struct stream_pool *pool)
{
        struct stream_part *part = &pool->parts[STREAM_WORK];
        bool has_event = pool->n_allocs == 0 && !part->is_unmarked && part->n_marks > 0;
        struct stream_ending *ending =
                stream_ending_new(&sp->tracker, has_event ? &part->marks[part->n_marks - 1] : NULL);

        if (!ending)
                return -ENOMEM;
        part->n_marks -= has_event;
        LIST_REMOVE(pool, by_name);
        pool->ending = ending;
        stream_pool_update(sp, pool);
        return 0;
}

static int part_start(struct stream_part *part)
{
        struct cache_sizes sizes = { .idle_bytes = UINT64_MAX }; /* cache_want() is not used */

        return part->cache ? 0 : cache_new(&sizes, 1, &part->cache);
}

int stream_part_add(struct stream_part *part, struct stream_slab *slab)
{
        const struct block *b = &slab->block;
        struct cache_grant given = {
                (uint64_t)(uintptr_t)slab, b->region_id, slab->region_bytes, b->offset, b->n_bytes,
                (void *)(uintptr_t)b->ptr
        };
        int r = part_start(part);

        if (r == 0)
                r = cache_add(part->cache, 0, &given);
        if (r == 0)
                part->n_slabs++;
        return r;
}

bool stream_pool_has_idle(const struct stream_pool *pool)
{
        struct cache_idle idle = { 0 };

        for (int i = 0; i < STREAM_N_PARTS && idle.first == 0; i++)
                if (pool->parts[i].cache)
                        cache_look_idle(pool->parts[i].cache, 0, &idle);
        return idle.first > 0;
}

static const char *stream_part_check(const struct stream_part *part)
{
        const char *why = NULL;

        if (!part->cache != (part->n_slabs == 0))
                return "a part's cache does not match its slabs";
        for (unsigned i = 1; i < part->n_marks; i++)
                if (part->marks[i].upto <= part->marks[i - 1].upto)
                        return "marks are not in order";
        if (part->cache)
                cache_check(part->cache, &why);
        return why;
}

int stream_pool_set_check(const struct stream_pool_set *sp, const char **ret_why)
{
        const struct stream_pool_list *const lists[] = { &sp->used, &sp->empty };
        const struct stream_pool *pool;
        const char *why = NULL;
        size_t n[2] = { 0 };

        for (int i = 0; i < 2; i++) {
                TAILQ_FOREACH(pool, lists[i], in_list)
                {
                        n[i]++;
                        if (pool->is_empty != (i == 1) || stream_pool_is_empty(pool) != (i == 1))
                                why = "a pool's state does not match its contents";
                        for (int k = 0; k < STREAM_N_PARTS && !why; k++)
                                why = stream_part_check(&pool->parts[k]);
                }
        }
        if (n[0] != sp->n_used || n[1] != sp->n_empty || n[1] > MAX_EMPTY)
                why = "pools are counted wrongly";
        if (!why)
                return 0;
        *ret_why = why;
        return -EBADMSG;
}

static void slabs_free(struct stream_slabs *slabs)
{
        struct stream_slab *slab;

        while ((slab = LIST_FIRST(slabs))) {
                LIST_REMOVE(slab, next);
                free(slab);
        }
}

void stream_pool_set_clear(struct stream_pool_set *sp)
{
        struct stream_pool *pool;

        while ((pool = TAILQ_FIRST(&sp->used)) || (pool = TAILQ_FIRST(&sp->empty)))
                stream_pool_free(sp, pool);
        slabs_free(&sp->owned);
        slabs_free(&sp->leaving);
        stream_tracker_clear(&sp->tracker);
        free(sp->shown);
}
