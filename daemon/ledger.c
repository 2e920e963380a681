/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger's memfd: a header page, then the seven tables, each beginning on a
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

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define LEDGER_MAGIC  UINT64_C(0x7265676465636662) /* "bfcedger" on little-endian machines */
#define LEDGER_LAYOUT 3                            /* counts up with every change of a record or the header */

enum {
        TABLE_QUOTA,
        TABLE_SESSION,
        TABLE_EXTENT,
        TABLE_EXPORT,
        TABLE_BLOCK,
        TABLE_SHARED,
        TABLE_HOLD,
        N_TABLES,
};

struct header_table {
        uint64_t offset; /* in the memfd */
        uint32_t n_records;
        uint32_t record_bytes;
        _Atomic uint64_t next_id;
        _Atomic uint32_t n_touched;
        uint32_t pad;
};

struct header {
        uint64_t magic;
        uint32_t layout;
        uint32_t n_tables;
        uint64_t n_bytes; /* of the memfd */
        struct header_table tables[N_TABLES];
};

struct table {
        struct header_table *shared;
        unsigned char *records;
        size_t record_bytes;
        size_t link_offset; /* of the uint32_t that chains free records */
        uint32_t n_records;
        uint32_t n_touched;
        uint32_t n_used;
        uint32_t n_free;
        uint32_t n_retired;
        uint32_t first_free;
};

struct ledger {
        int fd;
        struct header *header; /* the mapping */
        size_t n_bytes;
        struct table tables[N_TABLES];
};

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
};

/* The layout is an interface between versions: a change must be seen, and bump
 * LEDGER_LAYOUT. There may be millions of blocks. */
_Static_assert(sizeof(struct ledger_quota) == 160, "layout of a quota");
_Static_assert(sizeof(struct ledger_session) == 136, "layout of a session");
_Static_assert(sizeof(struct ledger_extent) == 40, "layout of an extent");
_Static_assert(sizeof(struct ledger_export) == 32, "layout of an export");
_Static_assert(sizeof(struct ledger_shared) == 96, "layout of a shared block");
_Static_assert(sizeof(struct ledger_hold) == 40, "layout of a hold");
_Static_assert(sizeof(struct ledger_block) == 112, "layout of a block");
_Static_assert(sizeof(struct header) <= 4096, "the header is one page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a commit is one store");
_Static_assert(offsetof(struct ledger_quota, id) == 0 && offsetof(struct ledger_session, id) == 0 &&
                       offsetof(struct ledger_extent, id) == 0 && offsetof(struct ledger_export, id) == 0 &&
                       offsetof(struct ledger_block, id) == 0 && offsetof(struct ledger_shared, id) == 0 &&
                       offsetof(struct ledger_hold, id) == 0,
               "every record starts with its id");

static void *record(const struct table *t, uint32_t index)
{
        return t->records + (size_t)index * t->record_bytes;
}

static uint64_t record_id(const struct table *t, uint32_t index)
{
        const _Atomic uint64_t *id = record(t, index);

        return atomic_load_explicit(id, memory_order_acquire);
}

static uint32_t *record_link(const struct table *t, uint32_t index)
{
        unsigned char *r = record(t, index);

        return (uint32_t *)(void *)(r + t->link_offset);
}

static bool in_use(const struct table *t, uint32_t index)
{
        return index < t->n_touched && record_id(t, index) != 0;
}

static void *used_record(const struct table *t, uint32_t index)
{
        assert(in_use(t, index));
        return record(t, index);
}

/* ---- making and ending ---------------------------------------------------- */

