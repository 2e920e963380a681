/* A daemon inherits the state of its predecessor: all blocks and statistics are kept, sessions are
 * resumed with what they have, and invalid resume requests are refused.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/session/command.h"
#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/session/resume.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"
#include "daemon/memory/inherit.h"
#include "daemon/base/process.h"
#include "device/host_free.h"
#include "tests/fake_device.h"
#include "tests/fake_store.h"
#include "tests/peer.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/checks.h"

/* train: what tenant a may have of it. */
#define CONFIG(train)                                                                                        \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 256MiB\n"                                                                                 \
        "    partitions:\n"                                                                                  \
        "      - {name: train, limit: 96MiB}\n"                                                              \
        "      - {name: warm, limit: 16MiB, growth: preallocate}\n"                                          \
        "tenants:\n"                                                                                         \
        "  - name: a\n"                                                                                      \
        "    match: {uid: 1}\n"                                                                              \
        "    quotas:\n"                                                                                      \
        "      - {partition: train, limit: " train "}\n"                                                     \
        "      - {partition: warm, limit: 8MiB}\n"                                                           \
        "  - name: b\n"                                                                                      \
        "    match: {uid: 2}\n"                                                                              \
        "    quotas: [{partition: train, limit: 48MiB, reserve: 16MiB}]\n"
static const char config_text[] = CONFIG("48MiB");

static const struct config_machine *machine; /* with devices: a GPU; NULL: the host */
static struct devices *devices;
static struct store *store;
static struct broker *b;
static struct config *config;
static int n_fds_before;

static void setup(void)
{
        n_fds_before = suite_count_fds();
        store = fake_store_new();
        b = peer_broker_kept(config_text, machine, devices, store, &config);
}

static void teardown(void)
{
        b = peer_broker_free(b, config);
        store = fake_store_free(store);
        devices = devices_free(devices);
        machine = NULL;
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

FIXTURE(inherit, setup, teardown);

static void check(void)
{
        const char *why = "";

        ck_assert_msg(broker_check(b, &why) == 0, "%s", why);
        ck_assert_msg(shared_check(b, &why) == 0, "%s", why);
        ck_assert_msg(trim_check(b, &why) == 0, "%s", why);
        ck_assert_msg(retire_check(b, &why) == 0, "%s", why);
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++)
                        ck_assert_msg(usage_check(b->tenants[i].quotas[k], &why) == 0, "%s", why);
}

/* What a client knows of itself. */
struct client {
        uid_t uid;
        uint64_t id;
        uint8_t secret[16];
        uint64_t blocks[512], shared[16];
        uint32_t counts[16];
        size_t n_blocks, n_shared;
        uint64_t extents[512];
        size_t n_extents;
        uint64_t splitting, split_at; /* a Split that was not answered; 0: none */
        struct peer *peer;
};

/* From its replies, which are forgotten. */
static void note_replies(struct client *c)
{
        for (size_t i = 0; i < c->peer->n_replies; i++) {
                const Bfcd__Reply *r = c->peer->replies[i];

                if (r->body_case == BFCD__REPLY__BODY_BLOCK)
                        c->blocks[c->n_blocks++] = r->block->block_id;
                for (size_t k = 0; r->body_case == BFCD__REPLY__BODY_EXTENTS && k < r->extents->n_extents;
                     k++)
                        c->extents[c->n_extents++] = r->extents->extents[k]->extent_id;
                ck_assert(c->n_blocks < 512 && c->n_extents < 512);
        }
        peer_forget_replies(c->peer);
        if (c->peer->to_ack > c->peer->session->delivery.acked_sequence)
                ck_assert_int_eq(peer_ack(c->peer, c->peer->to_ack), 0);
}

static void come_in(struct client *c, uid_t uid)
{
        *c = (struct client){ .uid = uid, .peer = peer_new(b, uid, false) };
        c->peer->wants_return = c->peer->wants_events = true;
        ck_assert_int_eq(peer_error(c->peer, peer_hello(c->peer, "", "")), 0);
        ck_assert(ledger_session_at(b->ledger, c->peer->session->index)->can_resume);
        c->id = c->peer->session->id;
        memcpy(c->secret, c->peer->secret, sizeof(c->secret));
        note_replies(c);
}

static uint64_t must_malloc(struct client *c, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_malloc(c->peer, partition, n_bytes);
        size_t n_before = c->n_blocks;

        for (int i = 0; i < 4 && !peer_reply(c->peer, id); i++) {
                peer_settle(b);
                if (c->peer->to_ack > c->peer->session->delivery.acked_sequence)
                        ck_assert_int_eq(peer_ack(c->peer, c->peer->to_ack), 0);
        }
        ck_assert_int_eq(peer_error(c->peer, id), 0);
        note_replies(c);
        ck_assert_uint_eq(c->n_blocks, n_before + 1);
        return c->blocks[n_before];
}

static void must_free(struct client *c, uint64_t block)
{
        ck_assert_int_eq(peer_error(c->peer, peer_free_block(c->peer, block)), 0);
        for (size_t i = 0; i < c->n_blocks; i++)
                if (c->blocks[i] == block)
                        c->blocks[i] = c->blocks[--c->n_blocks];
        note_replies(c);
}

/* The process ends, and another is started; with another config, if not NULL. */
static void start_anew_with(const char *text)
{
        fake_store_die(store);
        peer_broker_leave(b, config);
        b = peer_broker_kept(text ? text : config_text, machine, devices, store, &config);
        (void)store_drop_rest(store);
        check();
}

static void drop(struct client *c)
{
        c->peer = peer_drop(c->peer);
}

static uint64_t say_hello(struct client *c)
{
        c->peer = peer_new(b, c->uid, false);
        c->peer->wants_return = c->peer->wants_events = true;
        c->peer->return_id = c->id;
        memcpy(c->peer->secret, c->secret, sizeof(c->secret));
        return peer_hello(c->peer, "", "");
}

static int send_held(struct client *c, Bfcd__Held *held, uint64_t *ret_id)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;

        r.body_case = BFCD__REQUEST__BODY_HELD;
        r.held = held;
        return peer_send(c->peer, &r, ret_id);
}

/* All that it knows, in two messages. */
static int hold_on(struct client *c, uint64_t *ret_id)
{
        Bfcd__Held first = BFCD__HELD__INIT, last = BFCD__HELD__INIT;
        Bfcd__HeldShared shared[16], *pointers[16];
        Bfcd__Split splitting = BFCD__SPLIT__INIT;
        int r;

        first.n_extent_ids = c->n_extents;
        first.extent_ids = c->extents;
        first.n_block_ids = c->n_blocks / 2;
        first.block_ids = c->blocks;
        r = send_held(c, &first, ret_id);
        if (r < 0)
                return r;
        ck_assert_int_eq(peer_error(c->peer, *ret_id), 0);
        for (size_t i = 0; i < c->n_shared; i++) {
                bfcd__held_shared__init(&shared[i]);
                shared[i].block_id = c->shared[i];
                shared[i].count = c->counts[i];
                pointers[i] = &shared[i];
        }
        last.n_block_ids = c->n_blocks - c->n_blocks / 2;
        last.block_ids = c->blocks + c->n_blocks / 2;
        last.n_shared = c->n_shared;
        last.shared = pointers;
        splitting.block_id = c->splitting;
        splitting.n_bytes = c->split_at;
        if (c->splitting != 0)
                last.splitting = &splitting;
        last.is_last = true;
        return send_held(c, &last, ret_id);
}

