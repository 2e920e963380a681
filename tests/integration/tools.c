/* See tools.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/tools.h"

#include <ctype.h>
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void rig_rewrite_config(struct rig *rig, const struct rig_config *config)
{
        char *text = rig_config_text(rig, config);

        rig_write_config(rig, text);
        free(text);
}

/* ---- bfcctl ---------------------------------------------------------------- */

int ctl(const char *socket, const char *const *words, char **ret_out, char **ret_err)
{
        const char *argv[24] = { program_bfcctl(), "--socket", socket };

        for (size_t i = 0; words[i]; i++) {
                ck_assert_uint_lt(i + 4, sizeof(argv) / sizeof(argv[0]));
                argv[3 + i] = words[i];
        }
        return program_run(argv, ret_out, ret_err);
}

char *ctl_text(const struct rig *rig, const char *const *words)
{
        char *out, *err;
        int status = ctl(rig->admin_socket, words, &out, &err);

        ck_assert_msg(status == 0, "bfcctl %s: %d: %s%s", words[0], status, out, err);
        free(err);
        return out;
}

void ctl_says(const struct rig *rig, const char *const *words, const char *part)
{
        text_has(ctl_text(rig, words), part);
}

void ctl_refuses(const struct rig *rig, const char *const *words, int status, const char *part)
{
        char *out, *err;
        int got = ctl(rig->admin_socket, words, &out, &err);

        ck_assert_msg(got == status && strstr(err, part), "bfcctl %s: %d: %s%s", words[0], got, out, err);
        free(out);
        free(err);
}

void make_trace(const char *path, const char *generator, const char *scale)
{
        const char *argv[] = { program_replay(),         "--generate", generator,
                               scale ? "--scale" : NULL, scale,        NULL };
        char *csv, *err;
        FILE *out;
        int status = program_run(argv, &csv, &err);

        ck_assert_msg(status == 0, "--generate %s: status %d: %s", generator, status, err);
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        fputs(csv, out);
        fclose(out);
        free(csv);
        free(err);
}

void text_has(char *text, const char *part)
{
        ck_assert_msg(text && strstr(text, part), "no '%s' in: %s", part, text ? text : "nothing");
        free(text);
}

uint64_t rig_n_waiting(struct rig *rig, const char *tenant)
{
        Bfcd__Explain explain = BFCD__EXPLAIN__INIT;
        Bfcd__Request request = REQUEST(EXPLAIN, explain, &explain);
        Bfcd__Reply *reply;
        uint64_t n = 0;

        explain.tenant = (char *)(uintptr_t)(tenant ? tenant : "");
        ck_assert_int_eq(raw_call(rig->admin, &request, &reply), 0);
        ck_assert_int_eq(reply->body_case, BFCD__REPLY__BODY_EXPLAIN);
        for (size_t i = 0; i < reply->explain->n_rows; i++)
                n += reply->explain->rows[i]->num_waiting;
        bfcd__reply__free_unpacked(reply, NULL);
        return n;
}

/* ---- the log and the process ------------------------------------------------- */

bool rig_logged(const struct rig *rig, const char *words)
{
        char *log = rig_log(rig);
        bool has = log && strstr(log, words);

        free(log);
        return has;
}

unsigned process_count_fds(pid_t pid)
{
        struct dirent *entry;
        char path[64];
        unsigned n = 0;
        DIR *folder;

        snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
        folder = opendir(path);
        ck_assert_ptr_nonnull(folder);
        while ((entry = readdir(folder)))
                n += entry->d_name[0] != '.';
        closedir(folder);
        return n;
}

/* The process with this pid is the daemon's keeper of this GPU. */
static bool is_keeper(const struct rig *rig, const char *pid, const char *id)
{
        char path[64], line[128] = "";
        int parent = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/%.20s/stat", pid);
        f = fopen(path, "re");
        if (!f)
                return false;
        if (fscanf(f, "%*d (bfcd-keeper) %*c %d", &parent) != 1)
                parent = 0;
        fclose(f);
        if (parent != (int)rig->pid)
                return false;
        snprintf(path, sizeof(path), "/proc/%.20s/cmdline", pid);
        f = fopen(path, "re");
        if (!f)
                return false;
        (void)!fread(line, 1, sizeof(line) - 1, f);
        fclose(f);
        return strcmp(line + strlen(line) + 1, id) == 0; /* its first argument */
}

pid_t rig_keeper(const struct rig *rig, const char *id)
{
        struct dirent *entry;
        DIR *folder = opendir("/proc");
        pid_t pid = 0;

        ck_assert_ptr_nonnull(folder);
        while (pid == 0 && (entry = readdir(folder)))
                if (is_keeper(rig, entry->d_name, id))
                        pid = (pid_t)atoi(entry->d_name);
        closedir(folder);
        return pid;
}

/* ---- sessions by hand ---------------------------------------------------------- */

struct raw *session_open(const char *socket, const char *tenant)
{
        struct raw *raw = raw_connect(socket, tenant);

        ck_assert_msg(raw, "no session: %s", raw_refusal());
        return raw;
}

void session_end(struct raw *raw)
{
        ck_assert_msg(raw_goodbye(raw) == 0, "goodbye: %s", raw_refusal());
        raw_close(raw);
}

