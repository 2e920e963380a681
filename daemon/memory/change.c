/* Changes of the account tree, and of the config; see change.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/change.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/number.h"
#include "daemon/config/schema.h"
#include "daemon/memory/broker_lease.h"

/* ---- the tree ------------------------------------------------------------- */

static struct quota_limits limits_of(const struct quota *q)
{
        return (struct quota_limits){ q->account.limit_bytes, q->account.reserve_bytes, q->max_sessions,
                                      q->max_blocks };
}

static void tree_add_quota(struct tree *tree, const struct tenant *t, struct quota *q)
{
        struct tree_node *parent = &tree->nodes[q->partition - tree->b->partitions];

        if (quota_parent(q))
                parent = tree_find(tree, quota_parent(q));
        tree->nodes[tree->n++] = (struct tree_node){ .parent = parent,
                                                     .partition = q->partition,
                                                     .tenant = t,
                                                     .quota = q,
                                                     .account = &q->account,
                                                     .to = limits_of(q),
                                                     .is_removed = q->is_removed };
}

static bool tree_has(const struct tenant *t, const struct tenant *wanted)
{
        return !wanted || t == wanted || t->n_leases > 0;
}

int tree_new(struct broker *b, const struct tenant *t, size_t n_more, struct tree *ret)
{
        size_t n_nodes = b->n_partitions + n_more;

        for (size_t i = 0; i < b->n_tenants; i++)
                n_nodes += tree_has(&b->tenants[i], t) ? b->tenants[i].n_quotas : 0;
        *ret = (struct tree){ .b = b, .nodes = calloc(n_nodes, sizeof(*ret->nodes)), .is_whole = !t };
        if (!ret->nodes)
                return -ENOMEM;
        for (size_t i = 0; i < b->n_partitions; i++)
                ret->nodes[ret->n++] =
                        (struct tree_node){ .partition = &b->partitions[i],
                                            .account = &b->partitions[i].pool,
                                            .to.limit_bytes = b->partitions[i].pool.limit_bytes };
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; tree_has(&b->tenants[i], t) && k < b->tenants[i].n_quotas; k++)
                        tree_add_quota(ret, &b->tenants[i], b->tenants[i].quotas[k]);
        ret->n_made = ret->n;
        return 0;
}

void tree_free(struct tree *tree)
{
        free(tree->nodes);
}

/* The last ones first: a lease follows the quotas of its tenant. */
struct tree_node *tree_find(const struct tree *tree, const struct quota *q)
{
        size_t i = tree->n - 1;

        while (tree->nodes[i].quota != q)
                i--;
        return &tree->nodes[i];
}

struct tree_node *tree_add(struct tree *tree, struct tree_node *parent, const struct quota_limits *to)
{
        struct tree_node *node = &tree->nodes[tree->n++];

        *node = (struct tree_node){ .parent = parent, .partition = parent->partition, .to = *to };
        return node;
}

/* ---- the tree: checking ---------------------------------------------------- */

static uint64_t node_extents(const struct tree_node *node)
{
        const struct partition *p = node->partition;
        struct extent_sizes sizes;

        if (node->quota)
                return arena_extent_room(node->quota->arena, node->to.limit_bytes);
        sizes = extent_sizes_for(p->share, p->device->is_cuda, node->to.limit_bytes,
                                 device_granularity(p->device));
        return extent_max_records(p->share, node->to.limit_bytes, &sizes);
}

static uint64_t tree_sessions(const struct broker *b, const struct quota *q, const struct quota_limits *to)
{
        return min_u64(max_u64(to->max_sessions, q ? q->all.n_sessions : 0), broker_room(b).n_sessions);
}

/* Adds a tenant's quota. The sessions of its leases are among its own, and each has the extents of one of these quotas:
 * at most n_extents_most. */
