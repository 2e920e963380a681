/* What the files of the ledger share: where its tables lie, and a record's life in stores.
 * ledger.c makes and clears records, ledger_check.c verifies them, ledger_open.c takes over
 * what another process left. For nobody else.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_TABLE_H
#define BFCD_LEDGER_TABLE_H

#include "daemon/ledger.h"

#include <assert.h>

#define LEDGER_MAGIC  UINT64_C(0x7265676465636662) /* "bfcedger" on little-endian machines */
#define LEDGER_LAYOUT 8                            /* counts up with every change of a record or the header */

enum {
        TABLE_QUOTA,
        TABLE_SESSION,
        TABLE_EXTENT,
        TABLE_EXPORT,
        TABLE_BLOCK,
        TABLE_SHARED,
        TABLE_HOLD,
        TABLE_REGION,
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
        _Atomic uint32_t n_crashes;
        uint32_t pad;
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

static inline void *record(const struct table *t, uint32_t index)
{
        return t->records + (size_t)index * t->record_bytes;
}

static inline uint64_t record_id(const struct table *t, uint32_t index)
{
        const _Atomic uint64_t *id = record(t, index);

        return atomic_load_explicit(id, memory_order_acquire);
}

static inline uint32_t *record_link(const struct table *t, uint32_t index)
{
        unsigned char *r = record(t, index);

        return (uint32_t *)(void *)(r + t->link_offset);
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

/* From here on the record is nobody's. The fence keeps later stores (links,
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

/* Where the tables of such a ledger lie. -EINVAL: a limit is 0 that may not be, or LEDGER_NONE. */
int ledger_lay_out(const struct ledger_limits *limits, struct header *ret);

/* Maps what is behind l->fd, of l->n_bytes. -errno. */
int ledger_map(struct ledger *l);

/* Finds the tables of the mapping by its header; none of their records is counted yet. */
void ledger_find_tables(struct ledger *l);

/* A session that has nothing. */
static inline void ledger_link_nothing(struct ledger_session *s)
{
        s->links.first_block = LEDGER_NONE;
        s->links.first_export = LEDGER_NONE;
        s->links.first_hold = LEDGER_NONE;
        s->links.n_blocks = 0;
        s->links.n_exports = 0;
        s->links.n_holds = 0;
}

/* Into the lists of their session, extent and shared record, which are in use. */
void ledger_link_export(struct ledger *l, uint32_t index);
void ledger_link_block(struct ledger *l, uint32_t index);
void ledger_link_hold(struct ledger *l, uint32_t index);

/* A free record into the free list. */
static inline void table_chain(struct table *t, uint32_t index)
{
        *record_link(t, index) = t->first_free;
        t->first_free = index;
        t->n_free++;
}

#endif
