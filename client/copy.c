/* Copies to and from blocks; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "client/client.h"
#include "client/error.h"

static int copy_failed(int error)
{
        switch (error) {
        case -EBUSY:
                return error_set(error,
                                 "the copy would have to wait for a stream that is being captured: copy "
                                 "after the capture");
        case -ENODEV:
                return error_set(error, "the device is lost");
        case -EIO:
                return error_set(error, "this process's CUDA context is broken: an earlier kernel or call "
                                        "broke it");
        default:
                return error_set(error, "the copy failed: %s", strerror(-error));
        }
}

/* Where in which range these bytes lie. What a block's range is changes only when
 * the block is gone, so the copy needs no lock. */
static int client_locate(bfc_client *client, const void *ptr, size_t n_bytes, struct device_range **ret_range,
                         uint64_t *ret_offset)
{
        const struct block *block;

        pthread_mutex_lock(&client->lock);
        block = blocks_find_around(&client->blocks, ptr, n_bytes);
        if (block) {
                *ret_range = regions_range(&client->regions, block->region_id);
                *ret_offset = block->offset + (uint64_t)((uintptr_t)ptr - (uintptr_t)block->ptr);
        }
        pthread_mutex_unlock(&client->lock);
        return block ? 0
                     : error_set(-EINVAL, "%zu bytes at %p are not inside a block of this client", n_bytes,
                                 ptr);
}

BFC_API int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes)
{
        struct device_range *range = NULL;
        uint64_t offset = 0;
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        if (!src)
                return error_set(-EINVAL, "bfc_write: src is NULL");
        r = client_locate(client, ptr, n_bytes, &range, &offset);
        if (r < 0)
                return r;
        r = device_range_write(range, offset, src, n_bytes);
        return r < 0 ? copy_failed(r) : 0;
}

BFC_API int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes)
{
        struct device_range *range = NULL;
        uint64_t offset = 0;
        int r = client_check(client);

        if (r < 0 || n_bytes == 0)
                return r;
        if (!dst)
                return error_set(-EINVAL, "bfc_read: dst is NULL");
        r = client_locate(client, ptr, n_bytes, &range, &offset);
        if (r < 0)
                return r;
        r = device_range_read(range, offset, n_bytes, dst);
        return r < 0 ? copy_failed(r) : 0;
}
