/* Allocation on streams of the host, to which this test gives work, against a stand-in for the
 * daemon.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * "Busy" is a stream that has work which is not done. */
#include <bfcclient.h>

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "client/client.h"
#include "tests/host_stream.h"
#include "tests/suite.h"
#include "tests/unit/server_rig.h"

#define SLAB (2 * MIB)
#define S    ((uintptr_t)0x1000)
#define T    ((uintptr_t)0x2000)

/* So many of this thread's calls for memory have some, and the next has none. */
static _Thread_local unsigned n_allocs_left = UINT_MAX;

void *__real_calloc(size_t n, size_t n_bytes);
void *__real_realloc(void *ptr, size_t n_bytes);
void *__wrap_calloc(size_t n, size_t n_bytes);
void *__wrap_realloc(void *ptr, size_t n_bytes);

static bool has_memory(void)
{
        return n_allocs_left == UINT_MAX || n_allocs_left-- > 0;
}

void *__wrap_calloc(size_t n, size_t n_bytes)
{
        return has_memory() ? __real_calloc(n, n_bytes) : NULL;
}

void *__wrap_realloc(void *ptr, size_t n_bytes)
{
        return has_memory() ? __real_realloc(ptr, n_bytes) : NULL;
}

/* How often all work was waited for. */
static unsigned n_finishes;
static void (*on_finish)(void); /* called after that, once */
int __real_host_streams_finish(void);
int __wrap_host_streams_finish(void);

int __wrap_host_streams_finish(void)
{
        void (*then)(void) = on_finish;
        int r = __real_host_streams_finish();

        n_finishes++;
        on_finish = NULL;
        if (then)
                then();
        return r;
}

/* How often the client's thread was woken. */
static _Atomic unsigned n_wakes;
void __real_events_wake(struct events *e);
void __wrap_events_wake(struct events *e);

void __wrap_events_wake(struct events *e)
{
        n_wakes++;
        __real_events_wake(e);
}

/* Called when a block has just been put aside. */
static void (*on_put_aside)(void);
int __real_streams_put_aside(bfc_client *c, const struct block *block, uint32_t partition);
int __wrap_streams_put_aside(bfc_client *c, const struct block *block, uint32_t partition);

int __wrap_streams_put_aside(bfc_client *c, const struct block *block, uint32_t partition)
{
        int r = __real_streams_put_aside(c, block, partition);

        if (on_put_aside)
                on_put_aside();
        return r;
}

static void setup(void)
{
        host_stream_reset();
        server_start(NULL);
        client = open_client(0, UINT64_MAX, 0);
}

static void setup_without_cache(void)
{
        setup();
        bfc_disconnect(client);
        client = open_client(BFC_NO_CACHE, UINT64_MAX, 0);
}

static void teardown(void)
{
        server_end();
        ck_assert_uint_eq(host_stream_n_events(), 0);
}

FIXTURE(streams, setup, teardown);

static struct bfc_stream_stats stats_of(uintptr_t stream)
{
        struct bfc_stream_stats s = { .struct_size = sizeof(s) };

        ck_assert_int_eq(bfc_stats_stream(client, NULL, stream, &s), 0);
        return s;
}

static char *get_on(uintptr_t stream, size_t n_bytes)
{
        void *p = NULL;
        int r = bfc_malloc_async(client, n_bytes, stream, &p);

        ck_assert_msg(r == 0, "bfc_malloc_async: %d: %s", r, bfc_last_error());
        return p;
}

static void put_on(uintptr_t stream, void *p)
{
        ck_assert_msg(bfc_free_async(client, p, stream) == 0, "bfc_free_async: %s", bfc_last_error());
}

/* Collects finished work and returns all idle slabs. */
static unsigned n_blocks_after_trim(void)
{
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        return fake_server_count(server).n_blocks;
}

/* ---- one stream ------------------------------------------------------------- */

TEST(own_stream_reuses_at_once)
{
        char *a = get_on(S, 1000), *b;

        host_stream_begin(S);
        memset(a, 1, 1000);
        put_on(S, a);
        b = get_on(S, 900);
        ck_assert_ptr_eq(a, b);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 1);
        put_on(S, b);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

