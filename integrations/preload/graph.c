/* Memory of graphs, which the driver takes when a graph is launched.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A node that allocates has addresses from the start. The driver maps memory there when the graph is uploaded or launched,
 * and keeps it until it is trimmed. A launch takes at most what all such nodes of the graph need, and nothing where the
 * launch before it was in the same stream and nothing was taken away since. In these cases, and for graphs without such
 * nodes, a launch is the driver's. Graphs with such nodes cannot be changed or cloned. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "integrations/preload/outside.h"
#include "integrations/preload/reserved.h"

#define N_DEVICES 64
#define N_CHAINS  256

/* What a graph with nodes that allocate takes at most, by device. */
struct exec {
        LIST_ENTRY(exec) link;
        CUgraphExec exec;
        uint64_t n_most[N_DEVICES];
        size_t n_allocs, n_frees;
        CUstream stream; /* of the launch before */
        unsigned n_changes;
        bool was_launched;
};

static LIST_HEAD(chain, exec) chains[N_CHAINS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic unsigned n_execs, n_kept;  /* n_kept: launches that left memory */
static struct reserved memory[N_DEVICES]; /* by device; gpu: NULL: not used yet */

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- nodes ------------------------------------------------------------------------- */

static void add_alloc(struct exec *e, CUgraphNode node)
{
        CUDA_MEM_ALLOC_NODE_PARAMS what;
        size_t n_bytes;
        int device;

        if (cuGraphMemAllocNodeGetParams(node, &what) != CUDA_SUCCESS ||
            what.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                return;
        device = what.poolProps.location.id;
        n_bytes = outside_whole(what.bytesize);
        if (device < 0 || device >= N_DEVICES)
                return;
        e->n_allocs++;
        if (__builtin_add_overflow(e->n_most[device], n_bytes, &e->n_most[device]))
                e->n_most[device] = UINT64_MAX;
}

static void add_graph(struct exec *e, CUgraph graph)
{
        CUgraphNode *nodes = NULL;
        CUgraphNodeType type;
        CUgraph child;
        size_t n = 0;

        if (cuGraphGetNodes(graph, NULL, &n) == CUDA_SUCCESS && n > 0)
                nodes = malloc(n * sizeof(CUgraphNode));
        if (!nodes || cuGraphGetNodes(graph, nodes, &n) != CUDA_SUCCESS)
                n = 0;
        for (size_t i = 0; i < n; i++) {
                if (cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
                        continue;
                if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                        add_alloc(e, nodes[i]);
                else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE)
                        e->n_frees++;
                else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                         cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS)
                        add_graph(e, child);
        }
        free(nodes);
}

/* NULL: it has no memory. */
static struct exec *exec_of(CUgraph graph)
{
        struct exec *e = calloc(1, sizeof(*e));

        if (!e)
                return NULL;
        add_graph(e, graph);
        if (e->n_allocs > 0)
                return e;
        free(e);
        return NULL;
}

/* ---- charges ------------------------------------------------------------------------ */

static void end(const struct exec *e, const bool *is_charged)
{
        for (size_t i = 0; i < N_DEVICES; i++)
                if (is_charged[i])
                        reserved_end(&memory[i], reserved_most(e->n_most[i]));
}

static CUresult begin_on(const struct exec *e, CUdevice device, CUstream stream, bool *ret_is_charged)
{
        struct gpu *gpu = broker_gpu(device);
        int r = -ENOTSUP;

        if (gpu) {
                memory[device].device = device;
                __atomic_store_n(&memory[device].gpu, gpu, __ATOMIC_RELAXED);
                r = reserved_begin(&memory[device], reserved_most(e->n_most[device]), stream);
        }
        *ret_is_charged = r == 0;
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r != -ENOTSUP)
                return broker_result(r);
        if (!broker_is_strict())
                return CUDA_SUCCESS;
        broker_say("BFC_STRICT is set, and memory that cannot be charged is refused (%s)", "cuGraphLaunch");
        return CUDA_ERROR_NOT_PERMITTED;
}

static CUresult begin(const struct exec *e, CUstream stream, bool ret_is_charged[static N_DEVICES])
{
        CUresult result = CUDA_SUCCESS;

        for (CUdevice i = 0; result == CUDA_SUCCESS && i < N_DEVICES; i++)
                if (e->n_most[i] > 0)
                        result = begin_on(e, i, stream, &ret_is_charged[i]);
        if (result != CUDA_SUCCESS)
                end(e, ret_is_charged);
        return result;
}

/* ---- graphs --------------------------------------------------------------------------- */

static struct chain *chain_of(CUgraphExec exec)
{
        return &chains[((uintptr_t)exec * UINT64_C(0x9E3779B97F4A7C15)) >> 56];
}

_Static_assert(N_CHAINS == 1 << (64 - 56), "chain_of()");

static void insert(struct exec *e)
{
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(chain_of(e->exec), e, link);
        pthread_mutex_unlock(&lock);
        atomic_fetch_add(&n_execs, 1);
}

/* NULL: it has no memory. */
static struct exec *find(CUgraphExec exec, bool takes)
{
        struct exec *e;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(e, chain_of(exec), link)
        {
                if (e->exec == exec)
                        break;
        }
        if (e && takes) {
                LIST_REMOVE(e, link);
                atomic_fetch_sub(&n_execs, 1);
        }
        pthread_mutex_unlock(&lock);
        return e;
}

