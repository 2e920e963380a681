/* Magazines, with the table of blocks, from one thread against a model and from many.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * What the client does around them is done here in a few lines: a block comes from a magazine, or
 * else under the lock; it is stashed, or else goes under the lock. */
#include "client/magazine.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "tests/suite.h"

#define N_THREADS 6

static struct magazines *m;
static struct blocks blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t next_ptr; /* places are never used twice but by way of a magazine */
static uint32_t born;      /* the tick of new blocks; 0: their ages are not counted */

static void setup(void)
{
        ck_assert_int_eq(magazines_new(64 * 64 * MIB, &m), 0);
        next_ptr = UINT64_C(0x7f0000000000);
        born = 0;
}

static void teardown(void)
{
        magazines_free(m);
        blocks_clear(&blocks);
}

FIXTURE(magazine, setup, teardown);

static uint64_t rounded(uint64_t n_bytes)
{
        return (n_bytes + 255) / 256 * 256;
}

static unsigned next_random(unsigned *seed)
{
        *seed = *seed * 1103515245u + 12345u;
        return *seed >> 8;
}

/* Lock held. */
static void clear_out(struct record *list)
{
        struct record *below;
        struct block block;

        for (; list; list = below) {
                below = list->below;
                blocks_take_stashed(&blocks, list, &block);
        }
}

static const void *get(uint64_t n_requested)
{
        struct block block = { .n_bytes = rounded(n_requested), .n_requested = n_requested, .born = born };
        struct record *record = n_requested <= MAGAZINE_HUGE_BYTES ? magazines_get(m, n_requested) : NULL;

        if (record)
                return record->block.ptr;
        block.may_stash = n_requested <= MAGAZINE_HUGE_BYTES;
        pthread_mutex_lock(&lock);
        block.ptr = (const void *)next_ptr;
        next_ptr += block.n_bytes;
        ck_assert_int_eq(blocks_add(&blocks, &block), 0);
        magazines_count_alloc(m, block.n_bytes);
        pthread_mutex_unlock(&lock);
        return block.ptr;
}

/* 0, or -ENOENT: it is no block in use. */
static int put(const void *ptr)
{
        struct record *record = blocks_stash(&blocks, ptr), *full;
        struct block block;
        int r = 0;

        if (record) {
                full = magazines_put(m, record);
                pthread_mutex_lock(&lock);
                clear_out(full);
                pthread_mutex_unlock(&lock);
                return 0;
        }
        pthread_mutex_lock(&lock);
        r = blocks_take(&blocks, ptr, &block);
        if (r == 0)
                magazines_count_free(m, block.n_bytes);
        pthread_mutex_unlock(&lock);
        return r;
}

static struct magazine_sums sums(void)
{
        struct magazine_sums s;

        pthread_mutex_lock(&lock);
        magazines_read(m, &s);
        pthread_mutex_unlock(&lock);
        return s;
}

static void drain(void)
{
        pthread_mutex_lock(&lock);
        clear_out(magazines_take_all(m));
        pthread_mutex_unlock(&lock);
}

/* ---- one thread ---------------------------------------------------------------- */

TEST(last_freed_block_is_reused_first)
{
        const void *a = get(1000), *b = get(1000), *c = get(16384), *large = get(MAGAZINE_HUGE_BYTES + 1);

        ck_assert_int_eq(put(a), 0);
        ck_assert_int_eq(put(b), 0);
        ck_assert_int_eq(put(c), 0);
        ck_assert_int_eq(put(large), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 2 * 1024 + 16384);
        ck_assert_uint_eq(sums().num_frees, 3);
        ck_assert_ptr_ne(get(768), a);
        ck_assert_ptr_eq(get(769), b);
        ck_assert_ptr_eq(get(1024), a);
        ck_assert_ptr_ne(get(1024), b);
        ck_assert_ptr_eq(get(16384), c);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(sums().num_allocs, 3);
        ck_assert_uint_eq(sums().bytes_requested, UINT64_C(769) + 1024 - 2 * 1000);
}

