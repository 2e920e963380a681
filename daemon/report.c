/* Reports; see report.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/report.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/drain.h"

#define REPORT_SCAN 4096u /* records looked at for one page */

/* protobuf-c's strings are not const; nobody writes there. */
static char *borrow(const char *s)
{
        return (char *)(uintptr_t)s;
}

static bool viewer_sees(const struct session *viewer, const struct tenant *t)
{
        return viewer->admin || viewer->tenant == t;
}

bool report_shows(const struct session *viewer, const char *tenant)
{
        return viewer->admin || strcmp(viewer->tenant->name, tenant) == 0;
}

void report_quota_figures(const struct quota *q, Bfcd__Figures *f)
{
        const struct ledger_quota *record = ledger_quota_at(q->ledger, q->index);
        struct bfc_stats stats;

        arena_read_stats(q->arena, &stats);
        f->bytes_limit = q->account.limit_bytes;
        f->bytes_reserved = q->account.charged_bytes;
        f->peak_bytes_reserved = q->account.peak_charged_bytes;
        f->bytes_in_use = q->bytes_in_use;
        f->peak_bytes_in_use = q->peak_bytes_in_use;
        f->bytes_requested = q->bytes_requested;
        f->peak_bytes_requested = q->peak_bytes_requested;
        f->num_allocs = stats.num_allocs;
        f->largest_alloc_size = stats.largest_alloc_size;
        f->largest_free_block_bytes = stats.largest_free_block_bytes;
        f->bytes_free = stats.bytes_free;
        f->num_blocks = q->n_blocks;
        f->num_sessions = q->n_sessions;
        f->num_extents = arena_n_extents(q->arena);
        f->num_refusals = q->n_refusals;
        f->num_over_quota = q->n_over_quota;
        f->num_out_of_memory = q->n_out_of_memory;
        f->last_refusal_time_ms = q->last_refusal_ms;
        f->peak_bytes_in_use_time_ms = q->peak_in_use_ms;
        f->peak_bytes_reserved_time_ms = q->account.peak_charged_ms;
        f->lifetime_peak_bytes_in_use = record->lifetime_peak_in_use;
        f->lifetime_peak_bytes_reserved = q->account.lifetime_peak_charged_bytes;
        f->bytes_guaranteed = q->account.reserve_bytes;
        f->bytes_escaped = arena_escaped_bytes(q->arena);
}

static void report_pool_figures(const struct partition *p, Bfcd__Figures *f)
{
        f->peak_bytes_reserved = p->pool.peak_charged_bytes;
        f->lifetime_peak_bytes_reserved = p->pool.lifetime_peak_charged_bytes;
        f->peak_bytes_reserved_time_ms = p->pool.peak_charged_ms;
        f->peak_bytes_in_use = p->peak_bytes_in_use;
        f->peak_bytes_in_use_time_ms = p->peak_in_use_ms;
        f->lifetime_peak_bytes_in_use = p->lifetime_peak_bytes_in_use;
}

/* A partition's limit and what is reserved of it are for all to see: who is
 * refused must be able to know why. The rest sums up what the viewer may see. */
void report_partition_figures(const struct session *viewer, const struct partition *p, Bfcd__Figures *f)
{
        const struct quota *q;

        f->bytes_limit = p->pool.limit_bytes;
        f->bytes_reserved = p->pool.charged_bytes;
        if (viewer->admin)
                report_pool_figures(p, f);
        TAILQ_FOREACH(q, &p->quotas, of_partition)
        {
                Bfcd__Figures one = BFCD__FIGURES__INIT;

                if (!viewer->admin && q->tenant != viewer->tenant->name)
                        continue;
                report_quota_figures(q, &one);
                f->bytes_in_use += one.bytes_in_use;
                f->bytes_escaped += one.bytes_escaped;
                f->bytes_requested += one.bytes_requested;
                f->num_allocs += one.num_allocs;
                f->bytes_free += one.bytes_free;
                f->num_blocks += one.num_blocks;
                f->num_sessions += one.num_sessions;
                f->num_extents += one.num_extents;
                f->num_refusals += one.num_refusals;
                f->num_over_quota += one.num_over_quota;
                f->num_out_of_memory += one.num_out_of_memory;
                if (one.last_refusal_time_ms > f->last_refusal_time_ms)
                        f->last_refusal_time_ms = one.last_refusal_time_ms;
                f->bytes_guaranteed += one.bytes_guaranteed;
                if (one.largest_alloc_size > f->largest_alloc_size)
                        f->largest_alloc_size = one.largest_alloc_size;
                if (one.largest_free_block_bytes > f->largest_free_block_bytes)
                        f->largest_free_block_bytes = one.largest_free_block_bytes;
        }
}

