/* Inheriting: a daemon that replaces another one starts with its ledger and extents, from the service
 * manager's store.
 *
 * Quotas are identified by tenant and partition, and keep their indexes in the ledger, from which region
 * ids are made. Objects that the config no longer has are treated like those that a reload removed: they
 * stay for their sessions. What cannot be inherited (a damaged record, an extent that the manager does
 * not have, a partition that is gone) is closed and logged: its memory stays charged, its sessions cannot
 * be resumed, and the tenant continues with the rest of its limit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_INHERIT_H
#define BFCD_INHERIT_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/broker.h"

/* After this number of consecutive crashes with a ledger it is not used any more. */
#define INHERIT_MAX_CRASHES 5u

/* A quota or a session at which the previous daemon crashed is left aside, and the rest is restored. After so many
 * in a row the ledger is not used any more. */
#define INHERIT_MAX_ASIDE 32u

/* Opens the store's ledger, or makes one for n, and stores it.
 * A ledger whose tables are smaller than n is replaced by a larger one. */
int inherit_ledger(struct broker *b, const struct capacity_records *n, char *ret_sentence, size_t n_sentence);

/* Makes all quotas of the config and of b->inherited; the tenants of the config exist already, without
 * quotas. */
int inherit_quotas(struct broker *b, char *ret_sentence, size_t n_sentence);

#endif
