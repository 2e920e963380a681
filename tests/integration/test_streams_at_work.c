/* Allocation on streams against a real daemon, with slow work that finds out when memory is
 * another's too early.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block has a number, and its first work writes that into every granule of it; all later
 * work, some of it behind the free, reads it there. Whoever is given the memory writes another
 * number, so too early a reuse shows, wherever the two overlap. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/harness.h"
#include "tests/integration/work.h"

#define N_STREAMS 4
#define N_THREADS 8
#define N_SLOTS   8
#define LIMIT     (64 * MIB) /* red's in train */

static unsigned n_wrong; /* atomic: granules in which somebody else had written */
static uint64_t last_number;

struct look {
        volatile uint64_t *at;
        size_t n_granules;
        uint64_t number;
        unsigned *is_written; /* atomic; NULL: this one reads */
};

static void write_number(volatile uint64_t *at, size_t n_granules, uint64_t number)
{
        for (size_t i = 0; i < n_granules; i++)
                at[i * (GRANULE / 8)] = number;
}

static unsigned count_wrong(volatile uint64_t *at, size_t n_granules, uint64_t number)
{
        unsigned n = 0;

        for (size_t i = 0; i < n_granules; i++)
                n += at[i * (GRANULE / 8)] != number;
        return n;
}

static void do_look(void *data)
{
        struct look *look = data;

        if (look->is_written) {
                write_number(look->at, look->n_granules, look->number);
                __atomic_store_n(look->is_written, 1, __ATOMIC_RELEASE);
        } else {
                __atomic_add_fetch(&n_wrong, count_wrong(look->at, look->n_granules, look->number),
                                   __ATOMIC_RELAXED);
        }
        free(look);
}

/* A block as its owner has it. */
struct held {
        char *p;
        size_t n_granules;
        uint64_t number;
        int stream;
        unsigned *is_written;
};

static void put_look(struct work_stream *stream, const struct held *h, bool writes)
{
        struct look *look = calloc(1, sizeof(*look));

        REQUIRE(look, "no memory");
        *look = (struct look){ (volatile uint64_t *)(void *)h->p, h->n_granules, h->number,
                               writes ? h->is_written : NULL };
        work_put(stream, do_look, look);
}

struct party {
        bfc_client *client;
        struct work_stream *streams[N_STREAMS];
        unsigned n_steps;
};

static uintptr_t number_of(const struct party *party, int i)
{
        return work_stream_number(party->streams[i]);
}

static unsigned next(unsigned *seed)
{
        *seed = *seed * 1103515245u + 12345u;
        return *seed >> 16;
}

/* ---- what a thread does --------------------------------------------------------- */

static void begin_one(const struct party *party, struct held *h, unsigned *seed, unsigned *is_written)
{
        size_t n_bytes = next(seed) % 8 == 0 ? next(seed) * 64 : next(seed);
        void *p;
        int r;

        h->stream = (int)(next(seed) % N_STREAMS);
        r = bfc_malloc_async(party->client, n_bytes + 1, number_of(party, h->stream), &p);
        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
        if (r < 0)
                return;
        h->p = p;
        h->n_granules = n_bytes / GRANULE + 1;
        h->number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        h->is_written = is_written;
        __atomic_store_n(is_written, 0, __ATOMIC_RELAXED);
        put_look(party->streams[h->stream], h, true);
        put_look(party->streams[h->stream], h, false);
}

/* Another stream reads it, which is in no order with the one that wrote it: so once that is done. */
static void use_elsewhere(const struct party *party, const struct held *h, unsigned *seed)
{
        int other = (int)(next(seed) % N_STREAMS);

        if (!__atomic_load_n(h->is_written, __ATOMIC_ACQUIRE))
                return;
        REQUIRE(bfc_record_stream(party->client, h->p, number_of(party, other)) == 0, "%s", bfc_last_error());
        put_look(party->streams[other], h, false);
}

static void end_one(const struct party *party, struct held *h, unsigned *seed)
{
        unsigned how = next(seed) % 8;
        int stream = how == 0 ? (int)(next(seed) % N_STREAMS) : h->stream;

        put_look(party->streams[h->stream], h, false);
        if (how == 1)
                REQUIRE(bfc_free(party->client, h->p) == 0, "%s", bfc_last_error());
        else
                REQUIRE(bfc_free_async(party->client, h->p, number_of(party, stream)) == 0, "%s",
                        bfc_last_error());
        h->p = NULL;
}

/* The processor is nobody's stream: it has what it is given at once. */
static void use_at_once(const struct party *party, unsigned *seed)
{
        struct held h = { .n_granules = next(seed) % 256 + 1 };
        void *p;

        if (bfc_malloc(party->client, h.n_granules * GRANULE, &p) < 0)
                return;
        h.number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        write_number((volatile uint64_t *)p, h.n_granules, h.number);
        __atomic_add_fetch(&n_wrong, count_wrong((volatile uint64_t *)p, h.n_granules, h.number),
                           __ATOMIC_RELAXED);
        if (next(seed) % 2)
                REQUIRE(bfc_free(party->client, p) == 0, "%s", bfc_last_error());
        else
                REQUIRE(bfc_free_async(party->client, p, number_of(party, (int)(next(seed) % N_STREAMS))) ==
                                0,
                        "%s", bfc_last_error());
}

