/* A thousand allocations with a few requests to the daemon.
 * SPDX-License-Identifier: Apache-2.0
 * cc cache.c $(pkg-config --cflags --libs bfcclient) -o cache */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_options options = { .struct_size = sizeof(options), .cache_idle_bytes = 256 << 20 };
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        bfc_client *client;
        void *block;

        if (bfc_connect(&options, &client) < 0)
                return failed("connect");
        for (int step = 0; step < 1000; step++) {
                if (bfc_malloc(client, 4096, &block) < 0)
                        return failed("malloc");
                if (bfc_free(client, block) < 0)
                        return failed("free");
        }
        if (bfc_stats(client, &stats) < 0)
                return failed("stats");
        printf("%llu allocations, %llu requests to the daemon\n", (unsigned long long)stats.num_allocs,
               (unsigned long long)stats.num_calls);
        if (bfc_trim(client, SIZE_MAX) < 0) /* before a long pause */
                return failed("trim");
        bfc_disconnect(client);
        return 0;
}
