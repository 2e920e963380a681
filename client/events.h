/* Events: unsolicited messages of the daemon, on a separate socket. A thread handles them, or the program
 * does by events_poll(). This module reads frames and sends answers; its owner handles the events.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_EVENTS_H
#define BFC_CLIENT_EVENTS_H

#include <stdbool.h>

#include "proto/bfcd.pb-c.h"

struct events;

enum {
        EVENTS_TAKEN = 1,
};

/* Called by the thread that reads; look(), and recall() for a Retire, by a second thread if there is one. They may
 * take long. */
struct events_ops {
        /* Do what a Retire, Trim or Pressure of the socket of that epoch asks for. 0: done, and it is answered.
         * EVENTS_TAKEN: the event was taken over, and events_answer() is called later. -EBUSY, of a Retire: not
         * possible now; called again soon. -ESTALE: there is a later socket, and nothing was done. Another negative
         * errno ends the events, and so the session. */
        int (*recall)(void *userdata, uint64_t epoch, Bfcd__Event *event);
        /* A drain of the partition's device begins or ends, named on the socket of that epoch. 0, also if there is a
         * later socket, and nothing was done; -EPROTO: there is no such partition. */
        int (*draining)(void *userdata, uint64_t epoch, const Bfcd__Draining *draining);
        /* Called after events_wake(), and again after the returned number of ms; -1: only after the next
         * wake. Without threads, by each events_poll(). */
        int (*look)(void *userdata);
        /* The socket of that epoch has ended. 0: events_resume() was called. A negative errno: there is no
         * other socket. */
        int (*lost)(void *userdata, uint64_t epoch);
        /* The last call: there are no more events, because the daemon hung up or the thread is to end. */
        void (*ended)(void *userdata);
        /* Before that, after a failure: the daemon sent an invalid message (-EPROTO), or the socket failed
         * (-ECONNRESET). */
        void (*failed)(void *userdata, int error);
};

/* has_thread: starts the thread, which blocks all signals. fd: taken over, also on failure; its epoch is
 * 1. *ret is set before the thread starts. -ENOMEM, -EAGAIN (no thread could be created): it is NULL. */
int events_new(int fd, bool has_thread, const struct events_ops *ops, void *userdata, struct events **ret);

/* Without a thread: handles all available events. 0; -EBUSY: some cannot be handled now, call again soon;
 * -EPROTO, -ECONNRESET: the events have ended. */
int events_poll(struct events *e);
bool events_has_thread(const struct events *e); /* constant */
/* Constant, readable if there is something to poll; -1: there is a thread, or e is NULL. */
int events_fd(const struct events *e);

/* Allocates everything that a socket needs, so that nothing fails later. fd: taken over, also on failure.
 * -ENOMEM. */
struct events_socket;
int events_socket_new(int fd, struct events_socket **ret);
struct events_socket *events_socket_free(struct events_socket *s); /* takes NULL */

/* Replaces the socket by this one, which is taken over; unread events of the old one are dropped. Any
 * thread. Takes NULL for e. */
void events_resume(struct events *e, struct events_socket *s, uint64_t epoch);

/* Answers a Retire, Trim or Pressure, if the socket is still that of the epoch. Any thread. -ECONNRESET. */
int events_answer(struct events *e, uint64_t epoch, uint64_t sequence);

/* ops->look() is called soon, if there are threads. Any thread. Takes NULL. */
void events_wake(struct events *e);

/* Ends the threads. The daemon does not notice before events_free(). -ETIMEDOUT: a recall() or look() takes
 * longer: call it again. 0 ms: no time-out. Takes NULL. */
int events_stop(struct events *e, unsigned timeout_ms);

/* After events_stop(). Takes NULL. */
struct events *events_free(struct events *e);

/* For a forked child: closes its copy of the socket and changes nothing else. Takes NULL. */
void events_forget(struct events *e);

#endif
