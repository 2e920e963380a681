/* Quotas: which requests are served, wait or are refused, in which order, and what
 * is given back to make room.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/queue.h"

#include <errno.h>
#include <string.h>

#include "tests/fake_device.h"
#include "tests/random.h"
#include "tests/suite.h"
#include "tests/checks.h"
#include "tests/unit/still_clock.h"

#define E      (2 * MIB) /* what a small limit's grid is */
#define N_ASKS 10000u
#define N_IDLE 40u  /* unused quotas; each reserves 2 GiB of addresses, and valgrind has 128 */
#define TURN   256u /* requests that one turn looks at, at most */

struct ask {
        struct quota_request request; /* first: it is one */
        unsigned n_done;
        unsigned place; /* among those that are done */
        int result;
        bfc_handle handle;
        uint64_t offset;
        struct ask *cancels; /* done() takes this one out */
        struct ask *asks;    /* done() queues this one */
};

static struct fake_device device;
static struct worker *worker;
static struct ledger *ledger;
static struct partition p;
static struct quota *q, *neighbour;
static struct ask asks[N_ASKS];
static unsigned n_done, n_wakes;

static void check(void)
{
        const char *why = "";
        struct quota *each;

        TAILQ_FOREACH(each, &p.quotas, lists.of_partition)
        ck_assert_msg(quota_check(each, &why) == 0, "quota_check: %s", why);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "ledger_check: %s", why);
}

static void on_wake(void *userdata)
{
        (void)userdata;
        n_wakes++;
}

static int open_quota(const char *tenant, uint64_t limit, uint64_t reserve, uint32_t max_blocks,
                      struct quota **ret)
{
        struct quota_options o = { .tenant = tenant,
                                   .partition = &p,
                                   .limit_bytes = limit,
                                   .reserve_bytes = reserve,
                                   .max_sessions = 2,
                                   .max_blocks = max_blocks };

        return quota_new(&o, ret);
}

/* q and its neighbour, each with a session, in a partition of this limit. */
static void open_both(uint64_t pool_bytes, uint64_t limit_bytes, uint64_t reserve_bytes)
{
        account_init_root(&p.pool, pool_bytes);
        ck_assert_int_eq(open_quota("alpha", limit_bytes, 0, 20000, &q), 0);
        ck_assert_int_eq(open_quota("beta", limit_bytes, reserve_bytes, 20000, &neighbour), 0);
        ck_assert_int_eq(quota_join(q), 0);
        ck_assert_int_eq(quota_join(neighbour), 0);
}

static void open_one(uint64_t limit_bytes, uint32_t max_blocks)
{
        account_init_root(&p.pool, limit_bytes);
        ck_assert_int_eq(open_quota("alpha", limit_bytes, 0, max_blocks, &q), 0);
        ck_assert_int_eq(quota_join(q), 0);
}

static void setup(void)
{
        struct ledger_limits limits = {
                .n_quotas = 3 + N_IDLE, .n_sessions = 2, .n_extents = 64, .n_exports = 2, .n_blocks = 2
        };

        fake_device_init(&device, MIB);
        ck_assert_int_eq(worker_new_inline(&worker), 0);
        ck_assert_int_eq(ledger_new(&limits, &ledger), 0);
        p = (struct partition){ .name = "shelf",
                                .device_id = "fake",
                                .device = &device.device,
                                .worker = worker,
                                .ledger = ledger,
                                .reclaim_timeout_ms = 60000,
                                .turn = { .wake = on_wake } };
        partition_init_lists(&p);
}

/* Turns and device calls until nothing is left to do. */
static void run_all(void)
{
        while (!TAILQ_EMPTY(&p.queue.due) || worker_n_pending(worker) > 0) {
                if (!TAILQ_EMPTY(&p.queue.due))
                        quota_turn(TAILQ_FIRST(&p.queue.due));
                worker_poll(worker);
        }
}

static void settle(void)
{
        run_all();
        check();
}

static void teardown(void)
{
        struct ledger_counts counts;

        settle();
        for (unsigned i = 0; i < N_ASKS; i++)
                if (asks[i].n_done == 1 && asks[i].result == 0)
                        quota_dealloc(asks[i].request.quota, asks[i].handle,
                                      (asks[i].request.n_bytes + 255) / 256 * 256, asks[i].request.n_bytes);
        while (q && q->sessions.n > 0)
                quota_leave(q);
        while (neighbour && neighbour->sessions.n > 0)
                quota_leave(neighbour);
        settle();
        ck_assert(p.preallocate || p.pool.charged_bytes == (q ? arena_unreclaimed_bytes(q->arena) : 0));
        q = quota_free(q);
        neighbour = quota_free(neighbour);
        ck_assert_ptr_null(quota_free(NULL));
        ck_assert_uint_eq(p.use.n_bytes, 0);
        ck_assert_uint_eq(p.n_quotas, 0);
        ck_assert(TAILQ_EMPTY(&p.quotas) && TAILQ_EMPTY(&p.queue.due));
        ck_assert_uint_eq(p.pool.charged_bytes, 0);
        ck_assert_uint_eq(p.pool.committed_bytes, 0);
        ck_assert_uint_eq(device.n_live, 0);
        ledger_count(ledger, &counts);
        ck_assert_uint_eq(counts.n_quotas + counts.n_extents + counts.n_blocks, 0);
        ledger = ledger_free(ledger);
        worker = worker_free(worker);
}

FIXTURE(quota, setup, teardown);

static void on_done(struct quota_request *request, int result, bfc_handle handle, uint64_t offset)
{
        struct ask *ask = (struct ask *)request;

        ask->offset = offset;
        ask->n_done++;
        ask->place = n_done++;
        ask->result = result;
        ask->handle = handle;
        if (ask->cancels)
                quota_cancel(&ask->cancels->request);
        if (ask->asks)
                quota_wait(&ask->asks->request);
}

static void prepare(unsigned i, struct quota *of, uint64_t n_bytes)
{
        asks[i].request = (struct quota_request){ .quota = of, .n_bytes = n_bytes, .done = on_done };
}

static void wait_up_to(unsigned i, struct quota *of, uint64_t n_bytes, uint32_t wait_ms)
{
        prepare(i, of, n_bytes);
        asks[i].request.wait_ms = wait_ms;
        quota_wait(&asks[i].request);
}

static void wait_for(unsigned i, struct quota *of, uint64_t n_bytes)
{
        wait_up_to(i, of, n_bytes, 0);
}

/* The ask is done with this result and, being served, holds a block until the end. */
static void assert_done(unsigned i, int result)
{
        ck_assert_uint_eq(asks[i].n_done, 1);
        ck_assert_int_eq(asks[i].result, result);
}

static void give_back(unsigned i)
{
        assert_done(i, 0);
        quota_dealloc(asks[i].request.quota, asks[i].handle, asks[i].request.n_bytes,
                      asks[i].request.n_bytes);
        asks[i].n_done = 0;
}

/* A block of whole granules that settles at once. */
static void take(unsigned i, struct quota *of, uint64_t n_bytes)
{
        wait_for(i, of, n_bytes);
        settle();
        assert_done(i, 0);
}

/* Blocks of q that fill n extents, of which the first and the third are free again. */
static void take_two_apart(unsigned n)
{
        for (unsigned i = 0; i < n; i++)
                take(i, q, E);
        give_back(0);
        give_back(2);
}

TEST(test_immediate)
{
        bfc_handle h = 0;
        uint64_t offset;

        open_one(4 * E, 100);
        ck_assert_int_eq(quota_alloc(q, 0, false, &h, &offset), -EINVAL);
        ck_assert_uint_eq(quota_n_refusals(q), 0);
        ck_assert_int_eq(quota_alloc(q, 4 * E + 1, false, &h, &offset), -EDQUOT);
        ck_assert_uint_eq(quota_n_refusals(q), 1);
        ck_assert_int_eq(quota_alloc(q, 100, false, &h, &offset), QUOTA_WAIT); /* nothing is backed */
        take(0, q, 256);
        ck_assert_int_eq(quota_alloc(q, 100, false, &h, &offset), 0);
        ck_assert_uint_eq(q->all.n_blocks, 2);
        ck_assert_uint_eq(q->all.bytes_in_use, 512);
        ck_assert_uint_eq(q->all.bytes_requested, 356);
        ck_assert_uint_eq(p.use.n_bytes, 512);
        quota_dealloc(q, h, 256, 100);
        ck_assert_uint_eq(q->peaks.bytes_in_use, 512);
        quota_clear_peaks(q);
        ck_assert_uint_eq(q->peaks.bytes_in_use, 256);
        ck_assert_uint_eq(ledger_quota_at(ledger, q->index)->life.peak_in_use, 512);
        ck_assert_uint_eq(ledger_quota_at(ledger, q->index)->life.peak_reserved, E);
}

