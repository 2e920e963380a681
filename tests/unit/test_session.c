/* Sessions without sockets: every request, every refusal, the ladder, the
 * window of extents, deaths at each step, and a long random walk.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/accounting.h"
#include "daemon/clock.h"
#include "daemon/log.h"
#include "tests/peer.h"
#include "tests/suite.h"
#include "tests/unit/still_clock.h"

#define MIB (UINT64_C(1) << 20)

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

static struct broker *b;
static struct config *config;
static int n_fds_before;

static void setup(void)
{
        n_fds_before = suite_count_fds();
        b = peer_broker(config_text, &config);
}

static void teardown(void)
{
        b = peer_broker_free(b, config);
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

static void check_broker(void)
{
        const char *why = "";

        if (broker_check(b, &why) < 0)
                ck_abort_msg("%s", why);
}

static struct peer *come_in(uid_t uid)
{
        struct peer *p = peer_new(b, uid, false);
        uint64_t id = peer_hello(p, "", "");

        ck_assert_int_eq(peer_error(p, id), 0);
        return p;
}

/* A block, whatever the workers have to do for it. */
static const Bfcd__Block *must_malloc(struct peer *p, uint32_t partition, uint64_t n_bytes)
{
        uint64_t id = peer_malloc(p, partition, n_bytes);
        const Bfcd__Reply *reply;

        peer_settle(b);
        while (!peer_reply(p, id) && p->to_ack > p->session->acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        reply = peer_reply(p, id);
        ck_assert_ptr_nonnull(reply);
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL)
                ck_abort_msg("refused: %s", reply->refusal->message);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_BLOCK);
        return reply->block;
}

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

static const char *refusal_of(struct peer *p, uint64_t id, int error)
{
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, id), error);
        return peer_reply(p, id)->refusal->message;
}

START_TEST(test_hello)
{
        struct peer *a = peer_new(b, 1, false), *stranger = peer_new(b, 77, false),
                    *admin = peer_new(b, 77, true);
        uint64_t id = peer_hello(a, "", "");
        const Bfcd__HelloReply *hello = peer_reply(a, id)->hello;
        Bfcd__Request again = BFCD__REQUEST__INIT;
        Bfcd__Hello body = BFCD__HELLO__INIT;
        const char *sentence;

        ck_assert_str_eq(hello->tenant, "a");
        ck_assert_uint_eq(hello->n_partitions, 2);
        ck_assert_str_eq(hello->partitions[0]->name, "train");
        ck_assert_uint_eq(hello->partitions[0]->bytes_limit, 48 * MIB);
        ck_assert_uint_eq(hello->default_partition, 0);
        ck_assert_uint_eq(hello->secret.len, 16);

        again.body_case = BFCD__REQUEST__BODY_HELLO;
        again.hello = &body;
        ck_assert_int_eq(peer_send(a, &again, NULL), -EPROTO);

        sentence = refusal_of(stranger, peer_hello(stranger, "", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "uid 77"));
        ck_assert_ptr_nonnull(strstr(sentence, "'b' (uid 2, uid 3)"));
        sentence = refusal_of(stranger, peer_hello(stranger, "a", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "does not match tenant 'a'"));
        sentence = refusal_of(stranger, peer_hello(stranger, "nobody", ""), EACCES);
        ck_assert_ptr_nonnull(strstr(sentence, "does not exist"));

        again.id = 0;
        ck_assert_int_eq(peer_send(stranger, &again, NULL), -EPROTO); /* its fourth */

        ck_assert_int_eq(peer_error(admin, peer_hello(admin, "", "")), 0);
        refusal_of(admin, peer_malloc(admin, 0, 1), EACCES);

        peer_free(a);
        peer_free(stranger);
        peer_free(admin);
}
END_TEST

START_TEST(test_tenant_choice)
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
END_TEST

