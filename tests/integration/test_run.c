/* bfcctl run: a program and all of its descendants under one limit, its signals and its exit status.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The programs are this one, with --job and words that say what to do. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "ctl/text.h"
#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

static const struct rig_config config = { .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") };
static char self[4096]; /* this program */
static struct rig *rig;

static void set_environment(void)
{
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_CACHE", "off", 1), 0);
}

static void setup(void)
{
        rig = rig_start(&config);
        set_environment();
}

/* The caller releases it. */
static json_t *list_leases(void)
{
        char *out = ctl_text(rig, WORDS("--json", "lease", "list"));
        json_t *document = json_loads(out, JSON_REJECT_DUPLICATES, NULL),
               *rows = json_incref(json_object_get(document, "leases"));

        ck_assert(json_is_array(rows));
        json_decref(document);
        free(out);
        return rows;
}

static size_t count_leases(void)
{
        json_t *rows = list_leases();
        size_t n = json_array_size(rows);

        json_decref(rows);
        return n;
}

/* rig_stop() looks for what is left of their memory. */
static void teardown(void)
{
        ck_assert(WAIT_FOR(count_leases() == 0, SETTLE_MS));
        rig_stop(rig);
}

FIXTURE(run, setup, teardown);
FIXTURE(restarted, NULL, NULL);

/* The fake driver takes a second for 128 MiB. */
static void setup_slow(void)
{
        ck_assert_int_eq(setenv("FAKE_CUDA_MS_PER_GIB", "8000", 1), 0);
        setup();
}

FIXTURE(slow, setup_slow, teardown);

/* ---- the program ------------------------------------------------------------ */

#define PARENT_FD 9 /* of a process that has left its parent */

/* Does the other words in a process without a parent and in a session of its own. It calls execve(), because CUDA
 * does not survive a fork. The parent ends when it, or "release", closes the pipe. */
static void __attribute__((noreturn)) leave(char **words)
{
        char *argv[16] = { self, "--job" };
        int fds[2];
        char byte;

        if (pipe2(fds, O_CLOEXEC) < 0)
                _exit(90);
        if (fork() > 0) {
                close(fds[1]);
                _exit(read(fds[0], &byte, 1) == 0 ? 0 : 91);
        }
        if (setsid() < 0 || fork() > 0 || dup2(fds[1], PARENT_FD) < 0)
                _exit(92);
        for (size_t i = 2; i < 15 && *words; i++)
                argv[i] = *words++;
        execv(self, argv);
        _exit(93);
}

static void say(const char *text)
{
        printf("%d %s\n", (int)getpid(), text);
        fflush(stdout);
}

static void wait_for_eviction(bfc_client *client)
{
        void *block;
        int r;

        while ((r = bfc_malloc(client, MIB, &block)) != -EIDRM) {
                if (r == 0)
                        bfc_free(client, block);
                usleep(2000);
        }
        say("evicted");
}

/* orphan, release, pause, evicted, malloc N (in MiB; prints its pid and the result) */
static int be_job(char **words)
{
        bfc_client *client = NULL;
        void *block;

        for (; *words; words++) {
                if (strcmp(*words, "orphan") == 0) {
                        leave(words + 1);
                } else if (strcmp(*words, "release") == 0) {
                        close(PARENT_FD);
                } else if (strcmp(*words, "pause") == 0) {
                        pause();
                } else if (strcmp(*words, "evicted") == 0) {
                        wait_for_eviction(client);
                } else if (strcmp(*words, "malloc") == 0) {
                        words++;
                        if (!client && bfc_connect(NULL, &client) < 0)
                                say(bfc_last_error());
                        else if (bfc_malloc(client, strtoull(*words, NULL, 10) * MIB, &block) < 0)
                                say(bfc_last_error());
                        else
                                say("ok");
                }
        }
        return 0;
}

/* ---- bfcctl run -------------------------------------------------------------- */

#define RUN(...) ((const char *const[]){ program_bfcctl(), "run", __VA_ARGS__, NULL })

/* It ends with this status and this part of its messages. */
static void run_ends(const char *const *argv, int status, const char *part)
{
        char *err;
        int got = program_run(argv, NULL, &err);

        ck_assert_ptr_nonnull(err);
        ck_assert_msg(got == status, "status %d: %s", got, err);
        ck_assert_msg(strstr(err, part), "no \"%s\" in: %s", part, err);
        free(err);
}

