/* The daemon is restarted and killed, and clients continue: every kind of block with its
 * contents, all statistics, and every call afterwards; clients that are late, that died
 * meanwhile, or whose requests were under way; and a config that is another one then.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"
#include "tests/keeper_caller.h"

#define STREAM         ((uintptr_t)0) /* the one that every device has */
#define N_SMALL        40u
#define BACK_MS        SETTLE_MS
#define EXTENT         (2 * MIB) /* of 64 MiB and less */
#define SENTENCE_BYTES 512u
#define DOWN_FOR       300000u /* us; longer than the quarantine below */

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB")
                TENANT("blue", "@UID@", "train, limit: 32MiB, reserve: 4MiB"),
};

static int signals[] = { SIGTERM, SIGKILL };

/* ---- blocks of all kinds ------------------------------------------------------- */

struct blocks {
        void *small[N_SMALL], *whole, *one, *tagged, *async, *published, *attached;
};

static void blocks_make(bfc_client *client, struct blocks *b)
{
        struct bfc_malloc_options tagged = { .struct_size = sizeof(tagged), .tag = "activations" };
        void *gone;

        for (unsigned i = 0; i < N_SMALL; i++) {
                ck_assert_ok(bfc_malloc(client, 100 + 1000 * i, b->small + i));
                block_fill(client, b->small[i], 100 + 1000 * i, i);
        }
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &gone)); /* holes */
        ck_assert_ok(bfc_malloc_flags(client, NULL, 5 * MIB, BFC_WHOLE, &b->whole));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 3 * EXTENT, BFC_ONE_EXTENT | BFC_SHAREABLE, &b->one));
        ck_assert_ok(bfc_malloc_with(client, 12345, &tagged, &b->tagged));
        ck_assert_ok(bfc_malloc_async(client, MIB, STREAM, &b->async));
        block_fill(client, b->whole, 5 * MIB, 101);
        block_fill(client, b->one, 3 * EXTENT, 102);
        block_fill(client, b->tagged, 12345, 103);
        block_fill(client, b->async, MIB, 104);
        ck_assert_ok(bfc_free(client, gone));
        ck_assert_ok(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &b->published));
        block_fill(client, b->published, MIB, 105);
        ck_assert_ok(bfc_publish(client, b->published, "ours"));
        ck_assert_ok(bfc_attach(client, "theirs", BACK_MS, &b->attached, NULL));
}

static void blocks_assert(bfc_client *client, const struct blocks *b)
{
        int fd = -1;

        for (unsigned i = 0; i < N_SMALL; i++)
                ck_assert_msg(block_has(client, b->small[i], 100 + 1000 * i, i), "block %u", i);
        ck_assert(block_has(client, b->whole, 5 * MIB, 101));
        ck_assert(block_has(client, b->one, 3 * EXTENT, 102));
        ck_assert_int_eq(bfc_extent_fd(client, b->one, &fd), rig_device() == ON_CUDA_FD ? 0 : -ENOTSUP);
        if (fd >= 0)
                close(fd);
        ck_assert(block_has(client, b->tagged, 12345, 103));
        ck_assert(block_has(client, b->async, MIB, 104));
        ck_assert(block_has(client, b->published, MIB, 105));
        ck_assert(block_has(client, b->attached, MIB, 201));
}

static void blocks_free(bfc_client *client, struct blocks *b)
{
        for (unsigned i = 0; i < N_SMALL; i++)
                ck_assert_ok(bfc_free(client, b->small[i]));
        ck_assert_ok(bfc_free(client, b->whole));
        ck_assert_ok(bfc_free(client, b->one));
        ck_assert_ok(bfc_free(client, b->tagged));
        ck_assert_ok(bfc_free_async(client, b->async, STREAM));
        ck_assert_ok(bfc_detach(client, b->published));
        ck_assert_ok(bfc_detach(client, b->attached));
}

/* Each call once more, by the daemon that has taken over. */
static void all_calls_go_on(struct kept *k, bfc_client *client)
{
        size_t n_bytes = 0;
        void *p, *again, *large;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 300000, BFC_WHOLE, &p));
        block_fill(client, p, 300000, 9);
        ck_assert_ok(bfc_publish(client, p, "new"));
        ck_assert_ok(bfc_attach(client, "new", 0, &again, &n_bytes));
        ck_assert_ptr_eq(p, again);
        ck_assert_uint_eq(n_bytes, 300000);
        ck_assert_ok(bfc_detach(client, p));
        ck_assert(block_has(client, p, 300000, 9));
        ck_assert_ok(bfc_detach(client, p));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 20 * MIB, BFC_WHOLE, &large)); /* it grows */
        ck_assert_ok(bfc_free(client, large));
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 65 * MIB, BFC_WHOLE, &large), -EDQUOT);
        ck_assert_ok(bfc_malloc_async(client, MIB, STREAM, &p));
        ck_assert_ok(bfc_free_async(client, p, STREAM));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_int_eq(ctl(k->rig->admin_socket, WORDS("reload"), NULL, NULL), 0);
}

