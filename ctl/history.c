/* Records, summed up; see history.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Of sessions only the largest are kept, so that a long time needs little memory. Tenants, partitions and limits are few.
 * A record of usage has the peaks since the one before, so the peak of a time is the largest of its records: exact,
 * but for the first and the last interval, which may reach out of the time. */
#include "ctl/history.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/process.h"
#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"
#include "ctl/when.h"

#define MAX_SESSIONS   1000u
#define SHOWN_SESSIONS 20u /* in the table; --wide shows all that are kept */
#define MAX_EVENTS     1000u
#define MAX_LEASES     1000u

struct ended {
        uint64_t peak_bytes, begin_us, duration_ms, id, uid, pid, n_allocs, n_refusals, waited_ms, bytes_left;
        char *tenant, *program, *ended, *cgroup;
        json_t *peaks;       /* by partition */
        uint32_t is_running; /* a bool, as a column reads it */
};

struct peak {
        char *tenant, *partition;
        uint64_t peak_bytes, peak_us, peak_reserved_bytes, peak_reserved_us, limit_bytes, n_refusals, last_us;
};

struct refused {
        char *tenant, *partition, *limit, *sentence;
        uint64_t n, n_suppressed, largest_bytes, last_us;
};

struct ended_lease {
        uint64_t begin_us, duration_ms, limit_bytes, peak_bytes, peak_reserved_bytes, n_refusals, waited_ms;
        char *name, *tenant, *partition;
};

struct event {
        uint64_t time_us, uid; /* uid: of the one who asked for it; UINT64_MAX: not recorded */
        const char *what;
        char *text, *detail;
};

struct history {
        struct history_options options;
        struct ended *sessions; /* the largest first */
        size_t n_sessions;
        uint64_t n_ended; /* all of them, also those without records of their own */
        struct peak *peaks;
        size_t n_peaks;
        struct refused *refusals;
        size_t n_refusals;
        struct ended_lease *leases; /* the last ones */
        size_t n_leases;
        struct event *events; /* the same */
        size_t n_events;
};

/* ---- making one ------------------------------------------------------------ */

int history_new(const struct history_options *options, struct history **ret)
{
        struct history *h = calloc(1, sizeof(*h));

        if (!h)
                return -ENOMEM;
        h->options = *options;
        h->sessions = calloc(MAX_SESSIONS + 1, sizeof(*h->sessions));
        h->events = calloc(MAX_EVENTS, sizeof(*h->events));
        h->leases = calloc(MAX_LEASES, sizeof(*h->leases));
        if (!h->sessions || !h->events || !h->leases) {
                history_free(h);
                return -ENOMEM;
        }
        *ret = h;
        return 0;
}

static void ended_clear(struct ended *e)
{
        free(e->tenant);
        free(e->program);
        free(e->ended);
        free(e->cgroup);
        json_decref(e->peaks);
        *e = (struct ended){ 0 };
}

static void event_clear(struct event *e)
{
        free(e->text);
        free(e->detail);
        *e = (struct event){ 0 };
}

static void ended_lease_clear(struct ended_lease *l)
{
        free(l->name);
        free(l->tenant);
        free(l->partition);
        *l = (struct ended_lease){ 0 };
}

const struct history_options *history_options_of(const struct history *h)
{
        return &h->options;
}

struct history *history_free(struct history *h)
{
        if (!h)
                return NULL;
        for (size_t i = 0; i < h->n_sessions; i++)
                ended_clear(&h->sessions[i]);
        for (size_t i = 0; i < h->n_peaks; i++) {
                free(h->peaks[i].tenant);
                free(h->peaks[i].partition);
        }
        for (size_t i = 0; i < h->n_refusals; i++) {
                free(h->refusals[i].tenant);
                free(h->refusals[i].partition);
                free(h->refusals[i].limit);
                free(h->refusals[i].sentence);
        }
        for (size_t i = 0; i < h->n_events; i++)
                event_clear(&h->events[i]);
        for (size_t i = 0; i < h->n_leases; i++)
                ended_lease_clear(&h->leases[i]);
        free(h->leases);
        free(h->sessions);
        free(h->peaks);
        free(h->refusals);
        free(h->events);
        free(h);
        return NULL;
}

