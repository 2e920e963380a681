/* Idle memory of one process is released when another needs it; requests that wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

#define LIMIT (64 * MIB) /* of each tenant */

#define TWO_TENANTS                                                                                          \
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n",                            \
        .tenants = "  - name: red\n"                                                                         \
                   "    match: {uid: @UID@}\n"                                                               \
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB}]\n"                        \
                   "  - name: blue\n"                                                                        \
                   "    match: {uid: @UID@}\n"                                                               \
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB}]\n"

static const struct rig_config two_tenants = { TWO_TENANTS };

/* For tests in which the daemon waits for an answer that does not come. */
static const struct rig_config impatient = { TWO_TENANTS, .top = "timeouts: {reclaim: 2s}\n" };
static const struct rig_config hasty = { TWO_TENANTS, .top = "timeouts: {reclaim: 200ms}\n" };

struct scene {
        char socket[96];
        const char *tenant;
        uint64_t flags;
        uint64_t hold_bytes; /* of blocks that stay */
        struct gate begin, up, go, done;
        volatile uint64_t served_ms[8]; /* shared: when each was served */
};

static struct scene *scene_new(const struct rig *rig, const char *tenant)
{
        struct scene *s = shared_memory(sizeof(*s));

        strcpy(s->socket, rig->socket);
        s->tenant = tenant;
        s->begin = gate_new();
        s->up = gate_new();
        s->go = gate_new();
        s->done = gate_new();
        setenv("BFC_CACHE", "on", 1);
        return s;
}

/* In pieces that are slabs of their own; then frees them all. */
static void fill_cache(bfc_client *client, uint64_t n_bytes)
{
        unsigned n = (unsigned)(n_bytes / (4 * MIB));
        void *p[64];

        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_malloc(client, 4 * MIB, &p[i]) == 0, "%u: %s", i, bfc_last_error());
        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_free(client, p[i]) == 0, "%s", bfc_last_error());
        REQUIRE(client_stats(client).bytes_idle >= n * 4 * MIB, "nothing lies idle");
}

/* Has one small block in a large slab. */
static void pin(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_with(.socket = s->socket, .tenant = s->tenant, .flags = s->flags);
        void *large, *small;

        REQUIRE(bfc_malloc(client, 56 * MIB - 4096, &large) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, large) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 1000, &small) == 0, "%s", bfc_last_error());
        REQUIRE(small == large, "it is not in the slab");
        if (rig_device() == ON_HOST)
                pattern_write(small, 7, 1000);
        gate_meet(&s->up, &s->go);
        REQUIRE(rig_device() != ON_HOST || pattern_holds(small, 7, 1000), "the block was changed");
        REQUIRE(client_stats(client).bytes_reserved < 4 * MIB || rig_device() == ON_CUDA_IPC,
                "%llu bytes are held for a block of 1000",
                (unsigned long long)client_stats(client).bytes_reserved);
        REQUIRE(bfc_free(client, small) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Has what is left of its limit lie idle, and does something else meanwhile. */
static void idle(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_with(.socket = s->socket, .tenant = s->tenant, .flags = s->flags);
        void *kept = NULL;

        if (s->hold_bytes > 0)
                REQUIRE(bfc_malloc(client, s->hold_bytes, &kept) == 0, "%s", bfc_last_error());
        fill_cache(client, LIMIT - s->hold_bytes);
        gate_meet(&s->up, &s->go);
        bfc_disconnect(client);
}

static int malloc_as(const struct rig *rig, const char *tenant, uint64_t n_bytes, uint32_t wait_ms)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = wait_ms };
        bfc_client *client = child_client_with(.socket = rig->socket, .tenant = tenant);
        void *p = NULL;
        int r = bfc_malloc_with(client, n_bytes, &how, &p);

        if (r == 0 && rig_device() == ON_HOST) {
                pattern_write(p, 4096, n_bytes);
                ck_assert(pattern_holds(p, 4096, n_bytes));
        }
        bfc_disconnect(client);
        return r;
}

/* ---- within a tenant ---------------------------------------------------------- */

RIG_TEST(an_idle_process_is_trimmed, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, idle, s);

        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, LIMIT);
        ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "red", 60 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "red", LIMIT, 0), 0);
        gate_open(&s->go);
        child_join(pid);
}

/* ---- between tenants ---------------------------------------------------------- */

