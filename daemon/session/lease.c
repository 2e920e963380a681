/* Admin commands about leases; see lease.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/lease.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/change.h"
#include "daemon/record/records.h"
#include "daemon/session/explain.h"
#include "daemon/session/report.h"
#include "daemon/session/session.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"
#include "daemon/session/trim.h"

/* ==== who makes leases: users of their own, schedulers for jobs, operators all ==== */

#define PREFIX_BYTES 16u

static size_t make_prefix(const struct session *s, char ret[static PREFIX_BYTES])
{
        return (size_t)snprintf(ret, PREFIX_BYTES, "u%u:", (unsigned)s->who.uid);
}

static enum ledger_lease_maker maker_of(const struct session *s)
{
        return s->role == ROLE_CLIENT      ? LEASE_BY_USER
               : s->role == ROLE_SCHEDULER ? LEASE_BY_SCHEDULER
                                           : LEASE_BY_OPERATOR;
}

/* True: the session may not make leases at all; the request was refused. what: "leases are made". */
static bool lease_self_refuse(struct session *s, uint64_t id, const char *what)
{
        if (s->lease_socket != 0) {
                session_refuse_format(
                        s, id, -EACCES,
                        "%s only by operators and schedulers: this process came by a socket of leases, "
                        "which are its limits",
                        what);
                return true;
        }
        if (s->role != ROLE_CLIENT || (s->tenant->config && s->tenant->config->leases_self))
                return false;
        session_refuse_format(s, id, -EACCES,
                              "%s only by operators and schedulers, on the admin and lease sockets: "
                              "the configuration does not have 'leases: self' for tenant '%s'",
                              what, s->tenant->name);
        return true;
}

static bool lease_self_owns(const struct session *s, const struct lease *lease)
{
        const struct ledger_lease *record = lease_record(s->broker, lease);

        switch (s->role) {
        case ROLE_CLIENT:
                return lease->tenant == s->tenant && record->maker == LEASE_BY_USER &&
                       record->maker_uid == s->who.uid;
        case ROLE_SCHEDULER:
                return record->maker == LEASE_BY_SCHEDULER;
        default:
                return true;
        }
}

/* The name without the prefix. */
static const char *lease_self_name(const struct session *s, const char *name)
{
        char prefix[PREFIX_BYTES];

        return s->role != ROLE_CLIENT ? name : name + make_prefix(s, prefix);
}

/* Whether the name has the prefix, and the tenant is the session's. Negative: a sentence says why not. */
static int lease_self_check_names(const struct session *s, const char *name, const char *tenant, char *why,
                                  size_t n)
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
                snprintf(why, n,
                         "leases for units and with sockets are made only by operators and schedulers: use a "
                         "process (--pid)");
                return -EACCES;
        }
}

/* ---- how much ------------------------------------------------------------------ */

/* Whether the reserve of a lease may change so; 0: of a new lease. */
static int lease_self_check_reserve(const struct session *s, const struct quota *parent, uint64_t from_bytes,
                                    uint64_t to_bytes, char *why, size_t n)
{
        const struct account *a = &parent->account;
        uint64_t others = a->promised_bytes - from_bytes;

        if (s->role == ROLE_ADMIN || to_bytes <= from_bytes || others + to_bytes <= a->reserve_bytes)
                return 0;
        snprintf(why, n,
                 "a %s tenant: of the reserve of tenant '%s' in "
                 "partition '%s', %s, other leases have %s",
                 s->role == ROLE_SCHEDULER ? "scheduler guarantees only what is guaranteed to the"
                                           : "user guarantees only what is guaranteed to its",
                 parent->tenant, parent->partition->name, NUMBER_SIZE(a->reserve_bytes), NUMBER_SIZE(others));
        return -EACCES;
}

