/* bench-roundtrip: what a malloc and a free through the daemon cost, beside the
 * least that such a thing can cost.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The least is a bare epoll server that answers frames of the same sizes over
 * the same kind of socket and knows nothing. Both are asked in turn, batch by
 * batch in one run, so that whatever the machine does meanwhile meets both; the
 * asking process and the servers are pinned alike. Each request is timed alone:
 * medians are of requests, not of batches. */
#include <bfcclient.h>

#include <errno.h>
#include <getopt.h>
#include <jansson.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "proto/bfcd.pb-c.h"
#include "proto/frame.h"
#include "tests/bench/daemon.h"

#define BLOCK_BYTES 4000u
#define MAX_FRAME   512u

struct options {
        const char *socket; /* of a daemon that runs already */
        const char *bfcd;   /* or the program to start */
        long n_batches;
        long n_pairs; /* a malloc and a free, in a batch */
        long n_held;  /* blocks held all the time */
        double max_ratio;
        int client_core; /* -1: not pinned */
        int server_core;
        bool json;
};

struct samples {
        const char *name;
        const char *key;
        uint32_t *ns;
        size_t n;
        uint32_t median;
        uint32_t p99;
};
enum { MALLOC, FREE, ECHO_MALLOC, ECHO_FREE, REQUESTS, ECHOES, N_SAMPLES };

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

static _Noreturn void echo_serve(int listener)
{
        struct epoll_event event = { .events = EPOLLIN };
        int epoll = epoll_create1(EPOLL_CLOEXEC),
            fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

        if (epoll < 0 || fd < 0 || epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) < 0)
                _exit(1);
        for (;;)
                if (epoll_wait(epoll, &event, 1, -1) == 1)
                        echo_once(fd);
}

static int echo_start(const struct options *o, pid_t *ret_pid)
{
        char path[128];
        int listener, fd;
        pid_t pid;

        snprintf(path, sizeof(path), "%s/echo.sock", folder);
        listener = unix_socket(path, true);
        pid = fork();
        if (pid < 0)
                die("fork", strerror(errno));
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                pin(0, o->server_core);
                echo_serve(listener);
        }
        fd = unix_socket(path, false);
        close(listener);
        unlink(path);
        *ret_pid = pid;
        return fd;
}

/* Sizes on the wire, headers included. */
struct sizes {
        uint32_t n_request;
        uint32_t n_reply;
};

static uint32_t echo_ask(int fd, struct sizes sizes)
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
        return (uint32_t)(now_ns() - begin);
}

/* ---- the daemon ---------------------------------------------------------- */

/* The loop of a daemon that runs already is pinned for this run; by the socket's
 * word for who it is. */
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
static void measure_sizes(bfc_client *client, const struct options *o, struct sizes *ret_malloc,
                          struct sizes *ret_free)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        Bfcd__Malloc malloc_body = BFCD__MALLOC__INIT;
        Bfcd__Free free_body = BFCD__FREE__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;
        Bfcd__Done done = BFCD__DONE__INIT;
        Bfcd__Request q = BFCD__REQUEST__INIT;
        Bfcd__Reply a = BFCD__REPLY__INIT;
        void *p;

        if (bfc_malloc(client, BLOCK_BYTES, &p) < 0 || bfc_block_info(client, p, &info) < 0 ||
            bfc_free(client, p) < 0)
                die("bfc_malloc", bfc_last_error());
        q.id = a.id = (uint64_t)(o->n_batches * o->n_pairs);
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

static void keep(struct samples *s, uint32_t ns)
{
        s->ns[s->n++] = ns;
}

static void daemon_pair(bfc_client *client, struct samples *s)
{
        uint64_t begin = now_ns(), middle, end;
        void *p = NULL;

        if (bfc_malloc(client, BLOCK_BYTES, &p) < 0)
                die("bfc_malloc", bfc_last_error());
        middle = now_ns();
        if (bfc_free(client, p) < 0)
                die("bfc_free", bfc_last_error());
        end = now_ns();
        keep(&s[MALLOC], (uint32_t)(middle - begin));
        keep(&s[FREE], (uint32_t)(end - middle));
        keep(&s[REQUESTS], (uint32_t)(middle - begin));
        keep(&s[REQUESTS], (uint32_t)(end - middle));
}

