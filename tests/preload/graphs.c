/* Memory that the driver keeps beyond what it has given: of graphs, and of pools whose memory can be shared.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The limit is 256 MiB, and the driver takes 32 MiB at once for a pool. */
#include <dlfcn.h>
#include <string.h>

#include "tests/preload/job.h"

#define LIMIT (256 * MIB)

/* Functions that the proxy passes on. */
static void *other(const char *symbol)
{
        void *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), symbol);

        CHECK(found);
        return found;
}

static CUgraph graph_new(void)
{
        CUresult (*create)(CUgraph *, unsigned int);
        CUgraph graph;

        *(void **)&create = other("cuGraphCreate");
        OK(create(&graph, 0));
        return graph;
}

static CUdeviceptr add_alloc(CUgraph graph, size_t n_bytes)
{
        CUDA_MEM_ALLOC_NODE_PARAMS what = { .poolProps = { .allocType = 1,
                                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } },
                                            .bytesize = n_bytes };
        CUresult (*add)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *);
        CUgraphNode node;

        *(void **)&add = other("cuGraphAddMemAllocNode");
        OK(add(&node, graph, NULL, 0, &what));
        return what.dptr;
}

static void add_free(CUgraph graph, CUdeviceptr p)
{
        CUresult (*add)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr);
        CUgraphNode node;

        *(void **)&add = other("cuGraphAddMemFreeNode");
        OK(add(&node, graph, NULL, 0, p));
}

static CUgraph in_parent(CUgraph child)
{
        CUresult (*add)(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraph);
        CUgraph graph = graph_new();
        CUgraphNode node;

        *(void **)&add = other("cuGraphAddChildGraphNode");
        OK(add(&node, graph, NULL, 0, child));
        return graph;
}

CUresult graph_take(struct graph *g, size_t n_bytes)
{
        CUresult result;

        g->graph = graph_new();
        g->at = add_alloc(g->graph, n_bytes);
        OK(cu.own_cuGraphInstantiateWithFlags(&g->exec, g->graph, 0));
        result = cu.own_cuGraphLaunch(g->exec, NULL);
        if (result != CUDA_SUCCESS) {
                OK(cu.own_cuGraphExecDestroy(g->exec));
                OK(cu.cuGraphDestroy(g->graph));
        }
        return result;
}

void graph_give(struct graph *g)
{
        OK(cu.cuMemFree_v2(g->at));
        OK(cu.own_cuGraphExecDestroy(g->exec));
        OK(cu.cuGraphDestroy(g->graph));
}

CUresult launch_graph(size_t n_bytes)
{
        struct graph g;
        CUresult result = graph_take(&g, n_bytes);

        if (result == CUDA_SUCCESS) {
                graph_give(&g);
                OK(cu.own_cuDeviceGraphMemTrim(0));
        }
        return result;
}

/* Memory is taken by the launch, and stays until it is trimmed, or needed. */
static void launch_and_trim(size_t n_device)
{
        CUgraph graph = graph_new();
        CUgraphExec exec;
        CUstream stream;
        CUdeviceptr p;

        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        add_free(graph, add_alloc(graph, 39 * MIB));
        OK(cu.own_cuGraphInstantiate_v2(&exec, graph, NULL, NULL, 0));
        CHECK(free_bytes() == LIMIT);
        for (int i = 0; i < 3; i++) {
                OK(cu.own_cuGraphLaunch(exec, i == 2 ? stream : NULL));
                CHECK(free_bytes() == LIMIT - 40 * MIB && device_bytes() == n_device + 40 * MIB);
        }
        OK(cu.own_cuDeviceGraphMemTrim(0));
        CHECK(free_bytes() == LIMIT && device_bytes() == n_device);
        OK(cu.own_cuGraphLaunch_ptsz(exec, stream));
        CHECK(free_bytes() == LIMIT - 40 * MIB);
        OK(cu.cuMemAlloc_v2(&p, 230 * MIB)); /* which needs it */
        CHECK(device_bytes() <= n_device + LIMIT);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuGraphLaunch(exec, stream));
        OK(cu.cuMemFree_v2(p));
        OK(cu.own_cuGraphLaunch(exec, stream));
        OK(cu.own_cuGraphExecDestroy(exec));
        CHECK(free_bytes() == LIMIT - 40 * MIB);
        OK(cu.own_cuDeviceGraphMemTrim(0));
        CHECK(free_bytes() == LIMIT);
        OK(cu.cuGraphDestroy(graph));
        OK(cu.cuStreamDestroy_v2(stream));
}

void have_graphs(void)
{
        struct graph a, b, none;
        size_t n_device;

        context_make();
        n_device = device_bytes();
        OK(graph_take(&a, 100 * MIB));
        holds_bytes(a.at, 100 * MIB, 3);
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.own_cuGraphLaunch(a.exec, NULL)); /* it has its memory */
        CHECK(free_bytes() == LIMIT - 100 * MIB && device_bytes() == n_device + 100 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, graph_take(&none, 170 * MIB));
        OK(graph_take(&b, 90 * MIB));
        CHECK(free_bytes() == LIMIT - 190 * MIB);
        graph_give(&a);
        OK(graph_take(&a, 150 * MIB)); /* what is not used is trimmed */
        CHECK(free_bytes() == LIMIT - 240 * MIB && device_bytes() == n_device + 240 * MIB);
        graph_give(&a);
        graph_give(&b);
        OK(cu.own_cuDeviceGraphMemTrim(0));
        CHECK(free_bytes() == LIMIT && device_bytes() == n_device);
        launch_and_trim(n_device);
}

