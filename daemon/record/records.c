/* The destination of records; see records.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/record/records.h"

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

#define QUEUE_BYTES    ((size_t)256 << 10)
#define FLUSH_MS       10u                /* between attempts at the end of the process */
#define FILE_MAX_BYTES (INT64_C(1) << 30) /* a file that is not rotated does not fill the disk */
#define RETRY_MS       1000u              /* between attempts to open a file that cannot be opened */

static char encoded[RECORD_ENCODED_BYTES];

/* ---- the journal --------------------------------------------------------- */

static struct {
        int fd; /* -1: none */
        struct sockaddr_un address;
        char *queue; /* of datagrams, each after its length as a size_t */
        size_t n_queued;
        uint64_t n_dropped;
} journal = { .fd = -1 };

static int journal_open(const char *path)
{
        if (strlen(path) >= sizeof(journal.address.sun_path))
                return -ENAMETOOLONG;
        journal.queue = malloc(QUEUE_BYTES);
        if (!journal.queue)
                return -ENOMEM;
        journal.address = (struct sockaddr_un){ .sun_family = AF_UNIX };
        strcpy(journal.address.sun_path, path);
        journal.fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (journal.fd >= 0)
                return 0;
        free(journal.queue);
        journal.queue = NULL;
        return -errno;
}

/* 0; -EAGAIN: it takes no record now; or why it never takes this one. Without a connection, because the journal may be
 * restarted with another socket. */
static int journal_send(const char *datagram, size_t n_bytes)
{
        ssize_t n;

        do {
                n = sendto(journal.fd, datagram, n_bytes, MSG_DONTWAIT | MSG_NOSIGNAL,
                           (const struct sockaddr *)&journal.address, sizeof(journal.address));
        } while (n < 0 && errno == EINTR);
        if (n >= 0)
                return 0;
        return errno == EWOULDBLOCK || errno == ENOBUFS ? -EAGAIN : -errno;
}

static void journal_flush(void)
{
        size_t at = 0, n_bytes;

        while (at < journal.n_queued) {
                int r;

                memcpy(&n_bytes, journal.queue + at, sizeof(n_bytes));
                r = journal_send(journal.queue + at + sizeof(n_bytes), n_bytes);
                if (r == -EAGAIN)
                        break;
                journal.n_dropped += r < 0;
                at += sizeof(n_bytes) + n_bytes;
        }
        journal.n_queued -= at;
        memmove(journal.queue, journal.queue + at, journal.n_queued);
}

/* False: dropped. */
static bool journal_write(const char *datagram, size_t n_bytes)
{
        int r;

        if (journal.n_queued > 0)
                journal_flush();
        r = journal.n_queued > 0 ? -EAGAIN : journal_send(datagram, n_bytes);
        if (r == 0)
                return true;
        if (r != -EAGAIN || sizeof(n_bytes) + n_bytes > QUEUE_BYTES - journal.n_queued) {
                journal.n_dropped++;
                return false;
        }
        memcpy(journal.queue + journal.n_queued, &n_bytes, sizeof(n_bytes));
        memcpy(journal.queue + journal.n_queued + sizeof(n_bytes), datagram, n_bytes);
        journal.n_queued += sizeof(n_bytes) + n_bytes;
        return true;
}

static void journal_close(unsigned timeout_ms)
{
        const struct timespec pause = { .tv_nsec = FLUSH_MS * 1000000L };

        for (unsigned ms = 0; journal.n_queued > 0 && ms < timeout_ms; ms += FLUSH_MS) {
                journal_flush();
                if (journal.n_queued > 0)
                        nanosleep(&pause, NULL);
        }
        if (journal.fd >= 0)
                close(journal.fd);
        free(journal.queue);
        journal.queue = NULL;
        journal.n_queued = 0;
        journal.fd = -1;
}

/* ---- the file ------------------------------------------------------------ */

/* Its thread, which frees it. So it can be left behind where a disk does not answer. */
struct file {
        char *path;
        pthread_mutex_t lock; /* for the next ones */
        pthread_cond_t changed;
        char *queue; /* whole lines */
        size_t n_queued;
        uint64_t n_queued_lines, n_dropped;
        bool is_ending, has_ended, is_left;
        /* The thread's. */
        int fd;
        char *lines; /* takes turns with the queue */
        uint64_t failed_ms;
        bool has_complained;
        bool is_torn; /* the last line is half a line */
};

