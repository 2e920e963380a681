/* See bfc_oracle.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bfc_oracle.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint64_t length(struct bfc_range r)
{
        return r.end - r.begin;
}

static bool overlap(struct bfc_range a, struct bfc_range b)
{
        return a.begin < b.end && b.begin < a.end;
}

static uint64_t round_up(uint64_t n_bytes)
{
        return (n_bytes + BFC_GRANULE - 1) / BFC_GRANULE * BFC_GRANULE;
}

static void *grown(void *array, size_t n, size_t item)
{
        array = realloc(array, n * item);
        if (!array)
                abort();
        return array;
}

void oracle_init(struct oracle *o, uint64_t extent_bytes)
{
        *o = (struct oracle){ .extent_bytes = extent_bytes };
}

void oracle_done(struct oracle *o)
{
        free(o->segments);
        free(o->extents);
        free(o->regions);
        *o = (struct oracle){ 0 };
}

/* ---- segments ---------------------------------------------------------------- */

static void insert(struct oracle *o, size_t at, struct segment s)
{
        if (o->n_segments == o->n_segments_room) {
                o->n_segments_room = o->n_segments_room * 2 + 16;
                o->segments = grown(o->segments, o->n_segments_room, sizeof(s));
        }
        memmove(o->segments + at + 1, o->segments + at, (o->n_segments - at) * sizeof(s));
        o->segments[at] = s;
        o->n_segments++;
}

static void drop(struct oracle *o, size_t at)
{
        o->n_segments--;
        memmove(o->segments + at, o->segments + at + 1, (o->n_segments - at) * sizeof(*o->segments));
}

/* Makes `offset` a border of segments, if it is within one. */
static void split_at(struct oracle *o, uint64_t offset)
{
        for (size_t i = 0; i < o->n_segments; i++) {
                struct segment s = o->segments[i];

                if (s.range.begin < offset && offset < s.range.end) {
                        o->segments[i].range.end = offset;
                        s.range.begin = offset;
                        insert(o, i + 1, s);
                        return;
                }
        }
}

/* Splits the segment at offset if it is unbacked. */
static void split_hole_at(struct oracle *o, uint64_t offset)
{
        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];

                if (s->kind == '-' && s->range.begin < offset && offset < s->range.end) {
                        split_at(o, offset);
                        return;
                }
        }
}

static bool region_begins(const struct oracle *o, uint64_t offset)
{
        for (size_t i = 0; i < o->n_regions; i++)
                if (o->regions[i].begin == offset)
                        return true;
        return false;
}

/* Merges free with free and unbacked with unbacked, within regions. */
static void tidy(struct oracle *o)
{
        for (size_t i = 1; i < o->n_segments;) {
                const struct segment *a = &o->segments[i - 1], *b = &o->segments[i];
                bool alike = a->kind == b->kind && (a->kind == 'f' || a->kind == '-');

                if (alike && a->range.end == b->range.begin && !region_begins(o, b->range.begin)) {
                        o->segments[i - 1].range.end = b->range.end;
                        drop(o, i);
                } else {
                        i++;
                }
        }
}

static void become(struct segment *s, char kind)
{
        s->kind = kind;
        s->id = 0;
        s->fresh = false;
        s->tail = false;
        s->n_requested = 0;
}

static struct segment *find_block(struct oracle *o, uint32_t id, char kind)
{
        for (size_t i = 0; i < o->n_segments; i++)
                if (o->segments[i].id == id && o->segments[i].kind == kind)
                        return &o->segments[i];
        return NULL;
}

static void count_peaks(struct oracle *o)
{
        struct bfc_stats now;

        oracle_read_stats(o, &now);
        o->stats.peak_bytes_in_use = now.peak_bytes_in_use;
        o->stats.peak_bytes_requested = now.peak_bytes_requested;
        o->stats.peak_bytes_reserved = now.peak_bytes_reserved;
}

/* ---- regions --------------------------------------------------------------------- */

static int by_begin(const void *a, const void *b)
{
        const struct extent *x = a, *y = b;

        return x->range.begin < y->range.begin ? -1 : x->range.begin > y->range.begin;
}

