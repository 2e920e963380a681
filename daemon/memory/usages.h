/* The session layer's data for each quota, embedded in it: which sessions use the quota, and which have
 * the most. See share.h and explain.h; lower layers only make and free it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_USAGES_H
#define BFCD_USAGES_H

#include <stdint.h>
#include <stdlib.h>
#include <sys/queue.h>

#include "daemon/memory/occupancy.h"

#define QUOTA_RANKS   3u
#define QUOTA_HOLDERS 16u

struct usage;
TAILQ_HEAD(usage_list, usage);

/* What is costly to find out, cached. */
struct quota_report {
        uint64_t ranks_ms; /* when the ranks were computed; 0: never */
        struct usage *by_bytes[QUOTA_RANKS], *by_blocks[QUOTA_RANKS];
        uint64_t since_ms; /* when the rest was, by explain.c; 0: never */
        struct usage *most[QUOTA_HOLDERS];
        uint64_t idle_bytes[QUOTA_HOLDERS]; /* as their clients reported then */
        char picture[PICTURE_CHARACTERS + 1];
};

struct quota_usages {
        struct usage_list list;
        struct quota_report *report; /* NULL: none yet */
        uint64_t bytes_contexts;     /* in direct charges, as clients say; those of leases, too */
};

static inline void quota_usages_init(struct quota_usages *u)
{
        TAILQ_INIT(&u->list);
}

static inline void quota_usages_deinit(struct quota_usages *u)
{
        free(u->report);
}

#endif
