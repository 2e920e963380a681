/* Lists for people and for programs: see table.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No cell is empty and no line ends in blanks, so that output can be compared and copied. Texts are escaped
 * here: libsmartcols gets printable characters only, and its own escapes are off. */
#include "ctl/table.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <libsmartcols/libsmartcols.h>
#include <locale.h>
#include <protobuf-c/protobuf-c.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include "ctl/text.h"

#define GAP         "  " /* between columns */
#define MAX_COLUMNS 64u
#define LEAST_TEXT  6u /* what remains of a text that is cut first */

struct table_look table_look;

bool table_may_colour(int fd)
{
        const char *forbidden = getenv("NO_COLOR"), *terminal = getenv("TERM");

        return isatty(fd) && !(forbidden && *forbidden) && terminal && *terminal &&
               strcmp(terminal, "dumb") != 0;
}

/* ---- values --------------------------------------------------------------- */

bool table_is_end(const struct table_column *c)
{
        return !c->title && !c->key && c->type != TABLE_KEYS && !c->metric.name;
}

/* NULL: a struct of zeroes. */
static const void *struct_of(const struct table_column *c, const void *row)
{
        const void *pointer;

        if (c->via == 0)
                return row;
        memcpy(&pointer, (const char *)row + c->via, sizeof(pointer));
        return pointer;
}

uint64_t table_number(const struct table_column *c, const void *row)
{
        const char *from = struct_of(c, row);
        uint32_t narrow;
        uint64_t wide;

        if (!from)
                return 0;
        if (c->n_bytes == sizeof(narrow))
                return memcpy(&narrow, from + c->offset, sizeof(narrow)), narrow;
        return memcpy(&wide, from + c->offset, sizeof(wide)), wide;
}

static const char *text_of(const struct table_column *c, const void *row, char buffer[static TABLE_TEXT_MAX])
{
        const char *from = struct_of(c, row), *text;

        if (c->type == TABLE_MADE) {
                buffer[0] = '\0';
                c->text(row, buffer);
                return buffer;
        }
        if (!from)
                return "";
        memcpy(&text, from + c->offset, sizeof(text));
        return text;
}

/* ---- text ------------------------------------------------------------------ */

/* Of "1023.9 MiB" and "59m 59s". */
unsigned table_least_width(const struct table_column *c)
{
        return c->type == TABLE_SIZE ? 10 : c->type == TABLE_DURATION || c->type == TABLE_AGO ? 7 : 0;
}

bool table_is_number(const struct table_column *c)
{
        return c->type != TABLE_TEXT && c->type != TABLE_MADE && c->type != TABLE_KEYS;
}

char *table_number_cell(const struct table_column *c, uint64_t n)
{
        uint64_t now_ms = (uint64_t)time(NULL) * 1000;
        char buffer[TABLE_TEXT_MAX];

        switch (c->type) {
        case TABLE_SIZE:
                return strdup(text_size(n, buffer));
        case TABLE_DURATION:
                return strdup(text_duration(n, buffer));
        case TABLE_AGO:
                return strdup(n == 0 ? "-" : text_duration(now_ms > n ? now_ms - n : 0, buffer));
        case TABLE_BOOL:
                return strdup(n ? "yes" : "no");
        default:
                snprintf(buffer, sizeof(buffer), c->type == TABLE_HEX ? "0x%" PRIx64 : "%" PRIu64, n);
                return strdup(buffer);
        }
}

static bool is_unknown(const struct table_column *c, const void *row)
{
        return (c->flags & TABLE_UNKNOWN) && table_number(c, row) == UINT64_MAX;
}

char *table_cell(const struct table_column *c, const void *row)
{
        const char *instead = c->instead ? c->instead(row) : NULL, *text;
        char buffer[TABLE_TEXT_MAX];

        if (instead)
                return text_escape(instead);
        if (is_unknown(c, row))
                return strdup("-");
        if (table_is_number(c))
                return table_number_cell(c, table_number(c, row));
        text = text_of(c, row, buffer);
        return text_escape(text && *text ? text : "-");
}

bool table_is_shown(const struct table_column *c, bool is_wide)
{
        return c->title && !(c->flags & (is_wide ? TABLE_NARROW : TABLE_WIDE));
}

static bool is_named(const struct table_column *c, const char *name, size_t n_name)
{
        return (c->title && strlen(c->title) == n_name && strncasecmp(c->title, name, n_name) == 0) ||
               (c->key && strlen(c->key) == n_name && strncasecmp(c->key, name, n_name) == 0);
}

const struct table_column *table_find(const struct table_column *columns, const char *name, size_t n_name)
{
        for (const struct table_column *c = columns; !table_is_end(c); c++)
                if (c->title && is_named(c, name, n_name))
                        return c;
        return NULL;
}

