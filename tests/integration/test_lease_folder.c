/* Sockets of leases: a process that connects to leases/NAME/bfcd.sock is in the leases of that name, and gets nothing else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/integration/json.h"
#include "tests/integration/kept.h"

/* No process is a "pod" by itself. */
static const struct rig_config config = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT_OF(
                "red", "@UID@",
                "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}") "  - name: pod\n    match: {}\n    leases: self\n"
                                                                                     "    quotas: [{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}]\n",
};

/* ---- requests about leases ---------------------------------------------------- */

static char *socket_of(const struct rig *rig, const char *name)
{
        static char paths[2][160];
        static unsigned n;
        char *path = paths[n++ % 2];

        snprintf(path, sizeof(paths[0]), "%s/leases/%s/bfcd.sock", rig->folder, name);
        return path;
}

static Bfcd__LeaseCreate lease_of(const char *name, const char *tenant, const char *socket)
{
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;

        m.name = (char *)(uintptr_t)name;
        m.tenant = (char *)(uintptr_t)tenant;
        m.partition = (char *)(uintptr_t) "train";
        m.bytes_limit = 4 * MIB;
        m.match_case = BFCD__LEASE_CREATE__MATCH_SOCKET;
        m.socket = (char *)(uintptr_t)socket;
        return m;
}

static int create(struct raw *raw, Bfcd__LeaseCreate *m)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;

        r.body_case = BFCD__REQUEST__BODY_LEASE_CREATE;
        r.lease_create = m;
        return raw_do(raw, &r);
}

static int make(struct raw *raw, const char *name, const char *tenant, const char *socket)
{
        Bfcd__LeaseCreate m = lease_of(name, tenant, socket);

        return create(raw, &m);
}

