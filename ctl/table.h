/* Tables for people: a line of titles, then rows, columns aligned.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cells are added from left to right, row after row; every row is full:
 * n_cells % n_columns == 0 when it is printed. Being out of memory while cells
 * are added is remembered and said by table_print(), so that filling a table
 * needs no checks. */
#ifndef BFC_CTL_TABLE_H
#define BFC_CTL_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct table;

struct table_column {
        const char *title;
        bool right; /* figures are aligned by their last digit */
};

/* columns must outlive the table. -ENOMEM. */
int table_new(const struct table_column *columns, size_t n_columns, struct table **ret);
struct table *table_free(struct table *t);

void table_text(struct table *t, const char *s); /* escaped here, so from anywhere */
void table_number(struct table *t, uint64_t n);
void table_hex(struct table *t, uint64_t n);
void table_size(struct table *t, uint64_t n_bytes);
void table_duration(struct table *t, uint64_t ms);
void table_percent(struct table *t, uint64_t part, uint64_t whole);

/* -ENOMEM: a cell is missing, nothing was printed. -EIO. */
int table_print(const struct table *t, FILE *out);

/* The same cells as lines "TITLE  value", for a table of one row. */
int table_print_upright(const struct table *t, FILE *out);

#endif
