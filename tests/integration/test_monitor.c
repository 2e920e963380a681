/* The monitor socket: it shows everything, changes nothing, and has few places.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/integration/json.h"

enum { REFUSED = 1 }; /* exit status of bfcctl */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") TENANT_OF(
                "blue", "@UID@", "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

/* ---- what it refuses -------------------------------------------------------- */

/* What does not end the session or has no reply. Each other request must be refused, also one that is added to
 * the protocol later. */
static bool is_for_monitors(Bfcd__Request__BodyCase body)
{
        return body == BFCD__REQUEST__BODY_LIST || body == BFCD__REQUEST__BODY_EXPLAIN ||
               body == BFCD__REQUEST__BODY_SHOW_CONFIG;
}

static bool is_left_out(Bfcd__Request__BodyCase body)
{
        return body == BFCD__REQUEST__BODY_HELLO || body == BFCD__REQUEST__BODY_GOODBYE ||
               body == BFCD__REQUEST__BODY_ACK || body == BFCD__REQUEST__BODY_CANCEL;
}

/* An empty request of this kind. A session or a device is named where there is such a field, so that the request
 * could have an effect. */
static int try_request(struct raw *raw, const ProtobufCFieldDescriptor *kind, uint64_t session_id)
{
        const ProtobufCMessageDescriptor *type = kind->descriptor;
        ProtobufCMessage *body = calloc(1, type->sizeof_message);
        const ProtobufCFieldDescriptor *field;
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        ck_assert_ptr_nonnull(body);
        protobuf_c_message_init(type, body);
        field = protobuf_c_message_descriptor_get_field_by_name(type, "session_id");
        if (field)
                *(uint64_t *)(void *)((char *)body + field->offset) = session_id;
        field = protobuf_c_message_descriptor_get_field_by_name(type, "device");
        if (field)
                *(const char **)(void *)((char *)body + field->offset) = rig_device_id();
        request.body_case = (Bfcd__Request__BodyCase)kind->id;
        *(ProtobufCMessage **)(void *)((char *)&request + kind->offset) = body;
        ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
        free(body);
        r = reply->body_case == BFCD__REPLY__BODY_REFUSAL ? -(int)reply->refusal->error : 0;
        if (r == -EACCES)
                ck_assert_ptr_nonnull(strstr(reply->refusal->message, "monitor socket"));
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

RIG_TEST(a_monitor_changes_nothing, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red"), *raw = session_open(rig->monitor_socket, NULL);
        const ProtobufCMessageDescriptor *requests = &bfcd__request__descriptor;
        Bfcd__Statistics before, after;
        Bfcd__Block block, other;
        unsigned n_refused = 0;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert_int_eq(raw_malloc(red, 0, 4096, &other), 0);
        ck_assert_int_eq(raw_free(red, block.block_id), 0); /* a peak that a reset would erase */
        before = rig_stats(rig, "red", "train");
        for (unsigned i = 0; i < requests->n_fields; i++) {
                const ProtobufCFieldDescriptor *kind = &requests->fields[i];
                Bfcd__Request__BodyCase body = (Bfcd__Request__BodyCase)kind->id;

                if (kind->type != PROTOBUF_C_TYPE_MESSAGE || is_left_out(body))
                        continue;
                if (is_for_monitors(body)) {
                        ck_assert_msg(try_request(raw, kind, red->session_id) != -EACCES, "%s", kind->name);
                } else {
                        ck_assert_msg(try_request(raw, kind, red->session_id) == -EACCES, "%s", kind->name);
                        n_refused++;
                }
        }
        ck_assert_uint_ge(n_refused, 13);
        after = rig_stats(rig, "red", "train");
        ck_assert_uint_eq(after.peak_bytes_in_use, before.peak_bytes_in_use);
        ck_assert_uint_eq(after.bytes_reserved, before.bytes_reserved);
        ck_assert_uint_eq(after.num_sessions, 1);              /* it was not evicted */
        ck_assert_int_eq(raw_malloc(red, 0, 4096, &block), 0); /* and the device is not drained */
        session_end(raw);
        session_end(red);
}

/* ---- what it shows ------------------------------------------------------------ */

#define N_SESSIONS 40u

static uint64_t count_rows(struct raw *raw, Bfcd__List__Kind kind)
{
        uint64_t cursor = 0, n = 0;

        do {
                Bfcd__Reply *page;

                ck_assert_int_eq(raw_list(raw, kind, cursor, &page), 0);
                n += page->list->n_tenants + page->list->n_sessions + page->list->n_blocks +
                     page->list->n_partitions;
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        return n;
}

/* Pages for monitors end by time; none of the rows is lost or doubled by that. */
RIG_TEST(a_monitor_sees_all_tenants, two_tenants)
{
        struct raw *sessions[N_SESSIONS], *raw;
        Bfcd__Reply *page;
        Bfcd__Block block;

        for (unsigned i = 0; i < N_SESSIONS; i++) {
                sessions[i] = session_open(rig->socket, i % 2 ? "red" : "blue");
                ck_assert_int_eq(raw_malloc(sessions[i], 0, 4096, &block), 0);
        }
        raw = session_open(rig->monitor_socket, NULL);
        ck_assert_uint_eq(count_rows(raw, BFCD__LIST__KIND__TENANTS), 3);
        ck_assert_uint_eq(count_rows(raw, BFCD__LIST__KIND__PARTITIONS), 2);
        ck_assert_uint_eq(count_rows(raw, BFCD__LIST__KIND__BLOCKS), N_SESSIONS);
        /* With itself and the rig's own. */
        ck_assert_uint_eq(count_rows(raw, BFCD__LIST__KIND__SESSIONS), N_SESSIONS + 2);
        ck_assert_int_eq(raw_list(raw, BFCD__LIST__KIND__WHOAMI, 0, &page), 0);
        ck_assert(page->list->whoami->monitor && !page->list->whoami->admin);
        bfcd__reply__free_unpacked(page, NULL);
        for (unsigned i = 0; i < N_SESSIONS; i++)
                session_end(sessions[i]);
        session_end(raw);
}

/* ---- its places --------------------------------------------------------------- */

#define MONITORS_MAX_OF_USER 16u

static struct raw *try_session(const struct rig *rig)
{
        return raw_connect(rig->monitor_socket, NULL);
}

static bool comes_in(const struct rig *rig)
{
        struct raw *raw = try_session(rig);

        if (!raw)
                return false;
        session_end(raw);
        return true;
}

/* Also those of the rig count. */
TEST(admins_have_few_places)
{
        static const struct rig_config config = { 0 };
        enum { ADMINS = 64 };
        struct rig *rig = rig_start(&config);
        struct raw *raws[ADMINS];
        unsigned n = 0;

        while (n < ADMINS && (raws[n] = raw_connect(rig->admin_socket, NULL)))
                n++;
        ck_assert_uint_gt(n, ADMINS / 2);
        ck_assert(WAIT_FOR(rig_logged(rig, "connection refused: the admin socket has too many connections"),
                           SETTLE_MS));
        while (n > 0)
                session_end(raws[--n]);
        rig_stop(rig);
}

TEST(monitors_have_few_places)
{
        static const struct rig_config config = { 0 };
        struct rig *rig = rig_start(&config);
        struct raw *raws[MONITORS_MAX_OF_USER], *client;
        Bfcd__Block block;

        for (unsigned i = 0; i < MONITORS_MAX_OF_USER; i++)
                raws[i] = session_open(rig->monitor_socket, NULL);
        for (unsigned i = 0; i < 3; i++)
                ck_assert_ptr_null(try_session(rig));
        client = session_open(rig->socket, NULL); /* others are served */
        ck_assert_int_eq(raw_malloc(client, 0, 4096, &block), 0);
        session_end(client);
        client = session_open(rig->admin_socket, NULL);
        session_end(client);
        session_end(raws[0]);
        ck_assert(WAIT_FOR(comes_in(rig), SETTLE_MS)); /* its place is free again */
        for (unsigned i = 1; i < MONITORS_MAX_OF_USER; i++)
                session_end(raws[i]);
        ck_assert(rig_logged(rig, "too many connections to the monitor socket"));
        rig_stop(rig);
}

/* Without root all are of one user. */
struct user {
        const char *socket;
        struct gate is_there, may_go;
        bool is_displaced;
};

static void take_places(void *arg)
{
        struct user *u = arg;
        struct raw *raws[MONITORS_MAX_OF_USER];

        for (unsigned i = 0; i < MONITORS_MAX_OF_USER; i++) {
                raws[i] = raw_connect(u->socket, NULL);
                REQUIRE(raws[i], "a place of a monitor: %s", raw_refusal());
        }
        gate_meet(&u->is_there, &u->may_go);
        if (u->is_displaced)
                REQUIRE(raw_wait_hang_up(raws[0], SETTLE_MS) == 0, "the oldest connection was not closed");
        for (unsigned i = u->is_displaced; i < MONITORS_MAX_OF_USER; i++) {
                REQUIRE(raw_goodbye(raws[i]) == 0, "goodbye %u", i);
                raw_close(raws[i]);
        }
        if (u->is_displaced)
                raw_close(raws[0]);
}

/* They are four uids of one user, perhaps. */
TEST(four_users_cannot_take_all_places_of_monitors)
{
        enum { N_USERS = 4 };
        static const struct rig_config config = { .top = "monitor_socket: {mode: \"0666\"}\n" };
        struct user users[N_USERS];
        pid_t pids[N_USERS];
        struct rig *rig;

        if (!is_root()) {
                printf("# skipped: only root can become other users\n");
                return;
        }
        rig = rig_start(&config);
        for (unsigned i = 0; i < N_USERS; i++) {
                users[i] = (struct user){ .socket = rig->monitor_socket,
                                          .is_there = gate_new(),
                                          .may_go = gate_new(),
                                          .is_displaced = i == 0 };
                pids[i] = child_start_as(OTHER_UID + 10 + i, OTHER_UID, take_places, &users[i]);
                ck_assert(gate_wait(&users[i].is_there, SETTLE_MS));
        }
        session_end(session_open(rig->monitor_socket, NULL));
        ck_assert(rig_logged(rig, "the monitor socket has too many connections, and most of them belong to"));
        for (unsigned i = 0; i < N_USERS; i++) {
                gate_open(&users[i].may_go);
                child_join(pids[i]);
        }
        rig_stop(rig);
}

/* One that sends no hello holds its place for a time only. */
TEST(a_place_is_free_without_a_goodbye)
{
        static const struct rig_config config = { 0 };
        struct rig *rig = rig_start(&config);
        struct raw *raws[MONITORS_MAX_OF_USER];

        for (unsigned i = 0; i < MONITORS_MAX_OF_USER; i++)
                ck_assert_int_eq(raw_open(rig->monitor_socket, &raws[i]), 0);
        for (unsigned i = 0; i < MONITORS_MAX_OF_USER; i++)
                raw_close(raws[i]);
        ck_assert(WAIT_FOR(comes_in(rig), SETTLE_MS));
        rig_stop(rig);
}

/* ---- who may open it ------------------------------------------------------------ */

static void knock(void *arg)
{
        struct raw *raw = NULL;
        int r = raw_open(arg, &raw);

        REQUIRE(r == -EACCES, "connecting to the monitor socket: %d", r);
}

static void look(void *arg)
{
        struct raw *raw = raw_connect(arg, NULL);

        REQUIRE(raw, "a member of the group could not connect: %s", raw_refusal());
        REQUIRE(raw_goodbye(raw) == 0, "no goodbye");
        raw_close(raw);
}

TEST(only_its_group_can_open_it)
{
        struct rig_config config = { .top = "monitor_socket: {mode: \"0660\", group: @OTHER@}\n" };
        struct rig *rig;
        struct stat st;

        if (!is_root()) {
                printf("# skipped: only root can become other users\n");
                return;
        }
        rig = rig_start(&config);
        ck_assert_int_eq(stat(rig->monitor_socket, &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777, 0660);
        ck_assert_uint_eq(st.st_gid, OTHER_UID);
        child_join(child_start_as(ANOTHER_UID, OTHER_UID, look, rig->monitor_socket));
        child_join(child_start_as(ANOTHER_UID, ANOTHER_UID, knock, rig->monitor_socket));
        rig_stop(rig);
}

static void reload(void *arg)
{
        const struct rig *rig = arg;
        char *err;

        REQUIRE(setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1) == 0, "setenv");
        REQUIRE(ctl(rig->monitor_socket, WORDS("reload"), NULL, &err) == REFUSED, "a monitor reloaded");
        REQUIRE(strstr(err, "is the monitor socket. This user may not open "), "%s", err);
        REQUIRE(strstr(err, rig->admin_socket) && strstr(err, ": use sudo"), "%s", err);
        REQUIRE(!strstr(err, "group"), "%s", err); /* it is root */
        free(err);
}

TEST(a_monitor_is_told_what_it_lacks)
{
        struct rig_config config = { .top = "monitor_socket: {mode: \"0660\", group: @OTHER@}\n" };
        struct rig *rig;

        if (!others_may_run())
                return;
        rig = rig_start(&config);
        ck_assert_int_eq(chmod(rig->admin_socket, 0660), 0);
        child_join(child_start_as(ANOTHER_UID, OTHER_UID, reload, rig));
        rig_stop(rig);
}

/* ---- statistics ------------------------------------------------------------------ */

static uint64_t number_at(const json_t *row, const char *key)
{
        const json_t *value = json_object_get(row, key);

        ck_assert_msg(json_is_integer(value), "no %s", key);
        return (uint64_t)json_integer_value(value);
}

/* Grants of red in train that were served in this way. */
static uint64_t count_grants(const struct rig *rig, const char *served)
{
        json_t *rows = ctl_json(rig->monitor_socket, WORDS("--json", "grants")), *row;
        uint64_t n = 0;
        size_t i;

        json_array_foreach(rows, i, row)
        {
                uint64_t sum = 0;
                json_t *count;
                size_t k;

                ck_assert_uint_eq(json_array_size(json_object_get(row, "counts")),
                                  json_array_size(json_object_get(row, "bounds_ns")) + 1);
                json_array_foreach(json_object_get(row, "counts"), k, count) sum +=
                        (uint64_t)json_integer_value(count);
                ck_assert_uint_eq(sum, number_at(row, "num_grants"));
                if (strcmp(string_of(row, "served"), served) == 0 &&
                    strcmp(string_of(row, "tenant"), "red") == 0)
                        n += sum;
        }
        json_decref(rows);
        return n;
}

static uint64_t tenant_number(const struct rig *rig, const char *tenant, const char *key)
{
        json_t *rows = ctl_json(rig->monitor_socket, WORDS("--json", "tenants")), *row;
        uint64_t n = 0;
        size_t i;

        json_array_foreach(rows, i, row) if (strcmp(string_of(row, "tenant"), tenant) == 0 &&
                                             strcmp(string_of(row, "partition"), "train") == 0) n =
                number_at(row, key);
        json_decref(rows);
        return n;
}

RIG_TEST(grants_and_waiting_requests, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red"), *other = session_open(rig->socket, "red");
        Bfcd__Block first, small, block;
        Bfcd__Reply *reply;

        ck_assert_int_eq(raw_malloc(red, 0, 60 * MIB, &first), 0); /* the device makes it */
        ck_assert_int_eq(raw_malloc(red, 0, 4096, &small), 0);
        ck_assert_int_eq(raw_free(red, small.block_id), 0);
        ck_assert_int_eq(raw_malloc(red, 0, 4096, &small), 0); /* there is backed space */
        ck_assert_uint_ge(count_grants(rig, "grown"), 1);
        ck_assert_uint_ge(count_grants(rig, "backed"), 1);
        ck_assert_uint_eq(count_grants(rig, "waited"), 0);
        ck_assert_uint_eq(tenant_number(rig, "red", "num_waiting"), 0);
        (void)session_send_malloc(other, 40 * MIB, 600000);
        ck_assert(WAIT_FOR(tenant_number(rig, "red", "num_waiting") == 1, SETTLE_MS));
        ck_assert_uint_eq(tenant_number(rig, "red", "bytes_waiting"), 40 * MIB);
        ck_assert_uint_eq(tenant_number(rig, "blue", "bytes_waiting"), 0);
        ck_assert_int_eq(raw_free(red, first.block_id), 0);
        ck_assert_int_eq(raw_receive(other, RAW_TIMEOUT_MS, &reply), 0);
        ck_assert_int_eq((int)reply->body_case, BFCD__REPLY__BODY_BLOCK);
        block = *reply->block;
        bfcd__reply__free_unpacked(reply, NULL);
        ck_assert_uint_eq(count_grants(rig, "waited") + count_grants(rig, "reclaimed"), 1);
        ck_assert_uint_eq(tenant_number(rig, "red", "num_waiting"), 0);
        ck_assert_uint_eq(tenant_number(rig, "red", "bytes_waiting"), 0);
        ck_assert_int_eq(raw_free(other, block.block_id), 0);
        session_end(other);
        session_end(red);
}

/* The rows of a list of waiting requests: of this tenant, in the order of its queue. */
static size_t check_waiting(const char *socket, const char *tenant, uint64_t n_bytes)
{
        json_t *rows = ctl_json(socket, WORDS("--json", "waiting")), *row;
        size_t i, n = 0;

        json_array_foreach(rows, i, row)
        {
                if (strcmp(string_of(row, "tenant"), tenant) != 0)
                        continue;
                ck_assert_str_eq(string_of(row, "partition"), "train");
                ck_assert_uint_eq(number_at(row, "position"), ++n);
                ck_assert_uint_eq(number_at(row, "n_bytes"), n_bytes);
                ck_assert_uint_eq(number_at(row, "wait_ms"), 600000);
                ck_assert_uint_gt(number_at(row, "left_ms"), 0);
                ck_assert_int_eq(json_is_null(json_object_get(row, "partition_position")), n > 1);
        }
        json_decref(rows);
        return n;
}

static size_t count_waiting(const char *socket)
{
        json_t *rows = ctl_json(socket, WORDS("--json", "waiting"));
        size_t n = json_array_size(rows);

        json_decref(rows);
        return n;
}

static bool is_known(const struct rig *rig, const char *key)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "waiting"));
        bool ret = json_is_integer(json_object_get(json_array_get(rows, 0), key));

        json_decref(rows);
        return ret;
}

