/* Direct charges, by sessions without sockets: what they count as, refusals, waiting, leases, their end, and restarts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/session/request.h"
#include "daemon/session/resume.h"
#include "daemon/session/share.h"
#include "daemon/session/session_states.h"
#include "daemon/base/log.h"
#include "daemon/memory/broker_lease.h"
#include "tests/fake_store.h"
#include "tests/suite.h"
#include "tests/unit/gpus.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

#define CONFIG(red)                                                                                          \
        "timeouts: {reclaim: 100ms}\n"                                                                       \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 128MiB\n"                                                                                 \
        "    partitions: [{name: a, limit: 40MiB}, {name: pre, limit: 8MiB, growth: preallocate}]\n"         \
        "tenants:\n"                                                                                         \
        "  - {name: red, match: {uid: 1}, quotas: [{partition: a, " red                                      \
        "}, {partition: pre, limit: 4MiB}]}\n"                                                               \
        "  - {name: blue, match: {uid: 2}, quotas: [{partition: a, limit: 40MiB, reserve: 8MiB}]}\n"
static const char config_text[] = CONFIG("limit: 24MiB, max_blocks: 4");

static struct store *store;
static int n_fds_before;

static void setup(void)
{
        n_fds_before = suite_count_fds();
        store = fake_store_new();
        b = peer_broker_kept(config_text, NULL, NULL, store, &config);
        admin = open_admin_session();
}

static void teardown(void)
{
        settle();
        must_close(admin);
        b = peer_broker_free(b, config);
        store = fake_store_free(store);
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

FIXTURE(direct, setup, teardown);

static int charge(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_charge(p, partition, n_bytes, 0);

        for (int i = 0; i < 100 && peer_error(p, id) < 0; i++) {
                settle();
                still_clock_pass(50);
                broker_tick(b);
        }
        return peer_error(p, id);
}

static int uncharge(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        int r = peer_error(p, peer_uncharge(p, partition, n_bytes));

        settle();
        return r;
}

/* Tells of contexts, with a charge of n_bytes. */
static int tell_contexts(struct peer *p, uint32_t partition, uint64_t n_contexts, uint64_t n_bytes)
{
        Bfcd__ChargedContexts contexts = BFCD__CHARGED_CONTEXTS__INIT;
        Bfcd__Charge m = BFCD__CHARGE__INIT;
        Bfcd__Request r = REQUEST(CHARGE, charge, &m);

        contexts.n_bytes = n_contexts;
        m.partition = partition;
        m.n_bytes = n_bytes;
        m.contexts = &contexts;
        return peer_error(p, peer_post(p, &r));
}

static struct quota *quota_of(const struct peer *p, uint32_t partition)
{
        return p->session->shares[partition].quota;
}

static uint64_t charged(const struct peer *p)
{
        return quota_of(p, 0)->account.charged_bytes;
}

static struct peer *watched_session(uid_t uid)
{
        struct peer *p = open_session(uid);

        session_set_watched(p->session, true);
        return p;
}

static const Bfcd__SessionRow *row_of(uint64_t id)
{
        const Bfcd__ListReply *list = list_page(admin, BFCD__LIST__KIND__SESSIONS, 0);

        for (size_t i = 0; i < list->n_sessions; i++)
                if (list->sessions[i]->session_id == id)
                        return list->sessions[i];
        ck_abort_msg("session %" PRIu64 " is not listed", id);
}

/* ---- what they count as -------------------------------------------------------- */

TEST_OF(direct, any_number_of_bytes_counts_at_every_level)
{
        struct peer *p = open_session(1);
        const struct quota *q = quota_of(p, 0);

        ck_assert_int_eq(charge(p, 0, 3 * MIB + 1), 0);
        ck_assert_int_eq(charge(p, 0, 1), 0);
        ck_assert_uint_eq(q->all.bytes_direct, 3 * MIB + 2);
        ck_assert_uint_eq(q->account.charged_bytes, 3 * MIB + 2);
        ck_assert_uint_eq(q->account.peak_charged_bytes, 3 * MIB + 2);
        ck_assert_uint_eq(ledger_quota_at(b->ledger, q->index)->life.peak_reserved, 3 * MIB + 2);
        ck_assert_uint_eq(q->partition->pool.charged_bytes, 3 * MIB + 2);
        ck_assert_uint_eq(row_of(p->session->id)->bytes_direct, 3 * MIB + 2);
        ck_assert_uint_eq(list_page(admin, BFCD__LIST__KIND__TENANTS, 0)->tenants[0]->stats->bytes_direct,
                          3 * MIB + 2);
        ck_assert_uint_eq(
                list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0)->partitions[0]->stats->bytes_direct,
                3 * MIB + 2);
        ck_assert_int_eq(uncharge(p, 0, 2 * MIB), 0);
        ck_assert_uint_eq(charged(p), MIB + 2);
        ck_assert_uint_eq(q->account.peak_charged_bytes, 3 * MIB + 2);
        ck_assert_int_eq(uncharge(p, 0, MIB + 3), EINVAL);
        ck_assert_int_eq(uncharge(p, 0, MIB + 2), 0);
        ck_assert_int_eq(uncharge(p, 0, 1), EINVAL);
        ck_assert_uint_eq(charged(p), 0);
        must_close(p);
}

