/* The whole product, on any driver: a real bfcd with two partitions on
 * cuda:0, one for each way of sharing, and jobs of two tenants.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * usage: broker             TAP; takes 512 MiB of device cuda:0, and some contexts
 *
 * bfcd, bfcctl and bfc-replay are those that the environment names (BFCD, BFCCTL,
 * BFC_REPLAY), or lie beside this program, or were built with it. */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/gpu/driver.h"
#include "tests/gpu/job.h"
#include "tests/integration/harness.h"
#include "tests/suite.h"

/* A context of another process may come or go: what cuMemGetInfo shows is right to
 * this much. Below what is looked for. */
#define TOLERANCE (48 * MIB)
#define LIMIT_RED (224 * MIB)

static bool is_fake;

/* Index of loop tests. */
static const char *const partitions[] = { "ipc", "fd" };
enum { N_PARTITIONS = 2, IPC = 0, FD = 1 };

static const struct rig_config both_ways = {
        .size = "1GiB",
        .top = "timeouts: {reclaim: 20s}\n",
        .partitions = "      - {share: cuda-ipc, name: ipc, limit: 256MiB, growth: on-demand}\n"
                      "      - {share: fd, name: fd, limit: 256MiB, growth: on-demand}\n"
                      "  - id: host\n"
                      "    size: 1GiB\n"
                      "    partitions:\n"
                      "      - {name: ram, limit: 512MiB, growth: on-demand}\n"
                      "      - {name: pinned, limit: 512MiB, growth: on-demand, pinned: true}\n",
        .tenants = "  - name: red\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: ipc, limit: 224MiB}, {partition: fd, limit: 224MiB}, "
                   "{partition: ram, limit: 256MiB}, {partition: pinned, limit: 256MiB}]\n"
                   "  - name: blue\n"
                   "    match: {uid: @UID@}\n"
                   "    quotas: [{partition: fd, limit: 224MiB}, {partition: ipc, limit: 224MiB}]\n",
};

static struct rig *rig;

/* Before any job: they are forks of this process. */
static void setup(void)
{
        rig = rig_start(&both_ways);
        if (!is_fake)
                rig->n_fds = 0; /* the driver opens what it likes */
        job_use_socket(rig->socket);
}

static void teardown(void)
{
        rig_stop(rig);
        rig = NULL;
}

static void take(struct process *p, unsigned int slot, const char *partition, uint64_t n_bytes)
{
        int r = job_malloc(p, slot, partition, n_bytes);

        ck_assert_msg(r == 0, "%llu bytes in %s: %d (%s)", (unsigned long long)n_bytes, partition, r,
                      job_sentence());
}

static void give(struct process *p, unsigned int slot)
{
        int r = job_free(p, slot);

        ck_assert_msg(r == 0, "free: %d (%s)", r, job_sentence());
}

/* ---- sharing ------------------------------------------------------------- */

/* By the extent's handle, in a process that has nothing of bfcd but what the job
 * told it. */
TEST(a_kernel_writes_what_another_process_reads_by_handle)
{
        struct process job = job_start("red"), other = job_start(NULL);
        const uint32_t n_words = 3 * MIB / 4 - 5;
        struct bfc_block_info info;

        take(&job, 0, "ipc", MIB); /* so that the next is not the extent's begin */
        take(&job, 1, "ipc", 3 * MIB);
        info = job_info(&job, 1);
        ck_assert_uint_eq(info.share, BFC_SHARE_CUDA_IPC);
        job_launch(&job, 1, 0xc0ffee11, n_words);
        ck_assert_msg(job_open(&other, 0, &info) == 0, "%s", job_sentence());
        ck_assert_uint_eq(job_count_other_words(&other, 0, 0xc0ffee11, n_words), 0);
        ck_assert_uint_eq(job_count_other_words(&other, 0, 0xc0ffee11, n_words + 5), 5);
        job_launch(&other, 0, 0xdecade01, n_words - 1); /* and back */
        ck_assert_uint_eq(job_count_other_words(&job, 1, 0xdecade01, n_words - 1), 0);
        ck_assert_uint_eq(job_count_other_words(&job, 1, 0xdecade01, n_words), 1);
        ck_assert_uint_eq(job_count_other(&job, 0, 0, 0, MIB), 0); /* the neighbour */
        job_close(&other, 0, &info);
        job_end(&other);
        job_end(&job);
}

