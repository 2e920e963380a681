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
        static const struct table_column columns[] = { { "NAME", TABLE_LEFT },
                                                       { "SIZE", TABLE_RIGHT },
                                                       { "LAST", TABLE_LEFT } };
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
        ck_assert_str_eq(text, "NAME          SIZE  LAST\n"
                               "vision   512.0 MiB  a\n"
                               "b\xc3\xa9               7  -\n");
        free(text);
        table_free(t);
        ck_assert_ptr_null(table_free(NULL));
}
END_TEST

START_TEST(upright)
{
        static const struct table_column columns[] = { { "Who", TABLE_LEFT },
                                                       { "At most", TABLE_LEFT },
                                                       { "Where", TABLE_LEFT } };
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

/* What is not shown has its cells all the same, and no line ends in blanks. */
START_TEST(columns_by_choice)
{
        static const struct table_column columns[] = { { "A", TABLE_LEFT | TABLE_WIDE },
                                                       { "SUM", TABLE_RIGHT | TABLE_NARROW },
                                                       { "B", TABLE_LEFT },
                                                       { "C", TABLE_LEFT | TABLE_WIDE } };
        struct table *t;
        char *text;

        ck_assert_int_eq(table_new(columns, 4, &t), 0);
        table_text(t, "a");
        table_number(t, 7);
        table_text(t, "b");
        table_text(t, "c");
        table_text(t, "a");
        table_number(t, 7);
        table_text(t, "bb");
        table_text(t, "c");
        text = printed(t, table_print);
        ck_assert_str_eq(text, "SUM  B\n  7  b\n  7  bb\n");
        free(text);
        table_look.is_wide = true;
        text = printed(t, table_print);
        ck_assert_str_eq(text, "A  B   C\na  b   c\na  bb  c\n");
        free(text);
        table_free(t);
}
END_TEST

/* The widest text gives first; numbers are never cut. */
START_TEST(cut_to_a_terminal)
{
        static const struct table_column columns[] = { { "X", TABLE_LEFT },
                                                       { "N", TABLE_RIGHT },
                                                       { "Y", TABLE_LEFT } };
        char a[101], expected[128], *text;
        struct table *t;

        memset(a, 'a', 100);
        a[100] = '\0';
        ck_assert_int_eq(table_new(columns, 3, &t), 0);
        table_text(t, a);
        table_number(t, UINT64_MAX);
        table_text(t, "short");
        table_text(t, "\xc3\xa9\xc3\xa9");
        table_number(t, 1);
        table_text(t, "b");
        text = printed(t, table_print);
        snprintf(expected, sizeof(expected), "\n%.50s+  18446744073709551615  short\n", a);
        ck_assert_msg(strstr(text, expected) != NULL, "%s", text);
        ck_assert_uint_eq(strcspn(text + strcspn(text, "\n") + 1, "\n"), TABLE_COLUMNS);
        free(text);
        table_look.is_wide = true;
        text = printed(t, table_print);
        ck_assert_ptr_nonnull(strstr(text, a));
        free(text);
        table_free(t);
}
END_TEST

/* A title is cut only where no text can be cut any more. */
START_TEST(titles_stay)
{
        static const struct table_column columns[] = { { "PARTITION", TABLE_LEFT }, { "N", TABLE_LEFT } };
        char a[73], expected[128], *text;
        const struct table_column long_titles[] = { { a, TABLE_LEFT }, { a, TABLE_LEFT } };
        struct table *t;

        memset(a, 'a', 72);
        a[72] = '\0';
        ck_assert_int_eq(table_new(columns, 2, &t), 0);
        table_text(t, "p");
        table_text(t, a);
        text = printed(t, table_print);
        snprintf(expected, sizeof(expected), "PARTITION  N\np          %.68s+\n", a);
        ck_assert_str_eq(text, expected);
        free(text);
        table_free(t);
        ck_assert_int_eq(table_new(long_titles, 2, &t), 0);
        text = printed(t, table_print);
        ck_assert_uint_eq(strcspn(text, "\n"), TABLE_COLUMNS);
        free(text);
        table_free(t);
}
END_TEST

/* A table that is printed every second: a size that changes moves no column. */
START_TEST(columns_stay)
{
        static const struct table_column columns[] = { { "A", TABLE_RIGHT },
                                                       { "B", TABLE_RIGHT },
                                                       { "C", TABLE_RIGHT } };
        static const uint64_t sizes[] = { 0, 1023, 1ull << 20, 1023ull << 20, (1ull << 30) - (60 << 10) };
        static const uint64_t times[] = { 0, 59900, 3599000, 86399000, 86400000 };
        char *text = NULL;

        for (size_t i = 0; i < 5; i++) {
                char *before = text;
                struct table *t;

                ck_assert_int_eq(table_new(columns, 3, &t), 0);
                table_size(t, sizes[i]);
                table_duration(t, times[i]);
                table_percent(t, i, 4);
                text = printed(t, table_print);
                table_free(t);
                if (before)
                        ck_assert_uint_eq(strcspn(text, "\n"), strcspn(before, "\n"));
                free(before);
        }
        free(text);
}
END_TEST

START_TEST(colour)
{
        static const struct table_column columns[] = { { "A", TABLE_LEFT }, { "B", TABLE_LEFT } };
        int terminal = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC), ends[2];
        struct table *t;
        char *text;

        ck_assert_int_eq(table_new(columns, 2, &t), 0);
        table_text(t, "good");
        table_text(t, "bad");
        table_mark(t, TABLE_ALARM);
        text = printed(t, table_print);
        ck_assert_str_eq(text, "A     B\ngood  bad\n");
        free(text);
        table_look.has_colour = true;
        text = printed(t, table_print);
        ck_assert_str_eq(text, "\033[1mA\033[0m     \033[1mB\033[0m\ngood  \033[31mbad\033[0m\n");
        free(text);
        table_free(t);

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
END_TEST

START_TEST(no_room)
{
        static const struct table_column columns[] = { { "A", TABLE_LEFT } };
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
        tcase_add_test(c, columns_by_choice);
        tcase_add_test(c, cut_to_a_terminal);
        tcase_add_test(c, titles_stay);
        tcase_add_test(c, columns_stay);
        tcase_add_test(c, colour);
        tcase_add_test(c, no_room);
        tcase_add_loop_test(c, escape, 0, (int)(sizeof(escapes) / sizeof(escapes[0])));
        tcase_add_test(c, valid);
        tcase_add_test(c, sizes);
        tcase_add_test(c, durations);
        tcase_add_test(c, percents);
        suite_add_tcase(suite, c);
        return suite_run(suite);
}