/* How large the extent with a number is, counted from 0 on. */
static uint64_t nth_extent_bytes(const struct oracle *o, const struct bfc_zones *z, uint64_t n)
{
        uint64_t size = z->small_extent_bytes;

        if (z->first_extent_bytes > 0 && n-- == 0)
                return z->first_extent_bytes;
        for (; size < o->extent_bytes && n >= z->extents_per_zone; n -= z->extents_per_zone)
                size *= 2;
        return size;
}

int oracle_add_zoned_region(struct oracle *o, uint64_t base, uint64_t n_bytes, const struct bfc_zones *zones,
                            bool backed)
{
        struct bfc_range r = { base, base + n_bytes };
        uint64_t size, number = 0;
        size_t at = 0;

        if (n_bytes == 0 || r.end > BFC_MAX_SPACE)
                return -EINVAL;
        for (size_t i = 0; i < o->n_regions; i++)
                if (overlap(o->regions[i], r))
                        return -EINVAL;
        size = zones->first_extent_bytes;
        for (uint64_t s = zones->small_extent_bytes; s < o->extent_bytes; s *= 2)
                size += s * zones->extents_per_zone;
        if (size > n_bytes)
                return -EINVAL;
        while (at < o->n_segments && o->segments[at].range.begin < base)
                at++;
        insert(o, at, (struct segment){ .range = r, .kind = backed ? 'f' : '-' });
        o->regions = grown(o->regions, o->n_regions + 1, sizeof(*o->regions));
        o->regions[o->n_regions] = r;
        while (base < r.end) {
                struct extent e = { { base, r.end }, o->n_regions };

                size = nth_extent_bytes(o, zones, number++);
                if (size < r.end - base)
                        e.range.end = base + size;
                o->extents = grown(o->extents, o->n_extents + 1, sizeof(e));
                o->extents[o->n_extents++] = e;
                base = e.range.end;
        }
        qsort(o->extents, o->n_extents, sizeof(*o->extents), by_begin);
        o->n_regions++;
        count_peaks(o);
        return 0;
}

int oracle_remove_region(struct oracle *o, uint64_t base)
{
        size_t k = 0, n = 0;
        struct bfc_range r;

        while (k < o->n_regions && o->regions[k].begin != base)
                k++;
        if (k == o->n_regions)
                return -EINVAL;
        r = o->regions[k];
        for (size_t i = 0; i < o->n_segments; i++)
                if (overlap(o->segments[i].range, r) && o->segments[i].kind != 'f' &&
                    o->segments[i].kind != '-')
                        return -EBUSY;
        for (size_t i = 0; i < o->n_segments; i++)
                if (!overlap(o->segments[i].range, r))
                        o->segments[n++] = o->segments[i];
        o->n_segments = n;
        n = 0;
        for (size_t i = 0; i < o->n_extents; i++) {
                if (o->extents[i].region == k)
                        continue;
                o->extents[n] = o->extents[i];
                o->extents[n].region -= o->extents[n].region > k;
                n++;
        }
        o->n_extents = n;
        o->n_regions--;
        memmove(o->regions + k, o->regions + k + 1, (o->n_regions - k) * sizeof(*o->regions));
        return 0;
}

bool oracle_is_whole(const struct oracle *o, struct bfc_range range)
{
        for (size_t i = 0; i < o->n_extents; i++) {
                if (o->extents[i].range.begin != range.begin)
                        continue;
                for (size_t k = i; k < o->n_extents && o->extents[k].region == o->extents[i].region; k++)
                        if (o->extents[k].range.end == range.end)
                                return true;
        }
        return false;
}

bool oracle_is_free(const struct oracle *o, struct bfc_range range)
{
        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];

                if (s->range.begin <= range.begin && range.end <= s->range.end)
                        return s->kind == 'f';
        }
        return false;
}

/* ---- blocks ------------------------------------------------------------------------ */

static const struct segment *best_fit(const struct oracle *o, uint64_t n_bytes)
{
        const struct segment *best = NULL;

        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];

                if (s->kind == 'f' && length(s->range) >= n_bytes &&
                    (!best || length(s->range) < length(best->range)))
                        best = s;
        }
        return best;
}

