/* The daemon's side of a CUDA device: see device.h, and docs/cuda.md for the assumptions about drivers.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An extent is a separate allocation in both share modes, because a handle or an fd opens a whole
 * allocation. New memory of a driver has arbitrary contents, so it is zeroed before another process can
 * open it.
 *
 * The driver does not report who still has an extent mapped. It reports the free bytes of the device, so
 * destroy() compares them before and after, and memory that does not become free is unreclaimed. Other
 * processes allocate and free memory at the same time, mostly by their contexts; cuda_return.c says
 * what still counts as evidence. A check without success is repeated for a while, since memory may return
 * late. All tenants of the device wait meanwhile, so the time is bounded.
 *
 * Only one call at a time is made, because calls would disturb each other's check. A device that was lost
 * stays lost, and is not called. An error that breaks the context of this process
 * alone loses nothing but that context: the next call makes another one. Memory of legacy handles would end with it,
 * so while there is some the broken one stays, and calls fail.
 *
 * A device is opened again by another process (keeper/remote.h): what a lost device or a broken context did not release
 * ends with this one.
 *
 * Invariant: the primary context is retained while the device exists, and no call leaves it current, or
 * anything mapped. */
#include "device/device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/cuda_copy.h"
#include "device/cuda_driver.h"
#include "device/cuda_fill.h"
#include "device/cuda_open.h"
#include "device/cuda_pin.h"
#include "device/cuda_return.h"

#define PIECE    (UINT64_C(2) << 20) /* the unit in which a driver allocates legacy memory */
#define N_SHARES 2

/* Many fields: the device that others see is inside, and one part for each thing that a driver does. */
struct cuda_device {
        struct device device; /* first: a device is cast to it */
        struct cuda_context context;
        struct device_facts facts; /* without those that change */
        uint64_t granularity;
        bool shares_fds, shares_rdma;
        bool shows_returns[N_SHARES]; /* as seen at the opening: released memory is free at once */
        bool is_lost;
        bool is_broken; /* the context */
        struct cuda_wait_budget wait_budget;
        struct cuda_fill fill;     /* under one_call, as the next */
        struct cuda_copier copier; /* opened by the first copy */
        struct cuda_pinner pinner; /* of host extents that are copied to and from */
        uint64_t live_bytes;       /* in extents; under one_call */
        uint64_t handle_bytes;     /* of these, with legacy handles */
        pthread_mutex_t one_call;
};

/* ---- calls --------------------------------------------------------------- */

static int note_error(struct cuda_device *d, int r)
{
        if (r == -ENODEV)
                __atomic_store_n(&d->is_lost, true, __ATOMIC_RELAXED);
        if (r == -ENOTRECOVERABLE)
                d->is_broken = true;
        return r;
}

static int note(struct cuda_device *d, CUresult result)
{
        return note_error(d, cuda_driver_owner_errno(result));
}

static void leave(struct cuda_device *d)
{
        cuda_context_leave(&d->context);
}

/* Before the context is closed. */
static void close_streams(struct cuda_device *d)
{
        bool is_entered = (d->copier.cu || d->fill.stream) && cuda_context_enter(&d->context) == 0;

        cuda_pins_drop(&d->pinner, is_entered);
        cuda_copier_close(&d->copier, is_entered);
        if (is_entered)
                cuda_fill_close(&d->fill, &d->context);
        d->fill = (struct cuda_fill){ 0 };
        if (is_entered)
                leave(d);
}

/* Another context in the place of the broken one. If there is none the next call tries again. */
static int renew(struct cuda_device *d)
{
        const struct cuda_context was = d->context;
        int r;

        if (d->handle_bytes > 0)
                return -ENOTRECOVERABLE;
        close_streams(d);
        cuda_context_close(&d->context);
        d->context = (struct cuda_context){ .cu = was.cu, .device = was.device };
        r = note(d, cuda_context_open(was.cu, was.device, &d->context));
        d->is_broken = r < 0;
        return r < 0 && r != -ENODEV ? -ENOTRECOVERABLE : r;
}

/* one_call is held, except while the device is opened. */
static int enter(struct cuda_device *d)
{
        int r = 0;

        if (__atomic_load_n(&d->is_lost, __ATOMIC_RELAXED))
                return -ENODEV;
        if (d->is_broken)
                r = renew(d);
        return r < 0 ? r : note_error(d, cuda_context_enter(&d->context));
}

