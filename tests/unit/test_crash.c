/* Counting crashes: what this process does to itself counts, what others send does not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/crash.h"
#include "tests/suite.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static _Atomic uint32_t *count, *object;
static const int signals[] = { SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL };

static void setup(void)
{
        count = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        ck_assert_ptr_ne(count, MAP_FAILED);
        object = count + 1;
}

static void teardown(void)
{
        munmap((void *)count, sizeof(*count));
}

FIXTURE(crash, setup, teardown);

static void touch_nothing(void)
{
        void *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        *(volatile char *)page = 1;
}

static void raise_bus(void)
{
        raise(SIGBUS);
}

/* crash: NULL: it waits for a signal from outside. */
static pid_t child(void (*crash)(void))
{
        const struct rlimit no_core = { 0, 0 };
        int ready[2];
        char byte;
        pid_t pid;

        ck_assert_int_eq(pipe(ready), 0);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                setrlimit(RLIMIT_CORE, &no_core);
                for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++)
                        signal(signals[i], SIG_DFL); /* a sanitizer's would say much */
                crash_count_in(count, object);
                if (crash)
                        crash();
                if (write(ready[1], "", 1) != 1)
                        _exit(1);
                for (;;)
                        pause();
        }
        close(ready[1]);
        ck_assert_int_eq(read(ready[0], &byte, 1), crash ? 0 : 1);
        close(ready[0]);
        return pid;
}

static int end_of(pid_t pid)
{
        int status = -1;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        return WIFSIGNALED(status) ? WTERMSIG(status) : -1;
}

LOOP_TEST(own_crashes_are_counted, 3)
{
        static const struct {
                void (*crash)(void);
                int signal;
        } crashes[] = { { abort, SIGABRT }, { touch_nothing, SIGSEGV }, { raise_bus, SIGBUS } };

        ck_assert_int_eq(end_of(child(crashes[_i].crash)), crashes[_i].signal);
        ck_assert_uint_eq(*count, 1);
}

/* The object is marked in place of the count. */
LOOP_TEST(crashes_at_an_object_are_marked, 2)
{
        *object = 7;
        ck_assert_int_eq(end_of(child(_i == 0 ? abort : touch_nothing)), _i == 0 ? SIGABRT : SIGSEGV);
        ck_assert_uint_eq(*count, 0);
        ck_assert_uint_eq(*object, 7 | CRASH_MARK);
}

static void *crash_as_thread(void *arg)
{
        (void)arg;
        abort();
}

static void crash_in_thread(void)
{
        pthread_t thread;

        if (pthread_create(&thread, NULL, crash_as_thread, NULL) == 0)
                pthread_join(thread, NULL);
}

/* They have no part in what the main thread is at. */
TEST(crashes_of_other_threads_mark_nothing)
{
        *object = 7;
        ck_assert_int_eq(end_of(child(crash_in_thread)), SIGABRT);
        ck_assert_uint_eq(*count, 1);
        ck_assert_uint_eq(*object, 7);
}

/* As the service manager's watchdog does, or an operator. */
LOOP_TEST(signals_from_processes_are_not_counted, sizeof(signals) / sizeof(signals[0]))
{
        pid_t pid;

        *object = 7;
        pid = child(NULL);
        ck_assert_int_eq(kill(pid, signals[_i]), 0);
        ck_assert_int_eq(end_of(pid), signals[_i]); /* it ends all the same */
        ck_assert_uint_eq(*count, 0);
        ck_assert_uint_eq(*object, 7);
}
