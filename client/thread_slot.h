/* Thread slots: small numbers that the threads of the process have while they live. No two threads have the
 * same one at a time. A thread that ends leaves its slot to a later thread, and all that it wrote as the owner
 * of the slot happens before that.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_THREAD_SLOT_H
#define BFC_CLIENT_THREAD_SLOT_H

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

#endif
