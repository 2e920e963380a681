/* Arenas: growth and release are all or nothing, whatever the device does, and
 * every byte of a limit can be backed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/memory/upcalls.h"
#include "daemon/base/fd_reserve.h"
#include "device/host_free.h"
#include "tests/fake_device.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/checks.h"

#define E     (2 * MIB) /* the grid */
#define SHORT MIB       /* what the grid leaves of the limit */
/* With zones there are extents of 2 MiB to 16 MiB, three of each of the small sizes. */
#define ZONES (42 * MIB)
#define LARGE (16 * MIB)

static void on_retire(struct broker *b, const uint32_t *extents, size_t n_extents);
static bool on_unmaps_soon(const struct broker *b, uint32_t extent);
static const struct upcalls upcalls = { .retire = on_retire, .unmaps_soon = on_unmaps_soon };

static struct fake_device device;
static struct worker *worker;
static struct ledger *ledger;
static struct account pool;
static struct account account;
static struct arena *a;
static uint32_t quota;
static uint32_t asked[64], n_asked; /* extents that sessions are to let go of */
static uint32_t per_zone;           /* 0: all extents have E */
static uint64_t one_size;
static bool is_fixed, unmaps_late;

static void check(void)
{
        struct ledger_counts counts;
        const char *why = "";

        ck_assert_msg(arena_check(a, &why) == 0, "arena_check: %s", why);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "ledger_check: %s", why);
        ledger_count(ledger, &counts);
        ck_assert_uint_eq(counts.n_extents, arena_n_extents(a));
        if (arena_pending_bytes(a) == 0) {
                ck_assert_uint_eq(account.charged_bytes, device.live_bytes + arena_unreclaimed_bytes(a));
                ck_assert_uint_eq(device.n_live, arena_n_extents(a));
        }
}

static struct device_supply supply;
static struct partition partition;

/* An arena whose account holds its limit and no byte more. */
static void open_shared(enum device_share share, uint64_t limit_bytes)
{
        struct arena_options o = {
                .partition = &partition,
                .quota = quota,
                .limit_bytes = limit_bytes,
                .sizes = { per_zone > 0 ? LARGE : one_size, E, per_zone },
        };

        partition = (struct partition){
                .ledger = ledger,
                .device = &device.device,
                .worker = worker,
                .share = share,
                .memory.supply = supply,
                .preallocate = is_fixed,
                .up = { .calls = &upcalls, .broker = (struct broker *)&n_asked },
        };
        account_init_root(&pool, limit_bytes);
        ck_assert_int_eq(account_init(&account, &pool, limit_bytes, 0), 0);
        ck_assert_int_eq(arena_new(&o, &a), 0);
        check();
}

static void open_arena(uint64_t limit_bytes)
{
        open_shared(DEVICE_SHARE_FD, limit_bytes);
}

static void open_zoned(uint64_t limit_bytes)
{
        per_zone = 3;
        open_arena(limit_bytes);
}

static void setup(void)
{
        struct ledger_limits limits = {
                .n_quotas = 2, .n_sessions = 2, .n_extents = 512, .n_exports = 8, .n_blocks = 2
        };
        struct ledger_quota facts = { .tenant = "t", .partition = "p", .extent_bytes = E };

        per_zone = 0;
        one_size = E;
        is_fixed = unmaps_late = false;
        fake_device_init(&device, MIB);
        ck_assert_int_eq(worker_new_inline(&worker), 0);
        ck_assert_int_eq(ledger_new(&limits, &ledger), 0);
        ck_assert_int_eq(ledger_quota_add(ledger, &facts, &quota), 0);
}

static void teardown(void)
{
        struct ledger_counts counts;

        if (a)
                check();
        a = arena_free(a);
        ck_assert_ptr_null(arena_free(NULL));
        ck_assert_uint_eq(account.charged_bytes, 0);
        account_deinit(&account);
        ck_assert_uint_eq(pool.charged_bytes, 0);
        ck_assert_uint_eq(pool.committed_bytes, 0);
        ck_assert_uint_eq(device.n_live, 0);
        ck_assert_uint_eq(device.live_bytes, 0);
        ck_assert_uint_eq(worker_n_pending(worker), 0);
        ledger_count(ledger, &counts);
        ck_assert_uint_eq(counts.n_extents, 0);
        ck_assert_uint_eq(counts.n_exports, 0);
        ledger_quota_clear(ledger, quota);
        ledger = ledger_free(ledger);
        worker = worker_free(worker);
}

FIXTURE(arena, setup, teardown);

struct grown {
        unsigned n_calls;
        int result;
        bfc_handle handle;
        uint64_t offset;
};

static void on_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct grown *g = userdata;

        g->n_calls++;
        g->result = result;
        g->handle = handle;
        g->offset = offset;
}

static void on_released(void *userdata, uint64_t n_bytes)
{
        ck_assert_uint_gt(n_bytes, 0);
        ++*(unsigned *)userdata;
}

static void begin_in(uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret_plan, struct grown *g)
{
        struct charge charge;
        uint64_t missing, before = arena_pending_bytes(a);

        *g = (struct grown){ 0 };
        ck_assert_int_eq(arena_plan(a, n_bytes, room_bytes, ret_plan), 0);
        ck_assert_int_eq(charge_take(&account, ret_plan->new_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_grow(a, ret_plan, &charge, on_grown, g), 0);
        ck_assert_ptr_null(charge.account);
        ck_assert_uint_eq(arena_pending_bytes(a) - before, ret_plan->new_bytes);
        ck_assert_uint_eq(g->n_calls, 0);
        check();
}

static void begin(uint64_t n_bytes, struct bfc_growth *ret_plan, struct grown *g)
{
        begin_in(n_bytes, account_room(&account), ret_plan, g);
}

/* A block by growth. */
static struct grown grow_in(uint64_t n_bytes, uint64_t room_bytes)
{
        struct bfc_growth plan;
        struct grown g;

        begin_in(n_bytes, room_bytes, &plan, &g);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(g.n_calls, 1);
        ck_assert_int_eq(g.result, 0);
        ck_assert_uint_eq(g.offset, plan.offset);
        ck_assert_uint_eq(arena_pending_bytes(a), 0);
        check();
        return g;
}

/* A growth while extents are being released. */
static struct grown grow_beside(uint64_t n_bytes)
{
        struct bfc_growth plan;
        struct grown g;

        begin(n_bytes, &plan, &g);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, 0);
        check();
        return g;
}

static struct grown grow(uint64_t n_bytes)
{
        return grow_in(n_bytes, account_room(&account));
}

static uint64_t release(uint64_t want_bytes)
{
        unsigned n_released = 0;
        uint64_t n_bytes = arena_release(a, want_bytes, NULL, on_released, &n_released);

        ck_assert_uint_eq(arena_pending_bytes(a), n_bytes);
        ck_assert_uint_eq(n_released, 0);
        check();
        worker_drain(worker);
        ck_assert((n_released > 0) == (n_bytes > 0));
        ck_assert_uint_eq(arena_pending_bytes(a), 0);
        check();
        return n_bytes;
}

static uint64_t largest(uint64_t limit_bytes, uint64_t granularity)
{
        return extent_sizes_for(DEVICE_SHARE_FD, false, limit_bytes, granularity).extent_bytes;
}

/* The smallest extents first, as many as the limit allows: the first one may have any size. */
static uint64_t count_extents(const struct extent_sizes *g, uint64_t limit_bytes)
{
        uint64_t n = 1, size = g->small_extent_bytes;

        for (uint32_t in_zone = 0; limit_bytes >= size; n++) {
                limit_bytes -= size;
                if (size < g->extent_bytes && ++in_zone == g->extents_per_zone) {
                        size *= 2;
                        in_zone = 0;
                }
        }
        return n;
}

TEST(extent_alignment)
{
        ck_assert_uint_eq(largest(2 * MIB, 4096), 2 * MIB);
        ck_assert_uint_eq(largest(512 * MIB, 4096), 2 * MIB);
        ck_assert_uint_eq(largest(514 * MIB, 4096), 4 * MIB);
        ck_assert_uint_eq(largest(64 * GIB, 4096), 256 * MIB);
        ck_assert_uint_eq(largest(160 * GIB, 4096), GIB);
        ck_assert_uint_eq(largest(2 * MIB, 2 * MIB), 2 * MIB);
        ck_assert_uint_eq(largest(8 * MIB, 16 * MIB), 16 * MIB);
        ck_assert_uint_eq(largest(2 * MIB, 3 * MIB), 3 * MIB);
        ck_assert_uint_eq(largest(1024 * MIB, 3 * MIB), 6 * MIB);
        for (uint64_t limit = 2 * MIB, before = 0; limit < 600 * GIB;
             limit += limit < 5 * GIB ? 2 * MIB : GIB) {
                struct extent_sizes g = extent_sizes_for(DEVICE_SHARE_FD, false, limit, 2 * MIB);
                uint64_t n = extent_max_count(DEVICE_SHARE_FD, limit, &g);

                ck_assert(g.small_extent_bytes == 2 * MIB && extent_sizes_are_valid(&g, 2 * MIB));
                ck_assert(g.extent_bytes * 256 >= limit && g.extent_bytes >= before);
                ck_assert(g.extent_bytes == 2 * MIB ||
                          g.extent_bytes * 64 < limit); /* no larger than it must be */
                ck_assert(n <= (limit <= 4 * GIB ? 257 : limit <= 256 * GIB ? 1027 : 1217));
                ck_assert(n == count_extents(&g, limit));
                ck_assert(extent_max_limit(&g) >= limit);
                ck_assert(extent_max_count(DEVICE_SHARE_FD, extent_max_limit(&g), &g) == EXTENT_MAX_COUNT);
                before = g.extent_bytes;
        }
}

/* On a GPU each extent has a price: they begin larger with a large limit, and are fewer. */
TEST(extents_of_a_gpu)
{
        for (uint64_t limit = 2 * MIB, before = 0; limit < 600 * GIB;
             limit += limit < 5 * GIB ? 2 * MIB : GIB) {
                struct extent_sizes g = extent_sizes_for(DEVICE_SHARE_FD, true, limit, 2 * MIB);
                uint64_t n = extent_max_count(DEVICE_SHARE_FD, limit, &g);

                ck_assert_uint_eq(g.small_extent_bytes, limit < 20 * GIB ? 2 * MIB : 16 * MIB);
                ck_assert(extent_sizes_are_valid(&g, 2 * MIB));
                ck_assert(g.extent_bytes * 256 >= limit && g.extent_bytes >= before);
                ck_assert(limit < 20 * GIB || n <= 550);
                ck_assert(n == count_extents(&g, limit));
                before = g.extent_bytes;
        }
}

/* Such a ledger is refused. */
TEST(extent_alignment_from_ledger)
{
        const struct extent_sizes good = extent_sizes_for(DEVICE_SHARE_FD, false, 160 * GIB, 2 * MIB);
        struct extent_sizes g = good;

        ck_assert(extent_sizes_are_valid(&g, 2 * MIB));
        g.small_extent_bytes = 0;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.small_extent_bytes = MIB;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.small_extent_bytes = 6 * MIB;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.small_extent_bytes = 2 * GIB;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g = good;
        g.extent_bytes = 0;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.extent_bytes = UINT64_C(1) << 63;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g = good;
        g.extents_per_zone = UINT32_MAX;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.extents_per_zone = 1000;
        ck_assert(!extent_sizes_are_valid(&g, 2 * MIB));
        g.extents_per_zone = 0;
        ck_assert(extent_sizes_are_valid(&g, 2 * MIB));
}

