/* Maps of a partition, from canned lists: their parts tile, their sums are exact, and the pictures are bounded and
 * escaped.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/map.h"
#include "ctl/table.h"
#include "tests/random.h"
#include "tests/unit/lists.h"

#define N_ROWS 4096u

/* A list whose rows are the test's: they are in arrays here, and freed with the test. */
struct world {
        Bfcd__TenantRow tenants[80];
        Bfcd__Statistics stats[80];
        Bfcd__ExtentRow *extents;
        Bfcd__SessionRow sessions[32];
        struct list *space, *owners;
};

static struct world *w;
static struct map *m;

static void setup(void)
{
        w = calloc(1, sizeof(*w));
        ck_assert_ptr_nonnull(w);
        w->extents = calloc(N_ROWS, sizeof(*w->extents));
        ck_assert_ptr_nonnull(w->extents);
        ck_assert_int_eq(list_new(&w->space), 0);
        ck_assert_int_eq(list_new(&w->owners), 0);
        w->space->tenants = calloc(80, sizeof(void *));
        w->space->extents = calloc(N_ROWS, sizeof(void *));
        w->owners->sessions = calloc(32, sizeof(void *));
        ck_assert(w->space->tenants && w->space->extents && w->owners->sessions);
}

static void teardown(void)
{
        map_free(m);
        free(w->extents);
        free(w);
}

FIXTURE(map, setup, teardown);

static void start_map(const char *tenant)
{
        ck_assert_int_eq(map_new("train", tenant, w->space, MAP_COLUMNS, true, &m), 0);
}

static void add_tenant(const char *tenant, uint64_t n_reserved)
{
        size_t i = w->space->n_tenants++;

        bfcd__tenant_row__init(&w->tenants[i]);
        bfcd__statistics__init(&w->stats[i]);
        w->tenants[i].tenant = (char *)(uintptr_t)tenant;
        w->tenants[i].partition = (char *)(uintptr_t) "train";
        w->tenants[i].stats = &w->stats[i];
        w->stats[i].bytes_reserved = n_reserved;
        w->space->tenants[i] = &w->tenants[i];
}

static Bfcd__ExtentRow *add_extent(const char *tenant, uint64_t region, uint64_t offset, uint64_t n_bytes)
{
        size_t i = w->space->n_extents++;

        ck_assert_uint_lt(i, N_ROWS);
        bfcd__extent_row__init(&w->extents[i]);
        w->extents[i].tenant = (char *)(uintptr_t)tenant;
        w->extents[i].partition = (char *)(uintptr_t) "train";
        w->extents[i].region_id = region;
        w->extents[i].region_bytes = 4096 * MIB;
        w->extents[i].offset = offset;
        w->extents[i].n_bytes = n_bytes;
        w->space->extents[i] = &w->extents[i];
        return &w->extents[i];
}

static void add_session(uint64_t id, const char *name, uint64_t n_idle)
{
        size_t i = w->owners->n_sessions++;

        bfcd__session_row__init(&w->sessions[i]);
        w->sessions[i].session_id = id;
        w->sessions[i].pid = 1000 + id;
        w->sessions[i].name = (char *)(uintptr_t)name;
        w->sessions[i].client_bytes_idle = n_idle;
        w->owners->sessions[i] = &w->sessions[i];
}

static void add_block(uint64_t region, uint64_t offset, uint64_t n_bytes, uint64_t session, const char *tag)
{
        Bfcd__BlockRow row = BFCD__BLOCK_ROW__INIT;

        row.tenant = (char *)(uintptr_t) "red";
        row.partition = (char *)(uintptr_t) "train";
        row.region_id = region;
        row.offset = offset;
        row.n_bytes = n_bytes;
        row.session_id = session;
        row.age_ms = session * 100000;
        row.tag = (char *)(uintptr_t)tag;
        ck_assert_int_eq(map_add(m, &row), 0);
}

static int svg_with_labels(FILE *out, const struct map *of)
{
        return map_svg(out, of, MAP_COLUMNS, true);
}

static int svg_without_labels(FILE *out, const struct map *of)
{
        return map_svg(out, of, MAP_COLUMNS, false);
}

