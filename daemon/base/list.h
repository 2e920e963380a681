/* Members of a TAILQ that know whether they are in it: the link says that itself. A link begins with zeroes, and only
 * these macros change the list.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_LIST_H
#define BFCD_LIST_H

#include <stddef.h>
#include <sys/queue.h>

#define LIST_HAS(item, link) ((item)->link.tqe_prev != NULL)

/* Appends it, unless it is there already. */
#define LIST_ADD(list, item, link)                                                                           \
        do {                                                                                                 \
                if (!LIST_HAS(item, link))                                                                   \
                        TAILQ_INSERT_TAIL(list, item, link);                                                 \
        } while (0)

/* Removes it, if it is there. */
#define LIST_DROP(list, item, link)                                                                          \
        do {                                                                                                 \
                if (LIST_HAS(item, link))                                                                    \
                        TAILQ_REMOVE(list, item, link);                                                      \
                (item)->link.tqe_prev = NULL;                                                                \
        } while (0)

#endif
