/* Limits of control groups: what is read of a folder as /sys/fs/cgroup is, made here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <ftw.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device.h"
#include "device/host_free.h"
#include "tests/suite.h"

#define NO_LIMIT UINT64_MAX

static char root[64];

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
        (void)st;
        (void)type;
        (void)ftw;
        return remove(path);
}

static void put(const char *group, const char *name, const char *text)
{
        char path[256];
        FILE *f;

        snprintf(path, sizeof(path), "%s%s", root, group);
        (void)mkdir(path, 0755);
        snprintf(path, sizeof(path), "%s%s/%s", root, group, name);
        f = fopen(path, "we");
        ck_assert_ptr_nonnull(f);
        fputs(text, f);
        ck_assert_int_eq(fclose(f), 0);
}

static void put_bytes(const char *group, const char *name, uint64_t n_bytes)
{
        char text[32];

        snprintf(text, sizeof(text), "%llu\n", (unsigned long long)n_bytes);
        put(group, name, text);
}

static void put_group(const char *group, uint64_t max, uint64_t current)
{
        if (max == NO_LIMIT)
                put(group, "memory.max", "max\n");
        else
                put_bytes(group, "memory.max", max);
        put(group, "memory.high", "max\n");
        put_bytes(group, "memory.current", current);
}

static void setup(void)
{
        snprintf(root, sizeof(root), "/tmp/bfcd-groups-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(root));
}

static void teardown(void)
{
        (void)nftw(root, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

FIXTURE(host_free, setup, teardown);

#define OWN "4:memory:/elsewhere\n1:name=systemd:/other\n0::/system.slice/bfcd.service\n"

static uint64_t room(void)
{
        return host_free_in_groups(root, OWN, NULL);
}

static uint64_t limit(void)
{
        uint64_t n_bytes = 1;

        (void)host_free_in_groups(root, OWN, &n_bytes);
        return n_bytes;
}

TEST(test_own_and_parents)
{
        ck_assert_uint_eq(room(), NO_LIMIT); /* no files at all */
        ck_assert_uint_eq(limit(), NO_LIMIT);
        put_group("/system.slice", NO_LIMIT, 900 * MIB);
        put_group("/system.slice/bfcd.service", NO_LIMIT, 100 * MIB);
        ck_assert_uint_eq(room(), NO_LIMIT);
        put_group("/system.slice/bfcd.service", 300 * MIB, 100 * MIB);
        ck_assert_uint_eq(room(), 200 * MIB);
        ck_assert_uint_eq(limit(), 300 * MIB);
        put_group("/system.slice", 1000 * MIB, 950 * MIB); /* the parent's is less */
        ck_assert_uint_eq(room(), 50 * MIB);
        ck_assert_uint_eq(limit(), 300 * MIB);
        put_group("", 500 * MIB, 490 * MIB); /* a container's root has limits, too */
        ck_assert_uint_eq(room(), 10 * MIB);
        put_group("", 500 * MIB, 600 * MIB); /* it was lowered */
        ck_assert_uint_eq(room(), 0);
}

TEST(test_high_and_cache)
{
        put_group("/system.slice", NO_LIMIT, 0);
        put_group("/system.slice/bfcd.service", 300 * MIB, 100 * MIB);
        put_bytes("/system.slice/bfcd.service", "memory.high", 250 * MIB);
        ck_assert_uint_eq(room(), 150 * MIB);
        ck_assert_uint_eq(limit(), 250 * MIB);
        put("/system.slice/bfcd.service", "memory.stat",
            "anon 1\nfile 2\ninactive_file 31457280\nactive_file 7\n");
        ck_assert_uint_eq(room(), 180 * MIB);
        put("/system.slice/bfcd.service", "memory.stat", "anon 1\ninactive_file 18446744073709551615\n");
        ck_assert_uint_eq(room(), 250 * MIB);
}

TEST(test_nonsense)
{
        static const char *const texts[] = {
                "", "\n", "-1\n", "12x\n", "99999999999999999999999\n", "mix\n"
        };
        uint64_t n_bytes;

        for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++) {
                put_group("/system.slice", NO_LIMIT, 0);
                put_group("/system.slice/bfcd.service", 300 * MIB, 100 * MIB);
                put("/system.slice/bfcd.service", "memory.max", texts[i]);
                ck_assert_uint_eq(room(), NO_LIMIT);
        }
        put_group("/system.slice/bfcd.service", 300 * MIB, 100 * MIB);
        ck_assert_uint_eq(host_free_in_groups(root, "", &n_bytes), NO_LIMIT);
        ck_assert_uint_eq(host_free_in_groups(root, "1:memory:/system.slice\n", &n_bytes), NO_LIMIT);
        ck_assert_uint_eq(host_free_in_groups(root, "0::", &n_bytes), NO_LIMIT);
        ck_assert_uint_eq(n_bytes, NO_LIMIT);
        put_group("", 70 * MIB, 0);
        ck_assert_uint_eq(host_free_in_groups(root, "0::/", &n_bytes), 70 * MIB);
        ck_assert_uint_eq(n_bytes, 70 * MIB);
}