TEST(test_waiting)
{
        open_one(4 * E, 100);
        wait_for(0, q, E);
        ck_assert_uint_eq(n_wakes, 1);
        ck_assert_ptr_eq(TAILQ_FIRST(&p.queue.due), q);
        ck_assert_uint_eq(device.n_makes, 0); /* nothing happens inside the call */
        quota_turn(q);
        ck_assert(TAILQ_EMPTY(&p.queue.due));
        ck_assert(!TAILQ_EMPTY(&q->growth.running));
        ck_assert_uint_eq(n_done, 0);
        ck_assert_uint_eq(worker_poll(worker), 1);
        assert_done(0, 0);
        check();
}

TEST(test_fifo_and_one_growth)
{
        open_one(8 * E, 1000);
        for (unsigned i = 0; i < 100; i++)
                wait_for(i, q, 1024);
        ck_assert_uint_eq(n_wakes, 1);
        settle();
        ck_assert_uint_eq(device.n_makes, 1); /* they share one extent */
        for (unsigned i = 100; i < 107; i++)
                wait_for(i, q, E);
        settle();
        for (unsigned i = 0; i < 107; i++) {
                assert_done(i, 0);
                ck_assert_uint_eq(asks[i].place, i);
        }
}

/* A request that arrives right after a growth is served after those that waited for it. */
TEST(new_request_queues_behind_older_ones)
{
        open_one(8 * E, 1000);
        for (unsigned i = 0; i < 4; i++)
                wait_for(i, q, 256);
        quota_turn(q);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(n_done, 1);
        wait_for(4, q, 256);
        settle();
        for (unsigned i = 0; i < 5; i++) {
                assert_done(i, 0);
                ck_assert_uint_eq(asks[i].place, i);
        }
}

TEST(test_pass_by)
{
        bfc_handle h;
        uint64_t offset;

        open_one(2 * E, 100);
        take(0, q, E + 256);
        quota_closing(q); /* so that the next one may wait */
        wait_for(1, q, E);
        wait_for(2, q, 512);
        settle();
        ck_assert_uint_eq(asks[1].n_done, 0);
        assert_done(2, 0);
        ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), 0);
        quota_dealloc(q, h, 256, 256);
        ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), QUOTA_WAIT); /* its turn is due now */
        settle();
        give_back(0);
        settle();
        assert_done(1, 0);
        quota_closed(q);
}

/* Where all extents are made in advance, a block that must be in one is no larger. */
TEST(more_than_an_extent_has_is_refused)
{
        char sentence[300];
        uint64_t offset;
        bfc_handle h;

        p.preallocate = true;
        open_one(4 * E, 100);
        ck_assert_int_eq(quota_alloc(q, E + 1, true, &h, &offset), -EINVAL);
        ck_assert_int_eq(quota_alloc(q, 4 * E + 1, true, &h, &offset), -EDQUOT);
        quota_explain(&(struct quota_request){ .quota = q, .n_bytes = E + 1, .in_extent = true }, -EINVAL,
                      sentence, sizeof(sentence));
        ck_assert_ptr_nonnull(strstr(sentence, "a block of 2097153 bytes does not fit in one extent"));
        ck_assert_ptr_nonnull(strstr(sentence, "has at most 2097152 bytes:"));
        ck_assert_ptr_nonnull(
                strstr(sentence, "raise the limit to 514.0 MiB or more, or set 'growth: on-demand'"));
        p.preallocate = false;
}

/* An exact block waits for its bytes, which nothing else gets when they are free. */
TEST(exact_blocks_wait_and_return)
{
        bfc_handle h;
        uint64_t offset;

        open_one(8 * E, 100);
        for (unsigned i = 0; i < 2; i++) {
                prepare(i, q, 2 * E + 1);
                asks[i].request.in_extent = true;
                quota_wait(&asks[i].request);
                settle();
                assert_done(i, 0);
                ck_assert_uint_eq(asks[i].request.n_bytes, 3 * E);
                ck_assert_uint_eq(q->account.charged_bytes, (i + 1) * 3 * E);
        }
        ck_assert_int_eq(quota_alloc(q, 8 * E + 1, true, &h, &offset), -EDQUOT);
        take(2, q, E);
        quota_closing(q); /* so that it may wait */
        prepare(3, q, 4 * E);
        asks[3].request.in_extent = true;
        quota_wait(&asks[3].request);
        settle();
        ck_assert_uint_eq(asks[3].n_done, 0);
        give_back(0);
        settle();
        assert_done(3, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 8 * E);
        quota_closed(q);
        give_back(1);
        give_back(3);
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, E);
        give_back(2);
}

/* A request for a block in one extent gets it there, by growth or when there is room. */
TEST(test_in_extent)
{
        uint64_t offset;
        bfc_handle h;

        open_one(4 * E, 100);
        take(0, q, E + E / 2); /* leaves half an extent free */
        ck_assert_int_eq(quota_alloc(q, E, true, &h, &offset), QUOTA_WAIT);
        prepare(1, q, E);
        asks[1].request.in_extent = true;
        quota_wait(&asks[1].request);
        take(2, q, E / 2);
        settle();
        assert_done(1, 0);
        ck_assert_uint_eq(asks[1].offset, 2 * E);
        ck_assert_uint_eq(q->account.charged_bytes, 3 * E);
        take(6, q, E / 2);

        /* At the limit it waits, also while a free piece of its size spans two extents. */
        take(3, q, E / 2);
        give_back(0);
        give_back(2);
        take(0, q, E / 2);
        take(2, q, E);
        take(4, q, E / 2);
        give_back(2);
        prepare(5, q, E);
        asks[5].request.in_extent = true;
        quota_closing(q); /* so that it may wait */
        quota_wait(&asks[5].request);
        settle();
        ck_assert_uint_eq(asks[5].n_done, 0);
        give_back(0);
        settle();
        assert_done(5, 0);
        ck_assert_uint_eq(asks[5].offset, 0);
        quota_closed(q);
}

TEST(test_device_failure)
{
        const int errors[] = { -ENOMEM, -ENODEV, -EMFILE };

        open_one(4 * E, 100);
        for (unsigned i = 0; i < 3; i++) {
                fake_device_fail_make(&device, 2, errors[i]);
                wait_for(i, q, 2 * E);
                settle();
                assert_done(i, errors[i]);
                ck_assert(asks[i].request.device_failed);
                ck_assert_uint_eq(q->account.charged_bytes, 0);
                ck_assert_uint_eq(q->all.n_blocks, 0);
        }
        ck_assert_uint_eq(quota_life(q)->n_out_of_memory, 2); /* not -ENODEV, which the client is told */
        ck_assert_uint_eq(quota_n_refusals(q), 2);
        /* The next in line has its own try. */
        fake_device_fail_make(&device, 1, -ENOMEM);
        wait_for(3, q, E);
        wait_for(4, q, E);
        settle();
        assert_done(3, -ENOMEM);
        assert_done(4, 0);
        ck_assert(!asks[4].request.device_failed);
}

TEST(test_cancel)
{
        open_one(4 * E, 100);
        wait_for(0, q, E);
        wait_for(1, q, E);
        wait_for(2, q, E);
        quota_cancel(&asks[0].request); /* not looked at yet */
        quota_turn(q);
        ck_assert_ptr_nonnull(asks[1].request.growth);
        quota_cancel(&asks[1].request); /* being made */
        settle();
        ck_assert_uint_eq(asks[0].n_done + asks[1].n_done, 0);
        assert_done(2, 0);
        ck_assert_uint_eq(q->all.n_blocks, 1);
        ck_assert_uint_eq(device.n_makes, 1); /* what was being made served the next */

        wait_for(3, q, E);
        quota_turn(q);
        quota_cancel(&asks[3].request);
        fake_device_fail_make(&device, 1, -ENOMEM); /* and no request fails by it */
        settle();
        ck_assert_uint_eq(asks[3].n_done, 0);
        ck_assert_uint_eq(q->all.n_blocks, 1);
}

