/* Kill -9 at random moments, again and again, over many clients: afterwards all
 * charges, extents and fds are back to nothing, and the daemon's own memory is
 * where it began.
 *
 * BFC_TEST_KILLS=10000 is the long run. The seed is printed; BFC_TEST_SEED takes
 * another one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"
#include "tests/random.h"

#define N_CLIENTS   64u
#define N_BLOCKS    16u
#define MAX_LIFE_US 4000u /* most die in the middle of something */
#define BURST       16u   /* requests, then a pause */
#define PAUSE_US    200000u
#define LONG_LIFE   16u   /* one in LONG_LIFE lives longer */
#define GROWN_BYTES 4096u /* what a C library's own tables may differ by */
#define N_ROUNDS    5u

static const struct rig_config three_tenants = {
        .top = "timeouts: {quarantine: 60m, reclaim: 50ms}\n",
        .size = "128MiB",
        .partitions = "      - {name: train, limit: 96MiB, growth: on-demand}\n"
                      "      - {name: warm, limit: 16MiB, growth: preallocate}\n",
        .tenants =
                TENANT_OF("red", "@UID@", "{partition: train, limit: 64MiB}, {partition: warm, limit: 8MiB}")
                        TENANT("blue", "@UID@", "train, limit: 64MiB, reserve: 16MiB")
                                TENANT("survivor", "@UID@", "train, limit: 16MiB, reserve: 16MiB"),
};

struct totals {
        char socket[96];
        uint64_t seed;
        unsigned n_kills;
        _Atomic uint64_t n_allocs;
        _Atomic unsigned n_done; /* kills */
};

static uint64_t number_from(const char *variable, uint64_t fallback)
{
        const char *text = getenv(variable);
        uint64_t n = text ? strtoull(text, NULL, 0) : 0;

        return n > 0 ? n : fallback;
}

/* ---- a life ---------------------------------------------------------------- */

/* In the short runs of slow builds the daemon may have no place for the next of a row of
 * clients whose dead it is still reaping. */
static bfc_client *connect_client(const struct totals *totals, const char *tenant)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = totals->socket,
                                       .tenant = tenant,
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        bfc_client *client = NULL;
        int r;

        while ((r = bfc_connect(&options, &client)) == -ECONNRESET || r == -EDQUOT)
                usleep(1000);
        REQUIRE(r == 0, "%d: %s", r, bfc_last_error());
        return client;
}

static void run_client(struct totals *totals, uint64_t random)
{
        bfc_client *client = connect_client(totals, random_next(&random) % 2 ? "red" : "blue");
        void *blocks[N_BLOCKS] = { NULL };

        for (unsigned n = 0;; n++) {
                unsigned at = (unsigned)(random_next(&random) % N_BLOCKS);
                size_t n_bytes =
                        1 + (size_t)(random_next(&random) % ((uint64_t)512 << random_next(&random) % 13));
                int r;

                if (random_next(&random) % 8 == 0) {
                        r = bfc_charge(client, NULL, n_bytes, 0);
                        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
                }
                if (n % BURST == BURST - 1) /* or two cores would do nothing else */
                        usleep((useconds_t)(random_next(&random) % PAUSE_US));
                if (blocks[at]) {
                        REQUIRE(bfc_free(client, blocks[at]) == 0, "%s", bfc_last_error());
                        blocks[at] = NULL;
                        continue;
                }
                r = bfc_malloc(client, n_bytes, blocks + at);
                REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
                if (r < 0) {
                        blocks[at] = NULL;
                        continue;
                }
                *(volatile char *)blocks[at] = 1;
                atomic_fetch_add(&totals->n_allocs, 1);
                if (random_next(&random) % 64 == 0) { /* some die between two sessions */
                        bfc_disconnect(client);
                        client = connect_client(totals, "red");
                        memset(blocks, 0, sizeof(blocks));
                }
        }
}

static pid_t client_start_process(struct totals *totals, uint64_t random)
{
        pid_t parent = getpid(), pid = fork();

        REQUIRE(pid >= 0, "%s", strerror(errno));
        if (pid > 0)
                return pid;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() == parent)
                run_client(totals, random);
        _exit(0);
}

