/* Leases by `per: cgroup`; see lease_auto.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/lease_auto.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/session/lease.h"
#include "daemon/base/clock.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/broker.h"
#include "daemon/base/cgroup.h"
#include "daemon/session/session.h"

#define NAME_PART 40 /* bytes of the control group in the name */

/* Whether the lease is for the control group or further inside. */
static bool is_as_deep(const struct broker *b, const struct lease *lease, const char *group)
{
        const struct ledger_lease *record = lease_record(b, lease);

        return record->maker != LEASE_BY_USER &&
               (record->kind == LEASE_PID ||
                (record->kind == LEASE_CGROUP && lease_path_depth(record->match) >= lease_path_depth(group)));
}

/* The last component of the control group and a number that no lease had before. No name that is given to a lease has a
 * '::'. */
static void make_name(const struct broker *b, const char *group, char ret[static LEDGER_NAME_BYTES])
{
        static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";
        const char *last = strrchr(group, '/') + 1;

        snprintf(ret, LEDGER_NAME_BYTES, "%.*s", NAME_PART, *last ? last : "root");
        for (char *c = ret; *c; c++)
                if (!strchr(allowed, *c))
                        *c = '_';
        snprintf(ret + strlen(ret), LEDGER_NAME_BYTES - strlen(ret), "::%" PRIu64,
                 ledger_quotas_end(b->ledger));
}

static int make(struct session *s, struct quota *parent, const struct config_quota *per, const char *group,
                struct lease **ret, char *why, size_t n)
{
        struct ledger_lease facts = { .born_ms = clock_ms(),
                                      .maker = LEASE_BY_CONFIG,
                                      .limit_bytes = per->per_limit_bytes,
                                      .reserve_bytes = per->per_reserve_bytes };
        char reason[SESSION_SENTENCE_BYTES];
        int r = lease_read_cgroup(group, &facts, reason, sizeof(reason));

        make_name(s->broker, group, facts.name);
        if (r == 0)
                r = lease_make(s->broker, s->tenant, parent, &facts, "per: cgroup", ret, reason,
                               sizeof(reason));
        if (r < 0)
                snprintf(why, n, "the process's control group needs a lease of its own in partition '%s': %s",
                         parent->partition->name, reason);
        return r;
}

int lease_auto(struct session *s, struct quota *parent, struct lease **lease, char *why, size_t n)
{
        const struct config_quota *per = broker_config_quota(s->broker, s->tenant, parent->partition);
        char group[CGROUP_PATH_BYTES];
        size_t n_group;

        if (!per || !per->per_cgroup)
                return 0;
        if (!s->who.cgroup) {
                snprintf(why, n,
                         "the daemon cannot tell whether the process needs a lease of its control group in "
                         "partition '%s': its control group could not be read",
                         parent->partition->name);
                return -EACCES;
        }
        n_group = cgroup_prefix(per->per_cgroup, s->who.cgroup);
        if (n_group == 0)
                return 0;
        memcpy(group, s->who.cgroup, n_group);
        group[n_group] = '\0';
        if (*lease && is_as_deep(s->broker, *lease, group))
                return 0;
        return make(s, parent, per, group, lease, why, n);
}
