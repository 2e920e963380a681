/* An arena: the memory of one tenant in one partition. Mechanism without policy: it combines the
 * allocator (offsets), the device (memory) and the ledger (records), and makes and releases extents on
 * the device's worker.
 *
 * The arena's address space is one range of offsets with regions in it. Clients identify a region by its
 * id, and use offsets inside it. The share mode determines what a region is:
 *
 *   fd        a large range, in which extents of fixed sizes are made and released; or one extent, which is one block
 *   cuda-ipc  one extent, since the driver chooses its address in a client
 *
 * An extent that sessions have is retired before it is released: it stays charged until the last session has unmapped
 * it, and then the device destroys it. If another process still has it, it stays charged until that is over.
 *
 * With a store, a keeper has each extent's fd for the next daemon. The fd is stored before
 * the extent is recorded in the ledger, and removed before its record is cleared. An extent that cannot
 * be stored is not made. Before the worker releases an extent its record says so (ledger_extent_leave()):
 * if this process ends in between, the next one finishes the release (arena_finish()).
 *
 * A release that a process delays for a second is late: other tenants do not wait for it.
 *
 * Invariants: a slot of a region has an extent exactly where the allocator has backed (or retiring)
 * space, but for that of an exact block which is being made; each extent has its charge; no extent leaves
 * its arena; a retired extent has an export.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ARENA_H
#define BFCD_ARENA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bfc/bfc.h"
#include "daemon/memory/account.h"
#include "daemon/memory/extent_sizes.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/occupancy.h"
#include "daemon/memory/partition.h"
#include "device/device.h"

struct arena;

struct arena_options {
        const struct partition *partition; /* its device, ledger, store, and how extents are made */
        uint32_t quota;                    /* index in the ledger */
        uint64_t
                *parked_bytes; /* the sum over the arenas of the tenant's quota and its leases; may be NULL */
        uint64_t limit_bytes;  /* how much may be backed; the first region (fd) has twice that */
        struct extent_sizes sizes;
};

int arena_new(const struct arena_options *options, struct arena **ret);

/* The inherited state of an arena: indexes in the ledger of its extents and of its blocks, each by
 * ascending offset, and the extents' fds. */
struct arena_inherited {
        const uint32_t *extents;
        const int *fds;
        size_t n_extents;
        const uint32_t *blocks;
        size_t n_blocks;
};

/* Makes an arena from the records of a ledger of ledger_open(): regions, extents and blocks keep their
 * offsets, and the blocks' records get their handles. The limit may differ. On success it owns the fds
 * and the charge, which covers all of its extents. -EBADMSG and a sentence: the records do not fit
 * together, or the memory is not that extent's. -ENOTSUP: not on this device. -ENOMEM. A
 * failure changes nothing. */
int arena_restore(const struct arena_options *options, const struct arena_inherited *inherited,
                  struct charge *charge, struct arena **ret, const char **ret_why);

/* See arena_release(). */
typedef void (*arena_released_fn)(void *userdata, uint64_t n_bytes);

/* Continues the release of inherited extents whose records say that they are leaving; see
 * arena_release(). Of the host: those of a GPU arena_finish() has handled. -ENOMEM. */
int arena_resume_release(struct arena *a, arena_released_fn done, void *userdata);

/* Finishes a release that a previous process began: destroys the extent, removes it from the store, and
 * clears its exports and its record. Takes the fd; -1: it is not in the store, so the record has no
 * memory. Runs on the caller's thread, before the loop. An error means that the memory may be
 * unreclaimed; the record is cleared in any case. */
int arena_finish(const struct partition *p, uint32_t extent, int fd);

/* Changes the limit: extents keep their sizes, and their number may grow (fd: to at most
 * EXTENT_MAX_COUNT). If a limit is no multiple of an extent, the remainder cannot be backed. Call
 * arena_prepare_limit() first: -ENOTSUP: there would be too many extents. Then arena_set_limit() cannot
 * fail. */
int arena_prepare_limit(const struct arena *a, uint64_t limit_bytes);
void arena_set_limit(struct arena *a, uint64_t limit_bytes);

/* The highest limit that arena_prepare_limit() accepts; and the maximum number of extents with this limit
 * or any earlier one. */
