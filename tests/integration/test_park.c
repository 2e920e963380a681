/* Blocks that are parked and woken: contents, addresses and charges; refusals, waits and hostile requests;
 * clients and daemons that are killed at any moment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "tests/integration/kept.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

#define BLOCK (10 * MIB)

static const struct rig_config config = {
        .partitions = "      - {name: train, limit: 64MiB}\n"
                      "      - {name: parking, limit: 32MiB}\n",
        .tenants = "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 32MiB}, "
                   "{partition: parking, limit: 32MiB}]\n",
};

static const struct rig_config roomy = {
        .top = "timeouts: {quarantine: 100ms}\n",
        .partitions = "      - {name: train, limit: 64MiB}\n"
                      "      - {name: parking, limit: 192MiB}\n",
        .tenants = "  - name: red\n    match: {uid: @UID@}\n    quotas: [{partition: train, limit: 64MiB}, "
                   "{partition: parking, limit: 192MiB}]\n",
};

#define CAN_PARK (rig_device() == ON_HOST)

static uint64_t reserved(struct rig *rig, const char *partition)
{
        return rig_stats(rig, "red", partition).bytes_reserved;
}

static uint64_t in_use(struct rig *rig, const char *partition)
{
        return rig_stats(rig, "red", partition).bytes_in_use;
}

static bool page_is_mapped(const void *ptr)
{
        int fds[2];
        bool is;

        ck_assert_int_eq(pipe(fds), 0);
        is = write(fds[1], ptr, 1) == 1;
        close(fds[0]);
        close(fds[1]);
        return is;
}

static void park(bfc_client *client, void *ptr)
{
        ck_assert_ok(bfc_park(client, ptr, BFC_BACKUP, "parking"));
}

/* ---- one client ------------------------------------------------------------------ */

TEST(a_parked_block_returns_with_its_contents)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        char byte = 1;
        void *p;

        if (!CAN_PARK) {
                ck_assert_int_eq(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p), -ENOTSUP);
                bfc_disconnect(client);
                rig_stop(rig);
                return;
        }
        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK - 1000, BFC_PARKABLE, &p));
        ck_assert_uint_eq(in_use(rig, "train"), BLOCK);
        for (unsigned i = 0; i < 3; i++) {
                pattern_write(p, BLOCK, i);
                park(client, p);
                ck_assert(!page_is_mapped(p));
                ck_assert_int_eq(bfc_read(client, &byte, p, 1), -EBUSY);
                ck_assert_int_eq(bfc_park(client, p, BFC_DISCARD, NULL), -EALREADY);
                ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
                ck_assert_uint_eq(in_use(rig, "train"), 0);
                ck_assert_uint_eq(in_use(rig, "parking"), BLOCK);
                ck_assert_ok(bfc_wake(client, p, 0));
                ck_assert(pattern_holds(p, BLOCK, i));
                ck_assert_uint_eq(in_use(rig, "train"), BLOCK);
                ck_assert_uint_eq(reserved(rig, "train"), BLOCK);
                ck_assert_uint_eq(in_use(rig, "parking"), 0);
                ck_assert_ok(bfc_wake(client, p, 0)); /* it is awake */
        }
        ck_assert_ok(bfc_park(client, p, BFC_DISCARD, NULL));
        ck_assert_uint_eq(in_use(rig, "parking"), 0);
        ck_assert_ok(bfc_wake(client, p, 0));
        ck_assert(all_bytes_are(p, BLOCK, 0));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* The copy begins inside an extent, and beside another block. */
