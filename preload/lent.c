/* cuMemCreate() by bfcd; see lent.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: memory lives while n_references > 0: handles, and views. Its block is freed after the last one. */
#include "preload/lent.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/queue.h>

#define PIECE_BYTES ((size_t)2 << 20) /* extents are multiples of it */
#define MIN_PART    16                /* of the limit: an extent is at most a quarter of such a request */

struct piece {
        CUdeviceptr at; /* where the library has the extent */
        size_t n_bytes;
};

struct lent {
        LIST_ENTRY(lent) link;
        CUmemGenericAllocationHandle handle;
        struct gpu *gpu;
        void *block;
        bool is_attached; /* the block is another process's */
        size_t n_bytes;
        CUmemAllocationProp prop;
        unsigned n_references, n_handles; /* n_handles: of the references */
        struct piece *pieces;
        size_t n_pieces;
};

struct view {
        LIST_ENTRY(view) link;
        CUdeviceptr base;
        struct lent *memory; /* all of it */
};

static LIST_HEAD(lent_list, lent) all_lent = LIST_HEAD_INITIALIZER(all_lent);
static LIST_HEAD(view_list, view) all_views = LIST_HEAD_INITIALIZER(all_views);
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- mapping extents ------------------------------------------------------------- */

/* The library keeps no handle of an extent. The mapping keeps the memory. */
static CUresult map_piece(const struct piece *piece, CUdeviceptr at)
{
        CUmemGenericAllocationHandle handle;
        CUresult result = real_cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)piece->at);

        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuMemMap(at, piece->n_bytes, 0, handle, 0);
        real_cuMemRelease(handle);
        return result;
}

static CUresult unmap_pieces(const struct piece *pieces, size_t n_pieces, CUdeviceptr at)
{
        CUresult result = CUDA_SUCCESS;

        for (size_t i = 0; i < n_pieces; i++) {
                CUresult r = real_cuMemUnmap(at, pieces[i].n_bytes);

                if (result == CUDA_SUCCESS)
                        result = r;
                at += pieces[i].n_bytes;
        }
        return result;
}

static CUresult map_pieces(const struct piece *pieces, size_t n_pieces, CUdeviceptr pointer)
{
        CUdeviceptr at = pointer;

        for (size_t i = 0; i < n_pieces; i++) {
                CUresult result = map_piece(&pieces[i], at);

                if (result != CUDA_SUCCESS) {
                        unmap_pieces(pieces, i, pointer);
                        return result;
                }
                at += pieces[i].n_bytes;
        }
        return CUDA_SUCCESS;
}

/* Whether this driver maps extents a second time, and side by side. */
static CUresult try_mapping(const struct lent *l)
{
        CUmemAccessDesc access = { l->prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        size_t n_pieces = l->n_pieces < 2 ? 1 : 2;
        size_t n_bytes = l->pieces[0].n_bytes + (n_pieces == 2 ? l->pieces[1].n_bytes : 0);
        CUdeviceptr at;
        CUresult result = cuMemAddressReserve(&at, n_bytes, 0, 0, 0);

        if (result != CUDA_SUCCESS)
                return result;
        result = map_pieces(l->pieces, n_pieces, at);
        if (result == CUDA_SUCCESS) {
                result = cuMemSetAccess(at, n_bytes, &access, 1);
                unmap_pieces(l->pieces, n_pieces, at);
        }
        cuMemAddressFree(at, n_bytes);
        return result;
}

/* ---- making ----------------------------------------------------------------------- */

bool lent_is_for(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
        size_t n_free, n_total;

        if (!gpu || gpu->share != BFC_SHARE_FD ||
            n_bytes == __atomic_load_n(&gpu->uneven_bytes, __ATOMIC_RELAXED) || flags != 0 || n_bytes == 0 ||
            n_bytes % PIECE_BYTES != 0)
                return false;
        if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->win32HandleMetaData ||
            prop->allocFlags.compressionType != 0 || prop->allocFlags.usage != 0 ||
            (int)prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC)
                return false;
        return broker_mem_info(gpu, &n_free, &n_total) == CUDA_SUCCESS && n_bytes >= n_total / MIN_PART;
}

static void free_lent(struct lent *l)
{
        free(l->pieces);
        free(l);
}

/* The block's extents. False: it is larger than the memory, because no extents have its size together, and drivers map
 * no part of one. */
static bool find_pieces(struct lent *l)
{
        const char *block = l->block;
        size_t n = 0;

        free(l->pieces);
        l->n_pieces = 0;
        l->pieces = calloc(l->n_bytes / PIECE_BYTES, sizeof(*l->pieces));
        while (l->pieces && n < l->n_bytes) {
                CUdeviceptr at = (CUdeviceptr)(uintptr_t)(block + n);
                struct bfc_block_info info;

                if (!broker_find_block(at, &info) || info.ptr_extent_offset != 0 ||
                    info.ptr_extent_bytes < PIECE_BYTES || info.ptr_extent_bytes > l->n_bytes - n)
                        return false;
                l->pieces[l->n_pieces++] = (struct piece){ at, info.ptr_extent_bytes };
                n += info.ptr_extent_bytes;
        }
        return l->pieces != NULL;
}

