/* bfc: best fit with coalescing over offsets.
 *
 * One `struct bfc` manages one linear space of offsets. It does no I/O, keeps no
 * clock, takes no lock and writes no log; it never touches the memory that the
 * offsets stand for. The daemon runs one per arena; a client may run one over
 * the blocks that it holds.
 *
 * The space consists of regions. A region is a contiguous range of offsets, cut
 * by a grid into extents: the first may have a size of its own; zones of smaller
 * extents may follow, each zone with extents twice as large as the one before;
 * the others are `extent_bytes` long, the last may be short. Each extent is
 * either backed (memory stands behind it) or not. Chunks tile every region:
 *
 *   used      a block that somebody holds, or one that waits for its backing
 *   free      backed and usable; only these are indexed, never two adjacent
 *   unbacked  a hole: address space without memory, made of whole extents
 *   retiring  whole extents that are being given back; nobody may use them
 *
 * Placement: exact best fit among free chunks, the lowest offset on ties; the
 * block takes the low part and the remainder stays free (always split at 256
 * bytes). A freed chunk merges at once with free neighbours of its region. Who
 * needs a block inside one extent says so; then only chunks count in which it can
 * lie without crossing the grid.
 *
 * Results: 0 is done, a negative errno is a failure that changed nothing, and a
 * positive value is a named outcome. Outputs stay untouched unless 0 is
 * returned. No function is thread-safe; use one instance from one thread at a
 * time.
 *
 * Cost: bfc_alloc() and bfc_dealloc() visit a few chunks, at most 24 levels of a
 * trie of sizes and 2 log2(n) of n equal ones for each that enters or leaves the
 * index. bfc_split() is constant. bfc_alloc_in_extent() also looks at free chunks that reach over a point of
 * the grid, each once. bfc_info() and bfc_clear_peaks() are constant, bfc_read_stats() takes at
 * most 24 steps. Committing and cancelling visit the pieces of the block. What
 * plans or begins growth visits holes and the extents of zones. What plans a release
 * visits free chunks as large as the smallest extent, and log2(n) of n ranges for each. None
 * visits all chunks, and no call moves memory in proportion to their number.
 * docs/allocator.md has the table.
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

/* What a block of n_bytes takes; n_bytes is at most BFC_MAX_SPACE. */
static inline uint64_t bfc_block_bytes(uint64_t n_bytes)
{
        return (n_bytes + BFC_GRANULE - 1) / BFC_GRANULE * BFC_GRANULE;
}

struct bfc;

/* Names a used chunk: index in the low half, stamp in the high half. A handle
 * is caught when it was freed already or never given. 0 is never a handle. */
typedef uint64_t bfc_handle;

/* Names follow TensorFlow's AllocatorStats where it has them. All in bytes
 * unless named num_. */
struct bfc_stats {
        uint64_t num_allocs;        /* successful allocations, ever */
        uint64_t num_frees;         /* and frees */
        uint64_t num_blocks;        /* used now */
        uint64_t bytes_in_use;      /* block bytes (rounded) in use, pending ones included */
        uint64_t peak_bytes_in_use; /* since the start or the last bfc_clear_peaks() */
        uint64_t bytes_requested;   /* as asked for, before rounding, of the blocks in use */
        uint64_t peak_bytes_requested;
        uint64_t bytes_reserved; /* backed bytes, pending and retiring ones included */
        uint64_t peak_bytes_reserved;
        uint64_t largest_alloc_size;       /* largest block ever, rounded */
        uint64_t bytes_free;               /* free (backed, usable) bytes */
        uint64_t largest_free_block_bytes; /* largest free chunk */
        uint64_t num_free_chunks;
        uint64_t num_chunks;     /* all kinds */
        uint64_t metadata_bytes; /* memory this instance takes itself */
};

/* (free - largest free) / free, TensorFlow's measure; 0 when nothing is free. */
static inline double bfc_stats_fragmentation(const struct bfc_stats *s)
{
        if (s->bytes_free == 0)
                return 0.0;
        return (double)(s->bytes_free - s->largest_free_block_bytes) / (double)s->bytes_free;
}

struct bfc_info {
        uint64_t offset;
        uint64_t n_bytes;     /* rounded up to the granule */
        uint64_t n_requested; /* as asked for */
        bool pending;         /* its backing has not been committed yet */
};

