/* Pages: what a tenant uses and what clients say, between real processes; and what hostile
 * clients do to theirs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "proto/pages.h"
#include "tests/integration/tools.h"

static const struct rig_config config = {
        .top = "timeouts: {quarantine: 500ms}\n",
        .partitions = "      - {name: train, limit: 128MiB, growth: on-demand}\n"
                      "      - {name: infer, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT_OF(
                "red", "@UID@",
                "{partition: train, limit: 64MiB, max_sessions: 300}, {partition: infer, limit: 32MiB}")
                TENANT("blue", "@UID@", "train, limit: 64MiB"),
};

static uint64_t n_calls(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        ck_assert_ok(bfc_stats(client, &s));
        return s.num_calls;
}

static bfc_client *open_cached(const struct rig *rig, const char *tenant)
{
        setenv("BFC_CACHE", "on", 1);
        return client_with(.socket = rig->socket, .tenant = tenant, .cache_idle_bytes = UINT64_MAX);
}

static struct raw *open_raw(const struct rig *rig, bool wants_pages)
{
        struct raw *raw = NULL;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        raw->wants_pages = wants_pages;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        return raw;
}

/* The row of red's only session of that name, as the daemon lists it. */
static bool find_session(struct rig *rig, const char *name, Bfcd__SessionRow *ret)
{
        Bfcd__Reply *reply;
        bool found = false;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__SESSIONS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_sessions && !found; i++) {
                found = strcmp(reply->list->sessions[i]->name, name) == 0 &&
                        strcmp(reply->list->sessions[i]->tenant, "red") == 0;
                if (found)
                        *ret = *reply->list->sessions[i];
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return found;
}

/* ---- what a tenant uses ---------------------------------------------------- */

RIG_TEST(the_page_shows_other_clients, config)
{
        bfc_client *a = client_open(rig, "red", NULL), *b = client_open(rig, "red", NULL),
                   *blue = client_open(rig, "blue", NULL);
        struct bfc_tenant_usage u, asked;
        Bfcd__Statistics f;
        uint64_t calls;
        void *p, *q;

        client_usage(a, NULL);
        calls = n_calls(a);
        ck_assert_uint_eq(client_usage(a, NULL).num_sessions, 2);
        ck_assert_ok(bfc_malloc(b, 5 * MIB, &p));
        u = client_usage(a, NULL); /* without a wait */
        ck_assert_uint_eq(u.bytes_in_use, 5 * MIB);
        ck_assert_uint_eq(u.num_blocks, 1);
        ck_assert_ok(bfc_malloc_in(b, "infer", 1000, &q));
        ck_assert_uint_eq(client_usage(a, "infer").bytes_in_use, 1024);
        ck_assert_uint_eq(client_usage(a, "infer").bytes_requested, 1000);
        ck_assert_uint_eq(client_usage(blue, NULL).bytes_in_use, 0);
        ck_assert_ok(bfc_free(b, p));
        u = client_usage(a, NULL);
        ck_assert_uint_eq(u.bytes_in_use, 0);
        ck_assert_uint_eq(u.peak_bytes_in_use, 5 * MIB);
        ck_assert_uint_eq(n_calls(a), calls);

        asked = client_usage(b, NULL);
        f = rig_stats(rig, "red", "train");
        ck_assert_mem_eq(&u, &asked, sizeof(u));
        ck_assert_uint_eq(u.bytes_limit, f.bytes_limit);
        ck_assert_uint_eq(u.bytes_reserved, f.bytes_reserved);
        ck_assert_uint_eq(u.peak_bytes_reserved, f.peak_bytes_reserved);
        ck_assert_uint_eq(u.largest_free_block_bytes, f.largest_free_block_bytes);
        ck_assert_uint_eq(u.lifetime_peak_bytes_in_use, f.lifetime_peak_bytes_in_use);
        ck_assert_uint_eq(u.lifetime_peak_bytes_reserved, f.lifetime_peak_bytes_reserved);
        bfc_disconnect(a);
        bfc_disconnect(b);
        bfc_disconnect(blue);
}

struct job {
        const char *socket;
        struct gate ready;
};

static void hold_until_killed(void *arg)
{
        struct job *job = arg;
        bfc_client *client = child_client_open(job->socket, "red");
        void *p;

        REQUIRE(bfc_malloc(client, 7 * MIB, &p) == 0, "%s", bfc_last_error());
        gate_open(&job->ready);
        pause();
}

