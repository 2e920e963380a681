/* The ledger: the daemon's tables of quotas, regions, sessions, extents, exports, blocks, shared
 * blocks and references to them, in one sealed memfd.
 *
 * These facts are nowhere else, so a successor that gets the memfd can continue. Each table is
 * an array of records of one size. A record is free (id 0) or committed (id not 0). One atomic
 * store writes the id: last when the record is made, first when it is cleared. So when the
 * process dies, each record is there completely or not at all. A record is committed before
 * the reply that tells of it is sent.
 *
 * A successor reads facts. The `links` of a record serve only the running process, and a
 * successor rebuilds them from the facts.
 *
 * Ids are never used again: extents, sessions and quotas count up. A block's id is
 * {generation, index}; an index whose generation would wrap is retired.
 *
 * A block belongs to a session, or it is shared. A shared block names, in its word `shared`, a
 * record with its name, and each session that has the block has a reference. The block
 * decides: a shared record and its references count only while the block names the record. So
 * one store to `shared` commits a publication, and the store that clears the block ends it. A
 * successor clears shared records that their block does not name, and references to these. An
 * attach commits a reference, or stores a higher count. A shared block that is kept may have no
 * reference. The metadata of a shared block is a record of its own. It counts only while the shared
 * record names it.
 *
 * A block is split by making a record of its high part and then storing the rest in its own
 * n_requested, which decides. Its session names both blocks first. A successor that finds the
 * high part inside the block clears the high part; else it corrects n_bytes.
 *
 * A parked block has no extents. Its word `parked` decides: it names the copy, which is a block of the same
 * session, or says that there is none. It is stored after the copy is complete and before the extents leave,
 * and cleared after the contents are back. So a successor releases the extents that it finds in the place of a
 * parked block. A copy that no block names is freed by the session's resumption or end. The copy of a shared
 * block belongs to no session and names the same shared record; a successor clears one that the block does not name.
 *
 * Invariant, for each table: n_used + n_free + n_retired == n_touched <= n_records; n_touched
 * records were ever used. Pages of a table are touched only when used (the memfd is sparse).
 * Not thread-safe: it belongs to the loop.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LEDGER_H
#define BFCD_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LEDGER_NONE           UINT32_MAX /* no index */
#define LEDGER_QUOTA_REGIONS  16u        /* at most, where regions outlive their extents */
#define LEDGER_NAME_BYTES     64         /* names of tenants and partitions, NUL included */
#define LEDGER_TAG_BYTES      32         /* of blocks, NUL included */
#define LEDGER_METADATA_BYTES 4096       /* of a shared block */
#define LEDGER_FOREVER        UINT64_MAX /* a time that does not come */
#define LEDGER_PLACE_BYTES    512        /* of a lease's control group or unit, NUL included */
#define LEDGER_SESSION_LEASES 16  /* leases of a session: in so many partitions a tenant can have leases */
#define LEDGER_SESSION_DIRECT 16u /* partitions in which a session can have direct charges */
#define LEDGER_DIRECT_MAX     (UINT64_C(1) << 43) /* bytes of each of them: no sum overflows */
#define LEDGER_BARRED         (UINT64_C(1) << 63)
#define LEDGER_STEP_BYTES     (UINT64_C(2) << 20) /* limits and reserves of leases are multiples */

/* Records are addressed by index inside their table. */

/* Statistics of a quota that are kept as long as the ledger, also when its record is replaced. Single words,
 * each always whole. A partition has no record: its peaks are in the record of each of its quotas. */
struct ledger_lifetime {
        uint64_t peak_in_use;
        uint64_t peak_reserved;
        uint64_t n_over_quota;
        uint64_t n_out_of_memory;
        uint64_t last_refusal_ms; /* since 1970; 0: none */
        uint64_t waited_ns;       /* the sum over requests that were not served at once */
        uint64_t partition_peak_in_use;
        uint64_t partition_peak_reserved;
};

struct ledger_quota { /* one tenant in one partition, or a lease of it */
        _Atomic uint64_t id;
        char tenant[LEDGER_NAME_BYTES];
        char partition[LEDGER_NAME_BYTES];
        /* With the next field and extents_per_zone: the extent sizes of its arena, see extent_sizes.h. */
        uint64_t extent_bytes;
        uint64_t small_extent_bytes;
        struct ledger_lifetime life;
        _Atomic uint32_t is_closed; /* not 0: a record of its arena was bad, see ledger_open() */
        _Atomic uint32_t
                growing_mib; /* being allocated for it: the kernel may kill the daemon; each growth rounded up */
        _Atomic uint32_t oom_kills; /* host_free_oom_kills() when the first of these began */
        uint32_t extents_per_zone;
        uint32_t is_lease;                /* not 0: a ledger_lease names it; without that it is unused */
        _Atomic uint32_t unreclaimed_mib; /* charged, and without an extent: of a GPU; rounded up */
};

