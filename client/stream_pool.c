/* Pools of streams; see stream_pool.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pool has two parts, for work and for captures. In the second, places are free only when
 * no work touches them. A part's cache says by stamps which of
 * its slabs became idle when; a mark is an event with the stamp up to which it counts. Marks
 * are in order. When they are MARKS, the last is recorded anew for the slabs that come behind,
 * which is later, so it counts for its own too.
 *
 * A pool that holds nothing rests: it is figures only, of at most MAX_RESTING, the longest
 * ago forgotten first. One whose stream has ended waits for one event, and then goes. Lives that
 * the stream used wait for the same event.
 *
 * Invariants: a pool rests exactly while it has no life and no slab; a part has a cache exactly
 * while it has slabs; the marks of a part have rising stamps. */
#include "client/stream_pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define BUCKETS      256u
#define MARKS        8u
#define MAX_RESTING  64u
#define MAX_CAPTURES 16u
#define MAX_KNOWN    4096u

enum { WORK, CAPTURE, N_PARTS };

/* ---- what there is ------------------------------------------------------- */

struct mark {
        uint64_t upto;
        struct device_event *event;
        bool is_lost; /* there is no such stream: all work is to be waited for */
        bool is_done; /* no work goes on */
};

/* Of a stream that is no more: all its work. */
struct ending {
        unsigned n_refs;
        struct mark mark;
};

struct part {
        struct cache *cache;
        size_t n_slabs;
        struct mark marks[MARKS];
        unsigned n_marks;
};

struct stream_pool {
        LIST_ENTRY(stream_pool) by_name;
        TAILQ_ENTRY(stream_pool) in_list; /* busy or resting */
        uint32_t partition;
        uintptr_t stream;
        struct part parts[N_PARTS];
        size_t n_lives;        /* with those that wait */
        struct ending *ending; /* NULL: the stream has not ended */
        bool is_resting;
        struct stream_stats stats;
};

struct use {
        uintptr_t stream;
        struct ending *ending; /* NULL: the stream has not ended */
        struct mark mark;      /* else; upto != 0: it was recorded */
};

struct stream_life {
        LIST_ENTRY(stream_life) in_all;
        TAILQ_ENTRY(stream_life) waiting;
        struct stream_pool *pool; /* NULL: alien */
        struct part *part;        /* whose cache the block is of; NULL: it is its slab */
        struct stream_slab *slab; /* where it is */
        struct block block;       /* in part->cache */
        uint32_t partition;
        struct use *uses;
        size_t n_uses, n_room;
};

TAILQ_HEAD(pool_list, stream_pool);

struct capture {
        uint32_t partition;
        uintptr_t stream;
};

/* A stream that a call has named, and that has not ended since. */
struct known {
        LIST_ENTRY(known) by_name;
        TAILQ_ENTRY(known) in_all;
        uint32_t partition;
        uintptr_t stream;
};

struct stream_pools {
        struct stream_pools_options options;
        struct device_streams **devices; /* by partition; NULL: not opened yet */
        LIST_HEAD(, stream_pool) buckets[BUCKETS];
        struct pool_list busy, resting;
        size_t n_busy, n_resting;
        TAILQ_HEAD(, stream_life) waiting;
        size_t n_waiting;
        LIST_HEAD(, stream_life) lives; /* all of them */
        struct stream_slabs held, leaving;
        _Atomic uint64_t **shown; /* by partition: where it is told what lies idle */
        _Atomic uint64_t unseen;
        struct capture captures[MAX_CAPTURES];
        unsigned n_captures;
        LIST_HEAD(, known) known_by_name[BUCKETS];
        TAILQ_HEAD(, known) known; /* the longest ago first */
        size_t n_known;
        bool may_wait;     /* who looks, for all work */
        bool *is_finished; /* by partition: who looks has waited for all work there */
};

int stream_pools_new(const struct stream_pools_options *options, struct stream_pools **ret)
{
        struct stream_pools *sp = calloc(1, sizeof(*sp));

        if (sp) {
                sp->devices = calloc(options->n_partitions + 1, sizeof(struct device_streams *));
                sp->shown = calloc(options->n_partitions + 1, sizeof(*sp->shown));
                sp->is_finished = calloc(options->n_partitions + 1, sizeof(*sp->is_finished));
        }
        if (!sp || !sp->devices || !sp->shown || !sp->is_finished) {
                if (sp) {
                        free(sp->is_finished);
                        free(sp->devices);
                        free(sp->shown);
                }
                free(sp);
                return -ENOMEM;
        }
        for (uint32_t i = 0; i < options->n_partitions; i++)
                sp->shown[i] = &sp->unseen;
        sp->options = *options;
        TAILQ_INIT(&sp->busy);
        TAILQ_INIT(&sp->resting);
        TAILQ_INIT(&sp->waiting);
        TAILQ_INIT(&sp->known);
        *ret = sp;
        return 0;
}