static uint64_t to_pages(uint64_t n_bytes, uint64_t page_bytes)
{
        return (n_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

/* Fills *ret with where each table lies; no overflow: 2^32 records of 160 bytes
 * are 2^40 bytes. */
static int lay_out(const struct ledger_limits *limits, struct header *ret)
{
        const uint32_t n_records[N_TABLES] = {
                [TABLE_QUOTA] = limits->n_quotas,   [TABLE_SESSION] = limits->n_sessions,
                [TABLE_EXTENT] = limits->n_extents, [TABLE_EXPORT] = limits->n_exports,
                [TABLE_BLOCK] = limits->n_blocks,   [TABLE_SHARED] = limits->n_shared,
                [TABLE_HOLD] = limits->n_holds,
        };
        uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
        struct header h = { .magic = LEDGER_MAGIC, .layout = LEDGER_LAYOUT, .n_tables = N_TABLES };

        h.n_bytes = to_pages(sizeof(h), page_bytes);
        for (size_t i = 0; i < N_TABLES; i++) {
                struct header_table *t = &h.tables[i];

                if ((i < TABLE_SHARED && n_records[i] == 0) || n_records[i] == LEDGER_NONE)
                        return -EINVAL;
                t->offset = h.n_bytes;
                t->n_records = n_records[i];
                t->record_bytes = (uint32_t)KINDS[i].record_bytes;
                atomic_init(&t->next_id, 1);
                h.n_bytes += to_pages((uint64_t)n_records[i] * KINDS[i].record_bytes, page_bytes);
        }
        memcpy(ret, &h, sizeof(h));
        return 0;
}

static int make_memfd(struct ledger *l)
{
        void *p;

        l->fd = memfd_create("bfcd-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        if (l->fd < 0)
                return -errno;
        if (ftruncate(l->fd, (off_t)l->n_bytes) < 0)
                return -errno;
        if (fcntl(l->fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) < 0)
                return -errno;
        p = mmap(NULL, l->n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, l->fd, 0);
        if (p == MAP_FAILED)
                return -errno;
        l->header = p;
        return 0;
}

static void open_tables(struct ledger *l)
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

        r = lay_out(limits, &h);
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
        open_tables(l);
        *ret = l;
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

int ledger_fd(const struct ledger *l)
{
        return l->fd;
}

/* ---- a record's life ------------------------------------------------------ */

/* A free record, the last freed first. *ret_fresh: it was never used. */
static int take(struct table *t, uint32_t *ret_index, bool *ret_fresh)
{
        if (t->first_free != LEDGER_NONE) {
                *ret_index = t->first_free;
                *ret_fresh = false;
                t->first_free = *record_link(t, *ret_index);
                t->n_free--;
        } else if (t->n_touched < t->n_records) {
                *ret_index = t->n_touched++;
                *ret_fresh = true;
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

static void commit(const struct table *t, uint32_t index, uint64_t id)
{
        _Atomic uint64_t *p = record(t, index);

        atomic_store_explicit(p, id, memory_order_release);
}

/* The counter moves on before the id is seen anywhere: a crash in between
 * loses a number and never gives one twice. */
static uint64_t next_id(const struct table *t)
{
        uint64_t id = atomic_load_explicit(&t->shared->next_id, memory_order_relaxed);

        atomic_store_explicit(&t->shared->next_id, id + 1, memory_order_relaxed);
        return id;
}

/* From here on the record is nobody's. The fence keeps later stores (links,
 * the next facts) behind the store of 0. */
static void uncommit(const struct table *t, uint32_t index)
{
        _Atomic uint64_t *p = record(t, index);

        atomic_store_explicit(p, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
}

static void put_back(struct table *t, uint32_t index)
{
        *record_link(t, index) = t->first_free;
        t->first_free = index;
        t->n_free++;
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
        bool fresh;
        int r;

        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        fill(t, index, facts);
        q = record(t, index);
        q->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        q->partition[LEDGER_NAME_BYTES - 1] = '\0';
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

int ledger_session_add(struct ledger *l, const struct ledger_session *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_SESSION];
        struct ledger_session *s;
        uint32_t index;
        bool fresh;
        int r;

        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        fill(t, index, facts);
        s = record(t, index);
        s->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        s->links.first_block = LEDGER_NONE;
        s->links.first_export = LEDGER_NONE;
        s->links.first_hold = LEDGER_NONE;
        s->links.n_blocks = 0;
        s->links.n_exports = 0;
        s->links.n_holds = 0;
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
        bool fresh;
        int r;

        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        fill(t, index, facts);
        e = record(t, index);
        e->links.first_export = LEDGER_NONE;
        e->links.n_exports = 0;
        commit(t, index, next_id(t));
        *ret_index = index;
        return 0;
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
static void link_export(struct ledger *l, uint32_t index)
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
        bool fresh;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_EXTENT], extent));
        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        x = record(t, index);
        x->session = session;
        x->extent = extent;
        link_export(l, index);
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

static void link_block(struct ledger *l, uint32_t index)
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

/* The next id's generation is stored before this id is: then clearing needs no
 * second store, and no crash can bring a generation back. 0: none is left. */
int ledger_block_add(struct ledger *l, const struct ledger_block *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[TABLE_BLOCK];
        struct ledger_block *b;
        uint32_t generation;
        uint32_t index;
        bool fresh;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], facts->session));
        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        b = record(t, index);
        generation = fresh ? 1 : b->links.generation;
        /* Two copies around the links: the generation must never go back, not
         * even between two stores. */
        memcpy((unsigned char *)b + sizeof(uint64_t), (const unsigned char *)facts + sizeof(uint64_t),
               offsetof(struct ledger_block, links) - sizeof(uint64_t));
        b->tag[LEDGER_TAG_BYTES - 1] = '\0';
        b->links.generation = generation + 1;
        b->links.in_delivery = 0;
        atomic_init(&b->shared, LEDGER_NONE);
        link_block(l, index);
        commit(t, index, (uint64_t)generation << 32 | index);
        *ret_index = index;
        return 0;
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
        bool fresh;
        int r;

        assert(in_use(&l->tables[TABLE_BLOCK], facts->block));
        r = take(t, &index, &fresh);
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

static void link_hold(struct ledger *l, uint32_t index)
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
        bool fresh;
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_SHARED], shared));
        r = take(t, &index, &fresh);
        if (r < 0)
                return r;
        h = record(t, index);
        h->session = session;
        h->shared = shared;
        atomic_init(&h->count, 1);
        h->links.n_in_delivery = 0;
        link_hold(l, index);
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

