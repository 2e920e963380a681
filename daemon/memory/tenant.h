/* A tenant: the account that is charged for memory. A process is identified only by its peer credentials
 * (uid, gid, supplementary groups, control group).
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TENANT_H
#define BFCD_TENANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/log.h"
#include "daemon/config/config.h"
#include "daemon/ledger/ledger.h"
#include "daemon/memory/pages.h"
#include "daemon/memory/quota.h"

/* The result: indexes into the config's tenants, ascending. */
struct match_list {
        uint64_t generation; /* of the matcher; 0: no result yet */
        bool by_place;       /* patterns were looked at as well */
        uint32_t *tenants;   /* owned */
        size_t n_tenants;
};

#define MATCH_NO_ID ((uint32_t)-1) /* which the config cannot name */

/* A peer as the kernel describes it. */
struct credentials {
        pid_t pid;           /* 0: not visible from here (another PID namespace) */
        uid_t uid;           /* MATCH_NO_ID: it has none in the daemon's user namespace */
        gid_t gid;           /* the same */
        uint64_t start_time; /* of the process; 0: unknown */
        char *cgroup;        /* see cgroup.h; owned; NULL: unknown, and then no pattern matches */
        struct match_list matches;
};
void credentials_clear(struct credentials *who); /* frees what it owns */

struct matcher;
/* Of a config's tenants, which it refers to. -ENOMEM. */
int matcher_new(const struct config *c, struct matcher **ret);
struct matcher *matcher_free(struct matcher *m); /* takes NULL */

/* Some tenant matches groups. */
bool matcher_needs_groups(const struct matcher *m);

/* Finds the tenants whose users and groups match, unless that is known. gids: supplementary, sorted.
 * match_places() checks patterns. -ENOMEM. */
int match_ids(const struct matcher *m, struct credentials *who, const gid_t *gids, size_t n_gids);
/* Keeps those whose patterns match who->cgroup. Idempotent. */
void match_places(const struct matcher *m, struct credentials *who);

/* Whether match_ids() is done, and match_places() too, for this matcher. */
bool match_ids_are_known(const struct matcher *m, const struct credentials *who);
bool match_is_known(const struct matcher *m, const struct credentials *who);

/* Whether the patterns of the tenant match the path of a control group; also if it has none. NULL: unknown. */
bool match_place(const struct config_tenant *c, const char *path);

/* Sorts groups that the kernel has not sorted. */
void match_sort_gids(gid_t *gids, size_t n_gids);

/* Sessions that ended in this minute: see accounting.h. */
struct tenant_ends {
        uint64_t since_ms; /* 0: none */
        uint32_t n_short;  /* that had a line; never had memory */
        uint32_t n_lines;
        uint64_t n_summed; /* those without a line; and their sums */
        uint64_t n_allocs, n_refusals, lasted_ms;
        uint64_t peak_bytes; /* the largest */
};

/* Refusals without a line of their own: what they have in common. See accounting.h. */
struct tenant_suppressed {
        char partition[CONFIG_NAME_MAX + 1]; /* a copy: a reload frees the config; "": of a hello */
        const char *limit;                   /* a constant */
        bool is_mixed;
};

/* How often leases and changes of them were asked for in the current interval, but by operators; see broker_lease.h. */
struct tenant_births {
        uint64_t since_ms; /* 0: none */
        uint32_t n_by[LEASE_MAKERS];
};

/* The last refusals of its requests, for its users, who may not read the journal. */
#define TENANT_REFUSALS 16u
struct tenant_refusals {
        uint64_t n; /* all of them; number i is at (i - 1) % TENANT_REFUSALS */
        struct tenant_refusal {
                uint64_t time_ms, n_bytes, session_id;
                uint32_t pid, uid;
                const char *limit;                   /* a constant */
                char partition[CONFIG_NAME_MAX + 1]; /* copies: both can end */
                char lease[CONFIG_NAME_MAX + 1], program[64], sentence[512];
        } last[TENANT_REFUSALS];
};

/* Its address never changes: sessions point at it.
 *
 * Many fields: half of them limit how often a kind of line is logged for it. */
struct tenant {
        const struct config_tenant *config; /* NULL: the config no longer has it, and no process matches */
        const char *name;                   /* its own; "": an unused place */
        char name_bytes[CONFIG_NAME_MAX + 1];
        struct quota **quotas; /* new ones are at the end; some may be removed */
        size_t n_quotas;
        size_t n_leases;  /* of these */
        size_t next_look; /* the quota at whose kept extents the daemon looks first; may be beyond the last */
        struct usage_page *usage; /* an entry for each partition; NULL: this kernel cannot seal it */
        size_t n_sessions;
        size_t n_quarantined;  /* of these */
        size_t n_unresponsive; /* of these; set by the session layer */
        size_t n_kept;         /* shared blocks that are kept or have metadata; set by the session layer */
        struct log_limit refusal_log; /* requests; one per tenant, so that none hides another's */
        struct tenant_suppressed suppressed;
        struct tenant_refusals *refusals; /* NULL: none yet */
        struct tenant_ends ends;
        struct log_limit late_log;         /* sessions that do not confirm a Retire in time */
        struct log_limit unresponsive_log; /* sessions that do not answer a Trim in time */
        struct log_limit disconnect_log, quarantine_log, return_log;
        struct log_limit kept_log;            /* kept blocks that end */
        struct log_limit lease_log;           /* leases that its processes cause */
        struct tenant_births lease_births;    /* requests for such leases, in this interval */
        struct log_limit outside_logs;        /* processes with much memory outside of bfcd */
        struct log_limit unreclaimed_logs[2]; /* memory that was returned, that is unreclaimed */
};

/* Initializes a place for a tenant of the config; for one that the config no longer has; and clears it
 * (its quotas are freed). */
void tenant_init(struct tenant *t, const struct config_tenant *config);
void tenant_init_removed(struct tenant *t, const char *name);
void tenant_deinit(struct tenant *t);

/* Those in use, sorted by name, for tenant_find(): free() it. NULL: out of memory. */
struct tenant **tenant_sort(struct tenant *tenants, size_t n, size_t *ret_n);

/* NULL: there is none of that name. */
struct tenant *tenant_find(struct tenant *const *sorted, size_t n, const char *name);

/* Its own quota in the partition, not that of a lease; also if it was removed. NULL: none. */
struct quota *tenant_quota(const struct tenant *t, const struct partition *p);

/* The first matching tenant, or, if `name` is not empty, the matching one with that name. The list is
 * that of the current config, with which `who` was matched (match_is_known()). NULL: none, and
 * ret_sentence says what would match. `fallback`: the default tenant, or NULL. */
struct tenant *tenant_select(struct tenant *const *tenants, size_t n_tenants, struct tenant *fallback,
                             const char *name, const struct credentials *who, char *ret_sentence,
                             size_t n_sentence);

#endif