static int make_in(struct raw *raw, const char *name, const char *partition, const char *socket)
{
        Bfcd__LeaseCreate m = lease_of(name, "pod", socket);

        m.partition = (char *)(uintptr_t)partition;
        m.bytes_limit = 2 * MIB;
        return create(raw, &m);
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

/* A hello on this socket that is refused so, with this sentence. */
static void hello_refused(const char *path, const char *tenant, const char *partition, int error,
                          const char *part)
{
        struct raw *raw;

        ck_assert_int_eq(raw_open(path, &raw), 0);
        ck_assert_int_eq(raw_hello(raw, tenant, partition), error);
        ck_assert_msg(strstr(raw_refusal(), part), "%s", raw_refusal());
        raw_close(raw);
}

static void gets_at_most(struct raw *client, uint32_t partition, uint64_t n_bytes, const char *lease)
{
        Bfcd__Block block;

        ck_assert_int_eq(raw_malloc(client, partition, n_bytes, &block), 0);
        ck_assert_int_eq(raw_malloc(client, partition, 2 * MIB, &block), -EDQUOT);
        ck_assert_msg(strstr(raw_refusal(), lease), "%s", raw_refusal());
}

static bool is_there(const char *path)
{
        struct stat st;

        return lstat(path, &st) == 0;
}

static unsigned count_names(const struct rig *rig)
{
        char path[160];
        struct dirent *entry;
        unsigned n = 0;
        DIR *list;

        snprintf(path, sizeof(path), "%s/leases", rig->folder);
        list = opendir(path);
        while (list && (entry = readdir(list)))
                n += entry->d_name[0] != '.';
        if (list)
                closedir(list);
        return n;
}

/* ---- what it is for ------------------------------------------------------------ */

RIG_TEST(a_process_at_the_socket_is_in_the_lease, config)
{
        struct raw *client;
        struct stat st;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        client = session_open(socket_of(rig, "c-1"), NULL);
        gets_at_most(client, 0, 4 * MIB, "lease 'claim'");
        session_end(client);
        client = session_open(socket_of(rig, "c-1"), "pod");
        session_end(client);
        hello_refused(socket_of(rig, "c-1"), NULL, "serve", -ENOENT,
                      "socket 'c-1' has no lease in partition 'serve'; its partitions are: 'train'");
        hello_refused(socket_of(rig, "c-1"), "red", NULL, -EACCES,
                      "socket 'c-1' is of leases of tenant 'pod'");
        hello_refused(rig->socket, "pod", NULL, -EACCES, "pod"); /* no process is it by itself */

        ck_assert_int_eq(stat(socket_of(rig, "c-1"), &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, 0666);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
}

RIG_TEST(only_the_daemons_user_enters_the_folder, config)
{
        char path[160];
        struct stat st;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        snprintf(path, sizeof(path), "%s/leases", rig->folder);
        ck_assert_int_eq(stat(path, &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777, 0700);
        snprintf(path, sizeof(path), "%s/leases/c-1", rig->folder);
        ck_assert_int_eq(stat(path, &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777, 0755);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
}

/* As a container is: the folder is mounted read-only, and the process is of a user that no tenant matches. */
static void connect_by_mount(void *arg)
{
        const struct rig *rig = arg;
        char from[160], to[160];
        struct raw *raw;
        Bfcd__Block block;
        int r;

        snprintf(from, sizeof(from), "%s/leases/c-1", rig->folder);
        snprintf(to, sizeof(to), "%s/mounted", rig->folder);
        REQUIRE(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0,
                "unshare");
        REQUIRE(mount(from, to, NULL, MS_BIND, NULL) == 0, "mount");
        REQUIRE(mount(NULL, to, NULL, MS_BIND | MS_REMOUNT | MS_RDONLY, NULL) == 0, "mount");
        REQUIRE(setgid(OTHER_UID) == 0 && setuid(OTHER_UID) == 0, "setuid");
        strcat(to, "/bfcd.sock");
        REQUIRE(unlink(to) < 0 && errno == EROFS, "it is read-only");
        r = raw_open(to, &raw);
        REQUIRE(r == 0, "connect: %d", r);
        r = raw_hello(raw, NULL, NULL);
        REQUIRE(r == 0, "hello: %d %s", r, raw_refusal());
        REQUIRE(raw_malloc(raw, 0, 4 * MIB, &block) == 0, "%s", raw_refusal());
        REQUIRE(raw_malloc(raw, 0, 2 * MIB, &block) == -EDQUOT, "it has more than the lease");
        (void)raw_goodbye(raw);
}

static void try_to_unshare(void *arg)
{
        *(bool *)arg = unshare(CLONE_NEWNS) == 0;
}

RIG_TEST(a_mount_of_it_is_enough, config)
{
        bool *can = shared_memory(sizeof(*can));
        char path[160];

        child_join(child_start(try_to_unshare, can));
        if (!*can) {
                printf("# skipped: this process may not make a mount namespace\n");
                return;
        }
        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        snprintf(path, sizeof(path), "%s/mounted", rig->folder);
        ck_assert_int_eq(mkdir(path, 0755), 0);
        child_join(child_start(connect_by_mount, rig));
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
}

RIG_TEST(two_leases_have_one_socket, config)
{
        struct raw *client;

        ck_assert_int_eq(make(rig->admin, "a", "pod", "c-1"), 0);
        ck_assert_int_eq(make_in(rig->admin, "b", "serve", "c-1"), 0);
        ck_assert_int_eq(make(rig->admin, "c", "pod", "c-1"), -EEXIST);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "socket 'c-1' is of lease 'a' in partition 'train'"));
        client = session_open(socket_of(rig, "c-1"), NULL);
        gets_at_most(client, 0, 4 * MIB, "lease 'a'");
        gets_at_most(client, 1, 2 * MIB, "lease 'b'");
        ck_assert_int_eq(end(rig->admin, "a"), 0);
        hello_refused(socket_of(rig, "c-1"), NULL, NULL, -EACCES, "lease 'a' in partition 'train' has ended");
        session_end(client);
        ck_assert(WAIT_FOR(end(rig->admin, "a") == -ENOENT, SETTLE_MS));
        client = session_open(socket_of(rig, "c-1"), NULL); /* its only partition is the first one */
        gets_at_most(client, 0, 2 * MIB, "lease 'b'");
        session_end(client);
        ck_assert_int_eq(end(rig->admin, "b"), 0);
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
}

/* The limits of the others do not count for it, and theirs not for it. */
RIG_TEST(other_leases_do_not_match_it, config)
{
        Bfcd__LeaseCreate m = lease_of("all", "pod", "");
        struct raw *client;

        m.match_case = BFCD__LEASE_CREATE__MATCH_CGROUP;
        m.cgroup = (char *)(uintptr_t) "/";
        m.bytes_limit = 2 * MIB;
        ck_assert_int_eq(create(rig->admin, &m), 0);
        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_int_eq(make(rig->admin, "claim-2", "red", "c-2"), 0);
        client = session_open(socket_of(rig, "c-1"), NULL);
        gets_at_most(client, 0, 4 * MIB, "lease 'claim'");
        session_end(client);
        client = session_open(rig->socket, "red");
        gets_at_most(client, 0, 64 * MIB, "tenant 'red'");
        session_end(client);
        ck_assert_int_eq(end(rig->admin, "all"), 0);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        ck_assert_int_eq(end(rig->admin, "claim-2"), 0);
}

RIG_TEST(bfcctl_makes_and_shows_it, config)
{
        json_t *document, *rows;
        char *text;

        free(ctl_text(rig, WORDS("lease", "create", "claim", "--tenant", "pod", "--partition", "train",
                                 "--limit", "4MiB", "--socket-name", "c-1")));
        ctl_says(rig, WORDS("lease", "list", "--columns", "LEASE,MATCH"), "socket c-1");
        document = ctl_json(socket_of(rig, "c-1"), WORDS("--json", "whoami"));
        ck_assert_str_eq(json_string_value(json_object_get(document, "tenant")), "pod");
        rows = json_object_get(document, "matching_tenants");
        ck_assert_uint_eq(json_array_size(rows), 1);
        ck_assert_str_eq(json_string_value(json_array_get(rows, 0)), "pod");
        json_decref(document);
        ctl_says(rig, WORDS("config"), "match: {}");
        ck_assert_int_ne(ctl(rig->admin_socket,
                             WORDS("lease", "create", "two", "--tenant", "pod", "--partition", "train",
                                   "--limit", "4MiB", "--socket-name", "c-2", "--cgroup", "/a"),
                             NULL, &text),
                         0);
        text_has(text, "one of --cgroup, --unit, --pid, --user and --socket-name is needed");
        free(ctl_text(rig, WORDS("lease", "end", "claim")));
}

/* ---- hostile requests ----------------------------------------------------------- */

RIG_TEST(bad_names_are_refused, config)
{
        static const char *const names[] = { "",     ".",      "..",   ".a",    "a/b",           "../a",
                                             "/tmp", "a/../b", "a\nb", "a b",   "\u00e4",        "a/",
                                             "c*",   "%s",     "a:b",  "a\x7f", "leases/../../a" };
        struct raw *raw = session_open(rig->lease_socket, NULL);
        char name[65];

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
                ck_assert_msg(make(raw, "claim", "pod", names[i]) == -EINVAL, "%s: %s", names[i],
                              raw_refusal());
        memset(name, 'a', sizeof(name) - 1);
        name[64] = '\0';
        ck_assert_int_eq(make(raw, "claim", "pod", name), -EINVAL);
        ck_assert_uint_eq(count_names(rig), 0);
        name[63] = '\0'; /* the longest: its path is longer than an address of a socket may be */
        ck_assert_int_eq(make(raw, "claim", "pod", name), 0);
        ck_assert(is_there(socket_of(rig, name)));
        ck_assert_int_eq(end(raw, "claim"), 0);
        session_end(raw);
}

/* Text in the protocol has a length, and may have a NUL in it. */
RIG_TEST(a_name_ends_at_a_nul, config)
{
        struct raw *raw = session_open(rig->lease_socket, NULL);
        Bfcd__LeaseCreate m = lease_of("claim", "pod", "one@..@two");
        Bfcd__Request request = BFCD__REQUEST__INIT;
        uint8_t frame[512];
        size_t n;

        request.id = 7;
        request.body_case = BFCD__REQUEST__BODY_LEASE_CREATE;
        request.lease_create = &m;
        n = raw_pack(&request, frame);
        for (size_t i = 0; i < n; i++)
                if (frame[i] == '@')
                        frame[i] = '\0';
        ck_assert_int_eq(raw_send_bytes(raw, frame, n), 0);
        ck_assert(WAIT_FOR(is_there(socket_of(rig, "one")), SETTLE_MS));
        ck_assert_uint_eq(count_names(rig), 1);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        raw_close(raw);
}

RIG_TEST(a_name_belongs_to_one_tenant, config)
{
        struct raw *scheduler = session_open(rig->lease_socket, NULL), *client, *early;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_int_eq(make(scheduler, "theirs", "red", "c-1"), -EEXIST);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "socket 'c-1' is of a lease of tenant 'pod'"));
        client = session_open(socket_of(rig, "c-1"), NULL);
        ck_assert_int_eq(raw_open(socket_of(rig, "c-1"), &early), 0);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        ck_assert_int_eq(make(scheduler, "theirs", "red", "c-1"), -EEXIST); /* it has a session */
        session_end(client);
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
        ck_assert_int_eq(make(scheduler, "theirs", "red", "c-1"), 0);

        /* Another socket has the name now. */
        ck_assert_int_eq(raw_hello(early, NULL, NULL), -EACCES);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "the leases of this socket have ended"));
        raw_close(early);
        ck_assert_int_eq(end(scheduler, "theirs"), 0);
        session_end(scheduler);
}

