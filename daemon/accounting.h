/* Accounting: what the log keeps of sessions that end, and of refusals.
 *
 * Each session that ends is a line. What a client can cause at will is bounded for each tenant: of sessions that
 * never had memory and lasted less than a second there are ACCOUNTING_SHORT lines a minute, of all together
 * ACCOUNTING_LINES. The others of that minute are summed up in one more line: nothing is left out of the sums.
 * Of refusals the first is a line, and lines with counts follow at growing intervals.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ACCOUNTING_H
#define BFCD_ACCOUNTING_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/broker.h"

#define ACCOUNTING_SHORT     60u
#define ACCOUNTING_LINES     600u
#define ACCOUNTING_SHORT_MS  1000u
#define ACCOUNTING_WINDOW_MS 60000u

struct session;

/* The session ends, and still has what it had. */
void accounting_end(struct session *s, const char *why);

/* Writes the lines whose time has come, or all of them; false: no line is due later. */
bool accounting_tick(struct broker *b, uint64_t now_ms, bool all);

#endif
