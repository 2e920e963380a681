/* SPDX-License-Identifier: Apache-2.0 */
/* One event, one line, one write(2): lines of several processes on one stream
 * do not mix, and nothing is lost in a buffer when the process dies.
 *
 * The journal reads a priority from "<N>" at the start of a line; elsewhere the
 * level is a word. Text from outside (a program's name, a tenant's) may hold
 * anything, so only printable ASCII reaches the line. */
#include "daemon/log.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/clock.h"

#define LINE_BYTES        2048 /* a longer line ends in "..." */
#define LEFT_OUT_BYTES    64
#define LIMIT_INTERVAL_MS 1000

static enum log_level max_level = LOG_LEVEL_INFO;
static bool to_journal;

/* JOURNAL_STREAM names the device and inode of the stream; a redirection such
 * as 2>file leaves the variable but not the inode. */
static bool stderr_is_journal(void)
{
        const char *stream = getenv("JOURNAL_STREAM");
        unsigned long long device;
        unsigned long long inode;
        struct stat st;
        char end;

        if (!stream || sscanf(stream, "%llu:%llu%c", &device, &inode, &end) != 2)
                return false;
        if (fstat(STDERR_FILENO, &st) < 0)
                return false;
        return st.st_dev == (dev_t)device && st.st_ino == (ino_t)inode;
}

void log_open(enum log_level level)
{
        max_level = level;
        to_journal = stderr_is_journal();
}

static const char *level_prefix(enum log_level level)
{
        switch (level) {
        case LOG_LEVEL_ERROR:
                return to_journal ? "<3>" : "error: ";
        case LOG_LEVEL_WARNING:
                return to_journal ? "<4>" : "warning: ";
        case LOG_LEVEL_NOTICE:
                return to_journal ? "<5>" : "notice: ";
        case LOG_LEVEL_INFO:
                return to_journal ? "<6>" : "info: ";
        case LOG_LEVEL_DEBUG:
                break;
        }
        return to_journal ? "<7>" : "debug: ";
}

static void write_line(const char *line, size_t n_bytes)
{
        ssize_t n;

        /* A log that cannot be written must not stop the daemon. */
        do {
                n = write(STDERR_FILENO, line, n_bytes);
        } while (n < 0 && errno == EINTR);
}

static void write_event(enum log_level level, uint64_t n_left_out, const char *format, va_list args)
        __attribute__((format(printf, 3, 0)));

static void write_event(enum log_level level, uint64_t n_left_out, const char *format, va_list args)
{
        char line[LINE_BYTES + LEFT_OUT_BYTES];
        int saved_errno = errno;
        size_t n_prefix;
        size_t n_room;
        size_t n;
        int r;

        n_prefix = strlen(level_prefix(level));
        memcpy(line, level_prefix(level), n_prefix);
        n_room = LINE_BYTES - n_prefix - 1; /* one for the newline */
        r = vsnprintf(line + n_prefix, n_room, format, args);
        n = r < 0 ? 0 : (size_t)r;
        if (n >= n_room) {
                n = n_room - 1;
                memcpy(line + n_prefix + n - 3, "...", 3);
        }
        for (size_t i = n_prefix; i < n_prefix + n; i++)
                if ((unsigned char)line[i] < ' ' || (unsigned char)line[i] > '~')
                        line[i] = '?';
        n += n_prefix;
        if (n_left_out > 0)
                n += (size_t)snprintf(line + n, LEFT_OUT_BYTES, " (%" PRIu64 " like it left out)",
                                      n_left_out);
        line[n] = '\n';
        write_line(line, n + 1);
        errno = saved_errno;
}

void log_write(enum log_level level, const char *format, ...)
{
        va_list args;

        if (level > max_level)
                return;
        va_start(args, format);
        write_event(level, 0, format, args);
        va_end(args);
}

static bool limit_is_open(const struct log_limit *limit, uint64_t now_ms)
{
        return limit->last_ms == 0 || now_ms - limit->last_ms >= LIMIT_INTERVAL_MS;
}

bool log_limit_is_open(const struct log_limit *limit)
{
        return limit_is_open(limit, clock_ms());
}

void log_limited(struct log_limit *limit, enum log_level level, const char *format, ...)
{
        uint64_t now_ms = clock_ms();
        va_list args;

        if (level > max_level)
                return;
        if (!limit_is_open(limit, now_ms)) {
                limit->n_left_out++;
                return;
        }
        va_start(args, format);
        write_event(level, limit->n_left_out, format, args);
        va_end(args);
        *limit = (struct log_limit){ .last_ms = now_ms };
}
