/* A stand-in for the daemon; see fake_server.h. One thread for each session.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/fake_server.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "device/device.h"
#include "proto/bfcd.pb-c.h"
#include "proto/frame.h"
#include "proto/message.h"

#define UNIT         65536u
#define N_UNITS      1024u /* of the region */
#define EXTENT_BYTES (UINT64_C(2) << 20)
#define EXTENT_UNITS (unsigned)(EXTENT_BYTES / UNIT)
#define N_EXTENTS    (N_UNITS / EXTENT_UNITS)
#define MAX_SESSIONS 64
#define MAX_HELD     64
#define REGION_ID    7
#define RETIRING     UINT32_MAX /* in place of a block's id */

struct session {
        struct fake_server *server;
        pthread_t thread;
        int fd;
        struct frame_reader *reader;
        struct frame_writer *writer;
        struct message_arena *arena;
        uint64_t extents[N_EXTENTS]; /* the id that it was given */
        uint64_t sequence;
        uint64_t acked_sequence;
        int events_fd; /* -1: none */
        struct frame_reader *events_reader;
        uint64_t event_sequence;
        struct {
                uint64_t id;
                uint64_t n_bytes;
        } held[MAX_HELD];
        unsigned n_held;
};

struct fake_server {
        char folder[64];
        char path[96];
        int fd;
        int stop[2]; /* a pipe; closed to stop the accepting thread */
        pthread_t thread;
        pthread_mutex_t lock; /* everything below, and what sessions share */
        enum fake_mood mood;
        unsigned n_hold;
        uint32_t units[N_UNITS]; /* the block's id, or 0 */
        uint32_t last_block;
        uint64_t last_extent;
        uint64_t extent_ids[N_EXTENTS];
        struct device *device;
        struct device_extent extents[N_EXTENTS];
        struct session sessions[MAX_SESSIONS];
        unsigned n_sessions_ever;
        struct fake_counts counts;
        void *usage_page; /* of the last session that has pages; NULL: none */
        void *client_page;
};

/* ---- sending ------------------------------------------------------------- */

static void flush(struct session *s)
{
        while (frame_writer_flush(s->writer, s->fd) == FRAME_AGAIN) {
                struct pollfd p = { .fd = s->fd, .events = POLLOUT };

                poll(&p, 1, 1000);
        }
}

static void put(struct session *s, const Bfcd__Reply *reply, const int *fds, size_t n_fds)
{
        uint8_t *payload;
        int r = frame_writer_add(s->writer, bfcd__reply__get_packed_size(reply), fds, n_fds, &payload);

        assert(r == 0);
        bfcd__reply__pack(reply, payload);
}

static void refuse(struct session *s, uint64_t id, int error, const char *sentence)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Refusal body = BFCD__REFUSAL__INIT;

        body.error = (uint32_t)error;
        body.message = (char *)(uintptr_t)sentence;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_REFUSAL;
        reply.refusal = &body;
        put(s, &reply, NULL, 0);
}

static void done(struct session *s, uint64_t id)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Done body = BFCD__DONE__INIT;

        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_DONE;
        reply.done = &body;
        put(s, &reply, NULL, 0);
}

static void put_extents(struct session *s, Bfcd__Extent **list, const int *fds, size_t n)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Extents body = BFCD__EXTENTS__INIT;

        body.sequence = ++s->sequence;
        body.n_extents = n;
        body.extents = list;
        reply.body_case = BFCD__REPLY__BODY_EXTENTS;
        reply.extents = &body;
        if (s->server->mood == FAKE_NO_FD || s->server->mood == FAKE_HANDLE ||
            s->server->mood == FAKE_SHORT_HANDLE)
                put(s, &reply, NULL, 0);
        else
                put(s, &reply, fds, n);
        s->server->counts.n_extents_sent += (unsigned)n;
}

