/* A session's share of a quota; see share.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/share.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/session/accounting.h"
#include "daemon/session/session.h"
#include "daemon/session/trim.h"

/* ---- usage, and its ranking ---------------------------------------------------- */

#define USAGE_RANK_MS 20u

/* The session joins the quota, and leaves it. */
static void usage_join(struct usage *h, struct session *s, struct quota *q)
{
        *h = (struct usage){ .session = s, .quota = q };
        TAILQ_INSERT_TAIL(&q->usages.list, h, of_quota);
}

static void usage_leave(struct usage *h)
{
        struct quota_report *report = h->quota->usages.report;

        assert(h->n_blocks == 0 && h->bytes == 0 && h->direct.n_bytes == 0 && h->bytes_contexts == 0);
        TAILQ_REMOVE(&h->quota->usages.list, h, of_quota);
        for (size_t i = 0; report && i < QUOTA_RANKS; i++) {
                if (report->by_bytes[i] == h)
                        report->by_bytes[i] = NULL;
                if (report->by_blocks[i] == h)
                        report->by_blocks[i] = NULL;
        }
        for (size_t i = 0; report && i < QUOTA_HOLDERS; i++)
                if (report->most[i] == h)
                        report->most[i] = NULL;
}

static uint64_t usage_weight(const struct usage *h, bool by_blocks)
{
        return !h ? 0 : by_blocks ? h->n_blocks : usage_bytes(h);
}

/* The usage grew: it may be one of the first now. These need not be in order here. */
static void rank_offer(struct usage *h, bool by_blocks)
{
        struct quota_report *report = h->quota->usages.report;
        struct usage **ranks;
        size_t least = 0;

        if (!report)
                return;
        ranks = by_blocks ? report->by_blocks : report->by_bytes;
        for (size_t i = 0; i < QUOTA_RANKS; i++) {
                if (ranks[i] == h)
                        return;
                if (usage_weight(ranks[i], by_blocks) < usage_weight(ranks[least], by_blocks))
                        least = i;
        }
        if (usage_weight(ranks[least], by_blocks) < usage_weight(h, by_blocks))
                ranks[least] = h;
}

static void usage_add(struct usage *h, uint64_t n_bytes)
{
        if (h->n_blocks++ == 0 || n_bytes >= h->largest_bytes) {
                h->largest_bytes = n_bytes;
                h->largest_is_old = false;
        }
        h->bytes += n_bytes;
        rank_offer(h, false);
        rank_offer(h, true);
}

void usage_note_direct(struct usage *h)
{
        rank_offer(h, false);
}

void usage_remove(struct usage *h, uint64_t n_bytes)
{
        assert(h->n_blocks > 0 && h->bytes >= n_bytes);
        h->n_blocks--;
        h->bytes -= n_bytes;
        if (n_bytes == h->largest_bytes)
                h->largest_is_old = true;
        if (h->n_blocks == 0)
                h->largest_bytes = 0;
}

void usage_split(struct usage *h, uint64_t n_bytes)
{
        h->n_blocks++;
        if (n_bytes == h->largest_bytes)
                h->largest_is_old = true;
        rank_offer(h, true);
}

/* Inserts it among the first n, if it belongs there; places may be empty. */
static void rank_insert(struct usage **ranks, size_t n, struct usage *h, bool by_blocks)
{
        size_t i = n;

        while (i > 0 && usage_weight(ranks[i - 1], by_blocks) < usage_weight(h, by_blocks))
                i--;
        if (i == n) /* also without any memory */
                return;
        for (size_t k = n - 1; k > i; k--)
                ranks[k] = ranks[k - 1];
        ranks[i] = h;
}

struct quota_report *usage_report(struct quota *q)
{
        if (!q->usages.report)
                q->usages.report = calloc(1, sizeof(*q->usages.report));
        return q->usages.report;
}

static void rank_anew(struct quota_report *report, const struct quota *q)
{
        uint64_t now_ms = clock_ms();
        struct usage *h;

        if (report->ranks_ms != 0 && now_ms - report->ranks_ms < USAGE_RANK_MS)
                return;
        report->ranks_ms = now_ms;
        memset(report->by_bytes, 0, sizeof(report->by_bytes));
        memset(report->by_blocks, 0, sizeof(report->by_blocks));
        TAILQ_FOREACH(h, &q->usages.list, of_quota)
        {
                rank_insert(report->by_bytes, QUOTA_RANKS, h, false);
                rank_insert(report->by_blocks, QUOTA_RANKS, h, true);
        }
}

size_t usage_rank(struct quota *q, bool by_blocks, struct usage *ret[QUOTA_RANKS])
{
        struct quota_report *report = usage_report(q);
        struct usage *const *ranks;
        size_t n = 0;

        if (!report)
                return 0;
        rank_anew(report, q);
        ranks = by_blocks ? report->by_blocks : report->by_bytes;
        for (size_t i = 0; i < QUOTA_RANKS; i++)
                ret[i] = NULL;
        for (size_t i = 0; i < QUOTA_RANKS; i++)
                if (ranks[i]) /* in the current order */
                        rank_insert(ret, QUOTA_RANKS, ranks[i], by_blocks);
        while (n < QUOTA_RANKS && ret[n])
                n++;
        return n;
}

