/* A tenant: who is charged, and how the kernel's word about a process (uid, gid,
 * supplementary groups, control group) names it. Nothing that the process says itself counts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_TENANT_H
#define BFCD_TENANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/config.h"
#include "daemon/log.h"
#include "daemon/pages.h"
#include "daemon/quota.h"

/* A peer as the kernel describes it. */
struct credentials {
        pid_t pid; /* 0: not visible from here (another PID namespace) */
        uid_t uid;
        gid_t gid;
        gid_t *gids; /* supplementary, owned */
        size_t n_gids;
        uint64_t start_time; /* of the process; 0: unknown */
        char *cgroup;        /* see cgroup.h; owned; NULL: not known, and then no pattern matches */
};

/* Where a tenant lies it stays, so that sessions may point at it. */
struct tenant {
        const struct config_tenant *config; /* NULL: the config has it no more, nobody matches */
        const char *name;                   /* its own; "": a place for another */
        char name_bytes[CONFIG_NAME_MAX + 1];
        struct quota **quotas; /* new ones are at the end; some may be removed */
        size_t n_quotas;
        struct usage_page *usage; /* an entry for each partition; NULL: this kernel cannot seal it */
        size_t n_sessions;
        size_t n_quarantined;         /* of these */
        struct log_limit refusal_log; /* requests; a tenant's own, so that none hides another's */
        struct log_limit end_log;     /* of sessions */
        struct log_limit late_log;    /* sessions that do not answer in time */
};

bool tenant_matches(const struct tenant *t, const struct credentials *who);

/* Takes a place for a tenant of the config; for one that it has no more; and leaves it (its
 * quotas are freed). */
void tenant_init(struct tenant *t, const struct config_tenant *config);
void tenant_init_removed(struct tenant *t, const char *name);
void tenant_deinit(struct tenant *t);

/* The first tenant in the list that matches; where `name` is not empty, the one
 * of that name among those that match. NULL: none, and ret_sentence
 * says what would match. `fallback`: the default
 * tenant, or NULL. */
struct tenant *tenant_select(struct tenant *const *tenants, size_t n_tenants, struct tenant *fallback,
                             const char *name, const struct credentials *who, char *ret_sentence,
                             size_t n_sentence);

#endif
