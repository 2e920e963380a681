/* A partition: a named share of a device. It owns the pool that its tenants'
 * accounts draw on, and knows its quotas, so that one tenant's shortage can be
 * helped by what another no longer uses.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARTITION_H
#define BFCD_PARTITION_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "daemon/account.h"
#include "daemon/standby.h"
#include "daemon/worker.h"
#include "device/device.h"

struct quota;
struct store;
struct watch;
TAILQ_HEAD(quota_list, quota);

struct punch;

/* Quotas that keep memory for the next session, see quota_keep(). */
struct keepers {
        struct quota_list quotas; /* by kept_until_ms */
        size_t n_recalled; /* quotas that give back what they kept, because a device has no more memory */
};

struct partition {
        const char *name;      /* the config's */
        const char *device_id; /* the config's */
        const char *growth;    /* "on-demand", "preallocate" */
        const char *share_name;
        enum device_share share;
        bool clears; /* clear_on_release */
        struct device_supply supply;
        bool is_cuda;
        uint8_t uuid[DEVICE_UUID_BYTES]; /* of the GPU */
        bool is_lost;                    /* the device is: every request is refused */
        bool is_draining;                /* nobody gets a block; what lies idle goes back, all of it */
        bool has_idle;                   /* while it is: something was freed since drain.c looked */
        bool preallocate;
        struct device *device;
        struct worker *worker;
        struct punch *punch;         /* see arena.h; NULL: none */
        struct store *store;         /* of its extents' fds; NULL: none */
        struct watch *watch;         /* of its destroyed extents; NULL: none */
        struct standby_user standby; /* of its device */
        struct pool pool;
        uint64_t bytes_in_use; /* blocks of all quotas */
        uint64_t peak_bytes_in_use;
        uint64_t peak_in_use_ms; /* when: milliseconds since 1970; 0: never */
        uint64_t lifetime_peak_bytes_in_use;
        struct quota_list quotas;
        size_t n_quotas;
        struct keepers *keepers; /* of all partitions; NULL: nothing is kept */
        struct quota_list due;   /* quotas whose waiting requests are to be looked at */
        struct quota_list
                waiting; /* quotas with waiting requests, in the order in which they began to wait */
        struct quota_list releasing; /* quotas that are giving back extents */
        struct quota_list freed;     /* quotas that may have wholly free extents, see quota.may_have_free */
        struct quota_list asked;     /* quotas whose sessions may have something to give, see trim.h */
        struct quota_list changed;   /* quotas whose charges, extents or device changed: see broker_poll() */
        size_t n_blocked;            /* of these, those that are looked at by partition_tick() */
        size_t n_closing;            /* sessions of all quotas that are closing */
        uint64_t claims_ms;          /* when a free last made the claims due */
        bool is_put_off;             /* a free since then did not: see partition_look_again() */
        size_t n_put_off;            /* quotas of which the look after a free was put off */
        uint64_t n_looks;            /* at waiting requests, ever: what a free costs is tested by it */
        uint64_t n_visits;           /* of quotas for a request of another one, ever: the same */
        uint64_t n_tickets;          /* requests that have waited */
        size_t n_claims;        /* requests that wait for room in the partition, see quota_request.claim */
        uint64_t claimed_bytes; /* of all of them */
        uint64_t reclaim_timeout_ms;
        void (*wake)(void *userdata); /* may be NULL: something is due */
        void *userdata;
};

static inline void partition_init_lists(struct partition *p)
{
        TAILQ_INIT(&p->quotas);
        TAILQ_INIT(&p->due);
        TAILQ_INIT(&p->waiting);
        TAILQ_INIT(&p->releasing);
        TAILQ_INIT(&p->freed);
        TAILQ_INIT(&p->asked);
        TAILQ_INIT(&p->changed);
}

/* Peaks begin again at the present values; lifetime peaks stay. */
static inline void partition_clear_peaks(struct partition *p)
{
        pool_clear_peaks(&p->pool);
        p->peak_bytes_in_use = p->bytes_in_use;
        p->peak_in_use_ms = p->pool.peak_charged_ms;
}

#endif
