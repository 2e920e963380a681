/* Accounts and charges; see account.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/account.h"

#include <assert.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>

#include "daemon/base/clock.h"
#include "daemon/base/number.h"

void account_note_change(struct account *a)
{
        if (a->changed)
                a->changed(a);
}

/* What it takes from its parent when so much is committed. */
static uint64_t account_takes_with(const struct account *a, uint64_t committed)
{
        return max_u64(a->reserve_bytes, committed);
}

uint64_t account_takes(const struct account *a)
{
        return account_takes_with(a, a->committed_bytes);
}

uint64_t account_guaranteed(const struct account *a)
{
        return max_u64(a->reserve_bytes, a->promised_bytes);
}

static uint64_t account_free(const struct account *a)
{
        return excess_u64(a->limit_bytes, a->committed_bytes);
}

/* How much more it takes from its parent with n_bytes more. */
static uint64_t account_takes_more(const struct account *a, uint64_t n_bytes)
{
        return account_takes_with(a, a->committed_bytes + n_bytes) - account_takes(a);
}

/* ---- the tree ------------------------------------------------------------ */

void account_init_root(struct account *a, uint64_t limit_bytes)
{
        *a = (struct account){ .limit_bytes = limit_bytes };
}

/* What a takes of its parent, and what is guaranteed to it, were so many bytes: brings those above up to
 * date. */
static void account_lift(const struct account *a, uint64_t takes, uint64_t guaranteed)
{
        for (struct account *p = a->parent; p; a = p, p = p->parent) {
                uint64_t its_takes = account_takes(p);
                uint64_t its_guaranteed = account_guaranteed(p);

                p->committed_bytes += account_takes(a) - takes;
                p->promised_bytes += account_guaranteed(a) - guaranteed;
                takes = its_takes;
                guaranteed = its_guaranteed;
        }
}

static const struct account *account_lacks(const struct account *a, uint64_t n_bytes)
{
        for (; a && n_bytes > 0; a = a->parent) {
                if (n_bytes > account_free(a))
                        return a;
                n_bytes = account_takes_more(a, n_bytes);
        }
        return NULL;
}

uint64_t account_reserve_max(const struct account *a)
{
        uint64_t most = UINT64_MAX, has = a->committed_bytes, within = 0;

        for (const struct account *p = a->parent; p; p = p->parent) {
                most = min_u64(most, max_u64(excess_u64(has + p->limit_bytes, p->committed_bytes), within));
                has += excess_u64(p->reserve_bytes, p->committed_bytes);
                within = max_u64(within, excess_u64(p->reserve_bytes, p->promised_bytes));
        }
        return most;
}

int account_init(struct account *a, struct account *parent, uint64_t limit_bytes, uint64_t reserve_bytes)
{
        if (reserve_bytes > limit_bytes)
                return -EINVAL;
        if (account_lacks(parent, reserve_bytes))
                return -ENOMEM;
        *a = (struct account){ .parent = parent, .limit_bytes = limit_bytes, .reserve_bytes = reserve_bytes };
        parent->n_children++;
        account_lift(a, 0, 0);
        return 0;
}

void account_deinit(struct account *a)
{
        uint64_t reserve_bytes = a->reserve_bytes;

        if (!a->parent)
                return;
        assert(a->charged_bytes == 0 && a->committed_bytes == 0 && a->n_children == 0);
        a->reserve_bytes = 0;
        account_lift(a, reserve_bytes, reserve_bytes);
        a->parent->n_children--;
        a->parent = NULL;
}

bool account_is_in(const struct account *a, const struct account *scope)
{
        while (a && a != scope)
                a = a->parent;
        return a != NULL;
}

/* ---- limits that change -------------------------------------------------- */

void account_set(struct account *a, uint64_t limit_bytes, uint64_t reserve_bytes)
{
        uint64_t takes = account_takes(a), guaranteed = account_guaranteed(a);

        assert(reserve_bytes <= limit_bytes);
        a->limit_bytes = limit_bytes;
        a->reserve_bytes = reserve_bytes;
        account_lift(a, takes, guaranteed);
        account_note_change(a);
}

bool account_fits(const struct account *a, uint64_t limit_bytes, uint64_t committed_bytes)
{
        return committed_bytes <= max_u64(limit_bytes, a->committed_bytes);
}

uint64_t account_ceiling(const struct account *a)
{
        return max_u64(a->limit_bytes, a->committed_bytes);
}

uint64_t account_excess(const struct account *a)
{
        return excess_u64(a->committed_bytes, a->limit_bytes);
}

/* ---- what could be charged ------------------------------------------------- */

