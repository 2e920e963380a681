/* The sentence of a refusal, with numbers; see quota_explain().
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "daemon/number.h"

/* A block that must be in one extent is larger than that. */
static void quota_explain_extent(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        const struct partition *p = q->partition;

        snprintf(buf, n_buf,
                 "a block of %" PRIu64 " bytes does not fit in one extent of tenant '%s' in '%s', which "
                 "has at most %" PRIu64 " bytes: request less, or raise the limit to %s or more%s",
                 refused->n_bytes, q->tenant, p->name, arena_max_in_extent(q->arena),
                 NUMBER_SIZE(extent_limit_for(refused->n_bytes, device_granularity(p->device))),
                 p->is_cuda ? ", or set 'share: cuda-ipc', where every block is in one extent" : "");
}

/* The partition is full, or promised to others. */
static void quota_explain_partition(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const char *how = refused->in_extent ? " in one extent" : "";
        const struct quota *q = refused->quota;
        const struct account *a = &q->account;
        const struct pool *p = &q->partition->pool;
        uint64_t claims = reclaim_claims_before(refused);
        struct bfc_stats stats;
        int n;

        if (quota_is_impossible(q, refused->n_bytes)) {
                snprintf(buf, n_buf,
                         "partition '%s' can never serve this request: asked %s, tenant '%s' can have at "
                         "most %s, because %s of %s are guaranteed to other tenants",
                         q->partition->name, NUMBER_SIZE(refused->n_bytes), q->tenant,
                         NUMBER_SIZE(p->limit_bytes - (p->reserve_bytes - a->reserve_bytes)),
                         NUMBER_SIZE(p->reserve_bytes - a->reserve_bytes), NUMBER_SIZE(p->limit_bytes));
                return;
        }
        arena_read_stats(q->arena, &stats);
        n = snprintf(
                buf, n_buf,
                "partition '%s' is full: asked %s%s, %s of %s reserved or guaranteed; tenant '%s': %s of %s "
                "reserved, %s in blocks, largest free piece %s",
                q->partition->name, NUMBER_SIZE(refused->n_bytes), how, NUMBER_SIZE(p->committed_bytes),
                NUMBER_SIZE(p->limit_bytes), q->tenant, NUMBER_SIZE(a->charged_bytes),
                NUMBER_SIZE(a->limit_bytes), NUMBER_SIZE(q->bytes_in_use),
                NUMBER_SIZE(stats.largest_free_block_bytes));
        if (claims > 0 && n > 0 && (size_t)n < n_buf)
                snprintf(buf + n, n_buf - (size_t)n, "; earlier requests of other tenants wait for %s",
                         NUMBER_SIZE(claims));
}

static void quota_explain_limit(const struct quota_request *refused, char *buf, size_t n_buf)
{
        const struct quota *q = refused->quota;
        struct bfc_stats stats;

        if (q->n_blocks >= q->max_blocks) {
                snprintf(buf, n_buf,
                         "tenant '%s' is at its limit in '%s': it has %" PRIu32
                         " blocks, and max_blocks is %" PRIu32,
                         q->tenant, q->partition->name, q->n_blocks, q->max_blocks);
                return;
        }
        arena_read_stats(q->arena, &stats);
        snprintf(
                buf, n_buf,
                "tenant '%s' %s its limit in '%s': asked %s%s, %s of %s reserved, %s in blocks, largest free "
                "piece %s",
                q->tenant, refused->n_bytes > q->account.limit_bytes ? "asked for more than" : "is at",
                q->partition->name, NUMBER_SIZE(refused->n_bytes), refused->in_extent ? " in one extent" : "",
                NUMBER_SIZE(q->account.charged_bytes), NUMBER_SIZE(q->account.limit_bytes),
                NUMBER_SIZE(q->bytes_in_use), NUMBER_SIZE(stats.largest_free_block_bytes));
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
                         "device '%s' of partition '%s' is lost, and so is its memory; an operator must "
                         "drain and resume it, or restart the daemon",
                         q->partition->device_id, q->partition->name);
        else if (error == -EINVAL)
                quota_explain_extent(refused, buf, n_buf);
        else if (error == -EDQUOT)
                quota_explain_limit(refused, buf, n_buf);
        else
                quota_explain_partition(refused, buf, n_buf);
}