static bool report_is_full(const struct report *r)
{
        return r->n_rows == REPORT_ROWS;
}

static Bfcd__Figures *report_figures(struct report *r)
{
        Bfcd__Figures *f = &r->figures[r->n_rows];

        bfcd__figures__init(f);
        return f;
}

/* ---- the lists ----------------------------------------------------------- */

static void report_device(const struct broker *b, const struct broker_device *d, Bfcd__DeviceRow *row)
{
        bfcd__device_row__init(row);
        row->id = borrow(d->config->id);
        row->name = borrow(d->name);
        if (d->config->is_cuda) {
                row->uuid.data = (uint8_t *)(uintptr_t)d->config->uuid;
                row->uuid.len = sizeof(d->config->uuid);
        }
        row->bytes_total = d->bytes_total > 0 ? d->bytes_total : d->config->size_bytes;
        row->state = borrow(drain_state(d));
        for (size_t k = 0; k < b->n_partitions; k++)
                if (b->partitions[k].device == d->device)
                        row->bytes_reserved += b->partitions[k].pool.charged_bytes;
        for (size_t k = 0; k < b->n_tenants; k++) {
                for (size_t m = 0; m < b->tenants[k].n_quotas; m++) {
                        const struct quota *q = b->tenants[k].quotas[m];

                        if (q->partition->device != d->device)
                                continue;
                        row->bytes_pending += arena_pending_bytes(q->arena);
                        row->bytes_escaped += arena_escaped_bytes(q->arena);
                }
        }
}

static void report_devices(const struct session *viewer, struct report *r)
{
        const struct broker *b = viewer->broker;

        for (size_t i = 0; i < b->n_devices && !report_is_full(r); i++) {
                Bfcd__DeviceRow *row = &r->rows.devices[r->n_rows];

                report_device(b, &b->devices[i], row);
                r->pointers[r->n_rows++] = row;
        }
        r->status.n_devices = r->n_rows;
        r->status.devices = (Bfcd__DeviceRow **)r->pointers;
}

/* Where the C library cannot say, and where a sanitizer has taken its place, 0. */
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

static void report_status(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        (void)cursor;
        bfcd__status__init(&r->status);
        r->status.version = borrow(BFCD_VERSION);
        r->status.protocol_version = SESSION_PROTOCOL_VERSION;
        r->status.uptime_ms = clock_ms() - b->started_ms;
        r->status.pid = (uint64_t)getpid();
        r->status.max_sessions = b->config->max_sessions;
        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                if (!viewer_sees(viewer, t))
                        continue;
                r->status.num_tenants += t->config != NULL;
                r->status.num_sessions += t->n_sessions;
                r->status.num_quarantined += t->n_quarantined;
                for (size_t k = 0; k < t->n_quotas; k++) {
                        r->status.num_blocks += t->quotas[k]->n_blocks;
                        r->status.num_extents += arena_n_extents(t->quotas[k]->arena);
                }
        }
        if (viewer->admin) {
                r->status.bytes_allocated = allocated_bytes();
                r->status.bytes_resident = resident_bytes();
        }
        report_devices(viewer, r);
        r->list.status = &r->status;
}

static bool report_shows_partition(const struct session *viewer, const struct partition *p)
{
        if (viewer->admin)
                return true;
        for (size_t i = 0; i < viewer->tenant->n_quotas; i++)
                if (viewer->tenant->quotas[i]->partition == p)
                        return true;
        return false;
}

