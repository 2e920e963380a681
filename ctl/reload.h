/* bfcctl reload: the changes, or the errors.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_RELOAD_H
#define BFC_CTL_RELOAD_H

#include <stdbool.h>
#include <stdio.h>

#include "ctl/ask.h"

/* One sentence per line: changes to out, errors to errors. -ENOMEM. */
int reload_show(FILE *out, FILE *errors, const Bfcd__ReloadReply *reply, bool dry_run);

/* All of it as JSON to out. -ENOMEM, -EIO. */
int reload_show_json(FILE *out, const Bfcd__ReloadReply *reply, bool dry_run);

/* Sends a file and those of conf.d beside it, as the daemon would read them, before a dry run. On failure a->error is
 * set. */
int reload_send_files(struct ask *a, const char *path);

#endif
