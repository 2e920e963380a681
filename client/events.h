/* Events: what the daemon tells this client unasked, on a socket of its own,
 * read by a thread, or in events_poll() by whoever calls. Here frames and answers
 * are known; what an event means is its owner's.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_EVENTS_H
#define BFC_CLIENT_EVENTS_H

#include <stdbool.h>

#include "proto/bfcd.pb-c.h"

struct events;

/* Called by whoever reads, retire() by a second thread; may take their time. */
struct events_ops {
        /* Unmap these extents, of which a socket of that epoch spoke; 0 is confirmed to the daemon.
         * -EBUSY: it cannot be done now; called again soon. -ESTALE: there is a later one, and
         * nothing was done. Another negative errno ends the thread, and with it what the daemon
         * expects of a session. */
        int (*retire)(void *userdata, uint64_t epoch, const uint64_t *extent_ids, size_t n_extent_ids);
        /* Give back what lies idle there; 0: *ret_bytes did, which is answered. */
        int (*trim)(void *userdata, const Bfcd__Trim *trim, uint64_t *ret_bytes);
        /* The partition's device is to be emptied, or is not any more. 0, or -EPROTO: there is no such. */
        int (*draining)(void *userdata, uint32_t partition, bool is_over);
        /* After events_wake(), and again in so many ms; -1: not before the next. By the second
         * thread; without threads by each events_poll(). */
        int (*look)(void *userdata);
        /* The socket of that epoch has ended. 0: events_resume() was called, or had been; it may
         * take its time. Another errno: there is no other. */
        int (*lost)(void *userdata, uint64_t epoch);
        /* No event comes any more: the daemon hung up, or the thread is to end. The last. */
        void (*ended)(void *userdata);
        /* Before that, where it ends by itself: what the daemon sent makes no sense (-EPROTO), or
         * the socket failed (-ECONNRESET). */
        void (*failed)(void *userdata, int error);
};

/* Starts the thread, which takes no signals. fd: taken over, also on failure; its epoch is 1.
 * -ENOMEM, -EAGAIN (no thread can be had). */
int events_start(int fd, const struct events_ops *ops, void *userdata, struct events **ret);

/* Without a thread: fails as events_start() does. And what it would do, for all that is there
 * now: 0, -EBUSY (something cannot be done now: call again soon), or the error with which
 * ops->failed() was called, now or before. One caller at a time. */
int events_new(int fd, const struct events_ops *ops, void *userdata, struct events **ret);
int events_poll(struct events *e);
int events_fd(const struct events *e); /* readable: there is something to poll; constant */

/* A socket made ready, so that nothing can fail later. fd: taken over, also on failure. -ENOMEM. */
struct events_socket;
int events_socket_new(int fd, struct events_socket **ret);
struct events_socket *events_socket_free(struct events_socket *s); /* takes NULL */

/* From now on events come over this one, which is taken over; what is left of the other is
 * forgotten. Any thread. e: NULL: none. */
void events_resume(struct events *e, struct events_socket *s, uint64_t epoch);

/* ops->look() is called soon, if there are threads. Any thread. Takes NULL. */
void events_wake(struct events *e);

/* Ends the threads. The daemon sees nothing of it before events_free(). -ETIMEDOUT: a trim() or look()
 * goes on for so long: call it again. 0 ms: for ever. Takes NULL. */
int events_stop(struct events *e, unsigned timeout_ms);

/* It must be stopped. Takes NULL. */
struct events *events_free(struct events *e);

/* For a forked child, in which there is no thread: closes its copy of the socket
 * and touches nothing else. Takes NULL. */
void events_forget(struct events *e);

#endif