/* Another session of the tenant has a block in the same extent, and so the extent. */
LOOP_TEST(a_kernel_writes_what_another_session_reads, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process job = job_start("red"), other = job_start("red");
        const uint32_t n_words = 777777 / 4;
        struct bfc_block_info info;

        take(&job, 0, partition, 777777);
        take(&other, 0, partition, 4096);
        info = job_info(&job, 0);
        ck_assert_uint_eq(info.share, _i == FD ? BFC_SHARE_FD : BFC_SHARE_CUDA_IPC);
        job_launch(&job, 0, 0xc0ffee11, n_words);
        job_reach(&other, 1, 0, &info);
        ck_assert_uint_eq(job_count_other_words(&other, 1, 0xc0ffee11, n_words), 0);
        job_launch(&other, 1, 0xdecade01, n_words / 2);
        ck_assert_uint_eq(job_count_other_words(&job, 0, 0xdecade01, n_words), n_words - n_words / 2);
        ck_assert_uint_eq(job_count_other(&other, 0, 0, 0, 4096), 0);
        job_end(&other);
        job_end(&job);
}

/* ---- a job's memory ------------------------------------------------------ */

LOOP_TEST(pointers_work_without_another_call, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process job = job_start("red");
        uint64_t n_other = 1;

        take(&job, 0, partition, 5 * MIB);
        take(&job, 1, partition, 5 * MIB);
        ck_assert_uint_eq(job_count_other(&job, 0, 0, 0, 5 * MIB), 0); /* zero at first use */
        ck_assert_uint_eq(job_count_other(&job, 1, 0, 0, 5 * MIB), 0);
        job_fill(&job, 0, 100, 0x5a, 4 * MIB);
        job_copy(&job, 1, 0, 5 * MIB);
        ck_assert_uint_eq(job_count_other(&job, 1, 100, 0x5a, 4 * MIB), 0);
        ck_assert_uint_eq(job_count_other(&job, 1, 0, 0x5a, 5 * MIB), MIB);
        /* and by the library's own copies, from inside of the block on */
        ck_assert_int_eq(job_write(&job, 1, 3 * MIB + 7, 0x3c, MIB), 0);
        ck_assert_uint_eq(job_count_other(&job, 1, 3 * MIB + 7, 0x3c, MIB), 0);
        ck_assert_int_eq(job_read(&job, 1, 3 * MIB, 0x3c, MIB, &n_other), 0);
        ck_assert_uint_eq(n_other, 7);
        ck_assert_int_eq(job_read(&job, 1, 4 * MIB + 1, 0, MIB, &n_other), -EINVAL);
        give(&job, 0);
        ck_assert_uint_eq(job_count_other(&job, 1, 3 * MIB + 7, 0x3c, MIB), 0);
        give(&job, 1);
        job_end(&job);
}

/* The region grew by an extent, and then by another: one address range. */
TEST(a_block_over_two_extents)
{
        struct process job = job_start("red");
        struct bfc_block_info info = { 0 };
        uint64_t n_bytes = 8 * MIB;
        bool spans = false;

        for (unsigned int slot = 0; slot < 6 && !spans; slot++, n_bytes *= 2) {
                take(&job, slot, "fd", slot == 0 ? MIB : n_bytes - MIB);
                info = job_info(&job, slot);
                spans = info.extent_bytes - info.extent_offset < info.n_bytes;
                if (!spans)
                        continue;
                ck_assert_uint_eq(job_count_other(&job, slot, 0, 0, info.n_requested), 0);
                job_launch(&job, slot, 0x01020304, (uint32_t)(info.n_requested / 4));
                ck_assert_uint_eq(
                        job_count_other_words(&job, slot, 0x01020304, (uint32_t)(info.n_requested / 4)), 0);
                job_copy(&job, 0, slot, MIB);
                ck_assert_uint_eq(job_count_other_words(&job, 0, 0x01020304, MIB / 4), 0);
        }
        ck_assert_msg(spans, "no block lay over two extents");
        job_end(&job);
}

