/* Pressure; see pressure.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/pressure.h"

#include <errno.h>

#include "client/client.h"
#include "client/park.h"
#include "client/alloc.h"
#include "client/stream_alloc.h"

static size_t n_partitions(const bfc_client *client)
{
        return client->hello->hello->n_partitions;
}

/* ---- serving ---------------------------------------------------------------- */

/* Blocks of the daemon that the client has in the partition. */
static uint64_t bytes_held(const bfc_client *client, uint32_t partition)
{
        const struct pages_client *own = client->pages.own;
        const struct pages_held *held;

        if (!own || partition >= PAGES_MAX_PARTITIONS)
                return 0;
        held = &own->held[partition];
        return atomic_load_explicit(&held->bytes_slabs, memory_order_relaxed) +
               atomic_load_explicit(&held->bytes_whole, memory_order_relaxed);
}

static void call_fn(bfc_client *client, const Bfcd__Pressure *order)
{
        struct pressure *p = &client->pressure;
        const struct bfc_pressure pressure = {
                .struct_size = sizeof(pressure),
                .partition = client->hello->hello->partitions[order->partition]->name,
                .n_bytes = order->n_bytes,
        };
        bfc_pressure_fn fn;
        void *userdata;

        pthread_mutex_lock(&client->lock);
        fn = p->fn;
        userdata = p->userdata;
        if (fn)
                p->state = PRESSURE_IN_FN;
        pthread_mutex_unlock(&client->lock);
        if (!fn)
                return;
        fn(userdata, &pressure);
        pthread_mutex_lock(&client->lock);
        p->state = PRESSURE_SERVED;
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
}

/* Returns how much of n_bytes that gave back. */
static uint64_t give_back(bfc_client *client, const Bfcd__Pressure *order)
{
        uint64_t before = bytes_held(client, order->partition), after, n_bytes = 0;

        if (order->is_command)
                return 0;
        call_fn(client, order);
        streams_collect(client);
        after = bytes_held(client, order->partition);
        if (client->cache && (after >= before || before - after < order->n_bytes))
                (void)client_free_idle(client, order->partition, NULL, order->n_bytes, &n_bytes);
        after = bytes_held(client, order->partition);
        return after < before ? before - after : n_bytes;
}

static void serve(bfc_client *client, const Bfcd__Pressure *order)
{
        const char *tag = *order->tag ? order->tag : NULL;
        uint64_t n_given, n_bytes = 0;

        if (order->wakes) {
                (void)client_wake_all(client, order->partition, tag, 0, &n_bytes);
                return;
        }
        n_given = give_back(client, order);
        if (order->parks && n_given < order->n_bytes)
                (void)client_park_idle(client, order->partition, order->n_bytes - n_given, order->idle_ms,
                                       order->to, tag, order->is_own, &n_bytes);
}

/* NULL: there is none. The lock is held. */
static Bfcd__Event *take_order(bfc_client *client, uint64_t *ret_epoch)
{
        Bfcd__Event *event = NULL;

        for (size_t i = 0; !event && i < n_partitions(client); i++) {
                event = client->partitions[i].order;
                *ret_epoch = client->partitions[i].order_epoch;
                client->partitions[i].order = NULL;
        }
        return event;
}

/* All that is there. The lock is held, but not meanwhile. */
static void serve_all(bfc_client *client)
{
        struct pressure *p = &client->pressure;
        Bfcd__Event *event;
        uint64_t epoch;

        p->state = PRESSURE_SERVED;
        p->server = pthread_self();
        while (!client->is_stopping && !p->disconnects && (event = take_order(client, &epoch))) {
                pthread_mutex_unlock(&client->lock);
                serve(client, event->pressure);
                (void)events_answer(client->events, epoch, event->sequence);
                bfcd__event__free_unpacked(event, NULL);
                pthread_mutex_lock(&client->lock);
        }
        p->state = PRESSURE_IDLE;
        pthread_cond_broadcast(&client->changed);
}

static void *run(void *userdata)
{
        bfc_client *client = userdata;
        struct pressure *p = &client->pressure;

        pthread_mutex_lock(&client->lock);
        while (!client->is_stopping && !p->disconnects) {
                serve_all(client);
                if (!client->is_stopping && !p->disconnects)
                        condition_wait(&client->changed, &client->lock, -1);
        }
        if (p->disconnects) {
                pthread_detach(pthread_self());
                p->thread = PRESSURE_NO_THREAD;
                client->is_stopping = true; /* no other thread is started */
                pthread_mutex_unlock(&client->lock);
                bfc_disconnect(client);
                return NULL;
        }
        p->thread = PRESSURE_ENDED;
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
        return NULL;
}

