/* SPDX-License-Identifier: Apache-2.0 */
#include "keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/suite.h"

struct kept {
        char name[64];
        int fd;
};

struct keeper {
        pthread_t thread;
        pthread_mutex_t mutex;
        pthread_cond_t changed;
        char path[64];
        const char *store;
        int fd;      /* the socket; -1: gone */
        int wake_fd; /* an eventfd: look at the words below */
        bool is_paused, ignores_barriers, stops;
        bool is_at_rest; /* the thread has seen the words, and takes nothing */
        unsigned n_messages;
        struct kept kept[KEEPER_MAX];
        unsigned n_kept;
        int barriers[KEEPER_MAX];
        unsigned n_barriers;
};

/* ---- what it is told --------------------------------------------------------- */

static bool line_is(const char *text, const char *line)
{
        const char *at = strstr(text, line);
        size_t n = strlen(line);

        return at && (at == text || at[-1] == '\n') && (at[n] == '\n' || at[n] == '\0');
}

static void remove_name(struct keeper *k, const char *name)
{
        unsigned n = 0;

        for (unsigned i = 0; i < k->n_kept; i++) {
                if (strcmp(k->kept[i].name, name) == 0)
                        close(k->kept[i].fd);
                else
                        k->kept[n++] = k->kept[i];
        }
        k->n_kept = n;
}

static void act(struct keeper *k, const char *text, int fd)
{
        const char *at = strstr(text, "FDNAME=");
        char name[64] = "stored";

        if (at)
                snprintf(name, sizeof(name), "%.*s", (int)strcspn(at + 7, "\n"), at + 7);
        if (strcmp(text, "BARRIER=1") == 0 && fd >= 0) {
                if (k->ignores_barriers && k->n_barriers < KEEPER_MAX)
                        k->barriers[k->n_barriers++] = fd;
                else
                        close(fd);
                return;
        }
        if (line_is(text, "FDSTOREREMOVE=1"))
                remove_name(k, name);
        if (line_is(text, "FDSTORE=1") && line_is(text, "FDPOLL=0") && fd >= 0 && k->n_kept < KEEPER_MAX) {
                k->kept[k->n_kept].fd = fd;
                snprintf(k->kept[k->n_kept++].name, sizeof(name), "%s", name);
        } else if (fd >= 0) {
                close(fd);
        }
}

/* One datagram, if there is one. */
static bool take(struct keeper *k)
{
        union {
                struct cmsghdr header;
                char bytes[CMSG_SPACE(sizeof(int))];
        } control = { .bytes = { 0 } };
        char text[256];
        struct iovec iov = { text, sizeof(text) - 1 };
        struct msghdr message = {
                .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control)
        };
        ssize_t n = k->fd >= 0 ? recvmsg(k->fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) : -1;
        struct cmsghdr *c = n >= 0 ? CMSG_FIRSTHDR(&message) : NULL;
        int fd = -1;

        if (n < 0)
                return false;
        text[n] = '\0';
        if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
                memcpy(&fd, CMSG_DATA(c), sizeof(fd));
        k->n_messages++;
        act(k, text, fd);
        return true;
}

static void *keeper_main(void *userdata)
{
        struct keeper *k = userdata;
        uint64_t n;

        pthread_mutex_lock(&k->mutex);
        while (!k->stops) {
                struct pollfd fds[2] = { { .fd = k->wake_fd, .events = POLLIN },
                                         { .fd = k->is_paused ? -1 : k->fd, .events = POLLIN } };

                while (!k->is_paused && take(k))
                        ;
                k->is_at_rest = true;
                pthread_cond_broadcast(&k->changed);
                pthread_mutex_unlock(&k->mutex);
                poll(fds, 2, -1);
                pthread_mutex_lock(&k->mutex);
                if (fds[0].revents)
                        (void)!read(k->wake_fd, &n, sizeof(n));
        }
        k->is_at_rest = true;
        pthread_cond_broadcast(&k->changed);
        pthread_mutex_unlock(&k->mutex);
        return NULL;
}

/* Under the mutex; returns when the thread has seen it. */
static void keeper_wake(struct keeper *k)
{
        uint64_t one = 1;

        k->is_at_rest = false;
        ck_assert_int_eq(write(k->wake_fd, &one, sizeof(one)), sizeof(one));
        while (!k->is_at_rest)
                pthread_cond_wait(&k->changed, &k->mutex);
}

/* ---- what it is made to do ----------------------------------------------------- */

void keeper_pause(struct keeper *k, bool is_paused)
{
        pthread_mutex_lock(&k->mutex);
        k->is_paused = is_paused;
        keeper_wake(k);
        pthread_mutex_unlock(&k->mutex);
}

void keeper_ignore_barriers(struct keeper *k, bool ignores)
{
        pthread_mutex_lock(&k->mutex);
        k->ignores_barriers = ignores;
        pthread_mutex_unlock(&k->mutex);
}

void keeper_go(struct keeper *k)
{
        pthread_mutex_lock(&k->mutex);
        close(k->fd);
        k->fd = -1;
        keeper_wake(k);
        pthread_mutex_unlock(&k->mutex);
}

void keeper_settle(struct keeper *k)
{
        pthread_mutex_lock(&k->mutex);
        keeper_wake(k);
        pthread_mutex_unlock(&k->mutex);
}

