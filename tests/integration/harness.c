/* Rigs: see harness.h.
 *
 * Check runs each test in a process of its own; every process started here dies
 * with that one (PR_SET_PDEATHSIG), so a failed test leaves only its folder, and
 * main() prints the log in it and removes it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <grp.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>

#include "tests/integration/harness.h"
#include "tests/integration/moved_clock.h"
#include "tests/suite.h"

static char base_folder[40]; /* of all rigs of this program */
static char base_memory[40]; /* of their pretended machines: the fake driver's memory is files */

int64_t clock_ms(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

/* ---- files ---------------------------------------------------------------- */

static char *fd_text(int fd)
{
        FILE *out;
        char *text = NULL, piece[4096];
        size_t n_bytes;
        ssize_t n;

        out = open_memstream(&text, &n_bytes);
        if (!out)
                return NULL;
        for (off_t at = 0; (n = pread(fd, piece, sizeof(piece), at)) > 0; at += n)
                fwrite(piece, 1, (size_t)n, out);
        fclose(out);
        return text;
}

char *file_text(const char *path)
{
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        char *text;

        if (fd < 0)
                return NULL;
        text = fd_text(fd);
        close(fd);
        return text;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
        (void)st;
        (void)type;
        (void)ftw;
        return remove(path);
}

static void remove_folder(const char *path)
{
        (void)nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

/* ---- configs -------------------------------------------------------------- */

static void put_filled_in(FILE *out, const char *text)
{
        const struct {
                const char *word;
                unsigned value;
        } words[] = {
                { "@UID@", getuid() },
                { "@GID@", getgid() },
                { "@OTHER@", OTHER_UID },
                { "@ANOTHER@", ANOTHER_UID },
        };

        while (*text) {
                size_t i, n = sizeof(words) / sizeof(words[0]);

                for (i = 0; i < n && strncmp(text, words[i].word, strlen(words[i].word)) != 0; i++)
                        ;
                if (i == n) {
                        fputc(*text++, out);
                } else {
                        fprintf(out, "%u", words[i].value);
                        text += strlen(words[i].word);
                }
        }
}

enum rig_device rig_device(void)
{
        static const char *const kinds[] = {
                [ON_HOST] = "host", [ON_CUDA_IPC] = "cuda-ipc", [ON_CUDA_FD] = "cuda-fd"
        };
        const char *kind = getenv("BFC_TEST_DEVICE");

        if (!kind || !*kind)
                return ON_HOST;
        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
                if (strcmp(kind, kinds[i]) == 0)
                        return (enum rig_device)i;
        fprintf(stderr, "BFC_TEST_DEVICE=%s: host, cuda-ipc and cuda-fd are known\n", kind);
        abort();
}

const char *rig_device_id(void)
{
        return rig_device() == ON_HOST ? "host" : "cuda:0";
}

const char *rig_extent_mark(void)
{
        return rig_device() == ON_HOST ? "memfd:bfcd-extent" : "/cuda/mem-0-";
}

/* Every partition is shared as BFC_TEST_DEVICE says, unless the test says itself. */
static void put_partitions(FILE *out, const char *partitions)
{
        const char *item = "- {name:", *rest = partitions, *found;

        while (rig_device() != ON_HOST && (found = strstr(rest, item))) {
                fprintf(out, "%.*s- {share: %s, name:", (int)(found - rest), rest,
                        rig_device() == ON_CUDA_FD ? "fd" : "cuda-ipc");
                rest = found + strlen(item);
        }
        put_filled_in(out, rest);
}

/* The one place that names the device. A CUDA device is the fake driver's, of the
 * size that the test wants. */
static void put_device(FILE *out, const struct rig_config *config)
{
        const char *size = config->size ? config->size : "256MiB";
        const char *more = config->device ? config->device : "", *partitions = config->partitions;

        if (rig_device() == ON_HOST) {
                fprintf(out, "devices:\n  - id: host\n    size: %s\n%s    partitions:\n", size, more);
        } else {
                char devices[64];

                snprintf(devices, sizeof(devices), "%s,96MiB", size);
                setenv("FAKE_CUDA_DEVICES", devices, 1);
                fprintf(out, "devices:\n  - id: cuda:0\n    headroom: 0\n%s    partitions:\n", more);
        }
        put_partitions(out,
                       partitions ? partitions : "      - {name: train, limit: 128MiB, growth: on-demand}\n");
}

char *rig_config_text(const struct rig *rig, const struct rig_config *config)
{
        char *text = NULL;
        size_t n_bytes;
        FILE *out = open_memstream(&text, &n_bytes);

        ck_assert_ptr_nonnull(out);
        fprintf(out, "socket: {path: %s, mode: \"0666\"}\n", rig->socket);
        fprintf(out, "admin_socket: {path: %s, mode: \"0600\"}\n", rig->admin_socket);
        if (!config->has_no_lease_socket) {
                fprintf(out, "lease_socket: {path: %s", rig->lease_socket);
                put_filled_in(out, config->lease_keys ? config->lease_keys : "");
                fputs("}\n", out);
        }
        put_filled_in(out, config->top ? config->top : "");
        if (!config->top || !strstr(config->top, "timeouts:"))
                fputs("timeouts: {reclaim: 30s, quarantine: 60m}\n",
                      out); /* a slow machine's clients answer in time */
        put_device(out, config);
        fputs("tenants:\n", out);
        put_filled_in(out, config->tenants ? config->tenants
                                           : "  - name: red\n"
                                             "    match: {uid: [@UID@]}\n"
                                             "    quotas: [{partition: train, limit: 64MiB}]\n");
        fclose(out);
        return text;
}

void rig_write_config(struct rig *rig, const char *text)
{
        FILE *out = fopen(rig->config_path, "we");

        ck_assert_ptr_nonnull(out);
        fputs(text, out);
        ck_assert_int_eq(fclose(out), 0);
}

/* ---- processes ------------------------------------------------------------ */

static void die_with_parent(pid_t parent)
{
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
                _exit(98);
}

pid_t child_start_as(uid_t uid, gid_t gid, void (*function)(void *), void *arg)
{
        pid_t parent = getpid(), pid;

        fflush(NULL);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid > 0)
                return pid;
        if (uid != getuid()) /* changing it would forget PDEATHSIG, so that comes after */
                REQUIRE(setgroups(0, NULL) == 0 && setgid(gid) == 0 && setuid(uid) == 0, "to uid %u",
                        (unsigned)uid);
        die_with_parent(parent);
        function(arg);
        _exit(0);
}

pid_t child_start(void (*function)(void *), void *arg)
{
        return child_start_as(getuid(), getgid(), function, arg);
}

pid_t child_start_until(struct gate *gate, void (*function)(void *), void *arg)
{
        pid_t pid = child_start(function, arg);

        ck_assert(gate_wait(gate, SETTLE_MS));
        return pid;
}

static int exit_code(int status)
{
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void child_join(pid_t pid)
{
        int status;

        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(exit_code(status) == 0, "a child ended with status %d; see its message on stderr",
                      exit_code(status));
}

/* Whether a stopped process has the lock that all processes of the fake driver share: the daemon would wait for it. Its
 * own fds show that; /proc/locks changes meanwhile. */
static bool has_fake_lock(pid_t pid)
{
        const char *folder = getenv("FAKE_CUDA_STATE");
        char path[512], line[256], lock[64] = "";
        struct dirent *entry;
        struct stat st;
        bool has = false;
        DIR *fds;

        snprintf(path, sizeof(path), "%s/lock", folder ? folder : "");
        if (!folder || stat(path, &st) < 0)
                return false;
        snprintf(lock, sizeof(lock), ":%lu 0 EOF", (unsigned long)st.st_ino);
        snprintf(path, sizeof(path), "/proc/%d/fdinfo", (int)pid);
        fds = opendir(path);
        ck_assert_ptr_nonnull(fds);
        while ((entry = readdir(fds))) {
                FILE *f;

                snprintf(path, sizeof(path), "/proc/%d/fdinfo/%.16s", (int)pid, entry->d_name);
                f = fopen(path, "re");
                while (f && fgets(line, sizeof(line), f))
                        has = has ||
                              (strncmp(line, "lock:", 5) == 0 && strstr(line, "WRITE") && strstr(line, lock));
                if (f)
                        fclose(f);
        }
        closedir(fds);
        return has;
}

void child_stop(pid_t pid)
{
        int status = 0;

        do {
                if (status != 0)
                        ck_assert_int_eq(kill(pid, SIGCONT), 0);
                ck_assert_int_eq(kill(pid, SIGSTOP), 0);
                ck_assert_int_eq(waitpid(pid, &status, WUNTRACED), pid);
                ck_assert(WIFSTOPPED(status));
        } while (has_fake_lock(pid));
}

void child_kill(pid_t pid)
{
        int status;

        kill(pid, SIGKILL);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFSIGNALED(status), "a child ended with status %d before it was killed",
                      exit_code(status));
}

struct gate gate_new(void)
{
        struct gate gate;

        ck_assert_int_eq(pipe2(gate.fds, O_CLOEXEC), 0);
        return gate;
}

void gate_open(struct gate *gate)
{
        (void)!write(gate->fds[1], "g", 1);
}

bool gate_wait(struct gate *gate, int timeout_ms)
{
        struct pollfd poll_fd = { .fd = gate->fds[0], .events = POLLIN };
        char c;

        return poll(&poll_fd, 1, timeout_ms) == 1 && read(gate->fds[0], &c, 1) == 1;
}

void gate_meet(struct gate *open, struct gate *wait)
{
        gate_open(open);
        REQUIRE(gate_wait(wait, SETTLE_MS), "the other process is not ready in time");
}

void *shared_memory(size_t n_bytes)
{
        void *p = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

        ck_assert(p != MAP_FAILED);
        return p;
}

int program_run(const char *const *argv, char **ret_stdout, char **ret_stderr)
{
        int out = memfd_create("stdout", MFD_CLOEXEC), err = memfd_create("stderr", MFD_CLOEXEC);
        pid_t parent = getpid(), pid;
        int status;

        ck_assert_int_ge(out, 0);
        ck_assert_int_ge(err, 0);
        fflush(NULL);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                die_with_parent(parent);
                dup2(out, STDOUT_FILENO);
                dup2(err, STDERR_FILENO);
                execv(argv[0], (char *const *)(uintptr_t)argv);
                dprintf(STDERR_FILENO, "%s: %s\n", argv[0], strerror(errno));
                _exit(127);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        if (ret_stdout)
                *ret_stdout = fd_text(out);
        if (ret_stderr)
                *ret_stderr = fd_text(err);
        close(out);
        close(err);
        return exit_code(status);
}

int program_check(const char *path, char **ret_errors)
{
        const char *argv[] = {
                program_bfcd(), "--check", path, geteuid() == 0 ? "--user" : NULL, "root", NULL
        };

        return program_run(argv, NULL, ret_errors);
}

static const char *program_path(const char *variable, const char *fallback)
{
        const char *path = getenv(variable);

        return path && *path ? path : fallback;
}

const char *program_bfcd(void)
{
        return program_path("BFCD", BUILT_BFCD);
}

const char *program_bfcctl(void)
{
        return program_path("BFCCTL", BUILT_BFCCTL);
}

const char *program_replay(void)
{
        return program_path("BFC_REPLAY", BUILT_REPLAY);
}

/* ---- rigs ----------------------------------------------------------------- */

struct rig *rig_folder(void)
{
        static unsigned n_rigs;
        char state[104];
        struct rig *rig = calloc(1, sizeof(*rig));

        ck_assert_ptr_nonnull(rig);
        snprintf(rig->folder, sizeof(rig->folder), "%s/%d-%u", base_folder, (int)getpid(), n_rigs++);
        ck_assert_int_eq(mkdir(rig->folder, 0755), 0);
        ck_assert_int_eq(chmod(rig->folder, 0755), 0);
        snprintf(rig->socket, sizeof(rig->socket), "%s/bfcd.sock", rig->folder);
        snprintf(rig->admin_socket, sizeof(rig->admin_socket), "%s/admin.sock", rig->folder);
        snprintf(rig->lease_socket, sizeof(rig->lease_socket), "%s/lease.sock", rig->folder);
        snprintf(rig->monitor_socket, sizeof(rig->monitor_socket), "%s/monitor.sock", rig->folder);
        snprintf(rig->config_path, sizeof(rig->config_path), "%s/bfcd.yaml", rig->folder);
        snprintf(rig->log_path, sizeof(rig->log_path), "%s/log", rig->folder);
        /* The pretended machine's memory: gone with the folder. */
        snprintf(rig->memory, sizeof(rig->memory), "%s/%s", base_memory, strrchr(rig->folder, '/') + 1);
        ck_assert_int_eq(mkdir(rig->memory, 0777), 0);
        ck_assert_int_eq(chmod(rig->memory, 0777), 0);
        snprintf(state, sizeof(state), "%s/cuda", rig->memory);
        setenv("FAKE_CUDA_STATE", state, 1);
        rig->bfcd = program_bfcd();
        unsetenv(MOVED_CLOCK_FILE);
        return rig;
}

pid_t rig_spawn_daemon(const struct rig *rig)
{
        return rig_spawn_daemon_with(rig, NULL, NULL);
}

pid_t rig_spawn_daemon_with(const struct rig *rig, void (*prepare)(void *), void *arg)
{
        pid_t parent = getpid(), pid;
        int log, null;

        fflush(NULL);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid > 0)
                return pid;
        die_with_parent(parent);
        log = open(rig->log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        null = open("/dev/null", O_RDWR | O_CLOEXEC);
        dup2(null, STDIN_FILENO);
        dup2(null, STDOUT_FILENO); /* the test's TAP must stay clean */
        dup2(log, STDERR_FILENO);
        if (rig->max_fds > 0)
                setrlimit(RLIMIT_NOFILE, &(struct rlimit){ rig->max_fds, rig->max_fds });
        unsetenv("JOURNAL_STREAM");  /* levels as words, which the check of the log reads */
        setenv("BFCD_KEEP", "0", 0); /* it leaves nothing */
        if (prepare)
                prepare(arg);
        execl(rig->bfcd, "bfcd", "--config", rig->config_path, rig->option, (char *)NULL);
        dprintf(STDERR_FILENO, "error: %s: %s\n", rig->bfcd, strerror(errno));
        _exit(127);
}

bool rig_answers(const struct rig *rig)
{
        struct raw *raw = raw_connect(rig->admin_socket, NULL);
        bool answers = raw != NULL;

        raw_close(raw);
        return answers;
}

static bool has_ended(pid_t pid)
{
        siginfo_t info = { .si_pid = 0 };

        return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

/* Without the file of records, which a thread opens when it writes the first one. list: where to write what they are; NULL:
 * nowhere. */
static unsigned count_fds(pid_t pid, FILE *list)
{
        char path[32], target[96];
        struct dirent *entry;
        unsigned n_fds = 0;
        DIR *folder;
        ssize_t n;

        snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
        folder = opendir(path);
        ck_assert_ptr_nonnull(folder);
        while ((entry = readdir(folder))) {
                if (entry->d_name[0] == '.')
                        continue;
                n = readlinkat(dirfd(folder), entry->d_name, target, sizeof(target) - 1);
                target[n > 0 ? n : 0] = '\0';
                if (strstr(target, "/records.jsonl"))
                        continue;
                n_fds++;
                if (list)
                        fprintf(list, "fd %s: %s\n", entry->d_name, target);
        }
        closedir(folder);
        return n_fds;
}

/* The daemon's fds when it has come to rest: its threads may have files open for a moment. The daemon answers between
 * the looks, so it has had a turn. */
static unsigned count_resting_fds(struct rig *rig)
{
        unsigned n_fds, n_before;

        n_fds = count_fds(rig->pid, NULL);
        for (int i = 0; i < 1000; i++) {
                n_before = n_fds;
                usleep(20000);
                (void)rig_count(rig);
                n_fds = count_fds(rig->pid, NULL);
                if (n_fds == n_before)
                        break;
        }
        return n_fds;
}

static bool connect_admin(struct rig *rig)
{
        rig->admin = raw_connect(rig->admin_socket, NULL);
        return rig->admin != NULL;
}

static void wait_until_made(struct rig *rig)
{
        ck_assert(WAIT_FOR(rig_count(rig).bytes_pending == rig->stuck_bytes, SETTLE_MS));
}

void rig_meet(struct rig *rig)
{
        ck_assert(connect_admin(rig));
        wait_until_made(rig);
}

void rig_look_at_rest(struct rig *rig)
{
        rig->n_fds = count_resting_fds(rig);
        rig->n_extents = rig_count(rig).n_extents;
}

void rig_choose_program(struct rig *rig, const struct rig_config *config)
{
        char path[104];
        void *page;
        int fd;

        if (!config->moves_clock)
                return;
        snprintf(path, sizeof(path), "%s/clock", rig->folder);
        fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, sizeof(*rig->clock)), 0);
        page = mmap(NULL, sizeof(*rig->clock), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        ck_assert(page != MAP_FAILED);
        close(fd);
        rig->clock = page;
        rig->bfcd = program_path("BFCD", BUILT_BFCD_MOVED_CLOCK);
        setenv(MOVED_CLOCK_FILE, path, 1);
}

void rig_pass(struct rig *rig, unsigned ms)
{
        ck_assert_ptr_nonnull(rig->clock);
        if (__atomic_load_n(&rig->clock->is_read, __ATOMIC_ACQUIRE))
                __atomic_add_fetch(&rig->clock->passed_ms, ms, __ATOMIC_RELEASE);
        else
                usleep(ms * 1000);
        for (unsigned i = 0; i < 2; i++) /* a turn of its loop runs the timers before or behind an answer */
                (void)rig_count(rig);
}

struct rig *rig_start(const struct rig_config *config)
{
        struct rig *rig = rig_folder();
        char *text = rig_config_text(rig, config);
        char *log;

        rig_write_config(rig, text);
        free(text);
        rig->max_fds = config->max_fds;
        rig_choose_program(rig, config);
        rig->pid = rig_spawn_daemon(rig);
        if (!WAIT_FOR(connect_admin(rig) || has_ended(rig->pid), SETTLE_MS) || has_ended(rig->pid)) {
                log = rig_log(rig);
                ck_abort_msg("the daemon does not answer; it wrote: %s", log ? log : "nothing");
        }
        wait_until_made(rig);
        rig_look_at_rest(rig);
        return rig;
}

char *rig_log(const struct rig *rig)
{
        return file_text(rig->log_path);
}

void rig_assert_clean_log(const struct rig *rig)
{
        static const char *const bad[] = { "error:", "Sanitizer", "Assertion", "assertion" };
        char *log = rig_log(rig), *rest = log, *line;

        while (rest && (line = strsep(&rest, "\n"))) {
                if (rig->forgiven && strstr(line, rig->forgiven))
                        continue;
                for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
                        ck_assert_msg(!strstr(line, bad[i]), "the daemon logged: %s", line);
        }
        free(log);
}

/* What tenants are charged, all together; preallocated partitions stay charged. */
static uint64_t charged_on_demand(struct rig *rig)
{
        Bfcd__Reply *partitions, *tenants;
        uint64_t charged = 0;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__PARTITIONS, 0, &partitions), 0);
        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__TENANTS, 0, &tenants), 0);
        for (size_t i = 0; i < tenants->list->n_tenants; i++) {
                const Bfcd__TenantRow *row = tenants->list->tenants[i];

                charged += row->stats->bytes_in_use + row->stats->bytes_requested;
                for (size_t j = 0; j < partitions->list->n_partitions; j++) {
                        const Bfcd__PartitionRow *p = partitions->list->partitions[j];

                        if (strcmp(p->name, row->partition) == 0 && strcmp(p->growth, "on-demand") == 0)
                                charged += row->stats->bytes_reserved - row->stats->bytes_unreclaimed;
                }
        }
        bfcd__reply__free_unpacked(partitions, NULL);
        bfcd__reply__free_unpacked(tenants, NULL);
        return charged;
}

