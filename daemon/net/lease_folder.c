/* The folder of the sockets of leases; see lease_folder.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/lease_folder.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/fd_reserve.h"
#include "daemon/base/log.h"
#include "daemon/net/fd_guard.h"

#define FOLDER_BACKLOG 1024
#define FOLDER_MODE    0700
#define NAME_MODE      0755 /* anyone for whom it is mounted */
#define SOCKET_MODE    0666
#define SOCKET_NAME    "bfcd.sock"

int lease_folder_init(struct lease_folder *f, const char *admin_socket)
{
        const char *slash = strrchr(admin_socket, '/');

        *f = (struct lease_folder){ .fd = -1 };
        return asprintf(&f->path, "%.*sleases", slash ? (int)(slash + 1 - admin_socket) : 0, admin_socket) < 0
                       ? -ENOMEM
                       : 0;
}

void lease_folder_deinit(struct lease_folder *f)
{
        if (f->fd >= 0)
                close(f->fd);
        free(f->path);
        *f = (struct lease_folder){ .fd = -1 };
}

/* A folder of the daemon's user, with this mode. -EEXIST: other users may enter the outer one, so the daemon did not make it. */
static int open_own(int at, const char *path, mode_t mode, int *ret_fd)
{
        int fd = openat(at, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        struct stat st;
        int r = 0;

        if (fd < 0)
                return -errno;
        if (fstat(fd, &st) < 0)
                r = -errno;
        else if (st.st_uid != geteuid())
                r = -EPERM;
        else if (mode == FOLDER_MODE && (st.st_mode & 077) != 0)
                r = -EEXIST;
        else if ((st.st_mode & 07777) != mode &&
                 fchmod(fd, mode) < 0) /* by a umask, or a process that has it mounted */
                r = -errno;
        if (r < 0)
                close(fd);
        else
                *ret_fd = fd;
        return r;
}

static int folder_open(struct lease_folder *f)
{
        int fd = -1, r;

        if (f->fd >= 0)
                return 0;
        r = open_own(AT_FDCWD, f->path, FOLDER_MODE, &fd);
        if (r < 0)
                return r;
        if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
                r = errno == EWOULDBLOCK ? -EADDRINUSE : -errno;
                close(fd);
                return r;
        }
        if (fd_reserve_has(fd)) { /* an administrator asked, who gets numbers of the reserve, too */
                close(fd);
                return -EMFILE;
        }
        f->fd = fd;
        return 0;
}

static void close_unused(struct lease_folder *f)
{
        if (f->n_sockets > 0 || f->fd < 0)
                return;
        close(f->fd);
        f->fd = -1;
}

/* ---- one socket -------------------------------------------------------------- */

/* By a file descriptor: the path may be too long for an address, and a process could exchange the file for a link. */
static int set_mode(int folder)
{
        char path[64];
        struct stat st;
        int fd = openat(folder, SOCKET_NAME, O_PATH | O_NOFOLLOW | O_CLOEXEC), r;

        if (fd < 0)
                return -errno;
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        if (fstat(fd, &st) < 0)
                r = -errno;
        else if (!S_ISSOCK(st.st_mode))
                r = -ENOTSOCK;
        else
                r = chmod(path, SOCKET_MODE) < 0 ? -errno : 0;
        close(fd);
        return r;
}

static int listen_in(int folder, int fd)
{
        struct sockaddr_un address = { .sun_family = AF_UNIX };
        int r;

        if (unlinkat(folder, SOCKET_NAME, 0) < 0 && errno != ENOENT)
                return -errno;
        (void)fd_guard_refuse(fd);
        snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/" SOCKET_NAME, folder);
        if (bind(fd, (struct sockaddr *)&address, sizeof(address)) < 0)
                return -errno;
        r = set_mode(folder);
        if (r == 0 && listen(fd, FOLDER_BACKLOG) < 0)
                r = -errno;
        return r;
}

/* The folder of this name. One that is there stays the same, because it may be mounted. */
static int make_folder(int at, const char *name, int *ret_fd)
{
        if (mkdirat(at, name, NAME_MODE) < 0 && errno != EEXIST)
                return -errno;
        return open_own(at, name, NAME_MODE, ret_fd);
}

static int make_socket(int at, const char *name, int *ret_fd)
{
        int folder, fd, r = make_folder(at, name, &folder);

        if (r < 0)
                return r;
        fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        r = fd < 0 ? -errno : fd_reserve_has(fd) ? -EMFILE : listen_in(folder, fd);
        close(folder);
        if (r == 0)
                *ret_fd = fd;
        else if (fd >= 0)
                close(fd);
        return r;
}

/* keeps: the folder stays if it had a socket. */
static int remove_socket(int at, const char *name, bool keeps)
{
        int folder = openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        bool had_socket;

        if (folder < 0)
                return -errno;
        had_socket = unlinkat(folder, SOCKET_NAME, 0) == 0;
        close(folder);
        return (!keeps || !had_socket) && unlinkat(at, name, AT_REMOVEDIR) < 0 ? -errno : 0;
}

int lease_folder_listen(struct lease_folder *f, const char *name, int *ret_fd)
{
        int r = 0;

        if (f->fd < 0 && mkdir(f->path, FOLDER_MODE) < 0 && errno != EEXIST)
                return -errno;
        r = folder_open(f);
        if (r < 0)
                return r;
        r = make_socket(f->fd, name, ret_fd);
        f->n_sockets += r == 0;
        close_unused(f);
        return r;
}

const char *lease_folder_trouble(int r)
{
        return r == -EADDRINUSE ? "another daemon has sockets in this folder"
               : r == -EPERM    ? "another user owns this folder, or that of the socket: remove it"
               : r == -EEXIST   ? "other users may enter this folder, so bfcd did not make it: move it"
               : r == -EISDIR ? "a process that has the folder of the socket mounted wrote into it: empty it"
               : r == -ENOTDIR || r == -ELOOP
                       ? "a file or a symbolic link has the name of this folder, or of that of the socket: remove it"
                       : strerror(-r);
}

static void remove_logged(const struct lease_folder *f, const char *name, bool keeps)
{
        int r = remove_socket(f->fd, name, keeps);

        if (r < 0)
                log_warning("%s/%s, in the folder of leases' sockets, could not be removed: %s", f->path,
                            name, strerror(-r));
}

void lease_folder_remove(struct lease_folder *f, const char *name)
{
        remove_logged(f, name, false);
        f->n_sockets--;
        close_unused(f);
}

/* ---- all of them --------------------------------------------------------------- */

void lease_folder_clean(struct lease_folder *f, bool (*is_used)(void *userdata, const char *name),
                        void *userdata)
{
        struct dirent *entry;
        DIR *list;
        int r = folder_open(f), fd;

        if (r == -ENOENT)
                return;
        fd = r < 0 ? -1 : openat(f->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        list = fd < 0 ? NULL : fdopendir(fd);
        if (!list) {
                log_warning("the folder %s of leases' sockets could not be cleaned: %s", f->path,
                            lease_folder_trouble(r < 0 ? r : -errno));
                if (fd >= 0)
                        close(fd);
        }
        while (list && (entry = readdir(list)))
                if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
                    !is_used(userdata, entry->d_name))
                        remove_logged(f, entry->d_name, true);
        if (list)
                closedir(list);
        close_unused(f);
}