static void needs_add(struct broker_needs *needs, const struct broker *b, const struct quota *q,
                      const struct quota_limits *to, uint64_t n_extents, uint64_t n_extents_most)
{
        needs->n_quotas++;
        needs->n_extents += n_extents;
        needs->n_exports += n_extents_most * tree_sessions(b, q, to);
        needs->n_blocks += max_u64(to->max_blocks, q ? q->all.n_blocks : 0);
}

void tree_count_tenants(struct broker *b)
{
        b->needs = (struct broker_needs){ 0 };
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct quota *q = b->tenants[i].quotas[k];
                        uint64_t n_extents = arena_extent_room(q->arena, q->account.limit_bytes);
                        struct quota_limits to = limits_of(q);

                        if (!quota_parent(q))
                                needs_add(&b->needs, b, q, &to, n_extents, n_extents);
                }
}

/* A tenant's quota. Without all tenants, b->needs has it already, and its leases add to it. */
static void tree_count(struct tree *tree, const struct tree_node *node)
{
        uint64_t most = max_u64(node->n_extents, node->n_extents_leased);

        if (tree->is_whole)
                needs_add(&tree->needs, tree->b, node->quota, &node->to, node->n_extents, most);
        else
                tree->needs.n_exports +=
                        (most - node->n_extents) * tree_sessions(tree->b, node->quota, &node->to);
}

void tree_sum(struct tree *tree)
{
        const struct broker_needs none = { 0 };

        tree->needs = tree->is_whole ? none : tree->b->needs;
        for (size_t i = 0; i < tree->n; i++) {
                struct tree_node *node = &tree->nodes[i];

                node->committed_bytes = node->account ? node->account->committed_bytes : 0;
                node->promised_bytes = node->account ? node->account->promised_bytes : 0;
                node->n_extents_leased = 0;
        }
        for (size_t i = tree->n; i-- > 0;) { /* those below first */
                struct tree_node *node = &tree->nodes[i], *parent = node->parent;

                if (!parent)
                        continue;
                parent->committed_bytes += max_u64(node->to.reserve_bytes, node->committed_bytes) -
                                           (node->account ? account_takes(node->account) : 0);
                parent->promised_bytes += max_u64(node->to.reserve_bytes, node->promised_bytes) -
                                          (node->account ? account_guaranteed(node->account) : 0);
                node->n_extents = node_extents(node);
                if (!parent->parent) {
                        tree_count(tree, node);
                        continue;
                }
                tree->needs.n_quotas++;
                tree->needs.n_extents += node->n_extents;
                parent->n_extents_leased = max_u64(parent->n_extents_leased, node->n_extents);
        }
}

/* A node that exceeds its limit after the change exceeds it by no more than is charged already. */
static bool tree_fits(const struct tree_node *node)
{
        return !node->account || account_fits(node->account, node->to.limit_bytes, node->committed_bytes);
}

const struct account *tree_misfit(const struct tree_node *node)
{
        for (const struct tree_node *each = node->parent; each; each = each->parent)
                if (!tree_fits(each))
                        return each->account;
        return NULL;
}

bool tree_has_room(const struct tree *tree)
{
        struct ledger_limits room = broker_room(tree->b);

        return tree->needs.n_quotas <= room.n_quotas && tree->needs.n_extents <= room.n_extents &&
               tree->needs.n_exports <= room.n_exports && tree->needs.n_blocks <= room.n_blocks;
}

/* ---- the tree: applying ---------------------------------------------------- */

static void node_apply(struct broker *b, const struct tree_node *node)
{
        const struct quota_limits *to = &node->to;
        struct quota *q = node->quota;

        if (node->is_removed && !quota_parent(q)) {
                quota_remove(q);
                broker_note_leave(b, q);
        }
        if (node->is_removed || (!q->is_removed && to->limit_bytes == q->account.limit_bytes &&
                                 to->reserve_bytes == q->account.reserve_bytes &&
                                 to->max_sessions == q->max_sessions && to->max_blocks == q->max_blocks))
                return;
        if (quota_parent(q))
                lease_store_limits(b, lease_of(q), to);
        quota_set(q, to);
}

