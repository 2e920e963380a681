/* bfcctl: every command as a table and as JSON, on the admin and the client socket, its exit codes,
 * and what reset-peaks means. The monitor socket is in test_monitor.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/json.h"

enum { REFUSED = 1, USAGE = 2 }; /* exit statuses */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: preallocate}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB, reserve: 16MiB") TENANT_OF(
                "blue", "@UID@", "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

/* A row of `bfcctl --json tenants`; the caller releases it. */
static json_t *tenant_row(const struct rig *rig, const char *tenant, const char *partition)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants")), *row = NULL;

        for (size_t i = 0; i < json_array_size(rows) && !row; i++) {
                json_t *candidate = json_array_get(rows, i);

                if (strcmp(string_of(candidate, "tenant"), tenant) == 0 &&
                    strcmp(string_of(candidate, "partition"), partition) == 0)
                        row = json_incref(candidate);
        }
        json_decref(rows);
        ck_assert_msg(row, "no row for %s in %s", tenant, partition);
        return row;
}

/* ---- lists ---------------------------------------------------------------- */

RIG_TEST(tenants_in_json, two_tenants)
{
        static const char *const tensorflows[] = {
                "bytes_in_use", "peak_bytes_in_use",  "bytes_requested",
                "bytes_limit",  "bytes_reserved",     "peak_bytes_reserved",
                "num_allocs",   "largest_alloc_size", "largest_free_block_bytes",
        };
        bfc_client *client = client_open(rig, "red", NULL);
        json_t *row;
        void *p;

        ck_assert_ok(bfc_malloc(client, 3000000, &p));
        row = tenant_row(rig, "red", "train");
        for (size_t i = 0; i < sizeof(tensorflows) / sizeof(tensorflows[0]); i++)
                (void)number_of(row, tensorflows[i]);
        ck_assert_int_eq(number_of(row, "bytes_in_use"), (json_int_t)rounded(3000000));
        ck_assert_int_eq(number_of(row, "bytes_requested"), 3000000);
        ck_assert_int_eq(number_of(row, "bytes_limit"), 64 << 20);
        ck_assert_int_eq(number_of(row, "bytes_guaranteed"), 16 << 20);
        ck_assert_int_eq(number_of(row, "num_blocks"), 1);
        ck_assert_int_eq(number_of(row, "num_sessions"), 1);
        json_decref(row);
        row = tenant_row(rig, "blue", "serve");
        ck_assert_int_eq(number_of(row, "bytes_reserved"), 8 << 20);
        json_decref(row);
        bfc_disconnect(client);
}

RIG_TEST(partitions_and_status_in_json, two_tenants)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "partitions")), *status, *devices;

        ck_assert_uint_eq(json_array_size(rows), 2);
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "partition"), "train");
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "growth"), "on-demand");
        ck_assert_str_eq(string_of(json_array_get(rows, 1), "growth"), "preallocate");
        ck_assert_str_eq(string_of(json_array_get(rows, 1), "share"),
                         rig_device() == ON_CUDA_IPC ? "cuda-ipc" : "fd");
        ck_assert_int_eq(number_of(json_array_get(rows, 0), "bytes_limit"), 96 << 20);
        ck_assert_int_eq(number_of(json_array_get(rows, 0), "num_tenants"), 2);
        ck_assert_int_eq(number_of(json_array_get(rows, 1), "bytes_reserved"), 8 << 20);
        json_decref(rows);
        status = ctl_json(rig->admin_socket, WORDS("--json", "status"));
        ck_assert_int_eq(number_of(status, "pid"), rig->pid);
        ck_assert_int_eq(number_of(status, "num_tenants"), 2);
        ck_assert_int_eq(number_of(status, "num_blocks"), 0);
        ck_assert_int_ge(number_of(status, "uptime_ms"), 0);
        ck_assert_str_eq(string_of(status, "version"), bfc_version());
        devices = json_object_get(status, "devices");
        ck_assert_uint_eq(json_array_size(devices), 1);
        ck_assert_str_eq(string_of(json_array_get(devices, 0), "device"), rig_device_id());
        ck_assert_str_eq(string_of(json_array_get(devices, 0), "state"), "ok");
        ck_assert_int_eq(number_of(json_array_get(devices, 0), "bytes_total"), 256 << 20);
        ck_assert_int_eq(number_of(json_array_get(devices, 0), "bytes_reserved"), 8 << 20);
        json_decref(status);
}

static void assert_pages(struct rig *rig, size_t row, json_int_t n_bytes)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "partitions"));
        json_int_t huge = number_of(json_array_get(rows, row), "bytes_in_2mib_pages");

        ck_assert_int_eq(huge + number_of(json_array_get(rows, row), "bytes_in_4kib_pages"), n_bytes);
        ck_assert_str_eq(string_of(json_array_get(rows, row), "pages"), n_bytes == 0      ? "-"
                                                                        : huge == n_bytes ? "2 MiB"
                                                                        : huge == 0       ? "4 KiB"
                                                                                          : "mixed");
        json_decref(rows);
}

TEST(pages_in_json)
{
        static const struct rig_config two_kinds = {
                .partitions = "      - {name: grows, limit: 64MiB}\n"
                              "      - {name: is_whole, limit: 64MiB, growth: preallocate}\n",
                .tenants =
                        TENANT_OF("red", "@UID@", "{partition: grows}, {partition: is_whole, limit: 8MiB}"),
        };
        bfc_client *client;
        struct rig *rig;
        void *p;

        if (rig_device() != ON_HOST)
                return;
        rig = rig_start(&two_kinds);
        client = client_open(rig, NULL, NULL);
        assert_pages(rig, 1, 8 << 20);
        assert_pages(rig, 0, 0);
        ck_assert_ok(bfc_malloc_in(client, "grows", 3 * MIB, &p));
        assert_pages(rig, 0, (json_int_t)rig_stats(rig, "red", "grows").bytes_reserved);
        bfc_disconnect(client);
        rig_stop(rig);
}

