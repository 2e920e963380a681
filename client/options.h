/* Options of a client and of its calls.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_OPTIONS_H
#define BFC_CLIENT_OPTIONS_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stdint.h>

struct block;
struct client_call;

/* The options as this library knows them, completed by the environment. -EINVAL with a message. */
int client_options_read(const struct bfc_options *options, struct bfc_options *ret);

/* BFC_WAIT_MS: how long an allocation for a framework waits. -EINVAL with a message. */
int client_read_timeout(uint32_t *ret_ms);

/* A thread serves the daemon's events, or the program polls. */
bool client_takes_events(const struct bfc_options *options);

/* How a block is requested. */
struct malloc_how {
        uint64_t flags;           /* BFC_ONE_EXTENT, BFC_WHOLE, BFC_PARKABLE */
        uint32_t wait_ms;         /* for room */
        const char *tag;          /* NULL: none */
        struct block *ret_slab;   /* NULL; else of a stream's pool: not counted; see client_return_slab() */
        bool is_stream_permanent; /* it is never destroyed */
        bool again;               /* the caller repeats it after a refusal */
        int cancel_fd;            /* 0: none */
        struct client_call *call; /* client_malloc()'s own */
};

/* Check a caller's options, NULL for none, and copy them. -EINVAL with a message. */
int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret);
int attach_options_read(const struct bfc_attach_options *options, struct bfc_attach_options *ret);
int publish_options_read(const struct bfc_publish_options *options, struct bfc_publish_options *ret);

/* A caller's structure has at least the size of the first version. -EINVAL with a message. */
int struct_check(const char *function, const void *ret, size_t n_least);
/* Fills a caller's structure, which may be of an earlier or a later header: the rest is set to 0. */
void struct_fill(void *ret, size_t struct_size, const void *known, size_t n_bytes);

#endif
