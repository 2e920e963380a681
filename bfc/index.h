/* The index of free chunks: exact best fit, the lowest address among equals.
 *
 * Sizes fall into 128 bins per octave; a two-level bitmap tells which are not
 * empty. A bin holds one node per distinct size, in a radix trie over the low
 * bits of the size, with the minimum at the root of every subtree:
 *
 *   below child[k] of a node at level l, bit (shift - 1 - l) of every size is k
 *   size of a node < size of everything below it
 *
 * so the smallest size of a bin is one look, a lower bound inside a bin is one
 * descent, insertion swaps down and removal pulls up, at most 24 levels.
 *
 * Among chunks of one size, the one with the lowest address is the node; the
 * others form a leftist heap by address under its `equal` link. Members of a
 * heap use child[0] and child[1] as left and right, and `equal` as HEAP_TAG | rank:
 *
 *   addr of a member < addr of everything below it
 *   rank(left) >= rank(right),  rank(member) == rank(right) + 1,  rank(none) == 0
 *
 * so the path to the right has at most log2(n + 1) members, however the heap
 * came about. No removal compares keys: a chunk's size and address may change
 * between index_remove() and index_insert().
 *
 * Included by the files of bfc/ that change the index; the functions are meant
 * to be inlined into bfc_alloc() and bfc_dealloc().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_INDEX_H
#define BFC_INDEX_H

#include "bfc/core.h"

#define HEAP_TAG UINT32_C(0x80000000)

/* How many low bits of a size its bin leaves open: 0 below 256. */
static inline unsigned bin_shift(uint32_t size)
{
        return 24u - (unsigned)__builtin_clz(size | 128u);
}

static inline uint32_t bin_of(uint32_t size)
{
        unsigned shift = bin_shift(size);

        return shift * 128u + (size >> shift);
}

static inline void map_set(struct bfc *b, uint32_t bin)
{
        b->map[bin >> 6] |= UINT64_C(1) << (bin & 63);
        b->map_top |= UINT64_C(1) << (bin >> 6);
}

static inline void map_clear(struct bfc *b, uint32_t bin)
{
        uint64_t m = b->map[bin >> 6] & ~(UINT64_C(1) << (bin & 63));

        b->map[bin >> 6] = m;
        if (m == 0)
                b->map_top &= ~(UINT64_C(1) << (bin >> 6));
}

/* The first bin from `bin` on that is not empty, or N_BINS. */
static inline uint32_t map_next(const struct bfc *b, uint32_t bin)
{
        uint32_t w = bin >> 6;
        uint64_t m = b->map[w] & (~UINT64_C(0) << (bin & 63)), top;

        if (m != 0)
                return w * 64 + (uint32_t)__builtin_ctzll(m);
        top = b->map_top & (~UINT64_C(1) << w);
        if (top == 0)
                return N_BINS;
        w = (uint32_t)__builtin_ctzll(top);
        return w * 64 + (uint32_t)__builtin_ctzll(b->map[w]);
}

/* Lets the slot hold chunk i (0: nothing; the second store then goes to the scratch record). */
static inline void slot_put(struct bfc *b, uint32_t slot, uint32_t i)
{
        bfc_words(b)[slot] = i;
        b->chunk[i].slot = slot;
}

/* ---- equal sizes: a leftist heap by address ------------------------------------ */

static inline uint32_t heap_rank(const struct bfc *b, uint32_t i)
{
        return b->chunk[i].equal & ~HEAP_TAG;
}

/* Restores left and right, and the rank, of one member. */
static inline void heap_fix(struct bfc *b, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        uint32_t left = c->child[0], right = c->child[1];
        uint32_t rank_left = heap_rank(b, left), rank_right = heap_rank(b, right);

        VISIT();
        if (rank_left < rank_right) {
                slot_put(b, SLOT_CHILD(i, 0), right);
                slot_put(b, SLOT_CHILD(i, 1), left);
                rank_right = rank_left;
        }
        c->equal = HEAP_TAG | (rank_right + 1);
}

