/* Invalid input. Each offender is refused or disconnected, while a victim beside
 * it is served.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

#define HANG_UP_MS SETTLE_MS
#define TIMEOUT_MS 60000

/* This process lives on after its sessions were disconnected, so their memory is
 * quarantined: for a short time here, but where they hold a GPU's memory. */
static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 50ms}\n",
        .size = "512MiB",
        .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 256MiB")
                TENANT("victim", "@UID@", "train, limit: 32MiB"),
};

/* ---- the victim ----------------------------------------------------------- */

struct scene {
        struct rig *rig;
        bfc_client *victim;
        void *kept; /* 8 MiB that no offender may change */
};

static struct scene scene_new(const struct rig_config *config)
{
        struct scene s;

        s.rig = rig_start(config);
        s.victim = client_open(s.rig, "victim", NULL);
        ck_assert_ok(bfc_malloc(s.victim, 8 * MIB, &s.kept));
        pattern_write(s.kept, 8 * MIB, 99);
        return s;
}

static void assert_victim_lives(struct scene *s)
{
        void *p;

        ck_assert_ok(bfc_malloc(s->victim, 100000, &p));
        pattern_write(p, 100000, 1);
        ck_assert(pattern_holds(p, 100000, 1));
        ck_assert_ok(bfc_free(s->victim, p));
        ck_assert_uint_eq(client_usage(s->victim, NULL).bytes_in_use, 8 * MIB);
}

/* Only the victim and quarantined sessions are left. The offenders' process, this one, lives on,
 * so a GPU's memory is not taken from it at any time. */
static bool is_stable(const struct scene *s)
{
        struct rig_counts n = rig_count(s->rig);

        if (n.n_quarantined == 0)
                return n.n_sessions == 1 && rig_charge(s->rig, "red", "train") == 0;
        return rig_device() != ON_HOST && n.n_sessions == n.n_quarantined + 1;
}

static void scene_end(struct scene *s)
{
        assert_victim_lives(s);
        ck_assert(WAIT_FOR(is_stable(s), SETTLE_MS));
        ck_assert(pattern_holds(s->kept, 8 * MIB, 99));
        bfc_disconnect(s->victim);
        if (rig_count(s->rig).n_quarantined == 0) {
                rig_stop(s->rig);
                return;
        }
        rig_terminate(s->rig);
        rig_discard(s->rig);
}

/* ---- offenders ------------------------------------------------------------ */

/* Each is answered after a turn of the other connections. */
static void wait_for_turns(struct scene *s)
{
        for (unsigned i = 0; i < 3; i++)
                (void)rig_count(s->rig);
}

static int n_bytes_of(const struct raw *raw, unsigned long which)
{
        int n = 0;

        ck_assert_int_eq(ioctl(raw->fd, which, &n), 0);
        return n;
}

static struct raw *unauthenticated(struct scene *s) /* connected, no hello */
{
        struct raw *raw = NULL;

        ck_assert_int_eq(raw_open(s->rig->socket, &raw), 0);
        return raw;
}

static struct raw *member(struct scene *s)
{
        return session_open(s->rig->socket, "red");
}

/* Ends the offender, which the daemon must have disconnected. */
static void assert_disconnected(struct scene *s, struct raw *raw, const char *what)
{
        ck_assert_msg(raw_wait_hang_up(raw, HANG_UP_MS) == 0, "%s: no hang-up", what);
        raw_close(raw);
        assert_victim_lives(s);
}

/* Ends the offender, which was refused or disconnected. */
static void assert_not_served(struct scene *s, struct raw *raw, const char *what)
{
        Bfcd__Reply *reply = NULL;
        int r = raw_receive(raw, HANG_UP_MS, &reply);

        ck_assert_msg(r == RAW_HUNG_UP || (r == 0 && reply->body_case == BFCD__REPLY__BODY_REFUSAL),
                      "%s: neither refused nor disconnected (%d)", what, r);
        if (reply)
                bfcd__reply__free_unpacked(reply, NULL);
        raw_close(raw);
        assert_victim_lives(s);
}

/* Requests by hand, each with the body that its case needs. */
static Bfcd__Request request_of(int body_case)
{
        static Bfcd__Hello hello = BFCD__HELLO__INIT;
        static Bfcd__Malloc malloc_body = BFCD__MALLOC__INIT;
        static Bfcd__Free free_body = BFCD__FREE__INIT;
        static Bfcd__Usage usage = BFCD__USAGE__INIT;
        static Bfcd__List list = BFCD__LIST__INIT;
        static Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        static Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request request = BFCD__REQUEST__INIT;

        hello.version = 1;
        list.kind = BFCD__LIST__KIND__STATUS;
        malloc_body.n_bytes = 4096;
        request.body_case = (Bfcd__Request__BodyCase)body_case;
        switch (body_case) {
        case BFCD__REQUEST__BODY_HELLO:
                request.hello = &hello;
                break;
        case BFCD__REQUEST__BODY_MALLOC:
                request.malloc = &malloc_body;
                break;
        case BFCD__REQUEST__BODY_FREE:
                request.free = &free_body;
                break;
        case BFCD__REQUEST__BODY_USAGE:
                request.usage = &usage;
                break;
        case BFCD__REQUEST__BODY_LIST:
                request.list = &list;
                break;
        case BFCD__REQUEST__BODY_GOODBYE:
                request.goodbye = &goodbye;
                break;
        case BFCD__REQUEST__BODY_ACK:
                request.ack = &ack;
                break;
        default:
                break;
        }
        return request;
}

/* ---- frames --------------------------------------------------------------- */

static const struct {
        const char *what;
        const char *bytes;
        size_t n_bytes;
} broken[] = {
        { "a frame of length 0", "\0\0\0\0", 4 },
        { "a frame of 65537 bytes", "\x01\x00\x01\x00", 4 },
        { "a frame of 2^32 - 1 bytes", "\xff\xff\xff\xff", 4 },
        { "a frame of 2^31 bytes", "\x00\x00\x00\x80", 4 },
        { "a payload that is no message", "\x05\x00\x00\x00\xff\xff\xff\xff\xff", 9 },
        { "a field that ends early", "\x04\x00\x00\x00\x12\x7f\x08\x01", 8 },
        { "another protocol", "GET / HTTP/1.1\r\nHost: x\r\n\r\n", 26 },
};

TEST(broken_frames)
{
        struct scene s = scene_new(&two_tenants);

        for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
                struct raw *raw = unauthenticated(&s);

                ck_assert_int_eq(raw_send_bytes(raw, broken[i].bytes, broken[i].n_bytes), 0);
                assert_disconnected(&s, raw, broken[i].what);
                raw = member(&s);
                ck_assert_int_eq(raw_send_bytes(raw, broken[i].bytes, broken[i].n_bytes), 0);
                assert_disconnected(&s, raw, broken[i].what);
        }
        scene_end(&s);
}

