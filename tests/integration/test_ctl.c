/* bfcctl: every command as a table and as JSON, on both sockets, its exit codes,
 * and what reset-peaks means.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <jansson.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/harness.h"

enum { REFUSED = 1, USAGE = 2 }; /* exit statuses */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: preallocate}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: [@UID@]}\n"
                   "    quotas: [{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}]\n",
};

/* Runs bfcctl with up to four words. */
static int ctl(const char *socket, const char *const words[4], char **ret_out, char **ret_err)
{
        const char *argv[8] = { program_bfcctl(), "--socket", socket };

        for (size_t i = 0; i < 4 && words[i]; i++)
                argv[3 + i] = words[i];
        return program_run(argv, ret_out, ret_err);
}

#define WORDS(...) ((const char *const[4]){ __VA_ARGS__ })

/* The value under `key` of a command's document; the caller releases it. */
static json_t *ctl_json(const char *socket, const char *command, const char *key)
{
        char *out, *err;
        json_error_t error;
        json_t *document, *value;
        int status = ctl(socket, WORDS("--json", command), &out, &err);

        ck_assert_msg(status == 0, "bfcctl --json %s: status %d: %s", command, status, err);
        ck_assert_str_eq(err, "");
        document = json_loads(out, JSON_REJECT_DUPLICATES, &error);
        ck_assert_msg(document, "bfcctl --json %s: line %d: %s", command, error.line, error.text);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "schema")), 1);
        value = json_incref(json_object_get(document, key));
        ck_assert_msg(value, "no \"%s\" in: %s", key, out);
        json_decref(document);
        free(out);
        free(err);
        return value;
}

static json_int_t number_of(const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);

        ck_assert_msg(json_is_integer(value), "\"%s\" is no number", key);
        return json_integer_value(value);
}

static const char *string_of(const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);

        ck_assert_msg(json_is_string(value), "\"%s\" is no string", key);
        return json_string_value(value);
}

/* A row of `bfcctl --json tenants`; the caller releases it. */
static json_t *tenant_row(const struct rig *rig, const char *tenant, const char *partition)
{
        json_t *rows = ctl_json(rig->admin_socket, "tenants", "tenants"), *row = NULL;

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

START_TEST(tenants_in_json)
{
        static const char *const tensorflows[] = {
                "bytes_in_use", "peak_bytes_in_use",  "bytes_requested",
                "bytes_limit",  "bytes_reserved",     "peak_bytes_reserved",
                "num_allocs",   "largest_alloc_size", "largest_free_block_bytes",
        };
        struct rig *rig = rig_start(&two_tenants);
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
        rig_stop(rig);
}
END_TEST

START_TEST(partitions_and_status_in_json)
{
        struct rig *rig = rig_start(&two_tenants);
        json_t *rows = ctl_json(rig->admin_socket, "partitions", "partitions"), *status, *devices;

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
        status = ctl_json(rig->admin_socket, "status", "status");
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
        rig_stop(rig);
}
END_TEST

/* By what was made, and not by what the config asks for. */
START_TEST(pages_in_json)
{
        static const struct rig_config two_kinds = {
                .partitions = "      - {name: small, limit: 64MiB, huge_pages: off}\n"
                              "      - {name: large, limit: 64MiB, growth: preallocate}\n",
                .tenants = "  - name: red\n"
                           "    match: {uid: [@UID@]}\n"
                           "    quotas: [{partition: small}, {partition: large, limit: 8MiB}]\n",
        };
        bfc_client *client;
        struct rig *rig;
        json_int_t huge;
        json_t *rows;
        void *p;

        if (rig_device() != ON_HOST)
                return;
        rig = rig_start(&two_kinds);
        client = client_open(rig, NULL, NULL);
        rows = ctl_json(rig->admin_socket, "partitions", "partitions");
        huge = number_of(json_array_get(rows, 1), "bytes_in_2mib_pages");
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "pages"), "-"); /* there is none yet */
        ck_assert_int_eq(huge + number_of(json_array_get(rows, 1), "bytes_in_4kib_pages"), 8 << 20);
        ck_assert_str_eq(string_of(json_array_get(rows, 1), "pages"), huge == 8 << 20 ? "2 MiB"
                                                                      : huge == 0     ? "4 KiB"
                                                                                      : "mixed");
        json_decref(rows);
        ck_assert_ok(bfc_malloc_in(client, "small", 3 * MIB, &p));
        rows = ctl_json(rig->admin_socket, "partitions", "partitions");
        ck_assert_int_eq(number_of(json_array_get(rows, 0), "bytes_in_2mib_pages"), 0);
        ck_assert_int_eq(number_of(json_array_get(rows, 0), "bytes_in_4kib_pages"),
                         number_of(json_array_get(rows, 0), "bytes_reserved"));
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "pages"), "4 KiB");
        json_decref(rows);
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

