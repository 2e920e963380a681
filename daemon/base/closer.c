/* The closer; see closer.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/closer.h"

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define CLOSER_IDLE_S 5

/* Ignored by default, so its delivery after the timer was disarmed is harmless. */
#define CLOSER_SIGNAL SIGURG

#ifndef sigev_notify_thread_id /* glibc has no name for it in some versions */
#define sigev_notify_thread_id _sigev_un._tid
#endif

static struct {
        pthread_mutex_t mutex;
        pthread_cond_t wake;
        int *fds; /* that wait; the last is closed first */
        size_t n_fds, n_room;
        size_t n_threads, n_idle;
        bool has_handler;
} closer = { .mutex = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER };

static void on_signal(int number)
{
        (void)number; /* that it came interrupts what the thread waits for in the kernel */
}

/* ---- a thread ------------------------------------------------------------ */

/* Without the timer a close merely takes as long as it takes. */
static bool make_timer(timer_t *ret)
{
        struct sigevent event = { .sigev_notify = SIGEV_THREAD_ID, .sigev_signo = CLOSER_SIGNAL };

        event.sigev_notify_thread_id = gettid();
        return timer_create(CLOCK_MONOTONIC, &event, ret) == 0;
}

/* Again and again: the first signal may come before the close has begun to wait. */
static void close_with_time_limit(int fd, const timer_t *timer)
{
        const struct timespec limit = { .tv_nsec = CLOSER_TIME_LIMIT_MS * 1000000L };
        const struct itimerspec armed = { limit, limit }, disarmed = { { 0, 0 }, { 0, 0 } };

        if (timer)
                timer_settime(*timer, 0, &armed, NULL);
        close(fd);
        if (timer)
                timer_settime(*timer, 0, &disarmed, NULL);
}

/* With the mutex held. false: no work came in time. */
static bool wait_for_work(void)
{
        struct timespec end;
        int r = 0;

        clock_gettime(CLOCK_REALTIME, &end);
        end.tv_sec += CLOSER_IDLE_S;
        closer.n_idle++;
        while (closer.n_fds == 0 && r == 0)
                r = pthread_cond_timedwait(&closer.wake, &closer.mutex, &end);
        closer.n_idle--;
        return closer.n_fds > 0;
}

static void *closer_main(void *unused)
{
        timer_t timer;
        bool has_timer = make_timer(&timer);

        (void)unused;
        pthread_mutex_lock(&closer.mutex);
        while (wait_for_work()) {
                int fd = closer.fds[--closer.n_fds];

                pthread_mutex_unlock(&closer.mutex);
                close_with_time_limit(fd, has_timer ? &timer : NULL);
                pthread_mutex_lock(&closer.mutex);
        }
        closer.n_threads--;
        pthread_mutex_unlock(&closer.mutex);
        if (has_timer)
                timer_delete(timer);
        return NULL;
}

/* ---- the list ------------------------------------------------------------ */

/* With the mutex held, as all below. */
static bool closer_add(int fd)
{
        size_t n_room = closer.n_room > 0 ? 2 * closer.n_room : 64;
        int *fds;

        if (closer.n_fds == closer.n_room) {
                fds = realloc(closer.fds, n_room * sizeof(*fds));
                if (!fds)
                        return false;
                closer.fds = fds;
                closer.n_room = n_room;
        }
        closer.fds[closer.n_fds++] = fd;
        return true;
}

/* The threads take no signal but the one of their timer. */
static bool closer_start_thread(void)
{
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
        sigset_t others, before;
        pthread_attr_t attributes;
        pthread_t thread;
        int r;

        if (!closer.has_handler)
                closer.has_handler = sigaction(CLOSER_SIGNAL, &action, NULL) == 0;
        if (pthread_attr_init(&attributes) != 0)
                return false;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        sigfillset(&others);
        sigdelset(&others, CLOSER_SIGNAL);
        pthread_sigmask(SIG_SETMASK, &others, &before);
        r = pthread_create(&thread, &attributes, closer_main, NULL);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        if (r != 0)
                return false;
        closer.n_threads++;
        return true;
}

void closer_close(int fd)
{
        bool is_added;

        pthread_mutex_lock(&closer.mutex);
        is_added = closer_add(fd);
        if (is_added && closer.n_fds > closer.n_idle && closer.n_threads < CLOSER_THREADS &&
            !closer_start_thread() && closer.n_threads == 0) {
                closer.n_fds--; /* no thread would take it */
                is_added = false;
        }
        pthread_cond_signal(&closer.wake);
        pthread_mutex_unlock(&closer.mutex);
        if (!is_added) /* neither memory nor a thread: the caller has to wait */
                close(fd);
}

size_t closer_n_waiting(void)
{
        size_t n;

        pthread_mutex_lock(&closer.mutex);
        n = closer.n_fds;
        pthread_mutex_unlock(&closer.mutex);
        return n;
}

size_t closer_n_busy(void)
{
        size_t n;

        pthread_mutex_lock(&closer.mutex);
        n = closer.n_threads - closer.n_idle;
        pthread_mutex_unlock(&closer.mutex);
        return n;
}