RIG_TEST(a_process_at_the_socket_makes_no_leases, config)
{
        struct raw *client;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        client = session_open(socket_of(rig, "c-1"), NULL);
        ck_assert_int_eq(make(client, "u0:a", "pod", "c-1"), -EACCES);
        ck_assert_int_eq(end(client, "claim"), -EACCES);
        session_end(client);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
}

static const struct rig_config of_users = {
        .tenants = "  - name: red\n    match: {uid: [@UID@]}\n    leases: self\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n",
};

RIG_TEST(users_make_none, of_users)
{
        struct raw *client = session_open(rig->socket, NULL);
        char name[32];

        snprintf(name, sizeof(name), "u%u:a", (unsigned)getuid());
        ck_assert_int_eq(make(client, name, "red", "c-1"), -EACCES);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "only by operators and schedulers"));
        ck_assert_uint_eq(count_names(rig), 0);
        session_end(client);
}

/* As many as it may; each is one file descriptor, and all come back. */
RIG_TEST(a_scheduler_makes_many, config)
{
        struct raw *raw = session_open(rig->lease_socket, NULL), *client;
        unsigned n_fds = process_count_fds(rig->pid), n = 0;
        char name[32];
        int r;

        for (r = 0; r == 0; n += r == 0) {
                snprintf(name, sizeof(name), "c-%u", n);
                r = make(raw, name, n % 2 ? "pod" : "red", name);
        }
        ck_assert_int_eq(r, -EDQUOT);
        ck_assert_uint_ge(n, 100);
        ck_assert_uint_eq(count_names(rig), n);
        ck_assert_uint_eq(process_count_fds(rig->pid), n_fds + n + 1); /* and the folder's */
        client = session_open(socket_of(rig, "c-1"), NULL);
        session_end(client);
        client = session_open(rig->socket, "red");
        session_end(client);
        while (n-- > 0) {
                snprintf(name, sizeof(name), "c-%u", n);
                ck_assert_int_eq(end(raw, name), 0);
        }
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
        ck_assert(WAIT_FOR(process_count_fds(rig->pid) == n_fds, SETTLE_MS));
        session_end(raw);
}

