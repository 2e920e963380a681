/* Event files; see event_file.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Events are collected in memory and written together, so that a reader finds whole records.
 *
 * Invariant: the first n_written bytes of the file are whole records. */
#include "ctl/event_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/tfrecord.h"

#define MAX_NAMES 1000u /* files of this process that begin in the same second */
#define HOST_MAX  256

struct event_file {
        int fd;
        uint64_t n_written;
        uint8_t *buffer;
        size_t n_buffered, n_room;
        char path[PATH_MAX];
};

/* ---- the file --------------------------------------------------------------------- */

static int fail(int r, char error[static EVENT_FILE_ERROR_MAX], const char *path, const char *what,
                const char *more)
{
        snprintf(error, EVENT_FILE_ERROR_MAX, "%s %s: %s.%s", path, what, strerror(-r), more);
        return r;
}

/* The folder and those above it. */
static int make_folder(const char *folder, char error[static EVENT_FILE_ERROR_MAX])
{
        char path[PATH_MAX];
        struct stat st;
        int r = 0;

        if (strlen(folder) >= sizeof(path))
                return fail(-ENAMETOOLONG, error, folder, "cannot be made", "");
        strcpy(path, folder);
        for (char *at = path + 1; r == 0 && at[-1]; at++) {
                char was = *at;

                if (was != '/' && was != '\0')
                        continue;
                *at = '\0';
                if (mkdir(path, 0777) < 0 && errno != EEXIST)
                        r = -errno;
                *at = was;
        }
        /* Above it there may be folders that only others may change, or that are on a read-only file system. */
        if (stat(folder, &st) < 0)
                return fail(r < 0 ? r : -errno, error, folder, "cannot be made", "");
        return S_ISDIR(st.st_mode) ? 0 : fail(-ENOTDIR, error, folder, "cannot be used", "");
}

/* events.out.tfevents.SECONDS.HOST.PID.N, of which TensorBoard needs "tfevents". */
static int open_new(struct event_file *f, const char *folder, double wall_time)
{
        char host[HOST_MAX];

        if (gethostname(host, sizeof(host)) < 0 || !*host)
                strcpy(host, "localhost");
        host[sizeof(host) - 1] = '\0';
        for (unsigned n = 0; n < MAX_NAMES; n++) {
                int length =
                        snprintf(f->path, sizeof(f->path), "%s/events.out.tfevents.%010" PRIu64 ".%s.%d.%u",
                                 folder, (uint64_t)wall_time, host, (int)getpid(), n);

                if (length < 0 || (size_t)length >= sizeof(f->path))
                        return -ENAMETOOLONG;
                f->fd = open(f->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOCTTY, 0666);
                if (f->fd >= 0)
                        return 0;
                if (errno != EEXIST)
                        return -errno;
        }
        return -EEXIST;
}

static void discard(struct event_file *f)
{
        free(f->buffer);
        free(f);
}

int event_file_create(const char *folder, double wall_time, struct event_file **ret,
                      char error[static EVENT_FILE_ERROR_MAX])
{
        Tensorboard__Event first = TENSORBOARD__EVENT__INIT;
        struct event_file *f;
        int r = make_folder(folder, error);

        if (r < 0)
                return r;
        f = calloc(1, sizeof(*f));
        if (!f)
                return fail(-ENOMEM, error, folder, "cannot be used", "");
        r = open_new(f, folder, wall_time);
        if (r < 0) {
                fail(r, error, folder, "can have no new file", "");
                discard(f);
                return r;
        }
        first.wall_time = wall_time;
        first.what_case = TENSORBOARD__EVENT__WHAT_FILE_VERSION;
        first.file_version = (char[]){ "brain.Event:2" };
        r = event_file_add(f, &first);
        if (r < 0)
                fail(r, error, f->path, "cannot be written", "");
        else
                r = event_file_flush(f, error);
        if (r < 0) {
                (void)unlink(f->path);
                close(f->fd);
                discard(f);
                return r;
        }
        *ret = f;
        return 0;
}

const char *event_file_path(const struct event_file *f)
{
        return f->path;
}

/* ---- what is there already --------------------------------------------------------- */

