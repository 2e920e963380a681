/* Shared blocks of a ledger that is opened, and the copies of those that are parked; see open.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ledger/open.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The block of a shared record, if the block names it; else LEDGER_NONE. */
uint32_t opening_block_of_shared(struct opening *o, uint32_t index)
{
        const struct ledger_shared *s = record(table_of(o, TABLE_SHARED), index);
        const struct table *blocks = table_of(o, TABLE_BLOCK);

        if (!in_use(blocks, s->block) ||
            ((const struct ledger_block *)record(blocks, s->block))->shared != index)
                return LEDGER_NONE;
        return s->block;
}

uint32_t opening_quota_of_shared(struct opening *o, uint32_t index)
{
        uint32_t block = is_used(o, TABLE_SHARED, index) ? opening_block_of_shared(o, index) : LEDGER_NONE;

        return block != LEDGER_NONE ? ledger_block_at(o->l, block)->quota : LEDGER_NONE;
}

/* A record that no sound block names was never published, or its block was freed. */
static void clear_half_shared(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                if (opening_block_of_shared(o, i) == LEDGER_NONE)
                        uncommit(t, i);
}

static int compare_names(const void *x, const void *y, void *userdata)
{
        struct opening *o = userdata;
        uint32_t i = *(const uint32_t *)x, j = *(const uint32_t *)y;
        int r = strcmp(ledger_quota_at(o->l, opening_quota_of_shared(o, i))->tenant,
                       ledger_quota_at(o->l, opening_quota_of_shared(o, j))->tenant);

        return r != 0 ? r : strcmp(ledger_shared_at(o->l, i)->name, ledger_shared_at(o->l, j)->name);
}

/* After blocks were checked. A name belongs to one block of the tenant, over all its partitions. */
int opening_finish_shared(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED);
        uint32_t *names = calloc((size_t)t->n_touched + 1, sizeof(*names));
        bool *is_twin = calloc((size_t)t->n_touched + 1, sizeof(*is_twin));
        size_t n = 0;

        clear_half_shared(o);
        if (!names || !is_twin) {
                free(names);
                free(is_twin);
                return -ENOMEM;
        }
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                names[n++] = i;
        qsort_r(names, n, sizeof(*names), compare_names, o);
        for (size_t i = 1; i < n; i++)
                if (compare_names(&names[i - 1], &names[i], o) == 0)
                        is_twin[i - 1] = is_twin[i] = true;
        for (size_t i = 0; i < n; i++)
                if (is_twin[i])
                        opening_reject_shared(o, names[i], "its name is used twice");
        free(names);
        free(is_twin);
        return 0;
}

/* ---- after all tables were checked --------------------------------------------- */

/* Metadata that no shared record names any more, or names yet. */
static void clear_unused_metadata(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_METADATA), *shared = table_of(o, TABLE_SHARED);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                uint32_t of = ledger_metadata_at(o->l, i)->shared;

                if (!in_use(shared, of) || ledger_shared_at(o->l, of)->metadata != i)
                        uncommit(t, i);
        }
}

/* A shared block that is not kept and has no references: the daemon died after it stored that the block is not kept
 * any more, and before it freed the block. */
static int finish_forgotten(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SHARED), *refs = table_of(o, TABLE_REF);
        bool *is_referenced = calloc((size_t)t->n_touched + 1, sizeof(*is_referenced));

        if (!is_referenced)
                return -ENOMEM;
        for (uint32_t i = table_next(refs, 0); i != LEDGER_NONE; i = table_next(refs, i + 1))
                is_referenced[((const struct ledger_ref *)record(refs, i))->shared] = true;
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                if (!is_referenced[i] && ledger_shared_at(o->l, i)->keep_ms == 0) {
                        uncommit(table_of(o, TABLE_BLOCK), ledger_shared_at(o->l, i)->block);
                        uncommit(t, i);
                }
        free(is_referenced);
        return 0;
}

/* Quotas. A bad one has no name. */
static bool is_of_one_tenant(struct opening *o, uint32_t quota, uint32_t other)
{
        const char *tenant = ledger_quota_at(o->l, quota)->tenant,
                   *others = ledger_quota_at(o->l, other)->tenant;

        return tenant[0] == '\0' || others[0] == '\0' || strcmp(tenant, others) == 0;
}

/* The copy was not named yet, or the block is awake again or gone. */
static bool is_unused_copy(struct opening *o, uint32_t index)
{
        const struct ledger_block *copy = record(table_of(o, TABLE_BLOCK), index);
        uint32_t block;

        if (copy->parked != LEDGER_IS_COPY || copy->shared == LEDGER_NONE)
                return false;
        block = is_used(o, TABLE_SHARED, copy->shared) ? opening_block_of_shared(o, copy->shared)
                                                       : LEDGER_NONE;
        return block == LEDGER_NONE || ledger_block_at(o->l, block)->parked != copy->id;
}

/* After everything else was checked. */
static void finish_copies(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_BLOCK);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_block *copy = record(t, i);

                if (is_unused_copy(o, i))
                        uncommit(t, i);
                else if (copy->parked == LEDGER_IS_COPY && copy->shared != LEDGER_NONE &&
                         !is_of_one_tenant(o, copy->quota, opening_quota_of_shared(o, copy->shared)))
                        opening_reject_block(o, i, "it is the copy of another tenant's block");
        }
}

/* No session uses a parked block. The quota is that of the block: none that a copy can be in. */
static void heal_refs(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_REF);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                struct ledger_ref *ref = record(t, i);
                uint32_t block = opening_block_of_shared(o, ref->shared);

                if (block != LEDGER_NONE && ref->parks_to == 0 &&
                    ledger_block_is_parked(ledger_block_at(o->l, block)))
                        ref->parks_to = ledger_block_at(o->l, block)->quota + 1;
        }
}

int opening_check_shared(struct opening *o)
{
        int r = finish_forgotten(o);

        if (r < 0)
                return r;
        finish_copies(o);
        heal_refs(o);
        clear_unused_metadata(o);
        return 0;
}
