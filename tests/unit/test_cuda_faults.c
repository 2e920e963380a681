/* Every single call of the driver fails once, with several errors: nothing
 * crashes, and what was taken is given back.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A life is run once without a fault, to count its calls of each function; then
 * again for each of them. Where the call that fails is one that gives back, or
 * the device is lost, something may be left, and the life must know of it. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(faults, case_setup, case_teardown);

/* In FAKE_CUDA_FAULT's words: out of memory, a wrong value, lost, broken for good. */
#define N_CODES 4
static const char *const codes[N_CODES] = { "2", "1", "214", "700!" };

enum { LIFE_FAILED = 1, LIFE_MAY_HAVE_LEFT = 2 };

static void note(struct message *m, int r, bool is_destroy)
{
        if (r < 0)
                m->a |= LIFE_FAILED;
        if (r == -ENODEV || (r < 0 && is_destroy))
                m->a |= LIFE_MAY_HAVE_LEFT;
}

/* Out and in again. */
static int copy_both_ways(struct device *d, const struct device_extent *e)
{
        struct device_extent host = { .fd = memfd_create("host", MFD_CLOEXEC), .n_bytes = 2 * MIB };
        struct device_copy copy = { .extent = e, .host = &host, .n_bytes = 2 * MIB, .to_host = true };
        int r = ftruncate(host.fd, (off_t)host.n_bytes) < 0 ? -EIO : device_copy(d, &copy, 1);

        copy.to_host = false;
        if (r == 0)
                r = device_copy(d, &copy, 1);
        close(host.fd);
        return r;
}

/* Three of different sizes by one call: all or none. */
static int make_together(struct device *d, struct message *m)
{
        const struct device_supply any = { 0 };
        struct device_extent e[3];
        int r;

        for (int i = 0; i < 3; i++)
                e[i] = (struct device_extent){ .fd = -1, .n_bytes = (uint64_t)(i + 1) * 2 * MIB };
        r = device_make_all(d, &any, DEVICE_SHARE_FD, e, 3);
        note(m, r, false);
        for (int i = 0; r == 0 && i < 3; i++) {
                if (e[i].fd < 0 || e[i].n_bytes != (uint64_t)(i + 1) * 2 * MIB)
                        return -4;
                note(m, device_destroy(d, &e[i]), true);
        }
        return 0;
}

/* b: whether it copies → a: LIFE_..., c: pieces of memory that are left before the device is closed */
static int act_owners_life(struct message *m)
{
        struct device_extent e[2] = { DEVICE_EXTENT_EMPTY, DEVICE_EXTENT_EMPTY };
        struct device_facts facts;
        struct device *d = NULL;
        char sentence[400] = "";
        int r = device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)), n_fds_open = suite_count_fds();

        m->a = 0;
        note(m, r, false);
        if ((r < 0) != (sentence[0] != '\0') || (r < 0) != (d == NULL))
                return -1;
        for (int i = 0; d && i < 2; i++) {
                note(m, device_make(d, (enum device_share)i, 2 * MIB, &e[i]), false);
                if ((e[i].n_bytes == 0) != (e[i].fd == -1 && e[i].native == 0))
                        return -2;
        }
        if (d) {
                if (m->b && e[DEVICE_SHARE_FD].n_bytes > 0)
                        note(m, copy_both_ways(d, &e[DEVICE_SHARE_FD]), false);
                note(m, device_facts(d, &facts), false);
                for (int i = 0; i < 2; i++)
                        note(m, device_destroy(d, &e[i]), true);
                r = make_together(d, m);
                if (r < 0)
                        return r;
        }
        m->c = (uint64_t)count_objects();
        device_free(d);
        return suite_count_fds() == n_fds_open ? 0 : -3;
}

