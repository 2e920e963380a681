/* The library and its process; see process.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/process.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define ERROR_BYTES 1024

/* The driver is called on our threads and may need as much stack as on a program's first thread. */
#define STACK_BYTES ((size_t)8 << 20)

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000 /* Linux 4.17 */
#endif

/* Of this thread, made by its first error and freed at its end. In the static TLS it could be too large for a program
 * that loads the library late. */
static __thread char *message_buffer;
static __thread const char *message = "";
static pthread_once_t message_once = PTHREAD_ONCE_INIT;
static pthread_key_t message_key;
static bool has_message_key;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(entry_list, fork_entry) entries = LIST_HEAD_INITIALIZER(entries);
static uint64_t n_forks; /* atomic */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static int watch_error;

static void message_free(void *buffer)
{
        free(buffer);
        message_buffer = NULL;
        message = "";
}

static void message_init(void)
{
        has_message_key = pthread_key_create(&message_key, message_free) == 0;
}

/* NULL: this process is out of memory. */
static char *message_get(void)
{
        (void)pthread_once(&message_once, message_init);
        if (!message_buffer && has_message_key)
                message_buffer = malloc(ERROR_BYTES);
        if (message_buffer && pthread_setspecific(message_key, message_buffer) != 0)
                message_free(message_buffer);
        return message_buffer;
}

int error_set(int error, const char *format, ...)
{
        char *buffer = message_get();
        va_list args;

        if (!buffer) {
                message = "this process is out of memory, also for the message of an error";
                return error;
        }
        va_start(args, format);
        vsnprintf(buffer, ERROR_BYTES, format, args);
        va_end(args);
        message = buffer;
        return error;
}

int error_no_memory(void)
{
        return error_set(-ENOMEM, "this process is out of memory");
}

const char *error_last(void)
{
        return message;
}

int thread_new(void *(*run)(void *), void *userdata, const char *name, pthread_t *ret)
{
        pthread_attr_t attr;
        sigset_t all, before;
        size_t n_bytes;
        int r = pthread_attr_init(&attr);

        if (r != 0)
                return -r;
        if (pthread_attr_getstacksize(&attr, &n_bytes) == 0 && n_bytes < STACK_BYTES)
                pthread_attr_setstacksize(&attr, STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = pthread_create(ret, &attr, run, userdata);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
        if (r == 0)
                pthread_setname_np(*ret, name);
        return -r;
}

int64_t clock_now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void condition_init(pthread_cond_t *condition)
{
        pthread_condattr_t attributes;

        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(condition, &attributes);
        pthread_condattr_destroy(&attributes);
}

void condition_wait(pthread_cond_t *condition, pthread_mutex_t *mutex, int64_t until_ms)
{
        const struct timespec until = { until_ms / 1000, until_ms % 1000 * 1000000 };
        int cancel_state;

        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        if (until_ms < 0)
                pthread_cond_wait(condition, mutex);
        else
                (void)pthread_cond_timedwait(condition, mutex, &until);
        pthread_setcancelstate(cancel_state, NULL);
}

/* ---- fork -------------------------------------------------------------------- */

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

static void *reserve(void *base, size_t n_bytes, int flag)
{
        return mmap(base, n_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flag, -1, 0);
}

/* Either call leaves no hole. The second one needs less memory of the kernel. */
void fork_hide_range(void *base, size_t n_bytes)
{
        if (reserve(base, n_bytes, MAP_FIXED) == MAP_FAILED)
                (void)mprotect(base, n_bytes, PROT_NONE);
}

void fork_hide(struct fork_entry *entry)
{
        fork_hide_range(entry->object, entry->n_bytes);
}

void fork_fill(struct fork_entry *entry)
{
        void *at = reserve(entry->object, entry->n_bytes, MAP_FIXED_NOREPLACE);

        if (at != MAP_FAILED && at != entry->object) /* an older kernel takes the address for a hint */
                munmap(at, entry->n_bytes);
}

static size_t page_bytes(void)
{
        return (size_t)sysconf(_SC_PAGESIZE);
}

int fork_guard_init(struct fork_guard *g)
{
        uint64_t *page = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (page == MAP_FAILED)
                return -ENOMEM;
        g->page = page;
        if (madvise(page, page_bytes(), MADV_WIPEONFORK) < 0)
                return -errno;
        *page = 1 + __atomic_load_n(&n_forks, __ATOMIC_ACQUIRE);
        return 0;
}

void fork_guard_clear(struct fork_guard *g)
{
        if (g->entry.in_child)
                fork_remove(&g->entry);
        if (g->page)
                munmap((void *)(uintptr_t)g->page, page_bytes());
        *g = (struct fork_guard){ .page = NULL };
}

void fork_guard_watch(struct fork_guard *g, void (*handler)(struct fork_entry *entry), void *object)
{
        g->entry = (struct fork_entry){ .in_child = handler, .object = object };
        fork_add(&g->entry);
}

bool fork_guard_has_forked(const struct fork_guard *g)
{
        return 1 + __atomic_load_n(&n_forks, __ATOMIC_ACQUIRE) != *g->page;
}