static void report_partitions(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t i;

        for (i = cursor; i < b->n_partitions && !report_is_full(r); i++) {
                const struct partition *p = &b->partitions[i];
                Bfcd__PartitionRow *row = &r->rows.partitions[r->n_rows];

                if (!report_shows_partition(viewer, p))
                        continue;
                bfcd__partition_row__init(row);
                row->name = borrow(p->name);
                row->device = borrow(p->device_id);
                row->growth = borrow(p->growth);
                row->share = borrow(p->share_name);
                row->num_tenants = p->n_quotas;
                row->figures = report_figures(r);
                report_partition_figures(viewer, p, row->figures);
                r->pointers[r->n_rows++] = row;
        }
        r->list.next_cursor = i < b->n_partitions ? i : 0;
        r->list.n_partitions = r->n_rows;
        r->list.partitions = (Bfcd__PartitionRow **)r->pointers;
}

/* The cursor counts quotas through all tenants. */
static void report_tenants(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t n = 0;

        for (size_t i = 0; i < b->n_tenants; i++) {
                const struct tenant *t = &b->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        Bfcd__TenantRow *row = &r->rows.tenants[r->n_rows];

                        if (n++ < cursor || !viewer_sees(viewer, t))
                                continue;
                        if (report_is_full(r)) {
                                r->list.next_cursor = n - 1;
                                goto out;
                        }
                        bfcd__tenant_row__init(row);
                        row->tenant = borrow(t->name);
                        row->partition = borrow(t->quotas[k]->partition->name);
                        row->figures = report_figures(r);
                        report_quota_figures(t->quotas[k], row->figures);
                        r->pointers[r->n_rows++] = row;
                }
        }
out:
        r->list.n_tenants = r->n_rows;
        r->list.tenants = (Bfcd__TenantRow **)r->pointers;
}

static void report_session(const struct session *s, Bfcd__SessionRow *row)
{
        const struct ledger_session *record = ledger_session_at(s->broker->ledger, s->index);
        struct client_figures client;

        bfcd__session_row__init(row);
        row->session_id = s->id;
        row->tenant = borrow(s->tenant ? s->tenant->name : "");
        row->pid = (uint64_t)s->who.pid;
        row->uid = s->who.uid;
        row->name = borrow(s->name);
        row->state = borrow(session_state_name(s));
        row->age_ms = clock_ms() - s->born_ms;
        row->num_blocks = record->links.n_blocks;
        row->bytes_in_use = s->bytes_in_use;
        row->peak_bytes_in_use = s->peak_bytes_in_use;
        session_client_figures(s, &client);
        row->client_bytes_reserved = client.bytes_held;
        row->client_bytes_in_use = client.bytes_in_use;
        row->client_bytes_idle = client.bytes_idle;
        row->num_trims = s->n_trims;
        row->num_trims_missed = s->n_trims_missed;
}

static void report_sessions(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint64_t i;

        for (i = cursor; i < b->n_session_slots && !report_is_full(r); i++) {
                const struct session *s = b->sessions[i];

                if (!s || !(viewer->admin || s->tenant == viewer->tenant))
                        continue;
                report_session(s, &r->rows.sessions[r->n_rows]);
                r->pointers[r->n_rows] = &r->rows.sessions[r->n_rows];
                r->n_rows++;
        }
        r->list.next_cursor = i < b->n_session_slots ? i : 0;
        r->list.n_sessions = r->n_rows;
        r->list.sessions = (Bfcd__SessionRow **)r->pointers;
}

static const struct quota *quota_by_index(const struct tenant *t, uint32_t index)
{
        for (size_t i = 0; i < t->n_quotas; i++)
                if (t->quotas[i]->index == index)
                        return t->quotas[i];
        return NULL;
}

static bool viewer_sees_block(const struct session *viewer, const struct ledger_block *block)
{
        return viewer->admin || quota_by_index(viewer->tenant, block->quota);
}

