/* SPANK plugin of Slurm: --bfcd-mem=[PARTITION:]SIZE gives a job a lease of bfcd on each of its nodes.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * In sbatch, salloc and srun it checks the option and puts the GRES to ask for into the job's control
 * environment; job_submit.lua in slurmctld makes the request of it (bfcd.lua). In slurmstepd, which is root,
 * it starts `bfcd-slurm begin` before the tasks: that makes the lease as large as the GRES that slurmctld
 * has allocated. The option's value, which Slurm passes on to each step, only says that there is a lease: a
 * user can change it. After the job, its epilog starts `bfcd-slurm end`.
 *
 * The plugin itself has no part in the protocol of bfcd and parses no JSON: it is loaded into every
 * slurmstepd, beside libraries whose names could conflict.
 *
 * plugstack.conf: required spank_bfcd.so [partition=NAME] [helper=PATH] [state=FOLDER] [ARGUMENT...]
 * All arguments are passed on to the helper. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

#define WANTED_BYTES   128 /* "PARTITION:MIB"; CONFIG_NAME_MAX is 63 */
#define NAME_MAX_BYTES 63
#define PROBLEM_BYTES  1024
#define MAX_ARGUMENTS  32

SPANK_PLUGIN(bfcd, 1)

static const char *helper = BFCD_SLURM_HELPER, *partition, *state = "/run/bfcd-slurm";
static char wanted[WANTED_BYTES];   /* of the option; "": not given */
static bool has_lease;              /* this step asked for it */
static char problem[PROBLEM_BYTES]; /* why its tasks must not run; "": they may */
static char join[PATH_MAX];         /* the control group of the tasks; "": that of Slurm */

/* ---- the option ---------------------------------------------------------- */

static bool is_name(const char *s, size_t n)
{
        static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";

        return n > 0 && n <= NAME_MAX_BYTES && strspn(s, allowed) >= n;
}

/* "600", "600M", "600MiB", "1G": MiB, rounded up to pages of 2 MiB. 0: it is no size. */
static uint64_t read_size(const char *s)
{
        static const char units[] = "MGT";
        const char *unit;
        uint64_t n;
        char *end;

        if (*s < '0' || *s > '9')
                return 0;
        errno = 0;
        n = strtoull(s, &end, 10);
        if (errno != 0 || n > UINT64_C(1) << 32)
                return 0;
        unit = *end ? strchr(units, *end) : units;
        if (!unit || (*end && end[1] != '\0' && strcmp(end + 1, "iB") != 0))
                return 0;
        n <<= 10 * (unit - units);
        return n > UINT64_C(1) << 32 ? 0 : (n + 1) & ~UINT64_C(1);
}

static int read_option(const char *text)
{
        const char *colon = strchr(text, ':'), *size = colon ? colon + 1 : text;
        const char *name = colon ? text : partition;
        size_t n_name = colon ? (size_t)(colon - text) : name ? strlen(name) : 0;
        uint64_t mib = read_size(size);

        if (mib == 0) {
                slurm_error(
                        "--bfcd-mem=%s: '%s' is not a size: use a number of MiB, or a number and M, G or T, "
                        "as in --bfcd-mem=train:600M",
                        text, size);
                return -1;
        }
        if (!name) {
                slurm_error("--bfcd-mem=%s names no partition: use --bfcd-mem=PARTITION:SIZE", text);
                return -1;
        }
        if (!is_name(name, n_name)) {
                slurm_error("--bfcd-mem=%s: '%.*s' is not the name of a partition: use letters, digits, '_', "
                            "'-' and '.'",
                            text, (int)n_name, name);
                return -1;
        }
        snprintf(wanted, sizeof(wanted), "%.*s:%" PRIu64, (int)n_name, name, mib);
        return 0;
}

static int on_option(int val, const char *text, int remote)
{
        (void)val;
        (void)remote;
        return read_option(text ? text : "");
}

static struct spank_option option = {
        .name = (char *)"bfcd-mem",
        .arginfo = (char *)"[PARTITION:]SIZE",
        .usage = (char *)"memory of a partition of bfcd for the job, on each node",
        .has_arg = 1,
        .cb = on_option,
};

static void read_arguments(int ac, char *av[])
{
        for (int i = 0; i < ac; i++) {
                if (strncmp(av[i], "partition=", 10) == 0)
                        partition = av[i] + 10;
                else if (strncmp(av[i], "helper=", 7) == 0)
                        helper = av[i] + 7;
                else if (strncmp(av[i], "state=", 6) == 0)
                        state = av[i] + 6;
        }
}

/* ---- the helper ----------------------------------------------------------- */

/* The first one counts. */
__attribute__((format(printf, 1, 2))) static void fail(const char *format, ...)
{
        va_list arguments;

        if (problem[0] != '\0')
                return;
        va_start(arguments, format);
        vsnprintf(problem, sizeof(problem), format, arguments);
        va_end(arguments);
}

static bool is_line(const char *s)
{
        for (; *s; s++)
                if ((unsigned char)*s < ' ' || *s == 0x7f)
                        return false;
        return true;
}

