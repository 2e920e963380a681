/* Leases of users; see lease_self.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/lease_self.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/memory/broker_lease.h"
#include "daemon/base/cgroup.h"
#include "daemon/base/number.h"
#include "daemon/session/session.h"

#define PREFIX_BYTES 16u

static size_t make_prefix(const struct session *s, char ret[static PREFIX_BYTES])
{
        return (size_t)snprintf(ret, PREFIX_BYTES, "u%u:", (unsigned)s->who.uid);
}

bool lease_self_refuse(struct session *s, uint64_t id, const char *what)
{
        if (s->role != ROLE_CLIENT || (s->tenant->config && s->tenant->config->leases_self))
                return false;
        session_refuse_format(s, id, -EACCES,
                              "%s only by operators, on the admin socket: the configuration does not have "
                              "'leases: self' for tenant '%s'",
                              what, s->tenant->name);
        return true;
}

bool lease_self_owns(const struct session *s, const struct lease *lease)
{
        const struct ledger_lease *record = lease_record(s->broker, lease);

        return s->role != ROLE_CLIENT || (lease->tenant == s->tenant && record->maker == LEASE_BY_USER &&
                                          record->maker_uid == s->who.uid);
}

const char *lease_self_name(const struct session *s, const char *name)
{
        char prefix[PREFIX_BYTES];

        return s->role != ROLE_CLIENT ? name : name + make_prefix(s, prefix);
}

int lease_self_check_names(const struct session *s, const char *name, const char *tenant, char *why, size_t n)
{
        char prefix[PREFIX_BYTES];
        size_t n_prefix = make_prefix(s, prefix);

        if (s->role != ROLE_CLIENT)
                return 0;
        if (strncmp(name, prefix, n_prefix) != 0 || strlen(name) > CONFIG_NAME_MAX) {
                snprintf(why, n, "the name of a lease of this user begins with '%s' and has at most %d bytes",
                         prefix, CONFIG_NAME_MAX);
                return -EINVAL;
        }
        if (strcmp(tenant, s->tenant->name) != 0) {
                snprintf(why, n, "a user makes leases only for its own tenant, '%s'", s->tenant->name);
                return -EACCES;
        }
        return 0;
}

/* ---- whose processes ---------------------------------------------------------- */

/* The process is the one that the lease is for: it was read before with this start time. */
static int check_process(const struct session *s, const struct ledger_lease *facts, char *why, size_t n)
{
        struct process p;
        uid_t uid;
        int r = process_owner("/proc", (pid_t)facts->pid, &uid);

        if (r == 0)
                r = process_read("/proc", (pid_t)facts->pid, &p);
        if (r == 0 && uid == s->who.uid && p.start_time == facts->start_time)
                return 0;
        snprintf(why, n, "process %" PRIu32 " does not belong to this user, or cannot be read", facts->pid);
        return -EACCES;
}

static int check_match(const struct session *s, const struct ledger_lease *facts, char *why, size_t n)
{
        switch ((enum ledger_lease_kind)facts->kind) {
        case LEASE_PID:
                return check_process(s, facts, why, n);
        case LEASE_CGROUP:
                if (cgroup_is_of_user(facts->match, s->who.uid))
                        return 0;
                snprintf(
                        why, n,
                        "control group '%.200s' does not belong to this user: only one that was delegated to "
                        "the user, or a process (--pid)",
                        facts->match);
                return -EACCES;
        case LEASE_USER:
                if (facts->uid == s->who.uid)
                        return 0;
                snprintf(why, n, "a user makes leases only for its own processes");
                return -EACCES;
        default:
                snprintf(why, n, "leases for units are made only by operators: use a process (--pid)");
                return -EACCES;
        }
}

/* ---- how much ------------------------------------------------------------------ */

int lease_self_check_reserve(const struct session *s, const struct quota *parent, uint64_t from_bytes,
                             uint64_t to_bytes, char *why, size_t n)
{
        const struct account *a = &parent->account;
        uint64_t others = a->promised_bytes - from_bytes;

        if (s->role != ROLE_CLIENT || to_bytes <= from_bytes || others + to_bytes <= a->reserve_bytes)
                return 0;
        snprintf(why, n,
                 "a user guarantees only what is guaranteed to its tenant: of the reserve of tenant '%s' in "
                 "partition '%s', %s, other leases have %s",
                 parent->tenant, parent->partition->name, NUMBER_SIZE(a->reserve_bytes), NUMBER_SIZE(others));
        return -EACCES;
}

int lease_self_check(const struct session *s, const struct quota *parent, struct ledger_lease *facts,
                     char *why, size_t n)
{
        int r;

        if (s->role != ROLE_CLIENT)
                return 0;
        facts->maker = LEASE_BY_USER;
        facts->maker_uid = s->who.uid;
        r = check_match(s, facts, why, n);
        if (r == 0)
                r = lease_self_check_reserve(s, parent, 0, facts->reserve_bytes, why, n);
        if (r < 0)
                return r;
        if (lease_count_by(s->broker, s->tenant, LEASE_BY_USER, &s->who.uid) < LEASES_PER_USER)
                return 0;
        snprintf(why, n, "this user has %u leases of tenant '%s', which is the most: end some of them",
                 LEASES_PER_USER, s->tenant->name);
        return -EDQUOT;
}
