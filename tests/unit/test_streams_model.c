/* Allocation on streams against a model, which knows of each byte whose work may still touch it.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The model keeps the work that each stream has been given and has not done, in order, with the
 * memory that it touches. Whatever a stream is given must not be touched by work of another
 * stream that is not done; and what bfc_malloc() gives, by none. Streams are captured now and
 * then: what they are given meanwhile is no work, and may be touched by nobody's.
 *
 * In half of the walks streams are destroyed, with and without bfc_end_stream(). The library must not use them any
 * more, and the next stream with the number of one is another stream. */
#include <bfcclient.h>

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/client.h"
#include "client/streams.h"
#include "tests/host_stream.h"
#include "tests/suite.h"
#include "tests/unit/server_rig.h"

#define N_STREAMS 5u
#define N_BLOCKS  40u
#define N_WORK    64u
#define N_STEPS   suite_steps(12000)
#define NO_STREAM N_STREAMS

struct piece {
        const char *p;
        size_t n_bytes;
};

struct owned {
        struct piece piece;
        unsigned home;           /* NO_STREAM: bfc_malloc()'s */
        bool used_by[N_STREAMS]; /* recorded, or its own */
};

struct queue {
        struct piece work[N_WORK];
        unsigned life[N_WORK]; /* of the stream with this number that was given it */
        unsigned n_work, n_lives;
        bool is_captured;
        bool is_seen; /* the library was told of the stream during this capture */
        bool is_destroyed;
};

static struct queue queues[N_STREAMS];
static struct owned blocks[N_BLOCKS];
static unsigned seed, n_given, n_reused, n_finished;
static bool are_mortal;

static uintptr_t number(unsigned stream)
{
        return 0x100 + stream;
}

static unsigned next(unsigned n)
{
        seed ^= seed << 13;
        seed ^= seed >> 17;
        seed ^= seed << 5;
        return (seed >> 8) % n;
}

static bool overlap(const struct piece *a, const struct piece *b)
{
        return a->p < b->p + b->n_bytes && b->p < a->p + a->n_bytes;
}

/* ---- the model's eyes ------------------------------------------------------- */

/* stream: whose order counts; NO_STREAM: none. */
static void check_given(const struct piece *piece, unsigned stream, unsigned step)
{
        for (unsigned i = 0; i < N_BLOCKS; i++)
                ck_assert_msg(!blocks[i].piece.p || !overlap(piece, &blocks[i].piece),
                              "step %u: it is block %u's", step, i);
        for (unsigned s = 0; s < N_STREAMS; s++)
                for (unsigned k = 0; k < queues[s].n_work; k++)
                        if (overlap(piece, &queues[s].work[k])) {
                                ck_assert_msg(s == stream && !queues[s].is_captured &&
                                                      queues[s].life[k] == queues[s].n_lives,
                                              "step %u: work of stream %u goes on there", step, s);
                                n_reused++;
                        }
        n_given++;
}

static bool is_idle(void)
{
        for (unsigned s = 0; s < N_STREAMS; s++)
                if (queues[s].n_work > 0 || queues[s].is_captured)
                        return false;
        return true;
}

/* ---- steps ------------------------------------------------------------------- */

static void give_work(unsigned stream, const struct piece *piece)
{
        struct queue *q = &queues[stream];

        if (q->is_captured || q->n_work == N_WORK)
                return;
        host_stream_begin(number(stream));
        q->life[q->n_work] = q->n_lives;
        q->work[q->n_work++] = *piece;
}

static void end_work(unsigned stream)
{
        struct queue *q = &queues[stream];

        if (q->n_work == 0)
                return;
        host_stream_end(number(stream));
        memmove(q->work, q->work + 1, --q->n_work * sizeof(q->work[0]));
        memmove(q->life, q->life + 1, q->n_work * sizeof(q->life[0]));
}

/* All work is waited for, which would invalidate the capture of a stream. */
static void end_all_work(void)
{
        bool is_captured = false;

        for (unsigned s = 0; s < N_STREAMS; s++) {
                ck_assert(!queues[s].is_captured || !queues[s].is_seen);
                is_captured |= queues[s].is_captured;
        }
        for (unsigned s = 0; s < N_STREAMS && !is_captured; s++)
                while (queues[s].n_work > 0)
                        end_work(s);
        n_finished++;
}

/* For a call that names it. */
static uintptr_t named(unsigned stream)
{
        struct queue *q = &queues[stream];

        if (q->is_destroyed)
                host_stream_create(number(stream));
        q->is_destroyed = false;
        q->is_seen = q->is_captured;
        return number(stream);
}

static void destroy(unsigned stream)
{
        struct queue *q = &queues[stream];

        if (q->is_captured || q->is_destroyed)
                return;
        if (next(2))
                ck_assert_int_eq(bfc_end_stream(client, named(stream)), 0);
        host_stream_destroy(number(stream));
        q->is_destroyed = true;
        q->n_lives++;
        for (unsigned i = 0; i < N_BLOCKS; i++)
                blocks[i].used_by[stream] = false;
}

