/* Two GPUs of different size (the fake driver's): which partition is on which,
 * when memory of one may be given back, and one that is lost. For CUDA devices
 * only, unlike the other programs here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/driver.h"
#include "tests/integration/tools.h"

#define STREAM_DELAY_US "300000"

/* The second device has 96 MiB, see harness.c. */
static const struct rig_config two_gpus = {
        .size = "128MiB",
        .partitions = "      - {name: train, limit: 50%}\n"
                      "      - {name: infer, limit: 50%}\n"
                      "  - id: cuda:1\n"
                      "    headroom: 32MiB\n"
                      "    partitions:\n"
                      "      - {name: other, limit: 100%}\n",
        .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: infer}, {partition: other}"),
};

/* ---- the driver, as a job has it ------------------------------------------ */

/* Makes the primary context current. It is the library's, too. */
static void enter_context(void)
{
        CUcontext context;

        REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS, "no driver");
}

/* ---- which is which -------------------------------------------------------- */

static void assert_partition(bfc_client *client, int ordinal, const char *expected)
{
        const char *name = NULL;

        REQUIRE(bfc_partition_for_device(client, ordinal, &name) == 0, "%s", bfc_last_error());
        REQUIRE(strcmp(name, expected) == 0, "%s", name);
}

/* A job that sees the second GPU alone: it is device 0 there. */
static void job_on_second_gpu(void *socket)
{
        const char *name = NULL;
        bfc_client *client;
        void *p;

        setenv("CUDA_VISIBLE_DEVICES", "1", 1);
        client = child_client_open(socket, NULL);
        assert_partition(client, 0, "other");
        REQUIRE(bfc_partition_for_device(client, 1, &name) == -ENOENT, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "other", 5 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 5 * MIB, 1);
        REQUIRE(pattern_holds(p, 5 * MIB, 1), "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "train", MIB, &p) == -ENODEV, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "CUDA_VISIBLE_DEVICES"), "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "other", MIB, &p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

RIG_TEST(each_device_has_its_partitions, two_gpus)
{
        bfc_client *client;
        void *p, *q;

        child_join(child_start(job_on_second_gpu, rig->socket));
        client = client_open(rig, NULL, NULL);
        assert_partition(client, 0, "train"); /* the first of two there */
        assert_partition(client, 1, "other");
        ck_assert_uint_eq(client_usage(client, "train").bytes_limit, 64 * MIB);
        ck_assert_uint_eq(client_usage(client, "other").bytes_limit, 64 * MIB);
        ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &p));
        ck_assert_ok(bfc_malloc_in(client, "train", 3 * MIB, &q));
        pattern_write(p, 3 * MIB, 7);
        pattern_write(q, 3 * MIB, 8);
        ck_assert(pattern_holds(p, 3 * MIB, 7) && pattern_holds(q, 3 * MIB, 8));
        ck_assert_uint_gt(client_usage(client, "other").bytes_reserved, 0);
        ck_assert_uint_eq(client_usage(client, "infer").bytes_reserved, 0);
        bfc_disconnect(client);
}

/* ---- what processes have outside of bfcd --------------------------------------- */

static const struct rig_config measured = {
        .size = "128MiB",
        .partitions = "      - {name: train, limit: 64MiB}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 64MiB"),
        .moves_clock = true,
};

struct outside_job {
        struct rig *rig;
        struct gate is_done;
};

