/* Statistics; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/client.h"
#include "client/session.h"
#include "client/streams.h"
#include "client/stream_alloc.h"

/* ---- of the client ----------------------------------------------------------- */

/* Of one partition, without bytes_mapped and derived values. */
static void read_counts(const bfc_client *client, uint32_t partition, const struct magazine_sums *sums,
                        struct bfc_client_stats *ret)
{
        *ret = client->partitions[partition].stats;
        if (partition == client->partition) {
                ret->num_allocs += sums->num_allocs;
                ret->num_frees += sums->num_frees;
                ret->bytes_requested += sums->bytes_requested;
                ret->bytes_in_use = sums->bytes_in_use;
                ret->peak_bytes_in_use = sums->peak_bytes_in_use;
        }
}

static void derive_stats(struct bfc_client_stats *s)
{
        s->num_blocks = s->num_allocs - s->num_frees;
        s->bytes_idle = s->bytes_reserved - s->bytes_in_use;
}

static void read_stats_in(bfc_client *client, uint32_t partition, struct bfc_client_stats *ret)
{
        struct magazine_sums sums;

        magazines_read(client->stash.magazines, &sums);
        read_counts(client, partition, &sums, ret);
        ret->bytes_mapped = regions_mapped(&client->regions, partition);
        derive_stats(ret);
}

static void read_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        struct magazine_sums sums;

        magazines_read(client->stash.magazines, &sums);
        *ret = (struct bfc_client_stats){ .bytes_in_use = sums.all_bytes_in_use,
                                          .peak_bytes_in_use = sums.all_peak_bytes_in_use,
                                          .bytes_mapped = client->regions.n_bytes_mapped,
                                          .bytes_reserved = client_bytes_reserved(client),
                                          .peak_bytes_reserved = client->counters.peak_bytes_reserved };
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                struct bfc_client_stats s;

                read_counts(client, i, &sums, &s);
                ret->num_allocs += s.num_allocs;
                ret->num_frees += s.num_frees;
                ret->num_failures += s.num_failures;
                ret->bytes_requested += s.bytes_requested;
                ret->bytes_direct += s.bytes_direct;
                if (s.largest_alloc_size > ret->largest_alloc_size)
                        ret->largest_alloc_size = s.largest_alloc_size;
        }
        derive_stats(ret);
}

/* NULL for all partitions together. */
static int give_stats(bfc_client *client, const uint32_t *partition, struct bfc_client_stats *ret)
{
        struct bfc_client_stats stats;

        pthread_mutex_lock(&client->lock);
        if (partition)
                read_stats_in(client, *partition, &stats);
        else
                read_stats(client, &stats);
        pthread_mutex_unlock(&client->lock);
        stats.num_calls = __atomic_load_n(&client->counters.n_requests, __ATOMIC_RELAXED);
        stats.num_returns = __atomic_load_n(&client->reconnect.n_resumed, __ATOMIC_RELAXED);
        struct_fill(ret, ret->struct_size, &stats, sizeof(stats));
        return 0;
}

BFC_API int bfc_stats(bfc_client *client, struct bfc_client_stats *ret)
{
        int r = client_check(client);

        if (r == 0)
                r = struct_check("bfc_stats", ret, sizeof(*ret));
        return r < 0 ? r : give_stats(client, NULL, ret);
}

BFC_API int bfc_stats_in(bfc_client *client, const char *partition, struct bfc_client_stats *ret)
{
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0)
                r = struct_check("bfc_stats_in", ret, sizeof(*ret));
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        return r < 0 ? r : give_stats(client, &index, ret);
}

static void reset_peaks(bfc_client *client)
{
        magazines_reset_peak(client->stash.magazines);
        client->counters.peak_bytes_reserved = client_bytes_reserved(client);
        for (uint32_t i = 0; i < client->hello->hello->n_partitions; i++) {
                client->partitions[i].stats.peak_bytes_in_use = client->partitions[i].stats.bytes_in_use;
                client->partitions[i].stats.peak_bytes_reserved = client->partitions[i].stats.bytes_reserved;
        }
}

BFC_API int bfc_reset_peaks(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        reset_peaks(client);
        pthread_mutex_unlock(&client->lock);
        streams_reset_peaks(client);
        return 0;
}

BFC_API int bfc_add_outside(bfc_client *client, const char *partition, int64_t n_bytes)
{
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r < 0)
                return r;
        pthread_mutex_lock(&client->lock);
        client_page_outside(client, index, n_bytes);
        pthread_mutex_unlock(&client->lock);
        return 0;
}

