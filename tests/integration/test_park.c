/* Blocks that are parked and woken: contents, addresses and charges; refusals, waits and hostile requests;
 * clients and daemons that are killed at any moment.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "tests/gpu/driver.h"
#include "tests/integration/json.h"
#include "tests/integration/kept.h"
#include "tests/integration/parking.h"
#include "tests/integration/tools.h"
#include "tests/random.h"

static void park(bfc_client *client, void *ptr)
{
        ck_assert_ok(bfc_park(client, ptr, BFC_BACKUP, "parking"));
}

/* ---- one client ------------------------------------------------------------------ */

/* Of the block's size. */
static bool has_own_extent(bfc_client *client, const void *ptr)
{
        struct bfc_block_info info = { .struct_size = sizeof(info) };

        ck_assert_ok(bfc_block_info(client, ptr, &info));
        return info.extent_offset == 0 && info.extent_bytes == info.n_bytes;
}

static void check_fd(bfc_client *client, const void *ptr, bool has_fd)
{
        int fd;

        ck_assert_int_eq(bfc_extent_fd(client, ptr, &fd), has_fd ? 0 : -ENOTSUP);
        if (has_fd)
                close(fd);
}

/* On extents of the quota, or in one of just its size. */
LOOP_TEST(a_parked_block_returns_with_its_contents, 2)
{
        const uint64_t flags = BFC_PARKABLE | (_i == 1 ? BFC_ONE_EXTENT | BFC_SHAREABLE : 0);
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        char byte = 1;
        void *p;

        if (!CAN_PARK) {
                ck_assert_int_eq(bfc_malloc_flags(client, NULL, BLOCK, flags, &p), -ENOTSUP);
                bfc_disconnect(client);
                rig_stop(rig);
                return;
        }
        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK - 1000, flags, &p));
        ck_assert_uint_eq(in_use(rig, "train"), BLOCK);
        ck_assert_int_eq(has_own_extent(client, p), _i == 1);
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
                ck_assert_int_eq(has_own_extent(client, p), _i == 1);
                check_fd(client, p, _i == 1 && rig_device() == ON_CUDA_FD);
                ck_assert_ok(bfc_wake(client, p, 0)); /* it is awake */
        }
        ck_assert_ok(bfc_park(client, p, BFC_DISCARD, NULL));
        ck_assert_uint_eq(in_use(rig, "parking"), 0);
        ck_assert_ok(bfc_wake(client, p, 0));
        ck_assert(all_bytes_are(p, BLOCK, 0));
        ck_assert_ok(bfc_park(client, p, BFC_DISCARD, NULL));
        ck_assert_ok(bfc_free(client, p)); /* its address is free, too */
        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, flags, &p));
        ck_assert_ok(bfc_free(client, p));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* What has no extent of its own cannot be parked alone. */
TEST(a_small_block_in_one_extent_is_not_parkable)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        void *p;

        ck_assert_int_eq(bfc_malloc_flags(client, NULL, MIB, BFC_PARKABLE | BFC_ONE_EXTENT, &p), -ENOTSUP);
        if (CAN_PARK)
                ck_assert_ptr_nonnull(strstr(bfc_last_error(), "no extent of its own"));
        ck_assert_uint_eq(reserved(rig, "train"), 0);
        bfc_disconnect(client);
        rig_stop(rig);
}

static void malloc_and_free(bfc_client *client, size_t n_bytes)
{
        void *p;

        ck_assert_ok(bfc_malloc_flags(client, "parking", n_bytes, BFC_WHOLE, &p));
        ck_assert_ok(bfc_free(client, p));
}

/* A copy gets no free memory of extents that a client has: the client could delay the copy. */
TEST(a_copy_has_extents_of_its_own)
{
        struct rig *rig = rig_start(roomy_config());
        bfc_client *client = client_open(rig, "red", "train");
        uint64_t n_reserved;
        void *p, *beside;

        if (CAN_PARK) {
                ck_assert_ok(bfc_malloc_flags(client, "parking", 1000, BFC_WHOLE, &beside));
                pattern_write(beside, 1000, 1);
                malloc_and_free(client, 60 * MIB); /* less than that is kept */
                ck_assert_ok(bfc_trim(client, SIZE_MAX));
                malloc_and_free(client, BLOCK + MIB);
                n_reserved = reserved(rig, "parking");
                ck_assert_uint_ge(n_reserved, BLOCK);
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p));
                pattern_write(p, BLOCK, 2);
                park(client, p);
                ck_assert_uint_eq(reserved(rig, "parking"), n_reserved + BLOCK);
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 2));
                ck_assert(pattern_holds(beside, 1000, 1));
                ck_assert_ok(bfc_free(client, beside));
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* The blocks in the partition for copies for which extents were made. */
static json_int_t n_grown(struct rig *rig)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "grants")), *row;
        json_int_t n = 0;
        size_t i;

        json_array_foreach(rows, i, row)
        {
                if (strcmp(string_of(row, "partition"), "parking") == 0 &&
                    strcmp(string_of(row, "served"), "backed") != 0)
                        n += number_of(row, "num_grants");
        }
        json_decref(rows);
        return n;
}

