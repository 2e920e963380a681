/* Streams that are captured into graphs, and streams that are destroyed, beside all that the
 * library does with a driver. For CUDA devices only.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The fake driver spoils a capture wherever a driver may, and ends the process for a destroyed stream, as
 * drivers do. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/driver.h"
#include "tests/integration/moved_clock.h"
#include "tests/integration/tools.h"
#include "tests/integration/raw.h"

#define EXPIRES_MS 11000 /* longer than a capture of a stream that no call names any more */

static const struct rig_config two_tenants = {
        .top = "timeouts: {reclaim: 60m, quarantine: 60m}\n",
        .partitions = "      - {name: train, limit: 20MiB, growth: on-demand}\n",
        .tenants = "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n"
                   "  - {name: blue, match: {uid: @UID@}, quotas: [{partition: train, limit: 20MiB}]}\n",
};

/* ---- the driver, as a job has it ------------------------------------------ */

/* The same context as the library's. */
static void enter_context(void)
{
        CUcontext context;

        REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS, "no driver");
}

static CUstream stream_new(unsigned flags)
{
        CUstream s = NULL;

        REQUIRE(cu.cuStreamCreate(&s, flags) == CUDA_SUCCESS, "no stream");
        return s;
}

static void stream_destroy(CUstream s)
{
        REQUIRE(cu.cuStreamDestroy_v2(s) == CUDA_SUCCESS, "the stream cannot be destroyed");
}

static void begin_capture(CUstream s)
{
        REQUIRE(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS, "no capture");
}

static void end_capture(CUstream s)
{
        CUgraph graph = NULL;
        CUresult r = cu.cuStreamEndCapture(s, &graph);

        REQUIRE(r == CUDA_SUCCESS, "the capture was spoilt: %d", (int)r);
        cu.cuGraphDestroy(graph);
}

/* Work that ends when it is told to, or by itself after a minute. */
struct work {
        int may_end, is_done; /* atomic */
};

static void work_run(void *data)
{
        struct work *w = data;

        for (int i = 0; i < 300000 && !__atomic_load_n(&w->may_end, __ATOMIC_ACQUIRE); i++)
                usleep(2000);
        __atomic_store_n(&w->is_done, 1, __ATOMIC_RELEASE);
}

static void work_put(CUstream s, struct work *w)
{
        REQUIRE(cu.cuLaunchHostFunc(s, work_run, w) == CUDA_SUCCESS, "no work");
}

static void work_end(struct work *w)
{
        __atomic_store_n(&w->may_end, 1, __ATOMIC_RELEASE);
}

static bool work_is_done(const struct work *w)
{
        return __atomic_load_n(&w->is_done, __ATOMIC_ACQUIRE) != 0;
}

static uintptr_t number(CUstream s)
{
        return (uintptr_t)s;
}

/* Returns all memory that may be returned by now. True: that was all of it. */
static bool all_is_back(bfc_client *client)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };

        REQUIRE(bfc_trim(client, SIZE_MAX) == 0 && bfc_stats(client, &stats) == 0, "%s", bfc_last_error());
        return stats.bytes_reserved == 0;
}

/* ---- captures --------------------------------------------------------------- */

struct scene {
        const char *socket;
        unsigned flags; /* of the stream */
        bool is_known;  /* the library was told of it */
        struct gate up, go;
};