TEST(done_callback_makes_a_request)
{
        open_one(4 * E, 100);
        take(0, q, 256);
        for (unsigned i = 1; i <= 3; i++)
                wait_for(i, q, 256);
        asks[1].cancels = &asks[2];
        prepare(4, q, 256);
        asks[3].asks = &asks[4];
        settle();
        ck_assert_uint_eq(asks[2].n_done, 0);
        assert_done(1, 0);
        assert_done(3, 0);
        assert_done(4, 0);
}

TEST(test_max_blocks)
{
        bfc_handle h = 0;
        uint64_t offset;
        char sentence[512];

        open_one(4 * E, 2);
        take(4, q, 512);
        take(0, q, 256);
        give_back(4); /* a hole that the growth has no use for */
        wait_for(1, q, E);
        quota_turn(q);
        ck_assert(!TAILQ_EMPTY(&q->growth.running));
        ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), 0); /* passes by and takes the last */
        settle();
        assert_done(1, -EDQUOT);
        ck_assert(!asks[1].request.device_failed);
        ck_assert_uint_eq(q->all.n_blocks, 2);
        ck_assert_int_eq(quota_alloc(q, 256, false, &offset, &offset), -EDQUOT);
        quota_explain(&(struct quota_request){ .quota = q, .n_bytes = 256 }, -EDQUOT, sentence,
                      sizeof(sentence));
        ck_assert_str_eq(sentence,
                         "tenant 'alpha' is at its limit in 'shelf': it has 2 blocks, and max_blocks is 2");
        wait_for(2, q, 256);
        settle();
        assert_done(2, -EDQUOT);
        quota_dealloc(q, h, 256, 256);
        take(3, q, E);
}

TEST(test_sessions)
{
        open_one(4 * E, 100); /* has joined once */
        ck_assert_int_eq(quota_join(q), 0);
        ck_assert_int_eq(quota_join(q), -EDQUOT);
        take(0, q, 2 * E);
        give_back(0);
        settle();
        quota_leave(q);
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, 2 * E); /* kept for the one that is left */
        quota_leave(q);
        ck_assert_uint_eq(arena_leaving_bytes(q->arena), 2 * E);
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, 0);
        ck_assert_int_eq(quota_join(q), 0);
}

TEST(test_closing)
{
        open_one(2 * E, 100);
        take(0, q, 2 * E);
        wait_for(1, q, E);
        settle();
        assert_done(1, -EDQUOT); /* nothing is on its way back */

        quota_closing(q);
        wait_for(2, q, E);
        wait_for(3, q, 2 * E);
        settle();
        ck_assert_uint_eq(asks[2].n_done + asks[3].n_done, 0);
        give_back(0);
        settle();
        assert_done(2, 0);
        ck_assert_uint_eq(asks[3].n_done, 0);
        quota_closed(q); /* that was all there will be */
        settle();
        assert_done(3, -EDQUOT);
}

TEST(own_free_fragments_are_released)
{
        open_one(4 * E, 100);
        take_two_apart(4);
        take(4, q, 2 * E); /* two free extents apart: given back, made anew together */
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        ck_assert_uint_ge(device.n_destroys, 2);
}

/* More than ever before is backed only when nothing whole is free. */
TEST(own_free_extents_are_released_first)
{
        open_one(8 * E, 100);
        take_two_apart(4);
        take(4, q, 2 * E);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        ck_assert_uint_eq(quota_life(q)->peak_reserved, 4 * E); /* not even in between */
        ck_assert_uint_eq(device.n_destroys, 2);
        take(5, q, 2 * E); /* now there is nothing to give */
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        ck_assert_uint_eq(device.n_destroys, 2);
        give_back(1);
        take(6, q, 2 * E); /* in free memory and the hole beside it */
        ck_assert_uint_eq(q->account.charged_bytes, 7 * E);
        ck_assert_uint_eq(device.n_destroys, 2);
        give_back(3);
        take(7, q, 2 * E);
        ck_assert_uint_eq(q->account.charged_bytes, 8 * E);
        ck_assert_uint_eq(quota_life(q)->peak_reserved, 8 * E);
        ck_assert_uint_eq(q->growth.held.n_bytes, 0);
}

/* Below the peak no own extents are released first. */
TEST(no_release_below_the_peak)
{
        open_both(8 * E, 8 * E, 0);
        take_two_apart(6);
        give_back(4);
        take(6, neighbour, 4 * E); /* takes two of them */
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        ck_assert_uint_eq(device.n_destroys, 2);
        give_back(6);
        quota_leave(neighbour);
        settle();
        device.n_destroys = 0;
        take(7, q, 2 * E); /* one is free, elsewhere */
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        ck_assert_uint_eq(device.n_destroys, 0);
        give_back(1);
        give_back(3);
        give_back(5);
        give_back(7);
        settle();
        quota_leave(q); /* all goes, and the peak with it */
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, 0);
        ck_assert_int_eq(quota_join(q), 0);
        take_two_apart(3);
        device.n_destroys = 0;
        take(3, q, 2 * E); /* above the peak since then: in one of the free ones and a new one */
        ck_assert_uint_eq(q->account.charged_bytes, 3 * E);
        ck_assert_uint_eq(device.n_destroys, 1);
}

/* Two extents released for two: the other tenant, which is first in turn, does not get them. */
TEST(released_room_is_reserved_for_the_request)
{
        open_both(4 * E, 4 * E, 0);
        take_two_apart(4);
        wait_for(4, q, 2 * E);
        quota_turn(q);
        ck_assert_uint_gt(arena_leaving_bytes(q->arena), 0);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        wait_for(5, neighbour, E);
        quota_turn(neighbour);
        ck_assert_uint_eq(worker_poll(worker), 1);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        quota_turn(neighbour);
        settle();
        assert_done(4, 0);
        assert_done(5, -ENOMEM);
        ck_assert_uint_eq(p.pool.peak_charged_bytes, 4 * E);
}

TEST(release_for_a_cancelled_request)
{
        open_both(4 * E, 4 * E, 0);
        take_two_apart(4);
        for (unsigned i = 0; i < 2; i++) {
                wait_for(4, q, 2 * E);
                quota_turn(q);
                ck_assert_uint_gt(arena_leaving_bytes(q->arena), 0);
                if (i == 1)
                        worker_poll(worker); /* room is held by now */
                quota_cancel(&asks[4].request);
                ck_assert_uint_eq(q->growth.held.n_bytes, 0);
                settle();
                ck_assert_uint_eq(q->account.charged_bytes, 2 * E);
                ck_assert_uint_eq(asks[4].n_done, 0);
                take(5, neighbour, 2 * E); /* it is anybody's now */
                give_back(5);
                take(0, q, E);
                take(2, q, E);
                give_back(0);
                give_back(2);
        }
}

