/* The places of connections to the monitor socket. They are few, also for one user, so that other users can look
 * while one has taken all that it may.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_MONITORS_H
#define BFCD_MONITORS_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#define MONITORS_MAX         64u
#define MONITORS_MAX_OF_USER 16u

/* All zeros: all places are free. */
struct monitors {
        struct {
                bool is_taken;
                uid_t uid;
        } places[MONITORS_MAX];
};

/* Takes a place, from 1 on. -EUSERS: none is free. -EDQUOT: the user has as many as it may. */
int monitors_join(struct monitors *m, uid_t uid, size_t *ret_place);
void monitors_leave(struct monitors *m, size_t place); /* 0: no place */

#endif
