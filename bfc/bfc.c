/* The allocator: instances, regions, blocks, statistics. bfc.h is the contract,
 * core.h the data, index.h the index of free chunks, grow.c what holes need.
 *
 * An allocation finds the best chunk, takes its low part and rekeys the
 * remainder in place; a free looks at both neighbours by address and merges.
 * What they rarely need is in functions of their own, see index.h.
 * Neither scans, copies or calls the system, except that a new record beyond
 * the highest one so far now and then makes further records usable (mprotect).
 *
 *   n_used + idle + free == reserved
 *   spare + edges + used + pending + pieces + holes + retiring + free == records
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "bfc/bfc.h"
#include "bfc/core.h"
#include "bfc/index.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE           UINT64_C(4096)
#define FIRST_READY    (UINT32_C(1) << 11) /* records usable from the start: 64 KiB, touched as needed */
#define FIRST_REGIONS  UINT32_C(128)       /* mapped ones: a page of them */
#define MAX_READY_STEP (UINT32_C(1) << 17) /* records made usable at once: 4 MiB */

/* ---- instances and their records --------------------------------------------- */

static size_t map_bytes(uint32_t n_records)
{
        return ((size_t)n_records * sizeof(struct chunk) + PAGE - 1) & ~(size_t)(PAGE - 1);
}

int bfc_records_grow(struct bfc *b, uint32_t n)
{
        uint32_t step = b->n_ready < MAX_READY_STEP ? b->n_ready : MAX_READY_STEP;
        uint32_t room = b->n_reserved - b->n_ready;

        (void)n; /* a step is larger than what any call asks for */
        if (step > room)
                step = room;
        if (b->n_spare + (b->n_ready - b->n_records) + step < n)
                return -ENOMEM;
        if (mprotect(words_of(b), map_bytes(b->n_ready + step), PROT_READ | PROT_WRITE) < 0)
                return -ENOMEM;
        b->n_ready += step;
        return 0;
}

