/* Shared blocks, by sessions without sockets: publish, attach, wait, let go; what is
 * refused; deaths; the list; and a long random walk against a plain model.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/suite.h"
#include "tests/checks.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"
#include "daemon/session/delivery.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 128MiB\n"
                                  "    partitions:\n"
                                  "      - {name: train, limit: 64MiB}\n"
                                  "      - {name: warm, limit: 32MiB}\n"
                                  "tenants:\n"
                                  "  - name: a\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas:\n"
                                  "      - {partition: train, limit: 48MiB, max_blocks: 20}\n"
                                  "      - {partition: warm, limit: 16MiB, max_sessions: 1}\n"
                                  "  - name: b\n"
                                  "    match: {uid: [2, 3]}\n"
                                  "    quotas:\n"
                                  "      - {partition: train, limit: 48MiB}\n";

static void setup(void)
{
        sessions_start(config_text);
}

FIXTURE(shared, setup, sessions_end);

static void must_publish(struct peer *p, uint64_t block, const char *name)
{
        uint64_t id = peer_publish(p, block, name);

        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_int_eq(peer_reply(p, id)->body_case, BFCD__REPLY__BODY_DONE);
        check();
}

static const Bfcd__Attached *attached(struct peer *p, uint64_t id)
{
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_int_eq(peer_reply(p, id)->body_case, BFCD__REPLY__BODY_ATTACHED);
        return peer_reply(p, id)->attached;
}

static const Bfcd__Attached *must_attach(struct peer *p, const char *name)
{
        return attached(p, peer_attach(p, name, 0));
}

static const struct quota *quota_of(size_t tenant, size_t partition)
{
        return b->tenants[tenant].quotas[partition];
}

TEST(test_publish_and_attach)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t block = must_malloc(p, 0, 3 * MIB + 1);
        const Bfcd__Attached *got;

        ck_assert_uint_eq(session_bytes_in_use(p->session), 3 * MIB + 256);
        must_publish(p, block, "weights of the 7B");
        ck_assert_uint_eq(session_bytes_in_use(p->session), 0); /* no session's any more */
        ck_assert_uint_eq(q->n_extents, 0);
        got = must_attach(q, "weights of the 7B");
        ck_assert_uint_eq(q->n_extents, 2); /* before the reply */
        ck_assert_uint_eq(got->block->block_id, block);
        ck_assert_uint_eq(got->block->n_bytes, 3 * MIB + 256);
        ck_assert_uint_eq(got->n_requested, 3 * MIB + 1);
        ck_assert_uint_eq(got->partition, 0);
        must_attach(q, "weights of the 7B");
        ck_assert_uint_eq(q->n_extents, 2);
        check();
        /* Charged once, one block, no session's. */
        ck_assert_uint_eq(quota_of(0, 0)->all.bytes_in_use, 3 * MIB + 256);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 1);
        ck_assert_uint_eq(session_bytes_in_use(q->session), 0);

        must_free(p, block);
        refusal_of(p, peer_free_block(p, block), EINVAL);
        must_free(q, block);
        must_attach(p, "weights of the 7B"); /* alive by its last holder */
        must_free(p, block);
        must_free(q, block);
        refusal_of(q, peer_free_block(q, block), EINVAL);
        refusal_of(q, peer_attach(q, "weights of the 7B", 0), ENOENT);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 0);
        peer_free(p);
        peer_free(q);
}

TEST(test_refusals)
{
        struct peer *p = open_session(1), *q = open_session(1), *admin = peer_new(b, 1, true);
        uint64_t block = must_malloc(p, 0, 1000), other = must_malloc(p, 0, 1000),
                 mine = must_malloc(q, 0, 1000);
        char name[80];
        const char *sentence;

        peer_hello(admin, "", "");
        memset(name, 'x', sizeof(name));
        name[64] = '\0';
        refusal_of(p, peer_publish(p, block, name), EINVAL);
        refusal_of(p, peer_attach(p, name, 0), EINVAL);
        refusal_of(p, peer_publish(p, block, ""), EINVAL);
        refusal_of(p, peer_attach(p, "", 1000), EINVAL);
        refusal_of(p, peer_publish(p, block, "tab\there"), EINVAL);
        refusal_of(p, peer_publish(p, block, "\xc3\xa4"), EINVAL);
        refusal_of(p, peer_publish(p, block, "\x1b[2J"), EINVAL);
        refusal_of(admin, peer_publish(admin, block, "x"), EACCES);
        refusal_of(admin, peer_attach(admin, "x", 1000), EACCES);
        refusal_of(p, peer_publish(p, mine, "x"), EINVAL);
        refusal_of(p, peer_publish(p, 0, "x"), EINVAL);
        refusal_of(p, peer_publish(p, UINT64_MAX, "x"), EINVAL);
        refusal_of(p, peer_publish(p, block + 1000, "x"), EINVAL);
        ck_assert_ptr_null(b->shared.tree);

        name[63] = '\0';
        must_publish(p, block, name);
        sentence = refusal_of(p, peer_publish(p, other, name), EEXIST);
        ck_assert_ptr_nonnull(strstr(sentence, "last of 1 sessions"));
        refusal_of(q, peer_publish(q, mine, name), EEXIST);
        sentence = refusal_of(p, peer_publish(p, block, "again"), EINVAL); /* twice */
        ck_assert_ptr_nonnull(strstr(sentence, "already shared"));
        sentence = refusal_of(q, peer_publish(q, block, "again"), EINVAL); /* not its own */
        ck_assert_ptr_nonnull(strstr(sentence, "does not belong"));
        refusal_of(q, peer_free_block(q, block), EINVAL);
        must_attach(q, name);
        sentence = refusal_of(q, peer_publish(q, block, "again"), EINVAL); /* an attached one */
        ck_assert_ptr_nonnull(strstr(sentence, "already shared"));
        refusal_of(admin, peer_free_block(admin, block), EINVAL);
        check();
        peer_free(p);
        peer_free(q);
        peer_free(admin);
}

