/* bfc: best fit with coalescing over offsets.
 *
 * One `struct bfc` manages one linear space of offsets. It has no I/O, clock, lock or log, and never
 * accesses the memory behind the offsets. The daemon runs one per arena; a client with a cache runs one
 * per partition over its slabs.
 *
 * The space consists of regions. A region is a contiguous range of offsets, divided into extents: the
 * first may have its own size; zones of smaller extents may follow, each zone with extents twice as large
 * as the previous one; the others have `extent_bytes`, the last may be shorter. Each extent is either
 * backed (it has memory) or not. Chunks tile every region:
 *
 *   used      an allocated block, or one that waits for its backing
 *   free      backed and usable; only these are indexed, and two are never adjacent
 *   unbacked  a hole: whole extents without memory
 *   retiring  whole extents that are being released and cannot be used
 *
 * Placement: exact best fit among free chunks, the lowest offset on ties. The block takes the low part
 * and the remainder stays free (always split at 256 bytes). A freed chunk merges at once with free
 * neighbours of its region. For a block inside one extent only chunks count that can contain it without
 * crossing an extent boundary.
 *
 * Results: 0 is success, a negative errno is a failure that changed nothing, and a positive value is a
 * named outcome. Outputs are set only if 0 is returned. No function is thread-safe: use an instance in
 * one thread at a time.
 *
 * Cost: bfc_alloc() and bfc_dealloc() visit a few chunks: at most 24 levels of a trie of sizes, and 2
 * log2(n) of n equal chunks for each that enters or leaves the index. bfc_alloc_in_extent() also visits
 * free chunks that cross an extent boundary, each once. bfc_split(), bfc_info() and bfc_clear_peaks() are
 * constant, bfc_read_stats() takes at most 24 steps. Committing and cancelling visit the pieces of the
 * block. Planning and beginning growth visit holes and the extents of zones. Planning a release visits
 * free chunks as large as the smallest extent, and log2(n) of n ranges for each. No call visits all
 * chunks, or moves memory in proportion to their number. docs/allocator.md has the table.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_BFC_H
#define BFC_BFC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BFC_GRANULE 256u /* bytes; every offset and size is a multiple */

/* The largest end of a region: 2^32 - 1 granules, a granule less than 1 TiB. */
#define BFC_MAX_SPACE ((UINT64_C(1) << 40) - BFC_GRANULE)

enum {
        BFC_NO_FIT = 1,  /* no free chunk (or stretch) is large enough */
        BFC_OVER_BUDGET, /* a stretch exists; it needs more new bytes than allowed */
};

/* The size of a block for a request of n_bytes, which is at most BFC_MAX_SPACE. */
static inline uint64_t bfc_block_bytes(uint64_t n_bytes)
{
        return (n_bytes + BFC_GRANULE - 1) / BFC_GRANULE * BFC_GRANULE;
}

struct bfc;

/* Names a used chunk: index in the low half, stamp in the high half. A stale or invalid handle is
 * detected. 0 is never a handle. */
typedef uint64_t bfc_handle;

/* Names follow TensorFlow's AllocatorStats where possible. All in bytes unless named num_. */
struct bfc_stats {
        uint64_t num_allocs;        /* successful allocations, in total */
        uint64_t num_frees;         /* and frees */
        uint64_t num_blocks;        /* used now */
        uint64_t bytes_in_use;      /* block bytes (rounded) in use, pending ones included */
        uint64_t peak_bytes_in_use; /* since the start or the last bfc_clear_peaks() */
        uint64_t bytes_requested;   /* as requested, before rounding, of the blocks in use */
        uint64_t peak_bytes_requested;
        uint64_t bytes_reserved; /* backed bytes, pending and retiring ones included */
        uint64_t peak_bytes_reserved;
        uint64_t largest_alloc_size;       /* largest block ever, rounded */
        uint64_t bytes_free;               /* free (backed, usable) bytes */
        uint64_t largest_free_block_bytes; /* largest free chunk */
        uint64_t num_free_chunks;
        uint64_t num_chunks;     /* all kinds */
        uint64_t metadata_bytes; /* memory of this instance itself */
};

/* (free - largest free) / free, TensorFlow's definition; 0 if nothing is free. */
static inline double bfc_stats_fragmentation(const struct bfc_stats *s)
{
        if (s->bytes_free == 0)
                return 0.0;
        return (double)(s->bytes_free - s->largest_free_block_bytes) / (double)s->bytes_free;
}

struct bfc_info {
        uint64_t offset;
        uint64_t n_bytes;     /* rounded up to the granule */
        uint64_t n_requested; /* as requested */
        bool pending;         /* its backing has not been committed yet */
};

/* A half-open range of offsets. */
struct bfc_range {
        uint64_t begin;
        uint64_t end;
};

