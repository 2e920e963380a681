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
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>

#include "client/blocks.h"
#include "client/cache.h"
#include "client/call.h"
#include "client/events.h"
#include "client/magazine.h"
#include "client/process.h"
#include "client/recorder.h"
#include "client/region.h"
#include "device/device.h"
#include "proto/pages.h"

#define BFC_API __attribute__((visibility("default")))

/* ---- the parts of the other files of this layer ------------------------------ */

/* pages.h. Zero-initialised is none. */
struct client_pages {
        void *usage;              /* the usage page, in PAGES_MAX_BYTES; NULL: none; constant */
        struct pages_client *own; /* NULL: none; constant */
};

/* stash.h. While the partition's device is drained, blocks leave the stash and none are added. */
enum stash_state { STASH_NONE, STASH_DRAINS, STASH_ON };
struct stash {
        struct magazines *magazines; /* constant */
        enum stash_state state;      /* atomic */
};

/* pages.h. Of all partitions. */
struct counters {
        uint64_t n_requests; /* to the daemon; atomic. The client's lock protects the members below */
        uint64_t peak_bytes_reserved;
        struct ages ages[PAGES_AGES]; /* as in the client page; the rest is in the magazines */
};

/* reconnect.h */
struct reconnect {
        char *path;                   /* of the socket */
        char name[64];                /* of the program */
        unsigned return_ms;           /* these three are constant */
        uint64_t n_resumed;           /* atomic */
        bool is_under_way;            /* a thread is reconnecting */
        bool is_refused;              /* atomic: a daemon refused to resume the session */
        struct call_connection *next; /* not in use yet; NULL: none */
};

/* pressure.h */
enum pressure_state { PRESSURE_IDLE, PRESSURE_SERVED, PRESSURE_IN_FN };
enum pressure_thread { PRESSURE_NO_THREAD, PRESSURE_RUNS, PRESSURE_ENDED }; /* ended: to be joined */
struct pressure {
        bfc_pressure_fn fn; /* NULL: none; atomic, changed under the lock */
        void *userdata;
        enum pressure_state state;
        enum pressure_thread thread;
        pthread_t server; /* the client's thread; without one, the thread that serves, if one does */
        bool disconnects; /* fn has called bfc_disconnect() */
};

/* reclaim.h. A Split without an answer, see proto/bfcd.proto. block_id 0: none. */
struct pending_split {
        uint64_t block_id;
        uint64_t n_bytes;
};

/* What the client knows of a partition, and counts there. */
struct client_partition {
        bool is_seen;     /* of a GPU's: this process sees it; atomic */
        bool is_prepared; /* the same, and device_prepare() has done its work; atomic */
        _Atomic(const struct pages_entry *) usage; /* NULL: no page has it, or its daemon is gone */

        /* Under the client's lock: */
        Bfcd__Event *order; /* a Pressure that is not served yet; NULL: none */
        uint64_t order_epoch;
        struct bfc_client_stats stats; /* without what the magazines count: bfc_stats() adds it */
        uint64_t bytes_contexts;       /* of bytes_direct */
        struct parkables parkables;
};

/* ---- the client ---------------------------------------------------------------- */

/* Invariant, while no call is in progress: the used blocks that are not parked are num_allocs - num_frees, and
 * bytes_in_use is the sum over the used blocks. */
struct bfc_client {
        struct fork_guard fork; /* the child closes the sockets and hides the pages */
        struct call_connection *connection;
        struct events *events;      /* NULL: none, so no thread */
        Bfcd__Reply *hello;         /* the daemon's reply to it; constant */
        struct device_view *places; /* the device of each partition; constant, but for `peers` (lock) */
        struct client_partition *partitions;
        uint32_t partition;        /* index of the client's own one */
        struct recorder *recorder; /* NULL: none */
        struct stash stash;
        int lost; /* atomic: why the session ended, as far as known; 0 */
        struct client_pages pages;

        struct streams *streams; /* its lock is taken before the next ones */

        pthread_mutex_t split_lock; /* taken before `lock`, held across requests: one split at a time */

        pthread_mutex_t lock;   /* everything below; never held across a request */
        pthread_cond_t changed; /* reconnect, pressure, is_stopping, or a parkable block is no longer busy */
        struct reconnect reconnect;
        struct pressure pressure;
        bool is_stopping;    /* the threads are to end, and nothing reconnects */
        uint64_t epoch;      /* of the tables */
        bool is_ending;      /* the inventory is empty */
        struct cache *cache; /* NULL: none */
        struct regions regions;
        struct blocks blocks;           /* blocks_stash() is called without the lock */
        struct pending_split splitting; /* a Split without an answer */
        struct counters counters;
        size_t n_unretired; /* extents that were unmapped, and for which a Retire of this epoch is to come */
        struct shared_block *shared; /* a list; see below */
        char end_reason[320];        /* why this process ended the session */
};

/* 0 if the client can be used; -EINVAL (NULL), -ECHILD. One load. */
int client_check(const bfc_client *client);

/* The session has ended, or this call failed: sets the message and returns error. */
int client_lost(bfc_client *client, int error);

/* Ends the session for this reason, unless another was set before. Returns error. */
int client_end(bfc_client *client, int error, const char *why);

/* True: the session ended before the daemon processed the request. */
static inline bool client_has_ended(int error)
{
        return error == -ECONNRESET || error == -EIDRM;
}

/* ---- the list of shared blocks. The lock is held ------------------------------- */

/* Invariant: n_leaving <= n_refs, n_refs > 0; the table of blocks has ptr with this id. */
struct shared_block {
        struct shared_block *next;
        const void *ptr;
        uint64_t block_id;
        uint32_t n_refs;
        uint32_t n_leaving; /* of these */
        bool is_asked;      /* to be published, and not answered */
        bool is_read_only;  /* attached so */
};

/* As the daemon knows it. */
struct shared_count {
        uint64_t block_id;
        uint32_t count;
};

bool shared_has(const bfc_client *client, const void *ptr);
bool shared_is_read_only(const bfc_client *client, const void *ptr);

/* NULL: it is not shared. */
struct shared_block *shared_find(const bfc_client *client, const void *ptr);
struct shared_block *shared_find_id(const bfc_client *client, uint64_t block_id);

/* With one reference. -ENOMEM. */
int shared_add(bfc_client *client, const void *ptr, uint64_t block_id);
void shared_remove(bfc_client *client, struct shared_block *s);

/* Forgets all. The lock is not needed. */
void shared_clear(bfc_client *client);

/* How many the daemon knows as shared; lists the first so many. */
size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max);

#endif
