/* Trimming, and requests that wait: on sessions without sockets. The clock is the test's, so that no
 * deadline passes while a loaded machine has no time for it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"
#include "daemon/session/recall.h"

#define E          (2 * MIB) /* the grid of all quotas */
#define RECLAIM_MS 60u

static const char config_text[] = "timeouts: {reclaim: 60ms}\n"
                                  "devices:\n"
                                  "  - id: host\n"
                                  "    size: 512MiB\n"
                                  "    partitions:\n"
                                  "      - {name: p, limit: 16MiB}\n"
                                  "      - {name: q, limit: 496MiB}\n"
                                  "tenants:\n"
                                  "  - name: a\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas:\n"
                                  "      - {partition: p, limit: 12MiB}\n"
                                  "      - {partition: q, limit: 400MiB}\n"
                                  "  - name: b\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas: [{partition: p, reserve: 4MiB}]\n"
                                  "  - name: c\n"
                                  "    match: {uid: 3}\n"
                                  "    quotas: [{partition: p}]\n";

static void setup(void)
{
        sessions_start(config_text);
}

FIXTURE(trim, setup, sessions_end);

static struct peer *open_trimmed(uid_t uid, bool wants_trim)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_events = wants_trim;
        p->has_no_events = !wants_trim;
        return say_hello(p);
}

/* It unmaps what it is asked for, and has nothing idle. */
static struct peer *open_answering(uid_t uid)
{
        return say_hello(peer_new(b, uid, false));
}

static void must_answer(struct peer *p)
{
        ck_assert_uint_eq(p->n_trims, 1);
        ck_assert_int_eq(peer_answer(p, p->trims[0].sequence), 0);
        settle();
}

/* Time passes, and is looked at. */
static void wait_a_little(unsigned ms)
{
        still_clock_pass(ms);
        broker_tick(b);
        recall_tick(b, clock_ms());
        settle();
}

static uint64_t sum_ranges(const struct peer_trim *t)
{
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < t->n_ranges; i++)
                n_bytes += t->ranges[i].n_bytes;
        return n_bytes;
}

/* ---- which sessions are asked ------------------------------------------------ */

/* First the requesting session, then the tenant's others, one at a time as long as they answer. */
TEST(test_within_a_tenant)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, true), *z = open_trimmed(1, true);
        uint64_t of_x[2], of_y, id;

        of_x[0] = must_malloc(x, 0, E);
        of_x[1] = must_malloc(x, 0, E);
        of_y = must_malloc(y, 0, 3 * E);
        must_malloc(z, 0, E);
        id = peer_malloc(z, 0, E);
        settle();
        ck_assert_int_eq(peer_error(z, id), -1);
        ck_assert_uint_eq(x->n_trims + y->n_trims, 0);
        ck_assert_uint_eq(z->n_trims, 1);
        ck_assert_uint_eq(z->trims[0].n_bytes, 2 * E); /* one more: blocks do not end where extents do */
        ck_assert_uint_eq(z->trims[0].n_ranges, 1);
        ck_assert_uint_eq(z->trims[0].ranges[0].n_bytes, E);
        must_answer(z);
        /* The one with the most. */
        ck_assert_uint_eq(x->n_trims, 1);
        ck_assert_uint_eq(y->n_trims, 1);
        ck_assert_uint_eq(sum_ranges(&y->trims[0]), 3 * E);
        ck_assert_uint_eq(sum_ranges(&x->trims[0]), 2 * E);
        must_answer(y);
        ck_assert_int_eq(peer_error(z, id), -1);
        must_free(x, of_x[0]);
        must_answer(x);
        ck_assert_int_eq(peer_error(z, id), 0);
        ck_assert_uint_eq(z->n_trims, 0);
        (void)of_x[1];
        (void)of_y;
        must_close(x);
        must_close(y);
        must_close(z);
}

/* All have answered and nothing came: it is refused there and then. */
TEST(test_refused_at_once)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, true);
        uint64_t id; /* no tick: no answer is awaited */

        must_malloc(x, 0, 4 * E);
        must_malloc(y, 0, 2 * E);
        id = peer_malloc(y, 0, E);
        settle();
        must_answer(y);
        must_answer(x); /* a lie */
        ck_assert_int_eq(peer_error(y, id), EDQUOT);
        ck_assert_uint_eq(x->n_trimmed + y->n_trimmed, 2);
        must_close(x);
        must_close(y);
}

