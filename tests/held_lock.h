/* Holds the lock of a file's inode for as long as it likes: a write() whose source page never
 * comes. The source is memory registered with userfaultfd(2), which is not served until it is let
 * go of; for that the process must be root, or vm.unprivileged_userfaultfd must be 1.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_HELD_LOCK_H
#define BFC_TESTS_HELD_LOCK_H

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HELD_LOCK_PAGE 4096u

struct held_lock {
        int uffd;
        int fd;
        void *source;
        pthread_t thread;
};

/* An fd of it, or -1: this process may not have one. */
static inline int held_lock_uffd(void)
{
        struct uffdio_api api = { .api = UFFD_API };
        int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK), dev;

        if (uffd < 0 && (dev = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC)) >= 0) {
                uffd = ioctl(dev, USERFAULTFD_IOC_NEW, O_CLOEXEC | O_NONBLOCK);
                close(dev);
        }
        if (uffd >= 0 && ioctl(uffd, UFFDIO_API, &api) < 0) {
                close(uffd);
                uffd = -1;
        }
        return uffd;
}

static inline bool held_lock_can(void)
{
        int uffd = held_lock_uffd();

        if (uffd >= 0)
                close(uffd);
        return uffd >= 0;
}

static void *held_lock_write(void *userdata)
{
        struct held_lock *l = userdata;

        (void)!pwrite(l->fd, l->source, HELD_LOCK_PAGE, 0);
        return NULL;
}

/* Returns when the lock is held. false: it cannot be. */
static inline bool held_lock_take(struct held_lock *l, int fd)
{
        struct uffdio_register range = { .range = { .len = HELD_LOCK_PAGE },
                                         .mode = UFFDIO_REGISTER_MODE_MISSING };
        struct pollfd poll_fd = { .events = POLLIN };

        l->fd = fd;
        l->uffd = held_lock_uffd();
        l->source = mmap(NULL, HELD_LOCK_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (l->uffd < 0 || l->source == MAP_FAILED)
                return false;
        range.range.start = (uintptr_t)l->source;
        if (ioctl(l->uffd, UFFDIO_REGISTER, &range) < 0 ||
            pthread_create(&l->thread, NULL, held_lock_write, l) != 0)
                return false;
        poll_fd.fd = l->uffd; /* the fault is there: the writer has the lock */
        return poll(&poll_fd, 1, 60000) == 1;
}

static inline void held_lock_release(struct held_lock *l)
{
        struct uffdio_zeropage zero = { .range = { .start = (uintptr_t)l->source, .len = HELD_LOCK_PAGE } };

        ioctl(l->uffd, UFFDIO_ZEROPAGE, &zero);
        pthread_join(l->thread, NULL);
        munmap(l->source, HELD_LOCK_PAGE);
        close(l->uffd);
}

#endif
