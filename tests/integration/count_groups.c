/* A daemon that counts how often it asks the kernel for a peer's groups: in the first word of the file
 * that BFC_COUNT_GROUPS names. In the second word it counts changes of what it polls for.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

int __real_getsockopt(int fd, int level, int name, void *value, socklen_t *n);
int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *n);
int __real_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);
int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event);

static _Atomic uint64_t *counter(void)
{
        static void *page = MAP_FAILED;
        const char *path = getenv("BFC_COUNT_GROUPS");
        int fd = page == MAP_FAILED && path ? open(path, O_RDWR | O_CLOEXEC) : -1;

        if (fd >= 0) {
                page = mmap(NULL, 2 * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
                close(fd);
        }
        return page == MAP_FAILED ? NULL : page;
}

int __wrap_getsockopt(int fd, int level, int name, void *value, socklen_t *n)
{
        _Atomic uint64_t *count = level == SOL_SOCKET && name == SO_PEERGROUPS ? counter() : NULL;

        if (count)
                atomic_fetch_add(count, 1);
        return __real_getsockopt(fd, level, name, value, n);
}

int __wrap_epoll_ctl(int epoll, int op, int fd, struct epoll_event *event)
{
        _Atomic uint64_t *counts = counter();

        if (counts)
                atomic_fetch_add(&counts[1], 1);
        return __real_epoll_ctl(epoll, op, fd, event);
}
