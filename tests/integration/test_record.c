/* Recording against a real daemon: a job with threads writes down its blocks' lifetimes,
 * bfc-replay lives through them, and the daemon's peaks are the same to the byte.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/integration/json.h"
#include "tests/random.h"

enum { N_THREADS = 4, N_HELD = 24, N_ROUNDS = 150 };

static const struct rig_config roomy = {
        .size = "256MiB",
        .partitions = "      - {name: train, limit: 256MiB, growth: on-demand}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 192MiB"),
};

/* ---- a job ------------------------------------------------------------------ */

struct worker {
        bfc_client *client;
        pthread_barrier_t *barrier;
        uint64_t seed;
        uint64_t n_held_bytes; /* at the end of the second part, as counted in blocks */
};

static size_t random_size(uint64_t *state)
{
        return 1 + (size_t)((random_next(state) & 0xfffff) >> (random_next(state) % 16));
}

/* Random frees and mallocs with a few held; then all threads take more at the same time and
 * free nothing, so that the peak is there and does not depend on timing; then
 * random frees again, down to a few that are never freed. */
static void *work(void *userdata)
{
        struct worker *w = userdata;
        size_t sizes[N_HELD] = { 0 };
        void *held[N_HELD] = { 0 };

        for (int i = 0; i < N_ROUNDS; i++) {
                size_t slot = random_next(&w->seed) % (N_HELD / 3);

                REQUIRE(bfc_free(w->client, held[slot]) == 0, "%s", bfc_last_error());
                sizes[slot] = random_size(&w->seed);
                REQUIRE(bfc_malloc(w->client, sizes[slot], &held[slot]) == 0, "%s", bfc_last_error());
        }
        pthread_barrier_wait(w->barrier);
        for (size_t i = 0; i < N_HELD; i++) {
                if (!held[i]) {
                        sizes[i] = random_size(&w->seed) + 256 * 1024;
                        REQUIRE(bfc_malloc(w->client, sizes[i], &held[i]) == 0, "%s", bfc_last_error());
                }
                w->n_held_bytes += rounded(sizes[i]);
        }
        pthread_barrier_wait(w->barrier);
        for (size_t i = 0; i + 3 < N_HELD; i++)
                REQUIRE(bfc_free(w->client, held[i]) == 0, "%s", bfc_last_error());
        return NULL;
}

struct job {
        const char *socket;
        bool by_exit; /* instead of bfc_disconnect() */
        uint64_t peak;
        uint64_t n_allocs;
};

/* In a child, with BFC_TRACE in its environment. */
static void run_job(void *userdata)
{
        struct job *job = userdata;
        struct worker workers[N_THREADS];
        pthread_t threads[N_THREADS];
        pthread_barrier_t barrier;
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        bfc_client *client = child_client_open(job->socket, NULL);

        pthread_barrier_init(&barrier, NULL, N_THREADS);
        for (unsigned i = 0; i < N_THREADS; i++) {
                workers[i] = (struct worker){ client, &barrier, 1000 + i, 0 };
                REQUIRE(pthread_create(&threads[i], NULL, work, &workers[i]) == 0, "a thread");
        }
        for (unsigned i = 0; i < N_THREADS; i++) {
                pthread_join(threads[i], NULL);
                job->peak += workers[i].n_held_bytes;
        }
        REQUIRE(bfc_stats(client, &stats) == 0, "%s", bfc_last_error());
        job->n_allocs = stats.num_allocs;
        if (job->by_exit)
                exit(0);
        bfc_disconnect(client);
}

/* ---- looking ------------------------------------------------------------------ */

/* Returns how many buffers there were. */
static uint64_t replay(const struct rig *rig, const char *path)
{
        const char *argv[] = { program_replay(), "--socket", rig->socket, "--json", path, NULL };
        char *out, *err;
        int status = program_run(argv, &out, &err);
        json_t *document = json_loads(out, 0, NULL);
        uint64_t n;

        ck_assert_msg(status == 0, "bfc-replay ended with status %d: %s", status, err);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "failures")), 0);
        n = (uint64_t)json_integer_value(json_object_get(document, "allocations"));
        json_decref(document);
        free(out);
        free(err);
        return n;
}

