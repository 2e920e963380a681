/* Reports; see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/report.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/drain.h"
#include "daemon/record/records.h"
#include "daemon/session/outside.h"
#include "daemon/session/session.h"
#include "daemon/session/share.h"
#include "proto/region.h"

/* ---- statistics: of a quota, their sums over a tenant with its leases and over a partition ---- */

#define REPORT_MANY    64u /* quotas of a partition, whose sums are kept for so long */
#define REPORT_KEPT_MS 100u

void report_quota_stats(const struct quota *q, Bfcd__Statistics *f)
{
        const struct ledger_lifetime *life = quota_life(q);
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        f->bytes_limit = q->account.limit_bytes;
        f->bytes_reserved = q->account.charged_bytes;
        f->peak_bytes_reserved = q->account.peak_charged_bytes;
        f->bytes_in_use = q->all.bytes_in_use;
        f->peak_bytes_in_use = q->peaks.bytes_in_use;
        f->bytes_requested = q->all.bytes_requested;
        f->peak_bytes_requested = q->peaks.bytes_requested;
        f->num_allocs = stats.num_allocs;
        f->largest_alloc_size = stats.largest_alloc_size;
        f->largest_free_block_bytes = stats.largest_free_block_bytes;
        f->bytes_free = stats.bytes_free;
        if (stats.bytes_free > stats.largest_free_block_bytes)
                f->bytes_fragmented = stats.bytes_free - stats.largest_free_block_bytes;
        f->num_blocks = q->all.n_blocks;
        f->num_sessions = q->all.n_sessions;
        f->num_extents = arena_n_extents(q->arena);
        f->num_refusals = quota_n_refusals(q);
        f->num_over_quota = life->n_over_quota;
        f->num_out_of_memory = life->n_out_of_memory;
        f->last_refusal_time_ms = life->last_refusal_ms;
        f->peak_bytes_in_use_time_ms = q->peaks.in_use_ms;
        f->peak_bytes_reserved_time_ms = q->account.peak_charged_ms;
        f->lifetime_peak_bytes_in_use = life->peak_in_use;
        f->lifetime_peak_bytes_reserved = life->peak_reserved;
        f->bytes_guaranteed = account_guaranteed(&q->account);
        f->bytes_unreclaimed = arena_unreclaimed_bytes(q->arena);
        f->bytes_parked = arena_parked_bytes(q->arena);
        f->bytes_direct = q->all.bytes_direct;
        f->bytes_contexts = q->usages.bytes_contexts;
        f->bytes_outside = q->all.bytes_outside;
}

static void report_pool_stats(const struct partition *p, Bfcd__Statistics *f)
{
        f->peak_bytes_reserved = p->pool.peak_charged_bytes;
        f->lifetime_peak_bytes_reserved = p->use.lifetime_peak_charged;
        f->peak_bytes_reserved_time_ms = p->pool.peak_charged_ms;
        f->peak_bytes_in_use = p->use.peak_bytes;
        f->peak_bytes_in_use_time_ms = p->use.peak_ms;
        f->lifetime_peak_bytes_in_use = p->use.lifetime_peak_bytes;
}

/* A lease is a quota below its tenant's quota. Some statistics of a tenant's quota include those of its leases: add_tenants_stats()
 * sums these, over tenants only. The others, which the arena counts, add_own_stats() sums, over tenants and leases. In the wrong
 * function a lease is counted twice, or not at all. */

/* Statistics that report_quota_stats() has without the leases. */
static void add_own_stats(Bfcd__Statistics *f, const Bfcd__Statistics *one)
{
        f->bytes_unreclaimed += one->bytes_unreclaimed;
        f->num_allocs += one->num_allocs;
        f->bytes_free += one->bytes_free;
        f->bytes_fragmented += one->bytes_fragmented;
        f->bytes_parked += one->bytes_parked;
        f->num_extents += one->num_extents;
        f->largest_alloc_size = max_u64(f->largest_alloc_size, one->largest_alloc_size);
        f->largest_free_block_bytes = max_u64(f->largest_free_block_bytes, one->largest_free_block_bytes);
}

void report_tenant_stats(const struct tenant *t, const struct quota *q, Bfcd__Statistics *ret,
                         struct report_more *ret_more)
{
        *ret_more = (struct report_more){ q->queue.n, q->queue.n_bytes, arena_retiring_bytes(q->arena) };
        report_quota_stats(q, ret);
        for (size_t i = 0; q->account.n_children > 0 && i < t->n_quotas; i++) {
                const struct quota *lease = t->quotas[i];
                Bfcd__Statistics one = BFCD__STATISTICS__INIT;

                if (quota_parent(lease) != q)
                        continue;
                report_quota_stats(lease, &one);
                add_own_stats(ret, &one);
                ret_more->num_waiting += lease->queue.n;
                ret_more->bytes_waiting += lease->queue.n_bytes;
                ret_more->bytes_retiring += arena_retiring_bytes(lease->arena);
        }
}

