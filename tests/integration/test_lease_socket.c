/* The lease socket: a scheduler makes leases for control groups, changes and ends only those, and has no other right.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB")
                TENANT_OF("blue", "@UID@",
                          "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB, reserve: 4MiB}"),
};

/* ---- requests about leases ---------------------------------------------------- */

static Bfcd__LeaseCreate lease_of(const char *name, const char *tenant, const char *cgroup)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;

        m.name = (char *)(uintptr_t)name;
        m.tenant = (char *)(uintptr_t)tenant;
        m.partition = (char *)(uintptr_t) "train";
        m.bytes_limit = 4 * MIB;
        m.match_case = BFCD__LEASE_CREATE__MATCH_CGROUP;
        m.cgroup = (char *)(uintptr_t)cgroup;
        return m;
}

static int create(struct raw *raw, Bfcd__LeaseCreate *m)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;

        r.body_case = BFCD__REQUEST__BODY_LEASE_CREATE;
        r.lease_create = m;
        return raw_do(raw, &r);
}

static int make(struct raw *raw, const char *name, const char *tenant, const char *cgroup)
{
        Bfcd__LeaseCreate m = lease_of(name, tenant, cgroup);

        return create(raw, &m);
}

static int change(struct raw *raw, const char *name, Bfcd__LeaseSet *m)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;

        m->name = (char *)(uintptr_t)name;
        r.body_case = BFCD__REQUEST__BODY_LEASE_SET;
        r.lease_set = m;
        return raw_do(raw, &r);
}

static int set(struct raw *raw, const char *name, uint64_t bytes_limit)
{
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;

        m.bytes_limit = bytes_limit;
        return change(raw, name, &m);
}

static int end(struct raw *raw, const char *name)
{
        Bfcd__LeaseEnd m = BFCD__LEASE_END__INIT;
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        int result;

        m.name = (char *)(uintptr_t)name;
        r.body_case = BFCD__REQUEST__BODY_LEASE_END;
        r.lease_end = &m;
        ck_assert_int_eq(raw_call(raw, &r, &reply), 0);
        result = reply->body_case == BFCD__REPLY__BODY_LEASE_END ? 0 : -(int)reply->refusal->error;
        bfcd__reply__free_unpacked(reply, NULL);
        return result;
}

/* Whether the list has the lease, of this maker. */
static bool has(struct raw *raw, const char *name, const char *made_by)
{
        Bfcd__Reply *page;
        bool found = false;
        uint64_t cursor = 0;

        do {
                ck_assert_int_eq(raw_list(raw, BFCD__LIST__KIND__LEASES, cursor, &page), 0);
                for (size_t i = 0; i < page->list->n_leases; i++)
                        found = found || (strcmp(page->list->leases[i]->name, name) == 0 &&
                                          strcmp(page->list->leases[i]->made_by, made_by) == 0);
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        return found;
}

/* ---- what it is for ------------------------------------------------------------ */

RIG_TEST(a_scheduler_makes_changes_and_ends_leases, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);

        ck_assert_int_eq(make(raw, "job-1", "red", "/jobs/1"), 0);
        ck_assert_int_eq(make(raw, "job-2", "blue", "/jobs/2"), 0);
        ck_assert(has(raw, "job-1", "scheduler") && has(raw, "job-2", "scheduler"));
        ck_assert_int_eq(make(raw, "job-1", "red", "/jobs/1"), -EEXIST);
        ck_assert_int_eq(set(raw, "job-1", 8 * MIB), 0);
        ck_assert_int_eq(end(raw, "job-1"), 0);
        ck_assert(!has(raw, "job-1", "scheduler"));
        ck_assert_int_eq(end(raw, "job-1"), -ENOENT);
        session_end(raw);

        raw = session_open(rig->lease_socket, NULL); /* leases do not end with the session */
        ck_assert_int_eq(end(raw, "job-2"), 0);
        session_end(raw);
}

