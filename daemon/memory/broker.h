/* The broker: all objects of the daemon, made from the config: devices with their workers, partitions,
 * tenants with their quotas, the ledger, and the table of sessions. It has no socket and no loop; unit
 * tests and fuzzers make one and use sessions on it directly.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_BROKER_H
#define BFCD_BROKER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/queue.h>

#include "daemon/config/config.h"
#include "daemon/memory/capacity.h"
#include "daemon/memory/devices.h"
#include "daemon/ledger/ledger.h"
#include "daemon/base/log.h"
#include "daemon/memory/pages.h"
#include "daemon/memory/partition.h"
#include "daemon/memory/quota.h"
#include "daemon/ledger/store.h"
#include "daemon/memory/state.h"
#include "daemon/memory/tenant.h"
#include "daemon/memory/upcalls.h"
#include "daemon/memory/worker.h"
#include "device/device.h"

#define BROKER_MAX_PLACES (2 * CONFIG_MAX_TENANTS)

struct broker;
struct inherited;
struct lease_socket; /* see broker_lease.h */
struct session;
TAILQ_HEAD(session_list, session);
struct reloads; /* the session layer's, see reload.h; NULL: nothing can be reloaded */
struct recall;  /* the session layer's, see recall.h */
TAILQ_HEAD(recall_list, recall);
enum recall_kind { RECALL_RETIRE, RECALL_TRIM, RECALL_PRESSURE, RECALL_KINDS };
struct drain;          /* see drain.h */
struct recall_command; /* the session layer's, see recall.h */

struct broker_device {
        const struct config_device *config;
        struct device *device;
        struct worker *worker;
        struct standby *standby;
        struct standby_goal standby_goal; /* of the config; what quotas make next is added */
        char name[sizeof(((struct device_facts *)0)->name)]; /* the vendor's */
        uint64_t bytes_total;                                /* as the device reports; 0: not bounded by it */
        uint64_t foreign_bytes; /* used there by others at the start; UINT64_MAX: unknown */
        bool is_lost;
        bool is_hung;                   /* its keeper does not answer; see broker_note_hung() */
        struct drain *drain;            /* NULL: it was never drained */
        struct recall_command *command; /* the session layer's: asks for idle memory while it drains */
        uint64_t asked_ms;              /* of the session layer: when that ended */
        struct worker_job *outside;     /* the same, see outside.h; NULL: nothing was asked */
};

struct broker_options {
        const struct config *config;
        struct store *store;            /* borrowed, outlives the broker; may be NULL */
        struct devices *devices;        /* borrowed, outlive the broker; NULL: it opens its own */
        bool inline_workers;            /* for tests, see worker.h */
        void (*notify)(void *userdata); /* from a worker's thread: call broker_poll() soon */
        void (*wake)(void *userdata);   /* from the caller's own: call broker_turn() and shared_turn() soon */
        /* Listens on the socket of leases, and ends that; NULL: there are no sockets. open_socket: -errno. The
         * sockets of inherited leases are the caller's to open. */
        int (*open_socket)(void *userdata, struct lease_socket *socket);
        void (*close_socket)(void *userdata, struct lease_socket *socket);
        void *userdata;
        const struct upcalls *upcalls; /* NULL: there are no sessions */
};

/* The inherited state. */
struct broker_restored {
        uint64_t closed_bytes;       /* of arenas that are closed: processes may use them */
        bool has_unknown;            /* some of them are on a device that is not known */
        struct kept_record *extents; /* inherited, by id */
        size_t n_extents;
        size_t n_aside;       /* sessions that were left aside; see ledger_session */
        uint64_t extents_end; /* ids from here on belong to this process */
        uint32_t n_blocks;
        uint64_t n_bytes; /* of extents */
        uint64_t ns;      /* duration of inheriting */
};

struct broker_sessions {
        struct session **table;     /* by index in the ledger; NULL: none */
        size_t n_slots;             /* one past the highest index ever used */
        size_t n;                   /* after their hello, including quarantined and closing ones */
        size_t n_clients;           /* of these, those that are not admins */
        size_t n_promised;          /* unused places of tenants' shares, which no other tenant can take */
        struct session_list mapped; /* in quarantine; their memory may be unmapped, see session_states.h */
};

