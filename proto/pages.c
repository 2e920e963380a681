/* Pages; see pages.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "proto/pages.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto/memfd.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010 /* Linux 5.1 */
#endif

#define SIZE_SEALS  (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)
#define USAGE_SEALS (SIZE_SEALS | F_SEAL_FUTURE_WRITE)

/* ---- entries ------------------------------------------------------------- */

/* Leaves the writer its cache lines for a moment. */
static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
}

int pages_read(const struct pages_entry *e, uint64_t ret[PAGES_N_STATS])
{
        for (unsigned i = 0; i < PAGES_TRIES; i++, relax())
                if (pages_try_read(e, ret))
                        return 0;
        return -EAGAIN;
}

void pages_close(struct pages_entry *e)
{
        uint64_t sequence = atomic_load_explicit(&e->sequence, memory_order_relaxed);

        atomic_store_explicit(&e->sequence, sequence | 1, memory_order_relaxed);
}

/* ---- making --------------------------------------------------------------- */

static size_t to_pages(size_t n_bytes)
{
        size_t page = (size_t)sysconf(_SC_PAGESIZE);

        return (n_bytes + page - 1) / page * page;
}

size_t pages_usage_bytes(size_t n_entries)
{
        return to_pages(sizeof(struct pages_usage) + n_entries * sizeof(struct pages_entry));
}

size_t pages_client_bytes(void)
{
        return to_pages(sizeof(struct pages_client));
}

/* The daemon's own mapping comes before the seal that forbids all others. */
static int pages_fill(int fd, size_t n_bytes, bool is_usage, void **ret_map)
{
        int seals = is_usage ? USAGE_SEALS : SIZE_SEALS;
        void *map;

        if (ftruncate(fd, (off_t)n_bytes) < 0)
                return -errno;
        if (!ret_map)
                return fcntl(fd, F_ADD_SEALS, seals) < 0 ? -errno : 0;
        map = mmap(NULL, n_bytes, is_usage ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED)
                return -errno;
        if (fcntl(fd, F_ADD_SEALS, seals) < 0) {
                int r = -errno;

                munmap(map, n_bytes);
                return r;
        }
        *ret_map = map;
        return 0;
}

int pages_make(const char *name, size_t n_bytes, bool is_usage, void **ret_map, int *ret_fd)
{
        int r, fd = is_usage ? memfd_make(name) : memfd_make_to_give(name);

        if (fd < 0)
                return fd;
        r = pages_fill(fd, n_bytes, is_usage, ret_map);
        if (r < 0) {
                close(fd);
                return r;
        }
        *ret_fd = fd;
        return 0;
}

/* ---- mapping -------------------------------------------------------------- */

/* Without these seals another process with the fd could shrink it, which kills its readers. */
static int check_memfd(int fd, int want_seals, size_t min_bytes, size_t *ret_n_bytes)
{
        struct stat st;
        int seals = fcntl(fd, F_GET_SEALS);

        if (seals < 0 || (seals & want_seals) != want_seals || fstat(fd, &st) < 0)
                return -EPROTO;
        if (st.st_size < 0 || (uint64_t)st.st_size < min_bytes || (uint64_t)st.st_size > PAGES_MAX_BYTES)
                return -EPROTO;
        *ret_n_bytes = (size_t)st.st_size;
        return 0;
}

static int map_shared(int fd, size_t n_bytes, int protection, void **ret)
{
        void *map = mmap(NULL, n_bytes, protection, MAP_SHARED, fd, 0);

        if (map == MAP_FAILED)
                return errno == EPERM || errno == EACCES || errno == ENODEV ? -EPROTO : -errno;
        *ret = map;
        return 0;
}

static bool usage_is_right(const struct pages_view *v, uint64_t magic, uint64_t version)
{
        return magic == PAGES_USAGE_MAGIC && version == PAGES_VERSION &&
               v->entry_bytes >= sizeof(struct pages_entry) &&
               v->entry_bytes % _Alignof(struct pages_entry) == 0 &&
               v->n_entries <= (v->n_bytes - sizeof(struct pages_usage)) / v->entry_bytes;
}

int pages_map_usage(int fd, struct pages_view *ret)
{
        struct pages_view v = { 0 };
        void *map = NULL;
        int r = check_memfd(fd, USAGE_SEALS, sizeof(struct pages_usage), &v.n_bytes);

        if (r == 0)
                r = map_shared(fd, v.n_bytes, PROT_READ, &map);
        if (r < 0)
                return r;
        v.page = map;
        v.n_entries = v.page->n_entries;
        v.entry_bytes = v.page->entry_bytes;
        if (!usage_is_right(&v, v.page->magic, v.page->version)) {
                munmap(map, v.n_bytes);
                return -EPROTO;
        }
        *ret = v;
        return 0;
}

int pages_map_client(int fd, struct pages_client **ret)
{
        size_t n_bytes;
        void *map = NULL;
        int r = check_memfd(fd, SIZE_SEALS, pages_client_bytes(), &n_bytes);

        if (r == 0)
                r = map_shared(fd, pages_client_bytes(), PROT_READ | PROT_WRITE, &map);
        if (r < 0)
                return r;
        *ret = map;
        return 0;
}
