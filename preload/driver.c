/* Finding the real driver; see driver.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * By name the dynamic linker would find the proxy again, so the driver is opened by its path: that of
 * BFC_CUDA_LIBRARY, else the first libcuda.so.1 that is no proxy, in the order of the dynamic linker: LD_LIBRARY_PATH,
 * ld.so.cache, the standard folders. */
#include "preload/driver.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"
#define CACHE   "/etc/ld.so.cache"

static void *library;

/* ---- where it can be -------------------------------------------------------- */

/* NULL: there is none at this path, or it is a proxy. */
static void *open_driver(const char *path)
{
        void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);

        if (handle && (dlsym(handle, "bfc_preload_driver") || !dlsym(handle, "cuInit"))) {
                dlclose(handle);
                return NULL;
        }
        return handle;
}

static void *open_in_folder(const char *folder, size_t n)
{
        char path[PATH_MAX];

        /* An empty element is the working directory, from which no driver is loaded. */
        if (n == 0 || (size_t)snprintf(path, sizeof(path), "%.*s/" LIBRARY, (int)n, folder) >= sizeof(path))
                return NULL;
        return open_driver(path);
}

static void *open_in_path(const char *folders)
{
        void *handle = NULL;

        while (folders && *folders && !handle) {
                size_t n = strcspn(folders, ":;");

                handle = open_in_folder(folders, n);
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

static void *open_in_cache(const char *text, size_t n_bytes)
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
                if (strcmp(cache_string(begin, n_bytes, entry.name), LIBRARY) == 0)
                        handle = open_driver(cache_string(begin, n_bytes, entry.path));
        }
        return handle;
}

static void *open_cached(void)
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
                handle = open_in_cache(text, (size_t)n);
        free(text);
        fclose(file);
        return handle;
}

static void load(void)
{
        static const char folders[] =
#if defined(__x86_64__)
                "/usr/lib/x86_64-linux-gnu:"
#else
                "/usr/lib/aarch64-linux-gnu:"
#endif
                "/usr/lib64:/usr/lib:/usr/lib/wsl/lib:/run/opengl-driver/lib";
        const char *path = getenv("BFC_CUDA_LIBRARY");

        if (path && *path) {
                library = open_driver(path);
                return;
        }
        library = open_in_path(getenv("LD_LIBRARY_PATH"));
        if (!library)
                library = open_cached();
        if (!library)
                library = open_in_path(folders);
}

void *bfc_preload_driver(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, load);
        return library;
}

/* ---- its functions ----------------------------------------------------------- */

extern void *preload_slots[];

static const char *const symbols[] = {
#define OWN(symbol, base, version, per_thread, arguments) #symbol,
#include "preload/own.h"
#undef OWN
#define FORWARD(symbol) #symbol,
#include "preload/names.h"
#undef FORWARD
};

static CUresult no_driver(void)
{
        return CUDA_ERROR_NO_DEVICE;
}

/* An older driver. */
static CUresult no_function(void)
{
        return CUDA_ERROR_NOT_SUPPORTED;
}

void *driver_symbol(const char *symbol)
{
        void *handle = bfc_preload_driver();

        return handle ? dlsym(handle, symbol) : NULL;
}

bool driver_is_proxy(const void *function)
{
        Dl_info of_function, own;

        return dladdr(function, &of_function) && dladdr(preload_slots, &own) &&
               of_function.dli_fbase == own.dli_fbase;
}

void *preload_resolve(void **slot)
{
        void *found = driver_symbol(symbols[slot - preload_slots]);
        CUresult (*missing)(void) = bfc_preload_driver() ? no_function : no_driver;

        if (!found)
                memcpy(&found, &missing, sizeof(found));
        __atomic_store_n(slot, found, __ATOMIC_RELEASE);
        return found;
}
