/* bench-park: how fast a block is parked and woken, beside memcpy() of as many bytes, and what a neighbour's
 * requests wait meanwhile.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * "warm": memcpy() between two buffers that were touched. "fresh": memcpy() into a new anonymous mapping of huge pages,
 * as the first copy and a block that wakes need new memory, too. With --standby there is time before a wake to make
 * standby memory of what was parked. The ways take turns, so that all meet the same machine. The neighbour is a process
 * of another tenant that allocates and frees all the time. */
#include <bfcclient.h>

#include <jansson.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define HUGE_BYTES  (2 * MIB)
#define MAX_ROUNDS  100
#define MAX_SAMPLES (UINT64_C(1) << 22)
#define QUIET_MS    300
#define STANDBY_MS  3000

enum way { WARM, FRESH, PARK, WAKE, N_WAYS };
static const char *const way_names[N_WAYS] = { "memcpy_warm", "memcpy_fresh", "park", "wake" };

/* What the neighbour does with the times of its requests. */
enum phase { PHASE_NONE, PHASE_QUIET, PHASE_COPIES, N_PHASES, PHASE_END };

struct shared {
        _Atomic int phase;
        struct {
                uint32_t median, p99, max;
                size_t n;
        } requests[N_PHASES];
};

static struct {
        const char *bfcd, *cuda;
        long n_mib, n_rounds, standby_mib;
        double min_ratio, max_p99_ratio;
        bool json;
} o = { .n_mib = 2048, .n_rounds = 5 };
static struct shared *shared;

/* ---- the neighbour --------------------------------------------------------------- */

static void neighbour(void *unused)
{
        struct samples samples[N_PHASES];
        bfc_client *client;
        int phase;

        (void)unused;
        setenv("BFC_TENANT", "neighbour", 1);
        client = client_start(socket_path, "neighbour", BFC_NO_CACHE);
        for (int i = 0; i < N_PHASES; i++)
                samples_new(&samples[i], MAX_SAMPLES);
        while ((phase = atomic_load(&shared->phase)) != PHASE_END) {
                uint64_t begin = now_ns(), middle;
                void *p = bench_malloc(client, 65536);

                middle = now_ns();
                bench_free(client, p);
                samples_add(&samples[phase], middle - begin);
                samples_add(&samples[phase], now_ns() - middle);
        }
        for (int i = PHASE_QUIET; i < N_PHASES; i++) {
                samples_evaluate(&samples[i]);
                shared->requests[i].median = samples[i].median;
                shared->requests[i].p99 = samples[i].p99;
                shared->requests[i].max = samples[i].max;
                shared->requests[i].n = samples[i].n;
        }
        bfc_disconnect(client);
}

/* ---- the ways -------------------------------------------------------------------- */

