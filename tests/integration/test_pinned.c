/* Host memory that clients register with CUDA (pinned: true): while it is mapped, and only where the process uses
 * a GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

#define BLOCK (8 * MIB)

static const char on_host[] = "      - {name: train, limit: 64MiB}\n"
                              "      - {name: parking, limit: 64MiB, pinned: true}\n";
static const char beside_gpu[] = "      - {name: train, limit: 64MiB}\n"
                                 "  - id: host\n    size: 64MiB\n    partitions:\n"
                                 "      - name: parking\n        limit: 64MiB\n        pinned: true\n";

/* Where the fake driver of each process shows what is registered. */
static char shown_in[128];

static struct rig *pinned_rig(const char *top)
{
        struct rig_config config = {
                .top = top,
                .partitions = rig_device() == ON_HOST ? on_host : beside_gpu,
                .tenants = TENANT_OF("red", "@UID@", "{partition: train}, {partition: parking}"),
        };

        snprintf(shown_in, sizeof(shown_in), "/tmp/bfc-pinned-XXXXXX");
        ck_assert_ptr_nonnull(mkdtemp(shown_in));
        strcat(shown_in, "/%p");
        setenv("FAKE_CUDA_PINNED", shown_in, 1);
        return rig_start(&config);
}

static void pinned_rig_stop(struct rig *rig)
{
        char command[160];

        rig_stop(rig);
        *strrchr(shown_in, '/') = '\0';
        snprintf(command, sizeof(command), "rm -r %s", shown_in);
        ck_assert_int_eq(system(command), 0);
}

/* By the driver of that process; 0 where it has never registered anything. */
static uint64_t driver_has(pid_t pid)
{
        unsigned long long n_bytes = 0;
        char path[160];
        FILE *f;

        snprintf(path, sizeof(path), "%.*s%d", (int)(strlen(shown_in) - 2), shown_in, (int)pid);
        f = fopen(path, "re");
        if (f) {
                if (fscanf(f, "%llu", &n_bytes) != 1)
                        n_bytes = 0; /* it is being written */
                fclose(f);
        }
        return n_bytes;
}

static uint64_t pinned(bfc_client *client)
{
        struct bfc_partition_info info = { .struct_size = sizeof(info) };

        ck_assert_ok(bfc_partition_info(client, 0, &info));
        ck_assert_uint_eq(info.is_pinned, 0);
        ck_assert_uint_eq(info.bytes_pinned, 0);
        ck_assert_ok(bfc_partition_info(client, 1, &info));
        ck_assert_uint_eq(info.is_pinned, 1);
        return info.bytes_pinned;
}

static uint64_t reserved(struct rig *rig)
{
        return rig_stats(rig, "red", "parking").bytes_reserved;
}

/* In a process that has a block on a GPU, where there is one. Both orders of the first uses are tried. */
static void check_registered(struct rig *rig, bool gpu_first)
{
        bfc_client *client = client_open(rig, "red", "train");
        void *on_gpu = NULL, *p, *again;

        if (gpu_first)
                ck_assert_ok(bfc_malloc(client, BLOCK, &on_gpu));
        ck_assert_ok(bfc_malloc_in(client, "parking", BLOCK, &p));
        block_fill(client, p, BLOCK, 1);
        if (!gpu_first) {
                ck_assert_uint_eq(pinned(client), 0);
                ck_assert_ok(bfc_malloc(client, BLOCK, &on_gpu));
        }
        ck_assert_uint_eq(pinned(client), rig_device() == ON_HOST ? 0 : reserved(rig));
        ck_assert_uint_eq(driver_has(getpid()), pinned(client));
        ck_assert_ok(bfc_malloc_in(client, "parking", 2 * BLOCK, &again));
        ck_assert_uint_eq(driver_has(getpid()), rig_device() == ON_HOST ? 0 : reserved(rig));
        ck_assert(block_has(client, p, BLOCK, 1));
        ck_assert_ok(bfc_free(client, again));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_trim(client, SIZE_MAX)); /* the client unmaps what the daemon takes back */
        ck_assert_uint_eq(reserved(rig), 0);
        ck_assert_uint_eq(pinned(client), 0);
        ck_assert_uint_eq(driver_has(getpid()), 0);
        ck_assert_ok(bfc_malloc_in(client, "parking", BLOCK, &p));
        ck_assert_uint_eq(driver_has(getpid()), rig_device() == ON_HOST ? 0 : reserved(rig));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_free(client, on_gpu));
        bfc_disconnect(client);
        ck_assert_uint_eq(driver_has(getpid()), 0);
}

TEST(memory_is_registered_while_it_is_mapped)
{
        struct rig *rig = pinned_rig(NULL);

        check_registered(rig, true);
        pinned_rig_stop(rig);
}

TEST(memory_is_registered_when_a_gpu_is_first_used)
{
        struct rig *rig = pinned_rig(NULL);

        check_registered(rig, false);
        pinned_rig_stop(rig);
}

/* It does not even load the driver. */
TEST(a_process_without_a_gpu_registers_nothing)
{
        struct rig *rig = pinned_rig(NULL);
        bfc_client *client = client_open(rig, "red", "parking");
        void *p;

        ck_assert_ok(bfc_malloc(client, BLOCK, &p));
        block_fill(client, p, BLOCK, 2);
        ck_assert_uint_eq(pinned(client), 0);
        ck_assert(block_has(client, p, BLOCK, 2));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert_uint_eq(reserved(rig), 0);
        bfc_disconnect(client);
        pinned_rig_stop(rig);
}

