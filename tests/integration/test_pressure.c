/* Blocks that are parked because others need the memory: by themselves, by the program's function, and by operators;
 * functions that do not return; jobs that take turns.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "proto/pages.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

#define BLOCK  (12 * MIB)
#define BLOCKS 4u

/* On a GPU the partition for copies is on the host. */
#define ON_THE_HOST  "  - id: host\n    size: 256MiB\n    partitions:\n"
#define QUOTAS(more) "{partition: train" more "}, {partition: parking}"
#define PARK         ", park: {to: parking, idle: 50ms}"

struct shape {
        const char *parking; /* the limit for copies */
        const char *tenants;
};

static const struct shape parks = { "160MiB", TENANT_OF("red", "@UID@", QUOTAS(PARK))
                                                      TENANT_OF("blue", "@UID@", QUOTAS(PARK)) };
static const struct shape parks_of_three = { "160MiB",
                                             TENANT_OF("red", "@UID@", QUOTAS(PARK))
                                                     TENANT_OF("blue", "@UID@", QUOTAS(PARK))
                                                             TENANT_OF("mallory", "@UID@", QUOTAS(PARK)) };
static const struct shape parks_nothing = { "160MiB", TENANT_OF("red", "@UID@", QUOTAS(""))
                                                              TENANT_OF("blue", "@UID@", QUOTAS("")) };
static const struct shape has_little_room = { "8MiB", TENANT_OF("red", "@UID@", QUOTAS(PARK))
                                                              TENANT_OF("blue", "@UID@", QUOTAS("")) };

/* Valid until the fourth next one. */
static const struct rig_config *config_of(const struct shape *shape)
{
        static struct rig_config configs[4];
        static char partitions[4][256];
        static unsigned n;
        unsigned i = n++ % 4;

        snprintf(partitions[i], sizeof(partitions[i]),
                 "      - {name: train, limit: 64MiB}\n%s      - {limit: %s, name: parking}\n",
                 rig_device() == ON_HOST ? "" : ON_THE_HOST, shape->parking);
        configs[i] = (struct rig_config){ .partitions = partitions[i], .tenants = shape->tenants };
        return &configs[i];
}

#define CAN_PARK (rig_device() != ON_CUDA_IPC)

static uint64_t parked(struct rig *rig, const char *tenant)
{
        return rig_stats(rig, tenant, "train").bytes_parked;
}

static int malloc_with(bfc_client *client, uint64_t flags, uint64_t n_bytes, const char *tag,
                       uint32_t wait_ms, void **ret)
{
        struct bfc_malloc_options how = {
                .struct_size = sizeof(how), .flags = flags, .wait_ms = wait_ms, .tag = tag
        };

        return bfc_malloc_with(client, n_bytes, &how, ret);
}

static int malloc_as(bfc_client *client, uint64_t n_bytes, const char *tag, uint32_t wait_ms, void **ret)
{
        return malloc_with(client, BFC_PARKABLE, n_bytes, tag, wait_ms, ret);
}

struct blocks {
        void *ptrs[BLOCKS];
};

/* Four blocks, which leave room for a third of one; the last two have a tag. */
static void fill(bfc_client *client, struct blocks *ret)
{
        for (unsigned i = 0; i < BLOCKS; i++) {
                ck_assert_ok(malloc_as(client, BLOCK, i < 2 ? "first" : "last", 0, &ret->ptrs[i]));
                block_fill(client, ret->ptrs[i], BLOCK, i);
        }
}

static void check_blocks(bfc_client *client, const struct blocks *b)
{
        for (unsigned i = 0; i < BLOCKS; i++) {
                ck_assert_ok(bfc_use_begin(client, b->ptrs[i], SETTLE_MS));
                ck_assert(block_has(client, b->ptrs[i], BLOCK, i));
                ck_assert_ok(bfc_use_end(client, b->ptrs[i]));
        }
}

/* ---- by themselves ----------------------------------------------------------------- */

