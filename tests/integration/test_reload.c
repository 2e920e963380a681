/* A daemon that reads its config again, as operators make it do, while clients work.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/integration/harness.h"

static const struct rig_config begins = {
        .partitions = "      - {name: train, limit: 128MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n",
};

/* red is smaller, and blue comes. */
static const struct rig_config goes_on = {
        .partitions = "      - {name: train, limit: 112MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 32MiB, reserve: 4MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 48MiB}]\n",
};

static void write_config(struct rig *rig, const struct rig_config *config)
{
        char *text = rig_config_text(rig, config);

        rig_write_config(rig, text);
        free(text);
}

/* Its exit status; what it printed, which the caller frees. */
static int reload(struct rig *rig, const char *option, char **ret_stdout, char **ret_stderr)
{
        const char *argv[] = { program_bfcctl(), "--socket", rig->admin_socket, "reload", option, NULL };

        return program_run(argv, ret_stdout, ret_stderr);
}

static void must_reload(struct rig *rig)
{
        char *said = NULL;
        int status = reload(rig, NULL, NULL, &said);

        ck_assert_msg(status == 0, "bfcctl reload: %d: %s", status, said);
        free(said);
}

static bool log_says(const struct rig *rig, const char *part)
{
        char *text = rig_log(rig);
        bool says = text && strstr(text, part);

        free(text);
        return says;
}

/* ---- what operators do ---------------------------------------------------- */

START_TEST(a_new_limit_and_a_new_tenant)
{
        struct rig *rig = rig_start(&begins);
        bfc_client *client = client_open(rig, NULL, NULL), *other;
        char *said = NULL;
        void *held, *ptr;

        ck_assert_ok(bfc_malloc(client, 48 * MIB, &held));
        memset(held, 7, 48 * MIB);
        write_config(rig, &goes_on);
        ck_assert_int_eq(reload(rig, NULL, &said, NULL), 0);
        ck_assert_str_eq(said, "partition 'train': limit is 112MiB, was 128MiB\n"
                               "tenant 'red' in partition 'train': limit is 32MiB, was 64MiB; it has "
                               "48MiB reserved, 16MiB above the limit, and gets no more until it is "
                               "below\n"
                               "tenant 'red' in partition 'train': reserve is 4MiB, was 0\n"
                               "tenant 'blue' is new\n"
                               "tenant 'blue': new quota in partition 'train': limit 48MiB, reserve 0\n");
        free(said);
        ck_assert(all_bytes_are(held, 48 * MIB, 7)); /* nobody's memory goes */
        ck_assert_int_eq(bfc_malloc(client, 2 * MIB, &ptr), -EDQUOT);
        other = client_open(rig, "blue", NULL);
        ck_assert_ok(bfc_malloc(other, 48 * MIB, &ptr));
        ck_assert_ok(bfc_free(client, held));
        ck_assert_ok(bfc_malloc(client, 32 * MIB, &held));
        ck_assert_uint_eq(client_usage(client, NULL).bytes_limit, 32 * MIB);
        bfc_disconnect(client);
        bfc_disconnect(other);
        write_config(rig, &begins);
        must_reload(rig);
        ck_assert_int_eq(client_refused(rig, "blue", NULL), -EACCES);
        rig_stop(rig);
}
END_TEST

