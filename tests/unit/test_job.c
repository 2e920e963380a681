/* A job, with a client library that is made here: one that refuses, forgets,
 * loses its daemon or leaks, as each test asks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <bfcclient.h>

#include "ctl/job.h"
#include "ctl/report.h"
#include "ctl/trace.h"

/* ---- a client library ---------------------------------------------------- */

struct bfc_client {
        int unused;
};

static struct {
        struct bfc_client client;
        uint64_t n_calls; /* of bfc_malloc() */
        uint64_t n_connected;
        uint64_t n_held;
        uint64_t refuse_call; /* the call that is refused, from 1; 0: none */
        int refuse_with;
        uint64_t flip_call;  /* the block that loses a bit as soon as another comes */
        uint64_t share_call; /* the call that gets the first block once more */
        uint64_t stop_call;  /* the call during which the signal comes */
        uint64_t n_copies;   /* of bfc_write() and bfc_read() */
        uint64_t fail_copy;  /* the copy that fails; 0: none */
        uint64_t leak;       /* blocks more than there are */
        int connect_with;
        void *flip_block;
        void *first_block;
        unsigned n_first_users;
        size_t flip_at;
        struct bfc_options options;
        bool ends_at_refusal; /* the job's */
        uint64_t asked_bytes; /* by the last call */
        uint64_t flags;       /* of the last bfc_malloc_with(), and its tag */
        char tag[32];
        volatile sig_atomic_t stop;
} fake;

int bfc_connect(const struct bfc_options *options, bfc_client **ret_client)
{
        fake.options = *options;
        if (fake.connect_with)
                return fake.connect_with;
        fake.n_connected++;
        *ret_client = &fake.client;
        return 0;
}

void bfc_disconnect(bfc_client *client)
{
        if (client)
                fake.n_connected--;
}

int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr)
{
        void *block;

        ck_assert_ptr_eq(client, &fake.client);
        fake.n_calls++;
        fake.asked_bytes = n_bytes;
        if (fake.flip_block)
                ((unsigned char *)fake.flip_block)[fake.flip_at] ^= 0x10;
        fake.flip_block = NULL;
        if (fake.n_calls == fake.stop_call)
                fake.stop = 1;
        if (fake.n_calls == fake.refuse_call)
                return fake.refuse_with;
        block = fake.first_block;
        if (fake.n_calls != fake.share_call)
                block = aligned_alloc(256, (n_bytes + 255) / 256 * 256);
        ck_assert_ptr_nonnull(block);
        if (fake.n_calls == 1)
                fake.first_block = block;
        if (block == fake.first_block)
                fake.n_first_users++;
        if (fake.n_calls == fake.flip_call)
                fake.flip_block = block;
        fake.n_held++;
        *ret_ptr = block;
        return 0;
}

int bfc_malloc_with(bfc_client *client, size_t n_bytes, const struct bfc_malloc_options *options,
                    void **ret_ptr)
{
        fake.flags = options->flags;
        snprintf(fake.tag, sizeof(fake.tag), "%s", options->tag);
        return bfc_malloc(client, n_bytes, ret_ptr);
}

int bfc_free(bfc_client *client, void *ptr)
{
        ck_assert_ptr_eq(client, &fake.client);
        ck_assert_ptr_nonnull(ptr);
        fake.n_held--;
        if (ptr != fake.first_block || --fake.n_first_users == 0)
                free(ptr);
        return 0;
}

/* A job may use neither a block's memory itself, nor more than it asked for. */
static int copy(void *to, const void *from, size_t n_bytes)
{
        if (++fake.n_copies == fake.fail_copy)
                return -ENODEV;
        ck_assert_uint_gt(n_bytes, 0);
        memcpy(to, from, n_bytes);
        return 0;
}

int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes)
{
        ck_assert_ptr_eq(client, &fake.client);
        return copy(ptr, src, n_bytes);
}

int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes)
{
        ck_assert_ptr_eq(client, &fake.client);
        return copy(dst, ptr, n_bytes);
}

int bfc_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        ck_assert_ptr_eq(client, &fake.client);
        ck_assert_uint_eq(ret->struct_size, sizeof(*ret));
        ret->num_blocks = fake.n_held + fake.leak;
        return 0;
}