/* Whether the session may make the lease; notes who makes it. */
static int lease_self_check(const struct session *s, const struct quota *parent, struct ledger_lease *facts,
                            char *why, size_t n)
{
        int r;

        facts->maker = maker_of(s);
        if (s->role != ROLE_CLIENT)
                return lease_self_check_reserve(s, parent, 0, facts->reserve_bytes, why, n);
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

/* ==== leases by admin commands =============================================== */

#define LEASE_MAX_DAYS   36500u /* of times from outside: their sums cannot overflow */
#define LEASE_LINE_BYTES 1024u
#define LEASE_BY_BYTES   80u
#define LEASE_MAX_ROWS   40u   /* sessions in a reply, each with the names of 16 leases */
#define LEASE_LOOK_MS    1000u /* between looks at one lease */

/* ---- create ---------------------------------------------------------------- */

static bool is_printable(const char *text)
{
        for (; *text; text++)
                if ((unsigned char)*text < ' ' || *text == 0x7f)
                        return false;
        return true;
}

/* Empty ones, "." and "..", which no path in /proc/PID/cgroup has. */
static bool has_odd_components(const char *path, size_t n)
{
        for (size_t i = 0, k; i < n; i = k) {
                for (k = i + 1; k < n && path[k] != '/'; k++)
                        ;
                if (path[i] != '/' || (k == i + 1 && n > 1) || (k == i + 2 && path[i + 1] == '.') ||
                    (k == i + 3 && memcmp(path + i + 1, "..", 2) == 0))
                        return true;
        }
        return false;
}

/* Makes the lease one for this control group. -EINVAL, with a sentence. */
static int lease_read_cgroup(const char *path, struct ledger_lease *ret, char *why, size_t n)
{
        size_t n_path = strlen(path);

        while (n_path > 1 && path[n_path - 1] == '/')
                n_path--;
        if (path[0] != '/' || n_path >= LEDGER_PLACE_BYTES || !is_printable(path) ||
            has_odd_components(path, n_path)) {
                snprintf(why, n,
                         "the control group is not valid: it is a path as in /proc/PID/cgroup, which "
                         "begins with '/' and has at most %d bytes",
                         LEDGER_PLACE_BYTES - 1);
                return -EINVAL;
        }
        ret->kind = LEASE_CGROUP;
        memcpy(ret->match, path, n_path);
        memcpy(ret->place, path, n_path);
        return 0;
}

static int read_unit(const char *unit, struct ledger_lease *ret, char *why, size_t n)
{
        char path[CGROUP_UNIT_BYTES + 1], name[CGROUP_UNIT_BYTES];

        if (snprintf(path, sizeof(path), "/%s", unit) < (int)sizeof(path) && is_printable(unit)) {
                cgroup_unit(path, name);
                if (strcmp(name, unit) == 0 && unit[0] != '\0' && strlen(unit) < sizeof(ret->match)) {
                        ret->kind = LEASE_UNIT;
                        strcpy(ret->match, unit);
                        return 0;
                }
        }
        snprintf(why, n,
                 "the unit '%.63s' is not valid: give its whole name, such as 'job.service' or "
                 "'run-1.scope'",
                 unit);
        return -EINVAL;
}

static int read_pid(uint64_t pid, struct ledger_lease *ret, char *why, size_t n)
{
        struct process p;
        int r = pid > 0 && pid <= INT32_MAX ? process_read("/proc", (pid_t)pid, &p) : -ESRCH;

        if (r < 0 || process_has_ended((pid_t)pid, p.start_time)) {
                snprintf(why, n, "there is no process with pid %" PRIu64 " that the daemon can see", pid);
                return r < 0 ? r : -ESRCH;
        }
        ret->kind = LEASE_PID;
        ret->pid = (uint32_t)pid;
        ret->start_time = p.start_time;
        return 0;
}

static int read_socket(const char *name, struct ledger_lease *ret, char *why, size_t n)
{
        if (!ledger_is_socket_name(name)) {
                snprintf(why, n,
                         "the name of a socket has 1 to %d letters, digits, '_', '-' and '.', and does not "
                         "begin with '.'",
                         LEDGER_NAME_BYTES - 1);
                return -EINVAL;
        }
        ret->kind = LEASE_SOCKET;
        strcpy(ret->match, name);
        return 0;
}

static int read_match(const Bfcd__LeaseCreate *m, struct ledger_lease *ret, char *why, size_t n)
{
        switch (m->match_case) {
        case BFCD__LEASE_CREATE__MATCH_CGROUP:
                return lease_read_cgroup(m->cgroup, ret, why, n);
        case BFCD__LEASE_CREATE__MATCH_UNIT:
                return read_unit(m->unit, ret, why, n);
        case BFCD__LEASE_CREATE__MATCH_PID:
                return read_pid(m->pid, ret, why, n);
        case BFCD__LEASE_CREATE__MATCH_UID:
                ret->kind = LEASE_USER;
                ret->uid = (uint32_t)m->uid;
                if (m->uid < UINT32_MAX)
                        return 0;
                snprintf(why, n, "%" PRIu64 " is not a uid", m->uid);
                return -EINVAL;
        case BFCD__LEASE_CREATE__MATCH_SOCKET:
                return read_socket(m->socket, ret, why, n);
        default:
                snprintf(why, n,
                         "the lease does not say which processes it is for: a control group, a unit, a "
                         "pid, a user or a socket");
                return -EINVAL;
        }
}

static int check_sizes(uint64_t limit, uint64_t reserve, char *why, size_t n)
{
        if (limit == 0 || limit % CONFIG_GRANULARITY != 0 || reserve % CONFIG_GRANULARITY != 0)
                snprintf(
                        why, n,
                        "limit and reserve are multiples of 2 MiB, and the limit is not 0: limit %s, reserve %s",
                        NUMBER_SIZE(limit), NUMBER_SIZE(reserve));
        else if (reserve > limit)
                snprintf(why, n, "reserve %s is more than the limit %s", NUMBER_SIZE(reserve),
                         NUMBER_SIZE(limit));
        else
                return 0;
        return -EINVAL;
}

/* A limit that an operator sets now. That of the tenant may fall below it later. */
static int check_limit(const struct quota *parent, uint64_t limit, char *why, size_t n)
{
        if (limit <= parent->account.limit_bytes)
                return 0;
        snprintf(why, n, "limit %s is more than the limit of tenant '%s' in partition '%s', %s",
                 NUMBER_SIZE(limit), parent->tenant, parent->partition->name,
                 NUMBER_SIZE(parent->account.limit_bytes));
        return -EINVAL;
}

static int check_reserve(const struct tree_node *node, char *why, size_t n)
{
        const struct partition *p = node->partition;
        const struct account *lacks = tree_misfit(node);

        if (!lacks)
                return 0;
        snprintf(why, n,
                 "reserve %s cannot be guaranteed: of the %s of %s '%s', %s are reserved or guaranteed",
                 NUMBER_SIZE(node->to.reserve_bytes), NUMBER_SIZE(lacks->limit_bytes),
                 lacks == &p->pool ? "partition" : "tenant",
                 lacks == &p->pool ? p->name : node->parent->quota->tenant,
                 NUMBER_SIZE(lacks->committed_bytes));
        return -ENOMEM;
}

/* How many leases there may be. */
static int check_count(const struct broker *b, const struct tenant *t, const struct quota *parent, char *why,
                       size_t n)
{
        size_t n_partitions = 0;

        for (size_t i = 0; i < t->n_quotas; i++)
                n_partitions += !quota_parent(t->quotas[i]) && t->quotas[i] != parent &&
                                t->quotas[i]->account.n_children > 0;
        if (b->leases.n >= CAPACITY_LEASES)
                snprintf(why, n, "there are %zu leases, which is the most: end some of them", b->leases.n);
        else if (t->n_leases >= LEASES_PER_TENANT)
                snprintf(why, n, "tenant '%s' has %u leases, which is the most: end some of them", t->name,
                         LEASES_PER_TENANT);
        else if (n_partitions >= LEDGER_SESSION_LEASES)
                snprintf(why, n, "tenant '%s' has leases in %d partitions, which is the most", t->name,
                         LEDGER_SESSION_LEASES);
        else
                return 0;
        return -EDQUOT;
}

static struct tenant *find_tenant(const struct broker *b, const char *name)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                if (b->tenants[i].config && strcmp(b->tenants[i].name, name) == 0)
                        return &b->tenants[i];
        return NULL;
}