/* Memory for copies is made once, for blocks of other sessions, too. But not where a client has received it. */
TEST(copies_use_the_memory_of_earlier_ones)
{
        struct rig *rig = rig_start(roomy_config());
        bfc_client *clients[] = { client_open(rig, "red", "train"), client_open(rig, "red", "train") };
        json_int_t n = 0;
        void *p[2];

        malloc_and_free(clients[0], 60 * MIB); /* less than that is kept */
        ck_assert_ok(bfc_trim(clients[0], SIZE_MAX));
        for (unsigned i = 0; CAN_PARK && i < 2; i++) {
                ck_assert_ok(bfc_malloc_flags(clients[i], NULL, BLOCK, BFC_PARKABLE, &p[i]));
                pattern_write(p[i], BLOCK, i);
        }
        for (unsigned i = 0; CAN_PARK && i < 6; i++) {
                park(clients[i % 2], p[i % 2]);
                n = i == 0 ? n_grown(rig) : n;
                ck_assert_int_eq(n_grown(rig), n);
                ck_assert_ok(bfc_wake(clients[i % 2], p[i % 2], SETTLE_MS));
                ck_assert(pattern_holds(p[i % 2], BLOCK, i % 2));
                pattern_write(p[i % 2], BLOCK, i % 2);
        }
        if (CAN_PARK) {
                malloc_and_free(clients[0], BLOCK);
                ck_assert_uint_eq(in_use(rig, "parking"), 0);
                ck_assert_uint_eq(reserved(rig, "parking"), BLOCK);
                ck_assert_int_eq(n_grown(rig), n);
                park(clients[1], p[1]);
                ck_assert_int_eq(n_grown(rig), n + 1);
                park(clients[0], p[0]);
                ck_assert_int_eq(n_grown(rig), n + 2);
                for (unsigned i = 0; i < 2; i++) {
                        ck_assert_ok(bfc_wake(clients[i], p[i], SETTLE_MS));
                        ck_assert(pattern_holds(p[i], BLOCK, i));
                        ck_assert_ok(bfc_free(clients[i], p[i]));
                }
        }
        for (unsigned i = 0; i < 2; i++)
                bfc_disconnect(clients[i]);
        rig_stop(rig);
}

