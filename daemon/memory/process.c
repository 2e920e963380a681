/* Processes; see process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int process_read(const char *proc, pid_t pid, struct process *ret)
{
        char path[64], buf[1024], *at;
        int parent, fd;
        ssize_t n;

        if (pid <= 0 || snprintf(path, sizeof(path), "%s/%d/stat", proc, (int)pid) >= (int)sizeof(path))
                return -ESRCH;
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return errno == ENOENT || errno == EACCES ? -ESRCH : -errno;
        n = read(fd, buf, sizeof(buf) - 1);
        close(fd);
        if (n <= 0)
                return -ESRCH;
        buf[n] = '\0';
        at = strrchr(buf, ')'); /* the name before it may contain anything */
        *ret = (struct process){ .pid = pid };
        if (!at || sscanf(at + 1,
                          " %c %d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d "
                          "%" SCNu64,
                          &ret->state, &parent, &ret->start_time) != 3)
                return -ESRCH;
        ret->parent = parent;
        return 0;
}

int process_ancestors(const char *proc, pid_t pid, struct process *ret, size_t n_max)
{
        size_t n = 0;

        do {
                int r = n < n_max ? process_read(proc, pid, &ret[n]) : -ELOOP;

                if (r < 0)
                        return r;
                pid = ret[n++].parent;
        } while (pid != 0);
        return (int)n;
}
