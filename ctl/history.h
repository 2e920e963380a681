/* bfcctl history: what the daemon's records say about a time: sessions, peaks of tenants, refusals and events.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_HISTORY_H
#define BFC_CTL_HISTORY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ctl/list.h"
#include "proto/records.h"

struct history_options {
        uint64_t since_us, until_us; /* since 1970; 0 and UINT64_MAX: no bound */
        const char *tenant;          /* NULL: all */
};

struct history;

#define HISTORY_ERROR_BYTES 512

/* The options of the command; NULL: not given. file: of the daemon, a journal's file (*.journal) or its folder. */
struct history_texts {
        const char *since, *until, *tenant, *file;
};

/* Makes one and reads all records. -EINVAL: an option is wrong. -EACCES: *ret is one without records, because this user
 * may not read the journal. On failure ret_error has a sentence. */
int history_open(const struct history_texts *texts, struct history **ret,
                 char ret_error[static HISTORY_ERROR_BYTES]);

int history_new(const struct history_options *options, struct history **ret); /* -ENOMEM */
struct history *history_free(struct history *h);                              /* takes NULL */
const struct history_options *history_options_of(const struct history *h);

/* Adds a record: its fields as the daemon names them in a file; numbers may be text, as in the journal. Fields that are
 * missing count as 0 or "". Borrowed. -ENOMEM. */
int history_add(struct history *h, enum record_kind kind, uint64_t time_us, const json_t *fields);

/* Adds what the daemon knows now: sessions that run, but not the one that asked, and with_refusals the last refusals
 * of each tenant. -ENOMEM. (history_live.c) */
int history_add_live(struct history *h, const struct history_options *options, const struct list *l,
                     uint64_t own_session_id, bool with_refusals);

/* The kind with this name, or with this message id. -EINVAL: none. */
int history_kind(const char *name, enum record_kind *ret);
int history_kind_of_id(const char *message_id, enum record_kind *ret);

/* -ENOMEM, -EIO. */
int history_print(FILE *out, struct history *h);
json_t *history_json(struct history *h);

/* ---- where records come from (history_file.c, history_journal.c) ------------- */

/* Records of an interval are read for so long after it, because they may tell of its end. */
#define HISTORY_AFTER_US (UINT64_C(900) * 1000000)

/* Reads a file of JSON lines, after the one that logrotate(8) moved last, PATH.1. On failure ret_error has a
 * sentence. */
int history_read_file(struct history *h, const struct history_options *options, const char *path,
                      char ret_error[static HISTORY_ERROR_BYTES]);

/* Reads the system's journal, and only what the daemon's unit wrote; or a journal's file or folder, if path is not
 * NULL. The same. */
int history_read_journal(struct history *h, const struct history_options *options, const char *path,
                         char ret_error[static HISTORY_ERROR_BYTES]);

#endif
