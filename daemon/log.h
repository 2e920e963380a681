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

/* For events that strangers cause at will: at most one line a second for each
 * limit (zero-initialised); the next line says how many were left out. */
struct log_limit {
        uint64_t last_ms;
        uint64_t n_left_out;
};
/* Whether the next such event is written; else there is no need to look for words. */
bool log_limit_is_open(const struct log_limit *limit);
void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
        __attribute__((format(printf, 3, 4)));

#define log_error(...)   log_write(LOG_LEVEL_ERROR, __VA_ARGS__)
#define log_warning(...) log_write(LOG_LEVEL_WARNING, __VA_ARGS__)
#define log_notice(...)  log_write(LOG_LEVEL_NOTICE, __VA_ARGS__)
#define log_info(...)    log_write(LOG_LEVEL_INFO, __VA_ARGS__)
#define log_debug(...)   log_write(LOG_LEVEL_DEBUG, __VA_ARGS__)

#endif
