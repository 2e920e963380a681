/* Arrays and mipmapped arrays: bytes of the device without contents.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An array takes more than its elements: rows in units of 64 bytes, 8 rows at a time, and 2 MiB at once. The levels of a
 * mipmapped one halve down to one element, and all of them are one allocation. Sparse and deferred arrays take nothing
 * until memory is mapped to them, which is not modelled.
 *
 * Invariant: an array is on the list exactly while it lives. */
#include "tests/fake_cuda/fake.h"

#ifndef BFC_CUDA_REAL_HEADER

#include <stdlib.h>

#include "integrations/preload/api.h"

#define ROW_BYTES ((size_t)64)
#define ROWS      ((size_t)8)

enum { LAYERED = 0x1, CUBEMAP = 0x4, SPARSE = 0x40, DEFERRED = 0x80 }; /* CUDA_ARRAY3D_... */

struct CUarray_st {
        struct CUarray_st *next;
        CUcontext context;
        bool is_mipmapped;
        struct fake_bytes bytes;
};

static CUarray arrays;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- sizes -------------------------------------------------------------------- */

/* Of 4 by 4 elements in all channels. 0: it is not compressed, or not known here. */
static size_t compressed_bytes(CUarray_format format)
{
        switch (format) {
        case 0x91: /* CU_AD_FORMAT_BC1_UNORM */
                return 8;
        case 0x9d: /* CU_AD_FORMAT_BC7_UNORM */
                return 16;
        default:
                return 0;
        }
}

/* Of an element in one channel; 0: not known here. */
static size_t format_bytes(CUarray_format format)
{
        switch (format) {
        case 0x01: /* CU_AD_FORMAT_UNSIGNED_INT8 */
        case 0x08: /* CU_AD_FORMAT_SIGNED_INT8 */
        case 0xc2: /* CU_AD_FORMAT_UNORM_INT8X4 */
                return 1;
        case 0x02: /* CU_AD_FORMAT_UNSIGNED_INT16 */
        case 0x09: /* CU_AD_FORMAT_SIGNED_INT16 */
        case 0x10: /* CU_AD_FORMAT_HALF */
                return 2;
        case 0x03: /* CU_AD_FORMAT_UNSIGNED_INT32 */
        case 0x0a: /* CU_AD_FORMAT_SIGNED_INT32 */
        case 0x20: /* CU_AD_FORMAT_FLOAT */
                return 4;
        default:
                return 0;
        }
}

static size_t multiple_of(size_t n, size_t unit)
{
        return n > SIZE_MAX - unit ? SIZE_MAX : (n + unit - 1) / unit * unit;
}

static size_t halved(size_t n, unsigned int level)
{
        return n >> level > 0 ? n >> level : 1;
}

static bool level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int level, size_t *ret)
{
        size_t depth = what->Depth > 0 ? what->Depth : 1, row;
        size_t width = halved(what->Width, level), height = halved(what->Height, level);
        size_t n_element = format_bytes(what->Format) * what->NumChannels;

        if (compressed_bytes(what->Format) > 0) {
                n_element = compressed_bytes(what->Format);
                width = width / 4 + (width % 4 > 0);
                height = height / 4 + (height % 4 > 0);
        }
        if (!(what->Flags & (LAYERED | CUBEMAP)))
                depth = halved(depth, level);
        return !__builtin_mul_overflow(width, n_element, &row) &&
               !__builtin_mul_overflow(multiple_of(row, ROW_BYTES), multiple_of(height, ROWS), ret) &&
               !__builtin_mul_overflow(*ret, depth, ret);
}

/* 0: more than there is of numbers. */
static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int n_levels)
{
        size_t n_bytes = 0, n;

        for (unsigned int level = 0; level < n_levels; level++)
                if (!level_bytes(what, level, &n) || __builtin_add_overflow(n_bytes, n, &n_bytes))
                        return 0;
        return n_bytes > SIZE_MAX - FAKE_GRANULARITY ? 0 : fake_round_up(n_bytes);
}

