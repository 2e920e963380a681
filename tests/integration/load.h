/* A random workload: processes of the tenants red and blue that allocate and free blocks, and check
 * their contents.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_LOAD_H
#define BFC_TESTS_LOAD_H

#include <stdatomic.h>

#include "tests/integration/harness.h"

#define LOAD_MAX_PROCESSES 16

/* In memory that all processes share. */
struct load {
        char socket[96];
        int also;          /* -EBUSY, -ENOENT: an error of a malloc beside -EDQUOT and -ENOMEM */
        unsigned n_rounds; /* of a session, then the process connects again; 0: one session */
        _Atomic bool is_over;
        _Atomic uint64_t n_allocs, n_refusals, n_others; /* others: of the error above */
        _Atomic uint64_t n_refused_hellos;
        atomic_uint next_number;
        unsigned n_processes;
        pid_t pids[LOAD_MAX_PROCESSES];
};

struct load *load_start(const struct rig *rig, unsigned n_processes, int also, unsigned n_rounds);
void load_end(struct load *l); /* asserts that all processes ended with status 0 */

#endif