void stream_pools_show(struct stream_pools *sp, uint32_t partition, _Atomic uint64_t *word)
{
        sp->shown[partition] = word;
}

/* Of what the pools hold so much more is in nobody's use; or less: it wraps around. */
static void count_idle(struct stream_pools *sp, uint32_t partition, uint64_t n_bytes)
{
        pages_add(sp->shown[partition], n_bytes);
}

static struct device_streams *device_of(const struct stream_pools *sp, uint32_t partition)
{
        return sp->devices[partition];
}

/* ---- marks ---------------------------------------------------------------- */

static void mark_forget(struct stream_pools *sp, uint32_t partition, struct mark *m)
{
        *m = (struct mark){ .event = device_event_forget(device_of(sp, partition), m->event) };
}

/* 0: it is recorded, or counts as passed, or will be when all work is done. Else it is as it was:
 * -EBUSY (captured), -ENOMEM, -EAGAIN: later. -EINVAL: there is no such stream. */
static int mark_try(struct stream_pools *sp, uint32_t partition, uintptr_t stream, uint64_t upto,
                    struct mark *m)
{
        int r = device_event_record(device_of(sp, partition), stream, &m->event);

        if (r < 0 && r != -ENODEV && r != -EIO)
                return r;
        m->upto = upto;
        m->is_done = r < 0;
        m->is_lost = false;
        return 0;
}

/* A stream of which nobody has just spoken may be gone; of each thread's own only that
 * thread can speak. */
static int mark_record(struct stream_pools *sp, uint32_t partition, uintptr_t stream, uint64_t upto,
                       struct mark *m)
{
        int r = mark_try(sp, partition, stream, upto, m);

        if (r != -EINVAL)
                return r;
        m->upto = upto;
        m->is_lost = true;
        m->is_done = false;
        return 0;
}

/* Once for all that is looked at: what waits was freed before, so its work had been given by then. */
static bool finish(struct stream_pools *sp, uint32_t partition, uint64_t region_id)
{
        if (!sp->is_finished[partition] && sp->may_wait && !stream_pools_are_captured(sp, partition))
                sp->is_finished[partition] = sp->options.finish(sp->options.userdata, region_id) == 0;
        return sp->is_finished[partition];
}

/* 1: not yet. 0: no work up to there goes on. -ESTALE: it is no mark; record it. */
static int mark_query(struct stream_pools *sp, uint32_t partition, uint64_t region_id, struct mark *m)
{
        int r;

        if (m->is_done)
                return 0;
        if (m->is_lost)
                return finish(sp, partition, region_id) ? 0 : 1;
        r = device_event_query(device_of(sp, partition), m->event);
        if (r == -ESTALE)
                return r;
        if (r == -EINVAL) /* the driver forgot it: only all work can be waited for */
                m->is_lost = true;
        return r == 0 || r == -ENODEV || r == -EIO ? 0 : 1;
}

/* ---- streams that are known, and that have ended ------------------------------ */

static unsigned bucket_of(uint32_t partition, uintptr_t stream)
{
        uint64_t hash = ((uint64_t)stream ^ ((uint64_t)partition << 56)) * UINT64_C(0x9e3779b97f4a7c15);

        return (unsigned)(hash >> 56) % BUCKETS;
}

static struct known *known_find(const struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        struct known *k;

        LIST_FOREACH(k, &sp->known_by_name[bucket_of(partition, stream)], by_name)
        if (k->partition == partition && k->stream == stream)
                return k;
        return NULL;
}

static void known_drop(struct stream_pools *sp, struct known *k)
{
        if (!k)
                return;
        LIST_REMOVE(k, by_name);
        TAILQ_REMOVE(&sp->known, k, in_all);
        sp->n_known--;
        free(k);
}

/* Without memory for it the stream is known from its next call on. */
static void known_add(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        struct known *k = known_find(sp, partition, stream);

        if (k)
                return;
        k = malloc(sizeof(*k));
        if (!k)
                return;
        *k = (struct known){ .partition = partition, .stream = stream };
        LIST_INSERT_HEAD(&sp->known_by_name[bucket_of(partition, stream)], k, by_name);
        TAILQ_INSERT_TAIL(&sp->known, k, in_all);
        if (++sp->n_known > MAX_KNOWN)
                known_drop(sp, TAILQ_FIRST(&sp->known));
}

static void note_capture(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        for (unsigned i = 0; i < sp->n_captures; i++)
                if (sp->captures[i].partition == partition && sp->captures[i].stream == stream)
                        return;
        if (sp->n_captures < MAX_CAPTURES)
                sp->captures[sp->n_captures++] = (struct capture){ partition, stream };
}

