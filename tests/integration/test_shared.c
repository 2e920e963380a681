/* Shared blocks with real processes: published, attached and waited for, charged once, alive
 * until the last one lets go or dies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/harness.h"

#define N_BYTES (5 * MIB + 100)

static const struct rig_config two_tenants = {
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: [@UID@, @OTHER@]}\n"
                   "    quotas: [{partition: train, limit: 48MiB}]\n",
};

struct job {
        char socket[96];
        struct gate up, go;
        uint64_t seed;
        uint32_t wait_ms;
        bool publishes;
};

static void must_write(bfc_client *client, void *p, size_t n_bytes, uint64_t seed)
{
        char *bytes = malloc(n_bytes);

        pattern_write(bytes, n_bytes, seed);
        REQUIRE(bfc_write(client, p, bytes, n_bytes) == 0, "%s", bfc_last_error());
        free(bytes);
}

static void must_hold(bfc_client *client, const void *p, size_t n_bytes, uint64_t seed)
{
        char *bytes = malloc(n_bytes);

        REQUIRE(bfc_read(client, bytes, p, n_bytes) == 0, "%s", bfc_last_error());
        REQUIRE(pattern_holds(bytes, n_bytes, seed), "another content");
        free(bytes);
}

static void *must_publish(bfc_client *client, size_t n_bytes, const char *name)
{
        void *p = NULL;

        REQUIRE(bfc_malloc_flags(client, NULL, n_bytes, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_publish(client, p, name) == 0, "%s", bfc_last_error());
        return p;
}

static struct bfc_client_stats stats(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        REQUIRE(bfc_stats(client, &s) == 0, "%s", bfc_last_error());
        return s;
}

static struct job job_new(const struct rig *rig, uint64_t seed)
{
        struct job job = { .up = gate_new(), .go = gate_new(), .seed = seed, .wait_ms = 20000 };

        strcpy(job.socket, rig->socket);
        return job;
}

static void job_free(struct job *job)
{
        gate_free(&job->up);
        gate_free(&job->go);
}

/* Publishes, or attaches; says so, and holds it until it may go on. */
static void hold_weights(void *arg)
{
        struct job *job = arg;
        bfc_client *client = child_client_open(job->socket, "red");
        size_t n_bytes = 0;
        void *p = NULL;

        if (job->publishes) {
                REQUIRE(bfc_malloc_flags(client, NULL, N_BYTES, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
                must_write(client, p, N_BYTES, job->seed);
                REQUIRE(bfc_publish(client, p, "weights") == 0, "%s", bfc_last_error());
        } else {
                REQUIRE(bfc_attach(client, "weights", job->wait_ms, &p, &n_bytes) == 0, "%s",
                        bfc_last_error());
                REQUIRE(n_bytes == N_BYTES, "%zu", n_bytes);
                must_hold(client, p, n_bytes, job->seed);
        }
        gate_open(&job->up);
        REQUIRE(gate_wait(&job->go, SETTLE_MS), "not in time");
        must_hold(client, p, N_BYTES, job->seed);
        REQUIRE(bfc_detach(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Many wait for what one publishes; charged once; alive by each one that is left. */
START_TEST(one_copy_for_many)
{
        struct rig *rig = rig_start(&two_tenants);
        struct job jobs[5];
        pid_t pids[5];

        for (int i = 0; i < 5; i++) {
                jobs[i] = job_new(rig, 7);
                jobs[i].publishes = i == 4;
                pids[i] = child_start(hold_weights, &jobs[i]);
        }
        for (int i = 0; i < 5; i++)
                ck_assert(gate_wait(&jobs[i].up, SETTLE_MS));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_in_use, rounded(N_BYTES));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 1);
        for (int i = 4; i >= 0; i--) { /* its publisher first */
                ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 1);
                gate_open(&jobs[i].go);
                child_join(pids[i]);
                job_free(&jobs[i]);
        }
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        rig_stop(rig);
}
END_TEST

/* By kill -9, one after the other: gone with the last. */
START_TEST(killed_holders)
{
        struct rig *rig = rig_start(&two_tenants);
        struct job jobs[4];
        bfc_client *client;
        pid_t pids[4];
        void *p;

        for (int i = 0; i < 4; i++) {
                jobs[i] = job_new(rig, 8);
                jobs[i].publishes = i == 0;
                pids[i] = child_start(hold_weights, &jobs[i]);
        }
        for (int i = 0; i < 4; i++)
                ck_assert(gate_wait(&jobs[i].up, SETTLE_MS));
        client = client_open(rig, "red", NULL); /* its thread has locks that a child must not inherit */
        for (int i = 0; i < 4; i++) {
                ck_assert_ok(bfc_attach(client, "weights", 0, &p, NULL));
                must_hold(client, p, N_BYTES, 8);
                ck_assert_ok(bfc_detach(client, p));
                child_kill(pids[i]);
                job_free(&jobs[i]);
        }
        ck_assert(WAIT_FOR(rig_figures(rig, "red", "train").num_blocks == 0, SETTLE_MS));
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &p, NULL), -ENOENT);
        p = must_publish(client, 1, "weights"); /* the name is free again */
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

START_TEST(one_process)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = client_open(rig, "red", NULL), *other = client_open(rig, "red", NULL);
        struct bfc_block_info info = { .struct_size = sizeof(info) },
                              again = { .struct_size = sizeof(again) };
        void *p, *q, *r, *plain;
        size_t n_bytes = 0;

        p = must_publish(client, 1000, "w");
        ck_assert_uint_eq(stats(client).bytes_in_use, 1024);
        ck_assert_ok(bfc_attach(other, "w", 0, &q, &n_bytes));
        ck_assert_uint_eq(n_bytes, 1000);
        ck_assert_ok(bfc_attach(other, "w", 5000, &r, NULL));
        ck_assert_ptr_eq(q, r);
        ck_assert_uint_eq(stats(other).num_blocks, 1);
        ck_assert_uint_eq(stats(other).bytes_in_use, 1024);
        ck_assert_uint_eq(stats(other).bytes_reserved, 1024);
        ck_assert_ok(bfc_block_info(client, p, &info));
        ck_assert_ok(bfc_block_info(other, q, &again));
        ck_assert_uint_eq(info.block_id, again.block_id);
        ck_assert_uint_eq(again.n_requested, 1000);
        ck_assert_ok(bfc_write(other, q, "hello", 6));
        must_write(client, p, 1000, 3);
        must_hold(other, q, 1000, 3);
        /* Attached where it is held already: the same block again. */
        ck_assert_ok(bfc_attach(client, "w", 0, &r, NULL));
        ck_assert_ptr_eq(p, r);
        ck_assert_int_eq(bfc_publish(client, p, "v"), -EINVAL);
        ck_assert_int_eq(bfc_publish(other, q, "v"), -EINVAL);
        ck_assert_ok(bfc_malloc(client, 10, &plain));
        ck_assert_int_eq(bfc_publish(client, plain, "w"), -EEXIST);
        ck_assert(has_figures(bfc_last_error()));
        ck_assert_int_eq(bfc_publish(client, plain, "new\nline"), -EINVAL);
        ck_assert_int_eq(bfc_publish(client, NULL, "v"), -EINVAL);
        ck_assert_int_eq(bfc_publish(client, plain, NULL), -EINVAL);
        ck_assert_int_eq(bfc_publish(client, (char *)p + 256, "v"), -EINVAL);
        ck_assert_int_eq(bfc_attach(client, "v", 0, &r, NULL), -ENOENT);
        ck_assert_int_eq(bfc_attach(client, "v", 80, &r, NULL), -ETIMEDOUT);
        ck_assert_int_eq(bfc_attach(client, NULL, 0, &r, NULL), -EINVAL);
        ck_assert_int_eq(bfc_detach(client, plain), -EINVAL);
        ck_assert_ok(bfc_detach(client, NULL));
        ck_assert_ok(bfc_free(client, plain));
        ck_assert_ok(bfc_detach(client, p));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(bfc_detach(client, p), -EINVAL);
        ck_assert_int_eq(bfc_free(client, p), -EINVAL);
        ck_assert_uint_eq(stats(client).bytes_in_use + stats(client).bytes_reserved, 0);
        ck_assert_ok(bfc_detach(other, q));
        must_hold(other, q, 1000, 3);
        ck_assert_ok(bfc_detach(other, q));
        ck_assert_int_eq(bfc_detach(other, q), -EINVAL);
        ck_assert_uint_eq(stats(other).num_blocks, 0);
        ck_assert_uint_eq(stats(other).num_allocs, stats(other).num_frees);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(client);
        bfc_disconnect(other);
        rig_stop(rig);
}
END_TEST

