/* Retirement: sessions on a device that cannot empty their mappings are told to
 * let go, and no extent is destroyed before the last of them has. The device
 * asserts that at each destroy (peer_broker_sticky()).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"
#include "daemon/session/recall.h"
#include "daemon/session/request.h"
#include "daemon/session/session_states.h"

#define E (2 * MIB) /* the grid of all quotas */

static const char config_text[] = "timeouts: {reclaim: 40ms}\n"
                                  "devices:\n"
                                  "  - id: host\n"
                                  "    size: 320MiB\n"
                                  "    partitions:\n"
                                  "      - {name: p, limit: 16MiB}\n"
                                  "      - {name: q, limit: 300MiB}\n"
                                  "tenants:\n"
                                  "  - name: a\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas:\n"
                                  "      - {partition: p}\n"
                                  "      - {partition: q}\n"
                                  "  - name: b\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas: [{partition: p, reserve: 2MiB}]\n"
                                  "  - name: c\n"
                                  "    match: {uid: 3}\n"
                                  "    quotas: [{partition: p}]\n";

static struct quota *qa, *qb;
static unsigned n_released;

static void setup(void)
{
        sessions_start_sticky(config_text);
        qa = b->tenants[0].quotas[0];
        qb = b->tenants[1].quotas[0];
        n_released = 0;
}

FIXTURE(retire, setup, sessions_end);

static struct peer *open_notified(uid_t uid, bool wants_events)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_events = wants_events;
        return say_hello(p);
}

/* So much backed and free, of which the peer has every extent. */
static void have_free(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        must_free(p, must_malloc(p, partition, n_bytes));
}

static void on_released(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;

        ck_assert_uint_gt(n_bytes, 0);
        n_released++;
        if (arena_retiring_bytes(q->arena) == 0)
                LIST_DROP(&q->partition->lists.releasing, q, lists.of_releasing);
}

static uint64_t release(struct quota *q, uint64_t n_bytes)
{
        uint64_t n = arena_release(q->arena, n_bytes, NULL, on_released, q);

        if (n > 0)
                LIST_ADD(&q->partition->lists.releasing, q, lists.of_releasing);
        quota_publish(q); /* which it did not do itself */
        settle();
        return n;
}

static void close_and_reap(struct peer *p)
{
        session_close(p->session, "test");
        while (session_reap(p->session, 3) == SESSION_MORE)
                ;
        settle();
}

/* A process that is gone has nothing mapped. */
static void die(struct peer *p)
{
        while (p->n_retires > 0)
                p->n_retires--;
        peer_free(p);
        settle();
}

static void assert_pending(uint64_t suspended, uint64_t pending)
{
        settle();
        ck_assert_uint_eq(arena_suspended_bytes(qa->arena), suspended);
        ck_assert_uint_eq(arena_pending_bytes(qa->arena), pending);
}

/* ---- one and many --------------------------------------------------------- */

TEST(test_events_socket)
{
        struct peer *p = open_notified(1, true), *q = open_notified(1, false), *admin = peer_new(b, 0, true);

        admin->wants_events = true;
        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        ck_assert(p->replies[0]->hello->has_events);
        ck_assert(!q->replies[0]->hello->has_events);
        ck_assert(!admin->replies[0]->hello->has_events);
        ck_assert(session_has_events(p->session) && p->session->delivery.in_flight);
        ck_assert(!session_has_events(q->session) && !q->session->delivery.in_flight);
        peer_free(p);
        peer_free(q);
        peer_free(admin);
}

