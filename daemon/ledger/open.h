/* The inside of opening a ledger: what open.c and open_shared.c share.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_OPEN_H
#define BFCD_LEDGER_OPEN_H

#include "daemon/ledger/sort.h"
#include "daemon/ledger/table.h"

struct opening {
        struct ledger *l;
        void (*on_fault)(void *userdata, const struct ledger_fault *fault);
        void *userdata;
        uint64_t n_faults;
        struct ledger_key *extents; /* sound ones, by quota and offset */
        size_t n_extents;
        bool *is_bad_extent; /* by index: rejected, its quota was in use */
};

static inline struct table *table_of(struct opening *o, int kind)
{
        return &o->l->tables[kind];
}

static inline bool is_used(struct opening *o, int kind, uint32_t index)
{
        return in_use(table_of(o, kind), index);
}

/* The block of a shared record, if the block names it; and its quota. Else LEDGER_NONE. */
uint32_t opening_block_of_shared(struct opening *o, uint32_t index);
uint32_t opening_quota_of_shared(struct opening *o, uint32_t index);

/* Closes the quota of a bad block, and clears it; of a bad shared record, with its block. */
void opening_reject_block(struct opening *o, uint32_t index, const char *why);
void opening_reject_shared(struct opening *o, uint32_t index, const char *why);

/* After blocks were checked: what was not published, and names that are used twice. And after all tables were.
 * -ENOMEM. */
int opening_finish_shared(struct opening *o);
int opening_check_shared(struct opening *o);

#endif
