/* bfcctl map: writes the map where the user wants it.
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

#endif
