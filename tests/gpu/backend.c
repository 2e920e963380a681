/* bfcd's own CUDA device, on any driver: what tests/unit/test_cuda.c
 * asserts on the fake, as far as it holds for any GPU.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: backend            TAP; device cuda:0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

static struct message facts_of(struct process *owner)
{
        struct message m = { .fd = -1 };

        ck_assert_int_eq(process_call(owner, act_facts, &m), 0);
        return m;
}

static struct process job_on(const struct message *facts, enum device_share share, uint64_t n_bytes)
{
        struct process p = process_start();

        ck_assert_int_eq(range(&p, facts->facts.uuid, share, n_bytes), 0);
        return p;
}

TEST(it_describes_itself)
{
        struct process owner = owner_start(), job = process_start();
        struct message facts = facts_of(&owner), m = { .fd = -1 };

        ck_assert_int_ne(facts.facts.name[0], '\0');
        ck_assert_uint_gt(facts.facts.bytes_free, 0);
        ck_assert_uint_ge(facts.facts.bytes_total, facts.facts.bytes_free);
        ck_assert_int_eq(process_call(&job, act_ordinal, &m), 0);
        ck_assert_mem_eq(m.view.uuid, facts.facts.uuid, 16);
        ck_assert_int_eq(process_end(&job), 0);
        owner_end(&owner);
}

LOOP_TEST(two_jobs_share_an_extent, N_SHARES)
{
        const enum device_share share = (enum device_share)_i;
        struct process owner = owner_start(), a, b;
        struct message facts = facts_of(&owner), e;

        a = job_on(&facts, share, 16 * MIB);
        b = job_on(&facts, share, 16 * MIB);
        ck_assert_int_eq(make(&owner, share, 16 * MIB, &e), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 0);
        ck_assert_int_eq(map(&a, 0, &e), 0);
        ck_assert_int_eq(map(&b, 0, &e), 0);
        forget(&e);
        ck_assert_uint_eq(sees_other(&a, 0, 0, 16 * MIB), 0);
        fill(&a, 0, 0x5a, 16 * MIB);
        ck_assert_uint_eq(sees_other(&b, 0, 0x5a, 16 * MIB), 0);
        fill(&b, 1, 0x5b, 1);
        ck_assert_uint_eq(sees_other(&a, 0, 0x5a, 16 * MIB), 1);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0x5a), 1);
        ck_assert_int_eq(tell(&a, act_finish), 0);
        ck_assert_int_eq(unmap(&a, 0, 16 * MIB), 0);
        process_kill(&b); /* which gives it back as well */
        ck_assert_int_eq(destroy(&owner, &e), 0);
        job_end(&a);
        owner_end(&owner);
}

/* One job's bytes are nothing to the next. */
LOOP_TEST(zeroed_each_time, N_SHARES)
{
        const enum device_share share = (enum device_share)_i;
        struct process owner = owner_start(), job;
        struct message facts = facts_of(&owner), made;

        job = job_on(&facts, share, 8 * MIB);
        for (int i = 0; i < 3; i++) {
                ck_assert_int_eq(make(&owner, share, 8 * MIB, &made), 0);
                ck_assert_int_eq(map(&job, 0, &made), 0);
                forget(&made);
                ck_assert_uint_eq(sees_other(&job, 0, 0, 8 * MIB), 0);
                fill(&job, 0, 0xee, 8 * MIB);
                ck_assert_int_eq(unmap(&job, 0, 8 * MIB), 0);
                ck_assert_int_eq(destroy(&owner, &made), 0);
        }
        job_end(&job);
        owner_end(&owner);
}

TEST(extents_side_by_side)
{
        struct process owner = owner_start(), job;
        struct message facts = facts_of(&owner), e[2];

        job = job_on(&facts, DEVICE_SHARE_FD, 16 * MIB);
        for (int i = 0; i < 2; i++) {
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &e[i]), 0);
                ck_assert_int_eq(map(&job, (uint64_t)(i + 1) * 4 * MIB, &e[i]), 0);
        }
        fill(&job, 6 * MIB, 0x11, 4 * MIB); /* across the two */
        ck_assert_uint_eq(sees_other(&job, 6 * MIB, 0x11, 4 * MIB), 0);
        ck_assert_int_eq(map(&job, 6 * MIB, &e[0]), 0); /* over the halves of both */
        ck_assert_uint_eq(sees_other(&job, 6 * MIB, 0, 2 * MIB), 0);
        ck_assert_int_eq(unmap(&job, 6 * MIB, 4 * MIB), 0);
        for (int i = 0; i < 2; i++) {
                forget(&e[i]);
                ck_assert_int_eq(destroy(&owner, &e[i]), 0);
        }
        job_end(&job);
        owner_end(&owner);
}

