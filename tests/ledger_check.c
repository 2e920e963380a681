/* SPDX-License-Identifier: Apache-2.0 */
/* Checks every table, list and count of a ledger against the schema; see checks.h. */
#include "tests/checks.h"

#include <errno.h>
#include <string.h>

#include "daemon/ledger/table.h"

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
static const char *check_counts(const struct table *t)
{
        uint32_t n_used = 0;
        uint32_t n_retired = 0;

        CHECK_THAT(t->n_touched <= t->n_records, "more records touched than the table has");
        CHECK_THAT((uint64_t)t->n_used + t->n_free + t->n_retired == t->n_touched,
                   "n_used + n_free + n_retired != n_touched");
        for (uint32_t i = 0; i < t->n_touched; i++) {
                const char *why = in_use(t, i) ? ledger_id_fault(t, i) : NULL;

                CHECK_THAT(!why, why);
                n_used += in_use(t, i);
                n_retired += !in_use(t, i) && table_is_retired(t, i);
        }
        CHECK_THAT(n_used == t->n_used, "n_used is not the number of records in use");
        CHECK_THAT(n_retired == t->n_retired, "n_retired is not the number of retired records");
        return NULL;
}

/* A chain that ends after exactly n_free steps has no loop, so its records are
 * distinct. */
static const char *check_free(const struct table *t)
{
        uint32_t i = t->first_free;

        for (uint32_t n = 0; n < t->n_free; n++) {
                CHECK_THAT(i < t->n_touched, "the free list leaves its table");
                CHECK_THAT(!in_use(t, i), "a record in use is in the free list");
                CHECK_THAT(!table_is_retired(t, i), "a retired record is in the free list");
                i = *record_word(t, i, t->kind->link_offset);
        }
        CHECK_THAT(i == LEDGER_NONE, "the free list is longer than n_free");
        return NULL;
}

static const char *check_refs(const struct ledger *l, const struct table *t)
{
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                for (size_t k = 0; k < MAX_OWNERS && t->kind->refs[k].index.n_bytes > 0; k++)
                        CHECK_THAT(in_use(&l->tables[t->kind->refs[k].table],
                                          *record_word(t, i, t->kind->refs[k].index.offset)),
                                   LEDGER_KINDS[t->kind->refs[k].table].unused);
        return NULL;
}

/* Each record that names an owner is in exactly that owner's list: every list is sound, and together
 * they are as long as there are such records. */
static const char *check_list(const struct ledger *l, const struct list *s)
{
        const struct table *members = &l->tables[s->member], *owners = &l->tables[s->owner];
        uint64_t n_members = 0, n_linked = 0;

        for (uint32_t i = table_next(members, 0); i != LEDGER_NONE; i = table_next(members, i + 1))
                n_members += *record_word(members, i, s->owner_index) != LEDGER_NONE;
        for (uint32_t owner = table_next(owners, 0); owner != LEDGER_NONE;
             owner = table_next(owners, owner + 1)) {
                uint32_t prev = LEDGER_NONE, i = *record_word(owners, owner, s->first);

                for (uint32_t n = *record_word(owners, owner, s->n); n > 0; n--) {
                        CHECK_THAT(in_use(members, i) && *record_word(members, i, s->owner_index) == owner &&
                                           *record_word(members, i, s->prev) == prev,
                                   s->broken);
                        prev = i;
                        i = *record_word(members, i, s->next);
                        n_linked++;
                }
                CHECK_THAT(i == LEDGER_NONE, s->broken);
        }
        CHECK_THAT(n_linked == n_members, s->broken);
        return NULL;
}

/* Its shared record's block names the copy. */
static bool is_named_copy(const struct ledger *l, uint32_t copy)
{
        const struct table *blocks = &l->tables[TABLE_BLOCK], *shared = &l->tables[TABLE_SHARED];
        const struct ledger_block *b = record(blocks, copy);
        const struct ledger_shared *s = in_use(shared, b->shared) ? record(shared, b->shared) : NULL;

        return s && in_use(blocks, s->block) &&
               ((const struct ledger_block *)record(blocks, s->block))->parked == b->id;
}

static const char *check_sharing(const struct ledger *l)
{
        const struct table *shared = &l->tables[TABLE_SHARED], *refs = &l->tables[TABLE_REF],
                           *blocks = &l->tables[TABLE_BLOCK], *metadata = &l->tables[TABLE_METADATA];
        uint32_t n_shared = 0, n_metadata = 0;

        for (uint32_t i = table_next(blocks, 0); i != LEDGER_NONE; i = table_next(blocks, i + 1)) {
                const struct ledger_block *b = record(blocks, i);

                CHECK_THAT((b->session == LEDGER_NONE) == (b->shared != LEDGER_NONE),
                           "a block has a session and a name, or neither");
                n_shared += b->shared != LEDGER_NONE && b->parked != LEDGER_IS_COPY;
                CHECK_THAT(b->shared == LEDGER_NONE || b->parked != LEDGER_IS_COPY || is_named_copy(l, i),
                           "a copy of a shared block is not its block's");
        }
        CHECK_THAT(n_shared == shared->n_used, "a shared block has no record, or a record no block");
        for (uint32_t i = table_next(shared, 0); i != LEDGER_NONE; i = table_next(shared, i + 1)) {
                const struct ledger_shared *s = record(shared, i);
                const struct ledger_block *b;

                CHECK_THAT(in_use(blocks, s->block), "a shared record's block is not in use");
                b = record(blocks, s->block);
                CHECK_THAT(b->shared == i, "a shared record's block does not refer to it");
                CHECK_THAT(s->links.n_refs > 0 || s->keep_ms > 0, "a shared block has no references");
                CHECK_THAT(s->metadata == LEDGER_NONE || in_use(metadata, s->metadata),
                           "the metadata of a shared block is not in use");
                n_metadata += s->metadata != LEDGER_NONE;
                CHECK_THAT(s->name[0] != '\0' && memchr(s->name, '\0', sizeof(s->name)),
                           "a shared block has no name");
        }
        CHECK_THAT(n_metadata == metadata->n_used, "metadata belongs to no shared block");
        for (uint32_t i = table_next(refs, 0); i != LEDGER_NONE; i = table_next(refs, i + 1)) {
                const struct ledger_ref *h = record(refs, i);

                CHECK_THAT(h->count > 0 && h->links.n_in_delivery <= h->count,
                           "a reference's count is wrong");
        }
        return NULL;
}

int ledger_check(const struct ledger *l, const char **ret_why)
{
        const char *why = check_header(l);

        for (size_t i = 0; !why && i < N_TABLES; i++) {
                why = check_counts(&l->tables[i]);
                if (!why)
                        why = check_free(&l->tables[i]);
                if (!why)
                        why = check_refs(l, &l->tables[i]);
        }
        for (size_t i = 0; !why && i < N_LISTS; i++)
                why = check_list(l, &LEDGER_LISTS[i]);
        if (!why)
                why = check_sharing(l);
        if (!why)
                return 0;
        *ret_why = why;
        return -EBADMSG;
}

static void shrink(struct table *t, uint32_t n_records)
{
        t->n_records = n_records;
        t->shared->n_records = n_records;
}

void ledger_shrink(struct ledger *l, uint32_t n_blocks, uint32_t n_refs)
{
        shrink(&l->tables[TABLE_BLOCK], n_blocks);
        shrink(&l->tables[TABLE_REF], n_refs);
}