void tree_apply(struct tree *tree)
{
        struct broker *b = tree->b;

        for (size_t i = b->n_partitions; i < tree->n; i++)
                node_apply(b, &tree->nodes[i]);
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_set_limit(&b->partitions[i], tree->nodes[i].to.limit_bytes);
        for (size_t i = b->n_partitions; b->options.upcalls && i < tree->n; i++) {
                uint64_t n_bytes = quota_excess(tree->nodes[i].quota);

                if (n_bytes > 0)
                        b->options.upcalls->trim_excess(b, tree->nodes[i].quota, n_bytes);
        }
}

/* ---- a change of the config ------------------------------------------------ */

struct change_tenant {
        struct tenant *tenant; /* NULL: a new one, that has not been made */
        bool is_new;
        size_t n_quotas_before; /* of an existing tenant */
};

struct change {
        struct broker *b;
        struct config *next;
        FILE *changes, *errors;
        bool failed;
        struct tree tree;
        struct change_tenant *tenants;          /* as next lists them */
        const struct config_tenant **config_of; /* by the broker's place; NULL: next lacks the tenant */
        struct tenant **by_name;                /* of the broker, sorted */
        size_t n_by_name;
        struct tenant **order;     /* to be the broker's */
        char *config_text;         /* the same */
        struct matcher *matcher;   /* the same */
        struct capacity *capacity; /* the same */
};

struct shown_size {
        char text[32];
};
#define SIZE(n_bytes) config_size(n_bytes, (struct shown_size){ { 0 } }.text, sizeof(struct shown_size))

/* ---- the old and the new -------------------------------------------------- */

/* Of an existing tenant. */
static const struct config_tenant *change_config_of(const struct change *c, const struct tenant *t)
{
        return c->config_of[t - c->b->tenants];
}

static size_t change_partition(const struct change *c, const struct partition *p)
{
        return (size_t)(p - c->b->partitions);
}

static int change_map_tenants(struct change *c)
{
        struct broker *b = c->b;

        c->by_name = tenant_sort(b->tenants, b->n_tenants, &c->n_by_name);
        c->tenants = calloc(c->next->n_tenants + 1, sizeof(*c->tenants));
        c->order = calloc(c->next->n_tenants + 1, sizeof(*c->order));
        c->config_of = calloc(b->n_tenants + 1, sizeof(const struct config_tenant *));
        c->config_text = config_format(c->next);
        config_order_as(c->next, b->config);
        c->capacity = capacity_new(c->next);

        /* All that the broker takes over is made now: to apply a change needs no memory. */
        if (!c->config_of || !c->by_name || !c->tenants || !c->order || !c->config_text || !c->capacity ||
            matcher_new(c->next, &c->matcher) < 0)
                return -ENOMEM;

        /* Tenants are the same if their names are: sessions of a renamed tenant stay with the old one. */
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                struct change_tenant *t = &c->tenants[i];

                t->tenant = tenant_find(c->by_name, c->n_by_name, c->next->tenants[i].name);
                t->is_new = !t->tenant;
                t->n_quotas_before = t->tenant ? t->tenant->n_quotas : 0;
                if (t->tenant)
                        c->config_of[t->tenant - b->tenants] = &c->next->tenants[i];
        }
        return 0;
}

static void change_free(struct change *c)
{
        tree_free(&c->tree);
        free(c->tenants);
        free(c->config_of);
        free(c->by_name);
        free(c->order);
        free(c->config_text);
        free(c->capacity);
        matcher_free(c->matcher);
}

/* ---- checking ------------------------------------------------------------- */

