/* Other versions of the protocol at the other end: the first client's bytes are played to
 * today's daemon, the first daemon's to today's library and bfcctl, and both ends meet
 * words of a later version.
 *
 * What comes back is read in the words of the first version, which is what an old program
 * understands of it.
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
#include "tests/upgrade/first.h"

/* Of Linux 6.3; the recorded extents have it. */
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x20
#endif

#define MAX_BLOCKS 8u
#define MAX_IDS    16u
#define TIMEOUT_MS 120000

static struct first first;

static void read_first(void)
{
        first = first_read(getenv("BFC_FIRST_BYTES"));
}

/* ---- an end in the first version's words ------------------------------------------- */

struct end {
        int fd; /* -1: none */
        struct frame_reader *reader;
};

static struct end end_new(int fd)
{
        struct end e = { .fd = fd };

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
        e->fd = -1;
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

/* A memfd of this size with these seals; the one against being made executable is left out. */
static int extent_like(size_t n_bytes, int seals)
{
        int fd = memfd_create("extent", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, (off_t)n_bytes), 0);
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals & ~F_SEAL_EXEC), 0);
        return fd;
}

/* One frame, with the fds that it had. */
static void end_write(struct end *e, const ProtobufCMessage *m, const struct first_line *line)
{
        struct frame_writer *w;
        uint8_t *payload;
        int fds[FIRST_MAX_FDS];

        for (size_t i = 0; i < line->n_fds; i++) {
                fds[i] = extent_like(line->fds[i].n_bytes, line->fds[i].seals);
        }
        ck_assert_int_eq(frame_writer_new(FRAME_MAX_PAYLOAD, &w), 0);
        ck_assert_int_eq(frame_writer_add(w, protobuf_c_message_get_packed_size(m),
                                          line->n_fds > 0 ? fds : NULL, line->n_fds, &payload),
                         0);
        protobuf_c_message_pack(m, payload);
        ck_assert_int_eq(frame_writer_flush(w, e->fd), 0);
        frame_writer_free(w);
        for (size_t i = 0; i < line->n_fds; i++)
                close(fds[i]);
}

static First__Request *request_of(const uint8_t *payload, size_t n)
{
        First__Request *r = first__request__unpack(NULL, n, payload);

        ck_assert_ptr_nonnull(r);
        ck_assert_int_ne(r->body_case, FIRST__REQUEST__BODY__NOT_SET);
        return r;
}

static First__Reply *reply_of(const uint8_t *payload, size_t n)
{
        First__Reply *r = first__reply__unpack(NULL, n, payload);

        ck_assert_ptr_nonnull(r);
        ck_assert_int_ne(r->body_case, FIRST__REPLY__BODY__NOT_SET);
        return r;
}

/* ---- the words ---------------------------------------------------------------------- */

START_TEST(schema)
{
        first_assert_schema(&first__request__descriptor, &bfcd__request__descriptor);
        first_assert_schema(&first__reply__descriptor, &bfcd__reply__descriptor);
        first_assert_schema(&first__hello__descriptor, &bfcd__hello__descriptor);
}
END_TEST

/* Today's words take the recorded bytes without a rest, and make the same of them. */
START_TEST(bytes)
{
        read_first();
        for (size_t i = 0; i < first.n_lines; i++) {
                const struct first_line *line = &first.lines[i];
                const ProtobufCMessageDescriptor *d =
                        line->to_daemon ? &bfcd__request__descriptor : &bfcd__reply__descriptor;
                ProtobufCMessage *m;
                uint8_t *again = malloc(line->n_bytes + 1);

                if (line->n_bytes > 0) {
                        m = protobuf_c_message_unpack(d, NULL, line->n_bytes, line->payload);
                        ck_assert_ptr_nonnull(m);
                        first_assert_known(m);
                        ck_assert_uint_eq(protobuf_c_message_get_packed_size(m), line->n_bytes);
                        protobuf_c_message_pack(m, again);
                        ck_assert_int_eq(memcmp(again, line->payload, line->n_bytes), 0);
                        protobuf_c_message_free_unpacked(m, NULL);
                }
                free(again);
        }
        first_free(&first);
}
END_TEST

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

