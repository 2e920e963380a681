/* bench-busy: many clients that ask all the time. Requests per second, and the server's processor time for each, beside a
 * bare echo server over the same kind of socket.
 *
 * Each client is a process with one request under way: a Malloc of one block, then its Free. It does the same for both
 * servers: it packs a request, sends it, receives the reply and unpacks it. The echo server answers with as many bytes and
 * does nothing else. Both are asked in turn in one run, so that whatever the machine does meanwhile meets both.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/frame.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"
#include "tests/integration/raw.h"

/* All blocks fit into one extent, which each client has from its first block on. */
#define BLOCK_BYTES 256u
#define LIMIT_MIB   2u
#define MAX_CLIENTS 2048
#define MAX_ROUNDS  100
#define MAX_STEPS   5
#define MAX_FRAME   512u
#define MAX_TRIES   1000 /* of a client, to say hello */
#define TIMEOUT_MS  120000
#define BATCH       256

static struct {
        const char *bfcd;
        long n_clients, n_rounds, phase_ms;
        double max_ratio, max_growth;
        int client_core, server_core; /* -1: not pinned */
        bool json;
} o = { .n_clients = 1000, .n_rounds = 7, .phase_ms = 300, .server_core = 1 };

enum server { DAEMON, ECHO, N_SERVERS };
static const char *const server_names[N_SERVERS] = { "daemon", "echo" };

/* Shared with the clients. */
struct stage {
        pthread_barrier_t begin, end; /* of a phase: the clients and the bench */
        enum server server;           /* that is asked in it */
        bool is_over;                 /* of this number of clients */
        _Atomic bool stops;
        _Atomic long n_up;
        uint64_t n_requests[MAX_CLIENTS]; /* of the last phase */
};

struct step {
        long n_clients;
        double rate[N_SERVERS][MAX_ROUNDS];   /* requests per second */
        double cpu_ns[N_SERVERS][MAX_ROUNDS]; /* of the server, for a request */
        double ratio[MAX_ROUNDS];             /* time of the daemon over that of the echo server */
};

static struct stage *stage;
static char echo_path[sizeof(((struct sockaddr_un *)0)->sun_path)];
static Bfcd__Block sample = BFCD__BLOCK__INIT; /* of the daemon, for the sizes of the echo server's replies */
static pid_t pids[N_SERVERS];

/* ---- the echo server ------------------------------------------------------- */

static size_t pack_reply(Bfcd__Reply *reply, uint8_t *ret_frame)
{
        uint32_t n = (uint32_t)bfcd__reply__pack(reply, ret_frame + FRAME_HEADER_BYTES);

        memcpy(ret_frame, &n, sizeof(n));
        return FRAME_HEADER_BYTES + n;
}

static void echo_accept(int epoll, int listener)
{
        struct epoll_event event = { .events = EPOLLIN };

        event.data.fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (event.data.fd < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, event.data.fd, &event) < 0)
                _exit(1);
}

/* The first request of a connection, and each second one, is a Malloc. */
static void echo_serve(void *arg)
{
        static uint8_t frames[2][MAX_FRAME];
        static bool is_free[4 * MAX_CLIENTS];
        int listener = *(const int *)arg, epoll = epoll_create1(EPOLL_CLOEXEC);
        struct epoll_event event = { .events = EPOLLIN, .data.fd = listener }, events[BATCH];
        Bfcd__Done done = BFCD__DONE__INIT;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        size_t n_bytes[2];

        reply.id = 100000;
        reply.body_case = BFCD__REPLY__BODY_BLOCK;
        reply.block = &sample;
        n_bytes[0] = pack_reply(&reply, frames[0]);
        reply.body_case = BFCD__REPLY__BODY_DONE;
        reply.done = &done;
        n_bytes[1] = pack_reply(&reply, frames[1]);
        pin(0, o.server_core);
        if (epoll < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &event) < 0)
                _exit(1);
        for (;;) {
                int n = epoll_wait(epoll, events, BATCH, -1);

                for (int i = 0; i < n; i++) {
                        uint8_t bytes[MAX_FRAME];
                        int fd = events[i].data.fd;
                        bool *frees = &is_free[fd % (4 * MAX_CLIENTS)];

                        if (fd == listener) {
                                echo_accept(epoll, listener);
                                *frees = false;
                        } else if (recv(fd, bytes, sizeof(bytes), 0) <= 0) {
                                close(fd);
                                *frees = false;
                        } else {
                                (void)send(fd, frames[*frees], n_bytes[*frees], MSG_NOSIGNAL);
                                *frees = !*frees;
                        }
                }
        }
}

