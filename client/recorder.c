/* Recorders; see recorder.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * bfc_malloc() appends a block's line, in which `upper` is NO_END. bfc_free() writes the time
 * over it, in place. Both are in the page cache before the call returns, so a SIGKILL loses no
 * event of a call that has returned. The file is a trace at any time.
 *
 * The file is written by system calls and is not mapped: a mapping of a file that another
 * process truncates raises SIGBUS. Lines of several threads that come at the same time are
 * written together: one thread writes a buffer while the others fill the second one and wait.
 *
 * A kill can cut a write short at a page boundary only, and no line crosses one. The last line
 * before a boundary has zeros in front. Memory: two buffers, and one record per live block.
 *
 * At exit() the recorders that are open are ended. A forked child records nothing. Its
 * recorders are dead, and its copies of the fds are closed, so that the locks on the files
 * end with the parent.
 *
 * Invariant: `n_bytes` == n_written + n_filling (+ the other buffer while it is being
 * written), until an error; and no line crosses a multiple of PAGE_BYTES. */
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
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/blocks.h"
#include "client/process.h"

#define HEADER       "id,lower,upper,size,partition,tag,flags\n"
#define BUFFER_BYTES (32u * 1024u)
#define PAGE_BYTES   4096u /* the smallest that Linux has */
#define LINE_BYTES                                                                                           \
        (105u + 2u * (RECORDER_LABEL_MAX + 1u)) /* at most: five numbers of 20 digits, two labels */
#define END_DIGITS 19u                          /* of `upper`, which is overwritten in place */
#define NO_END     ((uint64_t)INT64_MAX)

