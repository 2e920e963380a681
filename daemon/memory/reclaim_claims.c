/* Claims: what a waiting request gets before later ones; see reclaim.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

#define RECLAIM_CALM_MS 10000u /* after this time without a claim the next one counts as the first */

struct account *reclaim_shared_account(struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->account : q->account.n_children > 0 ? &q->account : NULL;
}

/* Claims of leases are their tenant's: one that goes round its leases does not become younger. */
static struct quota_growth *growth_of_tenant(const struct quota *q)
{
        return quota_parent(q) ? &quota_parent(q)->growth : &((struct quota *)(uintptr_t)q)->growth;
}

void reclaim_set_claim(struct quota_request *request, struct account *a, uint64_t n_bytes)
{
        struct partition *p = request->quota->partition;
        struct quota_growth *growth = growth_of_tenant(request->quota);
        bool had = reclaim_has_claim(request), has = n_bytes > 0;
        struct quota *q;

        request->claim = (struct charge){ a, n_bytes };

        /* A claim soon after another one of the tenant continues its age: small requests in a row are as old
         * together as a large one. */
        if (!had && has) {
                uint64_t now = clock_ms();

                p->claims.n++;
                if (growth->n_claims++ == 0 &&
                    (growth->claim_ms == 0 || now - growth->unclaimed_ms >= RECLAIM_CALM_MS))
                        growth->claim_ms = now;
        }

        /* What it claimed is there for others. */
        if (had && !has) {
                growth->unclaimed_ms = clock_ms();
                growth->n_claims--;
                p->claims.n--;
                TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
                if (q != request->quota) /* those behind it */
                        quota_make_due(q);
        }
}

void reclaim_note_growth(const struct quota_request *request)
{
        struct quota_growth *growth = growth_of_tenant(request->quota);

        if (reclaim_has_claim(request) && growth->n_claims == 1)
                growth->claim_ms = 0;
}

/* Only the first of a queue has a claim. */
uint64_t reclaim_claims_of(const struct partition *p, const struct account *a)
{
        const struct quota *q;
        uint64_t n_bytes = 0;

        if (p->claims.n == 0)
                return 0;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        {
                const struct charge *claim = &TAILQ_FIRST(&q->queue.requests)->claim;

                n_bytes += claim->account == a ? claim->n_bytes : 0;
        }
        return n_bytes;
}

uint64_t reclaim_claims_before(const struct quota_request *request, const struct account *a, uint64_t now)
{
        const struct partition *p = request->quota->partition;
        uint64_t aged_ms = RECLAIM_STEPS * p->reclaim_timeout_ms + RECLAIM_AGED_MS, n_bytes = 0;
        const struct quota *q;

        if (p->claims.n == 0)
                return 0;
        TAILQ_FOREACH(q, &p->queue.waiting, queue.of_waiting)
        {
                const struct quota_request *first = TAILQ_FIRST(&q->queue.requests);

                if (q == request->quota || first->ticket >= request->ticket || !reclaim_has_claim(first) ||
                    (now != 0 && quota_first_is_aged(q, now)))
                        continue;

                /* A claim is aged, too, if the tenant's requests, one after the other, have had claims for as
                 * long as that can take. */
                if (now != 0 && now - growth_of_tenant(q)->claim_ms >= aged_ms)
                        continue;
                n_bytes += first->claim.account == a ? first->claim.n_bytes : 0;
        }
        return n_bytes;
}
