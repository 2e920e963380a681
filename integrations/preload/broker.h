/* The proxy and bfcd: the clients of this process, the GPUs that are partitions of it, and what is outside of it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each GPU has a client of its own from its first memory on, because a program can end all memory of one GPU by
 * cuDevicePrimaryCtxReset(): then the client ends, and the next memory makes another one. A client's cache keeps
 * little: programs that allocate often have a
 * cache of their own, and what that frees is to be free for others. If there is no daemon, all calls are passed on.
 * A GPU without a partition of the tenant is passed on, too. A line on stderr says so once. CUDA does not survive
 * fork(): a child of a process that has used it gets CUDA_ERROR_NOT_INITIALIZED. Each file with a lock makes it and its
 * lists anew in a child: another thread may have been in them. No lock is taken before a fork, because threads call
 * the driver with locks, and the driver's own handlers take its locks.
 *
 * Memory that the driver gives to this process directly is charged before, by a client of its own, which lives as long
 * as the process. Where that cannot be, as for managed memory, it is outside of bfcd: the daemon is told of it for those who look,
 * and decides nothing by it. With BFC_STRICT=1 it is charged or refused. */
#ifndef BFC_PRELOAD_BROKER_H
#define BFC_PRELOAD_BROKER_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "integrations/preload/api.h"

struct gpu {
        bfc_client *client;    /* atomic; NULL: it has no memory; see context_client() */
        char name[64];         /* of the partition */
        const char *partition; /* the same, or NULL: the client's own, for which bfc_malloc() is faster */
        uint64_t share;        /* BFC_SHARE_FD, BFC_SHARE_CUDA_IPC */
        uint64_t id;           /* the same in all processes */
        char uuid[64];         /* as NVML has it */
        CUdevice device;
        uint64_t context_bytes;    /* of bfc_partition_info() */
        pthread_mutex_t contexts;  /* while a context is made or released; see charged_context.c */
        bool is_retained;          /* the primary context, for the library */
        uint64_t peers;            /* by bit: GPUs that may use its memory; changed under a lock */
        CUcontext primary;         /* atomic; the primary context. NULL: there is none, or it is not known */
        uint64_t total_bytes;      /* atomic: the limit, when it was last asked for */
        uint64_t room_bytes;       /* atomic: charged and not in use; see charge.h */
        uint64_t outside_bytes;    /* atomic: of memory that is not charged */
        uint64_t peak_outside;     /* atomic: the most of it */
        const char *outside_by[8]; /* atomic: the functions that made such memory; NULL: no more */
};

/* The GPU, if it is a partition of bfcd for this process. NULL: its calls are passed on. */
struct gpu *broker_gpu(CUdevice device);

/* broker_gpu() if a call has had it before, so that the driver knows the device; else NULL. */
struct gpu *broker_known_gpu(CUdevice device);

/* The GPU of a partition, if a call has had it before; else NULL. */
struct gpu *broker_gpu_of(const char *partition);

/* Its number. */
CUdevice broker_ordinal(const struct gpu *gpu);

/* The GPU with this gpu->id. */
struct gpu *broker_gpu_by_id(uint64_t id);

/* The program gives another GPU access to this one's memory. */
CUresult broker_enable_peer(struct gpu *gpu, CUdevice peer);

/* The current context's device: an error of the driver, also before cuInit(), without a context and in a child. */
CUresult broker_device(CUdevice *ret);

/* The current context's GPU, as broker_gpu(). A driver's error; then *ret is not set. */
CUresult broker_current_gpu(struct gpu **ret);

/* The GPU's client, which is made if there is none. Before it has memory: context_client(). */
CUresult broker_client_to_ask(struct gpu *gpu, bfc_client **ret);

/* The client that charges what the driver gives. on_pressure: its function for Pressures, if this call makes it. 0, or an
 * error of bfc_connect(). */
int broker_charger(bfc_pressure_fn on_pressure, bfc_client **ret);

/* All clients that have memory, one after the other: *cursor is 0 at first. NULL: no more. */
bfc_client *broker_next_client(size_t *cursor);

/* The block in which an address is, and the client that has it. NULL: there is none. To the driver the memory is extents, in
 * which blocks of other allocations are, too. */
bfc_client *broker_find_block(CUdeviceptr pointer, struct bfc_block_info *ret);

/* The first line of each exported function that uses a client or a GPU's counters: no reset of a GPU happens until it
 * returns. Such functions may call each other. */
#define IN_CALL __attribute__((cleanup(broker_end_call), unused)) const bool in_call_ = broker_begin_call()
bool broker_begin_call(void);
void broker_end_call(const bool *unused);

/* This thread is in such a function, or has stopped them. */
bool broker_is_in_call(void);

/* No call is in progress between these two, so the GPU's client can be ended, with all its memory. NULL: it is not a GPU of
 * bfcd. */
struct gpu *broker_stop_calls(CUdevice device);
void broker_end_client(struct gpu *gpu);
void broker_resume_calls(void);

/* BFC_STRICT. */
bool broker_is_strict(void);

/* What a negative result of the library means to a program. */
CUresult broker_result(int r);

/* Prints a line, once for each format. */
void broker_say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Free bytes for this process. */
CUresult broker_mem_info(struct gpu *gpu, size_t *ret_n_free, size_t *ret_n_total);

/* The limit, which may have changed since. 0: it is not known. */
uint64_t broker_total(struct gpu *gpu);

/* Free and total bytes for the proxy of NVML, by "GPU-..." or "MIG-...". -ENOENT: this process has no client, or
 * the tenant no quota there. */
__attribute__((visibility("default"))) int bfc_preload_mem_info(const char *uuid, size_t *ret_n_free,
                                                                size_t *ret_n_total);

#endif