/* The client that requests frees what it was asked for, block after block. Until it has answered, or is late, nothing is
 * released for a place that is the best with a part of the answer. */
TEST(the_whole_answer_is_waited_for)
{
        for (unsigned is_late = 0; is_late < 2; is_late++) {
                struct peer *x = open_trimmed(1, true);
                const Bfcd__Reply *reply;
                uint64_t of_x[6], id;

                for (size_t i = 0; i < 6; i++)
                        of_x[i] = must_malloc(x, 0, E);
                id = peer_malloc(x, 0, 3 * E);
                settle();
                ck_assert_uint_eq(x->n_trims, 1);
                for (size_t i = 0; i < 6; i += 2)
                        must_free(x, of_x[i]);
                wait_a_little(RECLAIM_MS - 1);
                ck_assert_int_eq(peer_error(x, id), -1);
                if (is_late) {
                        wait_a_little(2 * RECLAIM_MS);
                } else {
                        must_free(x, of_x[5]);
                        must_answer(x);
                }
                reply = peer_reply(x, id);
                ck_assert(reply && reply->body_case == BFCD__REPLY__BODY_BLOCK);
                /* One new extent behind two that are there, or three behind all of them. */
                ck_assert_uint_eq(reply->block->offset, is_late ? 6 * E : 4 * E);
                must_close(x);
        }
}

/* A session without Trim is not asked, and no session is asked for extents in which it has a block. */
TEST(test_unwilling)
{
        struct peer *x = open_trimmed(1, true), *no = open_trimmed(1, false);
        uint64_t id;

        must_malloc(no, 0, E / 2);
        must_malloc(x, 0, E / 2); /* in the same extent */
        must_malloc(x, 0, 4 * E);
        must_malloc(x, 0, E);
        id = peer_malloc(x, 0, E);
        settle();
        ck_assert_uint_eq(x->n_trims, 1);
        ck_assert_uint_eq(sum_ranges(&x->trims[0]), 5 * E);
        must_answer(x);
        ck_assert_int_eq(peer_error(x, id), EDQUOT);
        /* When it is gone, its extent counts. */
        must_close(no);
        id = peer_malloc(x, 0, E);
        settle();
        ck_assert_uint_eq(sum_ranges(&x->trims[0]), 6 * E);
        must_answer(x);
        ck_assert_int_eq(peer_error(x, id), EDQUOT);
        must_close(x);
}

/* Where the partition is full: tenants above their reserve, and no more than is above it. */
TEST(test_between_tenants)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(2, true), *z = open_trimmed(3, true);
        uint64_t of_x[3], id;

        for (int i = 0; i < 3; i++)
                of_x[i] = must_malloc(x, 0, E);
        must_malloc(y, 0, 3 * E); /* 1 above its reserve */
        must_malloc(z, 0, 2 * E);
        id = peer_malloc(z, 0, 2 * E);
        settle();
        /* Its own first, then two at once: those with the most. */
        ck_assert_uint_eq(x->n_trims + y->n_trims + z->n_trims, 1);
        for (int round = 0; round < 3 && peer_error(z, id) < 0; round++) {
                if (y->n_trims > 0) {
                        ck_assert_uint_eq(y->trims[0].n_bytes, 2 * E);
                        must_answer(y);
                }
                if (z->n_trims > 0)
                        must_answer(z);
                if (x->n_trims > 0) {
                        ck_assert_uint_eq(x->trims[0].n_bytes, 3 * E);
                        must_free(x, of_x[0]);
                        must_free(x, of_x[1]);
                        must_answer(x);
                }
        }
        ck_assert_int_eq(peer_error(z, id), 0);
        ck_assert_uint_ge(b->tenants[1].quotas[0]->account.charged_bytes, 2 * E);
        must_close(x);
        must_close(y);
        must_close(z);
}

