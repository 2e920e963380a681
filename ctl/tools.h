/* The commands that look back are Python: bfcd.tools, in the program bfcd-tools of the Python package.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOOLS_H
#define BFC_CTL_TOOLS_H

#include "ctl/command.h"

/* This process becomes that program. options: pairs "--name", value, which ends with NULL; those without a value (NULL)
 * are left out. An exit status, where that is not possible. */
int tools_run(const struct invocation *i, const struct command *c, const char *const options[]);

#endif
