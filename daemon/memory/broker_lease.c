/* Leases; see broker_lease.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker_lease.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/cgroup.h"
#include "daemon/base/clock.h"
#include "daemon/base/fd_reserve.h"
#include "daemon/base/log.h"
#include "daemon/base/number.h"
#include "daemon/memory/broker.h"
#include "daemon/memory/change.h"

const char *lease_kind_name(enum ledger_lease_kind kind)
{
        static const char *const names[LEASE_KINDS] = {
                [LEASE_CGROUP] = "cgroup", [LEASE_UNIT] = "unit",     [LEASE_PID] = "pid",
                [LEASE_USER] = "user",     [LEASE_SOCKET] = "socket",
        };

        return names[kind];
}

const char *lease_maker_name(enum ledger_lease_maker maker)
{
        static const char *const names[LEASE_MAKERS] = {
                [LEASE_BY_OPERATOR] = "operator",
                [LEASE_BY_CONFIG] = "config",
                [LEASE_BY_USER] = "user",
                [LEASE_BY_SCHEDULER] = "scheduler",
        };

        return names[maker];
}

bool lease_maker_is_bounded(enum ledger_lease_maker maker)
{
        return maker != LEASE_BY_OPERATOR;
}

struct lease *lease_find(const struct broker *b, const char *name)
{
        for (size_t i = 0; i < b->leases.n; i++)
                if (strcmp(b->leases.list[i]->name, name) == 0)
                        return b->leases.list[i];
        return NULL;
}

struct lease *lease_of(const struct quota *q)
{
        return (struct lease *)(uintptr_t)(q->lease - offsetof(struct lease, name));
}

struct ledger_lease *lease_record(const struct broker *b, const struct lease *lease)
{
        return ledger_lease_at(b->ledger, lease->index);
}

size_t lease_count_by(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                      const uint32_t *uid)
{
        size_t n = 0;

        for (size_t i = 0; i < b->leases.n; i++) {
                const struct ledger_lease *record = lease_record(b, b->leases.list[i]);

                n += (!t || b->leases.list[i]->tenant == t) && record->maker == maker &&
                     (!uid || record->maker_uid == *uid);
        }
        return n;
}

/* ---- sockets -------------------------------------------------------------------- */

struct lease_socket *lease_socket_find(const struct broker *b, const char *name)
{
        struct lease_socket *socket;

        TAILQ_FOREACH(socket, &b->leases.sockets, link)
        if (strcmp(socket->name, name) == 0)
                return socket;
        return NULL;
}

struct lease_socket *lease_socket_numbered(const struct broker *b, uint64_t number)
{
        struct lease_socket *socket;

        TAILQ_FOREACH(socket, &b->leases.sockets, link)
        if (socket->number == number)
                return socket;
        return NULL;
}

/* The lease is none of the socket's any more. stays: the next daemon makes it again. */
static void leave_socket(struct broker *b, struct lease_socket *socket, bool stays)
{
        if (!socket || --socket->n_leases > 0)
                return;
        TAILQ_REMOVE(&b->leases.sockets, socket, link);
        if (b->options.close_socket && !stays)
                b->options.close_socket(b->options.userdata, socket);
        free(socket);
}

static int make_socket(struct broker *b, struct tenant *t, const char *name, struct lease_socket **ret)
{
        struct lease_socket *socket = calloc(1, sizeof(*socket));

        if (!socket)
                return -ENOMEM;
        memcpy(socket->name, name, strnlen(name, sizeof(socket->name) - 1));
        socket->tenant = t;
        socket->number = ++b->leases.n_sockets;
        TAILQ_INSERT_TAIL(&b->leases.sockets, socket, link);
        *ret = socket;
        return 0;
}

/* The socket of the lease, if it is for one. is_new: it listens, or that is an error. Otherwise the lease is inherited, and the
 * server opens its socket. */
static int take_socket(struct broker *b, struct tenant *t, const struct ledger_lease *record, bool is_new,
                       struct lease_socket **ret)
{
        struct lease_socket *socket;
        int r = 0;

        *ret = NULL;
        if (record->kind != LEASE_SOCKET)
                return 0;
        socket = lease_socket_find(b, record->match);
        if (!socket)
                r = make_socket(b, t, record->match, &socket);
        if (r < 0)
                return r;
        socket->n_leases++;
        if (is_new && !socket->listener && b->options.open_socket)
                r = b->options.open_socket(b->options.userdata, socket);
        if (r < 0)
                leave_socket(b, socket, false);
        else
                *ret = socket;
        return r;
}

