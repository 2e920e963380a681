/* cuMemCreate() by bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A large request is a block with an extent of its own, of just that size. The program gets the driver's handle of it, so
 * that the driver maps it, gives access to it, and binds it. outside.h knows when its last handle and mapping are gone:
 * then the block is freed. Only an export is not the driver's, which exports nothing that was imported: it is another fd
 * of the extent. */
#ifndef BFC_PRELOAD_LENT_H
#define BFC_PRELOAD_LENT_H

#include "preload/broker.h"

struct lent;

/* The request can be a block. */
bool lent_is_for(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags);

/* LENT_NOT: no block can be had for it, and it is to be the driver's. */
enum { LENT_NOT = -4096 }; /* no errno */
int lent_create(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop,
                CUmemGenericAllocationHandle *ret_handle);

/* LENT_NOT: the handle is the driver's own, and so is the call. */
int lent_export(CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long flags,
                void *ret_os_handle);

/* The program has no handle and no mapping of it any more. */
void lent_end(struct lent *lent);

/* The GPU's client is about to end, with its blocks. The program keeps what it has of them. */
void lent_forget(const struct gpu *gpu);

#endif
