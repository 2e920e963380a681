/* Eight sessions in one process, with as many waiting requests as each may have: Mallocs that no memory
 * is there for and Attaches of names that are not published. Threads wait beside them for the same, each
 * with a session of its own that it ends in the middle. Requests that were refused are sent again.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/attacks/attack.h"

#define N_SESSIONS 8u
#define N_THREADS  4u
#define N_MALLOCS  40u /* with the attaches more than may wait */
#define N_ATTACHES 32u
#define WAIT_MS    200u
#define WAIT_BYTES (UINT64_C(1) << 21)

/* Errors are seen by the next read. */
static void send_waits(const struct raw *raw, struct attack_stage *stage)
{
        Bfcd__Malloc much = BFCD__MALLOC__INIT;
        Bfcd__Attach attach = BFCD__ATTACH__INIT;
        uint8_t frame[256];

        much.n_bytes = WAIT_BYTES;
        much.wait_ms = WAIT_MS;
        attach.wait_ms = WAIT_MS;
        attach.name = (char *)(uintptr_t) "what is never published";
        for (unsigned i = 0; i < N_MALLOCS + N_ATTACHES; i++) {
                Bfcd__Request r = BFCD__REQUEST__INIT;
                size_t n;

                r.id = i + 1;
                if (i < N_ATTACHES) {
                        r.body_case = BFCD__REQUEST__BODY_ATTACH;
                        r.attach = &attach;
                } else {
                        r.body_case = BFCD__REQUEST__BODY_MALLOC;
                        r.malloc = &much;
                }
                n = raw_pack(&r, frame);
                if (send(raw->fd, frame, n, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
                        return;
                attack_count(stage, 1);
        }
}

/* What came is dropped unread. False: the daemon hung up. */
static bool drain(const struct raw *raw)
{
        static __thread uint8_t bytes[1 << 14];
        ssize_t n;

        while ((n = recv(raw->fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
                ;
        return n < 0 && errno == EAGAIN;
}

static void *wait_and_leave(void *arg)
{
        struct attack_stage *stage = arg;

        for (;;) {
                struct raw *raw = attack_session(stage);

                send_waits(raw, stage);
                (void)poll(NULL, 0, WAIT_MS / 4);
                raw_close(raw);
        }
        return NULL;
}

static void act(struct attack_stage *stage)
{
        struct raw *raws[N_SESSIONS], *holder = attack_session(stage);
        pthread_t threads[N_THREADS];
        Bfcd__Block block;

        while (raw_malloc(holder, 0, WAIT_BYTES, &block) == 0)
                attack_count(stage, 1);
        for (unsigned i = 0; i < N_SESSIONS; i++)
                raws[i] = attack_session(stage);
        for (unsigned i = 0; i < N_THREADS; i++)
                (void)pthread_create(&threads[i], NULL, wait_and_leave, stage);
        attack_is_up(stage);
        for (;;) {
                for (unsigned i = 0; i < N_SESSIONS; i++) {
                        if (!drain(raws[i])) {
                                raw_close(raws[i]);
                                raws[i] = attack_session(stage);
                        }
                        send_waits(raws[i], stage);
                }
                (void)poll(NULL, 0, 1);
        }
}

const struct attack attack_waiters = {
        .key = "waiters",
        .what = "as many waiting requests as there may be",
        .n_processes = 2,
        .act = act,
};