/* Statistics that report_quota_stats() has with the leases. */
static void add_tenants_stats(Bfcd__Statistics *f, const Bfcd__Statistics *one)
{
        f->num_sessions += one->num_sessions;
        f->bytes_in_use += one->bytes_in_use;
        f->bytes_direct += one->bytes_direct;
        f->bytes_contexts += one->bytes_contexts;
        f->bytes_outside += one->bytes_outside;
        f->bytes_requested += one->bytes_requested;
        f->num_blocks += one->num_blocks;
        f->num_refusals += one->num_refusals;
        f->num_over_quota += one->num_over_quota;
        f->num_out_of_memory += one->num_out_of_memory;
        f->bytes_guaranteed += one->bytes_guaranteed;
}

/* All viewers see the limit and the charges of a partition, which explain a refusal. */
static void sum_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *f)
{
        struct report_walk w = { NULL, 0 };
        const struct quota *q;

        f->bytes_limit = p->pool.limit_bytes;
        f->bytes_reserved = p->pool.charged_bytes;
        if (viewer->role != ROLE_CLIENT)
                report_pool_stats(p, f);
        while ((q = report_next(viewer, p, &w))) {
                Bfcd__Statistics one = BFCD__STATISTICS__INIT;

                report_quota_stats(q, &one);
                if (!quota_parent(q))
                        add_tenants_stats(f, &one);
                add_own_stats(f, &one);
                f->last_refusal_time_ms = max_u64(f->last_refusal_time_ms, one.last_refusal_time_ms);
        }
}

/* Sums over many quotas, for viewers that can ask again and again. */
struct partition_report {
        uint64_t looked_ms; /* 0: never */
        Bfcd__Statistics stats;
        uint64_t leaving_looked_ms; /* the same */
        uint64_t bytes_pending, bytes_unreclaimed;
};

/* NULL: the sums are made for the viewer. */
static struct partition_report *find_kept(const struct session *viewer, const struct partition *p)
{
        struct broker *b = viewer->broker;

        if (viewer->role == ROLE_ADMIN || p->n_quotas <= REPORT_MANY)
                return NULL;
        if (!b->reports.partitions)
                b->reports.partitions = calloc(b->n_partitions, sizeof(*b->reports.partitions));
        return b->reports.partitions ? &b->reports.partitions[p - b->partitions] : NULL;
}

static bool is_recent(uint64_t looked_ms, uint64_t now_ms)
{
        return looked_ms != 0 && now_ms - looked_ms < REPORT_KEPT_MS;
}

void report_partition_stats(const struct session *viewer, const struct partition *p, Bfcd__Statistics *f)
{
        struct partition_report *kept = role_is_bounded(viewer->role) ? find_kept(viewer, p) : NULL;
        uint64_t now_ms = kept ? clock_ms() : 0;

        if (kept && is_recent(kept->looked_ms, now_ms)) {
                *f = kept->stats;
                return;
        }
        sum_partition_stats(viewer, p, f);
        if (kept) {
                kept->looked_ms = now_ms;
                kept->stats = *f;
        }
}

/* Adds what the extents of all quotas of the partition have that is being made, released, or is unreclaimed. */
static void report_add_leaving(const struct session *viewer, const struct partition *p, Bfcd__DeviceRow *row)
{
        struct partition_report own = { 0 }, *kept = find_kept(viewer, p), *sums = kept ? kept : &own;
        uint64_t now_ms = clock_ms();
        const struct quota *q;

        if (!is_recent(sums->leaving_looked_ms, now_ms)) {
                sums->leaving_looked_ms = now_ms;
                sums->bytes_pending = sums->bytes_unreclaimed = 0;
                TAILQ_FOREACH(q, &p->quotas, lists.of_partition)
                {
                        sums->bytes_pending += arena_pending_bytes(q->arena);
                        sums->bytes_unreclaimed += arena_unreclaimed_bytes(q->arena);
                }
        }
        row->bytes_pending += sums->bytes_pending;
        row->bytes_unreclaimed += sums->bytes_unreclaimed;
}

#define REPORT_SCAN       4096u  /* records looked at for one page */
#define REPORT_MONITOR_NS 10000u /* of a page for a monitor */
#define REPORT_MEMORY_MS  1000u  /* between looks at the daemon's own memory for monitors */

static bool report_sees(const struct session *viewer, const struct tenant *t)
{
        return viewer->role != ROLE_CLIENT || viewer->tenant == t;
}

/* True: the viewer may see this quota's tenant. */
static bool report_shows(const struct session *viewer, const struct quota *q)
{
        return viewer->role != ROLE_CLIENT || q->tenant == viewer->tenant->name;
}

