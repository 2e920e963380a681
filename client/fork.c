/* Forked children; see fork.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/fork.h"

#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(entry_list, fork_entry) entries = LIST_HEAD_INITIALIZER(entries);
static uint64_t n_forks; /* atomic */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int watch_error;

static void before_fork(void)
{
        pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
        __atomic_add_fetch(&n_forks, 1, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&lock);
}

/* The child's children inherit what this leaves, so the entries are done with. */
static void in_child(void)
{
        int error = errno;

        for (struct fork_entry *e = LIST_FIRST(&entries); e; e = LIST_NEXT(e, link))
                e->in_child(e);
        LIST_INIT(&entries);
        pthread_mutex_unlock(&lock);
        errno = error;
}

static void watch(void)
{
        watch_error = -pthread_atfork(before_fork, in_parent, in_child);
}

int fork_watch(void)
{
        pthread_once(&once, watch);
        return watch_error;
}

void fork_add(struct fork_entry *entry)
{
        pthread_mutex_lock(&lock);
        LIST_INSERT_HEAD(&entries, entry, link);
        pthread_mutex_unlock(&lock);
}

void fork_remove(struct fork_entry *entry)
{
        pthread_mutex_lock(&lock);
        LIST_REMOVE(entry, link);
        pthread_mutex_unlock(&lock);
}

static void *reserve(const struct fork_entry *entry, int flag)
{
        return mmap(entry->base, entry->n_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flag, -1, 0);
}

/* Either call leaves no hole. The second one needs less memory of the kernel. */
void fork_hide(struct fork_entry *entry)
{
        if (reserve(entry, MAP_FIXED) == MAP_FAILED)
                (void)mprotect(entry->base, entry->n_bytes, PROT_NONE);
}

void fork_fill(struct fork_entry *entry)
{
        void *at = reserve(entry, MAP_FIXED_NOREPLACE);

        if (at != MAP_FAILED && at != entry->base) /* an older kernel takes the address for a hint */
                munmap(at, entry->n_bytes);
}

uint64_t fork_count(void)
{
        return __atomic_load_n(&n_forks, __ATOMIC_ACQUIRE);
}
