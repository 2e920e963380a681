/* Events in streams of a CUDA device, on the fake driver.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everything happens in one process of the case, so each test is one or two acts: functions
 * that run there and return the line in which something was wrong, 0 for none. */
#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/driver.h"
#include "tests/suite.h"
#include "tests/unit/cuda_acts.h"
#include "tests/unit/cuda_case.h"

FIXTURE(streams, case_setup, case_teardown);

#define SLOW "FAKE_CUDA_STREAM_DELAY_US=50000"

#define EXPECT(condition)                                                                                    \
        do {                                                                                                 \
                if (!(condition))                                                                            \
                        return __LINE__;                                                                     \
        } while (0)

static struct device_streams *streams;

static int open_streams(const uint8_t uuid[16])
{
        struct device_view view = { .is_cuda = true };

        memcpy(view.uuid, uuid, 16);
        return device_streams_new(&view, &streams);
}

/* A context for the calls of the test's own, and the streams of the device. */
static int begin(CUcontext *ret)
{
        const char *why;
        CUdevice d;

        EXPECT(gpu_load(&why) == 0 && cu.cuInit(0) == CUDA_SUCCESS);
        EXPECT(open_streams(uuid_0) == 0);
        EXPECT(cu.cuDeviceGet(&d, 0) == CUDA_SUCCESS);
        EXPECT(cu.cuDevicePrimaryCtxRetain(ret, d) == CUDA_SUCCESS);
        EXPECT(cu.cuCtxPushCurrent_v2(*ret) == CUDA_SUCCESS);
        return 0;
}

static int end(void)
{
        CUcontext context;

        cu.cuCtxPopCurrent_v2(&context);
        cu.cuDevicePrimaryCtxRelease_v2(0);
        streams = device_streams_free(streams);
        return 0;
}

static int wait_for(struct device_event *e)
{
        int r;

        while ((r = device_event_query(streams, e)) == DEVICE_PENDING)
                usleep(1000);
        return r;
}

static void nothing(void *arg)
{
        (void)arg;
}

static int points_in(CUstream s)
{
        struct device_event *e = NULL, *again = NULL;
        CUcontext now = NULL;

        EXPECT(device_event_record(streams, (uintptr_t)s, &e) == 0);
        EXPECT(wait_for(e) == 0);
        EXPECT(cu.cuLaunchHostFunc(s, nothing, NULL) == CUDA_SUCCESS);
        EXPECT(device_event_record(streams, (uintptr_t)s, &again) == 0);
        EXPECT(device_event_query(streams, again) == DEVICE_PENDING);
        EXPECT(device_event_query(streams, e) == 0);
        EXPECT(cu.cuLaunchHostFunc(s, nothing, NULL) == CUDA_SUCCESS);
        EXPECT(device_event_record(streams, (uintptr_t)s, &e) == 0);
        EXPECT(device_event_query(streams, e) == DEVICE_PENDING);
        EXPECT(wait_for(e) == 0 && device_event_query(streams, again) == 0);
        EXPECT(device_event_forget(streams, e) == NULL && device_event_forget(streams, again) == NULL);
        EXPECT(cu.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now != NULL);
        return 0;
}

