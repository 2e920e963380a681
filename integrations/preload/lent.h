/* cuMemCreate() by bfcd; see broker.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A large request is a block with an extent of its own, of just that size. The program gets the driver's handle of it, so
 * that the driver maps it, gives access to it, and binds it. outside.h knows when its last handle and mapping are gone:
 * then the block is freed. Only an export is not the driver's, which exports nothing that was imported: it is another fd
 * of the extent.
 *
 * While the program is idle (idle.h) the memory sleeps: nothing is mapped and the driver has no handle of it, so that the block can be
 * parked. When it wakes the driver has another number for it. The program's number is then only a name, which the proxy translates,
 * and no other memory of the program gets that number. */
#ifndef BFC_PRELOAD_LENT_H
#define BFC_PRELOAD_LENT_H

#include "integrations/preload/broker.h"

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

/* ---- numbers ---- */

/* Of the program, to the driver's. CUDA_ERROR_NOT_READY: the memory sleeps. */
CUresult lent_find_handle(CUmemGenericAllocationHandle *handle);

/* The driver has counted a reference for the program: its number, to the program's. */
CUresult lent_retained(CUmemGenericAllocationHandle *handle);

/* The program has the number for memory that the driver knows by another one, or that sleeps. */
bool lent_has_name(CUmemGenericAllocationHandle handle);

/* The driver has one reference, and the program's are counted here. */
bool lent_is_counted(const struct lent *lent);

/* ---- sleep ---- */

bool lent_is_asleep(const struct lent *lent);
bool lent_sleeps(void); /* some does */
bool lent_has_any(void);

/* All that can. Returns how many bytes sleep. No call is in progress, and the GPUs have no work. */
uint64_t lent_sleep(void);

/* A GPU with memory that sleeps; NULL: none does. A use of all its blocks is then begun by the tag, and lent_wake() wakes
 * them, and ends the second use of those that were awake; what was made meanwhile may keep it until it sleeps. -EIO: some
 * sleeps on. No call is in progress. */
struct gpu *lent_sleeping_gpu(void);
#define LENT_TAG "cuMemCreate"
int lent_wake(struct gpu *gpu);

#endif
