/* What was left; see remains.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/remains.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct key {
        uint32_t quota, index;
        uint64_t offset;
        int fd;
};

static int compare_keys(const void *x, const void *y)
{
        const struct key *p = x, *q = y;

        if (p->quota != q->quota)
                return p->quota < q->quota ? -1 : 1;
        return p->offset < q->offset ? -1 : p->offset > q->offset;
}

static int compare_quotas(const void *x, const void *y)
{
        const struct remains_quota *p = x, *q = y;
        int r = strcmp(p->tenant, q->tenant);

        if (r == 0)
                r = strcmp(p->partition, q->partition);
        if (r == 0)
                r = p->id < q->id ? -1 : p->id > q->id;
        return r;
}

/* ---- in order ------------------------------------------------------------ */

/* Sorts, and leaves the indexes; *keys is freed. */
static uint32_t *sort_keys(struct key *keys, size_t n)
{
        uint32_t *indexes = calloc(n + 1, sizeof(*indexes));

        if (indexes) {
                qsort(keys, n, sizeof(*keys), compare_keys);
                for (size_t i = 0; i < n; i++)
                        indexes[i] = keys[i].index;
        }
        free(keys);
        return indexes;
}

static void clear_exports(struct ledger *l, uint32_t extent)
{
        while (ledger_extent_at(l, extent)->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, ledger_extent_at(l, extent)->links.first_export);
}

static bool leaves_later(const struct remains *r, const struct ledger_extent *e)
{
        return r->is_later && r->is_later(r->userdata, ledger_quota_at(r->ledger, e->quota)->partition);
}

/* Of the extents that leave, those that the arena is to give back. No session has them any more. One
 * that is not in the store has been given back; only its record was left. */
static int take_leaving(struct remains *r, uint32_t index)
{
        const struct ledger_extent *e = ledger_extent_get(r->ledger, index);
        int fd;

        if (!leaves_later(r, e))
                return -1;
        fd = store_take_extent(r->store, e->store_key);
        clear_exports(r->ledger, index);
        if (fd < 0)
                ledger_extent_clear(r->ledger, index);
        return fd;
}

static int remains_read_extents(struct remains *r)
{
        uint32_t end = ledger_extent_end(r->ledger);
        struct key *keys = calloc((size_t)end + 1, sizeof(*keys));

        if (!keys)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_extent *e = ledger_extent_get(r->ledger, i);
                int fd = e && e->is_leaving ? take_leaving(r, i) : -1;

                if (e && (fd >= 0 || !e->is_leaving))
                        keys[r->n_extents++] = (struct key){ e->quota, i, e->offset, fd };
        }
        qsort(keys, r->n_extents, sizeof(*keys), compare_keys);
        r->fds = calloc(r->n_extents + 1, sizeof(*r->fds));
        for (size_t i = 0; i < r->n_extents; i++) {
                if (r->fds)
                        r->fds[i] = keys[i].fd;
                else if (keys[i].fd >= 0)
                        close(keys[i].fd);
        }
        r->extents = sort_keys(keys, r->n_extents);
        return r->extents && r->fds ? 0 : -ENOMEM;
}

static int remains_read_blocks(struct remains *r)
{
        uint32_t end = ledger_block_end(r->ledger);
        struct key *keys = calloc((size_t)end + 1, sizeof(*keys));

        if (!keys)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_block *b = ledger_block_get(r->ledger, i);

                if (b)
                        keys[r->n_blocks++] = (struct key){ b->quota, i, b->offset, -1 };
        }
        r->blocks = sort_keys(keys, r->n_blocks);
        return r->blocks ? 0 : -ENOMEM;
}

