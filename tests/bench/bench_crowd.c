/* bench-crowd: a thousand sessions with a million blocks.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each session is a process. What counts: bytes of the daemon's memory for each
 * block, a request's p99 beside them all, and, when all of them are killed at
 * once, how long it takes until nothing of them is left, and the p99 of another
 * tenant's requests meanwhile. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/integration/raw.h"

#define BLOCK_BYTES  256u
#define PIPELINE     48u /* mallocs under way; the daemon pauses who has 64 that wait */
#define MAX_SAMPLES  (1u << 22)
#define MAX_CLEAN_MS 60000
#define COME_IN_MS   300000

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
static char socket_path[128];

struct samples {
        uint32_t *ns;
        size_t n;
        uint32_t median, p99, max;
};

struct memory {
        uint64_t allocated, resident, n_blocks, n_sessions;
};

/* ---- the crowd ------------------------------------------------------------- */

static int send_mallocs(struct raw *raw, long n)
{
        uint8_t frames[PIPELINE * 32];
        size_t n_bytes = 0;

        for (long i = 0; i < n; i++) {
                Bfcd__Request r = BFCD__REQUEST__INIT;
                Bfcd__Malloc m = BFCD__MALLOC__INIT;
                size_t size;

                m.n_bytes = BLOCK_BYTES;
                r.id = raw->next_id++;
                r.body_case = BFCD__REQUEST__BODY_MALLOC;
                r.malloc = &m;
                size = bfcd__request__pack(&r, frames + n_bytes + 4);
                memset(frames + n_bytes, 0, 4);
                frames[n_bytes] = (uint8_t)size;
                n_bytes += size + 4;
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

                        if (raw_receive(raw, COME_IN_MS, &reply) != 0)
                                die("a session", "no reply");
                        if (reply->body_case != BFCD__REPLY__BODY_BLOCK)
                                die("a session's malloc", reply->refusal->message);
                        bfcd__reply__free_unpacked(reply, NULL);
                }
                n_left -= n;
        }
}

static _Noreturn void hold(void)
{
        struct raw *raw;

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
                if (i == COME_IN_MS / 10 || waitpid(-1, NULL, WNOHANG) > 0)
                        die(name, "a session is missing");
                (void)poll(NULL, 0, 10);
        }
}

/* ---- figures --------------------------------------------------------------- */

static struct memory look(void)
{
        struct memory m;
        Bfcd__Reply *reply;

        if (raw_list(admin, BFCD__LIST__KIND__STATUS, 0, &reply) < 0)
                die("status", raw_refusal());
        m.allocated = reply->list->status->bytes_allocated;
        m.resident = reply->list->status->bytes_resident;
        m.n_blocks = reply->list->status->num_blocks;
        m.n_sessions = reply->list->status->num_sessions;
        bfcd__reply__free_unpacked(reply, NULL);
        return m;
}

static void samples_new(struct samples *s)
{
        *s = (struct samples){ .ns = malloc(MAX_SAMPLES * sizeof(*s->ns)) };
        if (!s->ns)
                die("memory", strerror(ENOMEM));
}

static void ask_once(struct samples *s)
{
        uint64_t begin = now_ns(), middle;
        void *p;

        if (bfc_malloc(victim, BLOCK_BYTES, &p) < 0)
                die("the victim's malloc", bfc_last_error());
        middle = now_ns();
        if (bfc_free(victim, p) < 0)
                die("the victim's free", bfc_last_error());
        if (s->n + 2 > MAX_SAMPLES)
                return;
        s->ns[s->n++] = (uint32_t)(middle - begin);
        s->ns[s->n++] = (uint32_t)(now_ns() - middle);
}

