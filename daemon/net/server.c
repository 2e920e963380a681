/* The server; see server.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <uv.h>

#include "daemon/base/clock.h"
#include "daemon/session/accounting.h"
#include "daemon/net/connection.h"
#include "daemon/net/lease_folder.h"
#include "daemon/net/listener.h"
#include "daemon/net/peer_process.h"
#include "daemon/net/watched.h"
#include "daemon/base/log.h"
#include "daemon/session/command.h"
#include "daemon/memory/broker_lease.h"
#include "daemon/session/lease.h"
#include "daemon/record/records.h"
#include "daemon/session/resume.h"
#include "daemon/session/recall.h"
#include "daemon/session/session_states.h"
#include "daemon/session/outside.h"
#include "daemon/session/shared.h"
#include "daemon/session/reload.h"
#include "proto/message.h"

#define SERVER_TICK_MS    50u
#define SERVER_ACCOUNT_MS 250u
#define SERVER_WELL_MS    10000u /* after that a start has succeeded */

/* Of a socket of leases. */
struct lease_listener {
        struct listener listener;
        TAILQ_ENTRY(lease_listener) link;
};
TAILQ_HEAD(lease_listener_list, lease_listener);

/* Many fields: the listeners, the host of connections and a timer for each thing that is due at times. */
struct server {
        uv_loop_t loop;
        struct poller_item loop_item; /* libuv has events */
        bool loop_is_due;             /* it said so */
        bool is_due;                  /* turns are: then the loop does not wait for events */
        uv_async_t async;             /* a worker has finished something */
        uv_signal_t signals[3];
        struct listener listeners[ROLE_COUNT];
        struct lease_folder folder;
        struct lease_listener_list lease_listeners;
        struct watched *watched;
        struct connection_host host;
        struct broker *broker;
        void (*ready)(const struct broker *b);
        uv_timer_t start;
        uv_timer_t tick;  /* while requests wait for others */
        uv_timer_t again; /* while looks after frees are delayed */
        uv_timer_t look;  /* while sessions in quarantine may have mappings */
        uv_timer_t keep;  /* until keep_ms: a kept block, a lease or a pause of standby memory ends */
        uint64_t keep_ms;
        uv_timer_t account;      /* while lines of the log are due later */
        uv_timer_t beat;         /* for the service manager */
        uv_timer_t well;         /* and from then on each OUTSIDE_MS */
        struct manager *manager; /* borrowed; NULL: none */
        struct reloads *reloads;
        struct reload_request hangup; /* by SIGHUP */
        bool hung_up_again;           /* while that was under way */
        uv_work_t reading;            /* of the config, by reloads */
        bool is_reading, is_ending;
};

/* ---- the loop's other events --------------------------------------------- */

void server_notify(void *userdata)
{
        struct server *s = userdata;

        uv_async_send(&s->async);
}

static void on_async(uv_async_t *handle)
{
        struct server *s = handle->data;

        broker_poll(s->broker);
}

static void on_tick(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_tick(s->broker);
        recall_tick(s->broker, clock_ms());
        shared_tick(s->broker, clock_ms());
        command_tick(s->broker, clock_ms());
        server_wake(s); /* which starts the timer again if needed */
}

static void on_again(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_look_again(s->broker);
        server_wake(s);
}

static void on_look(uv_timer_t *timer)
{
        struct server *s = timer->data;

        mappings_look(s->broker);
        server_wake(s);
}

static void server_arm_look(struct server *s)
{
        if (!mappings_are_watched(s->broker))
                uv_timer_stop(&s->look);
        else if (!uv_is_active((uv_handle_t *)&s->look))
                uv_timer_start(&s->look, on_look, BROKER_LOOK_MS, 0);
}

static void on_keep(uv_timer_t *timer)
{
        struct server *s = timer->data;

        s->keep_ms = 0;
        broker_stand_by(s->broker);
        shared_expire_kept(s->broker, clock_ms());
        if (lease_tick_due(s->broker) != 0 && clock_ms() >= lease_tick_due(s->broker))
                lease_tick(s->broker, clock_ms());
        server_wake(s);
}

