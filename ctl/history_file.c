/* Records in a file of JSON lines; see history.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/history.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/progress.h"

/* A line that is no record is left out: the daemon may write the last one now, and a disk may have been full. */
static int add_line(struct history *h, const struct history_options *options, const char *line,
                    size_t n_bytes)
{
        json_t *fields = json_loadb(line, n_bytes, JSON_REJECT_DUPLICATES, NULL);
        const char *name = json_string_value(json_object_get(fields, "record"));
        json_int_t time_us = json_integer_value(json_object_get(fields, "time_us"));
        enum record_kind kind;
        int r = 0;

        if (name && time_us > 0 && history_kind(name, &kind) == 0 && (uint64_t)time_us >= options->since_us)
                r = history_add(h, kind, (uint64_t)time_us, fields);
        json_decref(fields);
        return r;
}

static int read_lines(struct history *h, const struct history_options *options, FILE *f)
{
        struct progress progress;
        char *line = NULL;
        size_t n_room = 0;
        ssize_t n = 0;
        int r = 0;

        progress_begin(&progress, NULL, "history", 0);
        while (r == 0 && (n = getline(&line, &n_room, f)) > 0) {
                r = add_line(h, options, line, (size_t)n);
                progress_step(&progress, 1);
        }
        progress_end(&progress);
        free(line);
        return r < 0 ? r : ferror(f) ? -EIO : 0;
}

/* -ENOENT. */
static int read_path(struct history *h, const struct history_options *options, const char *path)
{
        FILE *f = fopen(path, "re");
        int r;

        if (!f)
                return -errno;
        r = read_lines(h, options, f);
        fclose(f);
        return r;
}

int history_read_file(struct history *h, const struct history_options *options, const char *path,
                      char ret_error[static HISTORY_ERROR_BYTES])
{
        const char *failed;
        char *before;
        int r;

        if (asprintf(&before, "%s.1", path) < 0)
                before = NULL;
        failed = before ? before : path;
        r = before ? read_path(h, options, before) : -ENOMEM;
        if (r == 0 || r == -ENOENT) {
                failed = path;
                r = read_path(h, options, path);
        }
        if (r < 0)
                snprintf(ret_error, HISTORY_ERROR_BYTES, "%s cannot be read: %s.", failed, strerror(-r));
        free(before);
        return r;
}