void usage_set_contexts(struct usage *h, uint64_t n_bytes)
{
        for (struct quota *q = h->quota; q; q = quota_parent(q))
                q->usages.bytes_contexts += n_bytes - h->bytes_contexts;
        h->bytes_contexts = n_bytes;
}

void usage_most(const struct quota *q, struct usage **ret, size_t n)
{
        struct usage *h;

        for (size_t i = 0; i < n; i++)
                ret[i] = NULL;
        TAILQ_FOREACH(h, &q->usages.list, of_quota)
        rank_insert(ret, n, h, false);
}

uint64_t usage_largest(struct usage *h, size_t *budget)
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
                if (block->quota == h->quota->index && !ledger_block_is_parked(block) &&
                    block->n_bytes > largest)
                        largest = block->n_bytes;
        }
        h->largest_bytes = largest;
        h->largest_is_old = false;
        return largest;
}

/* ---- joining ------------------------------------------------------------------ */

int session_rejoin(struct session *s, struct session_share *share)
{
        if (share->is_barred)
                return -EACCES;
        if (!share->joined) {
                share->joined = true;
                usage_join(&share->usage, s, share->quota);
                quota_rejoin(share->quota);
        }
        return session_reserve_seen(share);
}

static void refuse_join(struct session *s, uint64_t id, const struct quota *q, int error)
{
        const struct quota *full = quota_without_session(q);
        char sentence[SESSION_SENTENCE_BYTES];

        snprintf(sentence, sizeof(sentence),
                 "%s '%s' has %" PRIu32 " sessions in partition '%s'%s: its limit max_sessions is %" PRIu32,
                 full->lease ? "lease" : "tenant", full->lease ? full->lease : s->tenant->name,
                 full->all.n_sessions, q->partition->name,
                 full->account.n_children > 0 ? " with its leases" : "", full->max_sessions);
        accounting_refuse(
                s, &(struct accounting_refusal){
                           .quota = q, .limit = "max_sessions", .sentence = sentence, .told = sentence });
        session_refuse(s, id, error, sentence);
}

int session_join(struct session *s, struct session_share *share, uint64_t id)
{
        int r;

        if (share->joined)
                return 0;
        if (share->is_barred) {
                session_refuse_format(
                        s, id, -EACCES,
                        "at the begin of this session the daemon could not tell to which lease of tenant '%s' in "
                        "partition '%s' it belongs, or could not make its lease: connect again",
                        s->tenant->name, share->quota->partition->name);
                return -EACCES;
        }
        r = quota_join(share->quota);
        if (r == -ENOENT && quota_has_ended(share->quota)) {
                session_refuse_format(s, id, r, "lease '%s' of tenant '%s' has ended in partition '%s'",
                                      share->quota->lease, s->tenant->name, share->quota->partition->name);
                return r;
        }
        if (r == -ENOENT) {
                session_refuse_format(
                        s, id, r,
                        "tenant '%s' no longer has a quota in partition '%s': the configuration was "
                        "changed",
                        s->tenant->name, share->quota->partition->name);
                return r;
        }
        if (r < 0) {
                refuse_join(s, id, share->quota, r);
                return r;
        }
        share->joined = true;
        usage_join(&share->usage, s, share->quota);
        trim_list_pressed(s, share);
        return 0;
}

/* ---- blocks ------------------------------------------------------------------- */

/* Usage may be at its peak; quota_release_surplus() relies on that. */
static void share_note_peak(struct session_share *share)
{
        if (share->usage.bytes <= share->peak_bytes)
                return;
        share->quota->sessions.peaks_bytes += share->usage.bytes - share->peak_bytes;
        share->peak_bytes = share->usage.bytes;
}

static void share_forget_peak(struct session_share *share)
{
        share->quota->sessions.peaks_bytes -= share->peak_bytes;
        share->peak_bytes = 0;
}

void session_forget_peaks(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct session_share *share = &s->shares[i];

                if (!share->joined)
                        continue;
                share_forget_peak(share);
                quota_closed(share->quota);
                quota_release_surplus(share->quota);
        }
}

void session_leave_shares(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct quota *q = s->shares[i].quota;

                share_forget_peak(&s->shares[i]);
                if (s->shares[i].joined) {
                        usage_leave(&s->shares[i].usage);
                        quota_leave(q);
                        accounting_leave(q);
                }
                q->sessions.n_told--;
                broker_note_leave(s->broker, q);
                free(s->shares[i].seen);
                trim_share_free(&s->shares[i]);
        }
        free(s->shares);
        s->shares = NULL;
        s->n_shares = 0;
}

void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_add_block(s, share, offset, n_bytes);
        recall_note(&share->trim.asked.recall, n_bytes, 0);
        recall_note(&share->pressure.asked.recall, n_bytes, 0);
        usage_add(&share->usage, n_bytes);
        share_note_peak(share);
        s->stats.peak_bytes_in_use = max_u64(s->stats.peak_bytes_in_use, session_bytes_in_use(s));
}

void session_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_remove_block(share, offset, n_bytes);
        recall_note(&share->trim.asked.recall, 0, n_bytes);
        recall_note(&share->pressure.asked.recall, 0, n_bytes);
        usage_remove(&share->usage, n_bytes);
}