/* One that runs. */
struct job {
        pid_t pid; /* of bfcctl */
        FILE *out; /* and messages */
        char line[1024];
};

static void job_start(struct job *j, const char *const *argv)
{
        pid_t parent = getpid();
        int fds[2];

        ck_assert_int_eq(pipe2(fds, O_CLOEXEC), 0);
        j->pid = fork();
        ck_assert_int_ge(j->pid, 0);
        if (j->pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() != parent || dup2(fds[1], STDOUT_FILENO) < 0 || dup2(fds[1], STDERR_FILENO) < 0)
                        _exit(99);
                execv(argv[0], (char *const *)(uintptr_t)argv);
                _exit(99);
        }
        close(fds[1]);
        j->out = fdopen(fds[0], "r");
        ck_assert_ptr_nonnull(j->out);
}

/* The number at the begin of its next line, which has this part. */
static int job_reads(struct job *j, const char *part)
{
        ck_assert_msg(fgets(j->line, sizeof(j->line), j->out), "no line with \"%s\"", part);
        ck_assert_msg(strstr(j->line, part), "no \"%s\" in: %s", part, j->line);
        return atoi(j->line);
}

/* Its other lines before this one are skipped. */
static void job_comes_to(struct job *j, const char *part)
{
        do
                ck_assert_msg(fgets(j->line, sizeof(j->line), j->out), "no line with \"%s\"", part);
        while (!strstr(j->line, part));
}

/* The exit status, or 128 + signal. */
static int job_wait(struct job *j)
{
        int status;

        ck_assert_int_eq(waitpid(j->pid, &status, 0), j->pid);
        fclose(j->out);
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* The list of leases has this part. */
static bool list_has(const char *part)
{
        char *out = ctl_text(rig, WORDS("lease", "list"));
        bool has = strstr(out, part);

        free(out);
        return has;
}

TEST_OF(run, exit_status)
{
        run_ends(RUN("--limit", "2MiB", "--quiet", "sh", "-c", "exit 7"), 7, "");
        run_ends(RUN("--limit", "2MiB", "--quiet", "sh", "-c", "kill -KILL $$"), 128 + SIGKILL, "");
        run_ends(RUN("--limit", "2MiB", "--", "/nowhere/x"), 127, "/nowhere/x: No such file");
        run_ends(RUN("--limit", "2MiB", "--", "/"), 126, "/: Permission denied");
        run_ends(RUN("--limit", "2MiB"), 125, "no command to run");
        run_ends(RUN("true"), 125, "no --limit");
        run_ends(RUN("--limit", "1x", "true"), 125, "wrong value for --limit");
        run_ends(RUN("--limt", "2MiB", "true"), 125, "unknown option");
        run_ends(RUN("--limit", "2MiB", "--strict", "--no-preload", "true"), 125, "exclude each other");
        run_ends(RUN("--limit", "2MiB", "--limit", "2MiB", "true"), 125, "given twice: \"limit\"");
        run_ends(RUN("--limit", "3MiB", "true"), 125, "multiples of 2 MiB");
        run_ends(RUN("--limit", "2MiB", "--partition", "x", "true"), 125, "you can see: red in train");
        run_ends(RUN("--limit", "2MiB", "--tenant", "x", "true"), 125, "There is no tenant 'x'");
        run_ends(RUN("--limit", "2MiB", "--socket", rig->monitor_socket, "true"), 125,
                 "is the monitor socket");
        run_ends(RUN("--limit", "2MiB", "sh", "-c",
                     "[ $BFC_TENANT/$BFC_PARTITION = red/train ] && [ \"$BFC_SOCKET\" ]"),
                 0, "refused");
}

/* A user without rights, and a daemon that no variable names. */
TEST_OF(restarted, client_socket_of_the_option)
{
        static const struct rig_config with_self = {
                .tenants = "  - name: red\n    match: {uid: [@UID@]}\n    leases: self\n"
                           "    quotas: [{partition: train, limit: 64MiB}]\n"
        };
        char check[160];

        rig = rig_start(&with_self);
        ck_assert_int_eq(unsetenv("BFC_SOCKET"), 0);
        ck_assert_int_eq(unsetenv("BFC_ADMIN_SOCKET"), 0);
        snprintf(check, sizeof(check), "[ $BFC_SOCKET/$BFC_TENANT = %s/red ]", rig->socket);
        run_ends(((const char *const[]){ program_bfcctl(), "--socket", rig->socket, "run", "--limit", "2MiB",
                                         "sh", "-c", check, NULL }),
                 0, "0 B left");
        run_ends(((const char *const[]){ program_bfcctl(), "--socket", rig->socket, "run", "--socket",
                                         rig->socket, "--limit", "2MiB", "true", NULL }),
                 125, "given twice: \"socket\"");
        rig_stop(rig);
}

/* GPUs that CUDA_VISIBLE_DEVICES leaves out; a UUID and a number cannot be compared. */
TEST_OF(run, hidden_gpu)
{
        static const struct {
                const char *visible;
                bool hides;
        } cases[] = { { "", true },      { "-1", true }, { "1,2", true },   { "3,x,0", true },
                      { "1, 0", false }, { "0", false }, { "GPU-1", false } };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                char *err;

                ck_assert_int_eq(setenv("CUDA_VISIBLE_DEVICES", cases[i].visible, 1), 0);
                ck_assert_int_eq(program_run(RUN("--limit", "2MiB", "true"), NULL, &err), 0);
                ck_assert_msg((strstr(err, "the program cannot see that GPU") != NULL) ==
                                      (cases[i].hides && rig_device() != ON_HOST),
                              "%s: %s", cases[i].visible, err);
                free(err);
        }
}

