/* Maps as SVG; see map.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * One file that needs nothing else: no script, no font, no address. Colours are classes, so that they are others where
 * the reader prefers a dark page. Each part has its statistics as a title, which browsers show beside the pointer.
 * Names that clients chose are only in the legend: repeated for each part they would make the file large. */
#include "ctl/map.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/text.h"

#define LEFT       20u
#define WIDTH      1000.0 /* of the longest row */
#define TOP        64u
#define ROW        78u /* from one to the next */
#define HEIGHT     40u /* of a row's parts */
#define BAR        8u  /* of its sums */
#define LINE       20u
#define NAME_CHARS 48u
#define EDGED      4 /* pixels: from then on a block has a border */

struct svg {
        FILE *out;
        const struct map *map;
        double scale; /* pixels of a byte */
        int result;
        bool with_labels;
};

/* ---- text ------------------------------------------------------------------------ */

/* At most this many characters; bytes that continue one of UTF-8 do not count. */
static void cut(char *text, size_t n_characters)
{
        size_t n = 0;

        for (; *text; text++) {
                n += ((unsigned char)*text & 0xc0) != 0x80;
                if (n > n_characters) {
                        *text = '\0';
                        return;
                }
        }
}

/* Text from the daemon or a client. */
static void put_text(struct svg *s, const char *text)
{
        char *clean = text_escape(text);

        if (!clean) {
                s->result = -ENOMEM;
                return;
        }
        cut(clean, NAME_CHARS);
        text_xml(s->out, clean);
        free(clean);
}

static void put_size(struct svg *s, uint64_t n_bytes, const char *after)
{
        char size[TEXT_MAX];

        fprintf(s->out, "%s%s", text_size(n_bytes, size), after);
}

static void put_style(struct svg *s)
{
        static const char *const light[MAP_COLOURS] = { "#3366cc", "#dc7633", "#2e8b57", "#b03a8c", "#8a7f00",
                                                        "#17808e", "#c0392b", "#6a5acd", "#7a5230" };
        static const char *const dark[MAP_COLOURS] = { "#7aa2f7", "#f0a36b", "#6fcf97", "#e08bc5", "#d9cf5a",
                                                       "#5fc9d6", "#f08a80", "#a99df5", "#c9a27a" };

        fputs("<style>\n"
              "svg { background: #ffffff; font: 13px sans-serif; max-width: 100%; height: auto }\n"
              "rect { shape-rendering: crispEdges }\n"
              "text { fill: #1a1a1a } .dim { fill: #5a5a5a } .frame { fill: none; stroke: #808080 }\n"
              ".free { fill: #dfe6dd } .unbacked { fill: #f4f4f4 } .retiring { fill: #e6b800 }\n"
              ".shared { fill: #404040 } .others { fill: #8c8c8c } .idle { fill: #b9c8e6 }\n"
              ".used { fill: #5878b4 } .edge { stroke: #ffffff; stroke-width: .5 }\n"
              ".a1 { fill-opacity: .85 } .a2 { fill-opacity: .7 } .a3 { fill-opacity: .55 }\n",
              s->out);
        for (size_t i = 0; i < MAP_COLOURS; i++)
                fprintf(s->out, ".s%zu { fill: %s }\n", i, light[i]);
        fputs("@media (prefers-color-scheme: dark) {\n"
              "svg { background: #16181d } text { fill: #e6e6e6 } .dim { fill: #a8a8a8 }\n"
              ".free { fill: #31402f } .unbacked { fill: #202329 } .retiring { fill: #b39000 }\n"
              ".shared { fill: #d0d0d0 } .others { fill: #a0a0a0 } .idle { fill: #3f5580 }\n"
              ".used { fill: #86a8e8 } .edge { stroke: #16181d }\n",
              s->out);
        for (size_t i = 0; i < MAP_COLOURS; i++)
                fprintf(s->out, ".s%zu { fill: %s }\n", i, dark[i]);
        fputs("}\n</style>\n", s->out);
}

/* ---- parts ----------------------------------------------------------------------- */

static void put_colour(struct svg *s, const struct map_session *session)
{
        if (!session || session->id == 0)
                fputs("shared", s->out);
        else if (session->rank < MAP_COLOURS)
                fprintf(s->out, "s%zu", session->rank);
        else
                fputs("others", s->out);
}

static void put_session(struct svg *s, uint64_t id)
{
        if (id == 0)
                fputs("shared", s->out);
        else
                fprintf(s->out, "session %" PRIu64, id);
}

static void put_title(struct svg *s, const struct map_part *p)
{
        char age[TEXT_MAX];

        fputs("<title>", s->out);
        if (p->kind != MAP_USED) {
                fprintf(s->out, "%s: ", map_kind_name(p->kind));
                put_size(s, p->bytes[p->kind], "");
        } else if (p->block) {
                put_session(s, p->session_id);
                fputs(": block of ", s->out);
                put_size(s, p->end - p->begin, "");
                fprintf(s->out, ", %s old", text_duration(p->oldest_ms, age));
                if (s->with_labels && *p->block->label) {
                        fputs(", ", s->out);
                        put_text(s, p->block->label);
                }
        } else {
                put_size(s, p->bytes[MAP_USED], " of ");
                put_size(s, p->end - p->begin, " used, ");
                fprintf(s->out, "%" PRIu64 " blocks, mostly ", p->n_blocks);
                put_session(s, p->session_id);
                fprintf(s->out, ", oldest %s", text_duration(p->oldest_ms, age));
        }
        fputs("; at ", s->out);
        put_size(s, p->begin, "</title>");
}