static int cuda_bytes(struct cuda_device *d, uint64_t *ret_free, uint64_t *ret_total)
{
        size_t n_free, n_total;
        int r = note(d, d->context.cu->cuMemGetInfo_v2(&n_free, &n_total));

        if (r < 0)
                return r;
        *ret_free = n_free;
        *ret_total = n_total;
        return 0;
}

/* ---- releasing ----------------------------------------------------------- */

static int give_back_once(struct cuda_device *d, const struct device_extent *e)
{
        const struct cuda_driver *cu = d->context.cu;

        return note(d,
                    e->share == DEVICE_SHARE_FD ? cu->cuMemRelease(e->native) : cu->cuMemFree_v2(e->native));
}

/* Tried twice: memory that is not released now never is. Memory that cannot be cleared is released
 * nevertheless: this daemon gives it to no other tenant. */
static int give_back(struct cuda_device *d, struct device_extent *e)
{
        int r;

        if (e->clears && e->share == DEVICE_SHARE_FD)
                (void)note_error(d, cuda_fill(&d->fill, &d->context, e, 1));
        else if (e->clears)
                (void)note_error(d, cuda_fill_at(&d->fill, &d->context, e->native, e->n_bytes));
        if (e->fd >= 0)
                close(e->fd);
        e->fd = -1;
        r = give_back_once(d, e);
        return r < 0 && r != -ENODEV ? give_back_once(d, e) : r;
}

/* ---- making -------------------------------------------------------------- */

/* The handle opens exactly this memory, without a neighbour's? */
static int check_whole(struct cuda_device *d, CUdeviceptr at, uint64_t n_bytes)
{
        CUdeviceptr base;
        size_t n_whole;
        int r = note(d, d->context.cu->cuMemGetAddressRange_v2(&base, &n_whole, at));

        if (r < 0)
                return r;
        return base == at && n_whole == n_bytes ? 0 : -ENOTSUP;
}

static int make_ipc(struct cuda_device *d, uint64_t n_bytes, struct device_extent *ret)
{
        struct device_extent e = { .fd = -1, .share = DEVICE_SHARE_CUDA_IPC, .n_bytes = n_bytes };
        const struct cuda_driver *cu = d->context.cu;
        CUipcMemHandle handle;
        CUdeviceptr at;
        int r;

        r = note(d, cu->cuMemAlloc_v2(&at, n_bytes));
        if (r < 0)
                return r;
        r = check_whole(d, at, n_bytes);
        if (r == 0)
                r = note_error(d, cuda_fill_at(&d->fill, &d->context, at, n_bytes));
        if (r == 0)
                r = note(d, cu->cuIpcGetMemHandle(&handle, at));
        e.native = at;
        if (r < 0) {
                (void)give_back(d, &e);
                return r;
        }
        _Static_assert(sizeof(handle) == sizeof(e.handle), "a handle fits");
        memcpy(e.handle, &handle, sizeof(handle));
        *ret = e;
        return 0;
}

static CUmemAllocationProp fd_prop(const struct cuda_device *d)
{
        CUmemAllocationProp prop;

        memset(&prop, 0, sizeof(prop)); /* the padding too: the driver sees it */
        prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        prop.location.id = d->context.device;
        prop.allocFlags.gpuDirectRDMACapable = d->shares_rdma;
        return prop;
}

static int export_fd(struct cuda_device *d, CUmemGenericAllocationHandle handle, int *ret)
{
        CUresult result;
        int fd = -1, r;

        result = d->context.cu->cuMemExportToShareableHandle(&fd, handle,
                                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result == CUDA_ERROR_OPERATING_SYSTEM)
                return -EMFILE; /* the driver would need a further fd */
        r = note(d, result);
        if (r < 0)
                return r;
        if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
                return -EIO; /* no fd came */
        *ret = fd;
        return 0;
}

static int create(struct cuda_device *d, struct device_extent *e)
{
        const CUmemAllocationProp prop = fd_prop(d);
        CUmemGenericAllocationHandle handle;
        int r = note(d, d->context.cu->cuMemCreate(&handle, e->n_bytes, &prop, 0));

        if (r == 0)
                *e = (struct device_extent){
                        .fd = -1, .share = DEVICE_SHARE_FD, .n_bytes = e->n_bytes, .native = handle
                };
        return r;
}

