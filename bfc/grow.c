/* Growth: blocks over unbacked space; and blocks that must be inside one extent, with or without growth.
 *
 * None of this is on the path of an ordinary allocation. The calls that search a place visit each hole
 * and each chunk next to one, or each free chunk as large as an extent, never all chunks.
 *
 * A pending block is a run of chunks that record their previous state, so that it can be undone: the
 * first is KIND_PENDING and has the stamp and the block's size, the others are KIND_PIECE and refer to
 * the first. Those that were holes have PIECE_NEW; the rest of the last new extent follows as PIECE_NEW |
 * PIECE_TAIL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "bfc/core.h"
#include "bfc/index.h"

#include <errno.h>

/* ---- planning growth ---------------------------------------------------------------- */

/* A place in a stretch. */
struct place {
        uint32_t chunk; /* at or before the offset, in the same stretch; 0: no place */
        uint32_t offset;
        uint32_t n_new;
        uint32_t n_touched; /* extents that the block touches; 0: it does not matter */
};

/* The number of extents that [x, y) touches. */
static uint32_t n_touched(const struct bfc *b, const struct region *r, uint32_t x, uint32_t y)
{
        return grid_number(b, r, y - 1) - grid_number(b, r, x) + 1;
}

/* The fewest new bytes; on ties, for a block as large as some extents, the fewest extents touched; then
 * the lowest offset. So such a block begins in the rest of a partly used extent only if that saves one,
 * and leaves whole extents when it is freed. */
static void place_better(const struct bfc *b, const struct region *r, struct place *best, struct place p,
                         uint32_t n)
{
        if (n % b->extent == 0)
                p.n_touched = n_touched(b, r, p.offset, p.offset + n);
        if (best->chunk == 0 || p.n_new < best->n_new)
                *best = p;
        else if (p.n_new == best->n_new && (p.n_touched < best->n_touched ||
                                            (p.n_touched == best->n_touched && p.offset < best->offset)))
                *best = p;
}

/* A position that moves upwards through a stretch. */
struct cursor {
        uint32_t chunk;
        uint32_t n_below; /* unbacked granules of the chunks before it */
};

/* Moves to the chunk that contains granule y - 1. Returns the unbacked granules of the stretch below y,
 * counting a partial extent wholly. */
static uint32_t cursor_to(const struct bfc *b, const struct region *r, struct cursor *cur, uint32_t y)
{
        const struct chunk *c = chunk_at(b, cur->chunk);

        while (chunk_end(c) < y) {
                VISIT();
                if (chunk_kind(c) == KIND_HOLE)
                        cur->n_below += c->size;
                cur->chunk = c->next;
                c = chunk_at(b, cur->chunk);
        }
        return cur->n_below + (chunk_kind(c) == KIND_HOLE ? grid_up(b, r, y) - c->addr : 0);
}

/* How often a block that ends at y, in or after the hole at the cursor, can move down by an extent and
 * each time leave a full unbacked extent at its upper end. */
static uint32_t free_moves(const struct bfc *b, const struct region *r, const struct chunk *c, uint32_t y)
{
        uint32_t low = c->addr < r->body ? r->body : c->addr, top = grid_down(b, r, y - 1);

        if (chunk_kind(c) != KIND_HOLE || top < low || grid_up(b, r, y) - top != b->extent)
                return 0;
        return (top - low) / b->extent + 1;
}

/* Tries the extent boundaries above the start of the stretch, up to the end of the zones, and the first
 * one beyond. */
static void plan_zones(const struct bfc *b, const struct region *r, uint32_t first, struct cursor *upper,
                       uint32_t end, uint32_t n, struct place *best)
{
        struct cursor lower = { first, 0 };
        uint32_t x = grid_up(b, r, chunk_at(b, first)->addr + 1);

        while (x <= end - n) {
                struct place p = { .offset = x };

                VISIT();
                p.n_new = cursor_to(b, r, upper, x + n) - cursor_to(b, r, &lower, x);
                p.chunk = lower.chunk;
                place_better(b, r, best, p, n);
                if (x >= r->body)
                        break;
                x = grid_up(b, r, x + 1);
        }
}

