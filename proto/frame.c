/* Frames over a stream socket; see frame.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A reader has one buffer of the largest frame's size, so no memory is allocated
 * for a length that the peer claims. A writer has one buffer that grows with the
 * queued bytes and is freed when all are sent. Fds of
 * a frame are a group, bound to the frame's first byte by its position in the
 * stream: a sendmsg() that carries a group starts at exactly that byte, so the
 * fds come in the order of their frames, with or before the frame's bytes.
 *
 * Reader: begin <= end <= READER_BYTES; bytes before begin are consumed.
 * Writer: begin <= end <= n_room; groups are sorted by position, and
 * n_sent <= the first group's position < n_sent + (end - begin). The peer has not read at most n_unread_fds, and
 * n_unread_fds <= FRAME_MAX_UNREAD_FDS. */
#include "proto/frame.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

/* Room for a largest frame and the beginnings of the next. */
#define READER_BYTES (FRAME_HEADER_BYTES + FRAME_MAX_PAYLOAD + 4096u)

/* A receive brings the fds of one frame at most (the kernel stops there), and an
 * incomplete frame may still have its own waiting. */
#define READER_MAX_FDS (2u * FRAME_MAX_FDS)

/* Among a reader's fds: the kernel dropped the rest of this frame's. */
#define FDS_CUT (-1)

/* A writer's buffer up to this size is kept while idle. */
#define WRITER_KEPT_BYTES 1024u

union control {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(FRAME_MAX_FDS * sizeof(int))];
};

struct frame_reader {
        size_t begin;
        size_t end;
        size_t n_fds;
        bool take_fds;
        bool is_drained;
        int fds[READER_MAX_FDS];
        uint8_t buffer[READER_BYTES];
};

struct fd_group {
        struct fd_group *next;
        uint64_t position; /* in the stream, of the frame's first byte */
        size_t n_fds;
        int fds[];
};

struct frame_writer {
        uint8_t *buffer;
        size_t n_room;
        size_t begin;
        size_t end;
        size_t max_queued_bytes;
        uint64_t n_sent;
        struct fd_group *first_group;
        struct fd_group **last_group;
        size_t n_fds;        /* in all groups */
        size_t n_unread_fds; /* sent since the peer had read all; it may have read some */
};

static uint32_t get_length(const uint8_t *p)
{
        return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static void put_length(uint8_t *p, size_t n)
{
        p[0] = (uint8_t)n;
        p[1] = (uint8_t)(n >> 8);
        p[2] = (uint8_t)(n >> 16);
        p[3] = (uint8_t)(n >> 24);
}

static void close_all(const int *fds, size_t n_fds)
{
        for (size_t i = 0; i < n_fds; i++)
                if (fds[i] != FDS_CUT)
                        close(fds[i]);
}

/* ---- reading ------------------------------------------------------------- */

int frame_reader_new(bool take_fds, struct frame_reader **ret)
{
        /* Not cleared: most of the buffer stays untouched, and so without memory. */
        struct frame_reader *r = malloc(sizeof(*r));

        if (!r)
                return -ENOMEM;
        r->begin = 0;
        r->end = 0;
        r->n_fds = 0;
        r->take_fds = take_fds;
        r->is_drained = false;
        *ret = r;
        return 0;
}

struct frame_reader *frame_reader_free(struct frame_reader *r)
{
        if (!r)
                return NULL;
        close_all(r->fds, r->n_fds);
        free(r);
        return NULL;
}

/* Moves what is left to the front. Moves only after something was consumed, so
 * bytes that trickle in are not moved again and again. */
static void reader_compact(struct frame_reader *r)
{
        size_t n_left = r->end - r->begin;

        if (r->begin == 0)
                return;
        if (n_left > 0)
                memmove(r->buffer, r->buffer + r->begin, n_left);
        r->begin = 0;
        r->end = n_left;
}

/* Keeps the fds that came with a message. All of them are taken from the kernel
 * before any is judged: each is open in this process already. Cut off at less than there was room for, the
 * others found no number in this process. */
static int reader_keep_fds(struct frame_reader *r, struct msghdr *msg)
{
        bool is_cut = msg->msg_flags & MSG_CTRUNC;
        int error = is_cut && (!r->take_fds || r->n_fds == READER_MAX_FDS) ? -EPROTO : 0;

        for (struct cmsghdr *c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
                int fds[FRAME_MAX_FDS];
                size_t n;

                if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
                        continue;
                n = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
                memcpy(fds, CMSG_DATA(c), n * sizeof(int));
                if (error < 0 || n + is_cut > READER_MAX_FDS - r->n_fds || (is_cut && n == FRAME_MAX_FDS)) {
                        close_all(fds, n);
                        error = -EPROTO;
                        continue;
                }
                memcpy(r->fds + r->n_fds, fds, n * sizeof(int));
                r->n_fds += n;
        }
        if (error == 0 && is_cut)
                r->fds[r->n_fds++] = FDS_CUT;
        return error;
}

int frame_reader_receive(struct frame_reader *r, int fd, int flags)
{
        return frame_reader_receive_some(r, fd, flags, READER_BYTES);
}

/* No fds fit in there: the kernel discards them, and says so. */
union sender_control {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(struct ucred))];
};