/* The admin socket is held to the same rules. */
TEST(broken_frames_on_the_admin_socket)
{
        struct scene s = scene_new(&two_tenants);

        for (size_t i = 0; i < sizeof(broken) / sizeof(broken[0]); i++) {
                struct raw *raw = session_open(s.rig->admin_socket, NULL);

                ck_assert_int_eq(raw_send_bytes(raw, broken[i].bytes, broken[i].n_bytes), 0);
                assert_disconnected(&s, raw, broken[i].what);
        }
        scene_end(&s);
}

TEST(random_bytes_disconnect)
{
        struct scene s = scene_new(&two_tenants);
        unsigned short random[3] = { 5, 6, 7 };
        uint8_t bytes[4096];

        for (unsigned round = 0; round < 50; round++) {
                struct raw *raw = round % 2 ? member(&s) : unauthenticated(&s);

                for (size_t i = 0; i < sizeof(bytes); i++)
                        bytes[i] = (uint8_t)nrand48(random);
                if (round % 4 < 2) /* a length that is right, so that the payload is looked at */
                        memcpy(bytes, "\xfc\x0f\x00\x00", 4);
                (void)raw_send_bytes(raw, bytes, sizeof(bytes)); /* it may hang up before the end */
                shutdown(raw->fd, SHUT_WR);
                assert_disconnected(&s, raw, "garbage");
        }
        scene_end(&s);
}

TEST(incomplete_frames_block_no_other_client)
{
        struct scene s = scene_new(&two_tenants);
        struct raw *silent[32];

        for (size_t i = 0; i < 32; i++) {
                silent[i] = i % 2 ? member(&s) : unauthenticated(&s);
                ck_assert_int_eq(raw_send_bytes(silent[i], "\x00\x01\x00\x00half", i % 8 + 1), 0);
        }
        for (unsigned i = 0; i < 100; i++)
                assert_victim_lives(&s);
        for (size_t i = 0; i < 32; i++)
                raw_close(silent[i]);
        scene_end(&s);
}

TEST(a_request_byte_by_byte_is_served)
{
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_USAGE);
        uint8_t frame[64];
        Bfcd__Reply *reply;
        size_t n_bytes;

        request.id = 77;
        n_bytes = raw_pack(&request, frame);
        for (size_t i = 0; i < n_bytes; i++) {
                ck_assert_int_eq(raw_send_bytes(raw, frame + i, 1), 0);
                usleep(1000);
        }
        ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, 77);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_USAGE);
        bfcd__reply__free_unpacked(reply, NULL);
        raw_close(raw);
        scene_end(&s);
}

/* The second piece comes once the daemon has read the first. */
LOOP_TEST(a_hello_in_pieces_is_served, 2)
{
        static char name[] = "a program", tenant[] = "red";
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = unauthenticated(&s);
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        uint8_t frame[64];
        Bfcd__Reply *reply;
        size_t n_bytes, n_piece;

        hello.version = 1;
        hello.name = name;
        hello.tenant = tenant;
        request.id = 77;
        n_bytes = raw_pack(&request, frame);
        n_piece = _i == 0 ? n_bytes / 2 : 1;
        for (size_t i = 0, n; i < n_bytes; i += n) {
                n = n_bytes - i < n_piece ? n_bytes - i : n_piece;
                ck_assert_int_eq(raw_send_bytes(raw, frame + i, n), 0);
                ck_assert(WAIT_FOR(n_bytes_of(raw, SIOCOUTQ) == 0, TIMEOUT_MS));
        }
        ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, 77);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_HELLO);
        bfcd__reply__free_unpacked(reply, NULL);
        raw_close(raw);
        scene_end(&s);
}

TEST(many_requests_in_one_write_are_served_in_order)
{
        enum { N = 200 };
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        uint8_t bytes[64 * N];
        size_t n_bytes = 0;

        for (unsigned i = 1; i <= N; i++) {
                Bfcd__Request request = request_of(BFCD__REQUEST__BODY_MALLOC);

                request.id = i;
                n_bytes += raw_pack(&request, bytes + n_bytes);
        }
        ck_assert_int_eq(raw_send_bytes(raw, bytes, n_bytes), 0);
        for (unsigned i = 1; i <= N; i++) {
                Bfcd__Reply *reply;

                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_uint_eq(reply->id, i);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_BLOCK);
                bfcd__reply__free_unpacked(reply, NULL);
        }
        ck_assert_uint_eq(rig_stats(s.rig, "red", "train").num_blocks, N);
        session_end(raw);
        scene_end(&s);
}

/* ---- messages out of order ------------------------------------------------ */

TEST(requests_before_hello_are_refused)
{
        static const int bodies[] = {
                BFCD__REQUEST__BODY_MALLOC, BFCD__REQUEST__BODY_FREE, BFCD__REQUEST__BODY_USAGE,
                BFCD__REQUEST__BODY_LIST,   BFCD__REQUEST__BODY_ACK,  BFCD__REQUEST__BODY__NOT_SET,
        };
        struct scene s = scene_new(&two_tenants);

        for (size_t i = 0; i < sizeof(bodies) / sizeof(bodies[0]); i++) {
                struct raw *raw = unauthenticated(&s);
                Bfcd__Request request = request_of(bodies[i]);

                ck_assert_int_eq(raw_send(raw, &request), 0);
                assert_not_served(&s, raw, "a request before hello");
        }
        scene_end(&s);
}

TEST(invalid_messages_are_refused)
{
        struct scene s = scene_new(&two_tenants);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_HELLO);
        struct raw *raw = member(&s);

        ck_assert_int_eq(raw_send(raw, &request), 0);
        assert_not_served(&s, raw, "a second hello");

        raw = member(&s);
        request = request_of(BFCD__REQUEST__BODY__NOT_SET);
        ck_assert_int_eq(raw_send(raw, &request), 0);
        assert_not_served(&s, raw, "no body");

        raw = member(&s); /* id 7, and field 99 that no version knows */
        ck_assert_int_eq(raw_send_frame(raw, "\x08\x07\x9a\x06\x00", 5), 0);
        assert_not_served(&s, raw, "an unknown body");

        raw = member(&s); /* Malloc with id 0: its reply could not be told from Extents */
        ck_assert_int_eq(raw_send_frame(raw, "\x1a\x02\x10\x40", 4), 0);
        assert_not_served(&s, raw, "request id 0");

        raw = unauthenticated(&s); /* a Hello with a version that never was */
        request = request_of(BFCD__REQUEST__BODY_HELLO);
        request.hello->version = 0;
        ck_assert_int_eq(raw_send(raw, &request), 0);
        assert_not_served(&s, raw, "version 0");
        scene_end(&s);
}

/* The daemon may have disconnected the client already. */
static void try_ack(struct raw *raw, uint64_t sequence)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request request = REQUEST(ACK, ack, &ack);

        ack.sequence = sequence;
        (void)raw_send(raw, &request);
}

TEST(acks_of_unsent_extents_disconnect)
{
        static const uint64_t beyond[] = { 1, 2, 1000, UINT64_MAX };
        struct scene s = scene_new(&two_tenants);
        Bfcd__Block block;
        struct raw *raw;

        for (size_t i = 0; i < 4; i++) {
                raw = member(&s);
                raw->ack = false;
                ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB, &block), 0);
                session_send_ack(raw, raw->last_sequence + beyond[i]);
                assert_disconnected(&s, raw, "an ack from the future");
        }
        raw = member(&s); /* once more for what is acknowledged already */
        ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB, &block), 0);
        try_ack(raw, raw->last_sequence);
        try_ack(raw, 0);
        assert_disconnected(&s, raw, "an ack of the past");
        scene_end(&s);
}