/* A context of 4 MiB, 2 MiB and 6 MiB, of which the latter are charged. */
static void job_outside(void *userdata)
{
        struct outside_job *job = userdata;
        bfc_client *client = child_client_open(job->rig->socket, NULL);
        CUdeviceptr first, second;
        CUcontext context;
        void *p;

        REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS, "no driver");
        REQUIRE(bfc_malloc(client, 9 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(cu.cuMemAlloc_v2(&first, 2 * MIB) == CUDA_SUCCESS, "no memory");
        REQUIRE(bfc_charge(client, "train", 6 * MIB, 0) == 0, "%s", bfc_last_error());
        REQUIRE(cu.cuMemAlloc_v2(&second, 6 * MIB) == CUDA_SUCCESS, "no memory");
        gate_open(&job->is_done);
        pause();
}

/* After another question. */
static bool shows_outside(struct rig *rig, uint64_t n_bytes)
{
        rig_pass(rig, 5000);
        return rig_stats(rig, "red", "train").bytes_outside == n_bytes;
}

TEST(memory_outside_is_measured)
{
        struct outside_job job = { .is_done = gate_new() };
        pid_t pid;

        if (!suite_has_initial_pids()) {
                printf("# skipped: NVML tells the pids of another PID namespace\n");
                return;
        }
        setenv("FAKE_NVML", "driver", 1);
        setenv("FAKE_CUDA_CONTEXT_BYTES", "4MiB", 1);
        job.rig = rig_start(&measured);
        pid = child_start_until(&job.is_done, job_outside, &job);
        ck_assert(WAIT_FOR(shows_outside(job.rig, 6 * MIB), SETTLE_MS));
        child_kill(pid);
        ck_assert(WAIT_FOR(shows_outside(job.rig, 0), SETTLE_MS));
        rig_stop(job.rig);
        unsetenv("FAKE_NVML");
        unsetenv("FAKE_CUDA_CONTEXT_BYTES");
}

/* NVML may wait for another GPU for ever. */
TEST(growth_while_nvml_hangs)
{
        struct rig *rig;
        bfc_client *client;
        void *p[6];

        setenv("FAKE_NVML", "hang", 1);
        rig = rig_start(&measured);
        client = client_open(rig, NULL, NULL);
        for (int i = 0; i < 6; i++) {
                rig_pass(rig, 5000);
                ck_assert_ok(bfc_malloc(client, 9 * MIB, &p[i]));
        }
        for (int i = 0; i < 6; i++)
                ck_assert_ok(bfc_free(client, p[i]));
        bfc_disconnect(client);
        rig_stop(rig);
        unsetenv("FAKE_NVML");
}

/* ---- limits of the driver --------------------------------------------------------- */

#define FIRST  "GPU-fa4ec0da-0000-4000-8000-000000000001 /sys/fs/cgroup/"
#define SECOND "GPU-fa4ec0da-0000-4000-8000-000000000002 /sys/fs/cgroup/"

static unsigned count_lines(const char *path, const char *part)
{
        unsigned n = 0;
        char line[512];
        FILE *f = fopen(path, "re");

        while (f && fgets(line, sizeof(line), f))
                n += strstr(line, part) != NULL;
        if (f)
                fclose(f);
        return n;
}

static bool were_set(const char *path, const char *line)
{
        return count_lines(path, line) > 0;
}

struct watch {
        const char *socket;
        char output[128];
};

static void job_watch(void *userdata)
{
        const struct watch *w = userdata;
        int fd = open(w->output, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

        REQUIRE(dup2(fd, STDOUT_FILENO) == STDOUT_FILENO && dup2(fd, STDERR_FILENO) == STDERR_FILENO,
                "no file");
        execl(program_bfcctl(), "bfcctl", "--socket", w->socket, "driver-limits", "--watch", "10ms", NULL);
        _exit(1);
}

static void create_lease(const struct rig *rig, const char *name, const char *partition, const char *limit,
                         const char *kind, const char *match)
{
        free(ctl_text(rig, WORDS("lease", "create", name, "--tenant", "red", "--partition", partition,
                                 "--limit", limit, kind, match)));
}

/* One that an operator's lease replaces. */
static void create_scheduled(const struct rig *rig, const char *name, const char *match)
{
        ck_assert_int_eq(ctl(rig->lease_socket,
                             WORDS("lease", "create", name, "--tenant", "red", "--partition", "train",
                                   "--limit", "4MiB", "--cgroup", match),
                             NULL, NULL),
                         0);
}

static void say_limits(const struct rig *rig, const char *limits)
{
        char *out, *err;

        setenv("FAKE_NVML_LIMITS", limits, 1);
        ck_assert_int_eq(ctl(rig->monitor_socket, WORDS("driver-limits"), &out, &err), 1);
        text_has(out, "/sys/fs/cgroup/jobs/\\u202eb: 4.0 MiB\n");
        ck_assert_ptr_nonnull(
                strstr(err, "of /sys/fs/cgroup/none on cuda:1 cannot be set: NVML finds no such"));
        ck_assert_ptr_nonnull(strstr(err, "of /sys/fs/cgroup/broken on cuda:1 cannot be set: Input/output"));
        text_has(err, "of /sys/fs/cgroup/ on cuda:1 cannot be set: bfcd's own processes are in that");
        ck_assert(were_set(limits, FIRST "jobs/a 0 25165824\n"));
        ck_assert(were_set(limits, SECOND "jobs/a 0 4194304\n"));
        ck_assert(were_set(limits, FIRST "jobs/s 0 4194304\n"));
        ck_assert(!were_set(limits, "d.service") && !were_set(limits, "cgroup/ "));
}

static void watch_limits(struct rig *rig, const char *limits)
{
        struct watch w = { .socket = rig->monitor_socket };
        char away[128];
        unsigned n;
        pid_t pid;

        snprintf(w.output, sizeof(w.output), "%s/output", rig->folder);
        snprintf(away, sizeof(away), "%s/away", rig->folder);
        pid = child_start(job_watch, &w);
        free(ctl_text(rig, WORDS("lease", "set", "a", "--limit", "18MiB")));
        ck_assert(WAIT_FOR(were_set(limits, FIRST "jobs/a 0 27262976\n"), SETTLE_MS));
        free(ctl_text(rig, WORDS("lease", "end", "c")));
        ck_assert(WAIT_FOR(were_set(limits, SECOND "jobs/a 0 18446744073709551615\n"), SETTLE_MS));
        ck_assert(!were_set(limits, FIRST "jobs/a 0 18446744073709551615\n"));
        /* A control group may be another one. */
        n = count_lines(limits, FIRST "jobs/a 0 27262976\n");
        ck_assert(WAIT_FOR(count_lines(limits, FIRST "jobs/a 0 27262976\n") > n, SETTLE_MS));
        /* A daemon that is not there for a while. */
        ck_assert_int_eq(rename(rig->monitor_socket, away), 0);
        ck_assert(WAIT_FOR(count_lines(w.output, "the socket does not exist") == 1, SETTLE_MS));
        ck_assert_int_eq(rename(away, rig->monitor_socket), 0);
        free(ctl_text(rig, WORDS("lease", "set", "a", "--limit", "14MiB")));
        ck_assert(WAIT_FOR(were_set(limits, FIRST "jobs/a 0 23068672\n"), SETTLE_MS));
        child_kill(pid);
        ck_assert_uint_eq(count_lines(w.output, "the socket does not exist"), 1);
        ck_assert_uint_eq(count_lines(w.output, "broken on cuda:1 cannot be set"), 1);
        ck_assert_uint_eq(count_lines(w.output, "jobs/a: 26.0 MiB"), 1);
}

/* Of each control group on each GPU the sum of its leases. */
RIG_TEST(limits_of_the_driver, two_gpus)
{
        char devices[128], limits[128];
        FILE *f;

        snprintf(devices, sizeof(devices), "%s/nvml", rig->folder);
        snprintf(limits, sizeof(limits), "%s/limits", rig->folder);
        f = fopen(devices, "we");
        ck_assert_ptr_nonnull(f);
        fprintf(f, "%.40s\n%.40s\n", FIRST, SECOND);
        fclose(f);
        setenv("FAKE_NVML", devices, 1);
        create_lease(rig, "0", "other", "4MiB", "--cgroup", "/broken");
        create_lease(rig, "a", "train", "16MiB", "--cgroup", "/jobs/a");
        create_lease(rig, "b", "infer", "8MiB", "--cgroup", "/jobs/a");
        create_lease(rig, "c", "other", "4MiB", "--cgroup", "/jobs/a");
        create_scheduled(rig, "s-1", "/jobs/a");
        create_scheduled(rig, "s-2", "/jobs/s");
        create_lease(rig, "d", "other", "4MiB", "--unit", "d.service");
        create_lease(rig, "e", "other", "4MiB", "--cgroup", "/none");
        create_lease(rig, "f", "other", "4MiB", "--cgroup", "/");
        create_lease(rig, "g", "other", "4MiB", "--cgroup", "/jobs/\u202eb");
        ctl_refuses(rig, WORDS("driver-limits"), 1, "this driver has no such limits");
        say_limits(rig, limits);
        watch_limits(rig, limits);
        unsetenv("FAKE_NVML");
        unsetenv("FAKE_NVML_LIMITS");
}

/* ---- access of other GPUs ----------------------------------------------------- */

/* 0: none; 3: all; 0, too, where the driver does it by itself. */
static unsigned long long access_of(int device, const void *p)
{
        const CUmemLocation where = { CU_MEM_LOCATION_TYPE_DEVICE, device };
        unsigned long long flags = 99;
        CUresult result = cu.cuMemGetAccess(&flags, &where, (CUdeviceptr)p);

        return rig_device() == ON_CUDA_IPC && result == CUDA_ERROR_INVALID_VALUE ? 0 : flags;
}

/* What a job has, and what it gets later, is another GPU's only after the job said so. */
RIG_TEST(a_peer_has_what_it_was_given, two_gpus)
{
        const unsigned long long all = rig_device() == ON_CUDA_FD ? 3 : 0;
        bfc_client *client = client_open(rig, NULL, "train");
        void *p, *q, *of_infer, *other;

        ck_assert_ok(bfc_malloc(client, 3 * MIB, &p));
        ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &other));
        enter_context();
        ck_assert_uint_eq(access_of(0, p), all);
        ck_assert_uint_eq(access_of(1, p), 0);
        ck_assert_ok(bfc_enable_peer_access(client, 0, 1));
        ck_assert_ok(bfc_enable_peer_access(client, 0, 1));
        ck_assert_ok(bfc_malloc(client, 30 * MIB, &q));
        ck_assert_ok(bfc_malloc_in(client, "infer", 3 * MIB, &of_infer));
        ck_assert_uint_eq(access_of(1, p), all);
        ck_assert_uint_eq(access_of(1, (char *)q + 29 * MIB), all);
        ck_assert_uint_eq(access_of(1, of_infer), all);
        ck_assert_uint_eq(access_of(0, other), 0);
        ck_assert_int_eq(bfc_enable_peer_access(client, 0, 0), -EINVAL);
        ck_assert_int_eq(bfc_enable_peer_access(client, -1, 0), -EINVAL);
        ck_assert_int_eq(bfc_enable_peer_access(client, 0, 2), -ENOENT);
        ck_assert_int_eq(bfc_enable_peer_access(NULL, 0, 1), -EINVAL);
        bfc_disconnect(client);
}

