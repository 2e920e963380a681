/* bfcd-keeper DEVICE [--allow-mps]: owns the memory of one GPU for the bfcd that started it. Its standard input is the
 * socket to bfcd, and it ends when the other end is closed, whatever its device does then.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "keeper/orphans.h"
#include "keeper/serve.h"
#include "keeper/wire.h"

#define ORPHANS_MS 10000

static bool is_socket(int fd)
{
        socklen_t n = sizeof(int);
        int type;

        return getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &n) == 0 && type == SOCK_SEQPACKET;
}

/* The other thread may be in a call of the driver that does not return. */
static void *watch(void *userdata)
{
        struct pollfd fd = { .fd = STDIN_FILENO, .events = POLLRDHUP };

        (void)userdata;
        while (poll(&fd, 1, -1) < 0 && errno == EINTR)
                ;
        _exit(EXIT_SUCCESS);
}

/* What ends bfcd, as a signal from a terminal or a service manager does, ends this process with it and not before. */
static void ignore_signals(void)
{
        static const int signals[] = { SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE };

        for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
                signal(signals[i], SIG_IGN);
}

int main(int argc, char **argv)
{
        bool allows_mps = argc == 3 && strcmp(argv[2], KEEPER_ALLOW_MPS) == 0;
        pthread_t thread;
        int r;

        if ((argc != 2 && !allows_mps) || !is_socket(STDIN_FILENO)) {
                fprintf(stderr,
                        "bfcd-keeper owns a device's memory for bfcd, which starts it; see bfcd(8)\n");
                return EXIT_FAILURE;
        }
        if (allows_mps)
                device_cuda_allow_mps();
        ignore_signals();
        /* A service manager's fds, which bfcd has not taken over yet, would keep memory. */
        if (syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0) < 0) {
                fprintf(stderr, "bfcd-keeper: close_range(): %s; it needs Linux 5.9\n", strerror(errno));
                return EXIT_FAILURE;
        }
        r = -pthread_create(&thread, NULL, watch, NULL);
        keeper_await_orphans(ORPHANS_MS);
        if (r == 0)
                r = keeper_serve(STDIN_FILENO, argv[1]);
        if (r < 0)
                fprintf(stderr, "bfcd-keeper: %s: %s\n", argv[1], strerror(-r));
        _exit(r < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
}