RIG_TEST(the_page_shows_a_death, config)
{
        struct job job = { rig->socket, gate_new() };
        pid_t pid = child_start(hold_until_killed, &job);
        bfc_client *client;

        ck_assert(gate_wait(&job.ready, SETTLE_MS));
        client = client_open(rig, "red", NULL); /* its thread has locks that a child must not inherit */
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 7 * MIB);
        child_kill(pid);
        ck_assert(WAIT_FOR(client_usage(client, NULL).bytes_in_use == 0 &&
                                   client_usage(client, NULL).num_sessions == 1,
                           SETTLE_MS));
        bfc_disconnect(client);
}

/* Of a session that hung up and whose process lives, all stays as it was. */
TEST(the_page_shows_quarantine)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", NULL);
        struct raw *raw = open_raw(rig, true);
        Bfcd__SessionRow row;
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, 3 * MIB, &block), 0);
        shutdown(raw->fd, SHUT_RDWR);
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 3 * MIB);
        ck_assert(find_session(rig, "raw", &row));
        raw_close(raw);
        if (rig_device() == ON_HOST) {
                ck_assert(WAIT_FOR(client_usage(client, NULL).bytes_in_use == 0, SETTLE_MS));
                bfc_disconnect(client);
                rig_stop(rig);
        } else { /* a GPU's memory is not taken from a process that lives */
                bfc_disconnect(client);
                rig_terminate(rig);
                rig_discard(rig);
        }
}

TEST(the_page_shows_the_daemons_end)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", NULL);

        client_usage(client, NULL);
        rig_terminate(rig);
        ck_assert_int_eq(bfc_usage(client, NULL, &u), -ECONNRESET);
        bfc_disconnect(client);
        rig_discard(rig);
}

/* ---- what clients say ------------------------------------------------------- */

RIG_TEST(client_statistics_are_listed, config)
{
        bfc_client *client = open_cached(rig, "red");
        struct raw *older = open_raw(rig, false);
        Bfcd__Block block;
        Bfcd__SessionRow row;
        char *out;
        void *p, *q;

        ck_assert_int_eq(raw_malloc(older, 0, MIB, &block), 0);
        ck_assert_ok(bfc_malloc(client, 100000, &p));
        ck_assert_ok(bfc_malloc_in(client, "infer", 100000, &q));
        ck_assert(find_session(rig, "test_pages", &row));
        ck_assert_uint_eq(row.bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(row.client_bytes_reserved, 4 * MIB);
        ck_assert_uint_eq(row.client_bytes_in_use, 2 * rounded(100000));
        ck_assert_uint_eq(row.client_bytes_idle, 4 * MIB - 2 * rounded(100000));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_free(client, q));
        ck_assert(find_session(rig, "test_pages", &row));
        ck_assert_uint_eq(row.client_bytes_in_use, 0);
        ck_assert_uint_eq(row.client_bytes_idle, 4 * MIB);
        ck_assert_uint_eq(row.bytes_outside, 0);
        ck_assert_ok(bfc_add_outside(client, NULL, 7 * MIB));
        ck_assert_ok(bfc_add_outside(client, "infer", 5 * MIB));
        ck_assert_ok(bfc_add_outside(client, "train", -(int64_t)MIB));
        ck_assert_int_eq(bfc_add_outside(client, "none", 1), -ENOENT);
        ck_assert(find_session(rig, "test_pages", &row));
        ck_assert_uint_eq(row.bytes_outside, 11 * MIB);
        ck_assert_uint_eq(row.bytes_in_use, 4 * MIB);
        ck_assert(find_session(rig, "raw", &row));
        ck_assert_uint_eq(row.bytes_in_use, MIB);
        ck_assert_uint_eq(row.client_bytes_reserved, 0);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("sessions"), &out, NULL), 0);
        ck_assert_ptr_nonnull(strstr(out, "IDLE"));
        text_has(out, "4.0 MiB");
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("sessions", "--wide"), &out, NULL), 0);
        text_has(out, "11.0 MiB");
        bfc_disconnect(client);
        session_end(older);
}

static void write_garbage(int fd, unsigned short random[3])
{
        uint64_t words[512];

        for (size_t i = 0; i < 512; i++)
                words[i] = nrand48(random) % 3 == 0 ? UINT64_MAX : (uint64_t)jrand48(random) << 20;
        words[0] = PAGES_CLIENT_MAGIC;
        words[1] = PAGES_VERSION;
        ck_assert_int_eq(pwrite(fd, words, sizeof(words), 0), sizeof(words));
}