/* The tenant's own quota in the partition. NULL: none. */
static struct quota *find_quota(const struct broker *b, const struct tenant *t, const char *partition)
{
        struct quota *q = NULL;

        for (size_t i = 0; t && i < b->n_partitions; i++)
                if (strcmp(b->partitions[i].name, partition) == 0)
                        q = tenant_quota(t, &b->partitions[i]);
        return q && !q->is_removed ? q : NULL;
}

static int check_name(const struct session *s, const char *name, char *why, size_t n)
{
        const struct lease *other = lease_find(s->broker, name);

        if (!ledger_is_name(lease_self_name(s, name))) {
                snprintf(why, n, "the name of a lease has 1 to %d letters, digits, '_', '-' and '.'",
                         CONFIG_NAME_MAX);
                return -EINVAL;
        }
        if (!other)
                return 0;
        if (quota_has_ended(other->quota))
                snprintf(why, n,
                         "lease '%s' of tenant '%s' is still ending, with %" PRIu32 " sessions and %s: wait, "
                         "evict them (bfcctl lease end --evict), or choose another name",
                         name, other->tenant->name, other->quota->sessions.n_told,
                         NUMBER_SIZE(other->quota->account.own_bytes));
        else
                snprintf(why, n, "lease '%s' exists already, of tenant '%s': end it, or choose another name",
                         name, other->tenant->name);
        return -EEXIST;
}

/* Whether the lease may have its socket, which others can have already: one tenant's, and one in each partition. */
static int check_socket(const struct broker *b, const struct tenant *t, const struct quota *parent,
                        const struct ledger_lease *facts, char *why, size_t n)
{
        const struct lease_socket *socket =
                facts->kind == LEASE_SOCKET ? lease_socket_find(b, facts->match) : NULL;

        if (!socket)
                return 0;
        if (socket->tenant != t) {
                snprintf(why, n, "socket '%s' is of a lease of tenant '%s': choose another name",
                         socket->name, socket->tenant->name);
                return -EEXIST;
        }
        for (size_t i = 0; i < b->leases.n; i++) {
                const struct lease *each = b->leases.list[i];

                if (each->socket == socket && quota_parent(each->quota) == parent &&
                    !quota_has_ended(each->quota)) {
                        snprintf(why, n,
                                 "socket '%s' is of lease '%s' in partition '%s': end it, or choose another "
                                 "name",
                                 socket->name, each->name, parent->partition->name);
                        return -EEXIST;
                }
        }
        return 0;
}

