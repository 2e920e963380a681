/* Other programs: beside this one, in the folder sbin beside its folder, or in the path. What looks back is Python:
 * bfcd.tools, in the program bfcd-tools of the Python package.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_TOOLS_H
#define BFC_CTL_TOOLS_H

#include <stdio.h>

/* This process becomes that program; words: with its name, they end with NULL. Returns, with errno, where it is not possible. */
void tools_become(const char *program, char *const words[]);

/* "--name=value", also of a value that begins with "-". The caller frees it. NULL: out of memory. */
char *tools_option(const char *name, const char *value);

/* This process becomes that program, with these words after its name; they end with NULL. who: "bfcctl"; what: the command,
 * for the error. An exit status, where it is not possible. */
int tools_exec(const char *who, const char *what, const char *const words[]);

/* Runs the tool in a child, which reads one file from its begin and writes to the other, which is then at its
 * begin; out: NULL for standard output. Its exit status; -errno: it could not be started. */
int tools_call(const char *who, const char *what, const char *const words[], FILE *in, FILE *out);

#endif
