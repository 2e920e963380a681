/* bfcctl top without a terminal: what it shows of a sample, and what keys do.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/suite.h"

#include <errno.h>
#include <locale.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>

#include "ctl/text.h"
#include "ctl/top_feed.h"
#include "ctl/top_frame.h"
#include "ctl/top_keys.h"
#include "tests/unit/lists.h"

#define MAX_ROWS 200u

static struct top top;

/* ---- samples ------------------------------------------------------------------------- */

struct session {
        uint64_t id;
        const char *tenant, *name;
        uint64_t n_bytes, pid;
};

struct tenant {
        const char *tenant, *partition;
        uint64_t n_bytes, n_reserved, n_guaranteed;
};

static void add_page(struct list *l, Bfcd__List__Kind kind, Bfcd__ListReply *page)
{
        uint64_t cursor;

        ck_assert_int_eq(list_add(l, kind, canned(page), &cursor), 0);
}

static void add_sessions(struct list *l, const struct session *sessions, size_t n)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        char live[] = "live";
        Bfcd__SessionRow rows[MAX_ROWS], *pointers[MAX_ROWS];

        ck_assert_uint_le(n, MAX_ROWS);
        for (size_t i = 0; i < n; i++) {
                rows[i] = (Bfcd__SessionRow)BFCD__SESSION_ROW__INIT;
                rows[i].session_id = sessions[i].id;
                rows[i].tenant = (char *)(uintptr_t)sessions[i].tenant;
                rows[i].name = (char *)(uintptr_t)(sessions[i].name ? sessions[i].name : "");
                rows[i].state = live;
                rows[i].pid = sessions[i].pid ? sessions[i].pid : UINT32_MAX; /* no such process */
                rows[i].bytes_in_use = sessions[i].n_bytes;
                pointers[i] = &rows[i];
        }
        page.n_sessions = n;
        page.sessions = pointers;
        add_page(l, BFCD__LIST__KIND__SESSIONS, &page);
}

static void add_tenants(struct list *l, const struct tenant *tenants, size_t n)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__TenantRow rows[MAX_ROWS], *pointers[MAX_ROWS];
        Bfcd__Statistics stats[MAX_ROWS];

        for (size_t i = 0; i < n; i++) {
                rows[i] = (Bfcd__TenantRow)BFCD__TENANT_ROW__INIT;
                stats[i] = (Bfcd__Statistics)BFCD__STATISTICS__INIT;
                rows[i].tenant = (char *)(uintptr_t)tenants[i].tenant;
                rows[i].partition = (char *)(uintptr_t)tenants[i].partition;
                rows[i].stats = &stats[i];
                stats[i].bytes_in_use = tenants[i].n_bytes;
                stats[i].bytes_reserved = tenants[i].n_reserved;
                stats[i].bytes_guaranteed = tenants[i].n_guaranteed;
                stats[i].bytes_limit = 64 * MIB;
                pointers[i] = &rows[i];
        }
        page.n_tenants = n;
        page.tenants = pointers;
        add_page(l, BFCD__LIST__KIND__TENANTS, &page);
}

static void add_partition(struct list *l, const char *name, uint64_t n_bytes, uint64_t n_reserved)
{
        Bfcd__ListReply page = BFCD__LIST_REPLY__INIT;
        Bfcd__PartitionRow row = BFCD__PARTITION_ROW__INIT, *pointer = &row;
        Bfcd__Statistics stats = BFCD__STATISTICS__INIT;

        row.name = (char *)(uintptr_t)name;
        row.device = (char[]){ "host" };
        row.stats = &stats;
        stats.bytes_in_use = n_bytes;
        stats.bytes_reserved = n_reserved;
        stats.bytes_limit = 100 * MIB;
        page.n_partitions = 1;
        page.partitions = &pointer;
        add_page(l, BFCD__LIST__KIND__PARTITIONS, &page);
}

static const struct tenant two_tenants[] = {
        { "blue", "train", 10 * MIB, 20 * MIB, 0 },
        { "red", "train", 30 * MIB, 30 * MIB, 40 * MIB },
};

static struct top_sample make_sample(const struct session *sessions, size_t n_sessions)
{
        struct top_sample ret = { .version = "1.2.3", .has_sessions = true };

        ck_assert_int_eq(list_new(&ret.list), 0);
        add_partition(ret.list, "train", 40 * MIB, 50 * MIB);
        add_tenants(ret.list, two_tenants, 2);
        add_sessions(ret.list, sessions, n_sessions);
        list_sort(ret.list);
        return ret;
}

