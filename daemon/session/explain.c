/* Explain; see explain.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/explain.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/session/share.h"
#include "daemon/base/number.h"
#include "daemon/session/report.h"
#include "daemon/session/outside.h"
#include "daemon/session/session.h"

/* ---- words ------------------------------------------------------------------ */

static void __attribute__((format(printf, 3, 4))) append(char *sentence, size_t n, const char *format, ...)
{
        size_t used = strlen(sentence);
        va_list args;

        va_start(args, format);
        vsnprintf(sentence + used, n - used, format, args);
        va_end(args);
}

static const char *plural(uint64_t n)
{
        return n == 1 ? "" : "s";
}

static const struct session_share *share_of(const struct usage *h)
{
        return (const struct session_share *)((const char *)h - offsetof(struct session_share, usage));
}

/* "session 7 (pid 123, train.py): 4.0 KiB in 3 blocks" */
static void append_usage(char *sentence, size_t n, const struct usage *h, bool with_tenant)
{
        const struct session *s = h->session;

        append(sentence, n, "session %" PRIu64 " (", s->id);
        if (with_tenant)
                append(sentence, n, "tenant '%s', ", h->quota->tenant);
        append(sentence, n, "pid %d, %.31s): %s in %" PRIu32 " block%s", (int)s->who.pid,
               s->name[0] ? s->name : "no name", NUMBER_SIZE(h->bytes), h->n_blocks, plural(h->n_blocks));
        if (h->direct.n_bytes > 0)
                append(sentence, n, " and %s charged directly", NUMBER_SIZE(h->direct.n_bytes));
        if (h->bytes_contexts > 0)
                append(sentence, n, " (contexts: %s)", NUMBER_SIZE(h->bytes_contexts));
        if (share_of(h)->outside_bytes > 0)
                append(sentence, n, ", %s outside of bfcd", NUMBER_SIZE(share_of(h)->outside_bytes));
}

/* The sessions that were not named. */
static void append_rest(char *sentence, size_t n, uint64_t n_sessions, uint64_t n_bytes)
{
        if (n_bytes > 0 && n_sessions == 0)
                append(sentence, n, ", shared blocks: %s", NUMBER_SIZE(n_bytes));
        else if (n_bytes > 0)
                append(sentence, n, ", %" PRIu64 " other%s: %s", n_sessions, plural(n_sessions),
                       NUMBER_SIZE(n_bytes));
}

static void append_usages(char *sentence, size_t n, struct usage *const *usages, size_t n_usages,
                          uint64_t n_sessions, uint64_t n_bytes, bool with_tenant)
{
        append(sentence, n, "; ");
        for (size_t i = 0; i < n_usages; i++) {
                append(sentence, n, "%s", i == 0 ? "largest sessions: " : ", ");
                append_usage(sentence, n, usages[i], with_tenant);
                n_bytes -= usages[i]->bytes;
        }
        if (n_usages == 0)
                append(sentence, n, "none of its sessions has a block");
        /* With room in the ranks, all sessions with blocks are in them: the rest is shared blocks. */
        append_rest(sentence, n, n_usages < QUOTA_RANKS ? 0 : n_sessions - n_usages, n_bytes);
}

void explain_to_tenant(struct quota *q, int error, char *sentence, size_t n)
{
        bool by_blocks = error == -EDQUOT && quota_without_block(q);
        const struct quota *top = quota_parent(q) ? quota_parent(q) : q;
        struct usage *ranks[QUOTA_RANKS];
        size_t n_ranks = usage_rank(q, by_blocks, ranks);

        append_usages(sentence, n, ranks, n_ranks, q->sessions.n, quota_own(q).bytes_in_use, false);
        if (error == -ENOMEM)
                append(sentence, n, "; other tenants have %s reserved",
                       NUMBER_SIZE(q->partition->pool.charged_bytes - top->account.charged_bytes));
}

/* Merges the ranks of all quotas of the partition. */
static size_t partition_rank(struct partition *p, struct usage *ret[QUOTA_RANKS], uint64_t *ret_n_sessions)
{
        size_t n = 0;
        struct quota *q;

        *ret_n_sessions = 0;
        TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
        {
                struct usage *ranks[QUOTA_RANKS], *merged[QUOTA_RANKS];
                size_t n_ranks = usage_rank(q, false, ranks), i = 0, k = 0, m = 0;

                *ret_n_sessions += q->sessions.n;
                for (; m < QUOTA_RANKS && (i < n || k < n_ranks); m++)
                        merged[m] = k == n_ranks || (i < n && usage_bytes(ret[i]) >= usage_bytes(ranks[k]))
                                            ? ret[i++]
                                            : ranks[k++];
                for (n = 0; n < m; n++)
                        ret[n] = merged[n];
        }
        return n;
}

