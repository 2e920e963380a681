/* The client's inside, for the files that make up its floor and for what is built on it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each public function looks first whether it runs in a forked child: `alive` is a page
 * that the kernel wipes there, so this costs one load and no system call, and no
 * lock is taken that a thread of the parent may have held. Then it asks the
 * daemon without any lock, and last writes down the answer under `lock`.
 *
 * Where the daemon was started anew the client comes back to it (comeback.c), and each such time begins
 * an epoch. client_ask() repeats what had no answer. An answer of another epoch than `epoch`
 * when it is to be written down counts for none: it is dropped, and the request repeated. Whatever leaves the
 * tables takes `epoch` along, and is only given back in that one: in a later one the
 * daemon was told that it is gone. */
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
#include "client/fork.h"
#include "client/held.h"
#include "client/magazine.h"
#include "client/pages.h"
#include "client/recorder.h"
#include "client/region.h"
#include "device/device.h"

#define BFC_API __attribute__((visibility("default")))

/* What coming back takes. */
struct comeback {
        char *path;         /* of the socket */
        char name[64];      /* of the program */
        unsigned return_ms; /* these three: constant */
        pthread_mutex_t lock;
        pthread_cond_t changed;
        uint64_t epoch;    /* of the connection that is used */
        bool is_under_way; /* a thread is at it */
        bool is_stopping;
        bool is_refused;              /* atomic: a daemon was asked, and does not take it back */
        struct call_connection *next; /* not in use yet; NULL: none */
};

/* Invariant, when no call is under way: blocks.n_used - parked ones == num_allocs - num_frees,
 * and bytes_in_use is the sum over the used blocks. What the magazines count themselves is not in
 * `stats`; client_read_stats() and client_read_stats_in() have both. */
struct bfc_client {
        const volatile char *alive; /* 0 in a forked child */
        size_t alive_bytes;
        struct fork_entry fork; /* its sockets; registered once it is connected */
        bool is_watched;        /* `fork` is registered */
        uint64_t n_forks;       /* fork_count() when it began */
        struct call_connection *connection;
        struct comeback comeback;    /* with a lock of its own, taken before all others */
        uint64_t n_returns;          /* atomic */
        struct events *events;       /* NULL: none, so no thread */
        bool polls;                  /* the program looks for events; constant */
        bool is_polled;              /* a thread is in bfc_poll(); atomic */
        Bfcd__Reply *hello;          /* what the daemon said of us; constant */
        struct device_view *places;  /* where its partitions are, one each; constant */
        bool *is_seen;               /* of a GPU's: it is one that this process sees; atomic */
        uint32_t partition;          /* index into its partitions */
        struct recorder *recorder;   /* NULL: none */
        uint64_t n_calls;            /* atomic */
        struct magazines *magazines; /* constant */
        uint64_t park_bytes;         /* of the largest block that goes there; 0: none does; constant */
        bool parks;                  /* now: not while its partition's device is drained; atomic */
        struct client_pages pages;
        int lost; /* atomic: why the session ended, as far as is known; 0 */

        struct streams *streams; /* with a lock of its own, taken before this one */

        pthread_mutex_t
                split_lock; /* taken before `lock`; held across calls, so that one slab is split at a time */

        pthread_mutex_t lock; /* everything below; never held across a call */
        uint64_t epoch;       /* in which the tables are, see above */
        bool is_ending;       /* nothing is held any more */
        struct cache *cache;  /* NULL: none */
        struct regions regions;
        struct blocks blocks;        /* blocks_park() is called without the lock */
        struct blocks slabs;         /* the daemon's own blocks that streams have */
        struct held_split splitting; /* a Split that was not answered; block_id 0: none */
        struct bfc_client_stats
                *stats;          /* of each partition; of `partition` without bytes_in_use and its peak */
        uint64_t bytes_reserved; /* the sum over all partitions */
        uint64_t peak_bytes_reserved;
        struct ages ages[PAGES_AGES]; /* as in its page; the rest is in the magazines */
        struct shared_block *shared;  /* a list, see shared.c */
        char end_reason[320];         /* why this end ended the session */
};

