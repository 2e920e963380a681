/* A session joins the quotas of its shares, and has blocks there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_SHARE_H
#define BFCD_SHARE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct session;
struct session_share;

/* The session leaves its quotas, and has no shares any more. */
void session_leave_shares(struct session *s);

/* Joins the quota, unless it has. On failure the request `id` has been refused. */
int session_join(struct session *s, struct session_share *share, uint64_t id);

/* session_join() for a session of the previous daemon, whatever the limits say now. -ENOMEM. */
int session_rejoin(struct session *s, struct session_share *share);

/* Counts a block of the session. */
void session_add_block(struct session *s, struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* Frees a block of the session. */
void session_remove_block(struct session_share *share, uint64_t offset, uint64_t n_bytes);

/* The session has freed all its blocks: its peaks no longer count. */
void session_forget_peaks(struct session *s);

#endif