TEST(other_streams_wait_for_the_work)
{
        char *a, *b, *c;

        a = get_on(S, 1 * MIB);
        host_stream_begin(S);
        put_on(S, a);
        b = get_on(T, 1 * MIB);
        c = get(1 * MIB);
        ck_assert(b + MIB <= a || a + MIB <= b);
        ck_assert(c + MIB <= a || a + MIB <= c);
        put_on(T, b);
        put(c);
        ck_assert_uint_eq(n_blocks_after_trim(), 1); /* the busy one's slab */
        b = get_on(T, 1 * MIB);
        ck_assert(b + MIB <= a || a + MIB <= b);
        put_on(T, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end(S);
        b = get_on(T, 1 * MIB); /* a miss looks */
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 1);
        ck_assert_ptr_eq(a, b);
        put_on(T, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* An event for each slab that became idle, not for each free. */
TEST(events_are_for_whole_slabs)
{
        char *p[16];

        host_stream_begin(S);
        for (int i = 0; i < 16; i++)
                p[i] = get_on(S, 100 * KIB);
        for (int i = 0; i < 15; i++)
                put_on(S, p[i]);
        ck_assert_uint_eq(host_stream_n_events(), 0);
        put_on(S, p[15]);
        ck_assert_uint_eq(host_stream_n_events(), 1);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        ck_assert_uint_eq(host_stream_n_events(), 0); /* the pool is gone */
}

/* The event was of an idle time that is over. */
TEST(a_slab_taken_again_stays)
{
        char *a = get_on(S, 1000), *b;

        host_stream_begin(S);
        put_on(S, a);
        a = get_on(S, 1000);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_begin(S);
        put_on(S, a); /* idle again, behind more work */
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        b = get_on(T, 1000);
        ck_assert_ptr_ne(a, b);
        put_on(T, b);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* More slabs than marks: each leaves when the work before its free is done, or a little later. */
TEST(many_slabs_become_idle)
{
        char *p[20];

        for (int i = 0; i < 20; i++)
                p[i] = get_on(S, 2 * MIB);
        for (int i = 0; i < 20; i++) {
                host_stream_begin(S);
                put_on(S, p[i]);
        }
        ck_assert_uint_le(host_stream_n_events(), 10);
        for (unsigned i = 0; i < 20; i++) {
                unsigned n = n_blocks_after_trim();

                ck_assert_uint_ge(n, 20 - i); /* never one too early */
                if (i < 7)
                        ck_assert_uint_eq(n, 20 - i);
                host_stream_end(S);
        }
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* ---- several ----------------------------------------------------------------- */

TEST(freed_on_another_stream)
{
        char *a = get_on(S, 1000), *b, *c;

        host_stream_begin(T);
        put_on(T, a);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 1024);
        b = get_on(S, 1000);
        ck_assert_ptr_ne(a, b); /* its own stream neither */
        put_on(S, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end(T);
        c = get_on(S, 3 * KIB);
        put_on(S, c);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 0);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

TEST(recorded_streams)
{
        char *a = get_on(S, 1000), *b;

        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        ck_assert_int_eq(bfc_record_stream(client, a, S), 0);
        ck_assert_int_eq(bfc_record_stream(client, a, 77), 0);
        host_stream_begin(T); /* after it was told of: what counts is the free */
        host_stream_begin(77);
        put_on(S, a);
        host_stream_begin(T); /* that is too late to matter */
        host_stream_end(77);
        b = get_on(S, 1000);
        ck_assert_ptr_ne(a, b);
        host_stream_end(T);
        put_on(S, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        host_stream_end(T);
}

TEST(free_async_of_a_bfc_malloc_block)
{
        char *a = get(1000), *b;

        host_stream_begin(S);
        put_on(S, a);
        expect_error(bfc_free(client, a), -EINVAL, "already freed");
        expect_error(bfc_free_async(client, a, S), -EINVAL, "already freed");
        ck_assert_uint_eq(stats().bytes_in_use, 0);
        b = get(1000);
        ck_assert_ptr_ne(a, b);
        put(b);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

static void *end_later(void *arg)
{
        usleep(30000);
        host_stream_end((uintptr_t)arg);
        return NULL;
}

TEST(bfc_free_waits_for_the_stream)
{
        char *a = get_on(S, 1000);
        pthread_t thread;

        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        host_stream_begin(T);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)T), 0);
        put(a);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 0);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        pthread_join(thread, NULL);
}

/* To wait is not possible then: so it is put aside, and looked at after the capture. _i: where it is from,
 * a slab or one of its own. */
LOOP_TEST(bfc_free_in_a_capture, 2)
{
        size_t n_bytes = _i == 0 ? 1000 : 3 * SLAB;
        char *a = get_on(S, n_bytes), *b;
        pthread_t thread;

        ck_assert_int_eq(bfc_record_stream(client, get_on(S, 1), T), 0); /* it is known */
        host_stream_begin_capture(T);
        put(a);
        expect_error(bfc_free(client, a), -EINVAL, "already freed");
        expect_error(bfc_free_async(client, a, S), -EINVAL, "already freed");
        ck_assert_uint_eq(stats().num_blocks, 1);
        b = get_on(S, n_bytes);
        ck_assert_ptr_ne(b, a);
        put_on(S, b);
        ck_assert_uint_ge(n_blocks_after_trim(), 1);
        ck_assert_uint_ge(stats_of(S).bytes_pending, n_bytes);
        host_stream_end_capture(T);
        host_stream_begin(T);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)T), 0);
        ck_assert_uint_eq(n_blocks_after_trim(), 1); /* that of the recorded one */
        ck_assert_uint_eq(stats_of(S).bytes_pending, 0);
        pthread_join(thread, NULL);
}

