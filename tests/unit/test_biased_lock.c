/* Biased locks and thread slots: an owner and other threads collide, with and without membarrier().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/biased_lock.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "tests/suite.h"

static _Alignas(128) struct biased_lock lock;

static void setup(void)
{
        lock = (struct biased_lock){ .n_own = 0 };
}

FIXTURE(biased_lock, setup, NULL);

/* The owner. True: without an exchange. */
static bool take_own(void)
{
        if (biased_lock_enter(&lock))
                return true;
        if (!biased_lock_try(&lock, true))
                biased_lock_lock(&lock, true);
        return false;
}

static void give_own(bool has_entered)
{
        if (has_entered)
                biased_lock_leave(&lock);
        else
                biased_lock_unlock(&lock);
}

/* Until the lock is biased. False: it does not get so. */
static bool bias(void)
{
        for (unsigned i = 0; i <= BIASED_LOCK_AFTER; i++) {
                if (!biased_lock_try(&lock, true))
                        ck_abort_msg("another thread has the lock");
                biased_lock_unlock(&lock);
        }
        if (!biased_lock_enter(&lock))
                return false;
        biased_lock_leave(&lock);
        return true;
}

/* In this thread only. */
static void forbid_membarrier(void)
{
        struct sock_filter filter[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        struct sock_fprog program = { .len = 4, .filter = filter };

        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
                ck_abort_msg("seccomp: %s", strerror(errno));
}

/* ---- states ---------------------------------------------------------------------- */

TEST(own_uses_in_sequence_bias)
{
        ck_assert(!bias()); /* the process is not registered */
        biased_lock_register();
        setup();
        for (unsigned i = 0; i < BIASED_LOCK_AFTER; i++) {
                ck_assert(biased_lock_try(&lock, true));
                biased_lock_unlock(&lock);
        }
        ck_assert(biased_lock_try(&lock, false)); /* another thread: the count begins again */
        biased_lock_unlock(&lock);
        ck_assert(biased_lock_try(&lock, true));
        biased_lock_unlock(&lock);
        ck_assert(!biased_lock_enter(&lock));
        ck_assert(bias());
}

TEST(others_do_not_try_a_biased_lock)
{
        biased_lock_register();
        ck_assert(bias());
        ck_assert(!biased_lock_try(&lock, false));
        ck_assert(biased_lock_try(&lock, true)); /* its owner may, and it stays biased */
        ck_assert(!biased_lock_enter(&lock));
        biased_lock_unlock(&lock);
        ck_assert(biased_lock_enter(&lock));
        ck_assert(!biased_lock_enter(&lock)); /* as a signal handler would */
        ck_assert(!biased_lock_try(&lock, true));
        biased_lock_leave(&lock);
        ck_assert(biased_lock_close(&lock, false));
        biased_lock_barrier();
        biased_lock_revoke(&lock, false);
        ck_assert(!biased_lock_enter(&lock));
        ck_assert(!biased_lock_try(&lock, true));
        biased_lock_unlock(&lock);
        ck_assert(!biased_lock_enter(&lock)); /* it is not biased any more */
        ck_assert(biased_lock_try(&lock, false));
}

TEST(nothing_is_biased_without_membarrier)
{
        forbid_membarrier();
        biased_lock_register();
        ck_assert(!bias());
        ck_assert(biased_lock_try(&lock, false));
}

/* The program has forbidden it meanwhile. */
TEST(lost_membarrier_ends_biasing)
{
        biased_lock_register();
        ck_assert(bias());
        forbid_membarrier();
        biased_lock_lock(&lock, false);
        biased_lock_unlock(&lock);
        biased_lock_register();
        ck_assert(!bias());
}

/* ---- collisions -------------------------------------------------------------------- */

/* In each round the lock is biased, and both threads want it at once. The owner first writes to cache lines
 * that the other thread has just written. Its stores leave the processor in sequence, so the one of
 * is_inside waits for these: without the barrier, longer than the other thread needs for its look. */
#define N_LINES  32u
#define N_ROUNDS 50000u

static struct {
        _Alignas(128) unsigned at; /* atomic */
} lines[N_LINES];

static _Alignas(128) unsigned long n_inside; /* guarded by the lock */
static unsigned inside;                      /* the same: which thread is */
static _Alignas(128) unsigned n_arrived;     /* atomic */

static void touch_lines(void)
{
        for (unsigned i = 0; i < N_LINES; i++)
                __atomic_store_n(&lines[i].at, i, __ATOMIC_RELAXED);
}

/* Spins, so that both threads leave at the same time. */
static void meet(unsigned *n)
{
        *n += 2;
        __atomic_add_fetch(&n_arrived, 1, __ATOMIC_ACQ_REL);
        for (unsigned i = 1; __atomic_load_n(&n_arrived, __ATOMIC_ACQUIRE) < *n; i++)
                if (i % 4096 == 0)
                        sched_yield();
}

/* For longer than a processor delays a store. */
static void stay_inside(unsigned me)
{
        inside = me;
        for (unsigned i = 0; i < 1000; i++) {
                __atomic_signal_fence(__ATOMIC_SEQ_CST);
                if (inside != me) /* each assertion is a system call */
                        ck_abort_msg("two threads are inside");
        }
        n_inside++;
}

static void *collide(void *userdata)
{
        unsigned n_met = 0;

        (void)userdata;
        for (unsigned round = 0; round < N_ROUNDS; round++) {
                touch_lines();
                meet(&n_met);
                for (unsigned i = 0; i < round % 64; i++)
                        __atomic_signal_fence(__ATOMIC_SEQ_CST);
                biased_lock_lock(&lock, false);
                stay_inside(2);
                biased_lock_unlock(&lock);
                meet(&n_met);
        }
        return NULL;
}

TEST(owner_and_another_collide)
{
        unsigned n_met = 0;
        pthread_t other;

        biased_lock_register();
        if (!bias())
                return; /* the kernel has no membarrier() */
        ck_assert_int_eq(pthread_create(&other, NULL, collide, NULL), 0);
        for (unsigned round = 0; round < N_ROUNDS; round++) {
                bool has_entered;

                if (!bias())
                        ck_abort_msg("the lock is not biased");
                meet(&n_met);
                touch_lines();
                has_entered = take_own();
                stay_inside(1);
                give_own(has_entered);
                meet(&n_met);
        }
        pthread_join(other, NULL);
        ck_assert_uint_eq(n_inside, 2 * N_ROUNDS);
}

/* ---- slots --------------------------------------------------------------------------- */

static pthread_barrier_t barrier;

static void *take_slot(void *ret)
{
        thread_slot_take();
        *(unsigned *)ret = thread_slot;
        pthread_barrier_wait(&barrier);
        return NULL;
}

/* Threads at the same time, and this one. */
static void run_with_slots(unsigned n, unsigned *ret)
{
        pthread_t threads[THREAD_SLOTS_MAX + 1];

        pthread_barrier_init(&barrier, NULL, n);
        for (unsigned i = 0; i < n; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, take_slot, &ret[i]), 0);
        for (unsigned i = 0; i < n; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&barrier);
}