struct recorder {
        struct recorder *next; /* in `recorders` */
        pthread_mutex_t lock;
        pthread_cond_t written;
        int fd;
        pid_t pid;
        bool is_dead;  /* in a forked child, where the lock may be taken for ever */
        int error;     /* the first; nothing is recorded after it */
        bool is_ended; /* nor after the end */
        bool is_writing;
        uint64_t now;       /* the last tick */
        struct blocks live; /* block_id: the tick at which it was given; offset: of its end in the file */
        uint64_t max_bytes; /* of the file: a write beyond raises SIGXFSZ */
        uint64_t n_bytes;   /* of the file, with what is in the buffers */
        uint64_t n_written; /* of these, in the file */
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

/* -errno, and *ret_n_written is how far it came. No cancellation point: the caller may have the lock. */
static int write_all(int fd, uint64_t at, const char *text, size_t n_bytes, size_t *ret_n_written)
{
        size_t n = 0;
        ssize_t w = 0;
        int cancel_state;

        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        while (n < n_bytes &&
               ((w = pwrite(fd, text + n, n_bytes - n, (off_t)(at + n))) > 0 || (w < 0 && errno == EINTR)))
                n += w > 0 ? (size_t)w : 0;
        pthread_setcancelstate(cancel_state, NULL);
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

/* The lock is held. */
static void fail(struct recorder *r, int error)
{
        if (r->error == 0)
                r->error = error;
}

/* Writes the full buffer. The lock is held, but not meanwhile; no other thread is writing. */
static void write_out(struct recorder *r)
{
        char *text = r->filling;
        size_t n = r->n_filling, n_written = 0;
        uint64_t at = r->n_bytes - n;
        int error;

        r->filling = text == r->buffers[0] ? r->buffers[1] : r->buffers[0];
        r->n_filling = 0;
        r->is_writing = true;
        pthread_mutex_unlock(&r->lock);
        error = at + n > r->max_bytes ? -EFBIG : write_all(r->fd, at, text, n, &n_written);
        if (error < 0)
                cut_line(r, at, text, n_written);
        pthread_mutex_lock(&r->lock);
        r->is_writing = false;
        if (error < 0)
                fail(r, error);
        else
                r->n_written = at + n;
        pthread_cond_broadcast(&r->written);
}

/* Until the file is written up to this place. The lock is held, but not meanwhile. */
static void write_up_to(struct recorder *r, uint64_t end)
{
        while (r->error == 0 && r->n_written < end) {
                if (r->is_writing)
                        condition_wait(&r->written, &r->lock, -1);
                else
                        write_out(r);
        }
}

/* Exactly n digits, zeros in front. */
static void put_digits(char *text, unsigned n, uint64_t number)
{
        for (; n > 0; n--, number /= 10)
                text[n - 1] = (char)('0' + number % 10);
}

/* A field that a reader cannot mistake for two, or for a quoted one. Returns its length. */
static size_t put_label(char *text, const char *label)
{
        size_t n = 0;

        for (; label && label[n] && n < RECORDER_LABEL_MAX; n++)
                text[n] = label[n] < ' ' || label[n] > '~' || label[n] == ',' || label[n] == '"' ? '?'
                                                                                                 : label[n];
        return n;
}

/* Puts a line into the buffer, padded to a page's end where the next might not fit before it.
 * Returns where its end stands in the file. The lock is held; there is room. */
static uint64_t put_line(struct recorder *r, uint64_t lower, const struct recorder_block *b)
{
        char line[LINE_BYTES + 1];
        int n_front = snprintf(line, sizeof(line), "%" PRIu64 ",%" PRIu64 ",", lower, lower);
        size_t n = (size_t)n_front, rest;
        uint64_t end_at;

        put_digits(line + n, END_DIGITS, NO_END);
        n += END_DIGITS;
        n += (size_t)snprintf(line + n, sizeof(line) - n, ",%" PRIu64 ",", b->n_bytes);
        n += put_label(line + n, b->partition);
        line[n++] = ',';
        n += put_label(line + n, b->tag);
        n += (size_t)snprintf(line + n, sizeof(line) - n, ",%" PRIu64 "\n", b->flags);
        rest = (size_t)(PAGE_BYTES - (r->n_bytes + n) % PAGE_BYTES);
        if (rest >= LINE_BYTES)
                rest = 0;
        memset(r->filling + r->n_filling, '0', rest);
        memcpy(r->filling + r->n_filling + rest, line, n);
        end_at = r->n_bytes + rest + (size_t)n_front;
        r->n_filling += rest + n;
        r->n_bytes += rest + n;
        return end_at;
}

/* The end of a lifetime, in place of NO_END. */
static int write_end(const struct recorder *r, const struct recorder_lifetime *lifetime)
{
        char digits[END_DIGITS];
        size_t n_written;

        put_digits(digits, END_DIGITS, lifetime->upper);
        return write_all(r->fd, lifetime->end_at, digits, END_DIGITS, &n_written);
}

/* ---- lifetimes --------------------------------------------------------------- */

static bool is_recording(const struct recorder *r)
{
        return r->error == 0 && !r->is_ended;
}

/* False in a forked child. */
static bool lock(struct recorder *r)
{
        if (!r || r->is_dead)
                return false;
        pthread_mutex_lock(&r->lock);
        return true;
}

/* Its lifetime ends now; n_bytes is 0 where it has none. The lock is held. */
static struct recorder_lifetime take(struct recorder *r, const void *ptr)
{
        struct recorder_lifetime lifetime = { 0 };
        struct block block;

        if (is_recording(r) && r->live.n_used > 0 && blocks_take(&r->live, ptr, &block) == 0)
                lifetime = (struct recorder_lifetime){ ptr, block.block_id, ++r->now, block.n_requested,
                                                       block.offset };
        return lifetime;
}

/* The lock is held. A trace with a block left out would have wrong peaks: then it ends. */
static void add(struct recorder *r, const struct recorder_lifetime *lifetime)
{
        struct block block = { .ptr = lifetime->ptr,
                               .block_id = lifetime->lower,
                               .n_requested = lifetime->n_bytes,
                               .offset = lifetime->end_at };

        if (is_recording(r) && blocks_add(&r->live, &block) < 0)
                fail(r, -ENOMEM);
}

/* A new lifetime, on file when it returns. The lock is held, but not meanwhile. */
static void begin(struct recorder *r, const void *ptr, const struct recorder_block *block)
{
        struct recorder_lifetime lifetime = { .ptr = ptr, .n_bytes = block->n_bytes };
        uint64_t end;

        while (r->error == 0 && r->n_filling + 2u * LINE_BYTES > BUFFER_BYTES) {
                if (r->is_writing)
                        condition_wait(&r->written, &r->lock, -1);
                else
                        write_out(r);
        }
        if (!is_recording(r))
                return;
        lifetime.lower = ++r->now;
        lifetime.end_at = put_line(r, lifetime.lower, block);
        end = r->n_bytes;
        add(r, &lifetime);
        write_up_to(r, end);
}

void recorder_given(struct recorder *r, const void *ptr, const struct recorder_block *block)
{
        struct recorder_lifetime before;
        int error;

        if (!lock(r))
                return;
        /* Two frees of one block at once may have gone unrecorded. */
        before = take(r, ptr);
        error = before.n_bytes > 0 ? write_end(r, &before) : 0;
        if (error < 0)
                fail(r, error);
        begin(r, ptr, block);
        pthread_mutex_unlock(&r->lock);
}

void recorder_freeing(struct recorder *r, const void *ptr, struct recorder_lifetime *ret)
{
        *ret = (struct recorder_lifetime){ 0 };
        if (!lock(r))
                return;
        *ret = take(r, ptr);
        pthread_mutex_unlock(&r->lock);
}

void recorder_freed(struct recorder *r, const struct recorder_lifetime *lifetime)
{
        int error;

        if (!r || r->is_dead || lifetime->n_bytes == 0)
                return;
        error = write_end(r, lifetime); /* its line was written before its block was given */
        if (error == 0 || !lock(r))
                return;
        fail(r, error);
        pthread_mutex_unlock(&r->lock);
}

void recorder_kept(struct recorder *r, const struct recorder_lifetime *lifetime)
{
        if (lifetime->n_bytes == 0 || !lock(r))
                return;
        add(r, lifetime);
        pthread_mutex_unlock(&r->lock);
}

/* Lifetimes that are left end together. Does nothing in a child that was made without fork(). */
static void end(struct recorder *r)
{
        const struct block *b;
        size_t cursor = 0;
        int error = 0;

        if (r->pid != getpid() || !lock(r))
                return;
        if (is_recording(r)) {
                r->is_ended = true; /* no line is added while the last ones are written */
                write_up_to(r, r->n_bytes);
                r->now++;
                while (error == 0 && r->error == 0 && (b = blocks_next(&r->live, &cursor)))
                        error = write_end(r, &(struct recorder_lifetime){ b->ptr, b->block_id, r->now,
                                                                          b->n_requested, b->offset });
        }
        if (error < 0)
                fail(r, error);
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
        for (struct recorder *r = recorders; r; r = r->next) {
                close(r->fd);
                r->is_dead = true;
        }
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

/* False: the process exits and looks through the list, or it is a forked child. */
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
                        return error_set(-EINVAL, "the trace's name has an invalid %%: use %%p (the "
                                                  "pid), %%n (a number) or %%%%");
                n += (size_t)w;
        }
        if (n >= PATH_MAX)
                return error_set(-ENAMETOOLONG, "the trace's name is too long: at most %d bytes",
                                 PATH_MAX - 1);
        path[n] = '\0';
        return 0;
}

/* Of a file that exists: in a folder that others may write it may be theirs, or have the name of another one. */
static int check_file(const char *path, int fd)
{
        struct stat st;

        if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode))
                return error_set(-EINVAL, "the trace %s is not a regular file", path);
        if (st.st_uid != geteuid() || st.st_nlink != 1)
                return error_set(
                        -EPERM,
                        st.st_nlink != 1
                                ? "the trace %s has other names, too: remove it, or use another name"
                                : "the trace %s is another user's file: remove it, or use another name",
                        path);
        return 0;
}

