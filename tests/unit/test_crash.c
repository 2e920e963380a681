/* Counting crashes: what this process does to itself counts, what others send does not.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/crash.h"
#include "tests/suite.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static _Atomic uint32_t *count;
static const int signals[] = { SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL };

static void setup(void)
{
        count = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        ck_assert_ptr_ne(count, MAP_FAILED);
}

static void teardown(void)
{
        munmap((void *)count, sizeof(*count));
}

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
                crash_count_in(count);
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

START_TEST(its_own_crashes_count)
{
        static const struct {
                void (*crash)(void);
                int signal;
        } crashes[] = { { abort, SIGABRT }, { touch_nothing, SIGSEGV }, { raise_bus, SIGBUS } };

        ck_assert_int_eq(end_of(child(crashes[_i].crash)), crashes[_i].signal);
        ck_assert_uint_eq(*count, 1);
}
END_TEST

/* As the service manager's watchdog does, or an operator. */
START_TEST(signals_of_others_do_not)
{
        pid_t pid = child(NULL);

        ck_assert_int_eq(kill(pid, signals[_i]), 0);
        ck_assert_int_eq(end_of(pid), signals[_i]); /* it ends all the same */
        ck_assert_uint_eq(*count, 0);
}
END_TEST

int main(void)
{
        Suite *s = suite_create("crash");
        TCase *t = tcase_create("crash");

        tcase_add_checked_fixture(t, setup, teardown);
        tcase_add_loop_test(t, its_own_crashes_count, 0, 3);
        tcase_add_loop_test(t, signals_of_others_do_not, 0, sizeof(signals) / sizeof(signals[0]));
        suite_add_tcase(s, t);
        return suite_run(s);
}
