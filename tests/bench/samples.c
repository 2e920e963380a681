/* See samples.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bench/samples.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

uint64_t now_ns(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

double ms_since(uint64_t begin_ns)
{
        return (double)(now_ns() - begin_ns) / 1e6;
}

void samples_new(struct samples *s, size_t n_room)
{
        *s = (struct samples){ .ns = malloc(n_room * sizeof(*s->ns)), .n_room = n_room };
        if (!s->ns)
                abort();
}

void samples_add(struct samples *s, uint64_t ns)
{
        if (s->n < s->n_room)
                s->ns[s->n++] = (uint32_t)ns;
}

static int compare_u32(const void *a, const void *b)
{
        uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

        return x < y ? -1 : x > y;
}

void samples_evaluate(struct samples *s)
{
        qsort(s->ns, s->n, sizeof(*s->ns), compare_u32);
        if (s->n > 0) {
                s->median = s->ns[s->n / 2];
                s->p99 = s->ns[s->n * 99 / 100];
                s->max = s->ns[s->n - 1];
        }
        for (size_t i = 0; i < s->n; i++)
                s->mean += (double)s->ns[i] / (double)s->n;
        free(s->ns);
        s->ns = NULL;
}

static int compare_double(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return x < y ? -1 : x > y;
}

double quantile(double *values, size_t n, unsigned percent)
{
        size_t i = n * percent / 100;

        qsort(values, n, sizeof(*values), compare_double);
        return values[i < n ? i : n - 1];
}

void print_json(json_t *root)
{
        json_dumpf(root, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(5));
        putchar('\n');
        json_decref(root);
}
