/* bench-attacks: what a victim feels beside each attack of tests/attacks.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * For each attack a new daemon is started. A victim allocates and frees a small
 * block again and again; a grower connects, allocates memory that the device has
 * to make, and disconnects. Both note their longest call while the attack runs.
 * Then the daemon gets SIGTERM beside the attack, and a successor is started: how
 * long the end and the first answer of the successor take is noted too. */
#include <bfcclient.h>

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/attacks/attack.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define BLOCK_BYTES 4000u
#define GROWTH_MIB  16u
#define UP_MS       10000
#define UNIT_NICE   (-10) /* Nice= of the unit; only root may set it */
#define END_MS      60000

static struct {
        const char *bfcd;
        const char *only;
        double max_ms; /* 0: no limit */
        long ms;
} o = { .ms = 3000 };

struct stats {
        uint64_t request_ns, growth_ns, stop_ns, start_ns; /* the longest; 0: none */
        uint64_t n_requests, n_growths, n_acts;
        unsigned n_refused;
        long resident_kib; /* of the daemon, at most */
        long slab_kib;     /* of the kernel, more than before and after the attack's end */
};

struct grower {
        const struct attack_stage *stage;
        struct stats *f;
        _Atomic bool stop;
};

static void longest(uint64_t *max, uint64_t begin)
{
        uint64_t ns = now_ns() - begin;

        if (ns > *max)
                *max = ns;
}

/* A number of KiB behind a key in a file of /proc; 0 where there is none. */
static long kib_of(const char *path, const char *key)
{
        char line[256];
        long kib = 0;
        FILE *f = fopen(path, "re");

        while (f && kib == 0 && fgets(line, sizeof(line), f))
                if (strncmp(line, key, strlen(key)) == 0)
                        kib = atol(line + strlen(key));
        if (f)
                fclose(f);
        return kib;
}

/* ---- the grower -------------------------------------------------------------- */

static void grow_once(struct grower *g)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = g->stage->socket,
                                       .tenant = "grower",
                                       .flags = BFC_NO_CACHE | BFC_NO_THREAD };
        uint64_t begin = now_ns();
        bfc_client *client;
        void *p;

        if (bfc_connect(&options, &client) < 0) {
                fprintf(stderr, "grower: %s\n", bfc_last_error());
                g->f->n_refused++;
                return;
        }
        longest(&g->f->growth_ns, begin);
        for (unsigned i = 0; i < GROWTH_MIB / 4; i++) {
                begin = now_ns();
                if (bfc_malloc(client, 4u << 20, &p) < 0) {
                        fprintf(stderr, "grower: %s\n", bfc_last_error());
                        g->f->n_refused++;
                } else {
                        longest(&g->f->growth_ns, begin);
                        g->f->n_growths++;
                }
        }
        bfc_disconnect(client);
}

static void *grow(void *arg)
{
        struct grower *g = arg;

        while (!atomic_load(&g->stop)) {
                grow_once(g);
                usleep(20000);
        }
        return NULL;
}

/* ---- one attack -------------------------------------------------------------- */

static void work(bfc_client *victim, struct stats *f)
{
        uint64_t until = now_ns() + (uint64_t)o.ms * 1000000;

        while (now_ns() < until) {
                uint64_t begin = now_ns();
                void *p;

                p = bench_malloc(victim, BLOCK_BYTES);
                longest(&f->request_ns, begin);
                begin = now_ns();
                bench_free(victim, p);
                longest(&f->request_ns, begin);
                f->n_requests += 2;
                usleep(200);
        }
}

/* As the unit does: before it has threads. */
static pid_t start_daemon(const char *config)
{
        pid_t pid = daemon_start(o.bfcd, -1, "%s", config);

        (void)setpriority(PRIO_PROCESS, (id_t)pid, UNIT_NICE);
        return pid;
}

static void measure_service(struct attack_stage *stage, bfc_client *victim, struct stats *f)
{
        struct grower g = { .stage = stage, .f = f };
        pthread_t thread;

        if (pthread_create(&thread, NULL, grow, &g) != 0)
                die("pthread_create", strerror(errno));
        work(victim, f);
        atomic_store(&g.stop, true);
        pthread_join(thread, NULL);
}

static void terminate(pid_t pid, struct stats *f)
{
        uint64_t begin = now_ns();

        kill(pid, SIGTERM);
        while (waitpid(pid, NULL, WNOHANG) == 0) {
                if (now_ns() - begin > END_MS * UINT64_C(1000000))
                        die("the daemon", "does not end after SIGTERM");
                usleep(200);
        }
        longest(&f->stop_ns, begin);
}

