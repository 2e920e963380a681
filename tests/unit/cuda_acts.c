/* See cuda_acts.h. State is a process's own.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/cuda_acts.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/suite.h"

static struct device *device, *other;
static struct device_extent extents[256];
static unsigned int n_extents;
static struct device_range *range;
static _Atomic int kept_fd = -1;
static CUstream stream;

/* A current context for the test's own calls, and none afterwards. */
static int with_context(int ordinal, int (*run)(struct message *m), struct message *m)
{
        CUcontext context;
        CUdevice d;
        const char *why;
        int r;

        if (gpu_load(&why) < 0 || cu.cuInit(0) != CUDA_SUCCESS ||
            cu.cuDeviceGet(&d, ordinal) != CUDA_SUCCESS ||
            cu.cuDevicePrimaryCtxRetain(&context, d) != CUDA_SUCCESS)
                return -ENXIO;
        cu.cuCtxPushCurrent_v2(context);
        r = run(m);
        cu.cuCtxPopCurrent_v2(&context);
        cu.cuDevicePrimaryCtxRelease_v2(d);
        return r;
}

/* ---- the daemon's part --------------------------------------------------- */

int act_open(struct message *m)
{
        char id[64];

        snprintf(id, sizeof(id), "%.63s", m->text);
        m->text[0] = '\0';
        return device_cuda_new(id, &device, m->text, sizeof(m->text));
}

int act_allow_mps(struct message *m)
{
        (void)m;
        device_cuda_allow_mps();
        return 0;
}

int act_facts(struct message *m)
{
        return device_facts(device, &m->facts);
}

int act_make(struct message *m)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        int r = device_make(device, m->extent.share, m->extent.n_bytes, &e);

        m->fd = -1;
        if (r < 0)
                return r;
        m->a = n_extents;
        m->extent = extents[n_extents++] = e;
        m->fd = e.fd < 0 ? -1 : dup(e.fd);
        return 0;
}

int act_destroy(struct message *m)
{
        struct device_extent *e = &extents[m->a];
        int r = device_destroy(device, e);

        return e->n_bytes == 0 && e->fd == -1 && device_destroy(device, e) == 0 ? r : -EBADF;
}

int act_clear(struct message *m)
{
        extents[m->a].clears = true;
        return 0;
}

int act_end(struct message *m)
{
        (void)m;
        device_end(device);
        return 0;
}

int act_others(struct message *m)
{
        return device_foreign_bytes(device, &m->a);
}

int act_close(struct message *m)
{
        (void)m;
        device = device_free(device);
        return 0;
}

int act_swap(struct message *m)
{
        struct device *d = device;

        (void)m;
        device = other;
        other = d;
        return 0;
}

#define N_CHURN 8

/* Makes and keeps, while the other thread destroys. */
static void *make_some(void *ret)
{
        struct device_extent *e = ret;
        int r = 0;

        for (int i = 0; i < N_CHURN && r == 0; i++)
                r = device_make(device, i % 2 ? DEVICE_SHARE_FD : DEVICE_SHARE_CUDA_IPC, 2 << 20, &e[i]);
        return (void *)(intptr_t)r;
}

static int destroy_some(struct device_extent *e)
{
        int r = 0;

        for (int i = 0; i < N_CHURN && r == 0; i++)
                r = device_destroy(device, &e[i]);
        return r;
}

int act_churn(struct message *m)
{
        struct device_extent e[2][N_CHURN];
        int r = (int)(intptr_t)make_some(e[0]);

        (void)m;
        for (int i = 0; i < 5 && r == 0; i++) {
                pthread_t thread;
                void *result;

                if (pthread_create(&thread, NULL, make_some, e[(i + 1) % 2]) != 0)
                        return -EAGAIN;
                r = destroy_some(e[i % 2]);
                pthread_join(thread, &result);
                r = r < 0 ? r : (int)(intptr_t)result;
        }
        return r < 0 ? r : destroy_some(e[1]);
}

static int copy(struct message *m, bool to_host)
{
        const struct device_extent host = { .fd = m->fd, .n_bytes = m->extent.n_bytes };
        int r = device_copy(device,
                            &(struct device_copy){ .extent = &extents[m->a],
                                                   .offset = m->b,
                                                   .host = &host,
                                                   .host_offset = m->extent.native,
                                                   .n_bytes = m->c,
                                                   .to_host = to_host },
                            1);

        close(m->fd);
        m->fd = -1;
        return r;
}

