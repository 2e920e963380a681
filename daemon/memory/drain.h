/* Draining: the daemon closes a device while it runs, for a reset, a change of its MIG devices or a
 * driver upgrade, and opens it again later.
 *
 *   SERVES -> EMPTIES -> CLOSES -> CLOSED -> OPENS -> BACKS -> SERVES
 *
 * EMPTIES: requests for blocks on the device are refused; wholly free extents and standby memory are
 * released. The worker closes the device after its last extent is gone: it is CLOSED, which operators see
 * as "drained". A resume opens it again, checks that its partitions still fit, and makes preallocated
 * memory. If any of this fails the device stays drained. A resume of a device that is not empty yet
 * cancels the drain. A lost device goes the same way by itself, and an operator's drain takes that over: unreclaimed
 * memory stays charged only as far as the device still lacks it.
 *
 * The worker makes all calls of the device. session/command.c notifies sessions, and asks them for idle memory.
 *
 * Invariants: a partition is_draining exactly while its device does not serve; a device that CLOSES, is
 * CLOSED or OPENS has no extent and no pending memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DRAIN_H
#define BFCD_DRAIN_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/memory/broker.h"
#include "daemon/record/records.h"

/* The device with this id in the config; NULL: there is none. */
struct broker_device *drain_find(struct broker *b, const char *id);

/* "ok", "hung", "draining", "drained" or "lost". */
const char *drain_state(const struct broker_device *d);

bool drain_has_begun(const struct broker_device *d);  /* an operator's drain */
bool drain_is_waiting(const struct broker_device *d); /* the device is being emptied */
bool drain_is_opening(const struct broker_device *d); /* the device is being opened */

/* A lost device is empty and is opened again later, by drain_tick(), because it was lost a short time ago, too. */
bool drain_is_paused(const struct broker_device *d);
void drain_tick(struct broker *b);

/* Begins a record of a drain. state: "begun", "drained", "resumed" or "failed", of a resume. */
void drain_record(const struct broker_device *d, const char *state, struct record *ret);

/* 0, also if the device is draining or drained. -EBUSY: it is being resumed. -ENOMEM. */
int drain_begin(struct broker *b, struct broker_device *d);

/* A device was lost: it is emptied, and opened again when it is empty, or later, see drain_is_paused(). If that fails it stays lost until an operator
 * resumes it. */
void drain_recover(struct broker *b, struct broker_device *d);

/* 0: done(b, d, 0 or an error, a sentence) is called from broker_poll(), or before this returns. An
 * error leaves the device drained. -EINVAL: it was not drained. -EBUSY: it is being resumed already.
 * -ENODEV: it is lost and not empty yet, so it cannot be opened again. */
typedef void (*drain_resumed_fn)(struct broker *b, struct broker_device *d, int result, const char *sentence);
int drain_resume(struct broker_device *d, drain_resumed_fn done);

/* Releases freed extents, and closes empty devices: part of broker_turn(). */
void drain_turn(struct broker *b);
bool drain_is_due(const struct broker *b); /* there is work for a turn */

/* Workers have delivered results: part of broker_poll(). */
void drain_poll(struct broker *b);

/* The daemon is ending: nothing is opened or made any more, workers only finish. */
void drain_end(struct broker *b);

struct drain *drain_free(struct drain *drain); /* takes NULL */

int drain_check(const struct broker *b, const char **ret_why);

#endif
