/* cuMemCreate() and its handles, by bfcd or counted; and what bfcd does not lend: arrays.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>

#include "integrations/preload/charge.h"
#include "integrations/preload/lent.h"
#include "integrations/preload/outside.h"

/* ---- handles ------------------------------------------------------------------- */

/* Handles with numbers that the program has for other memory: see lent_has_name(). While they are kept the driver gives others. */
struct taken {
        CUmemGenericAllocationHandle handles[8];
        size_t n;
};

/* True: the call is to be made again. */
static bool is_taken(struct taken *taken, CUresult result, const CUmemGenericAllocationHandle *handle)
{
        if (result != CUDA_SUCCESS || !lent_has_name(*handle))
                return false;
        taken->handles[taken->n++] = *handle;
        return taken->n < sizeof(taken->handles) / sizeof(taken->handles[0]);
}

static CUresult release_taken(const struct taken *taken, CUresult result)
{
        for (size_t i = 0; i < taken->n; i++)
                real_cuMemRelease(taken->handles[i]);
        return taken->n == sizeof(taken->handles) / sizeof(taken->handles[0]) ? CUDA_ERROR_OUT_OF_MEMORY
                                                                              : result;
}

static CUresult create_of_driver(CUmemGenericAllocationHandle *ret_handle, size_t n_bytes,
                                 const CUmemAllocationProp *prop, unsigned long long flags)
{
        struct taken taken = { .n = 0 };
        CUresult result;

        do
                result = real_cuMemCreate(ret_handle, n_bytes, prop, flags);
        while (is_taken(&taken, result, ret_handle));
        return release_taken(&taken, result);
}

static CUresult create(const struct outside *o, size_t n_bytes, const CUmemAllocationProp *prop,
                       unsigned long long flags, CUmemGenericAllocationHandle *ret_handle)
{
        CUresult result = create_of_driver(ret_handle, n_bytes, prop, flags);

        return outside_end_create(o, result, *ret_handle);
}

/* What is not small, or has no room. */
static CUresult create_with_daemon(int ordinal, size_t n_bytes, const CUmemAllocationProp *prop,
                                   unsigned long long flags, CUmemGenericAllocationHandle *ret_handle)
{
        struct outside o = { .n_bytes = n_bytes, .function = "cuMemCreate" };
        IN_CALL;
        CUdevice device;
        CUresult result = cuDeviceGet(&device, ordinal); /* an error before cuInit() */

        if (result != CUDA_SUCCESS)
                return result;
        o.gpu = broker_gpu(device);
        if (lent_is_for(o.gpu, n_bytes, prop, flags)) {
                int lent = lent_create(o.gpu, n_bytes, prop, ret_handle);

                if (lent != LENT_NOT)
                        return (CUresult)lent;
        }
        result = outside_begin(&o);
        return result == CUDA_SUCCESS ? create(&o, n_bytes, prop, flags, ret_handle) : result;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *ret_handle, size_t n_bytes,
                     const CUmemAllocationProp *prop, unsigned long long flags)
{
        struct outside o = { .n_bytes = n_bytes, .is_charged = true };
        int device;

        if (!ret_handle || !prop)
                return real_cuMemCreate(ret_handle, n_bytes, prop, flags);
        device = location_device(&prop->location);
        if (device < 0)
                return create_of_driver(ret_handle, n_bytes, prop, flags);
        o.gpu = broker_known_gpu(device);
        return o.gpu && !lent_is_for(o.gpu, n_bytes, prop, flags) && charge_take_room(o.gpu, n_bytes)
                       ? create(&o, n_bytes, prop, flags, ret_handle)
                       : create_with_daemon(device, n_bytes, prop, flags, ret_handle);
}

