/* The poller; see poller.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "daemon/net/poller.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#define POLLER_BATCH 256

struct poller {
        int fd;
        int n; /* in the batch at hand */
        struct epoll_event batch[POLLER_BATCH];
};

int poller_new(struct poller **ret)
{
        struct poller *p = calloc(1, sizeof(*p));

        if (!p)
                return -ENOMEM;
        p->fd = epoll_create1(EPOLL_CLOEXEC);
        if (p->fd < 0) {
                int r = -errno;

                free(p);
                return r;
        }
        *ret = p;
        return 0;
}

struct poller *poller_free(struct poller *p)
{
        if (!p)
                return NULL;
        close(p->fd);
        free(p);
        return NULL;
}

/* The batch at hand may name it: it may be freed before its turn there. */
static void forget_reports(struct poller *p, const struct poller_item *item)
{
        for (int i = 0; i < p->n; i++)
                if (p->batch[i].data.ptr == item)
                        p->batch[i].data.ptr = NULL;
}

int poller_set(struct poller *p, struct poller_item *item, uint32_t events)
{
        struct epoll_event event = { .events = events, .data.ptr = item };
        int op = item->events == 0 ? EPOLL_CTL_ADD : events == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;

        if (events == item->events)
                return 0;
        if (events == 0)
                forget_reports(p, item);
        if (epoll_ctl(p->fd, op, item->fd, &event) < 0 && events != 0)
                return -errno;
        item->events = events;
        return 0;
}

static void report(struct poller_item *item, uint32_t events)
{
        if (events & (EPOLLERR | EPOLLHUP))
                events = item->events;
        events &= item->events & ~(uint32_t)EPOLLET; /* it may have changed since the kernel was asked */
        if (events != 0)
                item->report(item, events);
}

void poller_run(struct poller *p, int timeout_ms)
{
        p->n = epoll_wait(p->fd, p->batch, POLLER_BATCH, timeout_ms);
        for (int i = 0; i < p->n; i++)
                if (p->batch[i].data.ptr)
                        report(p->batch[i].data.ptr, p->batch[i].events);
        p->n = 0;
}
