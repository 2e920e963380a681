/* The poller: what is reported, to whom, and what no longer.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/poller.h"

#include <errno.h>
#include <stdbool.h>
#include <sys/socket.h>

#include "tests/suite.h"

#define N_ENDS 3u

struct end {
        struct poller_item item; /* first, so that it is the end */
        unsigned n_reports;
        uint32_t events; /* of the last report */
        int peer;
};

static struct poller *poller;
static struct end ends[N_ENDS];
static bool is_alone; /* an item that is reported takes the others out */

static void on_events(struct poller_item *item, uint32_t events)
{
        struct end *end = (struct end *)item;

        end->n_reports++;
        end->events = events;
        for (unsigned i = 0; is_alone && i < N_ENDS; i++) {
                if (&ends[i] == end)
                        continue;
                ck_assert_int_eq(poller_set(poller, &ends[i].item, 0), 0);
                ends[i].item.events = EPOLLIN; /* its memory may have any use now */
        }
}

static void setup(void)
{
        is_alone = false;
        ck_assert_int_eq(poller_new(&poller), 0);
        for (unsigned i = 0; i < N_ENDS; i++) {
                int sv[2];

                ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sv), 0);
                ends[i] = (struct end){ .item = { .fd = sv[0], .report = on_events }, .peer = sv[1] };
                ck_assert_int_eq(poller_set(poller, &ends[i].item, EPOLLIN | EPOLLRDHUP), 0);
        }
}

static void teardown(void)
{
        for (unsigned i = 0; i < N_ENDS; i++) {
                close(ends[i].item.fd);
                if (ends[i].peer >= 0)
                        close(ends[i].peer);
        }
        poller = poller_free(poller);
        ck_assert_ptr_null(poller_free(NULL));
}

FIXTURE(poller, setup, teardown);

static void say(unsigned i)
{
        ck_assert_int_eq(send(ends[i].peer, "x", 1, MSG_NOSIGNAL), 1);
}

TEST(an_item_is_reported_while_its_events_last)
{
        char c;

        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].n_reports, 0);
        say(1);
        poller_run(poller, -1);
        poller_run(poller, -1);
        ck_assert_uint_eq(ends[1].n_reports, 2);
        ck_assert_uint_eq(ends[1].events, EPOLLIN);
        ck_assert_uint_eq(ends[0].n_reports + ends[2].n_reports, 0);
        ck_assert_int_eq(recv(ends[1].item.fd, &c, 1, 0), 1);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[1].n_reports, 2);
}

/* Bytes that come later are reported again, though the first are still there, and so is what a change finds. */
TEST(an_item_with_epollet_is_reported_once)
{
        ck_assert_int_eq(poller_set(poller, &ends[1].item, EPOLLIN | EPOLLRDHUP | EPOLLET), 0);
        say(1);
        for (int i = 0; i < 3; i++)
                poller_run(poller, 0);
        ck_assert_uint_eq(ends[1].n_reports, 1);
        ck_assert_uint_eq(ends[1].events, EPOLLIN);
        say(1);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[1].n_reports, 2);
        ck_assert_int_eq(poller_set(poller, &ends[1].item, EPOLLIN | EPOLLOUT | EPOLLET), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[1].events, EPOLLIN | EPOLLOUT);
        close(ends[1].peer);
        ends[1].peer = -1;
        poller_run(poller, 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[1].n_reports, 4);
        ck_assert_uint_eq(ends[1].events, EPOLLIN | EPOLLOUT); /* without EPOLLET */
}

TEST(only_what_an_item_waits_for_is_reported)
{
        say(0);
        ck_assert_int_eq(poller_set(poller, &ends[0].item, EPOLLRDHUP), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].n_reports, 0);
        ck_assert_int_eq(poller_set(poller, &ends[0].item, EPOLLIN | EPOLLOUT), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].events, EPOLLIN | EPOLLOUT);
        ck_assert_int_eq(poller_set(poller, &ends[0].item, 0), 0);
        ck_assert_int_eq(poller_set(poller, &ends[0].item, 0), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].n_reports, 1);
        ck_assert_int_eq(poller_set(poller, &ends[0].item, EPOLLIN), 0);
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].n_reports, 2);
}

/* Whatever it waits for, so that it notices. */
TEST(a_hang_up_is_all_that_an_item_waits_for)
{
        ck_assert_int_eq(poller_set(poller, &ends[2].item, EPOLLOUT | EPOLLRDHUP), 0);
        close(ends[2].peer);
        ends[2].peer = -1;
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[2].events, EPOLLOUT | EPOLLRDHUP);
        ck_assert_int_eq(poller_set(poller, &ends[2].item, 0), 0); /* not even that */
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[2].n_reports, 1);
}

/* All three are in one answer of the kernel. */
TEST(an_item_that_was_taken_out_is_not_reported)
{
        for (unsigned i = 0; i < N_ENDS; i++)
                say(i);
        is_alone = true;
        poller_run(poller, 0);
        ck_assert_uint_eq(ends[0].n_reports + ends[1].n_reports + ends[2].n_reports, 1);
}

TEST(no_room_for_an_item)
{
        struct poller_item item = { .fd = -1, .report = on_events };

        ck_assert_int_eq(poller_set(poller, &item, EPOLLIN), -EBADF);
        ck_assert_uint_eq(item.events, 0);
}