/* Which tenant a session belongs to. */
struct broker_selection {
        struct tenant **order; /* in the order of the config: the first match counts */
        size_t n;
        struct tenant *fallback; /* the default tenant; NULL: none */
        struct matcher *matcher; /* of the same config */
};

/* Records that all quotas of tenants may need, without those of leases. */
struct broker_needs {
        uint64_t n_quotas, n_extents, n_exports, n_blocks;
};

struct lease;
TAILQ_HEAD(lease_socket_list, lease_socket);
struct broker_leases {
        struct lease **list; /* the oldest first */
        size_t n;
        struct lease_socket_list sockets; /* of these */
        uint64_t n_sockets;               /* that were made, ever */
        /* The session layer's. */
        size_t next_look; /* at whether their control groups and processes exist */
        bool may_evict;   /* sessions may be left that are to be evicted */
        uint64_t due_ms;  /* when lease_tick() is due; 0: at once */
};

struct broker_changes {
        bool may_have_gone; /* a removed object may be empty by now */
        bool has_freed;     /* a quota of a tenant is gone: broker_promise() is due */
        bool has_removed;   /* there was such a quota at the last look */
        uint64_t n_visits;  /* of quotas because they changed, in total: for tests */
};

/* Many fields: all state of the daemon is below it, with a part for each subject that is not in one partition or quota. */
struct broker {
        const struct config *config; /* the current one */
        struct {
                struct config *config; /* the same if it came by a reload; NULL: it is borrowed */
                char *text;            /* as YAML, for the operators */
                struct capacity *capacity;
        } own;
        struct broker_options options; /* after a reload its config is not the current one */
        struct ledger *ledger;
        struct inherited *inherited; /* while the broker is made from inherited state; NULL: none */
        struct broker_restored restored;
        struct devices *opened; /* the broker's own; NULL: they were passed */
        struct broker_device *devices;
        size_t n_devices;
        struct partition *partitions;
        size_t n_partitions;
        struct tenant *tenants; /* including those that the config no longer has, until they are empty */
        size_t n_tenants;
        struct broker_selection selection;
        struct quota **quotas; /* by index in the ledger; only valid for quotas with blocks or extents */
        struct broker_sessions sessions;
        struct broker_changes changes;
        struct broker_leases leases;
        struct broker_needs needs; /* see broker_promise() */
        struct {
                uint64_t check_ms; /* when devices were last asked */
                size_t n; /* quotas of which unreclaimed memory may have been returned, or to be asked about */
        } unreclaimed;
        uint64_t started_ms;
        /* The session layer's. */
        struct suspended_sessions suspended;
        struct shared_names shared;
        struct session_logs logs;
        struct {
                struct own_memory own_memory;
                struct loop_turns turns;
                struct partition_report *partitions; /* by partition; NULL: none yet */
        } reports;
        struct {
                struct recall_list lists[RECALL_KINDS]; /* those with a deadline, the earliest first */
                uint64_t trim_clock;                    /* counts Trims, Pressures and their answers */
        } recalls;
        struct reloads *reloads; /* borrowed */
        bool is_left;            /* at the end: a successor continues with what it has */
};

/* Makes all objects, and backs preallocating partitions, which may take long. If the store has a ledger,
 * all memory in it is inherited; restore_sessions() restores the sessions. What cannot be inherited is
 * closed and logged. On failure ret_sentence has a sentence. */
int broker_new(const struct broker_options *options, struct broker **ret, char *ret_sentence,
               size_t n_sentence);

/* There must be no session. Takes NULL. Destroys every extent without checking for unreclaimed memory,
 * because the process is about to end. */
struct broker *broker_free(struct broker *b);

/* Leaves the store, every extent and the ledger to the next daemon. There must be no session except those
 * of session_leave_behind(). */
struct broker *broker_leave(struct broker *b);

/* Called before that, while there are sessions: from now on no extent is released. */
void broker_prepare_leave(struct broker *b);

/* The process has run long enough that earlier crashes were not caused by the ledger. */
void broker_note_well(struct broker *b);

/* Delivers results of the workers, and handles what they report about devices: a lost device fails all of
 * its partitions, with their waiting requests. */
void broker_poll(struct broker *b);