/* What a limit must be for blocks of so many bytes in one extent. */
TEST(test_limit_for_extent)
{
        ck_assert_uint_eq(extent_limit_for(false, 1, 4096), 2 * MIB);
        ck_assert_uint_eq(extent_limit_for(false, 2 * MIB + 1, 4096), 514 * MIB);
        for (uint64_t n = 1; n < 600 * MIB; n += 777777) {
                uint64_t limit = extent_limit_for(false, n, 2 * MIB);

                ck_assert(limit % (2 * MIB) == 0);
                ck_assert_uint_ge(largest(limit, 2 * MIB), n);
                ck_assert(limit == 2 * MIB || largest(limit - 2 * MIB, 2 * MIB) < n);
        }
}

/* A block that may lie over several extents fills up what is left; one that may not goes past. Where all is made in
 * advance, none is larger than an extent. */
TEST(test_in_extent)
{
        struct bfc_growth plan;
        struct charge charge;
        struct grown g, h;
        uint64_t offset, missing;
        bfc_handle handle;

        is_fixed = true;
        open_arena(8 * E);
        ck_assert_uint_eq(arena_max_in_extent(a), E);
        g = grow(E / 2);
        h = grow(E);
        ck_assert_uint_eq(h.offset, E);
        ck_assert_int_eq(arena_alloc_in_extent(a, E / 2 + 1, &handle, &offset), BFC_NO_FIT);
        ck_assert_int_eq(arena_alloc_in_extent(a, E + 1, &handle, &offset), -EINVAL);
        ck_assert_int_eq(arena_dealloc(a, h.handle), 0);
        ck_assert_int_eq(arena_alloc_in_extent(a, E / 2 + 1, &handle, &offset), 0);
        ck_assert_uint_eq(offset, E); /* not at E / 2, where it would be in both */
        ck_assert_int_eq(arena_plan(a, E, 0, &plan), 0);
        ck_assert_int_eq(arena_plan_in_extent(a, E + 1, 0, &plan), -EINVAL);
        ck_assert_int_eq(arena_plan_in_extent(a, E, 0, &plan), 0);
        ck_assert_uint_eq(plan.offset, 2 * E);
        ck_assert_uint_eq(plan.new_bytes, E);
        ck_assert_int_eq(charge_take(&account, E, &charge, &missing), 0);
        ck_assert_int_eq(arena_grow(a, &plan, &charge, on_grown, &h), 0);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(h.result, 0);
        ck_assert_uint_eq(h.offset, 2 * E);
        check();
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

/* With cuda-ipc every block is in one extent, however large it is. */
TEST(in_extent_where_each_region_is_one)
{
        struct bfc_growth plan;
        bfc_handle handle;
        uint64_t offset;

        open_shared(DEVICE_SHARE_CUDA_IPC, GIB);
        ck_assert_uint_ge(arena_max_in_extent(a), GIB);
        ck_assert_int_eq(arena_plan_in_extent(a, 100 * MIB, GIB, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, 100 * MIB);
        ck_assert_int_eq(arena_dealloc(a, grow(100 * MIB).handle), 0);
        ck_assert_int_eq(arena_alloc_in_extent(a, 100 * MIB, &handle, &offset), 0);
        ck_assert_int_eq(arena_dealloc(a, handle), 0);
}

TEST(test_grow_and_release)
{
        struct grown g, h;
        bfc_handle small;
        uint64_t offset;

        open_arena(8 * E);
        ck_assert_int_eq(arena_alloc(a, 256, &small, &offset), BFC_NO_FIT);
        ck_assert_uint_eq(release(UINT64_MAX), 0);
        g = grow(3 * E - 256);
        ck_assert_uint_eq(device.n_makes, 3);
        ck_assert_uint_eq(account.charged_bytes, 3 * E);
        ck_assert_int_eq(arena_alloc(a, 256, &small, &offset), 0);
        ck_assert_uint_eq(offset, g.offset + 3 * E - 256);
        ck_assert_uint_eq(arena_releasable(a, NULL), 0);

        h = grow(E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), -EINVAL);
        ck_assert_uint_eq(arena_releasable(a, NULL), 2 * E);
        ck_assert_uint_eq(release(1), E); /* whole extents, and no more than asked for */
        ck_assert_uint_eq(release(UINT64_MAX), E);
        ck_assert_uint_eq(account.charged_bytes, 2 * E);
        ck_assert_int_eq(arena_dealloc(a, h.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, small), 0);
        ck_assert_uint_eq(release(UINT64_MAX), 2 * E);
        ck_assert_uint_eq(device.n_destroys, 4);
        ck_assert_uint_eq(account.charged_bytes, 0);
}

/* The device is told the node, and what it made is counted as long as it is there. */
TEST(test_pages)
{
        supply = (struct device_supply){ .is_bound = true, .node = 3 };
        open_arena(8 * E);
        supply = (struct device_supply){ 0 };
        device.is_huge = true;
        grow(2 * E);
        ck_assert(device.supply.is_bound);
        ck_assert_uint_eq(device.supply.node, 3);
        ck_assert_uint_eq(arena_huge_bytes(a), 2 * E);
        ck_assert_uint_eq(arena_small_bytes(a), 0);
        device.is_huge = false;
        struct grown g = grow(E);
        ck_assert_uint_eq(arena_huge_bytes(a), 2 * E);
        ck_assert_uint_eq(arena_small_bytes(a), E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release(E), E);
        ck_assert_uint_eq(arena_huge_bytes(a), 2 * E);
        ck_assert_uint_eq(arena_small_bytes(a), 0);
}

TEST(release_keeps_what_a_plan_uses)
{
        struct bfc_growth plan;
        struct grown g;

        open_arena(8 * E);
        g = grow(2 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_int_eq(arena_plan(a, 3 * E, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, E); /* beside what is free */
        ck_assert_uint_eq(arena_releasable(a, &plan), 0);
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, &plan, on_released, NULL), 0);
        ck_assert_uint_eq(arena_releasable(a, NULL), 2 * E);
        check();
}

/* Extents on their way back cannot be had and are charged until they are gone. */
TEST(release_while_another_is_pending)
{
        unsigned n_released = 0;
        struct bfc_growth plan;
        struct grown g;
        bfc_handle handle;
        uint64_t offset;

        open_arena(4 * E);
        g = grow(2 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), 2 * E);
        ck_assert_int_eq(arena_alloc(a, 256, &handle, &offset), BFC_NO_FIT);
        ck_assert_uint_eq(arena_releasable(a, NULL), 0);
        ck_assert_uint_eq(account.charged_bytes, 2 * E);
        begin(E, &plan, &g); /* behind the release */
        ck_assert_uint_eq(account.charged_bytes, 3 * E);
        ck_assert_uint_eq(worker_poll(worker), 1);
        check();
        ck_assert_uint_eq(n_released, 1);
        ck_assert_uint_eq(g.n_calls, 0);
        ck_assert_uint_eq(account.charged_bytes, E);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, 0);
}

/* A large release is uncharged in steps: room for others is there before its end. */
TEST(test_release_in_steps)
{
        unsigned n_released = 0;

        open_arena(100 * E);
        ck_assert_int_eq(arena_dealloc(a, grow(100 * E).handle), 0);
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), 100 * E);
        for (unsigned n = 1; n <= 4; n++) {
                ck_assert_uint_eq(worker_poll(worker), 1);
                ck_assert_uint_eq(n_released, n);
                ck_assert_uint_eq(account.charged_bytes, n < 4 ? 100 * E - n * 64 * MIB : 0);
                ck_assert_uint_eq(arena_leaving_bytes(a), account.charged_bytes);
                check();
        }
}

/* Memory that becomes unreclaimed during a query is not in its answer. */
TEST(unreclaimed_extents_beside_a_query)
{
        struct bfc_growth plan;
        struct grown g;

        open_arena(8 * E);
        ck_assert_int_eq(arena_dealloc(a, grow(E).handle), 0);
        fake_device_fail_destroy(&device, 1, -EIO);
        ck_assert_uint_eq(release(UINT64_MAX), E);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        arena_check_unreclaimed(a);
        begin(2 * E, &plan, &g); /* goes first, and fails */
        fake_device_fail_make(&device, 2, -ENOMEM);
        fake_device_fail_destroy(&device, 1, -EIO);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, -ENOMEM);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), 2 * E);
        device.foreign_bytes = 0; /* as it may be said before the growth failed */
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        check();
        arena_check_unreclaimed(a);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), 0);
}

/* Others' bytes that are no extents, contexts for instance, hide what is unreclaimed, but not that it returns. */
TEST(unreclaimed_memory_returns_beside_contexts)
{
        const uint64_t contexts = 100 * E;
        bfc_handle blocks[2];

        open_arena(8 * E);
        for (int i = 0; i < 2; i++)
                blocks[i] = grow(E).handle;
        for (unsigned i = 0; i < 2; i++) {
                ck_assert_int_eq(arena_dealloc(a, blocks[i]), 0);
                fake_device_fail_destroy(&device, 1, -EBUSY);
                device.foreign_bytes = contexts + (i + 1) * E; /* when the device is asked after that */
                ck_assert_uint_eq(release(UINT64_MAX), E);
        }
        for (int i = 0; i < 3; i++) { /* others' memory grows, and that says nothing */
                device.foreign_bytes += contexts;
                arena_check_unreclaimed(a);
                ck_assert_uint_eq(worker_poll(worker), 1);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), 2 * E);
        }
        device.foreign_bytes -= E;
        arena_check_unreclaimed(a);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        device.foreign_bytes -= E - 65536; /* another context grew a little */
        arena_check_unreclaimed(a);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), 0);
        check();
}

static void release_block(bfc_handle block, uint64_t foreign_bytes)
{
        ck_assert_int_eq(arena_dealloc(a, block), 0);
        fake_device_fail_destroy(&device, 1, -EBUSY);
        device.foreign_bytes = foreign_bytes;
        ck_assert_uint_eq(release(UINT64_MAX), E);
        check();
}

/* A process takes as much as is returned, so the device's free bytes do not change. It has charged that. */
TEST(returned_memory_that_others_take_at_once)
{
        bfc_handle blocks[3];

        open_arena(8 * E);
        for (int i = 0; i < 3; i++)
                blocks[i] = grow(E).handle;
        device.device.direct.n_bytes = E;
        release_block(blocks[0], E);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), 0);
        release_block(blocks[1], 2 * E); /* this one is kept */
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        arena_check_unreclaimed(a); /* answered after the next release */
        device.device.direct.n_bytes = 2 * E;
        release_block(blocks[2], 3 * E);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        device.foreign_bytes = 2 * E; /* it is returned */
        arena_check_unreclaimed(a);
        while (arena_unreclaimed_bytes(a) > 0)
                ck_assert_uint_eq(worker_poll(worker), 1);
        check();
}

