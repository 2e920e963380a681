/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger's memfd: a header page, then the tables of the schema, each beginning
 * on a page of its own.
 *
 * The memfd has what a successor needs: the records, and in the header the offset
 * of each table, the number of records ever used, and the next id. What only
 * speeds up this process (free lists, counts) is in struct ledger or in the
 * records' links. So it is enough to keep one order of stores:
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
#include "daemon/ledger/ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/ledger/table.h"
#include "proto/memfd.h"

#define MIB_BYTES (UINT64_C(1) << 20)

/* X(table, limit): the tables whose number of records is a limit. Of regions there are as many as extents, and
 * LEDGER_QUOTA_REGIONS for each quota. */
#define LIMITED_TABLES(X)                                                                                    \
        X(TABLE_QUOTA, n_quotas)                                                                             \
        X(TABLE_SESSION, n_sessions)                                                                         \
        X(TABLE_EXTENT, n_extents)                                                                           \
        X(TABLE_EXPORT, n_exports)                                                                           \
        X(TABLE_BLOCK, n_blocks)                                                                             \
        X(TABLE_SHARED, n_shared)                                                                            \
        X(TABLE_REF, n_refs)                                                                                 \
        X(TABLE_METADATA, n_metadata)                                                                        \
        X(TABLE_LEASE, n_leases)

/* ---- making and ending ---------------------------------------------------- */

static uint64_t to_pages(uint64_t n_bytes, uint64_t page_bytes)
{
        return (n_bytes + page_bytes - 1) / page_bytes * page_bytes;
}

/* Fills *ret with the offset of each table; no overflow: 2^32 records of
 * the largest kind, the 4112 bytes of metadata, are less than 2^40 bytes. */
int ledger_lay_out(const struct ledger_limits *limits, struct header *ret)
{
#define N_RECORDS(table, limit) [table] = limits->limit,
        const uint32_t n_records[N_TABLES] = { LIMITED_TABLES(N_RECORDS) };
#undef N_RECORDS
        uint64_t n_regions = limits->n_extents + (uint64_t)limits->n_quotas * LEDGER_QUOTA_REGIONS;
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
                t->record_bytes = (uint32_t)LEDGER_KINDS[i].record_bytes;
                atomic_init(&t->next_id, 1);
                h.n_bytes += to_pages((uint64_t)n * LEDGER_KINDS[i].record_bytes, page_bytes);
        }
        memcpy(ret, &h, sizeof(h));
        return 0;
}

void ledger_header_limits(const struct header *h, struct ledger_limits *ret)
{
#define READ_LIMIT(table, limit) ret->limit = h->tables[table].n_records;
        LIMITED_TABLES(READ_LIMIT)
#undef READ_LIMIT
}

