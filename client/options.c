/* What a caller asks of a bfc_malloc_with(); see client.h.
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
static int malloc_options_copy(const struct bfc_malloc_options *options, struct bfc_malloc_options *ret)
{
        const unsigned char *bytes = (const unsigned char *)options;

        if (options->struct_size < MALLOC_OPTIONS_MIN_BYTES)
                return error_set(
                        -EINVAL,
                        "bfc_malloc_options.struct_size is %zu: set it to sizeof(struct bfc_malloc_options), %zu",
                        options->struct_size, sizeof(*ret));
        for (size_t i = sizeof(*ret); i < options->struct_size; i++)
                if (bytes[i] != 0)
                        return error_set(
                                -EINVAL,
                                "bfc_malloc_options has an option that this library version, %s, does not "
                                "support",
                                bfc_version());
        memcpy(ret, options, options->struct_size < sizeof(*ret) ? options->struct_size : sizeof(*ret));
        return 0;
}

int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret)
{
        struct bfc_malloc_options known = { .struct_size = sizeof(known) };
        int r = options ? malloc_options_copy(options, &known) : 0;

        if (r < 0)
                return r;
        if (known.tag && strnlen(known.tag, MAX_TAG_BYTES + 1) > MAX_TAG_BYTES)
                return error_set(-EINVAL, "bfc_malloc_options.tag is too long: at most %u bytes",
                                 MAX_TAG_BYTES);
        *ret = (struct malloc_how){ .cancel_fd = known.cancel_fd };
        ret->flags = known.flags;
        ret->wait_ms = known.wait_ms < MAX_WAIT_MS ? known.wait_ms : MAX_WAIT_MS;
        ret->tag = known.tag && known.tag[0] ? known.tag : NULL;
        if (known.cancel_fd < 0)
                return error_set(-EINVAL,
                                 "bfc_malloc_options.cancel_fd is %d, which is not a file descriptor",
                                 known.cancel_fd);
        *ret_partition = known.partition;
        return 0;
}