/* What a tenant shares does not exist for others, by no request and in no list. */
TEST(names_are_per_tenant)
{
        struct peer *p = open_session(1), *unauthenticated = open_session(2), *admin = peer_new(b, 9, true);
        uint64_t block = must_malloc(p, 0, 1000), own = must_malloc(unauthenticated, 0, 1000), wait;
        const Bfcd__ListReply *page;
        const char *sentence;
        char before[256];

        peer_hello(admin, "", "");
        snprintf(before, sizeof(before), "%s",
                 refusal_of(unauthenticated, peer_attach(unauthenticated, "w", 0), ENOENT));
        wait = peer_attach(unauthenticated, "w", 10000);
        must_publish(p, block, "w");
        peer_settle(b);
        ck_assert_int_eq(peer_error(unauthenticated, wait), -1);
        sentence = refusal_of(unauthenticated, peer_attach(unauthenticated, "w", 0), ENOENT);
        ck_assert_str_eq(sentence, before);
        snprintf(before, sizeof(before), "%s",
                 refusal_of(unauthenticated, peer_free_block(unauthenticated, 1), EINVAL));
        sentence = refusal_of(unauthenticated, peer_free_block(unauthenticated, block), EINVAL);
        ck_assert_str_eq(strchr(sentence, 'i'), strchr(before, 'i')); /* but for the number */
        ck_assert_ptr_nonnull(
                strstr(refusal_of(unauthenticated, peer_publish(unauthenticated, block, "v"), EINVAL),
                       "does not belong"));
        ck_assert_uint_eq(list_page(unauthenticated, BFCD__LIST__KIND__SHARED, 0)->n_shared, 0);
        page = list_page(unauthenticated, BFCD__LIST__KIND__BLOCKS, 0);
        ck_assert_uint_eq(page->n_blocks, 1);
        ck_assert_uint_eq(page->blocks[0]->block_id, own);
        /* The same name, in each tenant. */
        must_publish(unauthenticated, own, "w");
        peer_settle(b);
        ck_assert_uint_eq(attached(unauthenticated, wait)->block->block_id, own);
        page = list_page(unauthenticated, BFCD__LIST__KIND__SHARED, 0);
        ck_assert_uint_eq(page->n_shared, 1);
        ck_assert_uint_eq(page->shared[0]->block_id, own);
        ck_assert_uint_eq(list_page(admin, BFCD__LIST__KIND__SHARED, 0)->n_shared, 2);
        peer_free(p);
        peer_free(unauthenticated);
        peer_free(admin);
}

TEST(test_lists)
{
        struct peer *p = open_session(1), *q = open_session(1), *admin = peer_new(b, 9, true);
        uint64_t block = must_malloc(p, 1, 5000);
        const Bfcd__ListReply *page;

        peer_hello(admin, "", "");
        must_malloc(p, 0, 1);
        must_publish(p, block, "w");
        refusal_of(q, peer_attach(q, "w", 0), EDQUOT); /* max_sessions of warm */
        must_attach(p, "w");
        for (int i = 0; i < 2; i++) {
                page = list_page(i ? admin : q, BFCD__LIST__KIND__SHARED, 0);
                ck_assert_uint_eq(page->n_shared, 1);
                ck_assert_str_eq(page->shared[0]->name, "w");
                ck_assert_str_eq(page->shared[0]->tenant, "a");
                ck_assert_str_eq(page->shared[0]->partition, "warm");
                ck_assert_uint_eq(page->shared[0]->block_id, block);
                ck_assert_uint_eq(page->shared[0]->n_bytes, 5120);
                ck_assert_uint_eq(page->shared[0]->n_requested, 5000);
                ck_assert_uint_eq(page->shared[0]->num_references, 1);
                page = list_page(i ? admin : q, BFCD__LIST__KIND__BLOCKS, 0);
                ck_assert_uint_eq(page->n_blocks, 2);
                ck_assert_uint_eq(page->blocks[0]->session_id, 0); /* no session's */
                ck_assert_str_eq(page->blocks[0]->shared_name, "w");
                ck_assert_str_eq(page->blocks[0]->tenant, "a");
                ck_assert_uint_eq(page->blocks[1]->session_id, p->session->id);
                ck_assert_str_eq(page->blocks[1]->shared_name, "");
        }
        peer_free(p);
        peer_free(q);
        peer_free(admin);
}