TEST(test_one)
{
        struct peer *a = open_notified(1, true), *other = open_notified(2, true);
        size_t n_extents;
        uint64_t id;

        have_free(a, 0, 16 * MIB - E);
        id = peer_malloc(other, 0, 2 * E);
        assert_pending(E, E); /* of 2, one is its reserve */
        ck_assert_int_eq(peer_error(other, id), -1);
        ck_assert_uint_eq(a->n_retires, 1);
        ck_assert_uint_eq(a->retires[0].n_ids, 1);
        ck_assert_uint_eq(qa->account.charged_bytes, 16 * MIB - E);
        ck_assert_uint_eq(arena_n_extents(qa->arena), 7);

        ck_assert_int_eq(peer_answer(a, 1), 0);
        ck_assert_uint_eq(arena_leaving_bytes(qa->arena), E);
        assert_pending(0, 0);
        ck_assert_int_eq(peer_error(other, id), 0);
        ck_assert_uint_eq(qa->account.charged_bytes, 12 * MIB);
        ck_assert_uint_eq(arena_n_extents(qa->arena), 6);

        /* A new extent at the old place is sent again. */
        must_malloc(a, 0, 12 * MIB);
        must_free(other, peer_reply(other, id)->block->block_id);
        n_extents = a->n_extents;
        id = peer_malloc(a, 0, E);
        peer_settle(b);
        ck_assert_uint_eq(other->n_retires, 1);
        peer_retired_all(other);
        peer_settle(b);
        ck_assert_int_eq(peer_error(a, id), 0);
        ck_assert_uint_eq(a->n_extents, n_extents + 1);
        peer_free(a);
        peer_free(other);
}

/* The last of them decides, in whatever order they answer. */
TEST(test_many)
{
        struct peer *p[3];
        uint64_t ids[3];

        for (unsigned i = 0; i < 3; i++)
                p[i] = open_notified(1, true);
        for (unsigned i = 0; i < 3; i++)
                ids[i] = must_malloc(p[i], 0, MIB / 2);
        for (unsigned i = 0; i < 3; i++)
                must_free(p[i], ids[i]);
        ck_assert_uint_eq(release(qa, UINT64_MAX), E);
        for (unsigned i = 0; i < 3; i++)
                ck_assert_uint_eq(p[i]->n_retires, 1);
        ck_assert_int_eq(peer_answer(p[1], 1), 0);
        assert_pending(E, E);
        die(p[2]);
        assert_pending(E, E);
        ck_assert_int_eq(peer_answer(p[0], 1), 0);
        assert_pending(0, 0);
        ck_assert_uint_eq(n_released, 1);
        ck_assert_uint_eq(qa->account.charged_bytes, 0);
        peer_free(p[0]);
        peer_free(p[1]);
}

/* Extents without exports are destroyed at once; so are those that all sessions have unmapped. */
TEST(test_no_exports)
{
        struct peer *p = open_notified(1, true), *keeper = open_notified(1, true);

        have_free(p, 0, 2 * E);
        have_free(keeper, 0, E);
        peer_goodbye(p);
        close_and_reap(p);
        if (keeper->n_retires > 0)
                peer_retired_all(keeper);
        assert_pending(0, 0);
        ck_assert_uint_eq(qa->account.charged_bytes, E); /* the other one's share went with it */
        ck_assert_uint_eq(release(qa, UINT64_MAX), E);
        if (keeper->n_retires > 0)
                peer_retired_all(keeper);
        assert_pending(0, 0);
        ck_assert_uint_eq(qa->account.charged_bytes, 0);
        ck_assert_uint_eq(n_released, 1);
        peer_free(p);
        peer_free(keeper);
}

TEST(test_out_of_order)
{
        struct peer *p = open_notified(1, true);

        have_free(p, 0, 4 * E);
        for (unsigned i = 0; i < 4; i++)
                ck_assert_uint_eq(release(qa, E), E);
        ck_assert_uint_eq(p->n_retires, 4);
        ck_assert_int_eq(peer_answer(p, 3), 0);
        assert_pending(3 * E, 3 * E);
        ck_assert_int_eq(peer_answer(p, 4), 0);
        ck_assert_int_eq(peer_answer(p, 1), 0);
        assert_pending(E, E);
        ck_assert_int_eq(peer_answer(p, 2), 0);
        assert_pending(0, 0);
        peer_free(p);
}

