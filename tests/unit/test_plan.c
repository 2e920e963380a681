/* Plans: what they say holds, and what cannot be planned. tests/bench/plan.py compares them with daemons.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/generate.h"
#include "ctl/plan.h"

static struct trace *trace;
static struct plan_options options;

static void read_text(char *text, size_t n)
{
        FILE *in = fmemopen(text, n, "r");
        char *error = NULL;

        ck_assert_ptr_nonnull(in);
        ck_assert_msg(trace_read(in, "t.csv", &trace, &error) == 0, "%s", error);
        fclose(in);
        options.trace = trace;
}

/* Large enough that the search has to bisect. */
static void generate(void)
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(generate_trace(out, "random", 3, 1), 0);
        fclose(out);
        read_text(text, n);
        free(text);
}

static void setup(void)
{
        options = (struct plan_options){ .has_cache = true };
        plan_place_init(&options.place);
}

static void teardown(void)
{
        trace = trace_free(trace);
        /* The daemon's pages are closed on a thread. */
        for (int i = 0; suite_count_fds() != suite_n_fds_before && i < 60000; i++)
                usleep(1000);
}

FIXTURE(plan, setup, teardown);

static struct plan find(void)
{
        struct plan plan;
        char *error = NULL;

        ck_assert_msg(plan_find(&options, &plan, &error) == 0, "%s", error);
        return plan;
}

static bool serves(uint64_t limit_bytes)
{
        uint32_t refused = 0;
        char *error = NULL;

        ck_assert_msg(plan_try(&options, limit_bytes, &refused, &error) == 0, "%s", error);
        return refused == 0;
}

/* On the host and on GPUs, with the client's cache and without. */
LOOP_TEST(least_limit, 6)
{
        struct plan plan;

        generate();
        options.has_cache = _i % 2 == 0;
        options.place.is_cuda = _i / 2 > 0;
        options.place.is_ipc = _i / 2 > 1;
        plan = find();
        ck_assert_uint_eq(plan.peak_live_bytes, trace_peak(trace, 1));
        ck_assert_int_eq((int64_t)plan.limit_bytes, (int64_t)plan.peak_live_bytes + plan.rounding_bytes +
                                                            plan.placement_bytes + plan.extent_bytes +
                                                            plan.cache_bytes);
        ck_assert_int_eq(plan.rounding_bytes, (int64_t)(trace_peak(trace, 256) - trace_peak(trace, 1)));
        ck_assert(options.has_cache || plan.cache_bytes == 0);
        ck_assert_uint_le(plan.peak_charged_bytes, plan.limit_bytes);
        ck_assert_uint_ge(plan.peak_charged_bytes, trace_peak(trace, 256));
        ck_assert(serves(plan.limit_bytes));
        ck_assert(!serves(plan.limit_bytes - PLAN_STEP_BYTES));
}

/* One block, which needs no more than its extents. */
TEST(one_block)
{
        char text[] = "id,lower,upper,size\n0,0,1,5242880\n";

        read_text(text, strlen(text));
        ck_assert_uint_eq(find().limit_bytes, 6 * MIB);
        options.place.is_preallocated = true;
        ck_assert_uint_eq(find().limit_bytes, 6 * MIB);
}

/* The peak is no multiple of the step with which the region is searched. */
TEST(no_gaps)
{
        char text[] = "id,lower,upper,size\n0,0,1,52428800\n";
        struct plan plan;

        read_text(text, strlen(text));
        plan = find();
        ck_assert_int_eq(plan.placement_bytes, 0);
        ck_assert_int_eq(plan.extent_bytes, 0);
        ck_assert_uint_eq(plan.limit_bytes, 50 * MIB);
}

/* A block of 1 byte is cut from a slab of 2 MiB, in which there is room for the other block, too. As a block of the
 * daemon that needs an extent of its own. Without the column flags a tag is a label only. */
TEST(blocks_of_the_daemon)
{
        static const struct {
                const char *text;
                uint64_t limit_bytes;
        } cases[] = { { "id,lower,upper,size,tag\n0,0,9,1,\n1,1,9,1572864,w\n", 2 * MIB },
                      { "id,lower,upper,size,tag,flags\n0,0,9,1,,0\n1,1,9,1572864,w,0\n", 4 * MIB },
                      { "id,lower,upper,size,flags\n0,0,9,1,0\n1,1,9,1572864,2\n", 4 * MIB } };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                char text[128];

                snprintf(text, sizeof(text), "%s", cases[i].text);
                trace = trace_free(trace);
                read_text(text, strlen(text));
                ck_assert_uint_eq(find().limit_bytes, cases[i].limit_bytes);
        }
}

/* Those of a job of bfcctl run, and wrong ones. */
TEST(no_variable_changes_a_plan)
{
        static const char *const variables[] = { "BFC_PARTITION", "BFC_TENANT", "BFC_SOCKET",
                                                 "BFC_INHERIT",   "BFC_CACHE",  "BFC_RETURN_MS",
                                                 "BFC_WAIT_MS",   "BFC_TRACE" };
        struct plan expected, plan;

        generate();
        expected = find();
        for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
                setenv(variables[i], "off", 1);
        plan = find();
        plan.seconds = expected.seconds;
        ck_assert_mem_eq(&plan, &expected, sizeof(plan));
}

/* Blocks 0 and 2 are freed around block 1, so block 3 does not fit into a region of the peak's 3 MiB. */
TEST(gaps)
{
        char text[] = "id,lower,upper,size\n0,0,1,1048576\n1,0,2,1048576\n2,0,1,1048576\n3,1,2,2097152\n";
        struct plan plan;

        read_text(text, strlen(text));
        plan = find();
        ck_assert_uint_eq(plan.peak_live_bytes, 3 * MIB);
        ck_assert_int_eq(plan.placement_bytes, (int64_t)(1 * MIB));
}

/* With cuda-ipc a large block has its own extent, and preallocated memory is one extent. */
TEST(largest_extent)
{
        char text[] = "id,lower,upper,size\n0,0,1,67108864\n";

        read_text(text, strlen(text));
        ck_assert_uint_eq(find().largest_extent_bytes, 2 * MIB);
        options.place.is_cuda = true;
        ck_assert_uint_eq(find().largest_extent_bytes, 2 * MIB);
        options.place.is_ipc = true;
        ck_assert_uint_eq(find().largest_extent_bytes, 64 * MIB);
        options.place.is_preallocated = true;
        ck_assert_uint_eq(find().largest_extent_bytes, find().limit_bytes);
}

/* The line of the first refusal is told. */
TEST(refused_line)
{
        char text[] = "id,lower,upper,size\n0,0,9,1048576\n1,1,9,1048576\n2,2,9,1048576\n";
        uint32_t refused = 0;
        char *error = NULL;

        read_text(text, strlen(text));
        ck_assert_int_eq(plan_try(&options, 2 * MIB, &refused, &error), 0);
        ck_assert_uint_eq(refused, 4);
}

/* What is refused for another reason than the limit has no plan. */
TEST(no_limit_serves)
{
        struct plan plan;
        char *error = NULL;

        generate();
        options.has_cache = false;
        options.place.max_blocks = 20;
        ck_assert_int_eq(plan_find(&options, &plan, &error), -ERANGE);
        ck_assert_msg(strstr(error, "max_blocks is 20"), "%s", error);
        free(error);
}

TEST(stopped)
{
        volatile sig_atomic_t stop = 1;
        struct plan plan;
        char *error = NULL;

        generate();
        options.stop = &stop;
        ck_assert_int_eq(plan_find(&options, &plan, &error), -EINTR);
        free(error);
}