static void take(struct owned *b, unsigned step)
{
        size_t n_bytes = 1 + (next(10) == 0  ? next(60000) * 50u
                              : next(4) == 0 ? next(60000) * 10u
                                             : next(60000));
        unsigned home = next(8) == 0 ? NO_STREAM : next(N_STREAMS);
        struct owned new = { .home = home };
        void *p = NULL;
        int r = home == NO_STREAM ? bfc_malloc(client, n_bytes, &p)
                                  : bfc_malloc_async(client, n_bytes, named(home), &p);

        ck_assert_msg(r == 0 || r == -EDQUOT || r == -ENOMEM, "step %u: %d: %s", step, r, bfc_last_error());
        if (r < 0)
                return;
        new.piece = (struct piece){ p, n_bytes };
        check_given(&new.piece, home, step);
        if (home != NO_STREAM)
                new.used_by[home] = true;
        *b = new;
}

static void use(struct owned *b)
{
        unsigned stream = next(N_STREAMS);

        if (b->home == NO_STREAM)
                return;
        if (!b->used_by[stream])
                ck_assert_int_eq(bfc_record_stream(client, (void *)(uintptr_t)b->piece.p, named(stream)), 0);
        b->used_by[stream] = true;
        give_work(stream, &b->piece);
}

static void give_back(struct owned *b, unsigned step)
{
        unsigned stream = next(4) == 0 || b->home == NO_STREAM ? next(N_STREAMS) : b->home;
        void *p = (void *)(uintptr_t)b->piece.p;
        int r;

        if (next(2) && !queues[stream].is_destroyed) /* the last work is often right before it */
                give_work(stream, &b->piece);
        r = bfc_free_async(client, p, named(stream));
        ck_assert_msg(r == 0, "step %u: %s", step, bfc_last_error());
        b->piece.p = NULL;
}

static void capture(unsigned stream)
{
        struct queue *q = &queues[stream];

        if (q->is_destroyed)
                return;
        q->is_captured = !q->is_captured;
        q->is_seen = false;
        if (q->is_captured)
                host_stream_begin_capture(number(stream));
        else
                host_stream_end_capture(number(stream));
}

static void check_pools(unsigned i)
{
        const char *why = "";

        ck_assert_msg(streams_check(client, &why) == 0, "step %u: %s", i, why);
}

static void step(unsigned i)
{
        struct owned *b = &blocks[next(N_BLOCKS)];
        unsigned stream;

        switch (next(8)) {
        case 0:
        case 1:
        case 6:
                if (b->piece.p)
                        give_back(b, i);
                else
                        take(b, i);
                break;
        case 2:
        case 3:
                if (b->piece.p)
                        use(b);
                else
                        take(b, i);
                break;
        case 4:
        case 5:
                end_work(next(N_STREAMS));
                break;
        default:
                stream = next(N_STREAMS);
                if (next(queues[stream].is_captured ? 2 : 16) == 0)
                        capture(stream);
                else if (are_mortal && next(8) == 0)
                        destroy(stream);
                if (next(20) == 0)
                        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        }
}

/* All work done and all blocks freed, nothing is left. */
static void finish(void)
{
        for (unsigned s = 0; s < N_STREAMS; s++) {
                if (queues[s].is_captured)
                        capture(s);
                while (queues[s].n_work > 0)
                        end_work(s);
        }
        for (unsigned i = 0; i < N_BLOCKS; i++)
                if (blocks[i].piece.p)
                        give_back(&blocks[i], N_STEPS);
        for (unsigned s = 0; s < N_STREAMS; s++)
                while (queues[s].n_work > 0)
                        end_work(s);
        ck_assert(is_idle());
        for (unsigned s = 0; s < N_STREAMS && are_mortal; s++) { /* it has seen each capture's end */
                void *p;

                ck_assert_int_eq(bfc_malloc_async(client, 1, named(s), &p), 0);
                ck_assert_int_eq(bfc_free_async(client, p, number(s)), 0);
        }
        ck_assert_int_eq(bfc_trim(client, SIZE_MAX), 0);
        /* Without a cache the client's own thread may be giving back the last of them. */
        for (unsigned ms = 0; ms < 100000 && fake_server_count(server).n_blocks > 0; ms++)
                usleep(1000);
        ck_assert_uint_eq(fake_server_count(server).n_blocks, 0);
        ck_assert_uint_eq(host_stream_n_events(), 0);
}

/* i: the seed; of the first six every third is without a cache, and the other six have streams that are destroyed. */
LOOP_TEST(random_walk, 12)
{
        bool has_cache = _i >= 6 || _i % 3 != 2;

        are_mortal = _i >= 6;
        seed = (unsigned)_i * 7919u + 1;
        printf("# seed %u\n", seed);
        host_stream_reset();
        host_streams_set_mortal(are_mortal, are_mortal ? end_all_work : NULL);
        server_start(NULL);
        client = open_client(has_cache ? 0 : BFC_NO_CACHE, UINT64_MAX, 0);
        for (unsigned i = 0; i < N_STEPS; i++) {
                step(i);
                if (i % 128 == 0)
                        check_pools(i);
        }
        finish();
        check_pools(N_STEPS);
        ck_assert_uint_gt(n_given, N_STEPS / 24);
        ck_assert(!are_mortal || n_finished > 0);
        if (has_cache)
                ck_assert_uint_gt(n_reused, N_STEPS / 240); /* before the work was done, in its order */
        server_end();
}