TEST(test_wrong_confirmations)
{
        struct peer *p = open_notified(1, true), *q = open_notified(1, false);
        Bfcd__EventReply nothing = BFCD__EVENT_REPLY__INIT;
        const char *why = NULL;

        have_free(p, 0, 2 * E);
        ck_assert_int_eq(peer_answer(p, 1), -EPROTO); /* not sent yet */
        ck_assert_uint_eq(release(qa, E), E);
        ck_assert_int_eq(peer_answer(p, 0), -EPROTO);
        ck_assert_int_eq(peer_answer(p, 2), -EPROTO);
        ck_assert_int_eq(peer_answer(p, UINT64_MAX), -EPROTO);
        ck_assert_int_eq(peer_answer(q, 1), -EPROTO);
        ck_assert_int_eq(session_handle_event(p->session, &nothing, &why), -EPROTO);
        ck_assert_ptr_nonnull(why);
        assert_pending(E, E);
        ck_assert_int_eq(peer_answer(p, 1), 0);
        ck_assert_int_eq(peer_answer(p, 1), -EPROTO); /* twice */
        assert_pending(0, 0);
        peer_free(p);
        peer_free(q);
}

/* ---- bounds --------------------------------------------------------------- */

TEST(test_message_and_window)
{
        struct peer *p = open_notified(1, true);
        struct quota *q = b->tenants[0].quotas[1];

        have_free(p, 1, 100 * E);
        ck_assert_uint_eq(release(q, UINT64_MAX), 100 * E);
        ck_assert_uint_eq(p->n_retires, 2);
        ck_assert_uint_eq(p->retires[0].n_ids, 64);
        ck_assert_uint_eq(p->retires[1].n_ids, 36);
        peer_retired_all(p);
        peer_settle(b);
        ck_assert_uint_eq(q->account.charged_bytes, 0);

        have_free(p, 1, 20 * E);
        for (unsigned i = 0; i < 20; i++) {
                ck_assert_uint_eq(release(q, E), E);
                still_clock_pass(2); /* what comes in one millisecond shares an event */
        }
        ck_assert_uint_eq(p->n_retires, RETIRE_MAX_OPEN);
        ck_assert_uint_eq(p->n_retired, 116);
        ck_assert_int_eq(peer_answer(p, 19), -EPROTO); /* it waits here */
        ck_assert_int_eq(peer_answer(p, 7), 0);
        ck_assert_uint_eq(p->n_retired, 117);
        ck_assert_uint_eq(p->n_retires, RETIRE_MAX_OPEN);
        peer_retired_all(p);
        peer_settle(b);
        ck_assert_uint_eq(q->account.charged_bytes, 0);
        peer_free(p);
}

/* A Retire never passes the Extents that it is about. */
TEST(test_after_the_ack)
{
        struct peer *p = open_notified(1, true);
        uint64_t block;

        p->auto_ack = false;
        block = must_malloc(p, 0, E);
        must_free(p, block);
        ck_assert_uint_eq(release(qa, E), E);
        ck_assert_uint_eq(p->n_retires, 0);
        ck_assert_int_eq(peer_answer(p, 0), -EPROTO); /* what waits has no number yet */
        ck_assert_int_eq(peer_ack(p, 1), 0);
        ck_assert_uint_eq(p->n_retires, 1);
        peer_retired_all(p);
        assert_pending(0, 0);
        peer_free(p);
}

/* Taken back before the client could say that it did not receive it: the Retire stands. */
TEST(test_lost_before_the_retire)
{
        struct peer *p = open_notified(1, true);
        uint64_t block, lost;

        p->auto_ack = false;
        block = must_malloc(p, 0, E);
        lost = peer_extent(p, 1, 0)->extent_id;
        must_free(p, block);
        ck_assert_uint_eq(release(qa, E), E);
        ck_assert_int_eq(peer_ack_without(p, 1, &lost, 1), 0);
        check();
        ck_assert_uint_eq(p->n_retires, 1);
        peer_retired_all(p);
        assert_pending(0, 0);
        peer_free(p);
}

