/* bfcctl tensorboard beside a real daemon: its values are those of `bfcctl --json tenants`, and its files have whole
 * records however it ends. TensorBoard itself reads them in python/tests/frameworks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#include "ctl/tensorboard.pb-c.h"
#include "ctl/tfrecord.h"
#include "tests/integration/json.h"

enum { REFUSED = 1, USAGE = 2 }; /* exit statuses */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 32MiB, growth: preallocate}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") TENANT_OF(
                "blue", "@UID@", "{partition: train, limit: 64MiB}, {partition: serve, limit: 8MiB}"),
};

/* ---- files --------------------------------------------------------------------------- */

static const char *logdir(const struct rig *rig)
{
        static char path[128];

        snprintf(path, sizeof(path), "%s/new/runs", rig->folder);
        return path;
}

/* The only file of the folder that is not set aside; false: there is none yet. */
static bool find_file(const struct rig *rig, char path[static 512])
{
        DIR *d = opendir(logdir(rig));
        const struct dirent *e;
        unsigned n = 0;

        while (d && (e = readdir(d))) {
                if (e->d_name[0] == '.' || strstr(e->d_name, ".aside"))
                        continue;
                ck_assert_msg(strncmp(e->d_name, "events.out.tfevents.", 20) == 0, "%s", e->d_name);
                snprintf(path, 512, "%s/%s", logdir(rig), e->d_name);
                n++;
        }
        if (d)
                closedir(d);
        ck_assert_uint_le(n, 1);
        return n == 1;
}

static uint64_t get_le(const uint8_t *at, unsigned n_bytes)
{
        uint64_t number = 0;

        while (n_bytes-- > 0)
                number = number << 8 | at[n_bytes];
        return number;
}

struct events {
        Tensorboard__Event *all[512];
        size_t n;
};

static void events_free(struct events *e)
{
        for (size_t i = 0; i < e->n; i++)
                tensorboard__event__free_unpacked(e->all[i], NULL);
        e->n = 0;
}

/* All events of the file so far. Asserts that it ends with a whole record; a write in progress may be seen in part. */
static void events_look(const struct rig *rig, bool is_in_progress, struct events *ret)
{
        static uint8_t bytes[1 << 20];
        char path[512];
        size_t n, at = 0;
        FILE *in;

        ret->n = 0;
        if (!find_file(rig, path))
                return;
        in = fopen(path, "re");
        ck_assert_ptr_nonnull(in);
        n = fread(bytes, 1, sizeof(bytes), in);
        ck_assert_uint_lt(n, sizeof(bytes));
        fclose(in);
        while (at < n) {
                uint64_t n_data = n - at >= TFRECORD_HEAD_BYTES ? get_le(bytes + at, 8) : n;
                const uint8_t *data = bytes + at + TFRECORD_HEAD_BYTES;

                if (is_in_progress && n - at < TFRECORD_HEAD_BYTES + n_data + TFRECORD_TAIL_BYTES)
                        return;
                ck_assert_uint_ge(n - at, TFRECORD_HEAD_BYTES + n_data + TFRECORD_TAIL_BYTES);
                ck_assert_uint_eq(get_le(bytes + at + 8, 4), tfrecord_mask(tfrecord_crc32c(bytes + at, 8)));
                ck_assert_uint_eq(get_le(data + n_data, 4), tfrecord_mask(tfrecord_crc32c(data, n_data)));
                ck_assert_uint_lt(ret->n, sizeof(ret->all) / sizeof(ret->all[0]));
                ret->all[ret->n] = tensorboard__event__unpack(NULL, n_data, data);
                ck_assert_ptr_nonnull(ret->all[ret->n]);
                ret->n++;
                at += TFRECORD_HEAD_BYTES + n_data + TFRECORD_TAIL_BYTES;
        }
        if (n > 0)
                ck_assert_str_eq(ret->all[0]->file_version, "brain.Event:2");
}

static void events_read(const struct rig *rig, struct events *ret)
{
        events_look(rig, false, ret);
}

/* -1: none. */
static int64_t last_step(const struct rig *rig, bool is_in_progress)
{
        struct events e;
        int64_t step;

        events_look(rig, is_in_progress, &e);
        step = e.n > 1 ? e.all[e.n - 1]->step : -1;
        events_free(&e);
        return step;
}

/* The value of a tag in a step; asserts that there is exactly one. */
static float value_of(const struct events *e, int64_t step, const char *partition, const char *tenant,
                      const char *name)
{
        char tag[256];
        float value = 0;
        unsigned n = 0;

        snprintf(tag, sizeof(tag), "%s/%s/%s", partition, tenant, name);
        for (size_t i = 1; i < e->n; i++) {
                ck_assert_int_eq(e->all[i]->what_case, TENSORBOARD__EVENT__WHAT_SUMMARY);
                for (size_t k = 0; e->all[i]->step == step && k < e->all[i]->summary->n_value; k++) {
                        if (strcmp(e->all[i]->summary->value[k]->tag, tag) != 0)
                                continue;
                        value = e->all[i]->summary->value[k]->simple_value;
                        n++;
                }
        }
        ck_assert_msg(n == 1, "%u values of %s in step %d", n, tag, (int)step);
        return value;
}

