/* Leases that no operator makes, with a real daemon: those of control groups by `per: cgroup`, and those that users make
 * with bfcctl lease and bfcctl run.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The programs are this one, with --job and sizes in MiB: it allocates each, prints the result, and waits to be killed
 * at a 0. */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

static char self[4096]; /* this program */
static char
        own[512]; /* the control group of the tests, below that of this process; empty: none can be made */
static char folder[700]; /* and where it is mounted */
static struct rig *rig;

/* ---- programs ------------------------------------------------------------------ */

static int be_job(char **sizes)
{
        bfc_client *client;
        void *block;

        for (bool is_first = true; *sizes; sizes++, is_first = false) {
                uint64_t n_bytes = strtoull(*sizes, NULL, 10) * MIB;

                if (n_bytes == 0)
                        pause();
                if (is_first && bfc_connect(NULL, &client) < 0) {
                        puts(bfc_last_error());
                        return 1;
                }
                puts(bfc_malloc(client, n_bytes, &block) < 0 ? bfc_last_error() : "ok");
                fflush(stdout);
        }
        return 0;
}

struct program {
        pid_t pid;
        FILE *out; /* and messages */
        char line[1024];
};

/* procs: the file that moves it into a control group; NULL: it stays. */
static void program_start_as(struct program *p, uid_t uid, const char *procs, const char *const *argv)
{
        pid_t parent = getpid();
        int fds[2], fd;

        ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
        p->pid = fork();
        ck_assert_int_ge(p->pid, 0);
        if (p->pid == 0) {
                fd = procs ? open(procs, O_WRONLY | O_CLOEXEC) : -1;
                if (procs && write(fd, "0", 1) != 1)
                        _exit(97);
                if (uid != getuid() && (setgroups(0, NULL) < 0 || setgid(uid) < 0 || setuid(uid) < 0))
                        _exit(98);
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() != parent || dup2(fds[1], STDOUT_FILENO) < 0 || dup2(fds[1], STDERR_FILENO) < 0)
                        _exit(99);
                execvp(argv[0], (char *const *)(uintptr_t)argv);
                _exit(99);
        }
        close(fds[1]);
        p->out = fdopen(fds[0], "r");
        ck_assert_ptr_nonnull(p->out);
}

static void program_reads(struct program *p, const char *part)
{
        ck_assert_msg(fgets(p->line, sizeof(p->line), p->out), "no line with \"%s\"", part);
        ck_assert_msg(strstr(p->line, part), "no \"%s\" in: %s", part, p->line);
}