TEST(its_leases_survive_the_daemon)
{
        struct kept *k = kept_start(&two_tenants);
        struct raw *raw = session_open(k->rig->lease_socket, NULL);

        ck_assert_int_eq(make(raw, "job", "red", "/jobs/1"), 0);
        ck_assert_int_eq(make(k->rig->admin, "theirs", "red", "/jobs/2"), 0);
        kept_restart(k, SIGKILL);
        (void)raw_close(raw);
        raw = session_open(k->rig->lease_socket, NULL);
        ck_assert(has(raw, "job", "scheduler") && has(raw, "theirs", "operator"));
        ck_assert_int_eq(end(raw, "theirs"), -ENOENT);
        ck_assert_int_eq(end(raw, "job"), 0);
        ck_assert_int_eq(end(k->rig->admin, "theirs"), 0);
        session_end(raw);
        kept_stop(k);
}

/* All processes of the test are below the root of the control groups. */
RIG_TEST(its_lease_limits_the_processes_of_the_control_group, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL), *client;
        Bfcd__Block block;

        ck_assert_int_eq(make(raw, "job", "red", "/"), 0);
        client = session_open(rig->socket, "red");
        ck_assert_int_eq(raw_malloc(client, 0, 2 * MIB, &block), 0);
        ck_assert_int_eq(raw_malloc(client, 0, 8 * MIB, &block), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "lease 'job'"));
        session_end(client);
        ck_assert_int_eq(end(raw, "job"), 0);
        session_end(raw);
}

RIG_TEST(it_does_not_touch_leases_of_operators, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);

        ck_assert_int_eq(make(rig->admin, "theirs", "red", "/jobs/1"), 0);
        ck_assert_int_eq(end(raw, "theirs"), -ENOENT);
        ck_assert_int_eq(set(raw, "theirs", 8 * MIB), -ENOENT);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "operators change all leases"));
        ck_assert_int_eq(make(raw, "theirs", "red", "/jobs/1"), -EEXIST);
        ck_assert(has(raw, "theirs", "operator"));

        ck_assert_int_eq(make(raw, "ours", "red", "/jobs/2"), 0);
        ck_assert_int_eq(set(rig->admin, "ours", 8 * MIB), 0); /* an operator may do all */
        ck_assert_int_eq(end(rig->admin, "ours"), 0);
        ck_assert_int_eq(end(rig->admin, "theirs"), 0);
        session_end(raw);
}

/* A new session gets so much, and no more, by this lease. */
static void limited_by(struct rig *rig, uint64_t n_bytes, const char *lease)
{
        struct raw *client = session_open(rig->socket, "red");
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(client, 0, n_bytes + 2 * MIB, &block), -EDQUOT);
        ck_assert_msg(strstr(raw_refusal(), lease), "%s", raw_refusal());
        session_end(client);
}

RIG_TEST(its_lease_lifts_no_limit_of_an_operator, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);
        Bfcd__LeaseCreate m = lease_of("wide", "red", "/");

        ck_assert_int_eq(make(rig->admin, "narrow", "red", "/"), 0);
        m.bytes_limit = 64 * MIB;
        ck_assert_int_eq(create(raw, &m), 0);
        limited_by(rig, 4 * MIB, "lease 'narrow'");
        ck_assert_int_eq(end(raw, "wide"), 0);
        m.match_case = BFCD__LEASE_CREATE__MATCH_PID;
        m.pid = (uint64_t)getpid();
        ck_assert_int_eq(create(raw, &m), 0);
        limited_by(rig, 4 * MIB, "lease 'narrow'");
        ck_assert_int_eq(end(rig->admin, "narrow"), 0);
        ck_assert_int_eq(set(raw, "wide", 8 * MIB), 0);
        limited_by(rig, 8 * MIB, "lease 'wide'");
        ck_assert_int_eq(end(raw, "wide"), 0);
        session_end(raw);
}

/* ---- what it refuses ----------------------------------------------------------- */

static bool is_served(Bfcd__Request__BodyCase body)
{
        return body == BFCD__REQUEST__BODY_LIST || body == BFCD__REQUEST__BODY_LEASE_CREATE ||
               body == BFCD__REQUEST__BODY_LEASE_SET || body == BFCD__REQUEST__BODY_LEASE_END;
}

/* They end the session or have no reply. */
static bool is_left_out(Bfcd__Request__BodyCase body)
{
        return body == BFCD__REQUEST__BODY_HELLO || body == BFCD__REQUEST__BODY_GOODBYE ||
               body == BFCD__REQUEST__BODY_ACK || body == BFCD__REQUEST__BODY_CANCEL;
}

