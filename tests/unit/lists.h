/* Lists as bfcctl gets them from a daemon, and the documents that it makes of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_LISTS_H
#define BFC_TESTS_LISTS_H

#include <jansson.h>

#include "ctl/list.h"
#include "tests/suite.h"

/* A reply as it comes from the socket: packed and unpacked again. */
static inline Bfcd__Reply *canned(Bfcd__ListReply *page)
{
        Bfcd__Reply reply = BFCD__REPLY__INIT;
        Bfcd__Reply *ret;
        uint8_t *bytes;
        size_t n;

        reply.body_case = BFCD__REPLY__BODY_LIST;
        reply.list = page;
        n = bfcd__reply__get_packed_size(&reply);
        bytes = malloc(n + 1);
        ck_assert_ptr_nonnull(bytes);
        bfcd__reply__pack(&reply, bytes);
        ret = bfcd__reply__unpack(NULL, n, bytes);
        ck_assert_ptr_nonnull(ret);
        free(bytes);
        return ret;
}

/* Compares the text, which it takes. */
static inline void check_text(char *text, const char *expected)
{
        ck_assert_str_eq(text, expected);
        free(text);
}

/* The text, which it takes, has these parts. */
#define CHECK_PARTS(text, ...) check_parts(text, (const char *const[]){ __VA_ARGS__, NULL })

static inline void check_parts(char *text, const char *const *parts)
{
        for (; *parts; parts++)
                ck_assert_msg(strstr(text, *parts), "no '%s' in:\n%s", *parts, text);
        free(text);
}

/* Runs of blanks become one, and none begins a line: how wide columns are is another test's. */
static inline void squeeze(char *text)
{
        char *to = text;

        for (const char *c = text; *c; c++)
                if (*c != ' ' || (to > text && to[-1] != ' ' && to[-1] != '\n'))
                        *to++ = *c;
        *to = '\0';
}

/* Compares the document, which it takes, with what it must be, key by key and in all. */
static inline void check_document(json_t *document, const char *expected_text)
{
        json_error_t error;
        json_t *expected = json_loads(expected_text, 0, &error);
        char *text;

        ck_assert_msg(expected != NULL, "%s at %d", error.text, error.position);
        ck_assert_ptr_nonnull(document);
        text = json_dumps(document, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
        ck_assert_msg(json_equal(expected, document), "got %s", text);
        free(text);
        json_decref(expected);
        json_decref(document);
}

#endif
