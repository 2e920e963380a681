/* Writes a snapshot of memory as a pickle for PyTorch's memory viewer (pytorch.org/memory_viz, torch/cuda/_memory_viz.py).
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * First the segments, each followed by its blocks, which the caller gives in order and which tile the segment; then one
 * trace for each device, from device 0 on. The pickle has only opcodes that the viewer's JavaScript knows. It reads numbers as doubles: addresses end below SNAPSHOT_MAX_ADDRESS. */
#ifndef BFC_CTL_SNAPSHOT_H
#define BFC_CTL_SNAPSHOT_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define SNAPSHOT_MAX_ADDRESS (UINT64_C(1) << 53)

/* What the viewer shows as the place in the program that allocated. Any text. NULL: "". */
struct snapshot_frame {
        const char *name, *file;
};

/* The frame of each may be NULL. */
struct snapshot_segment {
        unsigned device;
        uint64_t address, n_bytes;
        const struct snapshot_frame *frame;
};

struct snapshot_block {
        uint64_t address, n_bytes, n_requested;
        bool is_active; /* else it is free */
        const struct snapshot_frame *frame;
};

struct snapshot_event {
        const char *action; /* alloc, free_requested, free_completed, segment_alloc */
        uint64_t address, n_bytes;
        const struct snapshot_frame *frame;
};

struct snapshot_writer;
int snapshot_new(FILE *out, struct snapshot_writer **ret); /* -ENOMEM */

void snapshot_segment(struct snapshot_writer *w, const struct snapshot_segment *segment);
void snapshot_block(struct snapshot_writer *w, const struct snapshot_block *block);
void snapshot_trace(struct snapshot_writer *w); /* begins the trace of the next device */
void snapshot_event(struct snapshot_writer *w, const struct snapshot_event *event);

/* Ends the document and frees the writer. There must be a trace. A negative errno of writing, or -ENOMEM. */
int snapshot_end(struct snapshot_writer *w);

#endif