static void kill_many(void *arg)
{
        struct totals *totals = arg;
        uint64_t random = totals->seed;
        pid_t pids[N_CLIENTS];
        int status;

        for (unsigned i = 0; i < N_CLIENTS; i++)
                pids[i] = client_start_process(totals, random_next(&random));
        for (unsigned i = 0; i < totals->n_kills; i++) {
                unsigned at = (unsigned)(random_next(&random) % N_CLIENTS);
                uint64_t life_us = random_next(&random) % MAX_LIFE_US;

                usleep((useconds_t)(random_next(&random) % LONG_LIFE ? life_us / N_CLIENTS : life_us));
                kill(pids[at], SIGKILL);
                REQUIRE(waitpid(pids[at], &status, 0) == pids[at] && WIFSIGNALED(status),
                        "client %u ended by itself: %x", at, (unsigned)status);
                pids[at] = client_start_process(totals, random_next(&random));
                atomic_fetch_add(&totals->n_done, 1);
        }
        for (unsigned i = 0; i < N_CLIENTS; i++) {
                kill(pids[i], SIGKILL);
                REQUIRE(waitpid(pids[i], &status, 0) == pids[i] && WIFSIGNALED(status), "client %u", i);
        }
}

/* ---- the test -------------------------------------------------------------- */

static bool is_back(struct rig *rig, struct rig_counts *ret)
{
        *ret = rig_count(rig);
        return ret->n_sessions == 1 && ret->n_blocks == 1 && ret->n_quarantined == 0 &&
               ret->bytes_pending == 0 && rig_charge(rig, "red", "train") == 0 &&
               rig_charge(rig, "blue", "train") == 0 && rig_stats(rig, "red", "warm").bytes_in_use == 0;
}

/* n_kills kills beside a survivor; then the bytes that the daemon uses itself. */
static uint64_t kill_round(struct rig *rig, struct raw *survivor, unsigned n_kills, uint64_t seed)
{
        struct totals *totals = shared_memory(sizeof(*totals));
        struct rig_counts n;
        int status = 0;
        unsigned n_calls = 0;
        pid_t killer;

        strcpy(totals->socket, rig->socket);
        totals->seed = seed;
        totals->n_kills = n_kills;
        killer = child_start(kill_many, totals);
        while (waitpid(killer, &status, WNOHANG) == 0) {
                Bfcd__Block block;

                ck_assert_int_eq(raw_malloc(survivor, 0, 1000, &block), 0);
                ck_assert_int_eq(raw_free(survivor, block.block_id), 0);
                n_calls++;
                usleep(2000);
        }
        ck_assert_int_eq(status, 0);
        ck_assert_uint_gt(n_calls, 0);
        ck_assert_uint_eq(totals->n_done, n_kills);
        ck_assert_msg(WAIT_FOR(is_back(rig, &n), 4 * SETTLE_MS),
                      "after %u kills: %llu sessions, %llu blocks, %llu extents, %llu quarantined", n_kills,
                      (unsigned long long)n.n_sessions, (unsigned long long)n.n_blocks,
                      (unsigned long long)n.n_extents, (unsigned long long)n.n_quarantined);
        printf("# %u kills: %llu allocations, the survivor called %u times; the daemon has allocated %llu bytes, "
               "%llu are resident\n",
               n_kills, (unsigned long long)totals->n_allocs, n_calls, (unsigned long long)n.bytes_allocated,
               (unsigned long long)n.bytes_resident);
        fflush(stdout);
        return n.bytes_allocated;
}

TEST(kills_at_random)
{
        unsigned n_kills = (unsigned)number_from("BFC_TEST_KILLS", 100);
        uint64_t seed = number_from("BFC_TEST_SEED", 1), before, after;
        struct raw *survivor; /* no client: children of a process that uses CUDA cannot use it */
        struct rig *rig;
        Bfcd__Block kept;

        setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0", 1); /* what lies there counts as in use */
        rig = rig_start(&three_tenants);
        unsetenv("GLIBC_TUNABLES");
        survivor = session_open(rig->socket, "survivor");

        printf("# seed %llu\n", (unsigned long long)seed);
        ck_assert_int_eq(raw_malloc(survivor, 0, 8 * MIB, &kept), 0);
        before = kill_round(rig, survivor, n_kills / 10, seed);
        /* A table may still grow to the most that it has ever needed. A leak grows in every round. */
        for (unsigned n = 1; n <= N_ROUNDS; n++) {
                after = kill_round(rig, survivor, n_kills, seed + n);
                /* what it watches of destroyed extents is given up at its next look */
                WAIT_FOR((after = rig_count(rig).bytes_allocated) <= before + GROWN_BYTES, SETTLE_MS / 6);
                if (after <= before + GROWN_BYTES)
                        break;
                ck_assert_msg(n < N_ROUNDS, "allocated: %llu bytes, and %llu after a round more",
                              (unsigned long long)before, (unsigned long long)after);
                before = after;
        }
        session_end(survivor);
        rig_stop(rig);
}

int main(void)
{
        return harness_cases_with("kills", 1800, NULL);
}