struct partner {
        char socket[96];
        struct gate up, go;
};

/* Another process of the tenant: publishes, attaches, holds both across restarts. */
static void share(void *arg)
{
        struct partner *partner = arg;
        bfc_client *client = child_client_open(partner->socket, "red");
        void *theirs, *ours, *again;

        REQUIRE(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &theirs) == 0, "%s", bfc_last_error());
        block_fill(client, theirs, MIB, 201);
        REQUIRE(bfc_publish(client, theirs, "theirs") == 0, "%s", bfc_last_error());
        REQUIRE(bfc_attach(client, "ours", BACK_MS, &ours, NULL) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_attach(client, "ours", 0, &again, NULL) == 0 && ours == again, "%s", bfc_last_error());
        gate_meet(&partner->up, &partner->go);
        REQUIRE(block_has(client, ours, MIB, 105), "another content");
        REQUIRE(bfc_detach(client, ours) == 0, "%s", bfc_last_error());
        REQUIRE(block_has(client, ours, MIB, 105), "another content");
        REQUIRE(block_has(client, theirs, MIB, 201), "another content");
        REQUIRE(bfc_detach(client, ours) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_detach(client, theirs) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Without peaks, of which the daemon keeps only those of a lifetime. */
static void assert_same_usage(const struct bfc_tenant_usage *a, const struct bfc_tenant_usage *b)
{
        ck_assert_uint_eq(a->bytes_limit, b->bytes_limit);
        ck_assert_uint_eq(a->bytes_reserved, b->bytes_reserved);
        ck_assert_uint_eq(a->bytes_in_use, b->bytes_in_use);
}

/* Tenants as `bfcctl tenants` lists them, sessions, blocks with their ids and places, shared
 * blocks: all is as it was, without the client having done anything. */
LOOP_TEST(a_restart_preserves_all_blocks, 4)
{
        int signal = signals[_i % 2];
        struct partner partner = { .up = gate_new(), .go = gate_new() };
        struct bfc_tenant_usage usage, usage_now;
        struct picture before;
        struct kept *k;
        struct blocks b;
        bfc_client *client;
        pid_t pid;

        setenv("BFC_CACHE", _i < 2 ? "on" : "off", 1);
        k = kept_start(&two_tenants);
        strcpy(partner.socket, k->rig->socket);
        pid = child_start(share, &partner);
        client = client_open(k->rig, "red", NULL);
        blocks_make(client, &b);
        ck_assert(gate_wait(&partner.up, BACK_MS));
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), BACK_MS));
        before = picture_take(k);
        usage = client_usage(client, NULL);
        for (unsigned i = 0; i < 3; i++) { /* what was restored is restored once more */
                kept_restart(k, signal);
                picture_assert_same(k, &before);
                blocks_assert(client, &b);
                usage_now = client_usage(client, NULL);
                assert_same_usage(&usage, &usage_now);
        }
        picture_free(&before);
        all_calls_go_on(k, client);
        blocks_assert(client, &b);
        kept_restart(k, signal);
        gate_open(&partner.go);
        child_join(pid);
        blocks_assert(client, &b);
        blocks_free(client, &b);
        bfc_disconnect(client);
        kept_stop(k);
}

/* Clients without a thread resume with their next call. */
LOOP_TEST(clients_without_a_thread_resume, 4)
{
        static const uint64_t flags[] = { BFC_NO_THREAD, BFC_POLL };
        struct kept *k = kept_start(&two_tenants);
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = k->rig->socket,
                                       .tenant = "red",
                                       .flags = flags[_i / 2] };
        bfc_client *client = NULL;
        void *p, *other;

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        block_fill(client, p, 3 * MIB, 1);
        kept_restart(k, signals[_i % 2]);
        ck_assert(block_has(client, p, 3 * MIB, 1)); /* no call of the daemon's */
        ck_assert_ok(bfc_malloc(client, 4 * MIB, &other));
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").bytes_in_use, 7 * MIB);
        kept_restart(k, signals[_i % 2]);
        ck_assert_ok(bfc_free(client, other));
        ck_assert(block_has(client, p, 3 * MIB, 1));
        if (flags[_i / 2] == BFC_POLL)
                ck_assert_ok(bfc_poll(client));
        kept_restart(k, signals[_i % 2]);
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 3 * MIB);
        bfc_disconnect(client);
        kept_stop(k);
}

/* What clients say of themselves is said to the next daemon, too. */
LOOP_TEST(memory_outside_is_shown_after_a_restart, 2)
{
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_with(.socket = k->rig->socket, .tenant = "red");
        char *out = NULL;
        void *p;

        ck_assert_ok(bfc_add_outside(client, NULL, 77 * MIB));
        kept_restart(k, signals[_i]);
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p)); /* of the next daemon */
        ck_assert_int_eq(ctl(k->rig->admin_socket, WORDS("sessions", "--wide"), &out, NULL), 0);
        text_has(out, "77.0 MiB");
        ck_assert_ok(bfc_add_outside(client, NULL, -76 * (int64_t)MIB));
        ck_assert_int_eq(ctl(k->rig->admin_socket, WORDS("sessions", "--wide"), &out, NULL), 0);
        text_has(out, "1.0 MiB");
        bfc_disconnect(client);
        kept_stop(k);
}

