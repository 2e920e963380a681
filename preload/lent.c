/* cuMemCreate() by bfcd; see lent.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Invariant: memory lives while n_references > 0: handles, and views. Its block is freed after the last one. Its GPU
 * has a client. */
#include "preload/lent.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "preload/charge.h"

#define PIECE_BYTES ((size_t)2 << 20) /* extents are multiples of it */
enum { LENT_UNEVEN = LENT_NOT - 1 };
#define MIN_PART 16 /* of the limit: an extent is at most a quarter of such a request */

struct piece {
        CUdeviceptr at; /* where the library has the extent */
        size_t n_bytes;
};

struct lent {
        LIST_ENTRY(lent) link;
        CUmemGenericAllocationHandle handle;
        struct gpu *gpu;
        void *blocks[LENT_BLOCKS];
        size_t n_blocks;
        bool is_attached; /* the blocks are another process's */
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
static struct lent_list all_left = LIST_HEAD_INITIALIZER(all_left); /* of which a block could not be freed */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void in_child(void)
{
        lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
        LIST_INIT(&all_lent);
        LIST_INIT(&all_views);
        LIST_INIT(&all_left);
}

static void __attribute__((constructor)) watch_forks(void)
{
        pthread_atfork(NULL, NULL, in_child);
}

/* ---- mapping extents ------------------------------------------------------------- */

/* Names the call that failed, for a line on stderr. */
static CUresult failed(const char *call, CUresult result)
{
        broker_say("memory of cuMemCreate cannot be mapped a second time: %s gives error %d", call,
                   (int)result);
        return result;
}

/* The library keeps no handle of an extent. The mapping keeps the memory. */
static CUresult map_piece(const struct piece *piece, CUdeviceptr at)
{
        CUmemGenericAllocationHandle handle;
        CUresult result = real_cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)piece->at);

        if (result != CUDA_SUCCESS)
                return failed("cuMemRetainAllocationHandle", result);
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
                if (result != CUDA_SUCCESS)
                        (void)failed("cuMemSetAccess", result);
                unmap_pieces(l->pieces, n_pieces, at);
        }
        cuMemAddressFree(at, n_bytes);
        return result;
}

/* ---- making ----------------------------------------------------------------------- */

bool lent_is_for(struct gpu *gpu, size_t n_bytes, const CUmemAllocationProp *prop, unsigned long long flags)
{
        uint64_t n_total;

        if (!gpu || gpu->share != BFC_SHARE_FD ||
            n_bytes == __atomic_load_n(&gpu->uneven_bytes, __ATOMIC_RELAXED) || flags != 0 || n_bytes == 0 ||
            n_bytes % PIECE_BYTES != 0)
                return false;
        if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
            prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE || prop->win32HandleMetaData ||
            prop->allocFlags.compressionType != 0 || prop->allocFlags.usage != 0 ||
            (int)prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC)
                return false;
        n_total = broker_total(gpu);
        return n_total > 0 && n_bytes >= n_total / MIN_PART;
}

static void free_lent(struct lent *l)
{
        free(l->pieces);
        free(l);
}

/* The block's size, which is that of its extents, and that of its last extent. */
static size_t block_bytes(void *block, size_t *ret_last)
{
        struct bfc_block_info info;
        size_t n_bytes = 0;

        if (broker_find_block((CUdeviceptr)(uintptr_t)block, &info))
                n_bytes = info.n_bytes;
        *ret_last = n_bytes > 0 && broker_find_block((CUdeviceptr)(uintptr_t)block + n_bytes - 1, &info)
                            ? info.ptr_extent_bytes
                            : 0;
        return n_bytes;
}

static bool add_pieces(struct lent *l, void *block)
{
        CUdeviceptr at = (CUdeviceptr)(uintptr_t)block;
        size_t last, n_left = block_bytes(block, &last);

        while (n_left > 0) {
                struct bfc_block_info info;

                if (!broker_find_block(at, &info) || info.ptr_extent_offset != 0 ||
                    info.ptr_extent_bytes < PIECE_BYTES || info.ptr_extent_bytes > n_left)
                        return false;
                l->pieces[l->n_pieces++] = (struct piece){ at, info.ptr_extent_bytes };
                at += info.ptr_extent_bytes;
                n_left -= info.ptr_extent_bytes;
        }
        return true;
}