/* What was cut from a slab is not the daemon's block; what is all of it leaves the cache. */
START_TEST(beside_a_cache)
{
        struct rig *rig = rig_start(&two_tenants);
        struct bfc_options o = { .struct_size = sizeof(o), .socket = rig->socket, .tenant = "red" };
        bfc_client *client = NULL, *other = client_open(rig, "red", NULL);
        void *piece, *whole, *p;

        setenv("BFC_CACHE", "on", 1);
        o.cache_idle_bytes = UINT64_MAX;
        ck_assert_ok(bfc_connect(&o, &client));
        unsetenv("BFC_CACHE");
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &whole));
        ck_assert_ok(bfc_malloc(client, 1000, &piece));
        ck_assert_int_eq(bfc_publish(client, piece, "w"), -EINVAL);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "BFC_WHOLE"));
        must_write(client, whole, 3 * MIB, 5);
        ck_assert_ok(bfc_publish(client, whole, "w"));
        ck_assert_ok(bfc_attach(other, "w", 0, &p, NULL));
        must_hold(other, p, 3 * MIB, 5);
        ck_assert_uint_eq(stats(client).bytes_in_use, 3 * MIB + 1024);
        ck_assert_uint_eq(stats(client).bytes_reserved, 5 * MIB);
        ck_assert_ok(bfc_free(client, whole)); /* not into the cache */
        ck_assert_uint_eq(stats(client).bytes_reserved, 2 * MIB);
        ck_assert_ok(bfc_free(client, piece));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &whole));
        must_write(client, whole, 3 * MIB, 6);
        must_hold(other, p, 3 * MIB, 5);
        /* Refused: it is a block as before, though the daemon's own by now. */
        ck_assert_int_eq(bfc_publish(client, whole, "w"), -EEXIST);
        must_hold(client, whole, 3 * MIB, 6);
        ck_assert_ok(bfc_free(client, whole));
        ck_assert_uint_eq(stats(client).bytes_reserved, 0);
        whole = must_publish(client, 100, "v");
        ck_assert_uint_eq(stats(client).bytes_reserved, 256);
        ck_assert_ok(bfc_detach(client, whole));
        ck_assert_ok(bfc_detach(other, p));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(client);
        bfc_disconnect(other);
        rig_stop(rig);
}
END_TEST