static void server_arm_keep(struct server *s)
{
        const uint64_t others_ms[] = { shared_keeps_until(s->broker), lease_tick_due(s->broker) };
        uint64_t until_ms = broker_standby_due(s->broker), now_ms;

        for (size_t i = 0; i < sizeof(others_ms) / sizeof(others_ms[0]); i++)
                if (others_ms[i] != 0 && (until_ms == 0 || others_ms[i] < until_ms))
                        until_ms = others_ms[i];
        if (until_ms == s->keep_ms)
                return;
        s->keep_ms = until_ms;
        now_ms = clock_ms();
        if (until_ms == 0)
                uv_timer_stop(&s->keep);
        else
                uv_timer_start(&s->keep, on_keep, until_ms > now_ms ? until_ms - now_ms : 0, 0);
}

static void server_arm_account(struct server *s);

static void on_account(uv_timer_t *timer)
{
        struct server *s = timer->data;

        (void)log_flush();
        records_flush();
        s->broker->logs.has_accounts = accounting_tick(s->broker, clock_ms(), false);
        server_arm_account(s);
}

static void server_arm_account(struct server *s)
{
        bool is_due = s->broker->logs.has_accounts || log_is_queued() || records_are_queued();

        if (is_due && !uv_is_active((uv_handle_t *)&s->account))
                uv_timer_start(&s->account, on_account, SERVER_ACCOUNT_MS, 0);
}

/* A running timer is not restarted, or frequent wake-ups would delay it for ever. */
static void server_arm_tick(struct server *s)
{
        if (!broker_is_blocked(s->broker))
                uv_timer_stop(&s->tick);
        else if (!uv_is_active((uv_handle_t *)&s->tick))
                uv_timer_start(&s->tick, on_tick, SERVER_TICK_MS, 0);
}

static void server_arm_again(struct server *s)
{
        if (!broker_is_deferred(s->broker))
                uv_timer_stop(&s->again);
        else if (!uv_is_active((uv_handle_t *)&s->again))
                uv_timer_start(&s->again, on_again, QUOTA_ROUND_MS, 0);
}

void server_wake(void *userdata)
{
        struct server *s = userdata;

        s->is_due = true;
}

static void server_take_turns(struct server *s, uint64_t now_ns)
{
        /* Each may cause work for the others, so all are asked at the end. */
        connection_turn(&s->host, now_ns);
        broker_turn(s->broker);
        shared_turn(s->broker);
        server_arm_tick(s); /* also while turns stay due */
        server_arm_again(s);
        server_arm_look(s);
        server_arm_keep(s);
        server_arm_account(s);
        s->is_due = connection_is_due(&s->host) || broker_is_due(s->broker) || shared_is_due(s->broker);
}

static void on_loop(struct poller_item *item, uint32_t events)
{
        struct server *s = (struct server *)((char *)item - offsetof(struct server, loop_item));

        (void)events;
        s->loop_is_due = true;
}

/* Waits for events and handles them. libuv has timers, signals and workers; it would ask the kernel in each turn. */
static void server_turn(struct server *s)
{
        uint64_t begin_ns, end_ns;

        poller_run(s->host.poller, s->is_due ? 0 : uv_backend_timeout(&s->loop));
        uv_update_time(&s->loop);
        begin_ns = clock_ns();
        if (s->loop_is_due || uv_backend_timeout(&s->loop) == 0) {
                s->loop_is_due = false;
                uv_run(&s->loop, UV_RUN_NOWAIT);
        }
        server_take_turns(s, begin_ns);
        end_ns = clock_ns();
        loop_turns_add(&s->broker->reports.turns, end_ns, end_ns - begin_ns);
}

static void on_wake(struct connection_host *host)
{
        server_wake((char *)host - offsetof(struct server, host));
}

/* ---- sockets of leases ------------------------------------------------------ */