static struct file *file;
static uint64_t n_dropped_before; /* by files that were closed */

static struct file *file_free(struct file *f)
{
        if (f->fd >= 0)
                close(f->fd);
        pthread_cond_destroy(&f->changed);
        pthread_mutex_destroy(&f->lock);
        free(f->lines);
        free(f->queue);
        free(f->path);
        free(f);
        return NULL;
}

static bool file_is_moved(const struct file *f)
{
        struct stat open_now, at_path;

        return fstat(f->fd, &open_now) < 0 || stat(f->path, &at_path) < 0 ||
               open_now.st_dev != at_path.st_dev || open_now.st_ino != at_path.st_ino;
}

/* What is no regular file could make the thread wait for ever. */
static int file_open(const struct file *f)
{
        int fd = open(f->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | O_NOFOLLOW,
                      0640);
        struct stat st;
        int r;

        if (fd < 0)
                return -errno;
        r = fstat(fd, &st) < 0 ? -errno : S_ISREG(st.st_mode) ? 0 : -EINVAL;
        if (r == 0 && st.st_size == 0)
                (void)fchmod(fd, 0640); /* whatever the umask is: the folder's group may read */
        if (r == 0)
                return fd;
        close(fd);
        return r;
}

static void file_complain(struct file *f, const char *what, int error)
{
        if (!f->has_complained)
                log_warning("records: %s cannot be %s: %s; records are dropped until it can be", f->path,
                            what, error == -EINVAL ? "it is not a regular file" : strerror(-error));
        f->has_complained = true;
        f->failed_ms = clock_ms();
}

static bool file_ready(struct file *f)
{
        if (f->fd >= 0 && file_is_moved(f)) {
                close(f->fd);
                f->fd = -1;
        }
        if (f->fd < 0 && f->failed_ms != 0 && clock_ms() - f->failed_ms < RETRY_MS)
                return false;
        if (f->fd < 0)
                f->fd = file_open(f);
        if (f->fd < 0)
                file_complain(f, "opened", f->fd);
        return f->fd >= 0;
}

/* 0, or a negative errno; *ret_done: how many bytes were written. */
static int write_all(int fd, const char *bytes, size_t n_bytes, size_t *ret_done)
{
        *ret_done = 0;
        while (*ret_done < n_bytes) {
                ssize_t n = write(fd, bytes + *ret_done, n_bytes - *ret_done);

                if (n > 0)
                        *ret_done += (size_t)n;
                else if (n < 0 && errno != EINTR)
                        return -errno;
        }
        return 0;
}

/* The end of the last whole line. */
static size_t whole_lines(const char *lines, size_t n_bytes)
{
        while (n_bytes > 0 && lines[n_bytes - 1] != '\n')
                n_bytes--;
        return n_bytes;
}

/* Returns how many lines were not written. Half a line is taken back, or ended before the next one. */
static uint64_t file_write(struct file *f, const char *lines, size_t n_bytes)
{
        size_t n_done = 0, n_whole;
        uint64_t n_left = 0;
        struct stat st;
        int r = fstat(f->fd, &st) < 0 ? -errno : st.st_size >= FILE_MAX_BYTES ? -EFBIG : 0;

        if (r == 0 && f->is_torn && (r = write_all(f->fd, "\n", 1, &n_done)) == 0) {
                f->is_torn = false;
                st.st_size++;
        }
        n_done = 0;
        if (r == 0)
                r = write_all(f->fd, lines, n_bytes, &n_done);
        if (r == 0) {
                f->has_complained = false;
                return 0;
        }
        file_complain(f, "written", r);
        n_whole = whole_lines(lines, n_done);
        if (n_whole < n_done && ftruncate(f->fd, st.st_size + (off_t)n_whole) < 0)
                f->is_torn = true;
        close(f->fd);
        f->fd = -1;
        for (size_t i = n_whole; i < n_bytes; i++)
                n_left += lines[i] == '\n';
        return n_left;
}