/* The extents of the blocks, which together have the size. */
static bool find_pieces(struct lent *l)
{
        l->pieces = calloc(l->n_bytes / PIECE_BYTES, sizeof(*l->pieces));
        for (size_t i = 0; l->pieces && i < l->n_blocks; i++)
                if (!add_pieces(l, l->blocks[i]))
                        return false;
        return l->pieces != NULL;
}

/* A block, which is in use. CUDA_SUCCESS, or an error of the library, which is negative. */
static int take_block(struct lent *l, size_t n_bytes)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .partition = l->gpu->partition,
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "cuMemCreate" };
        void *block;
        int r = bfc_malloc_with(l->gpu->client, n_bytes, &options, &block);

        if (r < 0)
                return r;
        r = bfc_use_begin(l->gpu->client, block, 0);
        if (r < 0)
                bfc_free_unused(l->gpu->client, block);
        else
                l->blocks[l->n_blocks++] = block;
        return r;
}

/* The memory goes to the device, as the driver's would. So the next block finds its extents unbacked: only such are
 * taken together. Without a wait, as the driver's: the program has only the mappings, so no work uses a block when there
 * are none. False: a block is left, because the library could not free it. */
static bool free_blocks(struct lent *l, size_t n_trim)
{
        if (l->n_blocks == 0)
                return true;
        for (; l->n_blocks > 0; l->n_blocks--) {
                int r = bfc_free_unused(l->gpu->client, l->blocks[l->n_blocks - 1]);

                if (r < 0 && r != -EINVAL)
                        return false;
        }
        if (!l->is_attached)
                (void)bfc_trim(l->gpu->client, n_trim);
        return true;
}

/* Without the lock. */
static void let_go(struct lent *l)
{
        if (free_blocks(l, l->n_bytes)) {
                free_lent(l);
                return;
        }
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&all_left, l, link);
        pthread_mutex_unlock(&lock);
}

/* Tries again. */
static void let_go_left(void)
{
        struct lent_list left = LIST_HEAD_INITIALIZER(left);
        struct lent *l;

        pthread_mutex_lock(&lock);
        while ((l = LIST_FIRST(&all_left))) {
                LIST_REMOVE(l, link);
                LIST_INSERT_HEAD(&left, l, link);
        }
        pthread_mutex_unlock(&lock);
        while ((l = LIST_FIRST(&left))) {
                LIST_REMOVE(l, link);
                let_go(l);
        }
}

/* A block of n_first bytes, and one of the rest; none where that is 0. LENT_UNEVEN: a block is larger than that, because
 * no extents have its size together; *ret_last is the size of its last extent. Then, and after an error, there are none. */
static int take_blocks(struct lent *l, size_t n_first, size_t *ret_last)
{
        const size_t parts[LENT_BLOCKS] = { n_first, l->n_bytes - n_first };
        int r = 0;

        for (size_t i = 0; r == 0 && i < LENT_BLOCKS; i++) {
                if (parts[i] == 0)
                        continue;
                r = take_block(l, parts[i]);
                if (r == 0 && block_bytes(l->blocks[l->n_blocks - 1], ret_last) != parts[i])
                        r = LENT_UNEVEN;
        }
        if (r != 0 && !free_blocks(l, SIZE_MAX)) /* idle extents may have had the size */
                r = -ENOMEM;
        return r;
}

/* Drivers map no part of an extent. So a block is to have just the size, or two: one of the small extents at the begin
 * of an arena, and one of its largest ones. LENT_NOT: there are none.
 *
 * The second attempt finds all idle extents unbacked. Each size of extents divides the next, so two blocks can be had
 * wherever one can. */
static int take_even_blocks(struct lent *l)
{
        size_t last = 0;
        int r = take_blocks(l, 0, &last);

        if (r == LENT_UNEVEN && last > 0)
                r = take_blocks(l, l->n_bytes % last, &last);
        if (r == LENT_UNEVEN)
                __atomic_store_n(&l->gpu->uneven_bytes, l->n_bytes, __ATOMIC_RELAXED);
        return r == LENT_UNEVEN || r == -ENOTSUP ? LENT_NOT : r;
}