TEST(other_blocks_use_the_memory_and_not_the_place)
{
        struct rig *rig = rig_start(small_config());
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

struct wake_wait {
        bfc_client *client;
        void *ptr; /* NULL: a use of all with the tag */
        _Atomic bool is_over;
        int result;
};

static void *wait_to_wake(void *arg)
{
        struct wake_wait *w = arg;

        w->result = w->ptr ? bfc_wake(w->client, w->ptr, SETTLE_MS)
                           : bfc_use_begin_tag(w->client, "model", SETTLE_MS);
        w->is_over = true;
        return NULL;
}

static void on_signal(int number)
{
        (void)number;
}

/* Of one block, and of all with a tag: some wait, and some have no place in the daemon's queue yet. */
TEST(a_signal_ends_a_wait_to_wake)
{
        struct bfc_malloc_options how = { .struct_size = sizeof(how), .flags = BFC_PARKABLE, .tag = "model" };
        struct sigaction action = { .sa_handler = on_signal, .sa_flags = SA_RESTART };
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        void *p[3], *full;

        ck_assert_int_eq(sigaction(SIGUSR1, &action, NULL), 0);
        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                ck_assert_ok(bfc_malloc_with(client, BLOCK, &how, &p[i]));
                pattern_write(p[i], BLOCK, i);
        }
        for (unsigned i = 0; CAN_PARK && i < 3; i++)
                park(client, p[i]);
        if (CAN_PARK)
                ck_assert_ok(bfc_malloc_flags(client, NULL, 3 * BLOCK, BFC_WHOLE, &full));
        for (unsigned i = 0; CAN_PARK && i < 2; i++) {
                struct wake_wait w = { .client = client, .ptr = i == 0 ? p[0] : NULL };
                pthread_t thread;

                ck_assert_int_eq(pthread_create(&thread, NULL, wait_to_wake, &w), 0);
                ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") > 0, SETTLE_MS));
                ck_assert(WAIT_FOR(w.is_over || (pthread_kill(thread, SIGUSR1), false), SETTLE_MS));
                ck_assert_int_eq(pthread_join(thread, NULL), 0);
                ck_assert_int_eq(w.result, -EINTR);
                ck_assert_uint_eq(rig_n_waiting(rig, "red"), 0);
        }
        if (CAN_PARK)
                ck_assert_ok(bfc_free(client, full));
        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                ck_assert_ok(bfc_wake(client, p[i], SETTLE_MS));
                ck_assert(pattern_holds(p[i], BLOCK, i));
                ck_assert_ok(bfc_free(client, p[i]));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(without_room_for_the_copy_nothing_changes)
{
        struct rig *rig = rig_start(small_config());
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
        struct rig *rig = rig_start(small_config());
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
        struct rig *rig = rig_start(small_config());
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

TEST(a_parked_block_is_not_published)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        void *p, *again;

        if (CAN_PARK) {
                p = tagged(client, "one", BLOCK, 2);
                park(client, p);
                ck_assert_int_eq(bfc_publish(client, p, "more"), -EBUSY);
                ck_assert_msg(strstr(bfc_last_error(), "is parked"), "%s", bfc_last_error());
                ck_assert_int_eq(bfc_attach(client, "more", 0, &again, NULL), -ENOENT);
                ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
                ck_assert(pattern_holds(p, BLOCK, 2));
                ck_assert_ok(bfc_publish(client, p, "more"));
                ck_assert_ok(bfc_free(client, p));
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

TEST(blocks_with_a_tag_are_parked_together)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        void *a[2], *b, *full;

        if (CAN_PARK) {
                a[0] = tagged(client, "a", 4 * MIB, 1);
                a[1] = tagged(client, "a", 6 * MIB, 2);
                b = tagged(client, "b", 8 * MIB, 3);
                ck_assert_ok(bfc_wake_tag(client, "none", 0));
                ck_assert_ok(bfc_use_begin(client, a[1], 0));
                ck_assert_int_eq(bfc_park_tag(client, "a", BFC_BACKUP, "parking"), -EBUSY);
                ck_assert_ptr_nonnull(strstr(bfc_last_error(), " is in use; the other blocks were parked"));
                ck_assert_int_eq(bfc_park(client, b, BFC_BACKUP, "train"), -EINVAL); /* its own */
                ck_assert_int_eq(bfc_park_tag(client, "b", BFC_BACKUP, "train"), -EINVAL);
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
        struct rig *rig = rig_start(roomy_config());
        struct turns turns = { .client = client_open(rig, "red", "train") };
        pthread_t thread;
        char byte = 0;

        if (CAN_PARK) {
                turns.ptr = tagged(turns.client, NULL, 2 * MIB, 0);
                ck_assert_int_eq(pthread_create(&thread, NULL, park_again_and_again, &turns), 0);
                for (uint64_t i = 0; i < (suite_is_long() ? 100 : 30); i++) {
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

static void *wake_when_there_is_room(void *arg)
{
        struct turns *turns = arg;

        ck_assert_ok(bfc_wake(turns->client, turns->ptr, SETTLE_MS));
        return NULL;
}

/* Is cancelled in the call, and goes on to its end. */
static void *use_in_vain(void *arg)
{
        struct turns *turns = arg;
        int r, before;

        pthread_cancel(pthread_self());
        r = bfc_use_begin(turns->client, turns->ptr, 200);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
        ck_assert_int_eq(r, -EBUSY);
        return before == PTHREAD_CANCEL_ENABLE ? arg : NULL;
}

/* A thread that waits for another one's wake is cancelled: the client is not locked afterwards. */
TEST(a_cancelled_thread_leaves_no_lock)
{
        struct rig *rig = rig_start(small_config());
        struct turns turns = { .client = client_open(rig, "red", "train") };
        pthread_t waker, user;
        void *other, *ret;

        if (CAN_PARK) {
                turns.ptr = tagged(turns.client, NULL, BLOCK, 0);
                park(turns.client, turns.ptr);
                ck_assert_ok(bfc_malloc_flags(turns.client, NULL, 3 * BLOCK, BFC_WHOLE, &other));
                ck_assert_int_eq(pthread_create(&waker, NULL, wake_when_there_is_room, &turns), 0);
                ck_assert(WAIT_FOR(bfc_wake(turns.client, turns.ptr, 0) == -EBUSY, SETTLE_MS));
                ck_assert_int_eq(pthread_create(&user, NULL, use_in_vain, &turns), 0);
                ck_assert_int_eq(pthread_join(user, &ret), 0);
                ck_assert_ptr_eq(ret, &turns);
                ck_assert_ok(bfc_free(turns.client, other));
                ck_assert_int_eq(pthread_join(waker, NULL), 0);
                ck_assert(pattern_holds(turns.ptr, BLOCK, 0));
                ck_assert_ok(bfc_free(turns.client, turns.ptr));
        }
        bfc_disconnect(turns.client);
        rig_stop(rig);
}

static void *read_again_and_again(void *arg)
{
        struct turns *turns = arg;
        static char bytes[16 * MIB];

        while (!__atomic_load_n(&turns->is_over, __ATOMIC_RELAXED)) {
                int r = bfc_read(turns->client, bytes, turns->ptr, sizeof(bytes));

                ck_assert_msg(r == 0 || r == -EBUSY, "%d: %s", r, bfc_last_error());
        }
        return NULL;
}

/* A copy of the library uses the block, so nothing takes it away meanwhile. */
TEST(a_copy_is_a_use)
{
        struct rig *rig = rig_start(roomy_config());
        struct turns turns = { .client = client_open(rig, "red", "train") };
        pthread_t thread;

        if (CAN_PARK) {
                turns.ptr = tagged(turns.client, NULL, 16 * MIB, 0);
                ck_assert_int_eq(pthread_create(&thread, NULL, read_again_and_again, &turns), 0);
                for (unsigned n = 0;; n++) {
                        int r = bfc_park(turns.client, turns.ptr, BFC_BACKUP, "parking");

                        if (r == -EBUSY)
                                break;
                        ck_assert_ok(r);
                        ck_assert_uint_lt(n, 1000);
                        ck_assert_ok(bfc_wake(turns.client, turns.ptr, SETTLE_MS));
                        usleep(n * 10); /* at each moment of a copy */
                }
                ck_assert_ptr_nonnull(strstr(bfc_last_error(), " is in use"));
                __atomic_store_n(&turns.is_over, true, __ATOMIC_RELAXED);
                ck_assert_int_eq(pthread_join(thread, NULL), 0);
                ck_assert_ok(bfc_free(turns.client, turns.ptr));
        }
        bfc_disconnect(turns.client);
        rig_stop(rig);
}

struct other_thread {
        bfc_client *client;
        void *ptr;
        pthread_t thread;
        int result;
        bool is_mapped, is_over;
};

static void start_thread(struct other_thread *t, void *(*function)(void *))
{
        ck_assert_int_eq(pthread_create(&t->thread, NULL, function, t), 0);
}

static void *wake_it(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_wake(t->client, t->ptr, SETTLE_MS);
        return NULL;
}

static void *wake_a_tag(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_wake_tag(t->client, "a", SETTLE_MS);
        t->is_mapped = page_is_mapped(t->ptr);
        __atomic_store_n(&t->is_over, true, __ATOMIC_RELEASE);
        return NULL;
}

/* While the call for the tag waits for one of the blocks, another thread begins to wake the other one. */
TEST(a_tag_is_awake_when_all_of_it_is)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        struct other_thread first = { .client = client }, second = first, tag = first;
        void *fillers[2];

        if (CAN_PARK) {
                second.ptr = tag.ptr = tagged(client, "a", 12 * MIB, 1);
                first.ptr = tagged(client, "a", 10 * MIB, 2);
                ck_assert_ok(bfc_park(client, second.ptr, BFC_BACKUP, "parking"));
                ck_assert_ok(bfc_park(client, first.ptr, BFC_BACKUP, "parking"));
                ck_assert(WAIT_FOR(reserved(rig, "train") == 0, SETTLE_MS));
                for (unsigned i = 0; i < 2; i++)
                        ck_assert_ok(bfc_malloc_flags(client, NULL, i == 0 ? 10 * MIB : 20 * MIB, BFC_WHOLE,
                                                      &fillers[i]));
                start_thread(&first, wake_it);
                ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 1, SETTLE_MS));
                start_thread(&tag, wake_a_tag);
                usleep(100000); /* usually it waits by then */
                start_thread(&second, wake_it);
                ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 2, SETTLE_MS));
                ck_assert_ok(bfc_free(client, fillers[0])); /* room for the first */
                pthread_join(first.thread, NULL);
                ck_assert_int_eq(first.result, 0);
                (void)WAIT_FOR(__atomic_load_n(&tag.is_over, __ATOMIC_ACQUIRE), 200); /* if it is too early */
                ck_assert_ok(bfc_free(client, fillers[1]));
                pthread_join(second.thread, NULL);
                pthread_join(tag.thread, NULL);
                ck_assert_int_eq(second.result, 0);
                ck_assert_int_eq(tag.result, 0);
                ck_assert(tag.is_mapped);
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* A copy stops at a page that may not be written, until the test lets it go on. */
static struct gate copy_stands, copy_goes_on;
static char *copy_page;

static void on_fault(int signal, siginfo_t *info, void *context)
{
        (void)context;
        if ((char *)info->si_addr < copy_page || (char *)info->si_addr >= copy_page + 4096)
                _exit(128 + signal);
        gate_open(&copy_stands);
        (void)gate_wait(&copy_goes_on, SETTLE_MS);
        (void)mprotect(copy_page, 4096, PROT_READ | PROT_WRITE);
}

static void *read_it(void *arg)
{
        struct other_thread *t = arg;

        t->result = bfc_read(t->client, copy_page, t->ptr, 4096);
        return NULL;
}

/* Only the copy itself ends its use. */
TEST(the_use_of_a_copy_is_its_own)
{
        const struct sigaction action = { .sa_sigaction = on_fault, .sa_flags = SA_SIGINFO };
        struct rig *rig = rig_start(small_config());
        struct other_thread t = { .client = client_open(rig, "red", "train") };

        if (rig_device() == ON_HOST) {
                t.ptr = tagged(t.client, "a", BLOCK, 1);
                copy_stands = gate_new();
                copy_goes_on = gate_new();
                copy_page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                ck_assert_ptr_ne(copy_page, MAP_FAILED);
                ck_assert_int_eq(sigaction(SIGSEGV, &action, NULL), 0);
                start_thread(&t, read_it);
                ck_assert(gate_wait(&copy_stands, SETTLE_MS));
                ck_assert_int_eq(bfc_use_end(t.client, t.ptr), -EINVAL);
                ck_assert_ok(bfc_use_begin(t.client, t.ptr, 0));
                ck_assert_ok(bfc_use_end_tag(t.client, "a"));
                ck_assert_ok(bfc_use_end_tag(t.client, "a"));
                ck_assert_int_eq(bfc_park(t.client, t.ptr, BFC_DISCARD, NULL), -EBUSY);
                gate_open(&copy_goes_on);
                pthread_join(t.thread, NULL);
                ck_assert_int_eq(t.result, 0);
                ck_assert(pattern_holds(copy_page, 4096, 1));
                signal(SIGSEGV, SIG_DFL);
                munmap(copy_page, 4096);
                ck_assert_ok(bfc_park(t.client, t.ptr, BFC_DISCARD, NULL));
                ck_assert_ok(bfc_free(t.client, t.ptr));
        }
        bfc_disconnect(t.client);
        rig_stop(rig);
}

/* ---- hostile requests --------------------------------------------------------------- */

/* Only a session that takes events may have parkable blocks. */
TEST(invalid_requests_are_refused)
{
        struct rig *rig = rig_start(small_config());
        struct raw *raw, *other;
        uint64_t id, copy = 0, found = 0;
        Bfcd__Block small;

        if (!CAN_PARK) {
                rig_stop(rig);
                return;
        }
        raw = raw_with_events(rig);
        other = raw_with_events(rig);
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
        raw_unmap(raw);
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
        ck_assert_int_eq(raw_park(raw, id, true, 0), -EINVAL);
        ck_assert_int_eq(raw_park(other, id, false, 1), -EINVAL);
        ck_assert_int_eq(raw_wake(other, id), -EINVAL);
        ck_assert_int_eq(raw_free(raw, id), 0);
        ck_assert_int_eq(raw_free(raw, small.block_id), 0);
        session_end(raw);
        session_end(other);
        rig_stop(rig);
}

/* Each of these ends the session. */
LOOP_TEST(invalid_wakes_are_violations, 4)
{
        struct rig *rig = rig_start(small_config());
        uint64_t ids[65];
        struct raw *raw;

        if (CAN_PARK) {
                raw = raw_with_events(rig);
                for (unsigned i = 0; i < 65; i++)
                        ids[i] = 1000 + i;
                if (_i == 0) {
                        (void)raw_send_wake(raw, ids, 0, 0);
                } else if (_i == 1) {
                        (void)raw_send_wake(raw, ids, 65, 0);
                } else if (_i == 2) {
                        ids[63] = ids[0];
                        (void)raw_send_wake(raw, ids, 64, 0);
                } else {
                        Bfcd__Request request = BFCD__REQUEST__INIT;
                        Bfcd__Wake body = BFCD__WAKE__INIT;

                        body.n_block_ids = 2;
                        body.block_ids = ids;
                        request.id = UINT64_MAX - 1;
                        request.body_case = BFCD__REQUEST__BODY_WAKE;
                        request.wake = &body;
                        ck_assert_int_eq(raw_send(raw, &request), 0);
                }
                ck_assert_int_eq(raw_wait_hang_up(raw, SETTLE_MS), 0);
                raw_close(raw);
        }
        rig_stop(rig);
}

/* The request of many blocks has an answer for each. */
TEST(each_block_of_a_wake_is_answered)
{
        struct rig *rig = rig_start(small_config());
        uint64_t ids[4], id, copy = 0;
        struct raw *raw, *other;

        if (CAN_PARK) {
                raw = raw_with_events(rig);
                other = raw_with_events(rig);
                ids[0] = raw_parkable(raw, 2 * MIB);
                ids[1] = raw_parkable(other, 2 * MIB); /* foreign */
                ids[2] = 12345;
                ids[3] = raw_parkable(raw, 2 * MIB);
                ck_assert_int_eq(raw_park(raw, ids[0], false, 1), 0);
                raw_unmap(raw);
                ck_assert_uint_eq(count_blocks(rig, "copy", &copy), 1);
                id = raw_send_wake(raw, ids, 4, SETTLE_MS);
                ck_assert_int_eq(raw_wake_answer(raw, id + 1, 0), -EINVAL);
                ck_assert_int_eq(raw_wake_answer(raw, id + 2, 0), -EINVAL);
                ck_assert_int_eq(raw_wake_answer(raw, id + 3, ids[3]), 0); /* it is awake */
                ck_assert_int_eq(raw_wake_answer(raw, id, ids[0]), 0);
                ck_assert_uint_eq(count_blocks(rig, "copy", &copy), 0);
                session_end(raw);
                session_end(other);
        }
        rig_stop(rig);
}

/* Requests that follow each other closely, about one block. */
TEST(a_block_that_is_parked_is_left_alone)
{
        struct rig *rig = rig_start(small_config());
        struct raw *raw;
        uint64_t id, park_id;

        if (CAN_PARK) {
                Bfcd__Reply *reply = NULL;
                unsigned n_done = 0;

                raw = raw_with_events(rig);
                id = raw_parkable(raw, BLOCK);
                park_id = raw_send_park(raw, id, 0);
                (void)session_send_free(raw, id);
                (void)raw_send_wake(raw, &id, 1, SETTLE_MS);
                for (unsigned i = 0; i < 3;
                     i++) { /* the free or the wake may come after the end of the park */
                        ck_assert_int_eq(raw_receive(raw, SETTLE_MS, &reply), 0);
                        ck_assert(reply->id != park_id || reply->body_case == BFCD__REPLY__BODY_DONE);
                        n_done += reply->body_case == BFCD__REPLY__BODY_DONE;
                        if (reply->id == park_id)
                                raw_unmap(raw);
                        bfcd__reply__free_unpacked(reply, NULL);
                }
                ck_assert_uint_ge(n_done, 1);
                session_end(raw);
        }
        rig_stop(rig);
}

/* The client has not unmapped yet what the block was parked from. Others do not wait for that. */
TEST(a_wake_waits_until_its_place_is_empty)
{
        struct rig *rig = rig_start(roomy_config());
        bfc_client *client;
        struct raw *raw;
        uint64_t id, wake_id;
        void *p;

        if (CAN_PARK) {
                raw = raw_with_events(rig);
                client = client_open(rig, "red", "train");
                id = raw_parkable(raw, BLOCK);
                ck_assert_int_eq(raw_park(raw, id, false, 1), 0);
                ck_assert_int_eq(raw_wake(raw, id), -EBUSY);
                wake_id = raw_send_wake(raw, &id, 1, SETTLE_MS);
                ck_assert(WAIT_FOR(rig_n_waiting(rig, "red") == 1, SETTLE_MS));
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_WHOLE, &p));
                ck_assert_uint_eq(rig_n_waiting(rig, "red"), 1);
                raw_unmap(raw);
                ck_assert_int_eq(raw_wake_answer(raw, wake_id, id), 0);
                bfc_disconnect(client);
                session_end(raw);
        }
        rig_stop(rig);
}

/* It covers a whole extent by chance, and its program asked for less. */
TEST(only_blocks_of_whole_extents_are_parked)
{
        struct rig *rig = rig_start(small_config());
        struct raw *raw = raw_with_events(rig);
        Bfcd__Block block;

        if (CAN_PARK) {
                ck_assert_int_eq(raw_malloc(raw, 0, 2 * MIB - 1, &block), 0);
                ck_assert_int_eq(raw_park(raw, block.block_id, true, 0), -EINVAL);
                ck_assert_int_eq(raw_free(raw, block.block_id), 0);
        }
        session_end(raw);
        rig_stop(rig);
}

/* The first is refused at once, and the others wake. */
TEST(a_group_beyond_the_limit_does_not_wait)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");

        for (unsigned i = 0; CAN_PARK && i < 3; i++) {
                (void)tagged(client, "a", 12 * MIB, i);
                ck_assert_ok(bfc_park_tag(client, "a", BFC_DISCARD, NULL));
        }
        if (CAN_PARK) {
                ck_assert_int_eq(bfc_wake_tag(client, "a", 600000), -EDQUOT);
                ck_assert_uint_eq(in_use(rig, "train"), 24 * MIB);
        }
        bfc_disconnect(client);
        rig_stop(rig);
}

