/* Kept blocks, by sessions without sockets: their time, Forget, metadata, limits, reloads and drains.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/reload.h"
#include "daemon/session/shared.h"
#include "daemon/base/clock.h"
#include "tests/checks.h"
#include "tests/suite.h"
#include "tests/unit/leases.h"
#include "tests/unit/still_clock.h"

#define HEAD                                                                                                 \
        "devices:\n"                                                                                         \
        "  - id: host\n"                                                                                     \
        "    size: 128MiB\n"                                                                                 \
        "    partitions: [{name: train, limit: 64MiB}, {name: warm, limit: 32MiB}]\n"                        \
        "tenants:\n"
#define A(quotas) "  - {name: a, match: {uid: 1}, quotas: [" quotas "]}\n"
#define B         "  - {name: b, match: {uid: 2}, quotas: [{partition: train, limit: 48MiB}]}\n"
#define TRAIN     "{partition: train, limit: 48MiB, max_blocks: 300}"
#define WARM      "{partition: warm, limit: 16MiB}"

static void setup(void)
{
        sessions_start(HEAD A(TRAIN ", " WARM) B);
}

FIXTURE(keep, setup, sessions_end);

static struct quota *train(void)
{
        return b->tenants[0].quotas[0];
}

static void must_keep(struct peer *p, uint64_t block, const char *name, uint64_t keep_ms)
{
        ck_assert_int_eq(peer_error(p, peer_publish_kept(p, block, name, keep_ms, NULL, 0)), 0);
        check();
}

static uint64_t must_attach(struct peer *p, const char *name)
{
        uint64_t id = peer_attach(p, name, 0);

        ck_assert_int_eq(peer_error(p, id), 0);
        check();
        return peer_reply(p, id)->attached->block->block_id;
}

static const Bfcd__SharedRow *only_row(struct peer *p, Bfcd__List__Kind kind)
{
        const Bfcd__ListReply *page = list_page(p, kind, 0);

        ck_assert_uint_eq(page->n_shared, 1);
        return page->shared[0];
}

/* Time passes, and the server's timer fires where it was set. */
static void pass(uint64_t ms)
{
        still_clock_pass(ms);
        if (shared_keeps_until(b) != 0 && shared_keeps_until(b) <= clock_ms())
                shared_expire_kept(b, clock_ms());
        settle();
}

TEST(stays_for_its_time)
{
        struct peer *p = open_session(1), *q;
        uint64_t block = must_malloc(p, 0, 3 * MIB);

        must_keep(p, block, "w", 5000);
        ck_assert_uint_eq(shared_keeps_until(b), 0);
        must_free(p, block);
        ck_assert_uint_eq(shared_keeps_until(b), clock_ms() + 5000);
        peer_free(p);
        settle();
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        ck_assert_uint_eq(train()->sessions.n, 0);
        ck_assert_uint_ge(train()->account.charged_bytes, 3 * MIB);

        /* A reference ends the time; the next last one starts it again. */
        pass(4000);
        q = open_session(1);
        ck_assert_uint_eq(must_attach(q, "w"), block);
        ck_assert_uint_eq(shared_keeps_until(b), 0);
        pass(60000);
        peer_free(q);
        settle();
        pass(4999);
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        pass(1);
        ck_assert_uint_eq(train()->all.n_blocks, 0);
        ck_assert_uint_eq(train()->account.charged_bytes, 0);
        ck_assert_ptr_null(b->shared.tree);
}

TEST(times_are_in_order)
{
        struct peer *p = open_session(1);
        static const uint64_t times[] = { 700, 100, LEDGER_FOREVER,    400, 100, 900,
                                          300, 500, LEDGER_FOREVER - 1 };
        enum { N = sizeof(times) / sizeof(times[0]) };
        uint64_t blocks[N];
        char name[16];

        for (int i = 0; i < N; i++) {
                blocks[i] = must_malloc(p, 0, 1000);
                snprintf(name, sizeof(name), "n%d", i);
                must_keep(p, blocks[i], name, times[i]);
                must_free(p, blocks[i]);
        }
        for (int i = 1; i < 10; i++) {
                uint64_t n_left = 0;

                pass(100);
                for (int k = 0; k < N; k++)
                        n_left += times[k] > (uint64_t)i * 100;
                ck_assert_uint_eq(train()->all.n_blocks, n_left);
        }
        ck_assert_uint_eq(shared_keeps_until(b), 0); /* the rest is for ever */
        must_attach(p, "n2");
        must_attach(p, "n8");
        peer_free(p);
}

