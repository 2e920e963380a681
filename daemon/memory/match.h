/* Which tenants a process matches. The ids of all tenants of a config are in sorted tables, so the cost
 * does not grow with tenants times groups. The result is stored with the process's credentials and is
 * valid as long as the config.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_MATCH_H
#define BFCD_MATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/config/config.h"

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

#endif