/* The step of the event at this place; -1: it is no event. */
static int64_t read_step(int fd, off_t at, size_t n_bytes)
{
        uint8_t *data = malloc(n_bytes + 1);
        Tensorboard__Event *event = NULL;
        int64_t step = -1;

        if (data && pread(fd, data, n_bytes, at) == (ssize_t)n_bytes)
                event = tensorboard__event__unpack(NULL, n_bytes, data);
        if (event && event->what_case != TENSORBOARD__EVENT__WHAT_FILE_VERSION)
                step = event->step;
        tensorboard__event__free_unpacked(event, NULL);
        free(data);
        return step;
}

/* Of the last whole record: steps rise within a file. */
static int64_t last_step_of(int fd)
{
        uint8_t head[TFRECORD_HEAD_BYTES];
        off_t at = 0, last = -1;
        size_t n_last = 0, n_bytes;
        struct stat st;

        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
                return -1;
        while (pread(fd, head, sizeof(head), at) == (ssize_t)sizeof(head) &&
               tfrecord_read_head(head, &n_bytes) &&
               st.st_size - at >= (off_t)(TFRECORD_HEAD_BYTES + n_bytes + TFRECORD_TAIL_BYTES)) {
                last = at + TFRECORD_HEAD_BYTES;
                n_last = n_bytes;
                at = last + (off_t)(n_bytes + TFRECORD_TAIL_BYTES);
        }
        return last < 0 ? -1 : read_step(fd, last, n_last);
}

int64_t event_file_last_step(const char *folder)
{
        DIR *d = opendir(folder);
        const struct dirent *e;
        int64_t step, last = -1;
        int fd;

        while (d && (e = readdir(d))) {
                if (!strstr(e->d_name, "tfevents"))
                        continue;
                fd = openat(dirfd(d), e->d_name, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
                if (fd < 0)
                        continue;
                step = last_step_of(fd);
                last = step > last ? step : last;
                close(fd);
        }
        if (d)
                closedir(d);
        return last;
}

/* ---- events ----------------------------------------------------------------------- */

static int make_room(struct event_file *f, size_t n_bytes)
{
        size_t n = f->n_buffered + n_bytes;
        uint8_t *buffer;

        if (n <= f->n_room)
                return 0;
        buffer = realloc(f->buffer, 2 * n);
        if (!buffer)
                return -ENOMEM;
        f->buffer = buffer;
        f->n_room = 2 * n;
        return 0;
}

int event_file_add(struct event_file *f, const Tensorboard__Event *event)
{
        size_t n_bytes = tensorboard__event__get_packed_size(event),
               n_frame = TFRECORD_HEAD_BYTES + n_bytes + TFRECORD_TAIL_BYTES;
        uint8_t *frame;
        int r;

        if (n_bytes > TFRECORD_MAX_BYTES || f->n_buffered > TFRECORD_MAX_BYTES)
                return -EMSGSIZE;
        r = make_room(f, n_frame);
        if (r < 0)
                return r;
        frame = f->buffer + f->n_buffered;
        tensorboard__event__pack(event, frame + TFRECORD_HEAD_BYTES);
        tfrecord_seal(frame, n_bytes);
        f->n_buffered += n_frame;
        return 0;
}

/* -errno, and the file may have more than n_written bytes. */
static int write_all(struct event_file *f)
{
        size_t n = 0;

        while (n < f->n_buffered) {
                ssize_t w = pwrite(f->fd, f->buffer + n, f->n_buffered - n, (off_t)(f->n_written + n));

                if (w < 0 && errno == EINTR)
                        continue;
                if (w <= 0)
                        return w < 0 ? -errno : -EIO;
                n += (size_t)w;
        }
        return 0;
}

int event_file_flush(struct event_file *f, char error[static EVENT_FILE_ERROR_MAX])
{
        int r = write_all(f);

        if (r == 0)
                f->n_written += f->n_buffered;
        f->n_buffered = 0;
        if (r == 0)
                return 0;
        if (ftruncate(f->fd, (off_t)f->n_written) == 0)
                return fail(r, error, f->path, "cannot be written", " What was written before is complete.");
        return fail(r, error, f->path, "cannot be written", " Its last record is incomplete.");
}

int event_file_close(struct event_file *f, char error[static EVENT_FILE_ERROR_MAX])
{
        int r = fsync(f->fd) < 0 ? -errno : 0;

        if (close(f->fd) < 0 && r == 0)
                r = -errno;
        if (r < 0)
                fail(r, error, f->path, "may be incomplete", "");
        discard(f);
        return r;
}
