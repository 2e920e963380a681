/* Neighbours; see hostile.h. Each is a process that runs until it is killed.
 * None parses more than it needs: its core is for sending requests.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/hostile.h"

#include <bfcclient.h>

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/bench/daemon.h"
#include "tests/integration/raw.h"

#define N_SESSIONS    8u    /* of neighbours that keep sessions open */
#define BATCH_BYTES   8192u /* of requests in one write */
#define N_WAITERS     40u   /* sessions, each with */
#define N_WAITS       64u   /* requests that wait */
#define WAIT_MS       100u
#define WAIT_BYTES    (UINT64_C(1) << 21)
#define DEATH_REFS    16u     /* blocks of a process that dies */
#define LONG_MS       2000000 /* longer than any run */
#define DEATHS_MS     10      /* between two deaths: a hundred a second */
#define HALF_FRAME    600u
#define RANDOM_FACTOR UINT64_C(6364136223846793005)

static void count(struct stage *s, uint64_t n)
{
        atomic_fetch_add_explicit(&s->n_acts, n, memory_order_relaxed);
}

static void is_up(struct stage *s)
{
        atomic_fetch_add(&s->n_up, 1);
}

static void wait_ms(int ms)
{
        (void)poll(NULL, 0, ms);
}

/* Tries again until the daemon accepts it. */
static struct raw *connect_session(const struct stage *s)
{
        struct raw *raw;

        while (!(raw = raw_connect(s->socket, NEIGHBOUR)))
                wait_ms(1);
        return raw;
}

/* ---- batches of requests --------------------------------------------------- */

struct batch {
        uint8_t bytes[BATCH_BYTES];
        size_t n_bytes, n_requests;
};

/* As many as fit: statistics, frees of nothing, mallocs that cannot be granted. */
static void batch_of_requests(struct batch *b)
{
        Bfcd__Usage usage = BFCD__USAGE__INIT;
        Bfcd__Free nothing = BFCD__FREE__INIT;
        Bfcd__Malloc much = BFCD__MALLOC__INIT;

        much.n_bytes = UINT64_C(1) << 39;
        nothing.block_id = UINT64_C(1) << 60;
        b->n_bytes = b->n_requests = 0;
        while (b->n_bytes + 64 < BATCH_BYTES) {
                Bfcd__Request r = BFCD__REQUEST__INIT;

                r.id = ++b->n_requests;
                r.body_case = BFCD__REQUEST__BODY_USAGE;
                r.usage = &usage;
                if (r.id % 3 == 1) {
                        r.body_case = BFCD__REQUEST__BODY_FREE;
                        r.free = &nothing;
                } else if (r.id % 3 == 2) {
                        r.body_case = BFCD__REQUEST__BODY_MALLOC;
                        r.malloc = &much;
                }
                b->n_bytes += raw_pack(&r, b->bytes + b->n_bytes);
        }
}

static void batch_of_lists(struct batch *b)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__BLOCKS, BFCD__LIST__KIND__SESSIONS,
                                                  BFCD__LIST__KIND__STATUS };
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &list);

        b->n_bytes = b->n_requests = 0;
        while (b->n_bytes + 64 < BATCH_BYTES) {

                r.id = ++b->n_requests;
                list.kind = kinds[r.id % 3];
                b->n_bytes += raw_pack(&r, b->bytes + b->n_bytes);
        }
}

/* All that a monitor may ask for. */
static void batch_of_monitor(struct batch *b)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__STATUS,  BFCD__LIST__KIND__PARTITIONS,
                                                  BFCD__LIST__KIND__TENANTS, BFCD__LIST__KIND__SESSIONS,
                                                  BFCD__LIST__KIND__BLOCKS,  BFCD__LIST__KIND__GRANTS };
        const size_t n_kinds = sizeof(kinds) / sizeof(kinds[0]);
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Explain explain = BFCD__EXPLAIN__INIT;

        b->n_bytes = b->n_requests = 0;
        while (b->n_bytes + 64 < BATCH_BYTES) {
                Bfcd__Request r = BFCD__REQUEST__INIT;

                r.id = ++b->n_requests;
                r.body_case = BFCD__REQUEST__BODY_EXPLAIN;
                r.explain = &explain;
                if (r.id % (n_kinds + 1) < n_kinds) {
                        list.kind = kinds[r.id % (n_kinds + 1)];
                        r.body_case = BFCD__REQUEST__BODY_LIST;
                        r.list = &list;
                }
                b->n_bytes += raw_pack(&r, b->bytes + b->n_bytes);
        }
}

/* Tries again until the daemon accepts it. */
static struct raw *connect_monitor(const struct stage *s)
{
        struct raw *raw;

        while (!(raw = raw_connect(s->monitor_socket, NULL)))
                wait_ms(1);
        return raw;
}