/* A client that may resume its session is told why it ended, and does not try to resume it: neither by its thread,
 * nor by a call, nor by bfc_poll(). */
LOOP_TEST(an_evicted_client_does_not_resume, 3)
{
        static const uint64_t flags[] = { 0, BFC_NO_THREAD, BFC_POLL };
        struct kept *k = kept_start(&two_tenants);
        struct bfc_options options = {
                .struct_size = sizeof(options), .socket = k->rig->socket, .tenant = "red", .flags = flags[_i]
        };
        char number[24] = "";
        const char *evict[] = { program_bfcctl(), "--socket", k->rig->admin_socket, "evict",
                                number,           "--reason", "maintenance",        NULL };
        bfc_client *client = NULL, *fresh;
        Bfcd__Reply *reply;
        void *p, *whole, *shared, *more;

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        ck_assert_ok(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &whole));
        ck_assert_ok(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &shared));
        ck_assert_ok(bfc_publish(client, shared, "shared"));
        ck_assert_int_eq(raw_list(k->rig->admin, BFCD__LIST__KIND__SESSIONS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_sessions; i++)
                if (strcmp(reply->list->sessions[i]->tenant, "red") == 0)
                        snprintf(number, sizeof(number), "%llu",
                                 (unsigned long long)reply->list->sessions[i]->session_id);
        bfcd__reply__free_unpacked(reply, NULL);
        ck_assert_int_eq(
                ctl(k->rig->admin_socket, WORDS("evict", number, "--reason", "two\nlines"), NULL, NULL), 1);
        ck_assert(kept_all_are(k, "live", 1));
        k->rig->forgiven = "evict";
        ck_assert_int_eq(program_run(evict, NULL, NULL), 0);
        ck_assert(WAIT_FOR(!kept_all_are(k, "live", 1), SETTLE_MS));
        ck_assert(kept_logged(k, "): maintenance"));
        if (flags[_i] == BFC_POLL)
                ck_assert_int_eq(bfc_poll(client), -EIDRM);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 4 * MIB, BFC_WHOLE, &more), -EIDRM);
        ck_assert_msg(strncmp(bfc_last_error(), "session ", 8) == 0 &&
                              strstr(bfc_last_error(), " was evicted by an operator: maintenance"),
                      "%s", bfc_last_error());
        for (int i = 0; i < 2; i++) { /* a free that fails leaves the block as it was */
                ck_assert_int_eq(bfc_free(client, p), -EIDRM);
                ck_assert_int_eq(bfc_free(client, whole), -EIDRM);
                ck_assert_int_eq(bfc_free(client, shared), -EIDRM);
        }
        ck_assert(!kept_logged(k, "resumed"));
        fresh = client_open(k->rig, "red", NULL); /* the program's own decision */
        bfc_disconnect(fresh);
        bfc_disconnect(client);
        kept_discard(k);
}

/* ---- clients that are late, or never come --------------------------------------- */

struct life {
        char socket[96];
        struct gate up, go;
};

static struct life life_new(const struct kept *k)
{
        struct life life = { .up = gate_new(), .go = gate_new() };

        strcpy(life.socket, k->rig->socket);
        return life;
}

static void hold(void *arg)
{
        struct life *life = arg;
        bfc_client *client = child_client_open(life->socket, "red");
        void *blocks[8], *more;

        for (unsigned i = 0; i < 8; i++) {
                REQUIRE(bfc_malloc(client, MIB + i, blocks + i) == 0, "%s", bfc_last_error());
                block_fill(client, blocks[i], MIB + i, i);
        }
        REQUIRE(bfc_malloc_flags(client, NULL, MIB, BFC_WHOLE, &more) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_publish(client, more, "held") == 0, "%s", bfc_last_error());
        gate_meet(&life->up, &life->go);
        for (unsigned i = 0; i < 8; i++) {
                REQUIRE(block_has(client, blocks[i], MIB + i, i), "block %u", i);
                REQUIRE(bfc_free(client, blocks[i]) == 0, "%s", bfc_last_error());
        }
        REQUIRE(bfc_malloc(client, MIB, &more) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Its process lives, and that is enough, for however long: also across several restarts, and
 * beyond the time that others have in quarantine. */
LOOP_TEST(a_stopped_client_resumes_late, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct life life = life_new(k);
        pid_t pid = child_start(hold, &life);
        uint64_t charge;

        ck_assert(gate_wait(&life.up, BACK_MS));
        charge = rig_charge(k->rig, "red", "train");
        child_stop(pid);
        kept_restart(k, signals[_i]);
        kept_restart(k, signals[_i]);
        usleep(DOWN_FOR);
        ck_assert(kept_all_are(k, "suspended", 1));
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), charge);
        kill(pid, SIGCONT);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), BACK_MS));
        gate_open(&life.go);
        child_join(pid);
        kept_stop(k);
}