static char *text_of(int (*write)(FILE *out, const struct map *of))
{
        static char *text; /* gcc -O3 takes a pointer into it for one to a variable that is gone */
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(write(out, m), 0);
        ck_assert_int_eq(fclose(out), 0);
        ck_assert_uint_eq(strlen(text), n);
        return text;
}

/* The parts tile the row. Returns their sums. */
static void check_parts_of(size_t row, uint64_t ret[MAP_KINDS], uint64_t *ret_n_blocks)
{
        struct map_part *parts;
        uint64_t at = 0;
        size_t n;

        memset(ret, 0, MAP_KINDS * sizeof(*ret));
        *ret_n_blocks = 0;
        ck_assert_int_eq(map_parts(m, row, &parts, &n), 0);
        for (size_t i = 0; i < n; i++) {
                uint64_t sum = 0;

                ck_assert_uint_eq(parts[i].begin, at);
                ck_assert_uint_gt(parts[i].end, at);
                for (unsigned k = 0; k < MAP_KINDS; k++) {
                        sum += parts[i].bytes[k];
                        ret[k] += parts[i].bytes[k];
                }
                ck_assert_uint_eq(sum, parts[i].end - parts[i].begin);
                *ret_n_blocks += parts[i].n_blocks;
                at = parts[i].end;
        }
        ck_assert_uint_eq(at, m->rows[row].n_bytes);
        free(parts);
}

/* ---- sums -------------------------------------------------------------------------- */

/* Random blocks and gaps in two regions, with a hole and a retiring extent. */
static void fill(uint64_t seed, uint64_t *ret_used, uint64_t *ret_n)
{
        uint64_t random = seed, at = 0;

        *ret_used = *ret_n = 0;
        add_tenant("red", 512 * MIB);
        for (uint64_t i = 0; i < 16; i++)
                if (i != 5)
                        add_extent("red", 7 + i / 8, i % 8 * 32 * MIB, 32 * MIB)->is_retiring = i == 9;
        ck_assert_int_eq(map_new("train", NULL, w->space, 100 + seed * 37, seed % 2 == 0, &m), 0);
        while (at < 512 * MIB) {
                uint64_t n_bytes = (random_next(&random) % (1u << random_next(&random) % 17) + 1) * 256;
                uint64_t extent = at / (32 * MIB);

                if ((at + n_bytes - 1) / (32 * MIB) != extent || extent == 5 || extent == 9) {
                        at = (extent + 1) * 32 * MIB;
                        continue;
                }
                if (random_next(&random) % 3 > 0) {
                        add_block(7 + extent / 8, at % (256 * MIB), n_bytes, 1 + random_next(&random) % 5,
                                  "t");
                        *ret_used += n_bytes;
                        (*ret_n)++;
                }
                at += n_bytes;
        }
        ck_assert_int_eq(map_finish(m, w->owners), 0);
}

LOOP_TEST(parts_tile_and_sums_are_exact, 8)
{
        uint64_t sums[MAP_KINDS], n_blocks, used, n;

        fill((uint64_t)_i, &used, &n);
        check_parts_of(0, sums, &n_blocks);
        ck_assert_uint_eq(sums[MAP_USED], used);
        ck_assert_uint_eq(n_blocks, n);
        ck_assert_uint_eq(sums[MAP_RETIRING], 32 * MIB);
        ck_assert_uint_eq(sums[MAP_UNBACKED], 32 * MIB);
        ck_assert_uint_eq(sums[MAP_FREE], 512 * MIB - 64 * MIB - used);
        ck_assert_uint_eq(m->rows[0].used_bytes, used);
        ck_assert_uint_eq(m->rows[0].free_bytes, sums[MAP_FREE]);
        ck_assert_uint_eq(m->rows[0].unbacked_bytes, 8192 * MIB - 15 * 32 * MIB);
        ck_assert_uint_eq(m->n_unplaced, 0);
}

