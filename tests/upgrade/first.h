/* The first version of the protocol: what was recorded of it (first.txt), and messages in
 * its words (first.proto), compared and decorated field by field.
 *
 * For tests: what does not hold is asserted here.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_FIRST_H
#define BFC_TESTS_FIRST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tests/upgrade/first.pb-c.h"

#define FIRST_MAX_CONNECTIONS 8u /* 1 to 7 */
#define FIRST_MAX_FDS         4u

struct first_line {
        unsigned connection;
        bool to_daemon;
        size_t n_bytes; /* of the payload, without its length; 0: it hangs up */
        uint8_t *payload;
        size_t n_fds;
        struct {
                size_t n_bytes;
                int seals;
        } fds[FIRST_MAX_FDS];
};

struct first {
        struct first_line *lines;
        size_t n_lines;
};

struct first first_read(const char *path);
void first_free(struct first *f);

/* Every field, down into the messages in it, but for those named in `spared` ("field" or
 * "Message.field"), which ends with NULL. */
void first_assert_equal(const ProtobufCMessage *expected, const ProtobufCMessage *actual,
                        const char *const *spared);

/* Fields of a later version, in the message and in every one in it. */
void first_add_unknown(ProtobufCMessage *message);

/* No field that its schema does not know, in it or in any in it. */
void first_assert_known(const ProtobufCMessage *message);

/* All that `first` has is in `today`, with the same number, type and name. */
void first_assert_schema(const ProtobufCMessageDescriptor *first, const ProtobufCMessageDescriptor *today);

#endif
