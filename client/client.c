/* The client of one session; see client.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/client.h"

#include <stdio.h>
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

BFC_API const char *bfc_last_error(void)
{
        return error_last();
}

BFC_API const char *bfc_version(void)
{
        return BFC_VERSION;
}