static int act_points(struct message *m)
{
        CUcontext context;
        CUstream s = NULL;
        int r = begin(&context);

        (void)m;
        EXPECT(r == 0);
        EXPECT(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        r = points_in(s);
        for (uintptr_t i = 0; r == 0 && i <= 2; i++) /* the handles that are no streams' */
                r = points_in((CUstream)i);
        EXPECT(r == 0 || (m->a = (uint64_t)r, false));
        cu.cuStreamDestroy_v2(s);
        return end();
}

static int act_captured(struct message *m)
{
        unsigned int flags = m->a == 0 ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
        struct device_event *before = NULL, *e = NULL, *other = NULL;
        CUcontext context;
        uint64_t id = 1;
        CUgraph graph;
        CUstream s = NULL;

        EXPECT(begin(&context) == 0);
        EXPECT(cu.cuStreamCreate(&s, flags) == CUDA_SUCCESS);
        EXPECT(device_event_record(streams, (uintptr_t)s, &before) == 0);
        EXPECT(cu.cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS);
        EXPECT(device_stream_check_captured(streams, (uintptr_t)s, &id) == 1 && id == 0);
        EXPECT(device_event_record(streams, (uintptr_t)s, &e) == -EBUSY);
        /* The default stream would spoil the capture of a stream that waits for it. */
        EXPECT(device_stream_check_captured(streams, 0, &id) == (flags == CU_STREAM_DEFAULT));
        EXPECT(device_event_record(streams, 0, &other) == (flags == CU_STREAM_DEFAULT ? -EBUSY : 0));
        EXPECT(wait_for(before) == 0);                            /* what was recorded before may be asked */
        EXPECT(cu.cuStreamEndCapture(s, &graph) == CUDA_SUCCESS); /* nothing has spoilt it */
        EXPECT(device_stream_check_captured(streams, (uintptr_t)s, &id) == 0 && id > 0);
        EXPECT(device_event_record(streams, (uintptr_t)s, &e) == 0 && wait_for(e) == 0);
        device_event_forget(streams, before);
        device_event_forget(streams, e);
        device_event_forget(streams, other);
        cu.cuGraphDestroy(graph);
        cu.cuStreamDestroy_v2(s);
        return end();
}

/* A stream of the other device, and one that is no more. */
static int act_foreign(struct message *m)
{
        struct device_event *e = NULL;
        CUcontext context, other;
        CUstream s = NULL;

        (void)m;
        EXPECT(begin(&context) == 0);
        EXPECT(cu.cuDevicePrimaryCtxRetain(&other, 1) == CUDA_SUCCESS);
        EXPECT(cu.cuCtxPushCurrent_v2(other) == CUDA_SUCCESS);
        EXPECT(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        EXPECT(device_event_record(streams, (uintptr_t)s, &e) == -EINVAL);
        EXPECT(cu.cuStreamDestroy_v2(s) == CUDA_SUCCESS);
        device_event_forget(streams, e);
        EXPECT(cu.cuCtxPopCurrent_v2(&other) == CUDA_SUCCESS);
        cu.cuDevicePrimaryCtxRelease_v2(1);
        return end();
}

/* A stream that gets the handle of a destroyed one has another id. m->a: the driver has ids. */
static int act_ids(struct message *m)
{
        uint64_t first = 1, again = 1, next = 1, none = 1;
        CUstream s = NULL, later = NULL;
        CUcontext context;

        EXPECT(begin(&context) == 0);
        EXPECT(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        EXPECT(device_stream_check_captured(streams, (uintptr_t)s, &first) == 0);
        EXPECT(device_stream_check_captured(streams, (uintptr_t)s, &again) == 0);
        EXPECT(cu.cuStreamDestroy_v2(s) == CUDA_SUCCESS);
        EXPECT(cu.cuStreamCreate(&later, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        EXPECT(later == s);
        EXPECT(device_stream_check_captured(streams, (uintptr_t)later, &next) == 0);
        EXPECT(first == again && (first > 0) == (m->a > 0) && (first != next) == (m->a > 0));
        EXPECT(device_stream_check_captured(streams, 0, &none) == 0 && none == 0);
        EXPECT(cu.cuStreamDestroy_v2(later) == CUDA_SUCCESS);
        return end();
}

/* A green context's stream takes events of that context alone; one event serves one after the other. */
static int act_green(struct message *m)
{
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL), *green = NULL;
        CUresult (*create)(void **, void *, CUdevice, unsigned int);
        CUresult (*stream_create)(CUstream *, void *, unsigned int, int);
        CUresult (*green_destroy)(void *);
        struct device_event *e = NULL;
        CUcontext context;
        CUdeviceptr at;
        CUstream s, plain;

        (void)m;
        *(void **)&create = dlsym(library, "cuGreenCtxCreate");
        *(void **)&stream_create = dlsym(library, "cuGreenCtxStreamCreate");
        *(void **)&green_destroy = dlsym(library, "cuGreenCtxDestroy");
        EXPECT(begin(&context) == 0);
        EXPECT(create(&green, NULL, 0, 1) == CUDA_SUCCESS);
        EXPECT(stream_create(&s, green, CU_STREAM_NON_BLOCKING, 0) == CUDA_SUCCESS);
        EXPECT(cu.cuStreamCreate(&plain, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS);
        EXPECT(cu.cuMemAlloc_v2(&at, MIB) == CUDA_SUCCESS);
        for (int i = 0; i < 2; i++) {
                EXPECT(cu.cuMemsetD8Async(at, 1, MIB, s) == CUDA_SUCCESS);
                EXPECT(device_event_record(streams, (uintptr_t)s, &e) == 0);
                EXPECT(device_event_query(streams, e) == DEVICE_PENDING);
                EXPECT(wait_for(e) == 0);
                EXPECT(device_event_record(streams, (uintptr_t)plain, &e) == 0);
                EXPECT(wait_for(e) == 0);
        }
        device_event_forget(streams, e);
        EXPECT(cu.cuMemFree_v2(at) == CUDA_SUCCESS);
        EXPECT(cu.cuStreamDestroy_v2(plain) == CUDA_SUCCESS);
        EXPECT(green_destroy(green) == CUDA_SUCCESS);
        dlclose(library);
        return end();
}

/* 700 from a query, and from everything after it; 214 takes the device. */
static int act_broken(struct message *m)
{
        int error = m->a == 700 ? -EIO : -ENODEV;
        struct device_event *e = NULL, *other = NULL;
        CUcontext context;
        uint64_t id;

        EXPECT(begin(&context) == 0);
        EXPECT(device_event_record(streams, 0, &e) == 0);
        EXPECT(device_event_query(streams, e) == error);
        EXPECT(device_event_query(streams, e) == error);
        EXPECT(device_event_record(streams, 0, &other) == error);
        EXPECT(device_stream_check_captured(streams, 0, &id) == error);
        device_event_forget(streams, e);
        device_event_forget(streams, other);
        return end();
}

static int act_forked_events(struct message *m)
{
        struct device_event *e = NULL, *other = NULL;
        CUcontext context;
        int status = 1;
        uint64_t id;
        pid_t pid;

        (void)m;
        EXPECT(begin(&context) == 0);
        EXPECT(device_event_record(streams, 0, &e) == 0);
        pid = fork();
        if (pid == 0) {
                bool ok = device_event_query(streams, e) == -ENODEV &&
                          device_event_record(streams, 0, &other) == -ENODEV &&
                          device_stream_check_captured(streams, 0, &id) == -ENODEV;

                device_event_forget(streams, other);
                device_event_forget(streams, e);
                device_streams_free(streams);
                _exit(ok ? 0 : 1);
        }
        EXPECT(waitpid(pid, &status, 0) == pid && status == 0);
        device_event_forget(streams, e);
        return end();
}

static void run_act(int (*act)(struct message *m), uint64_t a, const char *setting)
{
        struct process p = process_start();
        struct message m = { .fd = -1, .a = a };
        int line;

        if (setting)
                set(&p, setting);
        line = process_call(&p, act, &m);
        ck_assert_msg(line == 0, "line %d, %llu", line, (unsigned long long)m.a);
        ck_assert_int_eq(process_end(&p), 0);
}

TEST(an_event_is_a_point_in_a_stream)
{
        run_act(act_points, 0, SLOW);
}

LOOP_TEST(captures, 2)
{
        run_act(act_captured, (uint64_t)_i, NULL);
}

TEST(invalid_streams)
{
        run_act(act_foreign, 0, NULL);
}

TEST(ids_tell_streams_apart)
{
        run_act(act_ids, 1, NULL);
        run_act(act_ids, 0, "FAKE_CUDA_FAULT=cuStreamGetId:*:801");
}

TEST(streams_of_green_contexts)
{
        run_act(act_green, 0, SLOW);
}

TEST(a_broken_context)
{
        run_act(act_broken, 700, "FAKE_CUDA_FAULT=cuEventQuery:1:700!");
        run_act(act_broken, 214, "FAKE_CUDA_FAULT=cuEventQuery:1:214!");
}

/* A driver that fails once in a while says nothing about the work. */
static int act_unexpected(struct message *m)
{
        struct device_event *e = NULL;
        CUcontext context;

        EXPECT(begin(&context) == 0);
        if (m->a == 0) {
                EXPECT(device_event_record(streams, 0, &e) == -ENOMEM);
                EXPECT(device_event_record(streams, 0, &e) == 0);
        } else {
                EXPECT(device_event_record(streams, 0, &e) == 0);
                EXPECT(device_event_query(streams, e) == -EAGAIN);
        }
        EXPECT(wait_for(e) == 0);
        device_event_forget(streams, e);
        return end();
}

TEST(a_driver_that_fails)
{
        run_act(act_unexpected, 0, "FAKE_CUDA_FAULT=cuEventCreate:1:2");
        run_act(act_unexpected, 1, "FAKE_CUDA_FAULT=cuEventQuery:1:304");
}

TEST(forked_child_has_no_streams)
{
        run_act(act_forked_events, 0, NULL);
}