struct ledger_region { /* a range of an arena's space with its extents; none where each extent is a region */
        _Atomic uint64_t id;
        uint64_t base;
        uint64_t n_bytes;
        uint64_t
                first_extent_bytes; /* size of the region's first extent if that differs from extent_bytes; else 0 */
        uint32_t quota;
        uint32_t number; /* in the arena, from 0 */
};

/* LEDGER_ASIDE: a daemon died of it. Its records stay until its process has ended, and no session is made of them. */
enum ledger_resume { LEDGER_NO_RESUME, LEDGER_CAN_RESUME, LEDGER_ASIDE };

struct ledger_session {
        _Atomic uint64_t id;
        uint8_t secret[16];
        uint64_t start_time; /* of the process, /proc/PID/stat field 22; 0: unknown */
        uint64_t born_ms;    /* CLOCK_BOOTTIME */
        uint32_t has_events; /* not 0: it has an events socket */
        uint32_t can_resume; /* enum ledger_resume */
        uint64_t quotas_end; /* its hello had the tenant's quotas with lower ids, not leases */
        uint64_t leases[LEDGER_SESSION_LEASES]; /* and instead of some of them these: ids of quotas; 0: none;
                                                  with LEDGER_BARRED the id of one that it may not use */
        /* Its direct charges: n_bytes decides. 0: the place is free. */
        struct ledger_direct {
                _Atomic uint64_t quota_id;
                _Atomic uint64_t n_bytes;
        } direct[LEDGER_SESSION_DIRECT];
        uint64_t split_id;     /* its block that was split last; 0: none */
        uint64_t split_off_id; /* the high part of that split */
        uint32_t pid;
        uint32_t uid;
        uint32_t gid;
        char tenant[LEDGER_NAME_BYTES];
        char name[LEDGER_NAME_BYTES]; /* from the client */
        struct {
                uint32_t first_block;  /* all blocks of the session */
                uint32_t first_export; /* all its exports */
                uint32_t first_ref;    /* its shared blocks */
                uint32_t n_blocks;
                uint32_t n_exports;
                uint32_t n_refs;
        } links;
};

struct ledger_extent {
        _Atomic uint64_t id;
        uint64_t offset; /* in the arena's space */
        uint64_t n_bytes;
        uint64_t store_key; /* what keepers name it by; 0: none has it */
        uint64_t region_id; /* as clients know it, if the block was parked and is all of it; 0: its own */
        uint32_t quota;     /* index of the ledger_quota */
        _Atomic uint32_t is_leaving; /* not 0: it is being released, and has no block */
        int32_t fd;                  /* in this process */
        struct {
                uint32_t first_export; /* sessions that received it */
                uint32_t n_exports;
        } links;
        uint32_t huge_mib;  /* of it in pages of 2 MiB */
        uint32_t is_unseen; /* not 0: no session has ever received it */
};

struct ledger_export { /* a session received an extent */
        _Atomic uint64_t id;
        uint32_t session;
        uint32_t extent;
        _Atomic uint32_t is_read_only; /* not 0: the session has no write access to the extent */
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t prev_of_extent, next_of_extent;
        } links;
};

/* Of ledger_block.parked; ids of blocks are larger. */
#define LEDGER_AWAKE     UINT64_C(0) /* an ordinary block */
#define LEDGER_IS_COPY   UINT64_C(1) /* the copy of a parked block */
#define LEDGER_DISCARDED UINT64_C(2) /* parked without a copy */

struct ledger_block {
        _Atomic uint64_t id; /* generation << 32 | index */
        uint64_t offset;     /* in the arena's space */
        uint64_t n_bytes;
        uint64_t n_requested;
        uint64_t born_ms; /* CLOCK_BOOTTIME */
        uint32_t session; /* LEDGER_NONE: it is shared */
        uint32_t quota;
        uint64_t handle;            /* the allocator's, in this process */
        _Atomic uint32_t shared;    /* index of the ledger_shared; LEDGER_NONE: it is not shared */
        char tag[LEDGER_TAG_BYTES]; /* from the client; printable */
        _Atomic uint64_t parked;    /* the id of its copy, or one of LEDGER_AWAKE and so on */
        uint64_t region_id;         /* while it is parked: as clients know it; 0: it was never parked */
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t generation;  /* of the next id at this index */
                uint32_t in_delivery; /* its reply has not been sent yet */
        } links;
};

