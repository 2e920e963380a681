/* The side of the test; see stand_in.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/manager/stand_in.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/manager/order.h"

struct stand_in {
        pid_t pid; /* of its process */
        int socket;
};

static int64_t now_ms(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int ask(struct stand_in *s, enum order_kind kind, int number, struct answer *ret)
{
        struct order order = { .kind = kind, .number = number };
        ssize_t n;

        if (send(s->socket, &order, sizeof(order), MSG_NOSIGNAL) < 0)
                return -errno;
        do
                n = recv(s->socket, ret, sizeof(*ret), 0);
        while (n < 0 && errno == EINTR);
        if (n != sizeof(*ret))
                return n < 0 ? -errno : -ENODATA;
        return ret->r;
}

int stand_in_start(const struct stand_in_options *options, struct stand_in **ret)
{
        struct stand_in *s = calloc(1, sizeof(*s));
        struct answer answer;
        pid_t parent = getpid();
        int sockets[2], r;

        if (!s)
                return -ENOMEM;
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, sockets) < 0) {
                r = -errno;
                free(s);
                return r;
        }
        fflush(NULL);
        s->pid = fork();
        if (s->pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(sockets[0]);
                if (getppid() == parent)
                        manager_run(options, sockets[1]);
                _exit(98);
        }
        r = s->pid < 0 ? -errno : 0;
        s->socket = sockets[0];
        close(sockets[1]);
        if (r == 0)
                r = ask(s, ORDER_LOOK, 0, &answer); /* it has bound its sockets */
        if (r < 0) {
                stand_in_end(s);
                return r;
        }
        *ret = s;
        return 0;
}

struct stand_in *stand_in_end(struct stand_in *s)
{
        if (!s)
                return NULL;
        close(s->socket);
        if (s->pid > 0)
                waitpid(s->pid, NULL, 0);
        free(s);
        return NULL;
}

pid_t stand_in_pid(const struct stand_in *s)
{
        return s->pid;
}

int stand_in_look(struct stand_in *s, struct stand_in_state *ret)
{
        struct answer answer;
        int r = ask(s, ORDER_LOOK, 0, &answer);

        if (r == 0)
                *ret = answer.state;
        return r;
}

int stand_in_signal(struct stand_in *s, int signal)
{
        struct answer answer;

        return ask(s, ORDER_SIGNAL, signal, &answer);
}

int stand_in_hold(struct stand_in *s, bool is_held)
{
        struct answer answer;

        return ask(s, ORDER_HOLD, is_held, &answer);
}

int stand_in_wait_ready(struct stand_in *s, unsigned n_starts, int timeout_ms)
{
        int64_t deadline = now_ms() + timeout_ms;
        struct stand_in_state state;
        int r;

        while ((r = stand_in_look(s, &state)) == 0 && (state.n_starts < n_starts || !state.is_ready)) {
                if (now_ms() > deadline)
                        return -ETIME;
                usleep(1000);
        }
        return r;
}

int stand_in_wait_end(struct stand_in *s, int timeout_ms)
{
        int64_t deadline = now_ms() + timeout_ms;
        struct stand_in_state state;
        int r;

        while ((r = stand_in_look(s, &state)) == 0 && state.pid != 0) {
                if (now_ms() > deadline)
                        return -ETIME;
                usleep(1000);
        }
        return r;
}

int stand_in_restart(struct stand_in *s, int signal, int timeout_ms)
{
        struct stand_in_state state = { 0 };
        int r = stand_in_look(s, &state);

        if (r == 0)
                r = stand_in_signal(s, signal);
        return r < 0 ? r : stand_in_wait_ready(s, state.n_starts + 1, timeout_ms);
}
