/* No stalls: how many nodes one call looks at, counted in a build of bfc/ with
 * BFC_COUNT_VISITS, against workloads made to hurt; and how much memory the
 * allocator takes for itself.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "tests/random.h"
#include "tests/suite.h"

#include <stdio.h>

#define MAX_VISITS 128

uint64_t bfc_n_visits;

static uint64_t worst;

/* No asserts in the loops: each one would talk to the parent process. */
static void judge(void)
{
        if (bfc_n_visits > worst)
                worst = bfc_n_visits;
        if (bfc_n_visits > MAX_VISITS)
                ck_abort_msg("%llu nodes in one call", (unsigned long long)bfc_n_visits);
}

static bfc_handle take(struct bfc *b, uint64_t n_bytes)
{
        bfc_handle h = 0;
        uint64_t offset;
        int r;

        bfc_n_visits = 0;
        r = bfc_alloc(b, n_bytes, &h, &offset);
        judge();
        return r == 0 ? h : 0;
}

static void give(struct bfc *b, bfc_handle h)
{
        bfc_n_visits = 0;
        if (bfc_dealloc(b, h) != 0)
                ck_abort_msg("a live block cannot be freed");
        judge();
}

static struct bfc *make(uint64_t n_bytes)
{
        struct bfc *b = NULL;

        ck_assert_int_eq(bfc_new(BFC_GRANULE, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, n_bytes, 0, true), 0);
        worst = 0;
        return b;
}

static struct bfc *unmake(struct bfc *b, const char *name)
{
        const char *why = NULL;

        ck_assert_msg(bfc_check(b, &why) == 0, "does not hold: %s", why);
        fprintf(stderr, "# %s: at most %llu nodes in a call\n", name, (unsigned long long)worst);
        return bfc_destroy(b);
}

/* ---- many equal holes ------------------------------------------------------------- */

/* A million of them in a long run. */
static unsigned hole_bits(void)
{
        static unsigned bits;

        if (bits == 0)
                bits = suite_is_long() ? 20 : 16;
        return bits;
}

#define N_HOLES (1u << hole_bits())

enum order { RISING, FALLING, SHUFFLED, BITS_REVERSED, ZIGZAG, N_ORDERS };

static uint32_t in_order(enum order order, uint32_t i)
{
        uint32_t k = i;

        switch (order) {
        case FALLING:
                return N_HOLES - 1 - i;
        case SHUFFLED: /* a bijection */
                for (int round = 0; round < 3; round++) {
                        k = k * 0x9e375u % N_HOLES;
                        k ^= k >> 9;
                }
                return k % N_HOLES;
        case BITS_REVERSED:
                k = 0;
                for (unsigned bit = 0; bit < hole_bits(); bit++)
                        k |= (i >> bit & 1u) << (hole_bits() - 1 - bit);
                return k;
        case ZIGZAG:
                return i % 2 != 0 ? N_HOLES - 1 - i / 2 : i / 2;
        case RISING:
        case N_ORDERS:
                break;
        }
        return i;
}

/* Block 2 i is freed, in some order, and block 2 i + 1 keeps its neighbours apart. Then single
 * walls fall, here and there: each takes two holes out of the heap, wherever they are in it. */
LOOP_TEST(test_equal_holes, N_ORDERS + 2)
{
        enum order order = _i < N_ORDERS ? (enum order)_i : SHUFFLED;
        enum order walls = _i < N_ORDERS ? SHUFFLED : _i == N_ORDERS ? RISING : ZIGZAG;
        struct bfc *b = make((uint64_t)(2 * N_HOLES + 1) * BFC_GRANULE);
        bfc_handle *handles = calloc(2 * N_HOLES, sizeof(*handles));
        char name[64];

        ck_assert_ptr_nonnull(handles);
        for (uint32_t i = 0; i < 2 * N_HOLES; i++)
                handles[i] = take(b, BFC_GRANULE);
        for (uint32_t i = 0; i < N_HOLES; i++)
                give(b, handles[2 * in_order(order, i)]);
        for (uint32_t i = 0; i < N_HOLES / 4; i++)
                give(b, handles[2 * in_order(walls, i) + 1]);
        for (uint32_t i = 0; i < N_HOLES / 4; i++)
                (void)take(b, BFC_GRANULE);
        for (uint32_t i = 0; i < N_HOLES / 4; i++)
                (void)take(b, 2 * BFC_GRANULE);
        free(handles);
        snprintf(name, sizeof(name), "equal holes, orders %d and %d", (int)order, (int)walls);
        b = unmake(b, name);
}