/* NULL, or what is wrong; the tables must be where this process would put them. */
const char *ledger_header_fault(const struct ledger *l)
{
        const struct header *h = l->header;
        const struct header_table *t = h->tables;
        struct ledger_limits limits;
        struct header want;

        if (h->n_tables != N_TABLES)
                return "its number of tables is wrong";
        ledger_header_limits(h, &limits);
        if (ledger_lay_out(&limits, &want) < 0 || want.n_bytes != h->n_bytes || h->n_bytes != l->n_bytes)
                return "its sizes are inconsistent";
        for (size_t i = 0; i < N_TABLES; i++) {
                if (t[i].offset != want.tables[i].offset || t[i].n_records != want.tables[i].n_records ||
                    t[i].record_bytes != want.tables[i].record_bytes)
                        return "its tables are at wrong offsets";
                if (t[i].n_touched > t[i].n_records || t[i].next_id == 0)
                        return "its counters are invalid";
        }
        return NULL;
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
                        .kind = &LEDGER_KINDS[i],
                        .shared = shared,
                        .records = (unsigned char *)l->header + shared->offset,
                        .record_bytes = LEDGER_KINDS[i].record_bytes,
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

/* Records from n_touched on were never used. */
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
#define ENLARGE(table, limit) n.limit = larger(n.limit, limits->limit);
        LIMITED_TABLES(ENLARGE)
#undef ENLARGE
        r = ledger_new(&n, ret);
        if (r < 0)
                return r;
        (*ret)->header->n_crashes = from->header->n_crashes;
        (*ret)->header->n_aside = from->header->n_aside;
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

_Atomic uint32_t *ledger_n_aside(const struct ledger *l)
{
        return &l->header->n_aside;
}

_Atomic uint32_t *ledger_at(const struct ledger *l)
{
        return &l->header->at;
}

/* An index that the word has no place for is not noted. */
static void note(struct ledger *l, uint32_t kind, uint32_t index)
{
        uint32_t at = index < LEDGER_AT_SESSION - 1 ? kind | (index + 1) : 0;

        atomic_store_explicit(&l->header->at, at, memory_order_relaxed);
}

void ledger_note_quota(struct ledger *l, uint32_t index)
{
        note(l, 0, index);
}

void ledger_note_session(struct ledger *l, uint32_t index)
{
        note(l, LEDGER_AT_SESSION, index);
}

void ledger_note_nothing(struct ledger *l)
{
        atomic_store_explicit(&l->header->at, 0, memory_order_relaxed);
}

int ledger_fd(const struct ledger *l)
{
        return l->fd;
}

/* ---- records ------------------------------------------------------------- */

/* A free record, the last freed first. */
static int take(struct table *t, uint32_t *ret_index)
{
        if (t->first_free != LEDGER_NONE) {
                *ret_index = t->first_free;
                t->first_free = *record_word(t, *ret_index, t->kind->link_offset);
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

/* A free record with these facts and empty lists. The id, which all records start with, is not set. */
static int make(struct ledger *l, int kind, const void *facts, uint32_t *ret_index)
{
        struct table *t = &l->tables[kind];
        int r = take(t, ret_index);

        if (r < 0)
                return r;
        memcpy((unsigned char *)record(t, *ret_index) + sizeof(uint64_t),
               (const unsigned char *)facts + sizeof(uint64_t), t->record_bytes - sizeof(uint64_t));
        ledger_lists_clear(l, kind, *ret_index);
        return 0;
}

static void commit_next(const struct table *t, uint32_t index)
{
        commit(t, index, next_id(t));
}

const char *ledger_id_fault(const struct table *t, uint32_t index)
{
        uint64_t id = record_id(t, index);
        uint32_t generation;

        if (t->kind->generation.n_bytes == 0)
                return id < atomic_load(&t->shared->next_id) ? NULL : "its id was never assigned";
        if ((uint32_t)id != index || id >> 32 == 0)
                return "its id names another index";
        generation = *record_word(t, index, t->kind->generation.offset);
        return generation == 0 || generation > id >> 32 ? NULL : "its next id is not newer than its id";
}

/* ---- lists ---------------------------------------------------------------- */

/* New records go to the front: constant time, and what was made last is torn down first. */
void ledger_list_add(struct ledger *l, int list, uint32_t index)
{
        const struct list *s = &LEDGER_LISTS[list];
        const struct table *members = &l->tables[s->member], *owners = &l->tables[s->owner];
        uint32_t owner = *record_word(members, index, s->owner_index);
        uint32_t *first = record_word(owners, owner, s->first);

        assert(in_use(owners, owner));
        *record_word(members, index, s->prev) = LEDGER_NONE;
        *record_word(members, index, s->next) = *first;
        if (*first != LEDGER_NONE)
                *record_word(members, *first, s->prev) = index;
        *first = index;
        ++*record_word(owners, owner, s->n);
}

static void list_remove(struct ledger *l, const struct list *s, uint32_t index)
{
        const struct table *members = &l->tables[s->member], *owners = &l->tables[s->owner];
        uint32_t owner = *record_word(members, index, s->owner_index);
        uint32_t prev = *record_word(members, index, s->prev), next = *record_word(members, index, s->next);

        if (owner == LEDGER_NONE)
                return;
        if (prev != LEDGER_NONE)
                *record_word(members, prev, s->next) = next;
        else
                *record_word(owners, owner, s->first) = next;
        if (next != LEDGER_NONE)
                *record_word(members, next, s->prev) = prev;
        --*record_word(owners, owner, s->n);
}

void ledger_lists_clear(struct ledger *l, int kind, uint32_t index)
{
        for (int i = 0; i < N_LISTS; i++) {
                if (LEDGER_LISTS[i].owner != kind)
                        continue;
                *record_word(&l->tables[kind], index, LEDGER_LISTS[i].first) = LEDGER_NONE;
                *record_word(&l->tables[kind], index, LEDGER_LISTS[i].n) = 0;
        }
}

static void clear(struct ledger *l, int kind, uint32_t index);

static void clear_metadata_of(struct ledger *l, uint32_t shared)
{
        const struct ledger_shared *s = record(&l->tables[TABLE_SHARED], shared);

        if (s->metadata != LEDGER_NONE)
                clear(l, TABLE_METADATA, s->metadata);
}

/* Out of the lists of its owners; its own lists must be empty. */
static void clear(struct ledger *l, int kind, uint32_t index)
{
        struct table *t = &l->tables[kind];

        assert(in_use(t, index));
        for (int i = 0; i < N_LISTS; i++)
                assert(LEDGER_LISTS[i].owner != kind || *record_word(t, index, LEDGER_LISTS[i].n) == 0);
        uncommit(t, index);
        if (kind == TABLE_SESSION) /* the secret opens the session; it must not outlive it */
                explicit_bzero(((struct ledger_session *)record(t, index))->secret,
                               sizeof(((struct ledger_session *)0)->secret));
        for (int i = 0; i < N_LISTS; i++)
                if (LEDGER_LISTS[i].member == kind)
                        list_remove(l, &LEDGER_LISTS[i], index);
        if (kind == TABLE_SHARED)
                clear_metadata_of(l, index);
        t->n_used--;
        if (table_is_retired(t, index))
                t->n_retired++;
        else
                table_chain(t, index);
}

/* ---- the tables ----------------------------------------------------------- */

#define X(TABLE, name)                                                                                       \
        struct ledger_##name *ledger_##name##_at(struct ledger *l, uint32_t index)                           \
        {                                                                                                    \
                return used_record(&l->tables[TABLE], index);                                                \
        }                                                                                                    \
        const struct ledger_##name *ledger_##name##_get(struct ledger *l, uint32_t index)                    \
        {                                                                                                    \
                return in_use(&l->tables[TABLE], index) ? ledger_##name##_at(l, index) : NULL;               \
        }                                                                                                    \
        uint32_t ledger_##name##_end(const struct ledger *l)                                                 \
        {                                                                                                    \
                return l->tables[TABLE].n_touched;                                                           \
        }                                                                                                    \
        void ledger_##name##_clear(struct ledger *l, uint32_t index)                                         \
        {                                                                                                    \
                clear(l, TABLE, index);                                                                      \
        }
LEDGER_RECORDS(X)
#undef X

int ledger_quota_add(struct ledger *l, const struct ledger_quota *facts, uint32_t *ret_index)
{
        struct ledger_quota *q;
        int r = make(l, TABLE_QUOTA, facts, ret_index);

        if (r < 0)
                return r;
        q = record(&l->tables[TABLE_QUOTA], *ret_index);
        q->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        q->partition[LEDGER_NAME_BYTES - 1] = '\0';
        atomic_init(&q->is_closed, 0);
        atomic_init(&q->growing_mib, 0);
        atomic_init(&q->oom_kills, 0);
        atomic_init(&q->unreclaimed_mib, 0);
        commit_next(&l->tables[TABLE_QUOTA], *ret_index);
        return 0;
}

static uint32_t mib_of(uint64_t n_bytes)
{
        uint64_t n_mib = n_bytes / MIB_BYTES + (n_bytes % MIB_BYTES > 0);

        return n_mib < UINT32_MAX ? (uint32_t)n_mib : UINT32_MAX;
}

/* From any thread: it must not read the counts of the table, which the loop changes. */
void ledger_quota_grows(struct ledger *l, uint32_t index, uint64_t n_bytes, uint32_t oom_kills)
{
        struct ledger_quota *q = record(&l->tables[TABLE_QUOTA], index);

        assert(record_id(&l->tables[TABLE_QUOTA], index) != 0);
        if (atomic_load_explicit(&q->growing_mib, memory_order_relaxed) == 0)
                atomic_store_explicit(&q->oom_kills, oom_kills, memory_order_relaxed);
        atomic_fetch_add_explicit(&q->growing_mib, mib_of(n_bytes), memory_order_release);
}

void ledger_quota_has_grown(struct ledger *l, uint32_t index, uint64_t n_bytes)
{
        struct ledger_quota *q = record(&l->tables[TABLE_QUOTA], index);

        if (n_bytes == UINT64_MAX)
                atomic_store_explicit(&q->growing_mib, 0, memory_order_release);
        else
                atomic_fetch_sub_explicit(&q->growing_mib, mib_of(n_bytes), memory_order_release);
}

void ledger_quota_set_unreclaimed(struct ledger *l, uint32_t index, uint64_t n_bytes)
{
        atomic_store_explicit(&ledger_quota_at(l, index)->unreclaimed_mib, mib_of(n_bytes),
                              memory_order_release);
}

void ledger_quota_close(struct ledger *l, uint32_t index)
{
        atomic_store_explicit(&ledger_quota_at(l, index)->is_closed, 1, memory_order_release);
}

int ledger_region_add(struct ledger *l, const struct ledger_region *facts, uint32_t *ret_index)
{
        int r;

        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = make(l, TABLE_REGION, facts, ret_index);
        if (r == 0)
                commit_next(&l->tables[TABLE_REGION], *ret_index);
        return r;
}

int ledger_lease_add(struct ledger *l, const struct ledger_lease *facts, uint32_t *ret_index)
{
        int r;

        assert(ledger_quota_at(l, facts->quota)->is_lease);
        r = make(l, TABLE_LEASE, facts, ret_index);
        if (r == 0)
                commit_next(&l->tables[TABLE_LEASE], *ret_index);
        return r;
}

int ledger_session_add(struct ledger *l, const struct ledger_session *facts, uint32_t *ret_index)
{
        struct ledger_session *s;
        int r = make(l, TABLE_SESSION, facts, ret_index);

        if (r < 0)
                return r;
        s = record(&l->tables[TABLE_SESSION], *ret_index);
        s->tenant[LEDGER_NAME_BYTES - 1] = '\0';
        s->name[LEDGER_NAME_BYTES - 1] = '\0';
        s->split_id = 0;
        s->split_off_id = 0;
        commit_next(&l->tables[TABLE_SESSION], *ret_index);
        return 0;
}

int ledger_extent_add(struct ledger *l, const struct ledger_extent *facts, uint32_t *ret_index)
{
        struct ledger_extent *e;
        int r;

        assert(in_use(&l->tables[TABLE_QUOTA], facts->quota));
        r = make(l, TABLE_EXTENT, facts, ret_index);
        if (r < 0)
                return r;
        e = record(&l->tables[TABLE_EXTENT], *ret_index);
        atomic_init(&e->is_leaving, 0);
        commit_next(&l->tables[TABLE_EXTENT], *ret_index);
        return 0;
}

void ledger_extent_leave(struct ledger *l, uint32_t index)
{
        atomic_store_explicit(&ledger_extent_at(l, index)->is_leaving, 1, memory_order_release);
}

int ledger_export_add(struct ledger *l, uint32_t session, uint32_t extent, uint32_t *ret_index)
{
        const struct ledger_export facts = { .session = session, .extent = extent };
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_EXTENT], extent));
        r = make(l, TABLE_EXPORT, &facts, ret_index);
        if (r < 0)
                return r;
        ledger_list_add(l, LIST_SESSION_EXPORTS, *ret_index);
        ledger_list_add(l, LIST_EXTENT_EXPORTS, *ret_index);
        ledger_extent_at(l, extent)->is_unseen = 0; /* before the session can receive it */
        commit_next(&l->tables[TABLE_EXPORT], *ret_index);
        return 0;
}