static void take(const struct session *sessions, size_t n_sessions)
{
        struct top_sample sample = make_sample(sessions, n_sessions);

        ck_assert_int_eq(top_take(&top, &sample), 0);
}

static const struct session three[] = {
        { 1, "blue", "alpha", 10 * MIB, 0 },
        { 2, "red", "beta", 25 * MIB, 0 },
        { 3, "red", "gamma", 5 * MIB, 0 },
};

static void setup(void)
{
        ck_assert_ptr_nonnull(setlocale(LC_CTYPE, "C.UTF-8"));
        top_init(&top, TOP_SESSIONS, 1000, false);
        take(three, 3);
}

static void teardown(void)
{
        top_end(&top);
}

FIXTURE(top, setup, teardown);

/* ---- what is shown --------------------------------------------------------------------- */

static size_t column_of(const char *title)
{
        size_t i = 0;

        while (i < top.n_columns && strcmp(top.columns[i].column->title, title) != 0)
                i++;
        ck_assert_msg(i < top.n_columns, "no column %s", title);
        return i;
}

static void check_cell(size_t line, const char *title, const char *expected)
{
        char *text;

        ck_assert_uint_lt(line, top.n_lines);
        text = top_cell(&top, &top.lines[line], column_of(title));
        ck_assert_str_eq(text, expected);
        free(text);
}

/* The cells of all lines in a column, joined. */
static void check_column(const char *title, const char *expected)
{
        char all[1024] = "";

        for (size_t i = 0; i < top.n_lines; i++) {
                char *text = top_cell(&top, &top.lines[i], column_of(title));

                strcat(strcat(all, i > 0 ? "," : ""), text);
                free(text);
        }
        ck_assert_str_eq(all, expected);
}

static int press(uint32_t key)
{
        return top_key(&top, key);
}

static void type(const char *text)
{
        for (; *text; text++)
                ck_assert_int_eq(press((unsigned char)*text), TOP_DONE);
}

/* The screen as text; the caller frees it. No part leaves the screen, and no byte is a control character. */
static char *draw(unsigned n_rows, unsigned n_columns)
{
        struct top_frame frame;
        char *text = NULL;
        FILE *out;
        size_t n;

        ck_assert_int_eq(top_draw(&top, n_rows, n_columns, &frame), 0);
        for (size_t i = 0; i < frame.n_spans; i++) {
                const struct top_span *s = &frame.spans[i];

                ck_assert_uint_eq(s->width, text_columns(s->text));
                if (n_rows > 0) {
                        ck_assert_uint_lt(s->row, n_rows);
                        ck_assert_uint_le(s->column + s->width, n_columns);
                }
                for (const char *c = s->text; *c; c++)
                        ck_assert_msg((unsigned char)*c >= 0x20 && *c != 0x7f, "%02x", *c);
        }
        out = open_memstream(&text, &n);
        ck_assert_ptr_nonnull(out);
        ck_assert_int_eq(top_frame_print(out, &frame), 0);
        fclose(out);
        top_frame_end(&frame);
        return text;
}

static void check_screen(const char *part, bool is_there)
{
        char *text = draw(24, 80);

        ck_assert_msg((strstr(text, part) != NULL) == is_there, "'%s' in:\n%s", part, text);
        free(text);
}

/* ---- order ------------------------------------------------------------------------------- */

TEST(largest_first)
{
        check_column("SESSION", "2,1,3");
        check_cell(0, "HELD", "25.0 MiB");
        press('I');
        check_column("SESSION", "3,1,2");
}

TEST(sort_by_letters_and_steps)
{
        press('N'); /* all have the same pid */
        check_column("SESSION", "1,2,3");
        press('M');
        check_column("SESSION", "2,1,3");
        ck_assert_str_eq(top.choices[TOP_SESSIONS].sort, "HELD");
        press('<');
        ck_assert_str_eq(top.choices[TOP_SESSIONS].sort, "STATE");
        press('>');
        press('>');
        ck_assert_str_eq(top.choices[TOP_SESSIONS].sort, "IDLE");
        press('>'); /* after the last one comes the first one */
        ck_assert_str_eq(top.choices[TOP_SESSIONS].sort, "SESSION");
        check_column("SESSION", "3,2,1");
        press('T');
        check_screen("this table has no such column", true);
}

