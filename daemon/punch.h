/* Destroying host extents without waiting for it: what is submitted here is punched by the helper
 * process (device/host_punch.h), and told when it is done. A thread sends and receives; it waits
 * for nothing that a client can delay.
 *
 * If the helper dies another one is started, which is sent what was not answered.
 *
 * Invariant: every request submitted is done() once, on this thread, or was given up by
 * punch_stop().
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
        int fd; /* taken over: closed before done(), and by punch_stop() */
        uint64_t n_bytes;
        uint32_t lane; /* requests of one lane are done in order */
        /* On the thread of the punch. result: 0, or the error of fallocate(). */
        void (*done)(struct punch_request *request, int result);
        uint64_t tag; /* the rest is the punch's */
        TAILQ_ENTRY(punch_request) link;
};

/* Starts the thread and takes the helper over; it may be HOST_PUNCH_NONE: one is started. */
int punch_new(const struct host_punch *helper, struct punch **ret);

/* From any thread. */
void punch_submit(struct punch *p, struct punch_request *request);

/* Without being told; also after punch_stop(), from the thread that called that. The fd is taken
 * over. Where there is no memory for it, it is punched here and now. */
void punch_discard(struct punch *p, int fd, uint64_t n_bytes, uint32_t lane);

/* Sends what was not sent yet, and ends the thread; the helper goes on. Afterwards no done() is
 * called: the requests that are left are the submitters' again, without their fds. */
void punch_stop(struct punch *p);

/* punch_stop() was called: nothing may be submitted any more. */
bool punch_is_stopped(const struct punch *p);

/* Stops where that was not done. Takes NULL. */
struct punch *punch_free(struct punch *p);

#endif
