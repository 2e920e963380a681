/* The daemon of a plan: a bfcd on a device without memory, with sockets of its own, which this process starts.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_BFCD_H
#define BFC_CTL_PLAN_BFCD_H

#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "ctl/plan_place.h"

struct plan_bfcd {
        pid_t pid;
        FILE *log;
        char folder[PATH_MAX / 2]; /* of its config and its sockets; removed at the end */
        char socket[PATH_MAX];
};

/* Clients may connect at once: they wait until it serves. It ends with this process. -errno. */
int plan_bfcd_start(const struct plan_place *place, uint64_t limit_bytes, struct plan_bfcd *ret);

/* ret_words, if not NULL: the first line that it wrote, the caller's to free; NULL: none. */
void plan_bfcd_end(struct plan_bfcd *d, char **ret_words);

#endif
