/* The client's cache against a real daemon: its contents are charged, and released where it
 * must.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/tools.h"

#define LIMIT (64 * MIB) /* red's in train */

static void cache_on(void)
{
        setenv("BFC_CACHE", "on", 1);
}

/* In pieces of n_bytes, so that they are slabs of their own; then frees them all. */
static void fill_cache(bfc_client *client, unsigned n, size_t n_bytes)
{
        void *p[256];

        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_malloc(client, n_bytes, &p[i]) == 0, "%u: %s", i, bfc_last_error());
        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_free(client, p[i]) == 0, "%s", bfc_last_error());
}

/* ---- free extents before new ones ------------------------------------------- */

/* Free space that is too small for later requests is given back, although nothing is refused. With cuda-ipc
 * a slab in use cannot be split. */
TEST(free_extents_are_released_before_growth)
{
        if (rig_device() == ON_CUDA_IPC)
                return;

        struct rig *rig = rig_start(&(struct rig_config){
                .partitions = "      - {name: train, limit: 256MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 256MiB") });
        bfc_client *client;
        struct bfc_client_stats s;
        void *small[40], *large[10];

        cache_on();
        client = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        for (int i = 0; i < 40; i++)
                ck_assert_ok(bfc_malloc(client, 4 * MIB, &small[i]));
        for (int i = 0; i < 40; i += 2)
                ck_assert_ok(bfc_free(client, small[i]));
        for (int i = 0; i < 10; i++)
                ck_assert_ok(bfc_malloc(client, 8 * MIB, &large[i]));
        s = client_stats(client);
        ck_assert_uint_eq(s.bytes_in_use, 160 * MIB);
        ck_assert_uint_eq(s.peak_bytes_in_use, 160 * MIB);
        ck_assert_uint_le(s.peak_bytes_reserved, (160 + 32) * MIB);
        for (int i = 1; i < 40; i += 2)
                ck_assert_ok(bfc_free(client, small[i]));
        for (int i = 0; i < 10; i++)
                ck_assert_ok(bfc_free(client, large[i]));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- two partitions ---------------------------------------------------------- */

#define N_CLIMBERS 4
#define N_LEVELS   20

static bfc_client *climbers_client;
static pthread_barrier_t climbers;

/* Goes up and down, and in the end up to N_LEVELS blocks, where all threads meet. */
static void *climb(void *userdata)
{
        const char *partition = (uintptr_t)userdata % 2 ? "infer" : "train";
        size_t n_bytes = (uintptr_t)userdata < 2 ? 4096 : 65536;
        void *p[N_LEVELS];

        for (int top = 1; top <= N_LEVELS; top++) {
                for (int i = 0; i < top; i++)
                        REQUIRE(bfc_malloc_in(climbers_client, partition, n_bytes, &p[i]) == 0, "%s",
                                bfc_last_error());
                if (top == N_LEVELS)
                        pthread_barrier_wait(&climbers);
                for (int i = 0; i < top; i++)
                        REQUIRE(bfc_free(climbers_client, p[i]) == 0, "%s", bfc_last_error());
        }
        return NULL;
}

static void expect_statistics(const char *cache)
{
        const uint64_t sum = N_LEVELS * (4096 + 65536), n_calls = 2 * N_LEVELS * (N_LEVELS + 1) / 2;
        struct rig *rig = rig_start(&(struct rig_config){
                .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n"
                              "      - {name: infer, limit: 64MiB, growth: on-demand}\n",
                .tenants = TENANT_OF("red", "@UID@",
                                     "{partition: train, limit: 32MiB}, {partition: infer, limit: 32MiB}") });
        struct bfc_client_stats s = { .struct_size = sizeof(s) };
        pthread_t threads[N_CLIMBERS];

        setenv("BFC_CACHE", cache, 1);
        climbers_client = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        pthread_barrier_init(&climbers, NULL, N_CLIMBERS);
        for (uintptr_t i = 0; i < N_CLIMBERS; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, climb, (void *)i), 0);
        for (int i = 0; i < N_CLIMBERS; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&climbers);
        for (int i = 0; i < 2; i++) {
                ck_assert_ok(bfc_stats_in(climbers_client, i ? "infer" : "train", &s));
                ck_assert_uint_eq(s.bytes_in_use, 0);
                ck_assert_uint_eq(s.peak_bytes_in_use, sum);
                ck_assert_uint_eq(s.num_allocs, n_calls);
                ck_assert_uint_eq(s.num_frees, n_calls);
        }
        s = client_stats(climbers_client);
        ck_assert_uint_eq(s.peak_bytes_in_use, 2 * sum);
        ck_assert_uint_eq(s.num_allocs, 2 * n_calls);
        bfc_disconnect(climbers_client);
        rig_stop(rig);
}

