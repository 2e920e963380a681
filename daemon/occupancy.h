/* Occupancy: how full each part of an extent is, and the picture of an arena that
 * is drawn of it.
 *
 * An extent is cut into 64 to 127 cells, and each knows how many bytes of blocks
 * lie in it. That is counted with each block that comes and goes, so that a picture
 * of a million blocks takes no longer than one of ten: it looks at cells, never at
 * blocks.
 *
 * Invariant: used_bytes == sum of the cells == bytes of blocks in the extent, but
 * for a block that covers all of it, which is counted in used_bytes alone.
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

/* An extent in which nothing lies. Without memory for the cells it knows only how
 * much is used in all. */
void occupancy_open(struct occupancy *o, uint64_t n_bytes);
void occupancy_close(struct occupancy *o);

/* A block (or the part of it in this extent) comes to lie at this range, counted
 * from the extent's begin; or it leaves. */
void occupancy_add(struct occupancy *o, struct bfc_range range);
void occupancy_remove(struct occupancy *o, struct bfc_range range);

/* The cells add up; slow. */
bool occupancy_check(const struct occupancy *o);

/* ---- the picture ---------------------------------------------------------- */

#define PICTURE_CHARACTERS 100u

enum {
        PICTURE_USED = '#',     /* all of it, by blocks */
        PICTURE_FREE = '.',     /* backed, no block in it */
        PICTURE_MIXED = '+',    /* more than one of the others */
        PICTURE_LEAVING = '~',  /* being given back */
        PICTURE_UNBACKED = '-', /* no memory behind it */
};

/* As many characters, of equal parts of a span of offsets. A cell that is used in
 * part makes every character mixed in which any of it lies. */
struct picture {
        struct bfc_range span;
        struct {
                bool has_used, has_free, has_leaving;
                uint64_t backed_bytes;
        } parts[PICTURE_CHARACTERS];
};

void picture_begin(struct picture *p, struct bfc_range span);

/* An extent inside the span; nothing may lie in one that leaves. */
void picture_add(struct picture *p, struct bfc_range extent, const struct occupancy *o, bool leaves);

/* An empty span is an empty picture. */
void picture_draw(const struct picture *p, char ret[PICTURE_CHARACTERS + 1]);

#endif
