/* A session's share of a quota; see share.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/share.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/lease_auto.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/session.h"

struct session_share *session_share_of(const struct session *s, uint32_t quota)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->index == quota)
                        return &s->shares[i];
        return NULL;
}

int session_find_share(const struct session *s, const char *partition, size_t *ret)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                if (partition[0] == '\0' || strcmp(partition, s->shares[i].quota->partition->name) == 0) {
                        *ret = i;
                        return 0;
                }
        }
        return -ENOENT;
}

int session_reserve_seen(struct session_share *share)
{
        size_t n = arena_n_slots(share->quota->arena);
        uint64_t *seen;

        if (n <= share->n_seen)
                return 0;
        seen = realloc(share->seen, n * sizeof(*seen));
        if (!seen)
                return -ENOMEM;
        memset(seen + share->n_seen, 0, (n - share->n_seen) * sizeof(*seen));
        share->seen = seen;
        share->n_seen = n;
        return 0;
}

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
                 full->lease.name ? "lease" : "tenant", full->lease.name ? full->lease.name : s->tenant->name,
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
        if (r == -ENOENT && share->quota->lease.is_ended) {
                session_refuse_format(s, id, r, "lease '%s' of tenant '%s' has ended in partition '%s'",
                                      share->quota->lease.name, s->tenant->name,
                                      share->quota->partition->name);
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
        pressure_join(s, share);
        return 0;
}

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

static int shares_alloc(struct session *s)
{
        size_t n = 1; /* those of leases take the place of their tenant's */

        for (size_t i = 0; i < s->tenant->n_quotas; i++)
                n += s->tenant->quotas[i]->lease.parent == NULL;
        s->shares = calloc(n, sizeof(*s->shares));
        return s->shares ? 0 : -ENOMEM;
}

static struct session_share *take_share(struct session *s, struct quota *q)
{
        struct session_share *share = &s->shares[s->n_shares++];

        share->quota = q;
        q->sessions.n_told++;
        return share;
}

/* The lease of the session within the quota, which may be made for it now. */
static int match_lease(struct session *s, struct quota *parent, struct lease_peer *peer, struct lease **ret,
                       char *sentence, size_t n_sentence)
{
        int r = lease_match(s->broker, parent, peer, ret, sentence, n_sentence);

        if (r == 0)
                r = lease_auto(s, parent, ret, sentence, n_sentence);
        return r;
}

static int refuse_ended(const struct lease *lease, char *sentence, size_t n_sentence)
{
        snprintf(sentence, n_sentence, "lease '%s' in partition '%s' has ended", lease->name,
                 lease->quota->partition->name);
        return -EACCES;
}

/* Whether the quota is that of the session's default partition. */
static bool is_default(const struct session *s, const struct quota *q, const char *partition)
{
        return partition[0] == '\0' ? s->n_shares == 0 : strcmp(partition, q->partition->name) == 0;
}

int session_take_shares(struct session *s, const char *partition, char *sentence, size_t n_sentence)
{
        struct lease_peer peer = { .who = &s->who, .tenant = s->tenant };
        const struct tenant *t = s->tenant;
        size_t n_noted = 0;
        int r = shares_alloc(s);

        for (size_t i = 0; r == 0 && i < t->n_quotas; i++) {
                struct quota *q = t->quotas[i];
                struct lease *lease = NULL;
                bool is_first_choice;

                if (q->is_removed || q->lease.parent)
                        continue;
                is_first_choice = is_default(s, q, partition);
                r = match_lease(s, q, &peer, &lease, sentence, n_sentence);
                if (r == 0 && is_first_choice && lease && lease->quota->lease.is_ended)
                        r = refuse_ended(lease, sentence, n_sentence);
                n_noted += r < 0 || lease;
                if (r < 0 && (is_first_choice || n_noted > LEDGER_SESSION_LEASES))
                        return r;
                take_share(s, r == 0 && lease ? lease->quota : q)->is_barred = r < 0;
                r = 0;
        }
        return r;
}

/* The lease of the session within a quota; else the quota. */
static struct quota *innermost(const struct session *s, const struct ledger_session *record, struct quota *q)
{
        for (size_t i = 0; q->account.n_children > 0 && i < s->tenant->n_quotas; i++) {
                struct quota *each = s->tenant->quotas[i];

                for (size_t k = 0; each->lease.parent == q && k < LEDGER_SESSION_LEASES; k++)
                        if (record->leases[k] == ledger_quota_at(each->ledger, each->index)->id)
                                return each;
        }
        return q;
}

static bool was_barred(const struct ledger_session *record, uint64_t quota_id)
{
        for (size_t k = 0; k < LEDGER_SESSION_LEASES; k++)
                if (record->leases[k] == (quota_id | LEDGER_BARRED))
                        return true;
        return false;
}

int session_take_shares_again(struct session *s, const struct ledger_session *record)
{
        const struct tenant *t = s->tenant;
        int r = shares_alloc(s);

        for (size_t i = 0; r == 0 && i < t->n_quotas; i++) {
                uint64_t id = ledger_quota_at(s->broker->ledger, t->quotas[i]->index)->id;

                if (!t->quotas[i]->lease.parent && id < record->quotas_end)
                        take_share(s, innermost(s, record, t->quotas[i]))->is_barred = was_barred(record, id);
        }
        return r;
}

void session_note_leases(const struct session *s, struct ledger_session *facts)
{
        size_t n = 0;

        for (size_t i = 0; i < s->n_shares; i++) {
                const struct session_share *share = &s->shares[i];
                uint64_t id = ledger_quota_at(share->quota->ledger, share->quota->index)->id;

                if ((share->quota->lease.parent || share->is_barred) && n < LEDGER_SESSION_LEASES)
                        facts->leases[n++] = id | (share->is_barred ? LEDGER_BARRED : 0);
        }
}

void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_add_block(s, share, offset, n_bytes);
        pressure_note(share, n_bytes, 0);
        usage_add(&share->usage, n_bytes);
        share_note_peak(share);
        s->stats.bytes_in_use += n_bytes;
        s->stats.peak_bytes_in_use = max_u64(s->stats.peak_bytes_in_use, s->stats.bytes_in_use);
}

void session_remove_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_remove_block(share, offset, n_bytes);
        pressure_note(share, 0, n_bytes);
        s->stats.bytes_in_use -= n_bytes;
        usage_remove(&share->usage, n_bytes);
}

void session_free_block(struct session *s, uint32_t index)
{
        struct ledger_block *block = ledger_block_at(s->broker->ledger, index);
        struct session_share *share = session_share_of(s, block->quota);
        uint64_t n_bytes = block->n_bytes, n_requested = block->n_requested, handle = block->handle;

        if (ledger_block_is_parked(block)) {
                park_free_block(s, index);
                return;
        }
        session_remove_block(s, share, block->offset, n_bytes);
        ledger_block_clear(s->broker->ledger, index);
        if (!park_takes_over(s, index))
                quota_dealloc(share->quota, handle, n_bytes, n_requested);
}

uint64_t session_lease_number(const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->lease.parent)
                        return ledger_quota_at(s->broker->ledger, s->shares[i].quota->index)->id;
        return 0;
}
