/* Other versions of the protocol at the other end: the recorded bytes of a client are played to
 * today's daemon, those of a daemon to today's library and bfcctl, and both ends meet
 * fields of a later version. Answers are read by the schema of version 1, as an old program reads them.
 *
 * With BFC_RECORD_V1=FILE the exchange is recorded to that file instead: the job and bfcctl talk to the
 * daemon through a proxy, as for a new version of the protocol; see CONTRIBUTING.md.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "proto/frame.h"
#include "tests/integration/harness.h"
#include "tests/upgrade/v1.h"

/* Of Linux 6.3; the recorded extents have it. */
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x20
#endif

#define MAX_BLOCKS 8u
#define MAX_IDS    32u
#define TIMEOUT_MS 120000

static struct v1 v1;

static void read_v1(void)
{
        v1 = v1_read(getenv("BFC_V1_EXCHANGE"));
}

/* ---- one end of a connection --------------------------------------------------------- */

struct end {
        int fd;     /* -1: none */
        int events; /* the events socket; -1: none */
        struct frame_reader *reader;
};

static struct end end_new(int fd)
{
        struct end e = { .fd = fd, .events = -1 };

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(frame_reader_new(true, &e.reader), 0);
        return e;
}

static void end_free(struct end *e)
{
        if (e->fd < 0)
                return;
        ck_assert_uint_eq(frame_reader_n_fds(e->reader), 0); /* no more came than belong to something */
        frame_reader_free(e->reader);
        close(e->fd);
        if (e->events >= 0)
                close(e->events);
        *e = (struct end){ .fd = -1, .events = -1 };
}

/* The next frame's payload; false when the other end hung up. */
static bool end_read(struct end *e, const uint8_t **ret, size_t *ret_n)
{
        for (;;) {
                struct pollfd p = { .fd = e->fd, .events = POLLIN };
                int r = frame_reader_next(e->reader, ret, ret_n);

                if (r == 0)
                        return true;
                ck_assert_int_eq(r, FRAME_AGAIN);
                ck_assert_msg(poll(&p, 1, TIMEOUT_MS) == 1, "nothing came");
                r = frame_reader_receive(e->reader, e->fd, MSG_DONTWAIT);
                if (r == FRAME_EOF || r == -ECONNRESET)
                        return false;
                ck_assert_int_ge(r, 0);
        }
}

/* A memfd of this size with these seals, without the one against execution; or an events socket. */
static int fd_like(struct end *e, size_t n_bytes, int seals)
{
        int fd, ends[2];

        if (n_bytes == 0) {
                ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
                e->events = ends[0];
                return ends[1];
        }
        fd = memfd_create("extent", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, (off_t)n_bytes), 0);
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals & ~F_SEAL_EXEC), 0);
        return fd;
}

/* One frame, with the fds that it had. */
static void end_write(struct end *e, const ProtobufCMessage *m, const struct v1_line *line)
{
        struct frame_writer *w;
        uint8_t *payload;
        int fds[V1_MAX_FDS];

        for (size_t i = 0; i < line->n_fds; i++)
                fds[i] = fd_like(e, line->fds[i].n_bytes, line->fds[i].seals);
        ck_assert_int_eq(frame_writer_new(FRAME_MAX_PAYLOAD, &w), 0);
        ck_assert_int_eq(frame_writer_add(w, protobuf_c_message_get_packed_size(m),
                                          line->n_fds > 0 ? fds : NULL, line->n_fds, &payload),
                         0);
        protobuf_c_message_pack(m, payload);
        ck_assert_int_eq(frame_writer_flush(w, e->fd), 0);
        frame_writer_free(w); /* it has closed the fds */
}

static V1__Request *request_of(const uint8_t *payload, size_t n)
{
        V1__Request *r = v1__request__unpack(NULL, n, payload);

        ck_assert_ptr_nonnull(r);
        ck_assert_int_ne(r->body_case, V1__REQUEST__BODY__NOT_SET);
        return r;
}

