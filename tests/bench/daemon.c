/* What benches of a running daemon share; see daemon.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/daemon.h"

#include <errno.h>
#include <ftw.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

char folder[64];
static char gpu_folder[64];
static const char *program_name = "bench";
static pid_t folder_owner; /* not a forked child */

_Noreturn void die(const char *what, const char *why)
{
        fprintf(stderr, "%s: %s: %s\n", program_name, what, why);
        exit(EXIT_FAILURE);
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
        if (!mkdtemp(folder))
                die(folder, strerror(errno));
        /* A pretended GPU of its own: other programs may have one at the same time. */
        snprintf(gpu_folder, sizeof(gpu_folder), "/dev/shm/%s-XXXXXX", program);
        if (!mkdtemp(gpu_folder))
                die(gpu_folder, strerror(errno));
        setenv("FAKE_CUDA_STATE", gpu_folder, 1);
        folder_owner = getpid();
        atexit(remove_folder);
}

uint64_t now_ns(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
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

static void write_config(const char *path, unsigned limit_mib)
{
        FILE *f = fopen(path, "we");

        if (!f)
                die(path, strerror(errno));
        fprintf(f,
                "socket: {path: %s/bfcd.sock, mode: \"0600\"}\n"
                "admin_socket: {path: %s/admin.sock, mode: \"0600\"}\n"
                "devices:\n"
                "  - id: host\n"
                "    size: %uMiB\n"
                "    partitions:\n"
                "      - {name: bench, limit: %uMiB, growth: on-demand, share: fd}\n"
                "tenants:\n"
                "  - name: bench\n"
                "    match: {uid: [%u]}\n"
                "    quotas:\n"
                "      - {partition: bench, limit: %uMiB}\n",
                folder, folder, limit_mib, limit_mib, (unsigned)geteuid(), limit_mib);
        fclose(f);
}

static pid_t daemon_run(const char *bfcd, const char *config, int core)
{
        pid_t pid = fork();

        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGTERM);
                pin(0, core);
                execl(bfcd, bfcd, "--config", config, "--log-level", "warning", (char *)NULL);
                die(bfcd, strerror(errno));
        }
        return pid;
}

pid_t daemon_start(const char *bfcd, unsigned limit_mib, int core)
{
        char config[128];

        snprintf(config, sizeof(config), "%s/bfcd.yaml", folder);
        write_config(config, limit_mib);
        return daemon_run(bfcd, config, core);
}

pid_t daemon_start_with(const char *bfcd, const char *rest, int core)
{
        char config[128];
        FILE *f;

        snprintf(config, sizeof(config), "%s/bfcd.yaml", folder);
        f = fopen(config, "we");
        if (!f)
                die(config, strerror(errno));
        fprintf(f,
                "socket: {path: %s/bfcd.sock, mode: \"0666\"}\n"
                "admin_socket: {path: %s/admin.sock, mode: \"0600\"}\n%s",
                folder, folder, rest);
        fclose(f);
        return daemon_run(bfcd, config, core);
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
                if (r != -ENOENT && r != -ECONNREFUSED)
                        break;
                usleep(10000);
        }
        if (r < 0)
                die("bfc_connect", bfc_last_error());
        return client;
}
