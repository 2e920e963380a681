/* A plot of a trace: its live bytes over time by tag, and what is live at the peak. See views.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One SVG file that needs nothing else: no script, no font, no address. Colours are classes, so that they are
 * others where the reader prefers a dark page. A column of pixels shows the moment of its time at which most
 * is live, so the peak is always seen. Groups are tags; in a trace without tags they are sizes. */
#include "ctl/views.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/text.h"

#define N_GROUPS  9u /* shown by themselves; one more is all others */
#define N_COLUMNS 840u
#define LEFT      90u
#define TOP       60u
#define HEIGHT    320u
#define ROW       22u
#define BAR       420u

struct group {
        uint64_t bytes; /* now */
        uint64_t at_peak;
        size_t n_at_peak; /* blocks */
        uint64_t id;      /* a tag, or a size */
        uint32_t place;   /* in the picture; N_GROUPS: one of the others */
};

struct column {
        uint64_t total;
        uint64_t bytes[N_GROUPS + 1];
};

struct plot {
        const struct trace *trace;
        FILE *out;
        bool by_size; /* the trace has no tags */
        struct group *groups;
        size_t n_groups;
        uint32_t *group_of; /* by buffer */
        struct column *columns;
        struct group *shown[N_GROUPS + 1]; /* by place; the last: all others; NULL: none */
        struct group others;
        size_t n_events, peak_at;
        uint64_t peak, peak_time, last_time;
};

/* ---- groups ---------------------------------------------------------------------- */

static uint64_t id_of(const struct plot *p, uint32_t buffer)
{
        const struct trace_buffer *b = &p->trace->buffers[buffer];

        return p->by_size ? b->n_bytes : b->tag;
}

static int compare_ids(const void *a, const void *b, void *plot)
{
        uint64_t x = id_of(plot, *(const uint32_t *)a), y = id_of(plot, *(const uint32_t *)b);

        return (x > y) - (x < y);
}

static int find_groups(struct plot *p)
{
        const struct trace *t = p->trace;
        uint32_t *order = calloc(t->n_buffers, sizeof(*order));

        if (!order)
                return -ENOMEM;
        p->by_size = true;
        for (uint32_t i = 0; i < t->n_buffers; i++) {
                order[i] = i;
                p->by_size = p->by_size && t->buffers[i].tag == 0;
        }
        qsort_r(order, t->n_buffers, sizeof(*order), compare_ids, p);
        for (size_t i = 0; i < t->n_buffers; i++) {
                if (i == 0 || id_of(p, order[i]) != id_of(p, order[i - 1]))
                        p->groups[p->n_groups++] =
                                (struct group){ .id = id_of(p, order[i]), .place = N_GROUPS };
                p->group_of[order[i]] = (uint32_t)p->n_groups - 1;
        }
        free(order);
        return 0;
}

static void count(struct plot *p, const struct trace_event *e)
{
        struct group *g = &p->groups[p->group_of[e->buffer]];
        uint64_t n_bytes = p->trace->buffers[e->buffer].n_bytes;

        g->bytes = e->is_free ? g->bytes - n_bytes : g->bytes + n_bytes;
        g->n_at_peak = e->is_free ? g->n_at_peak - 1 : g->n_at_peak + 1;
}

static int compare_at_peak(const void *a, const void *b)
{
        const struct group *x = *(struct group *const *)a, *y = *(struct group *const *)b;

        if (x->at_peak != y->at_peak)
                return x->at_peak < y->at_peak ? 1 : -1;
        return (x->id > y->id) - (x->id < y->id);
}

/* Those with the most bytes at the peak are shown by themselves. */
static int choose_groups(struct plot *p)
{
        struct group **order = calloc(p->n_groups, sizeof(struct group *));

        if (!order)
                return -ENOMEM;
        for (size_t i = 0; i < p->peak_at; i++)
                count(p, &p->trace->events[i]);
        for (size_t i = 0; i < p->n_groups; i++) {
                p->groups[i].at_peak = p->groups[i].bytes;
                p->groups[i].bytes = 0;
                order[i] = &p->groups[i];
        }
        qsort(order, p->n_groups, sizeof(struct group *), compare_at_peak);
        for (uint32_t i = 0; i < p->n_groups; i++) {
                if (i < N_GROUPS) {
                        order[i]->place = i;
                        p->shown[i] = order[i];
                        continue;
                }
                p->others.at_peak += order[i]->at_peak;
                p->others.n_at_peak += order[i]->n_at_peak;
                p->shown[N_GROUPS] = &p->others;
        }
        free(order);
        return 0;
}

/* ---- columns --------------------------------------------------------------------- */

