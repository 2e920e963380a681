/* Holdings and their ranking; see holding.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/holding.h"

#include <assert.h>
#include <errno.h>

#include "daemon/clock.h"
#include "daemon/session.h"

#define HOLDING_RANK_MS 20u

void holding_join(struct holding *h, struct session *s, struct quota *q)
{
        *h = (struct holding){ .session = s, .quota = q };
        TAILQ_INSERT_TAIL(&q->holdings, h, of_quota);
}

void holding_leave(struct holding *h)
{
        struct quota_ranks *ranks = &h->quota->ranks;
        struct quota_report *report = h->quota->report;

        assert(h->n_blocks == 0 && h->bytes == 0);
        TAILQ_REMOVE(&h->quota->holdings, h, of_quota);
        for (size_t i = 0; i < QUOTA_RANKS; i++) {
                if (ranks->by_bytes[i] == h)
                        ranks->by_bytes[i] = NULL;
                if (ranks->by_blocks[i] == h)
                        ranks->by_blocks[i] = NULL;
        }
        for (size_t i = 0; report && i < QUOTA_HOLDERS; i++)
                if (report->most[i] == h)
                        report->most[i] = NULL;
}

static uint64_t holding_weight(const struct holding *h, bool by_blocks)
{
        return !h ? 0 : by_blocks ? h->n_blocks : h->bytes;
}

/* It grew: it may be one of the first now, which need not be in order here. */
static void rank_offer(struct holding *ranks[QUOTA_RANKS], struct holding *h, bool by_blocks)
{
        size_t least = 0;

        for (size_t i = 0; i < QUOTA_RANKS; i++) {
                if (ranks[i] == h)
                        return;
                if (holding_weight(ranks[i], by_blocks) < holding_weight(ranks[least], by_blocks))
                        least = i;
        }
        if (holding_weight(ranks[least], by_blocks) < holding_weight(h, by_blocks))
                ranks[least] = h;
}

void holding_add(struct holding *h, uint64_t n_bytes)
{
        if (h->n_blocks++ == 0 || n_bytes >= h->largest_bytes) {
                h->largest_bytes = n_bytes;
                h->largest_is_old = false;
        }
        h->bytes += n_bytes;
        rank_offer(h->quota->ranks.by_bytes, h, false);
        rank_offer(h->quota->ranks.by_blocks, h, true);
}

void holding_remove(struct holding *h, uint64_t n_bytes)
{
        assert(h->n_blocks > 0 && h->bytes >= n_bytes);
        h->n_blocks--;
        h->bytes -= n_bytes;
        if (n_bytes == h->largest_bytes)
                h->largest_is_old = true;
        if (h->n_blocks == 0)
                h->largest_bytes = 0;
}

void holding_split(struct holding *h, uint64_t n_bytes)
{
        h->n_blocks++;
        if (n_bytes == h->largest_bytes)
                h->largest_is_old = true;
        rank_offer(h->quota->ranks.by_blocks, h, true);
}

/* Puts it where it belongs among the first n, if it does; places may be empty. */
static void rank_insert(struct holding **ranks, size_t n, struct holding *h, bool by_blocks)
{
        size_t i = n;

        while (i > 0 && holding_weight(ranks[i - 1], by_blocks) < holding_weight(h, by_blocks))
                i--;
        if (i == n) /* also who has nothing */
                return;
        for (size_t k = n - 1; k > i; k--)
                ranks[k] = ranks[k - 1];
        ranks[i] = h;
}

static void holding_rank_anew(struct quota *q)
{
        uint64_t now_ms = clock_ms();
        struct holding *h;

        if (q->ranks.since_ms != 0 && now_ms - q->ranks.since_ms < HOLDING_RANK_MS)
                return;
        q->ranks = (struct quota_ranks){ .since_ms = now_ms };
        TAILQ_FOREACH(h, &q->holdings, of_quota)
        {
                rank_insert(q->ranks.by_bytes, QUOTA_RANKS, h, false);
                rank_insert(q->ranks.by_blocks, QUOTA_RANKS, h, true);
        }
}

size_t holding_rank(struct quota *q, bool by_blocks, struct holding *ret[QUOTA_RANKS])
{
        struct holding *const *ranks = by_blocks ? q->ranks.by_blocks : q->ranks.by_bytes;
        size_t n = 0;

        holding_rank_anew(q);
        for (size_t i = 0; i < QUOTA_RANKS; i++)
                ret[i] = NULL;
        for (size_t i = 0; i < QUOTA_RANKS; i++)
                if (ranks[i]) /* in the order of the moment */
                        rank_insert(ret, QUOTA_RANKS, ranks[i], by_blocks);
        while (n < QUOTA_RANKS && ret[n])
                n++;
        return n;
}

void holding_most(const struct quota *q, struct holding **ret, size_t n)
{
        struct holding *h;

        for (size_t i = 0; i < n; i++)
                ret[i] = NULL;
        TAILQ_FOREACH(h, &q->holdings, of_quota)
        rank_insert(ret, n, h, false);
}

uint64_t holding_largest(struct holding *h, size_t *budget)
{
        struct ledger *ledger = h->session->broker->ledger;
        const struct ledger_session *record = ledger_session_at(ledger, h->session->index);
        const struct ledger_block *block;
        uint64_t largest = 0;
        uint32_t i;

        if (!h->largest_is_old || record->links.n_blocks > *budget)
                return h->largest_bytes < h->bytes ? h->largest_bytes : h->bytes;
        *budget -= record->links.n_blocks;
        for (i = record->links.first_block; i != LEDGER_NONE; i = block->links.next_of_session) {
                block = ledger_block_at(ledger, i);
                if (block->quota == h->quota->index && block->n_bytes > largest)
                        largest = block->n_bytes;
        }
        h->largest_bytes = largest;
        h->largest_is_old = false;
        return largest;
}

/* Whoever is remembered as one of the first is there. */
static bool all_are_there(const struct quota *q, struct holding *const *remembered, size_t n)
{
        const struct holding *h;

        for (size_t i = 0; i < n; i++) {
                TAILQ_FOREACH(h, &q->holdings, of_quota)
                if (h == remembered[i])
                        break;
                if (remembered[i] && !h)
                        return false;
        }
        return true;
}

int holding_check(const struct quota *q, const char **ret_why)
{
        const struct holding *h;

        *ret_why = "an ended session is listed among the largest";
        if (!all_are_there(q, q->ranks.by_bytes, QUOTA_RANKS) ||
            !all_are_there(q, q->ranks.by_blocks, QUOTA_RANKS) ||
            (q->report && !all_are_there(q, q->report->most, QUOTA_HOLDERS)))
                return -EBADMSG;

        TAILQ_FOREACH(h, &q->holdings, of_quota)
        {
                struct ledger *ledger = h->session->broker->ledger;
                uint32_t i = ledger_session_at(ledger, h->session->index)->links.first_block;
                uint64_t n_blocks = 0, n_bytes = 0;
                bool fits = true;

                for (; i != LEDGER_NONE; i = ledger_block_at(ledger, i)->links.next_of_session) {
                        const struct ledger_block *block = ledger_block_at(ledger, i);

                        if (block->quota != q->index)
                                continue;
                        n_blocks++;
                        n_bytes += block->n_bytes;
                        fits = fits && block->n_bytes <= h->largest_bytes;
                }
                *ret_why = "a session's blocks do not match its recorded usage";
                if (n_blocks != h->n_blocks || n_bytes != h->bytes || !fits)
                        return -EBADMSG;
        }
        return 0;
}
