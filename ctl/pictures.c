/* bfcctl map; see pictures.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/pictures.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ctl/map_ask.h"
#include "ctl/show.h"

#define MAP_WIDTH 100 /* where there is no terminal */

static int fail_to_write(struct ask *a, const char *path, int r)
{
        if (r == -ENOMEM)
                snprintf(a->error, sizeof(a->error), "Out of memory.");
        else if (path)
                snprintf(a->error, sizeof(a->error), "%s cannot be written: %s", path, strerror(-r));
        else
                snprintf(a->error, sizeof(a->error), "Standard output cannot be written: %s", strerror(-r));
        return r;
}

/* Writes and closes. */
static int finish(FILE *out, int (*write)(FILE *out, const void *what), const void *what)
{
        int r = write(out, what);

        errno = 0;
        if (fclose(out) != 0 && r == 0)
                r = errno > 0 ? -errno : -EIO;
        return r;
}

/* A device, a FIFO or a symbolic link, such as /dev/stdout. */
static int write_directly(const char *path, int (*write)(FILE *out, const void *what), const void *what)
{
        FILE *out = fopen(path, "we");

        return out ? finish(out, write, what) : -errno;
}

static mode_t new_mode(void)
{
        mode_t mask = umask(0);

        (void)umask(mask);
        return 0666 & ~mask;
}

/* A regular file, or a new one: the path has the old file until the new one is complete. */
static int replace(const char *path, mode_t mode, int (*write)(FILE *out, const void *what), const void *what)
{
        char *temporary;
        FILE *out;
        int fd, r;

        if (asprintf(&temporary, "%s.XXXXXX", path) < 0)
                return -ENOMEM;
        fd = mkostemp(temporary, O_CLOEXEC);
        if (fd < 0) {
                r = -errno;
                free(temporary);
                return r;
        }
        out = fchmod(fd, mode) == 0 ? fdopen(fd, "w") : NULL;
        if (out) {
                r = finish(out, write, what);
        } else {
                r = -errno;
                close(fd);
        }
        if (r == 0 && rename(temporary, path) < 0)
                r = -errno;
        if (r < 0)
                (void)unlink(temporary);
        free(temporary);
        return r;
}

static int write_path(const char *path, int (*write)(FILE *out, const void *what), const void *what)
{
        struct stat st;

        if (lstat(path, &st) < 0)
                return errno == ENOENT ? replace(path, new_mode(), write, what) : -errno;
        if (!S_ISREG(st.st_mode))
                return write_directly(path, write, what);
        if (faccessat(AT_FDCWD, path, W_OK, AT_EACCESS) < 0)
                return -errno;
        return replace(path, st.st_mode & 0777, write, what);
}

/* To a file, or to standard output if path is "-". */
static int write_to(struct ask *a, const char *path, int (*write)(FILE *out, const void *what),
                    const void *what)
{
        bool is_stdout = strcmp(path, "-") == 0;
        int r = is_stdout ? write(stdout, what) : write_path(path, write, what);

        return r < 0 ? fail_to_write(a, is_stdout ? NULL : path, r) : 0;
}

/* ---- map ------------------------------------------------------------------------- */

static size_t terminal_width(void)
{
        struct winsize size;

        return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : MAP_WIDTH;
}

static int write_svg(FILE *out, const void *map)
{
        return map_svg(out, map, MAP_COLUMNS, true);
}

int pictures_map(struct ask *a, const struct pictures_map *request)
{
        bool is_picture = request->svg || request->json;
        struct map *m;
        int r = map_ask(a, request->partition, request->tenant,
                        is_picture ? MAP_COLUMNS : map_text_columns(terminal_width()), is_picture, &m);

        if (r < 0)
                return r;
        if (request->svg) {
                r = write_to(a, request->svg, write_svg, m);
        } else {
                r = request->json ? show_print(stdout, map_json(m)) : map_text(stdout, m);
                r = r < 0 ? fail_to_write(a, NULL, r) : 0;
        }
        map_free(m);
        return r;
}