TEST(test_list_is_paged)
{
        struct peer *p = open_session(2);
        size_t n = 0, n_pages = 0;
        uint64_t cursor = 0;
        char name[16];

        for (int i = 0; i < 250; i++) {
                snprintf(name, sizeof(name), "n%d", i);
                must_publish(p, must_malloc(p, 0, 256), name);
        }
        peer_forget_replies(p);
        do {
                const Bfcd__ListReply *page = list_page(p, BFCD__LIST__KIND__SHARED, cursor);

                n += page->n_shared;
                n_pages++;
                cursor = page->next_cursor;
        } while (cursor != 0);
        ck_assert_uint_eq(n, 250);
        ck_assert_uint_ge(n_pages, 3);
        ck_assert_uint_eq(list_page(p, BFCD__LIST__KIND__SHARED, UINT64_MAX)->n_shared, 0);
        peer_free(p);
}

TEST(test_wait)
{
        struct peer *p = open_session(1), *q = open_session(1), *r = open_session(1);
        uint64_t block = must_malloc(p, 0, 1000), ids[3], soon;

        ids[0] = peer_attach(q, "w", 60000);
        ids[1] = peer_attach(q, "w", UINT32_MAX);
        ids[2] = peer_attach(r, "w", 60000);
        soon = peer_attach(r, "w", 1000);
        check();
        ck_assert_uint_eq(q->session->requests.n, 2);
        shared_tick(b, clock_ms());
        ck_assert_int_eq(peer_error(r, soon), -1);
        shared_tick(b, clock_ms() + 1001);
        ck_assert_int_eq(peer_error(r, soon), ETIMEDOUT);
        ck_assert_int_eq(peer_error(r, ids[2]), -1);
        check();
        must_publish(p, block, "w");
        peer_settle(b);
        for (int i = 0; i < 3; i++)
                ck_assert_uint_eq(attached(i < 2 ? q : r, ids[i])->block->block_id, block);
        ck_assert_uint_eq(q->session->requests.n, 0);
        check();
        must_free(p, block);
        must_free(q, block);
        must_free(q, block);
        must_free(r, block);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 0);
        /* Ten minutes are the most. */
        ids[0] = peer_attach(q, "w", UINT32_MAX);
        shared_tick(b, clock_ms() + SHARED_MAX_WAIT_MS - 1000);
        ck_assert_int_eq(peer_error(q, ids[0]), -1);
        shared_tick(b, clock_ms() + SHARED_MAX_WAIT_MS + 1);
        ck_assert_int_eq(peer_error(q, ids[0]), ETIMEDOUT);
        ck_assert_ptr_null(b->shared.tree);
        peer_free(p);
        peer_free(q);
        peer_free(r);
}

/* Many are refused when their time is up: a bounded number in each turn, too. */
TEST(test_many_expire)
{
        enum { N_PEERS = 20 };
        struct peer *peers[N_PEERS];
        uint64_t ids[N_PEERS][SHARED_MAX_WAITS];
        char name[16];
        size_t n = (size_t)N_PEERS * SHARED_MAX_WAITS;

        for (unsigned i = 0; i < N_PEERS; i++) {
                peers[i] = open_session(2);
                for (unsigned k = 0; k < SHARED_MAX_WAITS; k++) {
                        snprintf(name, sizeof(name), "n%u.%u", i, k);
                        ids[i][k] = peer_attach(peers[i], name, 1000);
                }
        }
        ck_assert_uint_eq(b->shared.n_waits, n);
        ck_assert(!shared_is_due(b));
        shared_tick(b, clock_ms() + 2000);
        for (; n > SHARED_SLICE; n -= SHARED_SLICE) {
                ck_assert_uint_eq(b->shared.n_waits, n - SHARED_SLICE);
                ck_assert(shared_is_due(b));
                check();
                shared_turn(b);
        }
        ck_assert_uint_eq(b->shared.n_waits, 0);
        for (unsigned i = 0; i < N_PEERS; i++) {
                for (unsigned k = 0; k < SHARED_MAX_WAITS; k++)
                        ck_assert_int_eq(peer_error(peers[i], ids[i][k]), ETIMEDOUT);
                peer_free(peers[i]);
        }
        ck_assert(!shared_is_due(b));
        check();
}

/* Many wait: a bounded number is served in each turn; the name may go in between. */
TEST(attach_requests_are_served_in_turns)
{
        struct peer *p = open_session(2), *peers[20];
        uint64_t block = must_malloc(p, 0, 1000), ids[20][SHARED_MAX_WAITS];
        size_t n_given = 0;

        for (size_t i = 0; i < 20; i++) {
                peers[i] = open_session(2 + i % 2);
                for (size_t k = 0; k < SHARED_MAX_WAITS; k++)
                        ids[i][k] = peer_attach(peers[i], "w", 60000);
                refusal_of(peers[i], peer_attach(peers[i], "w", 60000), EDQUOT);
                must_malloc(peers[i], 0, 1); /* its other requests are heard */
        }
        must_publish(p, block, "w");
        shared_turn(b);
        for (size_t i = 0; i < 20; i++)
                for (size_t k = 0; k < SHARED_MAX_WAITS; k++)
                        n_given += peer_error(peers[i], ids[i][k]) == 0;
        ck_assert_uint_eq(n_given, SHARED_SLICE);
        check();
        must_free(p, block);
        for (size_t i = 0; i < 20; i++) /* all its sessions end */
                while (ledger_session_at(b->ledger, peers[i]->session->index)->links.n_refs > 0)
                        must_free(peers[i], block);
        ck_assert(!shared_is_due(b));
        ck_assert_uint_eq(b->shared.n_waits, 20 * SHARED_MAX_WAITS - SHARED_SLICE);
        block = must_malloc(p, 0, 1000);
        must_publish(p, block, "w");
        peer_settle(b);
        ck_assert_uint_eq(b->shared.n_waits, 0);
        check();
        peer_free(p);
        for (size_t i = 0; i < 20; i++)
                peer_free(peers[i]);
}

