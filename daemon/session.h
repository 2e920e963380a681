/* A session: one client process, from its hello to the moment when nothing of
 * it is left. It turns requests into replies and touches no socket: whoever owns
 * the connection (or a test) gives it decoded requests and takes its replies.
 *
 * States:  NEW -> LIVE -> [QUARANTINED ->] CLOSING -> ended
 *          QUARANTINED -> RETURNING -> LIVE, of one that another process had; see restore.h
 * QUARANTINED: the peer hung up without a goodbye and its process may still
 * live; it keeps what it holds until session_close(). CLOSING: blocks are freed
 * in slices, so that a mass death does not hold up the others.
 *
 * Blocks are delivered in order. Each waits until the extents before it are acknowledged. Their number is
 * bounded by SESSION_MAX_DELIVERIES and SESSION_MAX_PENDING together.
 *
 * Invariant: bytes_in_use and the ledger's list of the session's blocks agree, in which
 * shared ones are not;
 * an extent is exported to a session exactly if its slot says so.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_H
#define BFCD_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/broker.h"
#include "daemon/holding.h"
#include "daemon/holds.h"
#include "daemon/reload.h"
#include "daemon/retire.h"
#include "daemon/shared.h"
#include "daemon/trim.h"
#include "proto/bfcd.pb-c.h"

#define SESSION_PROTOCOL_VERSION 1u
#define SESSION_MAX_PENDING      64u     /* requests that wait for room */
#define SESSION_MAX_HELLOS       3u      /* a refused one may be tried again so often in all */
#define SESSION_MAX_UNACKED      64u     /* extents sent and not acknowledged */
#define SESSION_MAX_LOST         256u    /* extents that are sent once more, as lost; bounds fds in flight */
#define SESSION_MAX_DELIVERIES   1024u   /* then no request may add one; those that wait for room still do */
#define SESSION_DELIVERY_SLICE   16u     /* blocks delivered in one turn */
#define SESSION_REAP_SLICE       64u     /* blocks freed in one turn of the loop */
#define SESSION_MAX_WAIT_MS      600000u /* of what a request says */

enum session_state { SESSION_NEW, SESSION_LIVE, SESSION_QUARANTINED, SESSION_RETURNING, SESSION_CLOSING };

/* How replies leave. send() must not end the session; fds are borrowed. -EMFILE:
 * they could not be duplicated, nothing was sent; 0 otherwise, also where the
 * connection has failed, which aborts the session later. Any function of this floor may
 * call it, also for another session than its own: a client's answer may end an operator's
 * command, and a tick may end a wait. resume():
 * fewer requests wait than before, so the connection may read on; or is_delivering is set, so
 * session_deliver() is to be called. abort(): the
 * session cannot go on, close the connection (later, not inside this call).
 * open_events(), may be NULL: makes the events socket and returns the client's
 * end, which is then the caller's. send_event() sends on it; called as send() is.
 * take_over(), never NULL: from now on this is the connection of `kept`, whose ops and userdata
 * it sets, and its own session is freed. */
struct session_ops {
        int (*send)(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds);
        void (*resume)(void *userdata);
        void (*abort)(void *userdata, const char *why);
        int (*open_events)(void *userdata, int *ret_fd);
        void (*send_event)(void *userdata, const Bfcd__Event *event);
        void (*take_over)(void *userdata, struct session *kept);
};

/* What a session has to do with one quota. */
struct session_share {
        struct quota *quota;
        bool joined;
        struct holding holding; /* where it joined */
        uint64_t peak_bytes;    /* most that it had; counted in quota.peaks_bytes */
        uint64_t *seen;         /* by slot: the id of the extent that was exported, or 0 */
        size_t n_seen;
        struct trim_share trim;
};

struct session_request;  /* a malloc that waits for room */
struct session_delivery; /* a block whose extents are being sent */
TAILQ_HEAD(session_request_list, session_request);
TAILQ_HEAD(session_delivery_list, session_delivery);