static uint64_t count_unreclaimed(struct rig *rig)
{
        uint64_t n_bytes = 0;
        Bfcd__Reply *tenants;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__TENANTS, 0, &tenants), 0);
        for (size_t i = 0; i < tenants->list->n_tenants; i++)
                n_bytes += tenants->list->tenants[i]->stats->bytes_unreclaimed;
        bfcd__reply__free_unpacked(tenants, NULL);
        return n_bytes;
}

static bool is_empty(struct rig *rig, struct rig_counts *ret)
{
        *ret = rig_count(rig);
        return ret->n_sessions == 0 && ret->n_blocks == 0 && ret->n_quarantined == 0 &&
               ret->n_extents == rig->n_extents && ret->bytes_pending == 0;
}

void rig_assert_empty(struct rig *rig)
{
        struct rig_counts n = { 0 };
        unsigned n_fds;

        (void)WAIT_FOR(is_empty(rig, &n), SETTLE_MS);
        ck_assert_uint_eq(n.n_sessions, 0);
        ck_assert_uint_eq(n.n_blocks, 0);
        ck_assert_uint_eq(n.n_quarantined, 0);
        ck_assert_uint_eq(n.n_extents, rig->n_extents);
        ck_assert_uint_eq(n.bytes_pending, 0);
        (void)WAIT_FOR(count_unreclaimed(rig) <= rig->unreclaimed_bytes,
                       SETTLE_MS); /* some may be back by now */
        ck_assert_uint_le(count_unreclaimed(rig), rig->unreclaimed_bytes);
        ck_assert_uint_eq(charged_on_demand(rig), 0);
        if (rig->n_fds > 0 && !WAIT_FOR((n_fds = count_fds(rig->pid, NULL)) == rig->n_fds, SETTLE_MS)) {
                (void)count_fds(rig->pid, stderr);
                ck_abort_msg("the daemon has %u fds open and had %u at the start; they are on stderr", n_fds,
                             rig->n_fds);
        }
}

