/* Memory of streams; see streams.h.
 *
 * Four layers, each over the one before: the tracker knows the work of streams; a pool has the slabs of one stream;
 * an allocation is a block in a pool; a client has pools and their lock.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/streams.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/process.h"

/* ---- the work of streams -----------------------------------------------------
 *
 * The tracker knows marks (events), captures, and streams that have ended.
 *
 * A mark is an event. When it is complete, the stream's earlier work is complete. While a stream is being
 * captured its work does not run, so no event is recorded: that is done later.
 *
 * If an event shows that the device is lost or that the process's context is broken, no work of this
 * process runs, so it counts as complete. If the driver refused for another reason the event is recorded
 * later.
 *
 * Drivers crash on the handle of a destroyed stream, and a program can destroy a stream at any time. So a
 * stream is passed to the driver only by a call that names it, unless it is permanent. Without an event
 * all work of the device is waited for, when no stream is being captured. The caller does that, without its
 * lock: a wait covers what was freed before it began. A capture that a call has seen
 * counts as going on until a later call that names the stream sees its end.
 *
 * The program can announce a stream's end: from then on one event stands for all of its work. A new stream
 * can have the number of one that ended. Its id shows that, and that the other one has ended. The id of a
 * stream that is being captured is unknown. A stream that was first named then counts as ended when the same
 * number is named with an id.
 *
 * Invariant: while a stream that has not ended has memory, it is known. */

#define STREAM_BUCKETS 256u

struct stream_mark {
        uint64_t upto;
        uint64_t since; /* is_lost: the wait that begins next covers all its work */
        struct device_event *event;
        bool is_lost;  /* there is no event: all work must be waited for */
        bool is_aside; /* is_lost because the memory was put aside */
        bool is_done;  /* no work runs */
};

/* All work of a stream that has ended. */
struct stream_ending {
        unsigned n_refs;
        struct stream_mark mark;
};

struct stream_key {
        uint32_t partition;
        uintptr_t stream;
};

/* Waits for all work of a partition's device. */
struct stream_finish {
        uint64_t upto; /* the last wait that was successful */
        const struct stream_slab
                *slab; /* to wait in its region, which it keeps; NULL: nothing asks for that */
};

struct known_stream;

struct stream_pools_options {
        const struct device_view *places; /* one for each partition; constant */
        uint32_t n_partitions;
};

struct stream_tracker {
        struct stream_pools_options options;
        struct device_streams **devices; /* by partition; NULL: not opened yet */
        LIST_HEAD(, known_stream) known_by_name[STREAM_BUCKETS];
        TAILQ_HEAD(, known_stream) known; /* the least recently used first */
        size_t n_known, n_captured;
        struct known_stream *named;     /* by the current call */
        enum stream_wait wait;          /* of this round of queries */
        struct stream_finish *finishes; /* by partition */
        uint64_t next_wait;             /* waits are numbered */
};

#define MAX_KNOWN 4096u
/* A capture of a stream that may be destroyed counts as ended so long after the last call that named the stream: the
 * driver cannot be asked, and otherwise memory would be kept for ever. */
#define CAPTURE_MS 10000

/* A stream that a call has named, and that has not ended since as far as is known. */
struct known_stream {
        LIST_ENTRY(known_stream) by_name;
        TAILQ_ENTRY(known_stream) in_all;
        struct stream_key key;
        uint64_t id; /* 0: unknown */
        bool is_permanent;
        bool is_captured;    /* when a call last named it */
        int64_t captured_ms; /* that time, if it was */
};

/* -ENOMEM */
static int stream_tracker_init(struct stream_tracker *t, const struct stream_pools_options *options)
{
        t->options = *options;
        TAILQ_INIT(&t->known);
        t->devices = calloc(options->n_partitions + 1, sizeof(struct device_streams *));
        t->finishes = calloc(options->n_partitions + 1, sizeof(*t->finishes));
        t->next_wait = 1;
        return t->devices && t->finishes ? 0 : -ENOMEM;
}

static unsigned stream_bucket(uint32_t partition, uintptr_t stream)
{
        uint64_t hash = ((uint64_t)stream ^ ((uint64_t)partition << 56)) * UINT64_C(0x9e3779b97f4a7c15);

        return (unsigned)(hash >> 56) % STREAM_BUCKETS;
}

/* The per-thread default stream: only that thread can record events in it. */
static bool stream_tracker_is_per_thread(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        return t->options.places[partition].is_cuda && stream == DEVICE_STREAM_PER_THREAD;
}

