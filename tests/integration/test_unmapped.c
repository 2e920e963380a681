/* Memory that a client cannot map: the request is refused with a sentence, and the
 * session goes on. What the client could not map is released as any extent is.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/harness.h"

static const struct rig_config two_tenants = {
        .size = "64MiB",
        .partitions = "      - {name: train, limit: 32MiB, growth: on-demand}\n",
        .tenants = "  - {name: red, match: {uid: [@UID@, @OTHER@]}, quotas: [{partition: train}]}\n"
                   "  - {name: blue, match: {uid: @UID@}, quotas: [{partition: train}]}\n",
};

/* ---- a client whose driver opens nothing ---------------------------------- */

struct scene {
        char socket[96];
        int code;    /* what the driver answers, or 0 */
        bool always; /* else to the first request, at which it is asked twice */
        struct gate up, go;
};

static struct scene *scene_new(const struct rig *rig, int code, bool always)
{
        struct scene *s = shared_memory(sizeof(*s));

        *s = (struct scene){ .code = code, .always = always, .up = gate_new(), .go = gate_new() };
        strcpy(s->socket, rig->socket);
        return s;
}

static bfc_client *open_with_fault(const struct scene *s, const char *tenant)
{
        const char *open =
                rig_device() == ON_CUDA_FD ? "cuMemImportFromShareableHandle" : "cuIpcOpenMemHandle";
        char fault[128];

        if (s->always)
                snprintf(fault, sizeof(fault), "%s:*:%d", open, s->code);
        else
                snprintf(fault, sizeof(fault), "%s:1:%d,%s:2:%d", open, s->code, open, s->code);
        if (s->code)
                setenv("FAKE_CUDA_FAULT", fault, 1);
        return child_client_open(s->socket, tenant);
}

/* Of this request alone, and with the way out. */
static void require_refused(int r, bool names_share)
{
        REQUIRE(r < 0 && r != -ECONNRESET && r != -EPROTO, "%d: %s", r, bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "could not be mapped"), "%s", bfc_last_error());
        if (names_share && rig_device() == ON_CUDA_IPC)
                REQUIRE(strstr(bfc_last_error(), "'share: fd'"), "%s", bfc_last_error());
}

static void be_refused_once(void *arg)
{
        const struct scene *s = arg;
        bfc_client *client = open_with_fault(s, "red");
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        void *p = NULL;

        require_refused(bfc_malloc(client, MIB, &p), s->code != 2);
        REQUIRE(!p, "a block that was refused");
        REQUIRE(bfc_usage(client, NULL, &usage) == 0, "%s", bfc_last_error());
        REQUIRE(usage.bytes_in_use == 0, "%llu bytes in use", (unsigned long long)usage.bytes_in_use);
        REQUIRE(bfc_malloc(client, MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, MIB, 1);
        REQUIRE(pattern_holds(p, MIB, 1), "bytes were lost");
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Whatever number the driver has for it. */
RIG_TEST(a_refused_handle_is_a_refused_request, two_tenants)
{
        static const int codes[] = { 1, 2, 101, 201, 205, 208, 304, 400, 800, 999 };

        for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++) {
                struct scene *s = scene_new(rig, codes[i], false);

                child_join(child_start(be_refused_once, s));
                ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
                ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
        }
}

/* Each request is refused, and the client releases what it could not map. */
static void be_refused_always(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = open_with_fault(s, "red");
        void *p = NULL;

        for (int i = 0; i < 20; i++)
                require_refused(bfc_malloc(client, (1 + (uint64_t)i % 5) * MIB, &p), true);
        gate_meet(&s->up, &s->go);
        require_refused(bfc_malloc(client, MIB, &p), true);
        bfc_disconnect(client);
}

TEST(extents_that_cannot_be_mapped_are_released)
{
        struct rig *rig;
        struct scene *s;
        bfc_client *blue;
        void *p;
        pid_t pid;

        if (!CHILDREN_HAVE_EVENTS)
                return;
        rig = rig_start(&two_tenants);
        s = scene_new(rig, 201, true);
        pid = child_start_until(&s->up, be_refused_always, s);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
        ck_assert_uint_gt(rig_stats(rig, "red", "train").bytes_reserved, 0);
        blue = client_open(rig, "blue", NULL);
        ck_assert_ok(bfc_malloc(blue, 32 * MIB, &p)); /* all that there is */
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        ck_assert_ok(bfc_free(blue, p));
        gate_open(&s->go);
        child_join(pid);
        bfc_disconnect(blue);
        rig_stop(rig);
}

/* ---- blocks of others ------------------------------------------------------- */

static void attach_in_vain(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = open_with_fault(s, "red");
        size_t n_bytes;
        void *p = NULL;

        require_refused(bfc_attach(client, "weights", 0, &p, &n_bytes), true);
        REQUIRE(bfc_attach(client, "weights", 0, &p, &n_bytes) == 0, "%s", bfc_last_error());
        REQUIRE(pattern_holds(p, n_bytes, 5), "other bytes");
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

static void publish(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_open(s->socket, "red");
        void *p;

        REQUIRE(bfc_malloc(client, MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, MIB, 5);
        REQUIRE(bfc_publish(client, p, "weights") == 0, "%s", bfc_last_error());
        gate_meet(&s->up, &s->go);
        REQUIRE(pattern_holds(p, MIB, 5), "other bytes");
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

RIG_TEST(a_shared_block_that_cannot_be_mapped, two_tenants)
{
        struct scene *s = scene_new(rig, 201, false);
        pid_t pid = child_start_until(&s->up, publish, s);

        child_join(child_start(attach_in_vain, s));
        gate_open(&s->go);
        child_join(pid);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
}

/* ---- other users ------------------------------------------------------------ */

static void be_of_another_user(void *arg)
{
        const struct scene *s = arg;
        bfc_client *client;
        void *p = NULL;
        int r;

        setenv("FAKE_CUDA_IPC_SAME_UID", "1", 1);
        client = child_client_open(s->socket, "red");
        r = bfc_malloc(client, MIB, &p);
        if (rig_device() == ON_CUDA_IPC)
                require_refused(r, true);
        else
                REQUIRE(r == 0 && bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* A driver that opens handles for the exporter's user only. */
TEST(a_gpu_client_of_another_user)
{
        struct rig *rig;
        struct scene *s;

        if (!others_may_run())
                return;
        rig = rig_start(&two_tenants);
        s = scene_new(rig, 0, false);
        child_join(child_start_as(OTHER_UID, OTHER_UID, be_of_another_user, s));
        rig_stop(rig);
}