/* Announces the extents of these units that the session has not seen. */
static void announce(struct session *s, unsigned first_unit, unsigned n_units)
{
        struct fake_server *f = s->server;
        Bfcd__Extent rows[N_EXTENTS], *list[N_EXTENTS];
        static uint8_t handle[DEVICE_HANDLE_BYTES];
        int fds[N_EXTENTS], unsealed = -1;
        size_t n = 0;

        for (unsigned i = first_unit / EXTENT_UNITS; i <= (first_unit + n_units - 1) / EXTENT_UNITS; i++) {
                if (f->extents[i].fd < 0) {
                        int r = device_make(f->device, DEVICE_SHARE_FD, EXTENT_BYTES, &f->extents[i]);

                        assert(r == 0);
                        f->extent_ids[i] = ++f->last_extent;
                }
                if (s->extents[i] == f->extent_ids[i])
                        continue;
                s->extents[i] = f->extent_ids[i];
                bfcd__extent__init(&rows[n]);
                rows[n].extent_id = f->extent_ids[i];
                rows[n].region_id = REGION_ID;
                rows[n].region_bytes = (uint64_t)N_UNITS * UNIT;
                rows[n].offset = i * EXTENT_BYTES;
                rows[n].n_bytes = EXTENT_BYTES;
                rows[n].partition = f->mood == FAKE_BAD_PARTITION    ? 2
                                    : f->mood == FAKE_TWO_PARTITIONS ? 1
                                                                     : 0;
                if (f->mood >= FAKE_HANDLE && f->mood <= FAKE_SHORT_HANDLE)
                        rows[n].handle =
                                (ProtobufCBinaryData){ f->mood == FAKE_SHORT_HANDLE ? 63 : 64, handle };
                list[n] = &rows[n];
                fds[n++] = f->extents[i].fd;
        }
        if (n > 0 && f->mood == FAKE_UNSEALED) {
                unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
                assert(ftruncate(unsealed, (off_t)EXTENT_BYTES) == 0);
                fds[0] = unsealed;
        }
        if (n > 0)
                put_extents(s, list, fds, n);
        if (unsealed >= 0)
                close(unsealed);
}

/* ---- requests ------------------------------------------------------------ */

static unsigned find_units(const struct fake_server *f, unsigned n)
{
        unsigned n_free = 0;

        for (unsigned i = 0; i < N_UNITS; i++) {
                n_free = f->units[i] == 0 ? n_free + 1 : 0;
                if (n_free == n)
                        return i + 1 - n;
        }
        return N_UNITS;
}

static void answer_malloc(struct session *s, uint64_t id, uint64_t n_bytes)
{
        struct fake_server *f = s->server;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Block body = BFCD__BLOCK__INIT;
        unsigned n =
                n_bytes > (uint64_t)N_UNITS * UNIT ? N_UNITS + 1 : (unsigned)((n_bytes + UNIT - 1) / UNIT);
        unsigned at = find_units(f, n);

        if (at == N_UNITS) {
                refuse(s, id, ENOMEM, "the partition is full");
                return;
        }
        f->last_block++;
        for (unsigned i = 0; i < n; i++)
                f->units[at + i] = f->last_block;
        f->counts.n_blocks++;
        announce(s, at, n);
        body.block_id = (uint64_t)5 << 32 | f->last_block;
        body.region_id = f->mood == FAKE_BAD_REGION ? 99 : REGION_ID;
        body.offset = f->mood == FAKE_BAD_OFFSET ? (uint64_t)(N_UNITS - 1) * UNIT : (uint64_t)at * UNIT;
        if (f->mood == FAKE_SAME_PLACE)
                body.offset = 0;
        body.n_bytes = f->mood == FAKE_TOO_SMALL ? n_bytes - 1 : (n_bytes + 255) / 256 * 256;
        reply.id = f->mood == FAKE_WRONG_ID ? id + 1000 : id;
        reply.body_case = BFCD__REPLY__BODY_BLOCK;
        reply.block = &body;
        put(s, &reply, NULL, 0);
}

/* The name says what the answer is to be: block id, region, offset, bytes, bytes as asked for,
 * partition. Anything else: an answer without a block. */
static void on_attach(struct session *s, uint64_t id, const char *name)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Attached attached = BFCD__ATTACHED__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;

        if (strcmp(name, "stale") == 0) {
                refuse(s, id, ESTALE, "it is another one's");
                return;
        }
        if (sscanf(name, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu32,
                   &block.block_id, &block.region_id, &block.offset, &block.n_bytes, &attached.n_requested,
                   &attached.partition) == 6)
                attached.block = &block;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_ATTACHED;
        reply.attached = &attached;
        put(s, &reply, NULL, 0);
}

