/* bfc-exporter beside a real daemon: what it serves, what it refuses, and what it does without a daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

#include "ctl/hour.h"
#include "ctl/serve.h"
#include "tests/integration/json.h"
#include "tests/integration/moved_clock.h"

static const struct rig_config one_tenant = { .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") };
static const struct rig_config moves_clock = { .tenants = TENANT("red", "@UID@", "train, limit: 64MiB"),
                                               .moves_clock = true };

static const struct rig_config own_leases = {
        .tenants =
                "  - {name: red, match: {uid: @UID@}, leases: self, quotas: [{partition: train, limit: 64MiB}]}\n"
};

struct exporter {
        char path[112]; /* its socket */
        pid_t pid;
};

/* ---- the program ----------------------------------------------------------------- */

static const char *program_or(const char *fallback)
{
        const char *path = getenv("BFC_EXPORTER");

        return path && *path ? path : fallback;
}

static const char *program(void)
{
        return program_or(BUILT_EXPORTER);
}

static int try_connect(const char *path)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        struct timeval limit = { .tv_sec = SETTLE_MS / 1000 };
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_int_ge(fd, 0);
        ck_assert_uint_lt(strlen(path), sizeof(address.sun_path));
        strcpy(address.sun_path, path);
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                return fd;
        close(fd);
        return -1;
}

static bool is_up(const char *path)
{
        int fd = try_connect(path);

        if (fd < 0)
                return false;
        close(fd);
        return true;
}

static struct exporter exporter_start_with(const struct rig *rig, const char *option)
{
        struct exporter e;
        pid_t parent = getpid();

        snprintf(e.path, sizeof(e.path), "%s/http", rig->folder);
        e.pid = fork();
        ck_assert_int_ge(e.pid, 0);
        if (e.pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                if (getppid() == parent)
                        execl(rig->clock ? program_or(BUILT_EXPORTER_MOVED_CLOCK) : program(), "bfc-exporter",
                              "--listen", e.path, "--socket", rig->monitor_socket, option, (char *)NULL);
                _exit(127);
        }
        ck_assert(WAIT_FOR(is_up(e.path), SETTLE_MS));
        return e;
}

static struct exporter exporter_start(const struct rig *rig)
{
        return exporter_start_with(rig, NULL);
}

/* It ends by itself, and removes its socket. */
static void exporter_stop(const struct exporter *e)
{
        int status;

        ck_assert_int_eq(kill(e->pid, SIGTERM), 0);
        ck_assert_int_eq(waitpid(e->pid, &status, 0), e->pid);
        ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        ck_assert_int_lt(access(e->path, F_OK), 0);
}

/* ---- HTTP ------------------------------------------------------------------------- */

struct reply {
        char *all; /* head and body */
        const char *body;
        int status;
};

static void reply_read(int fd, struct reply *ret)
{
        size_t n = 0, n_room = 1 << 16;
        ssize_t got;

        ret->all = malloc(n_room);
        ck_assert_ptr_nonnull(ret->all);
        while ((got = read(fd, ret->all + n, n_room - n - 1)) > 0) {
                n += (size_t)got;
                if (n + 1 == n_room)
                        ret->all = realloc(ret->all, n_room *= 2);
        }
        ck_assert_msg(got == 0, "the answer did not end: %s", strerror(errno));
        ret->all[n] = '\0';
        ret->status = 0;
        ck_assert_int_eq(sscanf(ret->all, "HTTP/1.1 %d ", &ret->status), 1);
        ret->body = strstr(ret->all, "\r\n\r\n");
        ck_assert_ptr_nonnull(ret->body);
        ret->body += 4;
}

static void request(const struct exporter *e, const char *method, const char *path, const char *more,
                    struct reply *ret)
{
        int fd = try_connect(e->path);
        char *text;

        ck_assert_int_ge(fd, 0);
        ck_assert_int_gt(asprintf(&text, "%s %s HTTP/1.1\r\nHost: here\r\nConnection: close\r\n%s\r\n",
                                  method, path, more),
                         0);
        ck_assert_int_eq(send(fd, text, strlen(text), MSG_NOSIGNAL), (ssize_t)strlen(text));
        free(text);
        reply_read(fd, ret);
        close(fd);
}

