/* The list of shared blocks; see shared_list.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/shared_list.h"

#include <errno.h>
#include <stdlib.h>

#include "client/client.h"

void shared_clear(bfc_client *client)
{
        struct shared_block *s;

        while ((s = client->shared)) {
                client->shared = s->next;
                free(s);
        }
}

struct shared_block *shared_find(const bfc_client *client, const void *ptr)
{
        struct shared_block *s = client->shared;

        while (s && s->ptr != ptr)
                s = s->next;
        return s;
}

/* By the daemon's id: while the block is parked, its place is not mapped. */
struct shared_block *shared_find_id(const bfc_client *client, uint64_t block_id)
{
        struct shared_block *s = client->shared;

        while (s && s->block_id != block_id)
                s = s->next;
        return s;
}

bool shared_has(const bfc_client *client, const void *ptr)
{
        return shared_find(client, ptr) != NULL;
}

bool shared_is_read_only(const bfc_client *client, const void *ptr)
{
        const struct shared_block *s = shared_find(client, ptr);

        return s && s->is_read_only;
}

int shared_add(bfc_client *client, const void *ptr, uint64_t block_id)
{
        struct shared_block *s = malloc(sizeof(*s));

        if (!s)
                return -ENOMEM;
        *s = (struct shared_block){ client->shared, ptr, block_id, 1, 0, false, false };
        client->shared = s;
        return 0;
}

size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max)
{
        size_t n = 0;

        for (const struct shared_block *s = client->shared; s; s = s->next) {
                if (s->is_asked)
                        continue;
                if (n < max)
                        ret[n] = (struct shared_count){ s->block_id, s->n_refs };
                n++;
        }
        return n;
}

void shared_remove(bfc_client *client, struct shared_block *s)
{
        struct shared_block **at = &client->shared;

        while (*at != s)
                at = &(*at)->next;
        *at = s->next;
        free(s);
}