/* 0 where the client may be used at all; -EINVAL (NULL), -ECHILD. One load. */
int client_check(const bfc_client *client);

/* The session is over, or this call of it failed: writes the sentence and returns error. */
int client_lost(bfc_client *client, int error);

/* The session ended before the daemon did what it was asked for. */
static inline bool client_has_ended(int error)
{
        return error == -ECONNRESET || error == -EIDRM;
}

/* The process is about to exit, and its threads may still use the client: so nothing changes here but what the
 * daemon knows. Waits for a second at most; nothing in a forked child. */
void client_say_exit(bfc_client *client);

/* One request and its reply, of the kind expected; the caller's, to be freed by
 * bfcd__reply__free_unpacked(). A refusal is the error that the daemon gives, with its
 * sentence. Comes back where the daemon is gone, and asks again. */
int client_ask(bfc_client *client, Bfcd__Request *request, Bfcd__Reply__BodyCase expected,
               Bfcd__Reply **ret_reply, uint64_t *ret_epoch);

/* What requests of one call of the program have in common. */
struct client_call {
        struct call_interrupt *interrupt; /* NULL: it cannot be interrupted */
        bool is_final;                    /* the daemon refused, and nothing that is given back helps */
};

/* client_ask() as a part of such a call. -EINTR: it was interrupted, with a sentence; what was
 * given nevertheless has been given back. */
int client_ask_for(bfc_client *client, struct client_call *call, Bfcd__Request *request,
                   Bfcd__Reply__BodyCase expected, Bfcd__Reply **ret_reply, uint64_t *ret_epoch);

/* Frees blocks at the daemon, at most CALL_MAX_AT_ONCE, with one wait in all, which left the tables in this
 * epoch. The first error, but all are tried. The lock is not held. */
int client_give_back_all(bfc_client *client, const uint64_t *block_ids, size_t n, uint64_t epoch);

/* Called by the reading thread, in the order of the stream. */
/* The address of a block that the daemon gave; what this process could not map there before is tried
 * again. Lock held. -EPROTO: no block can be there. -ECANCELED: it cannot be mapped, and *ret_why
 * says why. */
int client_resolve(bfc_client *client, const Bfcd__Block *block, int *ret_why, void **ret_ptr);
/* Sets the error for that, and returns it. */
int client_unmappable(const bfc_client *client, uint32_t partition, int why);

int client_on_extents(void *userdata, const Bfcd__Extents *extents, int *fds);

/* ---- coming back (comeback.c) ------------------------------------------------ */

/* The connection of that epoch is gone. 0: there is another one, by whichever thread. -ECONNRESET: there
 * will be none, and `lost` is set; end_reason says why. -EPROTO. No lock is held. */
int client_come_back(bfc_client *client, uint64_t epoch);
int client_come_back_in(bfc_client *client, uint64_t epoch, unsigned return_ms);
/* interrupt: NULL, or what interrupts this thread's wait: -EINTR, and the next call tries it again. */
int client_come_back_for(bfc_client *client, uint64_t epoch, struct call_interrupt *interrupt);

int comeback_init(struct comeback *b, const char *path, const char *name, unsigned return_ms); /* -ENOMEM */
void comeback_clear(struct comeback *b);

/* Whoever is at it, or would be, gives up soon; or no longer. */
void comeback_stop(struct comeback *b, bool stops);
/* It was given up, but no daemon has refused it: one that is there by now may know it still. */
bool comeback_try_once_more(bfc_client *client);
bool comeback_is_stopping(struct comeback *b);
void comeback_hang_up(struct comeback *b); /* on the daemon that it is talking to */

/* No device is being drained, as far as another daemon has told. */
void client_forget_drains(bfc_client *client);

/* Splits slabs in use at the bounds of extents, so that extents without a block of this client are idle
 * slabs: until these are want_bytes, or *ret_more. in: only extents in this range; NULL: all of the partition.
 * There is a cache. Where the daemon refuses a split it is left at that. -ECONNRESET, -EIDRM, -EPROTO. */
int client_shrink(bfc_client *client, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                  bool *ret_more);