/* view, extent, fd: the same extent at two places → a: LIFE_... */
static int act_jobs_life(struct message *m)
{
        const uint64_t n_bytes = m->extent.n_bytes,
                       n_range = m->view.share == DEVICE_SHARE_FD ? 2 * n_bytes : n_bytes;
        struct device_range *range = NULL;
        int n_fds = suite_count_fds(), failed = 0;
        char bytes[64] = "";

        m->extent.fd = m->fd;
        if (device_range_new(&m->view, n_range, &range) < 0) {
                failed = 1;
        } else {
                failed |= device_range_map(range, 0, &m->extent) < 0;
                failed |= device_range_map(range, n_range - n_bytes, &m->extent) < 0;
                failed |= device_range_map(range, 0, &m->extent) < 0; /* over itself */
                failed |= device_range_finish(range) < 0;
                failed |= device_range_write(range, 0, bytes, sizeof(bytes)) < 0;
                failed |= device_range_read(range, 0, sizeof(bytes), bytes) < 0;
                failed |= device_range_unmap(range, 0, n_bytes) < 0;
                device_range_free(range);
        }
        m->a = failed ? LIFE_FAILED : 0;
        if (suite_count_fds() != n_fds)
                return -3;
        close(m->fd);
        m->fd = -1;
        return 0;
}

/* ---- counting ------------------------------------------------------------ */

struct count {
        char name[64];
        unsigned int n;
};

static unsigned int read_counts(struct count ret[static 100])
{
        char path[128];
        unsigned int n = 0;
        FILE *f;

        in_folder("counts", path);
        f = fopen(path, "r");
        ck_assert_ptr_nonnull(f);
        while (n < 100 && fscanf(f, "%63s %u", ret[n].name, &ret[n].n) == 2)
                if (strcmp(ret[n].name, "total") != 0 && ret[n].n > 0)
                        n++;
        fclose(f);
        ck_assert_uint_gt(n, 10);
        return n;
}

static bool gives_back(const char *function)
{
        static const char *const names[] = { "cuMemUnmap",         "cuMemRelease",
                                             "cuMemAddressFree",   "cuDevicePrimaryCtxRelease_v2",
                                             "cuMemFree_v2",       "cuIpcCloseMemHandle",
                                             "cuCtxPushCurrent_v2" };

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
                if (strcmp(function, names[i]) == 0)
                        return true;
        return false;
}

static void set_fault(struct process *p, const struct count *c, unsigned int nth, const char *code)
{
        char setting[128];

        snprintf(setting, sizeof(setting), "FAKE_CUDA_FAULT=%.63s:%u:%s", c->name, nth, code);
        set(p, setting);
}

/* A long run tries each call with each code, another run each call with one of them. */
static bool is_tried(unsigned int call, unsigned int nth, int code)
{
        return suite_is_long() || (call + nth) % N_CODES == (unsigned int)code;
}

static void count_calls(struct process *p)
{
        char path[128], setting[160];

        in_folder("counts", path);
        snprintf(setting, sizeof(setting), "FAKE_CUDA_COUNTS=%s", path);
        set(p, setting);
}

/* ---- the owner ----------------------------------------------------------- */

static unsigned int count_in_a_life(bool copies, struct count ret[static 100])
{
        struct message m = { .fd = -1, .b = copies };
        struct process p = process_start();

        count_calls(&p);
        ck_assert_int_eq(process_call(&p, act_owners_life, &m), 0);
        ck_assert_uint_eq(m.a, 0);
        ck_assert_uint_eq(m.c, 0);
        ck_assert_int_eq(process_end(&p), 0);
        return read_counts(ret);
}

static unsigned int count_of(const char *function, const struct count *counts, unsigned int n)
{
        for (unsigned int i = 0; i < n; i++)
                if (strcmp(counts[i].name, function) == 0)
                        return counts[i].n;
        return 0;
}

/* The opening makes and releases one extent of the kind. The export of the next one fails, and then its release, once. */
LOOP_TEST(what_was_made_for_nothing_is_released_at_the_second_try, N_SHARES)
{
        static const char *const faults[N_SHARES] = {
                [DEVICE_SHARE_FD] = "FAKE_CUDA_FAULT=cuMemExportToShareableHandle:2:2,cuMemRelease:2:2",
                [DEVICE_SHARE_CUDA_IPC] = "FAKE_CUDA_FAULT=cuIpcGetMemHandle:2:2,cuMemFree:2:2",
        };
        struct process p = process_start();
        struct message e = { .fd = -1 };

        set(&p, faults[_i]);
        ck_assert_int_eq(open_device(&p, "cuda:0"), 0);
        ck_assert_int_eq(make(&p, (enum device_share)_i, 2 * MIB, &e), -ENOMEM);
        ck_assert_int_eq(count_objects(), 0);
        ck_assert_int_eq(make(&p, (enum device_share)_i, 2 * MIB, &e), 0);
        forget(&e);
        ck_assert_int_eq(destroy(&p, &e), 0);
        owner_end(&p);
}