bool client_pressure_disconnects(bfc_client *client)
{
        struct pressure *p = &client->pressure;
        bool is_own;

        pthread_mutex_lock(&client->lock);
        is_own = p->thread == PRESSURE_RUNS && p->state == PRESSURE_IN_FN &&
                 pthread_equal(p->server, pthread_self());
        if (is_own)
                p->disconnects = true;
        pthread_mutex_unlock(&client->lock);
        return is_own;
}

void client_pressure_poll(bfc_client *client)
{
        struct pressure *p = &client->pressure;
        int cancel_state;

        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel_state);
        pthread_mutex_lock(&client->lock);
        if (p->state == PRESSURE_IDLE)
                serve_all(client);
        pthread_mutex_unlock(&client->lock);
        pthread_setcancelstate(cancel_state, NULL);
}

/* ---- arriving ---------------------------------------------------------------- */

static bool is_valid(const bfc_client *client, const Bfcd__Pressure *order)
{
        return order->partition < n_partitions(client) && (!order->parks || order->to < n_partitions(client));
}

int client_on_pressure(bfc_client *client, uint64_t epoch, Bfcd__Event *event)
{
        struct pressure *p = &client->pressure;
        struct client_partition *partition;
        int r = EVENTS_TAKEN;

        if (!is_valid(client, event->pressure))
                return client_end(client, -EPROTO, "the daemon sent a Pressure of an unknown partition");
        partition = &client->partitions[event->pressure->partition];
        pthread_mutex_lock(&client->lock);
        if (partition->order) /* of a daemon before, or one too many */
                bfcd__event__free_unpacked(partition->order, NULL);
        partition->order = event;
        partition->order_epoch = epoch;
        if (events_has_thread(client->events) && p->thread == PRESSURE_NO_THREAD && !client->is_stopping &&
            thread_new(run, client, "bfc-park", &p->server) == 0)
                p->thread = PRESSURE_RUNS;
        if (events_has_thread(client->events) && p->thread == PRESSURE_NO_THREAD) { /* no thread can be had */
                partition->order = NULL;
                r = 0;
        }
        pthread_cond_broadcast(&client->changed);
        pthread_mutex_unlock(&client->lock);
        return r;
}

int client_pressure_stop(bfc_client *client, unsigned timeout_ms)
{
        struct pressure *p = &client->pressure;
        int64_t until_ms = timeout_ms > 0 ? clock_now_ms() + timeout_ms : -1;
        bool has_ended;

        pthread_mutex_lock(&client->lock);
        while (p->thread == PRESSURE_RUNS && (until_ms < 0 || clock_now_ms() < until_ms))
                condition_wait(&client->changed, &client->lock, until_ms);
        if (p->thread == PRESSURE_RUNS) {
                pthread_mutex_unlock(&client->lock);
                return -ETIMEDOUT;
        }
        has_ended = p->thread == PRESSURE_ENDED;
        p->thread = PRESSURE_NO_THREAD;
        pthread_mutex_unlock(&client->lock);
        if (has_ended)
                pthread_join(p->server, NULL);
        return 0;
}

/* ---- the program's function --------------------------------------------------- */

BFC_API int bfc_on_pressure(bfc_client *client, bfc_pressure_fn fn, void *userdata)
{
        struct pressure *p;
        int r = client_check(client);

        if (r < 0)
                return r;
        if (!client->events)
                return error_set(
                        -EINVAL,
                        "bfc_on_pressure: this client takes no events: connect without BFC_NO_THREAD, "
                        "or with BFC_POLL");
        p = &client->pressure;
        pthread_mutex_lock(&client->lock);
        __atomic_store_n(&p->fn, fn, __ATOMIC_RELAXED);
        p->userdata = userdata;
        while (p->state == PRESSURE_IN_FN && !pthread_equal(p->server, pthread_self()))
                condition_wait(&client->changed, &client->lock, -1);
        client_page_pressure_fn(client);
        pthread_mutex_unlock(&client->lock);
        return 0;
}
