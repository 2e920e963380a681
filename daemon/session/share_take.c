/* The shares of a new session; see share_take.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/share_take.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/memory/broker_lease.h"
#include "daemon/session/lease_auto.h"
#include "daemon/session/session.h"

static int shares_alloc(struct session *s)
{
        size_t n = 1; /* those of leases take the place of their tenant's */

        for (size_t i = 0; i < s->tenant->n_quotas; i++)
                n += quota_parent(s->tenant->quotas[i]) == NULL;
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

                if (q->is_removed || quota_parent(q))
                        continue;
                is_first_choice = is_default(s, q, partition);
                r = match_lease(s, q, &peer, &lease, sentence, n_sentence);
                if (r == 0 && is_first_choice && lease && quota_has_ended(lease->quota))
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

                for (size_t k = 0; quota_parent(each) == q && k < LEDGER_SESSION_LEASES; k++)
                        if (record->leases[k] == ledger_quota_at(each->partition->ledger, each->index)->id)
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

                if (!quota_parent(t->quotas[i]) && id < record->quotas_end)
                        take_share(s, innermost(s, record, t->quotas[i]))->is_barred = was_barred(record, id);
        }
        return r;
}

void session_note_leases(const struct session *s, struct ledger_session *facts)
{
        size_t n = 0;

        for (size_t i = 0; i < s->n_shares; i++) {
                const struct session_share *share = &s->shares[i];
                uint64_t id = ledger_quota_at(share->quota->partition->ledger, share->quota->index)->id;

                if ((quota_parent(share->quota) || share->is_barred) && n < LEDGER_SESSION_LEASES)
                        facts->leases[n++] = id | (share->is_barred ? LEDGER_BARRED : 0);
        }
}