/* What an ended process left is free when another one looks. */
static void clear_machine(void)
{
        struct process p = process_start();

        ck_assert_uint_eq(n_free(&p), 64 * MIB);
        ck_assert_int_eq(process_end(&p), 0);
}

/* A copy takes 16 MiB of buffers. A life has one where the function is called for it. */
LOOP_TEST(each_driver_call_of_the_owner_fails, 4)
{
        unsigned int n, n_plain, n_failed = 0;
        struct count counts[100], plain[100];
        struct message m;
        struct process p;

        setenv("FAKE_CUDA_POISON_BYTES", "4096", 1);
        n_plain = count_in_a_life(false, plain);
        n = count_in_a_life(true, counts);
        for (unsigned int i = 0; i < n; i++)
                for (unsigned int nth = 1; nth <= counts[i].n; nth++) {
                        if (!is_tried(i, nth, _i))
                                continue;
                        p = process_start();
                        set_fault(&p, &counts[i], nth, codes[_i]);
                        m = (struct message){ .fd = -1,
                                              .b = count_of(counts[i].name, plain, n_plain) != counts[i].n };
                        ck_assert_msg(process_call(&p, act_owners_life, &m) == 0, "%s %u: %d", counts[i].name,
                                      nth, m.result);
                        ck_assert_msg(m.c == 0 || (m.a & LIFE_MAY_HAVE_LEFT) || gives_back(counts[i].name),
                                      "%s %u: %d pieces are left", counts[i].name, nth, (int)m.c);
                        n_failed += m.a != 0;
                        ck_assert_int_eq(process_end(&p), 0);
                        if (m.c > 0)
                                clear_machine();
                }
        ck_assert_uint_ge(n_failed, suite_is_long() ? 20 : 5); /* what is tried twice does not show */
        clear_machine();
}

/* ---- a job --------------------------------------------------------------- */

static int live(struct process *p, const struct message *made, struct message *ret)
{
        *ret = (struct message){ .fd = made->fd, .extent = made->extent };
        ret->view = (struct device_view){ .is_cuda = true, .share = made->extent.share };
        memcpy(ret->view.uuid, uuid_0, 16);
        return process_call(p, act_jobs_life, ret);
}

/* The job first: a fork would inherit the extent's fd. */
static struct process job_and_extent(struct process *owner, enum device_share share, struct message *ret)
{
        struct process job = process_start();

        ck_assert_int_eq(make(owner, share, 2 * MIB, ret), 0);
        return job;
}

LOOP_TEST(each_driver_call_of_a_client_fails, 4 * N_SHARES)
{
        const enum device_share share = (enum device_share)(_i % 2);
        const char *code = codes[_i / 2];
        struct process owner, job;
        unsigned int n, n_failed = 0;
        struct count counts[100];
        struct message made, m;

        setenv("FAKE_CUDA_POISON_BYTES", "4096", 1);
        owner = owner_start();
        job = job_and_extent(&owner, share, &made);
        count_calls(&job);
        ck_assert_int_eq(live(&job, &made, &m), 0);
        ck_assert_uint_eq(m.a, 0);
        forget(&made);
        ck_assert_int_eq(destroy(&owner, &made), 0);
        ck_assert_int_eq(process_end(&job), 0);
        n = read_counts(counts);
        for (unsigned int i = 0; i < n; i++)
                for (unsigned int nth = 1; nth <= counts[i].n; nth++) {
                        int r;

                        if (!is_tried(i, nth, _i / 2))
                                continue;
                        job = job_and_extent(&owner, share, &made);
                        set_fault(&job, &counts[i], nth, code);
                        ck_assert_msg(live(&job, &made, &m) == 0, "%s %u: %d", counts[i].name, nth, m.result);
                        n_failed += m.a != 0;
                        forget(&made);
                        r = destroy(&owner, &made); /* the job lives on, and holds nothing */
                        ck_assert_msg(
                                r == 0 || (r == -EBUSY && (gives_back(counts[i].name) || strchr(code, '!'))),
                                "%s %u: %d", counts[i].name, nth, r);
                        ck_assert_int_eq(process_end(&job), 0);
                }
        ck_assert_uint_ge(n_failed, suite_is_long() ? 10 : 2);
        owner_end(&owner);
}
