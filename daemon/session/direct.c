/* Direct charges; see direct.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/direct.h"

#include <errno.h>

#include "daemon/base/number.h"
#include "daemon/session/session.h"
#include "daemon/session/pressure.h"
#include "daemon/session/request_refuse.h"
#include "daemon/session/request_wait.h"
#include "daemon/session/share.h"

static uint64_t quota_id(const struct quota *q)
{
        return ledger_quota_at(q->partition->ledger, q->index)->id;
}

/* NULL: it was refused. */
static struct session_share *find_share(struct session *s, uint64_t id, uint32_t partition, bool is_some)
{
        if (s->role != ROLE_CLIENT)
                session_refuse(s, id, -EACCES, "the admin socket charges no memory: use the client socket");
        else if (partition >= s->n_shares)
                session_refuse(s, id, -ENOENT,
                               "no such partition: the reply to the hello lists all partitions");
        else if (!is_some)
                session_refuse(s, id, -EINVAL, "the direct charge is of 0 bytes: charge at least 1 byte");
        else
                return &s->shares[partition];
        return NULL;
}

/* ---- requests ------------------------------------------------------------------ */

static void note_contexts(struct session *s, struct session_share *share, uint64_t id, const Bfcd__Charge *m)
{
        if (m->n_bytes > 0) {
                session_refuse(s, id, -EINVAL, "a charge that tells of contexts is of 0 bytes");
        } else if (m->contexts->n_bytes > share->usage.direct.n_bytes) {
                session_refuse_format(
                        s, id, -EINVAL,
                        "this session has charged %s in partition '%s': its contexts cannot be %s",
                        NUMBER_SIZE(share->usage.direct.n_bytes), share->quota->partition->name,
                        NUMBER_SIZE(m->contexts->n_bytes));
        } else {
                share->usage.bytes_contexts = m->contexts->n_bytes;
                session_done(s, id);
        }
}

int direct_handle_charge(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Charge *m = r->charge;
        struct session_share *share = find_share(s, r->id, m->partition, m->n_bytes > 0 || m->contexts);
        struct quota_request wait = { .n_bytes = m->n_bytes, .is_direct = true, .is_no_refusal = m->again };
        int result;

        (void)ret_why;
        if (share && m->contexts) {
                note_contexts(s, share, r->id, m);
                return 0;
        }
        if (!share || session_join(s, share, r->id) < 0)
                return 0;
        if (share->quota->partition->preallocate) {
                session_refuse_format(
                        s, r->id, -ENOTSUP,
                        "partition '%s' preallocates: its blocks have all of the limit, so nothing else "
                        "is charged there",
                        share->quota->partition->name);
                return 0;
        }
        wait.quota = share->quota;
        result = quota_refuse_at_once(share->quota, m->n_bytes);
        if (result < 0) {
                request_refuse(s, r->id, &wait, result, true);
                return 0;
        }
        result = quota_charge_direct(share->quota, m->n_bytes, m->again);
        if (result < 0)
                request_refuse(s, r->id, &wait, result, false);
        else
                request_wait(s, r->id, m->partition, &wait, m->wait_ms, "");
        return 0;
}

/* Counts it, and commits it before the answer. */
static int add(struct session *s, struct session_share *share, struct charge *granted)
{
        uint64_t before = share->usage.direct.n_bytes;
        int r = granted->n_bytes <= LEDGER_DIRECT_MAX - before ? 0 : -ENOSPC;

        if (r == 0)
                r = ledger_session_set_direct(s->broker->ledger, s->index, quota_id(share->quota),
                                              before + granted->n_bytes);
        if (r < 0)
                return r;
        quota_count_direct(share->quota, &share->usage.direct, granted);
        usage_note_direct(&share->usage);
        recall_note(&share->pressure.recall, share->usage.direct.n_bytes - before, 0);
        if (share->quota->partition->device->direct.n_due > 0)
                broker_note_direct(s->broker, share->quota);
        s->stats.peak_bytes_direct = max_u64(s->stats.peak_bytes_direct, session_direct_bytes(s));
        return 0;
}