TEST(a_copy_can_be_anywhere)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p, *before, *behind;

        if (CAN_PARK) {
                ck_assert_ok(bfc_malloc_flags(client, "parking", 1000, BFC_WHOLE, &before));
                pattern_write(before, 1000, 1);
                ck_assert_ok(bfc_malloc_flags(client, "parking", BLOCK + MIB, BFC_WHOLE, &behind));
                ck_assert_ok(bfc_free(client, behind)); /* the copy gets its place */
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
                pattern_write(p, BLOCK, 2);
                park(client, p);
                ck_assert_ok(bfc_malloc_flags(client, "parking", 1000, BFC_WHOLE, &behind));
                pattern_write(behind, 1000, 3);
                ck_assert_ok(bfc_wake(client, p, 0));
                ck_assert(pattern_holds(p, BLOCK, 2));
                ck_assert(pattern_holds(before, 1000, 1));
                ck_assert(pattern_holds(behind, 1000, 3));
                ck_assert_ok(bfc_free(client, before));
                ck_assert_ok(bfc_free(client, behind));
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(other_blocks_use_the_memory_and_not_the_place)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p[3], *other[3];

        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p[i]));
                pattern_write(p[i], BLOCK, i);
        }
        for (unsigned i = 0; CAN_PARK && i < 3; i++)
                park(client, p[i]);
        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_WHOLE, &other[i]));
                pattern_write(other[i], BLOCK, 10 + i);
        }
        ck_assert_int_eq(CAN_PARK ? bfc_wake(client, p[1], 10) : -EDQUOT, -EDQUOT); /* it stays parked */
        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                ck_assert(pattern_holds(other[i], BLOCK, 10 + i));
                ck_assert_ok(bfc_free(client, other[i]));
                ck_assert_ok(bfc_wake(client, p[i], SETTLE_MS));
                ck_assert(pattern_holds(p[i], BLOCK, i));
        }
        for (unsigned i = 0; CAN_PARK && i < 3; i += 2)
                ck_assert_ok(bfc_free(client, p[i]));
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(without_room_for_the_copy_nothing_changes)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p, *full, *slab;

        if (CAN_PARK) {
                ck_assert_ok(bfc_malloc_flags(client, "parking", 30 * MIB, BFC_WHOLE, &full));
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
                ck_assert_ok(bfc_malloc(client, 100, &slab));
                pattern_write(p, BLOCK, 1);
                ck_assert_int_eq(bfc_park(client, p, BFC_BACKUP, "parking"), -EDQUOT);
                ck_assert(has_stats(bfc_last_error()));
                ck_assert(pattern_holds(p, BLOCK, 1));
                ck_assert_int_eq(bfc_park(client, p, BFC_BACKUP, "elsewhere"), -ENOENT);
                ck_assert_int_eq(bfc_park(client, p, BFC_BACKUP, NULL), -EINVAL);
                ck_assert_int_eq(bfc_park(client, p, 3, "parking"), -EINVAL);
                ck_assert_int_eq(bfc_park(client, slab, BFC_DISCARD, NULL), -EINVAL);
                ck_assert_int_eq(bfc_park(client, (char *)p + 256, BFC_DISCARD, NULL), -EINVAL);
                ck_assert_int_eq(bfc_wake(client, slab, 0), -EINVAL);
                ck_assert_ok(bfc_free(client, full));
                park(client, p);
                ck_assert_ok(bfc_free(client, p)); /* with its copy */
                ck_assert_uint_eq(in_use(rig, "parking"), 0);
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(a_client_that_ends_leaves_no_copy)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p;

        if (CAN_PARK) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
                park(client, p);
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- uses and tags ------------------------------------------------------------------- */

static void *tagged(bfc_client *client, const char *tag, uint64_t n_bytes, uint64_t seed)
{
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = tag };
        void *p;

        ck_assert_ok(bfc_malloc_with(client, n_bytes, &options, &p));
        pattern_write(p, n_bytes, seed);
        return p;
}