START_TEST(sessions_and_blocks_in_json)
{
        struct rig *rig = rig_start(&two_tenants);
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
        rows = ctl_json(rig->admin_socket, "sessions", "sessions");
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

        rows = ctl_json(rig->admin_socket, "blocks", "blocks");
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
        rig_stop(rig);
}
END_TEST

/* More rows than a page holds. */
START_TEST(long_lists_come_whole)
{
        enum { N = 1000 };
        struct rig *rig = rig_start(&two_tenants);
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
                rows = ctl_json(rig->admin_socket, "blocks", "blocks");
                ck_assert_uint_eq(json_array_size(rows), N);
                json_decref(rows);
                grows = rig_count(rig).bytes_allocated > n_bytes;
        }
        ck_assert(!grows);
        setenv("BFC_TENANT", "red", 1);
        rows = ctl_json(rig->socket, "blocks", "blocks");
        ck_assert_uint_eq(json_array_size(rows), N / 2);
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("blocks"), &out, NULL), 0);
        for (line = out; (line = strchr(line, '\n')); line++)
                n++;
        ck_assert_uint_eq(n, N + 1); /* and the heading */
        free(out);
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}
END_TEST

START_TEST(hundreds_of_sessions)
{
        enum { N = 300 };
        struct rig *rig = rig_start(&two_tenants);
        struct raw *sessions[N];
        json_t *rows;

        for (size_t i = 0; i < N; i++)
                ck_assert_ptr_nonnull((sessions[i] = raw_connect(rig->socket, i % 3 ? "red" : "blue")));
        rows = ctl_json(rig->admin_socket, "sessions", "sessions");
        ck_assert_uint_eq(json_array_size(rows), N + 1); /* and the rig's own; not the asker's */
        json_decref(rows);
        setenv("BFC_TENANT", "blue", 1);
        rows = ctl_json(rig->socket, "sessions", "sessions");
        ck_assert_uint_eq(json_array_size(rows), N / 3);
        json_decref(rows);
        for (size_t i = 0; i < N; i++)
                raw_close(sessions[i]);
        rig_stop(rig);
}
END_TEST

/* A client's name is the client's word: it moves no cursor, fakes no line of the
 * log, and breaks no JSON. */
START_TEST(names_forge_nothing)
{
        static const char forged[] = "x\nerror: all is lost\x1b[2J\r\"\\\xff\xfe";
        struct rig *rig = rig_start(&two_tenants);
        struct bfc_options options = {
                .struct_size = sizeof(options), .socket = rig->socket, .tenant = "red", .name = forged
        };
        bfc_client *client;
        json_t *rows;
        char *out;
        void *no;

        ck_assert_ok(bfc_connect(&options, &client));
        ck_assert_int_lt(bfc_malloc(client, 1 << 30, &no), 0); /* so that it is named in the log */
        rows = ctl_json(rig->admin_socket, "sessions", "sessions");
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
        rig_stop(rig);
}
END_TEST