/* Parked blocks use up the arena's space: they are limited. */
TEST(parked_bytes_are_limited)
{
        struct rig *rig = rig_start(small_config());
        bfc_client *client = client_open(rig, "red", "train");
        const unsigned n = 4 * 32 * MIB / BLOCK; /* four times the limit */
        bfc_client *of_lease;
        char pid[16];
        void *p[20], *other;

        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        free(ctl_text(rig, WORDS("lease", "create", "one", "--tenant", "red", "--partition", "train",
                                 "--limit", "32MiB", "--pid", pid, "--evict")));
        of_lease = client_open(rig, "red", "train");
        for (unsigned i = 0; CAN_PARK && i <= n; i++) {
                ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, BFC_PARKABLE, &p[i]));
                ck_assert_int_eq(bfc_park(client, p[i], BFC_DISCARD, NULL), i < n ? 0 : -EDQUOT);
                if (i < n) /* of the tenant with its leases */
                        continue;
                ck_assert_ok(bfc_malloc_flags(of_lease, NULL, BLOCK, BFC_PARKABLE, &other));
                ck_assert_int_eq(bfc_park(of_lease, other, BFC_DISCARD, NULL), -EDQUOT);
                ck_assert_ok(bfc_free(of_lease, other));
        }
        bfc_disconnect(of_lease);
        free(ctl_text(rig, WORDS("lease", "end", "one")));
        for (unsigned i = 0; CAN_PARK && i <= n; i++)
                ck_assert_ok(bfc_free(client, p[i]));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- restarts --------------------------------------------------------------------------- */

