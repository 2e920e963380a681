/* Connecting and disconnecting; see bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "client/client.h"
#include "client/session.h"
#include "client/pressure.h"
#include "client/alloc.h"
#include "client/stream_alloc.h"
#include "client/streams.h"
#include "client/biased_lock.h"

#define GOODBYE_TIMEOUT_MS 5000u
#define GOODBYE_LATE_MS    1000u /* of a session that was given up */
#define GOODBYE_EXIT_MS    1000u /* of a process that exits */

/* ---- events ------------------------------------------------------------------ */

/* Idle memory here is soon the daemon's: no block may be cut from it any more, and there may be no request
 * for long that would find that out. An error that is known stays. */
static void on_ended(void *userdata)
{
        bfc_client *client = userdata;
        int known = 0;

        if (!reconnect_check_stopping(client))
                __atomic_compare_exchange_n(&client->lost, &known, -ECONNRESET, false, __ATOMIC_RELAXED,
                                            __ATOMIC_RELAXED);
}

static int on_lost(void *userdata, uint64_t epoch)
{
        bfc_client *client = userdata;

        if (events_has_thread(client->events))
                reconnect_pause_idle(client, epoch);
        return client_reconnect(client, epoch, client->reconnect.return_ms, NULL);
}

/* Memory that becomes idle is freed at once. What is idle now the daemon requests by a Trim. */
static int on_draining(void *userdata, uint64_t epoch, const Bfcd__Draining *draining)
{
        bfc_client *client = userdata;

        if (draining->partition >= client->hello->hello->n_partitions)
                return client_end(client, -EPROTO, "the daemon sent a drain of an unknown partition");
        pthread_mutex_lock(&client->lock);
        if (epoch == client->epoch) /* a later daemon announces its own */
                client_set_draining(client, draining->partition, !draining->is_over);
        pthread_mutex_unlock(&client->lock);
        return 0;
}

static void on_failed(void *userdata, int error)
{
        client_end(userdata, error, "the events socket failed");
}

static int on_look(void *userdata)
{
        return streams_watch(userdata);
}

static int on_recall(void *userdata, uint64_t epoch, Bfcd__Event *event)
{
        if (event->body_case == BFCD__EVENT__BODY_RETIRE)
                return client_on_retire(userdata, epoch, event->retire);
        if (event->body_case == BFCD__EVENT__BODY_TRIM)
                return client_on_trim(userdata, event->trim);
        return client_on_pressure(userdata, epoch, event);
}

static const struct events_ops ops = { .recall = on_recall,
                                       .draining = on_draining,
                                       .look = on_look,
                                       .lost = on_lost,
                                       .ended = on_ended,
                                       .failed = on_failed };

static int client_start_events(bfc_client *client, const struct bfc_options *options)
{
        bool is_wanted = client_takes_events(options);
        int r;

        if (client->hello->hello->has_events != is_wanted)
                return error_set(-EPROTO, is_wanted ? "the daemon did not send an events socket"
                                                    : "the daemon sent an events socket that was not "
                                                      "requested");
        if (!is_wanted)
                return 0;
        r = events_new(call_take_events_fd(client->connection), !(options->flags & BFC_POLL), &ops, client,
                       &client->events);
        return r < 0 ? error_set(r, "the client's thread cannot be started: %s", strerror(-r)) : 0;
}

static int not_polled(void)
{
        return error_set(-EINVAL, "this client has an event thread or no events: connect with BFC_POLL");
}

BFC_API int bfc_poll(bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        if (events_fd(client->events) < 0)
                return not_polled();
        r = events_poll(client->events);
        if (r == 0 || r == -EBUSY)
                client_pressure_poll(client);
        if (r == -EBUSY)
                return error_set(r, "memory that the daemon reclaims cannot be unmapped now: the driver "
                                    "refuses this while a stream is captured");
        return r < 0 ? client_lost(client, r) : 0;
}

BFC_API int bfc_poll_fd(const bfc_client *client)
{
        int r = client_check(client);

        if (r < 0)
                return r;
        r = events_fd(client->events);
        return r < 0 ? not_polled() : r;
}

/* ---- connecting -------------------------------------------------------------- */

static int connect_failed(int error, const char *path)
{
        const char *why = strerror(-error);

        if (error == -ENOENT)
                why = "the socket does not exist. Try: systemctl status bfcd; or check BFC_SOCKET";
        else if (error == -ECONNREFUSED)
                why = "no process listens there. Try: systemctl status bfcd";
        else if (error == -EACCES)
                why = "permission denied for this user. Check the modes of the socket and of its parent directories";
        else if (error == -ENAMETOOLONG)
                why = "the path is too long; a socket path has at most 107 bytes";
        return error_set(error, "cannot reach bfcd at %s: %s", path, why);
}