/* ---- making one ---------------------------------------------------------------- */

static int lease_alloc(struct broker *b, struct tenant *t, const char *name, struct lease **ret)
{
        struct lease **list = reallocarray(b->leases.list, b->leases.n + 1, sizeof(struct lease *));

        if (list)
                b->leases.list = list;
        *ret = list ? calloc(1, sizeof(**ret)) : NULL;
        if (!*ret)
                return -ENOMEM;
        snprintf((*ret)->name, sizeof((*ret)->name), "%s", name);
        (*ret)->tenant = t;
        return 0;
}

static void lease_enlist(struct broker *b, struct lease *lease, struct quota *q, uint32_t index)
{
        lease->quota = q;
        lease->index = index;
        b->leases.list[b->leases.n++] = lease; /* the newest last */
        lease->tenant->n_leases++;
        if (lease_record(b, lease)->ended_ms != 0)
                quota_remove(q);
}

int lease_new(struct broker *b, struct tenant *t, struct quota *parent, const struct ledger_lease *facts,
              struct lease **ret)
{
        struct quota_options options = {
                .parent = parent,
                .limit_bytes = facts->limit_bytes,
                .reserve_bytes = facts->reserve_bytes,
                .max_sessions = parent->max_sessions,
                .max_blocks = parent->max_blocks,
        };
        struct ledger_lease record = *facts;
        struct lease *lease;
        uint32_t index;
        int r = lease_alloc(b, t, facts->name, &lease);

        if (r < 0)
                return r;
        options.lease = lease->name;
        r = take_socket(b, t, facts, true, &lease->socket);
        if (r < 0) {
                free(lease);
                return r;
        }
        r = broker_make_quota(b, t, (size_t)(parent->partition - b->partitions), &options);
        if (r < 0) {
                leave_socket(b, lease->socket, false);
                free(lease);
                return r;
        }
        record.quota = t->quotas[t->n_quotas - 1]->index;
        r = ledger_lease_add(b->ledger, &record, &index);
        if (r < 0) {
                quota_free(t->quotas[--t->n_quotas]);
                leave_socket(b, lease->socket, false);
                free(lease);
                return r;
        }
        lease_enlist(b, lease, t->quotas[t->n_quotas - 1], index);
        *ret = lease;
        return 0;
}

int lease_adopt(struct broker *b, struct tenant *t, struct quota *q, uint32_t index, struct lease **ret)
{
        struct lease *lease;
        int r = lease_alloc(b, t, ledger_lease_at(b->ledger, index)->name, &lease);

        if (r < 0)
                return r;
        r = take_socket(b, t, ledger_lease_at(b->ledger, index), false, &lease->socket);
        if (r < 0) {
                free(lease);
                return r;
        }
        q->lease = lease->name;
        lease_enlist(b, lease, q, index);
        *ret = lease;
        return 0;
}

/* ---- matching ------------------------------------------------------------------ */

unsigned lease_path_depth(const char *path)
{
        unsigned n = 0;

        for (; *path; path++)
                n += path[0] == '/' && path[1] != '\0';
        return n;
}

/* Whether a path is in a control group, or is it. */
static bool path_is_in(const char *path, const char *group)
{
        size_t n = strlen(group);

        if (strcmp(group, "/") == 0)
                return true;
        return strncmp(path, group, n) == 0 && (path[n] == '\0' || path[n] == '/');
}

/* When the oldest process began that a lease of the tenant is for. */
static uint64_t oldest_process(const struct broker *b, const struct tenant *t)
{
        uint64_t oldest = UINT64_MAX;

        for (size_t i = 0; i < b->leases.n; i++) {
                const struct ledger_lease *record = lease_record(b, b->leases.list[i]);

                if (b->leases.list[i]->tenant == t && record->kind == LEASE_PID)
                        oldest = min_u64(oldest, record->start_time);
        }
        return oldest;
}

static int match_process(const struct broker *b, const struct ledger_lease *record, struct lease_peer *peer)
{
        if (!peer->has_ancestors)
                peer->n_ancestors =
                        process_ancestors("/proc", peer->who->pid, oldest_process(b, peer->tenant),
                                          peer->ancestors, PROCESS_MAX_ANCESTORS);
        peer->has_ancestors = true;
        for (int i = 0; i < peer->n_ancestors; i++)
                if ((uint32_t)peer->ancestors[i].pid == record->pid &&
                    peer->ancestors[i].start_time == record->start_time)
                        return (int)(CGROUP_PATH_BYTES + 3 + PROCESS_MAX_ANCESTORS) - i;
        return peer->n_ancestors < 0 ? peer->n_ancestors : 0;
}

