/* The client's part of a plan: the client library, whose calls reach a plan's daemon in this process.
 *
 * It is the library itself, cache, magazines and reclaim included, in an object of its own: its connection, its
 * events and its address ranges are those of plan_call.c and plan_range.c, so there is no socket and no thread,
 * and nothing is mapped.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_CTL_PLAN_CLIENT_H
#define BFC_CTL_PLAN_CLIENT_H

#include <signal.h>

#include "ctl/trace.h"

struct plan_daemon;
struct progress;

struct plan_run {
        const struct trace *trace;
        bool has_cache;
        struct progress *progress;         /* may be NULL */
        const volatile sig_atomic_t *stop; /* may be NULL; not 0: -EINTR */
};

struct plan_result {
        bool is_served;
        uint32_t refused; /* the buffer of the first refusal */
        char refusal[512];
        uint64_t peak_client_bytes; /* what the client had from the daemon, in use or idle */
};

/* Lives through the trace up to the first refusal, and disconnects. Not beside another thread: it removes all
 * variables BFC_... from the environment. -EINTR, -EPROTO, -ENOMEM. */
int plan_client_run(struct plan_daemon *daemon, const struct plan_run *run, struct plan_result *ret);

#endif