enum ledger_lease_kind { LEASE_CGROUP = 1, LEASE_UNIT, LEASE_PID, LEASE_USER, LEASE_SOCKET, LEASE_KINDS };

enum ledger_lease_maker {
        LEASE_BY_OPERATOR,
        LEASE_BY_CONFIG,
        LEASE_BY_USER,
        LEASE_BY_SCHEDULER,
        LEASE_MAKERS
};

/* What names have that come by requests, and those of the config: 1 to 63 of these. */
#define LEDGER_NAME_CHARACTERS "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-."
bool ledger_is_name(const char *name);

/* The name of a lease's socket, which is a folder: such a name, and no '.' first. */
bool ledger_is_socket_name(const char *name);

/* A lease: what makes a quota one, and which processes it is for. The limits are words that change. */
struct ledger_lease {
        _Atomic uint64_t id;
        char name[LEDGER_NAME_BYTES]; /* unique */
        uint32_t quota;
        uint32_t kind;                  /* enum ledger_lease_kind */
        char match[LEDGER_PLACE_BYTES]; /* the control group, the unit, or the name of the socket */
        char place[LEDGER_PLACE_BYTES]; /* the control group whose end ends the lease; "": not known yet */
        uint64_t start_time;            /* of the process */
        uint32_t pid, uid;              /* by kind */
        uint64_t born_ms;               /* CLOCK_BOOTTIME, like the other times */
        _Atomic uint64_t limit_bytes, reserve_bytes;
        _Atomic uint64_t ends_ms;       /* by its time-out; 0: none */
        _Atomic uint64_t grace_ms;      /* see evicts */
        _Atomic uint64_t ended_ms;      /* not 0: it has ended */
        _Atomic uint64_t evicts_ms;     /* when its sessions are evicted; 0: they are not */
        _Atomic uint32_t evicts;        /* not 0: grace_ms after the end its sessions are evicted */
        _Atomic uint32_t place_is_seen; /* not 0: the control group existed */
        uint32_t maker;                 /* enum ledger_lease_maker; LEASE_BY_CONFIG: `per: cgroup` made it */
        uint32_t maker_uid;             /* by LEASE_BY_USER */
};

struct ledger_shared { /* a block with a name, unique in its tenant */
        _Atomic uint64_t id;
        uint64_t born_ms;          /* when it was published, CLOCK_BOOTTIME */
        _Atomic uint64_t keep_ms;  /* how long it stays after its last reference; 0: not at all */
        _Atomic uint64_t until_ms; /* without references: when it is freed, CLOCK_BOOTTIME */
        char name[LEDGER_NAME_BYTES];
        uint32_t block;
        _Atomic uint32_t metadata; /* index of the ledger_metadata; LEDGER_NONE: it has none */
        struct {
                uint32_t first_ref; /* sessions that have it */
                uint32_t n_refs;
        } links;
};

struct ledger_ref { /* a session has a shared block */
        _Atomic uint64_t id;
        uint32_t session;
        uint32_t shared;
        _Atomic uint32_t count;        /* at least 1 */
        _Atomic uint32_t is_read_only; /* not 0: the session was promised that it cannot write to the block */
        _Atomic uint32_t parks_to;     /* not 0: the session does not use the block until it wakes it; 1 + the
                                          index of the quota for the copy, which may be gone */
        struct {
                uint32_t prev_of_session, next_of_session;
                uint32_t prev_of_shared, next_of_shared;
                uint32_t n_in_delivery; /* of count: their replies have not been sent yet */
        } links;
};

struct ledger_metadata { /* of a shared block */
        _Atomic uint64_t id;
        uint32_t shared;
        uint32_t n_bytes; /* at least 1 */
        unsigned char bytes[LEDGER_METADATA_BYTES];
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
        uint32_t n_refs;
        uint32_t n_metadata;
        uint32_t n_leases;
};

struct ledger;

/* Makes the memfd (sealed GROW, SHRINK, SEAL) and maps it. -ENOMEM, -EINVAL
 * (a limit is 0 that may not be, or LEDGER_NONE), -errno. */
int ledger_new(const struct ledger_limits *limits, struct ledger **ret);
struct ledger *ledger_free(struct ledger *l);

/* A record that cannot be right. */
struct ledger_fault {
        const char *table; /* "block"; "header" */
        uint32_t index;    /* in the table */
        uint64_t id;
        uint32_t quota;  /* closed for it; LEDGER_NONE: several quotas, or none */
        const char *why; /* a sentence, valid during the call */
};

enum { LEDGER_HAS_FAULTS = 1 };

