/* Out-of-band bytes (MSG_OOB) between frames, inside frames and beside half frames. The kernel marks
 * such a byte in the stream: what the receiver reads ends there, and a poll reports it in its own way.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define HALF_BYTES 9u /* of a frame whose length says 600 */
#define N_LINES    4u

/* A Usage request. */
static size_t put_frame(uint8_t *at)
{
        Bfcd__Usage usage = BFCD__USAGE__INIT;
        Bfcd__Request r = REQUEST(USAGE, usage, &usage);

        r.id = 1;
        return raw_pack(&r, at);
}

/* False: the daemon hung up, or takes nothing. */
static bool put(int fd, const uint8_t *bytes, size_t n, int flags)
{
        return send(fd, bytes, n, flags | MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n;
}

static void drain(int fd)
{
        uint8_t bytes[4096];

        while (recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
                ;
}

/* Frames with urgent bytes about them. The daemon may read such a byte as one of the stream or not at
 * all, so some of these end the session. */
static bool send_round(int fd, unsigned round)
{
        static const uint8_t zero[4];
        uint8_t frame[64];
        size_t n = put_frame(frame);

        switch (round % 5) {
        case 0: /* between frames */
                return put(fd, frame, n, 0) && put(fd, zero, 1, MSG_OOB);
        case 1: /* inside one */
                return put(fd, frame, n / 2, 0) && put(fd, frame + n / 2, 1, MSG_OOB) &&
                       put(fd, frame + n / 2 + 1, n - n / 2 - 1, 0);
        case 2: /* nothing else */
                return put(fd, zero, 1, MSG_OOB) && put(fd, zero, 1, MSG_OOB);
        case 3: /* the last byte of one */
                return put(fd, frame, n - 1, 0) && put(fd, frame + n - 1, 1, MSG_OOB);
        default: /* many frames, each marked */
                for (unsigned i = 0; i < 32; i++)
                        if (!put(fd, frame, n, MSG_OOB))
                                return false;
                return true;
        }
}

/* Before the hello: half a frame, and an urgent byte now and then. */
static void send_half(int *fd, const struct attack_stage *stage, unsigned round)
{
        static const uint8_t half[HALF_BYTES] = { 600 & 0xff, 600 >> 8 };

        if (*fd < 0) {
                *fd = attack_socket(stage);
                (void)put(*fd, half, sizeof(half), 0);
        }
        if (!put(*fd, half + 4, 1, round % 2 ? MSG_OOB : 0)) {
                close(*fd);
                *fd = -1;
        }
}

static void act(struct attack_stage *stage)
{
        struct raw *raw = attack_session(stage);
        int halves[N_LINES];

        for (unsigned i = 0; i < N_LINES; i++)
                halves[i] = -1;
        attack_is_up(stage);
        for (unsigned round = 0;; round++) {
                struct pollfd p = { .fd = raw->fd, .events = POLLOUT };

                drain(raw->fd);
                if (!send_round(raw->fd, round) && errno != EAGAIN) {
                        raw_close(raw);
                        raw = attack_session(stage);
                }
                send_half(&halves[round % N_LINES], stage, round);
                attack_count(stage, 1);
                (void)poll(&p, 1, 10);
        }
}

const struct attack attack_urgent = {
        .key = "urgent",
        .what = "out-of-band bytes between and in frames",
        .n_processes = 2,
        .act = act,
};