static struct device_streams *device_of(const struct stream_tracker *t, uint32_t partition)
{
        return t->devices[partition];
}

/* ---- streams that are known -------------------------------------------------- */

static struct known_stream *known_find(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        struct known_stream *k;

        LIST_FOREACH(k, &t->known_by_name[stream_bucket(partition, stream)], by_name)
        if (k->key.partition == partition && k->key.stream == stream)
                return k;
        return NULL;
}

static void set_captured(struct stream_tracker *t, struct known_stream *k, bool is_captured)
{
        t->n_captured += (size_t)is_captured - (size_t)k->is_captured;
        k->is_captured = is_captured;
        if (is_captured)
                k->captured_ms = clock_now_ms();
}

static void known_drop(struct stream_tracker *t, struct known_stream *k)
{
        if (!k)
                return;
        set_captured(t, k, false);
        if (t->named == k)
                t->named = NULL;
        LIST_REMOVE(k, by_name);
        TAILQ_REMOVE(&t->known, k, in_all);
        t->n_known--;
        free(k);
}

static struct known_stream *known_get(struct stream_tracker *t, const struct stream_key *key)
{
        struct known_stream *k = known_find(t, key->partition, key->stream);

        if (k) {
                TAILQ_REMOVE(&t->known, k, in_all);
        } else {
                k = calloc(1, sizeof(*k));
                if (!k)
                        return NULL;
                k->key = *key;
                LIST_INSERT_HEAD(&t->known_by_name[stream_bucket(key->partition, key->stream)], k, by_name);
                t->n_known++;
        }
        TAILQ_INSERT_TAIL(&t->known, k, in_all);
        return k;
}

static bool known_can_use(const struct stream_tracker *t, const struct known_stream *k)
{
        return k->is_permanent || k == t->named;
}

/* If the stream can be queried, that is done. A capture of a stream that is not permanent does not end during
 * the call that names it: its id is not known then. */
static bool known_check_captured(struct stream_tracker *t, struct known_stream *k)
{
        uint64_t id;

        if (k->is_permanent || (k == t->named && !k->is_captured))
                set_captured(
                        t, k,
                        device_stream_check_captured(device_of(t, k->key.partition), k->key.stream, &id) > 0);
        else if (k->is_captured && k != t->named && clock_now_ms() - k->captured_ms > CAPTURE_MS)
                set_captured(t, k, false);
        return k->is_captured;
}

/* Results of device_streams_new() and device_stream_check_captured(), for a stream that exists. */
static int stream_tracker_look_at(struct stream_tracker *t, uint32_t partition, uintptr_t stream,
                                  uint64_t *ret_id)
{
        int r = 0;

        *ret_id = 0;
        if (!t->devices[partition])
                r = device_streams_new(&t->options.places[partition], &t->devices[partition]);
        return r < 0 ? r : device_stream_check_captured(device_of(t, partition), stream, ret_id);
}

/* True: this stream has ended, or must be dropped, before the one with the id can be named. */
static bool stream_tracker_find_ended(const struct stream_tracker *t, uint32_t partition, uintptr_t stream,
                                      uint64_t id, struct stream_key *ret)
{
        const struct known_stream *k = known_find(t, partition, stream);

        if (k && (id == 0 || k->id == id || (k->id == 0 && k->is_permanent)))
                return false;
        if (!k && t->n_known < MAX_KNOWN)
                return false;
        *ret = k ? k->key : TAILQ_FIRST(&t->known)->key;
        return true;
}

/* The current call names the stream: it is known, and can be used until stream_pools_unname().
 * is_permanent: until it is forgotten. -ENOMEM. */
static int stream_tracker_name(struct stream_tracker *t, const struct stream_key *key, uint64_t id,
                               bool is_captured, bool is_permanent)
{
        struct known_stream *k = known_get(t, key);

        if (!k)
                return -ENOMEM;
        if (id > 0)
                k->id = id;
        if (is_permanent || key->stream <= DEVICE_STREAM_PER_THREAD ||
            (t->devices[key->partition] && t->devices[key->partition]->are_permanent))
                k->is_permanent = true;
        set_captured(t, k, is_captured);
        t->named = k;
        return 0;
}

static bool stream_tracker_knows(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        return known_find(t, partition, stream);
}

/* Whether the stream certainly exists. */
static bool stream_tracker_can_use(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        const struct known_stream *k = known_find(t, partition, stream);

        return k && t->devices[partition] && known_can_use(t, k);
}

/* A stream has ended. */
static void stream_tracker_forget(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        known_drop(t, known_find(t, partition, stream));
}

