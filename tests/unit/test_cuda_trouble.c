/* Unreclaimed memory, lost devices, pending work, captures.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"
#include "tests/unit/late.h"

FIXTURE(trouble, case_setup, case_teardown);

/* ---- unreclaimed memory -------------------------------------------------- */

/* A job that does not let go. */
LOOP_TEST(mapped_extent_is_unreclaimed, N_SHARES)
{
        struct process owner = owner_start(), job = job_start((enum device_share)_i, 8 * MIB);
        int n_fds_owner = n_fds(&owner);
        struct message e, kept, others = { .fd = -1 };

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&owner, &e), -EBUSY);
        ck_assert_int_eq(n_fds(&owner), n_fds_owner);
        ck_assert_uint_eq(n_free(&owner), 56 * MIB);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &kept), 0);
        forget(&kept);
        ck_assert_int_eq(process_call(&owner, act_others, &others), 0);
        ck_assert_uint_eq(others.a, 8 * MIB); /* it is among what others hold */
        process_kill(&job);
        ck_assert_int_eq(process_call(&owner, act_others, &others), 0);
        ck_assert_uint_eq(others.a, 0);
        ck_assert_int_eq(destroy(&owner, &kept), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB); /* it returns in the end */
        owner_end(&owner);
}

/* a: after so many ms. */
static int act_drop_later(struct message *m)
{
        if (m->a > 0)
                return late_call(m->a, act_drop_fd);
        act_drop_fd();
        return 0;
}

/* Somebody to whom the fd was passed on, without any CUDA. */
TEST(open_fd_leaves_extent_unreclaimed)
{
        struct process owner, fugitive;
        struct message e, m;

        late_begin();
        owner = owner_start();
        fugitive = process_start();
        for (int late = 1; late >= 0; late--) {
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 8 * MIB, &e), 0);
                m = (struct message){ .fd = e.fd };
                ck_assert_int_eq(process_call(&fugitive, act_keep_fd, &m), 0);
                forget(&e);
                m = (struct message){ .fd = -1, .a = 15 };
                if (late) /* memory that returns late is reclaimed */
                        ck_assert_int_eq(process_call(&fugitive, act_drop_later, &m), 0);
                ck_assert_int_eq(destroy(&owner, &e), late ? 0 : -EBUSY);
                if (!late)
                        ck_assert_int_eq(tell(&fugitive, act_drop_later), 0);
                ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        }
        ck_assert_int_eq(process_end(&fugitive), 0);
        owner_end(&owner);
        late_end();
}

/* After unreclaimed memory destroy() does not wait, until memory has returned at once. */
TEST(no_wait_after_an_unreclaimed_extent)
{
        static const struct {
                uint64_t late_ms;
                int result;
        } steps[] = { { UINT64_MAX, -EBUSY }, { 55, -EBUSY }, { 0, 0 }, { 15, 0 } };
        struct process owner, fugitive;
        struct message e, m;

        late_begin();
        owner = owner_start();
        fugitive = process_start();
        for (size_t i = 0; i < sizeof(steps) / sizeof(steps[0]); i++) {
                late_pass(1100); /* what may be waited in a second is there again */
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
                m = (struct message){ .fd = e.fd };
                if (steps[i].late_ms > 0)
                        ck_assert_int_eq(process_call(&fugitive, act_keep_fd, &m), 0);
                forget(&e);
                m = (struct message){ .fd = -1, .a = steps[i].late_ms };
                if (steps[i].late_ms > 0 && steps[i].late_ms < UINT64_MAX)
                        ck_assert_int_eq(process_call(&fugitive, act_drop_later, &m), 0);
                ck_assert_msg(destroy(&owner, &e) == steps[i].result, "step %zu", i);
                if (steps[i].late_ms == UINT64_MAX)
                        ck_assert_int_eq(tell(&fugitive, act_drop_later), 0);
                else
                        late_pass(steps[i].late_ms);
                ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        }
        ck_assert_int_eq(process_end(&fugitive), 0);
        owner_end(&owner);
        late_end();
}

