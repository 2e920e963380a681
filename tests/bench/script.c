/* See script.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/script.h"
#include "tests/random.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *grown(void *array, size_t n, size_t item)
{
        array = realloc(array, n * item);
        if (!array)
                abort();
        return array;
}

void script_done(struct script *s)
{
        free(s->steps);
        *s = (struct script){ .steps = NULL };
}

static void add(struct script *s, uint32_t slot, uint64_t n_bytes)
{
        if (s->n_steps == s->n_steps_room) {
                s->n_steps_room = s->n_steps_room * 2 + 1024;
                s->steps = grown(s->steps, s->n_steps_room, sizeof(*s->steps));
        }
        s->steps[s->n_steps++] = (struct step){ .n_bytes = n_bytes, .slot = slot };
}

/* Fills in what is live at most. */
static void measure(struct script *s)
{
        uint64_t *live = calloc(s->n_slots, sizeof(*live)), sum = 0;
        size_t n = 0;

        if (!live)
                abort();
        for (size_t i = 0; i < s->n_steps; i++) {
                const struct step *step = &s->steps[i];

                if (step->n_bytes != 0) {
                        live[step->slot] = step->n_bytes;
                        sum += step->n_bytes;
                        n++;
                } else {
                        sum -= live[step->slot];
                        n--;
                }
                if (sum > s->peak_live_bytes)
                        s->peak_live_bytes = sum;
                if (n > s->n_live)
                        s->n_live = n;
        }
        free(live);
}

static void begin(struct script *s, const char *name, uint32_t n_live)
{
        *s = (struct script){ .n_slots = n_live };
        snprintf(s->name, sizeof(s->name), "%s %" PRIu32, name, n_live);
}

/* Even over the octaves from 256 bytes to 4 MiB. */
static uint64_t random_size(uint64_t *state)
{
        double u = (double)(random_next(state) >> 11) / 9007199254740992.0;

        return (uint64_t)(256.0 * exp2(14.0 * u));
}

void script_fifo(struct script *s, uint32_t n_live, size_t n_timed)
{
        uint64_t state = 1;

        begin(s, "fifo", n_live);
        for (uint32_t i = 0; i < n_live; i++)
                add(s, i, random_size(&state));
        s->n_fill = s->n_steps;
        for (uint32_t i = 0; s->n_steps < s->n_fill + n_timed; i = (i + 1) % n_live) {
                add(s, i, 0);
                add(s, i, random_size(&state));
        }
        measure(s);
}

void script_lifo(struct script *s, uint32_t n_live, size_t n_timed)
{
        uint64_t state = 1;
        uint32_t n = 0;

        begin(s, "lifo", n_live);
        for (; n < n_live; n++)
                add(s, n, random_size(&state));
        s->n_fill = s->n_steps;
        while (s->n_steps < s->n_fill + n_timed) {
                uint32_t down = (uint32_t)(random_next(&state) % n_live);

                while (n > down)
                        add(s, --n, 0);
                while (n < n_live)
                        add(s, n++, random_size(&state));
        }
        measure(s);
}

void script_random(struct script *s, uint32_t n_live, size_t n_timed)
{
        uint64_t state = 1;
        uint32_t slot;

        begin(s, "random", n_live);
        for (uint32_t i = 0; i < n_live; i++)
                add(s, i, random_size(&state));
        /* The layout settles only after each block was replaced a few times. */
        for (uint32_t i = 0; i < 4 * n_live; i++) {
                slot = (uint32_t)(random_next(&state) % n_live);
                add(s, slot, 0);
                add(s, slot, random_size(&state));
        }
        s->n_fill = s->n_steps;
        while (s->n_steps < s->n_fill + n_timed) {
                slot = (uint32_t)(random_next(&state) % n_live);
                add(s, slot, 0);
                add(s, slot, random_size(&state));
        }
        measure(s);
}

/* ---- a transformer ------------------------------------------------------------- */

struct model {
        uint64_t d, n_layers, n_heads, n_ff, vocabulary, batch, length;
};

/* Slots count up; a freed slot is not used again, like an id in a trace. */
static uint32_t make(struct script *s, uint64_t n_floats)
{
        add(s, s->n_slots, n_floats * 4);
        return s->n_slots++;
}

static void temporary(struct script *s, uint64_t n_floats)
{
        add(s, make(s, n_floats), 0);
}

#define N_KEPT 9

/* What one layer keeps for its backward pass. */
static void layer_forward(struct script *s, const struct model *m, uint32_t kept[N_KEPT])
{
        uint64_t tokens = m->batch * m->length, x = tokens * m->d;
        uint64_t scores = m->batch * m->n_heads * m->length * m->length;
        uint32_t raw;

        kept[0] = make(s, x);      /* first norm */
        kept[1] = make(s, 3 * x);  /* q, k, v */
        raw = make(s, scores);     /* scores, until the softmax is there */
        kept[2] = make(s, scores); /* softmax */
        add(s, raw, 0);
        kept[3] = make(s, x);          /* attention's output */
        temporary(s, x);               /* its projection, before the sum */
        kept[4] = make(s, x);          /* residual */
        kept[5] = make(s, 2 * tokens); /* statistics of the second norm */
        kept[6] = make(s, x);
        kept[7] = make(s, tokens * m->n_ff); /* before the non-linearity */
        kept[8] = make(s, tokens * m->n_ff); /* after it */
        temporary(s, x);
}

