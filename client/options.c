/* What a caller asks of bfc_malloc_with() and bfc_attach_with(); see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/client.h"
#include "client/error.h"

#define MALLOC_OPTIONS_MIN_BYTES (offsetof(struct bfc_malloc_options, tag) + sizeof(char *)) /* the first's */
#define MAX_WAIT_MS              (10u * 60u * 1000u)
#define MAX_TAG_BYTES            31u

/* A caller built against a later header may have more, as long as it asks for nothing there. */
static int options_copy(const char *name, const void *options, size_t struct_size, size_t n_least, void *ret,
                        size_t n_bytes)
{
        const unsigned char *bytes = options;

        if (struct_size < n_least)
                return error_set(-EINVAL, "%s.struct_size is %zu: set it to sizeof(struct %s), %zu", name,
                                 struct_size, name, n_bytes);
        for (size_t i = n_bytes; i < struct_size; i++)
                if (bytes[i] != 0)
                        return error_set(-EINVAL,
                                         "%s has an option that this library version, %s, does not support",
                                         name, bfc_version());
        memcpy(ret, options, struct_size < n_bytes ? struct_size : n_bytes);
        return 0;
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
        int r = options ? options_copy("bfc_malloc_options", options, options->struct_size,
                                       MALLOC_OPTIONS_MIN_BYTES, &known, sizeof(known))
                        : 0;

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
        int r = options ? options_copy("bfc_attach_options", options, options->struct_size, sizeof(known),
                                       &known, sizeof(known))
                        : 0;

        if (r < 0)
                return r;
        known.wait_ms = wait_at_most(known.wait_ms);
        *ret = known;
        return check_cancel_fd("bfc_attach_options", known.cancel_fd);
}