TEST(statistics_of_two_partitions)
{
        expect_statistics("on");
}

TEST(statistics_of_two_partitions_without_a_cache)
{
        expect_statistics("off");
}

/* ---- many threads, one block ------------------------------------------------- */

#define N_TAKERS 8

static bfc_client *takers_client;

/* There is room for one such block: the daemon grants it to the next thread while this one's free returns. */
static void *take_turns(void *unused)
{
        static const struct bfc_malloc_options one = { .struct_size = sizeof(one),
                                                       .flags = BFC_WHOLE,
                                                       .wait_ms = SETTLE_MS };
        void *p;

        (void)unused;
        for (int i = 0; i < 20; i++) {
                REQUIRE(bfc_malloc_with(takers_client, LIMIT - 8 * MIB, &one, &p) == 0, "%s",
                        bfc_last_error());
                REQUIRE(bfc_free(takers_client, p) == 0, "%s", bfc_last_error());
        }
        return NULL;
}

/* With a cache and without. */
LOOP_TEST(reserved_bytes_are_within_the_limit, 2)
{
        static const struct rig_config config;
        struct rig *rig = rig_start(&config);
        pthread_t threads[N_TAKERS];

        setenv("BFC_CACHE", _i ? "on" : "off", 1);
        takers_client = child_client_open(rig->socket, NULL);
        for (int i = 0; i < N_TAKERS; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, take_turns, NULL), 0);
        for (int i = 0; i < N_TAKERS; i++)
                pthread_join(threads[i], NULL);
        ck_assert_uint_eq(client_stats(takers_client).peak_bytes_reserved, LIMIT - 8 * MIB);
        bfc_disconnect(takers_client);
        rig_stop(rig);
}

/* ---- one process ----------------------------------------------------------- */

TEST(idle_memory_is_charged_and_trimmed)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        bfc_client *client;
        uint64_t n_calls;
        void *p = NULL;

        cache_on();
        client = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        fill_cache(client, 10, 3 * MIB);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 30 * MIB);
        ck_assert_uint_eq(client_stats(client).bytes_idle, 30 * MIB);
        n_calls = client_stats(client).num_calls;
        fill_cache(client, 10, 3 * MIB);
        ck_assert_uint_eq(client_stats(client).num_calls, n_calls);
        /* Neighbours merge: one block over all ten. */
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &p));
        ck_assert_uint_eq(client_stats(client).num_calls, n_calls);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_trim(client, 10 * MIB));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 18 * MIB);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        /* Up to the limit as without a cache, and not beyond. */
        ck_assert_ok(bfc_malloc(client, LIMIT - 2 * MIB, &p));
        fill_cache(client, 2, MIB);
        ck_assert_int_eq(bfc_malloc(client, 3 * MIB, &(void *){ NULL }), -EDQUOT);
        ck_assert(has_stats(bfc_last_error()));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* Blocks of many sizes, on streams too, and frees them but for two small ones. */
static void work_and_keep(bfc_client *client, void *ret_kept[2])
{
        static const size_t sizes[] = { 100, 5000, 40 * KIB, 700 * KIB, 3 * MIB, 5 * MIB + 1 };
        void *p[240];
        size_t n = 0;

        ck_assert_ok(bfc_malloc(client, 1, &ret_kept[0]));
        for (size_t round = 0; round < 2; round++)
                for (size_t i = 0; i < 6; i++)
                        for (size_t k = 0; k < (i < 3 ? 18 : 2); k++, n++)
                                if (k % 2 == 0)
                                        ck_assert_ok(bfc_malloc(client, sizes[i], &p[n]));
                                else
                                        ck_assert_ok(bfc_malloc_async(client, sizes[i], 1, &p[n]));
        ck_assert_ok(bfc_malloc(client, 1, &ret_kept[1]));
        while (n-- > 0)
                if (n % 3 == 0)
                        ck_assert_ok(bfc_free_async(client, p[n], 1));
                else
                        ck_assert_ok(bfc_free(client, p[n]));
}

/* What is reserved is behind the blocks that live, as soon as bfc_trim() has returned. */
static void assert_nothing_stays(const struct bfc_options *options, struct rig *rig)
{
        bool unmaps = !(options->flags & BFC_NO_THREAD);
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        bfc_client *client, *other;
        void *kept[2];

        ck_assert_ok(bfc_connect(options, &client));
        ck_assert_ok(bfc_connect(options, &other)); /* a session more keeps nothing either */
        work_and_keep(client, kept);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        if (unmaps) { /* those of two slabs, each of which may cross an extent boundary */
                ck_assert_uint_le(rig_stats(rig, "red", "train").num_extents, 4);
                ck_assert_ok(bfc_usage(client, NULL, &usage));
                ck_assert_uint_eq(usage.bytes_reserved, rig_stats(rig, "red", "train").bytes_reserved);
        }
        ck_assert_ok(bfc_free(client, kept[0]));
        ck_assert_ok(bfc_free(client, kept[1]));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        if (unmaps)
                ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        bfc_disconnect(other);
        bfc_disconnect(client);
}

