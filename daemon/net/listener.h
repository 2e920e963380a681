/* A listener: a listening socket, which accepts connections in turns of the scheduler. One of the config is bound here, or
 * comes from the service manager. Those of leases share the turns of the client socket, one accepts after the other.
 *
 * Accepting pauses while file descriptors are short, or too many ended connections wait to be closed.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LISTENER_H
#define BFCD_LISTENER_H

#include <uv.h>

#include "daemon/base/role.h"
#include "daemon/config/config.h"
#include "daemon/net/poller.h"
#include "daemon/net/sched.h"

#define LISTENER_BACKLOG 1024

struct connection_host;
struct lease_socket;

struct listener {
        struct connection_host *host;
        enum role role;
        const struct lease_socket *socket; /* of leases, in its folder (lease_folder.h); NULL: the config's */
        int fd;
        int lock_fd;
        char *path;              /* NULL: not bound here, so not ours to remove */
        struct poller_item item; /* of fd */
        uv_timer_t pause;
        struct sched_member pending; /* connections that are not accepted yet have turns too */
};

void listener_init(struct listener *l, struct connection_host *host, enum role role);

/* Binds the socket of the config, or takes passed_fd, that of the service manager, unless it is -1. A stale socket file is
 * replaced. listener_trouble(): what the error means. */
int listener_open(struct listener *l, const struct config_socket *c, int passed_fd);
const char *listener_trouble(int r);

/* It accepts connections from now on, and no more. -ENOMEM, -errno. */
int listener_start(struct listener *l);
void listener_stop(struct listener *l);

/* Closes it and removes its file. The caller closes the handle `pause`. */
void listener_close(struct listener *l);

#endif
