/* The table of blocks; see blocks.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A search without the lock can miss a block, because a record moves to another chain or the heads
 * grow meanwhile. So records and old heads stay readable until blocks_clear(), the walk has a bound, and the
 * caller searches again under the lock. A block that is found is certain: the word has the pointer and the
 * state, and is exchanged as one. */
#include "client/blocks.h"

#include <errno.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/process.h"
#include "proto/pages.h"

#define FIRST_RECORDS 64u
#define MAX_WALK      64u

/* Blocks are aligned to 256 bytes, so the low byte of a pointer is free. */
enum {
        STATE_USED = 1,
        STATE_LEAVING = 2,
        STATE_STASHED = 3,
        STATE = 3,
        MAY_STASH = 4,
        IS_SLAB = 8, /* part of the key, as the pointer is */
        BESIDE_POINTER = 0xff,
};

struct blocks_heads {
        size_t n; /* a power of two */
        struct blocks_heads *older;
        struct record *first[]; /* atomic */
};

static uint64_t word_of(const void *ptr)
{
        return (uint64_t)(uintptr_t)ptr;
}

static uint64_t load(const uint64_t *word)
{
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static bool change(struct record *r, uint64_t from, uint64_t to)
{
        return __atomic_compare_exchange_n(&r->word, &from, to, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
}

static struct record **head_of(struct blocks_heads *heads, const void *ptr)
{
        uint64_t hash = (word_of(ptr) >> 8) * UINT64_C(0x9e3779b97f4a7c15); /* Fibonacci's */

        return &heads->first[(size_t)(hash >> 32) & (heads->n - 1)];
}

/* ---- by place ----------------------------------------------------------------- */

/* Blocks do not overlap, so they have an order, and a range inside of one is equal to it. */
static int compare_places(const void *left, const void *right)
{
        const struct record *a = left, *b = right;

        if (word_of(a->block.ptr) + (a->block.n_bytes - 1) < word_of(b->block.ptr))
                return -1;
        return word_of(a->block.ptr) > word_of(b->block.ptr) + (b->block.n_bytes - 1);
}

static void forget_place(void *node)
{
        (void)node; /* the record is the table's */
}

static void blocks_drop_places(struct blocks *b)
{
        tdestroy(b->by_place, forget_place);
        b->by_place = NULL;
}

/* -ENOMEM. -EEXIST: another block has this address. */
static int blocks_add_place(struct blocks *b, struct record *r)
{
        struct record **node = r->block.n_bytes > 0 ? tsearch(r, &b->by_place, compare_places) : NULL;

        if (!node)
                return -ENOMEM;
        return *node == r ? 0 : -EEXIST;
}

void blocks_clear(struct blocks *b)
{
        struct blocks_heads *heads = b->heads, *older;

        blocks_drop_places(b);
        for (; heads; heads = older) {
                older = heads->older;
                free(heads);
        }
        for (unsigned i = 0; i < BLOCKS_MAX_STEPS; i++)
                free(b->records[i]);
        *b = (struct blocks){ 0 };
}

/* ---- records --------------------------------------------------------------- */

static size_t n_records_of(unsigned step)
{
        return (size_t)FIRST_RECORDS << step;
}

static void chain(struct blocks_heads *heads, struct record *r, const void *ptr)
{
        struct record **head = head_of(heads, ptr);

        __atomic_store_n(&r->next, *head, __ATOMIC_RELAXED);
        __atomic_store_n(head, r, __ATOMIC_RELEASE);
}

static struct record *records_new(size_t n)
{
        struct record *records = aligned_alloc(_Alignof(struct record), n * sizeof(*records));

        for (size_t i = 0; records && i < n; i++)
                records[i] = (struct record){ 0 };
        return records;
}

static unsigned n_steps(const struct blocks *b)
{
        unsigned n = 0;

        while (n < BLOCKS_MAX_STEPS && b->records[n])
                n++;
        return n;
}

/* The records of a step are more than all before, so there are heads for twice as many. */
static int blocks_grow(struct blocks *b)
{
        unsigned n_before = n_steps(b);
        size_t n = n_records_of(n_before), n_heads = 2 * n;
        struct blocks_heads *heads = calloc(1, sizeof(*heads) + n_heads * sizeof(heads->first[0]));
        struct record *records = n_before < BLOCKS_MAX_STEPS ? records_new(n) : NULL;

        if (!heads || !records) {
                free(heads);
                free(records);
                return -ENOMEM;
        }
        heads->n = n_heads;
        heads->older = b->heads;
        for (unsigned step = 0; step < n_before; step++)
                for (size_t i = 0; i < n_records_of(step); i++)
                        chain(heads, &b->records[step][i], b->records[step][i].block.ptr);
        for (size_t i = 0; i < n; i++) {
                records[i].below = b->spare;
                b->spare = &records[i];
        }
        b->records[n_before] = records;
        __atomic_store_n(&b->heads, heads, __ATOMIC_RELEASE);
        return 0;
}

/* Any thread. */
static inline __attribute__((always_inline)) struct record *record_at(const struct blocks *b, const void *ptr,
                                                                      uint64_t is_slab, size_t max_walk)
{
        struct blocks_heads *heads = __atomic_load_n(&b->heads, __ATOMIC_ACQUIRE);
        struct record *r;

        if (!heads || !ptr || word_of(ptr) & BESIDE_POINTER)
                return NULL;
        r = __atomic_load_n(head_of(heads, ptr), __ATOMIC_ACQUIRE);
        for (size_t i = 0; r && i < max_walk; i++) {
                if ((load(&r->word) & ~(uint64_t)(BESIDE_POINTER - IS_SLAB)) == (word_of(ptr) | is_slab))
                        return r;
                r = __atomic_load_n(&r->next, __ATOMIC_ACQUIRE);
        }
        return NULL;
}

static struct record *record_find(const struct blocks *b, const void *ptr)
{
        return record_at(b, ptr, 0, SIZE_MAX);
}

/* Its word is 0, or no other thread can change it. */
static void record_remove(struct blocks *b, struct record *r)
{
        struct record **at = head_of(b->heads, r->block.ptr);

        if (b->by_place && !r->block.is_slab)
                (void)tdelete(r, &b->by_place, compare_places);
        while (*at != r)
                at = &(*at)->next;
        __atomic_store_n(at, r->next, __ATOMIC_RELEASE);
        __atomic_store_n(&r->word, 0, __ATOMIC_RELAXED);
        r->below = b->spare;
        b->spare = r;
        b->n_used--;
}

/* ---- under the lock ---------------------------------------------------------- */

int blocks_add(struct blocks *b, const struct block *block)
{
        struct record *r;

        if (record_at(b, block->ptr, block->is_slab ? IS_SLAB : 0, SIZE_MAX))
                return -EEXIST;
        if (!b->spare && blocks_grow(b) < 0)
                return -ENOMEM;
        r = b->spare;
        r->block = *block;
        if (b->by_place && !block->is_slab) {
                int error = blocks_add_place(b, r);

                if (error < 0)
                        return error;
        }
        b->spare = r->below;
        b->n_used++;
        __atomic_store_n(&r->word,
                         word_of(block->ptr) | STATE_USED | (block->may_stash ? MAY_STASH : 0) |
                                 (block->is_slab ? IS_SLAB : 0),
                         __ATOMIC_RELEASE);
        chain(b->heads, r, block->ptr);
        return 0;
}

static bool is_used(const struct record *r)
{
        return (load(&r->word) & (STATE | IS_SLAB)) == STATE_USED;
}

const struct block *blocks_find(const struct blocks *b, const void *ptr)
{
        const struct record *r = record_find(b, ptr);

        return r && is_used(r) ? &r->block : NULL;
}

void blocks_set_born(struct blocks *b, const void *ptr, uint32_t born)
{
        struct record *r = record_find(b, ptr);

        if (r && is_used(r))
                r->block.born = born;
}

void blocks_set_parked(struct blocks *b, const void *ptr, bool is_parked)
{
        struct record *r = record_find(b, ptr);

        if (r && is_used(r))
                r->block.is_parked = is_parked;
}

int blocks_leave(struct blocks *b, const void *ptr, struct block *ret)
{
        struct record *r = record_find(b, ptr);
        uint64_t word = r ? load(&r->word) : 0;

        if ((word & STATE) != STATE_USED || !change(r, word, word - STATE_USED + STATE_LEAVING))
                return -ENOENT;
        *ret = r->block;
        return 0;
}

void blocks_stay(struct blocks *b, const void *ptr)
{
        struct record *r = record_find(b, ptr);
        uint64_t word = r ? load(&r->word) : 0;

        if ((word & STATE) == STATE_LEAVING)
                change(r, word, word - STATE_LEAVING + STATE_USED);
}

static int record_take(struct blocks *b, struct record *r, struct block *ret)
{
        uint64_t word = r ? load(&r->word) : 0;

        if (word == 0 || (word & STATE) == STATE_STASHED || !change(r, word, 0))
                return -ENOENT;
        *ret = r->block;
        record_remove(b, r);
        return 0;
}

int blocks_take(struct blocks *b, const void *ptr, struct block *ret)
{
        return record_take(b, record_find(b, ptr), ret);
}

int blocks_take_slab(struct blocks *b, const void *ptr, struct block *ret)
{
        return record_take(b, record_at(b, ptr, IS_SLAB, SIZE_MAX), ret);
}

void blocks_take_stashed(struct blocks *b, struct record *record, struct block *ret)
{
        *ret = record->block;
        record_remove(b, record);
}

/* ---- any thread ---------------------------------------------------------------- */

struct record *blocks_stash(const struct blocks *b, const void *ptr)
{
        struct record *r = record_at(b, ptr, 0, MAX_WALK);
        uint64_t used = word_of(ptr) | STATE_USED | MAY_STASH;

        return r && change(r, used, used - STATE_USED + STATE_STASHED) ? r : NULL;
}

struct record *blocks_unstash(struct record *record, uint64_t n_requested, uint32_t born)
{
        record->block.born = born;
        record->block.n_requested = n_requested;
        __atomic_store_n(&record->word, word_of(record->block.ptr) | STATE_USED | MAY_STASH,
                         __ATOMIC_RELEASE);
        return record;
}

/* ---- looking at all ------------------------------------------------------------- */

/* The record with this number, beginning with 0. */
static const struct record *record_number(const struct blocks *b, size_t i)
{
        unsigned step = 0;

        for (; step < BLOCKS_MAX_STEPS && b->records[step] && i >= n_records_of(step); step++)
                i -= n_records_of(step);
        return step < BLOCKS_MAX_STEPS && b->records[step] ? &b->records[step][i] : NULL;
}

const struct block *blocks_next(const struct blocks *b, size_t *cursor)
{
        const struct record *r;

        while ((r = record_number(b, *cursor))) {
                ++*cursor;
                if (is_used(r))
                        return &r->block;
        }
        return NULL;
}

const struct block *blocks_next_kept(const struct blocks *b, size_t *cursor)
{
        const struct record *r;

        while ((r = record_number(b, *cursor))) {
                uint64_t state = load(&r->word) & STATE;

                ++*cursor;
                if (state == STATE_USED || state == STATE_LEAVING)
                        return &r->block;
        }
        return NULL;
}

static bool block_holds(const struct block *block, const void *ptr, uint64_t n_bytes)
{
        uint64_t offset = (uint64_t)((uintptr_t)ptr - (uintptr_t)block->ptr);

        return offset <= block->n_bytes && n_bytes <= block->n_bytes - offset;
}

/* Of every block that is there now. False: there is no memory for it. */
static bool blocks_make_places(struct blocks *b)
{
        struct record *r;

        if (b->by_place)
                return true;
        for (size_t i = 0; (r = (struct record *)record_number(b, i)); i++) {
                if (load(&r->word) == 0 || r->block.is_slab || blocks_add_place(b, r) == 0)
                        continue;
                blocks_drop_places(b);
                return false;
        }
        return true;
}

/* Without the tree. */
static const struct block *blocks_look_around(const struct blocks *b, const void *ptr, uint64_t n_bytes)
{
        const struct block *block;
        size_t cursor = 0;

        while ((block = blocks_next(b, &cursor)))
                if (block_holds(block, ptr, n_bytes))
                        return block;
        return NULL;
}

const struct block *blocks_find_around(struct blocks *b, const void *ptr, uint64_t n_bytes)
{
        const struct record key = { .block = { .ptr = ptr, .n_bytes = 1 } };
        const struct block *block = blocks_find(b, ptr);
        struct record **node;

        if (block)
                return block_holds(block, ptr, n_bytes) ? block : NULL;
        if (!blocks_make_places(b))
                return blocks_look_around(b, ptr, n_bytes);
        node = tfind(&key, &b->by_place, compare_places);
        return node && is_used(*node) && block_holds(&(*node)->block, ptr, n_bytes) ? &(*node)->block : NULL;
}

bool blocks_lie_in(const struct blocks *b, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        const struct record *r;

        for (size_t i = 0; (r = record_number(b, i)); i++) {
                const struct block *block = &r->block;

                if (load(&r->word) != 0 && block->region_id == region_id &&
                    block->offset < offset + n_bytes && offset < block->offset + block->n_bytes)
                        return true;
        }
        return false;
}

/* ---- parkable blocks --------------------------------------------------------- */

void parkables_init(struct parkables *s)
{
        TAILQ_INIT(&s->idle);
        TAILQ_INIT(&s->others);
}

static void list_free(struct parkable_list *list)
{
        struct parkable *p;

        while ((p = TAILQ_FIRST(list))) {
                TAILQ_REMOVE(list, p, link);
                free(p);
        }
}

void parkables_clear(struct parkables *s)
{
        list_free(&s->idle);
        list_free(&s->others);
}

struct parkable *parkable_new(const char *tag)
{
        struct parkable *p = calloc(1, sizeof(*p));

        if (p && tag)
                snprintf(p->tag, sizeof(p->tag), "%s", tag);
        return p;
}

static void publish_idle(const struct parkables *s)
{
        const struct parkable *first = TAILQ_FIRST(&s->idle);

        if (!s->page)
                return;
        atomic_store_explicit(&s->page->since_ms, first ? (uint64_t)first->used_ms : 0, memory_order_relaxed);
        atomic_store_explicit(&s->page->bytes, s->idle_bytes, memory_order_relaxed);
}

void parkables_show(struct parkables *s, struct pages_idle *page)
{
        s->page = page;
        publish_idle(s);
}

/* In the order of the last uses; most are the latest. */
static void insert_idle(struct parkables *s, struct parkable *p)
{
        struct parkable *at = TAILQ_LAST(&s->idle, parkable_list);

        while (at && at->used_ms > p->used_ms)
                at = TAILQ_PREV(at, parkable_list, link);
        if (at)
                TAILQ_INSERT_AFTER(&s->idle, at, p, link);
        else
                TAILQ_INSERT_HEAD(&s->idle, p, link);
        s->idle_bytes += p->block->n_bytes;
        p->is_idle = true;
        publish_idle(s);
}

static void take_out(struct parkables *s, const struct block *block, struct parkable *p)
{
        TAILQ_REMOVE(p->is_idle ? &s->idle : &s->others, p, link);
        if (p->is_idle)
                s->idle_bytes -= block->n_bytes;
        p->is_idle = false;
        publish_idle(s);
}

void parkable_enter(struct parkables *s, struct parkable *p, const struct block *block)
{
        p->block = block;
        p->in = s;
        p->used_ms = clock_now_ms();
        if (p->is_shared)
                TAILQ_INSERT_TAIL(&s->others, p, link);
        else
                insert_idle(s, p);
}

void parkable_drop(const struct block *block, struct parkable *p)
{
        take_out(p->in, block, p);
        free(p);
}

void parkable_sort(struct parkable *p)
{
        take_out(p->in, p->block, p);
        if (!p->block->is_parked && !parkable_is_used(p) && !p->is_busy && !p->is_shared)
                insert_idle(p->in, p);
        else
                TAILQ_INSERT_TAIL(&p->in->others, p, link);
}

void parkable_touch(struct parkable *p)
{
        p->used_ms = clock_now_ms();
        parkable_sort(p);
}

bool parkable_has_tag(const struct parkable *p, const char *tag)
{
        return !tag || strcmp(p->tag, tag) == 0;
}

struct parkable *parkables_find_busy(const struct parkables *s, const void *ptr)
{
        struct parkable *p;

        TAILQ_FOREACH(p, &s->others, link)
        {
                if (p->is_busy && (uintptr_t)ptr - (uintptr_t)p->block->ptr < p->block->n_bytes)
                        return p;
        }
        return NULL;
}

bool parkables_cover(const struct parkables *s, uint64_t region_id, uint64_t offset)
{
        const struct parkable *p;

        TAILQ_FOREACH(p, &s->others, link)
        {
                if ((p->is_busy || p->block->is_parked) && p->block->region_id == region_id &&
                    offset - p->block->offset < p->block->n_bytes)
                        return true;
        }
        return false;
}
