/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger's memfd: a header page, then the eight tables, each beginning on a
 * page of its own.
 *
 * What a successor needs is in the memfd: the records, and in the header where
 * the tables lie, how far each was ever used, and the next id of each. What
 * only speeds up this process (free lists, counts) is in struct ledger or in
 * the records' links. So it is enough to keep one order of stores:
 *
 *   make:  facts and links, then the header's words, then the id (release)
 *   clear: the id, then everything else
 *
 * A process killed between any two stores leaves each record committed or
 * free, and no id that it gave can be given again. A kill is precise, so the
 * compiler's order is all that counts; on x86 none of this costs a fence.
 *
 * Free records are chained through a link field of their own, last freed first
 * (its page is warm). Never-used records are taken only when that chain is
 * empty, so that the sparse memfd grows with the peak, not with the traffic. */
#include "daemon/ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/ledger_table.h"
#include "proto/memfd.h"

#define MIB_BYTES (UINT64_C(1) << 20)

/* A quota has no links; while it is free nobody reads its facts. */
static const struct {
        size_t record_bytes;
        size_t link_offset;
} KINDS[N_TABLES] = {
        [TABLE_QUOTA] = { sizeof(struct ledger_quota), offsetof(struct ledger_quota, extent_bytes) },
        [TABLE_SESSION] = { sizeof(struct ledger_session),
                            offsetof(struct ledger_session, links.first_block) },
        [TABLE_EXTENT] = { sizeof(struct ledger_extent), offsetof(struct ledger_extent, links.first_export) },
        [TABLE_EXPORT] = { sizeof(struct ledger_export),
                           offsetof(struct ledger_export, links.next_of_session) },
        [TABLE_BLOCK] = { sizeof(struct ledger_block), offsetof(struct ledger_block, links.next_of_session) },
        [TABLE_SHARED] = { sizeof(struct ledger_shared), offsetof(struct ledger_shared, links.first_hold) },
        [TABLE_HOLD] = { sizeof(struct ledger_hold), offsetof(struct ledger_hold, links.next_of_session) },
        [TABLE_REGION] = { sizeof(struct ledger_region), offsetof(struct ledger_region, number) },
};

/* The layout is an interface between versions: a change must be seen, and bump
 * LEDGER_LAYOUT. There may be millions of blocks. */
_Static_assert(sizeof(struct ledger_quota) == 224, "layout of a quota");
_Static_assert(sizeof(struct ledger_region) == 40, "layout of a region");
_Static_assert(sizeof(struct ledger_session) == 240, "layout of a session");
_Static_assert(sizeof(struct ledger_extent) == 56, "layout of an extent");
_Static_assert(sizeof(struct ledger_export) == 32, "layout of an export");
_Static_assert(sizeof(struct ledger_shared) == 96, "layout of a shared block");
_Static_assert(sizeof(struct ledger_hold) == 40, "layout of a hold");
_Static_assert(sizeof(struct ledger_block) == 112, "layout of a block");
_Static_assert(sizeof(struct header) <= 4096, "the header is one page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a commit is one store");
_Static_assert(offsetof(struct ledger_quota, id) == 0 && offsetof(struct ledger_session, id) == 0 &&
                       offsetof(struct ledger_extent, id) == 0 && offsetof(struct ledger_export, id) == 0 &&
                       offsetof(struct ledger_block, id) == 0 && offsetof(struct ledger_shared, id) == 0 &&
                       offsetof(struct ledger_hold, id) == 0 && offsetof(struct ledger_region, id) == 0,
               "every record starts with its id");

/* ---- making and ending ---------------------------------------------------- */