/* An empty request of this kind; each must be refused, also one that is added to the protocol later. */
static int try_request(struct raw *raw, const ProtobufCFieldDescriptor *kind)
{
        const ProtobufCMessageDescriptor *type = kind->descriptor;
        ProtobufCMessage *body = calloc(1, type->sizeof_message);
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        ck_assert_ptr_nonnull(body);
        protobuf_c_message_init(type, body);
        request.body_case = (Bfcd__Request__BodyCase)kind->id;
        *(ProtobufCMessage **)(void *)((char *)&request + kind->offset) = body;
        ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
        free(body);
        r = reply->body_case == BFCD__REPLY__BODY_REFUSAL ? -(int)reply->refusal->error : 0;
        if (r == -EACCES)
                ck_assert_ptr_nonnull(strstr(reply->refusal->message, "lease socket"));
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

RIG_TEST(a_scheduler_has_no_other_right, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);
        const ProtobufCMessageDescriptor *requests = &bfcd__request__descriptor;
        unsigned n_refused = 0;

        for (unsigned i = 0; i < requests->n_fields; i++) {
                const ProtobufCFieldDescriptor *kind = &requests->fields[i];
                Bfcd__Request__BodyCase body = (Bfcd__Request__BodyCase)kind->id;

                if (kind->type != PROTOBUF_C_TYPE_MESSAGE || is_left_out(body))
                        continue;
                ck_assert_msg((try_request(raw, kind) == -EACCES) == !is_served(body), "%s", kind->name);
                n_refused += !is_served(body);
        }
        ck_assert_uint_ge(n_refused, 20);
        session_end(raw);
}

RIG_TEST(a_scheduler_sees_leases_and_where_they_have_room, two_tenants)
{
        const ProtobufCEnumDescriptor *kinds = &bfcd__list__kind__descriptor;
        struct raw *raw = session_open(rig->lease_socket, NULL);
        unsigned n_shown = 0;
        Bfcd__Reply *page;

        for (unsigned i = 0; i < kinds->n_values; i++) {
                Bfcd__List__Kind kind = (Bfcd__List__Kind)kinds->values[i].value;
                bool is_shown = kind == BFCD__LIST__KIND__STATUS || kind == BFCD__LIST__KIND__PARTITIONS ||
                                kind == BFCD__LIST__KIND__TENANTS || kind == BFCD__LIST__KIND__LEASES ||
                                kind == BFCD__LIST__KIND__WHOAMI;
                int r = raw_list(raw, kind, 0, &page);

                ck_assert_msg(r == (is_shown ? 0 : -EACCES), "%s: %d", kinds->values[i].name, r);
                if (r < 0)
                        continue;
                n_shown += is_shown;
                if (kind == BFCD__LIST__KIND__TENANTS)
                        ck_assert_uint_ge(page->list->n_tenants, 1); /* quotas, without a session */
                if (kind == BFCD__LIST__KIND__WHOAMI)
                        ck_assert(page->list->whoami->scheduler && !page->list->whoami->admin &&
                                  !page->list->whoami->monitor);
                bfcd__reply__free_unpacked(page, NULL);
        }
        ck_assert_uint_eq(n_shown, 5);
        session_end(raw);
}

/* ---- how much ------------------------------------------------------------------ */

static int set_reserve(struct raw *raw, const char *name, uint64_t bytes_reserve)
{
        Bfcd__LeaseSet m = BFCD__LEASE_SET__INIT;

        m.sets_reserve = true;
        m.bytes_reserve = bytes_reserve;
        return change(raw, name, &m);
}