static V1__Reply *reply_of(const uint8_t *payload, size_t n)
{
        V1__Reply *r = v1__reply__unpack(NULL, n, payload);

        ck_assert_ptr_nonnull(r);
        ck_assert_int_ne(r->body_case, V1__REPLY__BODY__NOT_SET);
        return r;
}

/* ---- the schema --------------------------------------------------------------------- */

TEST(schema)
{
        v1_assert_schema(&v1__request__descriptor, &bfcd__request__descriptor);
        v1_assert_schema(&v1__reply__descriptor, &bfcd__reply__descriptor);
        v1_assert_schema(&v1__event__descriptor, &bfcd__event__descriptor);
        v1_assert_schema(&v1__event_reply__descriptor, &bfcd__event_reply__descriptor);
}

/* Today's schema knows all fields of the recorded bytes, and packs the same bytes. */
TEST(bytes)
{
        read_v1();
        for (size_t i = 0; i < v1.n_lines; i++) {
                const struct v1_line *line = &v1.lines[i];
                const ProtobufCMessageDescriptor *d =
                        line->to_daemon ? &bfcd__request__descriptor : &bfcd__reply__descriptor;
                ProtobufCMessage *m;
                uint8_t *again = malloc(line->n_bytes + 1);

                if (line->n_bytes > 0) {
                        m = protobuf_c_message_unpack(d, NULL, line->n_bytes, line->payload);
                        ck_assert_ptr_nonnull(m);
                        v1_assert_known(m);
                        ck_assert_uint_eq(protobuf_c_message_get_packed_size(m), line->n_bytes);
                        protobuf_c_message_pack(m, again);
                        ck_assert_int_eq(memcmp(again, line->payload, line->n_bytes), 0);
                        protobuf_c_message_free_unpacked(m, NULL);
                }
                free(again);
        }
        v1_free(&v1);
}

/* ---- an old client, today's daemon -------------------------------------------------- */

static const struct rig_config as_recorded = {
        .size = "64MiB",
        .top = "timeouts: {quarantine: 100ms}\n",
        .partitions = "      - {name: train, limit: 32MiB, growth: on-demand}\n"
                      "      - {name: infer, limit: 16MiB, growth: on-demand}\n",
        .tenants = "  - name: vision\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas:\n"
                   "      - {partition: train, limit: 16MiB}\n"
                   "      - {partition: infer, limit: 8MiB}\n",
};

/* What differs from run to run, what the daemon is free to choose, and text for people. */
static const char *const daemons_choice[] = {
        "session_id",
        "secret",
        "block_id",
        "region_id",
        "extent_id",
        "offset",
        "pid",
        "uid",
        "gid",
        "uptime_ms",
        "age_ms",
        "client_bytes_reserved", /* by the client page, which the replay does not write */
        "client_bytes_in_use",
        "client_bytes_idle",
        "bytes_outside",
        "peak_bytes_in_use_time_ms",
        "peak_bytes_reserved_time_ms",
        "last_refusal_time_ms",
        "bytes_in_2mib_pages",
        "bytes_in_4kib_pages",
        "message",
        "Status.version",
        NULL
};

struct replay {
        struct rig *rig;
        bool is_later; /* the client sends fields of a later version */
        struct end ends[V1_MAX_CONNECTIONS];
        struct {
                uint64_t recorded, today;
        } blocks[MAX_BLOCKS];
        size_t n_blocks;
        struct {
                uint64_t region_id, offset, n_bytes;
        } extents[MAX_BLOCKS];
        size_t n_extents;
};

static struct end end_to(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        struct end e = end_new(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));

        memcpy(address.sun_path, path, strlen(path) + 1);
        ck_assert_int_eq(connect(e.fd, (struct sockaddr *)&address, sizeof(address)), 0);
        return e;
}

static uint64_t todays_block(const struct replay *p, uint64_t recorded_id)
{
        for (size_t i = 0; i < p->n_blocks; i++)
                if (p->blocks[i].recorded == recorded_id)
                        return p->blocks[i].today;
        ck_abort_msg("block %llu was not recorded", (unsigned long long)recorded_id);
}

