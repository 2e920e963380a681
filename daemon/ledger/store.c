/* The store; see store.h.
 *
 * Invariants: the keeper has what is in the table, unless is_lost or a call is under way. link and is_lost
 * are changed by the thread of the store, once it runs, except that a call without an answer sets is_lost.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ledger/store.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/queue.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "keeper/wire.h"

#define ANSWER_S  5
#define WAIT_NS   UINT64_C(10000000000) /* of calls for another keeper, since the first one had no answer */
#define PAUSE_MS  1000u                 /* from one start of a keeper to the next one */
#define N_BUCKETS 1024u

/* fd: the caller's, who may have closed it already before he removes the extent: then the inode is another
 * one. */
struct kept {
        uint64_t key;
        int fd;
        uint64_t inode; /* 0: unknown */
        LIST_ENTRY(kept) link;
};
LIST_HEAD(kept_list, kept);

struct store {
        struct keepers *keepers; /* borrowed */
        bool is_new;
        bool is_tended;
        pthread_t thread;
        int wake, end;              /* eventfds, for the thread: a call has lost the keeper; is_ending */
        pthread_mutex_t link_mutex; /* never held during a call */
        struct keeper_link link;    /* changed with link_mutex */
        bool is_ending;             /* changed with link_mutex; atomic */
        pthread_mutex_t mutex;      /* guards a call, and what follows */
        pthread_cond_t healed;      /* or is_ending */
        bool is_lost;
        int error;                /* by which it was lost */
        uint64_t silent_since_ns; /* atomic */
        struct kept ledger;       /* fd -1: none */
        struct kept_list buckets[N_BUCKETS];
        uint64_t started_ms; /* the thread's, as the next one */
        struct log_limit lost_log, failure_log, healed_log;
};

static bool is_ending(const struct store *s)
{
        return __atomic_load_n(&s->is_ending, __ATOMIC_ACQUIRE);
}

static void set_silent(struct store *s, uint64_t since_ns)
{
        __atomic_store_n(&s->silent_since_ns, since_ns, __ATOMIC_RELAXED);
}

uint64_t store_silent_since_ns(const struct store *s)
{
        return s ? __atomic_load_n(&s->silent_since_ns, __ATOMIC_RELAXED) : 0;
}

/* ---- the table ------------------------------------------------------------------ */

static struct kept_list *bucket_of(struct store *s, uint64_t key)
{
        return &s->buckets[key % N_BUCKETS];
}

static struct kept *kept_find(struct store *s, uint64_t key)
{
        struct kept *e;

        LIST_FOREACH(e, bucket_of(s, key), link)
        if (e->key == key)
                return e;
        return NULL;
}

/* Not by fstat(), which waits on some kernels for the inode's lock, and a client can hold that. 0: the kernel
 * does not say it (before Linux 5.14). */
static uint64_t inode_of(int fd)
{
        char path[64], line[128];
        uint64_t inode = 0;
        FILE *f;

        snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
        f = fopen(path, "re");
        while (f && inode == 0 && fgets(line, sizeof(line), f))
                if (strncmp(line, "ino:", 4) == 0)
                        inode = strtoull(line + 4, NULL, 10);
        if (f)
                fclose(f);
        return inode;
}

static void kept_set(struct kept *e, uint64_t key, int fd)
{
        e->key = key;
        e->fd = fd;
        e->inode = inode_of(fd);
}

static void kept_remove(struct store *s, uint64_t key)
{
        struct kept *e = kept_find(s, key);

        if (!e)
                return;
        LIST_REMOVE(e, link);
        free(e);
}

/* Instead of what had the key. */
static void kept_add(struct store *s, struct kept *e, uint64_t key, int fd)
{
        kept_remove(s, key);
        kept_set(e, key, fd);
        LIST_INSERT_HEAD(bucket_of(s, key), e, link);
}

/* ---- calls -------------------------------------------------------------------- */

/* One request and its reply, with the mutex. fd: goes with it; -1: none. *ret_fd: came with the reply, -1:
 * none; NULL: none can. -errno: there was no answer; else the keeper's result is in the reply. -EMFILE: this
 * or the other process has no fds left. */