START_TEST(test_order)
{
        struct peer *p = peer_new(b, 1, false);
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Malloc m = BFCD__MALLOC__INIT;

        r.body_case = BFCD__REQUEST__BODY_MALLOC;
        r.malloc = &m;
        ck_assert_int_eq(peer_send(p, &r, NULL), -EPROTO);
        r.body_case = BFCD__REQUEST__BODY__NOT_SET;
        ck_assert_int_eq(peer_send(p, &r, NULL), -EPROTO);
        peer_free(p);
}
END_TEST

START_TEST(test_malloc_free)
{
        struct peer *p = come_in(1), *other = come_in(2);
        const Bfcd__Block *block = must_malloc(p, 0, 1000);
        uint64_t id = block->block_id, offset = block->offset;

        ck_assert_uint_eq(block->n_bytes, 1024);
        ck_assert_uint_eq(p->n_extents, 1);
        check_broker();
        refusal_of(other, peer_free_block(other, id), EINVAL);
        refusal_of(p, peer_free_block(p, id + 1), EINVAL);
        refusal_of(p, peer_free_block(p, 0), EINVAL);
        refusal_of(p, peer_free_block(p, UINT64_MAX), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        refusal_of(p, peer_free_block(p, id), EINVAL);

        block = must_malloc(p, 0, 1000);
        ck_assert_uint_eq(block->offset, offset);
        ck_assert_uint_ne(block->block_id, id);
        ck_assert_uint_eq(p->n_extents, 1); /* it has met this extent */
        check_broker();
        peer_free(p);
        peer_free(other);
}
END_TEST

/* The middle of a block is freed; what is left of it stays where it is. */
START_TEST(test_split)
{
        struct peer *p = come_in(1), *other;
        const Bfcd__Block *block = must_malloc(p, 0, 12 * MIB - 100);
        uint64_t id = block->block_id, offset = block->offset, middle, end;
        struct quota *q = p->session->shares[0].quota;
        uint64_t n_in_use = q->bytes_in_use, n_requested = q->bytes_requested;

        middle = must_split(p, id, 2 * MIB + 256);
        ck_assert_uint_eq(must_split(p, id, 2 * MIB + 256), middle); /* asked again */
        end = must_split(p, middle, 8 * MIB);
        ck_assert(middle != id && end != id && end != middle);
        check_broker();
        ck_assert_uint_eq(q->n_blocks, 3);
        ck_assert_uint_eq(p->session->shares[0].holding.n_blocks, 3);
        ck_assert_uint_eq(p->session->bytes_in_use, 12 * MIB);
        ck_assert_uint_eq(q->bytes_in_use, n_in_use);
        ck_assert_uint_eq(q->bytes_requested, n_requested);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, middle)), 0);
        ck_assert_uint_eq(q->bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(q->bytes_requested, 4 * MIB - 100);
        refusal_of(p, peer_split(p, middle, 256), EINVAL);
        refusal_of(p, peer_split(p, id, 2 * MIB + 256), EINVAL); /* that long it is */
        check_broker();

        other = come_in(1);
        block = must_malloc(other, 0, 8 * MIB); /* the place is free */
        ck_assert_uint_eq(block->offset, offset + 2 * MIB + 256);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, end)), 0);
        check_broker();
        peer_free(other);
        peer_free(p);
}
END_TEST

START_TEST(test_split_refused)
{
        static const uint64_t PLACES[] = { 0,          1,   255,        257,        1024,
                                           1024 + 256, 512, 1ull << 63, UINT64_MAX, UINT64_MAX - 255 };
        struct peer *p = come_in(1), *other = come_in(1), *third = come_in(2);
        uint64_t id = must_malloc(p, 0, 1000)->block_id, shared = must_malloc(p, 0, 1000)->block_id, high;

        for (size_t i = 0; i < sizeof(PLACES) / sizeof(PLACES[0]); i++)
                if (PLACES[i] != 512)
                        refusal_of(p, peer_split(p, id, PLACES[i]), EINVAL);
        refusal_of(p, peer_split(p, 0, 512), EINVAL);
        refusal_of(p, peer_split(p, UINT64_MAX, 512), EINVAL);
        refusal_of(other, peer_split(other, id, 512), EINVAL); /* of the same tenant */
        refusal_of(third, peer_split(third, id, 512), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_publish(p, shared, "weights")), 0);
        refusal_of(p, peer_split(p, shared, 512), EINVAL);
        check_broker();

        high = must_split(p, id, 512);
        refusal_of(other, peer_split(other, id, 512), EINVAL); /* also what would be answered as before */
        ck_assert_int_eq(peer_error(p, peer_publish(p, high, "rest")), 0);
        refusal_of(p, peer_split(p, id, 512), EINVAL); /* not both parts are its own any more */
        ck_assert_uint_ne(must_split(p, id, 256), high);
        check_broker();
        peer_free(p);
        peer_free(other);
        peer_free(third);
}
END_TEST

