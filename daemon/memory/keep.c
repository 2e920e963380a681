/* Memory that a quota keeps for its next session: for some time after a session ended, some of its free
 * extents are not released. They are idle memory like any other: every reclaim step takes them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include "daemon/clock.h"
#include "daemon/number.h"

#define MAX_EXPIRES 16u /* quotas whose kept memory is released in one call */

uint64_t quota_keep_limit(const struct quota *q)
{
        return q->keep.until_ms != 0 ? q->keep.n_bytes : 0;
}

void reclaim_unkeep(struct quota *q)
{
        if (q->keep.until_ms != 0)
                TAILQ_REMOVE(&q->partition->keepers->quotas, q, keep.of_kept);
        q->keep.until_ms = 0;
}

void quota_keep(struct quota *q)
{
        struct quota_list *kept = q->partition->keepers ? &q->partition->keepers->quotas : NULL;
        struct quota *before;

        reclaim_unkeep(q);
        if (!kept || q->keep.n_bytes == 0 || q->is_left || q->is_removed || q->partition->preallocate ||
            q->partition->is_draining || q->partition->is_lost)
                return;
        q->keep.until_ms = clock_ms() + q->keep.ms;
        before = TAILQ_LAST(kept, quota_list);
        while (before && before->keep.until_ms > q->keep.until_ms)
                before = TAILQ_PREV(before, quota_list, keep.of_kept);
        if (before)
                TAILQ_INSERT_AFTER(kept, before, q, keep.of_kept);
        else
                TAILQ_INSERT_HEAD(kept, q, keep.of_kept);
}

uint64_t quota_kept_bytes(const struct quota *q)
{
        uint64_t n_kept = quota_keep_limit(q), n_free = n_kept > 0 ? arena_releasable(q->arena, NULL) : 0;

        return q->sessions.n == 0 ? n_free : min_u64(n_free, n_kept); /* sessions have free extents, too */
}

uint64_t quota_kept_ms(const struct quota *q)
{
        uint64_t now_ms = q->keep.until_ms != 0 ? clock_ms() : 0;

        return now_ms < q->keep.until_ms ? q->keep.until_ms - now_ms : 0;
}

/* Releases what is not kept any more. */
static void reclaim_release_kept(struct quota *q)
{
        reclaim_release_unused(q);
        if (q->sessions.n > 0)
                reclaim_release_surplus(q);
}

void reclaim_set_keep(struct quota *q, uint64_t keep_bytes, uint64_t keep_ms)
{
        bool has_changed = keep_bytes != q->keep.n_bytes || keep_ms != q->keep.ms;

        q->keep.n_bytes = keep_bytes;
        q->keep.ms = keep_ms;
        if (!has_changed || q->keep.until_ms == 0)
                return;
        quota_keep(q);
        reclaim_release_kept(q);
}

/* ---- recalled -------------------------------------------------------------- */

void reclaim_end_recall(struct quota *q, bool is_over)
{
        if (!q->keep.is_recalled || !is_over)
                return;
        q->keep.is_recalled = false;
        q->partition->keepers->n_recalled--;
}

static void quota_recall(struct quota *q)
{
        reclaim_unkeep(q);
        reclaim_release_kept(q);
        if (q->keep.is_recalled || arena_leaving_bytes(q->arena) == 0)
                return;
        q->keep.is_recalled = true;
        q->partition->keepers->n_recalled++;
}

bool reclaim_recall_kept(struct quota *q, struct quota_request *request)
{
        struct keepers *keepers = q->partition->keepers;
        struct quota *each, *next;

        if (!keepers || request->has_recalled)
                return false;
        for (each = TAILQ_FIRST(&keepers->quotas); each; each = next) {
                next = TAILQ_NEXT(each, keep.of_kept);
                if (each->partition->device == q->partition->device)
                        quota_recall(each);
        }
        if (keepers->n_recalled == 0)
                return false;
        request->has_recalled = true;
        request->device_failed = false;
        quota_set_blocked(q, clock_ms());
        quota_enqueue_first(request);
        return true;
}

void quota_expire_kept(struct keepers *keepers)
{
        uint64_t now_ms = clock_ms();
        struct quota *q;

        for (unsigned i = 0; i < MAX_EXPIRES; i++) {
                q = TAILQ_FIRST(&keepers->quotas);
                if (!q || q->keep.until_ms > now_ms)
                        return;
                reclaim_unkeep(q);
                reclaim_release_kept(q);
        }
}