static void layer_backward(struct script *s, const struct model *m, const uint32_t kept[N_KEPT],
                           uint32_t *grad)
{
        uint64_t tokens = m->batch * m->length, x = tokens * m->d;
        uint64_t scores = m->batch * m->n_heads * m->length * m->length;
        uint32_t ff = make(s, tokens * m->n_ff), next, qkv, soft;

        temporary(s, m->d * m->n_ff); /* gradient of a weight, before it is added */
        add(s, kept[8], 0);
        add(s, kept[7], 0);
        temporary(s, m->d * m->n_ff);
        next = make(s, x);
        add(s, ff, 0);
        add(s, *grad, 0);
        for (int i = 6; i > 3; i--)
                add(s, kept[i], 0);
        temporary(s, m->d * m->d);
        soft = make(s, scores);
        add(s, kept[3], 0);
        qkv = make(s, 3 * x);
        temporary(s, scores);
        add(s, kept[2], 0);
        add(s, soft, 0);
        add(s, kept[1], 0);
        temporary(s, 3 * m->d * m->d);
        *grad = make(s, x);
        add(s, qkv, 0);
        add(s, next, 0);
        add(s, kept[0], 0);
}

static void training_step(struct script *s, const struct model *m)
{
        uint64_t tokens = m->batch * m->length;
        uint32_t(*kept)[N_KEPT] = calloc(m->n_layers, sizeof(*kept));
        uint32_t embedded = make(s, tokens * m->d), logits, grad;

        if (!kept)
                abort();
        for (uint64_t l = 0; l < m->n_layers; l++)
                layer_forward(s, m, kept[l]);
        logits = make(s, tokens * m->vocabulary);
        temporary(s, tokens * m->vocabulary); /* log softmax */
        grad = make(s, tokens * m->d);
        temporary(s, m->vocabulary * m->d);
        add(s, logits, 0);
        for (uint64_t l = m->n_layers; l-- > 0;)
                layer_backward(s, m, kept[l], &grad);
        add(s, grad, 0);
        add(s, embedded, 0);
        /* The optimizer's temporaries, parameter by parameter. */
        for (uint64_t l = 0; l < m->n_layers; l++) {
                temporary(s, 3 * m->d * m->d);
                temporary(s, m->d * m->d);
                temporary(s, m->d * m->n_ff);
                temporary(s, m->d * m->n_ff);
                temporary(s, 2 * m->d);
        }
        free(kept);
}

void script_transformer(struct script *s, unsigned n_training_steps)
{
        struct model m = { .d = 1024,
                           .n_layers = 24,
                           .n_heads = 16,
                           .n_ff = 4096,
                           .vocabulary = 50257,
                           .batch = 4,
                           .length = 512 };

        begin(s, "transformer, steps:", n_training_steps);
        s->n_slots = 0;
        /* Parameters, gradients and two moments. */
        for (int k = 0; k < 4; k++) {
                (void)make(s, m.vocabulary * m.d);
                (void)make(s, m.length * m.d);
                for (uint64_t l = 0; l < m.n_layers; l++) {
                        (void)make(s, 3 * m.d * m.d);
                        (void)make(s, m.d * m.d);
                        (void)make(s, m.d * m.n_ff);
                        (void)make(s, m.d * m.n_ff);
                        for (int bias = 0; bias < 8; bias++)
                                (void)make(s, bias == 0 ? m.n_ff : m.d);
                }
        }
        s->n_fill = s->n_steps;
        for (unsigned i = 0; i < n_training_steps; i++)
                training_step(s, &m);
        measure(s);
}

/* ---- traces ------------------------------------------------------------------------ */

struct event {
        int64_t time;
        uint64_t n_bytes; /* 0: the end */
        uint32_t line;    /* order in the file, and slot */
};

static int by_time(const void *a, const void *b)
{
        const struct event *x = a, *y = b;

        if (x->time != y->time)
                return x->time < y->time ? -1 : 1;
        if ((x->n_bytes == 0) != (y->n_bytes == 0))
                return x->n_bytes == 0 ? -1 : 1;
        return x->line < y->line ? -1 : x->line > y->line;
}

/* One line: 0; 1: not a buffer (a heading, an empty line). */
static int read_line(const char *text, uint32_t slot, struct event ret[2])
{
        int64_t lower, upper;
        uint64_t n_bytes;
        char id[64];

        if (sscanf(text, "%63[^,],%" SCNd64 ",%" SCNd64 ",%" SCNu64, id, &lower, &upper, &n_bytes) != 4)
                return 1;
        if (n_bytes == 0 || lower >= upper)
                return 1;
        ret[0] = (struct event){ lower, n_bytes, slot };
        ret[1] = (struct event){ upper, 0, slot };
        return 0;
}

int script_read_trace(struct script *s, const char *path)
{
        const char *name = strrchr(path, '/') ? strrchr(path, '/') + 1 : path;
        struct event *events = NULL;
        size_t n = 0, room = 0;
        FILE *f = fopen(path, "re");
        char text[256];

        if (!f) {
                int error = errno;

                fprintf(stderr, "%s: %s\n", path, strerror(error));
                return -error;
        }
        *s = (struct script){ .n_slots = 0 };
        snprintf(s->name, sizeof(s->name), "%.*s", (int)strcspn(name, "."), name);
        while (fgets(text, sizeof(text), f)) {
                if (n + 2 > room) {
                        room = room * 2 + 1024;
                        events = grown(events, room, sizeof(*events));
                }
                if (read_line(text, s->n_slots, events + n) == 0) {
                        s->n_slots++;
                        n += 2;
                }
        }
        (void)fclose(f);
        if (n == 0) {
                fprintf(stderr, "%s: no buffer in it (id,lower,upper,size)\n", path);
                free(events);
                return -EINVAL;
        }
        qsort(events, n, sizeof(*events), by_time);
        for (size_t i = 0; i < n; i++)
                add(s, events[i].line, events[i].n_bytes);
        free(events);
        measure(s);
        return 0;
}