static pid_t message_sender(struct msghdr *msg)
{
        struct cmsghdr *c = CMSG_FIRSTHDR(msg);
        struct ucred who;

        if (!c || c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_CREDENTIALS)
                return 0;
        memcpy(&who, CMSG_DATA(c), sizeof(who));
        return who.pid;
}

static int reader_receive(struct frame_reader *r, int fd, int flags, size_t n_max, void *control,
                          size_t n_control, struct msghdr *msg)
{
        struct iovec iov;
        ssize_t n;
        int error;

        reader_compact(r);
        r->is_drained = false;
        if (r->end == READER_BYTES)
                return 0; /* at least one frame is whole, or its length wrong: next() tells */
        iov.iov_base = r->buffer + r->end;
        iov.iov_len = n_max < READER_BYTES - r->end ? n_max : READER_BYTES - r->end;
        do {
                *msg = (struct msghdr){ .msg_iov = &iov, .msg_iovlen = 1 };
                msg->msg_control = n_control > 0 ? control : NULL;
                msg->msg_controllen = n_control;
                n = recvmsg(fd, msg, flags | MSG_CMSG_CLOEXEC);
        } while (n < 0 && errno == EINTR);
        if (n < 0)
                return errno == EAGAIN ? FRAME_AGAIN : -errno;
        error = reader_keep_fds(r, msg);
        if (error < 0)
                return error;
        if (n == 0)
                return r->begin == r->end ? FRAME_EOF : -ECONNRESET;
        r->end += (size_t)n;
        r->is_drained = (size_t)n < iov.iov_len;
        return 0;
}

bool frame_reader_is_drained(const struct frame_reader *r)
{
        return r->is_drained;
}

int frame_reader_receive_some(struct frame_reader *r, int fd, int flags, size_t n_max)
{
        union control control;
        struct msghdr msg;

        return reader_receive(r, fd, flags, n_max, &control, r->take_fds ? sizeof(control) : 0, &msg);
}

int frame_reader_receive_from(struct frame_reader *r, int fd, int flags, size_t n_max, pid_t *ret_sender)
{
        union sender_control control;
        struct msghdr msg = { .msg_controllen = 0 };
        int error = reader_receive(r, fd, flags, n_max, &control, sizeof(control), &msg);

        *ret_sender = error == 0 ? message_sender(&msg) : 0;
        return error;
}

size_t frame_reader_feed(struct frame_reader *r, const uint8_t *bytes, size_t n_bytes)
{
        reader_compact(r);
        if (n_bytes > READER_BYTES - r->end)
                n_bytes = READER_BYTES - r->end;
        if (n_bytes > 0)
                memcpy(r->buffer + r->end, bytes, n_bytes);
        r->end += n_bytes;
        return n_bytes;
}

