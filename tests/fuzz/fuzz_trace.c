/* Traces from anywhere: whatever is accepted is a life that can be lived.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "ctl/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes);

static void must(bool refs)
{
        if (!refs)
                abort();
}

static uint64_t time_of(const struct trace *t, size_t event)
{
        const struct trace_buffer *b = &t->buffers[t->events[event].buffer];

        return t->events[event].is_free ? b->upper : b->lower;
}

/* Every buffer comes once and goes once, in this order, and time never runs back. */
static void check(const struct trace *t)
{
        char *state = calloc(t->n_buffers, 1);

        must(state && t->n_buffers > 0 && t->n_events == 2 * t->n_buffers);
        for (size_t i = 0; i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];

                must(e->buffer < t->n_buffers);
                must(state[e->buffer]++ == (e->is_free ? 1 : 0));
                if (i > 0) {
                        must(time_of(t, i - 1) <= time_of(t, i));
                        must(time_of(t, i - 1) < time_of(t, i) || t->events[i - 1].is_free >= e->is_free);
                }
        }
        for (size_t i = 0; i < t->n_buffers; i++)
                must(state[i] == 2 && t->buffers[i].n_bytes > 0);
        must(trace_peak(t, 1) > 0 && trace_peak(t, 256) >= trace_peak(t, 1));
        free(state);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
        FILE *in = n_bytes ? fmemopen((void *)(uintptr_t)bytes, n_bytes, "r") : NULL;
        struct trace *t = NULL;
        char *error = NULL;
        int r;

        if (!in)
                return 0;
        r = trace_read(in, "fuzz", &t, &error);
        fclose(in);
        must(r == 0 ? t && !error : !t && error);
        if (r == 0) {
                check(t);
                if (trace_scale(t, 0.3) == 0)
                        check(t);
        }
        trace_free(t);
        free(error);
        return 0;
}
