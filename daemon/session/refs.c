/* The references of a session; see refs.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/session/refs.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/ledger/ledger.h"

/* The index of the reference, or where it would be. */
static size_t place_of(const struct refs *h, uint32_t shared)
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

void refs_clear(struct refs *h)
{
        free(h->list);
        *h = (struct refs){ .list = NULL };
}

uint32_t refs_find(const struct refs *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        return at < h->n && h->list[at].shared == shared ? h->list[at].ref : LEDGER_NONE;
}

int refs_make_room(struct refs *h)
{
        struct ref_at *list;

        assert(h->n < REFS_MAX);
        if ((h->n & (h->n - 1)) != 0)
                return 0;
        list = realloc(h->list, (h->n > 0 ? 2 * h->n : 1) * sizeof(*list));
        if (!list)
                return -ENOMEM;
        h->list = list;
        return 0;
}

void refs_add(struct refs *h, uint32_t shared, uint32_t ref)
{
        size_t at = place_of(h, shared);

        assert(at == h->n || h->list[at].shared != shared);
        memmove(h->list + at + 1, h->list + at, (h->n - at) * sizeof(*h->list));
        h->list[at] = (struct ref_at){ shared, ref };
        h->n++;
}

void refs_remove(struct refs *h, uint32_t shared)
{
        size_t at = place_of(h, shared);

        assert(at < h->n && h->list[at].shared == shared);
        h->n--;
        memmove(h->list + at, h->list + at + 1, (h->n - at) * sizeof(*h->list));
}
