/* What bfcctl and bfc-replay print as JSON.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_JSON_H
#define BFC_TESTS_JSON_H

#include <jansson.h>

#include "tests/integration/tools.h"

/* Runs bfcctl with the words "--json", COMMAND, ...: the value under the command's name. The caller
 * releases it. */
static inline json_t *ctl_json(const char *socket, const char *const *words)
{
        char *out, *err;
        json_error_t error;
        json_t *document, *value;
        int status = ctl(socket, words, &out, &err);

        ck_assert_msg(status == 0 && !*err, "bfcctl --json %s: status %d: %s", words[1], status, err);
        document = json_loads(out, JSON_REJECT_DUPLICATES, &error);
        ck_assert_msg(document, "bfcctl --json %s: line %d: %s", words[1], error.line, error.text);
        ck_assert_int_eq(json_integer_value(json_object_get(document, "schema")), 1);
        value = json_incref(json_object_get(document, words[1]));
        ck_assert_msg(value, "no \"%s\" in: %s", words[1], out);
        json_decref(document);
        free(out);
        free(err);
        return value;
}

static inline json_int_t number_of(const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);

        ck_assert_msg(json_is_integer(value), "\"%s\" is no number", key);
        return json_integer_value(value);
}

static inline const char *string_of(const json_t *object, const char *key)
{
        const json_t *value = json_object_get(object, key);

        ck_assert_msg(json_is_string(value), "\"%s\" is no string", key);
        return json_string_value(value);
}

/* The peak of the first tenant, red, by `bfcctl tenants`; resets it. */
static inline uint64_t take_peak(const struct rig *rig)
{
        json_t *rows = ctl_json(rig->admin_socket, WORDS("--json", "tenants")),
               *row = json_array_get(rows, 0);
        uint64_t peak = (uint64_t)number_of(row, "peak_bytes_in_use");

        ck_assert_str_eq(string_of(row, "tenant"), "red");
        json_decref(rows);
        ck_assert_int_eq(ctl(rig->admin_socket, WORDS("reset-peaks"), NULL, NULL), 0);
        return peak;
}

#endif
