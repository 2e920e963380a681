/* A client whose daemon is killed and restarted at each moment, also one that refuses to resume.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "device/device.h"
#include "proto/bfcd.pb-c.h"
#include "tests/suite.h"
#include "tests/unit/calls.h"
#include "tests/unit/crash_server.h"

static struct crash_server *crash_server;
static struct bfc_options options;

/* ---- a device that says it is busy ----------------------------------------------------------------- */

static bool is_busy; /* atomic */
static struct device_range_ops busy_ops;
static int (*unmap)(struct device_range *range, uint64_t offset, uint64_t n_bytes);
int __real_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);
int __wrap_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);

static int unmap_unless_busy(struct device_range *range, uint64_t offset, uint64_t n_bytes)
{
        return __atomic_load_n(&is_busy, __ATOMIC_RELAXED) ? -EBUSY : unmap(range, offset, n_bytes);
}

int __wrap_device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        int r = __real_device_range_new(view, n_bytes, ret);

        if (r < 0)
                return r;
        if (!unmap) {
                unmap = (*ret)->ops->unmap;
                busy_ops = *(*ret)->ops;
                busy_ops.unmap = unmap_unless_busy;
        }
        (*ret)->ops = &busy_ops;
        return 0;
}

/* ---- helpers ----------------------------------------------------------------------- */

#define NEVER_MS 300000 /* no machine is so slow */

static int64_t now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void begin(const char *cache, uint64_t flags)
{
        int r;

        setenv("BFC_CACHE", cache, 1);
        options.flags = flags;
        if (options.return_ms == 0 && !getenv("BFC_RETURN_MS"))
                options.return_ms = NEVER_MS;
        r = bfc_connect(&options, &client);
        ck_assert_msg(r == 0, "bfc_connect: %d: %s", r, bfc_last_error());
}

static void setup(void)
{
        unsetenv("BFC_RETURN_MS");
        crash_server = crash_server_new();
        options = (struct bfc_options){ .struct_size = sizeof(options),
                                        .socket = crash_server_path(crash_server) };
}

static void teardown(void)
{
        struct crash_server_counts counts;

        bfc_disconnect(client);
        client = NULL;
        counts = crash_server_count(crash_server);
        crash_server = crash_server_free(crash_server);
        ck_assert_msg(counts.n_violations == 0, "%u violations, the first: %s", counts.n_violations,
                      counts.violation);
}

FIXTURE(all, setup, teardown);

static uint64_t limit_now(void)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        int r = bfc_usage(client, NULL, &u);

        ck_assert_msg(r == 0, "bfc_usage: %d: %s", r, bfc_last_error());
        return u.bytes_limit;
}

static void await_returns(uint64_t n)
{
        int64_t until = now_ms() + NEVER_MS;

        while (stats().num_returns < n && now_ms() < until)
                usleep(500);
        ck_assert_uint_ge(stats().num_returns, n);
}

/* ---- nothing is noticed ---------------------------------------------------------------- */