/* 0: it has a block, which is in use. Negative: an error of the library. */
static int take_block(struct lent *l)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .partition = l->gpu->partition,
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "cuMemCreate" };
        int r = bfc_malloc_with(l->gpu->client, l->n_bytes, &options, &l->block);

        if (r < 0)
                return r;
        r = bfc_use_begin(l->gpu->client, l->block, 0);
        if (r < 0)
                bfc_free(l->gpu->client, l->block);
        return r;
}

/* The memory goes to the device, as the driver's would. So the next block finds its extents unbacked: only such are
 * taken together. */
static int free_block(const struct lent *l, size_t n_trim)
{
        int r = bfc_free(l->gpu->client, l->block);

        if (r == 0)
                (void)bfc_trim(l->gpu->client, n_trim);
        return r;
}

/* 0: it has a block of just its size. LENT_NOT: there is none. Else an error of the library. */
static int take_even_block(struct lent *l)
{
        for (size_t i = 0; i < 2; i++) {
                int r = take_block(l);

                if (r < 0)
                        return r == -ENOTSUP ? LENT_NOT : r;
                if (find_pieces(l))
                        return 0;
                free_block(l, SIZE_MAX); /* idle extents may have had the size */
        }
        __atomic_store_n(&l->gpu->uneven_bytes, l->n_bytes, __ATOMIC_RELAXED);
        return LENT_NOT;
}

static int fill(struct lent *l)
{
        int r = (int)broker_check_room(l->gpu, l->n_bytes);
        CUresult result;

        if (r != CUDA_SUCCESS)
                return r;
        r = take_even_block(l);
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r != 0)
                return r == LENT_NOT ? r : (int)broker_result(r);
        result = try_mapping(l);
        if (result == CUDA_SUCCESS)
                return CUDA_SUCCESS;
        broker_say("memory of cuMemCreate is not taken from bfcd: the driver does not map it (error %d)",
                   (int)result);
        free_block(l, l->n_bytes);
        return LENT_NOT;
}

static struct lent *make(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop)
{
        struct lent *l = calloc(1, sizeof(*l));

        if (!l)
                return NULL;
        l->gpu = gpu;
        l->n_bytes = n_bytes;
        l->prop = *prop;
        l->n_references = l->n_handles = 1;
        l->handle = (uintptr_t)l | 1; /* no address, as the driver's are */
        return l;
}

static int enter(struct lent *l, int result, CUmemGenericAllocationHandle *ret_handle)
{
        if (result != CUDA_SUCCESS) {
                free_lent(l);
                return result;
        }
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&all_lent, l, link);
        *ret_handle = l->handle;
        pthread_mutex_unlock(&lock);
        return CUDA_SUCCESS;
}

int lent_create(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop,
                CUmemGenericAllocationHandle *ret_handle)
{
        struct lent *l;

        if (((unsigned)prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0)
                return CUDA_ERROR_NOT_SUPPORTED;
        l = make(gpu, n_bytes, prop);
        return l ? enter(l, fill(l), ret_handle) : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult lent_attach(const struct bfc_block_info *info, CUmemGenericAllocationHandle *ret_handle)
{
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE,
                                                         (int)info->device_ordinal } };
        struct gpu *gpu = broker_gpu((CUdevice)info->device_ordinal);
        struct lent *l = gpu ? make(gpu, info->n_bytes, &prop) : NULL;
        int r;

        if (!l)
                return CUDA_ERROR_OUT_OF_MEMORY;
        l->block = info->base;
        l->is_attached = true;
        r = bfc_use_begin(gpu->client, l->block, 0);
        if (r < 0)
                return (CUresult)enter(l, (int)broker_result(r), ret_handle);
        if (find_pieces(l))
                return (CUresult)enter(l, CUDA_SUCCESS, ret_handle);
        bfc_use_end(gpu->client, l->block);
        return (CUresult)enter(l, CUDA_ERROR_NOT_SUPPORTED, ret_handle);
}

/* ---- handles -------------------------------------------------------------------------- */

static struct lent *find_locked(CUmemGenericAllocationHandle handle)
{
        struct lent *l;

        LIST_FOREACH(l, &all_lent, link)
        {
                if (l->handle == handle && l->n_handles > 0)
                        return l;
        }
        return NULL;
}

/* True: it was the last one, and the caller ends the memory. */
static bool unref_locked(struct lent *l)
{
        if (--l->n_references > 0)
                return false;
        LIST_REMOVE(l, link);
        return true;
}

/* Without the lock: it waits for work. */
static CUresult end(struct lent *l)
{
        int r;

        if (l->is_attached)
                bfc_use_end(l->gpu->client, l->block);
        r = l->is_attached ? bfc_detach(l->gpu->client, l->block) : free_block(l, l->n_bytes);
        __atomic_store_n(&l->gpu->uneven_bytes, 0, __ATOMIC_RELAXED);
        free_lent(l);
        return broker_result(r);
}

