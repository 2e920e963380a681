/* The schema of the ledger: what each table's records are, what must hold for them, and which lists
 * there are; see table.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/ledger/table.h"

#define FIELD(record, member)                                                                                \
        {                                                                                                    \
                offsetof(struct ledger_##record, member), sizeof(((struct ledger_##record *)0)->member)      \
        }

/* link: any word that has no meaning in a free record. */
#define RECORD(record, text, link)                                                                           \
        .name = text, .unused = "its " text " is not in use",                                                \
        .record_bytes = sizeof(struct ledger_##record),                                                      \
        .link_offset = offsetof(struct ledger_##record, link)

#define UNIQUE_ID(record)                                                                                    \
        {                                                                                                    \
                .a = FIELD(record, id), .why = "its id is used twice"                                        \
        }

const struct kind LEDGER_KINDS[N_TABLES] = {
        [TABLE_QUOTA] = { RECORD(quota, "quota", extent_bytes), .unique = { UNIQUE_ID(quota) } },
        [TABLE_SESSION] = { RECORD(session, "session", links.first_block), .unique = { UNIQUE_ID(session) } },
        [TABLE_EXTENT] = { RECORD(extent, "extent", links.first_export),
                           .refs = { { FIELD(extent, quota), TABLE_QUOTA } }, .offset = FIELD(extent, offset),
                           .n_bytes = FIELD(extent, n_bytes),
                           .unique = { UNIQUE_ID(extent),
                                       { .a = FIELD(extent, store_key),
                                         .why = "its key in the store is used twice" } } },
        [TABLE_EXPORT] = { RECORD(export, "export", links.next_of_session),
                           .refs = { { FIELD(export, extent), TABLE_EXTENT },
                                     { FIELD(export, session), TABLE_SESSION } },
                           .unique = { { FIELD(export, extent), FIELD(export, session),
                                         "its session received its extent twice" } } },
        [TABLE_BLOCK] = { RECORD(block, "block", links.next_of_session),
                          .generation = FIELD(block, links.generation),
                          .refs = { { FIELD(block, quota), TABLE_QUOTA } }, .offset = FIELD(block, offset),
                          .n_bytes = FIELD(block, n_bytes) },
        [TABLE_SHARED] = { RECORD(shared, "shared record", links.first_ref),
                           .unique = { UNIQUE_ID(shared) } },
        [TABLE_REF] = { RECORD(ref, "reference", links.next_of_session),
                        .unique = { { FIELD(ref, shared), FIELD(ref, session),
                                      "its session has two references to it" } } },
        [TABLE_METADATA] = { RECORD(metadata, "metadata", n_bytes), .unique = { UNIQUE_ID(metadata) } },
        [TABLE_REGION] = { RECORD(region, "region", number),
                           .refs = { { FIELD(region, quota), TABLE_QUOTA } }, .offset = FIELD(region, base),
                           .n_bytes = FIELD(region, n_bytes),
                           .unique = { { FIELD(region, quota), FIELD(region, number),
                                         "its number is used twice" } } },
        [TABLE_LEASE] = { RECORD(lease, "lease", kind), .refs = { { FIELD(lease, quota), TABLE_QUOTA } },
                          .unique = { UNIQUE_ID(lease),
                                      { .a = FIELD(lease, quota), .why = "its quota is used twice" } } },
};

#define LIST(MEMBER, member, OWNER, owner)                                                                   \
        {                                                                                                    \
                TABLE_##MEMBER, TABLE_##OWNER, offsetof(struct ledger_##member, owner),                      \
                        offsetof(struct ledger_##member, links.prev_of_##owner),                             \
                        offsetof(struct ledger_##member, links.next_of_##owner),                             \
                        offsetof(struct ledger_##owner, links.first_##member),                               \
                        offsetof(struct ledger_##owner, links.n_##member##s),                                \
                        "the list of " #member "s of one " #owner " is broken"                               \
        }

const struct list LEDGER_LISTS[N_LISTS] = {
        [LIST_SESSION_BLOCKS] = LIST(BLOCK, block, SESSION, session),
        [LIST_SESSION_EXPORTS] = LIST(EXPORT, export, SESSION, session),
        [LIST_EXTENT_EXPORTS] = LIST(EXPORT, export, EXTENT, extent),
        [LIST_SESSION_REFS] = LIST(REF, ref, SESSION, session),
        [LIST_SHARED_REFS] = LIST(REF, ref, SHARED, shared),
};

/* The layout is an interface between versions: a change must be seen, and bump
 * LEDGER_LAYOUT. There may be millions of blocks. */
_Static_assert(sizeof(struct ledger_quota) == 240, "layout of a quota");
_Static_assert(sizeof(struct ledger_region) == 40, "layout of a region");
_Static_assert(sizeof(struct ledger_session) == 624, "layout of a session");
_Static_assert(sizeof(struct ledger_extent) == 72, "layout of an extent");
_Static_assert(sizeof(struct ledger_export) == 40, "layout of an export");
_Static_assert(sizeof(struct ledger_shared) == 112, "layout of a shared block");
_Static_assert(sizeof(struct ledger_lease) == 1192, "layout of a lease");
_Static_assert(sizeof(struct ledger_metadata) == 4112, "layout of metadata");
_Static_assert(sizeof(struct ledger_ref) == 48, "layout of a reference");
_Static_assert(sizeof(struct ledger_block) == 128, "layout of a block");
_Static_assert(sizeof(struct header) <= 4096, "the header is one page");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2 && ATOMIC_INT_LOCK_FREE == 2, "a commit is one store");
_Static_assert(offsetof(struct ledger_quota, id) == 0 && offsetof(struct ledger_session, id) == 0 &&
                       offsetof(struct ledger_extent, id) == 0 && offsetof(struct ledger_export, id) == 0 &&
                       offsetof(struct ledger_block, id) == 0 && offsetof(struct ledger_shared, id) == 0 &&
                       offsetof(struct ledger_ref, id) == 0 && offsetof(struct ledger_region, id) == 0 &&
                       offsetof(struct ledger_metadata, id) == 0 && offsetof(struct ledger_lease, id) == 0,
               "every record starts with its id");
