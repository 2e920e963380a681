/* Clocks, samples and what is reported of them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_SAMPLES_H
#define BFC_BENCH_SAMPLES_H

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>

uint64_t now_ns(void);
double ms_since(uint64_t begin_ns);

/* Times of single requests. Of samples beyond the room nothing is kept. */
struct samples {
        uint32_t *ns;
        size_t n, n_room;
        uint32_t median, p99, max;
        double mean;
};
void samples_new(struct samples *s, size_t n_room);
void samples_add(struct samples *s, uint64_t ns);

/* Computes the statistics and frees the samples. */
void samples_evaluate(struct samples *s);

/* Sorts the values. The quantile's position is n * percent / 100. */
double quantile(double *values, size_t n, unsigned percent);

/* Prints the object with a newline, and releases it. */
void print_json(json_t *root);

#endif