/* A tenant within its reserve is not asked. */
TEST(test_reserves_are_not_asked_for)
{
        struct peer *x = open_trimmed(1, false), *y = open_trimmed(2, true);
        uint64_t id;

        must_malloc(y, 0, 2 * E);
        must_malloc(x, 0, 6 * E);
        id = peer_malloc(open_trimmed(3, false), 0, E);
        settle();
        ck_assert_uint_eq(y->n_trimmed, 0);
        for (uint32_t i = 0; i < b->sessions.n_slots; i++)
                if (b->sessions.table[i] && b->sessions.table[i] != x->session &&
                    b->sessions.table[i] != y->session) {
                        struct peer *z = b->sessions.table[i]->userdata;

                        ck_assert_int_eq(peer_error(z, id), ENOMEM);
                        must_close(z);
                        break;
                }
        must_close(x);
        must_close(y);
}

/* ---- answers, and none -------------------------------------------------------- */

TEST(unresponsive_session_is_skipped)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, true);
        uint64_t of_x = must_malloc(x, 0, 4 * E), id, sequence;

        must_malloc(y, 0, 2 * E);
        id = peer_malloc(y, 0, E);
        settle();
        must_answer(y);
        ck_assert_uint_eq(x->n_trims, 1);
        recall_tick(b, clock_ms() - 1); /* by a clock that was read before the Trim was sent */
        ck_assert_uint_eq(x->session->recall.queues[RECALL_TRIM].n_missed, 0);
        sequence = x->trims[0].sequence;
        wait_a_little(RECLAIM_MS / 2);
        ck_assert_int_eq(peer_error(y, id), -1);
        wait_a_little(RECLAIM_MS);
        ck_assert_int_eq(peer_error(y, id), EDQUOT);
        ck_assert_uint_eq(x->session->recall.queues[RECALL_TRIM].n_missed, 1);
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 1);
        /* It is neither awaited nor asked again. */
        id = peer_malloc(y, 0, E);
        settle();
        must_answer(y);
        ck_assert_int_eq(peer_error(y, id), EDQUOT);
        ck_assert_uint_eq(x->n_trimmed, 1);
        /* Until it answers. */
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 1);
        ck_assert_int_eq(peer_answer(x, sequence), 0);
        ck_assert_uint_eq(x->session->tenant->n_unresponsive, 0);
        id = peer_malloc(y, 0, E);
        settle();
        must_answer(y);
        ck_assert_uint_eq(x->n_trimmed, 2);
        must_free(x, of_x);
        must_answer(x);
        ck_assert_int_eq(peer_error(y, id), 0);
        ck_assert_uint_eq(x->session->recall.queues[RECALL_TRIM].n_missed, 1);
        must_close(x);
        must_close(y);
}

/* A late answer serves requests that still wait. */
TEST(test_late)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t of_x = must_malloc(x, 0, 4 * E), id;

        must_malloc(y, 0, 2 * E);
        id = peer_malloc_wait(y, 0, E, 10000);
        settle();
        wait_a_little(2 * RECLAIM_MS);
        ck_assert_uint_eq(x->session->recall.queues[RECALL_TRIM].n_missed, 1);
        ck_assert_int_eq(peer_error(y, id), -1);
        must_free(x, of_x);
        must_answer(x);
        ck_assert_int_eq(peer_error(y, id), 0);
        must_close(x);
        must_close(y);
}

TEST(invalid_trim_answers)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t id;

        ck_assert_int_eq(peer_answer(y, 1), -EPROTO); /* it is never asked */
        ck_assert_int_eq(peer_answer(x, 0), -EPROTO);
        ck_assert_int_eq(peer_answer(x, 1), -EPROTO);
        must_malloc(x, 0, 6 * E);
        id = peer_malloc(y, 0, E);
        settle();
        ck_assert_uint_eq(x->n_trims, 1);
        ck_assert_int_eq(peer_answer(x, 2), -EPROTO);
        ck_assert_int_eq(peer_answer(x, 0), -EPROTO);
        ck_assert_int_eq(peer_answer(x, 1), 0);
        ck_assert_int_eq(peer_answer(x, 1), -EPROTO);
        settle();
        ck_assert_int_eq(peer_error(y, id), EDQUOT);
        must_close(x);
        must_close(y);
}

