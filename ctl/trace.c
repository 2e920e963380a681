/* Traces: see trace.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The parser is strict, because a trace that is silently misread gives figures
 * that are silently wrong: the header as it must be, four fields, digits only.
 * It forgives what editors and spreadsheets do to a file: CRLF, a byte order
 * mark, empty lines, no newline at the end. An incomplete last line is left out. */
#include "ctl/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define HEADER      "id,lower,upper,size"
#define MAX_BUFFERS (UINT32_MAX / 2)
#define MAX_BYTES   ((uint64_t)INT64_MAX)
#define END_DIGITS  19u /* a recording (client/recorder.c) writes `upper` so */

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

/* Cuts a line at its commas; false where it has not exactly four fields. */
static bool split(char *line, char *fields[static 4])
{
        for (int i = 0; i < 4; i++) {
                char *comma = strchr(line, ',');

                if (!comma != (i == 3))
                        return false;
                fields[i] = line;
                if (comma) {
                        *comma = '\0';
                        line = comma + 1;
                }
        }
        return true;
}

/* One buffer from one line. On failure *ret_why is the sentence's rest. */
static int parse_line(char *line, struct trace_buffer *ret, const char **ret_why)
{
        static const char *const wrong[] = { "lower is not a whole number", "upper is not a whole number",
                                             "size is not a whole number" };
        uint64_t numbers[3];
        char *fields[4];

        if (!split(line, fields)) {
                *ret_why = "not four fields; a line is " HEADER;
                return -EINVAL;
        }
        for (size_t i = 0; i < 3; i++) {
                int r = parse_number(fields[i + 1], &numbers[i]);

                if (r < 0) {
                        *ret_why = r == -ERANGE ? "a number of more than 64 bits" : wrong[i];
                        return r;
                }
        }
        *ret_why = numbers[0] >= numbers[1] ? "upper is not above lower; a buffer needs a lifetime"
                   : numbers[2] == 0        ? "size is 0; a buffer has at least one byte"
                   : numbers[2] > MAX_BYTES ? "size is 2^63 or more"
                                            : NULL;
        if (*ret_why)
                return -EINVAL;
        *ret = (struct trace_buffer){ .lower = numbers[0], .upper = numbers[1], .n_bytes = numbers[2] };
        return 0;
}

static int append(struct trace *t, size_t *n_allocated, const struct trace_buffer *buffer)
{
        if (t->n_buffers == *n_allocated) {
                size_t n = *n_allocated ? *n_allocated * 2 : 256;
                struct trace_buffer *buffers = reallocarray(t->buffers, n, sizeof(*buffers));

                if (!buffers)
                        return -ENOMEM;
                t->buffers = buffers;
                *n_allocated = n;
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
static bool is_cut(const char *line)
{
        size_t n_commas = 0;
        const char *field = line;
        const char *comma;

        for (; (comma = strchr(field, ',')); field = comma + 1)
                if (++n_commas == 3 && comma - field == END_DIGITS)
                        return true;
        return n_commas < 3 || (n_commas == 3 && !*field);
}

static int read_line(struct trace *t, char *line, size_t n, size_t number, size_t *n_allocated,
                     bool *header_seen, const char **ret_why)
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
        if (!*header_seen) {
                *header_seen = strcmp(line, HEADER) == 0;
                *ret_why = "the first line must be " HEADER;
                return *header_seen ? 0 : -EINVAL;
        }
        if (!has_newline && is_cut(line)) {
                t->cut_line = number;
                return 0;
        }
        r = parse_line(line, &buffer, ret_why);
        if (r < 0)
                return r;
        *ret_why = "too many buffers";
        if (t->n_buffers == MAX_BUFFERS)
                return -E2BIG;
        buffer.line = (uint32_t)number;
        *ret_why = "out of memory";
        return append(t, n_allocated, &buffer);
}

static int read_all(struct trace *t, FILE *in, const char *name, char **ret_error)
{
        const char *why = NULL;
        char *line = NULL;
        size_t n_line = 0, n_allocated = 0, number = 0;
        bool header_seen = false;
        ssize_t n;
        int r = 0;

        while (r == 0 && (n = getline(&line, &n_line, in)) >= 0)
                r = read_line(t, line, (size_t)n, ++number, &n_allocated, &header_seen, &why);
        free(line);
        if (r == 0 && ferror(in)) {
                r = -EIO;
                say(ret_error, name, 0, "the file cannot be read");
        } else if (r < 0) {
                say(ret_error, name, number, why);
        } else if (t->n_buffers == 0) {
                r = -EINVAL;
                say(ret_error, name, 0,
                    t->cut_line   ? "no complete buffers after the header"
                    : header_seen ? "no buffers after the header"
                                  : "the file is empty; a trace starts with " HEADER);
        }
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

static int order(struct trace *t)
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

int trace_read(FILE *in, const char *name, struct trace **ret, char **ret_error)
{
        struct trace *t = calloc(1, sizeof(*t));
        int r;

        if (!t) {
                say(ret_error, name, 0, "out of memory");
                return -ENOMEM;
        }
        r = read_all(t, in, name, ret_error);
        if (r == 0 && (r = order(t)) < 0)
                say(ret_error, name, 0, "out of memory");
        if (r < 0) {
                trace_free(t);
                return r;
        }
        *ret = t;
        return 0;
}

struct trace *trace_free(struct trace *t)
{
        if (!t)
                return NULL;
        free(t->buffers);
        free(t->events);
        free(t);
        return NULL;
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
