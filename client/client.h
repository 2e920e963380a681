/* The client of one session, for the modules of its layer and for those above.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each public function first checks whether it runs in a forked child (fork_guard): one load, no system
 * call, and no lock that a thread of the parent may have held. A function that needs the daemon sends its
 * request without a lock, and then enters the result into the tables under `lock`.
 *
 * When the daemon is restarted the session is resumed (session.c), which begins a new epoch. A reply of
 * another epoch than `epoch` is dropped, and its request repeated. A block that leaves the tables takes
 * `epoch` along and is freed at the daemon only in that epoch: a later daemon was told that the block is
 * gone. */
#ifndef BFC_CLIENT_CLIENT_H
#define BFC_CLIENT_CLIENT_H

#include <bfcclient.h>
#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

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

/* ---- what it consists of --------------------------------------------------------- */

/* Zero-initialised is none. */
struct client_pages {
        void *usage;              /* the usage page, in PAGES_MAX_BYTES; NULL: none; constant */
        struct pages_client *own; /* NULL: none; constant */
};

/* alloc.h. While the partition's device is drained, blocks leave the stash and none are added. */
enum stash_state { STASH_NONE, STASH_DRAINS, STASH_ON };
struct stash {
        struct magazines *magazines; /* constant */
        enum stash_state state;      /* atomic */
};

/* Of all partitions. */
struct counters {
        uint64_t n_requests; /* to the daemon; atomic. The client's lock protects the members below */
        uint64_t peak_bytes_reserved;
        struct ages ages[PAGES_AGES]; /* as in the client page; the rest is in the magazines */
};

/* session.h */
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

/* alloc.h. A Split without an answer, see proto/bfcd.proto. block_id 0: none. */
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
 * bytes_in_use is the sum over the used blocks.
 *
 * Many fields: one part for each file of the client that keeps state between two calls. */
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

/* The process is about to exit, and its threads may still use the client: only notifies the daemon. Waits
 * at most a second; does nothing in a forked child. */
void client_say_exit(bfc_client *client);

/* True: the session ended before the daemon processed the request. */
static inline bool client_has_ended(int error)
{
        return error == -ECONNRESET || error == -EIDRM;
}

/* ---- shared blocks. The lock is held, but for shared_detach() ------------------- */

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

/* Drops one reference. SHARED_NONE: the block is not shared. *ret_stays: this process still has it, perhaps
 * because the call failed; not set with SHARED_NONE. waits: for the work that may use the block. The lock is not held. */
enum { SHARED_NONE = 1 };
int shared_detach(bfc_client *client, const void *ptr, bool waits, bool *ret_stays);

/* How many the daemon knows as shared; lists the first so many. */
size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max);

/* ---- partitions --------------------------------------------------------------
 *
 * The contents of the daemon's hello reply, by index. */

#define CLIENT_PROTOCOL_VERSION 1u

/* Reads the devices of the hello's partitions. -EPROTO, -ENOMEM with a message. */
int client_read_places(bfc_client *client);
void client_free_partitions(bfc_client *client);
/* Checks the hello reply, and selects the client's partition: "" for the default. */
int client_check_hello(bfc_client *client, const char *partition);

/* By its name; NULL: the client's own. -ENOENT with a message. */
int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index);

/* Its name, and its device as this process sees it. */
void client_describe_partition(const bfc_client *client, uint32_t partition, struct bfc_partition_info *ret);

/* True: this process can use the partition's device. A device that was found once is not looked up again. */
bool client_lookup_device(bfc_client *client, uint32_t partition);
/* Before the first memory there, and without a lock: see device_prepare(). With a message. */
int client_prepare_device(bfc_client *client, uint32_t partition);
/* Both, with a message: -ENODEV if it cannot. */
int client_check_device(bfc_client *client, uint32_t partition);

/* While it drains, idle memory is freed at once. The lock is held. */
void client_set_draining(bfc_client *client, uint32_t partition, bool is_draining);

/* Assumes that no device is being drained, until the daemon reports one. */
void client_forget_drains(bfc_client *client);

/* ---- pages and counters ------------------------------------------------------
 *
 * What the client counts, by partition, and its side of the pages of proto/pages.h: the usage of its tenant, read
 * without a request, and the statistics of its own cache. */

/* Takes over the fds of the hello's reply, both or none, after cache and magazines are made and before
 * they are used. An invalid page is not used; its statistics are then requested. The pages must outlive
 * cache and magazines. */