static void path_in(const struct rig *rig, const char *name, char ret[static 128])
{
        snprintf(ret, 128, "%s/%s", rig->folder, name);
        setenv("BFC_TRACE", ret, 1);
}

static void record_and_replay(bool by_exit)
{
        struct rig *rig = rig_start(&roomy);
        struct job *job = shared_memory(sizeof(*job));
        char path[128], *before, *after;

        *job = (struct job){ .socket = rig->socket, .by_exit = by_exit };
        path_in(rig, "job.csv", path);
        child_join(child_start(run_job, job));
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_uint_gt(job->peak, 16 * MIB);
        ck_assert_uint_eq(take_peak(rig), job->peak);
        before = file_text(path);
        /* The replay has BFC_TRACE in its environment, and reads the file none the less. */
        ck_assert_uint_eq(replay(rig, path), job->n_allocs);
        ck_assert_uint_eq(take_peak(rig), job->peak); /* to the byte */
        after = file_text(path);
        ck_assert_str_eq(before, after);
        free(before);
        free(after);
        unsetenv("BFC_TRACE");
        rig_stop(rig);
}

TEST(peaks_of_a_job_and_its_replay)
{
        record_and_replay(false);
}

TEST(a_job_that_exits)
{
        record_and_replay(true);
}

/* ---- by option, several clients, and what cannot be written ---------------------- */

static int open_with(const struct rig *rig, const char *trace, bfc_client **ret)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = rig->socket,
                                       .trace = trace };

        return bfc_connect(&options, ret);
}

RIG_TEST(the_option_and_several_clients, roomy)
{
        char path[128], name[160], wanted[160], *text;
        bfc_client *a, *b, *c = NULL;
        bfc_pool *pool;
        void *ptr;

        path_in(rig, "env.csv", path);
        snprintf(name, sizeof(name), "%s/%%p.csv", rig->folder);
        ck_assert_ok(open_with(rig, name, &a)); /* not the environment's */
        ck_assert_ok(open_with(rig, NULL, &b));
        ck_assert_int_eq(open_with(rig, NULL, &c), -EBUSY);
        ck_assert_ptr_null(c);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), path));
        ck_assert_ok(open_with(rig, "", &c)); /* none */
        ck_assert_ok(bfc_malloc(a, 1000, &ptr));
        ck_assert_int_eq(bfc_malloc(a, 1000 * MIB, &ptr), -EDQUOT);
        ck_assert_int_eq(bfc_free(a, &a), -EINVAL);
        ck_assert_ok(bfc_free(a, ptr));
        ck_assert_int_eq(bfc_free(a, ptr), -EINVAL);
        ck_assert_ok(bfc_pool_new(b, 5000, &pool));
        ck_assert_ok(bfc_pool_alloc(pool, 300, &ptr));
        ck_assert_ok(bfc_pool_reset(pool));
        ck_assert_ok(bfc_pool_free(pool));
        ck_assert_ok(bfc_malloc(c, 1, &ptr));
        bfc_disconnect(a);
        bfc_disconnect(b);
        bfc_disconnect(c);
        snprintf(wanted, sizeof(wanted), "%s/%d.csv", rig->folder, (int)getpid());
        text = file_text(wanted);
        ck_assert_str_eq(text,
                         "id,lower,upper,size,partition,tag,flags\n1,1,0000000000000000002,1000,train,,0\n");
        free(text);
        text = file_text(path); /* a pool is one block */
        ck_assert_str_eq(text,
                         "id,lower,upper,size,partition,tag,flags\n1,1,0000000000000000002,5000,train,,0\n");
        free(text);
        unsetenv("BFC_TRACE");
}

RIG_TEST(traces_that_cannot_be_written, roomy)
{
        bfc_client *client = NULL;
        char path[128];

        path_in(rig, "no-such-folder/job.csv", path);
        ck_assert_int_eq(open_with(rig, NULL, &client), -ENOENT);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), path));
        ck_assert_int_eq(open_with(rig, "/dev/null", &client), -EINVAL);
        ck_assert_int_eq(open_with(rig, "/tmp/%s.csv", &client), -EINVAL);
        ck_assert_ptr_null(client);
        unsetenv("BFC_TRACE");
}

