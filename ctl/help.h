/* bfcctl --help.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_HELP_H
#define BFC_CTL_HELP_H

#include <stdio.h>

void help_print(FILE *out);

/* What bfcctl --help says about one command. */
void help_print_command(FILE *out, const char *name);

#endif