static void answer_held(struct session *s)
{
        bool in_order = s->server->mood == FAKE_ONE_BY_ONE;

        for (unsigned i = 0; i < s->n_held; i++) {
                unsigned at = in_order ? i : s->n_held - 1 - i;

                answer_malloc(s, s->held[at].id, s->held[at].n_bytes);
                if (in_order) {
                        flush(s);
                        usleep(20000);
                }
        }
        s->n_held = 0;
}

static bool on_malloc(struct session *s, uint64_t id, uint64_t n_bytes)
{
        uint8_t *payload;

        switch (s->server->mood) {
        case FAKE_HANG_UP:
                return false;
        case FAKE_REFUSE_ONCE:
                s->server->mood = FAKE_GOOD;
                /* fall through */
        case FAKE_REFUSE:
                refuse(s, id, EDQUOT, "tenant vision asked for much and may have little");
                return true;
        case FAKE_WRONG_BODY:
                done(s, id);
                return true;
        case FAKE_GARBAGE:
                assert(frame_writer_add(s->writer, 3, NULL, 0, &payload) == 0);
                memset(payload, 0xff, 3);
                return true;
        case FAKE_BAD_LENGTH:
                return send(s->fd, "\xff\xff\xff\xff", 4, MSG_NOSIGNAL) == 4;
        case FAKE_HOLD:
        case FAKE_ONE_BY_ONE:
                s->held[s->n_held].id = id;
                s->held[s->n_held++].n_bytes = n_bytes;
                if (s->n_held == s->server->n_hold)
                        answer_held(s);
                return true;
        default:
                answer_malloc(s, id, n_bytes);
                return true;
        }
}

static void on_free(struct session *s, uint64_t id, uint64_t block_id)
{
        bool found = false;

        for (unsigned i = 0; i < N_UNITS; i++) {
                if (s->server->units[i] != 0 && ((uint64_t)5 << 32 | s->server->units[i]) == block_id) {
                        s->server->units[i] = 0;
                        found = true;
                }
        }
        if (s->server->mood == FAKE_FREE_REFUSED || !found) {
                refuse(s, id, EINVAL, "no such block");
                return;
        }
        if (s->server->mood == FAKE_FREE_SLOW)
                usleep(50000);
        s->server->counts.n_blocks--;
        if (s->server->mood != FAKE_FREE_UNANSWERED)
                done(s, id);
}

/* At a unit's begin, as extents have theirs; another place is refused. */
static void on_split(struct session *s, uint64_t id, const Bfcd__Split *split)
{
        struct fake_server *f = s->server;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__SplitReply body = BFCD__SPLIT_REPLY__INIT;
        uint64_t n_units = split->n_bytes / UNIT, at = 0;
        unsigned n_high = 0;

        for (unsigned i = 0; i < N_UNITS; i++)
                if (f->units[i] != 0 && ((uint64_t)5 << 32 | f->units[i]) == split->block_id &&
                    at++ >= n_units && split->n_bytes % UNIT == 0 && n_units > 0) {
                        f->units[i] = f->last_block + 1;
                        n_high++;
                }
        if (n_high == 0) {
                refuse(s, id, EINVAL, "no such block, or no such place in it");
                return;
        }
        f->counts.n_blocks++;
        body.block_id = (uint64_t)5 << 32 | ++f->last_block;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_SPLIT;
        reply.split = &body;
        put(s, &reply, NULL, 0);
}

/* The second partition. */
static void tell_infer(enum fake_mood mood, Bfcd__PartitionInfo *infer)
{
        static uint8_t second_gpu[] = { 0xfa, 0x4e, 0xc0, 0xda, 0, 0, 0x40, 0, 0x80, 0, 0, 0, 0, 0, 0, 2 };

        infer->name = (char *)(uintptr_t) "infer";
        infer->device = (char *)(uintptr_t) "host";
        infer->share = (char *)(uintptr_t) "fd";
        infer->usage_entry = 1;
        if (mood == FAKE_HELLO_GPUS || mood == FAKE_HELLO_ODD_UUID) {
                infer->device = (char *)(uintptr_t) "cuda:1";
                infer->device_uuid.data = second_gpu;
                infer->device_uuid.len = mood == FAKE_HELLO_GPUS ? 16 : 8;
        }
        if (mood == FAKE_HELLO_ODD_SHARE)
                infer->share = (char *)(uintptr_t) "telepathy";
        if (mood == FAKE_HELLO_IPC_ON_HOST)
                infer->share = (char *)(uintptr_t) "cuda-ipc";
}

