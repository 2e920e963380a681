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

/* Drops one reference. SHARED_NONE: the block is not shared. *ret_stays: this process still has it, perhaps
 * because the call failed; not set with SHARED_NONE. waits: for the work that may use the block. The lock is not held. */
int shared_detach(bfc_client *client, const void *ptr, bool waits, bool *ret_stays);

#endif
