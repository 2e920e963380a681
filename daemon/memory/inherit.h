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

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/ledger/ledger.h"
#include "daemon/ledger/store.h"
#include "daemon/memory/arena.h"
#include "device/device.h"

struct broker;
struct capacity_records;
struct quota;

/* ---- the records by quota, each with its extents and blocks in order, and the extents' fds from the store ---- */

/* Records without further use are finished or dropped here: extents that were being released, and everything in an arena
 * that is closed or whose memory ended with the process. */

struct inherited_quota {
        uint32_t index; /* in the ledger */
        uint64_t id;
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        bool is_lease;
        uint32_t lease;                  /* its record in the ledger; LEDGER_NONE: none */
        bool is_closed;                  /* in the ledger too */
        struct quota *quota;             /* the broker's quota for it; NULL: none */
        bool has_sessions;               /* some session of its tenant was told of it */
        uint64_t n_bytes;                /* of its extents */
        uint64_t direct_bytes;           /* direct charges of its sessions, and unreclaimed memory */
        uint32_t growing_mib, oom_kills; /* see ledger_quota */
        struct ledger_lifetime life;
        struct arena_inherited arena;
};

/* True: extents of the partition that are being released are released later by the arena, which gets them
 * with the others. */
typedef bool (*inherited_later_fn)(void *userdata, const char *partition);

struct inherited {
        struct ledger *ledger;
        struct store *store; /* borrowed */
        inherited_later_fn is_later;
        void *userdata;
        int error; /* an fd could not be had, although it may be there; 0: all is known */
        struct inherited_quota *quotas; /* by tenant and partition, and of these by id */
        size_t n_quotas;
        uint32_t *extents; /* in the ledger, by quota and offset */
        int *fds;          /* owned until an arena takes them; -1: none */
        size_t n_extents;
        uint32_t *blocks; /* the same */
        size_t n_blocks;
};

struct inherited *inherited_free(struct inherited *r); /* closes the remaining fds; takes NULL */

/* The index in `quotas` of the tenant's first one. */
size_t inherited_first_of(const struct inherited *r, const char *tenant);

/* ---- the ledger and the quotas ---- */

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
