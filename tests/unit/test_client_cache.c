/* libbfcclient with its cache on, against a stand-in for the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The stand-in cuts blocks first fit from one region of 64 MiB, and counts them. */
#include <bfcclient.h>

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/suite.h"
#include "tests/unit/server_rig.h"

static void setup(void)
{
        server_start("on");
        client = open_client(0, UINT64_MAX, 0);
}

FIXTURE(cache_on, setup, server_end);

static struct bfc_client_stats stats_in(bfc_client *c, const char *partition)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        ck_assert_msg(bfc_stats_in(c, partition, &s) == 0, "%s", bfc_last_error());
        ck_assert_uint_eq(s.bytes_idle, s.bytes_reserved - s.bytes_in_use);
        return s;
}

/* With a cache and without. */
LOOP_TEST(statistics_of_a_partition, 2)
{
        bfc_client *c = open_client(_i ? BFC_NO_CACHE : 0, UINT64_MAX, 0);
        struct bfc_client_stats none = { .struct_size = sizeof(none) };
        void *a, *b, *other;

        ck_assert_int_eq(bfc_malloc(c, 1000, &a), 0);
        ck_assert_int_eq(bfc_malloc(c, 3 * MIB, &b), 0);
        ck_assert_int_eq(bfc_free(c, b), 0);
        ck_assert_int_eq(bfc_malloc_in(c, "infer", MIB, &other), 0);
        ck_assert_uint_eq(stats_in(c, NULL).bytes_in_use, 1024);
        ck_assert_uint_eq(stats_in(c, "train").num_allocs, 2);
        ck_assert_uint_eq(stats_in(c, "train").num_frees, 1);
        ck_assert_uint_eq(stats_in(c, "train").peak_bytes_in_use, 3 * MIB + 1024);
        ck_assert_uint_eq(stats_in(c, "train").largest_alloc_size, 3 * MIB);
        ck_assert_uint_eq(stats_in(c, "infer").bytes_in_use, MIB);
        ck_assert_uint_eq(stats_in(c, "infer").peak_bytes_in_use, MIB);
        ck_assert_uint_eq(stats_in(c, "infer").num_blocks, 1);
        ck_assert_uint_eq(stats_in(c, "infer").bytes_requested, MIB);
        ck_assert_int_eq(bfc_stats(c, &none), 0);
        ck_assert_uint_eq(none.bytes_in_use, MIB + 1024);
        ck_assert_uint_eq(none.peak_bytes_in_use, 3 * MIB + 1024);
        ck_assert_uint_eq(none.num_allocs, 3);
        ck_assert_uint_eq(none.bytes_reserved,
                          stats_in(c, "train").bytes_reserved + stats_in(c, "infer").bytes_reserved);
        ck_assert_int_eq(bfc_free(c, other), 0);
        ck_assert_int_eq(bfc_reset_peaks(c), 0);
        ck_assert_uint_eq(stats_in(c, "infer").peak_bytes_in_use, 0);
        ck_assert_uint_eq(stats_in(c, "train").peak_bytes_in_use, 1024);
        expect_error(bfc_stats_in(c, "nowhere", &none), -ENOENT, "nowhere");
        none.struct_size = 8;
        expect_error(bfc_stats_in(c, NULL, &none), -EINVAL, "struct_size");
        ck_assert_int_eq(bfc_free(c, a), 0);
        bfc_disconnect(c);
}

/* ---- the ordinary --------------------------------------------------------- */

