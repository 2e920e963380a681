/* Starting keepers; see start.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "keeper/start.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <libgen.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "keeper/wire.h"

#define FOLDER    "keepers"
#define CONNECT_S 2
#define MORE_MS   100
#define START_MS  30000 /* in which a new process listens */
#define LOOK_MS   1
/* Of an external keeper. The kubelet waits 5 minutes at most before it starts a container again. */
#define EXTERNAL_MS      600000
#define EXTERNAL_LOOK_MS 50

enum { MAX_ENDING = 64 };

extern char **environ;

/* ---- keys --------------------------------------------------------------------- */

static _Atomic uint64_t last_key;

uint64_t keeper_next_keys(size_t n)
{
        return atomic_fetch_add(&last_key, n) + 1;
}

void keeper_pass_key(uint64_t key)
{
        uint64_t was = atomic_load(&last_key);

        while (key > was && key < UINT64_MAX && !atomic_compare_exchange_weak(&last_key, &was, key))
                ;
}

/* ---- a process --------------------------------------------------------------- */

static int find_program(char ret[static PATH_MAX])
{
        char self[PATH_MAX];
        ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);

        if (n < 0)
                return -errno;
        self[n] = '\0';
        return snprintf(ret, PATH_MAX, "%s/bfcd-keeper", dirname(self)) < PATH_MAX ? 0 : -ENAMETOOLONG;
}

/* Signals are as a program expects them, whatever this thread does with them. */
static int set_signals(posix_spawnattr_t *attributes, bool is_apart)
{
        short flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
        sigset_t none, all;
        int r;

        sigemptyset(&none);
        sigfillset(&all);
        r = posix_spawnattr_setsigmask(attributes, &none);
        if (r == 0)
                r = posix_spawnattr_setsigdefault(attributes, &all);
        if (r == 0)
                r = posix_spawnattr_setflags(attributes,
                                             (short)(is_apart ? flags | POSIX_SPAWN_SETPGROUP : flags));
        return r;
}

/* What waits for the end of this process's output need not wait for its. */
static int set_files(posix_spawn_file_actions_t *files, int input, bool is_apart)
{
        int r = posix_spawn_file_actions_adddup2(files, input, STDIN_FILENO);

        if (r == 0 && is_apart)
                r = posix_spawn_file_actions_addopen(files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
        if (r == 0 && is_apart)
                r = posix_spawn_file_actions_adddup2(files, STDOUT_FILENO, STDERR_FILENO);
        return r;
}

int keeper_spawn(const char *id, const char *const *more, int input, bool is_apart, pid_t *ret)
{
        const char *argv[8] = { "bfcd-keeper", id };
        posix_spawn_file_actions_t files;
        posix_spawnattr_t attributes;
        char path[PATH_MAX];
        int r = find_program(path);

        if (r < 0)
                return r;
        for (size_t i = 2; more && *more && i < sizeof(argv) / sizeof(argv[0]) - 1; i++)
                argv[i] = *more++;
        posix_spawn_file_actions_init(&files);
        posix_spawnattr_init(&attributes);
        r = set_files(&files, input, is_apart);
        if (r == 0)
                r = set_signals(&attributes, is_apart);
        if (r == 0)
                r = posix_spawn(ret, path, &files, &attributes, (char *const *)(uintptr_t)argv, environ);
        posix_spawnattr_destroy(&attributes);
        posix_spawn_file_actions_destroy(&files);
        return -r;
}

int keeper_start_own(const char *id, const char *const *more, struct keeper_link *ret)
{
        int ends[2], r;

        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) < 0)
                return -errno;
        *ret = (struct keeper_link){ .fd = ends[0], .process = -1, .is_new = true };
        r = keeper_spawn(id, more, ends[1], false, &ret->pid);
        close(ends[1]);
        if (r < 0)
                close(ends[0]);
        else
                ret->process = (int)syscall(SYS_pidfd_open, ret->pid, 0);
        return r;
}

/* ---- the folder ---------------------------------------------------------------- */

struct keepers {
        char path[PATH_MAX];
        int fd; /* locked */
        bool are_external;
};