/* It is no reason any more to wait for this session. */
TEST(test_lost_is_not_retired)
{
        struct peer *p = open_notified(1, true);
        uint64_t block, lost;

        p->auto_ack = false;
        block = must_malloc(p, 0, E);
        lost = peer_extent(p, 1, 0)->extent_id;
        ck_assert_int_eq(peer_ack_without(p, 1, &lost, 1), 0);
        must_free(p, block);
        ck_assert_uint_eq(release(qa, E), E);
        peer_settle(b);
        ck_assert_uint_eq(p->n_retires, 0);
        assert_pending(0, 0);
        peer_free(p);
}

/* ---- ends ----------------------------------------------------------------- */

TEST(test_goodbye)
{
        struct peer *p = open_notified(1, true);

        have_free(p, 0, 2 * E);
        release(qa, UINT64_MAX);
        peer_goodbye(p);
        check();
        close_and_reap(p);
        assert_pending(0, 0);
        peer_free(p);
}

TEST(test_quarantine)
{
        struct peer *p = open_notified(1, true), *later = open_notified(1, true), *q = open_notified(1, true);

        have_free(p, 0, E);
        have_free(later, 0, E);
        have_free(q, 0, E); /* all three have it */
        release(qa, UINT64_MAX);
        ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
        assert_pending(0, E);                   /* there is no deadline */
        ck_assert_int_eq(peer_answer(p, 1), 0); /* too late to mean anything */
        peer_retired_all(q);
        peer_retired_all(later);
        assert_pending(0, E);
        ck_assert_uint_eq(qa->account.charged_bytes, E);
        die(p);
        assert_pending(0, 0);
        ck_assert_uint_eq(qa->account.charged_bytes, 0);

        /* And what is asked of one that is quarantined already. */
        have_free(q, 0, E);
        ck_assert_int_eq(session_hang_up(q->session, NULL), 1);
        release(qa, UINT64_MAX);
        assert_pending(0, E);
        ck_assert(TAILQ_EMPTY(&b->recalls.lists[RECALL_RETIRE]));
        die(q);
        assert_pending(0, 0);
        peer_free(later);
}

/* A late session that takes events is not ended; its later confirmations count. */
TEST(test_time_out)
{
        struct peer *p = open_notified(1, true);

        have_free(p, 0, 3 * E);
        release(qa, E);
        still_clock_pass(2); /* a Retire of its own */
        release(qa, E);
        ck_assert(broker_is_blocked(b));
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS - 100);
        assert_pending(2 * E, 2 * E);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        ck_assert(!p->aborted);
        ck_assert(!broker_is_blocked(b));                         /* it has no deadline */
        ck_assert_uint_eq(p->session->tenant->n_unresponsive, 1); /* once, with two Retires */
        assert_pending(0, 2 * E);
        release(qa, E); /* what it is told of from now on is late at once */
        assert_pending(0, 3 * E);
        ck_assert_uint_eq(p->n_retires, 3);
        ck_assert(!broker_is_blocked(b));

        ck_assert_int_eq(peer_answer(p, 2), 0);
        assert_pending(0, 2 * E);
        ck_assert_uint_eq(p->session->tenant->n_unresponsive, 1);
        peer_retired_all(p);
        assert_pending(0, 0);
        ck_assert_uint_eq(p->session->tenant->n_unresponsive, 0);
        ck_assert_uint_eq(qa->account.charged_bytes, 0);

        have_free(p, 0, E); /* it has caught up, and has its own time again */
        release(qa, E);
        ck_assert(broker_is_blocked(b));
        assert_pending(E, E);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        assert_pending(0, E);
        ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
        assert_pending(0, E);
        die(p);
        assert_pending(0, 0);
}

/* A late one ends in whatever way. */
TEST(test_late_goodbye)
{
        struct peer *p = open_notified(1, true), *q = open_notified(1, true);

        have_free(p, 0, 2 * E);
        have_free(q, 0, E);
        release(qa, UINT64_MAX);
        ck_assert_int_eq(peer_answer(q, 1), 0);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        assert_pending(0, 2 * E);
        peer_goodbye(p);
        check();
        close_and_reap(p);
        assert_pending(0, 0);
        peer_free(p);
        peer_free(q);
}

