/* The daemon's memory as a snapshot for PyTorch's memory viewer: its extents are segments, and its blocks are blocks.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A segment is a range of adjacent extents. Addresses are made up, the same for equal regions: the daemon does not know
 * those of its clients. The trace of a device has the allocation of each block, the oldest first. The blocks are read
 * before the extents. What does not fit together, because it changed in between, is left out and counted. All blocks
 * are in memory at once, since they have to be sorted. */
#ifndef BFC_CTL_SNAPSHOT_ASK_H
#define BFC_CTL_SNAPSHOT_ASK_H

#include <stdio.h>

#include "ctl/ask.h"

struct snapshot_data;

/* -errno, and a->error is set. -ERANGE: more address space than the viewer can count. */
int snapshot_ask(struct ask *a, struct snapshot_data **ret);
struct snapshot_data *snapshot_data_free(struct snapshot_data *d); /* takes NULL */

/* Blocks that were left out. */
uint64_t snapshot_n_left_out(const struct snapshot_data *d);

/* -ENOMEM, -EIO. */
int snapshot_write(FILE *out, const struct snapshot_data *d);

#endif