/* Looks for the best place for n granules in the stretch that begins with chunk `first` and ends at
 * `end`.
 *
 * As the position x of a block rises, its new bytes decrease only where x becomes the end of an unbacked
 * extent. The number of touched extents decreases only where x becomes an extent boundary; if extents
 * have one size, it is constant from one boundary to the next. So the best x is the stretch's start, a
 * boundary up to the end of the zones, the first boundary, or the end of an unbacked extent. All
 * boundaries up to the end of the zones are tried. Beyond, of the ends in one hole, X is the largest at
 * which the block still fits: from one end to the next lower one, the block gains a full extent below
 * (only a region's last extent has another size, and it has no higher end inside the region) and leaves
 * at most one extent above, which is at most a full one. So no lower end is better than X, and equally
 * good ones follow X directly, one for each move that leaves a full unbacked extent. So there is one look
 * per hole and per extent of the zones, and a second cursor for the upper end, which never moves back. */
static void plan_stretch(const struct bfc *b, const struct region *r, uint32_t first, uint32_t end,
                         uint32_t n, struct place *best)
{
        uint32_t begin = chunk_at(b, first)->addr, n_below = 0;
        struct cursor upper = { first, 0 };
        struct place p = { .chunk = first, .offset = begin };

        p.n_new = cursor_to(b, r, &upper, begin + n);
        place_better(b, r, best, p, n);
        plan_zones(b, r, first, &upper, end, n, best);
        for (uint32_t i = first; i != r->edge && end - chunk_at(b, i)->addr > n; i = chunk_at(b, i)->next) {
                const struct chunk *c = chunk_at(b, i);
                uint32_t lowest, x, moves;

                VISIT();
                if (chunk_kind(c) != KIND_HOLE)
                        continue;
                lowest = grid_up(b, r, c->addr + 1);
                if (lowest < r->body)
                        lowest = r->body;
                x = chunk_end(c) <= end - n ? chunk_end(c) : grid_down(b, r, end - n);
                if (x >= lowest) {
                        p.n_new = cursor_to(b, r, &upper, x + n) - n_below - (x - c->addr);
                        moves = free_moves(b, r, chunk_at(b, upper.chunk), x + n);
                        if (moves > (x - lowest) / b->extent)
                                moves = (x - lowest) / b->extent;
                        p.chunk = i;
                        p.offset = x - moves * b->extent;
                        place_better(b, r, best, p, n);
                }
                n_below += c->size;
        }
}

static bool in_stretch(const struct chunk *c)
{
        enum kind kind = chunk_kind(c);

        return kind == KIND_FREE || kind == KIND_HOLE;
}

/* The best place for n granules: that of bfc_alloc(), or else the one that needs the fewest new bytes. */
static struct place find_place(const struct bfc *b, uint32_t n)
{
        struct place best = { .chunk = index_find(b, n) };

        if (best.chunk != 0) {
                best.offset = chunk_at(b, best.chunk)->addr;
                return best;
        }
        for (uint32_t i = b->holes; i != 0; i = chunk_at(b, i)->stamp) {
                const struct chunk *c = chunk_at(b, i);
                uint32_t first = i, end = chunk_end(c);

                VISIT();
                /* Free chunks and holes alternate; only the stretch's first hole continues. */
                if (chunk_kind(chunk_at(b, c->prev)) == KIND_FREE) {
                        first = c->prev;
                        if (chunk_kind(chunk_at(b, chunk_at(b, first)->prev)) == KIND_HOLE)
                                continue;
                }
                for (c = chunk_at(b, c->next); in_stretch(c); c = chunk_at(b, c->next)) {
                        VISIT();
                        end = chunk_end(c);
                }
                if (end - chunk_at(b, first)->addr >= n)
                        plan_stretch(b, bfc_region_at(b, chunk_at(b, first)->addr), first, end, n, &best);
        }
        return best;
}

/* ---- places in one extent ---------------------------------------------------------------- */

/* The lowest extent boundary from the boundary `addr` on at which an extent of at least n granules
 * begins; n is at most the largest extent's size. Only the region's last extent, which its end may
 * shorten, can be smaller nevertheless. */
