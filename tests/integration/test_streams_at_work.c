/* Allocation on streams against a real daemon, with slow work that finds out when memory is
 * another's too early.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A block has a number, and its first work writes that into every granule of it; all later
 * work, some of it behind the free, reads it there. A process that receives the memory writes another
 * number, so too early a reuse shows, wherever the two overlap. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/integration/tools.h"
#include "tests/integration/work.h"

#define N_STREAMS 4
#define N_THREADS 8
#define N_SLOTS   8
#define LIMIT     (64 * MIB) /* red's in train */

static unsigned n_wrong; /* atomic: granules in which another process had written */
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

static void wait_until_open(void *data)
{
        while (!__atomic_load_n((unsigned *)data, __ATOMIC_ACQUIRE))
                usleep(1000);
}

/* The stream's work does not go on before this is 1. */
static void put_gate(struct work_stream *stream, unsigned *is_open)
{
        *is_open = 0;
        work_put(stream, wait_until_open, is_open);
}

struct class
{
        bfc_client *client;
        struct work_stream *streams[N_STREAMS];
        unsigned n_steps;
};

static uintptr_t number_of(const struct class *class, int i)
{
        return work_stream_number(class->streams[i]);
}

static unsigned next(unsigned *seed)
{
        *seed = *seed * 1103515245u + 12345u;
        return *seed >> 16;
}

/* ---- what a thread does --------------------------------------------------------- */

static void begin_one(const struct class *class, struct held *h, unsigned *seed, unsigned *is_written)
{
        size_t n_bytes = next(seed) % 8 == 0 ? next(seed) * 64 : next(seed);
        void *p;
        int r;

        h->stream = (int)(next(seed) % N_STREAMS);
        r = bfc_malloc_async(class->client, n_bytes + 1, number_of(class, h->stream), &p);
        REQUIRE(r == 0 || r == -EDQUOT || r == -ENOMEM, "%d: %s", r, bfc_last_error());
        if (r < 0)
                return;
        h->p = p;
        h->n_granules = n_bytes / GRANULE + 1;
        h->number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        h->is_written = is_written;
        __atomic_store_n(is_written, 0, __ATOMIC_RELAXED);
        put_look(class->streams[h->stream], h, true);
        put_look(class->streams[h->stream], h, false);
}

/* Another stream reads it, which is in no order with the one that wrote it: so once that is done. */
static void use_elsewhere(const struct class *class, const struct held *h, unsigned *seed)
{
        int other = (int)(next(seed) % N_STREAMS);

        if (!__atomic_load_n(h->is_written, __ATOMIC_ACQUIRE))
                return;
        REQUIRE(bfc_record_stream(class->client, h->p, number_of(class, other)) == 0, "%s", bfc_last_error());
        put_look(class->streams[other], h, false);
}

static void end_one(const struct class *class, struct held *h, unsigned *seed)
{
        unsigned how = next(seed) % 8;
        int stream = how == 0 ? (int)(next(seed) % N_STREAMS) : h->stream;

        put_look(class->streams[h->stream], h, false);
        if (how == 1)
                REQUIRE(bfc_free(class->client, h->p) == 0, "%s", bfc_last_error());
        else
                REQUIRE(bfc_free_async(class->client, h->p, number_of(class, stream)) == 0, "%s",
                        bfc_last_error());
        h->p = NULL;
}

/* The processor is not in any stream: it may use its memory at once. */
static void use_at_once(const struct class *class, unsigned *seed)
{
        struct held h = { .n_granules = next(seed) % 256 + 1 };
        void *p;

        if (bfc_malloc(class->client, h.n_granules * GRANULE, &p) < 0)
                return;
        h.number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        write_number((volatile uint64_t *)p, h.n_granules, h.number);
        __atomic_add_fetch(&n_wrong, count_wrong((volatile uint64_t *)p, h.n_granules, h.number),
                           __ATOMIC_RELAXED);
        if (next(seed) % 2)
                REQUIRE(bfc_free(class->client, p) == 0, "%s", bfc_last_error());
        else
                REQUIRE(bfc_free_async(class->client, p, number_of(class, (int)(next(seed) % N_STREAMS))) ==
                                0,
                        "%s", bfc_last_error());
}

struct thread {
        const struct class *class;
        unsigned seed;
        unsigned is_written[N_SLOTS];
};

