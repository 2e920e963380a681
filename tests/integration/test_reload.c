/* A daemon that reads its config again, as operators make it do, while clients work.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/integration/load.h"
#include "tests/integration/tools.h"

static const struct rig_config begins = {
        .partitions = "      - {name: train, limit: 128MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB"),
};

/* red is smaller, and blue comes. */
static const struct rig_config goes_on = {
        .partitions = "      - {name: train, limit: 112MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 32MiB, reserve: 4MiB")
                TENANT("blue", "@UID@", "train, limit: 48MiB"),
};

/* Its exit status; what it printed, which the caller frees. */
static int reload(struct rig *rig, const char *option, char **ret_stdout, char **ret_stderr)
{
        return ctl(rig->admin_socket, WORDS("reload", option), ret_stdout, ret_stderr);
}

static void must_reload(struct rig *rig)
{
        char *said = NULL;
        int status = reload(rig, NULL, NULL, &said);

        ck_assert_msg(status == 0, "bfcctl reload: %d: %s", status, said);
        free(said);
}

/* ---- what operators do ---------------------------------------------------- */

RIG_TEST(a_new_limit_and_a_new_tenant, begins)
{
        bfc_client *client = client_open(rig, NULL, NULL), *other;
        char *said = NULL;
        void *held, *ptr;

        ck_assert_ok(bfc_malloc(client, 48 * MIB, &held));
        memset(held, 7, 48 * MIB);
        rig_rewrite_config(rig, &goes_on);
        ck_assert_int_eq(reload(rig, NULL, &said, NULL), 0);
        ck_assert_str_eq(said, "partition 'train': limit is 112MiB, was 128MiB\n"
                               "tenant 'red' in partition 'train': limit is 32MiB, was 64MiB; it has "
                               "48MiB reserved, 16MiB above the limit, and gets no more until it is "
                               "below\n"
                               "tenant 'red' in partition 'train': reserve is 4MiB, was 0\n"
                               "tenant 'blue' is new\n"
                               "tenant 'blue': new quota in partition 'train': limit 48MiB, reserve 0\n");
        free(said);
        ck_assert(all_bytes_are(held, 48 * MIB, 7)); /* no memory is released */
        ck_assert_int_eq(bfc_malloc(client, 2 * MIB, &ptr), -EDQUOT);
        other = client_open(rig, "blue", NULL);
        ck_assert_ok(bfc_malloc(other, 48 * MIB, &ptr));
        ck_assert_ok(bfc_free(client, held));
        ck_assert_ok(bfc_malloc(client, 32 * MIB, &held));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_limit, 32 * MIB);
        bfc_disconnect(client);
        bfc_disconnect(other);
        rig_rewrite_config(rig, &begins);
        must_reload(rig);
        ck_assert_int_eq(client_refused(rig, "blue", NULL), -EACCES);
}

RIG_TEST(a_bad_file_changes_nothing, begins)
{
        static const struct rig_config bad = {
                .partitions = "      - {name: train, limit: 128MiB, growth: preallocate}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 20MiB, colour: red"),
        };
        bfc_client *client = client_open(rig, NULL, NULL);
        char *said = NULL, *out = NULL, expected[160];

        rig->forgiven = "reload: ";
        rig_rewrite_config(rig, &bad);
        ck_assert_int_eq(reload(rig, NULL, &out, &said), 1);
        ck_assert_str_eq(out, "");
        snprintf(expected, sizeof(expected), "%s:", rig->config_path);
        ck_assert_msg(strncmp(said, expected, strlen(expected)) == 0, "%s", said);
        ck_assert_msg(strstr(said, "unknown key 'colour' in a quota"), "%s", said);
        ck_assert_msg(strstr(said, "the growth of partition 'train', on-demand, cannot change"), "%s", said);
        ck_assert_msg(strstr(said, "Nothing was changed."), "%s", said);
        ck_assert_uint_eq(client_usage(client, NULL).bytes_limit, 64 * MIB);
        ck_assert(rig_logged(rig, "the configuration is unchanged"));
        free(said);
        free(out);
        bfc_disconnect(client);
}

RIG_TEST(a_dry_run_and_json, begins)
{
        char *said = NULL;

        rig_rewrite_config(rig, &goes_on);
        ck_assert_int_eq(reload(rig, "--dry-run", &said, NULL), 0);
        text_has(said, "tenant 'blue' is new");
        said = ctl_text(rig, WORDS("--json", "reload", "--dry-run"));
        ck_assert_msg(strstr(said, "\"dry_run\": true"), "%s", said);
        text_has(said, "\"ok\": true");
        ck_assert_int_eq(client_refused(rig, "blue", NULL), -EACCES);
}

RIG_TEST(reload_needs_the_admin_socket, begins)
{
        struct raw *raw = session_open(rig->socket, NULL);
        Bfcd__Reload body = BFCD__RELOAD__INIT;
        Bfcd__Request request = REQUEST(RELOAD, reload, &body);

        ck_assert_int_eq(raw_do(raw, &request), -EACCES);
        raw_close(raw);
}

RIG_TEST(sighup, begins)
{
        rig->forgiven = "reload: ";
        rig_rewrite_config(rig, &goes_on);
        kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(rig_logged(rig, "tenant 'blue' is new"), SETTLE_MS));
        ck_assert(WAIT_FOR(rig_logged(rig, "was applied"), SETTLE_MS));
        bfc_disconnect(client_open(rig, "blue", NULL));
        rig_write_config(rig, "devices: 7\n");
        kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(rig_logged(rig, "was rejected"), SETTLE_MS));
        bfc_disconnect(client_open(rig, "blue", NULL));
        /* Many at once are some. */
        rig_rewrite_config(rig, &begins);
        for (int i = 0; i < 20; i++)
                kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(client_refused(rig, "blue", NULL) == -EACCES, SETTLE_MS));
}