/* It tries all that an fd allows, while an operator looks. */
RIG_TEST(invalid_client_pages_are_ignored, config)
{
        struct raw *raw = open_raw(rig, true);
        bfc_client *client = client_open(rig, "red", NULL);
        unsigned short random[3] = { 1, 2, 3 };
        Bfcd__SessionRow row;
        Bfcd__Block block;
        void *p;

        ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB, &block), 0);
        for (size_t i = 0; i < 2; i++) {
                ck_assert(ftruncate(raw->page_fds[i], 0) < 0); /* EINVAL: it is open for reading only */
                ck_assert(ftruncate(raw->page_fds[i], 1 << 30) < 0);
                ck_assert(fcntl(raw->page_fds[i], F_ADD_SEALS, F_SEAL_WRITE) < 0);
        }
        ck_assert(pwrite(raw->page_fds[0], "x", 1, 0) < 0);
        ck_assert(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, raw->page_fds[0], 0) == MAP_FAILED);
        ck_assert(fallocate(raw->page_fds[0], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) < 0);
        for (unsigned i = 0; i < 50; i++) {
                if (i % 5 == 4)
                        ck_assert_int_eq(fallocate(raw->page_fds[1],
                                                   FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096),
                                         0);
                else
                        write_garbage(raw->page_fds[1], random);
                ck_assert(find_session(rig, "raw", &row));
                ck_assert_uint_eq(row.bytes_in_use, 2 * MIB);
                ck_assert_uint_le(row.client_bytes_reserved, 2 * MIB);
                ck_assert_uint_le(row.client_bytes_in_use, 2 * MIB);
                ck_assert_uint_le(row.client_bytes_idle, 2 * MIB);
                ck_assert_uint_le(row.bytes_outside, INT64_MAX);
        }
        ck_assert_ok(bfc_malloc(client, MIB, &p));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 3 * MIB);
        session_end(raw);
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, MIB);
        bfc_disconnect(client);
}

/* In a child: many mappings, which are filled while others punch holes into them. */
static void punch_for_ever(int fd, pid_t parent)
{
        enum { N_MAPS = 5000 };
        size_t n_bytes = pages_client_bytes();

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(0);
        for (unsigned i = 0; i < N_MAPS; i++) {
                volatile char *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

                if (p != MAP_FAILED)
                        *p = 1;
        }
        for (;;) {
                volatile char *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

                if (p == MAP_FAILED)
                        _exit(0);
                *p = 1;
                fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)n_bytes);
                munmap((void *)(uintptr_t)p, n_bytes);
        }
}

static bool daemon_maps(const struct rig *rig, const char *name)
{
        char path[64], line[512];
        bool found = false;
        FILE *maps;

        snprintf(path, sizeof(path), "/proc/%d/maps", (int)rig->pid);
        maps = fopen(path, "re");
        ck_assert_ptr_nonnull(maps);
        while (fgets(line, sizeof(line), maps))
                found = found || strstr(line, name);
        fclose(maps);
        return found;
}

/* The daemon reads the page without mapping it, so it never waits for what the file's mappings wait
 * for. How long one read takes is not looked at: the machine may be busy. */
RIG_TEST(holes_from_many_mappings, config)
{
        struct raw *raw = open_raw(rig, true);
        bfc_client *client = client_open(rig, "red", NULL);
        pid_t parent = getpid(), children[4];
        Bfcd__SessionRow row;
        Bfcd__Block block;
        void *p;

        ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB, &block), 0);
        for (size_t i = 0; i < 4; i++) {
                children[i] = fork();
                if (children[i] == 0)
                        punch_for_ever(raw->page_fds[1], parent);
        }
        for (unsigned i = 0; i < 100; i++) {
                ck_assert(find_session(rig, "raw", &row));
                ck_assert_ok(bfc_malloc(client, MIB, &p));
                ck_assert_ok(bfc_free(client, p));
                ck_assert(!daemon_maps(rig, "bfcd-client"));
        }
        ck_assert(daemon_maps(rig, "bfcd-usage")); /* that the look finds such a name */
        for (size_t i = 0; i < 4; i++) {
                kill(children[i], SIGKILL);
                waitpid(children[i], NULL, 0);
        }
        session_end(raw);
        bfc_disconnect(client);
}

/* ---- fds -------------------------------------------------------------------- */