/* ---- reloads -------------------------------------------------------------------- */

static const struct rig_config without_pod = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@",
                             "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

static void reload(struct rig *rig, const struct rig_config *to)
{
        rig_rewrite_config(rig, to);
        free(ctl_text(rig, WORDS("reload")));
}

/* Its sessions go on with what they have. Connections that had said no hello get nothing, also when the tenant is there again. */
RIG_TEST(its_tenant_is_removed, config)
{
        struct raw *client, *early;
        Bfcd__Block block;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        client = session_open(socket_of(rig, "c-1"), NULL);
        ck_assert_int_eq(raw_malloc(client, 0, 2 * MIB, &block), 0);
        ck_assert_int_eq(raw_open(socket_of(rig, "c-1"), &early), 0);
        reload(rig, &without_pod);
        hello_refused(socket_of(rig, "c-1"), NULL, NULL, -EACCES, "the leases of this socket have ended");
        ck_assert_int_eq(raw_malloc(client, 0, 2 * MIB, &block), -EDQUOT);
        ck_assert_int_eq(make(rig->admin, "theirs", "red", "c-1"), -EEXIST);
        reload(rig, &config);
        ck_assert_int_eq(raw_hello(early, NULL, NULL), -EACCES);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "lease 'claim' in partition 'train' has ended"));
        raw_close(early);
        session_end(client);
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
}

