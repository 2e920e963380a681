/* Sessions without sockets: every request, every refusal, the reclaim steps, the
 * window of extents, deaths at each step, and a long random walk.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/session/accounting.h"
#include "daemon/session/delivery.h"
#include "daemon/session/request.h"
#include "daemon/session/session_states.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/record/records.h"
#include "tests/suite.h"
#include "tests/checks.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

/* train: 64 MiB, overcommitted: a 48 MiB, b 48 MiB of which 16 are guaranteed.
 * warm: preallocated, 8 MiB for a. */
static const char config_text[] =
        "devices:\n"
        "  - id: host\n"
        "    size: 128MiB\n"
        "    partitions:\n"
        "      - {name: train, limit: 64MiB}\n"
        "      - {name: warm, limit: 8MiB, growth: preallocate}\n"
        "tenants:\n"
        "  - name: a\n"
        "    match: {uid: 1}\n"
        "    quotas:\n"
        "      - {partition: train, limit: 48MiB, max_sessions: 3, max_blocks: 1000}\n"
        "      - {partition: warm, limit: 8MiB}\n"
        "  - name: b\n"
        "    match: {uid: [2, 3]}\n"
        "    quotas:\n"
        "      - {partition: train, limit: 48MiB, reserve: 16MiB}\n"
        "  - name: a2\n"
        "    match: {gid: 1}\n"
        "    quotas:\n"
        "      - {partition: train, limit: 2MiB}\n";

static void setup(void)
{
        sessions_start(config_text);
}

FIXTURE(session, setup, sessions_end);

/* The id of what was split off. */
static uint64_t must_split(struct peer *p, uint64_t block_id, uint64_t n_bytes)
{
        const Bfcd__Reply *reply = peer_reply(p, peer_split(p, block_id, n_bytes));

        ck_assert_ptr_nonnull(reply);
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                ck_abort_msg("refused: %s", reply->refusal->message);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_SPLIT);
        return reply->split->block_id;
}

TEST(test_hello)
{
        struct peer *a = peer_new(b, 1, false), *unauthenticated = peer_new(b, 77, false),
                    *admin = peer_new(b, 77, true);
        uint64_t id = peer_hello(a, "", "");
        const Bfcd__HelloReply *hello = peer_reply(a, id)->hello;
        Bfcd__Hello body = BFCD__HELLO__INIT;
        Bfcd__Request again = REQUEST(HELLO, hello, &body);
        const char *sentence;

        ck_assert_str_eq(hello->tenant, "a");
        ck_assert_uint_eq(hello->n_partitions, 2);
        ck_assert_str_eq(hello->partitions[0]->name, "train");
        ck_assert_uint_eq(hello->partitions[0]->bytes_limit, 48 * MIB);
        ck_assert_uint_eq(hello->default_partition, 0);
        ck_assert_uint_eq(hello->secret.len, 16);

        ck_assert_int_eq(peer_send(a, &again, NULL), -EPROTO);

        sentence = refusal_of(unauthenticated, peer_hello(unauthenticated, "", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "uid 77"));
        ck_assert_ptr_nonnull(strstr(sentence, "'b' (uid 2, uid 3)"));
        sentence = refusal_of(unauthenticated, peer_hello(unauthenticated, "a", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "does not match tenant 'a'"));
        sentence = refusal_of(unauthenticated, peer_hello(unauthenticated, "nobody", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "does not exist"));

        again.id = 0;
        ck_assert_int_eq(peer_send(unauthenticated, &again, NULL), -EPROTO); /* its fourth */

        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        refusal_of(admin, peer_malloc(admin, 0, 1), EACCES);

        peer_free(a);
        peer_free(unauthenticated);
        peer_free(admin);
}

TEST(test_tenant_choice)
{
        struct peer *p = peer_new(b, 1, false); /* uid 1, gid 1: a and a2 */
        struct peer *q = peer_new(b, 1, false);
        const char *sentence;

        ck_assert_int_eq(peer_error(p, peer_hello(p, "a2", "")), 0);
        ck_assert_str_eq(p->session->tenant->name, "a2");
        sentence = refusal_of(q, peer_hello(q, "", "nowhere"), ENOENT);
        ck_assert_ptr_nonnull(strstr(sentence, "'train' 'warm'"));
        ck_assert_int_eq(peer_error(q, peer_hello(q, "a", "warm")), 0);
        peer_free(p);
        peer_free(q);
}

TEST(requests_before_the_hello)
{
        struct peer *p = peer_new(b, 1, false);
        Bfcd__Malloc m = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &m);

        ck_assert_int_eq(peer_send(p, &r, NULL), -EPROTO);
        r.body_case = BFCD__REQUEST__BODY__NOT_SET;
        ck_assert_int_eq(peer_send(p, &r, NULL), -EPROTO);
        peer_free(p);
}

