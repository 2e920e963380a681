/* Where a process runs: what the kernel writes is read right, lies of the past are no
 * answer, and patterns match what they say and nothing beside it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/suite.h"

static const struct {
        const char *text;
        const char *path; /* NULL: -ENODATA */
} files[] = {
        { "0::/user.slice/user-1000.slice/session-3.scope\n", "/user.slice/user-1000.slice/session-3.scope" },
        { "0::/\n", "/" },
        { "0::/a", "/a" },
        /* Hybrid: both, and systemd's own counts. */
        { "12:cpu,cpuacct:/x\n1:name=systemd:/system.slice/a.service\n0::/y\n", "/system.slice/a.service" },
        { "0::/y\n1:name=systemd:/z\n", "/z" },
        /* Version 1 without systemd. */
        { "3:cpuset:/slurm/job_1\n2:name=other:/q\n", NULL },
        { "3:cpuset:/slurm/job_1\n0::/v2\n", "/v2" },
        /* A path may have colons. */
        { "0::/a:b/0::/c\n", "/a:b/0::/c" },
        { "5:memory:/0::/evil\n0::/good\n", "/good" },
        { "5:memory:/1:name=systemd:/evil\n0::/good\n", "/good" },
        { "10::/wrong\n", NULL },
        { "00::/wrong\n", NULL },
        { "0:memory:/wrong\n", NULL },
        { "0::relative\n", NULL },
        { "0::\n", NULL },
        { "0:\n:/x\n", NULL },
        { "", NULL },
        { "\n\n", NULL },
        { "garbage", NULL },
};

LOOP_TEST(test_parse, sizeof(files) / sizeof(files[0]))
{
        char path[CGROUP_PATH_BYTES] = "untouched";
        int r = cgroup_parse(files[_i].text, path);

        ck_assert_int_eq(r, files[_i].path ? 0 : -ENODATA);
        ck_assert_str_eq(path, files[_i].path ? files[_i].path : "untouched");
}

TEST(test_parse_long)
{
        char *text = malloc(2 * CGROUP_PATH_BYTES), path[CGROUP_PATH_BYTES];

        for (size_t n = CGROUP_PATH_BYTES - 2; n <= CGROUP_PATH_BYTES + 1; n++) {
                memset(text, 'a', 3 + n);
                memcpy(text, "0::/", 4);
                text[3 + n] = '\0';
                ck_assert_int_eq(cgroup_parse(text, path), n < CGROUP_PATH_BYTES ? 0 : -ENODATA);
        }
        ck_assert_uint_eq(strlen(path), CGROUP_PATH_BYTES - 1);
        free(text);
}

static const struct {
        const char *path, *unit;
} units[] = {
        { "/system.slice/slurmd.service", "slurmd.service" },
        { "/system.slice/slurmstepd.scope/job_1/step_0/user/task_0", "slurmstepd.scope" },
        { "/user.slice/user-1000.slice/session-3.scope", "session-3.scope" },
        /* A user's own units count for nothing. */
        { "/user.slice/user-1000.slice/user@1000.service/app.slice/slurmd.service", "user@1000.service" },
        { "/a.slice/b.slice/c.slice/d.service/e.service", "d.service" },
        { "/init.scope", "init.scope" },
        { "/system.slice/_cpu.service/x", "cpu.service" },
        { "/", "" },
        { "/user.slice", "" },
        { "/kubepods/besteffort/pod1/abc.service", "" },
        { "/.slice/x.service", "" },
        { "/.service", "" },
        { "/x.slice/.service", "" },
        { "/x.serviceable", "" },
        { "", "" },
};

LOOP_TEST(test_unit, sizeof(units) / sizeof(units[0]))
{
        char unit[CGROUP_UNIT_BYTES] = "before";

        cgroup_unit(units[_i].path, unit);
        ck_assert_str_eq(unit, units[_i].unit);
}

static const struct {
        const char *pattern, *path;
        bool matches;
} patterns[] = {
        { "/system.slice/slurmd.service", "/system.slice/slurmd.service", true },
        { "/system.slice/slurmd.service", "/system.slice/slurmd.service/job_1", true }, /* below it */
        { "/system.slice/slurmd.service", "/system.slice/slurmd.service2", false },
        { "/system.slice/slurmd.service", "/system.slice", false },
        { "/system.slice/slurmd.service", "/x/system.slice/slurmd.service", false },
        { "/slurm/uid_*/job_*", "/slurm/uid_7/job_8", true },
        { "/slurm/uid_*/job_*", "/slurm/uid_7/job_8/step_0/task_1", true },
        { "/slurm/uid_*/job_*", "/slurm/uid_7/x/job_8", false }, /* no pattern matches a '/' */
        { "/slurm/*/job_*", "/slurm/uid_7/evil", false },
        { "/slurm/uid_[0-9]/job_?", "/slurm/uid_7/job_8", true },
        { "/slurm/uid_[0-9]/job_?", "/slurm/uid_a/job_8", false },
        { "/kubepods.slice/*/*pod12\\x2d3.slice", "/kubepods.slice/b/b-pod12\\x2d3.slice/cri-1.scope", true },
        { "/*", "/a", true },
        { "/*", "/a/b", true },
        { "/*", "/", false },
        { "/", "/", true },
        { "/", "/a/b", true },
        { "/a/*", "/a", false },
        { "/a", "", false },
};

LOOP_TEST(test_path_pattern, sizeof(patterns) / sizeof(patterns[0]))
{
        ck_assert_int_eq(cgroup_path_matches(patterns[_i].pattern, patterns[_i].path), patterns[_i].matches);
}

