/* Inheriting; see inherit.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/inherit.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/crash.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/base/process.h"
#include "daemon/ledger/sort.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "device/host_free.h"

/* ---- what the records say ------------------------------------------------- */

static int compare_quotas(const void *x, const void *y)
{
        const struct inherited_quota *p = x, *q = y;
        int r = strcmp(p->tenant, q->tenant);

        if (r == 0)
                r = strcmp(p->partition, q->partition);
        if (r == 0)
                r = p->id < q->id ? -1 : p->id > q->id;
        return r;
}

/* ---- in order ------------------------------------------------------------ */

/* Sorts, and returns the indexes; frees *keys. */
static uint32_t *sort_keys(struct ledger_key *keys, size_t n)
{
        uint32_t *indexes = ledger_sort(keys, n) == 0 ? calloc(n + 1, sizeof(*indexes)) : NULL;

        for (size_t i = 0; indexes && i < n; i++)
                indexes[i] = keys[i].index;
        free(keys);
        return indexes;
}

static void clear_exports(struct ledger *l, uint32_t extent)
{
        while (ledger_extent_at(l, extent)->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, ledger_extent_at(l, extent)->links.first_export);
}

static bool leaves_later(const struct inherited *r, const struct ledger_extent *e)
{
        return r->is_later && r->is_later(r->userdata, ledger_quota_at(r->ledger, e->quota)->partition);
}

/* -1: there is none, or r->error. */
static int take_fd(struct inherited *r, uint64_t key)
{
        int fd = store_take_extent(r->store, key);

        if (fd < 0 && fd != -ENOENT)
                r->error = fd;
        return fd < 0 ? -1 : fd;
}

/* Drops the leaving extents that no arena releases later. No session has them any more. One that is not
 * in the store was released already; only its record was left. */
static int take_leaving(struct inherited *r, uint32_t index)
{
        const struct ledger_extent *e = ledger_extent_get(r->ledger, index);
        int fd;

        if (!leaves_later(r, e))
                return -1;
        fd = take_fd(r, e->store_key);
        if (r->error < 0)
                return -1;
        clear_exports(r->ledger, index);
        if (fd < 0)
                ledger_extent_clear(r->ledger, index);
        return fd;
}

static int inherited_read_extents(struct inherited *r)
{
        uint32_t end = ledger_extent_end(r->ledger);
        struct ledger_key *keys = calloc((size_t)end + 1, sizeof(*keys));
        int *fds = calloc((size_t)end + 1, sizeof(*fds)); /* by index */

        r->fds = calloc((size_t)end + 1, sizeof(*r->fds));
        if (!keys || !fds || !r->fds) {
                free(keys);
                free(fds);
                return -ENOMEM;
        }
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_extent *e = ledger_extent_get(r->ledger, i);

                if (e)
                        keeper_pass_key(e->store_key);
                fds[i] = e && e->is_leaving ? take_leaving(r, i) : -1;
                if (e && (fds[i] >= 0 || !e->is_leaving))
                        keys[r->n_extents++] = (struct ledger_key){ e->quota, e->offset, i };
        }
        r->extents = sort_keys(keys, r->n_extents);
        for (size_t i = 0; r->extents && i < r->n_extents; i++)
                r->fds[i] = fds[r->extents[i]];
        if (!r->extents) {
                for (uint32_t i = 0; i < end; i++)
                        if (fds[i] >= 0)
                                close(fds[i]);
                r->n_extents = 0;
        }
        free(fds);
        return r->extents ? 0 : -ENOMEM;
}

static int inherited_read_blocks(struct inherited *r)
{
        uint32_t end = ledger_block_end(r->ledger);
        struct ledger_key *keys = calloc((size_t)end + 1, sizeof(*keys));

        if (!keys)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_block *b = ledger_block_get(r->ledger, i);

                if (b)
                        keys[r->n_blocks++] = (struct ledger_key){ b->quota, b->offset, i };
        }
        r->blocks = sort_keys(keys, r->n_blocks);
        return r->blocks ? 0 : -ENOMEM;
}

/* Each quota's part of the sorted lists. */
static int inherited_slice(struct inherited *r)
{
        uint32_t end = ledger_quota_end(r->ledger);
        struct inherited_quota **by_index = calloc((size_t)end + 1, sizeof(*by_index));

        if (!by_index)
                return -ENOMEM;
        for (size_t i = 0; i < r->n_quotas; i++)
                by_index[r->quotas[i].index] = &r->quotas[i];
        for (size_t i = r->n_extents; i-- > 0;) {
                const struct ledger_extent *e = ledger_extent_at(r->ledger, r->extents[i]);
                struct inherited_quota *q = by_index[e->quota];

                q->arena.extents = &r->extents[i];
                q->arena.fds = &r->fds[i];
                q->arena.n_extents++;
                q->n_bytes += e->n_bytes;
        }
        for (size_t i = r->n_blocks; i-- > 0;) {
                struct inherited_quota *q = by_index[ledger_block_at(r->ledger, r->blocks[i])->quota];

                q->arena.blocks = &r->blocks[i];
                q->arena.n_blocks++;
        }
        free(by_index);
        return 0;
}

static uint32_t find_lease(struct ledger *l, uint32_t quota)
{
        for (uint32_t i = 0; i < ledger_lease_end(l); i++)
                if (ledger_lease_get(l, i) && ledger_lease_get(l, i)->quota == quota)
                        return i;
        return LEDGER_NONE;
}

static int inherited_read_quotas(struct inherited *r)
{
        uint32_t end = ledger_quota_end(r->ledger);

        r->quotas = calloc((size_t)end + 1, sizeof(*r->quotas));
        if (!r->quotas)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_quota *from = ledger_quota_get(r->ledger, i);
                struct inherited_quota *q = &r->quotas[r->n_quotas];

                if (!from)
                        continue;
                r->n_quotas++;
                q->index = i;
                q->id = from->id;
                q->is_lease = from->is_lease != 0;
                q->lease = q->is_lease ? find_lease(r->ledger, i) : LEDGER_NONE;
                q->is_closed = from->is_closed != 0;
                q->growing_mib = from->growing_mib;
                q->oom_kills = from->oom_kills;
                q->direct_bytes = (uint64_t)from->unreclaimed_mib << 20;
                q->life = from->life;
                memcpy(q->tenant, from->tenant, sizeof(q->tenant));
                memcpy(q->partition, from->partition, sizeof(q->partition));
        }
        qsort(r->quotas, r->n_quotas, sizeof(*r->quotas), compare_quotas);
        return 0;
}

