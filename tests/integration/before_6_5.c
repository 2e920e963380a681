/* Linked into a bfcd for tests: what a kernel before 6.5 answers.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <sys/socket.h>

#define SO_PEERPIDFD_OF_6_5 77

int __real_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n);
int __wrap_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n);
int __wrap_getsockopt(int fd, int level, int option, void *ret, socklen_t *ret_n)
{
        if (level == SOL_SOCKET && option == SO_PEERPIDFD_OF_6_5) {
                errno = ENOPROTOOPT;
                return -1;
        }
        return __real_getsockopt(fd, level, option, ret, ret_n);
}
