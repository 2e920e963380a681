/* The events socket of a connection: events reach a client that did not read for some time, in their order.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/events.h"

#include <sys/ioctl.h>
#include <sys/socket.h>

#include "daemon/net/poller.h"
#include "proto/frame.h"
#include "tests/suite.h"

static struct poller *poller;
static struct message_arena *arena;
static struct events *events;
static struct frame_reader *client;
static int client_fd;
static unsigned n_sent, n_received;

static void no_input(void *unused)
{
        (void)unused;
        ck_abort_msg("the client has sent nothing");
}

static int no_reply(void *unused, const Bfcd__EventReply *reply, const char **ret_why)
{
        (void)unused, (void)reply, (void)ret_why;
        ck_abort_msg("the client has sent nothing");
}

static void no_end(void *unused, const char *why)
{
        (void)unused;
        ck_abort_msg("the connection has ended: %s", why ? why : "the client hung up");
}

static const struct events_ops ops = { .ready = no_input, .reply = no_reply, .end = no_end };

static void setup(void)
{
        n_sent = n_received = 0;
        ck_assert_int_eq(poller_new(&poller), 0);
        ck_assert_int_eq(message_arena_new(MESSAGE_ARENA_BYTES, &arena), 0);
        ck_assert_int_eq(events_new(poller, arena, &ops, NULL, &events, &client_fd), 0);
        ck_assert_int_eq(frame_reader_new(false, &client), 0);
}

static void teardown(void)
{
        client = frame_reader_free(client);
        close(client_fd);
        events = events_free(events);
        ck_assert_ptr_null(events_free(NULL));
        arena = message_arena_free(arena);
        poller = poller_free(poller);
}

FIXTURE(events, setup, teardown);

/* The limit of a partition is the number of events so far. */
static void send_one(void)
{
        Bfcd__QuotaChanged changed = BFCD__QUOTA_CHANGED__INIT;
        Bfcd__Event event = BFCD__EVENT__INIT;

        changed.partition = 1;
        changed.bytes_limit = ++n_sent;
        event.body_case = BFCD__EVENT__BODY_QUOTA_CHANGED;
        event.quota_changed = &changed;
        events_send(events, &event);
}

static size_t n_unread(void)
{
        int n = 0;

        ck_assert_int_eq(ioctl(client_fd, FIONREAD, &n), 0);
        return (size_t)n;
}

static void receive_all(void)
{
        const uint8_t *payload;
        size_t n_bytes;

        while (frame_reader_receive(client, client_fd, MSG_DONTWAIT) == 0) {
                while (frame_reader_next(client, &payload, &n_bytes) == 0) {
                        Bfcd__Event *event = bfcd__event__unpack(NULL, n_bytes, payload);

                        ck_assert_ptr_nonnull(event);
                        ck_assert_int_eq(event->body_case, BFCD__EVENT__BODY_QUOTA_CHANGED);
                        ck_assert_uint_eq(event->quota_changed->bytes_limit, ++n_received);
                        bfcd__event__free_unpacked(event, NULL);
                }
        }
}

/* As a client that was stopped during many reloads: it learns of the last limit, though it sends nothing. */
TEST(all_events_reach_a_client_that_reads_late)
{
        for (int round = 0; round < 3; round++) {
                size_t n_before;

                do {
                        n_before = n_unread();
                        send_one();
                } while (n_unread() > n_before);
                for (int i = 0; i < 500; i++)
                        send_one();
                poller_run(poller, 0);
                ck_assert_uint_eq(n_unread(), n_before);
                receive_all();
                ck_assert_uint_lt(n_received, n_sent);
                for (unsigned n = 0; n != n_received;) {
                        n = n_received;
                        poller_run(poller, 0);
                        receive_all();
                }
                ck_assert_uint_eq(n_received, n_sent);
        }
}