static uint64_t to_pages(uint64_t n_bytes, uint64_t page_bytes)
{
        return (n_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

/* Fills *ret with the offset of each table; no overflow: 2^32 records of
 * the largest kind, a session's 240 bytes, are less than 2^40 bytes. */
int ledger_lay_out(const struct ledger_limits *limits, struct header *ret)
{
        const uint32_t n_records[N_TABLES] = {
                [TABLE_QUOTA] = limits->n_quotas,   [TABLE_SESSION] = limits->n_sessions,
                [TABLE_EXTENT] = limits->n_extents, [TABLE_EXPORT] = limits->n_exports,
                [TABLE_BLOCK] = limits->n_blocks,   [TABLE_SHARED] = limits->n_shared,
                [TABLE_HOLD] = limits->n_holds,
        };
        uint64_t n_regions = (uint64_t)limits->n_extents + limits->n_quotas;
        uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
        struct header h = { .magic = LEDGER_MAGIC, .layout = LEDGER_LAYOUT, .n_tables = N_TABLES };

        h.n_bytes = to_pages(sizeof(h), page_bytes);
        for (size_t i = 0; i < N_TABLES; i++) {
                struct header_table *t = &h.tables[i];
                uint32_t n = i == TABLE_REGION ? (uint32_t)n_regions : n_records[i];

                if ((i < TABLE_SHARED && n == 0) || n == LEDGER_NONE || n_regions >= LEDGER_NONE)
                        return -EINVAL;
                t->offset = h.n_bytes;
                t->n_records = n;
                t->record_bytes = (uint32_t)KINDS[i].record_bytes;
                atomic_init(&t->next_id, 1);
                h.n_bytes += to_pages((uint64_t)n * KINDS[i].record_bytes, page_bytes);
        }
        memcpy(ret, &h, sizeof(h));
        return 0;
}

int ledger_map(struct ledger *l)
{
        void *p = mmap(NULL, l->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, l->fd, 0);

        if (p == MAP_FAILED)
                return -errno;
        l->header = p;
        return 0;
}

static int make_memfd(struct ledger *l)
{
        int fd = memfd_make("bfcd-ledger");

        if (fd < 0)
                return fd;
        l->fd = fd;
        if (ftruncate(l->fd, (off_t)l->n_bytes) < 0)
                return -errno;
        if (fcntl(l->fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
                return -errno;
        return ledger_map(l);
}

void ledger_find_tables(struct ledger *l)
{
        for (size_t i = 0; i < N_TABLES; i++) {
                struct header_table *shared = &l->header->tables[i];

                l->tables[i] = (struct table){
                        .shared = shared,
                        .records = (unsigned char *)l->header + shared->offset,
                        .record_bytes = KINDS[i].record_bytes,
                        .link_offset = KINDS[i].link_offset,
                        .n_records = shared->n_records,
                        .first_free = LEDGER_NONE,
                };
        }
}

int ledger_new(const struct ledger_limits *limits, struct ledger **ret)
{
        struct header h;
        struct ledger *l;
        int r;

        r = ledger_lay_out(limits, &h);
        if (r < 0)
                return r;
        l = calloc(1, sizeof(*l));
        if (!l)
                return -ENOMEM;
        l->fd = -1;
        l->n_bytes = (size_t)h.n_bytes;
        r = make_memfd(l);
        if (r < 0) {
                ledger_free(l);
                return r;
        }
        memcpy(l->header, &h, sizeof(h));
        ledger_find_tables(l);
        *ret = l;
        return 0;
}

static uint32_t larger(uint32_t a, uint32_t b)
{
        return a > b ? a : b;
}

/* What lies before n_touched is all that there is of a table. */
static void copy_table(const struct table *from, struct table *to)
{
        uint64_t next_id = atomic_load_explicit(&from->shared->next_id, memory_order_relaxed);

        memcpy(to->records, from->records, (size_t)from->n_touched * from->record_bytes);
        atomic_store_explicit(&to->shared->next_id, next_id, memory_order_relaxed);
        atomic_store_explicit(&to->shared->n_touched, from->n_touched, memory_order_relaxed);
        to->n_touched = from->n_touched;
        to->n_used = from->n_used;
        to->n_free = from->n_free;
        to->n_retired = from->n_retired;
        to->first_free = from->first_free;
}

int ledger_grow(const struct ledger *from, const struct ledger_limits *limits, struct ledger **ret)
{
        struct ledger_limits n;
        int r;

        ledger_read_limits(from, &n);
        n.n_quotas = larger(n.n_quotas, limits->n_quotas);
        n.n_sessions = larger(n.n_sessions, limits->n_sessions);
        n.n_extents = larger(n.n_extents, limits->n_extents);
        n.n_exports = larger(n.n_exports, limits->n_exports);
        n.n_blocks = larger(n.n_blocks, limits->n_blocks);
        n.n_shared = larger(n.n_shared, limits->n_shared);
        n.n_holds = larger(n.n_holds, limits->n_holds);
        r = ledger_new(&n, ret);
        if (r < 0)
                return r;
        (*ret)->header->n_crashes = from->header->n_crashes;
        for (size_t i = 0; i < N_TABLES; i++)
                copy_table(&from->tables[i], &(*ret)->tables[i]);
        return 0;
}

struct ledger *ledger_free(struct ledger *l)
{
        if (!l)
                return NULL;
        if (l->header)
                munmap(l->header, l->n_bytes);
        if (l->fd >= 0)
                close(l->fd);
        free(l);
        return NULL;
}

_Atomic uint32_t *ledger_crashes(const struct ledger *l)
{
        return &l->header->n_crashes;
}

int ledger_fd(const struct ledger *l)
{
        return l->fd;
}

/* ---- a record's life ------------------------------------------------------ */

/* A free record, the last freed first. */
static int take(struct table *t, uint32_t *ret_index)
{
        if (t->first_free != LEDGER_NONE) {
                *ret_index = t->first_free;
                t->first_free = *record_link(t, *ret_index);
                t->n_free--;
        } else if (t->n_touched < t->n_records) {
                *ret_index = t->n_touched++;
                atomic_store_explicit(&t->shared->n_touched, t->n_touched, memory_order_relaxed);
        } else {
                return -ENOSPC;
        }
        t->n_used++;
        return 0;
}

/* Everything but the id, which all records start with. */
static void fill(const struct table *t, uint32_t index, const void *facts)
{
        memcpy((unsigned char *)record(t, index) + sizeof(uint64_t),
               (const unsigned char *)facts + sizeof(uint64_t), t->record_bytes - sizeof(uint64_t));
}

static void put_back(struct table *t, uint32_t index)
{
        table_chain(t, index);
        t->n_used--;
}

/* ---- the tables ----------------------------------------------------------- */

struct ledger_quota *ledger_quota_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_QUOTA], index);
}

struct ledger_session *ledger_session_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_SESSION], index);
}