int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret)
{
        ck_assert_ptr_eq(client, &fake.client);
        ck_assert_ptr_null(partition);
        ck_assert_uint_eq(ret->struct_size, sizeof(*ret));
        ret->peak_bytes_reserved = 123456;
        return 0;
}

/* A block begins in an extent of its size, and ends in one twice as large. */
int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret)
{
        ck_assert_ptr_eq(client, &fake.client);
        ck_assert_ptr_nonnull(ptr);
        ck_assert_uint_eq(ret->struct_size, sizeof(*ret));
        ret->extent_bytes = fake.asked_bytes;
        ret->ptr_extent_bytes = 2 * fake.asked_bytes;
        return 0;
}

const char *bfc_last_error(void)
{
        return "the quota is \x1b full";
}

/* ---- tests --------------------------------------------------------------- */

static struct trace *trace;
static struct job_totals totals;
static struct job_result result;

static struct trace *read_text(const char *text)
{
        FILE *in = fmemopen((void *)(uintptr_t)text, strlen(text), "r");
        struct trace *t = NULL;
        char *error = NULL;

        ck_assert_int_eq(trace_read(in, "t.csv", &t, &error), 0);
        fclose(in);
        return t;
}

static void setup(void)
{
        static const char text[] = "id,lower,upper,size\n"
                                   "0,0,10,1000\n"
                                   "1,1,4,77\n"
                                   "2,2,8,4096\n"
                                   "3,5,9,1\n";

        trace = read_text(text);
        memset(&fake, 0, sizeof(fake));
        memset(&totals, 0, sizeof(totals));
        memset(&result, 0, sizeof(result));
}

static void teardown(void)
{
        ck_assert_uint_eq(fake.n_connected, 0);
        ck_assert_uint_eq(fake.n_held, 0);
        ck_assert_uint_eq(totals.live_bytes, 0);
        ck_assert_uint_eq(totals.block_bytes, 0);
        ck_assert(result.done);
        trace = trace_free(trace);
}

FIXTURE(job, setup, teardown);

static void run(uint32_t n_repeats, bool verify)
{
        struct job_plan plan = {
                .trace = trace,
                .partition = "train",
                .tenant = "vision",
                .n_repeats = n_repeats,
                .verify = verify,
                .ends_at_refusal = fake.ends_at_refusal,
                .stop = &fake.stop,
        };

        job_run(&plan, &totals, &result);
}

static struct report report(void)
{
        struct report r = {
                .trace_name = "t.csv",
                .trace = trace,
                .scale = 1,
                .n_jobs = 1,
                .n_repeats = 1,
                .verify = true,
                .totals = &totals,
                .results = &result,
        };

        return r;
}

static char *troubles(void)
{
        struct report r = report();
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        report_troubles(out, &r);
        fclose(out);
        return text;
}

static int status(void)
{
        struct report r = report();

        return report_status(&r);
}

TEST(replay_without_errors)
{
        char *text;

        run(3, true);
        ck_assert_uint_eq(result.n_allocs, 12);
        ck_assert_uint_eq(result.n_frees, 12);
        ck_assert_uint_eq(result.n_refused, 0);
        ck_assert_uint_eq(result.n_corruptions, 0);
        ck_assert_uint_eq(result.n_blocks_left, 0);
        ck_assert_uint_eq(result.peak_live_bytes, trace_peak(trace, 1));
        ck_assert_uint_eq(result.peak_block_bytes, trace_peak(trace, 256));
        ck_assert_uint_eq(totals.peak_live_bytes, result.peak_live_bytes);
        ck_assert_uint_eq(totals.peak_block_bytes, result.peak_block_bytes);
        ck_assert_str_eq(result.error, "");
        ck_assert_str_eq(fake.options.partition, "train");
        ck_assert_str_eq(fake.options.tenant, "vision");
        ck_assert_uint_eq(fake.options.struct_size, sizeof(struct bfc_options));
        ck_assert_int_eq(status(), REPORT_FINE);
        text = troubles();
        ck_assert_str_eq(text, "");
        free(text);
}