static int exchange(const struct keeper_link *link, enum keeper_op op, uint64_t key, int fd,
                    struct keeper_reply *ret, int *ret_fd)
{
        struct keeper_request q = keeper_request_of(op);
        int fds[KEEPER_FDS], r;
        size_t n_fds = 0;

        q.key = key;
        r = keeper_send(link->fd, &q, sizeof(q), &fd, fd >= 0);
        if (r == 0)
                r = keeper_receive(link->fd, ret, sizeof(*ret), fds, &n_fds);
        if (ret_fd)
                *ret_fd = r == 0 && ret->result == 0 && n_fds > 0 ? fds[--n_fds] : -1;
        while (n_fds > 0)
                close(fds[--n_fds]);
        return r;
}

static void wait_ns(struct store *s, uint64_t ns)
{
        struct timespec until;

        clock_gettime(CLOCK_MONOTONIC, &until);
        ns += (uint64_t)until.tv_nsec;
        until.tv_sec += (time_t)(ns / 1000000000);
        until.tv_nsec = (long)(ns % 1000000000);
        (void)pthread_cond_timedwait(&s->healed, &s->mutex, &until);
}

/* With the mutex. -ENOTCONN: there is no keeper, and there has been none for long enough. */
static int await_keeper(struct store *s)
{
        while (s->is_lost && s->is_tended && !is_ending(s)) {
                uint64_t waited_ns = clock_ns() - store_silent_since_ns(s);

                if (waited_ns >= WAIT_NS)
                        break;
                wait_ns(s, WAIT_NS - waited_ns);
        }
        return s->is_lost || is_ending(s) ? -ENOTCONN : 0;
}

/* With the mutex. */
static void lose(struct store *s, int error)
{
        s->is_lost = true;
        s->error = error;
        if (s->is_tended)
                (void)eventfd_write(s->wake, 1);
        else if (!is_ending(s))
                log_error(
                        "the keeper of host memory has ended while bfcd took over what it had: a restart of bfcd ends "
                        "all sessions");
}

/* With the mutex. A result of the keeper, or -errno: a request that has no answer is made again, to the next
 * keeper. */
static int call(struct store *s, enum keeper_op op, uint64_t key, int fd, struct keeper_reply *ret,
                int *ret_fd)
{
        for (;;) {
                int r = await_keeper(s);

                if (r < 0)
                        return r;
                set_silent(s, clock_ns());
                r = exchange(&s->link, op, key, fd, ret, ret_fd);
                if (r == 0 || r == -EMFILE) {
                        set_silent(s, 0);
                        return r < 0 ? r : ret->result;
                }
                lose(s, r);
                if (!s->is_tended)
                        return r;
        }
}

/* ---- what is kept -------------------------------------------------------------- */

bool store_keeps(const struct store *s)
{
        return s;
}

bool store_is_new(const struct store *s)
{
        return s->is_new;
}

bool store_is_external(const struct store *s)
{
        return s && keepers_are_external(s->keepers);
}

/* At the start, which must not wait for ever. -EPROTO: a reply without an fd. */
static int take(struct store *s, enum keeper_op op, uint64_t key)
{
        struct keeper_reply reply;
        int fd, r;

        keeper_limit_wait(&s->link, KEEPER_LEFT_S);
        r = call(s, op, key, -1, &reply, &fd);
        keeper_limit_wait(&s->link, ANSWER_S);
        if (r < 0)
                return r;
        return fd >= 0 ? fd : -EPROTO;
}

int store_take_ledger(struct store *s)
{
        int fd;

        if (!s)
                return -ENOENT;
        pthread_mutex_lock(&s->mutex);
        fd = take(s, KEEPER_LEDGER, 0);
        if (fd >= 0)
                kept_set(&s->ledger, 0, fd);
        pthread_mutex_unlock(&s->mutex);
        return fd;
}

int store_take_extent(struct store *s, uint64_t key)
{
        struct kept *e = s && key != 0 ? malloc(sizeof(*e)) : NULL;
        int fd;

        if (!s || key == 0)
                return -ENOENT;
        if (!e)
                return -ENOMEM;
        keeper_pass_key(key);
        pthread_mutex_lock(&s->mutex);
        fd = take(s, KEEPER_TAKE, key);
        if (fd >= 0) {
                kept_add(s, e, key, fd);
                e = NULL;
        }
        pthread_mutex_unlock(&s->mutex);
        free(e);
        return fd;
}

