/* bfcctl explain: the use of memory, as TensorFlow's allocator reports it when it is out of memory.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_EXPLAIN_H
#define BFC_CTL_EXPLAIN_H

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

#include "ctl/list.h"

/* now_ms: since 1970, to print ages. -ENOMEM, -EIO. */
int explain_print(FILE *out, const struct list *l, uint64_t now_ms);

/* NULL when out of memory. */
json_t *explain_json(const struct list *l);

#endif