/* One that was destroyed without a word is not asked again. */
bool stream_pools_are_captured(struct stream_pools *sp, uint32_t partition)
{
        const struct device_view *places = sp->options.places;
        struct known *k, *next;
        int r;

        for (k = TAILQ_FIRST(&sp->known); k; k = next) {
                next = TAILQ_NEXT(k, in_all);
                if (places[k->partition].is_cuda != places[partition].is_cuda)
                        continue;
                r = device_stream_is_captured(device_of(sp, k->partition), k->stream);
                if (r > 0) {
                        note_capture(sp, k->partition, k->stream);
                        return true;
                }
                if (r == -EINVAL)
                        known_drop(sp, k);
        }
        return false;
}

/* Where no event can tell of it all work is waited for. */
static struct ending *ending_new_lost(void)
{
        struct ending *e = calloc(1, sizeof(*e));

        if (e)
                *e = (struct ending){ .n_refs = 1, .mark = { .upto = 1, .is_lost = true } };
        return e;
}

static struct ending *ending_put(struct stream_pools *sp, uint32_t partition, struct ending *e)
{
        if (e && --e->n_refs == 0) {
                mark_forget(sp, partition, &e->mark);
                free(e);
        }
        return NULL;
}

/* It cannot be recorded once more. */
static bool ending_is_done(struct stream_pools *sp, uint32_t partition, uint64_t region_id, struct ending *e)
{
        int r = mark_query(sp, partition, region_id, &e->mark);

        if (r == -ESTALE)
                e->mark.is_lost = true;
        if (r == 0)
                e->mark.is_done = true;
        return r == 0;
}

/* ---- pools ---------------------------------------------------------------- */

static struct stream_pool *pool_find(const struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        struct stream_pool *pool;

        LIST_FOREACH(pool, &sp->buckets[bucket_of(partition, stream)], by_name)
        if (pool->partition == partition && pool->stream == stream)
                return pool;
        return NULL;
}

static void part_clear(struct stream_pools *sp, struct stream_pool *pool, struct part *part)
{
        for (unsigned i = 0; i < MARKS; i++)
                mark_forget(sp, pool->partition, &part->marks[i]);
        part->n_marks = 0;
        part->cache = cache_free(part->cache);
}

static void pool_free(struct stream_pools *sp, struct stream_pool *pool)
{
        for (int i = 0; i < N_PARTS; i++)
                part_clear(sp, pool, &pool->parts[i]);
        if (!pool->ending)
                LIST_REMOVE(pool, by_name);
        ending_put(sp, pool->partition, pool->ending);
        TAILQ_REMOVE(pool->is_resting ? &sp->resting : &sp->busy, pool, in_list);
        *(pool->is_resting ? &sp->n_resting : &sp->n_busy) -= 1;
        free(pool);
}

static int pool_get(struct stream_pools *sp, uint32_t partition, uintptr_t stream, struct stream_pool **ret)
{
        struct stream_pool *pool = pool_find(sp, partition, stream);

        if (!pool) {
                pool = calloc(1, sizeof(*pool));
                if (!pool)
                        return -ENOMEM;
                pool->partition = partition;
                pool->stream = stream;
                pool->is_resting = true;
                TAILQ_INSERT_TAIL(&sp->resting, pool, in_list);
                sp->n_resting++;
                LIST_INSERT_HEAD(&sp->buckets[bucket_of(partition, stream)], pool, by_name);
        }
        *ret = pool;
        return 0;
}

static bool pool_holds_nothing(const struct stream_pool *pool)
{
        return pool->n_lives == 0 && pool->parts[WORK].n_slabs == 0 && pool->parts[CAPTURE].n_slabs == 0;
}

/* Whether it rests follows from what it has. It may be gone afterwards. */
static void pool_settle(struct stream_pools *sp, struct stream_pool *pool)
{
        bool rests = pool_holds_nothing(pool);

        for (int i = 0; i < N_PARTS; i++)
                if (pool->parts[i].n_slabs == 0)
                        part_clear(sp, pool, &pool->parts[i]);
        if (rests && pool->ending) {
                pool_free(sp, pool);
                return;
        }
        if (rests != pool->is_resting) {
                TAILQ_REMOVE(pool->is_resting ? &sp->resting : &sp->busy, pool, in_list);
                pool->is_resting = rests;
                TAILQ_INSERT_TAIL(rests ? &sp->resting : &sp->busy, pool, in_list);
                sp->n_resting += rests ? 1 : (size_t)-1;
                sp->n_busy += rests ? (size_t)-1 : 1;
        }
        if (sp->n_resting > MAX_RESTING)
                pool_free(sp, TAILQ_FIRST(&sp->resting));
}

/* The slab is the pool's; NULL: nobody's. */
static void pool_take(struct stream_pools *sp, uint32_t partition, struct stream_pool *pool,
                      struct stream_slab *slab)
{
        LIST_INSERT_HEAD(&sp->held, slab, next);
        count_idle(sp, partition, slab->block.n_bytes);
        if (!pool)
                return;
        pool->stats.bytes_reserved += slab->block.n_bytes;
        if (pool->stats.bytes_reserved > pool->stats.peak_bytes_reserved)
                pool->stats.peak_bytes_reserved = pool->stats.bytes_reserved;
}

