/* Memory pools, and allocation in the order of a stream, which is at once.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A pool takes memory of the device in pieces of at least 32 MiB (FAKE_CUDA_POOL_BYTES), and gives allocations of it in
 * units of 512 bytes: so it takes more than its allocations have, as a driver's does. A free waits for its stream. Then
 * pieces without an allocation go back, as long as more is reserved than the release threshold (0). Each device has a
 * pool that no program makes.
 *
 * Invariant: the parts of a piece cover it, in the order of addresses, and no two free ones are neighbours. All is
 * guarded by fake_memory_lock. */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <stdlib.h>

#include "integrations/preload/api.h"

#define UNIT_BYTES ((size_t)512)

struct part {
        struct part *next;
        struct fake_range *piece;
        uintptr_t at;
        size_t n_bytes, n_asked;
        bool is_used;
};

struct CUmemPoolHandle_st {
        CUmemoryPool next;
        struct fake_device
                *device; /* NULL: it is on the host, and its memory as if it were managed and never used */
        struct part *parts;
        cuuint64_t n_threshold, n_reserved, n_reserved_high, n_used, n_used_high;
        bool is_default;
};

static CUmemoryPool pools, current[FAKE_MAX_DEVICES]; /* current: by index; NULL: the default one */

/* ---- pools ------------------------------------------------------------------ */

static CUmemoryPool pool_new(struct fake_device *d, bool is_default)
{
        CUmemoryPool p = calloc(1, sizeof(*p));

        if (!p)
                fake_die("out of memory");
        p->device = d;
        p->is_default = is_default;
        p->next = pools;
        pools = p;
        return p;
}

static CUmemoryPool pool_default(struct fake_device *d)
{
        for (CUmemoryPool p = pools; p; p = p->next)
                if (p->device == d && p->is_default)
                        return p;
        return pool_new(d, true);
}

static bool is_pool(CUmemoryPool pool)
{
        for (CUmemoryPool p = pools; p; p = p->next)
                if (p == pool)
                        return true;
        return false;
}

/* ---- parts ------------------------------------------------------------------ */

static void add_piece(CUmemoryPool p, struct fake_range *piece)
{
        struct part *part = calloc(1, sizeof(*part));

        if (!part)
                fake_die("out of memory");
        *part = (struct part){
                .next = p->parts, .piece = piece, .at = piece->at, .n_bytes = piece->n_mapped
        };
        p->parts = part;
        p->n_reserved += piece->n_mapped;
        if (p->n_reserved > p->n_reserved_high)
                p->n_reserved_high = p->n_reserved;
}

