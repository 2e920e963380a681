/* Memory outside: what processes of tenants have on GPUs and bfcd does not know.
 *
 * The keeper of a GPU asks NVML what each process has there. NVML counts memory for the process that made it, so what bfcd
 * lends counts for the keeper, also where a process has it mapped. What is left beside the direct charges of a process is
 * outside: contexts, and what a program takes past bfcd. A process without a session counts for the tenant and the lease that its
 * hello would find (outside.c). It is shown, and nothing is decided by it.
 *
 * A session's pid is the kernel's word (SO_PEERCRED). A process that bfcd's PID namespace does not show is not measured.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_OUTSIDE_H
#define BFCD_OUTSIDE_H

#include <stdbool.h>
#include <stdint.h>

#define OUTSIDE_MS 5000u /* between questions */
#define OUTSIDE_LOG_BYTES                                                                                    \
        (UINT64_C(1) << 30) /* of a process, which is logged then; a context has 555 MiB at most */

struct broker;
struct session;

/* Asks the keepers of all GPUs, unless they have not answered the last question. Does not wait. */
void outside_look(struct broker *b);

/* As measured last, on all GPUs. UINT64_MAX: it was not measured. */
uint64_t outside_bytes(const struct session *s);

#endif
