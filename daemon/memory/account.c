/* Accounts and charges; see account.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/account.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#include "daemon/clock.h"
#include "daemon/number.h"

void account_note_change(struct account *a)
{
        if (a->changed)
                a->changed(a);
}

/* What the account takes out of its pool when so much is charged. */
static uint64_t account_committed(const struct account *a, uint64_t charged)
{
        return max_u64(a->reserve_bytes, charged);
}

void pool_init(struct pool *p, uint64_t limit_bytes)
{
        *p = (struct pool){ .limit_bytes = limit_bytes, .ceiling_bytes = limit_bytes };
}

int account_init(struct account *a, struct pool *p, uint64_t limit_bytes, uint64_t reserve_bytes)
{
        if (reserve_bytes > limit_bytes)
                return -EINVAL;
        if (reserve_bytes > 0 && reserve_bytes > excess_u64(p->limit_bytes, p->committed_bytes))
                return -ENOMEM;
        p->committed_bytes += reserve_bytes;
        p->reserve_bytes += reserve_bytes;
        *a = (struct account){ .pool = p,
                               .limit_bytes = limit_bytes,
                               .ceiling_bytes = limit_bytes,
                               .reserve_bytes = reserve_bytes };
        return 0;
}

void account_deinit(struct account *a)
{
        if (!a->pool)
                return;
        assert(a->charged_bytes == 0);
        assert(a->pool->committed_bytes >= a->reserve_bytes);
        a->pool->committed_bytes -= a->reserve_bytes;
        a->pool->reserve_bytes -= a->reserve_bytes;
        a->pool->ceiling_bytes =
                max_u64(a->pool->limit_bytes, min_u64(a->pool->ceiling_bytes, a->pool->committed_bytes));
        a->pool = NULL;
}

/* ---- limits that change -------------------------------------------------- */

void account_set(struct account *a, uint64_t limit_bytes, uint64_t reserve_bytes)
{
        struct pool *p = a->pool;

        assert(reserve_bytes <= limit_bytes);
        p->committed_bytes -= account_committed(a, a->charged_bytes);
        p->reserve_bytes = p->reserve_bytes - a->reserve_bytes + reserve_bytes;
        a->limit_bytes = limit_bytes;
        a->reserve_bytes = reserve_bytes;
        a->ceiling_bytes = max_u64(limit_bytes, a->charged_bytes);
        p->committed_bytes += account_committed(a, a->charged_bytes);
        p->ceiling_bytes = max_u64(p->limit_bytes, p->committed_bytes);
        account_note_change(a);
}

void pool_set_limit(struct pool *p, uint64_t limit_bytes)
{
        p->limit_bytes = limit_bytes;
        p->ceiling_bytes = max_u64(limit_bytes, p->committed_bytes);
}

bool pool_fits(const struct pool *p, uint64_t limit_bytes, uint64_t committed_bytes)
{
        return committed_bytes <= max_u64(limit_bytes, min_u64(p->committed_bytes, p->ceiling_bytes));
}

uint64_t account_excess(const struct account *a)
{
        return excess_u64(a->charged_bytes, a->limit_bytes);
}

uint64_t pool_excess(const struct pool *p)
{
        return excess_u64(p->committed_bytes, p->limit_bytes);
}

/* ---- charging ------------------------------------------------------------ */

/* What is over a limit already is missing too: it must go before anything fits. */
int account_probe(const struct account *a, uint64_t n_bytes, uint64_t *ret_missing_bytes)
{
        const struct pool *p = a->pool;
        uint64_t more;

        if (n_bytes == 0)
                return 0;
        if (n_bytes > excess_u64(a->limit_bytes, a->charged_bytes)) {
                *ret_missing_bytes = n_bytes + a->charged_bytes - a->limit_bytes;
                return -EDQUOT;
        }
        more = account_committed(a, a->charged_bytes + n_bytes) - account_committed(a, a->charged_bytes);
        if (more > 0 && more > excess_u64(p->limit_bytes, p->committed_bytes)) {
                *ret_missing_bytes = more + p->committed_bytes - p->limit_bytes;
                return -ENOMEM;
        }
        return 0;
}

