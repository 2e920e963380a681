/* Identity: tenants by peer credentials, what each may see, and how many may
 * come. Tests of other users need root and say so where they are left out.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "tests/fd_message.h"
#include "tests/integration/tools.h"

#define SOME_GID  4343u
#define OTHER_GID 4344u

/* red and blue both match this user, white does not. */
static const struct rig_config several = {
        .partitions = "      - {name: train, limit: 128MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT("white", "@OTHER@", "train, limit: 16MiB")
                TENANT("red", "@ANOTHER@, @UID@", "train, limit: 32MiB")
                        TENANT_OF("blue", "@UID@",
                                  "{partition: serve, limit: 16MiB}, {partition: train, limit: 16MiB}"),
};

/* ---- which tenant --------------------------------------------------------- */

RIG_TEST(the_first_match_or_the_chosen_one, several)
{
        bfc_client *client = client_open(rig, NULL, NULL);

        ck_assert_str_eq(bfc_tenant(client), "red");
        bfc_disconnect(client);
        client = client_open(rig, "blue", NULL);
        ck_assert_str_eq(bfc_tenant(client), "blue");
        ck_assert_str_eq(bfc_partition(client), "serve");
        bfc_disconnect(client);
        setenv("BFC_TENANT", "blue", 1);
        client = client_open(rig, NULL, "train");
        ck_assert_str_eq(bfc_tenant(client), "blue");
        ck_assert_str_eq(bfc_partition(client), "train");
        bfc_disconnect(client);
}

/* The control group that counts, as a test may read it; "" if there is none. */
static void own_cgroup(char *ret, size_t n_ret)
{
        char *text = file_text("/proc/self/cgroup");
        const char *line = text ? strstr(text, ":name=systemd:") : NULL;
        const char *path = line ? line + strlen(":name=systemd:") : NULL;

        if (!path && text && (strncmp(text, "0::", 3) == 0 || strstr(text, "\n0::")))
                path = strstr(text, "0::") + 3;
        snprintf(ret, n_ret, "%.*s", path ? (int)strcspn(path, "\n") : 0, path ? path : "");
        free(text);
}

/* Where this process runs narrows, however well the user matches. */
TEST(control_groups_restrict_matches)
{
        char cgroup[1024], tenants[4096];
        const struct rig_config config = { .tenants = tenants };
        struct rig *rig;
        bfc_client *client;

        own_cgroup(cgroup, sizeof(cgroup));
        if (cgroup[0] == '\0') {
                printf("# skipped: no control group counts here\n");
                return;
        }
        snprintf(
                tenants, sizeof(tenants),
                "  - {name: else, match: {uid: @UID@, cgroup: /no/such/*}, quotas: [{partition: train}]}\n"
                "  - {name: unit, match: {uid: @UID@, unit: no-such.service}, quotas: [{partition: train}]}\n"
                "  - {name: other, match: {uid: @OTHER@, cgroup: \"%s\"}, quotas: [{partition: train}]}\n"
                "  - {name: here, match: {cgroup: \"%s\"}, quotas: [{partition: train}]}\n",
                cgroup, cgroup);
        rig = rig_start(&config);
        client = client_open(rig, NULL, NULL);
        ck_assert_str_eq(bfc_tenant(client), "here");
        bfc_disconnect(client);
        ck_assert_int_eq(client_refused(rig, "else", NULL), -EACCES);
        ck_assert_msg(strstr(bfc_last_error(), "in cgroup"), "%s", bfc_last_error());
        ck_assert_int_eq(client_refused(rig, "unit", NULL), -EACCES);
        ck_assert_int_eq(client_refused(rig, "other", NULL), -EACCES);
        rig_stop(rig);
}

RIG_TEST(a_tenant_that_does_not_match_is_refused, several)
{
        ck_assert_int_eq(client_refused(rig, "white", NULL), -EACCES);
        ck_assert_msg(strstr(bfc_last_error(), "white"), "the sentence: %s", bfc_last_error());
        ck_assert_int_eq(client_refused(rig, "nobody", NULL), -EACCES);
        ck_assert_int_eq(client_refused(rig, "red", "serve"), -ENOENT); /* no quota there */
}

struct connector {
        const char *socket;
        int fd; /* to which it sends its connection */
        struct gate may_exit;
};

