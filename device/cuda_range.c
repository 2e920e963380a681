/* The client's side of a CUDA device; see device.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Extents that are shared by fd are mapped side by side into addresses that were reserved once, so blocks
 * of a region stay contiguous when it grows. A legacy handle opens at an address of the driver's choice:
 * such a range is one extent.
 *
 * The caller is a program with its own streams, one of which may be being captured into a graph. Our
 * calls could invalidate a capture, so the thread is in relaxed mode during them: none of them involves a
 * stream. Waiting for a context invalidates captures in any mode. So only finish() waits, and nothing
 * that maps or unmaps: the caller ensures that no work uses what is unmapped.
 *
 * Invariant: the list has exactly the mappings, all inside the range, without overlaps. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device/backend.h"
#include "device/cuda_driver.h"

#define PIECE     (UINT64_C(2) << 20)
#define MAX_PEERS 31

struct mapping {
        struct mapping *next;
        uint64_t offset, n_bytes;
        bool is_read_only;
};

struct cuda_range {
        struct device_range range; /* first: a range is cast to it */
        struct cuda_context context;
        enum device_share share;
        CUdeviceptr base; /* 0: nothing opened yet */
        uint64_t n_bytes;
        struct mapping *mappings;
        CUdevice peers[MAX_PEERS]; /* that reach this device; constant */
        size_t n_peers;
        CUmemAccessDesc access[MAX_PEERS + 1]; /* this device, then the peers that were given access */
        size_t n_access;
        bool stays; /* mappings stay until the process ends */
};

/* ---- calls --------------------------------------------------------------- */

/* -EBUSY: work of this process may still run there. */
static int finish_peer(const struct cuda_driver *cu, CUdevice device)
{
        struct cuda_context peer;
        unsigned int flags;
        int is_active = 1;
        CUresult result = cu->cuDevicePrimaryCtxGetState(device, &flags, &is_active);

        if (result == CUDA_SUCCESS && !is_active)
                return 0;
        result = cuda_context_open(cu, device, &peer);
        if (result == CUDA_SUCCESS) {
                if (cuda_context_enter(&peer) == 0) { /* else it was reset, with its work */
                        result = cuda_context_wait(cu);
                        cuda_context_leave(&peer);
                }
                cuda_context_close(&peer);
        }
        return result == CUDA_SUCCESS || cuda_driver_broke_context(result) ||
                               cuda_driver_errno(result) == -ENODEV
                       ? 0 /* none of its work continues */
                       : -EBUSY;
}

/* Work with the memory may be queued on any device that reaches it: copies between devices need no access. */
static int finish_entered(const struct cuda_range *c)
{
        const struct cuda_driver *cu = c->context.cu;
        CUresult result = cuda_context_wait(cu);
        int r = cuda_driver_broke_context(result) ? -EIO : cuda_driver_errno(result);

        for (size_t i = 0; i < c->n_peers && r != -EBUSY; i++)
                if (finish_peer(cu, c->peers[i]) < 0)
                        r = -EBUSY;
        return r;
}

/* ---- mapping fds --------------------------------------------------------- */

static bool range_has(const struct cuda_range *c, uint64_t offset, uint64_t n_bytes)
{
        return n_bytes > 0 && offset <= c->n_bytes && n_bytes <= c->n_bytes - offset && offset % PIECE == 0 &&
               n_bytes % PIECE == 0;
}

/* A reset of the context has ended it. */
static bool is_gone(const struct cuda_range *c, const struct mapping *m)
{
        CUdeviceptr base;
        size_t n_bytes;
        CUresult result = c->context.cu->cuMemGetAddressRange_v2(&base, &n_bytes, c->base + m->offset);

        return result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_VALUE;
}

