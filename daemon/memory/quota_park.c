/* Blocks of a quota that are parked; see quota.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <errno.h>

bool quota_can_park(const struct quota *q)
{
        const struct partition *p = q->partition;

        return p->share == DEVICE_SHARE_FD && !p->preallocate && p->device->ops->copy;
}

int quota_alloc_whole(struct quota *q, uint64_t n_bytes, bool again)
{
        int r = quota_can_park(q) ? quota_refusal(q) : -ENOTSUP;

        if (r == 0 && quota_without_block(q))
                r = -EDQUOT;
        return quota_wait_or_refuse(q, n_bytes, r, again);
}

int quota_try_copy(struct quota *q, struct quota_request *request, bfc_handle *ret_handle,
                   uint64_t *ret_offset)
{
        uint64_t n_bytes;
        int r = quota_refusal(q);

        if (r < 0)
                return r;
        if (quota_without_block(q))
                return -EDQUOT;

        /* The copy gets whole extents, so it becomes as large as they are. */
        r = arena_alloc_unseen(q->arena, request->n_bytes, ret_handle, ret_offset, &n_bytes);
        if (r != 0)
                return r;
        q->queue.n_bytes += n_bytes - request->n_bytes;
        request->n_bytes = n_bytes;
        quota_count_alloc(q, n_bytes);
        return 0;
}

static void count_parked(struct quota *q, uint64_t n_bytes)
{
        quota_count_blocks(q, 0, -n_bytes, -n_bytes);
        quota_assert(q);
        (void)quota_note_release(q, n_bytes);
}

int quota_park(struct quota *q, bfc_handle handle, uint64_t n_bytes)
{
        int r = arena_park(q->arena, handle, quota_on_uncharged, q);

        if (r == 0)
                count_parked(q, n_bytes);
        return r;
}

void quota_wake_commit(struct quota *q, bfc_handle handle)
{
        arena_wake_commit(q->arena, handle);
}

void quota_wake_undo(struct quota *q, bfc_handle handle, uint64_t n_bytes)
{
        arena_wake_undo(q->arena, handle);
        count_parked(q, n_bytes);
}

int quota_release_parked(struct quota *q)
{
        int r = arena_release_parked(q->arena, quota_on_uncharged, q);

        (void)quota_note_release(q, 0);
        return r;
}

static bool has_room_for_parked(const struct quota *q, uint64_t parked, uint64_t n_bytes)
{
        uint64_t limit = q->account.limit_bytes;
        uint64_t most = limit <= UINT64_MAX / QUOTA_PARKED_LIMITS ? QUOTA_PARKED_LIMITS * limit : UINT64_MAX;

        return parked <= most && n_bytes <= most - parked;
}

bool quota_may_park(const struct quota *q, uint64_t n_bytes)
{
        const struct quota *of_tenant = quota_of_tenant(q);

        return has_room_for_parked(of_tenant, of_tenant->all.bytes_parked, n_bytes) &&
               has_room_for_parked(q, arena_parked_bytes(q->arena), n_bytes);
}

void quota_drop_parked(struct quota *q, bfc_handle handle)
{
        arena_drop_parked(q->arena, handle);
        quota_count_blocks(q, -(uint32_t)1, 0, 0);
        quota_publish(q);
        quota_make_due(q);
}
