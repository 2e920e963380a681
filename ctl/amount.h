/* Times and sizes in options: each has one way to be written.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_AMOUNT_H
#define BFC_CTL_AMOUNT_H

#include <stdbool.h>
#include <stdint.h>

/* "500ms", "30s", "10m", "1h30m", "2d", "1.5h", also with systemd's other names of units; a number alone is seconds.
 * False: none of these, or more than INT64_MAX / 2. */
#define AMOUNT_TIME "a time, as in 30s, 10m, 1h30m or 2d; a number alone is seconds"
bool amount_time(const char *text, uint64_t *ret_ms);

/* "123" and "123B", "512KiB", "3MiB", "2GiB", "1TiB". */
bool amount_size(const char *text, uint64_t *ret_bytes);

#endif