int bfc_new(uint64_t extent_bytes, struct bfc **ret)
{
        uint32_t n_reserved = MAX_RECORDS;
        struct bfc *b;
        char *map;

        if (extent_bytes == 0 || extent_bytes % BFC_GRANULE != 0 || extent_bytes > BFC_MAX_SPACE)
                return -EINVAL;
        /* Address space only; no memory stands behind PROT_NONE. */
        for (;;) {
                map = mmap(NULL, map_bytes(n_reserved), PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
                if (map != MAP_FAILED)
                        break;
                n_reserved /= 2;
                if (n_reserved < MIN_RECORDS)
                        return -ENOMEM;
        }
        if (mprotect(map, map_bytes(FIRST_READY), PROT_READ | PROT_WRITE) < 0) {
                (void)munmap(map, map_bytes(n_reserved));
                return -ENOMEM;
        }
        b = (struct bfc *)(void *)(map + BFC_AT);
        b->n_reserved = n_reserved;
        b->n_ready = FIRST_READY;
        b->n_records = FIRST_RECORD;
        b->extent = (uint32_t)(extent_bytes >> GRANULE_SHIFT);
        b->smallest = b->extent;
        b->regions = b->own_regions;
        b->n_regions_room = N_OWN_REGIONS;
        *ret = b;
        return 0;
}

struct bfc *bfc_destroy(struct bfc *b)
{
        if (b) {
                if (b->regions != b->own_regions)
                        (void)munmap(b->regions, b->n_regions_room * sizeof(struct region));
                (void)munmap(words_of(b), map_bytes(b->n_reserved));
        }
        return NULL;
}

/* ---- regions ------------------------------------------------------------------- */

/* The number of regions whose base is <= addr. */
static uint32_t regions_up_to(const struct bfc *b, uint32_t addr)
{
        uint32_t low = 0, high = b->n_regions;

        while (low < high) {
                uint32_t middle = low + (high - low) / 2;

                if (b->regions[middle].base <= addr)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

const struct region *bfc_region_at(const struct bfc *b, uint32_t addr)
{
        uint32_t n = regions_up_to(b, addr);

        if (n == 0 || addr - b->regions[n - 1].base >= b->regions[n - 1].size)
                return NULL;
        return &b->regions[n - 1];
}

static size_t regions_bytes(uint32_t room)
{
        return room * sizeof(struct region);
}

/* Mapped, as all else is: a tool that looks for leaks looks into no mapping, and would take what
 * only a mapping names for lost. */
static int regions_make_room(struct bfc *b)
{
        bool is_first = b->regions == b->own_regions;
        uint32_t room = is_first ? FIRST_REGIONS : b->n_regions_room * 2;
        struct region *regions;

        if (b->n_regions < b->n_regions_room)
                return 0;
        if (is_first)
                regions = mmap(NULL, regions_bytes(room), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                               -1, 0);
        else
                regions = mremap(b->regions, regions_bytes(b->n_regions_room), regions_bytes(room),
                                 MREMAP_MAYMOVE);
        if (regions == MAP_FAILED)
                return -ENOMEM;
        if (is_first)
                memcpy(regions, b->own_regions, sizeof(b->own_regions));
        b->regions = regions;
        b->n_regions_room = room;
        return 0;
}

static uint32_t new_edge(struct bfc *b)
{
        uint32_t i = record_new(b);
        struct chunk *c = chunk_at(b, i);

        c->addr = 0;
        c->size = 0;
        c->stamp = 0;
        c->link = 0;
        chunk_set_meta(c, KIND_EDGE, 0);
        c->prev = i;
        c->next = i;
        return i;
}

/* How many zones lead from small extents to those of the instance; -EINVAL. */
static int zones_count(uint64_t small_bytes, uint64_t extent_bytes)
{
        int n = 0;

        if (small_bytes == 0 || small_bytes % BFC_GRANULE != 0)
                return -EINVAL;
        for (; small_bytes < extent_bytes && small_bytes <= BFC_MAX_SPACE; small_bytes *= 2)
                n++;
        return small_bytes == extent_bytes ? n : -EINVAL;
}

uint64_t bfc_zones_bytes(const struct bfc_zones *zones, uint64_t extent_bytes)
{
        uint64_t n = extent_bytes / zones->small_extent_bytes - 1; /* times zone 0 */
        uint64_t zone_0;

        if (__builtin_mul_overflow(zones->small_extent_bytes, (uint64_t)zones->extents_per_zone, &zone_0) ||
            __builtin_mul_overflow(zone_0, n, &n))
                return UINT64_MAX;
        return n;
}

/* Where the extents of a region lie. The range is checked. */
static int region_cut(const struct bfc *b, const struct bfc_zones *zones, struct region *r)
{
        uint64_t extent_bytes = to_bytes(b->extent), n_bytes = to_bytes(r->size), zones_bytes;
        int n_zones = zones_count(zones->small_extent_bytes, extent_bytes);

        if (n_zones < 0 || zones->first_extent_bytes % BFC_GRANULE != 0)
                return -EINVAL;
        zones_bytes = bfc_zones_bytes(zones, extent_bytes);
        if (zones->first_extent_bytes > n_bytes || zones_bytes > n_bytes - zones->first_extent_bytes)
                return -EINVAL;
        r->first = (uint32_t)(zones->first_extent_bytes >> GRANULE_SHIFT);
        r->body = r->base + r->first + (uint32_t)(zones_bytes >> GRANULE_SHIFT);
        if (zones_bytes == 0)
                return 0;
        r->small = (uint32_t)(zones->small_extent_bytes >> GRANULE_SHIFT);
        r->per_zone = zones->extents_per_zone;
        r->n_zones = (uint32_t)n_zones;
        return 0;
}

int bfc_add_zoned_region(struct bfc *b, uint64_t base, uint64_t n_bytes, const struct bfc_zones *zones,
                         bool backed)
{
        struct region r = { .base = 0 };
        uint32_t n, i;
        int res;

        if ((base | n_bytes) % BFC_GRANULE != 0 || n_bytes == 0)
                return -EINVAL;
        if (base > BFC_MAX_SPACE || n_bytes > BFC_MAX_SPACE - base)
                return -EINVAL;
        r.base = (uint32_t)(base >> GRANULE_SHIFT);
        r.size = (uint32_t)(n_bytes >> GRANULE_SHIFT);
        n = regions_up_to(b, r.base);
        if (n > 0 && r.base - b->regions[n - 1].base < b->regions[n - 1].size)
                return -EINVAL;
        if (n < b->n_regions && b->regions[n].base - r.base < r.size)
                return -EINVAL;
        res = regions_make_room(b);
        if (res == 0)
                res = records_reserve(b, 2);
        if (res == 0)
                res = region_cut(b, zones, &r);
        if (res < 0)
                return res;
        if (r.n_zones > 0 && r.small < b->smallest)
                b->smallest = r.small;
        r.edge = new_edge(b);
        memmove(b->regions + n + 1, b->regions + n, (b->n_regions - n) * sizeof(r));
        b->regions[n] = r;
        b->n_regions++;
        i = record_new(b);
        link_before(b, i, r.edge);
        chunk_at(b, i)->addr = r.base;
        chunk_at(b, i)->size = r.size;
        if (backed) {
                index_insert(b, i);
                count_reserved(b, r.size);
        } else {
                bfc_hole_put(b, i);
        }
        return 0;
}

int bfc_add_region(struct bfc *b, uint64_t base, uint64_t n_bytes, uint64_t first_extent_bytes, bool backed)
{
        struct bfc_zones none = { .first_extent_bytes = first_extent_bytes,
                                  .small_extent_bytes = to_bytes(b->extent) };

        if (first_extent_bytes > n_bytes && first_extent_bytes % BFC_GRANULE == 0)
                none.first_extent_bytes = n_bytes;
        return bfc_add_zoned_region(b, base, n_bytes, &none, backed);
}

struct bfc_range bfc_extent_at(const struct bfc *b, uint64_t offset, size_t *ret_number)
{
        uint32_t addr = (uint32_t)(offset >> GRANULE_SHIFT);
        const struct region *r = bfc_region_at(b, addr);

        *ret_number = grid_number(b, r, addr);
        return (struct bfc_range){ to_bytes(grid_down(b, r, addr)), to_bytes(grid_up(b, r, addr + 1)) };
}

struct bfc_range bfc_extent_numbered(const struct bfc *b, uint64_t base, size_t number)
{
        const struct region *r = bfc_region_at(b, (uint32_t)(base >> GRANULE_SHIFT));
        uint32_t n = (uint32_t)number, first = r->first > 0 ? 1 : 0, begin = r->base, zone;

        if (n >= first) {
                n -= first;
                zone = r->n_zones > 0 ? n / r->per_zone : 0;
                if (zone < r->n_zones)
                        begin += r->first + r->per_zone * r->small * ((UINT32_C(1) << zone) - 1) +
                                 n % r->per_zone * (r->small << zone);
                else
                        begin = r->body + (n - r->n_zones * r->per_zone) * b->extent;
        }
        return (struct bfc_range){ to_bytes(begin), to_bytes(grid_up(b, r, begin + 1)) };
}

int bfc_remove_region(struct bfc *b, uint64_t base)
{
        uint32_t at, edge, next;

        if (base % BFC_GRANULE != 0 || base > BFC_MAX_SPACE)
                return -EINVAL;
        at = regions_up_to(b, (uint32_t)(base >> GRANULE_SHIFT));
        if (at == 0 || to_bytes(b->regions[--at].base) != base)
                return -EINVAL;
        edge = b->regions[at].edge;
        for (uint32_t i = chunk_at(b, edge)->next; i != edge; i = chunk_at(b, i)->next) {
                enum kind kind = chunk_kind(chunk_at(b, i));

                VISIT();
                if (kind != KIND_FREE && kind != KIND_HOLE)
                        return -EBUSY;
        }
        for (uint32_t i = chunk_at(b, edge)->next; i != edge; i = next) {
                VISIT();
                next = chunk_at(b, i)->next;
                if (chunk_at(b, i)->slot != 0) {
                        b->reserved -= chunk_at(b, i)->size;
                        index_remove(b, i);
                } else {
                        bfc_list_take(b, i);
                }
                record_release(b, i);
        }
        record_release(b, edge);
        b->n_regions--;
        memmove(b->regions + at, b->regions + at + 1, (b->n_regions - at) * sizeof(b->regions[0]));
        return 0;
}

/* ---- blocks ---------------------------------------------------------------------- */

/* Chunk i, of n granules and not free, becomes a block of n_bytes. */
BFC_INLINE void block_begin(struct bfc *b, uint32_t i, uint32_t n, uint64_t n_bytes, bfc_handle *ret_handle,
                            uint64_t *ret_offset)
{
        struct chunk *c = chunk_at(b, i);

        c->stamp = next_stamp(b);
        chunk_set_meta(c, KIND_USED, (uint32_t)(to_bytes(n) - n_bytes));
        count_used(b, n, n_bytes);
        b->n_allocs++;
        if (n > b->largest)
                b->largest = n;
        *ret_handle = chunk_handle(c, i);
        *ret_offset = to_bytes(c->addr);
}

/* Takes the free chunk i as it is. */
BFC_OUTLINE int alloc_whole(struct bfc *b, uint32_t i, uint64_t n_bytes, bfc_handle *ret_handle,
                            uint64_t *ret_offset)
{
        index_take(b, i);
        block_begin(b, i, chunk_at(b, i)->size, n_bytes, ret_handle, ret_offset);
        return 0;
}

/* Takes the low n granules of the free chunk `best`. A spare record is there. */
BFC_OUTLINE int alloc_split(struct bfc *b, uint32_t best, uint32_t n, uint64_t n_bytes,
                            bfc_handle *ret_handle, uint64_t *ret_offset)
{
        struct chunk *rest = chunk_at(b, best), *c;
        uint32_t i = record_new(b), addr = rest->addr;

        c = chunk_at(b, i);
        link_before(b, i, best);
        c->addr = addr;
        c->size = n;
        block_begin(b, i, n, n_bytes, ret_handle, ret_offset);
        return index_rekey(b, best, addr + n, rest->size - n);
}

/* bfc_alloc() where one look at the index and the spare records is not enough. */
BFC_OUTLINE int alloc_slowly(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT), best = index_find(b, n);

        if (best == 0)
                return BFC_NO_FIT;
        if (chunk_at(b, best)->size == n)
                return alloc_whole(b, best, n_bytes, ret_handle, ret_offset);
        if (records_reserve(b, 1) < 0)
                return -ENOMEM;
        return alloc_split(b, best, n, n_bytes, ret_handle, ret_offset);
}

int bfc_alloc(struct bfc *b, uint64_t n_bytes, bfc_handle *ret_handle, uint64_t *ret_offset)
{
        uint32_t n = (uint32_t)((n_bytes + BFC_GRANULE - 1) >> GRANULE_SHIFT), best;

        if (n_bytes - 1 >= BFC_MAX_SPACE)
                return -EINVAL;
        best = index_look(b, n);
        if (best == 0)
                return alloc_slowly(b, n_bytes, ret_handle, ret_offset);
        if (chunk_at(b, best)->size == n)
                return alloc_whole(b, best, n_bytes, ret_handle, ret_offset);
        if (b->n_spare == 0)
                return alloc_slowly(b, n_bytes, ret_handle, ret_offset);
        return alloc_split(b, best, n, n_bytes, ret_handle, ret_offset);
}

int bfc_dealloc(struct bfc *b, bfc_handle h)
{
        uint32_t i = handle_chunk(b, h, KIND_USED);
        const struct chunk *c = chunk_at(b, i);

        if (i == 0)
                return -EINVAL;
        count_unused(b, c->size, chunk_waste(c));
        b->n_frees++;
        return chunk_make_free(b, i);
}

int bfc_split(struct bfc *b, bfc_handle h, uint64_t at, bfc_handle *ret_high)
{
        uint32_t i = handle_chunk(b, h, KIND_USED), n = (uint32_t)(at >> GRANULE_SHIFT), high;
        struct chunk *c = chunk_at(b, i), *rest;
        int r;

        if (i == 0 || at == 0 || at % BFC_GRANULE != 0 || at >= to_bytes(c->size))
                return -EINVAL;
        r = records_reserve(b, 1);
        if (r < 0)
                return r;
        high = record_new(b);
        link_before(b, high, c->next);
        rest = chunk_at(b, high);
        rest->addr = c->addr + n;
        rest->size = c->size - n;
        rest->link = 0;
        rest->stamp = next_stamp(b);
        chunk_set_meta(rest, KIND_USED, chunk_waste(c));
        c->size = n;
        chunk_set_meta(c, KIND_USED, 0);
        b->n_allocs++;
        *ret_high = chunk_handle(rest, high);
        return 0;
}

int bfc_info(const struct bfc *b, bfc_handle h, struct bfc_info *ret)
{
        uint32_t i = handle_chunk(b, h, KIND_USED);
        bool pending = i == 0;
        const struct chunk *c;

        if (pending)
                i = handle_chunk(b, h, KIND_PENDING);
        if (i == 0)
                return -EINVAL;
        c = chunk_at(b, i);
        ret->offset = to_bytes(c->addr);
        ret->n_bytes = to_bytes(pending ? c->link : c->size);
        ret->n_requested = ret->n_bytes - chunk_waste(c);
        ret->pending = pending;
        return 0;
}

/* ---- taking over -------------------------------------------------------------------- */

/* The chunk around [addr, end), which is free; `i`: where to begin to look, in the same
 * region, or 0. 0: there is none. */
static uint32_t restore_find(const struct bfc *b, uint32_t i, uint32_t addr, uint32_t end)
{
        const struct region *r = bfc_region_at(b, addr);

        if (!r)
                return 0;
        if (i == 0 || chunk_at(b, i)->addr < r->base)
                i = chunk_at(b, r->edge)->next;
        while (chunk_end(chunk_at(b, i)) <= addr) {
                VISIT();
                i = chunk_at(b, i)->next;
        }
        return chunk_kind(chunk_at(b, i)) == KIND_FREE && end <= chunk_end(chunk_at(b, i)) ? i : 0;
}

static uint32_t place_granules(const struct bfc_place *p)
{
        return (uint32_t)(bfc_block_bytes(p->n_requested) >> GRANULE_SHIFT);
}

static bool restore_fits(const struct bfc *b, const struct bfc_place *places, size_t n)
{
        uint64_t free_from = 0;
        uint32_t i = 0;

        for (size_t k = 0; k < n; k++) {
                const struct bfc_place *p = &places[k];

                if (p->n_requested - 1 >= BFC_MAX_SPACE || p->offset % BFC_GRANULE != 0 ||
                    p->offset < free_from || p->offset > BFC_MAX_SPACE - bfc_block_bytes(p->n_requested))
                        return false;
                free_from = p->offset + bfc_block_bytes(p->n_requested);
                i = restore_find(b, i, (uint32_t)(p->offset >> GRANULE_SHIFT),
                                 (uint32_t)(free_from >> GRANULE_SHIFT));
                if (i == 0)
                        return false;
        }
        return true;
}

static int restore_reserve(struct bfc *b, size_t n)
{
        int r = 0;

        while (r == 0 && b->n_spare + (b->n_ready - b->n_records) < n)
                r = bfc_records_grow(b, b->n_spare + (b->n_ready - b->n_records) + 1);
        return r;
}

/* A record of [addr, addr + size) in front of chunk i. */
static uint32_t restore_cut(struct bfc *b, uint32_t i, uint32_t addr, uint32_t size)
{
        uint32_t piece = record_new(b);

        link_before(b, piece, i);
        chunk_at(b, piece)->addr = addr;
        chunk_at(b, piece)->size = size;
        return piece;
}

/* Takes a place in the free chunk i: what is below it becomes a chunk of its own, what is
 * above it stays chunk i. Returns the chunk from which to look for the next place. */
static uint32_t restore_take(struct bfc *b, uint32_t i, const struct bfc_place *p, bfc_handle *ret_handle)
{
        uint32_t addr = (uint32_t)(p->offset >> GRANULE_SHIFT), n = place_granules(p);
        uint32_t low = chunk_at(b, i)->addr, end = chunk_end(chunk_at(b, i)), block = i;
        uint64_t offset;

        if (low < addr)
                (void)index_insert(b, restore_cut(b, i, low, addr - low));
        if (addr + n < end) {
                block = restore_cut(b, i, addr, n);
                (void)index_rekey(b, i, addr + n, end - addr - n);
        } else {
                index_take(b, i);
                chunk_at(b, i)->addr = addr;
                chunk_at(b, i)->size = n;
        }
        block_begin(b, block, n, p->n_requested, ret_handle, &offset);
        return i;
}

int bfc_restore(struct bfc *b, const struct bfc_place *places, size_t n, bfc_handle *ret_handles)
{
        uint32_t i = 0;
        int r;

        if (n > MAX_RECORDS / 2)
                return -ENOMEM;
        if (!restore_fits(b, places, n))
                return -EINVAL;
        r = restore_reserve(b, 2 * n);
        if (r < 0)
                return r;
        for (size_t k = 0; k < n; k++) {
                uint32_t addr = (uint32_t)(places[k].offset >> GRANULE_SHIFT);

                i = restore_find(b, i, addr, addr + place_granules(&places[k]));
                i = restore_take(b, i, &places[k], &ret_handles[k]);
        }
        return 0;
}

/* ---- looking ----------------------------------------------------------------------- */

uint32_t bfc_index_next(const struct bfc *b, uint32_t bin, uint32_t i)
{
        const uint32_t *words = words_of(b);
        uint32_t slot;

        if (i != 0) {
                const struct chunk *c = chunk_at(b, i);

                if (c->child[0] != 0)
                        return c->child[0];
                if (c->child[1] != 0)
                        return c->child[1];
                if (c->equal != 0 && (c->equal & EQUAL_TAG) == 0)
                        return c->equal;
                /* Up, until there is a link behind the one that we came from. */
                for (slot = c->slot; slot >= END_OF_HEADS; slot = chunk_at(b, SLOT_OWNER(slot))->slot) {
                        uint32_t up = SLOT_OWNER(slot);
                        uint32_t equal = words[SLOT_EQUAL(up)];

                        if (slot == SLOT_CHILD(up, 0) && words[SLOT_CHILD(up, 1)] != 0)
                                return words[SLOT_CHILD(up, 1)];
                        if (slot != SLOT_EQUAL(up) && equal != 0 && (equal & EQUAL_TAG) == 0)
                                return equal;
                }
                bin = slot - FIRST_HEAD + 1;
        }
        bin = map_next(b, bin);
        return bin == N_BINS ? 0 : words[FIRST_HEAD + bin];
}

/* The size of the largest free chunk; 0: none. At most 24 levels below the top bin. */
static uint32_t largest_free(const struct bfc *b)
{
        uint32_t word, bin, i, below;

        if (b->map_top == 0)
                return 0;
        word = 63u - (uint32_t)__builtin_clzll(b->map_top);
        bin = word * 64 + 63u - (uint32_t)__builtin_clzll(b->map[word]);
        below = words_of(b)[FIRST_HEAD + bin];
        do {
                i = below;
                below = chunk_at(b, i)->child[chunk_at(b, i)->child[1] != 0];
        } while (below != 0);
        return chunk_at(b, i)->size;
}

void bfc_read_stats(const struct bfc *b, struct bfc_stats *ret)
{
        uint64_t n_chunks = b->n_records - FIRST_RECORD - b->n_spare - b->n_regions;
        uint64_t n_blocks = b->n_allocs - b->n_frees + b->n_pending;

        *ret = (struct bfc_stats){
                .num_allocs = b->n_allocs,
                .num_frees = b->n_frees,
                .num_blocks = n_blocks,
                .bytes_in_use = to_bytes(b->n_used),
                .peak_bytes_in_use = to_bytes(b->peak_used),
                .bytes_requested = b->n_requested,
                .peak_bytes_requested = b->peak_requested,
                .bytes_reserved = to_bytes(b->reserved),
                .peak_bytes_reserved = to_bytes(b->peak_reserved),
                .largest_alloc_size = to_bytes(b->largest),
                .bytes_free = to_bytes(b->reserved - b->n_used - b->idle),
                .largest_free_block_bytes = to_bytes(largest_free(b)),
                .num_free_chunks = n_chunks - n_blocks - b->n_pieces - b->n_holes - b->n_retiring,
                .num_chunks = n_chunks,
                .metadata_bytes = map_bytes(b->n_records) +
                                  (b->regions == b->own_regions ? 0 : regions_bytes(b->n_regions_room)),
        };
}

void bfc_clear_peaks(struct bfc *b)
{
        b->peak_used = b->n_used;
        b->peak_requested = b->n_requested;
        b->peak_reserved = b->reserved;
}