static void *file_main(void *userdata)
{
        struct file *f = userdata;
        bool is_left;

        pthread_mutex_lock(&f->lock);
        while (!f->is_ending || f->n_queued > 0) {
                char *lines = f->queue;
                size_t n_bytes = f->n_queued;
                uint64_t n_lines = f->n_queued_lines, n_lost;

                if (n_bytes == 0) {
                        pthread_cond_wait(&f->changed, &f->lock);
                        continue;
                }
                f->queue = f->lines;
                f->lines = lines;
                f->n_queued = f->n_queued_lines = 0;
                pthread_mutex_unlock(&f->lock);
                n_lost = file_ready(f) ? file_write(f, lines, n_bytes) : n_lines;
                pthread_mutex_lock(&f->lock);
                f->n_dropped += n_lost;
        }
        f->has_ended = true;
        is_left = f->is_left;
        pthread_cond_broadcast(&f->changed);
        pthread_mutex_unlock(&f->lock);
        if (is_left)
                file_free(f);
        return NULL;
}

static int file_start(struct file *f)
{
        pthread_attr_t attributes;
        sigset_t all, before;
        pthread_t thread;
        int r;

        sigfillset(&all);
        if (pthread_attr_init(&attributes) != 0)
                return -ENOMEM;
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        r = -pthread_create(&thread, &attributes, file_main, f);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
        return r;
}

static int file_new(const char *path, struct file **ret)
{
        struct file *f = calloc(1, sizeof(*f));
        pthread_condattr_t attributes;
        int r;

        if (!f)
                return -ENOMEM;
        f->fd = -1;
        pthread_mutex_init(&f->lock, NULL);
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&f->changed, &attributes);
        pthread_condattr_destroy(&attributes);
        f->path = strdup(path);
        f->queue = malloc(QUEUE_BYTES);
        f->lines = malloc(QUEUE_BYTES);
        r = f->path && f->queue && f->lines ? file_start(f) : -ENOMEM;
        if (r < 0)
                f = file_free(f);
        *ret = f;
        return r;
}

static void file_add(struct file *f, const char *line, size_t n_bytes)
{
        pthread_mutex_lock(&f->lock);
        if (n_bytes > QUEUE_BYTES - f->n_queued) {
                f->n_dropped++;
        } else {
                memcpy(f->queue + f->n_queued, line, n_bytes);
                f->n_queued += n_bytes;
                f->n_queued_lines++;
                pthread_cond_broadcast(&f->changed);
        }
        pthread_mutex_unlock(&f->lock);
}

static struct file *file_close(struct file *f, unsigned timeout_ms)
{
        uint64_t until_ns = clock_ns() + (uint64_t)timeout_ms * 1000000;
        const struct timespec until = { .tv_sec = (time_t)(until_ns / 1000000000),
                                        .tv_nsec = (long)(until_ns % 1000000000) };
        bool has_ended;

        pthread_mutex_lock(&f->lock);
        f->is_ending = true;
        pthread_cond_broadcast(&f->changed);
        while (!f->has_ended && pthread_cond_timedwait(&f->changed, &f->lock, &until) == 0)
                ;
        n_dropped_before += f->n_dropped;
        has_ended = f->has_ended;
        f->is_left = !has_ended;
        pthread_mutex_unlock(&f->lock);
        return has_ended ? file_free(f) : NULL;
}

/* ---- both ---------------------------------------------------------------- */

int records_open(const char *journal_path, const char *file_path)
{
        if (file_path)
                return file_new(file_path, &file);
        if (!journal_path && log_is_journal())
                journal_path = RECORDS_JOURNAL;
        return journal_path ? journal_open(journal_path) : 0;
}

void records_close(unsigned timeout_ms)
{
        journal_close(timeout_ms);
        if (file)
                file = file_close(file, timeout_ms);
}

bool records_are_open(void)
{
        return journal.fd >= 0 || file;
}

void records_flush(void)
{
        if (journal.n_queued > 0)
                journal_flush();
}

bool records_are_queued(void)
{
        return journal.n_queued > 0;
}