/* Large ones are in no list of their size, and those behind the one that is taken move up. */
TEST(last_freed_large_block_is_reused_first)
{
        const void *a = get(100000), *b = get(200000), *c = get(100000), *d = get(MAGAZINE_LARGE_BYTES);
        const void *too_large = get(MAGAZINE_HUGE_BYTES + 1);

        ck_assert_uint_eq(magazines_max_block(m), MAGAZINE_HUGE_BYTES);
        ck_assert_int_eq(put(too_large), 0);
        ck_assert_uint_eq(sums().num_frees, 0);
        ck_assert_int_eq(put(a), 0);
        ck_assert_int_eq(put(b), 0);
        ck_assert_int_eq(put(c), 0);
        ck_assert_int_eq(put(d), 0);
        ck_assert_int_eq(put(d), -ENOENT);
        ck_assert_uint_eq(sums().bytes_stashed, 2 * rounded(100000) + rounded(200000) + MAGAZINE_LARGE_BYTES);
        ck_assert_ptr_eq(get(100000), c);
        ck_assert_ptr_eq(get(200000), b);
        ck_assert_ptr_ne(get(300000), d);
        ck_assert_ptr_eq(get(99900), a);
        ck_assert_ptr_eq(get(MAGAZINE_LARGE_BYTES - 100), d);
        ck_assert_ptr_ne(get(MAGAZINE_LARGE_BYTES), d);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(sums().num_allocs, 4);
}

/* By their number, and by their bytes; what is small stays, and the other way round. */
TEST(full_ones_of_large_blocks_are_emptied)
{
        const void *p[MAGAZINE_BLOCKS + 1], *small = get(256);

        ck_assert_int_eq(put(small), 0);
        for (unsigned i = 0; i <= MAGAZINE_LARGE_BLOCKS; i++)
                p[i] = get(20000 + i % 3 * 256);
        for (unsigned i = 0; i < MAGAZINE_LARGE_BLOCKS; i++)
                ck_assert_int_eq(put(p[i]), 0);
        ck_assert_uint_eq(blocks.n_used, MAGAZINE_LARGE_BLOCKS + 2);
        ck_assert_int_eq(put(p[MAGAZINE_LARGE_BLOCKS]), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 256);
        ck_assert_uint_eq(blocks.n_used, 1);
        for (unsigned i = 0; i < 3; i++) /* two are 2 MiB */
                p[i] = get(MAGAZINE_LARGE_BYTES);
        for (unsigned i = 0; i < 3; i++) {
                ck_assert_uint_eq(sums().bytes_stashed, 256 + i * MAGAZINE_LARGE_BYTES);
                ck_assert_int_eq(put(p[i]), 0);
        }
        ck_assert_uint_eq(sums().bytes_stashed, 256);
        p[0] = get(MAGAZINE_LARGE_BYTES);
        ck_assert_ptr_eq(get(256), small);
        for (unsigned i = 1; i <= MAGAZINE_BLOCKS; i++)
                p[i] = get(256);
        for (unsigned i = 0; i <= MAGAZINE_BLOCKS; i++)
                ck_assert_int_eq(put(p[i]), 0);
        ck_assert_int_eq(put(small), 0);
        ck_assert_uint_eq(sums().bytes_stashed, MAGAZINE_LARGE_BYTES);
        drain();
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
}

/* As often as it takes until the next huge block of this size is stashed when it is freed. */
static void take_turns(uint64_t n_bytes)
{
        uint64_t n_stashed = sums().bytes_stashed;

        for (unsigned i = 0; i < MAGAZINE_HUGE_AFTER - 1; i++) {
                ck_assert_int_eq(put(get(n_bytes)), 0);
                ck_assert_uint_eq(sums().bytes_stashed, n_stashed);
        }
}

