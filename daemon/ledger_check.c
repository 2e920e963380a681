/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a ledger is what its process thinks: every table, list and count; see ledger.h. */
#include <errno.h>
#include <string.h>

#include "daemon/ledger_table.h"

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

                CHECK_THAT((const unsigned char *)h + s->offset == t->records, "a table has moved");
                CHECK_THAT(s->n_records == t->n_records && s->record_bytes == t->record_bytes,
                           "a table's size has changed");
                CHECK_THAT(atomic_load(&s->n_touched) == t->n_touched, "the header's n_touched is wrong");
        }
        return NULL;
}

/* n_used + n_free + n_retired == n_touched <= n_records */
static const char *check_counts(const struct table *t, bool is_blocks)
{
        uint32_t n_used = 0;
        uint32_t n_retired = 0;

        CHECK_THAT(t->n_touched <= t->n_records, "more records touched than the table has");
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
                        CHECK_THAT(id < atomic_load(&t->shared->next_id), "an id was never assigned");
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

                CHECK_THAT(in_use(t, i), "a session's list contains a block that is not in use");
                b = record(t, i);
                CHECK_THAT(b->session == session, "a session's list contains another session's block");
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

                CHECK_THAT(in_use(t, i), "a session's list contains an export that is not in use");
                x = record(t, i);
                CHECK_THAT(x->session == session, "a session's list contains another session's export");
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

                CHECK_THAT(in_use(t, i), "an extent's list contains an export that is not in use");
                x = record(t, i);
                CHECK_THAT(x->extent == extent, "an extent's list contains another extent's export");
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

                CHECK_THAT(in_use(t, i), "a session's list contains a reference that is not in use");
                h = record(t, i);
                CHECK_THAT(h->session == session, "a session's list contains another session's reference");
                CHECK_THAT(h->links.prev_of_session == prev, "a session's list of references is broken");
                CHECK_THAT(h->count > 0 && h->links.n_in_delivery <= h->count, "a reference's count is "
                                                                               "wrong");
                prev = i;
                i = h->links.next_of_session;
        }
        CHECK_THAT(i == LEDGER_NONE, "a session has more references than n_holds");
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
        CHECK_THAT(b->shared == shared, "a shared record's block does not refer to it");
        CHECK_THAT(b->session == LEDGER_NONE, "a shared block belongs to a session");
        CHECK_THAT(in_use(&l->tables[TABLE_QUOTA], b->quota), "a shared block's quota is not in use");
        CHECK_THAT(s->links.n_holds > 0, "a shared block has no references");
        CHECK_THAT(s->name[0] != '\0' && memchr(s->name, '\0', sizeof(s->name)),
                   "a shared block has no name");
        for (uint32_t n = 0; n < s->links.n_holds; n++) {
                const struct ledger_hold *h;

                CHECK_THAT(in_use(t, i), "a shared block's list contains a reference that is not in use");
                h = record(t, i);
                CHECK_THAT(h->shared == shared, "a shared block's list contains a reference to another "
                                                "block");
                CHECK_THAT(h->links.prev_of_shared == prev, "a shared block's list of references is broken");
                prev = i;
                i = h->links.next_of_shared;
        }
        CHECK_THAT(i == LEDGER_NONE, "a shared block has more references than n_holds");
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
        CHECK_THAT(n_of_sessions == holds->n_used, "a reference is in no session's list");
        CHECK_THAT(n_of_shared == holds->n_used, "a reference is in no shared block's list");
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