static void put_place(struct svg *s, uint64_t begin, uint64_t end, double y, double height)
{
        fprintf(s->out, "x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\"",
                LEFT + (double)begin * s->scale, y, (double)(end - begin) * s->scale, height);
}

static void put_part(struct svg *s, size_t row, const struct map_part *p, double y)
{
        double part = p->kind == MAP_USED ? (double)p->bytes[MAP_USED] / (double)(p->end - p->begin) * HEIGHT
                                          : HEIGHT;

        if (p->kind != MAP_USED) {
                fprintf(s->out, "<rect class=\"%s\" ", map_kind_name(p->kind));
                put_place(s, p->begin, p->end, y, HEIGHT);
                putc('>', s->out);
                put_title(s, p);
                fputs("</rect>\n", s->out);
                return;
        }
        fprintf(s->out, "<g>");
        put_title(s, p);
        fprintf(s->out, "<rect class=\"%s\" ", map_kind_name(p->behind));
        put_place(s, p->begin, p->end, y, HEIGHT);
        fputs("/><rect class=\"", s->out);
        put_colour(s, map_session_of(s->map, row, p->session_id));
        fprintf(s->out, " a%u%s\" ", map_age_class(p->oldest_ms),
                p->block && (double)(p->end - p->begin) * s->scale >= EDGED ? " edge" : "");
        put_place(s, p->begin, p->end, y + HEIGHT - part, part);
        fputs("/></g>\n", s->out);
}

/* ---- rows ------------------------------------------------------------------------ */

/* One sum of the bar below the parts. Returns where the next one begins. */
static uint64_t put_sum(struct svg *s, uint64_t at, uint64_t n_bytes, const char *name, const char *title,
                        double y)
{
        if (n_bytes == 0)
                return at;
        fprintf(s->out, "<rect class=\"%s\" ", name);
        put_place(s, at, at + n_bytes, y, BAR);
        fprintf(s->out, "><title>%s: ", title);
        put_size(s, n_bytes, "</title></rect>\n");
        return at + n_bytes;
}

static void put_bar(struct svg *s, const struct map_row *r, double y)
{
        uint64_t at = put_sum(s, 0, r->used_bytes - r->idle_bytes, "used", "in use by programs", y);

        at = put_sum(s, at, r->idle_bytes, "idle", "idle in caches of clients", y);
        at = put_sum(s, at, r->free_bytes, "free", "free", y);
        put_sum(s, at, r->retiring_bytes, "retiring", "retiring", y);
}

static void put_row(struct svg *s, size_t row)
{
        const struct map_row *r = &s->map->rows[row];
        double y = TOP + (double)row * ROW;
        struct map_part *parts;
        size_t n;

        if (map_parts(s->map, row, &parts, &n) < 0) {
                s->result = -ENOMEM;
                return;
        }
        fprintf(s->out, "<text x=\"%u\" y=\"%.0f\">", LEFT, y - 5);
        put_text(s, r->tenant);
        fputs(": ", s->out);
        put_size(s, r->used_bytes, " in use (");
        put_size(s, r->idle_bytes, " idle), ");
        put_size(s, r->free_bytes, " free, ");
        put_size(s, r->retiring_bytes, " retiring, ");
        put_size(s, r->unbacked_bytes, " unbacked, ");
        fprintf(s->out, "%" PRIu64 " blocks</text>\n", r->n_blocks);
        for (size_t i = 0; i < n; i++)
                put_part(s, row, &parts[i], y);
        free(parts);
        fputs("<rect class=\"frame\" ", s->out);
        put_place(s, 0, r->n_bytes, y, HEIGHT);
        fputs("/>\n", s->out);
        put_bar(s, r, y + HEIGHT + 2);
}

/* ---- the legend ------------------------------------------------------------------ */

static void put_key(struct svg *s, double x, double y, const char *name, const char *text)
{
        fprintf(s->out,
                "<rect class=\"%s\" x=\"%.0f\" y=\"%.0f\" width=\"14\" height=\"12\"/>"
                "<text class=\"dim\" x=\"%.0f\" y=\"%.0f\">%s</text>\n",
                name, x, y - 11, x + 20, y, text);
}

static void put_keys(struct svg *s, double y)
{
        put_key(s, LEFT, y, "free", "free");
        put_key(s, LEFT + 80, y, "unbacked", "unbacked");
        put_key(s, LEFT + 190, y, "retiring", "retiring");
        put_key(s, LEFT + 290, y, "idle", "idle in caches");
        put_key(s, LEFT + 420, y, "shared", "shared blocks");
        put_key(s, LEFT + 540, y, "used a0", "up to 1 min");
        put_key(s, LEFT + 650, y, "used a1", "10 min");
        put_key(s, LEFT + 730, y, "used a2", "1 h");
        put_key(s, LEFT + 790, y, "used a3", "older");
}

