/* Parks and wakes where the daemon has no memory for itself: whatever fails, the block is as before or as
 * requested, and the next request succeeds. Groups that wake. On sessions without sockets.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <limits.h>
#include <stdlib.h>

#include "daemon/session/report.h"
#include "tests/suite.h"
#include "tests/unit/sessions.h"
#include "tests/unit/still_clock.h"

#define BLOCK (10 * MIB)

/* More than any request here makes. */
#define MAX_ALLOCS 40u

/* Of the tenant, partition 0 is p, and 1 is where copies go. */
static const char config_text[] =
        "devices: [{id: host, size: 256MiB, partitions: [{name: p, limit: 64MiB}, {name: copies, limit: 64MiB}]}]\n"
        "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p, limit: 32MiB}, {partition: copies}]}]\n";

/* ---- without memory -------------------------------------------------------------- */

static unsigned n_allocs_left = UINT_MAX; /* UINT_MAX: any number */

void *__real_malloc(size_t n_bytes);
void *__real_calloc(size_t n, size_t n_bytes);
void *__wrap_malloc(size_t n_bytes);
void *__wrap_calloc(size_t n, size_t n_bytes);

static bool has_memory(void)
{
        if (n_allocs_left == UINT_MAX)
                return true;
        if (n_allocs_left == 0)
                return false;
        n_allocs_left--;
        return true;
}

void *__wrap_malloc(size_t n_bytes)
{
        return has_memory() ? __real_malloc(n_bytes) : NULL;
}

void *__wrap_calloc(size_t n, size_t n_bytes)
{
        return has_memory() ? __real_calloc(n, n_bytes) : NULL;
}

/* ---- what the tests have in common -------------------------------------------------- */

static struct peer *x, *y; /* y: NULL, or it shares the block */
static uint64_t block;
static bool in_extent; /* the block */

static struct peer *open_parking(void)
{
        struct peer *p = peer_new(b, 1, false);

        p->wants_events = p->auto_ack = true;
        return say_hello(p);
}

static void unmap_all(void)
{
        while (x->n_retires > 0 || (y && y->n_retires > 0)) {
                peer_retired_all(x);
                if (y)
                        peer_retired_all(y);
                settle();
        }
}

/* What the request is answered where the daemon has memory for so many allocations. */
static int answer_with(unsigned n_allocs, struct peer *p, uint64_t (*send)(struct peer *p))
{
        uint64_t id;
        int r;

        n_allocs_left = n_allocs;
        id = send(p);
        peer_settle(b);
        n_allocs_left = UINT_MAX;
        settle();
        unmap_all();
        r = peer_error(p, id);
        peer_forget_replies(p);
        return r;
}

static int answer(struct peer *p, uint64_t (*send)(struct peer *p))
{
        return answer_with(UINT_MAX, p, send);
}

static uint64_t send_park(struct peer *p)
{
        Bfcd__Park body = BFCD__PARK__INIT;
        Bfcd__Request request = REQUEST(PARK, park, &body);

        body.block_id = block;
        body.partition = 1;
        return peer_post(p, &request);
}

static uint64_t send_wake(struct peer *p)
{
        Bfcd__Wake body = BFCD__WAKE__INIT;
        Bfcd__Request request = REQUEST(WAKE, wake, &body);

        body.n_block_ids = 1;
        body.block_ids = &block;
        return peer_post(p, &request);
}

static uint64_t send_malloc(struct peer *p)
{
        return peer_malloc_flags(p, 0, BLOCK,
                                 (uint64_t)BFCD__MALLOC_FLAG__MALLOC_FLAG_PARKABLE |
                                         (in_extent ? BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT : 0));
}

static uint64_t in_use(uint32_t partition)
{
        Bfcd__Statistics f = BFCD__STATISTICS__INIT;

        report_quota_stats(x->session->shares[partition].quota, &f);
        return f.bytes_in_use;
}

static void assert_awake(void)
{
        ck_assert_uint_eq(in_use(0), BLOCK);
        ck_assert_uint_eq(x->session->shares[0].quota->account.own_bytes, BLOCK);
        ck_assert_uint_eq(in_use(1), 0);
}

static void assert_parked(void)
{
        ck_assert_uint_eq(in_use(0), 0);
        ck_assert_uint_eq(x->session->shares[0].quota->account.own_bytes, 0);
        ck_assert_uint_eq(in_use(1), BLOCK);
}

/* kind: 0, 1 or 4: the session's own block; 2, 3 or 5: a shared one. Of 1 and 3 the device does not empty mappings. 4 and 5 are in one
 * extent. */
#define N_KINDS 6

static void start(int kind)
{
        uint64_t id;

        if (kind == 1 || kind == 3)
                sessions_start_sticky(config_text);
        else
                sessions_start(config_text);
        x = open_parking();
        y = NULL;
        in_extent = kind >= 4;
        id = send_malloc(x);
        settle();
        ck_assert_int_eq(peer_error(x, id), 0);
        block = peer_reply(x, id)->block->block_id;
        if (kind < 2 || kind == 4)
                return;
        y = open_parking();
        ck_assert_int_eq(peer_error(x, peer_publish(x, block, "shared")), 0);
        ck_assert_int_eq(peer_error(y, peer_attach(y, "shared", 0)), 0);
        ck_assert_int_eq(answer(y, send_park), 0);
}

static void end(void)
{
        if (y)
                must_close(y);
        must_close(x);
        sessions_end();
}

/* ---- tests ---------------------------------------------------------------------------- */

