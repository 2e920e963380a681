/* What CUDA contexts take of a GPU, charged to the lease as other memory of the driver.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A context is charged what NVML tells that this process has more after it was made. Where NVML does not tell it is charged the
 * size that the device's key "contexts" has in bfcd's configuration, or BFC_CONTEXT; that is charged before. "off": contexts are
 * not charged. A charge ends with its context. */
#ifndef BFC_PRELOAD_CHARGED_CONTEXT_H
#define BFC_PRELOAD_CHARGED_CONTEXT_H

#include "integrations/preload/broker.h"

/* The library will have memory in the primary context, also where the program has made another one: makes and charges it, unless
 * that was done. An error of the driver; CUDA_ERROR_OUT_OF_MEMORY: the limit has no room for it, as a line says. */
CUresult context_make_primary(struct gpu *gpu);

/* The GPU's client, which is made if there is none, and so is the primary context, in which it has memory. */
CUresult context_client(struct gpu *gpu, bfc_client **ret);

/* For the library, which calls the driver by itself: context_make_primary() before a client has its first memory on a GPU. The
 * proxy's own clients have it made already: in a thread that is in the proxy this does nothing. */
__attribute__((visibility("default"))) CUresult bfc_preload_charge_context(CUdevice device);

/* Releases the reference of context_make_primary(), if there is one: the library has no memory there. No call is in progress. */
void context_drop_primary(struct gpu *gpu);

/* A reference to the primary context, with which it may end. */
CUresult context_release(struct gpu *gpu);

/* The primary context has ended by a reset. No call is in progress. */
void context_was_reset(struct gpu *gpu);

#endif
