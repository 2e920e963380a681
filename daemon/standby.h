/* Standby memory: extents of a device that are made in advance, for the next growth.
 *
 * They belong to no quota and to no account. No other process ever had one: the device made it,
 * zeroed, and it is handed to one arena or destroyed. They are made by a background lane of the device's
 * worker, so only while nothing else is to be done there. Nothing of them is in the ledger or with the
 * service manager: they end with the process.
 *
 * A user is a partition whose growths take them. Its room is what it can still be charged. Invariant: the
 * standby memory is at most the sum of the rooms, and of what is charged and not made yet. So it never
 * makes the device's memory more than its partitions' limits allow. standby_set_room() comes before the
 * growth that takes the room is submitted; then standby_take() makes way for each of its extents.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_STANDBY_H
#define BFCD_STANDBY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/punch.h"
#include "daemon/worker.h"
#include "device/device.h"

struct standby;

/* What is to be ready, in extents of an arena of these sizes (see arena_grid). Half of it is in the largest
 * ones, in which large requests are placed; the rest is what such an arena makes when it begins to grow. */
struct standby_goal {
        uint64_t n_bytes; /* 0: nothing */
        uint64_t extent_bytes;
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone;
};

/* Embedded in what uses it. All zero: no standby memory. */
struct standby_user {
        struct standby *standby;
        uint64_t room_bytes; /* standby_set_room() */
};

/* How many extents that is. */
uint64_t standby_n_extents(const struct standby_goal *goal);

/* What it makes is shared by fd. small_extent_bytes: of each goal. punch: see standby_free(); NULL: none. */
int standby_new(struct device *device, struct worker *worker, struct punch *punch,
                const struct device_supply *supply, uint64_t small_extent_bytes, struct standby **ret);

/* Frees all of it; its job must be done. Takes NULL. With a punch, which is stopped, nothing waits for the memory. */
struct standby *standby_free(struct standby *s);

/* The following from the loop. What is too much is destroyed and what is missing is made after
 * standby_work(). */
void standby_set_goal(struct standby *s, const struct standby_goal *goal);
void standby_set_room(struct standby_user *user, uint64_t n_bytes);
void standby_work(struct standby *s);

/* Makes nothing for a while. */
void standby_pause(struct standby *s);

/* When that is over, by clock_ms(), if there is something to make then; else 0. */
uint64_t standby_paused_until(struct standby *s);

uint64_t standby_bytes(struct standby *s);
bool standby_is_empty(struct standby *s); /* and nothing is being made */

/* The following from any thread, also with NULL. */

/* An extent of exactly this kind, which is the caller's then. False: there is none, and the caller makes
 * one: what has no room beside that is destroyed first. */
bool standby_take(struct standby *s, const struct device_supply *supply, enum device_share share,
                  uint64_t n_bytes, struct device_extent *ret);

/* Whether this error of device_make() may be for want of something that standby memory takes. */
bool standby_may_help(int error);

/* A call of device_make() failed so, which began when standby_n_drops() was n_drops: destroys all, and
 * makes nothing for a while. True: something was destroyed since then, so it may succeed now. */
uint64_t standby_n_drops(struct standby *s);
bool standby_drop(struct standby *s, uint64_t n_drops);

#endif