static size_t column_of(const struct plot *p, uint64_t time)
{
        return p->last_time == 0 ? 0 : (size_t)((double)time / (double)p->last_time * (N_COLUMNS - 1));
}

static void keep_highest(struct column *c, const struct column *now)
{
        if (now->total > c->total)
                *c = *now;
}

static void fill_columns(struct plot *p)
{
        struct column now = { 0 };
        size_t at = 0;

        for (size_t i = 0; i < p->n_events; i++) {
                const struct trace_event *e = &p->trace->events[i];
                uint64_t n_bytes = p->trace->buffers[e->buffer].n_bytes;
                uint64_t *bytes = &now.bytes[p->groups[p->group_of[e->buffer]].place];
                size_t to = column_of(p, views_time(p->trace, p->n_events, i));

                /* What was live up to here is live in all columns on the way. */
                for (; at < to; at++)
                        keep_highest(&p->columns[at + 1], &now);
                *bytes = e->is_free ? *bytes - n_bytes : *bytes + n_bytes;
                now.total = e->is_free ? now.total - n_bytes : now.total + n_bytes;
                keep_highest(&p->columns[at], &now);
        }
}

/* ---- the picture ------------------------------------------------------------------- */

static double y_of(const struct plot *p, uint64_t bytes)
{
        return TOP + HEIGHT - (double)bytes / (double)p->peak * HEIGHT;
}

static void put_style(const struct plot *p)
{
        static const char *const light[N_GROUPS + 1] = { "#3366cc", "#dc7633", "#2e8b57", "#b03a8c",
                                                         "#8a7f00", "#17808e", "#c0392b", "#6a5acd",
                                                         "#7a5230", "#8c8c8c" };
        static const char *const dark[N_GROUPS + 1] = {
                "#7aa2f7", "#f0a36b", "#6fcf97", "#e08bc5", "#d9cf5a",
                "#5fc9d6", "#f08a80", "#a99df5", "#c9a27a", "#a0a0a0"
        };

        fputs("<style>\n"
              "svg { background: #ffffff; font: 13px sans-serif }\n"
              "text { fill: #1a1a1a } .dim { fill: #5a5a5a } line, .frame { stroke: #b0b0b0; fill: none }\n"
              ".peak { stroke: #c00000; stroke-dasharray: 4 3 }\n",
              p->out);
        for (size_t i = 0; i <= N_GROUPS; i++)
                fprintf(p->out, ".g%zu { fill: %s }\n", i, light[i]);
        fputs("@media (prefers-color-scheme: dark) {\n"
              "svg { background: #16181d } text { fill: #e6e6e6 } .dim { fill: #a8a8a8 }\n"
              "line, .frame { stroke: #555b66 } .peak { stroke: #ff8080 }\n",
              p->out);
        for (size_t i = 0; i <= N_GROUPS; i++)
                fprintf(p->out, ".g%zu { fill: %s }\n", i, dark[i]);
        fputs("}\n</style>\n", p->out);
}

static void put_axes(const struct plot *p)
{
        char size[TEXT_MAX];

        for (unsigned i = 0; i <= 4; i++) {
                uint64_t bytes = (uint64_t)((double)p->peak / 4 * i);

                fprintf(p->out,
                        "<line x1=\"%u\" x2=\"%u\" y1=\"%.1f\" y2=\"%.1f\"/>"
                        "<text class=\"dim\" x=\"%u\" y=\"%.1f\" text-anchor=\"end\">%s</text>\n",
                        LEFT, LEFT + N_COLUMNS, y_of(p, bytes), y_of(p, bytes), LEFT - 8, y_of(p, bytes) + 4,
                        text_size(bytes, size));
        }
        fprintf(p->out,
                "<text class=\"dim\" x=\"%u\" y=\"%u\">0</text>"
                "<text class=\"dim\" x=\"%u\" y=\"%u\" text-anchor=\"end\">%" PRIu64 "</text>"
                "<text class=\"dim\" x=\"%u\" y=\"%u\" text-anchor=\"middle\">time</text>\n",
                LEFT, TOP + HEIGHT + 18, LEFT + N_COLUMNS, TOP + HEIGHT + 18, p->last_time,
                LEFT + N_COLUMNS / 2, TOP + HEIGHT + 18);
}

/* The group's part of each column, above those before it. */
static void put_area(const struct plot *p, size_t group)
{
        fprintf(p->out, "<path class=\"g%zu\" d=\"M", group);
        for (size_t i = 0; i < 2 * N_COLUMNS; i++) {
                bool is_back = i >= N_COLUMNS;
                size_t at = is_back ? 2 * N_COLUMNS - 1 - i : i;
                uint64_t bytes = 0;

                for (size_t g = 0; g < group + !is_back; g++)
                        bytes += p->columns[at].bytes[g];
                fprintf(p->out, "%s%zu,%.1f", i > 0 ? "L" : "", LEFT + at, y_of(p, bytes));
        }
        fputs("Z\"/>\n", p->out);
}