/* Makers come before what matches: a scheduler's lease lifts no limit of an operator's or of the config's, and a user's
 * lease none of theirs. Above each rank of a match. */
#define RANKS_OF_A_MAKER ((int)(CGROUP_PATH_BYTES + 4 + PROCESS_MAX_ANCESTORS))

static int maker_rank(enum ledger_lease_maker maker)
{
        return maker == LEASE_BY_USER ? 0 : maker == LEASE_BY_SCHEDULER ? 1 : 2;
}

/* 0: the process does not match. The larger, the more specific: a process tree, the nearest ancestor first; a
 * control group, the deepest first; a unit; a user. A process that came by a socket of leases is in these, and in no others.
 * -errno: it is not known whether it matches. */
static int match_rank(const struct broker *b, const struct lease *lease, struct lease_peer *peer)
{
        const struct ledger_lease *record = lease_record(b, lease);
        const struct credentials *who = peer->who;
        char unit[CGROUP_UNIT_BYTES];

        if (peer->socket != 0)
                return lease->socket && lease->socket->number == peer->socket;
        if (record->maker == LEASE_BY_USER && who->uid != record->maker_uid)
                return 0;
        switch ((enum ledger_lease_kind)record->kind) {
        case LEASE_PID:
                return match_process(b, record, peer);
        case LEASE_CGROUP:
                if (!who->cgroup)
                        return -ENODATA;
                return path_is_in(who->cgroup, record->match) ? 3 + (int)lease_path_depth(record->match) : 0;
        case LEASE_UNIT:
                if (!who->cgroup)
                        return -ENODATA;
                cgroup_unit(who->cgroup, unit);
                return strcmp(unit, record->match) == 0 ? 2 : 0;
        case LEASE_USER:
                return who->uid == record->uid ? 1 : 0;
        default: /* of a socket by which it did not come */
                return 0;
        }
}

/* The control group of a unit, which the first session shows. */
static void learn_place(struct ledger_lease *record, const char *cgroup)
{
        size_t n = strlen(record->match);

        for (const char *at = cgroup; record->place[0] == '\0' && (at = strstr(at, record->match)); at++)
                if (at > cgroup && at[-1] == '/' && (at[n] == '\0' || at[n] == '/') &&
                    (size_t)(at - cgroup) + n < sizeof(record->place))
                        memcpy(record->place, cgroup, (size_t)(at - cgroup) + n); /* zeros follow */
}

/* A process that cannot be matched may belong to this lease. */
static int refuse_unknown(const struct lease *lease, const struct lease_peer *peer, int error, char *sentence,
                          size_t n)
{
        char why[64];

        if (peer->who->pid <= 0)
                snprintf(why, sizeof(why), "it is in a PID namespace that the daemon does not see");
        else if (error == -ELOOP)
                snprintf(why, sizeof(why), "it has more than %u ancestors", PROCESS_MAX_ANCESTORS);
        else if (error == -ENODATA)
                snprintf(why, sizeof(why), "its control group could not be read");
        else if (error == -EAGAIN)
                snprintf(why, sizeof(why), "its ancestors exit or change; try again");
        else
                snprintf(why, sizeof(why), "its ancestors could not be read: %s", strerror(-error));
        snprintf(sentence, n,
                 "the daemon cannot tell whether the process belongs to lease '%s' in partition '%s': %s",
                 lease->name, lease->quota->partition->name, why);
        return -EACCES;
}

int lease_match(const struct broker *b, const struct quota *parent, struct lease_peer *peer,
                struct lease **ret, char *sentence, size_t n_sentence)
{
        struct lease *best = NULL;
        int best_rank = 1;

        for (size_t i = 0; parent->account.n_children > 0 && i < b->leases.n; i++) {
                struct lease *lease = b->leases.list[i];
                int rank;

                if (quota_parent(lease->quota) != parent)
                        continue;
                rank = match_rank(b, lease, peer);
                if (rank < 0)
                        return refuse_unknown(lease, peer, rank, sentence, n_sentence);
                if (rank > 0 && peer->socket == 0)
                        rank += maker_rank(lease_record(b, lease)->maker) * RANKS_OF_A_MAKER;
                if (rank < best_rank)
                        continue;
                best = lease;
                best_rank = rank;
        }
        if (best && !quota_has_ended(best->quota) && lease_record(b, best)->kind == LEASE_UNIT)
                learn_place(lease_record(b, best), peer->who->cgroup);
        *ret = best;
        return 0;
}