/* ---- tries as deep as they get ---------------------------------------------------------- */

/* Sizes of one bin that differ in one bit each make a path; a block between two of them keeps
 * them apart. Taking the smallest, the largest, and what lies just above each walks it all. */
LOOP_TEST(test_deep_tries, 16)
{
        unsigned octave = 12 + (unsigned)_i; /* 12 .. 27 */
        struct bfc *b = make(BFC_MAX_SPACE);
        bfc_handle held[64], walls[64];
        unsigned n = 0;
        char name[64];

        for (unsigned bit = octave - 7; bit-- > 0 && n < 22;) {
                held[n] = take(b, ((UINT64_C(1) << octave) + (UINT64_C(1) << bit)) * BFC_GRANULE);
                walls[n++] = take(b, BFC_GRANULE);
        }
        held[n] = take(b, (UINT64_C(1) << octave) * BFC_GRANULE);
        walls[n++] = take(b, BFC_GRANULE);
        for (unsigned i = 0; i < n; i++) {
                ck_assert_uint_ne(held[i], 0);
                give(b, held[i]);
        }
        for (unsigned bit = 0; bit < octave - 7; bit++)
                for (unsigned more = 0; more < 2; more++) {
                        uint64_t size = (UINT64_C(1) << octave) + (UINT64_C(1) << bit) + more;
                        bfc_handle h = take(b, size * BFC_GRANULE);

                        if (h != 0)
                                give(b, h);
                }
        for (unsigned i = 0; i < n; i++)
                give(b, walls[i]);
        snprintf(name, sizeof(name), "a path of %u sizes", n);
        b = unmake(b, name);
}

/* ---- blocks in one extent -------------------------------------------------------------------- */

#define N_EXTENTS 256u /* as many as an arena of the daemon has */

/* Over every grid point lies a free chunk that is large enough and cannot hold the block in one
 * extent; behind them all is one that can. Each is looked at once, and found along a trie. */
LOOP_TEST(test_crossing, 2)
{
        const uint32_t extent = 4096, size = 2048; /* granules */
        bfc_handle holes[N_EXTENTS], h = 0;
        uint64_t at = 0, offset = 0;
        struct bfc *b = NULL;

        ck_assert_int_eq(bfc_new((uint64_t)extent * BFC_GRANULE, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, (uint64_t)(N_EXTENTS + 2) * extent * BFC_GRANULE, 0, true), 0);
        worst = 0;
        for (uint32_t i = 0; i < N_EXTENTS; i++) { /* of one size, or each of its own */
                uint64_t begin = (uint64_t)(i + 1) * extent - size / 2, n = size + (_i == 0 ? 0 : i);

                ck_assert_uint_ne(take(b, (begin - at) * BFC_GRANULE), 0);
                holes[i] = take(b, n * BFC_GRANULE);
                at = begin + n;
        }
        ck_assert_uint_ne(take(b, BFC_GRANULE), 0);
        for (uint32_t i = 0; i < N_EXTENTS; i++)
                give(b, holes[i]);
        bfc_n_visits = 0;
        ck_assert_int_eq(bfc_alloc_in_extent(b, (uint64_t)size * BFC_GRANULE, &h, &offset), 0);
        ck_assert_uint_eq(offset, (at + 1) * BFC_GRANULE);
        ck_assert_uint_ge(bfc_n_visits, N_EXTENTS);
        ck_assert_uint_le(bfc_n_visits, (_i == 0 ? 2 : 24) * N_EXTENTS);
        fprintf(stderr, "# one extent: %llu nodes\n", (unsigned long long)bfc_n_visits);
        b = unmake(b, "chunks over the grid");
}

