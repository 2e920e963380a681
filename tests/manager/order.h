/* The messages between the stand-in's process and the test: one order in each
 * datagram of a SOCK_SEQPACKET pair, and one answer to each.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_MANAGER_ORDER_H
#define BFC_TESTS_MANAGER_ORDER_H

#include "tests/manager/stand_in.h"

enum order_kind {
        ORDER_LOOK,
        ORDER_SIGNAL, /* number */
        ORDER_HOLD,   /* number: whether */
};

struct order {
        enum order_kind kind;
        int number;
};

struct answer {
        int r;                       /* what the function returns */
        struct stand_in_state state; /* of ORDER_LOOK */
};

/* The process: serves orders until the other end is gone, and never returns. */
_Noreturn void manager_run(const struct stand_in_options *options, int socket);

#endif
