/* The broker: everything the daemon owns, made from the config: devices with
 * their workers, partitions, tenants with their quotas, the ledger, and the
 * list of sessions. It has no socket and no loop; unit tests and fuzzers make
 * one and drive sessions on it directly.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_BROKER_H
#define BFCD_BROKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/queue.h>

#include "daemon/config.h"
#include "daemon/devices.h"
#include "daemon/ledger.h"
#include "daemon/log.h"
#include "daemon/pages.h"
#include "daemon/partition.h"
#include "daemon/quota.h"
#include "daemon/remains.h"
#include "daemon/store.h"
#include "daemon/tenant.h"
#include "daemon/worker.h"
#include "device/device.h"

struct session;
struct reloads;    /* the session floor's, see reload.h; NULL: nothing can be reloaded */
struct retirement; /* the session floor's, see retire.h */
TAILQ_HEAD(retirement_list, retirement);
struct shared_name; /* the same, see shared.h */
TAILQ_HEAD(shared_name_list, shared_name);
struct trim_share; /* the same, see trim.h */
TAILQ_HEAD(trim_share_list, trim_share);

struct drain;      /* see drain.h */
struct trim_order; /* the session floor's, see order.h */

struct broker_device {
        const struct config_device *config;
        struct device *device;
        struct worker *worker;
        struct standby *standby;
        char name[sizeof(((struct device_facts *)0)->name)]; /* the maker's */
        uint64_t bytes_total;                                /* by its own word; 0: not bounded by it */
        uint64_t others_bytes; /* in use there when the daemon began; UINT64_MAX: not known */
        bool is_lost;
        struct drain *drain;      /* NULL: it never was */
        struct trim_order *order; /* the session floor's: what lies idle is asked for, while it drains */
        uint64_t asked_ms;        /* the same: when that ended */
};

struct broker {
        const struct config *config; /* in force */
        struct config *own_config;   /* the same, where it came by a reload; NULL: it is borrowed */
        char *config_text;           /* as YAML, for the operators */
        struct store *store;         /* borrowed; NULL: nothing outlives the process */
        struct punch *punch;         /* borrowed; NULL: workers destroy host memory */
        struct ledger *ledger;
        struct remains *remains;     /* of another process, while the broker is made of it; NULL: none */
        struct kept_record *awaited; /* sessions of another process, by id: the session floor's */
        size_t n_awaited_slots;
        size_t n_awaited;    /* of these, those that may come back and have not */
        uid_t *awaited_uids; /* whose they were at the start, sorted; the session floor's */
        size_t n_awaited_uids;
        struct kept_record *kept; /* extents that this process was begun with, by id */
        size_t n_kept;
        uint64_t extents_end;   /* ids from here on were given by this process */
        uint32_t taken_blocks;  /* from another process */
        uint64_t taken_bytes;   /* of its extents */
        uint64_t taken_ns;      /* that took so long */
        struct devices *opened; /* the broker's own; NULL: it was given them */
        struct broker_device *devices;
        size_t n_devices;
        struct partition *partitions;
        size_t n_partitions;
        struct keepers keepers;
        struct tenant *tenants; /* with those that the config has no more, until they are empty */
        size_t n_tenants;
        struct tenant **order; /* those of the config, as it lists them: the first that matches counts */
        size_t n_order;
        struct tenant *default_tenant; /* NULL: none */
        struct matcher *matcher;       /* of the same config */
        struct quota **quotas;      /* by index in the ledger; only of blocks' quotas, others may be gone */
        struct ledger_limits room;  /* of the ledger */
        struct session **sessions;  /* by index in the ledger; NULL: no such */
        size_t n_session_slots;     /* one past the last that was ever used */
        size_t n_sessions;          /* that have said hello, quarantined and closing ones included */
        size_t n_client_sessions;   /* of these, those that are no admin's */
        size_t n_promised_sessions; /* places of tenants' shares that they do not use: no other tenant's */
        struct retirement_list retirements; /* of all sessions, the oldest first */
        void *shared_names;                 /* a tree of all that are published or waited for */
        struct shared_name_list shared_due; /* of these, those whose waiters can be served */
        size_t n_shared_waits;
        size_t n_shared_slots;   /* of sessions, that are still to be looked at for waits whose time is up */
        uint64_t shared_now_ms;  /* by this time */
        struct reloads *reloads; /* borrowed */
        bool may_have_gone;      /* something that was removed from the config may be empty by now */
        bool has_removed;        /* there was such a quota when that was last looked for */
        uint64_t n_visits;       /* of quotas because they changed, ever: for tests */
        struct trim_share_list trims; /* Trims that are waited for, the oldest first */
        uint64_t trim_clock;          /* counts what happens with them */
        size_t n_drains;              /* devices that have been drained */
        uint64_t started_ms;
        uint64_t settled_ms;              /* when it was last asked for what escaped */
        bool may_settle;                  /* of some quota its device may have back what escaped */
        struct watch *watch;              /* of destroyed extents */
        struct log_limits refusal_logs;   /* of hellos, by users */
        bool has_accounts;                /* lines of the log are due later: accounting_tick() */
        struct log_limits return_logs[5]; /* of sessions that come back, by what is wrong with them */
        void (*retire)(struct broker *b, const uint32_t *extents, size_t n_extents);
        bool (*lets_go)(const struct broker *b, uint32_t extent);
        void (*wake)(void *userdata); /* may be NULL */
        void *userdata;
        /* A limit was lowered below what is held: so much is wanted back of the quota's
         * sessions. May be NULL. */
        void (*want_back)(struct broker *b, struct quota *q, uint64_t n_bytes);
        bool (*trim)(struct broker *b, struct quota *q, struct quota_request *first, int refusal,
                     uint64_t missing);
};

