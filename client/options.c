/* Options; see options.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/options.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/process.h"
#include "proto/paths.h"

#define DEFAULT_SLAB_BYTES (UINT64_C(2) << 20)
#define MAX_SLAB_BYTES     (UINT64_C(1) << 30)
#define DEFAULT_RETURN_MS  30000u
#define MAX_WAIT_MS        (10u * 60u * 1000u)
#define MAX_TAG_BYTES      31u
#define MAX_METADATA_BYTES 4096u

/* Each of these structures begins with its size. */
static size_t size_of_struct(const void *s)
{
        size_t n_bytes;

        memcpy(&n_bytes, s, sizeof(n_bytes));
        return n_bytes;
}

/* A caller built against a later header may have more options, but they must be 0; one built against an earlier
 * header has at least n_least bytes, and the rest keeps its value. options: NULL: none. */
static int options_copy_from(const char *name, const void *options, void *ret, size_t n_bytes, size_t n_least)
{
        size_t struct_size = options ? size_of_struct(options) : n_bytes;
        const unsigned char *bytes = options;

        if (struct_size < n_least)
                return error_set(-EINVAL, "%s.struct_size is %zu: set it to sizeof(struct %s), %zu", name,
                                 struct_size, name, n_bytes);
        for (size_t i = n_bytes; i < struct_size; i++)
                if (bytes[i] != 0)
                        return error_set(-EINVAL,
                                         "%s has an option that this library version, %s, does not support",
                                         name, bfc_version());
        if (options)
                memcpy(ret, options, struct_size < n_bytes ? struct_size : n_bytes);
        return 0;
}

static int options_copy(const char *name, const void *options, void *ret, size_t n_bytes)
{
        return options_copy_from(name, options, ret, n_bytes, n_bytes);
}

bool client_takes_events(const struct bfc_options *options)
{
        return (options->flags & (BFC_NO_THREAD | BFC_POLL)) != BFC_NO_THREAD;
}

/* The option, or the environment variable (not in a set-user-ID program), or the default. */
static const char *pick(const char *option, const char *variable, const char *fallback)
{
        const char *value = option ? option : variable ? secure_getenv(variable) : NULL;

        return value && value[0] ? value : fallback;
}

/* Of a program that has replaced its title, as setproctitle() does, the arguments may have left nothing. */
static const char *program_name(void)
{
        static _Thread_local char comm[17];
        FILE *file;

        if (program_invocation_short_name[0])
                return program_invocation_short_name;
        file = fopen("/proc/self/comm", "re");
        comm[0] = '\0';
        if (file) {
                if (!fgets(comm, sizeof(comm), file))
                        comm[0] = '\0';
                fclose(file);
        }
        comm[strcspn(comm, "\n")] = '\0';
        return comm;
}

/* An environment variable that is on or off: sets that bit of the flags if it has this value. */
static int read_switch(const char *variable, const char *fallback, const char *value, uint64_t flag,
                       struct bfc_options *options)
{
        const char *word = pick(NULL, variable, fallback);

        if (strcmp(word, "on") != 0 && strcmp(word, "off") != 0)
                return error_set(-EINVAL, "%s is \"%s\": it must be on or off", variable, word);
        if (strcmp(word, value) == 0)
                options->flags |= flag;
        return 0;
}

/* The cache is on by default, but only if the daemon can reclaim idle memory in it. Otherwise it must be
 * requested. */
static int options_read_cache(struct bfc_options *options)
{
        bool is_asked_for = options->cache_idle_bytes > 0 || options->cache_slab_bytes > 0;
        const char *fallback = is_asked_for || client_takes_events(options) ? "on" : "off";

        if (options->cache_slab_bytes > MAX_SLAB_BYTES)
                return error_set(-EINVAL, "bfc_options.cache_slab_bytes is %llu: the maximum is %llu",
                                 (unsigned long long)options->cache_slab_bytes,
                                 (unsigned long long)MAX_SLAB_BYTES);
        if (options->cache_slab_bytes == 0)
                options->cache_slab_bytes = DEFAULT_SLAB_BYTES;
        return read_switch("BFC_CACHE", fallback, "off", BFC_NO_CACHE, options);
}

/* A number in an environment variable: *ret stays as it is without one. */
static int read_number(const char *variable, uint32_t least, uint32_t *ret)
{
        const char *word = pick(NULL, variable, "");
        unsigned long long n;
        char *end;

        if (!word[0])
                return 0;
        errno = 0;
        n = strtoull(word, &end, 10);
        if (word[0] < '0' || word[0] > '9' || *end || errno || n < least || n > UINT32_MAX)
                return error_set(-EINVAL, "%s is \"%s\": it must be a number from %u to %u", variable, word,
                                 least, UINT32_MAX);
        *ret = (uint32_t)n;
        return 0;
}

