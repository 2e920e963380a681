/* Limits under load: never one byte above, refusals that say why, and the
 * partition's own invariant, the sum over its tenants of max(reserve, charged)
 * <= its limit.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/tools.h"

#define N_PROCESSES 32
#define LIMIT       (64 * MIB)
#define MAX_HELD    (4 * MIB) /* each; all of them together: twice the limit */
#define MAX_BLOCKS  64

struct totals {
        char socket[96];
        atomic_bool is_over;
        _Atomic uint64_t n_held; /* bytes held by all: an account that is not the daemon's */
        _Atomic uint64_t n_allocs;
        _Atomic uint64_t n_refusals;
        atomic_uint next_number;
};

struct member {
        struct totals *totals;
        bfc_client *client;
        unsigned short random[3];
        unsigned number;
        uint64_t n_held;
        size_t n_blocks;
        struct {
                uint64_t *ptr;
                size_t n_bytes;
        } blocks[MAX_BLOCKS];
};

/* The first and last word name the owner of the block. */
static void mark(uint64_t *ptr, size_t n_bytes, uint64_t value)
{
        ptr[0] = value;
        memcpy((char *)ptr + n_bytes - sizeof(value), &value, sizeof(value));
}

static bool is_marked(const uint64_t *ptr, size_t n_bytes, uint64_t value)
{
        return ptr[0] == value &&
               memcmp((const char *)ptr + n_bytes - sizeof(value), &value, sizeof(value)) == 0;
}

static uint64_t mark_of(const struct member *m, const void *ptr)
{
        return ((uint64_t)m->number << 56) ^ (uintptr_t)ptr;
}

static void release_block(struct member *m, size_t at)
{
        size_t n_bytes = m->blocks[at].n_bytes;
        uint64_t *ptr = m->blocks[at].ptr;

        REQUIRE(is_marked(ptr, n_bytes, mark_of(m, ptr)), "process %u: a block was overwritten", m->number);
        /* Before the free, so that the account never shows more than is held. */
        atomic_fetch_sub(&m->totals->n_held, rounded(n_bytes));
        REQUIRE(bfc_free(m->client, ptr) == 0, "%s", bfc_last_error());
        m->n_held -= rounded(n_bytes);
        m->blocks[at] = m->blocks[--m->n_blocks];
}

static void allocate_block(struct member *m)
{
        size_t n_bytes = 16 + (size_t)nrand48(m->random) % (512 * KIB);
        uint64_t held;
        void *ptr = NULL;
        int r = bfc_malloc(m->client, n_bytes, &ptr);

        if (r < 0) {
                const char *why = bfc_last_error();

                REQUIRE(r == -EDQUOT, "malloc: %d (%s)", r, why);
                REQUIRE(has_stats(why) && strstr(why, "limit"), "the refusal says only: '%s'", why);
                atomic_fetch_add(&m->totals->n_refusals, 1);
                if (m->n_blocks > 0)
                        release_block(m, (size_t)nrand48(m->random) % m->n_blocks);
                return;
        }
        held = atomic_fetch_add(&m->totals->n_held, rounded(n_bytes)) + rounded(n_bytes);
        REQUIRE(held <= LIMIT, "the processes hold %llu bytes", (unsigned long long)held);
        mark(ptr, n_bytes, mark_of(m, ptr));
        atomic_fetch_add(&m->totals->n_allocs, 1);
        m->n_held += rounded(n_bytes);
        m->blocks[m->n_blocks].ptr = ptr;
        m->blocks[m->n_blocks++].n_bytes = n_bytes;
}

static void be_one_of_many(void *arg)
{
        static struct member m;

        m.totals = arg;
        m.number = atomic_fetch_add(&m.totals->next_number, 1);
        m.random[0] = (unsigned short)(m.number + 1);
        m.client = child_client_open(m.totals->socket, NULL);
        while (!atomic_load(&m.totals->is_over)) {
                bool full = m.n_blocks == MAX_BLOCKS || m.n_held > MAX_HELD - 512 * KIB - GRANULE;

                if (m.n_blocks > 0 && (full || nrand48(m.random) % 5 < 2))
                        release_block(&m, (size_t)nrand48(m.random) % m.n_blocks);
                else
                        allocate_block(&m);
        }
        atomic_fetch_sub(&m.totals->n_held, m.n_held);
        bfc_disconnect(m.client); /* with all that it still holds */
}

static void assert_within_limits(const Bfcd__Statistics *f)
{
        ck_assert_uint_eq(f->bytes_limit, LIMIT);
        ck_assert_uint_le(f->bytes_in_use, f->bytes_reserved);
        ck_assert_uint_le(f->bytes_reserved, f->bytes_limit);
        ck_assert_uint_le(f->bytes_requested, f->bytes_in_use);
        ck_assert_uint_le(f->peak_bytes_in_use, f->bytes_limit);
        ck_assert_uint_le(f->peak_bytes_reserved, f->bytes_limit);
}