RIG_TEST(sessions_and_blocks_in_json, two_tenants)
{
        struct bfc_options options = {
                .struct_size = sizeof(options), .socket = rig->socket, .tenant = "red", .name = "a job"
        };
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        json_t *rows, *row = NULL;
        bfc_client *client;
        char id[32];
        void *p;

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_ok(bfc_malloc(client, 1000, &p));
        ck_assert_ok(bfc_block_info(client, p, &info));
        rows = ctl_json(rig->admin_socket, WORDS("--json", "sessions"));
        for (size_t i = 0; i < json_array_size(rows) && !row; i++) {
                if (strcmp(string_of(json_array_get(rows, i), "tenant"), "red") == 0)
                        row = json_array_get(rows, i);
        }
        ck_assert_ptr_nonnull(row);
        ck_assert_str_eq(string_of(row, "name"), "a job");
        ck_assert_str_eq(string_of(row, "state"), "live");
        ck_assert_int_eq(number_of(row, "pid"), getpid());
        ck_assert_int_eq(number_of(row, "uid"), (json_int_t)getuid());
        ck_assert_int_eq(number_of(row, "num_blocks"), 1);
        ck_assert_int_eq(number_of(row, "bytes_in_use"), 1024);
        json_decref(rows);

        rows = ctl_json(rig->admin_socket, WORDS("--json", "blocks"));
        ck_assert_uint_eq(json_array_size(rows), 1);
        row = json_array_get(rows, 0);
        snprintf(id, sizeof(id), "%llu", (unsigned long long)info.block_id);
        ck_assert_str_eq(string_of(row, "block_id"), id);
        ck_assert_str_eq(string_of(row, "tenant"), "red");
        ck_assert_str_eq(string_of(row, "partition"), "train");
        ck_assert_int_eq(number_of(row, "n_bytes"), 1024);
        ck_assert_int_eq(number_of(row, "n_requested"), 1000);
        ck_assert_int_eq(number_of(row, "offset"), (json_int_t)info.offset);
        ck_assert_int_eq(number_of(row, "region_id"), (json_int_t)info.region_id);
        json_decref(rows);
        bfc_disconnect(client);
}

/* The region of an exact block has an id of another kind. Many readers of JSON have no more than a double's 53 bits. */
RIG_TEST(ids_of_regions_are_exact_in_json, two_tenants)
{
        static const char *const lists[] = { "blocks", "extents" };
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        bfc_client *client = client_open(rig, "red", NULL);
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, "train", 32 * MIB, BFC_ONE_EXTENT, &p));
        ck_assert_ok(bfc_block_info(client, p, &info));
        ck_assert_uint_lt(info.region_id, UINT64_C(1) << 53);
        for (size_t i = 0; i < 2; i++) {
                json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", lists[i])), *row;
                size_t k, n = 0;

                json_array_foreach(rows, k, row) n +=
                        number_of(row, "n_bytes") == 32 * MIB &&
                        number_of(row, "region_id") == (json_int_t)info.region_id;
                ck_assert_uint_eq(n, 1);
                json_decref(rows);
        }
        bfc_disconnect(client);
}

/* More rows than a page holds. */
RIG_TEST(long_lists_are_complete, two_tenants)
{
        enum { N = 1000 };
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        json_t *rows;
        char *out, *line;
        uint64_t n_bytes;
        bool grows = true;
        size_t n = 0;
        void *p;

        for (unsigned i = 0; i < N; i++)
                ck_assert_ok(bfc_malloc(i % 2 ? red : blue, 256, &p));
        /* The daemon's tables grow with its first sessions; a list that stayed would grow with each. */
        for (unsigned i = 0; i < 50 && grows; i++) {
                n_bytes = rig_count(rig).bytes_allocated;
                rows = ctl_json(rig->admin_socket, WORDS("--json", "blocks"));
                ck_assert_uint_eq(json_array_size(rows), N);
                json_decref(rows);
                grows = rig_count(rig).bytes_allocated > n_bytes;
        }
        ck_assert(!grows);
        setenv("BFC_TENANT", "red", 1);
        rows = ctl_json(rig->socket, WORDS("--json", "blocks"));
        ck_assert_uint_eq(json_array_size(rows), N / 2);
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("blocks"), &out, NULL), 0);
        for (line = out; (line = strchr(line, '\n')); line++)
                n++;
        ck_assert_uint_eq(n, N + 1); /* and the heading */
        free(out);
        bfc_disconnect(red);
        bfc_disconnect(blue);
}

RIG_TEST(hundreds_of_sessions, two_tenants)
{
        enum { N = 300 };
        struct raw *sessions[N];
        json_t *rows;

        for (size_t i = 0; i < N; i++)
                ck_assert_ptr_nonnull((sessions[i] = raw_connect(rig->socket, i % 3 ? "red" : "blue")));
        rows = ctl_json(rig->admin_socket, WORDS("--json", "sessions"));
        ck_assert_uint_eq(json_array_size(rows), N + 1); /* and the rig's own; not the requester's */
        json_decref(rows);
        setenv("BFC_TENANT", "blue", 1);
        rows = ctl_json(rig->socket, WORDS("--json", "sessions"));
        ck_assert_uint_eq(json_array_size(rows), N / 3);
        json_decref(rows);
        for (size_t i = 0; i < N; i++)
                raw_close(sessions[i]);
}

/* A client chooses its name: it moves no cursor, fakes no line of the
 * log, and breaks no JSON. */
