/* Graphs: nodes that allocate and free memory, and no others.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A node that allocates has addresses from the start, and memory, in units of 2 MiB, from the first upload or launch on.
 * It keeps the memory until the program trims it while nothing is allocated there. A launch is done at once. That graphs
 * use the same memory one after the other is not modelled. As a driver, it neither clones such a graph nor
 * instantiates it twice at a time.
 *
 * Invariant: a piece is on the list while a graph has it or it has memory. All is guarded by fake_memory_lock. */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <stdlib.h>
#include <sys/mman.h>

#include "integrations/preload/api.h"

enum { AUTO_FREE = 1 }; /* CUDA_GRAPH_INSTANTIATE_FLAG_... */

/* What a node allocates. */
struct piece {
        struct piece *next;
        struct fake_device *device;
        uintptr_t at;
        size_t n_bytes, n_mapped;
        struct fake_range *range; /* NULL: it has no memory */
        bool is_used, has_graph;
};

struct CUgraphNode_st {
        CUgraphNode next;
        CUgraphNodeType type;
        struct piece *piece;
        CUgraph child;
};

struct CUgraph_st {
        CUgraphNode first, *last;
        CUgraphExec exec; /* NULL: it is not instantiated */
};

struct CUgraphExec_st {
        CUgraph graph;
        unsigned long long flags;
        bool has_lost_graph;
};

static struct piece *pieces;

/* ---- pieces ------------------------------------------------------------------------ */

static CUresult back(struct piece *p, CUcontext c)
{
        struct fake_object o;
        CUresult r;
        int fd;

        if (p->range)
                return CUDA_SUCCESS;
        r = fake_object_new(p->device, 'a', p->n_mapped, &o, &fd);
        if (r != CUDA_SUCCESS)
                return r;
        if (!fake_address_map(p->at, p->n_mapped, fd, PROT_READ | PROT_WRITE)) {
                fake_object_close(fd);
                fake_object_drop(&o);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        fake_object_close(fd);
        p->range = fake_range_add(RANGE_GRAPH, p->at, p->n_bytes, p->n_mapped);
        p->range->device = p->device;
        p->range->context = c;
        p->range->object = o;
        return CUDA_SUCCESS;
}

static void unback(struct piece *p)
{
        if (!p->range)
                return;
        (void)fake_address_blank(p->at, p->n_mapped);
        fake_object_drop(&p->range->object);
        fake_range_remove(p->range);
        p->range = NULL;
        p->is_used = false;
}

static void forget_unused(void)
{
        for (struct piece **at = &pieces; *at;) {
                struct piece *p = *at;

                if (p->has_graph || p->range) {
                        at = &p->next;
                        continue;
                }
                *at = p->next;
                fake_address_give_back(p->at, p->n_mapped);
                free(p);
        }
}

static struct piece *find(CUdeviceptr pointer)
{
        struct piece *p = pieces;

        while (p && p->at != pointer)
                p = p->next;
        return p;
}

bool fake_graph_free(CUdeviceptr pointer)
{
        struct piece *p = find(pointer);
        bool is_used = p && p->is_used;

        if (is_used)
                p->is_used = false;
        return is_used;
}

void fake_graphs_forget(CUcontext c)
{
        for (struct piece *p = pieces; p; p = p->next)
                if (p->range && p->range->context == c)
                        unback(p);
        forget_unused();
}

/* ---- nodes ------------------------------------------------------------------------- */

CUgraph fake_graph_new(void)
{
        CUgraph g = calloc(1, sizeof(*g));

        if (!g)
                fake_die("out of memory");
        g->last = &g->first;
        return g;
}

static CUgraphNode add_node(CUgraph g, CUgraphNodeType type, struct piece *piece, CUgraph child)
{
        CUgraphNode node = calloc(1, sizeof(*node));

        if (!node)
                fake_die("out of memory");
        *node = (struct CUgraphNode_st){ .type = type, .piece = piece, .child = child };
        *g->last = node;
        g->last = &node->next;
        return node;
}

CUresult fake_graph_add_alloc(CUgraph g, struct fake_device *d, size_t n_bytes, CUdeviceptr *ret)
{
        size_t n_mapped = fake_round_up(n_bytes);
        struct piece *p;
        uintptr_t at = n_mapped < n_bytes ? 0 : fake_address_take(n_mapped, FAKE_GRANULARITY);

        if (at == 0)
                return CUDA_ERROR_OUT_OF_MEMORY;
        p = calloc(1, sizeof(*p));
        if (!p)
                fake_die("out of memory");
        pthread_rwlock_wrlock(&fake_memory_lock);
        *p = (struct piece){ pieces, d, at, n_bytes, n_mapped, NULL, false, true };
        pieces = p;
        (void)add_node(g, CU_GRAPH_NODE_TYPE_MEM_ALLOC, p, NULL);
        pthread_rwlock_unlock(&fake_memory_lock);
        *ret = at;
        return CUDA_SUCCESS;
}

CUresult fake_graph_add_free(CUgraph g, CUdeviceptr pointer)
{
        struct piece *p;

        pthread_rwlock_wrlock(&fake_memory_lock);
        p = find(pointer);
        if (p)
                (void)add_node(g, CU_GRAPH_NODE_TYPE_MEM_FREE, p, NULL);
        pthread_rwlock_unlock(&fake_memory_lock);
        return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUgraphNode last_node(CUgraph g)
{
        CUgraphNode node = g->first;

        while (node && node->next)
                node = node->next;
        return node;
}

CUresult cuGraphCreate(CUgraph *ret_graph, unsigned int flags);
CUresult cuGraphAddMemAllocNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after,
                                size_t n_after, CUDA_MEM_ALLOC_NODE_PARAMS *what);
CUresult cuGraphAddMemFreeNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                               CUdeviceptr pointer);
CUresult cuGraphAddChildGraphNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after,
                                  size_t n_after, CUgraph child);

