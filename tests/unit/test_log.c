/* SPDX-License-Identifier: Apache-2.0 */
/* Lines as they arrive on standard error. */
#include "daemon/base/log.h"
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int saved_stderr;
static int ends[2]; /* a packet pipe: one read gives one write */

static void setup(void)
{
        saved_stderr = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_ge(saved_stderr, 0);
        ck_assert_int_eq(pipe2(ends, O_CLOEXEC | O_DIRECT | O_NONBLOCK), 0);
        ck_assert_int_eq(dup2(ends[1], STDERR_FILENO), STDERR_FILENO);
}

static void teardown(void)
{
        dup2(saved_stderr, STDERR_FILENO);
        close(saved_stderr);
        close(ends[0]);
        close(ends[1]);
        unsetenv("JOURNAL_STREAM");
}

FIXTURE(log, setup, teardown);

static const char *next_line(void)
{
        static char line[4096];
        ssize_t n = read(ends[0], line, sizeof(line) - 1);

        if (n < 0)
                return "";
        line[n] = '\0';
        return line;
}

TEST(levels_have_prefixes)
{
        unsetenv("JOURNAL_STREAM");
        log_open(LOG_LEVEL_DEBUG);
        log_error("%d", 1);
        log_warning("%d", 2);
        log_notice("%d", 3);
        log_info("tenant %s", "vision");
        log_debug("%s", "");
        ck_assert_str_eq(next_line(), "error: 1\n");
        ck_assert_str_eq(next_line(), "warning: 2\n");
        ck_assert_str_eq(next_line(), "notice: 3\n");
        ck_assert_str_eq(next_line(), "info: tenant vision\n");
        ck_assert_str_eq(next_line(), "debug: \n");
        ck_assert_str_eq(next_line(), "");
}

TEST(test_levels)
{
        log_open(LOG_LEVEL_NOTICE);
        log_info("not urgent");
        ck_assert_str_eq(next_line(), "");
        log_notice("urgent");
        ck_assert_str_eq(next_line(), "notice: urgent\n");
}

TEST(test_journal)
{
        struct stat st;
        char stream[64];

        ck_assert_int_eq(fstat(STDERR_FILENO, &st), 0);
        snprintf(stream, sizeof(stream), "%llu:%llu", (unsigned long long)st.st_dev,
                 (unsigned long long)st.st_ino);
        setenv("JOURNAL_STREAM", stream, 1);
        log_open(LOG_LEVEL_DEBUG);
        log_error("a");
        log_warning("b");
        log_notice("c");
        log_info("d");
        log_debug("e");
        ck_assert_str_eq(next_line(), "<3>a\n");
        ck_assert_str_eq(next_line(), "<4>b\n");
        ck_assert_str_eq(next_line(), "<5>c\n");
        ck_assert_str_eq(next_line(), "<6>d\n");
        ck_assert_str_eq(next_line(), "<7>e\n");
        /* standard error was redirected after the variable was set */
        setenv("JOURNAL_STREAM", "1:1", 1);
        log_open(LOG_LEVEL_DEBUG);
        log_error("a");
        ck_assert_str_eq(next_line(), "error: a\n");
        setenv("JOURNAL_STREAM", "nonsense", 1);
        log_open(LOG_LEVEL_DEBUG);
        log_error("a");
        ck_assert_str_eq(next_line(), "error: a\n");
}

TEST(test_one_line)
{
        log_open(LOG_LEVEL_INFO);
        log_info("name '%s'", "a\nerror: forged\r\t\x1b[31m\x7f \xc3\xa9");
        ck_assert_str_eq(next_line(), "info: name 'a?error: forged???[31m? ?\?'\n");
}

TEST(test_long_line)
{
        char text[5000];
        const char *line;

        memset(text, 'x', sizeof(text) - 1);
        text[sizeof(text) - 1] = '\0';
        log_open(LOG_LEVEL_INFO);
        log_info("%s", text);
        line = next_line();
        ck_assert_uint_eq(strlen(line), 2047);
        ck_assert_str_eq(line + 2047 - 5, "x...\n");
        ck_assert_str_eq(next_line(), "");
}

