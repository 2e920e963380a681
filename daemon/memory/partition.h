/* A partition: a named part of a device. It owns the pool of its tenants' accounts, and knows its quotas,
 * so that memory that one tenant does not use can serve another one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PARTITION_H
#define BFCD_PARTITION_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/queue.h>

#include "daemon/memory/account.h"
#include "daemon/memory/waits.h"
#include "daemon/memory/standby.h"
#include "daemon/memory/worker.h"
#include "device/device.h"

struct ledger;
struct quota;
struct store;
TAILQ_HEAD(quota_list, quota);
TAILQ_HEAD(recall_share_list, recall_share); /* the session layer's, see recall.h */

/* Bytes of the blocks of all quotas. */
struct partition_use {
        uint64_t n_bytes;
        uint64_t peak_bytes;
        uint64_t peak_ms; /* when: milliseconds since 1970; 0: never */
        uint64_t lifetime_peak_bytes;
        uint64_t lifetime_peak_charged; /* of the pool */
};

/* Quotas with waiting requests. */
struct partition_queue {
        struct quota_list due;     /* their requests are due for a look */
        struct quota_list waiting; /* all, in the order in which they began to wait */
        size_t n_blocked;          /* of these, those that partition_tick() looks at */
        size_t n_deferred;         /* of these, those whose look after a free was deferred */
        size_t n_closing;          /* sessions of all quotas that are closing */
        uint64_t n_tickets;        /* requests that have waited */
        uint64_t n_looks;          /* at requests, in total: tests count the cost of a free */
};

struct partition_lists {
        struct quota_list releasing; /* quotas that are releasing extents */
        struct quota_list
                freed; /* quotas that may have wholly free extents, by a free; a look that finds none removes it */
        struct quota_list asked;          /* quotas whose sessions may have idle memory, see trim.h */
        struct recall_share_list pressed; /* parts of quotas, of sessions that take events */
        size_t n_pressed;
        struct quota_list changed; /* quotas whose charges, extents or device changed: see broker_poll() */
        uint64_t n_visits;         /* of quotas for a request of another one, in total: for tests */
};

/* Requests that wait for room in the partition or in a tenant's quota, see quota_request.claim. */
struct partition_claims {
        size_t n;
        uint64_t looked_ms; /* when a free last made them due */
        bool is_deferred;   /* a later free did not: see partition_look_again() */
};

/* How its extents are made. */
struct partition_memory {
        struct device_supply supply;
        bool is_pinned;          /* of the host: GPUs and clients register extents with CUDA */
        struct device_pins pins; /* what GPUs have registered */
        bool has_told_of_pins;   /* a failure was logged */
};

struct broker;
struct upcalls;

/* Many fields: the account of its limit, its queue, its claims and what is known of its device are inside. */
struct partition {
        const char *name;      /* the config's */
        const char *device_id; /* the config's */
        enum device_share share;
        bool clears; /* clear_on_release: extents are zeroed before they are released */
        struct partition_memory memory;
        bool is_cuda;
        uint8_t uuid[DEVICE_UUID_BYTES]; /* of the GPU */
        uint64_t context_bytes;          /* the config's */
        bool is_lost;                    /* the device is: every request is refused */
        bool is_draining;                /* every request is refused; free extents are released */
        bool has_idle;                   /* while it drains: memory was freed since drain.c looked */
        bool preallocate; /* all of the limits is backed in advance: there are no exact blocks */
        struct device *device;
        struct worker *worker;
        struct ledger *ledger;
        struct store *store; /* of its extents' fds; NULL: none, or with cuda-ipc, which has no fds */
        struct standby_consumer standby; /* of its device */
        struct account pool;
        struct partition_use use;
        struct quota_list quotas;
        size_t n_quotas;  /* with leases */
        size_t n_tenants; /* quotas that are no leases */
        struct partition_queue queue;
        struct partition_lists lists;
        struct partition_claims claims;
        struct returns returns; /* of extents, to the pool */
        uint64_t reclaim_timeout_ms;
        struct {
                void (*wake)(void *userdata); /* it is due; may be NULL */
                void *userdata;
        } turn;
        struct {
                const struct upcalls *calls; /* NULL: there are no sessions */
                struct broker *broker;       /* for the upcalls */
                bool is_inherited; /* the ledger is read, or left to the next daemon: nothing is released */
        } up;
};

static inline const char *partition_growth_name(const struct partition *p)
{
        return p->preallocate ? "preallocate" : "on-demand";
}

static inline const char *partition_share_name(const struct partition *p)
{
        return p->share == DEVICE_SHARE_FD ? "fd" : "cuda-ipc";
}

static inline void partition_init_lists(struct partition *p)
{
        TAILQ_INIT(&p->quotas);
        TAILQ_INIT(&p->queue.due);
        TAILQ_INIT(&p->queue.waiting);
        TAILQ_INIT(&p->lists.releasing);
        TAILQ_INIT(&p->lists.freed);
        TAILQ_INIT(&p->lists.asked);
        TAILQ_INIT(&p->lists.pressed);
        TAILQ_INIT(&p->lists.changed);
}

/* Resets peaks to the current values; lifetime peaks stay. */
static inline void partition_clear_peaks(struct partition *p)
{
        account_clear_peaks(&p->pool);
        p->use.peak_bytes = p->use.n_bytes;
        p->use.peak_ms = p->pool.peak_charged_ms;
}

#endif
