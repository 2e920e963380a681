/* Slabs that shrink: the whole extents of a slab in use that no block needs are given back; see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The daemon is asked to split the slab where such extents begin and end. The parts between are idle
 * slabs, and are given back as others are. One Split is under way at a time: the list of what is held names it,
 * because a daemon that was killed may or may not have done it.
 *
 * A part between two blocks takes two Splits. Where max_blocks does not hold both the first is refused, too. */
#include <errno.h>

#include "client/client.h"

#define SHRINK_PLACES 128u /* at a time */

static bool find_extent(void *userdata, uint64_t region_id, uint64_t offset, uint64_t *ret_begin,
                        uint64_t *ret_end)
{
        const bfc_client *client = userdata;
        struct region_origin origin;

        if (regions_origin(&client->regions, region_id, offset, &origin) < 0)
                return false;
        *ret_begin = origin.offset;
        *ret_end = origin.offset + origin.n_bytes;
        return true;
}

/* -ENOENT: no slab has the place inside any more. */
static int split_begin(bfc_client *client, uint32_t partition, const struct cache_place *at, Bfcd__Split *ret)
{
        int r;

        pthread_mutex_lock(&client->lock);
        r = cache_hold(client->cache, partition, at, &ret->block_id, &ret->n_bytes);
        if (r == 0)
                client->splitting = (struct held_split){ ret->block_id, ret->n_bytes };
        pthread_mutex_unlock(&client->lock);
        return r;
}

/* Asked again by whichever daemon there is, it is answered as before. */
static int split_at(bfc_client *client, uint32_t partition, const struct cache_place *at)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Split body = BFCD__SPLIT__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r = split_begin(client, partition, at, &body);

        if (r < 0)
                return r == -ENOENT ? 0 : r;
        request.body_case = BFCD__REQUEST__BODY_SPLIT;
        request.split = &body;
        body.n_more = at->needs_next;
        r = client_ask(client, &request, BFCD__REPLY__BODY_SPLIT, &reply, &epoch);
        pthread_mutex_lock(&client->lock);
        client->splitting = (struct held_split){ 0, 0 };
        if (r == 0)
                cache_split(client->cache, partition, at, reply->split->block_id);
        pthread_mutex_unlock(&client->lock);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* Refused two Splits, the daemon may do one elsewhere. */
static int split_all(bfc_client *client, uint32_t partition, const struct cache_place *places, size_t n,
                     bool *ret_refused)
{
        int r = 0;

        *ret_refused = false;
        for (size_t i = 0; r == 0 && i < n; i++) {
                bool is_two = places[i].needs_next;

                if (!is_two || !*ret_refused)
                        r = split_at(client, partition, &places[i]);
                if (is_two && r == -EDQUOT) {
                        *ret_refused = true;
                        r = 0;
                }
                if (is_two && *ret_refused)
                        i++;
        }
        return r;
}

int client_shrink(bfc_client *client, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                  bool *ret_more)
{
        struct cache_place places[SHRINK_PLACES];
        bool is_refused;
        size_t n;
        int r;

        pthread_mutex_lock(&client->split_lock);
        pthread_mutex_lock(&client->lock);
        client_drain(client);
        n = cache_find_splits(client->cache, partition, in, find_extent, client, want_bytes, places,
                              SHRINK_PLACES);
        pthread_mutex_unlock(&client->lock);
        r = split_all(client, partition, places, n, &is_refused);
        pthread_mutex_lock(&client->lock);
        if (n > 0)
                cache_count(client->cache, partition);
        pthread_mutex_unlock(&client->lock);
        pthread_mutex_unlock(&client->split_lock);
        *ret_more = r == 0 && !is_refused && n + 2 > SHRINK_PLACES;
        /* What was refused stays as it is. */
        return client_has_ended(r) || r == -EPROTO ? r : 0;
}
