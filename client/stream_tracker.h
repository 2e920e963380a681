/* Tracks the work of streams: marks (events), captures, and streams that have ended.
 *
 * A mark is an event. When it is complete, the stream's earlier work is complete. While a stream is being
 * captured its work does not run, so no event is recorded: that is done later.
 *
 * If an event shows that the device is lost or that the process's context is broken, no work of this
 * process runs, so it counts as complete. If the driver refused for another reason the event is recorded
 * later.
 *
 * A stream's number is valid as long as the stream: drivers may crash on an invalid one. So the program
 * announces a stream's end: from then on one event stands for all of its work, and the number may be
 * reused. If the driver reports that a stream is gone without that, its work may still run. Then all work
 * of the device is waited for, when no stream is being captured.
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

#define STREAM_BUCKETS              256u
#define STREAM_TRACKER_MAX_CAPTURES 16u

struct stream_pools_options {
        const struct device_view *places; /* one for each partition; constant */
        uint32_t n_partitions;
        /* Waits for all work on the device of a region, as bfc_free() does: 0, or -EBUSY and other
         * errors: later. No known stream is being captured. */
        int (*finish)(void *userdata, uint64_t region_id);
        void *userdata;
};

struct stream_mark {
        uint64_t upto;
        struct device_event *event;
        bool is_lost; /* the stream is gone: all work must be waited for */
        bool is_done; /* no work runs */
};

/* All work of a stream that has ended. */
struct stream_ending {
        unsigned n_refs;
        struct stream_mark mark;
};

struct stream_capture {
        uint32_t partition;
        uintptr_t stream;
};

struct known_stream;

struct stream_tracker {
        struct stream_pools_options options;
        struct device_streams **devices; /* by partition; NULL: not opened yet */
        struct stream_capture captures[STREAM_TRACKER_MAX_CAPTURES];
        unsigned n_captures;
        LIST_HEAD(, known_stream) known_by_name[STREAM_BUCKETS];
        TAILQ_HEAD(, known_stream) known; /* the least recently used first */
        size_t n_known;
        bool may_wait;     /* for all work */
        bool *is_finished; /* by partition: all work there has been waited for */
};

int stream_tracker_init(struct stream_tracker *t, const struct stream_pools_options *options); /* -ENOMEM */
void stream_tracker_clear(struct stream_tracker *t);

unsigned stream_bucket(uint32_t partition, uintptr_t stream);
/* The per-thread default stream: only that thread can record events in it. */
bool stream_tracker_is_per_thread(const struct stream_tracker *t, uint32_t partition, uintptr_t stream);

/* Results of device_streams_new() and device_stream_check_captured(); 1: it is being captured, which is
 * recorded. The stream is known from then on. */
int stream_tracker_look_at(struct stream_tracker *t, uint32_t partition, uintptr_t stream);
/* Whether a recorded capture is still going on; forgets the others. */
bool stream_tracker_check_captures(struct stream_tracker *t);
/* Whether a known stream is being captured, which is recorded: waiting for the partition's device would
 * invalidate the capture. */
bool stream_tracker_check_captured(struct stream_tracker *t, uint32_t partition);
/* A stream has ended. */
void stream_tracker_forget(struct stream_tracker *t, uint32_t partition, uintptr_t stream);
/* Begins another round of queries. may_wait: all work may be waited for, once for each device. */
void stream_tracker_begin(struct stream_tracker *t, bool may_wait);

/* 0: it is recorded, or counts as complete. Otherwise it is unchanged: -EBUSY (captured), -ENOMEM,
 * -EAGAIN: later. -EINVAL: there is no such stream. */
int stream_mark_try(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                    struct stream_mark *m);
/* The same for a stream that may be gone: then all work must be waited for. */
int stream_mark_record(struct stream_tracker *t, uint32_t partition, uintptr_t stream, uint64_t upto,
                       struct stream_mark *m);
/* 1: not complete. 0: the work before it is complete. -ESTALE: it is no mark; record it. */
int stream_mark_query(struct stream_tracker *t, uint32_t partition, uint64_t region_id,
                      struct stream_mark *m);
void stream_mark_forget(struct stream_tracker *t, uint32_t partition, struct stream_mark *m);

/* With one reference. NULL: -ENOMEM. lost: without an event, so all work must be waited for. */
struct stream_ending *stream_ending_new_lost(void);
struct stream_ending *stream_ending_put(struct stream_tracker *t, uint32_t partition,
                                        struct stream_ending *e);
/* True: all work is done. */
bool stream_ending_query(struct stream_tracker *t, uint32_t partition, uint64_t region_id,
                         struct stream_ending *e);

#endif