LOOP_TEST(session_resumes_with_all_blocks, 2)
{
        struct bfc_block_info before = { .struct_size = sizeof(before) }, after = before;
        char *a, *b, *c;

        begin(_i ? "on" : "off", 0);
        a = get(1000);
        b = get(3 * MIB);
        memset(a, 'a', 1000);
        memset(b, 'b', 3 * MIB);
        ck_assert_int_eq(bfc_block_info(client, b, &before), 0);
        for (unsigned i = 1; i <= 3; i++) {
                crash_server_kill(crash_server);
                c = get(5 * MIB);
                ck_assert_uint_eq(stats().num_returns, i);
                memset(c, 'c', 5 * MIB);
                ck_assert_int_eq(a[0] + a[999], 2 * 'a');
                ck_assert_int_eq(b[0] + b[3 * MIB - 1], 2 * 'b');
                ck_assert_int_eq(bfc_block_info(client, b, &after), 0);
                ck_assert_mem_eq(&before, &after, sizeof(before));
                put(c);
                ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        }
        ck_assert_uint_eq(crash_server_count(crash_server).n_returns, 3);
        ck_assert_uint_eq(crash_server_count(crash_server).n_dropped, 0);
        put(a);
        put(b);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

TEST(client_thread_resumes)
{
        void *a;

        begin("off", 0);
        a = get(1);
        crash_server_kill(crash_server);
        await_returns(1);
        crash_server_kill(crash_server);
        await_returns(2);
        ck_assert_uint_eq(crash_server_count(crash_server).n_listed, 1);
        put(a);
}

TEST(resume_without_client_thread)
{
        void *a;

        begin("off", BFC_NO_THREAD);
        a = get(1);
        crash_server_kill(crash_server);
        ck_assert_uint_eq(limit_now(), 1000); /* not noticed yet */
        ck_assert_uint_eq(stats().num_returns, 0);
        put(a);
        ck_assert_uint_eq(stats().num_returns, 1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

/* What the program waits on is the same for ever, be it by poll(2) or epoll(7). */
TEST(resume_by_bfc_poll)
{
        struct epoll_event event = { .events = EPOLLIN };
        struct pollfd p;
        void *a;
        int fd, e = epoll_create1(EPOLL_CLOEXEC);

        begin("on", BFC_POLL);
        fd = bfc_poll_fd(client);
        p = (struct pollfd){ .fd = fd, .events = POLLIN };
        ck_assert_int_eq(epoll_ctl(e, EPOLL_CTL_ADD, fd, &event), 0);
        a = get(1000);
        ck_assert_int_eq(poll(&p, 1, 0), 0);
        crash_server_kill(crash_server);
        ck_assert_int_eq(poll(&p, 1, NEVER_MS), 1);
        ck_assert_int_eq(epoll_wait(e, &event, 1, NEVER_MS), 1);
        ck_assert_int_eq(bfc_poll(client), 0);
        ck_assert_uint_eq(stats().num_returns, 1);
        ck_assert_int_eq(bfc_poll_fd(client), fd);
        ck_assert_int_eq(poll(&p, 1, 0), 0);
        put(a);
        ck_assert(!crash_server_trim(crash_server, 10)); /* it is only sent */
        ck_assert_int_eq(epoll_wait(e, &event, 1, 5000), 1);
        ck_assert_int_eq(bfc_poll(client), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        /* A call returns, and then it is polled. */
        crash_server_kill(crash_server);
        a = get(4 * MIB);
        ck_assert_uint_eq(stats().num_returns, 2);
        ck_assert_int_eq(epoll_wait(e, &event, 1, 5000), 1);
        ck_assert_int_eq(bfc_poll(client), 0);
        ck_assert_int_eq(epoll_wait(e, &event, 1, 0), 0);
        ck_assert_uint_eq(stats().num_returns, 2);
        put(a);
        close(e);
}

/* ---- each request ------------------------------------------------------------------------- */

LOOP_TEST(unanswered_requests, 2)
{
        bool is_done = _i;
        void *a, *b, *c = NULL, *d = NULL;

        begin("off", 0);
        a = get(1000);
        crash_server_kill_at(crash_server, 1, is_done);
        b = get(2 * MIB);
        ck_assert_uint_eq(crash_server_count(crash_server).n_dropped, is_done);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 2);
        memset(b, 1, 2 * MIB);

        crash_server_kill_at(crash_server, 1, is_done);
        put(b);
        ck_assert_uint_eq(crash_server_count(crash_server).n_dropped, !is_done);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1);

        crash_server_kill_at(crash_server, 1, is_done);
        ck_assert_int_eq(bfc_publish(client, a, "weights"), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 1);
        expect_error(bfc_publish(client, a, "weights"), -EINVAL, "already shared");

        crash_server_kill_at(crash_server, 1, is_done);
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &c, NULL), 0);
        ck_assert_ptr_eq(c, a);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 2);
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &d, NULL), 0);
        crash_server_kill(crash_server);
        ck_assert_int_eq(bfc_detach(client, d), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 2);

        crash_server_kill_at(crash_server, 1, is_done);
        ck_assert_int_eq(bfc_detach(client, c), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 1);
        crash_server_kill_at(crash_server, 1, is_done);
        put(a);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        ck_assert_uint_eq(stats().num_returns, 7);
        ck_assert_uint_eq(crash_server_count(crash_server).n_returns, 7);

        expect_error(bfc_attach(client, "weights", 0, &c, NULL), -ENOENT, "no such block");
        crash_server_kill_at(crash_server, 1, is_done); /* a refusal, lost */
        expect_error(bfc_attach(client, "weights", 0, &c, NULL), -ENOENT, "no such block");
        expect_error(bfc_malloc(client, 100 * MIB, &c), -ENOMEM, "full");
}

LOOP_TEST(usage_request_is_repeated, 2)
{
        crash_server_refuse(crash_server, true, false);
        begin("off", 0);
        crash_server_kill_at(crash_server, 1, _i);
        ck_assert_uint_eq(limit_now(), 4711);
        ck_assert_uint_eq(stats().num_returns, 1);
}

/* Many Frees that go with one wait, of which some were done. */
LOOP_TEST(many_frees, 12)
{
        void *p[24];

        begin("on", 0);
        for (size_t i = 0; i < 24; i++)
                p[i] = get(2 * MIB - 256 * (i + 1)); /* in as many slabs, more or less */
        for (size_t i = 0; i < 24; i++)
                put(p[i]);
        crash_server_kill_at(crash_server, (unsigned)_i + 1, true);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        await_returns(1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

static void *wait_for_block(void *userdata)
{
        return bfc_malloc(userdata, 1000, &(void *){ NULL }) == 0 ? userdata : NULL;
}

/* Requests that wait at the daemon wait at the next one. */
TEST(requests_that_wait)
{
        pthread_t threads[8];
        void *good;

        begin("off", 0);
        crash_server_hold(crash_server, true);
        for (size_t i = 0; i < 8; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, wait_for_block, client), 0);
        for (int round = 0; round < 3; round++) {
                int64_t until = now_ms() + NEVER_MS;

                while (crash_server_n_on_hold(crash_server) < 8 && now_ms() < until)
                        usleep(500);
                ck_assert_uint_eq(crash_server_n_on_hold(crash_server), 8);
                crash_server_hold(crash_server, round < 2);
                crash_server_kill(crash_server);
        }
        for (size_t i = 0; i < 8; i++) {
                ck_assert_int_eq(pthread_join(threads[i], &good), 0);
                ck_assert_ptr_nonnull(good);
        }
        ck_assert_uint_eq(stats().num_returns, 3);
        ck_assert_uint_eq(stats().num_blocks, 8);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 8);
}