static void check_contexts(const struct peer *p, uint64_t n_own, uint64_t n_all)
{
        ck_assert_uint_eq(row_of(p->session->id)->bytes_contexts, n_own);
        ck_assert_uint_eq(list_page(admin, BFCD__LIST__KIND__TENANTS, 0)->tenants[0]->stats->bytes_contexts,
                          n_all);
        ck_assert_uint_eq(
                list_page(admin, BFCD__LIST__KIND__PARTITIONS, 0)->partitions[0]->stats->bytes_contexts,
                n_all);
        check();
}

TEST_OF(direct, contexts_are_a_part_of_them)
{
        struct peer *p = open_session(1), *other = open_session(1);

        ck_assert_int_eq(tell_contexts(p, 0, 1, 0), EINVAL);
        ck_assert_int_eq(charge(p, 0, 3 * MIB), 0);
        ck_assert_int_eq(charge(other, 0, 2 * MIB), 0);
        ck_assert_int_eq(tell_contexts(other, 0, 2 * MIB, 0), 0);
        ck_assert_int_eq(tell_contexts(p, 0, 2 * MIB, 0), 0);
        check_contexts(p, 2 * MIB, 4 * MIB);
        ck_assert_int_eq(tell_contexts(p, 0, 3 * MIB + 1, 0), EINVAL);
        ck_assert_int_eq(tell_contexts(p, 0, UINT64_MAX, 0), EINVAL);
        ck_assert_int_eq(tell_contexts(p, 0, MIB, 1), EINVAL);
        ck_assert_int_eq(tell_contexts(p, 0, MIB, UINT64_MAX), EINVAL);
        ck_assert_int_eq(tell_contexts(p, 1, 1, 0), EINVAL);
        ck_assert_int_eq(tell_contexts(p, 2, 0, 0), ENOENT);
        ck_assert_int_eq(tell_contexts(p, UINT32_MAX, 0, 0), ENOENT);
        ck_assert_int_eq(tell_contexts(admin, 0, 0, 0), EACCES);
        check_contexts(p, 2 * MIB, 4 * MIB);
        ck_assert_uint_eq(charged(p), 5 * MIB);
        ck_assert_int_eq(uncharge(p, 0, MIB), 0);
        check_contexts(p, 2 * MIB, 4 * MIB);
        ck_assert_int_eq(uncharge(p, 0, MIB), 0);
        check_contexts(p, MIB, 3 * MIB);
        ck_assert_int_eq(tell_contexts(p, 0, 0, 0), 0);
        check_contexts(p, 0, 2 * MIB);
        must_close(other);
        settle();
        check_contexts(p, 0, 0);
        must_close(p);
}

TEST_OF(direct, wrong_requests_are_refused)
{
        struct peer *p = open_session(1), *other = open_session(1);

        ck_assert_int_eq(charge(p, 0, 0), EINVAL);
        ck_assert_int_eq(charge(p, 2, 1), ENOENT);
        ck_assert_int_eq(charge(p, UINT32_MAX, 1), ENOENT);
        ck_assert_int_eq(charge(p, 0, UINT64_MAX), EDQUOT);
        ck_assert_int_eq(charge(admin, 0, 1), EACCES);
        ck_assert_int_eq(uncharge(p, 0, 0), EINVAL);
        ck_assert_int_eq(uncharge(p, 7, 1), ENOENT);
        ck_assert_int_eq(uncharge(p, 0, UINT64_MAX), EINVAL);
        ck_assert_int_eq(uncharge(admin, 0, 1), EACCES);
        ck_assert_int_eq(charge(p, 1, 1), ENOTSUP); /* all of it is extents, which stay */
        ck_assert_int_eq(charge(other, 0, 2 * MIB), 0);
        ck_assert_int_eq(uncharge(p, 0, 1), EINVAL);
        ck_assert_uint_eq(charged(p), 2 * MIB);
        must_close(other);
        must_close(p);
}

