/* The inherited quotas: the ledger's records by quota, each with its extents and blocks in order, and the
 * extents' fds from the store. The broker makes its quotas from them.
 *
 * Records without further use are finished or dropped here: extents that were being released, and
 * everything in an arena that is closed or whose memory ended with the process.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_INHERITED_H
#define BFCD_INHERITED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/memory/arena.h"
#include "daemon/ledger/ledger.h"
#include "daemon/ledger/store.h"
#include "device/device.h"

struct quota;

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

/* Takes the fds of the ledger's extents from the store. Of two open quotas of one tenant in one partition
 * both are closed. -ENOMEM; -errno of the store: nothing was dropped. */
int inherited_new(struct ledger *ledger, struct store *store, inherited_later_fn is_later, void *userdata,
                  struct inherited **ret);
struct inherited *inherited_free(struct inherited *r); /* closes the remaining fds; takes NULL */

/* Clears the records of a session that has ended, with all that it had: before inherited_new(). */
void inherited_drop_session(struct ledger *l, uint32_t session);

/* The first quota of a tenant in a partition, of *ret_n (sessions use the last one that is not closed, if
 * any). NULL: none. */
struct inherited_quota *inherited_find(const struct inherited *r, const char *tenant, const char *partition,
                                       size_t *ret_n);

/* The index in `quotas` of the tenant's first one. */
size_t inherited_first_of(const struct inherited *r, const char *tenant);

/* Releases, at once, the extents that were being released and are not for later, if their fds are
 * available. device_of: the device by the partition's name, NULL: none; and whether its extents are
 * cleared. */
void inherited_finish(struct inherited *r,
                      struct device *(*device_of)(void *userdata, const char *partition, bool *ret_clears),
                      void *userdata);

/* Closes its arena permanently: nothing of it is allocated or released. Closes its fds, here and in the
 * store, and clears its records except those of its extents. */
void inherited_close(struct inherited *r, struct inherited_quota *q);

/* Clears all of its records, including its own: its memory is gone. */
void inherited_forget(struct inherited *r, struct inherited_quota *q);

#endif
