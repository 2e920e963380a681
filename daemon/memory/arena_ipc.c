/* The layout of share mode cuda-ipc: each region is one extent; see arena_fd.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <errno.h>

#include "daemon/base/number.h"

/* The lowest gap between regions that is large enough; its index in the regions. */
static int region_find_gap(const struct arena *a, uint64_t n_bytes, size_t *ret_index, uint64_t *ret_base)
{
        const struct arena_region *regions = a->regions.items;
        uint64_t base = 0;
        size_t i;

        for (i = 0; i < a->regions.n && regions[i].base - base < n_bytes; i++)
                base = regions[i].base + regions[i].n_bytes;
        if (n_bytes > BFC_MAX_SPACE - base)
                return -ENOMEM;
        *ret_index = i;
        *ret_base = base;
        return 0;
}

static int region_add(struct arena *a, uint64_t n_bytes, size_t *ret_slot)
{
        uint64_t base;
        size_t index;
        int r = region_find_gap(a, n_bytes, &index, &base);

        return r < 0 ? r : arena_open_single(a, index, base, n_bytes, false, ret_slot);
}

/* How large an extent is made for a block. */
static uint64_t new_extent_bytes(const struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        uint64_t unit = a->o.sizes.extent_bytes, own = round_up_u64(n_bytes, unit);
        uint64_t room = room_bytes - room_bytes % unit;

        if (n_bytes >= EXTENT_OWN_BYTES || room <= own)
                return own;
        return min_u64(room, round_up_u64(EXTENT_SHARED_BYTES, unit));
}

static int ipc_add_space(struct arena *a, uint64_t n_bytes, uint64_t room_bytes)
{
        if (n_bytes > BFC_MAX_SPACE || a->regions.n >= a->n_extents_max)
                return -ENOMEM;
        return region_add(a, new_extent_bytes(a, n_bytes, room_bytes), &a->regions.planned);
}

static int ipc_add_first_space(struct arena *a, uint64_t n_bytes, size_t *ret_first, size_t *ret_end)
{
        int r = region_add(a, n_bytes, ret_first);

        if (r == 0)
                *ret_end = *ret_first + 1;
        return r;
}

static uint64_t ipc_unbacked_bytes(struct arena *a, uint64_t n_bytes)
{
        return a->totals.n_extents == 0 && a->totals.pending_bytes == 0 ? n_bytes : 0;
}

static uint64_t ipc_growable(const struct arena *a, uint64_t room_bytes)
{
        return room_bytes - room_bytes % a->o.sizes.extent_bytes;
}

static uint64_t ipc_max_in_extent(const struct arena *a)
{
        (void)a;
        return BFC_MAX_SPACE;
}

/* One for each extent. */
static int ipc_restore_regions(struct arena *a, const struct arena_inherited *inherited, const char **ret_why)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < inherited->n_extents; i++) {
                const struct ledger_extent *e =
                        ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);
                size_t slot;

                *ret_why = "an extent is not aligned to the arena's extent size";
                r = e->n_bytes % a->o.sizes.extent_bytes == 0
                            ? arena_open_single(a, a->regions.n, e->offset, e->n_bytes, false, &slot)
                            : -EBADMSG;
        }
        return r == -EINVAL ? -EBADMSG : r;
}

const struct arena_layout arena_layout_ipc = {
        .limit_max_bytes = UINT64_MAX,
        .max_extents = UINT64_MAX,
        .alloc_in_extent = bfc_alloc,
        .plan_in_extent = bfc_plan_growth,
        .max_in_extent = ipc_max_in_extent,
        .add_space = ipc_add_space,
        .add_first_space = ipc_add_first_space,
        .unbacked_bytes = ipc_unbacked_bytes,
        .growable = ipc_growable,
        .drop_slot = arena_drop_single,
        .restore_regions = ipc_restore_regions,
};