void explain_to_log(struct quota *q, int error, char *sentence, size_t n)
{
        struct usage *ranks[QUOTA_RANKS];
        uint64_t n_sessions;
        size_t n_ranks;

        if (error != -ENOMEM) {
                explain_to_tenant(q, error, sentence, n);
                return;
        }
        n_ranks = partition_rank(q->partition, ranks, &n_sessions);
        append_usages(sentence, n, ranks, n_ranks, n_sessions, q->partition->use.n_bytes, true);
}

/* "red in train, blue in serve", or only "train, serve". False: it was too long and is cut. */
static bool list_names(const struct session *viewer, bool tenants, char *list, size_t n)
{
        const struct broker *b = viewer->broker;
        const char *last = "";

        for (size_t i = 0; i < b->n_partitions; i++) {
                struct report_walk w = { NULL, 0 };
                const struct quota *q;

                while ((q = report_next(viewer, &b->partitions[i], &w))) {
                        if (q->is_removed || quota_parent(q) ||
                            (!tenants && strcmp(last, b->partitions[i].name) == 0))
                                continue;
                        last = b->partitions[i].name;
                        append(list, n, "%s%s%s%s", *list ? ", " : "", tenants ? q->tenant : "",
                               tenants ? " in " : "", last);
                        if (strlen(list) + 1 >= n)
                                return false;
                }
        }
        return true;
}

void explain_names(const struct session *viewer, const char *tenant, const char *partition, char *sentence,
                   size_t n_sentence)
{
        bool has_tenant = tenant[0] != '\0', has_partition = partition[0] != '\0';
        char list[EXPLAIN_NAMES] = "";
        bool is_whole = list_names(viewer, has_tenant, list, sizeof(list));

        if (has_tenant && has_partition)
                snprintf(sentence, n_sentence, "no quota for '%.63s' in '%.63s'", tenant, partition);
        else
                snprintf(sentence, n_sentence, "there is no %s '%.63s'", has_tenant ? "tenant" : "partition",
                         has_tenant ? tenant : partition);
        append(sentence, n_sentence, "; you can see: %s%s", *list ? list : "none", is_whole ? "" : "...");
}

/* ---- the report --------------------------------------------------------------- */

/* A row: the n-th quota of a partition that the viewer may see, from 1 on, or 0, the partition in all. The
 * cursor names the next one. */
struct explain_place {
        uint64_t partition;
        uint64_t n;
        struct quota *quota; /* NULL for the partition */
};

static struct explain_place place_of(uint64_t cursor)
{
        return (struct explain_place){ .partition = cursor >> 32, .n = cursor & UINT32_MAX };
}

static uint64_t place_cursor(const struct explain_place *place)
{
        return place->partition << 32 | place->n;
}

/* The first row of the partition from this place on. */
static bool find_in_partition(const struct session *viewer, const Bfcd__Explain *request,
                              const struct partition *p, struct explain_place *place)
{
        struct report_walk w = { NULL, 0 };
        uint64_t n = 0;
        struct quota *q;

        while ((q = report_next(viewer, p, &w))) {
                n++;
                if (n < place->n || (request->tenant[0] && strcmp(request->tenant, q->tenant) != 0))
                        continue;
                place->quota = place->n == 0 ? NULL : q;
                place->n = place->n == 0 ? 0 : n;
                return true;
        }
        return false;
}

static bool find_row(const struct session *viewer, const Bfcd__Explain *request, struct explain_place *place)
{
        const struct broker *b = viewer->broker;

        for (; place->partition < b->n_partitions; place->partition++, place->n = 0) {
                const struct partition *p = &b->partitions[place->partition];

                if (request->partition[0] && strcmp(request->partition, p->name) != 0)
                        continue;
                if (find_in_partition(viewer, request, p, place))
                        return true;
        }
        return false;
}

/* By the client's statistics, but no more than it holds; 0 without them. */
static uint64_t usage_idle(const struct usage *h)
{
        const struct session *s = h->session;
        struct client_word word;
        uint64_t idle;
        size_t i = 0;

        if (client_page_read(s->page, &word) < 0)
                return 0;
        while (&s->shares[i].usage != h)
                i++;
        /* The client tells one sum for further partitions, which may be in this one. */
        idle = word.partitions[i < PAGES_MAX_PARTITIONS ? i : PAGES_MAX_PARTITIONS].bytes_idle;
        return idle < h->bytes ? idle : h->bytes;
}