TEST(after_a_trim_only_live_blocks_are_reserved)
{
        static const uint64_t flags[] = { 0, BFC_NO_CACHE, BFC_POLL, BFC_NO_THREAD };
        struct rig *rig = rig_start(&(struct rig_config){ 0 });

        cache_on();
        for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
                struct bfc_options o = { .struct_size = sizeof(o), .socket = rig->socket, .flags = flags[i] };

                assert_nothing_stays(&o, rig);
        }
        rig_stop(rig);
}

/* Only as much is released as was asked for, in whole extents. */
TEST(a_trim_of_some_keeps_the_rest)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        bfc_client *client;
        uint64_t before, after;

        cache_on();
        client = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        fill_cache(client, 10, 3 * MIB);
        before = rig_stats(rig, "red", "train").bytes_reserved;
        ck_assert_ok(bfc_trim(client, 9 * MIB));
        after = rig_stats(rig, "red", "train").bytes_reserved;
        if (rig_device() != ON_CUDA_IPC) /* there it is all one extent */
                ck_assert_uint_lt(after, before);
        ck_assert_uint_ge(after, 30 * MIB - 9 * MIB);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- processes -------------------------------------------------------------- */

struct pair {
        char socket[96];
        struct gate first, second;
};

/* Has 40 MiB idle in its cache, and then wants 50 of another shape. */
static void refused_and_gives_back(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = child_client_with(.socket = pair->socket, .cache_idle_bytes = UINT64_MAX);
        struct bfc_client_stats s;
        void *kept, *p;

        REQUIRE(bfc_malloc(client, 1 * MIB + 1, &kept) == 0, "%s", bfc_last_error());
        fill_cache(client, 10, 4 * MIB);
        gate_meet(&pair->first, &pair->second);
        /* The other process lies right behind our memory now. */
        REQUIRE(bfc_malloc(client, 45 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 4096, 7);
        s = client_stats(client);
        REQUIRE(s.num_failures == 0, "%s", bfc_last_error());
        REQUIRE(s.bytes_reserved <= LIMIT - 8 * MIB, "%llu", (unsigned long long)s.bytes_reserved);
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Over the tenant's limit only because of what lies idle here. */
TEST(over_the_quota_idle_memory_is_released)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        bfc_client *other;
        pid_t pid;
        void *p;

        if (rig_device() == ON_CUDA_IPC) { /* a block that is left holds 32 MiB there */
                rig_stop(rig);
                return;
        }
        cache_on();
        strcpy(pair.socket, rig->socket);
        pid = child_start_until(&pair.first, refused_and_gives_back, &pair);
        other = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        ck_assert_ok(bfc_malloc(other, 8 * MIB, &p));
        gate_open(&pair.second);
        child_join(pid);
        ck_assert_ok(bfc_free(other, p));
        bfc_disconnect(other);
        rig_stop(rig);
}

/* The middle of a slab would take two Splits, and the new block is one more. */
TEST(max_blocks_prevents_useless_splits)
{
        static const struct rig_config config = {
                .tenants = TENANT("red", "@UID@", "train, limit: 64MiB, max_blocks: 3"),
        };
        struct rig *rig = rig_start(&config);
        bfc_client *client;
        void *all, *first, *middle, *last, *whole, *large;

        if (rig_device() == ON_CUDA_IPC) { /* a block is one extent there */
                rig_stop(rig);
                return;
        }
        cache_on();
        client = child_client_with(.socket = rig->socket, .cache_idle_bytes = UINT64_MAX);
        ck_assert_ok(bfc_malloc(client, 40 * MIB, &all));
        ck_assert_ok(bfc_free(client, all));
        ck_assert_ok(bfc_malloc(client, 1000, &first));
        ck_assert_ok(bfc_malloc(client, 38 * MIB, &middle));
        ck_assert_ok(bfc_malloc(client, 1000, &last));
        ck_assert_ok(bfc_free(client, middle));
        ck_assert_ok(bfc_malloc_flags(client, NULL, 1 * MIB, BFC_WHOLE, &whole));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 2);
        ck_assert_int_eq(bfc_malloc_flags(client, NULL, 50 * MIB, BFC_WHOLE, &large), -EDQUOT);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 2);
        ck_assert_ok(bfc_free(client, whole));
        ck_assert_ok(
                bfc_malloc_flags(client, NULL, 50 * MIB, BFC_WHOLE, &large)); /* now there is room for both */
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 3);
        ck_assert_ok(bfc_free(client, large));
        ck_assert_ok(bfc_free(client, first));
        ck_assert_ok(bfc_free(client, last));
        bfc_disconnect(client);
        rig_stop(rig);
}

