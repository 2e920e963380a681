/* What a broken keeper could answer to bfcd: any results, numbers of extents and fds, and datagrams that are no replies, or
 * none. The device is a GPU behind a keeper, which is a thread here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "keeper/remote.h"
#include "keeper/wire.h"
#include "proto/memfd.h"
#include "tests/fuzz/input.h"

#define N_CALLS 24

/* ---- the keeper: it has one part of the input ------------------------------------- */

struct keeper_end {
        int listener;
        struct input in;
};

/* Mostly what was asked for. */
static void take_reply(struct input *in, const struct keeper_request *q, struct keeper_reply *ret)
{
        static const int32_t results[] = { -19, -12, -11, -24, -131, 1, INT32_MIN, -71 };
        uint8_t odd = take(in);

        memset(ret, 0, sizeof(*ret));
        ret->version = KEEPER_VERSION + (odd == 255);
        ret->result = odd >= 192 && odd < 255 ? results[odd % 8] : 0;
        ret->granularity = 2 * MIB;
        ret->n_bytes = take(in);
        ret->n_extents = q->op == KEEPER_MAKE ? q->n : q->op == KEEPER_TAKE;
        if (take(in) >= 224)
                ret->n_extents = take(in);
        for (size_t i = 0; i < DEVICE_MAKES; i++)
                ret->extents[i] =
                        (struct keeper_extent){ .key = q->key + i,
                                                .n_bytes = q->op == KEEPER_TAKE ? 2 * MIB : q->n_bytes[i],
                                                .share = q->share };
        odd = take(in);
        if (odd >= 224)
                ret->extents[odd % DEVICE_MAKES].n_bytes = odd;
        if (odd >= 240)
                ret->extents[odd % DEVICE_MAKES].share = odd % 3;
        for (size_t i = 0; i < DEVICE_COPIES; i++)
                ret->pins[i] = (int32_t)(take(in) % 3) - 1;
        memset(ret->sentence, 'x', take(in) % 8 == 0 ? sizeof(ret->sentence) : 8);
}

static size_t take_fds(struct input *in, const struct keeper_request *q, int ret[static KEEPER_FDS])
{
        size_t n = q->op == KEEPER_MAKE && q->share == DEVICE_SHARE_FD ? q->n : 0;

        if (take(in) >= 224)
                n = take(in) % (KEEPER_FDS + 1);
        for (size_t i = 0; i < n && i < KEEPER_FDS; i++)
                if ((ret[i] = memfd_make("fuzz")) < 0)
                        abort();
        return n < KEEPER_FDS ? n : KEEPER_FDS;
}

/* False: the connection ends. */
static bool answer(struct input *in, int fd)
{
        struct keeper_request q;
        struct keeper_reply reply;
        int fds[KEEPER_FDS];
        size_t n_fds, n_bytes = sizeof(reply);

        if (recv(fd, &q, sizeof(q), 0) != sizeof(q) || q.op == KEEPER_END || take(in) == 254)
                return false;
        take_reply(in, &q, &reply);
        n_fds = take_fds(in, &q, fds);
        if (take(in) == 253)
                n_bytes -= 1 + take(in);
        (void)keeper_send(fd, &reply, n_bytes, fds, n_fds);
        while (n_fds > 0)
                close(fds[--n_fds]);
        return true;
}