/* Whatever returns and whatever does not: waiting is bounded. */
TEST(wait_for_a_destroyed_extent_is_bounded)
{
        struct process owner, job;
        struct message e[24], plain;
        uint64_t start_ms;

        late_begin();
        owner = owner_start();
        job = job_start(DEVICE_SHARE_FD, 48 * MIB);
        for (unsigned int i = 0; i < 24; i++) {
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 2 * MIB, &e[i]), 0);
                ck_assert_int_eq(map(&job, i * 2 * MIB, &e[i]), 0);
                forget(&e[i]);
        }
        start_ms = late_now_ms();
        for (unsigned int i = 0; i < 24; i++) { /* 95 ms each would be 2.3 s */
                ck_assert_int_eq(destroy(&owner, &e[i]), -EBUSY);
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &plain), 0);
                ck_assert_int_eq(destroy(&owner, &plain), 0);
        }
        ck_assert_uint_gt(late_now_ms(), start_ms);
        ck_assert_uint_le(late_now_ms() - start_ms, 100);
        job_end(&job);
        owner_end(&owner);
        late_end();
}

/* At the end of the process destroy() does not check. */
LOOP_TEST(no_wait_at_process_end, N_SHARES)
{
        struct process owner = owner_start(), job = job_start((enum device_share)_i, 8 * MIB);
        struct message e;

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(tell(&owner, act_end), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        process_kill(&job);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

/* Others take memory and give it back: only what they do in the very moment counts. */
LOOP_TEST(others_on_the_device, N_SHARES)
{
        struct process owner, job;
        struct message e;

        setenv("FAKE_CUDA_CONTEXT_BYTES", "8MiB", 1);
        owner = owner_start();
        ck_assert_uint_eq(n_free(&owner), 56 * MIB);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
        job = job_start((enum device_share)_i, 8 * MIB); /* a context that came between */
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        job_end(&job);
        job = job_start((enum device_share)_i, 8 * MIB);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        job_end(&job);
        owner_end(&owner);
}

/* What others take in the very moment: the first four looks are those of opening, the fifth is the
 * one before. */
#define BEFORE  "0,0,0,0,0"
#define TEN(is) is "," is "," is "," is "," is "," is "," is "," is "," is "," is

LOOP_TEST(others_take_memory_meanwhile, N_SHARES)
{
        static const struct {
                const char *foreign;
                bool is_held;
                int result;
        } cases[] = {
                { BEFORE "," TEN("2MiB"), false, 0 },              /* half came back */
                { BEFORE "," TEN("6MiB"), false, 0 },              /* less: that proves nothing */
                { BEFORE "," TEN("24MiB"), false, 0 },             /* a context larger than the extent */
                { BEFORE ",24MiB,24MiB," TEN("16MiB"), false, 0 }, /* it shows late, below the first look */
                { TEN("8MiB"), false, 0 },                         /* what was there before */
                { TEN("8MiB"), true, -EBUSY },                     /* nothing moved: it is held */
                { BEFORE "," TEN("2MiB"), true, 0 },               /* what cannot be told is not reported */
        };
        char setting[128];

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                struct process owner = process_start(), job = job_start((enum device_share)_i, 8 * MIB);
                struct message e;

                snprintf(setting, sizeof(setting), "FAKE_CUDA_FOREIGN=%s", cases[i].foreign);
                set(&owner, setting);
                ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
                ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
                if (cases[i].is_held)
                        ck_assert_int_eq(map(&job, 0, &e), 0);
                forget(&e);
                ck_assert_msg(destroy(&owner, &e) == cases[i].result, "case %zu", i);
                process_kill(&job);
                (void)n_free(&owner); /* the memory of the killed process is free now */
                owner_end(&owner);
        }
}

/* Jobs start and end while memory is given back: none of it is reported. */
LOOP_TEST(contexts_come_and_go, N_SHARES)
{
        struct process owner = owner_start(), job = process_start();
        struct message e, m = { .fd = -1, .a = 1 };

        set(&job, "FAKE_CUDA_CONTEXT_BYTES=18MiB");
        ck_assert_int_eq(process_call(&job, act_come_and_go, &m), 0);
        for (int i = 0; i < (suite_is_long() ? 200 : 40); i++) { /* a process here makes 256 at most */
                int r;

                ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
                forget(&e);
                r = destroy(&owner, &e);
                ck_assert_msg(r == 0, "extent %d: %d", i, r);
        }
        m = (struct message){ .fd = -1 };
        ck_assert_int_eq(process_call(&job, act_come_and_go, &m), 0);
        ck_assert_int_eq(process_end(&job), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

LOOP_TEST(frees_show_late, N_SHARES)
{
        struct process owner = process_start();
        struct message e;

        set(&owner, "FAKE_CUDA_FREE_LATE_MS=20");
        ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* It outlives its parent, and what the parent had mapped. */
LOOP_TEST(forked_child_keeps_the_extent, N_SHARES)
{
        struct process owner = owner_start(), job = process_start();
        struct message e, child = { .fd = -1 };

        set(&job, "FAKE_CUDA_FORK_KEEPS=1");
        ck_assert_int_eq(range(&job, uuid_0, (enum device_share)_i, 8 * MIB), 0);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(process_call(&job, act_fork_and_wait, &child), 0);
        process_kill(&job);
        ck_assert_int_eq(destroy(&owner, &e), -EBUSY);
        ck_assert_int_eq(kill((pid_t)child.a, SIGKILL), 0);
        for (int i = 0; i < 6000 && n_free(&owner) != 64 * MIB; i++)
                usleep(10000);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

TEST(two_threads_do_not_disturb_each_other)
{
        struct process owner = owner_start();

        ck_assert_int_eq(tell(&owner, act_churn), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

/* ---- lost devices -------------------------------------------------------- */

static void lose(unsigned int index, const char *code)
{
        char name[16], path[128];
        FILE *f;

        snprintf(name, sizeof(name), "lost-%u", index);
        in_folder(name, path);
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fputs(code, f);
        fclose(f);
}

LOOP_TEST(a_lost_device_stays_lost, 4)
{
        static const char *const codes[] = { "214", "46", "999", "220" };
        struct process owner = owner_start(), job = job_start(DEVICE_SHARE_FD, 8 * MIB);
        struct message e[2], kept, facts = { .fd = -1 };
        int n_fds_owner = n_fds(&owner);
        uint64_t n_other;
        char path[128];

        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(make(&owner, (enum device_share)i, 4 * MIB, &e[i]), 0);
        ck_assert_int_eq(map(&job, 0, &e[0]), 0);

        ck_assert_int_eq(tell(&owner, act_swap), 0);
        ck_assert_int_eq(open_device(&owner, "cuda:1"), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &kept), 0);
        ck_assert_int_eq(tell(&owner, act_swap), 0);

        lose(0, codes[_i]);
        ck_assert_int_eq(process_call(&owner, act_facts, &facts), -ENODEV);
        ck_assert_int_eq(map(&job, 4 * MIB, &e[0]), -ENODEV);
        n_other = 42;
        ck_assert_int_ge(-EIO, copy_in(&job, 0, 1, 1));
        ck_assert_int_lt(copy_out_other(&job, 0, 1, 1, &n_other), 0);
        ck_assert_uint_eq(n_other, 42);
        in_folder("lost-0", path);
        unlink(path); /* a lost device stays lost */
        forget(&e[0]);
        facts = (struct message){ .fd = -1 };
        ck_assert_int_eq(process_call(&owner, act_facts, &facts), -ENODEV);
        for (int i = 0; i < 2; i++) {
                struct message more;

                ck_assert_int_eq(make(&owner, (enum device_share)i, 2 * MIB, &more), -ENODEV);
                ck_assert_int_eq(destroy(&owner, &e[i]), -ENODEV);
        }
        ck_assert_int_eq(n_fds(&owner), n_fds_owner + 1); /* the other device's */

        ck_assert_int_eq(tell(&owner, act_swap), 0);
        forget(&kept);
        ck_assert_int_eq(destroy(&owner, &kept), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 4 * MIB, &kept), 0);
        ck_assert_int_eq(destroy(&owner, &kept), 0);
        ck_assert_int_eq(tell(&owner, act_close), 0);
        ck_assert_int_eq(tell(&owner, act_swap), 0);
        ck_assert_int_eq(tell(&job, act_free), 0);
        ck_assert_int_eq(process_end(&job), 0);
        owner_end(&owner);
        job = process_start(); /* the memory of the killed process is free now */
        ck_assert_uint_eq(n_free(&job), 64 * MIB);
        ck_assert_int_eq(process_end(&job), 0);
}

/* What breaks the daemon's context ends nothing but that: the next one makes what was asked for. */
LOOP_TEST(a_broken_context_is_replaced, 7 * N_SHARES)
{
        static const char *const codes[] = { "719", "700", "709", "226", "721", "810", "911" };
        const enum device_share share = (enum device_share)(_i % N_SHARES);
        struct process owner = process_start(), job = job_start(DEVICE_SHARE_FD, 8 * MIB);
        struct message kept, e, facts = { .fd = -1 };
        char fault[64];

        /* Opening zeroes two extents, and the first of ours is the third. */
        snprintf(fault, sizeof(fault), "FAKE_CUDA_FAULT=cuMemsetD8Async:4:%s!", codes[_i / N_SHARES]);
        set(&owner, fault);
        ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &kept), 0);
        ck_assert_int_eq(map(&job, 0, &kept), 0);
        fill(&job, 0, 7, 4 * MIB);
        ck_assert_int_eq(make(&owner, share, 4 * MIB, &e), 0);
        ck_assert_int_eq(process_call(&owner, act_facts, &facts), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 0);
        ck_assert_uint_eq(sees_other(&job, 0, 7, 4 * MIB), 0);
        forget(&e);
        forget(&kept);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &kept), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

/* Memory of a legacy handle would end with the context, which stays until there is none. */
TEST(a_broken_context_with_memory_stays)
{
        struct process owner = process_start(), job = job_start(DEVICE_SHARE_CUDA_IPC, 4 * MIB);
        struct message kept, e, m = { .fd = -1 };

        set(&owner, "FAKE_CUDA_FAULT=cuMemsetD8Async:4:700!");
        ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 4 * MIB, &kept), 0);
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(make(&owner, (enum device_share)i, 2 * MIB, &e), -ENOTRECOVERABLE);
        ck_assert_int_eq(process_call(&owner, act_facts, &m), -ENOTRECOVERABLE);
        ck_assert_int_eq(map(&job, 0, &kept), 0);
        fill(&job, 0, 7, 4 * MIB);
        ck_assert_uint_eq(sees_other(&job, 0, 7, 4 * MIB), 0);
        forget(&kept);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &kept), -ENOTRECOVERABLE);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &e), 0);
        ck_assert_uint_eq(n_free(&owner), 62 * MIB);
        forget(&e);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* A driver that makes no other context, as it may be until the process ends. */