/* A lease that is asked for. */
struct new_lease {
        struct tenant *tenant;
        struct quota *parent;
        struct ledger_lease facts;
};

/* what: "time-out", "grace time". advice: what else a user can do. */
static int check_time(const char *what, uint64_t ms, const char *advice, char *why, size_t n)
{
        if (ms <= LEASE_MAX_DAYS * UINT64_C(24 * 3600 * 1000))
                return 0;
        snprintf(why, n, "the %s is longer than %u days: use a shorter one%s", what, LEASE_MAX_DAYS, advice);
        return -EINVAL;
}

static int check_create(const struct session *s, const Bfcd__LeaseCreate *m, struct new_lease *ret, char *why,
                        size_t n)
{
        const struct broker *b = s->broker;
        const char *tenant = s->role != ROLE_CLIENT || m->tenant[0] ? m->tenant : s->tenant->name;
        const struct quota *parent;
        int r = lease_self_check_names(s, m->name, tenant, why, n);

        if (r == 0)
                r = check_name(s, m->name, why, n);
        if (r < 0)
                return r;
        ret->tenant = find_tenant(b, tenant);
        parent = ret->parent = find_quota(b, ret->tenant, m->partition);
        if (!parent) {
                explain_names(s, tenant[0] ? tenant : "(none)", m->partition[0] ? m->partition : "(none)",
                              why, n);
                return -ENOENT;
        }
        if (parent->partition->preallocate) {
                snprintf(why, n,
                         "partition '%s' preallocates the whole limits of its tenants, so it has no memory "
                         "for leases",
                         parent->partition->name);
                return -EOPNOTSUPP;
        }
        r = read_match(m, &ret->facts, why, n);
        if (r == 0)
                r = check_socket(b, ret->tenant, parent, &ret->facts, why, n);
        if (r == 0)
                r = check_time("time-out", m->ttl_ms, ", or 0 for none", why, n);
        if (r == 0)
                r = check_time("grace time", m->grace_ms, "", why, n);
        return r;
}

/* The tree in which the node of a lease has these limits, as far as that is allowed; tree_free() it also then. lease: NULL:
 * a new one below `parent`. */
static int want(struct broker *b, const struct tenant *t, const struct quota *parent,
                const struct lease *lease, const struct quota_limits *to, struct tree *ret,
                struct tree_node **ret_node, char *why, size_t n)
{
        int r = tree_new(b, t, 1, ret);

        if (r < 0) {
                snprintf(why, n, "the daemon is out of memory");
                return r;
        }
        *ret_node = lease ? tree_find(ret, lease->quota) : tree_add(ret, tree_find(ret, parent), to);
        (*ret_node)->to = *to;
        tree_sum(ret);
        return check_reserve(*ret_node, why, n);
}

static int check_make(struct broker *b, struct tenant *t, const struct quota *parent,
                      const struct ledger_lease *facts, char *why, size_t n)
{
        const struct quota_limits to = { facts->limit_bytes, facts->reserve_bytes, parent->max_sessions,
                                         parent->max_blocks };
        struct tree tree = { 0 };
        struct tree_node *node;
        int r = check_sizes(to.limit_bytes, to.reserve_bytes, why, n);

        if (r == 0)
                r = check_limit(parent, to.limit_bytes, why, n);
        if (r == 0)
                r = want(b, t, parent, NULL, &to, &tree, &node, why, n);
        if (r == 0)
                r = check_count(b, t, parent, why, n);
        if (r == 0)
                r = lease_bounds_check(b, t, facts->maker, why, n);
        if (r == 0 && facts->maker == LEASE_BY_CONFIG) /* requests have been counted */
                r = lease_bounds_take(t, facts->maker, why, n);
        if (r == 0)
                r = lease_check_room(&tree, node, t, facts->maker, why, n);
        tree_free(&tree);
        return r;
}

static const char *name_session(const struct session *s, char ret[static LEASE_BY_BYTES])
{
        snprintf(ret, LEASE_BY_BYTES, "session %" PRIu64 " (uid %u, pid %d)", s->id, (unsigned)s->who.uid,
                 (int)s->who.pid);
        return ret;
}

/* For lists and the log. */
static const char *match_text(const struct ledger_lease *record, char ret[static LEDGER_PLACE_BYTES])
{
        if (record->kind == LEASE_PID || record->kind == LEASE_USER)
                snprintf(ret, LEDGER_PLACE_BYTES, "%" PRIu32,
                         record->kind == LEASE_PID ? record->pid : record->uid);
        else
                memcpy(ret, record->match, LEDGER_PLACE_BYTES);
        return ret;
}