/* As a plan asks for it. */
TEST(refused_request_ends_the_replay)
{
        fake.ends_at_refusal = true;
        fake.refuse_call = 1;
        fake.refuse_with = -EDQUOT;
        fake.leak = 1; /* the disconnection frees it */
        run(1, false);
        ck_assert_uint_eq(fake.n_calls, 1);
        ck_assert_uint_eq(result.n_refused, 1);
        ck_assert_int_eq(status(), REPORT_REFUSED);
        ck_assert_str_eq(result.error, "");
}

TEST(extents_and_charges_are_looked_at)
{
        fake.ends_at_refusal = true;
        run(1, false);
        ck_assert_uint_eq(result.n_allocs, 4);
        ck_assert_uint_eq(result.peak_charged_bytes, 123456);
        ck_assert_uint_eq(result.largest_extent_bytes, 2 * 4096);
}

TEST(refused_request_does_not_stop_the_replay)
{
        char *text;

        fake.refuse_call = 3;
        fake.refuse_with = -EDQUOT;
        run(1, true);
        ck_assert_uint_eq(result.n_allocs, 3);
        ck_assert_uint_eq(result.n_frees, 3);
        ck_assert_uint_eq(result.n_refused, 1);
        ck_assert_uint_eq(result.peak_live_bytes, 1077);
        ck_assert_int_eq(status(), REPORT_REFUSED);
        text = troubles();
        ck_assert_str_eq(text, "bfc-replay: 1 of 4 allocations were refused; first: "
                               "the quota is \\x1b full\n");
        free(text);
}

LOOP_TEST(corrupted, 4)
{
        static const struct {
                uint64_t call;
                size_t at;
                const char *sentence;
        } flips[] = {
                { 1, 0, "the block of line 2 (1000 bytes) differs at byte 0" },
                { 1, 517, "the block of line 2 (1000 bytes) differs at byte 512" },
                { 1, 999, "the block of line 2 (1000 bytes) differs at byte 992" },
                { 2, 76, "the block of line 3 (77 bytes) differs at byte 72" }, /* after the last word */
        };

        fake.flip_call = flips[_i].call;
        fake.flip_at = flips[_i].at;
        run(1, true);
        ck_assert_uint_eq(result.n_corruptions, 1);
        ck_assert_str_eq(result.corruption, flips[_i].sentence);
        ck_assert_int_eq(status(), REPORT_CORRUPTED);
}

/* A block is copied in pieces of a MiB; the pattern goes on across them. */
LOOP_TEST(corrupted_in_a_later_piece, 4)
{
        static const size_t places[] = { 1048575, 1048576, 2097151, 2097158 };
        char sentence[100];

        trace_free(trace);
        trace = read_text("id,lower,upper,size\n0,0,10,2097159\n1,1,2,1\n");
        fake.flip_call = 1;
        fake.flip_at = places[_i];
        run(1, true);
        ck_assert_uint_eq(result.n_corruptions, 1);
        ck_assert_uint_eq(fake.n_copies, 3u + 2u + (_i == 0 ? 1u : _i < 3 ? 2u : 3u));
        snprintf(sentence, sizeof(sentence), "the block of line 2 (2097159 bytes) differs at byte %zu",
                 places[_i] / 8 * 8);
        ck_assert_str_eq(result.corruption, sentence);
}

/* Of a recording; in other traces tags are labels only. */
TEST(tags_and_flags)
{
        trace_free(trace);
        trace = read_text("id,lower,upper,size,tag,flags\n0,0,10,1000,kv,2\n");
        run(1, false);
        ck_assert_uint_eq(fake.flags, BFC_WHOLE);
        ck_assert_str_eq(fake.tag, "kv");
        memset(&fake, 0, sizeof(fake));
        trace_free(trace);
        trace = read_text("id,lower,upper,size,tag\n0,0,10,1000,kv\n");
        run(1, false);
        ck_assert_str_eq(fake.tag, "");
}

