/* bfcctl reload: what changed, or why nothing did.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_RELOAD_H
#define BFC_CTL_RELOAD_H

#include <stdbool.h>
#include <stdio.h>

#include "proto/bfcd.pb-c.h"

/* A sentence on a line each: changes to out, what is wrong to errors. -ENOMEM. */
int reload_show(FILE *out, FILE *errors, const Bfcd__ReloadReply *reply, bool dry_run);

/* All of it as JSON to out. -ENOMEM, -EIO. */
int reload_show_json(FILE *out, const Bfcd__ReloadReply *reply, bool dry_run);

#endif
