/* Host memory that is registered with the driver, or is the driver's: a list. Copies are the same from and to any memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The pages are checked when they are registered, as a driver does that takes them. A registration belongs to
 * the context in which it was made and ends with it.
 *
 * FAKE_CUDA_PINNED names a file ("%p" in it becomes the pid) that always shows the registered bytes and ranges of the
 * process: a test sees what is registered now, also in another process. */
#include "tests/fake_cuda/fake.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

#define ALL_FLAGS                                                                                            \
        (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY |          \
         CU_MEMHOSTREGISTER_READ_ONLY)

struct pinned {
        uintptr_t at;
        size_t n_bytes;
        unsigned int flags;
        bool is_allocated; /* by cuMemHostAlloc, and freed with it */
        CUcontext context;
        struct pinned *next;
};

static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pinned *pinned;

/* ---- the file ------------------------------------------------------------ */

static void show(void)
{
        const char *pattern = getenv("FAKE_CUDA_PINNED"), *p = pattern ? strstr(pattern, "%p") : NULL;
        size_t n_bytes = 0, n = 0;
        char path[512], text[64];
        int fd, n_text;

        if (!pattern)
                return;
        for (const struct pinned *each = pinned; each; each = each->next) {
                n_bytes += each->is_allocated ? 0 : each->n_bytes;
                n += !each->is_allocated;
        }
        if (p)
                snprintf(path, sizeof(path), "%.*s%d%s", (int)(p - pattern), pattern, (int)getpid(), p + 2);
        else
                snprintf(path, sizeof(path), "%s", pattern);
        fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        n_text = snprintf(text, sizeof(text), "%20zu %10zu\n", n_bytes, n);
        if (fd < 0 || write(fd, text, (size_t)n_text) != n_text)
                fake_die("FAKE_CUDA_PINNED: cannot write %s: %m", path);
        close(fd);
}

/* ---- the list ------------------------------------------------------------ */

static struct pinned *find(uintptr_t at, size_t n_bytes)
{
        struct pinned *p = pinned;

        while (p && !(at < p->at + p->n_bytes && p->at < at + n_bytes))
                p = p->next;
        return p;
}

#define POPULATED_BYTES (UINT64_C(4) << 20)
#define POPULATED_STEP  (UINT64_C(1) << 18)

static int populate(uintptr_t at, size_t n_bytes, bool to_write)
{
        return madvise((void *)at, n_bytes, to_write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
}

/* Whether all of it is mapped, and writable where it must be: the kernel looks without a fault (Linux 5.14). Of
 * large memory it looks at a page in each step. */
static bool is_usable(uintptr_t at, size_t n_bytes, bool to_write)
{
        uintptr_t first = at & ~(uintptr_t)4095, end = (at + n_bytes + 4095) & ~(uintptr_t)4095;
        bool is = true;

        if (end - first <= POPULATED_BYTES)
                is = populate(first, end - first, to_write) == 0;
        for (uintptr_t page = first; end - first > POPULATED_BYTES && page < end && is;
             page += POPULATED_STEP)
                is = populate(page, 4096, to_write) == 0;
        return (is && populate(end - 4096, 4096, to_write) == 0) ||
               populate((uintptr_t)&fake & ~(uintptr_t)4095, 4096, true) < 0;
}

static CUresult pin(uintptr_t at, size_t n_bytes, unsigned int flags, bool is_allocated, CUcontext c)
{
        struct pinned *p;

        if (find(at, n_bytes))
                return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        if (!is_usable(at, n_bytes, !(flags & CU_MEMHOSTREGISTER_READ_ONLY)))
                return CUDA_ERROR_INVALID_VALUE;
        p = malloc(sizeof(*p));
        if (!p)
                fake_die("out of memory");
        *p = (struct pinned){ at, n_bytes, flags, is_allocated, c, pinned };
        pinned = p;
        show();
        return CUDA_SUCCESS;
}

static void drop(struct pinned *p)
{
        if (p->is_allocated)
                free((void *)p->at);
        free(p);
}

static CUresult unpin(uintptr_t at, bool is_allocated)
{
        for (struct pinned **each = &pinned; *each; each = &(*each)->next) {
                struct pinned *p = *each;

                if (p->at != at || p->is_allocated != is_allocated)
                        continue;
                *each = p->next;
                drop(p);
                show();
                return CUDA_SUCCESS;
        }
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

void fake_pinned_drop_of(CUcontext c)
{
        pthread_mutex_lock(&pinned_lock);
        for (struct pinned **each = &pinned; *each;) {
                struct pinned *p = *each;

                if (p->context != c) {
                        each = &p->next;
                        continue;
                }
                *each = p->next;
                drop(p);
        }
        show();
        pthread_mutex_unlock(&pinned_lock);
}

/* ---- the functions ------------------------------------------------------- */

API CUresult cuMemHostRegister_v2(void *memory, size_t n_bytes, unsigned int flags)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostRegister_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!memory || n_bytes == 0 || (flags & ~(unsigned int)ALL_FLAGS) != 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (flags & CU_MEMHOSTREGISTER_IOMEMORY) /* no such memory is modelled */
                return CUDA_ERROR_NOT_SUPPORTED;
        pthread_mutex_lock(&pinned_lock);
        r = pin((uintptr_t)memory, n_bytes, flags, false, c);
        pthread_mutex_unlock(&pinned_lock);
        return r;
}

API CUresult cuMemHostUnregister(void *memory)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostUnregister);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&pinned_lock);
        r = unpin((uintptr_t)memory, false);
        pthread_mutex_unlock(&pinned_lock);
        return r;
}

