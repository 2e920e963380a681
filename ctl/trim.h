/* bfcctl trim: waits until the memory that was reclaimed is returned to its devices.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TRIM_H
#define BFC_CTL_TRIM_H

#include <stdint.h>

#include "ctl/ask.h"

/* Sums over tenants and partitions. */
struct trim_look {
        uint64_t n_reserved, n_pending;
};

/* Until no memory is pending, or the time is up. tenant, partition: "" for all. Fails as ask_list() does. */
int trim_wait(struct ask *a, const char *tenant, const char *partition, int64_t timeout_ms,
              struct trim_look *ret);

#endif