/* The quota of a block that the viewer sees. */
static const struct quota *quota_of_block(const struct session *viewer, const struct ledger_block *block)
{
        const struct broker *b = viewer->broker;
        const struct quota *q = NULL;

        if (!viewer->admin)
                return quota_by_index(viewer->tenant, block->quota);
        for (size_t i = 0; i < b->n_tenants && !q; i++)
                q = quota_by_index(&b->tenants[i], block->quota);
        return q;
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
                row->session_id = b->sessions[block->session]->id;
        else
                row->shared_name = ledger_shared_at(b->ledger, block->shared)->name;
        row->tenant = borrow(q->tenant);
        row->partition = borrow(q->partition->name);
        row->region_id = place.region_id;
        row->offset = place.offset;
        row->n_bytes = block->n_bytes;
        row->n_requested = block->n_requested;
        row->age_ms = clock_ms() - block->born_ms;
        row->tag = borrow(block->tag);
}

/* The cursor is the ledger's index of the next record to look at. */
static void report_blocks(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t end = ledger_block_end(b->ledger);
        uint64_t i, last = cursor < end ? cursor + REPORT_SCAN : cursor;

        for (i = cursor; i < end && i < last && !report_is_full(r); i++) {
                const struct ledger_block *block = ledger_block_get(b->ledger, (uint32_t)i);

                if (!block || !viewer_sees_block(viewer, block))
                        continue;
                report_block(viewer, block, &r->rows.blocks[r->n_rows]);
                r->pointers[r->n_rows] = &r->rows.blocks[r->n_rows];
                r->n_rows++;
        }
        r->list.next_cursor = i < end ? i : 0;
        r->list.n_blocks = r->n_rows;
        r->list.blocks = (Bfcd__BlockRow **)r->pointers;
}

/* The same, of the table of shared blocks. */
static void report_shared(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t end = ledger_shared_end(b->ledger);
        uint64_t i, last = cursor < end ? cursor + REPORT_SCAN : cursor;

        for (i = cursor; i < end && i < last && !report_is_full(r); i++) {
                const struct ledger_shared *shared = ledger_shared_get(b->ledger, (uint32_t)i);
                const struct ledger_block *block = shared ? ledger_block_at(b->ledger, shared->block) : NULL;
                Bfcd__SharedRow *row = &r->rows.shared[r->n_rows];
                const struct quota *q;

                if (!block || !viewer_sees_block(viewer, block))
                        continue;
                q = quota_of_block(viewer, block);
                bfcd__shared_row__init(row);
                row->name = borrow(shared->name);
                row->tenant = borrow(q->tenant);
                row->partition = borrow(q->partition->name);
                row->block_id = block->id;
                row->n_bytes = block->n_bytes;
                row->n_requested = block->n_requested;
                row->num_holders = shared->links.n_holds;
                row->age_ms = clock_ms() - shared->born_ms;
                r->pointers[r->n_rows++] = row;
        }
        r->list.next_cursor = i < end ? i : 0;
        r->list.n_shared = r->n_rows;
        r->list.shared = (Bfcd__SharedRow **)r->pointers;
}

static void report_whoami(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;

        (void)cursor;
        bfcd__whoami__init(&r->whoami);
        r->whoami.tenant = borrow(viewer->tenant ? viewer->tenant->name : "");
        r->whoami.session_id = viewer->id;
        r->whoami.uid = viewer->who.uid;
        r->whoami.gid = viewer->who.gid;
        r->whoami.pid = (uint64_t)viewer->who.pid;
        r->whoami.admin = viewer->admin;
        for (size_t i = 0; i < b->n_order && !report_is_full(r); i++)
                if (tenant_matches(b->order[i], &viewer->who))
                        r->pointers[r->n_rows++] = borrow(b->order[i]->name);
        r->whoami.n_matching_tenants = r->n_rows;
        r->whoami.matching_tenants = (char **)r->pointers;
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
        };
        size_t kind = (size_t)request->kind;

        if (kind >= sizeof(reports) / sizeof(reports[0]))
                return -EINVAL;
        ret->n_rows = 0;
        bfcd__list_reply__init(&ret->list);
        reports[kind](viewer, request->cursor, ret);
        return 0;
}