uint64_t arena_limit_max(const struct arena *a);
uint64_t arena_extent_room(const struct arena *a, uint64_t limit_bytes);

/* There is no extent and no operation: it may be freed while the loop runs. */
bool arena_is_quiet(const struct arena *a);

/* Destroys every extent synchronously (device calls on the caller's thread); no growth or release may be
 * in progress. Removing fds from the store waits for the manager. */
struct arena *arena_free(struct arena *a);

/* Leaves memory and records to the next daemon, and closes this process's references. No growth or
 * release may be in progress. */
struct arena *arena_leave(struct arena *a);

/* A block in backed space: 0, BFC_NO_FIT, -EINVAL, -ENOMEM. */
int arena_alloc(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);
int arena_dealloc(struct arena *a, bfc_handle handle);
int arena_split(struct arena *a, bfc_handle handle, uint64_t at, bfc_handle *ret_high); /* as bfc_split() */

/* A block inside one extent, which is always so with cuda-ipc. -EINVAL also for more than
 * arena_max_in_extent(). An exact block only gets the extent of one of its size that sessions may not unmap. */
int arena_alloc_in_extent(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);
uint64_t arena_max_in_extent(const struct arena *a);

/* The place where a block of n_bytes needs the fewest new bytes; adds a region if none has space. With
 * cuda-ipc it is a new extent: of the block's size from 16 MiB on, else a shared one of 32 MiB, or of
 * room_bytes (the bytes that may be charged now) if that is less. The plan is valid until the next one.
 * -ENOMEM: the address space (1 TiB) is used up, or the maximum number of extents is reached. */
int arena_plan(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret);

/* arena_plan() for a block inside one extent. With fd a large one (from EXTENT_EXACT_BYTES on, or more than the
 * arena's largest extents have) is an exact block: it gets an extent of its own size, and is as large as that:
 * ret->n_bytes. */
int arena_plan_in_extent(struct arena *a, uint64_t n_bytes, uint64_t room_bytes, struct bfc_growth *ret);

/* Carries out a plan with the bytes charged for it (plan.new_bytes; taken over on success). done(result,
 * handle) is called from worker_poll(): 0 and the block, which the caller owns; or a negative errno with
 * everything undone: the device's error; -ECOMM: the store did not accept it; -ECANCELED: the process is ending. */
typedef void (*arena_grown_fn)(void *userdata, int result, bfc_handle handle, uint64_t offset);
int arena_grow(struct arena *a, const struct bfc_growth *plan, struct charge *charge, arena_grown_fn done,
               void *userdata);

/* arena_plan() for a block that gets whole new extents of its own (share mode fd). The block is as large as these:
 * ret->n_bytes. in_extent: it gets one, as an exact block; -ENOMEM if there is none. */
int arena_plan_whole(struct arena *a, uint64_t n_bytes, bool in_extent, uint64_t room_bytes,
                     struct bfc_growth *ret);

/* Such a request in one extent gets an exact block. */
bool arena_is_exact(const struct arena *a, uint64_t n_bytes);

/* A block on wholly free extents that no session has ever received, which it gets whole: *ret_n_bytes. It may have
 * earlier contents of this arena. BFC_NO_FIT, -ENOMEM. */
int arena_alloc_unseen(struct arena *a, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset,
                       uint64_t *ret_n_bytes);

/* ---- parked blocks: they keep their offsets, and have no extents ---- */

/* Whether the block has whole extents: it can be parked. Of an awake block. */
bool arena_is_whole(const struct arena *a, uint64_t offset, uint64_t n_bytes);

/* Releases the extents of such a block, as arena_release() does: done() is called once. -ENOMEM. */
int arena_park(struct arena *a, bfc_handle handle, arena_released_fn done, void *userdata);

/* After arena_restore(), when the sessions of the previous process are there: releases the extents that it left
 * in the places of parked blocks. -ENOMEM. */
int arena_release_parked(struct arena *a, arena_released_fn done, void *userdata);

/* The extents of a parked block have been released. */
bool arena_is_away(const struct arena *a, bfc_handle handle);

