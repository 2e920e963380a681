/* The process that collapses pages; see collapse.h. It is a keeper that keeps nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/collapse.h"

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>

#include "device/host_pages.h"
#include "keeper/start.h"
#include "keeper/wire.h"

#define WAIT_MS  20
#define PIECE_MS 2   /* for each page of 2 MiB */
#define MAX_MS   200 /* of a call; what takes longer is collapsed later, but for other calls of that time */
#define LOOK_US  1000
#define PAUSE_S  1 /* from one start to the next one */
#define END_MS   20

static struct {
        pthread_mutex_t mutex; /* guards a call, and what follows */
        struct keeper_link link;
        bool is_on;
        time_t started_s;
        bool is_late; /* there is no reply yet to the last call */
} own = { .mutex = PTHREAD_MUTEX_INITIALIZER, .link = { .fd = -1, .process = -1 } };

/* It starts again, unless it has just been started. */
static void start(void)
{
        struct timespec now = { 0 };

        clock_gettime(CLOCK_MONOTONIC, &now);
        if (own.link.fd >= 0 || (own.started_s != 0 && now.tv_sec - own.started_s <= PAUSE_S))
                return;
        own.started_s = now.tv_sec;
        own.is_late = false;
        if (keeper_start_own(KEEPER_HOST, NULL, &own.link) < 0)
                own.link = KEEPER_LINK_NONE;
}

static void receive(void)
{
        struct keeper_reply reply;
        int fds[KEEPER_FDS];
        size_t n_fds;

        if (keeper_receive(own.link.fd, &reply, sizeof(reply), fds, &n_fds) < 0)
                keeper_end(&own.link, END_MS);
        else
                while (n_fds > 0)
                        close(fds[--n_fds]);
}

/* The moment at which a call returns. */
static struct timespec end_of(uint64_t n_bytes)
{
        uint64_t n_ms = WAIT_MS + PIECE_MS * (n_bytes / HOST_HUGE_BYTES), n_ns;
        struct timespec end = { 0 };

        clock_gettime(CLOCK_MONOTONIC, &end);
        n_ns = (uint64_t)end.tv_nsec + (n_ms < MAX_MS ? n_ms : MAX_MS) * 1000000;
        end.tv_sec += (time_t)(n_ns / 1000000000);
        end.tv_nsec = (long)(n_ns % 1000000000);
        return end;
}

static int ms_until(const struct timespec *end)
{
        struct timespec now = { 0 };
        int64_t n_ms;

        clock_gettime(CLOCK_MONOTONIC, &now);
        n_ms = (int64_t)(end->tv_sec - now.tv_sec) * 1000 + (end->tv_nsec - now.tv_nsec) / 1000000;
        return n_ms > 0 ? (int)n_ms : 0;
}

/* For the reply to the last call. */
static void await(int timeout_ms)
{
        struct pollfd p = { .fd = own.link.fd, .events = POLLIN };

        own.is_late = poll(&p, 1, timeout_ms) <= 0;
        if (!own.is_late)
                receive();
}

static void ask(int fd, uint64_t n_bytes, const struct timespec *end)
{
        struct keeper_request q = keeper_request_of(KEEPER_COLLAPSE);

        q.n_bytes[0] = n_bytes;
        if (keeper_send(own.link.fd, &q, sizeof(q), &fd, 1) == 0)
                await(ms_until(end));
        else
                keeper_end(&own.link, END_MS);
}

void keeper_start_collapsing(void)
{
        pthread_mutex_lock(&own.mutex);
        own.is_on = true;
        start();
        pthread_mutex_unlock(&own.mutex);
}

void keeper_stop_collapsing(void)
{
        pthread_mutex_lock(&own.mutex);
        own.is_on = false;
        keeper_end(&own.link, END_MS);
        pthread_mutex_unlock(&own.mutex);
}

/* With the mutex. */
static void collapse(int fd, uint64_t n_bytes, const struct timespec *end)
{
        if (own.is_late)
                await(0);
        start();
        if (own.link.fd >= 0 && !own.is_late)
                ask(fd, n_bytes, end);
}

void keeper_collapse(int fd, uint64_t n_bytes)
{
        struct timespec end = end_of(n_bytes);
        bool is_on;

        while (pthread_mutex_trylock(&own.mutex) != 0) {
                if (ms_until(&end) == 0)
                        return;
                usleep(LOOK_US);
        }
        is_on = own.is_on;
        if (is_on)
                collapse(fd, n_bytes, &end);
        pthread_mutex_unlock(&own.mutex);
        if (!is_on)
                host_pages_collapse(fd, n_bytes);
}
