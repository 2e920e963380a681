/* Park and wake: what the modules of the client do with parkable blocks; see bfcclient.h and blocks.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * No function may be called with the client's lock held. */
#ifndef BFC_CLIENT_PARK_H
#define BFC_CLIENT_PARK_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct parkable;

/* Parks idle blocks of a partition that were not used for idle_ms (the allocation, a wake and the end of a use
 * count as uses), those that are idle for the longest time first, until these have n_bytes. to: the partition for
 * the copies. tag: only such blocks; NULL: all. is_own: not blocks that a call begins to use, because the room is for
 * this client. *ret_bytes is always set: what was parked. 0: all that could be
 * parked was; an error is that of the last refusal, with a message. */
int client_park_idle(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint32_t idle_ms, uint32_t to,
                     const char *tag, bool is_own, uint64_t *ret_bytes);

/* Wakes the parked blocks of a partition. tag, *ret_bytes: as above. The first error. */
int client_wake_all(bfc_client *client, uint32_t partition, const char *tag, uint32_t wait_ms,
                    uint64_t *ret_bytes);

/* The one that a call parks or wakes and in which this place is; NULL: none. The lock is held. */
struct parkable *client_find_busy(const bfc_client *client, const void *ptr);

/* A call found no block that is used at this place. True: another call parked or woke it, and has ended; search
 * again. The lock is held, and is released meanwhile. */
bool client_wait_parkable(bfc_client *client, const void *ptr);

/* Some blocks of a call. */
struct block_set {
        const void **ptrs;
        size_t n;
        bool skips_others; /* what is no block any more is left out; else it is an error */
};

/* Wakes those that are parked. ret_bytes: of these; NULL. The first error. */
int client_wake_set(bfc_client *client, const struct block_set *set, uint32_t wait_ms, uint64_t *ret_bytes);

/* A copy of bfc_read() or bfc_write(): nothing parks the block meanwhile. The lock is held. */
void client_begin_copy(struct parkable *p);
/* The lock is not held. */
void client_end_copy(bfc_client *client, const void *ptr);

#endif