/* ---- the program ----------------------------------------------------------------------- */

struct started {
        const struct rig *rig;
        const char *socket;
        char out[96], err[96];
};

static void exec_program(void *started)
{
        const struct started *s = started;
        int out = open(s->out, O_WRONLY | O_CREAT | O_TRUNC, 0600),
            err = open(s->err, O_WRONLY | O_CREAT | O_TRUNC, 0600);

        REQUIRE(dup2(out, STDOUT_FILENO) >= 0 && dup2(err, STDERR_FILENO) >= 0, "dup2");
        execl(program_bfcctl(), "bfcctl", "--socket", s->socket, "tensorboard", "--interval", "1", "--logdir",
              logdir(s->rig), (char *)NULL);
        _exit(98);
}

static pid_t start(const struct rig *rig, struct started *s)
{
        *s = (struct started){ .rig = rig, .socket = rig->monitor_socket };
        snprintf(s->out, sizeof(s->out), "%s/out", rig->folder);
        snprintf(s->err, sizeof(s->err), "%s/err", rig->folder);
        return child_start(exec_program, s);
}

static bool says(const char *path, const char *part)
{
        char *text = file_text(path);
        bool found = text && strstr(text, part);

        free(text);
        return found;
}

/* ---- what is written ---------------------------------------------------------------------- */

static void assert_equal(const struct events *e, int64_t step, const json_t *row)
{
        static const char *const names[][2] = { { "BytesInUse", "bytes_in_use" },
                                                { "MaxBytesInUse", "peak_bytes_in_use" },
                                                { "BytesReserved", "bytes_reserved" },
                                                { "BytesLimit", "bytes_limit" },
                                                { "NumAllocs", "num_allocs" } };

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                float value =
                        value_of(e, step, string_of(row, "partition"), string_of(row, "tenant"), names[i][0]);

                ck_assert_msg(value == (float)number_of(row, names[i][1]), "%s: %f", names[i][1],
                              (double)value);
        }
}

RIG_TEST(values_are_those_of_tenants, two_tenants)
{
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", "serve");
        time_t begin = time(NULL);
        struct events e;
        char *out, *err, path[512];
        json_t *rows;
        void *p, *q;

        ck_assert_ok(bfc_malloc_flags(red, NULL, 20 * MIB + 12345, BFC_WHOLE, &p));
        ck_assert_ok(bfc_malloc_flags(red, NULL, 9 * MIB, BFC_WHOLE, &q));
        ck_assert_ok(bfc_free(red, q));
        ck_assert_ok(bfc_malloc_flags(blue, NULL, 3 * MIB, BFC_WHOLE, &p));
        ck_assert_int_eq(
                ctl(rig->monitor_socket,
                    WORDS("tensorboard", "--logdir", logdir(rig), "--interval", "1s", "--count", "2"), &out,
                    &err),
                0);
        ck_assert(find_file(rig, path));
        ck_assert_ptr_nonnull(strstr(out, path));
        ck_assert_int_eq(strncmp(out, "2 steps in ", 11), 0);
        ck_assert_str_eq(err, ""); /* no progress where no terminal is */
        rows = ctl_json(rig->monitor_socket, WORDS("--json", "tenants"));
        ck_assert_uint_eq(json_array_size(rows), 3);
        events_read(rig, &e);
        ck_assert_uint_eq(e.n, 1 + 2 * 3);
        for (int64_t step = 0; step < 2; step++)
                for (size_t i = 0; i < 3; i++)
                        assert_equal(&e, step, json_array_get(rows, i));
        ck_assert_float_eq(value_of(&e, 0, "train", "blue", "BytesInUse"), 0);
        ck_assert_float_gt(value_of(&e, 0, "train", "red", "MaxBytesInUse"),
                           value_of(&e, 0, "train", "red", "BytesInUse"));
        for (size_t i = 0; i < e.n; i++)
                ck_assert(e.all[i]->wall_time >= (double)begin &&
                          e.all[i]->wall_time <= (double)time(NULL) + 1);
        ck_assert(e.all[e.n - 1]->wall_time - e.all[1]->wall_time > 0.9); /* the interval */
        events_free(&e);
        json_decref(rows);
        free(out);
        free(err);
        bfc_disconnect(red);
        bfc_disconnect(blue);
}

RIG_TEST(one_tenant, two_tenants)
{
        struct events e;

        ck_assert_int_eq(
                ctl(rig->monitor_socket,
                    WORDS("tensorboard", "--logdir", logdir(rig), "--count", "1", "--tenant", "blue"), NULL,
                    NULL),
                0);
        events_read(rig, &e);
        ck_assert_uint_eq(e.n, 1 + 2);
        ck_assert_float_eq(value_of(&e, 0, "serve", "blue", "BytesLimit"), 8 << 20);
        ck_assert_float_eq(value_of(&e, 0, "train", "blue", "BytesLimit"), 64 << 20);
        events_free(&e);
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", logdir(rig), "--tenant", "green"), REFUSED,
                    "There is no tenant 'green'");
}

