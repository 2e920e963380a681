/* Biased locks; see biased_lock.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A lock is held for some tens of instructions. So there is no list of waiting threads, and unlocking is a
 * plain store. */
#include "client/biased_lock.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define N_SPINS      100u
#define N_YIELDS     10u
#define MAX_SLEEP_NS 1000000

/* The barrier's substitute, far longer than a processor delays a store. */
#define SETTLE_NS 20000000

/* Of linux/membarrier.h, which older kernel headers lack in part. */
enum { PRIVATE_EXPEDITED = 1 << 3, REGISTER_PRIVATE_EXPEDITED = 1 << 4 };

static enum { UNKNOWN, PERMITTED, LOST } membarrier_state; /* atomic */

static long membarrier(int command)
{
        return syscall(SYS_membarrier, command, 0, 0);
}

void biased_lock_register(void)
{
        if (__atomic_load_n(&membarrier_state, __ATOMIC_RELAXED) != LOST &&
            membarrier(REGISTER_PRIVATE_EXPEDITED) == 0)
                __atomic_store_n(&membarrier_state, PERMITTED, __ATOMIC_RELAXED);
}

static bool may_bias(void)
{
        return __atomic_load_n(&membarrier_state, __ATOMIC_RELAXED) == PERMITTED;
}

/* No cancellation point: the caller may have locks. */
static void sleep_ns(long n)
{
        struct timespec step = { 0, n };
        int cancel_state;

        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        nanosleep(&step, NULL);
        pthread_setcancelstate(cancel_state, NULL);
}

static int64_t now_ns(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* A program can forbid the call after it registered, by a seccomp filter. Then no lock is biased any more. For
 * those that are, this waits until an owner's store is visible. The filter may forbid sleeping, too. */
void biased_lock_barrier(void)
{
        int64_t end;

        if (membarrier(PRIVATE_EXPEDITED) == 0)
                return;
        __atomic_store_n(&membarrier_state, LOST, __ATOMIC_RELAXED);
        for (end = now_ns() + SETTLE_NS; now_ns() < end;)
                sleep_ns(MAX_SLEEP_NS);
}

/* The i-th time in a loop. The other thread may have been preempted, also by this one if it has a higher
 * priority: so this sleeps in the end. */
static void wait_some(unsigned i)
{
        if (i < N_SPINS)
                return;
        if (i < N_SPINS + N_YIELDS) {
                sched_yield();
                return;
        }
        i -= N_SPINS + N_YIELDS;
        sleep_ns(i < 10 ? 1000L << i : MAX_SLEEP_NS);
}

/* Sets LOCKED, if the state is still this one without it. */
static bool set_locked(struct biased_lock *l, uint8_t before)
{
        uint8_t locked = before | BIASED_LOCK_LOCKED;

        return before != locked && __atomic_compare_exchange_n(&l->state, &before, locked, false,
                                                               __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}

/* The owner has set LOCKED. */
static void count_own(struct biased_lock *l)
{
        if (l->n_own < BIASED_LOCK_AFTER)
                l->n_own++;
        else if (may_bias())
                __atomic_store_n(&l->state, BIASED_LOCK_LOCKED | BIASED_LOCK_BIASED, __ATOMIC_RELAXED);
}

bool biased_lock_try(struct biased_lock *l, bool is_owner)
{
        uint8_t before = __atomic_load_n(&l->state, __ATOMIC_RELAXED);

        if (is_owner ? __atomic_load_n(&l->is_inside, __ATOMIC_RELAXED) : before & BIASED_LOCK_BIASED)
                return false;
        if (!set_locked(l, before))
                return false;
        if (is_owner)
                count_own(l);
        else
                l->n_own = 0;
        return true;
}

bool biased_lock_close(struct biased_lock *l, bool is_owner)
{
        uint8_t before = __atomic_load_n(&l->state, __ATOMIC_RELAXED);

        for (unsigned i = 0; !set_locked(l, before); i++) {
                wait_some(i);
                before = __atomic_load_n(&l->state, __ATOMIC_RELAXED);
        }
        return !is_owner && before & BIASED_LOCK_BIASED;
}

void biased_lock_revoke(struct biased_lock *l, bool is_owner)
{
        if (__atomic_load_n(&l->state, __ATOMIC_RELAXED) & BIASED_LOCK_BIASED)
                for (unsigned i = 0; __atomic_load_n(&l->is_inside, __ATOMIC_ACQUIRE); i++)
                        wait_some(i);
        if (is_owner)
                return;
        __atomic_store_n(&l->state, BIASED_LOCK_LOCKED, __ATOMIC_RELAXED);
        l->n_own = 0;
}

void biased_lock_lock(struct biased_lock *l, bool is_owner)
{
        if (biased_lock_close(l, is_owner))
                biased_lock_barrier();
        biased_lock_revoke(l, is_owner);
}

/* ---- thread slots ---------------------------------------------------------------
 *
 * A destructor of thread-specific data returns the slot. A thread that allocates after that, in the destructor of
 * another library, gets no slot again: it might keep it for ever. */

#define NO_SLOT (THREAD_SLOTS_MAX + 1)

__thread unsigned thread_slot __attribute__((tls_model("initial-exec")));

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static bool has_key;
static unsigned n_slots;
static uint64_t taken; /* atomic: a bit for each slot */

_Static_assert(THREAD_SLOTS_MAX <= 64, "bits of `taken`");

static uint64_t bit_of(unsigned slot)
{
        return slot >= 1 && slot <= THREAD_SLOTS_MAX ? UINT64_C(1) << (slot - 1) : 0;
}

static void return_slot(void *userdata)
{
        (void)userdata;
        __atomic_fetch_and(&taken, ~bit_of(thread_slot), __ATOMIC_RELEASE);
        thread_slot = NO_SLOT;
}

/* The other threads are not in the child. */
static void keep_own_slot(void)
{
        __atomic_store_n(&taken, bit_of(thread_slot), __ATOMIC_RELAXED);
}

static void init(void)
{
        long n_processors = sysconf(_SC_NPROCESSORS_CONF);

        n_slots = THREAD_SLOTS_MIN;
        while (n_slots < THREAD_SLOTS_MAX && n_slots < 2 * n_processors)
                n_slots *= 2;
        /* Without the handler, slots of the parent's other threads stay taken in a child. */
        (void)pthread_atfork(NULL, NULL, keep_own_slot);
        has_key = pthread_key_create(&key, return_slot) == 0;
}

unsigned thread_slots(void)
{
        (void)pthread_once(&once, init);
        return n_slots;
}

void thread_slot_take(void)
{
        uint64_t before = __atomic_load_n(&taken, __ATOMIC_RELAXED);
        unsigned slot;

        do {
                slot = before == UINT64_MAX ? 0 : (unsigned)__builtin_ctzll(~before) + 1;
                if (thread_slot != 0 || slot == 0 || slot > thread_slots() || !has_key)
                        return;
        } while (!__atomic_compare_exchange_n(&taken, &before, before | bit_of(slot), true, __ATOMIC_ACQUIRE,
                                              __ATOMIC_RELAXED));
        thread_slot = slot;
        if (pthread_setspecific(key, &thread_slot) != 0)
                return_slot(NULL);
}
