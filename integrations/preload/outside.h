/* Memory that the driver gives to this process directly: charged, or outside of bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A call that makes such memory is between outside_begin() and outside_end(). A call that ends it is between
 * outside_take() and outside_took(): the driver may give the same address or handle to another thread before its
 * call returns here. */
#ifndef BFC_PRELOAD_OUTSIDE_H
#define BFC_PRELOAD_OUTSIDE_H

#include "integrations/preload/broker.h"

enum outside_kind { OUTSIDE_POINTER, OUTSIDE_ARRAY, OUTSIDE_MIPMAPPED, OUTSIDE_CONTEXT, OUTSIDE_GREEN };

struct outside {
        struct gpu *gpu; /* NULL: it is not counted */
        size_t n_bytes;
        bool is_managed; /* it may be on the host, so it is only charged with BFC_STRICT */
        bool is_charged; /* set by outside_begin(); else the daemon is told of it */
        struct lent
                *lent; /* of cuMemCreate(): it is a block instead, which outside_begin() knows nothing of */
        const char *function;
};

/* The driver takes 2 MiB at once. */
static inline size_t outside_whole(size_t n_bytes)
{
        const size_t unit = (size_t)2 << 20;

        return n_bytes > SIZE_MAX - unit ? SIZE_MAX : (n_bytes + unit - 1) / unit * unit;
}

/* The GPU of a location. What is not the host's is a GPU's, also where CUDA has new names for a part of one, such as
 * its locality domains: their location has the GPU's number in its first byte. -1: it is on the host. */
static inline int location_device(const CUmemLocation *location)
{
        int type = (int)location->type;

        if (type < CU_MEM_LOCATION_TYPE_DEVICE ||
            (type >= CU_MEM_LOCATION_TYPE_HOST && type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT))
                return -1;
        return type == CU_MEM_LOCATION_TYPE_DEVICE ? location->id : location->id & 0xff;
}

/* gpu: NULL for one that is passed on. CUDA_ERROR_NOT_PERMITTED: BFC_STRICT, and it cannot be charged.
 * CUDA_ERROR_OUT_OF_MEMORY. */
CUresult outside_begin(struct outside *o);
/* result: the driver's, which is returned. key: the address or handle that it gave, not used after an error. */
CUresult outside_end(const struct outside *o, CUresult result, enum outside_kind kind, uint64_t key);

struct outside_entry;
/* NULL: it is not counted. */
struct outside_entry *outside_take(enum outside_kind kind, uint64_t key);
CUresult outside_took(struct outside_entry *entry, CUresult result);
struct gpu *outside_gpu(const struct outside_entry *entry); /* takes NULL */

/* A context has ended, with what it had at the mark, which is made before the driver's call: another thread may have got a context
 * or memory at the same address since. Memory of cuMemCreate() is in no context. */
uint64_t outside_mark(void);
void outside_forget(CUcontext context, uint64_t mark);

/* ---- cuMemCreate() ----
 *
 * Memory that has a handle or is mapped. The driver may reuse the number of a released handle. */

CUresult outside_end_create(const struct outside *o, CUresult result, CUmemGenericAllocationHandle handle);
void outside_retain(CUmemGenericAllocationHandle handle);
CUresult outside_release(CUmemGenericAllocationHandle handle);
void outside_mapped(CUmemGenericAllocationHandle handle, CUdeviceptr pointer);
CUresult outside_unmap(CUdeviceptr pointer, size_t n_bytes);

/* Of memory that is a block: the program's references to the handle. */
unsigned outside_n_handles(const struct lent *lent);

/* All of its mappings, which stay the program's. False: it stays mapped. handle: the driver's. No call is in progress. */
bool outside_unmap_lent(const struct lent *lent, CUmemGenericAllocationHandle handle);

/* Maps them again. An error of the driver: none is mapped. */
CUresult outside_map_lent(const struct lent *lent, CUmemGenericAllocationHandle handle);

#endif
