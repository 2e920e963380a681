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
#include <unistd.h>

#include "proto/message.h"
#include "tests/unit/wire.h"

#define UNIT         65536u
#define N_UNITS      (unsigned)(REGION_BYTES / UNIT)
#define EXTENT_UNITS (unsigned)(EXTENT_BYTES / UNIT)
#define MAX_SESSIONS 64
#define MAX_HELD     64
#define RETIRING     UINT32_MAX /* in place of a block's id */

struct session {
        struct fake_server *server;
        pthread_t thread;
        struct wire wire;
        struct message_arena *arena;
        uint64_t extents[N_EXTENTS]; /* the id that it was given */
        uint64_t sequence;
        uint64_t acked_sequence;
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
        struct region region;
        struct session sessions[MAX_SESSIONS];
        unsigned n_sessions_ever;
        struct fake_counts counts;
        struct pages_usage *usage_page; /* of the last session that has pages; NULL: none */
        void *client_page;
};

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

/* Announces the extents of these units that the session has not seen. */
static void announce(struct session *s, unsigned first_unit, unsigned n_units)
{
        struct fake_server *f = s->server;
        static uint8_t handle[DEVICE_HANDLE_BYTES];
        bool with_fds = f->mood != FAKE_NO_FD && f->mood != FAKE_HANDLE && f->mood != FAKE_SHORT_HANDLE;
        struct announcement a;
        int unsealed = -1;

        region_announce(&f->region, (uint64_t)first_unit * UNIT, (uint64_t)n_units * UNIT, s->extents, &a);
        if (a.n == 0)
                return;
        for (size_t i = 0; i < a.n; i++) {
                if (f->mood == FAKE_BAD_PARTITION)
                        a.rows[i].partition = 2;
                if (f->mood == FAKE_TWO_PARTITIONS)
                        a.rows[i].partition = 1;
                if (f->mood >= FAKE_HANDLE && f->mood <= FAKE_SHORT_HANDLE)
                        a.rows[i].handle =
                                (ProtobufCBinaryData){ f->mood == FAKE_SHORT_HANDLE ? 63 : 64, handle };
        }
        if (f->mood == FAKE_UNSEALED)
                a.fds[0] = unsealed = odd_page(EXTENT_BYTES, false);
        wire_extents(&s->wire, ++s->sequence, &a, with_fds);
        f->counts.n_extents_sent += (unsigned)a.n;
        if (unsealed >= 0)
                close(unsealed);
}

/* ---- requests ------------------------------------------------------------ */