LOOP_TEST(limits_are_enforced, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process job = job_start("red");
        struct bfc_block_info info;

        ck_assert_int_eq(job_malloc(&job, 0, partition, LIMIT_RED + 1), -EDQUOT);
        ck_assert_ptr_nonnull(strstr(job_sentence(), "limit"));
        ck_assert(has_stats(job_sentence()));
        take(&job, 0, partition, LIMIT_RED - 32 * MIB);
        ck_assert_int_eq(job_malloc(&job, 1, partition, 48 * MIB), -EDQUOT);
        take(&job, 1, partition, 16 * MIB);
        info = job_info(&job, 1);
        ck_assert_uint_eq(info.n_requested, 16 * MIB);
        ck_assert_uint_le(rig_stats(rig, "red", partition).bytes_reserved, LIMIT_RED);
        give(&job, 0);
        take(&job, 0, partition, LIMIT_RED - 32 * MIB);
        job_end(&job);
}

/* ---- giving back --------------------------------------------------------- */

/* What an idle job had goes to another tenant, and nothing of its bytes. */
LOOP_TEST(an_idle_job_unmaps, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process idle = job_start("red"), job;

        take(&idle, 0, partition, 4096);
        take(&idle, 1, partition, 192 * MIB);
        job_fill(&idle, 1, 0, 0xee, 192 * MIB);
        job_fill(&idle, 0, 0, 0xdd, 4096);
        give(&idle, 1);
        job = job_start("blue");
        take(&job, 0, partition, 192 * MIB);
        ck_assert_uint_eq(job_count_other(&job, 0, 0, 0, 192 * MIB), 0);
        ck_assert_uint_le(rig_stats(rig, "red", partition).bytes_reserved, 64 * MIB);
        ck_assert_uint_eq(rig_stats(rig, "red", partition).bytes_unreclaimed, 0);
        ck_assert_uint_eq(job_count_other(&idle, 0, 0, 0xdd, 4096), 0); /* what it uses it keeps */
        job_end(&job);
        take(&idle, 1, partition, 192 * MIB); /* its own old bytes may be there */
        job_fill(&idle, 1, 0, 0xcc, 192 * MIB);
        ck_assert_uint_eq(job_count_other(&idle, 0, 0, 0xdd, 4096), 0);
        job_end(&idle);
}

/* Its contents go to host memory and come back to the same address, and its memory is another tenant's meanwhile. */
LOOP_TEST(a_block_is_parked, 2)
{
        const char *to = _i == 0 ? "ram" : "pinned";
        struct process job = job_start("red"), other = job_start("blue");
        const uint32_t n_words = 160 * MIB / 4;
        struct bfc_block_info info;

        if (job_malloc_parkable(&job, 0, "fd", 160 * MIB) != 0)
                ck_abort_msg("%s", job_sentence());
        info = job_info(&job, 0);
        for (uint32_t round = 0; round < 3; round++) {
                job_launch(&job, 0, 0xdecade01 + round, n_words);
                ck_assert_msg(job_park(&job, 0, to) == 0, "%s", job_sentence());
                ck_assert_uint_eq(job_info(&job, 0).is_parked, 1);
                take(&other, 0, "fd", 192 * MIB);
                if (round == 0) /* later it can have its own bytes */
                        ck_assert_uint_eq(job_count_other(&other, 0, 0, 0, 192 * MIB), 0);
                job_fill(&other, 0, 0, 0xee, 192 * MIB);
                ck_assert_int_eq(job_wake(&job, 0, 0), -ENOMEM);
                give(&other, 0);
                ck_assert_msg(job_wake(&job, 0, 20000) == 0, "%s", job_sentence());
                ck_assert_uint_eq(job_count_other_words(&job, 0, 0xdecade01 + round, n_words), 0);
                ck_assert_uint_eq(job_info(&job, 0).offset, info.offset);
        }
        give(&job, 0);
        job_end(&other);
        job_end(&job);
        rig->n_fds = 0; /* the first copy opens one for the device's buffers */
}

