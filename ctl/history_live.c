/* What the daemon knows and its records do not have yet; see history.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/history.h"

#include <errno.h>
#include <string.h>
#include <time.h>

#include "ctl/table.h"

/* As a record of its end would have it. */
static json_t *session_fields(const Bfcd__SessionRow *s, uint64_t now_us)
{
        json_t *ret = json_object();

        table_json_set(&ret, "tenant", table_json_string(s->tenant));
        table_json_set(&ret, "session", table_json_number(s->session_id));
        table_json_set(&ret, "uid", table_json_number(s->uid));
        table_json_set(&ret, "pid", table_json_number(s->pid));
        table_json_set(&ret, "program", table_json_string(s->name));
        table_json_set(&ret, "begin_us",
                       table_json_number(now_us > s->age_ms * 1000 ? now_us - s->age_ms * 1000 : 0));
        table_json_set(&ret, "end_us", table_json_number(now_us));
        table_json_set(&ret, "peak_bytes", table_json_number(s->peak_bytes_in_use));
        table_json_set(&ret, "ended", json_string(""));
        table_json_set(&ret, "running", json_true());
        return ret;
}

static json_t *refusal_fields(const Bfcd__RefusalRow *f)
{
        json_t *ret = json_object();

        table_json_set(&ret, "tenant", table_json_string(f->tenant));
        table_json_set(&ret, "partition", table_json_string(f->partition));
        table_json_set(&ret, "bytes", table_json_number(f->n_bytes));
        table_json_set(&ret, "limit", table_json_string(f->limit));
        table_json_set(&ret, "sentence", table_json_string(f->sentence));
        return ret;
}

static int add(struct history *h, enum record_kind kind, uint64_t time_us, json_t *fields)
{
        int r = fields ? history_add(h, kind, time_us, fields) : -ENOMEM;

        json_decref(fields);
        return r;
}

int history_add_live(struct history *h, const struct history_options *options, const struct list *l,
                     uint64_t own_session_id, bool with_refusals)
{
        uint64_t now_us, time_us;
        struct timespec now;
        int r = 0;

        clock_gettime(CLOCK_REALTIME, &now);
        now_us = (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
        time_us = now_us < options->until_us ? now_us : options->until_us;
        for (size_t i = 0; r == 0 && i < l->n_sessions; i++) {
                const Bfcd__SessionRow *s = l->sessions[i];

                if (*s->tenant && s->session_id != own_session_id && now_us - s->age_ms * 1000 <= time_us)
                        r = add(h, RECORD_SESSION, time_us, session_fields(s, now_us));
        }
        for (size_t i = 0; r == 0 && with_refusals && i < l->n_refusals; i++)
                r = add(h, RECORD_REFUSAL, l->refusals[i]->time_ms * 1000, refusal_fields(l->refusals[i]));
        return r;
}
