/* The allocator core: placement, merging, handles, growth, release, statistics.
 * Every test ends with a check of all invariants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "tests/bfc_arena.h"
#include "tests/bfc_pair.h"
#include "tests/random.h"
#include "tests/suite.h"

#include <errno.h>
#include <stdio.h>
#include <sys/resource.h>

/* Sanitizers need memory themselves. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define IS_SANITIZED 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define IS_SANITIZED 1
#endif
#ifndef IS_SANITIZED
#define IS_SANITIZED 0
#endif

static struct bfc *make(uint64_t extent_bytes, uint64_t n_bytes, bool backed)
{
        struct bfc *b = NULL;

        ck_assert_int_eq(bfc_new(extent_bytes, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, n_bytes, 0, backed), 0);
        return b;
}

static void check(const struct bfc *b)
{
        const char *why = NULL;

        ck_assert_msg(bfc_check(b, &why) == 0, "does not hold: %s", why);
}

static struct bfc *unmake(struct bfc *b)
{
        check(b);
        return bfc_destroy(b);
}

static uint64_t take(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle)
{
        uint64_t offset = UINT64_MAX;

        ck_assert_int_eq(bfc_alloc(b, n_bytes, ret_handle, &offset), 0);
        check(b);
        return offset;
}

static struct bfc_stats stats(const struct bfc *b)
{
        struct bfc_stats s;

        bfc_read_stats(b, &s);
        return s;
}

struct drawing {
        char text[512];
        size_t n;
};

static int draw_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct drawing *d = userdata;

        d->n += (size_t)snprintf(d->text + d->n, sizeof(d->text) - d->n, "%c%llu ", kind,
                                 (unsigned long long)((range.end - range.begin) / BFC_GRANULE));
        return 0;
}

/* The instance as a word: one letter and size in granules per chunk. */
static void ck_drawing(const struct bfc *b, const char *expected)
{
        struct drawing d = { "", 0 };

        check(b);
        ck_assert_int_eq(bfc_walk(b, draw_chunk, &d), 0);
        ck_assert_str_eq(d.text, expected);
}

FIXTURE(basic, NULL, NULL);

TEST(test_places_best_fit_lowest)
{
        struct bfc *b = make(MIB, MIB, true);
        bfc_handle h[8];

        for (int i = 0; i < 8; i++)
                ck_assert_uint_eq(take(b, 4096, &h[i]), (uint64_t)i * 4096);
        ck_assert_int_eq(bfc_dealloc(b, h[5]), 0);
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_assert_int_eq(bfc_dealloc(b, h[3]), 0);
        ck_drawing(b, "u16 f16 u16 f16 u16 f16 u16 u16 f3968 ");
        ck_assert_uint_eq(take(b, 4000, &h[1]), 4096);
        ck_assert_uint_eq(take(b, 256, &h[3]), 3 * 4096);
        ck_assert_uint_eq(take(b, 4096, &h[5]), 5 * 4096);
        ck_assert_uint_eq(take(b, 3585, &h[0]), 3 * 4096 + 256);
        b = unmake(b);
}

TEST(test_merges_both_sides)
{
        struct bfc *b = make(MIB, MIB, true);
        bfc_handle h[4];

        for (int i = 0; i < 4; i++)
                take(b, 1024, &h[i]);
        ck_assert_int_eq(bfc_dealloc(b, h[0]), 0);
        ck_drawing(b, "f4 u4 u4 u4 f4080 ");
        ck_assert_int_eq(bfc_dealloc(b, h[2]), 0);
        ck_drawing(b, "f4 u4 f4 u4 f4080 ");
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_drawing(b, "f12 u4 f4080 ");
        ck_assert_int_eq(bfc_dealloc(b, h[3]), 0);
        ck_drawing(b, "f4096 ");
        b = unmake(b);
}

