/* The kinds `grow` and `release` of bench-neighbours: how long a tenant waits for 64 MiB of new memory beside another
 * one that grows by much at once, or releases much.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_SUPPLY_H
#define BFC_BENCH_SUPPLY_H

#include <jansson.h>
#include <stdbool.h>

struct supply {
        const char *bfcd;
        long n_rounds;
        long n_mib;   /* that the neighbour allocates or releases */
        bool is_cuda; /* cuda:0 and fds, else the host */
        bool is_json;
};

/* With a daemon of its own, in the folder of the run. only: "grow", "release", or NULL for both. Adds to the list,
 * or prints; returns the larger median beside the neighbour, in milliseconds. */
double supply_measure(const struct supply *o, const char *only, json_t *list);

#endif