static void play_request(struct replay *p, const struct v1_line *line)
{
        struct end *e = &p->ends[line->connection];
        V1__Request *r = request_of(line->payload, line->n_bytes);

        if (e->fd < 0)
                *e = end_to(p->rig->socket);
        if (r->body_case == V1__REQUEST__BODY_FREE)
                r->free->block_id = todays_block(p, r->free->block_id);
        if (r->body_case == V1__REQUEST__BODY_PUBLISH)
                r->publish->block_id = todays_block(p, r->publish->block_id);
        if (p->is_later)
                v1_add_unknown(&r->base);
        end_write(e, &r->base, line);
        v1__request__free_unpacked(r, NULL);
}

/* As the old client took them: one fd each, sealed, of the stated size. */
static void take_extents(struct replay *p, struct end *e, const V1__Extents *extents)
{
        int fds[V1_MAX_FDS];

        ck_assert_uint_le(extents->n_extents, V1_MAX_FDS);
        ck_assert_int_eq(frame_reader_take_fds(e->reader, fds, extents->n_extents), 0);
        for (size_t i = 0; i < extents->n_extents; i++) {
                const V1__Extent *x = extents->extents[i];
                void *at = mmap(NULL, x->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0);
                int seals = F_SEAL_GROW | F_SEAL_SHRINK;

                ck_assert_int_eq(fcntl(fds[i], F_GET_SEALS) & seals, seals);
                ck_assert_int_eq(lseek(fds[i], 0, SEEK_END), (off_t)x->n_bytes);
                ck_assert_ptr_ne(at, MAP_FAILED);
                memset(at, 'x', x->n_bytes);
                munmap(at, x->n_bytes);
                close(fds[i]);
                ck_assert_uint_lt(p->n_extents, MAX_BLOCKS);
                p->extents[p->n_extents].region_id = x->region_id;
                p->extents[p->n_extents].offset = x->offset;
                p->extents[p->n_extents++].n_bytes = x->n_bytes;
        }
}

/* The events socket stays open until the connection ends. */
static void take_hello_fds(struct end *e, const V1__HelloReply *hello, const struct v1_line *line)
{
        int fds[3];

        ck_assert_uint_eq(line->n_fds, (hello->has_events ? 1u : 0) + (hello->has_pages ? 2u : 0));
        ck_assert_int_eq(frame_reader_take_fds(e->reader, fds, line->n_fds), 0);
        for (size_t i = 0; i < line->n_fds; i++) {
                if (line->fds[i].n_bytes == 0) {
                        e->events = fds[i];
                        continue;
                }
                ck_assert_int_eq(fcntl(fds[i], F_GET_SEALS) & ~F_SEAL_EXEC,
                                 line->fds[i].seals & ~F_SEAL_EXEC);
                ck_assert_int_eq(lseek(fds[i], 0, SEEK_END), (off_t)line->fds[i].n_bytes);
                close(fds[i]);
        }
}

/* In extents that came before, one after the other. */
static void take_block(struct replay *p, uint64_t recorded_id, const V1__Block *block)
{
        uint64_t at = block->offset, end = block->offset + block->n_bytes;

        for (size_t i = 0; i < p->n_extents; i++)
                if (p->extents[i].region_id == block->region_id && p->extents[i].offset <= at &&
                    at < p->extents[i].offset + p->extents[i].n_bytes)
                        at = p->extents[i].offset + p->extents[i].n_bytes;
        ck_assert_uint_ge(at, end);
        ck_assert_uint_lt(p->n_blocks, MAX_BLOCKS);
        p->blocks[p->n_blocks].recorded = recorded_id;
        p->blocks[p->n_blocks++].today = block->block_id;
}