/* One turn for waiting requests; and whether any are due. */
void broker_turn(struct broker *b);
bool broker_is_due(const struct broker *b);

/* A turn is due, or a time-out has changed. */
void broker_wake(const struct broker *b);

/* Call broker_tick(), recall_tick() and shared_tick() periodically while there is something to wait for:
 * a keeper's answer; unreclaimed memory, which is queried once a second; requests that wait for other sessions; sessions
 * that do not unmap, or do not answer a Trim; and waits for a name. */
bool broker_is_blocked(const struct broker *b);
void broker_tick(struct broker *b);

/* A session is to answer a recall in time. */
bool broker_has_recalls(const struct broker *b);

/* Looks after frees were postponed: call broker_look_again() QUOTA_ROUND_MS later. */
bool broker_is_deferred(const struct broker *b);
void broker_look_again(struct broker *b);

/* Looks in all quotas for unreclaimed memory about which to query the devices, also after a drain. */
void broker_check_unreclaimed(struct broker *b);

/* A direct charge has grown: devices are asked a few times what others use there. */
void broker_note_direct(struct broker *b, struct quota *q);

/* Notes which devices do not answer. */
void broker_note_hung(struct broker *b);

/* Notes which devices are lost although nothing was asked of them: call it when device_watched() of one is readable. */
void broker_note_ended(struct broker *b);

/* A session of a tenant takes a place in the table, or frees it. */
void broker_session_begins(struct broker *b, struct tenant *t);
void broker_session_ends(struct broker *b, struct tenant *t);

/* When all is restored: ends what keepers have and no record knows. */
void broker_drop_rest(struct broker *b);

/* True: a store keeps what a successor can continue with: sessions, kept blocks, leases, or memory that is not back yet. */
bool broker_has_heirs(const struct broker *b);

/* Recomputes what is promised to tenants, for a new config, or when the sessions are restored: places of sessions,
 * and records. */
void broker_promise(struct broker *b);

/* Whether there is a place for a new session of the tenant. -EDQUOT, and a sentence. */
int broker_admits(const struct broker *b, const struct tenant *t, char *ret_sentence, size_t n_sentence);

/* A session left the quota, or a change of the config removed it: if it was removed, it may be freed at
 * the next turn. */
void broker_note_leave(struct broker *b, const struct quota *q);

/* A place for a tenant; NULL: none, because too many removed tenants are not empty yet. And whether there
 * are n places. */
struct tenant *broker_tenant_place(struct broker *b);
bool broker_has_places(const struct broker *b, size_t n);
void broker_leave_place(struct broker *b, struct tenant *t);

/* Reserves a place at the end of the tenant's list, and sets the broker's fields of *options; puts a quota of these
 * options there. -ENOMEM, -errno of the usage page. */
int broker_prepare_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options);
void broker_list_quota(struct broker *b, struct tenant *t, struct quota *q);

/* Adds a quota to a tenant, at the end of its list. The caller sets the fields of *options that are not
 * the broker's. Fails as quota_new() does. */
int broker_make_quota(struct broker *b, struct tenant *t, size_t partition, struct quota_options *options);

/* One more quota of a tenant, at the end of its list. partition: the broker's index.
 * Fails as quota_new() does. */
int broker_add_quota(struct broker *b, struct tenant *t, size_t partition, const struct config_quota *from,
                     uint64_t reserve_bytes);

/* The quota of the tenant in the partition as the current config has it; NULL: it has none. */
const struct config_quota *broker_config_quota(const struct broker *b, const struct tenant *t,
                                               const struct partition *p);

struct quota_limits broker_limits(const struct config_quota *from);

/* How many records the ledger has room for. */
struct ledger_limits broker_room(const struct broker *b);

/* The period of mappings_look(). */
#define BROKER_LOOK_MS 250

/* Applies the config to standby memory; and updates the room that the partitions still have, where no
 * worker's result does that. */
void broker_set_standby(struct broker *b);
void broker_stand_by(struct broker *b);

/* When standby memory is made again, by clock_ms(): call broker_stand_by() then. 0: never. */
uint64_t broker_standby_due(const struct broker *b);

/* Jobs that workers have not finished yet. */
size_t broker_n_pending(const struct broker *b);

#endif
