/* A victim of the storm: a client that stays within what is guaranteed to its tenant. So each of its requests must be
 * granted, and each byte must be as it was written, whatever hostile tenants do and however often the daemon ends.
 * Each block fits in one extent, and the reserve has room for one extent per block.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/integration/parking.h"
#include "tests/integration/storm.h"
#include "tests/random.h"

#define N_BLOCKS       8u
#define MAX_BYTES      (512 * KIB)
#define SHARED_BYTES   70000u
#define PARKABLE_BYTES (1 * MIB)
#define N_NAMES        4u
#define PAUSE_US       2000u
#define KEEP_MS        200u

struct block {
        void *ptr; /* NULL: none */
        size_t n_bytes;
        uint64_t seed;
        bool is_shared, is_parkable;
};

struct victim {
        struct storm *storm;
        struct storm_calls *calls;
        unsigned number;
        bfc_client *client;
        uint64_t random, n_blocks;
        struct block blocks[N_BLOCKS];
};

static char bytes[PARKABLE_BYTES];

/* ---- calls ------------------------------------------------------------------- */

struct moment {
        uint64_t us, n_begun, n_returns;
        bool is_restarting;
};

static struct moment now(const struct victim *v)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct timespec t;

        if (v->client)
                (void)bfc_stats(v->client, &stats);
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (struct moment){ .us = (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000,
                                .n_begun = v->storm->n_restarts_begun,
                                .n_returns = stats.num_returns,
                                .is_restarting = v->storm->n_restarts_begun != v->storm->n_restarts_done };
}

static void count_call(struct victim *v, const struct moment *begin, const char *call)
{
        struct moment end = now(v);
        uint64_t us = end.us - begin->us;

        v->calls->n_calls++;
        if (begin->is_restarting || end.n_begun != begin->n_begun || end.n_returns != begin->n_returns) {
                if (us > v->calls->longest_restart_us)
                        v->calls->longest_restart_us = us;
        } else if (us > v->calls->longest_us) {
                v->calls->longest_us = us;
                v->calls->longest = call;
        }
}

