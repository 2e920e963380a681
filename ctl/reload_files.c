/* The files of bfcctl reload --dry-run FILE; see reload.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/reload.h"

#define MAX_CONFIG_BYTES (((size_t)1 << 20) + 1) /* the daemon refuses one more than it takes */

static int fail_to_read(struct ask *a, const char *path, int error)
{
        snprintf(a->error, sizeof(a->error), "%s cannot be read: %s", path, strerror(error));
        return -error;
}

/* Reads the file as this user. The sandbox hides some folders from the daemon. */
static int send_file(struct ask *a, const char *path)
{
        char *text = malloc(MAX_CONFIG_BYTES);
        FILE *f = fopen(path, "re");
        size_t n;
        int r;

        if (!text || !f || ((n = fread(text, 1, MAX_CONFIG_BYTES, f)), ferror(f)))
                r = fail_to_read(a, path, errno);
        else
                r = ask_reload_text(a, path, text, n);
        if (f)
                fclose(f);
        free(text);
        return r;
}

static int is_yaml(const struct dirent *e)
{
        size_t n = strlen(e->d_name);

        return e->d_name[0] != '.' && n > 5 && strcmp(e->d_name + n - 5, ".yaml") == 0;
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
        return strcmp((*a)->d_name, (*b)->d_name);
}

int reload_send_files(struct ask *a, const char *path)
{
        const char *slash = strrchr(path, '/');
        int n_folder = slash ? (int)(slash - path) + 1 : 0, n, r = send_file(a, path);
        char *folder = NULL, *file = NULL;
        struct dirent **entries = NULL;

        if (r < 0)
                return r;
        if (asprintf(&folder, "%.*sconf.d", n_folder, path) < 0)
                return fail_to_read(a, path, ENOMEM);
        n = scandir(folder, &entries, is_yaml, by_name);
        if (n < 0 && errno != ENOENT)
                r = fail_to_read(a, folder, errno);
        for (int i = 0; i < n; i++) {
                if (r == 0 && asprintf(&file, "%s/%s", folder, entries[i]->d_name) < 0)
                        r = fail_to_read(a, folder, ENOMEM);
                else if (r == 0) {
                        r = send_file(a, file);
                        free(file);
                }
                free(entries[i]);
        }
        free(entries);
        free(folder);
        return r;
}