TEST(test_make_fails_at_each_position)
{
        const unsigned n = 5;

        open_arena(8 * E);
        for (unsigned nth = 1; nth <= n; nth++) {
                struct bfc_growth plan, again;
                struct grown g;
                unsigned before = device.n_makes;
                struct bfc_stats stats;

                begin(n * E, &plan, &g);
                fake_device_fail_make(&device, nth, nth % 2 ? -ENOMEM : -ENODEV);
                ck_assert_uint_eq(worker_poll(worker), 1);
                ck_assert_uint_eq(g.n_calls, 1);
                ck_assert_int_eq(g.result, nth % 2 ? -ENOMEM : -ENODEV);
                ck_assert(arena_is_lost(a) == (nth >= 2)); /* and remembers it */
                ck_assert_uint_eq(g.handle, 0);
                ck_assert_uint_eq(device.n_makes, before + nth);
                ck_assert_uint_eq(device.n_live, 0);
                ck_assert_uint_eq(account.charged_bytes, 0);
                ck_assert_uint_eq(arena_n_extents(a), 0);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), 0);
                arena_read_stats(a, &stats);
                ck_assert_uint_eq(stats.bytes_reserved, 0);
                ck_assert_uint_eq(stats.num_blocks, 0);
                check();
                ck_assert_int_eq(arena_plan(a, n * E, 0, &again), 0);
                ck_assert_uint_eq(plan.offset, again.offset);
                ck_assert_uint_eq(plan.new_bytes, again.new_bytes);
                ck_assert_uint_eq(plan.span.begin, again.span.begin);
                ck_assert_uint_eq(plan.span.end, again.span.end);
        }
        grow(n * E);
        ck_assert_uint_eq(device.n_live, n);
}

/* A failed growth beside live blocks takes nothing from them. */
TEST(test_failure_keeps_neighbours)
{
        struct bfc_growth plan;
        struct grown g, h;

        open_arena(8 * E);
        h = grow(E / 2);
        begin(2 * E, &plan, &g);
        ck_assert_uint_lt(plan.new_bytes, 2 * E + 1);
        fake_device_fail_make(&device, 2, -ENOMEM);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, -ENOMEM);
        ck_assert_uint_eq(account.charged_bytes, E);
        ck_assert_uint_eq(arena_n_extents(a), 1);
        check();
        ck_assert_int_eq(arena_dealloc(a, h.handle), 0);
}

/* Fds that are reserved for administrators can be had while one is served. */
TEST(make_without_reserved_fd)
{
        struct rlimit few;
        struct bfc_growth plan;
        struct grown g;
        int others[24], n_others = 0, next;

        open_arena(8 * E);
        while ((next = dup(0)) >= 0 && next < 24) /* an eighth of fewer is nothing */
                others[n_others++] = next;
        ck_assert_int_ge(next, 0);
        close(next);
        /* The next one is the last that is not of the reserve. */
        few.rlim_max = (rlim_t)next + 1;
        while (few.rlim_max + 1 - (few.rlim_max + 1) / 8 <= (rlim_t)next + 1)
                few.rlim_max++;
        few.rlim_cur = few.rlim_max;
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &few), 0);
        ck_assert_uint_eq(fd_reserve_set(), (uint64_t)next + 1);
        fd_reserve_begin();
        begin(2 * E, &plan, &g);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, -EMFILE);
        ck_assert_uint_eq(account.charged_bytes, 0);
        ck_assert_uint_eq(device.n_live, 0);
        begin(E, &plan, &g);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, 0);
        check();
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release(E), E); /* as on an administrator's order */
        a = arena_free(a);
        while (n_others > 0)
                close(others[--n_others]);
}

/* Growths beside each other: the smaller is done first, each takes its own charge, and one that fails leaves the other. */
TEST(growths_beside_each_other)
{
        struct bfc_growth plans[3];
        struct grown g[3];

        open_arena(10 * E);
        device.device.charges_process = true;
        for (unsigned i = 0; i < 3; i++)
                begin((4 - i) * E, &plans[i], &g[i]);
        ck_assert_uint_eq(account.charged_bytes, 9 * E);
        ck_assert_uint_eq(arena_pending_bytes(a), 9 * E);
        ck_assert_uint_eq(worker_poll(worker), 1); /* the one with the least to do */
        ck_assert_uint_eq(g[2].n_calls, 1);
        ck_assert_int_eq(g[2].result, 0);
        ck_assert_uint_eq(g[2].offset, plans[2].offset);
        check();
        fake_device_fail_make(&device, 3, -ENOMEM);
        ck_assert_uint_eq(worker_poll(worker), 1); /* the oldest */
        ck_assert_int_eq(g[0].result, -ENOMEM);
        ck_assert_uint_eq(account.charged_bytes, 5 * E);
        check();
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g[1].result, 0);
        ck_assert_uint_eq(g[1].offset, plans[1].offset);
        ck_assert_uint_eq(ledger_quota_at(ledger, quota)->growing_mib, 0);
        ck_assert_uint_eq(arena_pending_bytes(a), 0);
        ck_assert_uint_eq(arena_n_extents(a), 5);
        check();
        ck_assert_int_eq(arena_dealloc(a, g[1].handle), 0);
        ck_assert_int_eq(arena_dealloc(a, g[2].handle), 0);
}

TEST(rollback_of_growth_fails)
{
        struct bfc_growth plan;
        struct grown g;

        open_arena(8 * E + SHORT);
        begin(4 * E + SHORT, &plan, &g); /* from 0: the short extent is among them */
        ck_assert_uint_eq(plan.offset, 0);
        fake_device_fail_make(&device, 5, -ENOMEM);
        fake_device_fail_destroy(&device, 4, -EIO); /* undone from the end: the short one is the last */
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, -ENOMEM);
        ck_assert_uint_eq(device.n_destroys, 4);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), SHORT);
        ck_assert_uint_eq(account.charged_bytes, SHORT);
        ck_assert_uint_eq(arena_n_extents(a), 0);
        check();
        grow(2 * E);
        ck_assert_uint_eq(account.charged_bytes, 2 * E + SHORT);
}

TEST(destroy_fails_extent_stays_charged)
{
        for (unsigned nth = 1; nth <= 3; nth++) {
                struct grown g;

                if (nth == 1)
                        open_arena(8 * E);
                g = grow(3 * E);
                ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
                fake_device_fail_destroy(&device, nth, -EIO);
                ck_assert_uint_eq(release(UINT64_MAX), 3 * E);
                ck_assert_uint_eq(arena_n_extents(a), 0);
                ck_assert_uint_eq(device.n_live, 0);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), nth * E);
                ck_assert_uint_eq(account.charged_bytes, nth * E);
        }
        /* The address space is usable again, for as much as is left of the limit. */
        grow(5 * E);
        ck_assert_uint_eq(account.charged_bytes, account.limit_bytes);
}

/* ---- the short extent ---------------------------------------------------- */

/* Extents of a size other than the grid's. */
static unsigned n_short_extents(void)
{
        unsigned n = 0;

        for (size_t slot = 0; slot < arena_n_slots(a); slot++) {
                uint32_t index = arena_slot_extent(a, slot);

                if (index == LEDGER_NONE)
                        continue;
                if (ledger_extent_at(ledger, index)->n_bytes != E) {
                        ck_assert_uint_eq(ledger_extent_at(ledger, index)->n_bytes, SHORT);
                        n++;
                }
        }
        return n;
}

TEST(test_every_byte_in_one_block)
{
        struct grown g;
        struct bfc_growth plan;

        open_arena(8 * E + SHORT);
        g = grow(8 * E + SHORT);
        ck_assert_uint_eq(g.offset, 0);
        ck_assert_uint_eq(device.n_makes, 9);
        ck_assert_uint_eq(account.charged_bytes, account.limit_bytes);
        ck_assert_uint_eq(n_short_extents(), 1);
        ck_assert_int_eq(arena_plan(a, 256, 0, &plan), 0);
        ck_assert_uint_ge(plan.new_bytes, 1); /* the address space has more than the limit */
}

TEST(test_every_byte_in_small_blocks)
{
        open_arena(8 * E + SHORT);
        for (unsigned i = 0; i < 8; i++)
                ck_assert_uint_eq(grow(E).offset, SHORT + i * E);
        ck_assert_uint_eq(n_short_extents(), 0);
        ck_assert_uint_eq(grow(SHORT).offset, 0);
        ck_assert_uint_eq(n_short_extents(), 1);
        ck_assert_uint_eq(account.charged_bytes, account.limit_bytes);
}

TEST(test_limit_below_an_extent)
{
        open_arena(SHORT);
        ck_assert_uint_eq(grow(SHORT).offset, 0);
        ck_assert_uint_eq(account.charged_bytes, SHORT);
        ck_assert_uint_eq(n_short_extents(), 1);
}

/* Pins the extent at `offset` with a block: backs from the lowest to be had up to
 * there and gives all the rest back. */
static void pin(uint64_t offset, uint64_t n_bytes)
{
        struct grown g = grow(n_bytes);
        bfc_handle rest, pinned;
        uint64_t at;

        ck_assert_uint_lt(g.offset, offset);
        ck_assert_uint_gt(g.offset + n_bytes, offset);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_int_eq(arena_alloc(a, offset - g.offset, &rest, &at), 0);
        ck_assert_uint_eq(at, g.offset);
        ck_assert_int_eq(arena_alloc(a, E, &pinned, &at), 0);
        ck_assert_uint_eq(at, offset);
        ck_assert_int_eq(arena_dealloc(a, rest), 0);
        release(UINT64_MAX);
}

/* Three blocks cut the first region into stretches of no more than four extents. */
static void fragment(void)
{
        open_arena(8 * E + SHORT);
        pin(SHORT + 4 * E, 5 * E + SHORT);
        pin(SHORT + 8 * E, 6 * E);
        pin(SHORT + 12 * E, 6 * E);
        ck_assert_uint_eq(account.charged_bytes, 3 * E);
        ck_assert_uint_eq(arena_n_extents(a), 3);
}

TEST(test_second_region)
{
        struct arena_place first, second;
        const size_t n_slots = 18; /* of the first region */
        size_t slot, last;
        struct grown g;

        fragment();
        ck_assert_uint_le(arena_n_slots(a), n_slots);
        g = grow(5 * E);
        ck_assert_uint_eq(account.charged_bytes, 8 * E);
        ck_assert_uint_ge(arena_n_slots(a), n_slots + 5);
        ck_assert_uint_le(arena_n_slots(a), n_slots + 17);
        ck_assert_uint_eq(n_short_extents(), 0); /* nor has the second region one */

        arena_locate(a, 0, &first);
        arena_locate(a, g.offset, &second);
        ck_assert_uint_eq(first.region_bytes, 17 * E + SHORT); /* twice the limit, rounded up */
        ck_assert_uint_eq(second.region_bytes, 17 * E);
        ck_assert_uint_ne(first.region_id, second.region_id);
        ck_assert_uint_eq(second.offset, 0);
        ck_assert_uint_eq(g.offset, first.region_bytes);
        arena_locate(a, first.region_bytes - 1, &first);
        ck_assert_uint_ne(first.region_id, second.region_id);
        slot = arena_slots(a, g.offset, 5 * E, &last);
        ck_assert_uint_eq(slot, n_slots);
        ck_assert_uint_eq(last, n_slots + 4);

        /* The last byte of the limit is the short extent of the first region. */
        ck_assert_uint_eq(account.limit_bytes - account.charged_bytes, SHORT);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release(UINT64_MAX), 5 * E);
        g = grow(4 * E + SHORT);
        ck_assert_uint_eq(g.offset, 0);
        ck_assert_uint_eq(n_short_extents(), 1);
        ck_assert_uint_eq(grow(E).n_calls, 1);
        ck_assert_uint_eq(account.charged_bytes, account.limit_bytes);
}