struct thread {
        const struct party *party;
        unsigned seed;
        unsigned is_written[N_SLOTS];
};

/* The words in which work says that it has written are used again when all of it is done. */
static void *live(void *arg)
{
        struct thread *t = arg;
        struct held slots[N_SLOTS] = { { 0 } };

        for (unsigned i = 0; i < t->party->n_steps; i++) {
                unsigned at = next(&t->seed) % N_SLOTS;
                struct held *h = &slots[at];

                if (!h->p)
                        begin_one(t->party, h, &t->seed, &t->is_written[at]);
                else if (next(&t->seed) % 3 == 0)
                        use_elsewhere(t->party, h, &t->seed);
                else if (__atomic_load_n(h->is_written, __ATOMIC_ACQUIRE))
                        end_one(t->party, h, &t->seed);
                if (i % 16 == 0)
                        use_at_once(t->party, &t->seed);
                if (i % 64 == 0)
                        REQUIRE(bfc_trim(t->party->client, SIZE_MAX) == 0, "%s", bfc_last_error());
        }
        for (int i = 0; i < N_SLOTS; i++)
                if (slots[i].p)
                        end_one(t->party, &slots[i], &t->seed);
        return NULL;
}

static bfc_client *open_with(const char *socket, bool cache)
{
        struct bfc_options o = { .struct_size = sizeof(o),
                                 .socket = socket,
                                 .flags = cache ? 0 : BFC_NO_CACHE,
                                 .cache_idle_bytes = UINT64_MAX };
        bfc_client *client = NULL;

        setenv("BFC_CACHE", cache ? "on" : "off", 1);
        ck_assert_msg(bfc_connect(&o, &client) == 0, "%s", bfc_last_error());
        return client;
}

static void party_start(struct party *party, const struct rig *rig, bool cache, unsigned delay_us)
{
        n_wrong = 0;
        work_setup(delay_us);
        party->client = open_with(rig->socket, cache);
        for (int i = 0; i < N_STREAMS; i++)
                party->streams[i] = work_stream_new();
}

/* Everything goes back. An event that could not be recorded before is work, too. */
static void party_end(struct party *party)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };

        for (int i = 0; i < N_STREAMS; i++)
                work_wait(party->streams[i]);
        ck_assert(WAIT_FOR(bfc_trim(party->client, SIZE_MAX) == 0 && bfc_stats(party->client, &stats) == 0 &&
                                   stats.bytes_reserved == 0,
                           SETTLE_MS));
        ck_assert_uint_eq(__atomic_load_n(&n_wrong, __ATOMIC_RELAXED), 0);
}

static void party_stop(struct party *party)
{
        for (int i = 0; i < N_STREAMS; i++)
                party->streams[i] = work_stream_free(party->streams[i]);
        bfc_disconnect(party->client);
}

/* i: without and with a cache. */
START_TEST(threads_on_streams)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .n_steps = _i ? 400 : 150 };
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct thread threads[N_THREADS];
        pthread_t ids[N_THREADS];

        party_start(&party, rig, _i == 1, 200);
        for (unsigned i = 0; i < N_THREADS; i++) {
                threads[i] = (struct thread){ .party = &party, .seed = 7919 * (i + 1) };
                ck_assert_int_eq(pthread_create(&ids[i], NULL, live, &threads[i]), 0);
        }
        for (int i = 0; i < N_THREADS; i++)
                pthread_join(ids[i], NULL);
        party_end(&party);
        ck_assert_ok(bfc_stats(party.client, &stats));
        ck_assert_uint_eq(stats.num_blocks, 0);
        ck_assert_uint_gt(stats.num_allocs, N_THREADS * 20);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

/* ---- one by one ------------------------------------------------------------------- */

static struct held get(const struct party *party, int stream, size_t n_bytes, unsigned *is_written)
{
        struct held h = { .stream = stream, .n_granules = n_bytes / GRANULE, .is_written = is_written };
        void *p;

        ck_assert_ok(bfc_malloc_async(party->client, n_bytes, number_of(party, stream), &p));
        h.p = p;
        h.number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        put_look(party->streams[stream], &h, true);
        put_look(party->streams[stream], &h, false);
        return h;
}

/* More than the limit in all, through two streams, so each byte is used by both. */
START_TEST(streams_in_turn)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .client = NULL };
        unsigned is_written;

        party_start(&party, rig, _i == 1, 3000);
        for (int i = 0; i < 24; i++) {
                struct held h = get(&party, i % 2, 20 * MIB, &is_written);

                put_look(party.streams[i % 2], &h, false);
                ck_assert_ok(bfc_free_async(party.client, h.p, number_of(&party, i % 2)));
        }
        party_end(&party);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").num_blocks, 0);
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

