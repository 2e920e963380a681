/* The ledger: the daemon's own table of quotas, sessions, extents, exports,
 * blocks, shared blocks and who holds them, in one sealed memfd.
 *
 * It is the only place where these facts live, so that a successor of this
 * process that gets the memfd can go on. Each table is an array of fixed-size
 * records. A record is free (id 0) or committed (id not 0); the id is written
 * by one atomic store, last when the record is made and first when it is
 * cleared. So whenever the process dies, each record is wholly there or not at
 * all. A record is committed before the reply that reveals it is sent.
 *
 * Facts are what a successor reads. Everything in a record's `links` is
 * convenience of the running process: a successor rebuilds it from the facts.
 *
 * Ids are never used again: extents, sessions and quotas count up; a block's id
 * is {generation, index}, and an index whose generation would wrap is retired.
 *
 * A block is a session's, or it is shared: then its word `shared` names a record with
 * its name, and each session that has it has a hold. The block has the last word: a shared
 * record, and the holds of it, count only while the block that it names names it. So a
 * publication is committed by the one store to the block's `shared`, and the end of a
 * shared block by the one store that clears the block. What a process that was killed left
 * around these stores (a shared record that its block does not name, holds of such a one)
 * a successor clears, and publishes nothing. An attach commits its hold, or stores one
 * count more; the other way round when it is let go.
 *
 * A block is split by making a record of its high part and then storing what is left in its own
 * n_requested, which decides. Its session names both before. So a successor that finds the high part
 * inside the block clears the high part; else it makes n_bytes agree with n_requested.
 *
 * Invariant, for each table: n_used + n_free + n_retired == n_touched <= n_records,
 * n_touched being the records ever used. Pages of a table are touched only when
 * used (the memfd is sparse). Not thread-safe: it belongs to the loop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_H
#define BFCD_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LEDGER_NONE       UINT32_MAX /* no index */
#define LEDGER_NAME_BYTES 64         /* names of tenants and partitions, NUL included */
#define LEDGER_TAG_BYTES  32         /* of blocks, NUL included */

/* Records are addressed by index inside their table. */

/* Statistics of a quota that are kept as long as the ledger, also when its record is replaced. Single words,
 * each always whole. A partition has no record: its peaks are in the record of each of its quotas. */
struct ledger_lifetime {
        uint64_t peak_in_use;
        uint64_t peak_reserved;
        uint64_t n_over_quota;
        uint64_t n_out_of_memory;
        uint64_t last_refusal_ms; /* since 1970; 0: none */
        uint64_t partition_peak_in_use;
        uint64_t partition_peak_reserved;
};

struct ledger_quota { /* one tenant in one partition */
        _Atomic uint64_t id;
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        uint64_t extent_bytes; /* these two and extents_per_zone: the grid of its arena, see arena.h */
        uint64_t small_extent_bytes;
        struct ledger_lifetime life;
        _Atomic uint32_t is_closed; /* not 0: a record of its arena was bad, see ledger_open() */
        _Atomic uint32_t
                growing_mib; /* memory is being made for it that may cost this process its life; rounded up */
        _Atomic uint32_t oom_kills; /* host_free_oom_kills() when that began */
        uint32_t extents_per_zone;
};

struct ledger_region { /* a range of an arena's space, in which its extents lie; not where each is a region of its own */
        _Atomic uint64_t id;
        uint64_t base;
        uint64_t n_bytes;
        uint64_t first_extent_bytes; /* 0: it has none of a size of its own */
        uint32_t quota;
        uint32_t number; /* in the arena, from 0 */
};

