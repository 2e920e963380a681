/* Parked blocks: the allocator keeps them as blocks in use, so their offsets stay reserved. And the memory for
 * their copies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

bool arena_is_whole(const struct arena *a, uint64_t offset, uint64_t n_bytes)
{
        size_t last, first = arena_slots(a, offset, n_bytes, &last);

        return a->layout->has_fds && arena_slot_range(a, first).begin == offset &&
               arena_slot_range(a, last).end == offset + n_bytes;
}

/* ---- extents that no session has received ---------------------------------------- */

/* In a range of wholly free extents, the place that wastes the least, if that is less than in `best`. None that wastes
 * more than the copy has: then new extents are better. */
static void find_unseen(const struct arena *a, struct bfc_range range, uint64_t n_bytes,
                        struct bfc_range *best)
{
        size_t first = arena_slot_at(a, range.begin), last = arena_slot_at(a, range.end - 1);
        uint64_t sum = 0;

        /* The window of unseen extents ends at `slot`, and begins as late as n_bytes allow. */
        for (size_t slot = first; slot <= last; slot++) {
                if (!ledger_extent_at(a->o.partition->ledger, arena_slot_of(a, slot)->extent)->is_unseen) {
                        first = slot + 1;
                        sum = 0;
                        continue;
                }
                sum += arena_slot_bytes(a, slot);
                while (sum - arena_slot_bytes(a, first) >= n_bytes)
                        sum -= arena_slot_bytes(a, first++);
                if (sum >= n_bytes && sum - n_bytes <= n_bytes &&
                    (best->end == best->begin || sum < best->end - best->begin))
                        *best = (struct bfc_range){ arena_slot_range(a, first).begin,
                                                    arena_slot_range(a, slot).end };
        }
}

int arena_alloc_unseen(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset,
                       uint64_t *ret_n_bytes)
{
        struct bfc_range best = { 0, 0 };
        uint64_t n_free;
        size_t n = bfc_plan_release(a->bfc, UINT64_MAX, NULL, a->scratch.ranges, a->scratch.n_room, &n_free);
        int r;

        while (n-- > 0)
                find_unseen(a, a->scratch.ranges[n], n_bytes, &best);
        if (best.begin == best.end)
                return BFC_NO_FIT;
        r = bfc_alloc_range(a->bfc, best, ret_handle);
        if (r < 0)
                return r;
        *ret_offset = best.begin;
        *ret_n_bytes = best.end - best.begin;
        arena_count_block(a, best.begin, best.end - best.begin, occupancy_add);
        return 0;
}

/* ---- parked blocks ----------------------------------------------------------------- */

uint64_t arena_parked_bytes(const struct arena *a)
{
        return a->totals.parked_bytes;
}

/* n_bytes more (modulo 2^64). */
void arena_count_parked(struct arena *a, uint64_t n_bytes)
{
        a->totals.parked_bytes += n_bytes;
        if (a->o.parked_bytes)
                *a->o.parked_bytes += n_bytes;
}

size_t arena_slots_of_block(const struct arena *a, bfc_handle handle, struct bfc_info *ret, size_t *ret_last)
{
        int r = bfc_info(a->bfc, handle, ret);

        assert(r == 0);
        (void)r;
        return arena_slots(a, ret->offset, ret->n_bytes, ret_last);
}

bool arena_is_away(const struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last, slot = arena_slots_of_block(a, handle, &info, &last);
        bool is_away = !arena_slot_of(a, slot)->waking;

        for (; slot <= last; slot++)
                is_away = is_away && !arena_slot_is_backed(a, slot);
        return is_away;
}