struct waiting_call {
        pthread_t thread;
        uint32_t wait_ms;
        bool attaches;
        int result;
};

static void *call_and_wait(void *userdata)
{
        struct waiting_call *w = userdata;
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = w->wait_ms };
        void *p;

        w->result = w->attaches ? bfc_attach(client, "name", w->wait_ms, &p, NULL)
                                : bfc_malloc_with(client, 1000, &how, &p);
        return NULL;
}

/* The wait_ms with which the request was sent to the daemon that runs now. */
static uint32_t wait_ms_on_hold(void)
{
        int64_t until = now_ms() + NEVER_MS;

        while (crash_server_n_on_hold(crash_server) == 0 && now_ms() < until)
                usleep(500);
        ck_assert_uint_eq(crash_server_n_on_hold(crash_server), 1);
        return crash_server_count(crash_server).wait_ms;
}

/* A request that waits is sent to each further daemon with the remaining time; a wait that is over stays one. */
LOOP_TEST(a_wait_ends_at_one_time, 4)
{
        struct waiting_call w = { .wait_ms = _i & 1 ? 1 : 600000, .attaches = _i & 2 };
        uint32_t least_ms = w.wait_ms;

        begin("off", 0);
        crash_server_hold(crash_server, true);
        ck_assert_int_eq(pthread_create(&w.thread, NULL, call_and_wait, &w), 0);
        ck_assert_uint_eq(wait_ms_on_hold(), w.wait_ms);
        for (int round = 0; round < 3; round++) {
                int64_t until = now_ms() + 3; /* longer than the wait of 1 ms */

                while (now_ms() < until)
                        usleep(500);
                crash_server_kill(crash_server);
                least_ms = least_ms > 3 ? least_ms - 3 : 1;
                ck_assert_uint_ge(wait_ms_on_hold(), 1);
                ck_assert_uint_le(crash_server_count(crash_server).wait_ms, least_ms);
        }
        crash_server_hold(crash_server, false);
        crash_server_kill(crash_server);
        ck_assert_int_eq(pthread_join(w.thread, NULL), 0);
        ck_assert_int_eq(w.result, w.attaches ? -ENOENT : 0);
        ck_assert_uint_eq(stats().num_returns, 4);
}

/* ---- the list ------------------------------------------------------------------------------ */

#define N_MANY 15500u /* more than two messages have room for */

TEST(long_lists)
{
        static void *p[N_MANY];

        begin("off", 0);
        for (size_t i = 0; i < N_MANY; i++)
                p[i] = get(1);
        for (unsigned at = 1; at <= 3; at++) { /* dies between the pages, and is there again */
                crash_server_kill_at_held(crash_server, at);
                crash_server_kill(crash_server);
                await_returns(at);
        }
        ck_assert_uint_eq(crash_server_count(crash_server).n_helds, 3);
        ck_assert_uint_eq(crash_server_count(crash_server).n_listed, N_MANY);
        ck_assert_uint_eq(crash_server_count(crash_server).n_extents,
                          (N_MANY * 4 * KIB + 2 * MIB - 1) / (2 * MIB));
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, N_MANY);
        for (size_t i = 0; i < N_MANY; i += 500)
                put(p[i]);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, N_MANY - 31);
}

LOOP_TEST(stream_pools_are_listed, 2)
{
        void *a = NULL, *b = NULL, *c;

        begin(_i ? "on" : "off", 0);
        ck_assert_int_eq(bfc_malloc_async(client, 100 * KIB, 5, &a), 0);
        ck_assert_int_eq(bfc_malloc_async(client, 3 * MIB, 6, &b), 0);
        c = get(3 * MIB + 1);
        memset(b, 'b', 3 * MIB);
        crash_server_kill(crash_server);
        await_returns(1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_dropped, 0);
        ck_assert_int_eq(((char *)b)[MIB], 'b');
        ck_assert_int_eq(bfc_free_async(client, a, 5), 0);
        ck_assert_int_eq(bfc_free_async(client, c, 7), 0);
        crash_server_kill(crash_server);
        ck_assert_int_eq(bfc_free_async(client, b, 6), 0);
        await_returns(2);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
}

/* A Retire that was not done when the daemon died is none for its successor: it thinks that the
 * extent is mapped, and puts a block there. */
