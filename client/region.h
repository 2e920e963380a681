/* Regions: the address ranges of this session's blocks, and the extents that are mapped in them.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A place is valid only after an extent was mapped there, regardless of what the daemon says. Not
 * thread-safe. */
#ifndef BFC_CLIENT_REGION_H
#define BFC_CLIENT_REGION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "client/process.h"
#include "device/device.h"

struct region;

/* Zero-initialised is empty. */
struct regions {
        struct region **items;
        size_t n_items;
        uint64_t n_bytes_mapped; /* == the sum over the extents of all regions */
        struct unmapped *unmapped;
        bool inherits;   /* forked children keep host mappings; set by the owner, constant */
        int n_shareable; /* > 0: regions of one extent of a GPU keep its fd; set by the owner */
};

/* An extent as the daemon describes it. */
struct region_extent {
        uint64_t extent_id;
        uint64_t region_id;
        uint64_t region_bytes;
        uint64_t offset;
        uint64_t n_bytes;
        uint32_t partition;
};

void regions_clear(struct regions *r); /* unmaps everything; back to empty */

/* Maps an extent of its partition, which is on the device of `view`, and makes its region if it is the
 * first of it. *view outlives the regions. Earlier extents at this place were released by the daemon, and are dropped here. The
 * caller keeps memory->fd. An extent that is opened by a handle is all of its region, and is never
 * replaced. -EPROTO: it is invalid (bounds, another size or partition for the same region, not an
 * extent). -ENOMEM: it could not be recorded. REGIONS_UNMAPPED: this process cannot map it now; it is
 * recorded as unmapped, and memory->fd belongs to the regions. Without an fd this is always the result. */
enum { REGIONS_UNMAPPED = 1 };
int regions_map(struct regions *r, const struct region_extent *extent, const struct device_view *view,
                const struct device_extent *memory);

/* Tries again to map the unmapped extents at this place. 0: they are mapped. -ENOENT: there are none.
 * -EMFILE: one has no fd. Else the error of device_range_map() or device_range_new(). */
int regions_retry(struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* Drops all unmapped extents. The daemon must not rely on this process for them any more. */
void regions_forget_unmapped(struct regions *r);

/* The extent that contains a byte of a region. */
struct region_origin {
        uint64_t offset; /* of the extent's start in the region */
        uint64_t n_bytes;
        enum device_share share;
        uint8_t handle[DEVICE_HANDLE_BYTES]; /* DEVICE_SHARE_CUDA_IPC; else zeros */
};

/* -ENOENT: there is none. */
int regions_origin(const struct regions *r, uint64_t region_id, uint64_t offset, struct region_origin *ret);

/* Gives a GPU access to the regions of a partition on another one; see device_range_ops. Regions that are made later
 * have the view's peers. */
int regions_enable_peer(const struct regions *r, uint32_t partition, int ordinal);

/* The fd of a region of one extent. -1: it has none. */
int regions_fd(const struct regions *r, uint64_t region_id);

/* The range of a region, valid as long as the region. NULL: no such region. */
struct device_range *regions_range(const struct regions *r, uint64_t region_id);

uint32_t regions_partition(const struct regions *r, uint64_t region_id); /* UINT32_MAX: no such */
uint64_t regions_size(const struct regions *r, uint64_t region_id);      /* 0: no such */

/* The sum over the mapped extents of one partition. Visits all of them. */
uint64_t regions_mapped(const struct regions *r, uint32_t partition);
uint64_t regions_pinned(const struct regions *r, uint32_t partition); /* registered with CUDA */

/* Waits for the work in them, unmaps all extents and drops them; the first error. If waiting fails,
 * mappings stay until the process ends. is_captured: waiting is impossible, because a stream is being
 * captured. */
int regions_unmap_all(struct regions *r, bool is_captured);

/* The mapping of an extent; `range` is valid until the extent is unmapped, or regions_clear(). For an
 * unmapped extent `range` is NULL. */
struct region_place {
        uint64_t region_id;
        uint64_t offset;
        uint64_t n_bytes;
        struct device_range *range;
};

/* -ENOENT: there is no such extent here. */
int regions_find_extent(const struct regions *r, uint64_t extent_id, struct region_place *ret);

/* Returns the number of mapped extents, and the ids of the first `max`. */
size_t regions_list(const struct regions *r, uint64_t *ret_extent_ids, size_t max);

/* Unmaps and drops the extent, also an unmapped one. A region that is one extent ends with it, if it is not kept: its block
 * is parked. No work of this process may use it any more. -ENOENT, or the device's error. */
int regions_unmap(struct regions *r, uint64_t extent_id, bool keeps_region);

/* A parked block has gone: the region that was kept for it ends, if it is one. */
void regions_unkeep(struct regions *r, uint64_t region_id);

/* Unmaps all extents inside [offset, offset + n_bytes) of a region, which is kept: how many. Others stay mapped. */
size_t regions_unmap_all_in(struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes);

/* The address of a block. -EPROTO: no such region, or not every byte of the
 * block is in an extent. */
int regions_resolve(const struct regions *r, uint64_t region_id, uint64_t offset, uint64_t n_bytes,
                    void **ret);

#endif
