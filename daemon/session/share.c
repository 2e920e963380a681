/* A session's share of a quota; see share.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/share.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/memory/broker_lease.h"
#include "daemon/base/number.h"
#include "daemon/session/accounting.h"
#include "daemon/session/session.h"
#include "daemon/session/pressure.h"
#include "daemon/session/trim.h"
#include "daemon/session/usage.h"

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

void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_add_block(s, share, offset, n_bytes);
        recall_note(&share->trim.recall, n_bytes, 0);
        recall_note(&share->pressure.recall, n_bytes, 0);
        usage_add(&share->usage, n_bytes);
        share_note_peak(share);
        s->stats.peak_bytes_in_use = max_u64(s->stats.peak_bytes_in_use, session_bytes_in_use(s));
}

void session_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes)
{
        trim_remove_block(share, offset, n_bytes);
        recall_note(&share->trim.recall, 0, n_bytes);
        recall_note(&share->pressure.recall, 0, n_bytes);
        usage_remove(&share->usage, n_bytes);
}