static void change_fail(struct change *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void change_fail(struct change *c, const char *format, ...)
{
        va_list args;

        c->failed = true;
        va_start(args, format);
        vfprintf(c->errors, format, args);
        va_end(args);
        fputc('\n', c->errors);
}

/* The new quotas are added in the order in which change_make() makes them. */
static void change_want_new(struct change *c)
{
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                const struct config_tenant *t = &c->next->tenants[i];

                for (size_t k = 0; k < t->n_quotas; k++) {
                        struct tree_node *in = &c->tree.nodes[t->quotas[k].partition];
                        struct quota_limits to = broker_limits(&t->quotas[k]);

                        if (c->tenants[i].tenant && tenant_quota(c->tenants[i].tenant, in->partition))
                                continue;
                        tree_add(&c->tree, in, &to);
                        if (in->partition->preallocate)
                                change_fail(c,
                                            "tenant '%s' cannot be added to partition '%s' while bfcd runs, "
                                            "because the partition preallocates: restart bfcd",
                                            t->name, in->partition->name);
                }
        }
        tree_sum(&c->tree);
}

/* to: the quota, or that of a lease's tenant, in the next config; NULL: it lacks it. */
static void change_want_quota(const struct change *c, struct tree_node *node, const struct config_quota *to)
{
        struct quota *q = node->quota;

        if (quota_has_ended(q))
                return;
        node->is_removed = !to;
        if (!to) {
                node->to.reserve_bytes = 0;
                if (quota_parent(q))
                        node->to.limit_bytes = min_u64(node->to.limit_bytes, q->account.own_bytes);
        } else if (!quota_parent(q)) {
                node->to = broker_limits(to);
        } else {
                node->to.max_sessions = to->max_sessions;
                node->to.max_blocks = to->max_blocks;
                lease_follow(lease_record(c->b, lease_of(q)), q, to, &node->to);
        }
}

static int change_want(struct change *c)
{
        size_t n_new = 0;
        int r;

        for (size_t i = 0; i < c->next->n_tenants; i++)
                n_new += c->next->tenants[i].n_quotas;
        r = tree_new(c->b, NULL, n_new, &c->tree);
        if (r < 0)
                return r;
        for (size_t i = 0; i < c->next->n_partitions; i++)
                c->tree.nodes[i].to.limit_bytes = c->next->partitions[i].limit_bytes;
        for (size_t i = c->b->n_partitions; i < c->tree.n_made; i++) {
                struct tree_node *node = &c->tree.nodes[i];

                change_want_quota(c, node,
                                  config_quota_in(change_config_of(c, node->tenant),
                                                  change_partition(c, node->partition)));
        }
        tree_sum(&c->tree);
        return 0;
}

/* What is guaranteed to its leases, of which some follow the config. */
static void change_check_leases(struct change *c, const struct tree_node *node)
{
        const struct quota *q = node->quota;

        if (node->to.limit_bytes < node->promised_bytes)
                change_fail(c,
                            "tenant '%s': limit %s in partition '%s' is below the %s that are guaranteed to "
                            "its leases: lower their reserves (bfcctl lease set), or end them first",
                            q->tenant, SIZE(node->to.limit_bytes), q->partition->name,
                            SIZE(node->promised_bytes));
        else if (!tree_fits(node))
                change_fail(
                        c,
                        "tenant '%s': with the reserve of per in partition '%s', what is guaranteed to its "
                        "leases and reserved would total %s, above the limit %s: lower the reserve",
                        q->tenant, q->partition->name, SIZE(node->committed_bytes),
                        SIZE(node->to.limit_bytes));
}

static int change_check_quota(struct change *c, const struct tree_node *node)
{
        struct quota *q = node->quota;
        int r;

        if (node->is_removed)
                return 0;
        if (q->partition->preallocate && (q->is_removed || node->to.limit_bytes != q->account.limit_bytes)) {
                change_fail(c,
                            "tenant '%s': its limit in partition '%s', %s, cannot change while bfcd runs, "
                            "because the partition preallocates: restart bfcd",
                            q->tenant, q->partition->name, SIZE(q->account.limit_bytes));
                return 0;
        }
        if (!quota_parent(q))
                change_check_leases(c, node);

        /* This ensures that quota_set() cannot fail later. A limit that is prepared and not set changes nothing. */
        r = quota_prepare_limit(q, node->to.limit_bytes);
        if (r != -ENOTSUP)
                return r;
        change_fail(c,
                    "tenant '%s': limit %s in partition '%s' cannot be set while bfcd runs: the "
                    "size of its extents allows at most %s; restart bfcd",
                    q->tenant, SIZE(node->to.limit_bytes), q->partition->name,
                    SIZE(arena_limit_max(q->arena)));
        return 0;
}

