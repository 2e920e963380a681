/* The client of one session; see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int client_check(const bfc_client *client)
{
        if (!client)
                return error_set(-EINVAL, "client is NULL");
        if (!fork_guard_is_own(&client->fork))
                return error_set(-ECHILD,
                                 "this client belongs to the parent of this forked process: call "
                                 "bfc_connect() in the child to allocate memory; to use the parent's "
                                 "host blocks, the parent must connect with BFC_INHERIT");
        return 0;
}

int client_lost(bfc_client *client, int error)
{
        char why[sizeof(client->end_reason)];

        if (error == -ECONNRESET && call_read_end_reason(client->connection, why, sizeof(why)))
                error = -EIDRM;
        if (error == -ECONNRESET || error == -EPROTO || error == -EIDRM)
                __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        pthread_mutex_lock(&client->lock);
        memcpy(why, client->end_reason, sizeof(why));
        pthread_mutex_unlock(&client->lock);
        if (error == -EIDRM && (why[0] || call_read_end_reason(client->connection, why, sizeof(why))))
                return error_set(error, "%s", why);
        if (why[0])
                return error_set(error, "the session ended: %s", why);
        if (error == -ECONNRESET)
                return error_set(error, "the daemon ended the session or is not running");
        if (error == -EPROTO)
                return error_set(error, "the session ended: the daemon sent an invalid message");
        if (error == -EMFILE)
                return error_set(error, "this process is at its limit of open files, so it cannot receive "
                                        "the daemon's: raise RLIMIT_NOFILE (ulimit -n)");
        return error_set(error, "the request to the daemon failed: %s", strerror(-error));
}

int client_end(bfc_client *client, int error, const char *why)
{
        pthread_mutex_lock(&client->lock);
        if (!client->end_reason[0])
                snprintf(client->end_reason, sizeof(client->end_reason), "%s", why);
        pthread_mutex_unlock(&client->lock);
        __atomic_store_n(&client->lost, error, __ATOMIC_RELAXED);
        call_end(client->connection, error);
        return error;
}

/* ---- the list of shared blocks ------------------------------------------------- */

void shared_clear(bfc_client *client)
{
        struct shared_block *s;

        while ((s = client->shared)) {
                client->shared = s->next;
                free(s);
        }
}

struct shared_block *shared_find(const bfc_client *client, const void *ptr)
{
        struct shared_block *s = client->shared;

        while (s && s->ptr != ptr)
                s = s->next;
        return s;
}

/* By the daemon's id: while the block is parked, its place is not mapped. */
struct shared_block *shared_find_id(const bfc_client *client, uint64_t block_id)
{
        struct shared_block *s = client->shared;

        while (s && s->block_id != block_id)
                s = s->next;
        return s;
}

bool shared_has(const bfc_client *client, const void *ptr)
{
        return shared_find(client, ptr) != NULL;
}

bool shared_is_read_only(const bfc_client *client, const void *ptr)
{
        const struct shared_block *s = shared_find(client, ptr);

        return s && s->is_read_only;
}

int shared_add(bfc_client *client, const void *ptr, uint64_t block_id)
{
        struct shared_block *s = malloc(sizeof(*s));

        if (!s)
                return -ENOMEM;
        *s = (struct shared_block){ client->shared, ptr, block_id, 1, 0, false, false };
        client->shared = s;
        return 0;
}

size_t shared_list(const bfc_client *client, struct shared_count *ret, size_t max)
{
        size_t n = 0;

        for (const struct shared_block *s = client->shared; s; s = s->next) {
                if (s->is_asked)
                        continue;
                if (n < max)
                        ret[n] = (struct shared_count){ s->block_id, s->n_refs };
                n++;
        }
        return n;
}

void shared_remove(bfc_client *client, struct shared_block *s)
{
        struct shared_block **at = &client->shared;

        while (*at != s)
                at = &(*at)->next;
        *at = s->next;
        free(s);
}

/* ---- for the program ------------------------------------------------------------- */

BFC_API const char *bfc_last_error(void)
{
        return error_last();
}

BFC_API const char *bfc_version(void)
{
        return BFC_VERSION;
}
