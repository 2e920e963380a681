/* Messages: a frame's payload to a protobuf-c structure and back, in bounded
 * memory.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A small payload can ask for much memory (a repeated field of empty messages).
 * So what comes from the other end is unpacked into an arena of fixed size that
 * is used again for every message: nothing to free, no malloc in the steady
 * state, and a message that wants more is a violation. Not thread-safe. */
#ifndef BFC_PROTO_MESSAGE_H
#define BFC_PROTO_MESSAGE_H

#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define MESSAGE_ARENA_BYTES (512u * 1024u) /* a fair size; pages unused cost nothing */

struct message_arena;

/* -ENOMEM. */
int message_arena_new(size_t n_bytes, struct message_arena **ret);
struct message_arena *message_arena_free(struct message_arena *a);

/* The message in a payload, valid until the arena's next use (never call
 * free_unpacked() on it). NULL: not such a message, or larger than the arena:
 * -EPROTO for the caller. Whether the body is known and has what it needs is
 * the caller's business. */
Bfcd__Request *message_unpack_request(struct message_arena *a, const uint8_t *payload, size_t n_bytes);
Bfcd__Reply *message_unpack_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes);
Bfcd__EventReply *message_unpack_event_reply(struct message_arena *a, const uint8_t *payload, size_t n_bytes);

#endif