size_t store_drop_rest(struct store *s)
{
        struct keeper_reply reply;
        int r;

        if (!s)
                return 0;
        pthread_mutex_lock(&s->mutex);
        r = call(s, KEEPER_REST, 0, -1, &reply, NULL);
        pthread_mutex_unlock(&s->mutex);
        return r == 0 ? (size_t)reply.n_bytes : 0;
}

uint64_t store_next_key(struct store *s)
{
        return s ? keeper_next_keys(1) : 0;
}

int store_put_ledger(struct store *s, int fd)
{
        struct keeper_reply reply;
        int r;

        if (!s)
                return 0;
        pthread_mutex_lock(&s->mutex);
        r = call(s, KEEPER_LEDGER, 0, fd, &reply, NULL);
        if (r == 0)
                kept_set(&s->ledger, 0, fd);
        pthread_mutex_unlock(&s->mutex);
        return r;
}

int store_put_extent(struct store *s, uint64_t key, int fd)
{
        struct keeper_reply reply;
        struct kept *e;
        int r;

        if (!s || key == 0)
                return 0;
        e = malloc(sizeof(*e));
        if (!e)
                return -ENOMEM;
        pthread_mutex_lock(&s->mutex);
        r = call(s, KEEPER_KEEP, key, fd, &reply, NULL);
        if (r == 0) {
                kept_add(s, e, key, fd);
                e = NULL;
        }
        pthread_mutex_unlock(&s->mutex);
        free(e);
        return r;
}

/* A keeper that has ended, or will be, needs no request: the next one does not get it. */
int store_remove_extent(struct store *s, uint64_t key)
{
        struct keeper_reply reply;
        int r;

        if (!s || key == 0)
                return 0;
        pthread_mutex_lock(&s->mutex);
        kept_remove(s, key);
        r = s->is_lost ? 0 : call(s, KEEPER_DROP, key, -1, &reply, NULL);
        if (s->is_lost)
                r = 0;
        pthread_mutex_unlock(&s->mutex);
        return r;
}

/* ---- a keeper ------------------------------------------------------------------- */

/* -ECANCELED: the store ends. */
static int set_link(struct store *s, const struct keeper_link *link)
{
        int r = 0;

        pthread_mutex_lock(&s->link_mutex);
        s->link = *link;
        if (is_ending(s)) {
                shutdown(link->fd, SHUT_RDWR);
                r = -ECANCELED;
        }
        pthread_mutex_unlock(&s->link_mutex);
        return r;
}

static struct keeper_link take_link(struct store *s)
{
        struct keeper_link link;

        pthread_mutex_lock(&s->link_mutex);
        link = s->link;
        s->link = KEEPER_LINK_NONE;
        pthread_mutex_unlock(&s->link_mutex);
        return link;
}

/* That of this name is ended, or at least is found no more. */
static void end_keeper(struct store *s)
{
        struct keeper_link link = take_link(s);

        keeper_end_unless(&link, KEEPER_END_MS, s->end);
        keepers_forget(s->keepers, KEEPER_HOST);
}

/* -EAGAIN: it does not answer. */
static int connect_to(struct store *s)
{
        struct keeper_reply reply;
        struct keeper_link link;
        int r = keepers_connect(s->keepers, KEEPER_HOST, NULL, s->end, &link);

        if (r == 0)
                r = set_link(s, &link);
        if (r < 0)
                return r;
        keeper_limit_wait(&link, KEEPER_LEFT_S);
        r = exchange(&link, KEEPER_HELLO, 0, -1, &reply, NULL);
        keeper_limit_wait(&link, ANSWER_S);
        if (r == 0)
                r = reply.result;
        if (r == 0)
                keeper_pass_key(reply.n_bytes);
        return r;
}

/* It hangs, is of another version, or has just ended: another one is better. */
static bool is_useless(int r)
{
        return r == -EAGAIN || r == -EPROTO || r == -ECONNRESET || r == -EPIPE;
}

