/* The server: the event loop, the listening sockets, signals, and the list
 * of connections. One thread runs it; only workers run beside it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SERVER_H
#define BFCD_SERVER_H

#include <stddef.h>

#include "daemon/memory/broker.h"
#include "daemon/config/config.h"
#include "daemon/net/manager.h"
#include "daemon/session/reload.h"

struct server;

/* A loop that does not listen yet. */
int server_new(struct server **ret);

/* For the broker; userdata is the server. server_notify(), from any thread: a worker has finished a job.
 * server_wake(), from the loop's thread: turns are due. */
void server_notify(void *userdata);
void server_wake(void *userdata);

/* For the broker: listens on the socket of leases, in its folder, and ends that. -errno, logged. */
int server_open_socket(void *userdata, struct lease_socket *socket);
void server_close_socket(void *userdata, struct lease_socket *socket);

/* Opens all sockets, also those of leases that the broker has. The service manager may pass them as "client", "admin", "monitor"
 * and "lease"; they must have the config's paths. Others are bound here. A stale socket file is replaced; a socket that another
 * daemon serves is an error. On failure one sentence in ret_sentence. m may be NULL; it outlives the server and is told the
 * daemon's status. */
int server_listen(struct server *s, struct broker *b, const struct config *c, struct manager *m,
                  char *ret_sentence, size_t n_sentence);

/* The path of the config that SIGHUP and an operator's Reload read; borrowed. -ENOMEM. */
int server_set_config_path(struct server *s, const char *path);

/* Serves until SIGTERM or SIGINT, then ends every session. ready() is called
 * once the loop runs. */
int server_run(struct server *s, void (*ready)(const struct broker *b));

/* Removes the files of the config's sockets. Those of leases that are left to the next daemon stay, with their folders,
 * because these are mounted. Takes NULL. */
struct server *server_free(struct server *s);

#endif
