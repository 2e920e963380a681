/* The CUDA device on the fake driver: both ends, each in processes of its own.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The test itself never touches the driver: it tells an owner (the daemon's part)
 * and jobs (a client's part) what to do. Every case has a machine of its own, and
 * leaves no memory on it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(device, case_setup, case_teardown);

/* ---- making and sharing -------------------------------------------------- */

LOOP_TEST(made_zeroed_and_shared, N_SHARES)
{
        struct process owner = owner_start(), a = job_start((enum device_share)_i, 4 * MIB),
                       b = job_start((enum device_share)_i, 4 * MIB);
        int n_fds_owner = n_fds(&owner), n_fds_a = n_fds(&a);
        struct message made;

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &made), 0);
        ck_assert_uint_eq(made.extent.n_bytes, 4 * MIB);
        ck_assert_int_eq(made.extent.share, _i);
        ck_assert_int_eq(made.extent.fd >= 0, _i == DEVICE_SHARE_FD);
        ck_assert_uint_eq(owner_sees_other(&owner, &made, 0), 0);
        ck_assert_uint_eq(n_free(&owner), 60 * MIB);
        ck_assert_int_eq(map(&a, 0, &made), 0);
        ck_assert_int_eq(map(&b, 0, &made), 0);
        forget(&made);
        ck_assert_uint_eq(sees_other(&a, 0, 0, 4 * MIB), 0);
        fill(&a, 0, 0x5a, 4 * MIB);
        ck_assert_uint_eq(sees_other(&b, 0, 0x5a, 4 * MIB), 0);
        fill(&b, 1, 0x5b, 1);
        ck_assert_uint_eq(sees_other(&a, 0, 0x5a, 4 * MIB), 1);
        ck_assert_uint_eq(owner_sees_other(&owner, &made, 0x5a), 1);
        ck_assert_int_eq(tell(&a, act_finish), 0);
        ck_assert_int_eq(unmap(&a, 0, 4 * MIB), 0);
        ck_assert_int_eq(unmap(&a, 0, 4 * MIB), -EINVAL);
        ck_assert_int_eq(n_fds(&a), n_fds_a);
        job_end(&b); /* unmaps what is mapped */
        ck_assert_int_eq(destroy(&owner, &made), 0);
        ck_assert_uint_eq(n_free(&owner), 64 * MIB);
        ck_assert_int_eq(n_fds(&owner), n_fds_owner);
        job_end(&a);
        owner_end(&owner);
}

/* From and to ordinary memory, over whatever extents lie there, as another process sees it. */
LOOP_TEST(copies_in_and_out, N_SHARES)
{
        const enum device_share share = (enum device_share)_i;
        const uint64_t n_bytes = share == DEVICE_SHARE_FD ? 8 * MIB : 4 * MIB;
        struct process owner = owner_start(), a = job_start(share, n_bytes), b = job_start(share, n_bytes);
        struct message e[2];
        uint64_t n_other;
        int n_extents = (int)(n_bytes / (4 * MIB));

        if (share == DEVICE_SHARE_CUDA_IPC) /* it is not mapped yet */
                ck_assert_int_eq(copy_in(&a, 0, 1, 1), -EINVAL);
        for (int i = 0; i < n_extents; i++) {
                ck_assert_int_eq(make(&owner, share, 4 * MIB, &e[i]), 0);
                ck_assert_int_eq(map(&a, (uint64_t)i * 4 * MIB, &e[i]), 0);
                ck_assert_int_eq(map(&b, (uint64_t)i * 4 * MIB, &e[i]), 0);
                forget(&e[i]);
        }
        ck_assert_int_eq(copy_in(&a, 3 * MIB + 5, 0x3c, n_bytes - 3 * MIB - 5), 0);
        ck_assert_int_eq(copy_out_other(&b, 3 * MIB + 5, 0x3c, n_bytes - 3 * MIB - 5, &n_other), 0);
        ck_assert_uint_eq(n_other, 0);
        ck_assert_int_eq(copy_out_other(&b, 3 * MIB, 0x3c, 16, &n_other), 0);
        ck_assert_uint_eq(n_other, 5);
        ck_assert_uint_eq(sees_other(&b, 3 * MIB, 0x3c, 16), 5);
        ck_assert_int_eq(copy_in(&a, n_bytes - 1, 0, 2), -EINVAL);
        ck_assert_int_eq(copy_out_other(&a, n_bytes + 1, 0, 1, &n_other), -EINVAL);
        ck_assert_int_eq(copy_in(&a, UINT64_MAX, 0, 2), -EINVAL);
        ck_assert_int_eq(tell(&a, act_has_no_context), 0);
        job_end(&a);
        job_end(&b);
        for (int i = 0; i < n_extents; i++)
                ck_assert_int_eq(destroy(&owner, &e[i]), 0);
        owner_end(&owner);
}