TEST(thirty_two_processes_never_exceed_a_quota)
{
        static const struct rig_config config; /* 64 MiB for red */
        struct rig *rig = rig_start(&config);
        struct totals *totals = shared_memory(sizeof(*totals));
        int64_t end_ms = clock_ms() + (int64_t)(test_seconds(suite_is_long() ? 5 : 1) * 1000);
        pid_t pids[N_PROCESSES];
        uint64_t n_samples = 0;
        Bfcd__Statistics f;

        strcpy(totals->socket, rig->socket);
        for (unsigned i = 0; i < N_PROCESSES; i++)
                pids[i] = child_start(be_one_of_many, totals);
        /* for some time, and until the limit was reached */
        while (clock_ms() < end_ms || n_samples <= 100 || totals->n_refusals == 0 ||
               totals->n_allocs <= 1000) {
                f = rig_stats(rig, "red", "train");
                assert_within_limits(&f);
                n_samples++;
                usleep(500);
        }
        atomic_store(&totals->is_over, true);
        for (unsigned i = 0; i < N_PROCESSES; i++)
                child_join(pids[i]);
        ck_assert_uint_eq(totals->n_held, 0);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        f = rig_stats(rig, "red", "train");
        assert_within_limits(&f);
        ck_assert_uint_ge(f.num_refusals, 1);
        ck_assert_uint_gt(f.peak_bytes_in_use, LIMIT / 2); /* they did press against it */
        printf("# %llu mallocs, %llu refusals, %llu samples, peak in use %llu, reserved %llu of %llu\n",
               (unsigned long long)totals->n_allocs, (unsigned long long)totals->n_refusals,
               (unsigned long long)n_samples, (unsigned long long)f.peak_bytes_in_use,
               (unsigned long long)f.peak_bytes_reserved, (unsigned long long)f.bytes_limit);
        rig_stop(rig);
}

/* ---- the last byte -------------------------------------------------------- */

TEST(the_last_granule_is_granted_and_not_one_more)
{
        static const struct rig_config config;
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *most, *last, *no = NULL;

        ck_assert_ok(bfc_malloc(client, LIMIT - GRANULE, &most));
        ck_assert_int_eq(bfc_malloc(client, GRANULE + 1, &no), -EDQUOT);
        ck_assert(has_stats(bfc_last_error()));
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "limit"));
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "red"));
        ck_assert_ok(bfc_malloc(client, 1, &last));
        ck_assert_int_eq(bfc_malloc(client, 1, &no), -EDQUOT);
        ck_assert_ptr_null(no);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, LIMIT);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, LIMIT);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_refusals, 2);
        bfc_disconnect(client);
        rig_stop(rig);
}

/* A refusal changes nothing: the same request fits as soon as there is room. */
TEST(a_refused_request_costs_nothing)
{
        static const struct rig_config config;
        struct rig *rig = rig_start(&config);
        bfc_client *client = client_open(rig, NULL, NULL);
        void *half, *no, *big;

        ck_assert_ok(bfc_malloc(client, 40 * MIB, &half));
        for (unsigned i = 0; i < 1000; i++)
                ck_assert_int_eq(bfc_malloc(client, 30 * MIB, &no), -EDQUOT);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 40 * MIB);
        ck_assert_ok(bfc_free(client, half));
        ck_assert_ok(bfc_malloc(client, 60 * MIB, &big));
        bfc_disconnect(client);
        rig_stop(rig);
}

/* ---- the partition -------------------------------------------------------- */

static const struct rig_config overcommitted = {
        .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
        .tenants =
                TENANT("red", "@UID@", "train, limit: 64MiB") TENANT("blue", "@UID@", "train, limit: 64MiB"),
};

RIG_TEST(a_full_partition_is_reported_as_such, overcommitted)
{
        bfc_client *red = client_open(rig, "red", NULL), *blue = client_open(rig, "blue", NULL);
        void *p, *q, *no = NULL;

        ck_assert_ok(bfc_malloc(red, 48 * MIB, &p));
        ck_assert_int_eq(bfc_malloc(blue, 32 * MIB, &no), -ENOMEM);
        ck_assert(has_stats(bfc_last_error()));
        ck_assert_ptr_nonnull(strstr(bfc_last_error(), "train"));
        ck_assert_int_eq(bfc_malloc(blue, 100 * MIB, &no), -EDQUOT); /* its own limit comes first */
        ck_assert_ok(bfc_malloc(blue, 16 * MIB, &q));
        ck_assert_int_eq(bfc_malloc(blue, 1, &no), -ENOMEM);
        ck_assert_int_eq(bfc_malloc(red, 1, &no), -ENOMEM);
        ck_assert_ptr_null(no);
        bfc_disconnect(red);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_ok(bfc_malloc(blue, 48 * MIB, &p));
        bfc_disconnect(blue);
}

