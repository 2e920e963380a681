/* A job: see job.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only the two calls are timed: the clock is read right before and after, and
 * what reading it costs is taken off. Bookkeeping and patterns lie outside.
 * Patterns go to the block and come from it by the library, in pieces, because
 * the memory of a GPU is nothing that this code could touch.
 * Invariant: blocks[i] is not NULL exactly while buffer i is held, and the
 * bytes of these blocks are what `live_bytes` counts. */
#include "ctl/job.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <bfcclient.h>

#define PIECE_BYTES (UINT64_C(1) << 20)

struct life {
        const struct job_plan *plan;
        struct job_totals *totals;
        struct job_result *result;
        bfc_client *client;
        void **blocks;       /* by buffer */
        uint64_t *piece;     /* PIECE_BYTES of a pattern; NULL where none is verified */
        uint64_t seed;       /* of this process's patterns, in this repetition */
        uint64_t live_bytes; /* as requested */
        uint64_t block_bytes;
        uint64_t clock_ns; /* what reading the clock twice costs */
};

/* ---- patterns ------------------------------------------------------------ */

static uint64_t mix(uint64_t n)
{
        n = (n ^ n >> 30) * 0xbf58476d1ce4e5b9ull;
        n = (n ^ n >> 27) * 0x94d049bb133111ebull;
        return n ^ n >> 31;
}

/* The word at each position differs, and so does its first in each block of
 * each process: a block that was moved, swapped or shared is found. */
#define STRIDE 0x9e3779b97f4a7c15ull

static void pattern_make(uint64_t *words, uint64_t n_bytes, uint64_t seed)
{
        uint64_t n_words = n_bytes / 8;
        uint64_t rest = seed + n_words * STRIDE;

        for (uint64_t i = 0; i < n_words; i++)
                words[i] = seed + i * STRIDE;
        memcpy(words + n_words, &rest, n_bytes % 8);
}

/* Where the first wrong byte's word begins; n_bytes where all is right. */
static uint64_t pattern_check(const uint64_t *words, uint64_t n_bytes, uint64_t seed)
{
        uint64_t n_words = n_bytes / 8;
        uint64_t rest = seed + n_words * STRIDE;
        uint64_t difference = 0;

        /* One pass without branches for the usual case, a slow one to find it. */
        for (uint64_t i = 0; i < n_words; i++)
                difference |= words[i] ^ (seed + i * STRIDE);
        for (uint64_t i = 0; difference && i < n_words; i++)
                if (words[i] != seed + i * STRIDE)
                        return i * 8;
        return memcmp(words + n_words, &rest, n_bytes % 8) == 0 ? n_bytes : n_words * 8;
}

static uint64_t piece_at(uint64_t n_bytes, uint64_t at)
{
        return n_bytes - at < PIECE_BYTES ? n_bytes - at : PIECE_BYTES;
}

static int block_write(const struct life *l, void *block, uint64_t n_bytes, uint64_t seed)
{
        int r = 0;

        for (uint64_t at = 0; r == 0 && at < n_bytes; at += PIECE_BYTES) {
                uint64_t n = piece_at(n_bytes, at);

                pattern_make(l->piece, n, seed + at / 8 * STRIDE);
                r = bfc_write(l->client, (char *)block + at, l->piece, n);
        }
        return r;
}

/* *ret_where as of pattern_check(), for the whole block. */
static int block_check(const struct life *l, const void *block, uint64_t n_bytes, uint64_t seed,
                       uint64_t *ret_where)
{
        for (uint64_t at = 0; at < n_bytes; at += PIECE_BYTES) {
                uint64_t n = piece_at(n_bytes, at), where;
                int r = bfc_read(l->client, l->piece, (const char *)block + at, n);

                if (r < 0)
                        return r;
                where = pattern_check(l->piece, n, seed + at / 8 * STRIDE);
                if (where < n) {
                        *ret_where = at + where;
                        return 0;
                }
        }
        *ret_where = n_bytes;
        return 0;
}

static uint64_t seed_of(const struct life *l, uint32_t buffer)
{
        return mix(l->seed + buffer);
}

/* ---- counting ------------------------------------------------------------ */

