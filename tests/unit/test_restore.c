/* Arenas that go on in a successor: a random life, handed over again and again, and
 * compared block by block. And what is left of one that does not fit together.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/memory/arena.h"
#include "tests/fake_device.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/checks.h"

#define E (2 * MIB) /* the grid */

enum { MAX_BLOCKS = 400, MAX_EXTENTS = 200, HAND_OVERS = 60, STEPS = 250 };

static struct fake_device device;
static struct worker *worker;
static struct ledger *ledger;
static struct account pool;
static struct account account;
static struct arena *a;
static uint32_t quota, session;
static uint64_t limit_bytes;
static enum device_share share;
static uint32_t per_zone; /* 0: all extents have E; else there are some of 1, 2 and 4 MiB */
static uint64_t state;

static void check(void)
{
        const char *why = "";

        ck_assert_msg(arena_check(a, &why) == 0, "arena_check: %s", why);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "ledger_check: %s", why);
        ck_assert_uint_eq(account.charged_bytes, device.live_bytes);
        ck_assert_uint_eq(device.n_live, arena_n_extents(a));
}

static struct arena_options options(void)
{
        static struct partition partition;

        partition = (struct partition){
                .ledger = ledger, .device = &device.device, .worker = worker, .share = share
        };
        return (struct arena_options){
                .partition = &partition,
                .quota = quota,
                .limit_bytes = limit_bytes,
                .sizes = { per_zone > 0 ? 4 * E : E, share == DEVICE_SHARE_FD ? MIB : E, per_zone },
        };
}

static void open_account(void)
{
        account_init_root(&pool, 200 * MIB);
        ck_assert_int_eq(account_init(&account, &pool, 200 * MIB, 0), 0);
}

static void setup(void)
{
        struct ledger_limits limits = {
                .n_quotas = 2, .n_sessions = 2, .n_extents = 256, .n_exports = 8, .n_blocks = MAX_BLOCKS
        };
        struct ledger_quota facts = { .tenant = "t", .partition = "p", .extent_bytes = E };
        struct arena_options o;

        share = DEVICE_SHARE_FD;
        per_zone = 0;
        fake_device_init(&device, MIB);
        limit_bytes = 41 * MIB;
        ck_assert_int_eq(worker_new_inline(&worker), 0);
        ck_assert_int_eq(ledger_new(&limits, &ledger), 0);
        ck_assert_int_eq(ledger_quota_add(ledger, &facts, &quota), 0);
        ck_assert_int_eq(ledger_quota_add(ledger, &facts, &quota), 0); /* not the first one */
        ck_assert_int_eq(ledger_session_add(ledger, &(struct ledger_session){ .tenant = "t" }, &session), 0);
        open_account();
        o = options();
        ck_assert_int_eq(arena_new(&o, &a), 0);
        check();
}

static void teardown(void)
{
        a = arena_free(a);
        ck_assert_uint_eq(account.charged_bytes, 0);
        account_deinit(&account);
        ck_assert_uint_eq(device.n_live, 0);
        for (uint32_t i = 0; i < ledger_region_end(ledger); i++)
                ck_assert_ptr_null(ledger_region_get(ledger, i));
        ledger = ledger_free(ledger);
        worker = worker_free(worker);
}

FIXTURE(restore, setup, teardown);

/* Another arena in the place of the one that setup() made. */
static void open_zoned(uint32_t n)
{
        struct arena_options o;

        a = arena_free(a);
        per_zone = n;
        o = options();
        ck_assert_int_eq(arena_new(&o, &a), 0);
}

/* Devices with extents that are shared by handles, which a keeper has. */
static void open_handles(void)
{
        share = DEVICE_SHARE_CUDA_IPC;
        fake_device_keep(&device);
        open_zoned(0);
}

/* ---- a life ------------------------------------------------------------------- */

static void write_down(uint64_t n_bytes, bfc_handle handle, uint64_t offset)
{
        struct ledger_block b = { .offset = offset,
                                  .n_bytes = bfc_block_bytes(n_bytes),
                                  .n_requested = n_bytes,
                                  .session = session,
                                  .quota = quota,
                                  .handle = handle };
        uint32_t index;

        ck_assert_int_eq(ledger_block_add(ledger, &b, &index), 0);
}