static void connect_and_exit(void *arg)
{
        struct connector *c = arg;
        struct raw *raw = NULL;

        REQUIRE(raw_open(c->socket, &raw) == 0, "no connection");
        REQUIRE(fd_message_send(c->fd, "x", 1, &raw->fd, 1, 0) == 0, "the connection was not sent");
        REQUIRE(gate_wait(&c->may_exit, RAW_TIMEOUT_MS), "not in time");
}

/* What the daemon reads about its process, such as its ancestors, could be another process's that has its number now. */
RIG_TEST(a_process_that_has_exited_has_no_hello, several)
{
        struct connector c = { .socket = rig->socket, .may_exit = gate_new() };
        struct raw *raw = NULL;
        int pair[2], fd = -1;
        char byte;
        pid_t pid;

        ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
        c.fd = pair[0];
        pid = child_start(connect_and_exit, &c);
        ck_assert_int_eq(fd_message_receive(pair[1], &byte, 1, &fd), 0);
        (void)rig_count(rig); /* it is accepted by now */
        gate_open(&c.may_exit);
        child_join(pid);
        ck_assert_int_eq(raw_open(rig->socket, &raw), 0);
        ck_assert_int_ge(dup3(fd, raw->fd, O_CLOEXEC), 0);
        ck_assert_int_eq(raw_hello(raw, "red", NULL), -EIO);
        raw_close(raw);
        close(fd);
        close(pair[0]);
        close(pair[1]);
}

TEST(an_unmatched_user_is_told_the_rules)
{
        static const struct rig_config config = {
                .tenants = TENANT("white", "@OTHER@", "train, limit: 16MiB"),
        };
        struct rig *rig = rig_start(&config);
        char own_uid[16];

        snprintf(own_uid, sizeof(own_uid), "%u", (unsigned)getuid());
        ck_assert_int_eq(client_refused(rig, NULL, NULL), -EACCES);
        ck_assert_msg(strstr(bfc_last_error(), own_uid), "the sentence does not name the user: %s",
                      bfc_last_error());
        ck_assert_msg(strstr(bfc_last_error(), "4242") || strstr(bfc_last_error(), "white"),
                      "it does not say what would match: %s", bfc_last_error());
        rig_stop(rig);
}

TEST(the_default_tenant_matches_other_users)
{
        static const struct rig_config config = {
                .top = "default_tenant: guests\n",
                .tenants = TENANT("white", "@OTHER@",
                                  "train, limit: 16MiB") "  - name: guests\n"
                                                         "    quotas: [{partition: train, limit: 4MiB}]\n",
        };
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *p;

        ck_assert_str_eq(bfc_tenant(client), "guests");
        ck_assert_ok(bfc_malloc(client, 4 * MIB, &p));
        bfc_disconnect(client);
        ck_assert_int_eq(client_refused(rig, "white", NULL), -EACCES);
        rig_stop(rig);
}

/* ---- other users ---------------------------------------------------------- */

struct visitor {
        char socket[96];
        uid_t uid;
        gid_t gid;
        gid_t supplementary; /* 0: none */
        const char *tenant;  /* that it is taken for; NULL: it is refused */
};

static void visit(void *arg)
{
        struct visitor *v = arg;
        struct bfc_options options = { .struct_size = sizeof(options), .socket = v->socket };
        bfc_client *client;
        void *p;
        int r;

        REQUIRE(setgroups(v->supplementary ? 1 : 0, &v->supplementary) == 0, "setgroups");
        REQUIRE(setgid(v->gid) == 0 && setuid(v->uid) == 0, "to uid %u", (unsigned)v->uid);
        r = bfc_connect(&options, &client);
        if (!v->tenant) {
                REQUIRE(r == -EACCES, "connect: %d", r);
                REQUIRE(has_stats(bfc_last_error()), "the refusal says only: %s", bfc_last_error());
                return;
        }
        REQUIRE(r == 0, "connect as %s: %s", v->tenant, bfc_last_error());
        REQUIRE(strcmp(bfc_tenant(client), v->tenant) == 0, "taken for %s", bfc_tenant(client));
        REQUIRE(bfc_malloc(client, 1 * MIB, &p) == 0, "%s", bfc_last_error());
        memset(p, 1, 1 * MIB);
        bfc_disconnect(client);
}

