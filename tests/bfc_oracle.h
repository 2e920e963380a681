/* The allocator written plainly: a sorted array of segments, every question
 * answered by looking at all of them. It is what bfc/ is compared with, so it
 * shares no idea with it: no index, no bins, no links; growth by trying every
 * offset; release by listing extents.
 *
 *   segments tile the regions; kinds are those of bfc_walk()
 *   two free or two unbacked segments of one region never touch
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_TESTS_ORACLE_H
#define BFC_TESTS_ORACLE_H

#include "bfc/bfc.h"

struct segment {
        struct bfc_range range;
        char kind;
        bool fresh;  /* pending: was unbacked */
        bool tail;   /* pending: the rest of the last new extent */
        uint32_t id; /* of the block; 0: none */
        uint64_t n_requested;
};

struct extent {
        struct bfc_range range;
        size_t region;
};

struct oracle {
        uint64_t extent_bytes;
        struct segment *segments;
        size_t n_segments, n_segments_room;
        struct extent *extents; /* of all regions, by offset */
        size_t n_extents;
        struct bfc_range *regions;
        size_t n_regions;
        struct bfc_stats stats; /* those that are counted as things happen, not summed up */
};

void oracle_init(struct oracle *o, uint64_t extent_bytes);
void oracle_done(struct oracle *o);

/* As the calls of bfc.h; blocks are named by the caller's ids, which are not 0. */
int oracle_add_zoned_region(struct oracle *o, uint64_t base, uint64_t n_bytes, const struct bfc_zones *zones,
                            bool backed);
int oracle_remove_region(struct oracle *o, uint64_t base);
int oracle_alloc(struct oracle *o, uint64_t n_bytes, uint32_t id, uint64_t *ret_offset);
int oracle_alloc_in_extent(struct oracle *o, uint64_t n_bytes, uint32_t id, uint64_t *ret_offset);
int oracle_dealloc(struct oracle *o, uint32_t id);
int oracle_split(struct oracle *o, uint32_t id, uint64_t at, uint32_t high);
int oracle_plan_growth(const struct oracle *o, uint64_t n_bytes, uint64_t max_new, struct bfc_growth *ret);
int oracle_plan_growth_in_extent(const struct oracle *o, uint64_t n_bytes, uint64_t max_new,
                                 struct bfc_growth *ret);
void oracle_grow_begin(struct oracle *o, const struct bfc_growth *plan, uint32_t id);
void oracle_grow_commit(struct oracle *o, uint32_t id);
void oracle_grow_cancel(struct oracle *o, uint32_t id);
int oracle_back(struct oracle *o, struct bfc_range range);
int oracle_release_begin(struct oracle *o, struct bfc_range range);
int oracle_release_commit(struct oracle *o, struct bfc_range range);
void oracle_clear_peaks(struct oracle *o);

/* Is every byte of the range free? Is it made of whole extents of one region? */
bool oracle_is_free(const struct oracle *o, struct bfc_range range);
bool oracle_is_whole(const struct oracle *o, struct bfc_range range);

void oracle_read_stats(const struct oracle *o, struct bfc_stats *ret); /* metadata_bytes and num_chunks: 0 */

#endif