/* ---- by name ------------------------------------------------------------- */

static int compare_tenant(const struct inherited *r, size_t i, const char *tenant, const char *partition)
{
        const struct inherited_quota *q = &r->quotas[i];
        int order = strcmp(q->tenant, tenant);

        return order == 0 && partition ? strcmp(q->partition, partition) : order;
}

/* The first that is not before it. partition NULL: any. */
static size_t inherited_place(const struct inherited *r, const char *tenant, const char *partition)
{
        size_t first = 0, end = r->n_quotas;

        while (first < end) {
                size_t middle = first + (end - first) / 2;

                if (compare_tenant(r, middle, tenant, partition) < 0)
                        first = middle + 1;
                else
                        end = middle;
        }
        return first;
}

/* The first quota of a tenant in a partition, of *ret_n (sessions use the last one that is not closed, if
 * any). NULL: none. */
static struct inherited_quota *inherited_find(const struct inherited *r, const char *tenant,
                                              const char *partition, size_t *ret_n)
{
        size_t i = inherited_place(r, tenant, partition), n = 0;

        while (i + n < r->n_quotas && compare_tenant(r, i + n, tenant, partition) == 0)
                n++;
        *ret_n = n;
        return n > 0 ? &r->quotas[i] : NULL;
}

size_t inherited_first_of(const struct inherited *r, const char *tenant)
{
        return inherited_place(r, tenant, NULL);
}

/* A lease is kept until it ends, and so is what it is in. */
static void note_lease(struct inherited *r, struct inherited_quota *lease)
{
        size_t n;
        struct inherited_quota *q = inherited_find(r, lease->tenant, lease->partition, &n);

        lease->has_sessions = true;
        for (size_t i = 0; i < n; i++)
                q[i].has_sessions = q[i].has_sessions || !q[i].is_lease;
}

static void inherited_note_sessions(struct inherited *r)
{
        for (size_t i = 0; i < r->n_quotas; i++)
                if (r->quotas[i].lease != LEDGER_NONE)
                        note_lease(r, &r->quotas[i]);
        for (uint32_t k = 0; k < ledger_session_end(r->ledger); k++) {
                const struct ledger_session *s = ledger_session_get(r->ledger, k);
                size_t i = s ? inherited_place(r, s->tenant, NULL) : r->n_quotas;

                for (; i < r->n_quotas && compare_tenant(r, i, s->tenant, NULL) == 0; i++)
                        if (r->quotas[i].id < s->quotas_end && !r->quotas[i].is_lease)
                                r->quotas[i].has_sessions = true;
        }
}

/* ---- direct charges ------------------------------------------------------- */

static void note_direct(struct inherited *r, const char *tenant, const struct ledger_direct *d)
{
        size_t i = inherited_place(r, tenant, NULL);

        for (; i < r->n_quotas && compare_tenant(r, i, tenant, NULL) == 0; i++)
                if (r->quotas[i].id == d->quota_id)
                        r->quotas[i].direct_bytes += d->n_bytes;
}

static void inherited_note_direct(struct inherited *r)
{
        for (uint32_t i = 0; i < ledger_session_end(r->ledger); i++) {
                const struct ledger_session *s = ledger_session_get(r->ledger, i);

                for (size_t k = 0; s && k < LEDGER_SESSION_DIRECT; k++)
                        if (s->direct[k].n_bytes > 0)
                                note_direct(r, s->tenant, &s->direct[k]);
        }
}

/* ---- closing and forgetting ---------------------------------------------- */

static void clear_refs(struct ledger *l, uint32_t shared)
{
        while (ledger_shared_at(l, shared)->links.first_ref != LEDGER_NONE)
                ledger_ref_clear(l, ledger_shared_at(l, shared)->links.first_ref);
        ledger_shared_clear(l, shared);
}

/* A reference; with the last one of a block that is not kept, the block. */
static void drop_ref(struct ledger *l, uint32_t ref)
{
        uint32_t shared = ledger_ref_at(l, ref)->shared;
        const struct ledger_shared *s = ledger_shared_at(l, shared);
        uint32_t copy;

        if (s->links.n_refs > 1 || s->keep_ms > 0) {
                ledger_ref_clear(l, ref);
                return;
        }
        copy = ledger_block_find(l, ledger_block_at(l, s->block)->parked);
        ledger_block_clear(l, s->block);
        if (copy != LEDGER_NONE)
                ledger_block_clear(l, copy);
        clear_refs(l, shared);
}

/* Clears the records of a session that has ended, with all that it had: before inherited_new(). */
static void inherited_drop_session(struct ledger *l, uint32_t session)
{
        const struct ledger_session *s = ledger_session_at(l, session);

        while (s->links.first_block != LEDGER_NONE)
                ledger_block_clear(l, s->links.first_block);
        while (s->links.first_ref != LEDGER_NONE)
                drop_ref(l, s->links.first_ref);
        while (s->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, s->links.first_export);
        ledger_session_clear(l, session);
}

/* All except the records of extents. */
static void inherited_clear(struct inherited *r, struct inherited_quota *q)
{
        for (size_t i = 0; i < q->arena.n_blocks; i++) {
                uint32_t shared = ledger_block_at(r->ledger, q->arena.blocks[i])->shared;

                ledger_block_clear(r->ledger, q->arena.blocks[i]);
                if (shared != LEDGER_NONE)
                        clear_refs(r->ledger, shared);
        }
        q->arena.n_blocks = 0;
        for (size_t i = 0; i < q->arena.n_extents; i++) {
                int *fd = &r->fds[q->arena.extents + i - r->extents];
                const struct ledger_extent *e = ledger_extent_at(r->ledger, q->arena.extents[i]);

                clear_exports(r->ledger, q->arena.extents[i]);
                if (*fd >= 0)
                        close(*fd);
                *fd = -1;
                (void)store_remove_extent(r->store, e->store_key);
        }
}