TEST(a_reserve_is_kept_free_for_its_tenant)
{
        static const struct rig_config config = {
                .partitions = "      - {name: train, limit: 64MiB, growth: on-demand}\n",
                .tenants = TENANT("red", "@UID@", "train, limit: 64MiB")
                        TENANT("green", "@UID@", "train, limit: 32MiB, reserve: 16MiB"),
        };
        struct rig *rig = rig_start(&config);
        bfc_client *red = client_open(rig, "red", NULL), *green = client_open(rig, "green", NULL);
        uint64_t taken = 0;
        void *p, *no;
        int r;

        ck_assert_uint_eq(rig_stats(rig, "green", "train").bytes_guaranteed, 16 * MIB);
        while ((r = bfc_malloc(red, 1 * MIB, &p)) == 0)
                taken += MIB;
        ck_assert_int_eq(r, -ENOMEM);
        ck_assert_uint_eq(taken, 48 * MIB);
        ck_assert_ok(bfc_malloc(green, 10 * MIB, &p)); /* within its reserve */
        ck_assert_ok(bfc_malloc(green, 6 * MIB, &p));
        ck_assert_int_eq(bfc_malloc(green, 2 * MIB, &no), -ENOMEM); /* above its reserve it borrows */
        ck_assert_int_eq(bfc_malloc(red, 2 * MIB, &no), -ENOMEM);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_reserved, 48 * MIB);
        ck_assert_uint_eq(rig_stats(rig, "green", "train").bytes_reserved, 16 * MIB);
        bfc_disconnect(red);
        ck_assert(WAIT_FOR(rig_charge(rig, "red", "train") == 0, SETTLE_MS));
        ck_assert_ok(bfc_malloc(green, 16 * MIB, &p)); /* up to its limit */
        ck_assert_int_eq(bfc_malloc(green, 1, &no), -EDQUOT);
        bfc_disconnect(green);
        rig_stop(rig);
}

struct pressing {
        char socket[96];
        const char *tenant;
        atomic_bool *is_over; /* shared */
        _Atomic uint64_t *ret_n_bytes;
};

/* Takes as much as it gets, gives it all back, and again. */
static void press(void *arg)
{
        struct pressing *p = arg;
        bfc_client *client = child_client_open(p->socket, p->tenant);
        void *blocks[64];

        while (!atomic_load(p->is_over)) {
                size_t n = 0;

                while (n < 64 && bfc_malloc(client, 1 * MIB, blocks + n) == 0)
                        n++;
                atomic_fetch_add(p->ret_n_bytes, n * MIB);
                while (n > 0)
                        REQUIRE(bfc_free(client, blocks[--n]) == 0, "%s", bfc_last_error());
                bfc_disconnect(client); /* releases its blocks to the partition */
                client = child_client_open(p->socket, p->tenant);
        }
        bfc_disconnect(client);
}

/* Two tenants fight for one partition; the sum of their charges never exceeds it. */
RIG_TEST(two_tenants_never_exceed_the_partition, overcommitted)
{
        _Atomic uint64_t *taken = shared_memory(2 * sizeof(*taken));
        atomic_bool *is_over = shared_memory(sizeof(*is_over));
        struct pressing red = { .tenant = "red", .is_over = is_over, .ret_n_bytes = taken };
        struct pressing blue = { .tenant = "blue", .is_over = is_over, .ret_n_bytes = taken + 1 };
        int64_t end_ms = clock_ms() + (int64_t)(test_seconds(suite_is_long() ? 5 : 1) * 400);
        pid_t pids[2];

        strcpy(red.socket, rig->socket);
        strcpy(blue.socket, rig->socket);
        pids[0] = child_start(press, &red);
        pids[1] = child_start(press, &blue);
        while (clock_ms() < end_ms || taken[0] == 0 || taken[1] == 0) {
                Bfcd__Reply *page;
                uint64_t sum = 0;

                ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__TENANTS, 0, &page), 0);
                for (size_t i = 0; i < page->list->n_tenants; i++) /* of one moment: one page */
                        sum += page->list->tenants[i]->stats->bytes_reserved;
                ck_assert_uint_le(sum, 64 * MIB);
                bfcd__reply__free_unpacked(page, NULL);
                ck_assert_int_eq(raw_list(rig->admin, BFCD__LIST__KIND__PARTITIONS, 0, &page), 0);
                ck_assert_uint_le(page->list->partitions[0]->stats->bytes_reserved, 64 * MIB);
                bfcd__reply__free_unpacked(page, NULL);
                usleep(500);
        }
        atomic_store(is_over, true);
        child_join(pids[0]);
        child_join(pids[1]);
}
