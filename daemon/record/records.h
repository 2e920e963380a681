/* Records: one event as named fields, and its two encodings; and where they go: the journal, a file, or nowhere. There is
 * one destination for the process, as for the log.
 *
 * In the journal's native protocol a value with a newline is preceded by its length, so no client can add a field.
 * As a line of JSON every character outside of printable ASCII is escaped, or replaced where it is no ASCII.
 * Everything is bounded: a value that does not fit is cut.
 *
 * A record is written together with its line of the log, so the sentence exists once: where both go to the journal, the
 * record replaces the line.
 *
 * The loop never waits. Records that the journal does not take now are queued; those for the file are queued for a
 * thread. Where a queue is full, the journal absent or the file not writable, records are dropped and counted. The
 * thread opens the file again when another one has its path, so logrotate(8) may move it at any time.
 *
 * All functions are for the thread of the loop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RECORDS_H
#define BFCD_RECORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/log.h"
#include "proto/records.h"

#define RECORD_FIELDS        24u
#define RECORD_TEXT_BYTES    8192u
#define RECORD_MESSAGE_BYTES 2048u
/* An encoded record is never longer. The most that JSON makes of a byte is \u0000. */
#define RECORD_ENCODED_BYTES (6 * (RECORD_TEXT_BYTES + RECORD_MESSAGE_BYTES) + RECORD_FIELDS * 64 + 512)

enum record_type {
        RECORD_TEXT,
        RECORD_NUMBER,
        RECORD_SIZES, /* bytes by partition, "train=1024 eval=0"; an object in JSON */
};

struct record {
        enum record_kind kind;
        size_t n_fields, n_text;
        struct record_field {
                const char *key; /* a constant, in lower case */
                enum record_type type;
                size_t at, n_bytes; /* in `text` */
        } fields[RECORD_FIELDS];
        char text[RECORD_TEXT_BYTES];
};

void record_init(struct record *r, enum record_kind kind);

/* value: may be NULL, which adds nothing, and have any bytes. At most n_max of them are kept; what is not printable
 * ASCII is replaced by '?'. */
void record_add_text(struct record *r, const char *key, const char *value, size_t n_max);
/* record_add_text() without a replacement: for text of several lines that no client chooses. */
void record_add_lines(struct record *r, const char *key, const char *value, size_t n_max);
/* At most INT64_MAX, more than which many readers of JSON refuse. */
void record_add_number(struct record *r, const char *key, uint64_t value);

/* Adds to the field `key`, which is the last one, or begins it. name: of a partition, so it has neither blanks nor
 * equals signs. What does not fit is left out. */
void record_add_size(struct record *r, const char *key, const char *name, uint64_t n_bytes);

/* A datagram for the journal. Returns its length. */
size_t record_encode_journal(const struct record *r, int priority, const char *message,
                             char ret[static RECORD_ENCODED_BYTES]);

/* A line with its newline. Returns its length. */
size_t record_encode_json(const struct record *r, uint64_t time_us, int priority, const char *message,
                          char ret[static RECORD_ENCODED_BYTES]);

/* ---- the destination ---------------------------------------------------------- */

/* journal: the path of the journal's socket; file: of a file of JSON lines. At most one is not NULL. Both NULL: the
 * journal if the log goes there, else nowhere. A path that cannot be opened yet is no error. -ENOMEM, -EMFILE, ... */
int records_open(const char *journal, const char *file);

/* Waits at most this long for what is queued. */
void records_close(unsigned timeout_ms);

/* Records are written somewhere. */
bool records_are_open(void);

/* Writes the line to the log, and the record. */
void records_write(enum log_level level, const struct record *r, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* Sends what the journal did not take, without waiting. */
void records_flush(void);
bool records_are_queued(void); /* there is something to send */

/* Records that were dropped since the start. */
uint64_t records_count_dropped(void);

#endif