/* An import is memory of its own for the driver, also of what this process has exported. */
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *ret_handle, void *os_handle,
                                        CUmemAllocationHandleType type)
{
        struct taken taken = { .n = 0 };
        IN_CALL;
        CUresult result;

        do
                result = real_cuMemImportFromShareableHandle(ret_handle, os_handle, type);
        while (is_taken(&taken, result, ret_handle));
        return release_taken(&taken, result);
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *ret_prop,
                                                CUmemGenericAllocationHandle handle)
{
        IN_CALL;
        CUresult result = lent_find_handle(&handle);

        return result == CUDA_SUCCESS ? real_cuMemGetAllocationPropertiesFromHandle(ret_prop, handle)
                                      : result;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
        IN_CALL;

        return outside_release(handle);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *ret_handle, void *pointer)
{
        struct bfc_block_info info;
        CUresult result;
        IN_CALL;

        /* As of memory of cuMemAlloc(). The handle would be that of the extent, which begins elsewhere. */
        if (broker_find_block((CUdeviceptr)(uintptr_t)pointer, &info))
                return CUDA_ERROR_INVALID_VALUE;
        result = real_cuMemRetainAllocationHandle(ret_handle, pointer);
        if (result == CUDA_SUCCESS)
                result = lent_retained(ret_handle);
        if (result == CUDA_SUCCESS)
                outside_retain(*ret_handle);
        return result;
}

CUresult cuMemMap(CUdeviceptr pointer, size_t n_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
        CUmemGenericAllocationHandle found = handle;
        IN_CALL;
        CUresult result = lent_find_handle(&found);

        if (result == CUDA_SUCCESS)
                result = real_cuMemMap(pointer, n_bytes, offset, found, flags);
        if (result == CUDA_SUCCESS)
                outside_mapped(handle, pointer);
        return result;
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t n_bytes)
{
        IN_CALL;

        return outside_unmap(pointer, n_bytes);
}

/* The driver exports nothing that was imported. */
CUresult cuMemExportToShareableHandle(void *ret_os_handle, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags)
{
        IN_CALL;
        int lent = lent_export(handle, type, flags, ret_os_handle);

        return lent != LENT_NOT ? (CUresult)lent
                                : real_cuMemExportToShareableHandle(ret_os_handle, handle, type, flags);
}

/* ---- arrays --------------------------------------------------------------------- */

/* Of an element in one channel, by CUarray_format. Planar formats take less. */
static size_t format_bytes(unsigned int format)
{
        switch (format) {
        case 0x01: /* integers */
        case 0x08:
        case 0xc0 ... 0xc2: /* normalized ones */
        case 0xc6 ... 0xc8:
        case 0x50: /* three of 10 bits, and one of 2 */
        case 0xa9:
        case 0x51 ... 0x53: /* YUV, planar or not */
        case 0x55:
        case 0x57:
        case 0x59:
        case 0x5b:
        case 0x5d:
        case 0xa2:
        case 0xa5:
        case 0xa8:
        case 0xb0:
        case 0xb2:
        case 0xb4:
                return 1;
        case 0x02: /* integers */
        case 0x09:
        case 0x10:          /* halves */
        case 0xc3 ... 0xc5: /* normalized ones */
        case 0xc9 ... 0xcb:
        case 0x54: /* YUV */
        case 0x56:
        case 0x58:
        case 0x5a:
        case 0x5c:
        case 0x5e:
        case 0x9f:
        case 0xa1:
        case 0xa3 ... 0xa4:
        case 0xa6 ... 0xa7:
        case 0xb1:
        case 0xb3:
        case 0xb5:
                return 2;
        default: /* CU_AD_FORMAT_FLOAT and integers, or one that is not known here */
                return 4;
        }
}

/* Of 4 by 4 elements in all channels. 0: it is not compressed. */
static size_t compressed_bytes(unsigned int format)
{
        switch (format) {
        case 0x91 ... 0x92: /* BC1 */
        case 0x97 ... 0x98: /* BC4 */
                return 8;
        case 0x93 ... 0x96: /* BC2, BC3 */
        case 0x99 ... 0x9e: /* BC5, BC6H, BC7 */
                return 16;
        default:
                return 0;
        }
}

#define ROW_BYTES ((size_t)64) /* rows are in units of that, and 8 at a time */
#define ROWS      ((size_t)8)

enum { LAYERED = 0x1, CUBEMAP = 0x4, SPARSE = 0x40, DEFERRED = 0x80 }; /* CUDA_ARRAY3D_... */

static size_t multiple_of(size_t n, size_t unit)
{
        return n > SIZE_MAX - unit ? SIZE_MAX : (n + unit - 1) / unit * unit;
}

static size_t halved(size_t n, unsigned int level)
{
        return n >> level > 0 ? n >> level : 1;
}