struct quota *report_next(const struct session *viewer, const struct partition *p, struct report_walk *w)
{
        const struct tenant *t = viewer->tenant;

        if (viewer->role != ROLE_CLIENT)
                return w->q = w->q ? TAILQ_NEXT(w->q, lists.of_partition) : TAILQ_FIRST(&p->quotas);
        while (w->n < t->n_quotas) {
                struct quota *q = t->quotas[w->n++];

                if (q->partition == p)
                        return q;
        }
        return NULL;
}

static bool report_is_full(const struct report *r)
{
        return r->n_rows == REPORT_ROWS;
}

/* the next row is for the next page */
static bool report_page_ends(const struct report *r)
{
        return report_is_full(r) || (r->end_ns != 0 && r->n_rows > 0 && clock_ns() >= r->end_ns);
}

static void report_add_row(struct report *r, void *row)
{
        r->pointers[r->n_rows++] = row;
}

static Bfcd__Statistics *report_stats(struct report *r)
{
        Bfcd__Statistics *f = &r->stats[r->n_rows];

        bfcd__statistics__init(f);
        return f;
}

/* ---- how long requests waited, those that wait, those that were refused ------------ */

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
static void report_grants(const struct session *viewer, uint64_t cursor, struct report *r)
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
static void report_waiting(const struct session *viewer, uint64_t cursor, struct report *r)
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
static void report_refusals(const struct session *viewer, uint64_t cursor, struct report *r)
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

/* ---- the lists ----------------------------------------------------------- */

static void report_device(const struct session *viewer, const struct broker_device *d, Bfcd__DeviceRow *row)
{
        const struct broker *b = viewer->broker;

        bfcd__device_row__init(row);
        row->id = report_borrow(d->config->id);
        row->name = report_borrow(d->name);
        if (d->config->is_cuda) {
                row->uuid.data = (uint8_t *)(uintptr_t)d->config->uuid;
                row->uuid.len = sizeof(d->config->uuid);
                row->mps = report_borrow(d->config->mps == CONFIG_MPS_ALLOW ? "allow" : "refuse");
        }
        row->bytes_total = d->bytes_total > 0 ? d->bytes_total : d->config->size_bytes;
        row->state = report_borrow(drain_state(d));
        row->bytes_standby = standby_bytes(d->standby);
        for (size_t k = 0; k < b->n_partitions; k++) {
                if (b->partitions[k].device != d->device)
                        continue;
                row->bytes_reserved += b->partitions[k].pool.charged_bytes;
                report_add_leaving(viewer, &b->partitions[k], row);
        }
}

static Bfcd__DeviceCalls *report_calls(struct worker *w, enum worker_call kind, Bfcd__DeviceCalls *ret)
{
        struct worker_calls calls;

        worker_count_calls(w, kind, &calls);
        bfcd__device_calls__init(ret);
        ret->num_calls = calls.n;
        ret->num_failed = calls.n_failed;
        ret->total_ns = calls.ns;
        ret->longest_ns = calls.longest_ns;
        return ret;
}

static void report_devices(const struct session *viewer, struct report *r)
{
        const struct broker *b = viewer->broker;

        for (size_t i = 0; i < b->n_devices && !report_is_full(r); i++) {
                Bfcd__DeviceRow *row = &r->rows.devices.rows[r->n_rows];
                Bfcd__DeviceCalls *calls = r->rows.devices.calls[r->n_rows];

                report_device(viewer, &b->devices[i], row);
                if (viewer->role != ROLE_CLIENT) {
                        row->makes = report_calls(b->devices[i].worker, WORKER_MAKES, &calls[WORKER_MAKES]);
                        row->destroys =
                                report_calls(b->devices[i].worker, WORKER_DESTROYS, &calls[WORKER_DESTROYS]);
                }
                report_add_row(r, row);
        }
        r->status.n_devices = r->n_rows;
        r->status.devices = (Bfcd__DeviceRow **)r->pointers;
}

/* 0 where the C library cannot tell, and under a sanitizer that replaces malloc(). */
static uint64_t allocated_bytes(void)
{
#ifdef HAVE_MALLINFO2
        struct mallinfo2 info = mallinfo2();

        return (uint64_t)info.uordblks + info.hblkhd;
#else
        return 0;
#endif
}