const struct account *account_short_of(const struct account *a, uint64_t n_bytes)
{
        return account_lacks(a, n_bytes);
}

/* What is over a limit already is missing too: it must go before anything fits. */
int account_probe(const struct account *a, uint64_t n_bytes, uint64_t *ret_missing_bytes)
{
        for (; a && n_bytes > 0; a = a->parent) {
                if (n_bytes > account_free(a)) {
                        *ret_missing_bytes = n_bytes + a->committed_bytes - a->limit_bytes;
                        return a->parent ? -EDQUOT : -ENOMEM;
                }
                n_bytes = account_takes_more(a, n_bytes);
        }
        return 0;
}

uint64_t account_takes_of(const struct account *a, const struct account *scope, uint64_t n_bytes)
{
        for (; a != scope && a->parent; a = a->parent)
                n_bytes = account_takes_more(a, n_bytes);
        return n_bytes;
}

uint64_t account_attainable(const struct account *a, const struct account *scope)
{
        uint64_t others = a->promised_bytes, most = excess_u64(a->limit_bytes, others);

        for (const struct account *p = a->parent; p && a != scope; a = p, p = p->parent) {
                others += p->promised_bytes - account_guaranteed(a);
                most = min_u64(most, excess_u64(p->limit_bytes, others));
        }
        return most;
}

uint64_t account_room(const struct account *a)
{
        uint64_t room = UINT64_MAX, guaranteed = 0;

        for (; a; a = a->parent) {
                room = min_u64(room, account_free(a) + guaranteed);
                guaranteed += excess_u64(a->reserve_bytes, a->committed_bytes);
        }
        return room;
}

uint64_t account_surplus(const struct account *a, const struct account *scope)
{
        uint64_t n_bytes = a->own_bytes;

        for (; a && a != scope; a = a->parent)
                n_bytes = min_u64(n_bytes, excess_u64(a->committed_bytes, a->reserve_bytes));
        return a ? n_bytes : 0;
}

void account_clear_tally(struct account *a)
{
        for (; a; a = a->parent)
                a->tally_bytes = 0;
}

uint64_t account_tally(struct account *a, const struct account *scope, uint64_t n_bytes)
{
        struct account *each;

        if (!account_is_in(a, scope))
                return 0;
        for (each = a; each != scope; each = each->parent)
                n_bytes = min_u64(n_bytes, excess_u64(excess_u64(each->committed_bytes, each->reserve_bytes),
                                                      each->tally_bytes));
        for (each = a; each != scope; each = each->parent)
                each->tally_bytes += n_bytes;
        return n_bytes;
}

/* ---- charging ------------------------------------------------------------ */

/* The present value may be a new peak. */
static void account_note_peak(struct account *a)
{
        a->window_peak_bytes = max_u64(a->window_peak_bytes, a->charged_bytes);
        if (a->charged_bytes <= a->peak_charged_bytes)
                return;
        a->peak_charged_bytes = a->charged_bytes;
        a->peak_charged_ms = clock_wall_ms();
}

int charge_take(struct account *a, uint64_t n_bytes, struct charge *ret, uint64_t *ret_missing_bytes)
{
        uint64_t takes = account_takes(a), guaranteed = account_guaranteed(a);
        int r = account_probe(a, n_bytes, ret_missing_bytes);

        if (r < 0)
                return r;
        a->own_bytes += n_bytes;
        a->committed_bytes += n_bytes;
        account_lift(a, takes, guaranteed);
        for (struct account *each = a; each; each = each->parent) {
                each->charged_bytes += n_bytes;
                account_note_peak(each);
                assert(each->charged_bytes <= each->committed_bytes);
        }
        *ret = (struct charge){ .account = a, .n_bytes = n_bytes };
        for (struct account *each = a; each; each = each->parent)
                account_note_change(each);
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
        uint64_t takes, guaranteed, n_bytes = c->n_bytes;

        if (!a)
                return;
        assert(n_bytes <= a->own_bytes);
        takes = account_takes(a);
        guaranteed = account_guaranteed(a);
        a->own_bytes -= n_bytes;
        a->committed_bytes -= n_bytes;
        account_lift(a, takes, guaranteed);
        for (struct account *each = a; each; each = each->parent) {
                each->charged_bytes -= n_bytes;
                assert(each->charged_bytes <= each->committed_bytes);
        }
        *c = (struct charge){ .account = NULL };
        for (struct account *each = a; each; each = each->parent)
                account_note_change(each);
}

void account_clear_peaks(struct account *a)
{
        a->peak_charged_bytes = a->charged_bytes;
        a->peak_charged_ms = clock_wall_ms();
}