static void end_capture_and_take(void)
{
        on_put_aside = NULL;
        host_stream_end_capture(T);
        ck_assert_uint_eq(stats().num_blocks, 1);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        put(get_on(S, 3 * SLAB));
}

/* Another thread may have the memory before bfc_free() returns. */
TEST(put_aside_and_taken_at_once)
{
        char *a = get_on(S, 3 * SLAB);

        ck_assert_int_eq(bfc_record_stream(client, get_on(S, 1), T), 0);
        host_stream_begin_capture(T);
        on_put_aside = end_capture_and_take;
        put(a);
        ck_assert_ptr_null(on_put_aside);
        ck_assert_uint_eq(stats().num_blocks, 1);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
}

/* However many they are. */
TEST(put_aside_and_waited_for_once)
{
        char *a[20];

        for (int i = 0; i < 20; i++)
                a[i] = get_on(S, 1000);
        ck_assert_int_eq(bfc_record_stream(client, get_on(S, 1), T), 0);
        host_stream_begin_capture(T);
        for (int i = 0; i < 20; i++)
                put(a[i]);
        host_stream_end_capture(T);
        n_finishes = 0;
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 0);
        ck_assert_uint_eq(n_finishes, 1);
}

static char *freed_meanwhile;

static void free_meanwhile(void)
{
        host_stream_begin_capture(T);
        put(freed_meanwhile);
        host_stream_end_capture(T);
}

/* A wait covers what was freed before it began. */
TEST(put_aside_during_a_wait)
{
        char *a = get_on(S, 1000);

        freed_meanwhile = get_on(S, 1000);
        ck_assert_int_eq(bfc_record_stream(client, get_on(S, 1), T), 0);
        host_stream_begin_capture(T);
        put(a);
        host_stream_end_capture(T);
        n_finishes = 0;
        on_finish = free_meanwhile;
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_finishes, 1);
        ck_assert_uint_gt(stats_of(S).bytes_pending, 0);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(n_finishes, 2);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 0);
}

/* Then it stays, as before. */
TEST(put_aside_without_memory)
{
        unsigned n_refused = 0;
        char *a = get_on(S, 1000);
        int r;

        ck_assert_int_eq(bfc_record_stream(client, get_on(S, 1), T), 0);
        host_stream_begin_capture(T);
        do {
                n_allocs_left = n_refused;
                r = bfc_free(client, a);
                n_allocs_left = UINT_MAX;
                if (r < 0) {
                        expect_error(r, -EBUSY, "");
                        ck_assert_uint_eq(stats().num_frees, 0);
                        memset(a, 1, 1000);
                        n_refused++;
                }
        } while (r < 0);
        ck_assert_uint_ge(n_refused, 2);
        host_stream_end_capture(T);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
}