TEST(test_second_region_failure)
{
        struct bfc_growth plan;
        struct grown g;

        fragment();
        begin(5 * E, &plan, &g);
        fake_device_fail_make(&device, 3, -ENOMEM);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_int_eq(g.result, -ENOMEM);
        ck_assert_uint_eq(account.charged_bytes, 3 * E);
        check();
        grow(5 * E);
}

TEST(test_address_space)
{
        struct arena_options o = {
                .partition = &partition,
                .quota = quota,
                .limit_bytes = UINT64_C(1) << 40,
                .sizes.extent_bytes = 4 * GIB,
        };
        struct arena_place place;
        struct bfc_growth plan;

        partition = (struct partition){ .ledger = ledger, .device = &device.device, .worker = worker };
        ck_assert_int_eq(arena_new(&o, &a), -ENOMEM);
        ck_assert_ptr_null(a);
        o.limit_bytes = 600 * GIB;
        ck_assert_int_eq(arena_new(&o, &a), 0);
        ck_assert_uint_eq(arena_n_slots(a), 0); /* the first plan makes the region */
        ck_assert_int_eq(arena_plan(a, 600 * GIB, 0, &plan), 0);
        arena_locate(a, 0, &place);
        ck_assert_uint_eq(place.region_bytes,
                          808 * GIB); /* less than twice the limit: half of the rest is left */
        ck_assert_uint_eq(plan.new_bytes, 600 * GIB);
        ck_assert_int_eq(arena_plan(a, 1021 * GIB, 0, &plan), -ENOMEM);
        ck_assert_int_eq(arena_plan(a, 0, 0, &plan), -EINVAL);
        check();
}

/* ---- small extents first -------------------------------------------------- */

static uint64_t round_to_large(uint64_t n_bytes)
{
        return (n_bytes + LARGE - 1) / LARGE * LARGE;
}

static uint64_t arena_plan_bytes(uint64_t n_bytes)
{
        struct bfc_growth plan;

        ck_assert_int_eq(arena_plan(a, n_bytes, 0, &plan), 0);
        return plan.new_bytes;
}

TEST(first_block_makes_one_extent)
{
        struct grown g;

        open_zoned(ZONES + 20 * LARGE + 6 * MIB); /* the first extent has 6 MiB */
        g = grow(1024);
        ck_assert_uint_eq(g.offset, 6 * MIB);
        ck_assert_uint_eq(account.charged_bytes, E);
        g = grow(5 * MIB);
        ck_assert_uint_eq(account.charged_bytes, 3 * E);
        ck_assert_uint_eq(arena_n_extents(a), 3);
        g = grow(LARGE); /* one large extent, and not many small ones */
        ck_assert_uint_eq(g.offset, 6 * MIB + ZONES);
        ck_assert_uint_eq(account.charged_bytes, 3 * E + LARGE);
        ck_assert_uint_eq(arena_n_extents(a), 4);
        ck_assert_uint_eq(release(UINT64_MAX), 0);
}

/* Where the small extents are all there, room for less than a large one is none. */
TEST(arena_reports_growable_bytes)
{
        const uint64_t limit = ZONES + 2 * LARGE + MIB; /* the first extent has 1 MiB */
        struct charge charge;
        uint64_t missing;

        open_zoned(limit);
        for (int i = 0; i < 2; i++) { /* without a region, and with one */
                ck_assert_uint_eq(arena_growable(a, limit), limit);
                ck_assert_uint_eq(arena_growable(a, E), E);
                ck_assert_uint_eq(arena_growable(a, MIB), MIB);
                ck_assert_uint_eq(arena_growable(a, 3 * LARGE + E), 3 * LARGE + E);
                (void)arena_unbacked_bytes(a, limit);
        }
        ck_assert_int_eq(charge_take(&account, ZONES + MIB, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, ZONES + MIB, &charge), 0);
        ck_assert_uint_eq(arena_growable(a, LARGE - 1), 0);
        ck_assert_uint_eq(arena_growable(a, LARGE + E), LARGE);
        ck_assert_uint_eq(arena_growable(a, 2 * LARGE), 2 * LARGE);
}

/* No more extents than extent_max_count() says, and all of the limit, however it came about. */
LOOP_TEST(test_zones_fill_the_limit, 3)
{
        const uint64_t limit = ZONES + 5 * LARGE + (_i == 0 ? 0 : 3 * MIB);
        struct extent_sizes grid = { LARGE, E, 3 };
        struct charge charge;
        uint64_t missing, n_bytes = 0;
        struct arena_place place;

        open_zoned(limit);
        if (_i < 2) {
                ck_assert_int_eq(charge_take(&account, limit, &charge, &missing), 0);
                ck_assert_uint_eq(arena_unbacked_bytes(a, limit), limit);
                ck_assert_int_eq(arena_back(a, limit, &charge), 0);
                ck_assert_ptr_null(charge.account);
        } else { /* by blocks, large and small */
                for (uint64_t n = 8 * LARGE; n >= 256; n /= 2)
                        while (limit - n_bytes >= n && arena_plan_bytes(n) <= account_room(&account))
                                n_bytes += grow(n).offset >= limit ? 0 : n;
        }
        ck_assert_uint_le(arena_n_extents(a), extent_max_count(DEVICE_SHARE_FD, limit, &grid));
        if (_i < 2) {
                ck_assert_uint_eq(arena_n_extents(a), 9 + 5 + (_i == 0 ? 0 : 1));
                ck_assert_uint_eq(account.charged_bytes, limit);
        }
        arena_locate(a, 0, &place);
        ck_assert_uint_ge(place.region_bytes, 2 * limit);
        ck_assert_uint_lt(place.region_bytes, 2 * limit + LARGE);
}

