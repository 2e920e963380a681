/* The server: the event loop, the two listening sockets, signals, and the list
 * of connections. One thread runs it; only workers run beside it.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SERVER_H
#define BFCD_SERVER_H

#include <stddef.h>

#include "daemon/broker.h"
#include "daemon/config.h"
#include "daemon/manager.h"
#include "daemon/reload.h"

struct server;

/* A loop that does not listen yet. */
int server_new(struct server **ret);

/* For the broker; userdata is the server. From any thread: a worker has
 * finished something. From the loop's: requests that wait are to be looked at. */
void server_notify(void *userdata);
void server_wake(void *userdata);

/* Opens both sockets: those that the service manager hands over as "client" and "admin",
 * which stay its own and must lie where the config says; what it has not is bound here. A
 * socket file that nobody serves is replaced; one that a living daemon serves is an error.
 * On failure one sentence in ret_sentence. m may be NULL; it outlives the server and is
 * told how the daemon fares. */
int server_listen(struct server *s, struct broker *b, const struct config *c, struct manager *m,
                  char *ret_sentence, size_t n_sentence);

/* What SIGHUP and an operator's Reload read again. -ENOMEM. */
int server_set_source(struct server *s, const struct reload_source *source);

/* Serves until SIGTERM or SIGINT, then ends every session. ready() is called
 * once the loop runs. */
int server_run(struct server *s, void (*ready)(void));

/* Removes the sockets' files. Takes NULL. */
struct server *server_free(struct server *s);

#endif
