/* Copies through pinned memory; see cuda_copy.h.
 *
 * The buffers are a memfd, so that host_copy() can move their bytes without touching the other file's pages.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/cuda_copy.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/host_copy.h"
#include "device/host_helper.h"
#include "proto/memfd.h"

/* Less is not copied directly: a driver may read a small piece with the processor, which would fault where a client
 * has removed the page. */
#define DIRECT_MIN (UINT64_C(1) << 20)

#define PIECE        (UINT64_C(8) << 20) /* of one buffer */
#define N_BUFFERS    2u
#define BUFFER_BYTES (N_BUFFERS * PIECE)

/* ---- waiting ------------------------------------------------------------- */

static int await(const struct cuda_copier *c, unsigned buffer)
{
        return cuda_driver_owner_errno(c->cu->cuStreamSynchronize(c->streams[buffer]));
}

/* So that the device uses neither the buffers nor the range any more, whatever failed. */
static int await_all(const struct cuda_copier *c, int r)
{
        for (unsigned i = 0; i < N_BUFFERS; i++) {
                int r_await = await(c, i);

                r = r < 0 ? r : r_await;
        }
        return r;
}

/* ---- opening ------------------------------------------------------------- */

static int open_buffers(struct cuda_copier *c)
{
        void *at;

        c->fd = memfd_make("bfcd-copies");
        if (c->fd < 0)
                return c->fd;
        if (ftruncate(c->fd, (off_t)BUFFER_BYTES) < 0 || fallocate(c->fd, 0, 0, (off_t)BUFFER_BYTES) < 0)
                return errno == ENOSPC ? -ENOMEM : -errno;
        at = mmap(NULL, BUFFER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, c->fd, 0);
        if (at == MAP_FAILED)
                return -errno;
        c->buffers = at;
        return 0;
}

static void close_buffers(struct cuda_copier *c)
{
        if (c->buffers)
                munmap(c->buffers, BUFFER_BYTES);
        if (c->fd >= 0)
                close(c->fd);
}

static int open_streams(struct cuda_copier *c)
{
        const struct cuda_driver *cu = c->cu;
        int r = cuda_driver_owner_errno(cu->cuMemHostRegister_v2(c->buffers, BUFFER_BYTES, 0));

        if (r < 0)
                return r;
        for (unsigned i = 0; r == 0 && i < N_BUFFERS; i++)
                r = cuda_driver_owner_errno(cu->cuStreamCreate(&c->streams[i], CU_STREAM_NON_BLOCKING));
        if (r < 0 && c->streams[0])
                cu->cuStreamDestroy_v2(c->streams[0]);
        if (r < 0)
                cu->cuMemHostUnregister(c->buffers);
        return r;
}

int cuda_copier_open(struct cuda_copier *c, const struct cuda_driver *cu)
{
        int r;

        if (c->cu)
                return 0;
        *c = (struct cuda_copier){ .cu = cu, .fd = -1 };
        r = open_buffers(c);
        if (r == 0)
                r = open_streams(c);
        if (r < 0) {
                close_buffers(c);
                *c = (struct cuda_copier){ .fd = -1 };
                return r;
        }
        c->helper = host_helper_new();
        return 0;
}

/* Work that the driver did not report as complete may still write into the buffers: they stay mapped. */
void cuda_copier_close(struct cuda_copier *c, bool has_context)
{
        if (!c->cu)
                return;
        if (!has_context || await_all(c, 0) < 0)
                c->buffers = NULL;
        for (unsigned i = 0; has_context && i < N_BUFFERS; i++)
                c->cu->cuStreamDestroy_v2(c->streams[i]);
        if (c->buffers)
                c->cu->cuMemHostUnregister(c->buffers);
        close_buffers(c);
        host_helper_free(c->helper);
        *c = (struct cuda_copier){ .fd = -1 };
}

/* ---- copying ------------------------------------------------------------- */

static unsigned char *buffer_at(const struct cuda_copier *c, unsigned buffer)
{
        return c->buffers + buffer * PIECE;
}

static uint64_t piece_bytes(uint64_t done, uint64_t n_bytes)
{
        return n_bytes - done < PIECE ? n_bytes - done : PIECE;
}

