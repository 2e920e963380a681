/* Memory that is left; see host_free.h. A look costs some ten system calls, which is little beside
 * filling an extent; it is bounded by the number of parents that count.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_free.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_GROUPS   64u
#define MARGIN_BYTES (UINT64_C(16) << 20)

/* From its beginning, as much as fits; false: it cannot be read. */
static bool read_text(const char *path, char *ret, size_t n_ret)
{
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        size_t n_text = 0;
        ssize_t n = -1;

        if (fd < 0)
                return false;
        /* A file of /proc may come in parts. */
        while (n_text < n_ret - 1 && (n = read(fd, ret + n_text, n_ret - 1 - n_text)) > 0)
                n_text += (size_t)n;
        close(fd);
        ret[n_text] = '\0';
        return n >= 0;
}

uint32_t host_free_oom_kills(void)
{
        static const char key[] = "\noom_kill ";
        char text[16384];
        const char *found;

        if (!read_text("/proc/vmstat", text, sizeof(text)))
                return 0;
        found = strstr(text, key);
        return found ? (uint32_t)strtoul(found + sizeof(key) - 1, NULL, 10) : 0;
}

/* "max" and what cannot be read are no limit. */
static uint64_t read_number(const char *folder, const char *name, uint64_t fallback)
{
        char path[PATH_MAX], text[32], *end;
        unsigned long long n;

        if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, name) >= sizeof(path) ||
            !read_text(path, text, sizeof(text)) || text[0] < '0' || text[0] > '9')
                return fallback;
        errno = 0;
        n = strtoull(text, &end, 10);
        return errno == 0 && (*end == '\n' || *end == '\0') ? n : fallback;
}

/* Page cache that was not used lately: the kernel drops it before it kills. */
static uint64_t read_inactive_file(const char *folder)
{
        static const char key[] = "\ninactive_file ";
        char path[PATH_MAX], text[4096];
        const char *found;

        if ((size_t)snprintf(path, sizeof(path), "%s/memory.stat", folder) >= sizeof(path) ||
            !read_text(path, text, sizeof(text)))
                return 0;
        found = strstr(text, key);
        return found ? strtoull(found + strlen(key), NULL, 10) : 0;
}

static uint64_t group_room(const char *folder, uint64_t *limit_bytes)
{
        uint64_t max = read_number(folder, "memory.max", UINT64_MAX);
        uint64_t high = read_number(folder, "memory.high", UINT64_MAX);
        uint64_t limit = high < max ? high : max, current, cache;

        if (limit == UINT64_MAX)
                return UINT64_MAX;
        *limit_bytes = limit < *limit_bytes ? limit : *limit_bytes;
        current = read_number(folder, "memory.current", 0);
        cache = read_inactive_file(folder);
        current -= cache < current ? cache : current;
        return current < limit ? limit - current : 0;
}

/* The path behind "0::" in the text. */
static bool own_path(const char *own, const char **ret, size_t *ret_n)
{
        const char *line = own;

        while (line && strncmp(line, "0::/", 4) != 0) {
                line = strchr(line, '\n');
                line = line ? line + 1 : NULL;
        }
        if (!line)
                return false;
        *ret = line + 3;
        *ret_n = strcspn(line + 3, "\n");
        return true;
}

uint64_t host_free_in_groups(const char *root, const char *own, uint64_t *ret_limit_bytes)
{
        uint64_t room = UINT64_MAX, limit = UINT64_MAX;
        size_t n_root = strlen(root), n_path = 0;
        char folder[PATH_MAX];
        const char *path;

        if (own_path(own, &path, &n_path) && n_root + n_path < sizeof(folder)) {
                memcpy(folder, root, n_root);
                memcpy(folder + n_root, path, n_path);
                folder[n_root + n_path] = '\0';
                /* Up to the root: in a container that is a group with limits, too. */
                for (unsigned i = 0; i < MAX_GROUPS; i++) {
                        uint64_t here = group_room(folder, &limit);
                        char *slash;

                        room = here < room ? here : room;
                        if (strlen(folder) <= n_root)
                                break;
                        slash = strrchr(folder, '/');
                        *slash = '\0';
                }
        }
        if (ret_limit_bytes)
                *ret_limit_bytes = limit;
        return room;
}

