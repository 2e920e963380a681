/* The sentence of a refusal, with numbers; see quota_explain().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/base/number.h"

/* "lease 'x' of tenant 'y'", or "tenant 'y'". */
#define QUOTA_NAME(q) quota_name(q, (char[2 * LEDGER_NAME_BYTES + 32]){ 0 })
static const char *quota_name(const struct quota *q, char ret[static 2 * LEDGER_NAME_BYTES + 32])
{
        snprintf(ret, 2 * LEDGER_NAME_BYTES + 32, "%s%s%stenant '%s'", q->lease ? "lease '" : "",
                 q->lease ? q->lease : "", q->lease ? "' of " : "", q->tenant);
        return ret;
}

/* A block that must be in one extent is larger than any can be. */
static void quota_explain_extent(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        const struct partition *p = q->partition;

        snprintf(buf, n_buf,
                 "a block of %" PRIu64 " bytes does not fit in one extent of %s in '%s', which "
                 "has at most %" PRIu64 " bytes: request less, or raise the limit to %s or more%s",
                 refused->n_bytes, QUOTA_NAME(q), p->name, arena_max_in_extent(q->arena),
                 NUMBER_SIZE(extent_limit_for(p->device->is_cuda, refused->n_bytes,
                                              device_granularity(p->device))),
                 p->preallocate ? ", or set 'growth: on-demand'" : "");
}

/* The partition is full, or promised to others. */
static void quota_explain_partition(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct quota *q = refused->quota;
        const struct account *a = &q->account;
        const struct account *p = &q->partition->pool;
        uint64_t attainable = account_attainable(a, NULL);
        uint64_t claims = reclaim_claims_before(refused, p, 0);
        struct bfc_stats stats;
        int n;

        if (quota_is_impossible(q, refused->n_bytes) < 0) {
                snprintf(buf, n_buf,
                         "partition '%s' can never serve this request: asked %s, %s can have at "
                         "most %s, because %s of %s are guaranteed to %s",
                         q->partition->name, NUMBER_SIZE(refused->n_bytes), QUOTA_NAME(q),
                         NUMBER_SIZE(attainable), NUMBER_SIZE(p->limit_bytes - attainable),
                         NUMBER_SIZE(p->limit_bytes), quota_parent(q) ? "others" : "other tenants");
                return;
        }
        arena_read_stats(q->arena, &stats);
        n = snprintf(buf, n_buf,
                     "partition '%s' is full: asked %s%s, %s of %s reserved or guaranteed; %s: %s of %s "
                     "reserved, %s in blocks, largest free piece %s",
                     q->partition->name, NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(p->committed_bytes),
                     NUMBER_SIZE(p->limit_bytes), QUOTA_NAME(q), NUMBER_SIZE(a->charged_bytes),
                     NUMBER_SIZE(a->limit_bytes), NUMBER_SIZE(quota_own(q).bytes_in_use),
                     NUMBER_SIZE(stats.largest_free_block_bytes));
        if (claims > 0 && n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, "; earlier requests of other tenants wait for %s",
                         NUMBER_SIZE(claims));
}

/* Which limit refuses it: the quota's, or that of the quota above. */
static const struct quota *quota_of_limit(const struct quota_request *refused)
{
        const struct quota *q = refused->quota;
        const struct account *a = &q->account, *above = quota_parent(q) ? &quota_parent(q)->account : NULL;

        if (!above || refused->n_bytes > account_attainable(a, a))
                return q;
        return refused->n_bytes > account_attainable(a, above) || refused->lack.scope == above ||
                               account_short_of(a, refused->n_bytes) == above
                       ? quota_parent(q)
                       : q;
}

static void quota_explain_limit(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota, *at = quota_of_limit(refused);
        const struct quota *full = refused->is_direct ? NULL : quota_without_block(q);
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct account *a = &at->account;
        struct bfc_stats stats;
        int n;

        if (quota_has_ended(q))
                snprintf(buf, n_buf, "%s has ended in '%s' and gets no more memory: asked %s, %s reserved",
                         QUOTA_NAME(q), q->partition->name, NUMBER_SIZE(refused->n_bytes),
                         NUMBER_SIZE(q->account.own_bytes));
        else if (full)
                snprintf(buf, n_buf,
                         "%s is at its limit in '%s': it has %" PRIu32 " blocks, and max_blocks is %" PRIu32,
                         QUOTA_NAME(full), q->partition->name, full->all.n_blocks, full->max_blocks);
        if (quota_has_ended(q) || full)
                return;
        arena_read_stats(q->arena, &stats);
        n = snprintf(buf, n_buf, "%s %s its limit in '%s': asked %s%s, %s of %s reserved", QUOTA_NAME(at),
                     refused->n_bytes > a->limit_bytes ? "asked for more than" : "is at", q->partition->name,
                     NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(a->committed_bytes),
                     NUMBER_SIZE(a->limit_bytes));
        if (at != q && n > 0 && (size_t)n < n_buf)
                n += snprintf(buf + n, n_buf - (size_t)n, " or guaranteed; lease '%s': %s of %s reserved",
                              q->lease, NUMBER_SIZE(q->account.own_bytes),
                              NUMBER_SIZE(q->account.limit_bytes));
        else if (a->n_children > 0 && n > 0 && (size_t)n < n_buf)
                n += snprintf(buf + n, n_buf - (size_t)n, " or guaranteed, %s of it by its leases",
                              NUMBER_SIZE(a->committed_bytes - a->own_bytes));
        if (n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, ", %s in blocks, largest free piece %s",
                         NUMBER_SIZE(quota_own(q).bytes_in_use), NUMBER_SIZE(stats.largest_free_block_bytes));
}

void quota_explain(const struct quota_request *refused, int error, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;

        if (error == -EBUSY)
                snprintf(
                        buf, n_buf,
                        "device '%s' of partition '%s' is draining or drained: it serves no new memory until "
                        "an operator resumes it",
                        q->partition->device_id, q->partition->name);
        else if (error == -ENODEV)
                snprintf(buf, n_buf,
                         "device '%s' of partition '%s' is lost, and so is its memory; free the "
                         "blocks that are there: the device is opened again when the last one is freed",
                         q->partition->device_id, q->partition->name);
        else if (error == -EINVAL)
                quota_explain_extent(refused, buf, n_buf);
        else if (error == -EDQUOT)
                quota_explain_limit(refused, buf, n_buf);
        else
                quota_explain_partition(refused, buf, n_buf);
}
