/* The inventory; see inventory.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * It is taken under the client's lock, so it is of one moment, and it begins a new epoch. A block of
 * an answer of an earlier epoch that comes later is not in the inventory: so such an answer is
 * dropped, and the request repeated. A block that left the tables before is not in it either, and the
 * daemon frees it: so a Free of an earlier epoch is not sent.
 *
 * A block whose Publish is not answered is listed as an ordinary one: the daemon knows whether it is
 * shared. */
#include "client/inventory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/shared_list.h"

#define MAX_IDS    7000u /* in a message, of 65,536 bytes at most */
#define MAX_SHARED 500u  /* 18 bytes each, at most */

/* ---- taking. The lock is held ----------------------------------------------- */

static bool is_own(const struct block *block)
{
        return !block->slab && !block->stream_alloc;
}

/* How many there are; the first `max` of them. */
static size_t list_blocks(const bfc_client *client, uint64_t *ret, size_t max)
{
        const struct block *block;
        size_t cursor = 0, n = 0;

        while ((block = blocks_next_kept(&client->blocks, &cursor))) {
                if (!is_own(block))
                        continue;
                if (n < max)
                        ret[n] = block->block_id;
                n++;
        }
        if (client->cache)
                n += cache_list(client->cache, ret && n < max ? ret + n : NULL, n < max ? max - n : 0);
        return n;
}

static int list_charges(const bfc_client *client, struct inventory *h)
{
        size_t n = client->hello->hello->n_partitions;

        h->charges = calloc(n + 1, sizeof(*h->charges));
        if (!h->charges)
                return -ENOMEM;
        h->n_charges = n;
        for (size_t i = 0; i < n; i++)
                h->charges[i] = (struct held_charge){ client->partitions[i].stats.bytes_direct,
                                                      client->partitions[i].bytes_contexts };
        return 0;
}

static int list_everything(const bfc_client *client, struct inventory *h)
{
        size_t n_extents = regions_list(&client->regions, NULL, 0);
        size_t n_blocks = list_blocks(client, NULL, 0);
        size_t n_shared = shared_list(client, NULL, 0);

        h->extents = calloc(n_extents + 1, sizeof(*h->extents));
        h->blocks = calloc(n_blocks + 1, sizeof(*h->blocks));
        h->shared = calloc(n_shared + 1, sizeof(*h->shared));
        if (!h->extents || !h->blocks || !h->shared)
                return -ENOMEM;
        h->n_extents = regions_list(&client->regions, h->extents, n_extents);
        h->n_blocks = list_blocks(client, h->blocks, n_blocks);
        h->n_shared = shared_list(client, h->shared, n_shared);
        h->splitting = client->splitting;
        return list_charges(client, h);
}

/* ---- without the lock --------------------------------------------------------- */

static int compare_ids(const void *a, const void *b)
{
        uint64_t x, y;

        memcpy(&x, a, sizeof(x));
        memcpy(&y, b, sizeof(y));
        return (x > y) - (x < y);
}

/* A block may be a stream's slab, too, for a moment, and shared blocks are in the table.
 * shared_count begins with the id. */
static void remove_duplicates(struct inventory *h)
{
        size_t n = 0;

        if (!h->blocks) /* empty: it was not taken */
                return;
        qsort(h->blocks, h->n_blocks, sizeof(*h->blocks), compare_ids);
        qsort(h->shared, h->n_shared, sizeof(*h->shared), compare_ids);
        for (size_t i = 0; i < h->n_blocks; i++) {
                uint64_t id = h->blocks[i];

                if ((n > 0 && h->blocks[n - 1] == id) ||
                    bsearch(&id, h->shared, h->n_shared, sizeof(*h->shared), compare_ids))
                        continue;
                h->blocks[n++] = id;
        }
        h->n_blocks = n;
}

int inventory_take(bfc_client *client, struct inventory *ret, uint64_t *ret_epoch)
{
        struct inventory h = { 0 };
        int r = 0;

        pthread_mutex_lock(&client->lock);
        if (!client->is_ending)
                r = list_everything(client, &h);
        if (r == 0) {
                regions_forget_unmapped(&client->regions); /* the next daemon is not told of them */
                client->n_unretired = 0;
                *ret_epoch = ++client->epoch;
        }
        pthread_mutex_unlock(&client->lock);
        if (r < 0) {
                inventory_clear(&h);
                return r;
        }
        remove_duplicates(&h);
        *ret = h;
        return 0;
}