struct ledger_extent *ledger_extent_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_EXTENT], index);
}

struct ledger_export *ledger_export_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_EXPORT], index);
}

struct ledger_block *ledger_block_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_BLOCK], index);
}

struct ledger_shared *ledger_shared_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_SHARED], index);
}

struct ledger_hold *ledger_hold_at(struct ledger *l, uint32_t index)
{
        return used_record(&l->tables[TABLE_HOLD], index);
}

int ledger_quota_add(struct ledger *l, const struct ledger_quota *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_QUOTA];
        struct ledger_quota *q;
        uint32_t index;
        int r;

        r = take(t, &index);
        if (r < 0)
                return r;
        fill(t, index, facts);
        q = record(t, index);
        q->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        q->partition[LEDGER_NAME_BYTES - 1] = '\0';
        atomic_init(&q->is_closed, 0);
        atomic_init(&q->growing_mib, 0);
        atomic_init(&q->oom_kills, 0);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_quota_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_QUOTA];

        assert(in_use(t, index));
        uncommit(t, index);
        put_back(t, index);
}

static uint32_t mib_of(uint64_t n_bytes)
{
        uint64_t n_mib = n_bytes / MIB_BYTES + (n_bytes % MIB_BYTES > 0);

        return n_mib < UINT32_MAX ? (uint32_t)n_mib : UINT32_MAX;
}

void ledger_quota_grows(struct ledger *l, uint32_t index, uint64_t n_bytes, uint32_t oom_kills)
{
        struct ledger_quota *q = ledger_quota_at(l, index);

        if (n_bytes > 0)
                atomic_store_explicit(&q->oom_kills, oom_kills, memory_order_relaxed);
        atomic_store_explicit(&q->growing_mib, mib_of(n_bytes), memory_order_release);
}

void ledger_quota_close(struct ledger *l, uint32_t index)
{
        atomic_store_explicit(&ledger_quota_at(l, index)->is_closed, 1, memory_order_release);
}

int ledger_region_add(struct ledger *l, const struct ledger_region *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_REGION];
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = take(t, &index);
        if (r < 0)
                return r;
        fill(t, index, facts);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_region_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_REGION];

        assert(in_use(t, index));
        uncommit(t, index);
        put_back(t, index);
}