/* ---- partitions and tags ----------------------------------------------------------- */

static const struct rig_config two_partitions = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                      "      - {name: serve, limit: 64MiB, growth: on-demand}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: serve}"),
};

/* What bfc-replay prints; it succeeds. */
static char *replay_text(const char *const *words)
{
        char *out, *err;

        ck_assert_msg(program_run(words, &out, &err) == 0, "%s", err);
        free(err);
        return out;
}

/* The job is killed after this. */
static void run_two_partitions(void *userdata)
{
        const struct rig *rig = userdata;
        struct bfc_malloc_options weights = { .struct_size = sizeof(weights), .tag = "weights" },
                                  kv = { .struct_size = sizeof(kv), .tag = "kv", .partition = "serve" };
        bfc_client *client = child_client_open(rig->socket, NULL);
        void *p[5];

        REQUIRE(bfc_malloc_with(client, 9 * MIB, &weights, &p[0]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_with(client, 5 * MIB, &kv, &p[1]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "serve", 2000, &p[2]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 3000, &p[3]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p[3]) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 3000, &p[3]) == 0, "%s", bfc_last_error()); /* from the cache */
        REQUIRE(bfc_malloc_async_in(client, "serve", 4000, 0, &p[4]) == 0, "%s", bfc_last_error());
        kill(getpid(), SIGKILL);
}

RIG_TEST(partitions_and_tags_survive_a_kill, two_partitions)
{
        char path[128], *text;
        int status;
        pid_t pid;

        path_in(rig, "job.csv", path);
        pid = child_start(run_two_partitions, rig);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        unsetenv("BFC_TRACE");
        text = file_text(path);
        ck_assert_str_eq(text, "id,lower,upper,size,partition,tag,flags\n"
                               "1,1,9223372036854775807,9437184,train,weights,0\n"
                               "2,2,9223372036854775807,5242880,serve,kv,0\n"
                               "3,3,9223372036854775807,2000,serve,,0\n"
                               "4,4,0000000000000000005,3000,train,,0\n"
                               "6,6,9223372036854775807,3000,train,,0\n"
                               "7,7,9223372036854775807,4000,serve,,0\n");
        free(text);
        /* One track for each partition, and the tags at the peak. */
        text = replay_text(WORDS(program_replay(), "--timeline", "-", path));
        ck_assert_ptr_nonnull(strstr(text, "\"process_name\",\"args\":{\"name\":\"train\"}"));
        ck_assert_ptr_nonnull(strstr(text, "\"process_name\",\"args\":{\"name\":\"serve\"}"));
        ck_assert_ptr_nonnull(strstr(text, "\"name\":\"serve: kv\",\"args\":{\"bytes\":5242880}"));
        text_has(text, "\"name\":\"train\",\"args\":{\"bytes\":9440184}");
        text_has(replay_text(WORDS(program_replay(), "--plot", "-", path)), "kv: 5.0 MiB in 1 block");
        text_has(replay_text(WORDS(program_replay(), "--plan", "--json", "--partition", "serve", path)),
                 "\"peak_live_bytes\": 5248880");
        ck_assert_uint_eq(replay(rig, path), 6);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "serve") == 0, SETTLE_MS));
}

