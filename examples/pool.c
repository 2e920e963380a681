/* A pool: one block that is divided into pieces for a step and emptied as a whole.
 * SPDX-License-Identifier: Apache-2.0
 * cc pool.c $(pkg-config --cflags --libs bfcclient) -o pool */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        bfc_client *client;
        bfc_pool *pool;
        void *a, *b;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        if (bfc_pool_new(client, 4 << 20, &pool) < 0)
                return failed("pool");
        for (int step = 0; step < 1000; step++) {
                if (bfc_pool_alloc(pool, 1000, &a) < 0 || bfc_pool_alloc(pool, 2 << 20, &b) < 0)
                        return failed("alloc");
                if (bfc_write(client, a, &step, sizeof(step)) < 0)
                        return failed("write");
                bfc_pool_reset(pool); /* a and b are invalid now */
        }
        if (bfc_pool_free(pool) < 0)
                return failed("free");
        bfc_disconnect(client);
        return 0;
}
