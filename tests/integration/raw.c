/* The hand-written client: see raw.h.
 *
 * Invariant: buffer[0..n_used) is what was received and not yet handled, and
 * starts at a frame's first byte.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "tests/integration/raw.h"
#include "tests/fd_message.h"

static __thread char refusal_text[1024];

const char *raw_refusal(void)
{
        return refusal_text;
}

static int64_t now_ms(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int raw_open(const char *path, struct raw **ret)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        struct raw *raw;
        int r;

        if (strlen(path) >= sizeof(address.sun_path))
                return -ENAMETOOLONG;
        memcpy(address.sun_path, path, strlen(path) + 1);
        raw = calloc(1, sizeof(*raw));
        if (!raw)
                return -ENOMEM;
        raw->next_id = 1;
        raw->ack = true;
        raw->events_fd = -1;
        raw->page_fds[0] = raw->page_fds[1] = -1;
        raw->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (raw->fd < 0 || connect(raw->fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
                r = -errno;
                raw_close(raw);
                return r;
        }
        *ret = raw;
        return 0;
}

static void close_extents(struct raw *raw)
{
        for (size_t i = 0; i < raw->n_extents; i++)
                if (raw->extents[i].fd >= 0)
                        close(raw->extents[i].fd);
        raw->n_extents = 0;
}

struct raw *raw_close(struct raw *raw)
{
        if (!raw)
                return NULL;
        if (raw->fd >= 0)
                close(raw->fd);
        if (raw->events_fd >= 0)
                close(raw->events_fd);
        for (size_t i = 0; i < 2; i++)
                if (raw->page_fds[i] >= 0)
                        close(raw->page_fds[i]);
        close_extents(raw);
        for (size_t i = 0; i < raw->n_fds; i++)
                close(raw->fds[i]);
        free(raw->extents);
        free(raw);
        return NULL;
}

/* ---- bytes out ------------------------------------------------------------ */