/* Where the driver does not clear memory. A process that has it still sees what the next user would. */
LOOP_TEST(cleared_where_that_is_asked_for, N_SHARES)
{
        for (int clears = 0; clears < 2; clears++) {
                struct process owner = owner_start(), job = job_start((enum device_share)_i, 8 * MIB);
                struct message e, m;

                ck_assert_int_eq(make(&owner, (enum device_share)_i, 8 * MIB, &e), 0);
                ck_assert_int_eq(map(&job, 0, &e), 0);
                fill(&job, 0, 0x77, 8 * MIB);
                forget(&e);
                m = (struct message){ .fd = -1, .a = e.a };
                if (clears)
                        ck_assert_int_eq(process_call(&owner, act_clear, &m), 0);
                ck_assert_int_eq(destroy(&owner, &e), -EBUSY);
                ck_assert_uint_eq(sees_other(&job, 0, clears ? 0 : 0x77, 8 * MIB), 0);
                process_kill(&job);
                ck_assert_uint_eq(n_free(&owner), 64 * MIB);
                owner_end(&owner);
        }
}

TEST(fds_are_not_inherited)
{
        struct process owner = owner_start();
        struct message made;

        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 2 * MIB, &made), 0);
        /* Looked up from outside: the fd's number is the owner's. */
        char path[64], line[128];
        unsigned int flags = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/%d/fdinfo/%d", (int)owner.pid, made.extent.fd);
        f = fopen(path, "r");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof(line), f))
                sscanf(line, "flags: %o", &flags);
        fclose(f);
        ck_assert_uint_eq(flags & O_CLOEXEC, O_CLOEXEC);
        forget(&made);
        ck_assert_int_eq(destroy(&owner, &made), 0);
        owner_end(&owner);
}

LOOP_TEST(sizes_and_capacity, N_SHARES)
{
        struct process owner = owner_start();
        enum device_share share = (enum device_share)_i;
        struct message made, more;

        ck_assert_int_eq(make(&owner, share, 0, &made), -EINVAL);
        ck_assert_int_eq(make(&owner, share, MIB, &made), -EINVAL);
        ck_assert_int_eq(make(&owner, share, 3 * MIB, &made), -EINVAL);
        ck_assert_int_eq(make(&owner, share, UINT64_MAX - 2 * MIB + 1, &made), -EINVAL);
        ck_assert_int_eq(make(&owner, (enum device_share)7, 2 * MIB, &made), -ENOTSUP);
        ck_assert_int_eq(make(&owner, share, 66 * MIB, &made), -ENOMEM);
        ck_assert_int_eq(make(&owner, share, 62 * MIB, &made), 0);
        forget(&made);
        ck_assert_int_eq(make(&owner, share, 4 * MIB, &more), -ENOMEM);
        ck_assert_int_eq(make(&owner, share, 2 * MIB, &more), 0);
        forget(&more);
        ck_assert_uint_eq(n_free(&owner), 0);
        ck_assert_int_eq(destroy(&owner, &more), 0);
        ck_assert_int_eq(destroy(&owner, &made), 0);
        owner_end(&owner);
}

static void expect_facts(struct process *p, const char *name, const uint8_t uuid[16], uint64_t n_bytes)
{
        struct message m = { .fd = -1 };

        ck_assert_int_eq(process_call(p, act_facts, &m), 0);
        ck_assert_str_eq(m.facts.name, name);
        ck_assert_mem_eq(m.facts.uuid, uuid, 16);
        ck_assert_uint_eq(m.facts.bytes_total, n_bytes);
        ck_assert_uint_eq(m.facts.bytes_free, n_bytes);
}

TEST(two_devices)
{
        struct process a = owner_start(), b = process_start(), job = process_start();
        struct message made, m = { .fd = -1 };

        ck_assert_int_eq(open_device(&b, "GPU-" UUID_1), 0);
        expect_facts(&a, "Fake CUDA Device 0", uuid_0, 64 * MIB);
        expect_facts(&b, "Fake CUDA Device 1", uuid_1, 32 * MIB);
        ck_assert_int_eq(make(&b, DEVICE_SHARE_FD, 32 * MIB, &made), 0);
        expect_facts(&a, "Fake CUDA Device 0", uuid_0, 64 * MIB);

        set(&job, "CUDA_VISIBLE_DEVICES=1");
        ck_assert_int_eq(process_call(&job, act_ordinal, &m), 0);
        ck_assert_mem_eq(m.view.uuid, uuid_1, 16);
        m.a = 1;
        ck_assert_int_eq(process_call(&job, act_ordinal, &m), -ENODEV);
        m.a = (uint64_t)-1;
        ck_assert_int_eq(process_call(&job, act_ordinal, &m), -ENODEV);
        ck_assert_int_eq(range(&job, uuid_0, DEVICE_SHARE_FD, 32 * MIB), -ENODEV);
        ck_assert_int_eq(range(&job, uuid_1, DEVICE_SHARE_FD, 32 * MIB), 0);
        ck_assert_int_eq(map(&job, 0, &made), 0);
        forget(&made);
        ck_assert_uint_eq(sees_other(&job, 0, 0, 32 * MIB), 0);
        job_end(&job);
        ck_assert_int_eq(destroy(&b, &made), 0);
        owner_end(&b);
        owner_end(&a);
}

