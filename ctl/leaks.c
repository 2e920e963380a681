/* bfcctl leaks: see leaks.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Groups are in a tree by their key, and in an array, which is sorted when it is complete. */
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

/* Members that are not in the key of the group are "" or 0. */
struct group {
        char *tenant, *partition, *tag;
        uint64_t session_id;
        uint64_t block_id;
        uint64_t n_blocks, n_bytes, n_requested, largest_bytes;
        uint64_t n_client_bytes;         /* of n_bytes, as reported by clients: no blocks of the daemon */
        uint64_t oldest_ms, newest_ms;   /* ages */
        const Bfcd__SessionRow *session; /* while it is printed; NULL: it has ended */
};

/* A session whose client reports the ages of its blocks in a partition. */
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

/* By the key of a group. */
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

/* The group of the block. */
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

/* The client reports the blocks in it, or that it is idle. */
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

static void leaks_find_sessions(struct leaks *k, const struct list *sessions)
{
        for (size_t i = 0; i < k->n_groups; i++)
                for (size_t n = 0; n < sessions->n_sessions; n++)
                        if (sessions->sessions[n]->session_id == k->groups[i]->session_id)
                                k->groups[i]->session = sessions->sessions[n];
}

/* ---- columns ---------------------------------------------------------------------- */

static const char *no_blocks(const void *group)
{
        return ((const struct group *)group)->n_blocks > 0 ? NULL : "-";
}

/* A client's own count of the blocks that it keeps. */
static const char *cached(const void *group)
{
        return ((const struct group *)group)->n_blocks > 0 ? NULL : "cached";
}

/* What it grew in a minute since its oldest block, on average. 0: it is younger. */
static uint64_t growth_of(const struct group *g)
{
        return g->oldest_ms >= 60000 ? (uint64_t)((double)g->n_bytes * 60000 / (double)g->oldest_ms) : 0;
}

static void growth_text(const void *group, char ret[static TABLE_TEXT_MAX])
{
        if (((const struct group *)group)->oldest_ms >= 60000)
                text_size(growth_of(group), ret);
}

static json_t *growth_json(const void *group)
{
        const struct group *g = group;

        return g->oldest_ms >= 60000 ? table_json_number(growth_of(g)) : json_null();
}

static json_t *block_json(const void *group)
{
        const struct group *g = group;
        char text[TEXT_MAX];

        snprintf(text, sizeof(text), "%" PRIu64, g->block_id);
        return g->n_blocks > 0 ? json_string(text) : json_null();
}

/* A shared block has no session. */
static const char *no_session(const void *group)
{
        return ((const struct group *)group)->session_id != 0 ? NULL : "shared";
}

static const char *no_process(const void *group)
{
        const struct group *g = group;

        return g->session && g->session->pid != 0 ? NULL : "-";
}

#define R                                      TABLE_RIGHT
#define WIDE                                   TABLE_WIDE
#define GROUP(title, key, flags, type, member) title, key, flags, type, TABLE_MEMBER(struct group, member)
#define SESSION(title, key, flags, type, member)                                                             \
        title, key, flags, type, TABLE_MEMBER(Bfcd__SessionRow, member),                                     \
                .via = offsetof(struct group, session)
#define NAMES                                                                                                \
        { GROUP("TENANT", "tenant", 0, TABLE_TEXT, tenant) },                                                \
        {                                                                                                    \
                GROUP("PARTITION", "partition", 0, TABLE_TEXT, partition)                                    \
        }
#define SUMS(wide)                                                                                           \
        { GROUP("BLOCKS", "num_blocks", R, TABLE_NUMBER, n_blocks), .instead = no_blocks },                  \
                { GROUP("IN-USE", "bytes_in_use", R, TABLE_SIZE, n_bytes) },                                 \
                { GROUP(NULL, "client_bytes_in_use", R, TABLE_SIZE, n_client_bytes) },                       \
                { GROUP(NULL, "bytes_requested", R, TABLE_SIZE, n_requested) },                              \
                { GROUP("LARGEST", "largest_block_bytes", R | (wide), TABLE_SIZE, largest_bytes),            \
                  .instead = no_blocks },                                                                    \
                { "PER-MIN",          "bytes_per_minute",  R,                                                \
                  .type = TABLE_MADE, .text = growth_text, .json = growth_json },                            \
                { GROUP("OLDEST", "oldest_age_ms", R, TABLE_DURATION, oldest_ms) },                          \
        {                                                                                                    \
                GROUP("NEWEST", "newest_age_ms", R, TABLE_DURATION, newest_ms)                               \
        }

static const struct table_column tag_columns[] = {
        { GROUP("TAG", "tag", 0, TABLE_TEXT, tag) },
        NAMES,
        SUMS(WIDE),
        { 0 },
};

static const struct table_column session_columns[] = {
        { GROUP("SESSION", "session_id", R, TABLE_NUMBER, session_id), .instead = no_session },
        { SESSION("PID", "pid", R, TABLE_NUMBER, pid), .instead = no_process },
        { SESSION("NAME", "name", 0, TABLE_TEXT, name) },
        { SESSION("STATE", "state", WIDE, TABLE_TEXT, state) },
        NAMES,
        SUMS(WIDE),
        { 0 },
};

static const struct table_column block_columns[] = {
        { GROUP("BLOCK", "block_id", R, TABLE_NUMBER, block_id), .instead = cached, .json = block_json },
        { GROUP("SESSION", "session_id", R, TABLE_NUMBER, session_id), .instead = no_session },
        NAMES,
        { GROUP("TAG", "tag", 0, TABLE_TEXT, tag) },
        { GROUP("SIZE", "n_bytes", R, TABLE_SIZE, n_bytes) },
        { GROUP("REQUESTED", "n_requested", R | WIDE, TABLE_SIZE, n_requested), .instead = no_blocks },
        { GROUP("AGE", "age_ms", R, TABLE_DURATION, oldest_ms) },
        { 0 },
};

static const struct table_column *const columns[] = {
        [LEAKS_BY_TAG] = tag_columns,
        [LEAKS_BY_SESSION] = session_columns,
        [LEAKS_BY_BLOCK] = block_columns,
};

/* ---- printing --------------------------------------------------------------------- */

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
        int r;

        leaks_sort(k);
        leaks_find_sessions(k, sessions);
        r = table_print(out, columns[k->options->by], (const void *const *)k->groups, k->n_groups,
                        "No leaks.");
        if (r == 0)
                print_idle(out, list_idle(sessions, k->options->tenant));
        return r;
}

json_t *leaks_json(struct leaks *k, const struct list *sessions)
{
        leaks_sort(k);
        leaks_find_sessions(k, sessions);
        return show_document("leaks", table_json_rows(columns[k->options->by], (const void *const *)k->groups,
                                                      k->n_groups));
}