LOOP_TEST(a_wake_without_memory_can_be_repeated, N_KINDS)
{
        start(_i);
        for (unsigned n = 0; n <= MAX_ALLOCS; n++) {
                ck_assert_int_eq(answer(x, send_park), 0);
                assert_parked();
                if (answer_with(n, x, send_wake) != 0) {
                        ck_assert_uint_lt(n, MAX_ALLOCS);
                        ck_assert_int_eq(answer(x, send_wake), 0);
                }
                assert_awake();
        }
        end();
}

static int copy_without_memory(struct device *d, const struct device_copy *copies, size_t n)
{
        (void)d;
        (void)copies;
        (void)n;
        n_allocs_left = 0;
        return -EIO;
}

/* Also what has to be undone then needs no memory. */
LOOP_TEST(a_copy_that_fails_leaves_the_block_parked, N_KINDS)
{
        const struct device_ops *ops;
        struct device_ops failing;

        start(_i);
        ck_assert_int_eq(answer(x, send_park), 0);
        ops = b->devices[0].device->ops;
        failing = *ops;
        failing.copy = copy_without_memory;
        b->devices[0].device->ops = &failing;
        ck_assert_int_eq(answer(x, send_wake), EIO);
        b->devices[0].device->ops = ops;
        assert_parked();
        ck_assert_int_eq(answer(x, send_wake), 0);
        assert_awake();
        end();
}

/* The request is withdrawn while the extents are made. */
LOOP_TEST(nobody_waits_for_the_wake_any_more, N_KINDS)
{
        Bfcd__Cancel body = BFCD__CANCEL__INIT;
        Bfcd__Request request = REQUEST(CANCEL, cancel, &body);

        start(_i);
        ck_assert_int_eq(answer(x, send_park), 0);
        body.request_id = send_wake(x);
        while (TAILQ_EMPTY(&x->session->shares[0].quota->growth.running))
                broker_turn(b);
        (void)peer_post(x, &request);
        n_allocs_left = 0;
        peer_settle(b);
        n_allocs_left = UINT_MAX;
        settle();
        assert_parked();
        ck_assert_int_eq(answer(x, send_wake), 0);
        assert_awake();
        end();
}

/* ---- groups ------------------------------------------------------------------------------ */

#define GROUP 3u

/* Room for one group. */
static const char tight_config_text[] =
        "devices: [{id: host, size: 256MiB, partitions: [{name: p, limit: 30MiB}, {name: copies, limit: 64MiB}]}]\n"
        "tenants: [{name: a, match: {uid: 1}, quotas: [{partition: p}, {partition: copies}]}]\n";

/* A session with blocks that it wakes together. */
struct group {
        struct peer *peer;
        uint64_t blocks[GROUP];
        uint64_t wake; /* the request */
};

static void park_one(struct group *g, unsigned i)
{
        uint64_t id;

        block = g->blocks[i];
        id = send_park(g->peer);
        settle();
        ck_assert_int_eq(peer_error(g->peer, id), 0);
}

static void group_park(struct group *g)
{
        for (unsigned i = 0; i < GROUP; i++)
                park_one(g, i);
        peer_retired_all(g->peer);
        settle();
}

static void group_start(struct group *g)
{
        g->peer = open_parking();
        for (unsigned i = 0; i < GROUP; i++) {
                uint64_t id = send_malloc(g->peer);

                settle();
                ck_assert_int_eq(peer_error(g->peer, id), 0);
                g->blocks[i] = peer_reply(g->peer, id)->block->block_id;
        }
}

static void group_wake(struct group *g)
{
        Bfcd__Wake body = BFCD__WAKE__INIT;
        Bfcd__Request request = REQUEST(WAKE, wake, &body);

        peer_forget_replies(g->peer);
        body.n_block_ids = GROUP;
        body.block_ids = g->blocks;
        body.wait_ms = 60000;
        g->wake = peer_post(g->peer, &request);
        g->peer->next_id += GROUP - 1;
        settle();
}

static unsigned group_n_awake(struct group *g)
{
        unsigned n = 0;

        for (unsigned i = 0; i < GROUP; i++)
                n += peer_reply(g->peer, g->wake + i) && peer_error(g->peer, g->wake + i) == 0;
        return n;
}

static void pass(uint64_t ms)
{
        still_clock_pass(ms);
        broker_tick(b);
        settle();
}

/* The extents from which one block of a group was parked leave after timeouts.reclaim. Nothing of the group wakes before
 * that: two groups that have a part of their blocks would wait for each other. */
LOOP_TEST(a_group_waits_until_the_old_extents_of_all_have_left, GROUP)
{
        struct group late, other, *first, *second;

        sessions_start_sticky(tight_config_text);
        in_extent = true;
        group_start(&other);
        group_park(&other);
        group_start(&late);
        for (unsigned i = 0; i < GROUP; i++)
                if (i != (unsigned)_i)
                        park_one(&late, i);
        peer_retired_all(late.peer);
        park_one(&late, (unsigned)_i);
        ck_assert_uint_gt(late.peer->n_retires, 0);
        group_wake(&late);
        group_wake(&other);
        for (unsigned i = 0; i < 4; i++)
                pass(201);
        ck_assert_uint_eq(group_n_awake(&late) + group_n_awake(&other), 0);
        peer_retired_all(late.peer);
        for (unsigned i = 0; i < 4; i++)
                pass(201);
        first = group_n_awake(&late) > 0 ? &late : &other;
        second = first == &late ? &other : &late;
        ck_assert_uint_eq(group_n_awake(first), GROUP);
        ck_assert_uint_eq(group_n_awake(second), 0);
        group_park(first);
        for (unsigned i = 0; i < 4; i++)
                pass(201);
        ck_assert_uint_eq(group_n_awake(second), GROUP);
        must_close(late.peer);
        must_close(other.peer);
        sessions_end();
}
