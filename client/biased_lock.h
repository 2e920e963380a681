/* A lock that its owner takes nearly always, and other threads rarely.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An atomic exchange takes longer than the rest of a small allocation. So the owner of a biased lock needs
 * none, and the others pay for that:
 *
 *   owner                           another thread
 *   is_inside = true                state |= LOCKED (compare-and-exchange)
 *   compiler barrier                membarrier(2)
 *   state == BIASED: it is inside   wait for !is_inside, then clear BIASED
 *
 * Each side stores its word and then loads the other's. They must not both load the old value. The
 * processor of the owner may delay its store until after its load. But membarrier(PRIVATE_EXPEDITED) makes
 * every running thread of the process execute a full barrier, and one that does not run executed it when it
 * was scheduled out. If the owner's load is before that barrier, its store is before it, too, and the
 * other thread sees is_inside. If the load is after it, it sees LOCKED. The compiler barrier keeps the
 * order of the two instructions. What is done inside is ordered by release and acquire: is_inside from the
 * owner to the others, and state from the others to the owner.
 *
 * membarrier() interrupts other processors, so a lock that it was called for is not biased any more. It
 * is biased when the owner took it BIASED_LOCK_AFTER times in sequence by exchanges. So the calls are rare,
 * whatever the threads do. Where the kernel has no membarrier(), or does not permit it, no lock is biased.
 *
 * The owner is the thread that has a certain slot, so it is one thread at a time, and the next
 * one sees all that the one before has written. Only the owner writes is_inside. A signal handler of the
 * owner that finds is_inside set does not enter.
 *
 * Invariants: where LOCKED is set, only the thread that set it changes `state`. BIASED is set only by
 * the owner, and cleared only when the owner is not inside. */
#ifndef BFC_CLIENT_BIASED_LOCK_H
#define BFC_CLIENT_BIASED_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define BIASED_LOCK_AFTER 1024u

enum { BIASED_LOCK_LOCKED = 1, BIASED_LOCK_BIASED = 2 };

/* ---- thread slots --------------------------------------------------------------
 *
 * Small numbers that the threads of the process have while they live. No two threads have the same one at a time. A
 * thread that ends leaves its slot to a later thread, and all that it wrote as the owner of the slot happens before
 * that. */

#define THREAD_SLOTS_MIN 16u
#define THREAD_SLOTS_MAX 64u

/* 1 + the slot of this thread. 0: it has none yet. Above THREAD_SLOTS_MAX: it gets none. Initial-exec, because a
 * call for each access would cost more than a lock. All TLS of the library is then in the little that the C library
 * reserves for libraries that are loaded late: it must stay small. */
extern __thread unsigned thread_slot __attribute__((tls_model("initial-exec")));

/* How many there are: twice as many as processors, a power of two. Constant. */
unsigned thread_slots(void);

/* Sets thread_slot to the lowest free slot, if there is one and the thread has none. */
void thread_slot_take(void);

/* ---- locks ---------------------------------------------------------------------- */

/* Zero-initialised is unlocked. */
struct biased_lock {
        uint8_t state;  /* atomic */
        bool is_inside; /* atomic: the owner is inside, or about to try it */
        uint16_t n_own; /* of the thread that set LOCKED: how often the owner did since another thread did */
};

/* Before the first lock: registers the process for membarrier(). It may be called again, by any thread. In a
 * process with several threads the first call takes some milliseconds. */
void biased_lock_register(void);

/* The owner: false if the lock is not biased, or another thread has it. */
static inline __attribute__((always_inline)) bool biased_lock_enter(struct biased_lock *l)
{
        if (__atomic_load_n(&l->is_inside, __ATOMIC_RELAXED))
                return false;
        __atomic_store_n(&l->is_inside, true, __ATOMIC_RELAXED);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        if (__builtin_expect(__atomic_load_n(&l->state, __ATOMIC_ACQUIRE) == BIASED_LOCK_BIASED, 1))
                return true;
        __atomic_store_n(&l->is_inside, false, __ATOMIC_RELAXED);
        return false;
}

/* The owner, in a signal handler: the code that it interrupted is inside. */
static inline bool biased_lock_is_inside(const struct biased_lock *l)
{
        return __atomic_load_n(&l->is_inside, __ATOMIC_RELAXED);
}

static inline void biased_lock_leave(struct biased_lock *l)
{
        __atomic_store_n(&l->is_inside, false, __ATOMIC_RELEASE);
}

/* False: another thread has the lock, or it is biased and the caller is not the owner. */
bool biased_lock_try(struct biased_lock *l, bool is_owner);
void biased_lock_lock(struct biased_lock *l, bool is_owner);

/* After biased_lock_try(), _lock() or _revoke(). */
static inline void biased_lock_unlock(struct biased_lock *l)
{
        uint8_t state = __atomic_load_n(&l->state, __ATOMIC_RELAXED);

        __atomic_store_n(&l->state, (uint8_t)(state & BIASED_LOCK_BIASED), __ATOMIC_RELEASE);
}

/* biased_lock_lock() in steps, for several locks with one barrier: _close() each of them, biased_lock_barrier()
 * if any returned true, and _revoke() each. The caller has the lock then. */
bool biased_lock_close(struct biased_lock *l, bool is_owner);
void biased_lock_barrier(void);
void biased_lock_revoke(struct biased_lock *l, bool is_owner);

#endif