static int unmap_at(struct cuda_range *c, struct mapping **at)
{
        struct mapping *m = *at;
        const struct cuda_driver *cu = c->context.cu;
        CUresult result = c->share == DEVICE_SHARE_FD ? cu->cuMemUnmap(c->base + m->offset, m->n_bytes)
                                                      : cu->cuIpcCloseMemHandle(c->base);

        if (result == CUDA_ERROR_INVALID_VALUE && is_gone(c, m))
                result = CUDA_SUCCESS;
        if (result != CUDA_SUCCESS) /* a broken context has it mapped until the process ends */
                return cuda_driver_broke_context(result) ? -EIO : cuda_driver_errno(result);
        if (c->share == DEVICE_SHARE_CUDA_IPC)
                c->base = 0;
        *at = m->next;
        free(m);
        return 0;
}

static bool overlaps(const struct mapping *m, uint64_t offset, uint64_t n_bytes)
{
        return m->offset < offset + n_bytes && offset < m->offset + m->n_bytes;
}

/* Old extents at this place are unmapped as a whole: the daemon has released them. */
static int clear_way(struct cuda_range *c, uint64_t offset, uint64_t n_bytes)
{
        int r = 0;

        for (struct mapping **at = &c->mappings; *at && r == 0;) {
                if (overlaps(*at, offset, n_bytes))
                        r = unmap_at(c, at);
                else
                        at = &(*at)->next;
        }
        return r;
}

/* Of some devices to a mapping. */
static CUresult set_access(const struct cuda_range *c, const struct mapping *m, const CUmemAccessDesc *which,
                           size_t n)
{
        CUmemAccessDesc access[MAX_PEERS + 1];

        memcpy(access, which, n * sizeof(access[0]));
        for (size_t i = 0; m->is_read_only && i < n; i++)
                access[i].flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
        return c->context.cu->cuMemSetAccess(c->base + m->offset, m->n_bytes, access, n);
}

/* Drivers document few of the errors for memory that a process may not open. So an error that does not
 * concern the process's memory or the device counts as a refusal. 999 is also returned by a lost device,
 * for every call. */
static int open_errno(const struct cuda_driver *cu, CUresult result)
{
        size_t n_free, n_total;

        if (result == CUDA_ERROR_UNKNOWN && cu->cuMemGetInfo_v2(&n_free, &n_total) != CUDA_SUCCESS)
                return -ENODEV;
        switch (result) {
        case CUDA_ERROR_INVALID_VALUE:
        case CUDA_ERROR_INVALID_HANDLE:
        case CUDA_ERROR_INVALID_CONTEXT:
        case CUDA_ERROR_INVALID_DEVICE:
        case CUDA_ERROR_MAP_FAILED:
        case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
        case CUDA_ERROR_OPERATING_SYSTEM:
        case CUDA_ERROR_UNKNOWN:
                return -ENOTSUP;
        case CUDA_ERROR_ALREADY_MAPPED:
                return -EBUSY;
        default:
                return cuda_driver_errno(result);
        }
}

/* The mapping keeps the memory: the handle is not needed after it. */
static int map_fd(struct cuda_range *c, const struct mapping *m, const struct device_extent *extent)
{
        const struct cuda_driver *cu = c->context.cu;
        CUdeviceptr at = c->base + m->offset;
        CUmemGenericAllocationHandle handle;
        CUresult result;
        int r;

        result = cu->cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)extent->fd,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS)
                return open_errno(cu, result);
        r = clear_way(c, m->offset, m->n_bytes);
        if (r == 0)
                r = cuda_driver_errno(cu->cuMemMap(at, m->n_bytes, 0, handle, 0));
        if (cu->cuMemRelease(handle) != CUDA_SUCCESS)
                cu->cuMemRelease(handle); /* a remaining handle would keep the memory after unmapping */
        if (r < 0)
                return r;
        result = set_access(c, m, c->access, c->n_access);
        if (result != CUDA_SUCCESS)
                cu->cuMemUnmap(at, m->n_bytes);
        return open_errno(cu, result);
}

/* ---- opening handles ----------------------------------------------------- */

