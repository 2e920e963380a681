/* The lists of bfcctl: a table for people, JSON for programs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The keys of the JSON are stable: "schema" is incremented when a key changes its meaning or is removed.
 * New keys may be added at any time. */
#ifndef BFC_CTL_SHOW_H
#define BFC_CTL_SHOW_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "ctl/list.h"
#include "ctl/table.h"

#define SHOW_SCHEMA 1

/* All kinds except blocks. -ENOMEM, -EIO. */
int show_table(FILE *out, Bfcd__List__Kind kind, const struct list *l);

/* Sorts the rows of a list by a column of it. */
void show_sort(Bfcd__List__Kind kind, struct list *l, const struct table_column *by);

/* The columns of a kind that is a list. */
const struct table_column *show_columns(Bfcd__List__Kind kind);

/* A device's UUID as nvidia-smi writes it; "" if it has none. */
void show_device_uuid(const void *device, char ret[static TABLE_TEXT_MAX]);

/* The list of blocks, printed as the rows arrive: there may be millions, so few are kept. In the JSON
 * each block is one line. Without show_blocks_end() the JSON is incomplete. -ENOMEM, -EIO. */
struct show_blocks;
int show_blocks_new(FILE *out, bool json, struct show_blocks **ret);
int show_blocks_add(struct show_blocks *s, const Bfcd__BlockRow *row);
int show_blocks_end(struct show_blocks *s);
struct show_blocks *show_blocks_free(struct show_blocks *s); /* takes NULL */

/* {"schema": 1, NAME: value}; takes the value over, also on failure. NULL when
 * out of memory or value is NULL. */
json_t *show_document(const char *name, json_t *value);

/* All kinds except blocks. NULL when out of memory. */
json_t *show_json(Bfcd__List__Kind kind, const struct list *l);

/* Writes the document and a newline and frees it. -ENOMEM (also for NULL), -EIO. */
int show_print(FILE *out, json_t *document);

#endif
