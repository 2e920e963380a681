/* The messages between the stand-in's process and the test: one order in each
 * datagram of a SOCK_SEQPACKET pair, and one answer to each, with at most one fd beside.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_MANAGER_ORDER_H
#define BFC_TESTS_MANAGER_ORDER_H

#include "tests/manager/stand_in.h"

enum order_kind {
        ORDER_LOOK,
        ORDER_SIGNAL, /* number */
        ORDER_HOLD,   /* number: whether */
        ORDER_STOP,
        ORDER_NAME,    /* number; answered with the name */
        ORDER_GET,     /* name; answered with an fd */
        ORDER_DROP,    /* name */
        ORDER_REPLACE, /* name and an fd */
        ORDER_PUT,     /* name and an fd */
};

struct order {
        enum order_kind kind;
        int number;
        char name[STAND_IN_NAME_BYTES];
};

struct answer {
        int r; /* what the function returns */
        char name[STAND_IN_NAME_BYTES];
        struct stand_in_state state; /* of ORDER_LOOK */
};

/* The process: serves orders until the other end is gone, and never returns. */
_Noreturn void keeper_run(const struct stand_in_options *options, int socket);

#endif
