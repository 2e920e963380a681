/* The holds of a session; see holds.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/holds.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/ledger.h"

#define HOLDS_FIRST 8u

/* Where it is, or would be. */
static size_t place_of(const struct holds *h, uint32_t shared)
{
        size_t first = 0, end = h->n;

        while (first < end) {
                size_t middle = first + (end - first) / 2;

                if (h->list[middle].shared < shared)
                        first = middle + 1;
                else
                        end = middle;
        }
        return first;
}

void holds_clear(struct holds *h)
{
        free(h->list);
        *h = (struct holds){ .list = NULL };
}

uint32_t holds_find(const struct holds *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        return at < h->n && h->list[at].shared == shared ? h->list[at].hold : LEDGER_NONE;
}

int holds_make_room(struct holds *h)
{
        size_t n_max = h->n_max ? 2 * h->n_max : HOLDS_FIRST;
        struct hold_at *list;

        assert(h->n < HOLDS_MAX);
        if (h->n < h->n_max)
                return 0;
        list = realloc(h->list, n_max * sizeof(*list));
        if (!list)
                return -ENOMEM;
        h->list = list;
        h->n_max = n_max;
        return 0;
}

void holds_add(struct holds *h, uint32_t shared, uint32_t hold)
{
        size_t at = place_of(h, shared);

        assert(h->n < h->n_max);
        assert(at == h->n || h->list[at].shared != shared);
        memmove(h->list + at + 1, h->list + at, (h->n - at) * sizeof(*h->list));
        h->list[at] = (struct hold_at){ shared, hold };
        h->n++;
}

void holds_remove(struct holds *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        assert(at < h->n && h->list[at].shared == shared);
        h->n--;
        memmove(h->list + at, h->list + at + 1, (h->n - at) * sizeof(*h->list));
}
