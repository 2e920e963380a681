/* bfcctl leaks: old blocks, summed by tag, by session, or one by one.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Blocks are added page by page: a million of them take no more memory here than there are groups. */
#ifndef BFC_CTL_LEAKS_H
#define BFC_CTL_LEAKS_H

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "ctl/list.h"

enum leaks_by { LEAKS_BY_TAG, LEAKS_BY_SESSION, LEAKS_BY_BLOCK };

struct leaks_options {
        enum leaks_by by;
        uint64_t older_ms;  /* younger blocks are left out */
        const char *tenant; /* NULL: all */
};

struct leaks;

/* "tag", "session", "block"; -EINVAL. */
int leaks_parse_by(const char *s, enum leaks_by *ret);

/* options must outlive it. -ENOMEM. */
int leaks_new(const struct leaks_options *options, struct leaks **ret);
struct leaks *leaks_free(struct leaks *k);

/* Counts the blocks that clients report from their caches, once, before all blocks: blocks without a tag
 * of these sessions are then not counted. -ENOMEM. */
int leaks_add_ages(struct leaks *k, const struct list *ages);

/* Counts a block; -ENOMEM. */
int leaks_add(struct leaks *k, const Bfcd__BlockRow *row);

/* Groups with the most bytes first. sessions: for their names. -ENOMEM, -EIO. */
int leaks_print(FILE *out, struct leaks *k, const struct list *sessions);

/* NULL when out of memory. */
json_t *leaks_json(struct leaks *k, const struct list *sessions);

#endif
