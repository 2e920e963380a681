/* Accounting; see accounting.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/accounting.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/record/records.h"
#include "daemon/session/session.h"

#define ACCOUNTING_TEXT 512u /* of a value from outside */

/* True: the tenant has no line left in this minute. */
static bool ends_is_full(const struct tenant_ends *e, bool is_short)
{
        return e->n_lines >= ACCOUNTING_LINES || (is_short && e->n_short >= ACCOUNTING_SHORT);
}

static void ends_sum_up(struct tenant_ends *e, const struct session *s, uint64_t lasted_ms)
{
        e->n_summed++;
        s->broker->logs.has_accounts = true;
        e->n_allocs += s->stats.n_allocs;
        e->n_refusals += s->stats.n_refusals;
        e->lasted_ms += lasted_ms;
        e->peak_bytes = max_u64(e->peak_bytes, s->stats.peak_bytes_in_use);
}

/* The minute is over. */
static void ends_write_sum(struct tenant *t)
{
        struct tenant_ends *e = &t->ends;

        struct record r;

        if (e->n_summed > 0) {
                record_init(&r, RECORD_SESSIONS);
                record_add_text(&r, "tenant", t->name, CONFIG_NAME_MAX);
                record_add_number(&r, "sessions", e->n_summed);
                record_add_number(&r, "duration_ms", e->lasted_ms);
                record_add_number(&r, "peak_bytes", e->peak_bytes);
                record_add_number(&r, "allocations", e->n_allocs);
                record_add_number(&r, "refusals", e->n_refusals);
                records_write(LOG_LEVEL_INFO, &r,
                              "%" PRIu64 " more sessions of tenant '%s' ended within %u s: %" PRIu64 " ms in "
                              "total, largest peak %s, %" PRIu64 " allocations, %" PRIu64 " refusals",
                              e->n_summed, t->name, ACCOUNTING_WINDOW_MS / 1000, e->lasted_ms,
                              NUMBER_SIZE(e->peak_bytes), e->n_allocs, e->n_refusals);
        }
        *e = (struct tenant_ends){ 0 };
}

static const char *place_of(const struct session *s)
{
        return s->who.cgroup ? s->who.cgroup : "unknown";
}

static void add_client(struct record *r, const struct session *s)
{
        record_add_number(r, "uid", s->who.uid);
        record_add_number(r, "pid", (uint64_t)s->who.pid);
        if (s->name[0])
                record_add_text(r, "program", s->name, sizeof(s->name));
}

static void record_end(const struct session *s, const char *why, uint64_t lasted_ms, struct record *r)
{
        uint64_t now_us = clock_wall_us();

        record_init(r, RECORD_SESSION);
        record_add_text(r, "tenant", s->tenant->name, CONFIG_NAME_MAX);
        record_add_number(r, "session", s->id);
        add_client(r, s);
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].joined && s->shares[i].quota->lease) {
                        record_add_text(r, "lease", s->shares[i].quota->lease, CONFIG_NAME_MAX);
                        break; /* a job's leases in several partitions are one job's */
                }
        record_add_number(r, "begin_us", now_us - min_u64(now_us, lasted_ms * 1000));
        record_add_number(r, "end_us", now_us);
        record_add_number(r, "peak_bytes", s->stats.peak_bytes_in_use);
        record_add_number(r, "peak_direct_bytes", s->stats.peak_bytes_direct);
        record_add_number(r, "allocations", s->stats.n_allocs);
        record_add_number(r, "refusals", s->stats.n_refusals);
        record_add_number(r, "waited_us", s->stats.waited_ns / 1000);
        record_add_number(r, "bytes_left", session_bytes_in_use(s));
        record_add_text(r, "ended", why, ACCOUNTING_TEXT);
        record_add_text(r, "cgroup", s->who.cgroup, ACCOUNTING_TEXT);
        for (size_t i = 0; i < s->n_shares; i++) /* last: with many partitions it may not all fit */
                if (s->shares[i].joined)
                        record_add_size(r, "peaks", s->shares[i].quota->partition->name,
                                        s->shares[i].peak_bytes);
}

void accounting_end(struct session *s, const char *why)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct tenant_ends *e = &s->tenant->ends;
        uint64_t now_ms = clock_ms(), lasted_ms = now_ms - min_u64(now_ms, record->born_ms);
        bool is_short =
                lasted_ms < ACCOUNTING_SHORT_MS && s->stats.n_allocs == 0 && s->stats.peak_bytes_in_use == 0;
        struct record r;

        if (e->since_ms != 0 && now_ms - e->since_ms >= ACCOUNTING_WINDOW_MS)
                ends_write_sum(s->tenant);
        if (s->n_shares == 0) /* bfcctl and such, which have no memory */
                return;
        if (e->since_ms == 0)
                e->since_ms = now_ms;
        if (ends_is_full(e, is_short)) {
                ends_sum_up(e, s, lasted_ms);
                return;
        }
        e->n_short += is_short;
        e->n_lines++;
        record_end(s, why, lasted_ms, &r);
        /* Text that a user chooses comes last: it can neither imitate statistics nor cut them off. */
        records_write(LOG_LEVEL_INFO, &r,
                      "session %" PRIu64 " ended (%s): tenant '%s', uid %u, pid %d; duration %" PRIu64
                      " ms, %" PRIu32 " blocks with %s and %" PRIu32 " shared blocks left, peak %s, %" PRIu64
                      " allocations, %" PRIu64 " refusals; %s, cgroup %s",
                      s->id, why, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, lasted_ms,
                      record->links.n_blocks, NUMBER_SIZE(session_bytes_in_use(s)), record->links.n_refs,
                      NUMBER_SIZE(s->stats.peak_bytes_in_use), s->stats.n_allocs, s->stats.n_refusals,
                      s->name, place_of(s));
}