static int settle(struct client *c)
{
        const char *why = NULL;
        int r = SESSION_MORE;

        while (r == SESSION_MORE)
                r = resume_step(c->peer->session, 1, &why);
        ck_assert((r < 0) == (why != NULL));
        return r;
}

static void reconnect_once(struct client *c)
{
        uint64_t id = say_hello(c);

        ck_assert_int_eq(peer_error(c->peer, id), 0);
        ck_assert_uint_eq(peer_reply(c->peer, id)->hello->session_id, c->id);
        ck_assert_mem_eq(c->peer->secret, c->secret, sizeof(c->secret));
        ck_assert_str_eq(session_state_name(c->peer->session), "resuming");
        check();
        ck_assert_int_eq(hold_on(c, &id), 0);
        ck_assert_int_eq(peer_error(c->peer, id), -1); /* not before all is settled */
        ck_assert_int_eq(settle(c), 0);
        ck_assert_int_eq(peer_error(c->peer, id), 0);
        ck_assert_str_eq(session_state_name(c->peer->session), "live");
        note_replies(c);
        check();
}

/* All statistics of sessions and operators, except those of this process alone. */
struct stats {
        uint64_t charged, in_use, requested, n_blocks, n_sessions, lifetime_charged, lifetime_in_use;
        uint64_t pool_charged, pool_committed;
        uint64_t index; /* no padding: they are compared as bytes */
};

static struct stats look_at(size_t tenant, size_t quota)
{
        const struct quota *q = b->tenants[tenant].quotas[quota];

        return (struct stats){ q->account.charged_bytes,
                               q->all.bytes_in_use,
                               q->all.bytes_requested,
                               q->all.n_blocks,
                               q->sessions.n,
                               quota_life(q)->peak_reserved,
                               ledger_quota_at(b->ledger, q->index)->life.peak_in_use,
                               q->partition->pool.charged_bytes,
                               q->partition->pool.committed_bytes,
                               q->index };
}

/* ---- a broker ------------------------------------------------------------ */

TEST(inherited_statistics)
{
        struct stats before[3], after;
        struct client a, c;
        uint64_t block;

        come_in(&a, 1);
        come_in(&c, 2);
        for (unsigned i = 0; i < 20; i++)
                must_malloc(&a, 0, 400 * (i + 1) * (i + 1) * (i + 1));
        block = must_malloc(&a, 0, 9 * MIB);
        must_malloc(&a, 1, 3 * MIB);
        must_malloc(&c, 0, 5 * MIB + 1);
        must_free(&a, block);
        for (unsigned i = 0; i < 20; i += 3)
                must_free(&a, a.blocks[i / 3]);
        check();
        before[0] = look_at(0, 0);
        before[1] = look_at(0, 1);
        before[2] = look_at(1, 0);
        for (unsigned round = 0; round < 3; round++) {
                drop(&a);
                drop(&c);
                start_anew_with(NULL);
                for (size_t i = 0; i < 3; i++) {
                        after = look_at(i / 2, i % 2);
                        ck_assert_mem_eq(&after, &before[i], sizeof(after));
                }
                ck_assert_uint_eq(b->suspended.n, 2);
                reconnect_once(&a);
                reconnect_once(&c);
                ck_assert_uint_eq(b->suspended.n, 0);
                for (size_t i = 0; i < 3; i++) {
                        after = look_at(i / 2, i % 2);
                        ck_assert_mem_eq(&after, &before[i], sizeof(after));
                }
        }
        block = must_malloc(&a, 0, 1000);
        must_free(&a, block);
        peer_free(a.peer);
        peer_free(c.peer);
}

/* ---- memory by handles ----------------------------------------------------- */

static const char gpu_text[] = "devices:\n"
                               "  - id: cuda:0\n"
                               "    headroom: 0\n"
                               "    partitions:\n"
                               "      - {name: train, limit: 96MiB, growth: on-demand, share: cuda-ipc}\n"
                               "      - {name: warm, limit: 16MiB, growth: preallocate, share: cuda-ipc}\n"
                               "tenants:\n"
                               "  - name: a\n"
                               "    match: {uid: 1}\n"
                               "    quotas:\n"
                               "      - {partition: train, limit: 48MiB}\n"
                               "      - {partition: warm, limit: 8MiB}\n";

static struct fake_device gpu;

/* Also when a daemon starts: the previous one has let go of it. */
static int find_gpu(void *userdata, const char *admin_socket, const char *id, struct config_gpu *ret,
                    char *ret_sentence, size_t n_sentence)
{
        (void)userdata;
        (void)admin_socket;
        (void)id;
        (void)ret_sentence;
        (void)n_sentence;
        gpu.device.is_ending = false;
        gpu.n_live = 0;
        gpu.live_bytes = 0;
        *ret = (struct config_gpu){ .uuid = { 0xaa }, .bytes_total = 128 * MIB, .bytes_free = 128 * MIB };
        return 0;
}

static void start_on_gpu(void)
{
        static const struct config_machine with_gpu = { .look = find_gpu };

        b = peer_broker_free(b, config);
        store = fake_store_free(store);
        store = fake_store_new();
        fake_device_init(&gpu, 2 * MIB);
        fake_device_keep(&gpu);
        gpu.facts.bytes_total = 128 * MIB;
        gpu.facts.uuid[0] = 0xaa;
        ck_assert_int_eq(devices_new(DEVICES_OWN, &devices), 0);
        ck_assert_int_eq(devices_put(devices, "cuda:0", &gpu.device), 0);
        machine = &with_gpu;
        b = peer_broker_kept(gpu_text, machine, devices, store, &config);
}

/* The keeper has their extents; the session continues with what it has mapped, and gets nothing twice. */
TEST(memory_by_handles_is_inherited)
{
        struct stats before[2], after;
        uint64_t small;
        struct client a;
        size_t n_extents;

        start_on_gpu();
        come_in(&a, 1);
        small = must_malloc(&a, 0, 1000);
        must_malloc(&a, 0, 10 * MIB);
        must_malloc(&a, 1, 3 * MIB);
        before[0] = look_at(0, 0);
        before[1] = look_at(0, 1);
        n_extents = a.n_extents;
        for (unsigned round = 0; round < 3; round++) {
                drop(&a);
                start_anew_with(gpu_text);
                for (size_t i = 0; i < 2; i++) {
                        after = look_at(0, i);
                        ck_assert_mem_eq(&after, &before[i], sizeof(after));
                }
                ck_assert_uint_eq(gpu.live_bytes, before[0].charged + before[1].charged);
                reconnect_once(&a);
        }
        must_free(&a, small);
        must_malloc(&a, 0, 2000);
        ck_assert_uint_eq(a.n_extents, n_extents);
        must_malloc(&a, 0, 15 * MIB);
        must_malloc(&a, 0, 16 * MIB); /* an extent of its own */
        ck_assert_uint_eq(a.n_extents, n_extents + 1);
        peer_free(a.peer);
        check();
}