/* The daemon's own environment hides nothing from it. */
TEST(config_overrides_visible_devices)
{
        struct process p = process_start();

        set(&p, "CUDA_VISIBLE_DEVICES=0");
        ck_assert_int_eq(open_device(&p, "cuda:1"), 0);
        expect_facts(&p, "Fake CUDA Device 1", uuid_1, 32 * MIB);
        owner_end(&p);
}

/* ---- a region's addresses ------------------------------------------------ */

TEST(adjacent_extents)
{
        struct process owner = owner_start(), job = job_start(DEVICE_SHARE_FD, 16 * MIB);
        struct message e[3], m = { .fd = -1 };
        uint64_t base;

        ck_assert_int_eq(process_call(&job, act_base, &m), 0);
        base = m.a;
        ck_assert_uint_ne(base, 0);
        for (int i = 0; i < 3; i++)
                ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &e[i]), 0);
        ck_assert_int_eq(map(&job, 14 * MIB, &e[0]), -EINVAL);
        ck_assert_int_eq(map(&job, 16 * MIB, &e[0]), -EINVAL);
        ck_assert_int_eq(map(&job, UINT64_MAX - 2 * MIB + 1, &e[0]), -EINVAL);
        ck_assert_int_eq(map(&job, MIB, &e[0]), -EINVAL);
        ck_assert_int_eq(map(&job, 4 * MIB, &e[0]), 0);
        ck_assert_int_eq(map(&job, 8 * MIB, &e[1]), 0);
        fill(&job, 6 * MIB, 0x11, 4 * MIB); /* across the two */
        ck_assert_uint_eq(sees_other(&job, 6 * MIB, 0x11, 4 * MIB), 0);
        ck_assert_int_eq(unmap(&job, 4 * MIB, 8 * MIB), -EINVAL);
        ck_assert_int_eq(unmap(&job, 4 * MIB, 2 * MIB), -EINVAL);
        ck_assert_int_eq(unmap(&job, 6 * MIB, 4 * MIB), -EINVAL);

        /* Over the halves of both: they go as a whole. */
        ck_assert_int_eq(map(&job, 6 * MIB, &e[2]), 0);
        ck_assert_uint_eq(sees_other(&job, 6 * MIB, 0, 4 * MIB), 0);
        ck_assert_uint_ne(sees_other(&job, 4 * MIB, 0, 2 * MIB), 0);
        for (int i = 0; i < 3; i++)
                forget(&e[i]);
        ck_assert_int_eq(destroy(&owner, &e[0]), 0);
        ck_assert_int_eq(destroy(&owner, &e[1]), 0);
        ck_assert_int_eq(process_call(&job, act_base, &m), 0);
        ck_assert_uint_eq(m.a, base);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &e[2]), 0);
        owner_end(&owner);
}

TEST(a_handle_opens_one_extent)
{
        struct process owner = owner_start(), job = job_start(DEVICE_SHARE_CUDA_IPC, 4 * MIB);
        struct message e, next, m = { .fd = -1 };

        ck_assert_int_eq(process_call(&job, act_base, &m), 0);
        ck_assert_uint_eq(m.a, 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 4 * MIB, &e), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 4 * MIB, &next), 0);
        ck_assert_int_eq(map(&job, 2 * MIB, &e), -EINVAL);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        ck_assert_int_eq(process_call(&job, act_base, &m), 0);
        ck_assert_uint_ne(m.a, 0);
        fill(&job, 0, 1, 4 * MIB);
        ck_assert_int_eq(map(&job, 0, &next), 0);
        ck_assert_uint_eq(sees_other(&job, 0, 0, 4 * MIB), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        ck_assert_int_eq(unmap(&job, 0, 4 * MIB), 0);
        ck_assert_int_eq(process_call(&job, act_base, &m), 0);
        ck_assert_uint_eq(m.a, 0);
        ck_assert_int_eq(destroy(&owner, &next), 0);
        job_end(&job);
        owner_end(&owner);
}

