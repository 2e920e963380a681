/* Attaches a shared block of its own tenant again and again, and acknowledges none of its extents. One
 * session reads its replies, the other one does not read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define MIB         (UINT64_C(1) << 20)
#define MOST_BYTES  (132 * MIB) /* 66 extents: more than may be unacknowledged */
#define BATCH_BYTES 8192u

struct batch {
        uint8_t bytes[BATCH_BYTES];
        size_t n_bytes, n_requests;
};

static void batch_fill(struct batch *b, const char *name)
{
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &attach);

        attach.name = (char *)(uintptr_t)name;
        b->n_bytes = b->n_requests = 0;
        while (b->n_bytes + 128 < BATCH_BYTES) {

                r.id = ++b->n_requests;
                b->n_bytes += raw_pack(&r, b->bytes + b->n_bytes);
        }
}

/* The largest block that it gets. */
static int malloc_most(struct raw *raw, Bfcd__Block *ret)
{
        int r = -ENOMEM;

        for (uint64_t n_bytes = MOST_BYTES; r < 0 && r != -EIO && n_bytes > MIB; n_bytes /= 2)
                r = raw_malloc(raw, 0, n_bytes, ret);
        return r;
}

/* A session that shares such a block. A restart of the daemon (-EIO) ends sessions that do not resume, so then another
 * session shares another block. */
static struct raw *publish(const struct attack_stage *stage, char *ret_name, size_t size)
{
        for (unsigned n_tries = 0;; n_tries++) {
                struct raw *raw = attack_session(stage);
                Bfcd__Block block;
                int r = malloc_most(raw, &block);

                snprintf(ret_name, size, "acks-%d-%u", (int)getpid(), n_tries);
                if (r == 0) {
                        r = raw_publish(raw, block.block_id, ret_name);
                        if (r == 0)
                                return raw;
                        if (r != -EIO) {
                                fprintf(stderr, "attack 'acks': %s\n", raw_refusal());
                                exit(1);
                        }
                }
                raw_close(raw);
        }
}

struct stream {
        struct raw *raw;
        size_t at; /* in the batch */
};

static void stream_restart(struct stream *s, const struct attack_stage *stage)
{
        raw_close(s->raw);
        s->raw = attack_session(stage);
        s->at = 0;
}

/* Sends what the daemon takes. */
static void stream_send(struct stream *s, const struct batch *b, struct attack_stage *stage)
{
        for (;;) {
                ssize_t n =
                        send(s->raw->fd, b->bytes + s->at, b->n_bytes - s->at, MSG_NOSIGNAL | MSG_DONTWAIT);

                if (n < 0 && errno != EAGAIN)
                        stream_restart(s, stage);
                if (n <= 0)
                        return;
                s->at = (s->at + (size_t)n) % b->n_bytes;
                attack_count(stage, s->at == 0 ? b->n_requests : 0);
        }
}

/* Fds that come with what it reads are dropped by the kernel: there is no room for them. */
static void stream_drain(const struct stream *s)
{
        static uint8_t drain[1 << 16];

        while (recv(s->raw->fd, drain, sizeof(drain), MSG_DONTWAIT) > 0)
                ;
}

static void act(struct attack_stage *stage)
{
        static struct batch batch;
        struct stream streams[2]; /* the second one reads */
        char name[48];
        struct raw *publisher = publish(stage, name, sizeof(name));

        (void)publisher; /* the block is shared as long as this session */
        batch_fill(&batch, name);
        for (unsigned i = 0; i < 2; i++)
                streams[i] = (struct stream){ .raw = attack_session(stage) };
        attack_is_up(stage);
        for (;;) {
                struct pollfd polls[2] = {
                        { .fd = streams[0].raw->fd, .events = POLLOUT },
                        { .fd = streams[1].raw->fd, .events = POLLIN | POLLOUT },
                };

                (void)poll(polls, 2, -1);
                stream_drain(&streams[1]);
                for (unsigned i = 0; i < 2; i++)
                        stream_send(&streams[i], &batch, stage);
        }
}

const struct attack attack_acks = {
        .key = "acks",
        .what = "attaches a shared block, acknowledges nothing",
        .n_processes = 2,
        .act = act,
};
