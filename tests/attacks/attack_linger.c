/* TCP sockets whose close waits are sent to the daemon: before the hello, after it, and in
 * connections that stay open, so that some wait in the listening socket's queue when a daemon starts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "tests/attacks/attack.h"
#include "tests/integration/lingering.h"

#define LINGER_S 15
#define N_KEPT   48 /* their peers stay open, so that the daemon's close waits */

static void on_alarm(int number)
{
        (void)number;
}

/* Where the daemon has closed its copy already our close would wait: the timer interrupts it. */
static void let_signals_interrupt(void)
{
        const struct sigaction action = { .sa_handler = on_alarm, .sa_flags = SA_RESTART };
        const struct itimerval often = { { 0, 5000 }, { 0, 5000 } };

        sigaction(SIGALRM, &action, NULL);
        setitimer(ITIMER_REAL, &often, NULL);
}

static int try_connect(const struct attack_stage *stage)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

        memcpy(address.sun_path, stage->socket, sizeof(address.sun_path));
        if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                return fd;
        if (fd >= 0)
                close(fd);
        return -1;
}

static void act(struct attack_stage *stage)
{
        static struct lingering kept[N_KEPT];
        static int connections[N_KEPT];
        struct raw *raw = NULL;

        for (size_t i = 0; i < N_KEPT; i++) {
                kept[i] = (struct lingering){ -1, -1 };
                connections[i] = -1;
        }
        let_signals_interrupt();
        attack_is_up(stage);
        for (size_t i = 0;; i = (i + 1) % N_KEPT) {
                struct lingering *l = &kept[i];

                lingering_free(l);
                if (connections[i] >= 0)
                        close(connections[i]);
                connections[i] = -1;
                if (lingering_new(LINGER_S, l) < 0) {
                        usleep(1000);
                        continue;
                }
                if (i % 8 == 0) { /* as a session, which the daemon ends for it */
                        raw = raw_connect(stage->socket, ATTACKER);
                        if (raw)
                                (void)fd_send(raw->fd, "x", 1, l->fd, 0);
                        raw = raw_close(raw);
                } else {
                        connections[i] = try_connect(stage);
                        if (connections[i] >= 0)
                                (void)fd_send(connections[i], "x", 1, l->fd, MSG_DONTWAIT);
                }
                lingering_close(l);
                attack_count(stage, 1); /* also where the kernel refused it */
        }
}

const struct attack attack_linger = {
        .key = "linger",
        .what = "TCP sockets that linger for 15 s are sent to the daemon",
        .n_processes = 2,
        .act = act,
        .fills_places = true,
        .log_line = "too many", /* connections without a hello, or that wait to be closed */
};