static int map_handle(struct cuda_range *c, const struct device_extent *extent)
{
        const struct cuda_driver *cu = c->context.cu;
        CUdeviceptr at, base;
        CUipcMemHandle handle;
        CUresult result;
        size_t n_whole;
        int r;

        if (extent->n_bytes != c->n_bytes)
                return -EINVAL;
        r = clear_way(c, 0, c->n_bytes);
        if (r < 0)
                return r;
        memcpy(&handle, extent->handle, sizeof(handle));
        result = cu->cuIpcOpenMemHandle_v2(&at, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        if (result != CUDA_SUCCESS)
                return open_errno(cu, result);
        result = cu->cuMemGetAddressRange_v2(&base, &n_whole, at);
        if (result != CUDA_SUCCESS || base != at || n_whole != extent->n_bytes) {
                cu->cuIpcCloseMemHandle(at);
                return result == CUDA_SUCCESS ? -EPROTO : cuda_driver_errno(result);
        }
        c->base = at;
        return 0;
}

static int cuda_range_map(struct device_range *r, uint64_t offset, const struct device_extent *extent)
{
        struct cuda_range *c = (struct cuda_range *)r;
        struct mapping *m;
        struct cuda_mode mode;
        int error;

        if (!range_has(c, offset, extent->n_bytes))
                return -EINVAL;
        if (extent->share != c->share || (c->share == DEVICE_SHARE_FD && extent->fd < 0))
                return -EPROTO;
        m = malloc(sizeof(*m));
        if (!m)
                return -ENOMEM;
        *m = (struct mapping){ NULL, offset, extent->n_bytes, extent->is_read_only };
        error = cuda_context_visit(&c->context, &mode);
        if (error == 0) {
                error = c->share == DEVICE_SHARE_FD ? map_fd(c, m, extent) : map_handle(c, extent);
                cuda_context_depart(&c->context, &mode);
                if (error == -EINVAL) /* the place was correct, so the extent is not */
                        error = -EPROTO;
        }
        if (error < 0) {
                free(m);
                return error;
        }
        m->next = c->mappings;
        c->mappings = m;
        return 0;
}

/* ---- the rest ------------------------------------------------------------ */

static int cuda_range_unmap(struct device_range *r, uint64_t offset, uint64_t n_bytes)
{
        struct cuda_range *c = (struct cuda_range *)r;
        struct mapping **at = &c->mappings;
        struct cuda_mode mode;
        int error;

        while (*at && ((*at)->offset != offset || (*at)->n_bytes != n_bytes))
                at = &(*at)->next;
        if (!*at)
                return -EINVAL;
        error = cuda_context_visit(&c->context, &mode);
        if (error < 0)
                return error;
        error = unmap_at(c, at);
        cuda_context_depart(&c->context, &mode);
        return error;
}

/* True: it is a peer, and has no access yet. */
static bool peer_lacks_access(const struct cuda_range *c, int ordinal, CUmemAccessDesc *ret)
{
        *ret = c->access[0];
        ret->location.id = ordinal;
        for (size_t i = 1; i < c->n_access; i++)
                if (c->access[i].location.id == ordinal)
                        return false;
        return true;
}

static bool has_peer(const struct cuda_range *c, int ordinal)
{
        for (size_t i = 0; i < c->n_peers; i++)
                if (c->peers[i] == ordinal)
                        return true;
        return false;
}

/* A driver gives access to memory that is opened by a handle by itself. */
static int cuda_range_enable_peer(struct device_range *r, int ordinal)
{
        struct cuda_range *c = (struct cuda_range *)r;
        CUresult result = CUDA_SUCCESS;
        CUmemAccessDesc access;
        struct cuda_mode mode;
        int error;

        if (!has_peer(c, ordinal))
                return -ENOTSUP;
        if (c->share != DEVICE_SHARE_FD || !peer_lacks_access(c, ordinal, &access))
                return 0;
        error = cuda_context_visit(&c->context, &mode);
        if (error < 0)
                return error;
        for (const struct mapping *m = c->mappings; m && result == CUDA_SUCCESS; m = m->next)
                result = set_access(c, m, &access, 1);
        if (result == CUDA_SUCCESS)
                c->access[c->n_access++] = access;
        error = open_errno(c->context.cu, result);
        cuda_context_depart(&c->context, &mode);
        return error;
}

/* Uses nothing that map() and unmap() change: another thread may call these. */
static int cuda_range_finish(struct device_range *r)
{
        const struct cuda_range *c = (struct cuda_range *)r;
        struct cuda_mode mode;
        int error;

        error = cuda_context_visit(&c->context, &mode);
        if (error < 0)
                return error;
        error = finish_entered(c);
        cuda_context_depart(&c->context, &mode);
        return error;
}

/* ---- copies -------------------------------------------------------------- */

struct copy {
        uint64_t offset, n_bytes;
        void *to;         /* NULL: to the device */
        const void *from; /* NULL: from it */
};

/* A copy waits for blocking streams, and the driver would invalidate the capture of one: so they are
 * queried first. cuMemcpyHtoD may return before the last bytes have arrived, in the default stream; hence
 * the wait for that. */
static int copy_entered(const struct cuda_range *c, const struct copy *copy)
{
        const struct cuda_driver *cu = c->context.cu;
        CUdeviceptr at = c->base + copy->offset;
        CUstreamCaptureStatus status;
        CUresult result = cu->cuStreamIsCapturing(CU_STREAM_LEGACY, &status);

        if (result == CUDA_SUCCESS)
                result = copy->to ? cu->cuMemcpyDtoH_v2(copy->to, at, copy->n_bytes)
                                  : cu->cuMemcpyHtoD_v2(at, copy->from, copy->n_bytes);
        if (result == CUDA_SUCCESS && !copy->to)
                result = cu->cuStreamSynchronize(CU_STREAM_LEGACY);
        return cuda_driver_broke_context(result) ? -EIO : cuda_driver_errno(result);
}

/* Uses nothing that map() and unmap() of other extents change. */
static int copy(struct device_range *r, const struct copy *copy)
{
        const struct cuda_range *c = (struct cuda_range *)r;
        struct cuda_mode mode;
        int error;

        if (!c->base || copy->offset > c->n_bytes || copy->n_bytes > c->n_bytes - copy->offset)
                return -EINVAL;
        error = cuda_context_visit(&c->context, &mode);
        if (error < 0)
                return error;
        error = copy_entered(c, copy);
        cuda_context_depart(&c->context, &mode);
        return error;
}

static int cuda_range_read(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret)
{
        return copy(r, &(struct copy){ .offset = offset, .n_bytes = n_bytes, .to = ret });
}

static int cuda_range_write(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes)
{
        return copy(r, &(struct copy){ .offset = offset, .n_bytes = n_bytes, .from = bytes });
}

/* ---- the end ------------------------------------------------------------- */

static void unmap_everything(struct cuda_range *c)
{
        struct cuda_mode mode;

        if (c->stays || cuda_context_visit(&c->context, &mode) < 0)
                return;
        for (struct mapping **at = &c->mappings; *at;)
                if (unmap_at(c, at) < 0)
                        at = &(*at)->next;
        if (!c->mappings && c->share == DEVICE_SHARE_FD && c->base)
                c->context.cu->cuMemAddressFree(c->base, c->n_bytes);
        cuda_context_depart(&c->context, &mode);
}

static void cuda_range_leave(struct device_range *r)
{
        ((struct cuda_range *)r)->stays = true;
}

static struct device_range *cuda_range_free(struct device_range *r)
{
        struct cuda_range *c = (struct cuda_range *)r;

        unmap_everything(c);
        if (!c->mappings) /* the end of the context would unmap everything */
                cuda_context_close(&c->context);
        for (struct mapping *m = c->mappings, *next; m; m = next) {
                next = m->next;
                free(m);
        }
        free(c);
        return NULL;
}

static void *cuda_range_base(const struct device_range *r)
{
        return (void *)(uintptr_t)((const struct cuda_range *)r)->base;
}

static const struct device_range_ops cuda_range_ops = {
        .name = "cuda",
        .free = cuda_range_free,
        .leave = cuda_range_leave,
        .base = cuda_range_base,
        .map = cuda_range_map,
        .unmap = cuda_range_unmap,
        .enable_peer = cuda_range_enable_peer,
        .finish = cuda_range_finish,
        .read = cuda_range_read,
        .write = cuda_range_write,
};

static void find_peers(struct cuda_range *c)
{
        const struct cuda_driver *cu = c->context.cu;
        int n = 0, can;

        c->access[c->n_access++] = (CUmemAccessDesc){
                .location = { CU_MEM_LOCATION_TYPE_DEVICE, c->context.device },
                .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        if (cu->cuDeviceGetCount(&n) != CUDA_SUCCESS)
                return;
        for (int i = 0; i < n && c->n_peers < MAX_PEERS; i++) {
                CUdevice peer;

                if (cu->cuDeviceGet(&peer, i) == CUDA_SUCCESS && peer != c->context.device &&
                    cu->cuDeviceCanAccessPeer(&can, peer, c->context.device) == CUDA_SUCCESS && can)
                        c->peers[c->n_peers++] = peer;
        }
}

/* Those that were given access before. */
static void add_access(struct cuda_range *c, uint64_t peers)
{
        for (size_t i = 0; i < c->n_peers; i++) {
                CUdevice peer = c->peers[i];

                if (peer < 64 && (peers >> peer & 1)) {
                        c->access[c->n_access] = c->access[0];
                        c->access[c->n_access++].location.id = peer;
                }
        }
}

static int reserve(struct cuda_range *c)
{
        struct cuda_mode mode;
        int r;

        if (c->share != DEVICE_SHARE_FD)
                return 0;
        r = cuda_context_visit(&c->context, &mode);
        if (r < 0)
                return r;
        r = cuda_driver_errno(c->context.cu->cuMemAddressReserve(&c->base, c->n_bytes, 0, 0, 0));
        cuda_context_depart(&c->context, &mode);
        return r;
}

int cuda_prepare(const struct device_view *view)
{
        const struct cuda_driver *cu;
        const char *why;
        CUdevice device;
        int r = cuda_driver_get(&cu, &why);

        if (r < 0)
                return r;
        r = cuda_driver_find(cu, view->uuid, &device);
        return r < 0 ? r : cuda_driver_errno(cuda_driver_charge_context(device));
}

int cuda_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret)
{
        const struct cuda_driver *cu;
        struct cuda_range *c;
        const char *why;
        CUdevice device;
        int r;

        if (n_bytes == 0 || n_bytes % PIECE != 0 || n_bytes > SIZE_MAX / 2)
                return -EINVAL;
        r = cuda_driver_get(&cu, &why);
        if (r == 0)
                r = cuda_driver_find(cu, view->uuid, &device);
        if (r < 0)
                return r;
        c = calloc(1, sizeof(*c));
        if (!c)
                return -ENOMEM;
        c->range.ops = &cuda_range_ops;
        c->share = view->share;
        c->n_bytes = n_bytes;
        r = cuda_driver_errno(cuda_context_open(cu, device, &c->context));
        if (r < 0) {
                free(c);
                return r;
        }
        find_peers(c);
        add_access(c, view->peers);
        r = reserve(c);
        if (r < 0) {
                cuda_range_free(&c->range);
                return r;
        }
        *ret = &c->range;
        return 0;
}

int device_cuda_check_peer(int ordinal, int peer)
{
        const struct cuda_driver *cu;
        const char *why;
        CUresult result;
        int can = 0;

        if (cuda_driver_get(&cu, &why) < 0)
                return -ENODEV;
        result = cu->cuDeviceCanAccessPeer(&can, peer, ordinal);
        if (result != CUDA_SUCCESS)
                return cuda_driver_errno(result);
        return can ? 0 : -ENOTSUP;
}

int device_cuda_ordinal_uuid(int ordinal, uint8_t ret[static DEVICE_UUID_BYTES])
{
        const struct cuda_driver *cu;
        const char *why;
        CUdevice device;
        CUuuid uuid;
        CUresult result;

        if (cuda_driver_get(&cu, &why) < 0)
                return -ENODEV;
        result = cu->cuDeviceGet(&device, ordinal);
        if (result == CUDA_SUCCESS)
                result = cu->cuDeviceGetUuid_v2(&uuid, device);
        if (result != CUDA_SUCCESS)
                return cuda_driver_errno(result);
        memcpy(ret, uuid.bytes, sizeof(uuid.bytes));
        return 0;
}