/* The words in which work says that it has written are used again when all of it is done. */
static void *live(void *arg)
{
        struct thread *t = arg;
        struct held slots[N_SLOTS] = { { 0 } };

        for (unsigned i = 0; i < t->class->n_steps; i++) {
                unsigned at = next(&t->seed) % N_SLOTS;
                struct held *h = &slots[at];

                if (!h->p)
                        begin_one(t->class, h, &t->seed, &t->is_written[at]);
                else if (next(&t->seed) % 3 == 0)
                        use_elsewhere(t->class, h, &t->seed);
                else if (__atomic_load_n(h->is_written, __ATOMIC_ACQUIRE))
                        end_one(t->class, h, &t->seed);
                if (i % 16 == 0)
                        use_at_once(t->class, &t->seed);
                if (i % 64 == 0)
                        REQUIRE(bfc_trim(t->class->client, SIZE_MAX) == 0, "%s", bfc_last_error());
        }
        for (int i = 0; i < N_SLOTS; i++)
                if (slots[i].p)
                        end_one(t->class, &slots[i], &t->seed);
        return NULL;
}

static bfc_client *open_with(const char *socket, bool cache)
{
        setenv("BFC_CACHE", cache ? "on" : "off", 1);
        return client_with(.socket = socket, .flags = cache ? 0 : BFC_NO_CACHE,
                           .cache_idle_bytes = UINT64_MAX);
}

static void sched_start(struct class *class, const struct rig *rig, bool cache, unsigned delay_us)
{
        n_wrong = 0;
        work_setup(delay_us);
        class->client = open_with(rig->socket, cache);
        for (int i = 0; i < N_STREAMS; i++)
                class->streams[i] = work_stream_new();
}

/* All memory is released. An event that could not be recorded before is work, too. */
static void sched_end(struct class *class)
{
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };

        for (int i = 0; i < N_STREAMS; i++)
                work_wait(class->streams[i]);
        ck_assert(WAIT_FOR(bfc_trim(class->client, SIZE_MAX) == 0 && bfc_stats(class->client, &stats) == 0 &&
                                   stats.bytes_reserved == 0,
                           SETTLE_MS));
        ck_assert_uint_eq(__atomic_load_n(&n_wrong, __ATOMIC_RELAXED), 0);
}

static void sched_stop(struct class *class)
{
        for (int i = 0; i < N_STREAMS; i++)
                class->streams[i] = work_stream_free(class->streams[i]);
        bfc_disconnect(class->client);
}

/* i: without and with a cache. */
LOOP_TEST(threads_on_streams, 2)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .n_steps = _i ? 400 : 150 };
        struct bfc_client_stats stats = { .struct_size = sizeof(stats) };
        struct thread threads[N_THREADS];
        pthread_t ids[N_THREADS];

        sched_start(&class, rig, _i == 1, 200);
        for (unsigned i = 0; i < N_THREADS; i++) {
                threads[i] = (struct thread){ .class = &class, .seed = 7919 * (i + 1) };
                ck_assert_int_eq(pthread_create(&ids[i], NULL, live, &threads[i]), 0);
        }
        for (int i = 0; i < N_THREADS; i++)
                pthread_join(ids[i], NULL);
        sched_end(&class);
        ck_assert_ok(bfc_stats(class.client, &stats));
        ck_assert_uint_eq(stats.num_blocks, 0);
        ck_assert_uint_gt(stats.num_allocs, N_THREADS * 20);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        sched_stop(&class);
        rig_stop(rig);
}

/* ---- one by one ------------------------------------------------------------------- */

static struct held get(const struct class *class, int stream, size_t n_bytes, unsigned *is_written)
{
        struct held h = { .stream = stream, .n_granules = n_bytes / GRANULE, .is_written = is_written };
        void *p;

        ck_assert_ok(bfc_malloc_async(class->client, n_bytes, number_of(class, stream), &p));
        h.p = p;
        h.number = __atomic_add_fetch(&last_number, 1, __ATOMIC_RELAXED);
        put_look(class->streams[stream], &h, true);
        put_look(class->streams[stream], &h, false);
        return h;
}

/* More than the limit in all, through two streams, so each byte is used by both. */
LOOP_TEST(streams_in_turn, 2)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .client = NULL };
        unsigned is_written;

        sched_start(&class, rig, _i == 1, 3000);
        for (int i = 0; i < 24; i++) {
                struct held h = get(&class, i % 2, 20 * MIB, &is_written);

                put_look(class.streams[i % 2], &h, false);
                ck_assert_ok(bfc_free_async(class.client, h.p, number_of(&class, i % 2)));
        }
        sched_end(&class);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").num_blocks, 0);
        sched_stop(&class);
        rig_stop(rig);
}