int frame_reader_peek(const struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes)
{
        size_t n_here = r->end - r->begin;
        uint32_t length;

        if (n_here < FRAME_HEADER_BYTES)
                return FRAME_AGAIN;
        length = get_length(r->buffer + r->begin);
        if (length == 0 || length > FRAME_MAX_PAYLOAD)
                return -EPROTO;
        if (n_here - FRAME_HEADER_BYTES < length)
                return FRAME_AGAIN;
        *ret_payload = r->buffer + r->begin + FRAME_HEADER_BYTES;
        *ret_n_bytes = length;
        return 0;
}

int frame_reader_next(struct frame_reader *r, const uint8_t **ret_payload, size_t *ret_n_bytes)
{
        int error = frame_reader_peek(r, ret_payload, ret_n_bytes);

        if (error == 0)
                r->begin += FRAME_HEADER_BYTES + *ret_n_bytes;
        return error;
}

int frame_reader_take_fds(struct frame_reader *r, int *ret_fds, size_t n_fds)
{
        size_t n = 0, n_cut = 0;

        while (n < n_fds && n < r->n_fds && r->fds[n] != FDS_CUT)
                n++;
        if (n < n_fds && n == r->n_fds)
                return -EPROTO;
        if (n_fds == 0)
                return 0;
        n_cut = n < n_fds;
        memcpy(ret_fds, r->fds, n * sizeof(int));
        for (size_t i = n; i < n_fds; i++)
                ret_fds[i] = -1;
        r->n_fds -= n + n_cut;
        memmove(r->fds, r->fds + n + n_cut, r->n_fds * sizeof(int));
        return n_cut ? -EMFILE : 0;
}

size_t frame_reader_n_fds(const struct frame_reader *r)
{
        return r->n_fds;
}

/* ---- writing ------------------------------------------------------------- */

int frame_writer_new(size_t max_queued_bytes, struct frame_writer **ret)
{
        struct frame_writer *w = calloc(1, sizeof(*w));

        if (!w)
                return -ENOMEM;
        w->max_queued_bytes = max_queued_bytes;
        w->last_group = &w->first_group;
        *ret = w;
        return 0;
}

static struct fd_group *group_free(struct fd_group *g)
{
        if (!g)
                return NULL;
        close_all(g->fds, g->n_fds);
        free(g);
        return NULL;
}

static void writer_drop_first_group(struct frame_writer *w)
{
        struct fd_group *g = w->first_group;

        w->first_group = g->next;
        if (!w->first_group)
                w->last_group = &w->first_group;
        w->n_fds -= g->n_fds;
        group_free(g);
}

struct frame_writer *frame_writer_free(struct frame_writer *w)
{
        if (!w)
                return NULL;
        while (w->first_group)
                writer_drop_first_group(w);
        free(w->buffer);
        free(w);
        return NULL;
}

void frame_writer_clear(struct frame_writer *w)
{
        while (w->first_group)
                writer_drop_first_group(w);
        w->begin = w->end = 0;
}

static int group_new(const int *fds, size_t n_fds, uint64_t position, struct fd_group **ret)
{
        struct fd_group *g = malloc(sizeof(*g) + n_fds * sizeof(int));

        if (!g)
                return -ENOMEM;
        *g = (struct fd_group){ .position = position, .n_fds = n_fds };
        memcpy(g->fds, fds, n_fds * sizeof(int));
        *ret = g;
        return 0;
}

/* Room for n_bytes behind w->end. */
static int writer_make_room(struct frame_writer *w, size_t n_bytes)
{
        size_t n_queued = w->end - w->begin;
        size_t n_room = w->n_room ? w->n_room : WRITER_KEPT_BYTES;
        uint8_t *buffer;

        if (n_bytes <= w->n_room - w->end)
                return 0;
        if (w->begin > 0) {
                memmove(w->buffer, w->buffer + w->begin, n_queued);
                w->begin = 0;
                w->end = n_queued;
        }
        while (n_room - n_queued < n_bytes)
                n_room *= 2;
        if (n_room == w->n_room)
                return 0;
        buffer = realloc(w->buffer, n_room);
        if (!buffer)
                return -ENOMEM;
        w->buffer = buffer;
        w->n_room = n_room;
        return 0;
}