TEST(test_needed)
{
        ck_assert_uint_gt(host_free_needed(MIB), MIB);
        ck_assert_uint_eq(host_free_needed(UINT64_MAX), UINT64_MAX);
        ck_assert_int_eq(host_free_check(UINT64_MAX / 2), -ENOMEM); /* no machine has that */
        ck_assert_ptr_nonnull(strstr(device_error(-ENOBUFS), "memory.max"));
        ck_assert_str_eq(device_error(-EIO), strerror(EIO));
}

static _Atomic bool is_ended;
static const uint32_t *beside_node; /* NULL: any */

/* NULL: it waited, or there was no room even then. */
static void *begin_beside(void *userdata)
{
        uint64_t n_bytes = *(uint64_t *)userdata;
        bool was_early;

        if (host_free_begin(beside_node, n_bytes) < 0)
                return NULL;
        was_early = !is_ended;
        host_free_end(n_bytes);
        return was_early ? &is_ended : NULL;
}

static void begin_side_by_side(uint64_t n_bytes)
{
        pthread_t thread;
        void *early;

        while (host_free_begin(beside_node, n_bytes) < 0) /* other programs took some of it meanwhile */
                n_bytes -= n_bytes / 8;
        ck_assert_int_eq(pthread_create(&thread, NULL, begin_beside, &n_bytes), 0);
        for (unsigned i = 0; i < 100; i++) /* the other one has time to be wrong */
                usleep(1000);
        is_ended = true;
        host_free_end(n_bytes);
        suite_join(thread, &early);
        ck_assert_msg(!early, "two threads were told that the same memory is free");
}

/* Two threads make memory, and the machine has not enough for both: one waits for the other. */
TEST(test_side_by_side)
{
        if (host_free_bytes() == UINT64_MAX) /* not known here */
                return;
        begin_side_by_side(host_free_bytes() / 4 * 3);
        ck_assert_int_eq(host_free_begin(NULL, UINT64_MAX), -ENOMEM);
}

static uint64_t node_room(void)
{
        char text[4096];
        FILE *f = fopen("/sys/devices/system/node/node0/meminfo", "re");
        size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;

        if (f)
                fclose(f);
        text[n] = '\0';
        return host_free_in_node(text);
}

/* Two at a time on a node that has not enough for both, where the machine has. */
TEST(test_side_by_side_on_a_node)
{
        static const uint32_t node_0 = 0;
        uint64_t of_node = node_room(), of_machine = host_free_bytes();

        if (of_node >= of_machine - of_machine / 16) /* not known, or the machine has no more */
                return;
        beside_node = &node_0;
        begin_side_by_side(of_node / 2 +
                           (of_machine - of_node < of_node ? of_machine - of_node : of_node) / 4);
}

struct beginner {
        uint64_t n_bytes;
        pthread_t thread;
        _Atomic pid_t tid;
        _Atomic bool has_ended;
        int result;
};

static void *begin_only(void *userdata)
{
        struct beginner *b = userdata;

        b->tid = gettid();
        b->result = host_free_begin(NULL, b->n_bytes);
        b->has_ended = true;
        return NULL;
}

/* It sleeps, or has ended. */
static void start_beginner(struct beginner *b, uint64_t n_bytes)
{
        char path[64], text[256] = "";

        b->n_bytes = n_bytes;
        ck_assert_int_eq(pthread_create(&b->thread, NULL, begin_only, b), 0);
        for (unsigned i = 0; i < 60000 && !b->has_ended && !strstr(text, ") S "); i++) {
                FILE *f;

                usleep(1000);
                snprintf(path, sizeof(path), "/proc/self/task/%d/stat", b->tid);
                f = b->tid != 0 ? fopen(path, "re") : NULL;
                if (f && !fgets(text, sizeof(text), f))
                        text[0] = '\0';
                if (f)
                        fclose(f);
        }
        ck_assert(b->has_ended || strstr(text, ") S "));
}

/* One that waits for what others make is not passed by: else small growths that follow each other hide
 * for ever that there is no room for a large one. */
TEST(later_request_does_not_pass_a_waiting_one)
{
        struct beginner large = { .result = 1 }, small = { .result = 1 };

        ck_assert_int_eq(host_free_begin(NULL, 4096), 0);
        start_beginner(&large, UINT64_MAX);
        ck_assert(!large.has_ended);
        start_beginner(&small, 4096);
        ck_assert_msg(!small.has_ended, "a later growth passed one that waits");
        host_free_end(4096);
        suite_join(large.thread, NULL);
        suite_join(small.thread, NULL);
        ck_assert_int_eq(large.result, -ENOMEM);
        ck_assert_int_eq(small.result, 0);
        host_free_end(4096);
}