/* NAME=VALUE: only what a client of bfcd needs. */
static void read_variable(spank_t sp, char *text)
{
        char *value = strchr(text, '=');
        bool is_known;

        if (value)
                *value++ = '\0';
        is_known = value && (strcmp(text, "BFC_PARTITION") == 0 || strcmp(text, "BFC_TENANT") == 0
                                     ? is_name(value, strlen(value))
                                     : strcmp(text, "BFC_SOCKET") == 0);
        if (!is_known)
                fail("%s has printed a variable '%s' that it must not set, or a wrong value of it", helper,
                     text);
        else if (spank_setenv(sp, text, value, 1) != ESPANK_SUCCESS)
                fail("%s cannot be set", text);
}

/* "cgroup FOLDER", "env NAME=VALUE", "error TEXT" */
static void read_line(spank_t sp, char *line, size_t n_line)
{
        if (!is_line(line))
                fail("%s has printed control characters", helper);
        else if (strncmp(line, "error ", 6) == 0)
                fail("%s", line[6] != '\0' ? line + 6 : "the helper has failed");
        else if (strncmp(line, "cgroup /", 8) == 0 && n_line - 7 < sizeof(join))
                memcpy(join, line + 7, n_line - 7 + 1);
        else if (strncmp(line, "env ", 4) == 0)
                read_variable(sp, line + 4);
        else
                fail("%s has printed a line that is unknown: %s", helper, line);
}

static int spawn(char **arguments, int out, pid_t *ret)
{
        static const char *const passed[] = { "SLURM_CONF", "SLURMD_NODENAME" };
        char texts[2][PATH_MAX],
                *environment[] = { (char *)"PATH=/usr/sbin:/usr/bin:/sbin:/bin", NULL, NULL, NULL };
        posix_spawn_file_actions_t actions;
        size_t n = 1;
        int r;

        for (size_t i = 0; i < 2; i++) {
                const char *value = getenv(passed[i]);

                if (value && snprintf(texts[i], PATH_MAX, "%s=%s", passed[i], value) < PATH_MAX)
                        environment[n++] = texts[i];
        }
        r = posix_spawn_file_actions_init(&actions);
        if (r != 0)
                return -r;
        r = posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
        if (r == 0)
                r = posix_spawn_file_actions_adddup2(&actions, out, 1);
        if (r == 0)
                r = posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
        if (r == 0)
                r = posix_spawn_file_actions_addclosefrom_np(&actions, 3);
        if (r == 0)
                r = posix_spawn(ret, helper, &actions, NULL, arguments, environment);
        posix_spawn_file_actions_destroy(&actions);
        return -r;
}

static void read_lines(spank_t sp, int fd)
{
        char *line = NULL;
        size_t n_line = 0;
        ssize_t n;
        FILE *f = fdopen(fd, "r");

        if (!f) {
                fail("%s cannot be read: %s", helper, strerror(errno));
                close(fd);
                return;
        }
        while ((n = getline(&line, &n_line, f)) > 0) {
                if (line[n - 1] == '\n')
                        line[--n] = '\0';
                read_line(sp, line, (size_t)n);
        }
        if (ferror(f))
                fail("%s cannot be read", helper);
        free(line);
        fclose(f);
}

/* Runs the helper to its end and reads what it prints. `problem` is set if it failed. */
static void run_helper(spank_t sp, char **arguments)
{
        int fds[2], status = 0, r;
        pid_t pid;

        problem[0] = '\0';
        if (pipe2(fds, O_CLOEXEC) < 0) {
                fail("a pipe cannot be made: %s", strerror(errno));
                return;
        }
        r = spawn(arguments, fds[1], &pid);
        close(fds[1]);
        if (r < 0) {
                close(fds[0]);
                fail("%s cannot be started: %s", helper, strerror(-r));
                return;
        }
        read_lines(sp, fds[0]);
        do
                r = waitpid(pid, &status, 0);
        while (r < 0 && errno == EINTR);
        if (r < 0 || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
                fail("%s has failed", helper);
}

/* bfcd-slurm WHAT JOB [UID GID TENANT] ARGUMENT... */
static void help(spank_t sp, const char *what, uint32_t job, int ac, char *av[], char **more)
{
        char job_text[16], *arguments[MAX_ARGUMENTS];
        int n = 0;

        snprintf(job_text, sizeof(job_text), "%" PRIu32, job);
        arguments[n++] = (char *)helper;
        arguments[n++] = (char *)what;
        arguments[n++] = job_text;
        while (more && *more)
                arguments[n++] = *more++;
        for (int i = 0; i < ac && n < MAX_ARGUMENTS - 1; i++)
                arguments[n++] = av[i];
        arguments[n] = NULL;
        run_helper(sp, arguments);
}

/* ---- in sbatch, salloc and srun ------------------------------------------- */

static int at_submission(spank_t sp)
{
        char gres[WANTED_BYTES + 8];

        if (wanted[0] == '\0')
                return 0;
        snprintf(gres, sizeof(gres), "bfcd:%s", wanted);
        if (spank_job_control_setenv(sp, "BFCD_GRES", gres, 1) == ESPANK_SUCCESS)
                return 0;
        slurm_error("--bfcd-mem: the request cannot be passed to slurmctld");
        return -1;
}

/* ---- in slurmstepd ---------------------------------------------------------- */

static void begin_step(spank_t sp, int ac, char *av[])
{
        char uid_text[16], gid_text[16], tenant[NAME_MAX_BYTES + 1] = "";
        char *more[] = { uid_text, gid_text, tenant, NULL };
        uint32_t job;
        uid_t uid;
        gid_t gid;

        if (wanted[0] == '\0')
                return;
        has_lease = true;
        if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS ||
            spank_get_item(sp, S_JOB_UID, &uid) != ESPANK_SUCCESS ||
            spank_get_item(sp, S_JOB_GID, &gid) != ESPANK_SUCCESS) {
                fail("Slurm does not tell the job's number and user");
                return;
        }
        snprintf(uid_text, sizeof(uid_text), "%u", (unsigned)uid);
        snprintf(gid_text, sizeof(gid_text), "%u", (unsigned)gid);
        if (spank_getenv(sp, "BFC_TENANT", tenant, sizeof(tenant)) != ESPANK_SUCCESS ||
            !is_name(tenant, strlen(tenant)))
                tenant[0] = '\0';
        help(sp, "begin", job, ac, av, more);
}