void rig_terminate(struct rig *rig)
{
        int status = -1;

        rig->admin = raw_close(rig->admin);
        kill(rig->pid, SIGTERM);
        if (!WAIT_FOR(has_ended(rig->pid), SETTLE_MS)) {
                kill(rig->pid, SIGABRT);
                ck_abort_msg("the daemon did not end within 10 s of SIGTERM");
        }
        ck_assert_int_eq(waitpid(rig->pid, &status, 0), rig->pid);
        ck_assert_msg(exit_code(status) == 0, "the daemon ended with status %d", exit_code(status));
        ck_assert_msg(access(rig->socket, F_OK) < 0, "the daemon left its socket behind");
        ck_assert_msg(access(rig->admin_socket, F_OK) < 0, "the daemon left its admin socket behind");
        ck_assert_msg(access(rig->lease_socket, F_OK) < 0, "the daemon left its lease socket behind");
        ck_assert_msg(access(rig->monitor_socket, F_OK) < 0, "the daemon left its monitor socket behind");
        rig_assert_clean_log(rig);
}

void rig_discard(struct rig *rig)
{
        raw_close(rig->admin);
        if (rig->clock)
                munmap(rig->clock, sizeof(*rig->clock));
        remove_folder(rig->folder);
        remove_folder(rig->memory);
        free(rig);
}

