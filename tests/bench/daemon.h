/* What benches of a running daemon share: a folder, a daemon in it, a client.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_DAEMON_H
#define BFC_BENCH_DAEMON_H

#include <bfcclient.h>

#include <stdint.h>
#include <sys/types.h>

extern char folder[64]; /* of this run; gone when the process that made it ends */

_Noreturn void die(const char *what, const char *why);
void make_folder(const char *program); /* first; also what die() calls itself */
uint64_t now_ns(void);
void pin(pid_t pid, int core); /* -1: not */

/* One partition of so many MiB of the host, all for this user; its socket is bfcd.sock in the
 * folder. */
pid_t daemon_start(const char *bfcd, unsigned limit_mib, int core);

/* With a config of the caller's own but for its sockets, bfcd.sock and admin.sock. */
pid_t daemon_start_with(const char *bfcd, const char *rest, int core);

/* Connects, waiting a little for a daemon that starts. */
bfc_client *client_start(const char *path, const char *name, uint64_t flags);

#endif
