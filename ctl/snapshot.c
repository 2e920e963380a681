/* Snapshots for PyTorch's memory viewer; see snapshot.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/snapshot.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "ctl/table.h"
#include "ctl/text.h"

struct snapshot_writer {
        FILE *out;
        size_t n_segments, n_blocks, n_traces, n_events; /* blocks of this segment, events of this trace */
};

int snapshot_new(FILE *out, struct snapshot_writer **ret)
{
        struct snapshot_writer *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        w->out = out;
        fputs("{\"segments\":[", out);
        *ret = w;
        return 0;
}

static void put_frames(struct snapshot_writer *w, const struct snapshot_frame *f)
{
        if (!f) {
                fputs("\"frames\":[]", w->out);
                return;
        }
        fputs("\"frames\":[{\"filename\":", w->out);
        table_json_text(w->out, f->file ? f->file : "");
        fputs(",\"line\":0,\"name\":", w->out);
        table_json_text(w->out, f->name ? f->name : "");
        fputs("}]", w->out);
}

static void end_segment(struct snapshot_writer *w)
{
        if (w->n_segments > 0)
                fputs("]}", w->out);
}

void snapshot_segment(struct snapshot_writer *w, const struct snapshot_segment *segment)
{
        end_segment(w);
        fprintf(w->out, "%s{\"device\":%u,\"address\":%" PRIu64 ",\"total_size\":%" PRIu64 ",\"stream\":0,",
                w->n_segments++ > 0 ? ",\n" : "", segment->device, segment->address, segment->n_bytes);
        put_frames(w, segment->frame);
        fputs(",\"blocks\":[", w->out);
        w->n_blocks = 0;
}

void snapshot_block(struct snapshot_writer *w, const struct snapshot_block *block)
{
        fprintf(w->out,
                "%s\n{\"size\":%" PRIu64 ",\"requested_size\":%" PRIu64 ",\"address\":%" PRIu64
                ",\"state\":\"%s\",",
                w->n_blocks++ > 0 ? "," : "", block->n_bytes, block->n_requested, block->address,
                block->is_active ? "active_allocated" : "inactive");
        put_frames(w, block->frame);
        putc('}', w->out);
}

void snapshot_trace(struct snapshot_writer *w)
{
        if (w->n_traces == 0) {
                end_segment(w);
                fputs("],\n\"device_traces\":[[", w->out);
        } else {
                fputs("],[", w->out);
        }
        w->n_traces++;
        w->n_events = 0;
}

void snapshot_event(struct snapshot_writer *w, const struct snapshot_event *event)
{
        fprintf(w->out, "%s\n{\"action\":\"%s\",\"addr\":%" PRIu64 ",\"size\":%" PRIu64 ",\"stream\":0,",
                w->n_events++ > 0 ? "," : "", event->action, event->address, event->n_bytes);
        put_frames(w, event->frame);
        putc('}', w->out);
}

int snapshot_end(struct snapshot_writer *w)
{
        FILE *out = w->out;

        fputs("]]}\n", out);
        free(w);
        return text_flush(out);
}
