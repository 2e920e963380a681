/* A session: one client process, from its hello until all of its memory is freed.
 *
 * A session turns requests into replies and touches no socket. The owner of the connection (or a test)
 * passes it decoded requests and takes its replies. The owner knows no state: it asks the predicates
 * below and calls the entry points.
 *
 * The states, their time limits and the transitions are one table in session.c:
 *
 *   NEW -> LIVE -> [QUARANTINED ->] CLOSING -> LINGERING -> ENDED
 *   NEW -> SUSPENDED -> LISTING -> RESUMING -> LIVE, of a session of the previous daemon; see resume.h
 *
 * Invariant: stats.bytes_in_use is the sum of the session's blocks in the ledger, without shared ones.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_H
#define BFCD_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/session/reload.h"
#include "daemon/session/command.h"
#include "daemon/session/recall.h"
#include "daemon/session/retire.h"
#include "daemon/session/pressure.h"
#include "daemon/session/trim.h"
#include "daemon/session/resume.h"
#include "daemon/memory/broker.h"
#include "daemon/base/role.h"
#include "daemon/session/delivery.h"
#include "daemon/session/hello.h"
#include "daemon/session/mappings.h"
#include "daemon/session/request.h"
#include "daemon/session/share.h"
#include "daemon/session/shared.h"
#include "proto/bfcd.pb-c.h"

#define SESSION_REAP_SLICE       64u    /* blocks freed in one turn of the loop */
#define SESSION_HELLO_TIMEOUT_MS 10000u /* 10 s for the hello, and for the list of a resumed client */
#define SESSION_SENTENCE_BYTES   1024

enum session_state {
        SESSION_NEW,         /* before a hello is granted */
        SESSION_LIVE,        /* serves requests */
        SESSION_QUARANTINED, /* the client disconnected without a goodbye, and its process may live */
        SESSION_SUSPENDED,   /* of the previous daemon; its client may resume it */
        SESSION_LISTING,     /* resumed; the client lists its memory */
        SESSION_RESUMING,    /* memory that the client did not list is freed, in slices */
        SESSION_CLOSING,     /* all memory is freed, in slices */
        SESSION_LINGERING,   /* has nothing but its place, while fds are in flight, and direct charges */
        SESSION_ENDED,       /* has no place in the ledger */
        SESSION_STATE_COUNT,
};

enum session_event {
        EVENT_ADMITTED,           /* its hello was granted */
        EVENT_RESTORED,           /* made from the ledger of the previous daemon */
        EVENT_RESTORED_RESUMABLE, /* the same, and its client may resume it */
        EVENT_RESUMED,            /* its client resumes it */
        EVENT_LISTED,             /* the client's list is complete */
        EVENT_RECONCILED,         /* what was not listed is freed */
        EVENT_DISCONNECTED,       /* its connection is gone, and it has memory */
        EVENT_DISCONNECTED_EMPTY, /* the same, and it has none */
        EVENT_RESUME_FORBIDDEN,   /* its client may not resume it any more */
        EVENT_CLOSED,             /* it is to end */
        EVENT_REAPED,             /* its memory is freed */
        EVENT_REMOVED,            /* it has left the ledger and its quotas */
        EVENT_LEFT,               /* a successor inherits it */
        EVENT_COUNT,
};

/* What a session needs of its connection. Functions of this layer call these also for other sessions
 * than the one at hand: a client's answer may end an admin command, a tick may end a wait. None of
 * them may end the session inside the call.
 *
 * send(): takes over the fds. If the connection has failed, it reports that later.
 * ready(): a turn is due. Fewer requests wait than before, or session_may_deliver().
 * changed(): the state has changed. See session_deadline_ms(), session_has_work(). May be NULL.
 * abort(): the session cannot continue: disconnect it.
 * open_events(), may be NULL: makes the events socket and returns the client's end, owned by the caller.
 * send_event(): sends on that socket.
 * resume_kept(), never NULL: becomes the connection of `kept`, sets its ops and userdata, and frees its
 * own session. */