/* More waiting requests than a page has; each viewer sees what it may see. */
RIG_TEST(waiting_requests, two_tenants)
{
        enum { N = 4, EACH = 50 };
        struct raw *red = session_open(rig->socket, "red"), *blue = session_open(rig->socket, "blue");
        struct raw *waiters[N];
        Bfcd__Block block, second;
        char *text;

        ck_assert_uint_eq(count_waiting(rig->admin_socket), 0);
        ck_assert_int_eq(raw_malloc(red, 0, 32 * MIB, &block), 0);
        ck_assert_int_eq(raw_malloc(red, 0, 28 * MIB, &second), 0);
        for (unsigned i = 0; i < N; i++) {
                waiters[i] = session_open(rig->socket, "red");
                for (unsigned k = 0; k < EACH; k++)
                        (void)session_send_malloc(waiters[i], 40 * MIB, 600000);
        }
        (void)session_send_malloc(blue, 60 * MIB, 600000);
        ck_assert(WAIT_FOR(count_waiting(rig->admin_socket) == N * EACH + 1, SETTLE_MS));
        ck_assert_uint_eq(check_waiting(rig->admin_socket, "red", 40 * MIB), N * EACH);
        ck_assert_uint_eq(check_waiting(rig->monitor_socket, "blue", 60 * MIB), 1);
        ck_assert_uint_eq(check_waiting(rig->monitor_socket, "red", 40 * MIB), N * EACH);
        setenv("BFC_TENANT", "red", 1);
        ck_assert_uint_eq(check_waiting(rig->socket, "red", 40 * MIB), N * EACH);
        ck_assert_uint_eq(count_waiting(rig->socket), N * EACH);
        unsetenv("BFC_TENANT");

        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("waiting"), &text, NULL), 0);
        ck_assert_msg(strstr(text, "PARTITION  TENANT  POS  SESSION       ASKED       LACKS"), "%s", text);
        text_has(text, "60.0 MiB");

        /* What ended sessions returned makes an estimate possible. */
        ck_assert(WAIT_FOR(is_known(rig, "bytes_lacking"), SETTLE_MS));
        ck_assert(!is_known(rig, "estimate_ms"));
        session_end(blue);
        for (unsigned i = 0; i < N; i++)
                session_end(waiters[i]);
        ck_assert(WAIT_FOR(count_waiting(rig->admin_socket) == 0, SETTLE_MS));
        ck_assert_int_eq(raw_free(red, block.block_id), 0);
        ck_assert_int_eq(raw_free(red, second.block_id), 0);
        session_end(red);
        ck_assert(WAIT_FOR(tenant_number(rig, "red", "bytes_reserved") == 0, SETTLE_MS));
        blue = session_open(rig->socket, "blue");
        red = session_open(rig->socket, "red");
        ck_assert_int_eq(raw_malloc(red, 0, 60 * MIB, &block), 0);
        (void)session_send_malloc(blue, 60 * MIB, 600000);
        ck_assert(WAIT_FOR(count_waiting(rig->admin_socket) == 1 && is_known(rig, "estimate_ms"), SETTLE_MS));
        session_end(blue);
        session_end(red);
}