TEST(test_handles_are_safe)
{
        struct bfc *b = make(MIB, MIB, true);
        struct bfc_info info;
        bfc_handle h, again;
        uint64_t offset;

        take(b, 1000, &h);
        ck_assert_int_eq(bfc_info(b, h, &info), 0);
        ck_assert_uint_eq(info.n_bytes, 1024);
        ck_assert_uint_eq(info.n_requested, 1000);
        ck_assert(!info.pending);
        ck_assert_int_eq(bfc_dealloc(b, h), 0);
        ck_assert_int_eq(bfc_dealloc(b, h), -EINVAL);
        ck_assert_int_eq(bfc_info(b, h, &info), -EINVAL);
        take(b, 1000, &again);
        ck_assert_uint_ne(h, again);
        ck_assert_int_eq(bfc_dealloc(b, h), -EINVAL);
        for (uint64_t low = 0; low < 3000; low++) {
                ck_assert_int_eq(bfc_dealloc(b, low), -EINVAL);
                ck_assert_int_eq(bfc_grow_commit(b, low), -EINVAL);
                ck_assert_int_eq(bfc_grow_cancel(b, low), -EINVAL);
        }
        for (int bit = 0; bit < 64; bit++)
                ck_assert_int_eq(bfc_dealloc(b, again ^ UINT64_C(1) << bit), -EINVAL);
        ck_assert_int_eq(bfc_dealloc(b, UINT64_MAX), -EINVAL);
        ck_assert_int_eq(bfc_grow_commit(b, again), -EINVAL);
        ck_assert_int_eq(bfc_dealloc(b, again), 0);
        ck_assert_int_eq(bfc_alloc(b, 0, &h, &offset), -EINVAL);
        ck_assert_int_eq(bfc_alloc(b, BFC_MAX_SPACE + 1, &h, &offset), -EINVAL);
        ck_assert_int_eq(bfc_alloc(b, UINT64_MAX, &h, &offset), -EINVAL);
        ck_assert_int_eq(bfc_alloc(b, MIB + 1, &h, &offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_alloc(b, BFC_MAX_SPACE, &h, &offset), BFC_NO_FIT);
        b = unmake(b);
}

TEST(test_regions)
{
        struct bfc *b = NULL;
        bfc_handle h;
        uint64_t offset;

        ck_assert_int_eq(bfc_new(0, &b), -EINVAL);
        ck_assert_int_eq(bfc_new(255, &b), -EINVAL);
        ck_assert_int_eq(bfc_new(BFC_MAX_SPACE + BFC_GRANULE, &b), -EINVAL);
        ck_assert_ptr_null(b);
        ck_assert_int_eq(bfc_new(MIB, &b), 0);
        ck_assert_int_eq(bfc_alloc(b, 1, &h, &offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_add_region(b, MIB, MIB, 0, true), 0);
        ck_assert_int_eq(bfc_add_region(b, MIB, MIB, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 0, MIB + BFC_GRANULE, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 2 * MIB - BFC_GRANULE, MIB, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 4 * MIB, 0, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 4 * MIB + 1, MIB, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, BFC_MAX_SPACE - MIB, MIB + BFC_GRANULE, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, UINT64_MAX - 255, BFC_GRANULE, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 0, MIB, 512, true), 0);
        ck_assert_int_eq(bfc_add_region(b, BFC_MAX_SPACE - MIB, MIB, 0, true), 0);
        ck_drawing(b, "f4096 f4096 f4096 ");
        ck_assert_int_eq(bfc_alloc(b, 2 * MIB, &h, &offset), BFC_NO_FIT);
        b = unmake(b);

        b = make(BFC_MAX_SPACE, BFC_MAX_SPACE, true);
        ck_assert_uint_eq(take(b, BFC_MAX_SPACE, &h), 0);
        ck_assert_uint_eq(stats(b).largest_alloc_size, BFC_MAX_SPACE);
        ck_assert_int_eq(bfc_dealloc(b, h), 0);
        b = unmake(b);
}

TEST(test_remove_region)
{
        struct bfc *b = make(1024, 4096, true);
        struct bfc_growth plan;
        bfc_handle h;

        ck_assert_int_eq(bfc_add_region(b, 4096, 2048, 0, false), 0);
        ck_assert_int_eq(bfc_remove_region(b, 256), -EINVAL);
        ck_assert_int_eq(bfc_remove_region(b, 1), -EINVAL);
        ck_assert_int_eq(bfc_remove_region(b, 6144), -EINVAL);
        ck_assert_int_eq(bfc_remove_region(b, UINT64_MAX - 255), -EINVAL);
        ck_assert_uint_eq(take(b, 256, &h), 0);
        ck_assert_int_eq(bfc_remove_region(b, 0), -EBUSY);
        ck_assert_int_eq(bfc_add_region(b, 1024, 1024, 0, true), -EINVAL);
        ck_assert_int_eq(bfc_dealloc(b, h), 0);
        ck_assert_int_eq(bfc_release_begin(b, (struct bfc_range){ 1024, 2048 }), 0);
        ck_assert_int_eq(bfc_remove_region(b, 0), -EBUSY);
        ck_assert_int_eq(bfc_release_commit(b, (struct bfc_range){ 1024, 2048 }), 0);
        ck_drawing(b, "f4 -4 f8 -8 ");
        ck_assert_uint_eq(stats(b).bytes_reserved, 3072);
        ck_assert_int_eq(bfc_remove_region(b, 0), 0);
        ck_drawing(b, "-8 ");
        ck_assert_uint_eq(stats(b).bytes_reserved, 0);
        ck_assert_uint_eq(stats(b).bytes_free, 0);
        ck_assert_int_eq(bfc_remove_region(b, 0), -EINVAL);
        ck_assert_int_eq(bfc_add_region(b, 1024, 1024, 0, true), 0);
        ck_assert_uint_eq(take(b, 1024, &h), 1024);
        ck_assert_int_eq(bfc_plan_growth(b, 512, UINT64_MAX, &plan), 0);
        ck_assert_int_eq(bfc_dealloc(b, h), 0);
        ck_assert_int_eq(bfc_plan_growth(b, 2048, UINT64_MAX, &plan), 0);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &h), 0);
        ck_assert_int_eq(bfc_remove_region(b, 4096), -EBUSY);
        ck_assert_int_eq(bfc_grow_cancel(b, h), 0);
        ck_assert_int_eq(bfc_remove_region(b, 4096), 0);
        ck_assert_int_eq(bfc_remove_region(b, 1024), 0); /* none is left */
        ck_assert_int_eq(bfc_alloc(b, 256, &h, &plan.offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_plan_growth(b, 256, UINT64_MAX, &plan), BFC_NO_FIT);
        b = unmake(b);
}

TEST(test_growth)
{
        struct bfc *b = make(1024, 8 * 1024, false);
        struct bfc_growth plan, second;
        struct bfc_info info;
        bfc_handle h, p;
        uint64_t offset;

        ck_assert_int_eq(bfc_alloc(b, 256, &h, &offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_plan_growth(b, 8 * 1024 + 1, UINT64_MAX, &plan), BFC_NO_FIT);
        ck_assert_int_eq(bfc_plan_growth(b, 1300, 1024, &plan), BFC_OVER_BUDGET);
        ck_assert_uint_eq(plan.new_bytes, 2048);
        ck_assert_int_eq(bfc_plan_growth(b, 1300, 2048, &plan), 0);
        ck_assert_uint_eq(plan.offset, 0);
        ck_assert_uint_eq(plan.n_bytes, 1536);
        ck_assert_uint_eq(plan.span.end, 2048);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), 0);
        ck_drawing(b, "p6 p2 -24 ");
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &h), -EINVAL);
        ck_assert_int_eq(bfc_dealloc(b, p), -EINVAL);
        ck_assert_int_eq(bfc_info(b, p, &info), 0);
        ck_assert(info.pending);
        ck_assert_uint_eq(info.n_requested, 1300);
        ck_assert_uint_eq(info.n_bytes, 1536);
        ck_assert_uint_eq(stats(b).bytes_reserved, 2048);
        ck_assert_uint_eq(stats(b).bytes_in_use, 1536);
        ck_assert_uint_eq(stats(b).bytes_free, 0);
        ck_assert_uint_eq(stats(b).num_blocks, 1);
        ck_assert_int_eq(bfc_grow_cancel(b, p), 0);
        ck_drawing(b, "-32 ");
        ck_assert_int_eq(bfc_grow_commit(b, p), -EINVAL);
        ck_assert_uint_eq(stats(b).bytes_reserved, 0);

        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), 0);
        ck_assert_int_eq(bfc_grow_commit(b, p), 0);
        ck_drawing(b, "u6 f2 -24 ");
        /* The new block begins in the rest of the extent, which saves one. */
        ck_assert_int_eq(bfc_plan_growth(b, 1280, 2048, &second), 0);
        ck_assert_uint_eq(second.offset, 1536);
        ck_assert_uint_eq(second.new_bytes, 1024);
        ck_assert_uint_eq(second.span.begin, 1024);
        ck_assert_uint_eq(second.span.end, 3072);
        ck_assert_int_eq(bfc_grow_begin(b, &second, &h), 0);
        ck_drawing(b, "u6 p2 p3 p1 -20 ");
        ck_assert_int_eq(bfc_grow_cancel(b, h), 0);
        ck_drawing(b, "u6 f2 -24 ");
        ck_assert_int_eq(bfc_grow_begin(b, &second, &h), 0);
        ck_assert_int_eq(bfc_grow_commit(b, h), 0);
        ck_drawing(b, "u6 u5 f1 -20 ");
        ck_assert_int_eq(bfc_dealloc(b, h), 0);
        ck_assert_int_eq(bfc_dealloc(b, p), 0);
        ck_drawing(b, "f12 -20 ");
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 4096, 5120 }), 0);
        ck_drawing(b, "f12 -4 f4 -12 ");
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 4096, 5000 }), -EINVAL);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 4096, 5120 }), 0);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 0, 8192 }), 0);
        ck_drawing(b, "f32 ");
        b = unmake(b);
}

