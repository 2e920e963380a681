/* bfcctl leaks: see leaks.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Groups hang in a tree by what makes them one, and in an array, which is put in
 * order when all are there. */
#include "ctl/leaks.h"

#include <errno.h>
#include <inttypes.h>
#include <search.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/show.h"
#include "ctl/table.h"
#include "ctl/text.h"

#define N_ELEMENTS(a) (sizeof(a) / sizeof((a)[0]))

/* What does not make the group is "" or 0. */
struct group {
        char *tenant, *partition, *tag;
        uint64_t session_id;
        uint64_t block_id;
        uint64_t n_blocks, n_bytes, n_requested, largest_bytes;
        uint64_t n_client_bytes;       /* of n_bytes, by the word of clients: no blocks of the daemon's */
        uint64_t oldest_ms, newest_ms; /* ages */
};

/* A session whose client says how old its blocks in a partition are. */
struct teller {
        uint64_t session_id;
        char *partition;
};

struct leaks {
        const struct leaks_options *options;
        void *tree;
        void *tellers; /* a tree */
        struct group **groups;
        size_t n_groups, n_room;
        bool in_order;
};

int leaks_parse_by(const char *s, enum leaks_by *ret)
{
        static const char *const names[] = { "tag", "session", "block" };

        for (size_t i = 0; i < N_ELEMENTS(names); i++) {
                if (strcmp(s, names[i]) == 0) {
                        *ret = (enum leaks_by)i;
                        return 0;
                }
        }
        return -EINVAL;
}

int leaks_parse_age(const char *s, uint64_t *ret_ms)
{
        static const struct {
                const char *name;
                uint64_t ms;
        } units[] = { { "ms", 1 }, { "s", 1000 }, { "m", 60000 }, { "h", 3600000 }, { "d", 86400000 } };
        uint64_t n = 0;

        if (*s < '0' || *s > '9')
                return -EINVAL;
        for (; *s >= '0' && *s <= '9'; s++)
                if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, (uint64_t)(*s - '0'), &n))
                        return -EINVAL;
        if (*s == '\0' && n == 0) {
                *ret_ms = 0;
                return 0;
        }
        for (size_t i = 0; i < N_ELEMENTS(units); i++) {
                if (strcmp(s, units[i].name) != 0)
                        continue;
                if (__builtin_mul_overflow(n, units[i].ms, &n))
                        return -EINVAL;
                *ret_ms = n;
                return 0;
        }
        return -EINVAL;
}

int leaks_new(const struct leaks_options *options, struct leaks **ret)
{
        struct leaks *k = calloc(1, sizeof(*k));

        if (!k)
                return -ENOMEM;
        k->options = options;
        *ret = k;
        return 0;
}

static struct group *group_free(struct group *g)
{
        if (!g)
                return NULL;
        free(g->tenant);
        free(g->partition);
        free(g->tag);
        free(g);
        return NULL;
}

static void keep(void *node)
{
        (void)node; /* the array has it too */
}

static void teller_free(void *node)
{
        struct teller *t = node;

        free(t->partition);
        free(t);
}

struct leaks *leaks_free(struct leaks *k)
{
        if (!k)
                return NULL;
        tdestroy(k->tellers, teller_free);
        tdestroy(k->tree, keep);
        for (size_t i = 0; i < k->n_groups; i++)
                group_free(k->groups[i]);
        free(k->groups);
        free(k);
        return NULL;
}

static int compare_numbers(uint64_t a, uint64_t b)
{
        return a < b ? -1 : a > b;
}

/* By what makes a group. */
static int compare_keys(const void *left, const void *right)
{
        const struct group *a = left, *b = right;
        int r = compare_numbers(a->block_id, b->block_id);

        if (r == 0)
                r = compare_numbers(a->session_id, b->session_id);
        if (r == 0)
                r = strcmp(a->tag, b->tag);
        if (r == 0)
                r = strcmp(a->partition, b->partition);
        return r ? r : strcmp(a->tenant, b->tenant);
}

static int leaks_make_room(struct leaks *k)
{
        size_t n = k->n_room ? k->n_room * 2 : 64;
        struct group **groups;

        if (k->n_groups < k->n_room)
                return 0;
        groups = reallocarray(k->groups, n, sizeof(*groups));
        if (!groups)
                return -ENOMEM;
        k->groups = groups;
        k->n_room = n;
        return 0;
}

