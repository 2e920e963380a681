/* A change of the config while the broker serves. It is all or nothing: everything is checked and made
 * first, and then applied by steps that cannot fail, in one turn of the loop.
 *
 * Devices, partitions, and their growth and share modes stay; the config reader ensures that. Limits,
 * reserves, counts, time-outs, tenants, their quotas and matches may change. Sessions keep their tenant
 * and quotas, including those that the new config lacks: these are freed after their last session has
 * left. A limit may be lower than what is charged: see account.h.
 *
 * A change is refused if it cannot be guaranteed: a reserve that other tenants have charged, a device too
 * small for its partitions' limits and charges beyond them, more records than the ledger has room for,
 * and new memory of partitions that preallocate.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_CHANGE_H
#define BFCD_CHANGE_H

#include <stdbool.h>
#include <stdio.h>

#include "daemon/memory/broker.h"

/* Applies `next`, and owns it on success. A dry run only reports. Each change is a line in `changes`;
 * each reason of a failure is a line in `errors`. -EINVAL: the change is refused. -ENOMEM. On failure
 * nothing has changed. Quotas whose limit has changed have limit_changed set. */
int change_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors);

#endif
