/* The socket of a connection; see stream.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/stream.h"

#include <errno.h>
#include <linux/sockios.h> /* SIOCINQ */
#include <poll.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include "daemon/base/clock.h"
#include "daemon/net/peer_process.h"
#include "proto/frame.h"

#define STREAM_RECEIVE_BYTES 128u           /* in one turn: several requests */
#define STREAM_DRIBBLE_BYTES 16u            /* the first read of a turn, until bytes have completed a frame */
#define STREAM_LONG_BYTES    256u           /* the last one, of a long frame */
#define STREAM_QUICK_NS      5000u          /* for all but the last: they found few buffers */
#define STREAM_QUEUE_PAUSE   (128u * 1024u) /* bytes of replies; then no more reading */
#define STREAM_QUEUE_FDS     FRAME_MAX_FDS  /* in the queue of replies; the same */
#define STREAM_QUEUE_MAX     (1024u * 1024u)
#define STREAM_CROWDED_MS    20u
#define STREAM_LOOK_MAX_MS   128u

/* MSG_PEEK would go through all buffers of the queue. */
bool stream_has_hung_up(int fd)
{
        struct pollfd peer = { .fd = fd };

        return poll(&peer, 1, 0) == 1;
}

static void on_socket(struct poller_item *item, uint32_t events);

int stream_open(struct stream *s, struct uv_loop_s *loop, struct poller *poller, int fd,
                const struct fd_guard *guard, const struct stream_ops *ops, void *userdata)
{
        int r;

        *s = (struct stream){ .ops = ops,
                              .userdata = userdata,
                              .fd = fd,
                              .poller = poller,
                              .item = { .fd = fd, .report = on_socket },
                              .guard = *guard,
                              .is_incomplete = true,
                              .look_ms = 1 };
        r = frame_reader_new(false, &s->reader);
        if (r == 0)
                r = frame_writer_new(STREAM_QUEUE_MAX, &s->writer);
        if (r == 0)
                r = poller_set(poller, &s->item, EPOLLIN | EPOLLPRI | EPOLLRDHUP | EPOLLET);
        if (r < 0) {
                s->fd = -1;
                stream_free(s);
                return r;
        }
        uv_timer_init(loop, &s->timer);
        s->timer.data = s;
        s->is_open = true;
        return 0;
}

/* ---- waiting ------------------------------------------------------------- */

/* Notes what the kernel says, which it says once; turns act on it. */
static void on_socket(struct poller_item *item, uint32_t events)
{
        struct stream *s = (struct stream *)((char *)item - offsetof(struct stream, item));

        s->is_readable = s->is_readable || (events & EPOLLIN);
        s->has_left = s->has_left || (events & EPOLLRDHUP);
        s->has_urgent = s->has_urgent || (events & EPOLLPRI);
        s->ops->ready(s->userdata);
}

void stream_wait(struct stream *s, bool reads)
{
        uint32_t events = EPOLLRDHUP | EPOLLET;
        int r;

        if (reads)
                events |= EPOLLIN | EPOLLPRI;
        if (frame_writer_n_queued(s->writer) > 0 && !s->is_crowded && !s->is_unread)
                events |= EPOLLOUT;
        r = poller_set(s->poller, &s->item, events);
        if (r < 0)
                s->ops->fail(s->userdata, strerror(-r));
}

bool stream_is_readable(const struct stream *s)
{
        return s->is_readable;
}

bool stream_has_left(const struct stream *s)
{
        return s->has_left;
}

/* ---- reading ------------------------------------------------------------- */

size_t stream_n_input(const struct stream *s)
{
        int n_bytes = 0;

        return s->fd >= 0 && ioctl(s->fd, SIOCINQ, &n_bytes) == 0 && n_bytes > 0 ? (size_t)n_bytes : 0;
}

static int stream_receive(struct stream *s, struct peer_process *p, size_t n_max)
{
        pid_t sender;
        int r = fd_guard_look(&s->guard, s->fd, p->identity.is_open, &n_max);

        if (r != 0)
                return r;
        if (!p->identity.is_open)
                return frame_reader_receive_some(s->reader, s->fd, MSG_DONTWAIT, n_max);
        r = frame_reader_receive_from(s->reader, s->fd, MSG_DONTWAIT, n_max, &sender);
        return r == 0 ? peer_identity_verify_sender(&p->identity, s->fd, p->pidfd, sender) : r;
}

/* At most n_max bytes. */
static int stream_read_some(struct stream *s, struct peer_process *p, size_t n_max)
{
        /* The kernel ends a read early where the sender or its fds change, if it may tell these. Urgent bytes that come
         * after the last report are reported themselves. */
        bool may_end_early = s->guard.is_open || p->identity.is_open || s->has_urgent;
        int r = stream_receive(s, p, n_max);

        if (r == FRAME_AGAIN || (r == 0 && !may_end_early && frame_reader_is_drained(s->reader)))
                s->is_readable = false;
        return r;
}

/* A read takes as long as there are buffers in what it reads, as fd_guard_drop(). So it begins with few bytes, and the turn reads
 * on as long as that was quick. */
int stream_read(struct stream *s, struct peer_process *p)
{
        const uint8_t *payload;
        size_t n_max = STREAM_DRIBBLE_BYTES, n_bytes;
        uint64_t end_ns;
        int r;

        if (!s->is_incomplete) {
                s->is_incomplete = true; /* until there is a frame */
                return stream_read_some(s, p, STREAM_RECEIVE_BYTES);
        }
        end_ns = clock_ns() + STREAM_QUICK_NS;
        do {
                r = stream_read_some(s, p, n_max);
                n_max *= 2;
        } while (r == 0 && s->is_readable && n_max <= STREAM_LONG_BYTES &&
                 frame_reader_peek(s->reader, &payload, &n_bytes) == FRAME_AGAIN && clock_ns() < end_ns);
        return r;
}

