/* The pages of host extents: large where the kernel has such pages, and without a failure where it does
 * not; on the node that was asked for; whole in any case.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/device.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "device/host_free.h"
#include "keeper/collapse.h"
#include "tests/suite.h"

#define HUGE  (2 * MIB)
#define BYTES (8 * HUGE)

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

static const struct device_supply any = { 0 };
static const struct device_view here = { .share = DEVICE_SHARE_FD };

/* As bfcd has it. */
static const struct device_supply apart = { .collapse = keeper_collapse };

static struct device *device;

/* How much of a MADV_COLLAPSE the kernel is let see; the rest fails as on a machine without large pages. */
static uint64_t collapse_bytes;
static unsigned n_collapses;

int __real_madvise(void *at, size_t n_bytes, int advice);
int __wrap_madvise(void *at, size_t n_bytes, int advice);
int __wrap_madvise(void *at, size_t n_bytes, int advice)
{
        if (advice != MADV_COLLAPSE)
                return __real_madvise(at, n_bytes, advice);
        n_collapses++;
        if (collapse_bytes >= n_bytes)
                return __real_madvise(at, n_bytes, advice);
        if (collapse_bytes > 0)
                (void)__real_madvise(at, collapse_bytes, advice);
        errno = ENOMEM;
        return -1;
}

static void setup(void)
{
        ck_assert_int_eq(device_host_new(&device), 0);
        collapse_bytes = UINT64_MAX;
        n_collapses = 0;
}

static void teardown(void)
{
        device = device_free(device);
}

FIXTURE(host_pages, setup, teardown);

static bool lacks_collapse(void)
{
        char clause[256];

        if (device_host_check(&any, clause, sizeof(clause)) == 0)
                return false;
        printf("# skipped: %s\n", clause);
        return true;
}

static struct device_extent make(const struct device_supply *supply)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        struct stat st;

        ck_assert_int_eq(device_make_of(device, supply, DEVICE_SHARE_FD, BYTES, &e), 0);
        ck_assert_int_eq(fstat(e.fd, &st), 0);
        ck_assert_uint_eq((uint64_t)st.st_blocks * 512, BYTES); /* no byte of it can meet a lack of memory */
        return e;
}

/* Of the mapping at this address, of what is mapped by entries of 2 MiB. */
static uint64_t mapped_huge(const void *at)
{
        unsigned long begin, end, kib = 0;
        bool is_here = false;
        char line[512];
        FILE *f = fopen("/proc/self/smaps", "re");

        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof(line), f)) {
                if (sscanf(line, "%lx-%lx ", &begin, &end) == 2)
                        is_here = begin <= (uintptr_t)at && (uintptr_t)at < end;
                else if (is_here && sscanf(line, "ShmemPmdMapped: %lu kB", &kib) == 1)
                        break;
        }
        fclose(f);
        return kib * UINT64_C(1024);
}

/* What a client has: every byte zero, and the kernel's word on how it is mapped. */
static uint64_t look_as_client(const struct device_extent *e)
{
        struct device_range *range = NULL;
        uint64_t huge;
        char *base;

        ck_assert_int_eq(device_range_new(&here, 2 * BYTES, &range), 0);
        base = device_range_base(range);
        ck_assert_uint_eq((uintptr_t)base % HUGE, 0);
        ck_assert_int_eq(device_range_map(range, HUGE, e), 0);
        for (uint64_t i = 0; i < BYTES; i++)
                if (base[HUGE + i] != 0)
                        ck_abort_msg("byte %lu is %d", (unsigned long)i, base[HUGE + i]);
        memset(base + HUGE, 'x', BYTES);
        huge = mapped_huge(base + HUGE);
        device_range_free(range);
        return huge;
}

static uint64_t address_space(void)
{
        unsigned long pages = 0;
        FILE *f = fopen("/proc/self/statm", "re");

        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fscanf(f, "%lu", &pages), 1);
        fclose(f);
        return pages;
}

TEST(made_of_large_pages)
{
        struct device_extent e;
        uint64_t before;

        if (lacks_collapse())
                return;
        n_collapses = 0;
        before = address_space();
        e = make(&any);
        ck_assert_uint_eq(address_space(), before); /* the device keeps no mapping */
        ck_assert_uint_eq(n_collapses, 1);
        ck_assert_uint_eq(e.huge_bytes, BYTES);
        ck_assert_uint_eq(look_as_client(&e), BYTES);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

static uint64_t make_apart(void)
{
        struct device_extent e = make(&apart);
        uint64_t huge = e.huge_bytes;

        ck_assert_int_eq(device_destroy(device, &e), 0);
        return huge;
}

/* Pages stay small while the process starts. */
static void wait_for_large(void)
{
        while (make_apart() < BYTES)
                usleep(1000);
}

/* This process has no other one. */
static pid_t child(void)
{
        char path[64];
        int pid = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/task/%d/children", (int)getpid());
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fscanf(f, "%d", &pid), 1);
        fclose(f);
        return pid;
}

static char state_of(pid_t pid)
{
        char path[64], state = '?';
        FILE *f;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        ck_assert_int_eq(fscanf(f, "%*d (%*[^)]) %c", &state), 1);
        fclose(f);
        return state;
}