static void change_check_pools(struct change *c)
{
        for (size_t i = 0; i < c->b->n_partitions; i++) {
                const struct tree_node *node = &c->tree.nodes[i];

                if (!tree_fits(node))
                        change_fail(c,
                                    "partition '%s': guaranteed memory and memory reserved beyond it would "
                                    "total %s, above the limit %s: lower the guarantees, or release %s first",
                                    node->partition->name, SIZE(node->committed_bytes),
                                    SIZE(node->to.limit_bytes),
                                    SIZE(node->committed_bytes - node->to.limit_bytes));
        }
}

/* The partitions of a device may be over their limits by what is charged, but not take memory from each
 * other. */
static void change_check_device(struct change *c, size_t device)
{
        const struct config_device *d = &c->next->devices[device];
        uint64_t room = d->size_bytes - d->headroom_bytes, before = 0, after = 0;

        for (size_t i = 0; i < c->b->n_partitions; i++) {
                const struct tree_node *node = &c->tree.nodes[i];

                if (c->next->partitions[i].device != device)
                        continue;
                before += account_ceiling(node->account);
                after += max_u64(node->to.limit_bytes, node->committed_bytes);
        }
        if (after <= max_u64(room, before))
                return;
        change_fail(c,
                    "device '%s': the limits of its partitions and memory reserved beyond them would "
                    "total %s, and the device has %s: release %s first",
                    d->id, SIZE(after), SIZE(room), SIZE(after - room));
}

static void change_check_room(struct change *c)
{
        struct ledger_limits room = broker_room(c->b);
        bool has_leases = c->b->leases.n > 0;
        size_t n_new = 0;

        for (size_t i = 0; i < c->next->n_tenants; i++)
                n_new += c->tenants[i].is_new;
        if (!tree_has_room(&c->tree))
                change_fail(c,
                            "the daemon's tables are too small: the quotas%s allow %" PRIu64
                            " blocks (room for %" PRIu32 ") and %" PRIu64
                            " extents shared with sessions (room for %" PRIu32
                            "): lower max_blocks or max_sessions, %sor restart bfcd",
                            has_leases ? " and leases" : "", c->tree.needs.n_blocks, room.n_blocks,
                            c->tree.needs.n_exports, room.n_exports,
                            has_leases ? "end leases (bfcctl lease end), " : "");
        if (capacity_refs(c->next) > room.n_refs)
                change_fail(c,
                            "the daemon's tables are too small: %" PRIu32 " sessions may have %" PRIu64
                            " shared blocks (room for %" PRIu32 "): lower max_sessions to %" PRIu32 ", or "
                            "restart bfcd",
                            c->next->max_sessions, capacity_refs(c->next), room.n_refs,
                            room.n_refs / CAPACITY_REFS);
        if (!broker_has_places(c->b, n_new))
                change_fail(
                        c,
                        "too many removed tenants still have sessions: end these sessions, or restart bfcd");
}

static int change_check(struct change *c)
{
        int r = change_map_tenants(c);

        /* The quotas of the next config are prepared and counted. */
        if (r == 0)
                r = change_want(c);
        for (size_t i = c->b->n_partitions; r == 0 && i < c->tree.n_made; i++)
                r = change_check_quota(c, &c->tree.nodes[i]);
        if (r < 0)
                return r;
        change_want_new(c);
        change_check_pools(c);
        for (size_t i = 0; i < c->next->n_devices; i++)
                change_check_device(c, i);
        change_check_room(c);
        return c->failed ? -EINVAL : 0;
}

/* ---- telling -------------------------------------------------------------- */