/* ---- the list ------------------------------------------------------------------- */

static CUresult make(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int n_levels, bool is_mipmapped,
                     CUarray *ret)
{
        size_t n_bytes;
        CUcontext c;
        CUarray a;
        CUresult r = fake_context(&c);

        if (r != CUDA_SUCCESS)
                return r;
        if (!ret || !what || what->Width == 0 || n_levels == 0 ||
            format_bytes(what->Format) + compressed_bytes(what->Format) == 0 ||
            (what->NumChannels != 1 && what->NumChannels != 2 && what->NumChannels != 4))
                return CUDA_ERROR_INVALID_VALUE;
        n_bytes = array_bytes(what, n_levels);
        if (n_bytes == 0)
                return CUDA_ERROR_OUT_OF_MEMORY;
        a = calloc(1, sizeof(*a));
        if (!a)
                return CUDA_ERROR_OUT_OF_MEMORY;
        *a = (struct CUarray_st){ .context = c, .is_mipmapped = is_mipmapped };
        if (!(what->Flags & (SPARSE | DEFERRED)))
                r = fake_bytes_take(c->device, n_bytes, &a->bytes);
        if (r != CUDA_SUCCESS) {
                free(a);
                return r;
        }
        pthread_mutex_lock(&lock);
        a->next = arrays;
        arrays = a;
        pthread_mutex_unlock(&lock);
        *ret = a;
        return CUDA_SUCCESS;
}

/* The first one of the list from at on, of a context or one itself. With the lock held. */
static bool take(CUarray a, CUcontext c, CUarray *ret)
{
        for (CUarray *at = &arrays; *at; at = &(*at)->next)
                if (*at == a || (c && (*at)->context == c)) {
                        *ret = *at;
                        *at = (*at)->next;
                        return true;
                }
        return false;
}

static CUresult destroy(CUarray array, bool is_mipmapped)
{
        CUarray a = NULL;
        bool is_one;

        pthread_mutex_lock(&lock);
        for (a = arrays; a && a != array; a = a->next)
                ;
        is_one = a && a->is_mipmapped == is_mipmapped && take(array, NULL, &a);
        pthread_mutex_unlock(&lock);
        if (!is_one)
                return CUDA_ERROR_INVALID_HANDLE;
        fake_bytes_give_back(&a->bytes);
        free(a);
        return CUDA_SUCCESS;
}

void fake_arrays_destroy_of(CUcontext c)
{
        CUarray a;

        pthread_mutex_lock(&lock);
        while (take(NULL, c, &a)) {
                fake_bytes_give_back(&a->bytes);
                free(a);
        }
        pthread_mutex_unlock(&lock);
}

/* ---- the functions, counted as others that allocate and free -------------------------- */

API CUresult cuArray3DCreate_v2(CUarray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
        ENTER(cuMemAlloc_v2);
        return make(what, 1, false, ret_array);
}

API CUresult cuArrayCreate_v2(CUarray *ret_array, const CUDA_ARRAY_DESCRIPTOR *what)
{
        if (!what)
                return CUDA_ERROR_INVALID_VALUE;
        return cuArray3DCreate_v2(ret_array, &(CUDA_ARRAY3D_DESCRIPTOR){ .Width = what->Width,
                                                                         .Height = what->Height,
                                                                         .Format = what->Format,
                                                                         .NumChannels = what->NumChannels });
}

API CUresult cuArrayDestroy(CUarray array)
{
        ENTER(cuMemFree_v2);
        return destroy(array, false);
}

API CUresult cuMipmappedArrayCreate(CUmipmappedArray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what,
                                    unsigned int n_levels)
{
        ENTER(cuMemAlloc_v2);
        return make(what, n_levels < 32 ? n_levels : 32, true, (CUarray *)ret_array);
}

API CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
        ENTER(cuMemFree_v2);
        return destroy((CUarray)array, true);
}

#else

void fake_arrays_destroy_of(CUcontext c)
{
        (void)c;
}

#endif