API CUresult cuGraphCreate(CUgraph *ret_graph, unsigned int flags)
{
        ENTER(cuGraphDestroy);
        if (!ret_graph || flags != 0)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_graph = fake_graph_new();
        return CUDA_SUCCESS;
}

API CUresult cuGraphAddMemAllocNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after,
                                    size_t n_after, CUDA_MEM_ALLOC_NODE_PARAMS *what)
{
        struct fake_device *d;
        CUresult r;

        ENTER(cuGraphDestroy);
        (void)after, (void)n_after;
        if (!ret_node || !graph || !what || what->bytesize == 0 || what->poolProps.handleTypes != 0 ||
            what->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                return CUDA_ERROR_INVALID_VALUE;
        d = fake_device_get(what->poolProps.location.id);
        if (!d)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_graph_add_alloc(graph, d, what->bytesize, &what->dptr);
        if (r == CUDA_SUCCESS)
                *ret_node = last_node(graph);
        return r;
}

API CUresult cuGraphAddMemFreeNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after,
                                   size_t n_after, CUdeviceptr pointer)
{
        CUresult r;

        ENTER(cuGraphDestroy);
        (void)after, (void)n_after;
        if (!ret_node || !graph)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_graph_add_free(graph, pointer);
        if (r == CUDA_SUCCESS)
                *ret_node = last_node(graph);
        return r;
}

/* Of a graph with memory, the child is the parent's then. It is so of any here. */
API CUresult cuGraphAddChildGraphNode(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after,
                                      size_t n_after, CUgraph child)
{
        ENTER(cuGraphDestroy);
        (void)after, (void)n_after;
        if (!ret_node || !graph || !child)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_node = add_node(graph, CU_GRAPH_NODE_TYPE_GRAPH, NULL, child);
        return CUDA_SUCCESS;
}

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *ret_nodes, size_t *n)
{
        size_t i = 0;

        ENTER(cuGraphDestroy);
        if (!graph || !n)
                return CUDA_ERROR_INVALID_VALUE;
        for (CUgraphNode node = graph->first; node; node = node->next, i++)
                if (ret_nodes && i < *n)
                        ret_nodes[i] = node;
        *n = i;
        return CUDA_SUCCESS;
}

API CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *ret_type)
{
        ENTER(cuGraphDestroy);
        if (!node || !ret_type)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_type = node->type;
        return CUDA_SUCCESS;
}

API CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *ret)
{
        ENTER(cuGraphDestroy);
        if (!node || !ret || node->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                return CUDA_ERROR_INVALID_VALUE;
        *ret = (CUDA_MEM_ALLOC_NODE_PARAMS){
                .poolProps = { .allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                               .location = { CU_MEM_LOCATION_TYPE_DEVICE,
                                             fake_device_ordinal(node->piece->device) } },
                .bytesize = node->piece->n_bytes,
                .dptr = node->piece->at,
        };
        return CUDA_SUCCESS;
}

API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *ret_graph)
{
        ENTER(cuGraphDestroy);
        if (!node || !ret_graph || node->type != CU_GRAPH_NODE_TYPE_GRAPH)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_graph = node->child;
        return CUDA_SUCCESS;
}

static void graph_free(CUgraph g)
{
        CUgraphNode node;

        while ((node = g->first)) {
                g->first = node->next;
                if (node->child)
                        graph_free(node->child);
                if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                        node->piece->has_graph = false;
                free(node);
        }
        free(g);
        forget_unused();
}