/* ---- refusals ------------------------------------------------------------ */

#define SUPPRESSED_BYTES 64u

/* The end of the line, as log_limited() has it. */
static const char *suppressed(uint64_t n, char ret[static SUPPRESSED_BYTES])
{
        ret[0] = '\0';
        if (n > 0)
                snprintf(ret, SUPPRESSED_BYTES, " (%" PRIu64 " similar messages suppressed)", n);
        return ret;
}

/* Just now, at a limit. */
static void note_suppressed(struct tenant *t, const char *partition, const char *limit)
{
        struct tenant_suppressed *s = &t->suppressed;

        partition = partition ? partition : "";
        if (t->refusal_log.n_left_out == 1) {
                *s = (struct tenant_suppressed){ .limit = limit };
                snprintf(s->partition, sizeof(s->partition), "%s", partition);
        } else if (strcmp(s->partition, partition) != 0 || strcmp(s->limit, limit) != 0) {
                s->is_mixed = true;
        }
}

/* t: NULL: no tenant. */
static void add_suppressed(struct record *r, const struct tenant *t, uint64_t n)
{
        record_add_number(r, "suppressed", n);
        if (!t || n == 0 || t->suppressed.is_mixed)
                return;
        if (t->suppressed.partition[0])
                record_add_text(r, "suppressed_partition", t->suppressed.partition, CONFIG_NAME_MAX);
        record_add_text(r, "suppressed_limit", t->suppressed.limit, ACCOUNTING_TEXT);
}

static void add_refusal(struct record *r, const struct tenant *t, const char *limit, const char *sentence,
                        uint64_t n_left_out)
{
        record_add_text(r, "limit", limit, ACCOUNTING_TEXT);
        record_add_text(r, "sentence", sentence, SESSION_SENTENCE_BYTES);
        add_suppressed(r, t, n_left_out);
}

/* Without memory for it, it is only logged. q: NULL: a hello. */
static void keep_refusal(struct session *s, const struct quota *q, uint64_t n_bytes, const char *limit,
                         const char *sentence)
{
        struct tenant_refusals *kept = s->tenant->refusals;
        struct tenant_refusal *r;

        if (!kept)
                kept = s->tenant->refusals = calloc(1, sizeof(*kept));
        if (!kept)
                return;
        r = &kept->last[kept->n++ % TENANT_REFUSALS];
        *r = (struct tenant_refusal){ .time_ms = clock_wall_us() / 1000,
                                      .n_bytes = n_bytes,
                                      .session_id = s->id,
                                      .pid = (uint32_t)s->who.pid,
                                      .uid = s->who.uid,
                                      .limit = limit };
        snprintf(r->partition, sizeof(r->partition), "%s", q ? q->partition->name : "");
        snprintf(r->lease, sizeof(r->lease), "%s", q && q->lease ? q->lease : "");
        snprintf(r->program, sizeof(r->program), "%s", s->name);
        snprintf(r->sentence, sizeof(r->sentence), "%s", sentence);
}

void accounting_refuse(struct session *s, const struct accounting_refusal *refusal)
{
        char more[SUPPRESSED_BYTES];
        uint64_t n_left_out;
        struct record r;

        keep_refusal(s, refusal->quota, refusal->n_bytes, refusal->limit, refusal->told);
        if (!log_limit_take(&s->tenant->refusal_log, &n_left_out)) {
                note_suppressed(s->tenant, refusal->quota->partition->name, refusal->limit);
                s->broker->logs.has_accounts = true;
                return;
        }
        record_init(&r, RECORD_REFUSAL);
        record_add_text(&r, "tenant", s->tenant->name, CONFIG_NAME_MAX);
        record_add_text(&r, "partition", refusal->quota->partition->name, CONFIG_NAME_MAX);
        if (refusal->quota->lease)
                record_add_text(&r, "lease", refusal->quota->lease, CONFIG_NAME_MAX);
        if (refusal->n_bytes > 0)
                record_add_number(&r, "bytes", refusal->n_bytes);
        record_add_number(&r, "session", s->id);
        add_client(&r, s);
        add_refusal(&r, s->tenant, refusal->limit, refusal->sentence, n_left_out);
        records_write(LOG_LEVEL_NOTICE, &r, "%s: refused (%" PRIu64 " so far): %s%s", SESSION_LABEL(s),
                      s->stats.n_refusals, refusal->sentence, suppressed(n_left_out, more));
}