void rig_stop(struct rig *rig)
{
        rig_assert_empty(rig);
        rig_terminate(rig);
        rig_discard(rig);
}

/* ---- what the daemon says ------------------------------------------------- */

bool raw_stats(struct raw *raw, const char *tenant, const char *partition, Bfcd__Statistics *ret)
{
        uint64_t cursor = 0;
        bool found = false;

        do {
                Bfcd__Reply *page;

                if (raw_list(raw, BFCD__LIST__KIND__TENANTS, cursor, &page) < 0)
                        return false;
                for (size_t i = 0; !found && i < page->list->n_tenants; i++) {
                        const Bfcd__TenantRow *row = page->list->tenants[i];

                        if (strcmp(row->tenant, tenant) != 0 || strcmp(row->partition, partition) != 0)
                                continue;
                        *ret = *row->stats;
                        ret->base.n_unknown_fields = 0;
                        ret->base.unknown_fields = NULL;
                        found = true;
                }
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (!found && cursor != 0);
        return found;
}

Bfcd__Statistics rig_stats(struct rig *rig, const char *tenant, const char *partition)
{
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;

        ck_assert_msg(raw_stats(rig->admin, tenant, partition, &stats), "no row for tenant %s in %s", tenant,
                      partition);
        return stats;
}

uint64_t rig_charge(struct rig *rig, const char *tenant, const char *partition)
{
        Bfcd__Statistics stats = rig_stats(rig, tenant, partition);

        return stats.bytes_reserved + stats.bytes_in_use;
}

static uint64_t count_tenants_sessions(struct rig *rig)
{
        uint64_t cursor = 0, n = 0;

        do {
                Bfcd__Reply *page;

                ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__SESSIONS, cursor, &page), 0);
                for (size_t i = 0; i < page->list->n_sessions; i++)
                        n += page->list->sessions[i]->tenant[0] != '\0';
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        return n;
}

