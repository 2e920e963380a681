/* The destination of records; see records.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/record/records.h"

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
