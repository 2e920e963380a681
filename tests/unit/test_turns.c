/* Turns of tenants at a device that is slow: each call of it waits until the test lets it go on. What is shown
 * is order: nothing here depends on how long anything takes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/arena.h"

#include <errno.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <string.h>

#include "tests/fake_device.h"
#include "tests/suite.h"
#include "tests/checks.h"

#define E         (2 * MIB)
#define N_EXTENTS 40u

struct grown {
        bool is_done;
        int result;
        bfc_handle handle;
};

/* One tenant. */
struct side {
        struct account account;
        struct arena *arena;
        uint32_t quota;
        struct grown grown;
        uint64_t released_bytes;
};

static struct fake_device device;
static struct worker *worker;
static struct ledger *ledger;
static struct account pool;
static struct side a, b;
static sem_t arrived, gate, notified;
static atomic_bool is_open; /* calls of the device do not wait */

static void wait_at_gate(void)
{
        if (is_open)
                return;
        sem_post(&arrived);
        sem_wait(&gate);
}

static void on_notify(void *userdata)
{
        sem_post(userdata);
}

static void on_grown(void *userdata, int result, bfc_handle handle, uint64_t offset)
{
        struct side *s = userdata;

        (void)offset;
        ck_assert(!s->grown.is_done);
        s->grown = (struct grown){ true, result, handle };
}

static void on_released(void *userdata, uint64_t n_bytes)
{
        ((struct side *)userdata)->released_bytes += n_bytes;
}

static void check(void)
{
        const char *why = "";

        ck_assert_msg(arena_check(a.arena, &why) == 0, "a: %s", why);
        ck_assert_msg(arena_check(b.arena, &why) == 0, "b: %s", why);
        ck_assert_msg(ledger_check(ledger, &why) == 0, "%s", why);
}

static void side_open(struct side *s, const char *name)
{
        struct ledger_quota facts = { .partition = "p", .extent_bytes = E };
        static struct partition partition;
        struct arena_options o = {
                .partition = &partition,
                .limit_bytes = N_EXTENTS * E,
                .sizes.extent_bytes = E,
        };

        partition = (struct partition){
                .ledger = ledger, .device = &device.device, .worker = worker, .share = DEVICE_SHARE_FD
        };
        *s = (struct side){ .released_bytes = 0 };
        strcpy(facts.tenant, name);
        ck_assert_int_eq(ledger_quota_add(ledger, &facts, &s->quota), 0);
        o.quota = s->quota;
        ck_assert_int_eq(account_init(&s->account, &pool, o.limit_bytes, 0), 0);
        ck_assert_int_eq(arena_new(&o, &s->arena), 0);
}

static void side_close(struct side *s)
{
        s->arena = arena_free(s->arena);
        ck_assert_uint_eq(s->account.charged_bytes, 0);
        account_deinit(&s->account);
        ledger_quota_clear(ledger, s->quota);
}

static void setup_threads(unsigned n_threads)
{
        struct ledger_limits limits = {
                .n_quotas = 2, .n_sessions = 2, .n_extents = 512, .n_exports = 8, .n_blocks = 2
        };

        fake_device_init(&device, MIB);
        device.on_make = device.on_destroy = wait_at_gate;
        sem_init(&arrived, 0, 0);
        sem_init(&gate, 0, 0);
        sem_init(&notified, 0, 0);
        is_open = false;
        ck_assert_int_eq(worker_new(n_threads, on_notify, &notified, &worker), 0);
        ck_assert_int_eq(ledger_new(&limits, &ledger), 0);
        account_init_root(&pool, 2 * N_EXTENTS * E);
        side_open(&a, "a");
        side_open(&b, "b");
}

static void setup(void)
{
        setup_threads(1);
}

static void setup_two(void)
{
        setup_threads(2);
}

static void let_pass(unsigned n)
{
        while (n-- > 0)
                sem_post(&gate);
}

/* From now on nothing waits. */
static void open_gate(void)
{
        is_open = true;
        let_pass(2); /* as many as there are threads */
        worker_drain(worker);
        check();
}

static void teardown(void)
{
        open_gate();
        side_close(&a);
        side_close(&b);
        ck_assert_uint_eq(device.n_live, 0);
        ledger = ledger_free(ledger);
        worker = worker_free(worker);
        sem_destroy(&arrived);
        sem_destroy(&gate);
        sem_destroy(&notified);
}

FIXTURE(one_thread, setup, teardown);

static void grow(struct side *s, unsigned n_extents)
{
        struct bfc_growth plan;
        struct charge charge;
        uint64_t missing;

        s->grown.is_done = false;
        ck_assert_int_eq(arena_plan(s->arena, n_extents * E, UINT64_MAX, &plan), 0);
        ck_assert_int_eq(charge_take(&s->account, plan.new_bytes, &charge, &missing), 0);
        ck_assert_int_eq(arena_grow(s->arena, &plan, &charge, on_grown, s), 0);
}

/* Free extents, from a gate that is open for them. */
static void grow_and_free(struct side *s, unsigned n_extents)
{
        is_open = true;
        grow(s, n_extents);
        worker_drain(worker);
        ck_assert_int_eq(s->grown.result, 0);
        ck_assert_int_eq(arena_dealloc(s->arena, s->grown.handle), 0);
        is_open = false;
}

