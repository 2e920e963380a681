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
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/text.h"

#define LEFT       20u
#define HEIGHT     40u /* of a row's parts */
#define BAR        8u  /* of its sums */
#define LINE       20u
#define CHARACTER  7.5 /* the width of one, about: the reader's font is not known */
#define NAME_CHARS 48u
#define EDGED      4 /* pixels: from then on a block has a border */

struct svg {
        FILE *out;
        const struct map *map;
        double width; /* of the longest row */
        double scale; /* pixels of a byte */
        double y;     /* of the next line of text */
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

/* Text from the daemon or a client. The caller frees it; NULL: out of memory. */
static char *clean(struct svg *s, const char *text)
{
        char *ret = text_escape(text);

        if (ret)
                cut(ret, NAME_CHARS);
        else
                s->result = -ENOMEM;
        return ret;
}

static void put_text(struct svg *s, const char *text)
{
        char *name = clean(s, text);

        if (name)
                text_xml(s->out, name);
        free(name);
}

static void put_size(struct svg *s, uint64_t n_bytes, const char *after)
{
        char size[TEXT_MAX];

        fprintf(s->out, "%s%s", text_size(n_bytes, size), after);
}

/* How much of a text is one line: up to a space, if there is one. */
static size_t line_bytes(const char *text, size_t n_characters)
{
        size_t n = 0, space = 0, i = 0;

        for (; text[i]; i++) {
                n += ((unsigned char)text[i] & 0xc0) != 0x80;
                if (n > n_characters)
                        return space > 0 ? space : i;
                if (text[i] == ' ')
                        space = i;
        }
        return i;
}

/* Takes over the text of a paragraph, which begins at x; NULL: out of memory. */
static void put_lines(struct svg *s, const char *attributes, double x, char *text)
{
        size_t n_characters = (size_t)((LEFT + s->width - x) / CHARACTER);

        if (!text)
                s->result = -ENOMEM;
        for (const char *at = text; at && *at; s->y += LINE) {
                char *line = strndup(at, line_bytes(at, n_characters));

                if (!line) {
                        s->result = -ENOMEM;
                        break;
                }
                fprintf(s->out, "<text%s x=\"%.0f\" y=\"%.0f\">", attributes, x, s->y);
                text_xml(s->out, line);
                fputs("</text>\n", s->out);
                at += strlen(line);
                at += strspn(at, " ");
                free(line);
        }
        free(text);
}

/* Adds text that is made of a format. */
static void __attribute__((format(printf, 4, 5)))
print_lines(struct svg *s, const char *attributes, double x, const char *format, ...)
{
        va_list arguments;
        char *text;

        va_start(arguments, format);
        if (vasprintf(&text, format, arguments) < 0)
                text = NULL;
        va_end(arguments);
        put_lines(s, attributes, x, text);
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

static void put_row_text(struct svg *s, const struct map_row *r)
{
        char sizes[5][TEXT_MAX], *tenant = clean(s, r->tenant);

        print_lines(s, "", LEFT,
                    "%s: %s in use (%s idle), %s free, %s retiring, %s unbacked, %" PRIu64 " block%s",
                    tenant ? tenant : "", text_size(r->used_bytes, sizes[0]),
                    text_size(r->idle_bytes, sizes[1]), text_size(r->free_bytes, sizes[2]),
                    text_size(r->retiring_bytes, sizes[3]), text_size(r->unbacked_bytes, sizes[4]),
                    r->n_blocks, r->n_blocks == 1 ? "" : "s");
        free(tenant);
}

static void put_row(struct svg *s, size_t row)
{
        const struct map_row *r = &s->map->rows[row];
        struct map_part *parts;
        double y;
        size_t n;

        if (map_parts(s->map, row, &parts, &n) < 0) {
                s->result = -ENOMEM;
                return;
        }
        put_row_text(s, r);
        y = s->y - LINE + 5;
        for (size_t i = 0; i < n; i++)
                put_part(s, row, &parts[i], y);
        free(parts);
        fputs("<rect class=\"frame\" ", s->out);
        put_place(s, 0, r->n_bytes, y, HEIGHT);
        fputs("/>\n", s->out);
        put_bar(s, r, y + HEIGHT + 2);
        s->y = y + HEIGHT + BAR + 25;
}

/* ---- the legend ------------------------------------------------------------------ */

static void put_swatch(struct svg *s, double x)
{
        fprintf(s->out, "\" x=\"%.0f\" y=\"%.0f\" width=\"14\" height=\"12\"/>", x, s->y - 11);
}

static void put_keys(struct svg *s)
{
        static const char *const keys[][2] = {
                { "free", "free" },           { "unbacked", "unbacked" },    { "retiring", "retiring" },
                { "idle", "idle in caches" }, { "shared", "shared blocks" }, { "used a0", "up to 1 min" },
                { "used a1", "10 min" },      { "used a2", "1 h" },          { "used a3", "older" },
        };
        double x = LEFT;

        for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
                double width = 20 + (double)strlen(keys[i][1]) * CHARACTER;

                if (x + width > LEFT + s->width) {
                        x = LEFT;
                        s->y += LINE;
                }
                fprintf(s->out, "<rect class=\"%s", keys[i][0]);
                put_swatch(s, x);
                fprintf(s->out, "<text class=\"dim\" x=\"%.0f\" y=\"%.0f\">%s</text>\n", x + 20, s->y,
                        keys[i][1]);
                x += width + 10;
        }
        s->y += LINE + 6;
}

static void put_owner(struct svg *s, const struct map_session *o)
{
        char used[TEXT_MAX], idle[TEXT_MAX], age[TEXT_MAX], session[TEXT_MAX] = "shared", pid[TEXT_MAX];
        char *tenant = clean(s, o->tenant), *name = clean(s, o->name);
        bool has_name = *o->name != '\0', is_idle = o->idle_bytes > 0;

        if (o->id != 0)
                snprintf(session, sizeof(session), "session %" PRIu64, o->id);
        snprintf(pid, sizeof(pid), " (pid %" PRIu64 ")", o->pid);
        fputs("<rect class=\"", s->out);
        put_colour(s, o);
        put_swatch(s, LEFT);
        print_lines(s, "", LEFT + 20, "%s of %s%s%s%s, %s in %" PRIu64 " block%s, oldest %s%s%s", session,
                    tenant ? tenant : "", has_name ? ": " : "", has_name && name ? name : "",
                    has_name ? pid : "", text_size(o->used_bytes, used), o->n_blocks,
                    o->n_blocks == 1 ? "" : "s", text_duration(o->oldest_ms, age), is_idle ? ", idle " : "",
                    is_idle ? text_size(o->idle_bytes, idle) : "");
        free(tenant);
        free(name);
}

static void put_owners(struct svg *s)
{
        const struct map *m = s->map;
        const struct map_session **order;
        size_t n = m->n_sessions < MAP_COLOURS ? m->n_sessions : MAP_COLOURS;
        char size[TEXT_MAX];
        uint64_t n_bytes = 0;

        if (map_ranking(m, &order) < 0) {
                s->result = -ENOMEM;
                return;
        }
        for (size_t i = 0; i < n; i++)
                put_owner(s, order[i]);
        for (size_t i = n; i < m->n_sessions; i++)
                n_bytes += order[i]->used_bytes;
        free(order);
        if (m->n_sessions == n)
                return;
        fputs("<rect class=\"others", s->out);
        put_swatch(s, LEFT);
        print_lines(s, "", LEFT + 20, "%zu others, %s", m->n_sessions - n, text_size(n_bytes, size));
}

/* What the picture does not show. */
static void put_notes(struct svg *s)
{
        const struct map *m = s->map;

        if (m->n_left_out > 0)
                print_lines(s, " class=\"dim\"", LEFT, "%zu more tenants with less memory are left out",
                            m->n_left_out);
        if (m->n_unplaced > 0)
                print_lines(s, " class=\"dim\"", LEFT,
                            "%" PRIu64 " blocks changed while they were listed and are left out",
                            m->n_unplaced);
}

/* ---- the picture ------------------------------------------------------------------ */

static double longest_row(const struct map *m)
{
        uint64_t longest = 1;

        for (size_t i = 0; i < m->n_rows; i++)
                longest = m->rows[i].n_bytes > longest ? m->rows[i].n_bytes : longest;
        return (double)longest;
}

static void put_body(struct svg *s)
{
        char *partition = clean(s, s->map->partition), size[TEXT_MAX];

        print_lines(s, " font-weight=\"bold\"", LEFT, "Partition %s", partition ? partition : "");
        free(partition);
        if (s->map->n_rows == 0)
                print_lines(s, " class=\"dim\"", LEFT, "No tenant has memory there.");
        else
                print_lines(s, " class=\"dim\"", LEFT, "1 pixel: %s",
                            text_size((uint64_t)(1 / s->scale), size));
        for (size_t i = 0; i < s->map->n_rows; i++)
                put_row(s, i);
        put_keys(s);
        put_owners(s);
        put_notes(s);
}

static void put_head(struct svg *s)
{
        double width = s->width + 2 * LEFT;

        fprintf(s->out,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
                "height=\"%.0f\" role=\"img\">\n<title>Memory of partition ",
                width, s->y, width, s->y);
        put_text(s, s->map->partition);
        fputs("</title>\n", s->out);
        put_style(s);
}

int map_svg(FILE *out, const struct map *m, unsigned width, bool with_labels)
{
        struct svg s = {
                .map = m, .width = width, .scale = width / longest_row(m), .y = 24, .with_labels = with_labels
        };
        char *body = NULL;
        size_t n_body = 0;

        s.out = open_memstream(&body, &n_body);
        if (!s.out)
                return -ENOMEM;
        put_body(&s);
        if (fclose(s.out) != 0) {
                free(body);
                return -ENOMEM;
        }
        s.out = out;
        put_head(&s); /* its height is known now */
        fwrite(body, 1, n_body, out);
        free(body);
        fputs("</svg>\n", out);
        if (s.result < 0)
                return s.result;
        return text_flush(out);
}