static void count_alloc(struct stream_pool *pool, uint64_t n_bytes)
{
        struct stream_stats *s = &pool->stats;

        s->num_allocs++;
        s->bytes_in_use += n_bytes;
        if (s->bytes_in_use > s->peak_bytes_in_use)
                s->peak_bytes_in_use = s->bytes_in_use;
        if (n_bytes > s->largest_alloc_size)
                s->largest_alloc_size = n_bytes;
}

/* ---- slabs that become idle, and leave ------------------------------------- */

static void slab_leaves(struct stream_pools *sp, uint32_t partition, struct stream_pool *pool,
                        struct stream_slab *slab)
{
        count_idle(sp, partition, -slab->block.n_bytes);
        if (pool)
                pool->stats.bytes_reserved -= slab->block.n_bytes;
        LIST_REMOVE(slab, next);
        LIST_INSERT_HEAD(&sp->leaving, slab, next);
}

static struct stream_slab *slab_of(uint64_t cookie)
{
        return (struct stream_slab *)(uintptr_t)cookie;
}

static void part_drop_first(struct part *part)
{
        struct mark first = part->marks[0];

        memmove(part->marks, part->marks + 1, (MARKS - 1) * sizeof(part->marks[0]));
        part->marks[MARKS - 1] = (struct mark){ .event = first.event }; /* to be used again */
        part->n_marks--;
}

/* False: it could not be done, for want of memory. */
static bool part_release(struct stream_pools *sp, struct stream_pool *pool, struct part *part, uint64_t upto)
{
        uint64_t cookie, n_bytes;
        struct cache_idle idle;

        for (;;) {
                cache_look_idle(part->cache, 0, &idle);
                if (idle.first == 0 || idle.first > upto)
                        return true;
                if (cache_take_idle(part->cache, 0, 1, &cookie, 1, &n_bytes) == 0)
                        return false;
                part->n_slabs--;
                slab_leaves(sp, pool->partition, pool, slab_of(cookie));
        }
}

/* A mark behind each idle slab, as far as one can be recorded now. Marks of slabs that were taken
 * again count for nothing. */
static void part_mark(struct stream_pools *sp, struct stream_pool *pool, struct part *part)
{
        struct cache_idle idle;
        unsigned i;

        if (!part->cache || pool->ending)
                return;
        cache_look_idle(part->cache, 0, &idle);
        while (part->n_marks > 0 && (idle.first == 0 || part->marks[0].upto < idle.first))
                part_drop_first(part);
        if (idle.last == 0 || (part->n_marks > 0 && part->marks[part->n_marks - 1].upto >= idle.last))
                return;
        i = part->n_marks < MARKS ? part->n_marks : MARKS - 1;
        if (mark_record(sp, pool->partition, pool->stream, idle.last, &part->marks[i]) == 0)
                part->n_marks = i + 1;
}

static void part_look(struct stream_pools *sp, struct stream_pool *pool, struct part *part)
{
        struct cache_idle idle;

        part_mark(sp, pool, part);
        while (part->n_marks > 0) {
                struct mark *m = &part->marks[0];
                int r;

                cache_look_idle(part->cache, 0, &idle);
                r = mark_query(sp, pool->partition, slab_of(idle.first_block_id)->block.region_id, m);
                if (r > 0 || (r == 0 && !part_release(sp, pool, part, m->upto)))
                        break;
                part_drop_first(part);
                part_mark(sp, pool, part);
        }
}

/* Of a stream that has ended all idle slabs leave when its last work is done. */
static void part_look_ended(struct stream_pools *sp, struct stream_pool *pool, struct part *part)
{
        struct cache_idle idle;

        cache_look_idle(part->cache, 0, &idle);
        if (idle.first > 0 &&
            ending_is_done(sp, pool->partition, slab_of(idle.first_block_id)->block.region_id, pool->ending))
                part_release(sp, pool, part, UINT64_MAX);
}

/* The pool may be gone afterwards. */
static void pool_look(struct stream_pools *sp, struct stream_pool *pool)
{
        for (int i = 0; i < N_PARTS; i++) {
                struct part *part = &pool->parts[i];

                if (part->cache && pool->ending)
                        part_look_ended(sp, pool, part);
                else if (part->cache)
                        part_look(sp, pool, part);
        }
        pool_settle(sp, pool);
}

/* ---- lives ---------------------------------------------------------------- */

/* All but the first so many. */
static void life_forget_uses(struct stream_pools *sp, struct stream_life *life, size_t n_kept)
{
        while (life->n_uses > n_kept) {
                struct use *use = &life->uses[--life->n_uses];

                mark_forget(sp, life->partition, &use->mark);
                ending_put(sp, life->partition, use->ending);
        }
}

