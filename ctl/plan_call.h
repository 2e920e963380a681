/* Which daemon a plan's client reaches.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_CALL_H
#define BFC_CTL_PLAN_CALL_H

struct plan_daemon;

/* The next call_connect() reaches this one. */
void plan_call_serve(struct plan_daemon *daemon);

#endif