static void end_step(spank_t sp, int ac, char *av[])
{
        uint32_t job;

        if (!has_lease || problem[0] != '\0' || spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
                return;
        help(sp, "record", job, ac, av, NULL);
        if (problem[0] != '\0')
                slurm_error("bfcd: job %" PRIu32 ": %s", job, problem);
}

/* ---- called by Slurm -------------------------------------------------------- */

int slurm_spank_init(spank_t sp, int ac, char *av[])
{
        spank_context_t context = spank_context();

        read_arguments(ac, av);
        if (context != S_CTX_LOCAL && context != S_CTX_ALLOCATOR && context != S_CTX_REMOTE)
                return 0;
        return spank_option_register(sp, &option) == ESPANK_SUCCESS ? 0 : -1;
}

int slurm_spank_init_post_opt(spank_t sp, int ac, char *av[])
{
        if (spank_context() != S_CTX_REMOTE)
                return at_submission(sp);
        begin_step(sp, ac, av);
        return 0; /* a failure here would drain the node */
}

/* Only a control group, and no link: what is written there is written by root. */
static int open_group(const char *folder)
{
        struct open_how how = { .flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS };
        int fd = (int)syscall(SYS_openat2, AT_FDCWD, folder, &how, sizeof(how)), procs = -1, error;
        struct statfs fs;

        if (fd < 0)
                return -1;
        if (fstatfs(fd, &fs) == 0 && fs.f_type != CGROUP2_SUPER_MAGIC && fs.f_type != CGROUP_SUPER_MAGIC)
                errno = EXDEV;
        else
                procs = openat(fd, "cgroup.procs", O_WRONLY | O_NOFOLLOW | O_CLOEXEC);
        error = errno;
        close(fd);
        errno = error;
        return procs;
}

/* Before the task runs its program. Without this the task would be charged to the tenant's quota. */
int slurm_spank_task_post_fork(spank_t sp, int ac, char *av[])
{
        char text[16];
        ssize_t n = -1;
        pid_t pid;
        int fd;

        (void)ac;
        (void)av;
        if (join[0] == '\0' || spank_get_item(sp, S_TASK_PID, &pid) != ESPANK_SUCCESS)
                return join[0] == '\0' ? 0 : -1;
        fd = open_group(join);
        if (fd >= 0) {
                n = write(fd, text, (size_t)snprintf(text, sizeof(text), "%d", (int)pid));
                close(fd);
        }
        if (n < 0)
                slurm_error("bfcd: process %d cannot be moved into %s: %s", (int)pid, join, strerror(errno));
        return n < 0 ? -1 : 0;
}

/* In the task, whose standard error is the job's. */
int slurm_spank_task_init(spank_t sp, int ac, char *av[])
{
        (void)sp;
        (void)ac;
        (void)av;
        if (problem[0] == '\0')
                return 0;
        slurm_error("bfcd: %s", problem);
        return -1;
}

int slurm_spank_exit(spank_t sp, int ac, char *av[])
{
        if (spank_context() == S_CTX_REMOTE)
                end_step(sp, ac, av);
        return 0;
}

int slurm_spank_job_epilog(spank_t sp, int ac, char *av[])
{
        char path[PATH_MAX];
        uint32_t job;

        read_arguments(ac, av); /* slurm_spank_init() is not called before an epilog */
        if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
                return 0;
        /* Made by `bfcd-slurm begin`. */
        snprintf(path, sizeof(path), "%s/%" PRIu32, state, job);
        if (access(path, F_OK) < 0)
                return 0;
        help(sp, "end", job, ac, av, NULL);
        if (problem[0] != '\0')
                slurm_error("bfcd: job %" PRIu32 ": %s", job, problem);
        return 0; /* a failure here would drain the node */
}