static uint64_t resident_bytes(void)
{
        int fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
        char text[128] = "";
        uint64_t n_pages = 0;

        if (fd < 0)
                return 0;
        if (read(fd, text, sizeof(text) - 1) < 0 || sscanf(text, "%*s %" SCNu64, &n_pages) != 1)
                n_pages = 0;
        close(fd);
        return n_pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static const struct own_memory *report_own_memory(const struct session *viewer)
{
        struct own_memory *m = &viewer->broker->reports.own_memory;
        uint64_t now_ms = clock_ms();

        if (role_is_bounded(viewer->role) && m->looked_ms != 0 && now_ms - m->looked_ms < REPORT_MEMORY_MS)
                return m;
        m->looked_ms = now_ms;
        m->allocated_bytes = allocated_bytes();
        m->resident_bytes = resident_bytes();
        return m;
}

static void report_status(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        (void)cursor;
        bfcd__status__init(&r->status);
        r->status.version = report_borrow(BFCD_VERSION);
        r->status.protocol_version = SESSION_PROTOCOL_VERSION;
        r->status.uptime_ms = clock_ms() - b->started_ms;
        r->status.pid = (uint64_t)getpid();
        r->status.max_sessions = b->config->max_sessions;
        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                if (!report_sees(viewer, t))
                        continue;
                r->status.num_tenants += t->config != NULL;
                r->status.num_sessions += t->n_sessions;
                r->status.num_quarantined += t->n_quarantined;
                r->status.num_unresponsive += t->n_unresponsive;
                for (size_t k = 0; k < t->n_quotas; k++) {
                        if (!quota_parent(t->quotas[k]))
                                r->status.num_blocks += t->quotas[k]->all.n_blocks;
                        r->status.num_extents += arena_n_extents(t->quotas[k]->arena);
                }
        }
        if (viewer->role != ROLE_CLIENT) {
                const struct own_memory *m = report_own_memory(viewer);

                r->status.bytes_allocated = m->allocated_bytes;
                r->status.bytes_resident = m->resident_bytes;
                r->status.longest_turn_ns = b->reports.turns.longest_ns;
                r->status.recent_longest_turn_ns = loop_turns_recent_ns(&b->reports.turns);
                r->status.num_log_lines_lost = log_count_lost();
                r->status.num_records_lost = records_count_dropped();
        }
        report_devices(viewer, r);
        r->list.status = &r->status;
}

static bool report_shows_partition(const struct session *viewer, const struct partition *p)
{
        if (viewer->role != ROLE_CLIENT)
                return true;
        for (size_t i = 0; i < viewer->tenant->n_quotas; i++)
                if (viewer->tenant->quotas[i]->partition == p)
                        return true;
        return false;
}

/* Of the extents that the viewer may see. A driver does not tell of its pages. */
static void report_partition_pages(const struct session *viewer, const struct partition *p,
                                   Bfcd__PartitionRow *row)
{
        struct report_walk w = { NULL, 0 };
        const struct quota *q;

        if (p->is_cuda)
                return;
        while ((q = report_next(viewer, p, &w))) {
                row->bytes_in_2mib_pages += arena_huge_bytes(q->arena);
                row->bytes_in_4kib_pages += arena_small_bytes(q->arena);
        }
}

static void report_partitions(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t i;

        for (i = cursor; i < b->n_partitions && !report_page_ends(r); i++) {
                const struct partition *p = &b->partitions[i];
                Bfcd__PartitionRow *row = &r->rows.partitions[r->n_rows];

                if (!report_shows_partition(viewer, p))
                        continue;
                bfcd__partition_row__init(row);
                row->name = report_borrow(p->name);
                row->device = report_borrow(p->device_id);
                row->growth = report_borrow(partition_growth_name(p));
                row->share = report_borrow(partition_share_name(p));
                row->clears_on_release = p->clears;
                row->context_bytes = p->context_bytes == CONFIG_NO_CONTEXTS ? 0 : p->context_bytes;
                row->pinned = p->memory.is_pinned;
                row->bytes_pinned = viewer->role != ROLE_CLIENT ? atomic_load(&p->memory.pins.n_bytes) : 0;
                report_partition_pages(viewer, p, row);
                row->num_tenants = p->n_tenants;
                row->stats = report_stats(r);
                report_partition_stats(viewer, p, row->stats);
                report_add_row(r, row);
        }
        r->list.next_cursor = i < b->n_partitions ? i : 0;
        r->list.n_partitions = r->n_rows;
        r->list.partitions = (Bfcd__PartitionRow **)r->pointers;
}

