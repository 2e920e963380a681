/* The SPANK plugin, as slurmstepd would call it, with a helper that prints what this test says: the plugin is root, and
 * its helper's output may have names that a user chose.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <slurm/spank.h>

#include "tests/suite.h"

#define FOLDER_BYTES 64

static char folder[FOLDER_BYTES] = "/tmp/bfc-spank-XXXXXX";
static char variables[1024]; /* "NAME=VALUE\n" of each that was set */
static pid_t task;
static struct spank_option *option;

/* ---- Slurm ------------------------------------------------------------------- */

spank_context_t spank_context(void)
{
        return S_CTX_REMOTE;
}

spank_err_t spank_option_register(spank_t sp, struct spank_option *given)
{
        (void)sp;
        option = given;
        return ESPANK_SUCCESS;
}

spank_err_t spank_get_item(spank_t sp, spank_item_t item, ...)
{
        va_list arguments;

        (void)sp;
        va_start(arguments, item);
        if (item == S_TASK_PID)
                *va_arg(arguments, pid_t *) = task;
        else
                *va_arg(arguments, uint32_t *) = 7;
        va_end(arguments);
        return ESPANK_SUCCESS;
}

spank_err_t spank_getenv(spank_t sp, const char *name, char *ret, int n_bytes)
{
        (void)sp, (void)name, (void)ret, (void)n_bytes;
        return ESPANK_ENV_NOEXIST;
}

spank_err_t spank_setenv(spank_t sp, const char *name, const char *value, int overwrites)
{
        size_t n = strlen(variables);

        (void)sp, (void)overwrites;
        snprintf(variables + n, sizeof(variables) - n, "%s=%s\n", name, value);
        return ESPANK_SUCCESS;
}

spank_err_t spank_job_control_setenv(spank_t sp, const char *name, const char *value, int overwrites)
{
        return spank_setenv(sp, name, value, overwrites);
}

void slurm_error(const char *format, ...)
{
        (void)format;
}

/* ---- a step -------------------------------------------------------------------- */

static char *path_of(const char *name)
{
        static char path[2 * FOLDER_BYTES];

        snprintf(path, sizeof(path), "%s/%s", folder, name);
        return path;
}

static void write_file(const char *name, const char *text, mode_t mode)
{
        FILE *f = fopen(path_of(name), "w");

        ck_assert_ptr_nonnull(f);
        ck_assert_int_ge(fputs(text, f), 0);
        fclose(f);
        ck_assert_int_eq(chmod(path_of(name), mode), 0);
}

static void setup(void)
{
        ck_assert_ptr_nonnull(mkdtemp(folder));
        write_file("procs", "", 0644);
        task = getpid();
}

static void teardown(void)
{
        static const char *const names[] = {
                "group/cgroup.procs", "group", "procs", "link", "out", "helper"
        };

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
                (void)remove(path_of(names[i]));
        ck_assert_int_eq(rmdir(folder), 0);
}

FIXTURE(spank, setup, teardown);

/* A step whose helper prints this. 0: its tasks may run. */
static int begin(const char *out, int status)
{
        char script[256], argument[2 * FOLDER_BYTES];
        char *arguments[] = { argument, (char *)(uintptr_t) "partition=train" };

        snprintf(script, sizeof(script), "#!/bin/sh\ncat %s/out\nexit %d\n", folder, status);
        write_file("out", out, 0644);
        write_file("helper", script, 0755);
        snprintf(argument, sizeof(argument), "helper=%s/helper", folder);
        variables[0] = '\0';
        ck_assert_int_eq(slurm_spank_init(NULL, 2, arguments), 0);
        ck_assert_int_eq(option->cb(0, "4M", 1), 0);
        ck_assert_int_eq(slurm_spank_init_post_opt(NULL, 2, arguments), 0);
        return slurm_spank_task_init(NULL, 2, arguments);
}

static int move(const char *group)
{
        char line[3 * FOLDER_BYTES];

        snprintf(line, sizeof(line), "cgroup %s\n", group);
        ck_assert_int_eq(begin(line, 0), 0);
        return slurm_spank_task_post_fork(NULL, 0, NULL);
}