/* ---- fields ---------------------------------------------------------------- */

static const char *text_at(const json_t *fields, const char *key)
{
        const char *text = json_string_value(json_object_get(fields, key));

        return text ? text : "";
}

static uint64_t number_of(const json_t *value)
{
        const char *text = json_string_value(value);

        if (json_is_integer(value))
                return json_integer_value(value) > 0 ? (uint64_t)json_integer_value(value) : 0;
        return text && *text >= '0' && *text <= '9' ? strtoull(text, NULL, 10) : 0;
}

static uint64_t number_at(const json_t *fields, const char *key)
{
        return number_of(json_object_get(fields, key));
}

/* "train=1024 eval=0", as the journal has it. */
static json_t *parse_sizes(const char *text)
{
        json_t *ret = json_object();

        while (ret && *text) {
                size_t n_name = strcspn(text, "="), n_value;
                char *name;

                if (text[n_name] != '=')
                        break;
                n_value = strcspn(text + n_name + 1, " ");
                name = strndup(text, n_name);
                table_json_set(&ret, name ? name : "",
                               table_json_number(strtoull(text + n_name + 1, NULL, 10)));
                free(name);
                text += n_name + 1 + n_value;
                text += *text == ' ';
        }
        return ret;
}

static json_t *sizes_at(const json_t *fields, const char *key)
{
        json_t *value = json_object_get(fields, key), *ret;

        if (json_is_string(value))
                return parse_sizes(json_string_value(value));
        ret = json_object();
        for (void *at = json_object_iter(value); at; at = json_object_iter_next(value, at))
                table_json_set(&ret, json_object_iter_key(at),
                               table_json_number(number_of(json_object_iter_value(at))));
        return ret;
}

int history_kind(const char *name, enum record_kind *ret)
{
        for (int i = 0; i < RECORD_KINDS; i++) {
                if (strcmp(record_kinds[i].name, name) == 0) {
                        *ret = (enum record_kind)i;
                        return 0;
                }
        }
        return -EINVAL;
}

int history_kind_of_id(const char *message_id, enum record_kind *ret)
{
        for (int i = 0; i < RECORD_KINDS; i++) {
                if (strcmp(record_kinds[i].message_id, message_id) == 0) {
                        *ret = (enum record_kind)i;
                        return 0;
                }
        }
        return -EINVAL;
}

/* ---- adding ---------------------------------------------------------------- */

static int add_session(struct history *h, const json_t *f)
{
        uint64_t peak_bytes = number_at(f, "peak_bytes"), begin_us = number_at(f, "begin_us"),
                 end_us = number_at(f, "end_us");
        size_t i = h->n_sessions;
        struct ended e;

        h->n_ended++;
        while (i > 0 && h->sessions[i - 1].peak_bytes < peak_bytes)
                i--;
        if (i == MAX_SESSIONS)
                return 0;
        e = (struct ended){
                .peak_bytes = peak_bytes,
                .begin_us = begin_us,
                .duration_ms = end_us > begin_us ? (end_us - begin_us) / 1000 : 0,
                .id = number_at(f, "session"),
                .uid = number_at(f, "uid"),
                .pid = number_at(f, "pid"),
                .n_allocs = number_at(f, "allocations"),
                .n_refusals = number_at(f, "refusals"),
                .waited_ms = number_at(f, "waited_us") / 1000,
                .bytes_left = number_at(f, "bytes_left"),
                .tenant = strdup(text_at(f, "tenant")),
                .program = strdup(text_at(f, "program")),
                .ended = strdup(text_at(f, "ended")),
                .cgroup = strdup(text_at(f, "cgroup")),
                .peaks = sizes_at(f, "peaks"),
                .is_running = json_is_true(json_object_get(f, "running")),
        };
        if (!e.tenant || !e.program || !e.ended || !e.cgroup || !e.peaks) {
                ended_clear(&e);
                return -ENOMEM;
        }
        memmove(&h->sessions[i + 1], &h->sessions[i], (h->n_sessions - i) * sizeof(e));
        h->sessions[i] = e;
        if (h->n_sessions == MAX_SESSIONS)
                ended_clear(&h->sessions[MAX_SESSIONS]);
        else
                h->n_sessions++;
        return 0;
}