TEST(test_zones_in_extent)
{
        struct bfc_growth plan;

        is_fixed = true;
        open_zoned(ZONES + 5 * LARGE);
        ck_assert_uint_eq(arena_max_in_extent(a), LARGE);
        ck_assert_int_eq(arena_plan_in_extent(a, 1024, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, E);
        ck_assert_int_eq(arena_plan_in_extent(a, 3 * MIB, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, 4 * MIB);
        ck_assert_uint_eq(plan.offset, 3 * E);
        ck_assert_int_eq(arena_plan_in_extent(a, LARGE, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, LARGE);
        ck_assert_uint_eq(plan.offset, ZONES);
        ck_assert_int_eq(arena_plan_in_extent(a, LARGE + 1, 0, &plan), -EINVAL);
}

/* The sizes stay. A further region has large extents only, and a limit below the zones is no problem. */
LOOP_TEST(test_zones_and_another_limit, 2)
{
        struct extent_sizes grid = { LARGE, E, 3 };
        struct arena_place place;
        struct bfc_growth plan;
        size_t first, last;

        open_zoned(ZONES + 2 * LARGE);
        ck_assert_int_eq(arena_prepare_limit(a, arena_limit_max(a) + LARGE), -ENOTSUP);
        ck_assert_int_eq(arena_prepare_limit(a, arena_limit_max(a)), 0);
        ck_assert_uint_eq(arena_limit_max(a), extent_max_limit(&grid));
        ck_assert_uint_eq(arena_limit_max(a), ZONES + (EXTENT_MAX_COUNT - 10) * LARGE);
        if (_i == 1) { /* before the region is there */
                arena_set_limit(a, 10 * MIB);
                ck_assert_int_eq(arena_plan(a, 4 * MIB, 0, &plan), 0);
                ck_assert_uint_eq(plan.new_bytes, 4 * MIB);
                arena_locate(a, 0, &place);
                ck_assert_uint_eq(arena_slots(a, place.region_bytes - 1, 1, &last), 8);
                arena_set_limit(a, ZONES + 2 * LARGE);
        }
        (void)grow(1024);
        ck_assert_uint_le(arena_n_slots(a), 4); /* no table for what may be made later */
        arena_set_limit(a, ZONES + 20 * LARGE);
        ck_assert_int_eq(arena_plan(a, ZONES + 20 * LARGE, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, round_to_large(ZONES + 20 * LARGE));
        arena_locate(a, plan.offset, &place);
        ck_assert_uint_eq(place.offset, 0);
        first = arena_slots(a, plan.offset, place.region_bytes, &last);
        ck_assert_uint_eq(last + 1 - first, round_to_large(2 * (ZONES + 20 * LARGE)) / LARGE);
        ck_assert_uint_eq(arena_extent_room(a, E), 9 + 20 + 1);
}

/* ---- looking, and backing at once ---------------------------------------- */

TEST(test_slots_and_places)
{
        struct arena_place place;
        struct grown g, h;
        size_t slot, last;

        open_arena(8 * E + SHORT);
        g = grow(2 * E + SHORT);
        h = grow(2 * E);
        ck_assert_uint_eq(g.offset, 0);
        ck_assert_uint_eq(h.offset, 2 * E + SHORT);
        ck_assert_uint_eq(arena_slots(a, 0, 1, &last), 0);
        ck_assert_uint_eq(last, 0);
        ck_assert_uint_eq(arena_slots(a, 0, SHORT, &last), 0);
        ck_assert_uint_eq(last, 0);
        ck_assert_uint_eq(arena_slots(a, SHORT - 256, 512, &last), 0);
        ck_assert_uint_eq(last, 1);
        ck_assert_uint_eq(arena_slots(a, SHORT, E, &last), 1);
        ck_assert_uint_eq(last, 1);
        slot = arena_slots(a, h.offset, 2 * E, &last);
        ck_assert_uint_eq(slot, 3);
        ck_assert_uint_eq(last, 4);
        for (; slot <= last; slot++) {
                struct ledger_extent *e = ledger_extent_at(ledger, arena_slot_extent(a, slot));

                ck_assert_uint_eq(e->offset, SHORT + (slot - 1) * E);
                ck_assert_uint_eq(e->n_bytes, E);
                ck_assert_uint_eq(e->quota, quota);
                ck_assert_int_ge(e->fd, 0);
        }
        ck_assert_uint_eq(arena_slot_extent(a, 5), LEDGER_NONE);
        arena_locate(a, h.offset + 256, &place);
        ck_assert_uint_eq(place.offset, h.offset + 256);
        ck_assert_uint_eq(place.region_id, ((uint64_t)quota + 1) << 32);
}

/* ---- each extent a region of its own ------------------------------------------- */

static struct arena_place place_of(uint64_t offset)
{
        struct arena_place place;

        arena_locate(a, offset, &place);
        return place;
}

TEST(test_extent_sizes)
{
        static const struct {
                uint64_t n_bytes, room, extent_bytes;
        } cases[] = {
                { 1, GIB, 32 * MIB },
                { 16 * MIB - 1, GIB, 32 * MIB },
                { 16 * MIB, GIB, 16 * MIB },
                { 16 * MIB + 1, GIB, 18 * MIB },
                { 100 * MIB, 0, 100 * MIB }, /* needs so much, whether it is there or not */
                { MIB, 7 * MIB, 6 * MIB },
                { MIB, 34 * MIB, 32 * MIB },
                { MIB, 0, 2 * MIB },
                { 5 * MIB, 3 * MIB, 6 * MIB },
                { 16 * MIB - 1, 20 * MIB, 20 * MIB },
        };
        struct extent_sizes grid;
        struct bfc_growth plan;

        open_shared(DEVICE_SHARE_CUDA_IPC, GIB);
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                ck_assert_int_eq(arena_plan(a, cases[i].n_bytes, cases[i].room, &plan), 0);
                ck_assert_uint_eq(plan.new_bytes, cases[i].extent_bytes);
                ck_assert_uint_eq(plan.offset, plan.span.begin);
                ck_assert_uint_eq(plan.span.end - plan.span.begin, cases[i].extent_bytes);
                check();
        }
        ck_assert_int_eq(arena_plan(a, 0, GIB, &plan), -EINVAL);
        ck_assert_int_eq(arena_plan(a, BFC_MAX_SPACE + 1, GIB, &plan), -EINVAL);
        grid = extent_sizes_for(DEVICE_SHARE_CUDA_IPC, true, 64 * GIB, 4096);
        ck_assert_uint_eq(grid.extent_bytes, 2 * MIB);
        ck_assert_uint_eq(grid.extents_per_zone, 0);
        ck_assert_uint_eq(extent_max_count(DEVICE_SHARE_CUDA_IPC, GIB, &grid), 128);
}

TEST(test_region_per_extent)
{
        struct grown g[3];
        bfc_handle h;
        size_t slot, last;
        uint64_t id, offset;

        open_shared(DEVICE_SHARE_CUDA_IPC, 128 * MIB);
        g[0] = grow(MIB);
        ck_assert_int_eq(arena_alloc(a, MIB, &h, &offset), 0); /* beside it */
        ck_assert_int_eq(arena_alloc(a, 31 * MIB, &h, &offset), BFC_NO_FIT);
        g[1] = grow(40 * MIB);
        g[2] = grow(48 * MIB); /* regions never join: none spans two */
        ck_assert_uint_eq(arena_n_extents(a), 3);
        id = place_of(g[0].offset).region_id;
        slot = arena_slots(a, offset, 1, &last);
        ck_assert_uint_eq(id,
                          ARENA_REGION_OF_EXTENT | ledger_extent_at(ledger, arena_slot_extent(a, slot))->id);
        ck_assert_uint_eq(place_of(offset).region_id, id);
        ck_assert_uint_eq(place_of(offset).offset, MIB);
        ck_assert_uint_eq(place_of(offset).region_bytes, 32 * MIB);
        for (unsigned i = 1; i < 3; i++) {
                ck_assert_uint_eq(place_of(g[i].offset).region_bytes, i == 1 ? 40 * MIB : 48 * MIB);
                ck_assert_uint_eq(place_of(g[i].offset).offset, 0);
                ck_assert_uint_gt(place_of(g[i].offset).region_id, id);
                id = place_of(g[i].offset).region_id;
                slot = arena_slots(a, g[i].offset, (i == 1 ? 40 : 48) * MIB, &last);
                ck_assert_uint_eq(slot, last);
                ck_assert_int_eq(arena_slot_memory(a, slot)->fd, -1);
                ck_assert_int_eq(arena_slot_memory(a, slot)->share, DEVICE_SHARE_CUDA_IPC);
                ck_assert_uint_eq(arena_slot_memory(a, slot)->handle[4], device.n_makes - 2 + i);
        }

        /* A region goes with its extent, its id for ever, its slot for the next one. */
        slot = arena_slots(a, g[1].offset, 1, &last);
        ck_assert_int_eq(arena_dealloc(a, g[1].handle), 0);
        ck_assert_uint_eq(arena_releasable(a, NULL), 40 * MIB);
        ck_assert_uint_eq(release(MIB), 40 * MIB);
        ck_assert_uint_eq(account.charged_bytes, 80 * MIB);
        offset = g[1].offset;
        g[1] = grow(38 * MIB);
        ck_assert_uint_eq(g[1].offset, offset);
        ck_assert_uint_gt(place_of(offset).region_id, id);
        ck_assert_uint_eq(arena_slots(a, offset, 1, &last), slot);
}

/* 70 MiB in blocks of one: what is left below 32 is an extent too. */
TEST(test_small_blocks_fill_the_limit)
{
        bfc_handle h;
        uint64_t offset;

        open_shared(DEVICE_SHARE_CUDA_IPC, 70 * MIB);
        for (unsigned i = 0; i < 70; i++)
                if (arena_alloc(a, MIB, &h, &offset) != 0)
                        grow(MIB);
        ck_assert_uint_eq(account.charged_bytes, 70 * MIB);
        ck_assert_uint_eq(arena_n_extents(a), 3);
        ck_assert_int_eq(arena_alloc(a, 256, &h, &offset), BFC_NO_FIT);
}

TEST(test_make_fails_for_a_region)
{
        uint64_t id = 0;
        struct bfc_growth plan;
        struct grown g;

        open_shared(DEVICE_SHARE_CUDA_IPC, 128 * MIB);
        for (unsigned i = 0; i < 3; i++) {
                fake_device_fail_make(&device, 1, -ENOMEM);
                begin(20 * MIB, &plan, &g);
                ck_assert_uint_eq(worker_poll(worker), 1);
                ck_assert_int_eq(g.result, -ENOMEM);
                ck_assert_uint_eq(account.charged_bytes, i * 20 * MIB);
                check();
                g = grow(20 * MIB);
                ck_assert_uint_gt(place_of(g.offset).region_id, id);
                id = place_of(g.offset).region_id;
                ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
                fake_device_fail_destroy(&device, 1, -EIO);
                ck_assert_uint_eq(release(1), 20 * MIB);
                ck_assert_uint_eq(arena_unreclaimed_bytes(a), (i + 1) * 20 * MIB);
        }
}

TEST(test_extents_are_bounded)
{
        struct extent_sizes grid = extent_sizes_for(DEVICE_SHARE_CUDA_IPC, true, 160 * MIB, MIB);
        struct bfc_growth plan;
        uint64_t n;

        open_shared(DEVICE_SHARE_CUDA_IPC, 160 * MIB);
        n = extent_max_count(DEVICE_SHARE_CUDA_IPC, 160 * MIB, &grid);
        for (uint64_t i = 0; i < n; i++)
                grow_in(2 * MIB, 0);
        ck_assert_uint_eq(arena_n_extents(a), n);
        ck_assert_int_eq(arena_plan(a, 2 * MIB, 0, &plan), -ENOMEM);
        check();
}

TEST(test_back_one_extent)
{
        struct charge charge;
        uint64_t missing, offset;
        bfc_handle h;

        open_shared(DEVICE_SHARE_CUDA_IPC, 100 * MIB);
        ck_assert_int_eq(charge_take(&account, 100 * MIB, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, charge.n_bytes, &charge), 0);
        ck_assert_uint_eq(arena_n_extents(a), 1);
        ck_assert_int_eq(arena_alloc(a, 100 * MIB, &h, &offset), 0);
        ck_assert_uint_eq(place_of(offset).region_bytes, 100 * MIB);
}

/* Extents of all sizes come and go; every region id is new. */
TEST(test_regions_come_and_go)
{
        struct grown held[24] = { { 0 } };
        uint64_t seed = 3, id = 0, offset;
        unsigned n_grown = 0;

        open_shared(DEVICE_SHARE_CUDA_IPC, 512 * MIB);
        for (unsigned step = 0; step < 4000; step++) {
                struct grown *g = &held[random_next(&seed) % 24];
                uint64_t n_bytes = 1 + random_next(&seed) % (random_next(&seed) % 2 ? 3 * MIB : 60 * MIB);
                struct bfc_growth plan;

                if (step % 8 == 0)
                        release(UINT64_MAX);
                if (g->handle != 0) {
                        ck_assert_int_eq(arena_dealloc(a, g->handle), 0);
                        g->handle = 0;
                } else if (arena_alloc(a, n_bytes, &g->handle, &offset) != 0) {
                        ck_assert_int_eq(arena_plan(a, n_bytes, account_room(&account), &plan), 0);
                        if (plan.new_bytes > account_room(&account))
                                release(plan.new_bytes - account_room(&account));
                        if (plan.new_bytes > account_room(&account))
                                continue;
                        *g = grow(n_bytes);
                        ck_assert_uint_gt(place_of(g->offset).region_id, id);
                        id = place_of(g->offset).region_id;
                        n_grown++;
                }
        }
        ck_assert_uint_gt(n_grown, 300);
}

/* What a session was given is struck with its extent. */
TEST(test_back)
{
        struct charge charge;
        bfc_handle handle;
        uint64_t missing, offset;

        open_arena(8 * E + SHORT);
        ck_assert_int_eq(charge_take(&account, account.limit_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, charge.n_bytes, &charge), 0);
        ck_assert_ptr_null(charge.account);
        ck_assert_uint_eq(device.n_makes, 9);
        check();
        ck_assert_int_eq(arena_alloc(a, 8 * E + SHORT, &handle, &offset), 0);
        ck_assert_uint_eq(offset, 0);
        ck_assert_uint_eq(n_short_extents(), 1);
}

TEST(test_back_fails)
{
        struct charge charge;
        uint64_t missing;

        open_arena(8 * E + SHORT);
        ck_assert_int_eq(charge_take(&account, account.limit_bytes, &charge, &missing), 0);
        fake_device_fail_make(&device, 4, -ENOMEM);
        ck_assert_int_eq(arena_back(a, charge.n_bytes, &charge), -ENOMEM);
        ck_assert_uint_eq(charge.n_bytes, 6 * E);
        charge_drop(&charge);
        check();
        ck_assert_uint_eq(account.charged_bytes, 2 * E + SHORT);
}

/* ---- retirement ------------------------------------------------------------ */

static void on_retire(struct broker *b, const uint32_t *extents, size_t n_extents)
{
        ck_assert_ptr_eq(b, &n_asked);
        for (size_t i = 0; i < n_extents; i++)
                asked[n_asked++] = extents[i];
}

static bool on_unmaps_soon(const struct broker *b, uint32_t extent)
{
        (void)extent;
        ck_assert_ptr_eq(b, &n_asked);
        return !unmaps_late;
}

/* Four free extents; the session was given
 * those of slots 1 and 2. */
static void open_with_exports(uint32_t *ret_session, uint32_t *ret_exports)
{
        struct ledger_session facts = { .tenant = "t" };
        struct grown g;

        n_asked = 0;
        open_arena(8 * E);
        ck_assert_int_eq(ledger_session_add(ledger, &facts, ret_session), 0);
        g = grow(4 * E);
        for (unsigned i = 0; i < 2; i++)
                ck_assert_int_eq(
                        ledger_export_add(ledger, *ret_session, arena_slot_extent(a, 1 + i), &ret_exports[i]),
                        0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
}

static void clear_export(uint32_t export, bool was_late)
{
        uint32_t extent = ledger_export_at(ledger, export)->extent;

        ledger_export_clear(ledger, export);
        arena_note_export_gone(a, extent, was_late);
}

/* ---- exact blocks --------------------------------------------------------------- */

static struct grown grow_plan(const struct bfc_growth *plan)
{
        struct charge charge;
        struct grown g = { 0 };
        uint64_t missing;

        ck_assert_int_eq(charge_take(&account, plan->new_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_grow(a, plan, &charge, on_grown, &g), 0);
        check();
        worker_drain(worker);
        ck_assert_uint_eq(g.n_calls, 1);
        check();
        return g;
}

static struct grown grow_exact(uint64_t n_bytes)
{
        struct bfc_growth plan;

        ck_assert_int_eq(arena_plan_in_extent(a, n_bytes, account_room(&account), &plan), 0);
        ck_assert_uint_eq(plan.n_bytes, (n_bytes + E - 1) / E * E);
        ck_assert_uint_eq(plan.new_bytes, plan.n_bytes);
        return grow_plan(&plan);
}

static uint64_t release_exact(void)
{
        static unsigned n_released; /* some are released later */
        uint64_t n_bytes = arena_release_exact(a, on_released, &n_released);

        check();
        worker_drain(worker);
        check();
        return n_bytes;
}

/* Each has one extent of just its size, which no other block gets and which goes with it. */
TEST(exact_blocks_come_and_go)
{
        struct arena_place place;
        struct grown g, large;
        uint64_t offset;
        bfc_handle handle;
        size_t n_slots;

        open_arena(200 * E);
        large = grow(E / 2);
        for (unsigned i = 0; i < 3; i++) {
                g = grow_exact(3 * E + 256);
                ck_assert_int_eq(g.result, 0);
                ck_assert_uint_eq(arena_n_extents(a), 2);
                ck_assert_uint_eq(account.charged_bytes, 5 * E);
                arena_locate(a, g.offset, &place);
                ck_assert_uint_eq(place.region_bytes, 4 * E);
                ck_assert_uint_eq(place.offset, 0);
                ck_assert(place.region_id & ARENA_REGION_OF_EXTENT);
                arena_locate(a, large.offset, &place);
                ck_assert(!(place.region_id & ARENA_REGION_OF_EXTENT));
                ck_assert(arena_is_whole(a, g.offset, 4 * E));
                ck_assert_int_eq(arena_alloc(a, E, &handle, &offset), BFC_NO_FIT);
                ck_assert_int_eq(arena_alloc_in_extent(a, 3 * E, &handle, &offset), BFC_NO_FIT);
                n_slots = i == 0 ? arena_n_slots(a) : n_slots;
                ck_assert_uint_eq(arena_n_slots(a), n_slots); /* they are used again */
                ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
                ck_assert_uint_eq(release_exact(), 4 * E);
                ck_assert_uint_eq(account.charged_bytes, E);
                ck_assert_uint_eq(release_exact(), 0);
        }
        ck_assert_int_eq(arena_dealloc(a, large.handle), 0);
}

/* Large regions are added below them. */
TEST(exact_blocks_are_above_large_regions)
{
        struct arena_place place;
        struct grown g, h, large;

        fragment();
        g = grow_exact(2 * E);
        h = grow_exact(3 * E);
        ck_assert_uint_eq(h.offset, g.offset - 3 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release_exact(), 2 * E);
        g = grow_exact(2 * E);
        ck_assert_uint_eq(h.offset, g.offset - 3 * E);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, h.handle), 0);
        ck_assert_uint_eq(release_exact(), 5 * E);
        large = grow(5 * E); /* in a second region */
        arena_locate(a, large.offset, &place);
        ck_assert_uint_eq(place.region_id & UINT32_MAX, 1);
        ck_assert_int_eq(arena_dealloc(a, large.handle), 0);
        release(UINT64_MAX);
        g = grow_exact(2 * E);
        ck_assert_uint_gt(g.offset, large.offset);
        arena_locate(a, large.offset, &place);
        ck_assert_uint_eq(place.region_id & UINT32_MAX, 1);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release_exact(), 2 * E);
}

/* The device refuses it, or does not return it. */
TEST(exact_blocks_fail_as_others)
{
        struct grown g;

        open_arena(200 * E);
        fake_device_fail_make(&device, 1, -ENOMEM);
        g = grow_exact(20 * E);
        ck_assert_int_eq(g.result, -ENOMEM);
        ck_assert_uint_eq(account.charged_bytes, 0);
        g = grow_exact(20 * E);
        ck_assert_int_eq(g.result, 0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        fake_device_fail_destroy(&device, 1, -EIO);
        ck_assert_uint_eq(release_exact(), 20 * E);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), 20 * E);
        ck_assert_uint_eq(account.charged_bytes, 20 * E);
        ck_assert_uint_eq(arena_n_extents(a), 0);
}

/* A session that may not unmap it is not asked: the next of its size gets it, or others use it, and it is released like
 * others. */
LOOP_TEST(exact_blocks_that_sessions_have, 2)
{
        struct ledger_session facts = { .tenant = "t" };
        uint32_t session, export;
        bfc_handle handle, other;
        uint64_t offset;
        size_t last;
        struct grown g;

        n_asked = 0;
        unmaps_late = _i == 1;
        open_arena(200 * E);
        ck_assert_int_eq(ledger_session_add(ledger, &facts, &session), 0);
        g = grow_exact(4 * E);
        ck_assert_int_eq(ledger_export_add(ledger, session,
                                           arena_slot_extent(a, arena_slots(a, g.offset, 4 * E, &last)),
                                           &export),
                         0);
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        ck_assert_uint_eq(release_exact(), unmaps_late ? 0 : 4 * E);
        ck_assert_uint_eq(n_asked, !unmaps_late);
        ck_assert_uint_eq(account.charged_bytes, 4 * E);
        ck_assert_int_eq(arena_alloc_in_extent(a, 3 * E, &handle, &offset), BFC_NO_FIT);
        ck_assert_int_eq(arena_alloc_in_extent(a, 4 * E, &handle, &offset), unmaps_late ? 0 : BFC_NO_FIT);
        if (unmaps_late) {
                ck_assert_uint_eq(offset, g.offset);
                ck_assert_int_eq(arena_alloc_in_extent(a, 4 * E, &other, &offset), BFC_NO_FIT);
                ck_assert_uint_eq(release_exact(), 0);
                ck_assert_int_eq(arena_dealloc(a, handle), 0);
                ck_assert_uint_eq(release_exact(), 0);
                ck_assert_int_eq(arena_alloc(a, E, &handle, &offset), 0);
                ck_assert_uint_eq(offset, g.offset);
                unmaps_late = false;
                ck_assert_int_eq(arena_dealloc(a, handle), 0);
                ck_assert_uint_eq(release_exact(), 4 * E);
        }
        ck_assert_int_eq(arena_alloc(a, E, &handle, &offset), BFC_NO_FIT);
        clear_export(export, false);
        worker_drain(worker);
        ck_assert_uint_eq(account.charged_bytes, 0);
        ledger_session_clear(ledger, session);
}

/* Of the host they have a limit: others wait while one is made. */
TEST(exact_blocks_of_the_host_are_bounded)
{
        struct bfc_growth plan;

        device.device.charges_process = true;
        open_arena(2 * GIB);
        ck_assert_uint_eq(arena_max_in_extent(a), GIB);
        ck_assert_int_eq(arena_plan_in_extent(a, GIB + 1, 0, &plan), -EINVAL);
        ck_assert_int_eq(arena_plan_in_extent(a, GIB, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, GIB);
}

/* A limit of nearly all there is leaves them little address space, and a region that an earlier version made none. */
TEST(exact_blocks_need_address_space)
{
        struct bfc_growth plan;
        bfc_handle handle;
        uint64_t offset;

        one_size = 4 * GIB;
        open_arena(BFC_MAX_SPACE / one_size * one_size);
        for (unsigned i = 0; i < 128; i++) {
                int r = arena_alloc_in_extent(a, 64 * MIB, &handle, &offset);

                ck_assert(r == 0 || r == BFC_NO_FIT);
                if (r == 0)
                        continue;
                ck_assert_int_eq(arena_plan_in_extent(a, 64 * MIB, 0, &plan), 0);
                ck_assert_int_eq(grow_plan(&plan).result, 0);
        }
        ck_assert_uint_le(account.charged_bytes, 3 * one_size);
        ck_assert_int_eq(arena_plan_in_extent(a, one_size + 1, 0, &plan), -ENOMEM);
}

/* So many may be smaller than the largest extents: then they are in these. */
TEST(small_exact_blocks_are_bounded)
{
        struct extent_sizes sizes = extent_sizes_for(DEVICE_SHARE_FD, true, 160 * GIB, E);
        struct bfc_growth plan;
        uint64_t n = extent_max_exact(DEVICE_SHARE_FD, 160 * GIB, &sizes);
        uint64_t more;

        ck_assert_uint_eq(n, 256);
        more = extent_max_records(DEVICE_SHARE_FD, 160 * GIB, &sizes) -
               extent_max_count(DEVICE_SHARE_FD, 160 * GIB, &sizes);
        ck_assert_uint_eq(more, n);
        sizes = extent_sizes_for(DEVICE_SHARE_FD, true, 4 * GIB, E);
        ck_assert_uint_eq(extent_max_exact(DEVICE_SHARE_FD, 4 * GIB, &sizes), 0);
        ck_assert_uint_eq(extent_max_exact(DEVICE_SHARE_CUDA_IPC, 160 * GIB, &sizes), 0);

        one_size = 64 * MIB;
        open_arena(16 * GIB);
        ck_assert_int_eq(arena_plan_in_extent(a, 32 * MIB - 1, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, 64 * MIB); /* not large enough for one of its own */
        for (unsigned i = 0; i < 256; i++)
                ck_assert_int_eq(grow_exact(32 * MIB).result, 0);
        ck_assert_int_eq(arena_plan_in_extent(a, 32 * MIB, 0, &plan), 0);
        ck_assert_uint_eq(plan.new_bytes, 64 * MIB);
        ck_assert_int_eq(grow_exact(64 * MIB).result,
                         0); /* takes the record of one that the limit has no room for */
}

/* Another process has what its session has confirmed. */
TEST(kept_extents_stay_charged_and_are_looked_at)
{
        uint32_t session, exports[2];
        unsigned n_released = 0;

        open_with_exports(&session, exports);
        device.is_open_elsewhere = true;
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), 4 * E);
        clear_export(exports[0], false);
        clear_export(exports[1], false);
        ck_assert(!arena_has_kept(a));
        worker_drain(worker);
        ck_assert_uint_eq(n_released, 1);
        ck_assert_uint_eq(device.n_looks, 2);
        ck_assert_uint_eq(account.charged_bytes, 2 * E);
        ck_assert_uint_eq(arena_leaving_bytes(a), 2 * E);
        ck_assert(arena_has_kept(a) && !arena_is_quiet(a));
        for (unsigned i = 0; i < 2; i++)
                ck_assert_uint_eq(ledger_extent_at(ledger, asked[i])->is_leaving, 1);
        check();
        /* One each time, in turns. */
        for (unsigned i = 0; i < 4; i++) {
                device.is_open_elsewhere = i < 2;
                ck_assert_uint_eq(arena_look_at_kept(a, 1), 1);
                worker_drain(worker);
                ck_assert_uint_eq(device.n_looks, i < 2 ? 3 + i : 4);
                check();
        }
        ck_assert_uint_eq(n_released, 3);
        ck_assert_uint_eq(account.charged_bytes, 0);
        ck_assert(!arena_has_kept(a) && arena_is_quiet(a));
        ck_assert_uint_eq(arena_look_at_kept(a, 1), 0);
        ledger_session_clear(ledger, session);
}

/* Of a previous process. They are not all in one operation, which is looked at as a whole. */
TEST(many_inherited_extents_are_looked_at_in_turns)
{
        enum { N = 40, N_OF_ONE = 32 };
        struct ledger_session facts = { .tenant = "t" };
        uint32_t session, export;
        unsigned n_released = 0;
        struct grown g;

        open_arena(N * E);
        ck_assert_int_eq(ledger_session_add(ledger, &facts, &session), 0);
        g = grow(N * E);
        for (size_t i = 0; i < N; i++) {
                ck_assert_int_eq(ledger_export_add(ledger, session, arena_slot_extent(a, i), &export), 0);
                ledger_export_clear(ledger, export);
                ledger_extent_leave(ledger, arena_slot_extent(a, i));
        }
        ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
        device.is_open_elsewhere = true;
        ck_assert_int_eq(arena_resume_release(a, on_released, &n_released), 0);
        worker_drain(worker);
        ck_assert_uint_eq(device.n_looks, N);
        ck_assert_uint_eq(arena_leaving_bytes(a), N * E);
        check();
        ck_assert_uint_eq(arena_look_at_kept(a, 1), N_OF_ONE);
        device.is_open_elsewhere = false;
        ck_assert_uint_eq(arena_look_at_kept(a, 1), N - N_OF_ONE);
        worker_drain(worker);
        ck_assert_uint_eq(arena_look_at_kept(a, N), 0);
        ck_assert_uint_eq(account.charged_bytes, 0);
        check();
        ledger_session_clear(ledger, session);
}

TEST(test_retired_one_by_one)
{
        uint32_t session, exports[2];
        unsigned n_released = 0;
        bfc_handle handle;
        uint64_t offset;

        open_with_exports(&session, exports);
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), 4 * E);
        check();
        ck_assert_uint_eq(n_asked, 2);
        ck_assert_uint_eq(arena_leaving_bytes(a), 2 * E);
        ck_assert_uint_eq(arena_suspended_bytes(a), 2 * E);
        ck_assert_uint_eq(arena_releasable(a, NULL), 0);
        ck_assert_int_eq(arena_alloc(a, 256, &handle, &offset), BFC_NO_FIT);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(n_released, 1);
        ck_assert_uint_eq(device.n_destroys, 2);
        ck_assert_uint_eq(account.charged_bytes, 2 * E);
        check();

        arena_note_late_export(a, asked[1]);
        ck_assert_uint_eq(arena_suspended_bytes(a), E);
        ck_assert_uint_eq(arena_pending_bytes(a), 2 * E);
        check();
        /* Another range grows and goes meanwhile. */
        ck_assert_int_eq(arena_dealloc(a, grow_beside(E).handle), 0);
        ck_assert_uint_eq(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), E);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(n_released, 2);

        clear_export(exports[1], false);
        ck_assert_uint_eq(arena_leaving_bytes(a), E);
        check();
        ck_assert_uint_eq(worker_poll(worker), 1);
        clear_export(exports[0], true);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(n_released, 4);
        ck_assert_uint_eq(account.charged_bytes, 0);
        ck_assert_uint_eq(arena_suspended_bytes(a) + arena_leaving_bytes(a) + arena_pending_bytes(a), 0);
        ledger_session_clear(ledger, session);
}

