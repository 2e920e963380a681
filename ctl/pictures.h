/* bfcctl map and bfcctl snapshot: what the daemon has now, as pictures and for other programs.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PICTURES_H
#define BFC_CTL_PICTURES_H

#include "ctl/ask.h"

struct pictures_map {
        const char *partition;
        const char *tenant; /* NULL: all */
        const char *svg;    /* a file, or "-" for standard output; NULL: text or JSON */
        bool json;
};

/* A regular file is replaced only when the new one is complete. A device, a FIFO or a symbolic link is written
 * directly. -errno, and a->error is set. */
int pictures_map(struct ask *a, const struct pictures_map *request);

/* The same for PyTorch's memory viewer. *ret_n_left_out: blocks that changed meanwhile. */
int pictures_snapshot(struct ask *a, const char *file, uint64_t *ret_n_left_out);

#endif