TEST(small_blocks_share_a_slab)
{
        uint64_t n_calls = stats().num_calls;
        char *a = get(1000), *b = get(1 * MIB), *c;

        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().num_calls, n_calls + 1);
        ck_assert_uint_eq(stats().bytes_reserved, 2 * MIB);
        ck_assert_uint_eq(stats().bytes_in_use, 1024 + 1 * MIB);
        ck_assert_uint_eq(info(a).block_id, info(b).block_id);
        ck_assert_uint_eq(info(a).block_offset, 0);
        ck_assert_uint_eq(info(b).block_offset, 1024);
        ck_assert_uint_eq(info(b).offset, 1024);
        ck_assert_uint_eq(info(b).n_requested, 1 * MIB);
        memset(a, 'a', 1000);
        memset(b, 'b', 1 * MIB);
        put(a);
        c = get(900);
        ck_assert_ptr_eq(c, a);
        put(b);
        expect_error(bfc_free(client, b), -EINVAL, "already freed");
        expect_error(bfc_free(client, c + 256), -EINVAL, "not a block");
        put(c);
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().num_calls, n_calls + 1);
        ck_assert_uint_eq(stats().num_blocks, 0);
        ck_assert_uint_eq(stats().bytes_requested, 0);
        ck_assert_uint_eq(stats().bytes_idle, 2 * MIB);
}

TEST(large_blocks_are_kept)
{
        char *a = get(5 * MIB), *b = get(3 * MIB), *c;
        uint64_t n_calls = stats().num_calls;

        ck_assert_uint_eq(stats().bytes_reserved, 8 * MIB);
        ck_assert_uint_eq(info(a).n_bytes, 5 * MIB);
        put(a);
        put(b);
        ck_assert_uint_eq(n_blocks(), 2);
        c = get(8 * MIB); /* across both */
        ck_assert_ptr_eq(c, a);
        memset(c, 'c', 8 * MIB);
        ck_assert_uint_eq(info(c).block_offset, 0);
        ck_assert_uint_eq(stats().num_calls, n_calls);
        put(c);
        c = get(20 * MIB);
        memset(c, 'c', 20 * MIB);
        ck_assert_uint_eq(stats().num_calls, n_calls + 1);
        ck_assert_uint_eq(stats().bytes_reserved, 28 * MIB);
        put(c);
        ck_assert_int_eq(bfc_trim(client, 1), 0); /* the longest idle, in whole */
        ck_assert_uint_eq(stats().bytes_reserved, 23 * MIB);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        ck_assert_uint_eq(n_blocks(), 0);
}

TEST(trim_leaves_what_is_used)
{
        void *p[24], *q = NULL;

        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        for (int i = 0; i < 24; i++)
                p[i] = get(1 * MIB);
        ck_assert_int_eq(bfc_malloc_in(client, "infer", 1 * MIB, &q), 0);
        ck_assert_uint_eq(n_blocks(), 13);
        for (int i = 0; i < 24; i++)
                if (i != 10)
                        put(p[i]);
        put(q);
        ck_assert_uint_eq(n_blocks(), 13);
        ck_assert_int_eq(bfc_trim(client, 3 * MIB), 0);
        ck_assert_uint_eq(n_blocks(), 11);
        ck_assert_int_eq(bfc_trim(client, 0), 0);
        ck_assert_uint_eq(n_blocks(), 11);
        memset(p[10], 'x', 1 * MIB);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().bytes_reserved, 2 * MIB);
        ck_assert_int_eq(((char *)p[10])[MIB - 1], 'x');
        put(p[10]);
}

/* Whole extents of 2 MiB, whatever slabs they belong to; what is used stays where it is. */
TEST(trim_splits_what_is_used_in_part)
{
        char *a = get(16 * MIB - 4096), *b, *c;

        put(a);
        b = get(6 * MIB - 512); /* ends in the third extent */
        c = get(1000);          /* and this begins there, and reaches into the fourth */
        ck_assert_ptr_eq(b, a);
        ck_assert_ptr_eq(c, b + 6 * MIB - 512);
        memset(c, 'c', 1000);
        put(b);
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_int_eq(bfc_trim(client, 1), 0); /* the first that there is: two of three extents before c */
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().bytes_reserved, 12 * MIB - 4096);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().bytes_reserved, 4 * MIB);
        ck_assert_uint_eq(info(c).block_offset, 2 * MIB - 512);
        ck_assert_uint_eq(info(c).offset, 6 * MIB - 512);
        for (unsigned i = 0; i < 1000; i++)
                ck_assert_int_eq(c[i], 'c');
        b = get(2 * MIB - 512); /* what is free beside it is used again */
        ck_assert_ptr_eq(b, c - (2 * MIB - 512));
        ck_assert_uint_eq(stats().bytes_reserved, 4 * MIB);
        put(b);
        put(c);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_blocks(), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

