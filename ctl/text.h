/* Text for people and for JSON, made of numbers and of strings from clients.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A client chooses its name, which may have any bytes, such as those that move a terminal's cursor. Strings
 * from the daemon reach a terminal only through text_escape(). */
#ifndef BFC_CTL_TEXT_H
#define BFC_CTL_TEXT_H

#include <stdint.h>
#include <stdio.h>
#include <wchar.h>

/* Enough for every text_size(), text_duration() and text_percent(). */
#define TEXT_MAX 32

/* One line of valid UTF-8 in which every control character, every character
 * that turns the direction of writing, every byte that is no UTF-8 and the
 * backslash is written as an escape (\n, \\, \x1b, \u202e). Two strings that
 * differ stay different. NULL reads as "". NULL when out of memory; the caller
 * frees it. */
char *text_escape(const char *s);

/* What text_escape() returned, as text or as an attribute's value of XML. */
void text_xml(FILE *out, const char *text);

/* A copy of the string with every byte that is no UTF-8 replaced by U+FFFD: JSON
 * escapes the rest by itself. NULL when out of memory; the caller frees it. */
char *text_valid(const char *s);

/* "0 B", "1023 B", "1.0 KiB", "512.0 MiB". */
const char *text_size(uint64_t n_bytes, char ret[static TEXT_MAX]);

/* "12.3 s", "4m 05s", "3h 20m", "2d 07h". */
const char *text_duration(uint64_t ms, char ret[static TEXT_MAX]);

/* "850 us", "12.3 ms", and from 1 s on as text_duration(). */
const char *text_time(uint64_t ns, char ret[static TEXT_MAX]);

/* "12.5" for a part of a whole; "-" if the whole is 0. */
const char *text_percent(uint64_t part, uint64_t whole, char ret[static TEXT_MAX]);

/* The name that a mistyped word most likely means; NULL: none is near. names: the first of n, which are stride bytes
 * apart. */
const char *text_nearest(const char *word, const char *const *names, size_t n, size_t stride);

/* The columns of the screen that a text takes, in the thread's locale. Bytes that are no character take one each. */
unsigned text_columns(const char *text);

/* How many bytes of a text fit into n_columns, and the columns that they take. */
size_t text_clip(const char *text, unsigned n_columns, unsigned *ret_columns);

/* The bytes of one character, and the columns that it takes. */
size_t text_character(const char *text, mbstate_t *state, unsigned *ret_columns);

/* Flushes a stream. A negative errno of the last write, such as -ENOSPC; -EIO if only an earlier write failed. */
int text_flush(FILE *out);

#endif