TEST(menu_of_columns)
{
        press(TOP_KEY_F6);
        check_screen("Sort by:", true);
        press(TOP_KEY_HOME);
        press(TOP_KEY_DOWN);
        press(TOP_KEY_ENTER); /* TENANT, a text: from a to z */
        check_column("TENANT", "blue,red,red");
        check_screen("by TENANT, ascending", true);
        press(TOP_KEY_F6);
        press(TOP_KEY_END);
        press(TOP_KEY_ESCAPE);
        ck_assert_str_eq(top.choices[TOP_SESSIONS].sort, "TENANT");
}

/* ---- filter, search, tree ------------------------------------------------------------------ */

TEST(filter_while_typing)
{
        press(TOP_KEY_F4);
        type("GAM"); /* the case does not count */
        check_column("SESSION", "3");
        check_screen("1 of 3", true);
        press(TOP_KEY_BACKSPACE);
        press(TOP_KEY_BACKSPACE);
        press(TOP_KEY_BACKSPACE);
        type("nowhere");
        ck_assert_uint_eq(top.n_lines, 0);
        check_screen("0 of 3", true);
        press(TOP_KEY_ENTER);
        take(three, 3); /* it stays */
        ck_assert_uint_eq(top.n_lines, 0);
        press('\\');
        press(TOP_KEY_ESCAPE);
        ck_assert_uint_eq(top.n_lines, 3);
}

TEST(search_moves_the_cursor)
{
        press('/');
        type("red"); /* from the cursor on */
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
        press(TOP_KEY_F3);
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 2);
        press(TOP_KEY_F3); /* around */
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
        type("x");
        check_screen("not found", true);
        press(TOP_KEY_ENTER);
        check_screen("F10", true);
}

TEST(tree_by_tenant)
{
        press(TOP_KEY_F5);
        check_column("TENANT", "- red (2),├─ red,└─ red,- blue (1),└─ blue");
        check_column("HELD", "30.0 MiB,25.0 MiB,5.0 MiB,10.0 MiB,10.0 MiB");
        check_cell(0, "SESSION", "");
        press(TOP_KEY_DOWN);
        press(' ');
        check_column("TENANT", "+ red (2),- blue (1),└─ blue");
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
        take(three, 3); /* it stays closed */
        check_column("HELD", "30.0 MiB,10.0 MiB,10.0 MiB");
        press(TOP_KEY_ENTER);
        ck_assert_uint_eq(top.n_lines, 5);
        press('t');
        check_column("SESSION", "2,1,3");
}

/* ---- cursor, views, interval -------------------------------------------------------------------- */

TEST(cursor_follows_its_row)
{
        const struct session other[] = { { 1, "blue", "alpha", 50 * MIB, 0 },
                                         { 2, "red", "beta", 60 * MIB, 0 },
                                         { 3, "red", "gamma", 70 * MIB, 0 } };

        press(TOP_KEY_DOWN); /* session 1 */
        take(other, 3);      /* 3, 2, 1 */
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 2);
        press(TOP_KEY_HOME);
        take(three, 3); /* the first line is a place */
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
        press(TOP_KEY_END);
        take(three, 1); /* its session ended */
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
        take(NULL, 0);
        press(TOP_KEY_DOWN);
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 0);
}

TEST(pages)
{
        struct session many[100];

        for (size_t i = 0; i < 100; i++)
                many[i] = (struct session){ i + 1, "red", "", (1000 - i) * MIB, 0 };
        take(many, 100);
        free(draw(24, 80));
        ck_assert_uint_gt(top.n_visible, 10);
        press(TOP_KEY_PAGE_DOWN);
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, top.n_visible - 1);
        press(TOP_KEY_END);
        check_screen("\n    100 red", true);
        press(TOP_KEY_PAGE_UP);
        ck_assert_uint_eq(top.choices[TOP_SESSIONS].selected, 100 - top.n_visible);
        press(TOP_KEY_HOME);
        check_screen("\n      1 red", true);
        free(draw(24, 80));
}

TEST(views)
{
        ck_assert_int_eq(press(TOP_KEY_TAB), TOP_READ);
        ck_assert_int_eq((int)top.view, TOP_TENANTS);
        check_column("TENANT", "red,blue");
        ck_assert_int_eq(press(TOP_KEY_TAB), TOP_READ);
        check_column("PARTITION", "train");
        press('t');
        check_screen("partitions have no tree", true);
        ck_assert_int_eq(press(TOP_KEY_TAB), TOP_READ);
        ck_assert_int_eq((int)top.view, TOP_SESSIONS);
        ck_assert_int_eq(press(TOP_KEY_BACK_TAB), TOP_READ);
        ck_assert_int_eq((int)top.view, TOP_PARTITIONS);
        ck_assert_int_eq(press('h'), TOP_DONE);
        check_screen("Any key returns", true);
        ck_assert_int_eq(press('q'), TOP_DONE);
        ck_assert_int_eq(press('q'), TOP_QUIT);
        ck_assert_int_eq(press(TOP_KEY_F10), TOP_QUIT);
}