TEST(a_block_in_use_is_not_parked)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p, *small;

        ck_assert_ok(bfc_malloc(client, 100, &small));
        ck_assert_int_eq(bfc_use_begin(client, small, 0), -EINVAL);
        ck_assert_int_eq(bfc_use_end(client, small), -EINVAL);
        ck_assert_int_eq(bfc_use_begin(client, &p, 0), -EINVAL);
        if (CAN_PARK) {
                p = tagged(client, "one", BLOCK, 1);
                ck_assert_int_eq(bfc_use_end(client, p), -EINVAL);
                ck_assert_ok(bfc_use_begin(client, p, 0));
                ck_assert_ok(bfc_use_begin(client, p, 0));
                ck_assert_int_eq(bfc_park(client, p, BFC_DISCARD, NULL), -EBUSY);
                ck_assert_ok(bfc_use_end(client, p));
                ck_assert_int_eq(bfc_park(client, p, BFC_DISCARD, NULL), -EBUSY);
                ck_assert_int_eq(bfc_park_tag(client, "one", BFC_DISCARD, NULL), -EBUSY);
                ck_assert_ok(bfc_use_end(client, p));
                ck_assert_int_eq(bfc_use_end(client, p), -EINVAL);
                park(client, p);
                ck_assert(!page_is_mapped(p));
                ck_assert_ok(bfc_use_begin(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 1));
                ck_assert_ok(bfc_free(client, p)); /* a use is no reason to keep it */
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(blocks_with_a_tag_are_parked_together)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *a[2], *b, *full;

        if (CAN_PARK) {
                a[0] = tagged(client, "a", 4 * MIB, 1);
                a[1] = tagged(client, "a", 6 * MIB, 2);
                b = tagged(client, "b", 8 * MIB, 3);
                ck_assert_ok(bfc_wake_tag(client, "none", 0));
                ck_assert_ok(bfc_use_begin(client, a[1], 0));
                ck_assert_int_eq(bfc_park_tag(client, "a", BFC_BACKUP, "parking"), -EBUSY);
                ck_assert_uint_eq(in_use(rig, "parking"), 4 * MIB);
                ck_assert_ok(bfc_use_end(client, a[1]));
                ck_assert_ok(bfc_park_tag(client, "a", BFC_BACKUP, "parking"));
                ck_assert_uint_eq(in_use(rig, "parking"), 10 * MIB);
                ck_assert(page_is_mapped(b));
                ck_assert(WAIT_FOR(reserved(rig, "train") == 8 * MIB, SETTLE_MS));
                ck_assert_ok(bfc_malloc_flags(client, NULL, 20 * MIB, BFC_PARKABLE, &full));
                ck_assert_int_eq(bfc_use_begin_tag(client, "a", 0), -EDQUOT);
                ck_assert_int_eq(bfc_use_end(client, a[0]), -EINVAL);
                ck_assert_int_eq(bfc_use_end(client, a[1]), -EINVAL);
                ck_assert_ok(bfc_free(client, full));
                ck_assert_ok(bfc_use_begin_tag(client, "a", SETTLE_MS));
                ck_assert(pattern_holds(a[0], 4 * MIB, 1));
                ck_assert(pattern_holds(a[1], 6 * MIB, 2));
                ck_assert_int_eq(bfc_park_tag(client, NULL, BFC_BACKUP, "parking"), -EBUSY);
                ck_assert(!page_is_mapped(b));
                ck_assert_ok(bfc_use_end_tag(client, "a"));
                ck_assert_ok(bfc_park_tag(client, NULL, BFC_BACKUP, "parking"));
                ck_assert_uint_eq(in_use(rig, "train"), 0);
                ck_assert_ok(bfc_wake_tag(client, NULL, SETTLE_MS));
                ck_assert(pattern_holds(a[1], 6 * MIB, 2));
                ck_assert(pattern_holds(b, 8 * MIB, 3));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

struct turns {
        bfc_client *client;
        void *ptr;
        uint64_t n_steps;
        bool is_over;
};

static void *park_again_and_again(void *arg)
{
        struct turns *turns = arg;

        while (!__atomic_load_n(&turns->is_over, __ATOMIC_RELAXED)) {
                int r = bfc_park(turns->client, turns->ptr, BFC_BACKUP, "parking");

                ck_assert_msg(r == 0 || r == -EBUSY || r == -EALREADY, "%d: %s", r, bfc_last_error());
        }
        return NULL;
}

/* A thread parks the block at any moment; between use_begin and use_end it is there. */
TEST(threads_take_turns)
{
        struct rig *rig = rig_start(&roomy);
        struct turns turns = { .client = client_open(rig, "red", "train") };
        pthread_t thread;
        char byte = 0;

        if (CAN_PARK) {
                turns.ptr = tagged(turns.client, NULL, 2 * MIB, 0);
                ck_assert_int_eq(pthread_create(&thread, NULL, park_again_and_again, &turns), 0);
                for (uint64_t i = 0; i < 100; i++) {
                        ck_assert_ok(bfc_use_begin(turns.client, turns.ptr, SETTLE_MS));
                        ck_assert(pattern_holds(turns.ptr, 2 * MIB, i));
                        pattern_write(turns.ptr, 2 * MIB, i + 1);
                        ck_assert_ok(bfc_read(turns.client, &byte, turns.ptr, 1));
                        ck_assert_ok(bfc_use_end(turns.client, turns.ptr));
                        (void)bfc_read(turns.client, &byte, turns.ptr, 1);
                }
                __atomic_store_n(&turns.is_over, true, __ATOMIC_RELAXED);
                ck_assert_ok(bfc_use_begin(turns.client, turns.ptr, SETTLE_MS));
                ck_assert_int_eq(pthread_join(thread, NULL), 0);
                ck_assert_ok(bfc_free(turns.client, turns.ptr));
        }
        bfc_disconnect(turns.client);
        rig_stop(rig);
}

/* ---- hostile requests --------------------------------------------------------------- */

static int raw_park(struct raw *raw, uint64_t block_id, bool discard, uint32_t partition)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Park body = BFCD__PARK__INIT;

        body.block_id = block_id;
        body.discard = discard;
        body.partition = partition;
        request.body_case = BFCD__REQUEST__BODY_PARK;
        request.park = &body;
        return raw_do(raw, &request);
}

/* 0: it was answered with a block. */
static int raw_wake(struct raw *raw, uint64_t block_id)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Wake body = BFCD__WAKE__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        body.block_id = block_id;
        request.body_case = BFCD__REQUEST__BODY_WAKE;
        request.wake = &body;
        ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
        r = reply->body_case == BFCD__REPLY__BODY_BLOCK ? 0 : -(int)reply->refusal->error;
        ck_assert(r != 0 || reply->block->block_id == block_id);
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

static uint64_t raw_parkable(struct raw *raw, uint64_t n_bytes)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t id;

        body.n_bytes = n_bytes;
        body.flags = BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE;
        request.body_case = BFCD__REQUEST__BODY_MALLOC;
        request.malloc = &body;
        ck_assert_int_eq(raw_call(raw, &request, &reply), 0);
        ck_assert_int_eq((int)reply->body_case, (int)BFCD__REPLY__BODY_BLOCK);
        id = reply->block->block_id;
        bfcd__reply__free_unpacked(reply, NULL);
        return id;
}

