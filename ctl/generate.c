/* Traces made to order: see generate.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A generator simulates a program that allocates and frees. Each event is one tick of the clock, so no two
 * events share a time and the order in the file is the order of allocation. Invariant: lower < upper <= clock
 * for a freed buffer, upper == 0 for a live one. Buffers that are live at the end are freed then, oldest
 * first. */
#include "ctl/generate.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

struct buffer {
        uint64_t lower;
        uint64_t upper;
        uint64_t n_bytes;
};

struct player {
        struct buffer *buffers;
        size_t n_buffers;
        size_t n_allocated;
        uint64_t clock;
        uint64_t random;
        bool out_of_memory; /* remembered, so that playing needs no checks */
};

#define NOTHING SIZE_MAX /* the buffer that could not be made */

/* A xorshift generator with a multiplied output: short, and the same everywhere. */
static uint64_t roll(struct player *p, uint64_t n)
{
        p->random ^= p->random >> 12;
        p->random ^= p->random << 25;
        p->random ^= p->random >> 27;
        return (p->random * 0x2545f4914f6cdd1dull >> 32) % n;
}

static size_t take(struct player *p, uint64_t n_bytes)
{
        if (p->n_buffers == p->n_allocated) {
                size_t n = p->n_allocated ? p->n_allocated * 2 : 1024;
                struct buffer *buffers = reallocarray(p->buffers, n, sizeof(*buffers));

                if (!buffers) {
                        p->out_of_memory = true;
                        return NOTHING;
                }
                p->buffers = buffers;
                p->n_allocated = n;
        }
        p->buffers[p->n_buffers] = (struct buffer){ .lower = p->clock++, .n_bytes = n_bytes };
        return p->n_buffers++;
}

static void give(struct player *p, size_t buffer)
{
        if (buffer != NOTHING)
                p->buffers[buffer].upper = p->clock++;
}

/* ---- a transformer's training -------------------------------------------- */

enum {
        N_LAYERS = 6,
        N_STEPS = 3,
        WIDTH = 256,
        N_HEADS = 4,
        BATCH = 4,
        VOCABULARY = 4096,
        N_WEIGHTS = 6, /* of one layer */
        N_KEPT = 9,    /* activations of one layer that its backward pass needs */
        WORD = 4,      /* bytes of a float */
};

static const uint64_t weight_words[N_WEIGHTS] = {
        (uint64_t)3 * WIDTH * WIDTH, /* query, key, value */
        (uint64_t)WIDTH *WIDTH,      /* projection */
        (uint64_t)4 * WIDTH *WIDTH,  /* into the feed-forward part */
        (uint64_t)4 * WIDTH *WIDTH,  /* and out of it */
        (uint64_t)2 * WIDTH,         /* two norms */
        (uint64_t)2 * WIDTH,
};

static uint64_t kept_words(size_t i, uint64_t length)
{
        uint64_t hidden = BATCH * length * WIDTH;
        uint64_t scores = BATCH * N_HEADS * length * length;
        const uint64_t words[N_KEPT] = { hidden,     hidden * 3, scores,
                                         scores,     hidden,     hidden * 1,
                                         hidden * 4, hidden * 4, BATCH * length * 2 };

        return words[i];
}

static void forward(struct player *p, uint64_t length, size_t kept[static N_KEPT])
{
        for (size_t i = 0; i < N_KEPT; i++) {
                size_t workspace = take(p, kept_words(i, length) * WORD / 2);

                kept[i] = take(p, kept_words(i, length) * WORD);
                give(p, workspace);
        }
}

/* Gives the layer's activations back and makes its weights' gradients. */
static void backward(struct player *p, uint64_t length, const size_t kept[static N_KEPT],
                     size_t gradients[static N_WEIGHTS])
{
        for (size_t i = N_KEPT; i-- > 0;) {
                size_t gradient = take(p, kept_words(i, length) * WORD);

                if (i < N_WEIGHTS)
                        gradients[i] = take(p, weight_words[i] * WORD);
                give(p, kept[i]);
                give(p, gradient);
        }
}