START_TEST(a_bad_file_changes_nothing)
{
        struct rig *rig = rig_start(&begins);
        static const struct rig_config bad = {
                .partitions = "      - {name: train, limit: 128MiB, growth: preallocate}\n",
                .tenants = "  - name: red\n"
                           "    match: {uid: @UID@}\n"
                           "    quotas: [{partition: train, limit: 20MiB, colour: red}]\n",
        };
        bfc_client *client = client_open(rig, NULL, NULL);
        char *said = NULL, *out = NULL, expected[160];

        rig->forgiven = "reload: ";
        write_config(rig, &bad);
        ck_assert_int_eq(reload(rig, NULL, &out, &said), 1);
        ck_assert_str_eq(out, "");
        snprintf(expected, sizeof(expected), "%s:", rig->config_path);
        ck_assert_msg(strncmp(said, expected, strlen(expected)) == 0, "%s", said);
        ck_assert_msg(strstr(said, "unknown key 'colour' in a quota"), "%s", said);
        ck_assert_msg(strstr(said, "the growth of partition 'train', on-demand, cannot change"), "%s", said);
        ck_assert_msg(strstr(said, "Nothing was changed."), "%s", said);
        ck_assert_uint_eq(client_usage(client, NULL).bytes_limit, 64 * MIB);
        ck_assert(log_says(rig, "the configuration is unchanged"));
        free(said);
        free(out);
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

START_TEST(a_dry_run_and_json)
{
        struct rig *rig = rig_start(&begins);
        const char *argv[] = { program_bfcctl(), "--json",    "--socket", rig->admin_socket,
                               "reload",         "--dry-run", NULL };
        char *said = NULL;

        write_config(rig, &goes_on);
        ck_assert_int_eq(reload(rig, "--dry-run", &said, NULL), 0);
        ck_assert_msg(strstr(said, "tenant 'blue' is new"), "%s", said);
        free(said);
        ck_assert_int_eq(program_run(argv, &said, NULL), 0);
        ck_assert_msg(strstr(said, "\"dry_run\": true") && strstr(said, "\"ok\": true"), "%s", said);
        free(said);
        ck_assert_int_eq(client_refused(rig, "blue", NULL), -EACCES);
        rig_stop(rig);
}
END_TEST

START_TEST(only_operators_reload)
{
        struct rig *rig = rig_start(&begins);
        struct raw *raw = raw_connect(rig->socket, NULL);
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reload body = BFCD__RELOAD__INIT;

        ck_assert_ptr_nonnull(raw);
        request.body_case = BFCD__REQUEST__BODY_RELOAD;
        request.reload = &body;
        ck_assert_int_eq(raw_do(raw, &request), -EACCES);
        raw_close(raw);
        rig_stop(rig);
}
END_TEST

START_TEST(sighup)
{
        struct rig *rig = rig_start(&begins);

        rig->forgiven = "reload: ";
        write_config(rig, &goes_on);
        kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(log_says(rig, "tenant 'blue' is new"), SETTLE_MS));
        ck_assert(WAIT_FOR(log_says(rig, "was applied"), SETTLE_MS));
        bfc_disconnect(client_open(rig, "blue", NULL));
        rig_write_config(rig, "devices: 7\n");
        kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(log_says(rig, "was rejected"), SETTLE_MS));
        bfc_disconnect(client_open(rig, "blue", NULL));
        /* Many at once are some. */
        write_config(rig, &begins);
        for (int i = 0; i < 20; i++)
                kill(rig->pid, SIGHUP);
        ck_assert(WAIT_FOR(client_refused(rig, "blue", NULL) == -EACCES, SETTLE_MS));
        rig_stop(rig);
}
END_TEST

/* ---- under load ------------------------------------------------------------ */

#define N_WORKERS 6
#define N_HELD    24

struct load {
        char socket[96];
        _Atomic bool over;
        _Atomic uint64_t n_allocs, n_refusals, n_refused_hellos;
        atomic_uint next_number;
};

static bool works_on(struct load *l, bfc_client *client, unsigned short *random)
{
        void *held[N_HELD] = { NULL };
        size_t sizes[N_HELD];

        for (unsigned i = 0; i < 400 && !l->over; i++) {
                size_t at = (size_t)nrand48(random) % N_HELD;
                int r;

                if (held[at]) {
                        REQUIRE(pattern_holds(held[at], sizes[at], at), "a block is not as it was");
                        REQUIRE(bfc_free(client, held[at]) == 0, "%s", bfc_last_error());
                        held[at] = NULL;
                        continue;
                }
                sizes[at] = 1 + (size_t)nrand48(random) % (nrand48(random) % 8 ? 64 * KIB : 4 * MIB);
                r = bfc_malloc(client, sizes[at], &held[at]);
                if (r == -ENOENT) /* its quota went before it came in there */
                        break;
                REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
                *(r == 0 ? &l->n_allocs : &l->n_refusals) += 1;
                if (r == 0)
                        pattern_write(held[at], sizes[at], at);
        }
        for (size_t i = 0; i < N_HELD; i++)
                REQUIRE(!held[i] || pattern_holds(held[i], sizes[i], i), "a block is not as it was");
        return true;
}