/* Melts the heaps x and y (0: empty) and puts the result into the slot. */
static inline void heap_merge(struct bfc *b, uint32_t x, uint32_t y, uint32_t slot)
{
        uint32_t top = slot;

        while (x != 0 && y != 0) {
                VISIT();
                if (b->chunk[y].addr < b->chunk[x].addr) {
                        uint32_t t = x;

                        x = y;
                        y = t;
                }
                slot_put(b, slot, x);
                slot = SLOT_CHILD(x, 1);
                x = b->chunk[x].child[1];
        }
        slot_put(b, slot, x | y);
        while (slot != top) {
                uint32_t i = slot / WORDS_PER_REC;

                heap_fix(b, i);
                slot = b->chunk[i].slot;
        }
}

/* Chunk i becomes one of the equals of a node. */
static inline void heap_insert(struct bfc *b, uint32_t node, uint32_t i)
{
        struct chunk *c = &b->chunk[i];

        c->child[0] = 0;
        c->child[1] = 0;
        c->equal = HEAP_TAG | 1u;
        heap_merge(b, b->chunk[node].equal, i, SLOT_EQUAL(node));
}

static inline void heap_remove(struct bfc *b, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        uint32_t slot = c->slot;

        heap_merge(b, c->child[0], c->child[1], slot);
        /* Upwards until a rank stays as it was. Each step that goes on has lowered the
         * rank of a right child or of the smaller side, so there are at most log2(n). */
        while (slot % WORDS_PER_REC != SLOT_EQUAL(0)) {
                uint32_t up = slot / WORDS_PER_REC, before = b->chunk[up].equal;

                heap_fix(b, up);
                if (b->chunk[up].equal == before)
                        break;
                slot = b->chunk[up].slot;
        }
}

/* ---- distinct sizes: a radix trie with the minimum at every root ----------------- */

/* The smallest free chunk of at least n granules, the lowest address on ties; 0: none. */
static inline uint32_t index_find(const struct bfc *b, uint32_t n)
{
        uint32_t bin = bin_of(n), i = bfc_words_const(b)[FIRST_HEAD + bin];

        if (i != 0) {
                const struct chunk *c = &b->chunk[i];
                uint32_t larger = 0; /* root of the nearest subtree whose sizes are all above n */

                VISIT();
                if (c->size >= n)
                        return i;
                for (unsigned bit = bin_shift(n); bit-- > 0;) {
                        if ((n >> bit & 1u) != 0) {
                                i = c->child[1];
                        } else {
                                if (c->child[1] != 0)
                                        larger = c->child[1];
                                i = c->child[0];
                        }
                        if (i == 0)
                                break;
                        VISIT();
                        c = &b->chunk[i];
                        if (c->size >= n)
                                return i;
                }
                if (larger != 0)
                        return larger;
        }
        VISIT();
        bin = map_next(b, bin + 1);
        return bin == N_BINS ? 0 : bfc_words_const(b)[FIRST_HEAD + bin];
}

/* Chunk i takes the place of node `old`, which keeps its own equals. */
static inline void trie_replace(struct bfc *b, uint32_t old, uint32_t i)
{
        const struct chunk *o = &b->chunk[old];

        slot_put(b, o->slot, i);
        slot_put(b, SLOT_CHILD(i, 0), o->child[0]);
        slot_put(b, SLOT_CHILD(i, 1), o->child[1]);
}

/* Chunk i joins the node of its size. */
static inline void index_insert_equal(struct bfc *b, uint32_t node, uint32_t i)
{
        if (b->chunk[i].addr > b->chunk[node].addr) {
                heap_insert(b, node, i);
                return;
        }
        trie_replace(b, node, i);
        slot_put(b, SLOT_EQUAL(i), b->chunk[node].equal);
        heap_insert(b, i, node);
}