/* The folder of the proxy is the first one in the library path, if there is one. tests/preload has its functions. */
TEST_OF(run, proxy)
{
        char path[128];

        ck_assert_int_eq(setenv("BFC_PRELOAD", "/nowhere", 1), 0);
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", "/before", 1), 0);
        run_ends(RUN("--limit", "2MiB", "sh", "-c", "[ $LD_LIBRARY_PATH = /before ]"), 0, "");
        run_ends(RUN("--limit", "2MiB", "--strict", "true"), 125, "--strict needs the proxy");
        snprintf(path, sizeof(path), "%s/libcuda.so.1", rig->folder);
        ck_assert_int_eq(symlink("/", path), 0);
        ck_assert_int_eq(setenv("BFC_PRELOAD", rig->folder, 1), 0);
        run_ends(RUN("--limit", "2MiB", "sh", "-c",
                     "[ $LD_LIBRARY_PATH = $BFC_PRELOAD:/before ] && [ ! \"$BFC_STRICT\" ]"),
                 0, "");
        run_ends(RUN("--limit", "2MiB", "--no-preload", "sh", "-c", "[ $LD_LIBRARY_PATH = /before ]"), 0, "");
        run_ends(RUN("--limit", "2MiB", "--strict", "sh", "-c", "[ $BFC_STRICT = 1 ]"), 0, "");
        ck_assert_int_eq(unsetenv("LD_LIBRARY_PATH"), 0);
        run_ends(RUN("--limit", "2MiB", "sh", "-c", "[ $LD_LIBRARY_PATH = $BFC_PRELOAD ]"), 0, "");
        ck_assert_int_eq(unlink(path), 0);
}

/* Also for a process that has left its session and whose parents have ended. */
TEST_OF(run, limit_of_the_process_tree)
{
        struct job j;

        job_start(&j, RUN("--limit", "32MiB", "--lease", "tree", "--", self, "--job", "malloc", "8", "orphan",
                          "malloc", "20", "malloc", "8"));
        job_reads(&j, " ok");
        job_reads(&j, " ok");
        job_reads(&j, " lease 'tree' of tenant 'red' is at its limit in 'train'");
        job_comes_to(&j, "bfcctl: lease 'tree': peak "); /* the orphan's session may end later */
        ck_assert_int_eq(job_wait(&j), 0);
}

