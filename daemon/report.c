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
        if (stats.bytes_free > stats.largest_free_block_bytes)
                f->bytes_fragmented = stats.bytes_free - stats.largest_free_block_bytes;
        f->num_blocks = q->n_blocks;
        f->num_sessions = q->n_sessions;
        f->num_extents = arena_n_extents(q->arena);
        f->num_refusals = q->n_refusals;
        f->num_over_quota = q->n_over_quota;
        f->num_out_of_memory = q->n_out_of_memory;
        f->last_refusal_time_ms = q->last_refusal_ms;
        f->peak_bytes_in_use_time_ms = q->peak_in_use_ms;
        f->peak_bytes_reserved_time_ms = q->account.peak_charged_ms;
        f->lifetime_peak_bytes_in_use = record->life.peak_in_use;
        f->lifetime_peak_bytes_reserved = q->account.lifetime_peak_charged_bytes;
        f->bytes_guaranteed = q->account.reserve_bytes;
        f->bytes_escaped = arena_unreclaimed_bytes(q->arena);
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
                f->bytes_fragmented += one.bytes_fragmented;
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
        row->bytes_standby = standby_bytes(d->standby);
        for (size_t k = 0; k < b->n_partitions; k++)
                if (b->partitions[k].device == d->device)
                        row->bytes_reserved += b->partitions[k].pool.charged_bytes;
        for (size_t k = 0; k < b->n_tenants; k++) {
                for (size_t m = 0; m < b->tenants[k].n_quotas; m++) {
                        const struct quota *q = b->tenants[k].quotas[m];

                        if (q->partition->device != d->device)
                                continue;
                        row->bytes_pending += arena_pending_bytes(q->arena);
                        row->bytes_escaped += arena_unreclaimed_bytes(q->arena);
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

/* Of those extents whose figures the viewer is told: its own, or all. A driver says nothing of its pages. */
static void report_partition_pages(const struct session *viewer, const struct partition *p,
                                   Bfcd__PartitionRow *row)
{
        const struct quota *q;

        if (p->is_cuda)
                return;
        TAILQ_FOREACH(q, &p->quotas, of_partition)
        {
                if (!viewer->admin && q->tenant != viewer->tenant->name)
                        continue;
                row->bytes_in_2mib_pages += arena_huge_bytes(q->arena);
                row->bytes_in_4kib_pages += arena_small_bytes(q->arena);
        }
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
                row->clears_on_release = p->clears;
                report_partition_pages(viewer, p, row);
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
                        row->is_removed = t->quotas[k]->is_removed;
                        row->bytes_pending = arena_retiring_bytes(t->quotas[k]->arena);
                        row->bytes_kept = quota_kept_bytes(t->quotas[k]);
                        row->kept_ms = quota_kept_ms(t->quotas[k]);
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

static const struct quota *quota_of_block(const struct session *viewer, const struct ledger_block *block)
{
        return viewer->broker->quotas[block->quota];
}

static bool viewer_sees_block(const struct session *viewer, const struct ledger_block *block)
{
        const struct quota *q = quota_of_block(viewer, block);

        return q && (viewer->admin || q->tenant == viewer->tenant->name);
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

/* A session is as old as its oldest block at least, and holds what they are in. Oldest first, so that what
 * is too much is taken off the youngest. Returns how many classes have something. */
static size_t clamp_ages(const struct session *s, uint64_t held, const uint64_t bytes[AGES_CLASSES],
                         uint64_t ret_least_ms[AGES_CLASSES], uint64_t ret_bytes[AGES_CLASSES])
{
        uint64_t clamped[AGES_CLASSES] = { 0 }, age_ms = clock_ms() - s->born_ms;
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
        row->tenant = borrow(of->quota->tenant);
        row->partition = borrow(of->quota->partition->name);
        row->least_age_ms = r->rows.ages.least_ms[r->n_rows];
        row->bytes = r->rows.ages.bytes[r->n_rows];
        row->n_bytes = clamp_ages(s, of->holding.bytes, ages->bytes[share], row->least_age_ms, row->bytes);
        row->n_least_age_ms = row->n_bytes;
        r->pointers[r->n_rows++] = row;
}

/* The cursor is a place of a session, times PAGES_MAX_PARTITIONS, plus a share. A page of a client costs
 * several system calls, also where it makes no row; so their number is bounded, too. */
static void report_ages(const struct session *viewer, uint64_t cursor, struct report *r)
{
        const struct broker *b = viewer->broker;
        uint32_t now = ages_now();
        struct client_ages ages;
        unsigned n_looks = 0;
        uint64_t i;

        for (i = cursor / PAGES_MAX_PARTITIONS; i < b->n_session_slots; i++, cursor = 0) {
                const struct session *s = b->sessions[i];
                size_t k = cursor % PAGES_MAX_PARTITIONS;

                if (!s || !(viewer->admin || s->tenant == viewer->tenant) || s->bytes_in_use == 0)
                        continue;
                if (report_is_full(r) || n_looks++ == REPORT_LOOKS) {
                        r->list.next_cursor = i * PAGES_MAX_PARTITIONS;
                        break;
                }
                if (client_page_ages(s->page, now, &ages) < 0)
                        continue;
                for (; k < s->n_shares && k < PAGES_MAX_PARTITIONS && !report_is_full(r); k++)
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
        r->whoami.tenant = borrow(viewer->tenant ? viewer->tenant->name : "");
        r->whoami.session_id = viewer->id;
        r->whoami.uid = viewer->who.uid;
        r->whoami.gid = viewer->who.gid;
        r->whoami.pid = (uint64_t)viewer->who.pid;
        r->whoami.admin = viewer->admin;
        for (size_t i = 0; i < viewer->who.matches.n_tenants && !report_is_full(r); i++)
                r->pointers[r->n_rows++] = borrow(b->order[viewer->who.matches.tenants[i]]->name);
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
                [BFCD__LIST__KIND__AGES] = report_ages,
        };
        size_t kind = (size_t)request->kind;

        if (kind >= sizeof(reports) / sizeof(reports[0]))
                return -EINVAL;
        ret->n_rows = 0;
        bfcd__list_reply__init(&ret->list);
        reports[kind](viewer, request->cursor, ret);
        return 0;
}
