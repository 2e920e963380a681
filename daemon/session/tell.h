/* Events that tell clients what changed: the limits of their quotas, and devices that drain. The event queue bounds a
 * client that does not read; it is not waited for.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TELL_H
#define BFCD_TELL_H

#include <stdbool.h>

struct broker;
struct broker_device;
struct session;

/* Tells sessions of the limits that were changed: of quotas with sessions.limit_changed. */
void tell_limits(struct broker *b);

/* Tells all sessions that have memory on the device that it drains, or serves again. */
void tell_drain(struct broker *b, const struct broker_device *d, bool is_over);

/* Tells a new session which of its partitions are draining. */
void tell_drains_of(struct session *s);

#endif
