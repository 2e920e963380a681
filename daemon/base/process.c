/* Processes; see process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define WALKS           4u /* while ancestors change */
#define READS_OF_PARENT 2u

int process_read(const char *proc, pid_t pid, struct process *ret)
{
        char path[64], buf[1024], *at;
        int parent, fd;
        ssize_t n;

        /* Of the main thread: stat of the process adds up times of all threads, which can be thousands. */
        if (pid <= 0 ||
            snprintf(path, sizeof(path), "%s/%d/task/%d/stat", proc, (int)pid, (int)pid) >= (int)sizeof(path))
                return -ESRCH;
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return errno == ENOENT ? -ESRCH : -errno;
        n = read(fd, buf, sizeof(buf) - 1);
        if (n < 0)
                n = -errno;
        close(fd);
        if (n <= 0)
                return n < 0 ? (int)n : -ESRCH;
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

/* /proc shows a process as a zombie when its main thread has exited. Only the kernel knows of the others: a pidfd can
 * be polled for input when the last of them has exited. */
bool process_has_ended(pid_t pid, uint64_t start_time)
{
        struct pollfd end = { .events = POLLIN };
        struct process p;
        bool has_ended;
        int r = process_read("/proc", pid, &p);

        if (r < 0 || p.start_time != start_time)
                return r == 0 || r == -ESRCH;
        if (p.state != 'Z' && p.state != 'X')
                return false;
        end.fd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (end.fd < 0)
                return errno == ESRCH;
        has_ended = poll(&end, 1, 0) == 1;
        close(end.fd);
        return has_ended;
}

int process_owner(const char *proc, pid_t pid, uid_t *ret)
{
        char path[64];
        struct stat st;

        if (pid <= 0 || snprintf(path, sizeof(path), "%s/%d", proc, (int)pid) >= (int)sizeof(path))
                return -ESRCH;
        if (stat(path, &st) < 0)
                return errno == ENOENT ? -ESRCH : -errno;
        *ret = st.st_uid;
        return 0;
}

/* Of ret[n - 1], which has one. It may exit meanwhile, or its child, and its pid may be used again. The parent was
 * read while the child had it as its parent if both are as before, and a parent is never younger than its child. */
static int read_parent(const char *proc, struct process *ret, size_t n)
{
        struct process *child = &ret[n - 1], again;
        int r = process_read(proc, child->parent, &ret[n]);

        if (r == 0)
                r = process_read(proc, child->pid, &again);
        if (r == -ESRCH)
                return -EAGAIN;
        if (r == 0 && (again.parent != child->parent || again.start_time != child->start_time ||
                       ret[n].start_time > child->start_time))
                r = -EAGAIN;
        return r;
}

/* reads: how many are left. */
static int walk(const char *proc, pid_t pid, uint64_t since, struct process *ret, size_t n_max,
                unsigned *reads)
{
        int r = process_read(proc, pid, &ret[0]);
        size_t n = 1;

        --*reads;
        while (r == 0 && ret[n - 1].parent != 0 && ret[n - 1].start_time >= since) {
                if (n == n_max)
                        return -ELOOP;
                if (*reads < READS_OF_PARENT)
                        return -EAGAIN;
                *reads -= READS_OF_PARENT;
                r = read_parent(proc, ret, n++);
        }
        return r < 0 ? r : (int)n;
}

int process_ancestors(const char *proc, pid_t pid, uint64_t since, struct process *ret, size_t n_max)
{
        unsigned reads = PROCESS_MAX_READS;
        int r = -EAGAIN;

        for (unsigned i = 0; r == -EAGAIN && i < WALKS && reads > 0; i++)
                r = walk(proc, pid, since, ret, n_max, &reads);
        return r;
}
