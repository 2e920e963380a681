/* cuMemCreate() by bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A large request is one or two parkable blocks, which have whole extents, and are in use, so they are never parked. Where the
 * program maps its handle, all extents are mapped one after the other, beside their place in the library's range. Such
 * a handle is a number of the proxy's own, and no function of the driver may see it.
 *
 * Small requests are the driver's, because whole extents would be much larger. So is one for which no extents have the
 * size together. */
#ifndef BFC_PRELOAD_LENT_H
#define BFC_PRELOAD_LENT_H

#include "preload/broker.h"

/* The request can be a block. */
bool lent_is_for(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags);

/* LENT_NOT: no block can be had for it, and it is to be the driver's. CUDA_ERROR_NOT_SUPPORTED: the program should ask
 * without a fabric handle. */
enum { LENT_NOT = -4096 }; /* no errno */
int lent_create(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop,
                CUmemGenericAllocationHandle *ret_handle);

/* LENT_NOT: the handle is the driver's, also if ret is NULL. Otherwise the function's result. */
int lent_release(CUmemGenericAllocationHandle handle);
int lent_map(CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags);
int lent_properties(CUmemGenericAllocationHandle handle, CUmemAllocationProp *ret);

/* For ipc.c. The blocks of a handle; 0: the handle is the driver's. Another handle of memory of this process, by its
 * first block; and a handle of blocks that were attached, which belong to the handle unless this fails. */
#define LENT_BLOCKS 2
size_t lent_blocks(CUmemGenericAllocationHandle handle, void *ret[static LENT_BLOCKS]);
CUresult lent_again(uint64_t block_id, CUmemGenericAllocationHandle *ret_handle);
CUresult lent_attach(const struct bfc_block_info *infos, size_t n, CUmemGenericAllocationHandle *ret_handle);

/* The handle of the memory that is mapped at an address. False: it is the driver's. */
bool lent_retain(CUdeviceptr pointer, CUmemGenericAllocationHandle *ret_handle);

/* The mapping in which an address is. */
struct lent_view {
        CUdeviceptr base;
        size_t n_bytes;
};
bool lent_find_view(CUdeviceptr pointer, struct lent_view *ret);

/* The first mapping that begins in a range. */
bool lent_next_view(CUdeviceptr pointer, size_t n_bytes, struct lent_view *ret);

/* Unmaps the mapping that begins there. */
CUresult lent_unmap(CUdeviceptr pointer);

/* Unmaps and forgets all memory of the GPU, whose client is about to end. */
void lent_forget(const struct gpu *gpu);

#endif