static void check_reply(struct replay *p, const struct v1_line *line)
{
        struct end *e = &p->ends[line->connection];
        V1__Reply *expected = reply_of(line->payload, line->n_bytes), *reply;
        const uint8_t *payload;
        size_t n;

        ck_assert(end_read(e, &payload, &n));
        reply = reply_of(payload, n);
        v1_assert_equal(&expected->base, &reply->base, daemons_choice);
        if (reply->body_case == V1__REPLY__BODY_EXTENTS)
                take_extents(p, e, reply->extents);
        if (reply->body_case == V1__REPLY__BODY_BLOCK)
                take_block(p, expected->block->block_id, reply->block);
        if (reply->body_case == V1__REPLY__BODY_ATTACHED)
                ck_assert_uint_eq(reply->attached->block->block_id,
                                  todays_block(p, expected->attached->block->block_id));
        if (reply->body_case == V1__REPLY__BODY_REFUSAL && reply->refusal->error == EDQUOT)
                ck_assert(has_stats(reply->refusal->message));
        if (reply->body_case == V1__REPLY__BODY_HELLO) {
                ck_assert_uint_eq(reply->hello->secret.len, expected->hello->secret.len);
                take_hello_fds(e, reply->hello, line);
        }
        v1__reply__free_unpacked(expected, NULL);
        v1__reply__free_unpacked(reply, NULL);
}

static void check_end(struct replay *p, const struct v1_line *line)
{
        struct end *e = &p->ends[line->connection];
        const uint8_t *payload;
        size_t n;

        if (!line->to_daemon)
                ck_assert(!end_read(e, &payload, &n));
        end_free(e);
}

static void play_to_daemon(bool is_later)
{
        struct replay p = { .rig = rig_start(&as_recorded), .is_later = is_later };

        read_v1();
        for (size_t i = 0; i < V1_MAX_CONNECTIONS; i++)
                p.ends[i].fd = p.ends[i].events = -1;
        for (size_t i = 0; i < v1.n_lines; i++) {
                const struct v1_line *line = &v1.lines[i];

                if (line->n_bytes == 0)
                        check_end(&p, line);
                else if (line->to_daemon)
                        play_request(&p, line);
                else
                        check_reply(&p, line);
        }
        ck_assert_uint_eq(p.n_blocks, 3);
        v1_free(&v1);
        rig_stop(p.rig);
}

TEST(v1_client)
{
        play_to_daemon(false);
}

TEST(later_client)
{
        play_to_daemon(true);
}

/* Another version is refused, and the client may then say hello with version 1. */
TEST(later_hellos)
{
        static const uint32_t versions[] = { 0, 2, UINT32_C(1) << 31, UINT32_MAX };
        struct rig *rig = rig_start(&as_recorded);

        for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
                Bfcd__Hello hello = BFCD__HELLO__INIT;
                Bfcd__Request request = REQUEST(HELLO, hello, &hello);
                Bfcd__Reply *reply;
                struct raw *raw;

                hello.version = versions[i];
                ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
                ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_REFUSAL);
                ck_assert_uint_eq(reply->refusal->error, EPROTO);
                ck_assert_ptr_nonnull(strstr(reply->refusal->message, "this daemon uses version 1"));
                bfcd__reply__free_unpacked(reply, NULL);
                hello.version = 1;
                ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_HELLO);
                ck_assert_uint_eq(reply->hello->version, 1);
                bfcd__reply__free_unpacked(reply, NULL);
                ck_assert_int_eq(raw_goodbye(raw), 0);
                raw_close(raw);
        }
        rig_stop(rig);
}

/* ---- an old daemon, today's programs -------------------------------------------------- */

/* What a client is free to choose. */
static const char *const clients_choice[] = { "id", "Hello.name", NULL };

/* Plays the daemon's side of one connection, in a thread. */
struct daemon_replay {
        struct rig *rig; /* a folder only */
        unsigned connection;
        bool is_later;
        uint64_t ids[MAX_IDS]; /* of requests: by the recorded one today's; that of Extents is 0 */
        int fd;
        pthread_t thread;
};

/* The answer's id is the question's, where the client of today counts in another way. */
static void play_reply(const struct daemon_replay *p, struct end *e, const struct v1_line *line)
{
        V1__Reply *r = reply_of(line->payload, line->n_bytes);

        ck_assert_uint_lt(r->id, MAX_IDS);
        r->id = p->ids[r->id];
        if (p->is_later)
                v1_add_unknown(&r->base);
        end_write(e, &r->base, line);
        v1__reply__free_unpacked(r, NULL);
}

