/* What the processes of test_storm.c share: the victims (storm_victim.c), the hostile tenant (storm_tenant.c) and the
 * operator.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_STORM_H
#define BFC_TESTS_STORM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define VICTIM    "victim"
#define HOSTILE   "hostile"
#define N_VICTIMS 2u

#define STORM_MAX_ACTS 48u
#define STORM_WAIT_MS  120000 /* the limit of all waits */

/* Of a victim. A call counts as beside a restart if a restart was under way, or the client resumed its session
 * meanwhile. */
struct storm_calls {
        _Atomic uint64_t n_calls, n_bytes;
        _Atomic uint64_t longest_us, longest_restart_us;
        _Atomic(const char *) longest;
};

/* In memory that all processes share. */
struct storm {
        char socket[96];
        uint64_t seed;
        bool has_users; /* the hostile processes are of other users than the victims */
        atomic_bool is_over;
        atomic_bool has_failed; /* a hostile process saw what must not be */
        _Atomic uint64_t n_restarts_begun, n_restarts_done;
        struct storm_calls victims[N_VICTIMS];
        _Atomic uint64_t n_acts[STORM_MAX_ACTS], n_granted[STORM_MAX_ACTS];
};

/* Runs until the storm is over. Any wrong byte, and any refusal, ends the process with 99. */
void storm_victim_run(struct storm *storm, unsigned number);

/* Random acts of a process of the hostile tenant, by this seed. Ends only by an act. */
void storm_tenant_run(struct storm *storm, uint64_t seed);

/* The names of the acts, in the order of the counts; NULL: there is none of this number. */
const char *storm_act_name(unsigned i);

#endif
