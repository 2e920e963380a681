/* Direct charges of a quota: memory that processes take by themselves, and have charged; see quota.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/reclaim.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/clock.h"

#define DIRECT_SAMPLES 3u /* of what others use on the device, after each change */

/* What others use on the device tells at the end of a process whether its memory was returned. */
static bool is_asked(const struct quota *q)
{
        return q->partition->device->ops->others != NULL;
}

int quota_charge_direct(struct quota *q, uint64_t n_bytes, bool again)
{
        return quota_wait_or_refuse(q, n_bytes, quota_refusal(q), again);
}

int quota_grant_direct(struct quota *q, struct quota_request *request)
{
        uint64_t missing;
        int r = quota_charge(q, request->n_bytes, &request->charge, &missing);

        if (r < 0)
                return r;

        /* Standby memory leaves room for what the process takes by itself from now on. */
        partition_tell_standby(q->partition);
        reclaim_note_growth(request);
        quota_unqueue_served(request);
        request->has_grown = true;
        quota_complete(request, 0, 0, 0);
        quota_make_due(q);
        return 0;
}

/* n_bytes more (modulo 2^64). */
static void count_direct(struct quota *q, uint64_t n_bytes)
{
        for (struct quota *each = q; each; each = quota_parent(each))
                each->all.bytes_direct += n_bytes;
        q->partition->device->direct.n_bytes += n_bytes;
        quota_note_change(q);
        quota_publish(q);
}

void quota_count_direct(struct quota *q, struct charge *own, struct charge *granted)
{
        uint64_t n_bytes = granted->n_bytes;

        charge_join(own, granted);
        count_direct(q, n_bytes);
        if (is_asked(q))
                q->partition->device->direct.n_due = DIRECT_SAMPLES;
        quota_assert(q);
}

int quota_take_direct(struct quota *q, uint64_t n_bytes, struct charge *own)
{
        struct charge part;

        if (n_bytes > q->extentless.direct_left.n_bytes)
                return -EBADMSG;
        charge_split(&q->extentless.direct_left, n_bytes, &part);
        quota_count_direct(q, own, &part);
        return 0;
}

/* Bytes are uncharged, as far as the device has returned them. */
static void direct_ended(void *userdata, uint64_t n_bytes)
{
        struct quota *q = userdata;
        uint64_t now_ms = clock_ms();

        quota_note_change(q);
        returns_add(&q->returns, n_bytes, now_ms);
        returns_add(&q->partition->returns, n_bytes, now_ms);
        (void)quota_note_release(q, 0);
        partition_make_due(q->partition);
}

void quota_return_direct(struct quota *q, struct charge *granted)
{
        charge_drop(granted);
        partition_make_due(q->partition);
}

/* n_bytes of it are no session's any more. */
static void direct_split(struct quota *q, struct charge *own, uint64_t n_bytes, struct charge *ret)
{
        assert(n_bytes <= own->n_bytes && n_bytes <= q->all.bytes_direct);
        charge_split(own, n_bytes, ret);
        if (own->n_bytes == 0)
                *own = (struct charge){ NULL, 0 };
        count_direct(q, -n_bytes);
        if (q->partition->is_draining)
                quota_note_idle(q);
}

void quota_drop_direct(struct quota *q, struct charge *own, uint64_t n_bytes)
{
        struct charge part;

        if (n_bytes == 0)
                return;
        direct_split(q, own, n_bytes, &part);
        charge_drop(&part);
        direct_ended(q, n_bytes);
}

void quota_end_direct(struct quota *q, struct charge *own)
{
        struct charge part;

        if (own->n_bytes == 0)
                return;
        /* The device cannot be asked, so the word of the process counts. */
        if (!is_asked(q) || q->partition->is_lost) {
                quota_drop_direct(q, own, own->n_bytes);
                return;
        }

        /* Else the bytes stay charged until the device was asked whether they are back. */
        direct_split(q, own, own->n_bytes, &part);
        arena_end_direct(q->arena, &part, direct_ended, q);
        (void)quota_note_release(q, 0);
}

void quota_leave_direct(struct quota *q, struct charge *own)
{
        struct charge part;

        if (own->n_bytes == 0)
                return;
        direct_split(q, own, own->n_bytes, &part);
        charge_drop(&part);
}