/* With cuda-ipc an extent is as large as the slab. */
static void slab_gives_way(const char *tenant, int otherwise)
{
        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, pin, s);

        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_reserved, 56 * MIB);
        if (rig_device() == ON_CUDA_IPC)
                ck_assert_int_eq(malloc_as(rig, tenant, 60 * MIB, 0), otherwise);
        else
                ck_assert_int_eq(malloc_as(rig, tenant, 60 * MIB, 0), 0);
        gate_open(&s->go);
        child_join(pid);
        rig_stop(rig);
}

/* A slab with one block in it keeps only the extent of the block. */
TEST(a_slab_in_use_is_trimmed)
{
        slab_gives_way("red", -EDQUOT);
}

TEST(a_slab_in_use_is_trimmed_for_another_tenant)
{
        slab_gives_way("blue", -ENOMEM);
}

RIG_TEST(another_tenant_is_trimmed, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, idle, s);

        ck_assert_int_eq(malloc_as(rig, "blue", 60 * MIB, 0), 0);
        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_reserved, 16 * MIB);
        gate_open(&s->go);
        child_join(pid);
}

/* Up to its reserve a tenant has its memory at once, however much lies idle elsewhere or is held. */
RIG_TEST(reserves_are_granted_without_waiting, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        bfc_client *blue;
        void *p;
        pid_t pid;

        s->hold_bytes = LIMIT - 4 * MIB;
        pid = child_start_until(&s->up, idle, s);
        child_stop(pid);
        blue = child_client_with(.socket = rig->socket, .tenant = "blue");
        for (int i = 0; i < 4; i++)
                ck_assert_ok(bfc_malloc(blue, 4 * MIB, &p));
        ck_assert_uint_le(rig_stats(rig, "red", "train").bytes_reserved, LIMIT);
        bfc_disconnect(blue);
        kill(pid, SIGCONT);
        gate_open(&s->go);
        child_join(pid);
}

/* ---- missing and wrong answers ------------------------------------------------- */

/* Trims that were not answered in time, or were sent and are not answered. */
static uint64_t n_missed(struct rig *rig)
{
        Bfcd__Reply *reply;
        uint64_t n_sent = 0, n = 0;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__SESSIONS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_sessions; i++) {
                n += reply->list->sessions[i]->num_trims_missed;
                n_sent += reply->list->sessions[i]->num_trims;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        ck_assert_uint_eq(n_sent, n);
        return n;
}

static uint64_t n_unresponsive(struct rig *rig)
{
        Bfcd__Reply *reply;
        uint64_t n;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &reply), 0);
        n = reply->list->status->num_unresponsive;
        bfcd__reply__free_unpacked(reply, NULL);
        return n;
}

RIG_TEST(a_stopped_process_is_skipped, hasty)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, idle, s);

        rig->forgiven = "did not answer a Trim";
        child_stop(pid);
        ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), -EDQUOT);
        ck_assert_uint_eq(n_missed(rig), 1);
        for (int i = 0; i < 10; i++) /* it is asked and waited for once */
                ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), -EDQUOT);
        ck_assert_uint_eq(n_missed(rig), 1);
        ck_assert_uint_eq(n_unresponsive(rig), 1);
        kill(pid, SIGCONT);
        ck_assert(WAIT_FOR(malloc_as(rig, "red", 20 * MIB, 0) == 0, SETTLE_MS));
        ck_assert(WAIT_FOR(n_unresponsive(rig) == 0, SETTLE_MS));
        gate_open(&s->go);
        child_join(pid);
}

/* Answers each time that it released what it still has, and then what it was not asked. */
static void lie(void *arg)
{
        struct scene *s = arg;
        struct raw *raw = NULL;
        Bfcd__Block block;

        REQUIRE(raw_open(s->socket, &raw) == 0, "no connection");
        raw->wants_events = true;
        REQUIRE(raw_hello(raw, "red", "") == 0, "no session");
        REQUIRE(raw_malloc(raw, 0, 60 * MIB, &block) == 0, "no memory");
        gate_open(&s->up);
        for (uint64_t i = 1; i <= 2; i++) {
                Bfcd__Event *event = NULL;

                REQUIRE(raw_event(raw, SETTLE_MS, &event) == 0, "no event");
                REQUIRE(event->body_case == BFCD__EVENT__BODY_TRIM && event->sequence == i, "no Trim");
                bfcd__event__free_unpacked(event, NULL);
                (void)raw_answer(raw, i);
        }
        gate_meet(&s->done, &s->go);
        (void)raw_answer(raw, 2); /* once more */
        REQUIRE(raw_wait_hang_up(raw, SETTLE_MS) == 0, "it goes on");
        raw_close(raw);
}