static bool is_shown(const struct table_column *c)
{
        size_t n;

        if (!table_look.columns)
                return table_is_shown(c, table_look.is_wide);
        for (const char *name = table_look.columns; c->title; name += n + 1) {
                n = strcspn(name, ",");
                if (is_named(c, name, n))
                        return true;
                if (!name[n])
                        break;
        }
        return false;
}

static int compare_rows(const void *left, const void *right, void *by)
{
        const struct table_column *c = by;
        const void *a = *(const void *const *)left, *b = *(const void *const *)right;
        char text_a[TABLE_TEXT_MAX], text_b[TABLE_TEXT_MAX];
        uint64_t n_a, n_b;

        if (!table_is_number(c))
                return strcmp(text_of(c, a, text_a), text_of(c, b, text_b));
        n_a = table_number(c, a);
        n_b = table_number(c, b);
        return (n_a < n_b) - (n_a > n_b);
}

void table_sort(const struct table_column *by, const void **rows, size_t n_rows)
{
        if (n_rows > 0)
                qsort_r(rows, n_rows, sizeof(*rows), compare_rows, (void *)(uintptr_t)by);
}

struct table {
        const struct table_column *columns;
        const char *nothing; /* the line for a table without rows, or NULL */
        struct libscols_table *lines;
        bool has_titles;            /* they are printed */
        bool cuts_first;            /* there are columns that are cut first */
        size_t widths[MAX_COLUMNS]; /* of the texts, at most: in bytes */
};

struct table *table_free(struct table *t)
{
        if (t)
                scols_unref_table(t->lines);
        free(t);
        return NULL;
}

/* Texts are cut; where some are to be cut first, only those. */
static int flags_of(const struct table_column *c, bool cuts_first)
{
        unsigned cut = cuts_first ? TABLE_CUT_FIRST : 0;

        return (c->flags & TABLE_RIGHT    ? SCOLS_FL_RIGHT
                : (c->flags & cut) == cut ? SCOLS_FL_TRUNC
                                          : 0) |
               SCOLS_FL_NOEXTREMES;
}

static int add_columns(struct table *t)
{
        size_t n = 0;

        for (const struct table_column *c = t->columns; !table_is_end(c); c++)
                t->cuts_first = t->cuts_first || (is_shown(c) && (c->flags & TABLE_CUT_FIRST));
        for (const struct table_column *c = t->columns; !table_is_end(c); c++) {
                struct libscols_column *column;

                if (!is_shown(c))
                        continue;
                column = scols_table_new_column(t->lines, c->title, table_least_width(c),
                                                flags_of(c, t->cuts_first));
                if (!column || scols_cell_set_color(scols_column_get_header(column), "\033[1m") < 0)
                        return -ENOMEM;
                assert(n < MAX_COLUMNS);
                t->widths[n] =
                        strlen(c->title) > table_least_width(c) ? strlen(c->title) : table_least_width(c);
                n++;
        }
        return 0;
}

int table_new(const struct table_column *columns, const char *nothing, struct table **ret)
{
        bool is_cut = table_look.is_cut && !table_look.is_wide;
        struct table *t = calloc(1, sizeof(*t));

        if (!t)
                return -ENOMEM;
        t->columns = columns;
        t->nothing = nothing;
        t->lines = scols_new_table();
        if (!t->lines || scols_table_set_column_separator(t->lines, GAP) < 0 || add_columns(t) < 0) {
                table_free(t);
                return -ENOMEM;
        }
        scols_table_enable_noencoding(t->lines, 1);
        scols_table_enable_colors(t->lines, table_look.has_colour);
        scols_table_set_termforce(t->lines, is_cut ? SCOLS_TERMFORCE_ALWAYS : SCOLS_TERMFORCE_NEVER);
        scols_table_set_termwidth(t->lines, TABLE_COLUMNS);
        *ret = t;
        return 0;
}

int table_add(struct table *t, const void *row)
{
        static const char *const colours[] = { [TABLE_WARNING] = "\033[33m", [TABLE_ALARM] = "\033[31m" };
        struct libscols_line *line = scols_table_new_line(t->lines, NULL);
        size_t n = 0;

        if (!line)
                return -ENOMEM;
        for (const struct table_column *c = t->columns; !table_is_end(c); c++) {
                enum table_mark mark = c->mark ? c->mark(row) : TABLE_PLAIN;
                char *text;

                if (!is_shown(c))
                        continue;
                text = table_cell(c, row);
                if (!text || scols_line_refer_data(line, n, text) < 0) {
                        free(text);
                        return -ENOMEM;
                }
                t->widths[n] = strlen(text) > t->widths[n] ? strlen(text) : t->widths[n];
                if (mark && scols_cell_set_color(scols_line_get_cell(line, n), colours[mark]) < 0)
                        return -ENOMEM;
                n++;
        }
        return 0;
}