/* ---- fds ------------------------------------------------------------------ */

/* The kernel refuses to send them (Linux 6.16), and the session goes on without; or the daemon
 * finds them and ends it. */
static void assert_fds_do_not_come(struct scene *s, struct raw *raw, int sent, const char *what)
{
        if (sent == -EPERM) {
                raw_close(raw);
                assert_victim_lives(s);
                return;
        }
        ck_assert_int_eq(sent, 0);
        assert_disconnected(s, raw, what);
}

TEST(file_descriptors_from_clients_are_rejected)
{
        struct scene s = scene_new(&two_tenants);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_USAGE);
        int fds[32];
        uint8_t frame[64];
        size_t n_bytes;

        request.id = 5;
        n_bytes = raw_pack(&request, frame);
        for (size_t i = 0; i < 32; i++)
                fds[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        for (size_t n_fds = 1; n_fds <= 32; n_fds += 31) {
                struct raw *raw = member(&s);
                int sent = raw_send_fds(raw, frame, n_bytes, fds, n_fds);

                assert_fds_do_not_come(&s, raw, sent, "fds with a good request");
                raw = unauthenticated(&s);
                sent = raw_send_fds(raw, "\x05", 1, fds, n_fds);
                assert_fds_do_not_come(&s, raw, sent, "fds with half a frame");
        }
        for (size_t i = 0; i < 32; i++)
                close(fds[i]);
        scene_end(&s);
}

/* ---- requests that make no sense ------------------------------------------ */

TEST(invalid_sizes_and_partitions_are_refused)
{
        static const uint64_t huge[] = { UINT64_C(1) << 63, UINT64_MAX, UINT64_MAX - 255, INT64_MAX,
                                         (UINT64_C(1) << 40) + 1 };
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        Bfcd__Statistics stats;
        Bfcd__Block block;
        int r;

        ck_assert_int_eq(raw_malloc(raw, 0, 0, &block), -EINVAL);
        ck_assert_str_ne(raw_refusal(), "");
        for (size_t i = 0; i < sizeof(huge) / sizeof(huge[0]); i++) {
                r = raw_malloc(raw, 0, huge[i], &block);
                ck_assert_msg(r == -EINVAL || r == -EDQUOT || r == -ENOMEM, "%llu bytes: %d",
                              (unsigned long long)huge[i], r);
                ck_assert_str_ne(raw_refusal(), "");
        }
        for (uint32_t i = 1; i != 0; i = i * 16 + 15) {
                r = raw_malloc(raw, i, 4096, &block);
                ck_assert_msg(r == -EINVAL || r == -ENOENT, "partition %u: %d", i, r);
                r = raw_usage(raw, i, &stats);
                ck_assert_msg(r == -EINVAL || r == -ENOENT, "usage of partition %u: %d", i, r);
                if (i == UINT32_MAX)
                        break;
        }
        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &block), 0);
        ck_assert_uint_eq(rig_stats(s.rig, "red", "train").bytes_in_use, 4096);
        session_end(raw);
        scene_end(&s);
}

TEST(frees_of_other_sessions_blocks_are_refused)
{
        struct scene s = scene_new(&two_tenants);
        struct bfc_block_info victims = { .struct_size = sizeof(victims) };
        struct raw *raw = member(&s), *sibling = member(&s);
        Bfcd__Block mine, of_sibling, next;

        ck_assert_ok(bfc_block_info(s.victim, s.kept, &victims));
        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &mine), 0);
        ck_assert_int_eq(raw_malloc(sibling, 0, 4096, &of_sibling), 0);
        ck_assert_int_eq(raw_free(raw, victims.block_id), -EINVAL);
        ck_assert_str_ne(raw_refusal(), "");
        ck_assert_int_eq(raw_free(raw, of_sibling.block_id), -EINVAL); /* nor its tenant's other session's */
        ck_assert_int_eq(raw_free(raw, 0), -EINVAL);
        ck_assert_int_eq(raw_free(raw, UINT64_MAX), -EINVAL);
        ck_assert_int_eq(raw_free(raw, mine.block_id + (UINT64_C(1) << 32)), -EINVAL); /* a next generation */
        for (uint64_t id = 0; id < 2000; id++)
                ck_assert_msg(id == mine.block_id || raw_free(raw, id) == -EINVAL, "free of id %llu",
                              (unsigned long long)id);
        ck_assert_int_eq(raw_free(raw, mine.block_id), 0);
        ck_assert_int_eq(raw_free(raw, mine.block_id), -EINVAL);
        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &next), 0); /* the same place, another id */
        ck_assert_uint_ne(next.block_id, mine.block_id);
        ck_assert_int_eq(raw_free(raw, mine.block_id), -EINVAL);
        ck_assert_uint_eq(rig_stats(s.rig, "red", "train").num_blocks, 2);
        ck_assert_int_eq(raw_goodbye(raw), 0);
        ck_assert_int_eq(raw_goodbye(sibling), 0);
        raw_close(raw);
        raw_close(sibling);
        scene_end(&s);
}

TEST(invalid_lists_are_refused)
{
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        Bfcd__Reply *page;
        Bfcd__Block block;

        ck_assert_int_lt(raw_list(raw, (Bfcd__List__Kind)99, 0, &page), 0);
        for (int kind = 0; kind <= BFCD__LIST__KIND__WHOAMI; kind++) {
                if (raw_list(raw, (Bfcd__List__Kind)kind, UINT64_MAX, &page) == 0)
                        bfcd__reply__free_unpacked(page, NULL);
                if (raw_list(raw, (Bfcd__List__Kind)kind, UINT32_MAX, &page) == 0)
                        bfcd__reply__free_unpacked(page, NULL);
        }
        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &block), 0);
        session_end(raw);
        scene_end(&s);
}

TEST(requests_after_goodbye_are_refused)
{
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &block), 0);
        ck_assert_int_eq(raw_goodbye(raw), 0);
        ck_assert_int_lt(raw_malloc(raw, 0, 4096, &block), 0);
        raw_close(raw);
        scene_end(&s);
}

/* ---- slow and many -------------------------------------------------------- */

static uint64_t resident_kib(pid_t pid)
{
        char path[40], *text, *line;
        uint64_t n = 0;

        snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
        text = file_text(path);
        line = text ? strstr(text, "RssAnon:") : NULL;
        if (line)
                n = strtoull(line + strlen("RssAnon:"), NULL, 10);
        free(text);
        ck_assert_uint_gt(n, 0);
        return n;
}

