/* The program that bfcctl run starts: its end, its descendants, and the signals to it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "ctl/child.h"

#define SHELL(script) ((char *[]){ "sh", "-c", script, NULL })

/* In a forked process, which Check cannot see. */
#define REQUIRE(condition)                                                                                   \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                      \
                        _exit(99);                                                                           \
                }                                                                                            \
        } while (0)

/* Runs a script to its end; the status. */
static int run(char *const *argv)
{
        static const struct child_variable variables[] = { { "BFC_TENANT", "red" }, { "BFC_SOCKET", "/s" } };
        struct child c;
        int error = -1, status = -1;

        ck_assert_int_eq(child_adopt(), 0);
        ck_assert_int_eq(child_start(argv, variables, 2, &c, &error), 0);
        ck_assert_int_eq(error, 0);
        ck_assert_int_eq(child_wait(&c, &status), 0);
        child_end(&c);
        child_end(&c);
        return status;
}

/* Ends with the test. */
static pid_t fork_below(void)
{
        pid_t parent = getpid(), pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                REQUIRE(getppid() == parent);
        }
        return pid;
}

TEST(status_of_the_program)
{
        ck_assert_int_eq(WEXITSTATUS(run(SHELL("exit 7"))), 7);
        ck_assert_int_eq(WEXITSTATUS(run(SHELL("exit 0"))), 0);
        ck_assert_int_eq(WTERMSIG(run(SHELL("kill -KILL $$"))), SIGKILL);
        ck_assert_int_eq(WEXITSTATUS(run(SHELL("[ \"$BFC_TENANT$BFC_SOCKET\" = red/s ]"))), 0);
}

TEST(status_where_exits_are_ignored)
{
        signal(SIGCHLD, SIG_IGN);
        ck_assert_int_eq(WEXITSTATUS(run(SHELL("exit 7"))), 7);
}

/* The program has the mask that bfcctl was started with. */
TEST(signal_mask_of_the_program)
{
        ck_assert_int_eq(WTERMSIG(run(SHELL("kill -TERM $$; exit 1"))), SIGTERM);
}

TEST(bfcctl_ends_as_the_program)
{
        static const int signals[] = { SIGINT, SIGKILL, SIGQUIT };
        int status;

        ck_assert_int_eq(child_exit_as(3 << 8), 3);
        for (size_t i = 0; i < sizeof(signals) / sizeof(signals[0]); i++) {
                pid_t pid = fork_below();

                if (pid == 0)
                        _exit(child_exit_as(signals[i]));
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                ck_assert(WIFSIGNALED(status));
                ck_assert_int_eq(WTERMSIG(status), signals[i]);
        }
}

TEST(program_that_does_not_exist)
{
        struct child c;
        sigset_t before, after;
        int error = 0, n_fds = suite_count_fds();

        sigprocmask(SIG_SETMASK, NULL, &before);
        ck_assert_int_eq(child_start((char *[]){ "/nowhere/program", NULL }, NULL, 0, &c, &error), 0);
        ck_assert_int_eq(error, ENOENT);
        ck_assert_int_eq(child_start((char *[]){ "/", NULL }, NULL, 0, &c, &error), 0);
        ck_assert_int_eq(error, EACCES);
        sigprocmask(SIG_SETMASK, NULL, &after);
        ck_assert_int_eq(sigismember(&before, SIGINT), sigismember(&after, SIGINT));
        ck_assert_int_eq(waitpid(-1, NULL, 0), -1);
        ck_assert_int_eq(suite_count_fds(), n_fds);
}

/* A process that left its session and whose parents have ended is a child of ours. */
TEST(descendants_stay)
{
        struct child_process left[2];
        size_t n;

        ck_assert_int_eq(run(SHELL("(setsid sh -c 'exec sleep 1000 >&- 2>&-' & )")), 0);
        do {
                ck_assert_int_eq(child_remaining(left, 2, &n), 0);
                ck_assert_uint_eq(n, 1);
        } while (strcmp(left[0].name, "sleep") != 0);
        ck_assert_int_eq(left[0].parent, getpid());
        ck_assert_int_eq(left[0].group, left[0].pid);
        ck_assert_int_eq(kill(left[0].pid, SIGKILL), 0);
        while (n > 0)
                ck_assert_int_eq(child_remaining(left, 2, &n), 0);
}

/* ---- signals ---------------------------------------------------------------- */

/* Reads a line that a script has written. */
static void expect_line(int fd, const char *line)
{
        char text[64];
        size_t n = 0;

        while (n < sizeof(text) - 1 && read(fd, &text[n], 1) == 1 && text[n] != '\n')
                n++;
        n -= n > 0 && text[n - 1] == '\r'; /* a terminal */
        text[n] = '\0';
        ck_assert_str_eq(text, line);
}

/* What bfcctl does. Ends with the exit status of the program, or with 50 + signal. */
static void __attribute__((noreturn)) act(int out, char *const *argv)
{
        struct child c;
        int error, status;

        REQUIRE(dup2(out, STDOUT_FILENO) >= 0);
        REQUIRE(child_adopt() == 0);
        REQUIRE(child_start(argv, NULL, 0, &c, &error) == 0 && error == 0);
        REQUIRE(child_wait(&c, &status) == 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 50 + WTERMSIG(status));
}

static pid_t start(int out, char *const *argv)
{
        pid_t pid = fork_below();

        if (pid == 0)
                act(out, argv);
        return pid;
}

static void expect_exit(pid_t pid, int expected)
{
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFEXITED(status));
        ck_assert_int_eq(WEXITSTATUS(status), expected);
}