/* Users and schedulers cause leases at will. */
static void log_lease(struct tenant *t, enum ledger_lease_maker maker, const char *line)
{
        if (!lease_maker_is_bounded(maker))
                log_info("%s", line);
        else
                log_limited(&t->lease_log, LOG_LEVEL_INFO, "%s", line);
}

/* Makes a lease of these facts within a quota of the tenant, if its limits and all tables have room. by: for the log.
 * Negative: a sentence says why not. */
static int lease_make(struct broker *b, struct tenant *t, struct quota *parent,
                      const struct ledger_lease *facts, const char *by, struct lease **ret, char *why,
                      size_t n)
{
        char match[LEDGER_PLACE_BYTES], line[LEASE_LINE_BYTES];
        int r = check_make(b, t, parent, facts, why, n);

        if (r < 0)
                return r;
        r = lease_new(b, t, parent, facts, ret);
        if (r < 0) {
                snprintf(why, n, "lease '%s' could not be made: %s%s", facts->name, strerror(-r),
                         facts->kind == LEASE_SOCKET
                                 ? "; where that is of its socket, the daemon's log says what to do"
                                 : "");
                return r;
        }
        (void)lease_has_lost_match(b, *ret); /* notes that its control group exists */
        snprintf(line, sizeof(line),
                 "%s: lease '%s' made: tenant '%s' in partition '%s', limit %s, reserve %s, for %s %s", by,
                 facts->name, t->name, parent->partition->name, NUMBER_SIZE(facts->limit_bytes),
                 NUMBER_SIZE(facts->reserve_bytes), lease_kind_name(facts->kind), match_text(facts, match));
        log_lease(t, facts->maker, line);
        b->leases.due_ms = 0;
        broker_wake(b);
        return 0;
}

/* A request counts whatever becomes of it: a scheduler's for the tenant of the lease, which may be NULL. True: there were too
 * many, and it was refused. */
static bool refuse_often(struct session *s, uint64_t id, struct tenant *of_lease)
{
        char why[EXPLAIN_SENTENCE];
        struct tenant *t = s->tenant ? s->tenant : of_lease;
        int r = t ? lease_bounds_take(t, maker_of(s), why, sizeof(why)) : 0;

        if (r < 0)
                session_refuse(s, id, r, why);
        return r < 0;
}

int handle_lease_create(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseCreate *m = r->lease_create;
        struct new_lease new = { .facts = { .born_ms = clock_ms() } };
        struct ledger_lease *facts = &new.facts;
        char why[EXPLAIN_SENTENCE], by[LEASE_BY_BYTES];
        struct lease *lease;
        int result;

        (void)ret_why;
        if (lease_self_refuse(s, r->id, "leases are made") ||
            refuse_often(s, r->id, find_tenant(s->broker, m->tenant)))
                return 0;
        result = check_create(s, m, &new, why, sizeof(why));
        if (result < 0) {
                session_refuse(s, r->id, result, why);
                return 0;
        }
        snprintf(facts->name, sizeof(facts->name), "%s", m->name);
        facts->limit_bytes = m->bytes_limit;
        facts->reserve_bytes = m->bytes_reserve;
        facts->ends_ms = m->ttl_ms > 0 ? facts->born_ms + m->ttl_ms : 0;
        facts->evicts = m->evicts != 0;
        facts->grace_ms = m->grace_ms;
        result = lease_self_check(s, new.parent, facts, why, sizeof(why));
        if (result == 0)
                result = lease_make(s->broker, new.tenant, new.parent, facts, name_session(s, by), &lease,
                                    why, sizeof(why));
        if (result < 0)
                session_refuse(s, r->id, result, why);
        else
                session_done(s, r->id);
        return 0;
}

/* ---- set and end ----------------------------------------------------------- */

/* NULL: the request was refused. */
static struct lease *find_lease(struct session *s, uint64_t id, const char *name)
{
        struct lease *lease = lease_find(s->broker, name);

        if (lease && lease_self_owns(s, lease))
                return lease;
        if (s->role == ROLE_ADMIN)
                session_refuse_format(s, id, -ENOENT,
                                      "there is no lease '%.63s'; 'bfcctl lease list' shows all", name);
        else /* it does not tell whether others have a lease of that name */
                session_refuse_format(s, id, -ENOENT,
                                      "there is no lease '%.63s' that was made by %s; operators change all "
                                      "leases",
                                      name, s->role == ROLE_CLIENT ? "this user" : "a scheduler");
        return NULL;
}

