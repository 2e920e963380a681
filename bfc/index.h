/* The index of free chunks: exact best fit, the lowest address among equals.
 *
 * Sizes are divided into 128 bins per octave; a two-level bitmap marks bins that are not empty. A bin has
 * one node per distinct size, in a radix trie over the low bits of the size, with the minimum at the root
 * of every subtree:
 *
 *   below child[k] of a node at level l, bit (shift - 1 - l) of every size is k
 *   size of a node < size of everything below it
 *
 * So the smallest size of a bin is one look, a lower bound inside a bin is one descent, insertion swaps
 * down and removal pulls up, at most 24 levels.
 *
 * Among chunks of one size, the one with the lowest address is the node; the others form a heap by
 * address under its `equal` link. Members of the heap use child[0] and child[1] as left and right, and
 * `equal` as EQUAL_TAG | weight:
 *
 *   addr of a member < addr of everything below it
 *   weight(member) >= 1 + weight(left) + weight(right),  weight(none) == 0
 *   weight(member) >= 1 + 2 weight(right)
 *
 * So a path to the right has at most log2(weight + 1) members. This is a weight-biased leftist heap with
 * one difference: a weight counts all members that were ever inserted below, including removed ones. So
 * removal from the middle need not walk up. The third line, which bounds the path, only needs weights
 * that are not too small. A weight stops at 2^31 - 1; such a member may lengthen a path by one.
 *
 * No removal compares keys: a chunk's size and address may change between index_remove() and
 * index_insert().
 *
 * Included by the files of bfc/ that change or read the index.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_INDEX_H
#define BFC_INDEX_H

#include "bfc/core.h"

/* The two hot calls inline what one look at the index decides. The rest is in separate functions, in tail
 * position where possible, so that the hot calls save and spill few registers. Some of these return an
 * int that is always 0: it is the result of bfc_alloc() and bfc_dealloc(), which so end in a jump without
 * a frame. The compiler's own choice costs up to a fifth. */
#define BFC_INLINE  static inline __attribute__((always_inline))
#define BFC_OUTLINE static __attribute__((noinline, unused))

#define EQUAL_TAG  UINT32_C(0x80000000)
#define MAX_WEIGHT UINT32_C(0x7fffffff)