/* Whatever the order in which they were kept. */
TEST(each_is_freed_at_its_time)
{
        static const uint64_t times[] = { 100, 200, 300, 400 };
        struct peer *p = open_session(1);

        for (unsigned order = 0; order < 24; order++) {
                unsigned rest[] = { 0, 1, 2, 3 }, code = order;
                char name[16];

                for (unsigned n = 4; n > 0; n--) {
                        unsigned at = code % n;
                        uint64_t block = must_malloc(p, 0, 1000);

                        snprintf(name, sizeof(name), "n%u", rest[at]);
                        must_keep(p, block, name, times[rest[at]]);
                        must_free(p, block);
                        rest[at] = rest[n - 1];
                        code /= n;
                }
                for (unsigned n_left = 4; n_left-- > 0;) {
                        pass(100);
                        ck_assert_uint_eq(train()->all.n_blocks, n_left);
                }
                peer_forget_replies(p);
        }
        peer_free(p);
}

TEST(forget_frees)
{
        struct peer *p = open_session(1), *other = open_session(2), *admin = open_admin_session();
        uint64_t block = must_malloc(p, 0, 1000), second = must_malloc(p, 0, 1000);

        must_keep(p, block, "w", LEDGER_FOREVER);
        must_keep(p, second, "v", LEDGER_FOREVER);
        refusal_of(p, peer_forget(p, "", "x"), ENOENT);
        refusal_of(p, peer_forget(p, "", ""), EINVAL);
        refusal_of(p, peer_forget(p, "b", "w"), EACCES);
        refusal_of(other, peer_forget(other, "", "w"), ENOENT);
        refusal_of(other, peer_forget(other, "a", "w"), EACCES);
        refusal_of(admin, peer_forget(admin, "", "w"), EINVAL);
        refusal_of(admin, peer_forget(admin, "b", "w"), ENOENT);
        /* With a reference: it goes with the last one. */
        ck_assert_int_eq(peer_error(p, peer_forget(p, "", "w")), 0);
        check();
        ck_assert_uint_eq(train()->all.n_blocks, 2);
        must_free(p, block);
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        /* Without: at once. */
        must_free(p, second);
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        ck_assert_int_eq(peer_error(admin, peer_forget(admin, "a", "v")), 0);
        ck_assert_uint_eq(train()->all.n_blocks, 0);
        settle();
        refusal_of(p, peer_attach(p, "v", 0), ENOENT);
        peer_free(p);
        peer_free(other);
        peer_free(admin);
}

TEST(metadata_is_for_those_with_a_reference)
{
        struct peer *p = open_session(1), *q = open_session(1), *admin = open_admin_session();
        uint64_t block = must_malloc(p, 0, 1000), plain = must_malloc(p, 0, 1000), id;
        unsigned char metadata[LEDGER_METADATA_BYTES + 1];

        for (size_t i = 0; i < sizeof(metadata); i++)
                metadata[i] = (unsigned char)(i * 7);
        refusal_of(p, peer_publish_kept(p, block, "w", 0, metadata, sizeof(metadata)), EINVAL);
        ck_assert_int_eq(peer_error(p, peer_publish_kept(p, block, "w", 0, metadata, sizeof(metadata) - 1)),
                         0);
        check();
        refusal_of(q, peer_metadata(q, block), EINVAL);
        refusal_of(admin, peer_metadata(admin, block), EINVAL);
        refusal_of(p, peer_metadata(p, plain), EINVAL);
        refusal_of(p, peer_metadata(p, 0), EINVAL);
        must_attach(q, "w");
        for (int i = 0; i < 2; i++) {
                struct peer *of = i ? q : p;

                id = peer_metadata(of, block);
                ck_assert_int_eq(peer_error(of, id), 0);
                ck_assert_uint_eq(peer_reply(of, id)->metadata->metadata.len, LEDGER_METADATA_BYTES);
                ck_assert_int_eq(
                        memcmp(peer_reply(of, id)->metadata->metadata.data, metadata, LEDGER_METADATA_BYTES),
                        0);
        }
        ck_assert_uint_eq(only_row(q, BFCD__LIST__KIND__SHARED)->n_metadata_bytes, LEDGER_METADATA_BYTES);
        ck_assert_uint_eq(list_page(q, BFCD__LIST__KIND__KEPT, 0)->n_shared, 0);
        must_free(q, block);
        refusal_of(q, peer_metadata(q, block), EINVAL);
        must_free(p, block);
        ck_assert_uint_eq(b->shared.n_kept, 0);
        peer_forget_replies(p);
        ck_assert_int_eq(peer_error(p, peer_publish(p, plain, "v")), 0);
        id = peer_metadata(p, plain);
        ck_assert_int_eq(peer_error(p, id), 0);
        ck_assert_uint_eq(peer_reply(p, id)->metadata->metadata.len, 0);
        peer_free(p);
        peer_free(q);
        peer_free(admin);
}