/* No session has more blocks than max_blocks by it. */
START_TEST(test_split_is_bounded)
{
        struct peer *p = come_in(1);
        uint64_t id = must_malloc(p, 0, 4 * MIB)->block_id;
        const char *sentence;

        for (unsigned i = 1; i < 1000; i++) {
                id = must_split(p, id, 256);
                peer_forget_replies(p);
        }
        sentence = refusal_of(p, peer_split(p, id, 256), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "max_blocks"));
        ck_assert_uint_eq(p->session->shares[0].quota->n_blocks, 1000);
        check_broker();
        ck_assert_int_eq(peer_error(p, peer_free_block(p, id)), 0);
        check_broker();
        peer_free(p);
}
END_TEST

START_TEST(test_sizes)
{
        struct peer *p = come_in(1);
        const char *sentence;

        refusal_of(p, peer_malloc(p, 0, 0), EINVAL);
        refusal_of(p, peer_malloc(p, 2, 1), ENOENT);
        refusal_of(p, peer_malloc(p, UINT32_MAX, 1), ENOENT);
        refusal_of(p, peer_malloc(p, 0, UINT64_MAX), EDQUOT);
        refusal_of(p, peer_malloc(p, 0, UINT64_C(1) << 63), EDQUOT);
        sentence = refusal_of(p, peer_malloc(p, 0, 48 * MIB + 1), EDQUOT);
        ck_assert_ptr_nonnull(strstr(sentence, "48.0 MiB"));
        must_malloc(p, 0, 48 * MIB); /* every byte of the limit can be had in one piece */
        check_broker();
        sentence = refusal_of(p, peer_malloc(p, 0, 1), EDQUOT);
        ck_assert_msg(strstr(sentence, "48.0 MiB of 48.0 MiB reserved"), "%s", sentence);
        peer_free(p);
}
END_TEST

/* Asked for one extent, a block lies in one, whether it waits for it or not. */
START_TEST(test_flags)
{
        struct peer *p = come_in(1);
        uint64_t ids[8], id;
        const char *sentence;

        sentence = refusal_of(p, peer_malloc_flags(p, 0, 1, 4), EINVAL);
        ck_assert_ptr_nonnull(strstr(sentence, "0x4"));
        refusal_of(p, peer_malloc_flags(p, 0, 1, UINT64_C(1) << 63 | 1), EINVAL);
        sentence = refusal_of(p, peer_malloc_flags(p, 0, 2 * MIB + 1, 1), EINVAL);
        ck_assert_ptr_nonnull(strstr(sentence, "one extent"));
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
        check_broker();
        peer_free(p);
}
END_TEST

/* A try that another follows is refused, and is no refusal: at once, and by who waited. */
START_TEST(test_again)
{
        const struct quota *quota = b->tenants[0].quotas[0];
        struct peer *p = come_in(1);

        must_malloc(p, 0, 40 * MIB);
        refusal_of(p, peer_malloc_flags(p, 0, 20 * MIB, 2), EDQUOT);
        refusal_of(p, peer_malloc_flags(p, 0, 20 * MIB, 3), EINVAL);
        ck_assert_uint_eq(quota->n_refusals + quota->last_refusal_ms + p->session->n_refusals, 0);
        refusal_of(p, peer_malloc(p, 0, 20 * MIB), EDQUOT);
        ck_assert_uint_eq(quota->n_over_quota, 1);
        ck_assert_uint_eq(p->session->n_refusals, 1);
        /* Beyond the limit: the client is told that it is in vain to try again. */
        refusal_of(p, peer_malloc_flags(p, 0, 60 * MIB, 2), EDQUOT);
        ck_assert_uint_eq(quota->n_over_quota, 2);
        ck_assert_uint_eq(p->session->n_refusals, 2);
        peer_free(p);
}
END_TEST