/* A block of a stream in a slab that was split is in the same part as its neighbour. */
TEST(trim_splits_below_what_a_stream_has)
{
        char *all = get(16 * MIB), *first, *behind;
        uint64_t block_id;
        void *s;

        put(all);
        first = get(6 * MIB);
        ck_assert_int_eq(bfc_malloc_async(client, 3 * MIB, 42, &s), 0);
        behind = get(MIB);
        ck_assert(first < (char *)s && (char *)s < behind);
        block_id = info(s).block_id;
        ck_assert_uint_eq(block_id, info(behind).block_id);
        put(first);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_ne(info(behind).block_id, block_id); /* the first one is gone */
        ck_assert_uint_eq(info(s).block_id, info(behind).block_id);
        ck_assert_uint_eq(info(s).block_offset + (uint64_t)(behind - (char *)s), info(behind).block_offset);
        ck_assert_int_eq(bfc_free(client, s), 0);
        put(behind);
}

/* A slab that is used at both ends gives back its middle before a request is refused. */
TEST(refusal_splits_slabs)
{
        char *all = get(63 * MIB), *first, *middle, *last, *large;

        put(all);
        first = get(1000);
        middle = get(61 * MIB);
        last = get(1000);
        put(middle);
        memset(first, 'f', 1000);
        memset(last, 'l', 1000);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 58 * MIB, BFC_WHOLE, (void **)&large), 0);
        ck_assert_uint_eq(n_blocks(), 3); /* the two ends, and this one */
        memset(large, 'x', 58 * MIB);
        ck_assert_int_eq(first[0], 'f');
        ck_assert_int_eq(last[999], 'l');
        put(large);
        put(first);
        put(last);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_blocks(), 0);
}

TEST(idle_bytes_bound)
{
        void *p[16], *q[4];

        bfc_disconnect(client);
        client = open_client(0, 4 * MIB, 0);
        for (int i = 0; i < 16; i++)
                p[i] = get(1 * MIB);
        for (int i = 0; i < 4; i++)
                ck_assert_int_eq(bfc_malloc_in(client, "infer", 1 * MIB, &q[i]), 0);
        for (int i = 0; i < 4; i++)
                put(q[i]);
        ck_assert_uint_eq(n_blocks(), 10); /* just at infer's bound */
        for (int i = 0; i < 16; i++)
                put(p[i]);
        ck_assert_uint_eq(n_blocks(), 4); /* each partition's own: infer keeps its two */
        ck_assert_uint_eq(stats().bytes_reserved, 8 * MIB);
        ck_assert_uint_eq(stats().peak_bytes_reserved, 20 * MIB);
        ck_assert_int_eq(bfc_reset_peaks(client), 0);
        ck_assert_uint_eq(stats().peak_bytes_reserved, 8 * MIB);
        ck_assert_uint_eq(stats().peak_bytes_in_use, 0);
        expect_error(bfc_reset_peaks(NULL), -EINVAL, "NULL");
        expect_error(bfc_trim(NULL, 1), -EINVAL, "NULL");
}

/* By default half of the tenant's limit, which is 16 MiB. */
TEST(idle_bytes_default)
{
        void *p[12];

        /* The daemon cannot ask a client without events for its idle memory: half of the limit. */
        bfc_disconnect(client);
        client = open_client(BFC_NO_THREAD, 0, 0);
        for (int i = 0; i < 12; i++)
                p[i] = get(1 * MIB);
        ck_assert_uint_eq(n_blocks(), 6);
        for (int i = 0; i < 12; i++)
                put(p[i]);
        ck_assert_uint_eq(n_blocks(), 4);
        ck_assert_uint_eq(stats().bytes_reserved, 8 * MIB);
        bfc_disconnect(client);
        client = open_client(0, 0, 0);
        for (int i = 0; i < 12; i++)
                p[i] = get(1 * MIB);
        for (int i = 0; i < 12; i++)
                put(p[i]);
        ck_assert_uint_eq(stats().bytes_reserved, 12 * MIB);
}