TEST(test_malloc_free)
{
        struct peer *p = open_session(1), *other = open_session(2);
        const Bfcd__Block *block = must_malloc_block(p, 0, 1000);
        uint64_t id = block->block_id, offset = block->offset;

        ck_assert_uint_eq(block->n_bytes, 1024);
        ck_assert_uint_eq(p->n_extents, 1);
        check();
        refusal_of(other, peer_free_block(other, id), EINVAL);
        refusal_of(p, peer_free_block(p, id + 1), EINVAL);
        refusal_of(p, peer_free_block(p, 0), EINVAL);
        refusal_of(p, peer_free_block(p, UINT64_MAX), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        refusal_of(p, peer_free_block(p, id), EINVAL);

        block = must_malloc_block(p, 0, 1000);
        ck_assert_uint_eq(block->offset, offset);
        ck_assert_uint_ne(block->block_id, id);
        ck_assert_uint_eq(p->n_extents, 1); /* it has met this extent */
        check();
        peer_free(p);
        peer_free(other);
}

/* The middle of a block is freed; what is left of it stays where it is. */
TEST(test_split)
{
        struct peer *p = open_session(1), *other;
        const Bfcd__Block *block = must_malloc_block(p, 0, 12 * MIB - 100);
        uint64_t id = block->block_id, offset = block->offset, middle, end;
        struct quota *q = p->session->shares[0].quota;
        uint64_t n_in_use = q->all.bytes_in_use, n_requested = q->all.bytes_requested;

        middle = must_split(p, id, 2 * MIB + 256);
        ck_assert_uint_eq(must_split(p, id, 2 * MIB + 256), middle); /* asked again */
        end = must_split(p, middle, 8 * MIB);
        ck_assert(middle != id && end != id && end != middle);
        check();
        ck_assert_uint_eq(q->all.n_blocks, 3);
        ck_assert_uint_eq(p->session->shares[0].usage.n_blocks, 3);
        ck_assert_uint_eq(session_bytes_in_use(p->session), 12 * MIB);
        ck_assert_uint_eq(q->all.bytes_in_use, n_in_use);
        ck_assert_uint_eq(q->all.bytes_requested, n_requested);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, middle)), 0);
        ck_assert_uint_eq(q->all.bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(q->all.bytes_requested, 4 * MIB - 100);
        refusal_of(p, peer_split(p, middle, 256), EINVAL);
        refusal_of(p, peer_split(p, id, 2 * MIB + 256), EINVAL); /* that long it is */
        check();

        other = open_session(1);
        block = must_malloc_block(other, 0, 8 * MIB); /* the place is free */
        ck_assert_uint_eq(block->offset, offset + 2 * MIB + 256);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, end)), 0);
        check();
        peer_free(other);
        peer_free(p);
}

TEST(test_split_refused)
{
        static const uint64_t PLACES[] = { 0,          1,   255,        257,        1024,
                                           1024 + 256, 512, 1ull << 63, UINT64_MAX, UINT64_MAX - 255 };
        struct peer *p = open_session(1), *other = open_session(1), *third = open_session(2);
        uint64_t id = must_malloc(p, 0, 1000), shared = must_malloc(p, 0, 1000), high;

        for (size_t i = 0; i < sizeof(PLACES) / sizeof(PLACES[0]); i++)
                if (PLACES[i] != 512)
                        refusal_of(p, peer_split(p, id, PLACES[i]), EINVAL);
        refusal_of(p, peer_split(p, 0, 512), EINVAL);
        refusal_of(p, peer_split(p, UINT64_MAX, 512), EINVAL);
        refusal_of(other, peer_split(other, id, 512), EINVAL); /* of the same tenant */
        refusal_of(third, peer_split(third, id, 512), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_publish(p, shared, "weights")), 0);
        refusal_of(p, peer_split(p, shared, 512), EINVAL);
        check();

        high = must_split(p, id, 512);
        refusal_of(other, peer_split(other, id, 512), EINVAL); /* also what would be answered as before */
        ck_assert_int_eq(peer_error(p, peer_publish(p, high, "rest")), 0);
        refusal_of(p, peer_split(p, id, 512), EINVAL); /* not both parts are its own any more */
        ck_assert_uint_ne(must_split(p, id, 256), high);
        check();
        peer_free(p);
        peer_free(other);
        peer_free(third);
}

/* No session has more blocks than max_blocks by it. */
TEST(test_split_is_bounded)
{
        struct peer *p = open_session(1);
        uint64_t id = must_malloc(p, 0, 4 * MIB);
        const char *sentence;

        for (unsigned i = 1; i < 1000; i++) {
                id = must_split(p, id, 256);
                peer_forget_replies(p);
        }
        sentence = refusal_of(p, peer_split(p, id, 256), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "max_blocks"));
        ck_assert_uint_eq(p->session->shares[0].quota->all.n_blocks, 1000);
        check();
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        check();
        peer_free(p);
}

TEST(test_sizes)
{
        struct peer *p = open_session(1);
        const char *sentence;

        refusal_of(p, peer_malloc(p, 0, 0), EINVAL);
        refusal_of(p, peer_malloc(p, 2, 1), ENOENT);
        refusal_of(p, peer_malloc(p, UINT32_MAX, 1), ENOENT);
        refusal_of(p, peer_malloc(p, 0, UINT64_MAX), EDQUOT);
        refusal_of(p, peer_malloc(p, 0, UINT64_C(1) << 63), EDQUOT);
        sentence = refusal_of(p, peer_malloc(p, 0, 48 * MIB + 1), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "48.0 MiB"));
        must_malloc(p, 0, 48 * MIB); /* every byte of the limit can be had in one piece */
        check();
        sentence = refusal_of(p, peer_malloc(p, 0, 1), EDQUOT);
        ck_assert_msg(strstr(sentence, "48.0 MiB of 48.0 MiB reserved"), "%s", sentence);
        peer_free(p);
}

