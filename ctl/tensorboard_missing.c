/* bfcctl tensorboard in a build without a library for CRC32C.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "ctl/tensorboard.h"

int tensorboard_run(const struct tensorboard_options *options)
{
        (void)options;
        fputs("bfcctl: This bfcctl was built without \"tensorboard\", which needs ISA-L for CRC32C. Install its "
              "development files (Debian: libisal-dev) and build again with: meson configure "
              "-Dtensorboard=enabled\n",
              stderr);
        return EXIT_FAILURE;
}
