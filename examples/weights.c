/* One copy of a model's weights for many processes of a tenant: the first process makes
 * them, the others attach them.
 * SPDX-License-Identifier: Apache-2.0
 * cc weights.c $(pkg-config --cflags --libs bfcclient) -o weights */
#include <bfcclient.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#define NAME    "weights of v1"
#define N_BYTES (1 << 20)

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

/* A real program would read a file. The block is published last, so no process sees it incomplete. */
static int make_weights(bfc_client *client, void **ret)
{
        static char bytes[N_BYTES];
        int r = bfc_malloc_flags(client, NULL, sizeof(bytes), BFC_WHOLE, ret);

        if (r < 0)
                return r;
        memset(bytes, 42, sizeof(bytes));
        r = bfc_write(client, *ret, bytes, sizeof(bytes));
        if (r == 0)
                r = bfc_publish(client, *ret, NAME);
        if (r < 0)
                bfc_free(client, *ret);
        return r;
}

int main(void)
{
        bfc_client *client;
        size_t n_bytes = N_BYTES;
        char first;
        void *weights;
        int r;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        r = bfc_attach(client, NAME, 0, &weights, &n_bytes);
        if (r == -ENOENT)
                r = make_weights(client, &weights);
        if (r == -EEXIST) /* another one was faster */
                r = bfc_attach(client, NAME, 10000, &weights, &n_bytes);
        if (r < 0)
                return failed("weights");
        if (bfc_read(client, &first, weights, 1) < 0)
                return failed("read");
        printf("%zu bytes, the first is %d\n", n_bytes, first);
        if (bfc_detach(client, weights) < 0)
                return failed("detach");
        bfc_disconnect(client);
        return 0;
}