int ledger_session_add(struct ledger *l, const struct ledger_session *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_SESSION];
        struct ledger_session *s;
        uint32_t index;
        int r;

        r = take(t, &index);
        if (r < 0)
                return r;
        fill(t, index, facts);
        s = record(t, index);
        s->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        s->name[LEDGER_NAME_BYTES - 1] = '\0';
        s->split_id = 0;
        s->split_off_id = 0;
        ledger_link_nothing(s);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_session_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_SESSION];
        struct ledger_session *s = used_record(t, index);

        assert(s->links.n_blocks == 0 && s->links.n_exports == 0 && s->links.n_holds == 0);
        /* The secret opens the session; it must not outlive it. */
        uncommit(t, index);
        explicit_bzero(s->secret, sizeof(s->secret));
        put_back(t, index);
}

int ledger_extent_add(struct ledger *l, const struct ledger_extent *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_EXTENT];
        struct ledger_extent *e;
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = take(t, &index);
        if (r < 0)
                return r;
        fill(t, index, facts);
        e = record(t, index);
        e->links.first_export = LEDGER_NONE;
        e->links.n_exports = 0;
        atomic_init(&e->is_leaving, 0);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_extent_leave(struct ledger *l, uint32_t index)
{
        atomic_store_explicit(&ledger_extent_at(l, index)->is_leaving, 1, memory_order_release);
}

void ledger_extent_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_EXTENT];
        const struct ledger_extent *e = used_record(t, index);

        assert(e->links.n_exports == 0);
        uncommit(t, index);
        put_back(t, index);
}

/* New exports and blocks go to the front of their lists: constant time, and
 * what was made last is torn down first. */
void ledger_link_export(struct ledger *l, uint32_t index)
{
        struct ledger_export *x = record(&l->tables[TABLE_EXPORT], index);
        struct ledger_session *s = ledger_session_at(l, x->session);
        struct ledger_extent *e = ledger_extent_at(l, x->extent);

        x->links.prev_of_session = LEDGER_NONE;
        x->links.next_of_session = s->links.first_export;
        if (s->links.first_export != LEDGER_NONE)
                ledger_export_at(l, s->links.first_export)->links.prev_of_session = index;
        s->links.first_export = index;
        s->links.n_exports++;

        x->links.prev_of_extent = LEDGER_NONE;
        x->links.next_of_extent = e->links.first_export;
        if (e->links.first_export != LEDGER_NONE)
                ledger_export_at(l, e->links.first_export)->links.prev_of_extent = index;
        e->links.first_export = index;
        e->links.n_exports++;
}

static void unlink_export(struct ledger *l, const struct ledger_export *x)
{
        struct ledger_session *s = ledger_session_at(l, x->session);
        struct ledger_extent *e = ledger_extent_at(l, x->extent);

        if (x->links.prev_of_session != LEDGER_NONE)
                ledger_export_at(l, x->links.prev_of_session)->links.next_of_session =
                        x->links.next_of_session;
        else
                s->links.first_export = x->links.next_of_session;
        if (x->links.next_of_session != LEDGER_NONE)
                ledger_export_at(l, x->links.next_of_session)->links.prev_of_session =
                        x->links.prev_of_session;
        s->links.n_exports--;

        if (x->links.prev_of_extent != LEDGER_NONE)
                ledger_export_at(l, x->links.prev_of_extent)->links.next_of_extent = x->links.next_of_extent;
        else
                e->links.first_export = x->links.next_of_extent;
        if (x->links.next_of_extent != LEDGER_NONE)
                ledger_export_at(l, x->links.next_of_extent)->links.prev_of_extent = x->links.prev_of_extent;
        e->links.n_exports--;
}

int ledger_export_add(struct ledger *l, uint32_t session, uint32_t extent, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_EXPORT];
        struct ledger_export *x;
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_EXTENT], extent));
        r = take(t, &index);
        if (r < 0)
                return r;
        x = record(t, index);
        x->session = session;
        x->extent = extent;
        ledger_link_export(l, index);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_export_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_EXPORT];
        const struct ledger_export *x = used_record(t, index);

        uncommit(t, index);
        unlink_export(l, x);
        put_back(t, index);
}

