/* Leases: quotas that are made at run time within the quotas of tenants.
 *
 * A lease says which processes of its tenant it is for: those in a control group or unit, descendants of a process, processes of
 * a user, or those that connect to its socket. A session is matched at its hello, to the innermost lease in each partition, and
 * stays in it. A lease that has ended refuses its processes' new sessions and is charged no more. It disappears with its last
 * session.
 *
 * All facts of a lease are in its record of the ledger.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_BROKER_LEASE_H
#define BFCD_BROKER_LEASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>

#include "daemon/base/process.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/tenant.h"

#define LEASES_PER_TENANT 256u

struct broker;
struct config_quota;
struct quota;
struct quota_limits;
struct tenant;

/* The socket of leases of one tenant (LEASE_SOCKET). A process that connects to it is in these leases, whatever the config
 * says of whom tenants match, and gets nothing outside of them. It exists as long as a lease has its name. */
struct lease_socket {
        char name[LEDGER_NAME_BYTES];
        struct tenant *tenant;
        uint64_t number; /* that no other socket of this process has or had, so never 0 */
        size_t n_leases;
        void *listener; /* the server's; NULL: it does not listen */
        TAILQ_ENTRY(lease_socket) link;
};

struct lease {
        char name[LEDGER_NAME_BYTES];
        struct tenant *tenant;
        struct quota *quota;
        struct lease_socket *socket; /* NULL: it is for processes that match it */
        uint32_t index;              /* in the ledger */
};

/* NULL: there is none of that name. */
struct lease *lease_find(const struct broker *b, const char *name);

/* That of a quota below a tenant's, whose lease is this one's. */
struct lease *lease_of(const struct quota *q);

struct ledger_lease *lease_record(const struct broker *b, const struct lease *lease);

/* NULL: there is none of that name, or number. */
struct lease_socket *lease_socket_find(const struct broker *b, const char *name);
struct lease_socket *lease_socket_numbered(const struct broker *b, uint64_t number);

/* Makes a lease of these facts, whose limits and socket the caller has checked, within a quota of the tenant. Fails as
 * quota_new() does; -ENOSPC: the ledger is full; -errno of its socket. */
int lease_new(struct broker *b, struct tenant *t, struct quota *parent, const struct ledger_lease *facts,
              struct lease **ret);

/* Makes the lease of this index in the ledger, whose quota has been restored. -ENOMEM. */
int lease_adopt(struct broker *b, struct tenant *t, struct quota *q, uint32_t index, struct lease **ret);

/* The innermost lease within the quota that is for the process; NULL: none. It may have ended. -EACCES: it is not known
 * which one it is, and the sentence says why. The ancestors of the process are looked up when a lease asks for them. */
struct lease_peer {
        const struct credentials *who;
        const struct tenant *tenant;
        uint64_t socket; /* of leases, by which it came: its number; 0: none */
        struct process ancestors[PROCESS_MAX_ANCESTORS];
        int n_ancestors;    /* -errno: unknown */
        bool has_ancestors; /* they were looked up */
};
int lease_match(const struct broker *b, const struct quota *parent, struct lease_peer *peer,
                struct lease **ret, char *sentence, size_t n_sentence);

/* How deep a control group is below the root: the deeper of two is the inner one. */
unsigned lease_path_depth(const char *path);

/* No session joins it any more, nothing is guaranteed to it, and it is charged no more than now. */
void lease_end(struct broker *b, struct lease *lease);

/* The limits of a lease that the daemon made by itself (`per: cgroup`) are those of its tenant's quota in the config, `of`:
 * sets limit and reserve of *to. The limit is at most what the sizes of its extents allow. Other leases, and those of a
 * quota without the key (or NULL), keep what they have. */
void lease_follow(const struct ledger_lease *record, const struct quota *q, const struct config_quota *of,
                  struct quota_limits *to);

/* Stores its limit and reserve in its record. */
void lease_store_limits(struct broker *b, const struct lease *lease, const struct quota_limits *to);

/* What its control group, its process or its unit was is gone. Looks at /proc or /sys/fs/cgroup. */
bool lease_has_lost_match(struct broker *b, const struct lease *lease);

/* Its quota is gone (quota_is_gone()): tells that (upcalls.h), forgets it, and frees the quota. */
void lease_free(struct broker *b, struct lease *lease);

/* Tells the end of a lease that is only in the ledger. */
struct lease_end {
        const struct ledger_lease *record;
        const struct ledger_lifetime *life;
        const char *tenant, *partition;
};
void lease_tell_gone(const struct broker *b, const struct lease_end *end);

/* All of them, without their quotas. leave: their records stay for the next daemon. */
void leases_forget(struct broker *b, bool leave);

/* Leases of the tenant, or of all (NULL), by this maker; uid: only those of this user. */
size_t lease_count_by(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                      const uint32_t *uid);

/* In lists. */
const char *lease_maker_name(enum ledger_lease_maker maker);
const char *lease_kind_name(enum ledger_lease_kind kind);

/* ---- bounds -------------------------------------------------------------------- */

/* How many leases there may be that no operator makes, so that operators and other tenants have places, and the log stays
 * readable. Processes cause them by control groups (`per: cgroup`) and by requests (`leases: self`); schedulers make them for
 * jobs. Each tenant whose processes may cause leases has a share, and all schedulers together have one. */

bool lease_maker_is_bounded(enum ledger_lease_maker maker);

#define LEASE_BOUNDS_ALL    768u                          /* places for such leases, in equal shares */
#define LEASE_BOUNDS_TENANT (LEASES_PER_TENANT / 16 * 15) /* of a tenant; the others are left to operators */
#define LEASE_BOUNDS_MS                                                                                      \
        60000u /* an interval; in each, each kind of maker may ask LEASES_PER_TENANT times for a tenant */

struct broker;
struct tenant;

/* Whether there may be one more. -EDQUOT, with a sentence that names the bound. */
int lease_bounds_check(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                       char *why, size_t n);

/* Counts a request for a lease or for a change of one, also if it is refused afterwards. -EDQUOT: there were too many; with
 * a sentence that names the bound. */
int lease_bounds_take(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n);

/* ---- room ---------------------------------------------------------------------- */

/* Room in the daemon's tables, and file descriptors, for a lease. */

struct tree;
struct tree_node;

/* For the node of a lease of `t` in a tree of what is wanted, after tree_sum(). maker: who makes or changes it. -ENOSPC,
 * -EMFILE, -EDQUOT, with a sentence. */
int lease_check_room(const struct tree *tree, const struct tree_node *node, struct tenant *t,
                     enum ledger_lease_maker maker, char *why, size_t n);

#endif