/* ---- of the tenant ----------------------------------------------------------- */

/* ret_room: NULL, or it is requested, too. */
static int usage_ask(bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret,
                     Bfcd__Room *ret_room)
{
        Bfcd__Usage body = BFCD__USAGE__INIT;
        Bfcd__Request request = REQUEST(USAGE, usage, &body);
        const Bfcd__Statistics *f;
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        body.partition = partition;
        body.with_room = ret_room != NULL;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_USAGE, &reply, &epoch);
        if (r < 0)
                return r;
        f = reply->usage->stats;
        if (f && ret_room && !reply->usage->room)
                f = NULL;
        if (f && ret_room)
                *ret_room = (Bfcd__Room){ .bytes_free = reply->usage->room->bytes_free,
                                          .bytes_total = reply->usage->room->bytes_total };
        if (f)
                *ret = (struct bfc_tenant_usage){
                        .struct_size = ret->struct_size,
                        .bytes_limit = f->bytes_limit,
                        .bytes_reserved = f->bytes_reserved,
                        .peak_bytes_reserved = f->peak_bytes_reserved,
                        .bytes_in_use = f->bytes_in_use,
                        .peak_bytes_in_use = f->peak_bytes_in_use,
                        .bytes_requested = f->bytes_requested,
                        .num_blocks = f->num_blocks,
                        .num_sessions = f->num_sessions,
                        .largest_free_block_bytes = f->largest_free_block_bytes,
                        .lifetime_peak_bytes_in_use = f->lifetime_peak_bytes_in_use,
                        .lifetime_peak_bytes_reserved = f->lifetime_peak_bytes_reserved,
                        .bytes_direct = f->bytes_direct,
                };
        else
                r = error_set(-EPROTO, "the daemon's reply has no statistics");
        bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* The page of a session that has ended is out of date. */
static int usage_read(const bfc_client *client, uint32_t partition, struct bfc_tenant_usage *ret)
{
        if (__atomic_load_n(&client->lost, __ATOMIC_RELAXED) != 0)
                return -EAGAIN;
        return client_pages_read(client, partition, ret);
}

BFC_API int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret)
{
        struct bfc_tenant_usage usage;
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0)
                r = struct_check("bfc_usage", ret, sizeof(*ret));
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r < 0)
                return r;
        usage.struct_size = ret->struct_size;
        if (usage_read(client, index, &usage) < 0)
                r = usage_ask(client, index, &usage, NULL);
        if (r < 0)
                return r;
        if (ret->struct_size == sizeof(usage)) /* so that no size has to be looked at */
                *ret = usage;
        else
                struct_fill(ret, ret->struct_size, &usage, sizeof(usage));
        return 0;
}

/* Memory of the client itself that is idle, for any request. */
static uint64_t idle_bytes(bfc_client *client, uint32_t partition)
{
        struct magazine_sums sums;
        uint64_t n_bytes = 0;

        streams_collect(client);
        pthread_mutex_lock(&client->lock);
        magazines_read(client->stash.magazines, &sums);
        if (client->cache)
                n_bytes = cache_idle_bytes(client->cache, partition);
        pthread_mutex_unlock(&client->lock);
        if (partition == client->partition) /* stashed there, and cut as the cache sees it */
                n_bytes += sums.bytes_stashed;
        return n_bytes;
}

BFC_API int bfc_mem_get_info(bfc_client *client, const char *partition, size_t *ret_free_bytes,
                             size_t *ret_total_bytes)
{
        struct bfc_tenant_usage usage;
        Bfcd__Room room = BFCD__ROOM__INIT;
        uint64_t n_bytes;
        uint32_t index = 0;
        int r = client_check(client);

        if (r == 0 && (!ret_free_bytes || !ret_total_bytes))
                r = error_set(-EINVAL, "bfc_mem_get_info: ret_free_bytes or ret_total_bytes is NULL");
        if (r == 0)
                r = client_partition_index(client, partition, &index);
        if (r == 0)
                r = usage_ask(client, index, &usage, &room);
        if (r < 0)
                return r;
        n_bytes = room.bytes_free + idle_bytes(client, index);
        *ret_free_bytes = n_bytes < room.bytes_total ? n_bytes : room.bytes_total;
        *ret_total_bytes = room.bytes_total;
        return 0;
}