RIG_TEST(device_calls_and_turns, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        json_t *status, *device, *makes;
        Bfcd__Reply *page;
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(red, 0, 60 * MIB, &block), 0);
        status = ctl_json(rig->monitor_socket, WORDS("--json", "status"));
        device = json_array_get(json_object_get(status, "devices"), 0);
        makes = json_object_get(device, "makes");
        ck_assert_uint_ge(number_at(makes, "num_calls"), 1);
        ck_assert_uint_eq(number_at(makes, "num_failed"), 0);
        ck_assert_uint_gt(number_at(makes, "total_ns"), 0);
        ck_assert_uint_le(number_at(makes, "longest_ns"), number_at(makes, "total_ns"));
        ck_assert_uint_gt(number_at(status, "longest_turn_ns"), 0);
        ck_assert_uint_le(number_at(status, "recent_longest_turn_ns"), number_at(status, "longest_turn_ns"));
        ck_assert_uint_eq(number_at(status, "num_log_lines_lost"), 0);
        json_decref(status);
        /* A tenant is not told what others do to the device. */
        ck_assert_int_eq(raw_list(red, BFCD__LIST__KIND__STATUS, 0, &page), 0);
        ck_assert_ptr_null(page->list->status->devices[0]->makes);
        ck_assert_uint_eq(page->list->status->longest_turn_ns, 0);
        bfcd__reply__free_unpacked(page, NULL);
        ck_assert_int_eq(raw_free(red, block.block_id), 0);
        session_end(red);
}

