/* What a broken bfcd could send to a keeper: every request with any names, sizes and fds, and datagrams that are none.
 * The device is the host.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "keeper/serve.h"
#include "keeper/wire.h"
#include "proto/memfd.h"
#include "tests/fuzz/input.h"

#define N_REQUESTS 24u /* whose replies have room in the socket */

/* Mostly what exists; never so much that it is noticed. */
static uint64_t take_bytes(struct input *in)
{
        static const uint64_t odd[] = { 0, 1, UINT64_MAX, INT64_MAX, UINT64_MAX - 2 * MIB + 1, MIB };
        uint8_t what = take(in);

        return what < 200 ? (what % 3) * 2 * MIB : odd[what % 6];
}

static void take_copy(struct input *in, struct keeper_copy *ret)
{
        ret->key = take(in) % 8;
        ret->offset = take_bytes(in);
        ret->host_offset = take_bytes(in);
        ret->host_bytes = take_bytes(in);
        ret->n_bytes = take_bytes(in);
        ret->host = (int32_t)(take(in) % 4) - 1;
        ret->to_host = take(in) % 2;
        ret->pins = take(in) % 2;
}

static void take_request(struct input *in, struct keeper_request *ret)
{
        memset(ret, 0, sizeof(*ret));
        ret->version = KEEPER_VERSION + (take(in) == 255);
        ret->op = take(in) % (KEEPER_N_OPS + 1);
        ret->share = take(in) % 3;
        ret->n = take(in) % (DEVICE_COPIES + 2);
        ret->key = take(in) % 8;
        ret->host = take(in) % 4;
        ret->clears = take(in) % 2;
        for (size_t i = 0; i < DEVICE_MAKES; i++)
                ret->n_bytes[i] = take_bytes(in);
        for (size_t i = 0; i < ret->n && i < 3; i++)
                take_copy(in, &ret->copies[i]);
}

static int take_fd(struct input *in)
{
        int fd = memfd_make("fuzz"), seals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
        uint64_t n_bytes = take_bytes(in);

        if (fd < 0)
                abort();
        if (n_bytes <= 4 * MIB && ftruncate(fd, (off_t)n_bytes) == 0 && take(in) % 4 > 0)
                (void)fcntl(fd, F_ADD_SEALS, seals);
        return fd;
}

static void send_one(struct input *in, int to)
{
        struct keeper_request request;
        int fds[KEEPER_FDS];
        size_t n_fds = take(in) % 4, n_bytes = sizeof(request);

        take_request(in, &request);
        if (request.op == KEEPER_COPY && take(in) % 8 > 0)
                n_fds = request.n < KEEPER_FDS ? request.n : KEEPER_FDS;
        for (size_t i = 0; i < n_fds; i++)
                fds[i] = take_fd(in);
        if (take(in) == 254)
                n_bytes -= 1 + take(in);
        if (keeper_send(to, &request, n_bytes, fds, n_fds) < 0)
                abort();
        while (n_fds > 0)
                close(fds[--n_fds]);
}

/* Of one bfcd; others come after it. true: none comes any more. */
static bool connect_once(struct keeper *k, struct input *in)
{
        struct keeper_request hello;
        int ends[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                abort();
        memset(&hello, 0, sizeof(hello));
        hello.version = KEEPER_VERSION;
        if (take(in) % 8 > 0 && keeper_send(ends[0], &hello, sizeof(hello), NULL, 0) < 0)
                abort();
        for (size_t i = 0; i < N_REQUESTS && in->n > 0; i++)
                send_one(in, ends[0]);
        shutdown(ends[0], SHUT_WR);
        (void)keeper_serve(k, ends[1]);
        close(ends[0]);
        close(ends[1]);
        return keeper_is_over(k) || in->n == 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        struct input in = { data, n_data };
        struct keeper *k = keeper_new("host");

        if (!k)
                abort();
        while (!connect_once(k, &in))
                ;
        keeper_free(k);
        return 0;
}
