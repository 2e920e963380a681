/* The fake store; see fake_store.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/fake_store.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#undef NDEBUG

struct kept {
        uint64_t key;
        int fd;
        bool is_ours; /* taken, or put by this process */
};

struct store {
        int ledger_fd;
        bool ledger_is_ours;
        struct kept *kept;
        size_t n_kept;
        uint64_t next_key;
};

static int copy_fd(int fd)
{
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);

        assert(copy >= 0);
        return copy;
}

struct store *fake_store_new(void)
{
        struct store *s = calloc(1, sizeof(*s));

        assert(s);
        s->ledger_fd = -1;
        s->next_key = 1;
        return s;
}

struct store *fake_store_free(struct store *s)
{
        if (!s)
                return NULL;
        if (s->ledger_fd >= 0)
                close(s->ledger_fd);
        for (size_t i = 0; i < s->n_kept; i++)
                close(s->kept[i].fd);
        free(s->kept);
        free(s);
        return NULL;
}

/* Holes stay holes. */
static int copy_ledger(int from)
{
        int to = memfd_create("ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        static unsigned char buf[1 << 16];
        struct stat st;
        off_t at = 0, end;

        assert(to >= 0 && fstat(from, &st) == 0 && ftruncate(to, st.st_size) == 0);
        while ((at = lseek(from, at, SEEK_DATA)) >= 0) {
                end = lseek(from, at, SEEK_HOLE);
                while (at < end) {
                        size_t n = (size_t)(end - at) < sizeof(buf) ? (size_t)(end - at) : sizeof(buf);

                        assert(pread(from, buf, n, at) == (ssize_t)n && pwrite(to, buf, n, at) == (ssize_t)n);
                        at += (off_t)n;
                }
        }
        assert(fcntl(to, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) == 0);
        return to;
}

void fake_store_die(struct store *s)
{
        int copy = s->ledger_fd >= 0 ? copy_ledger(s->ledger_fd) : -1;

        if (s->ledger_fd >= 0)
                close(s->ledger_fd);
        s->ledger_fd = copy;
        s->ledger_is_ours = false;
        for (size_t i = 0; i < s->n_kept; i++)
                s->kept[i].is_ours = false;
}

static size_t find(const struct store *s, uint64_t key)
{
        size_t i = 0;

        while (i < s->n_kept && s->kept[i].key != key)
                i++;
        return i;
}

void fake_store_lose(struct store *s, uint64_t key)
{
        size_t i = find(s, key);

        assert(i < s->n_kept);
        close(s->kept[i].fd);
        s->kept[i] = s->kept[--s->n_kept];
}

/* ---- what daemon/ledger/store.h says ---------------------------------------------- */

void store_end(struct store *s)
{
        (void)s;
}

uint64_t store_silent_since_ns(const struct store *s)
{
        (void)s;
        return 0;
}

bool store_keeps(const struct store *s)
{
        return s != NULL;
}

int store_take_ledger(struct store *s)
{
        if (!s || s->ledger_is_ours || s->ledger_fd < 0)
                return -ENOENT;
        s->ledger_is_ours = true;
        return copy_fd(s->ledger_fd);
}

int store_take_extent(struct store *s, uint64_t key)
{
        size_t i = s ? find(s, key) : 0;

        if (!s || i == s->n_kept || s->kept[i].is_ours)
                return -ENOENT;
        s->kept[i].is_ours = true;
        return copy_fd(s->kept[i].fd);
}

size_t store_drop_rest(struct store *s)
{
        size_t n = 0;

        for (size_t i = 0; s && i < s->n_kept;) {
                if (s->kept[i].is_ours) {
                        i++;
                        continue;
                }
                fake_store_lose(s, s->kept[i].key);
                n++;
        }
        return n;
}

uint64_t store_next_key(struct store *s)
{
        return s ? s->next_key++ : 0;
}

int store_put_ledger(struct store *s, int fd)
{
        if (!s)
                return 0;
        if (s->ledger_fd >= 0)
                close(s->ledger_fd);
        s->ledger_fd = copy_fd(fd);
        s->ledger_is_ours = true;
        return 0;
}

int store_put_extent(struct store *s, uint64_t key, int fd)
{
        if (!s || key == 0)
                return 0;
        s->kept = reallocarray(s->kept, s->n_kept + 1, sizeof(*s->kept));
        assert(s->kept && find(s, key) == s->n_kept);
        s->kept[s->n_kept++] = (struct kept){ key, copy_fd(fd), true };
        return 0;
}

int store_remove_extent(struct store *s, uint64_t key)
{
        if (s && key != 0 && find(s, key) < s->n_kept)
                fake_store_lose(s, key);
        return 0;
}