/* The asked session ends: its memory is released as after any end. */
TEST(asked_session_ends)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t id;

        must_malloc(x, 0, 6 * E);
        id = peer_malloc_wait(y, 0, E, 1000);
        settle();
        ck_assert_uint_eq(x->n_trims, 1);
        must_close(x);
        ck_assert_int_eq(peer_error(y, id), 0);
        must_close(y);
}

/* The requesting session is gone: the answer has no effect. */
TEST(requesting_session_ends)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t of_x = must_malloc(x, 0, 6 * E);

        peer_malloc(y, 0, E);
        settle();
        must_close(y);
        must_free(x, of_x);
        must_answer(x);
        must_close(x);
}

/* ---- ranges -------------------------------------------------------------------- */

/* 200 extents, every second with a block of a session that cannot be asked: 64 ranges at a time, and
 * the next when nothing came of those. */
TEST(test_ranges_are_bounded)
{
        struct peer *x = open_trimmed(1, true), *no = open_trimmed(1, false);
        uint64_t ids[200], first = 0, id;
        unsigned n_asked = 0;

        for (int i = 0; i < 200; i++)
                ids[i] = must_malloc(i % 2 ? no : x, 1, E);
        id = peer_malloc(no, 1, E);
        settle();
        for (; x->n_trims > 0; n_asked++) {
                ck_assert_uint_le(x->trims[0].n_ranges, 64);
                ck_assert_uint_gt(x->trims[0].ranges[0].offset + 1, first);
                first = x->trims[0].ranges[0].offset + 1;
                for (size_t i = 0; i < x->trims[0].n_ranges; i++)
                        ck_assert_uint_eq(x->trims[0].ranges[i].offset / E % 2, 0);
                if (n_asked == 1)
                        must_free(x, ids[180]);
                must_answer(x);
        }
        ck_assert_int_eq(peer_error(no, id), 0);
        ck_assert_uint_eq(n_asked, 2);
        must_close(x);
        must_close(no);
}

/* What it has are small pieces all over its extents, and it gives those first that help least: a few
 * rounds are enough all the same. */
TEST(test_few_rounds)
{
        enum { PER_EXTENT = 4, N = 192 * PER_EXTENT };
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t *ids = calloc(N, sizeof(*ids)), id;
        unsigned n_rounds = 0, n_given = 0;

        for (unsigned i = 0; i < N; i++)
                ids[i] = must_malloc(x, 1, E / PER_EXTENT);
        must_malloc(y, 1, 8 * E);
        id = peer_malloc_wait(y, 1, E, 60000); /* a busy machine may take its time */
        settle();
        while (peer_error(y, id) < 0) {
                uint64_t sum = 0;

                ck_assert_uint_eq(x->n_trims, 1);
                ck_assert_uint_lt(++n_rounds, 20);
                for (; sum < x->trims[0].n_bytes && n_given < N; n_given++, sum += E / PER_EXTENT)
                        must_free(x, ids[n_given % 192 * PER_EXTENT + n_given / 192]);
                must_answer(x);
                peer_forget_replies(x);
        }
        ck_assert_int_eq(peer_error(y, id), 0);
        ck_assert_uint_gt(n_rounds, 1);
        free(ids);
        must_close(x);
        must_close(y);
}

/* A session without idle memory is not examined again until its blocks change, and its client page
 * is not read. */
TEST(idle_sessions_are_not_asked_twice)
{
        struct peer *no = open_trimmed(1, false), *x[20];
        uint64_t id, since;

        must_malloc(no, 0, 256);
        for (int i = 0; i < 20; i++) {
                x[i] = open_trimmed(1, true);
                must_malloc(x[i], 0, 256); /* in the same extent */
        }
        for (int i = 0; i < 3; i++) {
                id = peer_malloc(no, 0, 6 * E);
                settle();
                ck_assert_int_eq(peer_error(no, id), EDQUOT);
                since = x[0]->session->shares[0].trim.empty_since;
                ck_assert_uint_gt(since, 0);
                for (int k = 0; k < 20; k++) {
                        const struct trim_share *share = &x[k]->session->shares[0].trim;

                        ck_assert_uint_eq(share->empty_since, since);
                        ck_assert_uint_eq(share->asked.hint.read_ms, 0);
                        ck_assert_uint_eq(x[k]->n_trimmed, 0);
                }
        }
        ck_assert_uint_eq(x[7]->session->shares[0].trim.empty_since, since);
        must_close(no);
        id = peer_malloc(x[0], 0, 6 * E);
        settle();
        must_answer(x[0]);
        ck_assert_uint_gt(x[1]->n_trims + x[2]->n_trims + x[3]->n_trims, 0);
        ck_assert_int_eq(peer_error(x[0], id), -1);
        for (int i = 0; i < 20; i++)
                must_close(x[i]);
}

