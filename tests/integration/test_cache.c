/* The client's cache against a real daemon: what it holds is charged, and comes back where it
 * must.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/harness.h"

#define LIMIT (64 * MIB) /* red's in train */

static void cache_on(void)
{
        setenv("BFC_CACHE", "on", 1);
}

static struct bfc_client_stats stats(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        REQUIRE(bfc_stats(client, &s) == 0, "%s", bfc_last_error());
        return s;
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

static bfc_client *open_with(const char *socket, uint64_t idle_bytes)
{
        struct bfc_options o = { .struct_size = sizeof(o), .socket = socket, .cache_idle_bytes = idle_bytes };
        bfc_client *client = NULL;

        REQUIRE(bfc_connect(&o, &client) == 0, "%s", bfc_last_error());
        return client;
}

/* ---- one process ----------------------------------------------------------- */

START_TEST(idle_memory_is_charged_and_trimmed)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        bfc_client *client;
        uint64_t n_calls;
        void *p = NULL;

        cache_on();
        client = open_with(rig->socket, UINT64_MAX);
        fill_cache(client, 10, 3 * MIB);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_in_use, 30 * MIB);
        ck_assert_uint_eq(stats(client).bytes_idle, 30 * MIB);
        n_calls = stats(client).num_calls;
        fill_cache(client, 10, 3 * MIB);
        ck_assert_uint_eq(stats(client).num_calls, n_calls);
        /* Neighbours merge: one block over all ten. */
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &p));
        ck_assert_uint_eq(stats(client).num_calls, n_calls);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_trim(client, 10 * MIB));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_in_use, 18 * MIB);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_in_use, 0);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        /* Up to the limit as without a cache, and not beyond. */
        ck_assert_ok(bfc_malloc(client, LIMIT - 2 * MIB, &p));
        fill_cache(client, 2, MIB);
        ck_assert_int_eq(bfc_malloc(client, 3 * MIB, &(void *){ NULL }), -EDQUOT);
        ck_assert(has_figures(bfc_last_error()));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}
END_TEST

/* ---- processes -------------------------------------------------------------- */

struct pair {
        char socket[96];
        struct gate first, second;
};

/* Has 40 MiB idle in its cache, and then wants 50 of another shape. */
static void refused_and_gives_back(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = open_with(pair->socket, UINT64_MAX);
        struct bfc_client_stats s;
        void *kept, *p;

        REQUIRE(bfc_malloc(client, 1 * MIB + 1, &kept) == 0, "%s", bfc_last_error());
        fill_cache(client, 10, 4 * MIB);
        gate_open(&pair->first);
        REQUIRE(gate_wait(&pair->second, 20000), "not in time");
        /* The other process lies right behind our memory now. */
        REQUIRE(bfc_malloc(client, 45 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 4096, 7);
        s = stats(client);
        REQUIRE(s.num_failures == 0, "%s", bfc_last_error());
        REQUIRE(s.bytes_reserved <= LIMIT - 8 * MIB, "%llu", (unsigned long long)s.bytes_reserved);
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Over the tenant's limit only because of what lies idle here. */
START_TEST(over_the_quota_idle_memory_goes_back)
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
        pid = child_start(refused_and_gives_back, &pair);
        ck_assert(gate_wait(&pair.first, 20000));
        other = open_with(rig->socket, UINT64_MAX);
        ck_assert_ok(bfc_malloc(other, 8 * MIB, &p));
        gate_open(&pair.second);
        child_join(pid);
        ck_assert_ok(bfc_free(other, p));
        bfc_disconnect(other);
        gate_free(&pair.first);
        gate_free(&pair.second);
        rig_stop(rig);
}
END_TEST

static void hold_idle(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = open_with(pair->socket, 0);

        fill_cache(client, 28, 2 * MIB);
        gate_open(&pair->first);
        gate_wait(&pair->second, 60000);
        bfc_disconnect(client);
}

/* All of the limit lies idle in one process, and comes back when another needs it. */
START_TEST(an_idle_process_gives_back)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        bfc_client *other;
        pid_t pid;
        void *p;

        cache_on();
        strcpy(pair.socket, rig->socket);
        pid = child_start(hold_idle, &pair);
        ck_assert(gate_wait(&pair.first, 20000));
        if (CHILDREN_HAVE_EVENTS)
                ck_assert_uint_ge(rig_figures(rig, "red", "train").bytes_in_use, 28 * 2 * MIB);
        other = open_with(rig->socket, 0);
        for (int i = 0; i < (CHILDREN_HAVE_EVENTS ? 15 : 8); i++)
                ck_assert_ok(bfc_malloc(other, 4 * MIB, &p));
        gate_open(&pair.second);
        child_join(pid);
        bfc_disconnect(other);
        gate_free(&pair.first);
        gate_free(&pair.second);
        rig_stop(rig);
}
END_TEST

START_TEST(a_killed_client_returns_its_cache)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct pair pair = { .first = gate_new(), .second = gate_new() };
        pid_t pid;

        cache_on();
        strcpy(pair.socket, rig->socket);
        pid = child_start(hold_idle, &pair);
        ck_assert(gate_wait(&pair.first, 20000));
        ck_assert_uint_gt(rig_charge(rig, "red", "train"), 0);
        child_kill(pid);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        gate_free(&pair.first);
        gate_free(&pair.second);
        rig_stop(rig);
}
END_TEST

/* Random sizes in several processes of one tenant that together want more than there is. */
static void live(void *arg)
{
        struct pair *pair = arg;
        bfc_client *client = open_with(pair->socket, 4 * MIB);
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

START_TEST(processes_under_pressure)
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
        gate_free(&pair.first);
        gate_free(&pair.second);
        rig_stop(rig);
}
END_TEST

/* A job that repeats itself asks the daemon for nothing from the second time on, and holds little
 * more than it uses. */
START_TEST(a_repeated_trace)
{
        struct rig *rig = rig_start(&(struct rig_config){
                .size = "512MiB",
                .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n",
                .tenants =
                        "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 512MiB}]\n" });
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
END_TEST

int main(void)
{
        const TTest *const tests[] = {
                idle_memory_is_charged_and_trimmed,
                over_the_quota_idle_memory_goes_back,
                an_idle_process_gives_back,
                a_killed_client_returns_its_cache,
                processes_under_pressure,
                a_repeated_trace,
                NULL,
        };

        return harness_main(harness_suite("cache", tests));
}