int raw_send_bytes(struct raw *raw, const void *bytes, size_t n_bytes)
{
        const uint8_t *p = bytes;

        while (n_bytes > 0) {
                struct pollfd poll_fd = { .fd = raw->fd, .events = POLLOUT };
                ssize_t n = send(raw->fd, p, n_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

                if (n < 0 && errno != EAGAIN && errno != EINTR)
                        return -errno;
                if (n < 0) {
                        if (errno == EAGAIN && poll(&poll_fd, 1, RAW_TIMEOUT_MS) == 0)
                                return RAW_TIMEOUT;
                        continue;
                }
                p += n;
                n_bytes -= (size_t)n;
        }
        return 0;
}

static void put_length(uint8_t *header, size_t n_bytes)
{
        for (unsigned i = 0; i < 4; i++)
                header[i] = (uint8_t)(n_bytes >> (8 * i));
}

int raw_send_frame(struct raw *raw, const void *payload, size_t n_bytes)
{
        uint8_t *frame = malloc(n_bytes + 4);
        int r;

        if (!frame)
                return -ENOMEM;
        put_length(frame, n_bytes);
        memcpy(frame + 4, payload, n_bytes);
        r = raw_send_bytes(raw, frame, n_bytes + 4);
        free(frame);
        return r;
}

int raw_send(struct raw *raw, Bfcd__Request *request)
{
        uint8_t *payload;
        size_t n_bytes;
        int r;

        if (request->id == 0)
                request->id = raw->next_id++;
        n_bytes = bfcd__request__get_packed_size(request);
        payload = malloc(n_bytes + 1);
        if (!payload)
                return -ENOMEM;
        bfcd__request__pack(request, payload);
        r = raw_send_frame(raw, payload, n_bytes);
        free(payload);
        return r;
}

size_t raw_pack(const Bfcd__Request *request, uint8_t *ret_frame)
{
        size_t n_bytes = bfcd__request__pack(request, ret_frame + 4);

        for (int i = 0; i < 4; i++)
                ret_frame[i] = (uint8_t)(n_bytes >> (8 * i));
        return n_bytes + 4;
}

int raw_send_fds(struct raw *raw, const void *bytes, size_t n_bytes, const int *fds, size_t n_fds)
{
        return fd_message_send(raw->fd, bytes, n_bytes, fds, n_fds, 0);
}

/* ---- replies in ----------------------------------------------------------- */

/* One recvmsg() into the buffer; the fds that came with it are queued. */
static int receive_some(struct raw *raw, int timeout_ms)
{
        union {
                char bytes[CMSG_SPACE(sizeof(int) * 253)]; /* the kernel's most */
                struct cmsghdr align;
        } control;
        struct iovec iov = { .iov_base = raw->buffer + raw->n_used,
                             .iov_len = sizeof(raw->buffer) - raw->n_used };
        struct msghdr message = { .msg_iov = &iov, .msg_iovlen = 1 };
        struct pollfd poll_fd = { .fd = raw->fd, .events = POLLIN };
        ssize_t n;

        message.msg_control = control.bytes;
        message.msg_controllen = sizeof(control.bytes);
        if (poll(&poll_fd, 1, timeout_ms) == 0)
                return RAW_TIMEOUT;
        n = recvmsg(raw->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (n == 0 || (n < 0 && (errno == ECONNRESET || errno == EPIPE)))
                return RAW_HUNG_UP;
        if (n < 0)
                return errno == EAGAIN || errno == EINTR ? 0 : -errno;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
                size_t n_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

                if (c->cmsg_type != SCM_RIGHTS || raw->n_fds + n_fds > 256)
                        return -EPROTO;
                memcpy(raw->fds + raw->n_fds, CMSG_DATA(c), n_fds * sizeof(int));
                raw->n_fds += n_fds;
        }
        raw->n_used += (size_t)n;
        return (message.msg_flags & MSG_CTRUNC) ? -EPROTO : 0;
}

/* Takes one message out of the buffer; NULL when there is no whole one. */
static int take_message(struct raw *raw, Bfcd__Reply **ret)
{
        uint32_t n_bytes;

        *ret = NULL;
        if (raw->n_used < 4)
                return 0;
        n_bytes = (uint32_t)raw->buffer[0] | (uint32_t)raw->buffer[1] << 8 | (uint32_t)raw->buffer[2] << 16 |
                  (uint32_t)raw->buffer[3] << 24;
        if (n_bytes == 0 || n_bytes > RAW_MAX_PAYLOAD)
                return -EPROTO;
        if (raw->n_used < n_bytes + 4)
                return 0;
        *ret = bfcd__reply__unpack(NULL, n_bytes, raw->buffer + 4);
        raw->n_used -= n_bytes + 4;
        memmove(raw->buffer, raw->buffer + 4 + n_bytes, raw->n_used);
        return *ret ? 0 : -EPROTO;
}

static int keep_extents(struct raw *raw, const Bfcd__Extents *extents)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request request = REQUEST(ACK, ack, &ack);
        size_t n = extents->n_extents, n_fds = 0, at = 0;
        struct raw_extent *grown;

        for (size_t i = 0; i < n; i++)
                n_fds += extents->extents[i]->handle.len == 0;
        if (n_fds > raw->n_fds || n == 0)
                return -EPROTO;
        grown = realloc(raw->extents, (raw->n_extents + n) * sizeof(*grown));
        if (!grown)
                return -ENOMEM;
        raw->extents = grown;
        for (size_t i = 0; i < n; i++) {
                const Bfcd__Extent *e = extents->extents[i];

                grown[raw->n_extents++] =
                        (struct raw_extent){ .id = e->extent_id,
                                             .region_id = e->region_id,
                                             .offset = e->offset,
                                             .n_bytes = e->n_bytes,
                                             .fd = e->handle.len == 0 ? raw->fds[at++] : -1 };
                if (e->handle.len == sizeof(raw->extents[0].handle))
                        memcpy(raw->extents[raw->n_extents - 1].handle, e->handle.data, e->handle.len);
        }
        raw->n_fds -= n_fds;
        memmove(raw->fds, raw->fds + n_fds, raw->n_fds * sizeof(int));
        raw->last_sequence = extents->sequence;
        if (!raw->ack)
                return 0;
        ack.sequence = extents->sequence;
        return raw_send(raw, &request);
}