static void get(const struct exporter *e, const char *path, struct reply *ret)
{
        request(e, "GET", path, "", ret);
}

static bool is_served(const struct exporter *e)
{
        struct reply r;
        bool ret;

        get(e, "/metrics", &r);
        ret = r.status == 200;
        free(r.all);
        return ret;
}

/* ---- what it serves ------------------------------------------------------------------ */

RIG_TEST(metrics_over_http, one_tenant)
{
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        Bfcd__Block block;
        struct reply r;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        get(&e, "/metrics", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
        ck_assert_ptr_nonnull(strstr(r.body, "partition=\"train\",tenant=\"red\"} 3145728\n"));
        ck_assert_ptr_null(strstr(r.body, "# EOF"));
        free(r.all);
        request(&e, "GET", "/metrics", "Accept: application/openmetrics-text; version=1.0.0\r\n", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: application/openmetrics-text; version=1.0.0"));
        ck_assert_str_eq(r.body + strlen(r.body) - 6, "# EOF\n");
        free(r.all);
        request(&e, "HEAD", "/metrics", "", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_str_eq(r.body, "");
        free(r.all);
        exporter_stop(&e);
        session_end(red);
}

static bool has_lease(const struct exporter *e, const char *path, const char *name)
{
        char label[64];
        struct reply r;
        bool has;

        snprintf(label, sizeof(label), "lease=\"%s\"", name);
        get(e, path, &r);
        ck_assert_int_eq(r.status, 200);
        has = strstr(r.body, label) != NULL;
        free(r.all);
        return has;
}

/* Their users choose the names, each of which would be a time series. */
RIG_TEST(metrics_sum_the_leases_of_users, own_leases)
{
        Bfcd__Request request_ = BFCD__REQUEST__INIT;
        Bfcd__LeaseCreate m = BFCD__LEASE_CREATE__INIT;
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        char name[32], of_operator[] = "job", train[] = "train";
        struct reply r;

        snprintf(name, sizeof(name), "u%u:mine", (unsigned)getuid());
        m.name = name;
        m.partition = train;
        m.bytes_limit = 8 * MIB;
        m.match_case = BFCD__LEASE_CREATE__MATCH_PID;
        m.pid = (uint64_t)getpid();
        request_.body_case = BFCD__REQUEST__BODY_LEASE_CREATE;
        request_.lease_create = &m;
        ck_assert_msg(raw_do(red, &request_) == 0, "%s", raw_refusal());
        ck_assert_int_eq(ctl(rig->admin_socket,
                             WORDS("lease", "create", of_operator, "--tenant", "red", "--partition", "train",
                                   "--limit", "8MiB", "--cgroup", "/none"),
                             NULL, NULL),
                         0);
        ck_assert(has_lease(&e, "/metrics", of_operator));
        ck_assert(has_lease(&e, "/metrics", "(user)"));
        ck_assert(!has_lease(&e, "/metrics", name));
        ck_assert(has_lease(&e, "/metrics?leases=each", name));
        ck_assert(!has_lease(&e, "/metrics?leases=each", "(user)"));
        get(&e, "/metrics?leases=all", &r);
        ck_assert_int_eq(r.status, 400);
        ck_assert_ptr_nonnull(strstr(r.body, "leases can only be 'each'"));
        free(r.all);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("lease", "end", name), NULL, NULL), 0);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("lease", "end", of_operator), NULL, NULL), 0);
        exporter_stop(&e);
        session_end(red);
}