TEST(test_time_out_without_events)
{
        struct peer *unresponsive = open_notified(1, false);

        have_free(unresponsive, 0, E);
        release(qa, UINT64_MAX);
        assert_pending(0, E);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS - 100);
        ck_assert(!unresponsive->aborted);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        ck_assert(unresponsive->aborted);
        ck_assert(!broker_is_blocked(b));
        die(unresponsive);
        assert_pending(0, 0);
}

/* ---- waiting requests ----------------------------------------------------- */

/* Other ranges come and go while one release waits. */
TEST(test_others_proceed)
{
        struct peer *p = open_notified(1, true), *q = open_notified(1, true);
        uint64_t held, id;

        held = must_malloc(p, 0, 2 * E);
        have_free(p, 0, E);
        release(qa, E);
        assert_pending(E, E);
        must_malloc(q, 0, 2 * E); /* grows */
        have_free(q, 0, E);
        ck_assert_uint_eq(release(qa, E), E);
        assert_pending(2 * E, 2 * E);
        peer_retired_all(q);
        assert_pending(E, E);

        /* Of 8 extents 2 are in use, 1 is awaited and 2 are free: 2 are lacking. */
        must_free(p, held);
        id = peer_malloc(q, 0, 5 * E);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), -1);
        assert_pending(2 * E, 2 * E); /* no more than it lacks */
        peer_retired_all(p);
        assert_pending(E, E); /* and then the partition lacks one */
        peer_retired_all(p);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), 0);
        peer_free(p);
        peer_free(q);
}

/* A request waits for timeouts.reclaim and no longer; the release goes on. */
TEST(test_reclaim_timeout)
{
        struct peer *a = open_notified(1, true), *other = open_notified(2, true);
        uint64_t ids[4], id;

        have_free(a, 0, 16 * MIB - E);
        id = peer_malloc(other, 0, 2 * E);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), -1);
        broker_tick(b);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), -1);
        still_clock_pass(60);
        broker_tick(b);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), ENOMEM);
        assert_pending(E, E);
        peer_retired_all(a);
        assert_pending(0, 0);
        must_malloc(other, 0, 2 * E);
        peer_free(other);
        peer_settle(b);

        /* Within one quota, too. */
        have_free(a, 0, 12 * MIB);
        for (unsigned i = 0; i < 4; i++)
                ids[i] = must_malloc(a, 0, (2 - i % 2) * E);
        must_free(a, ids[0]);
        must_free(a, ids[2]);
        id = peer_malloc(a, 0, 5 * E);
        peer_settle(b);
        ck_assert_int_eq(peer_error(a, id), -1);
        still_clock_pass(60);
        broker_tick(b);
        peer_settle(b);
        peer_trimmed_all(a);
        ck_assert_int_eq(peer_error(a, id), EDQUOT);
        peer_retired_all(a);
        peer_free(a);
}

/* An unresponsive session does not hide what others can release. */
TEST(unresponsive_session_does_not_hide_others)
{
        struct peer *a = open_notified(1, true), *other = open_notified(2, true), *c = open_notified(3, true);
        uint64_t id;

        have_free(a, 0, 3 * E);
        have_free(c, 0, 3 * E);
        id = peer_malloc(other, 0, 5 * E); /* its reserve, the unused part, and 3 more */
        assert_pending(3 * E, 3 * E);
        ck_assert_uint_eq(c->n_retires, 0);
        still_clock_pass(60);
        broker_tick(b);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), -1);
        ck_assert_uint_eq(c->n_retires, 1);
        peer_retired_all(c);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), 0);

        /* It is asked once, not again and again. */
        peer_free(c);
        id = peer_malloc(other, 0, 2 * E);
        for (unsigned i = 0; i < 2; i++) {
                peer_settle(b);
                still_clock_pass(60);
                broker_tick(b);
        }
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), ENOMEM);
        peer_free(other);
        peer_free(a);
}

