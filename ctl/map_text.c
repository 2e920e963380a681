/* Maps as text and as JSON; see map.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/map.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define N_LETTERS  26u
#define NAME_WIDTH 12 /* of a tenant, beside the picture on a terminal */

size_t map_text_columns(size_t width)
{
        return width > NAME_WIDTH + 23 ? width - NAME_WIDTH - 3 : 20;
}

/* ---- the picture ----------------------------------------------------------------- */

static char letter_of(const struct map_session *s)
{
        if (!s || s->id == 0)
                return '&';
        return s->rank < N_LETTERS ? (char)('a' + s->rank) : '*';
}

static char character_of(const struct map *m, size_t row, const struct map_part *p)
{
        static const char others[MAP_KINDS] = {
                [MAP_USED] = '#', [MAP_FREE] = '.', [MAP_RETIRING] = '~', [MAP_UNBACKED] = '-'
        };

        if (p->kind != MAP_USED)
                return others[p->kind];
        if (p->bytes[MAP_USED] < (p->end - p->begin) / 2)
                return '+';
        return letter_of(map_session_of(m, row, p->session_id));
}

/* Bytes that continue a character of UTF-8 do not count. */
static size_t count_characters(const char *text)
{
        size_t n = 0;

        for (; *text; text++)
                n += ((unsigned char)*text & 0xc0) != 0x80;
        return n;
}

/* In a pipe no name is cut. */
static size_t name_width(const struct map *m)
{
        size_t width = NAME_WIDTH;

        for (size_t i = 0; !table_look.is_cut && i < m->n_rows; i++) {
                size_t n = count_characters(m->rows[i].tenant);

                width = n > width ? n : width;
        }
        return width;
}

/* Cut to the width, in characters. */
static void put_name(FILE *out, const char *name, size_t width)
{
        size_t n = 0;

        for (; *name; name++) {
                n += ((unsigned char)*name & 0xc0) != 0x80;
                if (n > width)
                        break;
                putc(*name, out);
        }
        for (; n < width; n++)
                putc(' ', out);
}

static int put_row(FILE *out, const struct map *m, size_t row)
{
        char *name = text_escape(m->rows[row].tenant);
        struct map_part *parts;
        size_t n;
        int r = name ? map_parts(m, row, &parts, &n) : -ENOMEM;

        if (r < 0) {
                free(name);
                return r;
        }
        put_name(out, name, name_width(m));
        fputs(" |", out);
        for (size_t i = 0; i < n; i++)
                for (uint64_t at = parts[i].begin; at < parts[i].end; at += m->cell_bytes)
                        putc(character_of(m, row, &parts[i]), out);
        fputs("|\n", out);
        free(parts);
        free(name);
        return 0;
}

static int put_picture(FILE *out, const struct map *m)
{
        char size[TEXT_MAX], *partition = text_escape(m->partition);
        int r = 0;

        if (!partition)
                return -ENOMEM;
        fprintf(out, "Partition %s, one character is %s (%" PRIu64 " bytes)\n\n", partition,
                text_size(m->cell_bytes, size), m->cell_bytes);
        free(partition);
        for (size_t i = 0; i < m->n_rows && r == 0; i++)
                r = put_row(out, m, i);
        fputs("\na-z used, by session   & shared   * other sessions   + less than half used\n"
              ".   free               ~ retiring   - unbacked\n\n",
              out);
        return r;
}

/* ---- tables ---------------------------------------------------------------------- */

static void put_letter(const void *row, char ret[static TABLE_TEXT_MAX])
{
        ret[0] = letter_of(row);
        ret[1] = '\0';
}

#define OF_ROW(member)     TABLE_MEMBER(struct map_row, member)
#define OF_SESSION(member) TABLE_MEMBER(struct map_session, member)

static const struct table_column row_columns[] = {
        { "TENANT", "tenant", TABLE_LEFT, TABLE_TEXT, OF_ROW(tenant) },
        { "IN-USE", "bytes_in_use", TABLE_RIGHT, TABLE_SIZE, OF_ROW(used_bytes) },
        { "RESERVED", "bytes_reserved", TABLE_RIGHT, TABLE_SIZE, OF_ROW(reserved_bytes) },
        { "IDLE", "client_bytes_idle", TABLE_RIGHT, TABLE_SIZE, OF_ROW(idle_bytes) },
        { "FREE", "bytes_free", TABLE_RIGHT, TABLE_SIZE, OF_ROW(free_bytes) },
        { "RETIRING", "bytes_retiring", TABLE_RIGHT | TABLE_WIDE, TABLE_SIZE, OF_ROW(retiring_bytes) },
        { "UNBACKED", "bytes_unbacked", TABLE_RIGHT, TABLE_SIZE, OF_ROW(unbacked_bytes) },
        { "BLOCKS", "num_blocks", TABLE_RIGHT, TABLE_NUMBER, OF_ROW(n_blocks) },
        { NULL, "n_bytes", 0, TABLE_NUMBER, OF_ROW(n_bytes) },
        { 0 },
};