struct session {
        struct broker *broker;
        const struct session_ops *ops;
        void *userdata;
        enum session_state state;
        bool admin;
        unsigned n_hellos;
        bool closed;         /* all its blocks are free */
        bool goodbye;        /* it said so: nothing of it is mapped any more */
        uint64_t goodbye_id; /* of the request, answered when all is freed */
        bool exits;          /* its process said that it is about to exit */
        struct credentials who;
        struct tenant *tenant; /* NULL before the hello, and for admins */
        uint32_t index;        /* in the ledger; LEDGER_NONE before the hello */
        uint64_t id;
        char name[64];
        uint64_t born_ms;
        struct session_share *shares; /* one for each quota that its tenant had when it came */
        size_t n_shares;
        struct session_request_list requests;
        size_t n_requests;         /* waiting: at SESSION_MAX_PENDING the connection reads no more */
        struct shared_waits waits; /* of these, those that wait for names */
        struct holds holds;        /* the shared blocks that it has */
        struct session_delivery_list deliveries;
        size_t n_deliveries;
        bool is_delivering; /* the next of these can go out, in a turn: session_deliver() */
        uint64_t sequence;  /* of the last Extents message */
        uint64_t acked_sequence;
        uint32_t n_unacked; /* extents */
        struct retire retire;
        struct trim_order *order;      /* an operator's; NULL: none */
        struct broker_device *resumes; /* the same: a device that is resumed for it; NULL: none */
        uint64_t resume_id;            /* of that request */
        uint64_t trim_sequence;        /* of the last Trim */
        uint64_t n_trims;
        uint64_t n_trims_missed;       /* not answered in time */
        bool has_events;               /* it takes events, and answers them */
        bool takes_trims;              /* and those of CAPABILITY_TRIM: Trim, QuotaChanged */
        bool takes_drains;             /* and Draining */
        bool tries_again;              /* a Malloc that is refused may be followed by another try */
        struct client_page *page;      /* what its client says of its cache; NULL: nothing */
        struct session_reload *reload; /* an operator's, NULL: none yet */
        bool can_return;               /* it was granted CAPABILITY_RETURN */
        bool may_return;               /* another process had it, and its client may come back */
        bool has_returned;             /* and it has */
        const char *refusal;           /* why it may not, after all; NULL: no reason. Static */
        char *eviction;                /* the sentence for its client; NULL: no operator evicted it */
        uint32_t n_homecomings;
        struct homecoming *homecoming; /* while it is RETURNING; see restore.h */
        bool in_flight;                /* fds were sent; whether they were read only the kernel knows */
        uint8_t sent_counts[SESSION_MAX_UNACKED]; /* extents of message number i % 64 */
        uint32_t n_lost;                          /* extents that it did not receive, in all */
        uint64_t bytes_in_use;                    /* its own blocks: what is shared is no session's */
        uint64_t peak_bytes_in_use;
        uint64_t n_allocs;
        uint64_t n_refusals;
};

/* who: taken over, also on failure. admin: came in by the admin socket. */
int session_new(struct broker *b, bool admin, struct credentials *who, const struct session_ops *ops,
                void *userdata, struct session **ret);

/* Handles one request of a NEW or LIVE session; replies go by ops->send(), now
 * or later. 0; a negative errno is a violation of the protocol: end the
 * session; *ret_why says which. After a goodbye the session is CLOSING: reap it. */
int session_handle(struct session *s, const Bfcd__Request *request, const char **ret_why);

/* The same for its word on the events socket; nothing happens where the session
 * is over. */
int session_handle_event(struct session *s, const Bfcd__EventReply *reply, const char **ret_why);

/* A turn of a LIVE session that is_delivering: sends blocks in order, a slice of them, as far as the
 * client has acknowledged extents. */
void session_deliver(struct session *s);

/* The connection of a NEW or LIVE session is gone. 0: nothing is held, the
 * session is CLOSING. 1: QUARANTINED: call session_close() when the process has
 * exited or the time is up (not by time where it session_holds_mappings()). */
int session_hang_up(struct session *s);

/* Why it ends where its process does: a goodbye, if it said one in time. */
const char *session_exit_reason(const struct session *s, const char *otherwise);

/* It was given memory that its device cannot take from a process that lives. */
bool session_holds_mappings(const struct session *s);

/* Looks whether the process of a QUARANTINED session can still have something mapped, at n_max of its
 * extents at most. 0: it cannot, each of them was seen without another reference in any process.
 * SESSION_MORE: extents are left to be looked at. SESSION_MAPPED: one is referenced, or that cannot be
 * known; the next call goes on there. */
