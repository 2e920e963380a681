/* See keeper_caller.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/keeper_caller.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "keeper/wire.h"

static int open_keeper(const char *folder, const char *id)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

        if (fd < 0)
                abort();
        if (snprintf(address.sun_path, sizeof(address.sun_path), "%s/keepers/%s", folder, id) >=
            (int)sizeof(address.sun_path))
                abort();
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                return fd;
        close(fd);
        return -1;
}

pid_t keeper_pid_in(const char *folder, const char *id)
{
        int fd = open_keeper(folder, id);
        struct ucred who = { .pid = 0 };
        socklen_t n = sizeof(who);

        if (fd < 0)
                return 0;
        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) < 0)
                abort();
        close(fd);
        return who.pid;
}

/* All but what every process has, and sockets. */
unsigned keeper_count_in(const char *folder)
{
        pid_t pid = keeper_pid_in(folder, "host");
        char path[320], to[256];
        struct dirent *entry;
        unsigned n_kept = 0;
        DIR *fds;

        snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
        fds = pid > 0 ? opendir(path) : NULL;
        while (fds && (entry = readdir(fds))) {
                ssize_t n;

                snprintf(path, sizeof(path), "/proc/%d/fd/%s", (int)pid, entry->d_name);
                n = readlink(path, to, sizeof(to) - 1);
                if (n <= 0 || atoi(entry->d_name) <= STDERR_FILENO)
                        continue;
                to[n] = '\0';
                n_kept += strncmp(to, "socket:", strlen("socket:")) != 0;
        }
        if (fds)
                closedir(fds);
        return n_kept;
}

static int ask(int to, unsigned op, uint64_t key, int fd)
{
        struct keeper_request q;
        struct keeper_reply reply;
        int fds[KEEPER_FDS];
        size_t n_fds = 0;

        memset(&q, 0, sizeof(q));
        q.version = KEEPER_VERSION;
        q.op = op;
        q.key = key;
        if (keeper_send(to, &q, sizeof(q), &fd, fd >= 0) < 0 ||
            keeper_receive(to, &reply, sizeof(reply), fds, &n_fds) < 0)
                return -ECONNRESET;
        return n_fds > 0 ? fds[0] : reply.result;
}

int keeper_ask_in(const char *folder, const char *id, unsigned op, uint64_t key, int fd)
{
        int to = open_keeper(folder, id), r;

        if (to < 0)
                return -ENOENT;
        r = ask(to, KEEPER_HELLO, 0, -1);
        if (r == 0)
                r = ask(to, op, key, fd);
        close(to);
        return r;
}