/* ---- the end ------------------------------------------------------------------- */

/* A unit of the system, before a session shows where it is. */
static void guess_place(struct ledger_lease *record)
{
        char place[LEDGER_PLACE_BYTES + 32];

        snprintf(place, sizeof(place), "/system.slice/%s", record->match);
        if (strlen(place) < sizeof(record->place) && cgroup_exists(place))
                memcpy(record->place, place, strlen(place) + 1);
}

bool lease_has_lost_match(struct broker *b, const struct lease *lease)
{
        struct ledger_lease *record = lease_record(b, lease);

        if (record->kind == LEASE_PID)
                return process_has_ended((pid_t)record->pid, record->start_time);
        if (record->maker == LEASE_BY_CONFIG) /* while it has sessions, its control group has processes */
                return lease->quota->sessions.n_told == 0 && !cgroup_exists(record->place);
        if (record->kind == LEASE_UNIT && record->place[0] == '\0')
                guess_place(record);
        if (record->kind == LEASE_USER || record->place[0] == '\0')
                return false;
        if (!cgroup_exists(record->place))
                return record->place_is_seen != 0;
        record->place_is_seen = 1;
        return false;
}

void lease_end(struct broker *b, struct lease *lease)
{
        struct ledger_lease *record = lease_record(b, lease);

        if (record->ended_ms == 0)
                record->ended_ms = clock_ms();
        if (!quota_has_ended(lease->quota))
                quota_remove(lease->quota);
        broker_note_leave(b, lease->quota);
}

/* ---- limits -------------------------------------------------------------------- */

void lease_follow(const struct ledger_lease *record, const struct quota *q, const struct config_quota *of,
                  struct quota_limits *to)
{
        if (!of || !of->per_cgroup || record->maker != LEASE_BY_CONFIG || record->ended_ms != 0)
                return;
        to->limit_bytes = min_u64(of->per_limit_bytes, arena_limit_max(q->arena));
        to->reserve_bytes = min_u64(of->per_reserve_bytes, to->limit_bytes);
}

/* The reserve is never above the limit, also if the daemon is killed between the stores. */
void lease_store_limits(struct broker *b, const struct lease *lease, const struct quota_limits *to)
{
        struct ledger_lease *record = lease_record(b, lease);

        if (to->reserve_bytes < record->reserve_bytes)
                record->reserve_bytes = to->reserve_bytes;
        record->limit_bytes = to->limit_bytes;
        record->reserve_bytes = to->reserve_bytes;
}

/* ---- forgetting ------------------------------------------------------------------ */

void lease_tell_gone(const struct broker *b, const struct lease_end *end)
{
        if (b->options.upcalls)
                b->options.upcalls->lease_gone(end);
}

void lease_free(struct broker *b, struct lease *lease)
{
        struct quota *q = lease->quota;
        size_t i = 0;

        assert(quota_is_gone(q));
        lease_tell_gone(b, &(struct lease_end){ lease_record(b, lease),
                                                &ledger_quota_at(b->ledger, q->index)->life,
                                                lease->tenant->name, q->partition->name });
        while (b->leases.list[i] != lease)
                i++;
        b->leases.n--;
        lease->tenant->n_leases--;
        memmove(&b->leases.list[i], &b->leases.list[i + 1], (b->leases.n - i) * sizeof(*b->leases.list));
        leave_socket(b, lease->socket, false);
        ledger_lease_clear(b->ledger, lease->index);
        quota_free(q);
        free(lease);
}

void leases_forget(struct broker *b, bool leave)
{
        while (b->leases.n > 0) {
                struct lease *lease = b->leases.list[--b->leases.n];

                if (!leave)
                        ledger_lease_clear(b->ledger, lease->index);
                leave_socket(b, lease->socket, leave);
                free(lease);
        }
        free(b->leases.list);
        b->leases.list = NULL;
}

/* ---- bounds of leases that no operator makes ------------------------------------ */

static size_t share_in_all(const struct broker *b)
{
        return LEASE_BOUNDS_ALL / max_u64(b->own.capacity->n_lease_shares, 1);
}