/* The place of a block and what must be backed for it. Valid until the next call that changes the
 * instance. */
struct bfc_growth {
        uint64_t offset;  /* of the block */
        uint64_t n_bytes; /* of the block, rounded up */
        uint64_t n_requested;
        struct bfc_range span; /* whole extents; every unbacked one inside is to be backed */
        uint64_t new_bytes;    /* the sum of the sizes of those unbacked extents */
        bool in_extent;        /* planned by bfc_plan_growth_in_extent() */
        bool is_whole;         /* planned by bfc_plan_growth_whole() or bfc_plan_growth_few() */
        bool is_few;           /* by the latter */
};

/* An empty instance without a region. `extent_bytes`: a non-zero multiple of BFC_GRANULE. -EINVAL,
 * -ENOMEM. */
int bfc_new(uint64_t extent_bytes, struct bfc **ret);

/* Takes NULL; returns NULL. */
struct bfc *bfc_destroy(struct bfc *b);

/* Adds the range [base, base + n_bytes) as a region, completely backed or unbacked. `first_extent_bytes`
 * (0: extent_bytes) is the size of its first extent; n_bytes makes the whole region one extent. Regions
 * must not overlap; adjacent ones never merge. All are multiples of BFC_GRANULE. -EINVAL (misaligned,
 * overlapping, past BFC_MAX_SPACE), -ENOMEM. */
int bfc_add_region(struct bfc *b, uint64_t base, uint64_t n_bytes, uint64_t first_extent_bytes, bool backed);

/* Adds a region with zones of smaller extents after the first extent, which has first_extent_bytes (0: none).
 * Zone k has extents_per_zone extents of small_extent_bytes << k, as long as that is less than
 * extent_bytes. -EINVAL also if extent_bytes is not small_extent_bytes times a power of two, or the zones
 * do not fit. */
struct bfc_zones {
        uint64_t first_extent_bytes;
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone;
};
int bfc_add_zoned_region(struct bfc *b, uint64_t base, uint64_t n_bytes, const struct bfc_zones *zones,
                         bool backed);

/* The size of all zones, without the first extent; 0 if there are none. UINT64_MAX: too large. The sizes
 * must be valid for bfc_add_zoned_region(). */
uint64_t bfc_zones_bytes(const struct bfc_zones *zones, uint64_t extent_bytes);

/* The extent that contains an offset, and its number in the region, from 0 on; and the extent with a
 * number. Both must exist. */
struct bfc_range bfc_extent_at(const struct bfc *b, uint64_t offset, size_t *ret_number);
struct bfc_range bfc_extent_numbered(const struct bfc *b, uint64_t base, size_t number);

/* Removes a region that is completely free or unbacked: its backed bytes are no longer counted as
 * reserved, and bfc_add_region() may use the offsets again. -EINVAL: no region begins at base. -EBUSY: it
 * has other chunks. */
int bfc_remove_region(struct bfc *b, uint64_t base);

/* A block of n_bytes among the free chunks.
 * BFC_NO_FIT; -EINVAL for 0 bytes or more than BFC_MAX_SPACE; -ENOMEM when the
 * instance's own table cannot grow. */
