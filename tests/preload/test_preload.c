/* The proxy of libcuda.so.1 before the fake driver, under bfcctl run and alone.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * BFC_PRELOAD is the proxy's folder, LIBRARIES those of the library and of the fake driver. JOB and LINKED_JOB are the
 * programs (job.c). */
#include <stdatomic.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/kept.h"
#include "tests/integration/tools.h"

static const struct rig_config config = { .tenants = TENANT("red", "@UID@", "train, limit: 64MiB") };
static const char *const ways[] = { "linked", "dlsym", "proc-address" };
static struct rig *rig;

static void setup(void)
{
        /* Meson adds the folders of all libraries in any order. */
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES, 1), 0);
        rig = rig_start(&config);
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1), 0);
}

static void teardown(void)
{
        rig_stop(rig);
}

FIXTURE(preload, setup, teardown);

/* The messages, which the caller frees. */
static char *run_job(const char *const *argv)
{
        char *err;
        int status = program_run(argv, NULL, &err);

        ck_assert_msg(status == 0, "status %d: %s", status, err);
        return err;
}

#define RUN(...)                                                                                             \
        ((const char *const[]){ program_bfcctl(), "run", "--limit", "32MiB", "--quiet", __VA_ARGS__, NULL })

/* Under bfcctl run, by each way to the driver. It says nothing. */
static void run_case(const char *name)
{
        for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++) {
                char *err = run_job(RUN("--", i == 0 ? LINKED_JOB : JOB, ways[i], name));

                ck_assert_str_eq(err, "");
                free(err);
        }
}

TEST_OF(preload, limit)
{
        run_case("limit");
}

TEST_OF(preload, errors)
{
        run_case("errors");
}

TEST_OF(preload, addresses)
{
        run_case("addresses");
}

TEST_OF(preload, random_calls)
{
        run_case("random");
}

TEST_OF(preload, threads)
{
        run_case("threads");
}

TEST_OF(preload, streams)
{
        ck_assert_int_eq(setenv("FAKE_CUDA_DESTROYED_STREAM", "crash", 1), 0);
        run_case("streams");
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT", "cuStreamGetId:*:801", 1), 0);
        run_case("ended-streams");
}

TEST_OF(preload, variants)
{
        ck_assert_int_eq(setenv("FAKE_CUDA_VERSION", "13050", 1), 0); /* as new as own.h */
        run_case("variants");
}

TEST_OF(preload, contexts)
{
        char *err = run_job(RUN("--", LINKED_JOB, "linked", "contexts"));

        ck_assert_str_eq(err, "");
        free(err);
}

TEST_OF(preload, forks)
{
        run_case("fork");
}

TEST_OF(preload, forks_beside_threads)
{
        /* Nearly always a thread is in it. */
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT", "delay:cuMemRelease:*:2000", 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "fork-threads")));
}

TEST_OF(preload, shared_blocks)
{
        run_case("export");
}

/* What the driver gives directly is charged. */
TEST_OF(preload, charged_memory)
{
        run_case("map");
        free(run_job(RUN("--", JOB, "dlsym", "beside-refusals")));
        run_case("localized");
        run_case("arrays");
        run_case("array-formats");
        run_case("pools");
}

static bool has_fds(void)
{
        return strcmp(getenv("BFC_TEST_DEVICE"), "cuda-fd") == 0;
}

static const struct rig_config large = { .size = "512MiB",
                                         .partitions =
                                                 "      - {name: train, limit: 512MiB, growth: on-demand}\n",
                                         .tenants = TENANT("red", "@UID@", "train, limit: 512MiB") };

/* With a limit of 256 MiB. */
static void open_large(void)
{
        rig_stop(rig);
        rig = rig_start(&large);
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", rig->admin_socket, 1), 0);
}

static char *run_large(size_t way, const char *name)
{
        return run_job((const char *const[]){ program_bfcctl(), "run", "--limit", "256MiB", "--quiet", "--",
                                              way == 0 ? LINKED_JOB : JOB, ways[way], name, NULL });
}