struct session_ops {
        void (*send)(void *userdata, const Bfcd__Reply *reply, const int *fds, size_t n_fds);
        void (*ready)(void *userdata);
        void (*changed)(void *userdata);
        void (*abort)(void *userdata, const char *why);
        int (*open_events)(void *userdata, int *ret_fd);
        void (*send_event)(void *userdata, const Bfcd__Event *event);
        void (*resume_kept)(void *userdata, struct session *kept);
};

struct session_goodbye {
        bool is_due; /* the client waits for the answer to request `id` */
        uint64_t id;
        bool exits;      /* the client said that its process is about to exit */
        bool has_exited; /* the process has */
};

struct session_statistics {
        uint64_t bytes_in_use; /* in the session's own blocks, without shared ones */
        uint64_t peak_bytes_in_use;
        uint64_t peak_bytes_direct;
        uint64_t n_allocs;
        uint64_t n_refusals;
        uint64_t waited_ns; /* sum over requests that were not served at once, also cancelled ones */
};

struct session {
        struct broker *broker;
        const struct session_ops *ops;
        void *userdata;
        enum session_state state; /* session_transit() sets it */
        uint64_t deadline_ms;     /* of the state; 0: none */
        bool is_watched;          /* the connection reports the exit of the client's process */
        bool admin;               /* true for admins and monitors: it has no tenant, and sees everything */
        bool is_monitor;          /* of these: it changes nothing, see session_handle() */
        struct credentials who;
        struct tenant *tenant; /* NULL before the hello, and if admin */
        uint32_t index;        /* in the ledger; LEDGER_NONE before the hello */
        uint64_t id;
        char name[64];
        uint64_t born_ms;
        struct session_share *shares; /* one for each quota that the tenant had at the hello */
        size_t n_shares;
        struct hello_state hello;
        struct request_state requests;
        struct delivery_state delivery;
        struct shared_state shared;
        struct mappings_state mappings;
        struct resume_state resume;
        struct session_goodbye goodbye;
        struct session_statistics stats;
        struct client_page *page; /* statistics of the client's cache; NULL: none */
        char *eviction;           /* the sentence for the client; NULL: no operator evicted the session */
        struct session_reload *reload; /* an operator's, NULL: none yet */
        struct recall_state recall;
        struct command_state command;
        bool has_events; /* it takes events, and answers them */
};

/* ---- entry points --------------------------------------------------------- */

/* who: taken over, also on failure. -ENOMEM. */
int session_new(struct broker *b, enum role role, struct credentials *who, const struct session_ops *ops,
                void *userdata, struct session **ret);

/* Gives a session of the previous daemon its connection. has_exited: the client's process is gone. */
void session_attach(struct session *s, const struct session_ops *ops, void *userdata, bool has_exited);

/* is_watched: whether the connection will call session_exit() when the process exits. */
void session_set_watched(struct session *s, bool is_watched);

/* session_handle() and session_handle_event(), in request.h, take what the client sends.
 * session_deliver(), in delivery.h, is a turn while session_may_deliver(). */

/* The connection is gone. 1: the session stays until session_exit() or its deadline. 0: it is closing, and does not wait. */
int session_hang_up(struct session *s);

/* The client's process has exited, or nothing waits for that any more. */
void session_exit(struct session *s);

/* The deadline has passed: the session is closed, or its connection aborted. */
void session_expire(struct session *s);

/* Begins to free all that the session has. why: for the log. */
void session_close(struct session *s, const char *why);

enum {
        SESSION_MORE = 1, /* call again */
        SESSION_LINGERS,  /* as below: call session_end_linger() when no fds are in flight */
        SESSION_DONE,     /* free it */
};

/* A slice of work for a session that session_has_work(): about as much as freeing n_blocks. 0: the session
 * may be read again. Negative: disconnect it, *ret_why says why. */
int session_work(struct session *s, size_t n_blocks, const char **ret_why);

