/* NVIDIA's driver as found at run time: loading it, its errors, its contexts.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Shared by the daemon's end (cuda.c) and the client's (cuda_range.c). Nothing is
 * linked: one binary runs with and without a GPU. A process loads the driver
 * once, and a child that it forks has none: CUDA does not survive fork(), so
 * nothing here touches the driver there.
 *
 * Contexts are the devices' primary ones, which the runtime API shares. They are
 * made current for the length of one call of ours, on top of the thread's stack:
 * what the caller had made current is so again afterwards. */
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

/* The driver, loaded and initialised at the first call; every function of it is
 * there. -ENODEV, and a sentence that says what is missing. Any thread. */
int cuda_driver_get(const struct cuda_driver **ret, const char **ret_sentence);

/* 0 or -errno. -ENODEV: no device, or it was lost, or its context is broken for
 * the rest of this process's life. -EBUSY: a stream is being captured. -EIO: what
 * nobody expects. */
int cuda_driver_errno(CUresult result);

/* This process's context is broken for good; the device goes on without it. */
bool cuda_driver_broke_context(CUresult result);

/* For people: "out of memory (CUDA_ERROR_OUT_OF_MEMORY)". */
void cuda_driver_describe(const struct cuda_driver *cu, CUresult result, char *ret, size_t n_bytes);

/* By UUID, among what this process sees. -ENODEV. */
int cuda_driver_find(const struct cuda_driver *cu, const uint8_t uuid[16], CUdevice *ret);

struct cuda_context {
        const struct cuda_driver *cu;
        CUdevice device;
        CUcontext context;
};

CUresult cuda_context_open(const struct cuda_driver *cu, CUdevice device, struct cuda_context *ret);
void cuda_context_close(struct cuda_context *c);
/* Between these two the context is current. -ENODEV (also in a forked child; then
 * nothing of the driver may be touched). */
int cuda_context_enter(const struct cuda_context *c);
void cuda_context_leave(const struct cuda_context *c);

/* The same in a program whose thread may be capturing a stream: until it departs the thread
 * is in relaxed mode, in which calls that have to do with no stream spoil no capture. */
struct cuda_mode {
        CUstreamCaptureMode before;
        bool is_changed;
};
int cuda_context_visit(const struct cuda_context *c, struct cuda_mode *ret);
void cuda_context_depart(const struct cuda_context *c, struct cuda_mode *mode);

#endif