int stream_next(struct stream *s, const uint8_t **ret_payload, size_t *ret_n_bytes)
{
        int r = frame_reader_next(s->reader, ret_payload, ret_n_bytes);

        if (r == 0)
                s->is_incomplete = false;
        return r;
}

/* ---- writing ------------------------------------------------------------- */

bool stream_is_full(const struct stream *s)
{
        return s->is_unread || frame_writer_n_queued(s->writer) > STREAM_QUEUE_PAUSE ||
               frame_writer_n_fds(s->writer) >= STREAM_QUEUE_FDS;
}

static void on_crowd_end(uv_timer_t *timer)
{
        struct stream *s = timer->data;

        s->is_crowded = false;
        s->ops->ready(s->userdata); /* its turn flushes */
}

static void on_read_time(uv_timer_t *timer);

/* Until the read time-out is over, or there is something to look at. */
static void start_timer(struct stream *s)
{
        uint64_t waited_ms = uv_now(s->timer.loop) - s->stuck_ms;
        uint64_t left_ms = waited_ms < s->read_timeout_ms ? s->read_timeout_ms - waited_ms : 0;

        if (s->is_unread && s->look_ms < left_ms)
                uv_timer_start(&s->timer, on_read_time, s->look_ms, 0);
        else if (s->read_timeout_ms != STREAM_NO_TIMEOUT)
                uv_timer_start(&s->timer, on_read_time, left_ms, 0);
}

static void start_read_time(struct stream *s)
{
        s->n_unread = frame_n_unread(s->fd);
        s->stuck_ms = uv_now(s->timer.loop);
        s->look_ms = 1;
        start_timer(s);
}

/* The socket takes more only when most of it was read: a slow reader may have read something. */
static void on_read_time(uv_timer_t *timer)
{
        struct stream *s = timer->data;
        size_t n_unread = frame_n_unread(s->fd);

        if (n_unread < s->n_unread)
                start_read_time(s);
        else if (uv_now(s->timer.loop) - s->stuck_ms >= s->read_timeout_ms)
                s->ops->fail(s->userdata, "timeout: the client did not read its replies within 30 s");
        else
                start_timer(s);
        if (s->look_ms < STREAM_LOOK_MAX_MS)
                s->look_ms *= 2;
        if (s->is_unread && n_unread == 0)
                s->ops->ready(s->userdata); /* its turn flushes */
}

static void watch_reader(struct stream *s, size_t n_before, bool was_unread)
{
        size_t n_queued = frame_writer_n_queued(s->writer);

        if (s->is_stuck && n_queued > 0 && n_queued >= n_before) {
                if (s->is_unread && !was_unread)
                        start_timer(s);
                return;
        }
        if (n_queued > 0)
                start_read_time(s);
        else if (s->is_stuck)
                uv_timer_stop(&s->timer);
        s->is_stuck = n_queued > 0;
}

int stream_flush(struct stream *s, uint64_t read_timeout_ms)
{
        size_t n_before = frame_writer_n_queued(s->writer);
        bool was_unread = s->is_unread;
        int r;

        if (s->is_crowded)
                return 0;
        r = frame_writer_flush(s->writer, s->fd);
        if (r < 0)
                return r;
        s->is_unread = r == FRAME_UNREAD;
        if (r == FRAME_CROWDED) {
                s->is_crowded = true;
                s->is_stuck = false;
                uv_timer_start(&s->timer, on_crowd_end, STREAM_CROWDED_MS, 0);
        } else if (read_timeout_ms != STREAM_NO_TIMEOUT || s->is_unread) {
                s->read_timeout_ms = read_timeout_ms;
                watch_reader(s, n_before, was_unread);
        }
        return 0;
}

/* ---- the end ------------------------------------------------------------- */

bool stream_drop_input(struct stream *s)
{
        if (!fd_guard_drop(&s->guard, s->fd))
                return false;
        (void)poller_set(s->poller, &s->item, 0);
        return true;
}

static void on_handle_closed(uv_handle_t *handle)
{
        struct stream *s = handle->data;

        s->ops->closed(s->userdata);
}

void stream_shut(struct stream *s, bool keeps_fd)
{
        uv_timer_stop(&s->timer);
        (void)poller_set(s->poller, &s->item, 0);
        if (keeps_fd) {
                shutdown(s->fd, SHUT_RDWR);
        } else {
                fd_guard_close(&s->guard, s->fd);
                s->fd = -1;
        }
        frame_writer_clear(s->writer); /* with references to extents */
}

static void on_drain(uv_timer_t *timer)
{
        stream_drain(timer->data);
}

void stream_drain(struct stream *s)
{
        if (frame_n_unread(s->fd) > 0) {
                uv_timer_start(&s->timer, on_drain, s->look_ms, 0);
                if (s->look_ms < STREAM_LOOK_MAX_MS)
                        s->look_ms *= 2;
                return;
        }
        s->ops->drained(s->userdata);
}

void stream_end(struct stream *s)
{
        uv_close((uv_handle_t *)&s->timer, on_handle_closed);
}

void stream_free(struct stream *s)
{
        if (s->fd >= 0)
                fd_guard_close(&s->guard, s->fd);
        frame_reader_free(s->reader);
        frame_writer_free(s->writer);
}
