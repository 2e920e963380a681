/* Tables and texts: what an operator's terminal gets to see.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/table.h"
#include "ctl/text.h"
#include "proto/bfcd.pb-c.h"
#include "tests/unit/lists.h"

struct row {
        const char *name, *more;
        uint64_t number, time_ms;
        uint32_t narrow;
        int is_set; /* as protobuf-c has a bool */
        struct row *inner;
        Bfcd__DeviceCalls *calls;
};

#define COLUMN(title, key, flags, type, member) title, key, flags, type, TABLE_MEMBER(struct row, member)

static char *printed(const struct table_column *columns, const struct row *rows, size_t n_rows)
{
        const void *pointers[8];
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        for (size_t i = 0; i < n_rows; i++)
                pointers[i] = &rows[i];
        ck_assert_int_eq(table_print(out, columns, pointers, n_rows, "Nothing."), 0);
        fclose(out);
        return text;
}

TEST(aligned)
{
        static const struct table_column columns[] = { { COLUMN("NAME", "name", 0, TABLE_TEXT, name) },
                                                       { COLUMN("SIZE", "n", TABLE_RIGHT, TABLE_NUMBER,
                                                                number) },
                                                       { COLUMN(NULL, "x", 0, TABLE_TEXT, more) },
                                                       { COLUMN("LAST", "last", 0, TABLE_TEXT, more) },
                                                       { 0 } };
        static const struct row rows[] = {
                { .name = "vision", .number = 512u << 20, .more = "a" },
                { .name = "b\xc3\xa9", .number = 7, .more = "" }, /* two characters in three bytes */
        };

        check_text(printed(columns, rows, 0), "Nothing.\n");
        check_text(printed(columns, rows, 2), "NAME         SIZE  LAST\n"
                                              "vision  536870912  a\n"
                                              "b\xc3\xa9              7  -\n");
        ck_assert_ptr_null(table_free(NULL));
}

static void make_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        text_percent(((const struct row *)row)->number, 8, ret);
}

static const char *instead(const void *row)
{
        return ((const struct row *)row)->number == 0 ? "none" : NULL;
}

static json_t *made_json(const void *row)
{
        return json_integer((json_int_t)((const struct row *)row)->number + 1);
}

static const struct table_column every_type[] = {
        { COLUMN("Who", "who", 0, TABLE_TEXT, name) },
        { COLUMN(NULL, "null", TABLE_NULL, TABLE_TEXT, more) },
        { "Part", "part", .type = TABLE_MADE, .text = make_text },
        { COLUMN("Where", "where", 0, TABLE_HEX, time_ms) },
        { COLUMN("Id", "id", 0, TABLE_ID, number) },
        { COLUMN("Narrow", "narrow", 0, TABLE_NUMBER, narrow) },
        { COLUMN("Size", "size", 0, TABLE_SIZE, number), .instead = instead },
        { COLUMN("Time", "time", 0, TABLE_DURATION, time_ms) },
        { COLUMN("Never", "never", 0, TABLE_AGO, narrow), .via = offsetof(struct row, inner) },
        { COLUMN("Set", "set", 0, TABLE_BOOL, is_set) },
        { .key = "own", .json = made_json },
        { .type = TABLE_KEYS,
          .via = offsetof(struct row, calls),
          .keys = &bfcd__device_calls__descriptor,
          .without = "longest_ns" },
        { COLUMN(NULL, "num_calls", TABLE_OF_KEYS, TABLE_TEXT, name) },
        { 0 },
};

TEST(upright)
{
        struct row row = { .name = "me", .more = "", .number = 1, .time_ms = 4096, .narrow = 7, .is_set = 1 };
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_int_eq(table_print_upright(out, every_type, &row), 0);
        row.number = 0;
        row.is_set = 0;
        ck_assert_int_eq(table_print_upright(out, every_type, &row), 0);
        fclose(out);
        ck_assert_str_eq(text, "Who     me\nPart    12.5\nWhere   0x1000\nId      1\nNarrow  7\n"
                               "Size    1 B\nTime    4.0 s\nNever   -\nSet     yes\n"
                               "Who     me\nPart    0.0\nWhere   0x1000\nId      0\nNarrow  7\n"
                               "Size    none\nTime    4.0 s\nNever   -\nSet     no\n");
        free(text);
}