/* A successor beside the attack: from its start to its first block. */
static void restart(struct attack_stage *stage, const char *config, struct stats *f)
{
        uint64_t begin = now_ns();
        bfc_client *client;

        stage->daemon = start_daemon(config);
        client = client_start(stage->socket, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        (void)bench_malloc(client, BLOCK_BYTES);
        longest(&f->start_ns, begin);
        bfc_disconnect(client);
}

static void measure(const struct attack *attack, struct stats *f)
{
        char *config = need(attack_config(attack));
        char proc[64];
        struct attack_stage *stage;
        struct attack_run run;
        bfc_client *victim;
        long slab = kib_of("/proc/meminfo", "Slab:");

        if (!(stage = attack_stage_new(socket_path, start_daemon(config))))
                die("memory", strerror(errno));
        victim = client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        (void)bench_malloc(victim, BLOCK_BYTES); /* keeps the victim's memory backed */
        if (attack_start(attack, stage, &run) < 0)
                die(attack->key, "cannot be started");
        for (int i = 0; i < UP_MS && atomic_load(&stage->n_up) < attack_n_processes(attack); i++)
                usleep(1000);
        measure_service(stage, victim, f);
        snprintf(proc, sizeof(proc), "/proc/%d/status", (int)stage->daemon);
        f->resident_kib = kib_of(proc, "VmHWM:");
        f->n_acts = atomic_load(&stage->n_acts);
        terminate(stage->daemon, f);
        bfc_disconnect(victim);
        restart(stage, config, f);
        attack_stop(&run);
        process_stop(stage->daemon, SIGTERM);
        free(config);
        f->slab_kib = kib_of("/proc/meminfo", "Slab:") - slab;
}

/* ---- the program --------------------------------------------------------------- */

static void print_row(const struct attack *attack, const struct stats *f)
{
        printf("%-16s %8.1f %8.1f %8.1f %8.1f %9llu %8llu %10llu %8ld %8ld  %u\n", attack->key,
               (double)f->request_ns / 1e6, (double)f->growth_ns / 1e6, (double)f->stop_ns / 1e6,
               (double)f->start_ns / 1e6, (unsigned long long)f->n_requests, (unsigned long long)f->n_growths,
               (unsigned long long)f->n_acts, f->resident_kib / 1024, f->slab_kib / 1024, f->n_refused);
        fflush(stdout);
}

int main(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                { "only", .text = &o.only, .unit = "ATTACK", .help = "run this attack alone" },
                { "ms", .count = &o.ms, .min = 1, .max = 1000000, .unit = "N",
                  .help = "duration of each attack" },
                { "max-ms", .number = &o.max_ms, .unit = "MS", .help = "limit of a request or a growth" },
                { 0 },
        };
        double worst = 0;
        unsigned n_refused = 0, n_run = 0;

        options_parse(argc, argv,
                      "Measures beside each attack: the victim's longest request, growth of another tenant,\n"
                      "SIGTERM to the daemon's end, start of a successor to its first block; milliseconds.\n"
                      "Ends with 1 if a request or a growth took longer than --max-ms, or was refused.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
        make_folder("bench-attacks");
        printf("%-16s %8s %8s %8s %8s %9s %8s %10s %8s %8s  %s\n", "attack", "request", "growth", "stop",
               "start", "requests", "growths", "acts", "MiB", "slab MiB", "refused");
        for (size_t i = 0; i < n_attacks; i++) {
                struct stats f = { 0 };
                uint64_t ns;

                if ((o.only && strcmp(o.only, attacks[i]->key) != 0) || !attack_may_run(attacks[i]))
                        continue;
                measure(attacks[i], &f);
                print_row(attacks[i], &f);
                ns = f.request_ns > f.growth_ns ? f.request_ns : f.growth_ns;
                worst = (double)ns / 1e6 > worst ? (double)ns / 1e6 : worst;
                n_refused += f.n_refused;
                n_run++;
        }
        if (n_run == 0)
                die(o.only, "there is no such attack");
        printf("longest wait of a request or a growth: %.1f ms; refused: %u\n", worst, n_refused);
        return n_refused > 0 || (o.max_ms > 0 && worst > o.max_ms) ? EXIT_FAILURE : EXIT_SUCCESS;
}