/* How often a graph may have lost memory that it had. */
static unsigned count_changes(void)
{
        return reserved_trims() + atomic_load(&n_kept);
}

static CUresult launch_with_memory(CUgraphExec exec, CUstream stream, CUstream own_stream,
                                   CUresult (*call)(CUgraphExec, CUstream))
{
        bool is_charged[N_DEVICES] = { false };
        unsigned n_changes = count_changes();
        struct exec *e = find(exec, false);
        IN_CALL;
        CUresult result;

        if (!e || (e->was_launched && e->stream == own_stream && e->n_changes == n_changes))
                return call(exec, stream);
        result = begin(e, own_stream, is_charged);
        if (result != CUDA_SUCCESS)
                return result;
        n_changes = count_changes();
        result = call(exec, stream);
        end(e, is_charged);
        e->was_launched = result == CUDA_SUCCESS;
        e->stream = own_stream;
        e->n_changes = n_changes;
        if (e->n_allocs != e->n_frees) /* it may have taken other graphs' memory, and keeps it */
                atomic_fetch_add(&n_kept, 1);
        return result;
}

static inline CUresult launch(CUgraphExec exec, CUstream stream, CUstream own_stream,
                              CUresult (*call)(CUgraphExec, CUstream))
{
        return __builtin_expect(atomic_load_explicit(&n_execs, memory_order_relaxed) == 0, 1)
                       ? call(exec, stream)
                       : launch_with_memory(exec, stream, own_stream, call);
}

static CUstream per_thread(CUstream stream)
{
        return stream ? stream : CU_STREAM_PER_THREAD;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
        return launch(exec, stream, stream, real_cuGraphLaunch);
}

CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
        return launch(exec, stream, per_thread(stream), real_cuGraphLaunch_ptsz);
}

CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
        return launch(exec, stream, stream, real_cuGraphUpload);
}

CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
        return launch(exec, stream, per_thread(stream), real_cuGraphUpload_ptsz);
}

/* After the call that made it. e: NULL, or it is taken over. */
static CUresult add(struct exec *e, CUresult result, const CUgraphExec *exec)
{
        if (result == CUDA_SUCCESS && atomic_load(&n_execs) > 0)
                free(find(*exec, true)); /* it ended with its context */
        if (e && result == CUDA_SUCCESS) {
                e->exec = *exec;
                insert(e);
        } else {
                free(e);
        }
        return result;
}

CUresult cuGraphInstantiate(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                            size_t n_log)
{
        struct exec *e = exec_of(graph);

        return add(e, real_cuGraphInstantiate(ret_exec, graph, ret_node, ret_log, n_log), ret_exec);
}

CUresult cuGraphInstantiate_v2(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                               size_t n_log)
{
        struct exec *e = exec_of(graph);

        return add(e, real_cuGraphInstantiate_v2(ret_exec, graph, ret_node, ret_log, n_log), ret_exec);
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *ret_exec, CUgraph graph, unsigned long long flags)
{
        struct exec *e = exec_of(graph);

        return add(e, real_cuGraphInstantiateWithFlags(ret_exec, graph, flags), ret_exec);
}

static CUresult instantiate(CUgraphExec *ret_exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters,
                            CUstream stream,
                            CUresult (*call)(CUgraphExec *, CUgraph, CUDA_GRAPH_INSTANTIATE_PARAMS *))
{
        bool is_charged[N_DEVICES] = { false };
        struct exec *e = exec_of(graph);
        IN_CALL;
        CUresult result = CUDA_SUCCESS;

        if (e && (parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
                result = begin(e, stream, is_charged);
        if (result != CUDA_SUCCESS) {
                free(e);
                return result;
        }
        result = call(ret_exec, graph, parameters);
        if (e)
                end(e, is_charged);
        return add(e, result, ret_exec);
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *ret_exec, CUgraph graph,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
        if (!parameters)
                return CUDA_ERROR_INVALID_VALUE;
        return instantiate(ret_exec, graph, parameters, parameters->hUploadStream,
                           real_cuGraphInstantiateWithParams);
}

CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *ret_exec, CUgraph graph,
                                           CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
        if (!parameters)
                return CUDA_ERROR_INVALID_VALUE;
        return instantiate(ret_exec, graph, parameters, per_thread(parameters->hUploadStream),
                           real_cuGraphInstantiateWithParams_ptsz);
}

/* The driver keeps the memory until it is trimmed. The number may be another one's after the call. */
CUresult cuGraphExecDestroy(CUgraphExec exec)
{
        struct exec *e = atomic_load(&n_execs) == 0 ? NULL : find(exec, true);
        CUresult result = real_cuGraphExecDestroy(exec);

        if (e && result != CUDA_SUCCESS)
                insert(e);
        else
                free(e);
        return result;
}

CUresult cuDeviceGraphMemTrim(CUdevice device)
{
        IN_CALL;
        CUresult result = reserved_trim_graphs(device);
        struct gpu *gpu = result == CUDA_SUCCESS ? broker_gpu(device) : NULL;

        if (gpu)
                reserved_settle(gpu);
        return result;
}
