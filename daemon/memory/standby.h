/* Standby memory: extents of a device that are made in advance, for the next growth.
 *
 * They belong to no quota and no account. No other process has ever had one: the device made it, zeroed,
 * and it is given to one arena or destroyed. A background lane of the device's worker makes them, so only
 * while the worker is otherwise idle. They are neither in the ledger nor in the store: they
 * end with the process.
 *
 * A consumer is a partition whose growths take them. Its room is what can still be charged in it. Invariant:
 * the standby memory is at most the sum of the rooms, plus what is charged and not made yet. So the
 * device's memory never exceeds what its partitions' limits allow. Call standby_set_room() before the
 * growth that takes the room is submitted; then standby_take() frees room for each of its extents.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STANDBY_H
#define BFCD_STANDBY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/memory/extent_sizes.h"
#include "daemon/memory/worker.h"
#include "device/device.h"

struct standby;

#define STANDBY_SIZES 20u /* from the smallest extent on, each twice as large */

/* The goal, in extents of an arena of these sizes. Half of it is in the largest ones, for large requests. The rest is
 * what arenas make next: half of that for those that have begun to grow, and half for such an arena that begins. Where
 * there are only arenas of one kind, all of it is for them. */
struct standby_goal {
        uint64_t n_bytes; /* 0: nothing */
        struct extent_sizes sizes;
        bool has_begun, has_unbegun;    /* arenas that have begun to grow, or not */
        uint64_t n_next[STANDBY_SIZES]; /* of each size, what those that have begun still lack */
};

/* Embedded in a consumer. All zero: no standby memory. */
struct standby_consumer {
        struct standby *standby;
        uint64_t room_bytes; /* standby_set_room() */
};

/* The number of extents for a goal. */
uint64_t standby_n_extents(const struct standby_goal *goal);

/* Its extents are shared by fd. small_extent_bytes: of each goal. */
int standby_new(struct device *device, struct worker *worker, const struct device_supply *supply,
                uint64_t small_extent_bytes, struct standby **ret);

/* Frees all of it; its job must be done. Takes NULL. */
struct standby *standby_free(struct standby *s);

/* The following belong to the loop. standby_work() destroys the excess and makes what is missing. */
void standby_set_goal(struct standby *s, const struct standby_goal *goal);
void standby_set_room(struct standby_consumer *consumer, uint64_t n_bytes);
void standby_work(struct standby *s);

/* Pauses for a while. */
void standby_pause(struct standby *s);

/* When the pause ends, by clock_ms(), if there is something to make then; else 0. */
uint64_t standby_paused_until(struct standby *s);

uint64_t standby_bytes(struct standby *s);
bool standby_check_empty(struct standby *s); /* and nothing is being made */

/* The following from any thread, also with NULL. */

/* Takes an extent of exactly this kind, which the caller then owns. False: there is none, and the caller
 * makes one; excess standby memory is destroyed first. */
bool standby_take(struct standby *s, const struct device_supply *supply, enum device_share share,
                  uint64_t n_bytes, struct device_extent *ret);

/* True: this error of device_make() may be caused by a lack of something that standby memory uses. */
bool standby_may_help(int error);

/* device_make() failed so, in a call that began when standby_n_drops() was n_drops: destroys all, and
 * pauses. True: something was destroyed since then, so a retry may succeed. */
uint64_t standby_n_drops(struct standby *s);
bool standby_drop(struct standby *s, uint64_t n_drops);

#endif
