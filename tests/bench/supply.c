/* See supply.h. All sessions speak the protocol by hand: what is measured is how long the daemon takes to answer a
 * Malloc, not how long a client maps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/supply.h"

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/admin.h"

#define VICTIM_MIB 64
#define MAX_ROUNDS 1000

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

static _Atomic int *step; /* of the neighbour */
static struct raw *admin;

/* Milliseconds from a Malloc to its grant; the session ends at once. */
static double ask(void)
{
        struct raw *raw = session_open(socket_path, "victim");
        uint64_t begin = now_ns();
        double ms;
        Bfcd__Block block;

        if (raw_malloc(raw, 0, VICTIM_MIB * MIB, &block) < 0)
                die("the victim's malloc", raw_refusal());
        ms = ms_since(begin);
        if (raw_goodbye(raw) < 0)
                die("goodbye", raw_refusal());
        raw_close(raw);
        return ms;
}

static void wait_for(int at_least)
{
        while (atomic_load(step) < at_least)
                (void)poll(NULL, 0, 1);
}

struct neighbour {
        bool grows;
        uint64_t n_bytes;
};

static void neighbour(void *arg)
{
        const struct neighbour *n = arg;
        struct raw *raw = session_open(socket_path, "big");
        Bfcd__Block block;

        for (int i = 0; i < 2; i++) {
                if (n->grows == (i == 0)) {
                        atomic_store(step, STEP_READY);
                        wait_for(STEP_GO);
                }
                if (i == 0 && raw_malloc(raw, 0, n->n_bytes, &block) < 0)
                        die("the neighbour's malloc", raw_refusal());
                if (i == 0 && n->grows)
                        atomic_store(step, STEP_DONE);
        }
        raw_close(raw); /* the end of the job releases all at once */
}

/* One round: whether the neighbour was still busy at the end. */
static bool round_of(const struct supply *o, bool grows, double *ret_ms)
{
        struct neighbour n = { grows, (uint64_t)o->n_mib * MIB };
        struct admin_status s = { .n_sessions = 1 };
        pid_t pid;

        admin_wait_quiet(admin, 0);
        atomic_store(step, STEP_START);
        pid = process_start(neighbour, &n);
        wait_for(STEP_READY);
        atomic_store(step, STEP_GO);
        while (s.bytes_pending == 0 && s.n_sessions > 0 && atomic_load(step) != STEP_DONE)
                s = admin_status(admin);
        *ret_ms = ask();
        s = admin_status(admin);
        (void)waitpid(pid, NULL, 0);
        return s.bytes_pending > VICTIM_MIB * MIB;
}

static double evaluate(const struct supply *o, const char *key, struct result *r, double alone_ms,
                       json_t *list)
{
        double median = quantile(r->ms, r->n, 50);

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
                admin_wait_quiet(admin, 0);
                alone.ms[alone.n++] = ask();
                beside.n_busy += round_of(o, strcmp(key, "grow") == 0, &beside.ms[beside.n]);
                beside.n++;
        }
        return evaluate(o, key, &beside, quantile(alone.ms, alone.n, 50), list);
}

/* The victim's limit, of which its extents follow, is a quarter of the neighbour's. */
static pid_t start(const struct supply *o)
{
        unsigned uid = (unsigned)geteuid();
        long victim_mib = o->n_mib / 4 > 2 * VICTIM_MIB ? o->n_mib / 4 : 2 * VICTIM_MIB;
        char size[64];
        pid_t pid;

        snprintf(size, sizeof(size), "    size: %ldMiB\n", o->n_mib + 4 * VICTIM_MIB);
        pid = daemon_start(o->bfcd, -1, config_text, o->is_cuda ? "cuda:0" : "host", o->is_cuda ? "" : size,
                           o->n_mib + 4 * VICTIM_MIB, uid, victim_mib, uid, o->n_mib);
        bfc_disconnect(client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD));
        return pid;
}

double supply_measure(const struct supply *o, const char *only, json_t *list)
{
        static const char *const keys[] = { "grow", "release" };
        pid_t pid = start(o);
        double worst = 0;

        step = shared_memory(sizeof(*step));
        admin = session_open(admin_path, NULL);
        for (size_t i = 0; i < 2; i++) {
                double ms = !only || strcmp(only, keys[i]) == 0 ? measure(o, keys[i], list) : 0;

                worst = ms > worst ? ms : worst;
        }
        raw_close(admin);
        process_stop(pid, SIGTERM);
        return worst;
}