/* Columns make the JSON, with exact values; a pointer that is NULL is a struct of zeroes. */
TEST(json)
{
        Bfcd__DeviceCalls calls = BFCD__DEVICE_CALLS__INIT;
        struct row row = { .name = "\x1b\"\xff", .more = "", .number = UINT64_MAX, .time_ms = 4096 };
        json_t *object, *expected;

        object = table_json(every_type, &row);
        expected = json_pack("{s:s, s:n, s:s, s:i, s:s, s:i, s:I, s:i, s:i, s:b, s:i, s:i, s:i, s:i}", "who",
                             "\x1b\"\xef\xbf\xbd", "null", "part", "230584300921369395200.0", "where", 4096,
                             "id", "18446744073709551615", "narrow", 0, "size", (json_int_t)INT64_MAX, "time",
                             4096, "never", 0, "set", 0, "own", 0, "num_calls", 0, "num_failed", 0,
                             "total_ns", 0);
        ck_assert(json_equal(object, expected));
        json_decref(object);
        json_decref(expected);
        calls.num_failed = 9;
        row.calls = &calls;
        object = table_json(every_type, &row);
        ck_assert_int_eq(json_integer_value(json_object_get(object, "num_failed")), 9);
        json_decref(object);
}

/* A line has what the object has. */
TEST(json_line)
{
        static const struct table_column columns[] = { { COLUMN("WHO", "who", 0, TABLE_TEXT, name) },
                                                       { COLUMN("T", NULL, 0, TABLE_TEXT, name) },
                                                       { COLUMN(NULL, "more", TABLE_NULL, TABLE_TEXT, more) },
                                                       { COLUMN("ID", "id", 0, TABLE_ID, number) },
                                                       { COLUMN("N", "n", 0, TABLE_NUMBER, number) },
                                                       { 0 } };
        static const char *const names[] = { "plain", "a\"b\\c", "\n\x1b", "\xff\xc3\xa9", "" };

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                struct row row = { .name = names[i], .more = i ? "x" : "", .number = i ? UINT64_MAX : 5 };
                json_t *object = table_json(columns, &row), *read;
                char *text = NULL;
                size_t n;
                FILE *out = open_memstream(&text, &n);

                table_json_line(out, columns, &row);
                fclose(out);
                read = json_loads(text, 0, NULL);
                ck_assert_msg(read && json_equal(object, read), "%s", text);
                json_decref(read);
                json_decref(object);
                free(text);
        }
}

/* No line ends in blanks. */
TEST(columns_by_choice)
{
        static const struct table_column columns[] = { { COLUMN("A", NULL, TABLE_WIDE, TABLE_TEXT, name) },
                                                       { COLUMN("SUM", NULL, TABLE_RIGHT | TABLE_NARROW,
                                                                TABLE_NUMBER, number) },
                                                       { COLUMN("B", NULL, 0, TABLE_TEXT, more) },
                                                       { COLUMN("C", NULL, TABLE_WIDE, TABLE_TEXT, name) },
                                                       { 0 } };
        static const struct row rows[] = { { .name = "a", .number = 7, .more = "b" },
                                           { .name = "a", .number = 7, .more = "bb" } };

        check_text(printed(columns, rows, 2), "SUM  B\n  7  b\n  7  bb\n");
        table_look.is_wide = true;
        check_text(printed(columns, rows, 2), "A  B   C\na  b   a\na  bb  a\n");
}

static const struct table_column texts_and_number[] = {
        { COLUMN("X", NULL, 0, TABLE_TEXT, name) },
        { COLUMN("N", NULL, TABLE_RIGHT, TABLE_NUMBER, number) },
        { COLUMN("Y", NULL, 0, TABLE_TEXT, more) },
        { 0 },
};

