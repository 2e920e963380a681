/* The store; see store.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/handover/store.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/log.h"
#include "keeper/wire.h"

struct store {
        struct keeper_link link;
        pthread_mutex_t mutex; /* guards a call, and what follows */
        bool is_lost;          /* as was logged */
        bool is_ending;
};

/* ---- calls -------------------------------------------------------------------- */

static void note_lost(struct store *s)
{
        if (!s->is_lost && !__atomic_load_n(&s->is_ending, __ATOMIC_RELAXED))
                log_error(
                        "the keeper of host memory has ended: no memory is allocated any more, and a restart of bfcd ends "
                        "all sessions");
        s->is_lost = true;
}

/* fd: goes with it; -1: none. *ret_fd: came with the reply, -1: none; NULL: none can. */
static int call(struct store *s, enum keeper_op op, uint64_t key, int fd, struct keeper_reply *ret,
                int *ret_fd)
{
        struct keeper_request q = keeper_request_of(op);
        int fds[KEEPER_FDS], r;
        size_t n_fds = 0;

        q.key = key;
        pthread_mutex_lock(&s->mutex);
        r = s->is_lost ? -ENOTCONN : keeper_send(s->link.fd, &q, sizeof(q), &fd, fd >= 0);
        if (r == 0)
                r = keeper_receive(s->link.fd, ret, sizeof(*ret), fds, &n_fds);
        if (r < 0 && r != -EMFILE)
                note_lost(s);
        pthread_mutex_unlock(&s->mutex);
        if (r == 0)
                r = ret->result;
        if (ret_fd)
                *ret_fd = r == 0 && n_fds > 0 ? fds[--n_fds] : -1;
        while (n_fds > 0)
                close(fds[--n_fds]);
        return r;
}

static int tell(struct store *s, enum keeper_op op, uint64_t key, int fd)
{
        struct keeper_reply reply;

        return s ? call(s, op, key, fd, &reply, NULL) : 0;
}

/* ---- what is kept -------------------------------------------------------------- */

bool store_keeps(const struct store *s)
{
        return s;
}

bool store_is_new(const struct store *s)
{
        return s->link.is_new;
}

/* At the start, which must not wait for ever. -EPROTO: a reply without an fd. */
static int take(struct store *s, enum keeper_op op, uint64_t key)
{
        struct keeper_reply reply;
        int fd, r;

        keeper_limit_wait(&s->link, KEEPER_LEFT_S);
        r = call(s, op, key, -1, &reply, &fd);
        keeper_limit_wait(&s->link, 0);
        if (r < 0)
                return r;
        return fd >= 0 ? fd : -EPROTO;
}

int store_take_ledger(struct store *s)
{
        return s ? take(s, KEEPER_LEDGER, 0) : -ENOENT;
}

int store_take_extent(struct store *s, uint64_t key)
{
        if (!s || key == 0)
                return -ENOENT;
        keeper_pass_key(key);
        return take(s, KEEPER_TAKE, key);
}

size_t store_drop_rest(struct store *s)
{
        struct keeper_reply reply;

        return s && call(s, KEEPER_REST, 0, -1, &reply, NULL) == 0 ? (size_t)reply.n_bytes : 0;
}

uint64_t store_next_key(struct store *s)
{
        return s ? keeper_next_keys(1) : 0;
}

int store_put_ledger(struct store *s, int fd)
{
        return tell(s, KEEPER_LEDGER, 0, fd);
}

int store_put_extent(struct store *s, uint64_t key, int fd)
{
        return key == 0 ? 0 : tell(s, KEEPER_KEEP, key, fd);
}

int store_remove_extent(struct store *s, uint64_t key)
{
        return key == 0 ? 0 : tell(s, KEEPER_DROP, key, -1);
}

/* ---- life ---------------------------------------------------------------------- */

/* -EAGAIN: it does not answer. */
static int hello(struct store *s)
{
        struct keeper_request q = keeper_request_of(KEEPER_HELLO);
        struct keeper_reply reply;
        int fds[KEEPER_FDS], r;
        size_t n_fds;

        if (!s->link.is_new)
                keeper_limit_wait(&s->link, KEEPER_LEFT_S);
        r = keeper_send(s->link.fd, &q, sizeof(q), NULL, 0);
        if (r == 0)
                r = keeper_receive(s->link.fd, &reply, sizeof(reply), fds, &n_fds);
        keeper_limit_wait(&s->link, 0);
        while (r == 0 && n_fds > 0)
                close(fds[--n_fds]);
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

static int connect_to(struct store *s, struct keepers *k)
{
        int r = keepers_connect(k, KEEPER_HOST, NULL, &s->link);

        return r == 0 ? hello(s) : r;
}

static int meet(struct store *s, struct keepers *k)
{
        int r = connect_to(s, k);

        if (!is_useless(r) || s->link.fd < 0)
                return r;
        log_error("the keeper of host memory %s: it is ended, with what it has of an earlier bfcd",
                  r == -EAGAIN   ? "does not answer"
                  : r == -EPROTO ? "is of another version"
                                 : "ends");
        keeper_end(&s->link, KEEPER_END_MS);
        return connect_to(s, k);
}

int store_new(struct keepers *k, struct store **ret, char *ret_sentence, size_t n_sentence)
{
        struct store *s = malloc(sizeof(*s));
        int r;

        if (!s) {
                snprintf(ret_sentence, n_sentence, "out of memory");
                return -ENOMEM;
        }
        *s = (struct store){ .link = KEEPER_LINK_NONE };
        pthread_mutex_init(&s->mutex, NULL);
        r = meet(s, k);
        if (r < 0) {
                snprintf(ret_sentence, n_sentence,
                         "bfcd-keeper, which must be beside bfcd, cannot be used for host memory: %s",
                         r == -EAGAIN ? "it does not answer" : strerror(-r));
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
        __atomic_store_n(&s->is_ending, true, __ATOMIC_RELAXED);
        (void)shutdown(s->link.fd, SHUT_RDWR);
}

struct store *store_free(struct store *s)
{
        if (!s)
                return NULL;
        keeper_leave(&s->link);
        pthread_mutex_destroy(&s->mutex);
        free(s);
        return NULL;
}