LOOP_TEST(a_client_that_dies_during_a_restart_is_freed, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct life life = life_new(k);
        pid_t pid = child_start(hold, &life);

        ck_assert(gate_wait(&life.up, BACK_MS));
        kept_away(k, signals[_i]);
        child_kill(pid);
        kept_back(k);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, SETTLE_MS));
        kept_stop(k);
}

/* ---- requests under way ---------------------------------------------------------- */

/* The daemon has committed a block and died; its client never read of it, and does not list it. */
LOOP_TEST(a_lost_reply_leaks_no_block, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct raw *raw = kept_raw(k, "red");
        struct raw_held held;
        Bfcd__Block block, other;

        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &block), 0);
        held = kept_held(raw, &block.block_id, 1);
        session_send_malloc(raw, MIB, 0);
        session_send_malloc(raw, 9 * MIB, 0); /* in extents that it does not know either */
        ck_assert(WAIT_FOR(rig_stats(k->rig, "red", "train").num_blocks == 3, SETTLE_MS));
        kept_restart(k, signals[_i]);
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").num_blocks, 3);
        raw = kept_raw_back(k, raw);
        ck_assert_msg(raw_held(raw, &held) == 0, "%s", raw_refusal());
        raw_held_free(&held);
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").num_blocks, 1);
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").bytes_in_use, MIB);
        ck_assert_int_eq(raw_malloc(raw, 0, MIB, &other), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        ck_assert_int_eq(raw_free(raw, other.block_id), 0);
        session_end(raw);
        kept_stop(k);
}

/* Some were done, and some never reached the daemon: a client that has sent a Free does not list the block. */
LOOP_TEST(pending_frees_count_as_done, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct raw *raw = kept_raw(k, "red");
        struct raw_held held;
        Bfcd__Block blocks[32];
        uint64_t left[16];

        for (unsigned i = 0; i < 32; i++)
                ck_assert_int_eq(raw_malloc(raw, 0, 100000 + i, blocks + i), 0);
        held = kept_held(raw, left, 10);
        held.is_not_last = true; /* in two messages */
        for (unsigned i = 0; i < 32; i += 2) {
                session_send_free(raw, blocks[i].block_id);
                left[i / 2] = blocks[i + 1].block_id;
        }
        kept_restart(k, signals[_i]); /* SIGKILL: at once, in the middle of them */
        raw = kept_raw_back(k, raw);
        ck_assert_msg(raw_held(raw, &held) == 0, "%s", raw_refusal());
        raw_held_free(&held);
        held = (struct raw_held){ .block_ids = left + 10, .n_blocks = 6 };
        ck_assert_msg(raw_held(raw, &held) == 0, "%s", raw_refusal());
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").num_blocks, 16);
        for (unsigned i = 0; i < 16; i++)
                ck_assert_int_eq(raw_free(raw, left[i]), 0);
        session_end(raw);
        kept_stop(k);
}

struct waiter {
        bfc_client *client;
        bool attaches;
        int r;
        void *p;
        int cancel_fd; /* of wait_cancellably() */
        bool is_over;  /* atomic; of wait_in_vain() */
        char error[SENTENCE_BYTES];
        pthread_t thread;
};

static void *wait_for_it(void *arg)
{
        struct waiter *w = arg;
        struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                              .flags = BFC_WHOLE,
                                              .wait_ms = 60000 };

        w->r = w->attaches ? bfc_attach(w->client, "late", 60000, &w->p, NULL)
                           : bfc_malloc_with(w->client, 40 * MIB, &options, &w->p);
        return NULL;
}

struct grower {
        bfc_client *client;
        size_t n_bytes;
        int r;
        void *p;
        pthread_t thread;
};

static void *grow(void *arg)
{
        struct grower *g = arg;

        g->r = bfc_malloc_flags(g->client, NULL, g->n_bytes, BFC_WHOLE, &g->p);
        return NULL;
}

/* The daemon ends while it makes memory for two requests of a tenant: the next one serves both, and nothing of what had
 * been made is left. */
LOOP_TEST(a_restart_between_two_growths, 2)
{
        static const struct rig_config large = {
                .size = "1GiB",
                .partitions = "      - {name: train, limit: 960MiB}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 960MiB"),
        };
        bool is_host = rig_device() == ON_HOST;
        size_t factor = is_host ? 16 : 1; /* its memory is made faster */
        /* They fit in either order, also where the smaller one's extent is as large as the other's. */
        struct grower growers[2] = { { .n_bytes = 32 * MIB * factor }, { .n_bytes = 8 * MIB * factor } };
        struct kept *k;

        setenv("FAKE_CUDA_MS_PER_GIB", "10000", 1);
        k = kept_start(is_host ? &large : &two_tenants);
        for (unsigned i = 0; i < 2; i++) {
                growers[i].client = client_open(k->rig, "red", NULL);
                ck_assert_int_eq(pthread_create(&growers[i].thread, NULL, grow, &growers[i]), 0);
        }
        ck_assert(WAIT_FOR(rig_count(k->rig).bytes_pending > growers[0].n_bytes ||
                                   rig_count(k->rig).n_blocks > 0,
                           SETTLE_MS));
        kept_restart(k, signals[_i]);
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(pthread_join(growers[i].thread, NULL), 0);
                ck_assert_int_eq(growers[i].r, 0);
                block_fill(growers[i].client, growers[i].p, growers[i].n_bytes, i);
        }
        for (unsigned i = 0; i < 2; i++) {
                ck_assert(block_has(growers[i].client, growers[i].p, growers[i].n_bytes, i));
                ck_assert_ok(bfc_free(growers[i].client, growers[i].p));
                bfc_disconnect(growers[i].client);
        }
        kept_stop(k);
        unsetenv("FAKE_CUDA_MS_PER_GIB");
}

