/* Direct charges: memory that the program takes by itself, and has the daemon charge; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The client counts what it has charged in each partition, and lists it when its session is resumed: the daemon drops
 * the rest. So a Charge whose answer was lost is repeated, and an Uncharge is done. */
#include <errno.h>

#include "client/client.h"
#include "client/alloc.h"
#include "client/session.h"
#include "client/stream_alloc.h"

static int check(bfc_client *client, const char *function, const char *partition, size_t n_bytes,
                 uint32_t *ret_index)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        if (n_bytes == 0)
                return error_set(-EINVAL, "%s: the size is 0 bytes: it is at least 1 byte", function);
        if (!client->hello->hello->takes_charges)
                return error_set(-ENOTSUP, "%s: this daemon is of an earlier release and takes no charges",
                                 function);
        return client_partition_index(client, partition, ret_index);
}

/* ---- charge ------------------------------------------------------------------------ */

/* *ret_stale: the answer is of an earlier epoch, and the daemon has dropped it. */
static int charge_once(bfc_client *client, struct client_call *call, Bfcd__Request *request, bool *ret_stale)
{
        Bfcd__Reply *reply = NULL;
        uint64_t epoch;
        int r;

        *ret_stale = false;
        r = client_request(client, call, request, BFCD__REPLY__BODY_DONE, &reply, &epoch);
        if (r < 0)
                return r;
        bfcd__reply__free_unpacked(reply, NULL);
        pthread_mutex_lock(&client->lock);
        *ret_stale = epoch != client->epoch;
        if (!*ret_stale)
                client->partitions[request->charge->partition].stats.bytes_direct += request->charge->n_bytes;
        pthread_mutex_unlock(&client->lock);
        return 0;
}

static int charge(bfc_client *client, uint32_t partition, uint64_t n_bytes, uint32_t wait_ms, bool again,
                  struct client_call *call)
{
        Bfcd__Charge body = BFCD__CHARGE__INIT;
        Bfcd__Request request = REQUEST(CHARGE, charge, &body);
        bool is_stale;
        int r;

        body.partition = partition;
        body.n_bytes = n_bytes;
        body.wait_ms = wait_ms;
        body.again = again;
        do
                r = charge_once(client, call, &request, &is_stale);
        while (is_stale);
        return r;
}

/* Memory of the daemon that this client could free. */
static bool has_memory(bfc_client *client)
{
        bool ret;

        pthread_mutex_lock(&client->lock);
        ret = client->cache && client_bytes_reserved(client) > 0;
        pthread_mutex_unlock(&client->lock);
        return ret;
}

BFC_API int bfc_charge(bfc_client *client, const char *partition, size_t n_bytes, uint32_t wait_ms)
{
        struct call_interrupt interrupt = { .cancel_fd = -1 };
        struct client_call call = { .interrupt = wait_ms > 0 ? &interrupt : NULL };
        uint64_t n_freed;
        uint32_t index = 0;
        int r = check(client, "bfc_charge", partition, n_bytes, &index);

        if (r == 0 && has_memory(client)) { /* what is idle here goes first, as for a block */
                r = charge(client, index, n_bytes, 0, true, &call);
                if ((r != -EDQUOT && r != -ENOMEM) || call.is_final)
                        return r;
                streams_collect(client);
                r = client_free_unused(client, index, NULL, UINT64_MAX, &n_freed);
        }
        return r < 0 ? r : charge(client, index, n_bytes, wait_ms, false, &call);
}

/* ---- uncharge ---------------------------------------------------------------------- */

BFC_API int bfc_uncharge(bfc_client *client, const char *partition, size_t n_bytes)
{
        uint64_t epoch = 0, has = 0;
        struct client_partition *p;
        uint32_t index = 0;
        int r = check(client, "bfc_uncharge", partition, n_bytes, &index);

        if (r < 0)
                return r;
        p = &client->partitions[index];
        pthread_mutex_lock(&client->lock);
        has = p->stats.bytes_direct;
        if (n_bytes <= has) {
                p->stats.bytes_direct -= n_bytes;
                if (p->bytes_contexts > has - n_bytes)
                        p->bytes_contexts = has - n_bytes;
        }
        epoch = client->epoch;
        pthread_mutex_unlock(&client->lock);
        if (n_bytes > has)
                return error_set(-EINVAL,
                                 "bfc_uncharge: %llu bytes are more than the %llu bytes that this client has "
                                 "charged in partition '%s'",
                                 (unsigned long long)n_bytes, (unsigned long long)has,
                                 client->hello->hello->partitions[index]->name);
        return client_uncharge(client, index, n_bytes, epoch);
}

/* ---- contexts ---------------------------------------------------------------------- */

/* Adds n_bytes, modulo 2^64. False: the sum is no part of the charge, and nothing is added. */
static bool add_contexts(bfc_client *client, uint32_t partition, uint64_t n_bytes)
{
        struct client_partition *p = &client->partitions[partition];
        bool ret;

        pthread_mutex_lock(&client->lock);
        ret = p->bytes_contexts + n_bytes <= p->stats.bytes_direct;
        if (ret)
                p->bytes_contexts += n_bytes;
        pthread_mutex_unlock(&client->lock);
        return ret;
}

static uint64_t bytes_contexts(bfc_client *client, uint32_t partition)
{
        uint64_t n_bytes;

        pthread_mutex_lock(&client->lock);
        n_bytes = client->partitions[partition].bytes_contexts;
        pthread_mutex_unlock(&client->lock);
        return n_bytes;
}

/* The sum of other threads may be told in another order, so it is told until it is the last one. */
static int tell_contexts(bfc_client *client, uint32_t partition)
{
        Bfcd__ChargedContexts contexts = BFCD__CHARGED_CONTEXTS__INIT;
        Bfcd__Charge body = BFCD__CHARGE__INIT;
        Bfcd__Request request = REQUEST(CHARGE, charge, &body);
        struct client_call call = { .interrupt = NULL };
        Bfcd__Reply *reply;
        uint64_t epoch;
        int r;

        body.partition = partition;
        body.contexts = &contexts;
        do {
                contexts.n_bytes = bytes_contexts(client, partition);
                r = client_request(client, &call, &request, BFCD__REPLY__BODY_DONE, &reply, &epoch);
                if (r < 0)
                        return r;
                bfcd__reply__free_unpacked(reply, NULL);
        } while (contexts.n_bytes != bytes_contexts(client, partition));
        return 0;
}

BFC_API int bfc_add_contexts(bfc_client *client, const char *partition, int64_t n_bytes)
{
        uint32_t index = 0;
        int r = check(client, "bfc_add_contexts", partition, 1, &index);

        if (r < 0)
                return r;
        if (!add_contexts(client, index, (uint64_t)n_bytes))
                return error_set(-EINVAL,
                                 "bfc_add_contexts: contexts are a part of what this client has charged");
        return tell_contexts(client, index);
}
