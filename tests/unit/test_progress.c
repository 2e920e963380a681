/* Progress: a line on a terminal from the first second on, and nothing elsewhere.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/progress.h"

static int master;
static FILE *terminal;

static void setup(void)
{
        int slave;

        ck_assert_int_eq(setenv("TERM", "xterm", 1), 0);
        master = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
        ck_assert_int_ge(master, 0);
        ck_assert_int_eq(grantpt(master), 0);
        ck_assert_int_eq(unlockpt(master), 0);
        slave = open(ptsname(master), O_RDWR | O_NOCTTY | O_CLOEXEC);
        ck_assert_int_ge(slave, 0);
        terminal = fdopen(slave, "w");
        ck_assert_ptr_nonnull(terminal);
}

static void teardown(void)
{
        fclose(terminal);
        close(master);
}

FIXTURE(progress, setup, teardown);

/* What was written to the terminal. */
static const char *shown(void)
{
        static char text[4096];
        ssize_t n = read(master, text, sizeof(text) - 1);

        if (n < 0)
                ck_assert_int_eq(errno, EAGAIN);
        text[n > 0 ? n : 0] = '\0';
        return text;
}

/* As if it had begun so long ago. */
static void begin(struct progress *p, FILE *out, uint64_t ago_ms, uint64_t n_total)
{
        progress_begin(p, out, "plan", n_total);
        if (progress_is_shown(p))
                p->begin_ms -= ago_ms;
}

TEST(terminal_after_a_second)
{
        struct progress p;

        begin(&p, terminal, 0, 4096);
        progress_set(&p, 1024, 4096);
        ck_assert_str_eq(shown(), "");
        begin(&p, terminal, 61000, 4096);
        progress_set(&p, 1024, 4096);
        ck_assert_str_eq(shown(), "\rplan:  25 %, 61 s\x1b[K");
        progress_set(&p, 2048, 4096); /* too soon */
        ck_assert_str_eq(shown(), "");
        progress_end(&p);
        ck_assert_str_eq(shown(), "\r\x1b[K");
        progress_end(&p);
        progress_set(&p, 4096, 4096);
        ck_assert_str_eq(shown(), "");
}

TEST(total_that_is_not_known)
{
        struct progress p;

        begin(&p, terminal, 2000, 0);
        progress_set(&p, 7, 0);
        ck_assert_str_eq(shown(), "\rplan: 2 s\x1b[K");
        progress_end(&p);
}

TEST(more_than_the_total)
{
        struct progress p;

        begin(&p, terminal, 2000, 10);
        progress_set(&p, 20, 10);
        ck_assert_str_eq(shown(), "\rplan: 100 %, 2 s\x1b[K");
        progress_end(&p);
}

TEST(pipe_is_silent)
{
        struct progress p;
        char c;
        FILE *out;
        int fds[2];

        ck_assert_int_eq(pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
        out = fdopen(fds[1], "w");
        begin(&p, out, 5000, 10);
        ck_assert(!progress_is_shown(&p));
        progress_set(&p, 5, 10);
        progress_end(&p);
        fflush(out);
        ck_assert_int_eq(read(fds[0], &c, 1), -1);
        fclose(out);
        close(fds[0]);
}

/* Such a terminal cannot go back to the begin of a line. */
TEST(dumb_terminal_is_silent)
{
        struct progress p;

        setenv("TERM", "dumb", 1);
        begin(&p, terminal, 5000, 10);
        progress_set(&p, 5, 10);
        progress_end(&p);
        ck_assert_str_eq(shown(), "");
}
