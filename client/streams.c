/* The client's pools of streams; see streams.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/streams.h"

#include <errno.h>
#include <stdlib.h>

#include "client/client.h"
#include "client/pages.h"

int streams_new(bfc_client *client)
{
        struct stream_pools_options options = { .places = client->places,
                                                .n_partitions =
                                                        (uint32_t)client->hello->hello->n_partitions };
        struct streams *s = calloc(1, sizeof(*s));

        if (!s || stream_pools_new(&options, &s->pools) < 0) {
                free(s);
                return error_no_memory();
        }
        for (uint32_t i = 0; i < options.n_partitions; i++)
                if (client_page_streams(client, i))
                        stream_pools_show(s->pools, i, client_page_streams(client, i));
        pthread_mutex_init(&s->lock, NULL);
        pthread_cond_init(&s->changed, NULL);
        TAILQ_INIT(&s->batches);
        client->streams = s;
        return 0;
}

void streams_free(bfc_client *client)
{
        struct streams *s = client->streams;

        if (!s)
                return;
        stream_pools_free(s->pools);
        pthread_cond_destroy(&s->changed);
        pthread_mutex_destroy(&s->lock);
        free(s);
        client->streams = NULL;
}

void streams_lock(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
}

void streams_unlock(bfc_client *client)
{
        pthread_mutex_unlock(&client->streams->lock);
}

bool streams_check_pending(bfc_client *client)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_check_pending(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

int streams_check(bfc_client *client, const char **ret_why)
{
        int r;

        pthread_mutex_lock(&client->streams->lock);
        r = stream_pools_check(client->streams->pools, ret_why);
        pthread_mutex_unlock(&client->streams->lock);
        return r;
}

bool streams_check_captured(bfc_client *client, uint32_t partition)
{
        bool ret;

        pthread_mutex_lock(&client->streams->lock);
        ret = stream_pools_check_captured(client->streams->pools, partition);
        pthread_mutex_unlock(&client->streams->lock);
        return ret;
}

uint64_t streams_block_id(const struct block *block)
{
        return stream_alloc_block_id(block->stream_alloc);
}

uint64_t streams_offset(const struct block *block)
{
        return stream_alloc_offset(block->stream_alloc);
}

void streams_reset_peaks(bfc_client *client)
{
        pthread_mutex_lock(&client->streams->lock);
        stream_pools_reset_peaks(client->streams->pools);
        pthread_mutex_unlock(&client->streams->lock);
}

int streams_failed(int error, uintptr_t stream)
{
        if (error == -EINVAL)
                return error_set(error, "0x%llx is not a stream of the partition's device",
                                 (unsigned long long)stream);
        if (error == -ENOMEM || error == -EAGAIN)
                return error_set(-ENOMEM, "an event could not be recorded in the stream");
        if (error == -ENOBUFS)
                return error_no_memory();
        if (error == -EIO)
                return error_set(error, "this process's CUDA context is broken");
        return error_set(error, "the device is lost or not visible to this process");
}

int streams_no_such_block(const void *ptr)
{
        return error_set(-EINVAL, "%p is not a block of this client: never allocated, or already freed", ptr);
}