TEST_OF(run, summary_is_the_lease)
{
        char peak[TEXT_MAX], blocks[TEXT_MAX], waited[TEXT_MAX], expected[256];
        json_t *rows, *row;
        struct job j;

        job_start(&j, RUN("--limit", "32MiB", "--", self, "--job", "malloc", "8", "malloc", "40", "pause"));
        job_reads(&j, " ok");
        job_reads(&j, " lease 'run-");
        rows = list_leases();
        row = json_array_get(rows, 0);
        ck_assert_int_eq(number_of(row, "num_refusals"), 1);
        snprintf(
                expected, sizeof(expected),
                "lease '%s': peak %s of 32.0 MiB, %s in blocks; requests waited %s in total; 1 refused; 0 B left",
                string_of(row, "name"), text_size((uint64_t)number_of(row, "peak_bytes_reserved"), peak),
                text_size((uint64_t)number_of(row, "peak_bytes_in_use"), blocks),
                text_time((uint64_t)number_of(row, "waited_ns"), waited));
        ck_assert_str_eq(blocks, "8.0 MiB");
        json_decref(rows);
        ck_assert_int_eq(kill(j.pid, SIGUSR1), 0);
        ck_assert(fgets(j.line, sizeof(j.line), j.out));
        ck_assert_ptr_nonnull(strstr(j.line, expected));
        ck_assert_int_eq(job_wait(&j), 128 + SIGUSR1);
}

/* ---- terminals ---------------------------------------------------------------- */

TEST_OF(run, key_on_a_terminal)
{
        int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), end, status;
        char text[4096] = "";
        size_t n = 0;
        ssize_t more;
        pid_t pid;

        ck_assert_int_ge(terminal, 0);
        ck_assert_int_eq(grantpt(terminal), 0);
        ck_assert_int_eq(unlockpt(terminal), 0);
        end = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
        ck_assert_int_ge(end, 0);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                if (setsid() < 0 || ioctl(end, TIOCSCTTY, 0) < 0)
                        _exit(99);
                for (int i = 0; i < 3; i++)
                        dup2(end, i);
                execl(program_bfcctl(), "bfcctl", "run", "--limit", "8MiB", "--lease", "keys", self, "--job",
                      "malloc", "4", "pause", NULL);
                _exit(99);
        }
        close(end);
        while (n < sizeof(text) - 1 && (more = read(terminal, text + n, sizeof(text) - 1 - n)) > 0) {
                n += (size_t)more;
                text[n] = '\0';
                if (strstr(text, " ok") && !strstr(text, "^C"))
                        ck_assert_int_eq(write(terminal, "\x03", 1), 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFSIGNALED(status) && WTERMSIG(status) == SIGINT, "status %x: %s", (unsigned)status,
                      text);
        ck_assert_msg(strstr(text, "bfcctl: lease 'keys': peak "), "%s", text);
        close(terminal);
}

/* ---- ends ---------------------------------------------------------------------- */

TEST_OF(run, kill_of_bfcctl)
{
        struct job j;
        int pid;

        job_start(&j, RUN("--limit", "8MiB", "--lease", "dead", self, "--job", "malloc", "4", "pause"));
        pid = job_reads(&j, " ok");
        ck_assert(list_has("active"));
        ck_assert_int_eq(kill(j.pid, SIGKILL), 0);
        ck_assert_int_eq(job_wait(&j), 128 + SIGKILL);
        ck_assert(WAIT_FOR(list_has("ending"), SETTLE_MS));
        run_ends(RUN("--limit", "8MiB", "--lease", "dead", "true"), 125, "still ending, with 1 session");
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
}

/* Its memory is released before bfcctl ends, so the next job can have its name and its guarantee. */
TEST_OF(slow, name_of_an_ended_job)
{
        run_ends(RUN("--limit", "32MiB", "--lease", "again", self, "--job", "malloc", "32"), 0, "0 B left");
        ck_assert_uint_eq(count_leases(), 0);
        run_ends(RUN("--limit", "64MiB", "--reserve", "64MiB", "--lease", "again", "true"), 0, "0 B left");
}

/* What a killed bfcctl did not do, the next one waits for. */
TEST_OF(slow, name_of_a_killed_job)
{
        struct pollfd process = { .events = POLLIN };
        struct job j;
        int pid;

        job_start(&j, RUN("--limit", "32MiB", "--lease", "again", self, "--job", "malloc", "32", "pause"));
        pid = job_reads(&j, " ok");
        process.fd = (int)syscall(SYS_pidfd_open, pid, 0);
        ck_assert_int_ge(process.fd, 0);
        ck_assert_int_eq(kill(j.pid, SIGKILL), 0);
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(job_wait(&j), 128 + SIGKILL);
        ck_assert_int_eq(poll(&process, 1, SETTLE_MS), 1);
        close(process.fd);
        run_ends(RUN("--limit", "8MiB", "--lease", "again", "true"), 0, "0 B left");
}