static int check_set(struct broker *b, const struct lease *lease, const Bfcd__LeaseSet *m,
                     const struct quota_limits *limits, enum ledger_lease_maker maker, struct tree *ret,
                     char *why, size_t n)
{
        const struct quota *q = lease->quota;
        struct tree_node *node;
        int r;

        if (quota_has_ended(q)) {
                snprintf(why, n, "lease '%s' has ended: make another one", lease->name);
                return -EBUSY;
        }
        r = check_time("time-out", m->ttl_ms, ", or 0 for none", why, n);
        if (r == 0)
                r = check_sizes(limits->limit_bytes, limits->reserve_bytes, why, n);
        if (r == 0 && m->bytes_limit > 0)
                r = check_limit(quota_parent(q), limits->limit_bytes, why, n);
        if (r == 0)
                r = want(b, lease->tenant, quota_parent(q), lease, limits, ret, &node, why, n);
        if (r == 0 && limits->limit_bytes > q->account.limit_bytes)
                r = lease_check_room(ret, node, lease->tenant, maker, why, n);
        if (r == 0 && quota_prepare_limit(lease->quota, limits->limit_bytes) < 0) {
                snprintf(why, n, "the sizes of its extents allow at most %s: make another lease",
                         NUMBER_SIZE(arena_limit_max(q->arena)));
                r = -EOPNOTSUPP;
        }
        return r;
}

static void apply_set(struct session *s, const struct lease *lease, const Bfcd__LeaseSet *m,
                      struct tree *tree)
{
        struct ledger_lease *record = lease_record(s->broker, lease);

        if (m->sets_ttl)
                record->ends_ms = m->ttl_ms > 0 ? clock_ms() + m->ttl_ms : 0;
        s->broker->leases.due_ms = 0;
        tree_apply(tree);
        tell_limits(s->broker);
}

int handle_lease_set(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseSet *m = r->lease_set;
        struct lease *lease;
        enum ledger_lease_maker maker = maker_of(s);
        struct quota_limits limits;
        struct tree tree = { 0 };
        char why[EXPLAIN_SENTENCE], by[LEASE_BY_BYTES];
        int result;

        (void)ret_why;
        lease = lease_find(s->broker, m->name);
        if (lease_self_refuse(s, r->id, "leases are changed") ||
            refuse_often(s, r->id, lease ? lease->tenant : NULL))
                return 0;
        lease = find_lease(s, r->id, m->name);
        if (!lease)
                return 0;
        limits = (struct quota_limits){
                .limit_bytes = m->bytes_limit > 0 ? m->bytes_limit : lease->quota->account.limit_bytes,
                .reserve_bytes = m->sets_reserve ? m->bytes_reserve : lease->quota->account.reserve_bytes,
                .max_sessions = lease->quota->max_sessions,
                .max_blocks = lease->quota->max_blocks,
        };
        result = lease_self_check_reserve(s, quota_parent(lease->quota), lease->quota->account.reserve_bytes,
                                          limits.reserve_bytes, why, sizeof(why));
        if (result == 0)
                result = check_set(s->broker, lease, m, &limits, maker, &tree, why, sizeof(why));
        if (result == 0)
                apply_set(s, lease, m, &tree);
        tree_free(&tree);
        if (result < 0) {
                session_refuse(s, r->id, result, why);
                return 0;
        }
        snprintf(why, sizeof(why), "%s: lease '%s' changed: limit %s, reserve %s", name_session(s, by),
                 lease->name, NUMBER_SIZE(limits.limit_bytes), NUMBER_SIZE(limits.reserve_bytes));
        log_lease(lease->tenant, maker, why);
        session_done(s, r->id);
        return 0;
}

static bool is_in_lease(const struct session *s, const struct lease *lease)
{
        for (size_t i = 0; s && i < s->n_shares; i++)
                if (s->shares[i].quota == lease->quota)
                        return true;
        return false;
}

/* evicts: its sessions are evicted at evicts_ms. True: it had not ended before; call tell_ended(). */
static bool end_lease(struct broker *b, struct lease *lease, bool evicts, uint64_t grace_ms, const char *why)
{
        struct ledger_lease *record = lease_record(b, lease);
        bool was_ended = record->ended_ms != 0;
        char line[LEASE_LINE_BYTES];

        lease_end(b, lease);
        if (evicts)
                record->evicts_ms = clock_ms() + grace_ms;
        b->leases.due_ms = 0;
        if (was_ended)
                return false;
        snprintf(line, sizeof(line),
                 "lease '%s' of tenant '%s' in partition '%s' ends: %s; %" PRIu32
                 " sessions have %s reserved",
                 lease->name, lease->tenant->name, lease->quota->partition->name, why,
                 lease->quota->sessions.n_told, NUMBER_SIZE(lease->quota->account.own_bytes));
        log_lease(lease->tenant, record->maker, line);
        lease->quota->sessions.limit_changed = true;
        return true;
}

/* Once for all leases that ended. */
static void tell_ended(struct broker *b)
{
        tell_limits(b);
        shared_review_kept(b);
}

/* NULL: no lease of the session says that it is to be evicted. */
static const char *evicting_lease(const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->sessions.are_evicted)
                        return s->shares[i].quota->lease;
        return NULL;
}