static int compare(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

/* The figures stay, the samples do not. */
static void evaluate(struct samples *s)
{
        qsort(s->ns, s->n, sizeof(*s->ns), compare);
        if (s->n > 0) {
                s->median = s->ns[s->n / 2];
                s->p99 = s->ns[s->n * 99 / 100];
                s->max = s->ns[s->n - 1];
        }
        free(s->ns);
        s->ns = NULL;
}

static void ask_many(struct samples *s)
{
        samples_new(s);
        for (long i = 0; i < o.n_pairs; i++)
                ask_once(s);
        evaluate(s);
}

/* Kills them all; seconds until nothing of them is left. */
static double kill_all(const pid_t *pids, struct samples *s)
{
        uint64_t begin = now_ns(), next_look = begin;
        double seconds = 0;

        samples_new(s);
        for (long i = 0; i < o.n_sessions; i++)
                kill(pids[i], SIGKILL);
        while (seconds == 0) {
                struct memory m;

                ask_once(s);
                if (now_ns() < next_look)
                        continue;
                next_look = now_ns() + 2000000;
                m = look();
                if (m.n_sessions == 1 && m.n_blocks == 1)
                        seconds = (double)(now_ns() - begin) / 1e9;
                if (now_ns() - begin > (uint64_t)MAX_CLEAN_MS * 1000000)
                        die("cleaning up", "it takes for ever");
        }
        evaluate(s);
        for (long i = 0; i < o.n_sessions; i++)
                (void)waitpid(pids[i], NULL, 0);
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

static long to_number(const char *word, long min, long max)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (*end || end == word || n < min || n > max)
                die(word, "not a number that makes sense here");
        return n;
}

static void parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },
                { "sessions", required_argument, NULL, 's' },
                { "blocks", required_argument, NULL, 'b' },
                { "pairs", required_argument, NULL, 'p' },
                { "max-clean-s", required_argument, NULL, 'c' },
                { "max-bytes", required_argument, NULL, 'm' },
                { "help", no_argument, NULL, 'h' },
                { 0 },
        };
        int c;

        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                if (c == 'd')
                        o.bfcd = optarg;
                else if (c == 'j')
                        o.json = true;
                else if (c == 's')
                        o.n_sessions = to_number(optarg, 1, 4000);
                else if (c == 'b')
                        o.n_blocks = to_number(optarg, 1, 4000000);
                else if (c == 'p')
                        o.n_pairs = to_number(optarg, 1, 1000000);
                else if (c == 'c')
                        o.max_clean_s = atof(optarg);
                else if (c == 'm')
                        o.max_bytes = atof(optarg);
                else {
                        fprintf(c == 'h' ? stdout : stderr,
                                "Usage: bench-crowd --bfcd PROGRAM [--json] [--sessions N] [--blocks N] [--pairs N]\n"
                                "                   [--max-clean-s S] [--max-bytes N]\n");
                        exit(c == 'h' ? EXIT_SUCCESS : 2);
                }
        }
        if (!o.bfcd || optind < argc)
                die("--bfcd", "is needed, and no other word");
}

static void raise_limits(void)
{
        struct rlimit limit;

        if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
                limit.rlim_cur = limit.rlim_max;
                (void)setrlimit(RLIMIT_NOFILE, &limit);
        }
}

static pid_t set_the_stage(void)
{
        unsigned long mib = (unsigned long)o.n_blocks * BLOCK_BYTES / (1u << 20) + 16;
        char text[1024], path[160];
        pid_t pid;

        make_folder("bench-crowd");
        raise_limits();
        snprintf(socket_path, sizeof(socket_path), "%s/bfcd.sock", folder);
        snprintf(
                text, sizeof(text),
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
                mib + 16, mib + 16, (unsigned)geteuid(), (unsigned)geteuid(), mib);
        stage = mmap(NULL, sizeof(*stage), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (stage == MAP_FAILED)
                die("memory", strerror(errno));
        pid = daemon_start_with(o.bfcd, text, -1);
        victim = client_start(socket_path, "victim", BFC_NO_CACHE | BFC_NO_THREAD);
        snprintf(path, sizeof(path), "%s/admin.sock", folder);
        admin = raw_connect(path, NULL);
        if (!admin)
                die(path, "no session there");
        return pid;
}

static void crowd_start(pid_t *pids)
{
        pid_t parent = getpid();

        for (long i = 0; i < o.n_sessions; i++) {
                pids[i] = fork();
                if (pids[i] < 0)
                        die("fork", strerror(errno));
                if (pids[i] > 0)
                        continue;
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() == parent)
                        hold();
                _exit(0);
        }
}

int main(int argc, char **argv)
{
        struct samples alone, beside, dying;
        struct memory before, with_sessions, full, after;
        double seconds, per_block, per_session;
        pid_t *pids, pid;
        void *kept;

        parse(argc, argv);
        o.n_blocks -= o.n_blocks % o.n_sessions;
        pids = calloc((size_t)o.n_sessions, sizeof(*pids));
        pid = set_the_stage();
        if (!pids || bfc_malloc(victim, BLOCK_BYTES, &kept) < 0)
                die("bfc_malloc", bfc_last_error());
        ask_many(&alone);
        before = look();
        crowd_start(pids);
        wait_until(&stage->n_up, "hellos");
        with_sessions = look();
        atomic_store(&stage->go, true);
        wait_until(&stage->n_full, "mallocs");
        full = look();
        if ((long)full.n_blocks != o.n_blocks + 1)
                die("blocks", "not as many as there should be");
        ask_many(&beside);
        seconds = kill_all(pids, &dying);
        after = look();
        bfc_disconnect(victim);
        raw_close(admin);
        kill(pid, SIGTERM);
        waitpid(pid, NULL, 0);

        per_block = (double)(full.resident - with_sessions.resident) / (double)o.n_blocks;
        per_session = (double)(with_sessions.resident - before.resident) / (double)o.n_sessions;
        if (o.json) {
                json_t *j = json_pack(
                        "{s:i, s:I, s:I, s:f, s:f, s:I, s:I, s:f, s:o, s:o, s:o}", "schema", 1,
                        "num_sessions", (json_int_t)o.n_sessions, "num_blocks", (json_int_t)o.n_blocks,
                        "bytes_per_block", per_block, "bytes_per_session", per_session, "bytes_resident",
                        (json_int_t)full.resident, "bytes_allocated_after", (json_int_t)after.allocated,
                        "clean_up_seconds", seconds, "request_alone", to_json(&alone), "request_beside",
                        to_json(&beside), "request_while_cleaning_up", to_json(&dying));

                json_dumpf(j, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
                putchar('\n');
                json_decref(j);
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