/* A block that is as large as some extents lies in whole ones where that costs no more; others
 * fill up rests. */
TEST(test_growth_alignment)
{
        struct bfc *b = make(2048, 16 * 1024, false);
        struct bfc_growth plan;
        bfc_handle low, p;

        ck_assert_int_eq(bfc_plan_growth(b, 1280, UINT64_MAX, &plan), 0);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &low), 0);
        ck_assert_int_eq(bfc_grow_commit(b, low), 0);
        ck_drawing(b, "u5 f3 -56 ");
        ck_assert_int_eq(bfc_plan_growth(b, 2048, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 2048);
        ck_assert_uint_eq(plan.new_bytes, 2048);
        ck_assert_int_eq(bfc_plan_growth(b, 1792, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 1280);
        ck_assert_int_eq(bfc_plan_growth(b, 2304, UINT64_MAX, &plan), 0); /* saves an extent */
        ck_assert_uint_eq(plan.offset, 1280);
        ck_assert_uint_eq(plan.new_bytes, 2048);

        /* Whole free extents before the hole are used, the rest before them is not. */
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 2048, 6144 }), 0);
        ck_drawing(b, "u5 f19 -40 ");
        ck_assert_int_eq(bfc_plan_growth(b, 6144, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 2048);
        ck_assert_uint_eq(plan.new_bytes, 2048);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), 0);
        ck_drawing(b, "u5 f3 p16 p8 -32 ");
        ck_assert_int_eq(bfc_grow_cancel(b, p), 0);
        ck_drawing(b, "u5 f19 -40 ");
        ck_assert_int_eq(bfc_plan_growth(b, 6144, UINT64_MAX, &plan), 0);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), 0);
        ck_assert_int_eq(bfc_grow_commit(b, p), 0);
        ck_drawing(b, "u5 f3 u24 -32 ");
        b = unmake(b);
}

/* A block in one extent: the smallest chunk that can hold it so, its head and its rest free. */
TEST(test_in_extent)
{
        struct bfc *b = make(1024, 5 * 1024, true);
        bfc_handle h[8], wall;
        uint64_t offset;

        take(b, 512, &h[0]);
        take(b, 1024, &h[1]);
        take(b, 768, &h[2]);
        take(b, 256, &wall);
        ck_drawing(b, "u2 u4 u3 u1 f10 ");
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_drawing(b, "u2 f4 u3 u1 f10 ");
        ck_assert_int_eq(bfc_alloc_in_extent(b, 513, &h[1], &offset), 0); /* three granules: not over 4 */
        ck_assert_uint_eq(offset, 12 * 256);
        ck_drawing(b, "u2 f4 u3 u1 f2 u3 f5 ");
        ck_assert_int_eq(bfc_alloc_in_extent(b, 512, &h[3], &offset), 0); /* the smallest one holds two */
        ck_assert_uint_eq(offset, 10 * 256);
        ck_drawing(b, "u2 f4 u3 u1 u2 u3 f5 ");
        ck_assert_int_eq(bfc_alloc_in_extent(b, 1024, &h[4], &offset), 0);
        ck_assert_uint_eq(offset, 16 * 256);
        ck_drawing(b, "u2 f4 u3 u1 u2 u3 f1 u4 ");
        ck_assert_int_eq(bfc_alloc_in_extent(b, 1024, &h[5], &offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_alloc_in_extent(b, 768, &h[5], &offset), BFC_NO_FIT);
        ck_assert_int_eq(bfc_alloc_in_extent(b, 1025, &h[5], &offset), -EINVAL);
        ck_assert_int_eq(bfc_alloc_in_extent(b, 0, &h[5], &offset), -EINVAL);
        ck_assert_uint_eq(stats(b).num_allocs, 7);
        ck_assert_uint_eq(stats(b).bytes_requested, 512 + 768 + 256 + 513 + 512 + 1024);
        ck_assert_int_eq(bfc_dealloc(b, h[4]), 0);
        ck_assert_int_eq(bfc_dealloc(b, h[4]), -EINVAL);
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_drawing(b, "u2 f4 u3 u1 u2 f8 ");
        b = unmake(b);
}

/* Growth for a block in one extent: the smallest unbacked extent that holds it. */
TEST(test_growth_in_extent)
{
        struct bfc_growth plan, plain;
        struct bfc *b = NULL;
        bfc_handle h[3], p;
        uint64_t offset;

        ck_assert_int_eq(bfc_new(2048, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, 1280 + 3 * 2048, 1280, false), 0);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 2049, UINT64_MAX, &plan), -EINVAL);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 0, UINT64_MAX, &plan), -EINVAL);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 1024, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 0);
        ck_assert_uint_eq(plan.new_bytes, 1280);
        ck_assert(plan.in_extent);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 1281, 2047, &plan), BFC_OVER_BUDGET);
        ck_assert_uint_eq(plan.offset, 1280);
        ck_assert_uint_eq(plan.span.begin, 1280);
        ck_assert_uint_eq(plan.span.end, 1280 + 2048);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &h[0]), 0);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), -EINVAL); /* stale */
        ck_drawing(b, "-5 p6 p2 -16 ");
        ck_assert_int_eq(bfc_grow_commit(b, h[0]), 0);
        ck_drawing(b, "-5 u6 f2 -16 ");

        /* A block that may cross goes on from the rest; one that may not begins a new extent. */
        ck_assert_int_eq(bfc_plan_growth(b, 1536, UINT64_MAX, &plain), 0);
        ck_assert_uint_eq(plain.offset, 11 * 256);
        ck_assert(!plain.in_extent);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 1536, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 13 * 256);
        ck_assert_uint_eq(plan.new_bytes, 2048);
        plain.in_extent = true; /* neither passes for the other */
        ck_assert_int_eq(bfc_grow_begin(b, &plain, &p), -EINVAL);
        plain = plan;
        plain.in_extent = false;
        ck_assert_int_eq(bfc_grow_begin(b, &plain, &p), -EINVAL);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &p), 0);
        ck_drawing(b, "-5 u6 f2 p6 p2 -8 ");
        ck_assert_int_eq(bfc_grow_cancel(b, p), 0);
        ck_drawing(b, "-5 u6 f2 -16 ");

        /* Backed space comes first, and only where it holds the block in one extent. */
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 13 * 256, 21 * 256 }), 0);
        ck_drawing(b, "-5 u6 f10 -8 ");
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 2048, 0, &plan), 0);
        ck_assert_uint_eq(plan.offset, 13 * 256);
        ck_assert_int_eq(bfc_alloc_in_extent(b, 300, &h[1], &offset), 0);
        ck_assert_uint_eq(offset, 11 * 256);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &h[2]), 0);
        ck_drawing(b, "-5 u6 u2 p8 -8 ");
        ck_assert_int_eq(bfc_grow_commit(b, h[2]), 0);

        /* The last extent of a region may be the smallest that is large enough. */
        ck_assert_int_eq(bfc_add_region(b, 65536, 3 * 2048 + 512, 0, false), 0);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 512, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 65536 + 3 * 2048);
        ck_assert_uint_eq(plan.new_bytes, 512);
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, 513, UINT64_MAX, &plan), 0);
        ck_assert_uint_eq(plan.offset, 0);
        b = unmake(b);
}

