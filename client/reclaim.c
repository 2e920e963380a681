/* Reclaim; see reclaim.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Slabs leave the cache under the client's lock and are freed at the daemon without it, so other threads go
 * on.
 *
 * Then slabs in use shrink: the daemon is asked to split a slab where whole extents without a block begin
 * and end. The parts between are idle slabs, and are freed as others are. One Split is under way at a time:
 * the inventory names it, because a daemon that was killed may or may not have done it. A part between two
 * blocks takes two Splits. If max_blocks does not allow both, the first is refused, too. */
#include "client/reclaim.h"

#include <errno.h>
#include <time.h>

#include "client/cache.h"
#include "client/client.h"
#include "client/session.h"
#include "client/stash.h"
#include "client/stream_free.h"

#define SHRINK_PLACES       128u /* at a time */
#define TRIM_MAX_RANGES     64u
#define RELEASE_MS          10000
#define RELEASE_STEP_NS     200000
#define RELEASE_MAX_STEP_NS 20000000

int client_free_idle(bfc_client *client, uint32_t partition, const struct cache_range *in,
                     uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t block_ids[CALL_MAX_AT_ONCE], sum = 0, n_bytes, epoch;
        size_t n;
        int r = 0;

        do {
                pthread_mutex_lock(&client->lock);
                if (!in)
                        (void)client_drain_stash(client);
                n = cache_take_idle(client->cache, partition, in, want_bytes - sum, block_ids,
                                    CALL_MAX_AT_ONCE, &n_bytes);
                client_count_released(client, partition, n_bytes);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
                sum += n_bytes;
                r = client_free_blocks(client, block_ids, n, epoch);
        } while (r == 0 && n == CALL_MAX_AT_ONCE && sum < want_bytes);
        *ret_bytes = sum;
        return r;
}

/* ---- slabs in use ------------------------------------------------------------ */

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
        r = cache_split_begin(client->cache, partition, at, &ret->block_id, &ret->n_bytes);
        if (r == 0)
                client->splitting = (struct pending_split){ ret->block_id, ret->n_bytes };
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
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_SPLIT, &reply, &epoch);
        pthread_mutex_lock(&client->lock);
        client->splitting = (struct pending_split){ 0, 0 };
        if (r == 0)
                cache_split_commit(client->cache, partition, at, reply->split->block_id);
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

static int shrink(bfc_client *client, uint32_t partition, const struct cache_range *in, uint64_t want_bytes,
                  bool *ret_more)
{
        struct cache_place places[SHRINK_PLACES];
        bool is_refused;
        size_t n;
        int r;

        pthread_mutex_lock(&client->split_lock);
        pthread_mutex_lock(&client->lock);
        client_drain_stash(client);
        n = cache_find_splits(client->cache, partition, in, find_extent, client, want_bytes, places,
                              SHRINK_PLACES);
        pthread_mutex_unlock(&client->lock);
        r = split_all(client, partition, places, n, &is_refused);
        pthread_mutex_lock(&client->lock);
        if (n > 0)
                cache_split_end(client->cache, partition);
        pthread_mutex_unlock(&client->lock);
        pthread_mutex_unlock(&client->split_lock);
        *ret_more = r == 0 && !is_refused && n + 2 > SHRINK_PLACES;
        /* What was refused stays as it is. */
        return client_has_ended(r) || r == -EPROTO ? r : 0;
}

int client_free_unused(bfc_client *client, uint32_t partition, const struct cache_range *in,
                       uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t n_bytes;
        bool more = true;
        int r = client_free_idle(client, partition, in, want_bytes, ret_bytes);

        while (r == 0 && more && *ret_bytes < want_bytes) {
                r = shrink(client, partition, in, want_bytes - *ret_bytes, &more);
                if (r == 0)
                        r = client_free_idle(client, partition, in, want_bytes - *ret_bytes, &n_bytes);
                if (r == 0)
                        *ret_bytes += n_bytes;
        }
        return r;
}

/* ---- for the daemon ---------------------------------------------------------- */