START_TEST(test_max_blocks_and_sessions)
{
        struct peer *p = come_in(1), *q = come_in(1), *r = come_in(1), *s = peer_new(b, 1, false);
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
END_TEST

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

/* However many partitions it has; and each other tenant is sure of its share. */
START_TEST(test_sessions_of_a_tenant)
{
        static const char text[] =
                "devices: [{id: host, size: 64MiB, partitions: [{name: p, limit: 16MiB}, {name: q, limit: 16MiB}, "
                "{name: r, limit: 16MiB}]}]\n"
                "max_sessions: 10\n"
                "tenants:\n"
                "  - {name: a, match: {uid: 1}, quotas: [{partition: p, max_sessions: 3}, "
                "{partition: q, max_sessions: 4}, {partition: r, max_sessions: 2}]}\n"
                "  - {name: b, match: {uid: 2}, quotas: [{partition: p}]}\n"
                "  - {name: c, match: {uid: 3}, quotas: [{partition: p}]}\n";
        static const char *const partitions[] = { "p", "q", "r" };
        struct peer *peers[10], *late;
        struct config *own;
        struct broker *other = peer_broker(text, &own);
        size_t n = 0;

        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 1, partitions[i % 3], &peers[n]) == 0;
        ck_assert_uint_eq(n, 4);
        late = peer_new(other, 1, false);
        ck_assert_ptr_nonnull(strstr(refusal_of(late, peer_hello(late, "", "q"), EDQUOT),
                                     "tenant 'a' has 4 sessions: its limit max_sessions is 4"));
        peer_free(late);
        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 2, "", &peers[n]) == 0;
        ck_assert_uint_eq(n, 7);
        late = peer_new(other, 2, false);
        ck_assert_ptr_nonnull(strstr(refusal_of(late, peer_hello(late, "", ""), EDQUOT),
                                     "the daemon has 7 of at most 10 sessions (max_sessions), and the "
                                     "free ones are guaranteed to other tenants; tenant 'b' has 3"));
        peer_free(late);
        for (size_t i = 0; i < 9; i++)
                n += come_to(other, 3, "", &peers[n < 10 ? n : 9]) == 0;
        ck_assert_uint_eq(n, 10);
        while (n > 0)
                peer_free(peers[--n]);
        peer_broker_free(other, own);
}
END_TEST

/* While the device works for one request, others that fit pass by. */
START_TEST(test_pass_by)
{
        struct peer *p = come_in(1);
        uint64_t hole = must_malloc(p, 0, MIB)->block_id, big, small, behind;

        must_malloc(p, 0, MIB / 2);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, hole)), 0);
        big = peer_malloc(p, 0, 8 * MIB);
        behind = peer_malloc(p, 0, 2 * MIB);
        broker_turn(b); /* they have been looked at and wait */
        small = peer_malloc(p, 0, MIB / 4);
        ck_assert_int_eq(peer_error(p, big), -1);
        ck_assert_int_eq(peer_error(p, behind), -1);
        ck_assert_int_eq(peer_error(p, small), 0);
        check_broker();
        peer_settle(b);
        ck_assert_int_eq(peer_error(p, big), 0);
        ck_assert_int_eq(peer_error(p, behind), 0);
        check_broker();
        peer_free(p);
}
END_TEST

