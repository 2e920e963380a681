/* Version 1 of the protocol: the recorded exchange (v1.txt), and messages by the schema of version 1
 * (v1.proto), compared and decorated field by field. For tests: a failure is asserted here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_V1_H
#define BFC_TESTS_V1_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/upgrade/v1.pb-c.h"

#define V1_MAX_CONNECTIONS 10u /* 1 to 9 */
#define V1_MAX_FDS         4u

struct v1_line {
        unsigned connection;
        bool to_daemon;
        size_t n_bytes; /* of the payload, without its length; 0: it hangs up */
        uint8_t *payload;
        size_t n_fds;
        struct {
                size_t n_bytes; /* 0: it is a socket */
                int seals;
        } fds[V1_MAX_FDS];
};

struct v1 {
        struct v1_line *lines;
        size_t n_lines;
};

struct v1 v1_read(const char *path);
void v1_free(struct v1 *f);

/* Every field, down into the messages in it, but for those named in `spared` ("field" or
 * "Message.field"), which ends with NULL. */
void v1_assert_equal(const ProtobufCMessage *expected, const ProtobufCMessage *actual,
                     const char *const *spared);

/* Fields of a later version, in the message and in every one in it. */
void v1_add_unknown(ProtobufCMessage *message);

/* No field that its schema does not know, in it or in any in it. */
void v1_assert_known(const ProtobufCMessage *message);

/* All that `v1` has is in `today`, with the same number, type and name. */
void v1_assert_schema(const ProtobufCMessageDescriptor *v1, const ProtobufCMessageDescriptor *today);

#endif
