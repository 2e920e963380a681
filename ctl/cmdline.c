/* Command lines of other processes; see cmdline.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One child answers all questions. One that does not answer in time is killed and another takes its place. It stays in
 * `stuck` until the kernel has ended it, so their number is bounded. */
#include "ctl/cmdline.h"

#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ctl/clock.h"

#define MAX_BYTES 4096u /* of an answer */

static struct {
        pid_t pid; /* 0: there is none */
        int fd;
} child = { 0, -1 };

static struct {
        uint64_t uid, until_ms; /* 0: the place is free */
        pid_t child;            /* 0: it has ended */
} stuck[CMDLINE_STUCK];

/* ---- the child ---------------------------------------------------------------- */

/* The byte behind the text tells an empty one from the end of the socket. */
static void answer(int fd, uint64_t pid)
{
        char path[64], text[MAX_BYTES + 1];
        ssize_t n = 0;
        int file;

        snprintf(path, sizeof(path), "/proc/%" PRIu64 "/cmdline", pid);
        file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
                n = read(file, text, MAX_BYTES);
                close(file);
        }
        n = n > 0 ? n : 0;
        text[n] = '\0';
        (void)send(fd, text, (size_t)n + 1, MSG_NOSIGNAL);
}

/* It holds neither the output nor a socket of its parent open. */
static void __attribute__((noreturn)) serve(int fd)
{
        uint64_t pid;

        (void)dup2(fd, STDIN_FILENO);
        if (syscall(SYS_close_range, STDOUT_FILENO, ~0u, 0) < 0) { /* Linux before 5.9 */
                close(STDOUT_FILENO);
                close(STDERR_FILENO);
        }
        while (recv(STDIN_FILENO, &pid, sizeof(pid), 0) == (ssize_t)sizeof(pid))
                answer(STDIN_FILENO, pid);
        _exit(0);
}

/* ---- its parent --------------------------------------------------------------- */

/* It ends by itself when its socket does. */
void cmdline_stop(void)
{
        if (child.pid == 0)
                return;
        close(child.fd);
        (void)waitpid(child.pid, NULL, 0);
        child.pid = 0;
        child.fd = -1;
}

static bool start(void)
{
        static bool stops_at_exit;
        int fds[2];

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) < 0)
                return false;
        child.pid = fork();
        if (child.pid == 0)
                serve(fds[1]);
        close(fds[1]);
        child.fd = fds[0];
        if (child.pid < 0) {
                close(child.fd);
                child.pid = 0;
                return false;
        }
        if (!stops_at_exit)
                stops_at_exit = atexit(cmdline_stop) == 0;
        return true;
}

/* The child waits until SIGKILL reaches it. */
static void leave(uint64_t uid)
{
        for (size_t i = 0; i < CMDLINE_STUCK; i++) {
                if (stuck[i].until_ms != 0)
                        continue;
                stuck[i].uid = uid;
                stuck[i].until_ms = clock_ms() + CMDLINE_PAUSE_MS;
                stuck[i].child = child.pid;
                break;
        }
        (void)kill(child.pid, SIGKILL);
        close(child.fd);
        child.pid = 0;
        child.fd = -1;
}

static bool may_read(uint64_t uid)
{
        bool has_room = false, is_paused = false;

        for (size_t i = 0; i < CMDLINE_STUCK; i++) {
                if (stuck[i].child != 0 && waitpid(stuck[i].child, NULL, WNOHANG) != 0)
                        stuck[i].child = 0;
                if (stuck[i].child == 0 && clock_ms() >= stuck[i].until_ms)
                        stuck[i].until_ms = 0;
                has_room = has_room || stuck[i].until_ms == 0;
                is_paused = is_paused || (stuck[i].until_ms != 0 && stuck[i].uid == uid);
        }
        return has_room && !is_paused;
}

/* False: not in time. A signal, such as of a window that changed its size, interrupts the wait. */
static bool wait_for_answer(void)
{
        uint64_t end_ms = clock_ms() + CMDLINE_WAIT_MS, now_ms;
        int r = -1;

        while (r < 0 && (now_ms = clock_ms()) < end_ms)
                r = poll(&(struct pollfd){ .fd = child.fd, .events = POLLIN }, 1, (int)(end_ms - now_ms));
        return r > 0;
}

size_t cmdline_read(uint64_t pid, uint64_t uid, char *ret, size_t n_max)
{
        ssize_t n = 0;

        ret[0] = '\0';
        if (!may_read(uid))
                return 0;
        for (int tries = 0; n <= 0 && tries < 2; tries++) { /* the child may have been killed */
                if (child.pid == 0 && !start())
                        return 0;
                if (send(child.fd, &pid, sizeof(pid), MSG_NOSIGNAL) == (ssize_t)sizeof(pid)) {
                        if (!wait_for_answer()) {
                                leave(uid);
                                return 0;
                        }
                        n = recv(child.fd, ret, n_max, 0);
                }
                if (n <= 0)
                        cmdline_stop();
        }
        if (n <= 0)
                n = 1;
        ret[n - 1] = '\0';
        return (size_t)n - 1;
}