/* The daemon has nothing back before the work is done: another process would be given it. */
LOOP_TEST(memory_is_released_when_the_work_is_done, 2)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .client = NULL };
        unsigned is_written = 0, is_open;
        struct held h;

        sched_start(&class, rig, _i == 1, 2000);
        put_gate(class.streams[0], &is_open);
        h = get(&class, 0, 4 * MIB, &is_written);
        ck_assert_ok(bfc_free_async(class.client, h.p, number_of(&class, 0)));
        ck_assert_ok(bfc_trim(class.client, SIZE_MAX));
        ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_in_use, 4 * MIB);
        ck_assert_uint_eq(__atomic_load_n(&is_written, __ATOMIC_ACQUIRE), 0);
        __atomic_store_n(&is_open, 1, __ATOMIC_RELEASE);
        work_wait(class.streams[0]);
        ck_assert(WAIT_FOR(bfc_trim(class.client, SIZE_MAX) == 0 &&
                                   rig_stats(rig, "red", "train").bytes_in_use == 0,
                           SETTLE_MS));
        sched_end(&class);
        sched_stop(&class);
        rig_stop(rig);
}

/* Without a cache; and without a call: the client's second thread looks. */
TEST(idle_stream_memory_is_released)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .client = NULL };
        unsigned is_written = 0, is_open[2];
        struct held h[2];

        sched_start(&class, rig, false, 2000);
        for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 2; i++) {
                        put_gate(class.streams[i], &is_open[i]);
                        h[i] = get(&class, i, 4 * MIB, &is_written);
                }
                ck_assert_ok(bfc_free_async(class.client, h[0].p, number_of(&class, 0)));
                ck_assert_ok(bfc_free_async(class.client, h[1].p, number_of(&class, 1)));
                ck_assert_uint_ge(rig_stats(rig, "red", "train").bytes_in_use, 8 * MIB);
                for (int i = 0; i < 2; i++)
                        __atomic_store_n(&is_open[i], 1, __ATOMIC_RELEASE);
                ck_assert(WAIT_FOR(rig_stats(rig, "red", "train").bytes_in_use == 0, SETTLE_MS));
        }
        sched_end(&class);
        sched_stop(&class);
        rig_stop(rig);
}

/* The capture is not spoilt by anything that is done in and beside it. */
LOOP_TEST(a_capture_continues, 2)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .client = NULL };
        unsigned is_written = 0;
        struct held a, b;
        void *p, *q;

        sched_start(&class, rig, _i == 1, 2000);
        a = get(&class, 0, MIB, &is_written);
        b = get(&class, 1, MIB, &is_written);
        work_begin_capture(class.streams[0]);
        ck_assert_ok(bfc_malloc_async(class.client, MIB, number_of(&class, 0), &p));
        ck_assert_ok(bfc_free_async(class.client, b.p, number_of(&class, 1)));
        ck_assert_ok(bfc_free_async(class.client, a.p, number_of(&class, 0)));
        ck_assert_ok(bfc_malloc_async(class.client, MIB, number_of(&class, 1), &q));
        ck_assert_ok(bfc_record_stream(class.client, q, number_of(&class, 0)));
        ck_assert_ok(bfc_free_async(class.client, p, number_of(&class, 0)));
        ck_assert_ok(bfc_free_async(class.client, q, number_of(&class, 1)));
        ck_assert_ok(bfc_trim(class.client, SIZE_MAX));
        ck_assert_uint_gt(rig_stats(rig, "red", "train").bytes_in_use, 0);
        ck_assert_int_eq(work_end_capture(class.streams[0]), 0);
        /* A call that names the stream sees that the capture has ended. */
        ck_assert_ok(bfc_malloc_async(class.client, MIB, number_of(&class, 0), &p));
        ck_assert_ok(bfc_free_async(class.client, p, number_of(&class, 0)));
        sched_end(&class);
        ck_assert_uint_eq(rig_stats(rig, "red", "train").bytes_in_use, 0);
        sched_stop(&class);
        rig_stop(rig);
}

/* Everything that the driver has is its own to wait for. */
LOOP_TEST(disconnect_with_pending_work, 2)
{
        struct rig *rig = rig_start(&(struct rig_config){ 0 });
        struct class class = { .client = NULL };
        unsigned is_written = 0;
        struct held h;

        sched_start(&class, rig, _i == 1, 20000);
        h = get(&class, 0, MIB, &is_written);
        ck_assert_ok(bfc_free_async(class.client, h.p, number_of(&class, 0)));
        bfc_disconnect(class.client);
        ck_assert_uint_eq(__atomic_load_n(&is_written, __ATOMIC_ACQUIRE), 1);
        ck_assert_uint_eq(__atomic_load_n(&n_wrong, __ATOMIC_RELAXED), 0);
        class.client = NULL;
        sched_stop(&class);
        rig_stop(rig);
}