/* Sends without ever reading until the daemon takes no more, or hangs up. */
TEST(a_client_that_never_reads_costs_bounded_memory)
{
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_LIST);
        uint64_t before = resident_kib(s.rig->pid), n_sent = 0;
        unsigned n_in_vain = 0;
        uint8_t frames[64 * 1024];
        size_t n_bytes = 0, at = 0;
        Bfcd__Block block;

        for (unsigned i = 0; i < 1000; i++) /* so that each reply is a big one */
                ck_assert_int_eq(raw_malloc(raw, 0, 256, &block), 0);
        request.id = 1000000;
        request.list->kind = BFCD__LIST__KIND__BLOCKS;
        while (n_bytes + 64 < sizeof(frames))
                n_bytes += raw_pack(&request, frames + n_bytes);
        while (n_in_vain < 100) { /* then it is paused */
                ssize_t n = send(raw->fd, frames + at, n_bytes - at, MSG_NOSIGNAL | MSG_DONTWAIT);

                ck_assert_uint_lt(n_sent, 64 * MIB); /* else it accepts without a limit */
                if (n < 0 && errno != EAGAIN)
                        break; /* dropped */
                n_in_vain = n > 0 ? 0 : n_in_vain + 1;
                if (n > 0) {
                        n_sent += (uint64_t)n;
                        at = (at + (size_t)n) % n_bytes;
                }
                wait_for_turns(&s);
                assert_victim_lives(&s);
        }
        ck_assert_uint_lt(resident_kib(s.rig->pid), before + 32 * 1024);
        assert_victim_lives(&s);
        raw_close(raw);
        scene_end(&s);
}

/* Further requests are read when one of those that wait has its answer. */
TEST(waiting_requests_are_bounded)
{
        enum { N_PENDING = 64, N_SENT = 100, WAIT_MS = 600000 };
        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s), *holder = member(&s);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_MALLOC);
        Bfcd__Malloc much = *request.malloc;
        uint8_t frame[64];
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(holder, 0, 160 * MIB, &block), 0);
        much.n_bytes = 128 * MIB;
        much.wait_ms = WAIT_MS;
        request.malloc = &much;
        for (unsigned i = 0; i < N_SENT; i++) {
                request.id = 1000 + i;
                ck_assert_int_eq(raw_send_bytes(raw, frame, raw_pack(&request, frame)), 0);
        }
        ck_assert(WAIT_FOR(rig_n_waiting(s.rig, "red") == N_PENDING, HANG_UP_MS));
        wait_for_turns(&s);
        ck_assert_uint_eq(rig_n_waiting(s.rig, "red"), N_PENDING);
        assert_victim_lives(&s);
        ck_assert_int_eq(raw_free(holder, block.block_id), 0);
        ck_assert(WAIT_FOR(rig_n_waiting(s.rig, "red") == N_PENDING,
                           HANG_UP_MS)); /* one is served, one is read */
        raw_close(raw);
        raw_close(holder);
        scene_end(&s);
}

/* Takes extents and never says that it mapped them: at most 64 are under way. */
TEST(unacknowledged_extents_are_bounded)
{
        enum { N_WINDOW = 64 };

        if (rig_device() == ON_CUDA_IPC)
                return; /* extents are too large for 64 of them */

        struct scene s = scene_new(&two_tenants);
        struct raw *raw = member(&s);
        unsigned n_blocks = 0;
        Bfcd__Reply *reply;
        int r = 0;

        raw->ack = false;
        while (n_blocks < 100) {
                Bfcd__Request request = request_of(BFCD__REQUEST__BODY_MALLOC);

                request.malloc->n_bytes = 2 * MIB;
                ck_assert_int_eq(raw_send(raw, &request), 0);
                /* Where all places are taken it gets no answer, in any time. */
                r = raw_receive(raw, raw->n_extents < N_WINDOW ? RAW_TIMEOUT_MS : 100, &reply);
                if (r != 0)
                        break;
                r = reply->body_case == BFCD__REPLY__BODY_BLOCK ? 0 : -1;
                bfcd__reply__free_unpacked(reply, NULL);
                if (r != 0)
                        break;
                n_blocks++;
        }
        ck_assert_msg(r != 0, "%u blocks of 2 MiB without an ack", n_blocks);
        ck_assert_uint_le(raw->n_extents, N_WINDOW);
        assert_victim_lives(&s);
        if (r == RAW_TIMEOUT) { /* paused: an ack continues it */
                session_send_ack(raw, raw->last_sequence);
                raw->ack = true;
                ck_assert_int_eq(raw_receive(raw, RAW_TIMEOUT_MS, &reply), 0);
                ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_BLOCK);
                bfcd__reply__free_unpacked(reply, NULL);
                ck_assert_int_eq(raw_goodbye(raw), 0);
        }
        raw_close(raw);
        scene_end(&s);
}

/* A session that shares a block of so many MiB as "w". */
static struct raw *publisher(struct scene *s, uint64_t n_mib)
{
        struct raw *raw = member(s);
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(raw, 0, n_mib * MIB, &block), 0);
        ck_assert_int_eq(raw_publish(raw, block.block_id, "w"), 0);
        return raw;
}

static uint64_t send_attach(struct raw *raw)
{
        Bfcd__Attach body = BFCD__ATTACH__INIT;
        Bfcd__Request r = REQUEST(ATTACH, attach, &body);

        body.name = (char *)(uintptr_t) "w";
        ck_assert_int_eq(raw_send(raw, &r), 0);
        return r.id;
}

static void expect_reply(struct raw *raw, uint64_t id, Bfcd__Reply__BodyCase body)
{
        Bfcd__Reply *reply;

        ck_assert_int_eq(raw_receive(raw, TIMEOUT_MS, &reply), 0);
        ck_assert_uint_eq(reply->id, id);
        ck_assert_int_eq(reply->body_case, body);
        bfcd__reply__free_unpacked(reply, NULL);
}

/* Attaches what it can, again and again, and acknowledges nothing: N_OPEN requests wait, and the rest is refused.
 * With the acknowledgement all are answered, in order. */
TEST(attaches_without_an_acknowledgement_are_bounded)
{
        enum { N_OPEN = 1024, N_REFUSED = 10 };

        if (rig_device() == ON_CUDA_IPC)
                return; /* one extent each */

        struct scene s = scene_new(&two_tenants);
        struct raw *owner = publisher(&s, 132), *raw = member(&s);
        uint64_t first;

        raw->ack = false;
        first = send_attach(raw);
        for (unsigned i = 1; i < N_OPEN + N_REFUSED; i++)
                (void)send_attach(raw);
        for (unsigned i = 0; i < N_REFUSED; i++)
                expect_reply(raw, first + N_OPEN + i, BFCD__REPLY__BODY_REFUSAL);
        ck_assert_uint_eq(raw->n_extents, 64);
        assert_victim_lives(&s);
        session_send_ack(raw, raw->last_sequence);
        for (unsigned i = 0; i < N_OPEN; i++)
                expect_reply(raw, first + i, BFCD__REPLY__BODY_ATTACHED);
        expect_reply(raw, send_attach(raw), BFCD__REPLY__BODY_ATTACHED);
        session_end(raw);
        session_end(owner);
        scene_end(&s);
}

