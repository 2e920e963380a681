/* Neighbours for bench-neighbours: a polite one, hostile ones, and monitors that ask without a pause.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_HOSTILE_H
#define BFC_BENCH_HOSTILE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define NEIGHBOUR "neighbour" /* the tenant's name */

/* Shared with the children. */
struct stage {
        char socket[128];
        char monitor_socket[128];
        _Atomic uint64_t n_acts; /* requests, connections or deaths, by kind */
        _Atomic uint64_t n_up;   /* neighbours that have begun */
};

struct hostile {
        const char *key;
        const char *what;
        void (*act)(struct stage *stage); /* until it is killed */
};

extern const struct hostile polite;
extern const struct hostile busy; /* keeps a processor busy and sends nothing */
extern const struct hostile hostiles[];
extern const size_t n_hostiles;

#endif