/* An empty file, locked against other recorders. */
static int open_file(const char *path, int *ret_fd)
{
        /* O_NONBLOCK: a FIFO would block. */
        int flags = O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW, r = 0;
        int fd = open(path, flags | O_CREAT | O_EXCL, 0666);
        bool is_new = fd >= 0;

        if (fd < 0 && errno == EEXIST)
                fd = open(path, flags);
        if (fd < 0)
                return error_set(-errno, "the trace %s cannot be written: %s", path,
                                 errno == ELOOP ? "it is a symbolic link" : strerror(errno));
        if (!is_new)
                r = check_file(path, fd);
        if (r == 0 && flock(fd, LOCK_EX | LOCK_NB) < 0)
                r = errno == EWOULDBLOCK
                            ? error_set(-EBUSY,
                                        "another client is recording to the trace %s: put %%p (the pid) "
                                        "into the name, and %%n (a number) for several clients of one "
                                        "process",
                                        path)
                            : error_set(-errno, "the trace %s cannot be locked: %s", path, strerror(errno));
        if (r == 0 && ftruncate(fd, 0) < 0)
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
        struct rlimit limit;
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
                return error_no_memory();
        }
        pthread_mutex_init(&r->lock, NULL);
        pthread_cond_init(&r->written, NULL);
        r->fd = fd;
        r->pid = getpid();
        r->max_bytes = getrlimit(RLIMIT_FSIZE, &limit) < 0 ? RLIM_INFINITY : limit.rlim_cur;
        r->filling = r->buffers[0];
        r->n_bytes = r->n_written = strlen(HEADER);
        error = r->n_bytes > r->max_bytes ? -EFBIG : write_all(fd, 0, HEADER, strlen(HEADER), &n_written);
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
                error_set(r->error, "the trace is incomplete: %s", strerror(-r->error));
        discard(r);
        return NULL;
}