static bool in_one_extent(const struct oracle *o, struct bfc_range range)
{
        for (size_t i = 0; i < o->n_extents; i++)
                if (o->extents[i].range.begin <= range.begin && range.end <= o->extents[i].range.end)
                        return true;
        return false;
}

/* The best fit inside one extent, and where in the segment. */
static const struct segment *best_fit_in_extent(const struct oracle *o, uint64_t n_bytes,
                                                uint64_t *ret_offset)
{
        const struct segment *best = NULL;

        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];
                uint64_t x = s->range.begin;

                if (s->kind != 'f' || (best && length(s->range) >= length(best->range)))
                        continue;
                while (x + n_bytes <= s->range.end && !in_one_extent(o, (struct bfc_range){ x, x + n_bytes }))
                        x += BFC_GRANULE;
                if (x + n_bytes > s->range.end)
                        continue;
                best = s;
                *ret_offset = x;
        }
        return best;
}

static void take_at(struct oracle *o, uint64_t offset, uint64_t n_bytes, uint32_t id)
{
        uint64_t n = round_up(n_bytes);
        size_t at = 0;

        split_at(o, offset);
        split_at(o, offset + n);
        while (o->segments[at].range.begin != offset)
                at++;
        o->segments[at].kind = 'u';
        o->segments[at].id = id;
        o->segments[at].n_requested = n_bytes;
        o->stats.num_allocs++;
        if (n > o->stats.largest_alloc_size)
                o->stats.largest_alloc_size = n;
        count_peaks(o);
}

int oracle_alloc(struct oracle *o, uint64_t n_bytes, uint32_t id, uint64_t *ret_offset)
{
        const struct segment *best;

        if (n_bytes == 0 || n_bytes > BFC_MAX_SPACE)
                return -EINVAL;
        best = best_fit(o, round_up(n_bytes));
        if (!best)
                return BFC_NO_FIT;
        *ret_offset = best->range.begin;
        take_at(o, best->range.begin, n_bytes, id);
        return 0;
}

int oracle_alloc_in_extent(struct oracle *o, uint64_t n_bytes, uint32_t id, uint64_t *ret_offset)
{
        uint64_t offset = 0;

        if (n_bytes == 0 || n_bytes > o->extent_bytes)
                return -EINVAL;
        if (!best_fit_in_extent(o, round_up(n_bytes), &offset))
                return BFC_NO_FIT;
        take_at(o, offset, n_bytes, id);
        *ret_offset = offset;
        return 0;
}

int oracle_dealloc(struct oracle *o, uint32_t id)
{
        struct segment *s = find_block(o, id, 'u');

        if (!s)
                return -EINVAL;
        become(s, 'f');
        o->stats.num_frees++;
        tidy(o);
        return 0;
}

int oracle_split(struct oracle *o, uint32_t id, uint64_t at, uint32_t high)
{
        struct segment *s = find_block(o, id, 'u');

        if (!s || at == 0 || at % BFC_GRANULE != 0 || at >= length(s->range))
                return -EINVAL;
        split_at(o, s->range.begin + at);
        s = find_block(o, id, 'u'); /* the lower of two of that id */
        s[1].id = high;
        s[1].n_requested = s[0].n_requested - at;
        s[0].n_requested = at;
        o->stats.num_allocs++;
        return 0;
}

/* ---- growth --------------------------------------------------------------------------- */

/* The new bytes of a block at `range`; UINT64_MAX: it cannot lie there. Fills in the span
 * and how many extents it spans. */
