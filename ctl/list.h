/* The daemon's lists, collected from all of their pages.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A list keeps the replies and points to their rows, in the daemon's order. Pages are read one after the
 * other while the daemon continues to work, so rows of different pages may be of different moments.
 * Blocks are not collected, since there may be millions of them: see ask_blocks(). */
#ifndef BFC_CTL_LIST_H
#define BFC_CTL_LIST_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct list {
        Bfcd__Reply **replies;
        size_t n_replies;
        const Bfcd__Status *status; /* NULL: not requested */
        const Bfcd__Whoami *whoami;
        Bfcd__PartitionRow **partitions;
        size_t n_partitions;
        Bfcd__TenantRow **tenants;
        size_t n_tenants;
        Bfcd__SessionRow **sessions;
        size_t n_sessions;
        Bfcd__LeaseRow **leases;
        size_t n_leases;
        Bfcd__SharedRow **shared;
        size_t n_shared;
        Bfcd__ExtentRow **extents;
        size_t n_extents;
        Bfcd__AgesRow **ages;
        size_t n_ages;
        Bfcd__GrantsRow **grants;
        size_t n_grants;
        const uint64_t *grant_bounds_ns; /* of the classes of these but the last */
        size_t n_grant_bounds_ns;
        Bfcd__WaitingRow **waiting;
        size_t n_waiting;
        Bfcd__RefusalRow **refusals;
        size_t n_refusals;
        Bfcd__ExplainRow **explained;
        size_t n_explained;
};

int list_new(struct list **ret);
struct list *list_free(struct list *l);

/* Takes over one page (also on failure). 0: *ret_cursor is the cursor of the next page, 0 after the last
 * one. -EPROTO: not a page, or the last page without the requested data. -ENOMEM. */
int list_add(struct list *l, Bfcd__List__Kind kind, Bfcd__Reply *reply, uint64_t *ret_cursor);

/* Adds a page of Explain. */
int list_add_explained(struct list *l, Bfcd__Reply *reply, uint64_t *ret_cursor);

/* Sorts rows in a stable order: tenants, their grants, shared blocks and leases by name, sessions by number,
 * extents by region and offset.
 * Waiting requests are sorted by partition and stay in the order of their queues there. Partitions stay in
 * the config's order. */
void list_sort(struct list *l);

/* Removes a session: bfcctl's own. */
void list_leave_out(struct list *l, uint64_t session_id);

/* Makes the names of shared blocks empty: they are their tenant's. */
void list_leave_out_names(struct list *l);

/* Idle bytes of the sessions of a tenant (NULL: all), as their clients report them. */
uint64_t list_idle(const struct list *l, const char *tenant);

#endif