uint64_t records_count_dropped(void)
{
        uint64_t n = journal.n_dropped + n_dropped_before;

        if (!file)
                return n;
        pthread_mutex_lock(&file->lock);
        n += file->n_dropped;
        pthread_mutex_unlock(&file->lock);
        return n;
}

void records_write(enum log_level level, const struct record *r, const char *format, ...)
{
        char message[RECORD_MESSAGE_BYTES];
        bool replaces = false;
        va_list args;

        va_start(args, format);
        vsnprintf(message, sizeof(message), format, args);
        va_end(args);
        log_clean(message);
        if (journal.fd >= 0)
                replaces = journal_write(encoded, record_encode_journal(r, (int)level, message, encoded)) &&
                           log_is_journal();
        else if (file)
                file_add(file, encoded, record_encode_json(r, clock_wall_us(), (int)level, message, encoded));
        if (!replaces)
                log_write(level, "%s", message);
}

/* ---- one record ---------------------------------------------------------- */

void record_init(struct record *r, enum record_kind kind)
{
        r->kind = kind;
        r->n_fields = r->n_text = 0;
}

static void add_field(struct record *r, const char *key, enum record_type type, const char *value,
                      size_t n_bytes)
{
        size_t n_room = sizeof(r->text) - r->n_text;

        assert(r->n_fields < RECORD_FIELDS);
        if (r->n_fields == RECORD_FIELDS)
                return;
        n_bytes = n_bytes < n_room ? n_bytes : n_room;
        memcpy(r->text + r->n_text, value, n_bytes);
        r->fields[r->n_fields++] = (struct record_field){ key, type, r->n_text, n_bytes };
        r->n_text += n_bytes;
}

void record_add_text(struct record *r, const char *key, const char *value, size_t n_max)
{
        size_t at = r->n_text;

        record_add_lines(r, key, value, n_max);
        for (; at < r->n_text; at++) /* journalctl -x prints fields as they are, and users choose some */
                if ((unsigned char)r->text[at] < ' ' || (unsigned char)r->text[at] > '~')
                        r->text[at] = '?';
}

void record_add_lines(struct record *r, const char *key, const char *value, size_t n_max)
{
        if (value)
                add_field(r, key, RECORD_TEXT, value, strnlen(value, n_max));
}

void record_add_number(struct record *r, const char *key, uint64_t value)
{
        char text[24];
        int n = snprintf(text, sizeof(text), "%" PRIu64, min_u64(value, INT64_MAX));

        if ((size_t)n <= sizeof(r->text) - r->n_text) /* half a number would be another one */
                add_field(r, key, RECORD_NUMBER, text, (size_t)n);
}

void record_add_size(struct record *r, const char *key, const char *name, uint64_t n_bytes)
{
        struct record_field *last = r->n_fields > 0 ? &r->fields[r->n_fields - 1] : NULL;
        bool continues = last && strcmp(last->key, key) == 0;
        char text[128];
        int n = snprintf(text, sizeof(text), "%s%s=%" PRIu64, continues ? " " : "", name, n_bytes);

        if (n < 0 || (size_t)n >= sizeof(text) || (size_t)n > sizeof(r->text) - r->n_text)
                return;
        if (!continues) {
                add_field(r, key, RECORD_SIZES, text, (size_t)n);
                return;
        }
        memcpy(r->text + r->n_text, text, (size_t)n);
        r->n_text += (size_t)n;
        last->n_bytes += (size_t)n;
}

/* ---- writing ------------------------------------------------------------- */

struct writer {
        char *to;
        size_t n;
};

static void put(struct writer *w, const void *bytes, size_t n_bytes)
{
        assert(n_bytes <= RECORD_ENCODED_BYTES - w->n);
        memcpy(w->to + w->n, bytes, n_bytes);
        w->n += n_bytes;
}

static void put_text(struct writer *w, const char *text)
{
        put(w, text, strlen(text));
}

/* ---- the journal --------------------------------------------------------- */

static void put_journal_value(struct writer *w, const char *value, size_t n_bytes)
{
        uint8_t length[8];

        if (memchr(value, '\n', n_bytes)) {
                for (unsigned i = 0; i < sizeof(length); i++)
                        length[i] = (uint8_t)((uint64_t)n_bytes >> 8 * i);
                put(w, "\n", 1);
                put(w, length, sizeof(length));
        } else {
                put(w, "=", 1);
        }
        put(w, value, n_bytes);
        put(w, "\n", 1);
}