static int find_peak(struct history *h, const char *tenant, const char *partition, struct peak **ret)
{
        struct peak *more, new = { 0 };

        for (size_t i = 0; i < h->n_peaks; i++) {
                if (strcmp(h->peaks[i].tenant, tenant) == 0 &&
                    strcmp(h->peaks[i].partition, partition) == 0) {
                        *ret = &h->peaks[i];
                        return 0;
                }
        }
        new.tenant = strdup(tenant);
        new.partition = strdup(partition);
        more = reallocarray(h->peaks, h->n_peaks + 1, sizeof(*more));
        if (more)
                h->peaks = more;
        if (!more || !new.tenant || !new.partition) {
                free(new.tenant);
                free(new.partition);
                return -ENOMEM;
        }
        more[h->n_peaks] = new;
        *ret = &more[h->n_peaks++];
        return 0;
}

static int add_usage(struct history *h, uint64_t time_us, const json_t *f)
{
        uint64_t peak_bytes = number_at(f, "peak_bytes"), reserved = number_at(f, "peak_reserved_bytes");
        struct peak *p;
        int r = find_peak(h, text_at(f, "tenant"), text_at(f, "partition"), &p);

        if (r < 0)
                return r;
        if (peak_bytes >= p->peak_bytes) {
                p->peak_bytes = peak_bytes;
                p->peak_us = time_us;
        }
        if (reserved >= p->peak_reserved_bytes) {
                p->peak_reserved_bytes = reserved;
                p->peak_reserved_us = time_us;
        }
        p->n_refusals += number_at(f, "refusals");
        if (time_us >= p->last_us) {
                p->limit_bytes = number_at(f, "limit_bytes");
                p->last_us = time_us;
        }
        return 0;
}

static int find_refused(struct history *h, const char *tenant, const char *partition, const char *limit,
                        struct refused **ret)
{
        struct refused *more, new = { 0 };

        for (size_t i = 0; i < h->n_refusals; i++) {
                struct refused *r = &h->refusals[i];

                if (strcmp(r->tenant, tenant) == 0 && strcmp(r->partition, partition) == 0 &&
                    strcmp(r->limit, limit) == 0) {
                        *ret = r;
                        return 0;
                }
        }
        new.tenant = strdup(tenant);
        new.partition = strdup(partition);
        new.limit = strdup(limit);
        more = reallocarray(h->refusals, h->n_refusals + 1, sizeof(*more));
        if (more)
                h->refusals = more;
        if (!more || !new.tenant || !new.partition || !new.limit) {
                free(new.tenant);
                free(new.partition);
                free(new.limit);
                return -ENOMEM;
        }
        more[h->n_refusals] = new;
        *ret = &more[h->n_refusals++];
        return 0;
}

/* Those that had no records of their own: at the limit that all of them have in common, if there is one. */
static int add_suppressed(struct history *h, const json_t *f)
{
        uint64_t n = number_at(f, "suppressed");
        struct refused *r;
        int result;

        if (n == 0)
                return 0;
        result = find_refused(h, text_at(f, "tenant"), text_at(f, "suppressed_partition"),
                              text_at(f, "suppressed_limit"), &r);
        if (result == 0)
                r->n_suppressed += n;
        return result;
}

static int add_refusal(struct history *h, uint64_t time_us, const json_t *f)
{
        uint64_t n_bytes = number_at(f, "bytes");
        struct refused *r;
        char *sentence;
        int result = add_suppressed(h, f);

        if (result < 0 || !*text_at(f, "limit"))
                return result;
        result = find_refused(h, text_at(f, "tenant"), text_at(f, "partition"), text_at(f, "limit"), &r);
        if (result < 0)
                return result;
        r->n++;
        r->largest_bytes = n_bytes > r->largest_bytes ? n_bytes : r->largest_bytes;
        if (time_us < r->last_us)
                return 0;
        sentence = strdup(text_at(f, "sentence"));
        if (!sentence)
                return -ENOMEM;
        free(r->sentence);
        r->sentence = sentence;
        r->last_us = time_us;
        return 0;
}