struct session_look {
        uint32_t export; /* in the ledger, the next one; any number at first */
        uint64_t id;     /* of that record; 0: begin with the session's first */
};
int session_look_for_mappings(struct session *s, struct session_look *look, size_t n_max, size_t *ret_n);

/* It is RETURNING, and what it did not say that it holds is being freed: it takes no request. */
bool session_is_settling(const struct session *s);

/* Begins to free all it holds. `why` for the log. */
void session_close(struct session *s, const char *why);

enum {
        SESSION_MORE = 1, /* call again */
        SESSION_LINGERS,  /* holds nothing but its place: see session_let_go() */
        SESSION_MAPPED,   /* see session_look_for_mappings() */
};

/* Frees at most n_blocks, and lets go of what is shared. 0: all is gone. SESSION_LINGERS: extents that were
 * sent may still be in the socket's queue, in flight, where the kernel counts
 * them against us (an acknowledgement proves nothing: it can be sent unread); so
 * the session keeps its place in its quotas until session_let_go(). */
int session_reap(struct session *s, size_t n_blocks);

/* Blocks, shared blocks, exports and deliveries that it holds. */
size_t session_n_held(const struct session *s);

/* What its client says of its cache, all partitions together, and never more than the session
 * holds. Zeros where it says nothing. */
void session_client_figures(const struct session *s, struct client_figures *ret);

/* How much could come back from the session in a partition, an index into its shares: what its
 * client says lies idle, and never more than it holds there; where the client says nothing,
 * all that it holds there. A hint: clients lie. */
uint64_t session_idle_hint(const struct session *s, uint32_t partition);

/* Nothing is in flight any more; reap again. */
void session_let_go(struct session *s);

/* A process before had it, its client may come back and has not; and it may not any more, so that the
 * quarantine's time is what it has. The latter does nothing where the former is not so. */
bool session_is_awaited(const struct session *s);
void session_stop_awaiting(struct session *s);

/* Whether a successor is to have it: a client's that is not closing. Its requests are dropped, it
 * leaves its quotas, and all that it holds stays in the ledger: free it. */
bool session_may_stay(const struct session *s);
void session_leave_behind(struct session *s);

/* The session must be NEW, or reaped. Takes NULL. */
struct session *session_free(struct session *s);

const char *session_state_name(const struct session *s);

/* ---- for the other files of this floor ------------------------------------ */

void session_send(struct session *s, const Bfcd__Reply *reply);
void session_refuse(struct session *s, uint64_t id, int error, const char *sentence);
void session_done(struct session *s, uint64_t id);

/* Its share of a quota, by the ledger's index. NULL: the quota came after it. */
struct session_share *session_share_of(const struct session *s, uint32_t quota);

/* Its place in the broker, under its index in the ledger. */
void session_enlist(struct session *s);

/* In the quotas of its tenant that were there when it came. -ENOMEM. */
int session_take_shares(struct session *s, uint64_t quotas_end);
void session_leave_shares(struct session *s);

/* What it has of a share's slots, as many as there are by now. -ENOMEM. */
int session_reserve_seen(struct session_share *share);

/* The end of a hello that was granted, of a session with a record in the ledger: its events
 * socket and page, what both can, and the reply. -errno: nothing was sent. */
int session_open_events(struct session *s, const Bfcd__Request *r, int *ret_fd);
void session_grant(struct session *s, const Bfcd__Request *r, int events_fd);
void session_greet(struct session *s, const Bfcd__Request *r, size_t share, int events_fd);
int session_find_share(const struct session *s, const char *partition, size_t *ret);

/* Its bytes may be the most that it had; quota_release_surplus() counts on that. */
void session_note_peak(struct session_share *share);

/* Frees one block of its own. */
void session_free_block(struct session *s, uint32_t index);

/* Joins the quota, unless it has. -EDQUOT, and refused. */
int session_join(struct session *s, struct session_share *share, uint64_t id);

/* SESSION_MAX_DELIVERIES blocks wait for an acknowledgement. True: the request was refused. */
bool session_refuses_delivery(struct session *s, uint64_t id);

/* Begins to deliver a shared block, of which a hold is in delivery; what came of it is told
 * by shared_delivered() or shared_undelivered(), maybe at once. -ENOMEM: nothing was begun. */
int session_deliver_hold(struct session *s, uint64_t id, struct session_share *share, uint32_t block,
                         uint32_t hold);

#endif