TEST(refusal_returns_idle_slabs)
{
        char *kept = get(1000), *a = get(5 * MIB), *b = get(6 * MIB), *q = NULL;
        uint64_t n_failures = stats().num_failures;

        strcpy(kept, "kept");
        put(a);
        put(b);
        fake_server_set_mood(server, FAKE_REFUSE_ONCE, 0);
        a = get(40 * MIB);
        memset(a, 'a', 40 * MIB);
        ck_assert_uint_eq(stats().num_failures, n_failures);
        ck_assert_uint_eq(stats().bytes_reserved, 40 * MIB + 1024); /* behind what is kept */
        ck_assert_uint_eq(n_blocks(), 2);
        /* In the end it is a refusal. */
        put(a);
        fake_server_set_mood(server, FAKE_REFUSE, 0);
        expect_error(bfc_malloc(client, 60 * MIB, (void **)&q), -EDQUOT, "tenant vision asked for much");
        ck_assert_ptr_null(q);
        ck_assert_uint_eq(stats().num_failures, n_failures + 1);
        ck_assert_uint_eq(n_blocks(), 1);
        put(get(2 * MIB - 1024)); /* from the slab that stayed */
        ck_assert_str_eq(kept, "kept");
        /* Where a whole slab is too much, what is needed is asked for. */
        fake_server_set_mood(server, FAKE_GOOD, 0);
        get(2 * MIB - 1024);
        get(61 * MIB + 900 * 1024); /* 64 KiB are left */
        expect_error(bfc_malloc(client, 200 * 1024, (void **)&q), -ENOMEM, "full");
        q = get(60 * 1024);
        memset(q, 'q', 60 * 1024);
}

/* Where extents end only the daemon knows: such a block is its own, and not kept. */
TEST(blocks_in_one_extent_are_not_cached)
{
        char *kept = get(1000);
        void *p = NULL;

        put(get(5 * MIB));
        ck_assert_uint_eq(n_blocks(), 2);
        fake_server_set_mood(server, FAKE_REFUSE_ONCE, 0);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 1 * MIB, BFC_ONE_EXTENT, &p), 0);
        ck_assert_uint_eq(n_blocks(), 2); /* what was idle went back */
        ck_assert_uint_eq(info(p).block_offset, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 3 * MIB);
        put(p);
        ck_assert_uint_eq(n_blocks(), 1);
        ck_assert_uint_eq(stats().bytes_reserved, 2 * MIB);
        put(kept);
}

/* So is one with a tag. No request waits while a slab is idle. */
TEST(options_reach_the_daemon)
{
        struct bfc_malloc_options o = { .struct_size = sizeof(o), .tag = "weights", .wait_ms = 700000 };
        char *kept = get(1000);
        void *p = NULL;

        ck_assert_int_eq(bfc_malloc_with(client, 1000, &o, &p), 0);
        ck_assert_uint_eq(n_blocks(), 2);
        ck_assert_str_eq(fake_server_count(server).tag, "weights");
        ck_assert_uint_eq(fake_server_count(server).wait_ms, 0);
        put(p);
        ck_assert_uint_eq(n_blocks(), 1);
        fake_server_set_mood(server, FAKE_REFUSE_ONCE, 0);
        ck_assert_int_eq(bfc_malloc_with(client, 1000, &o, &p), 0);
        ck_assert_uint_eq(fake_server_count(server).wait_ms, 600000);
        put(p);
        o.tag = "";
        ck_assert_int_eq(bfc_malloc_with(client, 1000, &o, &p), 0);
        ck_assert_uint_eq(n_blocks(), 1); /* no tag: cut from what there is */
        put(p);
        ck_assert_int_eq(bfc_malloc_with(client, 1000, NULL, &p), 0);
        put(p);
        put(kept);
}