/* The cursor counts the quotas of all tenants. */
static void report_tenants(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t n = 0;

        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                if (!report_sees(viewer, t)) {
                        n += t->n_quotas;
                        continue;
                }
                for (size_t k = 0; k < t->n_quotas; k++) {
                        Bfcd__TenantRow *row = &r->rows.tenants[r->n_rows];
                        struct report_more more;

                        if (n++ < cursor || quota_parent(t->quotas[k]))
                                continue;
                        if (report_page_ends(r)) {
                                r->list.next_cursor = n - 1;
                                goto out;
                        }
                        bfcd__tenant_row__init(row);
                        row->num_leases = t->quotas[k]->account.n_children;
                        row->is_removed = t->quotas[k]->is_removed;
                        row->tenant = report_borrow(t->name);
                        row->partition = report_borrow(t->quotas[k]->partition->name);
                        row->stats = report_stats(r);
                        report_tenant_stats(t, t->quotas[k], row->stats, &more);
                        row->bytes_pending = more.bytes_retiring;
                        row->num_waiting = more.num_waiting;
                        row->bytes_waiting = more.bytes_waiting;
                        report_add_row(r, row);
                }
        }
out:
        r->list.n_tenants = r->n_rows;
        r->list.tenants = (Bfcd__TenantRow **)r->pointers;
}

static void report_lease(const struct broker *b, const struct lease *lease, Bfcd__LeaseRow *row,
                         char match[static 24])
{
        const struct ledger_lease *record = lease_record(b, lease);
        const struct quota *q = lease->quota;
        uint64_t now_ms = clock_ms(), until_ms = record->ended_ms != 0 ? record->evicts_ms : 0;

        row->name = report_borrow(lease->name);
        row->tenant = report_borrow(lease->tenant->name);
        row->partition = report_borrow(q->partition->name);
        report_quota_stats(q, row->stats);
        row->stats->bytes_limit = record->limit_bytes;
        row->match_kind = report_borrow(lease_kind_name(record->kind));
        snprintf(match, 24, "%" PRIu32, record->kind == LEASE_PID ? record->pid : record->uid);
        row->match = report_borrow(record->match[0] ? record->match : match);
        row->made_by = report_borrow(lease_maker_name(record->maker));
        row->state = report_borrow(record->ended_ms != 0 ? "ending" : "active");
        row->age_ms = now_ms - record->born_ms;
        if (record->ended_ms == 0 && record->ends_ms != 0) /* at least 1: 0 means that there is none */
                row->ttl_ms = record->ends_ms > now_ms ? record->ends_ms - now_ms : 1;
        row->evicts = record->ended_ms != 0 ? until_ms != 0 : record->evicts != 0;
        row->grace_ms = record->ended_ms == 0 ? record->grace_ms : until_ms > now_ms ? until_ms - now_ms : 0;
        row->bytes_pending = arena_retiring_bytes(q->arena);
        row->num_waiting = q->queue.n;
        row->bytes_waiting = q->queue.n_bytes;
        row->waited_ns = quota_life(q)->waited_ns;
}

static void report_leases(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        for (uint64_t i = cursor; i < b->leases.n; i++) {
                struct report_lease *row;

                if (!report_sees(viewer, b->leases.list[i]->tenant))
                        continue;
                if (report_page_ends(r) || r->n_rows == REPORT_LEASES) {
                        r->list.next_cursor = i;
                        break;
                }
                row = &r->rows.leases[r->n_rows];
                bfcd__lease_row__init(&row->row);
                row->row.stats = report_stats(r);
                report_lease(b, b->leases.list[i], &row->row, row->match);
                report_add_row(r, &row->row);
        }
        r->list.n_leases = r->n_rows;
        r->list.leases = (Bfcd__LeaseRow **)r->pointers;
}

static size_t list_leases(const struct session *s, char *ret[static LEDGER_SESSION_LEASES])
{
        size_t n = 0;

        for (size_t i = 0; i < s->n_shares && n < LEDGER_SESSION_LEASES; i++)
                if (s->shares[i].quota->lease)
                        ret[n++] = report_borrow(s->shares[i].quota->lease);
        return n;
}

void report_session(const struct session *s, Bfcd__SessionRow *row,
                    char *leases[static LEDGER_SESSION_LEASES])
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct client_usage client;

        bfcd__session_row__init(row);
        row->session_id = s->id;
        row->tenant = report_borrow(s->tenant ? s->tenant->name : "");
        row->pid = (uint64_t)s->who.pid;
        row->uid = s->who.uid;
        row->name = report_borrow(s->name);
        row->state = report_borrow(session_state_name(s));
        row->age_ms = clock_ms() - record->born_ms;
        row->num_blocks = record->links.n_blocks;
        row->bytes_in_use = session_bytes_in_use(s);
        row->peak_bytes_in_use = s->stats.peak_bytes_in_use;
        row->bytes_direct = session_direct_bytes(s);
        row->bytes_contexts = session_context_bytes(s);
        session_client_usage(s, &client, &row->bytes_outside);
        if (outside_bytes(s) != UINT64_MAX)
                row->bytes_outside = outside_bytes(s);
        row->client_bytes_reserved = client.bytes_held;
        row->client_bytes_in_use = client.bytes_in_use;
        row->client_bytes_idle = client.bytes_idle;
        row->num_trims = s->recall.queues[RECALL_TRIM].n_events;
        row->num_trims_missed = s->recall.queues[RECALL_TRIM].n_missed;
        row->is_unresponsive = session_is_unresponsive(s);
        row->is_evicted = s->eviction != NULL;
        row->leases = leases;
        row->n_leases = list_leases(s, leases);
}