struct tell_usage {
        struct change *c;
        const struct quota *q;
        const struct config_quota *to;
};

/* Continues the line of a limit that is lowered below the usage. */
static void tell_usage(void *userdata, const struct config_field *field)
{
        const struct tell_usage *t = userdata;
        const struct quota *q = t->q;
        const struct account *a = &q->account;
        uint64_t limit = t->to->limit_bytes, n = 0, n_max = UINT64_MAX;

        if (field == &CONFIG_QUOTA.fields[QUOTA_LIMIT] && a->charged_bytes > limit)
                fprintf(t->c->changes,
                        "; it has %s reserved, %s above the limit, and gets no more until it is below",
                        SIZE(a->charged_bytes), SIZE(a->charged_bytes - limit));
        else if (field == &CONFIG_QUOTA.fields[QUOTA_LIMIT] && q->partition->share == DEVICE_SHARE_FD &&
                 limit < ledger_quota_at(q->partition->ledger, q->index)->small_extent_bytes)
                fprintf(t->c->changes, "; its extents have %s until bfcd is restarted, so it gets no memory",
                        SIZE(ledger_quota_at(q->partition->ledger, q->index)->small_extent_bytes));
        if (field == &CONFIG_QUOTA.fields[QUOTA_MAX_SESSIONS])
                n = q->all.n_sessions, n_max = t->to->max_sessions;
        if (field == &CONFIG_QUOTA.fields[QUOTA_MAX_BLOCKS])
                n = q->all.n_blocks, n_max = t->to->max_blocks;
        if (n > n_max)
                fprintf(t->c->changes,
                        "; it has %" PRIu64 ", %" PRIu64
                        " above the limit, and gets no more until it is below",
                        n, n - n_max);
}

/* Its extents were chosen for a lower limit than the config's. */
static void tell_lower_lease(struct change *c, const struct tree_node *node)
{
        const struct config_quota *per =
                config_quota_in(change_config_of(c, node->tenant), change_partition(c, node->partition));

        if (!node->is_removed && quota_parent(node->quota) &&
            node->to.limit_bytes != node->quota->account.limit_bytes &&
            node->to.limit_bytes < per->per_limit_bytes)
                fprintf(c->changes,
                        "lease '%s' of tenant '%s' in partition '%s': limit is %s, the most that the sizes "
                        "of its extents allow\n",
                        node->quota->lease, node->tenant->name, node->partition->name,
                        SIZE(node->to.limit_bytes));
}

static void tell_quota(struct change *c, const struct tenant *t, const struct quota *q,
                       const struct config_quota *to)
{
        const struct config_quota *now = broker_config_quota(c->b, t, q->partition);
        struct config_quota was = now ? *now : (struct config_quota){ 0 };
        char kind[CONFIG_NAME_MAX + 32];

        was.limit_bytes = q->account.limit_bytes;
        was.reserve_bytes = q->account.reserve_bytes;
        was.max_sessions = q->max_sessions;
        was.max_blocks = q->max_blocks;
        if (q->is_removed)
                fprintf(c->changes, "tenant '%s': its quota in partition '%s' is added again\n", q->tenant,
                        q->partition->name);
        snprintf(kind, sizeof(kind), "tenant '%s' in partition", q->tenant);
        config_diff_section(&CONFIG_QUOTA, &was, to, kind, q->partition->name, c->changes, tell_usage,
                            &(struct tell_usage){ c, q, to });
        for (size_t i = c->b->n_partitions; q->account.n_children > 0 && i < c->tree.n_made; i++)
                if (quota_parent(c->tree.nodes[i].quota) == q)
                        tell_lower_lease(c, &c->tree.nodes[i]);
}