/* What others wait for inside of the same tenant goes on with what was held. */
TEST(release_serves_the_next_request)
{
        open_one(4 * E, 100);
        take_two_apart(4);
        wait_for(4, q, 2 * E);
        wait_for(5, q, 2 * E);
        quota_turn(q);
        quota_cancel(&asks[4].request);
        settle();
        assert_done(5, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        ck_assert_uint_eq(q->growth.held.n_bytes, 0);
}

/* A slow release is not waited for where the limits allow growth. */
TEST(slow_release_is_not_waited_for)
{
        open_one(8 * E, 100);
        p.reclaim_timeout_ms = 40;
        take_two_apart(3);
        wait_for(3, q, 2 * E);
        quota_turn(q);
        ck_assert_uint_gt(arena_leaving_bytes(q->arena), 0);
        partition_tick(q->partition);
        quota_turn(q);
        ck_assert(TAILQ_EMPTY(&q->growth.running));
        still_clock_pass(60);
        partition_tick(q->partition);
        quota_turn(q);
        ck_assert(!TAILQ_EMPTY(&q->growth.running));
        ck_assert_uint_gt(arena_leaving_bytes(q->arena), 0);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        settle();
        assert_done(3, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 3 * E);
        ck_assert_uint_eq(q->growth.held.n_bytes, 0);
}

/* At the limit it is: there is nothing else. */
TEST(slow_release_at_the_limit)
{
        open_one(4 * E, 100);
        p.reclaim_timeout_ms = 40;
        take_two_apart(4);
        wait_for(4, q, 2 * E);
        quota_turn(q);
        still_clock_pass(60);
        partition_tick(q->partition);
        quota_turn(q);
        ck_assert(TAILQ_EMPTY(&q->growth.running));
        ck_assert_uint_eq(asks[4].n_done, 0);
        settle();
        assert_done(4, 0);
}

TEST(release_is_unreclaimed)
{
        open_one(5 * E, 100);
        take_two_apart(4);
        fake_device_fail_destroy(&device, 1, -EIO);
        take(4, q, 2 * E); /* there was an extent's room above */
        ck_assert_uint_eq(arena_unreclaimed_bytes(q->arena), E);
        ck_assert_uint_eq(q->account.charged_bytes, 5 * E);
        ck_assert_uint_eq(q->growth.held.n_bytes, 0);
        wait_for(5, q, E);
        settle();
        assert_done(5, -EDQUOT);
}

/* Own and the neighbour's: what is one's own stays so while the other's comes. */
TEST(release_by_another_tenant)
{
        open_both(4 * E, 4 * E, 0);
        take(0, q, E);
        take(1, q, E);
        take(2, neighbour, E);
        take(3, neighbour, E);
        give_back(0);
        give_back(3);
        take(4, q, 2 * E);
        ck_assert_uint_eq(q->account.charged_bytes, 3 * E);
        ck_assert_uint_eq(neighbour->account.charged_bytes, E);
        ck_assert_uint_eq(p.pool.peak_charged_bytes, 4 * E);
}

static uint64_t below(uint64_t *seed, uint64_t n)
{
        return random_next(seed) % n;
}

static uint64_t to_extents(uint64_t n_bytes)
{
        return (n_bytes + E - 1) / E * E;
}

/* What a quota's pool regains when it gives back all that is wholly free. */
static uint64_t can_yield(const struct quota *of)
{
        uint64_t above = of->account.charged_bytes > of->account.reserve_bytes
                                 ? of->account.charged_bytes - of->account.reserve_bytes
                                 : 0;
        uint64_t whole = arena_releasable(of->arena, NULL);

        return whole < above ? whole : above;
}

/* A refusal is right only where whole extents, the free ones and those that the limits still
 * allow, could not have held the block. */
static void judge_refusal(unsigned i)
{
        const struct quota *of = asks[i].request.quota;
        const struct account *a = &of->account;
        uint64_t need = to_extents(asks[i].request.n_bytes), own = arena_releasable(of->arena, NULL);
        uint64_t after =
                a->charged_bytes - (own < need ? own : need) + need; /* own extents are released first */
        const struct quota *other = of == q ? neighbour : q;
        uint64_t before = a->charged_bytes > a->reserve_bytes ? a->charged_bytes : a->reserve_bytes;
        uint64_t more = after > before ? after - before : 0;

        if (asks[i].result == -EDQUOT)
                ck_assert_uint_gt(after, a->limit_bytes);
        else
                ck_assert_uint_gt(more, p.pool.limit_bytes - p.pool.committed_bytes + can_yield(other));
}

/* The property through the daemon's reclaim steps: two tenants, random blocks, the limit of each and of
 * both in the way. */
LOOP_TEST(fragmentation_never_refuses, 6)
{
        static const struct {
                uint64_t pool, limit, reserve, largest;
                enum device_share share;
        } kinds[] = {
                { 24 * E, 12 * E, 0, 3 * E, DEVICE_SHARE_FD },
                { 16 * E, 14 * E, 0, 6 * E, DEVICE_SHARE_FD },
                { 16 * E, 16 * E, 6 * E, 4 * E, DEVICE_SHARE_FD },
                { 24 * E, 12 * E, 0, 3 * E, DEVICE_SHARE_CUDA_IPC },
                { 30 * E, 28 * E, 0, 14 * E, DEVICE_SHARE_CUDA_IPC },
                { 30 * E, 30 * E, 6 * E, 9 * E, DEVICE_SHARE_CUDA_IPC },
        };
        unsigned n_refusals = 0, n_served = 0;
        uint64_t seed = 7;

        p.share = kinds[_i].share;
        open_both(kinds[_i].pool, kinds[_i].limit, kinds[_i].reserve);
        for (unsigned step = 0; step < 6000; step++) {
                unsigned i = (unsigned)below(&seed, 40);
                uint64_t n = 256 * (1 + below(&seed, kinds[_i].largest / 256 / (1 + step % 3 * 3)));

                if (asks[i].n_done == 1 && asks[i].result == 0) {
                        give_back(i);
                        continue;
                }
                asks[i].n_done = 0;
                wait_for(i, below(&seed, 2) == 0 ? q : neighbour, n);
                run_all();
                ck_assert_uint_eq(asks[i].n_done, 1);
                n_served += asks[i].result == 0;
                if (asks[i].result == 0)
                        continue;
                n_refusals++;
                judge_refusal(i);
        }
        ck_assert_uint_gt(n_refusals, 50);
        ck_assert_uint_gt(n_served, 2000);
        check();
}

TEST(free_extents_of_another_tenant_are_released)
{
        open_both(4 * E, 4 * E, 0);
        take(0, neighbour, 3 * E);
        take(1, neighbour, E);
        wait_for(2, q, E);
        settle();
        assert_done(2, -ENOMEM);
        ck_assert(!asks[2].request.device_failed);
        give_back(0);
        take(3, q, 2 * E);
        ck_assert_uint_eq(neighbour->account.charged_bytes, 2 * E); /* no more than was missing */
        ck_assert_uint_eq(p.pool.charged_bytes, 4 * E);
}

TEST(reserve_of_another_tenant)
{
        open_both(4 * E, 4 * E, 3 * E);
        take(0, neighbour, 3 * E);
        give_back(0);
        wait_for(1, q, 2 * E);
        settle();
        assert_done(1, -ENOMEM); /* giving it back would free nothing for us */
        ck_assert_uint_eq(neighbour->account.charged_bytes, 3 * E);
        ck_assert_uint_eq(device.n_destroys, 0);
        take(2, q, E);
}

TEST(test_timeout)
{
        open_both(2 * E, 2 * E, 0);
        p.reclaim_timeout_ms = 40;
        take(0, neighbour, 2 * E);
        quota_closing(neighbour);
        wait_for(1, q, E);
        settle();
        ck_assert_uint_eq(asks[1].n_done, 0);
        ck_assert_uint_ne(q->queue.blocked_ms, 0);
        wait_for(2, q, E); /* looks again, too early */
        settle();
        ck_assert_uint_eq(n_done, 1);
        partition_tick(q->partition); /* also too early */
        settle();
        ck_assert_uint_eq(n_done, 1);
        still_clock_pass(60);
        partition_tick(q->partition);
        settle();
        assert_done(1, -ENOMEM);
        assert_done(2, -ENOMEM);
        ck_assert_uint_ge(quota_n_refusals(q), 1);
        ck_assert_uint_eq(q->queue.blocked_ms, 0);
        wait_for(3, q, E); /* has its own time */
        settle();
        ck_assert_uint_eq(asks[3].n_done, 0);
        quota_closed(neighbour);
        settle();
        assert_done(3, -ENOMEM);
}

/* A request that passes the first one does not extend its time, and has as long itself. */
/* ---- what a free costs ------------------------------------------------------ */

#define N_SMALL   1024u
#define N_WAITING 100u

/* Small blocks fill q, and many of its tenant wait for large ones. */
static void fill_and_wait(struct quota *waits, uint64_t n_bytes)
{
        for (unsigned i = 0; i < N_SMALL; i++)
                take(i, q, 4 * E / N_SMALL);
        for (unsigned i = N_SMALL; i < N_SMALL + N_WAITING; i++)
                wait_up_to(i, waits, n_bytes, 60000);
        settle();
        ck_assert_uint_eq(n_done, N_SMALL);
        ck_assert(partition_is_blocked(&p));
}

/* Every other one: no two pieces that are free join. Returns how many waiting requests were looked at. */
static uint64_t free_every_other(void)
{
        uint64_t n_looks = p.queue.n_looks;

        for (unsigned i = 0; i < N_SMALL; i += 2) {
                give_back(i);
                while (!TAILQ_EMPTY(&p.queue.due))
                        quota_turn(TAILQ_FIRST(&p.queue.due));
        }
        return p.queue.n_looks - n_looks;
}

static void refuse_all(void)
{
        still_clock_pass(150000);
        for (unsigned i = 0; i < 5; i++) {
                partition_tick(&p);
                settle();
                still_clock_pass(150000);
        }
        for (unsigned i = N_SMALL; i < N_SMALL + N_WAITING; i++)
                ck_assert_uint_eq(asks[i].n_done, 1);
        ck_assert(!partition_is_blocked(&p));
        ck_assert(TAILQ_EMPTY(&p.queue.waiting));
}

TEST(free_that_makes_no_room)
{
        open_one(4 * E, 20000);
        fill_and_wait(q, E);
        ck_assert_uint_le(free_every_other(), 2 * N_WAITING); /* one round, not one for each free */
        ck_assert(partition_is_deferred(&p));
        still_clock_pass(QUOTA_ROUND_MS); /* no tick, which comes later */
        partition_look_again(&p);
        ck_assert(!TAILQ_EMPTY(&p.queue.due));
        settle();
        ck_assert(!partition_is_deferred(&p));
        for (unsigned i = 1; i < N_SMALL; i += 2)
                give_back(i);
        settle(); /* no tick: now some fit */
        for (unsigned i = N_SMALL; i < N_SMALL + 4; i++)
                assert_done(i, 0);
        refuse_all();
}

TEST(free_that_makes_no_room_for_another_tenant)
{
        open_both(4 * E, 4 * E, 0);
        fill_and_wait(neighbour, E);
        ck_assert_uint_gt(p.claims.n, 0);
        ck_assert_uint_le(free_every_other(), 2 * N_WAITING);
        still_clock_pass(50);
        give_back(1); /* a look at once, in vain */
        settle();
        for (unsigned i = 3; i < N_SMALL; i += 2)
                give_back(i);
        settle();
        ck_assert(partition_is_deferred(&p)); /* extents are free by now: the next look has them given back */
        still_clock_pass(QUOTA_ROUND_MS);
        partition_look_again(&p);
        settle();
        assert_done(N_SMALL, 0);
        ck_assert(!partition_is_deferred(&p));
        refuse_all();
}

/* Looks of all steps at other quotas are at those with something to give. */
TEST(test_idle_quotas_are_not_visited)
{
        struct quota *idle[N_IDLE];
        uint64_t n_visits;

        open_both(4 * E, 4 * E, 0);
        for (unsigned i = 0; i < N_IDLE; i++)
                ck_assert_int_eq(open_quota("idle", 4 * E, 0, 1, &idle[i]), 0);
        take(0, neighbour, 4 * E);
        wait_for(1, q, E); /* the first look may be at all of them */
        settle();
        assert_done(1, -ENOMEM);

        n_visits = p.lists.n_visits;
        wait_for(2, q, E);
        settle();
        assert_done(2, -ENOMEM);
        (void)quota_obtainable(q);
        give_back(0);
        (void)quota_obtainable(q);
        wait_for(3, q, E); /* takes what the neighbour has free */
        settle();
        (void)quota_obtainable(q);
        assert_done(3, 0);
        ck_assert_uint_gt(p.lists.n_visits, n_visits);
        ck_assert_uint_le(p.lists.n_visits - n_visits, 20);
        for (unsigned i = 0; i < N_IDLE; i++)
                quota_free(idle[i]);
}

TEST(timeout_applies_to_the_first_request)
{
        bfc_handle h;
        uint64_t offset;

        open_both(3 * E, 3 * E, 0);
        p.reclaim_timeout_ms = 100;
        take(0, neighbour, 2 * E);
        take(1, q, 256);
        quota_closing(neighbour);
        wait_for(2, q, E);
        settle();
        for (unsigned i = 3; i < 10; i++) {
                still_clock_pass(20);
                wait_for(i, q, 256);
                partition_tick(q->partition);
                settle();
                assert_done(i, 0);
        }
        assert_done(2, -ENOMEM);

        wait_for(11, q, E);
        settle();
        still_clock_pass(60);
        wait_for(12, q, E);
        settle();
        quota_cancel(&asks[11].request);
        ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), 0); /* no request is due */
        quota_dealloc(q, h, 256, 256);
        settle();
        ck_assert_uint_eq(asks[12].n_done, 0);
        still_clock_pass(60);
        partition_tick(q->partition);
        settle();
        ck_assert_uint_eq(asks[12].n_done, 0); /* 60 ms of its 100 */
        still_clock_pass(60);
        partition_tick(q->partition);
        settle();
        assert_done(12, -ENOMEM);
        quota_closed(neighbour);
}