/* ---- giving back ----------------------------------------------------------------------------- */

#define N_RANGES 2048u

/* As many free extents apart as the order says, and one that wants them all, or a few: nothing is
 * looked at or moved more than log2(n) times for each. */
LOOP_TEST(test_plan_release, 2 * N_ORDERS)
{
        enum order order = (enum order)(_i % N_ORDERS);
        const uint64_t extent = 16 * BFC_GRANULE;
        const size_t n_max = _i < N_ORDERS ? N_RANGES : 16;
        struct bfc_range *ranges = calloc(N_RANGES, sizeof(*ranges));
        bfc_handle *handles = calloc(2 * N_RANGES, sizeof(*handles));
        struct bfc *b = NULL;
        uint64_t sum = 0, n_visits;
        size_t n;

        ck_assert(ranges && handles);
        ck_assert_int_eq(bfc_new(extent, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, 2 * N_RANGES * extent, 0, true), 0);
        for (uint32_t i = 0; i < 2 * N_RANGES; i++)
                handles[i] = take(b, extent);
        for (uint32_t i = 0; i < N_HOLES; i++)
                if (in_order(order, i) < N_RANGES)
                        give(b, handles[2 * in_order(order, i)]);
        bfc_n_visits = 0;
        n = bfc_plan_release(b, UINT64_MAX, NULL, ranges, n_max, &sum);
        n_visits = bfc_n_visits;
        ck_assert_uint_eq(n, n_max);
        ck_assert_uint_eq(sum, n * extent);
        for (size_t i = 0; i < n; i++)
                if (ranges[i].begin != (2 * (N_RANGES - 1 - i)) * extent)
                        ck_abort_msg("not the highest first");
        fprintf(stderr, "# plan of a release: %llu visits and moves\n", (unsigned long long)n_visits);
        ck_assert_uint_ge(n_visits, N_RANGES);
        ck_assert_uint_le(n_visits, 16 * N_RANGES);
        bfc_n_visits = 0;
        for (size_t i = 0; i < n; i++)
                if (bfc_release_begin(b, ranges[i]) != 0)
                        ck_abort_msg("a planned range was refused");
        free(ranges);
        free(handles);
        b = unmake(b, "a release");
}

/* A caller that releases the extents of one chunk one after the other finds each at once, whatever else
 * is free. */
TEST(test_release_one_by_one)
{
        const uint64_t extent = 16 * BFC_GRANULE;
        struct bfc *b = NULL;
        uint64_t n_visits = 0, end;
        bfc_handle *handles = calloc(2 * N_RANGES, sizeof(*handles));

        ck_assert_ptr_nonnull(handles);
        ck_assert_int_eq(bfc_new(extent, &b), 0);
        ck_assert_int_eq(bfc_add_region(b, 0, 4 * N_RANGES * extent, 0, true), 0);
        for (uint32_t i = 0; i < 2 * N_RANGES; i++)
                handles[i] = take(b, extent);
        for (uint32_t i = 0; i < N_RANGES; i++)
                give(b, handles[2 * i]);
        ck_assert_uint_ne(take(b, extent * (N_RANGES + 1)), 0);
        end = 4 * N_RANGES * extent; /* the last chunk: all behind the block */
        for (uint64_t at = end - (N_RANGES - 1) * extent; at < end; at += extent) {
                bfc_n_visits = 0;
                if (bfc_release_begin(b, (struct bfc_range){ at, at + extent }) != 0)
                        ck_abort_msg("an extent was refused");
                n_visits += bfc_n_visits;
        }
        ck_assert_uint_le(n_visits, 8 * N_RANGES);
        free(handles);
        b = unmake(b, "extents of one chunk");
}

