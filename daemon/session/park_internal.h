/* The inside of park and wake. Only their own files include this.
 *
 *   park.c       the requests: waiting for room, records, answers
 *   park_copy.c  the copying, by workers
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARK_INTERNAL_H
#define BFCD_PARK_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/quota.h"
#include "daemon/memory/worker.h"
#include "daemon/session/park.h"

/* Memory of a quota. */
struct park_memory {
        struct quota *quota;
        bfc_handle handle; /* 0: none */
        uint64_t offset, n_bytes;
        bool is_owned; /* no record names it: it is freed with the park */
};

/* One of the jobs that copy pieces, in turns of a worker. */
struct park_copier {
        struct worker_job job;
        struct park_copying *copying;
};

struct park_piece;

/* The contents of a block between its memory and its copy. */
struct park_copying {
        struct park_memory memory, copy;
        uint64_t n_bytes;
        bool to_copy; /* else from the copy */
        bool is_running;
        bool is_dropped; /* atomic, by park_copy_drop() */
        struct park_copier copiers[2];
        unsigned n_copiers; /* that are not done */
        void (*done)(struct park_copying *c);
        struct park_piece *pieces; /* constant while they are copied */
        size_t n_pieces, n_taken;  /* atomic: the pieces before are copied or being copied */
        int result;                /* atomic */
};

/* Begins to copy; `memory`, `copy`, `n_bytes` and `to_copy` are set, and both memories stay until done(), which the
 * loop calls with `result`: 0 or negative. -ENOMEM: it is not called. */
int park_copy_start(struct park_copying *c, void (*done)(struct park_copying *c));

/* The contents are of no use any more: the copy ends soon, with -ECANCELED or 0. */
void park_copy_drop(struct park_copying *c);

/* After done(), or without a copy: frees memory that no record names. */
void park_copy_deinit(struct park_copying *c);

/* For the refusal of a request whose copy failed. */
const char *park_copy_sentence(int error);

#endif
