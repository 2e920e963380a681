/* A job: one client process that replays a trace.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It uses only bfcclient.h. Its result is in memory that the parent shares, so a job's counts are known
 * even if it was killed. */
#ifndef BFC_CTL_JOB_H
#define BFC_CTL_JOB_H

#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "ctl/trace.h"

#define JOB_GRANULE 256u /* sizes of blocks are multiples of it */

struct job_plan {
        const struct trace *trace;
        const char *socket; /* NULL, as in struct bfc_options */
        const char *partition;
        const char *tenant;
        uint32_t job; /* its number, from 0 */
        uint32_t n_repeats;
        bool verify;
        bool ends_at_refusal;              /* the first one; its blocks are freed by the disconnection */
        const volatile sig_atomic_t *stop; /* not 0: free everything and end */
};

/* Of all jobs together, at one moment. peak >= live. */
struct job_totals {
        _Atomic uint64_t live_bytes; /* as requested */
        _Atomic uint64_t peak_live_bytes;
        _Atomic uint64_t block_bytes; /* as rounded up */
        _Atomic uint64_t peak_block_bytes;
};

struct job_result {
        uint64_t n_allocs; /* granted */
        uint64_t n_frees;
        uint64_t n_refused;
        uint64_t ns; /* inside bfc_malloc() and bfc_free() */
        uint64_t peak_live_bytes;
        uint64_t peak_block_bytes;
        uint64_t peak_reserved_bytes;  /* memory that the client had from the daemon, in use or idle */
        uint64_t peak_charged_bytes;   /* of its tenant in the partition */
        uint64_t largest_extent_bytes; /* in which a block begins or ends; with ends_at_refusal */
        uint64_t n_calls;              /* requests to the daemon */
        uint64_t n_last_calls;         /* of these in the last repetition */
        uint64_t n_corruptions;        /* blocks whose contents had changed */
        uint64_t n_blocks_left;        /* as the library counts, after all frees */
        bool stopped;                  /* by the signal */
        bool done;                     /* ended by itself, successfully or not */
        char refusal[512];             /* the first sentence */
        char corruption[256];          /* the first one */
        char error[512];               /* why the job failed, or "" */
};

/* Connects, replays the trace, disconnects. *result is initially zero. */
void job_run(const struct job_plan *plan, struct job_totals *totals, struct job_result *result);

#endif