/* A block that is requested in one extent is in one, whether the request waits or not. */
TEST(test_flags)
{
        struct peer *p = open_session(1);
        uint64_t ids[8], id;
        const char *sentence;

        sentence = refusal_of(p, peer_malloc_flags(p, 0, 1, 8), EINVAL);
        ck_assert_ptr_nonnull(strstr(sentence, "0x8"));
        refusal_of(p, peer_malloc_flags(p, 0, 1, UINT64_C(1) << 63 | 1), EINVAL);
        id = peer_malloc_flags(p, 0, 2 * MIB + 1, 1);
        peer_settle(b);
        ck_assert_uint_eq(peer_reply(p, id)->block->n_bytes, 4 * MIB); /* an extent of its own */
        ck_assert_uint_eq(peer_reply(p, id)->block->offset, 0);
        must_malloc(p, 0, MIB);
        for (unsigned i = 0; i < 8; i++)
                ids[i] = peer_malloc_flags(p, 0, MIB + 256 * i, 1);
        peer_settle(b);
        for (unsigned i = 0; i < 8; i++) {
                uint64_t in_extent = peer_reply(p, ids[i])->block->offset % (2 * MIB);

                ck_assert_uint_le(in_extent + MIB + 256 * i, 2 * MIB);
        }
        id = peer_malloc_flags(p, 0, 2 * MIB, 1);
        peer_settle(b);
        ck_assert_uint_eq(peer_reply(p, id)->block->offset % (2 * MIB), 0);
        check();
        peer_free(p);
}

/* A refused request that will be retried is not counted as a refusal. */
TEST(retried_request_is_not_counted_as_refused)
{
        const struct quota *quota = b->tenants[0].quotas[0];
        struct peer *p = open_session(1);

        must_malloc(p, 0, 40 * MIB);
        refusal_of(p, peer_malloc_flags(p, 0, 20 * MIB, 2), EDQUOT);
        refusal_of(p, peer_malloc_flags(p, 0, 20 * MIB, 3), EDQUOT);
        ck_assert_uint_eq(quota_n_refusals(quota) + quota_life(quota)->last_refusal_ms +
                                  p->session->stats.n_refusals,
                          0);
        refusal_of(p, peer_malloc(p, 0, 20 * MIB), EDQUOT);
        ck_assert_uint_eq(quota_life(quota)->n_over_quota, 1);
        ck_assert_uint_eq(p->session->stats.n_refusals, 1);
        /* Beyond the limit: the client is told that it is in vain to try again. */
        refusal_of(p, peer_malloc_flags(p, 0, 60 * MIB, 2), EDQUOT);
        ck_assert_uint_eq(quota_life(quota)->n_over_quota, 2);
        ck_assert_uint_eq(p->session->stats.n_refusals, 2);
        peer_free(p);
}

TEST(test_max_blocks_and_sessions)
{
        struct peer *p = open_session(1), *q = open_session(1), *r = open_session(1),
                    *s = peer_new(b, 1, false);
        const char *sentence;

        sentence = refusal_of(s, peer_hello(s, "a", ""), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "max_sessions is 3"));
        for (int i = 0; i < 1000; i++)
                must_malloc(i % 2 ? p : q, 0, 1);
        sentence = refusal_of(p, peer_malloc(p, 0, 1), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "max_blocks is 1000"));
        peer_free(q);
        must_malloc(r, 0, 1);
        ck_assert_int_eq(peer_error(s, peer_hello(s, "a", "")), 0);
        peer_free(p);
        peer_free(r);
        peer_free(s);
}

/* A client of another broker comes in, or is refused: its errno. */
static int come_to(struct broker *other, uid_t uid, const char *partition, struct peer **ret)
{
        struct peer *p = peer_new(other, uid, false);
        int error = peer_error(p, peer_hello(p, "", partition));

        if (error == 0)
                *ret = p;
        else
                peer_free(p);
        return error;
}

/* In each partition as many as its quota there allows; and each other tenant is sure of its share. */
TEST(test_sessions_of_a_tenant)
{
        static const char text[] =
                "devices: [{id: host, size: 64MiB, partitions: [{name: p, limit: 16MiB}, {name: q, limit: 16MiB}, "
                "{name: r, limit: 16MiB}]}]\n"
                "max_sessions: 10\n"
                "tenants:\n"
                "  - {name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 1}, "
                "{partition: q, max_sessions: 1}, {partition: r, max_sessions: 1}]}\n"
                "  - {name: b, match: {uid: 2}, quotas: [{partition: p}]}\n"
                "  - {name: c, match: {uid: 3}, quotas: [{partition: p}]}\n";
        static const char *const partitions[] = { "p", "q", "r" };
        struct peer *peers[10], *late;
        struct config *own;
        struct broker *other = peer_broker(text, &own);
        size_t n = 0;

        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 1, partitions[i % 3], &peers[n]) == 0;
        ck_assert_uint_eq(n, 3);
        late = peer_new(other, 1, false);
        ck_assert_ptr_nonnull(
                strstr(refusal_of(late, peer_hello(late, "", "q"), EDQUOT),
                       "tenant 'a' has 1 sessions in partition 'q': its limit max_sessions is 1"));
        peer_free(late);
        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 2, "", &peers[n]) == 0;
        ck_assert_uint_eq(n, 7);
        late = peer_new(other, 2, false);
        ck_assert_ptr_nonnull(strstr(refusal_of(late, peer_hello(late, "", ""), EDQUOT),
                                     "the daemon has 7 of at most 10 sessions (max_sessions), and the "
                                     "free ones are guaranteed to other tenants; tenant 'b' has 4"));
        peer_free(late);
        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 3, "", &peers[n < 10 ? n : 9]) == 0;
        ck_assert_uint_eq(n, 10);
        while (n > 0)
                peer_free(peers[--n]);
        peer_broker_free(other, own);
}