static const char *trouble(int r)
{
        return r == -EAGAIN ? "does not answer" : r == -EPROTO ? "is of another version" : "has ended";
}

static int meet(struct store *s)
{
        int r = connect_to(s);

        if (!is_useless(r) || s->link.fd < 0 || (r == -EPROTO && store_is_external(s)))
                return r;
        log_error("the keeper of host memory %s: it is ended, with what it has of an earlier bfcd",
                  trouble(r));
        end_keeper(s);
        return connect_to(s);
}

/* ---- another keeper -------------------------------------------------------------- */

/* What was released meanwhile is left out. */
static int give(const struct store *s, enum keeper_op op, const struct kept *e)
{
        int fd = e->fd >= 0 ? fcntl(e->fd, F_DUPFD_CLOEXEC, 0) : -1, r = 0;
        struct keeper_reply reply;

        if (fd < 0)
                return e->fd < 0 || errno == EBADF ? 0 : -errno;
        if (inode_of(fd) == e->inode) {
                r = exchange(&s->link, op, e->key, fd, &reply, NULL);
                if (r == 0)
                        r = reply.result;
        }
        close(fd);
        return r;
}

/* With the mutex: nothing is put or removed meanwhile. */
static int give_all(struct store *s)
{
        int r = give(s, KEEPER_LEDGER, &s->ledger);

        for (size_t i = 0; r == 0 && i < N_BUCKETS; i++) {
                const struct kept *e;

                LIST_FOREACH(e, &s->buckets[i], link)
                if (r == 0)
                        r = give(s, KEEPER_KEEP, e);
        }
        return r;
}

static void note_healed(struct store *s)
{
        s->is_lost = false;
        set_silent(s, 0);
        pthread_cond_broadcast(&s->healed);
        log_limited(&s->healed_log, LOG_LEVEL_NOTICE,
                    "another keeper of host memory has the ledger and all extents");
}

/* One attempt. */
static void heal(struct store *s)
{
        int r;

        end_keeper(s);
        s->started_ms = clock_ms();
        r = connect_to(s);
        pthread_mutex_lock(&s->mutex);
        if (r == 0)
                r = give_all(s);
        if (r == 0)
                note_healed(s);
        else
                s->error = r;
        pthread_mutex_unlock(&s->mutex);
        if (r < 0 && !is_ending(s))
                log_limited(
                        &s->failure_log, LOG_LEVEL_ERROR,
                        "another keeper of host memory cannot be used: %s: host memory is not allocated until one can, "
                        "and a restart of bfcd would end all sessions",
                        strerror(-r));
}

/* Until the keeper's connection ends, a call is without answer, or so many milliseconds have passed; -1: no
 * limit. */
static void look(struct store *s, int timeout_ms)
{
        struct pollfd p[] = { { .fd = s->end, .events = POLLIN },
                              { .fd = s->wake, .events = POLLIN },
                              { .fd = timeout_ms < 0 ? s->link.fd : -1, .events = POLLRDHUP } };
        eventfd_t n;

        if (poll(p, 3, timeout_ms) <= 0)
                return;
        if (p[1].revents != 0)
                (void)eventfd_read(s->wake, &n);
        if (p[2].revents == 0)
                return;
        pthread_mutex_lock(&s->mutex);
        if (!s->is_lost) {
                set_silent(s, clock_ns());
                s->is_lost = true;
                s->error = -ECONNRESET;
        }
        pthread_mutex_unlock(&s->mutex);
}

static bool is_lost(struct store *s, int *ret_error)
{
        bool is;

        pthread_mutex_lock(&s->mutex);
        is = s->is_lost;
        *ret_error = s->error;
        pthread_mutex_unlock(&s->mutex);
        return is;
}

/* The thread. */
static void *tend(void *userdata)
{
        struct store *s = userdata;
        int error;

        while (!is_ending(s)) {
                uint64_t since_ms = clock_ms() - s->started_ms;

                if (!is_lost(s, &error))
                        look(s, -1);
                else if (since_ms < PAUSE_MS)
                        look(s, (int)(PAUSE_MS - since_ms));
                else {
                        log_limited(
                                &s->lost_log, LOG_LEVEL_WARNING,
                                "the keeper of host memory %s: another one is started, and gets all that it had",
                                trouble(error));
                        heal(s);
                }
        }
        pthread_mutex_lock(&s->mutex); /* no call waits without seeing the end */
        pthread_cond_broadcast(&s->healed);
        pthread_mutex_unlock(&s->mutex);
        return NULL;
}