TEST(retired_extent_is_unreclaimed)
{
        uint32_t session, exports[2];
        unsigned n_released = 0;

        open_with_exports(&session, exports);
        arena_release(a, UINT64_MAX, NULL, on_released, &n_released);
        ck_assert_uint_eq(worker_poll(worker), 1);
        fake_device_fail_destroy(&device, 1, -EIO);
        clear_export(exports[0], false);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(arena_unreclaimed_bytes(a), E);
        ck_assert_uint_eq(account.charged_bytes, 2 * E); /* the other one is still out */
        clear_export(exports[1], false);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(account.charged_bytes, E);
        ledger_session_clear(ledger, session);
}

struct live {
        bfc_handle handle;
        uint64_t offset, n_bytes;
};

/* The picture as it would be drawn anew of these blocks. */
static void check_picture(const struct live *live, size_t n_live)
{
        char drawn[PICTURE_CHARACTERS + 1], expected[PICTURE_CHARACTERS + 1];
        struct bfc_range span = { UINT64_MAX, 0 };
        struct picture picture;

        for (size_t i = 0; i < arena_n_slots(a); i++) {
                uint32_t extent = arena_slot_extent(a, i);

                if (extent == LEDGER_NONE)
                        continue;
                if (span.end == 0)
                        span.begin = ledger_extent_at(ledger, extent)->offset;
                span.end =
                        ledger_extent_at(ledger, extent)->offset + ledger_extent_at(ledger, extent)->n_bytes;
        }
        picture_begin(&picture, span.end > 0 ? span : (struct bfc_range){ 0, 0 });
        for (size_t i = 0; i < arena_n_slots(a); i++) {
                uint32_t extent = arena_slot_extent(a, i);
                struct occupancy o;
                struct bfc_range range;

                if (extent == LEDGER_NONE)
                        continue;
                range.begin = ledger_extent_at(ledger, extent)->offset;
                range.end = range.begin + ledger_extent_at(ledger, extent)->n_bytes;
                occupancy_open(&o, range.end - range.begin);
                for (size_t k = 0; k < n_live; k++) {
                        uint64_t begin = live[k].offset, end = begin + live[k].n_bytes;
                        struct bfc_range part = { begin > range.begin ? begin - range.begin : 0,
                                                  (end < range.end ? end : range.end) - range.begin };

                        if (begin < range.end && end > range.begin)
                                occupancy_add(&o, part);
                }
                picture_add(&picture, range, &o, false);
                occupancy_close(&o);
        }
        picture_draw(&picture, expected);
        arena_draw(a, drawn);
        ck_assert_str_eq(drawn, expected);
}

