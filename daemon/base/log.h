/* One-line logs to stderr, in journal style: "<6>text" if stderr is the journal (JOURNAL_STREAM is set),
 * else "info: text". Low layers never log. Control characters in the text become '?', so that one event
 * is one line.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LOG_H
#define BFCD_LOG_H

#include <stdbool.h>
#include <stdint.h>

enum log_level {
        LOG_LEVEL_ERROR = 3,
        LOG_LEVEL_WARNING = 4,
        LOG_LEVEL_NOTICE = 5,
        LOG_LEVEL_INFO = 6,
        LOG_LEVEL_DEBUG = 7
};

/* Reads JOURNAL_STREAM; the least urgent level that is written. */
void log_open(enum log_level max_level);

void log_write(enum log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Lines go to the journal. */
bool log_is_journal(void);

/* Replaces what a line cannot have: everything but printable ASCII. */
void log_clean(char *text);

/* Writes queued lines without waiting. True: nothing is queued any more. The next: whether lines are
 * queued. The last, at the end of the process: waits at most this long for the reader. */
bool log_flush(void);
bool log_is_queued(void);
void log_close(unsigned timeout_ms);

/* Lines that were lost so far because the reader was too slow. */
uint64_t log_count_lost(void);

/* For events that clients can cause at will (zero-initialised). The first event is written. While further
 * ones follow, the interval to the next line doubles from a second to a minute; that line has the number of
 * suppressed events. */
struct log_limit {
        uint64_t last_ms;
        uint64_t interval_ms;
        uint64_t n_left_out;
};
/* True: the next such event is written, so its text is needed. */
bool log_limit_is_open(const struct log_limit *limit);
void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* For events that are written by other means: true: this one is to be written, and *ret_n_left_out such events were
 * suppressed before it. False: it counts as suppressed. */
bool log_limit_take(struct log_limit *limit, uint64_t *ret_n_left_out);

/* A limit for each user; users whose uids differ by a multiple of LOG_USERS share one. */
#define LOG_USERS 16u
struct log_limits {
        struct log_limit of_users[LOG_USERS];
};
struct log_limit *log_limit_of_user(struct log_limits *limits, uint32_t uid);

#define log_error(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)  log_write(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)   log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