/* Signals belong to the loop's thread. */
int store_tend(struct store *s)
{
        sigset_t all, before;
        int r;

        if (!s)
                return 0;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pthread_mutex_lock(&s->mutex);
        s->is_tended = true;
        r = -pthread_create(&s->thread, NULL, tend, s);
        s->is_tended = r == 0;
        pthread_mutex_unlock(&s->mutex);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return r;
}

/* ---- life ---------------------------------------------------------------------- */

static void close_events(const struct store *s)
{
        if (s->wake >= 0)
                close(s->wake);
        if (s->end >= 0)
                close(s->end);
}

static int store_make(struct keepers *k, struct store **ret)
{
        struct store *s = calloc(1, sizeof(*s));
        pthread_condattr_t attributes;

        if (!s)
                return -ENOMEM;
        s->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        s->end = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (s->wake < 0 || s->end < 0) {
                int r = -errno;

                close_events(s);
                free(s);
                return r;
        }
        s->keepers = k;
        s->link = KEEPER_LINK_NONE;
        s->ledger.fd = -1;
        pthread_mutex_init(&s->mutex, NULL);
        pthread_mutex_init(&s->link_mutex, NULL);
        pthread_condattr_init(&attributes);
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        pthread_cond_init(&s->healed, &attributes);
        pthread_condattr_destroy(&attributes);
        *ret = s;
        return 0;
}

/* Why there is no keeper. */
static void explain(const struct store *s, int r, char *ret_sentence, size_t n_sentence)
{
        const char *why = r == -EAGAIN ? "it does not answer" : strerror(-r);

        if (!store_is_external(s))
                snprintf(ret_sentence, n_sentence,
                         "bfcd-keeper, which must be beside bfcd, cannot be used for host memory: %s", why);
        else if (r == -EPROTO)
                snprintf(
                        ret_sentence, n_sentence,
                        "bfcd-keeper, which another program starts, is of another version: end all jobs, then the "
                        "keepers, and start those of this version");
        else if (r == -ETIMEDOUT)
                snprintf(ret_sentence, n_sentence,
                         "bfcd-keeper, which another program starts, does not listen for host memory");
        else
                snprintf(
                        ret_sentence, n_sentence,
                        "bfcd-keeper, which another program starts as bfcd's user, cannot be used for host memory: %s",
                        why);
}

int store_new(struct keepers *k, struct store **ret, char *ret_sentence, size_t n_sentence)
{
        struct store *s = NULL;
        int r = store_make(k, &s);

        if (r < 0) {
                snprintf(ret_sentence, n_sentence, "the store could not be set up: %s", strerror(-r));
                return r;
        }
        r = meet(s);
        s->is_new = s->link.is_new;
        if (r < 0) {
                explain(s, r, ret_sentence, n_sentence);
                store_free(s);
                return r;
        }
        *ret = s;
        return 0;
}

void store_end(struct store *s)
{
        if (!s)
                return;
        pthread_mutex_lock(&s->link_mutex);
        __atomic_store_n(&s->is_ending, true, __ATOMIC_RELEASE);
        if (s->link.fd >= 0)
                (void)shutdown(s->link.fd, SHUT_RDWR);
        pthread_mutex_unlock(&s->link_mutex);
        (void)eventfd_write(s->end, 1);
}

struct store *store_free(struct store *s)
{
        if (!s)
                return NULL;
        if (s->is_tended) {
                store_end(s);
                pthread_join(s->thread, NULL);
        }
        for (size_t i = 0; i < N_BUCKETS; i++)
                while (!LIST_EMPTY(&s->buckets[i]))
                        kept_remove(s, LIST_FIRST(&s->buckets[i])->key);
        keeper_leave(&s->link);
        close_events(s);
        pthread_cond_destroy(&s->healed);
        pthread_mutex_destroy(&s->link_mutex);
        pthread_mutex_destroy(&s->mutex);
        free(s);
        return NULL;
}
