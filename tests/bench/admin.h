/* What a bench reads over the admin socket. It dies on an error.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_ADMIN_H
#define BFC_BENCH_ADMIN_H

#include <stdint.h>

#include "tests/bench/daemon.h"
#include "tests/integration/raw.h"

struct admin_status {
        uint64_t n_sessions, n_blocks, n_quarantined;
        uint64_t bytes_pending;                   /* of all devices */
        uint64_t bytes_allocated, bytes_resident; /* of the daemon itself */
};

struct raw *session_open(const char *path, const char *tenant);
struct admin_status admin_status(struct raw *admin);

/* Waits until the daemon has ended the other tenants' sessions and destroyed their memory. */
void admin_wait_quiet(struct raw *admin, uint64_t n_sessions);

#endif
