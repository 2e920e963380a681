/* Lists for people and for programs: one table of columns describes both the text and the JSON.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A column describes the place of its value in a row, its format, its title in the table, and its key in
 * the JSON. Sizes and durations have a minimum width, so that columns keep their places when a list is
 * printed again. Less important columns are only in wide tables. On a terminal texts are cut to make a
 * table TABLE_COLUMNS wide. */
#ifndef BFC_CTL_TABLE_H
#define BFC_CTL_TABLE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define TABLE_COLUMNS  80
#define TABLE_TEXT_MAX 1024 /* of a text that is formatted for a column */

enum {
        TABLE_LEFT = 0,
        TABLE_RIGHT = 1,      /* numbers are aligned by their last digit */
        TABLE_WIDE = 2,       /* only if all columns are requested */
        TABLE_NARROW = 4,     /* only otherwise: it replaces some of those */
        TABLE_NULL = 8,       /* null in the JSON where the text is empty */
        TABLE_SUM = 16,       /* the sum of several rows has a meaning */
        TABLE_CUT_FIRST = 32, /* a text that is cut before other texts of the row */
        TABLE_OF_KEYS = 64,   /* its key is one of a column that is TABLE_KEYS, and is not set again */
        TABLE_UNKNOWN = 128,  /* UINT64_MAX is an unknown or unlimited number: "-", and null in the JSON */
};

enum table_type {
        TABLE_TEXT,
        TABLE_NUMBER,
        TABLE_SIZE,
        TABLE_DURATION,
        TABLE_NANOSECONDS, /* of metrics; in the JSON a number */
        TABLE_AGO,         /* a time in ms since 1970; 0: never */
        TABLE_HEX,         /* in the JSON a number */
        TABLE_ID,          /* in the JSON text: few readers of JSON keep 64 bits of a number */
        TABLE_BOOL,
        TABLE_MADE, /* a text that the function `text` formats */
        TABLE_KEYS, /* in the JSON the numbers of a message of the protocol, by their names; not in the table */
};

enum table_mark { TABLE_PLAIN, TABLE_WARNING, TABLE_ALARM };

/* The name has neither bfcd_ nor the kind of the rows, nor _total; NULL: there is none. A time is written in seconds. */
struct table_metric {
        const char *name, *help;
        bool is_counter; /* else a gauge */
};

struct table_column {
        const char *title; /* NULL: not in the table */
        const char *key;   /* NULL: not in the JSON */
        unsigned flags;
        enum table_type type;
        size_t offset, n_bytes; /* of the value in its struct */
        size_t via;             /* where in the row a pointer to that struct is; 0: it is the row */
        const char *(*instead)(const void *row); /* a text instead of the value in the table, or NULL */
        enum table_mark (*mark)(const void *row);
        void (*text)(const void *row, char ret[static TABLE_TEXT_MAX]);
        json_t *(*json)(const void *from); /* instead of the value in the JSON; `from` has the value */
        const struct ProtobufCMessageDescriptor *keys; /* the message of TABLE_KEYS */
        const char *without;                           /* a number of it that is left out, or NULL */
        struct table_metric metric;
        const char *page; /* its title on the page of bfc-exporter; NULL: it is not there */
};

/* A column whose value is a member of its row. */
#define TABLE_COLUMN(title, key, flags, type, row, member, ...)                                              \
        {                                                                                                    \
                title, key, flags, type, TABLE_MEMBER(row, member), __VA_ARGS__                              \
        }
#define TABLE_MEMBER(type, member) .offset = offsetof(type, member), .n_bytes = sizeof(((type *)NULL)->member)

/* The appearance of all tables of this program. */
struct table_look {
        bool is_wide;
        bool is_cut;         /* to TABLE_COLUMNS */
        const char *columns; /* only these titles, with commas between; NULL: as is_wide says */
        bool has_colour;
};
extern struct table_look table_look;

/* The column with this title or key, in any case; NULL: there is none. */
const struct table_column *table_find(const struct table_column *columns, const char *name, size_t n_name);

/* Sorts rows, whose number is at most INT_MAX, by a column: the largest number first, texts from a to z. */
void table_sort(const struct table_column *by, const void **rows, size_t n_rows);

/* True: a terminal, and the environment does not disable colour. */
bool table_may_colour(int fd);

/* A table that is printed in parts; columns end with one of zeroes. nothing: the line for a table without rows, as in
 * "No leaks."; NULL: none. table_add() formats a row, and
 * table_flush() prints the rows since the last call: later parts have no titles, and columns that are at
 * least as wide. -ENOMEM, -EIO. */
struct table;
int table_new(const struct table_column *columns, const char *nothing, struct table **ret);
int table_add(struct table *t, const void *row);
int table_flush(struct table *t, FILE *out);
struct table *table_free(struct table *t);

/* All at once. */
int table_print(FILE *out, const struct table_column *columns, const void *const rows[], size_t n_rows,
                const char *nothing);

/* Narrows the widest texts, those that are cut first before others, until n columns with gaps between them need at most
 * n_columns of the screen, or none can be cut further. Numbers are never cut. */
void table_fit(const struct table_column *const columns[], unsigned widths[], size_t n, unsigned n_gap,
               unsigned n_columns);

/* One row as lines "TITLE  value". */
int table_print_upright(FILE *out, const struct table_column *columns, const void *row);

/* Lines "TITLE  value" of texts, which are escaped. Printing empties the lines; -ENOMEM: nothing was printed. */
#define TABLE_MAX_LINES 64
struct table_lines {
        const char *titles[TABLE_MAX_LINES];
        char *texts[TABLE_MAX_LINES]; /* NULL: out of memory */
        size_t n;
};
void __attribute__((format(printf, 3, 4)))
table_add_line(struct table_lines *l, const char *title, const char *format, ...);
int table_print_lines(FILE *out, struct table_lines *l);

/* Single values, for programs that draw a table themselves. The array of columns ends at table_is_end(). A cell
 * is printable text, the caller frees it; NULL when out of memory. table_number() is for columns that
 * table_is_number(). */
bool table_is_end(const struct table_column *c);
bool table_is_shown(const struct table_column *c, bool is_wide);
bool table_is_number(const struct table_column *c);
unsigned table_least_width(const struct table_column *c);
char *table_cell(const struct table_column *c, const void *row);
uint64_t table_number(const struct table_column *c, const void *row);
char *table_number_cell(const struct table_column *c, uint64_t n); /* a number in the column's format */

/* NULL when out of memory. */
json_t *table_json(const struct table_column *columns, const void *row);
json_t *table_json_rows(const struct table_column *columns, const void *const rows[], size_t n_rows);

/* What table_json() makes, as one line, written directly: building it takes several times as long. Numbers and
 * texts only. */
void table_json_line(FILE *out, const struct table_column *columns, const void *row);

/* A string from the daemon as JSON, whatever bytes it has. */
json_t *table_json_string(const char *s);

/* Writes table_json_string() with its quotes. */
void table_json_text(FILE *out, const char *s);

/* JSON numbers are signed here; no size, count or id of a region (proto/region.h) reaches their limit. */
json_t *table_json_number(uint64_t n);

/* Sets a key of an object, or adds to an array; takes the value over. A failure makes the whole NULL, so that
 * filling one needs no checks. */
void table_json_set(json_t **object, const char *key, json_t *value);
void table_json_push(json_t **array, json_t *value);

#endif