static void explain_holder(struct usage *h, uint64_t idle_bytes, size_t *budget, Bfcd__Holder *row)
{
        const struct session *s = h->session;

        bfcd__holder__init(row);
        row->session_id = s->id;
        row->pid = (uint64_t)s->who.pid;
        row->name = report_borrow(s->name);
        row->num_blocks = h->n_blocks;
        row->bytes_in_use = h->bytes;
        row->client_bytes_idle = idle_bytes < h->bytes ? idle_bytes : h->bytes;
        row->largest_block_bytes = usage_largest(h, budget);
        row->bytes_direct = h->direct.n_bytes;
        row->bytes_contexts = h->bytes_contexts;
        row->bytes_outside = share_of(h)->outside_bytes;
        row->state = report_borrow(session_state_name(s));
}

/* The last look at the quota's sessions, or a new one. *ret_budget: so many blocks may be looked at. NULL:
 * out of memory. */
static const struct quota_report *explain_refresh(struct quota *q, size_t *ret_budget)
{
        struct quota_report *report = usage_report(q);
        uint64_t now_ms = clock_ms();

        *ret_budget = 0;
        if (!report || (report->since_ms != 0 && now_ms - report->since_ms < EXPLAIN_MS))
                return report;
        report->since_ms = now_ms;
        usage_most(q, report->most, QUOTA_HOLDERS);
        for (size_t i = 0; i < QUOTA_HOLDERS; i++) /* a client's page takes a system call or two */
                report->idle_bytes[i] = report->most[i] ? usage_idle(report->most[i]) : 0;
        arena_draw(q->arena, report->picture);
        *ret_budget = EXPLAIN_BLOCKS;
        return report;
}

static const struct tenant *tenant_of(const struct broker *b, const struct quota *q)
{
        const struct tenant *t = b->tenants;

        while (t->name != q->tenant)
                t++;
        return t;
}

static void explain_quota(const struct broker *b, struct quota *q, struct explanation *ret)
{
        size_t budget;
        const struct quota_report *report = explain_refresh(q, &budget);
        struct report_more more;

        report_tenant_stats(tenant_of(b, q), q, &ret->stats, &more);
        if (q->lease) /* an account that has ended has the limit that it uses */
                ret->stats.bytes_limit = lease_record(b, lease_of(q))->limit_bytes;
        ret->row.tenant = report_borrow(q->tenant);
        ret->row.lease = report_borrow(q->lease ? q->lease : "");
        ret->row.num_waiting = more.num_waiting;
        ret->row.bytes_retiring = more.bytes_retiring;
        ret->row.occupancy = report_borrow(report ? report->picture : "");
        ret->row.holders = ret->pointers;
        for (size_t i = 0; report && i < QUOTA_HOLDERS; i++) {
                size_t n = ret->row.n_holders;

                if (!report->most[i] || report->most[i]->n_blocks + report->most[i]->direct.n_bytes == 0)
                        continue;
                explain_holder(report->most[i], report->idle_bytes[i], &budget, &ret->holders[n]);
                ret->pointers[n] = &ret->holders[n];
                ret->row.n_holders++;
        }
}

static void explain_partition(const struct session *viewer, const struct partition *p,
                              struct explanation *ret)
{
        struct report_walk w = { NULL, 0 };
        const struct quota *q;

        report_partition_stats(viewer, p, &ret->stats);
        while ((q = report_next(viewer, p, &w))) {
                ret->row.num_waiting += q->queue.n;
                ret->row.bytes_retiring += arena_retiring_bytes(q->arena);
        }
}

static double fragmentation(const Bfcd__Statistics *f)
{
        return f->bytes_free > 0 ? (double)f->bytes_fragmented / (double)f->bytes_free : 0;
}

int explain_page(const struct session *viewer, const Bfcd__Explain *request, struct explanation *ret)
{
        struct explain_place place = place_of(0);

        if (!find_row(viewer, request, &place))
                return -ENOENT;
        bfcd__explain_reply__init(&ret->reply);
        place = place_of(request->cursor);
        if (!find_row(viewer, request, &place))
                return 0;
        bfcd__explain_row__init(&ret->row);
        bfcd__statistics__init(&ret->stats);
        ret->row.partition = report_borrow(viewer->broker->partitions[place.partition].name);
        ret->row.stats = &ret->stats;
        if (place.quota)
                explain_quota(viewer->broker, place.quota, ret);
        else
                explain_partition(viewer, &viewer->broker->partitions[place.partition], ret);
        ret->row.fragmentation = fragmentation(&ret->stats);
        ret->rows[0] = &ret->row;
        ret->reply.rows = ret->rows;
        ret->reply.n_rows = 1;
        place.n++;
        if (find_row(viewer, request, &place))
                ret->reply.next_cursor = place_cursor(&place);
        return 0;
}
