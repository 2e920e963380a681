/* TCP sockets of which the last close waits: SO_LINGER is set and the peer does not read.
 *
 * Nothing here asserts, so attacks use it, too.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_LINGERING_H
#define BFC_TESTS_LINGERING_H

#include <stddef.h>

struct lingering {
        int fd;   /* to be sent; -1: our copy is closed */
        int peer; /* never read; the lingering ends when it is closed */
};

/* Over the loopback interface, with a send buffer that is full. -errno. */
int lingering_new(int linger_s, struct lingering *ret);

/* Closes our copy of `fd`. If it is the last one that does not wait. */
void lingering_close(struct lingering *l);
void lingering_free(struct lingering *l); /* both */

/* The bytes with this file descriptor beside them. flags: of sendmsg(). 0 or -errno. */
int fd_send(int socket, const void *bytes, size_t n_bytes, int fd, int flags);

#endif
