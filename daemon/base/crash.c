/* Counting crashes; see crash.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/crash.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

static const int signals[] = { SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL };

#define N_SIGNALS (sizeof(signals) / sizeof(signals[0]))

static struct sigaction before[N_SIGNALS]; /* for example a sanitizer's */
static _Atomic(_Atomic uint32_t *) counted;
static _Atomic(_Atomic uint32_t *) at_object;

/* The kernel's own signals have a positive si_code; abort() sends its signal from this process. */
static bool is_ours(const siginfo_t *info)
{
        return info->si_code > 0 || info->si_pid == getpid();
}

static bool mark_object(_Atomic uint32_t *object)
{
        if (!object || *object == 0 || gettid() != getpid())
                return false;
        atomic_fetch_or(object, CRASH_MARK);
        return true;
}

/* Counted once, even if further handlers run. */
static void on_crash(int number, siginfo_t *info, void *context)
{
        _Atomic uint32_t *count = atomic_exchange(&counted, NULL);

        (void)context;
        if (count && is_ours(info) && !mark_object(at_object))
                atomic_fetch_add(count, 1);
        for (size_t i = 0; i < N_SIGNALS; i++)
                sigaction(signals[i], &before[i], NULL);
        raise(number); /* delivered after this handler returns */
}

void crash_count_in(_Atomic uint32_t *count, _Atomic uint32_t *object)
{
        struct sigaction action = { .sa_sigaction = on_crash, .sa_flags = SA_SIGINFO };
        _Atomic uint32_t *old;

        at_object = object;
        old = atomic_exchange(&counted, count);
        sigemptyset(&action.sa_mask);
        for (size_t i = 0; i < N_SIGNALS; i++) {
                if (count && !old)
                        sigaction(signals[i], &action, &before[i]);
                else if (!count && old)
                        sigaction(signals[i], &before[i], NULL);
        }
}