RIG_TEST(names_with_control_characters_are_escaped, two_tenants)
{
        static const char forged[] = "x\nerror: all is lost\x1b[2J\r\"\\\xff\xfe";
        struct bfc_options options = {
                .struct_size = sizeof(options), .socket = rig->socket, .tenant = "red", .name = forged
        };
        bfc_client *client;
        json_t *rows;
        char *out;
        void *no;

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_int_lt(bfc_malloc(client, 1 << 30, &no), 0); /* so that it is named in the log */
        rows = ctl_json(rig->admin_socket, WORDS("--json", "sessions"));
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("sessions"), &out, NULL), 0);
        for (const char *p = out; *p; p++)
                ck_assert_msg(*p == '\n' || ((unsigned char)*p >= ' ' && (unsigned char)*p != 0x7f),
                              "a control character in:\n%s", out);
        ck_assert_ptr_null(strstr(out, "\nerror"));
        free(out);
        bfc_disconnect(client);
        out = rig_log(rig);
        ck_assert_ptr_null(strstr(out, "\nerror"));
        ck_assert_ptr_null(strchr(out, '\x1b'));
        free(out);
        rig->forgiven = "all is lost"; /* inside of a line */
}

/* What a list prints on a terminal; NULL: the machine has none (/dev/pts). */
static char *ctl_on_terminal(const char *socket, const char *command, const char *argument)
{
        int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), end, status;
        char *text = NULL, piece[4096];
        size_t n_text;
        FILE *all;
        ssize_t n;
        pid_t pid;

        if (terminal < 0 || grantpt(terminal) < 0 || unlockpt(terminal) < 0)
                return NULL;
        end = open(ptsname(terminal), O_RDWR | O_NOCTTY | O_CLOEXEC);
        ck_assert_int_ge(end, 0);
        pid = fork();
        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                setenv("NO_COLOR", "1", 1);
                dup2(end, STDOUT_FILENO);
                execl(program_bfcctl(), "bfcctl", "--socket", socket, command, argument, NULL);
                _exit(127);
        }
        close(end);
        all = open_memstream(&text, &n_text);
        while ((n = read(terminal, piece, sizeof(piece))) > 0)
                fwrite(piece, 1, (size_t)n, all);
        fclose(all);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        close(terminal);
        return text;
}

/* On a terminal, a line for each tenant, session and so on has room, whatever they are called. In a pipe no
 * name is cut. */
TEST(tables_fit_a_terminal)
{
        static const char *const commands[] = { "status", "partitions", "tenants", "sessions",
                                                "blocks", "leaks",      "explain" };
        static const struct rig_config long_names = {
                .partitions = "      - {name: a-partition-with-a-long-name, limit: 96MiB}\n",
                .tenants = TENANT("a-tenant-with-a-long-name-too", "@UID@", "a-partition-with-a-long-name"),
        };
        struct rig *rig = rig_start(&long_names);
        bfc_client *client = client_open(rig, NULL, NULL);
        char *out;
        void *p;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
                out = ctl_on_terminal(rig->admin_socket, commands[i], NULL);
                for (const char *line = out; line && *line; line += strcspn(line, "\n") + 1)
                        ck_assert_msg(strcspn(line, "\r\n") <= 80, "bfcctl %s:\n%s", commands[i], out);
                ck_assert(!out || !strchr(out, '\033'));
                free(out);
                ck_assert_int_eq(ctl(rig->admin_socket, WORDS(commands[i]), &out, NULL), 0);
                ck_assert_msg(i == 0 || strstr(out, "a-partition-with-a-long-name") ||
                                      strstr(out, "a-tenant-with-a-long-name-too"),
                              "bfcctl %s:\n%s", commands[i], out);
                ck_assert_ptr_null(strchr(out, '\033'));
                free(out);
        }
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("-w", "sessions"), &out, NULL), 0);
        ck_assert_msg(strstr(out, "a-tenant-with-a-long-name-too") && strstr(out, "test_ctl"),
                      "no name or no command:\n%s", out);
        free(out);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* What one list shows in a row is in the same row of the next. */
RIG_TEST(rows_are_in_order, two_tenants)
{
        struct raw *sessions[20], *first = raw_connect(rig->socket, "red");
        json_int_t before = 0;
        json_t *rows;

        for (size_t i = 0; i < 20; i++)
                ck_assert_ptr_nonnull((sessions[i] = raw_connect(rig->socket, "red")));
        raw_close(first); /* its place is taken by the next */
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_sessions == 20, SETTLE_MS));
        first = raw_connect(rig->socket, "blue");
        rows = ctl_json(rig->admin_socket, WORDS("--json", "sessions"));
        for (size_t i = 0; i < json_array_size(rows); i++) {
                json_int_t id = number_of(json_array_get(rows, i), "session_id");

                ck_assert_int_gt(id, before);
                before = id;
        }
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants"));
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "tenant"), "blue");
        ck_assert_str_eq(string_of(json_array_get(rows, 2), "tenant"), "red");
        json_decref(rows);
        raw_close(first);
        for (size_t i = 0; i < 20; i++)
                raw_close(sessions[i]);
}

/* On a terminal the name of a lease is whole, whatever it is for. */
RIG_TEST(a_lease_is_named_on_a_terminal, two_tenants)
{
        char *out;

        free(ctl_text(rig, WORDS("lease", "create", "nightly-417", "--tenant", "blue", "--partition", "train",
                                 "--limit", "32MiB", "--ttl", "8h", "--cgroup", "/system.slice/n.service")));
        out = ctl_on_terminal(rig->admin_socket, "lease", "list");
        ck_assert_msg(!out || strstr(out, "nightly-417  blue    train      active "), "%s", out);
        free(out);
        ctl_says(rig, WORDS("--wide", "lease", "list"), "cgroup /system.slice/n.service");
}

