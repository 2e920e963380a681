/* Linked into a bfcd for tests: what an older kernel answers. BFC_TEST_KERNEL names that kernel,
 * "6.1" for instance. What a newer kernel has fails as it fails there. Without the variable, or on a
 * kernel that is as old, nothing changes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KERNEL(major, minor) ((major)*1000u + (minor))

/* Headers may be older than the kernel. The numbers are those of asm-generic/socket.h. */
#define OPTION_PASSPIDFD  76 /* Linux 6.5 */
#define OPTION_PEERPIDFD  77 /* Linux 6.5 */
#define OPTION_PASSRIGHTS 83 /* Linux 6.16 */

#define FLAG_NOEXEC_SEAL 0x8u  /* Linux 6.3 */
#define FLAG_EXEC        0x10u /* Linux 6.3 */

static bool is_before(unsigned kernel)
{
        const char *text = getenv("BFC_TEST_KERNEL");
        unsigned major, minor;

        if (!text || !*text)
                return false;
        if (sscanf(text, "%u.%u", &major, &minor) != 2) {
                fprintf(stderr, "error: BFC_TEST_KERNEL=%s is not a version such as 6.1\n", text);
                abort();
        }
        return KERNEL(major, minor) < kernel;
}

static bool lacks_option(int level, int option)
{
        if (level != SOL_SOCKET)
                return false;
        if (option == OPTION_PASSPIDFD || option == OPTION_PEERPIDFD)
                return is_before(KERNEL(6u, 5u));
        return option == OPTION_PASSRIGHTS && is_before(KERNEL(6u, 16u));
}

/* Of a process that has been waited for: since Linux 6.16 there is a pidfd of it. */
static bool is_of_no_process(int pidfd)
{
        return syscall(SYS_pidfd_send_signal, pidfd, 0, NULL, 0) < 0 && errno == ESRCH;
}

int __real_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n);
int __wrap_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n);
int __wrap_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n)
{
        int r;

        if (lacks_option(level, option)) {
                errno = ENOPROTOOPT;
                return -1;
        }
        r = __real_getsockopt(fd, level, option, ret, ret_n);
        if (r == 0 && level == SOL_SOCKET && option == OPTION_PEERPIDFD && is_before(KERNEL(6u, 16u)) &&
            is_of_no_process(*(const int *)ret)) {
                close(*(const int *)ret);
                errno = EINVAL;
                return -1;
        }
        return r;
}

int __real_setsockopt(int fd, int level, int option, const void *value, socklen_t n);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t n);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t n)
{
        if (lacks_option(level, option)) {
                errno = ENOPROTOOPT;
                return -1;
        }
        return __real_setsockopt(fd, level, option, value, n);
}

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags)
{
        if ((flags & (FLAG_NOEXEC_SEAL | FLAG_EXEC)) != 0 && is_before(KERNEL(6u, 3u))) {
                errno = EINVAL;
                return -1;
        }
        return __real_memfd_create(name, flags);
}