/* One, if requests and frees of its size take turns. */
TEST(huge_block_is_stashed_while_its_size_is_repeated)
{
        const void *a, *b, *c;

        take_turns(16 * MIB);
        a = get(16 * MIB);
        ck_assert_int_eq(put(a), 0);
        ck_assert_int_eq(put(a), -ENOENT);
        ck_assert_uint_eq(sums().bytes_stashed, 16 * MIB);
        ck_assert_ptr_eq(get(16 * MIB - 100), a);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_int_eq(put(a), 0);
        drain();
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        b = get(16 * MIB);
        ck_assert_int_eq(put(b), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 16 * MIB);

        /* Another size: it stays until it is drained, or the other one replaces it. */
        take_turns(8 * MIB);
        c = get(8 * MIB);
        ck_assert_int_eq(put(c), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 8 * MIB);
        ck_assert_uint_eq(blocks.n_used, 1);
        ck_assert_uint_eq(sums().peak_bytes_in_use, 16 * MIB);
        ck_assert_uint_eq(sums().bytes_in_use, 0);
        ck_assert_ptr_eq(get(8 * MIB), c);
        ck_assert_ptr_ne(get(8 * MIB), b);
}

/* Many of one size that live together, as the weights of a model, are not stashed when they are freed. */
TEST(huge_blocks_without_turns_are_not_stashed)
{
        const void *p[2 * MAGAZINE_HUGE_AFTER];

        for (unsigned i = 0; i < 2 * MAGAZINE_HUGE_AFTER; i++)
                p[i] = get(16 * MIB);
        for (unsigned i = 0; i < 2 * MAGAZINE_HUGE_AFTER; i++) {
                ck_assert_int_eq(put(p[i]), 0);
                ck_assert_uint_eq(sums().bytes_stashed, 0);
        }
        ck_assert_uint_eq(blocks.n_used, 0);
        ck_assert_uint_eq(sums().bytes_in_use, 0);
        for (unsigned i = 0; i < MAGAZINE_HUGE_AFTER; i++) { /* two sizes in turn */
                ck_assert_int_eq(put(get(16 * MIB)), 0);
                ck_assert_int_eq(put(get(8 * MIB)), 0);
        }
        ck_assert_uint_eq(sums().bytes_stashed, 0);
}

/* It counts beside large ones, not among them, and leaves with them. */
TEST(huge_block_leaves_large_ones_their_room)
{
        const void *huge, *p[3];

        take_turns(16 * MIB);
        huge = get(16 * MIB);
        for (unsigned i = 0; i < 3; i++)
                p[i] = get(MAGAZINE_LARGE_BYTES);
        ck_assert_int_eq(put(huge), 0);
        ck_assert_int_eq(put(p[0]), 0);
        ck_assert_int_eq(put(p[1]), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 16 * MIB + 2 * MAGAZINE_LARGE_BYTES);
        ck_assert_ptr_eq(get(16 * MIB), huge);
        ck_assert_uint_eq(sums().bytes_stashed, 2 * MAGAZINE_LARGE_BYTES);
        ck_assert_int_eq(put(huge), 0);
        ck_assert_int_eq(put(p[2]), 0); /* too many: all leave */
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
}

TEST(idle_bound_limits_blocks)
{
        const struct {
                uint64_t max_bytes, max_block;
        } cases[] = { { 0, 0 },
                      { 64 * KIB, MAGAZINE_SMALL_BYTES }, /* in 16 to 64 magazines */
                      { UINT64_MAX / 8, MAGAZINE_HUGE_BYTES } };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                magazines_free(m);
                ck_assert_int_eq(magazines_new(cases[i].max_bytes, &m), 0);
                ck_assert_uint_eq(magazines_max_block(m), cases[i].max_block);
        }
        magazines_free(m);
        ck_assert_int_eq(magazines_new(16 * 512 * KIB, &m), 0);
        ck_assert_uint_lt(magazines_max_block(m), 512 * KIB);
        ck_assert_uint_ge(magazines_max_block(m), 64 * KIB);
        ck_assert_uint_eq(magazines_max_block(m) % 256, 0);
}