static void clear_lease(struct inherited *r, struct inherited_quota *q)
{
        if (q->lease != LEDGER_NONE)
                ledger_lease_clear(r->ledger, q->lease);
        q->lease = LEDGER_NONE;
}

/* Closes its arena permanently: nothing of it is allocated or released. Closes its fds, here and in the
 * store, and clears its records except those of its extents. */
static void inherited_close(struct inherited *r, struct inherited_quota *q)
{
        clear_lease(r, q);
        q->is_closed = true;
        ledger_quota_close(r->ledger, q->index);
        inherited_clear(r, q);
}

/* Clears all of its records, including its own: its memory is gone. */
static void inherited_forget(struct inherited *r, struct inherited_quota *q)
{
        clear_lease(r, q);
        inherited_clear(r, q);
        for (size_t i = 0; i < q->arena.n_extents; i++)
                ledger_extent_clear(r->ledger, q->arena.extents[i]);
        q->arena.n_extents = 0;
        q->n_bytes = 0;
        for (uint32_t i = 0; i < ledger_region_end(r->ledger); i++) {
                const struct ledger_region *g = ledger_region_get(r->ledger, i);

                if (g && g->quota == q->index)
                        ledger_region_clear(r->ledger, i);
        }
        ledger_quota_clear(r->ledger, q->index);
}

/* It is unknown which of them has which memory. */
static void inherited_close_twins(struct inherited *r)
{
        for (size_t i = 0; i < r->n_quotas; i++) {
                struct inherited_quota *q = &r->quotas[i];
                size_t n_open = 0, n = 1;

                while (i + n < r->n_quotas && compare_tenant(r, i + n, q->tenant, q->partition) == 0)
                        n++;
                for (size_t k = 0; k < n; k++)
                        n_open += !q[k].is_closed && !q[k].is_lease;
                for (size_t k = 0; k < n; k++)
                        q[k].is_closed = q[k].is_closed || (n_open > 1 && !q[k].is_lease);
                i += n - 1;
        }
}

/* ---- leaving extents ------------------------------------------------------- */

/* p: with its ledger, device and store; the device is NULL where there is none. */
static void finish_one(struct inherited *r, uint32_t index, const struct partition *p)
{
        const struct ledger_extent *e = ledger_extent_at(r->ledger, index);
        int fd = take_fd(r, e->store_key);

        if (r->error < 0)
                return; /* a successor tries again */
        if (p->device) {
                (void)arena_finish(p, index, fd);
                return;
        }
        if (fd >= 0)
                close(fd);
        (void)store_remove_extent(r->store, e->store_key);
        clear_exports(r->ledger, index);
        ledger_extent_clear(r->ledger, index);
}

/* Releases, at once, the extents that were being released and are not for later, if their fds are
 * available. device_of: the device by the partition's name, NULL: none; and whether its extents are
 * cleared. */
static void inherited_finish(struct inherited *r,
                             struct device *(*device_of)(void *userdata, const char *partition,
                                                         bool *ret_clears),
                             void *userdata)
{
        for (uint32_t i = 0; i < ledger_extent_end(r->ledger); i++) {
                const struct ledger_extent *e = ledger_extent_get(r->ledger, i);

                const char *partition;
                struct partition p = { .ledger = r->ledger, .store = r->store };

                if (!e || !e->is_leaving || leaves_later(r, e))
                        continue;
                partition = ledger_quota_at(r->ledger, e->quota)->partition;
                p.device = device_of(userdata, partition, &p.clears);
                finish_one(r, i, &p);
        }
}

/* ---- life ---------------------------------------------------------------- */

/* Takes the fds of the ledger's extents from the store. Of two open quotas of one tenant in one partition
 * both are closed. -ENOMEM; -errno of the store: nothing was dropped. */
static int inherited_new(struct ledger *ledger, struct store *store, inherited_later_fn is_later,
                         void *userdata, struct inherited **ret)
{
        struct inherited *r = calloc(1, sizeof(*r));
        int error;

        if (!r)
                return -ENOMEM;
        r->ledger = ledger;
        r->store = store;
        r->is_later = is_later;
        r->userdata = userdata;
        error = inherited_read_quotas(r);
        if (error == 0)
                error = inherited_read_extents(r);
        if (error == 0)
                error = inherited_read_blocks(r);
        if (error == 0)
                error = inherited_slice(r);
        if (error < 0) {
                inherited_free(r);
                return error;
        }
        inherited_note_sessions(r);
        inherited_note_direct(r);
        inherited_close_twins(r);
        for (size_t i = 0; i < r->n_quotas; i++)
                for (size_t k = 0; !r->quotas[i].is_closed && k < r->quotas[i].arena.n_extents; k++) {
                        uint32_t extent = r->quotas[i].arena.extents[k];

                        if (ledger_extent_at(ledger, extent)->is_leaving)
                                continue; /* it was taken */
                        r->fds[r->quotas[i].arena.extents + k - r->extents] =
                                take_fd(r, ledger_extent_at(ledger, extent)->store_key);
                }
        if (r->error < 0) {
                error = r->error;
                inherited_free(r);
                return error;
        }
        for (size_t i = 0; i < r->n_quotas; i++)
                if (r->quotas[i].is_closed)
                        inherited_close(r, &r->quotas[i]);
        *ret = r;
        return 0;
}

struct inherited *inherited_free(struct inherited *r)
{
        if (!r)
                return NULL;
        for (size_t i = 0; r->fds && i < r->n_extents; i++)
                if (r->fds[i] >= 0)
                        close(r->fds[i]);
        free(r->quotas);
        free(r->extents);
        free(r->fds);
        free(r->blocks);
        free(r);
        return NULL;
}

/* ---- quotas of the config and of the records ----------------------------------- */

