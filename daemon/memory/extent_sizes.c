/* The sizes of extents; see extent_sizes.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/extent_sizes.h"

#include "bfc/bfc.h"
#include "daemon/base/number.h"

#define EXTENTS_PER_LIMIT 256u
/* Up to this limit there are no more extents than with one size. */
#define FEW_EXTENTS_LIMIT (UINT64_C(4) << 30)
#define FEW_PER_ZONE      32u
#define MANY_PER_ZONE     96u
/* On a GPU, from this limit on. */
#define LARGE_LIMIT    (UINT64_C(20) << 30)
#define LARGE_UNIT     (UINT64_C(16) << 20)
#define LARGE_PER_ZONE 48u
#define MAX_EXACT      256u
#define SMALL_EXTENTS  64u /* cuda-ipc: so many may be smaller than EXTENT_OWN_BYTES */

uint64_t extent_zones_bytes(const struct extent_sizes *s)
{
        return bfc_zones_bytes(&(struct bfc_zones){ 0, s->small_extent_bytes, s->extents_per_zone },
                               s->extent_bytes);
}

uint64_t extent_max_count_of_size(uint64_t limit_bytes, const struct extent_sizes *s, uint64_t size)
{
        if (size == s->extent_bytes)
                return (limit_bytes - min_u64(limit_bytes, extent_zones_bytes(s))) / size;
        return size >= s->small_extent_bytes && size < s->extent_bytes
                       ? min_u64(limit_bytes / size, s->extents_per_zone)
                       : 0;
}

uint64_t extent_max_count(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s)
{
        uint64_t rest = limit_bytes, n = 1; /* the first one, which may be of any size */

        if (share != DEVICE_SHARE_FD)
                return limit_bytes / EXTENT_OWN_BYTES + SMALL_EXTENTS;
        for (uint64_t size = s->small_extent_bytes; size < s->extent_bytes; size *= 2) {
                uint64_t n_here = min_u64(rest / size, s->extents_per_zone);

                n += n_here;
                rest -= n_here * size;
        }
        return n + rest / s->extent_bytes;
}

uint64_t extent_max_exact(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s)
{
        return share == DEVICE_SHARE_FD && s->extent_bytes > EXTENT_EXACT_BYTES
                       ? min_u64(limit_bytes / EXTENT_EXACT_BYTES, MAX_EXACT)
                       : 0;
}

uint64_t extent_max_records(enum device_share share, uint64_t limit_bytes, const struct extent_sizes *s)
{
        return extent_max_count(share, limit_bytes, s) + extent_max_exact(share, limit_bytes, s);
}

uint64_t extent_max_limit(const struct extent_sizes *s)
{
        uint64_t zones_bytes = extent_zones_bytes(s);
        uint64_t n_zoned = extent_max_count(DEVICE_SHARE_FD, zones_bytes, s);

        return zones_bytes + s->extent_bytes * (EXTENT_MAX_COUNT - n_zoned);
}

struct extent_sizes extent_sizes_for(enum device_share share, bool is_cuda, uint64_t limit_bytes,
                                     uint64_t granularity)
{
        bool is_few = limit_bytes <= FEW_EXTENTS_LIMIT, is_large = is_cuda && limit_bytes >= LARGE_LIMIT;
        bool begins_large = is_large && share == DEVICE_SHARE_FD;
        uint64_t unit = round_up_u64(begins_large ? LARGE_UNIT : EXTENT_MIN_BYTES, granularity);
        struct extent_sizes s = { unit, unit, 0 };

        if (share != DEVICE_SHARE_FD || limit_bytes == 0)
                return s;
        while (s.extent_bytes <= (limit_bytes - 1) / EXTENTS_PER_LIMIT ||
               (is_few && extent_max_count(share, limit_bytes, &s) > EXTENTS_PER_LIMIT + 1)) {
                s.extent_bytes *= 2;
                s.extents_per_zone = is_few ? FEW_PER_ZONE : is_large ? LARGE_PER_ZONE : MANY_PER_ZONE;
        }
        return s;
}

bool extent_sizes_are_valid(const struct extent_sizes *s, uint64_t granularity)
{
        uint64_t size = s->small_extent_bytes;

        if (size == 0 || size % granularity != 0 || s->extent_bytes > BFC_MAX_SPACE)
                return false;
        while (size < s->extent_bytes)
                size *= 2;
        return size == s->extent_bytes && extent_zones_bytes(s) <= BFC_MAX_SPACE / 2 &&
               extent_max_count(DEVICE_SHARE_FD, extent_zones_bytes(s), s) < EXTENT_MAX_COUNT;
}

/* The largest extents never become smaller with a higher limit. */
uint64_t extent_limit_for(bool is_cuda, uint64_t n_bytes, uint64_t granularity)
{
        uint64_t low = 0, high = BFC_MAX_SPACE / EXTENT_MIN_BYTES; /* in such steps */

        while (low + 1 < high) {
                uint64_t middle = low + (high - low) / 2;

                if (extent_sizes_for(DEVICE_SHARE_FD, is_cuda, middle * EXTENT_MIN_BYTES, granularity)
                            .extent_bytes >= n_bytes)
                        high = middle;
                else
                        low = middle;
        }
        return high * EXTENT_MIN_BYTES;
}