static void echo_pair(int fd, struct sizes for_malloc, struct sizes for_free, struct samples *s)
{
        uint32_t first = echo_ask(fd, for_malloc), second = echo_ask(fd, for_free);

        keep(&s[ECHO_MALLOC], first);
        keep(&s[ECHO_FREE], second);
        keep(&s[ECHOES], first);
        keep(&s[ECHOES], second);
}

static void run(bfc_client *client, int echo, const struct options *o, struct samples *s)
{
        struct sizes for_malloc, for_free;

        for (long i = 0; i < o->n_held; i++) {
                void *p;

                if (bfc_malloc(client, BLOCK_BYTES, &p) < 0)
                        die("bfc_malloc", bfc_last_error());
        }
        measure_sizes(client, o, &for_malloc, &for_free);
        for (long batch = -1; batch < o->n_batches; batch++) {
                for (long i = 0; i < o->n_pairs; i++)
                        daemon_pair(client, s);
                for (long i = 0; i < o->n_pairs; i++)
                        echo_pair(echo, for_malloc, for_free, s);
                for (int i = 0; batch < 0 && i < N_SAMPLES; i++)
                        s[i].n = 0; /* that was to warm up */
        }
}

static int compare(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

static double ratio(const struct samples *a, const struct samples *b)
{
        return b->median > 0 ? (double)a->median / b->median : 0;
}

static void print_text(const struct samples *s)
{
        printf("%-24s %10s %10s   (ns per request)\n", "", "median", "p99");
        for (int i = 0; i < N_SAMPLES; i++)
                printf("%-24s %10u %10u\n", s[i].name, s[i].median, s[i].p99);
        printf("ratio of the medians     %10.3f              (malloc %.3f, free %.3f)\n",
               ratio(&s[REQUESTS], &s[ECHOES]), ratio(&s[MALLOC], &s[ECHO_MALLOC]),
               ratio(&s[FREE], &s[ECHO_FREE]));
}

static void print_json(const struct samples *s, const struct options *o)
{
        json_t *root = json_pack("{s:i, s:I, s:b}", "schema", 1, "num_requests", (json_int_t)s[REQUESTS].n,
                                 "pinned", o->client_core >= 0 && o->server_core >= 0);

        for (int i = 0; i < N_SAMPLES; i++)
                json_object_set_new(root, s[i].key,
                                    json_pack("{s:I, s:I}", "median_ns", (json_int_t)s[i].median, "p99_ns",
                                              (json_int_t)s[i].p99));
        json_object_set_new(root, "ratio", json_real(ratio(&s[REQUESTS], &s[ECHOES])));
        json_object_set_new(root, "ratio_malloc", json_real(ratio(&s[MALLOC], &s[ECHO_MALLOC])));
        json_object_set_new(root, "ratio_free", json_real(ratio(&s[FREE], &s[ECHO_FREE])));
        json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(4));
        putchar('\n');
        json_decref(root);
}

/* ---- the program --------------------------------------------------------- */

static _Noreturn void usage(FILE *f, int status)
{
        fprintf(f,
                "Usage: bench-roundtrip (--socket PATH | --bfcd PROGRAM) [--json] [--pin CLIENT,SERVER | --pin none]\n"
                "                       [--batches N] [--pairs N] [--held N] [--max-ratio F]\n"
                "\n"
                "Times bfc_malloc and bfc_free through a running daemon, or one that it starts,\n"
                "against a bare epoll server. Ends with 1 if the ratio is above --max-ratio.\n");
        exit(status);
}

static long to_number(const char *word, long min)
{
        char *end;
        long n = strtol(word, &end, 10);

        if (*end || end == word || n < min || n > 10000000)
                die(word, "not a number that makes sense here");
        return n;
}

static void parse_pin(const char *word, struct options *o)
{
        if (strcmp(word, "none") == 0)
                o->client_core = o->server_core = -1;
        else if (sscanf(word, "%d,%d", &o->client_core, &o->server_core) != 2 || o->client_core < 0 ||
                 o->server_core < 0 || o->client_core >= CPU_SETSIZE || o->server_core >= CPU_SETSIZE)
                die(word, "give two cores, as 0,1, or none");
}

