/* Pictures of an arena: against a model that knows every granule, and what they
 * cost with a million blocks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/occupancy.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "tests/random.h"
#include "tests/suite.h"

#define N_EXTENTS  5u
#define N_GRANULES 1000u /* of an extent */
#define EXTENT     ((uint64_t)N_GRANULES * BFC_GRANULE)

enum { UNBACKED, FREE, USED, LEAVING };

/* Every granule of five extents, some of them not there. */
static struct {
        struct occupancy extents[N_EXTENTS];
        bool is_there[N_EXTENTS], leaves[N_EXTENTS];
        uint8_t granules[N_EXTENTS * N_GRANULES];
} m;

static void model_open(size_t i)
{
        occupancy_open(&m.extents[i], EXTENT);
        m.is_there[i] = true;
        memset(m.granules + i * N_GRANULES, FREE, N_GRANULES);
}

static void model_set(size_t i, uint32_t begin, uint32_t end, bool used)
{
        struct bfc_range range = { begin * BFC_GRANULE, end * BFC_GRANULE };

        (used ? occupancy_add : occupancy_remove)(&m.extents[i], range);
        memset(m.granules + i * N_GRANULES + begin, used ? USED : FREE, end - begin);
        ck_assert(occupancy_check(&m.extents[i]));
}

static void model_close(void)
{
        for (size_t i = 0; i < N_EXTENTS; i++)
                if (m.is_there[i])
                        occupancy_close(&m.extents[i]);
        memset(&m, 0, sizeof(m));
}

/* The use of these bytes according to the cells, and 1 << LEAVING + 1 for none. */
static unsigned model_kinds(uint64_t begin, uint64_t end)
{
        unsigned kinds = 0;

        for (uint64_t at = begin; at < end;) {
                size_t i = (size_t)(at / EXTENT);
                uint64_t cell = UINT64_C(1) << (m.is_there[i] ? m.extents[i].shift : 8);
                uint64_t first = (at - i * EXTENT) / cell * cell, last = first + cell;

                last = last < EXTENT ? last : EXTENT;
                for (uint64_t g = first / BFC_GRANULE; g < last / BFC_GRANULE; g++)
                        kinds |= 1u << m.granules[i * N_GRANULES + g];
                at = i * EXTENT + last;
        }
        return kinds;
}

static char model_character(struct bfc_range span, size_t i)
{
        uint64_t n_bytes = span.end - span.begin;
        unsigned kinds = model_kinds(span.begin + i * n_bytes / PICTURE_CHARACTERS,
                                     span.begin + (i + 1) * n_bytes / PICTURE_CHARACTERS);

        switch (kinds) {
        case 1u << UNBACKED:
                return '-';
        case 1u << FREE:
                return '.';
        case 1u << USED:
                return '#';
        case 1u << LEAVING:
                return '~';
        default:
                return '+';
        }
}

static void check_picture(void)
{
        struct picture p;
        char drawn[PICTURE_CHARACTERS + 1], expected[PICTURE_CHARACTERS + 1] = "";
        struct bfc_range span = { UINT64_MAX, 0 };

        for (size_t i = 0; i < N_EXTENTS; i++) {
                if (!m.is_there[i])
                        continue;
                span.begin = span.end > 0 ? span.begin : i * EXTENT;
                span.end = (i + 1) * EXTENT;
        }
        picture_begin(&p, span);
        for (size_t i = 0; i < N_EXTENTS; i++)
                if (m.is_there[i])
                        picture_add(&p, (struct bfc_range){ i * EXTENT, (i + 1) * EXTENT }, &m.extents[i],
                                    m.leaves[i]);
        picture_draw(&p, drawn);
        for (size_t i = 0; i < PICTURE_CHARACTERS; i++)
                expected[i] = model_character(span, i);
        ck_assert_str_eq(drawn, expected);
}