/* TensorBoard makes one curve of both files. */
RIG_TEST(steps_continue_in_the_same_folder, two_tenants)
{
        char path[512], aside[520];
        struct events e;

        for (int64_t i = 0; i < 2; i++) {
                free(ctl_text(rig, WORDS("tensorboard", "--logdir", logdir(rig), "--count", "1")));
                events_read(rig, &e);
                for (size_t k = 1; k < e.n; k++)
                        ck_assert_int_eq(e.all[k]->step, i);
                events_free(&e);
                ck_assert(find_file(rig, path));
                snprintf(aside, sizeof(aside), "%s.aside", path);
                ck_assert_int_eq(rename(path, aside), 0);
        }
}

RIG_TEST(wrong_use, two_tenants)
{
        char file[128];

        ctl_refuses(rig, WORDS("tensorboard"), USAGE, "no --logdir");
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", "x", "--interval", "0"), USAGE, "--interval");
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", "x", "--count", "0"), USAGE, "--count");
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", "x", "--json"), USAGE, "--json is not valid");
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", "x", "--logdir", "y"), USAGE,
                    "given twice: \"logdir\"");
        ctl_refuses(rig, WORDS("tenants", "--logdir", "x"), USAGE, "valid for tensorboard");
        snprintf(file, sizeof(file), "%s/x", rig->log_path);
        ctl_refuses(rig, WORDS("tensorboard", "--logdir", file), REFUSED, "Not a directory");
}

/* ---- how it ends ---------------------------------------------------------------------------- */

static const int endings[] = { SIGINT, SIGTERM };

LOOP_TEST(signals_end_it_with_a_whole_file, 2)
{
        struct rig *rig = rig_start(&two_tenants);
        struct started s;
        pid_t pid = start(rig, &s);

        ck_assert(WAIT_FOR(last_step(rig, true) >= 1, SETTLE_MS)); /* they are seen while it runs */
        ck_assert_int_eq(kill(pid, endings[_i]), 0);
        child_join(pid);
        ck_assert_int_ge(last_step(rig, false), 1);
        ck_assert(says(s.out, " steps in "));
        rig_stop(rig);
}

/* A limit of files stands for a full disk. */
RIG_TEST(a_full_disk_is_an_error_and_leaves_whole_records, two_tenants)
{
        char *command, *err;

        ck_assert_int_gt(
                asprintf(&command,
                         "ulimit -f 2; exec '%s' --socket '%s' tensorboard --logdir '%s' --interval 1",
                         program_bfcctl(), rig->monitor_socket, logdir(rig)),
                0);
        ck_assert_int_eq(program_run(WORDS("/bin/sh", "-c", command), NULL, &err), REFUSED);
        ck_assert_msg(strstr(err, "cannot be written: File too large. What was written before is complete."),
                      "%s", err);
        ck_assert_int_ge(last_step(rig, false), 0);
        free(command);
        free(err);
}

RIG_TEST(the_daemon_may_be_away, two_tenants)
{
        struct started s;
        int64_t step;
        pid_t pid;

        rig_terminate(rig);
        pid = start(rig, &s);
        ck_assert(WAIT_FOR(says(s.err, "Waiting for it."), SETTLE_MS));
        ck_assert(says(s.err, "Cannot reach bfcd at "));
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(last_step(rig, true) >= 0, SETTLE_MS));
        ck_assert(says(s.err, "bfcd answers again."));
        rig_meet(rig);
        rig_terminate(rig);
        rig->pid = rig_spawn_daemon(rig);
        ck_assert(WAIT_FOR(rig_answers(rig), SETTLE_MS));
        step = last_step(rig, true);
        ck_assert(WAIT_FOR(last_step(rig, true) > step, SETTLE_MS));
        ck_assert_int_eq(kill(pid, SIGTERM), 0);
        child_join(pid);
        rig_meet(rig);
}

TEST(a_folder_of_others_is_refused)
{
        struct rig *rig;
        char *command, *err;

        if (!is_root()) {
                printf("# skipped: not root\n");
                return;
        }
        rig = rig_start(&two_tenants);
        ck_assert_int_gt(
                asprintf(
                        &command,
                        "mkdir -m 0700 '%s/closed' && exec setpriv --reuid 65534 --regid 65534 --clear-groups "
                        "'%s' --socket '%s' tensorboard --logdir '%s/closed/x' --count 1",
                        rig->folder, program_bfcctl(), rig->monitor_socket, rig->folder),
                0);
        ck_assert_int_eq(program_run(WORDS("/bin/sh", "-c", command), NULL, &err), REFUSED);
        ck_assert_msg(strstr(err, "Permission denied"), "%s", err);
        free(command);
        free(err);
        rig_stop(rig);
}