#define MAX_FAULTS_LOGGED 32u

/* While quotas are made, the pools have room for all inherited charges; their limits are set at the end. */
#define NO_LIMIT (UINT64_MAX / 2)

/* ---- the ledger ---------------------------------------------------------- */

static void on_fault(void *userdata, const struct ledger_fault *fault)
{
        unsigned *n = userdata;

        if (strcmp(fault->table, "header") == 0)
                log_error("the ledger of the previous daemon cannot be read: %s", fault->why);
        else if (++*n <= MAX_FAULTS_LOGGED)
                log_error("the ledger is damaged: %s %" PRIu32 " (id %" PRIu64 "): %s; the affected quota "
                          "is closed",
                          fault->table, fault->index, fault->id, fault->why);
}

/* The config needs more records than there are. */
static int grow_ledger(struct broker *b, const struct ledger_limits *room, char *ret_sentence,
                       size_t n_sentence)
{
        struct ledger *larger = NULL;
        int r = ledger_grow(b->ledger, room, &larger);

        if (r == 0)
                r = store_put_ledger(b->options.store, ledger_fd(larger));
        if (r < 0) {
                snprintf(ret_sentence, n_sentence,
                         "the configuration needs larger tables than the previous daemon had, and they "
                         "cannot be created: %s: lower max_blocks, max_sessions or limits to their "
                         "previous values",
                         strerror(-r));
                ledger_free(larger);
                return r;
        }
        ledger_free(b->ledger);
        b->ledger = larger;
        log_notice("the configuration needs larger tables than the previous daemon had: they were "
                   "enlarged, with room for %" PRIu32 " blocks",
                   broker_room(b).n_blocks);
        return 0;
}

/* Its arena is closed, as if one of its records was bad. */
static bool leave_quota_aside(struct ledger *l, uint32_t index)
{
        const struct ledger_quota *q = ledger_quota_get(l, index);
        const char *lease = NULL;

        if (!q || q->is_closed)
                return false;
        for (uint32_t i = 0; i < ledger_lease_end(l); i++)
                if (ledger_lease_get(l, i) && ledger_lease_get(l, i)->quota == index)
                        lease = ledger_lease_get(l, i)->name;
        log_error(
                "the previous daemon failed while it restored %s%s%stenant '%s' in partition '%s': this is left "
                "aside, and the rest is restored; report this, and restart the programs of the tenant",
                lease ? "lease '" : "", lease ? lease : "", lease ? "' of " : "", q->tenant, q->partition);
        ledger_quota_close(l, index);
        return true;
}

/* Its blocks stay, since its process may use them: nothing else is placed there. */
static bool leave_session_aside(struct ledger *l, uint32_t index)
{
        const struct ledger_session *s = ledger_session_get(l, index);

        if (!s || s->can_resume == LEDGER_ASIDE)
                return false;
        log_error("the previous daemon failed while it restored session %" PRIu64
                  " (%s) of tenant '%s', uid %" PRIu32 ", pid %" PRIu32
                  ": this session is left aside, and the rest is restored; its memory stays charged "
                  "until the first restart after its process has ended; report this",
                  s->id, s->name, s->tenant, s->uid, s->pid);
        ledger_session_at(l, index)->can_resume = LEDGER_ASIDE;
        return true;
}

static bool is_given_up(const struct ledger *l)
{
        uint32_t n_crashes = *ledger_crashes(l), n_aside = *ledger_n_aside(l);

        if (n_crashes < INHERIT_MAX_CRASHES && n_aside <= INHERIT_MAX_ASIDE)
                return false;
        log_error("%" PRIu32
                  " daemons in a row crashed with the ledger of the previous daemon: the daemon starts "
                  "without it, and the previous sessions cannot be resumed",
                  n_crashes + n_aside);
        return true;
}

/* 0 with b->ledger NULL: the ledger is not used, as was logged. */
static int open_ledger(struct broker *b, int fd, const struct capacity_records *n, char *ret_sentence,
                       size_t n_sentence)
{
        struct ledger_limits room = capacity_ledger(n), have;
        unsigned n_faults = 0;
        uint32_t at, index;
        int r = ledger_open(fd, on_fault, &n_faults, &b->ledger);

        /* A damaged header: nothing can be read. Damaged records only close their quotas. */
        if (r < 0)
                close(fd);
        if (n_faults > MAX_FAULTS_LOGGED)
                log_error("the ledger is damaged: %u more records", n_faults - MAX_FAULTS_LOGGED);
        if (r == -EBADMSG) {
                log_error("the daemon starts without it: the previous sessions cannot be resumed; restart "
                          "their programs");
                return 0;
        }
        if (r < 0)
                return r;

        /* What the previous daemon crashed at is left aside. A crash at what was left aside already counts as
         * any other; after too many the whole ledger is given up, so that the daemon can start. */
        at = *ledger_at(b->ledger);
        index = LEDGER_AT_INDEX(at);
        if (at & CRASH_MARK) {
                bool is_aside = at & LEDGER_AT_SESSION ? leave_session_aside(b->ledger, index)
                                                       : leave_quota_aside(b->ledger, index);

                ++*(is_aside ? ledger_n_aside(b->ledger) : ledger_crashes(b->ledger));
        }
        ledger_note_nothing(b->ledger);
        if (is_given_up(b->ledger)) {
                b->ledger = ledger_free(b->ledger);
                return 0;
        }

        /* The processes of sessions that were left aside may have ended: then their memory is unused. */
        for (uint32_t i = 0; i < ledger_session_end(b->ledger); i++) {
                const struct ledger_session *s = ledger_session_get(b->ledger, i);

                if (s && s->can_resume == LEDGER_ASIDE && process_has_ended((pid_t)s->pid, s->start_time))
                        inherited_drop_session(b->ledger, i);
        }

        /* The tables are kept if they have room for what the config allows. */
        have = broker_room(b);
        if (have.n_sessions >= room.n_sessions && have.n_quotas >= n->n_quotas &&
            have.n_extents >= n->n_extents && have.n_exports >= n->n_exports &&
            have.n_blocks >= n->n_blocks && have.n_shared >= n->n_blocks && have.n_refs >= n->n_refs)
                return 0;
        return grow_ledger(b, &room, ret_sentence, n_sentence);
}

