/* Pictures of a trace: what they have in common; and the two for other programs. See views.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/views.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "bfc/bfc.h"
#include "ctl/snapshot.h"

#define BASE_ADDRESS (UINT64_C(1) << 44) /* with 1 TiB behind it: a number that JavaScript has exactly */
#define SEGMENT_UNIT (UINT64_C(2) << 20)
#define MAX_SERIES   24u /* tags with a track of their own, those with the highest peaks */

/* ---- both ---------------------------------------------------------------------- */

static bool is_endless(const struct trace *t, const struct trace_event *e)
{
        return e->is_free && t->buffers[e->buffer].upper == TRACE_NO_END;
}

size_t views_n_events(const struct trace *t)
{
        size_t n = t->n_events;

        while (n > 0 && is_endless(t, &t->events[n - 1]))
                n--;
        return n;
}

static uint64_t time_of(const struct trace *t, size_t event)
{
        const struct trace_event *e = &t->events[event];

        return e->is_free ? t->buffers[e->buffer].upper : t->buffers[e->buffer].lower;
}

uint64_t views_time(const struct trace *t, size_t n, size_t event)
{
        return event < n ? time_of(t, event) - time_of(t, 0) : time_of(t, n - 1) - time_of(t, 0) + 1;
}

size_t views_peak(const struct trace *t, uint64_t *ret_bytes)
{
        unsigned __int128 live = 0, peak = 0;
        size_t at = 0;

        for (size_t i = 0; i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];
                uint64_t n_bytes = t->buffers[e->buffer].n_bytes;

                live = e->is_free ? live - n_bytes : live + n_bytes;
                if (live > peak) {
                        peak = live;
                        at = i + 1;
                }
        }
        *ret_bytes = peak > UINT64_MAX ? UINT64_MAX : (uint64_t)peak;
        return at;
}

/* Labels are printable ASCII. */
void views_json_text(FILE *out, const char *text)
{
        for (; *text; text++) {
                if (*text == '"' || *text == '\\')
                        putc('\\', out);
                putc(*text, out);
        }
}

/* ---- PyTorch's memory viewer ------------------------------------------------------ */

struct snapshot {
        const struct trace *trace;
        struct snapshot_writer *writer;
        struct bfc *bfc;
        bfc_handle *handles; /* of the buffers that are live */
        uint64_t *offsets;
        uint32_t *owners; /* in blocks: buffers that are live at the end, by offset */
        size_t n_owners;
        uint64_t n_bytes; /* of the segment */
};

static struct snapshot_frame frame_of(const struct trace *t, uint32_t buffer)
{
        return (struct snapshot_frame){ .name = t->labels[t->buffers[buffer].tag] };
}

static void put_event(struct snapshot *s, const char *action, uint32_t buffer)
{
        struct snapshot_frame frame = frame_of(s->trace, buffer);

        snapshot_event(s->writer, &(struct snapshot_event){
                                          .action = action,
                                          .address = BASE_ADDRESS + s->offsets[buffer],
                                          .n_bytes = bfc_block_bytes(s->trace->buffers[buffer].n_bytes),
                                          .frame = *frame.name ? &frame : NULL,
                                  });
}

/* The daemon's allocator gives the places: lowest addresses first, in a space without end. */
static int place_all(struct snapshot *s)
{
        const struct trace *t = s->trace;
        size_t n = views_n_events(t);
        int r = bfc_add_region(s->bfc, 0, BFC_MAX_SPACE, BFC_MAX_SPACE, true);

        for (size_t i = 0; r == 0 && i < n; i++) {
                uint32_t b = t->events[i].buffer;

                if (t->events[i].is_free) {
                        r = bfc_dealloc(s->bfc, s->handles[b]);
                        s->handles[b] = 0;
                        continue;
                }
                r = bfc_alloc(s->bfc, t->buffers[b].n_bytes, &s->handles[b], &s->offsets[b]);
                if (r == 0 && s->offsets[b] + bfc_block_bytes(t->buffers[b].n_bytes) > s->n_bytes)
                        s->n_bytes = s->offsets[b] + bfc_block_bytes(t->buffers[b].n_bytes);
        }
        s->n_bytes = (s->n_bytes + SEGMENT_UNIT - 1) / SEGMENT_UNIT * SEGMENT_UNIT;
        return r > 0 || (r == -EINVAL && s->bfc) ? -ERANGE : r;
}

static int compare_offsets(const void *a, const void *b, void *offsets)
{
        const uint64_t *of = offsets;
        uint64_t x = of[*(const uint32_t *)a], y = of[*(const uint32_t *)b];

        return (x > y) - (x < y);
}

static void put_gap(struct snapshot *s, uint64_t begin, uint64_t end)
{
        if (begin < end)
                snapshot_block(s->writer, &(struct snapshot_block){ .address = BASE_ADDRESS + begin,
                                                                    .n_bytes = end - begin });
}