static int leaks_add_group(struct leaks *k, const struct group *key, struct group **ret)
{
        struct group *g = calloc(1, sizeof(*g));
        int r = g ? leaks_make_room(k) : -ENOMEM;

        if (r == 0) {
                *g = (struct group){ .session_id = key->session_id,
                                     .block_id = key->block_id,
                                     .tenant = strdup(key->tenant),
                                     .partition = strdup(key->partition),
                                     .tag = strdup(key->tag),
                                     .newest_ms = UINT64_MAX };
                if (!g->tenant || !g->partition || !g->tag || !tsearch(g, &k->tree, compare_keys))
                        r = -ENOMEM;
        }
        if (r < 0) {
                group_free(g);
                return r;
        }
        k->groups[k->n_groups++] = g;
        *ret = g;
        return 0;
}

/* The group that the block is of. */
static int leaks_group(struct leaks *k, const Bfcd__BlockRow *row, struct group **ret)
{
        static char no_tag[] = "";
        enum leaks_by by = k->options->by;
        struct group key = {
                .tenant = row->tenant,
                .partition = row->partition,
                .tag = by == LEAKS_BY_SESSION ? no_tag : row->tag,
                .session_id = by == LEAKS_BY_TAG ? 0 : row->session_id,
                .block_id = by == LEAKS_BY_BLOCK ? row->block_id : 0,
        };
        void *found = tfind(&key, &k->tree, compare_keys);

        if (!found)
                return leaks_add_group(k, &key, ret);
        *ret = *(struct group **)found;
        return 0;
}

static void group_age(struct group *g, uint64_t age_ms)
{
        g->oldest_ms = age_ms > g->oldest_ms ? age_ms : g->oldest_ms;
        g->newest_ms = age_ms < g->newest_ms ? age_ms : g->newest_ms;
}

static bool leaks_shows(const struct leaks *k, const char *tenant)
{
        return !k->options->tenant || strcmp(tenant, k->options->tenant) == 0;
}

static int compare_tellers(const void *left, const void *right)
{
        const struct teller *a = left, *b = right;
        int r = compare_numbers(a->session_id, b->session_id);

        return r ? r : strcmp(a->partition, b->partition);
}

static int leaks_add_teller(struct leaks *k, const Bfcd__AgesRow *row)
{
        struct teller *t = calloc(1, sizeof(*t)), *const * found;

        if (t) {
                t->session_id = row->session_id;
                t->partition = strdup(row->partition);
        }
        found = t && t->partition ? tsearch(t, &k->tellers, compare_tellers) : NULL;
        if ((!found || *found != t) && t)
                teller_free(t);
        return found ? 0 : -ENOMEM;
}

static int leaks_add_classes(struct leaks *k, const Bfcd__AgesRow *row)
{
        Bfcd__BlockRow key = BFCD__BLOCK_ROW__INIT;
        struct group *g = NULL;
        int r = 0;

        key.session_id = row->session_id;
        key.tenant = row->tenant;
        key.partition = row->partition;
        for (size_t i = 0; r == 0 && i < row->n_bytes && i < row->n_least_age_ms; i++) {
                if (row->least_age_ms[i] < k->options->older_ms || row->bytes[i] == 0)
                        continue;
                r = leaks_group(k, &key, &g);
                if (r < 0)
                        break;
                g->n_bytes += row->bytes[i];
                g->n_client_bytes += row->bytes[i];
                group_age(g, row->least_age_ms[i]);
        }
        return r;
}

int leaks_add_ages(struct leaks *k, const struct list *ages)
{
        int r = 0;

        for (size_t i = 0; r == 0 && i < ages->n_ages; i++) {
                if (!leaks_shows(k, ages->ages[i]->tenant))
                        continue;
                r = leaks_add_teller(k, ages->ages[i]);
                if (r == 0)
                        r = leaks_add_classes(k, ages->ages[i]);
        }
        k->in_order = false;
        return r;
}

/* Its client counts the blocks in it, or keeps it idle. */
static bool leaks_is_told(const struct leaks *k, const Bfcd__BlockRow *row)
{
        struct teller key = { row->session_id, row->partition };

        return row->session_id != 0 && !*row->tag && tfind(&key, &k->tellers, compare_tellers);
}

