/* Places in the store of fds; see store_share.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/store_share.h"

#include <assert.h>

#include "daemon/number.h"

/* Of its share, what it has not taken. */
static size_t promised(const struct store_share *s)
{
        return excess_u64(s->n_guaranteed, s->n);
}

static void change(struct store_share *s, size_t n, size_t n_guaranteed)
{
        s->places->n_promised -= promised(s);
        s->places->n += n - s->n;
        s->n = n;
        s->n_guaranteed = n_guaranteed;
        s->places->n_promised += promised(s);
}

void store_share_set(struct store_share *s, size_t n_guaranteed)
{
        change(s, s->n, n_guaranteed);
}

bool store_share_take(struct store_share *s, size_t n)
{
        size_t n_free, of_others;

        if (!s)
                return true;
        n_free = excess_u64(s->places->n_max, s->places->n);
        of_others = s->places->n_promised - promised(s);
        if (n > excess_u64(n_free, of_others))
                return false;
        change(s, s->n + n, s->n_guaranteed);
        return true;
}

void store_share_add(struct store_share *s, size_t n)
{
        if (s)
                change(s, s->n + n, s->n_guaranteed);
}

void store_share_return(struct store_share *s, size_t n)
{
        if (!s)
                return;
        assert(n <= s->n);
        change(s, s->n - n, s->n_guaranteed);
}