/* What a client reports is at most what it has. Blocks that are nowhere are counted. */
TEST(odd_rows_do_no_harm)
{
        uint64_t sums[MAP_KINDS], n_blocks;

        add_tenant("red", 32 * MIB);
        add_extent("red", 7, 0, 32 * MIB);
        add_extent("red", 7, UINT64_MAX - 4, 32 * MIB); /* both are not in their region */
        add_extent("red", 8, 0, UINT64_MAX);
        add_session(3, "x", UINT64_MAX);
        start_map(NULL);
        ck_assert_uint_eq(m->rows[0].n_bytes, 32 * MIB);
        add_block(7, 0, 20 * MIB, 3, "a");
        add_block(7, 10 * MIB, 20 * MIB, 3, "b"); /* was made while the list was read */
        add_block(7, 31 * MIB, 2 * MIB, 3, "");
        add_block(7, UINT64_MAX, 256, 3, "");
        add_block(7, 0, UINT64_MAX, 3, "");
        add_block(7, 256, 0, 3, "");
        add_block(9, 0, 256, 3, "");
        ck_assert_uint_eq(m->n_unplaced, 5);
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        ck_assert_uint_eq(m->rows[0].idle_bytes, 40 * MIB);
        check_parts_of(0, sums, &n_blocks);
        ck_assert_uint_eq(sums[MAP_USED], 30 * MIB);
        ck_assert_uint_eq(n_blocks, 2);
        free(text_of(svg_with_labels));
        free(text_of(map_text));
}

TEST(one_tenant_is_chosen)
{
        char names[70][8], *text;

        for (unsigned i = 0; i < 70; i++) {
                snprintf(names[i], sizeof(names[i]), "t%02u", i);
                add_tenant(names[i], (1 + i) * MIB);
                add_extent(names[i], 100 + i, 0, (1 + i) * MIB);
        }
        start_map("t03");
        ck_assert_uint_eq(m->n_rows, 1);
        ck_assert_uint_eq(m->rows[0].backed_bytes, 4 * MIB);
        ck_assert_uint_eq(m->n_left_out, 0);
        m->space = NULL; /* for the next one */
        map_free(m);
        start_map(NULL);
        ck_assert_uint_eq(m->n_rows, MAP_ROWS);
        ck_assert_uint_eq(m->n_left_out, 6);
        ck_assert_str_eq(m->rows[0].tenant, "t06");
        for (uint64_t i = 6; i < 70; i++)
                for (uint64_t at = 0; at < (1 + i) * MIB; at += 64 << 10)
                        add_block(100 + i, at, 16 << 10, 1 + (i + at / 65536) % 5, "");
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(svg_with_labels);
        ck_assert_uint_lt(strlen(text), 1000000);
        ck_assert_ptr_nonnull(strstr(text, "6 more tenants"));
        free(text);
}

/* ---- pictures ---------------------------------------------------------------------- */

/* All small ones, or every tenth one as large as a cell and more, which is drawn by itself. */
LOOP_TEST(pictures_of_many_blocks_are_small, 2)
{
        const uint64_t size = 64 << 10;
        char *text;

        add_tenant("red", 100000 * 2 * size);
        for (uint64_t i = 0; i < 2000; i++)
                add_extent("red", 1 + i / 400, i % 400 * 100 * size, 100 * size);
        start_map(NULL);
        for (uint64_t i = 0; i < 100000; i++) {
                uint64_t offset = i % 20000 * 2 * size, n_bytes = size;

                if (_i > 0 && i % 500 > 250)
                        continue;
                if (_i > 0 && i % 500 == 250)
                        n_bytes = 400 * size;
                add_block(1 + i / 20000, offset, n_bytes, 1 + i % 7,
                          "<&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"&\"");
        }
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(svg_with_labels);
        ck_assert_uint_lt(strlen(text), 1000000);
        ck_assert_uint_gt(strlen(text), 50000);
        ck_assert_ptr_nonnull(strstr(text, _i > 0 ? "block of " : "100000 blocks</text>"));
        free(text);
}

TEST(names_are_escaped)
{
        static const char hostile[] = "</text><script>alert(1)</script>&\"\x1b[2J\xff\xef\xbf\xbf";
        json_t *json;
        char *text;

        add_tenant("red", 32 * MIB);
        add_extent("red", 7, 0, 32 * MIB);
        add_session(3, hostile, 0);
        start_map(NULL);
        add_block(7, 0, 20 * MIB, 3, hostile);
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(svg_with_labels);
        ck_assert_ptr_null(strstr(text, "<script"));
        ck_assert_ptr_nonnull(strstr(text, "&#60;/text&#62;&#60;script&#62;alert(1)"));
        ck_assert_ptr_null(strchr(text, '\x1b'));
        ck_assert_ptr_null(strstr(text, "\xef\xbf\xbf"));
        ck_assert_ptr_null(strchr(text, '\xff'));
        free(text);
        text = text_of(map_text);
        ck_assert_ptr_null(strchr(text, '\x1b'));
        free(text);
        json = map_json(m);
        ck_assert_ptr_nonnull(json);
        json_decref(json);
}