TEST(lists_of_kept_blocks)
{
        struct peer *p = open_session(1), *other = open_session(2), *admin = open_admin_session();
        uint64_t block = must_malloc(p, 0, 1000), plain = must_malloc(p, 0, 1000);
        const Bfcd__SharedRow *row;

        must_keep(p, block, "w", 9000);
        ck_assert_int_eq(peer_error(p, peer_publish(p, plain, "v")), 0);
        for (int i = 0; i < 2; i++) {
                row = only_row(i ? admin : p, BFCD__LIST__KIND__KEPT);
                ck_assert_str_eq(row->name, "w");
                ck_assert_uint_eq(row->keep_ms, 9000);
                ck_assert_uint_eq(row->kept_ms, 0);
                ck_assert_uint_eq(row->num_references, 1);
                ck_assert_uint_eq(list_page(i ? admin : p, BFCD__LIST__KIND__SHARED, 0)->n_shared, 2);
        }
        ck_assert_uint_eq(list_page(other, BFCD__LIST__KIND__KEPT, 0)->n_shared, 0);
        must_free(p, block);
        pass(1000);
        row = only_row(p, BFCD__LIST__KIND__KEPT);
        ck_assert_uint_eq(row->kept_ms, 8000);
        ck_assert_uint_eq(row->num_references, 0);
        refusal_of(p, peer_publish(p, must_malloc(p, 0, 1), "w"), EEXIST);
        peer_free(p);
        peer_free(other);
        peer_free(admin);
}

TEST(a_tenant_keeps_so_many)
{
        struct peer *p = open_session(1);
        uint64_t first = 0, block;
        char name[16];

        for (unsigned i = 0; i < SHARED_MAX_KEPT; i++) {
                block = must_malloc(p, 0, 256);
                first = i == 0 ? block : first;
                snprintf(name, sizeof(name), "n%u", i);
                if (i % 2)
                        must_keep(p, block, name, 1000);
                else
                        ck_assert_int_eq(peer_error(p, peer_publish_kept(p, block, name, 0, "m", 1)), 0);
        }
        block = must_malloc(p, 0, 256);
        refusal_of(p, peer_publish_kept(p, block, "one more", 1, NULL, 0), EDQUOT);
        refusal_of(p, peer_publish_kept(p, block, "one more", 0, "m", 1), EDQUOT);
        ck_assert_int_eq(peer_error(p, peer_publish(p, block, "plain")), 0);
        block = must_malloc(p, 0, 256);
        must_free(p, first);
        must_keep(p, block, "one more", 1);
        peer_free(p);
        settle();
        ck_assert_uint_eq(train()->all.n_blocks, SHARED_MAX_KEPT / 2 + 1);
        /* A bounded number is freed in one turn. */
        still_clock_pass(1000);
        shared_expire_kept(b, clock_ms());
        ck_assert_uint_eq(train()->all.n_blocks, 0);
        ck_assert_uint_eq(b->tenants[0].n_kept, 0);
        settle();
}

TEST(a_removed_quota_keeps_nothing)
{
        struct peer *p = open_session(1);
        uint64_t idle = must_malloc(p, 1, 1000), used = must_malloc(p, 1, 1000),
                 other = must_malloc(p, 0, 1000);

        must_keep(p, idle, "idle", LEDGER_FOREVER);
        must_keep(p, used, "used", LEDGER_FOREVER);
        must_keep(p, other, "other", LEDGER_FOREVER);
        must_free(p, idle);
        must_free(p, other);
        ck_assert_int_eq(reload_told(HEAD A(TRAIN) B, false, NULL), 0);
        ck_assert_uint_eq(b->tenants[0].quotas[1]->all.n_blocks, 1);
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        must_free(p, used);
        ck_assert_uint_eq(b->tenants[0].quotas[1]->all.n_blocks, 0);
        peer_free(p);
        settle();
        ck_assert_uint_eq(b->tenants[0].n_quotas, 1);
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        /* The whole tenant. */
        ck_assert_int_eq(reload_told(HEAD B, false, NULL), 0);
        ck_assert_ptr_null(b->shared.tree);
}