/* Widths are those of UTF-8, whatever the user's locale. */
static int print_lines(struct table *t)
{
        locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
        locale_t before = utf8 ? uselocale(utf8) : (locale_t)0;
        int r = scols_print_table(t->lines);

        if (utf8) {
                uselocale(before);
                freelocale(utf8);
        }
        return r;
}

/* To LEAST_TEXT characters. */
static int cut_cells(struct table *t, size_t column)
{
        for (size_t i = 0; i < scols_table_get_nlines(t->lines); i++) {
                struct libscols_cell *cell = scols_line_get_cell(scols_table_get_line(t->lines, i), column);
                char *text = strdup(scols_cell_get_data(cell)), *end = text;

                if (!text)
                        return -ENOMEM;
                for (size_t n = 0; *end; end++)
                        if (((unsigned char)*end & 0xc0) != 0x80 && n++ == LEAST_TEXT)
                                break;
                *end = '\0';
                if (scols_cell_refer_data(cell, text) < 0) {
                        free(text);
                        return -ENOMEM;
                }
        }
        return 0;
}

/* Where it is not enough to cut the first ones, these are cut to the least, and the others as libsmartcols does it. */
static int cut_others(struct table *t)
{
        size_t n = 0, sum = 0;
        int r = 0;

        if (!t->cuts_first || scols_table_get_termforce(t->lines) != SCOLS_TERMFORCE_ALWAYS)
                return 0;
        for (const struct table_column *c = t->columns; !table_is_end(c); c++) {
                if (!is_shown(c))
                        continue;
                sum += (n > 0 ? strlen(GAP) : 0) + (c->flags & TABLE_CUT_FIRST ? LEAST_TEXT : t->widths[n]);
                n++;
        }
        n = 0;
        for (const struct table_column *c = t->columns; sum > TABLE_COLUMNS && r == 0 && !table_is_end(c);
             c++) {
                if (!is_shown(c))
                        continue;
                if (c->flags & TABLE_CUT_FIRST)
                        r = cut_cells(t, n);
                else
                        (void)scols_column_set_flags(scols_table_get_column(t->lines, n), flags_of(c, false));
                n++;
        }
        return r;
}

int table_flush(struct table *t, FILE *out)
{
        struct libscols_column *column;
        int r = 0;

        if (scols_table_get_nlines(t->lines) == 0) {
                if (!t->has_titles && t->nothing)
                        fprintf(out, "%s\n", t->nothing);
        } else {
                scols_table_set_stream(t->lines, out);
                scols_table_enable_noheadings(t->lines, t->has_titles);
                r = cut_others(t);
                if (r == 0)
                        r = print_lines(t);
                scols_table_remove_lines(t->lines);
                for (size_t i = 0; (column = scols_table_get_column(t->lines, i)); i++)
                        scols_column_set_whint(column, (double)scols_column_get_width(column));
        }
        t->has_titles = true;
        return r < 0 ? r : ferror(out) ? -EIO : 0;
}

int table_print(FILE *out, const struct table_column *columns, const void *const rows[], size_t n_rows,
                const char *nothing)
{
        struct table *t;
        int r = table_new(columns, nothing, &t);

        if (r < 0)
                return r;
        for (size_t i = 0; r == 0 && i < n_rows; i++)
                r = table_add(t, rows[i]);
        if (r == 0)
                r = table_flush(t, out);
        table_free(t);
        return r;
}

static void take_line(struct table_lines *l, const char *title, char *text)
{
        assert(l->n < TABLE_MAX_LINES);
        l->titles[l->n] = title;
        l->texts[l->n++] = text;
}

void table_add_line(struct table_lines *l, const char *title, const char *format, ...)
{
        char line[1024];
        va_list arguments;

        va_start(arguments, format);
        vsnprintf(line, sizeof(line), format, arguments);
        va_end(arguments);
        take_line(l, title, text_escape(line));
}

int table_print_lines(FILE *out, struct table_lines *l)
{
        bool is_complete = true;
        size_t width = 0;

        for (size_t i = 0; i < l->n; i++) {
                width = strlen(l->titles[i]) > width ? strlen(l->titles[i]) : width;
                is_complete = is_complete && l->texts[i];
        }
        for (size_t i = 0; i < l->n; i++) {
                if (is_complete)
                        fprintf(out, "%-*s%s%s\n", (int)width, l->titles[i], GAP, l->texts[i]);
                free(l->texts[i]);
        }
        l->n = 0;
        return !is_complete ? -ENOMEM : ferror(out) ? -EIO : 0;
}