/* A malloc that waits for room, and an attach that waits for a name, wait on with the next
 * daemon. */
LOOP_TEST(waiting_requests_continue_to_wait, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct waiter waiter = { .client = client_open(k->rig, "red", NULL) };
        struct waiter attacher = { .client = waiter.client, .attaches = true };
        bfc_client *other = client_open(k->rig, "red", NULL);
        void *large, *late;

        ck_assert_ok(bfc_malloc_flags(other, NULL, 40 * MIB, BFC_WHOLE, &large));
        ck_assert_int_eq(pthread_create(&waiter.thread, NULL, wait_for_it, &waiter), 0);
        ck_assert_int_eq(pthread_create(&attacher.thread, NULL, wait_for_it, &attacher), 0);
        ck_assert(WAIT_FOR(rig_n_waiting(k->rig, NULL) == 1, SETTLE_MS));
        kept_restart(k, signals[_i]);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), BACK_MS));
        ck_assert(WAIT_FOR(rig_n_waiting(k->rig, NULL) == 1, SETTLE_MS));
        ck_assert_ok(bfc_free(other, large));
        ck_assert_int_eq(pthread_join(waiter.thread, NULL), 0);
        ck_assert_int_eq(waiter.r, 0);
        ck_assert_ok(bfc_malloc_flags(other, NULL, MIB, BFC_WHOLE, &late));
        ck_assert_ok(bfc_publish(other, late, "late"));
        ck_assert_int_eq(pthread_join(attacher.thread, NULL), 0);
        ck_assert_int_eq(attacher.r, 0);
        bfc_disconnect(other);
        bfc_disconnect(waiter.client);
        kept_stop(k);
}

/* Of the one request that waits for memory; 0: there is none. */
static uint64_t waiting_number(struct kept *k, const char *key)
{
        json_t *rows = ctl_json(k->rig->admin_socket, WORDS("--json", "waiting"));
        json_t *number = json_object_get(json_array_get(rows, 0), key);
        uint64_t ret = number ? (uint64_t)json_integer_value(number) : 0;

        ck_assert_uint_le(json_array_size(rows), 1);
        json_decref(rows);
        return ret;
}

static void *wait_in_vain(void *arg)
{
        struct waiter *w = arg;
        struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                              .flags = BFC_WHOLE,
                                              .wait_ms = 500 };

        w->r = bfc_malloc_with(w->client, 40 * MIB, &options, &w->p);
        snprintf(w->error, sizeof(w->error), "%s", bfc_last_error());
        __atomic_store_n(&w->is_over, true, __ATOMIC_RELEASE);
        return NULL;
}

/* A restart extends no wait: the request asks the next daemon for what is left. At its end it is refused with the
 * usual sentence. */
LOOP_TEST(a_restart_extends_no_wait, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct waiter waiter = { .client = client_open(k->rig, "red", NULL) };
        bfc_client *other = client_open(k->rig, "red", NULL);
        uint64_t wait_ms = 0;
        void *large;

        ck_assert_ok(bfc_malloc_flags(other, NULL, 40 * MIB, BFC_WHOLE, &large));
        ck_assert_int_eq(pthread_create(&waiter.thread, NULL, wait_for_it, &waiter), 0);
        ck_assert(WAIT_FOR(waiting_number(k, "waited_ms") >= 100, SETTLE_MS));
        ck_assert_uint_eq(waiting_number(k, "wait_ms"), 60000);
        kept_restart(k, signals[_i]);
        ck_assert(WAIT_FOR((wait_ms = waiting_number(k, "wait_ms")) > 0, BACK_MS));
        ck_assert_uint_le(wait_ms, 60000 - 100);
        ck_assert_ok(bfc_free(other, large));
        ck_assert_int_eq(pthread_join(waiter.thread, NULL), 0);
        ck_assert_int_eq(waiter.r, 0);

        ck_assert_int_eq(pthread_create(&waiter.thread, NULL, wait_in_vain, &waiter), 0);
        ck_assert(WAIT_FOR(waiting_number(k, "wait_ms") > 0 ||
                                   __atomic_load_n(&waiter.is_over, __ATOMIC_ACQUIRE),
                           SETTLE_MS));
        kept_restart(k, signals[_i]);
        ck_assert_int_eq(pthread_join(waiter.thread, NULL), 0);
        ck_assert_int_eq(waiter.r, -EDQUOT);
        ck_assert_msg(strstr(waiter.error, "tenant 'red' is at its limit in 'train'"), "%s", waiter.error);
        bfc_disconnect(other);
        bfc_disconnect(waiter.client);
        kept_stop(k);
}

