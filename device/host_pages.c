/* Pages of host extents; see host_pages.h.
 *
 * The kernel collapses only a piece that has a page, so the first page of each is allocated by
 * fallocate(). One call of MADV_COLLAPSE is for all pieces, since each call waits for every processor, and the process's
 * other threads can map nothing meanwhile.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_pages.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "proto/memfd.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

#define SMALL_BYTES UINT64_C(4096)
#define STEP_BYTES  (UINT64_C(16) << 20)
#define MAX_NODES   1024u /* of any kernel's configuration */

void *host_pages_map(int fd, uint64_t offset, uint64_t n_bytes)
{
        uint64_t room = n_bytes + HOST_HUGE_BYTES, before;
        char *at = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (at == MAP_FAILED)
                return NULL;
        before = -(uintptr_t)at % HOST_HUGE_BYTES;
        if (before > 0)
                munmap(at, before);
        at += before;
        munmap(at + n_bytes, HOST_HUGE_BYTES - before);
        if (fd < 0)
                return at;
        if (mmap(at, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd,
                 (off_t)offset) != MAP_FAILED)
                return at;
        munmap(at, n_bytes);
        return NULL;
}

/* The policy belongs to the memfd and holds for all processes that allocate its pages. */
static int bind_to(int fd, uint64_t n_bytes, uint32_t node)
{
        unsigned long mask[MAX_NODES / (CHAR_BIT * sizeof(unsigned long))] = { 0 };
        const size_t n_bits = CHAR_BIT * sizeof(unsigned long);
        void *at = node < MAX_NODES ? host_pages_map(fd, 0, n_bytes) : NULL;
        int r;

        if (!at)
                return node < MAX_NODES ? -ENOMEM : -EINVAL;
        mask[node / n_bits] = 1ul << node % n_bits;
        r = syscall(SYS_mbind, at, n_bytes, MPOL_BIND, mask, MAX_NODES + 1, 0) < 0 ? -errno : 0;
        munmap(at, n_bytes);
        return r;
}

static int allocate_small(int fd, uint64_t at)
{
        int r;

        do
                r = fallocate(fd, 0, (off_t)at, (off_t)SMALL_BYTES);
        while (r < 0 && errno == EINTR);
        return r < 0 ? -errno : 0;
}

/* How much is in large pages, after each piece got a page of 4 KiB and some were replaced. */
static uint64_t count_huge_bytes(int fd, uint64_t n_bytes)
{
        uint64_t n_pieces = n_bytes / HOST_HUGE_BYTES, least = n_pieces * SMALL_BYTES, has;
        struct stat st;

        if (fstat(fd, &st) < 0 || st.st_blocks < 0)
                return 0;
        has = (uint64_t)st.st_blocks * 512;
        if (has >= n_bytes)
                return n_bytes;
        return has > least ? (has - least) / (HOST_HUGE_BYTES - SMALL_BYTES) * HOST_HUGE_BYTES : 0;
}

void host_pages_collapse(int fd, uint64_t n_bytes)
{
        void *at = n_bytes > 0 && n_bytes % HOST_HUGE_BYTES == 0 && n_bytes <= INT64_MAX
                           ? host_pages_map(fd, 0, n_bytes)
                           : NULL;

        if (!at)
                return;
        /* What it did not do is left as it was. It stops at the first piece that it has no page for. */
        (void)madvise(at, n_bytes, MADV_COLLAPSE);
        munmap(at, n_bytes);
}

static int fill_huge(int fd, uint64_t n_bytes, const struct device_supply *supply, uint64_t *ret_huge_bytes)
{
        for (uint64_t i = 0; i < n_bytes; i += HOST_HUGE_BYTES) {
                int r = allocate_small(fd, i);

                if (r < 0)
                        return r;
        }
        if (supply->collapse)
                supply->collapse(fd, n_bytes);
        else
                host_pages_collapse(fd, n_bytes);
        *ret_huge_bytes = count_huge_bytes(fd, n_bytes);
        return 0;
}

/* In steps, because a signal undoes the progress of one call. */
static int fallocate_whole(int fd, uint64_t n_bytes)
{
        for (uint64_t at = 0; at < n_bytes;) {
                uint64_t n = n_bytes - at < STEP_BYTES ? n_bytes - at : STEP_BYTES;

                if (fallocate(fd, 0, (off_t)at, (off_t)n) == 0)
                        at += n;
                else if (errno != EINTR)
                        return -errno;
        }
        return 0;
}

int host_pages_fill(int fd, uint64_t n_bytes, const struct device_supply *supply, uint64_t *ret_huge_bytes)
{
        int r = supply->is_bound ? bind_to(fd, n_bytes, supply->node) : 0;

        *ret_huge_bytes = 0;
        if (r == 0)
                r = fill_huge(fd, n_bytes, supply, ret_huge_bytes);
        if (r == 0 && *ret_huge_bytes < n_bytes)
                r = fallocate_whole(fd, n_bytes);
        return r == -ENOSPC ? -ENOMEM : r;
}

/* ---- what a machine lacks ----------------------------------------------------- */

/* By an extent of one page. */
static bool can_collapse(void)
{
        static const struct device_supply any = { 0 };
        uint64_t huge_bytes = 0;
        int fd = memfd_make(HOST_EXTENT_NAME);

        if (fd < 0)
                return false;
        if (ftruncate(fd, (off_t)HOST_HUGE_BYTES) < 0 ||
            host_pages_fill(fd, HOST_HUGE_BYTES, &any, &huge_bytes) < 0)
                huge_bytes = 0;
        close(fd);
        return huge_bytes > 0;
}

int host_pages_check(const struct device_supply *supply, char *ret_clause, size_t n_clause)
{
        char path[64];

        snprintf(path, sizeof(path), "/sys/devices/system/node/node%u", supply->node);
        if (supply->is_bound && (supply->node >= MAX_NODES || access(path, F_OK) < 0)) {
                snprintf(ret_clause, n_clause, "this machine has no NUMA node %u; see 'numactl -H'",
                         supply->node);
                return -ENODEV;
        }
        if (!can_collapse()) {
                snprintf(ret_clause, n_clause,
                         "this kernel has no pages of 2 MiB for shared memory (MADV_COLLAPSE, Linux "
                         "6.1), so bfcd uses pages of 4 KiB and growth is slower");
                return -ENOTSUP;
        }
        return 0;
}