/* Frees at most n_blocks of a closing session, and detaches shared blocks. 0: all is gone. SESSION_LINGERS:
 * fds that were sent may still be in the socket's queue, where the kernel counts them as ours. An
 * acknowledgement proves nothing, because a client can send it unread. So the session keeps its place in
 * its quotas until session_end_linger(). A session with direct charges keeps them until its process has ended, too. */
int session_reap(struct session *s, size_t n_blocks);

/* No fds are in flight any more: reap again. */
void session_end_linger(struct session *s);

/* A successor inherits the session: drops its requests and its places in quotas; all its memory stays in
 * the ledger. Free it after that. */
void session_leave_behind(struct session *s);

/* The session must be NEW, or reaped. Takes NULL. */
struct session *session_free(struct session *s);

/* Forbids the client to resume the session, and ends a resume that is in progress; nothing happens if it could not be
 * resumed. */
void session_forbid_resume(struct session *s);

/* ---- questions ------------------------------------------------------------- */

bool session_is_greeted(const struct session *s);   /* its hello was granted */
bool session_is_live(const struct session *s);      /* serves requests */
bool session_is_connected(const struct session *s); /* greeted, and not disconnected */
bool session_is_suspended(const struct session *s);
bool session_is_closing(const struct session *s);

/* A number of its lease that no other lease has or had, of the first where it is in several; 0: it is in none. */
uint64_t session_lease_number(const struct session *s);

/* Bytes of the client may be read and handled now. */
bool session_may_read(const struct session *s);

/* The next block can be delivered. */
bool session_may_deliver(const struct session *s);

/* session_work() has something to do. */
bool session_has_work(const struct session *s);

/* It has direct charges, and waits with them for session_exit(). */
bool session_waits_for_exit(const struct session *s);

/* Fds that were sent may be unread. */
bool session_has_fds_in_flight(const struct session *s);

/* A successor can inherit it. */
bool session_can_stay(const struct session *s);

/* When to call session_expire(), by clock_ms(); 0: never. */
uint64_t session_deadline_ms(const struct session *s);

/* Blocks, shared blocks, exports and deliveries of the session. */
size_t session_n_records(const struct session *s);

const char *session_state_name(const struct session *s);

/* For the log: "session 41 (tenant 'vision', uid 1000, pid 977, train.py)". Returns its text. */
struct session_label {
        char text[256];
};
const char *session_label(const struct session *s, struct session_label *ret);
#define SESSION_LABEL(s) session_label(s, &(struct session_label){ { 0 } })

/* Statistics of the client's cache as the client reports them, over all partitions, limited to what the
 * session has. Zeros if it reports nothing. */
void session_client_usage(const struct session *s, struct client_usage *ret, uint64_t *ret_bytes_outside);

/* How much the client could return in a partition, an index into the shares: its idle bytes as it reports
 * them; all of its bytes there if it reports nothing. Never more than it has. Only a hint, since clients
 * may lie. */
uint64_t session_idle_hint(const struct session *s, uint32_t partition);

/* What it could park there, and whether its program gives memory back, as its client reports it. */
struct session_pressure_hint {
        struct client_idle idle;
        bool has_fn;
};
struct session_pressure_hint session_pressure_hint(const struct session *s, uint32_t partition);

/* ---- for the other files of this layer ------------------------------------- */

/* The only place where the state changes. why: of EVENT_CLOSED, for the log. An event that the table does
 * not have for the state changes nothing. */
void session_transit(struct session *s, enum session_event event, const char *why);

/* Why the request is a violation of the protocol in this state; NULL: it is none. */
const char *session_request_fault(const struct session *s, const Bfcd__Request *request);

void session_send(struct session *s, const Bfcd__Reply *reply);
void session_refuse(struct session *s, uint64_t id, int error, const char *sentence);
void session_refuse_format(struct session *s, uint64_t id, int error, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
void session_refuse_final(struct session *s, uint64_t id, int error, const char *sentence, bool is_final);
void session_done(struct session *s, uint64_t id);

/* Other characters than printable ASCII become '?'. */
void session_set_name(struct session *s, const char *name);

/* Puts it in the broker's table, by its index in the ledger. */
void session_enlist(struct session *s);

#endif