static uint32_t extent_from(const struct bfc *b, const struct region *r, uint32_t addr, uint32_t n)
{
        uint32_t zone = 0, begin;

        if (grid_size(b, r, addr) >= n)
                return addr;
        while (zone < r->n_zones && r->small << zone < n)
                zone++;
        begin = r->base + r->first + r->per_zone * r->small * ((UINT32_C(1) << zone) - 1);
        return addr > begin ? addr : begin;
}

/* The lowest place from `addr` on at which n granules, at most the largest extent's size, cross no extent
 * boundary, unless the region ends before. */
static uint32_t uncrossed_from(const struct bfc *b, uint32_t addr, uint32_t n)
{
        const struct region *r = bfc_region_at(b, addr);
        uint32_t end = grid_up(b, r, addr + 1);

        if (end - addr >= n)
                return addr;
        return end < region_end(r) ? extent_from(b, r, end, n) : end;
}

static bool holds_uncrossed(const struct bfc *b, uint32_t i, uint32_t n)
{
        const struct chunk *c = chunk_at(b, i);
        uint32_t x = uncrossed_from(b, c->addr, n);

        return x < chunk_end(c) && chunk_end(c) - x >= n;
}

/* The next one of the heap below `top` outside of the subtree of i, parents first; 0: no more. */
static uint32_t equal_beside(const struct bfc *b, uint32_t top, uint32_t i)
{
        while (i != top) {
                uint32_t slot = chunk_at(b, i)->slot, up = SLOT_OWNER(slot);

                if (slot == SLOT_CHILD(up, 0) && chunk_at(b, up)->child[1] != 0)
                        return chunk_at(b, up)->child[1];
                i = up;
        }
        return 0;
}

/* Of the chunks as large as node i, the lowest that can contain n granules without crossing; 0: none.
 * Chunks below one that can are higher, so only those that cannot, and their direct children, are
 * visited. */
static uint32_t lowest_equal(const struct bfc *b, uint32_t i, uint32_t n)
{
        uint32_t top = chunk_at(b, i)->equal, best = 0;

        VISIT();
        if (holds_uncrossed(b, i, n))
                return i;
        for (i = top; i != 0;) {
                const struct chunk *c = chunk_at(b, i);
                uint32_t below = 0;

                VISIT();
                if (best == 0 || c->addr < chunk_at(b, best)->addr) {
                        if (holds_uncrossed(b, i, n))
                                best = i;
                        else
                                below = c->child[0] != 0 ? c->child[0] : c->child[1];
                }
                i = below != 0 ? below : equal_beside(b, top, i);
        }
        return best;
}

/* The smallest free chunk that can contain n granules in one extent, the lowest on ties. One that is
 * large enough and cannot crosses an extent boundary, so there are fewer of those than backed extents. */
static struct place find_free_in_extent(const struct bfc *b, uint32_t n)
{
        struct place p = { .chunk = 0 };

        for (uint32_t i = index_find(b, n); i != 0; i = index_find(b, chunk_at(b, i)->size + 1)) {
                p.chunk = lowest_equal(b, i, n);
                if (p.chunk == 0)
                        continue;
                p.offset = uncrossed_from(b, chunk_at(b, p.chunk)->addr, n);
                return p;
        }
        return p;
}

/* A free chunk that can contain n granules in one extent, or the best unbacked extent. Extent sizes only rise
 * within a region, except that of its last one. So in each hole only the first, the first later one that is large
 * enough, and the last one are tried. */
static struct place find_place_in_extent(const struct bfc *b, uint32_t n)
{
        struct place best = find_free_in_extent(b, n);

        if (best.chunk != 0)
                return best;
        for (uint32_t i = b->holes; i != 0; i = chunk_at(b, i)->stamp) {
                const struct chunk *c = chunk_at(b, i);
                const struct region *r = bfc_region_at(b, c->addr);
                uint32_t second = grid_up(b, r, c->addr + 1);
                uint32_t begins[3] = { c->addr, second, grid_down(b, r, chunk_end(c) - 1) };

                VISIT();
                if (second < chunk_end(c))
                        begins[1] = extent_from(b, r, second, n);
                for (unsigned k = 0; k < 3; k++) {
                        struct place p = { .chunk = i, .offset = begins[k] };

                        if (begins[k] >= chunk_end(c))
                                continue;
                        p.n_new = grid_up(b, r, begins[k] + 1) - begins[k];
                        if (p.n_new >= n)
                                place_better(b, r, &best, p, n);
                }
        }
        return best;
}

