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
#include "daemon/match.h"
#include "daemon/pages.h"
#include "daemon/quota.h"

/* Where a tenant lies it stays, so that sessions may point at it. */
/* Sessions that ended in this minute: see accounting.h. */
struct tenant_ends {
        uint64_t since_ms; /* 0: none */
        uint32_t n_short;  /* that had a line; never had memory */
        uint32_t n_lines;
        uint64_t n_summed; /* those that had none; and their sums */
        uint64_t n_allocs, n_refusals, lasted_ms;
        uint64_t peak_bytes; /* the largest */
};

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
        struct tenant_ends ends;
        struct log_limit late_log;   /* sessions that do not confirm a Retire in time */
        struct log_limit deaf_log;   /* sessions that do not answer a Trim in time */
        struct log_limit refill_log; /* memory in destroyed extents */
        struct log_limit violation_log, quarantine_log, return_log;
        struct log_limit escape_logs[2]; /* memory that is back, that has escaped */
};

/* Takes a place for a tenant of the config; for one that it has no more; and leaves it (its
 * quotas are freed). */
void tenant_init(struct tenant *t, const struct config_tenant *config);
void tenant_init_removed(struct tenant *t, const char *name);
void tenant_deinit(struct tenant *t);

/* The first of the tenants that match; where `name` is not empty, the one of that name among them. The list
 * is the one of the config in force, and `who` is matched by it (match_is_known()). NULL: none, and
 * ret_sentence says what would match. `fallback`: the default tenant, or NULL. */
struct tenant *tenant_select(struct tenant *const *tenants, size_t n_tenants, struct tenant *fallback,
                             const char *name, const struct credentials *who, char *ret_sentence,
                             size_t n_sentence);

#endif
