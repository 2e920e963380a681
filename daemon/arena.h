/* An arena: one tenant's memory in one partition. Mechanism without policy: it
 * joins the allocator (offsets), the device (memory) and the ledger (what is
 * written down), and makes extents come and go on the device's worker.
 *
 * The arena's space is one line of offsets, in which regions lie. Clients know a
 * region by its id and offsets inside it. How an extent is shared decides what a
 * region is:
 *
 *   fd        a large range, in which extents of one size come and go
 *   cuda-ipc  one extent, since the driver chooses where a client sees it; the
 *             region comes and goes with it, and its id is never used again
 *
 * Where a device cannot empty the mappings of an extent, one that sessions were
 * given is retired before it is released: it stays charged until the last of
 * them has let go of it, and only then the device is told to destroy it.
 *
 * Where there is a store, the service manager keeps each extent's fd for a successor: it is
 * put there before the extent is written down, and removed before its record is struck. An extent that cannot be put is not made. On its way back an extent's record says so
 * (ledger_extent_leave()) before the worker begins: where this process ends in between, its
 * successor finishes it (arena_finish()).
 *
 * Where there is a punch, it destroys the extents: a client can delay that for as long as it likes,
 * and so the worker would make no memory for other tenants meanwhile. A release that makes no
 * progress for a second is late: other tenants do not wait for it.
 *
 * Invariants: a slot of a region holds an extent exactly where the allocator
 * has backed (or retiring) space; each extent carries its charge; no extent
 * ever leaves the arena it was made for; an extent that is retired has an export.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ARENA_H
#define BFCD_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bfc/bfc.h"
#include "daemon/account.h"
#include "daemon/ledger.h"
#include "daemon/occupancy.h"
#include "daemon/punch.h"
#include "daemon/standby.h"
#include "daemon/store.h"
#include "daemon/watch.h"
#include "daemon/worker.h"
#include "device/device.h"

#define ARENA_MAX_EXTENTS 4096u /* fd: a limit that is raised may take so many, and no more */

struct arena;

struct arena_options {
        struct ledger *ledger;
        struct device *device;
        struct worker *worker;
        struct punch *punch;     /* what destroys extents without waiting; NULL: the worker does */
        struct store *store;     /* NULL: none. Not with cuda-ipc, which has no fds */
        struct watch *watch;     /* NULL: destroyed extents are not watched */
        struct standby *standby; /* NULL: none */
        uint32_t quota;          /* index in the ledger */
        enum device_share share;
        struct device_supply supply;
        bool clears;           /* extents are zeroed before they are given back (device_extent.clears) */
        uint64_t limit_bytes;  /* how much may be backed; twice that is the first region (fd) */
        uint64_t extent_bytes; /* see arena_grid (fd); what sizes are multiples of (cuda-ipc) */
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone; /* 0: all extents are of one size */
        /* Sessions must let go of these extents (indexes in the ledger), each of
         * which has an export: arena_export_is_gone() tells when. Called inside
         * arena_release(); it may call no more than arena_export_is_late(). */
        void (*retire)(void *userdata, const uint32_t *extents, size_t n_extents);
        /* Whether all sessions that have this extent can be expected to let go of
         * it soon. NULL: they always do. */
        bool (*lets_go)(void *userdata, uint32_t extent);
        void *userdata;
};

/* The sizes of an arena's extents (fd). Those at the begin of the first region are small, so that a
 * first block does not pay for the limit. They lie in zones: each zone has extents_per_zone extents,
 * twice as large as those of the zone before, up to those of extent_bytes, which are all the others.
 * Each is a power of two times the small ones. */
struct arena_grid {
        uint64_t extent_bytes;
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone;
};

/* What a new arena is given. fd: small extents have max(2 MiB, granularity); the largest have at least
 * limit / 256, and so much that there are at most 257 extents with a limit of 4 GiB or less. cuda-ipc:
 * max(2 MiB, granularity), and no zones. */
struct arena_grid arena_grid(enum device_share share, uint64_t limit_bytes, uint64_t granularity);