/* A refusal is an error, of the call or of the allocation that needs it. */
static void job_without_peers(void *socket)
{
        bfc_client *client = child_client_open(socket, NULL);
        void *p;

        setenv("FAKE_CUDA_PEER_ACCESS", "0", 1);
        REQUIRE(bfc_malloc_in(client, "train", MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_enable_peer_access(client, 0, 1) == -ENOTSUP, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "do not reach each other"), "%s", bfc_last_error());
        bfc_disconnect(client);
}

static void job_with_refused_peers(void *socket)
{
        bfc_client *client = child_client_open(socket, NULL);
        void *p;

        setenv("FAKE_CUDA_FAULT", "cuMemSetAccess:1:217,cuMemSetAccess:2:217", 1); /* it is tried twice */
        REQUIRE(bfc_enable_peer_access(client, 0, 1) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "train", MIB, &p) == -ENOTSUP, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "the other GPUs that were given access"), "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "train", MIB, &p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

RIG_TEST(a_peer_that_is_refused, two_gpus)
{
        child_join(child_start(job_without_peers, rig->socket));
        if (rig_device() == ON_CUDA_FD)
                child_join(child_start(job_with_refused_peers, rig->socket));
}

/* PyTorch and CuPy give access by themselves, where it cannot be seen. */
static void framework_on_two_gpus(void *socket)
{
        const unsigned long long all = rig_device() == ON_CUDA_FD ? 3 : 0;
        void *p, *q;

        setenv("BFC_SOCKET", socket, 1);
        p = bfc_cupy_malloc(NULL, MIB, 0);
        REQUIRE(p, "%s", bfc_last_error());
        enter_context();
        REQUIRE(access_of(1, p) == 0, "access before it is needed");
        q = bfc_cupy_malloc(NULL, MIB, 1);
        REQUIRE(q, "%s", bfc_last_error());
        REQUIRE(access_of(1, p) == all && access_of(0, q) == all, "no access");
}

