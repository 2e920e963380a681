/* Shared blocks: published or attached ones, with reference counts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_SHARED_H
#define BFC_CLIENT_SHARED_H

#include <bfcclient.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHARED_NONE = 1 };

struct shared_count {
        uint64_t block_id;
        uint32_t count;
};

/* Drops one reference. SHARED_NONE: the block is not shared. *ret_stays: this process still has it, perhaps
 * because the call failed; not set with SHARED_NONE. waits: for the work that may use the block. The lock is not held. */
int shared_detach(bfc_client *client, const void *ptr, bool waits, bool *ret_stays);

bool shared_has(const bfc_client *client, const void *ptr);          /* the lock is held */
bool shared_is_read_only(const bfc_client *client, const void *ptr); /* the same */
void shared_clear(bfc_client *client);                               /* forgets all */

/* How many the daemon knows as shared; lists the first so many. The lock is held. */
size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max);

#endif