/* rig_stop() finds each fd that the daemon did not have at the start. */
RIG_TEST(hundreds_of_sessions, config)
{
        enum { N = 200 };
        struct raw *sessions[N];

        for (size_t i = 0; i < N; i++)
                sessions[i] = open_raw(rig, i % 4 != 3);
        ck_assert_uint_eq(rig_count(rig).n_sessions, N);
        for (size_t i = 0; i < N; i++) {
                ck_assert_int_eq(sessions[i]->page_fds[0] >= 0, i % 4 != 3);
                if (i % 2)
                        ck_assert_int_eq(raw_goodbye(sessions[i]), 0);
                raw_close(sessions[i]);
        }
}

/* Of the youngest class, as a client says it; settled: no counter is being moved. */
static void say_ages(int fd, uint64_t n_bytes, bool is_stable)
{
        size_t n = pages_client_bytes();
        struct pages_client *page = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

        ck_assert(page != MAP_FAILED);
        atomic_store(&page->magic, PAGES_CLIENT_MAGIC);
        atomic_store(&page->version, PAGES_VERSION);
        atomic_store(&page->ages[0].bytes[0], n_bytes);
        atomic_store(&page->ages[0].done, n_bytes > 0 ? ages_now() : 0);
        atomic_store(&page->ages[0].begun, is_stable ? atomic_load(&page->ages[0].done) : 1);
        munmap(page, n);
}

/* Pages that say nothing, or are never settled, make no row; yet each costs the loop some calls. So one request
 * looks at a bounded number of them, and the pages of the list go on until the last session. */
RIG_TEST(ages_of_many_silent_sessions, config)
{
        enum { N = 100 };
        struct raw *sessions[N];
        uint64_t cursor = 0;
        size_t n_replies = 0, n_rows = 0;

        for (size_t i = 0; i < N; i++) {
                Bfcd__Block block;

                sessions[i] = open_raw(rig, true);
                ck_assert_int_eq(raw_malloc(sessions[i], 0, 256, &block), 0);
                say_ages(sessions[i]->page_fds[1], i == N - 1 ? 256 : 0, i == N - 1);
        }
        do {
                Bfcd__Reply *reply;

                ck_assert_int_eq(raw_list(sessions[0], BFCD__LIST__KIND__AGES, cursor, &reply), 0);
                ck_assert(reply->list->next_cursor == 0 || reply->list->next_cursor > cursor);
                cursor = reply->list->next_cursor;
                n_rows += reply->list->n_ages;
                n_replies++;
                bfcd__reply__free_unpacked(reply, NULL);
        } while (cursor != 0);
        ck_assert_uint_eq(n_rows, 1);
        ck_assert_uint_ge(n_replies, 4);
        for (size_t i = 0; i < N; i++)
                session_end(sessions[i]);
}

static struct raw *say_hello_and_read_nothing(const struct rig *rig)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        struct raw *raw = NULL;

        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        hello.version = 1;
        hello.wants_events = hello.wants_pages = true;
        hello.tenant = (char *)(uintptr_t) "red";
        ck_assert_int_eq(raw_send(raw, &request), 0);
        return raw;
}

/* A page in flight is released only when it is out of the socket, or the socket is closed. */
RIG_TEST(unread_pages_cost_nothing, config)
{
        enum { N = 40 };
        struct raw *silent[N];
        bfc_client *client;

        for (size_t i = 0; i < N; i++)
                silent[i] = say_hello_and_read_nothing(rig);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == N, SETTLE_MS));
        client = client_open(rig, "red", NULL);
        ck_assert_uint_eq(client_usage(client, NULL).num_sessions, N + 1);
        for (size_t i = 0; i < N; i++)
                raw_close(silent[i]);
        ck_assert(WAIT_FOR(client_usage(client, NULL).num_sessions == 1, SETTLE_MS));
        bfc_disconnect(client);
}

/* A session takes two fds of the daemon, and its pages three more until they are sent: where
 * these are not to be had, it goes without. */
TEST(a_client_with_few_fds)
{
        enum { N = 32 };
        struct rig_config few = config;
        struct raw *sessions[N];
        bool has_pages = true;
        Bfcd__Statistics f;
        struct rig *rig;
        size_t n = 0;

        few.max_fds = 80;
        rig = rig_start(&few);
        while (has_pages && n < N) {
                sessions[n] = open_raw(rig, true);
                has_pages = sessions[n++]->page_fds[0] >= 0;
        }
        ck_assert(!has_pages);
        ck_assert_uint_gt(n, 8);
        ck_assert_int_eq(raw_usage(sessions[n - 1], 0, &f), 0);
        ck_assert_uint_eq(f.num_sessions, n);
        while (n > 0)
                raw_close(sessions[--n]);
        rig_stop(rig);
}