static const struct table_column session_columns[] = {
        { "", NULL, TABLE_LEFT, TABLE_MADE, .text = put_letter },
        { "SESSION", "session_id", TABLE_RIGHT, TABLE_NUMBER, OF_SESSION(id) },
        { "TENANT", "tenant", TABLE_LEFT, TABLE_TEXT, OF_SESSION(tenant) },
        { "PID", "pid", TABLE_RIGHT, TABLE_NUMBER, OF_SESSION(pid) },
        { "IN-USE", "bytes_in_use", TABLE_RIGHT, TABLE_SIZE, OF_SESSION(used_bytes) },
        { "IDLE", "client_bytes_idle", TABLE_RIGHT, TABLE_SIZE, OF_SESSION(idle_bytes) },
        { "BLOCKS", "num_blocks", TABLE_RIGHT, TABLE_NUMBER, OF_SESSION(n_blocks) },
        { "OLDEST", "oldest_age_ms", TABLE_RIGHT, TABLE_DURATION, OF_SESSION(oldest_ms) },
        { "NAME", "name", TABLE_LEFT, TABLE_TEXT, OF_SESSION(name) },
        { 0 },
};

static int put_rows(FILE *out, const struct map *m)
{
        const void *rows[MAP_ROWS];

        for (size_t i = 0; i < m->n_rows; i++)
                rows[i] = &m->rows[i];
        return table_print(out, row_columns, rows, m->n_rows, NULL);
}

static int put_sessions(FILE *out, const struct map *m)
{
        const struct map_session **order;
        size_t n = m->n_sessions < N_LETTERS || table_look.is_wide ? m->n_sessions : N_LETTERS;
        int r = map_ranking(m, &order);

        if (r < 0)
                return r;
        r = table_print(out, session_columns, (const void *const *)order, n, NULL);
        free(order);
        if (n < m->n_sessions)
                fprintf(out, "and %zu more with less memory (--wide lists them)\n", m->n_sessions - n);
        return r;
}

int map_text(FILE *out, const struct map *m)
{
        int r;

        if (m->n_rows == 0) {
                fputs("No tenant has memory there.\n", out);
                return ferror(out) ? -EIO : 0;
        }
        r = put_picture(out, m);
        if (r == 0)
                r = put_rows(out, m);
        if (r == 0 && m->n_sessions > 0) {
                fputc('\n', out);
                r = put_sessions(out, m);
        }
        if (m->n_left_out > 0)
                fprintf(out, "%zu more tenants with less memory are left out; --tenant shows one.\n",
                        m->n_left_out);
        if (m->n_unplaced > 0)
                fprintf(out, "%" PRIu64 " blocks changed while they were listed and are left out.\n",
                        m->n_unplaced);
        return r == 0 && ferror(out) ? -EIO : r;
}

/* ---- JSON ------------------------------------------------------------------------ */

static json_t *json_of_part(const struct map_part *p)
{
        json_t *ret = json_object();

        table_json_set(&ret, "kind", json_string(map_kind_name(p->kind)));
        table_json_set(&ret, "begin", table_json_number(p->begin));
        table_json_set(&ret, "n_bytes", table_json_number(p->end - p->begin));
        table_json_set(&ret, "bytes_in_use", table_json_number(p->bytes[MAP_USED]));
        table_json_set(&ret, "bytes_free", table_json_number(p->bytes[MAP_FREE]));
        table_json_set(&ret, "bytes_retiring", table_json_number(p->bytes[MAP_RETIRING]));
        table_json_set(&ret, "bytes_unbacked", table_json_number(p->bytes[MAP_UNBACKED]));
        if (p->kind != MAP_USED)
                return ret;
        table_json_set(&ret, "num_blocks", table_json_number(p->n_blocks));
        table_json_set(&ret, "session_id", table_json_number(p->session_id));
        table_json_set(&ret, "oldest_age_ms", table_json_number(p->oldest_ms));
        if (p->block)
                table_json_set(&ret, "label", table_json_string(p->block->label));
        return ret;
}

static json_t *json_of_regions(const struct map *m, size_t row)
{
        json_t *ret = json_array();

        for (size_t i = 0; i < m->n_regions; i++) {
                const struct map_region *g = &m->regions[i];
                json_t *region;

                if (g->row != row)
                        continue;
                region = json_object();
                table_json_set(&region, "region_id", table_json_number(g->id));
                table_json_set(&region, "begin", table_json_number(g->begin));
                table_json_set(&region, "n_bytes", table_json_number(g->n_bytes));
                table_json_set(&region, "region_bytes", table_json_number(g->region_bytes));
                table_json_push(&ret, region);
        }
        return ret;
}

static json_t *json_of_row(const struct map *m, size_t row)
{
        json_t *ret = table_json(row_columns, &m->rows[row]), *parts = json_array();
        struct map_part *all = NULL;
        size_t n = 0;

        if (map_parts(m, row, &all, &n) < 0) {
                json_decref(parts);
                parts = NULL;
        }
        for (size_t i = 0; i < n; i++)
                table_json_push(&parts, json_of_part(&all[i]));
        free(all);
        table_json_set(&ret, "regions", json_of_regions(m, row));
        table_json_set(&ret, "parts", parts);
        return ret;
}

json_t *map_json(const struct map *m)
{
        json_t *ret = json_object(), *rows = json_array(), *sessions = NULL;
        const struct map_session **order;

        for (size_t i = 0; i < m->n_rows; i++)
                table_json_push(&rows, json_of_row(m, i));
        if (map_ranking(m, &order) == 0) {
                sessions = table_json_rows(session_columns, (const void *const *)order, m->n_sessions);
                free(order);
        }
        table_json_set(&ret, "partition", table_json_string(m->partition));
        table_json_set(&ret, "cell_bytes", table_json_number(m->cell_bytes));
        table_json_set(&ret, "tenants", rows);
        table_json_set(&ret, "sessions", sessions);
        table_json_set(&ret, "num_tenants_left_out", table_json_number(m->n_left_out));
        table_json_set(&ret, "num_blocks_left_out", table_json_number(m->n_unplaced));
        return show_document("map", ret);
}