/* The client's end goes with the reply. */
static int open_events(struct session *s)
{
        int fds[2], r;

        r = socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds);
        r |= frame_reader_new(false, &s->events_reader);
        assert(r == 0);
        s->events_fd = fds[0];
        return fds[1];
}

static void forget_pages(struct fake_server *f)
{
        if (f->usage_page)
                munmap(f->usage_page, pages_usage_bytes(1));
        if (f->client_page)
                munmap(f->client_page, pages_client_bytes());
        f->usage_page = f->client_page = NULL;
}

/* A file of so many bytes without seals, or with those of an extent. */
static int odd_page(size_t n_bytes, bool sealed)
{
        int fd = memfd_create("odd", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        int r = ftruncate(fd, (off_t)n_bytes);

        if (sealed)
                r |= fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE);
        assert(r == 0);
        return fd;
}

static void make_pages(struct fake_server *f, int *ret_fds)
{
        uint64_t figures[PAGES_N_FIGURES];
        struct pages_usage *usage;
        int r;

        forget_pages(f);
        r = pages_make("usage", pages_usage_bytes(1), true, &f->usage_page, &ret_fds[0]);
        r |= pages_make("client", pages_client_bytes(), false, &f->client_page, &ret_fds[1]);
        munmap(f->client_page, pages_client_bytes());
        r |= pages_map_client(ret_fds[1], (struct pages_client **)(void *)&f->client_page);
        assert(r == 0);
        usage = f->usage_page;
        usage->magic = PAGES_USAGE_MAGIC;
        usage->version = f->mood == FAKE_HELLO_PAGES_VERSION ? PAGES_VERSION + 1 : PAGES_VERSION;
        usage->n_entries = 1;
        usage->entry_bytes = sizeof(struct pages_entry);
        for (unsigned i = 0; i < PAGES_N_FIGURES; i++)
                figures[i] = i + 1;
        pages_write(usage->entries, figures);
}

/* How many fds of pages go with the hello's reply. */
static size_t open_pages(struct session *s, int *ret_fds)
{
        enum fake_mood mood = s->server->mood;

        if (mood == FAKE_HELLO_PAGES || mood == FAKE_HELLO_PAGES_VERSION)
                make_pages(s->server, ret_fds);
        else if (mood == FAKE_HELLO_PAGES_NO_MEMFD)
                for (size_t i = 0; i < 2; i++)
                        ret_fds[i] = dup(s->fd);
        else if (mood == FAKE_HELLO_PAGES_UNSEALED || mood == FAKE_HELLO_PAGES_SHORT)
                for (size_t i = 0; i < 2; i++)
                        ret_fds[i] = odd_page(mood == FAKE_HELLO_PAGES_SHORT ? 64 : 4096,
                                              mood == FAKE_HELLO_PAGES_SHORT);
        else
                return 0;
        return 2;
}

static void put_hello(struct session *s, uint64_t capabilities, Bfcd__Reply *reply)
{
        enum fake_mood mood = s->server->mood;
        bool granted = capabilities & BFCD__CAPABILITY__CAPABILITY_EVENTS;
        int fds[3];
        size_t n_fds = 0;

        if (mood == FAKE_HELLO_NO_EVENTS)
                granted = false;
        if (mood == FAKE_HELLO_UNASKED_EVENTS)
                granted = true;
        reply->hello->capabilities = granted ? BFCD__CAPABILITY__CAPABILITY_EVENTS : 0;
        if (granted && mood != FAKE_HELLO_NO_EVENTS_FD)
                fds[n_fds++] = open_events(s);
        n_fds += open_pages(s, fds + n_fds);
        if (mood >= FAKE_HELLO_PAGES && mood <= FAKE_HELLO_PAGES_NO_MEMFD)
                reply->hello->capabilities |= BFCD__CAPABILITY__CAPABILITY_PAGES;
        put(s, reply, fds, n_fds);
        for (size_t i = 0; i < n_fds; i++)
                close(fds[i]);
}