int server_open_socket(void *userdata, struct lease_socket *socket)
{
        struct server *s = userdata;
        struct lease_listener *l = calloc(1, sizeof(*l));
        int fd = -1, r = l ? lease_folder_listen(&s->folder, socket->name, &fd) : -ENOMEM;

        if (r == 0) {
                listener_init(&l->listener, &s->host, ROLE_CLIENT);
                l->listener.socket = socket;
                l->listener.fd = fd;
                r = listener_start(&l->listener);
                TAILQ_INSERT_TAIL(&s->lease_listeners, l, link);
                socket->listener = l;
                if (r < 0)
                        server_close_socket(s, socket);
        } else {
                free(l);
        }
        if (r < 0)
                log_limited(&s->host.accept_log, LOG_LEVEL_ERROR,
                            "the socket of leases %s/%s/bfcd.sock could not be made: %s", s->folder.path,
                            socket->name, lease_folder_trouble(r));
        return r;
}

static void free_lease_listener(uv_handle_t *handle)
{
        struct listener *l = handle->data;

        free((char *)l - offsetof(struct lease_listener, listener));
}

static void server_drop_lease_listener(struct server *s, struct lease_listener *l)
{
        TAILQ_REMOVE(&s->lease_listeners, l, link);
        listener_close(&l->listener);
        uv_close((uv_handle_t *)&l->listener.pause, free_lease_listener);
}

void server_close_socket(void *userdata, struct lease_socket *socket)
{
        struct server *s = userdata;

        if (!socket->listener)
                return;
        server_drop_lease_listener(s, socket->listener);
        lease_folder_remove(&s->folder, socket->name);
        socket->listener = NULL;
}

static bool is_used_socket(void *userdata, const char *name)
{
        const struct server *s = userdata;

        return lease_socket_find(s->broker, name) != NULL;
}

/* Of the inherited leases. Without its socket a lease is still charged for the sessions that it has. */
static void server_open_sockets(struct server *s)
{
        struct lease_socket *socket;

        lease_folder_clean(&s->folder, is_used_socket, s);
        TAILQ_FOREACH(socket, &s->broker->leases.sockets, link)
        (void)server_open_socket(s, socket);
}

/* ---- reloads -------------------------------------------------------------- */

static void run_reading(uv_work_t *work)
{
        struct server *s = work->data;

        reload_read(s->reloads);
}

static void on_read(uv_work_t *work, int status)
{
        struct server *s = work->data;

        (void)status; /* it is never cancelled */
        s->is_reading = false;
        reload_finish(s->reloads);
}

static void server_read(void *userdata)
{
        struct server *s = userdata;

        s->is_reading = true;
        s->reading.data = s;
        uv_queue_work(&s->loop, &s->reading, run_reading, on_read); /* fails without a function only */
}

static void on_hangup_done(struct reload_request *request, const struct reload_result *result)
{
        struct server *s = (struct server *)((char *)request - offsetof(struct server, hangup));

        (void)result; /* it is in the log */
        if (s->hung_up_again && !s->is_ending) {
                s->hung_up_again = false;
                reload_ask(s->reloads, request);
        }
}

static void server_hang_up(struct server *s)
{
        log_notice("SIGHUP: reloading the configuration");
        if (s->hangup.is_asked) {
                s->hung_up_again = true;
                return;
        }
        s->hangup.done = on_hangup_done;
        reload_ask(s->reloads, &s->hangup);
}

int server_set_config_path(struct server *s, const char *path)
{
        s->reloads = reloads_new(s->broker, path, server_read, s);
        return s->reloads ? 0 : -ENOMEM;
}

static void server_end_reloads(struct server *s)
{
        if (!s->reloads)
                return;
        reload_cancel(s->reloads, &s->hangup);
        while (s->is_reading)
                uv_run(&s->loop, UV_RUN_ONCE);
        s->reloads = reloads_free(s->reloads);
}

/* ---- signals -------------------------------------------------------------- */

static void server_note_end(const struct server *s, const char *why)
{
        bool keeps = broker_has_heirs(s->broker);
        struct record r;

        record_init(&r, RECORD_STOP);
        record_add_text(&r, "reason", why, SIZE_MAX);
        record_add_text(&r, "sessions_are", keeps ? "suspended" : "ended", SIZE_MAX);
        record_add_number(&r, "sessions", s->broker->sessions.n_clients);
        records_write(LOG_LEVEL_NOTICE, &r, "%s: sessions %s: %zu", why,
                      keeps ? "suspended for the next daemon" : "ended", s->broker->sessions.n);
}