/* ---- shared blocks --------------------------------------------------------------- */

/* Names are the tenant's, blocks the lease's. */
RIG_TEST(blocks_are_shared_within_a_lease, config)
{
        bfc_client *a, *b, *c;
        void *p, *q;

        ck_assert_int_eq(make(rig->admin, "a", "pod", "c-1"), 0);
        ck_assert_int_eq(make(rig->admin, "b", "pod", "c-2"), 0);
        ck_assert_int_eq(make_in(rig->admin, "c", "serve", "c-3"), 0);
        a = client_with(.socket = socket_of(rig, "c-1"));
        b = client_with(.socket = socket_of(rig, "c-2"));
        c = client_with(.socket = socket_of(rig, "c-3"));
        ck_assert_ok(bfc_malloc(a, MIB, &p));
        ck_assert_ok(bfc_publish(a, p, "w"));
        ck_assert_int_eq(bfc_attach(b, "w", 0, &q, NULL), -EXDEV);
        ck_assert_int_eq(bfc_attach(c, "w", 0, &q, NULL), -ENOENT);
        ck_assert_msg(strstr(bfc_last_error(),
                             "in partition 'train', where the socket of this session has no lease"),
                      "%s", bfc_last_error());
        bfc_disconnect(b);
        b = client_with(.socket = socket_of(rig, "c-1"));
        ck_assert_ok(bfc_attach(b, "w", 0, &q, NULL));
        bfc_disconnect(a);
        bfc_disconnect(b);
        bfc_disconnect(c);
        ck_assert_int_eq(end(rig->admin, "a"), 0);
        ck_assert_int_eq(end(rig->admin, "b"), 0);
        ck_assert_int_eq(end(rig->admin, "c"), 0);
}

/* ---- restarts ------------------------------------------------------------------- */

/* kept_raw() and others use the rig's client socket. */
static void go_to(struct kept *k, const char *path)
{
        snprintf(k->rig->socket, sizeof(k->rig->socket), "%s", path);
}

static ino_t inode_of(const struct rig *rig, const char *name)
{
        char path[160];
        struct stat st;

        snprintf(path, sizeof(path), "%s/leases/%s", rig->folder, name);
        ck_assert_int_eq(stat(path, &st), 0);
        return st.st_ino;
}

