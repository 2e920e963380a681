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

/* A session's part. */
struct mappings_state {
        bool is_listed;  /* in broker.sessions.mapped */
        uint32_t export; /* the next one to check, in the ledger */
        uint64_t id;     /* of that record; 0: begin with the session's first */
        TAILQ_ENTRY(session) link;
};

/* The session's quarantine begins, or ends. */
void mappings_begin(struct session *s);
void mappings_end(struct session *s);

/* Closes sessions whose memory is no longer mapped. Bounded: call it every BROKER_LOOK_MS while
 * mappings_are_watched(). */
void mappings_look(struct broker *b);
bool mappings_are_watched(const struct broker *b);

#endif
