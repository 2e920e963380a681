/* The list EXTENTS: where a tenant's regions have memory, and which of it is being released.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <string.h>

#include "tests/suite.h"
#include "tests/unit/sessions.h"

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 320MiB\n"
                                  "    partitions:\n"
                                  "      - {name: p, limit: 300MiB}\n"
                                  "tenants:\n"
                                  "  - name: a\n"
                                  "    match: {uid: 1}\n"
                                  "    quotas: [{partition: p}]\n"
                                  "  - name: b\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas: [{partition: p}]\n";

static void setup(void)
{
        sessions_start_sticky(config_text);
}

FIXTURE(extents, setup, sessions_end);

static struct peer *open_notified(uid_t uid)
{
        struct peer *p = peer_new(b, uid, false);

        p->wants_events = true;
        return say_hello(p);
}

struct sums {
        size_t n;
        uint64_t bytes, retiring;
};

/* All pages; of one tenant, or (NULL) of all. */
static struct sums sum_up(struct peer *viewer, const char *tenant)
{
        struct sums ret = { 0 };
        uint64_t cursor = 0;

        do {
                const Bfcd__ListReply *page = list_page(viewer, BFCD__LIST__KIND__EXTENTS, cursor);

                for (size_t i = 0; i < page->n_extents; i++) {
                        const Bfcd__ExtentRow *e = page->extents[i];

                        ck_assert_str_eq(e->partition, "p");
                        ck_assert_uint_le(e->offset, e->region_bytes);
                        ck_assert_uint_le(e->n_bytes, e->region_bytes - e->offset);
                        if (tenant && strcmp(e->tenant, tenant) != 0)
                                continue;
                        ret.n++;
                        ret.bytes += e->n_bytes;
                        ret.retiring += e->is_retiring ? e->n_bytes : 0;
                }
                ck_assert(page->next_cursor == 0 || page->next_cursor > cursor);
                cursor = page->next_cursor;
        } while (cursor != 0);
        return ret;
}

TEST_OF(extents, sums_are_those_of_the_tenants)
{
        struct peer *a = open_notified(1), *other = open_notified(2), *admin = open_admin_session();

        ck_assert_uint_eq(sum_up(admin, NULL).n, 0);
        (void)must_malloc(a, 0, 220 * MIB); /* several pages */
        (void)must_malloc(other, 0, 3 * MIB);
        ck_assert_uint_eq(sum_up(admin, "a").bytes, b->tenants[0].quotas[0]->account.charged_bytes);
        ck_assert_uint_eq(sum_up(admin, "b").bytes, b->tenants[1].quotas[0]->account.charged_bytes);
        ck_assert_uint_eq(sum_up(admin, NULL).retiring, 0);
        ck_assert_uint_eq(sum_up(a, NULL).bytes, sum_up(admin, "a").bytes); /* its own only */
        ck_assert_uint_eq(sum_up(a, NULL).n, sum_up(admin, "a").n);
        peer_free(a);
        peer_free(other);
        peer_free(admin);
}

/* Until the last session has unmapped it. */
TEST_OF(extents, retiring_ones_are_marked)
{
        struct peer *a = open_notified(1), *other = open_notified(2), *admin = open_admin_session();
        const struct arena *arena = b->tenants[0].quotas[0]->arena;
        uint64_t id;

        must_free(a, must_malloc(a, 0, 300 * MIB));
        ck_assert_uint_eq(sum_up(admin, "a").retiring, 0);
        id = peer_malloc(other, 0, 4 * MIB);
        settle();
        ck_assert_uint_gt(sum_up(admin, "a").retiring, 0);
        ck_assert_uint_eq(sum_up(admin, "a").retiring, arena_retiring_bytes(arena));
        ck_assert_uint_eq(sum_up(admin, "a").bytes, 300 * MIB);
        peer_retired_all(a);
        settle();
        ck_assert_int_eq(peer_error(other, id), 0);
        ck_assert_uint_eq(sum_up(admin, "a").retiring, 0);
        peer_free(a);
        peer_free(other);
        peer_free(admin);
}

/* A page beyond the end is empty. */
LOOP_TEST_OF(extents, any_cursor_is_safe, 4)
{
        static const uint64_t cursors[] = { 1, UINT32_MAX, UINT64_C(1) << 32, UINT64_MAX };
        struct peer *a = open_notified(1);
        const Bfcd__ListReply *page;

        (void)must_malloc(a, 0, MIB);
        page = list_page(a, BFCD__LIST__KIND__EXTENTS, cursors[_i]);
        ck_assert_uint_eq(page->n_extents, 0);
        ck_assert_uint_eq(page->next_cursor, 0);
        peer_free(a);
}