unsigned keeper_count_of(struct keeper *k, const char *name)
{
        unsigned n = 0;

        pthread_mutex_lock(&k->mutex);
        keeper_wake(k);
        for (unsigned i = 0; i < k->n_kept; i++)
                n += !name || strcmp(k->kept[i].name, name) == 0;
        pthread_mutex_unlock(&k->mutex);
        return n;
}

unsigned keeper_count(struct keeper *k)
{
        return keeper_count_of(k, NULL);
}

int keeper_fd(struct keeper *k, const char *name)
{
        int fd = -1;

        pthread_mutex_lock(&k->mutex);
        keeper_wake(k);
        for (unsigned i = 0; i < k->n_kept; i++)
                if (strcmp(k->kept[i].name, name) == 0)
                        fd = k->kept[i].fd;
        pthread_mutex_unlock(&k->mutex);
        return fd;
}

void keeper_keep(struct keeper *k, const char *name, int fd)
{
        pthread_mutex_lock(&k->mutex);
        ck_assert_uint_lt(k->n_kept, KEEPER_MAX);
        k->kept[k->n_kept].fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        snprintf(k->kept[k->n_kept++].name, sizeof(k->kept[0].name), "%s", name);
        pthread_mutex_unlock(&k->mutex);
}

unsigned keeper_n_messages(struct keeper *k)
{
        unsigned n;

        pthread_mutex_lock(&k->mutex);
        keeper_wake(k);
        n = k->n_messages;
        pthread_mutex_unlock(&k->mutex);
        return n;
}

/* ---- a successor ------------------------------------------------------------------ */

static void set_environment(const struct keeper *k)
{
        setenv("NOTIFY_SOCKET", k->path, 1);
        unsetenv("FDSTORE");
        if (k->store)
                setenv("BFCD_FDSTORE", k->store, 1);
        else
                unsetenv("BFCD_FDSTORE");
}

/* In the child, which has no other fds. */
static void place_fds(const struct keeper *k)
{
        char text[32], names[64 * KEEPER_MAX] = "";

        for (unsigned i = 0; i < k->n_kept; i++)
                dup2(k->kept[i].fd, 500 + (int)i);
        close_range(3, 499, 0);
        for (unsigned i = 0; i < k->n_kept; i++) {
                dup2(500 + (int)i, 3 + (int)i);
                snprintf(names + strlen(names), sizeof(names) - strlen(names), "%s%s", i > 0 ? ":" : "",
                         k->kept[i].name);
        }
        close_range(500, UINT32_MAX, 0);
        snprintf(text, sizeof(text), "%u", k->n_kept);
        set_environment(k);
        setenv("LISTEN_FDS", text, 1);
        setenv("LISTEN_FDNAMES", names, 1);
        snprintf(text, sizeof(text), "%d", (int)getpid());
        setenv("LISTEN_PID", text, 1);
}

void keeper_succeed(struct keeper *k, bool (*run)(struct manager *m, void *userdata), void *userdata)
{
        int status = -1;
        pid_t pid;

        pthread_mutex_lock(&k->mutex);
        keeper_wake(k);
        pid = fork();
        if (pid == 0) {
                struct manager *m = NULL;
                bool is_good;

                place_fds(k);
                is_good = manager_new(&m) == 0 && run(m, userdata);
                manager_free(m);
                _exit(is_good ? 0 : 1);
        }
        pthread_mutex_unlock(&k->mutex);
        ck_assert_int_gt(pid, 0);
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_int_eq(status, 0);
}

/* ---- life -------------------------------------------------------------------------- */

struct keeper *keeper_new(const char *store)
{
        struct keeper *k = calloc(1, sizeof(*k));
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int n;

        ck_assert_ptr_nonnull(k);
        pthread_mutex_init(&k->mutex, NULL);
        pthread_cond_init(&k->changed, NULL);
        k->wake_fd = eventfd(0, EFD_CLOEXEC);
        k->fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
        ck_assert(k->wake_fd >= 0 && k->fd >= 0);
        n = snprintf(k->path, sizeof(k->path), "@bfcd-keeper-%d", (int)getpid());
        memcpy(address.sun_path, k->path, (size_t)n);
        address.sun_path[0] = '\0';
        ck_assert_int_eq(bind(k->fd, (struct sockaddr *)&address,
                              (socklen_t)(offsetof(struct sockaddr_un, sun_path) + (size_t)n)),
                         0);
        k->store = store;
        set_environment(k);
        ck_assert_int_eq(pthread_create(&k->thread, NULL, keeper_main, k), 0);
        return k;
}

struct keeper *keeper_free(struct keeper *k)
{
        pthread_mutex_lock(&k->mutex);
        k->stops = true;
        keeper_wake(k);
        pthread_mutex_unlock(&k->mutex);
        pthread_join(k->thread, NULL);
        while (k->n_kept > 0)
                close(k->kept[--k->n_kept].fd);
        while (k->n_barriers > 0)
                close(k->barriers[--k->n_barriers]);
        if (k->fd >= 0)
                close(k->fd);
        close(k->wake_fd);
        pthread_cond_destroy(&k->changed);
        pthread_mutex_destroy(&k->mutex);
        free(k);
        return NULL;
}
