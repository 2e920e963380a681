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
 * others form a heap by address under its `equal` link. Members of the heap use
 * child[0] and child[1] as left and right, and `equal` as EQUAL_TAG | weight:
 *
 *   addr of a member < addr of everything below it
 *   weight(member) >= 1 + weight(left) + weight(right),  weight(none) == 0
 *   weight(member) >= 1 + 2 weight(right)
 *
 * so a path to the right has at most log2(weight + 1) members, however the heap
 * came about. (A weight-biased leftist heap, but for one thing: a weight counts
 * what was put below a member, also what was taken out again. So removal from
 * the middle need not walk up, and nothing is lost: the third line is what
 * bounds the path, and it only needs weights that are not too small.) A weight
 * that would pass 2^31 - 1 stays there; such a member may lengthen a path by one.
 *
 * No removal compares keys: a chunk's size and address may change between
 * index_remove() and index_insert().
 *
 * Included by the files of bfc/ that change the index; the functions are meant
 * to be inlined into bfc_alloc() and bfc_dealloc().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_INDEX_H
#define BFC_INDEX_H

#include "bfc/core.h"

/* The compiler's own choice costs up to a fifth on traces. */
#define BFC_INLINE static inline __attribute__((always_inline))

#define EQUAL_TAG  UINT32_C(0x80000000)
#define MAX_WEIGHT UINT32_C(0x7fffffff)

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
        b->map_top &= ~((uint64_t)(m == 0) << (bin >> 6));
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

/* ---- equal sizes: a heap by address, its right sides light ------------------------ */

static inline uint32_t equal_weight(const struct bfc *b, uint32_t i)
{
        return b->chunk[i].equal & ~EQUAL_TAG;
}

/* Melts the heaps x and y (0: empty) and puts the result into the slot, in one pass down.
 *
 * On the way, x with the right side r takes in y: w(r) + w(y) come together on one side, and
 * l, of at most w(x) - 1 - w(r), is the other. The lighter one becomes the right side, so
 * 2 w(right) + 1 <= w(x) + w(y), the new weight. */
static inline void equal_merge(struct bfc *b, uint32_t x, uint32_t y, uint32_t slot)
{
        while (x != 0 && y != 0) {
                uint32_t right, weight, light, heavy;

                VISIT();
                if (b->chunk[y].addr < b->chunk[x].addr) {
                        uint32_t t = x;

                        x = y;
                        y = t;
                }
                right = b->chunk[x].child[1];
                weight = equal_weight(b, x) + equal_weight(b, y);
                light = equal_weight(b, right) + equal_weight(b, y);
                heavy = weight - 1 - light;
                slot_put(b, slot, x);
                b->chunk[x].equal = weight > MAX_WEIGHT ? EQUAL_TAG | MAX_WEIGHT : EQUAL_TAG | weight;
                slot = SLOT_CHILD(x, 1);
                if (light > heavy) {
                        slot_put(b, slot, b->chunk[x].child[0]);
                        slot = SLOT_CHILD(x, 0);
                }
                x = right;
        }
        slot_put(b, slot, x | y);
}

/* Chunk i becomes one of the equals of a node. */
static inline void equal_insert(struct bfc *b, uint32_t node, uint32_t i)
{
        struct chunk *c = &b->chunk[i];

        c->child[0] = 0;
        c->child[1] = 0;
        c->equal = EQUAL_TAG | 1u;
        equal_merge(b, b->chunk[node].equal, i, SLOT_EQUAL(node));
}

/* Takes one of the equals of a node out. Weights above it stay as they are. */
static inline void equal_remove(struct bfc *b, uint32_t i)
{
        const struct chunk *c = &b->chunk[i];

        equal_merge(b, c->child[0], c->child[1], c->slot);
}

/* ---- distinct sizes: a radix trie with the minimum at every root ----------------- */

