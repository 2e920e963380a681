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
        bool running; /* it is to be joined */
        struct frame_reader *reader;
        struct frame_writer *writer;
};

static int confirm(struct events *e, uint64_t sequence)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        Bfcd__Retired retired = BFCD__RETIRED__INIT;
        uint8_t *payload;
        int r;

        retired.sequence = sequence;
        reply.body_case = BFCD__EVENT_REPLY__BODY_RETIRED;
        reply.retired = &retired;
        r = frame_writer_add(e->writer, bfcd__event_reply__get_packed_size(&reply), NULL, 0, &payload);
        if (r < 0)
                return r;
        bfcd__event_reply__pack(&reply, payload);
        /* The daemon has at most 16 unanswered: the socket's buffer has room. */
        return frame_writer_flush(e->writer, e->fd) == 0 ? 0 : -ECONNRESET;
}

/* False: the thread is to end, or the daemon is gone. */
static bool pause_a_little(const struct events *e)
{
        struct pollfd p = { .fd = e->fd, .events = POLLRDHUP };

        return poll(&p, 1, EVENTS_RETRY_MS) == 0;
}

/* An event of a later version is none that this one asked for. */
static int on_event(struct events *e, const Bfcd__Event *event)
{
        const Bfcd__Retire *retire;
        int r;

        if (event->body_case != BFCD__EVENT__BODY_RETIRE)
                return -EPROTO;
        retire = event->retire;
        if (retire->n_extent_ids == 0 || retire->n_extent_ids > EVENTS_MAX_EXTENTS)
                return -EPROTO;
        do
                r = e->ops->retire(e->userdata, retire->extent_ids, retire->n_extent_ids);
        while (r == -EBUSY && pause_a_little(e));
        if (r == -EBUSY)
                return -ECANCELED;
        return r < 0 ? r : confirm(e, retire->sequence);
}

static int on_frame(struct events *e, const uint8_t *payload, size_t n_bytes)
{
        Bfcd__Event *event = bfcd__event__unpack(NULL, n_bytes, payload);
        int r = event ? on_event(e, event) : -EPROTO;

        if (event)
                bfcd__event__free_unpacked(event, NULL);
        return r;
}

static int read_events(struct events *e)
{
        const uint8_t *payload;
        size_t n_bytes;
        int r;

        while ((r = frame_reader_receive(e->reader, e->fd, 0)) == 0) {
                while ((r = frame_reader_next(e->reader, &payload, &n_bytes)) == 0) {
                        r = on_frame(e, payload, n_bytes);
                        if (r < 0)
                                return r;
                }
                if (r < 0)
                        return r;
        }
        return r;
}

static void *events_run(void *userdata)
{
        struct events *e = userdata;
        int r = read_events(e);

        /* An end of file is events_stop(), or a daemon that ended the session: then
         * the other socket tells. So it is while a Retire could not be done. */
        e->ops->ended(e->userdata);
        if (r < 0 && r != -ECANCELED)
                e->ops->failed(e->userdata, r == -EPROTO ? -EPROTO : -ECONNRESET);
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
        r = pthread_create(&e->thread, &attr, events_run, e);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attr);
        if (r != 0)
                return -r;
        e->running = true;
        pthread_setname_np(e->thread, "bfc-events");
        return 0;
}

int events_start(int fd, const struct events_ops *ops, void *userdata, struct events **ret)
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
        if (r == 0)
                r = thread_start(e);
        if (r < 0) {
                events_free(e);
                return r;
        }
        *ret = e;
        return 0;
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