int raw_receive(struct raw *raw, int timeout_ms, Bfcd__Reply **ret)
{
        int64_t deadline = now_ms() + timeout_ms;

        for (;;) {
                Bfcd__Reply *reply = NULL;
                int64_t left = deadline - now_ms();
                int r = take_message(raw, &reply);

                if (r < 0)
                        return r;
                if (reply && reply->body_case != BFCD__REPLY__BODY_EXTENTS) {
                        *ret = reply;
                        return 0;
                }
                if (reply) {
                        r = keep_extents(raw, reply->extents);
                        bfcd__reply__free_unpacked(reply, NULL);
                } else {
                        r = receive_some(raw, left > 0 ? (int)left : 0);
                }
                if (r != 0)
                        return r == -EPIPE ? RAW_HUNG_UP : r;
        }
}

int raw_wait_hang_up(struct raw *raw, int timeout_ms)
{
        int64_t deadline = now_ms() + timeout_ms;

        for (;;) {
                int64_t left = deadline - now_ms();
                int r;

                raw->n_used = 0;
                r = receive_some(raw, left > 0 ? (int)left : 0);
                if (r != 0)
                        return r == RAW_HUNG_UP ? 0 : r;
        }
}

/* ---- whole calls ---------------------------------------------------------- */

int raw_call(struct raw *raw, Bfcd__Request *request, Bfcd__Reply **ret)
{
        int r = raw_send(raw, request);

        while (r == 0) {
                Bfcd__Reply *reply = NULL;

                r = raw_receive(raw, RAW_TIMEOUT_MS, &reply);
                if (r == 0 && reply->id == request->id) {
                        *ret = reply;
                        return 0;
                }
                if (r == 0)
                        bfcd__reply__free_unpacked(reply, NULL);
        }
        return r;
}