TEST(idle_blocks_are_parked_for_others)
{
        struct rig *rig = CAN_PARK ? rig_start(config_of(&parks)) : NULL;
        bfc_client *red, *blue;
        struct blocks b;
        void *p;

        if (!rig)
                return;
        red = client_open(rig, "red", "train");
        blue = client_open(rig, "blue", "train");
        fill(red, &b);
        ck_assert_ok(bfc_use_begin(red, b.ptrs[0], 0));
        ck_assert_ok(bfc_use_begin(red, b.ptrs[3], 0));
        ck_assert_ok(malloc_as(blue, 3 * BLOCK, NULL, SETTLE_MS, &p));
        ck_assert_uint_eq(parked(rig, "red"), 2 * BLOCK);
        ck_assert(block_has(red, b.ptrs[0], BLOCK, 0)); /* they are in use */
        ck_assert(block_has(red, b.ptrs[3], BLOCK, 3));
        ck_assert_ok(bfc_use_end(red, b.ptrs[0]));
        ck_assert_ok(bfc_use_end(red, b.ptrs[3]));
        /* And back: blue's block steps aside in turn. */
        block_fill(blue, p, 3 * BLOCK, 9);
        check_blocks(red, &b);
        ck_assert_uint_eq(parked(rig, "blue"), 3 * BLOCK);
        ck_assert_ok(bfc_use_begin(blue, p, SETTLE_MS));
        ck_assert(block_has(blue, p, 3 * BLOCK, 9));
        ck_assert_ok(bfc_use_end(blue, p));
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* The tenant's own limit is short: the other sessions' blocks, and the requester's own, step aside. */
TEST(a_tenant_parks_for_itself)
{
        struct rig *rig = CAN_PARK ? rig_start(config_of(&parks)) : NULL;
        bfc_client *red, *other;
        struct blocks b;
        void *p, *q;

        if (!rig)
                return;
        red = client_open(rig, "red", "train");
        other = client_open(rig, "red", "train");
        fill(red, &b);
        ck_assert_ok(malloc_as(other, BLOCK, NULL, SETTLE_MS, &p));
        ck_assert_ok(malloc_as(red, BLOCK, NULL, SETTLE_MS, &q));
        ck_assert_uint_ge(parked(rig, "red"), BLOCK);
        ck_assert_ok(bfc_free(other, p));
        ck_assert_ok(bfc_free(red, q));
        check_blocks(red, &b);
        bfc_disconnect(red);
        bfc_disconnect(other);
        rig_stop(rig);
}

static void assert_refused(bfc_client *client, uint64_t n_bytes)
{
        void *p;
        int r = malloc_as(client, n_bytes, NULL, 0, &p);

        ck_assert_msg(r == -ENOMEM || r == -EDQUOT, "%d", r);
}

TEST(without_room_for_copies_the_request_is_refused)
{
        struct rig *rig = CAN_PARK ? rig_start(config_of(&has_little_room)) : NULL;
        bfc_client *red, *blue;
        struct blocks b;

        if (!rig)
                return;
        red = client_open(rig, "red", "train");
        blue = client_open(rig, "blue", "train");
        fill(red, &b);
        WAIT_FOR(false, 100);
        assert_refused(blue, 2 * BLOCK);
        ck_assert_uint_eq(parked(rig, "red"), 0);
        check_blocks(red, &b);
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* The key works from the next request on, and no longer. */
TEST(a_reload_changes_what_is_parked)
{
        struct rig *rig = CAN_PARK ? rig_start(config_of(&parks_nothing)) : NULL;
        bfc_client *red, *blue;
        struct blocks b;
        void *p;

        if (!rig)
                return;
        red = client_open(rig, "red", "train");
        blue = client_open(rig, "blue", "train");
        fill(red, &b);
        WAIT_FOR(false, 100);
        assert_refused(blue, 2 * BLOCK);
        rig_rewrite_config(rig, config_of(&parks));
        ctl_says(rig, WORDS("reload"),
                 "tenant 'red' in partition 'train': park is to 'parking' after 50ms, was none");
        ck_assert_ok(malloc_as(blue, 2 * BLOCK, NULL, SETTLE_MS, &p));
        ck_assert_ok(bfc_free(blue, p));
        check_blocks(red, &b);
        rig_rewrite_config(rig, config_of(&parks_nothing));
        ctl_says(rig, WORDS("reload"), "park is none, was to 'parking' after 50ms");
        WAIT_FOR(false, 100);
        assert_refused(blue, 2 * BLOCK);
        ck_assert_uint_eq(parked(rig, "red"), 0);
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* ---- a hostile client ------------------------------------------------------------------ */

struct silent {
        char socket[96];
        struct gate up;
};

/* Its page says that it has the most to give and was idle for the longest time. It never answers, and its small
 * allocations show that it lives. */
static void be_silent(void *arg)
{
        struct silent *s = arg;
        struct pages_client *page;
        Bfcd__Block large, small;
        struct raw *raw;

        REQUIRE(raw_open(s->socket, &raw) == 0, "no connection");
        raw->wants_events = raw->wants_pages = true;
        REQUIRE(raw_hello(raw, "mallory", NULL) == 0 && raw_malloc(raw, 0, 13 * MIB, &large) == 0, "%s",
                raw_refusal());
        page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, raw->page_fds[1], 0);
        REQUIRE(page != MAP_FAILED, "no page");
        page->version = PAGES_VERSION;
        page->idle[0].bytes = UINT64_MAX;
        page->idle[0].since_ms = 1;
        page->has_pressure_fn = 1;
        page->magic = PAGES_CLIENT_MAGIC;
        gate_open(&s->up);
        for (;;) {
                (void)raw_malloc(raw, 0, 256, &small);
                usleep(20000);
        }
}

TEST(a_silent_client_hides_no_other)
{
        struct rig *rig = CAN_PARK && CHILDREN_HAVE_EVENTS ? rig_start(config_of(&parks_of_three)) : NULL;
        struct silent s = { .up = gate_new() };
        bfc_client *red, *blue;
        void *p[3], *q;
        pid_t mallory;

        if (!rig)
                return;
        strcpy(s.socket, rig->socket);
        mallory = child_start(be_silent, &s);
        ck_assert(gate_wait(&s.up, SETTLE_MS));
        red = client_open(rig, "red", "train");
        blue = client_open(rig, "blue", "train");
        for (unsigned i = 0; i < 3; i++)
                ck_assert_ok(malloc_as(red, BLOCK, NULL, 0, &p[i]));
        ck_assert_ok(malloc_with(blue, BFC_WHOLE, 2 * BLOCK, NULL, SETTLE_MS / 2, &q));
        ck_assert_uint_ge(parked(rig, "red"), BLOCK);
        ctl_says(rig, WORDS("--json", "status"), "\"num_unresponsive\": 0"); /* not when its time was up */
        kill(mallory, SIGKILL);
        waitpid(mallory, NULL, 0);
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* ---- the program's function ---------------------------------------------------------- */

struct spare {
        bfc_client *client;
        struct blocks blocks;
        unsigned n_free; /* blocks that it can free */
        _Atomic unsigned n_calls, n_ends;
        _Atomic uint64_t n_bytes;
        _Atomic bool is_stuck, is_over;
        pthread_mutex_t lock; /* of its registration, which it renews until the test ends it */
        bool is_ended;
};

static void give(void *userdata, const struct bfc_pressure *pressure)
{
        struct spare *s = userdata;
        void *p;

        REQUIRE(pressure->struct_size == sizeof(*pressure) && strcmp(pressure->partition, "train") == 0, "%s",
                pressure->partition);
        s->n_calls++;
        s->n_bytes = pressure->n_bytes;
        while (s->n_free > 0) {
                REQUIRE(bfc_free(s->client, s->blocks.ptrs[--s->n_free]) == 0, "%s", bfc_last_error());
        }
        /* Anything may be called here. */
        REQUIRE(bfc_malloc(s->client, 1000, &p) == 0 && bfc_free(s->client, p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_trim(s->client, SIZE_MAX) == 0, "%s", bfc_last_error());
        pthread_mutex_lock(&s->lock);
        if (!s->is_ended)
                REQUIRE(bfc_on_pressure(s->client, give, s) == 0, "%s", bfc_last_error());
        pthread_mutex_unlock(&s->lock);
        s->n_ends++;
}

static void *poll_it(void *userdata)
{
        struct spare *s = userdata;

        while (!s->is_over) {
                struct pollfd p = { .fd = bfc_poll_fd(s->client), .events = POLLIN };

                (void)poll(&p, 1, 10);
                REQUIRE(bfc_poll(s->client) == 0, "%s", bfc_last_error());
        }
        return NULL;
}

static void ask_function(uint64_t flags)
{
        struct rig *rig = rig_start(config_of(&parks_nothing));
        struct spare s = { .client = client_with(.socket = rig->socket, .tenant = "red", .flags = flags),
                           .n_free = 2 };
        bfc_client *blue = client_open(rig, "blue", "train");
        pthread_t poller;
        void *p;

        if (flags & BFC_POLL)
                ck_assert_int_eq(pthread_create(&poller, NULL, poll_it, &s), 0);
        for (unsigned i = 0; i < BLOCKS; i++)
                ck_assert_ok(bfc_malloc_flags(s.client, NULL, BLOCK, BFC_WHOLE, &s.blocks.ptrs[i]));
        ck_assert_ok(bfc_on_pressure(s.client, give, &s));
        ck_assert_ok(malloc_with(blue, BFC_WHOLE, 2 * BLOCK, NULL, SETTLE_MS, &p)); /* nothing else helps */
        ck_assert_uint_ge(s.n_calls, 1);
        ck_assert_uint_gt(s.n_bytes, 0);
        /* Without a function it is not asked. */
        pthread_mutex_lock(&s.lock);
        s.is_ended = true;
        pthread_mutex_unlock(&s.lock);
        ck_assert_ok(bfc_on_pressure(s.client, NULL, NULL));
        ck_assert(WAIT_FOR(s.n_ends == s.n_calls, SETTLE_MS));
        ck_assert_uint_eq(s.n_free, 0); /* the first of the two may have been enough for the request */
        s.n_calls = 0;
        ck_assert_int_lt(bfc_malloc_flags(blue, NULL, 2 * BLOCK, BFC_WHOLE, &p), 0);
        ck_assert_uint_eq(s.n_calls, 0);
        s.is_over = true;
        if (flags & BFC_POLL)
                ck_assert_int_eq(pthread_join(poller, NULL), 0);
        bfc_disconnect(s.client);
        bfc_disconnect(blue);
        rig_stop(rig);
}

TEST(a_function_frees_what_it_can)
{
        ask_function(0);
}

TEST(a_function_is_called_by_bfc_poll)
{
        ask_function(BFC_POLL);
}

TEST(a_client_without_events_has_no_function)
{
        struct rig *rig = rig_start(config_of(&parks_nothing));
        bfc_client *client = client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_NO_THREAD);

        ck_assert_int_eq(bfc_on_pressure(client, give, NULL), -EINVAL);
        ck_assert_int_eq(bfc_on_pressure(NULL, give, NULL), -EINVAL);
        bfc_disconnect(client);
        rig_stop(rig);
}

static void be_stuck(void *userdata, const struct bfc_pressure *pressure)
{
        struct spare *s = userdata;

        (void)pressure;
        s->n_calls++;
        s->is_stuck = true;
        while (!s->is_over)
                usleep(1000);
}

/* Its client gives back idle memory all the same, others are asked, and the daemon can be restarted. */
TEST(a_function_that_does_not_return_harms_nobody)
{
        struct kept *k = kept_start(config_of(&parks_nothing));
        struct spare s = { .client = client_open(k->rig, "red", "train") };
        struct spare other = { .client = client_open(k->rig, "red", "train"), .n_free = 1 };
        bfc_client *blue = client_open(k->rig, "blue", "train");
        void *p, *q;

        ck_assert_ok(bfc_malloc_flags(s.client, NULL, 24 * MIB, BFC_WHOLE, &p));
        ck_assert_ok(bfc_malloc_flags(other.client, NULL, 32 * MIB, BFC_WHOLE, &other.blocks.ptrs[0]));
        ck_assert_ok(bfc_on_pressure(s.client, be_stuck, &s));
        ck_assert_int_lt(bfc_malloc_flags(blue, NULL, 16 * MIB, BFC_WHOLE, &q), 0);
        ck_assert(WAIT_FOR(s.is_stuck, SETTLE_MS));
        /* Another session's function is asked. */
        ck_assert_ok(bfc_on_pressure(other.client, give, &other));
        ck_assert_ok(malloc_with(blue, BFC_WHOLE, 16 * MIB, NULL, SETTLE_MS, &q));
        ck_assert_uint_eq(s.n_calls, 1);
        ck_assert_ok(bfc_on_pressure(other.client, NULL, NULL));
        ck_assert_ok(bfc_free(blue, q));
        /* What is idle in its cache is returned. */
        ck_assert_ok(bfc_free(s.client, p));
        ck_assert_ok(bfc_malloc(s.client, 24 * MIB, &p));
        ck_assert_ok(bfc_free(s.client, p));
        ck_assert_ok(bfc_malloc_flags(blue, NULL, 56 * MIB, BFC_WHOLE, &q));
        ck_assert_ok(bfc_free(blue, q));
        ck_assert_ok(bfc_malloc_flags(s.client, NULL, 32 * MIB, BFC_WHOLE, &p));
        kept_restart(k, SIGKILL);
        ck_assert_ok(bfc_free(s.client, p));
        s.is_over = true;
        bfc_disconnect(s.client);
        bfc_disconnect(other.client);
        bfc_disconnect(blue);
        kept_stop(k);
}

/* ---- operators ------------------------------------------------------------------------ */

static uint64_t session_of_red(struct rig *rig)
{
        char *text = ctl_text(rig, WORDS("sessions")), *at = strstr(text, "  red ");
        uint64_t id;

        ck_assert_msg(at, "%s", text);
        while (at > text && at[-1] != '\n')
                at--;
        id = strtoull(at, NULL, 10);
        free(text);
        return id;
}

TEST(operators_park_and_wake)
{
        struct rig *rig = CAN_PARK ? rig_start(config_of(&parks_nothing)) : NULL;
        struct spare s = { .n_free = 0 };
        char id[24];
        bfc_client *red;
        struct blocks b;

        if (!rig)
                return;
        red = s.client = client_open(rig, "red", "train");
        fill(red, &b);
        ck_assert_ok(bfc_on_pressure(red, be_stuck, &s)); /* it is not called */
        ctl_refuses(rig, WORDS("park", "red"), 1, "--to PARTITION");
        ctl_refuses(rig, WORDS("park", "red", "--to", "train", "--partition", "train"), 1,
                    "must be another partition");
        ctl_refuses(rig, WORDS("park", "red", "--to", "nowhere"), 1, "'nowhere'");
        ctl_refuses(rig, WORDS("park", "nobody", "--to", "parking"), 1,
                    "there is no tenant 'nobody'; you can see: ");
        ctl_refuses(rig, WORDS("wake", "123456"), 1, "session 123456 does not exist");
        ctl_refuses(rig, WORDS("wake", "red", "--partition", "rom"), 1, "no quota for 'red' in 'rom'");
        ctl_refuses(rig, WORDS("park", "blue", "--to", "parking"), 1, "tenant 'blue' has no session");
        ctl_refuses(rig, WORDS("park"), 2, "no session or tenant");
        ck_assert_ok(bfc_use_begin(red, b.ptrs[0], 0));
        ctl_says(rig, WORDS("park", "red", "--to", "parking"), "1 session asked, 36.0 MiB parked");
        ck_assert_uint_eq(parked(rig, "red"), 3 * BLOCK);
        ck_assert(block_has(red, b.ptrs[0], BLOCK, 0));
        ck_assert_ok(bfc_use_end(red, b.ptrs[0]));
        ctl_says(rig, WORDS("-w", "tenants"), "PARKED");
        ctl_says(rig, WORDS("explain", "train"), "Parked");
        ctl_says(rig, WORDS("metrics"), "bfcd_tenant_parked_bytes");
        ctl_says(rig, WORDS("wake", "red", "--tag", "last"), "24.0 MiB woken");
        ck_assert_uint_eq(parked(rig, "red"), BLOCK);
        ctl_says(rig, WORDS("--json", "wake", "red"), "\"bytes_woken\": 12582912");
        snprintf(id, sizeof(id), "%llu", (unsigned long long)session_of_red(rig));
        ctl_says(rig, WORDS("park", id, "--tag", "first", "--to", "parking", "--partition", "train"),
                 "24.0 MiB parked");
        ctl_says(rig, WORDS("wake", id, "--partition", "parking"), "0 B woken");
        ctl_says(rig, WORDS("wake", id), "24.0 MiB woken");
        ck_assert_uint_eq(parked(rig, "red"), 0);
        ck_assert_uint_eq(s.n_calls, 0);
        check_blocks(red, &b);
        bfc_disconnect(red);
        rig_stop(rig);
}

/* ---- turns ------------------------------------------------------------------------------ */

#define TURN_BLOCKS 7u
#define TURN_BLOCK  (8 * MIB) /* seven of them are seven eighths of the partition */
#define TURNS       (suite_is_long() ? 5u : 2u)

struct turns {
        char socket[96];
        const char *tenant;
        uint64_t seed;
        struct gate mine, other; /* the jobs alternate */
};

static void take_turns(void *arg)
{
        struct turns *t = arg;
        bfc_client *client = child_client_open(t->socket, t->tenant);
        uint64_t seed = t->seed;
        void *p[TURN_BLOCKS];

        for (unsigned i = 0; i < TURN_BLOCKS; i++) {
                REQUIRE(malloc_as(client, TURN_BLOCK, "model", SETTLE_MS, &p[i]) == 0, "%s",
                        bfc_last_error());
                block_fill(client, p[i], TURN_BLOCK, seed + i);
        }
        for (uint64_t n = 1; n <= TURNS; n++) {
                REQUIRE(gate_wait(&t->mine, SETTLE_MS), "the other job has not had its turn");
                REQUIRE(bfc_use_begin_tag(client, "model", SETTLE_MS) == 0, "%s", bfc_last_error());
                for (unsigned i = 0; i < TURN_BLOCKS; i++) {
                        REQUIRE(block_has(client, p[i], TURN_BLOCK, seed + (n - 1) * 100 + i),
                                "turn %u, block %u", (unsigned)n, i);
                        block_fill(client, p[i], TURN_BLOCK, seed + n * 100 + i);
                }
                REQUIRE(bfc_use_end_tag(client, "model") == 0, "%s", bfc_last_error());
                gate_open(&t->other);
        }
        bfc_disconnect(client);
}

/* Of two tenants, and of one. */
LOOP_TEST(two_jobs_take_turns, 2)
{
        struct rig *rig = CAN_PARK && CHILDREN_HAVE_EVENTS ? rig_start(config_of(&parks)) : NULL;
        struct gate gates[2] = { gate_new(), gate_new() };
        struct turns t[2];
        pid_t jobs[2];

        if (!rig)
                return;
        for (unsigned i = 0; i < 2; i++) {
                t[i] = (struct turns){ .tenant = i && _i == 0 ? "blue" : "red",
                                       .seed = (i + UINT64_C(1)) << 32,
                                       .mine = gates[i],
                                       .other = gates[1 - i] };
                strcpy(t[i].socket, rig->socket);
                jobs[i] = child_start(take_turns, &t[i]);
        }
        gate_open(&gates[0]);
        for (unsigned i = 0; i < 2; i++)
                child_join(jobs[i]);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, 0);
        ck_assert_uint_eq(rig_stats(rig, "blue", "train").num_refusals, 0);
        rig_stop(rig);
}
