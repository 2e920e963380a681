/* Destroys host extents without blocking: the helper process (device/host_punch.h) punches them and
 * reports the result. A thread sends and receives; it never waits for anything that a client can delay.
 *
 * If the helper dies another one is started, which gets the unanswered requests again.
 *
 * Invariant: every submitted request is done() once, on this thread, or returned by punch_stop().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PUNCH_H
#define BFCD_PUNCH_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

#include "device/host_punch.h"

struct punch;

/* Owned by the submitter until it is done. */
struct punch_request {
        int fd; /* taken over: closed before done(), or by punch_stop() */
        uint64_t n_bytes;
        uint32_t lane; /* requests of one lane are processed in order */
        /* On the thread of the punch. result: 0, or the error of fallocate(). */
        void (*done)(struct punch_request *request, int result);
        uint64_t tag; /* the rest belongs to the punch */
        TAILQ_ENTRY(punch_request) link;
};

/* Starts the thread and takes over the helper; HOST_PUNCH_NONE: starts one. */
int punch_new(const struct host_punch *helper, struct punch **ret);

/* From any thread. */
void punch_submit(struct punch *p, struct punch_request *request);

/* Without a result; also after punch_stop(), from the thread that called that. The fd is taken over.
 * Without memory for the request, it is punched synchronously. */
void punch_discard(struct punch *p, int fd, uint64_t n_bytes, uint32_t lane);

/* Sends what was not sent yet, and ends the thread; the helper continues. Afterwards no done() is called:
 * the remaining requests belong to their submitters again, without their fds. */
void punch_stop(struct punch *p);

/* punch_stop() was called: nothing may be submitted. */
bool punch_is_stopped(const struct punch *p);

/* Calls punch_stop() if necessary. Takes NULL. */
struct punch *punch_free(struct punch *p);

#endif