/* Sends the batch for ever, and reads, without a look, what comes. */
static _Noreturn void pour(struct stage *s, const struct batch *b,
                           struct raw *(*connect_again)(const struct stage *s))
{
        static uint8_t drain[1 << 16];
        struct raw *raw = connect_again(s);
        size_t at = 0;

        is_up(s);
        for (;;) {
                struct pollfd p = { .fd = raw->fd, .events = POLLIN | POLLOUT };
                ssize_t n;

                (void)poll(&p, 1, -1);
                while (recv(raw->fd, drain, sizeof(drain), MSG_DONTWAIT) > 0)
                        ;
                n = send(raw->fd, b->bytes + at, b->n_bytes - at, MSG_NOSIGNAL | MSG_DONTWAIT);
                if (n > 0) {
                        at = (at + (size_t)n) % b->n_bytes;
                        count(s, at == 0 ? b->n_requests : 0);
                } else if (errno != EAGAIN) {
                        raw_close(raw);
                        raw = connect_again(s);
                        at = 0;
                }
        }
}

/* Sends without reading until the daemon takes no more. True: the connection is still open. */
static bool stuff(struct stage *s, struct raw *raw, const struct batch *b)
{
        for (;;) {
                ssize_t n = send(raw->fd, b->bytes, b->n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

                if (n != (ssize_t)b->n_bytes)
                        return n >= 0 || errno == EAGAIN;
                count(s, b->n_requests);
        }
}

/* ---- kinds ----------------------------------------------------------------- */

/* What every job does, as fast as it can: a malloc, a free, each waited for. */
static void act_polite(struct stage *s)
{
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = s->socket,
                                 .tenant = NEIGHBOUR,
                                 .flags = BFC_NO_CACHE | BFC_NO_THREAD };
        bfc_client *client;
        void *p;

        while (bfc_connect(&o, &client) < 0)
                wait_ms(1);
        is_up(s);
        for (;;) {
                if (bfc_malloc(client, 4000, &p) < 0 || bfc_free(client, p) < 0)
                        die("a polite neighbour", bfc_last_error());
                count(s, 2);
        }
}

static void act_pour(struct stage *s)
{
        static struct batch b;

        batch_of_requests(&b);
        pour(s, &b, connect_session);
}

static void act_lists(struct stage *s)
{
        static struct batch b;

        batch_of_lists(&b);
        pour(s, &b, connect_session);
}

static void act_monitor(struct stage *s)
{
        static struct batch b;

        batch_of_monitor(&b);
        pour(s, &b, connect_monitor);
}

/* Floods without reading; connects again when the daemon takes no more. */
static void act_flood(struct stage *s)
{
        static struct batch b;

        batch_of_requests(&b);
        is_up(s);
        for (;;) {
                struct raw *raw = connect_session(s);

                (void)stuff(s, raw, &b);
                raw_close(raw);
        }
}

/* Sessions full of replies that are never read. */
static void act_unread(struct stage *s)
{
        static struct batch b;
        struct raw *raws[N_SESSIONS];

        batch_of_lists(&b);
        for (size_t i = 0; i < N_SESSIONS; i++)
                raws[i] = connect_session(s);
        is_up(s);
        for (;;) {
                for (size_t i = 0; i < N_SESSIONS; i++) {
                        if (stuff(s, raws[i], &b))
                                continue;
                        raw_close(raws[i]);
                        raws[i] = connect_session(s);
                }
                wait_ms(1);
        }
}

/* Connects and disconnects, every other time with a hello between. */
static void act_storm(struct stage *s)
{
        struct raw *raw;

        is_up(s);
        for (uint64_t i = 0;; i++) {
                if (raw_open(s->socket, &raw) < 0)
                        continue;
                if (i % 2)
                        (void)raw_hello(raw, NEIGHBOUR, NULL);
                raw_close(raw);
                count(s, 1);
        }
}

static void act_garbage(struct stage *s)
{
        uint64_t random = (uint64_t)getpid() * RANDOM_FACTOR, bytes[64];
        struct raw *raw;

        is_up(s);
        for (uint64_t i = 0;; i++) {
                for (size_t k = 0; k < 64; k++)
                        bytes[k] = random = random * RANDOM_FACTOR + 1442695040888963407;
                if (i % 4 == 0)
                        ((uint8_t *)bytes)[2] = ((uint8_t *)bytes)[3] = 0; /* a length that can be */
                if (i % 2)
                        raw = connect_session(s);
                else if (raw_open(s->socket, &raw) < 0)
                        continue;
                (void)send(raw->fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT);
                raw_close(raw);
                count(s, 1);
        }
}

/* Half a frame: before the hello it is held, after it one byte comes at a time, each of which
 * wakes the daemon for nothing. */
