/* Recorders; see recorder.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Lines gather in one of two buffers. Whoever fills it swaps them and writes the full one
 * with no lock held, while the others go on in the empty one; only where both are full
 * does anybody wait for the disk. Memory: the two buffers, and one record for each block
 * that lives.
 *
 * A process that is killed leaves whole lines: the kernel may cut a write short at a page's
 * boundary, and no line crosses one. The last line before a boundary has as many zeros
 * in front as it takes to end there.
 *
 * At exit() whoever is still recording is ended. In a forked child nothing is recorded:
 * its copies of the files are closed, so that the locks on them end with the parent's.
 *
 * Invariant: `n_bytes` == what was written + n_filling (+ the other buffer while it is
 * being written), and no line lies across a multiple of PAGE_BYTES. */
#include "client/recorder.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/blocks.h"
#include "client/error.h"

#define HEADER       "id,lower,upper,size\n"
#define BUFFER_BYTES (32u * 1024u)
#define PAGE_BYTES   4096u /* the smallest that Linux has */
#define LINE_BYTES   84u   /* at most: four numbers of 20 digits */

struct recorder {
        struct recorder *next; /* in `recorders` */
        pthread_mutex_t lock;
        pthread_cond_t written;
        int fd;
        int error;     /* the first; nothing is recorded after it */
        bool is_ended; /* nor after the end */
        bool is_writing;
        uint64_t now;       /* the last tick */
        struct blocks live; /* block_id: the tick at which it was given */
        uint64_t n_bytes;   /* of the file, with what is in the buffers */
        size_t n_filling;
        char *filling; /* one of: */
        char buffers[2][BUFFER_BYTES];
};

/* All that are open in this process. */
static pthread_mutex_t recorders_lock = PTHREAD_MUTEX_INITIALIZER;
static struct recorder *recorders;
static bool is_exiting; /* then none leaves the list any more */
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;
static unsigned last_number; /* atomic */

/* ---- writing ------------------------------------------------------------- */

/* -errno, and *ret_n_written is how far it came. */
static int write_all(int fd, const char *text, size_t n_bytes, size_t *ret_n_written)
{
        size_t n = 0;
        ssize_t w = 0;

        while (n < n_bytes && ((w = write(fd, text + n, n_bytes - n)) > 0 || (w < 0 && errno == EINTR)))
                n += w > 0 ? (size_t)w : 0;
        *ret_n_written = n;
        return n == n_bytes ? 0 : w < 0 ? -errno : -EIO;
}

/* What was written of the line in which it stopped is taken off. */
static void cut_line(const struct recorder *r, uint64_t at, const char *text, size_t n_written)
{
        const char *end = memrchr(text, '\n', n_written);

        if (ftruncate(r->fd, (off_t)(at + (end ? (uint64_t)(end + 1 - text) : 0))) < 0)
                return; /* then the reader names the line */
}

/* Writes what is gathered. The lock is held, but not meanwhile; nobody else is writing. */
static void write_out(struct recorder *r)
{
        char *text = r->filling;
        size_t n = r->n_filling, n_written;
        uint64_t at = r->n_bytes - n;
        int error;

        r->filling = text == r->buffers[0] ? r->buffers[1] : r->buffers[0];
        r->n_filling = 0;
        r->is_writing = true;
        pthread_mutex_unlock(&r->lock);
        error = write_all(r->fd, text, n, &n_written);
        if (error < 0)
                cut_line(r, at, text, n_written);
        pthread_mutex_lock(&r->lock);
        r->is_writing = false;
        if (r->error == 0)
                r->error = error;
        pthread_cond_broadcast(&r->written);
}

/* One line, padded to a page's end where the next might not fit before it. Lock held. */
static void put_line(struct recorder *r, const struct recorder_life *life)
{
        char line[LINE_BYTES + 1];
        size_t n, rest;

        while (r->error == 0 && r->n_filling + 2u * LINE_BYTES > BUFFER_BYTES) {
                if (r->is_writing)
                        pthread_cond_wait(&r->written, &r->lock);
                else
                        write_out(r);
        }
        if (r->error < 0)
                return;
        n = (size_t)snprintf(line, sizeof(line), "%" PRIu64 ",%" PRIu64 ",%" PRIu64 ",%" PRIu64 "\n",
                             life->lower, life->lower, life->upper, life->n_bytes);
        rest = (size_t)(PAGE_BYTES - (r->n_bytes + n) % PAGE_BYTES);
        if (rest >= LINE_BYTES)
                rest = 0;
        memset(r->filling + r->n_filling, '0', rest);
        memcpy(r->filling + r->n_filling + rest, line, n);
        r->n_filling += rest + n;
        r->n_bytes += rest + n;
}