static uint64_t hello_without_memory(struct peer *p)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request r = REQUEST(HELLO, hello, &hello);

        hello.version = 1;
        hello.no_memory = true;
        return peer_post(p, &r);
}

/* They count in no quota. A tenant has no more of them than sessions of its quotas, and a job comes in beside them. */
TEST(sessions_without_memory_are_bounded)
{
        static const char text[] =
                "devices: [{id: host, size: 64MiB, partitions: [{name: p, limit: 16MiB}]}]\n"
                "max_sessions: 100\n"
                "tenants:\n"
                "  - {name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 2}]}\n"
                "  - {name: b, match: {uid: 2}, quotas: [{partition: p}]}\n";
        struct peer *peers[3], *late;
        struct config *own;
        struct broker *other = peer_broker(text, &own);

        for (size_t i = 0; i < 2; i++) {
                peers[i] = peer_new(other, 1, false);
                ck_assert_int_eq(peer_error(peers[i], hello_without_memory(peers[i])), 0);
        }
        late = peer_new(other, 1, false);
        ck_assert_ptr_nonnull(strstr(refusal_of(late, hello_without_memory(late), EDQUOT),
                                     "tenant 'a' has 2 sessions: the max_sessions of its quotas sum to 2"));
        peer_free(late);
        ck_assert_int_eq(come_to(other, 1, "p", &peers[2]), 0);
        for (size_t i = 0; i < 3; i++)
                peer_free(peers[i]);
        peer_broker_free(other, own);
}

/* While the device works for one request, others that fit pass by. */
TEST(test_pass_by)
{
        struct peer *p = open_session(1);
        uint64_t hole = must_malloc(p, 0, MIB), big, small, behind;

        must_malloc(p, 0, MIB / 2);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, hole)), 0);
        big = peer_malloc(p, 0, 8 * MIB);
        behind = peer_malloc(p, 0, 2 * MIB);
        broker_turn(b); /* they have been looked at and wait */
        small = peer_malloc(p, 0, MIB / 4);
        ck_assert_int_eq(peer_error(p, big), -1);
        ck_assert_int_eq(peer_error(p, behind), -1);
        ck_assert_int_eq(peer_error(p, small), 0);
        check();
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, big), 0);
        ck_assert_int_eq(peer_error(p, behind), 0);
        check();
        peer_free(p);
}

/* A client dies while its request waits for the device. */
TEST(session_ends_while_its_extents_are_made)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t behind;

        (void)peer_malloc(p, 0, 8 * MIB);
        behind = peer_malloc(q, 0, 4 * MIB);
        check();
        peer_free(p);
        check();
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, behind), 0);
        peer_free(q);
        peer_settle(b);
        ck_assert_uint_eq(b->partitions[0].pool.charged_bytes, 0);
}

/* Space is there, but in extents elsewhere: they go back and the request fits. */
TEST(test_fragments_go_back)
{
        struct peer *p = open_session(1);
        uint64_t ids[24];

        for (int i = 0; i < 24; i++)
                ids[i] = must_malloc(p, 0, 2 * MIB);
        for (int i = 0; i < 24; i += 2)
                peer_free_block(p, ids[i]);
        check();
        /* 24 MiB are free in pieces of 2: one block of 24 needs them all. */
        must_malloc(p, 0, 24 * MIB);
        check();
        refusal_of(p, peer_malloc(p, 0, 256), EDQUOT);
        peer_free(p);
}

/* The ledger is full when the device answers: each of those that wait is
 * refused once, though each refusal frees a block again. */
TEST(test_ledger_full_while_waiting)
{
        struct peer *p = open_session(1), *q = open_session(1);
        struct ledger_block facts = { .quota = b->tenants[0].quotas[1]->index };
        uint32_t index, *indexes = NULL;
        size_t n = 0, n_room = 0;

        ledger_shrink(b->ledger, 5000, 5000);
        for (int i = 0; i < 20; i++)
                (void)peer_malloc(p, 0, 1000);
        facts.session = q->session->index;
        while (ledger_block_add(b->ledger, &facts, &index) == 0) {
                if (n == n_room) {
                        n_room += 1024;
                        indexes = reallocarray(indexes, n_room, sizeof(*indexes));
                        ck_assert_ptr_nonnull(indexes);
                }
                indexes[n++] = index;
        }
        peer_settle(b);
        for (uint64_t id = 2; id <= 21; id++)
                ck_assert_int_eq(peer_error(p, id), ENOMEM);
        while (n > 0)
                ledger_block_clear(b->ledger, indexes[--n]);
        free(indexes);
        check();
        must_malloc(p, 0, 1000);
        peer_free(p);
        peer_free(q);
}

/* One block over more extents than the window takes. */
TEST(test_window)
{
        struct config *c;
        struct broker *big = open_large(&c);
        struct peer *p = peer_new(big, 1, false);
        uint64_t id, other;

        p->auto_ack = false;
        peer_hello(p, "", "");
        id = peer_malloc(p, 0, 400 * MIB - 4096);
        peer_settle(big);
        ck_assert_uint_eq(p->n_extents, 64);
        ck_assert_ptr_null(peer_reply(p, id));
        /* Held back: not the session's yet, though its id can be guessed. */
        refusal_of(p, peer_free_block(p, UINT64_C(1) << 32), EINVAL);
        ck_assert_int_eq(peer_ack(p, 2), -EPROTO);
        ck_assert_int_eq(peer_ack(p, 0), -EPROTO);
        other = peer_malloc(p, 0, 4096); /* waits its turn */
        ck_assert_ptr_null(peer_reply(p, other));
        ck_assert_int_eq(peer_ack(p, 1), 0);
        ck_assert_int_eq(peer_ack(p, 1), -EPROTO);
        ck_assert_uint_eq(p->n_extents, 128);
        ck_assert_int_eq(peer_ack(p, 2), 0);
        ck_assert_int_eq(peer_ack(p, 3), 0);
        ck_assert_uint_eq(p->n_extents, 200);
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_int_eq(peer_error(p, other), 0);
        peer_free(p);
        peer_broker_free(big, c);
}