struct rig_counts rig_count(struct rig *rig)
{
        struct rig_counts counts = { 0 };
        const Bfcd__Status *status;
        Bfcd__Reply *reply;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__STATUS, 0, &reply), 0);
        status = reply->list->status;
        ck_assert_ptr_nonnull(status);
        counts.n_blocks = status->num_blocks;
        counts.n_extents = status->num_extents;
        counts.n_quarantined = status->num_quarantined;
        counts.bytes_allocated = status->bytes_allocated;
        counts.bytes_resident = status->bytes_resident;
        for (size_t i = 0; i < status->n_devices; i++)
                counts.bytes_pending += status->devices[i]->bytes_pending;
        bfcd__reply__free_unpacked(reply, NULL);
        counts.n_sessions = count_tenants_sessions(rig);
        return counts;
}

/* ---- main ----------------------------------------------------------------- */

bool is_root(void)
{
        return geteuid() == 0;
}

bool others_may_run(void)
{
        char path[PATH_MAX], *end = path;
        struct stat st;

        if (!is_root()) {
                printf("# skipped: only root can become other users\n");
                return false;
        }
        snprintf(path, sizeof(path), "%s", program_bfcctl());
        while (end) {
                end = strchr(end + 1, '/');
                if (end)
                        *end = '\0';
                if (stat(path, &st) < 0 || !(st.st_mode & S_IXOTH)) {
                        printf("# skipped: other users may not enter %s\n", path);
                        return false;
                }
                if (end)
                        *end = '/';
        }
        return true;
}