struct ledger_session {
        _Atomic uint64_t id;
        uint8_t secret[16];
        uint64_t start_time;   /* of the process, /proc/PID/stat field 22; 0 unknown */
        uint64_t born_ms;      /* CLOCK_BOOTTIME */
        uint64_t capabilities; /* what it was granted, in the protocol's bits */
        uint64_t quotas_end;   /* its tenant's quotas with lower ids are those that it was told of */
        uint64_t split_id;     /* the last block of it that was split; 0: none */
        uint64_t split_off_id; /* what was split off */
        uint32_t pid;
        uint32_t uid;
        uint32_t gid;
        char tenant[LEDGER_NAME_BYTES];
        char name[LEDGER_NAME_BYTES]; /* for people; by the client's word */
        struct {
                uint32_t first_block;  /* all blocks of the session */
                uint32_t first_export; /* all its exports */
                uint32_t first_hold;   /* all shared blocks that it has */
                uint32_t n_blocks;
                uint32_t n_exports;
                uint32_t n_holds;
        } links;
};

struct ledger_extent {
        _Atomic uint64_t id;
        uint64_t offset; /* in the arena's space */
        uint64_t n_bytes;
        uint64_t store_key;          /* of its fd in the service manager's store; 0: it is not there */
        uint32_t quota;              /* index of the ledger_quota */
        _Atomic uint32_t is_leaving; /* not 0: it is being given back, and no block lies in it */
        int32_t fd;                  /* in this process */
        struct {
                uint32_t first_export; /* sessions that were given it */
                uint32_t n_exports;
        } links;
        uint32_t huge_mib; /* so much was made in pages of 2 MiB */
};

struct ledger_export { /* a session was given an extent */
        _Atomic uint64_t id;
        uint32_t session;
        uint32_t extent;
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t prev_of_extent, next_of_extent;
        } links;
};

struct ledger_block {
        _Atomic uint64_t id; /* generation << 32 | index */
        uint64_t offset;     /* in the arena's space */
        uint64_t n_bytes;
        uint64_t n_requested;
        uint64_t born_ms; /* CLOCK_BOOTTIME */
        uint32_t session; /* LEDGER_NONE: it is shared */
        uint32_t quota;
        uint64_t handle;            /* the allocator's, in this process */
        _Atomic uint32_t shared;    /* index of the ledger_shared; LEDGER_NONE: it is its session's alone */
        char tag[LEDGER_TAG_BYTES]; /* for people; by the client's word, printable */
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t generation;  /* of the next id at this index */
                uint32_t in_delivery; /* its reply has not been sent yet */
        } links;
};

struct ledger_shared { /* a block that has a name, which is its tenant's */
        _Atomic uint64_t id;
        uint64_t born_ms; /* when it was published, CLOCK_BOOTTIME */
        char name[LEDGER_NAME_BYTES];
        uint32_t block;
        struct {
                uint32_t first_hold; /* sessions that have it */
                uint32_t n_holds;
        } links;
};

struct ledger_hold { /* a session has a shared block */
        _Atomic uint64_t id;
        uint32_t session;
        uint32_t shared;
        _Atomic uint32_t count; /* how often, at least once */
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t prev_of_shared, next_of_shared;
                uint32_t n_in_delivery; /* of count: their replies have not been sent yet */
        } links;
};

/* Number of records of each table. Of regions there are as many as extents and quotas
 * together, since an arena adds one only where the others have no room for a request. */
struct ledger_limits {
        uint32_t n_quotas;
        uint32_t n_sessions;
        uint32_t n_extents;
        uint32_t n_exports;
        uint32_t n_blocks;
        uint32_t n_shared; /* may be 0, and so may the next */
        uint32_t n_holds;
};

struct ledger;

/* Makes the memfd (sealed GROW, SHRINK, SEAL) and maps it. -ENOMEM, -EINVAL
 * (a limit is 0 that may not be, or LEDGER_NONE), -errno. */
int ledger_new(const struct ledger_limits *limits, struct ledger **ret);
struct ledger *ledger_free(struct ledger *l);