TEST(a_context_that_cannot_be_replaced)
{
        struct process owner = process_start();
        struct message kept, e;

        set(&owner, "FAKE_CUDA_FAULT=cuMemsetD8Async:4:700!,cuDevicePrimaryCtxRetain:2:700,"
                    "cuDevicePrimaryCtxRetain:3:700,cuDevicePrimaryCtxRetain:4:700");
        ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &kept), 0);
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 2 * MIB, &e), -ENOTRECOVERABLE);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 2 * MIB, &e), 0);
        forget(&e);
        forget(&kept);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        ck_assert_int_eq(destroy(&owner, &kept), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}

/* One bad answer is enough, though the driver would work again: whatever is asked
 * then, it is not asked of the driver. */
TEST(one_driver_answer_is_enough)
{
        struct process owner = process_start();
        struct message e[2], facts = { .fd = -1 };

        /* Opening looks four times. */
        set(&owner, "FAKE_CUDA_FAULT=cuMemGetInfo:5:214");
        ck_assert_int_eq(open_device(&owner, "cuda:0"), 0);
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(make(&owner, (enum device_share)i, 2 * MIB, &e[i]), 0);
                forget(&e[i]);
        }
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(process_call(&owner, act_facts, &facts), -ENODEV);
        for (int i = 0; i < 2; i++) {
                struct message more;

                ck_assert_int_eq(make(&owner, (enum device_share)i, 2 * MIB, &more), -ENODEV);
                ck_assert_int_eq(destroy(&owner, &e[i]), -ENODEV);
        }
        owner_end(&owner);
        owner = process_start();
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        ck_assert_int_eq(process_end(&owner), 0);
}