int leaks_add(struct leaks *k, const Bfcd__BlockRow *row)
{
        struct group *g;
        int r;

        if (row->age_ms < k->options->older_ms || !leaks_shows(k, row->tenant) || leaks_is_told(k, row))
                return 0;
        r = leaks_group(k, row, &g);
        if (r < 0)
                return r;
        g->n_blocks++;
        g->n_bytes += row->n_bytes;
        g->n_requested += row->n_requested;
        g->largest_bytes = row->n_bytes > g->largest_bytes ? row->n_bytes : g->largest_bytes;
        group_age(g, row->age_ms);
        k->in_order = false;
        return 0;
}

/* The most bytes first, then the oldest, then by name. */
static int compare_groups(const void *left, const void *right)
{
        const struct group *a = *(struct group *const *)left, *b = *(struct group *const *)right;
        int r = compare_numbers(b->n_bytes, a->n_bytes);

        if (r == 0)
                r = compare_numbers(b->oldest_ms, a->oldest_ms);
        return r ? r : compare_keys(a, b);
}

static void leaks_sort(struct leaks *k)
{
        if (!k->in_order && k->n_groups > 0)
                qsort(k->groups, k->n_groups, sizeof(*k->groups), compare_groups);
        k->in_order = true;
}

/* It may have ended meanwhile. */
static const Bfcd__SessionRow *session_of(const struct group *g, const struct list *sessions)
{
        static const Bfcd__SessionRow none = BFCD__SESSION_ROW__INIT;

        for (size_t i = 0; i < sessions->n_sessions; i++)
                if (sessions->sessions[i]->session_id == g->session_id)
                        return sessions->sessions[i];
        return &none;
}

/* ---- for people ------------------------------------------------------------------- */

static const struct table_column tag_columns[] = {
        { "TAG", TABLE_LEFT },     { "TENANT", TABLE_LEFT },  { "PARTITION", TABLE_LEFT },
        { "BLOCKS", TABLE_RIGHT }, { "IN-USE", TABLE_RIGHT }, { "LARGEST", TABLE_RIGHT },
        { "OLDEST", TABLE_RIGHT }, { "NEWEST", TABLE_RIGHT },
};

static void add_sums(struct table *t, const struct group *g)
{
        if (g->n_blocks > 0)
                table_number(t, g->n_blocks);
        else
                table_text(t, "-");
        table_size(t, g->n_bytes);
        if (g->n_blocks > 0)
                table_size(t, g->largest_bytes);
        else
                table_text(t, "-");
        table_duration(t, g->oldest_ms);
        table_duration(t, g->newest_ms);
}

static void add_tag(struct table *t, const struct group *g, const struct list *sessions)
{
        (void)sessions;
        table_text(t, g->tag);
        table_text(t, g->tenant);
        table_text(t, g->partition);
        add_sums(t, g);
}

/* A block that processes share is no session's. */
static void add_session_id(struct table *t, const struct group *g)
{
        if (g->session_id != 0)
                table_number(t, g->session_id);
        else
                table_text(t, "shared");
}

static const struct table_column session_columns[] = {
        { "SESSION", TABLE_RIGHT },
        { "PID", TABLE_RIGHT },
        { "NAME", TABLE_LEFT },
        { "STATE", TABLE_LEFT | TABLE_WIDE },
        { "TENANT", TABLE_LEFT },
        { "PARTITION", TABLE_LEFT },
        { "BLOCKS", TABLE_RIGHT },
        { "IN-USE", TABLE_RIGHT },
        { "LARGEST", TABLE_RIGHT | TABLE_WIDE },
        { "OLDEST", TABLE_RIGHT },
        { "NEWEST", TABLE_RIGHT },
};

static void add_session(struct table *t, const struct group *g, const struct list *sessions)
{
        const Bfcd__SessionRow *s = session_of(g, sessions);

        add_session_id(t, g);
        if (s->pid != 0)
                table_number(t, s->pid);
        else
                table_text(t, "-");
        table_text(t, s->name);
        table_text(t, s->state);
        table_text(t, g->tenant);
        table_text(t, g->partition);
        add_sums(t, g);
}

