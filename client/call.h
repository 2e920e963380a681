/* Calls: one request to the daemon and its reply, from any thread.
 *
 * Several threads share one connection. A caller sends its frame and waits; one of the waiting threads
 * reads for all and passes each reply to its request. The reading thread passes Extents messages to
 * `on_extents` in stream order, so before the reply with a block in them; they are acknowledged here.
 * This module knows sockets, frames and ids, but no blocks and no memory. libbfcclient and bfcctl are
 * built on it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CALL_H
#define BFC_CLIENT_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/message.h"

struct call_connection;

/* fds: one for each extent, owned by the callee; -1: the extent has a handle, or this process has reached
 * its limit of open files. A negative return ends the connection. */
typedef int (*call_extents_fn)(void *userdata, const Bfcd__Extents *extents, int *fds);

/* Connects to the socket. on_extents may be NULL (then Extents are a violation).
 * -ENOENT, -ECONNREFUSED, -EACCES, -ENAMETOOLONG, -ENOMEM. */
int call_connect(const char *path, call_extents_fn on_extents, void *userdata, struct call_connection **ret);
struct call_connection *call_free(struct call_connection *c); /* no call may be in progress */

/* Connects without waiting. -EAGAIN: the socket's queue is full. */
int call_connect_now(const char *path, call_extents_fn on_extents, void *userdata,
                     struct call_connection **ret);

/* Sends request (its id is set here) and waits for the reply. 0: *ret_reply is the reply, possibly a
 * refusal; free it with bfcd__reply__free_unpacked(). -ECONNRESET: the daemon is gone or ended the
 * session; every later call fails in the same way. -EIDRM: the daemon gave a reason, see
 * call_read_end_reason(). -EPROTO: it sent an invalid message. -EMFILE: this process had no free fd
 * numbers for the fds of the reply to a hello. */
int call_send(struct call_connection *c, Bfcd__Request *request, Bfcd__Reply **ret_reply);

/* Connections have epochs: that of call_connect() is 1, and call_replace() sets a later one. These
 * functions return in *ret_epoch the epoch in which the request was sent or failed. upto: -ESTALE,
 * without sending, if there is a later epoch; 0: any epoch. */
int call_send_at(struct call_connection *c, uint64_t upto, Bfcd__Request *request, Bfcd__Reply **ret_reply,
                 uint64_t *ret_epoch);

/* A call that is interrupted by a signal handler in its thread, or by cancel_fd when it is readable. The
 * call sends one Cancel and continues to its reply, which arrives at once: either the request is
 * withdrawn, or a grant was in flight, which the caller must free. */
struct call_interrupt {
        int cancel_fd; /* -1: none */
        bool is_interrupted;
        bool hangs_up; /* the connection ends instead: -ECONNRESET */
};
int call_send_interruptible(struct call_connection *c, struct call_interrupt *interrupt,
                            Bfcd__Request *request, Bfcd__Reply **ret_reply, uint64_t *ret_epoch);

/* n requests, at most CALL_MAX_AT_ONCE, that are sent together, with one wait in total. The
 * caller owns every reply, the others are NULL; 0: all arrived. */
#define CALL_MAX_AT_ONCE 32u
int call_send_all_at(struct call_connection *c, uint64_t upto, Bfcd__Request *const *requests, size_t n,
                     Bfcd__Reply **ret_replies, uint64_t *ret_epoch);

/* Wakes, in any epoch: they are sent together, and each has a reply for each of its blocks.
 * ret_replies: these, in order; n_replies in all. interrupt: of all of them; NULL: none. -ENOMEM. */
int call_send_wakes(struct call_connection *c, struct call_interrupt *interrupt,
                    Bfcd__Request *const *requests, size_t n, size_t n_replies, Bfcd__Reply **ret_replies,
                    uint64_t *ret_epoch);

/* One request without a result, for the end of the process: in parallel to calls of other
 * threads, and for at most timeout_ms. -ETIMEDOUT. */
int call_send_within(struct call_connection *c, unsigned timeout_ms, Bfcd__Request *request);

/* Of the connection now. */
uint64_t call_epoch(struct call_connection *c);

/* The connection has failed: waits until all calls have returned. */
void call_drain(struct call_connection *c);

/* After that: its calls use the other connection from now on, which is taken over; no call may be in
 * progress there. */
void call_replace(struct call_connection *c, struct call_connection *from, uint64_t epoch);

/* The events socket that arrived with the reply to the hello, which the caller then owns. -1: none. */
int call_take_events_fd(struct call_connection *c);

/* The fds of the usage page and the client page, which the caller then owns. Both -1: none. */
void call_take_page_fds(struct call_connection *c, int ret_fds[2]);

/* The reason for which the daemon ended the session (a Refusal with EIDRM and id 0), into buf. Also reads
 * received data if no call is in progress. Any thread. */
bool call_read_end_reason(struct call_connection *c, char *buf, size_t n_buf);

/* Ends the session with this error, -EPROTO or -ECONNRESET: calls in progress and all later ones fail
 * with it. From any thread. Returns the first such error. */
int call_end(struct call_connection *c, int error);

/* From now on a daemon that does not answer within timeout_ms counts as gone. 0: no time-out, as
 * initially. No call may be in progress. */
void call_set_timeout(struct call_connection *c, unsigned timeout_ms);

/* For a forked child: closes its copy of the socket and changes nothing else, because another thread of
 * the parent may have held the lock. */
void call_forget(struct call_connection *c);

#endif