static uint64_t cost(const struct oracle *o, struct bfc_range range, struct bfc_range *ret_span,
                     uint64_t *ret_touched)
{
        uint64_t sum = 0, covered = 0;

        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];

                if (!overlap(s->range, range))
                        continue;
                if (s->kind != 'f' && s->kind != '-')
                        return UINT64_MAX;
                covered += (s->range.end < range.end ? s->range.end : range.end) -
                           (s->range.begin > range.begin ? s->range.begin : range.begin);
                for (size_t k = 0; s->kind == '-' && k < o->n_extents; k++)
                        if (overlap(o->extents[k].range, range) && overlap(o->extents[k].range, s->range))
                                sum += length(o->extents[k].range);
        }
        ret_span->end = 0;
        *ret_touched = 0;
        for (size_t k = 0; k < o->n_extents; k++) {
                if (!overlap(o->extents[k].range, range))
                        continue;
                ++*ret_touched;
                if (ret_span->end == 0)
                        ret_span->begin = o->extents[k].range.begin;
                ret_span->end = o->extents[k].range.end;
        }
        return covered == length(range) ? sum : UINT64_MAX;
}

int oracle_plan_growth(const struct oracle *o, uint64_t n_bytes, uint64_t max_new, struct bfc_growth *ret)
{
        uint64_t n = round_up(n_bytes);
        struct bfc_growth plan = { .n_bytes = n, .n_requested = n_bytes, .new_bytes = UINT64_MAX };
        bool whole = n % o->extent_bytes == 0;
        uint64_t n_touched = 0;
        const struct segment *fit;

        if (n_bytes == 0 || n_bytes > BFC_MAX_SPACE)
                return -EINVAL;
        fit = best_fit(o, n);
        for (size_t i = 0; i < o->n_regions; i++)
                for (uint64_t x = o->regions[i].begin; x + n <= o->regions[i].end; x += BFC_GRANULE) {
                        struct bfc_range range = { x, x + n }, span = { 0, 0 };
                        uint64_t c, touched = 0;

                        if (fit && x != fit->range.begin)
                                continue;
                        c = cost(o, range, &span, &touched);
                        if (!whole)
                                touched = 0;
                        if (c < plan.new_bytes ||
                            (c == plan.new_bytes && c != UINT64_MAX &&
                             (touched < n_touched || (touched == n_touched && x < plan.offset)))) {
                                plan.new_bytes = c;
                                n_touched = touched;
                                plan.offset = x;
                                plan.span = span;
                        }
                }
        if (plan.new_bytes == UINT64_MAX)
                return BFC_NO_FIT;
        *ret = plan;
        return plan.new_bytes > max_new ? BFC_OVER_BUDGET : 0;
}

int oracle_plan_growth_in_extent(const struct oracle *o, uint64_t n_bytes, uint64_t max_new,
                                 struct bfc_growth *ret)
{
        uint64_t n = round_up(n_bytes), fit = 0;
        struct bfc_growth plan = {
                .n_bytes = n, .n_requested = n_bytes, .new_bytes = UINT64_MAX, .in_extent = true
        };
        bool fits;

        if (n_bytes == 0 || n_bytes > o->extent_bytes)
                return -EINVAL;
        fits = best_fit_in_extent(o, n, &fit) != NULL;
        for (size_t i = 0; i < o->n_extents; i++) {
                const struct bfc_range *e = &o->extents[i].range;

                for (uint64_t x = e->begin; x + n <= e->end; x += BFC_GRANULE) {
                        struct bfc_range span = { 0, 0 };
                        uint64_t touched, c;

                        if (fits && x != fit)
                                continue;
                        c = cost(o, (struct bfc_range){ x, x + n }, &span, &touched);
                        if (c >= plan.new_bytes)
                                continue;
                        plan.new_bytes = c;
                        plan.offset = x;
                        plan.span = span;
                }
        }
        if (plan.new_bytes == UINT64_MAX)
                return BFC_NO_FIT;
        *ret = plan;
        return plan.new_bytes > max_new ? BFC_OVER_BUDGET : 0;
}

void oracle_grow_begin(struct oracle *o, const struct bfc_growth *plan, uint32_t id)
{
        struct bfc_range block = { plan->offset, plan->offset + plan->n_bytes };

        split_at(o, block.begin);
        split_at(o, block.end);
        split_hole_at(o, plan->span.end);
        for (size_t i = 0; i < o->n_segments; i++) {
                struct segment *s = &o->segments[i];
                bool tail = !overlap(s->range, block);

                if (!overlap(s->range, plan->span) || (tail && s->kind != '-'))
                        continue;
                s->fresh = s->kind == '-';
                s->tail = tail;
                s->kind = 'p';
                s->id = id;
                s->n_requested = s->range.begin == block.begin ? plan->n_requested : 0;
        }
        tidy(o);
        count_peaks(o);
}