TEST(slots_are_unique_and_returned)
{
        unsigned n = thread_slots(), slots[THREAD_SLOTS_MAX + 1];
        uint64_t seen = 1;

        ck_assert_uint_ge(n, THREAD_SLOTS_MIN);
        ck_assert_uint_le(n, THREAD_SLOTS_MAX);
        thread_slot_take();
        ck_assert_uint_eq(thread_slot, 1);
        for (unsigned round = 0; round < 3; round++, seen = 1) {
                run_with_slots(n - 1, slots);
                for (unsigned i = 0; i < n - 1; i++) {
                        ck_assert_uint_ge(slots[i], 2);
                        ck_assert_uint_le(slots[i], n);
                        ck_assert_uint_eq(seen >> (slots[i] - 1) & 1, 0);
                        seen |= UINT64_C(1) << (slots[i] - 1);
                }
        }
        run_with_slots(n, slots); /* one too many */
        for (unsigned i = 0; i < n; i++)
                seen += slots[i] == 0;
        ck_assert_uint_eq(seen, 2);
}

/* After the slot was returned: destructors of a later key run later. */
static void take_late(void *ret)
{
        thread_slot_take();
        *(unsigned *)ret = thread_slot;
}

static pthread_key_t late_key;

static void *end_late(void *ret)
{
        thread_slot_take();
        pthread_setspecific(late_key, ret);
        return NULL;
}

TEST(ending_threads_get_no_slot)
{
        unsigned late = 0, slots[1];
        pthread_t thread;

        thread_slot_take(); /* makes the slots' key */
        ck_assert_int_eq(pthread_key_create(&late_key, take_late), 0);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_late, &late), 0);
        pthread_join(thread, NULL);
        ck_assert_uint_gt(late, THREAD_SLOTS_MAX);
        run_with_slots(1, slots);
        ck_assert_uint_eq(slots[0], 2);
}

static void *fork_with_slots(void *userdata)
{
        unsigned slots[1];
        int status = -1;
        pid_t pid;

        (void)userdata;
        thread_slot_take();
        ck_assert_uint_eq(thread_slot, 2);
        pid = fork();
        if (pid == 0) { /* only this thread is there, and keeps its slot */
                run_with_slots(1, slots);
                _exit(thread_slot == 2 && slots[0] == 1 ? 0 : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        return NULL;
}

TEST(forked_child_has_slots_of_its_own)
{
        pthread_t thread;

#ifdef __SANITIZE_THREAD__
        return; /* it permits no thread in the child */
#endif
        thread_slot_take();
        ck_assert_int_eq(pthread_create(&thread, NULL, fork_with_slots, NULL), 0);
        pthread_join(thread, NULL);
}