TEST(options_are_checked)
{
        struct {
                struct bfc_malloc_options o;
                uint64_t more;
        } later = { { .struct_size = sizeof(later) }, 0 };
        struct bfc_malloc_options o = { .struct_size = sizeof(o) - 1 };
        void *p = NULL;

        expect_error(bfc_malloc_with(client, 1, &o, &p), -EINVAL, "struct_size");
        o = (struct bfc_malloc_options){ .struct_size = sizeof(o), .flags = 1 << 20 };
        expect_error(bfc_malloc_with(client, 1, &o, &p), -EINVAL, "0x100000");
        o = (struct bfc_malloc_options){ .struct_size = sizeof(o),
                                         .tag = "0123456789abcdef0123456789abcdef" };
        expect_error(bfc_malloc_with(client, 1, &o, &p), -EINVAL, "31");
        o = (struct bfc_malloc_options){ .struct_size = sizeof(o), .partition = "none" };
        expect_error(bfc_malloc_with(client, 1, &o, &p), -ENOENT, "none");
        ck_assert_ptr_null(p);
        ck_assert_int_eq(bfc_malloc_with(client, 1, &later.o, &p), 0);
        put(p);
        later.more = 1;
        expect_error(bfc_malloc_with(client, 1, &later.o, &p), -EINVAL, "does not support");
}

/* ---- switches ---------------------------------------------------------------- */

TEST(cache_off_by_environment_and_option)
{
        struct bfc_options o = { .struct_size = sizeof(o), .socket = fake_server_path(server) };
        bfc_client *other = NULL;
        void *p;

        for (int i = 0; i < 3; i++) {
                const uint64_t flags[] = { BFC_NO_CACHE, 0, BFC_NO_THREAD };

                bfc_disconnect(client);
                if (i == 1)
                        setenv("BFC_CACHE", "off", 1);
                if (i == 2) /* by default */
                        unsetenv("BFC_CACHE");
                client = open_client(flags[i], 0, 0);
                put(get(100));
                ck_assert_msg(n_blocks() == 0, "round %d", i);
                ck_assert_uint_eq(stats().bytes_reserved, 0);
                ck_assert_uint_eq(stats().peak_bytes_reserved, 256);
                ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
                p = get(300);
                ck_assert_uint_eq(info(p).block_offset, 0);
                put(p);
        }
        /* It is on by default, except where the daemon cannot ask for idle slabs. */
        bfc_disconnect(client);
        client = open_client(0, 0, 0);
        put(get(100));
        ck_assert_uint_eq(n_blocks(), 1);
        setenv("BFC_CACHE", "of", 1);
        expect_error(bfc_connect(&o, &other), -EINVAL, "on or off");
        setenv("BFC_CACHE", "on", 1);
        o.cache_slab_bytes = 4096 * MIB;
        expect_error(bfc_connect(&o, &other), -EINVAL, "cache_slab_bytes");
        o.cache_slab_bytes = 100; /* rounded up */
        ck_assert_int_eq(bfc_connect(&o, &other), 0);
        bfc_disconnect(other);
}

/* ---- a daemon that hangs up or sends invalid replies ------------------------------------------------ */

TEST(daemon_gone)
{
        char *p = get(100);
        void *q = NULL;

        strcpy(p, "still here");
        fake_server_hang_up(server);
        expect_error(bfc_malloc(client, 9 * MIB, &q), -ECONNRESET, "not running");
        /* From now on it is known. */
        expect_error(bfc_malloc(client, 1, &q), -ECONNRESET, "not running");
        expect_error(bfc_free(client, p), -ECONNRESET, "not running");
        expect_error(bfc_free(client, p), -ECONNRESET, "not running"); /* not: freed already */
        ck_assert_str_eq(p, "still here");
        ck_assert_uint_eq(stats().num_blocks, 1);
        ck_assert_uint_eq(stats().num_allocs, 1);
        ck_assert_ptr_null(q);
}