RIG_TEST(invalid_answers_to_a_trim, impatient)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, lie, s);

        ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), -EDQUOT);
        ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), -EDQUOT);
        ck_assert(gate_wait(&s->done, SETTLE_MS));
        rig->forgiven = "the client answered an event that was not sent";
        gate_open(&s->go);
        child_join(pid);
}

/* ---- also while its threads are elsewhere ---------------------------------------- */

static const struct rig_config two_partitions = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                      "      - {name: infer, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: infer}"),
};

/* Its only thread waits inside bfc_malloc(), which asks for what another holds. */
static void wait_inside(void *arg)
{
        struct scene *s = arg;
        struct bfc_malloc_options how = { .struct_size = sizeof(how),
                                          .partition = "infer",
                                          .wait_ms = 60000 };
        bfc_client *client = child_client_with(.socket = s->socket, .tenant = "red");
        void *p;

        fill_cache(client, LIMIT);
        gate_meet(&s->up, &s->begin);
        REQUIRE(bfc_malloc_with(client, 20 * MIB, &how, &p) == 0, "%s", bfc_last_error());
        gate_meet(&s->done, &s->go);
        bfc_disconnect(client);
}

RIG_TEST(a_client_inside_malloc_is_trimmed, two_partitions)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start(wait_inside, s);
        bfc_client *client;
        void *p, *q;

        ck_assert(gate_wait(&s->up, SETTLE_MS));
        client = child_client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_NO_CACHE);
        ck_assert_ok(bfc_malloc_in(client, "infer", 60 * MIB, &q));
        gate_open(&s->begin);
        ck_assert(!gate_wait(&s->done, 500)); /* it waits */
        ck_assert_ok(bfc_malloc_in(client, "train", 60 * MIB, &p));
        ck_assert_ok(bfc_free(client, q));
        ck_assert(gate_wait(&s->done, SETTLE_MS));
        gate_open(&s->go);
        child_join(pid);
        bfc_disconnect(client);
}

/* Without a thread, by bfc_poll(). */
static void poll_for_events(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_with(.socket = s->socket, .tenant = s->tenant, .flags = BFC_POLL);
        struct pollfd fds[2];

        fill_cache(client, LIMIT);
        fds[0] = (struct pollfd){ .fd = bfc_poll_fd(client), .events = POLLIN };
        fds[1] = (struct pollfd){ .fd = s->go.fds[0], .events = POLLIN };
        gate_open(&s->up);
        while (poll(fds, 2, 60000) > 0 && !fds[1].revents)
                REQUIRE(bfc_poll(client) == 0, "%s", bfc_last_error());
        REQUIRE(fds[1].revents, "not in time");
        REQUIRE(bfc_poll(client) == 0, "%s", bfc_last_error()); /* nothing is there */
        bfc_disconnect(client);
}

RIG_TEST(a_polling_client_is_trimmed, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start(poll_for_events, s);
        bfc_client *other;

        ck_assert(gate_wait(&s->up, SETTLE_MS));
        ck_assert_int_eq(malloc_as(rig, "red", 60 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "blue", 60 * MIB, 0), 0);
        gate_open(&s->go);
        child_join(pid);
        other = child_client_with(.socket = rig->socket, .tenant = "red");
        ck_assert_int_eq(bfc_poll(other), -EINVAL);
        ck_assert_int_eq(bfc_poll_fd(other), -EINVAL);
        bfc_disconnect(other);
}

/* ---- waiting --------------------------------------------------------------------- */

struct waiter {
        struct scene *scene;
        unsigned index;
        uint64_t n_bytes;
        struct gate begin;
};

static void wait_for_room(void *arg)
{
        struct waiter *w = arg;
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = SETTLE_MS };
        bfc_client *client;
        void *p;

        REQUIRE(gate_wait(&w->begin, SETTLE_MS), "not in time");
        client = child_client_with(.socket = w->scene->socket, .tenant = w->scene->tenant,
                                   .flags = BFC_NO_CACHE);
        gate_open(&w->scene->up);
        REQUIRE(bfc_malloc_with(client, w->n_bytes, &how, &p) == 0, "%s", bfc_last_error());
        w->scene->served_ms[w->index] = (uint64_t)clock_ms();
        gate_meet(&w->scene->done, &w->scene->go);
        bfc_disconnect(client);
}