/* Makes extents for a block that is away, with the bytes charged for it (its size; taken over on success).
 * done() as of arena_grow(); if it fails, the block stays parked. -ENOMEM. After done() has got the handle, the wake
 * ends by one of two calls, before the block is freed: by the first the block is awake, by the second it stays parked,
 * and undone() is called as done() of arena_park(). Neither can fail. */
int arena_wake(struct arena *a, bfc_handle handle, struct charge *charge, arena_grown_fn done, void *userdata,
               arena_released_fn undone, void *undone_userdata);
void arena_wake_commit(struct arena *a, bfc_handle handle);
void arena_wake_undo(struct arena *a, bfc_handle handle);

/* Frees a parked block in any state, also one that wakes: then done() gets no handle. */
void arena_drop_parked(struct arena *a, bfc_handle handle);

/* For copies from and to its extents. */
struct worker_lane *arena_copy_lane(struct arena *a);

/* The bytes of parked blocks. */
uint64_t arena_parked_bytes(const struct arena *a);

/* Backs the unbacked parts of [0, n_bytes), from the start on as far as the charge suffices,
 * synchronously on the caller's thread, before the loop runs. The rest of the charge is left. After an
 * error, extents that were made stay. */
int arena_back(struct arena *a, uint64_t n_bytes, struct charge *charge);

/* How many bytes of [0, n_bytes) have no extent, for arena_back_later(); with cuda-ipc all of it or, if
 * there is any extent, none. */
uint64_t arena_unbacked_bytes(struct arena *a, uint64_t n_bytes);

/* Backs these by the worker while the loop runs, with the bytes charged for it (taken over on success).
 * Nothing may be allocated, planned or grown until done(result, 0, 0) is called from worker_poll(): 0, or
 * a negative errno, and nothing was made. -ENOMEM. */
int arena_back_later(struct arena *a, uint64_t n_bytes, struct charge *charge, arena_grown_fn done,
                     void *userdata);

/* Releases the extents of exact blocks that were freed, except where sessions may not unmap them: such an extent is
 * used by the next exact block of its size, or by other blocks, and released like others. See arena_release(). */
uint64_t arena_release_exact(struct arena *a, arena_released_fn done, void *userdata);

/* Releases wholly free extents, at least want_bytes if there are as many, except those that `keep` (may
 * be NULL) uses. Returns the bytes in progress (0: none). done() is called from worker_poll() whenever
 * some of them are uncharged: retired extents one by one. n_bytes: how many, including those that are
 * unreclaimed and stay charged. */
uint64_t arena_release(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                       arena_released_fn done, void *userdata);

/* How many bytes arena_release() could release. */
uint64_t arena_releasable(const struct arena *a, const struct bfc_growth *keep);

/* arena_release() and arena_releasable(), only for extents that are expected to be released soon: an optional
 * release does not involve sessions that may not unmap them. */
uint64_t arena_release_soon(struct arena *a, uint64_t want_bytes, const struct bfc_growth *keep,
                            arena_released_fn done, void *userdata);
uint64_t arena_releasable_soon(const struct arena *a, const struct bfc_growth *keep);

/* arena_release(), only for extents that no session has mapped. */
uint64_t arena_release_unmapped(struct arena *a, uint64_t want_bytes, arena_released_fn done, void *userdata);

/* The total size of further extents if room_bytes may be charged. */
uint64_t arena_growable(const struct arena *a, uint64_t room_bytes);

/* Share mode fd: adds to ret the extents that a growth makes next, the smallest first, if room_bytes may be charged. By
 * size: n_sizes, from smallest_bytes on, each twice as large. */
void arena_count_next(const struct arena *a, uint64_t smallest_bytes, uint64_t room_bytes, size_t n_sizes,
                      uint64_t *ret);

bool arena_extent_is_retired(const struct arena *a, uint32_t extent);

/* An export of a retired extent is late: nothing is known about when it will be cleared. */
void arena_note_late_export(struct arena *a, uint32_t extent);

/* An export of an extent was cleared. After the last one of a retired extent the extent is destroyed.
 * was_late: arena_note_late_export() was called for it; only used for retired extents. */
void arena_note_export_gone(struct arena *a, uint32_t extent, bool was_late);

