/* Backing and release: holes become free space, and free space becomes holes.
 *
 * Holes are made of whole extents and two never touch. Holes and retiring
 * chunks are kept on two lists (stamp: next, link: previous). None of this is on the path of an ordinary
 * allocation.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "bfc/core.h"
#include "bfc/index.h"

#include <errno.h>

/* ---- the lists -------------------------------------------------------------------- */

void bfc_list_put(struct bfc *b, uint32_t i, enum kind kind)
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

void bfc_list_take(struct bfc *b, uint32_t i)
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

void bfc_hole_put(struct bfc *b, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t prev = c->prev, next = c->next;

        VISIT();
        if (chunk_kind(chunk_at(b, next)) == KIND_HOLE) {
                c->size += chunk_at(b, next)->size;
                bfc_list_take(b, next);
                unlink_release(b, next);
        }
        if (chunk_kind(chunk_at(b, prev)) == KIND_HOLE) {
                chunk_at(b, prev)->size += c->size;
                unlink_release(b, i);
        } else {
                bfc_list_put(b, i, KIND_HOLE);
        }
}

/* Cuts chunk i, which is not free and in no list, at `at`; the upper part is the new record. */
uint32_t bfc_cut(struct bfc *b, uint32_t i, uint32_t at)
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
                bfc_list_take(b, i);
                if (chunk_end(c) > end)
                        bfc_list_put(b, bfc_cut(b, i, end), KIND_HOLE);
                if (c->addr < begin) {
                        uint32_t upper = bfc_cut(b, i, begin);

                        bfc_list_put(b, i, KIND_HOLE);
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

/* Takes whole extents out of the free chunk around them: the rest of it stays free. */
static int take_extents(struct bfc *b, struct bfc_range range, uint32_t *ret_chunk)
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
                upper = bfc_cut(b, i, end);
                index_insert(b, upper);
        }
        if (c->addr < begin) {
                upper = bfc_cut(b, i, begin);
                index_insert(b, i);
                i = upper;
        }
        *ret_chunk = i;
        return 0;
}

int bfc_release_begin(struct bfc *b, struct bfc_range range)
{
        uint32_t i;
        int r = take_extents(b, range, &i);

        if (r < 0)
                return r;
        b->idle += chunk_at(b, i)->size;
        bfc_list_put(b, i, KIND_RETIRING);
        return 0;
}

int bfc_alloc_range(struct bfc *b, struct bfc_range range, bfc_handle *ret_handle)
{
        struct chunk *c;
        uint32_t i;
        int r = take_extents(b, range, &i);

        if (r < 0)
                return r;
        c = chunk_at(b, i);
        c->stamp = next_stamp(b);
        chunk_set_meta(c, KIND_USED, 0);
        count_used(b, c->size, to_bytes(c->size));
        b->n_allocs++;
        if (c->size > b->largest)
                b->largest = c->size;
        *ret_handle = chunk_handle(c, i);
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
                bfc_list_take(b, i);
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

/* Adds the whole extents of a free chunk that are not in keep. A first extent before zones is a separate
 * range: in all other ranges sizes rise, except that of a region's last extent. */
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
