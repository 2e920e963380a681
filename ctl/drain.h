/* bfcctl drain: how far it has come, and who still holds what.
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
        struct list *partitions; /* to know which are of the device */
        struct list *explained;  /* everybody who has something; NULL: it is drained */
        const Bfcd__DeviceRow *device;
        bool is_drained;
};

/* Looks until the device is drained, for so long at most (-1: as long as it takes), and then at who
 * has what. 0: *ret is the caller's, to end with drain_look_end(). -EINVAL, with a->error: it is
 * not draining any more. Fails as ask_list() does. */
int drain_wait(struct ask *a, const char *device, int64_t timeout_ms, struct drain_look *ret);
void drain_look_end(struct drain_look *l);

/* -ENOMEM, -EIO. */
int drain_print(FILE *out, const struct drain_look *l);

/* NULL when out of memory. */
json_t *drain_json(const struct drain_look *l);

#endif