static int program_wait(struct program *p)
{
        int status;

        ck_assert_int_eq(waitpid(p->pid, &status, 0), p->pid);
        fclose(p->out);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* It ends with this status, after a line with this part. */
static void program_ends(uid_t uid, int status, const char *part, const char *const *argv)
{
        struct program p;
        int got;

        program_start_as(&p, uid, NULL, argv);
        program_reads(&p, part);
        while (fgets(p.line, sizeof(p.line), p.out))
                ;
        got = program_wait(&p);
        ck_assert_msg(got == status, "status %d, \"%s\"", got, part);
}

#define BFCCTL(...) ((const char *const[]){ program_bfcctl(), __VA_ARGS__, NULL })
#define JOB(...)    ((const char *const[]){ self, "--job", __VA_ARGS__, NULL })

static size_t count_leases(const char *match)
{
        char *out = ctl_text(rig, WORDS("--json", "lease", "list"));
        json_t *document = json_loads(out, 0, NULL), *row;
        size_t i, n = 0;

        json_array_foreach(json_object_get(document, "leases"), i, row) n +=
                !match || strcmp(string_of(row, "match"), match) == 0;
        json_decref(document);
        free(out);
        return n;
}

static void set_environment(void)
{
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_CACHE", "off", 1), 0);
}

/* ---- users ---------------------------------------------------------------------- */

static const struct rig_config config = {
        .tenants =
                "  - name: red\n    match: {uid: [@OTHER@, @ANOTHER@]}\n    leases: self\n"
                "    quotas: [{partition: train, limit: 64MiB, reserve: 8MiB}]\n"
                "  - name: blue\n    match: {uid: [65534]}\n    quotas: [{partition: train, limit: 64MiB}]\n",
};

static void setup_users(void)
{
        rig = rig_start(&config);
        set_environment();
}

static void teardown_users(void)
{
        ck_assert(WAIT_FOR(count_leases(NULL) == 0, SETTLE_MS));
        rig_stop(rig);
}

FIXTURE(users, setup_users, teardown_users);
FIXTURE(groups, NULL, NULL);

/* Each user can open the client socket only. */
TEST_OF(users, they_run_jobs_with_limits)
{
        struct program p;

        if (!others_may_run())
                return;
        program_start_as(
                &p, OTHER_UID, NULL,
                BFCCTL("run", "--limit", "32MiB", "--lease", "mine", "--", self, "--job", "8", "20", "8"));
        program_reads(&p, "ok");
        program_reads(&p, "ok");
        program_reads(&p, "lease 'u4242:mine' of tenant 'red' is at its limit in 'train'");
        program_reads(&p, "bfcctl: lease 'u4242:mine': peak ");
        ck_assert_ptr_nonnull(strstr(p.line, "1 refused"));
        ck_assert_int_eq(program_wait(&p), 0);
        program_ends(OTHER_UID, 7, "lease 'u4242:run-",
                     BFCCTL("run", "--limit", "32MiB", "--reserve", "8MiB", "sh", "-c", "exit 7"));
        program_ends(OTHER_UID, 125, "guarantees only what is guaranteed to its tenant",
                     BFCCTL("run", "--limit", "32MiB", "--reserve", "10MiB", "true"));
        program_ends(65534, 125, "'leases: self' for tenant 'blue'",
                     BFCCTL("run", "--limit", "32MiB", "true"));
        program_ends(1, 125, "matches no tenant", BFCCTL("run", "--limit", "32MiB", "true"));
}

TEST_OF(users, a_python_job_has_its_limit)
{
        static const char *const script = "import bfcd\n"
                                          "client = bfcd.connect()\n"
                                          "x = client.empty(20 << 20, 'uint8')\n"
                                          "try:\n    client.empty(20 << 20, 'uint8')\n"
                                          "except MemoryError as e:\n    print('refused:', e)\n";

        if (!others_may_run())
                return;
        if (!getenv("BFC_LIBRARY") || rig_device() != ON_HOST) {
                fprintf(stderr,
                        "skipped: no library for Python (BFC_LIBRARY), or no arrays in host memory\n");
                return;
        }
        program_ends(OTHER_UID, 0, "refused: ",
                     BFCCTL("run", "--limit", "32MiB", "--lease", "py", "--", "python3", "-c", script));
}

TEST_OF(users, they_change_their_own_leases_only)
{
        struct program p;
        char pid[32];

        if (!others_may_run())
                return;
        program_start_as(&p, OTHER_UID, NULL, JOB("2", "0"));
        program_reads(&p, "ok");
        snprintf(pid, sizeof(pid), "%d", (int)p.pid);
        program_ends(OTHER_UID, 0, "Lease u4242:a is made",
                     BFCCTL("lease", "create", "a", "--partition", "train", "--limit", "8MiB", "--pid", pid));
        program_ends(ANOTHER_UID, 1, "does not belong to this user",
                     BFCCTL("lease", "create", "a", "--partition", "train", "--limit", "8MiB", "--pid", pid));
        program_ends(
                ANOTHER_UID, 1, "only for its own processes",
                BFCCTL("lease", "create", "a", "--partition", "train", "--limit", "8MiB", "--user", "4242"));
        program_ends(
                ANOTHER_UID, 1, "does not belong to this user",
                BFCCTL("lease", "create", "a", "--partition", "train", "--limit", "8MiB", "--cgroup", "/"));
        program_ends(ANOTHER_UID, 1, "that was made by this user",
                     BFCCTL("lease", "end", "u4242:a", "--evict"));
        program_ends(ANOTHER_UID, 1, "there is no lease 'u4243:a'", BFCCTL("lease", "end", "a", "--evict"));
        program_ends(OTHER_UID, 0, "is changed", BFCCTL("lease", "set", "a", "--limit", "16MiB"));
        ctl_says(rig, WORDS("-w", "lease", "list"), "user");
        program_ends(OTHER_UID, 0, "has ended", BFCCTL("lease", "end", "a"));
        ck_assert_int_eq(kill(p.pid, SIGKILL), 0);
        ck_assert_int_eq(program_wait(&p), 128 + SIGKILL);
}

/* ---- control groups --------------------------------------------------------------- */

/* In the hierarchy that bfcd uses, before the tests. */
static void make_group(void)
{
        char *text = file_text("/proc/self/cgroup"), *at = strstr(text, ":name=systemd:");
        const char *const roots[] = { at ? "/sys/fs/cgroup/systemd" : "/sys/fs/cgroup",
                                      "/sys/fs/cgroup/unified" };
        bool is_made = false;

        at = at ? strchr(at + 1, ':') + 1 : strstr(text, "0::") + 3;
        snprintf(own, sizeof(own), "%.*s", (int)strcspn(at, "\n"), at);
        if (strcmp(own, "/") == 0)
                own[0] = '\0';
        free(text);
        for (size_t i = 0; i < 2 && !is_made; i++) {
                snprintf(folder, sizeof(folder), "%s%s/bfcd-test-%d", roots[i], own, (int)getpid());
                is_made = mkdir(folder, 0755) == 0;
        }
        snprintf(own + strlen(own), sizeof(own) - strlen(own), "/bfcd-test-%d", (int)getpid());
        if (!is_made)
                own[0] = '\0';
}

/* After the tests, also after one that failed: its programs have ended with it. */
static void remove_groups(void)
{
        static const char *const groups[] = { "/one", "/two", "" };
        char path[800];

        for (size_t i = 0; own[0] && i < 3; i++) {
                snprintf(path, sizeof(path), "%s%s", folder, groups[i]);
                (void)WAIT_FOR(rmdir(path) == 0 || errno == ENOENT, SETTLE_MS);
        }
}

static void start_in(struct program *p, const char *group, const char *const *argv)
{
        char path[800];

        snprintf(path, sizeof(path), "%s/%s", folder, group);
        ck_assert(mkdir(path, 0755) == 0 || errno == EEXIST);
        snprintf(path, sizeof(path), "%s/%s/cgroup.procs", folder, group);
        program_start_as(p, getuid(), path, argv);
}

static void remove_group(const char *group)
{
        char path[800];

        snprintf(path, sizeof(path), "%s/%s", folder, group);
        ck_assert(WAIT_FOR(rmdir(path) == 0, SETTLE_MS)); /* once the kernel has removed its processes */
}

/* The leases are made by hellos, survive the daemon, follow the config, and end with their groups. */
TEST_OF(groups, each_has_a_lease)
{
        struct rig_config of_groups = { .tenants = NULL };
        char tenants[2048], one[600];
        struct program p[3];
        struct kept *k = NULL;

        if (!own[0]) {
                fprintf(stderr, "skipped: no control group can be made here\n");
                return;
        }
        for (int i = 0; i < 2; i++) { /* before, and after a reload */
                snprintf(
                        tenants, sizeof(tenants),
                        "  - name: red\n    match: {uid: [@UID@]}\n    quotas: [{partition: train, limit: 64MiB, "
                        "per: {cgroup: '%s/*', limit: %dMiB}}]\n",
                        own, i ? 24 : 16);
                of_groups.tenants = tenants;
                if (i == 0) {
                        k = kept_start(&of_groups);
                        rig = k->rig;
                        set_environment();
                        start_in(&p[0], "one", JOB("8", "0"));
                        start_in(&p[1], "two", JOB("16", "2", "0"));
                        program_reads(&p[0], "ok");
                        program_reads(&p[1], "ok");
                        program_reads(&p[1], "lease 'two:");
                        kept_restart(k, SIGKILL);
                }
        }
        snprintf(one, sizeof(one), "%s/one", own);
        ck_assert_uint_eq(count_leases(one), 1);
        ck_assert_uint_eq(count_leases(NULL), 2);
        rig_rewrite_config(rig, &of_groups);
        ctl_says(rig, WORDS("reload"), "per is ");
        ctl_says(rig, WORDS("config"), "per: {cgroup: \"");
        if (rig_device() != ON_CUDA_IPC) {
                start_in(&p[2], "one", JOB("14", "6", "0"));
                program_reads(&p[2], "ok");
                program_reads(&p[2], "lease 'one:");
                kill(p[2].pid, SIGKILL);
                program_wait(&p[2]);
        }
        for (int i = 0; i < 2; i++) {
                kill(p[i].pid, SIGKILL);
                ck_assert_int_eq(program_wait(&p[i]), 128 + SIGKILL);
        }
        remove_group("two");
        ck_assert(WAIT_FOR(count_leases(NULL) == 1, SETTLE_MS));
        ck_assert_uint_eq(count_leases(one), 1);
        remove_group("one");
        ck_assert(WAIT_FOR(count_leases(NULL) == 0, SETTLE_MS));
        kept_stop(k);
}

int main(int argc, char **argv)
{
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
        int status;

        if (n < 0)
                return 1;
        if (argc > 1 && strcmp(argv[1], "--job") == 0)
                return be_job(argv + 2);
        make_group();
        if (!own[0] && getuid() != 0 && !getenv("BFC_TEST_LIST")) {
                puts("1..0 # SKIP needs root, or a control group in which it can make others");
                return 0;
        }
        status = harness_cases("own_leases");
        remove_groups();
        return status;
}
