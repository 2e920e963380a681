/* Retirement: if a device cannot empty the mappings of an extent, every session that received the extent
 * is asked to unmap it. The extent is destroyed when the last session has confirmed or ended.
 *
 * A retirement is the recall (see recall.h) of at most 64 extents from one session. At most 16
 * retirements of a session are sent and unconfirmed; further ones wait here. A retirement is sent only
 * after all earlier Extents messages were acknowledged, so a client knows each extent that it unmaps.
 *
 * A client that has not confirmed after RETIRE_TIMEOUT_MS is marked unresponsive. Its extents are not waited for until it
 * has confirmed all of its retirements. The session continues, because only its process knows how long
 * its work takes. A session without events could never confirm, so it is disconnected instead.
 *
 * Invariants: each export of a retirement belongs to its session and to a retired extent. An export of a
 * retired extent is late if its session has `ignores_retires`. The retirements of such a session have no
 * deadline if it has events; all others have one.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_RETIRE_H
#define BFCD_RETIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RETIRE_MAX_EXTENTS 64u /* in one event */
#define RETIRE_MAX_OPEN    16u /* events sent and not confirmed */
#define RETIRE_TIMEOUT_MS  5000u

struct broker;
struct recall;
struct session;

/* Its hello is granted; whether it takes events is known. */
void retire_begin(struct session *s);

/* retire_begin() for a resumed session that is LIVE. It was not asked to unmap extents that were retired
 * before, so it starts as unresponsive if there are any. */
void retire_begin_resumed(struct session *s);

/* For upcalls. */
void retire_extents(struct broker *b, const uint32_t *extents, size_t n_extents);
bool retire_unmaps_soon(const struct broker *b, uint32_t extent);

/* The session has acknowledged more extents, so further retirements may be sent. */
void retire_flush(struct session *s);

/* The client has answered a retirement, or missed its time-out. */
void retire_answer(struct recall *r);
void retire_miss(struct recall *r);

/* The session hung up, so its mappings are late. */
void retire_silence(struct session *s);
/* The session closes, which clears its exports anyway. */
void retire_end(struct session *s);

/* Clears an export of the session. All exports are cleared by this. */
void retire_clear_export(struct session *s, uint32_t export);

/* Every invariant; slow. 0, or -EBADMSG and a sentence. */
int retire_check(const struct broker *b, const char **ret_why);

#endif