/* A record of which a fact cannot be. */
struct ledger_fault {
        const char *table; /* "block"; "header" */
        uint32_t index;    /* in the table */
        uint64_t id;
        uint32_t quota;  /* what was closed for it; LEDGER_NONE: several quotas, or none */
        const char *why; /* a sentence */
};

enum { LEDGER_HAS_FAULTS = 1 };

/* Takes over the ledger of a process that is no more, and its fd: every record is looked
 * at, what a kill left half done is repaired, links and lists are made anew. No handle of
 * a block and no fd of an extent in it means anything in this process.
 *
 * LEDGER_HAS_FAULTS: there are bad records, each of which on_fault (may be NULL; called
 * before this returns) was told of, and which have been cleared. First their arenas are
 * closed: where it is known, the quota that the record is of; else those of the tenant of
 * the session that it names; else all. Of a closed quota nothing may be given out or given
 * back, for it is not known what lies where; its other records stay, and no later process
 * opens it again. A bad session is cleared alone, for what names it is then bad itself. A bad quota stays too, closed and without names.
 *
 * -EBADMSG: not a ledger of this layout, or its header cannot be; on_fault is told, and
 * nothing has changed. -ENOMEM, -errno. After a failure the fd is the caller's. */
int ledger_open(int fd, void (*on_fault)(void *userdata, const struct ledger_fault *fault), void *userdata,
                struct ledger **ret);

/* Memory of n_bytes is being allocated for the quota, since oom_kills; 0 bytes: no longer. From any thread.
 * If the daemon ends meanwhile, its successor compares oom_kills with the count at its start: a higher one
 * means that the kernel killed the daemon, or another process in its place, for this growth. */
void ledger_quota_grows(struct ledger *l, uint32_t index, uint64_t n_bytes, uint32_t oom_kills);

/* For good: nothing is given out or given back any more. */
void ledger_quota_close(struct ledger *l, uint32_t index);

/* A larger one with all that is in `from`, under the same indexes and ids: tables have as many records as
 * before or as the limits say, whichever is more. From then on `from` is to be freed, unless that fails:
 * -ENOMEM, -errno. */
int ledger_grow(const struct ledger *from, const struct ledger_limits *limits, struct ledger **ret);

/* The extent is on its way back, and no block of it is in use: from here on a successor
 * would finish it, whether its memory is there or not. */
void ledger_extent_leave(struct ledger *l, uint32_t index);

/* How many records its tables have; and the ids that quotas and extents to come begin with. */
void ledger_read_limits(const struct ledger *l, struct ledger_limits *ret);
uint64_t ledger_quotas_end(const struct ledger *l);
uint64_t ledger_extents_end(const struct ledger *l);

/* How many processes in a row that worked on this ledger have crashed. It is in the memfd, and
 * nobody's but its user's; valid as long as the ledger. */
_Atomic uint32_t *ledger_crashes(const struct ledger *l);

/* Makes a committed record: `facts` is copied (its id and links are ignored),
 * links are set up, a fresh id is stored last. -ENOSPC: the table is full.
 * *ret_index names it. */
int ledger_quota_add(struct ledger *l, const struct ledger_quota *facts, uint32_t *ret_index);
int ledger_region_add(struct ledger *l, const struct ledger_region *facts, uint32_t *ret_index);
int ledger_session_add(struct ledger *l, const struct ledger_session *facts, uint32_t *ret_index);
int ledger_extent_add(struct ledger *l, const struct ledger_extent *facts, uint32_t *ret_index);
int ledger_export_add(struct ledger *l, uint32_t session, uint32_t extent, uint32_t *ret_index);
int ledger_block_add(struct ledger *l, const struct ledger_block *facts, uint32_t *ret_index);
int ledger_shared_add(struct ledger *l, const struct ledger_shared *facts, uint32_t *ret_index);
int ledger_hold_add(struct ledger *l, uint32_t session, uint32_t shared, uint32_t *ret_index); /* once */

/* The session's block is shared from now on, by this record that names it: no session's
 * any more. Who had it must have a hold of it already. */