static void hold_idle(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = child_client_with(.socket = pair->socket, .cache_idle_bytes = 0);

        fill_cache(client, 28, 2 * MIB);
        gate_open(&pair->first);
        gate_wait(&pair->second, SETTLE_MS);
        bfc_disconnect(client);
}

/* All of the limit is idle in one process, and released when another needs it. */
TEST(an_idle_process_releases_its_cache)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        bfc_client *other;
        pid_t pid;
        void *p;

        cache_on();
        strcpy(pair.socket, rig->socket);
        pid = child_start_until(&pair.first, hold_idle, &pair);
        if (CHILDREN_HAVE_EVENTS)
                ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_in_use, 28 * 2 * MIB);
        other = child_client_with(.socket = rig->socket, .cache_idle_bytes = 0);
        for (int i = 0; i < (CHILDREN_HAVE_EVENTS ? 15 : 8); i++)
                ck_assert_ok(bfc_malloc(other, 4 * MIB, &p));
        gate_open(&pair.second);
        child_join(pid);
        bfc_disconnect(other);
        rig_stop(rig);
}

TEST(a_killed_clients_cache_is_released)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        pid_t pid;

        cache_on();
        strcpy(pair.socket, rig->socket);
        pid = child_start_until(&pair.first, hold_idle, &pair);
        ck_assert_uint_gt(rig_charge(rig, "red", "train"), 0);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        rig_stop(rig);
}

/* Random sizes in several processes of one tenant that together want more than there is. */
static void live(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = child_client_with(.socket = pair->socket, .cache_idle_bytes = 4 * MIB);
        void *p[64] = { NULL };
        size_t n[64];
        unsigned seed = (unsigned)getpid() * 7919u, n_granted = 0;

        for (int i = 0; i < 3000; i++) {
                unsigned at;

                seed = seed * 1103515245u + 12345u;
                at = (seed >> 16) % 64;
                if (p[at]) {
                        REQUIRE(pattern_holds(p[at], n[at] < 512 ? n[at] : 512, (uint64_t)(uintptr_t)p[at]),
                                "%zu bytes", n[at]);
                        REQUIRE(bfc_free(client, p[at]) == 0, "%s", bfc_last_error());
                        p[at] = NULL;
                        continue;
                }
                n[at] = 1 + (seed >> 8) % ((seed >> 24) % 8 == 0 ? 2500000 : 90000);
                if (bfc_malloc(client, n[at], &p[at]) < 0)
                        continue;
                n_granted++;
                pattern_write(p[at], n[at] < 512 ? n[at] : 512, (uint64_t)(uintptr_t)p[at]);
        }
        REQUIRE(n_granted > 300, "%u", n_granted);
        bfc_disconnect(client);
}

TEST(processes_under_pressure)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        pid_t pids[4];

        cache_on();
        strcpy(pair.socket, rig->socket);
        for (int i = 0; i < 4; i++)
                pids[i] = child_start(live, &pair);
        for (int i = 0; i < 4; i++)
                child_join(pids[i]);
        rig_stop(rig);
}

/* A job that repeats itself asks the daemon for nothing from the second time on, and holds little
 * more than it uses. */
TEST(a_repeated_trace)
{
        struct rig *rig = rig_start(&(struct rig_config){
                .size = "512MiB",
                .partitions = "      - {name: train, limit: 256MiB, growth: on-demand}\n",
                .tenants =
                        "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 256MiB}]\n" });
        char path[128], *out = NULL, *err = NULL;
        const char *make[] = { program_replay(), "--generate", "transformer", NULL };
        const char *run[] = { program_replay(), "--socket", rig->socket, "--cache", "on", "--repeat", "3",
                              "--verify",       "--json",   path,        NULL };
        json_t *json;
        FILE *f;

        snprintf(path, sizeof(path), "%s/trace.csv", rig->folder);
        ck_assert_int_eq(program_run(make, &out, NULL), 0);
        f = fopen(path, "we");
        ck_assert_ptr_nonnull(f);
        fputs(out, f);
        fclose(f);
        free(out);
        ck_assert_msg(program_run(run, &out, &err) == 0, "%s", err);
        json = json_loads(out, 0, NULL);
        ck_assert_int_gt(json_integer_value(json_object_get(json, "calls")), 0);
        ck_assert_int_le(json_integer_value(json_object_get(json, "calls_last_repeat")) * 100,
                         json_integer_value(json_object_get(json, "operations")) / 3 * 5);
        ck_assert_double_ge(json_real_value(json_object_get(json, "held_over_live")), 1);
        ck_assert_double_le(json_real_value(json_object_get(json, "held_over_live")), 1.25);
        json_decref(json);
        free(out);
        free(err);
        rig_stop(rig);
}