/* The thread sees the end, and no request of the cache's is served after it: not a stashed block's,
 * not a slab's, not a stream's. Nothing is asked for that. */
TEST(daemon_gone_is_noticed_without_a_call)
{
        char *p = get(100);
        uint64_t n_calls = stats().num_calls;
        void *q = NULL;
        int r = 0;

        put(get(300));
        put(get(100000));
        put(get(7 * MIB));
        n_calls = stats().num_calls;
        fake_server_event(server, FAKE_EVENT_HANG_UP);
        fake_server_hang_up(server);
        for (int i = 0; i < 100000 && r == 0; i++) {
                r = bfc_malloc(client, 300, &q);
                if (r == 0)
                        r = bfc_free(client, q); /* it may be noticed between the two */
                usleep(1000);
        }
        q = NULL;
        expect_error(r, -ECONNRESET, "not running");
        expect_error(bfc_malloc(client, 300, &q), -ECONNRESET, "not running");
        expect_error(bfc_malloc(client, 100000, &q), -ECONNRESET, "not running");
        expect_error(bfc_malloc(client, 7 * MIB, &q), -ECONNRESET, "not running");
        expect_error(bfc_malloc_async(client, 300, 1, &q), -ECONNRESET, "not running");
        expect_error(bfc_malloc_async(client, 5 * MIB, 1, &q), -ECONNRESET, "not running");
        ck_assert_ptr_null(q);
        memset(p, 1, 100); /* its memory stays */
        for (int i = 0; i < 3; i++)
                expect_error(bfc_free(client, p), -ECONNRESET, "not running");
        expect_error(bfc_free_async(client, p, 1), -ECONNRESET, "not running");
        ck_assert_uint_eq(stats().num_blocks, 1);
        ck_assert_uint_eq(stats().num_calls, n_calls);
}

TEST(daemon_gone_while_trimming)
{
        put(get(100));
        fake_server_hang_up(server);
        expect_error(bfc_trim(client, SIZE_MAX), -ECONNRESET, "not running");
}

/* The daemon stops in the middle of a Trim: its answer is not waited for for ever. */
TEST(disconnecting_from_a_daemon_that_hangs)
{
        struct timespec begin, end;

        put(get(100));
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 1);
        fake_server_set_mood(server, FAKE_FREE_UNANSWERED, 0);
        fake_server_event(server, FAKE_TRIM);
        while (fake_server_count(server).n_blocks > 0)
                usleep(1000);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        bfc_disconnect(client);
        client = NULL;
        clock_gettime(CLOCK_MONOTONIC, &end);
        ck_assert_int_ge(end.tv_sec - begin.tv_sec, 4);
}

/* On a device that is to be emptied nothing stays idle, and afterwards it does again. */
/* Of a size that is stashed, and of one that is not. */
LOOP_TEST(draining, 2)
{
        const enum fake_event events[] = { FAKE_DRAINING, FAKE_DRAINING_OVER, FAKE_DRAINING };
        size_t n_bytes = _i ? 100 : 3 * MIB;
        unsigned n_blocks = 1;

        put(get(n_bytes));
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 1);
        for (size_t i = 0; i < 3; i++) {
                fake_server_event(server, events[i]);
                for (int k = 0; k < 100000 && n_blocks != i % 2; k++) {
                        usleep(1000);
                        put(get(n_bytes));
                        n_blocks = fake_server_count(server).n_blocks;
                }
                ck_assert_uint_eq(n_blocks, i % 2);
        }
}

