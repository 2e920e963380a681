/* Streams of the host: events are points in the work that a test gives them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "device/host_stream.h"

#include <errno.h>
#include <pthread.h>

#include "device/device.h"
#include "tests/suite.h"

#define MIB (UINT64_C(1) << 20)

static struct device_streams *streams;

static void setup(void)
{
        static const struct device_view here;

        host_stream_reset();
        ck_assert_int_eq(device_streams_new(&here, &streams), 0);
}

static void teardown(void)
{
        streams = device_streams_free(streams);
        ck_assert_ptr_null(device_streams_free(NULL));
        ck_assert_uint_eq(host_stream_n_events(), 0);
}

static struct device_event *record(uintptr_t stream)
{
        struct device_event *e = NULL;

        ck_assert_int_eq(device_event_record(streams, stream, &e), 0);
        ck_assert_ptr_nonnull(e);
        return e;
}

START_TEST(an_event_is_a_point_in_a_stream)
{
        struct device_event *before = record(7), *behind_first, *behind_second;

        host_stream_begin(7);
        behind_first = record(7);
        host_stream_begin(7);
        behind_second = record(7);
        ck_assert_int_eq(device_event_query(streams, before), 0);
        ck_assert_int_eq(device_event_query(streams, behind_first), DEVICE_PENDING);
        host_stream_end(7);
        ck_assert_int_eq(device_event_query(streams, behind_first), 0);
        ck_assert_int_eq(device_event_query(streams, behind_second), DEVICE_PENDING);
        host_stream_end(7);
        ck_assert_int_eq(device_event_query(streams, behind_second), 0);
        host_stream_end(7); /* nothing to end */
        host_stream_begin(7);
        ck_assert_int_eq(device_event_record(streams, 7, &behind_first), 0); /* used again */
        ck_assert_int_eq(device_event_query(streams, behind_first), DEVICE_PENDING);
        ck_assert_uint_eq(host_stream_n_events(), 3);
        device_event_forget(streams, before);
        device_event_forget(streams, behind_first);
        device_event_forget(streams, behind_second);
        ck_assert_ptr_null(device_event_forget(streams, NULL));
}
END_TEST

START_TEST(streams_are_apart)
{
        struct device_event *a, *b;

        host_stream_begin(0);
        a = record(0);
        b = record(1);
        ck_assert_int_eq(device_event_query(streams, a), DEVICE_PENDING);
        ck_assert_int_eq(device_event_query(streams, b), 0);
        device_event_forget(streams, a);
        device_event_forget(streams, b);
}
END_TEST

/* What it is given meanwhile is no work. */
START_TEST(a_captured_stream_has_no_events)
{
        struct device_event *e = NULL;

        host_stream_begin(3);
        host_stream_begin_capture(3);
        ck_assert_int_eq(device_stream_is_captured(streams, 3), 1);
        ck_assert_int_eq(device_stream_is_captured(streams, 4), 0);
        ck_assert_int_eq(device_event_record(streams, 3, &e), -EBUSY);
        host_stream_begin(3);
        host_stream_end_capture(3);
        e = record(3);
        host_stream_end(3);
        ck_assert_int_eq(device_event_query(streams, e), 0);
        device_event_forget(streams, e);
}
END_TEST

START_TEST(failures)
{
        struct device_event *e = record(3), *other = NULL;

        host_stream_fail(3, -EIO);
        ck_assert_int_eq(device_event_query(streams, e), -EIO);
        ck_assert_int_eq(device_event_record(streams, 3, &other), -EIO);
        ck_assert_int_eq(device_stream_is_captured(streams, 3), -EIO);
        host_stream_fail(3, 0);
        ck_assert_int_eq(device_event_query(streams, e), 0);
        device_event_forget(streams, e);
}
END_TEST

static void *end_both(void *arg)
{
        host_stream_end(1);
        host_stream_end(2);
        return arg;
}

START_TEST(a_range_waits_for_all_streams)
{
        static const struct device_view here;
        struct device_range *range = NULL;
        pthread_t thread;

        ck_assert_int_eq(device_range_new(&here, 2 * MIB, &range), 0);
        ck_assert_int_eq(device_range_finish(range), 0);
        host_stream_begin(1);
        host_stream_begin(2);
        host_stream_begin_capture(9);
        ck_assert_int_eq(device_range_finish(range), -EBUSY);
        host_stream_end_capture(9);
        ck_assert_int_eq(pthread_create(&thread, NULL, end_both, NULL), 0);
        ck_assert_int_eq(device_range_finish(range), 0);
        pthread_join(thread, NULL);
        device_range_free(range);
}
END_TEST

int main(void)
{
        Suite *s = suite_create("host_stream");
        TCase *t = tcase_create("host_stream");

        tcase_add_checked_fixture(t, setup, teardown);
        tcase_add_test(t, an_event_is_a_point_in_a_stream);
        tcase_add_test(t, streams_are_apart);
        tcase_add_test(t, a_captured_stream_has_no_events);
        tcase_add_test(t, failures);
        tcase_add_test(t, a_range_waits_for_all_streams);
        suite_add_tcase(s, t);
        return suite_run(s);
}