TEST_OF(direct, limits_hold_for_blocks_and_charges_together)
{
        struct peer *p = open_session(1), *other = open_session(2);
        uint64_t refusals, block = must_malloc(p, 0, 8 * MIB);
        const char *sentence;

        ck_assert_int_eq(charge(p, 0, 16 * MIB), 0);
        refusals = quota_n_refusals(quota_of(p, 0));
        ck_assert_int_eq(charge(p, 0, 1), EDQUOT);
        ck_assert_uint_eq(quota_n_refusals(quota_of(p, 0)), refusals + 1);
        sentence = refusal_of(p, peer_malloc(p, 0, MIB), EDQUOT);
        ck_assert_msg(strstr(sentence, "8.0 MiB in 1 block and 16.0 MiB charged directly"), "%s", sentence);
        sentence = refusal_of(p, peer_charge(p, 0, 24 * MIB + 1, 1000), EDQUOT); /* at once */
        ck_assert_msg(strstr(sentence, "asked for more than its limit"), "%s", sentence);

        /* Of the partition 16 MiB are left, and all of it is this tenant's. */
        ck_assert_int_eq(charge(other, 0, 16 * MIB + 1), ENOMEM);
        ck_assert_int_eq(charge(other, 0, 16 * MIB), 0);
        must_free(p, block);
        ck_assert_int_eq(charge(other, 0, 2 * MIB), 0); /* free extents are released for it */
        ck_assert_uint_le(quota_of(p, 0)->partition->pool.peak_charged_bytes, 40 * MIB);
        must_close(other);
        must_close(p);
        settle();
}

/* max_blocks is no limit for them, and no reason in the sentence. */
TEST_OF(direct, they_are_no_blocks)
{
        struct peer *p = open_session(1);
        const char *sentence;

        for (int i = 0; i < 4; i++)
                (void)must_malloc(p, 0, MIB);
        ck_assert_int_eq(charge(p, 0, 8 * MIB), 0);
        ck_assert_int_eq(charge(p, 0, 24 * MIB), EDQUOT);
        sentence = refusal_of(p, peer_charge(p, 0, 16 * MIB, 0), EDQUOT);
        ck_assert_msg(!strstr(sentence, "max_blocks"), "%s", sentence);
        must_close(p);
}

/* ---- waiting ------------------------------------------------------------------- */

TEST_OF(direct, a_charge_waits_in_the_queue_of_blocks)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t first, second;

        ck_assert_int_eq(charge(p, 0, 22 * MIB), 0);
        first = peer_charge(q, 0, 4 * MIB, 60000);
        second = peer_malloc_wait(q, 0, 2 * MIB, 60000);
        for (int i = 0; i < 10; i++) {
                settle();
                still_clock_pass(100);
                broker_tick(b);
        }
        ck_assert_int_eq(peer_error(q, first), -1);
        ck_assert_int_eq(peer_error(q, second), -1);
        ck_assert_uint_eq(list_page(admin, BFCD__LIST__KIND__WAITING, 0)->n_waiting, 2);
        ck_assert_int_eq(uncharge(p, 0, 2 * MIB), 0);
        ck_assert_int_eq(peer_error(q, first), 0);
        ck_assert_int_eq(peer_error(q, second), -1);
        ck_assert_int_eq(uncharge(p, 0, 20 * MIB), 0);
        ck_assert_int_eq(peer_error(q, second), 0);
        must_close(q);
        must_close(p);
}

TEST_OF(direct, a_wait_ends_by_time_or_by_cancel)
{
        struct peer *p = open_session(1), *q = open_session(1);
        Bfcd__Cancel cancel = BFCD__CANCEL__INIT;
        Bfcd__Request r = REQUEST(CANCEL, cancel, &cancel);
        uint64_t id;

        ck_assert_int_eq(charge(p, 0, 24 * MIB), 0);
        id = peer_charge(q, 0, MIB, 1000);
        for (int i = 0; i < 40; i++) {
                settle();
                still_clock_pass(100);
                broker_tick(b);
        }
        ck_assert_int_eq(peer_error(q, id), EDQUOT);
        cancel.request_id = peer_charge(q, 0, MIB, 1000);
        settle();
        ck_assert_int_eq(peer_send(q, &r, &id), 0);
        ck_assert_int_eq(peer_error(q, cancel.request_id), ECANCELED);
        id = peer_charge(q, 0, MIB, 1000);
        must_close(q); /* without an answer */
        ck_assert_uint_eq(charged(p), 24 * MIB);
        must_close(p);
}