/* Asks without reading until replies stay in the daemon. Returns how many times. */
static unsigned fill_with_replies(struct scene *s, struct raw *raw)
{
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_LIST);
        unsigned n = 0, n_in_vain = 0;
        int n_unread = 0;

        request.list->kind = BFCD__LIST__KIND__STATUS;
        for (; n_in_vain < 3; n++) {
                request.id = 0;
                ck_assert_int_eq(raw_send(raw, &request), 0);
                ck_assert(WAIT_FOR(n_bytes_of(raw, SIOCOUTQ) == 0, TIMEOUT_MS));
                wait_for_turns(s);
                n_in_vain = n_bytes_of(raw, SIOCINQ) > n_unread ? 0 : n_in_vain + 1;
                n_unread = n_bytes_of(raw, SIOCINQ);
        }
        return n;
}

/* Acknowledges extents that it has not read. The daemon keeps fds of one message for it, not of all. */
TEST(acks_of_unread_extents_hold_bounded_fds)
{
        enum { N_EXTENTS = 90, N_WINDOW = 64 };

        if (rig_device() == ON_CUDA_IPC)
                return; /* no fds */

        struct scene s = scene_new(&two_tenants);
        struct raw *owner = publisher(&s, 2 * N_EXTENTS), *raw = member(&s);
        unsigned n_lists, n_fds;
        uint64_t id;

        raw->ack = false;
        n_lists = fill_with_replies(&s, raw);
        n_fds = process_count_fds(s.rig->pid);
        id = send_attach(raw);
        session_send_ack(raw, 1);
        ck_assert(WAIT_FOR(process_count_fds(s.rig->pid) >= n_fds + N_WINDOW, TIMEOUT_MS));
        for (unsigned i = 0; i < 20; i++) /* turns go round */
                assert_victim_lives(&s);
        ck_assert_uint_lt(process_count_fds(s.rig->pid), n_fds + N_EXTENTS);
        while (n_lists-- > 0)
                expect_reply(raw, id - n_lists - 1, BFCD__REPLY__BODY_LIST);
        expect_reply(raw, id, BFCD__REPLY__BODY_ATTACHED);
        ck_assert_uint_eq(raw->n_extents, N_EXTENTS);
        session_end(raw);
        session_end(owner);
        scene_end(&s);
}

static bool is_stopped(pid_t pid)
{
        char path[32], *text, *state;
        bool is;

        snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
        text = file_text(path);
        ck_assert_ptr_nonnull(text);
        state = strrchr(text, ')');
        is = state && state[2] == 'T';
        free(text);
        return is;
}

/* The kernel counts fds that were sent and not read against the daemon's user, and refuses more beyond its LimitNOFILE:
 * then no client would get any. */
TEST(fds_in_flight_are_bounded)
{
        enum { N_EXTENTS = 126, N_UNREAD = 67 };

        if (rig_device() == ON_CUDA_IPC)
                return; /* no fds */

        struct scene s = scene_new(&two_tenants);
        struct raw *owner = publisher(&s, 2 * N_EXTENTS), *raw = member(&s);
        Bfcd__Reply *reply;
        uint64_t id;

        raw->ack = false;
        id = send_attach(raw);
        session_send_ack(raw, 1);
        session_send_ack(raw, 2);
        ck_assert(WAIT_FOR(n_bytes_of(raw, SIOCINQ) > 0, TIMEOUT_MS));
        for (unsigned i = 0; i < 20; i++) /* turns go round */
                assert_victim_lives(&s);
        ck_assert_int_eq(kill(s.rig->pid, SIGSTOP), 0);
        ck_assert(WAIT_FOR(is_stopped(s.rig->pid), TIMEOUT_MS));
        ck_assert_int_eq(raw_receive(raw, 100, &reply),
                         RAW_TIMEOUT); /* what is in flight, and no more comes */
        ck_assert_uint_gt(raw->n_extents, 0);
        ck_assert_uint_le(raw->n_extents, N_UNREAD);
        ck_assert_int_eq(kill(s.rig->pid, SIGCONT), 0);
        expect_reply(raw, id, BFCD__REPLY__BODY_ATTACHED);
        ck_assert_uint_eq(raw->n_extents, N_EXTENTS);
        session_end(raw);
        session_end(owner);
        scene_end(&s);
}

/* Before Linux 6.16 the daemon reads them as bytes of the stream, so they break the sender's frames. */
static bool urgent_bytes_are_in_the_stream(void)
{
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), no = 0;
        bool refuses = setsockopt(fd, SOL_SOCKET, 83 /* SO_PASSRIGHTS */, &no, sizeof(no)) == 0;

        close(fd);
        return !refuses || getenv("BFC_TEST_KERNEL");
}

static void assert_urgent_bytes_end_their_sender(void)
{
        struct scene s = scene_new(&two_tenants);

        for (unsigned i = 0; i < 10; i++) {
                struct raw *raw = i % 2 ? member(&s) : unauthenticated(&s);

                /* In one call, so that they are an impossible length when the daemon looks. The kernel sends
                 * the last byte after the others, and the daemon may have hung up by then. */
                ck_assert_int_ge(send(raw->fd, "!!!!!!", 6, MSG_OOB | MSG_NOSIGNAL), 5);
                assert_disconnected(&s, raw, "urgent bytes");
        }
        scene_end(&s);
}

/* Out-of-band bytes are no part of the stream: between frames and inside of them, before the hello too. */
TEST(urgent_bytes_are_no_part_of_the_stream)
{
        struct scene s;
        struct raw *raw, *half = NULL;
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_USAGE);
        uint8_t frame[64];
        size_t n;

        if (urgent_bytes_are_in_the_stream()) {
                assert_urgent_bytes_end_their_sender();
                return;
        }
        s = scene_new(&two_tenants);
        raw = member(&s);

        ck_assert_int_eq(raw_open(s.rig->socket, &half), 0);
        ck_assert_int_eq(raw_send_bytes(half, "\0\x10\0\0", 4), 0);
        for (unsigned i = 0; i < 100; i++) {
                ck_assert_int_eq(send(half->fd, "!", 1, MSG_OOB | MSG_NOSIGNAL), 1);
                ck_assert_int_eq(send(raw->fd, "!", 1, MSG_OOB | MSG_NOSIGNAL), 1);
                request.id = raw->next_id++;
                n = raw_pack(&request, frame);
                ck_assert_int_eq(raw_send_bytes(raw, frame, 3), 0);
                if (i % 2) /* one that was not read becomes one of the stream where the next one comes */
                        ck_assert(WAIT_FOR(n_bytes_of(raw, SIOCOUTQ) == 0, TIMEOUT_MS));
                assert_victim_lives(&s);
                ck_assert_int_eq(raw_send_bytes(raw, frame + 3, n - 3), 0);
                expect_reply(raw, request.id, BFCD__REPLY__BODY_USAGE);
        }
        session_end(raw);
        raw_close(half);
        scene_end(&s);
}

/* ---- unread input ------------------------------------------------ */

static void fill_socket(int fd, const uint8_t *bytes, size_t n_bytes)
{
        size_t at = 0;
        ssize_t n;

        while ((n = send(fd, bytes + at, n_bytes - at, MSG_NOSIGNAL | MSG_DONTWAIT)) > 0)
                at = (at + (size_t)n) % n_bytes;
        ck_assert_int_eq(errno, EAGAIN);
}