TEST(a_stream_that_ends)
{
        char *a = get_on(S, 1000), *b = get_on(S, 1000), *c;

        host_stream_begin(S);
        put_on(S, a);
        ck_assert_int_eq(bfc_end_stream(client, S), 0);
        ck_assert_int_eq(bfc_end_stream(client, 12345), 0); /* nothing there */
        c = get_on(S, 1000);                                /* another stream of the same number */
        ck_assert(c > b + SLAB || c + SLAB < a || (c != a && c != b));
        ck_assert_ptr_ne(a, c);
        put_on(S, c);
        put_on(T, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 2);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        host_stream_begin_capture(S);
        a = get_on(S, 1);
        expect_error(bfc_end_stream(client, S), -EBUSY, "captured");
        host_stream_end_capture(S);
        put_on(S, a);
}

/* A stream that a block was used by ends: its number is another one's, and is not asked any more. */
TEST(a_recorded_stream_that_ends)
{
        char *a = get_on(S, 1000), *b = get_on(S, 1000), *c = get_on(S, 1000);
        uint64_t n_queries;

        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        ck_assert_int_eq(bfc_record_stream(client, b, T), 0);
        host_stream_begin(T);
        put_on(T, c);
        put_on(S, b);
        ck_assert_int_eq(bfc_end_stream(client, T), 0);
        host_stream_begin(T); /* the next one of that number */
        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        put_on(S, a);
        n_queries = host_stream_n_queries();
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        ck_assert_uint_gt(host_stream_n_queries(), n_queries);
        host_stream_end(T); /* what the first was given */
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 1024);
        host_stream_end(T);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        ck_assert_int_eq(bfc_end_stream(client, T), 0);
}

