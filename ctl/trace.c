/* Traces: see trace.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The parser is strict, because a misread trace gives wrong statistics: the exact header, four fields, digits
 * only. It accepts what editors and spreadsheets do to a file: CRLF, a byte order mark, empty lines, no newline
 * at the end. An incomplete last line is left out. */
#include "ctl/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <search.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define HEADER          "id,lower,upper,size"
#define OTHERS          "(other)"
#define BLOCK_ALIGNMENT 256u
#define MAX_BUFFERS     (UINT32_MAX / 2)
#define MAX_BYTES       ((uint64_t)INT64_MAX)
#define END_DIGITS      19 /* a recording (client/recorder.c) writes `upper` so */

/* ---- reading ------------------------------------------------------------- */

/* A decimal number and nothing else; -ERANGE above 64 bits. */
static int parse_number(const char *text, uint64_t *ret)
{
        char *end;
        uint64_t n;

        if (*text < '0' || *text > '9')
                return -EINVAL; /* strtoull would take blanks and signs */
        errno = 0;
        n = strtoull(text, &end, 10);
        if (errno == ERANGE)
                return -ERANGE;
        if (*end)
                return -EINVAL;
        *ret = n;
        return 0;
}

/* The first four are needed; alignment, gaps and offset are those of minimalloc. */
enum column {
        COLUMN_ID,
        COLUMN_LOWER,
        COLUMN_UPPER,
        COLUMN_SIZE,
        COLUMN_TAG,
        COLUMN_PARTITION,
        COLUMN_TENANT,
        COLUMN_FLAGS,
        COLUMN_ALIGNMENT,
        COLUMN_GAPS,
        COLUMN_OFFSET,
        COLUMN_COUNT,
};

static const struct {
        const char *name;
        enum column column;
} column_names[] = {
        { "id", COLUMN_ID },         { "buffer", COLUMN_ID },           { "buffer_id", COLUMN_ID },
        { "lower", COLUMN_LOWER },   { "begin", COLUMN_LOWER },         { "start", COLUMN_LOWER },
        { "upper", COLUMN_UPPER },   { "end", COLUMN_UPPER },           { "size", COLUMN_SIZE },
        { "tag", COLUMN_TAG },       { "partition", COLUMN_PARTITION }, { "tenant", COLUMN_TENANT },
        { "flags", COLUMN_FLAGS },   { "alignment", COLUMN_ALIGNMENT }, { "gaps", COLUMN_GAPS },
        { "offset", COLUMN_OFFSET },
};

struct columns {
        size_t n;                        /* fields of a line; 0: the header was not read yet */
        size_t at[COLUMN_COUNT];         /* the place of its field, from 1; 0: it has none */
        bool upper_is_last;              /* "end": it is the last time of the lifetime */
        uint64_t n_aligned, n_with_gaps; /* buffers */
};

/* "": there is no such column. */
static char *field_of(const struct columns *c, char *const fields[], enum column column)
{
        static char nothing[] = "";

        return c->at[column] ? fields[c->at[column] - 1] : nothing;
}

/* Cuts a line at its commas; false where it has not exactly so many fields. */
static bool split(char *line, char *fields[static COLUMN_COUNT], size_t n_fields)
{
        for (size_t i = 0; i < n_fields; i++) {
                char *comma = strchr(line, ',');

                if (!comma != (i == n_fields - 1))
                        return false;
                fields[i] = line;
                if (comma) {
                        *comma = '\0';
                        line = comma + 1;
                }
        }
        return true;
}

static bool read_column(const char *name, size_t n_name, struct columns *c)
{
        for (size_t i = 0; i < sizeof(column_names) / sizeof(column_names[0]); i++) {
                size_t *at = &c->at[column_names[i].column];

                if (strlen(column_names[i].name) != n_name ||
                    strncmp(column_names[i].name, name, n_name) != 0)
                        continue;
                if (*at != 0)
                        return false;
                *at = ++c->n;
                c->upper_is_last |= strcmp(column_names[i].name, "end") == 0;
                return true;
        }
        return false;
}