LOOP_TEST(retire_of_the_dead_daemon, 2)
{
        char *a, *b;

        begin("off", _i == 1 ? BFC_POLL : 0);
        a = get(2 * MIB);
        b = get(2 * MIB);
        put(a);
        __atomic_store_n(&is_busy, true, __ATOMIC_RELAXED);
        ck_assert_uint_eq(crash_server_retire(crash_server, 20), 1);
        if (_i == 1)
                ck_assert_int_eq(bfc_poll(client), -EBUSY);
        crash_server_kill(crash_server);
        for (int64_t until = now_ms() + NEVER_MS; _i == 1 && bfc_poll(client) == -EBUSY && now_ms() < until;)
                usleep(500); /* until it sees the end */
        await_returns(1);
        __atomic_store_n(&is_busy, false, __ATOMIC_RELAXED);
        ck_assert_uint_eq(crash_server_count(crash_server).n_extents, 2);
        usleep(20000); /* it would be tried again by now */
        ck_assert_uint_eq(stats().bytes_mapped, 4 * MIB);
        a = get(2 * MIB);
        memset(a, 'a', 2 * MIB);
        ck_assert_uint_eq(crash_server_count(crash_server).n_extents_sent, 2);
        ck_assert_uint_eq(crash_server_count(crash_server).n_retired, 0);
        put(a);
        if (_i != 1) {
                ck_assert_uint_eq(crash_server_retire(crash_server, 5000), 1);
                ck_assert_uint_eq(crash_server_count(crash_server).n_retired, 1);
                ck_assert_uint_eq(stats().bytes_mapped, 2 * MIB);
                crash_server_kill(crash_server);
                await_returns(2);
                ck_assert_uint_eq(crash_server_count(crash_server).n_extents, 1);
        }
        put(b);
}

TEST(trim_of_the_new_daemon)
{
        begin("on", 0);
        for (unsigned i = 1; i <= 3; i++) {
                put(get(100));
                crash_server_kill(crash_server);
                await_returns(i);
                ck_assert_uint_gt(stats().bytes_reserved, 0);
                ck_assert(crash_server_trim(crash_server, 5000));
                ck_assert_uint_eq(stats().bytes_reserved, 0);
        }
}

/* The daemon dies at the Free of a Trim. What it sent after the Trim is read later than its successor is known. */
TEST(an_old_drain_is_over)
{
        begin("on", 0);
        put(get(3 * MIB));
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1);
        crash_server_kill_at(crash_server, 1, true);
        crash_server_trim_and_drain(crash_server);
        await_returns(1);
        ck_assert(crash_server_trim(crash_server, 60000)); /* so the events before it are handled */
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        put(get(3 * MIB));
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1); /* it is idle memory */
}

/* ---- a thread that has just started ------------------------------------------------------------------ */

static bool kills_at_start, is_trimmed;
int __real_thread_new(void *(*run)(void *), void *userdata, const char *name, pthread_t *ret);
int __wrap_thread_new(void *(*run)(void *), void *userdata, const char *name, pthread_t *ret);

/* The daemon dies before the call returns. */
int __wrap_thread_new(void *(*run)(void *), void *userdata, const char *name, pthread_t *ret)
{
        int64_t until = now_ms() + NEVER_MS;
        int r = __real_thread_new(run, userdata, name, ret);

        if (!kills_at_start)
                return r;
        kills_at_start = false;
        crash_server_kill(crash_server);
        while (crash_server_count(crash_server).n_returns == 0 && now_ms() < until)
                usleep(500);
        is_trimmed = crash_server_trim(crash_server, 60000);
        return r;
}

TEST(killed_before_bfc_connect_returns)
{
        is_trimmed = false;
        kills_at_start = true;
        begin("on", 0);
        ck_assert(is_trimmed); /* the new daemon's events arrive */
        put(get(100));
        ck_assert_uint_eq(stats().num_returns, 1);
}

/* ---- pages ---------------------------------------------------------------------------------- */

TEST(pages_of_the_new_daemon)
{
        static const uint32_t n_entries[] = { 1000, 1, 40, 31, 5000 };
        uint64_t slabs, whole, streams;
        void *a, *b = NULL, *c = NULL;

        begin("on", 0);
        a = get(1000);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &b), 0);
        ck_assert_int_eq(bfc_malloc_async(client, KIB, 3, &c), 0);
        slabs = crash_server_count(crash_server).client_slabs;
        whole = crash_server_count(crash_server).client_whole;
        streams = crash_server_count(crash_server).client_streams;
        ck_assert_uint_gt(slabs, 0);
        ck_assert_uint_eq(whole, MIB);
        ck_assert_uint_gt(streams, 0);
        for (unsigned i = 0; i < 5; i++) {
                unsigned n_requests = crash_server_count(crash_server).n_requests;

                crash_server_set_usage(crash_server, n_entries[i], 77 + i);
                crash_server_kill(crash_server);
                await_returns(i + 1);
                ck_assert_uint_eq(limit_now(), 77 + i);
                ck_assert_uint_eq(crash_server_count(crash_server).n_requests,
                                  n_requests); /* read, not asked */
                ck_assert_uint_eq(crash_server_count(crash_server).client_slabs, slabs);
                ck_assert_uint_eq(crash_server_count(crash_server).client_whole, whole);
                ck_assert_uint_eq(crash_server_count(crash_server).client_streams, streams);
        }
        crash_server_set_hello(crash_server, CRASH_NO_PAGES, 1);
        crash_server_kill(crash_server);
        await_returns(6);
        ck_assert_uint_eq(limit_now(), 4711);
        crash_server_set_hello(crash_server, CRASH_ODD_PAGES, 1);
        crash_server_kill(crash_server);
        await_returns(7);
        ck_assert_uint_eq(limit_now(), 4711);
        crash_server_kill(crash_server);
        await_returns(8);
        ck_assert_uint_eq(limit_now(), 81);
        put(b);
        ck_assert_uint_eq(crash_server_count(crash_server).client_whole, 0);
        put(a);
        put(c);
}