static void release(struct side *s)
{
        s->released_bytes = 0;
        ck_assert_uint_gt(arena_release(s->arena, UINT64_MAX, NULL, on_released, s), 0);
}

static void poll_until_grown(const struct side *s)
{
        while (!s->grown.is_done) {
                sem_wait(&notified);
                (void)worker_poll(worker);
                check();
        }
}

/* One extent of b's beside many of a's, which are being made. */
TEST(test_growth_beside_growth)
{
        grow(&a, N_EXTENTS);
        sem_wait(&arrived);
        grow(&b, 1);
        let_pass(2); /* a's, and b's */
        poll_until_grown(&b);
        ck_assert_int_eq(b.grown.result, 0);
        ck_assert(!a.grown.is_done);
        sem_wait(&arrived);
        sem_wait(&arrived);
        ck_assert_uint_eq(device.n_live, 2);
        open_gate();
        ck_assert(a.grown.is_done && a.grown.result == 0);
        ck_assert_uint_eq(arena_n_extents(a.arena), N_EXTENTS);
        ck_assert_int_eq(arena_dealloc(a.arena, a.grown.handle), 0);
}

/* Beside many that are given back; a's own growth does not wait for all of them, either. How many were given back before
 * depends on the time that each turn took. */
TEST(test_growth_beside_release)
{
        grow_and_free(&a, N_EXTENTS - 1);
        release(&a);
        sem_wait(&arrived);
        grow(&b, 1);
        grow(&a, 1);
        while (!a.grown.is_done || !b.grown.is_done) {
                let_pass(1);
                sem_wait(&arrived);
                (void)worker_poll(worker);
        }
        ck_assert_int_eq(a.grown.result, 0);
        ck_assert_int_eq(b.grown.result, 0);
        ck_assert_uint_eq(a.released_bytes, 0);
        ck_assert_uint_lt(device.n_destroys, N_EXTENTS - 1);
        open_gate();
        ck_assert_uint_eq(a.released_bytes, (N_EXTENTS - 1) * E);
        ck_assert_uint_eq(arena_n_extents(a.arena), 1);
}

/* What one gives back, another's release does not keep: b's is there while a's goes on. */
TEST(test_release_beside_release)
{
        grow_and_free(&a, N_EXTENTS);
        grow_and_free(&b, 1);
        release(&a);
        sem_wait(&arrived);
        release(&b);
        let_pass(2);
        while (b.released_bytes == 0) {
                sem_wait(&notified);
                (void)worker_poll(worker);
        }
        ck_assert_uint_eq(a.released_bytes, 0);
        ck_assert_uint_eq(b.account.charged_bytes, 0);
        open_gate();
        ck_assert_uint_eq(a.account.charged_bytes, 0);
}

/* All or none, in pieces: a's third extent cannot be made, and b's is granted before a's first two are undone. */
TEST(test_undone_in_turns)
{
        grow(&a, N_EXTENTS);
        sem_wait(&arrived);
        let_pass(1);
        sem_wait(&arrived);
        let_pass(1);
        sem_wait(&arrived);
        fake_device_fail_make(&device, 1, -ENOMEM);
        grow(&b, 1);
        let_pass(2);
        poll_until_grown(&b);
        ck_assert_int_eq(b.grown.result, 0);
        ck_assert(!a.grown.is_done);
        sem_wait(&arrived);
        sem_wait(&arrived);
        ck_assert_uint_eq(device.n_makes, 4);
        ck_assert_uint_eq(device.n_live, 3);
        open_gate();
        ck_assert(a.grown.is_done);
        ck_assert_int_eq(a.grown.result, -ENOMEM);
        ck_assert_uint_eq(a.account.charged_bytes, 0);
        ck_assert_uint_eq(arena_n_extents(a.arena), 0);
        ck_assert_uint_eq(device.n_live, 1);
}

/* The end of the process does not wait for what is not made yet. */
TEST(test_ending)
{
        grow(&a, N_EXTENTS);
        sem_wait(&arrived);
        device_end(&device.device);
        open_gate();
        ck_assert_int_eq(a.grown.result, -ECANCELED);
        ck_assert_uint_eq(device.n_makes, 1);
        ck_assert_uint_eq(device.n_live, 0);
        ck_assert_uint_eq(a.account.charged_bytes, 0);
}

FIXTURE(two_threads, setup_two, teardown);

/* The second thread serves b while a call for a hangs, and a's lane has no second call. */
TEST(test_hanging_call)
{
        grow(&a, N_EXTENTS);
        sem_wait(&arrived);
        is_open = true; /* only that call still waits */
        grow(&b, 3);
        poll_until_grown(&b);
        ck_assert_int_eq(b.grown.result, 0);
        ck_assert(!a.grown.is_done);
        ck_assert_uint_eq(device.n_makes, 3);
        open_gate();
        ck_assert_int_eq(a.grown.result, 0);
        ck_assert_uint_eq(device.n_live, N_EXTENTS + 3);
}
