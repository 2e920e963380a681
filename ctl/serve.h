/* The HTTP side of bfc-exporter: GET /metrics, GET /api/LIST and GET /api/map.svg, answered from the daemon's monitor
 * socket; GET /api/hour, answered from samples; and the page at /, which asks for them.
 *
 * One thread serves all connections. It and serve_sample() take turns to ask the daemon, so they cost it one monitor
 * connection at most. Connections, their memory and their idle time are bounded. Nothing of a request but the path, the
 * format, the name of a partition and a width is read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_SERVE_H
#define BFC_CTL_SERVE_H

#include <stdbool.h>

#define SERVE_CONNECTIONS            32u
#define SERVE_CONNECTIONS_OF_ADDRESS 8u  /* with metrics_only, when other machines and pods can connect */
#define SERVE_TIMEOUT_S              10u /* of a connection on which nothing happens */

struct serve;

/* fd: a listening socket, taken over on success. socket: the daemon's, borrowed. metrics_only: all other paths are not found.
 * -ENOMEM: it could not be started. */
int serve_start(int fd, const char *socket, bool metrics_only, struct serve **ret);

/* Samples the daemon for /api/hour if it is time. Called about once a second, whether or not a page is open. It waits
 * for a request that is being answered, and as long as the daemon may take. */
void serve_sample(struct serve *s);

/* Ends all connections. Takes NULL. */
struct serve *serve_stop(struct serve *s);

#endif