TEST(full_ones_are_emptied)
{
        const void *p[MAGAZINE_BLOCKS + 1];

        for (unsigned i = 0; i <= MAGAZINE_BLOCKS; i++)
                p[i] = get(256 + i % 3 * 256);
        for (unsigned i = 0; i < MAGAZINE_BLOCKS; i++)
                ck_assert_int_eq(put(p[i]), 0);
        ck_assert_uint_gt(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, MAGAZINE_BLOCKS + 1);
        ck_assert_int_eq(put(p[MAGAZINE_BLOCKS]), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
        for (unsigned i = 0; i < 17; i++) /* 16 are 256 KiB */
                p[i] = get(16 * KIB);
        for (unsigned i = 0; i < 17; i++) {
                ck_assert_uint_eq(sums().bytes_stashed, i * 16 * KIB);
                ck_assert_int_eq(put(p[i]), 0);
        }
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
}

TEST(idle_bound_0_keeps_no_block)
{
        const void *p = get(100);

        magazines_free(m);
        ck_assert_int_eq(magazines_new(0, &m), 0);
        magazines_count_alloc(m, 256);
        ck_assert_int_eq(put(p), 0);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(sums().bytes_in_use, 0);
}

/* Its bytes count once. */
TEST(reused_large_block_stays)
{
        const void *p = get(100000);

        for (unsigned i = 0; i < 2 * MAGAZINE_MAX_LARGE / rounded(100000); i++) {
                ck_assert_int_eq(put(p), 0);
                ck_assert_uint_eq(sums().bytes_stashed, rounded(100000));
                ck_assert_ptr_eq(get(100000), p);
        }
}

/* There are at least 16 magazines, and an eighth of each is for small blocks. */
TEST(young_small_blocks_are_bounded_by_bytes)
{
        const uint64_t max_bytes = 4096 * KIB, max_small = max_bytes / 16 / 8;
        const void *p[MAGAZINE_BLOCKS];
        uint64_t most = 0;

        magazines_free(m);
        ck_assert_int_eq(magazines_new(max_bytes, &m), 0);
        born = 7;
        for (unsigned i = 0; i < MAGAZINE_BLOCKS; i++)
                p[i] = get(KIB);
        for (unsigned i = 0; i < MAGAZINE_BLOCKS; i++) {
                uint64_t n_stashed;

                ck_assert_int_eq(put(p[i]), 0);
                n_stashed = sums().bytes_stashed;
                ck_assert_uint_le(n_stashed, max_small);
                most = n_stashed > most ? n_stashed : most;
        }
        ck_assert_uint_gt(most, KIB);
}

static void *free_young(void *n_blocks)
{
        const void *p[256];
        uintptr_t n = (uintptr_t)n_blocks;

        born = 7;
        for (uintptr_t i = 0; i < n; i++)
                p[i] = get(16 * KIB);
        for (uintptr_t i = 0; i < n; i++) {
                ck_assert_int_eq(put(p[i]), 0);
                if (i % 8 == 0)
                        drain(); /* so that the magazine is never full */
        }
        born = 0;
        return NULL;
}

/* What a thread has freed is at most 2 MiB of credit. More would keep other threads, here one without
 * credit, from using their stashed blocks. */
TEST(credit_of_young_blocks_is_bounded)
{
        const uint64_t max_credit = 2 * MAGAZINE_LARGE_BYTES;
        const void *a = get(MAGAZINE_LARGE_BYTES), *b = get(MAGAZINE_LARGE_BYTES), *c = get(256);
        pthread_t thread;

        ck_assert_int_eq(pthread_create(&thread, NULL, free_young, (void *)(uintptr_t)192), 0); /* 3 MiB */
        pthread_join(thread, NULL);
        ck_assert_int_eq(put(a), 0);
        ck_assert_int_eq(put(b), 0);
        ck_assert_int_eq(put(c), 0);                /* passes the maximum: nothing is left as credit */
        magazines_count_alloc(m, max_credit + 256); /* to the peak, if all that is freed were credit */
        ck_assert_ptr_eq(get(256), c);
        magazines_count_free(m, max_credit + 256);
        ck_assert_uint_eq(sums().bytes_in_use, 256);
}

TEST(sums_against_a_model)
{
        enum { N = 300 };
        const void *held[N] = { NULL };
        uint64_t n_bytes[N] = { 0 }, in_use = 0, peak = 0;
        unsigned seed = 11;

        for (int i = 0; i < 100000; i++) {
                unsigned at = next_random(&seed) % N;

                if (held[at]) {
                        ck_assert_int_eq(put(held[at]), 0);
                        ck_assert_int_eq(put(held[at]), -ENOENT);
                        in_use -= n_bytes[at];
                        held[at] = NULL;
                } else if (next_random(&seed) % N < 60u + (unsigned)(i / 1000 * 2)) {
                        n_bytes[at] = rounded(1 + next_random(&seed) % 20000 + (at % 4 ? 0 : at * 8192));
                        held[at] = get(n_bytes[at]);
                        in_use += n_bytes[at];
                        peak = in_use > peak ? in_use : peak;
                }
                if (next_random(&seed) % 1000 == 0)
                        drain();
                if (next_random(&seed) % 5000 == 0) {
                        magazines_reset_peak(m);
                        peak = in_use;
                }
                if (next_random(&seed) % 8 == 0) {
                        ck_assert_uint_eq(sums().bytes_in_use, in_use);
                        ck_assert_uint_eq(sums().peak_bytes_in_use, peak);
                }
        }
}

/* Blocks of another partition count only in the sum over all, whose peak is its own. */
TEST(two_sums_against_a_model)
{
        enum { N = 300 };
        const void *held[N] = { NULL };
        uint64_t n_bytes[N] = { 0 }, own = 0, own_peak = 0, all = 0, all_peak = 0;
        unsigned seed = 12;

        for (int i = 0; i < 100000; i++) {
                unsigned at = next_random(&seed) % N, is_other = at % 3 == 0;

                if (n_bytes[at] > 0 && next_random(&seed) % 2 == 0) {
                        if (is_other)
                                magazines_count_other_free(m, n_bytes[at]);
                        else
                                ck_assert_int_eq(put(held[at]), 0);
                        own -= is_other ? 0 : n_bytes[at];
                        all -= n_bytes[at];
                        n_bytes[at] = 0;
                } else if (n_bytes[at] == 0 && (!is_other || i > 20000)) {
                        n_bytes[at] = rounded(1 + next_random(&seed) % 20000);
                        if (is_other)
                                magazines_count_other_alloc(m, n_bytes[at]);
                        else
                                held[at] = get(n_bytes[at]);
                        own += is_other ? 0 : n_bytes[at];
                        all += n_bytes[at];
                        own_peak = own > own_peak ? own : own_peak;
                        all_peak = all > all_peak ? all : all_peak;
                }
                if (next_random(&seed) % 5000 == 0) {
                        magazines_reset_peak(m);
                        own_peak = own;
                        all_peak = all;
                }
                ck_assert_uint_eq(sums().bytes_in_use, own);
                ck_assert_uint_eq(sums().peak_bytes_in_use, own_peak);
                ck_assert_uint_eq(sums().all_bytes_in_use, all);
                ck_assert_uint_eq(sums().all_peak_bytes_in_use, all_peak);
        }
}

/* ---- threads -------------------------------------------------------------------- */

static pthread_barrier_t barrier;

static void run(void *(*fn)(void *))
{
        pthread_t threads[N_THREADS];

        pthread_barrier_init(&barrier, NULL, N_THREADS);
        for (uintptr_t i = 0; i < N_THREADS; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, fn, (void *)i), 0);
        for (int i = 0; i < N_THREADS; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&barrier);
}