static int find_folder(const char *admin_socket, char ret[static PATH_MAX])
{
        char copy[PATH_MAX];

        if (snprintf(copy, sizeof(copy), "%s", admin_socket) >= (int)sizeof(copy) ||
            snprintf(ret, PATH_MAX, "%s/" FOLDER, dirname(copy)) >= PATH_MAX)
                return -ENAMETOOLONG;
        return 0;
}

static int open_folder(const char *path)
{
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        struct stat st;

        if (fd < 0)
                return -errno;
        if (fstat(fd, &st) < 0 || st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
                close(fd);
                return -EPERM;
        }
        return fd;
}

/* The owner of a folder must not have root connect or signal for him. */
static int become_owner(const char *path)
{
        struct stat st;

        if (lstat(path, &st) < 0)
                return -errno;
        if (geteuid() != 0 || st.st_uid == 0)
                return 0;
        return setgroups(0, NULL) < 0 || setresgid(st.st_gid, st.st_gid, st.st_gid) < 0 ||
                               setresuid(st.st_uid, st.st_uid, st.st_uid) < 0
                       ? -errno
                       : 0;
}

static int open_keepers(const char *admin_socket, bool makes, struct keepers **ret, char *ret_sentence,
                        size_t n_sentence)
{
        struct keepers *k = calloc(1, sizeof(*k));
        int r = k ? find_folder(admin_socket, k->path) : -ENOMEM;

        if (r == 0 && makes && mkdir(k->path, 0700) < 0 && errno != EEXIST)
                r = -errno;
        if (r == 0 && !makes)
                r = become_owner(k->path);
        if (r == 0)
                r = k->fd = open_folder(k->path);
        if (r >= 0 && flock(k->fd, LOCK_EX | LOCK_NB) < 0) {
                r = errno == EWOULDBLOCK ? -EBUSY : -errno;
                close(k->fd);
        }
        if (r >= 0) {
                *ret = k;
                return 0;
        }
        snprintf(ret_sentence, n_sentence, "the folder %s of the keepers cannot be used: %s",
                 k && r != -ENAMETOOLONG ? k->path : admin_socket,
                 r == -EBUSY   ? "another bfcd runs there"
                 : r == -EPERM ? "it must belong to bfcd's user, with mode 0700"
                               : strerror(-r));
        free(k);
        return r;
}

int keepers_open(const char *admin_socket, struct keepers **ret, char *ret_sentence, size_t n_sentence)
{
        return open_keepers(admin_socket, true, ret, ret_sentence, n_sentence);
}

int keepers_open_left(const char *admin_socket, struct keepers **ret, char *ret_sentence, size_t n_sentence)
{
        return open_keepers(admin_socket, false, ret, ret_sentence, n_sentence);
}

void keepers_set_external(struct keepers *k)
{
        k->are_external = true;
}

bool keepers_are_external(const struct keepers *k)
{
        return k->are_external;
}

struct keepers *keepers_close(struct keepers *k)
{
        if (k)
                close(k->fd);
        free(k);
        return NULL;
}

/* Through an open folder, so that its path may be long. */
static int set_address(int folder, const char *id, struct sockaddr_un *ret)
{
        *ret = (struct sockaddr_un){ .sun_family = AF_UNIX };
        return snprintf(ret->sun_path, sizeof(ret->sun_path), "/proc/self/fd/%d/%s", folder, id) <
                               (int)sizeof(ret->sun_path)
                       ? 0
                       : -ENAMETOOLONG;
}

static int new_socket(int type)
{
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | type, 0);

        return fd < 0 ? -errno : fd;
}

static void limit_connect(int fd, time_t seconds)
{
        struct timeval limit = { .tv_sec = seconds };

        (void)setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
}

/* type: SOCK_NONBLOCK, 0. -EAGAIN: it listens, and has enough connections that wait, after a while. */
static int try_connect(int folder, const char *id, int type)
{
        struct sockaddr_un address;
        int r = set_address(folder, id, &address), fd;

        if (r < 0)
                return r;
        fd = new_socket(type);
        if (fd >= 0)
                limit_connect(fd, CONNECT_S);
        if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0) {
                r = -errno;
                close(fd);
                return r;
        }
        if (fd >= 0)
                limit_connect(fd, 0);
        return fd;
}