/* The driver takes 32 MiB at once. */
TEST_OF(preload, memory_that_the_driver_keeps)
{
        static const char *const names[] = { "graphs", "captured-graphs", "driver-pools", "host-pools" };

        open_large();
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                char *err = run_large(i % 3, names[i]);

                ck_assert_str_eq(err, "");
                free(err);
        }
        free(run_job((const char *const[]){ program_bfcctl(), "run", "--limit", "256MiB", "--quiet",
                                            "--strict", "--", JOB, "dlsym", "graphs", NULL }));
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved == 0, SETTLE_MS));
}

/* As NCCL shares its buffers, where the GPU knows fabric handles and where not; so in strict mode, too. */
TEST_OF(preload, buffers_of_two_processes)
{
        open_large();
        ck_assert_int_eq(setenv("FAKE_CUDA_ATTRIBUTES", "128=1", 1), 0);
        free(run_large(1, "nccl"));
        unsetenv("FAKE_CUDA_ATTRIBUTES");
        free(run_job((const char *const[]){ program_bfcctl(), "run", "--limit", "256MiB", "--quiet",
                                            "--strict", "--", JOB, "dlsym", "nccl", NULL }));
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved == 0, SETTLE_MS));
}

/* Memory of cuMemCreate() that is a block, of which the program has the driver's handle. */
TEST_OF(preload, lent_memory)
{
        static const char *const names[] = { "lent", "lent-names", "export-fd", "lent-capture" };
        char *err;

        if (!has_fds())
                return;
        open_large();
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                err = run_large(i % 3, names[i]);
                ck_assert_str_eq(err, "");
                free(err);
        }
        free(run_job((const char *const[]){ program_bfcctl(), "run", "--limit", "256MiB", "--quiet",
                                            "--strict", "--", JOB, "dlsym", "lent-names", NULL }));
        ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_reserved == 0, SETTLE_MS));
}

/* With share: cuda-ipc the driver has no handle of an extent. */
TEST_OF(preload, lent_memory_without_fds)
{
        if (!has_fds())
                run_case("lent-not");
}

/* A driver that gives no handle of what this process has imported. */
TEST_OF(preload, lent_memory_without_handle)
{
        char *err;

        if (!has_fds())
                return;
        open_large();
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT", "cuMemRetainAllocationHandle:*:801", 1), 0);
        err = run_large(1, "lent-charged");
        ck_assert_ptr_nonnull(strstr(err, "the driver gives no handle of it (error 801)"));
        free(err);
}

/* ---- programs that are idle --------------------------------------------------------------- */

static const struct rig_config parking = {
        .size = "512MiB",
        .partitions = "      - {name: train, limit: 512MiB, growth: on-demand}\n"
                      "  - id: host\n    size: 256MiB\n    partitions:\n"
                      "      - {limit: 256MiB, name: parking}\n",
        .tenants = "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 512MiB}, "
                   "{partition: parking, limit: 256MiB}]\n",
};

struct idle_job {
        const char *name, *folder;
        char *err;
        int status;
};

static void *run_idle(void *userdata)
{
        struct idle_job *job = userdata;

        job->status = program_run((const char *const[]){ program_bfcctl(), "run", "--partition", "train",
                                                         "--limit", "256MiB", "--quiet", "--", JOB, "dlsym",
                                                         job->name, program_bfcctl(), job->folder, NULL },
                                  NULL, &job->err);
        return NULL;
}

static void check_idle(struct idle_job job, int status)
{
        run_idle(&job);
        ck_assert_msg(job.status == status, "status %d: %s", job.status, job.err);
        free(job.err);
}

static bool is_all_free(struct rig *r)
{
        return rig_stats(r, "red", "train").bytes_reserved == 0 &&
               rig_stats(r, "red", "parking").bytes_in_use == 0;
}