/* The daemon has a file descriptor for the first extent of the block and none for the second. The client has
 * received nothing: its next block there brings all extents. */
TEST(extents_that_could_not_be_sent)
{
        struct peer *p = open_session(1), *q = open_session(1);
        struct rlimit before, tight;
        uint64_t id;
        int next;

        must_free(p, must_malloc(p, 0, 6 * MIB)); /* so that there are extents */
        next = dup(STDERR_FILENO);
        ck_assert(next >= 0 && close(next) == 0 && getrlimit(RLIMIT_NOFILE, &before) == 0);
        tight = (struct rlimit){ (rlim_t)next + 1, before.rlim_max };
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &tight), 0);
        id = peer_malloc(q, 0, 6 * MIB);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
        ck_assert_ptr_nonnull(strstr(refusal_of(q, id, ENOMEM), "no file descriptors left"));
        ck_assert_uint_eq(q->n_extents, 0);
        check();
        must_malloc(q, 0, 6 * MIB);
        ck_assert_uint_eq(q->n_extents, 3);
        check();
        peer_free(p);
        peer_free(q);
}

/* Of which the client did not receive the fds: they are sent again, to it alone. */
TEST(test_lost_extents)
{
        struct peer *p = open_session(1), *other = open_session(1);
        uint64_t ids[4], id, lost;

        p->auto_ack = false;
        id = peer_malloc(p, 0, 3 * MIB);
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_uint_ge(p->n_extents, 2);
        size_t n_sent = p->n_extents;
        lost = ids[0] = peer_extent(p, 1, 1)->extent_id;
        ids[1] = lost + 1000;
        ids[1] = ids[2] = ids[3] = lost;
        ck_assert_uint_lt(n_sent, 4);
        ck_assert_int_eq(peer_ack_without(p, 1, ids, 4), -EPROTO); /* more than were sent */
        ids[1] = lost + 1000; /* one that is no longer there: it was released meanwhile */
        ck_assert_int_eq(peer_ack_without(p, 1, ids, 2), 0);
        check();
        ck_assert_int_eq(peer_error(p, peer_free_block(p, peer_reply(p, id)->block->block_id)), 0);
        id = peer_malloc(p, 0, 3 * MIB);
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_uint_eq(p->n_extents, n_sent + 1);
        ck_assert_uint_eq(peer_extent(p, 2, 0)->extent_id, lost);
        ck_assert_uint_eq(other->n_extents, 0);
        for (uint64_t i = 2; i < 1 + SESSION_MAX_LOST; i++) { /* two were named */
                ck_assert_int_eq(peer_ack_without(p, i, &lost, 1), i <= SESSION_MAX_LOST - 1 ? 0 : -EPROTO);
                if (i > SESSION_MAX_LOST - 1)
                        break;
                ck_assert_int_eq(peer_error(p, peer_free_block(p, peer_reply(p, id)->block->block_id)), 0);
                id = peer_malloc(p, 0, 3 * MIB);
                peer_settle(b);
                ck_assert_int_eq(peer_error(p, id), 0);
                ck_assert_uint_eq(peer_extent(p, i + 1, 0)->extent_id, lost);
        }
        check();
        peer_free(p);
        peer_free(other);
}

