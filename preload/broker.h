/* The proxy and bfcd: the client of this process, the GPUs that are partitions of it, and what is outside of it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The client is made at the first call that needs it. Its cache keeps little: programs that allocate often have a
 * cache of their own, and what that frees is to be free for others. If there is no daemon, all calls are passed on.
 * A GPU without a partition of the tenant is passed on, too. A line on stderr says so once. CUDA does not survive
 * fork(): a child of a process that has used it gets CUDA_ERROR_NOT_INITIALIZED. Each file with a lock makes it and its
 * lists anew in a child: another thread may have been in them. No lock is taken before a fork, because threads call
 * the driver with locks, and the driver's own handlers take its locks.
 *
 * Memory that the driver gives to this process directly, as by cuMemAllocManaged(), is outside of bfcd: the daemon does not
 * know it. It is counted here. With BFC_STRICT=1 it is refused. */
#ifndef BFC_PRELOAD_BROKER_H
#define BFC_PRELOAD_BROKER_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "preload/api.h"

struct gpu {
        bfc_client *client;
        const char *partition;     /* NULL: the client's own, for which bfc_malloc() is faster */
        uint64_t share;            /* BFC_SHARE_FD, BFC_SHARE_CUDA_IPC */
        size_t uneven_bytes;       /* atomic: no block could be had for this size; see lent.h */
        CUcontext primary;         /* atomic; a hint: it was the primary context. NULL: not looked up */
        uint64_t outside_bytes;    /* atomic: of memory that the limit applies to */
        uint64_t outside_managed;  /* atomic: of managed memory, which may be on the host */
        uint64_t peak_outside;     /* atomic: the most of both together */
        const char *outside_by[8]; /* atomic: the functions that made such memory; NULL: no more */
};

/* The GPU, if it is a partition of bfcd for this process. NULL: its calls are passed on. */
struct gpu *broker_gpu(CUdevice device);

/* The current context's device: an error of the driver, also before cuInit(), without a context and in a child. */
CUresult broker_device(CUdevice *ret);

/* The same of the current context. A driver's error; then *ret is not set. */
CUresult broker_current_gpu(struct gpu **ret);

/* The client, if there is one in this process already. */
bfc_client *broker_client(void);

/* The block in which an address is. To the driver the memory is extents, in which blocks of other allocations are, too. */
bool broker_find_block(CUdeviceptr pointer, struct bfc_block_info *ret);

/* BFC_STRICT. */
bool broker_is_strict(void);

/* What a negative result of the library means to a program. */
CUresult broker_result(int r);

/* Prints a line, once for each format. */
void broker_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Free bytes for this process, without what it has outside of bfcd. */
CUresult broker_mem_info(struct gpu *gpu, size_t *ret_n_free, size_t *ret_n_total);

/* The same for the proxy of NVML, by "GPU-..." or "MIG-...". -ENOENT: this process has no client, or the tenant no quota
 * there. */
__attribute__((visibility("default"))) int bfc_preload_mem_info(const char *uuid, size_t *ret_n_free,
                                                                size_t *ret_n_total);

/* CUDA_ERROR_OUT_OF_MEMORY: with n_bytes more, what this process has outside would exceed its limit. Costs nothing
 * while there is no such memory. */
CUresult broker_check_room(struct gpu *gpu, size_t n_bytes);

#endif