/* A half-open range of offsets. */
struct bfc_range {
        uint64_t begin;
        uint64_t end;
};

/* Where a block would lie and what must be backed for it. Valid until the next
 * call that changes the instance. */
struct bfc_growth {
        uint64_t offset;  /* of the block */
        uint64_t n_bytes; /* of the block, rounded up */
        uint64_t n_requested;
        struct bfc_range span; /* whole extents; every unbacked one inside is to be backed */
        uint64_t new_bytes;    /* the sum of the sizes of those unbacked extents */
        bool in_extent;        /* planned by bfc_plan_growth_in_extent() */
};

/* An empty instance without a region. `extent_bytes`: the grid, a non-zero
 * multiple of BFC_GRANULE. -EINVAL, -ENOMEM. */
int bfc_new(uint64_t extent_bytes, struct bfc **ret);

/* Takes NULL; returns NULL. */
struct bfc *bfc_destroy(struct bfc *b);

/* Adds the range [base, base + n_bytes) as a region, wholly backed or wholly
 * unbacked. `first_extent_bytes` (0: extent_bytes) is the size of its first
 * extent; n_bytes makes the whole region one extent. Regions must not overlap; two that touch never merge. All multiples
 * of BFC_GRANULE. -EINVAL (misaligned, overlapping, past BFC_MAX_SPACE),
 * -ENOMEM. */
int bfc_add_region(struct bfc *b, uint64_t base, uint64_t n_bytes, uint64_t first_extent_bytes, bool backed);

/* The same with zones of smaller extents after the first extent, which has first_extent_bytes
 * (0: there is none of a size of its own). Zone k has extents_per_zone extents of
 * small_extent_bytes << k, as long as that is less than extent_bytes. -EINVAL also where
 * extent_bytes is not small_extent_bytes times a power of two, or the zones do not fit. */
struct bfc_zones {
        uint64_t first_extent_bytes;
        uint64_t small_extent_bytes;
        uint32_t extents_per_zone;
};
int bfc_add_zoned_region(struct bfc *b, uint64_t base, uint64_t n_bytes, const struct bfc_zones *zones,
                         bool backed);

/* What the zones take, the first extent not included; 0 where there are none. UINT64_MAX: more than
 * there is. The extents must be of sizes that bfc_add_zoned_region() takes. */
uint64_t bfc_zones_bytes(const struct bfc_zones *zones, uint64_t extent_bytes);

/* The extent that contains an offset of a region, and its number in the region, from 0 on; and the
 * extent with a number. The region must have it. */
struct bfc_range bfc_extent_at(const struct bfc *b, uint64_t offset, size_t *ret_number);
struct bfc_range bfc_extent_numbered(const struct bfc *b, uint64_t base, size_t number);

/* Takes a region away, of which every byte is free or unbacked: what was backed
 * is no longer counted as reserved, and bfc_add_region() may use the offsets
 * again. -EINVAL: no region begins at base. -EBUSY: something else lies in it. */
int bfc_remove_region(struct bfc *b, uint64_t base);

/* A block of n_bytes among the free chunks.
 * BFC_NO_FIT; -EINVAL for 0 bytes or more than BFC_MAX_SPACE; -ENOMEM when the
 * instance's own table cannot grow. */