/* A client dies while its request waits for the device. */
START_TEST(test_death_while_growing)
{
        struct peer *p = come_in(1), *q = come_in(1);
        uint64_t behind;

        (void)peer_malloc(p, 0, 8 * MIB);
        behind = peer_malloc(q, 0, 4 * MIB);
        check_broker();
        peer_free(p);
        check_broker();
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, behind), 0);
        peer_free(q);
        peer_settle(b);
        ck_assert_uint_eq(b->partitions[0].pool.charged_bytes, 0);
}
END_TEST

/* Space is there, but in extents elsewhere: they go back and the request fits. */
START_TEST(test_fragments_go_back)
{
        struct peer *p = come_in(1);
        uint64_t ids[24];

        for (int i = 0; i < 24; i++)
                ids[i] = must_malloc(p, 0, 2 * MIB)->block_id;
        for (int i = 0; i < 24; i += 2)
                peer_free_block(p, ids[i]);
        check_broker();
        /* 24 MiB are free in pieces of 2: one block of 24 needs them all. */
        must_malloc(p, 0, 24 * MIB);
        check_broker();
        refusal_of(p, peer_malloc(p, 0, 256), EDQUOT);
        peer_free(p);
}
END_TEST

/* The partition is full of what a neighbour no longer uses. */
START_TEST(test_neighbour_gives_back)
{
        struct peer *a = come_in(1), *other = come_in(2);
        uint64_t id = must_malloc(a, 0, 48 * MIB)->block_id;
        const char *sentence;

        must_malloc(other, 0, 16 * MIB); /* guaranteed */
        sentence = refusal_of(other, peer_malloc(other, 0, 16 * MIB), ENOMEM);
        ck_assert_ptr_nonnull(strstr(sentence, "partition 'train'"));
        peer_free_block(a, id);
        must_malloc(other, 0, 16 * MIB);
        check_broker();
        peer_free(a);
        peer_free(other);
}
END_TEST

/* The guarantee holds although a neighbour takes all it can. */
START_TEST(test_reserve)
{
        struct peer *a = come_in(1), *other = come_in(3);
        uint64_t n = 0;

        for (;;) {
                uint64_t id = peer_malloc(a, 0, 2 * MIB);

                peer_settle(b);
                if (peer_error(a, id) != 0)
                        break;
                n += 2 * MIB;
        }
        ck_assert_uint_eq(n, 48 * MIB);
        must_malloc(other, 0, 16 * MIB);
        refusal_of(other, peer_malloc(other, 0, 1), ENOMEM);
        peer_free(a);
        peer_free(other);
}
END_TEST

START_TEST(test_preallocated)
{
        struct peer *p = come_in(1);
        const Bfcd__Block *block;

        ck_assert_uint_eq(b->partitions[1].pool.charged_bytes, 8 * MIB);
        block = must_malloc(p, 1, 8 * MIB);
        ck_assert_uint_eq(block->n_bytes, 8 * MIB);
        refusal_of(p, peer_malloc(p, 1, 1), EDQUOT);
        peer_free(p);
        peer_settle(b);
        ck_assert_uint_eq(b->partitions[1].pool.charged_bytes, 8 * MIB);
}
END_TEST

/* The ledger is full when the device answers: each of those that wait is
 * refused once, though each refusal frees a block again. */