/* Each extent of the zones is looked at once, however many there are beyond. */
TEST(test_plan_zones)
{
        const struct bfc_zones zones = { 0, 16 * BFC_GRANULE, 64 };
        const uint64_t extent = zones.small_extent_bytes << 9, n_bytes = bfc_zones_bytes(&zones, extent);
        struct bfc_growth plan;
        struct bfc *b = NULL;

        ck_assert_int_eq(bfc_new(extent, &b), 0);
        ck_assert_int_eq(bfc_add_zoned_region(b, 0, n_bytes + 1000 * extent, &zones, false), 0);
        bfc_n_visits = 0;
        ck_assert_int_eq(bfc_plan_growth(b, 3 * extent + 256, UINT64_MAX, &plan), 0);
        fprintf(stderr, "# plan in zones: %llu visits\n", (unsigned long long)bfc_n_visits);
        ck_assert_uint_le(bfc_n_visits, 9 * 64 + 16);
        bfc_n_visits = 0;
        ck_assert_int_eq(bfc_plan_growth_in_extent(b, extent / 2 + 256, UINT64_MAX, &plan), 0);
        ck_assert_uint_le(bfc_n_visits, 4);
        ck_assert_uint_eq(plan.offset, n_bytes);
        b = unmake(b, "zones");
}

/* ---- splitting ------------------------------------------------------------------------------- */

/* One block becomes 100,001, all neighbours of each other. */
TEST(test_split)
{
        const uint32_t n = 100000;
        struct bfc *b = make((uint64_t)(n + 1) * BFC_GRANULE);
        bfc_handle *handles = calloc(n + 1, sizeof(*handles));

        ck_assert_ptr_nonnull(handles);
        handles[0] = take(b, (uint64_t)(n + 1) * BFC_GRANULE);
        bfc_n_visits = 0;
        for (uint32_t i = 0; i < n; i++)
                if (bfc_split(b, handles[i], BFC_GRANULE, &handles[i + 1]) != 0)
                        ck_abort_msg("a live block cannot be split");
        ck_assert_uint_eq(bfc_n_visits, 0);
        for (uint32_t i = 0; i <= n; i++)
                give(b, handles[i]);
        free(handles);
        b = unmake(b, "a block in many pieces");
}

/* ---- random, and memory --------------------------------------------------------------------- */

#define N_LIVE 100000u

TEST(test_random)
{
        struct bfc *b = make(BFC_MAX_SPACE);
        bfc_handle *live = calloc(N_LIVE, sizeof(*live));
        struct bfc_stats s;
        uint64_t state = 7;

        ck_assert_ptr_nonnull(live);
        for (uint32_t i = 0; i < 20 * N_LIVE; i++) {
                bfc_handle *h = &live[random_next(&state) % N_LIVE];
                uint64_t r = random_next(&state);

                if (i < N_LIVE)
                        h = &live[i];
                if (*h != 0)
                        give(b, *h);
                /* Even over the octaves from 256 bytes to 1 MiB, and some of equal sizes. */
                *h = take(b, r % 4 == 0 ? UINT64_C(1) << (8 + (r >> 32) % 12)
                                        : 1 + (r >> 32) % (UINT64_C(256) << (r >> 8) % 13));
                if (*h == 0)
                        ck_abort_msg("no room");
        }
        bfc_read_stats(b, &s);
        ck_assert_uint_eq(s.num_blocks, N_LIVE);
        fprintf(stderr, "# %.1f bytes of metadata per live block\n", (double)s.metadata_bytes / N_LIVE);
        ck_assert_uint_le(s.metadata_bytes, 48 * N_LIVE);
        free(live);
        b = unmake(b, "random");
}

TEST(memory_does_not_depend_on_region_size)
{
        struct bfc *small = make(BFC_GRANULE), *large = make(BFC_MAX_SPACE);
        struct bfc_stats s, t;

        bfc_read_stats(small, &s);
        bfc_read_stats(large, &t);
        ck_assert_uint_eq(s.metadata_bytes, t.metadata_bytes);
        ck_assert_uint_le(s.metadata_bytes, 32768);
        small = bfc_destroy(small);
        large = bfc_destroy(large);
}