/* Blocks come and go, extents too; the picture is always that of what is there. */
TEST(occupancy_pictures)
{
        struct live live[200];
        size_t n_live = 0, n_drawn = 0;
        uint64_t seed = 611;
        unsigned n_released = 0;

        printf("# seed %llu\n", (unsigned long long)seed);
        open_arena(32 * MIB + SHORT);
        check_picture(live, 0);
        for (unsigned step = 0; step < 4000; step++) {
                uint64_t n_bytes = 1 + random_next(&seed) % (step % 5 == 0 ? 5 * MIB : MIB / 4);
                struct live *l = &live[n_live];
                size_t victim = n_live > 0 ? (size_t)(random_next(&seed) % n_live) : 0;
                size_t most = step / 200 % 2 == 0 ? 200 : 8;
                int r = BFC_NO_FIT;

                if (n_live < most && random_next(&seed) % 100 < 55)
                        r = arena_alloc(a, n_bytes, &l->handle, &l->offset);
                if (r == BFC_NO_FIT && n_live < most && random_next(&seed) % 4 == 0) {
                        struct bfc_growth plan;
                        struct charge charge;
                        struct grown g = { 0 };
                        uint64_t missing;

                        if (arena_plan(a, n_bytes, UINT64_MAX, &plan) == 0 &&
                            charge_take(&account, plan.new_bytes, &charge, &missing) == 0) {
                                ck_assert_int_eq(arena_grow(a, &plan, &charge, on_grown, &g), 0);
                                worker_drain(worker);
                                l->handle = g.handle;
                                l->offset = g.offset;
                                r = g.result;
                        }
                }
                if (r == 0) {
                        l->n_bytes = bfc_block_bytes(n_bytes);
                        n_live++;
                } else if (n_live > 0) {
                        ck_assert_int_eq(arena_dealloc(a, live[victim].handle), 0);
                        live[victim] = live[--n_live];
                }
                if (step % 100 == 99) {
                        (void)arena_release(a, UINT64_MAX, NULL, on_released, &n_released);
                        worker_drain(worker);
                }
                if (step % 8 == 0) {
                        check_picture(live, n_live);
                        n_drawn++;
                }
        }
        check();
        ck_assert_uint_gt(n_released, 5);
        while (n_live > 0)
                ck_assert_int_eq(arena_dealloc(a, live[--n_live].handle), 0);
        check_picture(live, 0);
}

static uint32_t noted_mib, noted_oom_kills;

static void note_growing(void)
{
        noted_mib = ledger_quota_at(ledger, quota)->growing_mib;
        noted_oom_kills = ledger_quota_at(ledger, quota)->oom_kills;
}

/* Whatever may cost the process its life is written down while it lasts. */
TEST(growth_is_recorded_in_ledger)
{
        struct bfc_growth plan;
        struct charge charge;
        uint64_t missing;
        struct grown g = { 0 };
        unsigned n_released = 0;

        open_arena(64 * E);
        device.on_make = note_growing;
        for (int i = 0; i < 3; i++) { /* not where nothing is charged to the process; and where it fails */
                device.device.charges_process = i > 0;
                if (i == 2)
                        fake_device_fail_make(&device, 1, -ENOMEM);
                ck_assert_int_eq(arena_plan(a, 3 * E, UINT64_MAX, &plan), 0);
                ck_assert_int_eq(charge_take(&account, plan.new_bytes, &charge, &missing), 0);
                ck_assert_int_eq(arena_grow(a, &plan, &charge, on_grown, &g), 0);
                ck_assert_uint_eq(ledger_quota_at(ledger, quota)->growing_mib, 0);
                noted_mib = 99;
                ledger_quota_grows(ledger, quota, 1, host_free_oom_kills() - 1);
                ledger_quota_has_grown(ledger, quota, 1);
                worker_drain(worker);
                ck_assert(noted_oom_kills == host_free_oom_kills() - (i == 0));
                ck_assert_uint_eq(noted_mib, i == 0 ? 0 : plan.new_bytes / MIB);
                ck_assert_uint_eq(ledger_quota_at(ledger, quota)->growing_mib, 0);
                ck_assert_int_eq(g.result, i == 2 ? -ENOMEM : 0);
                if (g.result < 0)
                        continue;
                ck_assert_int_eq(arena_dealloc(a, g.handle), 0);
                ck_assert_uint_gt(arena_release(a, UINT64_MAX, NULL, on_released, &n_released), 0);
                worker_drain(worker);
        }
        ck_assert_int_eq(charge_take(&account, 4 * E, &charge, &missing), 0);
        ck_assert_int_eq(arena_back(a, 4 * E, &charge), 0);
        ck_assert_uint_eq(noted_mib, E / MIB); /* one after the other */
        ck_assert_uint_eq(ledger_quota_at(ledger, quota)->growing_mib, 0);
}

/* ---- extents that no session has received ----------------------------------------------------- */

static int alloc_unseen(uint64_t n_bytes, struct grown *ret, uint64_t *ret_n_bytes)
{
        int r = arena_alloc_unseen(a, n_bytes, &ret->handle, &ret->offset, ret_n_bytes);

        check();
        return r;
}

static void export_at(uint64_t offset)
{
        size_t last, slot = arena_slots(a, offset, 1, &last);
        struct ledger_session facts = { .tenant = "t" };
        uint32_t session, export;

        ck_assert_int_eq(ledger_session_add(ledger, &facts, &session), 0);
        ck_assert_int_eq(ledger_export_add(ledger, session, arena_slot_extent(a, slot), &export), 0);
        ledger_export_clear(ledger, export);
        ledger_session_clear(ledger, session);
}