/* In the order in which they came, each as soon as there is room. */
RIG_TEST(requests_wait_in_order, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        struct waiter waiters[3];
        bfc_client *client;
        void *held[3];
        pid_t pids[3];

        for (unsigned i = 0; i < 3; i++) {
                waiters[i] = (struct waiter){ s, i, 16 * MIB, gate_new() };
                pids[i] = child_start(wait_for_room, &waiters[i]);
        }
        client = child_client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_NO_CACHE);
        for (int i = 0; i < 3; i++)
                ck_assert_ok(bfc_malloc(client, 20 * MIB, &held[i]));
        for (unsigned i = 0; i < 3; i++) {
                gate_open(&waiters[i].begin);
                ck_assert(gate_wait(&s->up, SETTLE_MS));
                ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == i + 1, SETTLE_MS));
        }
        for (int i = 0; i < 3; i++) {
                ck_assert(!gate_wait(&s->done, 50));
                ck_assert_ok(bfc_free(client, held[i]));
                ck_assert(gate_wait(&s->done, SETTLE_MS));
                for (int k = 0; k < 3; k++)
                        ck_assert_msg((s->served_ms[k] != 0) == (k <= i), "%d: %d", i, k);
        }
        for (int i = 0; i < 3; i++)
                gate_open(&s->go);
        for (int i = 0; i < 3; i++)
                child_join(pids[i]);
        bfc_disconnect(client);
}

/* A large request of one tenant is served beside a flood of small ones of another. */
static void flood(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_with(.socket = s->socket, .tenant = "blue", .flags = BFC_NO_CACHE);
        void *held[64] = { NULL };
        unsigned n = 0, seed = 1;

        while (!gate_wait(&s->go, 0)) {
                unsigned i = (unsigned)rand_r(&seed) % 24;

                if (held[i])
                        REQUIRE(bfc_free(client, held[i]) == 0, "%s", bfc_last_error());
                held[i] = NULL;
                if (rand_r(&seed) % 2)
                        (void)bfc_malloc(client, 2 * MIB, &held[i]);
                if (++n == 200)
                        gate_open(&s->up);
        }
        bfc_disconnect(client);
}

RIG_TEST(a_flood_starves_no_other_request, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start_until(&s->up, flood, s);

        /* Of 96 MiB, with 48 at most of the flood's, which come and go. */
        ck_assert_int_eq(malloc_as(rig, "red", 44 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "red", 60 * MIB, 30000), 0);
        gate_open(&s->go);
        child_join(pid);
}

/* ---- operators --------------------------------------------------------------------- */

RIG_TEST(an_operator_trims_and_evicts, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t pid;
        char *out, number[32];
        Bfcd__Reply *reply;

        s->hold_bytes = 8 * MIB;
        pid = child_start_until(&s->up, idle, s);
        out = ctl_text(rig, WORDS("trim", "blue"));
        ck_assert_msg(strncmp(out, "0 sessions asked, 0 B reclaimed", 31) == 0, "%s", out);
        free(out);
        out = ctl_text(rig, WORDS("trim", "red", "--bytes", "8MiB"));
        ck_assert_msg(strncmp(out, "1 session asked, ", 17) == 0 &&
                              strstr(out, "still idle in sessions of red"),
                      "%s", out);
        free(out);
        ck_assert_uint_le(rig_stats(rig, "red", "train").bytes_in_use, LIMIT - 8 * MIB);
        ck_assert_uint_gt(rig_stats(rig, "red", "train").bytes_in_use, 16 * MIB);
        ctl_says(rig, WORDS("trim", "--partition", "train"), "");
        ck_assert_uint_le(rig_stats(rig, "red", "train").bytes_in_use, 16 * MIB);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved <= 40 * MIB, SETTLE_MS));

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__SESSIONS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_sessions; i++)
                if (strcmp(reply->list->sessions[i]->tenant, "red") == 0)
                        snprintf(number, sizeof(number), "%llu",
                                 (unsigned long long)reply->list->sessions[i]->session_id);
        bfcd__reply__free_unpacked(reply, NULL);
        rig->forgiven = "evict";
        ctl_says(rig, WORDS("evict", number), "");
        ck_assert(WAIT_FOR(rig_count(rig).n_quarantined == 1, SETTLE_MS));
        gate_open(&s->go);
        child_join(pid);
}

/* ---- what a large job leaves beside a small session ----------------------- */