LOOP_TEST(parked_blocks_survive_the_daemon, 4)
{
        const int signal = _i % 2 == 0 ? SIGTERM : SIGKILL;
        const uint64_t flags = BFC_PARKABLE | (_i >= 2 ? BFC_ONE_EXTENT : 0);
        bfc_client *client;
        struct kept *k;
        void *p, *lost;

        if (!CAN_PARK)
                return;
        k = kept_start(roomy_config());
        client = client_open(k->rig, "red", "train");
        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, flags, &p));
        ck_assert_ok(bfc_malloc_flags(client, NULL, BLOCK, flags, &lost));
        pattern_write(p, BLOCK, 7);
        park(client, p);
        ck_assert_ok(bfc_park(client, lost, BFC_DISCARD, NULL));
        kept_restart(k, signal);
        ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
        ck_assert(pattern_holds(p, BLOCK, 7));
        ck_assert_uint_eq(in_use(k->rig, "parking"), 0);
        ck_assert_ok(bfc_free(client, lost));
        kept_restart(k, signal); /* awake, on other memory */
        ck_assert(pattern_holds(p, BLOCK, 7));
        park(client, p);
        ck_assert_ok(bfc_wake(client, p, SETTLE_MS));
        ck_assert(pattern_holds(p, BLOCK, 7));
        park(client, p);
        kept_restart(k, signal);
        ck_assert_ok(bfc_free(client, p));
        ck_assert_uint_eq(in_use(k->rig, "parking"), 0);
        bfc_disconnect(client);
        kept_stop(k);
}