/* Up to a level that is the thread's own and, all together, the round's peak; below it every thread
 * goes up and down as it likes. */
#define N_ROUNDS  30
#define MAX_LEVEL 40

static unsigned level_of(unsigned thread, unsigned round)
{
        return 5 + (thread * 7 + round * 3) % (MAX_LEVEL - 5);
}

static void *climb(void *userdata)
{
        unsigned me = (unsigned)(uintptr_t)userdata, seed = me;
        const void *held[MAX_LEVEL];

        for (unsigned round = 0; round < N_ROUNDS; round++) {
                unsigned n = 0, level = level_of(me, round);

                for (unsigned i = 0; i < 1500 || n < level; i++) {
                        bool up = i < 1500 ? next_random(&seed) % 2 == 0 : true;

                        if (up && n < level - (i < 1500)) {
                                held[n++] = get(4096);
                        } else if (!up && n > 0) {
                                ck_assert_int_eq(put(held[--n]), 0);
                        }
                }
                pthread_barrier_wait(&barrier);
                if (me == 0) {
                        uint64_t all = 0;

                        for (unsigned i = 0; i < N_THREADS; i++)
                                all += level_of(i, round);
                        ck_assert_uint_eq(sums().bytes_in_use, all * 4096);
                        ck_assert_uint_eq(sums().peak_bytes_in_use, all * 4096);
                }
                pthread_barrier_wait(&barrier);
                while (n > 0)
                        ck_assert_int_eq(put(held[--n]), 0);
                pthread_barrier_wait(&barrier);
                if (me == 0) {
                        pthread_mutex_lock(&lock);
                        magazines_reset_peak(m);
                        pthread_mutex_unlock(&lock);
                }
                pthread_barrier_wait(&barrier);
        }
        return NULL;
}

