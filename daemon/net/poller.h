/* The poller: which of many file descriptors have events; one epoll set, in which libuv's own is an item. libuv's
 * handles would take five system calls for a new file descriptor and two for each change; this takes one for each.
 *
 * An item is reported again and again while its events last. One that waits with EPOLLET is reported once each time that
 * something comes, and when its events are changed: its owner notes the report until there is nothing more to read. Not
 * thread-safe.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_POLLER_H
#define BFCD_POLLER_H

#include <stdint.h>
#include <sys/epoll.h>

struct poller;

/* Embedded in what owns the file descriptor. Zero-initialised it waits for nothing. */
struct poller_item {
        int fd;
        uint32_t
                events; /* EPOLL…, that it waits for; 0: none, not even errors. Changed by poller_set() only */
        /* `events`: some of those, without EPOLLET; all of them after an error or a hang-up. May change any item. */
        void (*report)(struct poller_item *item, uint32_t events);
};

int poller_new(struct poller **ret);
struct poller *poller_free(struct poller *p); /* takes NULL, returns NULL */

/* Changes the events of an item; 0: no more reports, before its fd is closed or its memory freed.
 * -ENOMEM, -ENOSPC: only for an item that waited for nothing. */
int poller_set(struct poller *p, struct poller_item *item, uint32_t events);

/* Waits for events (-1: without a limit) and reports them, of a bounded number of items. */
void poller_run(struct poller *p, int timeout_ms);

#endif