TEST(free_refused)
{
        put(get(100));
        fake_server_set_mood(server, FAKE_FREE_REFUSED, 0);
        expect_error(bfc_trim(client, SIZE_MAX), -EINVAL, "no such block");
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

static const struct {
        enum fake_mood mood;
        int error;
} lies[] = {
        { FAKE_WRONG_BODY, -EPROTO }, { FAKE_BAD_REGION, -EPROTO }, { FAKE_BAD_OFFSET, -EPROTO },
        { FAKE_TOO_SMALL, -EPROTO },  { FAKE_SAME_PLACE, -EPROTO },
};

LOOP_TEST(invalid_replies_end_the_session, sizeof(lies) / sizeof(lies[0]))
{
        char *p = get(100);
        void *q = NULL;

        fake_server_set_mood(server, lies[_i].mood, 0);
        ck_assert_int_eq(bfc_malloc(client, 3 * MIB, &q), lies[_i].error);
        ck_assert_ptr_null(q);
        fake_server_set_mood(server, FAKE_GOOD, 0);
        p[0] = 1;
        put(get(1));
        put(p);
}

/* What is idle here is still held, so its extent is not to be taken back. */
TEST(idle_slabs_keep_their_extents)
{
        char *p = get(3 * MIB);
        void *q = NULL;

        memset(p, 'p', 3 * MIB);
        put(p);
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 0);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(fake_server_event(server, FAKE_RETIRE), 2);
        ck_assert_uint_eq(stats().bytes_mapped, 0);
        p = get(3 * MIB);
        memset(p, 'q', 3 * MIB);
        put(p);
        fake_server_event(server, FAKE_RETIRE_USED);
        for (int i = 0; i < 100000 && bfc_malloc(client, 1, &q) == 0; i++)
                usleep(1000);
        expect_error(bfc_malloc(client, 1, &q), -EPROTO, "in use");
        ck_assert_int_eq(p[0], 'q');
}

/* ---- no system call ------------------------------------------------------------ */

/* Everything kills but the thread's own end, and the barrier before it looks into another thread's magazine. */
static void forbid_system_calls(void)
{
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 1, 0),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        };
        struct sock_fprog program = { .len = 5, .filter = filter };

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
                ck_abort_msg("seccomp: %s", strerror(errno));
}

static int many_pairs(void)
{
        void *p[64] = { NULL };
        int r = 0;

        for (unsigned i = 0; i < 20000; i++) {
                void **slot = &p[i * 7919 % 64];

                r |= bfc_free(client, *slot);
                r |= bfc_malloc(client, 1 + i * 31 % 9000, slot);
        }
        for (unsigned i = 0; i < 64; i++)
                r |= bfc_free(client, p[i]);
        return r;
}

static void *without_system_calls(void *userdata)
{
        int *ret = userdata;

        forbid_system_calls();
        *ret = many_pairs();
        syscall(SYS_exit, 0); /* not the library's end of a thread, which asks for more */
        return NULL;
}

static void *get_huge(void *n_bytes)
{
        return get((uintptr_t)n_bytes);
}

/* A thread that requests one huge size again and again has a block of it for itself, but others have it before the
 * daemon is asked: for another size, in another thread, and for a trim. */
TEST(huge_block_of_a_thread_serves_others)
{
        uint64_t n_calls;
        pthread_t thread;
        void *p = get(16 * MIB), *other;

        put(p);
        n_calls = stats().num_calls;
        for (int i = 0; i < 50; i++) {
                ck_assert_ptr_eq(get(16 * MIB), p);
                put(p);
        }
        expect_error(bfc_free(client, p), -EINVAL, "already freed");
        ck_assert_uint_eq(stats().bytes_idle, 16 * MIB);
        ck_assert_int_eq(pthread_create(&thread, NULL, get_huge, (void *)(uintptr_t)(16 * MIB)), 0);
        pthread_join(thread, &other);
        ck_assert_ptr_eq(other, p);
        put(p);
        ck_assert_ptr_eq(get(12 * MIB), p);
        put(p);
        for (int i = 0; i < 50; i++) {
                ck_assert_ptr_eq(get(16 * MIB), p);
                put(p);
        }
        ck_assert_uint_eq(stats().num_calls, n_calls);
        ck_assert_uint_eq(stats().num_blocks, 0);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        ck_assert_uint_eq(n_blocks(), 0);
}