void inventory_clear(struct inventory *h)
{
        free(h->extents);
        free(h->blocks);
        free(h->shared);
        free(h->charges);
        *h = (struct inventory){ 0 };
}

/* ---- sending ---------------------------------------------------------------------- */

static int send_part(struct call_connection *c, Bfcd__Held *body, Bfcd__Reply **ret_refusal)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Reply *reply = NULL;
        int r;

        request.body_case = BFCD__REQUEST__BODY_HELD;
        request.held = body;
        r = call_send(c, &request, &reply);
        if (r < 0)
                return r;
        if (reply->body_case == BFCD__REPLY__BODY_REFUSAL) {
                *ret_refusal = reply;
                return -EBADMSG;
        }
        r = reply->body_case == BFCD__REPLY__BODY_DONE ? 0 : -EPROTO;
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

static size_t at_most(size_t n, size_t max)
{
        return n < max ? n : max;
}

/* So many shared ones, from there on. */
static void list_shared(const struct shared_count *from, size_t n, Bfcd__HeldShared *rows,
                        Bfcd__HeldShared **list)
{
        for (size_t i = 0; i < n; i++) {
                bfcd__held_shared__init(&rows[i]);
                rows[i].block_id = from[i].block_id;
                rows[i].count = from[i].count;
                list[i] = &rows[i];
        }
}

/* The direct charges, in a message of their own. */
static int send_charges(const struct inventory *h, struct call_connection *c, Bfcd__Reply **ret_refusal)
{
        Bfcd__HeldCharge *rows = calloc(h->n_charges + 1, sizeof(*rows));
        Bfcd__HeldCharge **list = calloc(h->n_charges + 1, sizeof(*list));
        Bfcd__Held body = BFCD__HELD__INIT;
        int r = rows && list ? 0 : -ENOMEM;

        for (size_t i = 0; r == 0 && i < h->n_charges; i++) {
                if (h->charges[i].n_bytes == 0)
                        continue;
                bfcd__held_charge__init(&rows[body.n_charges]);
                rows[body.n_charges].partition = (uint32_t)i;
                rows[body.n_charges].n_bytes = h->charges[i].n_bytes;
                rows[body.n_charges].bytes_contexts = h->charges[i].bytes_contexts;
                list[body.n_charges] = &rows[body.n_charges];
                body.n_charges++;
        }
        body.charges = list;
        if (r == 0 && body.n_charges > 0)
                r = send_part(c, &body, ret_refusal);
        free(rows);
        free(list);
        return r;
}

int inventory_send(const struct inventory *h, struct call_connection *c, Bfcd__Reply **ret_refusal)
{
        Bfcd__HeldShared rows[MAX_SHARED], *list[MAX_SHARED];
        Bfcd__Split splitting = BFCD__SPLIT__INIT;
        size_t n_extents = 0, n_blocks = 0, n_shared = 0;
        Bfcd__Held body;
        int r = send_charges(h, c, ret_refusal);

        if (r < 0)
                return r;
        splitting.block_id = h->splitting.block_id;
        splitting.n_bytes = h->splitting.n_bytes;
        do {
                bfcd__held__init(&body);
                body.n_shared = at_most(h->n_shared - n_shared, MAX_SHARED);
                list_shared(h->shared + n_shared, body.n_shared, rows, list);
                body.shared = list;
                body.n_extent_ids = body.n_shared > 0 ? 0 : at_most(h->n_extents - n_extents, MAX_IDS);
                body.extent_ids = h->extents + n_extents;
                body.n_block_ids =
                        body.n_shared > 0 ? 0 : at_most(h->n_blocks - n_blocks, MAX_IDS - body.n_extent_ids);
                body.block_ids = h->blocks + n_blocks;
                n_shared += body.n_shared;
                n_extents += body.n_extent_ids;
                n_blocks += body.n_block_ids;
                body.is_last =
                        n_shared == h->n_shared && n_extents == h->n_extents && n_blocks == h->n_blocks;
                if (body.is_last && splitting.block_id != 0)
                        body.splitting = &splitting;
                r = send_part(c, &body, ret_refusal);
        } while (r == 0 && !body.is_last);
        return r;
}
