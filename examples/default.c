/* The client of the whole process, made at the first call from the environment.
 * SPDX-License-Identifier: Apache-2.0
 * cc default.c $(pkg-config --cflags --libs bfcclient) -o default */
#include <bfcclient.h>
#include <stdio.h>

int main(void)
{
        bfc_client *client;
        void *block;

        if (bfc_default(&client) < 0 || bfc_malloc(client, 1 << 20, &block) < 0 ||
            bfc_free(client, block) < 0) {
                fprintf(stderr, "%s\n", bfc_last_error());
                return 1;
        }
        return 0;
}
