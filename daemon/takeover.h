/* Taking over: the broker of a process that was started in the place of another begins with
 * its ledger and its extents, from the service manager's store.
 *
 * Quotas are known by tenant and partition, and keep their places in the ledger, of which the
 * ids of regions are made. What the config has no more is like what a reload removed: it
 * stays for those who have it. What cannot be taken over (a damaged record, an extent that the
 * manager does not have, a partition that is gone) is closed, and said in the log: its memory
 * stays charged, its sessions cannot come back, and the tenant goes on with what is left
 * of its limit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TAKEOVER_H
#define BFCD_TAKEOVER_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/broker.h"

/* Daemons in a row that crashed with a ledger, after which it is left alone. */
#define TAKEOVER_MAX_CRASHES 5u

struct broker_records { /* that the limits allow to be in use */
        uint64_t n_quotas, n_extents, n_exports, n_blocks, n_holds;
};

/* Opens the store's ledger, or makes one with b->room, which becomes the ledger's, and puts it
 * there; one whose tables were made for less than n has a larger one in its place. */
int takeover_ledger(struct broker *b, const struct broker_records *n, char *ret_sentence, size_t n_sentence);

/* All quotas of the config and of b->remains; tenants of the config are there, without quotas. */
int takeover_quotas(struct broker *b, char *ret_sentence, size_t n_sentence);

#endif