/* Each quota's part of the sorted lists. */
static int remains_slice(struct remains *r)
{
        uint32_t end = ledger_quota_end(r->ledger);
        struct remains_quota **by_index = calloc((size_t)end + 1, sizeof(*by_index));

        if (!by_index)
                return -ENOMEM;
        for (size_t i = 0; i < r->n_quotas; i++)
                by_index[r->quotas[i].index] = &r->quotas[i];
        for (size_t i = r->n_extents; i-- > 0;) {
                const struct ledger_extent *e = ledger_extent_at(r->ledger, r->extents[i]);
                struct remains_quota *q = by_index[e->quota];

                q->arena.extents = &r->extents[i];
                q->arena.fds = &r->fds[i];
                q->arena.n_extents++;
                q->n_bytes += e->n_bytes;
        }
        for (size_t i = r->n_blocks; i-- > 0;) {
                struct remains_quota *q = by_index[ledger_block_at(r->ledger, r->blocks[i])->quota];

                q->arena.blocks = &r->blocks[i];
                q->arena.n_blocks++;
        }
        free(by_index);
        return 0;
}

static int remains_read_quotas(struct remains *r)
{
        uint32_t end = ledger_quota_end(r->ledger);

        r->quotas = calloc((size_t)end + 1, sizeof(*r->quotas));
        if (!r->quotas)
                return -ENOMEM;
        for (uint32_t i = 0; i < end; i++) {
                const struct ledger_quota *from = ledger_quota_get(r->ledger, i);
                struct remains_quota *q = &r->quotas[r->n_quotas];

                if (!from)
                        continue;
                r->n_quotas++;
                q->index = i;
                q->id = from->id;
                q->is_closed = from->is_closed != 0;
                q->growing_mib = from->growing_mib;
                q->oom_kills = from->oom_kills;
                q->life = from->life;
                memcpy(q->tenant, from->tenant, sizeof(q->tenant));
                memcpy(q->partition, from->partition, sizeof(q->partition));
        }
        qsort(r->quotas, r->n_quotas, sizeof(*r->quotas), compare_quotas);
        return 0;
}

/* ---- by name ------------------------------------------------------------- */

static int compare_tenant(const struct remains *r, size_t i, const char *tenant, const char *partition)
{
        const struct remains_quota *q = &r->quotas[i];
        int order = strcmp(q->tenant, tenant);

        return order == 0 && partition ? strcmp(q->partition, partition) : order;
}

/* The first that is not before it. partition NULL: of all. */
static size_t remains_place(const struct remains *r, const char *tenant, const char *partition)
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

struct remains_quota *remains_find(const struct remains *r, const char *tenant, const char *partition,
                                   size_t *ret_n)
{
        size_t i = remains_place(r, tenant, partition), n = 0;

        while (i + n < r->n_quotas && compare_tenant(r, i + n, tenant, partition) == 0)
                n++;
        *ret_n = n;
        return n > 0 ? &r->quotas[i] : NULL;
}

size_t remains_first_of(const struct remains *r, const char *tenant)
{
        return remains_place(r, tenant, NULL);
}

static void remains_note_sessions(struct remains *r)
{
        for (uint32_t k = 0; k < ledger_session_end(r->ledger); k++) {
                const struct ledger_session *s = ledger_session_get(r->ledger, k);
                size_t i = s ? remains_place(r, s->tenant, NULL) : r->n_quotas;

                for (; i < r->n_quotas && compare_tenant(r, i, s->tenant, NULL) == 0; i++)
                        if (r->quotas[i].id < s->quotas_end)
                                r->quotas[i].has_sessions = true;
        }
}

/* ---- closing and forgetting ---------------------------------------------- */

static void clear_holds(struct ledger *l, uint32_t shared)
{
        while (ledger_shared_at(l, shared)->links.first_hold != LEDGER_NONE)
                ledger_hold_clear(l, ledger_shared_at(l, shared)->links.first_hold);
        ledger_shared_clear(l, shared);
}

/* All but the records of extents. */
static void remains_clear(struct remains *r, struct remains_quota *q)
{
        for (size_t i = 0; i < q->arena.n_blocks; i++) {
                uint32_t shared = ledger_block_at(r->ledger, q->arena.blocks[i])->shared;

                ledger_block_clear(r->ledger, q->arena.blocks[i]);
                if (shared != LEDGER_NONE)
                        clear_holds(r->ledger, shared);
        }
        q->arena.n_blocks = 0;
        for (size_t i = 0; i < q->arena.n_extents; i++) {
                int *fd = &r->fds[q->arena.extents + i - r->extents];
                const struct ledger_extent *e = ledger_extent_at(r->ledger, q->arena.extents[i]);

                clear_exports(r->ledger, q->arena.extents[i]);
                if (*fd >= 0 && e->is_leaving)
                        punch_discard(r->punch, *fd, e->n_bytes, e->quota);
                else if (*fd >= 0)
                        close(*fd);
                *fd = -1;
                (void)store_remove_extent(r->store, e->store_key, false);
        }
}

