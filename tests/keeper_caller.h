/* A caller of the keeper that a daemon has left: for tests, while none runs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_KEEPER_CALLER_H
#define BFC_TESTS_KEEPER_CALLER_H

#include <stdint.h>
#include <sys/types.h>

/* The process that has this device, of the daemon whose admin socket is in this folder; 0: there is none. */
pid_t keeper_pid_in(const char *folder, const char *id);

/* The fds that the host's keeps, also while a daemon runs; the ledger's is one. 0: there is no keeper. */
unsigned keeper_count_in(const char *folder);

/* The result of one request to that of this device: an fd, or 0, or -errno. fd: goes with it, and stays the caller's; -1:
 * none. */
int keeper_ask_in(const char *folder, const char *id, unsigned op, uint64_t key, int fd);

#endif
