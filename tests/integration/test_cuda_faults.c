/* The driver fails at every call in turn, in the daemon and in the client: never
 * a crash, and afterwards nothing is charged that is not held, and nothing is held
 * that is not charged.
 *
 * The fake driver counts its calls. A run without faults tells how many there
 * are; then run N makes the Nth of them fail with "out of memory".
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/gpu/driver.h"
#include "tests/integration/tools.h"

#define DEVICE (64 * MIB)

static const struct rig_config config = {
        .size = "64MiB",
        .partitions = "      - {name: train, limit: 48MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 32MiB") TENANT("blue", "@UID@", "train, limit: 32MiB"),
};

/* ---- the fake's books ----------------------------------------------------- */

/* How many calls the process that wrote this file has made. */
static unsigned count_calls(const char *path)
{
        char *text = file_text(path);
        unsigned n_calls = 0;

        ck_assert_ptr_nonnull(text);
        ck_assert_int_eq(sscanf(text, "total %u", &n_calls), 1);
        free(text);
        return n_calls;
}

static void ask_driver(void *arg)
{
        uint64_t *ret_free = arg;
        CUcontext context;

        REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS, "no driver");
        *ret_free = gpu_n_free();
}

/* What the driver says is taken of the device, asked by a process of its own. */
static uint64_t bytes_taken(void)
{
        uint64_t *n_free = shared_memory(sizeof(*n_free));

        child_join(child_start(ask_driver, n_free));
        return DEVICE - *n_free;
}

/* ---- a life --------------------------------------------------------------- */

struct life {
        char socket[96];
        const char *fault;  /* for this process, or NULL */
        const char *counts; /* a file, or NULL */
};

/* A block that is good for something, at both ends. */
static void use(void *p, size_t n_bytes, uint64_t seed)
{
        uint8_t *end = (uint8_t *)p + n_bytes - GRANULE;

        pattern_write(p, GRANULE, seed);
        pattern_write(end, GRANULE, seed + 1);
        REQUIRE(pattern_holds(p, GRANULE, seed) && pattern_holds(end, GRANULE, seed + 1), "bytes were lost");
}

/* Allocates and frees until it has met growth, reuse and release. Whatever fails
 * is refused properly. */
static void live(void *arg)
{
        static const size_t sizes[] = { MIB / 4, 3 * MIB, 2 * MIB + 1, MIB / 4 };
        const struct life *life = arg;
        void *blocks[4] = { NULL };

        if (life->fault)
                setenv("FAKE_CUDA_FAULT", life->fault, 1);
        if (life->counts)
                setenv("FAKE_CUDA_COUNTS", life->counts, 1);
        for (unsigned round = 0; round < 2; round++) {
                bfc_client *client = NULL;
                struct bfc_options options = { .struct_size = sizeof(options), .socket = life->socket };

                options.tenant = round == 0 ? "red" : "blue";
                if (bfc_connect(&options, &client) < 0)
                        return;
                for (unsigned i = 0; i < 4; i++) {
                        int r = bfc_malloc(client, sizes[i], &blocks[i]);

                        if (r == 0)
                                use(blocks[i], sizes[i], i);
                        else
                                REQUIRE(*bfc_last_error(), "no sentence for %d", r);
                        if (r < 0)
                                blocks[i] = NULL;
                        if (i == 1)
                                (void)bfc_free(client, blocks[0]);
                }
                for (unsigned i = 1; i < 4; i++)
                        (void)bfc_free(client, blocks[i]);
                bfc_disconnect(client);
        }
}

/* ---- the daemon's calls --------------------------------------------------- */

static struct life life_new(const struct rig *rig)
{
        struct life life = { .fault = NULL };

        strcpy(life.socket, rig->socket);
        return life;
}

/* What is charged is what the device lacks: extents that a failing driver did not
 * take back stay charged as escaped. */
static void assert_books_balance(struct rig *rig)
{
        uint64_t unreclaimed = 0;

        (void)WAIT_FOR(rig_count(rig).n_sessions == 0 && rig_count(rig).n_extents == 0, SETTLE_MS);
        ck_assert_uint_eq(rig_count(rig).n_sessions, 0);
        ck_assert_uint_eq(rig_count(rig).n_blocks, 0);
        ck_assert_uint_eq(rig_count(rig).bytes_pending, 0);
        for (unsigned i = 0; i < 2; i++) {
                Bfcd__Statistics stats = rig_stats(rig, i == 0 ? "red" : "blue", "train");

                ck_assert_uint_eq(stats.bytes_in_use, 0);
                ck_assert_uint_eq(stats.bytes_reserved, stats.bytes_unreclaimed);
                unreclaimed += stats.bytes_unreclaimed;
        }
        ck_assert_uint_eq(bytes_taken(), unreclaimed);
        rig->unreclaimed_bytes = unreclaimed;
}