/* The place is unbacked space again. Without memory for that it stays reserved. */
static void arena_vacate(struct arena *a, bfc_handle handle, const struct bfc_info *info)
{
        struct bfc_range range = { info->offset, info->offset + info->n_bytes };
        int r;

        /* With this memory none of the calls below can fail. */
        if (bfc_release_reserve(a->bfc) < 0)
                return;
        arena_count_parked(a, -info->n_bytes);
        a->totals.away_bytes -= info->n_bytes;
        r = bfc_dealloc(a->bfc, handle);
        if (r == 0)
                r = bfc_release_begin(a->bfc, range);
        if (r == 0)
                r = bfc_release_commit(a->bfc, range);
        assert(r == 0);
        if (arena_is_single(arena_region_at(a, range.begin))) {
                arena_unkeep_exact(a, range.begin);
                a->layout->drop_slot(a, arena_slot_at(a, range.begin));
        }
}

/* Extents that still leave are waited for: release_done() calls this again. */
void arena_drop_parked(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last, first = arena_slots_of_block(a, handle, &info, &last);

        /* A wake is in progress: growth_woken() frees the block. */
        if (arena_slot_of(a, first)->waking) {
                assert(arena_slot_of(a, first)->waking->wakes);
                arena_slot_of(a, first)->waking->is_dropped = true;
                return;
        }
        for (size_t slot = last + 1; slot-- > first;) {
                if (!arena_slot_is_backed(a, slot))
                        continue;
                arena_slot_of(a, slot)->dropped = handle; /* often the last that leaves */
                return;
        }
        arena_vacate(a, handle, &info);
}

struct worker_lane *arena_copy_lane(struct arena *a)
{
        return &a->copies;
}

void growth_woken(struct operation *op)
{
        struct arena *a = op->arena;
        struct arena_slot *first = arena_slot_of(a, op->items[0].slot);
        bool is_awake = op->result == 0 && !op->is_dropped;

        /* The undo stays with the block until its contents are back: arena_wake_commit() frees it. */
        first->waking = is_awake ? op->undo : NULL;
        if (!is_awake)
                free(op->undo);
        growth_finish(op);

        /* The growth failed: the block is parked as before, or was freed meanwhile. */
        if (op->result < 0) {
                if (op->is_dropped)
                        arena_drop_parked(a, op->handle);
                op->handle = 0;
                return;
        }

        if (arena_is_single(arena_region_at(a, op->plan.offset)))
                arena_unkeep_exact(a, op->plan.offset);
        arena_count_parked(a, -op->plan.n_bytes);
        a->totals.away_bytes -= op->plan.n_bytes;
        arena_count_block(a, op->plan.offset, op->plan.n_bytes, occupancy_add);
        if (op->is_dropped) {
                (void)arena_dealloc(a, op->handle);
                op->handle = 0;
        }
}

void arena_wake_commit(struct arena *a, bfc_handle handle)
{
        struct bfc_info info;
        size_t last;
        struct arena_slot *first = arena_slot_of(a, arena_slots_of_block(a, handle, &info, &last));

        free(first->waking);
        first->waking = NULL;
}

int arena_restore_parked(struct arena *a, const struct ledger_block *b)
{
        struct bfc_range range = { b->offset, b->offset + b->n_bytes };
        size_t slot, last;
        uint64_t end = arena_large_end(a);
        int r = 0;

        /* Its place is one extent in a region of its own, or a range of the large regions. */
        if (b->n_bytes > 0 && b->offset >= end)
                r = arena_restore_parked_exact(a, b);
        else if (b->n_bytes == 0 || b->n_bytes > end - b->offset)
                r = -EBADMSG;
        if (r == 0)
                r = bfc_back(a->bfc, range);
        if (r < 0)
                return r == -EINVAL ? -EBADMSG : r;

        /* Extents that had not left when the previous daemon ended are released again (arena_release_parked()). */
        arena_count_parked(a, b->n_bytes);
        for (slot = arena_slots(a, b->offset, b->n_bytes, &last); slot <= last; slot++) {
                if (arena_slot_is_backed(a, slot))
                        arena_slot_of(a, slot)->is_parked = true;
                else
                        a->totals.away_bytes += arena_slot_bytes(a, slot);
        }
        return 0;
}