void ledger_block_share(struct ledger *l, uint32_t block, uint32_t shared);

/* Whether there is a record for one more block. */
bool ledger_has_block(const struct ledger *l);

/* Splits a session's own block `at` bytes behind its begin, a multiple of 256 inside it: the record keeps
 * the low part, *ret_index is that of the high part, with this handle. -ENOSPC: not ledger_has_block(). */
int ledger_block_split(struct ledger *l, uint32_t index, uint64_t at, uint64_t handle, uint32_t *ret_index);

/* The block that was split off the block by the last split of its session, if that left the block `at` bytes
 * and what was split off is still the session's own; else LEDGER_NONE. */
uint32_t ledger_block_split_off(const struct ledger *l, uint32_t index, uint64_t at);

/* Clears a record (id first) and unlinks it. A session must have no blocks, exports and
 * holds left, an extent no exports, a shared record no holds; asserted. A shared block is
 * cleared before its holds and its shared record are. */
void ledger_quota_clear(struct ledger *l, uint32_t index);
void ledger_region_clear(struct ledger *l, uint32_t index);
void ledger_session_clear(struct ledger *l, uint32_t index);
void ledger_extent_clear(struct ledger *l, uint32_t index);
void ledger_export_clear(struct ledger *l, uint32_t index);
void ledger_block_clear(struct ledger *l, uint32_t index);
void ledger_shared_clear(struct ledger *l, uint32_t index);
void ledger_hold_clear(struct ledger *l, uint32_t index);

/* The record at an index in use; asserted. */
struct ledger_quota *ledger_quota_at(struct ledger *l, uint32_t index);
struct ledger_session *ledger_session_at(struct ledger *l, uint32_t index);
struct ledger_extent *ledger_extent_at(struct ledger *l, uint32_t index);
struct ledger_export *ledger_export_at(struct ledger *l, uint32_t index);
struct ledger_block *ledger_block_at(struct ledger *l, uint32_t index);
struct ledger_shared *ledger_shared_at(struct ledger *l, uint32_t index);
struct ledger_hold *ledger_hold_at(struct ledger *l, uint32_t index);

/* The block with this id, in constant time: its index, or LEDGER_NONE for an id
 * never given or freed already. Safe with any number from outside. */
uint32_t ledger_block_find(const struct ledger *l, uint64_t id);

/* For lists, which look at a bounded number of records: one past the last index
 * ever used, and the record at an index, NULL where it is free. */
uint32_t ledger_quota_end(const struct ledger *l);
const struct ledger_quota *ledger_quota_get(struct ledger *l, uint32_t index);
uint32_t ledger_session_end(const struct ledger *l);
const struct ledger_session *ledger_session_get(struct ledger *l, uint32_t index);
uint32_t ledger_block_end(const struct ledger *l);
const struct ledger_block *ledger_block_get(struct ledger *l, uint32_t index);
uint32_t ledger_shared_end(const struct ledger *l);
uint32_t ledger_region_end(const struct ledger *l);
const struct ledger_region *ledger_region_get(struct ledger *l, uint32_t index);
uint32_t ledger_extent_end(const struct ledger *l);
const struct ledger_extent *ledger_extent_get(struct ledger *l, uint32_t index);
const struct ledger_shared *ledger_shared_get(struct ledger *l, uint32_t index);

const struct ledger_export *ledger_export_get(struct ledger *l, uint32_t index);

struct ledger_counts { /* records in use */
        uint32_t n_quotas, n_sessions, n_extents, n_exports, n_blocks, n_shared, n_holds;
};
void ledger_count(const struct ledger *l, struct ledger_counts *ret);

int ledger_fd(const struct ledger *l); /* borrowed */

/* Verifies every table, list and count; slow. 0, or -EBADMSG and a sentence. */
int ledger_check(const struct ledger *l, const char **ret_why);

#endif
