/* What the library needs of its process: a thread's error message, a clock, and the handling of fork(2).
 *
 * A client registers its address ranges and its sockets. In the child the handler of fork(2) replaces
 * each range by reserved addresses (PROT_NONE) before any other code of the program runs there, and
 * closes the sockets. The ranges are inherited mappings until then, so no other mapping can be placed
 * there at any time.
 *
 * The list has its own lock, which is held over fork() and otherwise only while an entry is added or
 * removed. No code waits or takes another lock under it, so fork() cannot deadlock.
 *
 * Invariant: a registered range is mapped by its owner, and by nothing else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PROCESS_H
#define BFC_CLIENT_PROCESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

/* Stores the message for this thread (truncated if too long) and returns error. */
int error_set(int error, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* error_set() with -ENOMEM: this process has no memory. */
int error_no_memory(void);
/* "" if nothing has failed in this thread. */
const char *error_last(void);

/* Starts a thread that blocks all signals, with the stack of a program's first thread. The caller joins it.
 * -EAGAIN, -ENOMEM. */
int thread_new(void *(*run)(void *), void *userdata, const char *name, pthread_t *ret);

/* Milliseconds of CLOCK_MONOTONIC. */
int64_t clock_now_ms(void);

/* Its clock is CLOCK_MONOTONIC. */
void condition_init(pthread_cond_t *condition);

/* Waits for a condition, until that time at most; -1: for ever. The library
 * calls no other wait: pthread_cond_wait() is a cancellation point, and a thread that is cancelled in it ends with
 * the lock. */
void condition_wait(pthread_cond_t *condition, pthread_mutex_t *lock, int64_t until_ms);

/* ---- fork ------------------------------------------------------------------ */

/* Embedded in its owner. */
struct fork_entry {
        /* Called in the child, on its only thread. Async-signal-safe functions only; no lock. */
        void (*in_child)(struct fork_entry *entry);
        void *object;   /* in_child()'s; of a range: its address */
        size_t n_bytes; /* of a range */
        LIST_ENTRY(fork_entry) link;
};

/* Must have succeeded before registrations take effect. -ENOMEM. */
int fork_watch(void);

/* All but the link is the caller's to set. */
void fork_add(struct fork_entry *entry);
/* A range is removed before it is unmapped. */
void fork_remove(struct fork_entry *entry);

/* For in_child: reserves the range, replacing all mappings. */
void fork_hide(struct fork_entry *entry);
void fork_hide_range(void *base, size_t n_bytes);
/* fork_hide() for a range of which the child inherits nothing. If it inherits a part, nothing is changed. */
void fork_fill(struct fork_entry *entry);

/* Distinguishes a forked child from the process that made an object, without a system call or a lock. */
struct fork_guard {
        const volatile uint64_t
                *page; /* 1 + the process's forks at the creation; the kernel wipes it in the child */
        struct fork_entry entry; /* registered if it has a function */
};

/* Zero-initialised before. -ENOMEM; -EINVAL and others: the kernel cannot wipe a page on fork. */
int fork_guard_init(struct fork_guard *g);
void fork_guard_clear(struct fork_guard *g); /* also after a failure, or zero-initialised */
/* in_child(): with `object` in its entry. */
void fork_guard_watch(struct fork_guard *g, void (*in_child)(struct fork_entry *entry), void *object);
/* The process has forked since. */
bool fork_guard_has_forked(const struct fork_guard *g);

/* False in a forked child. */
static inline bool fork_guard_is_own(const struct fork_guard *g)
{
        return *g->page != 0;
}

#endif
