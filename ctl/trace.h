/* Traces: lifetimes of buffers, and the order in which they come and go.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A trace is a CSV file `id,lower,upper,size`: a buffer of `size` bytes lives
 * from time `lower` (inclusive) to `upper` (exclusive). At equal times, frees
 * come before allocations; ties keep the file's order. The id is for people and
 * need not be unique: a buffer is its line.
 *
 * A job can be killed while it records, so a trace may end in the middle of a line.
 * That line is left out, and the trace says which it was. */
#ifndef BFC_CTL_TRACE_H
#define BFC_CTL_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct trace_buffer {
        uint64_t lower;
        uint64_t upper;   /* > lower */
        uint64_t n_bytes; /* > 0 */
        uint32_t line;    /* in the file, from 1 */
};

struct trace_event {
        uint32_t buffer; /* index */
        bool is_free;
};

/* n_events == 2 * n_buffers; each buffer's allocation comes before its free. */
struct trace {
        struct trace_buffer *buffers;
        size_t n_buffers;
        struct trace_event *events;
        size_t n_events;
        size_t cut_line; /* the last line, which is incomplete and was left out; 0: there is none */
};

/* name: of the file, for errors. -EINVAL: the file is no trace, *ret_error says
 * "name:line: why"; -ENOMEM and -EIO come with a sentence as well. The caller
 * frees *ret_error. */
int trace_read(FILE *in, const char *name, struct trace **ret, char **ret_error);
struct trace *trace_free(struct trace *t);

/* Multiplies every size, rounded up to a whole byte. -ERANGE, and the trace as
 * it was: a size would not fit. */
int trace_scale(struct trace *t, double factor);

/* The most bytes that live at once, each buffer rounded up to a multiple of
 * granule (1: as requested). Saturates. */
uint64_t trace_peak(const struct trace *t, uint64_t granule);

#endif