void ledger_link_block(struct ledger *l, uint32_t index)
{
        struct ledger_block *b = record(&l->tables[TABLE_BLOCK], index);
        struct ledger_session *s = ledger_session_at(l, b->session);

        b->links.prev_of_session = LEDGER_NONE;
        b->links.next_of_session = s->links.first_block;
        if (s->links.first_block != LEDGER_NONE)
                ledger_block_at(l, s->links.first_block)->links.prev_of_session = index;
        s->links.first_block = index;
        s->links.n_blocks++;
}

static void unlink_block(struct ledger *l, const struct ledger_block *b)
{
        struct ledger_session *s = ledger_session_at(l, b->session);

        if (b->links.prev_of_session != LEDGER_NONE)
                ledger_block_at(l, b->links.prev_of_session)->links.next_of_session =
                        b->links.next_of_session;
        else
                s->links.first_block = b->links.next_of_session;
        if (b->links.next_of_session != LEDGER_NONE)
                ledger_block_at(l, b->links.next_of_session)->links.prev_of_session =
                        b->links.prev_of_session;
        s->links.n_blocks--;
}

/* Of a record that was never used, before it counts as touched: a free record without a
 * generation is one whose generations are used up. */
static void prepare_generation(const struct table *t)
{
        if (t->first_free != LEDGER_NONE || t->n_touched == t->n_records)
                return;
        ((struct ledger_block *)record(t, t->n_touched))->links.generation = 1;
        atomic_thread_fence(memory_order_release);
}

/* All of a record but its id, which it returns in *ret_id. */
static int block_fill(struct ledger *l, const struct ledger_block *facts, uint32_t *ret_index,
                      uint64_t *ret_id)
{
        struct table *t = &l->tables[TABLE_BLOCK];
        struct ledger_block *b;
        uint32_t generation;
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], facts->session));
        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        prepare_generation(t);
        r = take(t, &index);
        if (r < 0)
                return r;
        b = record(t, index);
        generation = b->links.generation;
        /* Two copies around the links: the generation must never go back, not
         * even between two stores. */
        memcpy((unsigned char *)b + sizeof(uint64_t), (const unsigned char *)facts + sizeof(uint64_t),
               offsetof(struct ledger_block, links) - sizeof(uint64_t));
        b->tag[LEDGER_TAG_BYTES - 1] = '\0';
        b->links.generation = generation + 1;
        b->links.in_delivery = 0;
        atomic_init(&b->shared, LEDGER_NONE);
        ledger_link_block(l, index);
        *ret_index = index;
        *ret_id = (uint64_t)generation << 32 | index;
        return 0;
}

/* The next id's generation is stored before this id is: then clearing needs no
 * second store, and no crash can bring a generation back. 0: none is left. */
int ledger_block_add(struct ledger *l, const struct ledger_block *facts, uint32_t *ret_index)
{
        uint64_t id;
        int r = block_fill(l, facts, ret_index, &id);

        if (r == 0)
                commit(&l->tables[TABLE_BLOCK], *ret_index, id);
        return r;
}

bool ledger_has_block(const struct ledger *l)
{
        const struct table *t = &l->tables[TABLE_BLOCK];

        return t->first_free != LEDGER_NONE || t->n_touched < t->n_records;
}

int ledger_block_split(struct ledger *l, uint32_t index, uint64_t at, uint64_t handle, uint32_t *ret_index)
{
        struct ledger_block *low = ledger_block_at(l, index);
        struct ledger_session *s = ledger_session_at(l, low->session);
        struct ledger_block high = *low;
        uint64_t id;
        int r;

        assert(at > 0 && at < low->n_requested && low->shared == LEDGER_NONE);
        high.offset += at;
        high.n_bytes -= at;
        high.n_requested -= at;
        high.handle = handle;
        r = block_fill(l, &high, ret_index, &id);
        if (r < 0)
                return r;
        __atomic_store_n(&s->split_id, low->id, __ATOMIC_RELEASE);
        __atomic_store_n(&s->split_off_id, id, __ATOMIC_RELEASE);
        commit(&l->tables[TABLE_BLOCK], *ret_index, id);
        __atomic_store_n(&low->n_requested, at, __ATOMIC_RELEASE);
        __atomic_store_n(&low->n_bytes, at, __ATOMIC_RELEASE);
        return 0;
}

