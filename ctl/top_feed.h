/* Samples for bfcctl top, from the monitor socket.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One connection is kept, and lists are read page by page. Only what is shown is read: sessions are the long
 * list. A feed reads in a thread of its own, so that the screen answers to keys while the daemon does not
 * answer; it connects again until the daemon is back. */
#ifndef BFC_CTL_TOP_FEED_H
#define BFC_CTL_TOP_FEED_H

#include "ctl/ask.h"
#include "ctl/top_model.h"

/* ---- one sample ---------------------------------------------------------------- */

struct top_source {
        struct ask ask;
        bool is_open;
        struct nvml *nvml;  /* NULL: the machine has none */
        struct list *about; /* the daemon's status when it was connected: version, process, devices */
};

/* Connects. A negative errno: source->ask.error says why. -EACCES: it is not the monitor socket, or this user may
 * not open it, which stays so. */
int top_source_open(struct top_source *s, const char *socket);
void top_source_close(struct top_source *s);

/* Reads. A negative errno as above; then the source must be closed. */
int top_source_read(struct top_source *s, bool with_sessions, struct top_sample *ret);

/* ---- samples all the time -------------------------------------------------------- */

struct top_feed;

/* Takes over an open source, also on failure. -ENOMEM, or a negative errno of eventfd(2) or pthread_create(3). */
int top_feed_start(struct top_source *source, const char *socket, unsigned interval_ms, bool with_sessions,
                   struct top_feed **ret);

/* Readable when there is something new. */
int top_feed_fd(const struct top_feed *f);

/* True: *ret is the newest sample, which the caller owns. In both cases *ret_trouble is why there is none, or "",
 * and *ret_silent_ms is the time since the running question was sent. */
bool top_feed_take(struct top_feed *f, struct top_sample *ret, char ret_trouble[static 1024],
                   uint64_t *ret_silent_ms);

/* Changes what is read, and reads now. */
void top_feed_want(struct top_feed *f, unsigned interval_ms, bool with_sessions);

/* Ends the thread unless it waits for the daemon: then it ends with the process. */
struct top_feed *top_feed_stop(struct top_feed *f);

#endif