static void *wait_cancellably(void *arg)
{
        struct waiter *w = arg;
        struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                              .flags = BFC_WHOLE,
                                              .wait_ms = 600000,
                                              .cancel_fd = w->cancel_fd };

        w->r = bfc_malloc_with(w->client, 40 * MIB, &options, &w->p);
        return NULL;
}

/* cancel_fd ends a wait while there is no daemon. The next one gets no request, and the session continues. */
LOOP_TEST(a_wait_is_cancelled_without_a_daemon, 2)
{
        struct kept *k = kept_start(&two_tenants);
        struct waiter waiter = { .client = client_open(k->rig, "red", NULL),
                                 .cancel_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) };
        bfc_client *other = client_open(k->rig, "red", NULL);
        void *large, *small;

        ck_assert_int_gt(waiter.cancel_fd, 0);
        ck_assert_ok(bfc_malloc_flags(other, NULL, 40 * MIB, BFC_WHOLE, &large));
        ck_assert_int_eq(pthread_create(&waiter.thread, NULL, wait_cancellably, &waiter), 0);
        ck_assert(WAIT_FOR(waiting_number(k, "wait_ms") > 0, SETTLE_MS));
        kept_away(k, signals[_i]);
        ck_assert_int_eq(eventfd_write(waiter.cancel_fd, 1), 0);
        ck_assert_int_eq(pthread_join(waiter.thread, NULL), 0);
        ck_assert_int_eq(waiter.r, -EINTR);
        kept_back(k);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 2), BACK_MS));
        ck_assert_uint_eq(rig_n_waiting(k->rig, NULL), 0);
        ck_assert_ok(bfc_malloc(waiter.client, MIB, &small));
        close(waiter.cancel_fd);
        bfc_disconnect(other);
        bfc_disconnect(waiter.client);
        kept_stop(k);
}

/* ---- another config ---------------------------------------------------------------- */

static void write_config(struct kept *k, const struct rig_config *config)
{
        rig_rewrite_config(k->rig, config);
        k->rig->n_fds = 0; /* with other tenants there are others */
}

LOOP_TEST(a_restart_with_another_limit, 2)
{
        static const struct rig_config limits[] = {
                { .tenants = TENANT("red", "@UID@", "train, limit: 16MiB") },
                { .tenants = TENANT("green", "@UID@", "train, limit: 8MiB, reserve: 8MiB")
                          TENANT("red", "@UID@", "train, limit: 96MiB") },
        };
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL);
        void *p, *more = NULL;
        int r;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 30 * MIB, BFC_WHOLE, &p));
        block_fill(client, p, 30 * MIB, 5);
        kept_away(k, SIGTERM);
        write_config(k, &limits[_i]);
        kept_back(k);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), BACK_MS));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_limit, _i == 0 ? 16 * MIB : 96 * MIB);
        ck_assert_uint_eq(client_usage(client, NULL).bytes_in_use, 30 * MIB);
        r = bfc_malloc_flags(client, NULL, 50 * MIB, BFC_WHOLE, &more);
        ck_assert_int_eq(r, _i == 0 ? -EDQUOT : 0);
        ck_assert(_i == 1 || has_stats(bfc_last_error()));
        ck_assert(block_has(client, p, 30 * MIB, 5));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_free(client, more));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        bfc_disconnect(client);
        kept_stop(k);
}

/* An invalid config costs time, and no memory. */
LOOP_TEST(a_restart_with_an_invalid_config, 2)
{
        static const struct rig_config empty = { .tenants = "  - name: red\n    match: everybody\n" };
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL);
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        block_fill(client, p, 10 * MIB, 5);
        kept_away(k, signals[_i]);
        write_config(k, &empty);
        ck_assert_int_eq(stand_in_hold(k->manager, false), 0);
        ck_assert(WAIT_FOR(kept_count_logged(k, "match must be a mapping") >= 2, BACK_MS));
        k->n_bad = kept_state(k).n_bad;
        ck_assert_int_eq(WEXITSTATUS(kept_state(k).status), 78);
        write_config(k, &two_tenants);
        kept_ready(k);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), BACK_MS));
        ck_assert(block_has(client, p, 10 * MIB, 5));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        k->n_bad = kept_state(k).n_bad;
        k->rig->forgiven = "error:";
        kept_stop(k);
}