/* ---- groups --------------------------------------------------------------------------------- */

#define GROUP_BLOCKS 12u
#define GROUP_ROUNDS (suite_is_long() ? 6u : 3u)

static struct group {
        char socket[96];
        const char *tenants[2];
        _Atomic unsigned n_inside;
        struct gate up[2], go;
} * the_group;

/* All of its blocks, or none. */
static void take_turns(void *arg)
{
        unsigned number = (unsigned)(uintptr_t)arg;
        bfc_client *client = child_client_open(the_group->socket, the_group->tenants[number]);
        const struct bfc_malloc_options options = { .struct_size = sizeof(options),
                                                    .flags = BFC_PARKABLE,
                                                    .tag = "model" };
        void *p[GROUP_BLOCKS];

        for (unsigned i = 0; i < GROUP_BLOCKS; i++) {
                REQUIRE(bfc_malloc_with(client, 2 * MIB, &options, &p[i]) == 0, "%s", bfc_last_error());
                pattern_write(p[i], 2 * MIB, number * 100 + i);
                REQUIRE(bfc_park(client, p[i], BFC_BACKUP, "parking") == 0, "%s", bfc_last_error());
        }
        gate_meet(&the_group->up[number], &the_group->go);
        for (unsigned round = 0; round < GROUP_ROUNDS; round++) {
                REQUIRE(bfc_use_begin_tag(client, "model", SETTLE_MS) == 0, "%s", bfc_last_error());
                REQUIRE(the_group->n_inside++ == 0, "two groups of blocks are awake");
                for (unsigned i = 0; i < GROUP_BLOCKS; i++)
                        REQUIRE(pattern_holds(p[i], 2 * MIB, number * 100 + i), "other contents");
                the_group->n_inside--;
                REQUIRE(bfc_use_end_tag(client, "model") == 0, "%s", bfc_last_error());
                REQUIRE(bfc_park_tag(client, "model", BFC_BACKUP, "parking") == 0, "%s", bfc_last_error());
        }
        bfc_disconnect(client);
}