/* Which control group above a process the pattern means. */
TEST(test_prefix)
{
        static const struct {
                const char *pattern, *path;
                size_t n;
        } cases[] = {
                { "/pods/*", "/pods/a/b", 7 },
                { "/pods/*", "/pods/a", 7 },
                { "/pods/*", "/pods", 0 },
                { "/pods/*", "/podsa/b", 0 },
                { "/*", "/a/b", 2 },
                { "/*/b", "/a/b/c", 4 },
                { "/", "/a/b", 1 },
                { "/", "/", 1 },
                { "/*", "/", 0 },
                { "/a*/[xy]", "/abc/y/z", 6 },
                { "/a", "", 0 },
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
                ck_assert_uint_eq(cgroup_prefix(cases[i].pattern, cases[i].path), cases[i].n);
        ck_assert(cgroup_exists("/"));
        ck_assert(!cgroup_exists("/bfcd/none"));
        ck_assert(!cgroup_is_of_user("/bfcd/none", geteuid()));
        ck_assert(!cgroup_is_of_user("/", 54321));
}

TEST(test_unit_pattern)
{
        ck_assert(cgroup_unit_matches("slurm*.service", "slurmd.service"));
        ck_assert(cgroup_unit_matches("user@[0-9]*.service", "user@1000.service"));
        ck_assert(!cgroup_unit_matches("slurm*.service", "slurmd.scope"));
        ck_assert(!cgroup_unit_matches("slurm*.service", "xslurmd.service"));
        ck_assert(!cgroup_unit_matches("*", "")); /* in no unit */
}

/* ---- processes ------------------------------------------------------------- */

static char proc[] = "/tmp/bfcd-proc-XXXXXX";

static void write_cgroup(pid_t pid, const char *text, size_t n_bytes)
{
        char path[64];
        FILE *f;

        snprintf(path, sizeof(path), "%s/%d", proc, (int)pid);
        mkdir(path, 0700);
        snprintf(path, sizeof(path), "%s/%d/cgroup", proc, (int)pid);
        f = fopen(path, "w");
        ck_assert(f && fwrite(text, 1, n_bytes, f) == n_bytes && fclose(f) == 0);
}

static void remove_cgroup(pid_t pid)
{
        char path[64];

        snprintf(path, sizeof(path), "%s/%d/cgroup", proc, (int)pid);
        unlink(path);
        snprintf(path, sizeof(path), "%s/%d", proc, (int)pid);
        rmdir(path);
}

static int pidfd_of(pid_t pid)
{
        return (int)syscall(SYS_pidfd_open, pid, 0);
}

TEST(test_process)
{
        char path[CGROUP_PATH_BYTES] = "untouched", *huge = calloc(1, 200000);
        pid_t child = fork();
        int pidfd;

        if (child == 0) {
                pause();
                _exit(0);
        }
        ck_assert_ptr_nonnull(mkdtemp(proc));
        pidfd = pidfd_of(child);
        ck_assert_int_ge(pidfd, 0);
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), -ENOENT);
        memset(huge, 'x', 200000); /* more than it is read of */
        write_cgroup(child, huge, 200000);
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), -ENAMETOOLONG);
        write_cgroup(child, "0::/a\n", 6);
        ck_assert_int_eq(cgroup_of_process(proc, child, -1, path), -ESRCH);
        ck_assert_int_eq(cgroup_of_process(proc, 0, pidfd, path), -ESRCH); /* of another PID namespace */
        ck_assert_str_eq(path, "untouched");
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), 0);
        ck_assert_str_eq(path, "/a");
        /* It has ended, and its number may be another's. */
        kill(child, SIGKILL);
        ck_assert_int_eq(waitid(P_PID, (id_t)child, &(siginfo_t){ 0 }, WEXITED | WNOWAIT), 0);
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), -ESRCH);
        waitpid(child, NULL, 0);
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), -ESRCH);
        close(pidfd);
        remove_cgroup(child);
        rmdir(proc);
        free(huge);
}

/* It ends while its control group is read: a FIFO in the file's place holds the reader. */
TEST(test_process_ends_meanwhile)
{
        char path[CGROUP_PATH_BYTES] = "untouched", fifo[80];
        pid_t child = fork(), helper;
        int pidfd, fd;

        if (child == 0) {
                pause();
                _exit(0);
        }
        ck_assert_ptr_nonnull(mkdtemp(proc));
        pidfd = pidfd_of(child);
        write_cgroup(child, "", 0);
        snprintf(fifo, sizeof(fifo), "%s/%d/cgroup", proc, (int)child);
        unlink(fifo);
        ck_assert_int_eq(mkfifo(fifo, 0600), 0);
        helper = fork();
        if (helper == 0) {
                fd = open(fifo, O_WRONLY); /* the reader has looked at the pidfd by now */
                kill(child, SIGKILL);
                while (poll(&(struct pollfd){ .fd = pidfd, .events = POLLIN }, 1, -1) != 1)
                        ;
                _exit(write(fd, "0::/a\n", 6) != 6);
        }
        ck_assert_int_eq(cgroup_of_process(proc, child, pidfd, path), -ESRCH);
        ck_assert_str_eq(path, "untouched");
        waitpid(helper, NULL, 0);
        waitpid(child, NULL, 0);
        close(pidfd);
        remove_cgroup(child);
        rmdir(proc);
}

/* The real one. */
TEST(test_own_process)
{
        char path[CGROUP_PATH_BYTES] = "";
        int pidfd = pidfd_of(getpid()), r = cgroup_of_process("/proc", getpid(), pidfd, path);

        ck_assert_msg(r == 0 || r == -ENODATA || r == -ENOENT, "%d", r);
        ck_assert(r < 0 || (path[0] == '/' && cgroup_path_matches("/", path)));
        close(pidfd);
}