/* True: the releases of this partition continue while the loop runs, because a process may still have the
 * memory. */
static bool is_released_later(void *userdata, const char *partition)
{
        const struct broker *b = userdata;
        const struct config *c = b->config;

        for (size_t i = 0; i < c->n_partitions; i++)
                if (strcmp(c->partitions[i].name, partition) == 0)
                        return !c->devices[c->partitions[i].device].is_cuda;
        return false;
}

int inherit_ledger(struct broker *b, const struct capacity_records *n, char *ret_sentence, size_t n_sentence)
{
        int fd = store_take_ledger(b->options.store), r = fd == -ENOENT ? 0 : fd;
        struct ledger_limits room = capacity_ledger(n);

        if (fd >= 0)
                r = open_ledger(b, fd, n, ret_sentence, n_sentence);

        /* The ledger is inherited: from here on a crash is marked in it, with the object that is being
         * restored. */
        if (r == 0 && b->ledger) {
                b->restored.extents_end = ledger_extents_end(b->ledger);
                crash_count_in(ledger_crashes(b->ledger), ledger_at(b->ledger));
                return inherited_new(b->ledger, b->options.store, is_released_later, b, &b->inherited);
        }

        /* Else a new ledger is made. The daemon serves also if no keeper has it. */
        if (r == 0)
                r = ledger_new(&room, &b->ledger);
        if (r < 0)
                return r;
        b->restored.extents_end = ledger_extents_end(b->ledger);
        if (store_keeps(b->options.store))
                crash_count_in(ledger_crashes(b->ledger), ledger_at(b->ledger));
        r = store_put_ledger(b->options.store, ledger_fd(b->ledger));
        if (r < 0)
                log_warning("the keeper does not have the ledger: a restart ends all sessions: %s",
                            strerror(-r));
        return 0;
}

/* ---- quotas -------------------------------------------------------------- */

static size_t find_partition(const struct broker *b, const char *name)
{
        size_t i = 0;

        while (i < b->n_partitions && strcmp(b->partitions[i].name, name) != 0)
                i++;
        return i;
}

static struct device *device_of(void *userdata, const char *partition, bool *ret_clears)
{
        const struct broker *b = userdata;
        size_t i = find_partition(b, partition);

        if (i == b->n_partitions)
                return NULL;
        *ret_clears = b->partitions[i].clears;
        return b->partitions[i].device;
}

/* Processes may use it, so a GPU's keeper does not end it with what no record knows. */
static void claim_closed(struct broker *b, const struct inherited_quota *from)
{
        size_t partition = find_partition(b, from->partition);

        b->restored.closed_bytes += from->n_bytes;
        b->restored.has_unknown |= partition == b->n_partitions;
        for (size_t i = 0; partition < b->n_partitions && i < from->arena.n_extents; i++) {
                const struct ledger_extent *e = ledger_extent_at(b->ledger, from->arena.extents[i]);
                struct device_extent memory;

                if (device_take(b->partitions[partition].device, e->store_key, e->n_bytes, &memory) == 0 &&
                    memory.fd >= 0)
                        close(memory.fd);
        }
}

static void close_quota(struct broker *b, struct inherited_quota *from, const char *why)
{
        bool is_lease = from->lease != LEDGER_NONE;

        log_error(
                "%s%s%stenant '%s' in partition '%s': %s: its arena is closed, with %s in %zu extents and %zu blocks; these stay charged, and the previous sessions cannot "
                "be resumed",
                is_lease ? "lease '" : "", is_lease ? ledger_lease_at(b->ledger, from->lease)->name : "",
                is_lease ? "' of " : "", from->tenant, from->partition, why, NUMBER_SIZE(from->n_bytes),
                from->arena.n_extents, from->arena.n_blocks);
        if (is_lease)
                lease_tell_gone(b, &(struct lease_end){ ledger_lease_at(b->ledger, from->lease), &from->life,
                                                        from->tenant, from->partition });
        claim_closed(b, from);
        inherited_close(b->inherited, from);
}

/* The bytes of a tenant in a partition, in arenas that are closed. */
static uint64_t closed_bytes(const struct broker *b, const char *tenant, const char *partition)
{
        uint64_t n_bytes = 0;
        size_t n;
        const struct inherited_quota *q = inherited_find(b->inherited, tenant, partition, &n);

        for (size_t i = 0; i < n; i++)
                n_bytes += q[i].is_closed ? q[i].n_bytes + q[i].direct_bytes : 0;
        return n_bytes;
}

/* How much of a limit extents of these sizes can back: see arena_prepare_limit(). */
static uint64_t limit_in(const struct partition *p, uint64_t limit_bytes, const struct extent_sizes *g)
{
        if (p->share != DEVICE_SHARE_FD || !extent_sizes_are_valid(g, device_granularity(p->device)))
                return limit_bytes;
        return min_u64(limit_bytes, extent_max_limit(g));
}

static void took_fds(struct inherited *r, const struct inherited_quota *q)
{
        for (size_t i = 0; i < q->arena.n_extents; i++)
                r->fds[q->arena.fds + i - r->fds] = -1;
}

static bool is_fatal(int error)
{
        return error == -ENOMEM || error == -EMFILE || error == -ENFILE;
}

/* The previous daemon ended during a growth. If the kernel killed a process for lack of memory meanwhile,
 * it would do so again. */
static void note_interrupted_growth(struct quota *q, uint32_t growing_mib, uint32_t oom_kills)
{
        ledger_quota_has_grown(q->partition->ledger, q->index, UINT64_MAX);
        if (growing_mib == 0 || (int32_t)(host_free_oom_kills() - oom_kills) <= 0)
                return;
        log_warning("tenant '%s' in partition '%s': the kernel killed a process for lack of memory while the "
                    "previous daemon allocated %" PRIu32
                    " MiB, so the tenant gets no new memory there for %u s",
                    q->tenant, q->partition->name, growing_mib, QUOTA_PAUSE_MS / 1000);
        quota_pause_growth(q);
}