/* What no two runs have alike, what the daemon is free to choose, and words for people. A
 * tenant is told no more what peaks a whole partition has seen. */
static const char *const daemons_choice[] = { "session_id",
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
                                              "message",
                                              "PartitionRow.figures",
                                              NULL };

struct replay {
        struct rig *rig;
        bool is_later; /* the client is of a later version than all that we know */
        struct end ends[FIRST_MAX_CONNECTIONS];
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

static void play_request(struct replay *p, const struct first_line *line)
{
        struct end *e = &p->ends[line->connection];
        First__Request *r = request_of(line->payload, line->n_bytes);

        if (e->fd < 0)
                *e = end_to(p->rig->socket);
        for (size_t i = 0; r->body_case == FIRST__REQUEST__BODY_FREE && i < p->n_blocks; i++) {
                if (p->blocks[i].recorded != r->free->block_id)
                        continue;
                r->free->block_id = p->blocks[i].today;
                break;
        }
        if (p->is_later)
                first_add_unknown(&r->base);
        if (p->is_later && r->body_case == FIRST__REQUEST__BODY_HELLO)
                r->hello->version = UINT32_C(1) << 31;
        end_write(e, &r->base, line);
        first__request__free_unpacked(r, NULL);
}

/* As the old client took them: one fd each, sealed, of the stated size. */
static void take_extents(struct replay *p, struct end *e, const First__Extents *extents)
{
        int fds[FIRST_MAX_FDS];

        ck_assert_uint_le(extents->n_extents, FIRST_MAX_FDS);
        ck_assert_int_eq(frame_reader_take_fds(e->reader, fds, extents->n_extents), 0);
        for (size_t i = 0; i < extents->n_extents; i++) {
                const First__Extent *x = extents->extents[i];
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

/* In extents that came before, one after the other. */
static void take_block(struct replay *p, uint64_t recorded_id, const First__Block *block)
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

static void check_reply(struct replay *p, const struct first_line *line)
{
        struct end *e = &p->ends[line->connection];
        First__Reply *expected = reply_of(line->payload, line->n_bytes), *reply;
        const uint8_t *payload;
        size_t n;

        ck_assert(end_read(e, &payload, &n));
        reply = reply_of(payload, n);
        first_assert_equal(&expected->base, &reply->base, daemons_choice);
        if (reply->body_case == FIRST__REPLY__BODY_EXTENTS)
                take_extents(p, e, reply->extents);
        if (reply->body_case == FIRST__REPLY__BODY_BLOCK)
                take_block(p, expected->block->block_id, reply->block);
        if (reply->body_case == FIRST__REPLY__BODY_REFUSAL)
                ck_assert(has_figures(reply->refusal->message));
        if (reply->body_case == FIRST__REPLY__BODY_HELLO)
                ck_assert_uint_eq(reply->hello->secret.len, expected->hello->secret.len);
        first__reply__free_unpacked(expected, NULL);
        first__reply__free_unpacked(reply, NULL);
}

static void check_end(struct replay *p, const struct first_line *line)
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

        read_first();
        for (size_t i = 0; i < FIRST_MAX_CONNECTIONS; i++)
                p.ends[i].fd = -1;
        for (size_t i = 0; i < first.n_lines; i++) {
                const struct first_line *line = &first.lines[i];

                if (line->n_bytes == 0)
                        check_end(&p, line);
                else if (line->to_daemon)
                        play_request(&p, line);
                else
                        check_reply(&p, line);
        }
        ck_assert_uint_eq(p.n_blocks, 2);
        first_free(&first);
        rig_stop(p.rig);
}

START_TEST(first_client)
{
        play_to_daemon(false);
}
END_TEST

START_TEST(later_client)
{
        play_to_daemon(true);
}
END_TEST

/* Version 1 is what this daemon answers to all, and nothing that it does not have. */
START_TEST(later_hellos)
{
        static const uint32_t versions[] = { 1, 2, UINT32_C(1) << 31, UINT32_MAX };
        const uint64_t known = BFCD__CAPABILITY__CAPABILITY_EVENTS | BFCD__CAPABILITY__CAPABILITY_PAGES |
                               BFCD__CAPABILITY__CAPABILITY_TRIM | BFCD__CAPABILITY__CAPABILITY_AGAIN |
                               BFCD__CAPABILITY__CAPABILITY_RETURN | BFCD__CAPABILITY__CAPABILITY_DRAIN;
        struct rig *rig = rig_start(&as_recorded);

        for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
                Bfcd__Request request = BFCD__REQUEST__INIT;
                Bfcd__Hello hello = BFCD__HELLO__INIT;
                Bfcd__Reply *reply;
                struct raw *raw;

                hello.version = versions[i];
                hello.capabilities = i % 2 == 0 ? UINT64_MAX : ~known;
                request.body_case = BFCD__REQUEST__BODY_HELLO;
                request.hello = &hello;
                ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
                ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_HELLO);
                ck_assert_uint_eq(reply->hello->version, 1);
                ck_assert_uint_eq(reply->hello->capabilities & ~known, 0);
                ck_assert(i % 2 == 0 || reply->hello->capabilities == 0);
                bfcd__reply__free_unpacked(reply, NULL);
                ck_assert_int_eq(raw_goodbye(raw), 0);
                raw_close(raw);
        }
        rig_stop(rig);
}
END_TEST