static uint64_t ask_drain(struct peer *admin, bool drains)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Drain drain = BFCD__DRAIN__INIT;
        Bfcd__Resume resume = BFCD__RESUME__INIT;

        drain.device = resume.device = (char *)(uintptr_t) "host";
        r.body_case = drains ? BFCD__REQUEST__BODY_DRAIN : BFCD__REQUEST__BODY_RESUME;
        if (drains)
                r.drain = &drain;
        else
                r.resume = &resume;
        return peer_post(admin, &r);
}

TEST(a_drained_device_keeps_nothing)
{
        struct peer *p = open_session(1), *admin = open_admin_session();
        uint64_t idle = must_malloc(p, 0, 1000), used = must_malloc(p, 0, 1000), resumed;

        must_keep(p, idle, "idle", LEDGER_FOREVER);
        must_keep(p, used, "used", LEDGER_FOREVER);
        must_free(p, idle);
        ck_assert_int_eq(peer_error(admin, ask_drain(admin, true)), 0);
        settle();
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        must_free(p, used);
        settle();
        ck_assert_uint_eq(train()->all.n_blocks, 0);
        ck_assert_uint_eq(train()->account.charged_bytes, 0);
        resumed = ask_drain(admin, false);
        settle();
        ck_assert_int_eq(peer_error(admin, resumed), 0);
        peer_free(p);
        peer_free(admin);
}

/* A refusal counts a kept block as used, and no request reclaims it. */
TEST(kept_blocks_are_charged)
{
        struct peer *p = open_session(1);
        uint64_t block = must_malloc(p, 0, 40 * MIB), id;

        must_keep(p, block, "w", LEDGER_FOREVER);
        must_free(p, block);
        id = peer_malloc(p, 0, 20 * MIB);
        ck_assert_ptr_nonnull(strstr(refusal_of(p, id, EDQUOT), "shared blocks: 40.0 MiB"));
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        ck_assert_int_eq(peer_error(p, peer_forget(p, "", "w")), 0);
        must_free(p, must_malloc(p, 0, 20 * MIB));
        peer_free(p);
}

/* A wait for the name is served by the kept block, and a wait outlives it. */
TEST(waits_and_kept_blocks)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t block = must_malloc(p, 0, 1000), wait = peer_attach(q, "w", 1000);

        must_keep(p, block, "w", 1);
        must_free(p, block); /* before the turn that serves the wait */
        peer_settle(b);
        ck_assert_int_eq(peer_error(q, wait), 0);
        check();
        must_free(q, block);
        pass(1);
        wait = peer_attach(q, "w", 1000);
        settle();
        ck_assert_int_eq(peer_error(q, wait), -1);
        peer_free(p);
        peer_free(q);
}

/* ---- read-only ----------------------------------------------------------------- */

static uint64_t attach_read_only(struct peer *p, const char *name)
{
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &attach);

        attach.name = (char *)(uintptr_t)name;
        attach.read_only = true;
        return peer_post(p, &r);
}

static void assert_extents(const struct peer *p, uint64_t sequence, bool are_read_only)
{
        ck_assert_int_eq(peer_extent(p, sequence, 0)->read_only, are_read_only);
        ck_assert_uint_eq(p->session->delivery.sequence, sequence);
}

TEST(read_only_extents)
{
        struct peer *p = open_session(1), *q = open_session(1);
        uint64_t block = must_malloc(p, 0, 1000), id;

        must_keep(p, block, "w", LEDGER_FOREVER);
        refusal_of(p, attach_read_only(p, "w"), EBUSY);
        id = attach_read_only(q, "w");
        ck_assert_int_eq(peer_error(q, id), 0);
        assert_extents(q, 1, true);
        ck_assert_int_eq(peer_error(q, attach_read_only(q, "w")), 0);
        assert_extents(q, 1, true);
        check();
        /* No write access beside the read-only block: not by another block there, nor to the same. */
        ck_assert_ptr_nonnull(strstr(refusal_of(q, peer_malloc(q, 0, 1000), EBUSY), "read-only"));
        refusal_of(q, peer_attach(q, "w", 0), EBUSY);
        assert_extents(q, 1, true);
        check();
        ck_assert_uint_eq(train()->all.n_blocks, 1);
        /* After it, the extent is sent again. */
        must_free(q, block);
        must_free(q, block);
        must_attach(q, "w");
        assert_extents(q, 2, false);
        must_free(q, block);
        refusal_of(q, attach_read_only(q, "w"), EBUSY);
        ck_assert_uint_eq(ledger_session_at(b->ledger, q->session->index)->links.n_exports, 1);
        peer_free(p);
        peer_free(q);
}