/* Of one caller at a time, until the listener is shut. */
static void *be_keeper(void *userdata)
{
        struct keeper_end *k = userdata;
        int fd;

        while ((fd = accept4(k->listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
                while (answer(&k->in, fd))
                        ;
                close(fd);
        }
        return NULL;
}

/* ---- bfcd -------------------------------------------------------------------------- */

#define N_EXTENTS 8

struct caller {
        struct device *device;
        struct device_extent extents[N_EXTENTS];
        struct device_pins pins;
        struct device_extent host;
};

static void do_make(struct caller *c, struct input *in)
{
        static const struct device_supply supply = { 0 };
        size_t at = take(in) % N_EXTENTS, n = 1 + take(in) % 3;
        struct device_extent made[3];

        for (size_t i = 0; i < n; i++)
                made[i] = (struct device_extent){ .fd = -1, .n_bytes = 2 * MIB };
        if (device_make_all(c->device, &supply, (enum device_share)(take(in) % 2), made, n) < 0)
                return;
        for (size_t i = 0; i < n; i++) {
                struct device_extent *e = &c->extents[(at + i) % N_EXTENTS];

                (void)device_destroy(c->device, e);
                *e = made[i];
        }
}

static void do_call(struct caller *c, struct input *in)
{
        struct device_extent *e = &c->extents[take(in) % N_EXTENTS], taken;
        const struct device_copy copy = {
                .extent = e, .host = &c->host, .n_bytes = 2 * MIB, .pins = take(in) % 2 ? &c->pins : NULL
        };
        struct device_facts facts;
        char sentence[512];
        uint64_t n_bytes;

        switch (take(in) % 8) {
        case 0:
                (void)device_destroy(c->device, e);
                return;
        case 1:
                if (device_take(c->device, take(in), 2 * MIB, &taken) == 0)
                        (void)device_destroy(c->device, &taken);
                return;
        case 2:
                if (e->n_bytes > 0)
                        (void)device_copy(c->device, &copy, 1);
                return;
        case 3:
                (void)device_facts(c->device, &facts);
                (void)device_foreign_bytes(c->device, &n_bytes);
                return;
        case 4:
                (void)device_unpin(&c->host);
                return;
        case 5:
                if (take(in) < 32) {
                        device_close(c->device);
                        (void)device_open(c->device, sentence, sizeof(sentence));
                }
                return;
        default:
                do_make(c, in);
        }
}

static void call_all(struct keepers *keepers, struct input *in)
{
        struct caller c = { .host = DEVICE_EXTENT_EMPTY };
        char sentence[512];

        if (keeper_device_new(keepers, "cuda:0", &c.device, sentence, sizeof(sentence)) < 0)
                return;
        for (size_t i = 0; i < N_EXTENTS; i++)
                c.extents[i] = DEVICE_EXTENT_EMPTY;
        c.host.fd = memfd_make("fuzz-host");
        c.host.n_bytes = 2 * MIB;
        for (int i = 0; i < N_CALLS && in->n > 0; i++)
                do_call(&c, in);
        (void)device_unpin(&c.host);
        for (size_t i = 0; i < N_EXTENTS; i++)
                (void)device_destroy(c.device, &c.extents[i]);
        device_end(c.device);
        device_free(c.device);
        close(c.host.fd);
}

static int listen_in(const char *folder)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        snprintf(address.sun_path, sizeof(address.sun_path), "%s/keepers/cuda:0", folder);
        if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 4) < 0)
                abort();
        return fd;
}

static void remove_all(const char *folder)
{
        char path[64];

        snprintf(path, sizeof(path), "%s/keepers/cuda:0", folder);
        (void)unlink(path);
        snprintf(path, sizeof(path), "%s/keepers", folder);
        if (rmdir(path) < 0 || rmdir(folder) < 0)
                abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        char folder[] = "/tmp/fuzz-remote-XXXXXX", admin[64], sentence[512];
        struct input in = { data, n_data / 2 };
        struct keeper_end k = { .in = { data + in.n, n_data - in.n } };
        struct keepers *keepers;
        pthread_t thread;

        if (!mkdtemp(folder))
                abort();
        snprintf(admin, sizeof(admin), "%s/admin.sock", folder);
        if (keepers_open(admin, &keepers, sentence, sizeof(sentence)) < 0)
                abort();
        k.listener = listen_in(folder);
        if (pthread_create(&thread, NULL, be_keeper, &k) != 0)
                abort();
        call_all(keepers, &in);
        keepers_close(keepers);
        shutdown(k.listener, SHUT_RDWR);
        pthread_join(thread, NULL);
        close(k.listener);
        remove_all(folder);
        return 0;
}