static uint64_t now_ns(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint64_t measure_clock(void)
{
        uint64_t least = UINT64_MAX;

        for (int i = 0; i < 1000; i++) {
                uint64_t begin = now_ns();
                uint64_t ns = now_ns() - begin;

                least = ns < least ? ns : least;
        }
        return least;
}

static void add_time(struct life *l, uint64_t begin)
{
        uint64_t ns = now_ns() - begin;

        l->result->ns += ns > l->clock_ns ? ns - l->clock_ns : 0;
}

static void raise_to(uint64_t *peak, uint64_t value)
{
        *peak = *peak < value ? value : *peak;
}

static void raise_peak(_Atomic uint64_t *peak, uint64_t value)
{
        uint64_t old = atomic_load(peak);

        while (old < value && !atomic_compare_exchange_weak(peak, &old, value))
                ;
}

static uint64_t round_up(uint64_t n_bytes)
{
        return (n_bytes + JOB_GRANULE - 1) / JOB_GRANULE * JOB_GRANULE;
}

/* Counted after the block is there and before it goes, so that no count is ever
 * higher than what the daemon had handed out. */
static void count_in(struct life *l, uint64_t n_bytes)
{
        uint64_t block = round_up(n_bytes);
        struct job_result *result = l->result;

        l->live_bytes += n_bytes;
        l->block_bytes += block;
        raise_to(&result->peak_live_bytes, l->live_bytes);
        raise_to(&result->peak_block_bytes, l->block_bytes);
        raise_peak(&l->totals->peak_live_bytes, atomic_fetch_add(&l->totals->live_bytes, n_bytes) + n_bytes);
        raise_peak(&l->totals->peak_block_bytes, atomic_fetch_add(&l->totals->block_bytes, block) + block);
}

static void count_out(struct life *l, uint64_t n_bytes)
{
        uint64_t block = round_up(n_bytes);

        l->live_bytes -= n_bytes;
        l->block_bytes -= block;
        atomic_fetch_sub(&l->totals->live_bytes, n_bytes);
        atomic_fetch_sub(&l->totals->block_bytes, block);
}

/* ---- living -------------------------------------------------------------- */

static int fail(struct life *l, int r, const char *what)
{
        const char *sentence = bfc_last_error();

        snprintf(l->result->error, sizeof(l->result->error), "%s: %s", what,
                 *sentence ? sentence : strerror(-r));
        return r;
}

/* After these errors there is no session. */
static bool ends_session(int r)
{
        return r == -ECONNRESET || r == -EIDRM || r == -EPROTO || r == -ENODEV || r == -ECHILD;
}

/* The extents of a block are as large as its first and its last one, or smaller. */
static void look_at_extents(struct life *l, void *block, uint64_t n_bytes)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };

        if (bfc_block_info(l->client, (char *)block + n_bytes - 1, &info) < 0)
                return;
        raise_to(&l->result->largest_extent_bytes, info.extent_bytes);
        raise_to(&l->result->largest_extent_bytes, info.ptr_extent_bytes);
}

static int allocate(struct life *l, uint32_t buffer)
{
        const struct trace_buffer *b = &l->plan->trace->buffers[buffer];
        struct bfc_malloc_options how = { .struct_size = sizeof(how) };
        char tag[TRACE_TAG_MAX + 1];
        bool is_own = trace_is_own(l->plan->trace, buffer, &how.flags, tag);
        void *block = NULL;
        uint64_t begin;
        int r;

        how.tag = is_own ? tag : NULL;
        begin = now_ns();
        r = is_own ? bfc_malloc_with(l->client, b->n_bytes, &how, &block)
                   : bfc_malloc(l->client, b->n_bytes, &block);

        add_time(l, begin);
        if (r < 0 && ends_session(r))
                return fail(l, r, "bfc_malloc");
        if (r < 0) {
                if (l->result->n_refused++ == 0) {
                        const char *sentence = bfc_last_error();

                        snprintf(l->result->refusal, sizeof(l->result->refusal), "%s",
                                 *sentence ? sentence : strerror(-r));
                }
                return 0;
        }
        l->result->n_allocs++;
        l->blocks[buffer] = block;
        count_in(l, b->n_bytes);
        if (l->plan->ends_at_refusal)
                look_at_extents(l, block, b->n_bytes);
        if (l->plan->verify)
                r = block_write(l, block, b->n_bytes, seed_of(l, buffer));
        return r < 0 ? fail(l, r, "bfc_write") : 0;
}