static void report_sessions(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        size_t n_leases = 0;
        uint64_t i;

        for (i = cursor; i < b->sessions.n_slots && !report_page_ends(r) && n_leases < REPORT_LEASE_NAMES;
             i++) {
                const struct session *s = b->sessions.table[i];
                Bfcd__SessionRow *row;

                if (!s || !report_sees(viewer, s->tenant))
                        continue;
                row = &r->rows.sessions.rows[r->n_rows];
                report_session(s, row, r->rows.sessions.leases[r->n_rows]);
                n_leases += row->n_leases;
                report_add_row(r, row);
        }
        r->list.next_cursor = i < b->sessions.n_slots ? i : 0;
        r->list.n_sessions = r->n_rows;
        r->list.sessions = (Bfcd__SessionRow **)r->pointers;
}

static const struct quota *quota_of_block(const struct session *viewer, const struct ledger_block *block)
{
        return viewer->broker->quotas[block->quota];
}

static bool viewer_sees_block(const struct session *viewer, const struct ledger_block *block)
{
        const struct quota *q = quota_of_block(viewer, block);

        return q && report_shows(viewer, q);
}

static void report_block(const struct session *viewer, const struct ledger_block *block, Bfcd__BlockRow *row)
{
        const struct broker *b = viewer->broker;
        const struct quota *q = quota_of_block(viewer, block);
        struct arena_place place;

        arena_locate(q->arena, block->offset, &place);
        bfcd__block_row__init(row);
        row->block_id = block->id;
        if (block->shared == LEDGER_NONE)
                row->session_id = ledger_session_at(b->ledger, block->session)->id;
        else
                row->shared_name = ledger_shared_at(b->ledger, block->shared)->name;
        row->tenant = report_borrow(q->tenant);
        row->partition = report_borrow(q->partition->name);
        row->lease = report_borrow(q->lease ? q->lease : "");
        row->region_id = region_shown_id(place.region_id);
        row->offset = place.offset;
        row->n_bytes = block->n_bytes;
        row->n_requested = block->n_requested;
        row->age_ms = clock_ms() - block->born_ms;
        row->tag = report_borrow(block->tag);
        if (block->parked != LEDGER_AWAKE)
                row->state = report_borrow(block->parked == LEDGER_IS_COPY ? "copy" : "parked");
}

/* The cursor is the ledger's index of the next record to look at. */
static void report_blocks(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t end = ledger_block_end(b->ledger);
        uint64_t i, last = cursor < end ? cursor + REPORT_SCAN : cursor;

        for (i = cursor; i < end && i < last && !report_page_ends(r); i++) {
                const struct ledger_block *block = ledger_block_get(b->ledger, (uint32_t)i);

                if (!block || !viewer_sees_block(viewer, block))
                        continue;
                report_block(viewer, block, &r->rows.blocks[r->n_rows]);
                report_add_row(r, &r->rows.blocks[r->n_rows]);
        }
        r->list.next_cursor = i < end ? i : 0;
        r->list.n_blocks = r->n_rows;
        r->list.blocks = (Bfcd__BlockRow **)r->pointers;
}

static void report_extent(const struct quota *q, const struct ledger_extent *extent, Bfcd__ExtentRow *row)
{
        struct arena_place place;

        arena_locate(q->arena, extent->offset, &place);
        bfcd__extent_row__init(row);
        row->tenant = report_borrow(q->tenant);
        row->partition = report_borrow(q->partition->name);
        row->lease = report_borrow(q->lease ? q->lease : "");
        row->region_id = region_shown_id(place.region_id);
        row->region_bytes = place.region_bytes;
        row->offset = place.offset;
        row->n_bytes = extent->n_bytes;
        row->is_retiring = arena_is_retiring(q->arena, extent->offset);
}

/* A page of the ledger's extents from `cursor` on. */
static void report_extents(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t end = ledger_extent_end(b->ledger);
        uint64_t i, last = cursor < end ? cursor + REPORT_SCAN : cursor;

        for (i = cursor; i < end && i < last && !report_page_ends(r); i++) {
                const struct ledger_extent *extent = ledger_extent_get(b->ledger, (uint32_t)i);
                const struct quota *q = extent ? b->quotas[extent->quota] : NULL;

                if (!q || !report_shows(viewer, q)) /* NULL: of an arena that is closed */
                        continue;
                report_extent(q, extent, &r->rows.extents[r->n_rows]);
                report_add_row(r, &r->rows.extents[r->n_rows]);
        }
        r->list.next_cursor = i < end ? i : 0;
        r->list.n_extents = r->n_rows;
        r->list.extents = (Bfcd__ExtentRow **)r->pointers;
}