static void step(struct player *p)
{
        /* Batches are padded to their longest sentence. */
        uint64_t length = 64 + 16 * roll(p, 9);
        size_t kept[N_LAYERS][N_KEPT], gradients[N_LAYERS][N_WEIGHTS];
        size_t input = take(p, BATCH * length * 8);
        size_t embedded = take(p, BATCH * length * WIDTH * WORD);
        size_t logits, softmax;

        for (size_t i = 0; i < N_LAYERS; i++)
                forward(p, length, kept[i]);
        logits = take(p, BATCH * length * VOCABULARY * WORD);
        softmax = take(p, BATCH * length * VOCABULARY * WORD);
        give(p, logits);
        for (size_t i = N_LAYERS; i-- > 0;)
                backward(p, length, kept[i], gradients[i]);
        give(p, softmax);
        give(p, embedded);
        give(p, input);
        for (size_t i = 0; i < N_LAYERS; i++) {
                for (size_t j = 0; j < N_WEIGHTS; j++) {
                        size_t update = take(p, weight_words[j] * WORD);

                        give(p, gradients[i][j]);
                        give(p, update);
                }
        }
}

static void transformer(struct player *p)
{
        /* Weights and the optimizer's two moments stay to the end. */
        for (int copy = 0; copy < 3; copy++) {
                take(p, (uint64_t)VOCABULARY * WIDTH * WORD);
                for (size_t i = 0; i < N_LAYERS; i++)
                        for (size_t j = 0; j < N_WEIGHTS; j++)
                                take(p, weight_words[j] * WORD);
        }
        for (int i = 0; i < N_STEPS; i++)
                step(p);
}

/* ---- anything ------------------------------------------------------------ */

/* Sizes from 1 byte to 4 MiB, each magnitude as likely as the others; about 100
 * buffers live at a time, and which of them goes is chance. */
static void anything(struct player *p)
{
        size_t live[100];
        size_t n_live = 0;

        for (int i = 0; i < 2000; i++) {
                uint64_t magnitude = 1ull << roll(p, 23);

                if (n_live == sizeof(live) / sizeof(live[0]) || (n_live > 0 && roll(p, 3) == 0)) {
                        size_t which = roll(p, n_live);

                        give(p, live[which]);
                        live[which] = live[--n_live];
                } else {
                        live[n_live++] = take(p, magnitude + roll(p, magnitude));
                }
        }
}

/* ---- printing ------------------------------------------------------------ */

static int print(FILE *out, const struct player *p, double scale)
{
        for (size_t i = 0; i < p->n_buffers; i++)
                if ((double)p->buffers[i].n_bytes * scale >= (double)INT64_MAX)
                        return -ERANGE;
        fputs("id,lower,upper,size\n", out);
        for (size_t i = 0; i < p->n_buffers; i++) {
                const struct buffer *b = &p->buffers[i];
                double n_bytes = ceil((double)b->n_bytes * scale);

                fprintf(out, "%zu,%" PRIu64 ",%" PRIu64 ",%" PRIu64 "\n", i, b->lower, b->upper,
                        n_bytes < 1 ? 1 : (uint64_t)n_bytes);
        }
        return fflush(out) == 0 ? 0 : -EIO;
}

int generate_trace(FILE *out, const char *name, uint64_t seed, double scale)
{
        static const struct {
                const char *name;
                void (*play)(struct player *p);
        } generators[] = { { "transformer", transformer }, { "random", anything } };
        /* Neighbouring seeds should not play alike; 0 would be no seed at all. */
        struct player p = { .random = (seed + 1) * 0x9e3779b97f4a7c15ull | 1 };
        int r = -ENOENT;

        if (!(scale > 0) || !isfinite(scale))
                return -ERANGE;
        for (int i = 0; i < 8; i++)
                roll(&p, 2);
        for (size_t i = 0; i < sizeof(generators) / sizeof(generators[0]); i++) {
                if (strcmp(generators[i].name, name) != 0)
                        continue;
                generators[i].play(&p);
                for (size_t j = 0; j < p.n_buffers; j++)
                        if (p.buffers[j].upper == 0)
                                give(&p, j);
                r = p.out_of_memory ? -ENOMEM : print(out, &p, scale);
        }
        free(p.buffers);
        return r;
}