/* The same JSON as bfcctl's. */
RIG_TEST(lists_over_http, one_tenant)
{
        static const char *const lists[] = { "status", "partitions", "tenants", "sessions", "keep",
                                             "grants", "waiting",    "leases",  "explain" };
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        Bfcd__Block block;
        char path[64];
        struct reply r;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
                json_t *document;

                snprintf(path, sizeof(path), "/api/%s", lists[i]);
                get(&e, path, &r);
                ck_assert_msg(r.status == 200, "%s: %d", path, r.status);
                ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: application/json"));
                document = json_loads(r.body, JSON_REJECT_DUPLICATES, NULL);
                ck_assert_msg(json_object_get(document, lists[i]), "%s: %s", path, r.body);
                if (strcmp(lists[i], "tenants") == 0 || strcmp(lists[i], "partitions") == 0) {
                        json_t *told = ctl_json(rig->monitor_socket, WORDS("--json", lists[i]));

                        ck_assert(json_equal(json_object_get(document, lists[i]), told));
                        json_decref(told);
                }
                json_decref(document);
                free(r.all);
        }
        exporter_stop(&e);
        session_end(red);
}

/* Names are their tenant's: whoever can connect sees the rest. */
RIG_TEST(kept_blocks_over_http_have_no_names, one_tenant)
{
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        Bfcd__Publish body = BFCD__PUBLISH__INIT;
        Bfcd__Request request = REQUEST(PUBLISH, publish, &body);
        Bfcd__Block block;
        struct reply r;

        ck_assert_int_eq(raw_malloc(red, 0, MIB, &block), 0);
        body.block_id = block.block_id;
        body.name = (char *)(uintptr_t) "secret";
        body.keep_ms = 600000;
        ck_assert_int_eq(raw_do(red, &request), 0);
        get(&e, "/api/keep", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_ptr_nonnull(strstr(r.body, "\"keep_ms\""));
        ck_assert_ptr_null(strstr(r.body, "secret"));
        free(r.all);
        exporter_stop(&e);
        free(ctl_text(rig, WORDS("forget", "red", "secret")));
        session_end(red);
}

/* The same drawing as bfcctl's. The name may be encoded. */
RIG_TEST(a_map_over_http, one_tenant)
{
        static const char *const paths[] = { "/api/map.svg?partition=train", "/api/map.svg?partition=tr%61in",
                                             "/api/map.svg?x=y&partition=train&z" };
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        Bfcd__Block block;
        struct reply r;
        char *drawn;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("map", "train", "--svg", "-"), &drawn, NULL), 0);
        for (size_t i = 0; i < sizeof(paths) / sizeof(paths[0]); i++) {
                get(&e, paths[i], &r);
                ck_assert_msg(r.status == 200, "%s: %d", paths[i], r.status);
                ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: image/svg+xml\r\n"));
                ck_assert_int_eq(strncmp(r.body, drawn, strcspn(drawn, "\n")), 0);
                ck_assert_ptr_nonnull(strstr(r.body, "red: 3.0 MiB in use"));
                ck_assert_str_eq(r.body + strlen(r.body) - 7, "</svg>\n");
                free(r.all);
        }
        free(drawn);
        exporter_stop(&e);
        session_end(red);
}