/* ---- lives --------------------------------------------------------------- */

static bool is_recording(const struct recorder *r)
{
        return r->error == 0 && !r->is_ended;
}

/* Its life ends now; n_bytes is 0 where it has none. Lock held. */
static struct recorder_life take(struct recorder *r, const void *ptr)
{
        struct recorder_life life = { 0 };
        struct block block;

        if (is_recording(r) && r->live.n_used > 0 && blocks_take(&r->live, ptr, &block) == 0)
                life = (struct recorder_life){ ptr, block.block_id, ++r->now, block.n_requested };
        return life;
}

/* Lock held. A trace with a block left out would have wrong peaks: then it ends. */
static void add(struct recorder *r, const void *ptr, uint64_t lower, uint64_t n_bytes)
{
        struct block block = { .ptr = ptr, .block_id = lower, .n_requested = n_bytes };

        if (is_recording(r) && blocks_add(&r->live, &block) < 0)
                r->error = -ENOMEM;
}

void recorder_given(struct recorder *r, const void *ptr, uint64_t n_bytes)
{
        struct recorder_life before;

        if (!r)
                return;
        pthread_mutex_lock(&r->lock);
        /* A free that two threads asked for at once may have come by unseen. */
        before = take(r, ptr);
        if (before.n_bytes > 0)
                put_line(r, &before);
        add(r, ptr, ++r->now, n_bytes);
        pthread_mutex_unlock(&r->lock);
}

void recorder_freeing(struct recorder *r, const void *ptr, struct recorder_life *ret)
{
        *ret = (struct recorder_life){ 0 };
        if (!r)
                return;
        pthread_mutex_lock(&r->lock);
        *ret = take(r, ptr);
        pthread_mutex_unlock(&r->lock);
}

void recorder_freed(struct recorder *r, const struct recorder_life *life)
{
        if (!r || life->n_bytes == 0)
                return;
        pthread_mutex_lock(&r->lock);
        if (is_recording(r))
                put_line(r, life);
        pthread_mutex_unlock(&r->lock);
}

void recorder_kept(struct recorder *r, const struct recorder_life *life)
{
        if (!r || life->n_bytes == 0)
                return;
        pthread_mutex_lock(&r->lock);
        add(r, life->ptr, life->lower, life->n_bytes);
        pthread_mutex_unlock(&r->lock);
}

/* What lives ends together, and everything is written. */
static void end(struct recorder *r)
{
        const struct block *b;
        size_t cursor = 0;

        pthread_mutex_lock(&r->lock);
        if (is_recording(r)) {
                r->is_ended = true;
                r->now++;
                while ((b = blocks_next(&r->live, &cursor)))
                        put_line(r, &(struct recorder_life){ b->ptr, b->block_id, r->now, b->n_requested });
                while (r->is_writing)
                        pthread_cond_wait(&r->written, &r->lock);
                if (r->error == 0)
                        write_out(r);
        }
        pthread_mutex_unlock(&r->lock);
}

/* ---- all of a process ---------------------------------------------------- */

static void before_fork(void)
{
        pthread_mutex_lock(&recorders_lock);
}

static void after_fork(void)
{
        pthread_mutex_unlock(&recorders_lock);
}

static void in_child(void)
{
        for (struct recorder *r = recorders; r; r = r->next)
                close(r->fd);
        recorders = NULL;
        pthread_mutex_unlock(&recorders_lock);
}

static void watch_forks(void)
{
        fork_error = -pthread_atfork(before_fork, after_fork, in_child);
}

static void enlist(struct recorder *r)
{
        pthread_mutex_lock(&recorders_lock);
        r->next = recorders;
        recorders = r;
        pthread_mutex_unlock(&recorders_lock);
}

