/* In the place of top_screen.c where bfcctl is built without ncurses.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "ctl/top.h"

int top_screen_run(struct top *t, struct top_source *source, const char *socket, const char **ret_error)
{
        (void)t;
        (void)socket;
        top_source_close(source);
        *ret_error =
                "this bfcctl was built without ncurses. Install libncurses-dev (Debian) and build it with "
                "-Dtop=enabled, or use: bfcctl top --once";
        return -ENOSYS;
}