TEST(unseen_extents_are_used_again)
{
        struct grown g[3], again, more;
        uint64_t n_bytes;

        open_arena(16 * E);
        ck_assert_int_eq(alloc_unseen(E, &again, &n_bytes), BFC_NO_FIT);
        for (unsigned i = 0; i < 3; i++)
                g[i] = grow((i + 1) * E);
        ck_assert_int_eq(alloc_unseen(1, &again, &n_bytes), BFC_NO_FIT);
        ck_assert_int_eq(arena_dealloc(a, g[2].handle), 0);
        ck_assert_int_eq(arena_dealloc(a, g[0].handle), 0);
        ck_assert_int_eq(alloc_unseen(3 * E + 1, &again, &n_bytes), BFC_NO_FIT);
        ck_assert_int_eq(alloc_unseen(E + 1, &again, &n_bytes), 0); /* whole ones */
        ck_assert_uint_eq(n_bytes, 2 * E);
        ck_assert_uint_eq(again.offset, g[2].offset);
        ck_assert_int_eq(alloc_unseen(E, &more, &n_bytes), 0); /* the lowest */
        ck_assert_uint_eq(more.offset, g[0].offset);
        ck_assert_int_eq(arena_dealloc(a, more.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, again.handle), 0);

        export_at(g[2].offset + E); /* the middle one of three: once is enough */
        export_at(g[0].offset);
        ck_assert_int_eq(alloc_unseen(E + 1, &again, &n_bytes), BFC_NO_FIT);
        ck_assert_int_eq(alloc_unseen(E, &again, &n_bytes), 0);
        ck_assert_uint_eq(again.offset, g[2].offset);
        ck_assert_int_eq(alloc_unseen(E, &more, &n_bytes), 0);
        ck_assert_uint_eq(more.offset, g[2].offset + 2 * E);
        ck_assert_int_eq(arena_dealloc(a, again.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, more.handle), 0);
        ck_assert_uint_eq(release(UINT64_MAX), 4 * E);
        g[0] = grow(E); /* new memory in the same place */
        ck_assert_int_eq(arena_dealloc(a, g[0].handle), 0);
        ck_assert_int_eq(alloc_unseen(E, &again, &n_bytes), 0);
        ck_assert_int_eq(arena_dealloc(a, again.handle), 0);
        ck_assert_int_eq(arena_dealloc(a, g[1].handle), 0);
        ck_assert_uint_eq(release(UINT64_MAX), 3 * E);
}

/* A copy may have as much again beside it, and no more. */
TEST(large_unseen_extents_are_for_large_copies)
{
        struct grown large, small;
        uint64_t n_bytes;

        open_zoned(ZONES + 5 * LARGE);
        large = grow(LARGE);
        ck_assert_uint_eq(large.offset, ZONES);
        ck_assert_int_eq(arena_dealloc(a, large.handle), 0);
        ck_assert_int_eq(alloc_unseen(LARGE / 2 - E, &small, &n_bytes), BFC_NO_FIT);
        ck_assert_int_eq(alloc_unseen(LARGE / 2, &small, &n_bytes), 0);
        ck_assert_uint_eq(n_bytes, LARGE);
        ck_assert_int_eq(arena_dealloc(a, small.handle), 0);
        ck_assert_uint_eq(release(UINT64_MAX), LARGE);
}

/* ---- parked blocks --------------------------------------------------------------------------- */

/* A block that has whole extents, by its place in the test. */
struct parkable {
        bfc_handle handle;
        uint64_t offset, n_bytes;
        enum { P_NONE, P_GROWING, P_AWAKE, P_PARKED, P_WAKING } state;
        bool is_dropped;
        unsigned n_woken;
        bool in_extent;
        struct arena_place place;
};

static void on_parkable(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct parkable *p = userdata;
        bool is_new = p->state == P_GROWING;

        ck_assert_int_eq((handle != 0), (result == 0 && !p->is_dropped));
        ck_assert(is_new || p->is_dropped || handle == 0 || handle == p->handle);
        ck_assert(is_new || offset == p->offset);
        if (result == 0)
                p->state = P_AWAKE;
        else
                p->state = is_new ? P_NONE : P_PARKED;
        if (result == 0 && is_new) {
                p->handle = handle;
                p->offset = offset;
                arena_locate(a, offset, &p->place);
        }
        if (p->is_dropped) {
                *p = (struct parkable){ 0 };
        } else if (result == 0 && !is_new && p->n_woken++ % 2 == 0) {
                arena_wake_undo(a, handle);
                p->state = P_PARKED;
        } else if (result == 0 && !is_new) {
                arena_wake_commit(a, handle);
        }
}

static void on_undone(void *userdata, uint64_t n_bytes)
{
        (void)userdata; /* it may have been dropped meanwhile */
        ck_assert_uint_gt(n_bytes, 0);
}

/* It is the same for clients as when the block was made. */
static void parkable_check_place(const struct parkable *p)
{
        struct arena_place place;

        arena_locate(a, p->offset, &place);
        ck_assert_uint_eq(place.region_id, p->place.region_id);
        ck_assert_uint_eq(place.region_bytes, p->in_extent ? p->n_bytes : p->place.region_bytes);
        ck_assert_uint_eq(place.offset, p->place.offset);
}

static void parkable_alloc(struct parkable *p, uint64_t n_bytes, bool in_extent)
{
        struct bfc_growth plan;
        struct charge charge;
        uint64_t missing;

        ck_assert_int_eq(arena_plan_whole(a, n_bytes, in_extent, account_room(&account), &plan), 0);
        ck_assert_uint_ge(plan.n_bytes, n_bytes);
        ck_assert_uint_eq(plan.new_bytes, plan.n_bytes);
        ck_assert_uint_eq(plan.span.begin, plan.offset);
        ck_assert_uint_eq(plan.span.end, in_extent ? 0 : plan.offset + plan.n_bytes);
        if (charge_take(&account, plan.new_bytes, &charge, &missing) < 0)
                return;
        *p = (struct parkable){ .n_bytes = plan.n_bytes, .state = P_GROWING, .in_extent = in_extent };
        ck_assert_int_eq(arena_grow(a, &plan, &charge, on_parkable, p), 0);
}

static void parkable_wake(struct parkable *p)
{
        struct charge charge;
        uint64_t missing;

        if (!arena_is_away(a, p->handle) || charge_take(&account, p->n_bytes, &charge, &missing) < 0)
                return;
        p->state = P_WAKING;
        ck_assert_int_eq(arena_wake(a, p->handle, &charge, on_parkable, p, on_undone, p), 0);
        ck_assert(!arena_is_away(a, p->handle));
}

/* A copy, or none where no extents are free. */
static void copy_step(struct parkable *p, uint64_t n_bytes)
{
        if (p->state == P_AWAKE) {
                ck_assert_int_eq(arena_dealloc(a, p->handle), 0);
                p->state = P_NONE;
        } else if (arena_alloc_unseen(a, n_bytes, &p->handle, &p->offset, &p->n_bytes) == 0) {
                ck_assert_uint_ge(p->n_bytes, n_bytes);
                ck_assert(arena_is_whole(a, p->offset, p->n_bytes));
                p->state = P_AWAKE;
        }
}

static void parkable_step(struct parkable *p, uint64_t choice, unsigned *n_released)
{
        if (p->state == P_NONE) {
                if (choice % 4 == 0)
                        parkable_alloc(p, LARGE + (1 + choice % 5) * MIB, true);
                else
                        parkable_alloc(p, (1 + choice % 5) * MIB + choice, false);
        } else if (p->state == P_AWAKE && choice % 4 > 0) {
                parkable_check_place(p);
                ck_assert(arena_is_whole(a, p->offset, p->n_bytes));
                ck_assert_int_eq(arena_park(a, p->handle, on_released, n_released), 0);
                p->state = P_PARKED;
        } else if (p->state == P_AWAKE) {
                ck_assert_int_eq(arena_dealloc(a, p->handle), 0);
                *p = (struct parkable){ 0 };
        } else if (p->state == P_PARKED && choice % 4 > 0) {
                parkable_check_place(p);
                parkable_wake(p);
        } else if (p->state == P_PARKED) {
                arena_drop_parked(a, p->handle);
                *p = (struct parkable){ 0 };
        } else if (p->state == P_WAKING && choice % 8 == 0 && !p->is_dropped) {
                arena_drop_parked(a, p->handle);
                p->is_dropped = true;
        }
}

/* In any order, also where extents are on their way, and the device has no memory now and then. */
TEST(parked_blocks_keep_their_places)
{
        struct parkable blocks[6] = { 0 }, copy = { .state = P_NONE };
        unsigned n_released = 0;
        uint64_t random = 7;

        open_zoned(ZONES + 4 * LARGE);
        for (unsigned i = 0; i < 20000; i++) {
                parkable_step(&blocks[random_next(&random) % 6], random_next(&random) >> 40, &n_released);
                if (random_next(&random) % 16 == 0)
                        fake_device_fail_make(&device, 1, -ENOMEM);
                if (random_next(&random) % 2)
                        (void)worker_poll(worker);
                if (random_next(&random) % 8 == 0)
                        copy_step(&copy, (1 + random_next(&random) % 4) * MIB);
                if (random_next(&random) % 16 == 0)
                        (void)arena_release(a, 8 * MIB, NULL, on_released, &n_released);
                if (random_next(&random) % 4 == 0)
                        (void)arena_release_exact(a, on_released, &n_released);
                check();
        }
        worker_drain(worker);
        for (unsigned i = 0; i < 6; i++) {
                ck_assert_int_ne((int)blocks[i].state, (int)P_WAKING);
                if (blocks[i].state == P_PARKED)
                        arena_drop_parked(a, blocks[i].handle);
                else if (blocks[i].state == P_AWAKE)
                        ck_assert_int_eq(arena_dealloc(a, blocks[i].handle), 0);
        }
        if (copy.state == P_AWAKE)
                ck_assert_int_eq(arena_dealloc(a, copy.handle), 0);
        ck_assert_uint_eq(arena_parked_bytes(a), 0);
        (void)arena_release(a, UINT64_MAX, NULL, on_released, &n_released);
        worker_drain(worker);
        ck_assert_uint_eq(account.charged_bytes, 0);
        check();
}

/* A parked block keeps its place, and a region stays. */
TEST(regions_are_bounded)
{
        struct parkable blocks[200] = { 0 };
        struct bfc_growth plan;
        unsigned n_released = 0, n = 0;
        size_t n_slots;

        open_zoned(ZONES + 4 * LARGE);
        while (n < 200 && arena_plan_whole(a, 4 * LARGE, false, account_room(&account), &plan) == 0) {
                parkable_alloc(&blocks[n], 4 * LARGE, false);
                worker_drain(worker);
                ck_assert_int_eq((int)blocks[n].state, (int)P_AWAKE);
                ck_assert_int_eq(arena_park(a, blocks[n++].handle, on_released, &n_released), 0);
                worker_drain(worker);
        }
        ck_assert_uint_ge(n, LEDGER_QUOTA_REGIONS);
        ck_assert_uint_lt(n, 200);
        n_slots = arena_n_slots(a);
        ck_assert_int_eq(arena_plan_whole(a, 4 * LARGE, false, account_room(&account), &plan), -ENOMEM);
        ck_assert_uint_eq(arena_n_slots(a), n_slots);
        arena_drop_parked(a, blocks[7].handle);
        ck_assert_int_eq(arena_plan_whole(a, 4 * LARGE, false, account_room(&account), &plan), 0);
        for (unsigned i = 0; i < n; i++)
                if (i != 7)
                        arena_drop_parked(a, blocks[i].handle);
        check();
}