TEST_OF(run, processes_that_are_left)
{
        char expected[128];
        struct job j;
        int pid;

        job_start(&j, RUN("--limit", "8MiB", "--lease", "left", self, "--job", "orphan", "malloc", "4",
                          "release", "pause"));
        pid = job_reads(&j, " ok");
        snprintf(expected, sizeof(expected), "bfcctl: 1 process of the job still runs: %d (test_run)", pid);
        job_reads(&j, expected);
        job_reads(&j, "bfcctl: lease 'left' is still used by 1 session: session ");
        ck_assert_ptr_nonnull(strstr(j.line, "test_run): 4.0 MiB"));
        job_reads(&j, "these sessions keep their memory until they end");
        job_reads(&j, "4.0 MiB left");
        ck_assert(list_has("ending"));
        ck_assert_int_eq(kill(pid, SIGKILL), 0);
        ck_assert_int_eq(job_wait(&j), 0);
}

TEST_OF(run, sessions_that_are_evicted)
{
        char text[4096] = "";
        struct job j;

        job_start(&j, RUN("--limit", "8MiB", "--lease", "left", "--evict", self, "--job", "orphan", "malloc",
                          "4", "release", "evicted"));
        while (fgets(j.line, sizeof(j.line), j.out))
                snprintf(text + strlen(text), sizeof(text) - strlen(text), "%s", j.line);
        ck_assert_msg(strstr(text, " evicted\n"), "%s", text);
        ck_assert_msg(strstr(text, "these sessions are evicted now\n"), "%s", text);
        ck_assert_int_eq(job_wait(&j), 0);
}

/* The connection to the daemon is not needed while the program runs. */
TEST_OF(restarted, restart_of_the_daemon)
{
        struct kept *k = kept_start(&config);
        struct job j;

        rig = k->rig;
        set_environment();
        job_start(&j, RUN("--limit", "8MiB", "--lease", "long", self, "--job", "malloc", "4", "pause"));
        job_reads(&j, " ok");
        kept_restart(k, SIGKILL);
        ck_assert(list_has("long"));
        ck_assert_int_eq(kill(j.pid, SIGUSR1), 0);
        job_reads(&j, "bfcctl: lease 'long': peak ");
        ck_assert_ptr_nonnull(strstr(j.line, " 0 B left"));
        ck_assert_int_eq(job_wait(&j), 128 + SIGUSR1);
        ck_assert(WAIT_FOR(count_leases() == 0, SETTLE_MS));
        kept_stop(k);
}

/* ---- waiting --------------------------------------------------------------------- */

TEST_OF(run, guarantee_is_waited_for)
{
        struct job first, second;

        job_start(&first, RUN("--limit", "48MiB", "--reserve", "48MiB", "--lease", "first", self, "--job",
                              "malloc", "1", "pause"));
        job_reads(&first, " ok");
        run_ends(RUN("--limit", "32MiB", "--reserve", "32MiB", "true"), 125, "cannot be guaranteed");
        run_ends(RUN("--limit", "32MiB", "--reserve", "32MiB", "--wait", "1", "true"), 125,
                 "cannot be guaranteed");
        run_ends(RUN("--limit", "32MiB", "--lease", "first", "--wait", "true"), 125, "exists already");
        job_start(&second, RUN("--limit", "32MiB", "--reserve", "32MiB", "--wait", "--lease", "second", self,
                               "--job", "malloc", "1"));
        ck_assert_int_eq(kill(first.pid, SIGTERM), 0);
        ck_assert_int_eq(job_wait(&first), 128 + SIGTERM);
        job_reads(&second, " ok");
        job_reads(&second, "lease 'second'");
        ck_assert_int_eq(job_wait(&second), 0);
}

int main(int argc, char **argv)
{
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

        if (n < 0)
                return 1;
        if (argc > 1 && strcmp(argv[1], "--job") == 0)
                return be_job(argv + 2);
        return harness_cases("run");
}