/* There is room for the blocks of one of two jobs, of one tenant or of two. */
LOOP_TEST(groups_wake_in_turns, 2)
{
        struct rig *rig = rig_start(roomy_config());
        bfc_client *client;
        pid_t jobs[2];
        void *p;

        if (!CHILDREN_CAN_PARK) {
                rig_stop(rig);
                return;
        }
        the_group = shared_memory(sizeof(*the_group));
        snprintf(the_group->socket, sizeof(the_group->socket), "%s", rig->socket);
        the_group->tenants[0] = "red";
        the_group->tenants[1] = _i == 0 ? "red" : "blue";
        for (unsigned i = 0; i < 2; i++)
                the_group->up[i] = gate_new();
        the_group->go = gate_new();
        for (unsigned i = 0; i < 2; i++)
                jobs[i] = child_start(take_turns, (void *)(uintptr_t)i);
        for (unsigned i = 0; i < 2; i++)
                ck_assert(gate_wait(&the_group->up[i], SETTLE_MS));
        client = client_open(rig, "red", "train");
        ck_assert_ok(bfc_malloc_flags(client, NULL, 36 * MIB, BFC_WHOLE, &p));
        for (unsigned i = 0; i < 2; i++)
                gate_open(&the_group->go);
        for (unsigned i = 0; i < 2; i++)
                child_join(jobs[i]);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* Killed between a Park and the answer to its Retire: the next daemon asks for the same extents. */
TEST(a_restart_waits_for_what_was_parked)
{
        struct kept *k;
        struct raw *raw;
        struct raw_held held;
        uint64_t id;

        if (!CAN_PARK)
                return;
        k = kept_start(roomy_config());
        raw = kept_raw(k, "red");
        id = raw_parkable(raw, BLOCK);
        ck_assert_int_eq(raw_park(raw, id, false, 1), 0);
        ck_assert_uint_eq(reserved(k->rig, "train"), BLOCK);
        k->rig->stuck_bytes = BLOCK;
        kept_restart(k, SIGKILL);
        k->rig->stuck_bytes = 0;
        held = kept_held(raw, &id, 1);
        raw = kept_raw_back(k, raw);
        ck_assert_int_eq(raw_held(raw, &held), 0);
        raw_held_free(&held);
        ck_assert_uint_eq(reserved(k->rig, "train"), BLOCK); /* it may have that mapped */
        raw_unmap(raw);
        ck_assert(WAIT_FOR(reserved(k->rig, "train") == 0, SETTLE_MS));
        ck_assert_int_eq(raw_wake(raw, id), 0);
        session_end(raw);
        kept_stop(k);
}

/* ---- a storm ------------------------------------------------------------------------------ */

#define STORM_JOBS    8u
#define STORM_BLOCKS  3u
#define STORM_CYCLES  150u /* of a park and a wake, in all; or a thousandth of BFC_TEST_STEPS */
#define STORM_EVENTS  12u  /* at least so many kills and looks */
#define STORM_MAX_MIB 4u

/* In memory that jobs share with the test. */
static struct storm {
        char socket[96];
        _Atomic uint64_t n_parked, n_woken, n_discarded, n_at_work;
        _Atomic bool is_over;
} * the_storm;

struct storm_block {
        void *ptr;
        uint64_t n_bytes, seed;
        bool is_parked, is_zero;
};

struct storm_job {
        bfc_client *client;
        CUstream stream; /* NULL: on the host */
        struct storm_block blocks[STORM_BLOCKS];
        uint64_t random;
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

static void write_later(void *data)
{
        const struct storm_block *b = data;

        usleep(500);
        pattern_write(b->ptr, b->n_bytes, b->seed);
}

/* New contents, by work that is still to be done when this returns. */
static void storm_put_work(struct storm_job *job, struct storm_block *b)
{
        b->seed = random_next(&job->random);
        b->is_zero = false;
        REQUIRE(cu.cuLaunchHostFunc(job->stream, write_later, b) == CUDA_SUCCESS, "no work");
        the_storm->n_at_work++;
}

static void storm_park(struct storm_job *job, struct storm_block *b, bool discard)
{
        storm_check(b);
        if (job->stream && random_next(&job->random) % 2 == 0)
                storm_put_work(job, b);
        if (!was_done(bfc_park(job->client, b->ptr, discard ? BFC_DISCARD : BFC_BACKUP, "parking"))) {
                REQUIRE(!job->stream || cu.cuStreamSynchronize(job->stream) == CUDA_SUCCESS,
                        "a stream fails");
                return;
        }
        b->is_parked = true;
        b->is_zero = b->is_zero || discard;
        the_storm->n_parked++;
        the_storm->n_discarded += discard;
}

/* Some that are larger than the quota's extents have one. */
static uint64_t storm_flags(struct storm_job *job, uint64_t n_bytes)
{
        return BFC_PARKABLE | (n_bytes > 2 * MIB && random_next(&job->random) % 2 == 0 ? BFC_ONE_EXTENT : 0);
}

static void storm_step(struct storm_job *job)
{
        struct storm_block *b = &job->blocks[random_next(&job->random) % STORM_BLOCKS];
        uint64_t choice = random_next(&job->random) % 16;

        if (!b->ptr) {
                *b = (struct storm_block){ .n_bytes = (1 + random_next(&job->random) % STORM_MAX_MIB) * MIB,
                                           .seed = random_next(&job->random) };
                if (was_done(bfc_malloc_flags(job->client, NULL, b->n_bytes, storm_flags(job, b->n_bytes),
                                              &b->ptr)))
                        pattern_write(b->ptr, b->n_bytes, b->seed);
                else
                        b->ptr = NULL;
        } else if (choice == 0) {
                REQUIRE(bfc_free(job->client, b->ptr) == 0, "%s", bfc_last_error());
                b->ptr = NULL;
        } else if (b->is_parked) {
                if (!was_done(bfc_wake(job->client, b->ptr, choice < 8 ? 1000 : 0)))
                        return;
                b->is_parked = false;
                the_storm->n_woken++;
                storm_check(b);
        } else {
                storm_park(job, b, choice == 1);
        }
}

/* A daemon that is killed leaves a hello without an answer. */
static bfc_client *storm_connect(void)
{
        const struct bfc_options options = { .struct_size = sizeof(options),
                                             .socket = the_storm->socket,
                                             .tenant = "red",
                                             .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };
        bfc_client *client = NULL;
        int r = 0;

        (void)WAIT_FOR((r = bfc_connect(&options, &client)) != -ECONNRESET, SETTLE_MS);
        REQUIRE(r == 0, "%s", bfc_last_error());
        return client;
}

static void storm_run(void *arg)
{
        struct storm_job job = { .random = (uint64_t)(uintptr_t)arg };
        CUcontext context;

        job.client = storm_connect();
        if (rig_device() != ON_HOST)
                REQUIRE(gpu_start(0, &context) == CUDA_SUCCESS &&
                                cu.cuStreamCreate(&job.stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS,
                        "no stream");
        while (!the_storm->is_over)
                storm_step(&job);
        bfc_disconnect(job.client);
}

/* The blocks in the list, and what is charged for them. */
struct storm_sums {
        uint64_t awake, copies, n_parked, n_copies;
};

static struct storm_sums storm_add(struct rig *rig)
{
        struct storm_sums sums = { 0 };
        uint64_t cursor = 0;

        do {
                Bfcd__Reply *reply = NULL;

                ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__BLOCKS, cursor, &reply), 0);
                for (size_t i = 0; i < reply->list->n_blocks; i++) {
                        const Bfcd__BlockRow *row = reply->list->blocks[i];

                        sums.n_parked += strcmp(row->state, "parked") == 0;
                        sums.n_copies += strcmp(row->state, "copy") == 0;
                        *(strcmp(row->partition, "train") == 0 ? &sums.awake : &sums.copies) +=
                                strcmp(row->state, "parked") == 0 ? 0 : row->n_bytes;
                }
                cursor = reply->list->next_cursor;
                bfcd__reply__free_unpacked(reply, NULL);
        } while (cursor != 0);
        return sums;
}

/* Copies that are being made are in use, and no blocks yet: so this becomes true when all is done. */
static bool storm_adds_up(struct rig *rig)
{
        struct storm_sums sums = storm_add(rig);

        return sums.awake == in_use(rig, "train") && sums.copies == in_use(rig, "parking") &&
               sums.n_copies <= sums.n_parked;
}

/* The jobs stand still meanwhile. */
static void storm_look(struct kept *k, const pid_t *jobs)
{
        Bfcd__Statistics stats;

        for (unsigned i = 0; i < STORM_JOBS; i++)
                child_stop(jobs[i]);
        ck_assert_msg(WAIT_FOR(storm_adds_up(k->rig), SETTLE_MS), "blocks and charges differ");
        stats = rig_stats(k->rig, "red", "train");
        ck_assert_uint_le(stats.bytes_in_use, stats.bytes_reserved);
        ck_assert_uint_le(stats.bytes_reserved, stats.bytes_limit);
        for (unsigned i = 0; i < STORM_JOBS; i++)
                ck_assert_int_eq(kill(jobs[i], SIGCONT), 0);
}

/* Jobs park and wake, with work on streams; jobs and the daemon are killed again and again. */
TEST(a_storm_of_kills_damages_nothing)
{
        const char *text = getenv("BFC_TEST_STEPS");
        uint64_t n_cycles = text ? strtoull(text, NULL, 10) / 1000 : STORM_CYCLES, random = 20, n_events = 0;
        unsigned n_killed = 0, n_restarts = 0, n_looks = 0;
        pid_t jobs[STORM_JOBS];
        struct kept *k;

        if (!CHILDREN_CAN_PARK)
                return;
        k = kept_start(roomy_config());
        the_storm = shared_memory(sizeof(*the_storm));
        snprintf(the_storm->socket, sizeof(the_storm->socket), "%s", k->rig->socket);
        for (unsigned i = 0; i < STORM_JOBS; i++)
                jobs[i] = child_start(storm_run, (void *)(uintptr_t)random_next(&random));
        for (; the_storm->n_woken < n_cycles || n_events < STORM_EVENTS; n_events++) {
                unsigned victim = (unsigned)(random_next(&random) % STORM_JOBS);

                usleep((useconds_t)(random_next(&random) % 200000));
                ck_assert_msg(n_events < 100 * (STORM_EVENTS + n_cycles), "no job gets on");
                if (n_events % 4 < 2) {
                        kill(jobs[victim], SIGKILL);
                        ck_assert_int_eq(waitpid(jobs[victim], NULL, 0), jobs[victim]);
                        jobs[victim] = child_start(storm_run, (void *)(uintptr_t)random_next(&random));
                        n_killed++;
                } else if (n_events % 4 == 2) {
                        kept_restart(k, n_events % 8 < 4 ? SIGKILL : SIGTERM);
                        n_restarts++;
                } else {
                        storm_look(k, jobs);
                        n_looks++;
                }
        }
        the_storm->is_over = true;
        for (unsigned i = 0; i < STORM_JOBS; i++)
                child_join(jobs[i]);
        fprintf(stderr,
                "%" PRIu64 " parks (%" PRIu64 " discards, %" PRIu64 " with pending work), %" PRIu64
                " wakes; %u jobs and %u daemons killed, %u looks\n",
                the_storm->n_parked, the_storm->n_discarded, the_storm->n_at_work, the_storm->n_woken,
                n_killed, n_restarts, n_looks);
        ck_assert(rig_device() == ON_HOST || the_storm->n_at_work > 0);
        kept_stop(k);
}
