/* Points in time as journalctl(1) takes them.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_WHEN_H
#define BFC_CTL_WHEN_H

#include <stdint.h>
#include <time.h>

#define WHEN_FORMS "2026-11-22, \"2026-11-22 03:00\", 03:00, -2h, yesterday, today or now"

/* "now", "today", "yesterday", "-2h", "-90min", "2d ago", "@1795459887", "03:00", "2026-11-22", "2026-11-22 03:00:00",
 * in local time. -EINVAL. Microseconds since 1970. */
int when_parse(const char *text, time_t now, uint64_t *ret_us);

/* "2026-11-22 03:00:12", in local time. */
#define WHEN_TEXT 32
const char *when_text(uint64_t us, char ret[static WHEN_TEXT]);

#endif