RIG_TEST(a_narrow_map_over_http, one_tenant)
{
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        Bfcd__Block block;
        struct reply r;

        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        get(&e, "/api/map.svg?partition=train&width=320", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_ptr_nonnull(strstr(r.body, "viewBox=\"0 0 360 "));
        free(r.all);
        exporter_stop(&e);
        session_end(red);
}

/* A curve of the last hour from its begin to its end, without repetitions: 0, + for so many bytes, - for unknown. A slow
 * exporter may have no sample in any of the slots, so there may be more that are unknown, but not at the end. */
static bool curve_is(json_t *slots, const char *expected, json_int_t n_bytes)
{
        char last = '-', value = '\0'; /* and the last one that is known */
        const char *next = expected;
        json_t *slot;
        size_t i;

        ck_assert_uint_eq(json_array_size(slots), HOUR_SLOTS);
        json_array_foreach(slots, i, slot)
        {
                json_int_t n = json_integer_value(slot);
                char c = json_is_null(slot) ? '-' : n == 0 ? '0' : n == n_bytes ? '+' : '?';

                if (c == *next)
                        next++;
                else if (c != '-' && c != value)
                        return false;
                value = c != '-' ? c : value;
                last = c;
        }
        return *next == '\0' && last == expected[strlen(expected) - 1];
}

static json_t *document_of(const struct exporter *e, const char *path)
{
        json_t *document;
        struct reply r;

        get(e, path, &r);
        ck_assert_int_eq(r.status, 200);
        document = json_loads(r.body, JSON_REJECT_DUPLICATES, NULL);
        ck_assert_msg(document != NULL, "%s", r.body);
        free(r.all);
        return document;
}

/* What the tenant red has, of whose memory the partition's is. */
struct has {
        json_int_t in_use, reserved;
};

static struct has red_has(const struct exporter *e)
{
        json_t *document = document_of(e, "/api/tenants"),
               *row = json_array_get(json_object_get(document, "tenants"), 0);
        struct has has = { number_of(row, "bytes_in_use"), number_of(row, "bytes_reserved") };

        json_decref(document);
        return has;
}

/* Of the partition and of the tenant red in it. */
static bool hour_is(const struct exporter *e, const char *expected, struct has has)
{
        json_t *document = document_of(e, "/api/hour"), *series, *each;
        bool is = true;
        size_t i;

        series = json_object_get(json_object_get(document, "hour"), "series");
        json_array_foreach(series, i, each)
        {
                ck_assert_str_eq(string_of(each, "partition"), "train");
                if (i > 0)
                        ck_assert_str_eq(string_of(each, "tenant"), "red");
                is = is && curve_is(json_object_get(each, "bytes_reserved"), expected, has.reserved) &&
                     curve_is(json_object_get(each, "bytes_in_use"), expected, has.in_use);
        }
        is = is && i == 2;
        json_decref(document);
        return is;
}

/* Sampled without a page. The exporter outlives a daemon, whose absence is a gap. */
RIG_TEST(the_last_hour_over_http, moves_clock)
{
        struct raw *red = session_open(rig->socket, "red");
        struct exporter e = exporter_start(rig);
        struct has has = { 0 };
        Bfcd__Block block;
        json_t *columns;

        ck_assert(WAIT_FOR(hour_is(&e, "-0", has), SETTLE_MS));
        rig_pass(rig, HOUR_SLOT_MS);
        ck_assert_int_eq(raw_malloc(red, 0, 3 * MIB, &block), 0);
        has = red_has(&e);
        ck_assert_int_eq(has.in_use, 3 * MIB);
        ck_assert_int_gt(has.reserved, has.in_use);
        rig_pass(rig, HOUR_SAMPLE_MS);
        ck_assert(WAIT_FOR(hour_is(&e, "-0+", has), SETTLE_MS));
        rig_terminate(rig);
        raw_close(red);
        __atomic_add_fetch(&rig->clock->passed_ms, 2 * HOUR_SLOT_MS, __ATOMIC_RELEASE);
        ck_assert(WAIT_FOR(hour_is(&e, "-0+-", has), SETTLE_MS));
        columns = document_of(&e, "/api/columns"); /* without a daemon */
        ck_assert_uint_gt(json_array_size(json_object_get(json_object_get(columns, "columns"), "tenants")),
                          5);
        json_decref(columns);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(is_served(&e), SETTLE_MS));
        __atomic_add_fetch(&rig->clock->passed_ms, HOUR_SAMPLE_MS, __ATOMIC_RELEASE);
        ck_assert(WAIT_FOR(hour_is(&e, "-0+-0", has), SETTLE_MS));
        exporter_stop(&e);
        rig_meet(rig);
}