/* ---- waiting -------------------------------------------------------------------- */

TEST(test_wait_is_over)
{
        struct peer *x = open_trimmed(1, false);
        uint64_t id, began = clock_ms();

        must_malloc(x, 0, 6 * E);
        id = peer_malloc_wait(x, 0, E, 100);
        settle();
        ck_assert_int_eq(peer_error(x, id), -1);
        while (peer_error(x, id) < 0 && clock_ms() - began < 5000)
                wait_a_little(5);
        ck_assert_int_eq(peer_error(x, id), EDQUOT);
        ck_assert_uint_ge(clock_ms() - began, 100);
        ck_assert_uint_lt(clock_ms() - began, 100 + RECLAIM_MS);
        ck_assert(!broker_is_blocked(b));
        must_close(x);
}

/* As soon as there is room, without a tick. */
TEST(test_woken_at_once)
{
        struct peer *x = open_answering(1), *y = open_answering(2);
        uint64_t of_x = must_malloc(x, 0, 6 * E), id;

        id = peer_malloc_wait(x, 0, E, 60000);
        settle();
        must_free(x, of_x);
        settle();
        ck_assert_int_eq(peer_error(x, id), 0);
        /* The partition's. */
        of_x = must_malloc(x, 0, 5 * E);
        id = peer_malloc_wait(y, 0, 5 * E, 60000);
        settle();
        wait_a_little(3 * RECLAIM_MS);
        ck_assert_int_eq(peer_error(y, id), -1);
        must_free(x, of_x);
        settle();
        ck_assert_int_eq(peer_error(y, id), 0);
        must_close(x);
        must_close(y);
}

/* Room in the partition serves the request that has waited the longest; reserves need not wait. */
TEST(test_the_longest_waiting_first)
{
        struct peer *x = open_answering(1), *y = open_answering(2), *z = open_answering(3);
        uint64_t of_x[5], large, small, n = 0;

        for (int i = 0; i < 5; i++)
                of_x[i] = must_malloc(x, 0, E); /* 1 of 8 is left beside the reserve of 2 */
        large = peer_malloc_wait(z, 0, 3 * E, 60000);
        settle();
        small = peer_malloc_wait(x, 0, E, 60000); /* for which there is room, but it came later */
        settle();
        ck_assert_int_eq(peer_error(z, large), -1);
        ck_assert_int_eq(peer_error(x, small), -1);
        must_malloc(y, 0, 2 * E); /* its reserve */
        /* A flood of small ones, beyond what anybody would wait. */
        wait_a_little(4 * RECLAIM_MS);
        for (int i = 0; i < 20; i++) {
                uint64_t id = peer_malloc(y, 0, E);

                settle();
                n += peer_error(y, id) == 0;
        }
        ck_assert_uint_eq(n, 0);
        must_free(x, of_x[0]);
        settle();
        /* It fits into what its tenant has, so it takes nothing of the partition's. */
        ck_assert_int_eq(peer_error(x, small), 0);
        ck_assert_int_eq(peer_error(z, large), -1);
        must_free(x, of_x[1]);
        must_free(x, of_x[2]);
        broker_tick(b); /* that free followed another one closely */
        settle();
        ck_assert_int_eq(peer_error(z, large), 0);
        must_close(x);
        must_close(y);
        must_close(z);
}