int bfc_alloc(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

/* The same inside one extent: of the free chunks in which the block can lie without
 * crossing the grid, the smallest, the lowest offset on ties; in it the lowest such
 * place, and what lies before and behind it stays free. -EINVAL also for more
 * than extent_bytes. */
int bfc_alloc_in_extent(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset);

/* Frees a used chunk that is not pending. -EINVAL: not a live handle (freed
 * already, never given), or pending. */
int bfc_dealloc(struct bfc *b, bfc_handle h);

/* Cuts a used chunk that is not pending in two, `at` bytes behind its begin. The handle keeps the low
 * part, *ret_high names the high part; each is freed by itself. Counts as an allocation. What the block
 * was asked for is divided in the same way. Constant. -EINVAL: as above, or `at` is not a multiple of
 * BFC_GRANULE inside the block. -ENOMEM. */
int bfc_split(struct bfc *b, bfc_handle h, uint64_t at, bfc_handle *ret_high);

/* What a handle stands for. -EINVAL as above. */
int bfc_info(const struct bfc *b, bfc_handle h, struct bfc_info *ret);

/* ---- growth and release -------------------------------------------------- */

/* Finds the stretch (a maximal run of adjacent free and unbacked chunks of one
 * region) and the place in it where a block of n_bytes needs the fewest new
 * bytes; on ties, for a block of a multiple of the extent, the one that lies in the
 * fewest extents; then the lowest offset. Where a free chunk is large enough, it is the
 * place that bfc_alloc() would take, with no new bytes. Changes nothing.
 * BFC_NO_FIT: no stretch of the address space is long enough (add a region, or
 * wait). BFC_OVER_BUDGET: the best place needs more than max_new_bytes;
 * *ret is filled all the same, so that the caller learns how much. -EINVAL. */
int bfc_plan_growth(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes, struct bfc_growth *ret);

/* The same inside one extent. Where a free chunk can hold the block so, it is the
 * place that bfc_alloc_in_extent() would take; else the begin of the smallest
 * unbacked extent that is large enough, the lowest offset on ties. -EINVAL also for
 * more than extent_bytes. */
int bfc_plan_growth_in_extent(const struct bfc *b, uint64_t n_bytes, uint64_t max_new_bytes,
                              struct bfc_growth *ret);

/* Takes the place: the block is used and pending, the extents to be backed are
 * counted as reserved, nobody else can use them. -EINVAL: the plan is stale (it is
 * not what would be planned now). -ENOMEM. */
int bfc_grow_begin(struct bfc *b, const struct bfc_growth *plan, bfc_handle *ret_handle);

/* The backing is there: the block is an ordinary one from now on and counts in
 * num_allocs, the rest of the new extents becomes free. -EINVAL: not pending. */
int bfc_grow_commit(struct bfc *b, bfc_handle h);

/* There is no backing: undoes bfc_grow_begin(); only peaks remember it. -EINVAL:
 * not pending. */
int bfc_grow_cancel(struct bfc *b, bfc_handle h);

/* Makes every unbacked extent inside the range backed and free at once (for
 * what is backed from the start). The range: whole extents of one region.
 * -EINVAL, -ENOMEM. */
int bfc_back(struct bfc *b, struct bfc_range range);

/* Finds wholly free, backed extents to give back: at least want_bytes in sum if
 * there are as many, at most max_ranges ranges, none inside keep->span (NULL:
 * no exception). The highest offsets first; extents that turn out not to be needed
 * to reach want_bytes are left out, the lowest first. Changes nothing. Returns the number of ranges (0: nothing to release);
 * *ret_bytes is their sum. Each range consists of whole extents of one region. */
size_t bfc_plan_release(const struct bfc *b, uint64_t want_bytes, const struct bfc_growth *keep,
                        struct bfc_range *ret_ranges, size_t max_ranges, uint64_t *ret_bytes);

/* Marks a wholly free backed range (whole extents) as retiring: still reserved,
 * no longer free. -EINVAL: not wholly free. -ENOMEM. */
int bfc_release_begin(struct bfc *b, struct bfc_range range);

/* The next bfc_release_begin() will not fail for want of memory, if only blocks are freed
 * before it. 0 or -ENOMEM. */
int bfc_release_reserve(struct bfc *b);

/* The memory is gone: a range that was given to bfc_release_begin() becomes
 * unbacked. -EINVAL: it was not. */
int bfc_release_commit(struct bfc *b, struct bfc_range range);

/* ---- taking over ----------------------------------------------------------- */

/* A block where it lay before. */
struct bfc_place {
        uint64_t offset;
        uint64_t n_requested; /* it takes bfc_block_bytes() of them */
};

/* Takes n blocks in free chunks, at these places, the lowest offset first: all or none. For
 * an instance that goes on for another, of which the regions are added and backed already.
 * Each counts as an allocation. Visits each chunk up to the last place once. -EINVAL: a
 * place is not wholly free, or not in order. -ENOMEM. */
int bfc_restore(struct bfc *b, const struct bfc_place *places, size_t n, bfc_handle *ret_handles);

/* ---- looking ------------------------------------------------------------- */

void bfc_read_stats(const struct bfc *b, struct bfc_stats *ret);

/* Every peak becomes the present value. */
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