TEST(lists_as_tables)
{
        const struct {
                const char *command;
                const char *words[5]; /* that must be there */
        } tables[] = {
                { "status", { "Max sessions", "Uptime", rig_device_id(), "ok", "256" } },
                { "partitions", { "PARTITION", "train", "serve", "RESERVED", "96.0 MiB" } },
                { "tenants", { "TENANT", "red", "blue", "train", "64" } },
                { "sessions", { "SESSION", "red", "live", "PID", "STATE" } },
                { "blocks", { "BLOCK", "red", "train", "SIZE", "1" } },
                { "whoami", { "Tenant", "Process", "Admin", "yes", "Matching" } },
                { "config", { "socket", "devices", "tenants", "train", "red" } },
        };
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = client_open(rig, "red", NULL);
        char *out, *err;
        void *p;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
                int status = ctl(rig->admin_socket, WORDS(tables[i].command), &out, &err);

                ck_assert_msg(status == 0, "bfcctl %s: status %d: %s", tables[i].command, status, err);
                ck_assert_str_eq(err, "");
                for (size_t k = 0; k < 5; k++)
                        ck_assert_msg(strstr(out, tables[i].words[k]), "no '%s' in bfcctl %s:\n%s",
                                      tables[i].words[k], tables[i].command, out);
                free(out);
                free(err);
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* The first line of the manual that has this, without what stands before it. */
static char *example_with(const char *what)
{
        FILE *page = fopen(MANUAL, "re");
        char *line = NULL, *at = NULL;
        size_t n_line = 0;

        ck_assert_ptr_nonnull(page);
        while (!at && getline(&line, &n_line, page) > 0)
                at = strstr(line, what);
        ck_assert_msg(at, "no '%s' in " MANUAL, what);
        at = strdup(at);
        ck_assert_ptr_nonnull(at);
        fclose(page);
        free(line);
        return at;
}

/* What the manual shows with jq, as it stands there. */
static char *run_example(const struct rig *rig, const char *what)
{
        char *example = example_with(what), *script, *out, *err;
        const char *argv[] = { "/bin/sh", "-c", NULL, NULL };

        ck_assert_int_gt(asprintf(&script, "bfcctl() { '%s' --socket '%s' \"$@\"; }; %s", program_bfcctl(),
                                  rig->admin_socket, example),
                         0);
        argv[2] = script;
        ck_assert_msg(program_run(argv, &out, &err) == 0, "%s: %s", example, err);
        free(example);
        free(script);
        free(err);
        return out;
}

TEST(examples_with_jq)
{
        enum { N = 60 }; /* of 64 MiB */
        struct rig *rig;
        bfc_client *client;
        json_t *row;
        void *p[N];
        char *out;

        if (system("command -v jq >/dev/null") != 0) {
                printf("# skipped: there is no jq\n");
                return;
        }
        rig = rig_start(&two_tenants);
        client = client_open(rig, "red", NULL);
        for (size_t i = 0; i < N; i++)
                ck_assert_ok(bfc_malloc(client, 1 * MIB, &p[i]));
        for (size_t i = 0; i < N; i += 2)
                ck_assert_ok(bfc_free(client, p[i]));
        ck_assert_int_ge(bfc_trim(client, SIZE_MAX), 0);
        row = tenant_row(rig, "red", "train");
        ck_assert_int_ge(number_of(row, "bytes_reserved"), 58 << 20);
        ck_assert_int_lt(number_of(row, "bytes_in_use"), 50 << 20);
        json_decref(row);
        out = run_example(rig, "bfcctl --json tenants | jq");
        ck_assert_str_eq(out, "blue\nred\n"); /* blue in serve, where all is made in advance */
        free(out);
        out = run_example(rig, "bfcctl --json sessions | jq");
        text_has(out, "\"tenant\": \"red\"");
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- the client socket, and the choice of a socket ------------------------ */

RIG_TEST(a_tenant_sees_its_own_rows, two_tenants)
{
        json_t *rows, *user;
        char *out, *err;

        setenv("BFC_TENANT", "blue", 1);
        rows = ctl_json(rig->socket, WORDS("--json", "tenants"));
        ck_assert_uint_eq(json_array_size(rows), 2);
        for (size_t i = 0; i < 2; i++)
                ck_assert_str_eq(string_of(json_array_get(rows, i), "tenant"), "blue");
        json_decref(rows);
        user = ctl_json(rig->socket, WORDS("--json", "whoami"));
        ck_assert_str_eq(string_of(user, "tenant"), "blue");
        ck_assert(json_is_false(json_object_get(user, "admin")));
        ck_assert_uint_eq(json_array_size(json_object_get(user, "matching_tenants")), 2);
        json_decref(user);
        ck_assert_int_eq(ctl(rig->socket, WORDS("status"), &out, NULL), 0);
        ck_assert_msg(strstr(out, "\nResident        -\n") && strstr(out, "\nLongest turn    -\n"), "%s",
                      out);
        free(out);
        ck_assert_int_eq(ctl(rig->socket, WORDS("partitions"), NULL, NULL), 0);
        ck_assert_int_eq(ctl(rig->socket, WORDS("sessions"), NULL, NULL), 0);

        ck_assert_int_eq(ctl(rig->socket, WORDS("reset-peaks"), &out, &err), REFUSED);
        ck_assert_str_eq(out, "");
        ck_assert_ptr_nonnull(strstr(err, "admin"));
        free(out);
        free(err);
        ck_assert_int_eq(ctl(rig->socket, WORDS("--json", "config"), &out, &err), REFUSED);
        ck_assert_str_eq(out, "");
        ck_assert_str_ne(err, "");
        free(out);
        free(err);
}

RIG_TEST(the_environment_names_the_socket, two_tenants)
{
        const char *argv[] = { program_bfcctl(), "--json", "whoami", NULL };
        char *out;

        setenv("BFC_SOCKET", rig->socket, 1);
        ck_assert_int_eq(program_run(argv, &out, NULL), 0);
        text_has(out, "\"admin\": false");
        setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1);
        ck_assert_int_eq(program_run(argv, &out, NULL), 0);
        text_has(out, "\"admin\": true");
}

/* ---- what an operator does ------------------------------------------------ */

RIG_TEST(the_printed_config_can_be_loaded, two_tenants)
{
        json_t *text;
        char *out, *err;

        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("config"), &out, NULL), 0);
        rig_write_config(rig, out);
        ck_assert_msg(program_check(rig->config_path, &err) == 0, "what it shows is no config: %s", err);
        free(err);
        text = ctl_json(rig->admin_socket, WORDS("--json", "config"));
        ck_assert_str_eq(json_string_value(text), out);
        json_decref(text);
        free(out);
}