/* In order; smaller requests pass, but not for ever. */
TEST(test_in_order_within_a_tenant)
{
        struct peer *x = open_trimmed(1, false), *y = open_trimmed(1, false);
        uint64_t of_x[6], first, second, id;

        for (int i = 0; i < 6; i++)
                of_x[i] = must_malloc(x, 0, E);
        first = peer_malloc_wait(y, 0, E, 60000);
        second = peer_malloc_wait(x, 0, E, 60000);
        settle();
        wait_a_little(2 * RECLAIM_MS);
        must_free(x, of_x[0]);
        settle();
        ck_assert_int_eq(peer_error(y, first), 0);
        ck_assert_int_eq(peer_error(x, second), -1);
        must_free(x, of_x[1]);
        settle();
        ck_assert_int_eq(peer_error(x, second), 0);

        /* A large one, and small ones that fit. */
        first = peer_malloc_wait(y, 0, 2 * E, 60000);
        settle();
        wait_a_little(2 * RECLAIM_MS);
        must_free(x, of_x[2]);
        id = peer_malloc(x, 0, E);
        settle();
        ck_assert_int_eq(peer_error(x, id), 0);
        of_x[2] = peer_reply(x, id)->block->block_id;
        /* After a second it has the first word. */
        for (int i = 0; i < 11; i++)
                wait_a_little(100);
        must_free(x, of_x[2]);
        id = peer_malloc(x, 0, E);
        settle();
        ck_assert_int_eq(peer_error(x, id), -1);
        must_free(x, of_x[3]);
        settle();
        ck_assert_int_eq(peer_error(y, first), 0);
        while (peer_error(x, id) < 0)
                wait_a_little(10);
        ck_assert_int_eq(peer_error(x, id), EDQUOT);
        must_close(x);
        must_close(y);
}

/* A request that waits for minutes delays later ones no longer than their own time-out. */
TEST(test_behind_one_that_waits)
{
        struct peer *x = open_trimmed(1, false), *y = open_trimmed(1, false);
        uint64_t of_x[5], first, too_much, fits, began;

        for (int i = 0; i < 5; i++)
                of_x[i] = must_malloc(x, 0, E);
        first = peer_malloc_wait(y, 0, 3 * E, 60000);
        settle();
        too_much = peer_malloc(x, 0, 2 * E);
        fits = peer_malloc(x, 0, E); /* the limit has room for it */
        settle();
        began = clock_ms();
        while ((peer_error(x, too_much) < 0 || peer_error(x, fits) < 0) && clock_ms() - began < 5000)
                wait_a_little(5);
        ck_assert_int_eq(peer_error(x, too_much), EDQUOT);
        ck_assert_int_eq(peer_error(x, fits), 0);
        ck_assert_uint_lt(clock_ms() - began, 10 * RECLAIM_MS);
        ck_assert_int_eq(peer_error(y, first), -1);
        (void)of_x;
        must_close(x);
        must_close(y);
}

/* While it waits more comes to lie idle: that is asked for too. */
TEST(test_asked_again_while_waiting)
{
        struct peer *x = open_trimmed(1, true), *y = open_trimmed(1, false);
        uint64_t of_x = must_malloc(x, 0, 6 * E), id, began = clock_ms();

        id = peer_malloc_wait(y, 0, E, 60000);
        settle();
        must_answer(x);
        ck_assert_int_eq(peer_error(y, id), -1);
        while (x->n_trims == 0 && clock_ms() - began < 5000)
                wait_a_little(20);
        must_free(x, of_x);
        must_answer(x);
        ck_assert_int_eq(peer_error(y, id), 0);
        must_close(x);
        must_close(y);
}

/* ---- claims ---------------------------------------------------------------------- */

static unsigned wait_for(struct peer *p, uint64_t id)
{
        uint64_t began = clock_ms();

        while (peer_error(p, id) < 0 && clock_ms() - began < 10000)
                wait_a_little(5);
        return (unsigned)(clock_ms() - began);
}