/* What is left at the end, and the gaps between: they tile the segment. */
static void put_blocks(struct snapshot *s)
{
        uint64_t at = 0;

        for (size_t i = 0; i < s->n_owners; i++) {
                uint32_t b = s->owners[i];
                uint64_t n_bytes = s->trace->buffers[b].n_bytes;
                struct snapshot_frame frame = frame_of(s->trace, b);

                put_gap(s, at, s->offsets[b]);
                at = s->offsets[b] + bfc_block_bytes(n_bytes);
                if (at > s->offsets[b])
                        snapshot_block(s->writer,
                                       &(struct snapshot_block){ .address = BASE_ADDRESS + s->offsets[b],
                                                                 .n_bytes = at - s->offsets[b],
                                                                 .n_requested = n_bytes,
                                                                 .is_active = true,
                                                                 .frame = *frame.name ? &frame : NULL });
        }
        put_gap(s, at, s->n_bytes);
}

static int put_snapshot(struct snapshot *s, FILE *out)
{
        size_t n = views_n_events(s->trace);
        int r = snapshot_new(out, &s->writer);

        if (r < 0)
                return r;
        snapshot_segment(s->writer,
                         &(struct snapshot_segment){ .address = BASE_ADDRESS, .n_bytes = s->n_bytes });
        put_blocks(s);
        snapshot_trace(s->writer);
        snapshot_event(s->writer, &(struct snapshot_event){ .action = "segment_alloc",
                                                            .address = BASE_ADDRESS,
                                                            .n_bytes = s->n_bytes });
        for (size_t i = 0; i < n; i++) {
                const struct trace_event *e = &s->trace->events[i];

                if (e->is_free)
                        put_event(s, "free_requested", e->buffer);
                put_event(s, e->is_free ? "free_completed" : "alloc", e->buffer);
        }
        return snapshot_end(s->writer);
}

int views_snapshot(FILE *out, const struct trace *t)
{
        struct snapshot s = { .trace = t };
        int r = bfc_new(BFC_GRANULE, &s.bfc);

        s.handles = calloc(t->n_buffers, sizeof(*s.handles));
        s.offsets = calloc(t->n_buffers, sizeof(*s.offsets));
        s.owners = calloc(t->n_buffers, sizeof(*s.owners));
        if (r == 0 && (!s.handles || !s.offsets || !s.owners))
                r = -ENOMEM;
        if (r == 0)
                r = place_all(&s);
        for (uint32_t i = 0; r == 0 && i < t->n_buffers; i++)
                if (s.handles[i] != 0)
                        s.owners[s.n_owners++] = i;
        if (r == 0) {
                qsort_r(s.owners, s.n_owners, sizeof(*s.owners), compare_offsets, s.offsets);
                r = put_snapshot(&s, out);
        }
        bfc_destroy(s.bfc);
        free(s.handles);
        free(s.offsets);
        free(s.owners);
        return r == 0 && ferror(out) ? -EIO : r;
}

/* ---- Perfetto ---------------------------------------------------------------------- */

/* A series is a counter: of a track, all its bytes; and of a track's tag. */
struct series {
        uint32_t track, tag;
        uint64_t bytes, peak, shown;
        bool is_chosen; /* a tag that is shown */
        bool is_changed;
};

struct timeline {
        const struct trace *trace;
        FILE *out;
        struct series *tracks; /* by label */
        struct series *tags;   /* by buffer's pair of track and tag */
        size_t n_tags;
        uint32_t *tag_of; /* by buffer: in tags */
        bool has_event;
};

static int compare_pairs(const void *a, const void *b, void *trace)
{
        const struct trace *t = trace;
        const struct trace_buffer *x = &t->buffers[*(const uint32_t *)a],
                                  *y = &t->buffers[*(const uint32_t *)b];

        if (x->track != y->track)
                return x->track < y->track ? -1 : 1;
        return (x->tag > y->tag) - (x->tag < y->tag);
}

/* Finds the pairs of track and tag that there are. */
static int find_pairs(struct timeline *l)
{
        const struct trace *t = l->trace;
        uint32_t *order = calloc(t->n_buffers, sizeof(*order));

        if (!order)
                return -ENOMEM;
        for (uint32_t i = 0; i < t->n_buffers; i++)
                order[i] = i;
        qsort_r(order, t->n_buffers, sizeof(*order), compare_pairs, (void *)(uintptr_t)t);
        for (size_t i = 0; i < t->n_buffers; i++) {
                const struct trace_buffer *b = &t->buffers[order[i]];

                if (i == 0 || compare_pairs(&order[i - 1], &order[i], (void *)(uintptr_t)t) != 0)
                        l->tags[l->n_tags++] = (struct series){ .track = b->track, .tag = b->tag };
                l->tag_of[order[i]] = (uint32_t)l->n_tags - 1;
        }
        free(order);
        return 0;
}

static void count(struct series *s, const struct trace_event *e, uint64_t n_bytes)
{
        s->bytes = e->is_free ? s->bytes - n_bytes : s->bytes + n_bytes;
        s->peak = s->bytes > s->peak ? s->bytes : s->peak;
        s->is_changed = true;
}

