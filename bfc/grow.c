/* Growth and release: what has holes in it; and blocks that must lie in one extent,
 * with or without growth. None of this is on the path of an ordinary allocation; the calls that look for a place visit each hole and each
 * chunk beside one, or each free chunk as large as an extent, never all chunks.
 *
 * Holes are made of whole extents and two never touch. Holes and retiring
 * chunks are kept on two lists (stamp: next, link: previous).
 *
 * A pending block is a run of chunks that keep what they were, so that it can be
 * undone: the first is KIND_PENDING and has the stamp and the block's size, the
 * others are KIND_PIECE and name the first. Those that were holes have
 * PIECE_NEW; the rest of the last new extent follows as PIECE_NEW | PIECE_TAIL.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "bfc/core.h"
#include "bfc/index.h"

#include <errno.h>

/* ---- the lists -------------------------------------------------------------------- */

static void list_put(struct bfc *b, uint32_t i, enum kind kind)
{
        uint32_t *head = kind == KIND_HOLE ? &b->holes : &b->retiring;
        struct chunk *c = chunk_at(b, i);

        c->stamp = *head;
        c->link = 0;
        chunk_set_meta(c, kind, 0);
        if (*head != 0)
                chunk_at(b, *head)->link = i;
        *head = i;
        *(kind == KIND_HOLE ? &b->n_holes : &b->n_retiring) += 1;
}

static void list_take(struct bfc *b, uint32_t i)
{
        const struct chunk *c = chunk_at(b, i);
        bool hole = chunk_kind(c) == KIND_HOLE;

        if (c->link != 0)
                chunk_at(b, c->link)->stamp = c->stamp;
        else
                *(hole ? &b->holes : &b->retiring) = c->stamp;
        if (c->stamp != 0)
                chunk_at(b, c->stamp)->link = c->link;
        *(hole ? &b->n_holes : &b->n_retiring) -= 1;
}

void bfc_hole_take(struct bfc *b, uint32_t i)
{
        list_take(b, i);
}

void bfc_hole_put(struct bfc *b, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t prev = c->prev, next = c->next;

        VISIT();
        if (chunk_kind(chunk_at(b, next)) == KIND_HOLE) {
                c->size += chunk_at(b, next)->size;
                list_take(b, next);
                unlink_release(b, next);
        }
        if (chunk_kind(chunk_at(b, prev)) == KIND_HOLE) {
                chunk_at(b, prev)->size += c->size;
                unlink_release(b, i);
        } else {
                list_put(b, i, KIND_HOLE);
        }
}

/* Cuts chunk i, which is not free and in no list, at `at`; the upper part is the new record. */
static uint32_t cut(struct bfc *b, uint32_t i, uint32_t at)
{
        uint32_t upper = record_new(b);
        struct chunk *c = chunk_at(b, i), *u = chunk_at(b, upper);

        link_before(b, upper, c->next);
        u->addr = at;
        u->size = chunk_end(c) - at;
        u->stamp = 0;
        u->link = 0;
        u->meta = c->meta;
        u->slot = 0;
        c->size = at - c->addr;
        return upper;
}

/* ---- planning growth ---------------------------------------------------------------- */

/* A place in a stretch. */
struct place {
        uint32_t chunk; /* at or before the offset, in the same stretch; 0: no place */
        uint32_t offset;
        uint32_t n_new;
        uint32_t n_touched; /* extents that the block would lie in; 0: it does not matter */
};

/* How many extents [x, y) lies in. */
static uint32_t n_touched(const struct bfc *b, const struct region *r, uint32_t x, uint32_t y)
{
        return grid_number(b, r, y - 1) - grid_number(b, r, x) + 1;
}

/* The fewest new bytes; of these, for a block that is as large as some extents, the fewest
 * extents touched; of these the lowest offset. Such a block so begins in the rest of a partly
 * used extent only where that saves one, and leaves whole extents when it is freed. */
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

