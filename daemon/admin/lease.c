/* Admin commands about leases; see lease.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/admin/lease.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/admin/command.h"
#include "daemon/admin/explain.h"
#include "daemon/admin/reload.h"
#include "daemon/admin/report.h"
#include "daemon/clock.h"
#include "daemon/log.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/memory/cgroup.h"
#include "daemon/net/fd_reserve.h"
#include "daemon/number.h"
#include "daemon/record/records.h"
#include "daemon/session/session.h"

#define LEASE_MAX_MS   (UINT64_C(1) << 42) /* of times from outside: more than a hundred years */
#define LEASE_MAX_ROWS 40u                 /* sessions in a reply, each with the names of 16 leases */
#define LEASE_LOOK_MS  1000u               /* between looks at one lease */
#define LEASE_EVICT_MS 50u                 /* between attempts to evict a session that is being resumed */

/* ---- create ---------------------------------------------------------------- */

/* As names of tenants and partitions are. */
static bool name_is_valid(const char *name)
{
        static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-.";
        size_t n = strspn(name, allowed);

        return n > 0 && n <= CONFIG_NAME_MAX && name[n] == '\0';
}

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

static int read_cgroup(const char *path, struct ledger_lease *ret, char *why, size_t n)
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

        if (r < 0 || p.state == 'Z') {
                snprintf(why, n, "there is no process with pid %" PRIu64 " that the daemon can see", pid);
                return r < 0 ? r : -ESRCH;
        }
        ret->kind = LEASE_PID;
        ret->pid = (uint32_t)pid;
        ret->start_time = p.start_time;
        return 0;
}

static int read_match(const Bfcd__LeaseCreate *m, struct ledger_lease *ret, char *why, size_t n)
{
        switch (m->match_case) {
        case BFCD__LEASE_CREATE__MATCH_CGROUP:
                return read_cgroup(m->cgroup, ret, why, n);
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
        default:
                snprintf(why, n,
                         "the lease does not say which processes it is for: a control group, a unit, a "
                         "pid or a user");
                return -EINVAL;
        }
}

static int check_sizes(uint64_t limit, uint64_t reserve, char *why, size_t n)
{
        if (limit == 0 || limit % CONFIG_GRANULARITY != 0 || reserve % CONFIG_GRANULARITY != 0)
                snprintf(why, n,
                         "limit and reserve are multiples of 2 MiB, and the limit is not 0: limit %" PRIu64
                         ", reserve %" PRIu64 " bytes",
                         limit, reserve);
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

/* lacks: NULL, or the account that does not have the reserve. */
static int check_reserve(const struct quota *parent, const struct account *lacks, uint64_t reserve, char *why,
                         size_t n)
{
        const struct partition *p = parent->partition;

        if (!lacks)
                return 0;
        snprintf(why, n,
                 "reserve %s cannot be guaranteed: of the %s of %s '%s', %s are reserved or guaranteed",
                 NUMBER_SIZE(reserve), NUMBER_SIZE(lacks->limit_bytes),
                 lacks == &p->pool ? "partition" : "tenant", lacks == &p->pool ? p->name : parent->tenant,
                 NUMBER_SIZE(lacks->committed_bytes));
        return -ENOMEM;
}

/* How many extents a lease with this limit may have. */
static uint64_t lease_extents(const struct quota *parent, const struct lease *lease, uint64_t limit)
{
        const struct partition *p = parent->partition;
        struct extent_sizes sizes = extent_sizes_for(p->share, limit, device_granularity(p->device));

        return lease ? arena_extent_room(lease->quota->arena, limit)
                     : extent_max_count(p->share, limit, &sizes);
}

/* As many records as all quotas may need, with a lease of this limit. lease: it exists; NULL: a new one. */
static int check_room(const struct broker *b, const struct quota *parent, const struct lease *lease,
                      uint64_t limit, char *why, size_t n)
{
        uint64_t n_quotas = 1, n_extents = lease_extents(parent, lease, limit);
        uint64_t n_exports = n_extents * min_u64(max_u64(parent->max_sessions, parent->all.n_sessions),
                                                 b->room.n_sessions);

        for (size_t i = 0; i < b->n_tenants; i++) {
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        uint64_t extents = arena_extent_room(q->arena, q->account.limit_bytes);

                        if (lease && q == lease->quota)
                                continue;
                        n_quotas++;
                        n_extents += extents;
                        n_exports += extents *
                                     min_u64(max_u64(q->max_sessions, q->sessions.n), b->room.n_sessions);
                }
        }
        if (n_quotas <= b->room.n_quotas && n_extents <= b->room.n_extents && n_exports <= b->room.n_exports)
                return 0;
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(limit), parent->tenant);
        return -ENOSPC;
}