RIG_TEST(frameworks_have_peers, two_gpus)
{
        child_join(child_start(framework_on_two_gpus, rig->socket));
}

/* ---- giving back ----------------------------------------------------------- */

/* As cudaFree does: what the device still does with the block is done before
 * any other session can have it. */
RIG_TEST(free_waits_for_the_work, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train");
        CUstream stream;
        uint8_t *p;

        setenv("FAKE_CUDA_STREAM_DELAY_US", STREAM_DELAY_US, 1);
        ck_assert_ok(bfc_malloc(client, MIB, (void **)&p));
        enter_context();
        ck_assert_int_eq(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuMemsetD8Async((CUdeviceptr)p, 0x77, MIB, stream), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(cu.cuStreamQuery(stream), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuStreamDestroy_v2(stream), CUDA_SUCCESS);
        bfc_disconnect(client);
}

RIG_TEST(disconnect_waits_for_the_work, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train");
        CUstream stream;
        void *p;

        setenv("FAKE_CUDA_STREAM_DELAY_US", STREAM_DELAY_US, 1);
        ck_assert_ok(bfc_malloc(client, MIB, &p));
        enter_context();
        ck_assert_int_eq(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuMemsetD8Async((CUdeviceptr)p, 0x77, MIB, stream), CUDA_SUCCESS);
        bfc_disconnect(client);
        ck_assert_int_eq(cu.cuStreamQuery(stream), CUDA_SUCCESS);
}

/* To wait is not possible during a capture: the block is put aside, and the capture is not spoiled. */
RIG_TEST(free_during_a_capture, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train");
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        CUstream stream;
        CUgraph graph;
        void *p;

        ck_assert_ok(bfc_malloc(client, MIB, &p));
        enter_context();
        ck_assert_int_eq(cu.cuStreamCreate(&stream, CU_STREAM_DEFAULT), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_int_eq(bfc_free(client, p), -EINVAL);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_stats(client, &stats));
        ck_assert_uint_eq(stats.num_blocks, 0);
        ck_assert_uint_eq(stats.num_frees, 1);
        ck_assert_uint_gt(stats.bytes_reserved, 0);
        ck_assert_int_eq(cu.cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
        ck_assert_int_eq(cu.cuGraphDestroy(graph), CUDA_SUCCESS);
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_ok(bfc_stats(client, &stats));
        ck_assert_uint_eq(stats.bytes_reserved, 0);
        ck_assert_int_eq(cu.cuStreamDestroy_v2(stream), CUDA_SUCCESS);
        bfc_disconnect(client);
}

static unsigned count(const char *text, const char *part)
{
        unsigned n = 0;

        for (const char *at = text; (at = strstr(at, part)); at++)
                n++;
        return n;
}

/* Frameworks cannot be told: the block stays, as the graph may use it later, and it is said.
 * A pool is freed as a block of the program's own is. */
static void job_that_frees_in_a_capture(void *userdata)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        bfc_client *client = NULL;
        bfc_pool *pool = NULL;
        CUstream stream;
        CUgraph graph;
        void *p, *q;

        REQUIRE(freopen(userdata, "w", stderr), "stderr");
        p = bfc_torch_malloc((ssize_t)MIB, 0, NULL);
        q = bfc_cupy_malloc(NULL, MIB, 0);
        REQUIRE(p && q && bfc_default(&client) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_pool_new(client, MIB, &pool) == 0, "%s", bfc_last_error());
        enter_context();
        REQUIRE(cu.cuStreamCreate(&stream, CU_STREAM_DEFAULT) == CUDA_SUCCESS, "a stream");
        REQUIRE(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS,
                "a capture");
        bfc_torch_free(p, (ssize_t)MIB, 0, stream);
        bfc_cupy_free(NULL, q, 0);
        REQUIRE(bfc_pool_free(pool) == 0, "%s", bfc_last_error());
        REQUIRE(cu.cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "the capture is not spoiled");
        REQUIRE(bfc_stats(client, &stats) == 0 && stats.num_blocks == 2, "%llu blocks",
                (unsigned long long)stats.num_blocks);
        fflush(stderr);
}

RIG_TEST(frameworks_free_during_a_capture, two_gpus)
{
        char path[128], *said;

        snprintf(path, sizeof(path), "%s/stderr", rig->folder);
        setenv("BFC_SOCKET", rig->socket, 1);
        child_join(child_start(job_that_frees_in_a_capture, path));
        said = file_text(path);
        ck_assert_ptr_nonnull(strstr(said, "bfc_torch_free: a stream is being captured"));
        ck_assert_ptr_nonnull(strstr(said, "the block is kept until the process ends"));
        ck_assert_uint_eq(count(said, "\n"), 1);
        free(said);
}

/* ---- lost ------------------------------------------------------------------ */

static void lose_device(int ordinal)
{
        char path[128];
        int fd;

        snprintf(path, sizeof(path), "%s/lost-%d", getenv("FAKE_CUDA_STATE"), ordinal);
        fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
        ck_assert_int_ge(fd, 0);
        close(fd);
}

static void assert_status(const struct rig *rig, const char *const *states)
{
        char *out, row[64];

        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("status"), &out, NULL), 0);
        for (int i = 0; i < 2; i++) {
                snprintf(row, sizeof(row), "\ncuda:%d  %s ", i, states[i]);
                ck_assert_msg(strstr(out, row) != NULL, "no '%s' in:%s", row, out);
        }
        free(out);
}