START_TEST(test_ledger_full_while_waiting)
{
        struct peer *p = come_in(1), *q = come_in(1);
        struct ledger_block facts = { .quota = b->tenants[0].quotas[1]->index };
        uint32_t index, *indexes = NULL;
        size_t n = 0, n_room = 0;

        for (int i = 0; i < 20; i++)
                (void)peer_malloc(p, 0, 1000);
        facts.session = q->session->index;
        while (ledger_block_add(b->ledger, &facts, &index) == 0) {
                if (n == n_room) { /* one by one all of a million would be copied each time */
                        n_room = n_room > 0 ? 2 * n_room : 1024;
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
        check_broker();
        must_malloc(p, 0, 1000);
        peer_free(p);
        peer_free(q);
}
END_TEST

/* One block over more extents than the window takes. */
START_TEST(test_window)
{
        struct config *c;
        struct broker *big = peer_broker("devices:\n"
                                         "  - id: host\n"
                                         "    size: 400MiB\n"
                                         "    partitions: [{name: p, limit: 400MiB}]\n"
                                         "tenants:\n"
                                         "  - {name: t, match: {uid: 1}, quotas: [{partition: p}]}\n",
                                         &c);
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
END_TEST

/* Of which the client did not receive the fds: they are sent again, to it alone. */
START_TEST(test_lost_extents)
{
        struct peer *p = come_in(1), *other = come_in(1);
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
        check_broker();
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
        check_broker();
        peer_free(p);
        peer_free(other);
}
END_TEST

/* A block of more extents than one message has would wait for as long as fds are short. */
START_TEST(test_lost_extents_of_a_block_that_waits)
{
        struct config *c;
        struct broker *big = peer_broker("devices:\n"
                                         "  - id: host\n"
                                         "    size: 400MiB\n"
                                         "    partitions: [{name: p, limit: 400MiB}]\n"
                                         "tenants:\n"
                                         "  - {name: t, match: {uid: 1}, quotas: [{partition: p}]}\n",
                                         &c);
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
        ck_assert_uint_eq(big->tenants[0].quotas[0]->n_blocks, 1);
        while (p->to_ack > p->session->acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        id = peer_malloc(p, 0, 300 * MIB);
        peer_settle(big);
        while (p->to_ack > p->session->acked_sequence)
                ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        ck_assert_int_eq(peer_error(p, id), 0);
        peer_free(p);
        peer_broker_free(big, c);
}
END_TEST

/* A session that leaves extents in flight keeps its place, though not its memory. */
START_TEST(test_lingers)
{
        struct peer *p = come_in(1), *q = come_in(1), *r = come_in(1), *s = peer_new(b, 1, false);

        p->auto_ack = false;
        (void)peer_malloc(p, 0, MIB);
        peer_settle(b);
        ck_assert_int_eq(peer_ack(p, 1), 0); /* unread, for all that anybody knows */
        ck_assert_int_eq(session_hang_up(p->session), 1);
        session_close(p->session, "test");
        ck_assert_int_eq(session_reap(p->session, 100), SESSION_LINGERS);
        ck_assert_uint_eq(b->tenants[0].quotas[0]->n_blocks, 0);
        refusal_of(s, peer_hello(s, "a", ""), EDQUOT);
        session_let_go(p->session);
        ck_assert_int_eq(session_reap(p->session, 100), 0);
        ck_assert_int_eq(peer_error(s, peer_hello(s, "a", "")), 0);
        peer_free(p);
        peer_free(q);
        peer_free(r);
        peer_free(s);
}
END_TEST

START_TEST(test_goodbye)
{
        struct peer *p = come_in(1);
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        uint64_t id;

        for (int i = 0; i < 600; i++)
                must_malloc(p, 0, 512);
        r.body_case = BFCD__REQUEST__BODY_GOODBYE;
        r.goodbye = &goodbye;
        ck_assert_int_eq(peer_send(p, &r, &id), 0);
        ck_assert_int_eq(p->session->state, SESSION_CLOSING);
        ck_assert_ptr_null(peer_reply(p, id));
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_MORE);
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_MORE);
        check_broker();
        /* All is freed; only the kernel knows whether the extents were read. */
        ck_assert_int_eq(session_reap(p->session, 256), SESSION_LINGERS);
        ck_assert_int_eq(peer_reply(p, id)->body_case, BFCD__REPLY__BODY_DONE);
        peer_free(p);
}
END_TEST

/* What a dead session held is there for those who wait. */
START_TEST(test_waits_for_the_dying)
{
        struct peer *p = come_in(1), *q = come_in(1);
        uint64_t id;

        must_malloc(p, 0, 48 * MIB);
        ck_assert_int_eq(session_hang_up(p->session), 1);
        ck_assert_uint_eq(p->session->tenant->n_quarantined, 1);
        refusal_of(q, peer_malloc(q, 0, MIB), EDQUOT); /* it may still write there */
        session_close(p->session, "test");
        id = peer_malloc(q, 0, MIB);
        ck_assert_int_eq(peer_error(q, id), -1);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), -1);
        while (session_reap(p->session, 1) == SESSION_MORE)
                ;
        session_let_go(p->session);
        ck_assert_int_eq(session_reap(p->session, 1), 0);
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, id), 0);
        peer_free(p);
        peer_free(q);
}
END_TEST

