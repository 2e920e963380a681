/* The broker's turns and ticks: requests that wait, and what was removed from the config.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/broker.h"

#include "daemon/memory/broker_lease.h"
#include "daemon/memory/drain.h"

static void broker_free_gone_quota(struct broker *b, struct quota *q)
{
        if (!quota_parent(q)) {
                quota_free(q);
                b->changes.has_freed = true;
                return;
        }
        broker_look_for_gone(b); /* the quota above may be gone now */
        lease_free(b, lease_of(q));
}

static bool tenant_free_gone_quotas(struct broker *b, struct tenant *t)
{
        size_t kept = 0;

        for (size_t i = 0; i < t->n_quotas; i++) {
                if (quota_is_gone(t->quotas[i])) {
                        broker_free_gone_quota(b, t->quotas[i]);
                        continue;
                }
                b->changes.has_removed = b->changes.has_removed || t->quotas[i]->is_removed;
                t->quotas[kept++] = t->quotas[i];
        }
        t->n_quotas = kept;
        return kept == 0 && !t->config && t->n_sessions == 0;
}

static void broker_free_gone(struct broker *b)
{
        b->changes.may_have_gone = false;
        b->changes.has_removed = false;
        for (size_t i = b->n_tenants; i-- > 0;)
                if (b->tenants[i].name[0] != '\0' && tenant_free_gone_quotas(b, &b->tenants[i]))
                        broker_leave_place(b, &b->tenants[i]);
        if (b->changes.has_freed)
                broker_promise(b);
}

/* Each quota that is due has one turn. */
void broker_turn(struct broker *b)
{
        if (b->changes.may_have_gone)
                broker_free_gone(b);
        for (size_t i = 0; i < b->n_partitions; i++) {
                struct quota *q, *next;

                for (q = TAILQ_FIRST(&b->partitions[i].queue.due); q; q = next) {
                        next = TAILQ_NEXT(q, queue.of_due);
                        quota_turn(q);
                }
        }
        drain_turn(b);
}

bool broker_is_due(const struct broker *b)
{
        if (b->changes.may_have_gone || drain_is_due(b))
                return true;
        for (size_t i = 0; i < b->n_partitions; i++)
                if (!TAILQ_EMPTY(&b->partitions[i].queue.due))
                        return true;
        return false;
}

bool broker_has_recalls(const struct broker *b)
{
        for (size_t i = 0; i < RECALL_KINDS; i++)
                if (!TAILQ_EMPTY(&b->recalls.lists[i]))
                        return true;
        return false;
}

bool broker_is_blocked(const struct broker *b)
{
        if (broker_has_recalls(b) || b->shared.n_waits > 0)
                return true;
        for (size_t i = 0; i < b->n_devices; i++)
                if (drain_is_waiting(&b->devices[i]) || drain_is_paused(&b->devices[i]) ||
                    worker_n_pending(b->devices[i].worker) > 0)
                        return true; /* a job that has not begun may hang */
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_blocked(&b->partitions[i]))
                        return true;
        return b->unreclaimed.n > 0 || store_silent_since_ns(b->options.store) != 0;
}

bool broker_is_deferred(const struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                if (partition_is_deferred(&b->partitions[i]))
                        return true;
        return false;
}

void broker_look_again(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_look_again(&b->partitions[i]);
}

void broker_tick(struct broker *b)
{
        for (size_t i = 0; i < b->n_partitions; i++)
                partition_tick(&b->partitions[i]);
        broker_ask_unreclaimed(b);
        broker_note_hung(b);
        drain_tick(b);
}