/* Makes a quota, or that of a lease within `parent`. While the ledger is read, its limit is not below what is charged for
 * it: extents, direct charges, and closed arenas. 0: it is from->quota, or it was closed and there is none. */
static int restore_node(struct broker *b, struct tenant *t, struct quota *parent,
                        struct inherited_quota *from, const struct quota_limits *to, uint64_t n_closed)
{
        const char *why = NULL;
        struct quota_options options = {
                .parent = parent,
                .lease = parent ? ledger_lease_at(b->ledger, from->lease)->name
                                : NULL, /* until lease_adopt() */
                .limit_bytes = max_u64(to->limit_bytes, from->n_bytes + from->direct_bytes + n_closed),
                .max_sessions = to->max_sessions,
                .max_blocks = to->max_blocks,
                .closed_bytes = n_closed,
        };
        const struct quota_records records = { &from->arena, from->index, from->n_bytes, from->direct_bytes };
        int r = broker_prepare_quota(b, t, find_partition(b, from->partition), &options);

        if (r == 0)
                r = quota_restore(&options, &records, &from->quota, &why);
        if (r == 0)
                broker_list_quota(b, t, from->quota);

        /* Records that do not fit together close this quota only. */
        if (is_fatal(r))
                return r;
        if (r < 0) {
                close_quota(b, from, why ? why : strerror(-r));
                return 0;
        }
        took_fds(b->inherited, from);
        b->restored.n_bytes += from->n_bytes;
        b->restored.n_blocks += (uint32_t)from->arena.n_blocks;
        note_interrupted_growth(from->quota, from->growing_mib, from->oom_kills);
        return 0;
}

/* The config's limits, or, without a quota in the config, what is charged. */
static int restore_quota(struct broker *b, struct tenant *t, size_t partition, struct inherited_quota *from)
{
        const struct partition *p = &b->partitions[partition];
        const struct config_quota *in = config_quota_in(t->config, partition);
        uint64_t closed = closed_bytes(b, from->tenant, from->partition);
        struct extent_sizes sizes = quota_extent_sizes(ledger_quota_at(b->ledger, from->index));
        struct quota_limits to = { .limit_bytes = max_u64(from->n_bytes + from->direct_bytes + closed,
                                                          CONFIG_GRANULARITY),
                                   .max_blocks = (uint32_t)from->arena.n_blocks };
        uint64_t most;
        int r;

        if (in)
                to = broker_limits(in);

        /* The sizes of extents cannot change while there are any, and they bound the limit. */
        most = limit_in(p, to.limit_bytes, &sizes);
        if (most < to.limit_bytes)
                log_warning("tenant '%s' in partition '%s': the size of its extents does not allow its "
                            "limit of %s; until they are released and bfcd is restarted, the limit is %s",
                            t->name, p->name, NUMBER_SIZE(to.limit_bytes), NUMBER_SIZE(most));
        to.limit_bytes = most;
        to.reserve_bytes = min_u64(to.reserve_bytes, most);
        r = restore_node(b, t, NULL, from, &to, closed);
        if (r < 0 || !from->quota)
                return r;
        r = quota_prepare_limit(from->quota, to.limit_bytes);
        if (r == 0)
                quota_set(from->quota, &to);
        from->quota->is_removed = !in;
        return r;
}

/* Makes a quota of one in the ledger. */
static int inherit_quota(struct broker *b, struct tenant *t, struct inherited_quota *from)
{
        size_t partition = find_partition(b, from->partition);
        bool is_there = partition < b->n_partitions, has_fds = true;

        if (from->is_closed) { /* by this process or an earlier one, and never opened again */
                log_error("tenant '%s' in partition '%s': its previous arena stays closed: %s in "
                          "%zu extents stay charged, and the previous sessions cannot be resumed",
                          from->tenant, from->partition, NUMBER_SIZE(from->n_bytes), from->arena.n_extents);
                claim_closed(b, from);
                return 0;
        }

        /* What can never be restored is closed: its memory stays charged, since processes may use it. */
        for (size_t i = 0; i < from->arena.n_extents; i++)
                has_fds = has_fds && from->arena.fds[i] >= 0;
        if (!is_there)
                close_quota(b, from, "the configuration no longer has this partition");
        else if (!device_keeps(b->partitions[partition].device) && !has_fds)
                close_quota(b, from, "the keeper does not have all of its extents");
        else if (from->is_lease && from->lease == LEDGER_NONE)
                close_quota(b, from, "it is of a lease that is not known");
        else if (!from->is_lease) /* leases come later */
                return restore_quota(b, t, partition, from);
        return 0;
}

static int compare_ids(const void *x, const void *y)
{
        const struct inherited_quota *const *p = x, *const *q = y;

        return (*p)->id < (*q)->id ? -1 : (*p)->id > (*q)->id;
}

/* It was closed when its quota in the partition was made already: that is charged for it. */
static void charge_closed(struct quota *q, uint64_t n_bytes)
{
        struct charge charge;
        uint64_t missing;

        if (charge_take(&q->account, n_bytes, &charge, &missing) == 0)
                charge_join(&q->extentless.closed, &charge);
}

/* Its limit where it can be restored. A lease that has ended continues with the memory that it has. */
static void restore_lease_limit(struct quota *q, struct ledger_lease *record, const struct quota_limits *to)
{
        if (quota_prepare_limit(q, to->limit_bytes) == 0) {
                quota_set(q, to);
                return;
        }
        if (record->ended_ms != 0)
                return;
        log_error("lease '%s' of tenant '%s' in partition '%s' ends: its limit of %s "
                  "could not be restored, because the size of its extents does not allow it; its "
                  "sessions continue, and get no more memory",
                  record->name, q->tenant, q->partition->name, NUMBER_SIZE(record->limit_bytes));
        record->ended_ms = clock_ms();
}

