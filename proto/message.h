/* Messages: converts a frame's payload to a protobuf-c structure in bounded memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A small payload can require much memory (a repeated field of empty messages). So messages are unpacked
 * into an arena of fixed size that is reused for every message: no free and no malloc per message, and a
 * message that does not fit is a violation. Not thread-safe. */
#ifndef BFC_PROTO_MESSAGE_H
#define BFC_PROTO_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define MESSAGE_ARENA_BYTES (512u * 1024u) /* unused pages take no memory */

/* A request, as in REQUEST(LIST, list, &question); its id is set where it is sent. */
#define REQUEST(kind, member, question)                                                                      \
        {                                                                                                    \
                PROTOBUF_C_MESSAGE_INIT(&bfcd__request__descriptor),                                         \
                        .body_case = BFCD__REQUEST__BODY_##kind, .member = (question)                        \
        }

struct message_arena;

/* -ENOMEM. */
int message_arena_new(size_t n_bytes, struct message_arena **ret);
struct message_arena *message_arena_free(struct message_arena *a);

/* The message in a payload, valid until the arena's next use (never call free_unpacked() on it). NULL:
 * not such a message, or larger than the arena; callers report -EPROTO. The caller checks that the body
 * is known and complete. */
Bfcd__Request *message_unpack_request(struct message_arena *a, const uint8_t *payload, size_t n_bytes);
Bfcd__Reply *message_unpack_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes);
Bfcd__EventReply *message_unpack_event_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes);

#endif