static int compare_peaks(const void *a, const void *b)
{
        const struct series *x = *(struct series *const *)a, *y = *(struct series *const *)b;

        return (x->peak < y->peak) - (x->peak > y->peak);
}

/* The tags with the highest peaks keep their series; the others have none. */
static int choose_tags(struct timeline *l)
{
        struct series **order = calloc(l->n_tags, sizeof(struct series *));
        size_t n = views_n_events(l->trace);

        if (!order)
                return -ENOMEM;
        for (size_t i = 0; i < n; i++) {
                const struct trace_event *e = &l->trace->events[i];

                count(&l->tags[l->tag_of[e->buffer]], e, l->trace->buffers[e->buffer].n_bytes);
        }
        for (size_t i = 0; i < l->n_tags; i++)
                order[i] = &l->tags[i];
        qsort(order, l->n_tags, sizeof(struct series *), compare_peaks);
        for (size_t i = 0; i < l->n_tags; i++) {
                order[i]->is_chosen = i < MAX_SERIES;
                order[i]->bytes = 0;
                order[i]->is_changed = false;
        }
        free(order);
        return 0;
}

static void put_counter(struct timeline *l, struct series *s, bool is_tag, uint64_t time)
{
        const struct trace *t = l->trace;
        const char *track = t->labels[s->track];

        if (!s->is_changed || s->bytes == s->shown) {
                s->is_changed = false;
                return;
        }
        fprintf(l->out, "%s\n{\"ph\":\"C\",\"pid\":%u,\"tid\":0,\"ts\":%" PRIu64 ",\"name\":\"",
                l->has_event ? "," : "", (unsigned)s->track + 1, time);
        views_json_text(l->out, *track ? track : "live");
        if (is_tag) {
                fputs(": ", l->out);
                views_json_text(l->out, t->labels[s->tag]);
        }
        fprintf(l->out, "\",\"args\":{\"bytes\":%" PRIu64 "}}", s->bytes);
        s->shown = s->bytes;
        s->is_changed = false;
        l->has_event = true;
}

/* A process of Perfetto's for each track, so that its counters are together. */
static void put_names(struct timeline *l)
{
        const struct trace *t = l->trace;

        for (size_t i = 0; i < t->n_labels; i++) {
                if (l->tracks[i].peak == 0)
                        continue;
                fprintf(l->out,
                        "%s\n{\"ph\":\"M\",\"pid\":%zu,\"name\":\"process_name\",\"args\":{\"name\":\"",
                        l->has_event ? "," : "", i + 1);
                views_json_text(l->out, *t->labels[i] ? t->labels[i] : "trace");
                fputs("\"}}", l->out);
                l->has_event = true;
        }
}

/* All events of one time are one step. */
static void put_steps(struct timeline *l)
{
        const struct trace *t = l->trace;
        size_t n = views_n_events(t), begin = 0;

        for (size_t i = 0; i < n; i++) {
                const struct trace_event *e = &t->events[i];
                const struct trace_buffer *b = &t->buffers[e->buffer];

                count(&l->tracks[b->track], e, b->n_bytes);
                count(&l->tags[l->tag_of[e->buffer]], e, b->n_bytes);
                if (i + 1 < n && time_of(t, i + 1) == time_of(t, i))
                        continue;
                for (; begin <= i; begin++) {
                        const struct trace_event *each = &t->events[begin];
                        struct series *tag = &l->tags[l->tag_of[each->buffer]];

                        put_counter(l, &l->tracks[t->buffers[each->buffer].track], false,
                                    views_time(t, n, i));
                        if (tag->tag != 0 && tag->is_chosen)
                                put_counter(l, tag, true, views_time(t, n, i));
                }
        }
}

int views_timeline(FILE *out, const struct trace *t)
{
        struct timeline l = { .trace = t, .out = out };
        int r = 0;

        l.tracks = calloc(t->n_labels, sizeof(*l.tracks));
        l.tags = calloc(t->n_buffers, sizeof(*l.tags));
        l.tag_of = calloc(t->n_buffers, sizeof(*l.tag_of));
        if (!l.tracks || !l.tags || !l.tag_of)
                r = -ENOMEM;
        for (uint32_t i = 0; r == 0 && i < t->n_labels; i++)
                l.tracks[i].track = i;
        for (size_t i = 0; r == 0 && i < t->n_buffers; i++)
                l.tracks[t->buffers[i].track].peak = 1; /* it is used */
        if (r == 0)
                r = find_pairs(&l);
        if (r == 0)
                r = choose_tags(&l);
        if (r == 0) {
                fputs("{\"displayTimeUnit\":\"ns\",\"traceEvents\":[", out);
                put_names(&l);
                put_steps(&l);
                fputs("]}\n", out);
        }
        free(l.tracks);
        free(l.tags);
        free(l.tag_of);
        return r == 0 && ferror(out) ? -EIO : r;
}
