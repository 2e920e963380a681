/* Checks of a whole instance: the walk by address, and bfc_check(), which evaluates the invariants that
 * core.h, index.h and grow.c state as equations.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "bfc/core.h"
#include "bfc/index.h"

#include <errno.h>

int bfc_walk(const struct bfc *b, int (*fn)(void *userdata, char kind, struct bfc_range range),
             void *userdata)
{
        static const char letters[] = {
                [KIND_NONE] = '?', [KIND_USED] = 'u',     [KIND_PENDING] = 'p', [KIND_PIECE] = 'p',
                [KIND_HOLE] = '-', [KIND_RETIRING] = 'r', [KIND_EDGE] = '?',    [KIND_FREE] = 'f',
        };

        for (uint32_t k = 0; k < b->n_regions; k++) {
                uint32_t edge = b->regions[k].edge;

                for (uint32_t i = chunk_at(b, edge)->next; i != edge; i = chunk_at(b, i)->next) {
                        const struct chunk *c = chunk_at(b, i);
                        struct bfc_range range = { to_bytes(c->addr), to_bytes(chunk_end(c)) };
                        int r = fn(userdata, letters[chunk_kind(c)], range);

                        if (r != 0)
                                return r;
                }
        }
        return 0;
}

/* Counts of the walk over all regions, to be compared with the instance's own statistics. */
struct tally {
        const char *why;
        uint64_t n_used, n_free, n_idle, n_requested;
        uint32_t n_chunks, n_of[KIND_FREE + 1];
};

#define REQUIRE(t, condition, sentence)                                                                      \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        (t)->why = (sentence);                                                               \
                        return false;                                                                        \
                }                                                                                            \
        } while (0)

static bool check_pending(const struct bfc *b, uint32_t head, struct tally *t)
{
        const struct chunk *c = chunk_at(b, head);
        uint64_t size = c->size;

        REQUIRE(t, c->stamp != 0, "a pending block has a stamp");
        for (uint32_t i = c->next; chunk_kind(chunk_at(b, i)) == KIND_PIECE && chunk_at(b, i)->link == head;
             i = chunk_at(b, i)->next) {
                REQUIRE(t, size <= c->link, "only a tail lies beyond a pending block");
                if ((chunk_at(b, i)->meta & PIECE_TAIL) == 0)
                        size += chunk_at(b, i)->size;
                else
                        REQUIRE(t, size == c->link, "a tail lies at the end of its block");
        }
        REQUIRE(t, size == c->link, "the pieces of a pending block add up");
        t->n_used += size;
        t->n_requested += to_bytes(size) - chunk_waste(c);
        return true;
}

static bool check_piece(const struct bfc *b, uint32_t i, struct tally *t)
{
        const struct chunk *c = chunk_at(b, i), *p = chunk_at(b, c->prev);
        bool follows = c->prev == c->link || (chunk_kind(p) == KIND_PIECE && p->link == c->link);

        REQUIRE(t, follows && (p->meta & PIECE_TAIL) == 0, "pieces follow their block's first one");
        REQUIRE(t, chunk_kind(chunk_at(b, c->link)) == KIND_PENDING, "a piece names a pending block");
        if ((c->meta & PIECE_TAIL) != 0)
                t->n_idle += c->size;
        return true;
}

static bool check_hole(const struct bfc *b, const struct region *r, uint32_t i, struct tally *t)
{
        const struct chunk *c = chunk_at(b, i);
        enum kind kind = chunk_kind(c);
        uint32_t head = kind == KIND_HOLE ? b->holes : b->retiring;

        REQUIRE(t, grid_has(b, r, c->addr) && grid_has(b, r, chunk_end(c)), "holes are whole extents");
        REQUIRE(t, c->link != 0 ? chunk_at(b, c->link)->stamp == i : head == i, "lists lead back");
        if (kind == KIND_RETIRING)
                t->n_idle += c->size;
        else
                REQUIRE(t, chunk_kind(chunk_at(b, c->prev)) != KIND_HOLE, "two holes never touch");
        return true;
}