static char *map_huge(size_t n_bytes, char **ret_room)
{
        char *room = need(
                mmap(NULL, n_bytes + HUGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        char *at = room + -(uintptr_t)room % HUGE_BYTES;

        (void)madvise(at, n_bytes, MADV_HUGEPAGE);
        *ret_room = room;
        return at;
}

static double ms_of_memcpy(enum way way, char *to, const char *from, size_t n_bytes)
{
        char *room = NULL;
        uint64_t began = now_ns();
        double ms;

        if (way == FRESH)
                to = map_huge(n_bytes, &room);
        memcpy(to, from, n_bytes);
        ms = ms_since(began);
        if (room)
                munmap(room, n_bytes + HUGE_BYTES);
        return ms;
}

static double ms_of_call(bfc_client *client, enum way way, void *block)
{
        uint64_t began = now_ns();
        double ms;
        int r;

        atomic_store(&shared->phase, PHASE_COPIES);
        r = way == PARK ? bfc_park(client, block, BFC_BACKUP, "parking") : bfc_wake(client, block, 60000);
        ms = ms_since(began);
        atomic_store(&shared->phase, PHASE_NONE);
        if (r < 0)
                die(way_names[way], bfc_last_error());
        return ms;
}

static void measure(bfc_client *client, double ms[N_WAYS][MAX_ROUNDS])
{
        size_t n_bytes = (size_t)o.n_mib * MIB;
        char *rooms[2], *from = map_huge(n_bytes, &rooms[0]), *to = map_huge(n_bytes, &rooms[1]);
        void *block;

        memset(from, 1, n_bytes);
        memset(to, 2, n_bytes);
        if (bfc_malloc_flags(client, "bench", n_bytes, BFC_PARKABLE, &block) < 0)
                die("bfc_malloc_flags", bfc_last_error());
        for (long i = 0; i < o.n_rounds; i++) {
                from[i] = 3;
                if (bfc_write(client, block, from, n_bytes) < 0)
                        die("bfc_write", bfc_last_error());
                ms[WARM][i] = ms_of_memcpy(WARM, to, from, n_bytes);
                ms[FRESH][i] = ms_of_memcpy(FRESH, NULL, from, n_bytes);
                atomic_store(&shared->phase, PHASE_QUIET);
                usleep(QUIET_MS * 1000);
                atomic_store(&shared->phase, PHASE_NONE);
                usleep(o.standby_mib > 0 ? STANDBY_MS * 1000 : 0); /* it is full again */
                ms[PARK][i] = ms_of_call(client, PARK, block);
                usleep(o.standby_mib > 0 ? STANDBY_MS * 1000
                                         : QUIET_MS * 100); /* the memory of before is released */
                ms[WAKE][i] = ms_of_call(client, WAKE, block);
                if (bfc_read(client, to, block, n_bytes) < 0 || memcmp(to, from, n_bytes) != 0)
                        die("bfc_wake", "the contents have changed");
        }
        bench_free(client, block);
        munmap(rooms[0], n_bytes + HUGE_BYTES);
        munmap(rooms[1], n_bytes + HUGE_BYTES);
}

/* ---- the rest -------------------------------------------------------------------- */

static pid_t start(void)
{
        unsigned uid = (unsigned)geteuid();
        char standby[64] = "", gpu[200] = "";

        if (o.standby_mib > 0)
                snprintf(standby, sizeof(standby), "    standby: %ldMiB\n", o.standby_mib);
        if (o.cuda)
                snprintf(gpu, sizeof(gpu),
                         "  - id: %s\n    partitions:\n      - {name: bench, limit: %ldMiB, share: fd}\n",
                         o.cuda, o.n_mib + 64);
        return daemon_start(
                o.bfcd, -1,
                "devices:\n"
                "%s"
                "  - id: host\n    size: %ldMiB\n%s    partitions:\n"
                "      - {name: %s, limit: %ldMiB}\n"
                "      - {name: parking, limit: %ldMiB}\n"
                "      - {name: beside, limit: 64MiB}\n"
                "tenants:\n"
                "  - name: bench\n    match: {uid: [%u]}\n"
                "    quotas: [{partition: bench, limit: %ldMiB}, {partition: parking, limit: %ldMiB}]\n"
                "  - name: neighbour\n    match: {uid: [%u]}\n"
                "    quotas: [{partition: beside, limit: 64MiB}]\n",
                gpu, 2 * o.n_mib + 256 + o.standby_mib, standby, o.cuda ? "unused" : "bench",
                o.cuda ? 2 : o.n_mib + 64, o.n_mib + 64, uid, o.n_mib + 64, o.n_mib + 64, uid);
}

static bool report(double ms[N_WAYS][MAX_ROUNDS])
{
        double medians[N_WAYS], p99_ratio;
        json_t *root = json_object();
        bool is_good = true;

        for (enum way i = 0; i < N_WAYS; i++)
                medians[i] = quantile(ms[i], (size_t)o.n_rounds, 50);
        for (enum way i = 0; i < N_WAYS; i++) {
                is_good = is_good && (i < PARK || medians[WARM] / medians[i] >= o.min_ratio);
                json_object_set_new(root, way_names[i],
                                    json_pack("{s:f,s:f,s:f,s:f}", "ms", medians[i], "gib_per_s",
                                              (double)o.n_mib / 1024 / (medians[i] / 1000), "of_warm",
                                              medians[WARM] / medians[i], "of_fresh",
                                              medians[FRESH] / medians[i]));
                if (!o.json)
                        printf("%-13s %8.1f ms, %6.2f GiB/s, %.2f of memcpy warm, %.2f of memcpy fresh\n",
                               way_names[i], medians[i], (double)o.n_mib / 1024 / (medians[i] / 1000),
                               medians[WARM] / medians[i], medians[FRESH] / medians[i]);
        }
        p99_ratio = (double)shared->requests[PHASE_COPIES].p99 /
                    (shared->requests[PHASE_QUIET].p99 ? shared->requests[PHASE_QUIET].p99 : 1);
        for (int i = PHASE_QUIET; i < N_PHASES; i++) {
                const char *name = i == PHASE_QUIET ? "neighbour_quiet" : "neighbour_meanwhile";

                json_object_set_new(root, name,
                                    json_pack("{s:I,s:I,s:I,s:I}", "median_ns",
                                              (json_int_t)shared->requests[i].median, "p99_ns",
                                              (json_int_t)shared->requests[i].p99, "max_ns",
                                              (json_int_t)shared->requests[i].max, "num_requests",
                                              (json_int_t)shared->requests[i].n));
                if (!o.json)
                        printf("%-19s median %7.1f us, p99 %7.1f us, max %9.1f us, %zu requests\n", name,
                               shared->requests[i].median / 1e3, shared->requests[i].p99 / 1e3,
                               shared->requests[i].max / 1e3, shared->requests[i].n);
        }
        json_object_set_new(root, "p99_ratio", json_real(p99_ratio));
        if (o.json)
                print_json(json_incref(root));
        else
                printf("p99 ratio %.2f\n", p99_ratio);
        json_decref(root);
        return is_good && (o.max_p99_ratio <= 0 || p99_ratio <= o.max_p99_ratio);
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "cuda", .text = &o.cuda, .unit = "ID", .help = "a block of this GPU, as in the config" },
                { "mib", .count = &o.n_mib, .min = 2, .max = 1 << 20, .unit = "N",
                  .help = "size of the block" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = MAX_ROUNDS, .unit = "N",
                  .help = "runs of each way" },
                { "standby", .count = &o.standby_mib, .min = 1, .max = 1 << 20, .unit = "MIB",
                  .help = "standby memory" },
                { "min-ratio", .number = &o.min_ratio, .unit = "F",
                  .help = "least bandwidth of park and wake over memcpy()'s" },
                { "max-p99-ratio", .number = &o.max_p99_ratio, .unit = "F",
                  .help = "limit of the neighbour's p99 meanwhile over before" },
                { 0 },
        };

        options_parse(
                argc, argv,
                "Times bfc_park() and bfc_wake() beside memcpy(), and a neighbour's requests meanwhile.\n"
                "Ends with 1 if a median is beyond its limit.",
                options);
        options_require(o.bfcd, "--bfcd is missing");
        o.n_mib -= o.n_mib % 2;
        o.standby_mib -= o.standby_mib % 2;
}

int main(int argc, char **argv)
{
        static double ms[N_WAYS][MAX_ROUNDS];
        pid_t daemon_pid, neighbour_pid;
        bfc_client *client;
        bool is_good;

        parse(argc, argv);
        make_folder("bench-park");
        shared = shared_memory(sizeof(*shared));
        daemon_pid = start();
        setenv("BFC_TENANT", "bench", 1);
        neighbour_pid = process_start(neighbour, NULL);
        client = client_start(socket_path, "bench", BFC_NO_CACHE);
        measure(client, ms);
        bfc_disconnect(client);
        atomic_store(&shared->phase, PHASE_END);
        process_stop(neighbour_pid, 0);
        process_stop(daemon_pid, SIGTERM);
        is_good = report(ms);
        return is_good ? EXIT_SUCCESS : EXIT_FAILURE;
}