/* Ten thousand that wait: a turn looks at so many and no more. */
TEST(test_budget)
{
        bfc_handle h;
        uint64_t offset;
        unsigned turns = 0;

        open_one(2 * E, 20000);
        take(0, q, 2 * E);
        quota_closing(q);
        for (unsigned i = 1; i < N_ASKS; i++)
                wait_for(i, q, 256);
        settle();
        ck_assert_uint_eq(n_done, 1);
        give_back(0);
        while (!TAILQ_EMPTY(&p.queue.due)) {
                unsigned before = n_done;

                ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), QUOTA_WAIT); /* behind the others */
                quota_turn(q);
                ck_assert_uint_le(n_done - before, TURN);
                turns++;
        }
        ck_assert_uint_eq(n_done, N_ASKS);
        ck_assert_uint_ge(turns, (N_ASKS - 1) / TURN);
        ck_assert_uint_le(turns, N_ASKS / TURN + 2);
        for (unsigned i = 1; i < N_ASKS; i++)
                ck_assert_uint_eq(asks[i].place, i);
        quota_closed(q);
}

/* Refusals cost more than checks; requests that do not fit are checked in turns, too. */
TEST(test_budget_of_refusals)
{
        unsigned turns = 0;

        open_one(2 * E, 20000);
        take(0, q, 2 * E);
        quota_closing(q);
        for (unsigned i = 1; i < 2000; i++)
                wait_for(i, q, 256);
        while (!TAILQ_EMPTY(&p.queue.due)) {
                quota_turn(q);
                turns++;
        }
        ck_assert_uint_ge(turns, 1999 / TURN);
        ck_assert_uint_eq(n_done, 1);
        quota_closed(q);
        while (!TAILQ_EMPTY(&p.queue.due)) {
                unsigned before = n_done;

                quota_turn(q);
                ck_assert_uint_le(n_done - before, TURN / 8);
        }
        ck_assert_uint_eq(n_done, 2000);
        ck_assert_uint_eq(quota_n_refusals(q), 1999);
        assert_done(1999, -EDQUOT);
}

TEST(test_explain)
{
        char sentence[512];

        open_both(4 * E, 3 * E, E);
        take(0, q, E + 256);
        quota_explain(&(struct quota_request){ .quota = q, .n_bytes = 777216 }, -EDQUOT, sentence,
                      sizeof(sentence));
        ck_assert_str_eq(sentence,
                         "tenant 'alpha' is at its limit in 'shelf': asked 759.0 KiB, 4.0 MiB of 6.0 MiB "
                         "reserved, 2.0 MiB in blocks, largest free piece 2.0 MiB");
        quota_explain(&(struct quota_request){ .quota = q, .n_bytes = 777216 }, -ENOMEM, sentence,
                      sizeof(sentence));
        ck_assert_str_eq(sentence,
                         "partition 'shelf' is full: asked 759.0 KiB, 6.0 MiB of 8.0 MiB reserved or "
                         "guaranteed; tenant 'alpha': 4.0 MiB of 6.0 MiB reserved, 2.0 MiB in blocks, "
                         "largest free piece 2.0 MiB");
}