/* ---- threads --------------------------------------------------------------- */

enum { N_THREADS = 6, N_ROUNDS = 300 };

struct racer {
        bfc_client *client;
        unsigned number;
        unsigned n_attached;
};

/* Attaches and lets go as fast as it can, of a name that now and then nobody has. */
static void *race(void *arg)
{
        struct racer *r = arg;
        const char *name = r->number % 2 ? "even" : "odd";
        void *p;

        for (unsigned i = 0; i < N_ROUNDS; i++) {
                int error = bfc_attach(r->client, name, i % 3 == 0 ? 5 : 0, &p, NULL);

                if (error == -ENOENT || error == -ETIMEDOUT) {
                        REQUIRE(bfc_malloc_flags(r->client, NULL, 4096, BFC_WHOLE, &p) == 0, "%s",
                                bfc_last_error());
                        memset(p, (int)r->number % 2, 4096);
                        error = bfc_publish(r->client, p, name);
                        REQUIRE(error == 0 || error == -EEXIST, "%d: %s", error, bfc_last_error());
                } else {
                        REQUIRE(error == 0, "%d: %s", error, bfc_last_error());
                        REQUIRE(((char *)p)[17] == (char)(r->number % 2), "another block");
                        r->n_attached++;
                }
                error = i % 2 ? bfc_free(r->client, p) : bfc_detach(r->client, p);
                if (error == -EINVAL) /* its publication was refused, so it is not shared */
                        error = bfc_free(r->client, p);
                REQUIRE(error == 0, "%d: %s", error, bfc_last_error());
        }
        return NULL;
}