static int evict_session(struct session *s, const char *lease)
{
        char reason[LEDGER_NAME_BYTES + 64];

        snprintf(reason, sizeof(reason), ": its lease '%s' has ended", lease);
        return session_evict(s, reason, "evicted: its lease has ended");
}

/* In one pass. False: the daemon is out of memory, and some may be left. */
static bool evict_sessions(struct broker *b)
{
        bool are_evicted = true;

        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];
                const char *lease = s && !s->eviction && session_may_be_evicted(s) ? evicting_lease(s) : NULL;

                if (lease && evict_session(s, lease) < 0)
                        are_evicted = false;
        }
        return are_evicted;
}

static void reply_end(struct session *s, uint64_t id, const struct lease *lease)
{
        Bfcd__SessionRow rows[LEASE_MAX_ROWS], *pointers[LEASE_MAX_ROWS];
        char *leases[LEASE_MAX_ROWS][LEDGER_SESSION_LEASES];
        Bfcd__LeaseEndReply end = BFCD__LEASE_END_REPLY__INIT;
        Bfcd__Reply reply = BFCD__REPLY__INIT;

        for (size_t i = 0; i < s->broker->sessions.n_slots; i++) {
                const struct session *each = s->broker->sessions.table[i];

                if (!is_in_lease(each, lease))
                        continue;
                end.num_sessions++;
                if (end.n_sessions == LEASE_MAX_ROWS)
                        continue;
                report_session(each, &rows[end.n_sessions], leases[end.n_sessions]);
                pointers[end.n_sessions] = &rows[end.n_sessions];
                end.n_sessions++;
        }
        end.sessions = pointers;
        end.bytes_in_use = lease->quota->all.bytes_in_use;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_LEASE_END;
        reply.lease_end = &end;
        session_send(s, &reply);
}

int handle_lease_end(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseEnd *m = r->lease_end;
        struct lease *lease;
        char why[LEASE_BY_BYTES + 32], by[LEASE_BY_BYTES];

        (void)ret_why;
        if (lease_self_refuse(s, r->id, "leases are ended"))
                return 0;
        lease = find_lease(s, r->id, m->name);
        if (!lease)
                return 0;
        if (check_time("grace time", m->grace_ms, "", why, sizeof(why)) < 0) {
                session_refuse(s, r->id, -EINVAL, why);
                return 0;
        }
        snprintf(why, sizeof(why), "requested by %s", name_session(s, by));
        if (end_lease(s->broker, lease, m->evicts, m->grace_ms, why))
                tell_ended(s->broker);
        reply_end(s, r->id, lease);
        return 0;
}

/* ---- the end by itself ------------------------------------------------------- */

static bool end_by_itself(struct broker *b, struct lease *lease, const char *why)
{
        const struct ledger_lease *record = lease_record(b, lease);

        return end_lease(b, lease, record->evicts != 0, record->grace_ms, why);
}

/* True: it has ended now. */
static bool tick_one(struct broker *b, struct lease *lease, uint64_t now_ms)
{
        struct ledger_lease *record = lease_record(b, lease);
        bool ends = false;

        if (record->ended_ms == 0 && quota_parent(lease->quota)->is_removed)
                ends = end_by_itself(b, lease, "the configuration no longer has its tenant's quota");
        if (record->ended_ms == 0 && lease->quota->partition->preallocate)
                ends = end_by_itself(b, lease, "its partition preallocates the limits of its tenants");
        if (record->ended_ms == 0 && record->ends_ms != 0 && now_ms >= record->ends_ms)
                ends = end_by_itself(b, lease, "its time is over");

        if (record->evicts_ms != 0 && now_ms >= record->evicts_ms && !lease->quota->sessions.are_evicted) {
                lease->quota->sessions.are_evicted = true;
                b->leases.may_evict = true;
        }
        return ends;
}

/* Of a time that has not passed. */
static uint64_t earlier(uint64_t due_ms, uint64_t at_ms, uint64_t now_ms)
{
        return at_ms > now_ms ? min_u64(due_ms, at_ms) : due_ms;
}

static void plan_tick(struct broker *b, uint64_t now_ms)
{
        uint64_t wait_ms = LEASE_LOOK_MS * LEASE_LOOKS / max_u64(b->leases.n, LEASE_LOOKS);

        b->leases.due_ms = now_ms + wait_ms;
        for (size_t i = 0; i < b->leases.n; i++) {
                const struct ledger_lease *record = lease_record(b, b->leases.list[i]);

                b->leases.due_ms =
                        earlier(b->leases.due_ms, record->ended_ms == 0 ? record->ends_ms : record->evicts_ms,
                                now_ms);
        }
}

uint64_t lease_tick_due(const struct broker *b)
{
        return b->leases.n > 0 ? max_u64(b->leases.due_ms, 1) : 0;
}

