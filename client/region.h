/* Regions: the address ranges in which this session's blocks lie, and which of
 * their parts have extents behind them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Nothing that the daemon says about a place is believed before an extent was
 * seen there. Not thread-safe. */
#ifndef BFC_CLIENT_REGION_H
#define BFC_CLIENT_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/fork.h"
#include "device/device.h"

struct region;

/* Zero-initialised is empty. */
struct regions {
        struct region **items;
        size_t n_items;
        uint64_t n_bytes_mapped; /* == the sum over the extents of all regions */
        struct unmapped *unmapped;
        bool inherits; /* forked children keep what is mapped of the host; set by the owner, constant */
};

/* What the daemon tells of an extent. */
struct region_extent {
        uint64_t extent_id;
        uint64_t region_id;
        uint64_t region_bytes;
        uint64_t offset;
        uint64_t n_bytes;
        uint32_t partition;
};

void regions_clear(struct regions *r); /* unmaps everything; back to empty */

/* Maps an extent of its partition, which is on the device of `view`, making its
 * region when it is the first of it. Extents that lay there before are gone at
 * the daemon, and so forgotten here. The caller keeps memory->fd. One that is
 * opened by a handle is all of its region, and nothing takes its place. -EPROTO: it makes no
 * sense (bounds, another size or partition for the same region, not an extent).
 * -ENOMEM: it could not be noted. REGIONS_UNMAPPED: this process cannot map it now; it is
 * noted as unmapped, and memory->fd belongs to the regions. Without an fd it is always so. */
enum { REGIONS_UNMAPPED = 1 };
int regions_map(struct regions *r, const struct region_extent *extent, const struct device_view *view,
                const struct device_extent *memory);

/* Tries once more to map the unmapped extents in this place of a region. 0: they are mapped.
 * -ENOENT: there are none. -EMFILE: one has no fd. Else why one cannot be mapped (device_range_map(),
 * device_range_new()). */
int regions_retry(struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* Forgets all unmapped extents. The daemon must not count on this process for them any more. */
void regions_forget_unmapped(struct regions *r);

/* The extent in which a byte of a region lies. */
struct region_origin {
        uint64_t offset; /* where the extent begins in the region */
        uint64_t n_bytes;
        enum device_share share;
        uint8_t handle[DEVICE_HANDLE_BYTES]; /* DEVICE_SHARE_CUDA_IPC; else zeros */
};

/* -ENOENT: there is none. */
int regions_origin(const struct regions *r, uint64_t region_id, uint64_t offset, struct region_origin *ret);

/* The range of a region, NULL: no such. It lives as long as the region. */
struct device_range *regions_range(const struct regions *r, uint64_t region_id);

uint32_t regions_partition(const struct regions *r, uint64_t region_id); /* UINT32_MAX: no such */
uint64_t regions_size(const struct regions *r, uint64_t region_id);      /* 0: no such */

/* The sum over the extents that are mapped of one partition. Visits all of them. */
uint64_t regions_mapped(const struct regions *r, uint32_t partition);

/* Waits for the work in them, takes all extents away and forgets those that went;
 * the first error. Where it cannot be waited for, what is mapped stays until the process ends. is_captured:
 * so it is everywhere, because a stream is being captured. */
int regions_unmap_all(struct regions *r, bool is_captured);

/* Where an extent is mapped; `range` lives until the extent is unmapped, or regions_clear().
 * Of an unmapped extent `range` is NULL. */
struct region_place {
        uint64_t region_id;
        uint64_t offset;
        uint64_t n_bytes;
        struct device_range *range;
};

/* -ENOENT: there is no such extent here. */
int regions_find_extent(const struct regions *r, uint64_t extent_id, struct region_place *ret);

/* How many extents are mapped; the ids of the first so many. */
size_t regions_list(const struct regions *r, uint64_t *ret_extent_ids, size_t max);

/* Takes the extent away and forgets it, an unmapped one too; the region stays, but for one that had it
 * by a handle. No work of this process
 * may touch it any more. -ENOENT, or what the device says. */
int regions_unmap(struct regions *r, uint64_t extent_id);

/* The address of a block. -EPROTO: no such region, or not every byte of the
 * block lies in an extent. */
int regions_resolve(const struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes,
                    void **ret);

#endif
