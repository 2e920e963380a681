/* Draining: a device is given up while the daemon serves, for a reset, a change of its MIG devices or
 * a driver's upgrade, and had again.
 *
 *   SERVES -> EMPTIES -> CLOSES -> CLOSED -> OPENS -> BACKS -> SERVES
 *
 * EMPTIES: nobody gets a block on it; whatever no block lies in goes back, also what was made in
 * advance. When its last extent is gone its worker closes it: CLOSED, or drained, as people read.
 * To resume opens it again, looks whether its partitions still fit, and backs what is to be there in
 * advance; where any of this fails it is drained as before. Of a device that was lost nothing is
 * left then: it is as good as a new one, and what had escaped is charged only as far as the
 * device still misses it. Resuming what is not empty yet takes the drain back.
 *
 * Every call of the device is its worker's. Telling sessions, and asking them for what lies idle, is
 * order.c's.
 *
 * Invariants: a partition is_draining exactly while its device does not serve; one that CLOSES,
 * is CLOSED or OPENS has no extent, and nothing on its way.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_DRAIN_H
#define BFCD_DRAIN_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/broker.h"

/* Of a device's id, the config's; NULL: there is no such. */
struct broker_device *drain_find(struct broker *b, const char *id);

/* "ok", "draining", "drained" or "lost". */
const char *drain_state(const struct broker_device *d);

/* It is to be empty, and is not. */
bool drain_is_waiting(const struct broker_device *d);

/* 0, also where it is drained or draining already. -EBUSY: it is being resumed. -ENOMEM. */
int drain_begin(struct broker *b, struct broker_device *d);

/* 0: done(b, d, 0 or an error, a sentence) is called from broker_poll(), or before this returns. An
 * error leaves it drained. -EINVAL: it was not drained. -EBUSY: it is being resumed already.
 * -ENODEV: it is lost, and not empty yet, so it cannot be opened anew. */
typedef void (*drain_resumed_fn)(struct broker *b, struct broker_device *d, int result, const char *sentence);
int drain_resume(struct broker *b, struct broker_device *d, drain_resumed_fn done);

/* What was freed goes back, and what is empty is closed: part of broker_turn(). And: whether
 * there is anything to do. */
void drain_turn(struct broker *b);
bool drain_is_due(const struct broker *b);

/* Workers have delivered something: part of broker_poll(). */
void drain_poll(struct broker *b);

/* No session is left, nothing is to be opened or backed any more: workers only finish. */
void drain_end(struct broker *b);

struct drain *drain_free(struct drain *drain); /* takes NULL */

int drain_check(const struct broker *b, const char **ret_why);

#endif
