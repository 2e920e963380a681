/* Statistics of an arena, its picture, and its check.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <errno.h>

uint64_t arena_pending_bytes(const struct arena *a)
{
        return a->totals.pending_bytes - a->totals.late_bytes;
}

bool arena_is_quiet(const struct arena *a)
{
        return a->totals.pending_bytes == 0 && a->totals.n_extents == 0 && !a->unreclaimed.is_asked;
}

uint64_t arena_suspended_bytes(const struct arena *a)
{
        return a->totals.suspended_bytes;
}

uint64_t arena_retiring_bytes(const struct arena *a)
{
        return a->totals.retiring_bytes - a->totals.late_bytes;
}

uint32_t arena_n_extents(const struct arena *a)
{
        return a->totals.n_extents;
}

uint64_t arena_huge_bytes(const struct arena *a)
{
        return a->totals.huge_bytes;
}

uint64_t arena_small_bytes(const struct arena *a)
{
        return a->totals.small_bytes;
}

bool arena_is_lost(const struct arena *a)
{
        return a->is_lost;
}

/* The allocator takes parked blocks for others. */
void arena_read_stats(const struct arena *a, struct bfc_stats *ret)
{
        bfc_read_stats(a->bfc, ret);
        ret->bytes_in_use -= a->totals.parked_bytes;
        ret->bytes_requested -= a->totals.parked_bytes;
        ret->bytes_reserved -= a->totals.away_bytes;
}

static bool arena_slot_leaves(const struct arena *a, size_t slot)
{
        return arena_slot_of(a, slot)->retired || arena_slot_of(a, slot)->memory.n_bytes == 0;
}

bool arena_is_retiring(const struct arena *a, uint64_t offset)
{
        return arena_slot_leaves(a, arena_slot_at(a, offset));
}

/* Of cuda-ipc the space has nothing else. */
static bool is_exact_slot(const struct arena *a, size_t slot)
{
        return a->layout->has_fds && arena_is_single(arena_region_at(a, arena_slot_of(a, slot)->range.begin));
}

/* From the first extent to the end of the last one, without exact blocks. */
static struct bfc_range arena_span(const struct arena *a)
{
        struct bfc_range span = { UINT64_MAX, 0 };

        for (size_t i = 0; i < a->slots.n; i++) {
                struct bfc_range range = arena_slot_of(a, i)->range;

                if (!arena_slot_is_backed(a, i) || is_exact_slot(a, i))
                        continue;
                span.begin = range.begin < span.begin ? range.begin : span.begin;
                span.end = range.end > span.end ? range.end : span.end;
        }
        return span.end > 0 ? span : (struct bfc_range){ 0, 0 };
}

static void arena_draw_slot(const struct arena *a, size_t slot, struct bfc_range at, struct picture *picture)
{
        picture_add(picture, at, &arena_slot_of(a, slot)->occupancy, arena_slot_leaves(a, slot));
}

/* Those of exact blocks, which are far away in the arena's space, from `at` on. NULL: only adds up. Returns the end. */
static uint64_t arena_draw_exact(const struct arena *a, uint64_t at, struct picture *picture)
{
        for (size_t i = a->regions.n_large; a->layout->has_fds && i < a->regions.n; i++) {
                const struct arena_region *r = &a->regions.items[i];

                if (!arena_slot_is_backed(a, r->first_slot))
                        continue;
                if (picture)
                        arena_draw_slot(a, r->first_slot, (struct bfc_range){ at, at + r->n_bytes }, picture);
                at += r->n_bytes;
        }
        return at;
}

void arena_draw(const struct arena *a, char ret_picture[PICTURE_CHARACTERS + 1])
{
        struct bfc_range span = arena_span(a);
        struct picture picture;

        picture_begin(&picture, (struct bfc_range){ span.begin, arena_draw_exact(a, span.end, NULL) });
        for (size_t i = 0; i < a->slots.n; i++)
                if (arena_slot_is_backed(a, i) && !is_exact_slot(a, i))
                        arena_draw_slot(a, i, arena_slot_range(a, i), &picture);
        (void)arena_draw_exact(a, span.end, &picture);
        picture_draw(&picture, ret_picture);
}

static const char *arena_check_retired(const struct arena *a)
{
        uint64_t n_suspended = 0, n_late = 0;

        for (size_t i = 0; i < a->slots.n; i++) {
                const struct arena_slot *s = arena_slot_of(a, i);

                if (!s->retired)
                        continue;
                if (s->extent == LEDGER_NONE ||
                    ledger_extent_at(a->o.partition->ledger, s->extent)->links.n_exports == 0)
                        return "a retired extent has no export";
                if (s->n_late > ledger_extent_at(a->o.partition->ledger, s->extent)->links.n_exports)
                        return "an extent has more late exports than exports";
                *(s->n_late > 0 ? &n_late : &n_suspended) += s->memory.n_bytes;
        }
        if (n_suspended != a->totals.suspended_bytes)
                return "the retired extents do not match the pending ones";
        if (a->totals.leaving_bytes + n_suspended + n_late != a->totals.retiring_bytes)
                return "the sum of the bytes to release is wrong";
        if (a->totals.retiring_bytes > a->totals.pending_bytes)
                return "more bytes are released than are pending";
        return NULL;
}

int arena_check(const struct arena *a, const char **ret_why)
{
        struct bfc_stats stats;
        uint64_t n_backed = 0, n_used = 0;
        uint32_t n_extents = 0;
        const char *why;
        int r;

        r = bfc_check(a->bfc, ret_why);
        if (r < 0)
                return r;
        why = arena_check_retired(a);
        if (why) {
                *ret_why = why;
                return -EBADMSG;
        }
        for (size_t i = 0; i < a->slots.n; i++) {
                const struct arena_slot *s = arena_slot_of(a, i);

                if (s->extent == LEDGER_NONE)
                        continue;
                n_extents++;
                n_backed += s->charge.n_bytes;
                if (s->charge.n_bytes != arena_slot_bytes(a, i)) {
                        *ret_why = "an extent's charge does not match its slot";
                        return -EBADMSG;
                }
                if (!occupancy_check(&s->occupancy)) {
                        *ret_why = "the cells of an extent have a wrong sum";
                        return -EBADMSG;
                }
                n_used += s->occupancy.used_bytes;
        }
        arena_read_stats(a, &stats);
        /* A block that waits for its backing is the allocator's already. */
        if (n_used > stats.bytes_in_use || (a->totals.pending_bytes == 0 && n_used != stats.bytes_in_use)) {
                *ret_why = "blocks in extents and blocks of the allocator differ";
                return -EBADMSG;
        }
        /* While extents are made their bytes are reserved and in no slot yet. */
        if (n_extents != a->totals.n_extents || n_backed > stats.bytes_reserved ||
            stats.bytes_reserved - n_backed > a->totals.pending_bytes) {
                *ret_why = "extents in slots and reserved bytes of the allocator differ";
                return -EBADMSG;
        }
        return 0;
}