/* Moves on to the chunk that contains granule y - 1. Returns the unbacked granules of the
 * stretch below y, those of a begun extent wholly. */
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

/* How often a block that ends at y, in or after the hole at the cursor, may move down by an
 * extent and each time leave a full unbacked extent at its upper end. */
static uint32_t free_moves(const struct bfc *b, const struct region *r, const struct chunk *c, uint32_t y)
{
        uint32_t low = c->addr < r->body ? r->body : c->addr, top = grid_down(b, r, y - 1);

        if (chunk_kind(c) != KIND_HOLE || top < low || grid_up(b, r, y) - top != b->extent)
                return 0;
        return (top - low) / b->extent + 1;
}

/* Tries the grid points above the begin of the stretch, up to where the zones end; the first one
 * also beyond. */
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

/* Looks for the best place for n granules in the stretch that begins with chunk `first` and
 * ends at `end`.
 *
 * The new bytes of a block at x fall, as x rises, only where x becomes the end of an unbacked
 * extent. The extents that it touches become fewer only where x becomes a grid point; where extents
 * are of one size, from one grid point to the next they are as many. So the best x is the stretch's
 * begin, a grid point up to where the zones end, the first grid point, or the end of an unbacked
 * extent. All grid points up to where the zones end are tried.
 * Beyond, of the ends in one hole, X is the largest at which the block still fits:
 * from one end to the next lower one, the block gains a full extent below (only a region's
 * last extent has another size, and it has no higher end inside the
 * region) and leaves at most one extent above, which is at most a full one. So no lower end is
 * better than X, and those that are as good follow X directly, one for each move that leaves a
 * full unbacked extent.
 * Thus one look per hole and per extent of the zones, and a second cursor for the upper end, which
 * never moves back. */
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

/* The best place for n granules: what bfc_alloc() would take, or else the one that needs the
 * fewest new bytes. */
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
                /* Free chunks and holes take turns; only the stretch's first hole goes on. */
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

/* The lowest grid point from the grid point `addr` on at which an extent of at least n granules
 * begins; n is no more than the largest extents have. Only the region's last extent, which its end
 * may cut, can be smaller nevertheless. */
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

/* The lowest place from `addr` on at which n granules, no more than the largest extents have, cross
 * no grid point; unless the region ends before. */
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

/* The next one of the heap below `top` that does not lie below i, parents first; 0: no more. */
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

/* Of the chunks as large as node i, the lowest that holds n granules uncrossed; 0: none. What
 * is below one that holds them is higher, so nothing is looked at but what does not hold them
 * and what hangs directly below that. */
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

/* The smallest free chunk that holds n granules in one extent, the lowest on ties. One that is
 * large enough and does not hold them reaches over a grid point, so there are fewer of those
 * than there are backed extents. */
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

/* The same, or the best unbacked extent. From the first extent on sizes only rise, but for that of a
 * region's last one. So of each hole the first, the first after it that is large enough, and the last
 * one are all there is to try. */
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

/* The best place, and it as a plan. BFC_NO_FIT, -EINVAL. */
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

/* ---- pending blocks ------------------------------------------------------------------ */

static bool is_piece_of(const struct bfc *b, uint32_t i, uint32_t head)
{
        return chunk_kind(chunk_at(b, i)) == KIND_PIECE && chunk_at(b, i)->link == head;
}

/* Turns the part of chunk i below y into a piece of a pending block; what is above y stays
 * what it was, but for the rest of a begun extent, which becomes the tail. Returns the piece. */