/* Within the quota of its tenant, which has room for all that is charged. */
static int restore_lease(struct broker *b, struct tenant *t, struct quota *parent,
                         struct inherited_quota *from)
{
        struct ledger_lease *record = ledger_lease_at(b->ledger, from->lease);
        struct extent_sizes sizes = quota_extent_sizes(ledger_quota_at(b->ledger, from->index));
        struct quota_limits to = { record->limit_bytes, record->reserve_bytes, parent->max_sessions,
                                   parent->max_blocks };
        struct quota_limits at_first = to;
        struct lease *lease;
        struct quota *q;
        int r;

        at_first.limit_bytes = limit_in(parent->partition, to.limit_bytes, &sizes);
        r = restore_node(b, t, parent, from, &at_first, 0);
        if (r == 0 && !from->quota)
                charge_closed(parent, from->n_bytes + from->direct_bytes);
        if (r < 0 || !from->quota)
                return r;

        /* A lease that the config makes follows the new config. Its guarantee is set last: see guarantee_leases(). */
        q = from->quota;
        lease_follow(record, q, broker_config_quota(b, t, parent->partition), &to);
        restore_lease_limit(q, record, &to);
        quota_restore_lifetime(q, &from->life);
        r = lease_adopt(b, t, q, from->lease, &lease);
        if (r == 0 && record->ended_ms == 0)
                lease_store_limits(b, lease, &to);
        return r;
}

/* Leases in the order in which they were made, after the quotas of tenants. */
static int inherit_leases(struct broker *b)
{
        struct inherited *r = b->inherited;
        struct inherited_quota **list = calloc(r->n_quotas + 1, sizeof(*list));
        size_t n = 0;
        int error = list ? 0 : -ENOMEM;

        for (size_t i = 0; list && i < r->n_quotas; i++)
                if (r->quotas[i].lease != LEDGER_NONE && !r->quotas[i].is_closed)
                        list[n++] = &r->quotas[i];
        if (list)
                qsort(list, n, sizeof(*list), compare_ids);
        for (size_t i = 0; error == 0 && i < n; i++) {
                size_t k = 0, partition = find_partition(b, list[i]->partition);
                struct quota *parent;
                uint64_t limit, reserve;

                ledger_note_quota(b->ledger, list[i]->index);
                while (k < b->n_tenants && strcmp(b->tenants[k].name, list[i]->tenant) != 0)
                        k++;
                parent = k < b->n_tenants && partition < b->n_partitions
                                 ? tenant_quota(&b->tenants[k], &b->partitions[partition])
                                 : NULL;
                if (!parent) {
                        log_notice(
                                "lease '%s' of tenant '%s' in partition '%s' ends: its tenant has no quota "
                                "there",
                                ledger_lease_at(b->ledger, list[i]->lease)->name, list[i]->tenant,
                                list[i]->partition);
                        close_quota(b, list[i], "the quota of its tenant was closed");
                        continue;
                }

                /* The limit of the tenant may be lower than what is charged already. */
                limit = parent->account.limit_bytes;
                reserve = parent->account.reserve_bytes;
                account_set(&parent->account, NO_LIMIT / 2, reserve);
                error = restore_lease(b, &b->tenants[k], parent, list[i]);
                account_set(&parent->account, limit, reserve);
        }
        ledger_note_nothing(b->ledger);
        free(list);
        return error;
}

/* The new config may leave less for a guarantee than it had. */
static void guarantee_lease(struct broker *b, struct lease *lease)
{
        struct ledger_lease *record = lease_record(b, lease);
        struct account *a = &lease->quota->account;
        uint64_t most = account_reserve_max(a) / CONFIG_GRANULARITY * CONFIG_GRANULARITY;

        if (record->reserve_bytes > most) {
                log_warning("lease '%s' of tenant '%s' in partition '%s': the configuration does not leave "
                            "%s for its reserve, which is now %s",
                            lease->name, lease->tenant->name, lease->quota->partition->name,
                            NUMBER_SIZE(record->reserve_bytes), NUMBER_SIZE(most));
                record->reserve_bytes = most;
        }
        account_set(a, a->limit_bytes, record->reserve_bytes);
}

/* With the limits of the config in force, and all memory charged; the oldest lease first. */
static void guarantee_leases(struct broker *b)
{
        for (size_t i = 0; i < b->leases.n; i++) {
                struct account *a = &b->leases.list[i]->quota->account;

                account_set(a, a->limit_bytes, 0);
        }
        for (size_t i = 0; i < b->leases.n; i++)
                if (!quota_has_ended(b->leases.list[i]->quota))
                        guarantee_lease(b, b->leases.list[i]);
}

/* The quotas of a tenant in their original order, which its sessions know. The closed ones that are forgotten
 * must not be charged to the others, so they come first. */
static int inherit_tenant(struct broker *b, struct tenant *t, struct inherited_quota *first, size_t n)
{
        struct inherited_quota **list = calloc(n + 1, sizeof(struct inherited_quota *));
        int r = list ? 0 : -ENOMEM;
        size_t n_used = 0;

        for (size_t i = 0; list && i < n; i++) {
                ledger_note_quota(b->ledger, first[i].index);
                /* No session knows it: a new one has extents of the right sizes for its limit. */
                if (!first[i].has_sessions &&
                    (first[i].is_closed || (first[i].arena.n_extents == 0 && first[i].direct_bytes == 0)))
                        inherited_forget(b->inherited, &first[i]);
                else
                        list[n_used++] = &first[i];
        }
        if (list)
                qsort(list, n_used, sizeof(struct inherited_quota *), compare_ids);
        for (size_t i = 0; r == 0 && i < n_used; i++) {
                ledger_note_quota(b->ledger, list[i]->index);
                r = inherit_quota(b, t, list[i]);
        }
        ledger_note_nothing(b->ledger);
        free(list);
        return r;
}