TEST(the_peak_is_that_of_the_sum)
{
        run(climb);
        ck_assert_uint_eq(sums().bytes_in_use, 0);
}

/* Two threads free each block, while the table grows: one succeeds. */
#define N_PAIRS 3000
static const void *pairs[N_THREADS / 2][N_PAIRS];
static unsigned n_freed[N_THREADS / 2][N_PAIRS];

static void *free_twice(void *userdata)
{
        uintptr_t me = (uintptr_t)userdata, pair = me / 2;
        const void *more[N_PAIRS / 10];

        for (unsigned i = 0; me % 2 == 0 && i < N_PAIRS; i++)
                pairs[pair][i] = get(1 + i % 5000);
        pthread_barrier_wait(&barrier);
        for (unsigned i = 0; i < N_PAIRS; i++) {
                if (i % 10 == 0)
                        pthread_barrier_wait(&barrier);
                if (i % 10 == 0)
                        more[i / 10] = get(MAGAZINE_HUGE_BYTES + 1);
                if (put(pairs[pair][i]) == 0)
                        __atomic_add_fetch(&n_freed[pair][i], 1, __ATOMIC_RELAXED);
        }
        for (unsigned i = 0; i < N_PAIRS / 10; i++)
                ck_assert_int_eq(put(more[i]), 0);
        return NULL;
}

TEST(two_frees_of_one_block)
{
        run(free_twice);
        for (unsigned pair = 0; pair < N_THREADS / 2; pair++)
                for (unsigned i = 0; i < N_PAIRS; i++)
                        ck_assert_uint_eq(n_freed[pair][i], 1);
        ck_assert_uint_eq(sums().bytes_in_use, 0);
}

/* Blocks go from thread to thread, and somebody empties the magazines all the time. */
#define N_SHARED 256
static const void *shared[N_SHARED];
static int n_busy;

/* Three of four are small, and one of eight is huge. */
static uint64_t size_by(unsigned random)
{
        if (random % 8 == 0)
                return 16 * MIB;
        return random % 4 ? 1 + random % 17000 : 100000 * (1 + random / 4 % 10);
}

static void *pass_on(void *userdata)
{
        unsigned me = (unsigned)(uintptr_t)userdata, seed = me * 77;

        __atomic_add_fetch(&n_busy, 1, __ATOMIC_SEQ_CST);
        pthread_barrier_wait(&barrier);
        if (me == 0)
                while (__atomic_load_n(&n_busy, __ATOMIC_SEQ_CST) > 1) {
                        struct magazine_sums s = sums();

                        ck_assert_uint_ge(s.peak_bytes_in_use, s.bytes_in_use);
                        drain();
                        sched_yield();
                }
        for (int i = 0; me > 0 && i < 30000; i++) {
                const void *mine = get(size_by(next_random(&seed))), *other;

                other = __atomic_exchange_n(&shared[next_random(&seed) % N_SHARED], mine, __ATOMIC_ACQ_REL);
                if (other)
                        ck_assert_int_eq(put(other), 0);
        }
        __atomic_sub_fetch(&n_busy, 1, __ATOMIC_SEQ_CST);
        return NULL;
}

