/* Linked into a bfcd for tests: pread() of a memfd waits as long as the file exists that BFC_TEST_HELD_READS names, as it
 * does while a client has locks of pages. A file of that name with ".waits" tells the test that a thread waits. The
 * program exports pread(), so shared libraries call it too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static void tell(const char *path)
{
        char waits[PATH_MAX];
        int fd;

        snprintf(waits, sizeof(waits), "%s.waits", path);
        fd = open(waits, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
        if (fd >= 0)
                close(fd);
}

__attribute__((visibility("default"))) ssize_t pread(int fd, void *ret, size_t n_bytes, off_t offset)
{
        const char *path = getenv("BFC_TEST_HELD_READS");

        if (path && fcntl(fd, F_GET_SEALS) >= 0 && access(path, F_OK) == 0) {
                tell(path);
                while (access(path, F_OK) == 0)
                        usleep(1000);
        }
        return syscall(SYS_pread64, fd, ret, n_bytes, offset);
}