/* Its partitions fail, the other device's do not, and the daemon ends with status 0. */
RIG_TEST(a_lost_device_refuses_requests, two_gpus)
{
        bfc_client *client = client_open(rig, NULL, "train");
        void *p = NULL, *other;
        char *log;

        rig->forgiven = "device 'cuda:0' ";
        assert_status(rig, (const char *const[]){ "ok", "ok" });
        ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &other));
        lose_device(0);
        ck_assert_int_eq(bfc_malloc(client, MIB, &p), -ENODEV);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "device 'cuda:0' of partition 'train' is lost"));
        ck_assert_int_eq(bfc_malloc_in(client, "infer", MIB, &p), -ENODEV);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "device 'cuda:0' of partition 'infer' is lost"));
        ck_assert_ptr_null(p);
        assert_status(rig, (const char *const[]){ "lost", "ok  " });

        pattern_write(other, 3 * MIB, 3);
        ck_assert(pattern_holds(other, 3 * MIB, 3));
        ck_assert_ok(bfc_malloc_in(client, "other", 20 * MIB, &p));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_free(client, other));
        log = rig_log(rig);
        ck_assert_uint_eq(count(log, "is lost: its partitions refuse all requests"), 1);
        free(log);
        bfc_disconnect(client);
        rig->n_fds -= 2; /* the keeper, which could not open the device again: its socket and its process */
}