/* Opens the ledger of a process that has ended, and takes its fd. Every record is checked, what
 * a kill left half done is repaired, links and lists are rebuilt. Handles of blocks and fds of
 * extents are cleared: they meant something only in that process.
 *
 * LEDGER_HAS_FAULTS: there were bad records. on_fault (may be NULL) was called for each before
 * this returns, and they were cleared. Before that, their arenas were closed: the quota of the
 * record, if it is known; else all quotas of the tenant of its session; else all. A closed quota
 * gives out and takes back nothing, since its layout is not known. Its other records stay, and
 * no later process opens it again. A bad session is only cleared: what refers to it is bad
 * itself. A bad quota stays, closed and without names.
 *
 * -EBADMSG: not a ledger, another layout, or a wrong header; on_fault was called, and nothing
 * has changed. -ENOMEM, -errno. After a failure the fd is the caller's. */
int ledger_open(int fd, void (*on_fault)(void *userdata, const struct ledger_fault *fault), void *userdata,
                struct ledger **ret);

/* A growth of the quota by n_bytes begins, or has ended (UINT64_MAX: all have). Several can be in progress. oom_kills is
 * the count at the start; that of the first growth is kept. From any thread. If the daemon ends meanwhile, its successor
 * compares oom_kills with the current count: a higher one means that the kernel killed the daemon, or another process in
 * its place, during these growths. */
void ledger_quota_grows(struct ledger *l, uint32_t index, uint64_t n_bytes, uint32_t oom_kills);
void ledger_quota_has_grown(struct ledger *l, uint32_t index, uint64_t n_bytes);

/* From now on nothing is allocated from or freed into the quota. */
void ledger_quota_close(struct ledger *l, uint32_t index);

void ledger_quota_set_unreclaimed(struct ledger *l, uint32_t index, uint64_t n_bytes);

/* A larger ledger with the records of `from`, under the same indexes and ids. Each table has as many
 * records as before or as the limits say, whichever is more. The caller then frees `from`.
 * -ENOMEM, -errno: `from` stays in use. */
int ledger_grow(const struct ledger *from, const struct ledger_limits *limits, struct ledger **ret);

/* The extent is being released and has no block: a successor finishes that, with or without its
 * memory. */
void ledger_extent_leave(struct ledger *l, uint32_t index);

/* How many records its tables have; and the lowest ids of future quotas and extents. */
void ledger_read_limits(const struct ledger *l, struct ledger_limits *ret);
uint64_t ledger_quotas_end(const struct ledger *l);
uint64_t ledger_extents_end(const struct ledger *l);

/* How many processes in a row crashed with this ledger. It is in the memfd; the caller keeps the count.
 * Valid as long as the ledger. */
_Atomic uint32_t *ledger_crashes(const struct ledger *l);

/* The quota or the session that the process restores: a process that dies of it tells its successor by this word.
 * 0: none. The highest bit is the caller's. A lease is noted as its quota. */
#define LEDGER_AT_SESSION   (UINT32_C(1) << 30)
#define LEDGER_AT_INDEX(at) (((at) & (LEDGER_AT_SESSION - 1)) - 1)
_Atomic uint32_t *ledger_at(const struct ledger *l);
void ledger_note_quota(struct ledger *l, uint32_t index);
void ledger_note_session(struct ledger *l, uint32_t index);
void ledger_note_nothing(struct ledger *l);

/* How many objects were left aside for that, in a row; the caller keeps the count. */
_Atomic uint32_t *ledger_n_aside(const struct ledger *l);

/* Makes a committed record: `facts` is copied (its id and links are ignored),
 * links are set up, a fresh id is stored last. -ENOSPC: the table is full.
 * *ret_index names it. */
int ledger_quota_add(struct ledger *l, const struct ledger_quota *facts, uint32_t *ret_index);
int ledger_region_add(struct ledger *l, const struct ledger_region *facts, uint32_t *ret_index);
int ledger_session_add(struct ledger *l, const struct ledger_session *facts, uint32_t *ret_index);
int ledger_extent_add(struct ledger *l, const struct ledger_extent *facts, uint32_t *ret_index);
int ledger_export_add(struct ledger *l, uint32_t session, uint32_t extent, uint32_t *ret_index);
int ledger_block_add(struct ledger *l, const struct ledger_block *facts,
                     uint32_t *ret_index); /* without a session: the copy of a shared block */
int ledger_shared_add(struct ledger *l, const struct ledger_shared *facts, uint32_t *ret_index);
int ledger_ref_add(struct ledger *l, uint32_t session, uint32_t shared, uint32_t *ret_index); /* once */
int ledger_lease_add(struct ledger *l, const struct ledger_lease *facts, uint32_t *ret_index);