TEST(test_release)
{
        struct bfc *b = make(1024, 8 * 1024, true);
        struct bfc_growth keep = { .span = { 5 * 1024, 7 * 1024 } };
        struct bfc_range ranges[4];
        bfc_handle h[2];
        uint64_t n_bytes;

        take(b, 300, &h[0]);
        ck_assert_uint_eq(bfc_plan_release(b, 1, NULL, ranges, 4, &n_bytes), 1);
        ck_assert_uint_eq(ranges[0].begin, 7 * 1024);
        ck_assert_uint_eq(n_bytes, 1024);
        ck_assert_uint_eq(bfc_plan_release(b, UINT64_MAX, NULL, ranges, 4, &n_bytes), 1);
        ck_assert_uint_eq(ranges[0].begin, 1024);
        ck_assert_uint_eq(n_bytes, 7 * 1024);
        ck_assert_uint_eq(bfc_plan_release(b, 2048, &keep, ranges, 4, &n_bytes), 2);
        ck_assert_uint_eq(ranges[0].begin, 7 * 1024);
        ck_assert_uint_eq(ranges[1].begin, 4 * 1024);
        ck_assert_uint_eq(ranges[1].end, 5 * 1024);
        ck_assert_uint_eq(n_bytes, 2048);
        ck_assert_uint_eq(bfc_plan_release(b, 2048, &keep, ranges, 0, &n_bytes), 0);

        ck_assert_int_eq(bfc_release_begin(b, (struct bfc_range){ 0, 1024 }), -EINVAL);
        ck_assert_int_eq(bfc_release_begin(b, (struct bfc_range){ 1024, 2000 }), -EINVAL);
        ck_assert_int_eq(bfc_release_begin(b, ranges[1]), 0);
        ck_drawing(b, "u2 f14 r4 f12 ");
        ck_assert_int_eq(bfc_release_begin(b, ranges[1]), -EINVAL);
        ck_assert_uint_eq(stats(b).bytes_reserved, 8192);
        ck_assert_uint_eq(stats(b).bytes_free, 26 * 256);
        ck_assert_int_eq(bfc_release_begin(b, ranges[0]), 0);
        ck_assert_int_eq(bfc_release_commit(b, (struct bfc_range){ 4096, 8192 }), -EINVAL);
        ck_assert_int_eq(bfc_release_commit(b, ranges[1]), 0);
        ck_drawing(b, "u2 f14 -4 f8 r4 ");
        ck_assert_int_eq(bfc_release_commit(b, ranges[0]), 0);
        ck_assert_uint_eq(stats(b).bytes_reserved, 6 * 1024);
        ck_assert_uint_eq(stats(b).peak_bytes_reserved, 8 * 1024);
        bfc_clear_peaks(b);
        ck_assert_uint_eq(stats(b).peak_bytes_reserved, 6 * 1024);
        ck_assert_int_eq(bfc_dealloc(b, h[0]), 0);
        ck_drawing(b, "f16 -4 f8 -4 ");
        b = unmake(b);
}

TEST(test_alloc_range)
{
        struct bfc *b = make(1024, 8 * 1024, true);
        bfc_handle h[3];
        struct bfc_info info;

        take(b, 300, &h[0]);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 0, 1024 }, &h[1]), -EINVAL);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 1024, 2000 }, &h[1]), -EINVAL);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 2048, 2048 }, &h[1]), -EINVAL);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 2048, 4096 }, &h[1]), 0);
        ck_drawing(b, "u2 f6 u8 f16 ");
        ck_assert_int_eq(bfc_info(b, h[1], &info), 0);
        ck_assert_uint_eq(info.offset, 2048);
        ck_assert_uint_eq(info.n_bytes, 2048);
        ck_assert_uint_eq(info.n_requested, 2048);
        ck_assert_uint_eq(stats(b).bytes_in_use, 512 + 2048);
        ck_assert_uint_eq(stats(b).largest_alloc_size, 2048);
        ck_assert_uint_eq(stats(b).num_allocs, 2);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 3072, 5120 }, &h[2]), -EINVAL);
        ck_assert_int_eq(bfc_alloc_range(b, (struct bfc_range){ 4096, 8192 }, &h[2]), 0);
        ck_drawing(b, "u2 f6 u8 u16 ");
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_drawing(b, "u2 f14 u16 ");
        ck_assert_int_eq(bfc_dealloc(b, h[2]), 0);
        ck_assert_int_eq(bfc_dealloc(b, h[0]), 0);
        ck_drawing(b, "f32 ");
        b = unmake(b);
}