static int check(struct life *l, uint32_t buffer)
{
        const struct trace_buffer *b = &l->plan->trace->buffers[buffer];
        uint64_t where;
        int r = block_check(l, l->blocks[buffer], b->n_bytes, seed_of(l, buffer), &where);

        if (r < 0)
                return fail(l, r, "bfc_read");
        if (where == b->n_bytes)
                return 0;
        if (l->result->n_corruptions++ == 0)
                snprintf(l->result->corruption, sizeof(l->result->corruption),
                         "the block of line %" PRIu32 " (%" PRIu64 " bytes) differs at byte %" PRIu64,
                         b->line, b->n_bytes, where);
        return 0;
}

static int release(struct life *l, uint32_t buffer)
{
        const struct trace_buffer *b = &l->plan->trace->buffers[buffer];
        uint64_t begin;
        int r = 0;

        if (!l->blocks[buffer])
                return 0; /* it was refused */
        if (l->plan->verify)
                r = check(l, buffer);
        if (r < 0)
                return r;
        count_out(l, b->n_bytes);
        begin = now_ns();
        r = bfc_free(l->client, l->blocks[buffer]);
        add_time(l, begin);
        l->blocks[buffer] = NULL;
        if (r < 0)
                return fail(l, r, "bfc_free");
        l->result->n_frees++;
        return 0;
}

static bool has_ended(const struct life *l)
{
        return l->plan->ends_at_refusal && l->result->n_refused > 0;
}

static int live_once(struct life *l)
{
        const struct trace *t = l->plan->trace;
        int r = 0;

        for (size_t i = 0; r == 0 && i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];

                if (*l->plan->stop) {
                        l->result->stopped = true;
                        break;
                }
                r = e->is_free ? release(l, e->buffer) : allocate(l, e->buffer);
                if (has_ended(l))
                        return r;
        }
        /* Only a stopped or broken life still holds anything. */
        for (uint32_t i = 0; i < t->n_buffers; i++) {
                if (r == 0)
                        r = release(l, i);
                else if (l->blocks[i])
                        count_out(l, t->buffers[i].n_bytes);
        }
        return r;
}

static int count_calls(struct life *l, struct bfc_client_stats *stats)
{
        uint64_t n_before = stats->num_calls;
        int r = bfc_stats(l->client, stats);

        if (r < 0)
                return fail(l, r, "bfc_stats");
        l->result->n_last_calls = stats->num_calls - n_before;
        return 0;
}

static int live(struct life *l)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        uint64_t n_before;
        int r = count_calls(l, &stats);

        n_before = stats.num_calls;
        l->clock_ns = measure_clock();
        for (uint32_t i = 0; r == 0 && i < l->plan->n_repeats && !l->result->stopped; i++) {
                l->seed = mix((uint64_t)getpid() << 32 ^ (uint64_t)l->plan->job << 16 ^ i);
                r = live_once(l);
                if (r == 0)
                        r = count_calls(l, &stats);
        }
        if (r == 0) {
                r = bfc_usage(l->client, NULL, &usage);
                r = r < 0 ? fail(l, r, "bfc_usage") : 0;
        }
        if (r < 0)
                return r;
        l->result->peak_charged_bytes = usage.peak_bytes_reserved;
        l->result->n_calls = stats.num_calls - n_before;
        l->result->peak_reserved_bytes = stats.peak_bytes_reserved;
        l->result->n_blocks_left = has_ended(l) ? 0 : stats.num_blocks;
        return 0;
}

void job_run(const struct job_plan *plan, struct job_totals *totals, struct job_result *result)
{
        struct bfc_options options = {
                .struct_size = sizeof(options),
                .socket = plan->socket,
                .partition = plan->partition,
                .tenant = plan->tenant,
                .name = "bfc-replay",
                .trace = "", /* with BFC_TRACE it would write what it reads */
        };
        struct life l = { .plan = plan, .totals = totals, .result = result };
        int r;

        l.blocks = calloc(plan->trace->n_buffers, sizeof(*l.blocks));
        l.piece = plan->verify ? malloc(PIECE_BYTES) : NULL;
        if (!l.blocks || (plan->verify && !l.piece)) {
                snprintf(result->error, sizeof(result->error), "out of memory");
        } else {
                r = bfc_connect(&options, &l.client);
                if (r < 0)
                        fail(&l, r, "bfc_connect");
                else
                        live(&l);
                bfc_disconnect(l.client);
        }
        free(l.piece);
        free(l.blocks);
        result->done = true;
}
