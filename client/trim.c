/* Giving back what lies idle, when the daemon asks for it; see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Done by the client's own thread, or in bfc_poll(). Slabs are taken out of the cache under the
 * lock and freed at the daemon without it, so that nobody is held up who waits for the
 * daemon meanwhile, or works. */
#include <errno.h>

#include "client/client.h"
#include "client/error.h"

#define TRIM_MAX_RANGES 64u

/* Takes out what lies idle in a range, until it is want_bytes, and frees it at the daemon. */
static int trim_idle(bfc_client *client, uint32_t partition, const Bfcd__TrimRange *range,
                     uint64_t want_bytes, uint64_t *ret_bytes)
{
        uint64_t block_ids[CALL_MAX_AT_ONCE], sum = 0, n_bytes, epoch;
        size_t n;
        int r = 0;

        do {
                pthread_mutex_lock(&client->lock);
                n = cache_take_idle_in(client->cache, partition, range->region_id, range->offset,
                                       range->n_bytes, want_bytes - sum, block_ids, CALL_MAX_AT_ONCE,
                                       &n_bytes);
                client_count_released(client, partition, n_bytes);
                epoch = client->epoch;
                pthread_mutex_unlock(&client->lock);
                sum += n_bytes;
                r = client_give_back_all(client, block_ids, n, epoch);
        } while (r == 0 && n == CALL_MAX_AT_ONCE && sum < want_bytes);
        *ret_bytes = sum;
        return r;
}

/* The same, and then what no block needs of slabs in use. */
static int trim_range(bfc_client *client, uint32_t partition, const Bfcd__TrimRange *range,
                      uint64_t want_bytes, uint64_t *ret_bytes)
{
        const struct cache_range in = { range->region_id, range->offset, range->n_bytes };
        uint64_t n_bytes;
        bool more = true;
        int r = trim_idle(client, partition, range, want_bytes, ret_bytes);

        while (r == 0 && more && *ret_bytes < want_bytes) {
                r = client_shrink(client, partition, &in, want_bytes - *ret_bytes, &more);
                if (r == 0)
                        r = trim_idle(client, partition, range, want_bytes - *ret_bytes, &n_bytes);
                if (r == 0)
                        *ret_bytes += n_bytes;
        }
        return r;
}

static bool trim_makes_sense(const bfc_client *client, const Bfcd__Trim *trim)
{
        if (trim->partition >= client->hello->hello->n_partitions || trim->n_ranges == 0 ||
            trim->n_ranges > TRIM_MAX_RANGES)
                return false;
        for (size_t i = 0; i < trim->n_ranges; i++)
                if (trim->ranges[i]->n_bytes > UINT64_MAX - trim->ranges[i]->offset)
                        return false;
        return true;
}

int client_trim_ranges(bfc_client *client, const Bfcd__Trim *trim, uint64_t *ret_bytes)
{
        uint64_t sum = 0, n_bytes;
        int r = 0;

        if (!trim_makes_sense(client, trim))
                return -EPROTO;
        streams_collect(client);
        pthread_mutex_lock(&client->lock);
        (void)client_drain(client);
        pthread_mutex_unlock(&client->lock);
        for (size_t i = 0; r == 0 && client->cache && i < trim->n_ranges && sum < trim->n_bytes; i++) {
                r = trim_range(client, trim->partition, trim->ranges[i], trim->n_bytes - sum, &n_bytes);
                sum += n_bytes;
        }
        *ret_bytes = sum;
        return client_has_ended(r) || r == -EPROTO ? -ECONNRESET : 0;
}
