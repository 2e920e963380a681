/* Places of sessions: how many there may be, and what is promised to tenants.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include <errno.h>
#include <inttypes.h>

#include "daemon/memory/broker_tree.h"
#include "daemon/base/number.h"

/* Of its share, those that it does not use. A tenant that was removed has no share. */
static size_t tenant_n_promised(const struct broker *b, const struct tenant *t)
{
        size_t share = t->config ? config_session_share(b->config, t->config) : 0;

        return excess_u64(share, t->n_sessions);
}

void broker_session_begins(struct broker *b, struct tenant *t)
{
        b->sessions.n_promised -= tenant_n_promised(b, t);
        t->n_sessions++;
        b->sessions.n_clients++;
        b->sessions.n_promised += tenant_n_promised(b, t);
}

void broker_session_ends(struct broker *b, struct tenant *t)
{
        b->sessions.n_promised -= tenant_n_promised(b, t);
        t->n_sessions--;
        b->sessions.n_clients--;
        b->sessions.n_promised += tenant_n_promised(b, t);
}

void broker_drop_rest(struct broker *b)
{
        (void)store_drop_rest(b->options.store);
        for (size_t i = 0; !b->restored.has_unknown && i < b->n_devices; i++)
                device_drop_rest(b->devices[i].device);
}

/* Memory is released, or may be some process's. */
static bool owes_memory(const struct broker *b)
{
        for (size_t i = 0; i < b->n_tenants; i++)
                for (size_t k = 0; k < b->tenants[i].n_quotas; k++) {
                        const struct arena *a = b->tenants[i].quotas[k]->arena;

                        if (arena_pending_bytes(a) > 0 || arena_unreclaimed_bytes(a) > 0)
                                return true;
                }
        return false;
}

bool broker_has_heirs(const struct broker *b)
{
        return store_keeps(b->options.store) &&
               (b->sessions.n_clients > 0 || b->shared.n_kept > 0 || b->leases.n > 0 ||
                b->restored.closed_bytes > 0 || owes_memory(b));
}

void broker_promise(struct broker *b)
{
        b->changes.has_freed = false;
        tree_count_tenants(b);
        b->sessions.n_promised = 0;
        for (size_t i = 0; i < b->selection.n; i++)
                b->sessions.n_promised += tenant_n_promised(b, b->selection.order[i]);
}

int broker_admits(const struct broker *b, const struct tenant *t, char *ret_sentence, size_t n_sentence)
{
        uint32_t n_max = b->config->max_sessions;

        if (b->sessions.n_clients >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu sessions: its limit max_sessions is %" PRIu32,
                         b->sessions.n_clients, n_max);
        else if (tenant_n_promised(b, t) == 0 && b->sessions.n_clients + b->sessions.n_promised >= n_max)
                snprintf(ret_sentence, n_sentence,
                         "the daemon has %zu of at most %" PRIu32 " sessions (max_sessions), and the free "
                         "ones are guaranteed to other tenants; tenant '%s' has %zu",
                         b->sessions.n_clients, n_max, t->name, t->n_sessions);
        else
                return 0;
        return -EDQUOT;
}
