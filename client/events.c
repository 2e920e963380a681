/* Events and their thread; see events.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The thread is stopped by shutting down the socket for reading: it wakes up with
 * an end of file, and the daemon, to which that is no hang-up, still hears a
 * goodbye on the other socket. */
#include "client/events.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/frame.h"

/* Address space more than memory; a driver's calls are made on it. */
#define EVENTS_STACK_BYTES (512u * 1024u)
#define EVENTS_QUEUE_MAX   4096u
#define EVENTS_MAX_EXTENTS 64u /* in one Retire */
#define EVENTS_RETRY_MS    5

struct events {
        int fd;
        const struct events_ops *ops;
        void *userdata;
        pthread_t thread;
        bool running;      /* it is to be joined */
        Bfcd__Event *busy; /* without a thread: to be tried again */
        int error;         /* the same: why it ended */
        struct frame_reader *reader;
        struct frame_writer *writer;
};

static int answer(struct events *e, const Bfcd__EventReply *reply)
{
        uint8_t *payload;
        int r = frame_writer_add(e->writer, bfcd__event_reply__get_packed_size(reply), NULL, 0, &payload);

        if (r < 0)
                return r;
        bfcd__event_reply__pack(reply, payload);
        /* The daemon has few unanswered: the socket's buffer has room. */
        return frame_writer_flush(e->writer, e->fd) == 0 ? 0 : -ECONNRESET;
}

static int on_retire(struct events *e, const Bfcd__Retire *retire)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Retired retired = BFCD__RETIRED__INIT;
        int r;

        if (retire->n_extent_ids == 0 || retire->n_extent_ids > EVENTS_MAX_EXTENTS)
                return -EPROTO;
        r = e->ops->retire(e->userdata, retire->extent_ids, retire->n_extent_ids);
        if (r < 0)
                return r;
        retired.sequence = retire->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_RETIRED;
        reply.retired = &retired;
        return answer(e, &reply);
}

static int on_trim(struct events *e, const Bfcd__Trim *trim)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Trimmed trimmed = BFCD__TRIMMED__INIT;
        int r = e->ops->trim(e->userdata, trim, &trimmed.n_bytes);

        if (r < 0)
                return r;
        trimmed.sequence = trim->sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_TRIMMED;
        reply.trimmed = &trimmed;
        return answer(e, &reply);
}

/* An event of a later version is none that this one asked for. What needs no answer and no
 * deed is read and forgotten. */
static int on_event(struct events *e, const Bfcd__Event *event)
{
        switch (event->body_case) {
        case BFCD__EVENT__BODY_RETIRE:
                return on_retire(e, event->retire);
        case BFCD__EVENT__BODY_TRIM:
                return on_trim(e, event->trim);
        case BFCD__EVENT__BODY_QUOTA_CHANGED:
        case BFCD__EVENT__BODY_SHUTDOWN:
                return 0;
        default:
                return -EPROTO;
        }
}

/* False: the thread is to end, or the daemon is gone. */
static bool pause_a_little(const struct events *e)
{
        struct pollfd p = { .fd = e->fd, .events = POLLRDHUP };

        return poll(&p, 1, EVENTS_RETRY_MS) == 0;
}

static int on_frame(struct events *e, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Event *event = bfcd__event__unpack(NULL, n_bytes, payload);
        int r;

        if (!event)
                return -EPROTO;
        while ((r = on_event(e, event)) == -EBUSY && e->running)
                if (!pause_a_little(e)) {
                        r = -ECANCELED;
                        break;
                }
        if (r == -EBUSY)
                e->busy = event;
        else
                bfcd__event__free_unpacked(event, NULL);
        return r;
}

static int handle_frames(struct events *e)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r;

        while ((r = frame_reader_next(e->reader, &payload, &n_bytes)) == 0) {
                r = on_frame(e, payload, n_bytes);
                if (r < 0)
                        return r;
        }
        return r < 0 ? r : 0;
}

static int read_events(struct events *e, int flags)
{
        int r;

        do
                r = handle_frames(e);
        while (r == 0 && (r = frame_reader_receive(e->reader, e->fd, flags)) == 0);
        return r;
}

static void *events_run(void *userdata)
{
        struct events *e = userdata;
        int r = read_events(e, 0);

        /* An end of file is events_stop(), or a daemon that ended the session. So it is
         * while a Retire could not be done. */
        if (r < 0 && r != -ECANCELED)
                e->ops->failed(e->userdata, r == -EPROTO ? -EPROTO : -ECONNRESET);
        e->ops->ended(e->userdata);
        return NULL;
}

static int thread_start(struct events *e)
{
        pthread_attr_t attr;
        sigset_t all, before;
        int r = pthread_attr_init(&attr);

        if (r != 0)
                return -r;
        pthread_attr_setstacksize(&attr, EVENTS_STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        e->running = true; /* the thread looks at it */
        r = pthread_create(&e->thread, &attr, events_run, e);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
        if (r != 0) {
                e->running = false;
                return -r;
        }
        pthread_setname_np(e->thread, "bfc-events");
        return 0;
}

int events_new(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e = calloc(1, sizeof(*e));
        int r;

        if (!e) {
                close(fd);
                return -ENOMEM;
        }
        e->fd = fd;
        e->ops = ops;
        e->userdata = userdata;
        r = frame_reader_new(false, &e->reader);
        if (r == 0)
                r = frame_writer_new(EVENTS_QUEUE_MAX, &e->writer);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

int events_start(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
{
        struct events *e;
        int r = events_new(fd, ops, userdata, &e);

        if (r < 0)
                return r;
        r = thread_start(e);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
}

int events_fd(const struct events *e)
{
        return e->fd;
}

/* What could not be done the last time. */
static int try_again(struct events *e)
{
        Bfcd__Event *event = e->busy;
        int r = event ? on_event(e, event) : 0;

        if (!event || r == -EBUSY)
                return r;
        e->busy = NULL;
        bfcd__event__free_unpacked(event, NULL);
        return r;
}

int events_poll(struct events *e)
{
        int r = e->error;

        if (r < 0)
                return r;
        r = try_again(e);
        if (r == 0)
                r = read_events(e, MSG_DONTWAIT);
        if (r == FRAME_AGAIN || r == -EBUSY)
                return r == -EBUSY ? r : 0;
        /* The daemon ended the session, or what it sent makes no sense. */
        e->error = r == -EPROTO ? -EPROTO : -ECONNRESET;
        e->ops->failed(e->userdata, e->error);
        e->ops->ended(e->userdata);
        return e->error;
}

void events_stop(struct events *e)
{
        if (!e || !e->running)
                return;
        shutdown(e->fd, SHUT_RD);
        pthread_join(e->thread, NULL);
        e->running = false;
}

struct events *events_free(struct events *e)
{
        if (!e)
                return NULL;
        if (e->fd >= 0)
                close(e->fd);
        frame_reader_free(e->reader);
        frame_writer_free(e->writer);
        if (e->busy)
                bfcd__event__free_unpacked(e->busy, NULL);
        free(e);
        return NULL;
}

void events_forget(struct events *e)
{
        if (!e)
                return;
        close(e->fd);
        e->fd = -1;
}