/* Whether an arena can have this grid, which comes from a ledger. */
bool arena_grid_is_valid(const struct arena_grid *g, uint64_t granularity);

/* The lowest limit, a multiple of 2 MiB, with which the largest extents have n_bytes (fd). */
uint64_t arena_limit_for_extent(uint64_t n_bytes, uint64_t granularity);

/* The most extents that such an arena ever has: the smallest come first. With the grid of its limit
 * at most 257 up to 4 GiB, 771 up to 256 GiB, 897 up to 1 TiB. */
uint64_t arena_max_extents(enum device_share share, uint64_t limit_bytes, const struct arena_grid *g);

/* The same of those extents of this size (fd). */
uint64_t arena_max_extents_of_size(uint64_t limit_bytes, const struct arena_grid *g, uint64_t size);

/* The highest limit with which there are at most ARENA_MAX_EXTENTS (fd). */
uint64_t arena_grid_limit_max(const struct arena_grid *g);

int arena_new(const struct arena_options *options, struct arena **ret);

/* What a process that is no more left of an arena: indexes in the ledger of its extents
 * and of its blocks, each by ascending offset, and the extents' fds. */
struct arena_remains {
        const uint32_t *extents;
        const int *fds;
        size_t n_extents;
        const uint32_t *blocks;
        size_t n_blocks;
};

/* The arena as it was, for what is in the ledger and was opened by ledger_open(): regions,
 * extents and blocks lie where they lay, and the blocks' records get their handles. The
 * limit may be another one. Takes over the fds and the charge, which is for all of its
 * extents, on success. -EBADMSG and a sentence: the ledger's records do not fit together,
 * or an fd is not that extent's. -ENOTSUP: not with cuda-ipc, or not on this device.
 * -ENOMEM. A failure has changed nothing. */
int arena_restore(const struct arena_options *options, const struct arena_remains *remains,
                  struct charge *charge, struct arena **ret, const char **ret_why);

/* See arena_release(). */
typedef void (*arena_released_fn)(void *userdata, uint64_t n_bytes);

/* Goes on to give back the extents that were restored and that were leaving; see arena_release(). With a
 * punch only: else arena_finish() had them first. -ENOMEM. */
int arena_resume_release(struct arena *a, arena_released_fn done, void *userdata);

/* Finishes an extent of the ledger that a process that is no more left on its way back: gives
 * its memory back, removes it from the store, and strikes its exports and its record. The fd is
 * taken over; -1: it is not in the store, so there is nothing behind the record. On the
 * caller's thread, before the loop runs. An error says that the memory may not have come
 * back; the record is gone all the same. */
int arena_finish(const struct arena_options *options, uint32_t extent, int fd);

/* Another limit, while the arena lives: the size of its extents stays, their number
 * may grow (by this to at most 4096 where they lie in a grid), and a further region is
 * added when the first one has no stretch for a request. Of a limit that is no
 * multiple of an extent the last piece cannot be backed. arena_prepare_limit() comes
 * first: -ENOTSUP where there would be too many extents, and nothing has
 * changed; then arena_set_limit() cannot fail. */
int arena_prepare_limit(const struct arena *a, uint64_t limit_bytes);
void arena_set_limit(struct arena *a, uint64_t limit_bytes);

/* The highest limit that arena_prepare_limit() takes; and how many extents there could
 * be with this limit or with those there were before. */
uint64_t arena_limit_max(const struct arena *a);
uint64_t arena_extent_room(const struct arena *a, uint64_t limit_bytes);

/* No extent, and nothing on its way: it may be freed while the loop runs. */
bool arena_is_quiet(const struct arena *a);

/* Destroys every extent, here and now (device calls on the caller's thread); no
 * growth or release may be under way. What is in the store is removed, which waits for the manager. */
struct arena *arena_free(struct arena *a);

/* Ends it as the end of this process would: memory and records stay for a successor, and
 * what this process has of them is closed. No growth or release may be under way. */
struct arena *arena_leave(struct arena *a);