TEST(invalid_extents_are_refused)
{
        struct process owner = owner_start(), by_fd = job_start(DEVICE_SHARE_FD, 8 * MIB),
                       by_handle = job_start(DEVICE_SHARE_CUDA_IPC, 4 * MIB);
        struct message fd, handle, wrong;
        int memfd = memfd_create("no-extent", MFD_CLOEXEC), n_fds_before_job = n_fds(&by_fd);

        ck_assert_int_eq(ftruncate(memfd, (off_t)(4 * MIB)), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_FD, 4 * MIB, &fd), 0);
        ck_assert_int_eq(make(&owner, DEVICE_SHARE_CUDA_IPC, 2 * MIB, &handle), 0);
        wrong = fd;
        wrong.fd = memfd;
        ck_assert_int_eq(map(&by_fd, 0, &wrong), -ENOTSUP); /* that is all that the driver says */
        wrong.fd = -1;
        ck_assert_int_eq(map(&by_fd, 0, &wrong), -EPROTO);
        wrong = fd;
        wrong.extent.n_bytes = 2 * MIB; /* smaller, and larger than it is; the driver says the same */
        ck_assert_int_eq(map(&by_fd, 0, &wrong), -ENOTSUP);
        wrong.extent.n_bytes = 8 * MIB;
        ck_assert_int_eq(map(&by_fd, 0, &wrong), -ENOTSUP);
        ck_assert_int_eq(map(&by_fd, 0, &handle), -EPROTO);
        ck_assert_int_eq(map(&by_handle, 0, &fd), -EPROTO);
        wrong = handle;
        wrong.extent.n_bytes = 4 * MIB;
        ck_assert_int_eq(map(&by_handle, 0, &wrong), -EPROTO);
        wrong.extent.handle[20] ^= 1;
        ck_assert_int_eq(map(&by_handle, 0, &wrong), -ENOTSUP);
        ck_assert_int_eq(n_fds(&by_fd), n_fds_before_job);
        close(memfd);
        forget(&fd);
        ck_assert_int_eq(destroy(&owner, &fd), 0);
        ck_assert_int_eq(destroy(&owner, &handle), 0);
        ck_assert_int_eq(range(&by_fd, uuid_0, DEVICE_SHARE_FD, 0), -EINVAL);
        ck_assert_int_eq(range(&by_fd, uuid_0, DEVICE_SHARE_FD, MIB), -EINVAL);
        job_end(&by_handle);
        job_end(&by_fd);
        owner_end(&owner);
}

/* A driver opens no handle in the process that made it; an fd is opened anywhere. */
LOOP_TEST(owner_maps_its_own_extent, N_SHARES)
{
        struct process owner = owner_start();
        struct message e;

        ck_assert_int_eq(make(&owner, (enum device_share)_i, 4 * MIB, &e), 0);
        ck_assert_int_eq(range(&owner, uuid_0, (enum device_share)_i, 4 * MIB), 0);
        ck_assert_int_eq(map(&owner, 0, &e), _i == DEVICE_SHARE_FD ? 0 : -ENOTSUP);
        forget(&e);
        ck_assert_int_eq(tell(&owner, act_free), 0);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

LOOP_TEST(forked_child_inherits_no_mapping, N_SHARES)
{
        struct process owner, job;
        struct message e;

        setenv("FAKE_CUDA_FORKED_DIES", "1", 1); /* not one call may be made there */
        owner = owner_start();
        job = job_start((enum device_share)_i, 2 * MIB);
        ck_assert_int_eq(make(&owner, (enum device_share)_i, 2 * MIB, &e), 0);
        ck_assert_int_eq(map(&job, 0, &e), 0);
        forget(&e);
        ck_assert_int_eq(tell(&owner, act_forked), 0);
        ck_assert_int_eq(tell(&job, act_forked), 0);
        fill(&job, 0, 1, 2 * MIB); /* the parent's is whole */
        ck_assert_uint_eq(owner_sees_other(&owner, &e, 1), 0);
        job_end(&job);
        ck_assert_int_eq(destroy(&owner, &e), 0);
        owner_end(&owner);
}

/* In a process that was started afresh: which driver is found is decided there. */
static int open_and_say(const char *id)
{
        struct device *device = NULL;
        char sentence[400] = "";
        int r = device_cuda_new(id, &device, sentence, sizeof(sentence));

        printf("%d %s\n", r, sentence);
        device_free(device);
        return 0;
}

int main(int argc, char **argv)
{
        if (argc == 3 && strcmp(argv[1], "--open") == 0)
                return open_and_say(argv[2]);
        return suite_main("cuda");
}