static void find_device(int ordinal)
{
        char path[128];

        snprintf(path, sizeof(path), "%s/lost-%d", getenv("FAKE_CUDA_STATE"), ordinal);
        ck_assert_int_eq(unlink(path), 0);
}

struct after {
        char socket[96];
        struct gate up, lost, told, go;
};

/* Until its device is lost, and then until it is killed. What it asks for then takes the device: by giving back
 * what it freed, or, without events, where it could not unmap that, by making what its limit leaves. */
static void use_it_before(void *arg)
{
        const uint64_t n_bytes = CHILDREN_HAVE_EVENTS ? 44 * MIB : 4 * MIB;
        struct after *after = arg;
        bfc_client *client = child_client_open(after->socket, "red");
        void *p, *q, *none;

        REQUIRE(bfc_malloc_in(client, "train", 40 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc_in(client, "train", 20 * MIB, &q) == 0, "%s", bfc_last_error());
        if (CHILDREN_HAVE_EVENTS)
                REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        gate_meet(&after->up, &after->lost);
        REQUIRE(bfc_malloc_in(client, "train", n_bytes, &none) == -ENODEV, "%s", bfc_last_error());
        gate_open(&after->told);
        pause();
}

static void use_it_after(void *arg)
{
        struct after *after = arg;
        bfc_client *client;
        void *p;

        REQUIRE(gate_wait(&after->go, SETTLE_MS), "not in time");
        client = child_client_open(after->socket, "red");
        REQUIRE(bfc_malloc_in(client, "train", 60 * MIB, &p) == 0, "%s", bfc_last_error());
        pattern_write(p, 20 * MIB, 5);
        REQUIRE(pattern_holds(p, 20 * MIB, 5), "a block is not as it was");
        bfc_disconnect(client);
}

/* It is drained, reset, and resumed, and bfcd was not started again: what was on it is uncharged. */
RIG_TEST(a_lost_device_is_reset_and_resumed, two_gpus)
{
        struct after *after = shared_memory(sizeof(*after));
        pid_t before_it, after_it;
        bfc_client *client;
        void *other;

        strcpy(after->socket, rig->socket);
        rig->forgiven = "device 'cuda:0' ";
        after->up = gate_new();
        after->lost = gate_new();
        after->told = gate_new();
        after->go = gate_new();
        before_it = child_start(use_it_before, after); /* before this process has a driver */
        after_it = child_start(use_it_after, after);
        client = client_open(rig, NULL, "other");
        ck_assert_ok(bfc_malloc(client, 3 * MIB, &other));
        ck_assert(gate_wait(&after->up, SETTLE_MS));
        lose_device(0);
        gate_open(&after->lost);
        ck_assert(gate_wait(&after->told, SETTLE_MS));
        assert_status(rig, (const char *const[]){ "lost", "ok  " });
        ctl_refuses(rig, WORDS("resume", "cuda:0"), 1, "is lost and still in use");
        child_kill(before_it);
        ctl_says(rig, WORDS("drain", "cuda:0", "--wait=20"), "is drained.");
        assert_status(rig, (const char *const[]){ "drained", "ok  " });
        ctl_refuses(rig, WORDS("resume", "cuda:0"), 1,
                    "device 'cuda:0' could not be resumed: cuda:0: "); /* it is not reset yet */
        assert_status(rig, (const char *const[]){ "drained", "ok  " });
        find_device(0);
        ctl_says(rig, WORDS("resume", "cuda:0"), "is resumed.");
        assert_status(rig, (const char *const[]){ "ok", "ok  " });
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 0);
        gate_open(&after->go);
        child_join(after_it);
        pattern_write(other, 3 * MIB, 3);
        ck_assert(pattern_holds(other, 3 * MIB, 3));
        bfc_disconnect(client);
}