RIG_TEST(wrong_maps_are_refused, one_tenant)
{
        static const struct {
                const char *path;
                int status;
                const char *error;
        } wrong[] = {
                { "/api/map.svg", 400, "A partition is needed" },
                { "/api/map.svg?partition", 400, "A partition is needed" },
                { "/api/map.svg?partition=", 400, "A partition is needed" },
                { "/api/map.svg?partition=train%00x", 400, "A partition is needed" },
                { "/api/map.svg?tenant=red", 400, "A partition is needed" },
                { "/api/map.svg?partition=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa%C3%A9",
                  404, "There is no partition 'aaaaaaaa" },
                { "/api/map.svg?partition=green", 404, "There is no partition 'green'; you can see: train" },
                { "/api/map.svg?partition=%3Cscript%3E%1b", 404, "There is no partition '<script>\\x1b'" },
                { "/api/map.svg?partition=train&width=239", 400,
                  "The width must be a number of pixels from 240 to 1000" },
                { "/api/map.svg?partition=train&width=1001", 400, "The width must be" },
                { "/api/map.svg?partition=train&width=-300", 400, "The width must be" },
                { "/api/map.svg?partition=train&width=4294967596", 400, "The width must be" },
                { "/api/map.svg?partition=train&width=300px", 400, "The width must be" },
                { "/api/map.svg?partition=train&width=", 400, "The width must be" },
                { "/api/map.svg/train", 404, "There are /, /metrics" },
        };
        struct exporter e = exporter_start(rig);
        struct reply r;

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
                json_t *document;

                get(&e, wrong[i].path, &r);
                ck_assert_msg(r.status == wrong[i].status, "%s: %d", wrong[i].path, r.status);
                ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: application/json"));
                document = json_loads(r.body, JSON_REJECT_DUPLICATES, NULL);
                ck_assert_ptr_nonnull(document);
                ck_assert_msg(strstr(string_of(document, "error"), wrong[i].error), "%s: %s", wrong[i].path,
                              r.body);
                json_decref(document);
                free(r.all);
        }
        exporter_stop(&e);
}

static size_t count(const char *text, const char *part)
{
        size_t n = 0;

        while ((text = strstr(text, part))) {
                text += strlen(part);
                n++;
        }
        return n;
}

/* Its script and its style are allowed by their hashes, and it names no other host. */
RIG_TEST(page_over_http, one_tenant)
{
        struct exporter e = exporter_start(rig);
        struct reply r;
        char *length;

        get(&e, "/", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_ptr_nonnull(strstr(r.all, "Content-Type: text/html; charset=utf-8\r\n"));
        ck_assert_ptr_nonnull(
                strstr(r.all, "Content-Security-Policy: default-src 'none'; script-src 'sha256-"));
        ck_assert_ptr_nonnull(strstr(r.all, "; style-src 'sha256-"));
        ck_assert_ptr_nonnull(strstr(r.all, "X-Content-Type-Options: nosniff\r\n"));
        ck_assert_ptr_null(strstr(r.all, "unsafe-"));
        ck_assert_int_eq(strncmp(r.body, "<!DOCTYPE html>", 15), 0);
        ck_assert_str_eq(r.body + strlen(r.body) - 8, "</html>\n");
        ck_assert_uint_eq(count(r.body, "<script>") + count(r.body, "<style>"), 2);
        ck_assert_uint_eq(count(r.body, "://"), 0);
        ck_assert_uint_eq(count(r.body, "src=") + count(r.body, "url("), 0);
        ck_assert_int_gt(asprintf(&length, "Content-Length: %zu\r\n", strlen(r.body)), 0);
        free(r.all);
        request(&e, "HEAD", "/", "", &r);
        ck_assert_int_eq(r.status, 200);
        ck_assert_str_eq(r.body, "");
        ck_assert_ptr_nonnull(strstr(r.all, length));
        free(r.all);
        free(length);
        get(&e, "/api/sessions", &r);
        ck_assert_ptr_nonnull(strstr(r.all, "Content-Security-Policy: default-src 'none'"));
        ck_assert_ptr_nonnull(strstr(r.all, "; sandbox\r\n"));
        free(r.all);
        exporter_stop(&e);
}

/* ---- what it refuses -------------------------------------------------------------------- */

RIG_TEST(other_requests_are_refused, one_tenant)
{
        static const char *const nowhere[] = { "/index.html", "/api/",           "/api/blocks",
                                               "/metrics/",   "/api/../metrics", "/etc/passwd" };
        static const char *const methods[] = { "POST", "PUT", "DELETE", "OPTIONS", "PATCH" };
        struct exporter e = exporter_start(rig);
        struct reply r;

        for (size_t i = 0; i < sizeof(nowhere) / sizeof(nowhere[0]); i++) {
                get(&e, nowhere[i], &r);
                ck_assert_msg(r.status == 404, "%s: %d", nowhere[i], r.status);
                free(r.all);
        }
        for (size_t i = 0; i < sizeof(methods) / sizeof(methods[0]); i++) {
                request(&e, methods[i], "/metrics", "Content-Length: 0\r\n", &r);
                ck_assert_msg(r.status == 405, "%s: %d", methods[i], r.status);
                ck_assert_ptr_nonnull(strstr(r.all, "Allow: GET, HEAD\r\n"));
                free(r.all);
        }
        exporter_stop(&e);
}

/* Clients that send half a request delay no other client, and are closed; so are those beyond the bound. */
RIG_TEST(idle_connections_are_closed, moves_clock)
{
        struct exporter e = exporter_start(rig);
        int fds[SERVE_CONNECTIONS - 1];
        char byte;

        for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
                fds[i] = try_connect(e.path);
                ck_assert_int_ge(fds[i], 0);
                ck_assert_int_eq(send(fds[i], "GET /met", 8, MSG_NOSIGNAL), 8);
        }
        ck_assert(is_served(&e));
        rig_pass(rig, (SERVE_TIMEOUT_S + 1) * 1000);
        ck_assert(is_served(&e)); /* which wakes the thread */
        for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++) {
                while (read(fds[i], &byte, 1) > 0)
                        ;
                close(fds[i]);
        }
        ck_assert(is_served(&e));
        exporter_stop(&e);
}