/* False: that is no header. */
static bool read_header(const char *line, struct columns *ret)
{
        struct columns c = { 0 };
        size_t n;

        for (;; line += n + 1) {
                n = strcspn(line, ",");
                if (!read_column(line, n, &c))
                        return false;
                if (!line[n])
                        break;
        }
        if (!c.at[COLUMN_ID] || !c.at[COLUMN_LOWER] || !c.at[COLUMN_UPPER] || !c.at[COLUMN_SIZE])
                return false;
        *ret = c;
        return true;
}

/* ---- labels -------------------------------------------------------------- */

static int compare_labels(const void *a, const void *b)
{
        return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Keys are places in a table that never moves, so a found place tells the number. */
static bool find_label(const struct trace *t, const char *text, uint32_t *ret)
{
        char ***found = tfind(&text, &t->label_index, compare_labels);

        if (found)
                *ret = (uint32_t)(*found - t->labels);
        return found;
}

static int add_label(struct trace *t, const char *text, uint32_t *ret)
{
        char **place = &t->labels[t->n_labels];

        *place = strdup(text);
        if (!*place || !tsearch(place, &t->label_index, compare_labels)) {
                free(*place);
                *place = NULL;
                return -ENOMEM;
        }
        *ret = (uint32_t)t->n_labels++;
        return 0;
}

/* The number of a label, of printable ASCII only. */
static int trace_label(struct trace *t, const char *text, uint32_t *ret)
{
        char clean[TRACE_LABEL_MAX + 1];
        size_t n = strnlen(text, TRACE_LABEL_MAX);

        for (size_t i = 0; i < n; i++)
                clean[i] = text[i] < ' ' || text[i] > '~' ? '?' : text[i];
        clean[n] = '\0';
        if (find_label(t, clean, ret))
                return 0;
        /* The last place is for all that are beyond. */
        if (t->n_labels < TRACE_MAX_LABELS - 1)
                return add_label(t, clean, ret);
        return find_label(t, OTHERS, ret) ? 0 : add_label(t, OTHERS, ret);
}

/* "tenant/partition", or the one that there is. */
static int read_track(struct trace *t, const struct columns *c, char *const fields[], uint32_t *ret)
{
        const char *partition = field_of(c, fields, COLUMN_PARTITION);
        const char *tenant = field_of(c, fields, COLUMN_TENANT);
        char track[TRACE_LABEL_MAX + 1];

        snprintf(track, sizeof(track), "%s%s%s", tenant, *tenant && *partition ? "/" : "", partition);
        return trace_label(t, track, ret);
}

static int read_labels(struct trace *t, const struct columns *c, char *const fields[],
                       struct trace_buffer *buffer)
{
        const char *tag = field_of(c, fields, COLUMN_TAG);
        int r = c->n > 4 ? trace_label(t, tag, &buffer->tag) : 0;

        return r == 0 && c->n > 4 ? read_track(t, c, fields, &buffer->track) : r;
}

/* ---- lines --------------------------------------------------------------- */

/* The numbers that a column may have. On failure *ret_why is the sentence's rest. */
static int parse_others(struct columns *c, char *const fields[], struct trace_buffer *b, const char **ret_why)
{
        static const struct {
                enum column column;
                const char *why;
        } numbers[] = { { COLUMN_FLAGS, "flags is not a whole number" },
                        { COLUMN_ALIGNMENT, "alignment is not a whole number" },
                        { COLUMN_OFFSET, "offset is not a whole number" } };
        uint64_t n[3] = { 0 };

        for (size_t i = 0; i < 3; i++)
                if (c->at[numbers[i].column] &&
                    parse_number(field_of(c, fields, numbers[i].column), &n[i]) < 0) {
                        *ret_why = numbers[i].why;
                        return -EINVAL;
                }
        b->flags = n[0];
        c->n_aligned += n[1] > 0 && BLOCK_ALIGNMENT % n[1] != 0;
        c->n_with_gaps += *field_of(c, fields, COLUMN_GAPS) != '\0';
        return 0;
}

/* One buffer from one line. On failure *ret_why is the sentence's rest. */
static int parse_line(struct trace *t, struct columns *c, char *line, struct trace_buffer *ret,
                      const char **ret_why)
{
        static const char *const wrong[] = { "lower is not a whole number", "upper is not a whole number",
                                             "size is not a whole number" };
        uint64_t numbers[3];
        char *fields[COLUMN_COUNT];

        if (!split(line, fields, c->n)) {
                *ret_why = c->n == 4 ? "not four fields; a line is " HEADER
                                     : "not as many fields as the first line";
                return -EINVAL;
        }
        for (unsigned i = 0; i < 3; i++) {
                int r = parse_number(field_of(c, fields, COLUMN_LOWER + i), &numbers[i]);

                if (r < 0) {
                        *ret_why = r == -ERANGE ? "a number of more than 64 bits" : wrong[i];
                        return r;
                }
        }
        numbers[1] += c->upper_is_last && numbers[1] < UINT64_MAX;
        *ret_why = numbers[0] >= numbers[1] ? "upper is not above lower; a buffer needs a lifetime"
                   : numbers[2] == 0        ? "size is 0; a buffer has at least one byte"
                   : numbers[2] > MAX_BYTES ? "size is 2^63 or more"
                                            : NULL;
        if (*ret_why)
                return -EINVAL;
        *ret = (struct trace_buffer){ .lower = numbers[0], .upper = numbers[1], .n_bytes = numbers[2] };
        if (parse_others(c, fields, ret, ret_why) < 0)
                return -EINVAL;
        *ret_why = "out of memory";
        return read_labels(t, c, fields, ret);
}

/* -E2BIG: there are too many buffers. */
static int trace_add(struct trace *t, const struct trace_buffer *buffer)
{
        if (t->n_buffers == MAX_BUFFERS)
                return -E2BIG;
        if (t->n_buffers == t->n_room) {
                size_t n = t->n_room ? t->n_room * 2 : 256;
                struct trace_buffer *buffers = reallocarray(t->buffers, n, sizeof(*buffers));

                if (!buffers)
                        return -ENOMEM;
                t->buffers = buffers;
                t->n_room = n;
        }
        t->buffers[t->n_buffers++] = *buffer;
        return 0;
}

static void say(char **ret_error, const char *name, size_t line, const char *why)
{
        char *error;
        int n = line ? asprintf(&error, "%s:%zu: %s", name, line, why)
                     : asprintf(&error, "%s: %s", name, why);

        *ret_error = n < 0 ? NULL : error;
}

/* Takes off what ends a line; false where it holds a zero byte. */
static bool chomp(char *line, size_t n)
{
        if (n > 0 && line[n - 1] == '\n')
                line[--n] = '\0';
        if (n > 0 && line[n - 1] == '\r')
                line[--n] = '\0';
        return strlen(line) == n;
}

/* Whether a last line without a newline is the beginning of one: a field is missing. A line of a
 * recording is complete with its newline only, since its size could be cut as well. */
static bool is_cut(const char *line, const struct columns *c)
{
        size_t n_fields = 1;
        const char *field = line;
        const char *comma;

        for (; (comma = strchr(field, ',')); field = comma + 1)
                if (n_fields++ == c->at[COLUMN_UPPER] && comma - field == END_DIGITS)
                        return true;
        return n_fields < c->n || (n_fields == c->n && n_fields == c->at[COLUMN_SIZE] && !*field);
}

static int read_line(struct trace *t, struct columns *c, char *line, size_t n, size_t number,
                     const char **ret_why)
{
        bool has_newline = n > 0 && line[n - 1] == '\n';
        struct trace_buffer buffer;
        int r;

        if (!chomp(line, n)) {
                *ret_why = "a zero byte; the file is not text";
                return -EINVAL;
        }
        if (number == 1 && strncmp(line, "\xef\xbb\xbf", 3) == 0)
                line += 3;
        if (!*line)
                return 0;
        if (c->n == 0) {
                *ret_why =
                        "the first line must be " HEADER ", in any order, and other columns that are known";
                return read_header(line, c) ? 0 : -EINVAL;
        }
        if (!has_newline && is_cut(line, c)) {
                t->cut_line = number;
                return 0;
        }
        r = parse_line(t, c, line, &buffer, ret_why);
        if (r < 0)
                return r;
        buffer.line = (uint32_t)number;
        r = trace_add(t, &buffer);
        *ret_why = r == -E2BIG ? "too many buffers" : "out of memory";
        return r;
}

/* ---- what is left out ---------------------------------------------- */

/* One more thing of the file that the trace does not have. -ENOMEM. */
static int __attribute__((format(printf, 2, 3))) trace_leave_out(struct trace *t, const char *format, ...)
{
        char *what, *all = NULL;
        va_list arguments;
        int n;

        va_start(arguments, format);
        n = vasprintf(&what, format, arguments);
        va_end(arguments);
        if (n < 0)
                return -ENOMEM;
        n = t->left_out ? asprintf(&all, "%s; %s", t->left_out, what) : 0;
        if (t->left_out)
                free(what);
        if (n < 0)
                return -ENOMEM;
        if (t->left_out)
                free(t->left_out);
        t->left_out = all ? all : what;
        return 0;
}

static int read_all(struct trace *t, FILE *in, const char *name, char **ret_error)
{
        struct columns columns = { 0 };
        const char *why = NULL;
        char *line = NULL;
        size_t n_line = 0, number = 0;
        ssize_t n;
        int r = 0;

        while (r == 0 && (n = getline(&line, &n_line, in)) >= 0)
                r = read_line(t, &columns, line, (size_t)n, ++number, &why);
        free(line);
        t->has_partitions = columns.at[COLUMN_PARTITION] != 0;
        t->has_flags = columns.at[COLUMN_FLAGS] != 0;
        if (r == 0 && ferror(in)) {
                r = -EIO;
                say(ret_error, name, 0, "the file cannot be read");
        } else if (r < 0) {
                say(ret_error, name, number, why);
        } else if (t->n_buffers == 0) {
                r = -EINVAL;
                say(ret_error, name, 0,
                    t->cut_line      ? "no complete buffers after the header"
                    : columns.n != 0 ? "no buffers after the header"
                                     : "the file is empty; a trace starts with " HEADER);
        }
        if (r == 0 && columns.n_aligned > 0)
                r = trace_leave_out(t, "buffers with an alignment that does not divide %u bytes: %" PRIu64,
                                    BLOCK_ALIGNMENT, columns.n_aligned);
        if (r == 0 && columns.n_with_gaps > 0)
                r = trace_leave_out(t, "buffers with gaps, in which they keep their memory: %" PRIu64,
                                    columns.n_with_gaps);
        /* Whatever is wrong with the file is one outcome to the caller. */
        return r == 0 || r == -ENOMEM || r == -EIO ? r : -EINVAL;
}

/* ---- order --------------------------------------------------------------- */

static uint64_t time_of(const struct trace *t, const struct trace_event *e)
{
        return e->is_free ? t->buffers[e->buffer].upper : t->buffers[e->buffer].lower;
}

/* A total order, so that qsort() leaves nothing to chance. */
static int compare(const void *a, const void *b, void *userdata)
{
        const struct trace_event *x = a, *y = b;
        uint64_t time_x = time_of(userdata, x), time_y = time_of(userdata, y);

        if (time_x != time_y)
                return time_x < time_y ? -1 : 1;
        if (x->is_free != y->is_free)
                return x->is_free ? -1 : 1;
        return (x->buffer > y->buffer) - (x->buffer < y->buffer);
}

/* The order of the events. */
static int trace_order(struct trace *t)
{
        t->events = calloc(t->n_buffers, 2 * sizeof(*t->events));
        if (!t->events)
                return -ENOMEM;
        t->n_events = 2 * t->n_buffers;
        for (size_t i = 0; i < t->n_events; i++)
                t->events[i] = (struct trace_event){ .buffer = (uint32_t)(i / 2), .is_free = i % 2 == 1 };
        qsort_r(t->events, t->n_events, sizeof(*t->events), compare, t);
        return 0;
}

static struct trace *trace_new(void)
{
        struct trace *t = calloc(1, sizeof(*t));
        uint32_t none;

        if (!t)
                return NULL;
        t->labels = calloc(TRACE_MAX_LABELS, sizeof(*t->labels));
        if (!t->labels || trace_label(t, "", &none) < 0)
                return trace_free(t);
        return t;
}

int trace_read(FILE *in, const char *name, struct trace **ret, char **ret_error)
{
        struct trace *t = trace_new();
        int r;

        if (!t) {
                say(ret_error, name, 0, "out of memory");
                return -ENOMEM;
        }
        r = read_all(t, in, name, ret_error);
        if (r == 0 && (r = trace_order(t)) < 0)
                say(ret_error, name, 0, "out of memory");
        if (r < 0) {
                trace_free(t);
                return r;
        }
        *ret = t;
        return 0;
}

static void leave_label(void *key)
{
        (void)key; /* a place in the table */
}

struct trace *trace_free(struct trace *t)
{
        if (!t)
                return NULL;
        tdestroy(t->label_index, leave_label);
        for (size_t i = 0; t->labels && i < t->n_labels; i++)
                free(t->labels[i]);
        free(t->labels);
        free(t->buffers);
        free(t->events);
        free(t->left_out);
        free(t);
        return NULL;
}

/* ---- how the job requested it ---------------------------------------------- */

bool trace_is_own(const struct trace *t, uint32_t buffer, uint64_t *ret_flags,
                  char ret_tag[static TRACE_TAG_MAX + 1])
{
        const struct trace_buffer *b = &t->buffers[buffer];

        if (!t->has_flags || (b->flags == 0 && b->tag == 0))
                return false;
        *ret_flags = b->flags;
        snprintf(ret_tag, TRACE_TAG_MAX + 1, "%s", t->labels[b->tag]);
        return true;
}

/* ---- partitions ---------------------------------------------------------- */

const char *trace_partition(const struct trace *t, size_t buffer)
{
        const char *track = t->labels[t->buffers[buffer].track], *slash = strrchr(track, '/');

        return slash ? slash + 1 : track;
}

int trace_keep_partition(struct trace *t, const char *partition)
{
        size_t n = 0;

        for (size_t i = 0; i < t->n_buffers; i++)
                n += strcmp(trace_partition(t, i), partition) == 0;
        if (n == 0)
                return -ENOENT;
        n = 0;
        for (size_t i = 0; i < t->n_buffers; i++)
                if (strcmp(trace_partition(t, i), partition) == 0)
                        t->buffers[n++] = t->buffers[i];
        t->n_buffers = n;
        free(t->events);
        t->events = NULL;
        return trace_order(t);
}

/* ---- sizes --------------------------------------------------------------- */

int trace_scale(struct trace *t, double factor)
{
        if (!(factor > 0) || !isfinite(factor))
                return -ERANGE;
        if (factor == 1)
                return 0; /* exact, also above 2^53 */
        for (size_t i = 0; i < t->n_buffers; i++)
                if ((double)t->buffers[i].n_bytes * factor >= (double)MAX_BYTES)
                        return -ERANGE;
        for (size_t i = 0; i < t->n_buffers; i++) {
                uint64_t n_bytes = (uint64_t)ceil((double)t->buffers[i].n_bytes * factor);

                t->buffers[i].n_bytes = n_bytes ? n_bytes : 1;
        }
        return 0;
}

uint64_t trace_peak(const struct trace *t, uint64_t granule)
{
        unsigned __int128 live = 0, peak = 0;

        for (size_t i = 0; i < t->n_events; i++) {
                const struct trace_event *e = &t->events[i];
                unsigned __int128 n_bytes = t->buffers[e->buffer].n_bytes;

                n_bytes = (n_bytes + granule - 1) / granule * granule;
                live = e->is_free ? live - n_bytes : live + n_bytes;
                peak = live > peak ? live : peak;
        }
        return peak > UINT64_MAX ? UINT64_MAX : (uint64_t)peak;
}
