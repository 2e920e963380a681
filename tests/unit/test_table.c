/* Tables and texts: what an operator's terminal gets to see.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "ctl/table.h"
#include "ctl/text.h"

static char *printed(const struct table *t, int (*print)(const struct table *t, FILE *out))
{
        char *text = NULL;
        size_t n;
        FILE *out = open_memstream(&text, &n);

        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(print(t, out), 0);
        fclose(out);
        return text;
}

START_TEST(aligned)
{
        static const struct table_column columns[] = { { "NAME", false },
                                                       { "SIZE", true },
                                                       { "LAST", false } };
        struct table *t;
        char *text;

        ck_assert_int_eq(table_new(columns, 3, &t), 0);
        text = printed(t, table_print);
        ck_assert_str_eq(text, "NAME  SIZE  LAST\n"); /* no rows, still a table */
        free(text);
        table_text(t, "vision");
        table_size(t, 512u << 20);
        table_text(t, "a");
        table_text(t, "b\xc3\xa9"); /* two characters in three bytes */
        table_number(t, 7);
        table_text(t, "");
        text = printed(t, table_print);
        ck_assert_str_eq(text, "NAME         SIZE  LAST\n"
                               "vision  512.0 MiB  a\n"
                               "b\xc3\xa9              7  -\n");
        free(text);
        table_free(t);
        ck_assert_ptr_null(table_free(NULL));
}
END_TEST

START_TEST(upright)
{
        static const struct table_column columns[] = { { "Who", false },
                                                       { "At most", false },
                                                       { "Where", false } };
        struct table *t;
        char *text;

        ck_assert_int_eq(table_new(columns, 3, &t), 0);
        table_text(t, "me");
        table_percent(t, 1, 8);
        table_hex(t, 4096);
        text = printed(t, table_print_upright);
        ck_assert_str_eq(text, "Who      me\nAt most  12.5\nWhere    0x1000\n");
        free(text);
        table_free(t);
}
END_TEST

START_TEST(no_room)
{
        static const struct table_column columns[] = { { "A", false } };
        FILE *full = fopen("/dev/full", "we");
        struct table *t;

        ck_assert_ptr_nonnull(full);
        setvbuf(full, NULL, _IONBF, 0);
        ck_assert_int_eq(table_new(columns, 1, &t), 0);
        ck_assert_int_lt(table_print(t, full), 0);
        fclose(full);
        table_free(t);
}
END_TEST

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

START_TEST(escape)
{
        char *text = text_escape(escapes[_i].in);

        ck_assert_str_eq(text, escapes[_i].out);
        free(text);
}
END_TEST

START_TEST(valid)
{
        char *text = text_valid("a\n\xff\xc3\xa9\xe2\x82");

        ck_assert_str_eq(text, "a\n\xef\xbf\xbd\xc3\xa9\xef\xbf\xbd\xef\xbf\xbd");
        free(text);
        text = text_valid(NULL);
        ck_assert_str_eq(text, "");
        free(text);
}
END_TEST

START_TEST(sizes)
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
END_TEST

START_TEST(durations)
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
END_TEST

START_TEST(percents)
{
        char text[TEXT_MAX];

        ck_assert_str_eq(text_percent(0, 0, text), "-");
        ck_assert_str_eq(text_percent(0, 8, text), "0.0");
        ck_assert_str_eq(text_percent(8, 8, text), "100.0");
        ck_assert_str_eq(text_percent(UINT64_MAX, 1, text), "1844674407370955161600.0");
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("table");
        TCase *c = tcase_create("table");

        tcase_add_test(c, aligned);
        tcase_add_test(c, upright);
        tcase_add_test(c, no_room);
        tcase_add_loop_test(c, escape, 0, (int)(sizeof(escapes) / sizeof(escapes[0])));
        tcase_add_test(c, valid);
        tcase_add_test(c, sizes);
        tcase_add_test(c, durations);
        tcase_add_test(c, percents);
        suite_add_tcase(suite, c);
        return suite_run(suite);
}
