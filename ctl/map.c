/* Maps; see map.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "ctl/map.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define GRANULE 256u /* of sizes and places */

static uint64_t least(uint64_t a, uint64_t b)
{
        return a < b ? a : b;
}

static uint64_t minus(uint64_t a, uint64_t b)
{
        return a > b ? a - b : 0;
}

/* ---- rows ------------------------------------------------------------------------ */

static int compare_reserved(const void *left, const void *right)
{
        const Bfcd__TenantRow *a = *(Bfcd__TenantRow *const *)left, *b = *(Bfcd__TenantRow *const *)right;

        if (a->stats->bytes_reserved != b->stats->bytes_reserved)
                return a->stats->bytes_reserved < b->stats->bytes_reserved ? 1 : -1;
        return strcmp(a->tenant, b->tenant);
}

static int compare_rows(const void *left, const void *right)
{
        const struct map_row *a = left, *b = right;

        return strcmp(a->tenant, b->tenant);
}

static size_t find_row(const struct map *m, const char *tenant)
{
        for (size_t i = 0; i < m->n_rows; i++)
                if (strcmp(m->rows[i].tenant, tenant) == 0)
                        return i;
        return SIZE_MAX;
}

/* Of the tenants with memory in the partition, those with the most. */
static int choose_rows(struct map *m, const char *tenant)
{
        Bfcd__TenantRow **rows = calloc(m->space->n_tenants + 1, sizeof(*rows));
        size_t n = 0;

        m->rows = calloc(MAP_ROWS, sizeof(*m->rows));
        if (!rows || !m->rows) {
                free(rows);
                return -ENOMEM;
        }
        for (size_t i = 0; i < m->space->n_tenants; i++) {
                Bfcd__TenantRow *row = m->space->tenants[i];

                if (strcmp(row->partition, m->partition) == 0 &&
                    (!tenant || strcmp(row->tenant, tenant) == 0) && row->stats &&
                    row->stats->bytes_reserved > 0)
                        rows[n++] = row;
        }
        if (n > 0)
                qsort(rows, n, sizeof(*rows), compare_reserved);
        m->n_rows = least(n, MAP_ROWS);
        m->n_left_out = n - m->n_rows;
        for (size_t i = 0; i < m->n_rows; i++)
                m->rows[i].tenant = rows[i]->tenant;
        free(rows);
        if (m->n_rows > 0)
                qsort(m->rows, m->n_rows, sizeof(*m->rows), compare_rows);
        return 0;
}

/* ---- regions --------------------------------------------------------------------- */

static int compare_regions(const void *left, const void *right)
{
        const struct map_region *a = left, *b = right;

        return (a->id > b->id) - (a->id < b->id);
}

static struct map_region *find_region(const struct map *m, uint64_t id)
{
        struct map_region key = { .id = id };

        return m->n_regions == 0
                       ? NULL
                       : bsearch(&key, m->regions, m->n_regions, sizeof(*m->regions), compare_regions);
}

static bool is_drawn(const struct map *m, const Bfcd__ExtentRow *e, size_t *ret_row)
{
        if (strcmp(e->partition, m->partition) != 0 || e->n_bytes > e->region_bytes ||
            e->offset > e->region_bytes - e->n_bytes)
                return false;
        *ret_row = find_row(m, e->tenant);
        return *ret_row != SIZE_MAX;
}

