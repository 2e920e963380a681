/* libbfcclient and its pages, against a stand-in for the daemon: what it reads, what it
 * leaves alone, and what it says of its cache.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "client/client.h"
#include "tests/host_stream.h"
#include "tests/suite.h"
#include "tests/unit/server_rig.h"
#include "tests/unit/wire.h"

static struct pages_usage *usage_page;
static struct pages_client *page;

static int connect_in_mood(enum fake_mood mood)
{
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = fake_server_path(server),
                                 .cache_idle_bytes = UINT64_MAX };
        int r;

        fake_server_set_mood(server, mood, 0);
        r = bfc_connect(&o, &client);
        fake_server_set_mood(server, FAKE_GOOD, 0);
        fake_server_pages(server, &usage_page, &page);
        return r;
}

static void setup(void)
{
        server_start(NULL);
}

FIXTURE(pages, setup, server_end);

static uint64_t n_calls(void)
{
        return stats().num_calls;
}

TEST(usage_is_read_without_a_request)
{
        struct bfc_tenant_usage u;
        uint64_t calls;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        calls = n_calls();
        u = usage_of(NULL);
        ck_assert_uint_eq(n_calls(), calls);
        ck_assert_uint_eq(u.bytes_limit, 1);
        ck_assert_uint_eq(u.bytes_reserved, 2);
        ck_assert_uint_eq(u.peak_bytes_reserved, 3);
        ck_assert_uint_eq(u.bytes_in_use, 4);
        ck_assert_uint_eq(u.peak_bytes_in_use, 5);
        ck_assert_uint_eq(u.bytes_requested, 6);
        ck_assert_uint_eq(u.num_blocks, 7);
        ck_assert_uint_eq(u.num_sessions, 8);
        ck_assert_uint_eq(u.largest_free_block_bytes, 9);
        ck_assert_uint_eq(u.lifetime_peak_bytes_in_use, 10);
        ck_assert_uint_eq(u.lifetime_peak_bytes_reserved, 11);
        /* infer has no entry: asked for. */
        ck_assert_uint_eq(usage_of("infer").bytes_limit, 1001);
        ck_assert_uint_eq(n_calls(), calls + 1);
}

TEST(structure_too_short)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) - 1 };

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        ck_assert_int_eq(bfc_usage(client, NULL, &u), -EINVAL);
}

/* A writer that has stopped in the middle, or for good. */
TEST(usage_request_where_page_is_unreadable)
{
        uint64_t calls;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        usage_page->entries[0].sequence++;
        calls = n_calls();
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1000);
        ck_assert_uint_eq(n_calls(), calls + 1);
        usage_page->entries[0].sequence++;
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1);
}

/* ---- the program's function for Pressures ---- */

static void give(void *userdata, const struct bfc_pressure *pressure)
{
        (void)userdata;
        (void)pressure;
}

/* Waits for the function that is running. */
static void *remove_function(void *userdata)
{
        (void)userdata;
        ck_assert_int_eq(bfc_on_pressure(client, NULL, NULL), 0);
        return NULL;
}

/* Sets another one, after it was removed and before that call returns. */
static void replace(void *userdata, const struct bfc_pressure *pressure)
{
        (void)pressure;
        ck_assert_int_eq(pthread_create(userdata, NULL, remove_function, NULL), 0);
        while (__atomic_load_n(&client->pressure.fn, __ATOMIC_RELAXED))
                usleep(500);
        ck_assert_int_eq(bfc_on_pressure(client, give, NULL), 0);
}

TEST(functions_of_two_threads)
{
        pthread_t remover;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        ck_assert_uint_eq(page->has_pressure_fn, 0);
        ck_assert_int_eq(bfc_on_pressure(client, replace, &remover), 0);
        ck_assert_uint_eq(page->has_pressure_fn, 1);
        fake_server_event(server, FAKE_PRESSURE);
        ck_assert_int_eq(fake_server_await_answer(server, 60000), WIRE_PRESSURE);
        ck_assert_int_eq(pthread_join(remover, NULL), 0);
        ck_assert_ptr_eq(client->pressure.fn, give);
        ck_assert_uint_eq(page->has_pressure_fn, 1);
        ck_assert_int_eq(bfc_on_pressure(client, NULL, NULL), 0);
        ck_assert_uint_eq(page->has_pressure_fn, 0);
}

/* Later changes of the header have no effect. */
TEST(header_changes)
{
        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        usage_page->n_entries = UINT64_MAX;
        usage_page->entry_bytes = UINT64_MAX;
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1);
        ck_assert_uint_eq(usage_of("infer").bytes_limit, 1001);
}

static const struct {
        enum fake_mood mood;
        int error;
} lies[] = {
        { FAKE_HELLO_PAGES_NO_FDS, -EPROTO }, { FAKE_HELLO_PAGES_UNSEALED, 0 },
        { FAKE_HELLO_PAGES_SHORT, 0 },        { FAKE_HELLO_PAGES_VERSION, 0 },
        { FAKE_HELLO_PAGES_NO_MEMFD, 0 },     { FAKE_GOOD, 0 }, /* a daemon of before */
};

LOOP_TEST(invalid_pages, sizeof(lies) / sizeof(lies[0]))
{
        void *p = NULL;

        ck_assert_int_eq(connect_in_mood(lies[_i].mood), lies[_i].error);
        if (lies[_i].error)
                return;
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1000);
        ck_assert_int_eq(bfc_malloc(client, 1000, &p), 0);
        memset(p, 1, 1000);
        ck_assert_int_eq(bfc_free(client, p), 0);
}