static void assert_peaks(const struct rig *rig, uint64_t peak, uint64_t lifetime_peak)
{
        json_t *row = tenant_row(rig, "red", "train");

        ck_assert_int_eq(number_of(row, "peak_bytes_in_use"), (json_int_t)peak);
        ck_assert_int_eq(number_of(row, "lifetime_peak_bytes_in_use"), (json_int_t)lifetime_peak);
        ck_assert_int_ge(number_of(row, "peak_bytes_reserved"), (json_int_t)peak);
        ck_assert_int_ge(number_of(row, "lifetime_peak_bytes_reserved"), (json_int_t)lifetime_peak);
        json_decref(row);
}

RIG_TEST(reset_peaks, two_tenants)
{
        bfc_client *client = client_open(rig, "red", NULL);
        char *out, *err;
        void *p, *q;

        ck_assert_ok(bfc_malloc(client, 5 * MIB, &p));
        ck_assert_ok(bfc_malloc(client, 20 * MIB, &q));
        ck_assert_ok(bfc_free(client, q));
        assert_peaks(rig, 25 * MIB, 25 * MIB);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks", "blue"), NULL, NULL), 0);
        assert_peaks(rig, 25 * MIB, 25 * MIB); /* not its turn */
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks", "red", "train"), &out, NULL), 0);
        ck_assert_str_ne(out, "");
        free(out);
        assert_peaks(rig, 5 * MIB, 25 * MIB); /* back to the present; what was, was */
        ck_assert_ok(bfc_malloc(client, 2 * MIB, &q));
        assert_peaks(rig, 7 * MIB, 25 * MIB);
        ck_assert_ok(bfc_free(client, q));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("--json", "reset-peaks"), &out, NULL), 0);
        text_has(out, "\"schema\": 1");
        assert_peaks(rig, 0, 25 * MIB);
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &p));
        assert_peaks(rig, 30 * MIB, 30 * MIB);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks", "nobody"), NULL, &err), REFUSED);
        ck_assert_str_ne(err, "");
        free(err);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks"), NULL, NULL), 0);
        assert_peaks(rig, 0, 30 * MIB); /* also without a session */
        ck_assert_uint_eq(rig_stats(rig, "red", "train").peak_bytes_reserved, 0);
}

/* The error of an unknown name lists the known ones. */
RIG_TEST(unknown_names_are_refused, two_tenants)
{
        static const struct {
                const char *words[5];
                const char *says;
        } runs[] = {
                { { "explain", "nosuch" },
                  "bfcctl: there is no partition 'nosuch'; you can see: train, serve\n" },
                { { "explain", "--tenant=nosuch" },
                  "bfcctl: there is no tenant 'nosuch'; you can see: red in train, blue in train, blue in serve\n" },
                { { "explain", "serve", "--tenant=red" },
                  "bfcctl: no quota for 'red' in 'serve'; you can see: red in train, blue in train, " },
                { { "trim", "nosuch" }, "bfcctl: there is no tenant 'nosuch'; you can see: " },
                { { "reset-peaks", "red", "nosuch" },
                  "bfcctl: no quota for 'red' in 'nosuch'; you can see: " },
                { { "leaks", "--tenant=nosuch" },
                  "bfcctl: There is no tenant 'nosuch'; you can see: blue, red\n" },
        };
        char *err;

        for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
                ck_assert_int_eq(ctl(rig->admin_socket, runs[i].words, NULL, &err), REFUSED);
                ck_assert_msg(strncmp(err, runs[i].says, strlen(runs[i].says)) == 0, "%s: %s",
                              runs[i].words[0], err);
                free(err);
        }
}

/* ---- help, mistyped words and empty lists ----------------------------------------- */

RIG_TEST(a_command_has_its_own_help, two_tenants)
{
        char *text = ctl_text(rig, WORDS("lease", "--help"));

        ck_assert_ptr_nonnull(strstr(text, "\n  lease create NAME"));
        ck_assert_ptr_nonnull(strstr(text, "[--ttl TIME]"));
        ck_assert_ptr_nonnull(strstr(text, "\n  lease end NAME"));
        ck_assert_msg(!strstr(text, "leaks"), "another command: %s", text);
        free(text);
        ctl_says(rig, WORDS("run", "--help"), "run a program in a lease of its own");
        ctl_says(rig, WORDS("--help"), "leaks [--older TIME]");
}

RIG_TEST(a_mistyped_word_has_a_suggestion, two_tenants)
{
        ctl_refuses(rig, WORDS("sessoins"), USAGE,
                    "unknown command \"sessoins\"; did you mean \"bfcctl sessions\"?");
        ctl_refuses(rig, WORDS("leaks", "--oldre", "10m"), USAGE, "did you mean \"--older\"?");
        ctl_refuses(rig, WORDS("leaks", "--odler=10m"), USAGE, "did you mean \"--older\"?");
        ctl_refuses(rig, WORDS("frobnicate"), USAGE, "\"bfcctl --help\" lists them");
}