/* ---- work and captures --------------------------------------------------- */

LOOP_TEST(finish_waits_for_the_work, N_SHARES)
{
        struct process owner = owner_start(), job = process_start();
        struct message e, m = { .fd = -1, .a = 2 * MIB, .c = 2 * MIB };

        set(&job, "FAKE_CUDA_STREAM_DELAY_US=100000");
        ck_assert_int_eq(range(&job, uuid_0, (enum device_share)_i, 4 * MIB), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0); /* nothing is mapped */
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 0);
        ck_assert_int_eq(process_call(&job, act_busy, &m), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 2 * MIB);
        m = (struct message){ .fd = -1, .a = 0, .c = 2 * MIB };
        ck_assert_int_eq(process_call(&job, act_busy, &m), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0);
        ck_assert_int_eq(tell(&job, act_free), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0x77), 0);
        ck_assert_int_eq(range(&job, uuid_0, (enum device_share)_i, 4 * MIB), 0); /* the context is whole */
        ck_assert_int_eq(destroy(&owner, &e), 0);
        job_end(&job);
        owner_end(&owner);
}

/* The memory is the first GPU's, the work the second one's. */
LOOP_TEST(finish_waits_for_a_peers_work, N_SHARES)
{
        struct process owner = owner_start(), job = process_start();
        struct message e, m = { .fd = -1, .b = 1, .c = 2 * MIB }, in_use = { .fd = -1 };

        set(&job, "FAKE_CUDA_STREAM_DELAY_US=100000");
        ck_assert_int_eq(range(&job, uuid_0, (enum device_share)_i, 4 * MIB), 0);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(tell(&job, act_finish), 0); /* the second GPU is not in use */
        in_use.a = 1;
        ck_assert_int_eq(process_call(&job, act_keep_context, &in_use), 0);
        ck_assert_int_eq(process_call(&job, act_busy, &m), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 2 * MIB);
        m = (struct message){ .fd = -1, .b = 1 }; /* a blocking stream */
        ck_assert_int_eq(process_call(&job, act_begin_capture, &m), 0);
        ck_assert_int_eq(tell(&job, act_finish), -EBUSY);
        m = (struct message){ .fd = -1, .b = 1 };
        ck_assert_int_eq(process_call(&job, act_end_capture, &m), 0);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* The caller's capture is its own: nothing that we do spoils it, except to wait beside the capture of a
 * stream that cannot be found. */
LOOP_TEST(a_capture_goes_on, 2 * N_SHARES)
{
        const enum device_share share = (enum device_share)(_i % 2);
        struct process owner = owner_start(), job = job_start(share, 4 * MIB);
        struct message e, next, m = { .fd = -1, .a = (uint64_t)(_i / 2) }; /* a blocking stream or not */
        uint64_t n_other = 0;

        ck_assert_int_eq(make(&owner, share, 4 * MIB, &e), 0);
        ck_assert_int_eq(make(&owner, share, 4 * MIB, &next), 0);
        ck_assert_int_eq(process_call(&job, act_begin_capture, &m), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        if (_i / 2 == 0)
                ck_assert_int_eq(tell(&job, act_finish), -EBUSY);
        /* A copy waits for blocking streams only. */
        ck_assert_int_eq(copy_in(&job, 0, 0x11, MIB), _i / 2 == 0 ? -EBUSY : 0);
        ck_assert_int_eq(copy_out_other(&job, 0, 0x11, MIB, &n_other), _i / 2 == 0 ? -EBUSY : 0);
        ck_assert_int_eq(map(&job, 0, &next), 0); /* in its place */
        ck_assert_int_eq(unmap(&job, 0, 4 * MIB), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        ck_assert_int_eq(tell(&job, act_end_capture), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0);
        ck_assert_int_eq(map(&job, 0, &next), 0);
        forget(&e);
        forget(&next);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &next), 0);
        owner_end(&owner);
}

/* What cannot be waited for is left, and stays until the process ends. */
LOOP_TEST(freed_while_captured, N_SHARES)
{
        struct process owner = owner_start(), job = job_start((enum device_share)_i, 4 * MIB);
        struct message e, m = { .fd = -1, .a = 1 };

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(process_call(&job, act_begin_capture, &m), 0);
        ck_assert_int_eq(tell(&job, act_leave), 0);
        ck_assert_int_eq(tell(&job, act_free), 0);
        ck_assert_int_eq(tell(&job, act_end_capture), 0);
        ck_assert_int_eq(destroy(&owner, &e), -EBUSY);
        ck_assert_int_eq(process_end(&job), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        owner_end(&owner);
}
