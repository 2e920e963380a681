/* A change of the config under a broker that serves. All or nothing: everything is
 * checked and made first, and then put in force in one go that cannot fail, inside
 * one turn of the loop.
 *
 * Devices, partitions, how they grow and how they share stay (the config's reader sees
 * to that). Limits, reserves, counts, time-outs, tenants, their quotas and whom
 * they match may change. Sessions are not touched: they keep their tenant and their
 * quotas, also those that the new config has no more; what is removed is freed when
 * its last session has left. A limit may be lower than what is held: see account.h.
 *
 * Refused is what could not be kept: a reserve that others' charges have taken, a
 * device whose partitions' limits and what is held beyond them are more than it has,
 * more than the ledger has room for, and what partitions that preallocate would have to
 * back.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CHANGE_H
#define BFCD_CHANGE_H

#include <stdbool.h>
#include <stdio.h>

#include "daemon/broker.h"

/* Puts `next` in force, taken over on success; or, on a dry run, only says what that would
 * change. A sentence on a line for each change; on failure, in `errors`, for each
 * reason. -EINVAL: it cannot be done, now or while the daemon runs. -ENOMEM (also
 * said). On failure nothing has changed. Quotas whose limit is another one now have
 * limit_changed set. */
int change_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors);

#endif
