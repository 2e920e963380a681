/* Pressure: the daemon needs memory for others. The program's function is called, idle slabs are returned, and
 * idle parkable blocks are parked; or an operator has blocks parked or woken.
 *
 * All of this may take long and may wait for the daemon, so it is done by a thread of its own, "bfc-park", which
 * starts with the first Pressure; in a client with BFC_POLL by bfc_poll(). Events come in meanwhile: Trims and
 * Retires are answered also while the program's function does not return.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CLIENT_PRESSURE_H
#define BFC_CLIENT_PRESSURE_H

#include <bfcclient.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "proto/bfcd.pb-c.h"

/* For events.h. EVENTS_TAKEN: it is served later; 0: it cannot be served. -EPROTO: it is invalid. */
int client_on_pressure(bfc_client *client, uint64_t epoch, Bfcd__Event *event);

/* Serves what has arrived, if there is no thread for it. */
void client_pressure_poll(bfc_client *client);

/* Whether fn is what calls bfc_disconnect(). Then the thread does it when fn has returned. */
bool client_pressure_disconnects(bfc_client *client);

/* After reconnect_stop(): waits for the end of the thread, which finishes what it is doing. -ETIMEDOUT: that takes longer, call it again. 0 ms: no
 * time-out. */
int client_pressure_stop(bfc_client *client, unsigned timeout_ms);

#endif