static bool is_about(uint64_t n, uint64_t expected)
{
        return n + TOLERANCE >= expected && n <= expected + TOLERANCE;
}

LOOP_TEST(a_killed_jobs_memory_returns, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process watcher = job_start(NULL), job;
        uint64_t n_free = job_n_free(&watcher);

        job = job_start("red");
        take(&job, 0, partition, 192 * MIB);
        job_fill(&job, 0, 0, 0xee, 192 * MIB);
        ck_assert_uint_lt(job_n_free(&watcher), n_free - 192 * MIB + TOLERANCE);
        process_kill(&job);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", partition) == 0, 20000));
        ck_assert_msg(WAIT_FOR(is_about(job_n_free(&watcher), n_free), 10000),
                      "%llu bytes are free, and were %llu", (unsigned long long)job_n_free(&watcher),
                      (unsigned long long)n_free);
        job_end(&watcher);
}

/* Its child has the driver's fds, by which the memory exists: it is nobody's until the child has ended. */
LOOP_TEST(a_forked_child_keeps_a_killed_jobs_memory, N_PARTITIONS)
{
        const char *partition = partitions[_i];
        struct process job, other;
        pid_t child;

        setenv("FAKE_CUDA_FORK_KEEPS", "1", 1); /* as a driver does */
        job = job_start("red");
        unsetenv("FAKE_CUDA_FORK_KEEPS");
        take(&job, 0, partition, 192 * MIB);
        job_fill(&job, 0, 0, 0xee, 192 * MIB);
        child = job_fork(&job);
        process_kill(&job);
        ck_assert_msg(WAIT_FOR(rig_stats(rig, "red", partition).bytes_unreclaimed >= 192 * MIB, 20000),
                      "%llu bytes are unreclaimed",
                      (unsigned long long)rig_stats(rig, "red", partition).bytes_unreclaimed);
        other = job_start("blue");
        ck_assert_int_eq(job_malloc(&other, 0, partition, 192 * MIB), -ENOMEM);
        kill(child, SIGKILL);
        ck_assert_msg(WAIT_FOR(rig_stats(rig, "red", partition).bytes_unreclaimed == 0, 20000),
                      "%llu bytes are unreclaimed",
                      (unsigned long long)rig_stats(rig, "red", partition).bytes_unreclaimed);
        take(&other, 0, partition, 192 * MIB);
        ck_assert_uint_eq(job_count_other(&other, 0, 0, 0, 192 * MIB), 0);
        job_end(&other);
}

/* ---- which device -------------------------------------------------------- */

TEST(a_device_has_its_partition)
{
        struct process red = job_start("red"), blue = job_start_seeing("0", "blue"), blind;
        char name[64] = "";

        ck_assert_int_eq(job_partition_for_device(&red, 0, name), 0);
        ck_assert_str_eq(name, "ipc"); /* the first quota's */
        ck_assert_int_eq(job_partition_for_device(&blue, 0, name), 0);
        ck_assert_str_eq(name, "fd");
        ck_assert_int_eq(job_partition_for_device(&blue, 1, name), -ENOENT);
        ck_assert_int_eq(job_partition_for_device(&red, -1, name), -ENOENT);
        blind = job_start_seeing("-1", "red"); /* nothing */
        ck_assert_int_eq(job_partition_for_device(&blind, 0, name), -ENOENT);
        ck_assert_int_eq(job_malloc(&blind, 0, "fd", MIB), -ENODEV);
        ck_assert_ptr_nonnull(strstr(job_sentence(), "CUDA_VISIBLE_DEVICES"));
        job_end(&blind);
        job_end(&blue);
        job_end(&red);
}

/* ---- programs ------------------------------------------------------------ */

static char *must_run(const char *const *argv)
{
        char *out, *err;
        int status = program_run(argv, &out, &err);

        ck_assert_msg(status == 0, "%s: status %d: %s%s", argv[0], status, out, err);
        free(err);
        return out;
}