/* A block of more extents than one message has would wait for as long as fds are short. */
TEST(test_lost_extents_of_a_block_that_waits)
{
        struct config *c;
        struct broker *big = open_large(&c);
        struct peer *p = peer_new(big, 1, false);
        uint64_t id, other, lost;
        const char *why = "";

        p->auto_ack = false;
        peer_hello(p, "", "");
        id = peer_malloc(p, 0, 300 * MIB);
        other = peer_malloc(p, 0, 64 * MIB);
        peer_settle(big);
        ck_assert_uint_eq(p->n_extents, 64);
        lost = peer_extent(p, 1, 5)->extent_id;
        ck_assert_int_eq(peer_ack_without(p, 1, &lost, 1), 0);
        ck_assert_int_eq(peer_error(p, id), EMFILE);
        ck_assert_int_eq(peer_error(p, other), 0); /* it has its turn */
        ck_assert_int_eq(broker_check(big, &why), 0);
        ck_assert_uint_eq(big->tenants[0].quotas[0]->all.n_blocks, 1);
        while (p->to_ack > p->session->delivery.acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        id = peer_malloc(p, 0, 300 * MIB);
        peer_settle(big);
        while (p->to_ack > p->session->delivery.acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        ck_assert_int_eq(peer_error(p, id), 0);
        peer_free(p);
        peer_broker_free(big, c);
}

/* A session that leaves extents in flight keeps its place, though not its memory. */
TEST(lingering_session_keeps_its_place)
{
        struct peer *p = open_session(1), *q = open_session(1), *r = open_session(1),
                    *s = peer_new(b, 1, false);

        p->auto_ack = false;
        (void)peer_malloc(p, 0, MIB);
        peer_settle(b);
        ck_assert_int_eq(peer_ack(p, 1), 0); /* unread, for all that anybody knows */
        ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
        session_close(p->session, "test");
        ck_assert_int_eq(session_reap(p->session, 100), SESSION_LINGERS);
        ck_assert_uint_eq(b->tenants[0].quotas[0]->all.n_blocks, 0);
        refusal_of(s, peer_hello(s, "a", ""), EDQUOT);
        session_end_linger(p->session);
        ck_assert_int_eq(session_reap(p->session, 100), 0);
        ck_assert_int_eq(peer_error(s, peer_hello(s, "a", "")), 0);
        peer_free(p);
        peer_free(q);
        peer_free(r);
        peer_free(s);
}

/* The questions and entry points of a connection. */
TEST(test_states)
{
        struct peer *p = peer_new(b, 1, false), *q = open_session(1);
        const char *why = NULL;

        ck_assert(session_may_read(p->session) && session_deadline_ms(p->session) > clock_ms());
        session_expire(p->session);
        ck_assert(p->aborted && !session_has_work(p->session));
        ck_assert_int_eq(session_hang_up(p->session, NULL), 0);
        ck_assert(session_is_closing(p->session) && session_has_work(p->session));

        must_malloc(q, 0, MIB);
        ck_assert(session_may_read(q->session) && session_deadline_ms(q->session) == 0);
        session_expire(q->session);
        session_forbid_resume(q->session);
        ck_assert(session_is_live(q->session) && !q->aborted && !mappings_are_watched(b));
        for (int i = 0; i < 2; i++) /* the second one changes nothing */
                ck_assert_int_eq(session_hang_up(q->session, NULL), 1);
        ck_assert_uint_eq(b->tenants[0].n_quarantined, 1);
        ck_assert(!session_may_read(q->session) && !session_has_work(q->session));
        ck_assert(session_deadline_ms(q->session) > clock_ms() && mappings_are_watched(b));
        session_expire(q->session);
        ck_assert(session_has_work(q->session) && !mappings_are_watched(b));
        ck_assert_uint_eq(b->tenants[0].n_quarantined + session_deadline_ms(q->session), 0);
        ck_assert_int_eq(session_work(q->session, 100, &why), SESSION_LINGERS);
        ck_assert(!session_has_work(q->session));
        session_end_linger(q->session);
        ck_assert(session_has_work(q->session));
        ck_assert_int_eq(session_work(q->session, 100, &why), SESSION_DONE);
        peer_free(p);
        peer_free(q);
}

TEST(test_goodbye)
{
        struct peer *p = open_session(1);
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Request r = REQUEST(GOODBYE, goodbye, &goodbye);
        uint64_t id;

        for (int i = 0; i < 600; i++)
                must_malloc(p, 0, 512);
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        ck_assert_int_eq(p->session->state, SESSION_CLOSING);
        ck_assert_ptr_null(peer_reply(p, id));
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_MORE);
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_MORE);
        check();
        /* All is freed; only the kernel knows whether the extents were read. */
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_LINGERS);
        ck_assert_int_eq(peer_reply(p, id)->body_case, BFCD__REPLY__BODY_DONE);
        peer_free(p);
}

/* What only an ended session needed is returned to the device, also while others of the tenant go on. */
TEST(memory_of_an_ended_session_is_released)
{
        const struct account *account = &b->tenants[0].quotas[0]->account;
        struct peer *p = open_session(1), *q = open_session(1);

        must_malloc(q, 0, 4 * MIB);
        for (unsigned i = 0; i < 3; i++) {
                must_malloc(p, 0, 16 * MIB);
                ck_assert_uint_eq(account->charged_bytes, 20 * MIB);
                must_close(p);
                ck_assert_uint_eq(account->charged_bytes, 4 * MIB);
                p = open_session(1);
        }
        peer_free(p);
        peer_free(q);
}

/* The memory of an ended session serves waiting requests. */
TEST(request_waits_for_a_closing_session)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t id, waited_ns;

        must_malloc(p, 0, 48 * MIB);
        ck_assert_int_eq(session_hang_up(p->session, NULL), 1);
        ck_assert_uint_eq(p->session->tenant->n_quarantined, 1);
        refusal_of(q, peer_malloc(q, 0, MIB), EDQUOT); /* it may still write there */
        session_close(p->session, "test");
        id = peer_malloc(q, 0, MIB);
        ck_assert_int_eq(peer_error(q, id), -1);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), -1);
        waited_ns = q->session->stats.waited_ns; /* of the first request */
        still_clock_pass(5);
        while (session_reap(p->session, 1) == SESSION_MORE)
                ;
        session_end_linger(p->session);
        ck_assert_int_eq(session_reap(p->session, 1), 0);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), 0);
        ck_assert_uint_ge(q->session->stats.waited_ns - waited_ns, 5000000);
        peer_free(p);
        peer_free(q);
}

/* ---- the log ------------------------------------------------------------- */

/* Comes, is refused once, gets a block, and goes. */
static void visit(uid_t uid)
{
        struct peer *p = open_session(uid);

        ck_assert_int_eq(peer_error(p, peer_malloc(p, 0, 100 * MIB)), EDQUOT);
        must_malloc(p, 0, 256);
        peer_free(p);
}

static unsigned count_words(const char *text, const char *words)
{
        unsigned n = 0;

        for (; (text = strstr(text, words)); text++)
                n++;
        return n;
}

/* Comes and goes without memory. */
static void look_in(uid_t uid)
{
        peer_free(open_session(uid));
}