static uint32_t take_piece(struct bfc *b, uint32_t i, uint32_t y)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t piece = i, rest;

        VISIT();
        if (c->slot == 0) {
                uint32_t up = y < chunk_end(c) ? grid_up(b, bfc_region_at(b, c->addr), y) : y;

                list_take(b, i);
                if (up < chunk_end(c)) {
                        rest = cut(b, i, up);
                        list_put(b, rest, KIND_HOLE);
                }
                if (y < chunk_end(c)) {
                        rest = cut(b, i, y);
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
        upper = cut(b, i, x);
        if (free) {
                index_insert(b, i);
                index_insert(b, upper);
        } else {
                list_put(b, upper, KIND_HOLE);
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

/* Makes the place a pending block; its handle. Three spare records are there. */
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

        /* A plan is fresh if it is what would be planned now. */
        if (find_plan(b, plan->n_requested, plan->in_extent, &p, &now) != 0)
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

/* ---- backing and release ----------------------------------------------------------------- */

/* Checks that a range consists of whole extents of one region; fills in granules. */
static const struct region *whole_extents(const struct bfc *b, struct bfc_range range, uint32_t *ret_begin,
                                          uint32_t *ret_end)
{
        const struct region *r;

        if ((range.begin | range.end) % BFC_GRANULE != 0 || range.begin >= range.end ||
            range.end > BFC_MAX_SPACE)
                return NULL;
        r = bfc_region_at(b, (uint32_t)(range.begin >> GRANULE_SHIFT));
        if (!r || range.end > to_bytes(region_end(r)))
                return NULL;
        *ret_begin = (uint32_t)(range.begin >> GRANULE_SHIFT);
        *ret_end = (uint32_t)(range.end >> GRANULE_SHIFT);
        return grid_has(b, r, *ret_begin) && grid_has(b, r, *ret_end) ? r : NULL;
}

int bfc_back(struct bfc *b, struct bfc_range range)
{
        uint32_t begin, end, next;

        if (!whole_extents(b, range, &begin, &end))
                return -EINVAL;
        if (records_reserve(b, 2) < 0)
                return -ENOMEM;
        for (uint32_t i = b->holes; i != 0; i = next) {
                struct chunk *c = chunk_at(b, i);

                VISIT();
                next = c->stamp;
                if (chunk_end(c) <= begin || c->addr >= end)
                        continue;
                list_take(b, i);
                if (chunk_end(c) > end)
                        list_put(b, cut(b, i, end), KIND_HOLE);
                if (c->addr < begin) {
                        uint32_t upper = cut(b, i, begin);

                        list_put(b, i, KIND_HOLE);
                        i = upper;
                }
                count_reserved(b, chunk_at(b, i)->size);
                chunk_make_free(b, i);
        }
        return 0;
}

static bool is_free_around(const struct bfc *b, uint32_t i, uint32_t begin, uint32_t end)
{
        const struct chunk *c = chunk_at(b, i);

        return chunk_kind(c) == KIND_FREE && c->addr <= begin && end <= chunk_end(c);
}

/* The free chunk that contains the whole extents [begin, end), or 0. A caller that releases the
 * extents of one chunk one after the other finds the rest of it beside the last one. */
static uint32_t free_chunk_around(const struct bfc *b, const struct region *r, uint32_t begin, uint32_t end)
{
        const struct chunk *last = chunk_at(b, b->retiring), *edge = chunk_at(b, r->edge);
        uint32_t near[] = { edge->next, edge->prev, b->retiring != 0 ? last->next : edge->next,
                            b->retiring != 0 ? last->prev : edge->next };
        uint32_t i;

        for (unsigned k = 0; k < sizeof(near) / sizeof(near[0]); k++)
                if (is_free_around(b, near[k], begin, end))
                        return near[k];
        if (begin == r->base || end == region_end(r))
                return 0;
        for (i = bfc_index_next(b, bin_of(end - begin), 0); i != 0; i = bfc_index_next(b, 0, i)) {
                VISIT();
                if (is_free_around(b, i, begin, end))
                        return i;
        }
        return 0;
}

int bfc_release_reserve(struct bfc *b)
{
        return records_reserve(b, 2);
}

int bfc_release_begin(struct bfc *b, struct bfc_range range)
{
        uint32_t begin, end, i, upper;
        const struct region *r = whole_extents(b, range, &begin, &end);
        struct chunk *c;

        if (!r)
                return -EINVAL;
        i = free_chunk_around(b, r, begin, end);
        if (i == 0)
                return -EINVAL;
        if (records_reserve(b, 2) < 0)
                return -ENOMEM;
        c = chunk_at(b, i);
        index_remove(b, i);
        chunk_set_meta(c, KIND_NONE, 0);
        if (end < chunk_end(c)) {
                upper = cut(b, i, end);
                index_insert(b, upper);
        }
        if (c->addr < begin) {
                upper = cut(b, i, begin);
                index_insert(b, i);
                i = upper;
        }
        b->idle += chunk_at(b, i)->size;
        list_put(b, i, KIND_RETIRING);
        return 0;
}

int bfc_release_commit(struct bfc *b, struct bfc_range range)
{
        uint32_t begin, end;

        if (!whole_extents(b, range, &begin, &end))
                return -EINVAL;
        for (uint32_t i = b->retiring; i != 0; i = chunk_at(b, i)->stamp) {
                const struct chunk *c = chunk_at(b, i);

                VISIT();
                if (c->addr != begin || chunk_end(c) != end)
                        continue;
                list_take(b, i);
                b->idle -= c->size;
                b->reserved -= c->size;
                bfc_hole_put(b, i);
                return 0;
        }
        return -EINVAL;
}

/* ---- planning a release ---------------------------------------------------------------- */

/* Ranges found so far: the highest ones. If all are there, they are a heap with the lowest on top. */
struct found {
        struct bfc_range *ranges;
        size_t n;
        size_t n_max;
};

/* Puts `range` in the place of the one at `at`, and moves lower ones up until each is lower than the
 * two below it. */
static void found_sink(struct found *f, size_t at, struct bfc_range range)
{
        for (;;) {
                size_t low = 2 * at + 1;

                VISIT();
                if (low + 1 < f->n && f->ranges[low + 1].begin < f->ranges[low].begin)
                        low++;
                if (low >= f->n || f->ranges[low].begin > range.begin)
                        break;
                f->ranges[at] = f->ranges[low];
                at = low;
        }
        f->ranges[at] = range;
}

static void found_make_heap(struct found *f)
{
        for (size_t i = f->n / 2; i-- > 0;)
                found_sink(f, i, f->ranges[i]);
}

static void found_add(struct found *f, uint64_t begin, uint64_t end)
{
        struct bfc_range range = { begin, end };

        if (begin >= end)
                return;
        if (f->n < f->n_max) {
                f->ranges[f->n++] = range;
                if (f->n == f->n_max)
                        found_make_heap(f);
        } else if (f->ranges[0].begin < begin) {
                found_sink(f, 0, range);
        }
}

/* The highest first: the lowest of the heap goes to its end, again and again. */
static void found_sort(struct found *f)
{
        size_t n = f->n;

        if (f->n < f->n_max)
                found_make_heap(f);
        while (f->n > 1) {
                struct bfc_range last = f->ranges[--f->n];

                f->ranges[f->n] = f->ranges[0];
                found_sink(f, 0, last);
        }
        f->n = n;
}

/* Adds the whole extents of a free chunk that do not lie in keep. A first extent in front of zones is a
 * range of its own: in all other ranges sizes rise, but for that of a region's last extent. */
static void found_add_chunk(const struct bfc *b, struct found *f, const struct chunk *c,
                            const struct bfc_range *keep)
{
        const struct region *r = bfc_region_at(b, c->addr);
        uint64_t begin = to_bytes(grid_up(b, r, c->addr)), end = to_bytes(grid_down(b, r, chunk_end(c)));
        uint64_t zones = to_bytes(r->base + r->first);

        VISIT();
        if (keep && keep->begin < end && begin < keep->end) {
                found_add(f, keep->end, end);
                end = keep->begin;
        }
        if (r->n_zones > 0 && begin < zones && zones < end) {
                found_add(f, zones, end);
                end = zones;
        }
        found_add(f, begin, end);
}

/* The lowest grid point of a range from which on it has at most n_bytes. */
static uint64_t highest_part(const struct bfc *b, const struct bfc_range *range, uint64_t n_bytes)
{
        const struct region *r = bfc_region_at(b, (uint32_t)(range->begin >> GRANULE_SHIFT));

        return to_bytes(grid_down(b, r, (uint32_t)((range->end - n_bytes) >> GRANULE_SHIFT)));
}

/* Gives up extents at the ends of a range as long as `excess` bytes cover them. */
static void trim(const struct bfc *b, struct bfc_range *range, uint64_t *excess)
{
        const struct region *r = bfc_region_at(b, (uint32_t)(range->begin >> GRANULE_SHIFT));

        while (range->begin < range->end) {
                uint64_t low = to_bytes(grid_up(b, r, (uint32_t)(range->begin >> GRANULE_SHIFT) + 1));
                uint64_t high = to_bytes(grid_down(b, r, (uint32_t)(range->end >> GRANULE_SHIFT) - 1));

                VISIT();
                if (low - range->begin <= *excess) {
                        *excess -= low - range->begin;
                        range->begin = low;
                } else if (range->end - high <= *excess) {
                        *excess -= range->end - high;
                        range->end = high;
                } else {
                        break;
                }
        }
}

/* Of what was found, takes the highest extents until want_bytes are there, and gives up again
 * what turns out not to be needed (extents of other sizes), the lowest first. */
static void choose(const struct bfc *b, struct found *f, uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t sum = 0, excess, n = 0;

        for (size_t i = 0; i < f->n && sum < want_bytes; i++, n++) {
                struct bfc_range *range = &f->ranges[i];

                if (range->end - range->begin > want_bytes - sum)
                        range->begin = highest_part(b, range, want_bytes - sum);
                sum += range->end - range->begin;
        }
        f->n = n;
        excess = sum > want_bytes ? sum - want_bytes : 0;
        sum -= excess;
        for (size_t i = f->n; i-- > 0 && excess > 0;)
                trim(b, &f->ranges[i], &excess);
        sum += excess;
        n = 0;
        for (size_t i = 0; i < f->n; i++)
                if (f->ranges[i].begin < f->ranges[i].end)
                        f->ranges[n++] = f->ranges[i];
        f->n = n;
        *ret_bytes = sum;
}

size_t bfc_plan_release(const struct bfc *b, uint64_t want_bytes, const struct bfc_growth *keep,
                        struct bfc_range *ret_ranges, size_t max_ranges, uint64_t *ret_bytes)
{
        struct found f = { .ranges = ret_ranges, .n = 0, .n_max = max_ranges };
        const struct bfc_range *span = keep ? &keep->span : NULL;

        *ret_bytes = 0;
        if (max_ranges == 0 || want_bytes == 0)
                return 0;
        for (uint32_t i = bfc_index_next(b, bin_of(b->smallest), 0); i != 0; i = bfc_index_next(b, 0, i))
                if (chunk_at(b, i)->size >= b->smallest)
                        found_add_chunk(b, &f, chunk_at(b, i), span);
        /* Smaller chunks contain no whole extent but a region's first or last one. */
        for (uint32_t k = 0; k < b->n_regions; k++) {
                const struct chunk *edge = chunk_at(b, b->regions[k].edge);
                const struct chunk *low = chunk_at(b, edge->next), *high = chunk_at(b, edge->prev);

                VISIT();
                if (low->slot != 0 && low->size < b->smallest)
                        found_add_chunk(b, &f, low, span);
                if (high->slot != 0 && high->size < b->smallest && high != low)
                        found_add_chunk(b, &f, high, span);
        }
        found_sort(&f);
        choose(b, &f, want_bytes, ret_bytes);
        return f.n;
}
