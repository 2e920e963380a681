/* Recalls: an event asks a client to give memory back, and the client has a time-out to answer it.
 *
 * There are three kinds: a Retire has extents unmapped (see retire.h), a Trim has idle memory
 * returned (see trim.h), a Pressure has blocks parked (see pressure.h). A recall begins, is sent under the session's
 * next sequence number, and ends with the answer to that number or with the session. The recalls of one kind
 * have the same time-out, so each of the broker's lists is in the order of its deadlines.
 *
 * A recall that is not answered in time is overdue: it loses its deadline and stays open. The
 * client is unresponsive then, and its kind decides what that means.
 *
 * Invariants: only a LIVE session has recalls; in its queue those that were sent come first, by
 * ascending sequence; a recall is in the broker's list exactly while it
 * has a deadline; those without one come first in a session's queue, and tenant.n_unresponsive counts the
 * sessions that have any.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RECALL_H
#define BFCD_RECALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/memory/broker.h"

struct session;
struct recall_command;
struct session_share;

/* The first member of each kind's struct. */
struct recall {
        enum recall_kind kind;
        struct session *session; /* NULL: not open */
        uint64_t sequence;       /* of the event; 0: it was not sent */
        uint64_t since_ms;
        bool has_deadline;
        struct recall_command *command; /* an admin command that waits for the answer; or NULL */
        uint64_t n_added, n_freed;      /* bytes that the session took and freed there since then */
        TAILQ_ENTRY(recall) of_session, of_broker;
};

/* The recalls of one kind of a session. */
struct recall_queue {
        struct recall_list open;
        uint64_t n_events; /* in total */
        uint64_t n_missed; /* recalls that became overdue, in total */
};

/* A session's part. */
struct recall_state {
        struct recall_queue queues[RECALL_KINDS];
        bool ignores_retires; /* Retires are not answered: it takes no events, has hung up, or missed one */
};

/* The part of trim.h in a session_share. All zeros at first. */
struct trim_share {
        struct recall recall;    /* the open Trim */
        struct session *session; /* NULL: not listed, so it is not asked */
        struct session_share *share;
        uint64_t bytes_held;
        /* The broker's recalls.trim_clock when it last had nothing more to return. A request that began to ask
         * before that does not ask it again. */
        uint64_t spent_clock;
        uint64_t empty_since;   /* the quota's n_changes, when it had no range; 0: never */
        uint64_t hint, hint_ms; /* idle bytes as its client reports, and when they were read */
        size_t cursor;          /* slots before it were searched without success */
        uint32_t *n_own;        /* blocks, by slot */
        size_t n_slots;
        TAILQ_ENTRY(trim_share) of_quota;
};

struct pressure_hint {
        uint64_t bytes, since_ms; /* blocks that could be parked, and the oldest last use */
        bool has_fn;
        uint64_t read_ms; /* 0: never */
};

/* The part of pressure.h in a session_share. All zeros at first. */
struct pressure_share {
        struct recall recall;    /* the open Pressure */
        struct session *session; /* NULL: not listed, so it is not asked */
        struct session_share *share;
        uint64_t n_bytes;         /* asked for */
        bool wakes;               /* it was asked to wake blocks instead */
        bool is_own;              /* for a request of the session itself */
        uint64_t spent_clocks[2]; /* as that of struct trim_share; of others' requests, and its own */
        struct pressure_hint hint;
        TAILQ_ENTRY(pressure_share) of_partition;
};

void recall_init(struct recall_state *state);

/* Opens a recall; its time-out begins now. */
void recall_begin(struct recall *r, enum recall_kind kind, struct session *s, uint64_t now_ms);

/* Returns the sequence number for its event, which is to be sent now. */
uint64_t recall_number(struct recall *r);

/* The session has taken or freed bytes there. */
static inline void recall_note(struct recall *r, uint64_t n_added, uint64_t n_freed)
{
        if (!r->session)
                return;
        r->n_added += n_added;
        r->n_freed += n_freed;
}

void recall_clear_deadline(struct recall *r);
void recall_end(struct recall *r);

static inline bool recall_is_overdue(const struct recall *r)
{
        return r->session && !r->has_deadline;
}

/* The session has an overdue recall, of any kind. */
bool recall_is_unresponsive(const struct session *s);

/* The open recall with this number, of any kind; NULL: there is none. */
struct recall *recall_find(struct session *s, uint64_t sequence);

/* The client answers. -EPROTO: no such open recall; *ret_why says so. */
int recall_answer(struct session *s, uint64_t sequence, const char **ret_why);

/* The session was resumed, and is LIVE: it answers from now on. */
void recall_begin_resumed(struct session *s);

/* The session will answer no Trim and no Pressure any more. */
void recall_end_session(struct session *s);

/* Marks recalls overdue whose time is up. */
void recall_tick(struct broker *b, uint64_t now_ms);

/* The invariants of one kind; slow. NULL, or a sentence. */
const char *recall_check(const struct broker *b, enum recall_kind kind);

#endif