/* The error, and how that part of the command is called: not the others. */
RIG_TEST(a_wrong_use_shows_the_right_one, two_tenants)
{
        static const char
                create[] = "; usage: bfcctl lease create NAME [--tenant TENANT] --partition NAME ",
                set[] = "usage: bfcctl lease set NAME [--limit SIZE] [--reserve SIZE] [--ttl TIME]\n";
        const struct {
                const char *words[6], *error, *use;
        } wrong[] = {
                { { "lease", "create" }, "an argument is missing after \"create\"", create },
                { { "lease", "create", "one", "two" }, "too many arguments from \"two\"", create },
                { { "lease", "create", "one" }, "--tenant, --partition and --limit are needed", create },
                { { "lease", "set", "one" }, "nothing to set; ", set },
                { { "lease", "set", "one", "--pid", "1" }, "--pid is not valid for lease \"set\"; ", set },
                { { "lease", "list", "x" }, "too many arguments from \"x\"; usage: bfcctl lease list ", "" },
                { { "lease", "ends", "one" },
                  "unknown argument \"ends\"; did you mean \"bfcctl lease end\"?\n",
                  "" },
                { { "lease" },
                  "an argument is missing after \"lease\"; usage: bfcctl lease create|list|set|end; ",
                  "" },
                { { "wait", "nothing" },
                  "unknown argument \"nothing\"; usage: bfcctl wait lease|room; ",
                  "" },
                { { "wait", "room", "train" },
                  "an argument is missing after \"train\"; ",
                  "usage: bfcctl wait room PARTITION SIZE [--tenant TENANT] [--timeout TIME]\n" },
                { { "wait", "lease", "one", "--tenant", "red" },
                  "--tenant is not valid for wait \"lease\"; ",
                  "usage: bfcctl wait lease NAME [--timeout TIME]\n" },
        };

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
                char *err;

                ck_assert_int_eq(ctl(rig->admin_socket, wrong[i].words, NULL, &err), USAGE);
                ck_assert_msg(strstr(err, wrong[i].error) && strstr(err, wrong[i].use), "%s", err);
                ck_assert_msg(strlen(err) < 300 && !strstr(err, "; or "), "%s", err);
                free(err);
        }
}

RIG_TEST(empty_lists_say_so, two_tenants)
{
        static const char *const lists[][3] = {
                { "blocks", NULL, "No blocks.\n" },         { "shared", NULL, "No shared blocks.\n" },
                { "keep", NULL, "No kept blocks.\n" },      { "leaks", NULL, "No leaks.\n" },
                { "waiting", NULL, "No request waits.\n" }, { "lease", "list", "No leases.\n" },
        };

        for (size_t i = 0; i < sizeof(lists) / sizeof(lists[0]); i++) {
                char *text = ctl_text(rig, WORDS(lists[i][0], lists[i][1]));

                ck_assert_str_eq(text, lists[i][2]);
                free(text);
        }
}

/* The one that is ended, and by whom. */
RIG_TEST(an_evicted_session_is_named, two_tenants)
{
        bfc_client *client = client_open(rig, "red", NULL);
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "sessions")), *row = NULL;
        char id[24], words[160];

        for (size_t i = 0; i < json_array_size(rows); i++)
                if (strcmp(string_of(json_array_get(rows, i), "tenant"), "red") == 0)
                        row = json_array_get(rows, i);
        ck_assert_ptr_nonnull(row);
        snprintf(id, sizeof(id), "%lld", (long long)number_of(row, "session_id"));
        ctl_says(rig, WORDS("evict", id, "--reason", "enough"), "was evicted");
        snprintf(words, sizeof(words),
                 "session %s (tenant 'red', uid %u, pid %d, %s): disconnected: evicted by an operator", id,
                 (unsigned)getuid(), (int)getpid(), string_of(row, "name"));
        ck_assert_msg(WAIT_FOR(rig_logged(rig, words), SETTLE_MS), "not in the log: %s", words);
        ck_assert(rig_logged(rig, "(operator, uid "));
        ck_assert(!rig_logged(rig, "no hello yet"));
        json_decref(rows);
        bfc_disconnect(client);
}

/* ---- views ----------------------------------------------------------------------- */

RIG_TEST(lists_are_sorted_and_have_chosen_columns, two_tenants)
{
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        json_t *rows;
        char *text;
        void *p;

        ck_assert_ok(bfc_malloc(red, 2 << 20, &p));
        ck_assert_ok(bfc_malloc(blue, 1 << 20, &p));
        rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants", "--sort", "in-use"));
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "tenant"), "red");
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants", "--sort", "tenant"));
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "tenant"), "blue");
        json_decref(rows);
        text = ctl_text(rig, WORDS("tenants", "--sort", "IN-USE", "--columns", "tenant,num_waiting"));
        ck_assert_msg(strncmp(text, "TENANT  WAITING\nred ", 20) == 0, "%s", text);
        free(text);
        ctl_refuses(rig, WORDS("tenants", "--sort", "colour"), USAGE,
                    "--sort: there is no column \"colour\"; the columns are: TENANT, PARTITION, ");
        ctl_refuses(rig, WORDS("tenants", "--columns", "tenant,"), USAGE,
                    "--columns: there is no column \"\"");
        ctl_refuses(rig, WORDS("status", "--sort", "x"), USAGE, "not valid for");
        for (const char *const *name = WORDS("one", "two"); *name; name++)
                free(ctl_text(rig, WORDS("lease", "create", *name, "--tenant", "red", "--partition", "train",
                                         "--unit", **name == 'o' ? "one.service" : "two.service", "--limit",
                                         **name == 'o' ? "2MiB" : "4MiB")));
        text = ctl_text(rig, WORDS("lease", "list", "--sort", "limit", "--columns", "lease"));
        ck_assert_str_eq(text, "LEASE\ntwo\none\n");
        free(text);
        ctl_refuses(rig, WORDS("lease", "list", "--sort", "colour"), USAGE, "the columns are: LEASE, ");
        ctl_refuses(rig, WORDS("lease", "end", "one", "--sort", "lease"), USAGE,
                    "--sort is not valid for lease \"end\"");
        bfc_disconnect(red);
        bfc_disconnect(blue);
}