static void check_request(struct daemon_replay *p, struct end *e, const struct v1_line *line)
{
        V1__Request *expected = request_of(line->payload, line->n_bytes), *r;
        const uint8_t *payload;
        size_t n;

        ck_assert_msg(end_read(e, &payload, &n), "hung up before request %llu",
                      (unsigned long long)expected->id);
        r = request_of(payload, n);
        v1_assert_equal(&expected->base, &r->base, clients_choice);
        ck_assert_uint_lt(expected->id, MAX_IDS);
        p->ids[expected->id] = r->id;
        v1__request__free_unpacked(expected, NULL);
        v1__request__free_unpacked(r, NULL);
}

static void *daemon_run(void *arg)
{
        struct daemon_replay *p = arg;
        struct end e = end_new(accept4(p->fd, NULL, NULL, SOCK_CLOEXEC));

        for (size_t i = 0; i < v1.n_lines; i++) {
                const struct v1_line *line = &v1.lines[i];

                if (line->connection != p->connection)
                        continue;
                if (line->n_bytes > 0 && line->to_daemon)
                        check_request(p, &e, line);
                else if (line->n_bytes > 0)
                        play_reply(p, &e, line);
        }
        end_free(&e);
        return NULL;
}

static int listen_at(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        memcpy(address.sun_path, path, strlen(path) + 1);
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(listen(fd, 1), 0);
        return fd;
}

static void daemon_start(struct daemon_replay *p)
{
        read_v1();
        p->rig = rig_folder();
        p->fd = listen_at(p->rig->socket);
        ck_assert_int_eq(pthread_create(&p->thread, NULL, daemon_run, p), 0);
}

static void daemon_end(struct daemon_replay *p)
{
        pthread_join(p->thread, NULL);
        close(p->fd);
        unlink(p->rig->socket);
        rig_discard(p->rig);
        v1_free(&v1);
}

/* The recorded job; meanwhile() is called when it has all of its blocks. */
static void live(const char *socket, void (*meanwhile)(const char *socket))
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = socket,
                                       .name = "life",
                                       .tenant = "vision",
                                       .partition = "train" };
        struct bfc_malloc_options tagged = {
                .struct_size = sizeof(tagged), .flags = BFC_ONE_EXTENT, .wait_ms = 5, .tag = "weights"
        };
        void *small, *large, *weights, *attached, *none;
        size_t n_free, n_total, n_bytes;
        bfc_client *client;
        char read[3];

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_str_eq(bfc_tenant(client), "vision");
        ck_assert_str_eq(bfc_partition(client), "train");
        ck_assert_ok(bfc_malloc(client, 1000, &small));
        ck_assert_ok(bfc_write(client, small, "old", 3));
        ck_assert_ok(bfc_malloc_in(client, "infer", 5 * MIB, &large));
        pattern_write(large, 5 * MIB, 1); /* over all three extents */
        ck_assert(pattern_holds(large, 5 * MIB, 1));
        ck_assert_ok(bfc_read(client, read, small, 3));
        ck_assert_int_eq(memcmp(read, "old", 3), 0);
        ck_assert_ok(bfc_malloc_with(client, MIB, &tagged, &weights));
        ck_assert_ok(bfc_publish(client, weights, "weights"));
        ck_assert_ok(bfc_attach(client, "weights", 0, &attached, &n_bytes));
        ck_assert_ptr_eq(attached, weights);
        ck_assert_uint_eq(n_bytes, MIB);
        ck_assert_int_eq(bfc_attach(client, "biases", 5, &none, NULL), -ETIMEDOUT);
        ck_assert_ok(bfc_mem_get_info(client, NULL, &n_free, &n_total));
        ck_assert_uint_eq(n_total, 16 * MIB);
        ck_assert_uint_eq(n_free, 15 * MIB - 1024);
        if (meanwhile)
                meanwhile(socket);
        ck_assert_int_eq(bfc_malloc(client, 100 * MIB, &none), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "2.0 MiB of 16.0 MiB reserved"));
        ck_assert_ok(bfc_free(client, small));
        ck_assert_ok(bfc_free(client, large));
        ck_assert_ok(bfc_free(client, attached));
        ck_assert_ok(bfc_free(client, weights));
        bfc_disconnect(client);
}

