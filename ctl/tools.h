/* What looks back is Python: bfcd.tools, in the program bfcd-tools of the Python package. It is beside this program, or in the
 * path.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOOLS_H
#define BFC_CTL_TOOLS_H

#include <stdio.h>

/* Words that end with NULL, and after them options: pairs of "--name" and a value, which end with NULL; those whose value is
 * NULL are left out. */
struct tools_words {
        const char *const *words, *const *options;
};

/* This process becomes the tool. in: its standard input, read from its begin; NULL: this process's. who: "bfcctl"; what: the
 * command, for the error. An exit status, where it is not possible. */
int tools_exec(const char *who, const char *what, const struct tools_words *words, FILE *in);

/* Runs the tool in a child. out: its standard output, which is then at its begin; NULL: this process's. Its exit status;
 * -errno: it could not be started. */
int tools_call(const char *who, const char *what, const struct tools_words *words, FILE *in, FILE *out);

#endif