/* Its memory of cuMemCreate() can be parked when it says so, and returns. */
TEST_OF(preload, idle_programs)
{
        struct idle_job job = { .name = "idle-meanwhile" };
        struct kept *k;
        pthread_t thread;
        char path[160];

        if (!has_fds())
                return;
        rig_stop(rig);
        k = kept_start(&parking);
        ck_assert_int_eq(setenv("BFC_SOCKET", k->rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", k->rig->admin_socket, 1), 0);
        check_idle((struct idle_job){ .name = "idle" }, 0);
        check_idle((struct idle_job){ .name = "idle-bound" }, 0);
        check_idle((struct idle_job){ .name = "idle-interrupted" }, 0);
        check_idle((struct idle_job){ .name = "idle-killed", .folder = k->rig->folder }, 128 + SIGKILL);
        ck_assert(WAIT_FOR(is_all_free(k->rig), SETTLE_MS));
        job.folder = k->rig->folder;
        snprintf(path, sizeof(path), "%s/is-parked", job.folder);
        ck_assert_int_eq(pthread_create(&thread, NULL, run_idle, &job), 0);
        ck_assert(WAIT_FOR(access(path, F_OK) == 0, SETTLE_MS));
        kept_restart(k, SIGKILL);
        kept_restart(k, SIGTERM);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        ck_assert_msg(job.status == 0, "status %d: %s", job.status, job.err);
        free(job.err);
        ck_assert(WAIT_FOR(is_all_free(k->rig), SETTLE_MS));
        kept_stop(k);
        rig = rig_start(&config);
}

/* ---- kills ----------------------------------------------------------------------------- */

#define N_KILLS      40u
#define N_LONG_KILLS 10000u
#define LIMIT        "48MiB"

struct killing {
        char n[16], seed[16];
        char *err;
        int status;
        _Atomic bool is_over;
};

static void *run_killing(void *userdata)
{
        struct killing *k = userdata;
        const char *const argv[] = { program_bfcctl(), "run", "--limit", LIMIT, "--quiet", "--", JOB, "dlsym",
                                     "kill-processes", k->n,  k->seed,   NULL };

        k->status = program_run(argv, NULL, &k->err);
        atomic_store(&k->is_over, true);
        return NULL;
}

static uint64_t peak_at_the_device(const struct rig *r)
{
        char path[160];
        char *text;
        uint64_t n;

        snprintf(path, sizeof(path), "%s/cuda/peak-0", r->memory);
        text = file_text(path);
        ck_assert_ptr_nonnull(text);
        n = strtoull(text, NULL, 10);
        free(text);
        return n;
}

/* Processes of a lease take memory in all ways and are killed, beside a daemon that is restarted: all is free at last, and
 * never more was taken than the limit. */
TEST_OF(preload, kills_at_any_moment)
{
        struct killing killing = { .status = 0 };
        unsigned n = getenv("BFC_TEST_LONG") ? N_LONG_KILLS : N_KILLS, n_restarts = 0;
        struct kept *k;
        pthread_t thread;

        rig_stop(rig);
        ck_assert_int_eq(setenv("FAKE_CUDA_PEAK", "1", 1), 0);
        k = kept_start(&config);
        ck_assert_int_eq(setenv("BFC_SOCKET", k->rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", k->rig->admin_socket, 1), 0);
        snprintf(killing.n, sizeof(killing.n), "%u", n);
        snprintf(killing.seed, sizeof(killing.seed), "%u", (unsigned)getpid());
        ck_assert_int_eq(pthread_create(&thread, NULL, run_killing, &killing), 0);
        while (!atomic_load(&killing.is_over)) {
                usleep(200000);
                kept_restart(k, n_restarts++ % 2 ? SIGTERM : SIGKILL);
        }
        pthread_join(thread, NULL);
        printf("# seed %s: %u kills, %u restarts, at most %llu bytes of %s\n", killing.seed, n, n_restarts,
               (unsigned long long)peak_at_the_device(k->rig), LIMIT);
        ck_assert_msg(killing.status == 0, "status %d: %s", killing.status, killing.err);
        /* bfcd may be away when bfcctl ends the lease, and then ends it by itself. */
        if (strncmp(killing.err, "bfcctl: lease 'run-", 19) != 0)
                ck_assert_str_eq(killing.err, "");
        ck_assert_uint_le(peak_at_the_device(k->rig), 48 * MIB);
        free(killing.err);
        kept_stop(k);
        ck_assert_int_eq(unsetenv("FAKE_CUDA_PEAK"), 0);
        rig = rig_start(&config);
}

/* ---- resets, and several GPUs ------------------------------------------------------- */

/* All of it is gone, and counts no more. What was outside of bfcd is said at the end. */
static void run_reset(size_t way, const char *name)
{
        text_has(strstr(name, "lent") ? run_large(way, name)
                                      : run_job(RUN("--", way == 0 ? LINKED_JOB : JOB, ways[way], name)),
                 "had up to 2.0 MiB of GPU 0 outside of bfcd, by cuMemAllocManaged\n");
}

TEST_OF(preload, resets)
{
        if (has_fds())
                open_large();
        for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]); i++)
                run_reset(i, has_fds() && i == 0 ? "reset-lent" : "reset");
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT", "cuMemsetD8:4:700!,cuMemsetD8:12:700!", 1), 0);
        run_reset(1, has_fds() ? "reset-broken-lent" : "reset-broken");
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT", "cuMemsetD8:1:700!", 1), 0);
        run_reset(1, "reset-array");
        /* Its sessions have ended, and left nothing. */
        ck_assert(
                WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_stats(rig, "red", "train").bytes_reserved == 0,
                         SETTLE_MS));
}