/* The first *ret_n_made are made, also after a failure. */
static int make_all(struct cuda_device *d, enum device_share share, struct device_extent *extents, size_t n,
                    size_t *ret_n_made)
{
        int r = 0;

        while (r == 0 && *ret_n_made < n) {
                struct device_extent *e = &extents[*ret_n_made];

                r = share == DEVICE_SHARE_FD ? create(d, e) : make_ipc(d, e->n_bytes, e);
                *ret_n_made += r == 0;
        }
        if (r < 0 || share != DEVICE_SHARE_FD)
                return r;
        r = note_error(d, cuda_fill(&d->fill, &d->context, extents, n));
        for (size_t i = 0; r == 0 && i < n; i++)
                r = export_fd(d, extents[i].native, &extents[i].fd);
        return r;
}

static int cuda_make_locked(struct cuda_device *d, enum device_share share, struct device_extent *extents,
                            size_t n)
{
        size_t n_made = 0;
        int r = enter(d);

        if (r < 0)
                return r;
        r = make_all(d, share, extents, n, &n_made);
        while (r < 0 && n_made > 0) {
                struct device_extent *e = &extents[--n_made];

                (void)give_back(d, e);
        }
        leave(d);
        return r;
}

static int cuda_make(struct device *device, const struct device_supply *supply, enum device_share share,
                     struct device_extent *extents, size_t n)
{
        struct cuda_device *d = (struct cuda_device *)device;
        int r;

        (void)supply;
        if (n == 0 || n > DEVICE_MAKES)
                return -EINVAL;
        for (size_t i = 0; i < n; i++)
                if (extents[i].n_bytes == 0 || extents[i].n_bytes % d->granularity != 0 ||
                    extents[i].n_bytes > SIZE_MAX / 2 / DEVICE_MAKES)
                        return -EINVAL;
        if (share == DEVICE_SHARE_FD ? !d->shares_fds : share != DEVICE_SHARE_CUDA_IPC)
                return -ENOTSUP;
        pthread_mutex_lock(&d->one_call);
        r = cuda_make_locked(d, share, extents, n);
        if (r == -ENOTRECOVERABLE) /* in another context */
                r = cuda_make_locked(d, share, extents, n);
        d->live_bytes += r == 0 ? device_extents_bytes(extents, n) : 0;
        d->handle_bytes += r == 0 && share == DEVICE_SHARE_CUDA_IPC ? device_extents_bytes(extents, n) : 0;
        pthread_mutex_unlock(&d->one_call);
        return r;
}

/* ---- destroying ---------------------------------------------------------- */

static int look(void *device, uint64_t *ret_free)
{
        uint64_t n_total;

        return cuda_bytes(device, ret_free, &n_total);
}

static int cuda_destroy_locked(struct cuda_device *d, struct device_extent *e)
{
        bool looks = d->shows_returns[e->share] && !__atomic_load_n(&d->device.is_ending, __ATOMIC_RELAXED);
        uint64_t n_free = 0, n_total = 0;
        int r = enter(d), r_look;

        if (r < 0 && r != -ENODEV)
                r = enter(d);
        if (r < 0)
                return r;
        r_look = cuda_bytes(d, &n_free, &n_total);
        if (r_look == -ENOTRECOVERABLE) {
                leave(d);
                r = enter(d); /* another context */
                if (r < 0)
                        return r;
        }
        if (r_look < 0 && r_look != -ENODEV)
                r_look = cuda_bytes(d, &n_free, &n_total);
        r = r_look == -ENODEV || r_look == -ENOTRECOVERABLE ? r_look : give_back(d, e);
        if (r == 0)
                r = r_look;
        if (r == 0 && looks)
                r = cuda_wait_for_return(&d->wait_budget, look, d, n_free, e->n_bytes);
        leave(d);
        return r;
}