TEST(test_stats)
{
        struct bfc *b = make(MIB, MIB, true);
        struct bfc_stats s;
        bfc_handle h[3];

        take(b, 1000, &h[0]);
        take(b, 2000, &h[1]);
        take(b, 100, &h[2]);
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        s = stats(b);
        ck_assert_uint_eq(s.num_allocs, 3);
        ck_assert_uint_eq(s.num_frees, 1);
        ck_assert_uint_eq(s.num_blocks, 2);
        ck_assert_uint_eq(s.bytes_in_use, 1024 + 256);
        ck_assert_uint_eq(s.peak_bytes_in_use, 1024 + 2048 + 256);
        ck_assert_uint_eq(s.bytes_requested, 1100);
        ck_assert_uint_eq(s.peak_bytes_requested, 3100);
        ck_assert_uint_eq(s.bytes_reserved, MIB);
        ck_assert_uint_eq(s.largest_alloc_size, 2048);
        ck_assert_uint_eq(s.bytes_free, MIB - 1280);
        ck_assert_uint_eq(s.largest_free_block_bytes, MIB - 3328);
        ck_assert_uint_eq(s.num_free_chunks, 2);
        ck_assert_uint_eq(s.num_chunks, 4);
        ck_assert(bfc_stats_fragmentation(&s) > 0.0019 && bfc_stats_fragmentation(&s) < 0.002);
        bfc_clear_peaks(b);
        s = stats(b);
        ck_assert_uint_eq(s.peak_bytes_in_use, 1280);
        ck_assert_uint_eq(s.peak_bytes_requested, 1100);
        ck_assert_uint_eq(s.largest_alloc_size, 2048);
        b = unmake(b);
}

#if !IS_SANITIZED
/* The instance's own table cannot grow: nothing changes, and what is freed can be had again. */
TEST(test_no_memory_for_records)
{
        struct bfc *b = make(1024, MIB, true), *other = NULL;
        const struct rlimit none = { 4096, RLIM_INFINITY };
        bfc_handle h[4096], more;
        struct bfc_growth plan;
        uint64_t offset;
        int n = 0, r;

        ck_assert_int_eq(bfc_add_region(b, 2 * MIB, 3 * 1024, 0, false), 0);
        ck_assert_int_eq(setrlimit(RLIMIT_DATA, &none), 0);
        while ((r = bfc_alloc(b, 256, &h[n], &offset)) == 0 && n < 4095)
                n++;
        ck_assert_int_eq(r, -ENOMEM);
        ck_assert_int_gt(n, 1000);
        check(b);
        ck_assert_int_eq(bfc_plan_growth(b, MIB, UINT64_MAX, &plan), BFC_NO_FIT);
        ck_assert_int_eq(bfc_release_begin(b, (struct bfc_range){ MIB - 2048, MIB - 1024 }), -ENOMEM);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 2 * MIB, 2 * MIB + 1024 }), -ENOMEM);
        ck_assert_int_eq(bfc_add_region(b, 4 * MIB, 1024, 0, false), -ENOMEM);
        check(b);
        ck_assert_int_eq(bfc_dealloc(b, h[0]), 0);
        ck_assert_int_eq(bfc_dealloc(b, h[1]), 0);
        ck_assert_int_eq(bfc_alloc(b, 256, &more, &offset), 0);
        ck_assert_uint_eq(offset, 0);
        check(b);
        ck_assert_int_eq(bfc_new(1024, &other), -ENOMEM);
        ck_assert_ptr_null(other);
        b = unmake(b);
}
#endif

/* ---- zones of extents -------------------------------------------------------------- */

TEST(test_zones)
{
        struct bfc_zones z = { 0, 1024, 4 };
        struct bfc_range ranges[8];
        struct bfc *b = NULL;
        uint64_t sum;

        ck_assert_int_eq(bfc_new(8192, &b), 0);
        ck_assert_uint_eq(bfc_zones_bytes(&z, 8192), 4 * (1024 + 2048 + 4096));
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, bfc_zones_bytes(&z, 8192) - 256, &z, false), -EINVAL);
        z.small_extent_bytes = 0;
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), -EINVAL);
        z.small_extent_bytes = 1280; /* no power of two below 8192 */
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), -EINVAL);
        z.small_extent_bytes = 16384;
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), -EINVAL);
        z = (struct bfc_zones){ 100, 1024, 4 };
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), -EINVAL);
        z = (struct bfc_zones){ 0, 1024, UINT32_MAX };
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), -EINVAL);
        check(b);
        z = (struct bfc_zones){ 512, 1024, 4 };
        ck_assert_int_eq(bfc_add_zoned_region(b, MIB, MIB, &z, true), 0);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ MIB, MIB + 1024 }), -EINVAL);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ MIB, MIB + 1536 }), 0);
        /* What is not needed is left out, the lowest first: the first extent is a range of its own. */
        ck_assert_uint_eq(bfc_plan_release(b, MIB - 300, NULL, ranges, 8, &sum), 2);
        ck_assert_uint_eq(sum, MIB);
        ck_assert_uint_eq(bfc_plan_release(b, MIB - 512, NULL, ranges, 8, &sum), 1);
        ck_assert_uint_eq(ranges[0].begin, MIB + 512);
        ck_assert_uint_eq(sum, MIB - 512);
        b = unmake(b);
}

/* The fewest new bytes, then the fewest extents, but no fewer than 4. */
TEST(test_whole_extents_in_zones)
{
        static const struct {
                uint64_t n_bytes, offset, new_bytes;
        } plans[] = { { 64 << 10, 112 << 10, 64 << 10 },       { 16 << 10, 48 << 10, 16 << 10 },
                      { 8 << 10, 16 << 10, 8 << 10 },          { 4 << 10, 0, 4 << 10 },
                      { 33 << 10, 15 << 10, 33 << 10 },        { 128 << 10, 112 << 10, 128 << 10 },
                      { (128 << 10) + 1, 15 << 10, 129 << 10 } };
        const struct bfc_zones z = { 0, 1024, 16 };
        struct bfc_growth plan;
        struct bfc *b = NULL;
        bfc_handle handle;

        ck_assert_int_eq(bfc_new(8192, &b), 0);
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, MIB, &z, false), 0);
        for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
                /* Nothing more is wasted at the lowest offset. */
                ck_assert_int_eq(bfc_plan_growth_whole(b, plans[i].n_bytes, MIB, &plan), 0);
                ck_assert_uint_le(plan.offset, plans[i].offset);
                ck_assert_uint_eq(plan.new_bytes, plans[i].new_bytes);
        }
        for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
                ck_assert_int_eq(bfc_plan_growth_few(b, plans[i].n_bytes, MIB, &plan), 0);
                ck_assert_uint_eq(plan.offset, plans[i].offset);
                ck_assert_uint_eq(plan.new_bytes, plans[i].new_bytes);
        }
        ck_assert_int_eq(bfc_plan_growth_few(b, 64 << 10, MIB, &plan), 0);
        ck_assert_int_eq(bfc_grow_begin(b, &plan, &handle), 0);
        ck_assert_int_eq(bfc_grow_commit(b, handle), 0);
        check(b);
        ck_assert_int_eq(bfc_plan_growth_few(b, 64 << 10, MIB, &plan), 0);
        ck_assert_uint_eq(plan.offset, 176 << 10);
        b = unmake(b);
}