uint32_t ledger_block_split_off(const struct ledger *l, uint32_t index, uint64_t at)
{
        const struct ledger_block *low = used_record(&l->tables[TABLE_BLOCK], index), *high;
        const struct ledger_session *s;
        uint32_t i;

        if (low->session == LEDGER_NONE || low->n_bytes != at)
                return LEDGER_NONE;
        s = used_record(&l->tables[TABLE_SESSION], low->session);
        i = s->split_id == low->id ? ledger_block_find(l, s->split_off_id) : LEDGER_NONE;
        if (i == LEDGER_NONE)
                return LEDGER_NONE;
        high = used_record(&l->tables[TABLE_BLOCK], i);
        return high->session == low->session ? i : LEDGER_NONE;
}

void ledger_block_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_BLOCK];
        const struct ledger_block *b = used_record(t, index);

        uncommit(t, index);
        if (b->session != LEDGER_NONE)
                unlink_block(l, b);
        if (b->links.generation != 0) {
                put_back(t, index);
        } else {
                t->n_retired++;
                t->n_used--;
        }
}

/* ---- shared blocks -------------------------------------------------------- */

int ledger_shared_add(struct ledger *l, const struct ledger_shared *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_SHARED];
        struct ledger_shared *s;
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_BLOCK], facts->block));
        r = take(t, &index);
        if (r < 0)
                return r;
        fill(t, index, facts);
        s = record(t, index);
        s->name[LEDGER_NAME_BYTES - 1] = '\0';
        s->links.first_hold = LEDGER_NONE;
        s->links.n_holds = 0;
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_shared_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_SHARED];
        const struct ledger_shared *s = used_record(t, index);

        assert(s->links.n_holds == 0);
        uncommit(t, index);
        put_back(t, index);
}

void ledger_block_share(struct ledger *l, uint32_t block, uint32_t shared)
{
        struct ledger_block *b = ledger_block_at(l, block);

        assert(ledger_shared_at(l, shared)->block == block && b->session != LEDGER_NONE);
        atomic_store_explicit(&b->shared, shared, memory_order_release);
        unlink_block(l, b);
        b->session = LEDGER_NONE;
}

void ledger_link_hold(struct ledger *l, uint32_t index)
{
        struct ledger_hold *h = record(&l->tables[TABLE_HOLD], index);
        struct ledger_session *s = ledger_session_at(l, h->session);
        struct ledger_shared *shared = ledger_shared_at(l, h->shared);

        h->links.prev_of_session = LEDGER_NONE;
        h->links.next_of_session = s->links.first_hold;
        if (s->links.first_hold != LEDGER_NONE)
                ledger_hold_at(l, s->links.first_hold)->links.prev_of_session = index;
        s->links.first_hold = index;
        s->links.n_holds++;

        h->links.prev_of_shared = LEDGER_NONE;
        h->links.next_of_shared = shared->links.first_hold;
        if (shared->links.first_hold != LEDGER_NONE)
                ledger_hold_at(l, shared->links.first_hold)->links.prev_of_shared = index;
        shared->links.first_hold = index;
        shared->links.n_holds++;
}

static void unlink_hold(struct ledger *l, const struct ledger_hold *h)
{
        struct ledger_session *s = ledger_session_at(l, h->session);
        struct ledger_shared *shared = ledger_shared_at(l, h->shared);

        if (h->links.prev_of_session != LEDGER_NONE)
                ledger_hold_at(l, h->links.prev_of_session)->links.next_of_session = h->links.next_of_session;
        else
                s->links.first_hold = h->links.next_of_session;
        if (h->links.next_of_session != LEDGER_NONE)
                ledger_hold_at(l, h->links.next_of_session)->links.prev_of_session = h->links.prev_of_session;
        s->links.n_holds--;

        if (h->links.prev_of_shared != LEDGER_NONE)
                ledger_hold_at(l, h->links.prev_of_shared)->links.next_of_shared = h->links.next_of_shared;
        else
                shared->links.first_hold = h->links.next_of_shared;
        if (h->links.next_of_shared != LEDGER_NONE)
                ledger_hold_at(l, h->links.next_of_shared)->links.prev_of_shared = h->links.prev_of_shared;
        shared->links.n_holds--;
}

