/* Copies between memfds; see host_copy.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_copy.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "device/host_pages.h"

#define WINDOW_BYTES (UINT64_C(64) << 20)  /* of the destination, mapped at a time */
#define CALL_BYTES   (UINT64_C(256) << 10) /* of one read: what is waited for at the end of the process */

static int read_until(int fd, uint64_t offset, void *ret, uint64_t n_bytes, const bool *stop)
{
        for (uint64_t done = 0; done < n_bytes;) {
                uint64_t want = n_bytes - done < CALL_BYTES ? n_bytes - done : CALL_BYTES;
                ssize_t n;

                if (stop && __atomic_load_n(stop, __ATOMIC_RELAXED))
                        return -ECANCELED;
                n = pread(fd, (char *)ret + done, want, (off_t)(offset + done));
                if (n == 0 || (n < 0 && errno == EFAULT))
                        return -EIO;
                if (n < 0 && errno != EINTR)
                        return -errno;
                done += n > 0 ? (uint64_t)n : 0;
        }
        return 0;
}

int host_copy_read(int fd, uint64_t offset, void *ret, uint64_t n_bytes)
{
        return read_until(fd, offset, ret, n_bytes, NULL);
}

/* The kernel reads into a mapping of the destination, without a buffer between. The mapping begins at a large page, which
 * is then mapped as one. */
static int copy_window(int from, uint64_t from_offset, int to, uint64_t to_offset, uint64_t n_bytes,
                       const bool *stop)
{
        uint64_t before = to_offset % HOST_HUGE_BYTES;
        uint64_t n_mapped = (before + n_bytes + HOST_HUGE_BYTES - 1) / HOST_HUGE_BYTES * HOST_HUGE_BYTES;
        char *at = host_pages_map(to, to_offset - before, n_mapped);
        int r;

        if (!at)
                return -ENOMEM;
        r = read_until(from, from_offset, at + before, n_bytes, stop);
        munmap(at, n_mapped);
        return r;
}

int host_copy(int from, uint64_t from_offset, int to, uint64_t to_offset, uint64_t n_bytes, const bool *stop)
{
        int r = 0;

        for (uint64_t done = 0; r == 0 && done < n_bytes; done += WINDOW_BYTES)
                r = copy_window(from, from_offset + done, to, to_offset + done,
                                n_bytes - done < WINDOW_BYTES ? n_bytes - done : WINDOW_BYTES, stop);
        return r;
}