/* Whether a stream that can be used is being captured. */
static bool stream_tracker_check_captures(struct stream_tracker *t)
{
        struct known_stream *k;
        bool ret = false;

        if (t->n_captured == 0)
                return false;
        TAILQ_FOREACH(k, &t->known, in_all)
        if (k->is_captured && known_can_use(t, k))
                ret |= known_check_captured(t, k);
        return ret;
}

/* Whether a known stream may be being captured: waiting for the partition's device would invalidate the
 * capture. Checks the streams of GPUs for a GPU, and those of the host for the host. */
static bool stream_tracker_check_captured(struct stream_tracker *t, uint32_t partition)
{
        const struct device_view *places = t->options.places;
        struct known_stream *k;

        TAILQ_FOREACH(k, &t->known, in_all)
        if (places[k->key.partition].is_cuda == places[partition].is_cuda && known_check_captured(t, k))
                return true;
        return false;
}

static void stream_tracker_clear(struct stream_tracker *t)
{
        while (!TAILQ_EMPTY(&t->known))
                known_drop(t, TAILQ_FIRST(&t->known));
        for (uint32_t i = 0; t->devices && i < t->options.n_partitions; i++)
                device_streams_free(t->devices[i]);
        free(t->finishes);
        free(t->devices);
}

/* True: this wait, or a later one, has ended. If not, and if this round may, it asks for one. */
static bool stream_tracker_finish(struct stream_tracker *t, uint32_t partition,
                                  const struct stream_slab *slab, enum stream_wait wait, uint64_t since)
{
        struct stream_finish *f = &t->finishes[partition];

        if (since <= f->upto)
                return true;
        if (t->wait >= wait && !f->slab && !stream_tracker_check_captured(t, partition))
                f->slab = slab;
        return false;
}

/* Whether the slab must stay because of a wait. */
static bool stream_tracker_keeps(const struct stream_tracker *t, const struct stream_slab *slab)
{
        for (uint32_t i = 0; i < t->options.n_partitions; i++)
                if (t->finishes[i].slab == slab)
                        return true;
        return false;
}

/* ---- marks ------------------------------------------------------------------- */

static void stream_mark_forget(struct stream_tracker *t, uint32_t partition, struct stream_mark *m)
{
        *m = (struct stream_mark){ .event = device_event_forget(device_of(t, partition), m->event) };
}

/* It may be another stream than the one that had the handle before. */
static bool is_named_in_capture(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        const struct known_stream *k = known_find(t, partition, stream);

        return k && k->is_captured && !k->is_permanent;
}

/* 0: it is recorded, or counts as complete. Otherwise it is unchanged: -EBUSY (captured), -ENOMEM,
 * -EAGAIN (also if the stream cannot be used): later. -EINVAL: it is no stream of this device. */
static int stream_mark_try(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                           struct stream_mark *m)
{
        int r;

        if (!stream_tracker_can_use(t, partition, stream))
                return -EAGAIN;
        if (is_named_in_capture(t, partition, stream))
                return -EBUSY;
        r = device_event_record(device_of(t, partition), stream, &m->event);
        if (r < 0 && r != -ENODEV && r != -EIO)
                return r;
        m->upto = upto;
        m->is_done = r < 0;
        m->is_lost = false;
        return 0;
}

/* stream_mark_try(); if it is no stream of this device, all work must be waited for. */
static int stream_mark_record(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                              struct stream_mark *m)
{
        int r = stream_mark_try(t, partition, stream, upto, m);

        if (r != -EINVAL)
                return r;
        m->upto = upto;
        m->since = t->next_wait;
        m->is_lost = true;
        m->is_done = false;
        return 0;
}

/* No work has to be complete. */
static void stream_mark_set_done(struct stream_mark *m, uint64_t upto)
{
        m->upto = upto;
        m->is_done = true;
        m->is_lost = false;
}

static void mark_lose(const struct stream_tracker *t, struct stream_mark *m)
{
        m->is_lost = true;
        m->since = t->next_wait;
}

/* 1: not complete. 0: the work before it is complete. -ESTALE: it is no mark; record it. */
static int stream_mark_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                             struct stream_mark *m)
{
        int r;

        if (m->is_done)
                return 0;
        if (m->is_lost)
                return stream_tracker_finish(t, partition, slab,
                                             m->is_aside ? STREAM_WAIT_ASIDE : STREAM_WAIT_ALL, m->since)
                               ? 0
                               : 1;
        r = device_event_query(device_of(t, partition), m->event);
        if (r == -ESTALE)
                return r;
        if (r == -EINVAL) /* the driver forgot it: only all work can be waited for */
                mark_lose(t, m);
        return r == 0 || r == -ENODEV || r == -EIO ? 0 : 1;
}