int act_copy_to_host(struct message *m)
{
        return copy(m, true);
}

int act_copy_from_host(struct message *m)
{
        return copy(m, false);
}

static int look(struct message *m)
{
        const struct device_extent *e = &extents[m->a];
        CUmemGenericAllocationHandle handle = e->native;
        struct gpu_mapping mapping;
        CUdevice d;

        if (e->share == DEVICE_SHARE_CUDA_IPC) {
                m->c = gpu_count_other(e->native, (unsigned char)m->b, e->n_bytes);
                return 0;
        }
        cu.cuCtxGetDevice(&d);
        if (gpu_map(d, handle, e->n_bytes, &mapping) != CUDA_SUCCESS)
                return -EIO;
        m->c = gpu_count_other(mapping.at, (unsigned char)m->b, e->n_bytes);
        cu.cuMemUnmap(mapping.at, mapping.n_bytes);
        cu.cuMemAddressFree(mapping.at, mapping.n_bytes);
        return 0;
}

int act_look(struct message *m)
{
        return with_context(0, look, m);
}

/* ---- a client's part ----------------------------------------------------- */

int act_range(struct message *m)
{
        return device_range_new(&m->view, m->a, &range);
}

int act_map(struct message *m)
{
        int r;

        m->extent.fd = m->fd;
        r = device_range_map(range, m->a, &m->extent);
        if (m->fd >= 0)
                close(m->fd);
        m->fd = -1;
        return r;
}

int act_unmap(struct message *m)
{
        return device_range_unmap(range, m->a, m->b);
}

int act_finish(struct message *m)
{
        (void)m;
        return device_range_finish(range);
}

int act_free(struct message *m)
{
        (void)m;
        range = device_range_free(range);
        return 0;
}

int act_leave(struct message *m)
{
        (void)m;
        device_range_leave(range);
        return 0;
}

int act_base(struct message *m)
{
        m->a = (uintptr_t)device_range_base(range);
        return 0;
}

static CUdeviceptr at(uint64_t offset)
{
        return (CUdeviceptr)(uintptr_t)device_range_base(range) + offset;
}

static int fill(struct message *m)
{
        return cu.cuMemsetD8_v2(at(m->a), (unsigned char)m->b, m->c) == CUDA_SUCCESS &&
                               cu.cuCtxSynchronize() == CUDA_SUCCESS
                       ? 0
                       : -EFAULT;
}

int act_fill(struct message *m)
{
        return with_context(0, fill, m);
}

static int count_other(struct message *m)
{
        m->c = gpu_count_other(at(m->a), (unsigned char)m->b, m->c);
        return 0;
}

int act_count_other(struct message *m)
{
        return with_context(0, count_other, m);
}

int act_write(struct message *m)
{
        unsigned char *bytes = malloc(m->c);
        int r;

        if (!bytes)
                return -ENOMEM;
        memset(bytes, (int)m->b, m->c);
        r = device_range_write(range, m->a, bytes, m->c);
        free(bytes);
        return r;
}

int act_read(struct message *m)
{
        unsigned char *bytes = malloc(m->c);
        uint64_t n_other = 0;
        int r;

        if (!bytes)
                return -ENOMEM;
        r = device_range_read(range, m->a, m->c, bytes);
        if (r == 0 && m->c > 0 && (bytes[0] != m->b || memcmp(bytes, bytes + 1, m->c - 1) != 0))
                for (uint64_t i = 0; i < m->c; i++)
                        n_other += bytes[i] != m->b;
        free(bytes);
        m->c = n_other;
        return r;
}

int act_ordinal(struct message *m)
{
        return device_cuda_ordinal_uuid((int)m->a, m->view.uuid);
}

/* ---- anybody's ----------------------------------------------------------- */

int act_keep_fd(struct message *m)
{
        kept_fd = m->fd;
        m->fd = -1;
        return kept_fd >= 0 ? 0 : -EBADF;
}

void act_drop_fd(void)
{
        close(atomic_exchange(&kept_fd, -1));
}

int act_setenv(struct message *m)
{
        char *value = strchr(m->text, '=');

        if (!value)
                return -EINVAL;
        *value++ = '\0';
        return setenv(m->text, value, 1);
}

int act_count_fds(struct message *m)
{
        m->a = (uint64_t)suite_count_fds();
        return 0;
}

static int n_free(struct message *m)
{
        m->b = gpu_n_free();
        return 0;
}