/* No request waits for late extents. */
TEST(late_session_is_not_waited_for)
{
        struct peer *a = open_notified(1, true), *other = open_notified(2, true);
        uint64_t id;

        have_free(a, 0, 16 * MIB - E);
        ck_assert_int_eq(session_hang_up(a->session, NULL), 1);
        id = peer_malloc(other, 0, 2 * E);
        peer_settle(b);
        ck_assert_int_eq(peer_error(other, id), ENOMEM);
        assert_pending(0, E); /* it was worth a try */
        must_malloc(other, 0, E);
        die(a);
        must_malloc(other, 0, 7 * E);
        peer_free(other);
}

/* No extent is released that would be late, and no session is ended for it. */
TEST(no_release_that_would_be_late)
{
        struct peer *p = open_notified(1, false), *late = open_notified(1, true);
        uint64_t block;

        block = must_malloc(p, 0, 3 * MIB); /* 4 MiB */
        must_malloc(p, 0, MIB);
        must_free(p, block); /* one extent is wholly free */
        must_malloc(p, 0, 4 * MIB);
        ck_assert_uint_eq(arena_pending_bytes(qa->arena), 0);
        ck_assert(TAILQ_EMPTY(&b->recalls.lists[RECALL_RETIRE]));
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        ck_assert(!p->aborted);
        die(p);
        release(qa, UINT64_MAX); /* no session has any of it */
        assert_pending(0, 0);

        /* One session is late, and then is not. */
        have_free(late, 0, E);
        release(qa, E);
        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
        assert_pending(0, E);
        block = must_malloc(late, 0, 3 * MIB);
        must_malloc(late, 0, MIB);
        must_free(late, block);
        must_malloc(late, 0, 4 * MIB);
        assert_pending(0, E);
        ck_assert_uint_eq(late->n_retires, 1);
        peer_retired_all(late);
        assert_pending(0, 0);
        peer_free(late);
}

/* A session that waits for memory can let go of some. */
TEST(waiting_session_confirms_retire)
{
        struct peer *p = open_notified(1, true);
        uint64_t ids[4], id;

        for (unsigned i = 0; i < 4; i++)
                ids[i] = must_malloc(p, 0, 3 * MIB);
        must_malloc(p, 0, MIB);
        must_free(p, ids[0]);
        must_free(p, ids[2]);
        id = peer_malloc(p, 0, 3 * E);
        peer_settle(b);
        if (peer_error(p, id) == -1) {
                ck_assert_uint_gt(p->n_retires, 0);
                peer_retired_all(p);
                peer_settle(b);
                peer_trimmed_all(p);
        }
        ck_assert_int_ne(peer_error(p, id), -1);
        peer_free(p);
}

/* The end of the last one that an operator's Trim waits for is the end of the order, which then
 * gives back what is wholly free: nothing of that is asked of a session that ends. */
LOOP_TEST(session_ends_during_a_trim_command, 2)
{
        struct peer *admin = peer_new(b, 0, true), *p = peer_new(b, 1, false);
        Bfcd__TrimNow trim = BFCD__TRIM_NOW__INIT;
        Bfcd__Request r = REQUEST(TRIM_NOW, trim_now, &trim);
        uint64_t id, free_later;

        (void)peer_hello(admin, "", "");
        p->wants_events = true;
        ck_assert_int_eq(peer_error(p, peer_hello(p, "", "")), 0);
        must_malloc(p, 0, E);
        free_later = must_malloc(p, 0, E);
        must_free(p, free_later);
        ck_assert_int_eq(peer_send(admin, &r, &id), 0);
        ck_assert_uint_eq(p->n_trims, 1);
        ck_assert_int_eq(peer_error(admin, id), -1);
        if (_i != 0)
                (void)peer_goodbye(p);
        else
                (void)session_hang_up(p->session, NULL);
        check();
        ck_assert_int_eq(peer_error(admin, id), 0);
        ck_assert(TAILQ_EMPTY(&b->recalls.lists[RECALL_RETIRE]));
        ck_assert(TAILQ_EMPTY(&p->session->recall.queues[RECALL_RETIRE].open));
        peer_free(p);
        peer_free(admin);
        peer_settle(b);
}