static void resume_refused(struct kept *k, const char *path, const struct raw *from)
{
        struct raw *raw;

        go_to(k, path);
        ck_assert_int_eq(kept_raw_try(k, from, &raw), -EACCES);
        ck_assert_msg(strstr(raw_refusal(), "this session began on another socket"), "%s", raw_refusal());
        raw_close(raw);
}

static void restart_with_sessions(int signal)
{
        struct kept *k = kept_start(&config);
        char usual[sizeof(k->rig->socket)];
        struct raw *claim, *plain, *other;
        struct raw_held held;
        Bfcd__Block block;
        ino_t inode;

        strcpy(usual, k->rig->socket);
        ck_assert_int_eq(make(k->rig->admin, "claim", "red", "c-1"), 0);
        ck_assert_int_eq(make_in(k->rig->admin, "b", "serve", "c-2"), 0);
        inode = inode_of(k->rig, "c-1");
        plain = kept_raw(k, "red");
        go_to(k, socket_of(k->rig, "c-1"));
        claim = kept_raw(k, NULL);
        ck_assert_int_eq(raw_malloc(claim, 0, 2 * MIB, &block), 0);
        kept_restart(k, signal);
        ck_assert_uint_eq(inode_of(k->rig, "c-1"), inode); /* it is mounted somewhere */

        resume_refused(k, usual, claim);
        resume_refused(k, socket_of(k->rig, "c-2"), claim);
        resume_refused(k, socket_of(k->rig, "c-1"), plain);
        go_to(k, usual);
        plain = kept_raw_back(k, plain);
        held = kept_held(plain, NULL, 0);
        ck_assert_int_eq(raw_held(plain, &held), 0);
        raw_held_free(&held);
        go_to(k, socket_of(k->rig, "c-1"));
        held = kept_held(claim, &block.block_id, 1);
        claim = kept_raw_back(k, claim);
        ck_assert_int_eq(raw_held(claim, &held), 0);
        raw_held_free(&held);
        ck_assert_int_eq(raw_malloc(claim, 0, 6 * MIB, &block), -EDQUOT); /* more than the whole lease */
        ck_assert_msg(strstr(raw_refusal(), "lease 'claim'"), "%s", raw_refusal());

        other = session_open(socket_of(k->rig, "c-2"), NULL);
        gets_at_most(other, 0, 2 * MIB, "lease 'b'");
        session_end(other);
        session_end(plain);
        session_end(claim);
        go_to(k, usual);
        ck_assert_int_eq(end(k->rig->admin, "claim"), 0);
        ck_assert_int_eq(end(k->rig->admin, "b"), 0);
        ck_assert(WAIT_FOR(count_names(k->rig) == 0, SETTLE_MS));
        kept_stop(k);
}

TEST(it_survives_a_kill)
{
        restart_with_sessions(SIGKILL);
}

TEST(it_survives_a_restart)
{
        restart_with_sessions(SIGTERM);
}

/* A program goes on by the library. */
TEST(a_program_at_the_socket_survives_a_kill)
{
        struct kept *k = kept_start(&config);
        bfc_client *client;
        void *p, *more;

        ck_assert_int_eq(make(k->rig->admin, "claim", "pod", "c-1"), 0);
        client = client_with(.socket = socket_of(k->rig, "c-1"));
        ck_assert_ok(bfc_malloc(client, 2 * MIB, &p));
        block_fill(client, p, 2 * MIB, 7);
        kept_restart(k, SIGKILL);
        ck_assert_ok(bfc_malloc(client, MIB, &more));
        ck_assert(block_has(client, p, 2 * MIB, 7));
        ck_assert_int_eq(bfc_malloc(client, 4 * MIB, &more), -EDQUOT);
        ck_assert_msg(strstr(bfc_last_error(), "lease 'claim'"), "%s", bfc_last_error());
        bfc_disconnect(client);
        ck_assert_int_eq(end(k->rig->admin, "claim"), 0);
        kept_stop(k);
}

