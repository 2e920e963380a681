/* Control groups of processes; see cgroup.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/cgroup.h"

#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A dozen hierarchies of version 1, each with a path. */
#define CGROUP_FILE_BYTES (16u * CGROUP_PATH_BYTES)

static bool lives(int pidfd)
{
        struct pollfd p = { .fd = pidfd, .events = POLLIN };

        return pidfd >= 0 && poll(&p, 1, 0) == 0;
}

static int read_file(const char *proc, pid_t pid, char *buf, size_t n_buf)
{
        size_t used = 0;
        char path[64];
        ssize_t n;
        int fd;

        if (snprintf(path, sizeof(path), "%s/%d/cgroup", proc, (int)pid) >= (int)sizeof(path))
                return -ENAMETOOLONG;
        fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        while ((n = read(fd, buf + used, n_buf - 1 - used)) > 0)
                used += (size_t)n;
        n = n < 0 ? -errno : 0;
        close(fd);
        buf[used] = '\0';
        /* A truncated line is ignored. */
        if (n == 0 && used == n_buf - 1)
                return -ENAMETOOLONG;
        return (int)n;
}

int cgroup_of_process(const char *proc, pid_t pid, int pidfd, char ret[static CGROUP_PATH_BYTES])
{
        char text[CGROUP_FILE_BYTES], path[CGROUP_PATH_BYTES];
        int r;

        if (pid <= 0 || !lives(pidfd))
                return -ESRCH;
        r = read_file(proc, pid, text, sizeof(text));
        if (r == 0)
                r = cgroup_parse(text, path);
        if (r == 0 && !lives(pidfd))
                r = -ESRCH;
        if (r == 0)
                strcpy(ret, path);
        return r;
}

/* "HIERARCHY:CONTROLLERS:PATH"; the path may have colons, but no end of a line. */
static bool line_is(const char *line, const char *hierarchy, const char *controllers, const char **ret_path)
{
        const char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;

        if (!second || second > line + strcspn(line, "\n"))
                return false;
        if (hierarchy &&
            ((size_t)(first - line) != strlen(hierarchy) || strncmp(line, hierarchy, strlen(hierarchy)) != 0))
                return false;
        if ((size_t)(second - first - 1) != strlen(controllers) ||
            strncmp(first + 1, controllers, strlen(controllers)) != 0)
                return false;
        *ret_path = second + 1;
        return true;
}

int cgroup_parse(const char *text, char ret[static CGROUP_PATH_BYTES])
{
        const char *unified = NULL, *systemd = NULL, *path;
        size_t n;

        while (*text) {
                (void)(line_is(text, "0", "", &unified) || line_is(text, NULL, "name=systemd", &systemd));
                text += strcspn(text, "\n");
                text += *text == '\n';
        }
        path = systemd ? systemd : unified;
        n = path ? strcspn(path, "\n") : 0;
        if (n == 0 || path[0] != '/' || n >= CGROUP_PATH_BYTES)
                return -ENODATA;
        memcpy(ret, path, n);
        ret[n] = '\0';
        return 0;
}

static bool ends_in(const char *s, size_t n, const char *end)
{
        size_t n_end = strlen(end);

        return n > n_end && memcmp(s + n - n_end, end, n_end) == 0;
}

void cgroup_unit(const char *path, char ret[static CGROUP_UNIT_BYTES])
{
        static const char *const kinds[] = { ".service", ".scope", ".socket", ".mount", ".swap" };
        size_t n = 0;

        ret[0] = '\0';
        do {
                path += n;
                path += *path == '/';
                n = strcspn(path, "/");
        } while (ends_in(path, n, ".slice"));
        if (n > 0 && path[0] == '_') { /* systemd escapes what would look like the kernel's own */
                path++;
                n--;
        }
        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
                if (!ends_in(path, n, kinds[i]) || n >= CGROUP_UNIT_BYTES)
                        continue;
                memcpy(ret, path, n);
                ret[n] = '\0';
        }
}

bool cgroup_unit_matches(const char *pattern, const char *unit)
{
        return unit[0] != '\0' && fnmatch(pattern, unit, FNM_NOESCAPE) == 0;
}

bool cgroup_path_matches(const char *pattern, const char *path)
{
        char above[CGROUP_PATH_BYTES];
        size_t n = strlen(path);

        if (n == 0 || n >= sizeof(above))
                return false;
        memcpy(above, path, n + 1);
        for (;;) {
                if (above[1] == '\0') /* the root has no name that a '*' could stand for */
                        return strcmp(pattern, "/") == 0;
                if (fnmatch(pattern, above, FNM_NOESCAPE | FNM_PATHNAME) == 0)
                        return true;
                while (above[n - 1] != '/')
                        n--;
                above[n > 1 ? n - 1 : 1] = '\0'; /* without its '/', but for the root */
                n = strlen(above);
        }
}

size_t cgroup_prefix(const char *pattern, const char *path)
{
        char above[CGROUP_PATH_BYTES];
        size_t n = strlen(path);

        if (strcmp(pattern, "/") == 0)
                return n > 0;
        if (n >= sizeof(above))
                return 0;
        for (size_t i = 1; i <= n; i++) {
                if (path[i] != '/' && path[i] != '\0')
                        continue;
                memcpy(above, path, i);
                above[i] = '\0';
                if (i > 1 && fnmatch(pattern, above, FNM_NOESCAPE | FNM_PATHNAME) == 0)
                        return i;
        }
        return 0;
}

/* ---- what is in the file system ---------------------------------------------- */

static const char *const roots[] = { "/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd" };

#define N_ROOTS (sizeof(roots) / sizeof(roots[0]))

/* 0, -ENOENT; other errors: it is not known. */
static int look_in(const char *root, const char *path, struct stat *ret)
{
        char whole[CGROUP_PATH_BYTES + 64];

        if (snprintf(whole, sizeof(whole), "%s%s", root, path) >= (int)sizeof(whole))
                return -ENAMETOOLONG;
        if (stat(whole, ret) == 0)
                return 0;
        return errno == ENOTDIR ? -ENOENT : -errno;
}

bool cgroup_exists(const char *path)
{
        struct stat st;

        for (size_t i = 0; i < N_ROOTS; i++)
                if (look_in(roots[i], path, &st) != -ENOENT)
                        return true;
        return false;
}

bool cgroup_is_of_user(const char *path, uid_t uid)
{
        bool is_seen = false;
        struct stat st;

        for (size_t i = 0; i < N_ROOTS; i++) {
                int r = look_in(roots[i], path, &st);

                if (r == -ENOENT)
                        continue;
                if (r < 0 || st.st_uid != uid)
                        return false;
                is_seen = true;
        }
        return is_seen;
}