TEST(emptied_while_busy)
{
        run(pass_on);
        for (int i = 0; i < N_SHARED; i++)
                if (shared[i])
                        ck_assert_int_eq(put(shared[i]), 0);
        drain();
        ck_assert_uint_eq(sums().bytes_in_use, 0);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
}

/* Each thread reuses its own blocks, mostly. Those of the others come from it by way of `shared`. The magazines are emptied
 * and read only after their owners have used them often enough to lock them without an exchange. */
#define N_EMPTIED 20u
static struct {
        _Alignas(128) unsigned n; /* atomic */
} progress[N_THREADS];

/* In some order, so that one of the threads is nearly always inside. */
static void wait_for_progress(void)
{
        for (unsigned i = 1; i < N_THREADS; i++) {
                unsigned begin = __atomic_load_n(&progress[i].n, __ATOMIC_RELAXED);

                while (__atomic_load_n(&progress[i].n, __ATOMIC_RELAXED) - begin < 1500)
                        sched_yield();
        }
}

static void *reuse(void *userdata)
{
        unsigned me = (unsigned)(uintptr_t)userdata, seed = me * 77;

        pthread_barrier_wait(&barrier);
        for (unsigned i = 0; me == 0 && i < N_EMPTIED; i++) {
                struct magazine_sums s;

                wait_for_progress();
                s = sums();
                if (s.peak_bytes_in_use < s.bytes_in_use || s.bytes_stashed > N_THREADS * 19 * MIB)
                        ck_abort_msg("the sums are wrong");
                if (i % 2 == 0)
                        wait_for_progress();
                drain();
        }
        if (me == 0)
                __atomic_store_n(&n_busy, 0, __ATOMIC_SEQ_CST);
        while (me > 0 && __atomic_load_n(&n_busy, __ATOMIC_SEQ_CST) > 0) {
                const void *mine = get(size_by(next_random(&seed)));

                if (next_random(&seed) % 16 == 0)
                        mine = __atomic_exchange_n(&shared[next_random(&seed) % N_SHARED], mine,
                                                   __ATOMIC_ACQ_REL);
                if (mine && put(mine) < 0)
                        ck_abort_msg("a block was lost");
                __atomic_add_fetch(&progress[me].n, 1, __ATOMIC_RELAXED);
        }
        return NULL;
}

TEST(emptied_while_owners_are_inside)
{
        n_busy = 1;
        run(reuse);
        for (int i = 0; i < N_SHARED; i++)
                if (shared[i])
                        ck_assert_int_eq(put(shared[i]), 0);
        drain();
        ck_assert_uint_eq(sums().bytes_in_use, 0);
        ck_assert_uint_eq(sums().bytes_stashed, 0);
        ck_assert_uint_eq(blocks.n_used, 0);
}

static bool has_got;

static void *get_one(void *userdata)
{
        (void)userdata;
        pthread_barrier_wait(&barrier);
        (void)magazines_get(m, 256);
        __atomic_store_n(&has_got, true, __ATOMIC_RELEASE);
        return NULL;
}

/* For longer than a thread spins before it sleeps. */
TEST(emptying_waits_for_locked_magazines)
{
        pthread_t thread;

        has_got = false;
        pthread_barrier_init(&barrier, NULL, 2);
        magazines_lock(m);
        ck_assert_int_eq(pthread_create(&thread, NULL, get_one, NULL), 0);
        pthread_barrier_wait(&barrier);
        for (int i = 0; i < 20; i++) {
                usleep(1000);
                ck_assert(!__atomic_load_n(&has_got, __ATOMIC_ACQUIRE));
        }
        magazines_unlock(m);
        pthread_join(thread, NULL);
        ck_assert(has_got);
        pthread_barrier_destroy(&barrier);
}
