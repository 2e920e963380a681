/* Destroying host extents without waiting; see punch.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/punch.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/clock.h"
#include "daemon/log.h"

#define RETRY_MS 100   /* after something that may be better later */
#define STOP_MS  10000 /* for sending what is left; the helper reads at once, unless the machine hangs */

TAILQ_HEAD(punch_list, punch_request);

struct punch {
        pthread_t thread;
        bool has_thread;
        int wake_fd;
        pthread_mutex_t mutex;   /* guards what follows, up to the blank line */
        struct punch_list fresh; /* submitted */
        bool stop;

        /* The thread's: */
        struct host_punch helper;
        struct punch_list unsent;
        struct punch_list sent;
        uint64_t next_tag;
        uint64_t retry_ms; /* nothing is sent before; 0: at once */
        struct log_limit log;
};

static void punch_wake(struct punch *p)
{
        uint64_t one = 1;

        (void)!write(p->wake_fd, &one, sizeof(one));
}

static void request_done(struct punch_request *request, int result)
{
        close(request->fd);
        request->fd = -1;
        request->done(request, result);
}

/* ---- the helper ------------------------------------------------------------ */

/* What it was sent and did not answer is sent again, in its order. */
static void punch_lose_helper(struct punch *p)
{
        int status = 0;

        if (p->helper.pid > 0 && waitpid(p->helper.pid, &status, WNOHANG) == p->helper.pid)
                log_limited(&p->log, LOG_LEVEL_WARNING,
                            "the process 'bfcd-punch' (pid %d), which returns host memory to the kernel, "
                            "ended %s %d: bfcd starts it again",
                            (int)p->helper.pid, WIFSIGNALED(status) ? "by signal" : "with status",
                            WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        host_punch_leave(&p->helper);
        TAILQ_CONCAT(&p->sent, &p->unsent, link);
        TAILQ_CONCAT(&p->unsent, &p->sent, link);
}

static void punch_start_helper(struct punch *p)
{
        int r = host_punch_start(&p->helper);

        if (r == 0) {
                log_debug("the process 'bfcd-punch' has pid %d", (int)p->helper.pid);
                return;
        }
        log_limited(&p->log, LOG_LEVEL_ERROR,
                    "the process 'bfcd-punch', which returns host memory to the kernel, could not be "
                    "started: %s; freed memory stays charged until it runs",
                    strerror(-r));
        p->retry_ms = clock_ms() + RETRY_MS;
}

static void punch_send(struct punch *p)
{
        struct punch_request *request;

        if (p->retry_ms != 0 && clock_ms() < p->retry_ms)
                return;
        p->retry_ms = 0;
        if (p->helper.fd < 0 && !TAILQ_EMPTY(&p->unsent))
                punch_start_helper(p);
        while (p->helper.fd >= 0 && (request = TAILQ_FIRST(&p->unsent))) {
                struct host_punch_request message = { .n_bytes = request->n_bytes, .lane = request->lane };
                int r;

                message.tag = request->tag = p->next_tag++;
                r = host_punch_send(&p->helper, &message, request->fd);
                if (r == -EAGAIN)
                        p->retry_ms = clock_ms() + RETRY_MS; /* or when it answers */
                if (r < 0)
                        return; /* another error: it has ended, and the pidfd says so */
                TAILQ_REMOVE(&p->unsent, request, link);
                TAILQ_INSERT_TAIL(&p->sent, request, link);
        }
}

static void punch_receive(struct punch *p)
{
        struct host_punch_answer answer;

        while (p->helper.fd >= 0 && host_punch_receive(&p->helper, &answer) == 0) {
                struct punch_request *request = TAILQ_FIRST(&p->sent);

                while (request && request->tag != answer.tag)
                        request = TAILQ_NEXT(request, link);
                if (!request) /* answered twice */
                        continue;
                TAILQ_REMOVE(&p->sent, request, link);
                if (answer.result == -EAGAIN) {
                        TAILQ_INSERT_TAIL(&p->unsent, request, link);
                        p->retry_ms = clock_ms() + RETRY_MS;
                } else {
                        p->retry_ms = 0;
                        request_done(request, answer.result);
                }
        }
}

/* ---- the thread ------------------------------------------------------------- */

/* What was submitted; false: it is to end. */
static bool punch_take(struct punch *p)
{
        uint64_t n;
        bool goes_on;

        (void)!read(p->wake_fd, &n, sizeof(n));
        pthread_mutex_lock(&p->mutex);
        TAILQ_CONCAT(&p->unsent, &p->fresh, link);
        goes_on = !p->stop;
        pthread_mutex_unlock(&p->mutex);
        return goes_on;
}

static void punch_wait(struct punch *p)
{
        struct pollfd fds[] = { { .fd = p->wake_fd, .events = POLLIN },
                                { .fd = p->helper.fd, .events = POLLIN },
                                { .fd = p->helper.pidfd, .events = POLLIN } };
        int timeout_ms = p->retry_ms != 0 ? RETRY_MS : -1;

        (void)poll(fds, 3, timeout_ms);
        if (fds[1].revents != 0)
                punch_receive(p);
        if (fds[2].revents != 0)
                punch_lose_helper(p);
}

static void *punch_main(void *userdata)
{
        struct punch *p = userdata;
        uint64_t stopped_ms = 0;

        for (;;) {
                bool goes_on = punch_take(p);

                if (!goes_on && stopped_ms == 0)
                        stopped_ms = clock_ms();
                punch_send(p);
                if (!goes_on && (TAILQ_EMPTY(&p->unsent) || clock_ms() - stopped_ms >= STOP_MS))
                        return NULL;
                punch_wait(p);
        }
}

static int punch_start_thread(struct punch *p)
{
        sigset_t all, before;
        int r;

        /* Signals belong to the loop's thread. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = -pthread_create(&p->thread, NULL, punch_main, p);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        p->has_thread = r == 0;
        return r;
}

/* ---- for its users ------------------------------------------------------------- */

int punch_new(const struct host_punch *helper, struct punch **ret)
{
        struct punch *p = calloc(1, sizeof(*p));
        int r;

        if (!p)
                return -ENOMEM;
        p->helper = HOST_PUNCH_NONE;
        TAILQ_INIT(&p->fresh);
        TAILQ_INIT(&p->unsent);
        TAILQ_INIT(&p->sent);
        p->next_tag = 1;
        pthread_mutex_init(&p->mutex, NULL);
        p->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        r = p->wake_fd < 0 ? -errno : 0;
        if (r == 0) {
                p->helper = *helper;
                r = punch_start_thread(p);
        }
        if (r < 0) {
                p->helper = HOST_PUNCH_NONE; /* the caller's still */
                punch_free(p);
                return r;
        }
        *ret = p;
        return 0;
}

void punch_submit(struct punch *p, struct punch_request *request)
{
        assert(!punch_is_stopped(p));
        pthread_mutex_lock(&p->mutex);
        TAILQ_INSERT_TAIL(&p->fresh, request, link);
        pthread_mutex_unlock(&p->mutex);
        punch_wake(p);
}

static void discarded(struct punch_request *request, int result)
{
        (void)result; /* there is no record any more that could say so */
        free(request);
}

/* After the thread's end. */
static void punch_send_now(struct punch *p, int fd, uint64_t n_bytes, uint32_t lane)
{
        struct host_punch_request message = { .tag = p->next_tag++, .n_bytes = n_bytes, .lane = lane };
        uint64_t began_ms = clock_ms();
        int r = -EPIPE;

        while (p->helper.fd >= 0 && clock_ms() - began_ms < STOP_MS) {
                struct pollfd poll_fd = { .fd = p->helper.fd, .events = POLLOUT };

                r = host_punch_send(&p->helper, &message, fd);
                if (r != -EAGAIN)
                        break;
                (void)poll(&poll_fd, 1, 1);
        }
        if (r < 0 && r != -EAGAIN) /* the helper has ended, and is not restarted now */
                (void)host_punch_whole(fd, n_bytes);
        close(fd);
}

void punch_discard(struct punch *p, int fd, uint64_t n_bytes, uint32_t lane)
{
        struct punch_request *request;

        if (!p->has_thread) {
                punch_send_now(p, fd, n_bytes, lane);
                return;
        }
        request = calloc(1, sizeof(*request));
        if (!request) {
                (void)host_punch_whole(fd, n_bytes);
                close(fd);
                return;
        }
        *request = (struct punch_request){ .fd = fd, .n_bytes = n_bytes, .lane = lane, .done = discarded };
        punch_submit(p, request);
}

static void punch_give_up(struct punch_list *list)
{
        struct punch_request *request;

        while ((request = TAILQ_FIRST(list))) {
                TAILQ_REMOVE(list, request, link);
                close(request->fd);
                request->fd = -1;
                if (request->done == discarded)
                        free(request);
        }
}

void punch_stop(struct punch *p)
{
        if (!p || !p->has_thread)
                return;
        pthread_mutex_lock(&p->mutex);
        p->stop = true;
        pthread_mutex_unlock(&p->mutex);
        punch_wake(p);
        pthread_join(p->thread, NULL);
        p->has_thread = false;
        punch_give_up(&p->fresh);
        punch_give_up(&p->unsent);
        punch_give_up(&p->sent);
}

bool punch_is_stopped(const struct punch *p)
{
        return !p->has_thread;
}

struct punch *punch_free(struct punch *p)
{
        if (!p)
                return NULL;
        punch_stop(p);
        host_punch_leave(&p->helper);
        if (p->wake_fd >= 0)
                close(p->wake_fd);
        pthread_mutex_destroy(&p->mutex);
        free(p);
        return NULL;
}
