/* Requests about leases, of sessions without sockets, and reloads, which change them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_LEASES_H
#define BFC_TESTS_LEASES_H

#include "tests/unit/sessions.h"

/* The first of cgroup, unit and pid that is there is its match; or a user. */
struct wanted {
        const char *name, *tenant, *partition, *cgroup, *unit; /* NULL: "red", "a" */
        uint64_t limit, reserve, pid, uid, ttl_ms, grace_ms;
        bool by_user, evicts;
};

/* The request's id. */
uint64_t ask_create(struct peer *p, const struct wanted *w);
uint64_t ask_set(struct peer *p, const char *name, Bfcd__LeaseSet *m);
uint64_t ask_end(struct peer *p, const char *name, bool evicts, uint64_t grace_ms); /* and settles */

/* Those of clients end, and their processes. */
void end_sessions(void);

/* Of reload_config(). told: what it must say; NULL: anything. */
int reload_told(const char *text, bool dry_run, const char *told);

#endif
