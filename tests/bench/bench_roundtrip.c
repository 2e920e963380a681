/* bench-roundtrip: what a malloc and a free through the daemon cost, beside the
 * least that an exchange over a socket can cost.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The least is a bare epoll server that answers frames of the same sizes over
 * the same kind of socket and does nothing else. Both are asked in turn, batch by
 * batch in one run, so that whatever the machine does meanwhile meets both; the
 * asking process and the servers are pinned alike. Each request is timed alone:
 * medians are of requests, not of batches. */
#include <bfcclient.h>

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "proto/bfcd.pb-c.h"
#include "proto/frame.h"
#include "tests/bench/daemon.h"
#include "tests/bench/options.h"

#define BLOCK_BYTES 4000u
#define MAX_FRAME   512u

static struct {
        const char *socket; /* of a daemon that runs already */
        const char *bfcd;   /* or the program to start */
        long n_batches;
        long n_pairs; /* a malloc and a free, in a batch */
        long n_held;  /* blocks held all the time */
        double max_ratio;
        int client_core; /* -1: not pinned */
        int server_core;
        bool json;
} o = { .n_batches = 200, .n_pairs = 100, .n_held = 64, .server_core = 1 };

enum { MALLOC, FREE, ECHO_MALLOC, ECHO_FREE, REQUESTS, ECHOES, N_SAMPLES };
static const struct {
        const char *name, *key;
} kinds[N_SAMPLES] = {
        [MALLOC] = { "malloc, daemon", "malloc" },
        [FREE] = { "free, daemon", "free" },
        [ECHO_MALLOC] = { "malloc's sizes, echo", "echo_malloc" },
        [ECHO_FREE] = { "free's sizes, echo", "echo_free" },
        [REQUESTS] = { "request, daemon", "request" },
        [ECHOES] = { "request, echo", "echo" },
};

static int unix_socket(const char *path, bool listening)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        if (fd < 0 || strlen(path) >= sizeof(address.sun_path))
                die(path, "no socket");
        strcpy(address.sun_path, path);
        if (listening ? bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(fd, 4) < 0
                      : connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                die(path, strerror(errno));
        return fd;
}

/* ---- the bare server ----------------------------------------------------- */

/* Answers what it reads with as many bytes as the second 32-bit word says. */
static void echo_once(int fd)
{
        uint8_t bytes[MAX_FRAME];
        uint32_t n_answer;
        ssize_t n = recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT);

        if (n <= 0)
                _exit(0);
        memcpy(&n_answer, bytes + FRAME_HEADER_BYTES, sizeof(n_answer));
        if (send(fd, bytes, n_answer, MSG_NOSIGNAL | MSG_DONTWAIT) != (ssize_t)n_answer)
                _exit(1);
}

static void echo_serve(void *arg)
{
        int listener = *(const int *)arg;
        struct epoll_event event = { .events = EPOLLIN };
        int epoll = epoll_create1(EPOLL_CLOEXEC),
            fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (epoll < 0 || fd < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
                _exit(1);
        pin(0, o.server_core);
        for (;;)
                if (epoll_wait(epoll, &event, 1, -1) == 1)
                        echo_once(fd);
}

static int echo_start(pid_t *ret_pid)
{
        char path[128];
        int listener, fd;

        snprintf(path, sizeof(path), "%s/echo.sock", folder);
        listener = unix_socket(path, true);
        *ret_pid = process_start(echo_serve, &listener);
        fd = unix_socket(path, false);
        close(listener);
        unlink(path);
        return fd;
}

/* Sizes on the wire, headers included. */
struct sizes {
        uint32_t n_request;
        uint32_t n_reply;
};

static uint64_t echo_ask(int fd, struct sizes sizes)
{
        uint8_t bytes[MAX_FRAME] = { 0 };
        uint64_t begin;
        uint32_t n_got = 0;

        memcpy(bytes + FRAME_HEADER_BYTES, &sizes.n_reply, sizeof(sizes.n_reply));
        begin = now_ns();
        if (send(fd, bytes, sizes.n_request, MSG_NOSIGNAL) != (ssize_t)sizes.n_request)
                die("echo", "send failed");
        while (n_got < sizes.n_reply) {
                ssize_t n = recv(fd, bytes, sizeof(bytes), 0);

                if (n <= 0)
                        die("echo", "hung up");
                n_got += (uint32_t)n;
        }
        return now_ns() - begin;
}

/* ---- the daemon ---------------------------------------------------------- */

/* Pins the loop of a running daemon for this run. The socket's peer credentials name the process. */
static pid_t daemon_pin(const char *path, int core, cpu_set_t *ret_before)
{
        struct ucred peer = { 0 };
        socklen_t n = sizeof(peer);
        int fd = unix_socket(path, false);

        if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &n) < 0 ||
            sched_getaffinity(peer.pid, sizeof(*ret_before), ret_before) < 0)
                peer.pid = 0;
        close(fd);
        if (peer.pid > 0)
                pin(peer.pid, core);
        return peer.pid;
}