/* ---- an old daemon, today's programs -------------------------------------------------- */

/* What a client is free to choose: later ones ask for more than the first did. */
static const char *const clients_choice[] = { "id", "capabilities", "name", NULL };

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
static void play_reply(const struct daemon_replay *p, struct end *e, const struct first_line *line)
{
        First__Reply *r = reply_of(line->payload, line->n_bytes);

        ck_assert_uint_lt(r->id, MAX_IDS);
        r->id = p->ids[r->id];
        if (p->is_later)
                first_add_unknown(&r->base);
        end_write(e, &r->base, line);
        first__reply__free_unpacked(r, NULL);
}

static void check_request(struct daemon_replay *p, struct end *e, const struct first_line *line)
{
        First__Request *expected = request_of(line->payload, line->n_bytes), *r;
        const uint8_t *payload;
        size_t n;

        ck_assert_msg(end_read(e, &payload, &n), "hung up before request %llu",
                      (unsigned long long)expected->id);
        r = request_of(payload, n);
        first_assert_equal(&expected->base, &r->base, clients_choice);
        ck_assert_uint_lt(expected->id, MAX_IDS);
        p->ids[expected->id] = r->id;
        first__request__free_unpacked(expected, NULL);
        first__request__free_unpacked(r, NULL);
}

/* A Goodbye that the recording does not have: bfcctl of that day just hung up. */
static void play_goodbye(struct end *e)
{
        First__Reply reply = FIRST__REPLY__INIT;
        First__Done done = FIRST__DONE__INIT;
        const uint8_t *payload;
        First__Request *r;
        size_t n;

        if (!end_read(e, &payload, &n))
                return;
        r = request_of(payload, n);
        ck_assert_int_eq(r->body_case, FIRST__REQUEST__BODY_GOODBYE);
        reply.id = r->id;
        reply.body_case = FIRST__REPLY__BODY_DONE;
        reply.done = &done;
        end_write(e, &reply.base, &(struct first_line){ .n_fds = 0 });
        first__request__free_unpacked(r, NULL);
}