/* Each end is a line; of refusals the first, and the count of the others. */
TEST(test_ends_are_recorded)
{
        const char *text;

        log_catch();
        for (unsigned i = 0; i < 20; i++)
                visit(1);
        visit(2);
        (void)accounting_tick(b, clock_ms(), true);
        text = log_caught();
        ck_assert_uint_eq(count_words(text, "): tenant 'a', uid 1"), 20);
        ck_assert_uint_eq(count_words(text, "peak 256 B, 1 allocations, 1 refusals"), 21);
        ck_assert_uint_eq(count_words(text, "): tenant 'b', uid 2"), 1);
        ck_assert_uint_lt(count_words(text, "(tenant 'a', uid 1"), 20);
        ck_assert_uint_ge(count_words(text, "(tenant 'a', uid 1"), 1);
        ck_assert_uint_eq(count_words(text, "(tenant 'b', uid 2"), 1);
        ck_assert_uint_ge(count_words(text, "similar messages suppressed)"), 1);
}

/* Lines of a file with these words, once it has n of them; waits for the thread that writes it. */
static unsigned count_records(const char *path, const char *words, unsigned n)
{
        static char text[1 << 16];
        unsigned found = 0;

        for (unsigned ms = 0; ms < 120000; ms++) {
                FILE *f = fopen(path, "re");

                text[f ? fread(text, 1, sizeof(text) - 1, f) : 0] = '\0';
                if (f)
                        fclose(f);
                found = count_words(text, words);
                if (found >= n)
                        break;
                usleep(1000);
        }
        return found;
}

static void use_and_leave(uint64_t n_bytes)
{
        struct peer *p = open_session(1);

        must_malloc(p, 0, n_bytes);
        peer_free(p);
}

/* When the last session leaves, but not each time; and now and then while there are sessions. Each record has the peak
 * since the one before. */
TEST(peaks_of_quotas_are_recorded)
{
        char folder[] = "/tmp/bfcd-session-XXXXXX", path[64];
        struct peer *p;

        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(path, sizeof(path), "%s/records", folder);
        ck_assert_int_eq(records_open(NULL, path), 0);
        use_and_leave(4 * MIB);
        ck_assert_uint_eq(count_records(path, "\"peak_bytes\":4194304,\"peak_reserved_bytes\":", 1), 1);
        use_and_leave(MIB);
        accounting_usage(b, false);
        still_clock_pass(ACCOUNTING_LEAVE_MS);
        accounting_usage(b, false);
        ck_assert_uint_eq(count_records(path, "\"peak_bytes\":1048576,\"peak_reserved_bytes\":", 1), 1);
        p = open_session(1);
        must_malloc(p, 0, 2 * MIB);
        still_clock_pass(ACCOUNTING_LEAVE_MS);
        accounting_usage(b, false); /* not yet */
        still_clock_pass(ACCOUNTING_USAGE_MS);
        accounting_usage(b, false);
        ck_assert_uint_eq(count_records(path, "\"peak_bytes\":2097152,\"peak_reserved_bytes\":", 1), 1);
        accounting_usage(b, true); /* at the end */
        ck_assert_uint_eq(count_records(path, "\"peak_bytes\":2097152,\"peak_reserved_bytes\":", 2), 2);
        ck_assert_uint_eq(count_records(path, "\"tenant\":\"a\",\"partition\":\"train\",\"begin_us\"", 4), 4);
        ck_assert_uint_eq(count_records(path, "\"tenant\":\"b\"", 0), 0);
        peer_free(p);
        records_close(60000); /* its thread has written all, and the file stays away */
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
}

/* The time that requests waited for memory, in microseconds. */
TEST(waiting_times_are_recorded)
{
        char folder[] = "/tmp/bfcd-session-XXXXXX", path[64];
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t id;

        ck_assert_ptr_nonnull(mkdtemp(folder));
        snprintf(path, sizeof(path), "%s/records", folder);
        ck_assert_int_eq(records_open(NULL, path), 0);
        must_malloc(p, 0, 48 * MIB);
        id = peer_malloc_wait(q, 0, MIB, 1000);
        settle();
        ck_assert_int_eq(peer_error(q, id), -1);
        still_clock_pass(70);
        must_close(p);
        ck_assert_int_eq(peer_error(q, id), 0);
        must_close(q);
        ck_assert_uint_eq(count_records(path, "\"ended\":", 2), 2);
        ck_assert_uint_eq(count_records(path, "\"waited_us\":70000,", 0), 1);
        ck_assert_uint_eq(count_records(path, "\"waited_us\":0,", 0), 1);
        records_close(60000); /* its thread has written all, and the file stays away */
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
}

/* A user chooses the program's name, and the control group's below one that was delegated to it. */
TEST(statistics_of_an_end_come_from_the_daemon)
{
        static const char lie[] = "x; duration 1 ms, peak 1 B, 9 allocations, 0 refusals";
        struct peer *p = open_session(1);
        const char *text, *true_one, *false_one;

        must_malloc(p, 0, 256);
        snprintf(p->session->name, sizeof(p->session->name), "%s", lie);
        free(p->session->who.cgroup);
        p->session->who.cgroup = malloc(4001);
        ck_assert_ptr_nonnull(p->session->who.cgroup);
        memset(p->session->who.cgroup, 'g', 4000);
        p->session->who.cgroup[4000] = '\0';
        log_catch();
        peer_free(p);
        text = log_caught();
        true_one = strstr(text, "peak 256 B, 1 allocations, 0 refusals");
        false_one = strstr(text, "peak 1 B");
        ck_assert_msg(true_one != NULL, "%s", text);
        ck_assert_msg(false_one != NULL && true_one < false_one, "%s", text);
}