static void life_free(struct stream_pools *sp, struct stream_life *life)
{
        life_forget_uses(sp, life, 0);
        LIST_REMOVE(life, in_all);
        free(life->uses);
        free(life);
}

/* Its place is free. */
static void life_end(struct stream_pools *sp, struct stream_life *life)
{
        struct stream_pool *pool = life->pool;

        if (life->part) {
                cache_dealloc(&life->block);
                part_mark(sp, pool, life->part);
        } else {
                slab_leaves(sp, life->partition, pool, life->slab);
        }
        life_free(sp, life);
        if (pool) {
                pool->n_lives--;
                pool_settle(sp, pool);
        }
}

static uint64_t life_bytes(const struct stream_life *life)
{
        return life->part ? life->block.n_bytes : life->slab->block.n_bytes;
}

static void life_begin(struct stream_pools *sp, struct stream_life *life, struct stream_pool *pool)
{
        life->pool = pool;
        LIST_INSERT_HEAD(&sp->lives, life, in_all);
        if (!pool)
                return;
        pool->n_lives++;
        count_alloc(pool, life_bytes(life));
        count_idle(sp, life->partition, -life_bytes(life));
        pool_settle(sp, pool);
}

static int part_start(struct part *part)
{
        struct cache_sizes sizes = { .idle_bytes = UINT64_MAX }; /* it is never asked what it wants */

        return part->cache ? 0 : cache_new(&sizes, 1, &part->cache);
}