static bool on_hello(struct session *s, uint64_t id, const Bfcd__Hello *hello)
{
        struct fake_counts *counts = &s->server->counts;
        enum fake_mood mood = s->server->mood;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__HelloReply body = BFCD__HELLO_REPLY__INIT;
        Bfcd__PartitionInfo train = BFCD__PARTITION_INFO__INIT, infer = BFCD__PARTITION_INFO__INIT;
        Bfcd__PartitionInfo *list[] = { &train, &infer };

        counts->capabilities = hello->capabilities;
        snprintf(counts->name, sizeof(counts->name), "%s", hello->name);
        snprintf(counts->tenant, sizeof(counts->tenant), "%s", hello->tenant);
        snprintf(counts->partition, sizeof(counts->partition), "%s", hello->partition);
        if (mood == FAKE_HELLO_HANG_UP)
                return false;
        if (mood == FAKE_HELLO_REFUSED) {
                refuse(s, id, EACCES, "no tenant matches uid 0; vision would match user alice");
                flush(s);
                return false;
        }
        train.name = (char *)(uintptr_t) "train";
        train.bytes_limit = infer.bytes_limit = UINT64_C(16) << 20;
        infer.usage_entry = 1;
        tell_infer(mood, &infer);
        body.version = mood == FAKE_HELLO_VERSION_0 ? 0 : mood == FAKE_HELLO_VERSION_2 ? 2 : 1;
        body.tenant = (char *)(uintptr_t) "vision";
        body.n_partitions = mood == FAKE_HELLO_NO_PARTITION ? 0 : 2;
        body.partitions = list;
        body.default_partition = mood == FAKE_HELLO_BAD_DEFAULT ? 2 : 0;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_HELLO;
        reply.hello = &body;
        put_hello(s, hello->capabilities, &reply);
        return true;
}

static void on_usage(struct session *s, uint64_t id, uint32_t partition)
{
        Bfcd__Room room = BFCD__ROOM__INIT;
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__UsageReply body = BFCD__USAGE_REPLY__INIT;
        Bfcd__Figures figures = BFCD__FIGURES__INIT;

        figures.bytes_limit = 1000 + partition;
        figures.num_blocks = s->server->counts.n_blocks;
        room.bytes_free = 100;
        room.bytes_total = 1000 + partition;
        body.room = &room;
        body.figures = s->server->mood == FAKE_WRONG_BODY ? NULL : &figures;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_USAGE;
        reply.usage = &body;
        put(s, &reply, NULL, 0);
}

/* There are no extents to release. */
static void on_release(struct session *s, uint64_t id)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Released body = BFCD__RELEASED__INIT;

        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_RELEASED;
        reply.released = &body;
        put(s, &reply, NULL, 0);
}

static bool on_request(struct session *s, const Bfcd__Request *request)
{
        struct fake_server *f = s->server;

        switch (request->body_case) {
        case BFCD__REQUEST__BODY_HELLO:
                return on_hello(s, request->id, request->hello);
        case BFCD__REQUEST__BODY_MALLOC:
                f->counts.wait_ms = request->malloc->wait_ms;
                snprintf(f->counts.tag, sizeof(f->counts.tag), "%s", request->malloc->tag);
                return on_malloc(s, request->id, request->malloc->n_bytes);
        case BFCD__REQUEST__BODY_FREE:
                on_free(s, request->id, request->free->block_id);
                return true;
        case BFCD__REQUEST__BODY_SPLIT:
                on_split(s, request->id, request->split);
                return true;
        case BFCD__REQUEST__BODY_PUBLISH:
                refuse(s, request->id, EEXIST, "the fake has a block of every name");
                return true;
        case BFCD__REQUEST__BODY_ATTACH:
                on_attach(s, request->id, request->attach->name);
                return true;
        case BFCD__REQUEST__BODY_ACK:
                f->counts.n_acks++;
                if (request->ack->sequence <= s->acked_sequence || request->ack->sequence > s->sequence)
                        return false;
                s->acked_sequence = request->ack->sequence;
                return true;
        case BFCD__REQUEST__BODY_USAGE:
                on_usage(s, request->id, request->usage->partition);
                return true;
        case BFCD__REQUEST__BODY_RELEASE:
                on_release(s, request->id);
                return true;
        case BFCD__REQUEST__BODY_GOODBYE:
                f->counts.n_goodbyes++;
                if (f->mood != FAKE_DEAF)
                        done(s, request->id);
                return true;
        default:
                return false;
        }
}