static uint64_t send_request(struct raw *raw, Bfcd__Request *request, Bfcd__Request__BodyCase body_case)
{
        request->body_case = body_case;
        ck_assert_int_eq(raw_send(raw, request), 0);
        return request->id;
}

uint64_t session_send_malloc(struct raw *raw, uint64_t n_bytes, uint32_t wait_ms)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;

        body.n_bytes = n_bytes;
        body.wait_ms = wait_ms;
        request.malloc = &body;
        return send_request(raw, &request, BFCD__REQUEST__BODY_MALLOC);
}

uint64_t session_send_free(struct raw *raw, uint64_t block_id)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Free body = BFCD__FREE__INIT;

        body.block_id = block_id;
        request.free = &body;
        return send_request(raw, &request, BFCD__REQUEST__BODY_FREE);
}

uint64_t session_send_ack(struct raw *raw, uint64_t sequence)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Ack body = BFCD__ACK__INIT;

        body.sequence = sequence;
        request.ack = &body;
        return send_request(raw, &request, BFCD__REQUEST__BODY_ACK);
}

/* ---- clients ------------------------------------------------------------------- */

bfc_client *client_connect(const struct bfc_options *options)
{
        bfc_client *client = NULL;

        ck_assert_ok(bfc_connect(options, &client));
        return client;
}

bfc_client *child_connect(const struct bfc_options *options)
{
        bfc_client *client = NULL;

        REQUIRE(bfc_connect(options, &client) == 0, "%s", bfc_last_error());
        return client;
}

bfc_client *client_open(const struct rig *rig, const char *tenant, const char *partition)
{
        return client_with(.socket = rig->socket, .tenant = tenant, .partition = partition);
}

bfc_client *child_client_open(const char *socket, const char *tenant)
{
        return child_client_with(.socket = socket, .tenant = tenant,
                                 .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD);
}

int client_refused(const struct rig *rig, const char *tenant, const char *partition)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = rig->socket,
                                       .tenant = tenant,
                                       .partition = partition };
        bfc_client *client = NULL;
        int r = bfc_connect(&options, &client);

        if (r == 0)
                bfc_disconnect(client);
        return r < 0 && !client ? r : -1;
}

struct bfc_client_stats client_stats(bfc_client *client)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };

        REQUIRE(bfc_stats(client, &stats) == 0, "%s", bfc_last_error());
        return stats;
}

void block_fill(bfc_client *client, void *p, size_t n_bytes, uint64_t seed)
{
        char *bytes = malloc(n_bytes);

        pattern_write(bytes, n_bytes, seed);
        REQUIRE(bfc_write(client, p, bytes, n_bytes) == 0, "%s", bfc_last_error());
        free(bytes);
}

bool block_has(bfc_client *client, const void *p, size_t n_bytes, uint64_t seed)
{
        char *bytes = malloc(n_bytes);
        bool has;

        REQUIRE(bfc_read(client, bytes, p, n_bytes) == 0, "%s", bfc_last_error());
        has = pattern_holds(bytes, n_bytes, seed);
        free(bytes);
        return has;
}

struct bfc_tenant_usage client_usage(bfc_client *client, const char *partition)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };

        ck_assert_ok(bfc_usage(client, partition, &usage));
        return usage;
}

uint64_t rounded(uint64_t n_bytes)
{
        return (n_bytes + GRANULE - 1) / GRANULE * GRANULE;
}

bool has_stats(const char *sentence)
{
        for (; *sentence; sentence++) {
                if (isdigit((unsigned char)*sentence))
                        return true;
        }
        return false;
}

static uint64_t pattern_word(uint64_t seed, uint64_t i)
{
        uint64_t x = (seed + 1) * UINT64_C(0x9e3779b97f4a7c15) + i * UINT64_C(0xd1342543de82ef95);

        return x ^ (x >> 29);
}

void pattern_write(void *ptr, size_t n_bytes, uint64_t seed)
{
        size_t n_tail = n_bytes % sizeof(uint64_t), at = 0;
        uint8_t *p = ptr;
        uint64_t word;

        for (; at < n_bytes - n_tail; at += sizeof(word)) {
                word = pattern_word(seed, at);
                memcpy(p + at, &word, sizeof(word));
        }
        word = pattern_word(seed, at);
        memcpy(p + at, &word, n_tail);
}

bool pattern_holds(const void *ptr, size_t n_bytes, uint64_t seed)
{
        size_t n_tail = n_bytes % sizeof(uint64_t), at = 0;
        const uint8_t *p = ptr;
        uint64_t word, found;

        for (; at < n_bytes - n_tail; at += sizeof(word)) {
                memcpy(&found, p + at, sizeof(found));
                if (found != pattern_word(seed, at))
                        return false;
        }
        word = pattern_word(seed, at);
        return memcmp(p + at, &word, n_tail) == 0;
}

bool all_bytes_are(const void *ptr, size_t n_bytes, uint8_t value)
{
        const uint8_t *p = ptr;

        return n_bytes == 0 || (p[0] == value && memcmp(p, p + 1, n_bytes - 1) == 0);
}
