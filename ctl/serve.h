/* The HTTP side of bfc-exporter: GET /metrics, GET /api/LIST and GET /api/map.svg, answered from the daemon's monitor
 * socket, and the page at /, which asks for them.
 *
 * One thread serves all connections and asks the daemon for one request at a time, so HTTP clients cost the daemon one
 * monitor connection at most. Connections, their memory and their idle time are bounded. Nothing of a request but the
 * path, the format and the name of a partition is read.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_SERVE_H
#define BFC_CTL_SERVE_H

#define SERVE_CONNECTIONS 32u
#define SERVE_TIMEOUT_S   10u /* of a connection on which nothing happens */

struct serve;

/* fd: a listening socket, taken over on success. socket: the daemon's, borrowed. -ENOMEM: it could not be
 * started. */
int serve_start(int fd, const char *socket, struct serve **ret);

/* Ends all connections. Takes NULL. */
struct serve *serve_stop(struct serve *s);

#endif