static void on_signal(uv_signal_t *handle, int number)
{
        struct server *s = handle->data;

        if (number == SIGHUP) {
                if (s->reloads)
                        server_hang_up(s);
                return;
        }
        s->is_ending = true;
        server_note_end(s, number == SIGTERM ? "SIGTERM" : "SIGINT");
}

/* ---- the service manager -------------------------------------------------- */

static void server_count(const struct server *s, struct manager_stats *ret)
{
        const struct broker *b = s->broker;

        *ret = (struct manager_stats){ .n_sessions = b->sessions.n_clients, .n_suspended = b->suspended.n };
        for (size_t i = 0; i < b->n_partitions; i++) {
                ret->bytes_in_use += b->partitions[i].use.n_bytes;
                ret->bytes_reserved += b->partitions[i].pool.charged_bytes;
        }
        for (size_t i = 0; i < b->n_devices; i++)
                ret->n_lost += b->devices[i].is_lost;
}

/* From the loop, so that the watchdog notices a loop that hangs. */
static void on_beat(uv_timer_t *timer)
{
        struct server *s = timer->data;
        struct manager_stats stats;

        server_count(s, &stats);
        manager_beat(s->manager, &stats);
}

static void on_seconds(uv_timer_t *timer)
{
        outside_look(((struct server *)timer->data)->broker);
        accounting_usage(((struct server *)timer->data)->broker, false);
}

static void on_well(uv_timer_t *timer)
{
        struct server *s = timer->data;

        broker_note_well(s->broker);
        uv_timer_start(&s->well, on_seconds, OUTSIDE_MS, OUTSIDE_MS);
}

static void on_start(uv_timer_t *timer)
{
        struct server *s = timer->data;
        struct manager_stats stats;
        uint64_t beat_ms = s->manager ? manager_beat_ms(s->manager) : 0;

        if (beat_ms > 0) {
                server_count(s, &stats);
                manager_ready(s->manager, &stats);
                uv_timer_start(&s->beat, on_beat, beat_ms, beat_ms);
        }
        s->ready(s->broker);
}

/* ---- start and end -------------------------------------------------------- */

int server_new(struct server **ret)
{
        static const int numbers[] = { SIGTERM, SIGINT, SIGHUP };
        struct server *s = calloc(1, sizeof(*s));
        uv_timer_t *timers[] = { &s->start, &s->tick,    &s->again, &s->look,
                                 &s->keep,  &s->account, &s->beat,  &s->well };
        int r;

        if (!s)
                return -ENOMEM;
        s->host.loop = &s->loop;
        s->host.wake = on_wake;
        peer_process_start();
        r = connection_host_init(&s->host);
        if (r == 0)
                r = message_arena_new(MESSAGE_ARENA_BYTES, &s->host.arena);
        if (r == 0)
                r = uv_loop_init(&s->loop);
        if (r == 0) {
                s->loop_item = (struct poller_item){ .fd = uv_backend_fd(&s->loop), .report = on_loop };
                r = poller_set(s->host.poller, &s->loop_item, EPOLLIN);
        }
        if (r < 0) {
                message_arena_free(s->host.arena);
                poller_free(s->host.poller);
                free(s);
                return r;
        }
        uv_async_init(&s->loop, &s->async, on_async);
        s->async.data = s;
        for (size_t i = 0; i < sizeof(timers) / sizeof(timers[0]); i++) {
                uv_timer_init(&s->loop, timers[i]);
                timers[i]->data = s;
        }
        for (size_t i = 0; i < 3; i++) {
                uv_signal_init(&s->loop, &s->signals[i]);
                s->signals[i].data = s;
                uv_signal_start(&s->signals[i], on_signal, numbers[i]);
        }
        TAILQ_INIT(&s->lease_listeners);
        s->folder.fd = -1;
        for (int i = 0; i < ROLE_COUNT; i++)
                listener_init(&s->listeners[i], &s->host, (enum role)i);
        *ret = s;
        return 0;
}

