/* The sizes of an arena's extents.
 *
 * With share mode fd, extents of fixed sizes are made in large regions. The first region begins with
 * zones of small extents, so that the cost of a first block does not depend on the limit: each zone has
 * extents_per_zone extents, twice as large as those of the previous zone. All other extents have
 * extent_bytes. With cuda-ipc an extent has the size that a plan chose, and there are no zones.
 *
 * An extent of a GPU costs about a millisecond whatever its size, because each is exported, imported and mapped on its
 * own. So with a high limit a GPU's extents begin larger.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_EXTENT_SIZES_H
#define BFCD_EXTENT_SIZES_H

#include <stdbool.h>
#include <stdint.h>

#include "device/device.h"

#define EXTENT_MAX_COUNT 4096u /* fd: of one arena, also after its limit was raised, without exact blocks */
#define EXTENT_MIN_BYTES (UINT64_C(2) << 20)

/* cuda-ipc: a block of EXTENT_OWN_BYTES or more gets an extent of its own, others share one. */
#define EXTENT_OWN_BYTES    (UINT64_C(16) << 20)
#define EXTENT_SHARED_BYTES (UINT64_C(32) << 20)

/* fd: a block of EXTENT_EXACT_BYTES or more that must be in one extent gets one of just its size. */
#define EXTENT_EXACT_BYTES (UINT64_C(32) << 20)

/* Of the host an extent takes a worker thread's turn of a tenth of a second for each GiB, for which others wait. */
#define EXTENT_EXACT_HOST_BYTES (UINT64_C(1) << 30)

struct extent_sizes {
        uint64_t extent_bytes; /* cuda-ipc: sizes are multiples of it */
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone; /* 0: all extents are of one size */
};

/* The sizes of a new arena. fd: small extents have max(2 MiB, granularity), on a GPU 16 MiB with limits from 20 GiB on;
 * the largest have at least limit / 256, and enough that there are at most 257 extents with a limit of 4 GiB or less.
 * cuda-ipc: max(2 MiB, granularity), and no zones. */
struct extent_sizes extent_sizes_for(enum device_share share, bool is_cuda, uint64_t limit_bytes,
                                     uint64_t granularity);

/* True: an arena can have these sizes, which come from a ledger. */
bool extent_sizes_are_valid(const struct extent_sizes *s, uint64_t granularity);

/* The bytes of all zones together. */
uint64_t extent_zones_bytes(const struct extent_sizes *s);

/* The lowest limit, a multiple of 2 MiB, with which the largest extents have n_bytes (fd). */
uint64_t extent_limit_for(bool is_cuda, uint64_t n_bytes, uint64_t granularity);

/* The maximum number of extents of such an arena, the smallest first. With the sizes for its limit at
 * most 257 up to 4 GiB, 1,027 up to 256 GiB, 1,217 up to 1 TiB. */
uint64_t extent_max_count(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s);

/* How many exact blocks may be smaller than the largest extents. Larger ones add nothing to the count above: each has the
 * bytes of at least one other extent. And both together. */
uint64_t extent_max_exact(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s);
uint64_t extent_max_records(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s);

/* The maximum number of extents of this size (fd). */
uint64_t extent_max_count_of_size(uint64_t limit_bytes, const struct extent_sizes *s, uint64_t size);

/* The highest limit with which there are at most EXTENT_MAX_COUNT (fd). */
uint64_t extent_max_limit(const struct extent_sizes *s);

#endif