/* ---- whole extents ----------------------------------------------------------------------- */

/* With fewer extents than this in a block the rest of one would be too large a part of it for the blocks after it. */
#define FEW_EXTENTS 4u

/* The best run of unbacked extents with at least n granules; *ret_n: how many it has. is_few: on ties the one with the
 * fewest extents. In each hole all boundaries up to the end of the zones are tried, and the first one beyond: from
 * there on all runs are equal, except one that ends with the region. */
static struct place find_whole_place(const struct bfc *b, uint32_t n, bool is_few, uint32_t *ret_n)
{
        struct place best = { .chunk = 0 };

        for (uint32_t i = b->holes; i != 0; i = chunk_at(b, i)->stamp) {
                const struct chunk *c = chunk_at(b, i);
                const struct region *r = bfc_region_at(b, c->addr);
                uint32_t x = c->addr;

                VISIT();
                while (x < chunk_end(c) && chunk_end(c) - x >= n) {
                        struct place p = { .chunk = i, .offset = x, .n_new = grid_up(b, r, x + n) - x };

                        VISIT();
                        if (is_few) {
                                p.n_touched = n_touched(b, r, x, x + n);
                                if (p.n_touched < FEW_EXTENTS)
                                        p.n_touched = FEW_EXTENTS;
                        }
                        place_better(b, r, &best, p, 1);
                        if (x >= r->body)
                                break;
                        x = grid_up(b, r, x + 1);
                }
        }
        *ret_n = best.n_new;
        return best;
}

/* ---- plans --------------------------------------------------------------------------------- */

static void place_to_growth(const struct bfc *b, const struct place *p, uint64_t n_bytes, bool in_extent,
                            struct bfc_growth *ret)
{
        const struct region *r = bfc_region_at(b, p->offset);
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT);

        *ret = (struct bfc_growth){
                .offset = to_bytes(p->offset),
                .n_bytes = to_bytes(n),
                .n_requested = n_bytes,
                .span = { to_bytes(grid_down(b, r, p->offset)), to_bytes(grid_up(b, r, p->offset + n)) },
                .new_bytes = to_bytes(p->n_new),
                .in_extent = in_extent,
        };
}

static int find_whole_plan(const struct bfc *b, uint64_t n_bytes, bool is_few, struct place *ret_place,
                           struct bfc_growth *ret)
{
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT);

        if (n_bytes - 1 >= BFC_MAX_SPACE)
                return -EINVAL;
        *ret_place = find_whole_place(b, n, is_few, &n);
        if (ret_place->chunk == 0)
                return BFC_NO_FIT;
        place_to_growth(b, ret_place, to_bytes(n), false, ret);
        ret->is_whole = true;
        ret->is_few = is_few;
        return 0;
}

/* The best place as a plan. BFC_NO_FIT, -EINVAL. */
static int find_plan(const struct bfc *b, uint64_t n_bytes, bool in_extent, struct place *ret_place,
                     struct bfc_growth *ret)
{
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT);

        if (n_bytes - 1 >= (in_extent ? to_bytes(b->extent) : BFC_MAX_SPACE))
                return -EINVAL;
        *ret_place = in_extent ? find_place_in_extent(b, n) : find_place(b, n);
        if (ret_place->chunk == 0)
                return BFC_NO_FIT;
        place_to_growth(b, ret_place, n_bytes, in_extent, ret);
        return 0;
}

int bfc_plan_growth(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes, struct bfc_growth *ret)
{
        struct place p;
        int r = find_plan(b, n_bytes, false, &p, ret);

        return r == 0 && ret->new_bytes > max_new_bytes ? BFC_OVER_BUDGET : r;
}