/* ---- against the oracle ---------------------------------------------------------- */

/* What a random walk does: weights per operation, and which sizes it asks for. */
struct walk {
        const char *name;
        uint64_t extent_bytes, base, n_bytes, first;
        bool backed;
        uint64_t second_bytes; /* a second region, unbacked; 0: none */
        unsigned n_steps, compare_every;
        size_t n_live_max;
        uint64_t size_min, size_mask; /* in bytes: min + (random & mask), shifted down at random */
        unsigned shift_max;
        unsigned weights[PAIR_N_OPS];
        uint64_t small_bytes; /* of the first zone of the first region; 0: there are no zones */
        uint32_t per_zone;
};

/* clang-format off */
#define ONLY_EQUALS { [PAIR_ALLOC] = 50, [PAIR_FREE] = 49, [PAIR_STALE] = 1 }
#define ONLY_BLOCKS { [PAIR_ALLOC] = 50, [PAIR_FREE] = 49, [PAIR_STALE] = 1, [PAIR_SPLIT] = 3 }
#define EVERYTHING                                                                                 \
        { [PAIR_ALLOC] = 40, [PAIR_FREE] = 40, [PAIR_GROW] = 10, [PAIR_COMMIT] = 6,                \
          [PAIR_CANCEL] = 3, [PAIR_RELEASE] = 2, [PAIR_RELEASE_ANY] = 6, [PAIR_RETIRED] = 6,       \
          [PAIR_BACK] = 1, [PAIR_STALE] = 1, [PAIR_CLEAR_PEAKS] = 1, [PAIR_REGION] = 2,            \
          [PAIR_ALLOC_IN_EXTENT] = 10, [PAIR_GROW_IN_EXTENT] = 4, [PAIR_SPLIT] = 5 }
#define BLOCKS_IN_EXTENTS { [PAIR_ALLOC] = 20, [PAIR_ALLOC_IN_EXTENT] = 30, [PAIR_FREE] = 50 }

static const struct walk walks[] = {
        /* All sizes, a thousand live. */
        { "mixed", MIB, 0, 256 * MIB, 0, true, 0, 400000, 500, 1000, 1, 4 * MIB - 1, 12, ONLY_BLOCKS, 0, 0 },
        /* Four sizes only: ties everywhere. */
        { "ties", MIB, 0, 4 * MIB, 0, true, 0, 300000, 50, 800, 1, 1023, 0, ONLY_BLOCKS, 0, 0 },
        /* One size: a free list by address. */
        { "equals", MIB, 0, 2 * MIB, 0, true, 0, 100000, 20, 300, 256, 0, 0, ONLY_EQUALS, 0, 0 },
        /* Many distinct sizes in few bins, the widest there are: deep tries. */
        { "wide", UINT64_C(1) << 34, 0, BFC_MAX_SPACE, 0, true, 0, 200000, 100, 400, UINT64_C(1) << 31, (UINT64_C(1) << 24) - 1, 0,
          ONLY_BLOCKS, 0, 0 },
        { "deep", MIB, 0, 1024 * MIB, 0, true, 0, 150000, 100, 700, 256 * KIB, 8191, 0, ONLY_BLOCKS, 0, 0 },
        /* Holes, small grids, odd first and last extents, two regions. */
        { "grow", 4096, 8192, 23 * 4096 + 512, 1280, false, 9 * 4096 + 256, 120000, 1, 20, 1, 16383, 6, EVERYTHING, 0, 0 },
        { "tiny", 512, 0, 20 * 512, 0, false, 0, 60000, 1, 20, 1, 4095, 4, EVERYTHING, 0, 0 },
        /* Most of what is free reaches over the grid: of many sizes, and of three. */
        { "crossing", 16 * KIB, 0, 200 * 16 * KIB, 5 * 1024, true, 0, 100000, 20, 300, 6 * KIB, 8191, 1,
          BLOCKS_IN_EXTENTS, 0, 0 },
        { "crossing equals", 1024, 0, 200 * 1024, 0, true, 0, 100000, 20, 250, 257, 511, 0, BLOCKS_IN_EXTENTS, 0, 0 },
        { "long", 4096, 0, 40 * 4096, 4 * 4096, false, 5 * 4096, 60000, 1, 60, 1, 65535, 8, EVERYTHING, 0, 0 },
        /* Zones of extents: with and without a first one, few and many, and an end inside an extent. */
        { "zones", 4096, 8192, 15 * 4096, 0, false, 3 * 4096 + 256, 100000, 1, 20, 1, 16383, 6, EVERYTHING, 512, 4 },
        { "zones, odd first", 4096, 0, 12 * 4096 + 768, 2304, false, 2 * 4096, 60000, 1, 20, 1, 16383, 4, EVERYTHING, 512, 3 },
        { "zones, long first", 2048, 0, 20 * 2048, 3 * 2048, false, 0, 60000, 1, 14, 1, 8191, 6, EVERYTHING, 256, 1 },
        { "one zone", 2048, 256, 24 * 2048 + 256, 1024, false, 2048, 60000, 1, 6, 1, 2047, 6, EVERYTHING, 1024, 5 },
        { "zones, crossing", 16 * KIB, 0, 200 * 16 * KIB, 5 * 1024, true, 0, 60000, 20, 300, 6 * KIB, 8191, 3,
          BLOCKS_IN_EXTENTS, 2 * KIB, 64 },
};
/* clang-format on */

static enum pair_op choose_op(const struct walk *w, const struct pair *p, uint64_t *state)
{
        unsigned sum = 0, pick;

        for (int i = 0; i < PAIR_N_OPS; i++)
                sum += w->weights[i];
        pick = (unsigned)(random_next(state) % sum);
        for (int i = 0; i < PAIR_N_OPS; i++) {
                if (pick < w->weights[i])
                        return (i == PAIR_ALLOC || i == PAIR_ALLOC_IN_EXTENT) && p->n_live >= w->n_live_max
                                       ? PAIR_FREE
                                       : (enum pair_op)i;
                pick -= w->weights[i];
        }
        return PAIR_FREE;
}

