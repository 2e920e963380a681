/* Accounting; see accounting.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/accounting.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/clock.h"
#include "daemon/log.h"
#include "daemon/number.h"
#include "daemon/session.h"

/* True: its line is beyond what the tenant has in this minute. */
static bool ends_is_full(struct tenant_ends *e, bool is_short)
{
        return e->n_lines >= ACCOUNTING_LINES || (is_short && e->n_short >= ACCOUNTING_SHORT);
}

static void ends_sum_up(struct tenant_ends *e, const struct session *s, uint64_t lasted_ms)
{
        e->n_summed++;
        s->broker->has_accounts = true;
        e->n_allocs += s->n_allocs;
        e->n_refusals += s->n_refusals;
        e->lasted_ms += lasted_ms;
        e->peak_bytes = max_u64(e->peak_bytes, s->peak_bytes_in_use);
}

/* The minute is over. */
static void ends_write_sum(struct tenant *t)
{
        struct tenant_ends *e = &t->ends;

        if (e->n_summed > 0)
                log_info("%" PRIu64 " more sessions of tenant '%s' ended within %u s: %" PRIu64 " ms in "
                         "total, largest peak %" PRIu64 " bytes, %" PRIu64 " allocations, %" PRIu64
                         " refusals",
                         e->n_summed, t->name, ACCOUNTING_WINDOW_MS / 1000, e->lasted_ms, e->peak_bytes,
                         e->n_allocs, e->n_refusals);
        *e = (struct tenant_ends){ 0 };
}

static const char *place_of(const struct session *s)
{
        return s->who.cgroup ? s->who.cgroup : "unknown";
}

void accounting_end(struct session *s, const char *why)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct tenant_ends *e = &s->tenant->ends;
        uint64_t now_ms = clock_ms(), lasted_ms = now_ms - min_u64(now_ms, s->born_ms);
        bool is_short = lasted_ms < ACCOUNTING_SHORT_MS && s->n_allocs == 0 && s->peak_bytes_in_use == 0;

        if (e->since_ms != 0 && now_ms - e->since_ms >= ACCOUNTING_WINDOW_MS)
                ends_write_sum(s->tenant);
        if (e->since_ms == 0)
                e->since_ms = now_ms;
        if (ends_is_full(e, is_short)) {
                ends_sum_up(e, s, lasted_ms);
                return;
        }
        e->n_short += is_short;
        e->n_lines++;
        /* What a user can choose, and make long, comes last: it neither passes for figures nor cuts them off. */
        log_info("session %" PRIu64 " ended (%s): tenant '%s', uid %u, pid %d; duration %" PRIu64
                 " ms, %" PRIu32 " blocks with %" PRIu64 " bytes and %" PRIu32
                 " shared blocks left, peak %" PRIu64 " bytes, %" PRIu64 " allocations, %" PRIu64
                 " refusals; %s, cgroup %s",
                 s->id, why, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, lasted_ms,
                 record->links.n_blocks, s->bytes_in_use, record->links.n_holds, s->peak_bytes_in_use,
                 s->n_allocs, s->n_refusals, s->name, place_of(s));
}

static bool tenant_tick(struct tenant *t, uint64_t now_ms, bool all)
{
        struct tenant_ends *e = &t->ends;

        if (e->n_summed > 0 && (all || now_ms - e->since_ms >= ACCOUNTING_WINDOW_MS))
                ends_write_sum(t);
        if (all)
                t->refusal_log.interval_ms = 0;
        return log_limited_rest(&t->refusal_log, LOG_LEVEL_NOTICE,
                                "tenant '%s': further requests were refused", t->name) ||
               e->n_summed > 0;
}

bool accounting_tick(struct broker *b, uint64_t now_ms, bool all)
{
        bool is_more = false;

        for (size_t i = 0; i < b->n_tenants; i++)
                is_more |= tenant_tick(&b->tenants[i], now_ms, all);
        return is_more;
}
