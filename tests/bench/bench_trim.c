/* bench-trim: how long a request takes for which another process has to give back what lies idle in
 * its cache, while that process sleeps, and while its only thread is busy.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No new memory is made: what comes back is what the request gets. So it is the way from the
 * request to the daemon, to the other client's thread, its frees, its answer, and back. */
#include <bfcclient.h>

#include <errno.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"

#define MIB         (UINT64_C(1) << 20)
#define LIMIT_MIB   64u
#define SLABS       32u
#define SLAB_BYTES  (2 * MIB - 4096)
#define ASKED_BYTES (16 * MIB)

enum { SLEEPING, BUSY, N_MODES };
static const char *const names[] = { "sleeping", "busy" };

static char path[128];

/* ---- the one that has ---------------------------------------------------- */

static void fill(bfc_client *client)
{
        void *p[SLABS];
        unsigned n = 0;

        while (n < SLABS && bfc_malloc(client, SLAB_BYTES, &p[n]) == 0)
                n++;
        while (n > 0)
                if (bfc_free(client, p[--n]) < 0)
                        die("bfc_free", bfc_last_error());
}

/* A byte: fill the cache again, and say so. No more bytes: the end. */
static void have(int in, int out, bool busy)
{
        struct pollfd p = { .fd = in, .events = POLLIN };
        bfc_client *client = client_start(path, "has", 0);
        char word;

        while (read(in, &word, 1) == 1) {
                fill(client);
                if (write(out, &word, 1) != 1)
                        break;
                while (busy && poll(&p, 1, 0) == 0)
                        for (volatile int i = 0; i < 100000; i++)
                                ;
        }
        bfc_disconnect(client);
        _exit(0);
}

/* ---- the one that needs --------------------------------------------------- */

static int compare(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

static void measure(bool busy, size_t n_runs, double *ret_ms)
{
        /* On a machine that is busy a time-out may pass; then the time is what counts. */
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = 10000 };
        int to[2], from[2];
        bfc_client *client;
        char word = 'x';
        pid_t pid;

        if (pipe(to) < 0 || pipe(from) < 0 || (pid = fork()) < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                close(to[1]);
                have(to[0], from[1], busy);
        }
        client = client_start(path, "needs", BFC_NO_CACHE);
        for (size_t i = 0; i < n_runs; i++) {
                uint64_t began;
                void *p;

                if (write(to[1], &word, 1) != 1 || read(from[0], &word, 1) != 1)
                        die("the other process", "it is gone");
                began = now_ns();
                if (bfc_malloc_with(client, ASKED_BYTES, &how, &p) < 0)
                        die("bfc_malloc", bfc_last_error());
                ret_ms[i] = (double)(now_ns() - began) / 1e6;
                if (bfc_free(client, p) < 0)
                        die("bfc_free", bfc_last_error());
        }
        bfc_disconnect(client);
        close(to[1]);
        waitpid(pid, NULL, 0);
        close(to[0]);
        close(from[0]);
        close(from[1]);
        qsort(ret_ms, n_runs, sizeof(*ret_ms), compare);
}

static long number(const char *word)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (end == word || *end || n < 1 || n > 100000)
                die(word, "not a number that makes sense here");
        return n;
}

int main(int argc, char **argv)
{
        long n_runs = 100, max_ms = 0;
        json_t *all = json_object();
        const char *bfcd = NULL;
        bool json = false, slow = false;
        pid_t daemon_pid;
        double *ms;

        for (int i = 1; i < argc; i++) {
                if (strcmp(argv[i], "--json") == 0)
                        json = true;
                else if (i + 1 < argc && strcmp(argv[i], "--bfcd") == 0)
                        bfcd = argv[++i];
                else if (i + 1 < argc && strcmp(argv[i], "--runs") == 0)
                        n_runs = number(argv[++i]);
                else if (i + 1 < argc && strcmp(argv[i], "--max-ms") == 0)
                        max_ms = number(argv[++i]);
                else
                        die(argv[i], "usage: bench-trim --bfcd PATH [--runs N] [--max-ms N] [--json]");
        }
        ms = calloc((size_t)n_runs, sizeof(*ms));
        if (!bfcd || !ms)
                die("bench-trim", "--bfcd PATH is needed");
        make_folder("bench-trim");
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        daemon_pid = daemon_start(bfcd, LIMIT_MIB, -1);
        for (int mode = 0; mode < N_MODES; mode++) {
                double median, p95;

                measure(mode == BUSY, (size_t)n_runs, ms);
                median = ms[n_runs / 2];
                p95 = ms[n_runs * 95 / 100];
                slow |= max_ms > 0 && p95 > (double)max_ms;
                json_object_set_new(all, names[mode],
                                    json_pack("{s:f, s:f, s:f}", "median_ms", median, "p95_ms", p95, "max_ms",
                                              ms[n_runs - 1]));
                if (!json)
                        printf("the other %-9s median %7.3f ms, 95 %% within %7.3f ms, at most %7.3f ms\n",
                               names[mode], median, p95, ms[n_runs - 1]);
        }
        kill(daemon_pid, SIGTERM);
        waitpid(daemon_pid, NULL, 0);
        if (json) {
                json_dumpf(all, stdout, JSON_INDENT(2));
                putchar('\n');
        }
        json_decref(all);
        free(ms);
        return slow ? EXIT_FAILURE : EXIT_SUCCESS;
}