/* Has memory that it does not use, and captures until it is told to stop. */
static void capture_and_wait(void *arg)
{
        struct scene *s = arg;
        bfc_client *client = child_client_open(s->socket, "red");
        CUstream stream;
        void *p, *q;

        enter_context();
        stream = stream_new(s->flags);
        REQUIRE(bfc_malloc(client, 16 * MIB, &p) == 0, "%s", bfc_last_error());
        if (s->is_known) {
                REQUIRE(bfc_malloc_async(client, MIB, number(stream), &q) == 0, "%s", bfc_last_error());
                REQUIRE(bfc_free_async(client, q, number(stream)) == 0, "%s", bfc_last_error());
                REQUIRE(WAIT_FOR(bfc_trim(client, SIZE_MAX) == 0, 60000), "%s", bfc_last_error());
        }
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        begin_capture(stream);
        gate_meet(&s->up, &s->go);
        end_capture(stream);
        REQUIRE(bfc_malloc(client, 16 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_end_stream(client, number(stream)) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* One job's capture is none of another one's allocation, and the other way round. */
LOOP_TEST(a_capture_survives_a_retire, 4)
{
        struct rig *rig = rig_start(&two_tenants);
        struct scene *s = shared_memory(sizeof(*s));
        struct raw *blue;
        Bfcd__Block block;
        pid_t pid;

        *s = (struct scene){ rig->socket, _i % 2 == 0 ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT, _i >= 2,
                             gate_new(), gate_new() };
        pid = child_start_until(&s->up, capture_and_wait, s);
        blue = session_open(rig->socket, "blue");
        ck_assert_int_eq(raw_malloc(blue, 0, 18 * MIB, &block), 0);
        session_end(blue);
        gate_open(&s->go);
        child_join(pid);
        rig_stop(rig);
}

/* The block is put aside, and available to all after the capture. _i: a stream that waits for the default
 * stream and that the library knows nothing of; or one that does not, and that it was told of in the capture. */
LOOP_TEST(a_capture_survives_a_free, 2)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = client_open(rig, "red", NULL);
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        bfc_pool *pool = NULL;
        void *p, *q, *r, *in_capture = NULL;
        CUstream s;

        enter_context();
        s = stream_new(_i == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
        ck_assert_ok(bfc_malloc(client, MIB, &p));
        ck_assert_ok(bfc_pool_new(client, MIB, &pool));
        ck_assert_ok(bfc_malloc_async(client, MIB, 0, &q));
        begin_capture(s);
        if (_i == 1)
                ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &in_capture));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(bfc_free(client, p), -EINVAL);
        ck_assert_ok(bfc_pool_free(pool));
        ck_assert_ok(bfc_free(client, q));
        ck_assert_ok(bfc_stats(client, &stats));
        ck_assert_uint_eq(stats.num_blocks, _i == 0 ? 0 : 1);
        ck_assert_ok(bfc_malloc(client, MIB, &r)); /* not that memory, before the capture's end */
        ck_assert(r != p && r != q);
        ck_assert_ok(bfc_free(client, r));
        ck_assert(!all_is_back(client));
        end_capture(s);
        ck_assert_ok(bfc_free_async(client, in_capture, number(s)));
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        stream_destroy(s);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* Its memory stays mapped until the process ends, because the capture forbids to wait for work. */
static void disconnect_in_a_capture(void *socket)
{
        bfc_client *client = child_client_open(socket, "red");
        CUstream s;
        void *p;

        enter_context();
        s = stream_new(CU_STREAM_NON_BLOCKING);
        begin_capture(s);
        REQUIRE(bfc_malloc_async(client, MIB, number(s), &p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
        REQUIRE(cu.cuMemsetD8Async((CUdeviceptr)p, 1, MIB, s) == CUDA_SUCCESS, "it is not mapped any more");
        end_capture(s);
}

RIG_TEST(a_capture_survives_a_disconnect, two_tenants)
{
        child_join(child_start(disconnect_in_a_capture, rig->socket));
}

/* ---- destroyed streams -------------------------------------------------------- */

static bfc_client *start(struct rig *rig)
{
        bfc_client *client;

        setenv("FAKE_CUDA_DESTROYED_STREAM", "crash", 1);
        client = client_open(rig, "red", NULL);
        enter_context();
        return client;
}

/* Whether a new block of this stream is at that place. */
static bool is_given_again(bfc_client *client, CUstream s, const void *place)
{
        bool ret;
        void *p;

        REQUIRE(bfc_malloc_async(client, MIB, number(s), &p) == 0, "%s", bfc_last_error());
        ret = p == place;
        REQUIRE(bfc_free_async(client, p, number(s)) == 0, "%s", bfc_last_error());
        return ret;
}

/* Nothing is asked of a stream that has ended, for any former use, and what a new one with its
 * number is given is not what the old one works with. */
TEST(ended_streams_release_their_blocks)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING), t = stream_new(CU_STREAM_NON_BLOCKING), s2, t2, u;
        struct work in_s = { 0 }, in_t = { 0 };
        void *home, *recorded, *left, *elsewhere;

        u = stream_new(CU_STREAM_NON_BLOCKING);
        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &home));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(u), &recorded));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &left));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(u), &elsewhere));
        ck_assert_ok(bfc_record_stream(client, recorded, number(t)));
        work_put(s, &in_s);
        work_put(t, &in_t);
        ck_assert_ok(bfc_free_async(client, home, number(s)));
        ck_assert_ok(bfc_free_async(client, elsewhere, number(t)));
        ck_assert_ok(bfc_end_stream(client, number(s)));
        ck_assert_ok(bfc_end_stream(client, number(t)));
        stream_destroy(s);
        stream_destroy(t);
        s2 = stream_new(CU_STREAM_NON_BLOCKING);
        t2 = stream_new(CU_STREAM_NON_BLOCKING);
        ck_assert((s2 == s && t2 == t) || (s2 == t && t2 == s));
        ck_assert_ok(bfc_free_async(client, recorded, number(u))); /* behind what the first t was given */
        ck_assert_ok(bfc_free_async(client, left, number(t2)));
        for (int i = 0; i < 20; i++) {
                ck_assert(!is_given_again(client, s2, home) && !is_given_again(client, t2, home));
                ck_assert(!is_given_again(client, u, recorded) && !is_given_again(client, u, elsewhere));
                ck_assert(!all_is_back(client));
        }
        ck_assert(!work_is_done(&in_s) && !work_is_done(&in_t));
        work_end(&in_s);
        work_end(&in_t);
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        ck_assert(work_is_done(&in_s) && work_is_done(&in_t));
        bfc_disconnect(client);
        rig_stop(rig);
}