static int fill(struct lent *l)
{
        bfc_client *client;
        CUresult result = broker_client(l->gpu, &client);
        int r;

        if (result != CUDA_SUCCESS)
                return (int)result;
        do
                r = take_even_blocks(l);
        while (charge_makes_room(l->gpu, r));
        if (r == -EBUSY) /* the device is drained */
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (r != 0)
                return r == LENT_NOT ? r : (int)broker_result(r);
        result = find_pieces(l) ? try_mapping(l) : CUDA_ERROR_OUT_OF_MEMORY;
        if (result == CUDA_SUCCESS)
                return CUDA_SUCCESS;
        broker_say("memory of cuMemCreate is not taken from bfcd: the driver does not map it (error %d)",
                   (int)result);
        __atomic_store_n(&l->gpu->uneven_bytes, l->n_bytes, __ATOMIC_RELAXED);
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
                let_go(l);
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
        let_go_left();
        l = make(gpu, n_bytes, prop);
        return l ? enter(l, fill(l), ret_handle) : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Then the blocks are in use. */
static int fill_attached(struct lent *l)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < l->n_blocks; i++) {
                r = bfc_use_begin(l->gpu->client, l->blocks[i], 0);
                if (r < 0)
                        l->n_blocks = i;
        }
        if (r == 0 && find_pieces(l))
                return CUDA_SUCCESS;
        while (l->n_blocks > 0)
                bfc_use_end(l->gpu->client, l->blocks[--l->n_blocks]);
        return r < 0 ? (int)broker_result(r) : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult lent_attach(const struct bfc_block_info *infos, size_t n, CUmemGenericAllocationHandle *ret_handle)
{
        const CUdevice device = (CUdevice)infos[0].device_ordinal;
        const CUmemAllocationProp prop = { .type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                           .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                           .location = { CU_MEM_LOCATION_TYPE_DEVICE, device } };
        struct gpu *gpu = broker_gpu(device);
        struct lent *l = gpu ? make(gpu, 0, &prop) : NULL;

        if (!l)
                return CUDA_ERROR_OUT_OF_MEMORY;
        l->is_attached = true;
        for (size_t i = 0; i < n; i++) {
                l->blocks[l->n_blocks++] = infos[i].base;
                l->n_bytes += infos[i].n_bytes;
        }
        return (CUresult)enter(l, fill_attached(l), ret_handle);
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

/* Without the lock. The program has given the memory back, whatever becomes of its blocks. */
static void end(struct lent *l)
{
        for (size_t i = 0; l->is_attached && i < l->n_blocks; i++)
                bfc_use_end(l->gpu->client, l->blocks[i]);
        __atomic_store_n(&l->gpu->uneven_bytes, 0, __ATOMIC_RELAXED);
        let_go_left();
        let_go(l);
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
        if (is_last)
                end(l);
        return l ? CUDA_SUCCESS : LENT_NOT;
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

size_t lent_blocks(CUmemGenericAllocationHandle handle, void *ret[static LENT_BLOCKS])
{
        const struct lent *l;
        size_t n = 0;

        pthread_mutex_lock(&lock);
        l = find_locked(handle);
        for (; l && n < l->n_blocks; n++)
                ret[n] = l->blocks[n];
        pthread_mutex_unlock(&lock);
        return n;
}

CUresult lent_again(uint64_t block_id, CUmemGenericAllocationHandle *ret_handle)
{
        CUresult result = CUDA_ERROR_INVALID_VALUE;
        struct bfc_block_info info;
        struct lent *l;

        pthread_mutex_lock(&lock);
        LIST_FOREACH(l, &all_lent, link)
        {
                if (!broker_find_block((CUdeviceptr)(uintptr_t)l->blocks[0], &info) ||
                    info.block_id != block_id)
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

static void forget_memory_locked(struct lent_list *list, const struct gpu *gpu)
{
        struct lent *l, *next;

        for (l = LIST_FIRST(list); l; l = next) {
                next = LIST_NEXT(l, link);
                if (l->gpu != gpu)
                        continue;
                LIST_REMOVE(l, link);
                free_lent(l);
        }
}

void lent_forget(const struct gpu *gpu)
{
        struct view *v, *next;

        pthread_mutex_lock(&lock);
        for (v = LIST_FIRST(&all_views); v; v = next) {
                next = LIST_NEXT(v, link);
                if (v->memory->gpu != gpu)
                        continue;
                unmap_pieces(v->memory->pieces, v->memory->n_pieces, v->base);
                LIST_REMOVE(v, link);
                free(v);
        }
        forget_memory_locked(&all_lent, gpu);
        forget_memory_locked(&all_left, gpu);
        pthread_mutex_unlock(&lock);
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
        if (last)
                end(last);
        return result;
}