/* Of each tenant whose processes may cause leases, and of schedulers for a tenant; at least 1. */
static size_t share_of_tenant(const struct broker *b)
{
        return max_u64(1, min_u64(share_in_all(b), LEASES_PER_TENANT / 4 * 3));
}

int lease_bounds_take(struct tenant *t, enum ledger_lease_maker maker, char *why, size_t n)
{
        uint64_t now_ms = clock_ms();

        if (!lease_maker_is_bounded(maker))
                return 0;
        if (t->lease_births.since_ms == 0 || now_ms - t->lease_births.since_ms >= LEASE_BOUNDS_MS)
                t->lease_births = (struct tenant_births){ .since_ms = now_ms };
        if (t->lease_births.n_by[maker] < LEASES_PER_TENANT) {
                t->lease_births.n_by[maker]++;
                return 0;
        }
        snprintf(
                why, n,
                "%s of tenant '%s' asked %u times in %u s for a lease or a change of one, which is the most, also "
                "where they were refused: try again later",
                maker == LEASE_BY_SCHEDULER ? "schedulers" : "processes", t->name, LEASES_PER_TENANT,
                LEASE_BOUNDS_MS / 1000);
        return -EDQUOT;
}

static int check_schedulers(const struct broker *b, const struct tenant *t, char *why, size_t n)
{
        size_t all = max_u64(1, share_in_all(b)), share = share_of_tenant(b);

        if (lease_count_by(b, NULL, LEASE_BY_SCHEDULER, NULL) >= all) {
                snprintf(why, n, "schedulers have %zu leases, which is the most: end some of them", all);
                return -EDQUOT;
        }
        if (lease_count_by(b, t, LEASE_BY_SCHEDULER, NULL) < share)
                return 0;
        snprintf(why, n, "schedulers have %zu leases of tenant '%s', which is the most: end some of them",
                 share, t->name);
        return -EDQUOT;
}

static int check_processes(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                           char *why, size_t n)
{
        size_t share = share_of_tenant(b), of_users = max_u64(1, share / 3 * 2);
        size_t n_by_users = lease_count_by(b, t, LEASE_BY_USER, NULL);

        if (maker == LEASE_BY_USER && n_by_users >= of_users) {
                snprintf(why, n, "users of tenant '%s' have %zu leases, which is the most for all of them",
                         t->name, of_users);
                return -EDQUOT;
        }
        if (n_by_users + lease_count_by(b, t, LEASE_BY_CONFIG, NULL) < share)
                return 0;
        snprintf(
                why, n,
                "processes of tenant '%s' have %zu leases, which is the most: the share of a tenant in %u leases "
                "that operators did not make",
                t->name, share, LEASE_BOUNDS_ALL);
        return -EDQUOT;
}

int lease_bounds_check(const struct broker *b, const struct tenant *t, enum ledger_lease_maker maker,
                       char *why, size_t n)
{
        if (!lease_maker_is_bounded(maker))
                return 0;
        if (t->n_leases - lease_count_by(b, t, LEASE_BY_OPERATOR, NULL) >= LEASE_BOUNDS_TENANT) {
                snprintf(why, n,
                         "tenant '%s' has %u leases that operators did not make, which is the most: end some "
                         "of them",
                         t->name, LEASE_BOUNDS_TENANT);
                return -EDQUOT;
        }
        return maker == LEASE_BY_SCHEDULER ? check_schedulers(b, t, why, n)
                                           : check_processes(b, t, maker, why, n);
}

/* ---- room in the tables, and file descriptors ---------------------------------- */

static struct capacity_lease lease_in(const struct broker *b, const struct partition *p, uint64_t limit)
{
        return (struct capacity_lease){ (size_t)(p - b->partitions), limit };
}

/* Whether a lease counts in the share of those that `maker` makes for the tenant. */
static bool is_in_share(const struct broker *b, const struct lease *lease, const struct tenant *t,
                        enum ledger_lease_maker maker)
{
        enum ledger_lease_maker by = lease_record(b, lease)->maker;

        if (maker == LEASE_BY_SCHEDULER || by == LEASE_BY_SCHEDULER)
                return by == maker;
        return lease->tenant == t && lease_maker_is_bounded(by);
}

/* The leases that no operator makes leave room to operators and others: of the extents and file descriptors that the config's
 * quotas do not need, each tenant whose processes may cause leases has an equal share, schedulers have one, and
 * operators have one, too. */
