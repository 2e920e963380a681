/* bfcctl tensorboard: the statistics of tenants as curves for TensorBoard.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TENSORBOARD_H
#define BFC_CTL_TENSORBOARD_H

#include <stdint.h>

struct tensorboard_options {
        const char *socket;
        const char *own_tenant; /* for the hello; NULL: the daemon's choice */
        const char *logdir;
        const char *tenant;   /* only its rows; NULL: all */
        uint64_t interval_ms; /* > 0 */
        uint64_t n_steps;     /* 0: until a signal */
};

/* Writes one step per interval until n_steps are written, or SIGINT or SIGTERM arrives; then the file is complete. While
 * the daemon cannot be reached it waits, and says so on standard error. Prints the result, or why it failed. An exit
 * status. */
int tensorboard_run(const struct tensorboard_options *options);

/* "PARTITION/TENANT/NAME". Bytes that no name in a configuration has are written as %XX. -EMSGSIZE. */
#define TENSORBOARD_TAG_MAX 512
int tensorboard_tag(const char *partition, const char *tenant, const char *name,
                    char ret[static TENSORBOARD_TAG_MAX]);

#endif