static void put_journal_field(struct writer *w, const char *key, const char *value, size_t n_bytes)
{
        put_text(w, RECORDS_PREFIX);
        for (; *key; key++) {
                char c = (char)toupper((unsigned char)*key);

                put(w, &c, 1);
        }
        put_journal_value(w, value, n_bytes);
}

size_t record_encode_journal(const struct record *r, int priority, const char *message,
                             char ret[static RECORD_ENCODED_BYTES])
{
        struct writer w = { .to = ret };
        char number[16];

        put_text(&w, "MESSAGE");
        put_journal_value(&w, message, strnlen(message, RECORD_MESSAGE_BYTES));
        put_text(&w, "MESSAGE_ID=");
        put_text(&w, record_kinds[r->kind].message_id);
        snprintf(number, sizeof(number), "%d", priority);
        put_text(&w, "\nPRIORITY=");
        put_text(&w, number);
        put_text(&w, "\nSYSLOG_IDENTIFIER=bfcd\n");
        put_journal_field(&w, "record", record_kinds[r->kind].name, strlen(record_kinds[r->kind].name));
        for (size_t i = 0; i < r->n_fields; i++)
                put_journal_field(&w, r->fields[i].key, r->text + r->fields[i].at, r->fields[i].n_bytes);
        return w.n;
}

/* ---- JSON ---------------------------------------------------------------- */

static void put_json_string(struct writer *w, const char *text, size_t n_bytes)
{
        put(w, "\"", 1);
        for (size_t i = 0; i < n_bytes; i++) {
                unsigned char c = (unsigned char)text[i];
                char escape[8];

                if (c == '"' || c == '\\')
                        put(w, "\\", 1);
                if (c >= ' ' && c <= '~') {
                        put(w, &text[i], 1);
                        continue;
                }
                snprintf(escape, sizeof(escape), "\\u%04x", c < 0x80 ? (unsigned)c : 0xfffdu);
                put_text(w, escape);
        }
        put(w, "\"", 1);
}

/* "train=1024 eval=0" */
static void put_json_sizes(struct writer *w, const char *text, size_t n_bytes)
{
        const char *end = text + n_bytes;

        put(w, "{", 1);
        while (text < end) {
                const char *equals = memchr(text, '=', (size_t)(end - text)), *blank;

                blank = memchr(equals, ' ', (size_t)(end - equals));
                blank = blank ? blank : end;
                put_json_string(w, text, (size_t)(equals - text));
                put(w, ":", 1);
                put(w, equals + 1, (size_t)(blank - equals) - 1);
                text = blank < end ? blank + 1 : end;
                if (text < end)
                        put(w, ",", 1);
        }
        put(w, "}", 1);
}

static void put_json_key(struct writer *w, const char *key)
{
        put(w, ",", 1);
        put_json_string(w, key, strlen(key));
        put(w, ":", 1);
}

size_t record_encode_json(const struct record *r, uint64_t time_us, int priority, const char *message,
                          char ret[static RECORD_ENCODED_BYTES])
{
        struct writer w = { .to = ret };
        char head[96];

        snprintf(head, sizeof(head), "{\"time_us\":%" PRIu64 ",\"record\":\"%s\",\"priority\":%d", time_us,
                 record_kinds[r->kind].name, priority);
        put_text(&w, head);
        put_json_key(&w, "message");
        put_json_string(&w, message, strnlen(message, RECORD_MESSAGE_BYTES));
        for (size_t i = 0; i < r->n_fields; i++) {
                const struct record_field *f = &r->fields[i];

                put_json_key(&w, f->key);
                if (f->type == RECORD_NUMBER)
                        put(&w, r->text + f->at, f->n_bytes);
                else if (f->type == RECORD_SIZES)
                        put_json_sizes(&w, r->text + f->at, f->n_bytes);
                else
                        put_json_string(&w, r->text + f->at, f->n_bytes);
        }
        put_text(&w, "}\n");
        return w.n;
}