/* A keeper without one of its extents: the arena is closed, and the rest goes on. */
TEST(memory_by_handles_is_lost)
{
        uint64_t charged, id;
        struct client a;
        uint32_t extent = 0;
        int memory;

        start_on_gpu();
        come_in(&a, 1);
        must_malloc(&a, 0, 20 * MIB);
        must_malloc(&a, 1, 3 * MIB);
        charged = b->tenants[0].quotas[0]->account.charged_bytes;
        while (ledger_extent_at(b->ledger, extent)->n_bytes != 20 * MIB)
                extent++;
        memory = (int)ledger_extent_at(b->ledger, extent)->store_key;
        ck_assert_int_eq(ftruncate(memory, 0), 0);
        drop(&a);
        start_anew_with(gpu_text);
        ck_assert_uint_eq(b->suspended.n, 0);
        ck_assert_uint_eq(b->tenants[0].n_quotas, 2);
        ck_assert_uint_eq(look_at(0, 0).charged + look_at(0, 1).charged, charged + 8 * MIB);
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), EIO);
        peer_free(a.peer);
        a.peer = peer_new(b, 1, false);
        session_free(a.peer->session);
        a.peer->session = b->sessions.table[b->suspended.records[0].index];
        peer_free(a.peer);
        start_anew_with(gpu_text); /* no session has it */
        ck_assert_uint_eq(look_at(0, 0).charged + look_at(0, 1).charged, 8 * MIB);
        close(memory);
        check();
}

/* No client resumes it: it ends like a session that has hung up. */
TEST(dead_sessions_are_released)
{
        struct client a;

        come_in(&a, 1);
        must_malloc(&a, 0, 3 * MIB);
        drop(&a);
        start_anew_with(NULL);
        ck_assert_uint_eq(b->sessions.n, 1);
        a.peer = peer_new(b, 2, false);
        session_free(a.peer->session);
        a.peer->session = b->sessions.table[b->suspended.records[0].index];
        ck_assert_str_eq(session_state_name(a.peer->session), "suspended");
        peer_free(a.peer);
        ck_assert_uint_eq(b->suspended.n, 0);
        check();
}

/* The exit of its process ends a session that no client resumes. Where the daemon cannot watch the process, it ends the
 * session after the time of a quarantine. */
LOOP_TEST(suspended_sessions_of_watched_processes_stay, 2)
{
        bool is_watched = _i == 0;
        struct session *s;
        struct client a;

        come_in(&a, 1);
        must_malloc(&a, 0, 3 * MIB);
        drop(&a);
        start_anew_with(NULL);
        a.peer = peer_new(b, 2, false);
        session_free(a.peer->session);
        a.peer->session = s = b->sessions.table[b->suspended.records[0].index];
        session_set_watched(s, is_watched);
        session_attach(s, s->ops, s->userdata, false);
        ck_assert_uint_eq(session_deadline_ms(s) != 0, !is_watched);
        session_expire(s);
        ck_assert_str_eq(session_state_name(s), is_watched ? "suspended" : "closing");
        ck_assert_uint_eq(b->suspended.n, is_watched);
        peer_free(a.peer);
        ck_assert_uint_eq(b->tenants[0].quotas[0]->all.n_blocks, 0);
        check();
}

/* From then on, also for a successor of a daemon that was killed before it released the memory. */
LOOP_TEST(sessions_that_end_cannot_be_resumed, 3)
{
        struct client a;
        uint32_t index;

        come_in(&a, 1);
        must_malloc(&a, 0, 3 * MIB);
        index = a.peer->session->index;
        if (_i == 0)
                session_close(a.peer->session, "a goodbye");
        else if (_i == 1)
                ck_assert_int_eq(session_evict(a.peer->session, " by a test", "evicted"), 0);
        else
                (void)session_hang_up(a.peer->session, NULL);
        ck_assert(!ledger_session_at(b->ledger, index)->can_resume);
        peer_free(a.peer);
        check();
}

/* Sessions that are resumed keep their places, whatever the next config says, and their users are known. */
TEST(resumed_sessions_keep_their_places)
{
        struct client a[3], c;
        struct peer *late;
        char *text = NULL;

        for (size_t i = 0; i < 3; i++) {
                come_in(&a[i], 1);
                must_malloc(&a[i], 0, 1000);
        }
        come_in(&c, 2);
        must_malloc(&c, 0, 1000);
        for (size_t i = 0; i < 3; i++)
                drop(&a[i]);
        drop(&c);
        ck_assert_ptr_null(restore_suspended_tenant(b, 1));
        ck_assert_int_gt(asprintf(&text, "max_sessions: 4\n%s", config_text), 0);
        start_anew_with(text);
        free(text);
        ck_assert_uint_eq(b->sessions.n_clients, 4);
        ck_assert_uint_eq(b->sessions.n_promised, 1); /* each tenant has two places for sure */
        ck_assert_str_eq(restore_suspended_tenant(b, 1)->name, "a");
        ck_assert_str_eq(restore_suspended_tenant(b, 2)->name, "b");
        ck_assert(!restore_suspended_tenant(b, 0) && !restore_suspended_tenant(b, 3));
        late = peer_new(b, 2, false);
        ck_assert_int_eq(peer_error(late, peer_hello(late, "", "")), EDQUOT);
        peer_free(late);
        for (size_t i = 0; i < 3; i++)
                reconnect_once(&a[i]);
        reconnect_once(&c);
        ck_assert_ptr_null(restore_suspended_tenant(b, 1)); /* no suspended session is left */
        peer_free(a[0].peer);
        late = peer_new(b, 1, false);
        ck_assert_int_eq(peer_error(late, peer_hello(late, "", "")), EDQUOT); /* the place is the other's */
        peer_free(late);
        late = peer_new(b, 2, false);
        ck_assert_int_eq(peer_error(late, peer_hello(late, "", "")), 0);
        peer_free(late);
        peer_free(a[1].peer);
        peer_free(a[2].peer);
        peer_free(c.peer);
}

/* Blocks that the client does not list are freed. */
TEST(unlisted_blocks_are_freed)
{
        struct client a;
        uint64_t ids[3];

        come_in(&a, 1);
        for (unsigned i = 0; i < 3; i++)
                ids[i] = must_malloc(&a, 0, MIB);
        must_malloc(&a, 1, MIB);
        (void)peer_malloc(a.peer, 0, 30 * MIB); /* whose answer is lost */
        peer_settle(b);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 4);
        drop(&a);
        a.blocks[1] = a.blocks[--a.n_blocks];
        start_anew_with(NULL);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 4);
        reconnect_once(&a);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 2);
        ck_assert_int_eq(peer_error(a.peer, peer_free_block(a.peer, ids[1])), EINVAL);
        ck_assert_int_eq(peer_error(a.peer, peer_free_block(a.peer, ids[0])), 0);
        ck_assert_uint_eq(session_bytes_in_use(a.peer->session), 2 * MIB);
        peer_free(a.peer);
}

/* Asks for it again, where it was not answered. */
static uint64_t must_split(struct client *c, uint64_t block, uint64_t at)
{
        uint64_t id = peer_split(c->peer, block, at);

        ck_assert_int_eq(peer_error(c->peer, id), 0);
        id = peer_reply(c->peer, id)->split->block_id;
        c->blocks[c->n_blocks++] = id;
        c->splitting = 0;
        note_replies(c);
        return id;
}

