/* Tracks the work of streams: marks (events), captures, and streams that have ended.
 *
 * A mark is an event. When it is complete, the stream's earlier work is complete. While a stream is being
 * captured its work does not run, so no event is recorded: that is done later.
 *
 * If an event shows that the device is lost or that the process's context is broken, no work of this
 * process runs, so it counts as complete. If the driver refused for another reason the event is recorded
 * later.
 *
 * Drivers crash on the handle of a destroyed stream, and a program can destroy a stream at any time. So a
 * stream is passed to the driver only by a call that names it, unless it is permanent. Without an event
 * all work of the device is waited for, when no stream is being captured. The caller does that, without its
 * lock: a wait covers what was freed before it began. A capture that a call has seen
 * counts as going on until a later call that names the stream sees its end.
 *
 * The program can announce a stream's end: from then on one event stands for all of its work. A new stream
 * can have the number of one that ended. Its id shows that, and that the other one has ended. The id of a
 * stream that is being captured is unknown. A stream that was first named then counts as ended when the same
 * number is named with an id.
 *
 * Invariant: while a stream that has not ended has memory, it is known.
 *
 * Not thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_STREAM_TRACKER_H
#define BFC_CLIENT_STREAM_TRACKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "device/device.h"

#define STREAM_BUCKETS 256u

/* Whether a round of queries may wait for all work of a device. */
enum stream_wait {
        STREAM_WAIT_NONE,
        STREAM_WAIT_ASIDE, /* for memory that bfc_free() put aside */
        STREAM_WAIT_ALL,   /* also for memory of streams that have no event */
};

struct stream_pools_options {
        const struct device_view *places; /* one for each partition; constant */
        uint32_t n_partitions;
};

struct stream_mark {
        uint64_t upto;
        uint64_t since; /* is_lost: the wait that begins next covers all its work */
        struct device_event *event;
        bool is_lost;  /* there is no event: all work must be waited for */
        bool is_aside; /* is_lost because the memory was put aside */
        bool is_done;  /* no work runs */
};

/* All work of a stream that has ended. */
struct stream_ending {
        unsigned n_refs;
        struct stream_mark mark;
};

struct stream_key {
        uint32_t partition;
        uintptr_t stream;
};

/* Waits for all work of a partition's device. */
struct stream_finish {
        uint64_t upto; /* the last wait that was successful */
        const struct stream_slab
                *slab; /* to wait in its region, which it keeps; NULL: nothing asks for that */
};

struct known_stream;
struct stream_slab;

struct stream_tracker {
        struct stream_pools_options options;
        struct device_streams **devices; /* by partition; NULL: not opened yet */
        LIST_HEAD(, known_stream) known_by_name[STREAM_BUCKETS];
        TAILQ_HEAD(, known_stream) known; /* the least recently used first */
        size_t n_known, n_captured;
        struct known_stream *named; /* by the current call */
        enum stream_wait wait;
        struct stream_finish *finishes; /* by partition */
        uint64_t next_wait;             /* waits are numbered */
};

int stream_tracker_init(struct stream_tracker *t, const struct stream_pools_options *options); /* -ENOMEM */
void stream_tracker_clear(struct stream_tracker *t);

unsigned stream_bucket(uint32_t partition, uintptr_t stream);
/* The per-thread default stream: only that thread can record events in it. */
bool stream_tracker_is_per_thread(const struct stream_tracker *t, uint32_t partition, uintptr_t stream);

/* Results of device_streams_new() and device_stream_check_captured(), for a stream that exists. */
int stream_tracker_look_at(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t *ret_id);
/* True: this stream has ended, or must be dropped, before the one with the id can be named. */
bool stream_tracker_find_ended(const struct stream_tracker *t, uint32_t partition, uintptr_t stream,
                               uint64_t id, struct stream_key *ret);
/* The current call names the stream: it is known, and can be used until stream_tracker_unname().
 * is_permanent: until it is forgotten. -ENOMEM. */
int stream_tracker_name(struct stream_tracker *t, const struct stream_key *key, uint64_t id, bool is_captured,
                        bool is_permanent);
void stream_tracker_unname(struct stream_tracker *t);
bool stream_tracker_knows(const struct stream_tracker *t, uint32_t partition, uintptr_t stream);
/* Whether the stream certainly exists. */
bool stream_tracker_can_use(const struct stream_tracker *t, uint32_t partition, uintptr_t stream);
/* A stream has ended. */
void stream_tracker_forget(struct stream_tracker *t, uint32_t partition, uintptr_t stream);

/* Whether a stream that can be used is being captured. */
bool stream_tracker_check_captures(struct stream_tracker *t);
/* Whether a known stream may be being captured: waiting for the partition's device would invalidate the
 * capture. */
bool stream_tracker_check_captured(struct stream_tracker *t, uint32_t partition);

/* Begins another round of queries, which can ask for these waits. */
void stream_tracker_begin(struct stream_tracker *t, enum stream_wait wait);
/* True: this wait, or a later one, has ended. If not, and if this round may, it asks for one. */
bool stream_tracker_finish(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                           enum stream_wait wait, uint64_t since);
/* Whether the slab must stay because of a wait. */
bool stream_tracker_keeps(const struct stream_tracker *t, const struct stream_slab *slab);

/* 0: it is recorded, or counts as complete. Otherwise it is unchanged: -EBUSY (captured), -ENOMEM,
 * -EAGAIN (also if the stream cannot be used): later. -EINVAL: it is no stream of this device. */
int stream_mark_try(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                    struct stream_mark *m);
/* stream_mark_try(); if it is no stream of this device, all work must be waited for. */
int stream_mark_record(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                       struct stream_mark *m);
/* No work has to be complete. */
void stream_mark_set_done(struct stream_mark *m, uint64_t upto);
/* 1: not complete. 0: the work before it is complete. -ESTALE: it is no mark; record it. */
int stream_mark_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                      struct stream_mark *m);
void stream_mark_forget(struct stream_tracker *t, uint32_t partition, struct stream_mark *m);

/* With one reference. NULL: -ENOMEM. The mark is moved. If it is NULL or was not recorded, all work must be
 * waited for. */
struct stream_ending *stream_ending_new(const struct stream_tracker *t, struct stream_mark *mark);
struct stream_ending *stream_ending_put(struct stream_tracker *t, uint32_t partition,
                                        struct stream_ending *e);
/* True: all work is done. */
bool stream_ending_query(struct stream_tracker *t, uint32_t partition, const struct stream_slab *slab,
                         struct stream_ending *e);

#endif