/* As many fds as all extents may need beside the sessions that exist, the same way. As at the start, it is only a
 * warning if max_sessions would need more. */
static int check_fds(const struct broker *b, const struct quota *parent, const struct lease *lease,
                     uint64_t limit, char *why, size_t n)
{
        uint64_t n_usable = fd_reserve_usable(), max_sessions = b->config->max_sessions, n_wanted;
        struct capacity_lease leases[CAPACITY_LEASES + 1];
        const struct quota *replaced = lease ? lease->quota : NULL;
        size_t k = 0;

        for (size_t i = 0; i < b->leases.n; i++) {
                const struct quota *q = b->leases.list[i]->quota;

                if (q != replaced)
                        leases[k++] = (struct capacity_lease){ (size_t)(q->partition - b->partitions),
                                                               q->account.limit_bytes };
        }
        leases[k++] = (struct capacity_lease){ (size_t)(parent->partition - b->partitions), limit };
        n_wanted = capacity_fds(b->config, b->sessions.n_clients, leases, k);
        if (n_wanted > n_usable) {
                snprintf(why, n,
                         "the limit on file descriptors is too low for a lease of %s: with it, all extents "
                         "and the %zu sessions that exist can need %" PRIu64 ", and %" PRIu64
                         " are available: raise LimitNOFILE= of the service, or end other leases",
                         NUMBER_SIZE(limit), b->sessions.n_clients, n_wanted, n_usable);
                return -EMFILE;
        }
        n_wanted = capacity_fds(b->config, max_sessions, leases, k);
        if (n_wanted > n_usable && capacity_fds(b->config, max_sessions, leases, k - 1) <= n_usable)
                log_warning("the limit on file descriptors is too low for all leases beside max_sessions: "
                            "%" PRIu64 ", which together can need %" PRIu64 ": %" PRIu64
                            " are available; raise LimitNOFILE= of the service, or lower max_sessions",
                            max_sessions, n_wanted, n_usable);
        return 0;
}