TEST(intervals)
{
        static const char *const wrong[] = { "", "0", "0.05", "-1", ".5", "3601", "61m", "1e3" };
        unsigned ms = 7;

        for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++)
                ck_assert_msg(!top_read_interval(wrong[i], &ms), "%s", wrong[i]);
        ck_assert_uint_eq(ms, 7);
        ck_assert(top_read_interval("0.25", &ms) && ms == 250);
        ck_assert(top_read_interval("1h", &ms) && ms == 3600000);
        ck_assert_int_eq(press('+'), TOP_READ);
        ck_assert_uint_eq(top.interval_ms, 2000);
        press('-');
        press('-');
        ck_assert_uint_eq(top.interval_ms, 500);
        press('d');
        type("1.5");
        ck_assert_int_eq(press(TOP_KEY_ENTER), TOP_READ);
        ck_assert_uint_eq(top.interval_ms, 1500);
        press('d');
        type("x");
        ck_assert_int_eq(press(TOP_KEY_ENTER), TOP_DONE);
        ck_assert_uint_eq(top.interval_ms, 1500);
}

/* ---- bars and history ------------------------------------------------------------------------------- */

/* Of 100 MiB 40 are in use, 10 more reserved, and 10 more guaranteed to red. */
TEST(bar_of_a_partition)
{
        char *text = draw(24, 80);
        const char *bar = strchr(text, '[');
        size_t used, reserved, guaranteed, rest;

        ck_assert_ptr_nonnull(bar++);
        used = strspn(bar, "|");
        reserved = strspn(bar + used, "#");
        guaranteed = strspn(bar + used + reserved, ":");
        rest = strspn(bar + used + reserved + guaranteed, " ");
        ck_assert_int_eq(bar[used + reserved + guaranteed + rest], ']');
        ck_assert_uint_gt(rest, 0);
        ck_assert_uint_le(used * 10, (used + reserved + guaranteed + rest) * 4 + 10);
        ck_assert_uint_ge(used * 10 + 10, (used + reserved + guaranteed + rest) * 4);
        ck_assert(reserved >= guaranteed ? reserved - guaranteed <= 1 : guaranteed - reserved <= 1);
        ck_assert_ptr_nonnull(strstr(bar, "50.0 MiB of 100.0 MiB reserved"));
        free(text);
}

TEST(history_grows)
{
        char bars[TABLE_TEXT_MAX];

        ck_assert_uint_eq(top.n_tenants, 2);
        top_spark(top.rows[0].history ? top.rows[0].history : &top.histories[0], 20, bars);
        ck_assert_str_eq(bars, "█");
        for (unsigned i = 0; i < TOP_HISTORY + 5; i++)
                take(three, 3);
        for (size_t i = 0; i < top.n_histories; i++) {
                ck_assert_uint_eq(top.histories[i].n, TOP_HISTORY);
                top_spark(&top.histories[i], 4, bars);
                ck_assert_str_eq(bars, "████");
        }
}

TEST(bars_of_a_history)
{
        struct top_history h = { .n = 4 };
        char bars[TABLE_TEXT_MAX];

        h.bytes[TOP_HISTORY - 1] = 8;
        h.bytes[TOP_HISTORY - 2] = 4;
        h.bytes[TOP_HISTORY - 3] = 1;
        top_spark(&h, 20, bars);
        ck_assert_str_eq(bars, " ▂▅█");
}

/* A tenant that is gone takes its history along. */
TEST(history_of_a_removed_tenant)
{
        struct top_sample sample = { .has_sessions = true };

        ck_assert_int_eq(list_new(&sample.list), 0);
        add_partition(sample.list, "train", 0, 0);
        add_tenants(sample.list, two_tenants, 1);
        ck_assert_int_eq(top_take(&top, &sample), 0);
        ck_assert_uint_eq(top.n_tenants, 1);
        ck_assert_uint_eq(top.n_histories, 2);
        ck_assert_uint_eq(top.n_lines, 0);
}

/* ---- memory outside -------------------------------------------------------------------------------------- */

