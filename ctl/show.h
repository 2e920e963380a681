/* What bfcctl prints of a list: a table for people, JSON for programs.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The field names of the JSON are a promise: "schema" counts up when one
 * changes its meaning or goes; new ones may come at any time. */
#ifndef BFC_CTL_SHOW_H
#define BFC_CTL_SHOW_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "ctl/list.h"

#define SHOW_SCHEMA 1

/* All kinds but blocks. -ENOMEM, -EIO. */
int show_table(FILE *out, Bfcd__List__Kind kind, const struct list *l);

/* The list of blocks, printed as the rows come: there may be millions, so few are kept. In the JSON each block
 * has a line. Without show_blocks_end() the JSON ends in the middle. -ENOMEM, -EIO. */
struct show_blocks;
int show_blocks_new(FILE *out, bool json, struct show_blocks **ret);
int show_blocks_add(struct show_blocks *s, const Bfcd__BlockRow *row);
int show_blocks_end(struct show_blocks *s);
struct show_blocks *show_blocks_free(struct show_blocks *s); /* takes NULL */

/* {"schema": 1, NAME: value}; takes the value over, also on failure. NULL when
 * out of memory or value is NULL. */
json_t *show_document(const char *name, json_t *value);

/* A string from the daemon as JSON, whatever bytes it holds. */
json_t *show_string(const char *s);

/* A figure; and an id, as text, since it may use all 64 bits, which few readers of
 * JSON keep in a number. */
json_t *show_number(uint64_t n);
json_t *show_id(uint64_t n);

/* Sets one field of an object, or adds to an array; takes the value over. A failure
 * anywhere makes the whole NULL, so that filling one needs no checks. */
void show_set(json_t **object, const char *key, json_t *value);
void show_push(json_t **array, json_t *value);

/* All figures but those that only a tenant has; NULL: zeroes. */
void show_set_figures(json_t **row, const Bfcd__Figures *figures);

/* The same. NULL when out of memory. */
json_t *show_json(Bfcd__List__Kind kind, const struct list *l);

/* Writes the document and a newline and frees it. -ENOMEM (also for NULL), -EIO. */
int show_print(FILE *out, json_t *document);

#endif