TEST(session_ends_release_references)
{
        struct peer *p = open_session(1), *q = open_session(1), *r = open_session(1);
        uint64_t block = must_malloc(p, 0, 4 * MIB), wait;

        must_publish(p, block, "w");
        must_attach(q, "w");
        must_attach(q, "w");
        peer_free(p); /* the publisher */
        check();
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 1);
        must_attach(r, "w");
        /* Quarantined: it may still read and write there. */
        ck_assert_int_eq(session_hang_up(q->session, NULL), 1);
        check();
        must_free(r, block);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 1);
        wait = peer_attach(r, "v", 60000);
        must_attach(r, "w");
        must_free(r, block);
        peer_free(q);
        peer_settle(b);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks, 0);
        refusal_of(r, peer_attach(r, "w", 0), ENOENT);
        must_publish(r, must_malloc(r, 0, 1), "w"); /* free again */
        /* A waiter dies. */
        ck_assert_int_eq(peer_error(r, wait), -1);
        peer_free(r);
        check();
        ck_assert_ptr_null(b->shared.tree);
        ck_assert_uint_eq(b->shared.n_waits, 0);
}

/* Holds of the dead go in slices with the rest. */
TEST(test_slices)
{
        struct peer *p = open_session(2), *q = open_session(2);
        char name[16];

        for (int i = 0; i < 20; i++) {
                snprintf(name, sizeof(name), "n%d", i);
                must_publish(p, must_malloc(p, 0, 256), name);
                must_attach(q, name);
        }
        session_close(p->session, "test");
        ck_assert_int_eq(session_reap(p->session, 5), SESSION_MORE);
        ck_assert_uint_eq(ledger_session_at(b->ledger, p->session->index)->links.n_refs, 15);
        check();
        peer_free(p);
        ck_assert_uint_eq(quota_of(1, 0)->all.n_blocks, 20);
        session_close(q->session, "test");
        ck_assert_int_eq(session_reap(q->session, 5), SESSION_MORE);
        ck_assert_uint_eq(quota_of(1, 0)->all.n_blocks, 15);
        check();
        peer_free(q);
}

/* Blocks are counted once: shared ones are of max_blocks, and no more names than these. */
TEST(waiting_attaches_are_bounded)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t ids[SHARED_MAX_WAITS], more;

        for (unsigned i = 0; i < SHARED_MAX_WAITS; i++)
                ids[i] = peer_attach(p, "later", 60000);
        more = peer_attach(p, "later", 60000);
        ck_assert_ptr_nonnull(strstr(refusal_of(p, more, EDQUOT), "32 waiting attaches, the maximum"));
        ck_assert_ptr_null(peer_reply(q, peer_attach(q, "later", 60000))); /* another session has its own */
        must_publish(q, must_malloc(q, 0, 256), "later");
        settle();
        for (unsigned i = 0; i < SHARED_MAX_WAITS; i++)
                (void)attached(p, ids[i]);
        must_close(p);
        must_close(q);
}

TEST(max_blocks_and_references)
{
        struct peer *p = open_session(1), *q = open_session(2);
        char name[16];

        for (int i = 0; i < 20; i++) {
                snprintf(name, sizeof(name), "n%d", i);
                must_publish(p, must_malloc(p, 0, 256), name);
        }
        refusal_of(p, peer_malloc(p, 0, 256), EDQUOT);
        for (int i = 0; i < 20; i++) {
                snprintf(name, sizeof(name), "n%d", i);
                must_attach(p, name);
        }
        for (unsigned i = 0; i < SHARED_MAX_REFS; i++) {
                snprintf(name, sizeof(name), "m%u", i);
                ck_assert_int_eq(peer_error(q, peer_publish(q, must_malloc(q, 0, 256), name)), 0);
                peer_forget_replies(q);
        }
        refusal_of(q, peer_publish(q, must_malloc(q, 0, 256), "one more"), EDQUOT);
        must_attach(q, "m0"); /* one that it has */
        must_free(q, must_attach(q, "m0")->block->block_id);
        check();
        peer_free(p);
        peer_free(q);
}