TEST_OF(direct, a_session_has_them_in_many_partitions_of_one_record)
{
        const struct ledger_session *record;
        struct peer *p = open_session(1);
        uint64_t id = ledger_quota_at(b->ledger, quota_of(p, 0)->index)->id;

        ck_assert_int_eq(charge(p, 0, MIB), 0);
        for (uint64_t i = 0; i < LEDGER_SESSION_DIRECT - 1; i++)
                ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, 1000 + i, 1), 0);
        ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, 999, 1), -ENOSPC);
        ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, 998, 0), 0);
        ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, id, 0), 0);
        ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, 999, 1), 0);
        p->session->shares[0].usage.direct.n_bytes = 0; /* as its record */
        ck_assert_str_ne(refusal_of(p, peer_charge(p, 0, 2 * MIB, 0), EDQUOT), "");
        p->session->shares[0].usage.direct.n_bytes = MIB;
        record = ledger_session_at(b->ledger, p->session->index);
        for (size_t i = 0; i < LEDGER_SESSION_DIRECT; i++)
                if (record->direct[i].n_bytes > 0)
                        (void)ledger_session_set_direct(b->ledger, p->session->index,
                                                        record->direct[i].quota_id, 0);
        ck_assert_int_eq(ledger_session_set_direct(b->ledger, p->session->index, id, MIB), 0);
        ck_assert_uint_eq(charged(p), MIB);
        must_close(p);
}

/* ---- leases ------------------------------------------------------------------- */

static struct peer *join(const char *cgroup)
{
        struct peer *p = peer_new(b, 1, false);

        p->session->who.cgroup = strdup(cgroup);
        return say_hello(p);
}

TEST_OF(direct, a_lease_and_its_tenant_have_the_sum)
{
        const struct wanted w = { .name = "job", .cgroup = "/job", .limit = 8 * MIB };
        struct peer *in, *too, *beside;
        uint64_t id;

        ck_assert_int_eq(peer_error(admin, ask_create(admin, &w)), 0);
        in = join("/job");
        too = join("/job");
        beside = join("/other");
        ck_assert_str_eq(quota_of(in, 0)->lease, "job");
        ck_assert_int_eq(charge(in, 0, 5 * MIB), 0);
        ck_assert_int_eq(charge(too, 0, 3 * MIB), 0);
        ck_assert_int_eq(charge(too, 0, 1), EDQUOT);
        ck_assert_int_eq(charge(beside, 0, 16 * MIB), 0);
        ck_assert_int_eq(charge(beside, 0, 1), EDQUOT);
        ck_assert_uint_eq(quota_of(beside, 0)->all.bytes_direct, 24 * MIB);
        ck_assert_uint_eq(quota_own(quota_of(beside, 0)).bytes_direct, 16 * MIB);
        ck_assert_int_eq(tell_contexts(in, 0, 4 * MIB, 0), 0);
        ck_assert_int_eq(tell_contexts(beside, 0, 2 * MIB, 0), 0);
        ck_assert_uint_eq(quota_of(in, 0)->usages.bytes_contexts, 4 * MIB);
        ck_assert_uint_eq(quota_of(beside, 0)->usages.bytes_contexts, 6 * MIB);

        /* An ended lease keeps what is charged, and gets no more. */
        (void)ask_end(admin, "job", false, 0);
        ck_assert_int_eq(uncharge(too, 0, MIB), 0);
        ck_assert_int_eq(charge(too, 0, 1), EDQUOT);
        id = in->session->id;
        must_close(too);
        ck_assert_uint_eq(row_of(id)->bytes_direct, 5 * MIB);
        ck_assert_uint_eq(b->leases.n, 1);
        must_close(in);
        settle();
        ck_assert_uint_eq(b->leases.n, 0);
        ck_assert_uint_eq(charged(beside), 16 * MIB);
        ck_assert_uint_eq(quota_of(beside, 0)->usages.bytes_contexts, 2 * MIB);
        must_close(beside);
}

/* ---- their end ------------------------------------------------------------------ */

static int reap(struct peer *p)
{
        int r;

        while ((r = session_reap(p->session, 3)) == SESSION_MORE)
                ;
        session_end_linger(p->session);
        settle();
        return r;
}

TEST_OF(direct, a_goodbye_does_not_end_them_while_the_process_lives)
{
        struct peer *p = watched_session(1), *q = open_session(1);

        (void)must_malloc(p, 0, 4 * MIB);
        ck_assert_int_eq(charge(p, 0, 6 * MIB), 0);
        (void)peer_goodbye(p);
        ck_assert_int_eq(reap(p), SESSION_LINGERS);
        ck_assert_int_eq(p->session->state, SESSION_LINGERING);
        ck_assert(!session_has_work(p->session));
        ck_assert_uint_eq(charged(q), 6 * MIB); /* without the block */
        ck_assert_uint_eq(row_of(p->session->id)->bytes_direct, 6 * MIB);
        ck_assert_int_eq(charge(q, 0, 20 * MIB), EDQUOT);
        session_exit(p->session);
        ck_assert(session_has_work(p->session));
        ck_assert_int_eq(reap(p), 0);
        ck_assert_uint_eq(charged(q), 0);
        session_free(p->session);
        peer_drop(p);
        must_close(q);
}

