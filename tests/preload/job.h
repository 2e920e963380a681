/* A CUDA program that knows nothing of bfcd: see job.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_PRELOAD_JOB_H
#define BFC_TESTS_PRELOAD_JOB_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "integrations/preload/api.h"

#define MIB ((size_t)1 << 20)

/* Ends the program with 99 unless it holds. */
#define CHECK(condition)                                                                                     \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                      \
                        _exit(99);                                                                           \
                }                                                                                            \
        } while (0)
#define GIVES(result, call)                                                                                  \
        do {                                                                                                 \
                CUresult gives_ = (call);                                                                    \
                if (gives_ != (result)) {                                                                    \
                        fprintf(stderr, "%s:%d: %s: %d\n", __FILE__, __LINE__, #call, (int)gives_);          \
                        _exit(99);                                                                           \
                }                                                                                            \
        } while (0)
#define OK(call) GIVES(CUDA_SUCCESS, call)

/* The functions of the driver that the program uses, by the way it found them. */
struct functions {
#define F(symbol, base, version, arguments) CUresult(*symbol) arguments;
#include "device/cuda_functions.h"
#undef F
#define OWN(symbol, base, version, per_thread, arguments) CUresult(*own_##symbol) arguments;
#include "integrations/preload/own.h"
#undef OWN
};
extern struct functions cu;

/* way: linked, dlsym, proc-address. */
void functions_find(const char *way);

/* cuInit() and the primary context of GPU 0. */
void context_make(void);

size_t free_bytes(void);
size_t total_bytes(void);
void wait_free(size_t n_bytes);

/* Writes the value to all bytes, and reads some. */
void holds_bytes(CUdeviceptr p, size_t n_bytes, unsigned char value);

/* CU_MEM_CREATE_USAGE_TILE_POOL: memory of cuMemCreate() for sparse arrays, which bfcd does not lend. */
#define IS_TILE_POOL 1

/* Cases of mapped.c. */
void map_memory(void);
void create_beside_refusals(void);
void map_lent_memory(void);
void release_lent_memory_in_capture(void);
void have_names_of_lent_memory(void);
void have_memory_that_is_not_lent(void);
void have_localized_memory(void);
void have_charged_memory(void);
void export_lent_memory(const char *program, const char *way);
void import_lent_memory(const char *fd, bool has_proxy);
void export_as_nccl(const char *program, const char *way);
void import_as_nccl(const char *fd);

/* What the driver has given of the device, to all processes. */
size_t device_bytes(void);

/* Cases of graphs.c. */
CUresult launch_graph(size_t n_bytes);
void have_graphs(void);
void capture_graphs(void);
void have_pools_of_the_driver(void);
void have_pools_of_the_host(void);
/* Memory of a graph that was launched, which is freed by cuMemFree_v2(). */
struct graph {
        CUgraph graph;
        CUgraphExec exec;
        CUdeviceptr at;
};
CUresult graph_take(struct graph *g, size_t n_bytes);
void graph_give(struct graph *g);
/* One of the process, whose memory can be shared. */
CUmemoryPool shared_pool(void);

/* Cases of idle.c. */
void be_idle(const char *bfcctl);
void be_interrupted(const char *bfcctl);
void be_bound(const char *bfcctl);
void be_idle_meanwhile(const char *bfcctl, const char *folder, bool is_killed);

/* Cases of contexts.c. */
void reset_gpu(bool is_lent, bool breaks);
void reset_gpu_with_array(void);
void end_contexts(void);
void end_contexts_beside_calls(void);
void reset_beside_context(void);
void have_other_contexts(void);
void reset_one_of_two(void);
void have_peers(bool has_fds);
void have_no_peers(void);
void have_refused_peers(void);

/* A case of forks.c. */
void fork_beside_threads(void);

/* Cases of management.c. */
void ask_nvml(void);
void have_no_nvml(void);
void have_nvml_of_nothing(void);
void have_plain_nvml(void);

/* Cases of killed.c. */
void take_until_killed(unsigned seed);
void kill_processes(const char *program, const char *way, unsigned n, unsigned seed);

/* Cases of random.c. */
void run_random(unsigned seed, unsigned n_steps, size_t n_limit);

#endif
