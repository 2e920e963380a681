/* What CUDA contexts take of a GPU, charged to the lease as other memory of the driver.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * BFC_CONTEXT=SIZE, which bfcctl run sets to 0: a context is charged what NVML tells that this process has more after it was
 * made, and SIZE where NVML does not tell; SIZE is charged before. Without the variable, or "off": contexts are not
 * charged. A charge ends with its context. */
#ifndef BFC_PRELOAD_CHARGED_CONTEXT_H
#define BFC_PRELOAD_CHARGED_CONTEXT_H

#include "preload/broker.h"

/* The library has memory in the primary context, also where the program has made another one: makes and charges it, unless
 * that was done. An error of the driver; CUDA_ERROR_OUT_OF_MEMORY: the limit has no room for it, as a line says. */
CUresult context_charge_primary(struct gpu *gpu, CUdevice device);

#endif
