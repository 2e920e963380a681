/* Inherited quotas; see inherited.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/inherited.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/ledger/sort.h"

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

struct inherited_quota *inherited_find(const struct inherited *r, const char *tenant, const char *partition,
                                       size_t *ret_n)
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

void inherited_drop_session(struct ledger *l, uint32_t session)
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

void inherited_close(struct inherited *r, struct inherited_quota *q)
{
        clear_lease(r, q);
        q->is_closed = true;
        ledger_quota_close(r->ledger, q->index);
        inherited_clear(r, q);
}

void inherited_forget(struct inherited *r, struct inherited_quota *q)
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

void inherited_finish(struct inherited *r,
                      struct device *(*device_of)(void *userdata, const char *partition, bool *ret_clears),
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

int inherited_new(struct ledger *ledger, struct store *store, inherited_later_fn is_later, void *userdata,
                  struct inherited **ret)
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