TEST(test_preallocated)
{
        p.preallocate = true;
        account_init_root(&p.pool, 4 * E);
        fake_device_fail_make(&device, 3, -ENOMEM);
        ck_assert_int_eq(open_quota("alpha", 4 * E, 4 * E, 10, &q), 0);
        ck_assert_int_eq(quota_back_early(q), -ENOMEM);
        q = quota_free(q);
        ck_assert_uint_eq(device.n_live, 0);
        ck_assert_uint_eq(p.pool.committed_bytes, 0);
        ck_assert_uint_eq(p.n_quotas, 0);
        ck_assert_int_eq(open_quota("alpha", 4 * E, 4 * E, 10, &q), 0);
        ck_assert_int_eq(quota_back_early(q), 0);
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E);
        ck_assert_int_eq(quota_join(q), 0);
        take(0, q, 4 * E);
        give_back(0);
        quota_leave(q);
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, 4 * E); /* stays until the end */
}

TEST(test_no_room_for_a_quota)
{
        account_init_root(&p.pool, 2 * E);
        ck_assert_int_eq(open_quota("alpha", 4 * E, 3 * E, 10, &q), -ENOMEM);
        ck_assert_int_eq(open_quota("alpha", E, 2 * E, 10, &q), -EINVAL);
        ck_assert_uint_eq(p.n_quotas, 0);
}

/* ---- growths beside each other -------------------------------------------------- */

static unsigned n_running(const struct quota *of)
{
        const struct running_growth *growth;
        unsigned n = 0;

        TAILQ_FOREACH(growth, &of->growth.running, link)
        n++;
        return n;
}

/* Turns until no quota is due; no device call. */
static void turn_all(void)
{
        while (!TAILQ_EMPTY(&p.queue.due))
                quota_turn(TAILQ_FIRST(&p.queue.due));
        check();
}

static void poll_one(void)
{
        ck_assert_uint_eq(worker_poll(worker), 1);
        check();
}

