/* Shared blocks with real processes: published, attached and waited for, charged once, alive
 * until the last one detaches or dies.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/json.h"

#define N_BYTES (5 * MIB + 100)

static const struct rig_config two_tenants = {
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB")
                TENANT("blue", "@UID@, @OTHER@", "train, limit: 48MiB"),
};

struct job {
        char socket[96];
        struct gate up, go;
        uint64_t seed;
        uint32_t wait_ms;
        bool publishes;
};

static void *must_publish(bfc_client *client, size_t n_bytes, const char *name)
{
        void *p = NULL;

        REQUIRE(bfc_malloc_flags(client, NULL, n_bytes, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_publish(client, p, name) == 0, "%s", bfc_last_error());
        return p;
}

static struct job job_new(const struct rig *rig, uint64_t seed)
{
        struct job job = { .up = gate_new(), .go = gate_new(), .seed = seed, .wait_ms = 20000 };

        strcpy(job.socket, rig->socket);
        return job;
}

/* Publishes or attaches, and keeps the block until the gate opens. */
static void hold_weights(void *arg)
{
        struct job *job = arg;
        bfc_client *client = child_client_open(job->socket, "red");
        size_t n_bytes = 0;
        void *p = NULL;

        if (job->publishes) {
                REQUIRE(bfc_malloc_flags(client, NULL, N_BYTES, BFC_WHOLE, &p) == 0, "%s", bfc_last_error());
                block_fill(client, p, N_BYTES, job->seed);
                REQUIRE(bfc_publish(client, p, "weights") == 0, "%s", bfc_last_error());
        } else {
                REQUIRE(bfc_attach(client, "weights", job->wait_ms, &p, &n_bytes) == 0, "%s",
                        bfc_last_error());
                REQUIRE(n_bytes == N_BYTES, "%zu", n_bytes);
                REQUIRE(block_has(client, p, n_bytes, job->seed), "another content");
        }
        gate_meet(&job->up, &job->go);
        REQUIRE(block_has(client, p, N_BYTES, job->seed), "another content");
        REQUIRE(bfc_detach(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Many wait for what one publishes; charged once; alive by each one that is left. */
RIG_TEST(a_shared_block_is_charged_once, two_tenants)
{
        struct job jobs[5];
        pid_t pids[5];

        for (int i = 0; i < 5; i++) {
                jobs[i] = job_new(rig, 7);
                jobs[i].publishes = i == 4;
                pids[i] = child_start(hold_weights, &jobs[i]);
        }
        for (int i = 0; i < 5; i++)
                ck_assert(gate_wait(&jobs[i].up, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, rounded(N_BYTES));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 1);
        for (int i = 4; i >= 0; i--) { /* its publisher first */
                ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 1);
                gate_open(&jobs[i].go);
                child_join(pids[i]);
        }
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
}

/* By kill -9, one after the other: gone with the last. */
RIG_TEST(killed_processes_release_shared_blocks, two_tenants)
{
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
                REQUIRE(block_has(client, p, N_BYTES, 8), "another content");
                ck_assert_ok(bfc_detach(client, p));
                child_kill(pids[i]);
        }
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").num_blocks == 0, SETTLE_MS));
        ck_assert_int_eq(bfc_attach(client, "weights", 0, &p, NULL), -ENOENT);
        p = must_publish(client, 1, "weights"); /* the name is free again */
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
}

RIG_TEST(publish_and_attach_in_one_process, two_tenants)
{
        bfc_client *client = client_open(rig, "red", NULL), *other = client_open(rig, "red", NULL);
        struct bfc_block_info info = { .struct_size = sizeof(info) },
                              again = { .struct_size = sizeof(again) };
        void *p, *q, *r, *plain;
        size_t n_bytes = 0;

        p = must_publish(client, 1000, "w");
        ck_assert_uint_eq(client_stats(client).bytes_in_use, 1024);
        ck_assert_ok(bfc_attach(other, "w", 0, &q, &n_bytes));
        ck_assert_uint_eq(n_bytes, 1000);
        ck_assert_ok(bfc_attach(other, "w", 5000, &r, NULL));
        ck_assert_ptr_eq(q, r);
        ck_assert_uint_eq(client_stats(other).num_blocks, 1);
        ck_assert_uint_eq(client_stats(other).bytes_in_use, 1024);
        ck_assert_uint_eq(client_stats(other).bytes_reserved, 1024);
        ck_assert_ok(bfc_block_info(client, p, &info));
        ck_assert_ok(bfc_block_info(other, q, &again));
        ck_assert_uint_eq(info.block_id, again.block_id);
        ck_assert_uint_eq(again.n_requested, 1000);
        ck_assert_ok(bfc_write(other, q, "hello", 6));
        block_fill(client, p, 1000, 3);
        REQUIRE(block_has(other, q, 1000, 3), "another content");
        /* Attached where it is held already: the same block again. */
        ck_assert_ok(bfc_attach(client, "w", 0, &r, NULL));
        ck_assert_ptr_eq(p, r);
        ck_assert_int_eq(bfc_publish(client, p, "v"), -EINVAL);
        ck_assert_int_eq(bfc_publish(other, q, "v"), -EINVAL);
        ck_assert_ok(bfc_malloc(client, 10, &plain));
        ck_assert_int_eq(bfc_publish(client, plain, "w"), -EEXIST);
        ck_assert(has_stats(bfc_last_error()));
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
        ck_assert_uint_eq(client_stats(client).bytes_in_use + client_stats(client).bytes_reserved, 0);
        ck_assert_ok(bfc_detach(other, q));
        REQUIRE(block_has(other, q, 1000, 3), "another content");
        ck_assert_ok(bfc_detach(other, q));
        ck_assert_int_eq(bfc_detach(other, q), -EINVAL);
        ck_assert_uint_eq(client_stats(other).num_blocks, 0);
        ck_assert_uint_eq(client_stats(other).num_allocs, client_stats(other).num_frees);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(client);
        bfc_disconnect(other);
}

/* What was cut from a slab is not the daemon's block; what is all of it leaves the cache. */
RIG_TEST(sharing_with_a_cache, two_tenants)
{
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
        block_fill(client, whole, 3 * MIB, 5);
        ck_assert_ok(bfc_publish(client, whole, "w"));
        ck_assert_ok(bfc_attach(other, "w", 0, &p, NULL));
        REQUIRE(block_has(other, p, 3 * MIB, 5), "another content");
        ck_assert_uint_eq(client_stats(client).bytes_in_use, 3 * MIB + 1024);
        ck_assert_uint_eq(client_stats(client).bytes_reserved, 5 * MIB);
        ck_assert_ok(bfc_free(client, whole)); /* not into the cache */
        ck_assert_uint_eq(client_stats(client).bytes_reserved, 2 * MIB);
        ck_assert_ok(bfc_free(client, piece));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &whole));
        block_fill(client, whole, 3 * MIB, 6);
        REQUIRE(block_has(other, p, 3 * MIB, 5), "another content");
        /* Refused: it is a block as before, though the daemon's own by now. */
        ck_assert_int_eq(bfc_publish(client, whole, "w"), -EEXIST);
        REQUIRE(block_has(client, whole, 3 * MIB, 6), "another content");
        ck_assert_ok(bfc_free(client, whole));
        ck_assert_uint_eq(client_stats(client).bytes_reserved, 0);
        whole = must_publish(client, 100, "v");
        ck_assert_uint_eq(client_stats(client).bytes_reserved, 256);
        ck_assert_ok(bfc_detach(client, whole));
        ck_assert_ok(bfc_detach(other, p));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(client);
        bfc_disconnect(other);
}