static const char *event_name(enum record_kind kind, const json_t *f)
{
        static const char *const drains[][2] = { { "begun", "drain" },
                                                 { "drained", "drained" },
                                                 { "resumed", "resume" },
                                                 { "failed", "resume failed" } };

        if (kind == RECORD_RELOAD)
                return strcmp(text_at(f, "result"), "rejected") == 0 ? "reload rejected" : "reload";
        for (size_t i = 0; kind == RECORD_DRAIN && i < sizeof(drains) / sizeof(drains[0]); i++)
                if (strcmp(text_at(f, "state"), drains[i][0]) == 0)
                        return drains[i][1];
        return record_kinds[kind].name;
}

static int add_event(struct history *h, enum record_kind kind, uint64_t time_us, const json_t *f)
{
        struct event e = { .time_us = time_us,
                           .uid = json_object_get(f, "uid") ? number_at(f, "uid") : UINT64_MAX,
                           .what = event_name(kind, f) };
        uint64_t n_sessions = number_at(f, "sessions");
        char start[128], size[TEXT_MAX];

        snprintf(start, sizeof(start), "bfcd %.32s with %" PRIu64 " session%s, %s", text_at(f, "version"),
                 n_sessions, n_sessions == 1 ? "" : "s", text_size(number_at(f, "bytes"), size));
        e.text = strdup(kind == RECORD_START ? start : text_at(f, "message"));
        e.detail = strdup(text_at(f, "changes"));
        if (!e.text || !e.detail) {
                event_clear(&e);
                return -ENOMEM;
        }
        if (h->n_events == MAX_EVENTS) {
                event_clear(&h->events[0]);
                memmove(h->events, h->events + 1, --h->n_events * sizeof(e));
        }
        h->events[h->n_events++] = e;
        return 0;
}

static int add_lease(struct history *h, const json_t *f)
{
        uint64_t begin_us = number_at(f, "begin_us"), end_us = number_at(f, "end_us");
        struct ended_lease l = {
                .begin_us = begin_us,
                .duration_ms = end_us > begin_us ? (end_us - begin_us) / 1000 : 0,
                .limit_bytes = number_at(f, "limit_bytes"),
                .peak_bytes = number_at(f, "peak_bytes"),
                .peak_reserved_bytes = number_at(f, "peak_reserved_bytes"),
                .n_refusals = number_at(f, "refusals"),
                .waited_ms = number_at(f, "waited_us") / 1000,
                .name = strdup(text_at(f, "lease")),
                .tenant = strdup(text_at(f, "tenant")),
                .partition = strdup(text_at(f, "partition")),
        };

        if (!l.name || !l.tenant || !l.partition) {
                ended_lease_clear(&l);
                return -ENOMEM;
        }
        if (h->n_leases == MAX_LEASES) {
                ended_lease_clear(&h->leases[0]);
                memmove(h->leases, h->leases + 1, --h->n_leases * sizeof(l));
        }
        h->leases[h->n_leases++] = l;
        return 0;
}

/* A record of an interval counts if the interval is partly in the time. */
static bool is_in_time(const struct history_options *o, enum record_kind kind, uint64_t time_us,
                       const json_t *f)
{
        uint64_t first_us = kind == RECORD_USAGE ? number_at(f, "begin_us") : time_us;

        return time_us >= o->since_us && first_us <= o->until_us;
}