/* The process itself makes its socket listen, so that the kernel names it, and nothing else, to what connects. */
static int start_named(struct keepers *k, const char *id, const char *const *more, pid_t *ret)
{
        char path[PATH_MAX + NAME_MAX + 2];
        const char *arguments[6] = { KEEPER_SOCKET, path };
        struct sockaddr_un address;
        int r = set_address(k->fd, id, &address), fd;

        if (r < 0)
                return r;
        fd = new_socket(0);
        if (fd < 0)
                return fd;
        snprintf(path, sizeof(path), "%s/%s", k->path, id);
        for (size_t i = 2; more && *more && i < sizeof(arguments) / sizeof(arguments[0]) - 1; i++)
                arguments[i] = *more++;
        (void)unlinkat(k->fd, id, 0);
        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                r = -errno;
        if (r == 0)
                r = keeper_spawn(id, arguments, fd, true, ret);
        close(fd);
        if (r < 0)
                (void)unlinkat(k->fd, id, 0);
        return r;
}

static bool is_absent(int r)
{
        return r == -ECONNREFUSED || r == -ENOENT;
}

static int await_external(const struct keepers *k, const char *id, int cancel)
{
        struct pollfd p = { .fd = cancel, .events = POLLIN };
        int64_t until_ms = keeper_now_ms() + EXTERNAL_MS;

        for (;;) {
                int fd = try_connect(k->fd, id, 0);

                if (!is_absent(fd))
                        return fd;
                if (keeper_now_ms() >= until_ms)
                        return -ETIMEDOUT;
                if (poll(&p, 1, EXTERNAL_LOOK_MS) > 0)
                        return -ECANCELED;
        }
}

/* -ECONNRESET: it has ended. -ECANCELED: the fd `cancel` is readable. */
static int connect_new(const struct keepers *k, const char *id, pid_t pid, int cancel)
{
        struct pollfd p = { .fd = cancel, .events = POLLIN };

        for (int waited_ms = 0;; waited_ms += LOOK_MS) {
                int fd;

                if (poll(&p, 1, waited_ms > 0 ? LOOK_MS : 0) > 0)
                        return -ECANCELED;
                fd = try_connect(k->fd, id, 0);
                if (fd != -ECONNREFUSED || waited_ms >= START_MS)
                        return fd;
                if (waitpid(pid, NULL, WNOHANG) != 0)
                        return -ECONNRESET;
        }
}

/* Of the process that listens. */
static pid_t pid_of(int fd)
{
        struct ucred who;
        socklen_t n = sizeof(who);

        return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &n) == 0 && who.pid != getpid() ? who.pid : -1;
}

static bool is_closed(int fd)
{
        struct pollfd p = { .fd = fd, .events = POLLRDHUP };

        return poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP);
}

/* Its pid is its own as long as the connection is not closed. */
static void find_process(struct keeper_link *link)
{
        if (link->pid <= 0)
                link->pid = pid_of(link->fd);
        if (link->pid > 0)
                link->process = (int)syscall(SYS_pidfd_open, link->pid, 0);
        if (link->process >= 0 && is_closed(link->fd)) {
                close(link->process);
                link->process = -1;
        }
}

int keepers_connect(struct keepers *k, const char *id, const char *const *more, int cancel,
                    struct keeper_link *ret)
{
        struct keeper_link link = KEEPER_LINK_NONE;
        int r;

        link.fd = k->are_external ? await_external(k, id, cancel) : try_connect(k->fd, id, 0);
        if (!k->are_external && is_absent(link.fd)) {
                r = start_named(k, id, more, &link.pid);
                if (r < 0)
                        return r;
                link.is_new = true;
                link.fd = connect_new(k, id, link.pid, cancel);
                if (link.fd < 0)
                        (void)unlinkat(k->fd, id, 0); /* one that begins later ends then */
        }
        if (link.fd < 0)
                return link.fd;
        find_process(&link);
        *ret = link;
        return 0;
}