static void on_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        ck_assert_int_eq(result, 0);
        write_down(*(uint64_t *)userdata, handle, offset);
}

static void on_released(void *userdata, uint64_t n_bytes)
{
        (void)userdata;
        (void)n_bytes;
}

static void add_block_in(bool in_extent, uint64_t n_bytes)
{
        struct bfc_growth plan;
        struct charge charge;
        bfc_handle handle;
        uint64_t offset, missing;
        int r = in_extent ? arena_alloc_in_extent(a, n_bytes, &handle, &offset)
                          : arena_alloc(a, n_bytes, &handle, &offset);

        if (r == 0) {
                write_down(n_bytes, handle, offset);
                return;
        }
        ck_assert_int_eq(r, BFC_NO_FIT);
        if ((in_extent ? arena_plan_in_extent(a, n_bytes, account_room(&account), &plan)
                       : arena_plan(a, n_bytes, account_room(&account), &plan)) != 0 ||
            account.charged_bytes + plan.new_bytes > limit_bytes) {
                (void)arena_plan(a, 0, 0, &plan); /* the space that was added for the plan goes */
                return;
        }
        if (plan.is_whole)
                n_bytes = plan.n_bytes;
        ck_assert_int_eq(charge_take(&account, plan.new_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_grow(a, &plan, &charge, on_grown, &n_bytes), 0);
        ck_assert_uint_eq(worker_poll(worker), 1);
}

static void add_block(uint64_t n_bytes)
{
        add_block_in(false, n_bytes);
}

static uint32_t pick_block(void)
{
        uint32_t end = ledger_block_end(ledger), from = end > 0 ? (uint32_t)(random_next(&state) % end) : 0;

        for (uint32_t n = 0; n < end; n++)
                if (ledger_block_get(ledger, (from + n) % end))
                        return (from + n) % end;
        return LEDGER_NONE;
}

static void change_limit(void)
{
        uint64_t to = (16 + random_next(&state) % 60) * MIB;

        if (arena_prepare_limit(a, to) == 0) {
                arena_set_limit(a, to);
                limit_bytes = to;
        }
}

static void step(void)
{
        uint64_t what = random_next(&state) % 100;
        struct ledger_counts counts;
        uint32_t block;

        ledger_count(ledger, &counts);
        if (what < 52 && counts.n_blocks < MAX_BLOCKS) {
                add_block_in(what < 10, 1 + random_next(&state) % (UINT64_C(1) << random_next(&state) % 23));
        } else if (what < 96) {
                block = pick_block();
                if (block == LEDGER_NONE)
                        return;
                ck_assert_int_eq(arena_dealloc(a, ledger_block_at(ledger, block)->handle), 0);
                ledger_block_clear(ledger, block);
                if (what < 90)
                        arena_release_exact(a, on_released, NULL);
                worker_poll(worker);
        } else if (what < 98) {
                arena_release(a, E * (random_next(&state) % 6), NULL, on_released, NULL);
                worker_poll(worker);
        } else {
                change_limit();
        }
}

/* ---- handing over ----------------------------------------------------------------- */

struct left { /* what there is for a successor, sorted */
        uint32_t extents[MAX_EXTENTS], blocks[MAX_BLOCKS];
        int fds[MAX_EXTENTS];
        struct arena_inherited inherited;
        uint64_t n_bytes;
};

static int by_extent(const void *x, const void *y)
{
        const struct ledger_extent *p = ledger_extent_get(ledger, *(const uint32_t *)x);
        const struct ledger_extent *q = ledger_extent_get(ledger, *(const uint32_t *)y);

        return p->offset < q->offset ? -1 : p->offset > q->offset;
}

static int by_block(const void *x, const void *y)
{
        const struct ledger_block *p = ledger_block_get(ledger, *(const uint32_t *)x);
        const struct ledger_block *q = ledger_block_get(ledger, *(const uint32_t *)y);

        return p->offset < q->offset ? -1 : p->offset > q->offset;
}

static void collect(struct left *left)
{
        size_t n_extents = 0, n_blocks = 0, last;

        left->n_bytes = 0;
        for (uint32_t i = 0; i < ledger_extent_end(ledger); i++)
                if (ledger_extent_get(ledger, i))
                        left->extents[n_extents++] = i;
        for (uint32_t i = 0; i < ledger_block_end(ledger); i++)
                if (ledger_block_get(ledger, i))
                        left->blocks[n_blocks++] = i;
        qsort(left->extents, n_extents, sizeof(left->extents[0]), by_extent);
        qsort(left->blocks, n_blocks, sizeof(left->blocks[0]), by_block);
        for (size_t i = 0; i < n_extents; i++) { /* the store has duplicates */
                const struct ledger_extent *e = ledger_extent_at(ledger, left->extents[i]);
                size_t slot = arena_slots(a, e->offset, e->n_bytes, &last);

                left->fds[i] = -1;
                if (share == DEVICE_SHARE_FD) {
                        left->fds[i] = fcntl(arena_slot_memory(a, slot)->fd, F_DUPFD_CLOEXEC, 0);
                        ck_assert_int_ge(left->fds[i], 0);
                }
                left->n_bytes += e->n_bytes;
        }
        left->inherited =
                (struct arena_inherited){ left->extents, left->fds, n_extents, left->blocks, n_blocks };
}

/* The process is no more; its ledger is opened, its account is new. */
static void end_of_process(void)
{
        int fd = fcntl(ledger_fd(ledger), F_DUPFD_CLOEXEC, 0);

        a = arena_leave(a);
        ck_assert_uint_eq(account.charged_bytes, 0);
        account_deinit(&account);
        device.n_live = 0;
        device.live_bytes = 0;
        ledger_free(ledger);
        ck_assert_int_eq(ledger_open(fd, NULL, NULL, &ledger), 0);
        open_account();
}

static int restore(struct left *left, struct charge *charge, const char **ret_why)
{
        struct arena_options o = options();

        *ret_why = "";
        return arena_restore(&o, &left->inherited, charge, &a, ret_why);
}

static void restore_well(struct left *left)
{
        struct charge charge = { 0 };
        uint64_t missing;
        const char *why;
        int r;

        ck_assert_int_eq(charge_take(&account, left->n_bytes, &charge, &missing), 0);
        r = restore(left, &charge, &why);
        ck_assert_msg(r == 0, "arena_restore: %d: %s", r, why);
        ck_assert_ptr_null(charge.account);
        check();
}

struct seen { /* of the arena, by user */
        struct arena_place places[MAX_BLOCKS];
        char picture[PICTURE_CHARACTERS + 1];
        struct bfc_stats stats;
        uint32_t n_extents;
        uint64_t releasable;
        uint64_t huge_bytes, small_bytes;
};

static void look(const struct left *left, struct seen *ret)
{
        memset(ret, 0, sizeof(*ret));
        for (size_t i = 0; i < left->inherited.n_blocks; i++)
                arena_locate(a, ledger_block_at(ledger, left->blocks[i])->offset, &ret->places[i]);
        arena_draw(a, ret->picture);
        arena_read_stats(a, &ret->stats);
        ret->n_extents = arena_n_extents(a);
        ret->releasable = arena_releasable(a, NULL);
        ret->huge_bytes = arena_huge_bytes(a);
        ret->small_bytes = arena_small_bytes(a);
}

static void compare(const struct left *left, const struct seen *x, const struct seen *y)
{
        ck_assert_int_eq(memcmp(x->places, y->places, left->inherited.n_blocks * sizeof(x->places[0])), 0);
        ck_assert_str_eq(x->picture, y->picture);
        ck_assert_uint_eq(x->stats.bytes_in_use, y->stats.bytes_in_use);
        ck_assert_uint_eq(x->stats.bytes_requested, y->stats.bytes_requested);
        ck_assert_uint_eq(x->stats.bytes_reserved, y->stats.bytes_reserved);
        ck_assert_uint_eq(x->stats.bytes_free, y->stats.bytes_free);
        ck_assert_uint_eq(x->stats.num_blocks, y->stats.num_blocks);
        ck_assert_uint_eq(x->stats.num_chunks, y->stats.num_chunks);
        ck_assert_uint_eq(x->stats.num_free_chunks, y->stats.num_free_chunks);
        ck_assert_uint_eq(x->stats.largest_free_block_bytes, y->stats.largest_free_block_bytes);
        ck_assert_uint_eq(x->n_extents, y->n_extents);
        ck_assert_uint_eq(x->releasable, y->releasable);
        ck_assert_uint_eq(x->huge_bytes, y->huge_bytes);
        ck_assert_uint_eq(x->small_bytes, y->small_bytes);
}

LOOP_TEST(restored_arena_against_the_original, 8)
{
        static struct seen before, after;
        static struct left left;
        uint64_t n_blocks = 0, n_extents = 0;
        int n_huge = 0;

        state = 31 + (uint64_t)_i;
        if (_i >= 6)
                open_handles();
        else if (_i >= 4)
                open_zoned(_i == 4 ? 2 : 5);
        for (int n = 0; n < HAND_OVERS; n++) {
                for (int i = 0; i < STEPS; i++) {
                        device.is_huge = i % 2;
                        step();
                }
                check();
                ck_assert_uint_eq(arena_huge_bytes(a) + arena_small_bytes(a), device.live_bytes);
                n_huge += arena_huge_bytes(a) > 0;
                collect(&left);
                look(&left, &before);
                end_of_process();
                restore_well(&left);
                look(&left, &after);
                compare(&left, &before, &after);
                n_blocks += left.inherited.n_blocks;
                n_extents += left.inherited.n_extents;
        }
        ck_assert_uint_gt(n_blocks, HAND_OVERS * 10);
        ck_assert_uint_gt(n_extents, HAND_OVERS * (_i < 6 ? 5 : 1)); /* of 32 MiB */
        ck_assert(n_huge > 0 || _i >= 6);                            /* few extents */
        for (uint32_t block; (block = pick_block()) != LEDGER_NONE;) {
                ck_assert_int_eq(arena_dealloc(a, ledger_block_at(ledger, block)->handle), 0);
                ledger_block_clear(ledger, block);
        }
        arena_release(a, UINT64_MAX, NULL, on_released, NULL);
        worker_drain(worker);
        ck_assert_uint_eq(arena_n_extents(a), 0); /* all of it can be given back */
        ck_assert_uint_eq(arena_huge_bytes(a) + arena_small_bytes(a), 0);
        check();
}

/* The limit was raised and a further region added; its number and its place stay. */
TEST(test_second_region)
{
        struct arena_place before, after;
        static struct left left;

        add_block(10 * MIB);
        ck_assert_int_eq(arena_prepare_limit(a, 180 * MIB), 0);
        arena_set_limit(a, 180 * MIB);
        limit_bytes = 180 * MIB;
        add_block(100 * MIB); /* the first region has 82 MiB */
        collect(&left);
        ck_assert_uint_eq(left.inherited.n_blocks, 2);
        arena_locate(a, ledger_block_at(ledger, left.blocks[1])->offset, &before);
        ck_assert_uint_eq((uint32_t)before.region_id, 1);
        end_of_process();
        limit_bytes = 20 * MIB; /* less than there is */
        restore_well(&left);
        arena_locate(a, ledger_block_at(ledger, left.blocks[1])->offset, &after);
        ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
}

/* One that was freed, and whose extent was not released yet, is released by the next process. */
TEST(test_exact_blocks)
{
        struct arena_place before, after;
        static struct left left;
        uint32_t block;

        limit_bytes = 100 * MIB;
        arena_set_limit(a, limit_bytes);
        add_block(MIB);
        add_block_in(true, 20 * MIB);
        add_block_in(true, 22 * MIB);
        collect(&left);
        ck_assert_uint_eq(left.inherited.n_extents, 3);
        block = left.blocks[1]; /* the second one is below the first */
        arena_locate(a, ledger_block_at(ledger, left.blocks[2])->offset, &before);
        ck_assert(before.region_id & ARENA_REGION_OF_EXTENT);
        ck_assert_uint_eq(before.region_bytes, 20 * MIB);
        ck_assert_int_eq(arena_dealloc(a, ledger_block_at(ledger, block)->handle), 0);
        ledger_block_clear(ledger, block);
        for (size_t i = 0; i < left.inherited.n_extents; i++)
                close(left.fds[i]);
        collect(&left);
        end_of_process();
        restore_well(&left);
        arena_locate(a, ledger_block_at(ledger, left.blocks[1])->offset, &after);
        ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
        ck_assert_uint_eq(arena_release_exact(a, on_released, NULL), 22 * MIB);
        worker_poll(worker);
        ck_assert_uint_eq(arena_n_extents(a), 2);
        add_block_in(true, 24 * MIB);
        check();
}

static void collect_again(struct left *left)
{
        for (size_t i = 0; i < left->inherited.n_extents; i++)
                close(left->fds[i]);
        collect(left);
}

static uint32_t n_done;

static void on_woken(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        (void)userdata;
        (void)handle;
        (void)offset;
        ck_assert_int_eq(result, 0);
        n_done++;
}

static void hand_over(struct left *left)
{
        collect(left);
        end_of_process();
        restore_well(left);
}

static void park_block(uint32_t block)
{
        struct ledger_block *b = ledger_block_at(ledger, block);
        struct arena_place place;

        arena_locate(a, b->offset, &place);
        b->region_id = place.region_id;
        ledger_block_park(ledger, block, LEDGER_DISCARDED);
        ck_assert_int_eq(arena_park(a, b->handle, on_released, NULL), 0);
}

static void wake_block(uint32_t block)
{
        const struct ledger_block *b = ledger_block_at(ledger, block);
        struct charge charge;
        uint64_t missing;

        ck_assert_int_eq(charge_take(&account, b->n_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_wake(a, b->handle, &charge, on_woken, NULL, on_released, NULL), 0);
        worker_drain(worker);
        arena_wake_commit(a, b->handle);
        ledger_block_park(ledger, block, LEDGER_AWAKE);
}

/* It has the same region for clients, of one extent, before its extent leaves, without one, and with another one. */
TEST(test_parked_exact_blocks)
{
        struct arena_place before, after;
        static struct left left;
        uint64_t offset, n_bytes;
        uint32_t block;

        limit_bytes = 100 * MIB;
        arena_set_limit(a, limit_bytes);
        add_block_in(true, 20 * MIB);
        add_block_in(true, 22 * MIB);
        collect(&left);
        block = left.blocks[0];
        offset = ledger_block_at(ledger, block)->offset;
        n_bytes = ledger_block_at(ledger, block)->n_bytes;
        arena_locate(a, offset, &before);
        for (size_t i = 0; i < left.inherited.n_extents; i++)
                close(left.fds[i]);
        for (unsigned i = 0; i < 2; i++) {
                park_block(block);
                worker_drain(worker);
                ck_assert_uint_eq(arena_n_extents(a), 1 + i);
                hand_over(&left);
                ck_assert_uint_eq(arena_parked_bytes(a), n_bytes);
                ck_assert_int_eq(arena_release_parked(a, on_released, NULL), 0);
                arena_locate(a, offset, &after);
                ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
                add_block_in(true, 18 * MIB); /* not in its place */
                wake_block(block);
                check();
                hand_over(&left);
                arena_locate(a, offset, &after);
                ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
        }
        park_block(block);
        worker_drain(worker);
        hand_over(&left);
        arena_drop_parked(a, ledger_block_at(ledger, block)->handle);
        ledger_block_clear(ledger, block);
        ck_assert_uint_eq(arena_parked_bytes(a), 0);
        add_block_in(true, 20 * MIB); /* in its place */
        hand_over(&left);
}

/* The id of a region by handle is not used again, also if its memory was released before the restart. */
TEST(test_regions_of_handles)
{
        struct arena_place gone, kept, again;
        static struct left left;
        uint32_t block;

        open_handles();
        limit_bytes = 100 * MIB;
        arena_set_limit(a, limit_bytes);
        add_block(20 * MIB);
        add_block(22 * MIB);
        collect(&left);
        arena_locate(a, ledger_block_at(ledger, left.blocks[0])->offset, &kept);
        block = left.blocks[1];
        arena_locate(a, ledger_block_at(ledger, block)->offset, &gone);
        ck_assert_uint_gt(gone.region_id, kept.region_id);
        ck_assert_int_eq(arena_dealloc(a, ledger_block_at(ledger, block)->handle), 0);
        ledger_block_clear(ledger, block);
        arena_release(a, UINT64_MAX, NULL, on_released, NULL);
        worker_poll(worker);
        collect(&left);
        ck_assert_uint_eq(left.inherited.n_extents, 1);
        end_of_process();
        restore_well(&left);
        arena_locate(a, ledger_block_at(ledger, left.blocks[0])->offset, &again);
        ck_assert_int_eq(memcmp(&kept, &again, sizeof(kept)), 0);
        add_block(24 * MIB);
        collect(&left);
        arena_locate(a, ledger_block_at(ledger, left.blocks[1])->offset, &again);
        ck_assert_uint_eq(again.region_bytes, 24 * MIB);
        ck_assert_uint_gt(again.region_id, gone.region_id);
}

TEST(test_empty)
{
        static struct left left;
        uint32_t block;

        collect(&left);
        end_of_process();
        restore_well(&left);
        ck_assert_ptr_null(ledger_region_get(ledger, 0)); /* the first block makes the region */
        add_block(3 * MIB);
        ck_assert_ptr_nonnull(ledger_region_get(ledger, 0));
        block = pick_block();
        ck_assert_int_eq(arena_dealloc(a, ledger_block_at(ledger, block)->handle), 0);
        ledger_block_clear(ledger, block);
        arena_release(a, UINT64_MAX, NULL, on_released, NULL);
        worker_poll(worker);
        collect(&left);
        end_of_process();
        restore_well(&left);
        add_block(3 * MIB);
        check();
}

/* ---- what does not fit together ------------------------------------------------------- */

static const char *why; /* of the last refusal */

static void refuse(struct left *left, int error)
{
        struct charge charge = { 0 };
        struct ledger_counts before, after;
        uint64_t missing;

        ck_assert_int_eq(charge_take(&account, left->n_bytes, &charge, &missing), 0);
        ledger_count(ledger, &before);
        ck_assert_int_eq(restore(left, &charge, &why), error);
        ck_assert_ptr_null(a);
        ck_assert(error != -EBADMSG || why[0] != '\0');
        ledger_count(ledger, &after);
        ck_assert_int_eq(memcmp(&before, &after, sizeof(before)), 0);
        ck_assert_uint_eq(charge.n_bytes, left->n_bytes);
        charge_drop(&charge);
        device.n_live = 0; /* those that were looked at before the bad one */
        device.live_bytes = 0;
}

/* Each is found, and mended it goes on. */
TEST(test_damage)
{
        static struct left left;
        struct ledger_extent *e;
        struct ledger_block *b;
        struct ledger_region *g;
        int fd;

        for (int i = 0; i < 6; i++)
                add_block(MIB + MIB / 2);
        collect(&left);
        end_of_process();
        e = ledger_extent_at(ledger, left.extents[2]);
        b = ledger_block_at(ledger, left.blocks[3]);
        g = (struct ledger_region *)(uintptr_t)ledger_region_get(ledger, 0);
        e->offset += 256;
        refuse(&left, -EBADMSG);
        e->offset += 200 * MIB;
        refuse(&left, -EBADMSG);
        e->offset -= 200 * MIB + 256;
        e->n_bytes -= 256;
        refuse(&left, -EBADMSG);
        ck_assert_str_eq(why, "an extent is not aligned to the arena's extent size");
        e->n_bytes += 256;
        b->n_requested -= 300;
        refuse(&left, -EBADMSG);
        b->n_requested += 300;
        b->offset += 100;
        refuse(&left, -EBADMSG);
        b->offset -= 100 + 256; /* over the one before */
        refuse(&left, -EBADMSG);
        b->offset += 256;
        g->base += E;
        refuse(&left, -EBADMSG);
        g->base -= E;
        g->number++;
        refuse(&left, -EBADMSG);
        g->number--;
        g->first_extent_bytes = 2 * E;
        refuse(&left, -EBADMSG);
        g->first_extent_bytes = MIB;
        g->n_bytes++;
        refuse(&left, -EBADMSG);
        g->n_bytes--;
        fd = left.fds[4];
        left.fds[4] = 0; /* no memfd */
        refuse(&left, -EBADMSG);
        left.fds[4] = fd;
        restore_well(&left);
}

TEST(test_damage_of_parked_exact_blocks)
{
        static struct left left;
        struct ledger_block *b;
        uint64_t id;

        limit_bytes = 100 * MIB;
        arena_set_limit(a, limit_bytes);
        add_block_in(true, 20 * MIB);
        add_block_in(true, 22 * MIB); /* below it */
        collect(&left);
        park_block(left.blocks[1]);
        worker_drain(worker);
        collect_again(&left);
        end_of_process();
        b = ledger_block_at(ledger, left.blocks[1]);
        id = b->region_id;
        b->region_id = 0;
        refuse(&left, -EBADMSG);
        ck_assert_str_eq(why, "a parked block is not on whole extents");
        b->region_id = id;
        b->n_bytes = b->n_requested = b->n_bytes + 256;
        refuse(&left, -EBADMSG);
        b->n_bytes = b->n_requested = b->n_bytes - 256;
        b->offset -= 4 * MIB;
        refuse(&left, -EBADMSG);
        b->offset += 4 * MIB + BFC_MAX_SPACE;
        refuse(&left, -EBADMSG);
        b->offset -= BFC_MAX_SPACE;
        restore_well(&left);
        arena_drop_parked(a, b->handle);
        ledger_block_clear(ledger, left.blocks[1]);
}

TEST(test_damage_of_handles)
{
        static struct left left;
        struct ledger_extent *e, *other;
        uint64_t key, offset;

        open_handles();
        limit_bytes = 200 * MIB;
        arena_set_limit(a, limit_bytes);
        for (int i = 0; i < 4; i++)
                add_block(20 * MIB);
        collect(&left);
        ck_assert_uint_eq(left.inherited.n_extents, 4);
        end_of_process();
        e = ledger_extent_at(ledger, left.extents[2]);
        other = ledger_extent_at(ledger, left.extents[1]);
        offset = e->offset;
        e->n_bytes -= 256;
        refuse(&left, -EBADMSG);
        ck_assert_str_eq(why, "an extent is not aligned to the arena's extent size");
        e->n_bytes += 256 - E;
        refuse(&left, -EBADMSG);
        ck_assert_str_eq(why, "blocks are outside the extents");
        e->n_bytes += E;
        e->offset = other->offset; /* over that one */
        refuse(&left, -EBADMSG);
        e->offset = BFC_MAX_SPACE - E;
        refuse(&left, -EBADMSG);
        e->offset = UINT64_MAX - 255;
        refuse(&left, -EBADMSG);
        e->offset = offset + 1;
        refuse(&left, -EBADMSG);
        e->offset = offset;
        key = e->store_key;
        e->store_key = 1 << 20;
        refuse(&left, -EBADMSG);
        ck_assert_str_eq(why, "the keeper does not have all of its extents");
        e->store_key = key;
        restore_well(&left);
}

/* On the host, where an fd is looked at closely, and what is in the memory stays. */
TEST(test_host_adopts)
{
        struct device_extent e = DEVICE_EXTENT_EMPTY, again = DEVICE_EXTENT_EMPTY;
        struct device *host = NULL;
        int fd, pipes[2];
        char c = 0;

        ck_assert_int_eq(device_host_new(&host), 0);
        ck_assert_int_eq(device_make(host, DEVICE_SHARE_FD, E, &e), 0);
        ck_assert_int_eq(pwrite(e.fd, "x", 1, 12345), 1);
        fd = fcntl(e.fd, F_DUPFD_CLOEXEC, 0);
        ck_assert_int_eq(device_adopt(host, fd, 2 * E, &again), -EPROTO);
        ck_assert_int_eq(device_adopt(host, fd, 0, &again), -EPROTO);
        ck_assert_int_eq(pipe2(pipes, O_CLOEXEC), 0);
        ck_assert_int_eq(device_adopt(host, pipes[0], E, &again), -EPROTO);
        ck_assert_int_eq(device_adopt(host, -1, E, &again), -EPROTO);
        close(pipes[0]);
        close(pipes[1]);
        ck_assert_int_eq(again.fd, -1);
        close(e.fd); /* the other process's */
        ck_assert_int_eq(device_adopt(host, fd, E, &again), 0);
        ck_assert_int_eq(pread(again.fd, &c, 1, 12345), 1);
        ck_assert_int_eq(c, 'x');
        ck_assert_int_eq(device_destroy(host, &again), 0);
        device_free(host);
}