/* The number of low bits of a size that its bin leaves open: 0 below 256. */
static inline unsigned bin_shift(uint32_t size)
{
        return (31u ^ (unsigned)__builtin_clz(size | 128u)) - 7u; /* in this form it is one `bsr` */
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

/* Stores chunk i in the slot (0: nothing; the second store then goes to the scratch record). */
static inline void slot_put(struct bfc *b, uint32_t slot, uint32_t i)
{
        words_of(b)[slot] = i;
        chunk_at(b, i)->slot = slot;
}

/* ---- equal sizes: a heap by address, its right sides light ------------------------ */

static inline uint32_t equal_weight(const struct bfc *b, uint32_t i)
{
        return chunk_at(b, i)->equal & ~EQUAL_TAG;
}

/* Melts the heaps x and y (0: empty) and stores the result in the slot, in one pass down.
 *
 * On the way, x with the right side r takes in y: w(r) + w(y) are combined on one side, and l, of at most
 * w(x) - 1 - w(r), is the other. The lighter one becomes the right side, so 2 w(right) + 1 <= w(x) +
 * w(y), the new weight. Which side that is is unpredictable, so the body has no branch. */
static inline void equal_merge(struct bfc *b, uint32_t x, uint32_t y, uint32_t slot)
{
        if (y == 0) {
                slot_put(b, slot, x);
                return;
        }
        while (x != 0) {
                uint32_t swap = -(uint32_t)(chunk_at(b, y)->addr < chunk_at(b, x)->addr) & (x ^ y);
                uint32_t top = x ^ swap, other = y ^ swap;
                struct chunk *t = chunk_at(b, top);
                uint32_t left = t->child[0], right = t->child[1];
                uint32_t weight = equal_weight(b, top) + equal_weight(b, other);
                uint32_t together = equal_weight(b, right) + equal_weight(b, other);
                uint32_t side = together > weight - 1 - together ? 0 : 1; /* where they are combined */

                VISIT();
                slot_put(b, slot, top);
                t->equal = EQUAL_TAG | (weight < MAX_WEIGHT ? weight : MAX_WEIGHT);
                slot_put(b, SLOT_CHILD(top, 1 - side), left);
                slot = SLOT_CHILD(top, side);
                x = right;
                y = other;
        }
        slot_put(b, slot, x | y);
}

/* Removes one of the equals of a node. Weights above it stay unchanged. */
static inline void equal_remove(struct bfc *b, uint32_t i)
{
        const struct chunk *c = chunk_at(b, i);

        equal_merge(b, c->child[0], c->child[1], c->slot);
}

/* ---- distinct sizes: a radix trie with the minimum at every root ----------------- */

/* In the bin of n, whose smallest size `i` is below n: the smallest one of at least n, or 0. */
static inline uint32_t trie_find(const struct bfc *b, uint32_t i, uint32_t n)
{
        uint32_t larger = 0; /* root of the nearest subtree whose sizes are all above n */

        for (unsigned bit = bin_shift(n); bit-- > 0;) {
                const struct chunk *c = chunk_at(b, i);

                if ((n >> bit & 1u) != 0) {
                        i = c->child[1];
                } else {
                        larger = c->child[1] != 0 ? c->child[1] : larger;
                        i = c->child[0];
                }
                if (i == 0)
                        break;
                VISIT();
                if (chunk_at(b, i)->size >= n)
                        return i;
        }
        return larger;
}

/* index_find() if one look is enough; 0: it is not, or nothing is large enough. */
BFC_INLINE uint32_t index_look(const struct bfc *b, uint32_t n)
{
        uint32_t bin = bin_of(n), i = words_of(b)[FIRST_HEAD + bin];

        VISIT();
        if (i != 0)
                return chunk_at(b, i)->size >= n ? i : 0;
        bin = map_next(b, bin + 1);
        return bin == N_BINS ? 0 : words_of(b)[FIRST_HEAD + bin];
}

/* The smallest free chunk of at least n granules, the lowest address on ties; 0: none. */
static inline uint32_t index_find(const struct bfc *b, uint32_t n)
{
        uint32_t i = index_look(b, n), bin = bin_of(n), head = words_of(b)[FIRST_HEAD + bin];

        if (i != 0 || head == 0)
                return i;
        i = trie_find(b, head, n);
        if (i != 0)
                return i;
        bin = map_next(b, bin + 1);
        return bin == N_BINS ? 0 : words_of(b)[FIRST_HEAD + bin];
}

/* Replaces node `old` by chunk i, which keeps its own equals. i == old: nothing changes. */
static inline void trie_replace(struct bfc *b, uint32_t old, uint32_t i)
{
        const struct chunk *o = chunk_at(b, old);
        uint32_t low = o->child[0], high = o->child[1];

        slot_put(b, o->slot, i);
        slot_put(b, SLOT_CHILD(i, 0), low);
        slot_put(b, SLOT_CHILD(i, 1), high);
}

/* Adds chunk i to the node of its size: the one with the lower address stays or becomes the node, the
 * other one goes to the heap. No branch, as in equal_merge(). */
static inline void index_insert_equal(struct bfc *b, uint32_t node, uint32_t i)
{
        uint32_t equal = chunk_at(b, node)->equal;
        uint32_t swap = -(uint32_t)(chunk_at(b, i)->addr < chunk_at(b, node)->addr) & (i ^ node);
        uint32_t low = node ^ swap, high = i ^ swap;
        struct chunk *h = chunk_at(b, high);

        trie_replace(b, node, low);
        h->child[0] = 0;
        h->child[1] = 0;
        h->equal = EQUAL_TAG | 1u;
        equal_merge(b, equal, high, SLOT_EQUAL(low));
}

/* Inserts chunk i below the root `at` of its bin. */
BFC_OUTLINE int trie_insert(struct bfc *b, uint32_t at, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);
        unsigned bit = bin_shift(c->size);
        uint32_t slot;

        do {
                struct chunk *a = chunk_at(b, at);

                VISIT();
                if (a->size == c->size) {
                        index_insert_equal(b, at, i);
                        return 0;
                }
                if (c->size < a->size) {
                        /* The smaller one stays here; the other continues, with its equals. */
                        uint32_t t = i;

                        trie_replace(b, at, i);
                        i = at;
                        at = t;
                        c = a;
                }
                bit--;
                slot = SLOT_CHILD(at, c->size >> bit & 1u);
                at = words_of(b)[slot];
        } while (at != 0);
        slot_put(b, slot, i);
        c->child[0] = 0;
        c->child[1] = 0;
        return 0;
}

BFC_INLINE int index_insert(struct bfc *b, uint32_t i)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t bin = bin_of(c->size), at = words_of(b)[FIRST_HEAD + bin];

        c->equal = 0;
        if (at != 0)
                return trie_insert(b, at, i);
        map_set(b, bin);
        slot_put(b, FIRST_HEAD + bin, i);
        c->child[0] = 0;
        c->child[1] = 0;
        return 0;
}