static void use_much(void *arg)
{
        struct scene *s = arg;
        bfc_client *client;
        void *p[12];

        REQUIRE(gate_wait(&s->begin, 60000), "the test did not begin");
        client = child_client_with(.socket = s->socket, .tenant = s->tenant);
        REQUIRE(client, "%s", bfc_last_error());
        for (unsigned i = 0; i < 12; i++)
                REQUIRE(bfc_malloc_flags(client, NULL, 4 * MIB, BFC_WHOLE, &p[i]) == 0, "%s",
                        bfc_last_error());
        for (unsigned i = 0; i < 12; i++)
                REQUIRE(bfc_free(client, p[i]) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* The job's memory is released when it ends. The small session keeps its memory and is not asked. */
RIG_TEST(a_large_job_leaves_nothing_reserved, two_tenants)
{
        struct scene *s = scene_new(rig, "red");
        pid_t job = child_start(use_much, s); /* before this process uses a device */
        bfc_client *small = child_client_with(.socket = rig->socket, .tenant = "red");
        void *p, *again;

        ck_assert_ok(bfc_malloc_flags(small, NULL, 2 * MIB, BFC_WHOLE, &p));
        gate_open(&s->begin);
        child_join(job);
        ck_assert_uint_ge(rig_stats(rig, "red", "train").lifetime_peak_bytes_reserved, 50 * MIB);
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved <=
                                   (rig_device() == ON_CUDA_IPC ? 32 * MIB : 4 * MIB), /* one extent */
                           SETTLE_MS));
        ck_assert_ok(bfc_malloc_flags(small, NULL, 2 * MIB, BFC_WHOLE, &again));
        bfc_disconnect(small);
}

/* ---- memory that is being released ---------------------------------------------- */

static uint64_t trimmed(const char *json, const char *key)
{
        const char *at = strstr(json, key);

        ck_assert_msg(at, "no %s in %s", key, json);
        return strtoull(at + strlen(key) + 2, NULL, 10);
}

/* Extents without a block, of a tenant whose session lives: trim counts them and waits until they are back. */
RIG_TEST(a_trim_counts_what_is_reserved, two_tenants)
{
        bfc_client *client = child_client_with(.socket = rig->socket, .tenant = "red");
        void *p;
        char *out;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 40 * MIB, BFC_WHOLE, &p));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_reserved, 40 * MIB);
        out = ctl_text(rig, WORDS("--json", "trim", "--timeout", "60"));
        ck_assert_uint_ge(trimmed(out, "\"bytes_given_back\""), 40 * MIB);
        ck_assert_uint_eq(trimmed(out, "\"bytes_pending\""), 0);
        free(out);
        ck_assert_uint_lt(rig_stats(rig, "red", "train").bytes_reserved, 4 * MIB);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("trim", "--timeout", "soon"), NULL, NULL), 2);
        bfc_disconnect(client);
}

/* However often the library tries before it gives up: what operators see are the program's refusals. */
static unsigned be_refused(bfc_client *client, unsigned seed)
{
        void *p[64] = { NULL }, *got;
        unsigned n_refusals = 0;

        for (unsigned i = 0; i < 1500; i++) {
                unsigned k = (unsigned)rand_r(&seed) % 64, bits = 10 + (unsigned)rand_r(&seed) % 15;
                size_t n = 1 + (size_t)rand_r(&seed) % ((size_t)1 << bits);
                struct bfc_malloc_options o = { .struct_size = sizeof(o), .wait_ms = i % 97 == 0 };
                int r;

                if (p[k]) {
                        ck_assert_ok(bfc_free(client, p[k]));
                        p[k] = NULL;
                        continue;
                }
                r = bfc_malloc_with(client, n, &o, &got);
                ck_assert(r == 0 || r == -EDQUOT);
                n_refusals += r == -EDQUOT;
                p[k] = r == 0 ? got : NULL;
        }
        return n_refusals;
}

RIG_TEST(refusals_are_counted_once, two_tenants)
{
        bfc_client *client;
        unsigned n = 0;

        printf("# seeds 1, 2\n");
        setenv("BFC_CACHE", "on", 1);
        client = child_client_with(.socket = rig->socket, .tenant = "red");
        n += be_refused(client, 1);
        ck_assert_uint_gt(n, 5);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, n);
        ck_assert_uint_eq(client_stats(client).num_failures, n);
        bfc_disconnect(client);
        client = child_client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_NO_CACHE);
        n += be_refused(client, 2);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, n);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_over_quota, n);
        printf("# %u refusals\n", n);
        bfc_disconnect(client);
}
