/* What the benches of a running daemon share: a folder, a daemon in it, processes and clients.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BENCH_DAEMON_H
#define BFC_BENCH_DAEMON_H

#include <bfcclient.h>

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "tests/bench/samples.h"

#define MIB (UINT64_C(1) << 20)

extern char folder[64]; /* of this run; removed when the process that made it ends */
extern char socket_path[96], admin_path[96];

_Noreturn void die(const char *what, const char *why);
void *need(void *memory); /* dies where it is NULL or MAP_FAILED */

void make_folder(const char *program); /* first; also the name that die() prints */
void pin(pid_t pid, int core);         /* -1: not */
void *shared_memory(size_t n_bytes);   /* zeroed, shared with forked processes */

/* A process that calls run(arg) and ends. It is killed when this process ends. This process may have no other threads, as
 * of a client without BFC_NO_THREAD. */
pid_t process_start(void (*run)(void *), void *arg);
void process_stop(pid_t pid, int signal_number);
void processes_kill(const pid_t *pids, long n);                     /* all by SIGKILL, then waits for each */
void process_run(const char *what, void (*run)(void *), void *arg); /* dies unless its status is 0 */

/* Starts the daemon with a config of which the sockets are not part. */
pid_t daemon_start(const char *bfcd, int core, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* One partition `bench` of limit_mib of the host, and one tenant of this user. */
pid_t daemon_start_simple(const char *bfcd, unsigned limit_mib, int core);
void write_config(const char *text, char *ret_path, size_t n_bytes);

/* Connects, and waits for a daemon that starts. */
bfc_client *client_start(const char *path, const char *name, uint64_t flags);

/* The client's calls; they die on an error. */
void *bench_malloc(bfc_client *client, size_t n_bytes);
void bench_free(bfc_client *client, void *p);
struct bfc_tenant_usage bench_usage(bfc_client *client);
struct bfc_client_stats bench_stats(bfc_client *client);

#endif