/* The quotas that did not exist. */
static int add_quotas(struct broker *b, struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        for (size_t i = 0; t->config && i < t->config->n_quotas; i++) {
                const struct config_quota *to = &t->config->quotas[i];
                struct partition *p = &b->partitions[to->partition];
                uint64_t closed = closed_bytes(b, t->name, p->name);
                const struct inherited_quota *from;
                size_t n;
                struct quota_options options = {
                        .limit_bytes = max_u64(to->limit_bytes, closed),
                        .max_sessions = to->max_sessions,
                        .max_blocks = to->max_blocks,
                        .closed_bytes = closed,
                };
                int r;

                if (tenant_quota(t, p))
                        continue;
                r = broker_make_quota(b, t, to->partition, &options);
                if (r < 0) {
                        snprintf(ret_sentence, n_sentence,
                                 "the quota of tenant '%s' in partition '%s' could not be set up: %s",
                                 t->name, p->name, device_error(r));
                        return r;
                }
                account_set(&tenant_quota(t, p)->account, to->limit_bytes, to->reserve_bytes);

                /* A quota of this tenant that was not restored may have been growing. */
                from = inherited_find(b->inherited, t->name, p->name, &n);
                for (size_t k = 0; k < n; k++)
                        note_interrupted_growth(tenant_quota(t, p), from[k].growing_mib, from[k].oom_kills);
        }
        return 0;
}

/* The tenant with that name; one that the config no longer has gets a place as long as it has quotas.
 * NULL: there is no place. */
static struct tenant *tenant_for(struct broker *b, const char *name)
{
        struct tenant *t;

        for (size_t i = 0; i < b->selection.n; i++)
                if (strcmp(b->selection.order[i]->name, name) == 0)
                        return b->selection.order[i];
        t = broker_tenant_place(b);
        if (t)
                tenant_init_removed(t, name);
        return t;
}

static int inherit_tenants(struct broker *b)
{
        struct inherited *r = b->inherited;
        int error = 0;

        for (size_t i = 0, n; error == 0 && i < r->n_quotas; i += n) {
                struct inherited_quota *first = &r->quotas[i];
                struct tenant *t;

                /* Quotas are sorted by tenant. */
                for (n = 1; i + n < r->n_quotas && strcmp(first[n].tenant, first->tenant) == 0;)
                        n++;
                if (first->tenant[0] == '\0') /* damaged: its tenant is unknown */
                        continue;
                t = tenant_for(b, first->tenant);
                error = t ? inherit_tenant(b, t, first, n) : -ENOSPC;
                if (error == 0 && !t->config && t->n_quotas == 0)
                        broker_leave_place(b, t);
        }
        return error;
}

/* Also of quotas that were dropped because nothing of them was left: the operator's statistics continue. */
static void keep_lives(struct broker *b)
{
        for (size_t i = 0; i < b->inherited->n_quotas; i++) {
                const struct inherited_quota *from = &b->inherited->quotas[i];
                size_t partition = find_partition(b, from->partition);

                if (partition == b->n_partitions || from->is_lease)
                        continue;
                partition_restore_lifetime(&b->partitions[partition], &from->life);
                for (size_t k = 0; k < b->n_tenants; k++) {
                        struct tenant *t = &b->tenants[k];
                        struct quota *q = strcmp(t->name, from->tenant) == 0
                                                  ? tenant_quota(t, &b->partitions[partition])
                                                  : NULL;

                        if (q)
                                quota_restore_lifetime(q, &from->life);
                }
        }
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_keep_life(&b->partitions[i]);
}

/* Extents that resumed sessions may have mapped. */
static int note_extents(struct broker *b)
{
        const struct inherited *r = b->inherited;

        b->restored.extents = calloc(r->n_extents + 1, sizeof(*b->restored.extents));
        if (!b->restored.extents)
                return -ENOMEM;
        for (size_t i = 0; i < r->n_quotas; i++)
                for (size_t k = 0; r->quotas[i].quota && k < r->quotas[i].arena.n_extents; k++) {
                        uint32_t index = r->quotas[i].arena.extents[k];

                        if (ledger_extent_at(b->ledger, index)->is_leaving)
                                continue; /* for a session it is gone */
                        b->restored.extents[b->restored.n_extents++] =
                                (struct kept_record){ ledger_extent_at(b->ledger, index)->id, index };
                }
        qsort(b->restored.extents, b->restored.n_extents, sizeof(*b->restored.extents), kept_record_compare);
        return 0;
}

/* Backs what the previous process had not backed or had released, because it ended half-way or with a
 * device drained. A failure does not end existing sessions. */
static void back_quotas(struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        struct quota *q = b->tenants[i].quotas[k];
                        uint64_t limit = q->account.limit_bytes;
                        int r = quota_back_early(q);

                        if (r < 0 || (quota_is_preallocated(q) && q->account.own_bytes < limit))
                                log_warning("tenant '%s' in partition '%s': of its "
                                            "preallocated %s, %s are allocated; the rest is allocated on "
                                            "demand%s%s",
                                            q->tenant, q->partition->name, NUMBER_SIZE(limit),
                                            NUMBER_SIZE(q->account.own_bytes), r < 0 ? ": " : "",
                                            r < 0 ? device_error(r) : "");
                }
}

int inherit_quotas(struct broker *b, char *ret_sentence, size_t n_sentence)
{
        int r;

        inherited_finish(b->inherited, device_of, b);

        /* All that is charged must find room, whatever the limits of the new config say. Leases come after the
         * quotas that they are in, and after those that are new. */
        for (size_t i = 0; i < b->n_partitions; i++)
                account_set(&b->partitions[i].pool, NO_LIMIT, 0);
        r = inherit_tenants(b);
        for (size_t i = 0; r == 0 && i < b->selection.n; i++)
                r = add_quotas(b, b->selection.order[i], ret_sentence, n_sentence);
        if (r == 0)
                r = inherit_leases(b);
        for (size_t i = 0; i < b->n_partitions; i++)
                account_set(&b->partitions[i].pool, b->config->partitions[i].limit_bytes, 0);
        if (r < 0)
                return r;

        /* The limits of the config are in force. */
        guarantee_leases(b);
        keep_lives(b);
        r = note_extents(b);
        if (r == 0)
                back_quotas(b);
        return r;
}