TEST(test_errno_stays)
{
        log_open(LOG_LEVEL_INFO);
        errno = ENOENT;
        log_info("%m");
        ck_assert_int_eq(errno, ENOENT);
        ck_assert_str_eq(next_line(), "info: No such file or directory\n");
        close(STDERR_FILENO);
        errno = EPERM;
        log_info("into the void");
        ck_assert_int_eq(errno, EPERM);
        dup2(ends[1], STDERR_FILENO);
}

/* A reader that is too slow: no call waits for it, order is kept, and what finds no room is counted. */
TEST(test_slow_reader)
{
        static char text[4 << 20];
        static const char word[] = "the line of the number ";
        unsigned long n_lines = 0, n_lost = 0, last = 0;
        size_t n_text = 0;
        int slow[2];
        bool is_empty;

        ck_assert_int_eq(pipe2(slow, O_CLOEXEC), 0); /* a write would wait */
        ck_assert_int_eq(fcntl(slow[0], F_SETFL, O_NONBLOCK), 0);
        ck_assert_int_eq(dup2(slow[1], STDERR_FILENO), STDERR_FILENO);
        log_open(LOG_LEVEL_INFO);
        for (unsigned i = 1; i <= 30000; i++)
                log_info("%s%u", word, i);
        ck_assert(log_is_queued());
        do {
                ssize_t n;

                is_empty = log_flush();
                while ((n = read(slow[0], text + n_text, sizeof(text) - 1 - n_text)) > 0)
                        n_text += (size_t)n;
        } while (!is_empty);
        text[n_text] = '\0';
        for (char *rest = text, *line; (line = strsep(&rest, "\n")) && *line; n_lines++) {
                unsigned long number;

                if (sscanf(line, "warning: %lu log lines were lost", &number) == 1) {
                        n_lost += number;
                        n_lines--;
                        continue;
                }
                ck_assert_int_eq(sscanf(line, "info: the line of the number %lu", &number), 1);
                ck_assert_uint_gt(number, last);
                last = number;
        }
        ck_assert_uint_gt(n_lost, 0);
        ck_assert_uint_eq(n_lines + n_lost, 30000);
        ck_assert_uint_eq(log_count_lost(), n_lost);
        log_info("again");
        ck_assert(!log_is_queued());
        close(slow[0]);
        close(slow[1]);
}

/* As long as it goes on the time between two lines grows, and none is forgotten. */
TEST(test_limit)
{
        struct log_limit limit = { 0 };

        unsetenv("JOURNAL_STREAM");
        log_open(LOG_LEVEL_INFO);
        for (unsigned i = 0; i < 5; i++)
                log_limited(&limit, LOG_LEVEL_INFO, "%u", i);
        ck_assert_str_eq(next_line(), "info: 0\n");
        ck_assert_uint_eq(limit.n_left_out, 4);
        for (unsigned ms = 1000; ms < 120000; ms *= 2) {
                ck_assert_uint_eq(limit.interval_ms, ms < 60000 ? ms : 60000);
                limit.last_ms -= limit.interval_ms;
                log_limited(&limit, LOG_LEVEL_INFO, "more");
                ck_assert_str_eq(next_line(), ms == 1000 ? "info: more (4 similar messages suppressed)\n"
                                                         : "info: more (1 similar messages suppressed)\n");
                log_limited(&limit, LOG_LEVEL_INFO, "and");
                ck_assert_str_eq(next_line(), "");
        }
        limit.last_ms -= 2 * limit.interval_ms; /* nothing for long */
        log_limited(&limit, LOG_LEVEL_INFO, "again");
        ck_assert_str_eq(next_line(), "info: again (1 similar messages suppressed)\n");
        ck_assert_uint_eq(limit.interval_ms, 1000);
}