/* The result of a call of the library, which is timed. */
#define CALL(v, call)                                                                                        \
        ({                                                                                                   \
                struct moment begin_ = now(v);                                                               \
                int result_ = (call);                                                                        \
                                                                                                             \
                count_call(v, &begin_, #call);                                                               \
                result_;                                                                                     \
        })

static void must(const struct victim *v, int result)
{
        REQUIRE(result == 0, "victim %u: %d (%s)", v->number, result, bfc_last_error());
}

/* A daemon that is killed leaves a hello without an answer. */
static bfc_client *connect_patiently(struct victim *v)
{
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = v->storm->socket,
                                       .tenant = VICTIM,
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        bfc_client *client = NULL;
        int r;

        (void)WAIT_FOR((r = bfc_connect(&options, &client)) == 0, STORM_WAIT_MS);
        REQUIRE(r == 0, "victim %u: connect: %d (%s)", v->number, r, bfc_last_error());
        return client;
}

static void reconnect(struct victim *v)
{
        bfc_disconnect(v->client);
        v->client = NULL;
        v->client = connect_patiently(v);
}

/* ---- contents ------------------------------------------------------------------ */

static void fill(struct victim *v, const struct block *b)
{
        pattern_write(bytes, b->n_bytes, b->seed);
        must(v, CALL(v, bfc_write(v->client, b->ptr, bytes, b->n_bytes)));
}

static void compare(struct victim *v, const struct block *b)
{
        memset(bytes, 0, b->n_bytes);
        must(v, CALL(v, bfc_read(v->client, bytes, b->ptr, b->n_bytes)));
        REQUIRE(pattern_holds(bytes, b->n_bytes, b->seed),
                "victim %u: WRONG BYTES in a block of %zu bytes%s%s", v->number, b->n_bytes,
                b->is_shared ? ", shared" : "", b->is_parkable ? ", parkable" : "");
        v->calls->n_bytes += b->n_bytes;
}

/* A block that may be parked is awake while it is in use. */
static void begin_use(struct victim *v, const struct block *b)
{
        int r = 0;

        if (!b->is_parkable)
                return;
        (void)WAIT_FOR((r = CALL(v, bfc_use_begin(v->client, b->ptr, STORM_WAIT_MS))) != -EBUSY,
                       STORM_WAIT_MS);
        must(v, r);
}

static void end_use(struct victim *v, const struct block *b)
{
        if (b->is_parkable)
                must(v, bfc_use_end(v->client, b->ptr));
}

static void check(struct victim *v, const struct block *b)
{
        begin_use(v, b);
        compare(v, b);
        end_use(v, b);
}

/* ---- steps --------------------------------------------------------------------- */

static uint64_t name_of(struct victim *v, char ret[static 16])
{
        uint64_t i = random_next(&v->random) % N_NAMES;

        snprintf(ret, 16, "n%u", (unsigned)i);
        return i;
}

static void free_block(struct victim *v, struct block *b)
{
        check(v, b);
        must(v, CALL(v, bfc_free(v->client, b->ptr)));
        b->ptr = NULL;
}

static void free_all(struct victim *v)
{
        for (unsigned i = 0; i < N_BLOCKS; i++)
                if (v->blocks[i].ptr)
                        free_block(v, &v->blocks[i]);
}

static void allocate(struct victim *v, struct block *b)
{
        uint64_t most = UINT64_C(256) << random_next(&v->random) % 12;

        *b = (struct block){ .n_bytes = 1 + random_next(&v->random) % most };
        b->seed = (uint64_t)v->number << 48 ^ ++v->n_blocks;
        must(v, CALL(v, bfc_malloc(v->client, b->n_bytes, &b->ptr)));
        fill(v, b);
}

static void allocate_parkable(struct victim *v, struct block *b)
{
        *b = (struct block){ .n_bytes = PARKABLE_BYTES, .is_parkable = true };
        b->seed = (uint64_t)v->number << 48 ^ ++v->n_blocks;
        must(v, CALL(v, bfc_malloc_flags(v->client, NULL, b->n_bytes, BFC_PARKABLE, &b->ptr)));
        begin_use(v, b);
        fill(v, b);
        end_use(v, b);
}

static void park(struct victim *v, const struct block *b)
{
        int r = CALL(v, bfc_park(v->client, b->ptr, BFC_BACKUP, "parking"));

        if (r != -EALREADY && r != -EBUSY) /* the operator parks, too */
                must(v, r);
}

static void publish(struct victim *v, struct block *b)
{
        struct bfc_publish_options options = { .struct_size = sizeof(options) };
        char name[16];
        uint64_t i = name_of(v, name);
        int r;

        *b = (struct block){ .n_bytes = SHARED_BYTES, .seed = i, .is_shared = true };
        must(v, CALL(v, bfc_malloc_flags(v->client, NULL, b->n_bytes, BFC_WHOLE, &b->ptr)));
        fill(v, b);
        options.keep_ms = random_next(&v->random) % 2 ? KEEP_MS : 0;
        r = CALL(v, bfc_publish_with(v->client, b->ptr, name, &options));
        if (r == -EEXIST) /* the other victim was first */
                b->is_shared = false;
        else
                must(v, r);
}

static void attach(struct victim *v, struct block *b)
{
        size_t n_bytes = 0;
        char name[16];
        uint64_t i = name_of(v, name);
        uint32_t wait_ms = random_next(&v->random) % 2 ? 20 : 0;
        void *ptr = NULL;
        int r = CALL(v, bfc_attach(v->client, name, wait_ms, &ptr, &n_bytes));

        if (r == -ENOENT || r == -ETIMEDOUT)
                return;
        must(v, r);
        REQUIRE(n_bytes == SHARED_BYTES, "victim %u: '%s' has %zu bytes", v->number, name, n_bytes);
        *b = (struct block){ .ptr = ptr, .n_bytes = SHARED_BYTES, .seed = i, .is_shared = true };
        check(v, b);
}

/* By a client of its own, since this one may have mapped the same extents. */
static void attach_read_only(struct victim *v)
{
        struct bfc_attach_options options = { .struct_size = sizeof(options), .flags = BFC_ATTACH_READ_ONLY };
        struct block b = { .n_bytes = SHARED_BYTES, .is_shared = true };
        bfc_client *own = v->client;
        char name[16];
        int r;

        v->client = connect_patiently(v);
        b.seed = name_of(v, name);
        r = CALL(v, bfc_attach_with(v->client, name, &options, &b.ptr, NULL));
        if (r != -ENOENT) {
                must(v, r);
                compare(v, &b);
                REQUIRE(bfc_write(v->client, b.ptr, bytes, 1) == -EACCES, "a block can be written");
        }
        bfc_disconnect(v->client);
        v->client = own;
}

static void step(struct victim *v)
{
        struct block *b = &v->blocks[random_next(&v->random) % N_BLOCKS];
        uint64_t what = random_next(&v->random) % 100;

        if (b->ptr && b->is_parkable && what < 40)
                park(v, b);
        else if (b->ptr && what < 50)
                check(v, b);
        else if (b->ptr)
                free_block(v, b);
        else if (what < 60)
                allocate(v, b);
        else if (what < 75)
                publish(v, b);
        else if (what < 90)
                attach(v, b);
        else if (what < 92 && rig_device() != ON_CUDA_IPC)
                attach_read_only(v);
        else if (b == v->blocks && CHILDREN_CAN_PARK) /* one of them at a time */
                allocate_parkable(v, b);
}

void storm_victim_run(struct storm *storm, unsigned number)
{
        struct victim v = { .storm = storm, .number = number, .calls = &storm->victims[number] };

        v.random = storm->seed * N_VICTIMS + number;
        if (number == 0)
                unsetenv("BFC_CACHE"); /* the harness turned it off */
        v.client = connect_patiently(&v);
        while (!atomic_load(&storm->is_over)) {
                uint64_t what = random_next(&v.random) % 400;

                if (what == 0) {
                        free_all(&v);
                        reconnect(&v);
                }
                step(&v);
                usleep((useconds_t)(random_next(&v.random) % PAUSE_US));
        }
        free_all(&v);
        bfc_disconnect(v.client);
}