/* A Split was done, or not, or done and answered; the client knows of the last only. */
LOOP_TEST(test_split_under_way, 3)
{
        struct client a;
        uint64_t block, high, id;

        come_in(&a, 1);
        block = must_malloc(&a, 0, 3 * MIB);
        (void)must_malloc(&a, 0, MIB);
        if (_i == 2)
                must_split(&a, block, MIB);
        else if (_i == 1)
                (void)peer_split(a.peer, block, MIB);
        a.splitting = _i == 2 ? 0 : block;
        a.split_at = MIB;
        drop(&a);
        start_anew_with(NULL);
        reconnect_once(&a);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, _i == 0 ? 2 : 3);
        ck_assert_uint_eq(session_bytes_in_use(a.peer->session), 4 * MIB);
        high = _i == 2 ? a.blocks[2] : must_split(&a, block, MIB);
        check();
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 3);
        must_free(&a, high);
        ck_assert_uint_eq(session_bytes_in_use(a.peer->session), 2 * MIB);

        /* A split-off block that is not listed is freed, also during another Split. */
        high = must_split(&a, block, 512 * 1024);
        a.n_blocks--;
        a.splitting = block;
        a.split_at = 256 * 1024;
        drop(&a);
        start_anew_with(NULL);
        reconnect_once(&a);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 2);
        id = peer_free_block(a.peer, high);
        ck_assert_int_eq(peer_error(a.peer, id), EINVAL);
        check();
        peer_free(a.peer);
}

/* ---- shared blocks ------------------------------------------------------- */

TEST(test_shared)
{
        struct client a, c;
        uint64_t id, block;

        come_in(&a, 1);
        come_in(&c, 1);
        block = must_malloc(&a, 0, MIB);
        ck_assert_int_eq(peer_error(a.peer, peer_publish(a.peer, block, "weights")), 0);
        id = peer_attach(c.peer, "weights", 0);
        ck_assert_int_eq(peer_error(c.peer, id), 0);
        note_replies(&c);
        ck_assert_int_eq(peer_error(c.peer, peer_attach(c.peer, "weights", 0)), 0);
        ck_assert_int_eq(peer_error(c.peer, peer_attach(c.peer, "weights", 0)), 0); /* and is lost */
        note_replies(&c);
        c.shared[0] = block;
        c.counts[0] = 2;
        c.n_shared = 1;
        drop(&a);
        drop(&c);
        start_anew_with(NULL);
        reconnect_once(&a); /* which does not know that it was published */
        ck_assert_int_eq(peer_error(a.peer, peer_publish(a.peer, block, "weights")), 0);
        ck_assert_int_eq(peer_error(a.peer, peer_publish(a.peer, block, "others")), EINVAL);
        reconnect_once(&c);
        for (unsigned i = 0; i < 2; i++)
                ck_assert_int_eq(peer_error(c.peer, peer_free_block(c.peer, block)), 0);
        ck_assert_int_eq(peer_error(c.peer, peer_free_block(c.peer, block)), EINVAL);
        check();
        ck_assert_int_eq(peer_error(c.peer, peer_attach(c.peer, "weights", 0)), 0);
        peer_free(a.peer);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 1);
        peer_free(c.peer);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 0);
}

/* ---- impostors ------------------------------------------------------------- */

TEST(resume_by_other_processes_is_refused)
{
        struct client a, c;
        uint64_t hello;

        come_in(&a, 1);
        come_in(&c, 1);
        must_malloc(&a, 0, MIB);
        drop(&a);
        drop(&c);
        start_anew_with(NULL);

        a.secret[15] ^= 1;
        hello = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, hello), EACCES);
        peer_free(a.peer);
        a.secret[15] ^= 1;
        a.uid = 2;
        hello = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, hello), EACCES);
        peer_free(a.peer);
        a.uid = 1;
        b->sessions.table[b->suspended.records[0].index]->who.pid++;
        hello = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, hello), EACCES);
        peer_free(a.peer);
        b->sessions.table[b->suspended.records[0].index]->who.pid--;
        b->sessions.table[b->suspended.records[0].index]->who.start_time++;
        hello = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, hello), EACCES);
        peer_free(a.peer);
        b->sessions.table[b->suspended.records[0].index]->who.start_time--;
        a.id += 1000;
        hello = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, hello), ESTALE);
        ck_assert_int_eq(peer_error(a.peer, peer_hello(a.peer, "", "")), ESTALE);
        ck_assert_int_eq(peer_error(a.peer, peer_hello(a.peer, "", "")), ESTALE);
        peer_free(a.peer);
        a.id -= 1000;
        ck_assert_uint_eq(b->suspended.n, 2);
        reconnect_once(&a);
        reconnect_once(&c);

        /* Twice is once too often. */
        drop(&c);
        (void)session_hang_up(b->sessions.table[b->suspended.records[1].index], NULL);
        hello = say_hello(&c);
        ck_assert_int_eq(peer_error(c.peer, hello), ESTALE);
        peer_free(c.peer);
        c.peer = peer_new(b, 1, false);
        session_free(c.peer->session);
        c.peer->session = b->sessions.table[b->suspended.records[1].index];
        peer_free(c.peer);
        peer_free(a.peer);
}

static void expect_violation(struct client *c, Bfcd__Held *held)
{
        uint64_t id = say_hello(c);

        ck_assert_int_eq(peer_error(c->peer, id), 0);
        ck_assert_int_eq(send_held(c, held, NULL), -EPROTO);
        ck_assert_int_eq(session_hang_up(c->peer->session, NULL), 1); /* it waits again */
        ck_assert_str_eq(session_state_name(c->peer->session), "suspended");
        drop(c);
        check();
}

TEST(invalid_resume_lists)
{
        Bfcd__HeldShared shared = BFCD__HELD_SHARED__INIT, *pointer = &shared;
        struct client a, c;
        uint64_t twice[2], block, foreign, freed, id;
        Bfcd__Held held = BFCD__HELD__INIT;

        come_in(&a, 1);
        come_in(&c, 2);
        block = must_malloc(&a, 0, MIB);
        freed = must_malloc(&a, 0, MIB);
        must_free(&a, freed);
        foreign = must_malloc(&c, 0, MIB);
        drop(&a);
        drop(&c);
        start_anew_with(NULL);

        held.n_block_ids = 1;
        held.block_ids = &foreign;
        expect_violation(&a, &held);
        held.block_ids = &freed;
        expect_violation(&a, &held);
        held.n_block_ids = 2;
        held.block_ids = twice;
        twice[0] = twice[1] = block;
        expect_violation(&a, &held);
        twice[1] = 0;
        expect_violation(&a, &held);
        held.n_block_ids = 0;
        held.n_extent_ids = 1;
        held.extent_ids = c.extents;
        expect_violation(&a, &held);
        twice[0] = b->restored.extents_end;
        held.extent_ids = twice;
        expect_violation(&a, &held);
        twice[0] = twice[1] = a.extents[0];
        held.n_extent_ids = 2;
        expect_violation(&a, &held);
        held.n_extent_ids = 0;
        held.n_shared = 1;
        held.shared = &pointer;
        shared.count = 1;
        shared.block_id = block;
        expect_violation(&a, &held);

        /* A block without its extent; and then all is as it was. */
        held.n_shared = 0;
        held.n_block_ids = 1;
        held.block_ids = &block;
        held.is_last = true;
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), 0);
        ck_assert_int_eq(send_held(&a, &held, NULL), 0);
        ck_assert_int_eq(settle(&a), -EPROTO);
        ck_assert_int_eq(session_hang_up(a.peer->session, NULL), 1);
        drop(&a);
        reconnect_once(&a);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, 1);
        reconnect_once(&c);
        ck_assert_int_eq(send_held(&c, &held, NULL), -EPROTO); /* it is back */
        peer_free(a.peer);
        peer_free(c.peer);
}