/* What a Trim asks for. -EPROTO: it makes no sense; -ECONNRESET: the session is over. */
int client_trim_ranges(bfc_client *client, const Bfcd__Trim *trim, uint64_t *ret_bytes);

/* How a block is asked for. */
struct malloc_how {
        uint64_t flags;           /* BFC_ONE_EXTENT, BFC_WHOLE */
        uint32_t wait_ms;         /* for room */
        const char *tag;          /* NULL: none */
        struct block *ret_slab;   /* NULL, or it is for a stream's pool: a block that is in no table,
                                 * and not counted as used; ends with client_return() */
        bool again;               /* where it is refused its caller tries again */
        int cancel_fd;            /* 0: none */
        struct client_call *call; /* client_malloc()'s own */
};

/* The same for bfc_attach_with(). */
int attach_options_read(const struct bfc_attach_options *options, struct bfc_attach_options *ret);

/* From a caller's options, NULL for none. -EINVAL with a sentence. */
int malloc_how_read(const struct bfc_malloc_options *options, const char **ret_partition,
                    struct malloc_how *ret);

/* Whether the cache may cut it from what it has: the daemon knows nothing of such a block. */
static inline bool malloc_may_be_cut(const struct malloc_how *how)
{
        return how->flags == 0 && !how->tag;
}

/* From the cache, or else from the daemon. */
int client_malloc(bfc_client *client, uint32_t partition, uint64_t n_bytes, const struct malloc_how *how,
                  void **ret_ptr);

/* Gives such a block back, to the cache or the daemon. */
int client_return(bfc_client *client, const struct block *slab);

/* What every bfc_malloc() looks at first. -EINVAL, -ENOENT, -ENODEV. */
int client_check_malloc(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr,
                        uint32_t *ret_index);

/* A call failed: counts that, and returns error. */
int client_malloc_failed(bfc_client *client, uint32_t partition, int error);

/* Fills a caller's structure, which may be of an earlier header, or of a later one: then the
 * rest is 0. */
void fill_struct(void *ret, size_t struct_size, const void *known, size_t n_bytes);

/* ---- streams.c -------------------------------------------------------------- */

struct stream_life;

int streams_new(bfc_client *client); /* -ENOMEM */
void streams_free(bfc_client *client);

/* Between these nothing changes in the pools. */
void streams_hold(bfc_client *client);
void streams_release(bfc_client *client);

/* Looks which work of streams is done, and gives what that frees back to the cache, or to
 * the daemon; waits for other threads that are giving something back. Any thread. True: there was
 * something. */
bool streams_collect(bfc_client *client);

/* Every invariant of the streams' pools; slow. 0, or -EBADMSG and a sentence (static). */
int streams_check(bfc_client *client, const char **ret_why);
/* Whether something that was freed waits for work which is not done. */
bool streams_keep(bfc_client *client);

/* Without a cache what waits for a stream's work goes back to the daemon, so the client's thread looks
 * for it: that, and in how many ms to look again; -1: nothing waits. */
int streams_watch(bfc_client *client);

/* All work is done that could touch the block, which is in no table any more. */
void streams_free_done(bfc_client *client, struct stream_life *life);

/* Whether a stream that is known by the calls so far is being captured, and forbids to wait for the
 * partition's device. */
bool streams_are_captured(bfc_client *client, uint32_t partition);

/* A block that leaves is the pools' from now on, until all work on the device could be waited for, and is
 * in the table no more. -ENOMEM: it is there still. */
int streams_put_aside(bfc_client *client, const struct block *block, uint32_t partition);

/* bfc_free_async() and bfc_free(), but -EBUSY where that stream, or one that is known by the calls so far, is
 * being captured: the block stays. */
int client_free_async_unless_captured(bfc_client *client, void *ptr, uintptr_t stream);
int client_free_unless_captured(bfc_client *client, void *ptr);

/* The daemon's block, and the place in it. Lock held. */
uint64_t streams_block_id(const struct block *block);
uint64_t streams_offset(const struct block *block);

void streams_reset_peaks(bfc_client *client);

