/* Parking beside work on streams, captures, and clients without threads. For CUDA devices only.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "tests/gpu/driver.h"
#include "tests/integration/tools.h"

#define BLOCK (6 * MIB)

static const struct rig_config config = {
        .partitions = "      - {name: train, limit: 64MiB}\n"
                      "  - id: host\n    size: 64MiB\n    partitions:\n"
                      "      - {limit: 32MiB, name: parking}\n",
        .tenants = "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 32MiB}, "
                   "{partition: parking, limit: 32MiB}]\n",
};

#define CAN_PARK (rig_device() == ON_CUDA_FD)

static void *parkable(bfc_client *client)
{
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
        return p;
}

static CUstream stream_new(void)
{
        CUcontext context;
        CUstream s = NULL;

        REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS &&
                        cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS,
                "no stream");
        return s;
}

/* Parking waits for all work, and uses no stream that the library knows. */
TEST(a_destroyed_stream_is_not_used)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client;

        setenv("FAKE_CUDA_DESTROYED_STREAM", "crash", 1);
        client = client_open(rig, "red", "train");
        if (CAN_PARK) {
                void *p = parkable(client), *q;
                CUstream s = stream_new();

                ck_assert_ok(bfc_malloc_async(client, MIB, (uintptr_t)s, &q));
                pattern_write(p, BLOCK, 1);
                ck_assert_int_eq(cu.cuStreamDestroy_v2(s), CUDA_SUCCESS);
                ck_assert_ok(bfc_park(client, p, BFC_BACKUP, "parking"));
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 1));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

struct work {
        void *ptr;
        int is_done; /* atomic */
};

static void write_slowly(void *data)
{
        struct work *work = data;

        usleep(100000);
        pattern_write(work->ptr, BLOCK, 2);
        __atomic_store_n(&work->is_done, 1, __ATOMIC_RELEASE);
}

TEST(copies_need_host_memory)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p;

        if (CAN_PARK) {
                p = parkable(client);
                ck_assert_int_eq(bfc_park(client, p, BFC_BACKUP, "train"), -EINVAL);
                ck_assert_ptr_nonnull(strstr(bfc_last_error(), "partition 'train' is on a GPU"));
                ck_assert_int_eq(bfc_park_tag(client, NULL, BFC_BACKUP, "train"), -EINVAL);
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(a_park_waits_for_work)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");

        if (CAN_PARK) {
                struct work work = { .ptr = parkable(client) };
                CUstream s = stream_new();

                pattern_write(work.ptr, BLOCK, 1);
                ck_assert_int_eq(cu.cuLaunchHostFunc(s, write_slowly, &work), CUDA_SUCCESS);
                ck_assert_ok(bfc_park(client, work.ptr, BFC_BACKUP, "parking"));
                ck_assert_int_eq(__atomic_load_n(&work.is_done, __ATOMIC_ACQUIRE), 1);
                ck_assert_ok(bfc_wake(client, work.ptr, SETTLE_MS));
                ck_assert(pattern_holds(work.ptr, BLOCK, 2));
                ck_assert_ok(bfc_free(client, work.ptr));
        } else {
                void *p;

                ck_assert_int_eq(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p), -ENOTSUP);
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

static void wait_for_end(void *arg)
{
        struct work *work = arg;

        while (!__atomic_load_n(&work->is_done, __ATOMIC_ACQUIRE))
                usleep(1000);
}

struct free_call {
        bfc_client *client;
        void *ptr;
        int result;
};

static void *free_it(void *arg)
{
        struct free_call *f = arg;

        f->result = bfc_free(f->client, f->ptr);
        return NULL;
}

static bool is_leaving(const struct free_call *f)
{
        if (bfc_use_begin(f->client, f->ptr, 0) == -EINVAL)
                return true;
        (void)bfc_use_end(f->client, f->ptr); /* it may be leaving by now */
        return false;
}

/* The free waits for work: the block is still there, and no call may use it. */
TEST(a_tag_is_used_beside_a_free)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "a" };
        struct rig *rig = rig_start(&config);
        struct free_call f = { .client = client_open(rig, "red", "train") };
        struct work work = { .ptr = NULL };
        pthread_t thread;
        void *stays;
        CUstream s;

        if (CAN_PARK) {
                ck_assert_ok(bfc_malloc_with(f.client, BLOCK, &options, &f.ptr));
                ck_assert_ok(bfc_malloc_with(f.client, BLOCK, &options, &stays));
                s = stream_new();
                ck_assert_int_eq(cu.cuLaunchHostFunc(s, wait_for_end, &work), CUDA_SUCCESS);
                ck_assert_int_eq(pthread_create(&thread, NULL, free_it, &f), 0);
                ck_assert(WAIT_FOR(is_leaving(&f), SETTLE_MS));
                ck_assert_ok(bfc_use_begin_tag(f.client, "a", 0));
                ck_assert_ok(bfc_use_end(f.client, stays));
                __atomic_store_n(&work.is_done, 1, __ATOMIC_RELEASE);
                ck_assert_int_eq(pthread_join(thread, NULL), 0);
                ck_assert_int_eq(f.result, 0);
                ck_assert_ok(bfc_free(f.client, stays));
        }
        bfc_disconnect(f.client);
        rig_stop(rig);
}

/* A call has named the stream during its capture, and then one after it. */
TEST(a_capture_forbids_a_park)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");

        if (CAN_PARK) {
                void *p = parkable(client), *q;
                CUstream s = stream_new();
                CUgraph graph = NULL;

                pattern_write(p, BLOCK, 1);
                ck_assert_int_eq(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
                ck_assert_ok(bfc_malloc_async(client, MIB, (uintptr_t)s, &q));
                ck_assert_int_eq(bfc_park(client, p, BFC_BACKUP, "parking"), -EBUSY);
                ck_assert(pattern_holds(p, BLOCK, 1));
                ck_assert_int_eq(cu.cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
                cu.cuGraphDestroy(graph);
                ck_assert_ok(bfc_free_async(client, q, (uintptr_t)s));
                ck_assert_ok(bfc_park(client, p, BFC_BACKUP, "parking"));
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 1));
                ck_assert_ok(bfc_free(client, p));
                ck_assert_ok(bfc_end_stream(client, (uintptr_t)s));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

static bool has_memory_back(struct rig *rig, bfc_client *client)
{
        ck_assert_ok(bfc_poll(client));
        return rig_stats(rig, "red", "train").bytes_reserved == 0;
}

/* Without a thread the program answers the daemon, or the client has no parkable blocks. */
TEST(clients_without_a_thread)
{
        struct rig *rig = rig_start(&config);
        bfc_client *silent = client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_NO_THREAD);
        bfc_client *client = client_with(.socket = rig->socket, .tenant = "red", .flags = BFC_POLL);
        void *p;

        ck_assert_int_eq(bfc_malloc_flags(silent, NULL, BLOCK, BFC_PARKABLE, &p), -ENOTSUP);
        if (CAN_PARK) {
                p = parkable(client);
                pattern_write(p, BLOCK, 1);
                ck_assert_ok(bfc_park(client, p, BFC_BACKUP, "parking"));
                ck_assert(WAIT_FOR(has_memory_back(rig, client), SETTLE_MS));
                ck_assert_ok(bfc_wake(client, p, 0));
                ck_assert(pattern_holds(p, BLOCK, 1));
        }
        bfc_disconnect(client);
        bfc_disconnect(silent);
        rig_stop(rig);
}