/* What a malloc and a free take on the wire, from a real block's numbers and the
 * middle of the run's request ids. */
static void measure_sizes(bfc_client *client, struct sizes *ret_malloc, struct sizes *ret_free)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        Bfcd__Malloc malloc_body = BFCD__MALLOC__INIT;
        Bfcd__Free free_body = BFCD__FREE__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;
        Bfcd__Request q = BFCD__REQUEST__INIT;
        Bfcd__Reply a = BFCD__REPLY__INIT;
        void *p = bench_malloc(client, BLOCK_BYTES);

        if (bfc_block_info(client, p, &info) < 0)
                die("bfc_block_info", bfc_last_error());
        bench_free(client, p);
        q.id = a.id = (uint64_t)(o.n_batches * o.n_pairs);
        malloc_body.n_bytes = BLOCK_BYTES;
        free_body.block_id = block.block_id = info.block_id;
        block.region_id = info.region_id;
        block.offset = info.offset;
        block.n_bytes = info.n_bytes;
        q.body_case = BFCD__REQUEST__BODY_MALLOC;
        q.malloc = &malloc_body;
        a.body_case = BFCD__REPLY__BODY_BLOCK;
        a.block = &block;
        ret_malloc->n_request = FRAME_HEADER_BYTES + (uint32_t)bfcd__request__get_packed_size(&q);
        ret_malloc->n_reply = FRAME_HEADER_BYTES + (uint32_t)bfcd__reply__get_packed_size(&a);
        q.body_case = BFCD__REQUEST__BODY_FREE;
        q.free = &free_body;
        a.body_case = BFCD__REPLY__BODY_DONE;
        a.done = &done;
        ret_free->n_request = FRAME_HEADER_BYTES + (uint32_t)bfcd__request__get_packed_size(&q);
        ret_free->n_reply = FRAME_HEADER_BYTES + (uint32_t)bfcd__reply__get_packed_size(&a);
}

/* ---- the run ------------------------------------------------------------- */

static void daemon_pair(bfc_client *client, struct samples *s)
{
        uint64_t begin = now_ns(), middle, end;
        void *p = bench_malloc(client, BLOCK_BYTES);

        middle = now_ns();
        bench_free(client, p);
        end = now_ns();
        samples_add(&s[MALLOC], middle - begin);
        samples_add(&s[FREE], end - middle);
        samples_add(&s[REQUESTS], middle - begin);
        samples_add(&s[REQUESTS], end - middle);
}

static void echo_pair(int fd, struct sizes for_malloc, struct sizes for_free, struct samples *s)
{
        uint64_t first = echo_ask(fd, for_malloc), second = echo_ask(fd, for_free);

        samples_add(&s[ECHO_MALLOC], first);
        samples_add(&s[ECHO_FREE], second);
        samples_add(&s[ECHOES], first);
        samples_add(&s[ECHOES], second);
}

static void run(bfc_client *client, int echo, struct samples *s)
{
        struct sizes for_malloc, for_free;

        for (long i = 0; i < o.n_held; i++)
                (void)bench_malloc(client, BLOCK_BYTES);
        measure_sizes(client, &for_malloc, &for_free);
        for (long batch = -1; batch < o.n_batches; batch++) {
                for (long i = 0; i < o.n_pairs; i++)
                        daemon_pair(client, s);
                for (long i = 0; i < o.n_pairs; i++)
                        echo_pair(echo, for_malloc, for_free, s);
                for (int i = 0; batch < 0 && i < N_SAMPLES; i++)
                        s[i].n = 0; /* the first batch only warms up */
        }
}

static double ratio(const struct samples *a, const struct samples *b)
{
        return b->median > 0 ? (double)a->median / b->median : 0;
}

