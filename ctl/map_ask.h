/* Reads a map from the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_MAP_ASK_H
#define BFC_CTL_MAP_ASK_H

#include "ctl/ask.h"
#include "ctl/map.h"

/* See map_new(). On failure a->error is set. -ENOENT: there is no such partition, or no such tenant. */
int map_ask(struct ask *a, const char *partition, const char *tenant, size_t n_columns, bool keeps_blocks,
            struct map **ret);

#endif