/* ---- threads ------------------------------------------------------------- */

static void *session_run(void *userdata)
{
        struct session *s = userdata;
        const uint8_t *payload;
        bool going = true;
        size_t n_bytes;

        while (going && frame_reader_receive(s->reader, s->fd, 0) == 0) {
                pthread_mutex_lock(&s->server->lock);
                while (going && frame_reader_next(s->reader, &payload, &n_bytes) == 0) {
                        Bfcd__Request *request = message_unpack_request(s->arena, payload, n_bytes);

                        going = request && on_request(s, request);
                }
                pthread_mutex_unlock(&s->server->lock);
                flush(s);
        }
        shutdown(s->fd, SHUT_RDWR);
        pthread_mutex_lock(&s->server->lock);
        s->server->counts.n_sessions--;
        pthread_mutex_unlock(&s->server->lock);
        return NULL;
}

static void session_start(struct fake_server *f, int fd)
{
        struct session *s;
        int r = 0;

        pthread_mutex_lock(&f->lock);
        assert(f->n_sessions_ever < MAX_SESSIONS);
        s = &f->sessions[f->n_sessions_ever++];
        s->server = f;
        s->fd = fd;
        s->events_fd = -1;
        r |= frame_reader_new(false, &s->reader);
        r |= frame_writer_new(16u << 20, &s->writer);
        r |= message_arena_new(MESSAGE_ARENA_BYTES, &s->arena);
        r |= pthread_create(&s->thread, NULL, session_run, s);
        assert(r == 0);
        f->counts.n_sessions++;
        pthread_mutex_unlock(&f->lock);
}

static void *server_run(void *userdata)
{
        struct fake_server *f = userdata;
        struct pollfd p[2] = { { .fd = f->fd, .events = POLLIN }, { .fd = f->stop[0], .events = POLLIN } };

        for (;;) {
                int fd;

                poll(p, 2, -1);
                if (p[1].revents)
                        return NULL;
                fd = accept4(f->fd, NULL, NULL, SOCK_CLOEXEC);
                if (fd >= 0)
                        session_start(f, fd);
        }
}

struct fake_server *fake_server_new(void)
{
        struct fake_server *f = calloc(1, sizeof(*f));
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int r;

        assert(f);
        pthread_mutex_init(&f->lock, NULL);
        strcpy(f->folder, "/tmp/bfc-fake-XXXXXX");
        assert(mkdtemp(f->folder));
        snprintf(f->path, sizeof(f->path), "%s/sock", f->folder);
        strcpy(address.sun_path, f->path);
        r = device_host_new(&f->device);
        assert(r == 0);
        for (size_t i = 0; i < N_EXTENTS; i++)
                f->extents[i] = DEVICE_EXTENT_EMPTY;
        f->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        r |= bind(f->fd, (struct sockaddr *)&address, sizeof(address));
        r |= listen(f->fd, 64);
        r |= pipe(f->stop);
        r |= pthread_create(&f->thread, NULL, server_run, f);
        assert(r == 0);
        return f;
}

void fake_server_hang_up(struct fake_server *f)
{
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < f->n_sessions_ever; i++)
                shutdown(f->sessions[i].fd, SHUT_RDWR);
        pthread_mutex_unlock(&f->lock);
}

struct fake_server *fake_server_free(struct fake_server *f)
{
        close(f->stop[1]);
        pthread_join(f->thread, NULL);
        fake_server_hang_up(f);
        for (unsigned i = 0; i < f->n_sessions_ever; i++) {
                struct session *s = &f->sessions[i];

                pthread_join(s->thread, NULL);
                close(s->fd);
                if (s->events_fd >= 0)
                        close(s->events_fd);
                frame_reader_free(s->events_reader);
                frame_reader_free(s->reader);
                frame_writer_free(s->writer);
                message_arena_free(s->arena);
        }
        for (size_t i = 0; i < N_EXTENTS; i++)
                device_destroy(f->device, &f->extents[i]);
        device_free(f->device);
        forget_pages(f);
        close(f->fd);
        close(f->stop[0]);
        unlink(f->path);
        rmdir(f->folder);
        pthread_mutex_destroy(&f->lock);
        free(f);
        return NULL;
}

const char *fake_server_path(const struct fake_server *f)
{
        return f->path;
}