/* A client keeps its memory until it frees it; new clients are refused. */
LOOP_TEST(a_restart_without_the_tenant, 2)
{
        static const struct rig_config without = {
                .tenants = TENANT("blue", "@UID@", "train, limit: 32MiB, reserve: 4MiB"),
        };
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL);
        void *p, *other, *more;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 5 * MIB, BFC_WHOLE, &other));
        block_fill(client, p, 10 * MIB, 5);
        kept_away(k, signals[_i]);
        write_config(k, &without);
        kept_back(k);
        ck_assert(WAIT_FOR(kept_all_are(k, "live", 1), BACK_MS));
        ck_assert_int_eq(client_refused(k->rig, "red", NULL), -EACCES);
        ck_assert(block_has(client, p, 10 * MIB, 5));
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 20 * MIB, BFC_WHOLE, &more), -EDQUOT);
        ck_assert_ok(bfc_free(client, other));
        kept_restart(k, signals[_i]); /* it is still gone, and still there */
        ck_assert(block_has(client, p, 10 * MIB, 5));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        kept_stop(k);
}

/* Its blocks cannot be kept. A client with blocks there is told so once; other clients continue. */
LOOP_TEST(a_restart_without_the_partition, 2)
{
        static const struct rig_config two_partitions = {
                .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                              "      - {name: other, limit: 64MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 32MiB")
                        TENANT("blue", "@UID@", "other, limit: 32MiB"),
        };
        static const struct rig_config one = {
                .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 32MiB"),
        };
        struct kept *k = kept_start(&two_partitions);
        bfc_client *client = client_open(k->rig, "red", NULL), *victim = client_open(k->rig, "blue", NULL);
        void *p, *lost;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        ck_assert_ok(bfc_malloc_flags(victim, NULL, 10 * MIB, BFC_WHOLE, &lost));
        block_fill(client, p, 10 * MIB, 5);
        block_fill(victim, lost, 10 * MIB, 6);
        k->rig->forgiven = "other";
        kept_away(k, signals[_i]);
        write_config(k, &one);
        kept_back(k);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        ck_assert_int_lt(bfc_malloc_flags(victim, NULL, 10 * MIB, BFC_WHOLE, &lost), 0);
        printf("# the victim is told: %s\n", bfc_last_error());
        ck_assert(kept_logged(k, "'other'"));
        bfc_disconnect(victim);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        kept_discard(k);
}

/* It gave up before the next daemon started. bfc_disconnect() releases its blocks, which would otherwise
 * stay until its process exits. */
TEST(a_client_that_gave_up_disconnects)
{
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client;
        void *p, *more;

        setenv("BFC_RETURN_MS", "100", 1);
        client = client_open(k->rig, "red", NULL);
        unsetenv("BFC_RETURN_MS");
        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        kept_away(k, SIGKILL);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &more), -ECONNRESET);
        ck_assert_msg(strstr(bfc_last_error(), "within 100 ms"), "%s", bfc_last_error());
        kept_back(k);
        ck_assert(kept_all_are(k, "suspended", 1));
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_count(k->rig).n_blocks, 0);
        kept_stop(k);
}

/* ---- statistics ------------------------------------------------------------------------ */

/* One daemon after the other crashes without any session: lifetime peaks and refusals stay, and a reset sets only the
 * peaks since then. */
TEST(statistics_survive_without_sessions)
{
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL);
        char *tenants, *partitions, *now;
        void *p, *more;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 60 * MIB, BFC_WHOLE, &more), -EDQUOT);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, SETTLE_MS));
        tenants = kept_tenants(k);
        partitions = kept_partitions(k);
        ck_assert_msg(strstr(tenants, "refused 1 0 "), "%s", tenants);
        ck_assert_msg(strstr(tenants, " ever 10485760 "), "%s", tenants);
        ck_assert_msg(strstr(partitions, "train: ever 10485760 "), "%s", partitions);
        for (unsigned i = 0; i < 2; i++) {
                kept_restart(k, SIGKILL);
                now = kept_tenants(k);
                ck_assert_str_eq(now, tenants);
                free(now);
                now = kept_partitions(k);
                ck_assert_str_eq(now, partitions);
                free(now);
        }
        ck_assert_int_eq(ctl(k->rig->admin_socket, WORDS("reset-peaks"), NULL, NULL), 0);
        now = kept_tenants(k);
        ck_assert_str_eq(now, tenants);
        free(now);
        free(tenants);
        free(partitions);
        kept_stop(k);
}

/* ---- unreclaimed memory ---------------------------------------------------------------- */

/* A process keeps an fd of it. The daemon is killed twice meanwhile. */
TEST(unreclaimed_memory_stays_charged)
{
        struct kept *k = kept_start(&two_tenants);
        struct raw *raw = raw_connect(k->rig->socket, "red");
        Bfcd__Block block;
        uint64_t n_bytes;
        int fd;

        k->rig->forgiven = "unreclaimed";
        ck_assert_ptr_nonnull(raw);
        ck_assert_int_eq(raw_malloc(raw, 0, 16 * MIB, &block), 0);
        ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        n_bytes = raw->extents[0].n_bytes;
        fd = dup(raw->extents[0].fd);
        session_end(raw);
        if (rig_device() == ON_CUDA_IPC) /* there are no fds */
                n_bytes = 0;
        else
                ck_assert_int_ge(fd, 0);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == n_bytes &&
                                   rig_stats(k->rig, "red", "train").bytes_unreclaimed == n_bytes,
                           SETTLE_MS));
        if (n_bytes > 0) /* the device confirmed it */
                ck_assert(WAIT_FOR(rig_logged(k->rig, "did not return memory"), SETTLE_MS));
        for (int i = 0; i < 2; i++) {
                kept_restart(k, SIGKILL);
                ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), n_bytes);
                ck_assert(
                        WAIT_FOR(rig_stats(k->rig, "red", "train").bytes_unreclaimed == n_bytes, SETTLE_MS));
        }
        close(fd);
        ck_assert(WAIT_FOR(rig_charge(k->rig, "red", "train") == 0, SETTLE_MS));
        kept_stop(k);
}