TEST(known_pictures)
{
        struct picture p;
        char drawn[PICTURE_CHARACTERS + 1];

        picture_begin(&p, (struct bfc_range){ 0, 0 });
        picture_draw(&p, drawn);
        ck_assert_str_eq(drawn, "");

        model_open(0);
        model_open(1);
        model_open(4);
        model_set(0, 0, N_GRANULES, true); /* one block that is all of it */
        model_set(1, 0, 10, true);
        m.leaves[4] = true;
        memset(m.granules + 4 * N_GRANULES, LEAVING, N_GRANULES);
        check_picture();
        picture_begin(&p, (struct bfc_range){ 0, N_EXTENTS * EXTENT });
        picture_add(&p, (struct bfc_range){ 0, EXTENT }, &m.extents[0], false);
        picture_add(&p, (struct bfc_range){ EXTENT, 2 * EXTENT }, &m.extents[1], false);
        picture_add(&p, (struct bfc_range){ 4 * EXTENT, 5 * EXTENT }, &m.extents[4], true);
        picture_draw(&p, drawn);
        ck_assert_str_eq(drawn, "####################"
                                "+..................."
                                "--------------------"
                                "--------------------"
                                "~~~~~~~~~~~~~~~~~~~~");
        model_set(0, 0, N_GRANULES, false);
        ck_assert_uint_eq(m.extents[0].used_bytes, 0);
        check_picture();
        model_close();
}

/* Extents smaller than a cell's least size, and such as are no multiple of cells. */
TEST(sizes)
{
        for (uint64_t n = 1; n < 1000; n++) {
                struct occupancy o;

                occupancy_open(&o, n * BFC_GRANULE);
                for (uint64_t at = 0; at < n; at++)
                        occupancy_add(&o, (struct bfc_range){ at * BFC_GRANULE, (at + 1) * BFC_GRANULE });
                ck_assert_uint_eq(o.used_bytes, n * BFC_GRANULE);
                ck_assert(n == 1 || occupancy_check(&o));
                occupancy_close(&o);
        }
}

/* Blocks come and go at random; every picture is the model's. */
TEST(random_walk)
{
        uint64_t seed = 20261121;
        size_t n_drawn = 0;

        printf("# seed %llu\n", (unsigned long long)seed);
        for (size_t i = 0; i < N_EXTENTS; i++)
                if (i != 2)
                        model_open(i);
        for (unsigned step = 0; step < 20000; step++) {
                size_t i = (size_t)(random_next(&seed) % N_EXTENTS);
                uint32_t begin = (uint32_t)(random_next(&seed) % N_GRANULES), end = begin;
                uint8_t was = m.granules[i * N_GRANULES + begin];
                uint32_t most = step % 7 == 0 ? N_GRANULES - 1 : 40;

                if (!m.is_there[i])
                        continue;
                while (end < N_GRANULES && end - begin < most && m.granules[i * N_GRANULES + end] == was)
                        end++;
                model_set(i, begin, end, was == FREE);
                if (step % 10 == 0) {
                        check_picture();
                        n_drawn++;
                }
        }
        ck_assert_uint_gt(n_drawn, 1000);
        model_close();
}

/* Without memory for the cells an extent is free, used or mixed as a whole. */
TEST(without_cells)
{
        struct occupancy o;
        struct picture p;
        char drawn[PICTURE_CHARACTERS + 1];

        occupancy_open(&o, EXTENT);
        free(o.cells);
        o.cells = NULL;
        occupancy_add(&o, (struct bfc_range){ 0, BFC_GRANULE });
        picture_begin(&p, (struct bfc_range){ 0, EXTENT });
        picture_add(&p, p.span, &o, false);
        picture_draw(&p, drawn);
        for (size_t i = 0; i < PICTURE_CHARACTERS; i++)
                ck_assert_int_eq(drawn[i], '+');
        ck_assert(occupancy_check(&o));
        occupancy_close(&o);
}
