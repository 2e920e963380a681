/* Traces: lifetimes of buffers, and the order of their allocations and frees.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A trace is a CSV file `id,lower,upper,size`: a buffer of `size` bytes is allocated from time `lower`
 * (inclusive) to `upper` (exclusive). At equal times, frees come before allocations; ties keep the file's
 * order. The id is a label and need not be unique: a buffer is identified by its line. The first line names the
 * columns, in any order. Others are `tag`, `partition`, `tenant`, `flags` (of BFC_TRACE), and minimalloc's
 * `alignment`, `gaps` and `offset`. minimalloc's older names of the first four are known, too.
 *
 * A job can be killed while it records, so a trace may end in the middle of a line. That line is left
 * out, and the trace records its number.
 */
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
        uint64_t flags;   /* of bfc_malloc_with(); 0: none */
        uint32_t line;    /* in the file, from 1 */
        uint32_t tag;     /* label; 0: none */
        uint32_t track;   /* label: "tenant/partition", "partition", "cuda:0"; 0: none */
};

#define TRACE_NO_END     ((uint64_t)INT64_MAX) /* `upper` of a buffer that was never freed */
#define TRACE_LABEL_MAX  63u                   /* bytes of a label; longer ones are cut */
#define TRACE_MAX_LABELS 4096u                 /* what is beyond is "(other)" */

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
        char **labels;   /* [0] is "" */
        size_t n_labels;
        bool has_partitions; /* the column */
        bool has_flags;      /* the column: it is a recording, whose tags are those of bfc_malloc_with() */
        char *left_out;      /* what the file has and the trace has not; NULL: nothing */
        size_t n_room;       /* for buffers */
        void *label_index;   /* of labels, by text */
};

/* name: of the file, for errors. -EINVAL: the file is no trace, *ret_error says
 * "name:line: why"; -ENOMEM and -EIO come with a sentence as well. The caller
 * frees *ret_error. */
int trace_read(FILE *in, const char *name, struct trace **ret, char **ret_error);

struct trace *trace_free(struct trace *t);

/* Whether the job asked for a block of the daemon: by flags or a tag ("": none) of bfc_malloc_with(). */
#define TRACE_TAG_MAX 31u
bool trace_is_own(const struct trace *t, uint32_t buffer, uint64_t *ret_flags,
                  char ret_tag[static TRACE_TAG_MAX + 1]);

/* Multiplies every size, rounded up to a whole byte. -ERANGE, and the trace as
 * it was: a size would not fit. */
int trace_scale(struct trace *t, double factor);

/* The partition in the name of a buffer's track: what follows the tenant. */
const char *trace_partition(const struct trace *t, size_t buffer);

/* Leaves the buffers of one partition. -ENOENT, and the trace as it was: it has none there. -ENOMEM: the trace can only
 * be freed. */
int trace_keep_partition(struct trace *t, const char *partition);

/* The largest sum of live bytes, with each buffer rounded up to a multiple of granule (1: as requested).
 * Saturates. */
uint64_t trace_peak(const struct trace *t, uint64_t granule);

#endif