FIXTURE(oracle, NULL, NULL);

LOOP_TEST(test_oracle, sizeof(walks) / sizeof(walks[0]))
{
        const struct walk *w = &walks[_i];
        struct bfc_zones zones;
        unsigned n_steps = suite_is_long() ? w->n_steps : w->n_steps / 40;
        uint64_t state = 1;
        const char *why;
        struct pair p;

        pair_init(&p, w->extent_bytes);
        zones = (struct bfc_zones){ w->first, w->small_bytes, w->per_zone };
        if (w->small_bytes == 0)
                zones.small_extent_bytes = w->extent_bytes;
        ck_assert_ptr_null(pair_add_zoned_region(&p, w->base, w->n_bytes, &zones, w->backed));
        ck_assert_uint_eq(p.o.n_regions, 1);
        if (w->second_bytes > 0)
                ck_assert_ptr_null(pair_add_region(&p, w->base + w->n_bytes, w->second_bytes, 0, false));
        for (unsigned i = 0; w->weights[PAIR_REGION] > 0 && i < 2; i++) /* two that come and go */
                ck_assert_ptr_null(
                        pair_add_region(&p, MIB + i * w->extent_bytes, w->extent_bytes, 0, i == 0));
        for (unsigned step = 0; step < n_steps; step++) {
                enum pair_op op = choose_op(w, &p, &state);
                uint64_t value = random_next(&state);

                if (op == PAIR_ALLOC || op == PAIR_GROW || op == PAIR_ALLOC_IN_EXTENT ||
                    op == PAIR_GROW_IN_EXTENT)
                        value = (w->size_min + (value & w->size_mask)) >>
                                random_next(&state) % (w->shift_max + 1);
                why = pair_step(&p, op, value);
                if (!why && step % w->compare_every == 0)
                        why = pair_compare(&p);
                if (why) /* asserts are slow in a loop: each one talks to the parent */
                        ck_abort_msg("%s, step %u: %s", w->name, step, why);
        }
        while (p.n_pending > 0)
                ck_assert_ptr_null(pair_step(&p, PAIR_CANCEL, 0));
        while (p.n_live > 0)
                ck_assert_ptr_null(pair_step(&p, PAIR_FREE, 0));
        while (p.n_retiring > 0)
                ck_assert_ptr_null(pair_step(&p, PAIR_RETIRED, 0));
        ck_assert_ptr_null(pair_compare(&p));
        /* A walk that never gets anywhere proves nothing. */
        for (int i = 0; i < PAIR_N_OPS; i++)
                ck_assert_msg(p.n_ok[i] >= (w->weights[i] > 0 ? n_steps / 10000 : 0),
                              "%s: operation %d, %llu", w->name, i, (unsigned long long)p.n_ok[i]);
        pair_done(&p);
}

/* ---- one instance goes on for another ------------------------------------------------ */

#define N_RESTORED 400

struct restored {
        bfc_handle handles[N_RESTORED];
        struct bfc_place places[N_RESTORED];
        size_t n;
};

static struct bfc *open_backed(uint64_t gap)
{
        struct bfc *b;

        ck_assert_int_eq(bfc_new(8 * 4096, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, 40 * 8 * 4096, 4096, false), 0);
        ck_assert_int_eq(bfc_add_region(b, 60 * 8 * 4096, 10 * 8 * 4096, 0, true), 0);
        /* All but what lies from gap on to the next point of the grid. */
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 0, gap }), 0);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ gap + 8 * 4096, 4096 + 38 * 8 * 4096 }), 0);
        return b;
}

static void restored_free(struct bfc *b, struct restored *r, size_t i)
{
        ck_assert_int_eq(bfc_dealloc(b, r->handles[i]), 0);
        r->handles[i] = r->handles[--r->n];
        r->places[i] = r->places[r->n];
}

static void restored_live(struct bfc *b, struct restored *r, uint64_t *state, unsigned n_steps)
{
        for (unsigned i = 0; i < n_steps; i++) {
                uint64_t n_bytes = 1 + random_next(state) % (1u << random_next(state) % 16);

                if (r->n < N_RESTORED && random_next(state) % 5 < 3) {
                        if (bfc_alloc(b, n_bytes, &r->handles[r->n], &r->places[r->n].offset) == 0)
                                r->places[r->n++].n_requested = n_bytes;
                } else if (r->n > 0) {
                        restored_free(b, r, random_next(state) % r->n);
                }
        }
}

static int compare_places(const void *x, const void *y)
{
        const struct bfc_place *p = x, *q = y;

        return p->offset < q->offset ? -1 : p->offset > q->offset;
}

struct chunks {
        struct bfc_range ranges[4 * N_RESTORED];
        char kinds[4 * N_RESTORED];
        size_t n;
};

static int note_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct chunks *c = userdata;

        c->kinds[c->n] = kind;
        c->ranges[c->n++] = range;
        return 0;
}

static void assert_same(const struct bfc *x, const struct bfc *y)
{
        static struct chunks of_x, of_y;
        struct bfc_stats s, t;
        const char *why = "";

        ck_assert_msg(bfc_check(y, &why) == 0, "%s", why);
        of_x.n = of_y.n = 0;
        bfc_walk(x, note_chunk, &of_x);
        bfc_walk(y, note_chunk, &of_y);
        ck_assert_uint_eq(of_x.n, of_y.n);
        ck_assert_int_eq(memcmp(of_x.kinds, of_y.kinds, of_x.n), 0);
        ck_assert_int_eq(memcmp(of_x.ranges, of_y.ranges, of_x.n * sizeof(of_x.ranges[0])), 0);
        bfc_read_stats(x, &s);
        bfc_read_stats(y, &t);
        ck_assert_uint_eq(s.bytes_in_use, t.bytes_in_use);
        ck_assert_uint_eq(s.bytes_requested, t.bytes_requested);
        ck_assert_uint_eq(s.bytes_reserved, t.bytes_reserved);
        ck_assert_uint_eq(s.bytes_free, t.bytes_free);
        ck_assert_uint_eq(s.largest_free_block_bytes, t.largest_free_block_bytes);
        ck_assert_uint_eq(s.num_blocks, t.num_blocks);
        ck_assert_uint_eq(s.num_free_chunks, t.num_free_chunks);
}

