/* The page that bfc-exporter serves at /, generated from ctl/page/ by embed.py.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PAGE_H
#define BFC_CTL_PAGE_H

#include <stddef.h>

extern const char page_html[]; /* not terminated */
extern const size_t page_n_bytes;

/* The value of Content-Security-Policy: no other script and style, and nothing from another host. */
extern const char page_policy[];

#endif