/* False: the process exits, and looks through the list. */
static bool delist(struct recorder *r)
{
        struct recorder **at = &recorders;
        bool found;

        pthread_mutex_lock(&recorders_lock);
        while (*at && *at != r)
                at = &(*at)->next;
        found = !is_exiting && *at;
        if (found)
                *at = r->next;
        pthread_mutex_unlock(&recorders_lock);
        return found;
}

/* Other threads may still be calling, so nothing is freed. */
static void __attribute__((destructor)) end_all(void)
{
        struct recorder *r;

        pthread_mutex_lock(&recorders_lock);
        is_exiting = true;
        r = recorders;
        pthread_mutex_unlock(&recorders_lock);
        for (; r; r = r->next)
                end(r);
}

/* ---- opening ------------------------------------------------------------- */

/* The file's name with its % words replaced. */
static int expand(const char *name, char path[static PATH_MAX])
{
        unsigned number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        size_t n = 0;

        for (; *name && n < PATH_MAX; name++) {
                int w = 1;

                if (*name != '%')
                        path[n] = *name;
                else if (*++name == 'p')
                        w = snprintf(path + n, PATH_MAX - n, "%d", (int)getpid());
                else if (*name == 'n')
                        w = snprintf(path + n, PATH_MAX - n, "%u", number);
                else if (*name == '%')
                        path[n] = '%';
                else
                        return error_set(-EINVAL, "the trace's name has a %% that is none of %%p (the pid), "
                                                  "%%n (a number) and %%%%");
                n += (size_t)w;
        }
        if (n >= PATH_MAX)
                return error_set(-ENAMETOOLONG, "the trace's name is too long, at most %d bytes",
                                 PATH_MAX - 1);
        path[n] = '\0';
        return 0;
}

/* An empty file that nobody else records into. */
static int open_file(const char *path, int *ret_fd)
{
        /* O_NONBLOCK: what is no file does not hold us up. */
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666), r = 0;
        struct stat st;

        if (fd < 0)
                return error_set(-errno, "the trace %s cannot be written: %s", path, strerror(errno));
        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
                r = error_set(-EINVAL, "the trace %s is no file", path);
        else if (flock(fd, LOCK_EX | LOCK_NB) < 0)
                r = errno == EWOULDBLOCK
                            ? error_set(-EBUSY,
                                        "another client is recording into the trace %s: put %%p into its "
                                        "name, which becomes the pid, and %%n for several clients of one "
                                        "process",
                                        path)
                            : error_set(-errno, "the trace %s cannot be locked: %s", path, strerror(errno));
        else if (ftruncate(fd, 0) < 0)
                r = error_set(-errno, "the trace %s cannot be emptied: %s", path, strerror(errno));
        if (r < 0) {
                close(fd);
                return r;
        }
        *ret_fd = fd;
        return 0;
}

static void discard(struct recorder *r)
{
        /* Here and now, also where a child has only just been forked. */
        flock(r->fd, LOCK_UN);
        close(r->fd);
        blocks_clear(&r->live);
        pthread_cond_destroy(&r->written);
        pthread_mutex_destroy(&r->lock);
        free(r);
}

int recorder_open(const char *name, struct recorder **ret)
{
        struct recorder *r;
        char path[PATH_MAX];
        size_t n_written;
        int error, fd = -1;

        pthread_once(&fork_once, watch_forks);
        if (fork_error < 0)
                return error_set(fork_error, "this process is out of memory");
        error = expand(name, path);
        if (error == 0)
                error = open_file(path, &fd);
        if (error < 0)
                return error;
        r = calloc(1, sizeof(*r));
        if (!r) {
                close(fd);
                return error_set(-ENOMEM, "this process is out of memory");
        }
        pthread_mutex_init(&r->lock, NULL);
        pthread_cond_init(&r->written, NULL);
        r->fd = fd;
        r->filling = r->buffers[0];
        r->n_bytes = strlen(HEADER);
        error = write_all(fd, HEADER, strlen(HEADER), &n_written);
        if (error < 0) {
                discard(r);
                return error_set(error, "the trace %s cannot be written: %s", path, strerror(-error));
        }
        enlist(r);
        *ret = r;
        return 0;
}

struct recorder *recorder_free(struct recorder *r)
{
        if (!r || !delist(r))
                return NULL;
        end(r);
        if (r->error < 0)
                error_set(r->error, "the trace ends early: %s", strerror(-r->error));
        discard(r);
        return NULL;
}