/* Two clients, three threads on each: whatever order they come in, both ends count alike. */
START_TEST(threads_attach_and_detach)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *clients[2] = { client_open(rig, "red", NULL), client_open(rig, "red", NULL) };
        struct racer racers[N_THREADS] = { { NULL, 0, 0 } };
        pthread_t threads[N_THREADS];
        unsigned n_attached = 0;

        for (unsigned i = 0; i < N_THREADS; i++) {
                racers[i] = (struct racer){ clients[i % 4 / 2], i, 0 };
                ck_assert_int_eq(pthread_create(&threads[i], NULL, race, &racers[i]), 0);
        }
        for (unsigned i = 0; i < N_THREADS; i++) {
                pthread_join(threads[i], NULL);
                n_attached += racers[i].n_attached;
        }
        ck_assert_uint_gt(n_attached, 0);
        for (int i = 0; i < 2; i++) {
                ck_assert_uint_eq(stats(clients[i]).num_blocks, 0);
                ck_assert_uint_eq(stats(clients[i]).bytes_reserved, 0);
        }
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(clients[0]);
        bfc_disconnect(clients[1]);
        rig_stop(rig);
}
END_TEST

/* ---- others ---------------------------------------------------------------- */

/* Another tenant: nothing there, and nothing to wait for. */
START_TEST(another_tenant)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        void *p = must_publish(red, 1000, "w"), *q;

        ck_assert_int_eq(bfc_attach(blue, "w", 0, &q, NULL), -ENOENT);
        ck_assert_int_eq(bfc_attach(blue, "w", 60, &q, NULL), -ETIMEDOUT);
        q = must_publish(blue, 2000, "w");
        ck_assert_ok(bfc_free(red, p));
        ck_assert_ok(bfc_free(blue, q));
        bfc_disconnect(red);
        bfc_disconnect(blue);
        rig_stop(rig);
}
END_TEST

/* A forked child has none of it, and disturbs nothing. */
START_TEST(fork_has_nothing)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = client_open(rig, "red", NULL);
        void *p = must_publish(client, 1000, "w");
        int status;
        pid_t pid = fork();

        if (pid == 0) {
                void *q;

                _exit(bfc_attach(client, "w", 0, &q, NULL) == -ECHILD && bfc_detach(client, p) == -ECHILD &&
                                      bfc_publish(client, p, "v") == -ECHILD
                              ? 0
                              : 1);
        }
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
        must_write(client, p, 1000, 1);
        ck_assert_ok(bfc_detach(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

/* Attaches what lies on a GPU that it does not see: refused, and it goes on. */
static void see_nothing(void *arg)
{
        struct job *job = arg;
        bfc_client *client;
        void *p;

        setenv("CUDA_VISIBLE_DEVICES", "", 1);
        client = child_client_open(job->socket, "red");
        REQUIRE(bfc_attach(client, "w", 0, &p, NULL) == -ENODEV, "%s", bfc_last_error());
        REQUIRE(bfc_attach(client, "w", 1000, &p, NULL) == -ENODEV, "%s", bfc_last_error());
        bfc_disconnect(client);
}

START_TEST(an_unseen_device)
{
        struct rig *rig = rig_start(&two_tenants);
        struct job job = job_new(rig, 0);
        bfc_client *client;

        if (rig_device() != ON_HOST) {
                child_join(child_start(see_nothing, &job));
                client = client_open(rig, "red", NULL);
                ck_assert_ok(bfc_detach(client, must_publish(client, 1000, "w")));
                bfc_disconnect(client);
        }
        job_free(&job);
        rig_stop(rig);
}
END_TEST

/* The manual's program: makes the weights where there are none, else attaches them. */
START_TEST(example)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = client_open(rig, "red", NULL);
        const char *argv[] = { getenv("BFC_EXAMPLE"), NULL };
        char *text;
        void *p;

        if (!argv[0]) {
                bfc_disconnect(client);
                rig_stop(rig);
                return;
        }
        setenv("BFC_SOCKET", rig->socket, 1);
        ck_assert_int_eq(program_run(argv, &text, NULL), 0);
        ck_assert_str_eq(text, "1048576 bytes, the first is 42\n");
        free(text);
        p = must_publish(client, 77, "weights of v1");
        ck_assert_ok(bfc_write(client, p, "a", 1));
        ck_assert_int_eq(program_run(argv, &text, NULL), 0);
        ck_assert_str_eq(text, "77 bytes, the first is 97\n");
        free(text);
        unsetenv("BFC_SOCKET");
        ck_assert_ok(bfc_detach(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

/* ---- what operators and traces show ----------------------------------------- */

static json_t *ctl(const char *socket, const char *what)
{
        const char *argv[] = { program_bfcctl(), "--socket", socket, "--json", what, NULL };
        char *text;
        json_t *document;

        ck_assert_int_eq(program_run(argv, &text, NULL), 0);
        document = json_loads(text, 0, NULL);
        ck_assert_ptr_nonnull(document);
        free(text);
        return document;
}

START_TEST(bfcctl_lists_them)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *red = client_open(rig, "red", NULL), *also = client_open(rig, "red", NULL),
                   *blue = client_open(rig, "blue", NULL);
        const char *table[] = { program_bfcctl(), "--socket", rig->admin_socket, "shared", NULL };
        void *p = must_publish(red, 1000, "my weights"), *q = must_publish(blue, 10, "b"), *r;
        json_t *document, *row;
        char *text;

        ck_assert_ok(bfc_attach(also, "my weights", 0, &r, NULL));
        document = ctl(rig->admin_socket, "shared");
        ck_assert_uint_eq(json_array_size(json_object_get(document, "shared")), 2);
        json_decref(document);
        setenv("BFC_TENANT", "red", 1);
        document = ctl(rig->socket, "shared");
        unsetenv("BFC_TENANT");
        ck_assert_uint_eq(json_array_size(json_object_get(document, "shared")), 1);
        row = json_array_get(json_object_get(document, "shared"), 0);
        ck_assert_str_eq(json_string_value(json_object_get(row, "name")), "my weights");
        ck_assert_str_eq(json_string_value(json_object_get(row, "tenant")), "red");
        ck_assert_str_eq(json_string_value(json_object_get(row, "partition")), "train");
        ck_assert_int_eq(json_integer_value(json_object_get(row, "n_bytes")), 1024);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "n_requested")), 1000);
        ck_assert_int_eq(json_integer_value(json_object_get(row, "num_holders")), 2);
        json_decref(document);
        ck_assert_int_eq(program_run(table, &text, NULL), 0);
        ck_assert_ptr_nonnull(strstr(text, "my weights"));
        ck_assert_ptr_nonnull(strstr(text, "HOLDERS"));
        free(text);
        ck_assert_ok(bfc_free(red, p));
        ck_assert_ok(bfc_free(also, r));
        ck_assert_ok(bfc_free(blue, q));
        bfc_disconnect(red);
        bfc_disconnect(also);
        bfc_disconnect(blue);
        rig_stop(rig);
}
END_TEST