TEST(other_users_by_uid_and_group)
{
        static const struct rig_config config = {
                .tenants = TENANT("by-uid", "@OTHER@",
                                  "train, limit: 16MiB") "  - name: by-gid\n"
                                                         "    match: {gid: [4343]}\n"
                                                         "    quotas: [{partition: train, limit: 16MiB}]\n",
        };
        static const struct {
                uid_t uid;
                gid_t gid, supplementary;
                const char *tenant;
        } visitors[] = {
                { OTHER_UID, OTHER_GID, 0, "by-uid" },
                { OTHER_UID, SOME_GID, 0, "by-uid" }, /* both: the first in the file */
                { ANOTHER_UID, SOME_GID, 0, "by-gid" },
                { ANOTHER_UID, OTHER_GID, SOME_GID, "by-gid" },
                { ANOTHER_UID, OTHER_GID, 0, NULL },
        };
        struct rig *rig;

        if (!is_root()) {
                printf("# skipped: only root can become other users\n");
                return;
        }
        rig = rig_start(&config);
        for (size_t i = 0; i < sizeof(visitors) / sizeof(visitors[0]); i++) {
                struct visitor v = { .uid = visitors[i].uid,
                                     .gid = visitors[i].gid,
                                     .supplementary = visitors[i].supplementary,
                                     .tenant = visitors[i].tenant };

                strcpy(v.socket, rig->socket);
                child_join(child_start(visit, &v));
        }
        rig_stop(rig);
}

static void knock_at_the_admin_socket(void *arg)
{
        struct raw *raw = NULL;
        int r = raw_open(arg, &raw);

        REQUIRE(r == -EACCES, "connecting to the admin socket: %d", r);
}

TEST(the_admin_socket_refuses_other_users)
{
        struct rig *rig;

        if (!is_root()) {
                printf("# skipped: only root can become other users\n");
                return;
        }
        rig = rig_start(&several);
        child_join(child_start_as(OTHER_UID, OTHER_UID, knock_at_the_admin_socket, rig->admin_socket));
        rig_stop(rig);
}

/* ---- what one sees -------------------------------------------------------- */

RIG_TEST(admin_requests_need_the_admin_socket, several)
{
        struct raw *raw = session_open(rig->socket, "red");
        Bfcd__Request reset = BFCD__REQUEST__INIT, show = BFCD__REQUEST__INIT;
        Bfcd__ResetPeaks reset_body = BFCD__RESET_PEAKS__INIT;
        Bfcd__ShowConfig show_body = BFCD__SHOW_CONFIG__INIT;
        Bfcd__Block block;

        reset.body_case = BFCD__REQUEST__BODY_RESET_PEAKS;
        reset.reset_peaks = &reset_body;
        show.body_case = BFCD__REQUEST__BODY_SHOW_CONFIG;
        show.show_config = &show_body;
        ck_assert_int_eq(raw_do(raw, &reset), -EACCES);
        ck_assert_int_eq(raw_do(raw, &show), -EACCES);
        ck_assert_str_ne(raw_refusal(), "");
        ck_assert_int_eq(raw_malloc(raw, 0, 4096, &block), 0); /* refused, not disconnected */
        session_end(raw);
}

struct seen {
        size_t n_rows;
        size_t n_foreign; /* rows of a tenant other than red */
};

static struct seen look(struct raw *raw, Bfcd__List__Kind kind)
{
        struct seen seen = { 0 };
        uint64_t cursor = 0;

        do {
                Bfcd__Reply *page;

                ck_assert_int_eq(raw_list(raw, kind, cursor, &page), 0);
                for (size_t i = 0; i < page->list->n_tenants; i++, seen.n_rows++)
                        seen.n_foreign += strcmp(page->list->tenants[i]->tenant, "red") != 0;
                for (size_t i = 0; i < page->list->n_sessions; i++, seen.n_rows++)
                        seen.n_foreign += strcmp(page->list->sessions[i]->tenant, "red") != 0;
                for (size_t i = 0; i < page->list->n_blocks; i++, seen.n_rows++)
                        seen.n_foreign += strcmp(page->list->blocks[i]->tenant, "red") != 0;
                cursor = page->list->next_cursor;
                bfcd__reply__free_unpacked(page, NULL);
        } while (cursor != 0);
        return seen;
}