static const struct table_column block_columns[] = {
        { "BLOCK", TABLE_RIGHT },
        { "SESSION", TABLE_RIGHT },
        { "TENANT", TABLE_LEFT },
        { "PARTITION", TABLE_LEFT },
        { "TAG", TABLE_LEFT },
        { "SIZE", TABLE_RIGHT },
        { "REQUESTED", TABLE_RIGHT | TABLE_WIDE },
        { "AGE", TABLE_RIGHT },
};

static void add_block(struct table *t, const struct group *g, const struct list *sessions)
{
        (void)sessions;
        if (g->n_blocks > 0)
                table_number(t, g->block_id);
        else
                table_text(t, "cached");
        add_session_id(t, g);
        table_text(t, g->tenant);
        table_text(t, g->partition);
        table_text(t, g->tag);
        table_size(t, g->n_bytes);
        if (g->n_blocks > 0)
                table_size(t, g->n_requested);
        else
                table_text(t, "-");
        table_duration(t, g->oldest_ms);
}

static const struct {
        const struct table_column *columns;
        size_t n_columns;
        void (*add)(struct table *t, const struct group *g, const struct list *sessions);
} views[] = {
        [LEAKS_BY_TAG] = { tag_columns, N_ELEMENTS(tag_columns), add_tag },
        [LEAKS_BY_SESSION] = { session_columns, N_ELEMENTS(session_columns), add_session },
        [LEAKS_BY_BLOCK] = { block_columns, N_ELEMENTS(block_columns), add_block },
};

static void print_idle(FILE *out, uint64_t n_bytes)
{
        char size[TEXT_MAX];

        if (n_bytes > 0)
                fprintf(out,
                        "%s of the sessions' memory are idle in the clients' caches, as reported by the clients, "
                        "and are not leaks.\n",
                        text_size(n_bytes, size));
}

int leaks_print(FILE *out, struct leaks *k, const struct list *sessions)
{
        enum leaks_by by = k->options->by;
        struct table *t;
        int r = table_new(views[by].columns, views[by].n_columns, &t);

        if (r < 0)
                return r;
        leaks_sort(k);
        for (size_t i = 0; i < k->n_groups; i++)
                views[by].add(t, k->groups[i], sessions);
        r = table_print(t, out);
        table_free(t);
        if (r == 0)
                print_idle(out, list_idle(sessions, k->options->tenant));
        return r;
}

/* ---- JSON ------------------------------------------------------------------------------ */

static void set_sums(json_t **row, const struct group *g)
{
        show_set(row, "num_blocks", show_number(g->n_blocks));
        show_set(row, "bytes_in_use", show_number(g->n_bytes));
        show_set(row, "client_bytes_in_use", show_number(g->n_client_bytes));
        show_set(row, "bytes_requested", show_number(g->n_requested));
        show_set(row, "largest_block_bytes", show_number(g->largest_bytes));
        show_set(row, "oldest_age_ms", show_number(g->oldest_ms));
        show_set(row, "newest_age_ms", show_number(g->newest_ms));
}

static json_t *json_group(const struct leaks *k, const struct group *g, const struct list *sessions)
{
        json_t *row = json_object();

        show_set(&row, "tenant", show_string(g->tenant));
        show_set(&row, "partition", show_string(g->partition));
        if (k->options->by != LEAKS_BY_SESSION)
                show_set(&row, "tag", show_string(g->tag));
        if (k->options->by != LEAKS_BY_TAG)
                show_set(&row, "session_id", show_number(g->session_id));
        if (k->options->by == LEAKS_BY_SESSION) {
                const Bfcd__SessionRow *s = session_of(g, sessions);

                show_set(&row, "pid", show_number(s->pid));
                show_set(&row, "name", show_string(s->name));
                show_set(&row, "state", show_string(s->state));
        }
        if (k->options->by == LEAKS_BY_BLOCK) {
                show_set(&row, "block_id", g->n_blocks > 0 ? show_id(g->block_id) : json_null());
                show_set(&row, "n_bytes", show_number(g->n_bytes));
                show_set(&row, "n_requested", show_number(g->n_requested));
                show_set(&row, "age_ms", show_number(g->oldest_ms));
        } else {
                set_sums(&row, g);
        }
        return row;
}

json_t *leaks_json(struct leaks *k, const struct list *sessions)
{
        json_t *rows = json_array();

        leaks_sort(k);
        for (size_t i = 0; i < k->n_groups; i++)
                show_push(&rows, json_group(k, k->groups[i], sessions));
        return show_document("leaks", rows);
}
