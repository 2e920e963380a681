/* Tracking the work of streams; see stream_tracker.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/stream_tracker.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MAX_KNOWN 4096u

/* A stream that a call has named, and that has not ended since. */
struct known_stream {
        LIST_ENTRY(known_stream) by_name;
        TAILQ_ENTRY(known_stream) in_all;
        uint32_t partition;
        uintptr_t stream;
};

int stream_tracker_init(struct stream_tracker *t, const struct stream_pools_options *options)
{
        t->options = *options;
        TAILQ_INIT(&t->known);
        t->devices = calloc(options->n_partitions + 1, sizeof(struct device_streams *));
        t->is_finished = calloc(options->n_partitions + 1, sizeof(*t->is_finished));
        return t->devices && t->is_finished ? 0 : -ENOMEM;
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
        if (k->partition == partition && k->stream == stream)
                return k;
        return NULL;
}

static void known_drop(struct stream_tracker *t, struct known_stream *k)
{
        if (!k)
                return;
        LIST_REMOVE(k, by_name);
        TAILQ_REMOVE(&t->known, k, in_all);
        t->n_known--;
        free(k);
}

/* If there is no memory for it, the stream is known from its next call on. */
static void known_add(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        struct known_stream *k = known_find(t, partition, stream);

        if (k)
                return;
        k = malloc(sizeof(*k));
        if (!k)
                return;
        *k = (struct known_stream){ .partition = partition, .stream = stream };
        LIST_INSERT_HEAD(&t->known_by_name[stream_bucket(partition, stream)], k, by_name);
        TAILQ_INSERT_TAIL(&t->known, k, in_all);
        if (++t->n_known > MAX_KNOWN)
                known_drop(t, TAILQ_FIRST(&t->known));
}

static void note_capture(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        for (unsigned i = 0; i < t->n_captures; i++)
                if (t->captures[i].partition == partition && t->captures[i].stream == stream)
                        return;
        if (t->n_captures < STREAM_TRACKER_MAX_CAPTURES)
                t->captures[t->n_captures++] = (struct stream_capture){ partition, stream };
}

/* Checks the streams of GPUs for a GPU, and those of the host for the host. A stream that was destroyed is
 * not checked again. */
bool stream_tracker_check_captured(struct stream_tracker *t, uint32_t partition)
{
        const struct device_view *places = t->options.places;
        struct known_stream *k, *next;
        int r;

        for (k = TAILQ_FIRST(&t->known); k; k = next) {
                next = TAILQ_NEXT(k, in_all);
                if (places[k->partition].is_cuda != places[partition].is_cuda)
                        continue;
                r = device_stream_check_captured(device_of(t, k->partition), k->stream);
                if (r > 0) {
                        note_capture(t, k->partition, k->stream);
                        return true;
                }
                if (r == -EINVAL)
                        known_drop(t, k);
        }
        return false;
}

int stream_tracker_look_at(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        int r;

        if (!t->devices[partition]) {
                r = device_streams_new(&t->options.places[partition], &t->devices[partition]);
                if (r < 0)
                        return r;
        }
        r = device_stream_check_captured(device_of(t, partition), stream);
        if (r >= 0)
                known_add(t, partition, stream);
        if (r > 0)
                note_capture(t, partition, stream);
        return r;
}

bool stream_tracker_check_captures(struct stream_tracker *t)
{
        for (unsigned i = 0; i < t->n_captures;) {
                const struct stream_capture *c = &t->captures[i];

                if (device_stream_check_captured(device_of(t, c->partition), c->stream) > 0)
                        i++;
                else
                        t->captures[i] = t->captures[--t->n_captures];
        }
        return t->n_captures > 0;
}

void stream_tracker_forget(struct stream_tracker *t, uint32_t partition, uintptr_t stream)
{
        known_drop(t, known_find(t, partition, stream));
        for (unsigned i = 0; i < t->n_captures;) {
                const struct stream_capture *c = &t->captures[i];

                if (c->partition == partition && c->stream == stream)
                        t->captures[i] = t->captures[--t->n_captures];
                else
                        i++;
        }
}

void stream_tracker_clear(struct stream_tracker *t)
{
        while (!TAILQ_EMPTY(&t->known))
                known_drop(t, TAILQ_FIRST(&t->known));
        for (uint32_t i = 0; t->devices && i < t->options.n_partitions; i++)
                device_streams_free(t->devices[i]);
        free(t->is_finished);
        free(t->devices);
}

void stream_tracker_begin(struct stream_tracker *t, bool may_wait)
{
        t->may_wait = may_wait;
        memset(t->is_finished, 0, t->options.n_partitions * sizeof(*t->is_finished));
}

/* ---- marks ------------------------------------------------------------------- */

void stream_mark_forget(struct stream_tracker *t, uint32_t partition, struct stream_mark *m)
{
        *m = (struct stream_mark){ .event = device_event_forget(device_of(t, partition), m->event) };
}

int stream_mark_try(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                    struct stream_mark *m)
{
        int r = device_event_record(device_of(t, partition), stream, &m->event);

        if (r < 0 && r != -ENODEV && r != -EIO)
                return r;
        m->upto = upto;
        m->is_done = r < 0;
        m->is_lost = false;
        return 0;
}

/* A stream that the current call does not name may be gone. Only a thread itself can record in its own
 * stream. */
int stream_mark_record(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                       struct stream_mark *m)
{
        int r = stream_mark_try(t, partition, stream, upto, m);

        if (r != -EINVAL)
                return r;
        m->upto = upto;
        m->is_lost = true;
        m->is_done = false;
        return 0;
}

/* Once for each round: memory that waits was freed before, so its work had been given before. */
static bool finish(struct stream_tracker *t, uint32_t partition, uint64_t region_id)
{
        if (!t->is_finished[partition] && t->may_wait && !stream_tracker_check_captured(t, partition))
                t->is_finished[partition] = t->options.finish(t->options.userdata, region_id) == 0;
        return t->is_finished[partition];
}

int stream_mark_query(struct stream_tracker *t, uint32_t partition, uint64_t region_id, struct stream_mark *m)
{
        int r;

        if (m->is_done)
                return 0;
        if (m->is_lost)
                return finish(t, partition, region_id) ? 0 : 1;
        r = device_event_query(device_of(t, partition), m->event);
        if (r == -ESTALE)
                return r;
        if (r == -EINVAL) /* the driver forgot it: only all work can be waited for */
                m->is_lost = true;
        return r == 0 || r == -ENODEV || r == -EIO ? 0 : 1;
}

struct stream_ending *stream_ending_new_lost(void)
{
        struct stream_ending *e = calloc(1, sizeof(*e));

        if (e)
                *e = (struct stream_ending){ .n_refs = 1, .mark = { .upto = 1, .is_lost = true } };
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
bool stream_ending_query(struct stream_tracker *t, uint32_t partition, uint64_t region_id,
                         struct stream_ending *e)
{
        int r = stream_mark_query(t, partition, region_id, &e->mark);

        if (r == -ESTALE)
                e->mark.is_lost = true;
        if (r == 0)
                e->mark.is_done = true;
        return r == 0;
}