/* A publisher's block has a life in its trace, until it lets go; an attached one has none. */
START_TEST(traces)
{
        struct rig *rig = rig_start(&two_tenants);
        struct bfc_options o = { .struct_size = sizeof(o), .socket = rig->socket, .tenant = "red" };
        bfc_client *clients[2];
        char paths[2][128], *text;
        void *p, *q;

        for (int i = 0; i < 2; i++) {
                snprintf(paths[i], sizeof(paths[i]), "%s/trace%d.csv", rig->folder, i);
                o.trace = paths[i];
                ck_assert_ok(bfc_connect(&o, &clients[i]));
        }
        p = must_publish(clients[0], 1000, "w");
        ck_assert_ok(bfc_attach(clients[0], "w", 0, &p, NULL));
        ck_assert_ok(bfc_attach(clients[1], "w", 0, &q, NULL));
        ck_assert_ok(bfc_detach(clients[0], p));
        ck_assert_ok(bfc_detach(clients[0], p));
        ck_assert_ok(bfc_detach(clients[1], q));
        bfc_disconnect(clients[0]);
        bfc_disconnect(clients[1]);
        text = file_text(paths[0]);
        ck_assert_ptr_nonnull(strstr(text, ",1000\n"));
        ck_assert_ptr_eq(strstr(text, ",1000\n"), strrchr(text, ',')); /* one line */
        free(text);
        text = file_text(paths[1]);
        ck_assert_ptr_null(strstr(text, ",1000\n"));
        free(text);
        unlink(paths[0]);
        unlink(paths[1]);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = {
                one_copy_for_many,
                killed_holders,
                one_process,
                beside_a_cache,
                threads_attach_and_detach,
                another_tenant,
                fork_has_nothing,
                an_unseen_device,
                example,
                bfcctl_lists_them,
                traces,
                NULL,
        };

        return harness_main(harness_suite("shared", tests));
}