void lease_tick(struct broker *b, uint64_t now_ms)
{
        bool has_ended = false;

        for (size_t n = 0; n < LEASE_LOOKS && n < b->leases.n; n++) {
                struct lease *lease = b->leases.list[b->leases.next_look++ % b->leases.n];

                if (!quota_has_ended(lease->quota) && lease_has_lost_match(b, lease) &&
                    end_by_itself(b, lease,
                                  lease_record(b, lease)->kind == LEASE_PID ? "its process has exited"
                                                                            : "its control group is gone"))
                        has_ended = true;
        }
        for (size_t i = 0; i < b->leases.n; i++)
                has_ended = tick_one(b, b->leases.list[i], now_ms) || has_ended;
        if (has_ended)
                tell_ended(b);
        if (b->leases.may_evict)
                b->leases.may_evict = !evict_sessions(b);
        plan_tick(b, now_ms);
}

void lease_gone(const struct lease_end *end)
{
        const struct ledger_lease *record = end->record;
        const struct ledger_lifetime *life = end->life;
        uint64_t now_us = clock_wall_us(), lasted_ms = clock_ms() - record->born_ms;
        uint64_t n_refusals = life->n_over_quota + life->n_out_of_memory;
        char match[LEDGER_PLACE_BYTES];
        struct record r;

        record_init(&r, RECORD_LEASE);
        record_add_text(&r, "tenant", end->tenant, CONFIG_NAME_MAX);
        record_add_text(&r, "partition", end->partition, CONFIG_NAME_MAX);
        record_add_text(&r, "lease", record->name, CONFIG_NAME_MAX);
        record_add_text(&r, "match_kind", lease_kind_name(record->kind), CONFIG_NAME_MAX);
        record_add_text(&r, "match", match_text(record, match), sizeof(match));
        record_add_number(&r, "begin_us", now_us - min_u64(now_us, lasted_ms * 1000));
        record_add_number(&r, "end_us", now_us);
        record_add_number(&r, "limit_bytes", record->limit_bytes);
        record_add_number(&r, "peak_bytes", life->peak_in_use);
        record_add_number(&r, "peak_reserved_bytes", life->peak_reserved);
        record_add_number(&r, "refusals", n_refusals);
        record_add_number(&r, "waited_us", life->waited_ns / 1000);
        records_write(LOG_LEVEL_INFO, &r,
                      "lease '%s' of tenant '%s' in partition '%s' ended: duration %" PRIu64
                      " ms, peak %s in use, %s reserved of %s, %" PRIu64 " refusals, waited %" PRIu64 " us",
                      record->name, end->tenant, end->partition, lasted_ms, NUMBER_SIZE(life->peak_in_use),
                      NUMBER_SIZE(life->peak_reserved), NUMBER_SIZE(record->limit_bytes), n_refusals,
                      life->waited_ns / 1000);
}

/* ==== leases by 'per: cgroup' ================================================ */

#define NAME_PART 40 /* bytes of the control group in the name */

/* Whether an operator's or the config's lease is for the control group or further inside. Others' would replace the limit
 * of the config. */
static bool is_as_deep(const struct broker *b, const struct lease *lease, const char *group)
{
        const struct ledger_lease *record = lease_record(b, lease);

        return (record->maker == LEASE_BY_OPERATOR || record->maker == LEASE_BY_CONFIG) &&
               (record->kind == LEASE_PID ||
                (record->kind == LEASE_CGROUP && lease_path_depth(record->match) >= lease_path_depth(group)));
}

/* The last component of the control group and a number that no lease had before. No name that is given to a lease has a
 * '::'. */
static void make_auto_name(const struct broker *b, const char *group, char ret[static LEDGER_NAME_BYTES])
{
        const char *last = strrchr(group, '/') + 1;

        snprintf(ret, LEDGER_NAME_BYTES, "%.*s", NAME_PART, *last ? last : "root");
        for (char *c = ret; *c; c++)
                if (!strchr(LEDGER_NAME_CHARACTERS, *c))
                        *c = '_';
        snprintf(ret + strlen(ret), LEDGER_NAME_BYTES - strlen(ret), "::%" PRIu64,
                 ledger_quotas_end(b->ledger));
}

static int make_auto(struct session *s, struct quota *parent, const struct config_quota *per,
                     const char *group, struct lease **ret, char *why, size_t n)
{
        struct ledger_lease facts = { .born_ms = clock_ms(),
                                      .maker = LEASE_BY_CONFIG,
                                      .limit_bytes = per->per_limit_bytes,
                                      .reserve_bytes = per->per_reserve_bytes };
        char reason[SESSION_SENTENCE_BYTES];
        int r = lease_read_cgroup(group, &facts, reason, sizeof(reason));

        make_auto_name(s->broker, group, facts.name);
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
        return make_auto(s, parent, per, group, lease, why, n);
}