/* Texts are cut on a terminal only, and numbers never. */
TEST(cut_to_a_terminal)
{
        char a[101], *text;
        const struct row rows[] = { { .name = a, .number = UINT64_MAX, .more = "short" },
                                    { .name = "\xc3\xa9\xc3\xa9", .number = 1, .more = "b" } };

        memset(a, 'a', 100);
        a[100] = '\0';
        table_look.is_cut = true;
        text = printed(texts_and_number, rows, 2);
        ck_assert_ptr_nonnull(strstr(text, "a  18446744073709551615  s"));
        ck_assert_uint_eq(strcspn(text + strcspn(text, "\n") + 1, "\n"), TABLE_COLUMNS);
        free(text);
        table_look.is_wide = true;
        CHECK_PARTS(printed(texts_and_number, rows, 2), a);
        table_look.is_wide = table_look.is_cut = false; /* a pipe */
        CHECK_PARTS(printed(texts_and_number, rows, 2), a);
}

/* A table that is printed every second: a size that changes moves no column. */
TEST(columns_stay)
{
        static const struct table_column columns[] = {
                { COLUMN("A", NULL, TABLE_RIGHT, TABLE_SIZE, number) },
                { COLUMN("B", NULL, TABLE_RIGHT, TABLE_DURATION, time_ms) },
                { 0 },
        };
        static const uint64_t sizes[] = { 0, 1023, 1ull << 20, 1023ull << 20, (1ull << 30) - (60 << 10) };
        static const uint64_t times[] = { 0, 59900, 3599000, 86399000, 86400000 };
        char *text = NULL;

        for (size_t i = 0; i < 5; i++) {
                const struct row row = { .number = sizes[i], .time_ms = times[i] };
                char *before = text;

                text = printed(columns, &row, 1);
                if (before)
                        ck_assert_uint_eq(strcspn(text, "\n"), strcspn(before, "\n"));
                free(before);
        }
        free(text);
}

/* The titles come once, and columns never get narrower. */
TEST(parts)
{
        const struct row wide = { .name = "long name", .number = 12345, .more = "x" },
                         narrow = { .name = "n", .number = 1, .more = "y" };
        char *text = NULL;
        struct table *t;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_int_eq(table_new(texts_and_number, NULL, &t), 0);
        ck_assert_int_eq(table_add(t, &wide), 0);
        ck_assert_int_eq(table_flush(t, out), 0);
        ck_assert_int_eq(table_add(t, &narrow), 0);
        ck_assert_int_eq(table_flush(t, out), 0);
        ck_assert_int_eq(table_flush(t, out), 0);
        fclose(out);
        table_free(t);
        ck_assert_str_eq(text, "X              N  Y\nlong name  12345  x\nn              1  y\n");
        free(text);
}

static enum table_mark mark(const void *row)
{
        return ((const struct row *)row)->number > 0 ? TABLE_ALARM : TABLE_PLAIN;
}

TEST(colour)
{
        static const struct table_column columns[] = {
                { COLUMN("A", NULL, 0, TABLE_TEXT, name) },
                { COLUMN("B", NULL, 0, TABLE_TEXT, more), .mark = mark },
                { 0 },
        };
        static const struct row rows[] = { { .name = "good", .more = "bad", .number = 1 },
                                           { .name = "good", .more = "good" } };
        int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), ends[2];

        check_text(printed(columns, rows, 2), "A     B\ngood  bad\ngood  good\n");
        table_look.has_colour = true;
        check_text(printed(columns, rows, 2),
                   "\033[1mA   \033[0m  \033[1mB\033[0m\ngood  \033[31mbad\033[0m\ngood  good\n");

        ck_assert_int_eq(pipe2(ends, O_CLOEXEC), 0);
        setenv("TERM", "xterm", 1);
        unsetenv("NO_COLOR");
        ck_assert(!table_may_colour(ends[1]));
        if (terminal >= 0) { /* a machine may have no /dev/pts */
                ck_assert(table_may_colour(terminal));
                setenv("NO_COLOR", "1", 1);
                ck_assert(!table_may_colour(terminal));
                unsetenv("NO_COLOR");
                setenv("TERM", "dumb", 1);
                ck_assert(!table_may_colour(terminal));
                close(terminal);
        }
        close(ends[0]);
        close(ends[1]);
}