static void print_text(const struct samples *s)
{
        printf("%-24s %10s %10s   (ns per request)\n", "", "median", "p99");
        for (int i = 0; i < N_SAMPLES; i++)
                printf("%-24s %10u %10u\n", kinds[i].name, s[i].median, s[i].p99);
        printf("ratio of the medians     %10.3f              (malloc %.3f, free %.3f)\n",
               ratio(&s[REQUESTS], &s[ECHOES]), ratio(&s[MALLOC], &s[ECHO_MALLOC]),
               ratio(&s[FREE], &s[ECHO_FREE]));
}

static json_t *to_json(const struct samples *s)
{
        json_t *root = json_pack("{s:i, s:I, s:b}", "schema", 1, "num_requests", (json_int_t)s[REQUESTS].n,
                                 "pinned", o.client_core >= 0 && o.server_core >= 0);

        for (int i = 0; i < N_SAMPLES; i++)
                json_object_set_new(root, kinds[i].key,
                                    json_pack("{s:I, s:I}", "median_ns", (json_int_t)s[i].median, "p99_ns",
                                              (json_int_t)s[i].p99));
        json_object_set_new(root, "ratio", json_real(ratio(&s[REQUESTS], &s[ECHOES])));
        json_object_set_new(root, "ratio_malloc", json_real(ratio(&s[MALLOC], &s[ECHO_MALLOC])));
        json_object_set_new(root, "ratio_free", json_real(ratio(&s[FREE], &s[ECHO_FREE])));
        return root;
}

/* ---- the program --------------------------------------------------------- */

static bool parse_pin(const char *word)
{
        return options_parse_cores(word, &o.client_core, &o.server_core);
}

static void parse(int argc, char **argv)
{
        const long max = 10000000;
        const struct bench_option options[] = {
                OPTION_BFCD(&o.bfcd),
                OPTION_JSON(&o.json),
                { "socket", .text = &o.socket, .unit = "PATH",
                  .help = "use a running daemon instead of --bfcd" },
                { "pin", .parse = parse_pin, .unit = "CLIENT,SERVER", .help = "two cores, or none" },
                { "batches", .count = &o.n_batches, .min = 1, .max = max, .unit = "N", .help = "batches" },
                { "pairs", .count = &o.n_pairs, .min = 1, .max = max, .unit = "N",
                  .help = "pairs in a batch" },
                { "held", .count = &o.n_held, .max = max, .unit = "N",
                  .help = "blocks that live all the time" },
                { "max-ratio", .number = &o.max_ratio, .unit = "F",
                  .help = "limit of the ratio of the medians" },
                { 0 },
        };

        if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
                o.server_core = 0;
        options_parse(argc, argv,
                      "Times bfc_malloc and bfc_free through a daemon, against a bare epoll server.\n"
                      "Ends with 1 if the ratio is above --max-ratio.",
                      options);
        options_require(!o.socket != !o.bfcd, "give one of --bfcd and --socket");
}

int main(int argc, char **argv)
{
        struct samples s[N_SAMPLES];
        pid_t echo_pid, daemon_pid = 0;
        cpu_set_t before;
        bfc_client *client;
        int echo;

        parse(argc, argv);
        for (int i = 0; i < N_SAMPLES; i++)
                samples_new(&s[i], (size_t)((o.n_batches + 1) * o.n_pairs * 2));
        make_folder("bench-roundtrip");
        if (o.bfcd)
                daemon_pid = daemon_start_simple(o.bfcd, 64, o.server_core);
        echo = echo_start(&echo_pid);
        client = client_start(o.bfcd ? socket_path : o.socket, "bench-roundtrip", BFC_NO_CACHE);
        pin(0, o.client_core);
        if (o.socket && o.server_core >= 0)
                daemon_pid = daemon_pin(o.socket, o.server_core, &before);

        run(client, echo, s);

        bfc_disconnect(client);
        close(echo);
        process_stop(echo_pid, SIGKILL);
        if (o.bfcd)
                process_stop(daemon_pid, SIGTERM);
        else if (daemon_pid > 0)
                sched_setaffinity(daemon_pid, sizeof(before), &before);
        for (int i = 0; i < N_SAMPLES; i++)
                samples_evaluate(&s[i]);
        if (o.json)
                print_json(to_json(s));
        else
                print_text(s);
        return o.max_ratio > 0 && ratio(&s[REQUESTS], &s[ECHOES]) > o.max_ratio ? EXIT_FAILURE : EXIT_SUCCESS;
}