int ledger_hold_add(struct ledger *l, uint32_t session, uint32_t shared, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_HOLD];
        struct ledger_hold *h;
        uint32_t index;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_SHARED], shared));
        r = take(t, &index);
        if (r < 0)
                return r;
        h = record(t, index);
        h->session = session;
        h->shared = shared;
        atomic_init(&h->count, 1);
        h->links.n_in_delivery = 0;
        ledger_link_hold(l, index);
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
}

void ledger_hold_clear(struct ledger *l, uint32_t index)
{
        struct table *t = &l->tables[TABLE_HOLD];
        const struct ledger_hold *h = used_record(t, index);

        uncommit(t, index);
        unlink_hold(l, h);
        put_back(t, index);
}

/* ---- looking -------------------------------------------------------------- */

uint32_t ledger_block_find(const struct ledger *l, uint64_t id)
{
        const struct table *t = &l->tables[TABLE_BLOCK];
        uint32_t index = (uint32_t)id;

        if (id == 0 || index >= t->n_touched || record_id(t, index) != id)
                return LEDGER_NONE;
        return index;
}

uint32_t ledger_quota_end(const struct ledger *l)
{
        return l->tables[TABLE_QUOTA].n_touched;
}

const struct ledger_quota *ledger_quota_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_QUOTA];

        return in_use(t, index) ? used_record(t, index) : NULL;
}

uint32_t ledger_session_end(const struct ledger *l)
{
        return l->tables[TABLE_SESSION].n_touched;
}

const struct ledger_session *ledger_session_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_SESSION];

        return in_use(t, index) ? used_record(t, index) : NULL;
}

uint32_t ledger_block_end(const struct ledger *l)
{
        return l->tables[TABLE_BLOCK].n_touched;
}

const struct ledger_block *ledger_block_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_BLOCK];

        return in_use(t, index) ? ledger_block_at(l, index) : NULL;
}

uint32_t ledger_shared_end(const struct ledger *l)
{
        return l->tables[TABLE_SHARED].n_touched;
}

const struct ledger_shared *ledger_shared_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_SHARED];

        return in_use(t, index) ? ledger_shared_at(l, index) : NULL;
}

uint32_t ledger_region_end(const struct ledger *l)
{
        return l->tables[TABLE_REGION].n_touched;
}

const struct ledger_region *ledger_region_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_REGION];

        return in_use(t, index) ? used_record(t, index) : NULL;
}

uint32_t ledger_extent_end(const struct ledger *l)
{
        return l->tables[TABLE_EXTENT].n_touched;
}

const struct ledger_extent *ledger_extent_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_EXTENT];

        return in_use(t, index) ? used_record(t, index) : NULL;
}

const struct ledger_export *ledger_export_get(struct ledger *l, uint32_t index)
{
        const struct table *t = &l->tables[TABLE_EXPORT];

        return in_use(t, index) ? used_record(t, index) : NULL;
}

void ledger_read_limits(const struct ledger *l, struct ledger_limits *ret)
{
        *ret = (struct ledger_limits){
                .n_quotas = l->tables[TABLE_QUOTA].n_records,
                .n_sessions = l->tables[TABLE_SESSION].n_records,
                .n_extents = l->tables[TABLE_EXTENT].n_records,
                .n_exports = l->tables[TABLE_EXPORT].n_records,
                .n_blocks = l->tables[TABLE_BLOCK].n_records,
                .n_shared = l->tables[TABLE_SHARED].n_records,
                .n_holds = l->tables[TABLE_HOLD].n_records,
        };
}

uint64_t ledger_quotas_end(const struct ledger *l)
{
        return atomic_load(&l->tables[TABLE_QUOTA].shared->next_id);
}

uint64_t ledger_extents_end(const struct ledger *l)
{
        return atomic_load(&l->tables[TABLE_EXTENT].shared->next_id);
}

void ledger_count(const struct ledger *l, struct ledger_counts *ret)
{
        *ret = (struct ledger_counts){
                .n_quotas = l->tables[TABLE_QUOTA].n_used,
                .n_sessions = l->tables[TABLE_SESSION].n_used,
                .n_extents = l->tables[TABLE_EXTENT].n_used,
                .n_exports = l->tables[TABLE_EXPORT].n_used,
                .n_blocks = l->tables[TABLE_BLOCK].n_used,
                .n_shared = l->tables[TABLE_SHARED].n_used,
                .n_holds = l->tables[TABLE_HOLD].n_used,
        };
}
