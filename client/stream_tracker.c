/* Tracking the work of streams; see stream_tracker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_tracker.h"

#include <errno.h>
#include <stdlib.h>

#include "client/process.h"

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

int stream_tracker_init(struct stream_tracker *t, const struct stream_pools_options *options)
{
        t->options = *options;
        TAILQ_INIT(&t->known);
        t->devices = calloc(options->n_partitions + 1, sizeof(struct device_streams *));
        t->finishes = calloc(options->n_partitions + 1, sizeof(*t->finishes));
        t->next_wait = 1;
        return t->devices && t->finishes ? 0 : -ENOMEM;
}

unsigned stream_bucket(uint32_t partition, uintptr_t stream)
{
        uint64_t hash = ((uint64_t)stream ^ ((uint64_t)partition << 56)) * UINT64_C(0x9e3779b97f4a7c15);

        return (unsigned)(hash >> 56) % STREAM_BUCKETS;
}

bool stream_tracker_is_per_thread(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
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

int stream_tracker_look_at(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t *ret_id)
{
        int r = 0;

        *ret_id = 0;
        if (!t->devices[partition])
                r = device_streams_new(&t->options.places[partition], &t->devices[partition]);
        return r < 0 ? r : device_stream_check_captured(device_of(t, partition), stream, ret_id);
}

bool stream_tracker_find_ended(const struct stream_tracker *t, uint32_t partition, uintptr_t stream,
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

int stream_tracker_name(struct stream_tracker *t, const struct stream_key *key, uint64_t id, bool is_captured,
                        bool is_permanent)
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

void stream_tracker_unname(struct stream_tracker *t)
{
        t->named = NULL;
}

bool stream_tracker_knows(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        return known_find(t, partition, stream);
}

bool stream_tracker_can_use(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        const struct known_stream *k = known_find(t, partition, stream);

        return k && t->devices[partition] && known_can_use(t, k);
}

void stream_tracker_forget(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        known_drop(t, known_find(t, partition, stream));
}

bool stream_tracker_check_captures(struct stream_tracker *t)
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

/* Checks the streams of GPUs for a GPU, and those of the host for the host. */
bool stream_tracker_check_captured(struct stream_tracker *t, uint32_t partition)
{
        const struct device_view *places = t->options.places;
        struct known_stream *k;

        TAILQ_FOREACH(k, &t->known, in_all)
        if (places[k->key.partition].is_cuda == places[partition].is_cuda && known_check_captured(t, k))
                return true;
        return false;
}

void stream_tracker_clear(struct stream_tracker *t)
{
        while (!TAILQ_EMPTY(&t->known))
                known_drop(t, TAILQ_FIRST(&t->known));
        for (uint32_t i = 0; t->devices && i < t->options.n_partitions; i++)
                device_streams_free(t->devices[i]);
        free(t->finishes);
        free(t->devices);
}

void stream_tracker_begin(struct stream_tracker *t, enum stream_wait wait)
{
        t->wait = wait;
}

bool stream_tracker_finish(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                           enum stream_wait wait, uint64_t since)
{
        struct stream_finish *f = &t->finishes[partition];

        if (since <= f->upto)
                return true;
        if (t->wait >= wait && !f->slab && !stream_tracker_check_captured(t, partition))
                f->slab = slab;
        return false;
}

bool stream_tracker_keeps(const struct stream_tracker *t, const struct stream_slab *slab)
{
        for (uint32_t i = 0; i < t->options.n_partitions; i++)
                if (t->finishes[i].slab == slab)
                        return true;
        return false;
}

/* ---- marks ------------------------------------------------------------------- */

void stream_mark_forget(struct stream_tracker *t, uint32_t partition, struct stream_mark *m)
{
        *m = (struct stream_mark){ .event = device_event_forget(device_of(t, partition), m->event) };
}

/* It may be another stream than the one that had the handle before. */
static bool is_named_in_capture(const struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        const struct known_stream *k = known_find(t, partition, stream);

        return k && k->is_captured && !k->is_permanent;
}

int stream_mark_try(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
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

int stream_mark_record(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
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

void stream_mark_set_done(struct stream_mark *m, uint64_t upto)
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

int stream_mark_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
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

struct stream_ending *stream_ending_new(const struct stream_tracker *t, struct stream_mark *mark)
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

struct stream_ending *stream_ending_put(struct stream_tracker *t, uint32_t partition, struct stream_ending *e)
{
        if (e && --e->n_refs == 0) {
                stream_mark_forget(t, partition, &e->mark);
                free(e);
        }
        return NULL;
}

/* It cannot be recorded again. */
bool stream_ending_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                         struct stream_ending *e)
{
        int r = stream_mark_query(t, partition, slab, &e->mark);

        if (r == -ESTALE)
                mark_lose(t, &e->mark);
        if (r == 0)
                e->mark.is_done = true;
        return r == 0;
}