/* ---- threads --------------------------------------------------------------- */

enum { N_THREADS = 6, N_ROUNDS = 300 };

struct racer {
        bfc_client *client;
        unsigned number;
        unsigned n_attached;
};

/* Attaches and detaches as fast as it can a name that is not always published. */
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

/* Two clients, three threads on each: in any order, client and daemon count alike. */
RIG_TEST(threads_attach_and_detach, two_tenants)
{
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
                ck_assert_uint_eq(client_stats(clients[i]).num_blocks, 0);
                ck_assert_uint_eq(client_stats(clients[i]).bytes_reserved, 0);
        }
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        bfc_disconnect(clients[0]);
        bfc_disconnect(clients[1]);
}

/* ---- others ---------------------------------------------------------------- */

/* Another tenant: nothing there, and nothing to wait for. */
RIG_TEST(another_tenant_cannot_attach, two_tenants)
{
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        void *p = must_publish(red, 1000, "w"), *q;

        ck_assert_int_eq(bfc_attach(blue, "w", 0, &q, NULL), -ENOENT);
        ck_assert_int_eq(bfc_attach(blue, "w", 60, &q, NULL), -ETIMEDOUT);
        q = must_publish(blue, 2000, "w");
        ck_assert_ok(bfc_free(red, p));
        ck_assert_ok(bfc_free(blue, q));
        bfc_disconnect(red);
        bfc_disconnect(blue);
}

