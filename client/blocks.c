/* The table of blocks; see blocks.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Linear probing. Taking a block out moves later ones back into the gap instead
 * of leaving a tombstone, so a process that allocates and frees for days probes
 * as little as on its first. */
#include "client/blocks.h"

#include <errno.h>
#include <stdlib.h>

#define BLOCKS_FIRST_SLOTS 64u

static size_t home_of(const struct blocks *b, const void *ptr)
{
        /* Blocks are aligned to 256 bytes; Fibonacci hashing spreads what is left. */
        uint64_t hash = ((uint64_t)(uintptr_t)ptr >> 8) * UINT64_C(0x9e3779b97f4a7c15);

        return (size_t)(hash >> 32) & (b->n_slots - 1);
}

/* The slot that has the pointer, or the empty one where it would go. */
static size_t slot_of(const struct blocks *b, const void *ptr)
{
        size_t i = home_of(b, ptr);

        while (b->slots[i].ptr && b->slots[i].ptr != ptr)
                i = (i + 1) & (b->n_slots - 1);
        return i;
}

void blocks_clear(struct blocks *b)
{
        free(b->slots);
        *b = (struct blocks){ 0 };
}

static int blocks_grow(struct blocks *b)
{
        struct blocks larger = { .n_slots = b->n_slots ? b->n_slots * 2 : BLOCKS_FIRST_SLOTS };

        larger.slots = calloc(larger.n_slots, sizeof(*larger.slots));
        if (!larger.slots)
                return -ENOMEM;
        for (size_t i = 0; i < b->n_slots; i++)
                if (b->slots[i].ptr)
                        larger.slots[slot_of(&larger, b->slots[i].ptr)] = b->slots[i];
        larger.n_used = b->n_used;
        free(b->slots);
        *b = larger;
        return 0;
}

int blocks_add(struct blocks *b, const struct block *block)
{
        size_t i;
        int r;

        if (b->n_used + 1 > b->n_slots / 4 * 3) {
                r = blocks_grow(b);
                if (r < 0)
                        return r;
        }
        i = slot_of(b, block->ptr);
        if (b->slots[i].ptr)
                return -EEXIST;
        b->slots[i] = *block;
        b->n_used++;
        return 0;
}

static struct block *blocks_at(const struct blocks *b, const void *ptr)
{
        size_t i;

        if (b->n_used == 0 || !ptr)
                return NULL;
        i = slot_of(b, ptr);
        return b->slots[i].ptr ? &b->slots[i] : NULL;
}

const struct block *blocks_find(const struct blocks *b, const void *ptr)
{
        const struct block *found = blocks_at(b, ptr);

        return found && !found->is_leaving ? found : NULL;
}

int blocks_leave(struct blocks *b, const void *ptr, struct block *ret)
{
        struct block *found = blocks_at(b, ptr);

        if (!found || found->is_leaving)
                return -ENOENT;
        *ret = *found;
        found->is_leaving = true;
        return 0;
}

void blocks_stay(struct blocks *b, const void *ptr)
{
        struct block *found = blocks_at(b, ptr);

        if (found)
                found->is_leaving = false;
}

static bool block_holds(const struct block *block, const void *ptr, uint64_t n_bytes)
{
        uint64_t offset = (uint64_t)((uintptr_t)ptr - (uintptr_t)block->ptr);

        return offset <= block->n_bytes && n_bytes <= block->n_bytes - offset;
}

const struct block *blocks_find_around(const struct blocks *b, const void *ptr, uint64_t n_bytes)
{
        const struct block *block = blocks_find(b, ptr);

        if (block)
                return block_holds(block, ptr, n_bytes) ? block : NULL;
        for (size_t i = 0; i < b->n_slots; i++)
                if (b->slots[i].ptr && !b->slots[i].is_leaving && block_holds(&b->slots[i], ptr, n_bytes))
                        return &b->slots[i];
        return NULL;
}

bool blocks_lie_in(const struct blocks *b, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        for (size_t i = 0; i < b->n_slots; i++) {
                const struct block *block = &b->slots[i];

                if (block->ptr && block->region_id == region_id && block->offset < offset + n_bytes &&
                    offset < block->offset + block->n_bytes)
                        return true;
        }
        return false;
}

/* Closes the gap at i: a later block of the same run moves in if its way from
 * home leads over the gap. */
static void blocks_close_gap(struct blocks *b, size_t i)
{
        size_t mask = b->n_slots - 1;

        for (size_t j = (i + 1) & mask; b->slots[j].ptr; j = (j + 1) & mask) {
                size_t home = home_of(b, b->slots[j].ptr);

                if (((j - home) & mask) >= ((j - i) & mask)) {
                        b->slots[i] = b->slots[j];
                        i = j;
                }
        }
        b->slots[i].ptr = NULL;
}

int blocks_take(struct blocks *b, const void *ptr, struct block *ret)
{
        const struct block *found = blocks_at(b, ptr);

        if (!found)
                return -ENOENT;
        *ret = *found;
        blocks_close_gap(b, (size_t)(found - b->slots));
        b->n_used--;
        return 0;
}