int bfc_plan_growth_in_extent(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                              struct bfc_growth *ret)
{
        struct place p;
        int r = find_plan(b, n_bytes, true, &p, ret);

        return r == 0 && ret->new_bytes > max_new_bytes ? BFC_OVER_BUDGET : r;
}

int bfc_plan_growth_whole(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                          struct bfc_growth *ret)
{
        struct place p;
        int r = find_whole_plan(b, n_bytes, false, &p, ret);

        return r == 0 && ret->new_bytes > max_new_bytes ? BFC_OVER_BUDGET : r;
}

int bfc_plan_growth_few(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes, struct bfc_growth *ret)
{
        struct place p;
        int r = find_whole_plan(b, n_bytes, true, &p, ret);

        return r == 0 && ret->new_bytes > max_new_bytes ? BFC_OVER_BUDGET : r;
}

/* ---- pending blocks ------------------------------------------------------------------ */

static bool is_piece_of(const struct bfc *b, uint32_t i, uint32_t head)
{
        return chunk_kind(chunk_at(b, i)) == KIND_PIECE && chunk_at(b, i)->link == head;
}

/* Turns the part of chunk i below y into a piece of a pending block; the part above y keeps its state,
 * except that the rest of a partial extent becomes the tail. Returns the piece. */
static uint32_t take_piece(struct bfc *b, uint32_t i, uint32_t y)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t piece = i, rest;

        VISIT();
        if (c->slot == 0) {
                uint32_t up = y < chunk_end(c) ? grid_up(b, bfc_region_at(b, c->addr), y) : y;

                bfc_list_take(b, i);
                if (up < chunk_end(c)) {
                        rest = bfc_cut(b, i, up);
                        bfc_list_put(b, rest, KIND_HOLE);
                }
                if (y < chunk_end(c)) {
                        rest = bfc_cut(b, i, y);
                        b->idle += chunk_at(b, rest)->size;
                        count_reserved(b, chunk_at(b, rest)->size);
                        chunk_set_meta(chunk_at(b, rest), KIND_PIECE, PIECE_NEW | PIECE_TAIL);
                        b->n_pieces++;
                }
                count_reserved(b, c->size);
                chunk_set_meta(c, KIND_PIECE, PIECE_NEW);
        } else if (y < chunk_end(c)) {
                piece = record_new(b);
                link_before(b, piece, i);
                chunk_at(b, piece)->addr = c->addr;
                chunk_at(b, piece)->size = y - c->addr;
                index_rekey(b, i, y, chunk_end(c) - y);
                chunk_set_meta(chunk_at(b, piece), KIND_PIECE, 0);
        } else {
                index_remove(b, i);
                chunk_set_meta(c, KIND_PIECE, 0);
        }
        chunk_at(b, piece)->stamp = 0;
        b->n_pieces++;
        return piece;
}

/* Splits a free chunk or a hole at x; returns the upper part. */
static uint32_t split_at(struct bfc *b, uint32_t i, uint32_t x)
{
        bool free = chunk_at(b, i)->slot != 0;
        uint32_t upper;

        if (free) {
                index_remove(b, i);
                chunk_set_meta(chunk_at(b, i), KIND_NONE, 0);
        }
        upper = bfc_cut(b, i, x);
        if (free) {
                index_insert(b, i);
                index_insert(b, upper);
        } else {
                bfc_list_put(b, upper, KIND_HOLE);
        }
        return upper;
}

/* Makes [x, y) pending; `i` is at or before x. At most three new records. */
static uint32_t take_place(struct bfc *b, uint32_t i, uint32_t x, uint32_t y)
{
        uint32_t head = 0;

        while (chunk_end(chunk_at(b, i)) <= x)
                i = chunk_at(b, i)->next;
        if (chunk_at(b, i)->addr < x)
                i = split_at(b, i, x);
        for (;;) {
                uint32_t next = chunk_at(b, i)->next;
                bool last = chunk_end(chunk_at(b, i)) >= y;

                i = take_piece(b, i, y < chunk_end(chunk_at(b, i)) ? y : chunk_end(chunk_at(b, i)));
                if (head == 0)
                        head = i;
                chunk_at(b, i)->link = head;
                if (last)
                        break;
                i = next;
        }
        i = chunk_at(b, i)->next;
        if (is_piece_of(b, i, 0)) /* the tail, not yet named */
                chunk_at(b, i)->link = head;
        return head;
}