static size_t quarter(size_t n)
{
        return n / 4 + (n % 4 > 0);
}

static bool level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int level, size_t *ret)
{
        size_t n_compressed = compressed_bytes((unsigned int)what->Format);
        size_t n = n_compressed > 0 ? n_compressed : format_bytes((unsigned int)what->Format);
        size_t width = halved(what->Width, level), height = halved(what->Height, level);

        if (n_compressed > 0) {
                width = quarter(width);
                height = quarter(height);
        }
        return !__builtin_mul_overflow(n, n_compressed > 0 ? 1 : (size_t)what->NumChannels, &n) &&
               !__builtin_mul_overflow(n, width, &n) &&
               !__builtin_mul_overflow(multiple_of(n, ROW_BYTES), multiple_of(height, ROWS), &n) &&
               !__builtin_mul_overflow(n, halved(what->Depth, what->Flags & (LAYERED | CUBEMAP) ? 0 : level),
                                       ret);
}

/* What the driver takes for it, which it does not say, and at least. Sparse and deferred ones have no memory of their own. */
static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *what, unsigned int n_levels)
{
        size_t sum = 0, n;

        if (what->Flags & (SPARSE | DEFERRED))
                return 0;
        for (unsigned int level = 0; level < n_levels && level < 32; level++)
                if (!level_bytes(what, level, &n) || __builtin_add_overflow(sum, n, &sum))
                        return SIZE_MAX;
        return outside_whole(sum);
}

static CUresult begin_array(struct outside *o, const char *function, const CUDA_ARRAY3D_DESCRIPTOR *what,
                            unsigned int n_levels)
{
        CUresult result;

        *o = (struct outside){ .n_bytes = array_bytes(what, n_levels), .function = function };
        result = broker_current_gpu(&o->gpu);
        return result == CUDA_SUCCESS ? outside_begin(o) : result;
}

CUresult cuArrayCreate_v2(CUarray *ret_array, const CUDA_ARRAY_DESCRIPTOR *what)
{
        struct outside o;
        IN_CALL;
        CUresult result;

        if (!ret_array || !what)
                return CUDA_ERROR_INVALID_VALUE;
        result = begin_array(&o, "cuArrayCreate",
                             &(CUDA_ARRAY3D_DESCRIPTOR){ .Width = what->Width,
                                                         .Height = what->Height,
                                                         .Format = what->Format,
                                                         .NumChannels = what->NumChannels },
                             1);
        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuArrayCreate_v2(ret_array, what);
        return outside_end(&o, result, OUTSIDE_ARRAY, (uintptr_t)*ret_array);
}

CUresult cuArray3DCreate_v2(CUarray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what)
{
        struct outside o;
        IN_CALL;
        CUresult result;

        if (!ret_array || !what)
                return CUDA_ERROR_INVALID_VALUE;
        result = begin_array(&o, "cuArray3DCreate", what, 1);
        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuArray3DCreate_v2(ret_array, what);
        return outside_end(&o, result, OUTSIDE_ARRAY, (uintptr_t)*ret_array);
}

CUresult cuArrayDestroy(CUarray array)
{
        IN_CALL;
        struct outside_entry *entry = outside_take(OUTSIDE_ARRAY, (uintptr_t)array);

        return outside_took(entry, real_cuArrayDestroy(array));
}

CUresult cuMipmappedArrayCreate(CUmipmappedArray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *what,
                                unsigned int n_levels)
{
        struct outside o;
        IN_CALL;
        CUresult result;

        if (!ret_array || !what)
                return CUDA_ERROR_INVALID_VALUE;
        result = begin_array(&o, "cuMipmappedArrayCreate", what, n_levels);
        if (result != CUDA_SUCCESS)
                return result;
        result = real_cuMipmappedArrayCreate(ret_array, what, n_levels);
        return outside_end(&o, result, OUTSIDE_MIPMAPPED, (uintptr_t)*ret_array);
}

CUresult cuMipmappedArrayDestroy(CUmipmappedArray array)
{
        IN_CALL;
        struct outside_entry *entry = outside_take(OUTSIDE_MIPMAPPED, (uintptr_t)array);

        return outside_took(entry, real_cuMipmappedArrayDestroy(array));
}