/* With one reference. NULL: -ENOMEM. The mark is moved. If it is NULL or was not recorded, all work must be
 * waited for. */
static struct stream_ending *stream_ending_new(const struct stream_tracker *t, struct stream_mark *mark)
{
        struct stream_ending *e = calloc(1, sizeof(*e));

        if (!e)
                return NULL;
        *e = (struct stream_ending){ .n_refs = 1,
                                     .mark = { .upto = 1, .since = t->next_wait, .is_lost = true } };
        if (mark && mark->upto > 0) {
                e->mark = *mark;
                *mark = (struct stream_mark){ 0 };
        }
        return e;
}

static struct stream_ending *stream_ending_put(struct stream_tracker *t, uint32_t partition,
                                               struct stream_ending *e)
{
        if (e && --e->n_refs == 0) {
                stream_mark_forget(t, partition, &e->mark);
                free(e);
        }
        return NULL;
}

/* True: all work is done. It cannot be recorded again. */
static bool stream_ending_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                                struct stream_ending *e)
{
        int r = stream_mark_query(t, partition, slab, &e->mark);

        if (r == -ESTALE)
                mark_lose(t, &e->mark);
        if (r == 0)
                e->mark.is_done = true;
        return r == 0;
}

/* ---- the pool of a stream ----------------------------------------------------
 *
 * The pool of one stream in one partition: slabs over which a cache runs, for the stream's next work.
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
 * exactly while it has slabs; the marks of a part have rising stamps. */

#define STREAM_MARKS 8u

enum { STREAM_WORK, STREAM_CAPTURE, STREAM_N_PARTS };

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
        _Atomic uint64_t *
                *shown; /* by partition: a word that counts the bytes that the program does not use */
        _Atomic uint64_t unseen;
};

#define MAX_EMPTY 64u

/* -ENOMEM */
static int stream_pool_set_init(struct stream_pool_set *sp, const struct stream_pools_options *options)
{
        TAILQ_INIT(&sp->used);
        TAILQ_INIT(&sp->empty);
        sp->shown = calloc(options->n_partitions + 1, sizeof(*sp->shown));
        for (uint32_t i = 0; sp->shown && i < options->n_partitions; i++)
                sp->shown[i] = &sp->unseen;
        return stream_tracker_init(&sp->tracker, options) < 0 || !sp->shown ? -ENOMEM : 0;
}

/* A part's cache has the slab's address as the id of the block. */
static struct stream_slab *stream_slab_of(uint64_t cookie)
{
        return (struct stream_slab *)(uintptr_t)cookie;
}

/* Adds n_bytes to the idle bytes of the pools; subtracts by wrapping around. */
static void stream_pools_count_idle(struct stream_pool_set *sp, uint32_t partition, uint64_t n_bytes)
{
        pages_add(sp->shown[partition], n_bytes);
}

static struct stream_pool *stream_pool_find(const struct stream_pool_set *sp, uint32_t partition,
                                            uintptr_t stream)
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

