/* Reconnecting: a session is resumed by a daemon that was restarted.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_RECONNECT_H
#define BFC_CLIENT_RECONNECT_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "client/call.h"

struct reconnect;

int reconnect_init(struct reconnect *b, const char *path, const char *name, unsigned return_ms); /* -ENOMEM */

/* The connection of that epoch is gone. 0: there is another one, made by this or another thread.
 * -ECONNRESET: there is none, `lost` and end_reason are set. -EPROTO. No lock is held. interrupt: NULL,
 * or what interrupts this thread's wait: -EINTR, and the next call tries again. */
int client_reconnect(bfc_client *client, uint64_t epoch, unsigned return_ms,
                     struct call_interrupt *interrupt);

/* For a thread that reconnects without a call that waits: pauses for a random time, so that after a restart
 * of the daemon clients with a call come first, and not all of them in one moment. Ends when another thread
 * has reconnected. */
void reconnect_pause_idle(bfc_client *client, uint64_t epoch);

/* For one that connects again: of many, not all in one moment. */
void reconnect_pause_at_random(void);

/* Makes current and later attempts fail soon, and the threads end; or no longer. */
void reconnect_stop(bfc_client *client, bool stops);
bool reconnect_check_stopping(bfc_client *client);
/* The attempts were given up, but no daemon refused: allows one more. */
bool reconnect_try_once_more(bfc_client *client);
void reconnect_hang_up(bfc_client *client); /* aborts the current attempt */

#endif
