/* bfcctl reload; see reload.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/reload.h"

#include <errno.h>
#include <jansson.h>
#include <stdlib.h>

#include "ctl/show.h"
#include "ctl/text.h"

static int put_lines(FILE *f, char *const *lines, size_t n_lines)
{
        for (size_t i = 0; i < n_lines; i++) {
                char *line = text_escape(lines[i]);

                if (!line)
                        return -ENOMEM;
                fprintf(f, "%s\n", line);
                free(line);
        }
        return 0;
}

int reload_show(FILE *out, FILE *errors, const Bfcd__ReloadReply *reply, bool dry_run)
{
        int r = put_lines(errors, reply->errors, reply->n_errors);

        if (r < 0)
                return r;
        if (reply->n_errors > 0) {
                fputs("bfcctl: Nothing was changed.\n", errors);
                return 0;
        }
        if (reply->n_changes == 0)
                fputs(dry_run ? "Nothing would change.\n" : "Nothing has changed.\n", out);
        else if (dry_run)
                fputs("Would change:\n", out);
        return put_lines(out, reply->changes, reply->n_changes);
}

static json_t *lines_json(char *const *lines, size_t n_lines)
{
        json_t *array = json_array();

        for (size_t i = 0; array && i < n_lines; i++) {
                if (json_array_append_new(array, table_json_string(lines[i])) < 0) {
                        json_decref(array);
                        return NULL;
                }
        }
        return array;
}

int reload_show_json(FILE *out, const Bfcd__ReloadReply *reply, bool dry_run)
{
        json_t *value = json_pack("{s:b, s:b, s:o, s:o}", "ok", reply->n_errors == 0, "dry_run", dry_run,
                                  "changes", lines_json(reply->changes, reply->n_changes), "errors",
                                  lines_json(reply->errors, reply->n_errors));

        return show_print(out, show_document("reload", value));
}