TEST(no_room)
{
        static const struct row row = { .name = "x", .more = "y" };
        const void *rows[] = { &row };
        FILE *full = fopen("/dev/full", "we");

        ck_assert_ptr_nonnull(full);
        setvbuf(full, NULL, _IONBF, 0);
        ck_assert_int_lt(table_print(full, texts_and_number, rows, 1, NULL), 0);
        fclose(full);
}

/* What a client chose cannot reach the terminal. */
TEST(escaped)
{
        static const struct row row = { .name = "\x1b[31m\n\\x1b", .more = "y" };

        CHECK_PARTS(printed(texts_and_number, &row, 1), "\n\\x1b[31m\\n\\\\x1b  0  y\n");
}

static const struct {
        const char *in;
        const char *out;
} escapes[] = {
        { "", "" },
        { "plain name", "plain name" },
        { "na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80", "na\xc3\xafve \xe2\x82\xac \xf0\x9f\x98\x80" },
        { "a\nb\tc\r", "a\\nb\\tc\\r" },
        { "\x1b]0;owned\x07", "\\x1b]0;owned\\x07" },
        { "\x7f", "\\x7f" },
        { "\xc2\x9b"
          "31m",
          "\\u009b31m" }, /* the one-character CSI */
        { "a\xe2\x80\xae"
          "b",
          "a\\u202eb" },        /* turns the direction of writing */
        { "\\x1b", "\\\\x1b" }, /* cannot pass for an escape */
        { "\xff\xfe", "\\xff\\xfe" },
        { "cut \xe2\x82", "cut \\xe2\\x82" },           /* a name cut at 63 bytes */
        { "\xc0\xaf", "\\xc0\\xaf" },                   /* overlong */
        { "\xed\xa0\x80", "\\xed\\xa0\\x80" },          /* a surrogate */
        { "\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80" }, /* above U+10FFFF */
};

LOOP_TEST(escape, sizeof(escapes) / sizeof(escapes[0]))
{
        check_text(text_escape(escapes[_i].in), escapes[_i].out);
}

TEST(valid)
{
        check_text(text_valid("a\n\xff\xc3\xa9\xe2\x82"), "a\n\xef\xbf\xbd\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd");
        check_text(text_valid(NULL), "");
}

TEST(sizes)
{
        char text[TEXT_MAX];

        ck_assert_str_eq(text_size(0, text), "0 B");
        ck_assert_str_eq(text_size(1023, text), "1023 B");
        ck_assert_str_eq(text_size(1024, text), "1.0 KiB");
        ck_assert_str_eq(text_size(1536, text), "1.5 KiB");
        ck_assert_str_eq(text_size(1048575, text), "1.0 MiB"); /* not 1024.0 KiB */
        ck_assert_str_eq(text_size(512u << 20, text), "512.0 MiB");
        ck_assert_str_eq(text_size(3ull << 30, text), "3.0 GiB");
        ck_assert_str_eq(text_size(UINT64_MAX, text), "16.0 EiB");
}

TEST(durations)
{
        char text[TEXT_MAX];

        ck_assert_str_eq(text_duration(0, text), "0.0 s");
        ck_assert_str_eq(text_duration(12345, text), "12.3 s");
        ck_assert_str_eq(text_duration(59999, text), "59.9 s");
        ck_assert_str_eq(text_duration(60000, text), "1m 00s");
        ck_assert_str_eq(text_duration(3599999, text), "59m 59s");
        ck_assert_str_eq(text_duration(3600000 * 3 + 60000 * 7, text), "3h 07m");
        ck_assert_str_eq(text_duration(86400000ull * 2 + 3600000, text), "2d 01h");
}

TEST(percents)
{
        char text[TEXT_MAX];

        ck_assert_str_eq(text_percent(0, 0, text), "-");
        ck_assert_str_eq(text_percent(0, 8, text), "0.0");
        ck_assert_str_eq(text_percent(8, 8, text), "100.0");
        ck_assert_str_eq(text_percent(UINT64_MAX, 1, text), "1844674407370955161600.0");
}