/* The blocks in this state; *ret_id: one of them. */
static unsigned count_blocks(struct rig *rig, const char *state, uint64_t *ret_id)
{
        Bfcd__Reply *reply = NULL;
        unsigned n = 0;

        ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__BLOCKS, 0, &reply), 0);
        for (size_t i = 0; i < reply->list->n_blocks; i++) {
                if (strcmp(reply->list->blocks[i]->state, state) != 0)
                        continue;
                *ret_id = reply->list->blocks[i]->block_id;
                n++;
        }
        bfcd__reply__free_unpacked(reply, NULL);
        return n;
}

TEST(invalid_requests_are_refused)
{
        struct rig *rig = rig_start(&config);
        struct raw *raw, *other;
        uint64_t id, copy = 0, found = 0;
        Bfcd__Block small;

        if (!CAN_PARK) {
                rig_stop(rig);
                return;
        }
        raw = raw_connect(rig->socket, "red");
        other = raw_connect(rig->socket, "red");
        id = raw_parkable(raw, BLOCK);
        ck_assert_int_eq(raw_malloc(raw, 0, 1000, &small), 0);
        ck_assert_int_eq(raw_park(raw, small.block_id, true, 0), -EINVAL);
        ck_assert_int_eq(raw_park(raw, 12345, true, 0), -EINVAL);
        ck_assert_int_eq(raw_park(other, id, true, 0), -EINVAL);
        ck_assert_int_eq(raw_park(raw, id, false, 2), -ENOENT);
        ck_assert_int_eq(raw_park(rig->admin, id, true, 0), -EINVAL);
        ck_assert_int_eq(raw_wake(raw, 12345), -EINVAL);
        ck_assert_int_eq(raw_wake(raw, id), 0); /* it is awake */
        ck_assert_int_eq(raw_park(raw, id, false, 1), 0);
        ck_assert_int_eq(raw_park(raw, id, true, 0), 0); /* it stays as it is */
        ck_assert_uint_eq(count_blocks(rig, "parked", &found), 1);
        ck_assert_uint_eq(found, id);
        ck_assert_uint_eq(count_blocks(rig, "copy", &copy), 1);
        ck_assert_int_eq(raw_free(raw, copy), -EINVAL);
        ck_assert_int_eq(raw_park(raw, copy, true, 0), -EINVAL);
        ck_assert_int_eq(raw_wake(raw, copy), -EINVAL);
        ck_assert_int_eq(raw_publish(raw, copy, "copy"), -EINVAL);
        ck_assert_int_eq(raw_publish(raw, id, "parked"), -EINVAL);
        ck_assert_int_eq(raw_wake(other, id), -EINVAL);
        ck_assert_int_eq(raw_free(other, id), -EINVAL);
        ck_assert_int_eq(raw_wake(raw, id), 0);
        ck_assert_int_eq(raw_publish(raw, id, "awake"), 0);
        ck_assert_int_eq(raw_park(raw, id, true, 0), -EBUSY);
        ck_assert_int_eq(raw_free(raw, id), 0);
        ck_assert_int_eq(raw_free(raw, small.block_id), 0);
        raw_close(raw);
        raw_close(other);
        rig_stop(rig);
}

