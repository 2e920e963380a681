/* Reads a map from the daemon; see map_ask.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/map_ask.h"

#include <errno.h>
#include <stdio.h>

static int add_block(void *userdata, const Bfcd__BlockRow *row)
{
        return ask_block_is_parked(row) ? 0 : map_add(userdata, row);
}

static int out_of_memory(struct ask *a)
{
        snprintf(a->error, sizeof(a->error), "Out of memory.");
        return -ENOMEM;
}

/* Sessions are read after the blocks: the session of a block that was seen most likely still exists. */
static int fill(struct ask *a, struct map *m)
{
        struct list *owners;
        int r = ask_blocks(a, add_block, m);

        if (r == 0)
                r = ask_list(a, BFCD__LIST__KIND__SESSIONS, &owners);
        if (r == 0 && map_finish(m, owners) < 0)
                r = out_of_memory(a);
        return r;
}

int map_ask(struct ask *a, const char *partition, const char *tenant, size_t n_columns, bool keeps_blocks,
            struct map **ret)
{
        static const Bfcd__List__Kind kinds[] = { BFCD__LIST__KIND__PARTITIONS, BFCD__LIST__KIND__TENANTS,
                                                  BFCD__LIST__KIND__EXTENTS };
        struct list *space;
        struct map *m;
        int r = ask_lists(a, kinds, sizeof(kinds) / sizeof(kinds[0]), &space);

        if (r < 0)
                return r;
        r = ask_check_name(a, space, BFCD__LIST__KIND__PARTITIONS, partition);
        if (r == 0 && tenant)
                r = ask_check_name(a, space, BFCD__LIST__KIND__TENANTS, tenant);
        if (r < 0) {
                list_free(space);
                return r;
        }
        if (map_new(partition, tenant, space, n_columns, keeps_blocks, &m) < 0)
                return out_of_memory(a);
        r = fill(a, m);
        if (r < 0) {
                map_free(m);
                return r;
        }
        *ret = m;
        return 0;
}
