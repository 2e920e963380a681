/* Lists of how long requests waited, and of those that wait; see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/report.h"

#define REPORT_GRANTS 512u /* ways of quotas, for a page of GRANTS */

static bool way_is_empty(const struct grants_of_way *g)
{
        for (size_t i = 0; i < GRANT_CLASSES; i++)
                if (g->n[i] > 0)
                        return false;
        return true;
}

static void report_quota_grants(const struct quota *q, enum grant_way way, Bfcd__GrantsRow *row)
{
        const struct grants_of_way *g = &q->grants.ways[way];

        bfcd__grants_row__init(row);
        row->tenant = report_borrow(q->tenant);
        row->partition = report_borrow(q->partition->name);
        row->way = report_borrow(grant_way_name(way));
        row->counts = (uint64_t *)(uintptr_t)g->n;
        row->n_counts = GRANT_CLASSES;
        row->total_ns = g->ns;
}

/* The cursor counts the ways of the quotas of all tenants. A page ends with the tenant that completes REPORT_GRANTS. */
void report_grants(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t n = 0;

        r->list.grant_bounds_ns = (uint64_t *)(uintptr_t)grant_bounds_ns;
        r->list.n_grant_bounds_ns = GRANT_CLASSES - 1;
        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                if (n + t->n_quotas * GRANT_WAYS <= cursor || !report_sees(viewer, t)) {
                        n += t->n_quotas * GRANT_WAYS;
                        continue;
                }
                if (n > cursor && n - cursor >= REPORT_GRANTS) {
                        r->list.next_cursor = n;
                        break;
                }
                for (size_t k = 0; k < t->n_quotas * GRANT_WAYS; k++) {
                        const struct quota *q = t->quotas[k / GRANT_WAYS];
                        enum grant_way way = (enum grant_way)(k % GRANT_WAYS);

                        if (n++ < cursor || quota_parent(q) || way_is_empty(&q->grants.ways[way]))
                                continue;
                        if (report_page_ends(r)) {
                                r->list.next_cursor = n - 1;
                                goto out;
                        }
                        report_quota_grants(q, way, &r->rows.grants[r->n_rows]);
                        report_add_row(r, &r->rows.grants[r->n_rows]);
                }
        }
out:
        r->list.n_grants = r->n_rows;
        r->list.grants = (Bfcd__GrantsRow **)r->pointers;
}

static void report_waiting_request(const struct quota *q, const struct quota_waiting *w,
                                   Bfcd__WaitingRow *row)
{
        const struct session *s = w->request->requester;

        bfcd__waiting_row__init(row);
        row->tenant = report_borrow(q->tenant);
        row->lease = report_borrow(q->lease ? q->lease : "");
        row->partition = report_borrow(q->partition->name);
        row->session_id = s ? s->id : 0;
        row->pid = s ? (uint64_t)s->who.pid : 0;
        row->position = w->position;
        row->partition_position = w->partition_position;
        row->n_bytes = w->request->n_bytes;
        row->bytes_lacking = w->lacking_bytes;
        row->waited_ms = w->waited_ms;
        row->left_ms = w->left_ms;
        row->estimate_ms = w->estimate_ms;
        row->wait_ms = w->request->wait_ms;
}

/* The rows of a quota after the first n_told. False: the page ends before *ret_n_told + 1. */
static bool report_quota_waiting(const struct quota *q, uint64_t n_told, struct report *r,
                                 uint64_t *ret_n_told)
{
        struct quota_waiting w = { .request = NULL };

        while (quota_next_waiting(q, &w)) {
                if (w.position <= n_told)
                        continue;
                if (report_page_ends(r)) {
                        *ret_n_told = w.position - 1;
                        return false;
                }
                report_waiting_request(q, &w, &r->rows.waiting[r->n_rows]);
                report_add_row(r, &r->rows.waiting[r->n_rows]);
        }
        return true;
}

/* The cursor counts the quotas of all tenants, and the rows of the next one that were told. */
void report_waiting(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t n = 0, n_told = cursor % (QUOTA_WAITING_SHOWN + 1),
                 next = cursor / (QUOTA_WAITING_SHOWN + 1);

        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                if (!report_sees(viewer, t)) {
                        n += t->n_quotas;
                        continue;
                }
                for (size_t k = 0; k < t->n_quotas; k++, n++) {
                        if (n < next || t->quotas[k]->queue.n == 0)
                                continue;
                        if (!report_quota_waiting(t->quotas[k], n == next ? n_told : 0, r, &n_told)) {
                                r->list.next_cursor = n * (QUOTA_WAITING_SHOWN + 1) + n_told;
                                goto out;
                        }
                }
        }
out:
        r->list.n_waiting = r->n_rows;
        r->list.waiting = (Bfcd__WaitingRow **)r->pointers;
}

static void report_refusal(const struct tenant *t, uint64_t number, Bfcd__RefusalRow *row)
{
        const struct tenant_refusal *f = &t->refusals->last[(number - 1) % TENANT_REFUSALS];

        bfcd__refusal_row__init(row);
        row->tenant = report_borrow(t->name);
        row->number = number;
        row->time_ms = f->time_ms;
        row->partition = report_borrow(f->partition);
        row->lease = report_borrow(f->lease);
        row->session_id = f->session_id;
        row->pid = f->pid;
        row->uid = f->uid;
        row->program = report_borrow(f->program);
        row->n_bytes = f->n_bytes;
        row->limit = report_borrow(f->limit);
        row->sentence = report_borrow(f->sentence);
}

/* The cursor counts the places of all tenants. */
void report_refusals(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        for (uint64_t at = cursor; at / TENANT_REFUSALS < b->n_tenants; at++) {
                const struct tenant *t = &b->tenants[at / TENANT_REFUSALS];
                uint64_t n = t->refusals ? t->refusals->n : 0, k = at % TENANT_REFUSALS;

                if (!report_sees(viewer, t) || k >= n) {
                        at |= TENANT_REFUSALS - 1; /* the next tenant */
                        continue;
                }
                if (r->n_rows == REPORT_REFUSALS || report_page_ends(r)) {
                        r->list.next_cursor = at;
                        break;
                }
                report_refusal(t, (n > TENANT_REFUSALS ? n - TENANT_REFUSALS : 0) + k + 1,
                               &r->rows.refusals[r->n_rows]);
                report_add_row(r, &r->rows.refusals[r->n_rows]);
        }
        r->list.n_refusals = r->n_rows;
        r->list.refusals = (Bfcd__RefusalRow **)r->pointers;
}
