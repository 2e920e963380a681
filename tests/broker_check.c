/* See checks.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/checks.h"

#include <errno.h>

#include "daemon/base/list.h"
#include "daemon/memory/drain.h"
#include "daemon/memory/broker.h"
#include "daemon/session/session.h"

int quota_check(const struct quota *q, const char **ret_why)
{
        struct bfc_stats stats;
        int r = arena_check(q->arena, ret_why);

        if (r < 0)
                return r;
        if (LIST_HAS(q, lists.of_releasing) !=
                    (arena_retiring_bytes(q->arena) + arena_ended_bytes(q->arena) > 0) ||
            (!LIST_HAS(q, lists.of_freed) && arena_releasable(q->arena, NULL) > 0)) {
                *ret_why = "a quota with free or leaving extents is not listed";
                return -EBADMSG;
        }
        arena_read_stats(q->arena, &stats);
        if (stats.bytes_reserved > q->account.charged_bytes) {
                *ret_why = "the allocator has more bytes reserved than are charged";
                return -EBADMSG;
        }
        /* A growing block is the allocator's already and the quota's not yet. */
        if (TAILQ_EMPTY(&q->growth.running) &&
            (stats.bytes_in_use != quota_own(q).bytes_in_use || stats.num_blocks != quota_own(q).n_blocks)) {
                *ret_why = "blocks of the quota and of the allocator differ";
                return -EBADMSG;
        }
        return 0;
}

/* Whether every usage in `remembered` is in the quota's list. */
static bool usages_are_listed(const struct quota *q, struct usage *const *remembered, size_t n)
{
        const struct usage *h;

        for (size_t i = 0; i < n; i++) {
                TAILQ_FOREACH(h, &q->usages.list, of_quota)
                if (h == remembered[i])
                        break;
                if (remembered[i] && !h)
                        return false;
        }
        return true;
}

/* Whether a session's record has what it has charged there. */
static bool direct_is_recorded(const struct usage *h)
{
        struct ledger *l = h->session->broker->ledger;
        const struct ledger_session *record = ledger_session_at(l, h->session->index);
        uint64_t n_bytes = 0;

        for (size_t i = 0; i < LEDGER_SESSION_DIRECT; i++)
                if (record->direct[i].quota_id == ledger_quota_at(l, h->quota->index)->id)
                        n_bytes += record->direct[i].n_bytes;
        return n_bytes == h->direct.n_bytes && (n_bytes == 0 || h->direct.account == &h->quota->account);
}

int usage_check(const struct quota *q, const char **ret_why)
{
        uint64_t direct = 0;
        const struct usage *h;

        *ret_why = "an ended session is listed among the largest";
        if (q->usages.report && (!usages_are_listed(q, q->usages.report->by_bytes, QUOTA_RANKS) ||
                                 !usages_are_listed(q, q->usages.report->by_blocks, QUOTA_RANKS) ||
                                 !usages_are_listed(q, q->usages.report->most, QUOTA_HOLDERS)))
                return -EBADMSG;

        TAILQ_FOREACH(h, &q->usages.list, of_quota)
        {
                struct ledger *ledger = h->session->broker->ledger;
                uint32_t i = ledger_session_at(ledger, h->session->index)->links.first_block;
                uint64_t n_blocks = 0, n_bytes = 0;
                bool fits = true;

                for (; i != LEDGER_NONE; i = ledger_block_at(ledger, i)->links.next_of_session) {
                        const struct ledger_block *block = ledger_block_at(ledger, i);

                        if (block->quota != q->index || ledger_block_is_parked(block))
                                continue;
                        n_blocks++;
                        n_bytes += block->n_bytes;
                        fits = fits && block->n_bytes <= h->largest_bytes;
                }
                *ret_why = "a session's blocks do not match its recorded usage";
                if (n_blocks != h->n_blocks || n_bytes != h->bytes || !fits)
                        return -EBADMSG;
                *ret_why = "a session's direct charge is not what its record has";
                if (!direct_is_recorded(h))
                        return -EBADMSG;
                *ret_why = "a session's contexts are more than its direct charge";
                if (h->bytes_contexts > h->direct.n_bytes)
                        return -EBADMSG;
                direct += h->direct.n_bytes;
        }
        *ret_why = "the sum of the sessions' direct charges is wrong";
        return direct == quota_own(q).bytes_direct ? 0 : -EBADMSG;
}

/* Sums that are kept, against new ones. */
static int sums_check(const struct broker *b, const char **ret_why)
{
        struct broker_needs needs = { 0 };

        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        const struct quota *q = t->quotas[k];
                        uint64_t parked = 0, direct = 0, contexts = 0;
                        const struct usage *h;

                        if (quota_parent(q))
                                continue;
                        needs.n_quotas++;
                        needs.n_extents += arena_extent_room(q->arena, q->account.limit_bytes);
                        for (size_t m = 0; m < t->n_quotas; m++) {
                                if (quota_of_tenant(t->quotas[m]) != q)
                                        continue;
                                parked += arena_parked_bytes(t->quotas[m]->arena);
                                TAILQ_FOREACH(h, &t->quotas[m]->usages.list, of_quota)
                                {
                                        direct += h->direct.n_bytes;
                                        contexts += h->bytes_contexts;
                                }
                        }
                        *ret_why = "the sum of contexts of a quota and its leases is wrong";
                        if (contexts != q->usages.bytes_contexts)
                                return -EBADMSG;
                        *ret_why = "the sum of direct charges of a quota and its leases is wrong";
                        if (direct != q->all.bytes_direct)
                                return -EBADMSG;
                        *ret_why = "the sum of parked bytes of a quota and its leases is wrong";
                        if (parked != q->all.bytes_parked)
                                return -EBADMSG;
                }
        }
        *ret_why = "the records that quotas may need were not counted again";
        return needs.n_quotas == b->needs.n_quotas && needs.n_extents == b->needs.n_extents ? 0 : -EBADMSG;
}

int broker_check(const struct broker *b, const char **ret_why)
{
        int r = ledger_check(b->ledger, ret_why);

        if (r == 0)
                r = sums_check(b, ret_why);
        for (size_t i = 0; r == 0 && i < b->n_tenants; i++)
                for (size_t k = 0; r == 0 && k < b->tenants[i].n_quotas; k++)
                        r = quota_check(b->tenants[i].quotas[k], ret_why);
        if (r == 0)
                r = drain_check(b, ret_why);
        return r;
}