static int unix_socket(bool listening)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        memcpy(address.sun_path, echo_path, sizeof(echo_path));
        if (fd < 0)
                die(echo_path, strerror(errno));
        if (listening ? bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 1024) < 0
                      : connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                die(echo_path, strerror(errno));
        return fd;
}

/* ---- a client ---------------------------------------------------------------- */

/* As the library: it waits for a daemon that starts, and of many that connect in one moment, the daemon closes some. */
static struct raw *greet(void)
{
        for (unsigned i = 0; i < MAX_TRIES; i++) {
                struct raw *raw;

                if (raw_open(socket_path, &raw) == 0) {
                        if (raw_hello(raw, NULL, NULL) == 0)
                                return raw;
                        raw_close(raw);
                }
                (void)usleep((useconds_t)(1000 + random() % 20000));
        }
        die("a client", "the daemon does not serve it");
}

/* The reply's block id; 0: it has none. */
static uint64_t ask(int fd, Bfcd__Request *request)
{
        uint8_t bytes[MAX_FRAME];
        size_t n = raw_pack(request, bytes), n_got = 0;
        Bfcd__Reply *reply;
        uint32_t n_payload = 0;
        uint64_t id;

        if (send(fd, bytes, n, MSG_NOSIGNAL) != (ssize_t)n)
                die("a request", strerror(errno));
        while (n_got < FRAME_HEADER_BYTES || n_got < FRAME_HEADER_BYTES + n_payload) {
                ssize_t n_more = recv(fd, bytes + n_got, sizeof(bytes) - n_got, 0);

                if (n_more <= 0)
                        die("a request", "the server hung up");
                n_got += (size_t)n_more;
                if (n_got >= FRAME_HEADER_BYTES)
                        memcpy(&n_payload, bytes, sizeof(n_payload));
                if (n_payload > sizeof(bytes) - FRAME_HEADER_BYTES)
                        die("a reply", "it is too long");
        }
        reply = bfcd__reply__unpack(NULL, n_payload, bytes + FRAME_HEADER_BYTES);
        if (!reply ||
            (reply->body_case != BFCD__REPLY__BODY_BLOCK && reply->body_case != BFCD__REPLY__BODY_DONE))
                die("a request", "no reply of its kind");
        id = reply->body_case == BFCD__REPLY__BODY_BLOCK ? reply->block->block_id : 0;
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

static void ask_pair(int fd, uint64_t *next_id)
{
        Bfcd__Malloc malloc_body = BFCD__MALLOC__INIT;
        Bfcd__Free free_body = BFCD__FREE__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;

        malloc_body.n_bytes = BLOCK_BYTES;
        request.id = (*next_id)++;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &malloc_body;
        free_body.block_id = ask(fd, &request);
        request.id = (*next_id)++;
        request.body_case = BFCD__REQUEST__BODY_FREE;
        request.free = &free_body;
        (void)ask(fd, &request);
}

static void live(void *arg)
{
        long i = *(const long *)arg;
        int fds[N_SERVERS] = { [ECHO] = unix_socket(false) };
        uint64_t next_ids[N_SERVERS] = { [ECHO] = 1 };
        Bfcd__Block kept;
        struct raw *raw;

        pin(0, o.client_core);
        srandom((unsigned)i);
        raw = greet();
        if (raw_malloc(raw, 0, BLOCK_BYTES, &kept) < 0) /* for the extent */
                die("a block", raw_refusal());
        fds[DAEMON] = raw->fd;
        next_ids[DAEMON] = raw->next_id;
        atomic_fetch_add(&stage->n_up, 1);
        for (;;) {
                enum server server;
                uint64_t n = 0;

                pthread_barrier_wait(&stage->begin);
                server = stage->server;
                if (stage->is_over)
                        break;
                for (; !atomic_load_explicit(&stage->stops, memory_order_relaxed); n += 2)
                        ask_pair(fds[server], &next_ids[server]);
                stage->n_requests[i] = n;
                pthread_barrier_wait(&stage->end);
        }
        (void)raw_free(raw, kept.block_id);
        (void)raw_goodbye(raw);
        raw_close(raw);
}

/* ---- the run --------------------------------------------------------------- */

static void barrier_new(pthread_barrier_t *barrier, long n)
{
        pthread_barrierattr_t shared;

        pthread_barrierattr_init(&shared);
        pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
        if (pthread_barrier_init(barrier, &shared, (unsigned)n) != 0)
                die("pthread_barrier_init", "it failed");
        pthread_barrierattr_destroy(&shared);
}

static double processor_ns(pid_t pid)
{
        struct timespec t;
        clockid_t clock;

        if (clock_getcpuclockid(pid, &clock) != 0 || clock_gettime(clock, &t) < 0)
                die("a server", "it has ended");
        return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void run_phase(struct step *step, enum server server, long round)
{
        double busy_ns = processor_ns(pids[server]), n = 0;
        uint64_t begin;

        stage->server = server;
        atomic_store(&stage->stops, false);
        pthread_barrier_wait(&stage->begin);
        begin = now_ns();
        (void)usleep((useconds_t)(o.phase_ms * 1000));
        atomic_store(&stage->stops, true);
        pthread_barrier_wait(&stage->end);
        for (long i = 0; i < step->n_clients; i++)
                n += (double)stage->n_requests[i];
        step->rate[server][round] = n / ms_since(begin) * 1e3;
        step->cpu_ns[server][round] = (processor_ns(pids[server]) - busy_ns) / n;
}

static void run_step(struct step *step)
{
        pid_t *clients = need(calloc((size_t)step->n_clients, sizeof(*clients)));

        barrier_new(&stage->begin, step->n_clients + 1);
        barrier_new(&stage->end, step->n_clients + 1);
        atomic_store(&stage->n_up, 0);
        stage->is_over = false;
        for (long i = 0; i < step->n_clients; i++)
                clients[i] = process_start(live, &i);
        for (uint64_t begin = now_ns(); atomic_load(&stage->n_up) < step->n_clients; (void)usleep(1000))
                if (ms_since(begin) > TIMEOUT_MS || waitpid(-1, NULL, WNOHANG) > 0)
                        die("the clients", "one is missing");
        for (long round = 0; round < o.n_rounds; round++) {
                for (int i = 0; i < N_SERVERS; i++)
                        run_phase(step, (enum server)(((round & 1) + i) % N_SERVERS), round);
                step->ratio[round] = step->rate[ECHO][round] / step->rate[DAEMON][round];
        }
        stage->is_over = true;
        pthread_barrier_wait(&stage->begin);
        for (long i = 0; i < step->n_clients; i++)
                (void)waitpid(clients[i], NULL, 0);
        free(clients);
}

/* ---- results --------------------------------------------------------------------- */

static double median(const double *values)
{
        double copy[MAX_ROUNDS];

        memcpy(copy, values, sizeof(copy));
        return quantile(copy, (size_t)o.n_rounds, 50);
}

static json_t *to_json(const struct step *steps, int n_steps)
{
        json_t *list = json_array();

        for (int i = 0; i < n_steps; i++) {
                json_t *one = json_pack("{s:I, s:f}", "num_clients", (json_int_t)steps[i].n_clients, "ratio",
                                        median(steps[i].ratio));

                for (int k = 0; k < N_SERVERS; k++)
                        json_object_set_new(one, server_names[k],
                                            json_pack("{s:f, s:f}", "requests_per_s",
                                                      median(steps[i].rate[k]), "cpu_ns",
                                                      median(steps[i].cpu_ns[k])));
                json_array_append_new(list, one);
        }
        return json_pack("{s:i, s:I, s:o}", "schema", 1, "rounds", (json_int_t)o.n_rounds, "steps", list);
}

static void print_table(const struct step *steps, int n_steps)
{
        printf("medians of %ld rounds; processor time is the server's, for a request\n", o.n_rounds);
        printf("%8s %12s %12s %12s %12s %6s\n", "clients", "requests/s", "echo", "processor us", "echo",
               "ratio");
        for (int i = 0; i < n_steps; i++)
                printf("%8ld %12.0f %12.0f %12.2f %12.2f %6.2f\n", steps[i].n_clients,
                       median(steps[i].rate[DAEMON]), median(steps[i].rate[ECHO]),
                       median(steps[i].cpu_ns[DAEMON]) / 1e3, median(steps[i].cpu_ns[ECHO]) / 1e3,
                       median(steps[i].ratio));
}

static bool is_good(const struct step *steps, int n_steps)
{
        bool good = true;

        for (int i = 0; i < n_steps; i++) {
                double growth = median(steps[i].cpu_ns[DAEMON]) / median(steps[0].cpu_ns[DAEMON]);

                good = good && (o.max_ratio <= 0 || median(steps[i].ratio) <= o.max_ratio) &&
                       (o.max_growth <= 0 || growth <= o.max_growth);
        }
        return good;
}

/* ---- the program -------------------------------------------------------------------- */

static bool parse_pin(const char *word)
{
        return options_parse_cores(word, &o.client_core, &o.server_core);
}

static void parse(int argc, char **argv)
{
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "clients", .count = &o.n_clients, .min = 1, .max = MAX_CLIENTS, .unit = "N",
                  .help = "the most clients; fewer are measured before" },
                { "rounds", .count = &o.n_rounds, .min = 1, .max = MAX_ROUNDS, .unit = "N",
                  .help = "rounds; in each both servers are asked once" },
                { "phase-ms", .count = &o.phase_ms, .min = 1, .max = 60000, .unit = "N",
                  .help = "for which a server is asked in a round" },
                { "pin", .parse = parse_pin, .unit = "CLIENTS,SERVERS", .help = "two cores, or none" },
                { "max-ratio", .number = &o.max_ratio, .unit = "F",
                  .help = "limit of the time for a request over that of the echo server" },
                { "max-growth", .number = &o.max_growth, .unit = "F",
                  .help = "limit of the processor time for a request over that of one client" },
                { 0 },
        };

        if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
                o.server_core = 0;
        options_parse(argc, argv,
                      "Measures requests of many clients at once, beside a bare echo server.\n"
                      "Ends with 1 if a limit is exceeded.",
                      options);
        options_require(o.bfcd, "--bfcd is missing");
}