static uint64_t partition_bytes_in_use(struct raw *raw)
{
        Bfcd__Reply *page;
        uint64_t n;

        ck_assert_int_eq(raw_list(raw, BFCD__LIST__KIND__PARTITIONS, 0, &page), 0);
        ck_assert_uint_eq(page->list->n_partitions, 1);
        n = page->list->partitions[0]->stats->bytes_in_use;
        bfcd__reply__free_unpacked(page, NULL);
        return n;
}

#define N_TENANTS 300u

/* Sums over many tenants are kept for a moment, and long lists have several pages; both are complete. */
TEST(many_tenants)
{
        struct rig_config config = { 0 };
        struct raw *red, *raw;
        struct rig *rig;
        char *tenants;
        size_t n_bytes;
        FILE *out = open_memstream(&tenants, &n_bytes);
        Bfcd__Statistics stats;
        Bfcd__Block block;

        for (unsigned i = 0; i < N_TENANTS; i++)
                fprintf(out, TENANT("t%u", "%u", "train, limit: 64MiB, max_blocks: 1000"), i, 100000 + i);
        fputs(TENANT("red", "@UID@", "train, limit: 64MiB"), out);
        fclose(out);
        config.tenants = tenants;
        rig = rig_start(&config);
        red = session_open(rig->socket, "red");
        raw = session_open(rig->monitor_socket, NULL);
        ck_assert_uint_eq(partition_bytes_in_use(raw), 0);
        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert(WAIT_FOR(partition_bytes_in_use(raw) == 3 * MIB, SETTLE_MS));
        ck_assert_uint_eq(partition_bytes_in_use(rig->admin), 3 * MIB); /* never an old one */
        ck_assert_uint_eq(count_rows(raw, BFCD__LIST__KIND__TENANTS), N_TENANTS + 1);
        ck_assert_uint_ge(count_grants(rig, "grown"), 1); /* the last of all tenants */
        ck_assert(raw_stats(raw, "red", "train", &stats));
        ck_assert_uint_eq(stats.bytes_in_use, 3 * MIB);
        session_end(raw);
        session_end(red);
        rig_stop(rig);
        free(tenants);
}