static inline void index_insert(struct bfc *b, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        unsigned bit = bin_shift(c->size);
        uint32_t bin = bin_of(c->size), slot = FIRST_HEAD + bin, at = bfc_words(b)[slot];

        if (at == 0)
                map_set(b, bin);
        c->equal = 0;
        while (at != 0) {
                struct chunk *a = &b->chunk[at];

                VISIT();
                if (a->size == c->size) {
                        index_insert_equal(b, at, i);
                        return;
                }
                if (c->size < a->size) {
                        /* The smaller one stays here; the other goes on, with its equals. */
                        uint32_t t = i;

                        trie_replace(b, at, i);
                        i = at;
                        at = t;
                        c = a;
                }
                bit--;
                slot = SLOT_CHILD(at, c->size >> bit & 1u);
                at = bfc_words(b)[slot];
        }
        slot_put(b, slot, i);
        c->child[0] = 0;
        c->child[1] = 0;
}

/* Fills the place of node i, which has no equals, from below. */
static inline void trie_remove(struct bfc *b, uint32_t i)
{
        const struct chunk *c = &b->chunk[i];
        uint32_t slot = c->slot, low = c->child[0], high = c->child[1];

        if (slot < END_OF_HEADS && (low | high) == 0)
                map_clear(b, slot - FIRST_HEAD);
        for (;;) {
                /* Every size on the low side is below every one on the high side. */
                uint32_t up = low != 0 ? low : high, side = low != 0 ? 0 : 1;
                uint32_t next_low = b->chunk[up].child[0], next_high = b->chunk[up].child[1];

                slot_put(b, slot, up);
                if (up == 0)
                        return;
                VISIT();
                /* The other side stays below it; the side that it came from is filled next. */
                if (side == 0)
                        slot_put(b, SLOT_CHILD(up, 1), high);
                else
                        b->chunk[up].child[0] = 0;
                slot = SLOT_CHILD(up, side);
                low = next_low;
                high = next_high;
        }
}

/* Takes a free chunk out. It looks free until the caller sets its slot. */
static inline void index_remove(struct bfc *b, uint32_t i)
{
        uint32_t heir = b->chunk[i].equal;

        VISIT();
        if (heir == 0) {
                trie_remove(b, i);
        } else if ((heir & HEAP_TAG) != 0) {
                heap_remove(b, i);
        } else {
                const struct chunk *h = &b->chunk[heir];

                heap_merge(b, h->child[0], h->child[1], SLOT_EQUAL(heir));
                trie_replace(b, i, heir);
        }
}

/* Gives a free chunk another address and size. Often it is alone in its bin
 * before and after, as the last large chunk of a region is. */
static inline void index_rekey(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        struct chunk *c = &b->chunk[i];

        VISIT();
        if (c->slot < END_OF_HEADS && (c->child[0] | c->child[1] | c->equal) == 0) {
                uint32_t slot = FIRST_HEAD + bin_of(size);

                if (slot != c->slot && bfc_words(b)[slot] == 0) {
                        bfc_words(b)[c->slot] = 0;
                        map_clear(b, c->slot - FIRST_HEAD);
                        slot_put(b, slot, i);
                        map_set(b, slot - FIRST_HEAD);
                }
                if (slot == c->slot) {
                        c->addr = addr;
                        c->size = size;
                        return;
                }
        }
        index_remove(b, i);
        c->addr = addr;
        c->size = size;
        index_insert(b, i);
}

/* The next free chunk in the order: bin, node, children, equals. i == 0: the first one of
 * `bin` or of a later bin. 0: no more. Needs no stack: slots lead back up. */
uint32_t bfc_index_next(const struct bfc *b, uint32_t bin, uint32_t i);

/* ---- chunks that become free ------------------------------------------------------ */

/* Chunk i (in its ring, not free, in no list) becomes free and merges with free neighbours. */
static inline void chunk_make_free(struct bfc *b, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        uint32_t prev = c->prev, next = c->next, size = c->size, addr = c->addr;
        struct chunk *p = &b->chunk[prev], *n = &b->chunk[next];

        VISIT();
        if (p->slot != 0) {
                size += p->size;
                if (n->slot != 0) {
                        size += n->size;
                        index_remove(b, next);
                        unlink_release(b, next);
                }
                unlink_release(b, i);
                index_rekey(b, prev, p->addr, size);
        } else if (n->slot != 0) {
                unlink_release(b, i);
                index_rekey(b, next, addr, size + n->size);
        } else {
                index_insert(b, i);
        }
}

#endif