static unsigned take_buffer(struct cuda_copier *c)
{
        unsigned buffer = c->next;

        c->next = (buffer + 1) % N_BUFFERS;
        return buffer;
}

/* The processor's part of a copy. */
struct move {
        const struct cuda_copier *copier;
        unsigned buffer;
        int file;
        uint64_t file_offset;
};

static int move_out(const void *arg, uint64_t begin, uint64_t end)
{
        const struct move *m = arg;

        return host_copy(m->copier->fd, m->buffer * PIECE + begin, m->file, m->file_offset + begin,
                         end - begin, NULL);
}

static int move_in(const void *arg, uint64_t begin, uint64_t end)
{
        const struct move *m = arg;

        return host_copy_read(m->file, m->file_offset + begin, buffer_at(m->copier, m->buffer) + begin,
                              end - begin);
}

/* The device does not use the buffer any more; what it has written goes to the memfd. */
static int empty_buffer(struct cuda_copier *c, unsigned buffer)
{
        struct cuda_copy_rest rest = c->rests[buffer];
        const struct move m = { c, buffer, rest.to, rest.to_offset };
        int r = await(c, buffer);

        c->rests[buffer].n_bytes = 0;
        return r < 0 || rest.n_bytes == 0 ? r : host_helper_run(c->helper, move_out, &m, rest.n_bytes);
}

/* Through the buffers, to the memfd. */
static int copy_out(struct cuda_copier *c, CUdeviceptr from, const struct device_copy *copy)
{
        int r = 0;

        for (uint64_t done = 0; r == 0 && done < copy->n_bytes; done += PIECE) {
                unsigned i = take_buffer(c);
                uint64_t n = piece_bytes(done, copy->n_bytes);

                r = empty_buffer(c, i);
                if (r == 0)
                        r = cuda_driver_owner_errno(
                                c->cu->cuMemcpyDtoHAsync_v2(buffer_at(c, i), from + done, n, c->streams[i]));
                if (r == 0)
                        c->rests[i] = (struct cuda_copy_rest){ copy->host->fd, copy->host_offset + done, n };
        }
        return r;
}

/* And from it. */
static int copy_in(struct cuda_copier *c, CUdeviceptr to, const struct device_copy *copy)
{
        int r = 0;

        for (uint64_t done = 0; r == 0 && done < copy->n_bytes; done += PIECE) {
                unsigned i = take_buffer(c);
                uint64_t n = piece_bytes(done, copy->n_bytes);
                const struct move m = { c, i, copy->host->fd, copy->host_offset + done };

                r = empty_buffer(c, i);
                if (r == 0)
                        r = host_helper_run(c->helper, move_in, &m, n);
                if (r == 0)
                        r = cuda_driver_owner_errno(
                                c->cu->cuMemcpyHtoDAsync_v2(to + done, buffer_at(c, i), n, c->streams[i]));
        }
        return r;
}

int cuda_copy_begin(struct cuda_copier *c, struct cuda_pinner *pinner, CUdeviceptr at,
                    const struct device_copy *copy)
{
        char *host = NULL;
        int r = copy->pins && copy->n_bytes >= DIRECT_MIN
                        ? cuda_pin(pinner, copy->host, copy->pins, (void **)&host)
                        : 0;

        if (r < 0)
                return r;
        at += copy->offset;
        if (!host)
                return copy->to_host ? copy_out(c, at, copy) : copy_in(c, at, copy);
        host += copy->host_offset;
        return cuda_driver_owner_errno(
                copy->to_host ? c->cu->cuMemcpyDtoHAsync_v2(host, at, copy->n_bytes, c->streams[0])
                              : c->cu->cuMemcpyHtoDAsync_v2(at, host, copy->n_bytes, c->streams[0]));
}

int cuda_copy_finish(struct cuda_copier *c, int r)
{
        for (unsigned i = 0; r == 0 && i < N_BUFFERS; i++)
                r = empty_buffer(c, take_buffer(c));
        for (unsigned i = 0; i < N_BUFFERS; i++)
                c->rests[i].n_bytes = 0;
        return r < 0 ? await_all(c, r) : 0;
}
