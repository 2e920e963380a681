/* Allocates a block from bfcd, uses it and frees it.
 * SPDX-License-Identifier: Apache-2.0
 * cc hello.c $(pkg-config --cflags --libs bfcclient) -o hello */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        const char text[] = "hello";
        bfc_client *client;
        void *block;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        if (bfc_malloc(client, 10 << 20, &block) < 0)
                return failed("malloc");
        if (bfc_write(client, block, text, sizeof(text)) < 0) /* memcpy, on whatever device it is */
                return failed("write");
        if (bfc_usage(client, NULL, &usage) < 0)
                return failed("usage");
        printf("%s uses %llu of %llu bytes in %s\n", bfc_tenant(client),
               (unsigned long long)usage.bytes_in_use, (unsigned long long)usage.bytes_limit,
               bfc_partition(client));
        if (bfc_free(client, block) < 0)
                return failed("free");
        bfc_disconnect(client);
        return 0;
}
