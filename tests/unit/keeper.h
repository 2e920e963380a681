/* SPDX-License-Identifier: Apache-2.0 */
/* A service manager that keeps fds, in a thread: what it is told over NOTIFY_SOCKET it does
 * as systemd 252 does, and it can be told to be slow, unresponsive or gone. */
#ifndef TESTS_KEEPER_H
#define TESTS_KEEPER_H

#include <stdbool.h>

#include "daemon/handover/manager.h"

enum { KEEPER_MAX = 200 };

struct keeper;

/* Listens, and sets NOTIFY_SOCKET, and BFCD_FDSTORE to `store` (NULL: unset). */
struct keeper *keeper_new(const char *store);
struct keeper *keeper_free(struct keeper *k);

/* While it is paused it takes nothing, and its queue becomes full. */
void keeper_pause(struct keeper *k, bool is_paused);

/* It takes barriers, and never answers. */
void keeper_ignore_barriers(struct keeper *k, bool ignores);

/* Its socket is no more. */
void keeper_go(struct keeper *k);

/* Waits until it has taken all that it was told. */
void keeper_settle(struct keeper *k);

unsigned keeper_count(struct keeper *k); /* fds that it keeps */
unsigned keeper_count_of(struct keeper *k, const char *name);
int keeper_fd(struct keeper *k, const char *name);            /* borrowed; -1 */
void keeper_keep(struct keeper *k, const char *name, int fd); /* as if it had been told so */
unsigned keeper_n_messages(struct keeper *k);                 /* ever taken */

/* Runs in a process that is started with what is kept: false from run() is a failed test. */
void keeper_succeed(struct keeper *k, bool (*run)(struct manager *m, void *userdata), void *userdata);

#endif