/* The rest of the partition stays for others. */
RIG_TEST(it_guarantees_what_the_tenant_has_guaranteed, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);
        Bfcd__LeaseCreate m = lease_of("job", "red", "/jobs/1");

        m.bytes_reserve = 2 * MIB;
        ck_assert_int_eq(create(raw, &m), -EACCES);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "a scheduler guarantees only what is guaranteed to the "
                                                    "tenant: of the reserve of tenant 'red'"));
        ck_assert_int_eq(create(rig->admin, &m), 0);
        m = lease_of("job-2", "blue", "/jobs/1");
        m.partition = (char *)(uintptr_t) "serve";
        m.bytes_reserve = 2 * MIB;
        ck_assert_int_eq(create(raw, &m), 0);
        m.name = (char *)(uintptr_t) "job-3";
        ck_assert_int_eq(create(raw, &m), 0);
        ck_assert_int_eq(set_reserve(raw, "job-3", 4 * MIB), -EACCES);
        ck_assert_int_eq(set_reserve(raw, "job-3", 0), 0);
        ck_assert_int_eq(set_reserve(raw, "job-2", 4 * MIB), 0);
        session_end(raw);
}

/* ---- bfcctl --------------------------------------------------------------------- */

enum { REFUSED = 1 };

static void lease_ctl_refuses(struct rig *rig, const char *const *words, const char *part)
{
        char *err;

        ck_assert_int_eq(ctl(rig->lease_socket, words, NULL, &err), REFUSED);
        ck_assert_msg(strstr(err, part), "%s", err);
        free(err);
}

RIG_TEST(bfcctl_by_the_lease_socket, two_tenants)
{
        json_t *rows;
        char *err;

        ck_assert_int_eq(ctl(rig->lease_socket,
                             WORDS("lease", "create", "job", "--tenant", "red", "--partition", "train",
                                   "--limit", "4MiB", "--cgroup", "/jobs/1"),
                             NULL, NULL),
                         0);
        ck_assert_int_eq(ctl(rig->lease_socket, WORDS("lease", "set", "job", "--limit", "8MiB"), NULL, NULL),
                         0);
        ck_assert_int_eq(ctl(rig->lease_socket, WORDS("lease", "list"), NULL, NULL), 0);
        ck_assert_int_eq(ctl(rig->lease_socket, WORDS("lease", "end", "job"), NULL, NULL), 0);
        ck_assert_int_ne(ctl(rig->lease_socket,
                             WORDS("lease", "create", "job", "--partition", "train", "--limit", "4MiB",
                                   "--cgroup", "/jobs/1"),
                             NULL, &err),
                         0);
        ck_assert_msg(strstr(err, "--tenant, --partition and --limit are needed"), "%s", err);
        free(err);
        lease_ctl_refuses(rig, WORDS("trim"), "is the lease socket");
        lease_ctl_refuses(rig, WORDS("config"), "is the lease socket");
        lease_ctl_refuses(rig, WORDS("sessions"), "the lease socket is only for leases");
        rows = ctl_json(rig->lease_socket, WORDS("--json", "whoami"));
        ck_assert(json_is_true(json_object_get(rows, "scheduler")));
        ck_assert(json_is_false(json_object_get(rows, "admin")));
        json_decref(rows);
}

/* ---- hostile requests ----------------------------------------------------------- */

RIG_TEST(a_bad_lease_is_refused_whole, two_tenants)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);
        Bfcd__LeaseCreate m;

        static const struct {
                const char *name, *tenant, *cgroup;
                int error;
        } cases[] = {
                { "", "red", "/a", -EINVAL },         { "a/b", "red", "/a", -EINVAL },
                { "u0:job", "red", "/a", -EINVAL },   { "job::1", "red", "/a", -EINVAL },
                { "job", "", "/a", -ENOENT },         { "job", "green", "/a", -ENOENT },
                { "job", "red", "", -EINVAL },        { "job", "red", "a", -EINVAL },
                { "job", "red", "/a/../b", -EINVAL }, { "job", "red", "/a\nb", -EINVAL },
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
                ck_assert_msg(make(raw, cases[i].name, cases[i].tenant, cases[i].cgroup) == cases[i].error,
                              "case %zu: %s", i, raw_refusal());
        m = lease_of("job", "red", "/a");
        m.partition = (char *)(uintptr_t) "serve"; /* red has no quota there */
        ck_assert_int_eq(create(raw, &m), -ENOENT);
        m.partition = (char *)(uintptr_t) "train";
        m.bytes_limit = 128 * MIB;
        ck_assert_int_eq(create(raw, &m), -EINVAL);
        m.bytes_limit = UINT64_MAX;
        ck_assert_int_eq(create(raw, &m), -EINVAL);
        m = lease_of("job", "blue", "/a");
        m.partition = (char *)(uintptr_t) "serve";
        m.bytes_limit = 2 * MIB;
        m.bytes_reserve = 4 * MIB;
        ck_assert_int_eq(create(raw, &m), -EINVAL);
        m.bytes_reserve = 0;
        m.ttl_ms = UINT64_MAX;
        ck_assert_int_eq(create(raw, &m), -EINVAL);
        m.ttl_ms = 0;
        m.match_case = BFCD__LEASE_CREATE__MATCH__NOT_SET;
        ck_assert_int_eq(create(raw, &m), -EINVAL);
        ck_assert(!has(raw, "job", "scheduler"));
        session_end(raw);
}