static void *end_later(void *arg)
{
        usleep(100000);
        work_end(arg);
        return NULL;
}

/* A stream that was only destroyed: its work counts all the same, and the next stream with its handle has to wait. */
TEST(streams_that_were_not_ended_keep_their_blocks)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING), t = stream_new(CU_STREAM_NON_BLOCKING), t2;
        struct work in_t = { 0 };
        pthread_t thread;
        void *p, *q, *own, *whole;

        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &p));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &q));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(t), &own));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(t), &whole));
        ck_assert_ok(bfc_record_stream(client, p, number(t)));
        work_put(t, &in_t);
        ck_assert_ok(bfc_free_async(client, q, number(t)));
        ck_assert_ok(bfc_free_async(client, own, number(t)));
        stream_destroy(t);
        ck_assert_ok(bfc_free_async(client, p, number(s)));
        for (int i = 0; i < 20; i++)
                ck_assert(!is_given_again(client, s, p) && !is_given_again(client, s, q));
        t2 = stream_new(CU_STREAM_NON_BLOCKING);
        ck_assert_ptr_eq(t2, t);
        for (int i = 0; i < 20; i++)
                ck_assert(!is_given_again(client, t2, own) && !is_given_again(client, s, own));
        ck_assert(!work_is_done(&in_t));
        ck_assert_int_eq(pthread_create(&thread, NULL, end_later, &in_t), 0);
        ck_assert_ok(bfc_trim(client, SIZE_MAX)); /* waits */
        ck_assert(work_is_done(&in_t));
        pthread_join(thread, NULL);
        ck_assert_ok(bfc_free(client, whole));
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        ck_assert_ok(bfc_end_stream(client, number(t2)));
        stream_destroy(t2);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* Calls that name no stream, or another one, when the library knows a destroyed one. _i: it also saw its capture. */