/* Sessions of the previous daemon. */
static int server_keep_sessions(struct server *s, char *ret_sentence, size_t n_sentence)
{
        int r = restore_sessions(s->broker);

        for (size_t i = 0; r == 0 && i < s->broker->sessions.n_slots; i++)
                if (s->broker->sessions.table[i])
                        r = connection_keep(&s->host, s->broker->sessions.table[i]);
        if (r < 0)
                snprintf(ret_sentence, n_sentence,
                         "the sessions of the previous daemon could not be restored: %s", strerror(-r));
        else
                lease_tick(s->broker, clock_ms()); /* the config may have changed */
        server_wake(s);
        return r;
}

int server_listen(struct server *s, struct broker *b, const struct config *c, struct manager *m,
                  char *ret_sentence, size_t n_sentence)
{
        const struct config_socket *sockets[ROLE_COUNT] = { &c->socket, &c->admin_socket, &c->monitor_socket,
                                                            &c->lease_socket };
        static const char *const names[ROLE_COUNT] = { "client", "admin", "monitor", "lease" };

        s->broker = s->host.broker = b;
        s->manager = m;
        for (size_t i = 0; i < ROLE_COUNT; i++) {
                struct listener *l = &s->listeners[i];
                int r;

                if (!sockets[i]->path)
                        continue;
                r = listener_open(l, sockets[i], m ? manager_take(m, names[i]) : -1);
                if (r == 0)
                        r = listener_start(l);
                if (r < 0) {
                        snprintf(ret_sentence, n_sentence, "cannot listen on socket %s: %s", sockets[i]->path,
                                 listener_trouble(r));
                        return r;
                }
        }
        if (lease_folder_init(&s->folder, c->admin_socket.path) < 0) {
                snprintf(ret_sentence, n_sentence, "out of memory");
                return -ENOMEM;
        }
        server_open_sockets(s);
        return server_keep_sessions(s, ret_sentence, n_sentence);
}

int server_run(struct server *s, void (*ready)(const struct broker *b))
{
        struct lease_listener *l;

        s->ready = ready;
        uv_timer_start(&s->start, on_start, 0, 0);
        uv_timer_start(&s->well, on_well, SERVER_WELL_MS, 0);
        s->loop_is_due = true; /* it has not told the kernel what it waits for */
        s->watched = watched_new(s->broker, s->host.poller);
        while (!s->is_ending)
                server_turn(s);
        s->watched = watched_free(s->watched);
        broker_note_well(s->broker);
        if (s->manager)
                manager_ending(s->manager, s->broker->sessions.n_clients);
        for (size_t i = 0; i < ROLE_COUNT; i++)
                listener_stop(&s->listeners[i]);
        TAILQ_FOREACH(l, &s->lease_listeners, link)
        listener_stop(&l->listener);
        if (broker_has_heirs(s->broker)) {
                broker_prepare_leave(s->broker);
                connection_leave_all(&s->host, "the daemon restarts");
        } else {
                connection_drop_all(&s->host, "the daemon exits");
        }
        server_end_reloads(s);
        (void)accounting_tick(s->broker, clock_ms(), true);
        accounting_usage(s->broker, true);
        return 0;
}

static void close_handle(uv_handle_t *handle, void *unused)
{
        (void)unused;
        if (!uv_is_closing(handle))
                uv_close(handle, NULL);
}

struct server *server_free(struct server *s)
{
        struct lease_listener *l;
        sigset_t endings;

        if (!s)
                return NULL;
        while ((l = TAILQ_FIRST(&s->lease_listeners)))
                server_drop_lease_listener(s, l);
        lease_folder_deinit(&s->folder);
        sigemptyset(&endings);
        sigaddset(&endings, SIGTERM);
        sigaddset(&endings, SIGINT);
        pthread_sigmask(SIG_BLOCK, &endings, NULL);
        uv_walk(&s->loop, close_handle, NULL);
        uv_run(&s->loop, UV_RUN_DEFAULT);
        uv_loop_close(&s->loop);
        /* libuv has restored the default actions: a second SIGTERM would end the process before its sockets are
         * removed. */
        signal(SIGTERM, SIG_IGN);
        signal(SIGINT, SIG_IGN);
        pthread_sigmask(SIG_UNBLOCK, &endings, NULL);
        for (size_t i = 0; i < ROLE_COUNT; i++)
                listener_close(&s->listeners[i]);
        message_arena_free(s->host.arena);
        poller_free(s->host.poller);
        free(s);
        return NULL;
}