/* The first lines of what a command of the shell prints; "S" is bfcctl with the admin socket. */
static FILE *begin_shell(const struct rig *rig, const char *command)
{
        char *script;
        FILE *f;

        ck_assert_int_gt(asprintf(&script, "S() { exec '%s' --socket '%s' \"$@\"; }; %s", program_bfcctl(),
                                  rig->admin_socket, command),
                         0);
        f = popen(script, "re");
        ck_assert_ptr_nonnull(f);
        free(script);
        return f;
}

RIG_TEST(a_list_is_watched, two_tenants)
{
        FILE *f = begin_shell(rig,
                              "S --json status --watch 1 | grep --max-count=2 --line-buffered num_tenants");
        char line[128];
        unsigned n = 0;

        while (fgets(line, sizeof(line), f))
                n++;
        ck_assert_uint_eq(n, 2);
        pclose(f);
}

/* A session that is refused something, again and again, each for longer than a look takes. */
static void be_refused(void *arg)
{
        for (;;) {
                bfc_client *red = child_client_open(((const struct rig *)arg)->socket, "red");
                void *p;

                REQUIRE(bfc_malloc(red, 1 << 20, &p) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_malloc(red, 100 << 20, &p) == -EDQUOT, "it was not refused");
                sleep(3);
                bfc_disconnect(red);
        }
}

RIG_TEST(events_are_lines_of_json, two_tenants)
{
        static const char *const expected[] = { "session_begin", "refusal", "eviction", "session_end" };
        FILE *f = begin_shell(rig, "S events & echo $!; wait $!");
        pid_t pid, child = child_start(be_refused, rig);
        bool seen[4] = { false };
        char line[4096], id[24];

        ck_assert_ptr_nonnull(fgets(line, sizeof(line), f));
        pid = (pid_t)strtol(line, NULL, 10);
        while (!seen[0] || !seen[1] || !seen[2] || !seen[3]) {
                json_t *event;

                ck_assert_msg(fgets(line, sizeof(line), f), "no more events");
                event = json_loads(line, 0, NULL);
                ck_assert_msg(event, "%s", line);
                ck_assert_str_eq(string_of(event, "tenant"), "red");
                if (strcmp(string_of(event, "event"), "refusal") == 0) {
                        ck_assert_int_eq(number_of(event, "n_bytes"), 100 << 20);
                        snprintf(id, sizeof(id), "%lld", (long long)number_of(event, "session_id"));
                        (void)ctl(rig->admin_socket, WORDS("evict", id), NULL, NULL); /* it may have ended */
                }
                for (size_t i = 0; i < 4; i++)
                        seen[i] = seen[i] || strcmp(string_of(event, "event"), expected[i]) == 0;
                json_decref(event);
                if (child > 0 && seen[0] && seen[1] && seen[2]) {
                        child_kill(child); /* an evicted session ends with its process */
                        child = 0;
                }
        }
        ck_assert_int_eq(kill(pid, SIGTERM), 0);
        pclose(f);
}

RIG_TEST(wait_ends_when_it_has_come, two_tenants)
{
        bfc_client *blue = client_open(rig, "blue", NULL);
        void *p;

        ctl_refuses(rig, WORDS("wait", "room", "nowhere", "1MiB", "--tenant", "blue"), REFUSED,
                    "There is no partition 'nowhere'");
        ctl_refuses(rig, WORDS("wait", "room", "serve", "1MiB", "--tenant", "red", "--timeout", "0"), REFUSED,
                    "Tenant 'red' has no quota in partition 'serve'");
        ctl_refuses(rig, WORDS("wait", "room", "serve", "1MiB", "--tenant", "nothing"), REFUSED,
                    "There is no tenant 'nothing'");
        ctl_refuses(rig, WORDS("wait", "room", "train", "1TiB", "--tenant", "blue", "--timeout", "0"),
                    REFUSED, "1.0 TiB is more than the limit of tenant 'blue' in partition 'train', ");
        ctl_says(rig, WORDS("wait", "room", "train", "16MiB", "--tenant", "blue", "--timeout", "60"), "");
        ck_assert_ok(bfc_malloc(blue, 60 << 20, &p));
        ctl_refuses(rig, WORDS("wait", "room", "train", "16MiB", "--tenant", "blue", "--timeout", "0"), 3,
                    "Timeout");
        ctl_says(rig, WORDS("wait", "lease", "nothing"), "");
        ctl_says(rig,
                 WORDS("lease", "create", "one", "--tenant", "red", "--partition", "train", "--limit", "2MiB",
                       "--user", "root"),
                 "");
        ctl_refuses(rig, WORDS("wait", "lease", "one", "--timeout", "0"), 3, "Timeout");
        ctl_says(rig, WORDS("lease", "end", "one"), "");
        ctl_says(rig, WORDS("wait", "lease", "one", "--timeout", "60"), "");
        bfc_disconnect(blue);
}

/* ---- the samples of docs/operations.md -------------------------------------------
 *
 * Not that of systemctl status: systemd prints it, which is not here. Its status line is the daemon's, and
 * test_service.c looks at it. */

/* With one blank for several, and without numbers: those of a sample are of another machine. So "2m 39s" is as "9.0 s". */
static char *shape_of(const char *text)
{
        char *ret = strdup(text), *to = ret;

        ck_assert_ptr_nonnull(ret);
        for (const char *c = text; *c; c++)
                if ((*c < '0' || *c > '9') && *c != '.' && (*c != ' ' || to == ret || to[-1] != ' ') &&
                    (*c != 'm' || c == text || c[-1] < '0' || c[-1] > '9'))
                        *to++ = *c;
        *to = '\0';
        return ret;
}