/* Sets the generation of a record that was never used, before the record counts as touched: a free
 * record without a generation is retired. */
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

        bool is_shared = facts->session == LEDGER_NONE;

        assert(is_shared ? facts->parked == LEDGER_IS_COPY && in_use(&l->tables[TABLE_SHARED], facts->shared)
                         : in_use(&l->tables[TABLE_SESSION], facts->session));
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
        atomic_init(&b->shared, is_shared ? facts->shared : LEDGER_NONE);
        if (!is_shared)
                ledger_list_add(l, LIST_SESSION_BLOCKS, index);
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

/* ---- shared blocks -------------------------------------------------------- */

int ledger_shared_add(struct ledger *l, const struct ledger_shared *facts, uint32_t *ret_index)
{
        struct ledger_shared *s;
        int r;

        assert(in_use(&l->tables[TABLE_BLOCK], facts->block));
        r = make(l, TABLE_SHARED, facts, ret_index);
        if (r < 0)
                return r;
        s = record(&l->tables[TABLE_SHARED], *ret_index);
        s->name[LEDGER_NAME_BYTES - 1] = '\0';
        atomic_init(&s->until_ms, 0);
        atomic_init(&s->metadata, LEDGER_NONE);
        commit_next(&l->tables[TABLE_SHARED], *ret_index);
        return 0;
}