static void tell_tenant(struct change *c, const struct config_tenant *to, const struct tenant *t)
{
        if (!t || !t->config)
                fprintf(c->changes, "tenant '%s' is new\n", to->name);
        else if (!config_match_is_alike(t->config, to))
                fprintf(c->changes, "tenant '%s': match is changed\n", to->name);
        if (t && t->config)
                config_diff_section(&CONFIG_TENANT, t->config, to, "tenant", to->name, c->changes, NULL,
                                    NULL);
        for (size_t i = 0; i < to->n_quotas; i++) {
                const struct partition *p = &c->b->partitions[to->quotas[i].partition];
                const struct quota *q = t ? tenant_quota(t, p) : NULL;

                if (q)
                        tell_quota(c, t, q, &to->quotas[i]);
                else
                        fprintf(c->changes,
                                "tenant '%s': new quota in partition '%s': limit %s, reserve %s\n", to->name,
                                p->name, SIZE(to->quotas[i].limit_bytes), SIZE(to->quotas[i].reserve_bytes));
        }
}

/* Of the quota and its leases. */
static uint64_t count_sessions(const struct tenant *t, const struct quota *q)
{
        uint64_t n = q->sessions.n;

        for (size_t i = 0; i < t->n_quotas; i++)
                if (quota_parent(t->quotas[i]) == q)
                        n += t->quotas[i]->sessions.n;
        return n;
}

static void tell_ending_lease(struct change *c, const struct quota *q)
{
        const struct ledger_lease *record = lease_record(c->b, lease_of(q));

        fprintf(c->changes,
                "lease '%s' of tenant '%s' in partition '%s' ends; its existing sessions (%" PRIu32, q->lease,
                q->tenant, q->partition->name, q->sessions.n);
        if (record->evicts)
                fprintf(c->changes, ") are evicted after %" PRIu64 "ms\n", (uint64_t)record->grace_ms);
        else
                fputs(") continue, and get no more memory\n", c->changes);
}

static void tell_removed(struct change *c, const struct tenant *t, const struct config_tenant *to)
{
        if (!to && t->config)
                fprintf(c->changes,
                        "tenant '%s' is removed: it gets no new sessions; its existing sessions (%zu) "
                        "continue\n",
                        t->name, t->n_sessions);
        for (size_t k = 0; to && k < t->n_quotas; k++)
                if (!t->quotas[k]->is_removed && !quota_parent(t->quotas[k]) &&
                    !config_quota_in(to, change_partition(c, t->quotas[k]->partition)))
                        fprintf(c->changes,
                                "tenant '%s': its quota in partition '%s' is removed; its existing "
                                "sessions there (%" PRIu64 ") continue\n",
                                t->name, t->quotas[k]->partition->name, count_sessions(t, t->quotas[k]));
        for (size_t k = 0; k < t->n_quotas; k++)
                if (quota_parent(t->quotas[k]) && !quota_has_ended(t->quotas[k]) &&
                    !config_quota_in(to, change_partition(c, t->quotas[k]->partition)))
                        tell_ending_lease(c, t->quotas[k]);
}

/* A process gets the first tenant that matches it. */
static void tell_order(struct change *c)
{
        size_t at = 0;

        for (size_t i = 0; i < c->next->n_tenants; i++) {
                const struct tenant *t = c->tenants[i].tenant;
                size_t k = at;

                if (!t || !t->config)
                        continue;
                while (k < c->b->selection.n && c->b->selection.order[k] != t)
                        k++;
                if (k == c->b->selection.n) {
                        fputs("the order of the tenants is changed: a process becomes the first tenant "
                              "that matches it\n",
                              c->changes);
                        return;
                }
                at = k + 1;
        }
}

static void change_tell(struct change *c)
{
        config_diff(c->b->config, c->next, c->changes);
        for (size_t i = 0; i < c->next->n_tenants; i++)
                tell_tenant(c, &c->next->tenants[i], c->tenants[i].tenant);
        for (size_t i = 0; i < c->n_by_name; i++)
                tell_removed(c, c->by_name[i], change_config_of(c, c->by_name[i]));
        tell_order(c);
}

/* ---- making --------------------------------------------------------------- */