/* An attach whose extents wait in the window: not the session's yet. */
TEST(test_in_delivery)
{
        struct config *c;
        struct broker *big = open_large(&c);
        struct peer *p = peer_new(big, 1, false), *q = peer_new(big, 1, false);
        uint64_t id, block;
        const char *why = "";

        q->auto_ack = false;
        peer_hello(p, "", "");
        peer_hello(q, "", "");
        id = peer_malloc(p, 0, 300 * MIB);
        for (int i = 0; i < 9; i++) {
                peer_settle(big);
                if (p->to_ack > p->session->delivery.acked_sequence)
                        ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        }
        block = peer_reply(p, id)->block->block_id;
        ck_assert_int_eq(peer_error(p, peer_publish(p, block, "w")), 0);
        id = peer_attach(q, "w", 0);
        ck_assert_ptr_null(peer_reply(q, id));
        ck_assert_uint_eq(q->n_extents, 64);
        refusal_of(q, peer_free_block(q, block), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_free_block(p, block)), 0);
        ck_assert_uint_eq(big->tenants[0].quotas[0]->all.n_blocks, 1);
        ck_assert_int_eq(ledger_check(big->ledger, &why), 0);
        ck_assert_int_eq(peer_ack(q, 1), 0);
        ck_assert_int_eq(peer_ack(q, 2), 0);
        attached(q, id);
        ck_assert_int_eq(peer_error(q, peer_free_block(q, block)), 0);
        ck_assert_uint_eq(big->tenants[0].quotas[0]->all.n_blocks, 0);
        /* And a session that ends in the middle. */
        id = peer_malloc(p, 0, 300 * MIB);
        peer_settle(big);
        block = peer_reply(p, id)->block->block_id;
        ck_assert_int_eq(peer_error(p, peer_publish(p, block, "w")), 0);
        peer_attach(q, "w", 0);
        peer_attach(q, "w", 0);
        peer_free(q);
        ck_assert_int_eq(shared_check(big, &why), 0);
        peer_free(p);
        peer_broker_free(big, c);
}

/* A client that does not see the device is not given what it could not map. */
TEST(test_unseen_device)
{
        struct peer *p = open_session(1), *q = open_session(1);
        Bfcd__Attach body = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &body);
        uint32_t partitions[3] = { 1, 77, UINT32_MAX };
        uint64_t id;

        must_publish(p, must_malloc(p, 0, 1000), "w");
        body.name = (char *)(uintptr_t) "w";
        body.n_partitions = 3;
        body.partitions = partitions;
        ck_assert_int_eq(peer_send(q, &r, &id), 0);
        refusal_of(q, id, ENODEV);
        ck_assert_uint_eq(q->n_extents, 0);
        partitions[0] = 0;
        r.id = 0;
        ck_assert_int_eq(peer_send(q, &r, &id), 0);
        attached(q, id);
        check();
        peer_free(p);
        peer_free(q);
}

/* No Retire of an extent with a shared block; one when the block is freed. */
TEST(test_retire)
{
        struct config *c;
        struct broker *sticky =
                peer_broker_sticky("devices:\n"
                                   "  - id: host\n"
                                   "    size: 16MiB\n"
                                   "    partitions: [{name: p, limit: 8MiB}]\n"
                                   "tenants:\n"
                                   "  - {name: t, match: {uid: 1}, quotas: [{partition: p}]}\n"
                                   "  - {name: u, match: {uid: 2}, quotas: [{partition: p}]}\n",
                                   &c);
        struct peer *p = peer_new(sticky, 1, false), *q = peer_new(sticky, 1, false),
                    *other = peer_new(sticky, 2, false);
        uint64_t id, block;

        p->wants_events = q->wants_events = other->wants_events = true;
        peer_hello(p, "", "");
        peer_hello(q, "", "");
        peer_hello(other, "", "");
        id = peer_malloc(p, 0, 2 * MIB);
        peer_settle(sticky);
        block = peer_reply(p, id)->block->block_id;
        ck_assert_int_eq(peer_ack(p, p->to_ack), 0);
        peer_publish(p, block, "w");
        attached(q, peer_attach(q, "w", 0));
        peer_free_block(p, block);
        id = peer_malloc(other, 0, 8 * MIB);
        peer_settle(sticky);
        ck_assert_int_eq(peer_error(other, id), ENOMEM);
        ck_assert_uint_eq(p->n_retires + q->n_retires, 0);
        peer_free_block(q, block);
        id = peer_malloc(other, 0, 8 * MIB);
        peer_settle(sticky);
        ck_assert_uint_eq(p->n_retires, 1);
        ck_assert_uint_eq(q->n_retires, 1);
        peer_retired_all(p);
        peer_settle(sticky);
        ck_assert_int_eq(peer_error(other, id), -1);
        peer_retired_all(q);
        peer_settle(sticky);
        ck_assert_int_eq(peer_error(other, id), 0);
        peer_free(p);
        peer_free(q);
        peer_free(other);
        peer_broker_free(sticky, c);
}