RIG_TEST(lists_are_restricted_to_the_tenant, several)
{
        struct raw *red = raw_connect(rig->socket, "red"), *blue = raw_connect(rig->socket, "blue");
        Bfcd__Reply *page;
        Bfcd__Block block;
        struct seen seen;

        ck_assert(red && blue);
        for (unsigned i = 0; i < 3; i++)
                ck_assert_int_eq(raw_malloc(red, 0, 4096, &block), 0);
        for (unsigned i = 0; i < 5; i++)
                ck_assert_int_eq(raw_malloc(blue, 0, 4096, &block), 0);

        seen = look(red, BFCD__LIST__KIND__TENANTS);
        ck_assert_uint_eq(seen.n_rows, 1);
        ck_assert_uint_eq(seen.n_foreign, 0);
        seen = look(red, BFCD__LIST__KIND__SESSIONS);
        ck_assert_uint_eq(seen.n_rows, 1);
        ck_assert_uint_eq(seen.n_foreign, 0);
        seen = look(red, BFCD__LIST__KIND__BLOCKS);
        ck_assert_uint_eq(seen.n_rows, 3);
        ck_assert_uint_eq(seen.n_foreign, 0);

        seen = look(rig->admin, BFCD__LIST__KIND__TENANTS);
        ck_assert_uint_eq(seen.n_rows, 4); /* tenants by partitions */
        seen = look(rig->admin, BFCD__LIST__KIND__BLOCKS);
        ck_assert_uint_eq(seen.n_rows, 8);
        ck_assert_uint_eq(seen.n_foreign, 5);

        /* The partitions that it may use, and no other. */
        ck_assert_int_eq(raw_list(red, BFCD__LIST__KIND__PARTITIONS, 0, &page), 0);
        ck_assert_uint_eq(page->list->n_partitions, 1);
        ck_assert_str_eq(page->list->partitions[0]->name, "train");
        bfcd__reply__free_unpacked(page, NULL);
        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__PARTITIONS, 0, &page), 0);
        ck_assert_uint_eq(page->list->n_partitions, 2);
        bfcd__reply__free_unpacked(page, NULL);

        ck_assert_int_eq(raw_goodbye(red), 0);
        ck_assert_int_eq(raw_goodbye(blue), 0);
        raw_close(red);
        raw_close(blue);
}

RIG_TEST(whoami_names_user_and_tenant, several)
{
        struct raw *raw = session_open(rig->socket, "blue");
        const Bfcd__Whoami *user;
        Bfcd__Reply *page;

        ck_assert_int_eq(raw_list(raw, BFCD__LIST__KIND__WHOAMI, 0, &page), 0);
        user = page->list->whoami;
        ck_assert_ptr_nonnull(user);
        ck_assert_str_eq(user->tenant, "blue");
        ck_assert_uint_eq(user->uid, getuid());
        ck_assert_uint_eq(user->gid, getgid());
        ck_assert_uint_eq(user->pid, (uint64_t)getpid());
        ck_assert(!user->admin);
        ck_assert_uint_eq(user->n_matching_tenants, 2);
        bfcd__reply__free_unpacked(page, NULL);
        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__WHOAMI, 0, &page), 0);
        ck_assert(page->list->whoami->admin);
        ck_assert_str_eq(page->list->whoami->tenant, "");
        bfcd__reply__free_unpacked(page, NULL);
        session_end(raw);
}

/* ---- how many ------------------------------------------------------------- */

static bool refuses_one_more(struct rig *rig, const char *tenant)
{
        int r = client_refused(rig, tenant, NULL);

        ck_assert_msg(r == -EDQUOT || r == -EUSERS || r == -EAGAIN, "one session too many: %d", r);
        ck_assert_msg(has_stats(bfc_last_error()), "the refusal says only: %s", bfc_last_error());
        return true;
}

static bool admits(struct rig *rig, const char *tenant)
{
        struct raw *raw = raw_connect(rig->socket, tenant);

        if (raw)
                session_end(raw);
        return raw != NULL;
}

TEST(sessions_of_the_daemon_are_limited)
{
        static const struct rig_config config = { .top = "max_sessions: 4\n" };
        struct rig *rig = rig_start(&config);
        bfc_client *clients[4];
        size_t n = 0;

        /* Whether the session on the admin socket counts is not ours to say. */
        for (; n < 3; n++)
                clients[n] = client_open(rig, NULL, NULL);
        if (admits(rig, NULL))
                clients[n++] = client_open(rig, NULL, NULL);
        ck_assert(refuses_one_more(rig, NULL));
        ck_assert(rig_answers(rig)); /* operators come in always */
        bfc_disconnect(clients[--n]);
        ck_assert(WAIT_FOR(admits(rig, NULL), SETTLE_MS));
        while (n > 0)
                bfc_disconnect(clients[--n]);
        rig_stop(rig);
}