static bool check_chunk(const struct bfc *b, const struct region *r, uint32_t i, struct tally *t)
{
        const struct chunk *c = chunk_at(b, i);
        enum kind kind = chunk_kind(c);

        REQUIRE(t, c->size > 0, "no chunk is empty");
        REQUIRE(t, chunk_at(b, c->next)->prev == i, "next and prev agree");
        t->n_chunks++;
        t->n_of[kind]++;
        switch (kind) {
        case KIND_USED:
                REQUIRE(t, c->stamp != 0, "a used chunk has a stamp");
                t->n_used += c->size;
                t->n_requested += to_bytes(c->size) - chunk_waste(c);
                return true;
        case KIND_FREE:
                REQUIRE(t, words_of(b)[c->slot] == i, "words[chunk_at(i)->slot] == i");
                REQUIRE(t, chunk_at(b, c->prev)->slot == 0, "two free chunks never touch");
                t->n_free += c->size;
                return true;
        case KIND_PENDING:
        case KIND_PIECE:
                return kind == KIND_PIECE ? check_piece(b, i, t) : check_pending(b, i, t);
        case KIND_HOLE:
        case KIND_RETIRING:
                return check_hole(b, r, i, t);
        case KIND_NONE:
        case KIND_EDGE:
                break;
        }
        t->why = "only chunks lie in a region";
        return false;
}

static bool check_regions(const struct bfc *b, struct tally *t)
{
        uint64_t end = 0;

        for (uint32_t k = 0; k < b->n_regions; k++) {
                const struct region *r = &b->regions[k];

                REQUIRE(t, r->base >= end, "regions are sorted and do not overlap");
                REQUIRE(t, chunk_kind(chunk_at(b, r->edge)) == KIND_EDGE, "a region has its edge");
                end = r->base;
                for (uint32_t i = chunk_at(b, r->edge)->next; i != r->edge; i = chunk_at(b, i)->next) {
                        REQUIRE(t, chunk_at(b, i)->addr == end, "chunks tile their region");
                        if (!check_chunk(b, r, i, t))
                                return false;
                        end += chunk_at(b, i)->size;
                }
                REQUIRE(t, end == region_end(r), "chunks tile their region");
        }
        return true;
}

/* One of the equals of a node. */
static bool check_equal(const struct bfc *b, uint32_t i, struct tally *t)
{
        const struct chunk *c = chunk_at(b, i);
        const struct chunk *up = chunk_at(b, SLOT_OWNER(c->slot));
        uint64_t weight = equal_weight(b, i), left = equal_weight(b, c->child[0]);
        uint64_t right = equal_weight(b, c->child[1]);

        REQUIRE(t, up->size == c->size, "equals are equal");
        REQUIRE(t, up->addr < c->addr, "the lowest address of equals is on top");
        REQUIRE(t, weight == MAX_WEIGHT || (weight >= 1 + left + right && weight >= 1 + 2 * right),
                "the right sides of equals are light");
        return true;
}

/* A node of a trie: the bits of its size are those of the path to it. */
static bool check_node(const struct bfc *b, uint32_t i, uint32_t bin, struct tally *t)
{
        const struct chunk *c = chunk_at(b, i);
        uint32_t slot = c->slot, level = 0, path = 0;

        if (slot >= END_OF_HEADS)
                REQUIRE(t, chunk_at(b, SLOT_OWNER(slot))->size < c->size, "the smallest size is on top");
        for (; slot >= END_OF_HEADS; slot = chunk_at(b, SLOT_OWNER(slot))->slot, level++)
                path |= (slot - SLOT_CHILD(SLOT_OWNER(slot), 0)) << level;
        REQUIRE(t, slot == FIRST_HEAD + bin && bin == bin_of(c->size), "a chunk is in the bin of its size");
        REQUIRE(t, level <= bin_shift(c->size), "a trie is as deep as its bin is wide");
        REQUIRE(t,
                (c->size & ((UINT32_C(1) << bin_shift(c->size)) - 1)) >> (bin_shift(c->size) - level) == path,
                "a chunk lies where the bits of its size lead");
        return true;
}

