/* A session: one client process, from its hello until all of its memory is freed.
 *
 * A session turns requests into replies and touches no socket. The owner of the connection (or a test)
 * passes it decoded requests and takes its replies. The owner knows no state: it asks the predicates
 * below and calls the entry points.
 *
 * The transitions between the states are in session_states.c:
 *
 *   NEW -> LIVE -> [QUARANTINED ->] CLOSING -> LINGERING -> ENDED
 *   NEW -> SUSPENDED -> LISTING -> RESUMING -> LIVE, of a session of the previous daemon; see resume.h
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SESSION_H
#define BFCD_SESSION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/base/role.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/quota.h"
#include "proto/bfcd.pb-c.h"

#define SESSION_PROTOCOL_VERSION 1u
#define SESSION_MAX_WAIT_MS      600000u /* a longer time in a request counts as this */
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

/* ---- the parts of the other files of this layer -------------------------------- */

/* hello.h */
struct hello_state {
        unsigned n; /* hellos so far */
};

/* request_memory.h, and those of park.h that wait */
TAILQ_HEAD(session_request_list, session_request);
TAILQ_HEAD(park_list, park); /* at most SESSION_MAX_PENDING that its client waits for */
struct request_state {
        struct session_request_list list;
        size_t n; /* waiting, those of shared.h and park.h included */
        struct park_list parks;
};

/* delivery.h */
#define SESSION_MAX_UNACKED 64u /* extents sent and not acknowledged */
TAILQ_HEAD(session_delivery_list, session_delivery);
struct delivery_state {
        struct session_delivery_list list;
        size_t n;
        bool is_due;       /* the next block can be delivered: call session_deliver() in a turn */
        bool in_flight;    /* fds were sent; only the kernel knows whether the client has read them */
        uint64_t sequence; /* of the last Extents message */
        uint64_t acked_sequence;
        uint32_t n_lost;                          /* extents that the client lost, in all */
        uint8_t sent_counts[SESSION_MAX_UNACKED]; /* extents of message number i % 64 */
};

struct ref_at {
        uint32_t shared, ref; /* in the ledger */
};

/* shared.h: the shared blocks that a session has. The ledger has each reference in two lists, its session's and its
 * block's, and both can be long. This is a sorted array, so a reference is found by binary search in any order of
 * attaches. Adding or removing one moves at most 8 KiB. Zeros are an empty list. */
struct refs {
        struct ref_at *list; /* owned; by `shared`, each once */
        size_t n;            /* the list has room for as many as the next power of two */
};

TAILQ_HEAD(shared_wait_list, shared_wait);
struct shared_state {
        struct shared_wait_list waits; /* a session's attaches that wait, at most SHARED_MAX_WAITS */
        struct refs refs;
        uint32_t n_read_only; /* of these references */
};

/* session_states.h */
struct mappings_state {
        uint32_t export; /* the next one to check, in the ledger; LEDGER_NONE: the session's first */
        TAILQ_ENTRY(session) link;
};

/* resume.h */
struct resume_state {
        struct resumption *current; /* while the session is LISTING or RESUMING */
        uint32_t n_begun;           /* times that a connection began to resume the session */
};

/* recall.h */
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

static inline bool recall_is_overdue(const struct recall *r)
{
        return r->session && !r->has_deadline;
}

/* The session has taken or freed bytes there. */
static inline void recall_note(struct recall *r, uint64_t n_added, uint64_t n_freed)
{
        if (!r->session)
                return;
        r->n_added += n_added;
        r->n_freed += n_freed;
}

/* The recalls of one kind of a session. */
struct recall_queue {
        struct recall_list open;
        uint64_t n_events; /* in total */
        uint64_t n_missed; /* recalls that became overdue, in total */
};

struct recall_state {
        struct recall_queue queues[RECALL_KINDS];
        bool ignores_retires; /* Retires are not answered: it takes no events, has hung up, or missed one */
};

/* What the commands of an admin session wait for; all zeros: nothing. */
struct admin_commands {
        struct recall_command *recall; /* see recall.h */
        struct session_reload *reload; /* see reload.h */
        struct broker_device *resumed; /* a device that is being resumed */
        uint64_t resume_id;            /* of that request */
};

/* ---- the shares --------------------------------------------------------------- */