TEST(bfcctl_lists_the_device)
{
        const char *status[] = { program_bfcctl(), "--socket", rig->admin_socket, "status", NULL };
        const char *tenants[] = { program_bfcctl(), "--socket", rig->admin_socket, "tenants", NULL };
        struct process job = job_start("red");
        char *out;

        take(&job, 0, "fd", 5 * MIB);
        out = must_run(status);
        ck_assert_msg(strstr(out, "\ncuda:0  ok ") != NULL, "%s", out);
        free(out);
        out = must_run(tenants);
        ck_assert_msg(strstr(out, "\nred ") && strstr(out, "5.0 MiB"), "%s", out);
        free(out);
        job_end(&job);
}

TEST(bfcd_checks_the_config)
{
        const char *check[] = { program_bfcd(), "--check", rig->config_path, NULL };
        char *out, *err;
        int status = program_run(check, &out, &err);

        ck_assert_msg(status == 0, "status %d: %s%s", status, out, err);
        free(out);
        free(err);
}

/* Traces of buffers, each written and checked before it is freed, by several
 * processes. */
LOOP_TEST(replay_verifies_its_contents, N_PARTITIONS)
{
        char path[128], *out;
        const char *replay[] = { program_replay(),
                                 "--socket",
                                 rig->socket,
                                 "--tenant",
                                 "red",
                                 "--partition",
                                 partitions[_i],
                                 "--jobs",
                                 "2",
                                 "--scale",
                                 "0.2",
                                 "--verify",
                                 path,
                                 NULL };
        FILE *file;

        snprintf(path, sizeof(path), "%s/t.csv", rig->folder);
        file = fopen(path, "we");
        ck_assert_ptr_nonnull(file);
        fputs("id,lower,upper,size\n", file); /* not by --generate: there may be no Python */
        for (unsigned i = 0; i < 1000; i++)
                fprintf(file, "%u,%u,%u,%u\n", i, i, i + 50, 1u << i * 7 % 23);
        ck_assert_int_eq(fclose(file), 0);
        out = must_run(replay);
        ck_assert_uint_gt(strlen(out), 0);
        free(out);
}

/* ---- main ---------------------------------------------------------------- */

enum { REAL, FAKE, NONE };

/* Asked in a child: the test begins without a driver. */
static int find_driver(void)
{
        int status = 0;
        pid_t pid = fork();

        if (pid == 0) {
                CUcontext context;
                CUresult r = gpu_start(0, &context);

                if (r != CUDA_SUCCESS) {
                        printf("1..0 # SKIP no GPU: %s\n", gpu_error(r));
                        fflush(stdout);
                }
                _exit(r != CUDA_SUCCESS ? NONE : gpu_is_fake() ? FAKE : REAL);
        }
        return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : NONE;
}

/* Where the environment names none. */
static void use_beside(const char *variable, const char *name)
{
        char path[PATH_MAX + 32];
        ssize_t n = readlink("/proc/self/exe", path, PATH_MAX);
        char *slash;

        if (getenv(variable) || n <= 0)
                return;
        path[n] = '\0';
        slash = strrchr(path, '/');
        strcpy(slash + 1, name);
        if (access(path, X_OK) == 0)
                setenv(variable, path, 1);
}

int main(void)
{
        int driver;

        unsetenv("CUDA_VISIBLE_DEVICES"); /* so that cuda:0 is a job's device 0 */
        setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID", 1);
        setenv("BFC_TEST_DEVICE", "cuda-fd", 1);
        use_beside("BFCD", "bfcd");
        use_beside("BFCCTL", "bfcctl");
        use_beside("BFC_REPLAY", "bfc-replay");
        gpu_machine_new();
        driver = find_driver();
        gpu_machine_remove(); /* every rig has one of its own */
        if (driver == NONE)
                return EXIT_SUCCESS;
        is_fake = driver == FAKE;
        return harness_main(suite_of_tests("broker", 0, setup, teardown));
}