static void *client_free(bfc_client *client)
{
        if (!client)
                return NULL;
        fork_guard_clear(&client->fork);
        events_stop(client->events, 0);
        events_free(client->events);
        call_free(client->connection);
        streams_free(client);
        regions_clear(&client->regions);
        blocks_clear(&client->blocks);
        shared_clear(client);
        cache_free(client->cache);
        magazines_free(client->stash.magazines);
        client_pages_close(&client->pages);
        client_free_partitions(client);
        recorder_free(client->recorder);
        if (client->hello)
                bfcd__reply__free_unpacked(client->hello, NULL);
        free(client->reconnect.path);
        pthread_cond_destroy(&client->changed);
        pthread_mutex_destroy(&client->lock);
        pthread_mutex_destroy(&client->split_lock);
        free(client);
        return NULL;
}

/* The child closes its copies of the sockets. An open copy would keep the session's place at the daemon if
 * the parent dies with file descriptors unread. */
static void client_in_child(struct fork_entry *entry)
{
        bfc_client *client = entry->object;

        client_pages_hide(&client->pages);
        call_forget(client->connection);
        events_forget(client->events);
}

/* The lock is held for a fraction of the time that it takes to sleep and to be woken, so a waiting thread
 * spins for a while before it sleeps. */
static void lock_init(pthread_mutex_t *lock)
{
        pthread_mutexattr_t attributes;

        pthread_mutexattr_init(&attributes);
#ifdef __GLIBC__
        pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
#endif
        pthread_mutex_init(lock, &attributes);
        pthread_mutexattr_destroy(&attributes);
}

static int client_new(bfc_client **ret)
{
        bfc_client *client;
        int r;

        /* In a forked child its handler runs before that of fork_watch(), which a bfc_connect() of another thread waits
         * for: so no thread has a slot yet. */
        (void)thread_slots();
        client = fork_watch() == 0 ? calloc(1, sizeof(*client)) : NULL;
        if (!client)
                return error_no_memory();
        client->epoch = 1;
        lock_init(&client->lock);
        condition_init(&client->changed);
        pthread_mutex_init(&client->split_lock, NULL);
        r = fork_guard_init(&client->fork);
        if (r < 0) {
                client_free(client);
                return r == -ENOMEM ? error_no_memory()
                                    : error_set(r, "this kernel cannot wipe a page on fork: Linux 4.14 or "
                                                   "newer is needed");
        }
        *ret = client;
        return 0;
}

static int say_hello(bfc_client *client, const struct bfc_options *options)
{
        Bfcd__Hello hello = BFCD__HELLO__INIT;
        Bfcd__Request request = REQUEST(HELLO, hello, &hello);
        uint64_t epoch;
        int r;

        hello.version = CLIENT_PROTOCOL_VERSION;
        /* Without a cache, too: memory that was freed on a stream may wait for work. */
        hello.wants_events = client_takes_events(options);
        hello.wants_pages = true;
        hello.can_resume = true;
        hello.name = client->reconnect.name;
        hello.tenant = (char *)(uintptr_t)options->tenant;
        hello.partition = (char *)(uintptr_t)options->partition;
        r = client_request(client, NULL, &request, BFCD__REPLY__BODY_HELLO, &client->hello, &epoch);
        if (r == 0)
                r = client_read_places(client);
        if (r < 0)
                return r;
        return client_check_hello(client, options->partition);
}

/* By default there is no bound, because the daemon sends a Trim if others need idle memory. A client that it
 * cannot send one leaves half of the tenant's limit to other processes. */
static uint64_t bound_of_idle(const bfc_client *client, const struct bfc_options *options,
                              const Bfcd__PartitionInfo *partition)
{
        if (options->cache_idle_bytes > 0)
                return options->cache_idle_bytes;
        return client->hello->hello->has_events || partition->bytes_limit == 0 ? UINT64_MAX
                                                                               : partition->bytes_limit / 2;
}

static int start_cache(bfc_client *client, const struct bfc_options *options)
{
        const Bfcd__HelloReply *hello = client->hello->hello;
        struct cache_sizes *sizes;
        int r;

        sizes = calloc(hello->n_partitions + 1, sizeof(*sizes));
        for (size_t i = 0; sizes && i < hello->n_partitions; i++)
                sizes[i] = (struct cache_sizes){ .slab_bytes = options->cache_slab_bytes,
                                                 .idle_bytes =
                                                         bound_of_idle(client, options, hello->partitions[i]),
                                                 .can_split = client->places[i].share == DEVICE_SHARE_FD };
        r = sizes ? 0 : -ENOMEM;
        if (r == 0 && !(options->flags & BFC_NO_CACHE))
                r = cache_new(sizes, (uint32_t)hello->n_partitions, &client->cache);
        if (r == 0)
                r = stash_init(client, sizes[client->partition].idle_bytes);
        free(sizes);
        return r < 0 ? error_no_memory() : 0;
}

static int connect_once(const struct bfc_options *known, bfc_client **ret)
{
        bfc_client *client = NULL;
        int r = client_new(&client);

        if (r < 0)
                return r;
        client->regions.inherits = known->flags & BFC_INHERIT;
        r = reconnect_init(&client->reconnect, known->socket, known->name, known->return_ms);
        if (r < 0) {
                client_free(client);
                return r;
        }
        r = call_connect(known->socket, client_on_extents, client, &client->connection);
        if (r < 0)
                r = connect_failed(r, known->socket);
        else
                r = say_hello(client, known);
        if (r == 0 && known->trace)
                r = recorder_open(known->trace, &client->recorder);
        if (r == 0)
                r = start_cache(client, known);
        if (r == 0)
                client_pages_open(client);
        if (r == 0)
                r = streams_new(client);
        if (r == 0)
                r = client_start_events(client, known);
        if (r < 0) {
                client_free(client);
                return r;
        }
        fork_guard_watch(&client->fork, client_in_child, client);
        *ret = client;
        return 0;
}