TEST(freed_on_a_later_stream_of_that_number)
{
        char *a = get_on(S, 1000);

        ck_assert_int_eq(bfc_end_stream(client, S), 0);
        host_stream_begin(S);
        put_on(S, a);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* Not when somebody happens to look. */
TEST(events_are_recorded_at_the_free)
{
        char *p[8];

        for (unsigned i = 0; i < 8; i++) {
                p[i] = get_on(i + 1, 1000);
                host_stream_begin(i + 1);
        }
        for (unsigned i = 0; i < 8; i++) {
                put_on(i + 1, p[i]);
                ck_assert_uint_eq(host_stream_n_events(), i + 1);
                host_stream_begin(i + 1); /* comes too late to matter */
        }
        for (unsigned i = 0; i < 8; i++)
                host_stream_end(i + 1);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        for (unsigned i = 0; i < 8; i++)
                host_stream_end(i + 1);
}

/* ---- captures ----------------------------------------------------------------- */

TEST(no_event_in_a_capture)
{
        char *before = get_on(S, 1000), *a, *b;
        uint64_t n_queries;

        host_stream_begin(T);
        put_on(T, before); /* waits for T */
        host_stream_begin_capture(S);
        a = get_on(S, 1000);
        n_queries = host_stream_n_queries();
        put_on(S, a);
        b = get_on(S, 1000);
        ck_assert_ptr_ne(a, b);
        put_on(S, b);
        host_stream_end(T);
        ck_assert_uint_eq(n_blocks_after_trim(), 2);
        ck_assert_uint_eq(host_stream_n_queries(), n_queries);
        b = get_on(T, 1000);
        ck_assert_ptr_ne(a, b);
        put_on(T, b);
        host_stream_end_capture(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* The graph may run in another stream, which does not come behind the work of this one. */
TEST(a_capture_has_memory_of_its_own)
{
        char *a = get_on(S, 1000), *b;

        host_stream_begin(S);
        put_on(S, a);
        host_stream_begin_capture(S);
        b = get_on(S, 1000);
        ck_assert_ptr_ne(a, b);
        host_stream_end_capture(S);
        ck_assert_ptr_eq(get_on(S, 1000), a);
        put_on(S, a);
        host_stream_begin(S); /* with what was allocated in the capture */
        put_on(S, b);
        host_stream_begin_capture(S);
        a = get_on(S, 1000);
        ck_assert_ptr_ne(a, b);
        host_stream_end_capture(S);
        put_on(S, a);
        host_stream_end(S);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

TEST(freed_in_the_capture_of_another)
{
        char *a = get_on(S, 1000);

        host_stream_begin_capture(T);
        put_on(T, a);
        ck_assert_uint_eq(stats_of(S).bytes_pending, 1024);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end_capture(T);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* ---- failures ------------------------------------------------------------------ */

/* i: -EIO and -ENODEV: none of its work goes on; others say nothing of it. */
LOOP_TEST(events_that_fail, 4)
{
        static const int errors[] = { -EIO, -ENODEV, -ENOMEM, -EAGAIN };
        bool is_over = _i < 2;
        char *a = get_on(S, 1000), *b = get_on(T, 1000);

        host_stream_begin(S);
        put_on(S, a);
        put_on(S, b);
        host_stream_fail(S, errors[_i]);
        ck_assert_uint_eq(n_blocks_after_trim(), is_over ? 0 : 2);
        host_stream_fail(S, 0);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* Events cannot be recorded. */
LOOP_TEST(events_that_cannot_be_had, 4)
{
        static const int errors[] = { -EIO, -ENODEV, -ENOMEM, -EAGAIN };
        bool is_over = _i < 2;
        char *a = get_on(S, 1000), *b = get_on(T, 1000);

        host_stream_begin(S);
        ck_assert_int_eq(bfc_record_stream(client, b, S), 0);
        host_stream_fail(S, errors[_i]);
        put_on(S, a);
        put_on(T, b);
        ck_assert_uint_eq(n_blocks_after_trim(), is_over ? 0 : 2);
        host_stream_fail(S, 0);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* Then it takes waiting for all work. */
TEST(destroyed_stream)
{
        char *a = get_on(S, 1000), *b = get_on(S, 1000), *c;
        pthread_t thread;

        host_stream_fail(T, -EINVAL);
        expect_error(bfc_malloc_async(client, 1, T, (void **)&c), -EINVAL, "not a stream");
        expect_error(bfc_free_async(client, a, T), -EINVAL, "not a stream");
        expect_error(bfc_record_stream(client, a, T), -EINVAL, "not a stream");
        host_stream_fail(T, 0);
        ck_assert_int_eq(bfc_record_stream(client, a, T), 0);
        host_stream_begin(T);
        host_stream_fail(T, -EINVAL);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)T), 0);
        put_on(S, b);
        put_on(S, a);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        pthread_join(thread, NULL);
}

/* From malloc(), one after the other has none until it is done without the one that fails: nothing has
 * changed then. i: where the block is from, the cache or the daemon. */
LOOP_TEST(block_stays_where_records_fail, 2)
{
        size_t n_bytes = _i == 0 ? 1000 : 3 * SLAB;
        unsigned n_refused = 0;
        char *a = get(n_bytes);
        int r;

        host_stream_begin(S);
        do {
                n_allocs_left = n_refused;
                r = bfc_free_async(client, a, S);
                n_allocs_left = UINT_MAX;
                if (r < 0) {
                        expect_error(r, -ENOMEM, "");
                        ck_assert_uint_eq(stats().num_frees, 0);
                        memset(a, 1, n_bytes);
                        n_refused++;
                }
        } while (r < 0);
        ck_assert_uint_ge(n_refused, 2);
        ck_assert_uint_ge(n_blocks_after_trim(), 1);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* What a stream has is a part of what it holds. */
TEST(pending_block_cannot_be_published)
{
        char *a = get_on(S, 3 * MIB);

        expect_error(bfc_publish(client, a, "a"), -EINVAL, "BFC_WHOLE");
        put_on(S, a);
}

TEST(mistakes)
{
        char *a = get_on(S, 1000), *b = get(1);
        void *p = NULL;

        expect_error(bfc_malloc_async(client, 0, S, &p), -EINVAL, "0 bytes");
        expect_error(bfc_malloc_async(client, 1, S, NULL), -EINVAL, "NULL");
        expect_error(bfc_malloc_async(NULL, 1, S, &p), -EINVAL, "client is NULL");
        expect_error(bfc_malloc_async_in(client, "nowhere", 1, S, &p), -ENOENT, "nowhere");
        expect_error(bfc_free_async(client, a + 256, S), -EINVAL, "not a block");
        expect_error(bfc_record_stream(client, a + 256, S), -EINVAL, "not a block");
        expect_error(bfc_record_stream(client, b, S), -EINVAL, "bfc_malloc()");
        expect_error(bfc_stats_stream(client, NULL, S, NULL), -EINVAL, "struct_size");
        expect_error(bfc_stats_stream(client, "nowhere", S, &(struct bfc_stream_stats){ .struct_size = 72 }),
                     -ENOENT, "nowhere");
        ck_assert_int_eq(bfc_free_async(client, NULL, S), 0);
        put(b);
        put_on(S, a);
        expect_error(bfc_free_async(client, a, S), -EINVAL, "already freed");
        expect_error(bfc_free(client, a), -EINVAL, "already freed");
        ck_assert_ptr_null(p);
}

/* ---- room ----------------------------------------------------------------------- */

/* The server has 64 MiB. Refused, it waits for what was freed elsewhere. */
TEST(refused_request_waits_for_work)
{
        char *a = get_on(S, 40 * MIB), *b;
        pthread_t thread;

        host_stream_begin(S);
        put_on(S, a);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)S), 0);
        b = get_on(T, 50 * MIB);
        pthread_join(thread, NULL);
        put_on(T, b);
}

/* Less than a slab is left. */
TEST(refused_request_asks_for_less)
{
        char *a = get(63 * MIB), *b = get_on(S, 1000);

        ck_assert_uint_eq(stats_of(S).bytes_reserved, 1024);
        put(a);
        put_on(S, b);
}

/* A request that waits for work of the streams sleeps between its looks, and nothing else here does. */
static _Atomic unsigned n_sleeps;

int __real_nanosleep(const struct timespec *pause, struct timespec *ret_left);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *ret_left);
int __wrap_nanosleep(const struct timespec *pause, struct timespec *ret_left)
{
        n_sleeps++;
        return __real_nanosleep(pause, ret_left);
}

static double seconds(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

TEST(refused_request_gives_up)
{
        char *a = get_on(S, 40 * MIB);
        double begin = seconds();
        unsigned n;
        void *p;

        host_stream_begin(S);
        put_on(S, a);
        ck_assert_int_lt(bfc_malloc_async(client, 50 * MIB, T, &p), 0);
        ck_assert_double_gt(seconds() - begin, 1.5);
        n = n_sleeps;
        ck_assert_uint_gt(n, 0);
        ck_assert_int_lt(bfc_malloc(client, 50 * MIB, &p), 0); /* that waits for nothing */
        host_stream_begin_capture(T);                          /* nor is a capture waited for */
        ck_assert_int_lt(bfc_malloc_async(client, 50 * MIB, T, &p), 0);
        ck_assert_uint_eq(n_sleeps, n);
        host_stream_end_capture(T);
        host_stream_end(S);
        ck_assert_int_eq(bfc_malloc(client, 50 * MIB, &p), 0); /* finished blocks are returned */
        put(p);
}

TEST(disconnecting_with_work_pending)
{
        char *a = get_on(S, 1000), *b = get_on(S, 3 * MIB), *c = get(100);
        pthread_t thread;

        host_stream_begin(T);
        ck_assert_int_eq(bfc_record_stream(client, b, T), 0);
        put_on(T, a);
        put_on(S, b);
        put_on(T, c);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)T), 0);
        bfc_disconnect(client); /* after the work */
        ck_assert_uint_eq(fake_server_count(server).n_goodbyes, 1);
        ck_assert_uint_eq(host_stream_n_events(), 0);
        pthread_join(thread, NULL);
        client = open_client(0, UINT64_MAX, 0);
}