TEST(memory_outside)
{
        const struct session two[] = { { 1, "blue", "", MIB, 100 }, { 2, "red", "", MIB, 200 } };
        struct top_sample sample = make_sample(two, 2);

        for (size_t i = 0; i < top.n_columns; i++)
                ck_assert_str_ne(top.columns[i].column->title, "OUTSIDE");
        sample.has_outside = true;
        sample.list->sessions[1]->bytes_outside = 300 * MIB;
        sample.n_others = 1;
        sample.bytes_others = 2048 * MIB;
        ck_assert_int_eq(top_take(&top, &sample), 0);
        check_column("OUTSIDE", "-,300.0 MiB");
        check_screen("outside: 1 process, 2.0 GiB", true);
        top_sort_by(&top, "OUTSIDE", true);
        ck_assert_int_eq(top_arrange(&top), 0);
        check_column("SESSION", "2,1");
        press('t');
        check_column("OUTSIDE", "300.0 MiB,300.0 MiB,0 B,-");
}

/* ---- hostile text, small screens -------------------------------------------------------------------- */

TEST(hostile_names)
{
        const struct session bad[] = {
                { 1, "red",
                  "\033[2J\033]0;pwned\007\x9b"
                  "31m",
                  3 * MIB, 0 },
                { 2, "red", "漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字漢字", 2 * MIB, 0 },
                { 3, "red", "a\u0301\u0301\u0301\u0301\u0301\u0301\u0301\u0301b", MIB, 0 },
                { 4, "red", "\u202eevil\xff\xfe%n%s", 0, 0 },
        };

        take(bad, 4);
        check_screen("\\x1b[2J", true);
        check_screen("\\u202eevil\\xff", true);
        check_screen("漢字", true);
        check_screen("a\u0301\u0301b", true); /* no more marks than two */
        for (unsigned n = 1; n < 120; n++)
                free(draw(24, n));
        top.is_wide = true;
        ck_assert_int_eq(top_arrange(&top), 0);
        free(draw(50, 200));
}

/* The job is cut before the tenant. */
TEST(a_long_job_hides_no_tenant)
{
        const struct session long_job[] = {
                { 1, "a-long-tenant", "train.py --with --very --many --options --and --more", MIB, 0 }
        };

        take(long_job, 1);
        check_screen("a-long-tenant", true);
        check_screen("--and", false);
}

TEST(screens_of_all_sizes)
{
        static const uint32_t keys[] = { TOP_KEY_F1,  TOP_KEY_F3,  TOP_KEY_ESCAPE, TOP_KEY_F6, TOP_KEY_ESCAPE,
                                         TOP_KEY_TAB, TOP_KEY_END, TOP_KEY_RIGHT,  't' };

        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
                for (unsigned n = 1; n < 30; n++) {
                        free(draw(n, 80));
                        free(draw(n, 3 * n));
                        free(draw(24, n));
                }
                press(keys[i]);
        }
}

/* For a file: all rows, and nothing is cut. */
TEST(text_for_a_file)
{
        struct session many[200];
        char *text;

        for (size_t i = 0; i < 200; i++)
                many[i] = (struct session){ i + 1, "red",
                                            "a-name-that-is-longer-than-a-terminal-is-wide-"
                                            "a-name-that-is-longer-than-a-terminal-is-wide",
                                            MIB, 0 };
        take(many, 200);
        text = draw(0, 80);
        ck_assert_ptr_nonnull(strstr(text, "\n    200 red"));
        ck_assert_msg(strstr(text, "terminal-is-wide live") != NULL, "%.700s", text);
        ck_assert_ptr_null(strstr(text, "F10"));
        ck_assert_ptr_null(strstr(text, " \n    2"));
        free(text);
}

/* The error is that of the call that failed. */
TEST(a_feed_without_a_file_descriptor)
{
        struct top_source source = { 0 };
        struct top_feed *feed = NULL;
        struct rlimit before, none;

        ck_assert_int_eq(getrlimit(RLIMIT_NOFILE, &before), 0);
        none = (struct rlimit){ .rlim_max = before.rlim_max };
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &none), 0);
        ck_assert_int_eq(top_feed_start(&source, "/nowhere", 1000, true, &feed), -EMFILE);
        ck_assert_ptr_null(feed);
        ck_assert_int_eq(setrlimit(RLIMIT_NOFILE, &before), 0);
}

TEST(trouble_is_shown)
{
        top.trouble = "Connecting again. \033[31m";
        check_screen("Connecting again. \\x1b[31m", true);
        check_screen("25.0 MiB", true); /* with the last data */
}