double test_seconds(double fallback)
{
        const char *text = getenv("BFC_TEST_SECONDS");
        double seconds = text ? strtod(text, NULL) : 0;

        return seconds > 0 ? seconds : fallback;
}

/* Says what the daemons of failed tests logged. */
static void print_leftover_logs(void)
{
        struct dirent *entry;
        DIR *folder = opendir(base_folder);
        char path[sizeof(base_folder) + sizeof(entry->d_name) + 8], *log;

        while (folder && (entry = readdir(folder))) {
                if (entry->d_name[0] == '.')
                        continue;
                snprintf(path, sizeof(path), "%s/%s/log", base_folder, entry->d_name);
                log = file_text(path);
                if (log)
                        fprintf(stderr, "---- the daemon's log in %s:\n%s", entry->d_name, log);
                free(log);
        }
        if (folder)
                closedir(folder);
}

int harness_main(Suite *suite)
{
        int status;

        setenv("BFC_CACHE", "off", 1); /* the tests compare the daemon's statistics byte by byte */
        strcpy(base_folder, "/tmp/bfcd-rig-XXXXXX");
        strcpy(base_memory, "/dev/shm/bfcd-rig-XXXXXX");
        if (!mkdtemp(base_folder) || chmod(base_folder, 0755) < 0 || !mkdtemp(base_memory) ||
            chmod(base_memory, 0755) < 0) {
                perror(base_folder);
                return EXIT_FAILURE;
        }
        status = suite_run(suite);
        print_leftover_logs();
        remove_folder(base_folder);
        remove_folder(base_memory);
        return status;
}
