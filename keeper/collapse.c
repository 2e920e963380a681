/* The process that collapses pages; see collapse.h. It is a keeper that keeps nothing.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/collapse.h"

#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <unistd.h>

#include "device/host_pages.h"
#include "keeper/start.h"
#include "keeper/wire.h"

#define WAIT_MS  20
#define PIECE_MS 2   /* for each page of 2 MiB */
#define MAX_MS   200 /* of a call; what takes longer is collapsed later, but for other calls of that time */
#define LOOK_US  1000
#define PAUSE_MS 2000 /* from one start to the next one */
#define END_MS   20

static struct {
        pthread_mutex_t mutex; /* guards a call, and what follows */
        struct keeper_link link;
        bool is_on;
        int64_t started_ms;
        bool is_late; /* there is no reply yet to the last call */
} own = { .mutex = PTHREAD_MUTEX_INITIALIZER, .link = { .fd = -1, .process = -1 } };

/* It starts again, unless it has just been started. */
static void start(void)
{
        int64_t now = keeper_now_ms();

        if (own.link.fd >= 0 || (own.started_ms != 0 && now - own.started_ms < PAUSE_MS))
                return;
        own.started_ms = now;
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

/* For the reply to the last call. */
static void await(int timeout_ms)
{
        struct pollfd p = { .fd = own.link.fd, .events = POLLIN };

        own.is_late = poll(&p, 1, timeout_ms) <= 0;
        if (!own.is_late)
                receive();
}

static void await_until(int64_t end_ms)
{
        int64_t left_ms = end_ms - keeper_now_ms();

        await(left_ms > 0 ? (int)left_ms : 0);
}

static void ask(int fd, uint64_t n_bytes, int64_t end_ms)
{
        struct keeper_request q = keeper_request_of(KEEPER_COLLAPSE);

        q.n_bytes[0] = n_bytes;
        if (keeper_send(own.link.fd, &q, sizeof(q), &fd, 1) == 0)
                await_until(end_ms);
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
static void collapse(int fd, uint64_t n_bytes, int64_t end_ms)
{
        if (own.is_late)
                await(0);
        start();
        if (own.link.fd >= 0 && !own.is_late)
                ask(fd, n_bytes, end_ms);
}

void keeper_collapse(int fd, uint64_t n_bytes)
{
        uint64_t n_ms = WAIT_MS + PIECE_MS * (n_bytes / HOST_HUGE_BYTES);
        int64_t end_ms = keeper_now_ms() + (n_ms < MAX_MS ? (int64_t)n_ms : MAX_MS);
        bool is_on;

        while (pthread_mutex_trylock(&own.mutex) != 0) {
                if (keeper_now_ms() >= end_ms)
                        return;
                usleep(LOOK_US);
        }
        is_on = own.is_on;
        if (is_on)
                collapse(fd, n_bytes, end_ms);
        pthread_mutex_unlock(&own.mutex);
        if (!is_on)
                host_pages_collapse(fd, n_bytes);
}