/* The copies that a client's bfc_write() and bfc_read() are. */
LOOP_TEST(copies_in_and_out, N_SHARES)
{
        const enum device_share share = (enum device_share)_i;
        struct process owner = owner_start(), a, b;
        struct message facts = facts_of(&owner), e;
        uint64_t n_other = 1;

        a = job_on(&facts, share, 8 * MIB);
        b = job_on(&facts, share, 8 * MIB);
        ck_assert_int_eq(make(&owner, share, 8 * MIB, &e), 0);
        ck_assert_int_eq(map(&a, 0, &e), 0);
        ck_assert_int_eq(map(&b, 0, &e), 0);
        forget(&e);
        for (unsigned char value = 1; value < 50; value++) { /* also those that a driver stages */
                ck_assert_int_eq(copy_in(&a, 7, value, value * 1000u), 0);
                ck_assert_int_eq(copy_out_other(&b, 7, value, value * 1000u, &n_other), 0);
                ck_assert_uint_eq(n_other, 0);
        }
        ck_assert_int_eq(copy_in(&a, MIB + 3, 0x77, 5 * MIB), 0);
        ck_assert_int_eq(copy_out_other(&b, MIB, 0x77, 5 * MIB + 3, &n_other), 0);
        ck_assert_uint_eq(n_other, 3);
        job_end(&a);
        job_end(&b);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* By an fd only: what a driver does to a handle's openers is not documented. */
TEST(unreclaimed_memory_is_detected)
{
        struct process owner = owner_start(), fugitive = process_start();
        struct message e, m;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 8 * MIB, &e), 0);
        m = (struct message){ .fd = e.fd };
        ck_assert_int_eq(process_call(&fugitive, act_keep_fd, &m), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&owner, &e), -EBUSY);
        process_kill(&fugitive);
        (void)n_free(&owner); /* the fake clears away at a look */
        owner_end(&owner);
}

TEST(invalid_extents_are_refused)
{
        struct process owner = owner_start(), by_fd, by_handle;
        struct message facts = facts_of(&owner), fd, handle, wrong;

        by_fd = job_on(&facts, DEVICE_SHARE_FD, 8 * MIB);
        by_handle = job_on(&facts, DEVICE_SHARE_CUDA_IPC, 4 * MIB);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &fd), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &handle), 0);
        wrong = fd;
        wrong.extent.n_bytes = 8 * MIB; /* larger than it is */
        ck_assert_int_lt(map(&by_fd, 0, &wrong), 0);
        wrong = handle;
        wrong.extent.n_bytes = 4 * MIB;
        ck_assert_int_eq(map(&by_handle, 0, &wrong), -EPROTO);
        forget(&fd);
        ck_assert_int_eq(range(&owner, facts.facts.uuid, DEVICE_SHARE_CUDA_IPC, 2 * MIB), 0);
        ck_assert_int_eq(map(&owner, 0, &handle), -ENOTSUP); /* its own */
        ck_assert_int_eq(tell(&owner, act_free), 0);
        ck_assert_int_eq(destroy(&owner, &fd), 0);
        ck_assert_int_eq(destroy(&owner, &handle), 0);
        job_end(&by_handle);
        job_end(&by_fd);
        owner_end(&owner);
}

LOOP_TEST(a_forked_child_has_nothing, N_SHARES)
{
        struct process owner = owner_start();
        struct message e;

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 2 * MIB, &e), 0);
        forget(&e);
        ck_assert_int_eq(tell(&owner, act_forked), 0);
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 0), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* A capture of the caller's continues while memory is mapped and copied; i: the
 * stream's flags, 0 is a blocking one. */
LOOP_TEST(a_capture_continues, 2)
{
        uint64_t n_other = 0;
        struct process owner = owner_start(), job;
        struct message facts = facts_of(&owner), e, m = { .fd = -1, .a = (uint64_t)_i };

        job = job_on(&facts, DEVICE_SHARE_FD, 4 * MIB);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        ck_assert_int_eq(process_call(&job, act_begin_capture, &m), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        if (_i == 0) /* the other one cannot be found */
                ck_assert_int_eq(tell(&job, act_finish), -EBUSY);
        /* A copy has to wait for blocking streams only. */
        ck_assert_int_eq(copy_in(&job, 0, 0x11, MIB), _i == 0 ? -EBUSY : 0);
        ck_assert_int_eq(copy_out_other(&job, 0, 0x11, MIB, &n_other), _i == 0 ? -EBUSY : 0);
        ck_assert_int_eq(unmap(&job, 0, 4 * MIB), 0);
        ck_assert_int_eq(tell(&job, act_end_capture), 0);
        ck_assert_int_eq(tell(&job, act_finish), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        job_end(&job);
        owner_end(&owner);
}

/* Asked in a child: Check's forks must begin without a driver. */
static bool has_device(void)
{
        char sentence[400];
        struct device *d;
        int status = 1;
        pid_t pid = fork();

        if (pid == 0) {
                if (device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)) == 0) {
                        device_free(d);
                        _exit(0);
                }
                printf("1..0 # SKIP %s\n", sentence);
                fflush(stdout);
                _exit(1);
        }
        return pid > 0 && waitpid(pid, &status, 0) == pid && status == 0;
}

int main(void)
{
        int status;

        unsetenv("CUDA_VISIBLE_DEVICES"); /* so that cuda:0 is a job's device 0 */
        setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
        gpu_machine_new();
        if (!has_device()) {
                gpu_machine_remove();
                return EXIT_SUCCESS;
        }
        status = suite_run(suite_of_tests("backend", 0, case_setup, case_teardown));
        gpu_machine_remove();
        return status;
}
