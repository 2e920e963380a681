/* The requests that wait in a quota, for lists; see quota_next_waiting().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

uint64_t quota_wait_end_ms(const struct quota_request *request)
{
        uint64_t end_ms = request->since_ms + RECLAIM_STEPS * request->quota->partition->reclaim_timeout_ms +
                          request->wait_ms;

        return request->queued_ms != 0 ? min_u64(end_ms, request->queued_ms + request->wait_ms) : end_ms;
}

/* The place of a quota's first request among those of all quotas of the partition. */
static uint64_t partition_position(const struct quota_request *first)
{
        const struct quota *q;
        uint64_t n = 1;

        TAILQ_FOREACH(q, &first->quota->partition->queue.waiting, queue.of_waiting)
        n += TAILQ_FIRST(&q->queue.requests)->ticket < first->ticket;
        return n;
}

/* What the first one lacks was found when it was last tried. Those behind it are served after it. */
static void waiting_set_lack(const struct quota *q, struct quota_waiting *w)
{
        const struct quota_request *request = w->request, *first = TAILQ_FIRST(&q->queue.requests);
        const struct returns *returns;

        /* The sum over the requests from the first one on; UINT64_MAX: it is not known. */
        if (request == q->growth.request)
                w->lacking_bytes = 0;
        else if (request == first)
                w->lacking_bytes = request->lack.refusal != 0 ? request->lack.missing : UINT64_MAX;
        else if (__builtin_add_overflow(w->lacking_bytes, request->n_bytes, &w->lacking_bytes))
                w->lacking_bytes = UINT64_MAX;
        if (request != q->growth.request && first->lack.refusal == 0)
                w->lacking_bytes = UINT64_MAX;

        /* How long it took so far until as many bytes were returned to the account that lacks them. */
        w->estimate_ms = RETURNS_UNKNOWN;
        if (request == q->growth.request || w->lacking_bytes == UINT64_MAX)
                return;
        returns = !first->lack.scope                         ? &q->returns
                  : first->lack.scope == &q->partition->pool ? &q->partition->returns
                                                             : NULL; /* the tenant's, of several quotas */
        if (returns)
                w->estimate_ms = returns_estimate_ms(returns, w->lacking_bytes, w->now_ms);
}

bool quota_next_waiting(const struct quota *q, struct quota_waiting *w)
{
        const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);
        uint64_t end_ms;

        if (w->position == QUOTA_WAITING_SHOWN)
                return false;
        if (w->position == 0)
                w->request = q->growth.request ? q->growth.request : first;
        else
                w->request = w->request == q->growth.request ? first : TAILQ_NEXT(w->request, link);
        if (!w->request)
                return false;
        if (w->position++ == 0)
                w->now_ms = clock_ms();
        end_ms = quota_wait_end_ms(w->request);
        w->waited_ms = w->now_ms - w->request->since_ms;
        w->left_ms = excess_u64(end_ms, w->now_ms);
        w->partition_position = w->request == first ? partition_position(first) : 0;
        waiting_set_lack(q, w);
        return true;
}
