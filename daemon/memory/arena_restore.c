/* An arena of what an earlier process left: see arena_restore().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena_internal.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "daemon/ledger/store.h"

/* Puts the extent's index in its slot, and backs it. */
static int restore_extent(struct arena *a, uint32_t extent, const char **ret_why)
{
        const struct ledger_extent *e = ledger_extent_at(a->o.partition->ledger, extent);
        struct bfc_range range;
        size_t slot;
        int r;

        *ret_why = "an extent is outside all regions";
        if (e->offset >= arena_regions_end(a))
                return -EBADMSG;
        slot = arena_slot_at(a, e->offset);
        range = arena_slot_range(a, slot);
        *ret_why = "an extent is not aligned to the arena's extent size";
        if (range.begin != e->offset || range.end - range.begin != e->n_bytes ||
            arena_slot_is_backed(a, slot))
                return -EBADMSG;
        r = arena_make_slot(a, slot, range);
        if (r < 0)
                return r;
        arena_slot_of(a, slot)->extent = extent;
        return bfc_back(a->bfc, range);
}

static int restore_blocks(struct arena *a, const struct arena_inherited *inherited, bfc_handle *handles,
                          const char **ret_why)
{
        struct bfc_place *places = calloc(inherited->n_blocks + 1, sizeof(*places));
        int r = places ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < inherited->n_blocks; i++) {
                const struct ledger_block *b = ledger_block_at(a->o.partition->ledger, inherited->blocks[i]);

                if (b->n_requested > BFC_MAX_SPACE || b->n_bytes != bfc_block_bytes(b->n_requested)) {
                        *ret_why = "a block's size does not match its requested size";
                        r = -EBADMSG;
                }
                if (r == 0 && ledger_block_is_parked(b)) {
                        r = arena_restore_parked(a, b);
                        *ret_why = "a parked block is not on whole extents";
                }
                places[i] = (struct bfc_place){ b->offset, b->n_requested };
        }
        if (r == 0)
                r = bfc_restore(a->bfc, places, inherited->n_blocks, handles);
        if (r == -EINVAL) {
                *ret_why = "blocks are outside the extents";
                r = -EBADMSG;
        }
        free(places);
        return r;
}

/* -ENOENT: the keeper does not have it; -EPROTO: it has something else. */
static int take_memory(const struct partition *p, const struct ledger_extent *e, int fd,
                       struct device_extent *ret)
{
        if (device_keeps(p->device))
                return device_take(p->device, e->store_key, e->n_bytes, ret);
        return fd >= 0 ? device_adopt(p->device, fd, e->n_bytes, ret) : -ENOENT;
}

/* The fds that a keeper sent; those that were inherited are the caller's. */
static void close_taken(const struct partition *p, const struct arena_inherited *inherited,
                        const struct device_extent *memories)
{
        for (size_t i = 0; device_keeps(p->device) && i < inherited->n_extents; i++)
                if (memories[i].fd >= 0)
                        close(memories[i].fd);
}

/* The memory of each extent, which has its slot already. All or none. */
static int restore_memory(struct arena *a, const struct arena_inherited *inherited,
                          struct device_extent *memories, const char **ret_why)
{
        for (size_t i = 0; i < inherited->n_extents; i++)
                memories[i] = DEVICE_EXTENT_EMPTY;
        for (size_t i = 0; i < inherited->n_extents; i++) {
                const struct ledger_extent *e =
                        ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);
                int r = take_memory(a->o.partition, e, inherited->fds[i], &memories[i]);

                if (r == 0 && memories[i].share != a->o.partition->share)
                        r = -EPROTO;
                if (r == -EPROTO || r == -ENOENT) {
                        *ret_why = r == -EPROTO ? "the keeper has something else for an extent"
                                                : "the keeper does not have all of its extents";
                        r = -EBADMSG;
                }
                if (r < 0) {
                        close_taken(a->o.partition, inherited, memories);
                        return r;
                }
        }
        return 0;
}

/* Everything that can fail. */
static int restore_all(struct arena *a, const struct arena_inherited *inherited, bfc_handle *handles,
                       struct device_extent *memories, const char **ret_why)
{
        int r = a->layout->restore_regions(a, inherited, ret_why);

        for (size_t i = 0; r == 0 && i < inherited->n_extents; i++)
                r = restore_extent(a, inherited->extents[i], ret_why);
        if (r == 0)
                r = restore_blocks(a, inherited, handles, ret_why);
        if (r == 0)
                r = restore_memory(a, inherited, memories, ret_why);
        return r;
}

static void restore_commit(struct arena *a, const struct arena_inherited *inherited,
                           const bfc_handle *handles, const struct device_extent *memories,
                           struct charge *charge)
{
        for (size_t i = 0; i < inherited->n_extents; i++) {
                struct ledger_extent *e = ledger_extent_at(a->o.partition->ledger, inherited->extents[i]);

                e->fd = memories[i].fd;
                arena_occupy_slot(a, arena_slot_at(a, e->offset), memories[i], charge);
        }
        for (size_t i = 0; i < inherited->n_blocks; i++) {
                struct ledger_block *b = ledger_block_at(a->o.partition->ledger, inherited->blocks[i]);

                b->handle = handles[i];
                if (!ledger_block_is_parked(b))
                        arena_count_block(a, b->offset, b->n_bytes, occupancy_add);
        }
        assert(charge->n_bytes == 0);
        *charge = (struct charge){ NULL, 0 };
}

int arena_restore(const struct arena_options *options, const struct arena_inherited *inherited,
                  struct charge *charge, struct arena **ret, const char **ret_why)
{
        bfc_handle *handles = calloc(inherited->n_blocks + 1, sizeof(*handles));
        struct device_extent *memories = calloc(inherited->n_extents + 1, sizeof(*memories));
        struct arena *a = NULL;
        int r = handles && memories ? 0 : -ENOMEM;

        if (r == 0)
                r = arena_begin(options, inherited->n_extents, &a);
        if (r == 0)
                r = restore_all(a, inherited, handles, memories, ret_why);
        if (r == 0) {
                restore_commit(a, inherited, handles, memories, charge);
                *ret = a;
        } else if (a) {
                arena_free_tables(a);
        }
        free(handles);
        free(memories);
        return r;
}

int arena_finish(const struct partition *p, uint32_t extent, int fd)
{
        const struct ledger_extent *e = ledger_extent_at(p->ledger, extent);
        struct device_extent memory = DEVICE_EXTENT_EMPTY;
        int r = take_memory(p, e, fd, &memory);

        assert(e->is_leaving);
        if (r == 0)
                r = extent_destroy(p, &memory, e->store_key);
        else if (fd >= 0) {
                close(fd);
                (void)store_remove_extent(p->store, e->store_key);
        }
        extent_strike(p->ledger, extent);
        return r == -ENOENT ? 0 : r; /* it was released before */
}