static void put_owner(struct svg *s, const struct map_session *o, double y)
{
        char age[TEXT_MAX];

        fputs("<rect class=\"", s->out);
        put_colour(s, o);
        fprintf(s->out, "\" x=\"%u\" y=\"%.0f\" width=\"14\" height=\"12\"/><text x=\"%u\" y=\"%.0f\">", LEFT,
                y - 11, LEFT + 20, y);
        put_session(s, o->id);
        fputs(" of ", s->out);
        put_text(s, o->tenant);
        if (*o->name) {
                fputs(": ", s->out);
                put_text(s, o->name);
                fprintf(s->out, " (pid %" PRIu64 ")", o->pid);
        }
        fputs(", ", s->out);
        put_size(s, o->used_bytes, "");
        fprintf(s->out, " in %" PRIu64 " block%s, oldest %s", o->n_blocks, o->n_blocks == 1 ? "" : "s",
                text_duration(o->oldest_ms, age));
        if (o->idle_bytes > 0) {
                fputs(", idle ", s->out);
                put_size(s, o->idle_bytes, "");
        }
        fputs("</text>\n", s->out);
}

static double put_owners(struct svg *s, double y)
{
        const struct map *m = s->map;
        const struct map_session **order;
        size_t n = m->n_sessions < MAP_COLOURS ? m->n_sessions : MAP_COLOURS;
        uint64_t n_bytes = 0;

        if (map_ranking(m, &order) < 0) {
                s->result = -ENOMEM;
                return y;
        }
        for (size_t i = 0; i < n; i++, y += LINE)
                put_owner(s, order[i], y);
        for (size_t i = n; i < m->n_sessions; i++)
                n_bytes += order[i]->used_bytes;
        free(order);
        if (m->n_sessions > n) {
                put_key(s, LEFT, y, "others", "");
                fprintf(s->out, "<text x=\"%u\" y=\"%.0f\">%zu others, ", LEFT + 20, y, m->n_sessions - n);
                put_size(s, n_bytes, "</text>\n");
                y += LINE;
        }
        return y;
}

/* What the picture does not show. */
static void put_notes(struct svg *s, double y)
{
        const struct map *m = s->map;

        if (m->n_left_out > 0) {
                fprintf(s->out,
                        "<text class=\"dim\" x=\"%u\" y=\"%.0f\">%zu more tenants with less memory are "
                        "left out</text>\n",
                        LEFT, y, m->n_left_out);
                y += LINE;
        }
        if (m->n_unplaced > 0)
                fprintf(s->out,
                        "<text class=\"dim\" x=\"%u\" y=\"%.0f\">%" PRIu64
                        " blocks changed while they were listed and are left out</text>\n",
                        LEFT, y, m->n_unplaced);
}

static double longest_row(const struct map *m)
{
        uint64_t longest = 1;

        for (size_t i = 0; i < m->n_rows; i++)
                longest = m->rows[i].n_bytes > longest ? m->rows[i].n_bytes : longest;
        return (double)longest;
}

static void put_head(struct svg *s)
{
        size_t n_owners = s->map->n_sessions < MAP_COLOURS ? s->map->n_sessions : MAP_COLOURS + 1;
        double width = WIDTH + 2 * LEFT,
               height = TOP + (double)s->map->n_rows * ROW + (double)(n_owners + 4) * LINE;

        fprintf(s->out,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
                "height=\"%.0f\" role=\"img\">\n<title>Memory of partition ",
                width, height, width, height);
        put_text(s, s->map->partition);
        fputs("</title>\n", s->out);
        put_style(s);
        fprintf(s->out, "<text x=\"%u\" y=\"24\" font-weight=\"bold\">Partition ", LEFT);
        put_text(s, s->map->partition);
        fputs("</text>", s->out);
        fprintf(s->out,
                "<text class=\"dim\" x=\"%.0f\" y=\"24\" text-anchor=\"end\">1 pixel: ", LEFT + WIDTH);
        put_size(s, (uint64_t)(1 / s->scale), "</text>\n");
}

int map_svg(FILE *out, const struct map *m, bool with_labels)
{
        struct svg s = { .out = out, .map = m, .scale = WIDTH / longest_row(m), .with_labels = with_labels };
        double y = TOP + (double)m->n_rows * ROW + 10;

        put_head(&s);
        if (m->n_rows == 0)
                fprintf(out, "<text class=\"dim\" x=\"%u\" y=\"48\">No tenant has memory there.</text>\n",
                        LEFT);
        for (size_t i = 0; i < m->n_rows; i++)
                put_row(&s, i);
        put_keys(&s, y);
        y = put_owners(&s, y + LINE + 6);
        put_notes(&s, y);
        fputs("</svg>\n", out);
        if (s.result < 0)
                return s.result;
        return text_flush(out);
}