/* How many leases there may be. */
static int check_count(const struct broker *b, const struct tenant *t, const struct quota *parent, char *why,
                       size_t n)
{
        size_t n_partitions = 0;

        for (size_t i = 0; i < t->n_quotas; i++)
                n_partitions += !t->quotas[i]->lease.parent && t->quotas[i] != parent &&
                                t->quotas[i]->account.n_children > 0;
        if (b->leases.n >= CAPACITY_LEASES)
                snprintf(why, n, "there are %zu leases, which is the most: end some of them", b->leases.n);
        else if (lease_count(b, t) >= LEASES_PER_TENANT)
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

static int check_name(const struct broker *b, const char *name, char *why, size_t n)
{
        const struct lease *other = lease_find(b, name);

        if (!name_is_valid(name)) {
                snprintf(why, n, "the name of a lease has 1 to %d letters, digits, '_', '-' and '.'",
                         CONFIG_NAME_MAX);
                return -EINVAL;
        }
        if (!other)
                return 0;
        if (other->quota->lease.is_ended)
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

/* A lease that is asked for. */
struct new_lease {
        struct tenant *tenant;
        struct quota *parent;
        struct ledger_lease facts;
};

static int check_create(const struct session *s, const Bfcd__LeaseCreate *m, struct new_lease *ret, char *why,
                        size_t n)
{
        const struct broker *b = s->broker;
        const struct quota *parent;
        int r = check_name(b, m->name, why, n);

        if (r < 0)
                return r;
        ret->tenant = find_tenant(b, m->tenant);
        parent = ret->parent = find_quota(b, ret->tenant, m->partition);
        if (!parent) {
                explain_names(s, m->tenant[0] ? m->tenant : "(none)",
                              m->partition[0] ? m->partition : "(none)", why, n);
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
        if (r == 0 && (m->ttl_ms > LEASE_MAX_MS || m->grace_ms > LEASE_MAX_MS)) {
                snprintf(why, n, "the time-out or the grace time is too long");
                r = -EINVAL;
        }
        if (r == 0)
                r = check_sizes(m->bytes_limit, m->bytes_reserve, why, n);
        if (r == 0)
                r = check_limit(parent, m->bytes_limit, why, n);
        if (r == 0)
                r = check_reserve(parent, account_short_of(&parent->account, m->bytes_reserve),
                                  m->bytes_reserve, why, n);
        if (r == 0)
                r = check_count(b, ret->tenant, parent, why, n);
        if (r == 0)
                r = check_room(b, parent, NULL, m->bytes_limit, why, n);
        return r == 0 ? check_fds(b, parent, NULL, m->bytes_limit, why, n) : r;
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

int handle_lease_create(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseCreate *m = r->lease_create;
        char why[EXPLAIN_SENTENCE], match[LEDGER_PLACE_BYTES];
        struct new_lease new = { .facts = { .born_ms = clock_ms() } };
        struct ledger_lease *facts = &new.facts;
        struct lease *lease;
        int result;

        (void)ret_why;
        if (command_refuse_client(s, r->id, "leases are made"))
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
        result = lease_new(s->broker, new.tenant, new.parent, facts, &lease);
        if (result < 0) {
                session_refuse_format(s, r->id, result, "lease '%s' could not be made: %s", m->name,
                                      strerror(-result));
                return 0;
        }
        (void)lease_has_lost_match(s->broker, lease); /* notes that its control group exists */
        log_info("session %" PRIu64
                 " (uid %u, pid %d): lease '%s' made: tenant '%s' in partition '%s', limit %s, "
                 "reserve %s, for %s %s",
                 s->id, (unsigned)s->who.uid, (int)s->who.pid, lease->name, lease->tenant->name,
                 lease->quota->partition->name, NUMBER_SIZE(m->bytes_limit), NUMBER_SIZE(m->bytes_reserve),
                 lease_kind_name(facts->kind), match_text(facts, match));
        s->broker->leases.due_ms = 0;
        broker_wake(s->broker);
        session_done(s, r->id);
        return 0;
}

/* ---- set and end ----------------------------------------------------------- */

/* NULL: the request was refused. */
static struct lease *find_lease(struct session *s, uint64_t id, const char *name, const char *what)
{
        struct lease *lease;

        if (command_refuse_client(s, id, what))
                return NULL;
        lease = lease_find(s->broker, name);
        if (!lease)
                session_refuse_format(s, id, -ENOENT,
                                      "there is no lease '%.63s'; 'bfcctl lease list' shows all", name);
        return lease;
}

static int check_set(const struct broker *b, const struct lease *lease, const Bfcd__LeaseSet *m,
                     const struct quota_limits *limits, char *why, size_t n)
{
        const struct quota *q = lease->quota;
        int r;

        if (q->lease.is_ended) {
                snprintf(why, n, "lease '%s' has ended: make another one", lease->name);
                return -EBUSY;
        }
        if (m->ttl_ms > LEASE_MAX_MS) {
                snprintf(why, n, "the time-out is too long");
                return -EINVAL;
        }
        r = check_sizes(limits->limit_bytes, limits->reserve_bytes, why, n);
        if (r == 0 && m->bytes_limit > 0)
                r = check_limit(q->lease.parent, limits->limit_bytes, why, n);
        if (r == 0)
                r = check_reserve(q->lease.parent, account_lacks_reserve(&q->account, limits->reserve_bytes),
                                  limits->reserve_bytes, why, n);
        if (r == 0 && limits->limit_bytes > q->account.limit_bytes)
                r = check_room(b, q->lease.parent, lease, limits->limit_bytes, why, n);
        if (r == 0 && limits->limit_bytes > q->account.limit_bytes)
                r = check_fds(b, q->lease.parent, lease, limits->limit_bytes, why, n);
        if (r == 0 && quota_prepare_limit(lease->quota, limits->limit_bytes) < 0) {
                snprintf(why, n, "the sizes of its extents allow at most %s: make another lease",
                         NUMBER_SIZE(arena_limit_max(q->arena)));
                r = -EOPNOTSUPP;
        }
        return r;
}

/* The reserve is never above the limit, also if the daemon is killed between the stores. */
static void store_limits(struct ledger_lease *record, const struct quota_limits *limits)
{
        if (limits->reserve_bytes < record->reserve_bytes)
                record->reserve_bytes = limits->reserve_bytes;
        record->limit_bytes = limits->limit_bytes;
        record->reserve_bytes = limits->reserve_bytes;
}

static void apply_set(struct session *s, struct lease *lease, const Bfcd__LeaseSet *m,
                      const struct quota_limits *limits)
{
        struct ledger_lease *record = lease_record(s->broker, lease);
        struct partition *p = lease->quota->partition;
        struct quota *q = lease->quota;

        if (m->sets_ttl)
                record->ends_ms = m->ttl_ms > 0 ? clock_ms() + m->ttl_ms : 0;
        s->broker->leases.due_ms = 0;
        q->sessions.limit_changed = q->account.limit_bytes != limits->limit_bytes;
        store_limits(record, limits);
        quota_set(q, limits);
        partition_set_limit(p, p->pool.limit_bytes, p->reclaim_timeout_ms); /* its requests look again */
        reload_tell_sessions(s->broker);
        if (quota_excess(q) > 0)
                trim_excess(s->broker, q, quota_excess(q));
}

int handle_lease_set(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseSet *m = r->lease_set;
        struct lease *lease = find_lease(s, r->id, m->name, "leases are changed");
        struct quota_limits limits;
        char why[EXPLAIN_SENTENCE];
        int result;

        (void)ret_why;
        if (!lease)
                return 0;
        limits = (struct quota_limits){
                .limit_bytes = m->bytes_limit > 0 ? m->bytes_limit : lease->quota->account.limit_bytes,
                .reserve_bytes = m->sets_reserve ? m->bytes_reserve : lease->quota->account.reserve_bytes,
                .max_sessions = lease->quota->max_sessions,
                .max_blocks = lease->quota->max_blocks,
        };
        result = check_set(s->broker, lease, m, &limits, why, sizeof(why));
        if (result < 0) {
                session_refuse(s, r->id, result, why);
                return 0;
        }
        apply_set(s, lease, m, &limits);
        log_info("session %" PRIu64 " (uid %u, pid %d): lease '%s' changed: limit %s, reserve %s", s->id,
                 (unsigned)s->who.uid, (int)s->who.pid, lease->name, NUMBER_SIZE(limits.limit_bytes),
                 NUMBER_SIZE(limits.reserve_bytes));
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

        lease_end(b, lease);
        if (evicts)
                record->evicts_ms = clock_ms() + grace_ms;
        b->leases.due_ms = 0;
        if (was_ended)
                return false;
        log_info("lease '%s' of tenant '%s' in partition '%s' ends: %s; %" PRIu32
                 " sessions have %s reserved",
                 lease->name, lease->tenant->name, lease->quota->partition->name, why,
                 lease->quota->sessions.n_told, NUMBER_SIZE(lease->quota->account.own_bytes));
        lease->quota->sessions.limit_changed = true;
        return true;
}

/* Once for all leases that ended. */
static void tell_ended(struct broker *b)
{
        reload_tell_sessions(b);
        shared_review_kept(b);
}

/* NULL: no lease of the session says that it is to be evicted. */
static const char *evicting_lease(const struct session *s)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (s->shares[i].quota->sessions.are_evicted)
                        return s->shares[i].quota->lease.name;
        return NULL;
}

static void evict_session(struct session *s, const char *lease)
{
        char reason[LEDGER_NAME_BYTES + 64];

        snprintf(reason, sizeof(reason), ": its lease '%s' has ended", lease);
        if (command_evict(s, reason, "evicted: its lease has ended") == 0)
                log_notice("session %" PRIu64
                           " (tenant '%s', uid %u, pid %d, %s): evicted, because its lease '%s' has ended",
                           s->id, s->tenant->name, (unsigned)s->who.uid, (int)s->who.pid, s->name, lease);
}

/* In one pass. False: none is left to evict. */
static bool evict_sessions(struct broker *b)
{
        bool are_left = false;

        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];
                const char *lease =
                        s && !s->eviction && s->state < SESSION_CLOSING ? evicting_lease(s) : NULL;

                if (lease && command_may_evict(s))
                        evict_session(s, lease);
                are_left = are_left || (lease && !s->eviction);
        }
        return are_left;
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
        end.bytes_in_use = lease->quota->bytes_in_use;
        reply.id = id;
        reply.body_case = BFCD__REPLY__BODY_LEASE_END;
        reply.lease_end = &end;
        session_send(s, &reply);
}

int handle_lease_end(struct session *s, const Bfcd__Request *r, const char **ret_why)
{
        const Bfcd__LeaseEnd *m = r->lease_end;
        struct lease *lease = find_lease(s, r->id, m->name, "leases are ended");
        char why[96];

        (void)ret_why;
        if (!lease)
                return 0;
        if (m->grace_ms > LEASE_MAX_MS) {
                session_refuse(s, r->id, -EINVAL, "the grace time is too long");
                return 0;
        }
        snprintf(why, sizeof(why), "requested by session %" PRIu64 " (uid %u, pid %d)", s->id,
                 (unsigned)s->who.uid, (int)s->who.pid);
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

        if (record->ended_ms == 0 && lease->quota->lease.parent->is_removed)
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

        b->leases.due_ms = now_ms + (b->leases.may_evict ? min_u64(wait_ms, LEASE_EVICT_MS) : wait_ms);
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

                if (!lease->quota->lease.is_ended && lease_has_lost_match(b, lease) &&
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
                b->leases.may_evict = evict_sessions(b);
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
                      " ms, peak %" PRIu64 " bytes in use, %" PRIu64 " bytes reserved of %" PRIu64
                      ", %" PRIu64 " refusals, waited %" PRIu64 " us",
                      record->name, end->tenant, end->partition, lasted_ms, life->peak_in_use,
                      life->peak_reserved, (uint64_t)record->limit_bytes, n_refusals, life->waited_ns / 1000);
}