TEST_OF(preload, ends_of_contexts)
{
        for (size_t i = 1; i < sizeof(ways) / sizeof(ways[0]); i++)
                free(run_job(RUN("--", JOB, ways[i], "ended-contexts")));
}

TEST_OF(preload, ends_of_contexts_beside_calls)
{
        char counts[128];

        snprintf(counts, sizeof(counts), "%s/counts", rig->folder);
        ck_assert_int_eq(setenv("FAKE_CUDA_COUNTS", counts, 1), 0);
        ck_assert_int_eq(setenv("FAKE_CUDA_FAULT",
                                "hang:cuMemCreate:1:600000,hang:cuDevicePrimaryCtxRelease:2:600000", 1),
                         0);
        free(run_job(RUN("--", JOB, "dlsym", "ended-beside-calls")));
}

static const struct rig_config two_gpus = { .size = "64MiB",
                                            .partitions = "      - {name: train, limit: 64MiB}\n"
                                                          "  - id: cuda:1\n"
                                                          "    headroom: 0\n"
                                                          "    partitions:\n"
                                                          "      - {name: other, limit: 64MiB}\n",
                                            .tenants = TENANT_OF("red", "@UID@",
                                                                 "{partition: train}, {partition: other}") };

/* Not under bfcctl run, whose lease is on one GPU. setting: NULL, or of the fake driver for the program alone. */
static void run_on_two_gpus(const char *name, const char *setting, const char *value)
{
        char path[8192];
        char *err;

        rig_stop(rig);
        rig = rig_start(&two_gpus);
        if (setting)
                ck_assert_int_eq(setenv(setting, value, 1), 0);
        snprintf(path, sizeof(path), "%s:" LIBRARIES, getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", path, 1), 0);
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        err = run_job((const char *const[]){ JOB, "dlsym", name, NULL });
        ck_assert_str_eq(err, "");
        free(err);
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES, 1), 0);
        if (setting)
                unsetenv(setting);
}

TEST_OF(preload, reset_of_one_gpu)
{
        run_on_two_gpus("reset-one", NULL, NULL);
}

TEST_OF(preload, peers)
{
        run_on_two_gpus(has_fds() ? "peers" : "peers-by-handles", NULL, NULL);
}

TEST_OF(preload, peers_that_are_refused)
{
        run_on_two_gpus("no-peers", "FAKE_CUDA_PEER_ACCESS", "0");
        if (has_fds())
                run_on_two_gpus("refused-peers", "FAKE_CUDA_FAULT", "cuMemSetAccess:2:217");
}

TEST_OF(preload, other_memory)
{
        char *err = run_job(RUN("--", JOB, "dlsym", "others"));

        text_has(err, "had up to 40.0 MiB of GPU 0 outside of bfcd, by cuMemAllocManaged\n");
}

TEST_OF(preload, charges_of_two_processes)
{
        free(run_job(RUN("--", JOB, "dlsym", "two")));
}

TEST_OF(preload, limit_of_two_processes)
{
        free(run_job(RUN("--", JOB, "dlsym", "share-limit")));
}

TEST_OF(preload, refused_charges)
{
        free(run_job(RUN("--", JOB, "dlsym", "full")));
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, 1);
}

TEST_OF(preload, room_of_another_process)
{
        free(run_job(RUN("--", JOB, "dlsym", "give-room")));
}

TEST_OF(preload, shown_memory)
{
        free(run_job(RUN("--", JOB, "dlsym", "shown", program_bfcctl())));
}

TEST_OF(preload, strict)
{
        char *err = run_job(RUN("--strict", "--", JOB, "dlsym", "strict"));

        ck_assert_str_eq(err, "");
        free(err);
}