/* One for each extent, then those of the same region become one. */
static int find_regions(struct map *m)
{
        size_t n = 0, row;

        m->regions = calloc(m->space->n_extents + 1, sizeof(*m->regions));
        if (!m->regions)
                return -ENOMEM;
        for (size_t i = 0; i < m->space->n_extents; i++) {
                const Bfcd__ExtentRow *e = m->space->extents[i];

                if (is_drawn(m, e, &row))
                        m->regions[n++] = (struct map_region){ .id = e->region_id,
                                                               .n_bytes = e->offset + e->n_bytes,
                                                               .region_bytes = e->region_bytes,
                                                               .row = row };
        }
        if (n > 0)
                qsort(m->regions, n, sizeof(*m->regions), compare_regions);
        for (size_t i = 0; i < n; i++) {
                struct map_region *to = m->n_regions > 0 ? &m->regions[m->n_regions - 1] : NULL;

                if (!to || to->id != m->regions[i].id)
                        m->regions[m->n_regions++] = m->regions[i];
                else if (m->regions[i].n_bytes > to->n_bytes)
                        to->n_bytes = m->regions[i].n_bytes;
        }
        for (size_t i = 0; i < m->n_regions; i++) {
                struct map_row *r = &m->rows[m->regions[i].row];

                m->regions[i].begin = r->n_bytes;
                r->n_bytes += m->regions[i].n_bytes;
                r->region_bytes += m->regions[i].region_bytes;
        }
        return 0;
}

/* ---- cells ----------------------------------------------------------------------- */

static int make_cells(struct map *m, size_t n_columns)
{
        uint64_t longest = 0;

        if (n_columns * m->n_rows > MAP_CELLS)
                n_columns = MAP_CELLS / m->n_rows;
        for (size_t i = 0; i < m->n_rows; i++)
                longest = m->rows[i].n_bytes > longest ? m->rows[i].n_bytes : longest;
        m->cell_bytes = (longest / n_columns / GRANULE + 1) * GRANULE;
        for (size_t i = 0; i < m->n_rows; i++) {
                struct map_row *r = &m->rows[i];

                r->n_cells = (size_t)((r->n_bytes + m->cell_bytes - 1) / m->cell_bytes);
                r->cells = calloc(r->n_cells + 1, sizeof(*r->cells));
                r->n_kept_max = m->keeps_blocks ? r->n_cells + 1 : 0;
                r->blocks = calloc(r->n_kept_max + 1, sizeof(*r->blocks));
                if (!r->cells || !r->blocks)
                        return -ENOMEM;
        }
        return 0;
}

/* The cell's part of a range. */
static uint64_t part_of(const struct map *m, size_t cell, uint64_t begin, uint64_t end)
{
        uint64_t cell_begin = cell * m->cell_bytes, cell_end = cell_begin + m->cell_bytes;

        return least(end, cell_end) - (begin > cell_begin ? begin : cell_begin);
}

static void add_extent(struct map *m, const Bfcd__ExtentRow *e)
{
        const struct map_region *g = find_region(m, e->region_id);
        struct map_row *r = &m->rows[g->row];
        uint64_t begin = g->begin + e->offset, end = begin + e->n_bytes;

        *(e->is_retiring ? &r->retiring_bytes : &r->backed_bytes) += e->n_bytes;
        for (size_t i = (size_t)(begin / m->cell_bytes); i * m->cell_bytes < end; i++)
                *(e->is_retiring ? &r->cells[i].retiring_bytes : &r->cells[i].backed_bytes) +=
                        part_of(m, i, begin, end);
}

int map_new(const char *partition, const char *tenant, struct list *space, size_t n_columns,
            bool keeps_blocks, struct map **ret)
{
        struct map *m = calloc(1, sizeof(*m));
        size_t row;
        int r;

        if (!m) {
                list_free(space);
                return -ENOMEM;
        }
        *m = (struct map){ .partition = partition, .space = space, .keeps_blocks = keeps_blocks };
        r = choose_rows(m, tenant);
        if (r == 0)
                r = find_regions(m);
        if (r == 0)
                r = make_cells(m, n_columns);
        if (r < 0) {
                map_free(m);
                return r;
        }
        for (size_t i = 0; i < space->n_extents; i++)
                if (is_drawn(m, space->extents[i], &row))
                        add_extent(m, space->extents[i]);
        *ret = m;
        return 0;
}

struct map *map_free(struct map *m)
{
        if (!m)
                return NULL;
        for (size_t i = 0; m->rows && i < m->n_rows; i++) {
                free(m->rows[i].cells);
                free(m->rows[i].blocks);
        }
        free(m->rows);
        free(m->regions);
        free(m->sessions);
        list_free(m->space);
        list_free(m->owners);
        free(m);
        return NULL;
}