/* A line for each tenant, session and so on has room on a terminal, whatever they are called. */
START_TEST(tables_fit_a_terminal)
{
        static const char *const commands[] = { "status", "partitions", "tenants", "sessions",
                                                "blocks", "leaks",      "explain" };
        static const struct rig_config long_names = {
                .partitions = "      - {name: a-partition-with-a-long-name, limit: 96MiB}\n",
                .tenants = "  - name: a-tenant-with-a-long-name-too\n"
                           "    match: {uid: [@UID@]}\n"
                           "    quotas: [{partition: a-partition-with-a-long-name}]\n",
        };
        struct rig *rig = rig_start(&long_names);
        bfc_client *client = client_open(rig, NULL, NULL);
        char *out;
        void *p;

        ck_assert_ok(bfc_malloc(client, 1 * MIB, &p));
        for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++) {
                ck_assert_int_eq(ctl(rig->admin_socket, WORDS(commands[i]), &out, NULL), 0);
                for (const char *line = out; *line; line += strcspn(line, "\n") + 1)
                        ck_assert_msg(strcspn(line, "\n") <= 80, "bfcctl %s:\n%s", commands[i], out);
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
END_TEST

/* What one list shows in a row is in the same row of the next. */
START_TEST(rows_are_in_order)
{
        struct rig *rig = rig_start(&two_tenants);
        struct raw *sessions[20], *first = raw_connect(rig->socket, "red");
        json_int_t before = 0;
        json_t *rows;

        for (size_t i = 0; i < 20; i++)
                ck_assert_ptr_nonnull((sessions[i] = raw_connect(rig->socket, "red")));
        raw_close(first); /* its place is taken by the next */
        ck_assert(WAIT_FOR(rig_figures(rig, "red", "train").num_sessions == 20, SETTLE_MS));
        first = raw_connect(rig->socket, "blue");
        rows = ctl_json(rig->admin_socket, "sessions", "sessions");
        for (size_t i = 0; i < json_array_size(rows); i++) {
                json_int_t id = number_of(json_array_get(rows, i), "session_id");

                ck_assert_int_gt(id, before);
                before = id;
        }
        json_decref(rows);
        rows = ctl_json(rig->admin_socket, "tenants", "tenants");
        ck_assert_str_eq(string_of(json_array_get(rows, 0), "tenant"), "blue");
        ck_assert_str_eq(string_of(json_array_get(rows, 2), "tenant"), "red");
        json_decref(rows);
        raw_close(first);
        for (size_t i = 0; i < 20; i++)
                raw_close(sessions[i]);
        rig_stop(rig);
}
END_TEST

START_TEST(lists_as_tables)
{
        const struct {
                const char *command;
                const char *words[5]; /* that must be there */
        } tables[] = {
                { "status", { "Version", "Uptime", rig_device_id(), "ok", "256" } },
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
END_TEST

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

START_TEST(examples_with_jq)
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
        ck_assert_ptr_nonnull(strstr(out, "\"tenant\": \"red\""));
        free(out);
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

/* ---- the two sockets ------------------------------------------------------ */

START_TEST(a_tenant_sees_itself)
{
        struct rig *rig = rig_start(&two_tenants);
        json_t *rows, *who;
        char *out, *err;

        setenv("BFC_TENANT", "blue", 1);
        rows = ctl_json(rig->socket, "tenants", "tenants");
        ck_assert_uint_eq(json_array_size(rows), 2);
        for (size_t i = 0; i < 2; i++)
                ck_assert_str_eq(string_of(json_array_get(rows, i), "tenant"), "blue");
        json_decref(rows);
        who = ctl_json(rig->socket, "whoami", "whoami");
        ck_assert_str_eq(string_of(who, "tenant"), "blue");
        ck_assert(json_is_false(json_object_get(who, "admin")));
        ck_assert_uint_eq(json_array_size(json_object_get(who, "matching_tenants")), 2);
        json_decref(who);
        ck_assert_int_eq(ctl(rig->socket, WORDS("status"), NULL, NULL), 0);
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
        rig_stop(rig);
}
END_TEST

START_TEST(the_environment_names_the_socket)
{
        struct rig *rig = rig_start(&two_tenants);
        const char *argv[] = { program_bfcctl(), "--json", "whoami", NULL };
        char *out;

        setenv("BFC_SOCKET", rig->socket, 1);
        ck_assert_int_eq(program_run(argv, &out, NULL), 0);
        ck_assert_ptr_nonnull(strstr(out, "\"admin\": false"));
        free(out);
        setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1);
        ck_assert_int_eq(program_run(argv, &out, NULL), 0);
        ck_assert_ptr_nonnull(strstr(out, "\"admin\": true"));
        free(out);
        rig_stop(rig);
}
END_TEST

/* ---- what an operator does ------------------------------------------------ */

START_TEST(the_config_in_force_is_a_config)
{
        struct rig *rig = rig_start(&two_tenants);
        json_t *text;
        char *out, *err;

        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("config"), &out, NULL), 0);
        rig_write_config(rig, out);
        ck_assert_msg(program_check(rig->config_path, &err) == 0, "what it shows is no config: %s", err);
        free(err);
        text = ctl_json(rig->admin_socket, "config", "config");
        ck_assert_str_eq(json_string_value(text), out);
        json_decref(text);
        free(out);
        rig_stop(rig);
}
END_TEST