void client_pages_open(bfc_client *client);
void client_pages_close(struct client_pages *p);

/* In a forked child: reserves their addresses. */
void client_pages_hide(const struct client_pages *p);

/* The daemon is gone: its usage page is outdated. */
void client_pages_invalidate(bfc_client *client);

/* Another daemon's pages replace the old ones without an effect on readers and writers. keep() takes the
 * fds of that connection, and is followed by renew() with its hello and the lock of the streams, or by drop(). */
struct client_pages_next {
        struct pages_view usage;
        struct pages_client *own;
};
void client_pages_keep(struct call_connection *connection, struct client_pages_next *ret);
void client_pages_drop(struct client_pages_next *next);
void client_pages_renew(bfc_client *client, struct client_pages_next *next, const Bfcd__HelloReply *hello);

/* A tenant's statistics in a partition. -EAGAIN: no page has them, or they are being written
 * continuously: send a request. No lock, no system call. */
int client_pages_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret);

/* Adds n_bytes, which may be negative, to the blocks of the daemon outside the cache. The lock is held. */
void client_page_whole(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Adds n_bytes, which may be negative, to the memory without bfcd. The lock is held. */
void client_page_outside(bfc_client *client, uint32_t partition, int64_t n_bytes);

/* Publishes client->counters.ages[place], one class, or all: AGES_CLASSES. The lock is held. */
void client_page_ages(bfc_client *client, unsigned place, unsigned class);

/* Publishes whether the program has a function for Pressures now. The lock is held. */
void client_page_pressure_fn(bfc_client *client);

/* The word for the idle bytes of the streams' pools in a partition; NULL: none. */
_Atomic uint64_t *client_page_streams(const bfc_client *client, uint32_t partition);

/* ---- counters ------------------------------------------------------------------- */

/* The next four: a block is used from now on, or no longer; n_bytes of the daemon were reserved or
 * released. The lock is held. */
void client_count_alloc(bfc_client *client, const struct block *block);
void client_count_free(bfc_client *client, const struct block *block);
void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes);
void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes);
/* It stays reserved after a free that failed, and is in the peak already. The lock is held. */
void client_count_restored(bfc_client *client, uint32_t partition, uint64_t n_bytes);

/* The sum over all partitions. The lock is held. */
uint64_t client_bytes_reserved(const bfc_client *client);

/* Sets the age of a block without a tag that is about to be entered. */
void client_stamp(const bfc_client *client, uint32_t partition, struct block *block);
/* A shared block has no age in this session. The lock is held. */
void client_share_age(bfc_client *client, const struct block *block, bool is_shared);

/* ---- options of a client and of its calls ---------------------------------------- */

struct client_call;

/* The options as this library knows them, completed by the environment. -EINVAL with a message. */
int client_options_read(const struct bfc_options *options, struct bfc_options *ret);

/* BFC_WAIT_MS: how long an allocation for a framework waits. -EINVAL with a message. */
int client_read_timeout(uint32_t *ret_ms);

/* A thread serves the daemon's events, or the program polls. */
bool client_takes_events(const struct bfc_options *options);

/* How a block is requested. */
struct malloc_how {
        uint64_t flags;           /* BFC_ONE_EXTENT, BFC_WHOLE, BFC_PARKABLE */
        uint32_t wait_ms;         /* for room */
        const char *tag;          /* NULL: none */
        struct block *ret_slab;   /* NULL; else of a stream's pool: not counted; see client_return_slab() */
        bool is_stream_permanent; /* it is never destroyed */
        bool again;               /* the caller repeats it after a refusal */
        bool is_not_stashed;      /* the magazines had none */
        int cancel_fd;            /* 0: none */
        struct client_call *call; /* client_malloc()'s own */
};

/* Check a caller's options, NULL for none, and copy them. -EINVAL with a message. */
int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret);
int attach_options_read(const struct bfc_attach_options *options, struct bfc_attach_options *ret);
int publish_options_read(const struct bfc_publish_options *options, struct bfc_publish_options *ret);

/* A caller's structure has at least the size of the first version. -EINVAL with a message. */
int struct_check(const char *function, const void *ret, size_t n_least);
/* Fills a caller's structure, which may be of an earlier or a later header: the rest is set to 0. */
void struct_fill(void *ret, size_t struct_size, const void *known, size_t n_bytes);

#endif