static void play_to_library(bool is_later)
{
        struct daemon_replay p = { .connection = 1, .is_later = is_later };

        setenv("BFC_CACHE", "off", 1); /* one request for each call */
        daemon_start(&p);
        live(p.rig->socket, NULL);
        daemon_end(&p);
}

TEST(v1_daemon)
{
        play_to_library(false);
}

TEST(later_daemon)
{
        play_to_library(true);
}

/* The commands of bfcctl, one on each connection from 2 on, and a part of each output. */
static const struct {
        const char *command, *says;
} asked[] = { { "status", "4096" },    { "partitions", "32.0 MiB" }, { "tenants", "8.0 MiB" },
              { "sessions", "live" },  { "blocks", "1.0 KiB" },      { "whoami", "vision" },
              { "shared", "weights" }, { "explain", "train" } };
enum { N_ASKED = sizeof(asked) / sizeof(asked[0]) };

static void ask(const char *socket, size_t i)
{
        const char *argv[] = { program_bfcctl(), "--socket", socket, asked[i].command, NULL };
        char *out, *error;
        int status = program_run(argv, &out, &error);

        ck_assert_msg(status == 0 && strstr(out, asked[i].says), "bfcctl %s: %d: %s%s", asked[i].command,
                      status, out, error);
        free(out);
        free(error);
}

LOOP_TEST(v1_daemon_and_bfcctl, N_ASKED)
{
        struct daemon_replay p = { .connection = 2 + (unsigned)_i };

        daemon_start(&p);
        ask(p.rig->socket, (size_t)_i);
        daemon_end(&p);
}

/* ---- recording ------------------------------------------------------------------------ */

/* Passes frames and fds on between clients and a daemon, one thread for all, and writes them down. */
struct proxy {
        struct rig *rig;
        char path[128];
        FILE *out;
        int fd;
        struct end ends[V1_MAX_CONNECTIONS][2]; /* to the client, to the daemon */
        unsigned n_ends, n_live;
        pthread_t thread;
};

static size_t fds_of_reply(const uint8_t *payload, size_t n)
{
        V1__Reply *r = reply_of(payload, n);
        size_t n_fds = 0;

        if (r->body_case == V1__REPLY__BODY_EXTENTS)
                n_fds = r->extents->n_extents;
        if (r->body_case == V1__REPLY__BODY_HELLO)
                n_fds = (r->hello->has_events ? 1u : 0) + (r->hello->has_pages ? 2u : 0);
        v1__reply__free_unpacked(r, NULL);
        return n_fds;
}

static void record_frame(struct proxy *p, unsigned connection, bool to_daemon, const uint8_t *payload,
                         size_t n)
{
        struct end *from = &p->ends[connection][!to_daemon];
        size_t n_fds = to_daemon ? 0 : fds_of_reply(payload, n);
        struct frame_writer *w;
        int fds[V1_MAX_FDS];
        uint8_t *copy;

        ck_assert_uint_le(n_fds, V1_MAX_FDS);
        ck_assert_int_eq(frame_reader_take_fds(from->reader, fds, n_fds), 0);
        fprintf(p->out, "%u %c %02zx%02zx0000", connection, to_daemon ? '>' : '<', n & 255, n >> 8);
        for (size_t i = 0; i < n; i++)
                fprintf(p->out, "%02x", payload[i]);
        for (size_t i = 0; i < n_fds; i++) {
                int seals = fcntl(fds[i], F_GET_SEALS);

                if (seals < 0)
                        fprintf(p->out, " fd:socket");
                else
                        fprintf(p->out, " fd:%lld:%x", (long long)lseek(fds[i], 0, SEEK_END),
                                (unsigned)seals);
        }
        fputc('\n', p->out);
        ck_assert_int_eq(frame_writer_new(FRAME_MAX_PAYLOAD, &w), 0);
        ck_assert_int_eq(frame_writer_add(w, n, n_fds > 0 ? fds : NULL, n_fds, &copy), 0);
        memcpy(copy, payload, n);
        (void)frame_writer_flush(w, p->ends[connection][to_daemon].fd); /* it may have hung up */
        frame_writer_free(w);
}