/* Fills the place of node i, which has no equals, from below. */
static inline void trie_remove(struct bfc *b, uint32_t i)
{
        const struct chunk *c = chunk_at(b, i);
        uint32_t slot = c->slot, low = c->child[0], high = c->child[1];

        if (slot < END_OF_HEADS && (low | high) == 0)
                map_clear(b, slot - FIRST_HEAD);
        for (;;) {
                /* Every size on the low side is below every one on the high side. */
                uint32_t up = low != 0 ? low : high, side = low != 0 ? 0 : 1;
                uint32_t next_low = chunk_at(b, up)->child[0], next_high = chunk_at(b, up)->child[1];

                slot_put(b, slot, up);
                if (up == 0)
                        return;
                VISIT();
                /* The other side stays below it; the side that it came from is filled next. */
                if (side == 0)
                        slot_put(b, SLOT_CHILD(up, 1), high);
                else
                        chunk_at(b, up)->child[0] = 0;
                slot = SLOT_CHILD(up, side);
                low = next_low;
                high = next_high;
        }
}

/* Removes a free chunk. It looks free until the caller sets its slot. */
BFC_INLINE void index_take(struct bfc *b, uint32_t i)
{
        uint32_t heir = chunk_at(b, i)->equal;

        VISIT();
        if (heir == 0) {
                trie_remove(b, i);
        } else if ((heir & EQUAL_TAG) != 0) {
                equal_remove(b, i);
        } else {
                const struct chunk *h = chunk_at(b, heir);

                equal_merge(b, h->child[0], h->child[1], SLOT_EQUAL(heir));
                trie_replace(b, i, heir);
        }
}

BFC_OUTLINE void index_remove(struct bfc *b, uint32_t i)
{
        index_take(b, i);
}

/* index_rekey() of a chunk that is alone in its bin and joins others. */
BFC_OUTLINE int index_join(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        struct chunk *c = chunk_at(b, i);

        words_of(b)[c->slot] = 0;
        map_clear(b, c->slot - FIRST_HEAD);
        c->addr = addr;
        c->size = size;
        return trie_insert(b, words_of(b)[FIRST_HEAD + bin_of(size)], i);
}

/* index_rekey() of any other one. */
BFC_OUTLINE int index_move(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        struct chunk *c = chunk_at(b, i);

        /* If sizes repeat, this is usually one of the equals; it avoids a call and has its own branch. */
        if ((c->equal & EQUAL_TAG) != 0)
                equal_remove(b, i);
        else
                index_remove(b, i);
        c->addr = addr;
        c->size = size;
        return index_insert(b, i);
}

/* Changes the address and size of a free chunk. It is often alone in its bin before and after, like the
 * last large chunk of a region. */
BFC_INLINE int index_rekey(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        struct chunk *c = chunk_at(b, i);
        uint32_t old = c->slot, slot = FIRST_HEAD + bin_of(size);

        VISIT();
        if (old >= END_OF_HEADS || (c->child[0] | c->child[1] | c->equal) != 0)
                return index_move(b, i, addr, size);
        if (slot != old) {
                if (words_of(b)[slot] != 0)
                        return index_join(b, i, addr, size);
                words_of(b)[old] = 0;
                map_clear(b, old - FIRST_HEAD);
                map_set(b, slot - FIRST_HEAD);
                slot_put(b, slot, i);
        }
        c->addr = addr;
        c->size = size;
        return 0;
}

/* The next free chunk in the order: bin, node, children, equals. i == 0: the first one of
 * `bin` or of a later bin. 0: no more. Needs no stack: slots lead back up. */
uint32_t bfc_index_next(const struct bfc *b, uint32_t bin, uint32_t i);

/* ---- chunks that become free ------------------------------------------------------ */

/* Chunk i merges with its two neighbours, which are free. */
BFC_OUTLINE int chunk_merge_both(struct bfc *b, uint32_t i)
{
        const struct chunk *c = chunk_at(b, i);
        uint32_t prev = c->prev, next = c->next;
        struct chunk *p = chunk_at(b, prev), *n = chunk_at(b, next);
        uint32_t size = p->size + c->size + n->size;

        index_take(b, next);
        unlink_release(b, next);
        unlink_release(b, i);
        return index_rekey(b, prev, p->addr, size);
}

/* Chunk i (in its ring, not free, in no list) becomes free and merges with free neighbours. */
BFC_INLINE int chunk_make_free(struct bfc *b, uint32_t i)
{
        const struct chunk *c = chunk_at(b, i);
        uint32_t keep = c->prev, next = c->next, addr = c->addr, size = c->size;
        const struct chunk *p = chunk_at(b, keep), *n = chunk_at(b, next);

        VISIT();
        if (p->slot != 0) {
                if (n->slot != 0)
                        return chunk_merge_both(b, i);
                addr = p->addr;
                size += p->size;
        } else if (n->slot != 0) {
                keep = next;
                size += n->size;
        } else {
                return index_insert(b, i);
        }
        unlink_release(b, i);
        return index_rekey(b, keep, addr, size);
}

#endif
