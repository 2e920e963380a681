/* A plugin that allocates with bfc_default(), as a host program loads and unloads it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.h>
#include <string.h>

int plugin_use(void);

/* Leaves idle memory in the client's cache. */
int plugin_use(void)
{
        bfc_client *client;
        void *p;
        int r = bfc_default(&client);

        if (r == 0)
                r = bfc_malloc(client, 6 << 20, &p);
        if (r == 0) {
                memset(p, 1, 6 << 20);
                r = bfc_free(client, p);
        }
        return r;
}