static struct options parse(int argc, char **argv)
{
        static const struct option longs[] = {
                { "socket", required_argument, NULL, 's' },  { "bfcd", required_argument, NULL, 'd' },
                { "json", no_argument, NULL, 'j' },          { "pin", required_argument, NULL, 'p' },
                { "batches", required_argument, NULL, 'b' }, { "pairs", required_argument, NULL, 'n' },
                { "held", required_argument, NULL, 'l' },    { "max-ratio", required_argument, NULL, 'r' },
                { "help", no_argument, NULL, 'h' },          { 0 },
        };
        struct options o = { .n_batches = 200, .n_pairs = 100, .n_held = 64, .server_core = 1 };
        int c;

        if (sysconf(_SC_NPROCESSORS_ONLN) < 2)
                o.server_core = 0;
        while ((c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
                switch (c) {
                case 's':
                        o.socket = optarg;
                        break;
                case 'd':
                        o.bfcd = optarg;
                        break;
                case 'j':
                        o.json = true;
                        break;
                case 'p':
                        parse_pin(optarg, &o);
                        break;
                case 'b':
                        o.n_batches = to_number(optarg, 1);
                        break;
                case 'n':
                        o.n_pairs = to_number(optarg, 1);
                        break;
                case 'l':
                        o.n_held = to_number(optarg, 0);
                        break;
                case 'r':
                        o.max_ratio = atof(optarg);
                        break;
                case 'h':
                        usage(stdout, EXIT_SUCCESS);
                default:
                        usage(stderr, 2);
                }
        }
        if (!o.socket == !o.bfcd || optind < argc)
                usage(stderr, 2);
        return o;
}

static void evaluate(struct samples *s)
{
        for (int i = 0; i < N_SAMPLES; i++) {
                qsort(s[i].ns, s[i].n, sizeof(*s[i].ns), compare);
                s[i].median = s[i].ns[s[i].n / 2];
                s[i].p99 = s[i].ns[s[i].n * 99 / 100];
        }
}

static void stop(pid_t pid, int signal_number)
{
        kill(pid, signal_number);
        waitpid(pid, NULL, 0);
}

int main(int argc, char **argv)
{
        struct samples s[N_SAMPLES] = {
                [MALLOC] = { .name = "malloc, daemon", .key = "malloc" },
                [FREE] = { .name = "free, daemon", .key = "free" },
                [ECHO_MALLOC] = { .name = "malloc's sizes, echo", .key = "echo_malloc" },
                [ECHO_FREE] = { .name = "free's sizes, echo", .key = "echo_free" },
                [REQUESTS] = { .name = "request, daemon", .key = "request" },
                [ECHOES] = { .name = "request, echo", .key = "echo" },
        };
        char path[128];
        struct options o = parse(argc, argv);
        pid_t echo_pid, daemon_pid = 0;
        cpu_set_t before;
        bfc_client *client;
        int echo;

        for (int i = 0; i < N_SAMPLES; i++) {
                s[i].ns = calloc((size_t)((o.n_batches + 1) * o.n_pairs * 2), sizeof(*s[i].ns));
                if (!s[i].ns)
                        die("memory", strerror(ENOMEM));
        }
        make_folder("bench-roundtrip");
        snprintf(path, sizeof(path), "%s/bfcd.sock", folder);
        if (o.bfcd)
                daemon_pid = daemon_start(o.bfcd, 64, o.server_core);
        echo = echo_start(&o, &echo_pid);
        client = client_start(o.bfcd ? path : o.socket, "bench-roundtrip", BFC_NO_CACHE);
        pin(0, o.client_core);
        if (o.socket && o.server_core >= 0)
                daemon_pid = daemon_pin(o.socket, o.server_core, &before);

        run(client, echo, &o, s);

        bfc_disconnect(client);
        close(echo);
        stop(echo_pid, SIGKILL);
        if (o.bfcd)
                stop(daemon_pid, SIGTERM);
        else if (daemon_pid > 0)
                sched_setaffinity(daemon_pid, sizeof(before), &before);
        evaluate(s);
        if (o.json)
                print_json(s, &o);
        else
                print_text(s);
        for (int i = 0; i < N_SAMPLES; i++)
                free(s[i].ns);
        return o.max_ratio > 0 && ratio(&s[REQUESTS], &s[ECHOES]) > o.max_ratio ? EXIT_FAILURE : EXIT_SUCCESS;
}
