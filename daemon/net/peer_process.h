/* The process of a peer: its identity, and which tenants it matches.
 *
 * At the connect only the data is read that a place before the hello needs. The rest is slower, and is
 * read when the first request arrives.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_PEER_PROCESS_H
#define BFCD_PEER_PROCESS_H

#include <stdbool.h>
#include <sys/socket.h>

#include "daemon/memory/broker.h"
#include "daemon/net/peer_identity.h"
#include "daemon/net/poller.h"

struct peer_process {
        int pidfd; /* -1: the process cannot be watched */
        struct poller *poller;
        struct poller_item item; /* of pidfd, while it is watched */
        struct peer_identity identity;
        bool is_known;           /* its start time was read */
        socklen_t n_group_bytes; /* size of its group list, if it is too long to be matched early; else 0 */
};

/* Reads how the kernel shows ids without a mapping to the daemon; before the others. */
void peer_process_start(void);

/* Of a socket that was just accepted. *ret_who: ids only. -ESRCH: the process is gone; -errno. */
int peer_process_new(struct peer_process *p, int fd, struct credentials *ret_who);

/* The process of a session of the previous daemon. -ESRCH: it is gone, whichever process has its pid now.
 * Other errors: it cannot be watched. */
int peer_process_find(struct peer_process *p, const struct credentials *who);

/* The tenant that the peer's hello would probably be answered with: the first that its process matches now, or the default
 * tenant, or that of its user's suspended sessions. NULL: none. Of a process in very many groups only the first one
 * counts. Keeps what of this stays true: the ids. -ENOMEM. */
int peer_process_expect(struct peer_process *p, const struct broker *b, int fd, struct credentials *who,
                        const struct tenant **ret);

/* Reads and matches what is not known yet, also after a reload. is_hello: the control group is read again, because it is
 * what a lease is chosen by. -ENOMEM; -errno. */
int peer_process_match(struct peer_process *p, const struct broker *b, int fd, bool is_hello,
                       struct credentials *who);

bool peer_process_has_exited(const struct peer_process *p);

/* Calls report() when it has exited, until peer_process_ignore(). Does nothing if it is watched. -errno: it cannot be
 * watched, also not later. */
int peer_process_watch(struct peer_process *p, struct poller *poller,
                       void (*report)(struct poller_item *item, uint32_t events));
bool peer_process_is_watched(const struct peer_process *p);
void peer_process_ignore(struct peer_process *p);

/* Ends all that. */
void peer_process_close(struct peer_process *p);

#endif