/* of: NULL: the own ones. */
static uint64_t groups(const char *of, uint64_t *ret_limit_bytes)
{
        static const char *const roots[] = { "/sys/fs/cgroup/unified", "/sys/fs/cgroup" };
        bool is_mixed = access("/sys/fs/cgroup/unified/cgroup.procs", F_OK) == 0;
        char own[PATH_MAX];

        *ret_limit_bytes = UINT64_MAX;
        if (!of && !read_text("/proc/self/cgroup", own, sizeof(own)))
                return UINT64_MAX;
        return host_free_in_groups(roots[is_mixed ? 0 : 1], of ? of : own, ret_limit_bytes);
}

static uint64_t machine_bytes(void)
{
        char text[512];
        const char *found;

        if (!read_text("/proc/meminfo", text, sizeof(text)))
                return UINT64_MAX;
        found = strstr(text, "MemAvailable:");
        return found ? strtoull(found + strlen("MemAvailable:"), NULL, 10) * 1024 : UINT64_MAX;
}

uint64_t host_free_needed(uint64_t n_bytes)
{
        uint64_t more = MARGIN_BYTES + n_bytes / 64;

        return n_bytes <= UINT64_MAX - more ? n_bytes + more : UINT64_MAX;
}

int host_free_check(uint64_t n_bytes)
{
        uint64_t limit;

        if (n_bytes > machine_bytes())
                return -ENOMEM;
        return host_free_needed(n_bytes) > groups(NULL, &limit) ? -ENOBUFS : 0;
}

static uint64_t node_number(const char *meminfo, const char *key, uint64_t fallback)
{
        const char *found = strstr(meminfo, key);

        return found ? strtoull(found + strlen(key), NULL, 10) * 1024 : fallback;
}

/* A node has no MemAvailable: free memory, and page cache that was not used lately. */
uint64_t host_free_in_node(const char *meminfo)
{
        uint64_t n_free = node_number(meminfo, "MemFree:", UINT64_MAX);

        return n_free == UINT64_MAX ? n_free : n_free + node_number(meminfo, "Inactive(file):", 0);
}

int host_free_check_node(uint32_t node, uint64_t n_bytes)
{
        char path[64], text[4096];

        snprintf(path, sizeof(path), "/sys/devices/system/node/node%u/meminfo", node);
        if (!read_text(path, text, sizeof(text)))
                return 0;
        return host_free_needed(n_bytes) > host_free_in_node(text) ? -ENOMEM : 0;
}

static pthread_mutex_t turn_mutex = PTHREAD_MUTEX_INITIALIZER; /* one thread at a time begins */
static pthread_mutex_t making_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t made = PTHREAD_COND_INITIALIZER;
static uint64_t making_bytes; /* under the mutex */

/* Memory that is half made is counted twice here, by the kernel and in making_bytes, and as if all of it were
 * for this node: so a refusal is final only when none is. Others that begin meanwhile wait behind it: else small
 * ones that follow each other could keep it waiting for ever. */
int host_free_begin(const uint32_t *node, uint64_t n_bytes)
{
        int r;

        pthread_mutex_lock(&turn_mutex);
        pthread_mutex_lock(&making_mutex);
        for (;;) {
                r = n_bytes > UINT64_MAX - making_bytes ? -ENOMEM : host_free_check(n_bytes + making_bytes);
                if (r == 0 && node)
                        r = host_free_check_node(*node, n_bytes + making_bytes);
                if (r == 0 || making_bytes == 0)
                        break;
                pthread_cond_wait(&made, &making_mutex);
        }
        if (r == 0)
                making_bytes += n_bytes;
        pthread_mutex_unlock(&making_mutex);
        pthread_mutex_unlock(&turn_mutex);
        return r;
}

void host_free_end(uint64_t n_bytes)
{
        pthread_mutex_lock(&making_mutex);
        making_bytes -= n_bytes;
        pthread_cond_broadcast(&made);
        pthread_mutex_unlock(&making_mutex);
}

uint64_t host_free_bytes(void)
{
        uint64_t limit, room = groups(NULL, &limit), machine = machine_bytes();

        return room < machine ? room : machine;
}

uint64_t host_free_limit(const char *of)
{
        uint64_t limit;

        (void)groups(of, &limit);
        return limit;
}