int act_n_free(struct message *m)
{
        return with_context((int)m->a, n_free, m);
}

int act_has_no_context(struct message *m)
{
        CUcontext context = NULL;
        const char *why;

        (void)m;
        if (gpu_load(&why) < 0 || cu.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
                return -ENXIO;
        return context ? -EISCONN : 0;
}

static int child(void)
{
        char byte = 0;
        struct device_extent e = DEVICE_EXTENT_EMPTY;
        struct device_view view = { .is_cuda = true };
        struct device_facts facts;
        struct device *d;
        char sentence[200];

        if (device_cuda_new("cuda:0", &d, sentence, sizeof(sentence)) != -ENODEV || sentence[0] == '\0')
                return 1;
        if (device_cuda_ordinal_uuid(0, view.uuid) != -ENODEV)
                return 2;
        if (device &&
            (device_make(device, DEVICE_SHARE_FD, 2 << 20, &e) != -ENODEV ||
             device_facts(device, &facts) != -ENODEV || device_destroy(device, &extents[0]) != -ENODEV))
                return 3;
        device_free(device);
        if (range && device_range_finish(range) != -ENODEV)
                return 4;
        if (range && device_range_unmap(range, 0, 2 << 20) != -ENODEV)
                return 5;
        if (range && device_range_base(range) &&
            (device_range_write(range, 0, &byte, 1) != -ENODEV ||
             device_range_read(range, 0, 1, &byte) != -ENODEV))
                return 7;
        device_range_free(range);
        return device_range_new(&view, 2 << 20, &range) == -ENODEV ? 0 : 6;
}

static _Atomic bool comes_and_goes;
static pthread_t come_and_go_thread;

static void *come_and_go(void *unused)
{
        CUcontext context;

        (void)unused;
        while (comes_and_goes)
                if (cu.cuDevicePrimaryCtxRetain(&context, 0) == CUDA_SUCCESS)
                        cu.cuDevicePrimaryCtxRelease_v2(0);
        return NULL;
}

int act_come_and_go(struct message *m)
{
        const char *why;

        comes_and_goes = m->a != 0;
        if (!comes_and_goes)
                return -pthread_join(come_and_go_thread, NULL);
        if (gpu_load(&why) < 0 || cu.cuInit(0) != CUDA_SUCCESS)
                return -ENODEV;
        return -pthread_create(&come_and_go_thread, NULL, come_and_go, NULL);
}

int act_fork_and_wait(struct message *m)
{
        pid_t pid = fork();

        if (pid == 0) {
                alarm(60); /* it is to outlive its parent, and not the test */
                pause();
                _exit(0);
        }
        m->a = (uint64_t)pid;
        return pid < 0 ? -errno : 0;
}

int act_forked(struct message *m)
{
        int status = 0;
        pid_t pid = fork();

        (void)m;
        if (pid == 0)
                _exit(child());
        waitpid(pid, &status, 0);
        return status;
}

static int keep_context(struct message *m)
{
        CUcontext context;
        CUdevice d;

        (void)m;
        return cu.cuCtxGetDevice(&d) == CUDA_SUCCESS &&
                               cu.cuDevicePrimaryCtxRetain(&context, d) == CUDA_SUCCESS
                       ? 0
                       : -EIO;
}

int act_keep_context(struct message *m)
{
        return with_context((int)m->a, keep_context, m);
}

static int begin_capture(struct message *m)
{
        return cu.cuStreamCreate(&stream, (unsigned int)m->a) == CUDA_SUCCESS &&
                               cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) ==
                                       CUDA_SUCCESS
                       ? 0
                       : -EIO;
}

int act_begin_capture(struct message *m)
{
        return with_context((int)m->b, begin_capture, m);
}

static int end_capture(struct message *m)
{
        CUgraph graph = NULL;

        (void)m;
        if (cu.cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS)
                return -EIO;
        cu.cuGraphDestroy(graph);
        return cu.cuStreamDestroy_v2(stream) == CUDA_SUCCESS ? 0 : -EIO;
}

int act_end_capture(struct message *m)
{
        return with_context((int)m->b, end_capture, m);
}

static int busy(struct message *m)
{
        return cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS &&
                               cu.cuMemsetD8Async(at(m->a), 0x77, m->c, stream) == CUDA_SUCCESS
                       ? 0
                       : -EIO;
}

int act_busy(struct message *m)
{
        return with_context((int)m->b, busy, m);
}