TEST(cached_calls_make_no_system_call)
{
        pthread_t thread;
        int r = -1;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
        return; /* a sanitizer makes some of its own */
#endif
        ck_assert_int_eq(many_pairs(), 0); /* our own tables have grown */
        ck_assert_int_eq(pthread_create(&thread, NULL, without_system_calls, &r), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_int_eq(r, 0);
        ck_assert_uint_eq(stats().num_frees, 40000);
}

/* ---- threads ----------------------------------------------------------------- */

#define N_THREADS 6
static int stop;

/* Until a block of 2 MiB is stashed, if it is not refused. */
static void take_turns(int mark)
{
        for (int i = 0; i < 80; i++) {
                char *p = NULL;

                if (bfc_malloc(client, 2 * MIB, (void **)&p) < 0)
                        continue;
                memset(p, mark, 256);
                if (i % 8 == 0)
                        sched_yield();
                if (p[0] != mark || p[255] != mark)
                        ck_abort_msg("a block was written by somebody else");
                put(p);
        }
}

static void *churn(void *userdata)
{
        unsigned seed = (unsigned)(uintptr_t)userdata * 7919u + 1;
        unsigned char *held[16] = { 0 };
        size_t sizes[16] = { 0 };

        for (int i = 0; i < 4000; i++) {
                size_t at, n;
                void *p = NULL;
                int r;

                seed = seed * 1103515245u + 12345u;
                at = (seed >> 16) % 16;
                n = 1 + (seed >> 8) % ((seed >> 20) % 16 == 0 ? 3 * MIB : 20000);
                if (!held[at]) {
                        r = bfc_malloc_in(client, seed >> 30 & 1 ? "infer" : NULL, n, &p);
                        ck_assert_msg(r == 0 || r == -ENOMEM || r == -EDQUOT, "%s", bfc_last_error());
                        if (r < 0)
                                continue;
                        if (i % 64 == 0)
                                take_turns((int)(uintptr_t)userdata);
                        held[at] = p;
                        sizes[at] = n;
                        memset(held[at], (int)(at + 1), n);
                        continue;
                }
                for (size_t j = 0; j < sizes[at]; j += 256)
                        if (held[at][j] != at + 1)
                                ck_abort_msg("a block was written by somebody else");
                put(held[at]);
                held[at] = NULL;
        }
        for (int i = 0; i < 16; i++)
                put(held[i]);
        return NULL;
}

static void *disturb(void *userdata)
{
        (void)userdata;
        for (unsigned i = 0; !__atomic_load_n(&stop, __ATOMIC_SEQ_CST); i++) {
                ck_assert_int_eq(bfc_trim(client, i % 3 == 0 ? SIZE_MAX : 2 * MIB), 0);
                fake_server_event(server, FAKE_RETIRE);
                fake_server_set_mood(server, i % 4 == 0 ? FAKE_REFUSE_ONCE : FAKE_GOOD, 0);
                (void)stats();
                usleep(2000);
        }
        return NULL;
}

static void run_threads(void)
{
        pthread_t threads[N_THREADS], disturber;

        ck_assert_int_eq(pthread_create(&disturber, NULL, disturb, NULL), 0);
        for (uintptr_t i = 0; i < N_THREADS; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, churn, (void *)i), 0);
        for (int i = 0; i < N_THREADS; i++)
                pthread_join(threads[i], NULL);
        __atomic_store_n(&stop, 1, __ATOMIC_SEQ_CST);
        pthread_join(disturber, NULL);
        ck_assert_uint_eq(stats().num_blocks, 0);
        ck_assert_uint_eq(stats().bytes_in_use, 0);
        ck_assert_uint_eq(stats().num_allocs, stats().num_frees);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        ck_assert_uint_eq(n_blocks(), 0);
}

TEST(many_threads)
{
        run_threads();
}

TEST(many_threads_and_a_bound)
{
        bfc_disconnect(client);
        client = open_client(0, 3 * MIB, 65536);
        run_threads();
}

TEST(disconnect_with_blocks_of_all_kinds)
{
        get(100);
        get(7 * MIB);
        put(get(5 * MIB));
        bfc_disconnect(client);
        client = NULL;
        ck_assert_uint_eq(fake_server_count(server).n_goodbyes, 1);
}
