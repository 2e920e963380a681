/* Generated traces, for demonstrations, tests and first trials.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The same name and seed give the same trace on every machine. */
#ifndef BFC_CTL_GENERATE_H
#define BFC_CTL_GENERATE_H

#include <stdint.h>
#include <stdio.h>

/* name: "transformer" or "random". Prints the CSV of trace.h with every size
 * multiplied by scale (rounded up). -ENOENT: no such generator; -ERANGE: a size
 * would not fit; -ENOMEM; -EIO. */
int generate_trace(FILE *out, const char *name, uint64_t seed, double scale);

#endif
