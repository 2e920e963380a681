/* Memory in the order of a stream's work.
 * SPDX-License-Identifier: Apache-2.0
 * cc streams.c $(pkg-config --cflags --libs bfcclient) -o streams */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_stream_stats stats = { .struct_size = sizeof(stats) };
        uintptr_t compute = 1, copy = 2; /* on a GPU: (uintptr_t)stream, of a cudaStream_t */
        bfc_client *client;
        void *batch;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        for (int step = 0; step < 100; step++) {
                if (bfc_malloc_async(client, 1 << 20, compute, &batch) < 0)
                        return failed("malloc");
                /* kernel<<<..., compute>>>(batch); and a copy of it in the other stream: */
                if (bfc_record_stream(client, batch, copy) < 0)
                        return failed("record");
                if (bfc_free_async(client, batch, compute) < 0) /* waits for nothing */
                        return failed("free");
        }
        if (bfc_stats_stream(client, NULL, compute, &stats) < 0)
                return failed("stats");
        printf("%llu blocks, %llu bytes at most\n", (unsigned long long)stats.num_allocs,
               (unsigned long long)stats.peak_bytes_in_use);
        if (bfc_end_stream(client, compute) < 0 || bfc_end_stream(client, copy) < 0)
                return failed("end"); /* before they are destroyed */
        bfc_disconnect(client);
        return 0;
}