/* Its connections are few, and others are served meanwhile. */
RIG_TEST(schedulers_have_few_places, two_tenants)
{
        enum { MAX_OF_USER = 16 };
        struct raw *raws[MAX_OF_USER], *client;
        Bfcd__Block block;

        for (unsigned i = 0; i < MAX_OF_USER; i++)
                raws[i] = session_open(rig->lease_socket, NULL);
        ck_assert_ptr_null(raw_connect(rig->lease_socket, NULL));
        ck_assert(WAIT_FOR(rig_logged(rig, "the user has too many connections to the lease socket"),
                           SETTLE_MS));
        client = session_open(rig->monitor_socket, NULL);
        session_end(client);
        client = session_open(rig->socket, "red");
        ck_assert_int_eq(raw_malloc(client, 0, 4096, &block), 0);
        session_end(client);
        for (unsigned i = 0; i < MAX_OF_USER; i++)
                session_end(raws[i]);
}

static unsigned count_lines(const struct rig *rig, const char *words)
{
        FILE *f = fopen(rig->log_path, "r");
        char *line = NULL;
        unsigned n = 0;
        size_t size = 0;

        ck_assert_ptr_nonnull(f);
        while (getline(&line, &size, f) >= 0)
                n += strstr(line, words) != NULL;
        free(line);
        fclose(f);
        return n;
}

RIG_TEST(its_leases_do_not_fill_the_log, two_tenants)
{
        enum { N = 200 };
        struct raw *raw = session_open(rig->lease_socket, NULL);

        for (unsigned i = 0; i < N; i++) {
                ck_assert_int_eq(make(raw, "job", "red", "/jobs/1"), 0);
                ck_assert_int_eq(end(raw, "job"), 0);
        }
        session_end(raw);
        ck_assert_uint_le(count_lines(rig, "lease 'job' made"), N / 2);
        ck_assert_uint_le(count_lines(rig, "' ends: requested"), N / 2);
}

/* ---- the socket ---------------------------------------------------------------- */

static const struct rig_config of_group = { .lease_keys = ", mode: \"0660\", group: @GID@" };
static const struct rig_config no_socket = { .has_no_lease_socket = true };

static bool config_says(struct rig *rig, const char *part)
{
        char *text = ctl_text(rig, WORDS("config"));
        bool says = strstr(text, part) != NULL;

        free(text);
        return says;
}

static unsigned mode_of(const struct rig *rig)
{
        struct stat st;

        ck_assert_int_eq(stat(rig->lease_socket, &st), 0);
        ck_assert_uint_eq(st.st_gid, getgid());
        return st.st_mode & 07777;
}

RIG_TEST(only_the_daemons_user_opens_it, two_tenants)
{
        ck_assert_uint_eq(mode_of(rig), 0600);
        ck_assert(config_says(rig, rig->lease_socket));
}

RIG_TEST(its_mode_and_group_are_those_of_the_config, of_group)
{
        char *text = ctl_text(rig, WORDS("config")), *at = strstr(text, "lease_socket:"), group[32];

        ck_assert_uint_eq(mode_of(rig), 0660);
        snprintf(group, sizeof(group), "group: %u", (unsigned)getgid());
        ck_assert_msg(at && strstr(at, rig->lease_socket) && strstr(at, "0660") && strstr(at, group), "%s",
                      text);
        free(text);
}

RIG_TEST(there_is_none_without_the_key, no_socket)
{
        ck_assert_int_lt(access(rig->lease_socket, F_OK), 0);
        ck_assert(!config_says(rig, "lease_socket"));
}
