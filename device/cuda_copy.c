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
#include "proto/memfd.h"

#define N_BUFFERS    2u
#define BUFFER_BYTES (N_BUFFERS * CUDA_COPY_PIECE)

/* ---- waiting ------------------------------------------------------------- */

static int await(const struct cuda_copier *c, uint64_t piece)
{
        return cuda_driver_errno(c->cu->cuStreamSynchronize(c->streams[piece % N_BUFFERS]));
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
        int r = cuda_driver_errno(cu->cuMemHostRegister_v2(c->buffers, BUFFER_BYTES, 0));

        if (r < 0)
                return r;
        for (unsigned i = 0; r == 0 && i < N_BUFFERS; i++)
                r = cuda_driver_errno(cu->cuStreamCreate(&c->streams[i], CU_STREAM_NON_BLOCKING));
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
        }
        return r;
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
        *c = (struct cuda_copier){ .fd = -1 };
}

/* ---- copying ------------------------------------------------------------- */

static uint64_t piece_bytes(uint64_t piece, uint64_t n_bytes)
{
        uint64_t left = n_bytes - piece * CUDA_COPY_PIECE;

        return left < CUDA_COPY_PIECE ? left : CUDA_COPY_PIECE;
}

static uint64_t buffer_offset(uint64_t piece)
{
        return piece % N_BUFFERS * CUDA_COPY_PIECE;
}

static int begin_out(const struct cuda_copier *c, CUdeviceptr from, uint64_t piece, uint64_t n_bytes)
{
        return cuda_driver_errno(
                c->cu->cuMemcpyDtoHAsync_v2(c->buffers + buffer_offset(piece), from + piece * CUDA_COPY_PIECE,
                                            piece_bytes(piece, n_bytes), c->streams[piece % N_BUFFERS]));
}

int cuda_copy_out(struct cuda_copier *c, CUdeviceptr from, int to, uint64_t to_offset, uint64_t n_bytes)
{
        uint64_t n_pieces = (n_bytes + CUDA_COPY_PIECE - 1) / CUDA_COPY_PIECE;
        int r = n_pieces > 0 ? begin_out(c, from, 0, n_bytes) : 0;

        for (uint64_t i = 0; r == 0 && i < n_pieces; i++) {
                if (i + 1 < n_pieces) /* its buffer was emptied in the turn before */
                        r = begin_out(c, from, i + 1, n_bytes);
                if (r == 0)
                        r = await(c, i);
                if (r == 0)
                        r = host_copy(c->fd, buffer_offset(i), to, to_offset + i * CUDA_COPY_PIECE,
                                      piece_bytes(i, n_bytes));
        }
        return await_all(c, r);
}

int cuda_copy_in(struct cuda_copier *c, int from, uint64_t from_offset, CUdeviceptr to, uint64_t n_bytes)
{
        uint64_t n_pieces = (n_bytes + CUDA_COPY_PIECE - 1) / CUDA_COPY_PIECE;
        int r = 0;

        for (uint64_t i = 0; r == 0 && i < n_pieces; i++) {
                unsigned char *buffer = c->buffers + buffer_offset(i);
                uint64_t n = piece_bytes(i, n_bytes);

                r = await(c, i); /* the device has read what was in this buffer */
                if (r == 0)
                        r = host_copy_read(from, from_offset + i * CUDA_COPY_PIECE, buffer, n);
                if (r == 0)
                        r = cuda_driver_errno(c->cu->cuMemcpyHtoDAsync_v2(to + i * CUDA_COPY_PIECE, buffer, n,
                                                                          c->streams[i % N_BUFFERS]));
        }
        return await_all(c, r);
}

int cuda_copy_out_directly(struct cuda_copier *c, CUdeviceptr from, void *to, uint64_t n_bytes)
{
        return await_all(c, cuda_driver_errno(c->cu->cuMemcpyDtoHAsync_v2(to, from, n_bytes, c->streams[0])));
}

int cuda_copy_in_directly(struct cuda_copier *c, const void *from, CUdeviceptr to, uint64_t n_bytes)
{
        return await_all(c, cuda_driver_errno(c->cu->cuMemcpyHtoDAsync_v2(to, from, n_bytes, c->streams[0])));
}
