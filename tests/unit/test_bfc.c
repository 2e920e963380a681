/* The allocator core: placement, merging, handles, growth, release, statistics.
 * Every test ends with a check of all invariants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "tests/suite.h"

#include <errno.h>
#include <stdio.h>

#define KIB UINT64_C(1024)
#define MIB (UINT64_C(1024) * KIB)

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

START_TEST(test_places_best_fit_lowest)
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
END_TEST

START_TEST(test_merges_both_sides)
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
END_TEST

START_TEST(test_handles_are_safe)
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
END_TEST

START_TEST(test_regions)
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
END_TEST

START_TEST(test_growth)
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
        /* The new block begins in the rest of the extent. */
        ck_assert_int_eq(bfc_plan_growth(b, 1024, 2048, &second), 0);
        ck_assert_uint_eq(second.offset, 1536);
        ck_assert_uint_eq(second.new_bytes, 1024);
        ck_assert_uint_eq(second.span.begin, 1024);
        ck_assert_uint_eq(second.span.end, 3072);
        ck_assert_int_eq(bfc_grow_begin(b, &second, &h), 0);
        ck_drawing(b, "u6 p2 p2 p2 -20 ");
        ck_assert_int_eq(bfc_grow_cancel(b, h), 0);
        ck_drawing(b, "u6 f2 -24 ");
        ck_assert_int_eq(bfc_grow_begin(b, &second, &h), 0);
        ck_assert_int_eq(bfc_grow_commit(b, h), 0);
        ck_drawing(b, "u6 u4 f2 -20 ");
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
END_TEST

START_TEST(test_release)
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
END_TEST

START_TEST(test_stats)
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
END_TEST

int main(void)
{
        Suite *s = suite_create("bfc");
        TCase *basic = tcase_create("basic");

        tcase_set_timeout(basic, 60);
        tcase_add_test(basic, test_places_best_fit_lowest);
        tcase_add_test(basic, test_merges_both_sides);
        tcase_add_test(basic, test_handles_are_safe);
        tcase_add_test(basic, test_regions);
        tcase_add_test(basic, test_growth);
        tcase_add_test(basic, test_release);
        tcase_add_test(basic, test_stats);
        suite_add_tcase(s, basic);
        return suite_run(s);
}