/* ---- the log ------------------------------------------------------------- */

/* Comes, is refused once, gets a block, and goes. */
static void visit(uid_t uid)
{
        struct peer *p = come_in(uid);

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
        peer_free(come_in(uid));
}

/* What is logged from now on; and so far, as text. */
static int log_fds[2], saved_stderr;

static void log_catch(void)
{
        log_fds[0] = memfd_create("log", MFD_CLOEXEC);
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_ge(log_fds[0], 0);
        ck_assert_int_eq(dup2(log_fds[0], STDERR_FILENO), STDERR_FILENO);
        log_open(LOG_LEVEL_INFO);
}

static const char *log_caught(void)
{
        static char text[1 << 20];
        ssize_t n;

        dup2(saved_stderr, STDERR_FILENO);
        n = pread(log_fds[0], text, sizeof(text) - 1, 0);
        ck_assert_int_gt(n, 0);
        text[n] = '\0';
        close(log_fds[0]);
        close(saved_stderr);
        return text;
}

/* Each end is a line; of refusals the first, and the count of the others. */
START_TEST(test_ends_are_recorded)
{
        const char *text;

        log_catch();
        for (unsigned i = 0; i < 20; i++)
                visit(1);
        visit(2);
        (void)accounting_tick(b, clock_ms(), true);
        text = log_caught();
        ck_assert_uint_eq(count_words(text, "): tenant 'a', uid 1"), 20);
        ck_assert_uint_eq(count_words(text, "peak 256 bytes, 1 allocations, 1 refusals"), 21);
        ck_assert_uint_eq(count_words(text, "): tenant 'b', uid 2"), 1);
        ck_assert_uint_lt(count_words(text, "(tenant 'a', uid 1"), 20);
        ck_assert_uint_ge(count_words(text, "(tenant 'a', uid 1"), 1);
        ck_assert_uint_eq(count_words(text, "(tenant 'b', uid 2"), 1);
        ck_assert_uint_ge(count_words(text, "similar messages suppressed)"), 1);
}
END_TEST

/* A user chooses the program's name, and the control group's below one that was delegated to it. */
START_TEST(test_figures_of_an_end_are_the_daemons)
{
        static const char lie[] = "x; duration 1 ms, peak 1 bytes, 9 allocations, 0 refusals";
        struct peer *p = come_in(1);
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
        true_one = strstr(text, "peak 256 bytes, 1 allocations, 0 refusals");
        false_one = strstr(text, "peak 1 bytes");
        ck_assert_msg(true_one != NULL, "%s", text);
        ck_assert_msg(false_one != NULL && true_one < false_one, "%s", text);
}
END_TEST

/* A tenant that comes and goes in a loop has a bounded number of lines, and the sums have them all. */
START_TEST(test_ends_are_bounded)
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
        ck_assert(b->has_accounts);
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
        ck_assert_ptr_nonnull(strstr(sum, "largest peak 256 bytes, 1 allocations, 1 refusals"));
}
END_TEST

/* ---- a random walk ------------------------------------------------------- */

#define WALK_PEERS  8
#define WALK_BLOCKS 64

struct walker {
        struct peer *peer;
        uint64_t blocks[WALK_BLOCKS];
        size_t n_blocks;
        uint64_t waiting; /* a malloc without an answer */
};

static void walker_collect(struct walker *w)
{
        const Bfcd__Reply *reply = w->waiting ? peer_reply(w->peer, w->waiting) : NULL;

        if (!reply)
                return;
        if (reply->body_case == BFCD__REPLY__BODY_BLOCK)
                w->blocks[w->n_blocks++] = reply->block->block_id;
        w->waiting = 0;
        peer_forget_replies(w->peer);
}