/* ---- what is not kept ------------------------------------------------------------------ */

/* `bfcd --stop-keepers`, which has this status and prints this. */
static void stop_keepers(const struct kept *k, int status, const char *part)
{
        const char *const argv[] = { k->argv[0], "--stop-keepers", k->rig->admin_socket, NULL };
        char *out, *err;

        ck_assert_int_eq(program_run(argv, &out, &err), status);
        text_has(status == 0 ? out : err, part);
        free(status == 0 ? err : out);
}

static int knock(const struct kept *k)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        ck_assert_int_ge(fd, 0);
        snprintf(address.sun_path, sizeof(address.sun_path), "%.80s/keepers/host", k->rig->folder);
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                return fd;
        ck_assert_int_eq(errno, EAGAIN);
        close(fd);
        return -1;
}

/* A keeper that takes no connection makes a start fail, and keeps what it has for the next one. */
LOOP_TEST(a_start_that_fails_ends_no_keeper, rig_device() == ON_HOST)
{
        struct kept *k = kept_start(&two_tenants);
        const char *const argv[] = { k->argv[0], "--config", k->rig->config_path, NULL };
        bfc_client *client = client_open(k->rig, "red", NULL);
        int waiting[16], n = 0;
        pid_t keeper;
        char *err;
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        block_fill(client, p, 10 * MIB, 5);
        kept_away(k, SIGKILL);
        keeper = keeper_pid_in(k->rig->folder, "host");
        ck_assert_int_eq(kill(keeper, SIGSTOP), 0);
        while (n < 16 && (waiting[n] = knock(k)) >= 0)
                n++;
        ck_assert_int_eq(program_run(argv, NULL, &err), 1);
        text_has(err, "it does not answer");
        while (n > 0)
                close(waiting[--n]);
        ck_assert_int_eq(kill(keeper, SIGCONT), 0);
        kept_back(k);
        ck_assert_int_eq(keeper_pid_in(k->rig->folder, "host"), keeper);
        ck_assert(block_has(client, p, 10 * MIB, 5));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        kept_stop(k);
}

/* Keepers that are stopped lose all: a client that resumes is told so. */
TEST(stopped_keepers_discard_all_blocks)
{
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL), *fresh;
        void *p, *more;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        block_fill(client, p, 10 * MIB, 5);
        stop_keepers(k, 1, "another bfcd runs there");
        kept_away(k, SIGTERM);
        stop_keepers(k, 0, " ended");
        stop_keepers(k, 0, "no keepers run");
        ck_assert_int_eq(keeper_pid_in(k->rig->folder, "host"), 0);
        kept_back(k);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &more), -ECONNRESET);
        ck_assert_msg(strstr(bfc_last_error(), "restarted without it"), "%s", bfc_last_error());
        fresh = client_open(k->rig, "red", NULL);
        ck_assert_ok(bfc_malloc(fresh, MIB, &p));
        bfc_disconnect(fresh);
        bfc_disconnect(client);
        kept_stop(k);
}

/* The keeper of the GPU ends while the daemon is away: its sessions are told so, and what they had is no longer charged
 * when they are gone. */
LOOP_TEST(a_lost_keeper_discards_its_blocks, rig_device() == ON_HOST ? 0 : 1)
{
        struct kept *k = kept_start(&two_tenants);
        bfc_client *client = client_open(k->rig, "red", NULL), *fresh;
        void *p, *more;
        pid_t keeper;

        ck_assert_ok(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &p));
        k->rig->forgiven = "the keeper does not have all of its extents";
        kept_away(k, SIGKILL);
        keeper = keeper_pid_in(k->rig->folder, "cuda:0");
        ck_assert_int_gt(keeper, 0);
        ck_assert_int_eq(kill(keeper, SIGKILL), 0);
        ck_assert(WAIT_FOR(keeper_pid_in(k->rig->folder, "cuda:0") == 0, SETTLE_MS));
        kept_back(k);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 10 * MIB, BFC_WHOLE, &more), -ECONNRESET);
        fresh = client_open(k->rig, "red", NULL);
        ck_assert_ok(bfc_malloc(fresh, MIB, &p));
        bfc_disconnect(fresh);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(k->rig).n_sessions == 0, SETTLE_MS));
        kept_restart(k, SIGKILL);
        ck_assert_uint_eq(rig_charge(k->rig, "red", "train"), 0);
        kept_stop(k);
}