/* Also where the client serves a request without its lock. */
RIG_TEST(partition_of_blocks_that_are_used_again, two_partitions)
{
        enum { N = 200 };
        bfc_client *client;
        unsigned n = 0;
        char path[128], *text;
        void *p;

        path_in(rig, "job.csv", path);
        setenv("BFC_CACHE", "on", 1);
        client = client_open(rig, "red", "serve");
        for (unsigned i = 0; i < N; i++) {
                ck_assert_ok(bfc_malloc(client, 3000, &p));
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        setenv("BFC_CACHE", "off", 1);
        unsetenv("BFC_TRACE");
        text = file_text(path);
        for (const char *at = text; (at = strstr(at, ",3000,serve,,0\n")); at++)
                n++;
        ck_assert_uint_eq(n, N);
        free(text);
}

/* ---- killed jobs ------------------------------------------------------------------ */

enum { N_WINDOW = 16, MAX_ROUNDS = 60000, N_KILLS = 8 };

/* In shared memory, for each thread: how many of its calls have returned. */
struct progress {
        _Atomic uint32_t n_given, n_freed;
};

struct doomed {
        const char *socket;
        bfc_client *client;
        struct progress progress[N_THREADS];
};

struct doomed_thread {
        struct doomed *d;
        size_t number;
};

/* Each size is one block's of one thread's. Some are parked when they are freed, some are cut, and some
 * are the daemon's. */
static uint64_t doomed_size(size_t thread, size_t round)
{
        return 1 + round * N_THREADS + thread;
}

static void *allocate_until_killed(void *userdata)
{
        const struct doomed_thread *t = userdata;
        struct progress *progress = &t->d->progress[t->number];
        void *held[N_WINDOW];

        for (uint32_t i = 0; i < MAX_ROUNDS; i++) {
                REQUIRE(bfc_malloc(t->d->client, doomed_size(t->number, i), &held[i % N_WINDOW]) == 0, "%s",
                        bfc_last_error());
                atomic_store(&progress->n_given, i + 1);
                if (i + 1 < N_WINDOW)
                        continue;
                REQUIRE(bfc_free(t->d->client, held[(i + 1) % N_WINDOW]) == 0, "%s", bfc_last_error());
                atomic_store(&progress->n_freed, i + 2 - N_WINDOW);
        }
        pause();
        return NULL;
}

static void run_until_killed(void *userdata)
{
        struct doomed_thread threads[N_THREADS];
        struct doomed *d = userdata;
        pthread_t thread;

        d->client = child_client_open(d->socket, NULL);
        for (size_t i = 0; i < N_THREADS; i++) {
                threads[i] = (struct doomed_thread){ d, i };
                REQUIRE(pthread_create(&thread, NULL, allocate_until_killed, &threads[i]) == 0, "a thread");
        }
        for (;;)
                pause();
}

static uint32_t sum_given(struct doomed *d)
{
        uint32_t sum = 0;

        for (size_t i = 0; i < N_THREADS; i++)
                sum += atomic_load(&d->progress[i].n_given);
        return sum;
}

/* The events of calls that had returned are there, and of each thread at most one more: of the call in
 * which it was killed. */
static void check_trace(const char *path, struct doomed *d)
{
        uint32_t n_given[N_THREADS] = { 0 }, n_freed[N_THREADS] = { 0 };
        unsigned long long lower, upper, n_bytes;
        char *text = file_text(path), *line = text;

        for (line = strchr(line, '\n') + 1; *line; line = strchr(line, '\n') + 1) {
                size_t thread;
                int n = sscanf(line, "%*[0-9],%llu,%llu,%llu", &lower, &upper, &n_bytes);

                ck_assert_msg(n == 3 && strchr(line, '\n'), "a bad line: %s", line);
                thread = (n_bytes - 1) % N_THREADS;
                ck_assert_uint_eq((n_bytes - 1) / N_THREADS, n_given[thread]++);
                if (upper != INT64_MAX)
                        ck_assert_uint_eq((n_bytes - 1) / N_THREADS, n_freed[thread]++);
        }
        for (size_t i = 0; i < N_THREADS; i++) {
                uint32_t given = atomic_load(&d->progress[i].n_given),
                         freed = atomic_load(&d->progress[i].n_freed);

                ck_assert_msg(n_given[i] - given <= 1, "%u of %u blocks", n_given[i], given);
                ck_assert_msg(n_freed[i] - freed <= 1, "%u of %u frees", n_freed[i], freed);
        }
        free(text);
}

RIG_TEST(killed_jobs, roomy)
{
        struct doomed *d = shared_memory(sizeof(*d));
        uint64_t state = 3;
        char path[128];

        path_in(rig, "job.csv", path);
        for (int i = 0; i < N_KILLS; i++) {
                uint32_t n = 1 + (uint32_t)(random_next(&state) % 3000);
                pid_t pid;

                *d = (struct doomed){ .socket = rig->socket };
                pid = child_start(run_until_killed, d);
                ck_assert(WAIT_FOR(sum_given(d) >= n, SETTLE_MS));
                child_kill(pid);
                check_trace(path, d);
        }
        unsetenv("BFC_TRACE");
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_uint_ge(replay(rig, path), sum_given(d));
}