TEST_OF(direct, a_hang_up_does_not_end_them)
{
        for (int how = 0; how < 2; how++) {
                struct peer *p = watched_session(1), *q = open_session(1);

                if (how == 1) /* the rest of its memory is freed at the end of the quarantine */
                        (void)must_malloc(p, 0, 4 * MIB);
                ck_assert_int_eq(charge(p, 0, 6 * MIB), 0);
                ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
                if (how == 1) {
                        ck_assert_int_eq(p->session->state, SESSION_QUARANTINED);
                        session_close(p->session, "quarantine ended");
                }
                ck_assert_int_eq(reap(p), SESSION_LINGERS);
                ck_assert_uint_eq(charged(q), 6 * MIB);
                ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
                session_exit(p->session);
                ck_assert_int_eq(reap(p), 0);
                ck_assert_uint_eq(charged(q), 0);
                session_free(p->session);
                peer_drop(p);
                must_close(q);
        }
}

/* The process lives on, and has them. */
TEST_OF(direct, an_eviction_does_not_end_them)
{
        struct peer *p = watched_session(1), *q = open_session(1);
        Bfcd__Evict evict = BFCD__EVICT__INIT;
        Bfcd__Request r = BFCD__REQUEST__INIT;
        uint64_t id;

        (void)must_malloc(p, 0, 4 * MIB);
        ck_assert_int_eq(charge(p, 0, 6 * MIB), 0);
        evict.session_id = p->session->id;
        r.body_case = BFCD__REQUEST__BODY_EVICT;
        r.evict = &evict;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert(p->aborted);
        ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
        session_close(p->session, "evicted");
        ck_assert_int_eq(reap(p), SESSION_LINGERS);
        ck_assert_uint_eq(charged(q), 6 * MIB); /* without the block */
        ck_assert_int_eq(charge(q, 0, 20 * MIB), EDQUOT);
        session_exit(p->session);
        ck_assert_int_eq(reap(p), 0);
        ck_assert_uint_eq(charged(q), 0);
        session_free(p->session);
        peer_drop(p);
        must_close(q);
}

TEST_OF(direct, a_lower_limit_leaves_them_charged)
{
        struct peer *p = open_session(1);

        ck_assert_int_eq(charge(p, 0, 20 * MIB), 0);
        ck_assert_int_eq(reload_told(CONFIG("limit: 8MiB"), false, NULL), 0);
        ck_assert_uint_eq(charged(p), 20 * MIB);
        ck_assert_int_eq(charge(p, 0, 1), EDQUOT);
        ck_assert_int_eq(uncharge(p, 0, 10 * MIB), 0);
        ck_assert_int_eq(charge(p, 0, 1), EDQUOT);
        ck_assert_int_eq(uncharge(p, 0, 4 * MIB), 0);
        ck_assert_int_eq(charge(p, 0, 2 * MIB), 0);
        ck_assert_int_eq(charge(p, 0, 1), EDQUOT);
        must_close(p);
}

/* ---- restarts -------------------------------------------------------------------- */

struct client {
        struct peer *peer;
        uint64_t id;
        uint8_t secret[16];
};

static struct client come_in(uid_t uid)
{
        struct client c = { .peer = peer_new(b, uid, false) };

        c.peer->wants_return = c.peer->wants_events = true;
        say_hello(c.peer);
        c.id = c.peer->session->id;
        memcpy(c.secret, c.peer->secret, sizeof(c.secret));
        return c;
}

/* Also with a lower limit. */
static void restart(const char *text)
{
        admin = peer_drop(admin);
        fake_store_die(store);
        peer_broker_leave(b, config);
        b = peer_broker_kept(text, NULL, NULL, store, &config);
        (void)store_drop_rest(store);
        admin = open_admin_session();
        check();
}

static int resume_with(struct client *c, uid_t uid, uint64_t listed, uint64_t contexts, const char **ret_why)
{
        Bfcd__Held held = BFCD__HELD__INIT;
        Bfcd__HeldCharge row = BFCD__HELD_CHARGE__INIT, *rows[] = { &row, &row };
        Bfcd__Request r = REQUEST(HELD, held, &held);
        int result;

        c->peer = peer_new(b, uid, false);
        c->peer->wants_return = c->peer->wants_events = true;
        c->peer->return_id = c->id;
        memcpy(c->peer->secret, c->secret, sizeof(c->secret));
        say_hello(c->peer);
        row.n_bytes = listed;
        row.bytes_contexts = contexts;
        held.n_charges = listed > 0;
        held.charges = rows;
        held.is_last = true;
        r.id = 1000;
        result = session_handle(c->peer->session, &r, ret_why);
        while (result == 0 && c->peer->session->state == SESSION_RESUMING)
                (void)resume_step(c->peer->session, 1, ret_why);
        return result;
}