/* How long a kept block without references stays yet. */
static uint64_t kept_ms(const struct ledger_shared *shared)
{
        uint64_t now_ms = clock_ms();

        if (shared->links.n_refs > 0 || shared->keep_ms == 0)
                return 0;
        if (shared->until_ms == LEDGER_FOREVER)
                return LEDGER_FOREVER;
        return shared->until_ms > now_ms ? shared->until_ms - now_ms : 0;
}

static void report_shared_block(const struct session *viewer, const struct ledger_shared *shared,
                                Bfcd__SharedRow *row)
{
        struct ledger *l = viewer->broker->ledger;
        const struct ledger_block *block = ledger_block_at(l, shared->block);
        const struct quota *q = quota_of_block(viewer, block);

        bfcd__shared_row__init(row);
        row->name = report_borrow(shared->name);
        row->tenant = report_borrow(q->tenant);
        row->partition = report_borrow(q->partition->name);
        row->lease = report_borrow(q->lease ? q->lease : "");
        row->block_id = block->id;
        row->n_bytes = block->n_bytes;
        row->n_requested = block->n_requested;
        row->num_references = shared->links.n_refs;
        row->age_ms = clock_ms() - shared->born_ms;
        row->keep_ms = shared->keep_ms;
        row->kept_ms = kept_ms(shared);
        if (shared->metadata != LEDGER_NONE)
                row->n_metadata_bytes = ledger_metadata_at(l, shared->metadata)->n_bytes;
}

/* A page of the ledger's shared blocks from `cursor` on: all, or those that are kept. */
static void report_shared_blocks(const struct session *viewer, uint64_t cursor, bool only_kept,
                                 struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t end = ledger_shared_end(b->ledger);
        uint64_t i, last = cursor < end ? cursor + REPORT_SCAN : cursor;

        for (i = cursor; i < end && i < last && !report_page_ends(r); i++) {
                const struct ledger_shared *shared = ledger_shared_get(b->ledger, (uint32_t)i);

                if (!shared || (only_kept && shared->keep_ms == 0) ||
                    !viewer_sees_block(viewer, ledger_block_at(b->ledger, shared->block)))
                        continue;
                report_shared_block(viewer, shared, &r->rows.shared[r->n_rows]);
                report_add_row(r, &r->rows.shared[r->n_rows]);
        }
        r->list.next_cursor = i < end ? i : 0;
        r->list.n_shared = r->n_rows;
        r->list.shared = (Bfcd__SharedRow **)r->pointers;
}

static void report_shared(const struct session *viewer, uint64_t cursor, struct report *r)
{
        report_shared_blocks(viewer, cursor, false, r);
}

static void report_kept(const struct session *viewer, uint64_t cursor, struct report *r)
{
        report_shared_blocks(viewer, cursor, true, r);
}

/* A client's ages are bounded by what the daemon knows: the age of the session, and the bytes that it
 * holds. The oldest class comes first, so an excess is taken off the youngest. Returns how many classes
 * are not empty. */
static size_t clamp_ages(const struct session *s, uint64_t held, const uint64_t bytes[AGES_CLASSES],
                         uint64_t ret_least_ms[AGES_CLASSES], uint64_t ret_bytes[AGES_CLASSES])
{
        uint64_t clamped[AGES_CLASSES] = { 0 },
                 born_ms = ledger_session_at(s->broker->ledger, s->index)->born_ms,
                 age_ms = clock_ms() - born_ms;
        size_t n = 0;

        for (unsigned c = AGES_CLASSES; c-- > 0;) {
                uint64_t n_bytes = bytes[c] < held ? bytes[c] : held;
                unsigned to = c;

                while (to > 0 && ages_least_ms(to) > age_ms)
                        to--;
                clamped[to] += n_bytes;
                held -= n_bytes;
        }
        for (unsigned c = 0; c < AGES_CLASSES; c++) {
                if (clamped[c] == 0)
                        continue;
                ret_least_ms[n] = ages_least_ms(c);
                ret_bytes[n++] = clamped[c];
        }
        return n;
}

static void report_session_ages(const struct session *s, size_t share, const struct client_ages *ages,
                                struct report *r)
{
        const struct session_share *of = &s->shares[share];
        Bfcd__AgesRow *row = &r->rows.ages.rows[r->n_rows];