/* In the bin of n, whose smallest size `i` is below n: the smallest one of at least n, or 0. */
static inline uint32_t trie_find(const struct bfc *b, uint32_t i, uint32_t n)
{
        uint32_t larger = 0; /* root of the nearest subtree whose sizes are all above n */

        for (unsigned bit = bin_shift(n); bit-- > 0;) {
                const struct chunk *c = &b->chunk[i];

                if ((n >> bit & 1u) != 0) {
                        i = c->child[1];
                } else {
                        larger = c->child[1] != 0 ? c->child[1] : larger;
                        i = c->child[0];
                }
                if (i == 0)
                        break;
                VISIT();
                if (b->chunk[i].size >= n)
                        return i;
        }
        return larger;
}

/* The smallest free chunk of at least n granules, the lowest address on ties; 0: none. */
BFC_INLINE uint32_t index_find(const struct bfc *b, uint32_t n)
{
        uint32_t bin = bin_of(n), i = bfc_words_const(b)[FIRST_HEAD + bin];

        VISIT();
        if (i != 0) {
                if (b->chunk[i].size >= n)
                        return i;
                i = trie_find(b, i, n);
                if (i != 0)
                        return i;
        }
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
                equal_insert(b, node, i);
                return;
        }
        trie_replace(b, node, i);
        slot_put(b, SLOT_EQUAL(i), b->chunk[node].equal);
        equal_insert(b, i, node);
}

/* Chunk i goes below the root `at` of its bin. */
static inline void trie_insert(struct bfc *b, uint32_t at, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        unsigned bit = bin_shift(c->size);
        uint32_t slot;

        do {
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
        } while (at != 0);
        slot_put(b, slot, i);
        c->child[0] = 0;
        c->child[1] = 0;
}

BFC_INLINE void index_insert(struct bfc *b, uint32_t i)
{
        struct chunk *c = &b->chunk[i];
        uint32_t bin = bin_of(c->size), at = bfc_words(b)[FIRST_HEAD + bin];

        c->equal = 0;
        if (at != 0) {
                trie_insert(b, at, i);
                return;
        }
        map_set(b, bin);
        slot_put(b, FIRST_HEAD + bin, i);
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
BFC_INLINE void index_remove(struct bfc *b, uint32_t i)
{
        uint32_t heir = b->chunk[i].equal;

        VISIT();
        if (heir == 0) {
                trie_remove(b, i);
        } else if ((heir & EQUAL_TAG) != 0) {
                equal_remove(b, i);
        } else {
                const struct chunk *h = &b->chunk[heir];

                equal_merge(b, h->child[0], h->child[1], SLOT_EQUAL(heir));
                trie_replace(b, i, heir);
        }
}

/* Gives a free chunk another address and size. Often it is alone in its bin
 * before and after, as the last large chunk of a region is. */
BFC_INLINE void index_rekey(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        struct chunk *c = &b->chunk[i];

        VISIT();
        if (c->slot < END_OF_HEADS && (c->child[0] | c->child[1] | c->equal) == 0) {
                if (c->slot == FIRST_HEAD + bin_of(size)) {
                        c->addr = addr;
                        c->size = size;
                        return;
                }
                bfc_words(b)[c->slot] = 0;
                map_clear(b, c->slot - FIRST_HEAD);
        } else {
                index_remove(b, i);
        }
        c->addr = addr;
        c->size = size;
        index_insert(b, i);
}

/* The next free chunk in the order: bin, node, children, equals. i == 0: the first one of
 * `bin` or of a later bin. 0: no more. Needs no stack: slots lead back up. */
uint32_t bfc_index_next(const struct bfc *b, uint32_t bin, uint32_t i);

/* ---- chunks that become free ------------------------------------------------------ */

/* Chunk i (in its ring, not free, in no list) becomes free and merges with free neighbours. */
BFC_INLINE void chunk_make_free(struct bfc *b, uint32_t i)
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