TEST(growths_run_beside_each_other)
{
        open_one(16 * E, 100);
        wait_for(0, q, 6 * E);
        wait_for(1, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        ck_assert_uint_eq(q->account.charged_bytes, 7 * E);
        poll_one(); /* the smaller one first */
        assert_done(1, 0);
        ck_assert_uint_eq(asks[0].n_done, 0);
        wait_for(2, q, 2 * E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        settle();
        assert_done(0, 0);
        assert_done(2, 0);
}

/* The limit holds for all of them together. What lacks room waits for them, and is refused in the end. */
TEST(growths_beside_each_other_are_all_charged)
{
        open_one(8 * E, 100);
        wait_for(0, q, 5 * E);
        wait_for(1, q, 2 * E);
        wait_for(2, q, 2 * E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        ck_assert_uint_eq(q->account.charged_bytes, 7 * E);
        poll_one();
        turn_all();
        ck_assert_uint_eq(asks[2].n_done, 0);
        settle();
        assert_done(0, 0);
        assert_done(1, 0);
        assert_done(2, -EDQUOT);
        ck_assert_uint_eq(quota_life(q)->peak_reserved, 7 * E);
}

/* If the device fails, the request that lacked room has it. */
TEST(failed_growth_leaves_its_room)
{
        open_one(8 * E, 100);
        wait_for(0, q, 5 * E);
        wait_for(1, q, 2 * E);
        wait_for(2, q, 6 * E);
        turn_all();
        fake_device_fail_make(&device, 4, -ENOMEM); /* of the larger one */
        poll_one();
        turn_all();
        poll_one();
        assert_done(0, -ENOMEM);
        ck_assert(asks[0].request.device_failed);
        assert_done(1, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 2 * E);
        settle();
        assert_done(2, 0);
}

/* Small requests share the extents of a small growth, and do not wait for a large one. */
TEST(small_requests_do_not_wait_for_a_large_growth)
{
        open_one(16 * E, 1000);
        wait_for(0, q, 4 * E + E / 2);
        turn_all();
        for (unsigned i = 1; i < 20; i++)
                wait_for(i, q, 1024);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        poll_one();
        turn_all();
        for (unsigned i = 1; i < 20; i++)
                assert_done(i, 0);
        ck_assert_uint_eq(asks[0].n_done, 0);
        ck_assert_uint_eq(device.n_makes, 1);
        settle();
        ck_assert_uint_eq(device.n_makes, 6);
}

/* Requests that together need all of the limit have it, also where each ends within an extent. */
TEST(growths_beside_each_other_waste_no_extents)
{
        open_one(13 * E, 100);
        for (unsigned i = 0; i < 10; i++)
                wait_for(i, q, E + E / 4);
        settle();
        for (unsigned i = 0; i < 10; i++)
                assert_done(i, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 13 * E);
}

/* Large ones do not wait for the rest of an extent. */
TEST(large_growths_do_not_wait_for_each_other)
{
        open_one(60 * E, 100);
        wait_for(0, q, 19 * E + E / 4);
        wait_for(1, q, 19 * E + E / 4);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        settle();
        assert_done(0, 0);
        assert_done(1, 0);
}

/* They wait where the limit has no room for a growth of their own. */
TEST(request_at_the_limit_waits_for_what_a_growth_leaves)
{
        open_one(5 * E, 100);
        wait_for(0, q, 4 * E + E / 2);
        turn_all();
        wait_for(1, q, E / 2);
        turn_all();
        ck_assert_uint_eq(n_running(q), 1);
        settle();
        assert_done(1, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 5 * E);
        ck_assert_uint_eq(quota_n_refusals(q), 0);
}

TEST(growths_do_not_exceed_max_blocks)
{
        open_one(8 * E, 2);
        for (unsigned i = 0; i < 3; i++)
                wait_for(i, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        settle();
        assert_done(0, 0);
        assert_done(1, 0);
        assert_done(2, -EDQUOT);
        ck_assert_uint_eq(device.n_makes, 2);
}

/* What is made for a request that is gone serves others. */
TEST(one_of_two_growths_is_cancelled)
{
        open_one(7 * E, 100);
        wait_for(0, q, 4 * E);
        wait_for(1, q, 2 * E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        quota_cancel(&asks[0].request);
        wait_for(2, q, 3 * E); /* the limit lacks room for another growth */
        turn_all();
        ck_assert_uint_eq(n_running(q), 2);
        settle();
        ck_assert_uint_eq(asks[0].n_done, 0);
        assert_done(1, 0);
        assert_done(2, 0);
        ck_assert_uint_eq(device.n_makes, 6);
}

TEST(sessions_end_between_two_growths)
{
        open_one(7 * E, 100);
        wait_for(0, q, 4 * E);
        wait_for(1, q, 2 * E);
        turn_all();
        quota_cancel(&asks[1].request);
        quota_cancel(&asks[0].request);
        quota_leave(q);
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        poll_one();
        ck_assert(!quota_is_gone(q));
        settle();
        ck_assert_uint_eq(asks[0].n_done + asks[1].n_done, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 0);
        ck_assert_uint_eq(device.n_live, 0);
}

/* A lower limit ends no growth, and nothing is charged beyond it afterwards. */
TEST(limit_is_lowered_between_two_growths)
{
        const struct quota_limits lower = { .limit_bytes = 3 * E, .max_sessions = 2, .max_blocks = 100 };

        open_one(8 * E, 100);
        wait_for(0, q, 4 * E);
        wait_for(1, q, 2 * E);
        turn_all();
        poll_one();
        ck_assert_int_eq(quota_prepare_limit(q, lower.limit_bytes), 0);
        quota_set(q, &lower);
        partition_set_limit(&p, 8 * E);
        wait_for(2, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 1);
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        settle();
        assert_done(0, 0);
        assert_done(2, -EDQUOT);
        give_back(0);
        quota_release_idle(q);
        settle();
        ck_assert_uint_eq(q->account.charged_bytes, 2 * E);
}

TEST(partition_drains_between_two_growths)
{
        open_one(8 * E, 100);
        wait_for(0, q, 4 * E);
        wait_for(1, q, 2 * E);
        wait_for(2, q, 4 * E);
        turn_all();
        poll_one();
        assert_done(1, 0);
        partition_set_draining(&p, true);
        turn_all();
        assert_done(2, -EBUSY);
        ck_assert_uint_eq(asks[0].n_done, 0);
        ck_assert(!quota_is_drained(q));
        settle();
        assert_done(0, -EBUSY);
        give_back(1);
        quota_release_idle(q);
        settle();
        ck_assert(quota_is_drained(q));
        partition_set_draining(&p, false);
        take(3, q, 8 * E);
}

/* Each growth begins in a turn of its own, so quotas that share a partition take turns. */
TEST(growths_of_quotas_begin_in_turns)
{
        open_both(4 * E, 4 * E, 0);
        for (unsigned i = 0; i < 3; i++)
                wait_for(i, q, E);
        for (unsigned i = 3; i < 6; i++)
                wait_for(i, neighbour, E);
        for (unsigned i = 0; i < 2; i++) {
                quota_turn(q);
                quota_turn(neighbour);
        }
        ck_assert_uint_eq(n_running(q), 2);
        ck_assert_uint_eq(n_running(neighbour), 2);
        settle();
        assert_done(1, 0);
        assert_done(4, 0);
        assert_done(2, -ENOMEM);
        assert_done(5, -ENOMEM);
}

/* While own extents are released for the first request, whose room is charged, the next one grows by what is left. */
TEST(request_grows_while_own_extents_are_released_for_another)
{
        open_one(8 * E, 100);
        take_two_apart(4);
        wait_for(4, q, 3 * E);
        turn_all();
        ck_assert_uint_eq(arena_leaving_bytes(q->arena), 2 * E);
        ck_assert_uint_eq(q->account.charged_bytes, 5 * E);
        wait_for(5, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 1);
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        while (asks[5].n_done == 0)
                worker_poll(worker);
        settle();
        assert_done(5, 0);
        assert_done(4, 0);
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        ck_assert_uint_eq(quota_life(q)->peak_reserved, 6 * E);
        ck_assert_uint_eq(q->growth.held.n_bytes, 0);
}

/* But not by the room that the first one has. */
TEST(request_does_not_take_the_room_of_released_extents)
{
        open_one(6 * E, 100);
        take_two_apart(4);
        wait_for(4, q, 4 * E);
        turn_all();
        ck_assert_uint_eq(q->account.charged_bytes, 6 * E);
        wait_for(5, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 0);
        settle();
        assert_done(4, 0);
        assert_done(5, -EDQUOT);
}

/* Nor does one grow beside another while growths of the tenant pause. It waits, so a later refusal does not name the pause. */
TEST(request_does_not_grow_beside_another_in_a_pause)
{
        open_one(8 * E, 100);
        take_two_apart(4);
        wait_for(4, q, 3 * E);
        turn_all();
        quota_pause_growth(q);
        wait_for(5, q, E);
        turn_all();
        ck_assert_uint_eq(n_running(q), 0);
        ck_assert_uint_eq(asks[5].n_done, 0);
        ck_assert(!asks[5].request.device_failed);
        q->growth.paused_until_ms = 0;
        settle();
        assert_done(4, 0);
        assert_done(5, 0);
}

/* ---- at random -------------------------------------------------------------- */

#define N_MODEL 48u

/* What the limits say, at each moment: all that is charged is in extents, in growths that run, or held for the first. */
static void judge_charges(const struct quota *of)
{
        struct bfc_stats stats;
        uint64_t n_bytes = 0;

        arena_read_stats(of->arena, &stats);
        ck_assert_uint_le(of->account.charged_bytes, of->account.limit_bytes);
        ck_assert_uint_eq(of->account.charged_bytes, stats.bytes_reserved + of->growth.held.n_bytes);
        for (unsigned i = 0; i < N_MODEL; i++) {
                const struct ask *x = &asks[i];

                if (x->request.quota != of || x->n_done != 1 || x->result != 0)
                        continue;
                n_bytes += x->request.n_bytes;
                for (unsigned k = 0; k < i; k++)
                        ck_assert(asks[k].request.quota != of || asks[k].n_done != 1 || asks[k].result != 0 ||
                                  asks[k].offset + asks[k].request.n_bytes <= x->offset ||
                                  x->offset + x->request.n_bytes <= asks[k].offset);
        }
        ck_assert_uint_eq(of->all.bytes_in_use, n_bytes);
}

/* Requests, cancels, frees, turns and device calls of two tenants in any order, with several growths at once. A request
 * ends, however many others come after it. */
LOOP_TEST(growths_at_random, 8)
{
        bool waits[N_MODEL] = { false };
        unsigned since[N_MODEL] = { 0 }, n_most = 0, n_served = 0, n_refused = 0, n_beside = 0;
        uint64_t seed = 100 + (uint64_t)_i;

        open_both((_i % 2 ? 40 : 28) * E, 24 * E, _i % 4 == 3 ? 8 * E : 0);
        p.share = DEVICE_SHARE_FD;
        for (unsigned step = 0; step < 12000; step++) {
                unsigned i = (unsigned)below(&seed, N_MODEL), n = n_running(q) + n_running(neighbour);
                struct quota *of = below(&seed, 2) == 0 ? q : neighbour;
                bool is_large = below(&seed, 8) == 0;
                uint64_t n_bytes;

                switch (below(&seed, 8)) {
                case 0:
                case 1:
                        if (waits[i])
                                break;
                        if (asks[i].n_done == 1 && asks[i].result == 0) {
                                give_back(i);
                                break;
                        }
                        asks[i].n_done = 0;
                        n_bytes = 256 * (1 + below(&seed, (is_large ? 8 * E : E + E / 4) / 256));
                        wait_for(i, of, below(&seed, 2) ? to_extents(n_bytes) : n_bytes);
                        waits[i] = true;
                        since[i] = step;
                        break;
                case 2:
                        if (!waits[i] || below(&seed, 8) > 0)
                                break;
                        quota_cancel(&asks[i].request);
                        waits[i] = false;
                        break;
                case 3:
                        if (below(&seed, 40) == 0)
                                fake_device_fail_make(&device, 1 + (unsigned)below(&seed, 8), -ENOMEM);
                        break;
                case 4:
                        if (below(&seed, 4) == 0)
                                worker_poll(worker);
                        break;
                case 5:
                        still_clock_pass(below(&seed, 20));
                        partition_tick(&p);
                        break;
                default:
                        if (!TAILQ_EMPTY(&p.queue.due))
                                quota_turn(below(&seed, 2) ? TAILQ_FIRST(&p.queue.due)
                                                           : TAILQ_LAST(&p.queue.due, quota_list));
                        break;
                }
                for (unsigned k = 0; k < N_MODEL; k++) {
                        if (!waits[k])
                                continue;
                        ck_assert_msg(step - since[k] < 3000, "request %u waits since step %u", k, since[k]);
                        if (asks[k].n_done == 0)
                                continue;
                        ck_assert_uint_eq(asks[k].n_done, 1);
                        ck_assert(asks[k].result == 0 || asks[k].result == -EDQUOT ||
                                  asks[k].result == -ENOMEM);
                        n_served += asks[k].result == 0;
                        n_refused += asks[k].result < 0;
                        waits[k] = false;
                }
                n_most = n > n_most ? n : n_most;
                n_beside += n_running(q) > 1;
                ck_assert_uint_le(p.pool.committed_bytes, p.pool.limit_bytes);
                judge_charges(q);
                judge_charges(neighbour);
                if (step % 16 == 0)
                        check();
        }
        settle();
        for (unsigned k = 0; k < N_MODEL; k++)
                ck_assert_uint_eq(waits[k] && asks[k].n_done == 0, 0);
        ck_assert_uint_gt(n_most, 3);
        ck_assert_uint_gt(n_beside, 200);
        ck_assert_uint_gt(n_served, 500);
        ck_assert_uint_gt(n_refused, 20);
        device.fail_make = 0;
}

/* ---- how long requests waited ----------------------------------------------- */

static const struct grants_of_way *granted(const struct quota *of, enum grant_way way)
{
        return &of->grants.ways[way];
}

TEST(grants_of_backed_and_new_memory)
{
        bfc_handle h;
        uint64_t offset;

        open_one(4 * E, 100);
        wait_for(0, q, E);
        ck_assert_uint_eq(q->queue.n_bytes, E);
        still_clock_pass(3);
        settle();
        assert_done(0, 0);
        ck_assert_uint_eq(q->queue.n_bytes, 0);
        ck_assert_uint_eq(granted(q, GRANT_GROWN)->n[3], 1); /* above 2 ms, up to 10 ms */
        ck_assert_uint_eq(granted(q, GRANT_GROWN)->ns, 3000000);
        give_back(0);
        ck_assert_int_eq(quota_alloc(q, 256, false, &h, &offset), 0); /* at once */
        quota_dealloc(q, h, 256, 256);
        ck_assert_uint_eq(granted(q, GRANT_BACKED)->n[0], 1);
        ck_assert_uint_eq(granted(q, GRANT_BACKED)->ns, 0);
        /* It comes behind another one, and shares its extent. */
        wait_for(1, q, E + 256);
        wait_for(2, q, 256);
        still_clock_pass(1000000);
        settle();
        ck_assert_uint_eq(granted(q, GRANT_BACKED)->n[GRANT_CLASSES - 1], 1);
        ck_assert_uint_eq(granted(q, GRANT_GROWN)->n[GRANT_CLASSES - 1], 1);
        ck_assert_uint_eq(granted(q, GRANT_RECLAIMED)->ns + granted(q, GRANT_WAITED)->ns, 0);
}

TEST(grants_of_reclaimed_memory)
{
        open_both(4 * E, 4 * E, 0);
        take(0, q, E);
        take(1, q, E);
        take(2, neighbour, E);
        take(3, neighbour, E);
        give_back(0);
        give_back(3);
        wait_for(4, q, 2 * E);
        still_clock_pass(1);
        settle();
        assert_done(4, 0);
        ck_assert_uint_eq(granted(q, GRANT_RECLAIMED)->n[2], 1);
        ck_assert_uint_eq(granted(q, GRANT_RECLAIMED)->ns, 1000000);
        ck_assert_uint_eq(granted(q, GRANT_GROWN)->n[0], 2);
}

TEST(grants_of_requests_that_wait)
{
        open_both(2 * E, 2 * E, 0);
        take(0, neighbour, 2 * E);
        wait_up_to(1, q, E, 5000);
        wait_for(2, q, 256); /* refused: it does not wait */
        settle();
        ck_assert_uint_eq(asks[1].n_done, 0);
        ck_assert_uint_eq(q->queue.n_bytes, E + (asks[2].n_done ? 0 : 256));
        still_clock_pass(1500);
        give_back(0);
        settle();
        assert_done(1, 0);
        ck_assert_uint_eq(granted(q, GRANT_WAITED)->n[7], 1); /* above 1 s, up to 5 s */
        ck_assert_uint_eq(q->queue.n_bytes, 0);
        wait_up_to(3, q, 2 * E, 5000);
        quota_cancel(&asks[3].request);
        ck_assert_uint_eq(q->queue.n_bytes, 0);
}

/* ---- lists of them ------------------------------------------------------------ */

static void wait_long(unsigned i, struct quota *of, uint64_t n_bytes, uint32_t wait_ms)
{
        wait_up_to(i, of, n_bytes, wait_ms);
        settle();
        ck_assert_uint_eq(asks[i].n_done, 0);
}

static struct quota_waiting waiting_at(const struct quota *of, uint64_t position)
{
        struct quota_waiting w = { .request = NULL };

        while (w.position < position)
                ck_assert(quota_next_waiting(of, &w));
        return w;
}

TEST(waiting_requests_are_listed_in_order)
{
        struct quota_waiting w = { .request = NULL };

        open_both(4 * E, 3 * E, 0);
        ck_assert(!quota_next_waiting(q, &w));
        take(0, neighbour, 2 * E);
        take(1, q, 2 * E);
        wait_long(2, q, 2 * E, 100000); /* above its own limit by one extent */
        still_clock_pass(5000);
        wait_long(3, q, E, 100000);
        wait_long(4, neighbour, E, 100000); /* the partition is full */

        w = waiting_at(q, 1);
        ck_assert_ptr_eq(w.request, &asks[2].request);
        ck_assert_uint_eq(w.partition_position, 1);
        ck_assert_uint_eq(w.lacking_bytes, E);
        ck_assert_uint_eq(w.waited_ms, 5000);
        ck_assert_uint_eq(w.left_ms, 95000);
        ck_assert_uint_eq(w.estimate_ms, RETURNS_UNKNOWN);
        ck_assert(quota_next_waiting(q, &w));
        ck_assert_ptr_eq(w.request, &asks[3].request);
        ck_assert_uint_eq(w.partition_position, 0);
        ck_assert_uint_eq(w.lacking_bytes, 2 * E);
        ck_assert_uint_eq(w.waited_ms, 0);
        ck_assert(!quota_next_waiting(q, &w));
        w = waiting_at(neighbour, 1);
        ck_assert_uint_eq(w.partition_position, 2);
        ck_assert_uint_eq(w.lacking_bytes, E);
        quota_cancel(&asks[3].request);
        quota_cancel(&asks[2].request);
        quota_cancel(&asks[4].request);
}

/* What came back in the partition in the last minutes tells when the rest may. */
TEST(estimates_follow_the_returned_memory)
{
        open_both(4 * E, 4 * E, 0);
        take(0, neighbour, E);
        take(1, neighbour, 3 * E);
        wait_long(2, q, 4 * E, 600000);
        ck_assert_uint_eq(waiting_at(q, 1).lacking_bytes, 4 * E);
        ck_assert_uint_eq(waiting_at(q, 1).estimate_ms, RETURNS_UNKNOWN);
        give_back(0);
        still_clock_pass(QUOTA_ROUND_MS);
        partition_look_again(&p);
        quota_release_idle(neighbour);
        settle();
        ck_assert_uint_eq(waiting_at(q, 1).lacking_bytes, 3 * E);
        /* An extent in this half of the window, which has just begun: three take three halves. */
        ck_assert_uint_eq(waiting_at(q, 1).estimate_ms, 3 * RETURNS_HALF_MS);
        still_clock_pass(RETURNS_HALF_MS + RETURNS_HALF_MS / 2);
        ck_assert_uint_eq(waiting_at(q, 1).estimate_ms, 3 * (RETURNS_HALF_MS + RETURNS_HALF_MS / 2));
        still_clock_pass(RETURNS_HALF_MS);
        ck_assert_uint_eq(waiting_at(q, 1).estimate_ms, RETURNS_UNKNOWN);
        quota_cancel(&asks[2].request);
}

TEST(a_long_queue_is_listed_in_part)
{
        struct quota_waiting w = { .request = NULL };
        unsigned n = 0;

        open_one(E, 20000);
        take(0, q, E);
        for (unsigned i = 1; i <= QUOTA_WAITING_SHOWN + 10; i++)
                wait_up_to(i, q, E, 600000);
        settle();
        while (quota_next_waiting(q, &w))
                n++;
        ck_assert_uint_eq(n, QUOTA_WAITING_SHOWN);
        for (unsigned i = 1; i <= QUOTA_WAITING_SHOWN + 10; i++)
                quota_cancel(&asks[i].request);
}

/* A request that becomes the first late has no more time than if it had been the first. */
TEST(a_wait_is_not_begun_again_by_becoming_the_first)
{
        open_one(2 * E, 20000);
        p.reclaim_timeout_ms = 100;
        take(0, q, 2 * E);
        wait_long(1, q, E, 10000);
        wait_long(2, q, E, 10000);
        still_clock_pass(9000);
        quota_cancel(&asks[1].request);
        partition_tick(&p);
        settle();
        ck_assert_uint_eq(asks[2].n_done, 0);
        ck_assert_uint_le(waiting_at(q, 1).left_ms, 1400); /* four steps of 100 ms, and the rest */
        still_clock_pass(1400);
        partition_tick(&p);
        settle();
        assert_done(2, -EDQUOT);
}