/* The daemon's tables are full: nothing half made is left. */
TEST(test_full_tables)
{
        struct peer *p = open_session(2), *q = open_session(2);
        uint64_t block = must_malloc(p, 0, 256);
        uint32_t shared, ref, *refs = NULL, index = ledger_block_find(b->ledger, block);
        struct ledger_shared facts = { .name = "x", .block = index };
        size_t n = 0;

        ledger_shrink(b->ledger, 5000, 5000);
        ck_assert_int_eq(ledger_shared_add(b->ledger, &facts, &shared), 0);
        while (ledger_ref_add(b->ledger, q->session->index, shared, &ref) == 0) {
                if (n % 4096 == 0)
                        refs = realloc(refs, (n + 4096) * sizeof(*refs));
                refs[n++] = ref;
        }
        refusal_of(p, peer_publish(p, block, "w"), ENOMEM);
        ck_assert_ptr_null(b->shared.tree);
        ledger_ref_clear(b->ledger, refs[--n]);
        ck_assert_int_eq(peer_error(p, peer_publish(p, block, "w")), 0);
        refusal_of(q, peer_attach(q, "w", 0), EDQUOT);
        while (n > 0)
                ledger_ref_clear(b->ledger, refs[--n]);
        free(refs);
        ledger_shared_clear(b->ledger, shared);
        check();
        peer_free(p);
        peer_free(q);
}

/* ---- a random walk -------------------------------------------------------- */

enum { W_PEERS = 8, W_NAMES = 5, W_BLOCKS = 12, W_WAITS = 4, W_STEPS = 120000 };

/* What must be so. A block is of one peer, or has a name and is of all with a count. */
struct m_block {
        uint64_t id; /* 0: none */
        int owner;   /* -1: shared */
        int name;
        unsigned counts[W_PEERS];
};

struct m_wait {
        uint64_t request; /* 0: none */
        int name;
};

struct walk {
        struct peer *peers[W_PEERS];
        int tenant[W_PEERS]; /* 0, 1 */
        struct m_block blocks[2][W_BLOCKS];
        struct m_wait waits[W_PEERS][W_WAITS];
        unsigned seed;
};

static unsigned dice(struct walk *w, unsigned n)
{
        return (unsigned)rand_r(&w->seed) % n;
}

static struct m_block *m_named(struct walk *w, int tenant, int name)
{
        for (int i = 0; i < W_BLOCKS; i++)
                if (w->blocks[tenant][i].id && w->blocks[tenant][i].owner < 0 &&
                    w->blocks[tenant][i].name == name)
                        return &w->blocks[tenant][i];
        return NULL;
}

/* A hold less: with the last one the block is gone. */
static void m_count_down(struct m_block *m, int peer, bool all)
{
        unsigned sum = 0;

        m->counts[peer] = all ? 0 : m->counts[peer] - 1;
        for (int i = 0; i < W_PEERS; i++)
                sum += m->counts[i];
        if (sum == 0)
                m->id = 0;
}

static const char *name_of(int name)
{
        static const char *const names[W_NAMES] = { "a", "b", "weights", "weights ", "~" };

        return names[name];
}

static void walk_die(struct walk *w, int i)
{
        if (!w->peers[i]) {
                w->tenant[i] = (int)dice(w, 2);
                w->peers[i] = open_session(w->tenant[i] == 0 ? 1 : 2);
                return;
        }
        if (dice(w, 2) && session_hang_up(w->peers[i]->session, NULL) == 1)
                check();
        w->peers[i] = peer_free(w->peers[i]);
        memset(w->waits[i], 0, sizeof(w->waits[i]));
        for (int k = 0; k < W_BLOCKS; k++) {
                struct m_block *m = &w->blocks[w->tenant[i]][k];

                if (m->id && m->owner == i)
                        m->id = 0;
                else if (m->id && m->owner < 0)
                        m_count_down(m, i, true);
        }
}

static void walk_malloc(struct walk *w, int i)
{
        for (int k = 0; k < W_BLOCKS; k++) {
                struct m_block *m = &w->blocks[w->tenant[i]][k];

                if (m->id)
                        continue;
                *m = (struct m_block){ must_malloc(w->peers[i], 0, 1 + dice(w, 2 * MIB)), i, 0, { 0 } };
                return;
        }
}

static void walk_free(struct walk *w, int i)
{
        struct m_block *m = &w->blocks[dice(w, 2)][dice(w, W_BLOCKS)];
        bool mine = m->id && (m->owner == i || (m->owner < 0 && m->counts[i] > 0));
        uint64_t id = peer_free_block(w->peers[i], m->id);

        ck_assert_int_eq(peer_error(w->peers[i], id), mine ? 0 : EINVAL);
        if (mine && m->owner == i)
                m->id = 0;
        else if (mine)
                m_count_down(m, i, false);
}

/* The waiting session has it now. */
static void walk_serve(struct walk *w, int tenant, struct m_block *m)
{
        peer_settle(b);
        for (int i = 0; i < W_PEERS; i++) {
                for (int k = 0; k < W_WAITS; k++) {
                        struct m_wait *wait = &w->waits[i][k];

                        if (!w->peers[i] || w->tenant[i] != tenant || !wait->request || wait->name != m->name)
                                continue;
                        ck_assert_uint_eq(attached(w->peers[i], wait->request)->block->block_id, m->id);
                        m->counts[i]++;
                        wait->request = 0;
                }
        }
}