static void put_group_name(const struct plot *p, size_t place)
{
        const struct group *g = p->shown[place];
        char size[TEXT_MAX];

        if (place == N_GROUPS)
                fputs(p->by_size ? "other sizes" : "other tags", p->out);
        else if (p->by_size)
                fprintf(p->out, "blocks of %s", text_size(g->id, size));
        else
                text_xml(p->out, g->id == 0 ? "(no tag)" : p->trace->labels[g->id]);
}

static void put_bars(const struct plot *p)
{
        unsigned y = TOP + HEIGHT + 70;
        char size[TEXT_MAX];

        fprintf(p->out, "<text x=\"%u\" y=\"%u\" font-weight=\"bold\">Live at the peak, by %s</text>\n", LEFT,
                y - 14, p->by_size ? "size" : "tag");
        for (size_t i = 0; i <= N_GROUPS; i++) {
                const struct group *g = p->shown[i];

                if (!g || g->at_peak == 0)
                        continue;
                fprintf(p->out,
                        "<rect class=\"g%zu\" x=\"%u\" y=\"%u\" width=\"%.1f\" height=\"%u\"/>"
                        "<text x=\"%u\" y=\"%u\">",
                        i, LEFT, y, 1 + (double)g->at_peak / (double)p->peak * BAR, ROW - 6, LEFT + BAR + 12,
                        y + 13);
                put_group_name(p, i);
                fprintf(p->out, ": %s in %zu block%s</text>\n", text_size(g->at_peak, size), g->n_at_peak,
                        g->n_at_peak == 1 ? "" : "s");
                y += ROW;
        }
}

static void put_plot(const struct plot *p, const char *name)
{
        unsigned width = LEFT + N_COLUMNS + 30, height = TOP + HEIGHT + 90 + (N_GROUPS + 1) * ROW;
        size_t peak = column_of(p, p->peak_time);
        char size[TEXT_MAX];

        fprintf(p->out,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %u %u\" width=\"%u\" height=\"%u\" "
                "role=\"img\">\n<title>Live bytes of ",
                width, height, width, height);
        text_xml(p->out, name);
        fputs("</title>\n", p->out);
        put_style(p);
        fprintf(p->out, "<text x=\"%u\" y=\"24\" font-weight=\"bold\">", LEFT);
        text_xml(p->out, name);
        fprintf(p->out,
                "</text><text class=\"dim\" x=\"%u\" y=\"44\">%zu buffers; peak %s (%" PRIu64
                " bytes) at time %" PRIu64 "</text>\n",
                LEFT, p->trace->n_buffers, text_size(p->peak, size), p->peak, p->peak_time);
        put_axes(p);
        for (size_t i = 0; i <= N_GROUPS; i++)
                if (p->shown[i])
                        put_area(p, i);
        fprintf(p->out, "<line class=\"peak\" x1=\"%zu\" x2=\"%zu\" y1=\"%u\" y2=\"%u\"/>\n", LEFT + peak,
                LEFT + peak, TOP - 6, TOP + HEIGHT);
        put_bars(p);
        fputs("</svg>\n", p->out);
}

static int make_plot(struct plot *p)
{
        int r = find_groups(p);

        if (r < 0)
                return r;
        p->n_events = views_n_events(p->trace);
        p->peak_at = views_peak(p->trace, &p->peak);
        p->peak_time = views_time(p->trace, p->n_events, p->peak_at - 1);
        p->last_time = views_time(p->trace, p->n_events, p->n_events - 1);
        r = choose_groups(p);
        if (r == 0)
                fill_columns(p);
        return r;
}

int views_plot(FILE *out, const struct trace *t, const char *name)
{
        struct plot p = { .trace = t, .out = out };
        char *clean = text_escape(name);
        int r = -ENOMEM;

        p.groups = calloc(t->n_buffers, sizeof(*p.groups));
        p.group_of = calloc(t->n_buffers, sizeof(*p.group_of));
        p.columns = calloc(N_COLUMNS, sizeof(*p.columns));
        if (p.groups && p.group_of && p.columns && clean)
                r = make_plot(&p);
        if (r == 0)
                put_plot(&p, clean);
        free(p.groups);
        free(p.group_of);
        free(p.columns);
        free(clean);
        return r == 0 && ferror(out) ? -EIO : r;
}