/* A daemon that ends, or that has no place for all who connect in one moment, hangs up before it answers. */
BFC_API int bfc_connect(const struct bfc_options *options, bfc_client **ret_client)
{
        struct bfc_options known = { 0 };
        int64_t until_ms;
        int r;

        if (!ret_client)
                return error_set(-EINVAL, "bfc_connect: ret_client is NULL");
        r = client_options_read(options, &known);
        if (r < 0)
                return r;
        until_ms = clock_now_ms() + known.return_ms;
        while ((r = connect_once(&known, ret_client)) == -ECONNRESET && clock_now_ms() < until_ms)
                reconnect_pause_at_random();
        return r;
}

/* ---- disconnecting ----------------------------------------------------------- */

static int goodbye_once(bfc_client *client, int64_t until_ms, uint64_t *ret_epoch)
{
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Request request = REQUEST(GOODBYE, goodbye, &goodbye);
        Bfcd__Reply *reply = NULL;
        int64_t left_ms = until_ms - clock_now_ms();
        int r;

        call_set_timeout(client->connection, left_ms > 0 ? (unsigned)left_ms : 1);
        r = call_send_at(client->connection, 0, &request, &reply, ret_epoch);
        if (r == 0)
                bfcd__reply__free_unpacked(reply, NULL);
        return r;
}

/* A daemon that is being restarted would keep the memory of this process until it exits, so this waits for it
 * for some time. */
static void say_goodbye(bfc_client *client)
{
        unsigned timeout_ms = reconnect_try_once_more(client) ? GOODBYE_LATE_MS : GOODBYE_TIMEOUT_MS;
        int64_t until_ms = clock_now_ms() + timeout_ms, left_ms;
        uint64_t epoch;

        pthread_mutex_lock(&client->lock);
        client->is_ending = true;
        pthread_mutex_unlock(&client->lock);
        while (goodbye_once(client, until_ms, &epoch) == -ECONNRESET) {
                left_ms = until_ms - clock_now_ms();
                if (left_ms > client->reconnect.return_ms)
                        left_ms = client->reconnect.return_ms;
                if (left_ms <= 0 || client_reconnect(client, epoch, (unsigned)left_ms, NULL) < 0)
                        break;
        }
}

void client_say_exit(bfc_client *client)
{
        Bfcd__Goodbye goodbye = BFCD__GOODBYE__INIT;
        Bfcd__Request request = REQUEST(GOODBYE, goodbye, &goodbye);

        if (!fork_guard_is_own(&client->fork))
                return;
        goodbye.exits = true;
        (void)call_send_within(client->connection, GOODBYE_EXIT_MS, &request);
}

/* Children that have the blocks mapped read zeros from now on. Shared blocks belong to others as well. */
static void wipe_all(bfc_client *client)
{
        const struct block *block;
        size_t cursor = 0;

        if (!client->regions.inherits)
                return;
        pthread_mutex_lock(&client->lock);
        while ((block = blocks_next(&client->blocks, &cursor)))
                if (!shared_has(client, block->ptr))
                        client_wipe(client, regions_partition(&client->regions, block->region_id), block);
        pthread_mutex_unlock(&client->lock);
}

BFC_API void bfc_disconnect(bfc_client *client)
{
        bool is_captured = false;
        int r;

        if (!client)
                return;
        if (!fork_guard_is_own(&client->fork)) {
                /* The addresses stay reserved. A thread of the parent may have been changing the rest, so it
                 * is not touched. */
                call_forget(client->connection);
                events_forget(client->events);
                return;
        }
        if (client_pressure_disconnects(client))
                return;
        /* The thread may be waiting for a daemon that has stopped. */
        reconnect_stop(client, true);
        if (events_stop(client->events, GOODBYE_TIMEOUT_MS) < 0 ||
            client_pressure_stop(client, GOODBYE_TIMEOUT_MS) < 0) {
                call_end(client->connection, -ECONNRESET);
                reconnect_hang_up(client);
                events_stop(client->events, 0);
                client_pressure_stop(client, 0);
        }
        reconnect_stop(client, false);
        wipe_all(client);
        /* Unmapped before the goodbye: then the daemon can release it at once. What cannot
         * be unmapped is freed with the process, whose end the daemon sees. A lost device has no memory. */
        for (size_t i = 0; i < client->hello->hello->n_partitions; i++)
                is_captured |= streams_check_captured(client, (uint32_t)i);
        r = regions_unmap_all(&client->regions, is_captured);
        regions_clear(&client->regions);
        if (r == 0 || r == -ENODEV)
                say_goodbye(client);
        client_free(client);
}