int bfc_alloc(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

/* Allocates a chunk inside one extent: in the smallest of the free chunks that can contain the block without crossing
 * an extent boundary, the lowest offset on ties; in it the lowest such place. The parts before and after
 * it stay free. -EINVAL also for more than extent_bytes. */
int bfc_alloc_in_extent(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

/* Allocates exactly this wholly free, backed range of whole extents of one region. -EINVAL: it is none. */
int bfc_alloc_range(struct bfc *b, struct bfc_range range, bfc_handle *ret_handle);

/* Frees a used chunk that is not pending. -EINVAL: not a valid handle, or pending. */
int bfc_dealloc(struct bfc *b, bfc_handle h);

/* Splits a used chunk that is not pending, `at` bytes after its start. The handle keeps the low part,
 * *ret_high names the high part; each is freed separately. Counts as an allocation. The requested size is
 * divided in the same way. Constant. -EINVAL: as above, or `at` is not a multiple of BFC_GRANULE inside
 * the block. -ENOMEM. */
int bfc_split(struct bfc *b, bfc_handle h, uint64_t at, bfc_handle *ret_high);

/* Describes a block. -EINVAL as above. */
int bfc_info(const struct bfc *b, bfc_handle h, struct bfc_info *ret);

/* ---- growth and release -------------------------------------------------- */

/* Finds the stretch (a maximal run of adjacent free and unbacked chunks of one region) and the place in
 * it where a block of n_bytes needs the fewest new bytes; on ties, for a block of a multiple of the
 * extent size, the place that touches the fewest extents; then the lowest offset. If a free chunk is
 * large enough, it is the place of bfc_alloc(), with no new bytes. Changes nothing. BFC_NO_FIT: no
 * stretch is long enough (add a region, or wait). BFC_OVER_BUDGET: the best place needs more than
 * max_new_bytes; *ret is set, so the caller learns how much. -EINVAL. */
int bfc_plan_growth(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes, struct bfc_growth *ret);

/* bfc_plan_growth() for a block inside one extent. If a free chunk can contain the block, it is the place of
 * bfc_alloc_in_extent(); else the start of the smallest unbacked extent that is large enough, the lowest
 * offset on ties. -EINVAL also for more than extent_bytes. */
int bfc_plan_growth_in_extent(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                              struct bfc_growth *ret);

/* bfc_plan_growth() for a block that gets whole unbacked extents of its own: n_bytes is rounded up to them. The
 * fewest new bytes; on ties the lowest offset. */
int bfc_plan_growth_whole(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                          struct bfc_growth *ret);

/* As bfc_plan_growth_whole(), with another rule for ties: the fewest extents, where 4 are as good as fewer, then
 * the lowest offset. For extents that are expensive beside their bytes. */
int bfc_plan_growth_few(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                        struct bfc_growth *ret);

/* Takes the place: the block is used and pending, and the extents to be backed are counted as reserved
 * and cannot be used otherwise. -EINVAL: the plan is stale (the current plan would differ). -ENOMEM. */
int bfc_grow_begin(struct bfc *b, const struct bfc_growth *plan, bfc_handle *ret_handle);

/* The extents are backed: the block becomes an ordinary one and counts in num_allocs, the rest of the new
 * extents becomes free. -EINVAL: not pending. */
int bfc_grow_commit(struct bfc *b, bfc_handle h);

/* Backing failed: undoes bfc_grow_begin(), except for peaks. -EINVAL: not pending. */
int bfc_grow_cancel(struct bfc *b, bfc_handle h);

/* Makes every unbacked extent in the range backed and free at once (for preallocation). The range
 * consists of whole extents of one region. -EINVAL, -ENOMEM. */
int bfc_back(struct bfc *b, struct bfc_range range);

/* Finds wholly free, backed extents to release: at least want_bytes in total if there are as many, at
 * most max_ranges ranges, none inside keep->span (NULL: no exception). The highest offsets first; extents
 * that are not needed to reach want_bytes are left out, the lowest first. Changes nothing. Returns the
 * number of ranges (0: nothing to release); *ret_bytes is their sum. Each range consists of whole extents
 * of one region. */
size_t bfc_plan_release(const struct bfc *b, uint64_t want_bytes, const struct bfc_growth *keep,
                        struct bfc_range *ret_ranges, size_t max_ranges, uint64_t *ret_bytes);

/* Marks a wholly free backed range (whole extents) as retiring: still reserved,
 * no longer free. -EINVAL: not wholly free. -ENOMEM. */
int bfc_release_begin(struct bfc *b, struct bfc_range range);

/* Ensures that the next bfc_release_begin() does not fail for lack of memory, if only blocks are freed
 * before it. 0 or -ENOMEM. */
int bfc_release_reserve(struct bfc *b);

/* The memory was released: a range of bfc_release_begin() becomes unbacked. -EINVAL: it is no such range. */
int bfc_release_commit(struct bfc *b, struct bfc_range range);

/* ---- restoring ------------------------------------------------------------ */

/* A block at its earlier place. */
struct bfc_place {
        uint64_t offset;
        uint64_t n_requested; /* as requested; it takes bfc_block_bytes() of this */
};

/* Allocates n blocks at these places in free chunks, the lowest offset first: all or none. For an
 * instance that continues another one, with the same regions already added and backed. Each counts as an
 * allocation. Visits each chunk up to the last place once. -EINVAL: a place is not completely free, or
 * not in order. -ENOMEM. */
int bfc_restore(struct bfc *b, const struct bfc_place *places, size_t n, bfc_handle *ret_handles);

/* ---- statistics and checks ------------------------------------------------ */

void bfc_read_stats(const struct bfc *b, struct bfc_stats *ret);

/* Resets every peak to the current value. */
void bfc_clear_peaks(struct bfc *b);

/* Visits chunks in address order, region by region; stops when fn returns
 * non-zero and returns that. `kind`: 'u' used, 'p' a piece of a pending block or
 * the rest of its new extents, 'f' free, '-' unbacked, 'r' retiring. */
int bfc_walk(const struct bfc *b, int (*fn)(void *userdata, char kind, struct bfc_range range),
             void *userdata);

/* Verifies every invariant; slow. 0, or -EBADMSG and a sentence that names the
 * one that does not hold (static storage). */
int bfc_check(const struct bfc *b, const char **ret_why);

#endif
