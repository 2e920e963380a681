/* The address space of a partition, by tenant: where blocks are, who has them, and what is free.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each tenant has one row: its regions one after the other, each up to the end of its last extent. A row is divided
 * into cells of the same size for all rows. A block at least as large as a cell is kept by itself. Smaller ones only
 * add to the sums of their cell, so the memory of a map is bounded by the number of cells and of extents, however many
 * blocks there are. Invariant: the parts of a row tile it, and their sums are the row's.
 *
 * The daemon's lists are read one after the other while it works. A block outside of the regions that are known
 * is counted and not drawn. */
#ifndef BFC_CTL_MAP_H
#define BFC_CTL_MAP_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#include "ctl/list.h"

#define MAP_COLUMNS 1000u /* cells of a row of a picture, each a pixel wide */
#define MAP_NARROW  240u  /* the narrowest row of a picture */
#define MAP_CELLS   2048u /* of all rows together */
#define MAP_ROWS    64u   /* tenants; those with the most memory */
#define MAP_COLOURS 9u    /* sessions that are told apart in a picture; the others look the same */

struct map_region {
        uint64_t id;
        uint64_t begin;        /* in the row */
        uint64_t n_bytes;      /* up to the end of the last extent */
        uint64_t region_bytes; /* of the region */
        size_t row;
};

struct map_cell {
        uint64_t wide_bytes; /* of blocks that are kept by themselves */
        uint64_t small_bytes, backed_bytes, retiring_bytes;
        uint64_t n_blocks; /* that begin here, of the small ones */
        uint64_t oldest_ms;
        uint64_t session_id, weight; /* the one with most of it, if it has more than half */
};

struct map_block {
        uint64_t begin, end; /* in the row */
        uint64_t session_id, age_ms;
        char label[64]; /* its tag, or the name of a shared block */
};

struct map_row {
        const char *tenant;
        uint64_t n_bytes; /* of all its regions, as drawn */
        uint64_t region_bytes, backed_bytes, retiring_bytes, used_bytes, n_blocks;
        uint64_t idle_bytes, reserved_bytes, free_bytes, unbacked_bytes; /* after map_finish() */
        struct map_cell *cells;
        size_t n_cells;
        struct map_block *blocks;
        size_t n_kept, n_kept_max;
};

/* A session in a row; id 0: the tenant's shared blocks. */
struct map_session {
        uint64_t id;
        size_t row;
        uint64_t used_bytes, idle_bytes, n_blocks, oldest_ms;
        /* After map_finish(): */
        uint64_t pid;
        const char *tenant,
                *name; /* name: "" for shared blocks, and where the daemon's list does not have it */
        size_t rank;   /* by used_bytes, the most first */
};

struct map {
        const char *partition;
        uint64_t cell_bytes;
        bool keeps_blocks;
        struct map_row *rows;
        size_t n_rows;
        size_t n_left_out;          /* tenants with memory and no row */
        struct map_region *regions; /* by id */
        size_t n_regions;
        struct map_session *sessions; /* by id and row */
        size_t n_sessions, n_sessions_max;
        uint64_t n_unplaced; /* blocks */
        struct list *space, *owners;
};

enum map_kind { MAP_USED, MAP_FREE, MAP_RETIRING, MAP_UNBACKED, MAP_KINDS };

/* A part of a row: a block, or neighbouring cells that look the same. */
struct map_part {
        uint64_t begin, end;
        enum map_kind kind, behind; /* behind: of what is not used */
        uint64_t bytes[MAP_KINDS];
        uint64_t n_blocks, oldest_ms, session_id;
        const struct map_block *block; /* NULL: not one by itself */
};

/* A map without blocks. space: lists of tenants and extents, of which those of the partition are used; taken over, also
 * on failure. tenant: NULL: all. n_columns: of the longest row. keeps_blocks: those as large as a cell; else all add
 * to their cells only. -ENOMEM. */
int map_new(const char *partition, const char *tenant, struct list *space, size_t n_columns,
            bool keeps_blocks, struct map **ret);
struct map *map_free(struct map *m); /* takes NULL */

/* Adds a block if it is of the partition. -ENOMEM. */
int map_add(struct map *m, const Bfcd__BlockRow *row);

/* After the last block: names sessions, and adds their idle memory. owners: a list of sessions, taken over. */
int map_finish(struct map *m, struct list *owners);

/* The parts of a row, from the lowest address on; the caller frees them. -ENOMEM. */
int map_parts(const struct map *m, size_t row, struct map_part **ret, size_t *ret_n);

/* NULL: it has nothing. */
const struct map_session *map_session_of(const struct map *m, size_t row, uint64_t session_id);

/* The sessions by rank; the caller frees the array. -ENOMEM. */
int map_ranking(const struct map *m, const struct map_session ***ret);

/* Four classes by age: up to 1 min, 10 min, 1 h, longer. */
unsigned map_age_class(uint64_t age_ms);

const char *map_kind_name(enum map_kind kind);

/* All of the map. width: pixels of the longest row. with_labels: also the tags and names of blocks. -ENOMEM, or a
 * negative errno of writing. */
int map_svg(FILE *out, const struct map *m, unsigned width, bool with_labels);
int map_text(FILE *out, const struct map *m);
json_t *map_json(const struct map *m);

/* The columns of a text that is so wide. */
size_t map_text_columns(size_t width);

#endif
