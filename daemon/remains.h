/* What a process that is no more left of its quotas: the ledger's records by quota, each
 * with its extents and blocks in order, and the extents' fds from the service manager's
 * store. The broker makes its quotas from that.
 *
 * What can be of no use is finished or forgotten here: extents that were being given back,
 * and all that lies in an arena that is closed, or whose memory went with the process.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_REMAINS_H
#define BFCD_REMAINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/arena.h"
#include "daemon/ledger.h"
#include "daemon/store.h"
#include "device/device.h"

struct quota;

struct remains_quota {
        uint32_t index; /* in the ledger */
        uint64_t id;
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        bool is_closed;                  /* in the ledger too */
        struct quota *quota;             /* that the broker has of it; NULL: none */
        bool has_sessions;               /* of its tenant, that were told of it */
        uint64_t n_bytes;                /* of its extents */
        uint32_t growing_mib, oom_kills; /* see ledger_quota */
        struct ledger_lifetime life;
        struct arena_remains arena;
};

/* Whether extents of the partition that are on their way back are given back later, by the arena,
 * to which they are handed over with the others. */
typedef bool (*remains_later_fn)(void *userdata, const char *partition);

struct remains {
        struct ledger *ledger;
        struct store *store; /* borrowed */
        struct punch *punch; /* borrowed; NULL: there is none */
        remains_later_fn is_later;
        void *userdata;
        struct remains_quota *quotas; /* by tenant and partition, and of these by id */
        size_t n_quotas;
        uint32_t *extents; /* in the ledger, by quota and offset */
        int *fds;          /* owned until an arena takes them; -1: not there, or not any more */
        size_t n_extents;
        uint32_t *blocks; /* the same */
        size_t n_blocks;
};

/* Takes the fds of the ledger's extents out of the store. Of two open quotas of one tenant in
 * one partition both are closed. -ENOMEM. */
int remains_new(struct ledger *ledger, struct store *store, struct punch *punch, remains_later_fn is_later,
                void *userdata, struct remains **ret);
struct remains *remains_free(struct remains *r); /* closes the fds that nobody took; takes NULL */

/* The first of a tenant in a partition, of *ret_n that there are (the last one that is not
 * closed, if any is, is the one that sessions know). NULL: none. */
struct remains_quota *remains_find(const struct remains *r, const char *tenant, const char *partition,
                                   size_t *ret_n);

/* Where those of a tenant begin in `quotas`. */
size_t remains_first_of(const struct remains *r, const char *tenant);

/* Gives back, at once, the extents that were on their way and that are not for later: the device has those of which the
 * fd is there. device_of: by the partition's name; NULL: there is no such; and whether its extents are cleared. */
void remains_finish(struct remains *r,
                    struct device *(*device_of)(void *userdata, const char *partition, bool *ret_clears),
                    void *userdata);

/* Its arena stays as it is for good: nothing of it is given out or given back. Its fds are
 * closed, here and in the store, and so are its records but for those of its extents. */
void remains_close(struct remains *r, struct remains_quota *q);

/* All of its records, its own as well: what they were about is gone. */
void remains_forget(struct remains *r, struct remains_quota *q);

#endif
