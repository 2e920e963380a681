/* See kill_points.h. Each restored ledger is checked here, too: a wrong one aborts the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/kill_points.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "daemon/base/crash.h"
#include "daemon/session/resume.h"
#include "daemon/ledger/table.h"
#include "daemon/base/log.h"
#include "daemon/memory/broker.h"
#include "tests/checks.h"

#define SINGLE_STEP 0x100 /* the trap flag of x86 */

extern const char __executable_start[], etext[];

static struct kill_points own_page;
static struct kill_points *page = &own_page;
static unsigned char *base; /* of the ledger's mapping; NULL: none */
static size_t n_mapped;
static struct sigaction others; /* for faults elsewhere */
static _Thread_local bool was_in_library;

__attribute__((constructor)) static void open_page(void)
{
        const char *path = getenv(KILL_POINTS_FILE);
        int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
        void *p;

        if (fd < 0)
                return;
        p = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (p != MAP_FAILED)
                page = p;
}

static void die_at(uint32_t n)
{
        uint32_t at = n;

        if (n > 0 && __atomic_compare_exchange_n(&page->at, &at, KILL_POINTS_DIED, false, __ATOMIC_ACQ_REL,
                                                 __ATOMIC_ACQUIRE)) {
                kill(getpid(), SIGKILL);
                for (;;)
                        pause();
        }
}

static void on_store(int number, siginfo_t *info, void *context)
{
        ucontext_t *c = context;
        uintptr_t at = (uintptr_t)info->si_addr, from = (uintptr_t)c->uc_mcontext.gregs[REG_RIP];
        bool in_library = from < (uintptr_t)__executable_start || from >= (uintptr_t)etext;

        if (!base || at < (uintptr_t)base || at >= (uintptr_t)base + n_mapped) {
                sigaction(number, &others, NULL); /* the instruction faults again */
                return;
        }
        if (!in_library || !was_in_library) {
                uint32_t n = __atomic_add_fetch(&page->n, 1, __ATOMIC_ACQ_REL);

                if (page->is_before)
                        die_at(n);
        }
        was_in_library = in_library;
        mprotect(base, n_mapped, PROT_READ | PROT_WRITE);
        c->uc_mcontext.gregs[REG_EFL] |= SINGLE_STEP;
}

static void on_step(int number, siginfo_t *info, void *context)
{
        ucontext_t *c = context;

        (void)number;
        (void)info;
        c->uc_mcontext.gregs[REG_EFL] &= ~SINGLE_STEP;
        if (base)
                mprotect(base, n_mapped, PROT_READ);
        if (!page->is_before)
                die_at(__atomic_load_n(&page->n, __ATOMIC_ACQUIRE));
}

static void unwatch(void)
{
        unsigned char *mapping = base;

        base = NULL;
        if (!mapping)
                return;
        mprotect(mapping, n_mapped, PROT_READ | PROT_WRITE);
        sigaction(SIGSEGV, &others, NULL);
}

static void watch(void *mapping, size_t n_bytes)
{
        struct sigaction stores = { .sa_sigaction = on_store, .sa_flags = SA_SIGINFO },
                         steps = { .sa_sigaction = on_step, .sa_flags = SA_SIGINFO };

        unwatch();
        base = mapping;
        n_mapped = n_bytes;
        sigaction(SIGTRAP, &steps, NULL);
        sigaction(SIGSEGV, &stores, &others);
        mprotect(base, n_mapped, PROT_READ);
}

/* ---- functions of the daemon ------------------------------------------------------- */

int __real_ledger_map(struct ledger *l);
int __wrap_ledger_map(struct ledger *l);
int __wrap_ledger_map(struct ledger *l) /* by ledger_open() */
{
        int r = __real_ledger_map(l);

        if (r == 0)
                watch(l->header, l->n_bytes);
        return r;
}

struct ledger *__real_ledger_free(struct ledger *l);
struct ledger *__wrap_ledger_free(struct ledger *l);
struct ledger *__wrap_ledger_free(struct ledger *l)
{
        if (l && base == (unsigned char *)l->header)
                unwatch();
        return __real_ledger_free(l);
}

/* Of a ledger that is in use from now on. */
void __real_crash_count_in(_Atomic uint32_t *count, _Atomic uint32_t *object);
void __wrap_crash_count_in(_Atomic uint32_t *count, _Atomic uint32_t *object);
void __wrap_crash_count_in(_Atomic uint32_t *count, _Atomic uint32_t *object)
{
        unsigned char *header = count ? (unsigned char *)count - offsetof(struct header, n_crashes) : NULL;

        unwatch();
        __real_crash_count_in(count, object);
        if (header)
                watch(header, (size_t)((const struct header *)(void *)header)->n_bytes);
}

/* A signal that an instruction causes kills a thread that has blocked it. */
int __real_pthread_sigmask(int how, const sigset_t *set, sigset_t *ret_before);
int __wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *ret_before);
int __wrap_pthread_sigmask(int how, const sigset_t *set, sigset_t *ret_before)
{
        sigset_t others_of_set;

        if (!set || how == SIG_UNBLOCK)
                return __real_pthread_sigmask(how, set, ret_before);
        others_of_set = *set;
        sigdelset(&others_of_set, SIGSEGV);
        sigdelset(&others_of_set, SIGTRAP);
        return __real_pthread_sigmask(how, &others_of_set, ret_before);
}

static void __attribute__((format(printf, 1, 2))) crash_if_at(const char *format, ...)
{
        char text[sizeof(page->crashes_at)];
        va_list list;

        va_start(list, format);
        vsnprintf(text, sizeof(text), format, list);
        va_end(list);
        if (strcmp(text, page->crashes_at) == 0)
                abort();
}

void __real_ledger_note_session(struct ledger *l, uint32_t index);
void __wrap_ledger_note_session(struct ledger *l, uint32_t index);
void __wrap_ledger_note_session(struct ledger *l, uint32_t index)
{
        const struct ledger_session *s = ledger_session_at(l, index);

        __real_ledger_note_session(l, index);
        crash_if_at("session %llu", (unsigned long long)s->id);
        crash_if_at("sessions of %s", s->tenant);
}

void __real_ledger_note_quota(struct ledger *l, uint32_t index);
void __wrap_ledger_note_quota(struct ledger *l, uint32_t index);
void __wrap_ledger_note_quota(struct ledger *l, uint32_t index)
{
        __real_ledger_note_quota(l, index);
        if (ledger_quota_at(l, index)->is_closed)
                return;
        crash_if_at("quota %u", index);
        for (uint32_t i = 0; i < ledger_lease_end(l); i++)
                if (ledger_lease_get(l, i) && ledger_lease_get(l, i)->quota == index)
                        crash_if_at("lease %s", ledger_lease_get(l, i)->name);
}

int __real_restore_sessions(struct broker *b);
int __wrap_restore_sessions(struct broker *b);
int __wrap_restore_sessions(struct broker *b)
{
        int r = __real_restore_sessions(b);
        const char *why = "";

        if (r == 0 && broker_check(b, &why) < 0) {
                log_error("the restored tables are inconsistent: %s", why);
                abort();
        }
        return r;
}