static int options_read_return(struct bfc_options *options)
{
        int r = options->return_ms == 0 ? read_number("BFC_RETURN_MS", 1, &options->return_ms) : 0;

        if (options->return_ms == 0)
                options->return_ms = DEFAULT_RETURN_MS;
        return r;
}

int client_read_timeout(uint32_t *ret_ms)
{
        uint32_t ms = 0;
        int r = read_number("BFC_WAIT_MS", 0, &ms);

        if (r == 0)
                *ret_ms = ms < MAX_WAIT_MS ? ms : MAX_WAIT_MS;
        return r;
}

int client_options_read(const struct bfc_options *options, struct bfc_options *ret)
{
        struct bfc_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.flags & ~(BFC_NO_THREAD | BFC_NO_CACHE | BFC_POLL | BFC_INHERIT))
                return error_set(-EINVAL,
                                 "bfc_options.flags has bits that this library version, %s, does not support",
                                 bfc_version());
        known.socket = pick(known.socket, "BFC_SOCKET", PATHS_CLIENT_SOCKET);
        known.partition = pick(known.partition, "BFC_PARTITION", "");
        known.tenant = pick(known.tenant, "BFC_TENANT", "");
        known.name = known.name && known.name[0] ? known.name : program_name();
        known.trace = pick(known.trace, "BFC_TRACE", NULL);
        *ret = known;
        r = options_read_return(ret);
        if (r == 0)
                r = read_switch("BFC_INHERIT", "off", "on", BFC_INHERIT, ret);
        return r < 0 ? r : options_read_cache(ret);
}

static uint32_t wait_at_most(uint32_t wait_ms)
{
        return wait_ms < MAX_WAIT_MS ? wait_ms : MAX_WAIT_MS;
}

static int check_cancel_fd(const char *name, int fd)
{
        return fd >= 0 ? 0
                       : error_set(-EINVAL, "%s.cancel_fd is %d: it must be a file descriptor, or 0 for none",
                                   name, fd);
}

int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret)
{
        struct bfc_malloc_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_malloc_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.tag && strnlen(known.tag, MAX_TAG_BYTES + 1) > MAX_TAG_BYTES)
                return error_set(-EINVAL, "bfc_malloc_options.tag is too long: at most %u bytes",
                                 MAX_TAG_BYTES);
        *ret = (struct malloc_how){ .cancel_fd = known.cancel_fd };
        ret->flags = known.flags;
        ret->wait_ms = wait_at_most(known.wait_ms);
        ret->tag = known.tag && known.tag[0] ? known.tag : NULL;
        *ret_partition = known.partition;
        return check_cancel_fd("bfc_malloc_options", known.cancel_fd);
}

int attach_options_read(const struct bfc_attach_options *options, struct bfc_attach_options *ret)
{
        struct bfc_attach_options known = { .struct_size = sizeof(known) };
        int r = options_copy_from("bfc_attach_options", options, &known, sizeof(known),
                                  offsetof(struct bfc_attach_options, flags));

        if (r < 0)
                return r;
        if (known.flags & ~BFC_ATTACH_READ_ONLY)
                return error_set(
                        -EINVAL,
                        "bfc_attach_options.flags has bits that this library version, %s, does not support",
                        bfc_version());
        known.wait_ms = wait_at_most(known.wait_ms);
        *ret = known;
        return check_cancel_fd("bfc_attach_options", known.cancel_fd);
}

int publish_options_read(const struct bfc_publish_options *options, struct bfc_publish_options *ret)
{
        struct bfc_publish_options known = { .struct_size = sizeof(known) };
        int r = options_copy("bfc_publish_options", options, &known, sizeof(known));

        if (r < 0)
                return r;
        if (known.n_metadata_bytes > 0 && !known.metadata)
                return error_set(-EINVAL, "bfc_publish_options.metadata is NULL");
        if (known.n_metadata_bytes > MAX_METADATA_BYTES)
                return error_set(-EINVAL, "bfc_publish_options.n_metadata_bytes is %zu: the maximum is %u",
                                 known.n_metadata_bytes, MAX_METADATA_BYTES);
        *ret = known;
        return 0;
}

int struct_check(const char *function, const void *ret, size_t n_least)
{
        if (!ret)
                return error_set(-EINVAL, "%s: ret is NULL", function);
        if (size_of_struct(ret) < n_least)
                return error_set(-EINVAL, "%s: struct_size is %zu: set it to the size of the structure, %zu",
                                 function, size_of_struct(ret), n_least);
        return 0;
}

void struct_fill(void *ret, size_t struct_size, const void *known, size_t n_bytes)
{
        memcpy((char *)ret + sizeof(size_t), (const char *)known + sizeof(size_t), n_bytes - sizeof(size_t));
        memset((char *)ret + n_bytes, 0, struct_size - n_bytes);
}