/* ---- sessions -------------------------------------------------------------------- */

/* Where a session is in the array, or would be. */
static size_t session_place(const struct map *m, size_t row, uint64_t id)
{
        size_t low = 0, high = m->n_sessions;

        while (low < high) {
                size_t middle = low + (high - low) / 2;
                const struct map_session *s = &m->sessions[middle];

                if (s->id < id || (s->id == id && s->row < row))
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

const struct map_session *map_session_of(const struct map *m, size_t row, uint64_t session_id)
{
        size_t i = session_place(m, row, session_id);

        return i < m->n_sessions && m->sessions[i].id == session_id && m->sessions[i].row == row
                       ? &m->sessions[i]
                       : NULL;
}

static int make_session(struct map *m, size_t row, uint64_t id, struct map_session **ret)
{
        size_t at = session_place(m, row, id);

        if (at < m->n_sessions && m->sessions[at].id == id && m->sessions[at].row == row) {
                *ret = &m->sessions[at];
                return 0;
        }
        if (m->n_sessions == m->n_sessions_max) {
                size_t n = m->n_sessions_max * 2 + 16;
                struct map_session *larger = reallocarray(m->sessions, n, sizeof(*larger));

                if (!larger)
                        return -ENOMEM;
                m->sessions = larger;
                m->n_sessions_max = n;
        }
        memmove(&m->sessions[at + 1], &m->sessions[at], (m->n_sessions - at) * sizeof(*m->sessions));
        m->n_sessions++;
        m->sessions[at] = (struct map_session){ .id = id, .row = row };
        *ret = &m->sessions[at];
        return 0;
}

static int compare_used(const void *left, const void *right)
{
        const struct map_session *a = *(const struct map_session *const *)left,
                                 *b = *(const struct map_session *const *)right;

        if (a->used_bytes != b->used_bytes)
                return a->used_bytes < b->used_bytes ? 1 : -1;
        return (a->id > b->id) - (a->id < b->id);
}

int map_ranking(const struct map *m, const struct map_session ***ret)
{
        const struct map_session **order = calloc(m->n_sessions + 1, sizeof(*order));

        if (!order)
                return -ENOMEM;
        for (size_t i = 0; i < m->n_sessions; i++)
                order[i] = &m->sessions[i];
        if (m->n_sessions > 0)
                qsort(order, m->n_sessions, sizeof(*order), compare_used);
        *ret = order;
        return 0;
}

static int compare_id_of(const void *key, const void *element)
{
        uint64_t id = *(const uint64_t *)key;
        const Bfcd__SessionRow *s = *(Bfcd__SessionRow *const *)element;

        return (id > s->session_id) - (id < s->session_id);
}

/* A client reports its idle memory as one sum for all partitions, and may report anything: it is at most what the
 * session has here. */
int map_finish(struct map *m, struct list *owners)
{
        const struct map_session **order;
        int r;

        m->owners = owners;
        for (size_t i = 0; i < m->n_rows; i++) {
                m->rows[i].reserved_bytes = m->rows[i].backed_bytes + m->rows[i].retiring_bytes;
                m->rows[i].free_bytes = minus(m->rows[i].backed_bytes, m->rows[i].used_bytes);
                m->rows[i].unbacked_bytes =
                        minus(m->rows[i].region_bytes, m->rows[i].backed_bytes + m->rows[i].retiring_bytes);
        }
        for (size_t i = 0; i < m->n_sessions; i++) {
                struct map_session *s = &m->sessions[i];
                Bfcd__SessionRow *const *found =
                        owners->n_sessions == 0 ? NULL
                                                : bsearch(&s->id, owners->sessions, owners->n_sessions,
                                                          sizeof(*owners->sessions), compare_id_of);

                s->tenant = m->rows[s->row].tenant;
                s->name = "";
                if (s->id == 0 || !found)
                        continue;
                s->name = (*found)->name;
                s->pid = (*found)->pid;
                s->idle_bytes = least((*found)->client_bytes_idle, s->used_bytes);
                m->rows[s->row].idle_bytes += s->idle_bytes;
        }
        r = map_ranking(m, &order);
        if (r < 0)
                return r;
        for (size_t i = 0; i < m->n_sessions; i++)
                m->sessions[order[i] - m->sessions].rank = i;
        free(order);
        return 0;
}

/* ---- blocks ---------------------------------------------------------------------- */

/* A majority vote in constant memory. */
static void vote(struct map_cell *c, uint64_t session_id, uint64_t n_bytes)
{
        if (c->session_id == session_id) {
                c->weight += n_bytes;
        } else if (c->weight >= n_bytes) {
                c->weight -= n_bytes;
        } else {
                c->session_id = session_id;
                c->weight = n_bytes - c->weight;
        }
}

static void keep_block(struct map_row *r, const Bfcd__BlockRow *row, uint64_t begin)
{
        struct map_block *b = &r->blocks[r->n_kept++];

        *b = (struct map_block){ .begin = begin,
                                 .end = begin + row->n_bytes,
                                 .session_id = row->session_id,
                                 .age_ms = row->age_ms };
        strncpy(b->label, *row->shared_name ? row->shared_name : row->tag, sizeof(b->label) - 1);
}

static void count_block(struct map *m, struct map_row *r, const Bfcd__BlockRow *row, uint64_t begin)
{
        bool is_kept = m->keeps_blocks && row->n_bytes >= m->cell_bytes && r->n_kept < r->n_kept_max;
        uint64_t end = begin + row->n_bytes;

        if (is_kept)
                keep_block(r, row, begin);
        for (size_t i = (size_t)(begin / m->cell_bytes); i * m->cell_bytes < end; i++) {
                struct map_cell *c = &r->cells[i];
                uint64_t n_bytes = part_of(m, i, begin, end);

                *(is_kept ? &c->wide_bytes : &c->small_bytes) += n_bytes;
                if (is_kept)
                        continue;
                c->n_blocks += i == begin / m->cell_bytes;
                c->oldest_ms = row->age_ms > c->oldest_ms ? row->age_ms : c->oldest_ms;
                vote(c, row->session_id, n_bytes);
        }
}

int map_add(struct map *m, const Bfcd__BlockRow *row)
{
        const struct map_region *g = find_region(m, row->region_id);
        struct map_session *s;
        struct map_row *r;
        int result;

        if (strcmp(row->partition, m->partition) != 0)
                return 0;
        if (!g || row->n_bytes == 0 || row->n_bytes > g->n_bytes || row->offset > g->n_bytes - row->n_bytes) {
                m->n_unplaced += find_row(m, row->tenant) != SIZE_MAX;
                return 0;
        }
        result = make_session(m, g->row, row->session_id, &s);
        if (result < 0)
                return result;
        r = &m->rows[g->row];
        r->used_bytes += row->n_bytes;
        r->n_blocks++;
        s->used_bytes += row->n_bytes;
        s->n_blocks++;
        s->oldest_ms = row->age_ms > s->oldest_ms ? row->age_ms : s->oldest_ms;
        count_block(m, r, row, g->begin + row->offset);
        return 0;
}

/* ---- parts ----------------------------------------------------------------------- */

unsigned map_age_class(uint64_t age_ms)
{
        return age_ms <= 60000 ? 0 : age_ms <= 600000 ? 1 : age_ms <= 3600000 ? 2 : 3;
}

const char *map_kind_name(enum map_kind kind)
{
        static const char *const names[MAP_KINDS] = { "used", "free", "retiring", "unbacked" };

        return names[kind];
}

static int compare_blocks(const void *left, const void *right)
{
        const struct map_block *a = left, *b = right;

        return (a->begin > b->begin) - (a->begin < b->begin);
}

static struct map_part part_of_block(const struct map_block *b, uint64_t at)
{
        return (struct map_part){ .begin = at,
                                  .end = b->end,
                                  .kind = MAP_USED,
                                  .behind = MAP_FREE,
                                  .bytes = { [MAP_USED] = b->end - at },
                                  .n_blocks = 1,
                                  .oldest_ms = b->age_ms,
                                  .session_id = b->session_id,
                                  .block = b };
}

/* What kept blocks leave of a cell. */
static struct map_part part_of_cell(const struct map_cell *c, uint64_t begin, uint64_t end)
{
        struct map_part p = { .begin = begin, .end = end, .behind = MAP_FREE };

        p.bytes[MAP_USED] = least(c->small_bytes, end - begin);
        p.bytes[MAP_RETIRING] = least(c->retiring_bytes, end - begin - p.bytes[MAP_USED]);
        p.bytes[MAP_FREE] = least(minus(c->backed_bytes, c->wide_bytes + c->small_bytes),
                                  end - begin - p.bytes[MAP_USED] - p.bytes[MAP_RETIRING]);
        p.bytes[MAP_UNBACKED] = end - begin - p.bytes[MAP_USED] - p.bytes[MAP_RETIRING] - p.bytes[MAP_FREE];
        for (enum map_kind k = MAP_RETIRING; k <= MAP_UNBACKED; k++)
                if (p.bytes[k] > p.bytes[p.behind])
                        p.behind = k;
        p.kind = p.bytes[MAP_USED] > 0 ? MAP_USED : p.behind;
        p.n_blocks = c->n_blocks;
        p.oldest_ms = c->oldest_ms;
        p.session_id = c->session_id;
        return p;
}

/* In eighths. */
static unsigned level(const struct map_part *p)
{
        return (unsigned)((double)p->bytes[MAP_USED] / (double)(p->end - p->begin) * 8);
}

static bool look_the_same(const struct map_part *a, const struct map_part *b)
{
        if (a->kind != b->kind || a->behind != b->behind || a->block || b->block)
                return false;
        return a->kind != MAP_USED || (a->session_id == b->session_id && level(a) == level(b) &&
                                       map_age_class(a->oldest_ms) == map_age_class(b->oldest_ms));
}

static void add_part(struct map_part *parts, size_t *n, struct map_part p)
{
        struct map_part *last = *n > 0 ? &parts[*n - 1] : NULL;

        if (!last || !look_the_same(last, &p)) {
                parts[(*n)++] = p;
                return;
        }
        last->end = p.end;
        for (enum map_kind k = MAP_USED; k < MAP_KINDS; k++)
                last->bytes[k] += p.bytes[k];
        last->n_blocks += p.n_blocks;
        last->oldest_ms = p.oldest_ms > last->oldest_ms ? p.oldest_ms : last->oldest_ms;
}

/* Kept blocks may overlap if memory changed hands while the list was read: the later one begins where the
 * other one ends. */
int map_parts(const struct map *m, size_t row, struct map_part **ret, size_t *ret_n)
{
        const struct map_row *r = &m->rows[row];
        struct map_part *parts = calloc(2 * r->n_kept + r->n_cells + 1, sizeof(*parts));
        size_t n = 0, next = 0;
        uint64_t at = 0;

        if (!parts)
                return -ENOMEM;
        if (r->n_kept > 0)
                qsort(r->blocks, r->n_kept, sizeof(*r->blocks), compare_blocks);
        while (at < r->n_bytes) {
                size_t cell = (size_t)(at / m->cell_bytes);
                uint64_t end = least((cell + 1) * m->cell_bytes, r->n_bytes);

                if (next < r->n_kept && r->blocks[next].begin <= at) {
                        if (r->blocks[next].end > at) {
                                add_part(parts, &n, part_of_block(&r->blocks[next], at));
                                at = r->blocks[next].end;
                        }
                        next++;
                        continue;
                }
                if (next < r->n_kept)
                        end = least(end, r->blocks[next].begin);
                add_part(parts, &n, part_of_cell(&r->cells[cell], at, end));
                at = end;
        }
        *ret = parts;
        *ret_n = n;
        return 0;
}