/* The next index in use at or after `from`, or LEDGER_NONE. */
static uint32_t table_next(const struct table *t, uint32_t from)
{
        for (uint32_t i = from; i < t->n_touched; i++)
                if (in_use(t, i))
                        return i;
        return LEDGER_NONE;
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

/* ---- the check ------------------------------------------------------------ */

/* Leaves the function with a sentence where the condition does not hold. */
#define CHECK_THAT(condition, sentence)                                                                      \
        do {                                                                                                 \
                if (!(condition))                                                                            \
                        return (sentence);                                                                   \
        } while (0)

static const char *check_header(const struct ledger *l)
{
        const struct header *h = l->header;

        CHECK_THAT(h->magic == LEDGER_MAGIC && h->layout == LEDGER_LAYOUT,
                   "the header's magic or layout is wrong");
        CHECK_THAT(h->n_tables == N_TABLES && h->n_bytes == l->n_bytes, "the header's sizes are wrong");
        for (size_t i = 0; i < N_TABLES; i++) {
                const struct header_table *s = &h->tables[i];
                const struct table *t = &l->tables[i];

                CHECK_THAT((const unsigned char *)h + s->offset == t->records, "a table is not where it was");
                CHECK_THAT(s->n_records == t->n_records && s->record_bytes == t->record_bytes,
                           "a table's size is not what it was");
                CHECK_THAT(atomic_load(&s->n_touched) == t->n_touched, "the header's n_touched is wrong");
        }
        return NULL;
}

/* n_used + n_free + n_retired == n_touched <= n_records */
static const char *check_counts(const struct table *t, bool is_blocks)
{
        uint32_t n_used = 0;
        uint32_t n_retired = 0;

        CHECK_THAT(t->n_touched <= t->n_records, "more records touched than there are");
        CHECK_THAT((uint64_t)t->n_used + t->n_free + t->n_retired == t->n_touched,
                   "n_used + n_free + n_retired != n_touched");
        for (uint32_t i = 0; i < t->n_touched; i++) {
                uint64_t id = record_id(t, i);
                const struct ledger_block *b = is_blocks ? record(t, i) : NULL;

                if (id != 0)
                        n_used++;
                else if (b && b->links.generation == 0)
                        n_retired++;
                if (id == 0)
                        continue;
                if (b) {
                        CHECK_THAT((uint32_t)id == i, "a block's id names another index");
                        CHECK_THAT(b->links.generation == 0 || b->links.generation > (uint32_t)(id >> 32),
                                   "a block's next id is not newer than its id");
                } else {
                        CHECK_THAT(id < atomic_load(&t->shared->next_id), "an id that was never given");
                }
        }
        CHECK_THAT(n_used == t->n_used, "n_used is not the number of records in use");
        CHECK_THAT(n_retired == t->n_retired, "n_retired is not the number of retired records");
        return NULL;
}

/* A chain that ends after exactly n_free steps has no loop, so its records are
 * distinct. */
static const char *check_free(const struct table *t, bool is_blocks)
{
        uint32_t i = t->first_free;

        for (uint32_t n = 0; n < t->n_free; n++) {
                const struct ledger_block *b;

                CHECK_THAT(i < t->n_touched, "the free list leaves its table");
                CHECK_THAT(record_id(t, i) == 0, "a record in use is in the free list");
                b = is_blocks ? record(t, i) : NULL;
                CHECK_THAT(!b || b->links.generation != 0, "a retired block is in the free list");
                i = *record_link(t, i);
        }
        CHECK_THAT(i == LEDGER_NONE, "the free list is longer than n_free");
        return NULL;
}

static const char *check_session_blocks(const struct ledger *l, uint32_t session, uint64_t *n_linked)
{
        const struct table *t = &l->tables[TABLE_BLOCK];
        const struct ledger_session *s = record(&l->tables[TABLE_SESSION], session);
        uint32_t prev = LEDGER_NONE;
        uint32_t i = s->links.first_block;

        for (uint32_t n = 0; n < s->links.n_blocks; n++) {
                const struct ledger_block *b;

                CHECK_THAT(in_use(t, i), "a session's list holds a block that is not in use");
                b = record(t, i);
                CHECK_THAT(b->session == session, "a session's list holds another session's block");
                CHECK_THAT(b->links.prev_of_session == prev, "a session's list of blocks is broken");
                CHECK_THAT(b->shared == LEDGER_NONE, "a shared block is in a session's list");
                CHECK_THAT(in_use(&l->tables[TABLE_QUOTA], b->quota), "a block's quota is not in use");
                prev = i;
                i = b->links.next_of_session;
        }
        CHECK_THAT(i == LEDGER_NONE, "a session has more blocks than n_blocks");
        *n_linked += s->links.n_blocks;
        return NULL;
}

static const char *check_session_exports(const struct ledger *l, uint32_t session, uint64_t *n_linked)
{
        const struct table *t = &l->tables[TABLE_EXPORT];
        const struct ledger_session *s = record(&l->tables[TABLE_SESSION], session);
        uint32_t prev = LEDGER_NONE;
        uint32_t i = s->links.first_export;

        for (uint32_t n = 0; n < s->links.n_exports; n++) {
                const struct ledger_export *x;

                CHECK_THAT(in_use(t, i), "a session's list holds an export that is not in use");
                x = record(t, i);
                CHECK_THAT(x->session == session, "a session's list holds another session's export");
                CHECK_THAT(x->links.prev_of_session == prev, "a session's list of exports is broken");
                CHECK_THAT(in_use(&l->tables[TABLE_EXTENT], x->extent), "an export's extent is not in use");
                prev = i;
                i = x->links.next_of_session;
        }
        CHECK_THAT(i == LEDGER_NONE, "a session has more exports than n_exports");
        *n_linked += s->links.n_exports;
        return NULL;
}

static const char *check_extent(const struct ledger *l, uint32_t extent, uint64_t *n_linked)
{
        const struct table *t = &l->tables[TABLE_EXPORT];
        const struct ledger_extent *e = record(&l->tables[TABLE_EXTENT], extent);
        uint32_t prev = LEDGER_NONE;
        uint32_t i = e->links.first_export;

        CHECK_THAT(in_use(&l->tables[TABLE_QUOTA], e->quota), "an extent's quota is not in use");
        for (uint32_t n = 0; n < e->links.n_exports; n++) {
                const struct ledger_export *x;

                CHECK_THAT(in_use(t, i), "an extent's list holds an export that is not in use");
                x = record(t, i);
                CHECK_THAT(x->extent == extent, "an extent's list holds another extent's export");
                CHECK_THAT(x->links.prev_of_extent == prev, "an extent's list of exports is broken");
                prev = i;
                i = x->links.next_of_extent;
        }
        CHECK_THAT(i == LEDGER_NONE, "an extent has more exports than n_exports");
        *n_linked += e->links.n_exports;
        return NULL;
}

static const char *check_session_holds(const struct ledger *l, uint32_t session, uint64_t *n_linked)
{
        const struct table *t = &l->tables[TABLE_HOLD];
        const struct ledger_session *s = record(&l->tables[TABLE_SESSION], session);
        uint32_t prev = LEDGER_NONE;
        uint32_t i = s->links.first_hold;

        for (uint32_t n = 0; n < s->links.n_holds; n++) {
                const struct ledger_hold *h;

                CHECK_THAT(in_use(t, i), "a session's list holds a hold that is not in use");
                h = record(t, i);
                CHECK_THAT(h->session == session, "a session's list holds another session's hold");
                CHECK_THAT(h->links.prev_of_session == prev, "a session's list of holds is broken");
                CHECK_THAT(h->count > 0 && h->links.n_in_delivery <= h->count, "a hold's count is wrong");
                prev = i;
                i = h->links.next_of_session;
        }
        CHECK_THAT(i == LEDGER_NONE, "a session has more holds than n_holds");
        *n_linked += s->links.n_holds;
        return NULL;
}

static const char *check_shared(const struct ledger *l, uint32_t shared, uint64_t *n_linked)
{
        const struct table *t = &l->tables[TABLE_HOLD];
        const struct ledger_shared *s = record(&l->tables[TABLE_SHARED], shared);
        const struct ledger_block *b;
        uint32_t prev = LEDGER_NONE;
        uint32_t i = s->links.first_hold;

        CHECK_THAT(in_use(&l->tables[TABLE_BLOCK], s->block), "a shared record's block is not in use");
        b = record(&l->tables[TABLE_BLOCK], s->block);
        CHECK_THAT(b->shared == shared, "a shared record's block does not name it");
        CHECK_THAT(b->session == LEDGER_NONE, "a shared block is a session's");
        CHECK_THAT(in_use(&l->tables[TABLE_QUOTA], b->quota), "a shared block's quota is not in use");
        CHECK_THAT(s->links.n_holds > 0, "nobody holds a shared block");
        CHECK_THAT(s->name[0] != '\0' && memchr(s->name, '\0', sizeof(s->name)),
                   "a shared block has no name");
        for (uint32_t n = 0; n < s->links.n_holds; n++) {
                const struct ledger_hold *h;

                CHECK_THAT(in_use(t, i), "a shared block's list holds a hold that is not in use");
                h = record(t, i);
                CHECK_THAT(h->shared == shared, "a shared block's list holds another one's hold");
                CHECK_THAT(h->links.prev_of_shared == prev, "a shared block's list of holds is broken");
                prev = i;
                i = h->links.next_of_shared;
        }
        CHECK_THAT(i == LEDGER_NONE, "a shared block has more holds than n_holds");
        *n_linked += s->links.n_holds;
        return NULL;
}

/* Each shared block has its record, each hold is in both lists. */
static const char *check_sharing(const struct ledger *l)
{
        const struct table *shared = &l->tables[TABLE_SHARED], *holds = &l->tables[TABLE_HOLD];
        const struct table *sessions = &l->tables[TABLE_SESSION];
        uint64_t n_of_sessions = 0;
        uint64_t n_of_shared = 0;
        const char *why = NULL;

        for (uint32_t i = table_next(sessions, 0); !why && i != LEDGER_NONE; i = table_next(sessions, i + 1))
                why = check_session_holds(l, i, &n_of_sessions);
        for (uint32_t i = table_next(shared, 0); !why && i != LEDGER_NONE; i = table_next(shared, i + 1))
                why = check_shared(l, i, &n_of_shared);
        if (why)
                return why;
        CHECK_THAT(n_of_sessions == holds->n_used, "a hold is in no session's list");
        CHECK_THAT(n_of_shared == holds->n_used, "a hold is in no shared block's list");
        return NULL;
}

/* Each block and export is in exactly the lists it belongs to: every list is
 * sound, and together they are as long as the table is full. */
static const char *check_lists(const struct ledger *l)
{
        uint64_t n_blocks = 0;
        uint64_t n_of_sessions = 0;
        uint64_t n_of_extents = 0;
        const char *why = NULL;

        for (uint32_t i = table_next(&l->tables[TABLE_SESSION], 0); !why && i != LEDGER_NONE;
             i = table_next(&l->tables[TABLE_SESSION], i + 1)) {
                why = check_session_blocks(l, i, &n_blocks);
                if (!why)
                        why = check_session_exports(l, i, &n_of_sessions);
        }
        for (uint32_t i = table_next(&l->tables[TABLE_EXTENT], 0); !why && i != LEDGER_NONE;
             i = table_next(&l->tables[TABLE_EXTENT], i + 1))
                why = check_extent(l, i, &n_of_extents);
        if (why)
                return why;
        CHECK_THAT(n_blocks + l->tables[TABLE_SHARED].n_used == l->tables[TABLE_BLOCK].n_used,
                   "a block is in no session's list and not shared");
        CHECK_THAT(n_of_sessions == l->tables[TABLE_EXPORT].n_used, "an export is in no session's list");
        CHECK_THAT(n_of_extents == l->tables[TABLE_EXPORT].n_used, "an export is in no extent's list");
        return NULL;
}

int ledger_check(const struct ledger *l, const char **ret_why)
{
        const char *why = check_header(l);

        for (size_t i = 0; !why && i < N_TABLES; i++) {
                why = check_counts(&l->tables[i], i == TABLE_BLOCK);
                if (!why)
                        why = check_free(&l->tables[i], i == TABLE_BLOCK);
        }
        if (!why)
                why = check_lists(l);
        if (!why)
                why = check_sharing(l);
        if (!why)
                return 0;
        *ret_why = why;
        return -EBADMSG;
}
