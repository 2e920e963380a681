/* bfcctl drain: the progress of a drain, and the memory that is still in use.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_DRAIN_H
#define BFC_CTL_DRAIN_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "ctl/ask.h"

struct drain_look {
        struct list *status;     /* one page of it: the devices */
        struct list *partitions; /* to find those on the device */
        struct list *explained;  /* sessions that still use it; NULL: it is drained */
        const Bfcd__DeviceRow *device;
        bool is_drained;
};

/* Polls until the device is drained, at most timeout_ms (-1: no limit), and then lists its usage. 0: the
 * caller owns *ret and ends it with drain_look_end(). -EINVAL, with a->error: it is no longer draining.
 * Fails as ask_list() does. */
int drain_wait(struct ask *a, const char *device, int64_t timeout_ms, struct drain_look *ret);
void drain_look_end(struct drain_look *l);

/* -ENOMEM, -EIO. */
int drain_print(FILE *out, const struct drain_look *l);

/* NULL when out of memory. */
json_t *drain_json(const struct drain_look *l);

#endif