static void walk_publish(struct walk *w, int i)
{
        struct m_block *m = &w->blocks[dice(w, 2)][dice(w, W_BLOCKS)];
        int name = (int)dice(w, W_NAMES), error = 0;
        uint64_t id = peer_publish(w->peers[i], m->id, name_of(name));

        if (!m->id || m->owner != i)
                error = EINVAL;
        else if (m_named(w, w->tenant[i], name))
                error = EEXIST;
        ck_assert_int_eq(peer_error(w->peers[i], id), error);
        if (error)
                return;
        m->owner = -1;
        m->name = name;
        m->counts[i] = 1;
        walk_serve(w, w->tenant[i], m);
}

static void walk_attach(struct walk *w, int i)
{
        struct m_wait *wait = &w->waits[i][dice(w, W_WAITS)];
        int name = (int)dice(w, W_NAMES);
        struct m_block *m = m_named(w, w->tenant[i], name);
        bool waits = dice(w, 2) && !wait->request;
        uint64_t id = peer_attach(w->peers[i], name_of(name), waits ? 1000 + dice(w, 1000) : 0);

        if (m) {
                ck_assert_uint_eq(attached(w->peers[i], id)->block->block_id, m->id);
                m->counts[i]++;
        } else if (waits) {
                ck_assert_int_eq(peer_error(w->peers[i], id), -1);
                *wait = (struct m_wait){ id, name };
        } else {
                ck_assert_int_eq(peer_error(w->peers[i], id), ENOENT);
        }
}

static void walk_time(struct walk *w)
{
        shared_tick(b, clock_ms() + 1000000);
        for (int i = 0; i < W_PEERS; i++) {
                for (int k = 0; k < W_WAITS; k++) {
                        if (w->waits[i][k].request)
                                ck_assert_int_eq(peer_error(w->peers[i], w->waits[i][k].request), ETIMEDOUT);
                        w->waits[i][k].request = 0;
                }
        }
}

/* Every count in the daemon is the model's. */
static void walk_compare(struct walk *w)
{
        struct ledger_counts counts;
        size_t n_blocks = 0, n_shared = 0, n_refs = 0;

        for (int t = 0; t < 2; t++) {
                for (int k = 0; k < W_BLOCKS; k++) {
                        const struct m_block *m = &w->blocks[t][k];
                        uint32_t shared;

                        if (!m->id)
                                continue;
                        n_blocks++;
                        shared = ledger_block_at(b->ledger, ledger_block_find(b->ledger, m->id))->shared;
                        ck_assert_int_eq(shared == LEDGER_NONE, m->owner >= 0);
                        if (shared == LEDGER_NONE)
                                continue;
                        n_shared++;
                        for (uint32_t h = ledger_shared_at(b->ledger, shared)->links.first_ref;
                             h != LEDGER_NONE; h = ledger_ref_at(b->ledger, h)->links.next_of_shared) {
                                int i = 0;

                                while (!w->peers[i] ||
                                       w->peers[i]->session->index != ledger_ref_at(b->ledger, h)->session)
                                        i++;
                                ck_assert_uint_eq(ledger_ref_at(b->ledger, h)->count, m->counts[i]);
                                n_refs++;
                        }
                        for (int i = 0; i < W_PEERS; i++)
                                n_refs -= m->counts[i] > 0;
                }
        }
        ledger_count(b->ledger, &counts);
        ck_assert_uint_eq(n_refs, 0);
        ck_assert_uint_eq(counts.n_blocks, n_blocks);
        ck_assert_uint_eq(counts.n_shared, n_shared);
        ck_assert_uint_eq(quota_of(0, 0)->all.n_blocks + quota_of(1, 0)->all.n_blocks, n_blocks);
        check();
}

LOOP_TEST(test_random_walk, 2)
{
        struct walk *w = calloc(1, sizeof(*w));

        w->seed = 20240611 + (unsigned)_i;
        for (unsigned step = 0, n = suite_steps(W_STEPS); step < n; step++) {
                int i = (int)dice(w, W_PEERS);
                unsigned what = dice(w, 100);

                if (!w->peers[i] || what < 2)
                        walk_die(w, i);
                else if (what < 25)
                        walk_malloc(w, i);
                else if (what < 60)
                        walk_free(w, i);
                else if (what < 75)
                        walk_publish(w, i);
                else if (what < 99)
                        walk_attach(w, i);
                else
                        walk_time(w);
                if (w->peers[i] && w->peers[i]->n_replies > 256) {
                        bool waits = false;

                        for (int k = 0; k < W_WAITS; k++)
                                waits |= w->waits[i][k].request != 0;
                        if (!waits || w->peers[i]->n_replies > PEER_MAX_REPLIES / 2) {
                                walk_time(w);
                                peer_forget_replies(w->peers[i]);
                        }
                }
                if (step % 32 == 0)
                        walk_compare(w);
        }
        for (int i = 0; i < W_PEERS; i++)
                peer_free(w->peers[i]);
        free(w);
}

/* ---- blocks that wait for an acknowledgement -------------------------------- */

#define LARGE_BYTES (UINT64_C(132) << 20) /* 66 extents: two more than may be unacknowledged */

