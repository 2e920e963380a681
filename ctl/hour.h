/* The last hour of each partition and of each tenant there, as bfc-exporter samples it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * An hour is HOUR_SLOTS slots of time. A slot keeps the highest reserved and used bytes of its samples, so that a peak
 * between two points of a curve is seen. A slot without a sample is unknown: the daemon did not answer. Memory is
 * bounded: n_series <= HOUR_SERIES, and a series that has no sample in the hour is freed. */
#ifndef BFC_CTL_HOUR_H
#define BFC_CTL_HOUR_H

#include <stdint.h>
#include <stdio.h>

#include "ctl/list.h"

#define HOUR_SLOTS     120u
#define HOUR_SLOT_MS   30000u
#define HOUR_SAMPLE_MS 10000u /* from one sample to the next */
#define HOUR_SERIES    1024u  /* at most; partitions come first */

/* The kinds of lists that a sample is made of. */
#define HOUR_LISTS 2
extern const Bfcd__List__Kind hour_lists[HOUR_LISTS];

struct hour;

int hour_new(struct hour **ret);
struct hour *hour_free(struct hour *h); /* takes NULL */

/* Adds a sample of the partitions and tenants in the list. now_ms: of clock_ms(). -ENOMEM: some are left out. */
int hour_add(struct hour *h, uint64_t now_ms, const struct list *l);

/* {"schema": 1, "hour": {"slot_ms": 30000, "num_left_out": 0, "series": [{"partition": ..., "tenant": null or ...,
 * "bytes_in_use": [null, 1024, ...], "bytes_reserved": [...]}, ...]}}: the last number is of the slot of now_ms.
 * num_left_out: series that the last sample had no room for. -ENOMEM, -EIO. */
int hour_print(FILE *out, struct hour *h, uint64_t now_ms);

#endif