/* Starts a daemon whose Nth call fails; NULL: it found that it cannot serve, and
 * said so. */
static struct rig *start_with_fault(unsigned n, const char *counts)
{
        struct rig *rig = rig_folder();
        char fault[32], *text = rig_config_text(rig, &config), *log;
        int status = 0;

        rig_write_config(rig, text);
        free(text);
        snprintf(fault, sizeof(fault), "*:%u:2", n);
        if (n > 0)
                setenv("FAKE_CUDA_FAULT", fault, 1);
        if (counts)
                setenv("FAKE_CUDA_COUNTS", counts, 1);
        rig->pid = rig_spawn_daemon(rig);
        unsetenv("FAKE_CUDA_FAULT");
        unsetenv("FAKE_CUDA_COUNTS");
        while (!rig_answers(rig)) {
                if (waitpid(rig->pid, &status, WNOHANG) != rig->pid) {
                        usleep(2000);
                        continue;
                }
                log = rig_log(rig);
                ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 1, "call %u: status 0x%x: %s", n,
                              (unsigned)status, log);
                ck_assert_msg(log && strstr(log, "cuda:0"), "call %u: it does not say why", n);
                free(log);
                rig_discard(rig);
                return NULL;
        }
        rig->admin = raw_connect(rig->admin_socket, NULL);
        ck_assert_ptr_nonnull(rig->admin);
        rig->forgiven = "error:"; /* a failing driver is logged */
        return rig;
}

/* A long run tries every call, any other every third: other calls on each device. */
static unsigned call_step(void)
{
        return suite_is_long() ? 1 : 3;
}

static unsigned first_call(void)
{
        return suite_is_long() || rig_device() == ON_CUDA_IPC ? 1 : 2;
}

static void run_life(struct life *life)
{
        child_join(child_start(live, life));
}

TEST(every_call_of_the_daemon_fails_once)
{
        unsigned n_calls, n_served = 0;
        struct rig *rig;

        rig = rig_folder();
        char counts[128];
        snprintf(counts, sizeof(counts), "%s/counts", rig->folder);
        struct rig *counted = start_with_fault(0, counts);
        struct life life = life_new(counted);
        run_life(&life);
        assert_books_balance(counted);
        rig_terminate(counted);
        n_calls = count_calls(counts);
        rig_discard(counted);
        rig_discard(rig);
        ck_assert_uint_gt(n_calls, 30);

        for (unsigned n = first_call(); n <= n_calls; n += call_step()) {
                rig = start_with_fault(n, NULL);
                if (!rig)
                        continue;
                n_served++;
                printf("# call %u of the daemon\n", n);
                life = life_new(rig);
                run_life(&life);
                assert_books_balance(rig);
                if (n % 8 == 0)
                        run_life(&life); /* the fault is over: all is well again */
                rig_terminate(rig);
                rig_discard(rig);
        }
        ck_assert_uint_gt(n_served, n_calls / 4 / call_step());
        fprintf(stderr, "# %u calls of the daemon, %u after its start\n", n_calls, n_served);
}

TEST(every_call_of_the_client_fails_once)
{
        unsigned n_calls;
        char counts[128], fault[32];
        struct life life;
        struct rig *rig;

        rig = rig_start(&config);
        life = life_new(rig);
        snprintf(counts, sizeof(counts), "%s/counts", rig->folder);
        life.counts = counts;
        run_life(&life);
        n_calls = count_calls(counts);
        ck_assert_uint_gt(n_calls, 20);
        life.counts = NULL;
        for (unsigned n = first_call(); n <= n_calls; n += call_step()) {
                snprintf(fault, sizeof(fault), "*:%u:2", n);
                life.fault = fault;
                run_life(&life);
                assert_books_balance(rig);
        }
        fprintf(stderr, "# %u calls of the client\n", n_calls);
        rig_stop(rig);
}

int main(void)
{
        setenv("FAKE_CUDA_POISON_BYTES", "4096", 1); /* hundreds of allocations are poisoned */
        return harness_cases_with("cuda_faults", 6 * TEST_TIMEOUT, NULL);
}