static void make_file(const char *folder, const char *name)
{
        char path[256];
        FILE *f;

        snprintf(path, sizeof(path), "%s/%s", folder, name);
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fclose(f);
}

/* A folder that may be mounted stays for the next lease. What the daemon did not make is neither removed nor followed. */
TEST(what_is_left_in_the_folder_is_removed)
{
        struct kept *k = kept_start(&config);
        char path[160], victim[160];
        struct stat st;
        ino_t inode;

        ck_assert_int_eq(make(k->rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_int_eq(make(k->rig->admin, "linked", "pod", "c-2"), 0);
        kept_away(k, SIGKILL);
        snprintf(path, sizeof(path), "%s/leases/old", k->rig->folder);
        ck_assert_int_eq(mkdir(path, 0755), 0);
        make_file(path, "bfcd.sock");
        inode = inode_of(k->rig, "old");
        snprintf(path, sizeof(path), "%s/leases", k->rig->folder);
        make_file(path, "thesis");
        snprintf(victim, sizeof(victim), "%s/victim", k->rig->folder);
        ck_assert_int_eq(mkdir(victim, 0755), 0);
        make_file(victim, "bfcd.sock");
        snprintf(path, sizeof(path), "%s/leases/link", k->rig->folder);
        ck_assert_int_eq(symlink(victim, path), 0);
        snprintf(path, sizeof(path), "%s/leases/c-2", k->rig->folder);
        ck_assert_int_eq(unlink(socket_of(k->rig, "c-2")), 0);
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(symlink(victim, path), 0);
        k->rig->forgiven = "socket";
        kept_back(k);
        ck_assert(kept_logged(
                k, "/leases/c-2/bfcd.sock could not be made: a file or a symbolic link has the name"));
        ck_assert_uint_eq(count_names(k->rig), 5);
        ck_assert(!is_there(socket_of(k->rig, "old")));
        ck_assert_uint_eq(inode_of(k->rig, "old"), inode);
        strcat(victim, "/bfcd.sock");
        ck_assert_int_eq(stat(victim, &st), 0);
        ck_assert(S_ISREG(st.st_mode));
        session_end(session_open(socket_of(k->rig, "c-1"), NULL));

        /* No lease is made for a socket that cannot listen. */
        ck_assert_int_eq(make_in(k->rig->admin, "linked-2", "serve", "c-2"), -ENOTDIR);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(make_in(k->rig->admin, "linked-2", "serve", "c-2"), 0);
        session_end(session_open(socket_of(k->rig, "c-2"), NULL));
        ck_assert_int_eq(end(k->rig->admin, "claim"), 0);
        ck_assert_int_eq(end(k->rig->admin, "linked"), 0);
        ck_assert_int_eq(end(k->rig->admin, "linked-2"), 0);
        kept_stop(k);
}

/* A user who starts bfcd with the admin socket in the home folder may have one of this name. */
TEST(a_folder_of_others_stays_as_it_is)
{
        struct kept *k = kept_start(&config);
        char path[160], file[176];
        struct stat st;

        kept_away(k, SIGKILL);
        snprintf(path, sizeof(path), "%s/leases", k->rig->folder);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        ck_assert_int_eq(chmod(path, 0755), 0);
        make_file(path, "thesis");
        snprintf(file, sizeof(file), "%s/empty", path);
        ck_assert_int_eq(mkdir(file, 0755), 0);
        k->rig->forgiven = "socket";
        kept_back(k);
        ck_assert(kept_logged(k, "could not be cleaned: other users may enter this folder"));
        ck_assert_int_ne(make(k->rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert(
                kept_logged(k, "/leases/c-1/bfcd.sock could not be made: other users may enter this folder"));
        ck_assert_uint_eq(count_names(k->rig), 2);
        ck_assert_int_eq(stat(path, &st), 0);
        ck_assert_uint_eq(st.st_mode & 07777, 0755);
        kept_stop(k);
}

/* Of somebody who may write beside the admin socket. */
RIG_TEST(a_folder_that_is_a_link_is_refused, config)
{
        char path[160], victim[160];

        snprintf(path, sizeof(path), "%s/leases", rig->folder);
        snprintf(victim, sizeof(victim), "%s/victim", rig->folder);
        ck_assert_int_eq(mkdir(victim, 0755), 0);
        ck_assert_int_eq(symlink(victim, path), 0);
        rig->forgiven = "the socket of leases";
        ck_assert_int_ne(make(rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_ptr_nonnull(strstr(raw_refusal(), "lease 'claim' could not be made"));
        ck_assert(rig_logged(rig, "/leases/c-1/bfcd.sock could not be made"));
        ck_assert_int_eq(rmdir(victim), 0); /* it is empty */
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
}

static const struct rig_config few_fds = {
        .tenants = TENANT("red", "@UID@",
                          "train, limit: 64MiB") "  - name: pod\n    match: {}\n"
                                                 "    quotas: [{partition: train, limit: 8MiB}]\n",
        .top = "max_sessions: 8\n",
        .max_fds = 640,
};

/* Each counts among what the daemon may open: there is room for sessions. */
RIG_TEST(file_descriptors_bound_their_number, few_fds)
{
        struct raw *client;
        unsigned n = 0;
        char name[32];
        int r;

        for (r = 0; r == 0; n += r == 0) {
                snprintf(name, sizeof(name), "c-%u", n);
                r = make(rig->admin, name, n % 2 ? "pod" : "red", name);
        }
        ck_assert_msg(r == -EMFILE, "%d: %s", r, raw_refusal());
        client = session_open(socket_of(rig, "c-0"), NULL);
        gets_at_most(client, 0, 4 * MIB, "lease 'c-0'");
        session_end(client);
        while (n-- > 0) {
                snprintf(name, sizeof(name), "c-%u", n);
                ck_assert_int_eq(end(rig->admin, name), 0);
        }
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
}

/* A process for which the folder was mounted without "ro", and which is root there. */
RIG_TEST(what_processes_make_in_it_is_not_followed, config)
{
        char path[160], victim[160];
        struct stat st;

        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        snprintf(victim, sizeof(victim), "%s/victim", rig->folder);
        ck_assert_int_eq(mkdir(victim, 0700), 0);
        make_file(victim, "file");
        strcat(victim, "/file");
        ck_assert_int_eq(chmod(victim, 0600), 0);
        snprintf(path, sizeof(path), "%s", socket_of(rig, "c-1"));
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(symlink(victim, path), 0);
        snprintf(path, sizeof(path), "%s/leases/c-1/keep", rig->folder);
        ck_assert_int_eq(mkdir(path, 0755), 0); /* so that the folder cannot be removed */
        rig->forgiven = "/leases/c-1";
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        ck_assert(WAIT_FOR(rig_logged(rig, "could not be removed"), SETTLE_MS));
        ck_assert_int_eq(mkdir(socket_of(rig, "c-1"), 0700), 0);
        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), -EISDIR);
        ck_assert(rig_logged(rig,
                             "a process that has the folder of the socket mounted wrote into it: empty it"));
        ck_assert_int_eq(rmdir(socket_of(rig, "c-1")), 0);
        ck_assert_int_eq(symlink(victim, socket_of(rig, "c-1")), 0);
        ck_assert_int_eq(make(rig->admin, "claim", "pod", "c-1"), 0);
        ck_assert_int_eq(stat(victim, &st), 0);
        ck_assert_uint_eq(st.st_mode & 0777, 0600);
        session_end(session_open(socket_of(rig, "c-1"), NULL));
        ck_assert_int_eq(rmdir(path), 0);
        ck_assert_int_eq(end(rig->admin, "claim"), 0);
        ck_assert(WAIT_FOR(count_names(rig) == 0, SETTLE_MS));
}
