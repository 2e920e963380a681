/* JSON documents, with their schema; see show.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/show.h"

#include <errno.h>

json_t *show_document(const char *name, json_t *value)
{
        json_t *ret = json_object();

        table_json_set(&ret, "schema", json_integer(SHOW_SCHEMA));
        table_json_set(&ret, name, value);
        return ret;
}

int show_print(FILE *out, json_t *document)
{
        int r = document ? json_dumpf(document, out, JSON_INDENT(2) | JSON_REAL_PRECISION(6)) : 0;

        if (!document)
                return -ENOMEM;
        json_decref(document);
        fputc('\n', out);
        return r < 0 || ferror(out) ? -EIO : 0;
}