uint64_t account_attainable(const struct account *a)
{
        return min_u64(a->limit_bytes,
                       excess_u64(a->pool->limit_bytes, a->pool->reserve_bytes - a->reserve_bytes));
}

uint64_t account_room(const struct account *a)
{
        uint64_t own = excess_u64(a->limit_bytes, a->charged_bytes);
        uint64_t pool = excess_u64(a->pool->limit_bytes, a->pool->committed_bytes) +
                        (account_committed(a, a->charged_bytes) - a->charged_bytes);

        return min_u64(own, pool);
}

/* The present values may be new peaks. */
static void account_note_peaks(struct account *a)
{
        struct pool *p = a->pool;
        bool is_new = a->charged_bytes > a->peak_charged_bytes;
        bool is_pools = p->charged_bytes > p->peak_charged_bytes;
        uint64_t now_ms = is_new || is_pools ? clock_wall_ms() : 0;

        if (a->charged_bytes > a->window_peak_bytes)
                a->window_peak_bytes = a->charged_bytes;
        if (is_new) {
                a->peak_charged_bytes = a->charged_bytes;
                a->peak_charged_ms = now_ms;
        }
        if (is_pools) {
                p->peak_charged_bytes = p->charged_bytes;
                p->peak_charged_ms = now_ms;
        }
}

int charge_take(struct account *a, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes)
{
        struct pool *p = a->pool;
        int r = account_probe(a, n_bytes, ret_missing_bytes);

        if (r < 0)
                return r;
        p->committed_bytes +=
                account_committed(a, a->charged_bytes + n_bytes) - account_committed(a, a->charged_bytes);
        a->charged_bytes += n_bytes;
        p->charged_bytes += n_bytes;
        account_note_peaks(a);
        a->lifetime_peak_charged_bytes = max_u64(a->lifetime_peak_charged_bytes, a->charged_bytes);
        p->lifetime_peak_charged_bytes = max_u64(p->lifetime_peak_charged_bytes, p->charged_bytes);
        assert(a->charged_bytes <= a->ceiling_bytes);
        assert(p->charged_bytes <= p->committed_bytes && p->committed_bytes <= p->ceiling_bytes);
        *ret = (struct charge){ .account = a, .n_bytes = n_bytes };
        account_note_change(a);
        return 0;
}

void charge_join(struct charge *c, struct charge *from)
{
        assert(!c->account || !from->account || c->account == from->account);
        if (from->account)
                c->account = from->account;
        c->n_bytes += from->n_bytes;
        *from = (struct charge){ .account = NULL };
}

void charge_split(struct charge *c, uint64_t n_bytes, struct charge *ret)
{
        assert(c->account && n_bytes <= c->n_bytes);
        c->n_bytes -= n_bytes;
        *ret = (struct charge){ .account = c->account, .n_bytes = n_bytes };
}

void charge_drop(struct charge *c)
{
        struct account *a = c->account;
        uint64_t before;

        if (!a)
                return;
        assert(c->n_bytes <= a->charged_bytes);
        before = account_committed(a, a->charged_bytes);
        a->charged_bytes -= c->n_bytes;
        a->pool->charged_bytes -= c->n_bytes;
        a->pool->committed_bytes -= before - account_committed(a, a->charged_bytes);
        a->ceiling_bytes = max_u64(a->limit_bytes, min_u64(a->ceiling_bytes, a->charged_bytes));
        a->pool->ceiling_bytes =
                max_u64(a->pool->limit_bytes, min_u64(a->pool->ceiling_bytes, a->pool->committed_bytes));
        assert(a->pool->charged_bytes <= a->pool->committed_bytes);
        *c = (struct charge){ .account = NULL };
        account_note_change(a);
}

void account_clear_peaks(struct account *a)
{
        a->peak_charged_bytes = a->charged_bytes;
        a->peak_charged_ms = clock_wall_ms();
}

void pool_clear_peaks(struct pool *p)
{
        p->peak_charged_bytes = p->charged_bytes;
        p->peak_charged_ms = clock_wall_ms();
}