/* A forked child has none of it, and disturbs nothing. */
RIG_TEST(a_forked_child_cannot_use_shared_blocks, two_tenants)
{
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
        block_fill(client, p, 1000, 1);
        ck_assert_ok(bfc_detach(client, p));
        bfc_disconnect(client);
}

/* Attaching a block on a GPU that it does not see is refused, and the client continues. */
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

RIG_TEST(a_block_on_an_invisible_device, two_tenants)
{
        struct job job = job_new(rig, 0);
        bfc_client *client;

        if (rig_device() != ON_HOST) {
                child_join(child_start(see_nothing, &job));
                client = client_open(rig, "red", NULL);
                ck_assert_ok(bfc_detach(client, must_publish(client, 1000, "w")));
                bfc_disconnect(client);
        }
}

/* The manual's program: makes the weights where there are none, else attaches them. */
TEST(example)
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

/* ---- what operators and traces show ----------------------------------------- */

RIG_TEST(bfcctl_lists_them, two_tenants)
{
        bfc_client *red = client_open(rig, "red", NULL), *also = client_open(rig, "red", NULL),
                   *blue = client_open(rig, "blue", NULL);
        void *p = must_publish(red, 1000, "my weights"), *q = must_publish(blue, 10, "b"), *r;
        json_t *rows, *row;
        char *text;

        ck_assert_ok(bfc_attach(also, "my weights", 0, &r, NULL));
        rows = ctl_json(rig->admin_socket, WORDS("--json", "shared"));
        ck_assert_uint_eq(json_array_size(rows), 2);
        json_decref(rows);
        setenv("BFC_TENANT", "red", 1);
        rows = ctl_json(rig->socket, WORDS("--json", "shared"));
        unsetenv("BFC_TENANT");
        ck_assert_uint_eq(json_array_size(rows), 1);
        row = json_array_get(rows, 0);
        ck_assert_str_eq(string_of(row, "name"), "my weights");
        ck_assert_str_eq(string_of(row, "tenant"), "red");
        ck_assert_str_eq(string_of(row, "partition"), "train");
        ck_assert_int_eq(number_of(row, "n_bytes"), 1024);
        ck_assert_int_eq(number_of(row, "n_requested"), 1000);
        ck_assert_int_eq(number_of(row, "num_references"), 2);
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("shared"), &text, NULL), 0);
        ck_assert_ptr_nonnull(strstr(text, "my weights"));
        text_has(text, "REFERENCES");
        ck_assert_ok(bfc_free(red, p));
        ck_assert_ok(bfc_free(also, r));
        ck_assert_ok(bfc_free(blue, q));
        bfc_disconnect(red);
        bfc_disconnect(also);
        bfc_disconnect(blue);
}

/* A publisher's block has a life in its trace, until it detaches; an attached one has none. */
RIG_TEST(traces, two_tenants)
{
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
        ck_assert_ptr_nonnull(strstr(text, ",1000,"));
        ck_assert_ptr_null(strstr(strstr(text, ",1000,") + 1, ",1000,"));
        free(text);
        text = file_text(paths[1]);
        ck_assert_ptr_null(strstr(text, ",1000,"));
        free(text);
        unlink(paths[0]);
        unlink(paths[1]);
}