/* The job is asked for extents that it has mapped on a device that is lost by
 * then. It keeps its session, and what it has on the other one. */
TEST(a_device_lost_during_a_release)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train");
        void *p, *q, *other, *none;

        rig->forgiven = "device 'cuda:0' ";
        ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &other));
        ck_assert_ok(bfc_malloc(client, 40 * MIB, &p));
        ck_assert_ok(bfc_malloc(client, 20 * MIB, &q));
        ck_assert_ok(bfc_free(client, p));
        lose_device(0);
        ck_assert_int_eq(bfc_malloc(client, 44 * MIB, &none), -ENODEV);
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "is lost"));
        assert_status(rig, (const char *const[]){ "lost", "ok  " });
        pattern_write(other, 3 * MIB, 3);
        ck_assert(pattern_holds(other, 3 * MIB, 3));
        ck_assert_ok(bfc_free(client, q));
        ck_assert_ok(bfc_malloc_in(client, "other", MIB, &p));
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_count(rig).bytes_pending == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "other").bytes_reserved, 0);
        rig_terminate(rig);
        rig_discard(rig);
}

/* A kernel of the job goes astray, and with it all that the job has on the device.
 * What it has mapped there cannot be unmapped: it is released with the process. */
static void job_that_breaks_its_context(void *socket)
{
        bfc_client *client;
        void *p, *q, *none;

        setenv("FAKE_CUDA_FAULT", "cuMemsetD8:1:700!", 1);
        client = child_client_open(socket, NULL);
        REQUIRE(bfc_malloc(client, 40 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 20 * MIB, &q) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        enter_context();
        REQUIRE(cu.cuMemsetD8_v2((CUdeviceptr)q, 0, 16) == CUDA_ERROR_ILLEGAL_ADDRESS, "the fault");
        REQUIRE(bfc_malloc(client, 44 * MIB, &none) == -ECONNRESET, "%s", bfc_last_error());
        REQUIRE(strstr(bfc_last_error(), "unmapped"), "%s", bfc_last_error());
}

TEST(a_broken_context)
{
        struct rig *rig;
        bfc_client *client;
        void *p;

        if (!CHILDREN_HAVE_EVENTS)
                return;
        rig = rig_start(&two_gpus);
        child_join(child_start(job_that_breaks_its_context, rig->socket));
        client = client_open(rig, NULL, "train");
        ck_assert_ok(bfc_malloc(client, 60 * MIB, &p));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* What breaks the keeper's context takes no memory from anybody. Another one takes its place, unless the daemon has
 * memory of legacy handles, which would end: then what needs more memory is refused. */
TEST(the_daemons_context_breaks)
{
        struct rig *rig;
        bfc_client *client;
        void *p, *q, *other;
        int r;

        /* In each keeper: two at its start, and for each extent one. */
        setenv("FAKE_CUDA_FAULT", "cuMemsetD8Async:4:719!", 1);
        rig = rig_start(&two_gpus);
        unsetenv("FAKE_CUDA_FAULT");
        client = client_open(rig, NULL, "train");
        ck_assert_ok(bfc_malloc(client, MIB, &p));
        pattern_write(p, MIB, 5);
        for (int i = 0; i < 5 && (r = bfc_malloc(client, 9 * MIB, &q)) == 0; i++)
                ;
        if (rig_device() == ON_CUDA_IPC) {
                ck_assert_int_eq(r, -ENOMEM);
                ck_assert_msg(strstr(bfc_last_error(), "its keeper's CUDA context is broken") != NULL, "%s",
                              bfc_last_error());
        } else {
                ck_assert_ok(r);
        }
        assert_status(rig, (const char *const[]){ "ok", "ok  " });
        ck_assert(pattern_holds(p, MIB, 5));
        ck_assert_ok(bfc_malloc_in(client, "other", 3 * MIB, &other));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        if (rig_device() == ON_CUDA_IPC) { /* as the error says */
                rig->forgiven = "error: ";
                ctl_says(rig, WORDS("drain", "cuda:0", "--wait=20"), "is drained.");
                ctl_says(rig, WORDS("resume", "cuda:0"), "is resumed.");
                client = client_open(rig, NULL, "train");
                ck_assert_ok(bfc_malloc(client, 20 * MIB, &p)); /* one extent */
                bfc_disconnect(client);
        }
        rig_stop(rig);
}

/* Blocks that are there stay the job's, which can free them and disconnect. What
 * the device does not take back stays charged and is shown. */
TEST(blocks_of_a_lost_device)
{
        struct rig *rig = rig_start(&two_gpus);
        bfc_client *client = client_open(rig, NULL, "train");
        void *p, *q;

        ck_assert_ok(bfc_malloc(client, 5 * MIB, &p));
        ck_assert_ok(bfc_malloc_in(client, "other", MIB, &q));
        lose_device(0);
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        ck_assert(WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_count(rig).bytes_pending == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(rig, "red", "other").bytes_reserved, 0);
        ck_assert_uint_gt(rig_stats(rig, "red", "train").bytes_unreclaimed, 0);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_unreclaimed,
                          rig_stats(rig, "red", "train").bytes_reserved);
        assert_status(rig, (const char *const[]){ "lost", "ok  " });
        rig->forgiven = "device 'cuda:0' ";
        rig_terminate(rig);
        rig_discard(rig);
}

/* ---- clear_on_release --------------------------------------------------------- */

static void take_and_give_back(void *socket)
{
        bfc_client *client = child_client_open(socket, NULL);
        void *p;

        REQUIRE(bfc_malloc(client, 5 * MIB, &p) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, p) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* MPS listens, the jobs are its clients, and bfcd serves both GPUs and is none. */
TEST(a_gpu_allows_mps_and_the_other_does_not)
{
        struct rig_config config = two_gpus;
        const char *argv[] = { program_bfcctl(), "--socket", NULL, "--json", "status", NULL };
        struct rig *rig;
        char *text;

        config.partitions = "      - {name: train, limit: 50%}\n"
                            "      - {name: infer, limit: 50%}\n"
                            "  - id: cuda:1\n"
                            "    mps: allow\n"
                            "    headroom: 32MiB\n"
                            "    partitions:\n"
                            "      - {name: other, limit: 100%}\n";
        setenv("FAKE_CUDA_MPS", "/tmp/nvidia-mps", 1);
        rig = rig_start(&config);
        argv[2] = rig->admin_socket;
        ck_assert_int_eq(program_run(argv, &text, NULL), 0);
        ck_assert(strstr(text, "\"mps\": \"refuse\"") && strstr(text, "\"mps\": \"allow\""));
        free(text);
        child_join(child_start(take_and_give_back, rig->socket));
        child_join(child_start(job_on_second_gpu, rig->socket));
        unsetenv("FAKE_CUDA_MPS");
        rig_stop(rig);
}

static unsigned count_calls(const char *counts, const char *function)
{
        const char *at = strstr(counts, function);
        unsigned n = 0;

        ck_assert_ptr_nonnull(at);
        ck_assert_int_eq(sscanf(at + strlen(function), "%u", &n), 1);
        return n;
}

/* Each extent is zeroed when it is made, and where that was asked for, when it is given back. */
TEST(cleared_on_release)
{
        static const char *const partitions[] = {
                "      - {name: train, limit: 50%}\n",
                "      - {name: train, limit: 50%, clear_on_release: true}\n",
        };
        struct rig_config config = two_gpus;
        const char *argv[] = { program_bfcctl(), "--socket", NULL, "--json", "partitions", NULL };
        unsigned n_made, n_zeroed[2];
        char path[128], *text;

        config.tenants = "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train}]}\n";
        for (int i = 0; i < 2; i++) {
                struct rig *rig;

                snprintf(path, sizeof(path), "/tmp/bfcd-counts-%d-%d", (int)getpid(), i);
                config.partitions = partitions[i];
                setenv("FAKE_CUDA_COUNTS", path, 1); /* the daemon's */
                rig = rig_start(&config);
                unsetenv("FAKE_CUDA_COUNTS");
                argv[2] = rig->admin_socket;
                ck_assert_int_eq(program_run(argv, &text, NULL), 0);
                ck_assert_ptr_nonnull(
                        strstr(text, i == 1 ? "\"clear_on_release\": true" : "\"clear_on_release\": false"));
                free(text);
                child_join(child_start(take_and_give_back, rig->socket));
                ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
                text = file_text(path);
                n_made = count_calls(text, "cuMemAlloc_v2") + count_calls(text, "cuMemCreate");
                n_zeroed[i] = count_calls(text, "cuMemsetD8Async");
                free(text);
                unlink(path);
                ck_assert_uint_gt(n_made, 2); /* two at the start, to see whether it works */
                ck_assert(n_zeroed[i] > 2 && n_zeroed[0] <= n_made); /* extents of one growth together */
                rig_stop(rig);
        }
        ck_assert_uint_eq(n_zeroed[1] - n_zeroed[0], n_made - 2);
}
