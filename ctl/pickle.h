/* Pickles of plain data: None, booleans, integers, floats, strings, bytes, lists, tuples and dictionaries.
 *
 * A pickle is a program for a stack machine that can call any function of Python. This machine has only the
 * instructions that make data. It refuses all others by name, and runs nothing.
 *
 * Bounds: the input, the number of values, and what each instruction may make. Values may refer to each
 * other in a circle: whoever walks them follows a fixed number of steps.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PICKLE_H
#define BFC_CTL_PICKLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum pickle_type {
        PICKLE_NONE,
        PICKLE_BOOL,
        PICKLE_INTEGER,
        PICKLE_FLOAT,
        PICKLE_STRING, /* also bytes */
        PICKLE_LIST,   /* also tuples */
        PICKLE_DICT,
};

struct pickle_value {
        enum pickle_type type;
        union {
                int64_t integer; /* and booleans */
                double real;
                struct {
                        const char *text; /* in the input; not ended by a zero byte */
                        size_t n;
                } string;
                struct {
                        const struct pickle_value **items; /* of a dictionary: key, value, key, ... */
                        size_t n, n_room;
                } list;
        };
};

struct pickle;

/* The input must outlive the pickle. -EINVAL, -E2BIG: *ret_why is a sentence (static), *ret_at the byte;
 * -ENOMEM. */
int pickle_read(const void *bytes, size_t n_bytes, struct pickle **ret, const char **ret_why, size_t *ret_at);
struct pickle *pickle_free(struct pickle *p); /* takes NULL */

const struct pickle_value *pickle_top(const struct pickle *p);
uint64_t pickle_n_values(const struct pickle *p); /* that it has made */

/* The value of a key in a dictionary; NULL: v is NULL, or no dictionary, or has no such key. */
const struct pickle_value *pickle_get(const struct pickle_value *v, const char *key);

/* A list's items; 0: v is NULL, or no list. */
size_t pickle_n_items(const struct pickle_value *v);
const struct pickle_value *pickle_item(const struct pickle_value *v, size_t i);

/* False: v is NULL, or something else. */
bool pickle_integer(const struct pickle_value *v, int64_t *ret);
bool pickle_is_string(const struct pickle_value *v, const char *text);

#endif
