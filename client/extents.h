/* Extents: the memory that the daemon shares with this process, and reclaims.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_EXTENTS_H
#define BFC_CLIENT_EXTENTS_H

#include <bfcclient.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct device_range;

/* For call.h: maps them, before the reply whose block is there. */
int client_on_extents(void *userdata, const Bfcd__Extents *extents, int *fds);
/* For events.h: unmaps them. */
int client_on_retire(bfc_client *client, uint64_t epoch, const Bfcd__Retire *retire);

/* The address of a block that the daemon granted. Tries again to map extents that failed before. The lock
 * is held. -EPROTO: no block can be there. -ECANCELED: it cannot be mapped, *ret_why says why. */
int client_resolve(bfc_client *client, const Bfcd__Block *block, int *ret_why, void **ret_ptr);
/* Sets the error for that, and returns it. */
int client_unmappable(const bfc_client *client, uint32_t partition, int why);

/* Waits for the work in a range, before a block there is freed. -EBUSY: a stream is being captured. The
 * message is set. The lock is not held. */
int client_finish(bfc_client *client, uint32_t partition, struct device_range *range);

#endif