static bool check_index(const struct bfc *b, struct tally *t)
{
        uint32_t n = 0;

        for (uint32_t w = 0; w < N_MAP_WORDS; w++)
                REQUIRE(t, (b->map[w] != 0) == (b->map_top >> w & 1u), "map_top tells which words are not 0");
        REQUIRE(t, b->map[N_MAP_WORDS] == 0, "the map ends");
        for (uint32_t bin = 0; bin < N_BINS; bin++)
                REQUIRE(t,
                        (words_of(b)[FIRST_HEAD + bin] != 0) == (b->map[bin / 64] >> bin % 64 & UINT64_C(1)),
                        "the map tells which bins are not empty");
        /* Every free chunk has one slot that refers to it, so equal counts mean that each is referred to
         * once. */
        for (uint32_t i = bfc_index_next(b, 0, 0); i != 0; i = bfc_index_next(b, 0, i)) {
                const struct chunk *c = chunk_at(b, i);

                REQUIRE(t, ++n <= t->n_of[KIND_FREE], "the index holds free chunks only");
                REQUIRE(t, c->slot != 0 && words_of(b)[c->slot] == i, "words[chunk_at(i)->slot] == i");
                if ((c->equal & EQUAL_TAG) != 0 ? !check_equal(b, i, t)
                                                : !check_node(b, i, bin_of(c->size), t))
                        return false;
        }
        REQUIRE(t, n == t->n_of[KIND_FREE], "every free chunk is in the index");
        REQUIRE(t,
                chunk_at(b, 0)->child[0] == 0 && chunk_at(b, 0)->child[1] == 0 && chunk_at(b, 0)->equal == 0,
                "the scratch record has no links");
        return true;
}

static bool check_records(const struct bfc *b, struct tally *t)
{
        uint32_t n_spare = 0;

        for (uint32_t i = b->spare; i != 0; i = chunk_at(b, i)->next) {
                REQUIRE(t, ++n_spare <= b->n_spare, "the spare records are counted");
                REQUIRE(t, chunk_kind(chunk_at(b, i)) == KIND_NONE, "a spare record is nothing else");
        }
        REQUIRE(t, n_spare == b->n_spare, "the spare records are counted");
        REQUIRE(t, b->n_records <= b->n_ready && b->n_ready <= b->n_reserved, "memory stands behind records");
        REQUIRE(t, n_spare + b->n_regions + t->n_chunks == b->n_records - FIRST_RECORD, "no record is lost");
        return true;
}

static bool check_counters(const struct bfc *b, struct tally *t)
{
        uint64_t n_blocks = b->n_allocs - b->n_frees + b->n_pending;

        REQUIRE(t, t->n_of[KIND_PENDING] == b->n_pending && t->n_of[KIND_PIECE] == b->n_pieces,
                "pending pieces are counted");
        REQUIRE(t, t->n_of[KIND_HOLE] == b->n_holes && t->n_of[KIND_RETIRING] == b->n_retiring,
                "holes and retiring chunks are counted");
        REQUIRE(t, t->n_of[KIND_USED] + t->n_of[KIND_PENDING] == n_blocks, "blocks are counted");
        REQUIRE(t, t->n_used == b->n_used && t->n_requested == b->n_requested, "used bytes are counted");
        REQUIRE(t, t->n_idle == b->idle, "tails and retiring chunks are counted");
        REQUIRE(t, t->n_used + t->n_idle + t->n_free == b->reserved, "used + idle + free == reserved");
        REQUIRE(t,
                b->n_used <= b->peak_used && b->n_requested <= b->peak_requested &&
                        b->reserved <= b->peak_reserved,
                "no value is above its peak");
        return true;
}

int bfc_check(const struct bfc *b, const char **ret_why)
{
        struct tally t = { .why = NULL };

        if (check_regions(b, &t) && check_index(b, &t) && check_records(b, &t) && check_counters(b, &t))
                return 0;
        *ret_why = t.why;
        return -EBADMSG;
}