/* ---- without a daemon -------------------------------------------------------------------- */

RIG_TEST(the_daemon_may_be_away, one_tenant)
{
        struct exporter e = exporter_start(rig);
        struct reply r;

        ck_assert(is_served(&e));
        rig_terminate(rig);
        get(&e, "/metrics", &r);
        ck_assert_int_eq(r.status, 503);
        ck_assert_ptr_nonnull(strstr(r.body, "Cannot reach bfcd at "));
        free(r.all);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(is_served(&e), SETTLE_MS));
        exporter_stop(&e);
        rig_meet(rig);
}

RIG_TEST(only_the_monitor_socket_will_do, one_tenant)
{
        struct exporter e;
        struct reply r;

        strcpy(rig->monitor_socket, rig->admin_socket);
        e = exporter_start(rig);
        get(&e, "/metrics", &r);
        ck_assert_int_eq(r.status, 503);
        ck_assert_ptr_nonnull(strstr(r.body, "is not the monitor socket"));
        free(r.all);
        exporter_stop(&e);
}

/* It need not be private then. */
RIG_TEST(only_metrics_are_served, one_tenant)
{
        static const char *const others[] = { "/",         "/api/status",  "/api/sessions",
                                              "/api/hour", "/api/columns", "/api/map.svg?partition=train" };
        struct exporter e = exporter_start_with(rig, "--metrics-only");
        struct reply r;

        ck_assert(is_served(&e));
        for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
                get(&e, others[i], &r);
                ck_assert_int_eq(r.status, 404);
                ck_assert_ptr_nonnull(strstr(r.body, "There is only /metrics."));
                free(r.all);
        }
        exporter_stop(&e);
}

static int connect_from(in_addr_t from, in_port_t port)
{
        struct sockaddr_in source = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(from) };
        struct sockaddr_in address = { .sin_family = AF_INET,
                                       .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                                       .sin_port = port };
        struct timeval limit = { .tv_sec = SETTLE_MS / 1000 };
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_int_ge(fd, 0);
        (void)setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        ck_assert_int_eq(bind(fd, (struct sockaddr *)&source, sizeof(source)), 0);
        if (connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0)
                return fd;
        close(fd);
        return -1;
}