static void setup_large(void)
{
        sessions_start("devices:\n"
                       "  - id: host\n"
                       "    size: 192MiB\n"
                       "    partitions: [{name: train, limit: 160MiB}]\n"
                       "tenants:\n"
                       "  - name: a\n"
                       "    match: {uid: 1}\n"
                       "    quotas: [{partition: train, limit: 160MiB}]\n");
}

/* A session that attached "large" and acknowledges nothing. *ret_id: of that request. */
static struct peer *come_in_mute(struct peer *publisher, uint64_t *ret_id)
{
        struct peer *q;

        must_publish(publisher, must_malloc(publisher, 0, LARGE_BYTES), "large");
        q = open_session(1);
        q->auto_ack = false;
        q->by_slices = true;
        *ret_id = peer_attach(q, "large", 0);
        ck_assert_int_eq(peer_error(q, *ret_id), -1);
        ck_assert_uint_eq(q->n_extents, SESSION_MAX_UNACKED);
        return q;
}

static void assert_full(struct peer *q)
{
        const char *sentence = refusal_of(q, peer_attach(q, "large", 0), EDQUOT);

        ck_assert_ptr_nonnull(strstr(sentence, "wait for acknowledgements of extents: 1024 of"));
        refusal_of(q, peer_attach(q, "what is not there", 1000), EDQUOT);
        refusal_of(q, peer_malloc(q, 0, 1000), EDQUOT);
        ck_assert_uint_eq(q->session->delivery.n, SESSION_MAX_DELIVERIES);
}

FIXTURE(large, setup_large, sessions_end);

/* Deliveries are bounded for a client that acknowledges nothing. After the acknowledgement they go out,
 * a slice in each turn. */
TEST(test_deliveries_are_bounded)
{
        struct peer *p = open_session(1), *q;
        size_t n_before, n_slices = 0;
        uint64_t first, last;

        q = come_in_mute(p, &first);
        for (unsigned i = 1; i < SESSION_MAX_DELIVERIES; i++)
                ck_assert_int_eq(peer_error(q, last = peer_attach(q, "large", 0)), -1);
        assert_full(q);
        check();

        n_before = q->n_replies;
        ck_assert_int_eq(peer_ack(q, 1), 0);
        ck_assert_uint_eq(q->n_replies, n_before + 1 + SESSION_DELIVERY_SLICE); /* with one Extents */
        while (q->session->delivery.is_due) {
                n_before = q->n_replies;
                session_deliver(q->session);
                ck_assert_uint_le(q->n_replies - n_before, SESSION_DELIVERY_SLICE);
                ck_assert_uint_lt(++n_slices, SESSION_MAX_DELIVERIES);
        }
        ck_assert_uint_eq(n_slices, SESSION_MAX_DELIVERIES / SESSION_DELIVERY_SLICE - 1);
        ck_assert_uint_eq(q->session->delivery.n, 0);
        attached(q, first);
        attached(q, last);
        ck_assert_uint_eq(q->n_extents, 66);
        must_attach(q, "large");
        check();
        peer_free(p);
        peer_free(q);
}

/* A request that comes meanwhile, or one more acknowledgement, does not make the turn longer. */
TEST(test_deliveries_stay_in_order)
{
        struct peer *p = open_session(1), *q;
        uint64_t first, late;
        size_t n_before;

        q = come_in_mute(p, &first);
        for (unsigned i = 0; i < 4 * SESSION_DELIVERY_SLICE; i++)
                (void)peer_attach(q, "large", 0);
        ck_assert_int_eq(peer_ack(q, 1), 0);
        ck_assert(q->session->delivery.is_due);
        n_before = q->n_replies;
        late = peer_attach(q, "large", 0);
        ck_assert_int_eq(peer_ack(q, 2), 0);
        ck_assert_uint_eq(q->n_replies, n_before);
        while (q->session->delivery.is_due) {
                ck_assert_int_eq(peer_error(q, late), -1);
                session_deliver(q->session);
        }
        attached(q, late);
        peer_free(p);
        peer_free(q);
}

/* Such a session ends in slices, also while some of its blocks can be delivered. */
LOOP_TEST(test_deliveries_are_dropped_in_slices, 2)
{
        struct peer *p = open_session(1), *q;
        size_t n_left = SESSION_MAX_DELIVERIES;
        uint64_t first;

        q = come_in_mute(p, &first);
        while (q->session->delivery.n < SESSION_MAX_DELIVERIES)
                (void)peer_attach(q, "large", 0);
        if (_i == 1) {
                ck_assert_int_eq(peer_ack(q, 1), 0);
                n_left -= SESSION_DELIVERY_SLICE;
        }
        ck_assert_int_eq(session_hang_up(q->session, NULL), 1);
        ck_assert(!q->session->delivery.is_due);
        session_close(q->session, "test");
        for (; n_left > 0; n_left -= n_left < SESSION_REAP_SLICE ? n_left : SESSION_REAP_SLICE) {
                ck_assert_uint_eq(q->session->delivery.n, n_left);
                ck_assert_int_eq(session_reap(q->session, SESSION_REAP_SLICE), SESSION_MORE);
        }
        ck_assert_uint_eq(q->session->delivery.n, 0);
        check();
        peer_free(p);
        peer_free(q);
}