/* A block in backed space: 0, BFC_NO_FIT, -EINVAL, -ENOMEM. */
int arena_alloc(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);
int arena_dealloc(struct arena *a, bfc_handle handle);
int arena_split(struct arena *a, bfc_handle handle, uint64_t at, bfc_handle *ret_high); /* as bfc_split() */

/* The same inside one extent. With cuda-ipc every block lies so. -EINVAL also for
 * more than arena_max_in_extent(). */
int arena_alloc_in_extent(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);
uint64_t arena_max_in_extent(const struct arena *a);

/* Where a block of n_bytes would need the fewest new bytes; adds a region where
 * the address space has no stretch for it. With cuda-ipc it is a new extent: of
 * the block's own size from 16 MiB on, else of 32 MiB to share with others, or of
 * room_bytes, which may be charged now, where that is less. The plan holds until
 * the next one. -ENOMEM: the address space (1 TiB) is used up, or there are as
 * many extents as there may be. */
int arena_plan(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret);

/* The same for a block inside one extent. */
int arena_plan_in_extent(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret);

/* Carries out a plan with the bytes charged for it (plan.new_bytes; taken over
 * on success). done(result, handle) is called from worker_poll(): 0 and the
 * block, which its caller owns; or a negative errno, all undone: what the device says;
 * -EXFULL: the store is full; -ECOMM: the service manager does not take it; -ECANCELED: the process is
 * ending. */
typedef void (*arena_grown_fn)(void *userdata, int result, bfc_handle handle, uint64_t offset);
int arena_grow(struct arena *a, const struct bfc_growth *plan, struct charge *charge, arena_grown_fn done,
               void *userdata);

/* Backs what has no extent of [0, n_bytes), from its beginning on as far as the charge goes, at
 * once on the caller's thread, before the loop runs. What was not used up of the charge is left. After an
 * error what was made stays. */
int arena_back(struct arena *a, uint64_t n_bytes, struct charge *charge);

/* How many bytes of [0, n_bytes) have no extent, for arena_back_later(); with cuda-ipc all
 * of it or, where there is any extent, none. */
uint64_t arena_unbacked_bytes(struct arena *a, uint64_t n_bytes);

/* Backs these by the worker while the loop runs, with the bytes charged for it (taken over on
 * success). Nothing may be allocated, planned or grown until done(result, 0, 0) was called from
 * worker_poll(): 0, or a negative errno, and nothing was made. -ENOMEM. */
int arena_back_later(struct arena *a, uint64_t n_bytes, struct charge *charge, arena_grown_fn done,
                     void *userdata);

/* Gives back wholly free extents, at least want_bytes if there are as many;
 * none that `keep` (may be NULL) counts on. Returns the bytes under way (0:
 * none). done() is called from worker_poll() each time that some of them are
 * gone and uncharged: what sessions hold goes extent by extent. n_bytes: how many,
 * those that have escaped, which stay charged, included. */
uint64_t arena_release(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                       arena_released_fn done, void *userdata);

/* How many bytes arena_release() could give back. */
uint64_t arena_releasable(const struct arena *a, const struct bfc_growth *keep);

/* The same two with those extents only that are expected to be back soon: what is
 * optional asks nobody who would not let go. */
uint64_t arena_release_soon(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                            arena_released_fn done, void *userdata);
uint64_t arena_releasable_soon(const struct arena *a, const struct bfc_growth *keep);

/* Gives back those wholly free extents that no session has mapped, or whose mappings the device empties. */
uint64_t arena_release_unmapped(struct arena *a, uint64_t want_bytes, arena_released_fn done, void *userdata);

/* Gives back all wholly free extents but those with the lowest offsets that together have at least
 * keep_bytes. */
uint64_t arena_release_beyond(struct arena *a, uint64_t keep_bytes, arena_released_fn done, void *userdata);

/* The most bytes that new extents can have in all, where so many may be charged. */
uint64_t arena_growable(const struct arena *a, uint64_t room_bytes);

