/* What this process has, what its tenant may have, and where a block lies.
 * SPDX-License-Identifier: Apache-2.0
 * cc stats.c $(pkg-config --cflags --libs bfcclient) -o stats */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        struct bfc_block_info info = { .struct_size = sizeof(info) };
        bfc_client *client;
        void *block;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        if (bfc_malloc(client, 1000, &block) < 0)
                return failed("malloc");
        if (bfc_stats(client, &stats) < 0 || bfc_usage(client, NULL, &usage) < 0 ||
            bfc_block_info(client, block, &info) < 0)
                return failed("statistics");
        printf("this process: %llu bytes in use, %llu idle, %llu requests to the daemon\n",
               (unsigned long long)stats.bytes_in_use, (unsigned long long)stats.bytes_idle,
               (unsigned long long)stats.num_calls);
        printf("%s in %s: %llu of %llu bytes reserved, at most %llu\n", bfc_tenant(client),
               bfc_partition(client), (unsigned long long)usage.bytes_reserved,
               (unsigned long long)usage.bytes_limit, (unsigned long long)usage.peak_bytes_reserved);
        printf("the block: %llu bytes at %llu in region %llu\n", (unsigned long long)info.n_bytes,
               (unsigned long long)info.offset, (unsigned long long)info.region_id);
        if (bfc_free(client, block) < 0)
                return failed("free");
        bfc_disconnect(client);
        return 0;
}