static size_t pack_requests(const struct raw *raw, uint8_t *bytes, size_t n_room)
{
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_LIST);
        size_t n_bytes = 0;

        request.id = raw->next_id;
        while (n_bytes + 64 < n_room)
                n_bytes += raw_pack(&request, bytes + n_bytes);
        return n_bytes;
}

/* Asks without reading until the daemon reads no more, and its socket is full. */
static void fill_with_requests(struct scene *s, struct raw *raw)
{
        uint8_t bytes[8192];
        size_t n_bytes = pack_requests(raw, bytes, sizeof(bytes));
        int n_left;

        (void)fill_with_replies(s, raw);
        do { /* of bytes that still wait; as the kernel counts them, which is more */
                fill_socket(raw->fd, bytes, n_bytes);
                n_left = n_bytes_of(raw, SIOCOUTQ);
                wait_for_turns(s);
        } while (n_bytes_of(raw, SIOCOUTQ) < n_left);
        ck_assert_int_gt(n_left, 128 * 1024);
}

static struct raw *member_with_events(struct scene *s)
{
        struct raw *raw = unauthenticated(s);

        raw->wants_events = true;
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0);
        ck_assert_int_ge(raw->events_fd, 0);
        return raw;
}

/* It leaves while the daemon has most of its requests still to read, and reads no more of them. */
TEST(who_leaves_with_unread_input_is_gone)
{
        enum { CLOSES, SHUTS_DOWN, CLOSES_EVENTS, N_WAYS };
        struct scene s = scene_new(&two_tenants);

        for (int way = 0; way < N_WAYS; way++) {
                struct raw *raw = member_with_events(&s);

                fill_with_requests(&s, raw);
                ck_assert_uint_eq(rig_count(s.rig).n_sessions, 2);
                if (way == CLOSES) {
                        raw = raw_close(raw);
                } else if (way == SHUTS_DOWN) {
                        ck_assert_int_eq(shutdown(raw->fd, SHUT_WR), 0);
                } else {
                        close(raw->events_fd);
                        raw->events_fd = -1;
                }
                if (raw) {
                        struct pollfd p = { .fd = raw->fd, .events = POLLRDHUP };

                        ck_assert_msg(poll(&p, 1, HANG_UP_MS) == 1, "way %d: no hang-up", way);
                        ck_assert_int_eq(raw_wait_hang_up(raw, HANG_UP_MS), 0); /* until then it lingers */
                }
                ck_assert_msg(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS), "way %d: it stays",
                              way);
                raw_close(raw);
                assert_victim_lives(&s);
        }
        ck_assert(!rig_logged(s.rig, "disconnected:")); /* they were not, they left */
        scene_end(&s);
}

/* Its requests and its end are reported to the daemon at once: what was sent is handled, and then it is gone. */
TEST(who_leaves_after_its_requests_is_gone)
{
        struct scene s = scene_new(&two_tenants);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_USAGE);

        for (unsigned n = 1; n < 40; n += 19) { /* in one read, and in several */
                for (int closes = 0; closes < 2; closes++) {
                        struct raw *raw = member(&s);
                        uint64_t first = raw->next_id;
                        uint8_t frame[64];

                        ck_assert_int_eq(kill(s.rig->pid, SIGSTOP), 0);
                        for (unsigned i = 0; i < n; i++) {
                                request.id = raw->next_id++;
                                ck_assert_int_eq(raw_send_bytes(raw, frame, raw_pack(&request, frame)), 0);
                        }
                        if (closes)
                                raw = raw_close(raw);
                        else
                                ck_assert_int_eq(shutdown(raw->fd, SHUT_WR), 0);
                        ck_assert_int_eq(kill(s.rig->pid, SIGCONT), 0);
                        for (unsigned i = 0; i < n && !closes; i++)
                                expect_reply(raw, first + i, BFCD__REPLY__BODY_USAGE);
                        if (!closes)
                                ck_assert_int_eq(raw_wait_hang_up(raw, HANG_UP_MS), 0);
                        ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS));
                        raw_close(raw);
                }
        }
        scene_end(&s);
}

struct dying {
        const char *socket;
        struct gate up, stopped, filled, done;
};

/* A member with a block. Another process keeps the socket open, so that only the exit shows that it is gone. */
static struct raw *open_for_two(struct dying *d)
{
        struct raw *raw;
        Bfcd__Block block;

        REQUIRE(raw_open(d->socket, &raw) == 0 && raw_hello(raw, "red", NULL) == 0, "%s", raw_refusal());
        REQUIRE(raw_malloc(raw, 0, 1 * MIB, &block) == 0, "%s", raw_refusal());
        if (fork() == 0) {
                gate_wait(&d->done, 2 * SETTLE_MS); /* longer than anybody waits for the end of the session */
                _exit(0);
        }
        return raw;
}

static void fill_and_wait(void *arg)
{
        struct dying *d = arg;
        static uint8_t bytes[8192];
        struct raw *raw = open_for_two(d);

        /* Of the acknowledgement. A daemon that is stopped before it has handled that would go on with the
         * reading, and answer requests before it hears of the exit. */
        REQUIRE(WAIT_FOR(n_bytes_of(raw, SIOCOUTQ) == 0, TIMEOUT_MS), "no end of its reading");
        gate_open(&d->up);
        gate_wait(&d->stopped, SETTLE_MS);
        fill_socket(raw->fd, bytes, pack_requests(raw, bytes, sizeof(bytes)));
        gate_open(&d->filled);
        pause();
}

static struct dying dying_of(const struct scene *s)
{
        return (struct dying){ s->rig->socket, gate_new(), gate_new(), gate_new(), gate_new() };
}

TEST(who_dies_with_unread_input_is_gone)
{
        struct scene s = scene_new(&two_tenants);
        struct dying d = dying_of(&s);
        pid_t pid = child_start_until(&d.up, fill_and_wait, &d);

        wait_for_turns(&s);
        child_stop(s.rig->pid);
        gate_open(&d.stopped);
        ck_assert(gate_wait(&d.filled, SETTLE_MS));
        child_kill(pid);
        kill(s.rig->pid, SIGCONT);
        ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS));
        gate_open(&d.done); /* of a GPU, it had the memory, too */
        ck_assert(WAIT_FOR(rig_charge(s.rig, "red", "train") == 0, HANG_UP_MS));
        scene_end(&s);
}

static void ask_and_wait(void *arg)
{
        struct dying *d = arg;
        struct raw *raw = open_for_two(d);
        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_LIST);
        struct pollfd p = { .fd = raw->fd, .events = POLLIN };

        REQUIRE(raw_send(raw, &request) == 0 && poll(&p, 1, RAW_TIMEOUT_MS) == 1, "no reply");
        gate_open(&d->up);
        pause();
}

/* Another process keeps its replies. Of a session that was sent fds only the kernel knows whether they are among
 * these, so it stays until they are gone, without memory. One that was sent handles has no reason to. */
