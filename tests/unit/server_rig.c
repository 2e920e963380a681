/* See server_rig.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/server_rig.h"

#include "tests/suite.h"

struct fake_server *server;

void server_start(const char *cache)
{
        unsetenv("BFC_CACHE");
        if (cache)
                setenv("BFC_CACHE", cache, 1);
        server = fake_server_new();
        client = NULL;
}

void server_end(void)
{
        bfc_disconnect(client);
        client = NULL;
        server = fake_server_free(server);
}

bfc_client *open_client(uint64_t flags, uint64_t idle_bytes, uint64_t slab_bytes)
{
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = fake_server_path(server),
                                 .flags = flags,
                                 .cache_idle_bytes = idle_bytes,
                                 .cache_slab_bytes = slab_bytes };
        bfc_client *ret = NULL;

        ck_assert_msg(bfc_connect(&o, &ret) == 0, "%s", bfc_last_error());
        return ret;
}

unsigned n_blocks(void)
{
        return fake_server_count(server).n_blocks;
}