/* The session has no write access to the extent. Ids count up from 1 and never have this bit. */
#define SEEN_READ_ONLY (UINT64_C(1) << 63)
#define SEEN_UNMAPPED  (UINT64_C(1) << 62) /* the client has unmapped it, and gets it again when it needs it */

/* How much the session has of the quota; see share.h. */
struct usage {
        struct session *session;
        struct quota *quota;
        uint32_t n_blocks;
        bool largest_is_old; /* its block was freed: largest_bytes is an upper bound */
        uint64_t bytes;      /* of these blocks */
        uint64_t largest_bytes;
        struct charge direct;    /* see request_memory.h */
        uint64_t bytes_contexts; /* of the direct charge, as the client says */
        TAILQ_ENTRY(usage) of_quota;
};

/* Of blocks and of the direct charge. */
static inline uint64_t usage_bytes(const struct usage *h)
{
        return h->bytes + h->direct.n_bytes;
}

/* What a client could return there, as it reports it. Only a hint, since clients may lie; never more than it has. */
struct session_hint {
        uint64_t idle_bytes;     /* of its cache; all bytes that it has, if it reports nothing */
        struct client_idle park; /* blocks that could be parked */
        bool has_fn;             /* its program gives memory back */
        uint64_t read_ms;        /* 0: never */
};

/* A session's share of a quota, as one that can be asked: for each kind but Retire. All zeros at first. */
struct recall_share {
        struct recall recall;    /* the open one */
        struct session *session; /* NULL: not listed, so it is not asked */
        struct session_share *share;
        /* The broker's recalls.trim_clock when it last had nothing more to return: to others' requests, and to its own.
         * A request that began to ask before that does not ask it again. */
        uint64_t spent_clocks[2];
        struct session_hint hint;
        TAILQ_ENTRY(recall_share) link; /* of its quota, or its partition */
};

/* trim.h */
struct trim_share {
        struct recall_share asked;
        uint64_t empty_since; /* the quota's n_changes, when it had no range; 0: never */
        size_t cursor;        /* slots before it were searched without success */
        uint32_t *n_own;      /* blocks, by slot */
        size_t n_slots;
};

/* recall.h */
struct pressure_share {
        struct recall_share asked;
        uint64_t n_bytes; /* asked for */
        bool wakes;       /* it was asked to wake blocks instead */
        bool is_own;      /* for a request of the session itself */
};

/* Many fields: what was asked of the session, once for Trims and once for Pressures, is most of them. */
struct session_share {
        struct quota *quota;
        bool joined;
        bool is_barred;      /* no lease or quota could be chosen: it cannot join; quota: the tenant's */
        struct usage usage;  /* once it joined */
        uint64_t peak_bytes; /* largest usage; counted in quota.peaks_bytes */
        uint64_t *seen;      /* by slot: the id of the extent that was exported, or 0; with these flags */
        size_t n_seen;
        uint64_t listed_direct_bytes; /* while the session is resumed: what the client says that it charged */
        uint64_t listed_context_bytes;
        bool is_direct_listed;
        bool is_measured, is_outside_logged; /* outside_bytes was, see outside.h */
        uint64_t outside_bytes;
        struct trim_share trim;
        struct pressure_share pressure;
};

/* ---- the session --------------------------------------------------------------- */

struct session_goodbye {
        uint64_t id;   /* of the request whose answer the client waits for; 0: none */
        bool exits;    /* the client said that its process is about to exit */
        char *failure; /* why the daemon ended the connection; NULL: it did not */
};

struct session_statistics {
        uint64_t peak_bytes_in_use; /* in the session's own blocks, without shared ones */
        uint64_t peak_bytes_direct;
        uint64_t n_allocs;
        uint64_t n_refusals;
        uint64_t waited_ns; /* sum over requests that were not served at once, also cancelled ones */
};

/* Many fields: one part for each subject of the protocol that keeps state between two messages. */
struct session {
        struct broker *broker;
        const struct session_ops *ops;
        void *userdata;
        enum session_state state; /* session_transit() sets it */
        uint64_t deadline_ms;     /* of the state; 0: none */
        bool is_watched;          /* the connection will report the exit of the client's process */
        enum role role;           /* only clients have a tenant; see session_handle() */
        uint64_t lease_socket;    /* of leases, by which it came: its number; 0: none */
        struct credentials who;
        struct tenant *tenant; /* NULL before the hello, and of other roles than clients */
        uint32_t index;        /* in the ledger; LEDGER_NONE before the hello */
        uint64_t id;
        char name[64];
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
        struct recall_state recall;
        struct admin_commands *admin; /* NULL: it is no admin session */
};