static int cuda_destroy(struct device *device, struct device_extent *e)
{
        struct cuda_device *d = (struct cuda_device *)device;
        int r;

        if (e->n_bytes == 0)
                return 0;
        pthread_mutex_lock(&d->one_call);
        r = cuda_destroy_locked(d, e);
        d->live_bytes -= e->n_bytes;
        d->handle_bytes -= e->share == DEVICE_SHARE_CUDA_IPC ? e->n_bytes : 0;
        pthread_mutex_unlock(&d->one_call);
        if (e->fd >= 0)
                close(e->fd);
        *e = DEVICE_EXTENT_EMPTY;
        return r;
}

/* ---- copying ------------------------------------------------------------- */

/* An extent stays mapped until all copies are done, so that the device works while the next one is mapped. */
static int copy_entered(struct cuda_device *d, const struct device_copy *copies, size_t n)
{
        const struct device_extent *mapped[DEVICE_COPIES];
        CUdeviceptr at[DEVICE_COPIES];
        size_t n_mapped = 0;
        int r = 0, r_unmap;

        for (size_t i = 0; r == 0 && i < n; i++) {
                const struct device_extent *e = copies[i].extent;

                if (n_mapped == 0 || mapped[n_mapped - 1]->native != e->native) {
                        r = note_error(d, cuda_fill_map(&d->context, e, 1, &at[n_mapped]));
                        if (r < 0)
                                break;
                        mapped[n_mapped++] = e;
                }
                r = cuda_copy_begin(&d->copier, &d->pinner, at[n_mapped - 1], &copies[i]);
        }
        r = cuda_copy_finish(&d->copier, r);
        while (n_mapped-- > 0) {
                r_unmap = note_error(d, cuda_fill_unmap(&d->context, at[n_mapped], mapped[n_mapped], 1));
                r = r < 0 ? r : r_unmap;
        }
        return r;
}

static int cuda_copy_locked(struct cuda_device *d, const struct device_copy *copies, size_t n)
{
        int r = enter(d);

        if (r < 0)
                return r;
        r = cuda_copier_open(&d->copier, d->context.cu);
        if (r == 0)
                r = copy_entered(d, copies, n);
        leave(d);
        return note_error(d, r);
}

static int cuda_copy(struct device *device, const struct device_copy *copies, size_t n)
{
        struct cuda_device *d = (struct cuda_device *)device;
        int r;

        pthread_mutex_lock(&d->one_call);
        r = cuda_copy_locked(d, copies, n);
        if (r == -ENOTRECOVERABLE) /* in another context */
                r = cuda_copy_locked(d, copies, n);
        pthread_mutex_unlock(&d->one_call);
        return r;
}

/* ---- the rest ------------------------------------------------------------ */

static uint64_t cuda_granularity(const struct device *device)
{
        return ((const struct cuda_device *)device)->granularity;
}

static int cuda_facts(struct device *device, struct device_facts *ret)
{
        struct cuda_device *d = (struct cuda_device *)device;
        struct device_facts facts = d->facts;
        int r;

        pthread_mutex_lock(&d->one_call);
        r = enter(d);
        if (r == 0) {
                r = cuda_bytes(d, &facts.bytes_free, &facts.bytes_total);
                leave(d);
        }
        pthread_mutex_unlock(&d->one_call);
        if (r == 0)
                *ret = facts;
        return r;
}

/* An upper bound: memory that is not known to be an extent's counts. */
static int cuda_foreign_bytes(struct device *device, uint64_t *ret_bytes)
{
        struct cuda_device *d = (struct cuda_device *)device;
        uint64_t n_free, n_total;
        int r;

        pthread_mutex_lock(&d->one_call);
        r = enter(d);
        if (r == 0) {
                r = cuda_bytes(d, &n_free, &n_total);
                leave(d);
        }
        if (r == 0 && n_total - n_free < d->live_bytes)
                r = -EIO; /* such values prove nothing */
        if (r == 0)
                *ret_bytes = n_total - n_free - d->live_bytes;
        pthread_mutex_unlock(&d->one_call);
        return r;
}

static struct device *cuda_free(struct device *device)
{
        struct cuda_device *d = (struct cuda_device *)device;

        close_streams(d);
        cuda_context_close(&d->context);
        pthread_mutex_destroy(&d->one_call);
        free(d);
        return NULL;
}