/* Of the bytes being released: (1) destroyed now; (2) late, because a process keeps them; (3) still mapped by
 * sessions, none of them overdue. */
uint64_t arena_leaving_bytes(const struct arena *a);
uint64_t arena_late_bytes(const struct arena *a);
uint64_t arena_suspended_bytes(const struct arena *a);

/* Bytes being made or released, without late ones; of these, those being released; bytes that the device did not
 * return, which stay charged, with late ones. */
uint64_t arena_pending_bytes(const struct arena *a);
uint64_t arena_retiring_bytes(const struct arena *a);
uint64_t arena_unreclaimed_bytes(const struct arena *a);

/* Takes the charge over, until arena_check_unreclaimed() finds the memory returned. */
void arena_note_unreclaimed(struct arena *a, struct charge *charge);

/* Takes over direct charges of a process that has ended, on a device that others use, too, and asks it: what it seems
 * not to have returned is unreclaimed from then on, and done() is called with the rest, which is uncharged. Until then
 * they are unreclaimed bytes, and arena_ended_bytes(). */
void arena_end_direct(struct arena *a, struct charge *charge, arena_released_fn done, void *userdata);
uint64_t arena_ended_bytes(const struct arena *a);

/* The part of the unreclaimed bytes that an answer to arena_check_unreclaimed() has confirmed. The others
 * may be referenced only briefly, for example by a process between fork() and exec(). */
uint64_t arena_confirmed_unreclaimed_bytes(const struct arena *a);
uint32_t arena_n_extents(const struct arena *a);

/* The part of its extents that was made in pages of 2 MiB, and the rest. */
uint64_t arena_huge_bytes(const struct arena *a);
uint64_t arena_small_bytes(const struct arena *a);

/* A process has extents that are being released: the worker is to look again, as often as this is called. Looks at n_max
 * extents, and some more at most, those first at which it looked longest ago. Returns at how many. */
bool arena_has_kept(const struct arena *a);
size_t arena_look_at_kept(struct arena *a, size_t n_max);

/* Asks the device whether unreclaimed memory was returned; if so its charge is dropped in worker_poll(). */
void arena_check_unreclaimed(struct arena *a);

/* A device call reported that the device is lost (-ENODEV). */
bool arena_is_lost(const struct arena *a);

/* The device was opened again: it is no longer lost, and at most n_bytes can still be unreclaimed. */
void arena_recover(struct arena *a, uint64_t n_bytes);

void arena_read_stats(const struct arena *a, struct bfc_stats *ret);

/* The map of its extents, from the first to the last. Its cost is bounded by the number of extents. */
void arena_draw(const struct arena *a, char ret_picture[PICTURE_CHARACTERS + 1]);

/* The extent at this offset is being released. */
bool arena_is_retiring(const struct arena *a, uint64_t offset);

/* A place in a region, as clients know it. A region that is one extent has the extent's id, or that of the first one
 * of a block that was parked there. */
#define ARENA_REGION_OF_EXTENT (UINT64_C(1) << 63)
struct arena_place {
        uint64_t
                region_id; /* (quota + 1) << 32 | a number of this arena; of one extent: the above | an extent's id */
        uint64_t region_bytes;
        uint64_t offset; /* in the region */
};
void arena_locate(const struct arena *a, uint64_t offset, struct arena_place *ret);

/* The extents of [offset, offset + n_bytes): slots are numbered over all regions. Returns the slot of the
 * first, and the last in *ret_last. */
size_t arena_slots(const struct arena *a, uint64_t offset, uint64_t n_bytes, size_t *ret_last);

/* The ledger's index of a slot's extent, or LEDGER_NONE. The extent must not be retired. */
uint32_t arena_slot_extent(const struct arena *a, size_t slot);

/* The shared fd or handle of an extent; valid until the next arena_plan(). */
const struct device_extent *arena_slot_memory(const struct arena *a, size_t slot);

/* The number of slots that can have an extent; only grows. A slot may be reused for another extent. */
size_t arena_n_slots(const struct arena *a);

/* bfc_check(), and compares slots with ledger and charges; slow. */
int arena_check(const struct arena *a, const char **ret_why);

#endif