void fake_server_set_mood(struct fake_server *f, enum fake_mood mood, unsigned n_hold)
{
        pthread_mutex_lock(&f->lock);
        f->mood = mood;
        f->n_hold = n_hold;
        pthread_mutex_unlock(&f->lock);
}

void fake_server_renew_extents(struct fake_server *f)
{
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                bool used = false;

                for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                        used = used || f->units[u] != 0;
                if (!used)
                        device_destroy(f->device, &f->extents[i]);
        }
        pthread_mutex_unlock(&f->lock);
}

/* ---- events -------------------------------------------------------------- */

static void send_event(struct session *s, const Bfcd__Event *event, int fd)
{
        struct frame_writer *w = NULL;
        uint8_t *payload;
        int r = frame_writer_new(65536, &w);

        r |= frame_writer_add(w, bfcd__event__get_packed_size(event), &fd, fd >= 0, &payload);
        assert(r == 0);
        bfcd__event__pack(event, payload);
        (void)frame_writer_flush(w, s->events_fd);
        frame_writer_free(w);
}

static void send_retire(struct session *s, uint64_t *ids, size_t n_ids, int fd)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Retire retire = BFCD__RETIRE__INIT;

        retire.sequence = ++s->event_sequence;
        retire.n_extent_ids = n_ids;
        retire.extent_ids = ids;
        event.body_case = BFCD__EVENT__BODY_RETIRE;
        event.retire = &retire;
        send_event(s, &event, fd);
}

static void send_trim(struct session *s)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Trim trim = BFCD__TRIM__INIT;
        Bfcd__TrimRange range = BFCD__TRIM_RANGE__INIT, *ranges[] = { &range };

        range.region_id = REGION_ID;
        range.n_bytes = (uint64_t)N_UNITS * UNIT;
        trim.sequence = 1;
        trim.n_bytes = UINT64_MAX;
        trim.n_ranges = 1;
        trim.ranges = ranges;
        event.body_case = BFCD__EVENT__BODY_TRIM;
        event.trim = &trim;
        send_event(s, &event, -1);
}

static void send_draining(struct session *s, uint32_t partition, bool is_over)
{
        Bfcd__Event event = BFCD__EVENT__INIT;
        Bfcd__Draining draining = BFCD__DRAINING__INIT;

        draining.partition = partition;
        draining.is_over = is_over;
        event.body_case = BFCD__EVENT__BODY_DRAINING;
        event.draining = &draining;
        send_event(s, &event, -1);
}

int fake_server_await_answer(struct fake_server *f, int timeout_ms)
{
        Bfcd__EventReply *reply;
        struct session *s = f->sessions;
        const uint8_t *payload;
        struct pollfd p;
        size_t n_bytes;
        int answer;

        while (s->events_fd < 0)
                s++;
        p = (struct pollfd){ .fd = s->events_fd, .events = POLLIN };
        if (poll(&p, 1, timeout_ms) != 1 || frame_reader_receive(s->events_reader, s->events_fd, 0) != 0 ||
            frame_reader_next(s->events_reader, &payload, &n_bytes) != 0)
                return -1;
        reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);
        answer = reply ? (int)reply->body_case : -1;
        bfcd__event_reply__free_unpacked(reply, NULL);
        return answer;
}

/* Whether the answer is the right one. Waits for it. */
static bool receive_retired(struct session *s)
{
        Bfcd__EventReply *reply;
        const uint8_t *payload;
        size_t n_bytes;
        bool good;
        int r;

        while ((r = frame_reader_next(s->events_reader, &payload, &n_bytes)) > 0)
                if (frame_reader_receive(s->events_reader, s->events_fd, 0) != 0)
                        return false;
        assert(r == 0);
        reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);
        assert(reply && reply->body_case == BFCD__EVENT_REPLY__BODY_RETIRED);
        good = reply->retired->sequence == s->event_sequence;
        bfcd__event_reply__free_unpacked(reply, NULL);
        return good;
}

static bool extent_is_used(const struct fake_server *f, unsigned i)
{
        for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                if (f->units[u] != 0)
                        return true;
        return false;
}

static void extent_set_units(struct fake_server *f, unsigned i, uint32_t value)
{
        for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                f->units[u] = value;
}

/* Marks what is not used and was acknowledged by everybody, so that no block comes
 * to lie there meanwhile. */