/* A job can enter the process group of any program of its session. That program is no part of the job. */
TEST(signal_to_bfcctl_reaches_the_job_only)
{
        static char enter[] = "import os, sys, time\n"
                              "os.setpgid(0, int(sys.argv[1]))\n"
                              "print('up', flush=True)\n"
                              "time.sleep(1000)";
        pid_t neighbour = fork_below(), pid;
        char group[16];
        int fds[2];

        if (neighbour == 0)
                for (;;)
                        pause();
        ck_assert_int_eq(setpgid(neighbour, neighbour), 0);
        snprintf(group, sizeof(group), "%d", (int)neighbour);
        ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
        pid = start(fds[1], (char *[]){ "python3", "-c", enter, group, NULL });
        expect_line(fds[0], "up");
        ck_assert_int_eq(kill(pid, SIGTERM), 0);
        expect_exit(pid, 50 + SIGTERM);
        ck_assert_int_eq(waitpid(neighbour, NULL, WNOHANG), 0);
        ck_assert_int_eq(kill(neighbour, SIGKILL), 0);
        ck_assert_int_eq(waitpid(neighbour, NULL, 0), neighbour);
        close(fds[0]);
        close(fds[1]);
}

/* To the main process and to the descendants in its group; not to those that left it, nor to others of the group. */
TEST(signal_to_bfcctl_alone)
{
        static char outside[] =
                "M=$$; export M\n"
                "trap 'wait $A; echo main; exit 9' TERM\n"
                "sh -c 'trap \"echo child; exit\" TERM; echo up; while :; do sleep 0.1; done' & A=$!\n"
                "setsid sh -c 'trap \"echo wrong\" TERM; echo up\n"
                "        while kill -0 $M; do sleep 0.1; done 2>&-; echo out' &\n"
                "while :; do sleep 0.1; done";
        int fds[2], status;
        pid_t neighbour = fork_below(), pid;

        if (neighbour == 0)
                for (;;)
                        pause();
        ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
        pid = start(fds[1], SHELL(outside));
        expect_line(fds[0], "up");
        expect_line(fds[0], "up");
        ck_assert_int_eq(kill(pid, SIGTERM), 0);
        expect_line(fds[0], "child");
        expect_line(fds[0], "main");
        expect_exit(pid, 9);
        expect_line(fds[0], "out");
        ck_assert_int_eq(waitpid(neighbour, &status, WNOHANG), 0);
        close(fds[0]);
        close(fds[1]);
}

/* It has left the group by itself, as a shell with job control does. */
TEST(signal_to_another_group)
{
        int fds[2];
        pid_t pid;

        ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
        pid = start(fds[1], ((char *[]){ "setsid", "sh", "-c",
                                         "trap 'exit 9' USR1; echo up; while :; do sleep 0.1; done", NULL }));
        expect_line(fds[0], "up");
        ck_assert_int_eq(kill(pid, SIGUSR1), 0);
        expect_exit(pid, 9);
        close(fds[0]);
        close(fds[1]);
}

/* A shell on the terminal `end`, with a foreground job. It tells of stops, and continues the job. */
static void __attribute__((noreturn)) be_shell(int end, char *const *job)
{
        int status;
        pid_t pid;

        signal(SIGINT, SIG_DFL); /* a test in the background may have been started with them ignored */
        signal(SIGQUIT, SIG_DFL);
        signal(SIGTTOU, SIG_IGN);
        signal(SIGTTIN, SIG_IGN);
        REQUIRE(setsid() > 0);
        REQUIRE(ioctl(end, TIOCSCTTY, 0) == 0);
        pid = fork_below();
        if (pid == 0) {
                REQUIRE(setpgid(0, 0) == 0);
                REQUIRE(tcsetpgrp(end, getpid()) == 0);
                act(end, job);
        }
        for (;;) {
                REQUIRE(waitpid(pid, &status, WUNTRACED) == pid);
                if (!WIFSTOPPED(status))
                        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 98);
                dprintf(end, "stopped\n");
                kill(-pid, SIGCONT);
        }
}

/* Each key reaches the job once, and the shell can stop and continue it. */
TEST(keys_of_a_terminal)
{
        static char counts[] = "n=0; trap 'n=$((n+1)); echo int' INT; trap 'exit $n' QUIT; echo up\n"
                               "while :; do sleep 0.1; done";
        int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), end;
        struct termios mode;
        pid_t pid;

        ck_assert_int_ge(terminal, 0);
        ck_assert_int_eq(grantpt(terminal), 0);
        ck_assert_int_eq(unlockpt(terminal), 0);
        end = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
        ck_assert_int_ge(end, 0);
        ck_assert_int_eq(tcgetattr(end, &mode), 0);
        mode.c_lflag &= ~(tcflag_t)ECHO;
        ck_assert_int_eq(tcsetattr(end, TCSANOW, &mode), 0);
        pid = fork_below();
        if (pid == 0)
                be_shell(end, SHELL(counts));
        expect_line(terminal, "up");
        ck_assert_int_eq(write(terminal, "\x03", 1), 1); /* Ctrl-C */
        expect_line(terminal, "int");
        ck_assert_int_eq(write(terminal, "\x1a", 1), 1); /* Ctrl-Z */
        expect_line(terminal, "stopped");
        ck_assert_int_eq(write(terminal, "\x03", 1), 1);
        expect_line(terminal, "int");
        ck_assert_int_eq(write(terminal, "\x1c", 1), 1); /* Ctrl-\ */
        expect_exit(pid, 2);
        close(end);
        close(terminal);
}