static int resume(struct client *c, uid_t uid, uint64_t listed, const char **ret_why)
{
        return resume_with(c, uid, listed, 0, ret_why);
}

TEST_OF(direct, a_successor_is_told_of_contexts)
{
        static const uint64_t listed[] = { MIB, 3 * MIB, 3 * MIB + 1, UINT64_MAX };

        for (size_t i = 0; i < 4; i++) {
                struct client c = come_in(1);
                const char *why = NULL;

                ck_assert_int_eq(charge(c.peer, 0, 4 * MIB), 0);
                ck_assert_int_eq(tell_contexts(c.peer, 0, 2 * MIB, 0), 0);
                c.peer = peer_drop(c.peer);
                restart(config_text);
                ck_assert_uint_eq(row_of(c.id)->bytes_contexts, 0);
                ck_assert_int_eq(resume_with(&c, 1, 3 * MIB, listed[i], &why), i < 2 ? 0 : -EPROTO);
                ck_assert_uint_eq(row_of(c.id)->bytes_contexts, i < 2 ? listed[i] : 0);
                check();
                c.peer = peer_free(c.peer);
                settle();
                ck_assert_uint_eq(b->tenants[0].quotas[0]->usages.bytes_contexts, 0);
        }
}

TEST_OF(direct, a_successor_continues_with_them)
{
        static const uint64_t listed[] = { 7 * MIB + 3, 5 * MIB, 0, 7 * MIB + 4 };

        for (size_t i = 0; i < 4; i++) {
                struct client c = come_in(1);
                const char *why = NULL;
                const struct quota *q;

                ck_assert_int_eq(charge(c.peer, 0, 7 * MIB + 3), 0);
                c.peer = peer_drop(c.peer);
                restart(config_text);
                q = b->tenants[0].quotas[0];
                ck_assert_uint_eq(q->account.charged_bytes, 7 * MIB + 3);
                ck_assert_uint_eq(q->all.bytes_direct, 7 * MIB + 3);
                ck_assert_uint_eq(row_of(c.id)->bytes_direct, 7 * MIB + 3);
                ck_assert_int_eq(resume(&c, 1, listed[i], &why), i == 3 ? -EPROTO : 0);
                ck_assert_uint_eq(q->account.charged_bytes, i == 3 ? 7 * MIB + 3 : listed[i]);
                check();
                c.peer = peer_free(c.peer);
                settle();
                ck_assert_uint_eq(q->account.charged_bytes, 0);
        }
}

TEST_OF(direct, a_list_with_a_charge_twice_or_elsewhere_is_a_violation)
{
        for (int i = 0; i < 2; i++) {
                Bfcd__HeldCharge row = BFCD__HELD_CHARGE__INIT, *rows[] = { &row, &row };
                Bfcd__Held held = BFCD__HELD__INIT;
                Bfcd__Request r = REQUEST(HELD, held, &held);
                struct client c = come_in(1);
                const char *why = NULL;

                ck_assert_int_eq(charge(c.peer, 0, 2), 0);
                c.peer = peer_drop(c.peer);
                restart(config_text);
                c.peer = peer_new(b, 1, false);
                c.peer->wants_return = c.peer->wants_events = true;
                c.peer->return_id = c.id;
                memcpy(c.peer->secret, c.secret, sizeof(c.secret));
                say_hello(c.peer);
                row.partition = i == 0 ? 0 : 2;
                row.n_bytes = 1;
                held.n_charges = i == 0 ? 2 : 1;
                held.charges = rows;
                r.id = 1000;
                ck_assert_int_eq(session_handle(c.peer->session, &r, &why), -EPROTO);
                ck_assert_uint_eq(b->tenants[0].quotas[0]->account.charged_bytes, 2);
                c.peer = peer_free(c.peer);
                settle();
        }
}

/* Sessions that cannot be resumed have them until their process has ended, also after a goodbye, and also where the
 * limit is lower now. */