TEST(who_dies_with_unread_replies_has_no_memory)
{
        struct scene s = scene_new(&two_tenants);
        struct dying d = dying_of(&s);
        pid_t pid = child_start_until(&d.up, ask_and_wait, &d);

        ck_assert_uint_eq(rig_count(s.rig).n_blocks, 2);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_count(s.rig).n_blocks == 1, HANG_UP_MS));
        if (rig_device() == ON_CUDA_IPC) {
                ck_assert(WAIT_FOR(rig_charge(s.rig, "red", "train") == 0, HANG_UP_MS));
                ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS));
        } else { /* the other process has the fds */
                ck_assert_uint_gt(rig_charge(s.rig, "red", "train"), 0);
                ck_assert_uint_eq(rig_count(s.rig).n_sessions, 2);
                s.rig->forgiven = "unreclaimed";
        }
        gate_open(&d.done);
        ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS));
        scene_end(&s);
}

/* The daemon ends it, for what it did first, while most of what it sent is not read, and it sends more. */
TEST(who_fails_with_unread_input_is_disconnected)
{
        enum { UNAUTHENTICATED, MEMBER, EVENTS, N_WAYS };
        static uint8_t garbage[8192];
        struct scene s = scene_new(&two_tenants);

        memset(garbage, 0xff, sizeof(garbage)); /* an invalid length */
        for (int way = 0; way < N_WAYS; way++) {
                struct raw *raw = way == UNAUTHENTICATED ? unauthenticated(&s) : member_with_events(&s);
                int fd = way == EVENTS ? raw->events_fd : raw->fd;
                ssize_t n;

                child_stop(s.rig->pid); /* or it would fail before there is much */
                fill_socket(fd, garbage, sizeof(garbage));
                kill(s.rig->pid, SIGCONT);
                do
                        n = send(fd, garbage, sizeof(garbage), MSG_NOSIGNAL);
                while (n > 0 || errno == EAGAIN);
                ck_assert(errno == EPIPE || errno == ECONNRESET);
                ck_assert(
                        WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS)); /* though it keeps its end */
                assert_disconnected(&s, raw, "garbage");
        }
        ck_assert(rig_logged(s.rig, "a frame with an invalid length"));
        scene_end(&s);
}

/* A client fails while its request waits for memory, which another session frees while the daemon drops the unread input.
 * The daemon grants the request, cannot send the extents any more, and closes their fds. On a GPU the session would stay
 * as long as this process. */
LOOP_TEST(who_fails_before_its_grant_leaves_no_fds, rig_device() == ON_HOST)
{
        enum { N_TIMES = 10 }; /* the grant is between two parts of the drop nearly always */
        const uint64_t n_bytes = 16 * MIB;
        static uint8_t garbage[8192];
        struct rig_config config = two_tenants;
        struct scene s;

        config.tenants = TENANT("red", "@UID@", "train, limit: 16MiB")
                TENANT("victim", "@UID@", "train, limit: 32MiB");
        s = scene_new(&config);
        memset(garbage, 0xff, sizeof(garbage)); /* an invalid length */
        for (int i = 0; i < N_TIMES; i++) {
                Bfcd__Request wait = request_of(BFCD__REQUEST__BODY_MALLOC);
                Bfcd__Request release = request_of(BFCD__REQUEST__BODY_FREE);
                struct raw *holder = member(&s), *waiter = member(&s);
                Bfcd__Block block;

                wait.malloc->n_bytes = n_bytes;
                wait.malloc->wait_ms = TIMEOUT_MS;
                ck_assert_int_eq(raw_malloc(holder, 0, n_bytes, &block), 0);
                ck_assert_int_eq(raw_send(waiter, &wait), 0);
                wait_for_turns(&s);
                release.free->block_id = block.block_id;
                child_stop(s.rig->pid);
                fill_socket(waiter->fd, garbage, sizeof(garbage));
                ck_assert_int_eq(raw_send(holder, &release), 0);
                kill(s.rig->pid, SIGCONT);
                expect_reply(holder, release.id, BFCD__REPLY__BODY_DONE);
                assert_disconnected(&s, waiter, "garbage");
                session_end(holder); /* from now on no process has the extents */
                ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, SETTLE_MS));
        }
        scene_end(&s); /* which counts fds */
}

/* A client that reads nothing is disconnected; the replies that it was sent before are still there. */
TEST(who_reads_nothing_with_unread_input_is_disconnected)
{
        struct rig_config config = two_tenants;
        struct scene s;
        struct raw *raw;

        config.moves_clock = true;
        s = scene_new(&config);
        raw = member(&s);
        fill_with_requests(&s, raw);
        rig_pass(s.rig, 30000);
        ck_assert(WAIT_FOR(rig_logged(s.rig, "did not read its replies"), TIMEOUT_MS));
        ck_assert(WAIT_FOR(rig_count(s.rig).n_sessions == 1, HANG_UP_MS));
        expect_reply(raw, 2, BFCD__REPLY__BODY_LIST);
        assert_disconnected(&s, raw, "it reads nothing");
        scene_end(&s);
}

/* Second by second: the daemon may have accepted it after the clock moved. */
static void assert_expires(struct scene *s, struct raw *raw)
{
        int r = RAW_TIMEOUT;

        ck_assert(
                WAIT_FOR((rig_pass(s->rig, 1000), r = raw_wait_hang_up(raw, 0)) != RAW_TIMEOUT, HANG_UP_MS));
        ck_assert_int_eq(r, 0);
}

/* An unauthenticated connection has 10 seconds; an authenticated one may be silent for ever. */
TEST(silence_before_hello_ends)
{
        struct rig_config config = two_tenants;
        struct scene s = scene_new((config.moves_clock = true, &config));
        int64_t start = clock_ms();
        struct raw *silent = unauthenticated(&s), *half = unauthenticated(&s), *known = member(&s);
        struct raw *operator= NULL;
        Bfcd__Statistics stats;

        ck_assert_int_eq(raw_open(s.rig->admin_socket, &operator), 0);
        ck_assert_int_eq(raw_send_bytes(half, "\x08\x00", 2), 0);
        rig_pass(s.rig, 9000);
        ck_assert(raw_wait_hang_up(silent, 0) == RAW_TIMEOUT || clock_ms() - start >= 1000);
        assert_expires(&s, silent);
        assert_expires(&s, half);
        assert_expires(&s, operator);
        ck_assert_int_eq(raw_usage(known, 0, &stats), 0);
        raw_close(silent);
        raw_close(half);
        raw_close(operator);
        raw_close(known);
        scene_end(&s);
}

/* One user that connects and says nothing has few places: its oldest connections make way for new ones, so
 * that it comes in when it speaks, and others do all the same. */
TEST(unauthenticated_connections_of_a_user_are_limited)
{
        enum { N = 144, N_ALLOWED = 128 };
        struct scene s = scene_new(&two_tenants);
        struct raw *unauth[N];
        size_t n_out = 0;

        for (size_t i = 0; i < N; i++)
                ck_assert_int_eq(raw_open(s.rig->socket, &unauth[i]), 0);
        for (size_t i = 0; i < N - N_ALLOWED; i++)
                n_out += raw_wait_hang_up(unauth[i], HANG_UP_MS) == 0;
        ck_assert_uint_eq(n_out, N - N_ALLOWED);
        for (size_t i = N - N_ALLOWED; i < N; i += 31)
                ck_assert_int_eq(raw_hello(unauth[i], "red", NULL), 0);
        for (size_t i = 0; i < N; i++)
                raw_close(unauth[i]);
        assert_victim_lives(&s);
        scene_end(&s);
}