/* A file of two GPUs, the first one is that of the partition. */
static void write_nvml(void)
{
        struct bfc_partition_info info = { .struct_size = sizeof(info) };
        bfc_client *client;
        char path[256];
        FILE *f;

        ck_assert_int_eq(bfc_connect(NULL, &client), 0);
        ck_assert_int_eq(bfc_partition_info(client, 0, &info), 0);
        bfc_disconnect(client);
        snprintf(path, sizeof(path), "%s/nvml", rig->folder);
        f = fopen(path, "w");
        ck_assert_ptr_nonnull(f);
        fprintf(f, "%s 1 7777\nGPU-00000000-1111-2222-3333-444444444444 1 12345\n", info.device_uuid);
        fclose(f);
        ck_assert_int_eq(setenv("FAKE_NVML", path, 1), 0);
}

TEST_OF(preload, nvml)
{
        char path[8192];

        write_nvml();
        free(run_job(RUN("--", JOB, "dlsym", "no-nvml")));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES ":" FAKE_NVML, 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "nvml")));
        snprintf(path, sizeof(path), "%s/nvml:" LIBRARIES ":" FAKE_NVML, getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", path, 1), 0);
        ck_assert_int_eq(setenv("BFC_SOCKET", "/nowhere/bfcd.sock", 1), 0);
        free(run_job((const char *const[]){ JOB, "dlsym", "plain-nvml", NULL }));
}

TEST_OF(preload, path_of_nvml)
{
        char path[8192];

        write_nvml();
        ck_assert_int_eq(setenv("BFC_NVML_LIBRARY", FAKE_NVML "/libnvidia-ml.so.1", 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "nvml")));
        /* Without bfcctl run nothing looks whether there is one. */
        snprintf(path, sizeof(path), "%s/nvml:" LIBRARIES, getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", path, 1), 0);
        ck_assert_int_eq(setenv("BFC_NVML_LIBRARY", "/nowhere/libnvidia-ml.so.1", 1), 0);
        free(run_job((const char *const[]){ JOB, "dlsym", "nvml-of-nothing", NULL }));
}

/* With share: cuda-ipc memory of a context that the program made is the driver's, so there is no primary one. */
static void run_contexts(const char *setting, const char *value)
{
        char *err;

        if (!has_fds())
                return;
        ck_assert_int_eq(setenv(setting, value, 1), 0);
        err = run_job(RUN("--", JOB, "dlsym", "charged-contexts"));
        text_has(err,
                 "has made a CUDA context of its own, and memory of bfcd needs the primary one beside it");
        text_has(run_job(RUN("--", JOB, "dlsym", "reset-beside-context")), "both are charged");
}

static void run_large_context(const char *setting, const char *value)
{
        char *err;

        ck_assert_int_eq(setenv(setting, value, 1), 0);
        err = run_job(RUN("--", JOB, "dlsym", "large-context"));
        text_has(
                err,
                "GPU 0: a CUDA context takes 40.0 MiB, for which the limit of 32.0 MiB has no room; allow that much more");
}

/* As NVML tells, or where it does not, as the user says. */
TEST_OF(preload, charged_contexts)
{
        run_contexts("BFC_CONTEXT", "4MiB");
        ck_assert_int_eq(setenv("BFC_CONTEXT", "4MiB", 1), 0);
        run_case("other-contexts");
        run_large_context("BFC_CONTEXT", "40MiB");
        ck_assert_int_eq(setenv("BFC_CONTEXT", "3MiB", 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "odd-contexts")));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES ":" FAKE_NVML, 1), 0);
        ck_assert_int_eq(setenv("FAKE_NVML", "driver", 1), 0);
        ck_assert_int_eq(setenv("BFC_CONTEXT", "1GiB", 1), 0); /* which is charged before */
        free(run_job(RUN("--", JOB, "dlsym", "large-context")));
        unsetenv("BFC_CONTEXT");
        if (suite_has_initial_pids()) {
                run_contexts("FAKE_CUDA_CONTEXT_BYTES", "4MiB");
                run_large_context("FAKE_CUDA_CONTEXT_BYTES", "40MiB");
        } else {
                printf("# skipped: NVML tells the pids of another PID namespace\n");
        }
        /* They are not charged. */
        ck_assert_int_eq(setenv("BFC_CONTEXT", "off", 1), 0);
        run_case("limit");
        /* The lease had all back. */
        ck_assert(
                WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_stats(rig, "red", "train").bytes_reserved == 0,
                         SETTLE_MS));
}

