/* The messages of most requests, coded by hand: Malloc and Free, and their replies Block and Done. The generated code walks
 * tables, which takes as long as the rest of such a request.
 *
 * Exact: what is accepted here gives the same fields, or the same bytes, as the generated code. Everything else is refused
 * here, for the generated code to decide on: fields out of order or twice, unknown ones, long tags.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_QUICK_H
#define BFC_PROTO_QUICK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

#define QUICK_TAG_BYTES   32u /* with its end */
#define QUICK_REPLY_BYTES 64u

/* A request with its body, which it points to. */
struct quick_request {
        Bfcd__Request request;
        union {
                Bfcd__Malloc malloc;
                Bfcd__Free free;
        } body;
        char tag[QUICK_TAG_BYTES];
};

/* False: it is no such request in its usual form; *ret has any contents. */
bool quick_unpack_request(const uint8_t *payload, size_t n_bytes, struct quick_request *ret);

/* The number of bytes; 0: it is no such reply. */
size_t quick_pack_reply(const Bfcd__Reply *reply, uint8_t ret_payload[QUICK_REPLY_BYTES]);

#endif