/* 0: no free part is large enough. */
static CUdeviceptr take(CUmemoryPool p, size_t n_asked)
{
        size_t n_bytes = (n_asked + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
        struct part *part = p->parts, *rest;

        while (part && (part->is_used || part->n_bytes < n_bytes))
                part = part->next;
        if (!part)
                return 0;
        if (part->n_bytes > n_bytes) {
                rest = malloc(sizeof(*rest));
                if (!rest)
                        fake_die("out of memory");
                *rest = *part;
                rest->at += n_bytes;
                rest->n_bytes -= n_bytes;
                part->n_bytes = n_bytes;
                part->next = rest;
        }
        part->is_used = true;
        part->n_asked = n_asked;
        p->n_used += n_bytes;
        if (p->n_used > p->n_used_high)
                p->n_used_high = p->n_used;
        return part->at;
}

/* Joins free neighbours of one piece. */
static void join(CUmemoryPool p)
{
        for (struct part *part = p->parts; part; part = part->next)
                while (part->next && !part->is_used && !part->next->is_used &&
                       part->next->piece == part->piece) {
                        struct part *next = part->next;

                        part->n_bytes += next->n_bytes;
                        part->next = next->next;
                        free(next);
                }
}

static void trim(CUmemoryPool p, cuuint64_t n_kept)
{
        for (struct part **at = &p->parts; *at && p->n_reserved > n_kept;) {
                struct part *part = *at;

                if (part->is_used || part->n_bytes != part->piece->n_mapped) {
                        at = &part->next;
                        continue;
                }
                *at = part->next;
                p->n_reserved -= part->n_bytes;
                fake_range_destroy(part->piece);
                free(part);
        }
}

/* NULL: nothing was allocated there. */
static struct part *find(CUdeviceptr pointer, CUmemoryPool *ret_pool)
{
        for (CUmemoryPool p = pools; p; p = p->next)
                for (struct part *part = p->parts; part; part = part->next)
                        if (part->is_used && pointer >= part->at && pointer - part->at < part->n_bytes) {
                                *ret_pool = p;
                                return part;
                        }
        return NULL;
}

bool fake_pool_find(CUdeviceptr pointer, CUdeviceptr *ret_base, size_t *ret_n_bytes)
{
        CUmemoryPool p;
        const struct part *part = find(pointer, &p);

        if (!part)
                return false;
        *ret_base = part->at;
        *ret_n_bytes = part->n_asked;
        return true;
}

bool fake_pool_free(CUdeviceptr pointer)
{
        CUmemoryPool p;
        struct part *part = find(pointer, &p);

        if (!part || part->at != pointer)
                return false;
        part->is_used = false;
        p->n_used -= part->n_bytes;
        join(p);
        trim(p, p->n_threshold);
        return true;
}

/* Their ranges are destroyed with the context's others. */
void fake_pools_forget(CUcontext c)
{
        for (CUmemoryPool p = pools; p; p = p->next)
                for (struct part **at = &p->parts; *at;) {
                        struct part *part = *at;

                        if (part->piece->context != c) {
                                at = &part->next;
                                continue;
                        }
                        *at = part->next;
                        p->n_reserved -= part->n_bytes;
                        if (part->is_used)
                                p->n_used -= part->n_bytes;
                        free(part);
                }
}

/* ---- the functions of pools ---------------------------------------------------- */

static CUresult device_pool(CUmemoryPool *ret_pool, CUdevice device, bool is_default)
{
        struct fake_device *d = fake_device_get(device);

        if (!d || !ret_pool)
                return d ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        *ret_pool = !is_default && current[d->index] ? current[d->index] : pool_default(d);
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *ret_pool, CUdevice device)
{
        return device_pool(ret_pool, device, true);
}

API CUresult cuDeviceGetMemPool(CUmemoryPool *ret_pool, CUdevice device)
{
        return device_pool(ret_pool, device, false);
}

API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
        struct fake_device *d = fake_device_get(device);
        bool is_right;

        if (!d)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        is_right = is_pool(pool) && pool->device == d;
        if (is_right)
                current[d->index] = pool;
        pthread_rwlock_unlock(&fake_memory_lock);
        return is_right ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolCreate(CUmemoryPool *ret_pool, const CUmemPoolProps *what)
{
        struct fake_device *d = NULL;
        bool is_host;

        if (!ret_pool || !what || what->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
            (what->location.type != CU_MEM_LOCATION_TYPE_DEVICE &&
             (int)what->location.type != CU_MEM_LOCATION_TYPE_HOST))
                return CUDA_ERROR_INVALID_VALUE;
        is_host = what->location.type != CU_MEM_LOCATION_TYPE_DEVICE;
        if (!is_host)
                d = fake_device_get(what->location.id);
        if (!d && !is_host)
                return CUDA_ERROR_INVALID_DEVICE;
        pthread_rwlock_wrlock(&fake_memory_lock);
        *ret_pool = pool_new(d, false);
        pthread_rwlock_unlock(&fake_memory_lock);
        return CUDA_SUCCESS;
}

/* A driver keeps one that has allocations until they are freed; here their pieces stay with the context. */
API CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
        bool is_one;

        pthread_rwlock_wrlock(&fake_memory_lock);
        is_one = is_pool(pool) && !pool->is_default && pool->n_used == 0;
        if (is_one) {
                CUmemoryPool *at = &pools;

                trim(pool, 0);
                while (*at != pool)
                        at = &(*at)->next;
                *at = pool->next;
                if (pool->device && current[pool->device->index] == pool)
                        current[pool->device->index] = NULL;
                free(pool);
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        return is_one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* NULL: 0, as all that is asked of reuse. */
static cuuint64_t *attribute(CUmemoryPool pool, CUmemPool_attribute which)
{
        switch (which) {
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
                return &pool->n_threshold;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
                return &pool->n_reserved;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
                return &pool->n_reserved_high;
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
                return &pool->n_used;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
                return &pool->n_used_high;
        default:
                return NULL;
        }
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *ret_value)
{
        CUresult r = CUDA_ERROR_INVALID_VALUE;

        pthread_rwlock_rdlock(&fake_memory_lock);
        if (ret_value && is_pool(pool)) {
                const cuuint64_t *value = attribute(pool, which);

                if (value)
                        *(cuuint64_t *)ret_value = *value;
                else
                        *(int *)ret_value = 0;
                r = CUDA_SUCCESS;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

/* High marks can be set to 0, which begins them with what there is. */
API CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute which, void *value)
{
        CUresult r = CUDA_ERROR_INVALID_VALUE;

        pthread_rwlock_wrlock(&fake_memory_lock);
        if (value && is_pool(pool) && which != CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT &&
            which != CU_MEMPOOL_ATTR_USED_MEM_CURRENT) {
                r = CUDA_SUCCESS;
                if (which == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
                        pool->n_threshold = *(cuuint64_t *)value;
                else if (which == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
                        pool->n_reserved_high = pool->n_reserved;
                else if (which == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
                        pool->n_used_high = pool->n_used;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *what, size_t n)
{
        (void)n;
        return pool && what ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t n_bytes)
{
        bool is_one;

        pthread_rwlock_wrlock(&fake_memory_lock);
        is_one = is_pool(pool);
        if (is_one)
                trim(pool, n_bytes);
        pthread_rwlock_unlock(&fake_memory_lock);
        return is_one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- allocations ---------------------------------------------------------------- */

/* Where the device has no room for a usual piece, one as large as it must be. */
static CUresult grow(CUmemoryPool p, CUcontext c, size_t n_bytes)
{
        CUresult r = CUDA_ERROR_OUT_OF_MEMORY;
        struct fake_range *piece;
        CUdeviceptr at;

        if (n_bytes < fake.pool_n_bytes)
                r = fake_alloc(c, RANGE_POOL, fake.pool_n_bytes, &at);
        if (r == CUDA_ERROR_OUT_OF_MEMORY)
                r = fake_alloc(c, RANGE_POOL, n_bytes, &at);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        piece = fake_range_find(at, RANGE_POOL);
        if (piece)
                add_piece(p, piece);
        pthread_rwlock_unlock(&fake_memory_lock);
        return piece ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED; /* meanwhile */
}

static CUresult alloc(CUmemoryPool pool, size_t n_bytes, CUdeviceptr *ret)
{
        CUdeviceptr at = 0;
        CUcontext c;
        CUresult r = fake_context(&c);

        if (r != CUDA_SUCCESS)
                return r;
        if (!ret || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        r = fake_capture_allows_unsafe();
        while (r == CUDA_SUCCESS && at == 0) {
                pthread_rwlock_wrlock(&fake_memory_lock);
                if (!pool)
                        pool = current[c->device->index] ? current[c->device->index]
                                                         : pool_default(c->device);
                if (!is_pool(pool) || pool->device != c->device)
                        r = CUDA_ERROR_INVALID_VALUE;
                else
                        at = take(pool, n_bytes);
                pthread_rwlock_unlock(&fake_memory_lock);
                if (r == CUDA_SUCCESS && at == 0)
                        r = n_bytes <= c->device->n_bytes ? grow(pool, c, n_bytes) : CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (r == CUDA_SUCCESS)
                *ret = at;
        return r;
}

/* NULL: the stream is not captured. */
static CUgraph captured(CUstream s)
{
        CUgraph graph;

        pthread_mutex_lock(&fake_stream_lock);
        graph = s->capture == CU_STREAM_CAPTURE_STATUS_ACTIVE ? s->captured : NULL;
        pthread_mutex_unlock(&fake_stream_lock);
        return graph;
}

static bool is_host_pool(CUmemoryPool pool)
{
        bool is_host;

        pthread_rwlock_rdlock(&fake_memory_lock);
        is_host = is_pool(pool) && !pool->device;
        pthread_rwlock_unlock(&fake_memory_lock);
        return is_host;
}

static CUresult alloc_in(CUmemoryPool pool, size_t n_bytes, CUstream stream, CUdeviceptr *ret)
{
        CUstream s;
        CUresult r = fake_stream_get(stream, &s);
        CUgraph graph = r == CUDA_SUCCESS ? captured(s) : NULL;

        if (r == CUDA_SUCCESS && is_host_pool(pool))
                return cuMemAllocManaged(ret, n_bytes, 2 /* CU_MEM_ATTACH_HOST */);
        if (r != CUDA_SUCCESS || !graph)
                return r != CUDA_SUCCESS ? r : alloc(pool, n_bytes, ret);
        if (!ret || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        return fake_graph_add_alloc(graph, s->context->device, n_bytes, ret);
}

API CUresult cuMemAllocAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        ENTER(cuMemAlloc_v2);
        return alloc_in(NULL, n_bytes, stream, ret_pointer);
}

API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUstream stream)
{
        return cuMemAllocAsync(ret_pointer, n_bytes, stream);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                     CUstream stream)
{
        ENTER(cuMemAlloc_v2);
        return pool ? alloc_in(pool, n_bytes, stream, ret_pointer) : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *ret_pointer, size_t n_bytes, CUmemoryPool pool,
                                          CUstream stream)
{
        return cuMemAllocFromPoolAsync(ret_pointer, n_bytes, pool, stream);
}

API CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
        CUstream s;
        CUresult result = fake_stream_get(stream, &s);
        CUgraph graph = result == CUDA_SUCCESS ? captured(s) : NULL;

        if (graph)
                return fake_graph_add_free(graph, pointer);
        if (result == CUDA_SUCCESS)
                result = cuStreamSynchronize(stream);
        return result == CUDA_SUCCESS ? cuMemFree_v2(pointer) : result;
}

API CUresult cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
        return cuMemFreeAsync(pointer, stream);
}

#else

void fake_pools_forget(CUcontext c)
{
        (void)c;
}

bool fake_pool_find(CUdeviceptr pointer, CUdeviceptr *ret_base, size_t *ret_n_bytes)
{
        (void)pointer, (void)ret_base, (void)ret_n_bytes;
        return false;
}

bool fake_pool_free(CUdeviceptr pointer)
{
        (void)pointer;
        return false;
}

#endif