static int check_share(const struct tree *tree, const struct tree_node *node, const struct tenant *t,
                       enum ledger_lease_maker maker, char *why, size_t n)
{
        const struct broker *b = tree->b;
        struct capacity_lease leases[CAPACITY_LEASES + 1];
        uint64_t n_extents = node->n_extents;
        uint64_t n_shares = b->own.capacity->n_lease_shares + 1, n_usable = fd_reserve_usable();
        uint64_t n_fds = capacity_fds(b->own.capacity, b->sessions.n_clients, NULL, 0), n_more;
        size_t k = 0;

        leases[k++] = lease_in(b, node->partition, node->to.limit_bytes);
        for (size_t i = b->n_partitions; i < tree->n; i++) {
                const struct tree_node *each = &tree->nodes[i];

                if (!each->parent->parent || each == node || k == sizeof(leases) / sizeof(leases[0]) ||
                    !is_in_share(b, lease_of(each->quota), t, maker))
                        continue;
                n_extents += each->n_extents;
                leases[k++] = lease_in(b, each->partition, each->to.limit_bytes);
        }
        n_more = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k) - n_fds;
        if (b->needs.n_extents + n_extents * n_shares <= broker_room(b).n_extents &&
            n_fds + n_more * n_shares <= n_usable)
                return 0;
        snprintf(
                why, n,
                "a lease of %s would exceed what %s%s%s may take of the daemon's tables and file descriptors with "
                "leases: choose a lower limit, or end other leases",
                NUMBER_SIZE(node->to.limit_bytes),
                maker == LEASE_BY_SCHEDULER ? "schedulers" : "processes of tenant '",
                maker == LEASE_BY_SCHEDULER ? "" : t->name, maker == LEASE_BY_SCHEDULER ? "" : "'");
        return -EDQUOT;
}

/* As many fds as all extents may need beside the sessions that exist, the same way. As at the start, it is only a
 * warning if max_sessions would need more; users cause it as often as they ask. */
static int check_fds(const struct tree *tree, const struct tree_node *node, struct tenant *t, char *why,
                     size_t n)
{
        const struct broker *b = tree->b;
        uint64_t n_usable = fd_reserve_usable(), max_sessions = b->config->max_sessions, n_wanted;
        struct capacity_lease leases[CAPACITY_LEASES + 1];
        size_t k = 0;

        for (size_t i = b->n_partitions; i < tree->n; i++)
                if (tree->nodes[i].parent->parent && &tree->nodes[i] != node)
                        leases[k++] = lease_in(b, tree->nodes[i].partition, tree->nodes[i].to.limit_bytes);
        leases[k++] = lease_in(b, node->partition, node->to.limit_bytes);
        n_wanted = capacity_fds(b->own.capacity, b->sessions.n_clients, leases, k);
        if (n_wanted > n_usable) {
                snprintf(why, n,
                         "the limit on file descriptors is too low for a lease of %s: with it, all extents "
                         "and the %zu sessions that exist can need %" PRIu64 ", and %" PRIu64
                         " are available: raise LimitNOFILE= of the service, or end other leases",
                         NUMBER_SIZE(node->to.limit_bytes), b->sessions.n_clients, n_wanted, n_usable);
                return -EMFILE;
        }
        n_wanted = capacity_fds(b->own.capacity, max_sessions, leases, k);
        if (n_wanted > n_usable && capacity_fds(b->own.capacity, max_sessions, leases, k - 1) <= n_usable)
                log_limited(&t->lease_log, LOG_LEVEL_WARNING,
                            "the limit on file descriptors is too low for all leases beside max_sessions: "
                            "%" PRIu64 ", which together can need %" PRIu64 ": %" PRIu64
                            " are available; raise LimitNOFILE= of the service, or lower max_sessions",
                            max_sessions, n_wanted, n_usable);
        return 0;
}

int lease_check_room(const struct tree *tree, const struct tree_node *node, struct tenant *t,
                     enum ledger_lease_maker maker, char *why, size_t n)
{
        int r = !lease_maker_is_bounded(maker) ? 0 : check_share(tree, node, t, maker, why, n);

        if (r < 0)
                return r;
        if (tree_has_room(tree))
                return check_fds(tree, node, t, why, n);
        snprintf(why, n,
                 "the daemon's tables are too small for a lease of %s: end other leases, lower "
                 "max_sessions of tenant '%s', or restart bfcd",
                 NUMBER_SIZE(node->to.limit_bytes), t->name);
        return -ENOSPC;
}