TEST(variables_of_a_client_are_set)
{
        ck_assert_int_eq(begin("env BFC_PARTITION=train\nenv BFC_TENANT=a.b_c-1\nenv BFC_SOCKET=/run/a b", 0),
                         0);
        ck_assert_str_eq(variables, "BFC_PARTITION=train\nBFC_TENANT=a.b_c-1\nBFC_SOCKET=/run/a b\n");
        ck_assert_int_eq(slurm_spank_task_post_fork(NULL, 0, NULL), 0); /* it stays where it is */
}

TEST(what_the_helper_must_not_say_is_a_failure)
{
        static const char *const lines[] = {
                "env LD_PRELOAD=/tmp/a.so\n",
                "env PATH=/tmp\n",
                "env BFC_TENANT=a b\n",
                "env BFC_TENANT=\n",
                "env BFC_PARTITION=/\n",
                "env BFC_TENANT\n",
                "env BFC_SOCKET=/a\x1b[0m\n",
                "env =\n",
                "cgroup group\n",
                "cgroup \n",
                "more\n",
                "\n",
                "errors\n",
                "error \n",
        };

        for (size_t i = 0; i < sizeof(lines) / sizeof(lines[0]); i++) {
                ck_assert_msg(begin(lines[i], 0) < 0, "'%s' is taken", lines[i]);
                ck_assert_str_eq(variables, "");
        }
}

TEST(a_failure_of_the_helper_is_one)
{
        ck_assert_int_lt(begin("env BFC_TENANT=a\n", 1), 0);
        ck_assert_int_lt(begin("error no room\nenv BFC_TENANT=a\n", 0), 0);
        ck_assert_int_eq(begin("env BFC_TENANT=a\n", 0), 0);
}

/* Root writes into it. */
TEST(only_a_control_group_is_joined)
{
        ck_assert_int_eq(mkdir(path_of("group"), 0755), 0);
        write_file("group/cgroup.procs", "", 0644);
        ck_assert_int_eq(move(path_of("group")), -1);
        ck_assert_int_eq(truncate(path_of("group/cgroup.procs"), 0), 0);
        ck_assert_int_eq(move(path_of("none")), -1);
        ck_assert_int_eq(move("/sys/fs"), -1);
}

static bool find_group(char *ret, size_t n_bytes)
{
        static const char *const roots[] = { "/sys/fs/cgroup", "/sys/fs/cgroup/systemd",
                                             "/sys/fs/cgroup/unified" };

        for (size_t i = 0; i < sizeof(roots) / sizeof(roots[0]); i++) {
                snprintf(ret, n_bytes, "%s/bfc-spank-%d", roots[i], (int)getpid());
                if (mkdir(ret, 0755) < 0)
                        continue;
                snprintf(ret + strlen(ret), n_bytes - strlen(ret), "/cgroup.procs");
                if (access(ret, W_OK) == 0) {
                        *strrchr(ret, '/') = '\0';
                        return true;
                }
                *strrchr(ret, '/') = '\0';
                (void)rmdir(ret);
        }
        return false;
}

static bool is_in(const char *group)
{
        char path[2 * FOLDER_BYTES];
        int pid = 0;
        FILE *f;

        snprintf(path, sizeof(path), "%s/cgroup.procs", group);
        f = fopen(path, "r");
        ck_assert_ptr_nonnull(f);
        if (fscanf(f, "%d", &pid) != 1)
                pid = 0;
        fclose(f);
        return pid == task;
}

/* Not through a link, even to a control group. */
TEST(a_task_joins_a_control_group)
{
        char group[FOLDER_BYTES], link[2 * FOLDER_BYTES];

        if (!find_group(group, sizeof(group))) {
                printf("# skipped: needs control groups, and root\n");
                return;
        }
        task = fork();
        if (task == 0) {
                pause();
                _exit(0);
        }
        snprintf(link, sizeof(link), "%s/link", folder);
        ck_assert_int_eq(symlink(group, link), 0);
        ck_assert_int_eq(move(link), -1);
        ck_assert(!is_in(group));
        ck_assert_int_eq(move(group), 0);
        ck_assert(is_in(group));
        kill(task, SIGKILL);
        waitpid(task, NULL, 0);
        while (rmdir(group) < 0) /* the kernel counts a dead process for a moment */
                ck_assert_int_eq(errno, EBUSY);
}