/* ---- statistics ------------------------------------------------------------------ */

TEST(statistics_by_stream)
{
        char *a = get_on(S, 1000), *b = get_on(S, 3 * MIB), *c = get_on(T, 500);
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        struct bfc_stream_stats s = stats_of(S);
        char bytes[4];

        ck_assert_uint_eq(s.num_allocs, 2);
        ck_assert_uint_eq(s.bytes_in_use, 1024 + 3 * MIB);
        ck_assert_uint_eq(s.bytes_reserved, SLAB + 3 * MIB);
        ck_assert_uint_eq(s.largest_alloc_size, 3 * MIB);
        ck_assert_uint_eq(stats_of(T).bytes_in_use, 512);
        ck_assert_uint_eq(stats().bytes_in_use, 1024 + 3 * MIB + 512);
        ck_assert_uint_eq(stats().peak_bytes_in_use, 1024 + 3 * MIB + 512);
        ck_assert_uint_eq(stats().num_allocs, 3);
        ck_assert_uint_eq(stats().bytes_requested, 1000 + 3 * MIB + 500);
        ck_assert_int_eq(bfc_block_info(client, a, &info), 0);
        ck_assert_uint_eq(info.n_requested, 1000);
        ck_assert_uint_gt(info.block_id, 0);
        ck_assert_uint_eq(info.block_offset, 0);
        ck_assert_int_eq(bfc_write(client, a + 10, "abc", 4), 0);
        ck_assert_int_eq(bfc_read(client, bytes, a + 10, 4), 0);
        ck_assert_str_eq(bytes, "abc");
        put_on(S, b);
        s = stats_of(S);
        ck_assert_uint_eq(s.num_frees, 1);
        ck_assert_uint_eq(s.bytes_in_use, 1024);
        ck_assert_uint_eq(s.peak_bytes_in_use, 1024 + 3 * MIB);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats_of(S).bytes_reserved, SLAB);
        ck_assert_int_eq(bfc_reset_peaks(client), 0);
        ck_assert_uint_eq(stats_of(S).peak_bytes_in_use, 1024);
        ck_assert_uint_eq(stats_of(S).peak_bytes_reserved, SLAB);
        put_on(S, a);
        put_on(T, c);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        ck_assert_uint_eq(stats_of(S).peak_bytes_in_use, 1024); /* it is remembered for a while */
        ck_assert_uint_eq(stats_of(999).num_allocs, 0);
}