/* ---- without a daemon -------------------------------------------------------------------------- */

TEST(cache_serves_while_disconnected)
{
        uint64_t n_calls;
        void *a, *b;

        begin("on", 0);
        a = get(1000);
        crash_server_set_hello(crash_server, CRASH_HANGS_UP, 1000000);
        crash_server_kill(crash_server);
        while (crash_server_count(crash_server).n_hellos == 0)
                usleep(500);
        n_calls = stats().num_calls;
        for (int i = 0; i < 1000; i++) {
                b = get(20 * KIB);
                put(b);
        }
        ck_assert_uint_eq(stats().num_calls, n_calls);
        crash_server_set_hello(crash_server, CRASH_TAKES, 0);
        await_returns(1);
        put(a);
}

TEST(resume_after_failed_attempts)
{
        static const enum crash_server_hello moods[] = { CRASH_HANGS_UP, CRASH_BUSY, CRASH_HELD_HANGS_UP,
                                                         CRASH_HELD_DONE };
        void *a;

        begin("off", 0);
        a = get(1000);
        for (unsigned i = 0; i < 4; i++) {
                crash_server_set_hello(crash_server, moods[i], 4);
                crash_server_kill(crash_server);
                put(get(1000));
                ck_assert_uint_eq(stats().num_returns, i + 1);
        }
        ck_assert_uint_eq(crash_server_count(crash_server).n_hellos, 20);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1);
        put(a);
}

/* The socket does not exist, and then no process listens. */
TEST(resume_after_missing_socket)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        char away[128];
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        begin("off", 0);
        snprintf(away, sizeof(away), "%s.away", crash_server_path(crash_server));
        ck_assert_int_eq(rename(crash_server_path(crash_server), away), 0);
        crash_server_kill(crash_server);
        usleep(30000);
        strcpy(address.sun_path, crash_server_path(crash_server));
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        usleep(30000);
        ck_assert_uint_eq(stats().num_returns, 0);
        ck_assert_int_eq(rename(away, crash_server_path(crash_server)), 0);
        await_returns(1);
        put(get(1));
        close(fd);
}

LOOP_TEST(resume_timeout, 4)
{
        static const enum crash_server_hello moods[] = { CRASH_HANGS_UP, CRASH_SILENT, CRASH_BUSY,
                                                         CRASH_HELD_SILENT };
        int64_t start;
        void *a, *b = NULL;

        if (_i % 2)
                options.return_ms = 200;
        else
                setenv("BFC_RETURN_MS", "200", 1);
        begin("on", 0);
        a = get(1000);
        crash_server_set_hello(crash_server, moods[_i], 1000000);
        start = now_ms();
        crash_server_kill(crash_server);
        expect_error(bfc_malloc(client, 4 * MIB, &b), -ECONNRESET,
                     moods[_i] == CRASH_BUSY ? "within 200 ms: in a moment" : "within 200 ms");
        ck_assert_int_ge(now_ms() - start, 190);
        /* As it is without: no cache serves anything, and what there is stays. */
        expect_error(bfc_malloc(client, 1, &b), -ECONNRESET, "within 200 ms");
        expect_error(bfc_free(client, a), -ECONNRESET, "within 200 ms");
        memset(a, 1, 1000);
        crash_server_set_hello(crash_server, CRASH_TAKES, 0);
        expect_error(bfc_malloc(client, 4 * MIB, &b), -ECONNRESET, "within 200 ms");
}

static const struct {
        enum crash_server_hello mood;
        int error;
        const char *words;
} ends[] = {
        { CRASH_STALE, -ECONNRESET, "refused to resume it: no such session waits" },
        { CRASH_DENIES, -ECONNRESET, "refused to resume it: it belongs to another process" },
        { CRASH_OTHER_ID, -ECONNRESET, "restarted without this session" },
        { CRASH_OTHER_SECRET, -ECONNRESET, "restarted without this session" },
        { CRASH_OTHER_TENANT, -ECONNRESET, "another tenant" },
        { CRASH_OTHER_NAMES, -ECONNRESET, "other partitions" },
        { CRASH_OTHER_DEVICE, -ECONNRESET, "other partitions" },
        { CRASH_FEWER, -ECONNRESET, "other partitions" },
        { CRASH_LESS, -ECONNRESET, "does not offer" },
        { CRASH_NO_EVENTS_FD, -EPROTO, "an invalid message" },
        { CRASH_WRONG_BODY, -EPROTO, "an invalid message" },
        { CRASH_GARBAGE, -EPROTO, "an invalid message" },
        { CRASH_HELD_REFUSED, -ECONNRESET, "the list is another's" },
        { CRASH_HELD_BODY, -EPROTO, "an invalid message" },
        { CRASH_HELD_EVICTED, -EIDRM, "session 1 was evicted" },
};

LOOP_TEST(refused_resume_ends_the_session, sizeof(ends) / sizeof(ends[0]))
{
        void *a, *b = NULL;

        begin("on", 0);
        a = get(1000);
        crash_server_set_hello(crash_server, ends[_i].mood, 1);
        crash_server_kill(crash_server);
        expect_error(bfc_malloc(client, 4 * MIB, &b), ends[_i].error, ends[_i].words);
        expect_error(bfc_malloc(client, 1, &b), ends[_i].error, ends[_i].words);
        ck_assert_int_lt(bfc_free(client, a), 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_hellos, 1); /* it does not ask again */
        ck_assert_uint_eq(stats().num_returns, 0);
}

