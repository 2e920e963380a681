/* Progress; see progress.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/progress.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/clock.h"

#define FIRST_MS 1000u
#define EVERY_MS 100u

/* A terminal that cannot return to the begin of a line gets nothing. */
static bool can_show(FILE *out)
{
        const char *terminal = getenv("TERM");

        return isatty(fileno(out)) && terminal && *terminal && strcmp(terminal, "dumb") != 0;
}

void progress_begin(struct progress *p, FILE *out, const char *what, uint64_t n_total)
{
        *p = (struct progress){ .what = what, .n_total = n_total, .out = out ? out : stderr };
        if (can_show(p->out))
                p->begin_ms = clock_ms();
}

static void show(struct progress *p, uint64_t now)
{
        uint64_t seconds = (now - p->begin_ms) / 1000;
        uint64_t done = p->n_done < p->n_total ? p->n_done : p->n_total;

        p->shown_ms = now;
        if (p->n_total > 0)
                fprintf(p->out, "\r%s: %3.0f %%, %" PRIu64 " s\x1b[K", p->what,
                        100 * (double)done / (double)p->n_total, seconds);
        else
                fprintf(p->out, "\r%s: %" PRIu64 " s\x1b[K", p->what, seconds);
        fflush(p->out);
}

void progress_set(struct progress *p, uint64_t n_done, uint64_t n_total)
{
        uint64_t now;

        p->n_done = n_done;
        p->n_total = n_total;
        if (p->begin_ms == 0)
                return;
        now = clock_ms();
        if (now - p->begin_ms >= FIRST_MS && now - p->shown_ms >= EVERY_MS)
                show(p, now);
}

void progress_end(struct progress *p)
{
        if (p->shown_ms != 0) {
                fputs("\r\x1b[K", p->out);
                fflush(p->out);
        }
        p->shown_ms = 0;
        p->begin_ms = 0;
}