/* A resuming session may send only Held, and has limited time. */
TEST(test_returning)
{
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &m);
        struct client a;
        uint64_t id;

        come_in(&a, 1);
        must_malloc(&a, 0, MIB);
        drop(&a);
        start_anew_with(NULL);
        m.n_bytes = 1;
        for (unsigned i = 0; i < 16; i++) {
                id = say_hello(&a);
                ck_assert_int_eq(peer_error(a.peer, id), 0);
                r.id = 0;
                ck_assert_int_eq(peer_send(a.peer, &r, NULL), -EPROTO);
                ck_assert_int_eq(session_hang_up(a.peer->session, NULL), 1);
                if (i < 15)
                        drop(&a);
        }
        peer_free(a.peer);
}

static void order_drain(struct peer *admin, bool is_over)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Drain drain = BFCD__DRAIN__INIT;
        Bfcd__Resume resume = BFCD__RESUME__INIT;
        uint64_t id;

        drain.device = resume.device = "host";
        r.body_case = is_over ? BFCD__REQUEST__BODY_RESUME : BFCD__REQUEST__BODY_DRAIN;
        if (is_over)
                r.resume = &resume;
        else
                r.drain = &drain;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        peer_settle(b);
        ck_assert_int_eq(peer_error(admin, id), 0);
}

/* What is there in advance is there again, also where the daemon ended with the device drained, or
 * half-way. */
TEST(test_preallocated)
{
        struct peer *admin;
        struct client a;
        uint32_t i;

        come_in(&a, 1);
        ck_assert_uint_eq(look_at(0, 1).charged, 8 * MIB);
        admin = peer_new(b, 0, true);
        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        order_drain(admin, false);
        ck_assert_uint_eq(look_at(0, 1).charged, 0);
        peer_free(admin);
        drop(&a);
        start_anew_with(NULL);
        ck_assert_uint_eq(look_at(0, 1).charged, 8 * MIB);
        reconnect_once(&a);
        must_malloc(&a, 1, 3 * MIB);
        must_malloc(&a, 1, 3 * MIB);
        for (i = 0; i < ledger_extent_end(b->ledger); i++) { /* the last one was on its way */
                const struct ledger_extent *e = ledger_extent_get(b->ledger, i);

                if (e && e->quota == look_at(0, 1).index && e->offset + e->n_bytes == 8 * MIB)
                        ledger_extent_leave(b->ledger, i);
        }
        drop(&a);
        start_anew_with(NULL);
        ck_assert_uint_eq(look_at(0, 1).charged, 8 * MIB);
        reconnect_once(&a);
        must_malloc(&a, 1, 2 * MIB);
        ck_assert_uint_eq(look_at(0, 1).in_use, 8 * MIB);
        peer_free(a.peer);
}

/* ---- configs ------------------------------------------------------------- */

static const char other_text[] = "devices:\n"
                                 "  - id: host\n"
                                 "    size: 256MiB\n"
                                 "    partitions:\n"
                                 "      - {name: train, limit: 32MiB}\n"
                                 "      - {name: more, limit: 8MiB}\n"
                                 "tenants:\n"
                                 "  - name: c\n"
                                 "    match: {uid: 3}\n"
                                 "    quotas: [{partition: more, limit: 8MiB}]\n"
                                 "  - name: a\n"
                                 "    match: {uid: 1}\n"
                                 "    quotas:\n"
                                 "      - {partition: more, limit: 8MiB}\n"
                                 "      - {partition: train, limit: 8MiB}\n";

/* Lower limits and a removed tenant: the sessions keep what they have. */
TEST(test_config)
{
        static const char text[] = "devices:\n"
                                   "  - id: host\n"
                                   "    size: 256MiB\n"
                                   "    partitions:\n"
                                   "      - {name: train, limit: 32MiB}\n"
                                   "      - {name: warm, limit: 16MiB}\n"
                                   "tenants:\n"
                                   "  - name: a\n"
                                   "    match: {uid: 1}\n"
                                   "    quotas:\n"
                                   "      - {partition: warm, limit: 8MiB}\n"
                                   "      - {partition: train, limit: 8MiB, reserve: 4MiB}\n";
        struct client a, c;
        struct quota *q;
        uint64_t id;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, 30 * MIB);
        must_malloc(&c, 0, 10 * MIB);
        drop(&a);
        drop(&c);
        start_anew_with(text);
        q = b->tenants[0].quotas[0];
        ck_assert_str_eq(q->partition->name, "train"); /* in the order that its session knows */
        ck_assert_uint_eq(q->account.limit_bytes, 8 * MIB);
        ck_assert_uint_eq(q->account.charged_bytes, 30 * MIB);
        ck_assert_uint_eq(account_ceiling(&q->account), 30 * MIB);
        ck_assert_str_eq(b->tenants[1].name, "b");
        ck_assert_ptr_null(b->tenants[1].config);
        reconnect_once(&a);
        reconnect_once(&c);
        id = peer_malloc(a.peer, 0, 1 * MIB);
        peer_settle(b);
        peer_trimmed_all(a.peer); /* since it has more than its limit */
        peer_trimmed_all(a.peer); /* and for the request */
        ck_assert_int_eq(peer_error(a.peer, id), EDQUOT);
        must_free(&a, a.blocks[0]);
        peer_settle(b);
        check();
        must_malloc(&a, 0, 6 * MIB);
        peer_free(c.peer);
        peer_settle(b);
        ck_assert_uint_eq(b->n_tenants, 1);
        peer_free(a.peer);
        check();
}

/* Usage above a lowered limit is trimmed from resumed sessions only. */
TEST(test_lower_limits)
{
        struct client a, c;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, 30 * MIB);
        must_malloc(&c, 0, 10 * MIB);
        drop(&a);
        drop(&c);
        start_anew_with(CONFIG("16MiB"));
        reconnect_once(&a);
        reconnect_once(&c);
        ck_assert_uint_eq(a.peer->n_trims, 1);
        ck_assert_uint_eq(a.peer->trims[0].n_bytes,
                          b->tenants[0].quotas[0]->account.charged_bytes - 16 * MIB);
        ck_assert_uint_eq(c.peer->n_trims, 0);
        peer_free(a.peer);
        peer_free(c.peer);
}

static uint32_t many_of(const char *text, struct client *a)
{
        uint32_t n_blocks = broker_room(b).n_blocks;

        drop(a);
        start_anew_with(text);
        ck_assert_uint_eq(b->suspended.n, 1);
        reconnect_once(a);
        check();
        return broker_room(b).n_blocks / n_blocks;
}

/* More than the ledger of before has room for: it is larger then, and stays so. */
TEST(larger_limits)
{
        static const char large[] = "max_sessions: 5000\n" CONFIG("48MiB, max_blocks: 16000000");
        struct stats before, after;
        struct client a;

        come_in(&a, 1);
        for (unsigned i = 0; i < 100; i++)
                must_malloc(&a, 0, 1 + i * i * 40);
        for (unsigned i = 0; i < 30; i++)
                must_free(&a, a.blocks[i * 2]);
        before = look_at(0, 0);
        ck_assert_uint_ge(many_of(large, &a), 4);
        after = look_at(0, 0);
        ck_assert_mem_eq(&after, &before, sizeof(after));
        must_malloc(&a, 0, MIB);
        must_free(&a, a.blocks[0]);
        before = look_at(0, 0);
        ck_assert_uint_eq(many_of(NULL, &a), 1); /* a smaller config */
        ck_assert_uint_eq(many_of(large, &a), 1);
        after = look_at(0, 0);
        ck_assert_mem_eq(&after, &before, sizeof(after));
        peer_free(a.peer);
}

