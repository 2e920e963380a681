/* See load.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/integration/load.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define N_BLOCKS 24

struct block {
        void *ptr;
        size_t n_bytes;
};

static void release(bfc_client *client, struct block *b, size_t i)
{
        if (!b[i].ptr)
                return;
        REQUIRE(pattern_holds(b[i].ptr, b[i].n_bytes, i), "the contents of a block changed");
        REQUIRE(bfc_free(client, b[i].ptr) == 0, "%s", bfc_last_error());
        b[i].ptr = NULL;
}

static void release_all(bfc_client *client, struct block *b)
{
        for (size_t i = 0; i < N_BLOCKS; i++)
                release(client, b, i);
}

/* The result of bfc_malloc(). */
static int allocate(struct load *l, bfc_client *client, struct block *b, size_t i, unsigned short *random)
{
        size_t n_bytes = 1 + (size_t)nrand48(random) % (nrand48(random) % 8 ? 64 * KIB : 4 * MIB);
        int r = bfc_malloc(client, n_bytes, &b[i].ptr);

        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM || r == l->also, "%d: %s", r, bfc_last_error());
        if (r < 0) {
                b[i].ptr = NULL;
                *(r == l->also ? &l->n_others : &l->n_refusals) += 1;
                return r;
        }
        b[i].n_bytes = n_bytes;
        pattern_write(b[i].ptr, n_bytes, i);
        l->n_allocs++;
        return 0;
}

static void work(struct load *l, bfc_client *client, unsigned short *random)
{
        struct block blocks[N_BLOCKS] = { { NULL, 0 } };

        for (unsigned n = 0; !l->is_over && (l->n_rounds == 0 || n < l->n_rounds); n++) {
                size_t i = (size_t)nrand48(random) % N_BLOCKS;
                int r;

                if (blocks[i].ptr) {
                        release(client, blocks, i);
                        continue;
                }
                r = allocate(l, client, blocks, i, random);
                if (r == -ENOENT) /* the quota was removed after the hello */
                        break;
                if (r == -EBUSY) { /* the device is drained */
                        release_all(client, blocks);
                        usleep(1000);
                }
        }
        for (size_t i = 0; i < N_BLOCKS; i++)
                REQUIRE(!blocks[i].ptr || pattern_holds(blocks[i].ptr, blocks[i].n_bytes, i),
                        "the contents of a block changed");
        if (l->n_rounds == 0)
                release_all(client, blocks);
}

static void run(void *arg)
{
        struct load *l = arg;
        unsigned number = atomic_fetch_add(&l->next_number, 1);
        unsigned short random[3] = { (unsigned short)(number + 1), 30, 7 };
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = l->socket,
                                       .tenant = number % 2 ? "blue" : "red",
                                       .flags = CHILDREN_HAVE_EVENTS ? 0 : BFC_NO_THREAD };

        do {
                bfc_client *client = NULL;
                int r = bfc_connect(&options, &client);

                REQUIRE(r == 0 || (l->n_rounds > 0 && (r == -EACCES || r == -EDQUOT)), "%d: %s", r,
                        bfc_last_error());
                if (r < 0) {
                        l->n_refused_hellos++;
                        usleep(1000);
                        continue;
                }
                work(l, client, random);
                bfc_disconnect(client);
        } while (!l->is_over);
}

struct load *load_start(const struct rig *rig, unsigned n_processes, int also, unsigned n_rounds)
{
        struct load *l = shared_memory(sizeof(*l));

        ck_assert_uint_le(n_processes, LOAD_MAX_PROCESSES);
        strcpy(l->socket, rig->socket);
        l->also = also;
        l->n_rounds = n_rounds;
        l->n_processes = n_processes;
        for (unsigned i = 0; i < n_processes; i++)
                l->pids[i] = child_start(run, l);
        return l;
}

void load_end(struct load *l)
{
        l->is_over = true;
        for (unsigned i = 0; i < l->n_processes; i++)
                child_join(l->pids[i]);
}