/* ---- metrics ---------------------------------------------------------------------- */

/* Runs promtool on a text. */
static int promtool(const char *text, char **ret_said)
{
        char path[] = "/tmp/bfcd-metrics-XXXXXX", command[128];
        int fd = mkstemp(path), status;

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
        close(fd);
        snprintf(command, sizeof(command), "promtool check metrics <%s 2>&1", path);
        status = program_run(WORDS("/bin/sh", "-c", command), ret_said, NULL);
        unlink(path);
        return status;
}

RIG_TEST(promtool_accepts_metrics, two_tenants)
{
        struct raw *red = session_open(rig->socket, "red");
        Bfcd__Block block;
        char *text, *said;
        int status;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("metrics"), &text, NULL), 0);
        ck_assert_ptr_nonnull(strstr(text, "partition=\"train\",tenant=\"red\"} 3145728\n"));
        ck_assert_int_eq(text[strlen(text) - 1], '\n');
        status = program_run(WORDS("/bin/sh", "-c", "command -v promtool"), NULL, NULL);
        if (status != 0) {
                printf("# skipped: promtool is not installed\n");
        } else {
                status = promtool(text, &said);
                ck_assert_msg(status == 0 && !*said, "promtool: status %d: %s", status, said);
                free(said);
                /* It finds faults. */
                status = promtool("# TYPE a_total gauge\na_total 1\n", &said);
                ck_assert_int_ne(status, 0);
                free(said);
        }
        free(text);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("metrics", "--openmetrics"), &text, NULL), 0);
        ck_assert_ptr_nonnull(strstr(text, "\n# EOF\n"));
        free(text);
        session_end(red);
}

/* ---- bfcctl --------------------------------------------------------------------- */

RIG_TEST(bfcctl_by_the_monitor_socket, two_tenants)
{
        static const char *const shows[] = { "status", "partitions", "tenants", "sessions", "blocks",
                                             "shared", "whoami",     "explain", "leaks",    "config",
                                             "grants", "metrics",    "keep",    "waiting" };
        static const char *const changes[][4] = {
                { "reload" },      { "reset-peaks" },       { "trim" }, { "evict", "1" }, { "drain", "x" },
                { "resume", "x" }, { "forget", "red", "x" }
        };
        char *err;

        for (size_t i = 0; i < sizeof(shows) / sizeof(shows[0]); i++)
                ck_assert_msg(ctl(rig->monitor_socket, WORDS(shows[i]), NULL, NULL) == 0, "%s", shows[i]);
        for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
                ck_assert_int_eq(ctl(rig->monitor_socket, changes[i], NULL, &err), REFUSED);
                ck_assert_ptr_nonnull(strstr(err, "is the monitor socket"));
                free(err);
        }
}