static void set_up(void)
{
        struct raw *raw;
        int listener;

        make_folder("bench-busy");
        pids[DAEMON] =
                daemon_start(o.bfcd, o.server_core,
                             "max_sessions: %u\n"
                             "devices:\n"
                             "  - id: host\n"
                             "    size: %uMiB\n"
                             "    partitions: [{name: bench, limit: %uMiB}]\n"
                             "tenants:\n"
                             "  - name: bench\n"
                             "    match: {uid: [%u]}\n"
                             "    quotas: [{partition: bench, limit: %uMiB, max_sessions: %u, max_blocks: "
                             "%u}]\n",
                             MAX_CLIENTS + 8, LIMIT_MIB, LIMIT_MIB, (unsigned)geteuid(), LIMIT_MIB,
                             MAX_CLIENTS + 8, 4 * MAX_CLIENTS);
        raw = greet();
        if (raw_malloc(raw, 0, BLOCK_BYTES, &sample) < 0)
                die("a block", raw_refusal());
        (void)raw_goodbye(raw);
        raw_close(raw);
        snprintf(echo_path, sizeof(echo_path), "%s/echo.sock", folder);
        listener = unix_socket(true);
        pids[ECHO] = process_start(echo_serve, &listener);
        close(listener);
        stage = shared_memory(sizeof(*stage));
}

int main(int argc, char **argv)
{
        const long numbers[] = { 1, 16, 64, 256 };
        struct step *steps = need(calloc(MAX_STEPS, sizeof(*steps)));
        int n_steps = 0;
        bool good;

        parse(argc, argv);
        set_up();
        for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]) && numbers[i] < o.n_clients; i++)
                steps[n_steps++].n_clients = numbers[i];
        steps[n_steps++].n_clients = o.n_clients;
        for (int i = 0; i < n_steps; i++)
                run_step(steps + i);
        process_stop(pids[ECHO], SIGKILL);
        process_stop(pids[DAEMON], SIGTERM);
        unlink(echo_path);
        if (o.json)
                print_json(to_json(steps, n_steps));
        else
                print_table(steps, n_steps);
        good = is_good(steps, n_steps);
        free(steps);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