static void run_library_only(void)
{
        static const char *const cases[] = { "one", "threads", "reset", "fork" };
        size_t n = sizeof(cases) / sizeof(cases[0]);

        /* With share: cuda-ipc a block's extent leaves another process no room. */
        for (size_t i = 0; i < (has_fds() ? n : n - 1); i++) {
                char *err = run_job(RUN("--", LIBRARY_ONLY, cases[i]));

                ck_assert_str_eq(err, "");
                free(err);
        }
}

/* The library makes it, and not the program. */
TEST_OF(preload, contexts_of_the_library)
{
        ck_assert_int_eq(setenv("BFC_CONTEXT", "4MiB", 1), 0);
        run_library_only();
        ck_assert_int_eq(setenv("BFC_CONTEXT", "40MiB", 1), 0);
        text_has(
                run_job(RUN("--", LIBRARY_ONLY, "refused")),
                "GPU 0: a CUDA context takes 40.0 MiB, for which the limit of 32.0 MiB has no room; allow that much more");
        ck_assert_int_eq(setenv("BFC_CONTEXT", "off", 1), 0);
        free(run_job(RUN("--", LIBRARY_ONLY, "off")));
        unsetenv("BFC_CONTEXT");
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES ":" FAKE_NVML, 1), 0);
        ck_assert_int_eq(setenv("FAKE_NVML", "driver", 1), 0);
        ck_assert_int_eq(setenv("FAKE_CUDA_CONTEXT_BYTES", "4MiB", 1), 0);
        if (suite_has_initial_pids())
                run_library_only();
        /* Without the proxy. */
        free(run_job(RUN("--no-preload", "--", LIBRARY_ONLY, "off")));
        ck_assert(
                WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_stats(rig, "red", "train").bytes_reserved == 0,
                         SETTLE_MS));
}

static void *run_until_restarted(void *folder)
{
        return run_job(RUN("--", LIBRARY_ONLY, "restart", folder));
}

/* Also once the process has resumed its session. */
static void check_contexts(const struct kept *k)
{
        ck_assert(WAIT_FOR(rig_stats(k->rig, "red", "train").bytes_contexts == 4 * MIB, SETTLE_MS));
}