static bool listens(int folder, const char *id)
{
        int fd = try_connect(folder, id, SOCK_NONBLOCK);

        if (fd >= 0)
                close(fd);
        return fd >= 0 || fd == -EAGAIN;
}

bool keepers_listen(const struct keepers *k, const char *id)
{
        return listens(k->fd, id);
}

bool keepers_have(const char *admin_socket, const char *id)
{
        char path[PATH_MAX];
        int folder = find_folder(admin_socket, path) == 0 ? open_folder(path) : -1;
        bool is = folder >= 0 && listens(folder, id);

        if (folder >= 0)
                close(folder);
        return is;
}

/* ---- the end ------------------------------------------------------------------- */

void keeper_limit_wait(const struct keeper_link *link, int seconds)
{
        struct timeval limit = { .tv_sec = seconds };

        (void)setsockopt(link->fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
}

void keeper_leave(struct keeper_link *link)
{
        if (link->fd >= 0)
                close(link->fd);
        if (link->process >= 0)
                close(link->process);
        *link = KEEPER_LINK_NONE;
}

/* True: it has ended, or this is not to be waited for. */
static bool await_end(const struct keeper_link *link, int timeout_ms, int cancel)
{
        struct pollfd p[] = { { .fd = link->process >= 0 ? link->process : link->fd,
                                .events = link->process >= 0 ? POLLIN : POLLRDHUP },
                              { .fd = cancel, .events = POLLIN } };

        return poll(p, 2, timeout_ms) > 0;
}

static void send_signal(const struct keeper_link *link, int number)
{
        if (link->process >= 0)
                (void)syscall(SYS_pidfd_send_signal, link->process, number, NULL, 0);
}

/* Where the connection is broken the keeper waits for another one, and a signal asks it. */
static void ask_to_end(const struct keeper_link *link)
{
        struct keeper_request q = keeper_request_of(KEEPER_END);

        if (keeper_send(link->fd, &q, sizeof(q), NULL, 0) < 0)
                send_signal(link, SIGTERM);
        (void)shutdown(link->fd, SHUT_WR);
}

static void await_or_kill(struct keeper_link *link, int timeout_ms, int cancel)
{
        if (!await_end(link, timeout_ms, cancel)) {
                send_signal(link, SIGKILL);
                (void)await_end(link, timeout_ms, cancel);
        }
        if (link->pid > 0)
                (void)waitpid(link->pid, NULL, WNOHANG);
        keeper_leave(link);
}

void keeper_end_unless(struct keeper_link *link, int timeout_ms, int cancel)
{
        if (link->fd < 0)
                return;
        ask_to_end(link);
        await_or_kill(link, timeout_ms, cancel);
}

void keeper_end(struct keeper_link *link, int timeout_ms)
{
        keeper_end_unless(link, timeout_ms, -1);
}

void keepers_forget(const struct keepers *k, const char *id)
{
        if (!k->are_external)
                (void)unlinkat(k->fd, id, 0);
}

int keepers_end(struct keepers *k, int timeout_ms, bool (*is_used)(const void *userdata, const char *id),
                const void *userdata)
{
        int copy = fcntl(k->fd, F_DUPFD_CLOEXEC, 0), n = 0;
        DIR *folder = copy >= 0 ? fdopendir(copy) : NULL;
        struct keeper_link links[MAX_ENDING];
        const struct dirent *e;

        if (!folder) {
                n = -errno;
                if (copy >= 0)
                        close(copy);
                return n;
        }
        rewinddir(folder);
        while ((e = readdir(folder))) {
                struct keeper_link link = KEEPER_LINK_NONE;

                if (e->d_name[0] == '.' || (is_used && is_used(userdata, e->d_name)))
                        continue;
                link.fd = try_connect(k->fd, e->d_name, 0);
                if (link.fd >= 0 && n < MAX_ENDING) {
                        find_process(&link);
                        ask_to_end(&link);
                        links[n++] = link;
                }
                keepers_forget(k, e->d_name);
        }
        closedir(folder);
        /* All together: the others have had their time, too, when the first one has. */
        for (int i = 0; i < n; i++)
                await_or_kill(&links[i], i == 0 ? timeout_ms : MORE_MS, -1);
        return n;
}