static int change_make(struct change *c)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < c->next->n_tenants; i++) {
                const struct config_tenant *to = &c->next->tenants[i];
                struct change_tenant *t = &c->tenants[i];

                if (t->is_new) {
                        t->tenant = broker_tenant_place(c->b);
                        assert(t->tenant); /* change_check_room() has looked */
                        tenant_init(t->tenant, to);
                }
                for (size_t k = 0; r == 0 && k < to->n_quotas; k++) {
                        size_t partition = to->quotas[k].partition;

                        if (tenant_quota(t->tenant, &c->b->partitions[partition]))
                                continue;
                        r = broker_add_quota(c->b, t->tenant, partition, &to->quotas[k], 0);
                        if (r == 0)
                                c->tree.nodes[c->tree.n_made++].quota =
                                        t->tenant->quotas[t->tenant->n_quotas - 1];
                }
        }
        if (r == 0)
                return 0;

        /* Undo: the new quotas are at the ends of the tenants' lists. */
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                struct tenant *t = c->tenants[i].tenant;

                while (t && t->n_quotas > c->tenants[i].n_quotas_before)
                        quota_free(t->quotas[--t->n_quotas]);
                if (t && c->tenants[i].is_new)
                        broker_leave_place(c->b, t);
        }
        return r;
}

/* ---- applying ------------------------------------------------------------- */

static void apply_tenants(struct change *c)
{
        struct broker *b = c->b;

        /* A tenant without a config is removed: it has no new sessions. */
        for (size_t i = 0; i < b->n_tenants; i++)
                b->tenants[i].config = NULL;
        for (size_t i = 0; i < c->next->n_tenants; i++) {
                c->order[i] = c->tenants[i].tenant;
                c->order[i]->config = &c->next->tenants[i];
        }

        /* The order in which a process is matched. */
        free(b->selection.order);
        b->selection.order = c->order;
        b->selection.n = c->next->n_tenants;
        c->order = NULL;
        b->selection.fallback =
                c->next->default_tenant >= 0 ? b->selection.order[c->next->default_tenant] : NULL;
        b->changes.may_have_gone = true;
}

static void apply_devices(struct change *c)
{
        struct broker *b = c->b;

        for (size_t i = 0; i < b->n_devices; i++)
                b->devices[i].config = &c->next->devices[i];
        for (size_t i = 0; i < b->n_partitions; i++) {
                const struct config_partition *from = &c->next->partitions[i];
                struct partition *p = &b->partitions[i];

                p->name = from->name;
                p->device_id = c->next->devices[from->device].id;
                p->context_bytes = c->next->devices[from->device].context_bytes;
                p->reclaim_timeout_ms = c->next->reclaim_timeout_ms;
        }
}

static void change_apply(struct change *c)
{
        struct broker *b = c->b;
        struct config *old = b->own.config;

        /* Everything points into the next config before the old one is freed. */
        apply_tenants(c);
        apply_devices(c);
        free(b->own.text);
        b->own.text = c->config_text;
        c->config_text = NULL;
        matcher_free(b->selection.matcher);
        b->selection.matcher = c->matcher;
        c->matcher = NULL;
        free(b->own.capacity);
        b->own.capacity = c->capacity;
        c->capacity = NULL;
        b->config = b->own.config = c->next;
        tree_apply(&c->tree);
        broker_promise(b);
        config_free(old);
        broker_set_standby(b);
}

int change_config(struct broker *b, struct config *next, bool dry_run, FILE *changes, FILE *errors)
{
        struct change c = { .b = b, .next = next, .changes = changes, .errors = errors };
        int r = change_check(&c);

        /* The lines are written first, since they compare with what still is. */
        if (r == 0)
                change_tell(&c);
        if (r == 0 && !dry_run)
                r = change_make(&c);

        /* Nothing can fail from here on. */
        if (r == 0 && !dry_run)
                change_apply(&c);
        if (r < 0 && r != -EINVAL)
                fprintf(errors, "the new configuration could not be set up: %s\n", strerror(-r));
        change_free(&c);
        return r;
}