static const struct device_ops cuda_ops = {
        .name = "cuda",
        .free = cuda_free,
        .granularity = cuda_granularity,
        .make = cuda_make,
        .destroy = cuda_destroy,
        .copy = cuda_copy,
        .facts = cuda_facts,
        .others = cuda_foreign_bytes,
};

/* Is released memory free at once? If not, destroy() cannot detect unreclaimed memory, and does not try.
 * A device without memory for the test is assumed to be correct. One that claims RDMA support but fails
 * works without it. */
static int try_share(struct cuda_device *d, enum device_share share)
{
        struct device_extent e;
        int r;

        for (int i = 0; i < 3; i++) { /* others may disturb the check */
                d->wait_budget = cuda_wait_budget_new();
                e = (struct device_extent){ .fd = -1, .n_bytes = d->granularity };
                r = cuda_make(&d->device, NULL, share, &e, 1);
                if (r == -ENOMEM)
                        return 0;
                if (r < 0 && r != -ENODEV && share == DEVICE_SHARE_FD && d->shares_rdma) {
                        d->shares_rdma = false;
                        continue;
                }
                if (r == -ENOTSUP)
                        d->facts.shares[share] = false;
                if (r < 0)
                        return r == -ENOTSUP ? 0 : r;
                r = cuda_destroy(&d->device, &e);
                if (r != -EBUSY)
                        return r;
        }
        d->shows_returns[share] = false;
        d->wait_budget.gave_up = false;
        return 0;
}

/* Tried twice: one failed query is not conclusive. */
static int attribute(const struct cuda_device *d, CUdevice_attribute which)
{
        int value;

        for (int i = 0; i < 2; i++)
                if (d->context.cu->cuDeviceGetAttribute(&value, which, d->context.device) == CUDA_SUCCESS)
                        return value;
        return 0;
}

static int learn(struct cuda_device *d)
{
        const struct cuda_driver *cu = d->context.cu;
        CUmemAllocationProp prop;
        size_t granularity;
        CUuuid uuid;
        int r;

        r = note(d, cu->cuDeviceGetName(d->facts.name, (int)sizeof(d->facts.name), d->context.device));
        if (r == 0)
                r = note(d, cu->cuDeviceGetUuid_v2(&uuid, d->context.device));
        if (r < 0)
                return r;
        memcpy(d->facts.uuid, uuid.bytes, sizeof(d->facts.uuid));
        d->shares_fds = attribute(d, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) > 0 &&
                        attribute(d, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) > 0;
        d->shares_rdma = attribute(d, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) > 0;
        d->facts.shares[DEVICE_SHARE_CUDA_IPC] = true;
        d->facts.shares[DEVICE_SHARE_FD] = d->shares_fds;
        d->granularity = PIECE;
        if (!d->shares_fds)
                return 0;
        prop = fd_prop(d);
        r = note(d, cu->cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        if (r == 0 && granularity > d->granularity) /* both are powers of two */
                d->granularity = granularity;
        return r;
}

static int start(struct cuda_device *d)
{
        int r = enter(d);

        if (r == 0) {
                r = learn(d);
                leave(d);
        }
        if (r == 0)
                r = try_share(d, DEVICE_SHARE_CUDA_IPC);
        return r == 0 && d->shares_fds ? try_share(d, DEVICE_SHARE_FD) : r;
}

int device_cuda_new(const char *id, struct device **ret, char *ret_sentence, size_t n_sentence)
{
        struct cuda_device *d = calloc(1, sizeof(*d));
        int r;

        if (!d) {
                snprintf(ret_sentence, n_sentence, "%s: out of memory", id);
                return -ENOMEM;
        }
        *d = (struct cuda_device){ .device = { .ops = &cuda_ops, .is_cuda = true },
                                   .shows_returns = { true, true } };
        r = cuda_open(id, &d->context, ret_sentence, n_sentence);
        if (r < 0) {
                free(d);
                return r;
        }
        pthread_mutex_init(&d->one_call, NULL);
        cuda_pinner_init(&d->pinner, &d->context, &d->one_call);
        r = start(d);
        if (r < 0) {
                snprintf(ret_sentence, n_sentence, "%s: the device cannot be used: %s", id, strerror(-r));
                cuda_free(&d->device);
                return r;
        }
        *ret = &d->device;
        return 0;
}
