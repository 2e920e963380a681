/* NVIDIA's driver, loaded at run time: loading, errors, contexts.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Used by the daemon's side (cuda.c) and the client's (cuda_range.c). One binary runs with and without a
 * GPU, because it is not linked with CUDA. A process loads the driver once. CUDA does not survive fork(),
 * so no function here calls the driver in a forked child.
 *
 * Contexts are the primary contexts, which the runtime API shares. They are made current only during one
 * of our calls, on top of the thread's stack: afterwards the caller's context is current again. */
#ifndef BFC_DEVICE_CUDA_DRIVER_H
#define BFC_DEVICE_CUDA_DRIVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/cuda_api.h"

#define CUDA_FUNCTIONS_OF_BFCD
#define F(symbol, base, version, arguments) CUresult(*symbol) arguments;
struct cuda_driver {
#include "device/cuda_functions.h"
};
#undef F
#undef CUDA_FUNCTIONS_OF_BFCD

/* Loads and initialises the driver at the first call; all its functions but cuStreamGetId are set. -ENODEV and a sentence
 * that says what is missing. Any thread. */
int cuda_driver_get(const struct cuda_driver **ret, const char **ret_sentence);

/* The driver if this process uses CUDA already: neither loads nor initialises it. -ENODEV: it does not. */
int cuda_driver_get_used(const struct cuda_driver **ret);

/* 0 or -errno. -ENODEV: there is no device, it is lost, or its context is broken for the rest of the
 * process. -EBUSY: a stream is being captured. -EIO: an unexpected error. */
int cuda_driver_errno(CUresult result);

/* This process's context is permanently broken; the device itself works. */
bool cuda_driver_broke_context(CUresult result);

/* As cuda_driver_errno(), but -ENOTRECOVERABLE for a broken context: for a keeper, whose context can end without the
 * device. */
int cuda_driver_owner_errno(CUresult result);

/* For messages: "out of memory (CUDA_ERROR_OUT_OF_MEMORY)". */
void cuda_driver_describe(const struct cuda_driver *cu, CUresult result, char *ret, size_t n_bytes);

/* The process will have memory there, and so the primary context. Behind our proxy that makes the context, and charges it to the
 * process's lease, unless that was done: the library's own calls do not pass the proxy. Else nothing. No lock is held that an
 * answer to the daemon needs. CUDA_ERROR_OUT_OF_MEMORY: the limit has no room for it, as a line on standard error says. */
CUresult cuda_driver_charge_context(CUdevice device);

/* Finds a device by UUID among those that this process sees. -ENODEV. */
int cuda_driver_find(const struct cuda_driver *cu, const uint8_t uuid[16], CUdevice *ret);

struct cuda_context {
        const struct cuda_driver *cu;
        CUdevice device;
        CUcontext context;
};

CUresult cuda_context_open(const struct cuda_driver *cu, CUdevice device, struct cuda_context *ret);
void cuda_context_close(struct cuda_context *c);
/* The context is current between these two calls. -ENODEV, also in a forked child; then do not call the
 * driver. */
int cuda_context_enter(const struct cuda_context *c);
void cuda_context_leave(const struct cuda_context *c);

/* Waits for all work of the current context. It must not be waited for while one of its streams is captured. For
 * streams that synchronize with the default stream this is queried here, without harm; the caller has queried the
 * others that are known. */
CUresult cuda_context_wait(const struct cuda_driver *cu);

/* Makes the context current in a program whose thread may be capturing a stream. Until cuda_context_depart() the
 * thread is in relaxed mode, in which calls without a stream invalidate no capture. */
struct cuda_mode {
        CUstreamCaptureMode before;
        bool is_changed;
};
int cuda_context_visit(const struct cuda_context *c, struct cuda_mode *ret);
void cuda_context_depart(const struct cuda_context *c, struct cuda_mode *mode);

#endif
