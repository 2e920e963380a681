/* What processes wait for, to be told when a test has waited for them in vain.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_PROCESSES_H
#define BFC_TESTS_PROCESSES_H

#include <sys/types.h>

/* Prints the process `manager`, its children, and the programs of bfcd that have the folder in their command line: of each
 * thread its state, the kernel's function and system call, its time, the kernel's stack where this user may see it, and its own
 * where there is a gdb. */
void processes_print(const char *folder, pid_t manager);

#endif