void remains_close(struct remains *r, struct remains_quota *q)
{
        q->is_closed = true;
        ledger_quota_close(r->ledger, q->index);
        remains_clear(r, q);
}

void remains_forget(struct remains *r, struct remains_quota *q)
{
        remains_clear(r, q);
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

/* It is not known which of them has what. */
static void remains_close_twins(struct remains *r)
{
        for (size_t i = 0; i < r->n_quotas; i++) {
                struct remains_quota *q = &r->quotas[i];
                size_t n_open = 0, n = 1;

                while (i + n < r->n_quotas && compare_tenant(r, i + n, q->tenant, q->partition) == 0)
                        n++;
                for (size_t k = 0; k < n; k++)
                        n_open += !q[k].is_closed;
                for (size_t k = 0; k < n; k++)
                        q[k].is_closed = q[k].is_closed || n_open > 1;
                i += n - 1;
        }
}

/* ---- extents on their way ------------------------------------------------ */

static void finish_one(struct remains *r, uint32_t index, struct device *device, bool clears)
{
        const struct ledger_extent *e = ledger_extent_at(r->ledger, index);
        struct arena_options options = {
                .ledger = r->ledger, .device = device, .store = r->store, .clears = clears
        };
        int fd = store_take_extent(r->store, e->store_key);

        if (device) {
                (void)arena_finish(&options, index, fd);
                return;
        }
        if (fd >= 0)
                close(fd);
        (void)store_remove_extent(r->store, e->store_key, false);
        clear_exports(r->ledger, index);
        ledger_extent_clear(r->ledger, index);
}

void remains_finish(struct remains *r,
                    struct device *(*device_of)(void *userdata, const char *partition, bool *ret_clears),
                    void *userdata)
{
        for (uint32_t i = 0; i < ledger_extent_end(r->ledger); i++) {
                const struct ledger_extent *e = ledger_extent_get(r->ledger, i);

                const char *partition;
                struct device *device;
                bool clears = false;

                if (!e || !e->is_leaving || leaves_later(r, e))
                        continue;
                partition = ledger_quota_at(r->ledger, e->quota)->partition;
                device = device_of(userdata, partition, &clears);
                finish_one(r, i, device, clears);
        }
}

/* ---- life ---------------------------------------------------------------- */

int remains_new(struct ledger *ledger, struct store *store, struct punch *punch, remains_later_fn is_later,
                void *userdata, struct remains **ret)
{
        struct remains *r = calloc(1, sizeof(*r));
        int error;

        if (!r)
                return -ENOMEM;
        r->ledger = ledger;
        r->store = store;
        r->punch = punch;
        r->is_later = is_later;
        r->userdata = userdata;
        error = remains_read_quotas(r);
        if (error == 0)
                error = remains_read_extents(r);
        if (error == 0)
                error = remains_read_blocks(r);
        if (error == 0)
                error = remains_slice(r);
        if (error < 0) {
                remains_free(r);
                return error;
        }
        remains_note_sessions(r);
        remains_close_twins(r);
        for (size_t i = 0; i < r->n_quotas; i++)
                for (size_t k = 0; !r->quotas[i].is_closed && k < r->quotas[i].arena.n_extents; k++) {
                        uint32_t extent = r->quotas[i].arena.extents[k];

                        if (ledger_extent_at(ledger, extent)->is_leaving)
                                continue; /* it was taken */
                        r->fds[r->quotas[i].arena.extents + k - r->extents] =
                                store_take_extent(store, ledger_extent_at(ledger, extent)->store_key);
                }
        for (size_t i = 0; i < r->n_quotas; i++)
                if (r->quotas[i].is_closed)
                        remains_close(r, &r->quotas[i]);
        *ret = r;
        return 0;
}

struct remains *remains_free(struct remains *r)
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