int table_print_upright(FILE *out, const struct table_column *columns, const void *row)
{
        struct table_lines l = { .n = 0 };

        for (const struct table_column *c = columns; !table_is_end(c); c++)
                if (is_shown(c))
                        take_line(&l, c->title, table_cell(c, row));
        return table_print_lines(out, &l);
}

/* ---- JSON ------------------------------------------------------------------ */

json_t *table_json_string(const char *s)
{
        char *valid = text_valid(s);
        json_t *ret = valid ? json_string(valid) : NULL;

        free(valid);
        return ret;
}

json_t *table_json_number(uint64_t n)
{
        return json_integer(n > INT64_MAX ? INT64_MAX : (json_int_t)n);
}

void table_json_set(json_t **object, const char *key, json_t *value)
{
        if (!*object) {
                json_decref(value);
        } else if (json_object_set_new(*object, key, value) < 0) {
                json_decref(*object);
                *object = NULL;
        }
}

void table_json_push(json_t **array, json_t *value)
{
        if (!*array) {
                json_decref(value);
        } else if (json_array_append_new(*array, value) < 0) {
                json_decref(*array);
                *array = NULL;
        }
}

static json_t *json_value(const struct table_column *c, const void *row)
{
        char buffer[TABLE_TEXT_MAX];
        const char *text;

        if (c->json)
                return c->json(struct_of(c, row));
        if (is_unknown(c, row))
                return json_null();
        switch (c->type) {
        case TABLE_TEXT:
        case TABLE_MADE:
                text = text_of(c, row, buffer);
                return (c->flags & TABLE_NULL) && !(text && *text) ? json_null() : table_json_string(text);
        case TABLE_BOOL:
                return json_boolean(table_number(c, row));
        case TABLE_ID:
                snprintf(buffer, sizeof(buffer), "%" PRIu64, table_number(c, row));
                return json_string(buffer);
        default:
                return table_json_number(table_number(c, row));
        }
}

static void set_numbers(json_t **object, const struct table_column *c, const char *message)
{
        for (unsigned i = 0; i < c->keys->n_fields; i++) {
                const ProtobufCFieldDescriptor *field = &c->keys->fields[i];
                uint64_t n = 0;

                if (field->type != PROTOBUF_C_TYPE_UINT64 ||
                    (c->without && strcmp(field->name, c->without) == 0))
                        continue;
                if (message)
                        memcpy(&n, message + field->offset, sizeof(n));
                table_json_set(object, field->name, table_json_number(n));
        }
}

json_t *table_json(const struct table_column *columns, const void *row)
{
        json_t *ret = json_object();

        for (const struct table_column *c = columns; !table_is_end(c); c++) {
                if (c->type == TABLE_KEYS)
                        set_numbers(&ret, c, struct_of(c, row));
                else if (c->key && !(c->flags & TABLE_OF_KEYS))
                        table_json_set(&ret, c->key, json_value(c, row));
        }
        return ret;
}

json_t *table_json_rows(const struct table_column *columns, const void *const rows[], size_t n_rows)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < n_rows; i++)
                table_json_push(&ret, table_json(columns, rows[i]));
        return ret;
}

/* Most strings need no escapes. */
void table_json_text(FILE *out, const char *s)
{
        json_t *string;
        size_t n = 0;

        while (s[n] >= ' ' && s[n] < 0x7f && s[n] != '"' && s[n] != '\\')
                n++;
        if (s[n] == '\0') {
                fprintf(out, "\"%s\"", s);
                return;
        }
        string = table_json_string(s);
        json_dumpf(string, out, JSON_ENCODE_ANY);
        json_decref(string);
}

void table_json_line(FILE *out, const struct table_column *columns, const void *row)
{
        const char *before = "{";

        for (const struct table_column *c = columns; !table_is_end(c); c++) {
                char buffer[TABLE_TEXT_MAX];
                const char *text;
                uint64_t n;

                if (!c->key)
                        continue;
                fprintf(out, "%s\"%s\": ", before, c->key);
                before = ", ";
                if (c->type != TABLE_TEXT && c->type != TABLE_MADE) {
                        n = table_number(c, row);
                        fprintf(out, c->type == TABLE_ID ? "\"%" PRIu64 "\"" : "%" PRIu64,
                                n > INT64_MAX && c->type != TABLE_ID ? INT64_MAX : n);
                        continue;
                }
                text = text_of(c, row, buffer);
                if ((c->flags & TABLE_NULL) && !(text && *text))
                        fputs("null", out);
                else
                        table_json_text(out, text ? text : "");
        }
        fputc('}', out);
}