static unsigned retire_begin(struct fake_server *f, bool *ret_retiring)
{
        unsigned n = 0;

        for (unsigned k = 0; k < f->n_sessions_ever; k++)
                if (f->sessions[k].acked_sequence < f->sessions[k].sequence)
                        return 0;
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                ret_retiring[i] = f->extents[i].fd >= 0 && !extent_is_used(f, i);
                if (!ret_retiring[i])
                        continue;
                extent_set_units(f, i, RETIRING);
                n++;
        }
        return n;
}

static void retire_ask(struct session *s, const bool *retiring)
{
        uint64_t ids[N_EXTENTS];
        size_t n = 0;

        for (unsigned i = 0; i < N_EXTENTS; i++)
                if (retiring[i] && s->extents[i] == s->server->extent_ids[i])
                        ids[n++] = s->extents[i];
        if (n == 0)
                return;
        send_retire(s, ids, n, -1);
        if (!receive_retired(s))
                assert(false && "a Retire was not confirmed");
}

static unsigned retire(struct fake_server *f)
{
        bool retiring[N_EXTENTS] = { false };
        unsigned n;

        pthread_mutex_lock(&f->lock);
        n = retire_begin(f, retiring);
        pthread_mutex_unlock(&f->lock);
        for (unsigned k = 0; n > 0 && k < f->n_sessions_ever; k++)
                if (f->sessions[k].events_fd >= 0)
                        retire_ask(&f->sessions[k], retiring);
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                if (!retiring[i])
                        continue;
                device_destroy(f->device, &f->extents[i]);
                extent_set_units(f, i, 0);
        }
        pthread_mutex_unlock(&f->lock);
        return n;
}

static void lie(struct session *s, enum fake_event event)
{
        uint64_t used = 0, unknown = 4711;

        for (unsigned i = 0; i < N_EXTENTS; i++)
                if (s->extents[i] != 0 && extent_is_used(s->server, i))
                        used = s->extents[i];
        switch (event) {
        case FAKE_RETIRE_USED:
                send_retire(s, &used, 1, -1);
                break;
        case FAKE_RETIRE_UNKNOWN:
                send_retire(s, &unknown, 1, -1);
                break;
        case FAKE_RETIRE_NOTHING:
                send_retire(s, NULL, 0, -1);
                break;
        case FAKE_RETIRE_FIRST:
                send_retire(s, &s->extents[0], 1, -1);
                break;
        case FAKE_TRIM:
                send_trim(s);
                break;
        case FAKE_DRAINING:
        case FAKE_DRAINING_OVER:
                send_draining(s, 0, event == FAKE_DRAINING_OVER);
                break;
        case FAKE_DRAINING_WRONG:
                send_draining(s, 77, false);
                break;
        case FAKE_EVENT_FD:
                send_retire(s, &used, 1, s->fd);
                break;
        case FAKE_EVENT_UNKNOWN:
                send(s->events_fd, "\2\0\0\0\170\1", 6, MSG_NOSIGNAL);
                break;
        case FAKE_EVENT_GARBAGE:
                send(s->events_fd, "\2\0\0\0\xff\xff", 6, MSG_NOSIGNAL);
                break;
        case FAKE_EVENT_LENGTH:
                send(s->events_fd, "\xff\xff\xff\xff", 4, MSG_NOSIGNAL);
                break;
        default:
                shutdown(s->events_fd, SHUT_RDWR);
        }
}

unsigned fake_server_event(struct fake_server *f, enum fake_event event)
{
        if (event == FAKE_RETIRE)
                return retire(f);
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < f->n_sessions_ever; i++)
                if (f->sessions[i].events_fd >= 0)
                        lie(&f->sessions[i], event);
        pthread_mutex_unlock(&f->lock);
        return 0;
}

void fake_server_pages(struct fake_server *f, struct pages_usage **ret_usage,
                       struct pages_client **ret_client)
{
        pthread_mutex_lock(&f->lock);
        *ret_usage = f->usage_page;
        *ret_client = f->client_page;
        pthread_mutex_unlock(&f->lock);
}

struct fake_counts fake_server_count(struct fake_server *f)
{
        struct fake_counts counts;

        pthread_mutex_lock(&f->lock);
        counts = f->counts;
        pthread_mutex_unlock(&f->lock);
        return counts;
}