TEST(memory_that_the_driver_refuses_works_without)
{
        struct rig *rig = pinned_rig(NULL);
        bfc_client *client;
        void *on_gpu, *p;

        setenv("FAKE_CUDA_FAULT", "cuMemHostRegister:1+:2", 1);
        client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc(client, BLOCK, &on_gpu));
        ck_assert_ok(bfc_malloc_in(client, "parking", BLOCK, &p));
        ck_assert_uint_eq(pinned(client), 0);
        block_fill(client, p, BLOCK, 3);
        ck_assert(block_has(client, p, BLOCK, 3));
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_free(client, on_gpu));
        bfc_disconnect(client);
        pinned_rig_stop(rig);
}

/* Its registrations would keep the pages, so the daemon waits for its end as on a GPU. */
TEST(memory_returns_with_the_process)
{
        struct rig *rig = pinned_rig("timeouts: {quarantine: 100ms}\n");
        pid_t pid = fork();

        ck_assert_int_ge(pid, 0);
        if (pid == 0) {
                bfc_client *client = child_client_with(.socket = rig->socket, .partition = "train");
                void *p;

                if (bfc_malloc(client, BLOCK, &p) < 0 || bfc_malloc_in(client, "parking", BLOCK, &p) < 0)
                        _exit(1);
                pause();
        }
        ck_assert(WAIT_FOR(reserved(rig) >= BLOCK && (rig_device() == ON_HOST || driver_has(pid) >= BLOCK),
                           SETTLE_MS));
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        ck_assert(WAIT_FOR(reserved(rig) == 0, SETTLE_MS));
        pinned_rig_stop(rig);
}

TEST(it_is_shown)
{
        struct rig *rig = pinned_rig(NULL);
        bfc_client *client = client_open(rig, "red", "parking");
        void *p;

        ctl_says(rig, WORDS("partitions"), "-, pinned");
        ck_assert_ok(bfc_malloc(client, BLOCK, &p));
        ctl_says(rig, WORDS("partitions"),
                 ", pinned"); /* of any size: on a busy machine not all pages are large */
        ctl_says(rig, WORDS("--json", "partitions"), "\"pinned\": true");
        ctl_says(rig, WORDS("--json", "partitions"), "\"pinned\": false");
        ctl_says(rig, WORDS("--json", "partitions"), "\"bytes_pinned\": 0");
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        pinned_rig_stop(rig);
}

/* The daemon waits until the client has unmapped it, as on a GPU. */
TEST(blocks_of_it_are_parked)
{
        struct rig *rig = pinned_rig(NULL);
        bfc_client *client = client_open(rig, "red", "parking");
        void *p, *other;

        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
        block_fill(client, p, BLOCK, 5);
        for (int i = 0; i < 3; i++) {
                if (rig_device() == ON_HOST)
                        ck_assert_ok(bfc_park(client, p, BFC_BACKUP, "train"));
                else
                        ck_assert_ok(bfc_park(client, p, BFC_DISCARD, NULL));
                ck_assert(WAIT_FOR(reserved(rig) == 0, SETTLE_MS));
                ck_assert_ok(bfc_malloc(client, BLOCK, &other));
                ck_assert_ok(bfc_free(client, other));
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(rig_device() != ON_HOST || block_has(client, p, BLOCK, 5));
                ck_assert_ok(bfc_trim(client, SIZE_MAX));
        }
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        pinned_rig_stop(rig);
}

/* ---- blocks of a GPU that are parked there -------------------------------------- */

#define BUFFERS (16 * MIB) /* which the daemon registers before its first copy */

/* Parks and wakes a block, and returns all memory. */
static void check_parked(struct rig *rig, uint64_t registered)
{
        bfc_client *client = client_open(rig, "red", "train");
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
        block_fill(client, p, BLOCK, 4);
        for (int i = 0; i < 2; i++) {
                ck_assert_ok(bfc_park(client, p, BFC_BACKUP, "parking"));
                ck_assert_uint_eq(driver_has(rig_keeper(rig, "cuda:0")), BUFFERS + registered);
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(block_has(client, p, BLOCK, 4));
        }
        ck_assert_ok(bfc_free(client, p));
        ck_assert_ok(bfc_trim(client, SIZE_MAX));
        ck_assert(WAIT_FOR(reserved(rig) == 0, SETTLE_MS));
        ck_assert_uint_eq(driver_has(rig_keeper(rig, "cuda:0")), BUFFERS);
        bfc_disconnect(client);
}

TEST(the_daemon_registers_what_gpus_copy_to)
{
        struct rig *rig;

        if (rig_device() != ON_CUDA_FD)
                return;
        rig = pinned_rig(NULL);
        ck_assert_uint_eq(driver_has(rig_keeper(rig, "cuda:0")), 0);
        check_parked(rig, BLOCK);
        pinned_rig_stop(rig);
}

TEST(memory_that_the_daemons_driver_refuses_works_without)
{
        struct rig *rig;

        if (rig_device() != ON_CUDA_FD)
                return;
        setenv("FAKE_CUDA_FAULT", "cuMemHostRegister:2+:2", 1);
        rig = pinned_rig(NULL);
        unsetenv("FAKE_CUDA_FAULT");
        check_parked(rig, 0);
        ck_assert(rig_logged(rig, "partition 'parking' is pinned, but CUDA could not register its memory"));
        pinned_rig_stop(rig);
}
