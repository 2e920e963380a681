/* The ledger's tables and lists, and the life of a record in stores. schema.c describes each table and
 * list once: ledger.c makes and clears records and open.c opens the ledger of a previous daemon, both by
 * the schema. Only these files and the tests include it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_TABLE_H
#define BFCD_LEDGER_TABLE_H

#include "daemon/ledger/ledger.h"

#include <assert.h>

#define LEDGER_MAGIC  UINT64_C(0x7265676465636662) /* "bfcedger" on little-endian machines */
#define LEDGER_LAYOUT 1u                           /* counts up with every change of a record or the header */

#define X(TABLE, name) TABLE,
enum { LEDGER_RECORDS(X) N_TABLES };
#undef X

enum {
        LIST_SESSION_BLOCKS,
        LIST_SESSION_EXPORTS,
        LIST_EXTENT_EXPORTS,
        LIST_SESSION_REFS,
        LIST_SHARED_REFS,
        N_LISTS,
};

enum { MAX_OWNERS = 2, MAX_UNIQUE = 2 };

struct field {
        uint16_t offset;  /* in the record */
        uint16_t n_bytes; /* 4 or 8; 0: there is no such field */
};

/* No two records have the same values here. One field alone may be 0 in several records. */
struct unique {
        struct field a, b;
        const char *why; /* NULL: the table has no such rule */
};

struct kind {
        const char *name;
        const char *unused; /* what is wrong with a record that refers to a free record of this table */
        size_t record_bytes;
        size_t link_offset;      /* of the uint32_t that chains free records */
        struct field generation; /* of the next id; without it ids count up */
        struct {
                struct field index;
                int table;
        } refs[MAX_OWNERS];           /* records that must be in use */
        struct field offset, n_bytes; /* where it is in the arena of its first reference, a quota */
        struct unique unique[MAX_UNIQUE];
};

/* A doubly linked list: the records of a table that one record of another table has. */
struct list {
        int member, owner;  /* tables */
        size_t owner_index; /* in a member; LEDGER_NONE: it is in no list */
        size_t prev, next;  /* in a member */
        size_t first, n;    /* in an owner */
        const char *broken;
};

extern const struct kind LEDGER_KINDS[N_TABLES];
extern const struct list LEDGER_LISTS[N_LISTS];

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
        _Atomic uint32_t n_crashes;
        _Atomic uint32_t at;
        struct header_table tables[N_TABLES];
        _Atomic uint32_t n_aside;
};

struct table {
        const struct kind *kind;
        struct header_table *shared;
        unsigned char *records;
        size_t record_bytes;
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

static inline void *record(const struct table *t, uint32_t index)
{
        return t->records + (size_t)index * t->record_bytes;
}

static inline uint64_t record_id(const struct table *t, uint32_t index)
{
        const _Atomic uint64_t *id = record(t, index);

        return atomic_load_explicit(id, memory_order_acquire);
}

/* A word of 32 bits of a record. */
static inline uint32_t *record_word(const struct table *t, uint32_t index, size_t offset)
{
        unsigned char *r = record(t, index);

        return (uint32_t *)(void *)(r + offset);
}

static inline bool in_use(const struct table *t, uint32_t index)
{
        return index < t->n_touched && record_id(t, index) != 0;
}

static inline void *used_record(const struct table *t, uint32_t index)
{
        assert(in_use(t, index));
        return record(t, index);
}

static inline void commit(const struct table *t, uint32_t index, uint64_t id)
{
        _Atomic uint64_t *p = record(t, index);

        atomic_store_explicit(p, id, memory_order_release);
}

/* The counter moves on before the id is seen anywhere: a crash in between
 * loses a number and never gives one twice. */
static inline uint64_t next_id(const struct table *t)
{
        uint64_t id = atomic_load_explicit(&t->shared->next_id, memory_order_relaxed);

        atomic_store_explicit(&t->shared->next_id, id + 1, memory_order_relaxed);
        return id;
}

/* From here on the record is free. The fence keeps later stores (links,
 * the next facts) behind the store of 0. */
static inline void uncommit(const struct table *t, uint32_t index)
{
        _Atomic uint64_t *p = record(t, index);

        atomic_store_explicit(p, 0, memory_order_relaxed);
        atomic_thread_fence(memory_order_release);
}

/* The next index in use at or after `from`, or LEDGER_NONE. */
static inline uint32_t table_next(const struct table *t, uint32_t from)
{
        for (uint32_t i = from; i < t->n_touched; i++)
                if (in_use(t, i))
                        return i;
        return LEDGER_NONE;
}

/* The header of a ledger with these limits. -EINVAL: a limit that must not be 0 is 0, or one is LEDGER_NONE. */
int ledger_lay_out(const struct ledger_limits *limits, struct header *ret);

/* The limits by which the tables of this header were made. */
void ledger_header_limits(const struct header *h, struct ledger_limits *ret);

/* NULL, or what is wrong with the header of the mapping: the tables must be where this process would put them. */
const char *ledger_header_fault(const struct ledger *l);

/* Maps l->n_bytes of l->fd. -errno. */
int ledger_map(struct ledger *l);

/* Sets up l->tables by the header of the mapping; none of their records is counted yet. */
void ledger_find_tables(struct ledger *l);

/* Inserts a record at the front of a list of its owner. */
void ledger_list_add(struct ledger *l, int list, uint32_t index);

/* The lists of this record become empty. */
void ledger_lists_clear(struct ledger *l, int kind, uint32_t index);

/* NULL, or what is wrong with the id of a record in use. */
const char *ledger_id_fault(const struct table *t, uint32_t index);

/* A free record whose generations are used up is never used again. */
static inline bool table_is_retired(const struct table *t, uint32_t index)
{
        return t->kind->generation.n_bytes > 0 && *record_word(t, index, t->kind->generation.offset) == 0;
}

/* Inserts a free record into the free list. */
static inline void table_chain(struct table *t, uint32_t index)
{
        *record_word(t, index, t->kind->link_offset) = t->first_free;
        t->first_free = index;
        t->n_free++;
}

#endif
