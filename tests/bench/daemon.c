/* What the benches of a running daemon share; see daemon.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/daemon.h"

#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

char folder[64], socket_path[96], admin_path[96];
static char gpu_folder[64];
static const char *program_name = "bench";
static pid_t folder_owner; /* not a forked child */

_Noreturn void die(const char *what, const char *why)
{
        fprintf(stderr, "%s: %s: %s\n", program_name, what, why);
        exit(EXIT_FAILURE);
}

void *need(void *memory)
{
        if (!memory || memory == MAP_FAILED)
                die("memory", strerror(ENOMEM));
        return memory;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
        (void)st;
        (void)type;
        (void)at;
        return remove(path);
}

static void remove_folder(void)
{
        if (getpid() != folder_owner)
                return;
        nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
        nftw(gpu_folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

void make_folder(const char *program)
{
        program_name = program;
        snprintf(folder, sizeof(folder), "/tmp/%s-XXXXXX", program);
        /* The fake GPU's memory is separate: other programs may have one at the same time. */
        snprintf(gpu_folder, sizeof(gpu_folder), "/dev/shm/%s-XXXXXX", program);
        if (!mkdtemp(folder) || chmod(folder, 0755) < 0)
                die(folder, strerror(errno));
        if (!mkdtemp(gpu_folder))
                die(gpu_folder, strerror(errno));
        setenv("FAKE_CUDA_STATE", gpu_folder, 1);
        snprintf(socket_path, sizeof(socket_path), "%s/bfcd.sock", folder);
        snprintf(admin_path, sizeof(admin_path), "%s/admin.sock", folder);
        folder_owner = getpid();
        atexit(remove_folder);
}

void pin(pid_t pid, int core)
{
        cpu_set_t set;

        if (core < 0)
                return;
        CPU_ZERO(&set);
        CPU_SET((unsigned)core, &set);
        if (sched_setaffinity(pid, sizeof(set), &set) < 0)
                fprintf(stderr, "%s: pinning to core %d: %s\n", program_name, core, strerror(errno));
}

void *shared_memory(size_t n_bytes)
{
        return need(mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
}

/* ---- processes ------------------------------------------------------------- */

/* A child gets the locks of other threads' malloc() as they are; AddressSanitizer's stay locked for ever. */
static void need_one_thread(void)
{
        struct stat tasks;

        if (stat("/proc/self/task", &tasks) == 0 && tasks.st_nlink > 3)
                die("fork", "this process has threads");
}

pid_t process_start(void (*run)(void *), void *arg)
{
        pid_t parent = getpid(), pid;

        need_one_thread();
        pid = fork();
        if (pid < 0)
                die("fork", strerror(errno));
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
                run(arg);
        _exit(0);
}

void process_stop(pid_t pid, int signal_number)
{
        kill(pid, signal_number);
        waitpid(pid, NULL, 0);
}

void processes_kill(const pid_t *pids, long n)
{
        for (long i = 0; i < n; i++)
                kill(pids[i], SIGKILL);
        for (long i = 0; i < n; i++)
                (void)waitpid(pids[i], NULL, 0);
}

void process_run(const char *what, void (*run)(void *), void *arg)
{
        pid_t pid = process_start(run, arg);
        int status = 0;

        if (waitpid(pid, &status, 0) < 0 || status != 0)
                die(what, "the measurement failed");
}

/* ---- daemons --------------------------------------------------------------- */

void write_config(const char *text, char *ret_path, size_t n_bytes)
{
        FILE *f;

        snprintf(ret_path, n_bytes, "%s/bfcd.yaml", folder);
        f = fopen(ret_path, "we");
        if (!f)
                die(ret_path, strerror(errno));
        fprintf(f,
                "socket: {path: %s, mode: \"0666\"}\n"
                "admin_socket: {path: %s, mode: \"0600\"}\n"
                "monitor_socket: {mode: \"0666\"}\n%s",
                socket_path, admin_path, text);
        fclose(f);
}

static pid_t started; /* the latest daemon; 0: none */

pid_t daemon_start(const char *bfcd, int core, const char *format, ...)
{
        char *text, config[128];
        va_list args;
        pid_t pid;

        va_start(args, format);
        if (vasprintf(&text, format, args) < 0)
                die("memory", strerror(ENOMEM));
        va_end(args);
        write_config(text, config, sizeof(config));
        free(text);
        pid = fork();
        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGTERM);
                pin(0, core);
                execl(bfcd, bfcd, "--config", config, "--log-level", "warning", (char *)NULL);
                die(bfcd, strerror(errno));
        }
        started = pid;
        return pid;
}

pid_t daemon_start_simple(const char *bfcd, unsigned limit_mib, int core)
{
        return daemon_start(bfcd, core,
                            "devices:\n"
                            "  - id: host\n"
                            "    size: %uMiB\n"
                            "    partitions:\n"
                            "      - {name: bench, limit: %uMiB, growth: on-demand, share: fd}\n"
                            "tenants:\n"
                            "  - name: bench\n"
                            "    match: {uid: [%u]}\n"
                            "    quotas: [{partition: bench, limit: %uMiB}]\n",
                            limit_mib, limit_mib, (unsigned)geteuid(), limit_mib);
}

/* ---- clients --------------------------------------------------------------- */

/* Only its parent sees that. */
static bool daemon_has_ended(void)
{
        siginfo_t end = { .si_pid = 0 };

        return started > 0 && waitid(P_PID, (id_t)started, &end, WEXITED | WNOHANG | WNOWAIT) == 0 &&
               end.si_pid == started;
}

bfc_client *client_start(const char *path, const char *name, uint64_t flags)
{
        struct bfc_options o = {
                .struct_size = sizeof(o), .socket = path, .name = name, .flags = flags, .return_ms = 600000
        };
        bfc_client *client = NULL;
        int r = -ENOENT;

        for (int i = 0; i < 60000; i++) {
                r = bfc_connect(&o, &client);
                /* -EACCES: the mode of the socket is set after its birth. */
                if ((r != -ENOENT && r != -ECONNREFUSED && r != -EACCES) || daemon_has_ended())
                        break;
                usleep(10000);
        }
        if (r < 0)
                die("bfc_connect", bfc_last_error());
        return client;
}

void *bench_malloc(bfc_client *client, size_t n_bytes)
{
        void *p = NULL;

        if (bfc_malloc(client, n_bytes, &p) < 0)
                die("bfc_malloc", bfc_last_error());
        return p;
}

void bench_free(bfc_client *client, void *p)
{
        if (bfc_free(client, p) < 0)
                die("bfc_free", bfc_last_error());
}

struct bfc_tenant_usage bench_usage(bfc_client *client)
{
        struct bfc_tenant_usage u = { .struct_size = sizeof(u) };

        if (bfc_usage(client, NULL, &u) < 0)
                die("bfc_usage", bfc_last_error());
        return u;
}

struct bfc_client_stats bench_stats(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        if (bfc_stats(client, &s) < 0)
                die("bfc_stats", bfc_last_error());
        return s;
}
