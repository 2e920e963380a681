/* The allocator against the oracle, led by arbitrary bytes.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first four bytes make the space: the grid, the size of the first region,
 * the size of its first extent and whether it is backed, the size of a second
 * region. A grid of an even number of granules may have zones of smaller extents,
 * which the highest bits of the first byte and the second byte choose. Then four bytes are one operation: which,
 * and a number for it, whose highest bit asks for a block in one extent, or splits one instead of freeing it. After
 * each one every chunk, statistic and invariant is compared. */
#include "tests/bfc_pair.h"

#include <stdio.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

#define MAX_STEPS 2000

static void require(const char *why)
{
        if (!why)
                return;
        fprintf(stderr, "fuzz_bfc: %s\n", why);
        abort();
}

/* Sizes cover a granule to more than the space; other numbers are taken as they are. */
static uint64_t value_for(enum pair_op op, uint64_t number)
{
        if (op == PAIR_ALLOC || op == PAIR_GROW)
                return (number & 0xffff) >> (number >> 16 & 15);
        if (op == PAIR_RELEASE_ANY || op == PAIR_BACK)
                return (number & 0xff) | (number & 0xff00) << 8 | (number & 0x10000) << 16;
        return number;
}

static enum pair_op variant(enum pair_op op, uint64_t number)
{
        if (number >> 23 == 0)
                return op;
        switch (op) {
        case PAIR_ALLOC:
                return PAIR_ALLOC_IN_EXTENT;
        case PAIR_GROW:
                return PAIR_GROW_IN_EXTENT;
        case PAIR_FREE:
                return PAIR_SPLIT;
        default:
                return op;
        }
}

/* As many zones as asked for, if the grid can be halved so often. */
static struct bfc_zones zones_for(uint64_t extent, unsigned n_zones, unsigned per_zone, uint64_t first)
{
        uint64_t small = extent;

        while (n_zones-- > 0 && small % (2 * BFC_GRANULE) == 0)
                small /= 2;
        return (struct bfc_zones){ first, small, per_zone };
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        uint64_t extent, n_extents, first, n_bytes;
        struct bfc_zones zones;
        struct pair p;

        if (n_data < 4)
                return 0;
        extent = (1 + data[0] % 32) * (uint64_t)BFC_GRANULE;
        n_extents = 1 + data[1] % 32;
        first = (data[2] & 0x7fu) * (uint64_t)BFC_GRANULE;
        pair_init(&p, extent);
        zones = zones_for(extent, data[0] / 32, data[1] / 32, first);
        n_bytes = n_extents * extent + data[1] / 32 * BFC_GRANULE;
        n_bytes += bfc_zones_bytes(&zones, extent);
        if (zones.first_extent_bytes > n_bytes - bfc_zones_bytes(&zones, extent))
                zones.first_extent_bytes = n_bytes - bfc_zones_bytes(&zones, extent);
        require(pair_add_zoned_region(&p, extent, n_bytes, &zones, data[2] >= 0x80));
        if (data[3] != 0)
                require(pair_add_region(&p, extent + n_bytes + 2 * BFC_GRANULE,
                                        data[3] * (uint64_t)BFC_GRANULE, 0, false));
        for (size_t i = 4; i + 4 <= n_data && i < 4 * MAX_STEPS; i += 4) {
                enum pair_op op = (enum pair_op)(data[i] % (PAIR_REGION + 1));
                uint64_t number = data[i + 1] | (uint64_t)data[i + 2] << 8 | (uint64_t)data[i + 3] << 16;

                require(pair_step(&p, variant(op, number), value_for(op, number)));
                require(pair_compare(&p));
        }
        pair_done(&p);
        return 0;
}
