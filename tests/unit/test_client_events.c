/* The client's events socket, on which the test is the daemon.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/events.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "tests/suite.h"
#include "tests/unit/wire.h"

#define MAX_EXTENTS 64u /* of a Retire; see docs/protocol.md */

static struct wire wire;
static struct events *events;
static uint64_t retired[MAX_EXTENTS];
static size_t n_retired;

static int on_recall(void *userdata, uint64_t epoch, Bfcd__Event *event)
{
        const Bfcd__Retire *retire = event->retire;

        (void)userdata;
        ck_assert_uint_eq(epoch, 1);
        ck_assert_uint_le(retire->n_extent_ids, MAX_EXTENTS);
        memcpy(retired, retire->extent_ids, retire->n_extent_ids * sizeof(*retire->extent_ids));
        n_retired = retire->n_extent_ids;
        return 0;
}

static int on_look(void *userdata)
{
        (void)userdata;
        return -1;
}

static int on_lost(void *userdata, uint64_t epoch)
{
        (void)userdata, (void)epoch;
        return -ECONNRESET;
}

static void on_ended(void *userdata)
{
        (void)userdata;
}

static void on_failed(void *userdata, int error)
{
        (void)userdata, (void)error;
}

/* The other events are not sent here. */
static const struct events_ops ops = {
        .recall = on_recall, .look = on_look, .lost = on_lost, .ended = on_ended, .failed = on_failed
};

static void setup(void)
{
        wire = WIRE_NONE;
        n_retired = 0;
        ck_assert_int_eq(events_new(wire_open_events(&wire), false, &ops, NULL, &events), 0);
}

static void teardown(void)
{
        ck_assert_int_eq(events_stop(events, 0), 0);
        events = events_free(events);
        wire_close(&wire);
}

FIXTURE(client_events, setup, teardown);

static void send_retire(uint64_t sequence, size_t n)
{
        uint64_t ids[MAX_EXTENTS + 1];

        ck_assert_uint_le(n, MAX_EXTENTS + 1);
        for (size_t i = 0; i < n; i++)
                ids[i] = 1000 + i;
        wire_retire(&wire, sequence, ids, n, -1);
}

/* 0: none came. */
static uint64_t sequence_of_answer(void)
{
        Bfcd__EventReply *reply;
        const uint8_t *payload;
        uint64_t sequence;
        size_t n_bytes;

        if (frame_reader_receive(wire.events_reader, wire.events_fd, MSG_DONTWAIT) != 0)
                return 0;
        ck_assert_int_eq(frame_reader_next(wire.events_reader, &payload, &n_bytes), 0);
        reply = bfcd__event_reply__unpack(NULL, n_bytes, payload);
        ck_assert_ptr_nonnull(reply);
        sequence = reply->sequence;
        bfcd__event_reply__free_unpacked(reply, NULL);
        return sequence;
}

/* The daemon takes back as many extents at once as the protocol allows: they are unmapped, and that is confirmed. */
TEST(retires_of_any_allowed_length)
{
        static const size_t lengths[] = { 1, 2, MAX_EXTENTS - 1, MAX_EXTENTS };

        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
                send_retire(i + 1, lengths[i]);
                ck_assert_int_eq(events_poll(events), 0);
                ck_assert_uint_eq(n_retired, lengths[i]);
                for (size_t k = 0; k < n_retired; k++)
                        ck_assert_uint_eq(retired[k], 1000 + k);
                ck_assert_uint_eq(sequence_of_answer(), i + 1);
        }
}

/* None of it is done, and the events end. */
LOOP_TEST(retires_of_another_length_are_violations, 2)
{
        send_retire(1, _i == 0 ? 0 : MAX_EXTENTS + 1);
        ck_assert_int_eq(events_poll(events), -EPROTO);
        ck_assert_uint_eq(n_retired, 0);
        ck_assert_uint_eq(sequence_of_answer(), 0);
}