/* Chunk by chunk the same, and it goes on as the other would have. */
LOOP_TEST_OF(basic, test_restore, 3)
{
        uint64_t state = 77 + (uint64_t)_i;

        for (unsigned round = 0; round < 60; round++) {
                uint64_t gap = 4096 + random_next(&state) % 37 * 8 * 4096, same_state;
                struct bfc *b = open_backed(gap), *next = open_backed(gap);
                static struct restored r, of_next;

                r.n = 0;
                restored_live(b, &r, &state, 40 + round * 40);
                qsort(r.places, r.n, sizeof(r.places[0]), compare_places);
                of_next = r;
                ck_assert_int_eq(bfc_restore(next, of_next.places, r.n, of_next.handles), 0);
                assert_same(b, next);
                for (size_t i = 0; i < r.n; i++) { /* each handle is its block's */
                        struct bfc_info info;

                        ck_assert_int_eq(bfc_info(next, of_next.handles[i], &info), 0);
                        ck_assert_uint_eq(info.offset, of_next.places[i].offset);
                        ck_assert_uint_eq(info.n_requested, of_next.places[i].n_requested);
                }
                same_state = state;
                r.n = of_next.n = 0; /* those stay */
                restored_live(b, &r, &state, 100);
                restored_live(next, &of_next, &same_state, 100);
                assert_same(b, next);
                bfc_destroy(b);
                bfc_destroy(next);
        }
}

TEST_OF(basic, test_restore_refused)
{
        static const struct bfc_place bad[][2] = {
                { { 256, 1 }, { 256, 1 } },
                { { 512, 1 }, { 256, 1 } },
                { { 0, 257 }, { 256, 1 } },
                { { 0, 1 }, { 100, 1 } },
                { { 0, 1 }, { 4096 - 256, 257 } }, /* into the hole */
                { { 0, 1 }, { 4096, 1 } },         /* in it */
                { { 0, 1 }, { 8192 - 256, 300 } }, /* beyond the region */
                { { 0, 1 }, { 8192, 1 } },
                { { 0, 0 }, { 256, 1 } },
                { { 0, 1 }, { 256, BFC_MAX_SPACE + 1 } },
                { { 0, 1 }, { UINT64_MAX - 255, 1 } },
                { { 0, 1 }, { BFC_MAX_SPACE, 256 } },
        };
        bfc_handle handles[2] = { 5, 6 };
        struct bfc *b, *untouched;

        ck_assert_int_eq(bfc_new(4096, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, 8192, 0, false), 0);
        ck_assert_int_eq(bfc_back(b, (struct bfc_range){ 0, 4096 }), 0);
        ck_assert_int_eq(bfc_new(4096, &untouched), 0);
        ck_assert_int_eq(bfc_add_region(untouched, 0, 8192, 0, false), 0);
        ck_assert_int_eq(bfc_back(untouched, (struct bfc_range){ 0, 4096 }), 0);
        for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
                ck_assert_int_eq(bfc_restore(b, bad[i], 2, handles), -EINVAL);
                assert_same(untouched, b);
        }
        ck_assert_uint_eq(handles[0], 5);
        ck_assert_int_eq(bfc_restore(b, NULL, 0, NULL), 0);
        ck_assert_int_eq(bfc_restore(b, bad[0], 1, handles), 0);
        ck_assert_int_eq(bfc_restore(b, bad[0], 1, handles), -EINVAL); /* taken now */
        bfc_destroy(b);
        bfc_destroy(untouched);
}

/* More blocks than records are usable from the start. */
TEST_OF(basic, test_restore_many)
{
        enum { N = 20000 };
        struct bfc_place *places = calloc(N, sizeof(*places));
        bfc_handle *handles = calloc(N, sizeof(*handles));
        struct bfc_stats stats;
        const char *why = "";
        struct bfc *b;

        ck_assert(places && handles);
        for (size_t i = 0; i < N; i++)
                places[i] = (struct bfc_place){ i * 768, 300 };
        ck_assert_int_eq(bfc_new(N * 768, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, N * 768, 0, true), 0);
        ck_assert_int_eq(bfc_restore(b, places, N, handles), 0);
        ck_assert_msg(bfc_check(b, &why) == 0, "%s", why);
        bfc_read_stats(b, &stats);
        ck_assert_uint_eq(stats.num_blocks, N);
        ck_assert_uint_eq(stats.num_free_chunks, N);
        for (size_t i = 0; i < N; i++)
                ck_assert_int_eq(bfc_dealloc(b, handles[i]), 0);
        bfc_destroy(b);
        free(places);
        free(handles);
}

/* ---- growth does not fragment ------------------------------------------------------- */

#define N_ARENA_LIVE 200

/* An arena at its limit, with requests of all sizes: one that is refused could not have been
 * held by whole extents, the free ones and those that the limit still allows. */
LOOP_TEST(test_refuses_only_without_room, 6)
{
        static const double space[] = { 1.0, 1.5, 3.0 };
        const uint64_t extent_bytes = 64 * KIB, limit = 100 * extent_bytes;
        const uint64_t max = (_i < 3 ? 40 : 12) * extent_bytes;
        uint64_t state = (uint64_t)_i, n_refused = 0;
        bfc_handle live[N_ARENA_LIVE] = { 0 };
        struct arena_sim a;

        ck_assert_int_eq(arena_sim_init(&a, extent_bytes, limit, space[_i % 3]), 0);
        for (unsigned step = 0; step < 30000; step++) {
                uint64_t r = random_next(&state), offset;
                uint64_t n_bytes = 1 + (r >> 16) % (max >> r % 7);
                bfc_handle *h = &live[(r >> 8) % N_ARENA_LIVE];
                int res;

                if (*h != 0) {
                        ck_assert_int_eq(bfc_dealloc(a.b, *h), 0);
                        *h = 0;
                        continue;
                }
                res = arena_sim_alloc(&a, n_bytes, h, &offset);
                ck_assert_int_ge(res, 0);
                if (res != 0) {
                        uint64_t room = limit - stats(a.b).bytes_reserved + arena_sim_releasable(&a);

                        ck_assert_msg(room < n_bytes, "step %u: %llu refused, %llu would be there", step,
                                      (unsigned long long)n_bytes, (unsigned long long)room);
                        n_refused++;
                }
                if (step % 16 == 0)
                        check(a.b);
        }
        ck_assert_uint_gt(n_refused, 100);
        ck_assert_uint_gt(a.n_releases, 100);
        ck_assert_uint_le(a.n_regions, 8);
        check(a.b);
        arena_sim_done(&a);
}
