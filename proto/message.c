/* Messages in bounded memory; see message.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The allocator given to protobuf-c only counts upwards and starts again with
 * each message: n_used <= n_bytes. */
#include "proto/message.h"

#include <errno.h>
#include <stdalign.h>
#include <stdlib.h>

#include "proto/quick.h"

struct message_arena {
        ProtobufCAllocator allocator;
        size_t n_bytes;
        size_t n_used;
        struct quick_request quick;
        alignas(max_align_t) uint8_t bytes[];
};

static void *arena_alloc(void *userdata, size_t n_bytes)
{
        struct message_arena *a = userdata;
        void *p;

        if (n_bytes > a->n_bytes - a->n_used)
                return NULL;
        p = a->bytes + a->n_used;
        n_bytes = (n_bytes + alignof(max_align_t) - 1) & ~(alignof(max_align_t) - 1);
        a->n_used = n_bytes > a->n_bytes - a->n_used ? a->n_bytes : a->n_used + n_bytes;
        return p;
}

static void arena_nothing(void *userdata, void *pointer)
{
        (void)userdata;
        (void)pointer;
}

int message_arena_new(size_t n_bytes, struct message_arena **ret)
{
        struct message_arena *a = malloc(sizeof(*a) + n_bytes);

        if (!a)
                return -ENOMEM;
        a->allocator.alloc = arena_alloc;
        a->allocator.free = arena_nothing;
        a->allocator.allocator_data = a;
        a->n_bytes = n_bytes;
        a->n_used = 0;
        *ret = a;
        return 0;
}

struct message_arena *message_arena_free(struct message_arena *a)
{
        free(a);
        return NULL;
}

Bfcd__Request *message_unpack_request(struct message_arena *a, const uint8_t *payload, size_t n_bytes)
{
        a->n_used = 0;
        if (quick_unpack_request(payload, n_bytes, &a->quick))
                return &a->quick.request;
        return bfcd__request__unpack(&a->allocator, n_bytes, payload);
}

Bfcd__Reply *message_unpack_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes)
{
        a->n_used = 0;
        return bfcd__reply__unpack(&a->allocator, n_bytes, payload);
}

Bfcd__EventReply *message_unpack_event_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes)
{
        a->n_used = 0;
        return bfcd__event_reply__unpack(&a->allocator, n_bytes, payload);
}