/* The daemon has nothing back before the work is done: another process would be given it. */
START_TEST(the_daemon_has_it_when_it_is_done)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .client = NULL };
        unsigned is_written = 0;
        struct held h;

        party_start(&party, rig, _i == 1, 100000);
        h = get(&party, 0, 4 * MIB, &is_written);
        ck_assert_ok(bfc_free_async(party.client, h.p, number_of(&party, 0)));
        ck_assert_ok(bfc_trim(party.client, SIZE_MAX));
        ck_assert_uint_ge(rig_figures(rig, "red", "train").bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(__atomic_load_n(&is_written, __ATOMIC_ACQUIRE), 0);
        work_wait(party.streams[0]);
        ck_assert(WAIT_FOR(bfc_trim(party.client, SIZE_MAX) == 0 &&
                                   rig_figures(rig, "red", "train").bytes_in_use == 0,
                           SETTLE_MS));
        party_end(&party);
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

/* Without a cache; and without a call: the client's second thread looks. */
START_TEST(it_goes_back_by_itself)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .client = NULL };
        unsigned is_written = 0;
        struct held h[2];

        party_start(&party, rig, false, 50000);
        for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 2; i++)
                        h[i] = get(&party, i, 4 * MIB, &is_written);
                ck_assert_ok(bfc_free_async(party.client, h[0].p, number_of(&party, 0)));
                ck_assert_ok(bfc_free_async(party.client, h[1].p, number_of(&party, 1)));
                ck_assert_uint_ge(rig_figures(rig, "red", "train").bytes_in_use, 8 * MIB);
                ck_assert(WAIT_FOR(rig_figures(rig, "red", "train").bytes_in_use == 0, SETTLE_MS));
        }
        party_end(&party);
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

/* The capture is not spoilt by anything that is done in and beside it. */
START_TEST(a_capture_goes_on)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .client = NULL };
        unsigned is_written = 0;
        struct held a, b;
        void *p, *q;

        party_start(&party, rig, _i == 1, 2000);
        a = get(&party, 0, MIB, &is_written);
        b = get(&party, 1, MIB, &is_written);
        work_begin_capture(party.streams[0]);
        ck_assert_ok(bfc_malloc_async(party.client, MIB, number_of(&party, 0), &p));
        ck_assert_ok(bfc_free_async(party.client, b.p, number_of(&party, 1)));
        ck_assert_ok(bfc_free_async(party.client, a.p, number_of(&party, 0)));
        ck_assert_ok(bfc_malloc_async(party.client, MIB, number_of(&party, 1), &q));
        ck_assert_ok(bfc_record_stream(party.client, q, number_of(&party, 0)));
        ck_assert_ok(bfc_free_async(party.client, p, number_of(&party, 0)));
        ck_assert_ok(bfc_free_async(party.client, q, number_of(&party, 1)));
        ck_assert_ok(bfc_trim(party.client, SIZE_MAX));
        ck_assert_uint_gt(rig_figures(rig, "red", "train").bytes_in_use, 0);
        ck_assert_int_eq(work_end_capture(party.streams[0]), 0);
        party_end(&party);
        ck_assert_uint_eq(rig_figures(rig, "red", "train").bytes_in_use, 0);
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

/* Everything that the driver has is its own to wait for. */
START_TEST(disconnecting_with_work)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct party party = { .client = NULL };
        unsigned is_written = 0;
        struct held h;

        party_start(&party, rig, _i == 1, 20000);
        h = get(&party, 0, MIB, &is_written);
        ck_assert_ok(bfc_free_async(party.client, h.p, number_of(&party, 0)));
        bfc_disconnect(party.client);
        ck_assert_uint_eq(__atomic_load_n(&is_written, __ATOMIC_ACQUIRE), 1);
        ck_assert_uint_eq(__atomic_load_n(&n_wrong, __ATOMIC_RELAXED), 0);
        party.client = NULL;
        party_stop(&party);
        rig_stop(rig);
}
END_TEST

int main(void)
{
        Suite *s = suite_create("streams");
        TCase *t = tcase_create("streams");

        tcase_set_timeout(t, TEST_TIMEOUT);
        tcase_add_loop_test(t, threads_on_streams, 0, 2);
        tcase_add_loop_test(t, streams_in_turn, 0, 2);
        tcase_add_loop_test(t, the_daemon_has_it_when_it_is_done, 0, 2);
        tcase_add_test(t, it_goes_back_by_itself);
        tcase_add_loop_test(t, a_capture_goes_on, 0, 2);
        tcase_add_loop_test(t, disconnecting_with_work, 0, 2);
        suite_add_tcase(s, t);
        return harness_main(s);
}
