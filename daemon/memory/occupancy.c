/* Occupancy and its picture; see occupancy.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/occupancy.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/number.h"

#define OCCUPANCY_MIN_CELLS 64u

static uint64_t occupancy_cell_bytes(const struct occupancy *o)
{
        return UINT64_C(1) << o->shift;
}

static size_t occupancy_n_cells(const struct occupancy *o)
{
        return (size_t)((o->n_bytes - 1) >> o->shift) + 1;
}

static struct bfc_range occupancy_cell(const struct occupancy *o, size_t i)
{
        uint64_t begin = (uint64_t)i << o->shift;

        return (struct bfc_range){ begin, min_u64(begin + occupancy_cell_bytes(o), o->n_bytes) };
}

void occupancy_open(struct occupancy *o, uint64_t n_bytes)
{
        assert(n_bytes > 0 && n_bytes % BFC_GRANULE == 0);
        *o = (struct occupancy){ .n_bytes = n_bytes };
        while (n_bytes >> (o->shift + 1) >= OCCUPANCY_MIN_CELLS)
                o->shift++;
        while (occupancy_cell_bytes(o) < BFC_GRANULE)
                o->shift++;
        o->cells = calloc(occupancy_n_cells(o), sizeof(o->cells[0]));
}

void occupancy_close(struct occupancy *o)
{
        free(o->cells);
        *o = (struct occupancy){ 0 };
}

static bool occupancy_is_all(const struct occupancy *o, struct bfc_range range)
{
        return range.begin == 0 && range.end == o->n_bytes;
}

/* A range is whole granules; what is taken off wraps back to what there was. */
static void occupancy_count(struct occupancy *o, struct bfc_range range, uint32_t sign)
{
        size_t i, last;

        if (!o->cells || occupancy_is_all(o, range))
                return;
        last = (size_t)((range.end - 1) >> o->shift);
        for (i = (size_t)(range.begin >> o->shift); i <= last; i++) {
                struct bfc_range cell = occupancy_cell(o, i);
                uint64_t n_bytes = min_u64(cell.end, range.end) - max_u64(cell.begin, range.begin);

                o->cells[i] += sign * (uint32_t)(n_bytes / BFC_GRANULE);
        }
}

void occupancy_add(struct occupancy *o, struct bfc_range range)
{
        assert(range.begin < range.end && range.end <= o->n_bytes);
        assert(range.end - range.begin <= o->n_bytes - o->used_bytes);
        o->used_bytes += range.end - range.begin;
        occupancy_count(o, range, 1);
}

void occupancy_remove(struct occupancy *o, struct bfc_range range)
{
        assert(range.begin < range.end && range.end <= o->n_bytes);
        assert(range.end - range.begin <= o->used_bytes);
        o->used_bytes -= range.end - range.begin;
        occupancy_count(o, range, UINT32_MAX);
}

bool occupancy_check(const struct occupancy *o)
{
        uint64_t sum = 0;

        if (o->used_bytes > o->n_bytes)
                return false;
        if (!o->cells)
                return true;
        for (size_t i = 0; i < occupancy_n_cells(o); i++) {
                struct bfc_range cell = occupancy_cell(o, i);

                if ((uint64_t)o->cells[i] * BFC_GRANULE > cell.end - cell.begin)
                        return false;
                sum += (uint64_t)o->cells[i] * BFC_GRANULE;
        }
        return sum == o->used_bytes || (sum == 0 && o->used_bytes == o->n_bytes);
}

/* ---- the picture ----------------------------------------------------------- */

void picture_begin(struct picture *p, struct bfc_range span)
{
        memset(p, 0, sizeof(*p));
        p->span = span;
}

static uint64_t picture_bytes(const struct picture *p)
{
        return p->span.end - p->span.begin;
}

/* Where character i begins, from the span's begin; no overflow: the space is below 2^40. */
static uint64_t picture_at(const struct picture *p, size_t i)
{
        return i * picture_bytes(p) / PICTURE_CHARACTERS;
}

static void picture_add_piece(struct picture *p, struct bfc_range piece, uint64_t used_bytes, bool leaves)
{
        uint64_t n_bytes = piece.end - piece.begin;
        uint64_t at = piece.begin - p->span.begin, end = piece.end - p->span.begin;
        size_t i = (size_t)(at * PICTURE_CHARACTERS / picture_bytes(p));

        for (; i < PICTURE_CHARACTERS && picture_at(p, i) < end; i++) {
                uint64_t begin = max_u64(at, picture_at(p, i)), stop = min_u64(end, picture_at(p, i + 1));

                if (begin >= stop)
                        continue;
                p->parts[i].backed_bytes += stop - begin;
                p->parts[i].has_leaving |= leaves;
                p->parts[i].has_used |= used_bytes > 0;
                p->parts[i].has_free |= !leaves && used_bytes < n_bytes;
        }
}

void picture_add(struct picture *p, struct bfc_range extent, const struct occupancy *o, bool leaves)
{
        bool even = leaves || o->used_bytes == 0 || o->used_bytes == o->n_bytes;

        assert(p->span.begin <= extent.begin && extent.end <= p->span.end);
        assert(extent.end - extent.begin == o->n_bytes);
        assert(!leaves || o->used_bytes == 0);
        if (even || !o->cells) {
                picture_add_piece(p, extent, o->used_bytes, leaves);
                return;
        }
        for (size_t i = 0; i < occupancy_n_cells(o); i++) {
                struct bfc_range cell = occupancy_cell(o, i);

                cell.begin += extent.begin;
                cell.end += extent.begin;
                picture_add_piece(p, cell, (uint64_t)o->cells[i] * BFC_GRANULE, false);
        }
}

static char picture_character(const struct picture *p, size_t i)
{
        unsigned n_kinds = (unsigned)p->parts[i].has_used + p->parts[i].has_free + p->parts[i].has_leaving;

        if (n_kinds == 0)
                return PICTURE_UNBACKED;
        if (n_kinds > 1 || p->parts[i].backed_bytes < picture_at(p, i + 1) - picture_at(p, i))
                return PICTURE_MIXED;
        return p->parts[i].has_used ? PICTURE_USED : p->parts[i].has_free ? PICTURE_FREE : PICTURE_LEAVING;
}

void picture_draw(const struct picture *p, char ret[PICTURE_CHARACTERS + 1])
{
        size_t n = picture_bytes(p) > 0 ? PICTURE_CHARACTERS : 0;

        for (size_t i = 0; i < n; i++)
                ret[i] = picture_character(p, i);
        ret[n] = '\0';
}