/* A session or an extent that this process was begun with. */
struct kept_record {
        uint64_t id;
        uint32_t index; /* in the ledger; it may be another's by now */
};

/* By id, for qsort() and bsearch(). */
int kept_record_compare(const void *x, const void *y);

struct broker_options {
        const struct config *config;
        struct store *store;            /* borrowed, outlives the broker; may be NULL */
        struct punch *punch;            /* the same; see arena.h */
        struct devices *devices;        /* borrowed, outlive the broker; NULL: it opens its own */
        bool inline_workers;            /* for tests, see worker.h */
        void (*notify)(void *userdata); /* from a worker's thread: call broker_poll() soon */
        void (*wake)(void *userdata);   /* from the caller's own: call broker_turn() and shared_turn() soon */
        void *userdata;
        /* Sessions must let go of these extents: retire_extents(), and whether they
         * will: retire_lets_go(). Or NULL where every device empties mappings by
         * itself. See arena.h. */
        void (*retire)(struct broker *b, const uint32_t *extents, size_t n_extents);
        bool (*lets_go)(const struct broker *b, uint32_t extent);
        /* trim_ask(), or NULL: no session is asked for what lies idle in it. See quota.h. */
        bool (*trim)(struct broker *b, struct quota *q, struct quota_request *first, int refusal,
                     uint64_t missing);
        /* trim_want_back(), or NULL. */
        void (*want_back)(struct broker *b, struct quota *q, uint64_t n_bytes);
};

/* Makes everything, and backs preallocating partitions (this may take its
 * time). Where the store has the ledger of another process, all that was handed out by that is
 * as it was: session_restore_all() has the sessions go on. What cannot be is closed, and said in
 * the log. On failure one sentence goes to ret_sentence. */
int broker_new(const struct broker_options *options, struct broker **ret, char *ret_sentence,
               size_t n_sentence);

/* Shared blocks that a session may have; and so many are all sessions' at the most. */
#define BROKER_HOLDS 1024u
uint64_t broker_max_holds(const struct config *c);

/* About as many fds as the config lets sessions and extents take, with some for everything
 * else: with fewer somebody may be turned away before the limits say so. */
uint64_t broker_wants_fds(const struct config *c);

