/* bench-crowd: a thousand sessions with a million blocks.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each session is a process. What counts: bytes of the daemon's memory for each
 * block, a request's p99 beside them all, and, when all of them are killed at
 * once, how long it takes until nothing of them is left, and the p99 of another
 * tenant's requests meanwhile. */
#include <bfcclient.h>

#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/admin.h"
#include "tests/bench/options.h"

#define BLOCK_BYTES  256u
#define PIPELINE     48u /* mallocs under way; the daemon pauses a session with 64 waiting requests */
#define MAX_SAMPLES  (1u << 22)
#define MAX_CLEAN_MS 60000
#define CONNECT_MS   300000

static struct {
        const char *bfcd;
        long n_sessions, n_blocks, n_pairs;
        double max_clean_s, max_bytes;
        bool json;
} o = { .n_sessions = 1000, .n_blocks = 1000000, .n_pairs = 20000 };

struct stage {
        _Atomic long n_up, n_full;
        _Atomic bool go;
};

static struct stage *stage;
static struct raw *admin;
static bfc_client *victim;

/* ---- the crowd ------------------------------------------------------------- */

static int send_mallocs(struct raw *raw, long n)
{
        uint8_t frames[PIPELINE * 32];
        size_t n_bytes = 0;

        for (long i = 0; i < n; i++) {
                Bfcd__Malloc m = BFCD__MALLOC__INIT;
                Bfcd__Request r = REQUEST(MALLOC, malloc, &m);

                m.n_bytes = BLOCK_BYTES;
                r.id = raw->next_id++;
                n_bytes += raw_pack(&r, frames + n_bytes);
        }
        return raw_send_bytes(raw, frames, n_bytes);
}

static void fill(struct raw *raw, long n_blocks)
{
        for (long n_left = n_blocks; n_left > 0;) {
                long n = n_left < (long)PIPELINE ? n_left : (long)PIPELINE;

                if (send_mallocs(raw, n) != 0)
                        die("a session", "the daemon hung up");
                for (long i = 0; i < n; i++) {
                        Bfcd__Reply *reply;

                        if (raw_receive(raw, CONNECT_MS, &reply) != 0)
                                die("a session", "no reply");
                        if (reply->body_case != BFCD__REPLY__BODY_BLOCK)
                                die("a session's malloc", reply->refusal->message);
                        bfcd__reply__free_unpacked(reply, NULL);
                }
                n_left -= n;
        }
}

static void hold(void *arg)
{
        struct raw *raw;

        (void)arg;
        while (!(raw = raw_connect(socket_path, "crowd")))
                (void)poll(NULL, 0, 5);
        atomic_fetch_add(&stage->n_up, 1);
        while (!atomic_load(&stage->go))
                (void)poll(NULL, 0, 20);
        fill(raw, o.n_blocks / o.n_sessions);
        atomic_fetch_add(&stage->n_full, 1);
        for (;;)
                (void)pause();
}

static void wait_until(_Atomic long *what, const char *name)
{
        for (int i = 0; atomic_load(what) < o.n_sessions; i++) {
                if (i == CONNECT_MS / 10 || waitpid(-1, NULL, WNOHANG) > 0)
                        die(name, "a session is missing");
                (void)poll(NULL, 0, 10);
        }
}

/* ---- results --------------------------------------------------------------- */

static void ask_once(struct samples *s)
{
        uint64_t begin = now_ns(), middle;
        void *p = bench_malloc(victim, BLOCK_BYTES);

        middle = now_ns();
        bench_free(victim, p);
        samples_add(s, middle - begin);
        samples_add(s, now_ns() - middle);
}

static void ask_many(struct samples *s)
{
        samples_new(s, MAX_SAMPLES);
        for (long i = 0; i < o.n_pairs; i++)
                ask_once(s);
        samples_evaluate(s);
}

/* Kills all sessions; seconds until the daemon has released all of their blocks. */
static double kill_all(const pid_t *pids, struct samples *s)
{
        uint64_t begin = now_ns(), next_look = begin;
        double seconds = 0;

        samples_new(s, MAX_SAMPLES);
        for (long i = 0; i < o.n_sessions; i++)
                kill(pids[i], SIGKILL);
        while (seconds == 0) {
                struct admin_status m;

                ask_once(s);
                if (now_ns() < next_look)
                        continue;
                next_look = now_ns() + 2000000;
                m = admin_status(admin);
                if (m.n_sessions == 1 && m.n_blocks == 1)
                        seconds = (double)(now_ns() - begin) / 1e9;
                if (now_ns() - begin > (uint64_t)MAX_CLEAN_MS * 1000000)
                        die("cleaning up", "it takes longer than MAX_CLEAN_MS");
        }
        samples_evaluate(s);
        processes_kill(pids, o.n_sessions);
        return seconds;
}

/* ---- the program ----------------------------------------------------------- */

static json_t *to_json(const struct samples *s)
{
        return json_pack("{s:I, s:I, s:I, s:I}", "median_ns", (json_int_t)s->median, "p99_ns",
                         (json_int_t)s->p99, "max_ns", (json_int_t)s->max, "num_requests", (json_int_t)s->n);
}