TEST(resumption_not_granted)
{
        void *b = NULL;

        crash_server_refuse(crash_server, false, true);
        begin("off", 0);
        crash_server_kill(crash_server);
        expect_error(bfc_malloc(client, 1, &b), -ECONNRESET, "ended the session or is not running");
        ck_assert_uint_eq(crash_server_count(crash_server).n_hellos, 0);
}

TEST(invalid_resume_timeouts)
{
        static const char *const odd[] = { "x", "-1", "1s", "0", "99999999999999999999999", " 5" };

        for (size_t i = 0; i < sizeof(odd) / sizeof(odd[0]); i++) {
                setenv("BFC_RETURN_MS", odd[i], 1);
                expect_error(bfc_connect(&options, &client), -EINVAL, "BFC_RETURN_MS");
        }
        setenv("BFC_RETURN_MS", "", 1);
        begin("off", 0);
}

/* ---- its end -------------------------------------------------------------------------------------- */

/* What it has does not stay with the process. */
LOOP_TEST(goodbye_after_resume, 3)
{
        begin("off", _i == 2 ? BFC_NO_THREAD : 0);
        get(1000);
        if (_i == 1)
                crash_server_kill_at(crash_server, 1, false); /* at the goodbye */
        else
                crash_server_kill(crash_server);
        bfc_disconnect(client);
        client = NULL;
        ck_assert_uint_eq(crash_server_count(crash_server).n_goodbyes, 1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

LOOP_TEST(disconnect_without_a_daemon, 3)
{
        options.return_ms = _i ? 100 : 0;
        begin("off", 0);
        crash_server_set_hello(crash_server, _i == 2 ? CRASH_SILENT : CRASH_HANGS_UP, 1000000);
        crash_server_kill(crash_server);
        while (crash_server_count(crash_server).n_hellos == 0)
                usleep(500);
        if (_i == 0) /* back in time */
                crash_server_set_hello(crash_server, CRASH_HANGS_UP, 3);
        bfc_disconnect(client);
        client = NULL;
        ck_assert_uint_eq(crash_server_count(crash_server).n_goodbyes, _i == 0);
}

TEST(forked_child_does_not_resume)
{
        void *a;
        pid_t pid;
        int status = -1;

        begin("off", 0);
        a = get(1000);
        crash_server_set_hello(crash_server, CRASH_HANGS_UP, 1000000);
        crash_server_kill(crash_server);
        while (crash_server_count(crash_server).n_hellos == 0)
                usleep(500);
        wait_until_others_sleep();
        pid = fork();
        if (pid == 0) {
                int r = bfc_free(client, a);

                bfc_disconnect(client);
                _exit(r == -ECHILD ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        crash_server_set_hello(crash_server, CRASH_TAKES, 0);
        await_returns(1);
        put(a);
}

struct interrupted {
        pthread_t thread;
        int cancel_fd; /* 0: none */
        bool attaches;
        bool is_over; /* atomic */
        int result;
};

static void on_signal(int number)
{
        (void)number;
}

static void *wait_interruptibly(void *userdata)
{
        struct interrupted *w = userdata;
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = 600000 };
        struct bfc_attach_options attach = { .struct_size = sizeof(attach), .wait_ms = 600000 };
        void *p;

        how.cancel_fd = attach.cancel_fd = w->cancel_fd;
        w->result = w->attaches ? bfc_attach_with(client, "name", &attach, &p, NULL)
                                : bfc_malloc_with(client, 1000, &how, &p);
        __atomic_store_n(&w->is_over, true, __ATOMIC_RELEASE);
        return NULL;
}

static void interrupt(struct interrupted *w)
{
        if (w->cancel_fd > 0)
                ck_assert_int_eq(eventfd_write(w->cancel_fd, 1), 0);
        while (!__atomic_load_n(&w->is_over, __ATOMIC_ACQUIRE)) {
                if (w->cancel_fd == 0)
                        pthread_kill(w->thread, SIGUSR1);
                usleep(500);
        }
}

/* A wait for a daemon that is not there yet, or does not answer yet, is interrupted as one at the daemon is. The
 * session is resumed nevertheless. */
LOOP_TEST(waits_are_interrupted_without_a_daemon, 16)
{
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
        struct interrupted w[3] = { { .attaches = _i & 4 }, { .attaches = _i & 4 }, { .attaches = _i & 4 } };
        void *a;

        ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
        begin("off", _i & 1 ? BFC_NO_THREAD : 0);
        a = get(1000);
        crash_server_hold(crash_server, true);
        for (size_t i = 0; i < 3; i++) {
                w[i].cancel_fd = _i & 8 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : 0;
                ck_assert_int_eq(pthread_create(&w[i].thread, NULL, wait_interruptibly, &w[i]), 0);
        }
        while (crash_server_n_on_hold(crash_server) < 3)
                usleep(500);
        crash_server_set_hello(crash_server, _i & 2 ? CRASH_SILENT : CRASH_HANGS_UP, 1000000);
        crash_server_kill(crash_server);
        while (crash_server_count(crash_server).n_hellos == 0)
                usleep(500);
        for (size_t i = 0; i < 3; i++) {
                interrupt(&w[i]);
                ck_assert_int_eq(pthread_join(w[i].thread, NULL), 0);
                ck_assert_int_eq(w[i].result, -EINTR);
                if (w[i].cancel_fd > 0)
                        close(w[i].cancel_fd);
        }
        crash_server_set_hello(crash_server, CRASH_TAKES, 0);
        crash_server_hold(crash_server, false);
        crash_server_kill(crash_server); /* while a call waits for a reply */
        put(a);
        ck_assert_uint_eq(crash_server_count(crash_server).n_returns, 1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

static void *free_in_vain(void *userdata)
{
        int before = -1;

        pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, NULL);
        bfc_free(client, userdata); /* cancelled while it waits, it goes on to its end */
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        return before == PTHREAD_CANCEL_ENABLE ? userdata : NULL;
}

TEST(cancelled_threads)
{
        pthread_t thread;
        void *a, *ret;

        begin("off", BFC_NO_THREAD);
        a = get(1000);
        crash_server_set_hello(crash_server, CRASH_HANGS_UP, 1000000);
        crash_server_kill(crash_server);
        ck_assert_int_eq(pthread_create(&thread, NULL, free_in_vain, a), 0);
        while (crash_server_count(crash_server).n_hellos == 0)
                usleep(500);
        ck_assert_int_eq(pthread_cancel(thread), 0);
        usleep(5000);
        crash_server_set_hello(crash_server, CRASH_TAKES, 0);
        ck_assert_int_eq(pthread_join(thread, &ret), 0);
        ck_assert_ptr_eq(ret, a);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

/* ---- all at once ------------------------------------------------------------------------------------- */

#define N_THREADS 6
#define N_SLOTS   16

struct worker {
        unsigned seed;
        unsigned number;
        bool *stop; /* atomic */
        unsigned n_done;
        char why[160];
};

static unsigned roll(struct worker *w, unsigned n)
{
        w->seed = w->seed * 1103515245u + 12345u;
        return (w->seed >> 8) % n;
}

static bool went_wrong(struct worker *w, const char *what, int r)
{
        snprintf(w->why, sizeof(w->why), "%s: %d: %s", what, r, bfc_last_error());
        return false;
}

/* A block is filled with a word of its own. */
static bool take(struct worker *w, uint32_t **slot, uint32_t word)
{
        size_t n_bytes = 64 + roll(w, 3) * 30000 + (roll(w, 20) == 0 ? 3 * MIB : 0);
        void *p = NULL;
        int r;

        switch (roll(w, 4)) {
        case 0:
                r = bfc_malloc_async(client, n_bytes, 3 + w->number, &p);
                break;
        case 1:
                r = bfc_malloc_flags(client, NULL, n_bytes, BFC_WHOLE, &p);
                break;
        default:
                r = bfc_malloc(client, n_bytes, &p);
        }
        if (r == -ENOMEM)
                return true;
        if (r < 0)
                return went_wrong(w, "malloc", r);
        *slot = p;
        for (size_t i = 0; i < 16; i++)
                (*slot)[i] = word;
        return true;
}

static bool give(struct worker *w, uint32_t **slot, uint32_t word)
{
        int r;

        for (size_t i = 0; i < 16; i++)
                if ((*slot)[i] != word)
                        return went_wrong(w, "a block was changed", 0);
        r = roll(w, 3) == 0 ? bfc_free_async(client, *slot, 3 + w->number) : bfc_free(client, *slot);
        *slot = NULL;
        return r < 0 ? went_wrong(w, "free", r) : true;
}

static bool share(struct worker *w)
{
        char name[32];
        void *a = NULL, *b = NULL;
        int r = bfc_malloc_flags(client, NULL, 5000, BFC_WHOLE, &a);

        snprintf(name, sizeof(name), "of %u", w->number);
        if (r == -ENOMEM)
                return true;
        if (r == 0)
                r = bfc_publish(client, a, name);
        if (r == 0)
                r = bfc_attach(client, name, 0, &b, NULL);
        if (r == 0 && a != b)
                return went_wrong(w, "another block is attached", 0);
        if (r == 0)
                r = bfc_detach(client, b);
        if (r == 0)
                r = bfc_free(client, a);
        return r < 0 ? went_wrong(w, "share", r) : true;
}

/* The daemon dies at a Split, before or after it was done. */
LOOP_TEST(a_split_without_an_answer, 2)
{
        char *large, *small;

        begin("on", 0);
        large = get(8 * MIB - 4096);
        put(large);
        small = get(1000);
        ck_assert_ptr_eq(small, large);
        memset(small, 's', 1000);
        ck_assert_uint_eq(stats().bytes_reserved, 8 * MIB - 4096);

        crash_server_kill_at(crash_server, 1, _i == 1);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().num_returns, 1);
        ck_assert_uint_eq(stats().bytes_reserved, 2 * MIB);
        ck_assert_uint_eq(crash_server_count(crash_server).n_splits, 1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_splits_repeated, _i == 1);
        ck_assert_uint_eq(crash_server_count(crash_server).n_dropped, 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1);
        for (size_t i = 0; i < 1000; i++)
                ck_assert_int_eq(small[i], 's');
        put(small);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

/* The daemon dies at a Park and at a Wake, before or after it was done: its successor still has the block. */
LOOP_TEST(parks_and_wakes_without_an_answer, 2)
{
        void *p = NULL;

        begin("off", 0);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 3 * MIB, BFC_PARKABLE, &p), 0);
        for (unsigned i = 1; i <= 2; i++) {
                crash_server_kill_at(crash_server, 1, _i == 1);
                ck_assert_int_eq(bfc_park(client, p, BFC_DISCARD, NULL), 0);
                ck_assert_uint_eq(info(p).is_parked, 1);
                crash_server_kill_at(crash_server, 1, _i == 1);
                ck_assert_int_eq(bfc_wake(client, p, 0), 0);
                ck_assert_uint_eq(info(p).is_parked, 0);
                memset(p, (int)i, 3 * MIB);
                ck_assert_uint_eq(crash_server_count(crash_server).n_returns, 2 * i);
                ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 1);
        }
        put(p);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
}

static void *work(void *userdata)
{
        struct worker *w = userdata;
        uint32_t *slots[N_SLOTS] = { NULL };
        bool good = true;

        while (good && !__atomic_load_n(w->stop, __ATOMIC_RELAXED)) {
                unsigned i = roll(w, N_SLOTS), what = roll(w, 40);
                uint32_t word = w->number << 16 | i;

                if (what == 0)
                        good = share(w);
                else if (what == 1)
                        good = bfc_trim(client, SIZE_MAX) == 0;
                else if (what == 2)
                        (void)bfc_usage(
                                client, NULL,
                                &(struct bfc_tenant_usage){ .struct_size = sizeof(struct bfc_tenant_usage) });
                else
                        good = slots[i] ? give(w, &slots[i], word) : take(w, &slots[i], word);
                w->n_done++;
        }
        for (unsigned i = 0; i < N_SLOTS; i++)
                if (slots[i] && w->why[0] == '\0')
                        (void)give(w, &slots[i], w->number << 16 | i);
        if (!good && w->why[0] == '\0')
                went_wrong(w, "something", 0);
        return NULL;
}

/* On a slow machine a client may not resume between two kills of the usual distance. So this is one
 * with nothing else after it. */
static void wait_for_return(void)
{
        uint64_t n = stats().num_returns;

        crash_server_kill_at(crash_server, 0, false);
        crash_server_kill_at_held(crash_server, 0);
        crash_server_kill(crash_server);
        for (int64_t latest = now_ms() + NEVER_MS; stats().num_returns == n && now_ms() < latest;)
                usleep(1000);
}

/* Dies at random requests, at random messages of a list, and at any time, for some time and until the client
 * came back so often. */
static void kill_often(unsigned seed, int for_ms, unsigned n_returns)
{
        struct worker w = { .seed = seed };
        int64_t until = now_ms() + for_ms;

        while (now_ms() < until || stats().num_returns < n_returns) {
                switch (roll(&w, 6)) {
                case 0:
                        crash_server_kill(crash_server);
                        break;
                case 1:
                        crash_server_kill_at_held(crash_server, 1);
                        crash_server_kill(crash_server);
                        break;
                case 2:
                        crash_server_set_hello(crash_server, roll(&w, 2) ? CRASH_HELD_DONE : CRASH_HANGS_UP,
                                               1);
                        crash_server_kill(crash_server);
                        break;
                case 3:
                        crash_server_retire(crash_server, (int)roll(&w, 3));
                        break;
                case 4:
                        crash_server_trim(crash_server, (int)roll(&w, 3));
                        break;
                default:
                        crash_server_kill_at(crash_server, 1 + roll(&w, 20), roll(&w, 2));
                }
                usleep(200 + roll(&w, 8000));
                if (now_ms() >= until)
                        wait_for_return();
        }
        crash_server_kill_at(crash_server, 0, false);
        crash_server_kill_at_held(crash_server, 0);
}

LOOP_TEST(busy_threads, 4)
{
        struct worker workers[N_THREADS];
        pthread_t threads[N_THREADS];
        unsigned seed = (unsigned)(_i + 1), n_done = 0;
        bool stop = false;

        begin(_i & 1 ? "on" : "off", _i & 2 ? BFC_NO_THREAD : 0);
        for (unsigned i = 0; i < N_THREADS; i++) {
                workers[i] = (struct worker){ .seed = seed * 100 + i, .number = i, .stop = &stop };
                ck_assert_int_eq(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
        }
        kill_often(seed, 800, 10);
        __atomic_store_n(&stop, true, __ATOMIC_RELAXED);
        for (unsigned i = 0; i < N_THREADS; i++) {
                ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
                ck_assert_str_eq(workers[i].why, "");
                n_done += workers[i].n_done;
        }
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        printf("# seed %u: %u calls, %u returns\n", seed, n_done, (unsigned)stats().num_returns);
        ck_assert_uint_ge(stats().num_returns, 10);
        ck_assert_uint_eq(stats().num_blocks, 0);
        ck_assert_uint_eq(stats().bytes_reserved, 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_blocks, 0);
        ck_assert_uint_eq(crash_server_count(crash_server).n_refs, 0);
}