/* A tenant that comes and goes in a loop has a bounded number of lines, and the sums have them all. */
TEST(test_ends_are_bounded)
{
        struct tenant *t = &b->tenants[0];
        const char *text, *sum;
        unsigned long n_summed;

        log_catch();
        t->ends.since_ms = clock_ms();
        for (unsigned i = 0; i < 1000; i++)
                look_in(1);
        t->ends.n_lines = ACCOUNTING_LINES; /* as if as many had had memory */
        visit(1);
        ck_assert(b->logs.has_accounts);
        ck_assert(accounting_tick(b, t->ends.since_ms + ACCOUNTING_WINDOW_MS - 1, false));
        visit(2);
        (void)accounting_tick(b, t->ends.since_ms + ACCOUNTING_WINDOW_MS, false);
        text = log_caught();
        ck_assert_uint_eq(count_words(text, "): tenant 'b', uid 2"), 1);
        ck_assert_uint_ge(count_words(text, "): tenant 'a', uid 1"), ACCOUNTING_SHORT);
        sum = strstr(text, " more sessions of tenant 'a' ended");
        ck_assert_ptr_nonnull(sum);
        while (sum > text && sum[-1] != ' ')
                sum--;
        n_summed = strtoul(sum, NULL, 10);
        ck_assert_uint_eq(count_words(text, "): tenant 'a', uid 1") + n_summed, 1001);
        ck_assert_ptr_nonnull(strstr(sum, "largest peak 256 B, 1 allocations, 1 refusals"));
}

/* ---- a random walk ------------------------------------------------------- */

#define WALK_PEERS     8
#define WALKING_BLOCKS 64

struct walking_peer {
        struct peer *peer;
        uint64_t blocks[WALKING_BLOCKS];
        size_t n_blocks;
        uint64_t waiting; /* a malloc without an answer */
};

/* Takes the answer, if it came; the replies are forgotten then. */
static void walking_peer_collect(struct walking_peer *w)
{
        const Bfcd__Reply *reply = w->waiting ? peer_reply(w->peer, w->waiting) : NULL;

        if (!reply)
                return;
        if (reply->body_case == BFCD__REPLY__BODY_BLOCK)
                w->blocks[w->n_blocks++] = reply->block->block_id;
        w->waiting = 0;
        peer_forget_replies(w->peer);
}

static void walker_step(struct walking_peer *w, unsigned *seed)
{
        unsigned dice = (unsigned)rand_r(seed) % 100;
        uid_t uid = 1 + (uid_t)(rand_r(seed) % 3);

        if (!w->peer) {
                w->peer = peer_new(b, uid, false);
                if (peer_error(w->peer, peer_hello(w->peer, "", "")) != 0)
                        w->peer = peer_free(w->peer);
                return;
        }
        walking_peer_collect(w);
        if (dice < 2) {
                w->peer = peer_free(w->peer);
                w->n_blocks = 0;
                w->waiting = 0;
        } else if (dice < 45 && !w->waiting && w->n_blocks < WALKING_BLOCKS) {
                unsigned bits = (unsigned)rand_r(seed) % 24;

                w->waiting = peer_malloc(w->peer, 0, 1 + (uint64_t)rand_r(seed) % (UINT64_C(2) << bits));
        } else if (dice < 52 && !w->waiting && w->n_blocks > 0 && w->n_blocks < WALKING_BLOCKS) {
                uint64_t block_id = w->blocks[(size_t)rand_r(seed) % w->n_blocks];
                uint32_t index = ledger_block_find(b->ledger, block_id);
                uint64_t n = ledger_block_at(b->ledger, index)->n_bytes / 256;

                if (n > 1)
                        w->blocks[w->n_blocks++] =
                                must_split(w->peer, block_id, (1 + (uint64_t)rand_r(seed) % (n - 1)) * 256);
                peer_forget_replies(w->peer);
        } else if (dice < 90 && w->n_blocks > 0) {
                size_t i = (size_t)rand_r(seed) % w->n_blocks;
                uint64_t id = peer_free_block(w->peer, w->blocks[i]);

                ck_assert_int_eq(peer_error(w->peer, id), 0);
                w->blocks[i] = w->blocks[--w->n_blocks];
                peer_forget_replies(w->peer);
                if (w->waiting && w->peer->to_ack > w->peer->session->delivery.acked_sequence)
                        peer_ack(w->peer, w->peer->to_ack);
        }
}

/* A forgotten reply would lose a block: nothing waits when replies go. */
TEST(test_random_walk)
{
        struct walking_peer walkers[WALK_PEERS] = { 0 };
        unsigned seed = 4711;

        for (unsigned step = 0; step < 200000; step++) {
                struct walking_peer *w = &walkers[(unsigned)rand_r(&seed) % WALK_PEERS];

                if (!w->waiting || peer_reply(w->peer, w->waiting))
                        walker_step(w, &seed);
                if (rand_r(&seed) % 3 == 0)
                        broker_poll(b);
                if (w->peer && w->peer->to_ack > w->peer->session->delivery.acked_sequence)
                        ck_assert_int_eq(peer_ack(w->peer, w->peer->to_ack), 0);
                if (step % 64 == 0)
                        check();
        }
        for (unsigned i = 0; i < WALK_PEERS; i++)
                peer_free(walkers[i].peer);
}
