/* Legacy IPC: 64 opaque bytes that stand for a whole allocation.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A handle made from any address within an allocation is the same handle, and
 * opens the allocation's base, all of it. Opened twice in a context it is one
 * mapping with a count, also after the exporter has freed it or has ended: the
 * memory of what was opened before stays, and stays charged, until the last one
 * closes.
 *
 * What opening answers: 201 in the process that exported it, in another PID
 * namespace (it looks the exporter up by pid), and where exporter or allocation
 * are gone and it is not open here; 1 for what is no handle. A different user may
 * open it, as on a real driver, unless FAKE_CUDA_IPC_SAME_UID says otherwise. */
#include "tests/fake_cuda/fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define HANDLE_MAGIC 0x4b41

struct handle {
        uint16_t magic;
        uint16_t device;
        uint32_t pid;
        uint32_t uid;
        uint32_t pid_namespace;
        uint64_t start_time, base, n_bytes, n_asked, id;
        uint64_t sum; /* of all before, so that a handle cannot be made up by chance */
};
_Static_assert(sizeof(struct handle) == CU_IPC_HANDLE_SIZE, "64 bytes, all of them said");

static uint64_t handle_sum(const struct handle *h)
{
        const unsigned char *p = (const unsigned char *)h;
        uint64_t sum = UINT64_C(0xcbf29ce484222325);

        for (size_t i = 0; i < offsetof(struct handle, sum); i++)
                sum = (sum ^ p[i]) * UINT64_C(0x100000001b3);
        return sum;
}

/* When a process began, which tells it from a later one of the same number;
 * 0: there is none. */
static uint64_t start_time_of(pid_t pid)
{
        char path[64], text[1024];
        unsigned long long start = 0;
        const char *p;
        ssize_t n;
        int fd;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return 0;
        n = read(fd, text, sizeof(text) - 1);
        close(fd);
        if (n <= 0)
                return 0;
        text[n] = '\0';
        p = strrchr(text, ')'); /* the name before may hold anything */
        if (!p || p[1] == '\0' || p[2] == 'Z' || p[2] == 'X')
                return 0;
        /* After the state, field 3: the start is field 22. */
        if (sscanf(p + 3, " %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                   &start) != 1)
                return 0;
        return start;
}

static uint32_t own_pid_namespace(void)
{
        struct stat st;

        return stat("/proc/self/ns/pid", &st) == 0 ? (uint32_t)st.st_ino : 0;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *ret_handle, CUdeviceptr pointer)
{
        const struct fake_range *range;
        struct handle h = { .magic = HANDLE_MAGIC };
        CUcontext c;
        CUresult r;

        ENTER(cuIpcGetMemHandle);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_handle)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_rwlock_rdlock(&fake_memory_lock);
        range = fake_range_find(pointer, RANGE_ALLOC);
        if (range) {
                h.device = (uint16_t)range->device->index;
                h.base = range->at;
                h.n_bytes = range->object.n_bytes;
                h.id = range->object.id;
                h.n_asked = range->n_bytes;
        }
        pthread_rwlock_unlock(&fake_memory_lock);
        if (!range)
                return CUDA_ERROR_INVALID_VALUE;
        h.pid = (uint32_t)getpid();
        h.uid = (uint32_t)geteuid();
        h.pid_namespace = own_pid_namespace();
        h.start_time = start_time_of(getpid());
        h.sum = handle_sum(&h);
        memcpy(ret_handle, &h, sizeof(h));
        return CUDA_SUCCESS;
}

static struct fake_range *find_opened(CUcontext c, uint64_t id)
{
        for (struct fake_range *r = fake_ranges; r; r = r->next)
                if (r->kind == RANGE_IPC && r->context == c && r->object.id == id)
                        return r;
        return NULL;
}

/* May this handle be opened here at all? */
static CUresult check_handle(const struct handle *h, unsigned int flags)
{
        if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
                return CUDA_ERROR_INVALID_VALUE;
        if (h->magic != HANDLE_MAGIC || h->sum != handle_sum(h))
                return CUDA_ERROR_INVALID_VALUE;
        if (h->pid_namespace != own_pid_namespace() || h->pid == (uint32_t)getpid())
                return CUDA_ERROR_INVALID_CONTEXT;
        if (fake.ipc_same_uid && h->uid != (uint32_t)geteuid())
                return CUDA_ERROR_INVALID_CONTEXT;
        return fake_device_by_index(h->device) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult open_locked(CUcontext c, const struct handle *h, CUdeviceptr *ret)
{
        struct fake_object o = { .device = h->device, .kind = 'a', .n_bytes = h->n_bytes, .id = h->id };
        struct fake_range *r = NULL;
        CUresult result;
        uintptr_t at;
        int fd;

        r = find_opened(c, h->id);
        if (r) {
                r->n_refs++;
                *ret = r->at;
                return CUDA_SUCCESS;
        }
        if (start_time_of((pid_t)h->pid) != h->start_time)
                return CUDA_ERROR_INVALID_CONTEXT;
        result = fake_object_open(&o, &fd);
        if (result != CUDA_SUCCESS)
                return result;
        at = fake_address_take(h->n_bytes, FAKE_GRANULARITY);
        if (at == 0 || !fake_address_map(at, h->n_bytes, fd, PROT_READ | PROT_WRITE)) {
                if (at)
                        fake_address_give_back(at, h->n_bytes);
                fake_object_close(fd);
                return CUDA_ERROR_MAP_FAILED;
        }
        fake_object_close(fd);
        r = fake_range_add(RANGE_IPC, at, h->n_asked, h->n_bytes);
        r->device = fake_device_by_index(h->device);
        r->context = c;
        r->object = o;
        *ret = at;
        return CUDA_SUCCESS;
}

API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *ret_pointer, CUipcMemHandle handle, unsigned int flags)
{
        struct handle h;
        CUcontext c;
        CUresult r;

        ENTER(cuIpcOpenMemHandle_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret_pointer)
                return CUDA_ERROR_INVALID_VALUE;
        memcpy(&h, &handle, sizeof(h));
        r = check_handle(&h, flags);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        r = open_locked(c, &h, ret_pointer);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}

/* The object may have been disowned since: then its file has another name. */
static void close_opened(struct fake_range *r)
{
        struct fake_object freed = r->object;

        freed.kind = 'x';
        fake_range_destroy(r);
        fake_object_drop(&freed);
}

API CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
        struct fake_range *range;
        CUcontext c;
        CUresult r;

        ENTER(cuIpcCloseMemHandle);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        r = fake_streams_wait(c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_rwlock_wrlock(&fake_memory_lock);
        range = fake_range_find(pointer, RANGE_IPC);
        if (!range || range->at != pointer || range->context != c)
                r = CUDA_ERROR_INVALID_VALUE;
        else if (--range->n_refs == 0)
                close_opened(range);
        pthread_rwlock_unlock(&fake_memory_lock);
        return r;
}