/* As one that waits in the kernel. */
TEST(growth_does_not_wait_for_large_pages)
{
        pid_t pid;

        if (lacks_collapse())
                return;
        n_collapses = 0;
        keeper_start_collapsing();
        wait_for_large();
        pid = child();
        ck_assert_int_eq(kill(pid, SIGSTOP), 0);
        while (state_of(pid) != 'T')
                usleep(1000);
        ck_assert_uint_eq(make_apart(), 0);
        ck_assert_uint_eq(make_apart(), 0);
        ck_assert_int_eq(kill(pid, SIGCONT), 0);
        wait_for_large();
        ck_assert_int_eq(child(), pid);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        wait_for_large(); /* another one */
        ck_assert_uint_eq(n_collapses, 0);
        keeper_stop_collapsing();
}

TEST(whole_where_nothing_is_collapsed)
{
        struct device_extent e;

        collapse_bytes = 0;
        e = make(&any);
        ck_assert_uint_eq(n_collapses, 1);
        ck_assert_uint_eq(e.huge_bytes, 0);
        ck_assert_uint_eq(look_as_client(&e), 0);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

TEST(whole_where_some_is_collapsed)
{
        struct device_extent e;

        if (lacks_collapse())
                return;
        collapse_bytes = 3 * HUGE;
        e = make(&any);
        ck_assert_uint_eq(e.huge_bytes, 3 * HUGE);
        ck_assert_uint_eq(look_as_client(&e), 3 * HUGE);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* which need address space */
/* Without address space for the device's own mapping. */
TEST(made_without_a_mapping)
{
        struct rlimit was, tight;
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        int r;

        ck_assert_int_eq(getrlimit(RLIMIT_AS, &was), 0);
        tight = was;
        tight.rlim_cur = address_space() * 4096 + BYTES / 2;
        ck_assert_int_eq(setrlimit(RLIMIT_AS, &tight), 0);
        r = device_make_of(device, &any, DEVICE_SHARE_FD, BYTES, &e);
        ck_assert_int_eq(setrlimit(RLIMIT_AS, &was), 0);
        ck_assert_int_eq(r, 0);
        ck_assert_uint_eq(e.huge_bytes, 0);
        ck_assert_uint_eq(look_as_client(&e), 0);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}
#endif

/* An extent of huge pages is destroyed, adopted and lent as any other. */
TEST(large_pages_behave_as_small_ones)
{
        struct device_extent e = make(&any), adopted = DEVICE_EXTENT_EMPTY;
        int fugitive;

        (void)look_as_client(&e);
        fugitive = device_lend(device, &e, false);
        ck_assert_int_ge(fugitive, 0);
        ck_assert_int_eq(device_adopt(device, fcntl(e.fd, F_DUPFD_CLOEXEC, 3), BYTES, &adopted), 0);
        close(e.fd);
        adopted.was_lent = true;
        ck_assert_int_eq(device_destroy(device, &adopted), -EBUSY);
        close(fugitive);
        ck_assert_int_eq(device_destroy(device, &adopted), 0);
}

LOOP_TEST(bound_to_a_node, 2)
{
        const struct device_supply on_0 = { .is_bound = true };
        struct device_extent e;
        char clause[256];
        int policy = -1;
        void *at;

        if (device_host_check(&on_0, clause, sizeof(clause)) == -ENODEV) {
                printf("# skipped: %s\n", clause);
                return;
        }
        collapse_bytes = _i ? 0 : UINT64_MAX;
        e = make(&on_0);
        at = mmap(NULL, BYTES, PROT_READ, MAP_SHARED, e.fd, 0);
        ck_assert_ptr_ne(at, MAP_FAILED);
        ck_assert_int_eq(syscall(SYS_get_mempolicy, &policy, NULL, 0, at, MPOL_F_ADDR), 0);
        ck_assert_int_eq(policy, MPOL_BIND);
        munmap(at, BYTES);
        ck_assert_int_eq(device_destroy(device, &e), 0);
}

TEST(no_such_node)
{
        const struct device_supply on_1023 = { .is_bound = true, .node = 1023 },
                                   beyond = { .is_bound = true, .node = UINT32_MAX };
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        char clause[256];

        ck_assert_int_eq(device_host_check(&on_1023, clause, sizeof(clause)), -ENODEV);
        ck_assert_ptr_nonnull(strstr(clause, "no NUMA node 1023"));
        ck_assert_int_eq(device_host_check(&beyond, clause, sizeof(clause)), -ENODEV);
        ck_assert_int_lt(device_make_of(device, &on_1023, DEVICE_SHARE_FD, BYTES, &e), 0);
        ck_assert_int_lt(device_make_of(device, &beyond, DEVICE_SHARE_FD, BYTES, &e), 0);
        ck_assert_int_eq(e.fd, -1);
}

TEST(room_of_a_node)
{
        ck_assert_uint_eq(host_free_in_node("Node 0 MemTotal:       100 kB\n"
                                            "Node 0 MemFree:        30 kB\n"
                                            "Node 0 Inactive(anon): 7 kB\n"
                                            "Node 0 Inactive(file): 12 kB\n"),
                          42 * 1024);
        ck_assert_uint_eq(host_free_in_node("Node 0 MemFree: 30 kB\n"), 30 * 1024);
        ck_assert_uint_eq(host_free_in_node(""), UINT64_MAX);
        if (access("/sys/devices/system/node/node0/meminfo", R_OK) == 0)
                ck_assert_int_eq(host_free_check_node(0, UINT64_C(1) << 60), -ENOMEM);
}