/* No session may be left. Takes NULL. Destroys every extent, without a look at
 * what escapes: the process is about to end. */
struct broker *broker_free(struct broker *b);

/* Ends it for a successor, who goes on with the store: every extent, and the ledger, stays. No
 * session may be left but those that session_leave_behind() left. */
struct broker *broker_leave(struct broker *b);

/* Comes first, while sessions are there: from now on no extent is given back. */
void broker_prepare_leave(struct broker *b);

/* It has come so far that crashes of before were not the ledger's fault. */
void broker_is_well(struct broker *b);

/* Delivers what the workers have finished, and notes what it says of the devices:
 * one that is lost fails all of its partitions, those who wait there too. */
void broker_poll(struct broker *b);

/* One turn for requests that wait; and whether any are to be looked at. */
void broker_turn(struct broker *b);
bool broker_is_due(const struct broker *b);

/* Something is to be done in a turn, or when time has passed. */
void broker_wake(const struct broker *b);

/* Memory that escaped is asked for once a second. Requests that wait for others are
 * refused when their time is up, and sessions that do not let go are late, or
 * ended, those that do not answer a Trim deaf, and those who wait for a name have waited long
 * enough: call broker_tick(), retire_tick(), trim_tick() and shared_tick() now and then while
 * there are any. */
bool broker_is_blocked(const struct broker *b);
void broker_tick(struct broker *b);

/* Looks after frees were put off: call broker_look_again() QUOTA_ROUND_MS later. */
bool broker_is_put_off(const struct broker *b);
void broker_look_again(struct broker *b);

/* Looks in all quotas for unreclaimed memory that the devices are to be asked for: also after a drain
 * has ended. */
void broker_look_for_escapes(struct broker *b);

/* A session of a tenant has a place in the table, or has it no longer. */
void broker_session_begins(struct broker *b, struct tenant *t);
void broker_session_ends(struct broker *b, struct tenant *t);

/* Places that are promised to tenants, counted again for a new config. */
void broker_promise_sessions(struct broker *b);

/* Whether a new session of the tenant has a place. -EDQUOT, and a sentence. */
int broker_admits(const struct broker *b, const struct tenant *t, char *ret_sentence, size_t n_sentence);

/* A quota of a session that ended, or of a change of the config: if it was removed, it
 * may be freed at the next turn. */
void broker_note_leave(struct broker *b, const struct quota *q);

/* A place for a tenant; NULL: there is none, so many that were removed are not empty yet. And
 * whether there are so many. */
struct tenant *broker_tenant_place(struct broker *b);
bool broker_has_places(const struct broker *b, size_t n);
void broker_leave_place(struct broker *b, struct tenant *t);

/* A quota of a tenant, at the end of its list. In *options all is the caller's that is not of
 * the broker: the tenant's limits, and what is left of it. Fails as quota_new() does. */
int broker_make_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options);

/* One more quota of a tenant, at the end of its list. partition: the broker's index.
 * Fails as quota_new() does. */
int broker_add_quota(struct broker *b, struct tenant *t, size_t partition, const struct config_quota *from,
                     uint64_t reserve_bytes);

/* Jobs that workers have not finished yet. */
/* Destroyed extents of host memory that other processes have open: call broker_look() every so
 * many milliseconds while broker_watches(). */
#define BROKER_LOOK_MS 250
bool broker_watches(const struct broker *b);
void broker_look(struct broker *b);

/* What is ready in advance follows the config; and what the partitions can still be charged, where no
 * worker's result comes with a change of that. */
void broker_set_standby(struct broker *b);
void broker_stand_by(struct broker *b);

/* When memory that is kept is given back next, or what is ready in advance is made again, by clock_ms();
 * 0: never. And: does it. */
uint64_t broker_keeps_until(const struct broker *b);
void broker_expire_kept(struct broker *b);

size_t broker_n_pending(const struct broker *b);

/* Every invariant of every floor below; slow. 0, or -EBADMSG and a sentence. */
int broker_check(const struct broker *b, const char **ret_why);

#endif
