/* Linked into programs for tests: the monotonic clocks are ahead by what the test has let pass; see moved_clock.h. The
 * program exports clock_gettime(), so shared libraries such as libuv call it too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/moved_clock.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static struct moved_clock own_page;
static struct moved_clock *clock_page = &own_page;

__attribute__((constructor)) static void open_page(void)
{
        const char *path = getenv(MOVED_CLOCK_FILE);
        void *page;
        int fd;

        if (!path || !*path)
                return;
        fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
                return;
        page = mmap(NULL, sizeof(*clock_page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (page == MAP_FAILED)
                return;
        clock_page = page;
        __atomic_store_n(&clock_page->is_read, 1, __ATOMIC_RELEASE);
}

void moved_clock_pass(uint64_t ms)
{
        __atomic_add_fetch(&clock_page->passed_ms, ms, __ATOMIC_RELEASE);
}

static int is_moved(clockid_t clock)
{
        return clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE || clock == CLOCK_MONOTONIC_RAW ||
               clock == CLOCK_BOOTTIME;
}

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *ret)
{
        uint64_t ms;

        if (syscall(SYS_clock_gettime, clock, ret) < 0)
                return -1;
        if (!is_moved(clock))
                return 0;
        ms = __atomic_load_n(&clock_page->passed_ms, __ATOMIC_ACQUIRE);
        ret->tv_sec += (time_t)(ms / 1000);
        ret->tv_nsec += (long)(ms % 1000) * 1000000;
        if (ret->tv_nsec >= 1000000000) {
                ret->tv_nsec -= 1000000000;
                ret->tv_sec++;
        }
        return 0;
}
