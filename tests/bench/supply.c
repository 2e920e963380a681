/* See supply.h. All sessions speak the protocol by hand: what is measured is how long the daemon takes to answer a
 * Malloc, not how long a client maps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/supply.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/integration/raw.h"

#define MIB        (UINT64_C(1) << 20)
#define VICTIM_MIB 64
#define MAX_ROUNDS 1000
#define SETTLE_MS  120000

static const char config_text[] =
        "timeouts: {quarantine: 1s}\n"
        "devices:\n"
        "  - id: %s\n"
        "%s"
        "    partitions:\n"
        "      - {name: bench, limit: %ldMiB, growth: on-demand, share: fd}\n"
        "tenants:\n"
        "  - {name: victim, match: {uid: %u}, quotas: [{partition: bench, limit: %ldMiB}]}\n"
        "  - {name: big, match: {uid: %u}, quotas: [{partition: bench, limit: %ldMiB}]}\n";

enum step { STEP_START, STEP_READY, STEP_GO, STEP_DONE };

struct result {
        double ms[MAX_ROUNDS];
        size_t n;
        size_t n_busy; /* the neighbour was not done when the victim had its memory */
};

static char socket_path[128];
static _Atomic int *step; /* of the neighbour */
static struct raw *admin;

static struct raw *come_in(const char *tenant)
{
        struct raw *raw = raw_connect(socket_path, tenant);

        if (!raw)
                die(tenant, "no session");
        return raw;
}

static void go_away(struct raw *raw)
{
        if (raw_goodbye(raw) < 0)
                die("goodbye", raw_refusal());
        raw_close(raw);
}

static uint64_t pending_bytes(uint64_t *ret_sessions)
{
        Bfcd__Reply *reply;
        uint64_t n_bytes = 0;

        if (raw_list(admin, BFCD__LIST__KIND__STATUS, 0, &reply) < 0)
                die("status", raw_refusal());
        *ret_sessions = reply->list->status->num_sessions;
        for (size_t i = 0; i < reply->list->status->n_devices; i++)
                n_bytes += reply->list->status->devices[i]->bytes_pending;
        bfcd__reply__free_unpacked(reply, NULL);
        return n_bytes;
}

static void settle(void)
{
        uint64_t n_sessions;

        for (int i = 0; i < SETTLE_MS; i++) {
                if (pending_bytes(&n_sessions) == 0 && n_sessions == 0)
                        return;
                (void)poll(NULL, 0, 1);
        }
        die("neighbour", "the daemon is not done with the last one");
}

/* Milliseconds from a Malloc to its grant; the session ends at once. */
static double ask(void)
{
        struct raw *raw = come_in("victim");
        uint64_t begin = now_ns(), n_ns;
        Bfcd__Block block;

        if (raw_malloc(raw, 0, VICTIM_MIB * MIB, &block) < 0)
                die("the victim's malloc", raw_refusal());
        n_ns = now_ns() - begin;
        go_away(raw);
        return (double)n_ns / 1e6;
}

static void wait_for(int at_least)
{
        while (atomic_load(step) < at_least)
                (void)poll(NULL, 0, 1);
}

static void neighbour(bool grows, uint64_t n_bytes)
{
        struct raw *raw = come_in("big");
        Bfcd__Block block;

        for (int i = 0; i < 2; i++) {
                if (grows == (i == 0)) {
                        atomic_store(step, STEP_READY);
                        wait_for(STEP_GO);
                }
                if (i == 0 && raw_malloc(raw, 0, n_bytes, &block) < 0)
                        die("the neighbour's malloc", raw_refusal());
                if (i == 0 && grows)
                        atomic_store(step, STEP_DONE);
        }
        raw_close(raw); /* and its end: all at once, as a job's */
}