/* The longest line of text in an SVG. */
static size_t longest_line(const char *text)
{
        size_t longest = 0;

        for (const char *at = strstr(text, "<text"); at; at = strstr(at, "<text")) {
                at = strchr(at, '>') + 1;
                longest = strcspn(at, "<") > longest ? strcspn(at, "<") : longest;
        }
        return longest;
}

static int narrow_svg(FILE *out, const struct map *of)
{
        return map_svg(out, of, MAP_NARROW, false);
}

/* All of it is there, in more lines, with letters as large. */
TEST(a_narrow_picture)
{
        char *text;

        add_tenant("red", 32 * MIB);
        add_extent("red", 7, 0, 32 * MIB);
        add_session(3, "a-name-of-forty-eight-characters-without-a-blank", 4 * MIB);
        start_map(NULL);
        add_block(7, 0, 20 * MIB, 3, "");
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(svg_without_labels);
        CHECK_PARTS(
                text,
                ">red: 20.0 MiB in use (4.0 MiB idle), 12.0 MiB free, 0 B retiring, 4.0 GiB unbacked, 1 block</text>");
        text = text_of(narrow_svg);
        ck_assert_uint_le(longest_line(text), MAP_NARROW / 7);
        ck_assert_ptr_nonnull(strstr(text, "viewBox=\"0 0 280 "));
        CHECK_PARTS(text, ">red: ", "in use", "retiring", "unbacked",
                    ">session 3 of red:", ">a-name-of-forty-eight", "blank", "older</text>");
}

TEST(labels_are_left_out_where_everybody_sees_the_map)
{
        char *text;

        add_tenant("red", 32 * MIB);
        add_extent("red", 7, 0, 32 * MIB);
        add_session(3, "job", 0);
        start_map(NULL);
        add_block(7, 0, 20 * MIB, 3, "secret-plan");
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        CHECK_PARTS(text_of(svg_with_labels), "secret-plan");
        text = text_of(svg_without_labels);
        ck_assert_ptr_null(strstr(text, "secret-plan"));
        ck_assert_ptr_nonnull(strstr(text, "block of "));
        free(text);
}

TEST(the_text_fits)
{
        char *text, expected[81];

        add_tenant("tenant-of-a-long-name", 64 * MIB);
        add_tenant("red", 64 * MIB);
        add_extent("tenant-of-a-long-name", 1, 0, 64 * MIB);
        add_extent("red", 7, 0, 16 * MIB);
        add_extent("red", 7, 32 * MIB, 32 * MIB);
        table_look.is_cut = true;
        ck_assert_int_eq(map_new("train", NULL, w->space, map_text_columns(80), false, &m), 0);
        add_block(7, 0, 8 * MIB, 3, "");
        add_block(7, 32 * MIB, 32 * MIB, 4, "");
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(map_text);
        for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
                ck_assert_msg(strcspn(line, "\n") <= 80, "too long: %s", line);
        memset(expected, '.', sizeof(expected));
        memset(expected, 'b', 8);
        ck_assert_ptr_nonnull(strstr(text, "\ntenant-of-a- |......"));
        ck_assert_ptr_nonnull(strstr(text, "\nred          |bbbbbbbb"));
        ck_assert_ptr_nonnull(strstr(text, "...-"));
        ck_assert_ptr_nonnull(strstr(text, "-aaaaaaaaaaaaaaaaaaaaaaaaaaaa"));
        free(text);
}

TEST(an_empty_partition)
{
        char *text;

        start_map(NULL);
        ck_assert_int_eq(map_finish(m, w->owners), 0);
        text = text_of(svg_with_labels);
        ck_assert_ptr_null(strstr(text, "1 pixel"));
        CHECK_PARTS(text, "No tenant has memory there.");
        check_text(text_of(map_text), "No tenant has memory there.\n");
}
