/* Calls: one request to the daemon and its reply, from any thread.
 *
 * Several threads share one connection. A caller sends its frame and waits;
 * one of the waiting threads reads for all and hands each reply to the request
 * that it answers. Extents messages are handed to `on_extents` by the reading
 * thread, in stream order, so before the reply whose block lies in them; they
 * are acknowledged here. Knows sockets, frames and ids; no blocks and no
 * memory. libbfcclient and bfcctl are built on it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_CALL_H
#define BFC_CLIENT_CALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

struct call_connection;

/* fds: one for each extent, owned by the callee from now on; -1: it has a handle, or this process is at its
 * limit of open files. A negative return ends the connection. */
typedef int (*call_extents_fn)(void *userdata, const Bfcd__Extents *extents, int *fds);

/* Connects to the socket. on_extents may be NULL (then Extents are a violation).
 * -ENOENT, -ECONNREFUSED, -EACCES, -ENAMETOOLONG, -ENOMEM. */
int call_connect(const char *path, call_extents_fn on_extents, void *userdata, struct call_connection **ret);
struct call_connection *call_free(struct call_connection *c); /* no call may be under way */

/* The same without waiting: -EAGAIN, too many wait to be let in there. */
int call_connect_now(const char *path, call_extents_fn on_extents, void *userdata,
                     struct call_connection **ret);

/* Sends request (its id is set here) and waits for the reply. 0: *ret_reply is
 * what answered it, possibly a refusal; free with bfcd__reply__free_unpacked().
 * -ECONNRESET: the daemon is gone or ended the session; every later call says
 * so too. -EIDRM: it said why, see call_was_told(). -EPROTO: what it sent makes no sense. -EMFILE: the
 * fds of the reply to a hello found no number in this process. */
int call_send(struct call_connection *c, Bfcd__Request *request, Bfcd__Reply **ret_reply);

/* Connections have epochs: that of call_connect() is 1, and call_adopt() says a later one. These
 * tell in *ret_epoch in which it was sent, or failed. upto: -ESTALE where there is a later one
 * already, and nothing is sent; 0: whichever there is. */
int call_send_at(struct call_connection *c, uint64_t upto, Bfcd__Request *request, Bfcd__Reply **ret_reply,
                 uint64_t *ret_epoch);

/* A call that a signal handler in its thread, or cancel_fd when it is readable, interrupts. The daemon is
 * told once (Cancel), and the call goes on to its reply, which comes at once: that the request is
 * withdrawn, or what was on its way already, and is the caller's to give back. */
struct call_interrupt {
        int cancel_fd; /* -1: none */
        bool is_interrupted;
        bool hangs_up; /* the connection ends instead: -ECONNRESET */
};
int call_send_interruptible(struct call_connection *c, struct call_interrupt *interrupt,
                            Bfcd__Request *request, Bfcd__Reply **ret_reply, uint64_t *ret_epoch);

/* The same for n requests, at most CALL_MAX_AT_ONCE, that are sent together: one wait in all. Every
 * reply that came is the caller's, the others are NULL; 0: all came. */
#define CALL_MAX_AT_ONCE 32u
int call_send_all_at(struct call_connection *c, uint64_t upto, Bfcd__Request *const *requests, size_t n,
                     Bfcd__Reply **ret_replies, uint64_t *ret_epoch);

/* The same with one request that the daemon only confirms, for the end of the process: beside calls of
 * other threads, whatever they wait for, and for timeout_ms at most. -ETIMEDOUT. */
int call_send_within(struct call_connection *c, unsigned timeout_ms, Bfcd__Request *request);

/* The connection has failed: waits until all calls have come out of it. */
void call_drain(struct call_connection *c);

/* After that: its calls go over the other one from now on, which is taken over; no call may be
 * under way there. */
void call_adopt(struct call_connection *c, struct call_connection *from, uint64_t epoch);

/* The events socket that came with the reply to the hello; the caller's. -1: none
 * came. */
int call_take_events_fd(struct call_connection *c);

/* The same for the fds of the usage page and the client page; both -1: none came. */
void call_take_page_fds(struct call_connection *c, int ret_fds[2]);

/* The daemon said why it ended the session (a Refusal with EIDRM that answers no request): its sentence, into
 * buf. What came and was not read yet is looked at where no call is under way. Any thread. */
bool call_was_told(struct call_connection *c, char *buf, size_t n_buf);

/* Ends the session for this error, -EPROTO or -ECONNRESET: calls under way and
 * all later ones return it. From any thread. Returns what they return: the first. */
int call_end(struct call_connection *c, int error);

/* From now on a daemon that is silent for so long counts as gone. 0: wait for
 * ever, as at first. No call may be under way. */
void call_set_timeout(struct call_connection *c, unsigned timeout_ms);

/* For a forked child: closes its copy of the socket and touches nothing else,
 * because another thread of the parent may have been anywhere. */
void call_forget(struct call_connection *c);

#endif