/* One round: whether the neighbour was still busy at the end. */
static bool round_of(const struct supply *o, bool grows, double *ret_ms)
{
        uint64_t n_bytes = (uint64_t)o->n_mib * MIB, n_sessions = 1, n_pending = 0;
        pid_t parent = getpid(), pid;

        settle();
        atomic_store(step, STEP_START);
        pid = fork();
        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() == parent)
                        neighbour(grows, n_bytes);
                _exit(0);
        }
        wait_for(STEP_READY);
        atomic_store(step, STEP_GO);
        while (n_pending == 0 && n_sessions > 0 && atomic_load(step) != STEP_DONE)
                n_pending = pending_bytes(&n_sessions);
        *ret_ms = ask();
        n_pending = pending_bytes(&n_sessions);
        (void)waitpid(pid, NULL, 0);
        return n_pending > VICTIM_MIB * MIB;
}

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return x < y ? -1 : x > y;
}

static double evaluate(const struct supply *o, const char *key, struct result *r, double alone_ms,
                       json_t *list)
{
        double median;

        qsort(r->ms, r->n, sizeof(r->ms[0]), compare);
        median = r->ms[r->n / 2];
        if (o->is_json)
                json_array_append_new(list, json_pack("{s:s, s:i, s:f, s:f, s:f, s:i, s:i}", "neighbour", key,
                                                      "neighbour_mib", (int)o->n_mib, "alone_ms", alone_ms,
                                                      "median_ms", median, "max_ms", r->ms[r->n - 1],
                                                      "rounds", (int)r->n, "rounds_busy", (int)r->n_busy));
        else
                printf("%s of %ld MiB: 64 MiB of another tenant in %.1f ms (median; max %.1f; alone %.1f); "
                       "busy to the end in %zu of %zu rounds\n",
                       key, o->n_mib, median, r->ms[r->n - 1], alone_ms, r->n_busy, r->n);
        return median;
}

static double measure(const struct supply *o, const char *key, json_t *list)
{
        struct result alone = { .n = 0 }, beside = { .n = 0 };

        for (long i = 0; i < o->n_rounds && i < MAX_ROUNDS; i++) {
                settle();
                alone.ms[alone.n++] = ask();
                beside.n_busy += round_of(o, strcmp(key, "grow") == 0, &beside.ms[beside.n]);
                beside.n++;
        }
        qsort(alone.ms, alone.n, sizeof(alone.ms[0]), compare);
        return evaluate(o, key, &beside, alone.ms[alone.n / 2], list);
}

/* The victim's limit, of which its extents follow, is a quarter of the neighbour's. */
static pid_t start(const struct supply *o)
{
        unsigned uid = (unsigned)geteuid();
        long victim_mib = o->n_mib / 4 > 2 * VICTIM_MIB ? o->n_mib / 4 : 2 * VICTIM_MIB;
        char text[1024], size[64];
        pid_t pid;

        snprintf(socket_path, sizeof(socket_path), "%s/bfcd.sock", folder);
        snprintf(size, sizeof(size), "    size: %ldMiB\n", o->n_mib + 4 * VICTIM_MIB);
        snprintf(text, sizeof(text), config_text, o->is_cuda ? "cuda:0" : "host", o->is_cuda ? "" : size,
                 o->n_mib + 4 * VICTIM_MIB, uid, victim_mib, uid, o->n_mib);
        pid = daemon_start_with(o->bfcd, text, -1);
        bfc_disconnect(client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD));
        return pid;
}

double supply_measure(const struct supply *o, const char *only, json_t *list)
{
        static const char *const keys[] = { "grow", "release" };
        pid_t pid = start(o);
        char path[160];
        double worst = 0;

        snprintf(path, sizeof(path), "%s/admin.sock", folder);
        step = mmap(NULL, sizeof(*step), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (step == MAP_FAILED)
                die("memory", strerror(errno));
        admin = raw_connect(path, NULL);
        if (!admin)
                die(path, "no session there");
        for (size_t i = 0; i < 2; i++) {
                double ms = !only || strcmp(only, keys[i]) == 0 ? measure(o, keys[i], list) : 0;

                worst = ms > worst ? ms : worst;
        }
        raw_close(admin);
        kill(pid, SIGTERM);
        waitpid(pid, NULL, 0);
        return worst;
}
