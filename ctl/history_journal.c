/* Records in the journal; see history.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Any process may send the journal a record with the daemon's message ids. journald(8) itself writes the field
 * _SYSTEMD_UNIT, from the sender's control group, so only records of the daemon's unit are read. A journal that is named
 * is taken as it is, but for this. */
#include "ctl/history.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#ifdef HAVE_JOURNAL
#include <systemd/sd-journal.h>

#include "ctl/progress.h"
#include "ctl/table.h"

#define UNIT      "bfcd.service"
#define MAX_VALUE 16384u /* the daemon's are shorter */

static int open_journal(const char *path, sd_journal **ret)
{
        const char *paths[] = { path, NULL };
        struct stat st;

        if (!path)
                return sd_journal_open(ret, SD_JOURNAL_LOCAL_ONLY | SD_JOURNAL_SYSTEM);
        if (stat(path, &st) < 0)
                return -errno;
        return S_ISDIR(st.st_mode) ? sd_journal_open_directory(ret, path, 0)
                                   : sd_journal_open_files(ret, paths, 0);
}

/* Matches of one field are alternatives; different fields must all match. */
static int add_matches(sd_journal *j)
{
        int r = sd_journal_add_match(j, "_SYSTEMD_UNIT=" UNIT, 0);

        for (int i = 0; r >= 0 && i < RECORD_KINDS; i++) {
                char match[64];

                snprintf(match, sizeof(match), "MESSAGE_ID=%s", record_kinds[i].message_id);
                r = sd_journal_add_match(j, match, 0);
        }
        return r;
}

/* A field of the daemon, with its name as in a file. */
static int add_field(json_t **fields, const char *data, size_t n_bytes)
{
        const char *equals = memchr(data, '=', n_bytes);
        size_t n_name = equals ? (size_t)(equals - data) : 0, n_prefix = strlen(RECORDS_PREFIX), n_value;
        char name[64], *value;
        bool is_ours;

        if (!equals || n_name >= sizeof(name))
                return 0;
        n_value = n_bytes - n_name - 1 < MAX_VALUE ? n_bytes - n_name - 1 : MAX_VALUE;
        memcpy(name, data, n_name);
        name[n_name] = '\0';
        is_ours = strncmp(name, RECORDS_PREFIX, n_prefix) == 0;
        if (!is_ours && strcmp(name, "MESSAGE") != 0 && strcmp(name, "MESSAGE_ID") != 0)
                return 0;
        for (char *c = name; *c; c++)
                *c = (char)tolower((unsigned char)*c);
        value = strndup(equals + 1, n_value);
        table_json_set(fields, is_ours ? name + n_prefix : name, value ? table_json_string(value) : NULL);
        free(value);
        return *fields ? 0 : -ENOMEM;
}

static int add_entry(struct history *h, sd_journal *j, uint64_t time_us)
{
        json_t *fields = json_object();
        enum record_kind kind;
        const void *data;
        const char *id;
        size_t n_bytes;
        int r = 0;

        sd_journal_restart_data(j);
        while (r == 0 && sd_journal_enumerate_available_data(j, &data, &n_bytes) > 0)
                r = add_field(&fields, data, n_bytes);
        id = json_string_value(json_object_get(fields, "message_id"));
        if (r == 0 && id && history_kind_of_id(id, &kind) == 0)
                r = history_add(h, kind, time_us, fields);
        json_decref(fields);
        return r;
}

static int read_entries(struct history *h, const struct history_options *options, sd_journal *j)
{
        struct progress progress;
        uint64_t time_us = 0;
        int r = options->since_us > 0 ? sd_journal_seek_realtime_usec(j, options->since_us)
                                      : sd_journal_seek_head(j);

        progress_begin(&progress, NULL, "history", 0);
        while (r >= 0 && (r = sd_journal_next(j)) > 0) {
                r = sd_journal_get_realtime_usec(j, &time_us);
                if (r < 0 || (options->until_us < UINT64_MAX - HISTORY_AFTER_US &&
                              time_us > options->until_us + HISTORY_AFTER_US))
                        break;
                r = add_entry(h, j, time_us);
                progress_step(&progress, 1);
        }
        progress_end(&progress);
        return r < 0 ? r : 0;
}

int history_read_journal(struct history *h, const struct history_options *options, const char *path,
                         char ret_error[static HISTORY_ERROR_BYTES])
{
        sd_journal *j = NULL;
        int r = open_journal(path, &j);

        if (r >= 0 && !path && sd_journal_has_persistent_files(j) <= 0 &&
            sd_journal_has_runtime_files(j) <= 0)
                r = -EACCES;
        if (r >= 0)
                r = add_matches(j);
        if (r >= 0)
                r = read_entries(h, options, j);
        sd_journal_close(j);
        if (r == -EACCES && !path)
                snprintf(
                        ret_error, HISTORY_ERROR_BYTES,
                        "There is no journal, or this user may not read it (root and the group systemd-journal "
                        "may). --file names the daemon's file of records.");
        else if (r < 0)
                snprintf(ret_error, HISTORY_ERROR_BYTES, "%s cannot be read: %s.",
                         path ? path : "The journal", strerror(-r));
        return r;
}

#else

int history_read_journal(struct history *h, const struct history_options *options, const char *path,
                         char ret_error[static HISTORY_ERROR_BYTES])
{
        (void)h;
        (void)options;
        (void)path;
        snprintf(
                ret_error, HISTORY_ERROR_BYTES,
                "This bfcctl was built without libsystemd and cannot read the journal; name the daemon's file of "
                "records with --file.");
        return -ENOTSUP;
}

#endif
