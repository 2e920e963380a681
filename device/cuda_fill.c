/* Filling memory of a GPU; see cuda_fill.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_fill.h"

/* ---- addresses ----------------------------------------------------------- */

/* Tried again without the context, which may be broken: a remaining mapping keeps memory that is charged to no tenant.
 * The context is on the stack twice where an earlier pop has failed. */
static int unmap_one(const struct cuda_driver *cu, CUdeviceptr at, uint64_t n_bytes)
{
        int r = cuda_driver_owner_errno(cu->cuMemUnmap(at, n_bytes));
        CUcontext context;
        unsigned n = 0;

        if (r == 0)
                return 0;
        while (n < 2 && cu->cuCtxPopCurrent_v2(&context) == CUDA_SUCCESS)
                n++;
        r = cuda_driver_owner_errno(cu->cuMemUnmap(at, n_bytes));
        while (n-- > 0)
                cu->cuCtxPushCurrent_v2(context);
        return r;
}

/* The first n_mapped of them. */
static int unmap_some(const struct cuda_driver *cu, CUdeviceptr at, const struct device_extent *extents,
                      size_t n_mapped)
{
        int r = 0;

        for (size_t i = 0; i < n_mapped; i++) {
                int r_one = unmap_one(cu, at, extents[i].n_bytes);

                r = r < 0 ? r : r_one;
                at += extents[i].n_bytes;
        }
        return r;
}

int cuda_fill_unmap(const struct cuda_context *c, CUdeviceptr at, const struct device_extent *extents,
                    size_t n)
{
        int r = unmap_some(c->cu, at, extents, n);

        c->cu->cuMemAddressFree(at, device_extents_bytes(extents, n));
        return r;
}

int cuda_fill_map(const struct cuda_context *c, const struct device_extent *extents, size_t n,
                  CUdeviceptr *ret)
{
        const CUmemAccessDesc access = { .location = { CU_MEM_LOCATION_TYPE_DEVICE, c->device },
                                         .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        const struct cuda_driver *cu = c->cu;
        uint64_t all_bytes = device_extents_bytes(extents, n), done_bytes = 0;
        CUdeviceptr at;
        size_t n_mapped = 0;
        int r = cuda_driver_owner_errno(cu->cuMemAddressReserve(&at, all_bytes, 0, 0, 0));

        if (r < 0)
                return r;
        while (r == 0 && n_mapped < n) {
                const struct device_extent *e = &extents[n_mapped];

                r = cuda_driver_owner_errno(cu->cuMemMap(at + done_bytes, e->n_bytes, 0, e->native, 0));
                done_bytes += e->n_bytes;
                n_mapped += r == 0;
        }
        if (r == 0)
                r = cuda_driver_owner_errno(cu->cuMemSetAccess(at, all_bytes, &access, 1));
        if (r < 0) {
                (void)unmap_some(cu, at, extents, n_mapped);
                cu->cuMemAddressFree(at, all_bytes);
                return r;
        }
        *ret = at;
        return 0;
}

/* ---- filling ------------------------------------------------------------- */

static int fill_open(struct cuda_fill *f, const struct cuda_driver *cu)
{
        int least, greatest, r;

        if (f->stream)
                return 0;
        r = cuda_driver_owner_errno(cu->cuCtxGetStreamPriorityRange(&least, &greatest));
        if (r < 0)
                return r;
        return cuda_driver_owner_errno(
                cu->cuStreamCreateWithPriority(&f->stream, CU_STREAM_NON_BLOCKING, greatest));
}

void cuda_fill_close(struct cuda_fill *f, const struct cuda_context *c)
{
        if (f->stream)
                c->cu->cuStreamDestroy_v2(f->stream);
        f->stream = NULL;
}

int cuda_fill_at(struct cuda_fill *f, const struct cuda_context *c, CUdeviceptr at, uint64_t n_bytes)
{
        int r = fill_open(f, c->cu);

        if (r == 0)
                r = cuda_driver_owner_errno(c->cu->cuMemsetD8Async(at, 0, n_bytes, f->stream));
        return r < 0 ? r : cuda_driver_owner_errno(c->cu->cuStreamSynchronize(f->stream));
}

int cuda_fill(struct cuda_fill *f, const struct cuda_context *c, const struct device_extent *extents,
              size_t n)
{
        CUdeviceptr at;
        int r = cuda_fill_map(c, extents, n, &at), r_unmap;

        if (r < 0)
                return r;
        r = cuda_fill_at(f, c, at, device_extents_bytes(extents, n));
        r_unmap = cuda_fill_unmap(c, at, extents, n);
        return r < 0 ? r : r_unmap;
}