LOOP_TEST(no_call_uses_a_destroyed_stream, 2)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING), t = stream_new(CU_STREAM_NON_BLOCKING);
        void *p, *q, *r, *plain;

        ck_assert_ok(bfc_malloc(client, MIB, &plain));
        pattern_write(plain, MIB, 3);
        ck_assert_ok(bfc_malloc_async(client, MIB, number(t), &p));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(t), &q));
        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &r));
        ck_assert_ok(bfc_record_stream(client, r, number(t)));
        if (_i == 1)
                begin_capture(t);
        ck_assert_ok(bfc_free_async(client, p, number(t)));
        if (_i == 1)
                end_capture(t);
        stream_destroy(t);
        ck_assert_ok(bfc_free_async(client, r, number(s)));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_free(client, q));
        ck_assert_ok(bfc_malloc_async(client, 2 * MIB, number(s), &q));
        ck_assert_ok(bfc_malloc_async(client, 2 * MIB, 0, &p));
        ck_assert_ok(bfc_free_async(client, p, 0));
        ck_assert(bfc_malloc(client, 32 * MIB, &p) < 0);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert(pattern_holds(plain, MIB, 3));
        ck_assert_ok(bfc_free(client, plain));
        ck_assert_ok(bfc_free(client, q));
        t = stream_new(CU_STREAM_NON_BLOCKING);
        ck_assert_ok(bfc_malloc_async(client, MIB, number(t), &p)); /* with that handle; it is not captured */
        ck_assert_ok(bfc_free_async(client, p, number(t)));
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* A stream whose only naming call was during its capture, so its id is unknown. Its handle's next owner has no
 * such work. */
TEST(a_stream_that_was_named_in_a_capture_keeps_its_blocks)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING), t = stream_new(CU_STREAM_NON_BLOCKING), t2;
        struct work in_t = { 0 };
        void *p, *q;

        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &p));
        begin_capture(t);
        ck_assert_ok(bfc_record_stream(client, p, number(t)));
        end_capture(t);
        work_put(t, &in_t);
        ck_assert_ok(bfc_free_async(client, p, number(s)));
        stream_destroy(t);
        t2 = stream_new(CU_STREAM_NON_BLOCKING);
        ck_assert_ptr_eq(t2, t);
        for (int i = 0; i < 20; i++) {
                ck_assert_ok(bfc_malloc_async(client, MIB, number(t2), &q));
                ck_assert(q != p);
                ck_assert_ok(bfc_free_async(client, q, number(t2)));
                ck_assert(!is_given_again(client, s, p));
        }
        ck_assert(!work_is_done(&in_t));
        work_end(&in_t);
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        ck_assert_ok(bfc_end_stream(client, number(t2)));
        stream_destroy(t2);
        bfc_disconnect(client);
        rig_stop(rig);
}

static void *trim_main(void *arg)
{
        (void)bfc_trim(arg, SIZE_MAX);
        return NULL;
}

/* A thread that waits for all work does not keep others from allocating, on which that work may depend. */
TEST(a_wait_for_work_stops_no_other_call)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING), t = stream_new(CU_STREAM_NON_BLOCKING);
        struct work in_t = { 0 };
        pthread_t threads[2];
        void *p;

        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &p));
        ck_assert_ok(bfc_record_stream(client, p, number(t)));
        work_put(t, &in_t);
        ck_assert_ok(bfc_free_async(client, p, number(s)));
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, trim_main, client), 0);
        for (int i = 0; i < 100; i++) {
                ck_assert(!is_given_again(client, s, p));
                usleep(5000);
        }
        ck_assert(!work_is_done(&in_t));
        work_end(&in_t);
        for (int i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        ck_assert(work_is_done(&in_t));
        bfc_disconnect(client);
        rig_stop(rig);
}

static bool can_malloc(bfc_client *client, void **ret)
{
        return bfc_malloc(client, MIB, ret) == 0;
}

/* The end of a capture that no call can see: the stream is destroyed. Then the memory is available after a time. */
TEST(a_capture_that_is_not_seen_to_end_expires)
{
        struct rig *rig = rig_start(&two_tenants);
        bfc_client *client = start(rig);
        CUstream s = stream_new(CU_STREAM_NON_BLOCKING);
        void *p;

        begin_capture(s);
        ck_assert_ok(bfc_malloc_async(client, MIB, number(s), &p));
        end_capture(s);
        stream_destroy(s);
        ck_assert_ok(bfc_free(client, p));
        for (int i = 0; i < 60; i++) { /* the limit is 20 of them */
                if (!can_malloc(client, &p)) {
                        moved_clock_pass(EXPIRES_MS);
                        ck_assert(WAIT_FOR(can_malloc(client, &p), SETTLE_MS));
                }
                ck_assert_ok(bfc_free(client, p));
        }
        ck_assert(WAIT_FOR(all_is_back(client), SETTLE_MS));
        bfc_disconnect(client);
        rig_stop(rig);
}