/* A partition by its name; NULL: the client's own. -ENOENT with a sentence. */
int client_partition_index(const bfc_client *client, const char *name, uint32_t *ret_index);

/* ---- counting and parking (park.c) ---------------------------------------- */

/* A block is used from now on, or no longer. Lock held. Also for what streams have. */
void client_count_alloc(bfc_client *client, const struct block *block);
void client_count_free(bfc_client *client, const struct block *block);

/* A block without a tag is about to be written down: its age is to be told from now on. */
void client_stamp(const bfc_client *client, uint32_t partition, struct block *block);
/* It is no session's now, or its own again. Lock held. */
void client_share_age(bfc_client *client, const struct block *block, bool is_shared);

/* All statistics of bfc_stats() but num_calls and num_returns, of one moment. Lock held. */
void client_read_stats(bfc_client *client, struct bfc_client_stats *ret);
/* The same of one partition, for bfc_stats_in(). Lock held. */
void client_read_stats_in(bfc_client *client, uint32_t partition, struct bfc_client_stats *ret);
/* All peaks become what is so now. Lock held. */
void client_reset_peaks(bfc_client *client);

/* idle_bytes: what may be idle in the client's own partition. -ENOMEM. */
int client_start_magazines(bfc_client *client, uint64_t idle_bytes);

/* Whether such a block may be parked when it is freed. */
bool client_may_park(const bfc_client *client, uint32_t partition, uint64_t n_bytes);

/* Whether what becomes idle in a partition is given to the daemon at once. Lock held. */
void client_set_draining(bfc_client *client, uint32_t partition, bool is_draining);

/* A parked block for this request. False: there is none. Lock not held. */
bool client_unpark(bfc_client *client, uint32_t partition, uint64_t n_bytes, void **ret_ptr);

/* Frees a block by parking it. False: it is none that can be; *ret_excess is set where that much
 * is to go back to the daemon. Lock not held. */
bool client_park(bfc_client *client, const void *ptr, uint64_t *ret_excess);

/* Forked children may have the block's memory mapped (BFC_INHERIT): it is to be zeroed when it is freed.
 * client_wipe() does that, where it is so, for a block that only the caller can reach any more. */
bool client_wipes(const bfc_client *client, uint32_t partition);
void client_wipe(const bfc_client *client, uint32_t partition, const struct block *block);

/* Puts all that is parked into the cache, also while other threads are busy; before looking there
 * for what is idle. True: there was something. Lock held. */
bool client_drain(bfc_client *client);

/* ---- blocks (memory.c) ----------------------------------------------------- */

/* So many bytes more are the daemon's, or fewer. Lock held. */
void client_count_reserved(bfc_client *client, uint32_t partition, uint64_t n_bytes);
void client_count_released(bfc_client *client, uint32_t partition, uint64_t n_bytes);

/* Whether this process sees the device of a partition. Looked up once for each. */
bool client_sees_place(bfc_client *client, uint32_t partition);

/* Gives a block of the daemon's back, which left the tables in this epoch. Lock not held. */
int client_give_back(bfc_client *client, uint64_t block_id, uint64_t epoch);

/* Writes down again a block whose free did not come about, where its memory is still there. Lock
 * not held. */
void client_keep_on(bfc_client *client, const struct block *block);

/* Waits for the work in a range, before a block there is given back. -EBUSY: a stream is being captured. The
 * sentence is set. Lock not held. */
int client_finish(bfc_client *client, uint32_t partition, struct device_range *range);

/* ---- shared blocks (shared.c) ---------------------------------------------- */

enum { SHARED_NONE = 1 };

/* Lets go of a shared block, once. SHARED_NONE: it is none. *ret_stays: this process
 * has it still, be it because the call failed; not touched with SHARED_NONE. Lock not held. */
int shared_let_go(bfc_client *client, const void *ptr, bool *ret_stays);

bool shared_has(const bfc_client *client, const void *ptr); /* lock held */
void shared_clear(bfc_client *client);                      /* forgets them all */

/* How many there are that the daemon knows as shared; the first so many. Lock held. */
struct held_shared;
size_t shared_list(const bfc_client *client, struct held_shared *ret, size_t max);

#endif