TEST_OF(preload, contexts_of_the_library_over_restarts)
{
        struct kept *k;
        pthread_t thread;
        char path[160];
        void *err;

        rig_stop(rig);
        k = kept_start(&config);
        ck_assert_int_eq(setenv("BFC_SOCKET", k->rig->socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_ADMIN_SOCKET", k->rig->admin_socket, 1), 0);
        ck_assert_int_eq(setenv("BFC_CONTEXT", "4MiB", 1), 0);
        snprintf(path, sizeof(path), "%s/has-context", k->rig->folder);
        ck_assert_int_eq(pthread_create(&thread, NULL, run_until_restarted, k->rig->folder), 0);
        ck_assert(WAIT_FOR(access(path, F_OK) == 0, SETTLE_MS));
        check_contexts(k);
        kept_restart(k, SIGKILL);
        check_contexts(k);
        kept_restart(k, SIGTERM);
        check_contexts(k);
        ck_assert_int_eq(unlink(path), 0);
        ck_assert_int_eq(pthread_join(thread, &err), 0);
        free(err);
        ck_assert(WAIT_FOR(rig_stats(k->rig, "red", "train").bytes_reserved == 0, SETTLE_MS));
        ck_assert_uint_eq(rig_stats(k->rig, "red", "train").bytes_contexts, 0);
        kept_stop(k);
        rig = rig_start(&config);
}

/* As long as each is there. */
TEST_OF(preload, shown_contexts)
{
        ck_assert_int_eq(setenv("BFC_CONTEXT", "4MiB", 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "shown-contexts", program_bfcctl())));
        unsetenv("BFC_CONTEXT");
}

/* What a reload brings is for processes that begin later. */
TEST_OF(preload, contexts_of_the_configuration)
{
        struct rig_config with = config;
        char *err;

        with.device = "    contexts: 4MiB\n";
        rig_rewrite_config(rig, &with);
        ctl_says(rig, WORDS("reload"), "contexts is 4MiB, was measured");
        if (has_fds())
                free(run_job(RUN("--", JOB, "dlsym", "charged-contexts")));
        with.device = "    contexts: 40MiB\n";
        rig_rewrite_config(rig, &with);
        free(ctl_text(rig, WORDS("reload")));
        err = run_job(RUN("--", JOB, "dlsym", "large-context"));
        text_has(strdup(err), "a CUDA context counts for 40.0 MiB, and --limit is 32.0 MiB");
        text_has(err, "GPU 0: a CUDA context takes 40.0 MiB, for which the limit of 32.0 MiB has no room");
        with.device = "    contexts: off\n";
        rig_rewrite_config(rig, &with);
        free(ctl_text(rig, WORDS("reload")));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", LIBRARIES ":" FAKE_NVML, 1), 0);
        ck_assert_int_eq(setenv("FAKE_NVML", "driver", 1), 0);
        ck_assert_int_eq(setenv("FAKE_CUDA_CONTEXT_BYTES", "4MiB", 1), 0);
        run_case("limit");
}

static const struct rig_config in_advance = {
        .size = "64MiB",
        .partitions = "      - {name: train, limit: 32MiB, growth: preallocate}\n",
        .tenants = TENANT("red", "@UID@", "train, limit: 32MiB")
};

/* Where nothing can be charged, a context is as before. */
TEST_OF(preload, contexts_beside_memory_made_in_advance)
{
        char path[8192];
        char *err;

        rig_stop(rig);
        rig = rig_start(&in_advance);
        ck_assert_int_eq(setenv("BFC_SOCKET", rig->socket, 1), 0);
        ck_assert_int_eq(setenv("FAKE_NVML", "driver", 1), 0);
        ck_assert_int_eq(setenv("FAKE_CUDA_CONTEXT_BYTES", "4MiB", 1), 0);
        snprintf(path, sizeof(path), "%s:" LIBRARIES ":" FAKE_NVML, getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", path, 1), 0);
        err = run_job((const char *const[]){ JOB, "dlsym", "streams", NULL });
        ck_assert_str_eq(err, "");
        free(err);
}

TEST_OF(preload, no_preload)
{
        char *err = run_job(RUN("--no-preload", "--", JOB, "dlsym", "passed-on"));

        ck_assert_str_eq(err, "");
        free(err);
}

TEST_OF(preload, path_of_the_driver)
{
        char path[4096];

        ck_assert_int_eq(setenv("BFC_CUDA_LIBRARY", FAKE_CUDA "/libcuda.so.1", 1), 0);
        run_case("limit");
        /* A proxy is no driver. */
        snprintf(path, sizeof(path), "%s/libcuda.so.1", getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("BFC_CUDA_LIBRARY", path, 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "no-driver")));
        ck_assert_int_eq(setenv("BFC_CUDA_LIBRARY", "/nowhere/libcuda.so.1", 1), 0);
        free(run_job(RUN("--", JOB, "dlsym", "no-driver")));
}

/* Without a daemon the program runs as without the proxy, and one line says so. */
TEST_OF(preload, no_daemon)
{
        char path[8192];
        char *err;

        snprintf(path, sizeof(path), "%s:" LIBRARIES, getenv("BFC_PRELOAD"));
        ck_assert_int_eq(setenv("LD_LIBRARY_PATH", path, 1), 0);
        ck_assert_int_eq(setenv("BFC_SOCKET", "/nowhere/bfcd.sock", 1), 0);
        err = run_job((const char *const[]){ JOB, "dlsym", "passed-on", NULL });
        ck_assert_ptr_nonnull(strchr(err, '\n'));
        ck_assert_str_eq(strchr(err, '\n'), "\n");
        text_has(err, "no GPU memory is taken from bfcd: ");
        ck_assert_int_eq(setenv("BFC_STRICT", "1", 1), 0);
        ck_assert_int_eq(program_run((const char *const[]){ JOB, "dlsym", "refused", NULL }, NULL, &err), 99);
        text_has(err, "is refused (cuMemCreate)");
}

int main(void)
{
        return harness_cases("preload");
}