/* It covers a whole extent by chance, and its program asked for less. */
TEST(only_blocks_of_whole_extents_are_parked)
{
        struct rig *rig = rig_start(&config);
        struct raw *raw = raw_connect(rig->socket, "red");
        Bfcd__Block block;

        if (CAN_PARK) {
                ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB - 1, &block), 0);
                ck_assert_int_eq(raw_park(raw, block.block_id, true, 0), -EINVAL);
                ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        }
        raw_close(raw);
        rig_stop(rig);
}

/* Parked blocks use up the arena's space: they are limited. */
TEST(parked_bytes_are_limited)
{
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, "red", "train");
        void *p[4];

        for (unsigned i = 0; CAN_PARK && i < 4; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p[i]));
                ck_assert_int_eq(bfc_park(client, p[i], BFC_DISCARD, NULL), i < 3 ? 0 : -EDQUOT);
        }
        for (unsigned i = 0; CAN_PARK && i < 4; i++)
                ck_assert_ok(bfc_free(client, p[i]));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- restarts --------------------------------------------------------------------------- */

TEST(parked_blocks_survive_the_daemon)
{
        static const int signals[] = { SIGTERM, SIGKILL };

        for (unsigned i = 0; CAN_PARK && i < 2; i++) {
                struct kept *k = kept_start(&roomy);
                bfc_client *client = client_open(k->rig, "red", "train");
                void *p, *lost;

                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &lost));
                pattern_write(p, BLOCK, 7);
                park(client, p);
                ck_assert_ok(bfc_park(client, lost, BFC_DISCARD, NULL));
                kept_restart(k, signals[i]);
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 7));
                ck_assert_uint_eq(in_use(k->rig, "parking"), 0);
                ck_assert_ok(bfc_free(client, lost));
                park(client, p);
                kept_restart(k, signals[i]);
                ck_assert_ok(bfc_free(client, p));
                ck_assert_uint_eq(in_use(k->rig, "parking"), 0);
                bfc_disconnect(client);
                kept_stop(k);
        }
}

/* ---- a storm ------------------------------------------------------------------------------ */

#define STORM_JOBS   6u
#define STORM_BLOCKS 3u
#define STORM_STEPS  200u

/* In memory that jobs share with the test. */
struct storm {
        char socket[96];
        uint64_t n_steps;
        uint64_t seeds[STORM_JOBS];
        _Atomic uint64_t n_parked, n_woken;
};

