/* Lists for people and for programs: see table.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No cell is empty and no line ends in blanks, so that output can be compared and copied. Texts are escaped
 * here. */
#include "ctl/table.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
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

struct cell {
        char *text;
        enum table_mark mark;
};

struct table {
        const char *nothing;                             /* the line for a table without rows, or NULL */
        const struct table_column *columns[MAX_COLUMNS]; /* that are shown */
        unsigned widths[MAX_COLUMNS]; /* of the widest cells, also of rows that were printed */
        size_t n_columns;
        struct cell *cells; /* of the rows that are not printed yet */
        size_t n_cells, n_room;
        bool is_cut, has_colour;
        bool has_titles; /* they are printed */
};

static void remove_cells(struct table *t)
{
        for (size_t i = 0; i < t->n_cells; i++)
                free(t->cells[i].text);
        t->n_cells = 0;
}

struct table *table_free(struct table *t)
{
        if (t) {
                remove_cells(t);
                free(t->cells);
        }
        free(t);
        return NULL;
}

int table_new(const struct table_column *columns, const char *nothing, struct table **ret)
{
        struct table *t = calloc(1, sizeof(*t));

        if (!t)
                return -ENOMEM;
        t->nothing = nothing;
        t->is_cut = table_look.is_cut && !table_look.is_wide;
        t->has_colour = table_look.has_colour;
        for (const struct table_column *c = columns; !table_is_end(c); c++) {
                if (!is_shown(c))
                        continue;
                assert(t->n_columns < MAX_COLUMNS);
                t->widths[t->n_columns] = (unsigned)strlen(c->title);
                t->columns[t->n_columns++] = c;
        }
        *ret = t;
        return 0;
}

int table_add(struct table *t, const void *row)
{
        if (t->n_room - t->n_cells < t->n_columns) {
                size_t n_room = 2 * (t->n_room + t->n_columns);
                struct cell *more = reallocarray(t->cells, n_room, sizeof(*more));

                if (!more)
                        return -ENOMEM;
                t->cells = more;
                t->n_room = n_room;
        }
        for (size_t i = 0; i < t->n_columns; i++) {
                const struct table_column *c = t->columns[i];
                struct cell cell = { table_cell(c, row), c->mark ? c->mark(row) : TABLE_PLAIN };

                if (!cell.text)
                        return -ENOMEM;
                t->cells[t->n_cells++] = cell;
        }
        return 0;
}

/* The widest text that can be cut; n: there is none. */
static size_t find_widest(const struct table_column *const columns[], const unsigned widths[], size_t n,
                          unsigned flags)
{
        size_t widest = n;

        for (size_t i = 0; i < n; i++)
                if (!(columns[i]->flags & TABLE_RIGHT) && (columns[i]->flags & flags) == flags &&
                    widths[i] > LEAST_TEXT && (widest == n || widths[i] > widths[widest]))
                        widest = i;
        return widest;
}

void table_fit(const struct table_column *const columns[], unsigned widths[], size_t n, unsigned n_gap,
               unsigned n_columns)
{
        unsigned total = 0;

        for (size_t i = 0; i < n; i++)
                total += widths[i] + n_gap;
        for (; total > n_columns + n_gap; total--) {
                size_t widest = find_widest(columns, widths, n, TABLE_CUT_FIRST);

                if (widest == n)
                        widest = find_widest(columns, widths, n, 0);
                if (widest == n)
                        return;
                widths[widest]--;
        }
}

/* No blanks follow the last cell of a line. */
static void print_cell(FILE *out, const char *text, const char *colour, bool is_right, bool is_last,
                       unsigned width)
{
        unsigned n_columns, n_blanks;
        size_t n_bytes = text_clip(text, width, &n_columns);

        n_blanks = width - n_columns;
        fprintf(out, "%s%*s%.*s%*s%s%s", colour, is_right ? (int)n_blanks : 0, "", (int)n_bytes, text,
                is_right || is_last ? 0 : (int)n_blanks, "", *colour ? "\033[0m" : "", is_last ? "\n" : GAP);
}

static void print_lines(struct table *t, FILE *out, const unsigned widths[])
{
        static const char *const colours[] = {
                [TABLE_PLAIN] = "", [TABLE_WARNING] = "\033[33m", [TABLE_ALARM] = "\033[31m"
        };

        for (size_t i = 0; i < t->n_columns && !t->has_titles; i++)
                print_cell(out, t->columns[i]->title, t->has_colour ? "\033[1m" : "",
                           t->columns[i]->flags & TABLE_RIGHT, i + 1 == t->n_columns, widths[i]);
        for (size_t i = 0; i < t->n_cells; i++) {
                size_t column = i % t->n_columns;

                print_cell(out, t->cells[i].text, t->has_colour ? colours[t->cells[i].mark] : "",
                           t->columns[column]->flags & TABLE_RIGHT, column + 1 == t->n_columns,
                           widths[column]);
        }
}

/* Those of the cells, and at least table_least_width() unless texts that are not cut first would be cut for it. */
static void choose_widths(const struct table *t, unsigned ret[static MAX_COLUMNS])
{
        unsigned total = 0;

        for (size_t i = 0; i < t->n_columns; i++) {
                unsigned width = t->widths[i], least = table_least_width(t->columns[i]);

                ret[i] = width > least ? width : least;
                total +=
                        (i > 0 ? (unsigned)strlen(GAP) : 0) +
                        (t->columns[i]->flags & TABLE_CUT_FIRST && ret[i] > LEAST_TEXT ? LEAST_TEXT : ret[i]);
        }
        if (t->is_cut && total > TABLE_COLUMNS)
                memcpy(ret, t->widths, sizeof(t->widths));
}

/* Widths are those of UTF-8, whatever the user's locale. */
static void print_rows(struct table *t, FILE *out)
{
        locale_t utf8 = newlocale(LC_CTYPE_MASK, "C.UTF-8", (locale_t)0);
        locale_t before = utf8 ? uselocale(utf8) : (locale_t)0;
        unsigned widths[MAX_COLUMNS];

        for (size_t i = 0; i < t->n_cells; i++) {
                unsigned width = text_columns(t->cells[i].text), *widest = &t->widths[i % t->n_columns];

                *widest = width > *widest ? width : *widest;
        }
        choose_widths(t, widths);
        if (t->is_cut)
                table_fit(t->columns, widths, t->n_columns, (unsigned)strlen(GAP), TABLE_COLUMNS);
        print_lines(t, out, widths);
        if (utf8) {
                uselocale(before);
                freelocale(utf8);
        }
}

int table_flush(struct table *t, FILE *out)
{
        if (t->n_cells > 0)
                print_rows(t, out);
        else if (!t->has_titles && t->nothing)
                fprintf(out, "%s\n", t->nothing);
        remove_cells(t);
        t->has_titles = true;
        return ferror(out) ? -EIO : 0;
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