static void answer_malloc(struct session *s, uint64_t id, uint64_t n_bytes)
{
        struct fake_server *f = s->server;
        Bfcd__Block body = BFCD__BLOCK__INIT;
        unsigned n =
                n_bytes > (uint64_t)N_UNITS * UNIT ? N_UNITS + 1 : (unsigned)((n_bytes + UNIT - 1) / UNIT);
        unsigned at = find_units(f->units, N_UNITS, n);

        if (at == N_UNITS) {
                wire_refuse(&s->wire, id, ENOMEM, "the partition is full");
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
        wire_block(&s->wire, f->mood == FAKE_WRONG_ID ? id + 1000 : id, &body);
}

/* The name says what the answer is to be: block id, region, offset, bytes, bytes as asked for,
 * partition. Anything else: an answer without a block. */
static void on_attach(struct session *s, uint64_t id, const char *name)
{
        Bfcd__Attached attached = BFCD__ATTACHED__INIT;
        Bfcd__Block block = BFCD__BLOCK__INIT;

        if (strcmp(name, "stale") == 0) {
                wire_refuse(&s->wire, id, ESTALE, "it is another one's");
                return;
        }
        if (sscanf(name, "%" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu32,
                   &block.block_id, &block.region_id, &block.offset, &block.n_bytes, &attached.n_requested,
                   &attached.partition) == 6)
                attached.block = &block;
        wire_attached(&s->wire, id, &attached);
}

static void answer_held(struct session *s)
{
        bool in_order = s->server->mood == FAKE_ONE_BY_ONE;

        for (unsigned i = 0; i < s->n_held; i++) {
                unsigned at = in_order ? i : s->n_held - 1 - i;

                answer_malloc(s, s->held[at].id, s->held[at].n_bytes);
                if (in_order) {
                        wire_flush(&s->wire);
                        usleep(20000);
                }
        }
        s->n_held = 0;
}

static bool on_malloc(struct session *s, uint64_t id, uint64_t n_bytes)
{
        switch (s->server->mood) {
        case FAKE_HANG_UP:
                return false;
        case FAKE_REFUSE_ONCE:
                s->server->mood = FAKE_GOOD;
                /* fall through */
        case FAKE_REFUSE:
                wire_refuse(&s->wire, id, EDQUOT, "tenant vision asked for much and may have little");
                return true;
        case FAKE_WRONG_BODY:
                wire_done(&s->wire, id);
                return true;
        case FAKE_GARBAGE:
                wire_put_garbage(&s->wire);
                return true;
        case FAKE_BAD_LENGTH:
                return send(s->wire.fd, "\xff\xff\xff\xff", 4, MSG_NOSIGNAL) == 4;
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
                wire_refuse(&s->wire, id, EINVAL, "no such block");
                return;
        }
        if (s->server->mood == FAKE_FREE_SLOW)
                usleep(50000);
        s->server->counts.n_blocks--;
        if (s->server->mood != FAKE_FREE_UNANSWERED)
                wire_done(&s->wire, id);
}

/* At a unit's begin, as extents have theirs; another place is refused. */
static void on_split(struct session *s, uint64_t id, const Bfcd__Split *split)
{
        struct fake_server *f = s->server;
        uint64_t n_units = split->n_bytes / UNIT, at = 0;
        unsigned n_high = 0;

        for (unsigned i = 0; i < N_UNITS; i++)
                if (f->units[i] != 0 && ((uint64_t)5 << 32 | f->units[i]) == split->block_id &&
                    at++ >= n_units && split->n_bytes % UNIT == 0 && n_units > 0) {
                        f->units[i] = f->last_block + 1;
                        n_high++;
                }
        if (n_high == 0) {
                wire_refuse(&s->wire, id, EINVAL, "no such block, or no such place in it");
                return;
        }
        f->counts.n_blocks++;
        wire_split(&s->wire, id, (uint64_t)5 << 32 | ++f->last_block);
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

static void forget_pages(struct fake_server *f)
{
        if (f->usage_page)
                munmap(f->usage_page, pages_usage_bytes(1));
        if (f->client_page)
                munmap(f->client_page, pages_client_bytes());
        f->usage_page = f->client_page = NULL;
}

static void make_pages(struct fake_server *f, int *ret_fds)
{
        uint64_t stats[PAGES_N_STATS];
        int r;

        forget_pages(f);
        wire_make_pages(1, &f->usage_page, &f->client_page, ret_fds);
        munmap(f->client_page, pages_client_bytes());
        r = pages_map_client(ret_fds[1], (struct pages_client **)(void *)&f->client_page);
        assert(r == 0);
        if (f->mood == FAKE_HELLO_PAGES_VERSION)
                f->usage_page->version++;
        for (unsigned i = 0; i < PAGES_N_STATS; i++)
                stats[i] = i + 1;
        pages_write(f->usage_page->entries, stats);
}

/* How many fds of pages go with the hello's reply. */
static size_t open_pages(struct session *s, int *ret_fds)
{
        enum fake_mood mood = s->server->mood;

        if (mood == FAKE_HELLO_PAGES || mood == FAKE_HELLO_PAGES_VERSION)
                make_pages(s->server, ret_fds);
        else if (mood == FAKE_HELLO_PAGES_NO_MEMFD)
                for (size_t i = 0; i < 2; i++)
                        ret_fds[i] = dup(s->wire.fd);
        else if (mood == FAKE_HELLO_PAGES_UNSEALED || mood == FAKE_HELLO_PAGES_SHORT)
                for (size_t i = 0; i < 2; i++)
                        ret_fds[i] = odd_page(mood == FAKE_HELLO_PAGES_SHORT ? 64 : 4096,
                                              mood == FAKE_HELLO_PAGES_SHORT);
        else
                return 0;
        return 2;
}

static void put_hello(struct session *s, bool wants_events, Bfcd__Reply *reply)
{
        enum fake_mood mood = s->server->mood;
        bool granted = wants_events;
        int fds[3];
        size_t n_fds = 0;

        if (mood == FAKE_HELLO_NO_EVENTS)
                granted = false;
        if (mood == FAKE_HELLO_UNASKED_EVENTS)
                granted = true;
        reply->hello->has_events = granted;
        if (granted && mood != FAKE_HELLO_NO_EVENTS_FD)
                fds[n_fds++] = wire_open_events(&s->wire);
        n_fds += open_pages(s, fds + n_fds);
        reply->hello->has_pages = mood >= FAKE_HELLO_PAGES && mood <= FAKE_HELLO_PAGES_NO_MEMFD;
        wire_put(&s->wire, reply, fds, n_fds);
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

        counts->wants_events = hello->wants_events;
        counts->wants_pages = hello->wants_pages;
        counts->can_resume = hello->can_resume;
        snprintf(counts->name, sizeof(counts->name), "%s", hello->name);
        snprintf(counts->tenant, sizeof(counts->tenant), "%s", hello->tenant);
        snprintf(counts->partition, sizeof(counts->partition), "%s", hello->partition);
        if (mood == FAKE_HELLO_HANG_UP_ONCE)
                s->server->mood = FAKE_GOOD;
        if (mood == FAKE_HELLO_HANG_UP || mood == FAKE_HELLO_HANG_UP_ONCE)
                return false;
        if (mood == FAKE_HELLO_REFUSED) {
                wire_refuse(&s->wire, id, EACCES, "no tenant matches uid 0; vision would match user alice");
                wire_flush(&s->wire);
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
        put_hello(s, hello->wants_events, &reply);
        return true;
}

static void on_usage(struct session *s, uint64_t id, uint32_t partition)
{
        Bfcd__Room room = BFCD__ROOM__INIT;
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;

        stats.bytes_limit = 1000 + partition;
        stats.num_blocks = s->server->counts.n_blocks;
        room.bytes_free = 100;
        room.bytes_total = 1000 + partition;
        wire_usage(&s->wire, id, s->server->mood == FAKE_WRONG_BODY ? NULL : &stats, &room);
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
                wire_refuse(&s->wire, request->id, EEXIST, "the fake has a block of every name");
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
                wire_released(&s->wire, request->id);
                return true;
        case BFCD__REQUEST__BODY_GOODBYE:
                f->counts.n_goodbyes++;
                if (f->mood != FAKE_DEAF)
                        wire_done(&s->wire, request->id);
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

        while (going && frame_reader_receive(s->wire.reader, s->wire.fd, 0) == 0) {
                pthread_mutex_lock(&s->server->lock);
                while (going && frame_reader_next(s->wire.reader, &payload, &n_bytes) == 0) {
                        Bfcd__Request *request = message_unpack_request(s->arena, payload, n_bytes);

                        going = request && on_request(s, request);
                }
                pthread_mutex_unlock(&s->server->lock);
                wire_flush(&s->wire);
        }
        shutdown(s->wire.fd, SHUT_RDWR);
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
        wire_open(&s->wire, fd);
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
        int r;

        assert(f);
        pthread_mutex_init(&f->lock, NULL);
        f->fd = wire_listen("bfc-fake", f->folder, f->path);
        region_open(&f->region);
        r = pipe(f->stop);
        r |= pthread_create(&f->thread, NULL, server_run, f);
        assert(r == 0);
        return f;
}

void fake_server_hang_up(struct fake_server *f)
{
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < f->n_sessions_ever; i++)
                shutdown(f->sessions[i].wire.fd, SHUT_RDWR);
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
                wire_close(&s->wire);
                message_arena_free(s->arena);
        }
        region_close(&f->region);
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

static bool extent_is_used(const struct fake_server *f, unsigned i)
{
        for (unsigned u = i * EXTENT_UNITS; u < (i + 1) * EXTENT_UNITS; u++)
                if (f->units[u] != 0)
                        return true;
        return false;
}

void fake_server_renew_extents(struct fake_server *f)
{
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                if (!extent_is_used(f, i))
                        device_destroy(f->region.device, &f->region.extents[i]);
        }
        pthread_mutex_unlock(&f->lock);
}

/* ---- events -------------------------------------------------------------- */

int fake_server_await_answer(struct fake_server *f, int timeout_ms)
{
        Bfcd__EventReply *reply;
        struct session *s = f->sessions;
        const uint8_t *payload;
        struct pollfd p;
        size_t n_bytes;
        int answer;

        while (s->wire.events_fd < 0)
                s++;
        p = (struct pollfd){ .fd = s->wire.events_fd, .events = POLLIN };
        if (poll(&p, 1, timeout_ms) != 1 ||
            frame_reader_receive(s->wire.events_reader, s->wire.events_fd, 0) != 0 ||
            frame_reader_next(s->wire.events_reader, &payload, &n_bytes) != 0)
                return -1;
        reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);
        answer = reply ? (int)reply->sequence : -1;
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

        while ((r = frame_reader_next(s->wire.events_reader, &payload, &n_bytes)) > 0)
                if (frame_reader_receive(s->wire.events_reader, s->wire.events_fd, 0) != 0)
                        return false;
        assert(r == 0);
        reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);
        assert(reply);
        good = reply->sequence == s->event_sequence;
        bfcd__event_reply__free_unpacked(reply, NULL);
        return good;
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
                ret_retiring[i] = f->region.extents[i].fd >= 0 && !extent_is_used(f, i);
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
                if (retiring[i] && s->extents[i] == s->server->region.ids[i])
                        ids[n++] = s->extents[i];
        if (n == 0)
                return;
        wire_retire(&s->wire, ++s->event_sequence, ids, n, -1);
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
                if (f->sessions[k].wire.events_fd >= 0)
                        retire_ask(&f->sessions[k], retiring);
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < N_EXTENTS; i++) {
                if (!retiring[i])
                        continue;
                device_destroy(f->region.device, &f->region.extents[i]);
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
                wire_retire(&s->wire, ++s->event_sequence, &used, 1, -1);
                break;
        case FAKE_RETIRE_UNKNOWN:
                wire_retire(&s->wire, ++s->event_sequence, &unknown, 1, -1);
                break;
        case FAKE_RETIRE_NOTHING:
                wire_retire(&s->wire, ++s->event_sequence, NULL, 0, -1);
                break;
        case FAKE_RETIRE_FIRST:
                wire_retire(&s->wire, ++s->event_sequence, &s->extents[0], 1, -1);
                break;
        case FAKE_TRIM:
                wire_trim(&s->wire);
                break;
        case FAKE_PRESSURE:
                wire_pressure(&s->wire, 0, 1 << 20);
                break;
        case FAKE_DRAINING:
        case FAKE_DRAINING_OVER:
                wire_draining(&s->wire, 0, event == FAKE_DRAINING_OVER);
                break;
        case FAKE_DRAINING_WRONG:
                wire_draining(&s->wire, 77, false);
                break;
        case FAKE_EVENT_FD:
                wire_retire(&s->wire, ++s->event_sequence, &used, 1, s->wire.fd);
                break;
        case FAKE_EVENT_UNKNOWN:
                send(s->wire.events_fd, "\2\0\0\0\170\1", 6, MSG_NOSIGNAL);
                break;
        case FAKE_EVENT_GARBAGE:
                send(s->wire.events_fd, "\2\0\0\0\xff\xff", 6, MSG_NOSIGNAL);
                break;
        case FAKE_EVENT_LENGTH:
                send(s->wire.events_fd, "\xff\xff\xff\xff", 4, MSG_NOSIGNAL);
                break;
        default:
                shutdown(s->wire.events_fd, SHUT_RDWR);
        }
}

unsigned fake_server_event(struct fake_server *f, enum fake_event event)
{
        if (event == FAKE_RETIRE)
                return retire(f);
        pthread_mutex_lock(&f->lock);
        for (unsigned i = 0; i < f->n_sessions_ever; i++)
                if (f->sessions[i].wire.events_fd >= 0)
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
