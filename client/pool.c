/* Pools: one block, cut from the front, given back at once.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A piece costs one compare-and-swap, so any number of threads may take pieces at the
 * same time. A pool knows nothing of the device: what still runs on old pieces is for
 * its user to know, who gave that work.
 *
 * Invariant: n_used <= n_bytes, both multiples of PIECE_BYTES. */
#include <bfcclient.h>

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "client/client.h"
#include "client/error.h"

#define PIECE_BYTES ((size_t)256)
#define BFC_API     __attribute__((visibility("default")))

struct bfc_pool {
        bfc_client *client;
        unsigned char *block;
        size_t n_bytes;
        _Atomic size_t n_used;
};

/* 0 where the pool may be used at all. */
static int pool_check(const bfc_pool *pool)
{
        if (!pool)
                return error_set(-EINVAL, "pool is NULL");
        return client_check(pool->client);
}

/* In whole pieces; 0 where there are none of that size. */
static size_t round_up(size_t n_bytes)
{
        return n_bytes > SIZE_MAX - (PIECE_BYTES - 1) ? 0 : (n_bytes + PIECE_BYTES - 1) & ~(PIECE_BYTES - 1);
}

BFC_API int bfc_pool_new(bfc_client *client, size_t n_bytes, bfc_pool **ret_pool)
{
        bfc_pool *pool;
        void *block;
        int r;

        if (!ret_pool)
                return error_set(-EINVAL, "bfc_pool_new: ret_pool is NULL");
        pool = calloc(1, sizeof(*pool));
        if (!pool)
                return error_set(-ENOMEM, "this process is out of memory");
        r = bfc_malloc(client, n_bytes, &block);
        if (r < 0) {
                free(pool);
                return r;
        }
        pool->client = client;
        pool->block = block;
        pool->n_bytes = round_up(n_bytes);
        *ret_pool = pool;
        return 0;
}

BFC_API int bfc_pool_alloc(bfc_pool *pool, size_t n_bytes, void **ret_ptr)
{
        size_t piece = round_up(n_bytes), n_used;
        int r = pool_check(pool);

        if (r < 0)
                return r;
        if (!ret_ptr)
                return error_set(-EINVAL, "bfc_pool_alloc: ret_ptr is NULL");
        if (n_bytes == 0)
                return error_set(-EINVAL, "the size is 0 bytes: request at least 1 byte");
        n_used = atomic_load_explicit(&pool->n_used, memory_order_relaxed);
        do {
                if (piece == 0 || piece > pool->n_bytes - n_used)
                        return error_set(-ENOMEM,
                                         "%zu bytes do not fit in the pool: its size is %zu bytes, and "
                                         "%zu bytes are used",
                                         n_bytes, pool->n_bytes, n_used);
        } while (!atomic_compare_exchange_weak_explicit(&pool->n_used, &n_used, n_used + piece,
                                                        memory_order_relaxed, memory_order_relaxed));
        *ret_ptr = pool->block + n_used;
        return 0;
}

BFC_API int bfc_pool_reset(bfc_pool *pool)
{
        int r = pool_check(pool);

        if (r == 0)
                atomic_store_explicit(&pool->n_used, 0, memory_order_relaxed);
        return r;
}

BFC_API int bfc_pool_free(bfc_pool *pool)
{
        int r;

        if (!pool)
                return 0;
        r = bfc_free(pool->client, pool->block);
        if (r != -EBUSY && r != -ENOMEM && r != -EIO)
                free(pool);
        return r;
}