static int part_add(struct part *part, struct stream_slab *slab)
{
        const struct block *b = &slab->block;
        struct cache_given given = {
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

/* From a part that may be new; slab: NULL, or one that is added. */
static int pool_alloc(struct stream_pools *sp, struct stream_pool *pool, struct part *part, uint64_t n_bytes,
                      struct stream_slab *slab, struct stream_life **ret)
{
        struct stream_life *life = calloc(1, sizeof(*life));
        int r = life ? 0 : -ENOMEM;

        if (r == 0 && slab)
                r = part_add(part, slab);
        if (r < 0) {
                free(life);
                pool_settle(sp, pool);
                return r;
        }
        if (slab)
                pool_take(sp, pool->partition, pool, slab);
        r = part->cache ? cache_alloc(part->cache, 0, n_bytes, &life->block) : CACHE_MISS;
        part_mark(sp, pool, part); /* the new slab, if another had room */
        if (r != 0) {
                free(life);
                pool_settle(sp, pool);
                return slab && r == -ENOMEM ? CACHE_MISS : r;
        }
        life->part = part;
        life->partition = pool->partition;
        life_begin(sp, life, pool);
        *ret = life;
        return 0;
}

int stream_pools_alloc(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                       uint64_t n_bytes, struct stream_life **ret)
{
        struct stream_pool *pool = pool_find(sp, partition, stream);

        if (!pool)
                return CACHE_MISS;
        return pool_alloc(sp, pool, &pool->parts[is_captured ? CAPTURE : WORK], n_bytes, NULL, ret);
}

int stream_pools_alloc_with(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_captured,
                            uint64_t n_bytes, struct stream_slab *slab, struct stream_life **ret)
{
        struct stream_pool *pool;
        int r = pool_get(sp, partition, stream, &pool);

        return r < 0 ? r
                     : pool_alloc(sp, pool, &pool->parts[is_captured ? CAPTURE : WORK], n_bytes, slab, ret);
}

int stream_pools_alloc_whole(struct stream_pools *sp, uint32_t partition, uintptr_t stream, bool is_alien,
                             struct stream_slab *slab, struct stream_life **ret)
{
        struct stream_life *life = calloc(1, sizeof(*life));
        struct stream_pool *pool = NULL;
        int r = life ? 0 : -ENOMEM;

        if (r == 0 && !is_alien)
                r = pool_get(sp, partition, stream, &pool);
        if (r < 0) {
                free(life);
                return r;
        }
        life->slab = slab;
        life->partition = partition;
        pool_take(sp, partition, pool, slab);
        life_begin(sp, life, pool);
        *ret = life;
        return 0;
}

static const struct stream_slab *life_slab(const struct stream_life *life)
{
        return life->part ? slab_of(life->block.block_id) : life->slab;
}

void stream_life_block(const struct stream_life *life, struct block *ret)
{
        const struct block *in = &life_slab(life)->block;

        *ret = life->part ? life->block : *in;
        ret->block_id = 0; /* see stream_life_block_id() */
        ret->partition = in->partition;
        ret->slab = NULL;
        ret->handle = 0;
}

uint64_t stream_life_block_id(const struct stream_life *life)
{
        const struct block *in = &life_slab(life)->block;

        return in->slab ? cache_block_id(in) : in->block_id;
}

uint64_t stream_life_offset(const struct stream_life *life)
{
        const struct block *in = &life_slab(life)->block;

        return (life->part ? life->block.offset - in->offset : 0) + (in->slab ? cache_offset(in) : 0);
}

uint32_t stream_life_partition(const struct stream_life *life)
{
        return life->partition;
}

void stream_life_undo(struct stream_pools *sp, struct stream_life *life)
{
        if (life->pool) {
                life->pool->stats.num_allocs--;
                life->pool->stats.bytes_in_use -= life_bytes(life);
                count_idle(sp, life->partition, life_bytes(life));
        }
        life_end(sp, life);
}

void stream_life_drop(struct stream_pools *sp, struct stream_life *life)
{
        LIST_REMOVE(life->slab, next);
        count_idle(sp, life->partition, -life->slab->block.n_bytes);
        life_free(sp, life);
}

/* ---- giving back ---------------------------------------------------------- */

static int use_new(struct stream_life *life, uintptr_t stream, struct use **ret)
{
        if (life->n_uses == life->n_room) {
                size_t n_room = life->n_room ? life->n_room * 2 : 2;
                struct use *uses = realloc(life->uses, n_room * sizeof(*uses));

                if (!uses)
                        return -ENOMEM;
                life->uses = uses;
                life->n_room = n_room;
        }
        life->uses[life->n_uses] = (struct use){ .stream = stream };
        *ret = &life->uses[life->n_uses++];
        return 0;
}

static struct use *use_find(const struct stream_life *life, uintptr_t stream)
{
        for (size_t i = 0; i < life->n_uses; i++)
                if (life->uses[i].stream == stream && !life->uses[i].ending)
                        return &life->uses[i];
        return NULL;
}

static int use_add(struct stream_life *life, uintptr_t stream, struct use **ret)
{
        *ret = use_find(life, stream);
        return *ret ? 0 : use_new(life, stream, ret);
}

/* Whether this stream's own order is enough for who comes next. Not for a capture: its graph may
 * run in another stream. */
static bool life_is_home(const struct stream_life *life, uintptr_t stream)
{
        return life->part && life->part == &life->pool->parts[WORK] && stream == life->pool->stream &&
               !life->pool->ending;
}

int stream_life_record(struct stream_pools *sp, struct stream_life *life, uintptr_t stream)
{
        struct use *use;

        (void)sp;
        return life_is_home(life, stream) ? 0 : use_add(life, stream, &use);
}

static bool is_per_thread(const struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        return sp->options.places[partition].is_cuda && stream == DEVICE_STREAM_PER_THREAD;
}

bool stream_pools_can(const struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        return !is_per_thread(sp, partition, stream);
}

/* True: no work goes on there that was given before the free. */
static bool use_look(struct stream_pools *sp, const struct stream_life *life, struct use *use)
{
        uint64_t region_id = life_slab(life)->block.region_id;
        int r;

        if (use->ending)
                return ending_is_done(sp, life->partition, region_id, use->ending);
        if (use->mark.upto == 0 && is_per_thread(sp, life->partition, use->stream)) {
                use->mark.upto = 1; /* nobody but that thread could record */
                use->mark.is_lost = true;
        }
        if (use->mark.upto == 0 && mark_record(sp, life->partition, use->stream, 1, &use->mark) < 0)
                return false;
        r = mark_query(sp, life->partition, region_id, &use->mark);
        if (r == -ESTALE)
                use->mark.upto = 0;
        else if (r == 0)
                use->mark.is_done = true;
        return r == 0;
}

static bool life_look(struct stream_pools *sp, struct stream_life *life)
{
        for (size_t i = 0; i < life->n_uses; i++)
                if (!use_look(sp, life, &life->uses[i]))
                        return false;
        return !life->pool || life->part == &life->pool->parts[WORK] || !life->pool->ending ||
               ending_is_done(sp, life->partition, life_slab(life)->block.region_id, life->pool->ending);
}

static void life_count_free(struct stream_pools *sp, struct stream_life *life, bool waits)
{
        uint64_t n_bytes = life_bytes(life);

        if (!life->pool)
                return;
        life->pool->stats.num_frees++;
        life->pool->stats.bytes_in_use -= n_bytes;
        life->pool->stats.bytes_pending += waits ? n_bytes : 0;
        count_idle(sp, life->partition, n_bytes);
}

/* The streams whose events have to pass; *ret_use: that of the one that frees, NULL: none. Where
 * its own stream's order does not count, that is one of them. */
static int life_add_uses(struct stream_life *life, uintptr_t stream, struct use **ret_use)
{
        struct use *use;
        int r = 0;

        *ret_use = NULL;
        if (life->pool && life->part != &life->pool->parts[WORK] && !life->pool->ending)
                r = use_add(life, life->pool->stream, &use);
        if (r == 0 && !life_is_home(life, stream))
                r = use_add(life, stream, ret_use);
        return r;
}

static void life_wait(struct stream_pools *sp, struct stream_life *life)
{
        life_count_free(sp, life, true);
        TAILQ_INSERT_TAIL(&sp->waiting, life, waiting);
        sp->n_waiting++;
}

int stream_life_free(struct stream_pools *sp, struct stream_life *life, uintptr_t stream)
{
        size_t n_before = life->n_uses;
        struct use *use;
        int r = life_add_uses(life, stream, &use);

        if (r == 0 && use && mark_try(sp, life->partition, stream, 1, &use->mark) == -EINVAL) {
                life_forget_uses(sp, life, n_before);
                r = -EINVAL;
        }
        if (r < 0)
                return r;
        if (life->n_uses == 0) {
                stream_life_free_done(sp, life);
                return 0;
        }
        for (size_t i = 0; i < life->n_uses; i++) {
                struct use *u = &life->uses[i];

                if (u != use && !u->ending && !is_per_thread(sp, life->partition, u->stream))
                        mark_record(sp, life->partition, u->stream, 1, &u->mark);
        }
        life_wait(sp, life);
        return 0;
}

int stream_life_put_aside(struct stream_pools *sp, struct stream_life *life)
{
        struct ending *ending = ending_new_lost();
        struct use *use;
        int r = ending ? use_new(life, 0, &use) : -ENOMEM;

        if (r < 0) {
                free(ending);
                return r;
        }
        *use = life->uses[0]; /* the others say nothing more than that */
        life->uses[0] = (struct use){ .ending = ending };
        life_forget_uses(sp, life, 1);
        life_wait(sp, life);
        return 0;
}

void stream_life_free_done(struct stream_pools *sp, struct stream_life *life)
{
        life_count_free(sp, life, false);
        life_end(sp, life);
}

/* ---- looking round ---------------------------------------------------------- */

int stream_pools_look_at(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        int r;

        if (!sp->devices[partition]) {
                r = device_streams_new(&sp->options.places[partition], &sp->devices[partition]);
                if (r < 0)
                        return r;
        }
        r = device_stream_is_captured(device_of(sp, partition), stream);
        if (r >= 0)
                known_add(sp, partition, stream);
        if (r > 0)
                note_capture(sp, partition, stream);
        return r;
}

bool stream_pools_captures_go_on(struct stream_pools *sp)
{
        for (unsigned i = 0; i < sp->n_captures;) {
                const struct capture *c = &sp->captures[i];

                if (device_stream_is_captured(device_of(sp, c->partition), c->stream) > 0)
                        i++;
                else
                        sp->captures[i] = sp->captures[--sp->n_captures];
        }
        return sp->n_captures > 0;
}

static void look_at_lives(struct stream_pools *sp, size_t max)
{
        size_t n = sp->n_waiting < max ? sp->n_waiting : max;

        for (; n > 0; n--) {
                struct stream_life *life = TAILQ_FIRST(&sp->waiting);

                TAILQ_REMOVE(&sp->waiting, life, waiting);
                if (life_look(sp, life)) {
                        sp->n_waiting--;
                        if (life->pool)
                                life->pool->stats.bytes_pending -= life_bytes(life);
                        life_end(sp, life);
                } else {
                        TAILQ_INSERT_TAIL(&sp->waiting, life, waiting);
                }
        }
}

void stream_pools_look(struct stream_pools *sp, size_t max_lives, size_t max_pools, bool may_wait)
{
        size_t n = sp->n_busy < max_pools ? sp->n_busy : max_pools;

        if (stream_pools_captures_go_on(sp))
                return;
        sp->may_wait = may_wait;
        memset(sp->is_finished, 0, sp->options.n_partitions * sizeof(*sp->is_finished));
        look_at_lives(sp, max_lives);
        for (; n > 0 && sp->n_busy > 0; n--) {
                struct stream_pool *pool = TAILQ_FIRST(&sp->busy);

                TAILQ_REMOVE(&sp->busy, pool, in_list);
                TAILQ_INSERT_TAIL(&sp->busy, pool, in_list);
                pool_look(sp, pool);
        }
}

/* Whether it has a slab that would leave if its stream's work were done. */
static bool pool_waits(const struct stream_pool *pool)
{
        struct cache_idle idle = { 0 };

        for (int i = 0; i < N_PARTS && idle.first == 0; i++)
                if (pool->parts[i].cache)
                        cache_look_idle(pool->parts[i].cache, 0, &idle);
        return idle.first > 0;
}

bool stream_pools_is_pending(const struct stream_pools *sp)
{
        const struct stream_pool *pool;

        if (sp->n_waiting > 0)
                return true;
        TAILQ_FOREACH(pool, &sp->busy, in_list)
        if (pool_waits(pool))
                return true;
        return false;
}

bool stream_pools_wait(struct stream_pools *sp)
{
        return !stream_pools_captures_go_on(sp) && stream_pools_is_pending(sp);
}

void stream_pools_take_leaving(struct stream_pools *sp, struct stream_slabs *ret)
{
        struct stream_slab *slab;

        LIST_INIT(ret);
        while ((slab = LIST_FIRST(&sp->leaving))) {
                LIST_REMOVE(slab, next);
                LIST_INSERT_HEAD(ret, slab, next);
        }
}

/* From now on it is not asked whether it is being captured. */
static void forget_stream(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        known_drop(sp, known_find(sp, partition, stream));
        for (unsigned i = 0; i < sp->n_captures;) {
                const struct capture *c = &sp->captures[i];

                if (c->partition == partition && c->stream == stream)
                        sp->captures[i] = sp->captures[--sp->n_captures];
                else
                        i++;
        }
}

/* From now on the event is what lives wait for that the stream has used. Returns how many there are. */
static size_t end_uses(struct stream_pools *sp, uint32_t partition, uintptr_t stream, struct ending *ending)
{
        struct stream_life *life;
        struct use *use;
        size_t n = 0;

        LIST_FOREACH(life, &sp->lives, in_all)
        {
                use = life->partition == partition ? use_find(life, stream) : NULL;
                if (!use)
                        continue;
                n++;
                if (!ending)
                        continue;
                mark_forget(sp, partition, &use->mark);
                use->ending = ending;
                ending->n_refs++;
        }
        return n;
}

int stream_pools_end_stream(struct stream_pools *sp, uint32_t partition, uintptr_t stream)
{
        struct stream_pool *pool = pool_find(sp, partition, stream);
        struct ending *ending;
        int r;

        /* A thread's own is the same number in every thread. */
        if (is_per_thread(sp, partition, stream) || (!pool && end_uses(sp, partition, stream, NULL) == 0)) {
                forget_stream(sp, partition, stream);
                return -ENOENT;
        }
        ending = calloc(1, sizeof(*ending));
        if (!ending)
                return -ENOMEM;
        ending->n_refs = 1;
        r = mark_record(sp, partition, stream, 1, &ending->mark);
        if (r < 0) {
                ending_put(sp, partition, ending);
                return r;
        }
        forget_stream(sp, partition, stream);
        end_uses(sp, partition, stream, ending);
        if (pool) {
                LIST_REMOVE(pool, by_name);
                pool->ending = ending; /* and its reference */
                pool_settle(sp, pool);
        } else {
                ending_put(sp, partition, ending);
        }
        return 0;
}

/* ---- figures ---------------------------------------------------------------- */

int stream_pools_stats(const struct stream_pools *sp, uint32_t partition, uintptr_t stream,
                       struct stream_stats *ret)
{
        const struct stream_pool *pool = pool_find(sp, partition, stream);

        if (!pool)
                return -ENOENT;
        *ret = pool->stats;
        return 0;
}

void stream_pools_reset_peaks(struct stream_pools *sp)
{
        struct pool_list *const lists[] = { &sp->busy, &sp->resting };
        struct stream_pool *pool;

        for (int i = 0; i < 2; i++) {
                TAILQ_FOREACH(pool, lists[i], in_list)
                {
                        pool->stats.peak_bytes_in_use = pool->stats.bytes_in_use;
                        pool->stats.peak_bytes_reserved = pool->stats.bytes_reserved;
                }
        }
}

static const char *part_check(const struct part *part)
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

int stream_pools_check(const struct stream_pools *sp, const char **ret_why)
{
        const struct pool_list *const lists[] = { &sp->busy, &sp->resting };
        const struct stream_pool *pool;
        const char *why = NULL;
        size_t n[2] = { 0 };

        for (int i = 0; i < 2; i++) {
                TAILQ_FOREACH(pool, lists[i], in_list)
                {
                        n[i]++;
                        if (pool->is_resting != (i == 1) || pool_holds_nothing(pool) != (i == 1))
                                why = "a pool's state does not match its contents";
                        for (int k = 0; k < N_PARTS && !why; k++)
                                why = part_check(&pool->parts[k]);
                }
        }
        if (n[0] != sp->n_busy || n[1] != sp->n_resting || n[1] > MAX_RESTING)
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

struct stream_pools *stream_pools_free(struct stream_pools *sp)
{
        struct stream_pool *pool;
        struct stream_life *life;

        if (!sp)
                return NULL;
        while ((life = LIST_FIRST(&sp->lives)))
                life_free(sp, life);
        while ((pool = TAILQ_FIRST(&sp->busy)) || (pool = TAILQ_FIRST(&sp->resting)))
                pool_free(sp, pool);
        while (!TAILQ_EMPTY(&sp->known))
                known_drop(sp, TAILQ_FIRST(&sp->known));
        slabs_free(&sp->held);
        slabs_free(&sp->leaving);
        for (uint32_t i = 0; i < sp->options.n_partitions; i++)
                device_streams_free(sp->devices[i]);
        free(sp->is_finished);
        free(sp->devices);
        free(sp->shown);
        free(sp);
        return NULL;
}
