/* From the options of bfcctl history to its records; see history.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/history.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "ctl/when.h"

static int read_when(const char *option, const char *text, uint64_t *ret_us,
                     char ret_error[static HISTORY_ERROR_BYTES])
{
        if (!text || when_parse(text, time(NULL), ret_us) == 0)
                return 0;
        snprintf(ret_error, HISTORY_ERROR_BYTES,
                 "wrong value for --%s \"%.64s\"; it is a time, such as " WHEN_FORMS, option, text);
        return -EINVAL;
}

static bool is_journal(const char *path)
{
        size_t n = strlen(path);
        struct stat st;

        return (n > 8 && strcmp(path + n - 8, ".journal") == 0) ||
               (stat(path, &st) == 0 && S_ISDIR(st.st_mode));
}

int history_open(const struct history_texts *texts, struct history **ret,
                 char ret_error[static HISTORY_ERROR_BYTES])
{
        struct history_options options = { .until_us = UINT64_MAX, .tenant = texts->tenant };
        int r = read_when("since", texts->since, &options.since_us, ret_error);
        struct history *h;

        if (r == 0)
                r = read_when("until", texts->until, &options.until_us, ret_error);
        if (r < 0)
                return r;
        if (options.until_us < options.since_us) {
                snprintf(ret_error, HISTORY_ERROR_BYTES, "--until is before --since");
                return -EINVAL;
        }
        if (history_new(&options, &h) < 0) {
                snprintf(ret_error, HISTORY_ERROR_BYTES, "Out of memory.");
                return -ENOMEM;
        }
        r = texts->file && !is_journal(texts->file)
                    ? history_read_file(h, &options, texts->file, ret_error)
                    : history_read_journal(h, &options, texts->file, ret_error);
        if (r < 0 && (r != -EACCES || texts->file)) {
                history_free(h);
                return r == -EINVAL || r == -EACCES ? -EIO : r;
        }
        *ret = h;
        return r;
}