void direct_grant(struct session *s, uint64_t id, size_t share_index, struct quota_request *served)
{
        struct session_share *share = &s->shares[share_index];
        int r = add(s, share, &served->charge);

        if (r == 0) {
                session_done(s, id);
                return;
        }
        quota_return_direct(share->quota, &served->charge);
        session_refuse_format(
                s, id, -EDQUOT,
                "a session has direct charges in at most %u partitions, and of at most %s in each",
                LEDGER_SESSION_DIRECT, NUMBER_SIZE(LEDGER_DIRECT_MAX));
}

/* So much less, which it has. */
static void drop(struct session *s, struct session_share *share, uint64_t n_bytes)
{
        uint64_t left = share->usage.direct.n_bytes - n_bytes;

        (void)ledger_session_set_direct(s->broker->ledger, s->index, quota_id(share->quota), left);
        share->usage.bytes_contexts = min_u64(share->usage.bytes_contexts, left);
        quota_drop_direct(share->quota, &share->usage.direct, n_bytes);
        recall_note(&share->pressure.recall, 0, n_bytes);
}

int direct_handle_uncharge(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__Uncharge *m = r->uncharge;
        struct session_share *share = find_share(s, r->id, m->partition, m->n_bytes > 0);

        (void)ret_why;
        if (!share)
                return 0;
        if (m->n_bytes > share->usage.direct.n_bytes) {
                session_refuse_format(s, r->id, -EINVAL,
                                      "this session has charged %s in partition '%s', less than %s",
                                      NUMBER_SIZE(share->usage.direct.n_bytes), share->quota->partition->name,
                                      NUMBER_SIZE(m->n_bytes));
                return 0;
        }
        drop(s, share, m->n_bytes);
        session_done(s, r->id);
        return 0;
}

/* ---- ends ----------------------------------------------------------------------- */

void direct_end(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                s->shares[i].usage.bytes_contexts = 0;
                quota_end_direct(s->shares[i].quota, &s->shares[i].usage.direct);
        }
}

void direct_leave(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                s->shares[i].usage.bytes_contexts = 0;
                quota_leave_direct(s->shares[i].quota, &s->shares[i].usage.direct);
        }
}

/* ---- over a restart ------------------------------------------------------------- */

/* That of a quota that was closed stays charged there. */
static struct session_share *share_of_id(struct session *s, uint64_t id)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (quota_id(s->shares[i].quota) == id)
                        return &s->shares[i];
        return NULL;
}

int direct_restore(struct session *s)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        int r = 0;

        for (size_t i = 0; r == 0 && i < LEDGER_SESSION_DIRECT; i++) {
                const struct ledger_direct *d = &record->direct[i];
                struct session_share *share = d->n_bytes > 0 ? share_of_id(s, d->quota_id) : NULL;

                if (!share)
                        continue;
                r = session_rejoin(s, share);
                if (r == 0)
                        r = quota_take_direct(share->quota, d->n_bytes, &share->usage.direct);
                if (r == 0)
                        usage_note_direct(&share->usage);
        }
        return r == -EACCES ? -EBADMSG : r;
}

void direct_begin_list(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                s->shares[i].is_direct_listed = false;
                s->shares[i].listed_direct_bytes = 0;
                s->shares[i].listed_context_bytes = 0;
        }
}

const char *direct_name(struct session *s, const Bfcd__HeldCharge *listed)
{
        struct session_share *share = listed->partition < s->n_shares ? &s->shares[listed->partition] : NULL;

        if (!share)
                return "the resumed client listed a direct charge in a partition that it does not have";
        if (share->is_direct_listed)
                return "the resumed client listed the direct charge of a partition twice";
        if (listed->n_bytes > share->usage.direct.n_bytes)
                return "the resumed client listed a direct charge of more bytes than it has charged";
        if (listed->bytes_contexts > listed->n_bytes)
                return "the resumed client listed contexts of more bytes than its direct charge";
        share->is_direct_listed = true;
        share->listed_context_bytes = listed->bytes_contexts;
        share->listed_direct_bytes = listed->n_bytes;
        return NULL;
}

void direct_resume(struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++) {
                struct session_share *share = &s->shares[i];

                if (share->usage.direct.n_bytes > share->listed_direct_bytes)
                        drop(s, share, share->usage.direct.n_bytes - share->listed_direct_bytes);
                share->usage.bytes_contexts = share->listed_context_bytes;
        }
}