LOOP_TEST(a_copy_fails, 2)
{
        trace_free(trace);
        trace = read_text("id,lower,upper,size\n0,0,10,1000\n");
        fake.fail_copy = (uint64_t)_i + 1;
        run(5, true);
        ck_assert_uint_eq(fake.n_calls, 1); /* nothing more was tried */
        ck_assert_str_eq(result.error,
                         _i == 0 ? "bfc_write: the quota is \x1b full" : "bfc_read: the quota is \x1b full");
        ck_assert_uint_eq(result.n_corruptions, 0);
        ck_assert_int_eq(status(), REPORT_REFUSED);
        ck_assert_uint_eq(fake.n_held, 1); /* until the session's end */
        free(fake.first_block);
        fake.n_held = 0;
}

/* Two buffers of one process in one place: the one that was written first lost. */
TEST(overlapping_blocks_are_found)
{
        fake.share_call = 2;
        run(1, true);
        ck_assert_uint_eq(result.n_corruptions, 1);
        ck_assert_str_eq(result.corruption, "the block of line 2 (1000 bytes) differs at byte 0");
}

TEST(unverified_replay_ignores_corruption)
{
        fake.flip_call = 1;
        run(1, false);
        ck_assert_uint_eq(result.n_corruptions, 0);
        ck_assert_int_eq(status(), REPORT_FINE);
}

TEST(blocks_left_at_the_end)
{
        fake.leak = 2;
        run(1, false);
        ck_assert_uint_eq(result.n_blocks_left, 2);
        ck_assert_int_eq(status(), REPORT_CORRUPTED);
}

TEST(daemon_lost)
{
        fake.refuse_call = 1;
        fake.refuse_with = -ECONNRESET;
        run(5, true);
        ck_assert_uint_eq(fake.n_calls, 1); /* nothing more was tried */
        ck_assert_uint_eq(result.n_refused, 0);
        ck_assert_str_eq(result.error, "bfc_malloc: the quota is \x1b full");
        ck_assert_int_eq(status(), REPORT_REFUSED);
}

TEST(not_connected)
{
        char *text;

        fake.connect_with = -EACCES;
        run(1, true);
        ck_assert_uint_eq(fake.n_calls, 0);
        ck_assert_int_eq(status(), REPORT_REFUSED);
        text = troubles();
        ck_assert_str_eq(text, "bfc-replay: the job failed: bfc_connect: the quota is \\x1b full\n");
        free(text);
}

TEST(stopped)
{
        fake.stop_call = 3;
        run(100, true);
        ck_assert_uint_eq(fake.n_calls, 3);
        ck_assert_uint_eq(result.n_allocs, 3);
        ck_assert_uint_eq(result.n_frees, 3); /* all was given back */
        ck_assert(result.stopped);
        ck_assert_uint_eq(result.n_corruptions, 0);
        ck_assert_int_eq(status(), REPORT_REFUSED);
}

TEST(json)
{
        static const char *const keys[] = {
                "schema",           "trace",           "jobs",        "operations",        "failures",
                "ns_per_operation", "peak_live_bytes", "corruptions", "failure_message",   "peak_block_bytes",
                "blocks_left",      "per_job",         "calls",       "calls_last_repeat", "held_over_live"
        };
        struct report r = report();
        json_t *document, *job;

        fake.refuse_call = 2;
        fake.refuse_with = -ENOMEM;
        run(1, true);
        document = report_json(&r);
        ck_assert_ptr_nonnull(document);
        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++)
                ck_assert_msg(json_object_get(document, keys[i]) != NULL, "no %s", keys[i]);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "schema")), 1);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "operations")), 7);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "failures")), 1);
        ck_assert_str_eq(json_string_value(json_object_get(document, "failure_message")),
                         "the quota is \x1b full");
        ck_assert(json_is_null(json_object_get(document, "corruption_message")));
        ck_assert_int_eq(json_integer_value(json_object_get(document, "peak_live_bytes")), 5097);
        job = json_array_get(json_object_get(document, "per_job"), 0);
        ck_assert_int_eq(json_integer_value(json_object_get(job, "peak_block_bytes")), 5376);
        ck_assert_int_eq(json_integer_value(json_object_get(job, "operations")), 7);
        json_decref(document);
}