int history_add(struct history *h, enum record_kind kind, uint64_t time_us, const json_t *f)
{
        bool is_event =
                kind == RECORD_RELOAD || kind == RECORD_DRAIN || kind == RECORD_START || kind == RECORD_STOP;

        if (!is_in_time(&h->options, kind, time_us, f))
                return 0;
        if (is_event)
                return add_event(h, kind, time_us, f);
        if (h->options.tenant && strcmp(h->options.tenant, text_at(f, "tenant")) != 0)
                return 0;
        switch (kind) {
        case RECORD_SESSION:
                return add_session(h, f);
        case RECORD_SESSIONS:
                h->n_ended += number_at(f, "sessions");
                return 0;
        case RECORD_USAGE:
                return add_usage(h, time_us, f);
        case RECORD_REFUSAL:
                return add_refusal(h, time_us, f);
        case RECORD_LEASE:
                return add_lease(h, f);
        case RECORD_EVICTION:
                return add_event(h, kind, time_us, f);
        default:
                return 0;
        }
}

/* ---- showing --------------------------------------------------------------- */

#define COLUMN(title, key, flags, type, row, member)                                                         \
        {                                                                                                    \
                title, key, flags, type, TABLE_MEMBER(struct row, member)                                    \
        }

static void began_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        when_text(((const struct ended *)row)->begin_us, ret);
}

static void user_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        process_user(((const struct ended *)row)->uid, ret);
}

static void lease_began_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        when_text(((const struct ended_lease *)row)->begin_us, ret);
}

static void peak_time_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        when_text(((const struct peak *)row)->peak_reserved_us, ret);
}

static void last_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        when_text(((const struct refused *)row)->last_us, ret);
}

static void event_time_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        when_text(((const struct event *)row)->time_us, ret);
}

static json_t *partitions_json(const void *row)
{
        return json_incref(((const struct ended *)row)->peaks);
}

#define R    TABLE_RIGHT
#define WIDE TABLE_WIDE

static const struct table_column session_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, ended, tenant),
        COLUMN("PROGRAM", "name", TABLE_CUT_FIRST, TABLE_TEXT, ended, program),
        COLUMN("PID", "pid", R, TABLE_NUMBER, ended, pid),
        COLUMN("SESSION", "session_id", R | WIDE, TABLE_NUMBER, ended, id),
        { "USER", "user", .type = TABLE_MADE, .text = user_text },
        COLUMN("UID", "uid", R | WIDE, TABLE_NUMBER, ended, uid),
        { "RUNNING", "running", 0, TABLE_BOOL, TABLE_MEMBER(struct ended, is_running) },
        { "BEGAN", NULL, 0, TABLE_MADE, .text = began_text },
        COLUMN(NULL, "begin_time_us", 0, TABLE_NUMBER, ended, begin_us),
        COLUMN("DURATION", "duration_ms", R, TABLE_DURATION, ended, duration_ms),
        COLUMN("PEAK", "peak_bytes_in_use", R, TABLE_SIZE, ended, peak_bytes),
        { .key = "partitions", .json = partitions_json },
        COLUMN("ALLOCS", "num_allocs", R | WIDE, TABLE_NUMBER, ended, n_allocs),
        COLUMN("REFUSED", "num_refusals", R | WIDE, TABLE_NUMBER, ended, n_refusals),
        COLUMN("WAITED", "waited_ms", R | WIDE, TABLE_DURATION, ended, waited_ms),
        COLUMN(NULL, "bytes_left", 0, TABLE_NUMBER, ended, bytes_left),
        COLUMN("ENDED", "ended", WIDE, TABLE_TEXT, ended, ended),
        COLUMN("CGROUP", "cgroup", WIDE, TABLE_TEXT, ended, cgroup),
        { 0 },
};

static const struct table_column lease_columns[] = {
        COLUMN("LEASE", "lease", 0, TABLE_TEXT, ended_lease, name),
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, ended_lease, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, ended_lease, partition),
        { "BEGAN", NULL, WIDE, TABLE_MADE, .text = lease_began_text },
        COLUMN(NULL, "begin_time_us", 0, TABLE_NUMBER, ended_lease, begin_us),
        COLUMN("LIMIT", "bytes_limit", R, TABLE_SIZE, ended_lease, limit_bytes),
        COLUMN("PEAK", "peak_bytes_in_use", R, TABLE_SIZE, ended_lease, peak_bytes),
        COLUMN("RESERVED", "peak_bytes_reserved", R | WIDE, TABLE_SIZE, ended_lease, peak_reserved_bytes),
        COLUMN("REFUSED", "num_refusals", R, TABLE_NUMBER, ended_lease, n_refusals),
        COLUMN("WAITED", "waited_ms", R, TABLE_DURATION, ended_lease, waited_ms),
        COLUMN("DURATION", "duration_ms", R, TABLE_DURATION, ended_lease, duration_ms),
        { 0 },
};

