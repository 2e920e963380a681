/* SPDX-License-Identifier: Apache-2.0 */
/* Lines as they arrive on standard error. */
#include "daemon/log.h"
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int n_fds_before;
static int saved_stderr;
static int ends[2]; /* a packet pipe: one read gives one write */

static void setup(void)
{
        n_fds_before = suite_count_fds();
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
        ck_assert_int_eq(suite_count_fds(), n_fds_before);
}

static const char *next_line(void)
{
        static char line[4096];
        ssize_t n = read(ends[0], line, sizeof(line) - 1);

        if (n < 0)
                return "";
        line[n] = '\0';
        return line;
}

START_TEST(test_words)
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
END_TEST

START_TEST(test_levels)
{
        log_open(LOG_LEVEL_NOTICE);
        log_info("not urgent");
        ck_assert_str_eq(next_line(), "");
        log_notice("urgent");
        ck_assert_str_eq(next_line(), "notice: urgent\n");
}
END_TEST

START_TEST(test_journal)
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
END_TEST

START_TEST(test_one_line)
{
        log_open(LOG_LEVEL_INFO);
        log_info("name '%s'", "a\nerror: forged\r\t\x1b[31m\x7f \xc3\xa9");
        ck_assert_str_eq(next_line(), "info: name 'a?error: forged???[31m? ?\?'\n");
}
END_TEST

START_TEST(test_long_line)
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
END_TEST

START_TEST(test_errno_stays)
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
END_TEST

int main(void)
{
        Suite *suite = suite_create("log");
        TCase *t = tcase_create("log");

        tcase_add_checked_fixture(t, setup, teardown);
        tcase_add_test(t, test_words);
        tcase_add_test(t, test_levels);
        tcase_add_test(t, test_journal);
        tcase_add_test(t, test_one_line);
        tcase_add_test(t, test_long_line);
        tcase_add_test(t, test_errno_stays);
        suite_add_tcase(suite, t);
        return suite_run(suite);
}