static void act_half(struct stage *s)
{
        uint8_t half[HALF_FRAME] = { 0, 0, 1, 0 }; /* of 65,536 bytes */
        struct raw *silent[N_SESSIONS / 2], *raw = connect_session(s);
        uint64_t n = 0;

        for (size_t i = 0; i < N_SESSIONS / 2; i++) {
                if (raw_open(s->socket, &silent[i]) == 0)
                        (void)raw_send_bytes(silent[i], half, sizeof(half));
        }
        (void)raw_send_bytes(raw, half, 4);
        is_up(s);
        for (;; n++) {
                if (n < 65000 && send(raw->fd, half, 1, MSG_NOSIGNAL) == 1) {
                        count(s, 1);
                        continue;
                }
                raw_close(raw);
                raw = connect_session(s);
                (void)raw_send_bytes(raw, half, 4);
                n = 0;
        }
}

static void hold_blocks(const struct stage *s, int pipe_fd)
{
        struct raw *raw = connect_session(s);
        Bfcd__Block block;

        for (unsigned i = 0; i < DEATH_REFS; i++)
                (void)raw_malloc(raw, 0, (i % 4 + 1) << 16, &block);
        (void)!write(pipe_fd, "u", 1);
        wait_ms(LONG_MS);
        _exit(0);
}

static pid_t start_holder(const struct stage *s, int pipe_fd)
{
        pid_t parent = getpid(), pid = fork();

        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() != parent) /* it was gone before that */
                        _exit(0);
                hold_blocks(s, pipe_fd);
        }
        return pid;
}

/* Children that hold blocks die by kill -9, a hundred times a second all together. */
static void act_deaths(struct stage *s)
{
        pid_t pids[2];
        int fds[2];
        char c;

        if (pipe(fds) < 0)
                die("pipe", strerror(errno));
        for (int i = 0; i < 2; i++)
                pids[i] = start_holder(s, fds[1]);
        is_up(s);
        for (uint64_t i = 0;; i++) {
                wait_ms(DEATHS_MS * 4); /* there are four of us */
                (void)!read(fds[0], &c, 1);
                kill(pids[i % 2], SIGKILL);
                (void)waitpid(pids[i % 2], NULL, 0);
                pids[i % 2] = start_holder(s, fds[1]);
                count(s, 1);
        }
}

/* Thousands of Mallocs that wait for memory that is never released, as many as may wait for each
 * session; refused ones are sent again. */
static void act_waits(struct stage *s)
{
        static struct raw *raws[N_WAITERS];
        Bfcd__Malloc much = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &much);
        struct raw *holder = connect_session(s);
        Bfcd__Block block;
        Bfcd__Reply *reply;

        much.n_bytes = WAIT_BYTES;
        much.wait_ms = WAIT_MS;
        while (raw_malloc(holder, 0, WAIT_BYTES, &block) == 0)
                ;
        for (size_t i = 0; i < N_WAITERS; i++)
                raws[i] = connect_session(s);
        is_up(s);
        for (;;) {
                for (size_t i = 0; i < N_WAITERS * N_WAITS; i++)
                        (void)raw_send(raws[i / N_WAITS], &r);
                for (size_t i = 0; i < N_WAITERS * N_WAITS; i++) {
                        if (raw_receive(raws[i / N_WAITS], LONG_MS, &reply) != 0)
                                die("a neighbour that waits", "no answer");
                        bfcd__reply__free_unpacked(reply, NULL);
                        count(s, 1);
                }
        }
}

/* Holds all that its limits let it have, and stops in the middle of asking for more. */
static void act_stopped(struct stage *s)
{
        static struct batch b;
        struct raw *raw = connect_session(s);
        Bfcd__Block block;

        batch_of_requests(&b);
        while (raw_malloc(raw, 0, 1 << 21, &block) == 0)
                count(s, 1);
        (void)stuff(s, raw, &b);
        is_up(s);
        raise(SIGSTOP);
        wait_ms(LONG_MS);
}

/* No client of the daemon at all: what busy processors alone cost. */
static void act_busy(struct stage *s)
{
        is_up(s);
        for (;;)
                count(s, 1);
}

const struct hostile polite = { "polite", "polite", act_polite };
const struct hostile busy = { "busy", "busy without the daemon", act_busy };

const struct hostile hostiles[] = {
        { "flood", "floods, reads nothing", act_flood },
        { "pour", "pours requests", act_pour },
        { "lists", "pours lists", act_lists },
        { "monitor", "monitors, pouring lists", act_monitor },
        { "storm", "connects, disconnects", act_storm },
        { "garbage", "sends garbage", act_garbage },
        { "unread", "stops reading", act_unread },
        { "half", "holds half a frame", act_half },
        { "deaths", "dies by kill -9", act_deaths },
        { "waits", "waits, with thousands", act_waits },
        { "stopped", "is stopped, holding all", act_stopped },
};
const size_t n_hostiles = sizeof(hostiles) / sizeof(hostiles[0]);