static void print_row(const char *what, const struct samples *s)
{
        printf("%-28s %9.1f %9.1f %9.1f us\n", what, s->median / 1e3, s->p99 / 1e3, s->max / 1e3);
}

static void raise_limits(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
}

static pid_t set_up(void)
{
        unsigned long mib = (unsigned long)o.n_blocks * BLOCK_BYTES / (1u << 20) + 16;
        unsigned uid = (unsigned)geteuid();
        pid_t pid;

        make_folder("bench-crowd");
        raise_limits();
        stage = shared_memory(sizeof(*stage));
        pid = daemon_start(
                o.bfcd, -1,
                "max_sessions: 5000\n"
                "devices:\n"
                "  - id: host\n"
                "    size: %luMiB\n"
                "    partitions: [{name: bench, limit: %luMiB}]\n"
                "tenants:\n"
                "  - {name: victim, match: {uid: %u}, quotas: [{partition: bench, limit: 8MiB, reserve: 8MiB}]}\n"
                "  - name: crowd\n"
                "    match: {uid: %u}\n"
                "    quotas: [{partition: bench, limit: %luMiB, max_sessions: 4096, max_blocks: 4100000}]\n",
                mib + 16, mib + 16, uid, uid, mib);
        victim = client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        admin = session_open(admin_path, NULL);
        return pid;
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "sessions", .count = &o.n_sessions, .min = 1, .max = 4000, .unit = "N",
                  .help = "sessions" },
                { "blocks", .count = &o.n_blocks, .min = 1, .max = 4000000, .unit = "N",
                  .help = "blocks of all" },
                { "pairs", .count = &o.n_pairs, .min = 1, .max = 1000000, .unit = "N",
                  .help = "timed pairs" },
                { "max-clean-s", .number = &o.max_clean_s, .unit = "S", .help = "limit of the clean-up" },
                { "max-bytes", .number = &o.max_bytes, .unit = "N",
                  .help = "limit of the daemon's bytes per block" },
                { 0 },
        };

        options_parse(argc, argv, "Measures the daemon with very many sessions and blocks.", options);
        options_require(o.bfcd, "--bfcd is missing");
        o.n_blocks -= o.n_blocks % o.n_sessions;
}

int main(int argc, char **argv)
{
        struct samples alone, beside, dying;
        struct admin_status before, with_sessions, full, after;
        double seconds, per_block, per_session;
        pid_t *pids, pid;

        parse(argc, argv);
        pids = need(calloc((size_t)o.n_sessions, sizeof(*pids)));
        pid = set_up();
        (void)bench_malloc(victim, BLOCK_BYTES);
        ask_many(&alone);
        before = admin_status(admin);
        for (long i = 0; i < o.n_sessions; i++)
                pids[i] = process_start(hold, NULL);
        wait_until(&stage->n_up, "hellos");
        with_sessions = admin_status(admin);
        atomic_store(&stage->go, true);
        wait_until(&stage->n_full, "mallocs");
        full = admin_status(admin);
        if ((long)full.n_blocks != o.n_blocks + 1)
                die("blocks", "not as many as there should be");
        ask_many(&beside);
        seconds = kill_all(pids, &dying);
        after = admin_status(admin);
        bfc_disconnect(victim);
        raw_close(admin);
        process_stop(pid, SIGTERM);

        per_block = (double)(full.bytes_resident - with_sessions.bytes_resident) / (double)o.n_blocks;
        per_session = (double)(with_sessions.bytes_resident - before.bytes_resident) / (double)o.n_sessions;
        if (o.json) {
                print_json(json_pack("{s:i, s:I, s:I, s:f, s:f, s:I, s:I, s:f, s:o, s:o, s:o}", "schema", 1,
                                     "num_sessions", (json_int_t)o.n_sessions, "num_blocks",
                                     (json_int_t)o.n_blocks, "bytes_per_block", per_block,
                                     "bytes_per_session", per_session, "bytes_resident",
                                     (json_int_t)full.bytes_resident, "bytes_allocated_after",
                                     (json_int_t)after.bytes_allocated, "clean_up_seconds", seconds,
                                     "request_alone", to_json(&alone), "request_beside", to_json(&beside),
                                     "request_while_cleaning_up", to_json(&dying)));
        } else {
                printf("%ld sessions, %ld blocks: %.1f bytes of the daemon's for each block, %.0f for each session\n",
                       o.n_sessions, o.n_blocks, per_block, per_session);
                printf("%-28s %9s %9s %9s\n", "", "median", "p99", "max");
                print_row("a request, alone", &alone);
                print_row("beside them", &beside);
                print_row("while they are cleaned up", &dying);
                printf("all are killed at once: clean after %.2f s\n", seconds);
        }
        free(pids);
        return (o.max_clean_s > 0 && seconds > o.max_clean_s) || (o.max_bytes > 0 && per_block > o.max_bytes)
                       ? EXIT_FAILURE
                       : EXIT_SUCCESS;
}
