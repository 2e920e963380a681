/* The client of one session, for the modules of its layer and for those above.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each public function first checks whether it runs in a forked child (fork_guard): one load, no system
 * call, and no lock that a thread of the parent may have held. A function that needs the daemon sends its
 * request without a lock, and then enters the result into the tables under `lock`.
 *
 * When the daemon is restarted the session is resumed (reconnect.c), which begins a new epoch. A reply of
 * another epoch than `epoch` is dropped, and its request repeated. A block that leaves the tables takes
 * `epoch` along and is freed at the daemon only in that epoch: a later daemon was told that the block is
 * gone. */
#ifndef BFC_CLIENT_CLIENT_H
#define BFC_CLIENT_CLIENT_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>

#include "client/blocks.h"
#include "client/cache.h"
#include "client/call.h"
#include "client/events.h"
#include "client/free.h"
#include "client/inventory.h"
#include "client/parkable.h"
#include "client/pages.h"
#include "client/pressure.h"
#include "client/process.h"
#include "client/recorder.h"
#include "client/reconnect.h"
#include "client/region.h"
#include "client/stats.h"
#include "device/device.h"

#define BFC_API __attribute__((visibility("default")))

/* Invariant, while no call is in progress: blocks.n_used - parked ones == num_allocs - num_frees, and
 * bytes_in_use is the sum over the used blocks. */
struct bfc_client {
        struct fork_guard fork; /* the child closes the sockets */
        struct call_connection *connection;
        struct reconnect reconnect; /* its lock is taken before all others */
        struct events *events;      /* NULL: none, so no thread */
        Bfcd__Reply *hello;         /* the daemon's reply to it; constant */
        struct device_view *places; /* the device of each partition; constant, but for `peers` (lock) */
        bool *is_seen;              /* of a GPU's: this process sees it; atomic */
        uint32_t partition;         /* index of the client's own one */
        struct recorder *recorder;  /* NULL: none */
        struct stash stash;
        int lost; /* atomic: why the session ended, as far as known; 0 */
        struct client_pages pages;
        struct pressure pressure; /* has a lock of its own */

        struct streams *streams; /* its lock is taken before the next ones */

        pthread_mutex_t split_lock; /* taken before `lock`, held across requests: one split at a time */

        pthread_mutex_t lock; /* everything below; never held across a request */
        uint64_t epoch;       /* of the tables */
        bool is_ending;       /* the inventory is empty */
        struct cache *cache;  /* NULL: none */
        struct regions regions;
        struct blocks blocks;           /* blocks_stash() is called without the lock */
        struct blocks slabs;            /* blocks of the daemon that streams have */
        struct pending_split splitting; /* a Split without an answer */
        struct counters counters;
        struct parkables parkables;
        struct shared_block *shared; /* a list, see shared.c */
        char end_reason[320];        /* why this process ended the session */
};

/* 0 if the client can be used; -EINVAL (NULL), -ECHILD. One load. */
int client_check(const bfc_client *client);

/* Assumes that no device is being drained, until the daemon reports one. */
void client_forget_drains(bfc_client *client);

/* The process is about to exit, and its threads may still use the client: only notifies the daemon. Waits
 * at most a second; does nothing in a forked child. */
void client_say_exit(bfc_client *client);

#endif