void accounting_refuse_hello(struct session *s, const char *limit, const char *sentence)
{
        struct log_limit *log = s->tenant ? &s->tenant->refusal_log
                                          : log_limit_of_user(&s->broker->logs.refusals, s->who.uid);
        char more[SUPPRESSED_BYTES];
        uint64_t n_left_out;
        struct record r;

        if (s->tenant)
                keep_refusal(s, NULL, 0, limit, sentence);
        if (!log_limit_take(log, &n_left_out)) {
                if (s->tenant)
                        note_suppressed(s->tenant, NULL, limit);
                s->broker->logs.has_accounts |= s->tenant != NULL;
                return;
        }
        record_init(&r, RECORD_REFUSAL);
        if (s->tenant)
                record_add_text(&r, "tenant", s->tenant->name, CONFIG_NAME_MAX);
        add_client(&r, s);
        add_refusal(&r, s->tenant, limit, sentence, n_left_out);
        records_write(LOG_LEVEL_NOTICE, &r, "pid %d refused: %s%s", (int)s->who.pid, sentence,
                      suppressed(n_left_out, more));
}

/* Of refusals that no other refusal reports. True: there are some, but it is not time yet. */
static bool report_suppressed(struct tenant *t)
{
        struct log_limit *log = &t->refusal_log;
        char more[SUPPRESSED_BYTES];
        uint64_t n_left_out;
        struct record r;

        if (log->n_left_out == 0)
                return false;
        if (!log_limit_is_open(log))
                return true;
        (void)log_limit_take(log, &n_left_out);
        record_init(&r, RECORD_REFUSAL);
        record_add_text(&r, "tenant", t->name, CONFIG_NAME_MAX);
        add_suppressed(&r, t, n_left_out);
        records_write(LOG_LEVEL_NOTICE, &r, "tenant '%s': further requests were refused%s", t->name,
                      suppressed(n_left_out, more));
        return false;
}

/* ---- the peaks of quotas -------------------------------------------------- */

static void record_usage(struct quota *q)
{
        struct quota_window w;
        struct record r;

        q->logged.recorded_ms = clock_ms();
        if (quota_parent(q) ||
            !quota_take_window(q, &w)) /* a tenant's peaks are with its leases, which have their record */
                return;
        record_init(&r, RECORD_USAGE);
        record_add_text(&r, "tenant", q->tenant, CONFIG_NAME_MAX);
        record_add_text(&r, "partition", q->partition->name, CONFIG_NAME_MAX);
        record_add_number(&r, "begin_us", w.begin_ms * 1000);
        record_add_number(&r, "end_us", w.end_ms * 1000);
        record_add_number(&r, "peak_bytes", w.peak_in_use);
        record_add_number(&r, "peak_reserved_bytes", w.peak_charged);
        record_add_number(&r, "limit_bytes", q->account.limit_bytes);
        record_add_number(&r, "refusals", w.n_refusals);
        records_write(LOG_LEVEL_DEBUG, &r,
                      "tenant '%s' in partition '%s': peak %s in use, %s reserved of %s, %" PRIu64
                      " refusals in %" PRIu64 " s",
                      q->tenant, q->partition->name, NUMBER_SIZE(w.peak_in_use), NUMBER_SIZE(w.peak_charged),
                      NUMBER_SIZE(q->account.limit_bytes), w.n_refusals,
                      (w.end_ms - min_u64(w.end_ms, w.begin_ms)) / 1000);
}

void accounting_leave(struct quota *q)
{
        if (records_are_open() && q->sessions.n == 0 &&
            (q->logged.recorded_ms == 0 || clock_ms() - q->logged.recorded_ms >= ACCOUNTING_LEAVE_MS))
                record_usage(q);
}

void accounting_usage(struct broker *b, bool all)
{
        uint64_t now_ms = clock_ms();

        if (!records_are_open())
                return;
        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        struct quota *q = b->tenants[i].quotas[k];
                        uint64_t ms = q->sessions.n == 0 && q->peaks.window_is_used ? ACCOUNTING_LEAVE_MS
                                                                                    : ACCOUNTING_USAGE_MS;

                        if (all || now_ms - max_u64(q->logged.recorded_ms, b->started_ms) >= ms)
                                record_usage(q);
                }
        }
}

/* ---- the clock ------------------------------------------------------------ */

static bool tenant_tick(struct tenant *t, uint64_t now_ms, bool all)
{
        struct tenant_ends *e = &t->ends;

        if (e->n_summed > 0 && (all || now_ms - e->since_ms >= ACCOUNTING_WINDOW_MS))
                ends_write_sum(t);
        if (all)
                t->refusal_log.interval_ms = 0;
        return report_suppressed(t) || e->n_summed > 0;
}

bool accounting_tick(struct broker *b, uint64_t now_ms, bool all)
{
        bool is_more = false;

        for (size_t i = 0; i < b->n_tenants; i++)
                is_more |= tenant_tick(&b->tenants[i], now_ms, all);
        return is_more;
}