static void assert_peaks(const struct rig *rig, uint64_t peak, uint64_t lifetime_peak)
{
        json_t *row = tenant_row(rig, "red", "train");

        ck_assert_int_eq(number_of(row, "peak_bytes_in_use"), (json_int_t)peak);
        ck_assert_int_eq(number_of(row, "lifetime_peak_bytes_in_use"), (json_int_t)lifetime_peak);
        ck_assert_int_ge(number_of(row, "peak_bytes_reserved"), (json_int_t)peak);
        ck_assert_int_ge(number_of(row, "lifetime_peak_bytes_reserved"), (json_int_t)lifetime_peak);
        json_decref(row);
}

START_TEST(reset_peaks)
{
        struct rig *rig = rig_start(&two_tenants);
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
        ck_assert_ptr_nonnull(strstr(out, "\"schema\": 1"));
        free(out);
        assert_peaks(rig, 0, 25 * MIB);
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &p));
        assert_peaks(rig, 30 * MIB, 30 * MIB);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks", "nobody"), NULL, &err), REFUSED);
        ck_assert_str_ne(err, "");
        free(err);
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks"), NULL, NULL), 0);
        assert_peaks(rig, 0, 30 * MIB); /* also when nobody is there any more */
        ck_assert_uint_eq(rig_figures(rig, "red", "train").peak_bytes_reserved, 0);
        rig_stop(rig);
}
END_TEST

/* A name that is wrong is told with those that are right. */
START_TEST(wrong_names)
{
        static const struct {
                const char *words[4];
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
        struct rig *rig = rig_start(&two_tenants);
        char *err;

        for (size_t i = 0; i < sizeof(runs) / sizeof(runs[0]); i++) {
                ck_assert_int_eq(ctl(rig->admin_socket, runs[i].words, NULL, &err), REFUSED);
                ck_assert_msg(strncmp(err, runs[i].says, strlen(runs[i].says)) == 0, "%s: %s",
                              runs[i].words[0], err);
                free(err);
        }
        rig_stop(rig);
}
END_TEST

/* ---- exit codes ----------------------------------------------------------- */

START_TEST(exit_codes)
{
        static const struct {
                const char *words[4];
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
        struct rig *rig = rig_start(&two_tenants);
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
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = {
                tenants_in_json,
                partitions_and_status_in_json,
                pages_in_json,
                sessions_and_blocks_in_json,
                long_lists_come_whole,
                hundreds_of_sessions,
                names_forge_nothing,
                examples_with_jq,
                tables_fit_a_terminal,
                rows_are_in_order,
                lists_as_tables,
                a_tenant_sees_itself,
                the_environment_names_the_socket,
                the_config_in_force_is_a_config,
                reset_peaks,
                wrong_names,
                exit_codes,
                NULL,
        };

        return harness_main(harness_suite("bfcctl", tests));
}