TEST_OF(direct, a_successor_keeps_those_of_sessions_that_are_gone)
{
        struct peer *gone = watched_session(1), *p = open_session(1);
        uint64_t id = gone->session->id;
        struct session *s;

        ck_assert_int_eq(charge(gone, 0, 20 * MIB), 0);
        (void)peer_goodbye(gone);
        ck_assert_int_eq(reap(gone), SESSION_LINGERS);
        ck_assert(session_can_stay(gone->session));
        peer_drop(gone);
        peer_drop(p);
        restart(CONFIG("limit: 8MiB"));
        ck_assert_uint_eq(b->tenants[0].quotas[0]->account.charged_bytes, 20 * MIB);
        ck_assert_str_eq(row_of(id)->state, "quarantined");
        s = b->sessions.table[0];
        for (size_t i = 0; s->id != id; i++)
                s = b->sessions.table[i + 1];
        session_set_watched(s, true);
        p = open_session(1);
        ck_assert_int_eq(charge(p, 0, 1), EDQUOT);
        session_close(s, "ended with the previous daemon");
        ck_assert_int_eq(session_reap(s, 3), SESSION_LINGERS);
        ck_assert_uint_eq(charged(p), 20 * MIB);
        session_exit(s);
        ck_assert_int_eq(session_reap(s, 3), 0);
        session_free(s);
        ck_assert_uint_eq(charged(p), 0);
        ck_assert_int_eq(charge(p, 0, 8 * MIB), 0);
        must_close(p);
        for (size_t i = 0; i < b->sessions.n_slots; i++) { /* the other one of before */
                s = b->sessions.table[i];
                if (!s || s->role != ROLE_CLIENT)
                        continue;
                session_exit(s);
                ck_assert_int_eq(session_reap(s, 3), 0);
                session_free(s);
        }
}

/* ---- GPUs ----------------------------------------------------------------------- */

static const char gpu_config[] =
        "devices:\n"
        "  - id: cuda:0\n"
        "    headroom: 8MiB\n"
        "    partitions: [{name: one, limit: 64MiB, share: fd, growth: on-demand}]\n"
        "  - id: cuda:1\n"
        "    headroom: 0\n"
        "    partitions: [{name: other, limit: 100%, share: fd, growth: on-demand}]\n"
        "tenants:\n"
        "  - {name: a, match: {uid: 1}, quotas: [{partition: one, limit: 32MiB}, {partition: other}]}\n"
        "  - {name: b, match: {uid: 2}, quotas: [{partition: one}]}\n";

#define CONTEXT (10 * MIB)

static void gpu_setup(void)
{
        gpus_start(gpu_config, true);
        log_open(LOG_LEVEL_INFO);
}

FIXTURE(gpus, gpu_setup, gpus_end);

/* A second passes, in which the device is asked. */
static void a_second(void)
{
        still_clock_pass(1000);
        broker_tick(b);
        settle();
}

/* It takes what it charges. */
static struct peer *user_of(uint64_t n_bytes)
{
        struct peer *p = open_gpu_session(1, true);

        ck_assert_int_eq(charge(p, 0, n_bytes), 0);
        gpus[0].foreign_bytes += n_bytes + CONTEXT;
        for (int i = 0; i < 5; i++)
                a_second();
        ck_assert(!broker_is_blocked(b)); /* enough was asked */
        return p;
}

TEST_OF(gpus, memory_that_is_back_with_the_process_is_uncharged_at_once)
{
        struct peer *p = user_of(8 * MIB), *q = user_of(6 * MIB);

        gpus[0].foreign_bytes -= 8 * MIB + CONTEXT;
        peer_free(p);
        settle();
        ck_assert_uint_eq(charged(a1), 6 * MIB);
        ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 0);
        gpus[0].foreign_bytes -= 6 * MIB + CONTEXT;
        peer_free(q);
        settle();
        ck_assert_uint_eq(charged(a1), 0);
        ck_assert_uint_eq(count_log("unreclaimed"), 0);
}

/* Another process has it, too. A context's bytes are not told from it. */
TEST_OF(gpus, memory_that_stays_after_the_process_is_unreclaimed)
{
        struct peer *p = user_of(8 * MIB), *q = user_of(6 * MIB);

        gpus[0].foreign_bytes -= CONTEXT - 20 * MIB; /* the other one's grows beyond that */
        peer_free(p);
        settle();
        ck_assert_uint_eq(charged(a1), 14 * MIB);
        ck_assert_uint_eq(quota_of(a1, 0)->all.bytes_direct, 6 * MIB);
        ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 8 * MIB);
        a_second();
        ck_assert_uint_eq(charged(a1), 14 * MIB);
        ck_assert_uint_eq(count_log("did not return memory of tenant 'a'"), 1);
        gpus[0].foreign_bytes -= 8 * MIB;
        a_second();
        ck_assert_uint_eq(charged(a1), 6 * MIB);
        gpus[0].foreign_bytes = 0;
        peer_free(q);
        settle();
        ck_assert_uint_eq(charged(a1), 0);
}

/* What is already unreclaimed is not what the next process leaves: not in the samples, and not at its end. */
TEST_OF(gpus, memory_that_was_unreclaimed_hides_none)
{
        struct peer *p = user_of(8 * MIB), *q = user_of(6 * MIB);

        peer_free(p); /* all of it stays */
        settle();
        ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 8 * MIB);
        for (int i = 0; i < 3; i++)
                a_second();
        gpus[0].foreign_bytes -= 8 * MIB;
        a_second();
        ck_assert_uint_eq(charged(a1), 6 * MIB);
        peer_free(q);
        settle();
        ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 6 * MIB);
        gpus[0].foreign_bytes = 0;
        a_second();
        ck_assert_uint_eq(charged(a1), 0);
}