TEST(daemon_gone)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        int r = 0;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1);
        fake_server_event(server, FAKE_EVENT_HANG_UP);
        fake_server_hang_up(server);
        for (int i = 0; i < 100000 && r == 0; i++) {
                r = bfc_usage(client, NULL, &u);
                usleep(1000);
        }
        ck_assert_int_eq(r, -ECONNRESET);
}

/* ---- what it says ----------------------------------------------------------- */

/* What the page says of a partition, as the daemon reads it. */
static void expect_said(unsigned i, uint64_t held, uint64_t in_use, uint64_t idle)
{
        uint64_t cut = page->held[i].bytes_cut;

        for (unsigned k = 0; page->stashed_partition == i && k < page->n_stashed; k++)
                cut -= page->stashed[k].n_bytes;
        ck_assert_uint_eq(page->held[i].bytes_slabs + page->held[i].bytes_whole, held);
        cut += page->held[i].bytes_whole - page->held[i].bytes_streams;
        ck_assert_uint_eq(cut, in_use);
        ck_assert_uint_eq(page->held[i].bytes_slabs + page->held[i].bytes_whole - cut, idle);
}

/* All in the first partition: as bfc_stats() has it. */
static void expect_said_all(uint64_t in_use)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.bytes_in_use, in_use);
        expect_said(0, s.bytes_reserved, in_use, s.bytes_idle);
}

static void expect_said_used(uint64_t in_use)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.bytes_in_use, in_use);
        expect_said(0, s.bytes_reserved, in_use, s.bytes_reserved - in_use);
}

static void *get_in(const char *partition, size_t n_bytes, uint64_t flags)
{
        void *p = NULL;

        ck_assert_msg(bfc_malloc_flags(client, partition, n_bytes, flags, &p) == 0, "%s", bfc_last_error());
        return p;
}

TEST(client_page_has_cached_bytes)
{
        void *small, *large, *direct;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        ck_assert_uint_eq(page->magic, PAGES_CLIENT_MAGIC);
        ck_assert_uint_eq(page->version, PAGES_VERSION);
        expect_said(0, 0, 0, 0);
        small = get_in(NULL, 1000, 0);
        expect_said(0, 2 * MIB, 1024, 2 * MIB - 1024);
        large = get_in(NULL, 5 * MIB, 0);
        expect_said_all(5 * MIB + 1024);
        direct = get_in(NULL, MIB, BFC_ONE_EXTENT);
        expect_said_all(6 * MIB + 1024);
        expect_said(1, 0, 0, 0);
        put(large);
        expect_said_all(MIB + 1024);
        put(direct);
        expect_said_all(1024);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        expect_said(0, 2 * MIB, 1024, 2 * MIB - 1024);
        put(small);
        expect_said(0, 2 * MIB, 0, 2 * MIB);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        expect_said(0, 0, 0, 0);
        fake_server_set_mood(server, FAKE_REFUSE, 0);
        ck_assert_int_eq(bfc_malloc(client, 1000, &small), -EDQUOT);
        expect_said(0, 0, 0, 0);
}

/* What a stream has for its next work, or what waits for its work, is nobody's. i: with work under way. */
LOOP_TEST(client_page_has_stream_bytes, 2)
{
        void *small, *large, *direct, *other;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        ck_assert_int_eq(bfc_malloc_async(client, 1000, 42, &small), 0);
        expect_said(0, 2 * MIB, 1024, 2 * MIB - 1024);
        ck_assert_int_eq(bfc_malloc_async(client, 3 * MIB, 42, &large), 0);
        direct = get_in(NULL, MIB, BFC_ONE_EXTENT);
        other = get_in(NULL, 5 * MIB, 0);
        expect_said_used(4 * MIB + 5 * MIB + 1024);
        if (_i)
                host_stream_begin(42);
        ck_assert_int_eq(bfc_free_async(client, small, 42), 0);
        expect_said_used(4 * MIB + 5 * MIB);
        ck_assert_int_eq(bfc_free_async(client, large, 42), 0);
        ck_assert_int_eq(bfc_free_async(client, direct, 42), 0);
        ck_assert_int_eq(bfc_free_async(client, other, 42), 0);
        expect_said_used(0);
        if (_i)
                host_stream_end(42);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        expect_said(0, 0, 0, 0);
        ck_assert_uint_eq(page->held[0].bytes_streams, 0);
}

/* A daemon that writes there, or another version, does not affect the client. */
TEST(changed_client_page_has_no_effect)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };
        void *p;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        p = get_in(NULL, 1000, 0);
        memset(page, 0xff, sizeof(*page));
        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.bytes_in_use, 1024);
        put(p);
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        ck_assert_int_eq(bfc_stats(client, &s), 0);
        ck_assert_uint_eq(s.bytes_in_use, 0);
        ck_assert_uint_eq(s.bytes_reserved, 0);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
}

TEST(child_writes_nothing)
{
        void *p;
        pid_t pid;
        int status;

        ck_assert_int_eq(connect_in_mood(FAKE_HELLO_PAGES), 0);
        p = get_in(NULL, 1000, 0);
        wait_until_others_sleep();
        pid = fork();
        if (pid == 0) {
                struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
                bool good = bfc_free(client, p) == -ECHILD && bfc_usage(client, NULL, &u) == -ECHILD;

                bfc_disconnect(client);
                _exit(good ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        expect_said(0, 2 * MIB, 1024, 2 * MIB - 1024);
        ck_assert_uint_eq(usage_of(NULL).bytes_limit, 1);
        put(p);
}