/* Each of the first n lines is in the document. */
static void documented(char *text, size_t n)
{
        static char page[1 << 17];
        FILE *f = fopen(OPERATIONS, "re");
        char *shape, *rest = text;

        ck_assert_ptr_nonnull(f);
        page[fread(page, 1, sizeof(page) - 1, f)] = '\0';
        fclose(f);
        shape = shape_of(page);
        for (size_t i = 0; i < n; i++) {
                char *line = shape_of(strsep(&rest, "\n"));

                ck_assert_msg(*line && strstr(shape, line), "not in " OPERATIONS ": %s", line);
                free(line);
        }
        free(shape);
        free(text);
}

static const struct rig_config of_operations = {
        .partitions = "      - {name: train, limit: 256MiB}\n",
        .tenants = TENANT("vision", "@UID@", "train, limit: 256MiB"),
};

RIG_TEST(samples_come_from_a_run, of_operations)
{
        struct rig_config lower = of_operations;
        char *out, *err, command[512];
        bfc_client *client;
        void *p;
        FILE *f;

        if (rig_device() != ON_HOST)
                return;
        snprintf(command, sizeof(command), "'%s' --generate transformer | '%s' --socket '%s' --verify -",
                 program_replay(), program_replay(), rig->socket);
        f = popen(command, "re");
        ck_assert_ptr_nonnull(f);
        out = NULL;
        ck_assert_int_gt(getdelim(&out, &(size_t){ 0 }, '\0', f), 0);
        ck_assert_int_eq(pclose(f), 0);
        for (const char *const *line = WORDS("Operations", "Peak", "Peak reserved", "Corruptions"); *line;
             line++) {
                char *at = strstr(out, *line);

                ck_assert_msg(at, "no %s: %s", *line, out);
                documented(strndup(at, strcspn(at, "\n")), 1);
        }
        free(out);
        documented(ctl_text(rig, WORDS("--wide", "tenants")), 1);
        lower.tenants = TENANT("vision", "@UID@", "train, limit: 128MiB");
        rig_rewrite_config(rig, &lower);
        documented(ctl_text(rig, WORDS("reload", "--dry-run")), 2);
        client = client_open(rig, "vision", NULL);
        ck_assert_ok(bfc_malloc(client, 1 << 20, &p));
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("drain", "host", "--wait", "0"), &out, &err), 3);
        ck_assert_ptr_nonnull(strstr(out, "Device host is draining; still in use: "));
        documented(strdup(strchr(out, '\n') + 1), 1);
        documented(err, 1);
        free(out);
        ctl_says(rig, WORDS("resume", "host"), "Device host is resumed.");
        bfc_disconnect(client);
}

/* The rows' last numbers that may be unknown are known: what the request lacks, and when blue's may be served. */
static bool is_estimated(const struct rig *rig)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "waiting")), *row;
        bool ret = json_array_size(rows) == 3 &&
                   json_is_integer(json_object_get(json_array_get(rows, 0), "estimate_ms"));
        size_t i;

        json_array_foreach(rows, i, row) ret = ret && json_is_integer(json_object_get(row, "bytes_lacking"));
        json_decref(rows);
        return ret;
}

/* What blue has returned makes an estimate for its next request. */
RIG_TEST(the_sample_of_waiting_comes_from_a_run, two_tenants)
{
        struct raw *holder = session_open(rig->socket, "red"), *blue = session_open(rig->socket, "blue"),
                   *red = session_open(rig->socket, "red");
        Bfcd__Block block;

        if (rig_device() == ON_HOST) {
                ck_assert_int_eq(raw_malloc(blue, 0, 20 * MIB, &block), 0);
                session_end(blue);
                ck_assert_int_eq(raw_malloc(holder, 0, 60 * MIB, &block), 0);
                blue = session_open(rig->socket, "blue");
                (void)session_send_malloc(blue, 60 * MIB, 600000);
                (void)session_send_malloc(red, 40 * MIB, 600000);
                (void)session_send_malloc(red, MIB, 600000);
                ck_assert(WAIT_FOR(is_estimated(rig), SETTLE_MS));
                documented(ctl_text(rig, WORDS("waiting")), 4);
        }
        session_end(blue);
        session_end(red);
        session_end(holder);
}

/* ---- exit codes ----------------------------------------------------------- */

RIG_TEST(exit_codes, two_tenants)
{
        static const struct {
                const char *words[5];
                int status;
        } runs[] = {
                { { NULL }, USAGE },
                { { "frobnicate" }, USAGE },
                { { "--frobnicate", "status" }, USAGE },
                { { "status", "stray" }, USAGE },
                { { "reset-peaks", "a", "b", "c" }, USAGE },
                { { "reset-peaks", "red", "nowhere" }, REFUSED },
                { { "--help" }, 0 },
                { { "-h" }, 0 },
                { { "--version" }, 0 },
                { { "status" }, 0 },
        };
        char *out, *err;

        for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
                int status = ctl(rig->admin_socket, runs[i].words, &out, &err);
                const char *what = runs[i].words[0] ? runs[i].words[0] : "";

                ck_assert_msg(status == runs[i].status, "bfcctl %s: status %d: %s", what, status, err);
                ck_assert_msg((*err == '\0') == (status == 0), "bfcctl %s: stderr is '%s'", what, err);
                ck_assert_msg((*out == '\0') == (status != 0), "bfcctl %s: stdout is '%s'", what, out);
                free(out);
                free(err);
        }
        ck_assert_int_eq(ctl("/nowhere/bfcd.sock", WORDS("status"), &out, &err), REFUSED);
        ck_assert_str_eq(out, "");
        ck_assert_str_eq(err, "bfcctl: Cannot reach bfcd at /nowhere/bfcd.sock: the socket does not exist. "
                              "Try: systemctl status bfcd\n");
        free(out);
        free(err);
}
