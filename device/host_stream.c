/* Streams of the host: plain numbers without work of their own.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The processor's work is complete when a function returns, so each event is complete from the start.
 * Tests replace this file by tests/host_stream.c, whose streams have work. */
#include <errno.h>
#include <stdlib.h>

#include "device/backend.h"

struct device_event {
        uintptr_t stream;
};

static struct device_streams *host_streams_free(struct device_streams *d)
{
        free(d);
        return NULL;
}

static int host_streams_captured(struct device_streams *d, uintptr_t stream, uint64_t *ret_id)
{
        (void)d;
        (void)stream;
        *ret_id = 0;
        return 0;
}

static int host_streams_record(struct device_streams *d, uintptr_t stream, struct device_event **event)
{
        (void)d;
        if (!*event)
                *event = malloc(sizeof(**event));
        if (!*event)
                return -ENOMEM;
        (*event)->stream = stream;
        return 0;
}

static int host_streams_query(struct device_streams *d, struct device_event *event)
{
        (void)d;
        (void)event;
        return 0;
}

static struct device_event *host_streams_forget(struct device_streams *d, struct device_event *event)
{
        (void)d;
        free(event);
        return NULL;
}

int host_streams_finish(void)
{
        return 0;
}

static const struct device_streams_ops host_streams_ops = {
        .name = "host",
        .free = host_streams_free,
        .is_captured = host_streams_captured,
        .record = host_streams_record,
        .query = host_streams_query,
        .forget = host_streams_forget,
};

int host_streams_new(struct device_streams **ret)
{
        struct device_streams *d = malloc(sizeof(*d));

        if (!d)
                return -ENOMEM;
        *d = (struct device_streams){ .ops = &host_streams_ops, .are_permanent = true };
        *ret = d;
        return 0;
}
