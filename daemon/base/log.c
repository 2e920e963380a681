/* SPDX-License-Identifier: Apache-2.0 */
/* One event, one line, one write(2): lines of several processes on one stream
 * do not mix, and nothing is lost in a buffer when the process dies.
 *
 * The loop never waits for the reader of standard error. Lines that it does not take now are queued, in order, and
 * written as it takes them; where the queue is full, lines are dropped and counted. Only these lines are lost
 * with the process.
 *
 * The journal reads a priority from "<N>" at the start of a line; elsewhere the
 * level is a word. Text from outside (a program's name, a tenant's) may hold
 * anything, so only printable ASCII reaches the line. */
#include "daemon/base/log.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define LINE_BYTES        2048 /* a longer line ends in "..." */
#define LEFT_OUT_BYTES    64
#define LIMIT_INTERVAL_MS 1000
#define LIMIT_LONGEST_MS  60000
#define QUEUE_BYTES       ((size_t)256 << 10)

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

bool log_is_journal(void)
{
        return to_journal;
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

/* ---- writing ------------------------------------------------------------- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* everything below */
static char queue[QUEUE_BYTES];
/* Whole lines, but for the first, of which a part may be written. Changed under the lock. */
static _Atomic size_t n_queued;
static uint64_t n_lost; /* lines that found no room since the last one that did */
static uint64_t n_lost_ever;

/* How many bytes were taken; 0: none can be taken now. A log that cannot be written must not stop the daemon: its
 * lines count as taken. A pipe that can be written takes a line at once. */
static size_t write_now(const char *line, size_t n_bytes)
{
        struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };
        ssize_t n;

        do {
                n = send(STDERR_FILENO, line, n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
                if (n < 0 && errno == ENOTSOCK) {
                        if (poll(&p, 1, 0) == 0)
                                return 0;
                        n = write(STDERR_FILENO, line, n_bytes);
                }
        } while (n < 0 && errno == EINTR);
        if (n < 0)
                return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : n_bytes;
        return (size_t)n;
}

static void queue_add(const char *line, size_t n_bytes)
{
        memcpy(queue + n_queued, line, n_bytes);
        n_queued += n_bytes;
}

/* A line at a time. */
static void queue_write(void)
{
        size_t n_done = 0;

        while (n_done < n_queued) {
                const char *line = queue + n_done, *end = memchr(line, '\n', n_queued - n_done);
                size_t n_bytes = (size_t)(end - line) + 1, n = write_now(line, n_bytes);

                n_done += n;
                if (n < n_bytes)
                        break;
        }
        n_queued -= n_done;
        memmove(queue, queue + n_done, n_queued);
}

static void queue_note_lost(void)
{
        char line[128];
        int n;

        if (n_lost == 0)
                return;
        n = snprintf(line, sizeof(line),
                     "%s%" PRIu64 " log lines were lost: the reader of the log was too slow\n",
                     level_prefix(LOG_LEVEL_WARNING), n_lost);
        if ((size_t)n > QUEUE_BYTES - n_queued)
                return;
        queue_add(line, (size_t)n);
        n_lost = 0;
}

static void write_line(const char *line, size_t n_bytes)
{
        size_t n_taken = 0;

        pthread_mutex_lock(&lock);
        if (n_queued > 0)
                queue_write();
        if (n_queued < QUEUE_BYTES / 2)
                queue_note_lost();
        if (n_queued == 0 && n_lost == 0)
                n_taken = write_now(line, n_bytes);
        if (n_lost > 0 || n_bytes - n_taken > QUEUE_BYTES - n_queued) {
                n_lost++;
                n_lost_ever++;
        } else {
                queue_add(line + n_taken, n_bytes - n_taken);
        }
        pthread_mutex_unlock(&lock);
}

uint64_t log_count_lost(void)
{
        uint64_t ret;

        pthread_mutex_lock(&lock);
        ret = n_lost_ever;
        pthread_mutex_unlock(&lock);
        return ret;
}

bool log_flush(void)
{
        bool ret;

        pthread_mutex_lock(&lock);
        queue_write();
        if (n_queued < QUEUE_BYTES / 2) {
                queue_note_lost();
                queue_write();
        }
        ret = n_queued == 0;
        pthread_mutex_unlock(&lock);
        return ret;
}

bool log_is_queued(void)
{
        return n_queued > 0;
}

void log_close(unsigned timeout_ms)
{
        uint64_t until_ms = clock_ms() + timeout_ms;

        while (!log_flush() && clock_ms() < until_ms) {
                struct pollfd p = { .fd = STDERR_FILENO, .events = POLLOUT };

                poll(&p, 1, (int)(until_ms - clock_ms()));
        }
}

/* ---- lines --------------------------------------------------------------- */

static void clean(char *text, size_t n_bytes)
{
        for (size_t i = 0; i < n_bytes; i++)
                if ((unsigned char)text[i] < ' ' || (unsigned char)text[i] > '~')
                        text[i] = '?';
}

void log_clean(char *text)
{
        clean(text, strlen(text));
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
        clean(line + n_prefix, n);
        n += n_prefix;
        if (n_left_out > 0)
                n += (size_t)snprintf(line + n, LEFT_OUT_BYTES, " (%" PRIu64 " similar messages suppressed)",
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
        return limit->last_ms == 0 || now_ms - limit->last_ms >= limit->interval_ms;
}

bool log_limit_is_open(const struct log_limit *limit)
{
        return limit_is_open(limit, clock_ms());
}

/* A line is written. While such events continue, the time to the next line doubles. */
static void limit_begin(struct log_limit *limit, uint64_t now_ms)
{
        uint64_t interval_ms = limit->interval_ms * 2;

        if (limit->last_ms == 0 || now_ms - limit->last_ms >= interval_ms)
                interval_ms = LIMIT_INTERVAL_MS;
        if (interval_ms > LIMIT_LONGEST_MS)
                interval_ms = LIMIT_LONGEST_MS;
        *limit = (struct log_limit){ .last_ms = now_ms, .interval_ms = interval_ms };
}

bool log_limit_take(struct log_limit *limit, uint64_t *ret_n_left_out)
{
        uint64_t now_ms = clock_ms();

        if (!limit_is_open(limit, now_ms)) {
                limit->n_left_out++;
                return false;
        }
        *ret_n_left_out = limit->n_left_out;
        limit_begin(limit, now_ms);
        return true;
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
        limit_begin(limit, now_ms);
}

/* Without a record of users, which could be made to forget: so all users together have LOG_USERS lines a
 * second of a kind. */
struct log_limit *log_limit_of_user(struct log_limits *limits, uint32_t uid)
{
        return &limits->of_users[uid % LOG_USERS];
}