/* By all functions, also within another graph. */
void capture_graphs(void)
{
        CUDA_GRAPH_INSTANTIATE_PARAMS what = { .flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD };
        CUdeviceptr p, q;
        CUgraphExec exec;
        CUstream stream;
        CUgraph graph;

        context_make();
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        what.hUploadStream = stream;
        OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cu.own_cuMemAllocAsync(&p, 4 * MIB, stream));
        OK(cu.own_cuMemAllocAsync_ptsz(&q, 50 * MIB, stream));
        OK(cu.own_cuMemFreeAsync(q, stream));
        CHECK(free_bytes() == LIMIT);
        OK(cu.cuStreamEndCapture(stream, &graph));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(p));
        graph = in_parent(graph);
        OK(cu.own_cuGraphInstantiateWithParams(&exec, graph, &what));
        CHECK(free_bytes() == LIMIT - 54 * MIB);
        OK(cu.own_cuGraphLaunch(exec, stream));
        holds_bytes(p, 4 * MIB, 3);
        CHECK(free_bytes() == LIMIT - 54 * MIB);
        OK(cu.own_cuGraphExecDestroy(exec));
        OK(cu.own_cuGraphInstantiate(&exec, graph, NULL, NULL, 0));
        OK(cu.own_cuGraphUpload(exec, stream));
        OK(cu.own_cuMemFreeAsync(p, stream));
        OK(cu.own_cuGraphExecDestroy(exec));
        OK(cu.cuGraphDestroy(graph));
        OK(cu.own_cuDeviceGraphMemTrim(0));
        CHECK(free_bytes() == LIMIT);
        graph = graph_new();
        (void)add_alloc(graph, 200 * MIB);
        (void)add_alloc(graph, 200 * MIB);
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuGraphInstantiateWithParams_ptsz(&exec, graph, &what));
        OK(cu.own_cuGraphInstantiateWithFlags(&exec, graph, 0));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuGraphUpload_ptsz(exec, NULL));
        CHECK(free_bytes() == LIMIT);
        OK(cu.own_cuGraphExecDestroy(exec));
        OK(cu.cuGraphDestroy(graph));
}

/* ---- pools ------------------------------------------------------------------------------ */

CUmemoryPool shared_pool(void)
{
        const CUmemPoolProps what = { .allocType = 1,
                                      .handleTypes = 1,
                                      .location = { CU_MEM_LOCATION_TYPE_DEVICE, 0 } };
        static CUmemoryPool pool;

        if (!pool)
                OK(cu.own_cuMemPoolCreate(&pool, &what));
        return pool;
}

/* Charged as the driver takes it. */
void have_pools_of_the_driver(void)
{
        CUresult (*set)(CUdevice, CUmemoryPool);
        CUmemoryPool pool;
        CUdeviceptr p[3];
        CUstream stream, captured;
        size_t n_device;
        CUgraph graph;

        context_make();
        pool = shared_pool();
        *(void **)&set = other("cuDeviceSetMemPool");
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        n_device = device_bytes();
        OK(cu.own_cuMemAllocFromPoolAsync(&p[0], 4 * MIB, pool, stream));
        CHECK(free_bytes() == LIMIT - 32 * MIB && device_bytes() == n_device + 32 * MIB);
        OK(cu.own_cuMemAllocFromPoolAsync_ptsz(&p[1], MIB, pool, stream));
        CHECK(free_bytes() == LIMIT - 32 * MIB && device_bytes() == n_device + 32 * MIB);
        OK(cu.cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
        OK(cu.cuStreamBeginCapture_v2(captured, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocFromPoolAsync(&p[2], 240 * MIB, pool, stream));
        OK(cu.cuStreamEndCapture(captured, &graph)); /* no wait has ended it */
        OK(cu.cuGraphDestroy(graph));
        OK(set(0, pool));
        OK(cu.own_cuMemAllocAsync(&p[2], 100 * MIB, stream)); /* of it, too */
        CHECK(free_bytes() == LIMIT - 132 * MIB && device_bytes() == n_device + 132 * MIB);
        OK(cu.own_cuMemFreeAsync(p[2], stream));
        OK(cu.own_cuMemFreeAsync_ptsz(p[0], stream));
        CHECK(free_bytes() == LIMIT - 32 * MIB);
        OK(cu.own_cuMemPoolDestroy(pool)); /* it still has memory */
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.own_cuMemPoolDestroy(pool));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.own_cuMemAllocFromPoolAsync(&p[0], MIB, pool, stream));
        CHECK(free_bytes() == LIMIT - 32 * MIB);
        OK(cu.own_cuMemAllocAsync(&p[0], MIB, stream)); /* a block */
        OK(cu.own_cuMemFreeAsync(p[0], stream));
        OK(cu.cuMemFree_v2(p[1]));
        OK(cu.cuMemAlloc_v2(&p[0], 250 * MIB));
        CHECK(device_bytes() <= n_device + LIMIT);
        OK(cu.cuMemFree_v2(p[0]));
        wait_free(LIMIT);
}

/* The driver's answer, and no charge. */
void have_pools_of_the_host(void)
{
        const CUmemPoolProps what = { .allocType = 1,
                                      .location = { (CUmemLocationType)CU_MEM_LOCATION_TYPE_HOST, 0 } };
        CUmemoryPool pool;
        CUdeviceptr p;

        context_make();
        OK(cu.own_cuMemPoolCreate(&pool, &what));
        OK(cu.own_cuMemAllocFromPoolAsync(&p, 300 * MIB, pool, NULL));
        CHECK(free_bytes() == LIMIT);
        OK(cu.own_cuMemFreeAsync(p, NULL));
        OK(cu.own_cuMemPoolDestroy(pool));
        CHECK(free_bytes() == LIMIT);
}