static bool is_port_up(in_port_t port)
{
        int fd = connect_from(INADDR_LOOPBACK, port);

        if (fd >= 0)
                close(fd);
        return fd >= 0;
}

/* A port that was free a moment ago. */
static in_port_t find_port(void)
{
        struct sockaddr_in address = { .sin_family = AF_INET };
        socklen_t n = sizeof(address);
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

        ck_assert_int_eq(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
        ck_assert_int_eq(getsockname(fd, (struct sockaddr *)&address, &n), 0);
        close(fd);
        return address.sin_port;
}

/* A pod that keeps its connections leaves some to Prometheus. */
RIG_TEST(one_address_has_few_connections, one_tenant)
{
        static const char get[] = "GET /metrics HTTP/1.0\r\n\r\n";
        in_port_t port = find_port();
        int fds[SERVE_CONNECTIONS - 2], fd;
        pid_t parent = getpid(), pid = fork();
        unsigned n_fds;
        char where[32];
        struct reply r;

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                snprintf(where, sizeof(where), "0.0.0.0:%u", ntohs(port));
                if (getppid() == parent)
                        execl(program(), "bfc-exporter", "--metrics-only", "--listen", where, "--socket",
                              rig->monitor_socket, (char *)NULL);
                _exit(127);
        }
        ck_assert(WAIT_FOR(is_port_up(port), SETTLE_MS));
        n_fds = process_count_fds(pid);
        for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
                fds[i] = connect_from(INADDR_LOOPBACK, port);
        fd = connect_from(INADDR_LOOPBACK + 1, port);
        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(send(fd, get, sizeof(get) - 1, MSG_NOSIGNAL), (ssize_t)sizeof(get) - 1);
        reply_read(fd, &r);
        ck_assert_int_eq(r.status, 200); /* so all that came before were accepted, or closed */
        free(r.all);
        ck_assert_uint_le(process_count_fds(pid), n_fds + SERVE_CONNECTIONS_OF_ADDRESS + 1);
        close(fd);
        for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
                close(fds[i]);
        child_kill(pid);
}

/* ---- the command line ---------------------------------------------------------------------- */

TEST(wrong_options)
{
        static const struct {
                const char *where;
                const char *said;
        } wrong[] = {
                { "0.0.0.0:9477", "not a loopback address" },
                { "[::]:9477", "not a loopback address" },
                { "localhost:9477", "not a numeric address" },
                { "127.0.0.1", "ADDRESS:PORT" },
                { "", "ADDRESS:PORT" },
                { "/nowhere/at/all", "No such file" },
        };
        char *err;

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
                ck_assert_int_eq(program_run(WORDS(program(), "--listen", wrong[i].where), NULL, &err), 1);
                ck_assert_msg(strstr(err, wrong[i].said), "%s: %s", wrong[i].where, err);
                free(err);
        }
        /* An address of documentation, which no machine has. */
        ck_assert_int_eq(
                program_run(WORDS(program(), "--metrics-only", "--listen", "192.0.2.1:9477"), NULL, &err), 1);
        ck_assert_msg(strstr(err, strerror(EADDRNOTAVAIL)), "%s", err);
        free(err);
        ck_assert_int_eq(program_run(WORDS(program(), "--no-such"), NULL, NULL), 2);
        ck_assert_int_eq(program_run(WORDS(program(), "more"), NULL, NULL), 2);
        ck_assert_int_eq(program_run(WORDS(program(), "--help"), NULL, NULL), 0);
        ck_assert_int_eq(program_run(WORDS(program(), "--version"), NULL, NULL), 0);
}

/* One that starts has each option once, in any place. */
TEST(options_are_given_once)
{
        char *err;

        ck_assert_int_eq(
                program_run(((const char *const[]){ program(), "--listen", "/a", "--listen", "/b", NULL }),
                            NULL, &err),
                2);
        ck_assert_str_eq(err, "bfc-exporter: an option is given twice: --listen; give it once\n");
        free(err);
}