TEST_OF(gpus, memory_that_is_unreclaimed_is_counted_once)
{
        struct peer *p = user_of(8 * MIB), *q = user_of(4 * MIB);

        ck_assert_int_eq(charge(q, 0, 2 * MIB), 0);
        gpus[0].foreign_bytes += 2 * MIB;
        a_second(); /* the last sample is without what stays */
        peer_free(p);
        settle();
        gpus[0].foreign_bytes -= 6 * MIB;
        peer_free(q);
        settle();
        ck_assert_uint_eq(charged(a1), 8 * MIB);
        gpus[0].foreign_bytes = 0;
        a_second();
        ck_assert_uint_eq(charged(a1), 0);
}

/* What a process has charged is not counted as unreclaimed memory of another tenant. */
TEST_OF(gpus, charges_of_others_are_no_unreclaimed_memory)
{
        struct peer *p = user_of(8 * MIB);

        (void)must_malloc(b1, 0, 6 * MIB);
        fake_device_fail_destroy(&gpus[0], 1, -EBUSY);
        b1 = peer_free(b1);
        settle();
        gpus[0].foreign_bytes = 8 * MIB; /* no contexts */
        a_second();
        a_second();
        ck_assert_uint_eq(b->tenants[1].quotas[0]->account.charged_bytes, 0);
        gpus[0].foreign_bytes = 0;
        peer_free(p);
        b1 = open_gpu_session(2, true);
}

/* What ends while the device does not answer, as at the end of the daemon, may be back a moment later. */
TEST_OF(gpus, a_successor_is_told_of_unreclaimed_memory_that_the_device_confirmed)
{
        struct peer *p = user_of(8 * MIB), *q = user_of(6 * MIB);
        const struct ledger_quota *record = ledger_quota_at(b->ledger, quota_of(a1, 0)->index);

        gpus[0].is_closed = true;
        peer_free(p);
        settle();
        for (int i = 0; i < 2; i++) {
                ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 8 * MIB);
                ck_assert_uint_eq(record->unreclaimed_mib, 0);
                a_second();
        }
        gpus[0].is_closed = false;
        a_second();
        ck_assert_uint_eq(arena_unreclaimed_bytes(quota_of(a1, 0)->arena), 8 * MIB);
        ck_assert_uint_eq(record->unreclaimed_mib, 8);
        gpus[0].foreign_bytes -= 8 * MIB;
        a_second();
        ck_assert_uint_eq(charged(a1), 6 * MIB);
        ck_assert_uint_eq(record->unreclaimed_mib, 0);
        gpus[0].foreign_bytes = 0;
        peer_free(q);
        settle();
        ck_assert_uint_eq(charged(a1), 0);
}

/* The process waits for others' bytes, and others for those of a process that has ended. */
TEST_OF(gpus, a_request_waits_for_the_answer_of_the_device)
{
        struct peer *p = user_of(32 * MIB);
        uint64_t id = peer_charge(a1, 0, 4 * MIB, 0);

        gpus[0].foreign_bytes = 0;
        peer_free(p);
        settle();
        ck_assert_int_eq(peer_error(a1, id), 0);
}

static uint64_t order(bool drains)
{
        Bfcd__Drain drain = BFCD__DRAIN__INIT;
        Bfcd__Resume over = BFCD__RESUME__INIT;
        Bfcd__Request r = BFCD__REQUEST__INIT;
        uint64_t id;

        drain.device = over.device = (char *)(uintptr_t) "cuda:0";
        r.body_case = drains ? BFCD__REQUEST__BODY_DRAIN : BFCD__REQUEST__BODY_RESUME;
        if (drains)
                r.drain = &drain;
        else
                r.resume = &over;
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        return id;
}

TEST_OF(gpus, a_drain_waits_for_them)
{
        uint64_t id;

        ck_assert_int_eq(charge(a1, 0, 8 * MIB), 0);
        ck_assert_int_eq(peer_error(admin, order(true)), 0);
        settle();
        ck_assert_str_eq(list_page(admin, BFCD__LIST__KIND__STATUS, 0)->status->devices[0]->state,
                         "draining");
        ck_assert_int_eq(charge(a1, 0, 1), EBUSY);
        ck_assert_int_eq(uncharge(a1, 0, 8 * MIB), 0);
        for (int i = 0; i < 5; i++)
                a_second();
        ck_assert_str_eq(list_page(admin, BFCD__LIST__KIND__STATUS, 0)->status->devices[0]->state, "drained");
        id = order(false);
        settle();
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert_int_eq(charge(a1, 0, 1), 0);
        ck_assert_int_eq(uncharge(a1, 0, 1), 0);
}