/* The metadata is complete before the shared record names it. */
int ledger_shared_describe(struct ledger *l, uint32_t shared, const void *bytes, size_t n_bytes)
{
        struct table *t = &l->tables[TABLE_METADATA];
        struct ledger_shared *s = ledger_shared_at(l, shared);
        struct ledger_metadata *m;
        uint32_t index;
        int r;

        assert(n_bytes > 0 && n_bytes <= LEDGER_METADATA_BYTES && s->metadata == LEDGER_NONE);
        r = take(t, &index);
        if (r < 0)
                return r;
        m = record(t, index);
        m->shared = shared;
        m->n_bytes = (uint32_t)n_bytes;
        memcpy(m->bytes, bytes, n_bytes);
        commit_next(t, index);
        atomic_store_explicit(&s->metadata, index, memory_order_release);
        return 0;
}

void ledger_shared_keep(struct ledger *l, uint32_t shared, uint64_t keep_ms)
{
        atomic_store_explicit(&ledger_shared_at(l, shared)->keep_ms, keep_ms, memory_order_release);
}

void ledger_shared_keep_until(struct ledger *l, uint32_t shared, uint64_t until_ms)
{
        atomic_store_explicit(&ledger_shared_at(l, shared)->until_ms, until_ms, memory_order_release);
}

