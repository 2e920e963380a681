/* The watch; see watch.h.
 *
 * fstat() takes no lock of the inode (but for a few stable kernels of November 2024), and closes
 * are the closer's: no look waits for a client.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/watch.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/stat.h>

#include "daemon/net/closer.h"
#include "proto/memfd.h"

struct watch_entry {
        struct watch_owner *owner;
        int fd;
        bool is_own;      /* fd is a file description of the watch's own */
        uint64_t n_bytes; /* of the extent */
        uint64_t n_found; /* at the last look */
        TAILQ_ENTRY(watch_entry) of_owner, of_all;
};

struct watch {
        struct watch_entry_list all; /* the next one to be checked first */
        size_t n_entries, n_max;
};

int watch_new(size_t n_max, struct watch **ret)
{
        struct watch *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        TAILQ_INIT(&w->all);
        w->n_max = n_max;
        *ret = w;
        return 0;
}

struct watch *watch_free(struct watch *w)
{
        assert(!w || w->n_entries == 0);
        free(w);
        return NULL;
}

void watch_owner_init(struct watch_owner *o,
                      void (*refilled)(struct watch_owner *o, int fd, uint64_t n_bytes))
{
        *o = (struct watch_owner){ .refilled = refilled };
        TAILQ_INIT(&o->entries);
}

static void owner_tell(struct watch_owner *o, int fd, uint64_t n_bytes)
{
        if (o->refilled)
                o->refilled(o, fd, n_bytes);
}

static void entry_drop(struct watch *w, struct watch_entry *e)
{
        struct watch_owner *o = e->owner;
        uint64_t n_found = e->n_found;

        o->n_bytes -= n_found;
        o->n_entries--;
        w->n_entries--;
        TAILQ_REMOVE(&o->entries, e, of_owner);
        TAILQ_REMOVE(&w->all, e, of_all);
        closer_close(e->fd);
        free(e);
        if (n_found > 0)
                owner_tell(o, -1, 0);
}

void watch_add(struct watch *w, struct watch_owner *o, int fd, uint64_t n_bytes)
{
        struct watch_entry *e = NULL;

        if (w && o->n_entries > 0 && (o->n_entries == WATCH_MAX_OF_OWNER || w->n_entries == w->n_max))
                entry_drop(w, TAILQ_FIRST(&o->entries));
        if (w && w->n_entries < w->n_max)
                e = calloc(1, sizeof(*e));
        if (!e) {
                closer_close(fd);
                return;
        }
        *e = (struct watch_entry){ .owner = o, .fd = fd, .n_bytes = n_bytes };
        o->n_entries++;
        w->n_entries++;
        TAILQ_INSERT_TAIL(&o->entries, e, of_owner);
        TAILQ_INSERT_TAIL(&w->all, e, of_all);
}

void watch_leave(struct watch *w, struct watch_owner *o)
{
        while (w && !TAILQ_EMPTY(&o->entries))
                entry_drop(w, TAILQ_FIRST(&o->entries));
}

/* The memfd's first file description, which the keeper shares, is not counted by the
 * kernel. So the watch opens one of its own. */
static void entry_make_own(struct watch_entry *e)
{
        int fd;

        if (e->is_own)
                return;
        fd = memfd_lend(e->fd, O_RDWR);
        if (fd < 0)
                return;
        closer_close(e->fd);
        e->fd = fd;
        e->is_own = true;
}

/* false: another process has it, or that cannot be known. */
static bool entry_is_alone(const struct watch_entry *e)
{
        return e->is_own && fcntl(e->fd, F_SETLEASE, F_WRLCK) == 0;
}

static void entry_look(struct watch *w, struct watch_entry *e)
{
        uint64_t n_before = e->n_found;
        struct stat st;

        TAILQ_REMOVE(&w->all, e, of_all);
        TAILQ_INSERT_TAIL(&w->all, e, of_all);
        entry_make_own(e);
        if (entry_is_alone(e)) {
                entry_drop(w, e);
                return;
        }
        e->owner->n_bytes -= n_before;
        e->n_found = fstat(e->fd, &st) == 0 && st.st_blocks > 0 ? (uint64_t)st.st_blocks * 512 : 0;
        e->owner->n_bytes += e->n_found;
        if (e->n_found > 0)
                owner_tell(e->owner, e->fd, e->n_bytes);
        else if (n_before > 0)
                owner_tell(e->owner, -1, 0);
}

void watch_look(struct watch *w, size_t n)
{
        if (n > w->n_entries)
                n = w->n_entries;
        while (n-- > 0)
                entry_look(w, TAILQ_FIRST(&w->all));
}

size_t watch_n_entries(const struct watch *w)
{
        return w->n_entries;
}
