/* Extents that go on in another process than the one that made them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(adopt, case_setup, case_teardown);

static uint64_t others_of(struct process *p)
{
        struct message m = { .fd = -1 };

        ck_assert_int_eq(process_call(p, act_others, &m), 0);
        return m.a;
}

/* One daemon after the other has it, none of them but the first one made it; a job has it
 * mapped all the time, and another one maps it later. */
TEST(adopted_extent_keeps_its_bytes)
{
        struct process job = job_start(DEVICE_SHARE_FD, 8 * MIB), owners[4] = { owner_start() }, late;
        struct message e, next;

        for (int i = 1; i < 4; i++)
                owners[i] = process_start();
        late = process_start();
        ck_assert_int_eq(make(&owners[0], DEVICE_SHARE_FD, 8 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        fill(&job, 0, 0x5a, 8 * MIB);
        for (int i = 1; i < 4; i++) {
                if (i == 2)
                        ck_assert_int_eq(process_end(&owners[i - 1]), 0);
                else
                        process_kill(&owners[i - 1]);
                ck_assert_uint_eq(n_free(&job), 56 * MIB);
                ck_assert_int_eq(open_device(&owners[i], "cuda:0"), 0);
                ck_assert_uint_eq(others_of(&owners[i]), 8 * MIB);
                ck_assert_int_eq(adopt(&owners[i], e.fd, 8 * MIB, &next), 0);
                e.a = next.a;
                ck_assert_uint_eq(n_free(&job), 56 * MIB);
                ck_assert_uint_eq(others_of(&owners[i]), 0);
                ck_assert_uint_eq(owner_sees_other(&owners[i], &e, 0x5a), 0);
                ck_assert_int_eq(tell(&owners[i], act_has_no_context), 0);
        }
        ck_assert_int_eq(range(&late, uuid_0, DEVICE_SHARE_FD, 8 * MIB), 0);
        ck_assert_int_eq(map(&late, 0, &e), 0);
        ck_assert_uint_eq(sees_other(&late, 0, 0x5a, 8 * MIB), 0);
        job_end(&job);
        job_end(&late);
        forget(&e);
        ck_assert_int_eq(destroy(&owners[3], &e), 0); /* no process has it: the memory is free again */
        ck_assert_uint_eq(n_free(&owners[3]), 64 * MIB);
        owner_end(&owners[3]);
}

/* What is refused takes nothing, and leaves the fd to the caller. */
TEST(other_fds_are_not_adopted)
{
        struct process first = owner_start(), second = owner_start();
        int n_fds_second = n_fds(&second), file = memfd_create("no extent", MFD_CLOEXEC);
        struct message e, on_other, next;

        ck_assert_int_eq(tell(&first, act_swap), 0);
        ck_assert_int_eq(open_device(&first, "cuda:1"), 0);
        ck_assert_int_eq(make(&first, DEVICE_SHARE_FD, 4 * MIB, &on_other), 0);
        ck_assert_int_eq(tell(&first, act_swap), 0);
        ck_assert_int_eq(make(&first, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        ck_assert_int_eq(adopt(&second, e.fd, 6 * MIB, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, e.fd, 2 * MIB, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, e.fd, 0, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, e.fd, 4 * MIB + 1, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, e.fd, UINT64_MAX - 2 * MIB + 1, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, -1, 4 * MIB, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, file, 4 * MIB, &next), -EPROTO);
        ck_assert_int_eq(adopt(&second, on_other.fd, 4 * MIB, &next), -EPROTO);
        ck_assert_int_eq(n_fds(&second), n_fds_second);
        ck_assert_uint_eq(n_free(&second), 60 * MIB);
        ck_assert_uint_eq(others_of(&second), 4 * MIB);
        forget(&e);
        ck_assert_int_eq(destroy(&first, &e), 0); /* no other process has it */
        ck_assert_int_eq(tell(&first, act_swap), 0);
        forget(&on_other);
        ck_assert_int_eq(destroy(&first, &on_other), 0);
        ck_assert_int_eq(tell(&first, act_close), 0);
        ck_assert_int_eq(tell(&first, act_swap), 0);
        close(file);
        owner_end(&first);
        owner_end(&second);
}

/* A process that still has it is found as if this process had made the extent. */
TEST(adopted_extent_is_unreclaimed)
{
        struct process first = owner_start(), second = process_start(),
                       job = job_start(DEVICE_SHARE_FD, 4 * MIB);
        struct message e, next;

        ck_assert_int_eq(make(&first, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        process_kill(&first);
        ck_assert_int_eq(open_device(&second, "cuda:0"), 0);
        ck_assert_int_eq(adopt(&second, e.fd, 4 * MIB, &next), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&second, &next), -EBUSY);
        ck_assert_uint_eq(others_of(&second), 4 * MIB);
        job_end(&job);
        ck_assert_uint_eq(others_of(&second), 0);
        owner_end(&second);
}

TEST(lost_device_adopts_nothing)
{
        struct process first = owner_start(), second = owner_start();
        struct message e, next;
        char path[128];
        FILE *f;

        ck_assert_int_eq(make(&first, DEVICE_SHARE_FD, 4 * MIB, &e), 0);
        in_folder("lost-0", path);
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fputs("214", f);
        fclose(f);
        ck_assert_int_eq(adopt(&second, e.fd, 4 * MIB, &next), -ENODEV);
        unlink(path);
        ck_assert_int_eq(adopt(&second, e.fd, 4 * MIB, &next), -ENODEV);
        forget(&e);
        ck_assert_int_eq(destroy(&first, &e), 0);
        owner_end(&first);
        owner_end(&second);
}