static const struct table_column peak_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, peak, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, peak, partition),
        COLUMN("PEAK", "peak_bytes_in_use", R, TABLE_SIZE, peak, peak_bytes),
        COLUMN("RESERVED", "peak_bytes_reserved", R, TABLE_SIZE, peak, peak_reserved_bytes),
        { "UNTIL", NULL, 0, TABLE_MADE, .text = peak_time_text },
        COLUMN(NULL, "peak_bytes_in_use_time_us", 0, TABLE_NUMBER, peak, peak_us),
        COLUMN(NULL, "peak_bytes_reserved_time_us", 0, TABLE_NUMBER, peak, peak_reserved_us),
        COLUMN("LIMIT", "bytes_limit", R, TABLE_SIZE, peak, limit_bytes),
        COLUMN("REFUSED", "num_refusals", R, TABLE_NUMBER, peak, n_refusals),
        { 0 },
};

static const struct table_column refused_columns[] = {
        COLUMN("TENANT", "tenant", 0, TABLE_TEXT, refused, tenant),
        COLUMN("PARTITION", "partition", 0, TABLE_TEXT, refused, partition),
        COLUMN("LIMIT", "limit", 0, TABLE_TEXT, refused, limit),
        COLUMN("RECORDS", "num_records", R, TABLE_NUMBER, refused, n),
        COLUMN("MORE", "num_suppressed", R, TABLE_NUMBER, refused, n_suppressed),
        COLUMN("LARGEST", "largest_bytes", R, TABLE_SIZE, refused, largest_bytes),
        { "LAST", NULL, 0, TABLE_MADE, .text = last_text },
        COLUMN(NULL, "last_time_us", 0, TABLE_NUMBER, refused, last_us),
        COLUMN("SENTENCE", "sentence", WIDE, TABLE_TEXT, refused, sentence),
        { 0 },
};

static void event_user_text(const void *row, char ret[static TABLE_TEXT_MAX])
{
        const struct event *e = row;

        if (e->uid != UINT64_MAX)
                process_user(e->uid, ret);
}

static const struct table_column event_columns[] = {
        { "TIME", NULL, 0, TABLE_MADE, .text = event_time_text },
        COLUMN(NULL, "time_us", 0, TABLE_NUMBER, event, time_us),
        COLUMN("EVENT", "event", 0, TABLE_TEXT, event, what),
        { "USER", "user", TABLE_NULL, TABLE_MADE, .text = event_user_text },
        COLUMN("MESSAGE", "message", TABLE_CUT_FIRST, TABLE_TEXT, event, text),
        COLUMN(NULL, "changes", 0, TABLE_TEXT, event, detail),
        { 0 },
};

static int by_tenant(const char *tenant_a, const char *tenant_b, const char *a, const char *b)
{
        int order = strcmp(tenant_a, tenant_b);

        return order != 0 ? order : strcmp(a, b);
}

static int compare_peaks(const void *a, const void *b)
{
        const struct peak *p = a, *q = b;

        return by_tenant(p->tenant, q->tenant, p->partition, q->partition);
}

static int compare_refused(const void *a, const void *b)
{
        const struct refused *p = a, *q = b;
        int order = by_tenant(p->tenant, q->tenant, p->partition, q->partition);

        return order != 0 ? order : strcmp(p->limit, q->limit);
}

static void sort(struct history *h)
{
        if (h->n_peaks > 0)
                qsort(h->peaks, h->n_peaks, sizeof(*h->peaks), compare_peaks);
        if (h->n_refusals > 0)
                qsort(h->refusals, h->n_refusals, sizeof(*h->refusals), compare_refused);
}

