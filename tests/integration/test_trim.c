/* What lies idle in one process comes back when another needs it; requests that wait.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/harness.h"

#define LIMIT (64 * MIB) /* of each tenant */

static const struct rig_config two_tenants = {
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: train, limit: 64MiB, reserve: 16MiB}]\n",
};

struct scene {
        char socket[96];
        const char *tenant;
        uint64_t flags;
        uint64_t hold_bytes; /* of blocks that stay */
        struct gate up, go, done;
        volatile uint64_t served_ms[8]; /* shared: when each was served */
};

static struct scene *scene_new(const struct rig *rig, const char *tenant)
{
        struct scene *s = shared_memory(sizeof(*s));

        strcpy(s->socket, rig->socket);
        s->tenant = tenant;
        s->up = gate_new();
        s->go = gate_new();
        s->done = gate_new();
        setenv("BFC_CACHE", "on", 1);
        return s;
}

static void scene_free(struct scene *s)
{
        gate_free(&s->up);
        gate_free(&s->go);
        gate_free(&s->done);
}

static bfc_client *open_as(const char *socket, const char *tenant, uint64_t flags)
{
        struct bfc_options o = {
                .struct_size = sizeof(o), .socket = socket, .tenant = tenant, .flags = flags
        };
        bfc_client *client = NULL;

        REQUIRE(bfc_connect(&o, &client) == 0, "%s", bfc_last_error());
        return client;
}

static struct bfc_client_stats stats(bfc_client *client)
{
        struct bfc_client_stats s = { .struct_size = sizeof(s) };

        REQUIRE(bfc_stats(client, &s) == 0, "%s", bfc_last_error());
        return s;
}

/* In pieces that are slabs of their own; then frees them all. */
static void fill_cache(bfc_client *client, uint64_t n_bytes)
{
        unsigned n = (unsigned)(n_bytes / (4 * MIB));
        void *p[64];

        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_malloc(client, 4 * MIB, &p[i]) == 0, "%u: %s", i, bfc_last_error());
        for (unsigned i = 0; i < n; i++)
                REQUIRE(bfc_free(client, p[i]) == 0, "%s", bfc_last_error());
        REQUIRE(stats(client).bytes_idle >= n * 4 * MIB, "nothing lies idle");
}

/* Has what is left of its limit lie idle, and does something else meanwhile. */
static void idle(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = open_as(s->socket, s->tenant, s->flags);
        void *kept = NULL;

        if (s->hold_bytes > 0)
                REQUIRE(bfc_malloc(client, s->hold_bytes, &kept) == 0, "%s", bfc_last_error());
        fill_cache(client, LIMIT - s->hold_bytes);
        gate_open(&s->up);
        REQUIRE(gate_wait(&s->go, 60000), "not in time");
        bfc_disconnect(client);
}

static int malloc_as(const struct rig *rig, const char *tenant, uint64_t n_bytes, uint32_t wait_ms)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .wait_ms = wait_ms };
        bfc_client *client = open_as(rig->socket, tenant, 0);
        void *p = NULL;
        int r = bfc_malloc_with(client, n_bytes, &how, &p);

        if (r == 0 && rig_device() == ON_HOST) {
                pattern_write(p, 4096, n_bytes);
                ck_assert(pattern_holds(p, 4096, n_bytes));
        }
        bfc_disconnect(client);
        return r;
}

/* ---- within a tenant ---------------------------------------------------------- */

START_TEST(an_idle_process_gives_way)
{
        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start(idle, s);

        ck_assert(gate_wait(&s->up, 20000));
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_reserved, LIMIT);
        ck_assert_int_eq(malloc_as(rig, "red", 20 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "red", 60 * MIB, 0), 0);
        ck_assert_int_eq(malloc_as(rig, "red", LIMIT, 0), 0);
        gate_open(&s->go);
        child_join(pid);
        scene_free(s);
        rig_stop(rig);
}
END_TEST

/* ---- between tenants ---------------------------------------------------------- */

START_TEST(another_tenant_gives_way)
{
        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = scene_new(rig, "red");
        pid_t pid = child_start(idle, s);

        ck_assert(gate_wait(&s->up, 20000));
        ck_assert_int_eq(malloc_as(rig, "blue", 60 * MIB, 0), 0);
        ck_assert_uint_ge(rig_figures(rig, "red", "train").bytes_reserved, 16 * MIB);
        gate_open(&s->go);
        child_join(pid);
        scene_free(s);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        const TTest *const tests[] = { an_idle_process_gives_way, another_tenant_gives_way, NULL };

        return harness_main(harness_suite("trim", tests));
}
