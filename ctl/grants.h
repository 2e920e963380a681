/* bfcctl grants: how long requests waited for their grant, by tenant, partition and way.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_GRANTS_H
#define BFC_CTL_GRANTS_H

#include <jansson.h>
#include <stdio.h>

#include "ctl/list.h"

/* -ENOMEM, -EIO. */
int grants_print(FILE *out, const struct list *l);

/* NULL when out of memory. */
json_t *grants_json(const struct list *l);

#endif
