/* A trace through the client's cache: what the cache holds for what is allocated, and how often it asks the daemon;
 * see client_trace.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Held is counted twice: in blocks of the daemon's, which is what the cache answers for, and in
 * extents that are charged, where what the extents' size costs is added. Both are peaks,
 * over what lives at its peak with each block rounded up. A request is a bfc_malloc() or a
 * bfc_free(). */
#include "tests/bench/client_trace.h"

#include <bfcclient.h>

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/daemon.h"
#include "tests/bench/script.h"

#define MAX_REPEATS 64u

struct result {
        uint64_t live;     /* peaks, in bytes */
        uint64_t held;     /* blocks of the daemon's */
        uint64_t extents;  /* charged */
        uint64_t requests; /* in a repetition */
        unsigned n_repeats;
        uint64_t calls[MAX_REPEATS];
};

static void live(bfc_client *client, const struct script *script, void **blocks)
{
        for (size_t i = 0; i < script->n_steps; i++) {
                const struct step *step = &script->steps[i];
                int r = step->n_bytes > 0 ? bfc_malloc(client, step->n_bytes, &blocks[step->slot])
                                          : bfc_free(client, blocks[step->slot]);

                if (r < 0)
                        die("the trace", bfc_last_error());
        }
}

static struct result measure(const struct script *script, unsigned n_repeats)
{
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = socket_path,
                                 .name = "bench-client",
                                 .cache_idle_bytes = UINT64_MAX };
        struct result ret = { .requests = script->n_steps, .n_repeats = n_repeats };
        void **blocks = calloc(script->n_slots, sizeof(*blocks));
        bfc_client *client = NULL;
        struct bfc_client_stats s;

        bfc_disconnect(client_start(socket_path, "bench-client", 0)); /* waits for the daemon */
        if (!blocks || bfc_connect(&o, &client) < 0)
                die("bfc_connect", bfc_last_error());
        for (unsigned i = 0; i < n_repeats; i++) {
                uint64_t n_calls = bench_stats(client).num_calls;

                live(client, script, blocks);
                ret.calls[i] = bench_stats(client).num_calls - n_calls;
        }
        s = bench_stats(client);
        ret.live = s.peak_bytes_in_use;
        ret.held = s.peak_bytes_reserved;
        ret.extents = bench_usage(client).peak_bytes_reserved;
        bfc_disconnect(client);
        free(blocks);
        return ret;
}

static double over_live(const struct result *r, uint64_t n_bytes)
{
        return r->live > 0 ? (double)n_bytes / (double)r->live : 0;
}

static json_t *to_json(const char *path, const struct result *r)
{
        json_t *calls = json_array();

        for (unsigned i = 0; i < r->n_repeats; i++)
                json_array_append_new(calls, json_integer((json_int_t)r->calls[i]));
        return json_pack("{s:i, s:s, s:I, s:I, s:I, s:f, s:f, s:I, s:o}", "schema", 1, "trace", path,
                         "peak_live_bytes", (json_int_t)r->live, "peak_held_bytes", (json_int_t)r->held,
                         "peak_extent_bytes", (json_int_t)r->extents, "held_over_live", over_live(r, r->held),
                         "extents_over_live", over_live(r, r->extents), "requests", (json_int_t)r->requests,
                         "calls", calls);
}

static void print_text(const char *path, const struct result *r)
{
        printf("%s: %llu requests, %.0f MiB live at most\n", path, (unsigned long long)r->requests,
               (double)r->live / (1 << 20));
        printf("  held over live, peaks     %7.3f in blocks, %.3f in extents\n", over_live(r, r->held),
               over_live(r, r->extents));
        printf("  calls to the daemon      ");
        for (unsigned i = 0; i < r->n_repeats; i++)
                printf(" %llu (%.2f %%)", (unsigned long long)r->calls[i],
                       100 * (double)r->calls[i] / (double)r->requests);
        printf(", one repetition after the other\n");
}

void client_trace(const char *bfcd, const char *path, unsigned n_repeats, unsigned limit_mib, bool json)
{
        struct script script = { .n_slots = 0 };
        struct result r;
        pid_t pid;

        if (script_read_trace(&script, path) < 0)
                exit(EXIT_FAILURE);
        if (limit_mib == 0)
                limit_mib = 2 * (unsigned)(script.peak_live_bytes >> 20) + 4;
        pid = daemon_start_simple(bfcd, limit_mib, -1);
        r = measure(&script, n_repeats < MAX_REPEATS ? n_repeats : MAX_REPEATS);
        process_stop(pid, SIGTERM);
        if (json)
                print_json(to_json(path, &r));
        else
                print_text(path, &r);
        script_done(&script);
}