/* The partition was removed: sessions that were told of it cannot be resumed. */
TEST(test_partition_gone)
{
        struct client a, c;
        uint64_t id;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, 2 * MIB);
        must_malloc(&a, 1, 2 * MIB);
        must_malloc(&c, 0, 2 * MIB);
        drop(&a);
        drop(&c);
        start_anew_with(other_text);
        ck_assert_uint_eq(b->suspended.n, 1);
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), EIO);
        peer_free(a.peer);
        reconnect_once(&c);
        a.peer = peer_new(b, 1, false);
        session_free(a.peer->session);
        a.peer->session = b->sessions.table[b->suspended.records[0].index];
        ck_assert_uint_eq(session_bytes_in_use(a.peer->session), 2 * MIB);
        peer_free(a.peer);
        peer_free(c.peer);
        check();
}

/* ---- what is damaged ------------------------------------------------------- */

static size_t count_extents(void)
{
        size_t n = 0;

        for (uint32_t i = 0; i < ledger_extent_end(b->ledger); i++)
                n += ledger_extent_get(b->ledger, i) != NULL;
        return n;
}

/* Returns how many the peer sees. */
static size_t count_listed_extents(struct peer *p)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &body);
        uint64_t id;

        body.kind = BFCD__LIST__KIND__EXTENTS;
        ck_assert_int_eq(peer_send(p, &request, &id), 0);
        ck_assert_int_eq(peer_error(p, id), 0);
        return peer_reply(p, id)->list->n_extents;
}

TEST(test_lost_extent)
{
        struct client a, c;
        uint64_t id, key = 0;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, 5 * MIB);
        must_malloc(&c, 0, 5 * MIB);
        for (uint32_t i = 0; i < ledger_extent_end(b->ledger); i++) {
                const struct ledger_extent *e = ledger_extent_get(b->ledger, i);

                if (e && e->quota == b->tenants[0].quotas[0]->index)
                        key = e->store_key;
        }
        drop(&a);
        drop(&c);
        fake_store_lose(store, key);
        start_anew_with(NULL);
        ck_assert_uint_eq(b->suspended.n, 1);
        ck_assert_uint_ge(look_at(0, 1).charged, 5 * MIB); /* what cannot be had back stays charged */
        reconnect_once(&c);
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), EIO);
        peer_free(a.peer);
        come_in(&a, 1); /* others go on with what is left of the limit */
        /* Those of the closed arena belong to no quota. */
        ck_assert_uint_gt(count_listed_extents(c.peer), 0);
        ck_assert_uint_lt(count_listed_extents(a.peer) + count_listed_extents(c.peer), count_extents());
        must_malloc(&a, 1, 40 * MIB);
        id = peer_malloc(a.peer, 1, 8 * MIB);
        peer_settle(b);
        peer_trimmed_all(a.peer);
        ck_assert_int_eq(peer_error(a.peer, id), EDQUOT);
        drop(&a);
        drop(&c);
        start_anew_with(NULL); /* once more: later sessions can be resumed */
        reconnect_once(&a);
        reconnect_once(&c);
        peer_free(a.peer);
        peer_free(c.peer);
        a.peer = peer_new(b, 1, false);
        session_free(a.peer->session);
        a.peer->session = b->sessions.table[b->suspended.records[0].index];
        peer_free(a.peer);
        start_anew_with(NULL); /* no session has it */
        ck_assert_uint_eq(look_at(0, 0).charged + look_at(0, 1).charged, 8 * MIB);
}

TEST(test_failures)
{
        struct client a;

        come_in(&a, 1);
        must_malloc(&a, 0, MIB);
        drop(&a);
        for (unsigned i = 0; i < 12; i++) { /* ends that are no crashes */
                start_anew_with(NULL);
                ck_assert_uint_eq(b->suspended.n, 1);
        }
        for (unsigned i = 0; i < 4; i++) {
                ++*ledger_crashes(b->ledger);
                start_anew_with(NULL);
                ck_assert_uint_eq(b->suspended.n, 1);
        }
        ++*ledger_crashes(b->ledger);
        start_anew_with(NULL);
        ck_assert_uint_eq(b->suspended.n, 0);
        ck_assert_uint_eq(look_at(0, 0).charged, 0);
}

/* As a daemon leaves it that dies at this object; is_crash: by itself. */
static void die_at(uint32_t at, bool is_crash)
{
        *ledger_at(b->ledger) = at | (is_crash ? CRASH_MARK : 0);
        start_anew_with(NULL);
        ck_assert_uint_eq(*ledger_at(b->ledger), 0);
}

/* The process of session a lives, or not. Session c has a reference, too; the block of a's own goes with a. */
LOOP_TEST(a_session_is_left_aside, 2)
{
        struct process self;
        struct client a, c, other;
        struct stats before;
        uint32_t index;
        uint64_t own, id;

        come_in(&a, 1);
        come_in(&c, 1);
        come_in(&other, 2);
        must_malloc(&a, 0, 9 * MIB);
        must_malloc(&c, 0, 3 * MIB);
        must_malloc(&other, 0, 3 * MIB);
        own = must_malloc(&a, 0, MIB);
        ck_assert_int_eq(peer_error(a.peer, peer_publish(a.peer, own, "own")), 0);
        id = must_malloc(&a, 0, MIB);
        ck_assert_int_eq(peer_error(a.peer, peer_publish(a.peer, id, "both")), 0);
        ck_assert_int_eq(peer_error(c.peer, peer_attach(c.peer, "both", 0)), 0);
        note_replies(&c);
        c.shared[0] = id;
        c.counts[0] = 1;
        c.n_shared = 1;
        index = a.peer->session->index;
        ck_assert_int_eq(process_read("/proc", getpid(), &self), 0);
        if (_i == 0)
                ledger_session_at(b->ledger, index)->start_time = self.start_time;
        before = look_at(0, 0);
        drop(&a);
        drop(&c);
        drop(&other);
        die_at(LEDGER_AT_SESSION | (index + 1), false); /* it was killed */
        ck_assert_uint_eq(b->suspended.n, 3);
        die_at(LEDGER_AT_SESSION | (index + 1), true);
        ck_assert_uint_eq(b->suspended.n, 2);
        ck_assert_uint_eq(*ledger_crashes(b->ledger), 0);
        ck_assert_uint_eq(*ledger_n_aside(b->ledger), 1);
        ck_assert_uint_eq(b->restored.n_aside, _i == 0);
        ck_assert_uint_eq(ledger_block_find(b->ledger, own) != LEDGER_NONE, _i == 0);
        ck_assert_uint_ne(ledger_block_find(b->ledger, id), LEDGER_NONE);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, _i == 0 ? before.n_blocks : 2);
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), _i == 0 ? EIO : ESTALE);
        session_free(a.peer->session);
        drop(&a);
        reconnect_once(&c);
        reconnect_once(&other);
        ck_assert_uint_eq(*ledger_n_aside(b->ledger), 0);
        if (_i == 0) {
                ledger_session_at(b->ledger, index)->start_time--; /* the process has ended */
                drop(&c);
                drop(&other);
                die_at(LEDGER_AT_SESSION | (index + 1), true); /* it was aside already */
                ck_assert_uint_eq(*ledger_crashes(b->ledger), 1);
                ck_assert_uint_eq(look_at(0, 0).n_blocks, 2);
                reconnect_once(&c);
                reconnect_once(&other);
        }
        peer_free(c.peer);
        peer_free(other.peer);
}