int frame_writer_add(struct frame_writer *w, size_t n_bytes, const int *fds, size_t n_fds,
                     uint8_t **ret_payload)
{
        size_t n_queued = w->end - w->begin;
        struct fd_group *g = NULL;
        int r;

        if (n_bytes == 0 || n_bytes > FRAME_MAX_PAYLOAD || n_fds > FRAME_MAX_FDS)
                return -EMSGSIZE;
        if (n_queued > w->max_queued_bytes || FRAME_HEADER_BYTES + n_bytes > w->max_queued_bytes - n_queued)
                return -ENOBUFS;
        r = writer_make_room(w, FRAME_HEADER_BYTES + n_bytes);
        if (r < 0)
                return r;
        if (n_fds > 0) {
                r = group_new(fds, n_fds, w->n_sent + n_queued, &g);
                if (r < 0)
                        return r;
                *w->last_group = g;
                w->last_group = &g->next;
                w->n_fds += n_fds;
        }
        put_length(w->buffer + w->end, n_bytes);
        *ret_payload = w->buffer + w->end + FRAME_HEADER_BYTES;
        w->end += FRAME_HEADER_BYTES + n_bytes;
        return 0;
}

static ssize_t send_with_fds(int fd, const uint8_t *bytes, size_t n_bytes, const struct fd_group *g)
{
        union control control = { 0 };
        struct iovec iov = { .iov_base = (void *)(uintptr_t)bytes, .iov_len = n_bytes };
        struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
        struct cmsghdr *c;

        msg.msg_control = &control;
        msg.msg_controllen = CMSG_SPACE(g->n_fds * sizeof(int));
        c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(g->n_fds * sizeof(int));
        memcpy(CMSG_DATA(c), g->fds, g->n_fds * sizeof(int));
        return sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

size_t frame_n_unread(int fd)
{
        int n_bytes = 0;

        return fd >= 0 && ioctl(fd, SIOCOUTQ, &n_bytes) == 0 && n_bytes > 0 ? (size_t)n_bytes : 0;
}

/* The kernel does not tell which fds were read, but whether all bytes were. */
static bool writer_may_send_fds(struct frame_writer *w, int fd)
{
        const struct fd_group *g = w->first_group;

        if (!g || g->position != w->n_sent || w->n_unread_fds + g->n_fds <= FRAME_MAX_UNREAD_FDS)
                return true;
        if (frame_n_unread(fd) > 0)
                return false;
        w->n_unread_fds = 0;
        return true;
}

/* One system call: from the first byte that waits up to, not including, the next
 * frame that has fds. */
static ssize_t writer_send_some(struct frame_writer *w, int fd)
{
        const uint8_t *bytes = w->buffer + w->begin;
        size_t n_bytes = w->end - w->begin;
        struct fd_group *g = w->first_group;
        ssize_t n;

        if (g && g->position == w->n_sent) {
                if (g->next)
                        n_bytes = (size_t)(g->next->position - w->n_sent);
                n = send_with_fds(fd, bytes, n_bytes, g);
                if (n > 0) {
                        w->n_unread_fds += g->n_fds;
                        writer_drop_first_group(w);
                }
                return n;
        }
        if (g)
                n_bytes = (size_t)(g->position - w->n_sent);
        return send(fd, bytes, n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

int frame_writer_flush(struct frame_writer *w, int fd)
{
        while (w->begin < w->end) {
                ssize_t n;

                if (!writer_may_send_fds(w, fd))
                        return FRAME_UNREAD;
                n = writer_send_some(w, fd);
                if (n < 0 && errno == EINTR)
                        continue;
                if (n < 0 && errno == ETOOMANYREFS)
                        return FRAME_CROWDED;
                if (n < 0)
                        return errno == EAGAIN ? FRAME_AGAIN : -errno;
                w->begin += (size_t)n;
                w->n_sent += (uint64_t)n;
        }
        w->begin = 0;
        w->end = 0;
        if (w->n_room > WRITER_KEPT_BYTES) {
                free(w->buffer);
                w->buffer = NULL;
                w->n_room = 0;
        }
        return 0;
}

size_t frame_writer_n_queued(const struct frame_writer *w)
{
        return w->end - w->begin;
}

size_t frame_writer_n_fds(const struct frame_writer *w)
{
        return w->n_fds;
}