/* The reply as a result: a refusal is -error and leaves its sentence. */
static int call_expecting(struct raw *raw, Bfcd__Request *request, int body_case, Bfcd__Reply **ret)
{
        Bfcd__Reply *reply = NULL;
        int r = raw_call(raw, request, &reply);

        refusal_text[0] = '\0';
        if (r != 0) {
                snprintf(refusal_text, sizeof(refusal_text), "no reply (%d)", r);
                return -EIO;
        }
        if ((int)reply->body_case == body_case) {
                *ret = reply;
                return 0;
        }
        r = -EPROTO;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL) {
                snprintf(refusal_text, sizeof(refusal_text), "%s", reply->refusal->message);
                r = -(int)reply->refusal->error;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int raw_do(struct raw *raw, Bfcd__Request *request)
{
        Bfcd__Reply *reply = NULL;
        int r = call_expecting(raw, request, BFCD__REPLY__BODY_DONE, &reply);

        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* In this order, and no others. */
static int take_hello_fds(struct raw *raw, const Bfcd__HelloReply *hello)
{
        size_t n_events = hello->has_events ? 1 : 0;
        size_t n_pages = hello->has_pages ? 2 : 0;

        if (raw->n_fds != n_events + n_pages)
                return -EPROTO;
        if (n_events > 0)
                raw->events_fd = raw->fds[0];
        if (n_pages > 0)
                memcpy(raw->page_fds, raw->fds + n_events, sizeof(raw->page_fds));
        raw->n_fds = 0;
        return 0;
}

int raw_hello(struct raw *raw, const char *tenant, const char *partition)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        Bfcd__Reply *reply = NULL;
        int r;

        hello.version = 1;
        hello.wants_events = raw->wants_events;
        hello.wants_pages = raw->wants_pages;
        hello.can_resume = raw->wants_return;
        if (raw->comes_back) {
                hello.session_id = raw->session_id;
                hello.secret = (ProtobufCBinaryData){ sizeof(raw->secret), raw->secret };
        }
        hello.name = (char *)(uintptr_t) "raw";
        if (tenant)
                hello.tenant = (char *)(uintptr_t)tenant;
        if (partition)
                hello.partition = (char *)(uintptr_t)partition;
        r = call_expecting(raw, &request, BFCD__REPLY__BODY_HELLO, &reply);
        if (r < 0)
                return r;
        r = take_hello_fds(raw, reply->hello);
        raw->can_resume = reply->hello->can_resume;
        raw->session_id = reply->hello->session_id;
        if (reply->hello->secret.len == sizeof(raw->secret))
                memcpy(raw->secret, reply->hello->secret.data, sizeof(raw->secret));
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

int raw_held(struct raw *raw, const struct raw_held *held)
{
        Bfcd__Held body = BFCD__HELD__INIT;
        Bfcd__Request request = REQUEST(HELD, held, &body);
        Bfcd__HeldShared *shared = calloc(held->n_shared + 1, sizeof(*shared));
        Bfcd__HeldShared **list = calloc(held->n_shared + 1, sizeof(Bfcd__HeldShared *));
        int r = -ENOMEM;

        for (size_t i = 0; shared && list && i < held->n_shared; i++) {
                bfcd__held_shared__init(shared + i);
                shared[i].block_id = held->shared_ids[i];
                shared[i].count = held->count > 0 ? held->count : 1;
                list[i] = shared + i;
        }
        body.extent_ids = (uint64_t *)(uintptr_t)held->extent_ids;
        body.n_extent_ids = held->n_extents;
        body.block_ids = (uint64_t *)(uintptr_t)held->block_ids;
        body.n_block_ids = held->n_blocks;
        body.shared = list;
        body.n_shared = held->n_shared;
        body.is_last = !held->is_not_last;
        if (shared && list)
                r = raw_do(raw, &request);
        free(shared);
        free(list);
        return r;
}

int raw_malloc(struct raw *raw, uint32_t partition, uint64_t n_bytes, Bfcd__Block *ret)
{
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request request = REQUEST(MALLOC, malloc, &body);
        Bfcd__Reply *reply = NULL;
        int r;

        body.partition = partition;
        body.n_bytes = n_bytes;
        r = call_expecting(raw, &request, BFCD__REPLY__BODY_BLOCK, &reply);
        if (r < 0)
                return r;
        *ret = *reply->block;
        ret->base.n_unknown_fields = 0;
        ret->base.unknown_fields = NULL;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

int raw_free(struct raw *raw, uint64_t block_id)
{
        Bfcd__Free body = BFCD__FREE__INIT;
        Bfcd__Request request = REQUEST(FREE, free, &body);

        body.block_id = block_id;
        return raw_do(raw, &request);
}

int raw_publish(struct raw *raw, uint64_t block_id, const char *name)
{
        Bfcd__Publish body = BFCD__PUBLISH__INIT;
        Bfcd__Request request = REQUEST(PUBLISH, publish, &body);

        body.block_id = block_id;
        body.name = (char *)(uintptr_t)name;
        return raw_do(raw, &request);
}

int raw_usage(struct raw *raw, uint32_t partition, Bfcd__Statistics *ret)
{
        Bfcd__Usage body = BFCD__USAGE__INIT;
        Bfcd__Request request = REQUEST(USAGE, usage, &body);
        Bfcd__Reply *reply = NULL;
        int r;

        body.partition = partition;
        r = call_expecting(raw, &request, BFCD__REPLY__BODY_USAGE, &reply);
        if (r < 0)
                return r;
        if (!reply->usage->stats) {
                bfcd__reply__free_unpacked(reply, NULL);
                return -EPROTO;
        }
        *ret = *reply->usage->stats;
        ret->base.n_unknown_fields = 0;
        ret->base.unknown_fields = NULL;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

int raw_goodbye(struct raw *raw)
{
        Bfcd__Goodbye body = BFCD__GOODBYE__INIT;
        Bfcd__Request request = REQUEST(GOODBYE, goodbye, &body);

        /* After a goodbye the daemon returns the extents to the device at once. It reports memory that is
         * still referenced, by an fd for instance, as an error. */
        close_extents(raw);
        return raw_do(raw, &request);
}

int raw_list(struct raw *raw, Bfcd__List__Kind kind, uint64_t cursor, Bfcd__Reply **ret)
{
        Bfcd__List body = BFCD__LIST__INIT;
        Bfcd__Request request = REQUEST(LIST, list, &body);

        body.kind = kind;
        body.cursor = cursor;
        return call_expecting(raw, &request, BFCD__REPLY__BODY_LIST, ret);
}

struct raw *raw_connect(const char *path, const char *tenant)
{
        struct raw *raw = NULL;

        if (raw_open(path, &raw) < 0)
                return NULL;
        if (raw_hello(raw, tenant, NULL) < 0)
                return raw_close(raw);
        return raw;
}

/* ---- events --------------------------------------------------------------- */

static int event_bytes(struct raw *raw, int timeout_ms, uint8_t *bytes, size_t n_bytes)
{
        struct pollfd poll_fd = { .fd = raw->events_fd, .events = POLLIN };

        while (n_bytes > 0) {
                ssize_t n;

                if (poll(&poll_fd, 1, timeout_ms) == 0)
                        return RAW_TIMEOUT;
                n = recv(raw->events_fd, bytes, n_bytes, 0);
                if (n <= 0)
                        return RAW_HUNG_UP;
                bytes += n;
                n_bytes -= (size_t)n;
        }
        return 0;
}

int raw_event(struct raw *raw, int timeout_ms, Bfcd__Event **ret)
{
        uint8_t header[4], payload[RAW_MAX_PAYLOAD];
        uint32_t n_bytes;
        int r = event_bytes(raw, timeout_ms, header, sizeof(header));

        if (r != 0)
                return r;
        n_bytes = (uint32_t)header[0] | (uint32_t)header[1] << 8 | (uint32_t)header[2] << 16 |
                  (uint32_t)header[3] << 24;
        if (n_bytes == 0 || n_bytes > sizeof(payload))
                return -EPROTO;
        r = event_bytes(raw, timeout_ms, payload, n_bytes);
        if (r != 0)
                return r;
        *ret = bfcd__event__unpack(NULL, n_bytes, payload);
        return *ret ? 0 : -EPROTO;
}

int raw_answer(struct raw *raw, uint64_t sequence)
{
        Bfcd__EventReply reply = BFCD__EVENT_REPLY__INIT;
        uint8_t frame[64];
        size_t n;

        reply.sequence = sequence;
        n = bfcd__event_reply__pack(&reply, frame + 4);
        put_length(frame, n);
        return send(raw->events_fd, frame, n + 4, MSG_NOSIGNAL) == (ssize_t)(n + 4) ? 0 : -errno;
}

/* It was sent once more where a shared block was parked for this session only, and woke. */
int raw_let_go(struct raw *raw, uint64_t extent_id)
{
        int r = -ENOENT;

        for (size_t i = raw->n_extents; i-- > 0;) {
                if (raw->extents[i].id != extent_id)
                        continue;
                if (raw->extents[i].fd >= 0)
                        close(raw->extents[i].fd);
                raw->extents[i] = raw->extents[--raw->n_extents];
                r = 0;
        }
        return r;
}

const struct raw_extent *raw_find(const struct raw *raw, uint64_t region_id, uint64_t offset)
{
        for (size_t i = raw->n_extents; i-- > 0;) { /* the newest: a successor replaces */
                const struct raw_extent *e = raw->extents + i;

                if (e->region_id == region_id && offset >= e->offset && offset - e->offset < e->n_bytes)
                        return e;
        }
        return NULL;
}
