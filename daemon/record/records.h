/* Where records go: the journal, a file, or nowhere. One destination for the process, as for the log.
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
#include <stdint.h>

#include "daemon/base/log.h"
#include "daemon/record/record.h"

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