struct storm_block {
        void *ptr;
        uint64_t n_bytes, seed;
        bool is_parked, is_zero;
};

/* Refusals for lack of room are no failure. */
static bool was_done(int r)
{
        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM || r == -EBUSY, "%d (%s)", r, bfc_last_error());
        return r == 0;
}

static void storm_check(const struct storm_block *b)
{
        REQUIRE(b->is_zero ? all_bytes_are(b->ptr, b->n_bytes, 0)
                           : pattern_holds(b->ptr, b->n_bytes, b->seed),
                "a block has other contents");
}

static void storm_step(struct storm *storm, bfc_client *client, struct storm_block *b, uint64_t *random)
{
        uint64_t choice = random_next(random) % 8;

        if (!b->ptr) {
                *b = (struct storm_block){ .n_bytes = (1 + random_next(random) % 4) * MIB,
                                           .seed = random_next(random) };
                if (was_done(bfc_malloc_flags(client, NULL, b->n_bytes, BFC_PARKABLE, &b->ptr)))
                        pattern_write(b->ptr, b->n_bytes, b->seed);
                else
                        b->ptr = NULL;
        } else if (choice == 0) {
                REQUIRE(bfc_free(client, b->ptr) == 0, "%s", bfc_last_error());
                b->ptr = NULL;
        } else if (b->is_parked) {
                if (!was_done(bfc_wake(client, b->ptr, choice < 4 ? 1000 : 0)))
                        return;
                b->is_parked = false;
                storm->n_woken++;
                storm_check(b);
        } else {
                bool discard = choice == 1;

                storm_check(b);
                if (!was_done(bfc_park(client, b->ptr, discard ? BFC_DISCARD : BFC_BACKUP, "parking")))
                        return;
                b->is_parked = true;
                b->is_zero = b->is_zero || discard;
                storm->n_parked++;
        }
}

static struct storm *the_storm;

static void storm_run(void *arg)
{
        struct storm_block blocks[STORM_BLOCKS] = { 0 };
        uint64_t random = *(const uint64_t *)arg;
        bfc_client *client = child_client_open(the_storm->socket, "red");

        for (uint64_t i = 0; i < the_storm->n_steps; i++)
                storm_step(the_storm, client, &blocks[random_next(&random) % STORM_BLOCKS], &random);
        bfc_disconnect(client);
}

/* Jobs park and wake, some are killed, and the daemon is killed again and again. */
TEST(a_storm_of_kills_damages_nothing)
{
        const char *text = getenv("BFC_TEST_STEPS");
        uint64_t random = 20;
        pid_t jobs[STORM_JOBS];
        struct kept *k;

        if (!CAN_PARK)
                return;
        k = kept_start(&roomy);
        the_storm = shared_memory(sizeof(*the_storm));
        snprintf(the_storm->socket, sizeof(the_storm->socket), "%s", k->rig->socket);
        the_storm->n_steps = text ? strtoull(text, NULL, 10) / 200 : STORM_STEPS;
        for (unsigned i = 0; i < STORM_JOBS; i++) {
                the_storm->seeds[i] = random_next(&random);
                jobs[i] = child_start(storm_run, &the_storm->seeds[i]);
        }
        for (unsigned i = 0; i < 4; i++) {
                usleep((useconds_t)(random_next(&random) % 300000));
                kept_restart(k, i % 2 ? SIGKILL : SIGTERM);
        }
        for (unsigned i = 0; i < STORM_JOBS / 2; i++) {
                usleep((useconds_t)(random_next(&random) % 100000));
                kill(jobs[i], SIGKILL);
                ck_assert_int_eq(waitpid(jobs[i], NULL, 0), jobs[i]);
        }
        for (unsigned i = STORM_JOBS / 2; i < STORM_JOBS; i++)
                child_join(jobs[i]);
        ck_assert_uint_gt(the_storm->n_parked, 0);
        ck_assert_uint_gt(the_storm->n_woken, 0);
        kept_stop(k);
}