bool arena_extent_is_retired(const struct arena *a, uint32_t extent);

/* Of a retired extent, one of its exports: nobody knows when it goes. */
void arena_export_is_late(struct arena *a, uint32_t extent);

/* An export of an extent was cleared. If it was the last one and the extent is
 * retired, it is destroyed. was_late: arena_export_is_late() was said of it; only
 * looked at where the extent is retired. */
void arena_export_is_gone(struct arena *a, uint32_t extent, bool was_late);

/* Of the bytes given back now: those that are being destroyed in time; those whose destruction is late;
 * and those that sessions have been asked for, where no session is late. */
uint64_t arena_leaving_bytes(struct arena *a);
uint64_t arena_late_bytes(struct arena *a);
uint64_t arena_awaited_bytes(const struct arena *a);

/* Bytes being made or given back now; of these, those being given back; bytes that the device did not take back,
 * which stay charged; and extents the arena has. */
uint64_t arena_pending_bytes(const struct arena *a);
uint64_t arena_retiring_bytes(const struct arena *a);
uint64_t arena_escaped_bytes(const struct arena *a);

/* Of the bytes that the device did not take back: those that an answer to arena_settle_escapes() has confirmed.
 * The others may be referenced for a moment only, by a process between fork() and exec(), say. */
uint64_t arena_confirmed_escaped_bytes(const struct arena *a);
uint32_t arena_n_extents(const struct arena *a);

/* Of its extents, what was made in pages of 2 MiB, and the rest. */
uint64_t arena_huge_bytes(const struct arena *a);
uint64_t arena_small_bytes(const struct arena *a);

/* Asks the device whether what escaped has come back by now, and then drops its
 * charge, inside worker_poll(). No growth or release of it. */
void arena_settle_escapes(struct arena *a);

/* A device call said that the device is lost (-ENODEV). */
bool arena_is_lost(const struct arena *a);

/* Memory that clients wrote into destroyed extents, by mappings and fds that they kept
 * (watch.h): how much the last look found, and how often memory was found. Each time the holes are punched
 * again, on the worker, and what was found is charged as far as the account has room. */
uint64_t arena_refilled_bytes(const struct arena *a);
uint64_t arena_n_refills(const struct arena *a);

/* Memory without an extent: what escaped, and what clients refilled. Of the latter only so much is
 * charged as the account has room for. */
uint64_t arena_unreclaimed_bytes(const struct arena *a);

/* The device was opened anew: it is not lost any more, and of what had escaped no more than
 * n_bytes can still be away. */
void arena_recover(struct arena *a, uint64_t n_bytes);

void arena_read_stats(const struct arena *a, struct bfc_stats *ret);

/* The picture of its extents, from the first to the last. Its cost is bounded by the
 * number of extents. */
void arena_draw(const struct arena *a, char ret_picture[PICTURE_CHARACTERS + 1]);

/* A place in a region, as clients know it. */
struct arena_place {
        uint64_t region_id; /* (quota + 1) << 32 | a number of this arena */
        uint64_t region_bytes;
        uint64_t offset; /* in the region */
};
void arena_locate(const struct arena *a, uint64_t offset, struct arena_place *ret);

/* The extents behind [offset, offset + n_bytes): slots are numbered through all
 * regions. Returns the slot of the first, and the last by *ret_last. */
size_t arena_slots(const struct arena *a, uint64_t offset, uint64_t n_bytes, size_t *ret_last);

/* The ledger's index of a slot's extent, or LEDGER_NONE. The extent must not be
 * retired: no block lies in it. */
uint32_t arena_slot_extent(const struct arena *a, size_t slot);

/* What a client opens an extent by; valid until the next arena_plan(). */
const struct device_extent *arena_slot_memory(const struct arena *a, size_t slot);

/* Slots in which there may be an extent; grows with them. A slot may be used again for another extent. */
size_t arena_n_slots(const struct arena *a);

/* bfc_check(), and slots against ledger and charges; slow. */
int arena_check(const struct arena *a, const char **ret_why);

#endif
