/* Occupancy: how full each part of an extent is, and the map of an arena.
 *
 * An extent is divided into 64 to 127 cells, each with the number of block bytes in it. These are updated
 * with each block that is added or removed, so a map of a million blocks takes no longer than one of ten:
 * it reads cells, never blocks.
 *
 * Invariant: used_bytes == sum of the cells == bytes of blocks in the extent, except that a block that
 * covers the whole extent is counted in used_bytes only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_OCCUPANCY_H
#define BFCD_OCCUPANCY_H

#include <stdbool.h>
#include <stdint.h>

#include "bfc/bfc.h"

struct occupancy { /* of one extent */
        uint64_t n_bytes;
        uint64_t used_bytes;
        unsigned shift;  /* a cell has 1 << shift bytes, the last may be short */
        uint32_t *cells; /* in granules; NULL: there was no memory for them */
};

/* An extent without blocks. Without memory for the cells it only has the total. */
void occupancy_open(struct occupancy *o, uint64_t n_bytes);
void occupancy_close(struct occupancy *o);

/* Adds or removes a block, or its part in this extent, at this range from the extent's start. */
void occupancy_add(struct occupancy *o, struct bfc_range range);
void occupancy_remove(struct occupancy *o, struct bfc_range range);

/* The cells add up; slow. */
bool occupancy_check(const struct occupancy *o);

/* ---- the map ---------------------------------------------------------------- */

#define PICTURE_CHARACTERS 100u

enum {
        PICTURE_USED = '#',     /* all of it, by blocks */
        PICTURE_FREE = '.',     /* backed, no block in it */
        PICTURE_MIXED = '+',    /* more than one of the others */
        PICTURE_LEAVING = '~',  /* being released */
        PICTURE_UNBACKED = '-', /* no memory behind it */
};

/* PICTURE_CHARACTERS characters for equal parts of a span of offsets. A partly used cell makes every
 * character mixed that it overlaps. */
struct picture {
        struct bfc_range span;
        struct {
                bool has_used, has_free, has_leaving;
                uint64_t backed_bytes;
        } parts[PICTURE_CHARACTERS];
};

void picture_begin(struct picture *p, struct bfc_range span);

/* Adds an extent inside the span; one that is being released has no blocks. */
void picture_add(struct picture *p, struct bfc_range extent, const struct occupancy *o, bool leaves);

/* An empty span gives an empty map. */
void picture_draw(const struct picture *p, char ret[PICTURE_CHARACTERS + 1]);

#endif
