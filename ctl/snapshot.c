/* Snapshots for PyTorch's memory viewer; see snapshot.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pickle builds a list or a dictionary before its items, so it is written as it comes. Long lists get their items
 * in batches, as Python does it: the viewer's JavaScript passes a batch as arguments of a function. */
#include "ctl/snapshot.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/text.h"

#define BATCH 1000u /* items */

struct snapshot_writer {
        FILE *out;
        bool is_in_segments, is_in_segment, is_in_trace;
        size_t n_segments, n_items; /* of the list of segments; of a segment's or a trace's list */
        int error;
};

/* ---- opcodes of protocol 2 ------------------------------------------------------------ */

static void put_text(struct snapshot_writer *w, const char *text)
{
        size_t n = strlen(text);
        unsigned char head[5] = { 'X', (unsigned char)n, (unsigned char)(n >> 8), (unsigned char)(n >> 16),
                                  (unsigned char)(n >> 24) };

        fwrite(head, 1, sizeof(head), w->out);
        fwrite(text, 1, n, w->out);
}

/* Any bytes; what is no UTF-8 is replaced. */
static void put_foreign_text(struct snapshot_writer *w, const char *text)
{
        char *valid = text_valid(text);

        if (!valid)
                w->error = -ENOMEM;
        put_text(w, valid ? valid : "");
        free(valid);
}

/* Below 2^63. */
static void put_number(struct snapshot_writer *w, uint64_t n)
{
        unsigned char bytes[10] = { 0x8a, 8 };

        for (size_t i = 0; i < 8; i++)
                bytes[2 + i] = (unsigned char)(n >> (8 * i));
        fwrite(bytes, 1, sizeof(bytes), w->out);
}

static void begin_dict(struct snapshot_writer *w)
{
        fputs("}(", w->out);
}

static void end_dict(struct snapshot_writer *w)
{
        putc('u', w->out);
}

static void begin_list(struct snapshot_writer *w, const char *key)
{
        put_text(w, key);
        fputs("](", w->out);
}

static void end_list(struct snapshot_writer *w)
{
        putc('e', w->out);
}

/* Before each item of a list that may be long. */
static void next_item(struct snapshot_writer *w, size_t *n)
{
        if (*n > 0 && *n % BATCH == 0)
                fputs("e(", w->out);
        ++*n;
}

static void put_key_number(struct snapshot_writer *w, const char *key, uint64_t n)
{
        put_text(w, key);
        put_number(w, n);
}

static void put_key_text(struct snapshot_writer *w, const char *key, const char *text)
{
        put_text(w, key);
        put_foreign_text(w, text);
}

static void put_frames(struct snapshot_writer *w, const struct snapshot_frame *f)
{
        begin_list(w, "frames");
        if (f) {
                begin_dict(w);
                put_key_text(w, "filename", f->file ? f->file : "");
                put_key_number(w, "line", 0);
                put_key_text(w, "name", f->name ? f->name : "");
                end_dict(w);
        }
        end_list(w);
}

/* ---- the document --------------------------------------------------------------------- */

int snapshot_new(FILE *out, struct snapshot_writer **ret)
{
        struct snapshot_writer *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        w->out = out;
        fputs("\x80\x02", out);
        begin_dict(w);
        begin_list(w, "segments");
        w->is_in_segments = true;
        *ret = w;
        return 0;
}

static void end_segment(struct snapshot_writer *w)
{
        if (w->is_in_segment) {
                end_list(w);
                end_dict(w);
        }
        w->is_in_segment = false;
}

void snapshot_segment(struct snapshot_writer *w, const struct snapshot_segment *segment)
{
        end_segment(w);
        next_item(w, &w->n_segments);
        begin_dict(w);
        put_key_number(w, "device", segment->device);
        put_key_number(w, "address", segment->address);
        put_key_number(w, "total_size", segment->n_bytes);
        put_key_number(w, "stream", 0);
        put_frames(w, segment->frame);
        begin_list(w, "blocks");
        w->is_in_segment = true;
        w->n_items = 0;
}

void snapshot_block(struct snapshot_writer *w, const struct snapshot_block *block)
{
        next_item(w, &w->n_items);
        begin_dict(w);
        put_key_number(w, "size", block->n_bytes);
        put_key_number(w, "requested_size", block->n_requested);
        put_key_number(w, "address", block->address);
        put_key_text(w, "state", block->is_active ? "active_allocated" : "inactive");
        put_frames(w, block->frame);
        end_dict(w);
}

void snapshot_trace(struct snapshot_writer *w)
{
        end_segment(w);
        if (w->is_in_segments) {
                end_list(w);
                begin_list(w, "device_traces");
        }
        if (w->is_in_trace)
                end_list(w);
        fputs("](", w->out);
        w->is_in_segments = false;
        w->is_in_trace = true;
        w->n_items = 0;
}

void snapshot_event(struct snapshot_writer *w, const struct snapshot_event *event)
{
        next_item(w, &w->n_items);
        begin_dict(w);
        put_key_text(w, "action", event->action);
        put_key_number(w, "addr", event->address);
        put_key_number(w, "size", event->n_bytes);
        put_key_number(w, "stream", 0);
        put_frames(w, event->frame);
        end_dict(w);
}

int snapshot_end(struct snapshot_writer *w)
{
        FILE *out = w->out;
        int error = w->error, r;

        end_list(w);
        end_list(w);
        end_dict(w);
        putc('.', out);
        free(w);
        r = text_flush(out);
        return error < 0 ? error : r;
}