API CUresult cuMemHostGetFlags(unsigned int *ret_flags, void *memory)
{
        const struct pinned *p;
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostGetFlags);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&pinned_lock);
        p = memory && ret_flags ? find((uintptr_t)memory, 1) : NULL;
        if (p)
                *ret_flags = p->flags;
        pthread_mutex_unlock(&pinned_lock);
        return p ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- memory of the driver ------------------------------------------------- */

CUresult cuMemHostAlloc(void **ret, size_t n_bytes, unsigned int flags);
CUresult cuMemAllocHost_v2(void **ret, size_t n_bytes);
CUresult cuMemFreeHost(void *p);
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *ret_pointer, void *p, unsigned int flags);

/* Whole pages, which take nothing of the device. They end with the context. */
API CUresult cuMemHostAlloc(void **ret, size_t n_bytes, unsigned int flags)
{
        CUcontext c;
        CUresult r;
        void *p;

        ENTER(cuMemHostRegister_v2);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        if (!ret || n_bytes == 0 || flags > 7)
                return CUDA_ERROR_INVALID_VALUE;
        if (posix_memalign(&p, 4096, n_bytes) != 0)
                return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_mutex_lock(&pinned_lock);
        r = pin((uintptr_t)p, n_bytes, flags, true, c);
        pthread_mutex_unlock(&pinned_lock);
        if (r == CUDA_SUCCESS)
                *ret = p;
        else
                free(p);
        return r;
}

API CUresult cuMemAllocHost_v2(void **ret, size_t n_bytes)
{
        return cuMemHostAlloc(ret, n_bytes, 0);
}

API CUresult cuMemFreeHost(void *p)
{
        CUcontext c;
        CUresult r;

        ENTER(cuMemHostUnregister);
        r = fake_context(&c);
        if (r != CUDA_SUCCESS)
                return r;
        pthread_mutex_lock(&pinned_lock);
        r = unpin((uintptr_t)p, true);
        pthread_mutex_unlock(&pinned_lock);
        return r == CUDA_SUCCESS ? r : CUDA_ERROR_INVALID_VALUE;
}

/* The same address, as with unified addresses. */
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *ret_pointer, void *p, unsigned int flags)
{
        const struct pinned *found;

        ENTER(cuMemHostGetFlags);
        if (!ret_pointer || flags != 0)
                return CUDA_ERROR_INVALID_VALUE;
        pthread_mutex_lock(&pinned_lock);
        found = find((uintptr_t)p, 1);
        pthread_mutex_unlock(&pinned_lock);
        if (found)
                *ret_pointer = (CUdeviceptr)(uintptr_t)p;
        return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
