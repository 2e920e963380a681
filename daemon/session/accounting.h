/* Accounting: log lines and records about sessions that end, about refusals, and about the peaks of quotas.
 *
 * Each session that ends is a line. The lines of a tenant are bounded, because its clients can cause them at
 * will: ACCOUNTING_LINES a minute in all, ACCOUNTING_SHORT a minute of sessions that never had memory and
 * lasted less than a second. One more line sums up the other sessions of that minute. The first refusal is a
 * line, and lines with counts follow at growing intervals. Each of these lines is a record, too.
 *
 * The peaks of a quota are a record when its last session leaves, but not sooner than ACCOUNTING_LEAVE_MS after the
 * record before; each ACCOUNTING_USAGE_MS; and at the end of the daemon. A record has the peaks since the one before,
 * so the largest peak of the records of a time is the peak of that time.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_ACCOUNTING_H
#define BFCD_ACCOUNTING_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/memory/broker.h"

#define ACCOUNTING_SHORT     60u
#define ACCOUNTING_LINES     600u
#define ACCOUNTING_SHORT_MS  1000u
#define ACCOUNTING_WINDOW_MS 60000u
#define ACCOUNTING_LEAVE_MS  60000u
#define ACCOUNTING_USAGE_MS  600000u

struct session;

struct accounting_refusal {
        const struct quota *quota; /* of the session in the partition */
        uint64_t n_bytes;
        const char *limit;    /* which one refused, a word */
        const char *sentence; /* for the log */
        const char *told;     /* to the client */
};

/* Writes that a request of a session, or its hello, was refused. A session whose hello is refused may have no tenant. */
void accounting_refuse(struct session *s, const struct accounting_refusal *refusal);
void accounting_refuse_hello(struct session *s, const char *limit, const char *sentence);

/* accounting_leave(): a session has left the quota. accounting_usage(): to be called each minute, and with `all` at the end. */
void accounting_leave(struct quota *q);
void accounting_usage(struct broker *b, bool all);

/* The session ends; its memory is not freed yet. */
void accounting_end(struct session *s, const char *why);

/* Writes the lines whose time has come, or all of them; false: no line is due later. */
bool accounting_tick(struct broker *b, uint64_t now_ms, bool all);

#endif