/* What is remembered of streams that have nothing is bounded. */
TEST(many_streams_come_and_go)
{
        for (uintptr_t i = 1; i <= 1000; i++)
                put_on(i, get_on(i, 100));
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        ck_assert_uint_eq(stats_of(1000).num_allocs, 1);
        ck_assert_uint_eq(stats_of(1).num_allocs, 0);
        ck_assert_uint_eq(host_stream_n_events(), 0);
}

TEST(allocations_are_recorded)
{
        char path[] = "/tmp/bfc-test-streams-XXXXXX", line[128];
        int fd = mkstemp(path), n = 0;
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = fake_server_path(server),
                                 .trace = path,
                                 .cache_idle_bytes = UINT64_MAX };
        char *a, *b;
        FILE *f;

        ck_assert_int_ge(fd, 0);
        close(fd);
        bfc_disconnect(client);
        client = NULL;
        ck_assert_int_eq(bfc_connect(&o, &client), 0);
        a = get_on(S, 1000);
        b = get_on(T, 77);
        host_stream_begin(S);
        put_on(S, a);
        ck_assert_int_lt(bfc_free_async(client, a, S), 0);
        host_stream_end(S);
        put(get_on(S, 5));
        put_on(S, b);
        bfc_disconnect(client);
        client = NULL;
        f = fopen(path, "re");
        ck_assert_ptr_nonnull(f);
        while (fgets(line, sizeof(line), f)) {
                unsigned long long id, lower, upper, size;

                if (sscanf(line, "%llu,%llu,%llu,%llu", &id, &lower, &upper, &size) != 4)
                        continue;
                n++;
                ck_assert(size == 1000 || size == 77 || size == 5);
                ck_assert_uint_lt(lower, upper);
                if (size == 1000)
                        ck_assert_uint_eq(upper, 3); /* ended at its free, not later */
        }
        fclose(f);
        unlink(path);
        ck_assert_int_eq(n, 3);
        client = open_client(0, UINT64_MAX, 0);
}

