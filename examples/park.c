/* A parkable block: its memory is released between the turns of a job, and returns at the same address.
 * SPDX-License-Identifier: Apache-2.0
 * cc park.c $(pkg-config --cflags --libs bfcclient) -o park */
#include <bfcclient.h>
#include <stdio.h>

static int failed(const char *what)
{
        fprintf(stderr, "%s: %s\n", what, bfc_last_error());
        return 1;
}

int main(void)
{
        struct bfc_malloc_options how = {
                .struct_size = sizeof(how), .flags = BFC_PARKABLE, .tag = "model", .wait_ms = 60000
        };
        bfc_client *client;
        int turn = 0;
        void *block;

        if (bfc_connect(NULL, &client) < 0)
                return failed("connect");
        if (bfc_malloc_with(client, 8 << 20, &how, &block) < 0)
                return failed("malloc");
        if (bfc_write(client, block, &turn, sizeof(turn)) < 0)
                return failed("write");
        for (int i = 0; i < 3; i++) {
                if (bfc_use_begin_tag(client, "model", 60000) < 0) /* it is awake until use_end */
                        return failed("use_begin");
                if (bfc_read(client, &turn, block, sizeof(turn)) < 0)
                        return failed("read");
                turn++;
                if (bfc_write(client, block, &turn, sizeof(turn)) < 0)
                        return failed("write");
                if (bfc_use_end_tag(client, "model") < 0)
                        return failed("use_end");
                if (bfc_park_tag(client, "model", BFC_BACKUP, "ram") < 0) /* or `park:` does it for others */
                        return failed("park");
        }
        printf("%d turns\n", turn);
        bfc_disconnect(client);
        return 0;
}