static void *daemon_run(void *arg)
{
        struct daemon_replay *p = arg;
        struct end e = end_new(accept4(p->fd, NULL, NULL, SOCK_CLOEXEC));

        for (size_t i = 0; i < first.n_lines; i++) {
                const struct first_line *line = &first.lines[i];

                if (line->connection != p->connection)
                        continue;
                if (line->n_bytes == 0 && line->to_daemon)
                        play_goodbye(&e);
                else if (line->n_bytes > 0 && line->to_daemon)
                        check_request(p, &e, line);
                else if (line->n_bytes > 0)
                        play_reply(p, &e, line);
        }
        end_free(&e);
        return NULL;
}

static void daemon_start(struct daemon_replay *p)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };

        read_first();
        p->rig = rig_folder();
        memcpy(address.sun_path, p->rig->socket, strlen(p->rig->socket) + 1);
        p->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        ck_assert_int_eq(bind(p->fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(listen(p->fd, 1), 0);
        ck_assert_int_eq(pthread_create(&p->thread, NULL, daemon_run, p), 0);
}

static void daemon_end(struct daemon_replay *p)
{
        pthread_join(p->thread, NULL);
        close(p->fd);
        unlink(p->rig->socket);
        rig_discard(p->rig);
        first_free(&first);
}

/* What the job did whose bytes were recorded. */
static void live(const char *socket)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = socket,
                                       .name = "life",
                                       .tenant = "vision",
                                       .partition = "train" };
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        bfc_client *client;
        void *small, *large, *none;
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
        ck_assert_ok(bfc_usage(client, NULL, &usage));
        ck_assert_uint_eq(usage.bytes_limit, 16 * MIB);
        ck_assert_uint_eq(usage.bytes_reserved, 2 * MIB);
        ck_assert_uint_eq(usage.bytes_in_use, 1024);
        ck_assert_uint_eq(usage.bytes_requested, 1000);
        ck_assert_uint_eq(usage.num_blocks, 1);
        ck_assert_uint_eq(usage.num_sessions, 1);
        ck_assert_int_eq(bfc_malloc(client, 100 * MIB, &none), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "limit 16777216"));
        ck_assert_ok(bfc_free(client, small));
        ck_assert_ok(bfc_free(client, large));
        bfc_disconnect(client);
}

static void play_to_library(bool is_later)
{
        struct daemon_replay p = { .connection = 1, .is_later = is_later };

        setenv("BFC_CACHE", "off", 1); /* one request for each call, as it was then */
        daemon_start(&p);
        live(p.rig->socket);
        daemon_end(&p);
}

START_TEST(first_daemon)
{
        play_to_library(false);
}
END_TEST

START_TEST(later_daemon)
{
        play_to_library(true);
}
END_TEST

/* bfcctl's conversations, and a word of what was told in each. */
START_TEST(first_daemon_and_bfcctl)
{
        static const struct {
                const char *command, *says;
        } asked[] = { { "status", "4096" },   { "partitions", "32.0 MiB" }, { "tenants", "8.0 MiB" },
                      { "sessions", "life" }, { "blocks", "1.0 KiB" },      { "whoami", "vision" } };
        struct daemon_replay p = { .connection = 2 + (unsigned)_i, .is_later = false };
        const char *argv[] = { program_bfcctl(), "--socket", NULL, asked[_i].command, NULL };
        char *out, *error;
        int status;

        daemon_start(&p);
        argv[2] = p.rig->socket;
        status = program_run(argv, &out, &error);
        ck_assert_msg(status == 0 && strstr(out, asked[_i].says), "bfcctl %s: %d: %s%s", asked[_i].command,
                      status, out, error);
        free(out);
        free(error);
        daemon_end(&p);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = { schema,       bytes,        first_client, later_client,
                                       later_hellos, first_daemon, later_daemon, NULL };
        Suite *suite = harness_suite("upgrade", tests);
        TCase *ctl = tcase_create("bfcctl");

        tcase_add_loop_test(ctl, first_daemon_and_bfcctl, 0, 6);
        tcase_set_timeout(ctl, TEST_TIMEOUT);
        suite_add_tcase(suite, ctl);
        return harness_main(suite);
}