/* A request that other tenants' reserves exclude is refused at once: no Trim, no claim. */
TEST(request_that_trimming_cannot_serve)
{
        struct peer *x = open_trimmed(1, true), *z = open_trimmed(3, true);
        uint64_t id;

        must_malloc(x, 0, E);
        must_malloc(z, 0, E);
        id = peer_malloc_wait(z, 0, 6 * E + 1, 60000); /* 8, of which 2 are guaranteed */
        ck_assert_int_eq(peer_error(z, id), ENOMEM);
        ck_assert_ptr_nonnull(strstr(peer_reply(z, id)->refusal->message, "guaranteed to other tenants"));
        ck_assert_uint_eq(b->partitions[0].claims.n, 0);
        ck_assert_uint_eq(x->n_trimmed + z->n_trimmed, 0);
        ck_assert_uint_eq(quota_life(b->tenants[2].quotas[0])->n_out_of_memory, 1);
        must_malloc(x, 0, 4 * E);
        must_close(x);
        must_close(z);
}

/* A request that only its tenant's memory can serve asks no other tenant and claims nothing. */
TEST(only_trims_of_the_tenant_help)
{
        struct peer *x = open_trimmed(1, true), *z = open_trimmed(3, true);
        uint64_t of_z = must_malloc(z, 0, 4 * E), of_x, id;

        of_x = must_malloc(x, 0, E);
        id = peer_malloc_wait(z, 0, 3 * E, 60000);
        settle();
        ck_assert_uint_eq(x->n_trimmed, 0);
        ck_assert_uint_eq(z->n_trims, 1);
        ck_assert_uint_ge(z->trims[0].n_bytes, E);
        must_answer(z);
        ck_assert_uint_eq(x->n_trimmed, 0);
        ck_assert_uint_eq(b->partitions[0].claims.n, 0);
        must_malloc(x, 0, E);
        must_free(x, of_x);
        ck_assert_int_eq(peer_error(z, id), -1);
        must_free(z, of_z);
        settle();
        ck_assert_int_eq(peer_error(z, id), 0);
        must_close(x);
        must_close(z);
}

/* A very large waiting request lets others pass after a second, if these would be refused beside
 * free memory; memory that is released later is reserved for it. */
TEST(waiting_claims_refuse_no_request)
{
        struct peer *x = open_answering(1), *y = open_answering(2), *z = open_answering(3);
        uint64_t of_x[3], much, id;
        unsigned ms;

        of_x[0] = must_malloc(x, 0, E);
        much = peer_malloc_wait(z, 0, 6 * E, 60000);
        settle();
        id = peer_malloc(x, 0, E);
        settle();
        ck_assert_int_eq(peer_error(x, id), -1);
        ms = wait_for(x, id);
        ck_assert_int_eq(peer_error(x, id), 0);
        of_x[1] = peer_reply(x, id)->block->block_id;
        ck_assert_uint_ge(ms, 800);
        ck_assert_uint_lt(ms, 3000);
        /* From now on at once, except requests that may wait. */
        of_x[2] = must_malloc(x, 0, E);
        id = peer_malloc_wait(y, 0, 3 * E, 60000);
        settle();
        ck_assert_int_eq(peer_error(y, id), -1);
        ck_assert_int_eq(peer_error(z, much), -1);
        for (int i = 0; i < 3; i++)
                must_free(x, of_x[i]);
        settle();
        ck_assert_int_eq(peer_error(z, much), 0);
        must_close(x);
        must_close(y);
        must_close(z);
}

/* Nor do many that each wait for less than that: their tenant's time is up, not theirs. */
TEST(test_claims_one_after_the_other)
{
        struct peer *x = open_trimmed(1, false), *z = open_trimmed(3, false);
        uint64_t much = 0, id;
        unsigned ms = 0;

        must_malloc(x, 0, E);
        for (int i = 0; i < 3; i++) {
                much = peer_malloc_wait(z, 0, 6 * E, 600);
                settle();
                id = peer_malloc(x, 0, E);
                ms += wait_for(x, id);
                ck_assert_int_eq(peer_error(x, id), 0);
                must_free(x, peer_reply(x, id)->block->block_id);
                wait_for(z, much);
                ck_assert_int_eq(peer_error(z, much), ENOMEM);
                quota_release_idle(b->tenants[0].quotas[0]);
                settle();
        }
        printf("# %u ms\n", ms);
        ck_assert_uint_lt(ms, 2500);
        much = peer_malloc_wait(z, 0, 6 * E, 600);
        settle();
        must_malloc(x, 0, E);
        ck_assert_int_eq(peer_error(z, much), -1);
        must_close(x);
        must_close(z);
}
