/* Checks the mappings of disconnected clients.
 *
 * A process that executes another program loses its mappings and keeps its pid. So the daemon checks
 * periodically whether extents of a session in quarantine are still referenced. The session is closed
 * when each of its extents was seen without another reference. This is possible only for host memory, not
 * for memory on a GPU.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFCD_MAPPINGS_H
#define BFCD_MAPPINGS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/queue.h>

struct broker;
struct session;

/* Closes sessions whose memory is no longer mapped. Bounded: call it every BROKER_LOOK_MS while
 * mappings_are_watched(). */
void mappings_look(struct broker *b);
bool mappings_are_watched(const struct broker *b);

#endif