/* Sessions of its tenant are not resumed, and others are. */
TEST(an_arena_is_left_aside)
{
        struct client a, c;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, 3 * MIB);
        must_malloc(&c, 0, 3 * MIB);
        drop(&a);
        drop(&c);
        die_at(b->tenants[0].quotas[0]->index + 1, true);
        ck_assert_uint_eq(b->suspended.n, 1);
        ck_assert_uint_eq(*ledger_crashes(b->ledger), 0);
        reconnect_once(&c);
        peer_free(c.peer);
        a.peer = peer_new(b, 1, false);
        session_free(a.peer->session);
        a.peer->session = b->sessions.table[b->suspended.records[0].index];
        ck_assert_str_eq(session_state_name(a.peer->session), "quarantined");
        peer_free(a.peer);
        start_anew_with(NULL);
}

TEST(too_many_are_left_aside)
{
        struct client a, c;

        come_in(&a, 1);
        come_in(&c, 2);
        must_malloc(&a, 0, MIB);
        must_malloc(&c, 0, MIB);
        drop(&a);
        drop(&c);
        *ledger_n_aside(b->ledger) = INHERIT_MAX_ASIDE;
        start_anew_with(NULL);
        ck_assert_uint_eq(b->suspended.n, 2);
        die_at(LEDGER_AT_SESSION | 1, true);
        ck_assert_uint_eq(b->suspended.n, 0);
        ck_assert_uint_eq(look_at(0, 0).charged + look_at(1, 0).charged, 0);
}

/* Drained before its client has sent its list: the client is told as any other. */
TEST(test_drained_meanwhile)
{
        struct peer *admin;
        struct client a;
        Bfcd__Drain body = BFCD__DRAIN__INIT;
        Bfcd__Request r = REQUEST(DRAIN, drain, &body);
        uint64_t id;

        come_in(&a, 1);
        drop(&a);
        start_anew_with(NULL);
        id = say_hello(&a);
        ck_assert_int_eq(peer_error(a.peer, id), 0);
        ck_assert_uint_eq(a.peer->n_drains_told, 0);
        admin = peer_new(b, 0, true);
        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        body.device = (char *)(uintptr_t) "host";
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert_uint_eq(a.peer->n_drains_told, 2);
        ck_assert_int_eq(hold_on(&a, &id), 0);
        ck_assert_int_eq(settle(&a), 0);
        peer_free(a.peer);
        peer_free(admin);
        peer_settle(b);
}

/* ---- many restarts --------------------------------------------------------- */

/* A Split whose answer is lost, or that never arrived. Returns the block; 0: there is none to split. */
static uint64_t split_unheard(struct client *c, uint64_t *state)
{
        uint64_t block = c->n_blocks > 0 ? c->blocks[random_next(state) % c->n_blocks] : 0, n;

        if (block == 0)
                return 0;
        n = ledger_block_at(b->ledger, ledger_block_find(b->ledger, block))->n_bytes / 256;
        if (n < 2)
                return 0;
        c->split_at = (1 + random_next(state) % (n - 1)) * 256;
        if (random_next(state) % 2)
                (void)peer_split(c->peer, block, c->split_at);
        return block;
}

TEST(repeated_restarts)
{
        static struct client clients[6];
        uint64_t state = 11;

        for (unsigned i = 0; i < 6; i++)
                come_in(&clients[i], 1 + i % 2);
        for (unsigned life = 0; life < 40; life++) {
                for (unsigned step = 0; step < 60; step++) {
                        struct client *c = &clients[random_next(&state) % 6];
                        uint64_t n = 1 + random_next(&state) % (UINT64_C(1) << random_next(&state) % 22);

                        if (random_next(&state) % 2 == 0 && c->n_blocks < 40)
                                must_malloc(c, 0, n);
                        else if (c->n_blocks > 0)
                                must_free(c, c->blocks[random_next(&state) % c->n_blocks]);
                }
                for (unsigned i = 0; i < 6; i++) {
                        if (random_next(&state) % 3 == 0 && clients[i].n_blocks < 40)
                                (void)peer_malloc(clients[i].peer, 0, 1 + random_next(&state) % MIB);
                        if (random_next(&state) % 2)
                                peer_settle(b);
                        clients[i].splitting =
                                random_next(&state) % 2 ? split_unheard(&clients[i], &state) : 0;
                }
                for (unsigned i = 0; i < 6; i++) /* none of them is sent anything any more */
                        drop(&clients[i]);
                start_anew_with(NULL);
                for (unsigned i = 0; i < 6; i++) {
                        reconnect_once(&clients[i]);
                        if (clients[i].splitting != 0)
                                (void)must_split(&clients[i], clients[i].splitting, clients[i].split_at);
                        check();
                }
                peer_settle(b);
        }
        for (unsigned i = 0; i < 6; i++)
                peer_free(clients[i].peer);
}

/* ---- many ------------------------------------------------------------------ */

static const char many_text[] = "max_sessions: 2000\n"
                                "devices:\n"
                                "  - id: host\n"
                                "    size: 1GiB\n"
                                "    partitions: [{name: main, limit: 512MiB}]\n"
                                "tenants:\n"
                                "  - name: a\n"
                                "    match: {uid: 1}\n"
                                "    quotas: [{partition: main, limit: 512MiB, max_blocks: 200000}]\n";

static uint64_t cpu_ns(void)
{
        struct timespec now;

        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
        return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* 1,000 sessions with 100,000 blocks. How long it takes is told, and bounded loosely. */
TEST(test_many)
{
        enum { N = 1000, N_BLOCKS = 100 };
        static struct peer *peers[N];
        static struct client c;
        uint64_t began_ns, took_ns;

        b = peer_broker_free(b, config);
        store = fake_store_free(store);
        store = fake_store_new();
        b = peer_broker_kept(many_text, machine, devices, store, &config);
        for (size_t i = 0; i < N; i++) {
                come_in(&c, 1);
                for (size_t k = 0; k < N_BLOCKS; k++)
                        (void)peer_malloc(c.peer, 0, 256 * (1 + (i + k) % 8));
                peer_settle(b);
                peer_forget_replies(c.peer);
                peers[i] = c.peer;
        }
        for (size_t i = 0; i < N; i++)
                peer_drop(peers[i]);
        fake_store_die(store);
        peer_broker_leave(b, config);
        began_ns = cpu_ns();
        b = peer_broker_kept(many_text, machine, devices, store, &config);
        took_ns = cpu_ns() - began_ns;
        check();
        ck_assert_uint_eq(b->suspended.n, N);
        ck_assert_uint_eq(look_at(0, 0).n_blocks, N * N_BLOCKS);
        printf("# %u sessions, %u blocks: %.1f ms of a processor\n", N, N * N_BLOCKS, (double)took_ns / 1e6);
        ck_assert_uint_lt(took_ns, UINT64_C(2000000000)); /* also under sanitizers */
        for (size_t i = 0; i < N; i++) {
                c.peer = peer_new(b, 1, false);
                session_free(c.peer->session);
                c.peer->session = b->sessions.table[b->suspended.records[i].index];
                peer_free(c.peer);
        }
        check();
}

/* The quota of tenant a in a partition. */
static struct quota *quota_of_a(size_t partition)
{
        struct tenant *t = b->selection.order[0];

        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i]->partition == &b->partitions[partition])
                        return t->quotas[i];
        ck_abort_msg("there is no such quota");
}

static int malloc_error(struct client *c, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_malloc(c->peer, partition, n_bytes);

        for (int i = 0; i < 4 && !peer_reply(c->peer, id); i++)
                peer_settle(b);
        return peer_error(c->peer, id);
}