        bfcd__ages_row__init(row);
        row->session_id = s->id;
        row->tenant = report_borrow(of->quota->tenant);
        row->partition = report_borrow(of->quota->partition->name);
        row->lease = report_borrow(of->quota->lease ? of->quota->lease : "");
        row->least_age_ms = r->rows.ages.least_ms[r->n_rows];
        row->bytes = r->rows.ages.bytes[r->n_rows];
        row->n_bytes = clamp_ages(s, of->usage.bytes, ages->bytes[share], row->least_age_ms, row->bytes);
        row->n_least_age_ms = row->n_bytes;
        report_add_row(r, row);
}

/* The cursor is a session's place times PAGES_MAX_PARTITIONS, plus a share. To read a client's page takes
 * several system calls, also without a row; so their number is bounded. */
static void report_ages(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t now = ages_now();
        struct client_ages ages;
        unsigned n_looks = 0;
        uint64_t i;

        for (i = cursor / PAGES_MAX_PARTITIONS; i < b->sessions.n_slots; i++, cursor = 0) {
                const struct session *s = b->sessions.table[i];
                size_t k = cursor % PAGES_MAX_PARTITIONS;

                if (!s || !report_sees(viewer, s->tenant) || session_bytes_in_use(s) == 0)
                        continue;
                if (report_page_ends(r) || n_looks++ == REPORT_LOOKS) {
                        r->list.next_cursor = i * PAGES_MAX_PARTITIONS;
                        break;
                }
                if (client_page_ages(s->page, now, &ages) < 0)
                        continue;
                for (; k < s->n_shares && k < PAGES_MAX_PARTITIONS && !report_page_ends(r); k++)
                        if (ages.are_told[k] && s->shares[k].joined)
                                report_session_ages(s, k, &ages, r);
                if (k < s->n_shares && k < PAGES_MAX_PARTITIONS) {
                        r->list.next_cursor = i * PAGES_MAX_PARTITIONS + k;
                        break;
                }
        }
        r->list.n_ages = r->n_rows;
        r->list.ages = (Bfcd__AgesRow **)r->pointers;
}

static void report_whoami(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        (void)cursor;
        bfcd__whoami__init(&r->whoami);
        r->whoami.tenant = report_borrow(viewer->tenant ? viewer->tenant->name : "");
        r->whoami.session_id = viewer->id;
        r->whoami.uid = viewer->who.uid;
        r->whoami.gid = viewer->who.gid;
        r->whoami.pid = (uint64_t)viewer->who.pid;
        r->whoami.admin = viewer->role == ROLE_ADMIN;
        r->whoami.monitor = viewer->role == ROLE_MONITOR;
        r->whoami.scheduler = viewer->role == ROLE_SCHEDULER;
        if (viewer->lease_socket != 0)
                report_add_row(r, report_borrow(viewer->tenant->name));
        for (size_t i = 0;
             viewer->lease_socket == 0 && i < viewer->who.matches.n_tenants && !report_is_full(r); i++)
                report_add_row(r, report_borrow(b->selection.order[viewer->who.matches.tenants[i]]->name));
        r->whoami.n_matching_tenants = r->n_rows;
        r->whoami.matching_tenants = (char **)r->pointers;
        r->whoami.leases = r->whoami_leases;
        r->whoami.n_leases = list_leases(viewer, r->whoami_leases);
        r->list.whoami = &r->whoami;
}

int report_list(const struct session *viewer, const Bfcd__List *request, struct report *ret)
{
        static void (*const reports[])(const struct session *, uint64_t, struct report *) = {
                [BFCD__LIST__KIND__STATUS] = report_status,
                [BFCD__LIST__KIND__PARTITIONS] = report_partitions,
                [BFCD__LIST__KIND__TENANTS] = report_tenants,
                [BFCD__LIST__KIND__SESSIONS] = report_sessions,
                [BFCD__LIST__KIND__BLOCKS] = report_blocks,
                [BFCD__LIST__KIND__WHOAMI] = report_whoami,
                [BFCD__LIST__KIND__SHARED] = report_shared,
                [BFCD__LIST__KIND__AGES] = report_ages,
                [BFCD__LIST__KIND__GRANTS] = report_grants,
                [BFCD__LIST__KIND__EXTENTS] = report_extents,
                [BFCD__LIST__KIND__KEPT] = report_kept,
                [BFCD__LIST__KIND__WAITING] = report_waiting,
                [BFCD__LIST__KIND__LEASES] = report_leases,
                [BFCD__LIST__KIND__REFUSALS] = report_refusals,
        };
        size_t kind = (size_t)request->kind;

        if (kind >= sizeof(reports) / sizeof(reports[0]) || !reports[kind])
                return -EINVAL;
        ret->n_rows = 0;
        ret->end_ns = role_is_bounded(viewer->role) ? clock_ns() + REPORT_MONITOR_NS : 0;
        bfcd__list_reply__init(&ret->list);
        reports[kind](viewer, request->cursor, ret);
        return 0;
}