/* What is instantiated lives on. */
API CUresult cuGraphDestroy(CUgraph graph)
{
        ENTER(cuGraphDestroy);
        if (!graph)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        if (graph->exec)
                graph->exec->has_lost_graph = true;
        else
                graph_free(graph);
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

/* ---- launches -------------------------------------------------------------------------- */

static CUresult back_all(CUgraph g, CUcontext c)
{
        CUresult r = CUDA_SUCCESS;

        for (CUgraphNode node = g->first; r == CUDA_SUCCESS && node; node = node->next)
                if (node->child)
                        r = back_all(node->child, c);
                else if (node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                        r = back(node->piece, c);
        return r;
}

static bool can_run(CUgraph g)
{
        for (CUgraphNode node = g->first; node; node = node->next)
                if (node->child ? !can_run(node->child)
                                : node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC && node->piece->is_used)
                        return false;
        return true;
}

static void do_nodes(CUgraph g)
{
        for (CUgraphNode node = g->first; node; node = node->next)
                if (node->child)
                        do_nodes(node->child);
                else
                        node->piece->is_used = node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
}

static CUresult launch(CUgraphExec exec, CUstream stream, bool does)
{
        CUstream s;
        CUcontext c;
        CUresult r = fake_context(&c);

        if (r == CUDA_SUCCESS)
                r = fake_stream_get(stream, &s);
        if (r != CUDA_SUCCESS)
                return r;
        if (!exec || fake_stream_is_capturing(s))
                return exec ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        if (does && !(exec->flags & AUTO_FREE) && !can_run(exec->graph))
                r = CUDA_ERROR_INVALID_VALUE;
        if (r == CUDA_SUCCESS)
                r = back_all(exec->graph, c);
        if (r == CUDA_SUCCESS && does)
                do_nodes(exec->graph);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

API CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
        ENTER(cuGraphDestroy);
        return launch(exec, stream, true);
}

API CUresult cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
        return cuGraphLaunch(exec, stream);
}

API CUresult cuGraphUpload(CUgraphExec exec, CUstream stream)
{
        ENTER(cuGraphDestroy);
        return launch(exec, stream, false);
}

API CUresult cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
        return cuGraphUpload(exec, stream);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *ret_exec, CUgraph graph, unsigned long long flags)
{
        CUgraphExec exec;

        ENTER(cuGraphDestroy);
        if (!ret_exec || !graph || graph->exec)
                return graph && graph->exec ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
        exec = calloc(1, sizeof(*exec));
        if (!exec)
                return CUDA_ERROR_OUT_OF_MEMORY;
        *exec = (struct CUgraphExec_st){ .graph = graph, .flags = flags };
        graph->exec = *ret_exec = exec;
        return CUDA_SUCCESS;
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                                   size_t n_log)
{
        (void)ret_node, (void)ret_log, (void)n_log;
        return cuGraphInstantiateWithFlags(ret_exec, graph, 0);
}

API CUresult cuGraphInstantiate(CUgraphExec *ret_exec, CUgraph graph, CUgraphNode *ret_node, char *ret_log,
                                size_t n_log)
{
        return cuGraphInstantiate_v2(ret_exec, graph, ret_node, ret_log, n_log);
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *ret_exec, CUgraph graph,
                                          CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
        CUresult r = parameters ? cuGraphInstantiateWithFlags(ret_exec, graph, parameters->flags)
                                : CUDA_ERROR_INVALID_VALUE;

        if (r != CUDA_SUCCESS || !(parameters->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
                return r;
        r = cuGraphUpload(*ret_exec, parameters->hUploadStream);
        if (r != CUDA_SUCCESS)
                cuGraphExecDestroy(*ret_exec);
        return r;
}

API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *ret_exec, CUgraph graph,
                                               CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
        return cuGraphInstantiateWithParams(ret_exec, graph, parameters);
}

API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
        ENTER(cuGraphDestroy);
        if (!exec)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        exec->graph->exec = NULL;
        if (exec->has_lost_graph)
                graph_free(exec->graph);
        free(exec);
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

/* ---- the memory of a device's graphs ------------------------------------------------------ */

API CUresult cuDeviceGraphMemTrim(CUdevice device)
{
        const struct fake_device *d;

        ENTER(cuGraphDestroy);
        d = fake_device_get(device);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        for (struct piece *p = pieces; p; p = p->next)
                if (p->device == d && !p->is_used)
                        unback(p);
        forget_unused();
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute which, void *ret_value)
{
        const struct fake_device *d;
        cuuint64_t n = 0;

        ENTER(cuGraphDestroy);
        d = fake_device_get(device);
        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        if (!ret_value ||
            (which != CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT && which != CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT))
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        for (const struct piece *p = pieces; p; p = p->next)
                if (p->device == d && p->range &&
                    (p->is_used || which == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT))
                        n += p->n_mapped;
        pthread_rwlock_unlock(&fake_memory_lock);
        *(cuuint64_t *)ret_value = n;
        return CUDA_SUCCESS;
}

#else

bool fake_graph_free(CUdeviceptr pointer)
{
        (void)pointer;
        return false;
}

void fake_graphs_forget(CUcontext c)
{
        (void)c;
}

CUgraph fake_graph_new(void)
{
        return NULL;
}

#endif