/* -ENOMEM */
static int stream_pool_get(struct stream_pool_set *sp, uint32_t partition, uintptr_t stream,
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

/* Frees what an empty pool or part does not need, after its allocations or slabs have changed. May free
 * the pool. */
static void stream_pool_update(struct stream_pool_set *sp, struct stream_pool *pool)
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

/* The pool owns the slab; NULL: no pool does. */
static void stream_pool_add_slab(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
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

static void stream_pool_count_alloc(struct stream_pool *pool, uint64_t n_bytes)
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

static void stream_slab_leave(struct stream_pool_set *sp, uint32_t partition, struct stream_pool *pool,
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

/* Records a mark after each idle slab, as far as possible now. */
static void stream_part_mark(struct stream_pool_set *sp, struct stream_pool *pool, struct stream_part *part)
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

/* Releases idle slabs whose work is complete. May free the pool. */
static void stream_pool_look(struct stream_pool_set *sp, struct stream_pool *pool)
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

/* Its stream has ended without an event. -ENOMEM: nothing has changed. May free the pool. If all is idle, the newest event tells when the work is complete. */
static int stream_pool_lose(struct stream_pool_set *sp, struct stream_pool *pool)
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

/* -ENOMEM. */
static int stream_part_add(struct stream_part *part, struct stream_slab *slab)
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

/* True: it has a slab that would leave if its stream's work were complete. */
static bool stream_pool_has_idle(const struct stream_pool *pool)
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

static int stream_pool_set_check(const struct stream_pool_set *sp, const char **ret_why)
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

static void stream_pool_set_clear(struct stream_pool_set *sp)
{
        struct stream_pool *pool;

        while ((pool = TAILQ_FIRST(&sp->used)) || (pool = TAILQ_FIRST(&sp->empty)))
                stream_pool_free(sp, pool);
        slabs_free(&sp->owned);
        slabs_free(&sp->leaving);
        stream_tracker_clear(&sp->tracker);
        free(sp->shown);
}

/* ---- allocations ---------------------------------------------------------------
 *
 * An allocation stays allocated until its place is free. If another stream frees or uses it, its place in
 * its own pool is free when events of these streams have completed. An allocation may have a slab of its
 * own, which is in no pool; then its own stream's work must be complete too.
 *
 * Allocations during a capture come from another part of the pool, of slabs that no work of the stream
 * uses, because the graph may run in another stream. */

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
        ret->block_id = 0; /* see streams_block_id() */
        ret->partition = in->partition;
        ret->slab = NULL;
        ret->is_slab = false;
        ret->handle = 0;
}

uint64_t streams_block_id(const struct block *block)
{
        const struct block *in = &alloc_slab(block->stream_alloc)->block;

        return in->slab ? cache_block_id(in) : in->block_id;
}

uint64_t streams_offset(const struct block *block)
{
        const struct stream_alloc *alloc = block->stream_alloc;
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
        sp->set.tracker.named = NULL;
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
        sp->set.tracker.wait = wait;
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

/* Whether a later check can free slabs or places. */
static bool stream_pools_check_pending(struct stream_pools *sp)
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

static void stream_pools_reset_peaks(struct stream_pools *sp)
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

/* Frees everything, with slabs and allocations, without waiting. Takes NULL. */
static struct stream_pools *stream_pools_free(struct stream_pools *sp)
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

/* -ENOMEM */
static int stream_pools_new(const struct stream_pools_options *options, struct stream_pools **ret)
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

/* ---- the pools of a client --------------------------------------------------- */

int streams_new(bfc_client *client)
{
        struct stream_pools_options options = { .places = client->places,
                                                .n_partitions =
                                                        (uint32_t)client->hello->hello->n_partitions };
        struct streams *s = calloc(1, sizeof(*s));

        if (!s || stream_pools_new(&options, &s->pools) < 0) {
                free(s);
                return error_no_memory();
        }
        for (uint32_t i = 0; i < options.n_partitions; i++)
                if (client_page_streams(client, i))
                        s->pools->set.shown[i] = client_page_streams(client, i);
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->changed, NULL);
        TAILQ_INIT(&s->batches);
        client->streams = s;
        return 0;
}

void streams_free(bfc_client *client)
{
        struct streams *s = client->streams;

        if (!s)
                return;
        stream_pools_free(s->pools);
        pthread_cond_destroy(&s->changed);
        pthread_mutex_destroy(&s->lock);
        free(s);
        client->streams = NULL;
}

void streams_lock(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
}

void streams_unlock(bfc_client *client)
{
        pthread_mutex_unlock(&client->streams->lock);
}

bool streams_check_pending(bfc_client *client)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_check_pending(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

int streams_check(bfc_client *client, const char **ret_why)
{
        int r;

        pthread_mutex_lock(&client->streams->lock);
        r = stream_pool_set_check(&client->streams->pools->set, ret_why);
        pthread_mutex_unlock(&client->streams->lock);
        return r;
}

bool streams_check_captured(bfc_client *client, uint32_t partition)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_check_captured(client->streams->pools, partition);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

void streams_reset_peaks(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
        stream_pools_reset_peaks(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
}

int streams_failed(int error, uintptr_t stream)
{
        if (error == -EINVAL)
                return error_set(error, "0x%llx is not a stream of the partition's device",
                                 (unsigned long long)stream);
        if (error == -ENOMEM || error == -EAGAIN)
                return error_set(-ENOMEM, "an event could not be recorded in the stream");
        if (error == -ENOBUFS)
                return error_no_memory();
        if (error == -EIO)
                return error_set(error, "this process's CUDA context is broken");
        return error_set(error, "the device is lost or not visible to this process");
}

int streams_no_such_block(const void *ptr)
{
        return error_set(-EINVAL, "%p is not a block of this client: never allocated, or already freed", ptr);
}