static void walker_step(struct walker *w, unsigned *seed)
{
        unsigned dice = (unsigned)rand_r(seed) % 100;
        uid_t uid = 1 + (uid_t)(rand_r(seed) % 3);

        if (!w->peer) {
                w->peer = peer_new(b, uid, false);
                if (peer_error(w->peer, peer_hello(w->peer, "", "")) != 0)
                        w->peer = peer_free(w->peer);
                return;
        }
        walker_collect(w);
        if (dice < 2) {
                w->peer = peer_free(w->peer);
                w->n_blocks = 0;
                w->waiting = 0;
        } else if (dice < 45 && !w->waiting && w->n_blocks < WALK_BLOCKS) {
                unsigned bits = (unsigned)rand_r(seed) % 24;

                w->waiting = peer_malloc(w->peer, 0, 1 + (uint64_t)rand_r(seed) % (UINT64_C(2) << bits));
        } else if (dice < 52 && !w->waiting && w->n_blocks > 0 && w->n_blocks < WALK_BLOCKS) {
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
                if (w->waiting && w->peer->to_ack > w->peer->session->acked_sequence)
                        peer_ack(w->peer, w->peer->to_ack);
        }
}

/* A forgotten reply would lose a block: nothing waits when replies go. */
START_TEST(test_random_walk)
{
        struct walker walkers[WALK_PEERS] = { { NULL, { 0 }, 0, 0 } };
        unsigned seed = 4711;

        for (unsigned step = 0; step < 200000; step++) {
                struct walker *w = &walkers[(unsigned)rand_r(&seed) % WALK_PEERS];

                if (!w->waiting || peer_reply(w->peer, w->waiting))
                        walker_step(w, &seed);
                if (rand_r(&seed) % 3 == 0)
                        broker_poll(b);
                if (w->peer && w->peer->to_ack > w->peer->session->acked_sequence)
                        ck_assert_int_eq(peer_ack(w->peer, w->peer->to_ack), 0);
                if (step % 64 == 0)
                        check_broker();
        }
        for (unsigned i = 0; i < WALK_PEERS; i++)
                peer_free(walkers[i].peer);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("session");
        TCase *tc = tcase_create("session");

        tcase_add_checked_fixture(tc, setup, teardown);
        tcase_set_timeout(tc, 240);
        tcase_add_test(tc, test_hello);
        tcase_add_test(tc, test_tenant_choice);
        tcase_add_test(tc, test_order);
        tcase_add_test(tc, test_malloc_free);
        tcase_add_test(tc, test_split);
        tcase_add_test(tc, test_split_refused);
        tcase_add_test(tc, test_split_is_bounded);
        tcase_add_test(tc, test_sizes);
        tcase_add_test(tc, test_flags);
        tcase_add_test(tc, test_again);
        tcase_add_test(tc, test_max_blocks_and_sessions);
        tcase_add_test(tc, test_sessions_of_a_tenant);
        tcase_add_test(tc, test_pass_by);
        tcase_add_test(tc, test_death_while_growing);
        tcase_add_test(tc, test_fragments_go_back);
        tcase_add_test(tc, test_neighbour_gives_back);
        tcase_add_test(tc, test_reserve);
        tcase_add_test(tc, test_preallocated);
        tcase_add_test(tc, test_window);
        tcase_add_test(tc, test_lost_extents);
        tcase_add_test(tc, test_lost_extents_of_a_block_that_waits);
        tcase_add_test(tc, test_ledger_full_while_waiting);
        tcase_add_test(tc, test_lingers);
        tcase_add_test(tc, test_goodbye);
        tcase_add_test(tc, test_waits_for_the_dying);
        tcase_add_test(tc, test_ends_are_recorded);
        tcase_add_test(tc, test_figures_of_an_end_are_the_daemons);
        tcase_add_test(tc, test_ends_are_bounded);
        tcase_add_test(tc, test_random_walk);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