static void record_from(struct proxy *p, unsigned connection, bool to_daemon)
{
        struct end *ends = p->ends[connection], *from = &ends[!to_daemon];
        int r = frame_reader_receive(from->reader, from->fd, MSG_DONTWAIT);
        const uint8_t *payload;
        size_t n;

        while (r == 0 && frame_reader_next(from->reader, &payload, &n) == 0)
                record_frame(p, connection, to_daemon, payload, n);
        if (r == 0 || r == FRAME_AGAIN)
                return;
        fprintf(p->out, "%u %c hangs up\n", connection, to_daemon ? '>' : '<');
        end_free(&ends[0]);
        end_free(&ends[1]);
        p->n_live--;
}

static void *record_run(void *arg)
{
        struct proxy *p = arg;

        while (p->n_ends == 0 || p->n_live > 0) {
                struct pollfd fds[2 * V1_MAX_CONNECTIONS] = { { .fd = p->fd, .events = POLLIN } };

                for (unsigned i = 1; i < V1_MAX_CONNECTIONS; i++)
                        for (unsigned k = 0; k < 2; k++)
                                fds[2 * i + k] = (struct pollfd){ p->ends[i][k].fd, POLLIN, 0 };
                fds[1].fd = -1;
                ck_assert_int_gt(poll(fds, 2 * V1_MAX_CONNECTIONS, TIMEOUT_MS), 0);
                for (unsigned i = 2; i < 2 * V1_MAX_CONNECTIONS; i++)
                        if (fds[i].revents && p->ends[i / 2][i % 2].fd >= 0)
                                record_from(p, i / 2, i % 2 == 0);
                if (fds[0].revents) {
                        ck_assert_uint_lt(++p->n_ends, V1_MAX_CONNECTIONS);
                        p->ends[p->n_ends][0] = end_new(accept4(p->fd, NULL, NULL, SOCK_CLOEXEC));
                        p->ends[p->n_ends][1] = end_to(p->rig->socket);
                        p->n_live++;
                }
        }
        return NULL;
}

static void ask_all(const char *socket)
{
        for (size_t i = 0; i < N_ASKED; i++)
                ask(socket, i);
}

LOOP_TEST(record, getenv("BFC_RECORD_V1") != NULL)
{
        struct proxy p = { .rig = rig_start(&as_recorded), .out = fopen(getenv("BFC_RECORD_V1"), "we") };

        ck_assert_ptr_nonnull(p.out);
        for (unsigned i = 0; i < V1_MAX_CONNECTIONS; i++)
                p.ends[i][0].fd = p.ends[i][1].fd = -1;
        snprintf(p.path, sizeof(p.path), "%s/proxy.sock", p.rig->folder);
        p.fd = listen_at(p.path);
        fputs("# An exchange in version 1 of the protocol, byte for byte, as test_upgrade recorded it.\n"
              "#\n"
              "# Connection, > to the daemon or < to the client, the frame in hexadecimal, and for each fd its\n"
              "# size in bytes and its seals. Connection 1 is a job's, the others are bfcctl's.\n",
              p.out);
        ck_assert_int_eq(pthread_create(&p.thread, NULL, record_run, &p), 0);
        setenv("BFC_CACHE", "off", 1);
        live(p.path, ask_all);
        pthread_join(p.thread, NULL);
        close(p.fd);
        unlink(p.path);
        ck_assert_int_eq(fclose(p.out), 0);
        rig_stop(p.rig);
}

int main(void)
{
        if (getenv("BFC_RECORD_V1"))
                setenv("BFC_TEST_ONLY", "record", 1);
        return harness_cases("upgrade");
}
