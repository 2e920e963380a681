/* Finding the library that a proxy is in front of; see find.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "integrations/preload/find.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CACHE "/etc/ld.so.cache"

/* ---- where it can be -------------------------------------------------------- */

/* NULL: there is none at this path, or it is a proxy. */
static void *open_library(const struct found *f, const char *path)
{
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);

        if (handle && (dlsym(handle, f->marker) || !dlsym(handle, f->function))) {
                dlclose(handle);
                return NULL;
        }
        return handle;
}

static void *open_in_folder(const struct found *f, const char *folder, size_t n)
{
        char path[PATH_MAX];

        /* An empty element is the working directory, from which no driver is loaded. */
        if (n == 0 ||
            (size_t)snprintf(path, sizeof(path), "%.*s/%s", (int)n, folder, f->name) >= sizeof(path))
                return NULL;
        return open_library(f, path);
}

static void *open_in_path(const struct found *f, const char *folders)
{
        void *handle = NULL;

        while (folders && *folders && !handle) {
                size_t n = strcspn(folders, ":;");

                handle = open_in_folder(f, folders, n);
                folders += n + (folders[n] != '\0');
        }
        return handle;
}

/* The format of glibc 2.2 and later, which may follow an older one in the file. */
struct cache_header {
        char magic[20]; /* with the version, without a 0 */
        uint32_t n_entries, n_string_bytes;
        uint32_t unused[5];
};

struct cache_entry {
        int32_t flags;
        uint32_t name, path; /* offsets of strings from the header */
        uint32_t os_version;
        uint64_t hwcap;
};

static const char *cache_string(const char *begin, size_t n_bytes, uint32_t offset)
{
        return offset < n_bytes && memchr(begin + offset, '\0', n_bytes - offset) ? begin + offset : "";
}

static void *open_in_cache(const struct found *f, const char *text, size_t n_bytes)
{
        static const char magic[] = "glibc-ld.so.cache1.1";
        const char *begin = memmem(text, n_bytes, magic, sizeof(magic) - 1);
        struct cache_header header;
        struct cache_entry entry;
        void *handle = NULL;

        if (!begin || n_bytes - (size_t)(begin - text) < sizeof(header))
                return NULL;
        n_bytes -= (size_t)(begin - text);
        memcpy(&header, begin, sizeof(header));
        for (size_t i = 0; i < header.n_entries && !handle; i++) {
                size_t at = sizeof(header) + i * sizeof(entry);

                if (at + sizeof(entry) > n_bytes)
                        break;
                memcpy(&entry, begin + at, sizeof(entry));
                if (strcmp(cache_string(begin, n_bytes, entry.name), f->name) == 0)
                        handle = open_library(f, cache_string(begin, n_bytes, entry.path));
        }
        return handle;
}

static void *open_cached(const struct found *f)
{
        FILE *file = fopen(CACHE, "re");
        char *text = NULL;
        void *handle = NULL;
        long n;

        if (!file)
                return NULL;
        if (fseek(file, 0, SEEK_END) == 0 && (n = ftell(file)) > 0 && fseek(file, 0, SEEK_SET) == 0)
                text = malloc((size_t)n);
        if (text && fread(text, 1, (size_t)n, file) == (size_t)n)
                handle = open_in_cache(f, text, (size_t)n);
        free(text);
        fclose(file);
        return handle;
}

void *find_library(const struct found *f)
{
        static const char folders[] =
#if defined(__x86_64__)
                "/usr/lib/x86_64-linux-gnu:"
#else
                "/usr/lib/aarch64-linux-gnu:"
#endif
                "/usr/lib64:/usr/lib:/usr/lib/wsl/lib:/run/opengl-driver/lib";
        const char *path = getenv(f->variable);
        void *handle;

        if (path && *path)
                return open_library(f, path);
        handle = open_in_path(f, getenv("LD_LIBRARY_PATH"));
        if (!handle)
                handle = open_cached(f);
        return handle ? handle : open_in_path(f, folders);
}