/* Gives a shared record its metadata, at most LEDGER_METADATA_BYTES and not 0; once. It goes with the shared
 * record. -ENOSPC. */
int ledger_shared_describe(struct ledger *l, uint32_t shared, const void *bytes, size_t n_bytes);

/* Changes how long a shared block is kept; and without references, until when. */
void ledger_shared_keep(struct ledger *l, uint32_t shared, uint64_t keep_ms);
void ledger_shared_keep_until(struct ledger *l, uint32_t shared, uint64_t until_ms);

/* The session's block becomes a shared block, by this record that names it. The session must have a
 * reference already. */
void ledger_block_share(struct ledger *l, uint32_t block, uint32_t shared);

/* Stored before the session gets the extent, or before an attach is answered. */
void ledger_export_set_read_only(struct ledger *l, uint32_t index, bool is_read_only);
void ledger_ref_set_read_only(struct ledger *l, uint32_t index);

/* The session agrees that the block is parked: parks_to; 0: it uses it again. */
void ledger_ref_set_parks_to(struct ledger *l, uint32_t index, uint32_t parks_to);

/* A block on whole extents is parked from now on; or awake again: LEDGER_AWAKE. */
void ledger_block_park(struct ledger *l, uint32_t block, uint64_t parked);

/* A block that is parked. */
static inline bool ledger_block_is_parked(const struct ledger_block *b)
{
        return b->parked != LEDGER_AWAKE && b->parked != LEDGER_IS_COPY;
}

/* Whether there is a record for one more block. */
bool ledger_has_block(const struct ledger *l);

/* Splits a session's own block at an offset inside it, a multiple of 256: the record keeps the low part,
 * *ret_index is the record of the high part, with this handle. -ENOSPC: not ledger_has_block(). */
int ledger_block_split(struct ledger *l, uint32_t index, uint64_t at, uint64_t handle, uint32_t *ret_index);

/* The high part of the last split of the block's session, if that split this block at this offset and the
 * high part is still the session's own; else LEDGER_NONE. */
uint32_t ledger_block_split_off(const struct ledger *l, uint32_t index, uint64_t at);

/* What the session has charged directly in a quota, by its id: this much from now on. -ENOSPC: it has
 * LEDGER_SESSION_DIRECT other ones. To lower a charge cannot fail. */
int ledger_session_set_direct(struct ledger *l, uint32_t session, uint64_t quota_id, uint64_t n_bytes);

/* X(TABLE, name) for each kind of record: each has the four functions below. */
#define LEDGER_RECORDS(X)                                                                                    \
        X(TABLE_QUOTA, quota)                                                                                \
        X(TABLE_SESSION, session)                                                                            \
        X(TABLE_EXTENT, extent)                                                                              \
        X(TABLE_EXPORT, export)                                                                              \
        X(TABLE_BLOCK, block)                                                                                \
        X(TABLE_SHARED, shared)                                                                              \
        X(TABLE_REF, ref)                                                                                    \
        X(TABLE_METADATA, metadata)                                                                          \
        X(TABLE_REGION, region)                                                                              \
        X(TABLE_LEASE, lease)

/* ledger_NAME_clear(): clears a record (id first) and removes it from its lists. A session must have no
 * blocks, exports and references, an extent no exports, a shared record no references; asserted. A shared
 * block is cleared before its references and its shared record are.
 *
 * ledger_NAME_at(): the record at an index in use; asserted.
 *
 * ledger_NAME_end(), ledger_NAME_get(): for lists, which look at a bounded number of records: one past the
 * last index ever used, and the record at an index, NULL where it is free. */
#define X(TABLE, name)                                                                                       \
        void ledger_##name##_clear(struct ledger *l, uint32_t index);                                        \
        struct ledger_##name *ledger_##name##_at(struct ledger *l, uint32_t index);                          \
        uint32_t ledger_##name##_end(const struct ledger *l);                                                \
        const struct ledger_##name *ledger_##name##_get(struct ledger *l, uint32_t index);
LEDGER_RECORDS(X)
#undef X

/* The block with this id, in constant time: its index, or LEDGER_NONE for an id
 * never given or freed already. Safe with any number from outside. */
uint32_t ledger_block_find(const struct ledger *l, uint64_t id);

struct ledger_counts { /* records in use */
        uint32_t n_quotas, n_sessions, n_extents, n_exports, n_blocks, n_shared, n_refs, n_metadata, n_leases;
};
void ledger_count(const struct ledger *l, struct ledger_counts *ret);

int ledger_fd(const struct ledger *l); /* borrowed */

#endif