struct section {
        const char *key, *title;
        const struct table_column *columns;
        const void *rows;
        size_t n_rows, row_bytes;
};

enum { SESSIONS, LEASES, PEAKS, REFUSALS, EVENTS, SECTIONS };

static void list_sections(const struct history *h, struct section ret[static SECTIONS])
{
        ret[SESSIONS] = (struct section){ "sessions",      "Sessions, the largest peak first",
                                          session_columns, h->sessions,
                                          h->n_sessions,   sizeof(*h->sessions) };
        ret[LEASES] = (struct section){ "leases",  "Leases that ended", lease_columns,
                                        h->leases, h->n_leases,         sizeof(*h->leases) };
        ret[PEAKS] = (struct section){
                "tenants",    "Peaks of tenants: a limit could have been as low as RESERVED",
                peak_columns, h->peaks,
                h->n_peaks,   sizeof(*h->peaks)
        };
        ret[REFUSALS] = (struct section){ "refusals",  "Refusals",    refused_columns,
                                          h->refusals, h->n_refusals, sizeof(*h->refusals) };
        ret[EVENTS] = (struct section){ "events",      "Starts, stops, reloads, drains and evictions",
                                        event_columns, h->events,
                                        h->n_events,   sizeof(*h->events) };
}

static const void *row_of(const struct section *s, size_t i)
{
        return (const char *)s->rows + i * s->row_bytes;
}

static int print_section(FILE *out, const struct section *s, size_t n_rows)
{
        struct table *t;
        int r = table_new(s->columns, NULL, &t);

        if (r < 0)
                return r;
        fprintf(out, "%s:\n", s->title);
        for (size_t i = 0; r == 0 && i < n_rows; i++)
                r = table_add(t, row_of(s, i));
        if (r == 0)
                r = table_flush(t, out);
        table_free(t);
        return r;
}

/* The sentences of refusals do not fit into a table. */
static int print_sentences(FILE *out, const struct history *h)
{
        for (size_t i = 0; i < h->n_refusals; i++) {
                char *sentence = h->refusals[i].sentence ? text_escape(h->refusals[i].sentence) : NULL;

                if (!h->refusals[i].sentence)
                        continue;
                if (!sentence)
                        return -ENOMEM;
                fprintf(out, "  %s\n", sentence);
                free(sentence);
        }
        return 0;
}

int history_print(FILE *out, struct history *h)
{
        struct section sections[SECTIONS];
        int r = 0;

        sort(h);
        list_sections(h, sections);
        for (size_t i = 0; r == 0 && i < SECTIONS; i++) {
                size_t n = sections[i].n_rows;

                if (i == SESSIONS && !table_look.is_wide && n > SHOWN_SESSIONS)
                        n = SHOWN_SESSIONS;
                if (i > 0)
                        fputc('\n', out);
                if (n > 0)
                        r = print_section(out, &sections[i], n);
                else
                        fprintf(out, "%s: none\n", sections[i].title);
                if (r == 0 && i == SESSIONS && h->n_ended > n)
                        fprintf(out, "and %" PRIu64 " more\n", h->n_ended - n);
                if (r == 0 && i == REFUSALS && !table_look.is_wide)
                        r = print_sentences(out, h);
        }
        return r < 0 ? r : ferror(out) ? -EIO : 0;
}

json_t *history_json(struct history *h)
{
        struct section sections[SECTIONS];
        json_t *ret = json_object();

        sort(h);
        list_sections(h, sections);
        table_json_set(&ret, "num_sessions", table_json_number(h->n_ended));
        for (size_t i = 0; i < SECTIONS; i++) {
                json_t *rows = json_array();

                for (size_t k = 0; k < sections[i].n_rows; k++)
                        table_json_push(&rows, table_json(sections[i].columns, row_of(&sections[i], k)));
                table_json_set(&ret, sections[i].key, rows);
        }
        return show_document("history", ret);
}
