/* bfcd-keeper: owns the memory of one device for bfcd, which starts it with a socket as its standard input. Another program
 * may start it, too, with anything else as its standard input: then it makes the socket itself.
 *
 *   bfcd-keeper DEVICE [--allow-mps]
 *                                      The socket is connected: it ends with bfcd, whatever its device does then.
 *   bfcd-keeper DEVICE --socket PATH [--allow-mps]
 *                                      The socket is bound to PATH: it listens, and one bfcd after the other connects. It
 *                                      ends when bfcd says so, at SIGTERM, and when PATH is no more.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "device/device.h"
#include "keeper/serve.h"
#include "keeper/wire.h"

#define LOOK_MS 1000 /* without a bfcd */

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

/* As the first process of a container it has no default action of signals. */
static void end_now(int number)
{
        (void)number;
        _exit(EXIT_SUCCESS);
}

/* What ends bfcd, as a signal from a terminal or a service manager does, ends this process with it and not before. One that
 * outlives bfcd is ended by SIGTERM, as at the end of the machine. */
static void ignore_signals(bool is_named)
{
        static const int signals[] = { SIGINT, SIGHUP, SIGQUIT, SIGPIPE };

        for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
                signal(signals[i], SIG_IGN);
        signal(SIGTERM, is_named ? end_now : SIG_IGN);
}

/* ---- one that outlives bfcd ---------------------------------------------------- */

/* The socket can still be found. If not, no bfcd ever comes back. */
static bool is_there(const char *path, const struct stat *was)
{
        struct stat st;

        return stat(path, &st) == 0 && st.st_dev == was->st_dev && st.st_ino == was->st_ino;
}

static bool is_ours(int fd)
{
        struct ucred who;
        socklen_t n = sizeof(who);

        return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 && who.uid == geteuid();
}

/* With its folder, as bfcd makes it. The socket of one that has ended is replaced. -EADDRINUSE: one listens. -ENOTSOCK: it is
 * another file, which stays. */
static int make_socket(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        char folder[sizeof(address.sun_path)];
        struct stat st;
        int fd, r = 0;

        if (strlen(path) >= sizeof(address.sun_path))
                return -ENAMETOOLONG;
        strcpy(address.sun_path, path);
        strcpy(folder, path);
        if (mkdir(dirname(folder), 0700) < 0 && errno != EEXIST)
                return -errno;
        if (lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode)) /* connect() would say ECONNREFUSED */
                return -ENOTSOCK;
        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
                return -errno;
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0 || errno == EAGAIN)
                r = -EADDRINUSE;
        else if (errno == ECONNREFUSED && unlink(path) < 0)
                r = -errno;
        close(fd);
        if (r < 0)
                return r;
        fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        if (fd < 0)
                return -errno;
        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || dup2(fd, STDIN_FILENO) < 0)
                r = -errno;
        close(fd);
        return r;
}

/* One bfcd after the other. */
static int serve_named(struct keeper *k, const char *path)
{
        struct pollfd listener = { .fd = STDIN_FILENO, .events = POLLIN };
        struct stat was;
        int fd, r = stat(path, &was) < 0 || listen(STDIN_FILENO, KEEPER_BACKLOG) < 0 ? -errno : 0;

        (void)prctl(PR_SET_NAME, "bfcd-kept"); /* for who lists processes */
        while (r == 0 && !keeper_is_over(k) && is_there(path, &was)) {
                if (poll(&listener, 1, LOOK_MS) <= 0)
                        continue;
                fd = accept4(STDIN_FILENO, NULL, NULL, SOCK_CLOEXEC);
                if (fd < 0)
                        continue;
                if (is_ours(fd))
                        (void)keeper_serve(k, fd);
                close(fd);
        }
        return r;
}

/* ---- one that ends with bfcd ----------------------------------------------------- */

static int serve_one(struct keeper *k)
{
        pthread_t thread;
        int r = -pthread_create(&thread, NULL, watch, NULL);

        return r == 0 ? keeper_serve(k, STDIN_FILENO) : r;
}

/* An fd that is kept is one of this process. */
static void raise_fd_limit(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
}

int main(int argc, char **argv)
{
        bool is_named = argc >= 4 && strcmp(argv[2], KEEPER_SOCKET) == 0;
        int n = is_named ? 4 : 2;
        bool allows_mps = argc == n + 1 && strcmp(argv[n], KEEPER_ALLOW_MPS) == 0;
        struct keeper *k;
        int r;

        if ((argc != n && !allows_mps) || (!is_named && !is_socket(STDIN_FILENO))) {
                fprintf(stderr,
                        "bfcd-keeper owns a device's memory for bfcd, which starts it; see bfcd(8)\n");
                return EXIT_FAILURE;
        }
        r = is_socket(STDIN_FILENO) ? 0 : make_socket(argv[3]);
        if (r < 0) {
                fprintf(stderr, "bfcd-keeper: %s: %s\n", argv[3], strerror(-r));
                return EXIT_FAILURE;
        }
        if (allows_mps)
                device_cuda_allow_mps();
        ignore_signals(is_named);
        /* A service manager's fds, which bfcd has not taken over yet, would keep memory. */
        if (syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0) < 0) {
                fprintf(stderr, "bfcd-keeper: close_range(): %s; it needs Linux 5.9\n", strerror(errno));
                return EXIT_FAILURE;
        }
        raise_fd_limit();
        k = keeper_new(argv[1]);
        if (!k)
                r = -ENOMEM;
        else
                r = is_named ? serve_named(k, argv[3]) : serve_one(k);
        if (r < 0)
                fprintf(stderr, "bfcd-keeper: %s: %s\n", argv[1], strerror(-r));
        keeper_free(k);
        _exit(r < 0 ? EXIT_FAILURE : EXIT_SUCCESS);
}