/* Comes and goes, as one of two tenants, of which one is not always there. */
static void work(void *arg)
{
        struct load *l = arg;
        unsigned number = atomic_fetch_add(&l->next_number, 1);
        unsigned short random[3] = { (unsigned short)(number + 1), 2, 3 };

        while (!l->over) {
                struct bfc_options options = { .struct_size = sizeof(options),
                                               .socket = l->socket,
                                               .tenant = number % 2 ? "blue" : "red",
                                               .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
                bfc_client *client = NULL;
                int r = bfc_connect(&options, &client);

                REQUIRE(r == 0 || r == -EACCES || r == -EDQUOT, "%d: %s", r, bfc_last_error());
                if (r < 0) {
                        l->n_refused_hellos++;
                        usleep(1000);
                        continue;
                }
                works_on(l, client, random);
                bfc_disconnect(client);
        }
}

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
        write_config(rig, &config);
}

START_TEST(a_hundred_reloads_under_load)
{
        struct rig *rig = rig_start(&begins);
        struct load *l = shared_memory(sizeof(*l));
        unsigned short random[3] = { 6, 6, 6 };
        unsigned n_done = 0;
        pid_t workers[N_WORKERS];

        rig->forgiven = "reload: ";
        snprintf(l->socket, sizeof(l->socket), "%s", rig->socket);
        for (size_t i = 0; i < N_WORKERS; i++)
                workers[i] = child_start(work, l);
        ck_assert(WAIT_FOR(l->n_allocs > 100, SETTLE_MS));
        for (unsigned i = 0; i < 100; i++) {
                write_random_config(rig, random);
                n_done += reload(rig, i % 10 == 9 ? "--dry-run" : NULL, NULL, NULL) == 0;
        }
        l->over = true;
        for (size_t i = 0; i < N_WORKERS; i++)
                child_join(workers[i]);
        printf("# %u of 100 reloads, %llu blocks, %llu refusals, %llu hellos refused\n", n_done,
               (unsigned long long)l->n_allocs, (unsigned long long)l->n_refusals,
               (unsigned long long)l->n_refused_hellos);
        ck_assert_uint_gt(n_done, 50);
        ck_assert_uint_gt(l->n_refusals, 0);
        ck_assert_uint_gt(l->n_refused_hellos, 0);
        write_config(rig, &begins);
        ck_assert(WAIT_FOR(reload(rig, NULL, NULL, NULL) == 0, SETTLE_MS));
        rig_stop(rig);
}
END_TEST

/* Another file, which the daemon could not read, and a folder beside it. */
START_TEST(a_dry_run_of_another_file)
{
        struct rig *rig = rig_start(&begins);
        bfc_client *client = client_open(rig, "red", NULL);
        char *text = rig_config_text(rig, &goes_on), folder[128], path[192], *said, *wrong;
        const char *argv[] = {
                program_bfcctl(), "--socket", rig->admin_socket, "reload", "--dry-run", path, NULL
        };
        const char *in_force[] = { program_bfcctl(), "--socket", rig->admin_socket, "reload", path, NULL };
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
        ck_assert_int_eq(program_run(argv, &said, &wrong), 0);
        ck_assert_str_eq(wrong, "");
        ck_assert_msg(strstr(said, "tenant 'red' in partition 'train': limit is 32MiB, was 64MiB; it "
                                   "has 46MiB reserved, 14MiB above the limit"),
                      "%s", said);
        ck_assert_ptr_nonnull(strstr(said, "tenant 'blue' is new"));
        ck_assert_ptr_nonnull(strstr(said, "tenant 'green' is new"));
        free(said);
        free(wrong);
        /* Nothing has changed, and nothing of it is put in force by that. */
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_limit, 64 * MIB);
        ck_assert_int_eq(program_run(in_force, NULL, NULL), 2);
        must_reload(rig);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_limit, 64 * MIB);
        /* What cannot change while it runs, by the name of the file. */
        out = fopen(path, "we");
        ck_assert_ptr_nonnull(out);
        fprintf(out, "max_sessions: many\n");
        fclose(out);
        ck_assert_int_eq(program_run(argv, &said, &wrong), 1);
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
        ck_assert_int_eq(program_run(argv, NULL, &wrong), 1);
        ck_assert_msg(strstr(wrong, "/other/conf.d cannot be read: Not a directory"), "%s", wrong);
        free(wrong);
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = { a_new_limit_and_a_new_tenant, a_bad_file_changes_nothing,
                                       a_dry_run_and_json,           a_dry_run_of_another_file,
                                       only_operators_reload,        sighup,
                                       a_hundred_reloads_under_load, NULL };

        return harness_main(harness_suite("reload", tests));
}