/* ---- under load ------------------------------------------------------------ */

static void write_random_config(struct rig *rig, unsigned short *random)
{
        unsigned limits[2] = { 2 * (unsigned)(1 + nrand48(random) % 32),
                               2 * (unsigned)(1 + nrand48(random) % 32) };
        unsigned partition = 2 * (unsigned)(32 + nrand48(random) % 33);
        char partitions[128], tenants[512];
        struct rig_config config = { .partitions = partitions, .tenants = tenants };

        snprintf(partitions, sizeof(partitions), "      - {name: train, limit: %uMiB, growth: on-demand}\n",
                 partition);
        snprintf(
                tenants, sizeof(tenants),
                "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train, limit: %uMiB, reserve: %uMiB, "
                "max_blocks: %ld}]}\n%s- {name: blue, match: {uid: @UID@}, quotas: [{partition: train, limit: %uMiB}]}\n",
                limits[0], nrand48(random) % 2 ? 2u : 0u, 1 + nrand48(random) % 60,
                nrand48(random) % 3 ? "  " : "#", limits[1]);
        rig_rewrite_config(rig, &config);
}

RIG_TEST(reloads_under_load, begins)
{
        struct load *l;
        unsigned short random[3] = { 6, 6, 6 };
        unsigned n_done = 0, n_reloads = suite_is_long() ? 100 : 30;

        rig->forgiven = "reload: ";
        l = load_start(rig, 4, -ENOENT, 400);
        ck_assert(WAIT_FOR(l->n_allocs > 100, SETTLE_MS));
        for (unsigned i = 0; i < n_reloads; i++) {
                write_random_config(rig, random);
                n_done += reload(rig, i % 10 == 9 ? "--dry-run" : NULL, NULL, NULL) == 0;
        }
        load_end(l);
        printf("# %u of %u reloads, %llu blocks, %llu refusals, %llu hellos refused\n", n_done, n_reloads,
               (unsigned long long)l->n_allocs, (unsigned long long)l->n_refusals,
               (unsigned long long)l->n_refused_hellos);
        ck_assert_uint_gt(n_done, n_reloads / 2);
        ck_assert_uint_gt(l->n_refusals, 0);
        ck_assert_uint_gt(l->n_refused_hellos, 0);
        rig_rewrite_config(rig, &begins);
        ck_assert(WAIT_FOR(reload(rig, NULL, NULL, NULL) == 0, SETTLE_MS));
}

/* Another file, which the daemon could not read, and a folder beside it. */
RIG_TEST(a_dry_run_of_another_file, begins)
{
        bfc_client *client = client_open(rig, "red", NULL);
        char *text = rig_config_text(rig, &goes_on), folder[128], path[192], *said, *wrong;
        FILE *out;
        void *p;

        ck_assert_ok(bfc_malloc(client, 46 * MIB, &p));
        snprintf(path, sizeof(path), "%s/conf.d", rig->folder);
        snprintf(folder, sizeof(folder), "%s/other", rig->folder);
        ck_assert_int_eq(mkdir(folder, 0700), 0);
        snprintf(path, sizeof(path), "%s/other/conf.d", rig->folder);
        ck_assert_int_eq(mkdir(path, 0700), 0);
        snprintf(path, sizeof(path), "%s/other/conf.d/more.yaml", rig->folder);
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        fprintf(out,
                "tenants: [{name: green, match: {uid: 1}, quotas: [{partition: train, limit: 2MiB}]}]\n");
        fclose(out);
        snprintf(path, sizeof(path), "%s/other/new.yaml", rig->folder);
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        for (unsigned i = 0; i < 3000; i++) /* more than one piece */
                fprintf(out, "# a line that says nothing\n");
        fputs(text, out);
        fclose(out);
        free(text);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reload", "--dry-run", path), &said, &wrong), 0);
        ck_assert_str_eq(wrong, "");
        ck_assert_msg(strstr(said, "tenant 'red' in partition 'train': limit is 32MiB, was 64MiB; it "
                                   "has 46MiB reserved, 14MiB above the limit"),
                      "%s", said);
        ck_assert_ptr_nonnull(strstr(said, "tenant 'blue' is new"));
        text_has(said, "tenant 'green' is new");
        free(wrong);
        /* Nothing has changed, and nothing of it is put in force by that. */
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_limit, 64 * MIB);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reload", path), NULL, NULL), 2);
        must_reload(rig);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_limit, 64 * MIB);
        /* What cannot change while it runs, by the name of the file. */
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        fprintf(out, "max_sessions: many\n");
        fclose(out);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reload", "--dry-run", path), &said, &wrong), 1);
        ck_assert_msg(strstr(wrong, "/other/new.yaml:1:"), "%s", wrong);
        free(said);
        free(wrong);
        /* A folder beside it that cannot be read is no empty one. */
        snprintf(folder, sizeof(folder), "%s/other/conf.d", rig->folder);
        snprintf(path, sizeof(path), "%s/other/conf.d/more.yaml", rig->folder);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(rmdir(folder), 0);
        ck_assert_int_eq(symlink("new.yaml", folder), 0);
        snprintf(path, sizeof(path), "%s/other/new.yaml", rig->folder);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reload", "--dry-run", path), NULL, &wrong), 1);
        text_has(wrong, "/other/conf.d cannot be read: Not a directory");
        bfc_disconnect(client);
}