/* ---- questions ------------------------------------------------------------- */

enum session_limit { LIMIT_NONE, LIMIT_HELLO, LIMIT_LIST, LIMIT_QUARANTINE };

/* What is true of a state. */
struct session_state_facts {
        const char *name; /* in lists */
        enum session_limit limit;
        bool may_read;
        bool is_connected;   /* has a client that was greeted */
        bool is_quarantined; /* counts in tenant.n_quarantined */
        bool is_closing;
        Bfcd__Request__BodyCase only; /* the only request that is allowed; 0: all */
        const char *fault;            /* of any other request */
        const char *expired; /* why the client is disconnected at the deadline; NULL: it has left already */
};
const struct session_state_facts *session_state_facts(const struct session *s);

bool session_is_greeted(const struct session *s);   /* its hello was granted */
bool session_is_live(const struct session *s);      /* serves requests */
bool session_is_connected(const struct session *s); /* greeted, and not disconnected */
bool session_is_suspended(const struct session *s);
bool session_is_closing(const struct session *s);
bool session_has_events(const struct session *s);      /* it takes events, and answers them */
bool session_is_unresponsive(const struct session *s); /* it has an overdue recall, of any kind */

/* A number of its lease that no other lease has or had, of the first where it is in several; 0: it is in none. */
uint64_t session_lease_number(const struct session *s);

/* Bytes of the client may be read and handled now. */
bool session_may_read(const struct session *s);

/* The next block can be delivered. */
bool session_may_deliver(const struct session *s);

/* Fds that were sent may be unread. */
bool session_has_fds_in_flight(const struct session *s);

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

/* Reads what the client could return in a partition, an index into the shares. */
struct session_hint session_read_hint(const struct session *s, uint32_t partition);

/* ---- for the other files of this layer ------------------------------------- */

/* By the quota's index in the ledger. NULL: the quota was added after the hello. */
struct session_share *session_share_of(const struct session *s, uint32_t quota);

/* By the partition's name; the first share for "". -ENOENT. */
int session_find_share(const struct session *s, const char *partition, size_t *ret);

/* Makes `seen` as long as the arena has slots. -ENOMEM. */
int session_reserve_seen(struct session_share *share);

/* The session's own blocks in all partitions, without shared ones; its direct charges, and the contexts in them. */
uint64_t session_bytes_in_use(const struct session *s);
uint64_t session_direct_bytes(const struct session *s);
uint64_t session_context_bytes(const struct session *s);

/* Why the request is a violation of the protocol in this state; NULL: it is none. */
const char *session_request_fault(const struct session *s, const Bfcd__Request *request);

void session_send(struct session *s, const Bfcd__Reply *reply);
void session_refuse(struct session *s, uint64_t id, int error, const char *sentence);
void session_refuse_format(struct session *s, uint64_t id, int error, const char *format, ...)
        __attribute__((format(printf, 4, 5)));
void session_refuse_final(struct session *s, uint64_t id, int error, const char *sentence, bool is_final);
void session_done(struct session *s, uint64_t id);

/* True: the request came from the client socket and was refused. `what` ("trim is") begins the sentence. */
bool session_refuse_client(struct session *s, uint64_t id, const char *what);

/* Other characters than printable ASCII become '?'. */
void session_set_name(struct session *s, const char *name);

/* Puts it in the broker's table, by its index in the ledger. */
void session_enlist(struct session *s);

/* ---- events ------------------------------------------------------------------ */

/* Events that tell clients what changed: the limits of their quotas, and devices that drain. The event queue bounds a
 * client that does not read; it is not waited for. */

/* Tells sessions of the limits that were changed: of quotas with sessions.limit_changed. */
void tell_limits(struct broker *b);

/* Tells all sessions that have memory on the device that it drains, or serves again. */
void tell_drain(struct broker *b, const struct broker_device *d, bool is_over);

/* Tells a new session which of its partitions are draining. */
void tell_drains_of(struct session *s);

#endif