/* Makes the place a pending block and returns its handle. Three spare records are available. */
static bfc_handle begin_block(struct bfc *b, const struct place *p, uint64_t n_bytes)
{
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT);
        uint32_t head = take_place(b, p->chunk, p->offset, p->offset + n);
        struct chunk *c = chunk_at(b, head);

        chunk_set_meta(c, KIND_PENDING, (c->meta & PIECE_NEW) | (uint32_t)(to_bytes(n) - n_bytes));
        c->stamp = next_stamp(b);
        c->link = n;
        b->n_pieces--;
        b->n_pending++;
        count_used(b, n, n_bytes);
        return chunk_handle(c, head);
}

int bfc_grow_begin(struct bfc *b, const struct bfc_growth *plan, bfc_handle *ret_handle)
{
        struct bfc_growth now;
        struct place p;
        int r = plan->is_whole ? find_whole_plan(b, plan->n_requested, plan->is_few, &p, &now)
                               : find_plan(b, plan->n_requested, plan->in_extent, &p, &now);

        /* A plan is valid if the same plan would be made now. */
        if (r != 0)
                return -EINVAL;
        if (plan->offset != now.offset || plan->n_bytes != now.n_bytes || plan->new_bytes != now.new_bytes ||
            plan->span.begin != now.span.begin || plan->span.end != now.span.end)
                return -EINVAL;
        if (records_reserve(b, 3) < 0)
                return -ENOMEM;
        *ret_handle = begin_block(b, &p, now.n_requested);
        return 0;
}

int bfc_grow_commit(struct bfc *b, bfc_handle h)
{
        uint32_t head = handle_chunk(b, h, KIND_PENDING), i;
        struct chunk *c = chunk_at(b, head);

        if (head == 0)
                return -EINVAL;
        while (is_piece_of(b, i = c->next, head)) {
                VISIT();
                b->n_pieces--;
                if ((chunk_at(b, i)->meta & PIECE_TAIL) != 0) {
                        b->idle -= chunk_at(b, i)->size;
                        chunk_make_free(b, i);
                        break;
                }
                unlink_release(b, i);
        }
        c->size = c->link;
        chunk_set_meta(c, KIND_USED, chunk_waste(c));
        b->n_pending--;
        b->n_allocs++;
        if (c->size > b->largest)
                b->largest = c->size;
        return 0;
}

int bfc_alloc_in_extent(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        struct place p;

        if (n_bytes - 1 >= to_bytes(b->extent))
                return -EINVAL;
        p = find_free_in_extent(b, (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT));
        if (p.chunk == 0)
                return BFC_NO_FIT;
        if (records_reserve(b, 3) < 0)
                return -ENOMEM;
        *ret_handle = begin_block(b, &p, n_bytes); /* of one piece, in backed space */
        *ret_offset = to_bytes(p.offset);
        return bfc_grow_commit(b, *ret_handle);
}

int bfc_grow_cancel(struct bfc *b, bfc_handle h)
{
        uint32_t head = handle_chunk(b, h, KIND_PENDING), i = head;
        bool last;

        if (head == 0)
                return -EINVAL;
        count_unused(b, chunk_at(b, head)->link, chunk_waste(chunk_at(b, head)));
        b->n_pending--;
        b->n_pieces++; /* the head, counted down below */
        do {
                const struct chunk *c = chunk_at(b, i);
                uint32_t next = c->next;

                /* Pieces are neither free nor holes, so the next one outlives this one's merging. */
                last = !is_piece_of(b, next, head);
                b->n_pieces--;
                if ((c->meta & PIECE_TAIL) != 0)
                        b->idle -= c->size;
                if ((c->meta & PIECE_NEW) != 0) {
                        b->reserved -= c->size;
                        bfc_hole_put(b, i);
                } else {
                        chunk_make_free(b, i);
                }
                i = next;
        } while (!last);
        return 0;
}
