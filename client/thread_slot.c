/* Thread slots; see thread_slot.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A destructor of thread-specific data returns the slot. A thread that allocates after that, in the
 * destructor of another library, gets no slot again: it might keep it for ever. */
#include "client/thread_slot.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

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
