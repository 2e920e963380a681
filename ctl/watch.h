/* bfcctl events and bfcctl wait: what changes, as a program that asks again and again sees it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon sends operators no events, so these look once a second. */
#ifndef BFC_CTL_WATCH_H
#define BFC_CTL_WATCH_H

#include <stdio.h>

#include "ctl/list.h"

/* Writes a line of JSON for each difference between two looks: sessions that began, ended or were evicted, refusals, and
 * devices whose state changed. The lists are sorted. -ENOMEM, -EIO. */
int watch_print(FILE *out, const struct list *before, const struct list *now, uint64_t own_session_id,
                uint64_t time_ms);

/* What a quota could get now: its free memory, and what its limit and the partition's allow. 0: there is no such
 * quota. */
uint64_t watch_room(const struct list *l, const char *tenant, const char *partition);

#endif