void ledger_block_share(struct ledger *l, uint32_t block, uint32_t shared)
{
        struct ledger_block *b = ledger_block_at(l, block);

        assert(ledger_shared_at(l, shared)->block == block && b->session != LEDGER_NONE);
        atomic_store_explicit(&b->shared, shared, memory_order_release);
        list_remove(l, &LEDGER_LISTS[LIST_SESSION_BLOCKS], block);
        b->session = LEDGER_NONE;
}

void ledger_block_park(struct ledger *l, uint32_t block, uint64_t parked)
{
        struct ledger_block *b = ledger_block_at(l, block);

        assert(b->parked != LEDGER_IS_COPY);
        atomic_store_explicit(&b->parked, parked, memory_order_release);
}

int ledger_ref_add(struct ledger *l, uint32_t session, uint32_t shared, uint32_t *ret_index)
{
        const struct ledger_ref facts = { .session = session, .shared = shared, .count = 1 };
        int r;

        assert(in_use(&l->tables[TABLE_SESSION], session) && in_use(&l->tables[TABLE_SHARED], shared));
        r = make(l, TABLE_REF, &facts, ret_index);
        if (r < 0)
                return r;
        ledger_list_add(l, LIST_SESSION_REFS, *ret_index);
        ledger_list_add(l, LIST_SHARED_REFS, *ret_index);
        commit_next(&l->tables[TABLE_REF], *ret_index);
        return 0;
}

void ledger_export_set_read_only(struct ledger *l, uint32_t index, bool is_read_only)
{
        atomic_store_explicit(&ledger_export_at(l, index)->is_read_only, is_read_only, memory_order_release);
}

void ledger_ref_set_read_only(struct ledger *l, uint32_t index)
{
        atomic_store_explicit(&ledger_ref_at(l, index)->is_read_only, 1, memory_order_release);
}

void ledger_ref_set_parks_to(struct ledger *l, uint32_t index, uint32_t parks_to)
{
        atomic_store_explicit(&ledger_ref_at(l, index)->parks_to, parks_to, memory_order_release);
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

void ledger_read_limits(const struct ledger *l, struct ledger_limits *ret)
{
        ledger_header_limits(l->header, ret);
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
#define READ_COUNT(table, count) ret->count = l->tables[table].n_used;
        LIMITED_TABLES(READ_COUNT)
#undef READ_COUNT
}

bool ledger_is_name(const char *name)
{
        size_t n = strspn(name, LEDGER_NAME_CHARACTERS);

        return n > 0 && n < LEDGER_NAME_BYTES && name[n] == '\0';
}

bool ledger_is_socket_name(const char *name)
{
        return ledger_is_name(name) && name[0] != '.';
}
