/* Tables for people: a line of titles, then rows, columns aligned.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cells are added from left to right, row after row, those of columns that are not shown too; every
 * row is full: n_cells % n_columns == 0 when it is printed. Sizes and durations have a least width, so
 * that columns stay where they are when a table is printed again. Unless all columns are asked for, a
 * table is TABLE_COLUMNS wide: texts are cut, with a '+' at the end, the widest first. Being out of memory while cells
 * are added is remembered and said by table_print(), so that filling a table
 * needs no checks. */
#ifndef BFC_CTL_TABLE_H
#define BFC_CTL_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define TABLE_COLUMNS 80

struct table;

enum {
        TABLE_LEFT = 0,
        TABLE_RIGHT = 1,  /* figures are aligned by their last digit */
        TABLE_WIDE = 2,   /* only where all columns are asked for */
        TABLE_NARROW = 4, /* only where not: it stands for some of those */
};

struct table_column {
        const char *title;
        unsigned flags;
};

/* How all tables of this program look. */
struct table_look {
        bool is_wide;
        bool has_colour;
};
extern struct table_look table_look;

/* A terminal, and nothing in the environment that forbids colour. */
bool table_may_colour(int fd);

enum table_mark { TABLE_PLAIN, TABLE_WARNING, TABLE_ALARM };

/* columns must outlive the table. -ENOMEM. */
int table_new(const struct table_column *columns, size_t n_columns, struct table **ret);
struct table *table_free(struct table *t);

void table_text(struct table *t, const char *s); /* escaped here, so from anywhere */
void table_number(struct table *t, uint64_t n);
void table_hex(struct table *t, uint64_t n);
void table_size(struct table *t, uint64_t n_bytes);
void table_duration(struct table *t, uint64_t ms);
void table_percent(struct table *t, uint64_t part, uint64_t whole);

/* Colours the last cell that was added. */
void table_mark(struct table *t, enum table_mark mark);

/* -ENOMEM: a cell is missing, nothing was printed. -EIO. */
int table_print(const struct table *t, FILE *out);

/* The same, and drops the rows. Only the first call prints the titles; later parts have columns that are at
 * least as wide. */
int table_print_part(struct table *t, FILE *out);

/* The same cells as lines "TITLE  value", for a table of one row. */
int table_print_upright(const struct table *t, FILE *out);

#endif