/* The kernel kills a process for lack of memory while a daemon allocates for a quota: its successor
 * allocates nothing for that quota for a while, also where no session used it, so that it was forgotten.
 * Other quotas grow, and requests that fit into existing extents are granted. */
LOOP_TEST(test_died_growing, 2)
{
        uint32_t train = _i == 0 ? 0 : 1; /* as a session is told of it: the one that is new comes last */
        struct client one, two;
        struct quota *q = quota_of_a(0);
        uint64_t n_refusals;

        if (_i == 0) {
                come_in(&one, 1);
                (void)must_malloc(&one, 0, MIB);
                drop(&one);
        }
        ck_assert_uint_eq(ledger_quota_at(b->ledger, q->index)->growing_mib, 0);
        ledger_quota_grows(b->ledger, q->index, 6 * MIB + 1, host_free_oom_kills());
        ck_assert_uint_eq(ledger_quota_at(b->ledger, q->index)->growing_mib, 7);
        start_anew_with(NULL);
        q = quota_of_a(0);
        ck_assert_uint_eq(quota_growth_pause_ms(q), 0); /* another signal ended it */
        ck_assert_uint_eq(ledger_quota_at(b->ledger, q->index)->growing_mib, 0);
        ledger_quota_grows(b->ledger, q->index, 3 * MIB, host_free_oom_kills() - 1);
        start_anew_with(NULL);
        q = quota_of_a(0);
        ck_assert_uint_eq(ledger_quota_at(b->ledger, q->index)->growing_mib, 0); /* noticed once */
        ck_assert_uint_gt(quota_growth_pause_ms(q), 0);
        ck_assert_uint_le(quota_growth_pause_ms(q), QUOTA_PAUSE_MS);
        ck_assert_uint_eq(quota_growth_pause_ms(quota_of_a(1)), 0);
        come_in(&two, 2);
        if (_i == 0)
                reconnect_once(&one);
        else
                come_in(&one, 1);
        if (_i == 0)
                (void)must_malloc(&one, train, 1000);
        n_refusals = quota_life(q)->n_out_of_memory;
        ck_assert_int_eq(malloc_error(&one, train, 4 * MIB), ENOMEM);
        ck_assert_uint_eq(quota_life(q)->n_out_of_memory, n_refusals + 1);
        (void)must_malloc(&two, 0, 4 * MIB);
        q->growth.paused_until_ms = 1; /* its time is up */
        (void)must_malloc(&one, train, 4 * MIB);
        drop(&one);
        drop(&two);
        start_anew_with(NULL);
        ck_assert_uint_eq(quota_growth_pause_ms(quota_of_a(0)), 0);
        reconnect_once(&one);
        reconnect_once(&two);
        peer_free(one.peer);
        peer_free(two.peer);
}

/* What is there in advance is not made either, and the daemon starts nevertheless. */
TEST(test_died_backing)
{
        struct quota *q = quota_of_a(1);

        ledger_quota_grows(b->ledger, q->index, 8 * MIB, host_free_oom_kills() - 1);
        ck_assert_uint_eq(q->account.charged_bytes, 8 * MIB);
        start_anew_with(NULL);
        ck_assert_uint_gt(quota_growth_pause_ms(quota_of_a(1)), 0);
        ck_assert_int_eq(quota_back_early(quota_of_a(1)), 0); /* all of it is there */
        ck_assert_uint_eq(quota_of_a(1)->account.charged_bytes, 8 * MIB);
        check();
}

/* A kept block that no session has, with its metadata; and one whose time passed meanwhile. */
TEST(kept_blocks_survive)
{
        static const char text[] =
                "devices:\n"
                "  - id: host\n"
                "    size: 256MiB\n"
                "    partitions: [{name: train, limit: 96MiB}, {name: warm, limit: 16MiB}]\n"
                "tenants:\n"
                "  - {name: a, match: {uid: 1}, quotas: [{partition: warm, limit: 8MiB}]}\n";
        struct client c, other;
        uint64_t keeps, ends, id;

        come_in(&c, 1);
        keeps = must_malloc(&c, 0, 3 * MIB);
        ends = must_malloc(&c, 0, MIB);
        ck_assert_int_eq(peer_error(c.peer, peer_publish_kept(c.peer, keeps, "w", LEDGER_FOREVER, "f32", 3)),
                         0);
        ck_assert_int_eq(peer_error(c.peer, peer_publish_kept(c.peer, ends, "short", 1, NULL, 0)), 0);
        ck_assert_int_eq(peer_error(c.peer, peer_free_block(c.peer, keeps)), 0);
        ck_assert_int_eq(peer_error(c.peer, peer_free_block(c.peer, ends)), 0);
        c.peer = peer_free(c.peer);
        peer_settle(b);
        ck_assert_uint_eq(b->sessions.n, 0);
        start_anew_with(NULL);
        ck_assert_int_eq(restore_sessions(b), 0);
        check();
        ck_assert_uint_eq(quota_of_a(0)->all.n_blocks, 2);
        ck_assert_uint_ne(shared_keeps_until(b), 0);
        shared_expire_kept(b, clock_ms() + 1000);
        peer_settle(b);
        check();
        ck_assert_uint_eq(quota_of_a(0)->all.n_blocks, 1);
        come_in(&other, 1);
        id = peer_attach(other.peer, "w", 0);
        ck_assert_int_eq(peer_error(other.peer, id), 0);
        ck_assert_uint_eq(peer_reply(other.peer, id)->attached->block->block_id, keeps);
        id = peer_metadata(other.peer, keeps);
        ck_assert_int_eq(peer_error(other.peer, id), 0);
        ck_assert_uint_eq(peer_reply(other.peer, id)->metadata->metadata.len, 3);
        ck_assert_int_eq(memcmp(peer_reply(other.peer, id)->metadata->metadata.data, "f32", 3), 0);
        other.peer = peer_free(other.peer);
        /* A config without the quota: it is kept no longer. */
        start_anew_with(text);
        ck_assert_int_eq(restore_sessions(b), 0);
        peer_settle(b);
        check();
        ck_assert_ptr_null(b->shared.tree);
}

/* What a session has without write access stays so. */
TEST(read_only_survives)
{
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &attach);
        struct client publisher, reader;
        uint64_t block, id;

        come_in(&publisher, 1);
        come_in(&reader, 1);
        block = must_malloc(&publisher, 0, 1000);
        ck_assert_int_eq(peer_error(publisher.peer,
                                    peer_publish_kept(publisher.peer, block, "w", LEDGER_FOREVER, NULL, 0)),
                         0);
        publisher.peer = peer_free(publisher.peer);
        attach.name = (char *)(uintptr_t) "w";
        attach.read_only = true;
        ck_assert_int_eq(peer_send(reader.peer, &r, &id), 0);
        ck_assert_int_eq(peer_error(reader.peer, id), 0);
        note_replies(&reader);
        reader.shared[0] = block;
        reader.counts[0] = 1;
        reader.n_shared = 1;
        drop(&reader);
        start_anew_with(NULL);
        ck_assert_int_eq(restore_sessions(b), 0);
        reconnect_once(&reader);
        ck_assert_int_eq(malloc_error(&reader, 0, 1000), EBUSY);
        check();
        must_free(&reader, block);
        ck_assert_uint_eq(reader.peer->n_extents, 0);
        (void)must_malloc(&reader, 0, 1000); /* beside the block: with write access from now on */
        ck_assert_uint_eq(reader.peer->n_extents, 1);
        check();
        reader.peer = peer_free(reader.peer);
}