int lent_release(CUmemGenericAllocationHandle handle)
{
        bool is_last = false;
        struct lent *l;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        if (l) {
                l->n_handles--;
                is_last = unref_locked(l);
        }
        pthread_mutex_unlock(&lock);
        if (!l)
                return LENT_NOT;
        return is_last ? (int)end(l) : CUDA_SUCCESS;
}

int lent_properties(CUmemGenericAllocationHandle handle, CUmemAllocationProp *ret)
{
        const struct lent *l;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        if (l && ret)
                *ret = l->prop;
        pthread_mutex_unlock(&lock);
        if (!l)
                return LENT_NOT;
        return ret ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

void *lent_block(CUmemGenericAllocationHandle handle)
{
        const struct lent *l;
        void *block;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        block = l ? l->block : NULL;
        pthread_mutex_unlock(&lock);
        return block;
}

CUresult lent_again(uint64_t block_id, CUmemGenericAllocationHandle *ret_handle)
{
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        struct bfc_block_info info;
        struct lent *l;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(l, &all_lent, link)
        {
                if (!broker_find_block((CUdeviceptr)(uintptr_t)l->block, &info) || info.block_id != block_id)
                        continue;
                l->n_handles++;
                l->n_references++;
                *ret_handle = l->handle;
                result = CUDA_SUCCESS;
                break;
        }
        pthread_mutex_unlock(&lock);
        return result;
}

bool lent_has(CUmemGenericAllocationHandle handle)
{
        return lent_block(handle) != NULL;
}

/* ---- views ------------------------------------------------------------------------------ */

static struct view *find_view_locked(CUdeviceptr pointer)
{
        struct view *v;

        LIST_FOREACH(v, &all_views, link)
        {
                if (pointer >= v->base && pointer - v->base < v->memory->n_bytes)
                        return v;
        }
        return NULL;
}

static CUresult map_locked(struct lent *l, CUdeviceptr pointer)
{
        struct view *v = malloc(sizeof(*v));
        CUresult result = v ? map_pieces(l->pieces, l->n_pieces, pointer) : CUDA_ERROR_OUT_OF_MEMORY;

        if (result != CUDA_SUCCESS) {
                free(v);
                return result;
        }
        *v = (struct view){ .base = pointer, .memory = l };
        LIST_INSERT_HEAD(&all_views, v, link);
        l->n_references++;
        return CUDA_SUCCESS;
}

/* Drivers refuse the same. */
static CUresult check_map(const struct lent *l, size_t n_bytes, size_t offset, unsigned long long flags)
{
        if (flags != 0 || n_bytes == 0)
                return CUDA_ERROR_INVALID_VALUE;
        return offset == 0 && n_bytes == l->n_bytes ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

int lent_map(CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags)
{
        int result = LENT_NOT;
        struct lent *l;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        if (l)
                result = (int)check_map(l, n_bytes, offset, flags);
        if (l && result == CUDA_SUCCESS)
                result = (int)map_locked(l, pointer);
        pthread_mutex_unlock(&lock);
        return result;
}

bool lent_retain(CUdeviceptr pointer, CUmemGenericAllocationHandle *ret_handle)
{
        struct view *v;

        pthread_mutex_lock(&lock);
        v = find_view_locked(pointer);
        if (v) {
                v->memory->n_handles++;
                v->memory->n_references++;
                *ret_handle = v->memory->handle;
        }
        pthread_mutex_unlock(&lock);
        return v != NULL;
}

bool lent_find_view(CUdeviceptr pointer, struct lent_view *ret)
{
        const struct view *v;

        pthread_mutex_lock(&lock);
        v = find_view_locked(pointer);
        if (v)
                *ret = (struct lent_view){ v->base, v->memory->n_bytes };
        pthread_mutex_unlock(&lock);
        return v != NULL;
}

bool lent_next_view(CUdeviceptr pointer, size_t n_bytes, struct lent_view *ret)
{
        const struct view *v, *first = NULL;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(v, &all_views, link)
        {
                if (v->base >= pointer && v->base - pointer < n_bytes && (!first || v->base < first->base))
                        first = v;
        }
        if (first)
                *ret = (struct lent_view){ first->base, first->memory->n_bytes };
        pthread_mutex_unlock(&lock);
        return first != NULL;
}

CUresult lent_unmap(CUdeviceptr pointer)
{
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        struct lent *last = NULL;
        struct view *v;

        pthread_mutex_lock(&lock);
        v = find_view_locked(pointer);
        if (v && v->base == pointer)
                result = unmap_pieces(v->memory->pieces, v->memory->n_pieces, v->base);
        if (result == CUDA_SUCCESS) {
                LIST_REMOVE(v, link);
                last = unref_locked(v->memory) ? v->memory : NULL;
                free(v);
        }
        pthread_mutex_unlock(&lock);
        return last ? end(last) : result;
}