TEST(forked_child_has_no_streams)
{
        char *a = get_on(S, 1000);
        int status;
        pid_t pid;

        wait_until_others_sleep();
        pid = fork();
        if (pid == 0) {
                void *p;

                _exit(bfc_malloc_async(client, 1, S, &p) == -ECHILD &&
                                      bfc_free_async(client, a, S) == -ECHILD &&
                                      bfc_record_stream(client, a, S) == -ECHILD &&
                                      bfc_end_stream(client, S) == -ECHILD
                              ? 0
                              : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        put_on(S, a);
}

TEST(daemon_disconnects)
{
        char *a = get_on(S, 1000), *b = get(1000);
        void *p;

        fake_server_hang_up(server);
        ck_assert_int_eq(bfc_malloc_async(client, 30 * MIB, S, &p), -ECONNRESET);
        ck_assert_int_eq(bfc_malloc_async(client, 10, S, &p), -ECONNRESET);
        ck_assert_int_eq(bfc_free_async(client, a, S), -ECONNRESET);
        ck_assert_int_eq(bfc_free_async(client, b, S), -ECONNRESET);
        memset(a, 1, 1000); /* they are still there */
        memset(b, 1, 1000);
}

/* The program of the manual page. */
TEST(the_example)
{
        char line[64] = "";
        FILE *out;

        if (!getenv("BFC_EXAMPLE"))
                return; /* not under Meson */
        setenv("BFC_SOCKET", fake_server_path(server), 1);
        setenv("BFC_CACHE", "on", 1);
        out = popen("exec \"$BFC_EXAMPLE\"", "re");
        ck_assert_ptr_nonnull(out);
        ck_assert_ptr_nonnull(fgets(line, sizeof(line), out));
        ck_assert_int_eq(pclose(out), 0);
        ck_assert_str_eq(line, "100 blocks, 1048576 bytes at most\n");
}

/* ---- without a cache ---------------------------------------------------------------- */

FIXTURE(without_a_cache, setup_without_cache, teardown);

TEST(without_a_cache_it_goes_to_the_daemon)
{
        char *a = get_on(S, 1000), *b;
        unsigned before;

        ck_assert_uint_eq(fake_server_count(server).n_blocks, 1);
        host_stream_begin(S);
        before = n_wakes;
        put_on(S, a);
        ck_assert_uint_eq(n_wakes, before + 1); /* it returns the memory when the work is done */
        ck_assert_uint_eq(stats_of(S).bytes_pending, 1024);
        b = get_on(S, 1000);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 2);
        host_stream_end(S);
        put_on(S, b);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        a = get_on(S, 1000);
        host_stream_begin(S);
        put_on(T, a); /* of both streams */
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        host_stream_end(S);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        a = get(5);
        host_stream_begin(T);
        put_on(T, a);
        ck_assert_uint_eq(n_blocks_after_trim(), 1);
        fake_server_event(server, FAKE_RETIRE); /* its extent must not be unmapped */
        host_stream_end(T);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

/* It has its place in line at once; and a second time only where something may have come back here. */
TEST(without_a_cache_a_waiter_asks_once)
{
        struct bfc_malloc_options o = { .struct_size = sizeof(o), .wait_ms = 500 };
        char *a = get_on(S, 1000);
        void *p = NULL;

        fake_server_set_mood(server, FAKE_REFUSE_ONCE, 0);
        expect_error(bfc_malloc_with(client, 1000, &o, &p), -EDQUOT, "");
        ck_assert_uint_eq(fake_server_count(server).wait_ms, 500);
        host_stream_begin(S);
        put_on(S, a);
        fake_server_set_mood(server, FAKE_REFUSE_ONCE, 0);
        ck_assert_int_eq(bfc_malloc_with(client, 1000, &o, &p), 0);
        ck_assert_uint_eq(fake_server_count(server).wait_ms, 500);
        host_stream_end(S);
        put(p);
        ck_assert_uint_eq(n_blocks_after_trim(), 0);
}

/* What the client's thread has taken from the pools and not given back yet is waited for. */
TEST(without_a_cache_the_threads_frees_are_waited_for)
{
        char *a = get_on(S, 1000);

        host_stream_begin(S);
        put_on(S, a);
        fake_server_set_mood(server, FAKE_FREE_SLOW, 0);
        host_stream_end(S);
        while (stats_of(S).bytes_pending > 0)
                usleep(100);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        fake_server_set_mood(server, FAKE_GOOD, 0);
}

TEST(retire_of_a_pending_block_is_a_violation)
{
        char *a = get_on(S, 1000);
        void *p;
        int r = 0;

        host_stream_begin(S);
        put_on(S, a);
        fake_server_event(server, FAKE_RETIRE_USED);
        for (int i = 0; i < 100000 && r != -EPROTO; i++) {
                r = bfc_malloc(client, 1, &p);
                usleep(1000);
        }
        expect_error(r, -EPROTO, "in use");
        *(volatile char *)a = 1; /* it is still there */
        host_stream_end(S);
}

TEST(without_a_cache_room_is_made)
{
        char *a = get_on(S, 40 * MIB);
        pthread_t thread;
        void *p;

        host_stream_begin(S);
        put_on(S, a);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, (void *)S), 0);
        a = get_on(T, 50 * MIB);
        pthread_join(thread, NULL);
        put_on(T, a);
        ck_assert_int_eq(bfc_malloc(client, 50 * MIB, &p), 0);
        put(p);
}
