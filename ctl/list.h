/* What the daemon lists, gathered from as many pages as it takes.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A list keeps the replies and points into them, row by row, in the daemon's
 * order. Pages are read one after the other while the daemon goes on working,
 * so rows of different pages may be of different moments. Blocks are not gathered, since there may be
 * millions of them: see ask_blocks(). */
#ifndef BFC_CTL_LIST_H
#define BFC_CTL_LIST_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct list {
        Bfcd__Reply **replies;
        size_t n_replies;
        const Bfcd__Status *status; /* NULL where it was not asked for */
        const Bfcd__Whoami *whoami;
        Bfcd__PartitionRow **partitions;
        size_t n_partitions;
        Bfcd__TenantRow **tenants;
        size_t n_tenants;
        Bfcd__SessionRow **sessions;
        size_t n_sessions;
        Bfcd__SharedRow **shared;
        size_t n_shared;
        Bfcd__AgesRow **ages;
        size_t n_ages;
        Bfcd__ExplainRow **explained;
        size_t n_explained;
};

int list_new(struct list **ret);
struct list *list_free(struct list *l);

/* Takes one page over (also on failure). 0: *ret_cursor is what to ask for next,
 * 0 after the last page. -EPROTO: not a page, or the last page and what was
 * asked for never came. -ENOMEM. */
int list_add(struct list *l, Bfcd__List__Kind kind, Bfcd__Reply *reply, uint64_t *ret_cursor);

/* The same with a page of the report that explains. */
int list_add_explained(struct list *l, Bfcd__Reply *reply, uint64_t *ret_cursor);

/* Rows in an order that lasts from one list to the next: tenants and shared blocks by name, sessions by
 * number. Partitions stay in the config's order. */
void list_sort(struct list *l);

/* Leaves out a session: the asker's own, which nobody means. */
void list_leave_out(struct list *l, uint64_t session_id);

/* Bytes that the sessions of a tenant (NULL: all) keep for their next requests, by their own word. */
uint64_t list_idle(const struct list *l, const char *tenant);

#endif