static bool trim_is_valid(const bfc_client *client, const Bfcd__Trim *trim)
{
        if (trim->partition >= client->hello->hello->n_partitions || trim->n_ranges == 0 ||
            trim->n_ranges > TRIM_MAX_RANGES)
                return false;
        for (size_t i = 0; i < trim->n_ranges; i++)
                if (trim->ranges[i]->n_bytes > UINT64_MAX - trim->ranges[i]->offset)
                        return false;
        return true;
}

static int trim_ranges(bfc_client *client, const Bfcd__Trim *trim)
{
        uint64_t sum = 0, n_bytes;
        int r = 0;

        streams_collect(client);
        pthread_mutex_lock(&client->lock);
        (void)client_drain_stash(client);
        pthread_mutex_unlock(&client->lock);
        for (size_t i = 0; r == 0 && client->cache && i < trim->n_ranges && sum < trim->n_bytes; i++) {
                const struct cache_range in = { trim->ranges[i]->region_id, trim->ranges[i]->offset,
                                                trim->ranges[i]->n_bytes };

                r = client_free_unused(client, trim->partition, &in, trim->n_bytes - sum, &n_bytes);
                sum += n_bytes;
        }
        return client_has_ended(r) || r == -EPROTO ? -ECONNRESET : 0;
}

int client_on_trim(bfc_client *client, const Bfcd__Trim *trim)
{
        if (!trim_is_valid(client, trim))
                return client_end(client, -EPROTO, "the daemon sent a Trim with invalid ranges");
        return trim_ranges(client, trim);
}

/* ---- for the program --------------------------------------------------------- */

/* Releases n_bytes of the tenant's extents without a block to the device. *ret_bytes: what
 * is still on its way. */
static int release_extents(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint64_t *ret_bytes)
{
        Bfcd__Request request = BFCD__REQUEST__INIT;
        Bfcd__Release body = BFCD__RELEASE__INIT;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.partition = partition;
        body.n_bytes = n_bytes;
        request.body_case = BFCD__REQUEST__BODY_RELEASE;
        request.release = &body;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_RELEASED, &reply, &epoch);
        if (r < 0)
                return r;
        *ret_bytes = reply->released->bytes_returning;
        bfcd__reply__free_unpacked(reply, NULL);
        return 0;
}

/* Until the extents are back, or RELEASE_MS are over. Without a thread of the client's own, this one has
 * to unmap what the daemon takes back. */
static int wait_for_release(bfc_client *client, uint32_t partition, uint64_t n_bytes, int64_t until_ms)
{
        struct timespec step = { 0, RELEASE_STEP_NS };
        uint64_t returning = 0;
        int r = release_extents(client, partition, n_bytes, &returning);

        while (r == 0 && returning > 0 && clock_now_ms() < until_ms) {
                if (events_fd(client->events) >= 0)
                        r = bfc_poll(client);
                if (r < 0 && r != -EBUSY)
                        return r;
                nanosleep(&step, NULL);
                /* A quarter of what was waited so far, so that the last step adds little. */
                if (step.tv_nsec < RELEASE_MAX_STEP_NS)
                        step.tv_nsec += step.tv_nsec / 4;
                r = release_extents(client, partition, 0, &returning);
        }
        return r;
}

BFC_API int bfc_trim(bfc_client *client, size_t n_bytes)
{
        uint64_t left = n_bytes, given_back;
        int64_t until_ms;
        int r = client_check(client);

        if (r < 0)
                return r;
        streams_collect(client);
        for (uint32_t i = 0; r == 0 && client->cache && i < client->hello->hello->n_partitions; i++) {
                r = client_free_unused(client, i, NULL, left, &given_back);
                left -= given_back < left ? given_back : left;
        }
        until_ms = clock_now_ms() + RELEASE_MS;
        for (uint32_t i = 0; r == 0 && n_bytes > 0 && i < client->hello->hello->n_partitions; i++)
                r = wait_for_release(client, i, n_bytes, until_ms);
        return r;
}