void oracle_grow_commit(struct oracle *o, uint32_t id)
{
        struct segment *first = NULL;
        uint64_t n;

        for (size_t i = 0; i < o->n_segments; i++) {
                struct segment *s = &o->segments[i];

                if (s->kind != 'p' || s->id != id)
                        continue;
                if (s->tail) {
                        become(s, 'f');
                } else if (!first) {
                        first = s;
                } else {
                        first->range.end = s->range.end;
                        drop(o, i--);
                }
        }
        if (!first)
                abort();
        first->kind = 'u';
        n = length(first->range);
        o->stats.num_allocs++;
        if (n > o->stats.largest_alloc_size)
                o->stats.largest_alloc_size = n;
        tidy(o);
}

void oracle_grow_cancel(struct oracle *o, uint32_t id)
{
        for (size_t i = 0; i < o->n_segments; i++)
                if (o->segments[i].kind == 'p' && o->segments[i].id == id)
                        become(&o->segments[i], o->segments[i].fresh ? '-' : 'f');
        tidy(o);
}

/* ---- backing and release ---------------------------------------------------------------- */

int oracle_back(struct oracle *o, struct bfc_range range)
{
        if (!oracle_is_whole(o, range))
                return -EINVAL;
        split_hole_at(o, range.begin);
        split_hole_at(o, range.end);
        for (size_t i = 0; i < o->n_segments; i++)
                if (overlap(o->segments[i].range, range) && o->segments[i].kind == '-')
                        o->segments[i].kind = 'f';
        tidy(o);
        count_peaks(o);
        return 0;
}

int oracle_release_begin(struct oracle *o, struct bfc_range range)
{
        if (!oracle_is_whole(o, range) || !oracle_is_free(o, range))
                return -EINVAL;
        split_at(o, range.begin);
        split_at(o, range.end);
        for (size_t i = 0; i < o->n_segments; i++)
                if (overlap(o->segments[i].range, range))
                        o->segments[i].kind = 'r';
        return 0;
}

int oracle_release_commit(struct oracle *o, struct bfc_range range)
{
        for (size_t i = 0; i < o->n_segments; i++) {
                struct segment *s = &o->segments[i];

                if (s->kind == 'r' && s->range.begin == range.begin && s->range.end == range.end) {
                        s->kind = '-';
                        tidy(o);
                        return 0;
                }
        }
        return -EINVAL;
}

/* ---- statistics ------------------------------------------------------------------------------ */

static uint64_t larger(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

void oracle_read_stats(const struct oracle *o, struct bfc_stats *ret)
{
        struct bfc_stats t = o->stats;

        for (size_t i = 0; i < o->n_segments; i++) {
                const struct segment *s = &o->segments[i];
                uint64_t n = length(s->range);

                t.bytes_reserved += s->kind != '-' ? n : 0;
                t.bytes_requested += s->n_requested;
                if (s->kind == 'u' || (s->kind == 'p' && !s->tail)) {
                        t.bytes_in_use += n;
                        t.num_blocks += s->n_requested != 0;
                }
                if (s->kind == 'f') {
                        t.bytes_free += n;
                        t.num_free_chunks++;
                        t.largest_free_block_bytes = larger(t.largest_free_block_bytes, n);
                }
        }
        t.peak_bytes_in_use = larger(t.peak_bytes_in_use, t.bytes_in_use);
        t.peak_bytes_requested = larger(t.peak_bytes_requested, t.bytes_requested);
        t.peak_bytes_reserved = larger(t.peak_bytes_reserved, t.bytes_reserved);
        *ret = t;
}

void oracle_clear_peaks(struct oracle *o)
{
        o->stats.peak_bytes_in_use = 0;
        o->stats.peak_bytes_requested = 0;
        o->stats.peak_bytes_reserved = 0;
        count_peaks(o);
}
