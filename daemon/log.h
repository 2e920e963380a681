/* One-line logs to stderr, in journal style: "<6>text" where stderr goes to the
 * journal (JOURNAL_STREAM is set), "info: text" elsewhere. Low floors never log.
 * Control characters in the text become '?', so that one event is one line.
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

/* Writes what standard error did not take before; nothing waits for it. True: nothing is queued any more. And: whether
 * something is. And, at the end of the process: waits so long for its reader. */
bool log_flush(void);
bool log_is_queued(void);
void log_close(unsigned timeout_ms);

/* For events that clients cause at will (zero-initialised): the first is a line. While they go on, the time
 * to the next line doubles, from a second up to a minute; that line says how many were left out. */
struct log_limit {
        uint64_t last_ms;
        uint64_t interval_ms;
        uint64_t n_left_out;
};
/* Whether the next such event is written; else there is no need to look for words. */
bool log_limit_is_open(const struct log_limit *limit);
void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

/* A line for those that were left out and that no other event tells of, once its time has come. True: there are
 * some, and it has not come yet. */
bool log_limited_rest(struct log_limit *limit, enum log_level level, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

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