/* ---- fds run out ----------------------------------------------------------- */

TEST(more_connections_than_fds)
{
        struct rig_config config = two_tenants;
        struct raw *unauth[60];
        struct scene s;
        bfc_client *late;

        config.max_fds = 64;
        s = scene_new(&config);
        s.rig->forgiven = "no connection is accepted";
        assert_victim_lives(&s);        /* its extents are made: those take fds, too */
        for (size_t i = 0; i < 60; i++) /* more than it can take; they wait in the backlog */
                unauth[i] = unauthenticated(&s);
        for (unsigned i = 0; i < 5; i++) {
                usleep(50000);
                assert_victim_lives(&s);
        }
        for (size_t i = 0; i < 60; i++)
                raw_close(unauth[i]);
        late = client_open(s.rig, "red", NULL);
        bfc_disconnect(late);
        scene_end(&s);
}

/* Does not wait for the answer, which may never come. */
static void send_hello(struct raw *raw, const char *tenant)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);

        hello.version = 1;
        hello.tenant = (char *)(uintptr_t)tenant;
        (void)raw_send(raw, &request); /* it may have been closed for want of an fd */
}

/* Sessions of clients take all fds that they can get and keep them; more connections wait. */
TEST(the_admin_socket_is_served_without_fds)
{
        enum { N = 60 };
        const char *const commands[] = { "status", "tenants", "sessions", "config" };
        struct rig_config config = two_tenants;
        struct raw *unauth[N];
        struct scene s;

        config.max_fds = 64;
        s = scene_new(&config);
        s.rig->forgiven = "no connection is accepted";
        assert_victim_lives(&s); /* its extents are made: those take fds, too */
        for (size_t i = 0; i < N; i++) {
                unauth[i] = unauthenticated(&s);
                send_hello(unauth[i], "red");
        }
        ck_assert(WAIT_FOR(rig_logged(s.rig, s.rig->forgiven), SETTLE_MS));
        for (unsigned round = 0; round < 5; round++) {
                for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
                        char *errors = NULL;

                        ck_assert_msg(ctl(s.rig->admin_socket, WORDS(commands[i]), NULL, &errors) == 0,
                                      "%s: %s", commands[i], errors);
                        free(errors);
                }
        }
        for (size_t i = 0; i < N; i++)
                raw_close(unauth[i]);
        scene_end(&s);
}

/* Logged at the start if the limit on fds is lower than what the config allows. */
TEST(a_low_fd_limit_is_logged)
{
        /* 5 for each session, 2 for the tenant, 320, and 33 at most for extents of 64 MiB, which are
         * fds unless they are shared by handles. */
        unsigned n_extents = rig_device() != ON_CUDA_IPC ? 33 : 0, n = 40 * 5 + 2 + 320 + n_extents;
        struct rig_config config = { .top = "max_sessions: 40\n", .max_fds = n };
        struct rig *rig;
        char wanted[64];
        char *log;

        snprintf(wanted, sizeof(wanted), " need %u:", config.max_fds);
        while (config.max_fds - config.max_fds / 8 < n) /* an eighth is for the admin socket */
                config.max_fds++;
        rig = rig_start(&config);
        log = rig_log(rig);

        ck_assert_ptr_null(strstr(log, "LimitNOFILE="));
        free(log);
        rig_stop(rig);
        config.max_fds--;
        rig = rig_start(&config);
        log = rig_log(rig);
        ck_assert_msg(strstr(log, "LimitNOFILE=") && strstr(log, wanted), "the log: %s", log);
        free(log);
        rig_stop(rig);
}

TEST(more_extents_than_fds)
{
        if (rig_device() == ON_CUDA_IPC)
                return; /* handles are no fds */

        struct rig_config config = two_tenants;
        struct scene s;
        bfc_client *client;
        size_t n = 0;
        void *blocks[128];
        int r;

        config.max_fds = 64;
        s = scene_new(&config);
        client = client_open(s.rig, "red", NULL);
        while (n < 128 && (r = bfc_malloc(client, 2 * MIB, blocks + n)) == 0)
                memset(blocks[n++], 1, 2 * MIB);
        ck_assert_uint_lt(n, 128);
        ck_assert_uint_gt(n, 8);
        ck_assert_msg(r == -ENOMEM, "malloc without fds: %d", r);
        ck_assert_str_ne(bfc_last_error(), "");
        r = bfc_malloc(s.victim, 100000, blocks + n); /* it has no extent yet: refused, but not hung up on */
        ck_assert_msg(r == -ENOMEM, "the victim: %d", r);
        ck_assert_ok(bfc_free(client, blocks[0])); /* what there is still serves */
        ck_assert_ok(bfc_malloc(client, 2 * MIB, blocks));
        ck_assert_uint_eq(rig_stats(s.rig, "red", "train").bytes_in_use, n * 2 * MIB);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(s.rig, "red", "train") == 0, SETTLE_MS)); /* their fds are back */
        scene_end(&s);
}

/* ---- words ---------------------------------------------------------------- */

/* As long as a frame holds; neither the sentence nor the log grows with them. */
TEST(long_names_are_truncated)
{
        struct scene s = scene_new(&two_tenants);
        char *word = malloc(60001), *log;
        struct raw *raw = unauthenticated(&s);

        memset(word, 'w', 60000);
        word[60000] = '\0';
        ck_assert_int_eq(raw_hello(raw, word, NULL), -EACCES);
        ck_assert_uint_lt(strlen(raw_refusal()), 2000);
        ck_assert_int_eq(raw_hello(raw, "red", word), -ENOENT);
        ck_assert_uint_lt(strlen(raw_refusal()), 2000);
        ck_assert_int_eq(raw_hello(raw, "red", NULL), 0); /* the third attempt is valid */
        raw_close(raw);
        log = rig_log(s.rig);
        ck_assert_uint_lt(strlen(log), 20000);
        free(log);
        free(word);
        scene_end(&s);
}

/* A session in the middle of everything vanishes: its requests are under way. */
TEST(hang_ups_with_pending_requests)
{
        struct scene s = scene_new(&two_tenants);

        for (unsigned i = 0; i < 50; i++) {
                struct raw *raw = member(&s);

                for (unsigned j = 0; j < 4; j++) {
                        Bfcd__Request request = request_of(BFCD__REQUEST__BODY_MALLOC);

                        request.malloc->n_bytes = (i % 5 + 1) * 4 * MIB; /* backing takes a while */
                        ck_assert_int_eq(raw_send(raw, &request), 0);
                }
                if (i % 2) {
                        Bfcd__Request goodbye = request_of(BFCD__REQUEST__BODY_GOODBYE);

                        ck_assert_int_eq(raw_send(raw, &goodbye), 0);
                }
                usleep(i * 200);
                raw_close(raw);
                if (i % 10 == 0)
                        assert_victim_lives(&s);
        }
        scene_end(&s);
}
