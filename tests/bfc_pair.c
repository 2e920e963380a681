/* See bfc_pair.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/bfc_pair.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void pair_init(struct pair *p, uint64_t extent_bytes)
{
        *p = (struct pair){ .b = NULL };
        if (bfc_new(extent_bytes, &p->b) < 0)
                abort();
        oracle_init(&p->o, extent_bytes);
}

void pair_done(struct pair *p)
{
        p->b = bfc_destroy(p->b);
        oracle_done(&p->o);
        free(p->live);
        p->live = NULL;
}

/* Every extent is where the oracle has it, by offset and by number. */
static const char *compare_extents(const struct pair *p, uint64_t base, uint64_t n_bytes)
{
        size_t number = 0;

        for (size_t i = 0; i < p->o.n_extents; i++) {
                struct bfc_range e = p->o.extents[i].range, begin, end, mine;
                size_t at_begin, at_end;

                if (e.begin < base || e.begin >= base + n_bytes)
                        continue;
                begin = bfc_extent_at(p->b, e.begin, &at_begin);
                end = bfc_extent_at(p->b, e.end - BFC_GRANULE, &at_end);
                mine = bfc_extent_numbered(p->b, base, number);
                if (begin.begin != e.begin || begin.end != e.end || end.begin != e.begin ||
                    end.end != e.end || mine.begin != e.begin || mine.end != e.end)
                        return "an extent differs";
                if (at_begin != number || at_end != number)
                        return "the number of an extent differs";
                number++;
        }
        return NULL;
}

const char *pair_add_zoned_region(struct pair *p, uint64_t base, uint64_t n_bytes,
                                  const struct bfc_zones *zones, bool backed)
{
        int r = oracle_add_zoned_region(&p->o, base, n_bytes, zones, backed);

        if (bfc_add_zoned_region(p->b, base, n_bytes, zones, backed) != r)
                return "adding a region differs";
        if (r != 0)
                return NULL;
        if (p->n_regions < PAIR_N_REGIONS)
                p->regions[p->n_regions++] = (struct pair_region){ base, n_bytes, *zones, false };
        return compare_extents(p, base, n_bytes);
}

const char *pair_add_region(struct pair *p, uint64_t base, uint64_t n_bytes, uint64_t first, bool backed)
{
        struct bfc_zones none = { first < n_bytes ? first : n_bytes, p->o.extent_bytes, 0 };

        return pair_add_zoned_region(p, base, n_bytes, &none, backed);
}

/* ---- the operations ------------------------------------------------------------ */

static void keep_live(struct pair *p, struct pair_block block)
{
        if (p->n_live == p->n_live_room) {
                p->n_live_room = p->n_live_room * 2 + 64;
                p->live = realloc(p->live, p->n_live_room * sizeof(*p->live));
                if (!p->live)
                        abort();
        }
        p->live[p->n_live++] = block;
}

static const char *step_alloc(struct pair *p, uint64_t n_bytes, bool in_extent)
{
        uint64_t mine = 1, theirs = 1;
        struct pair_block block = { 0, p->last_id + 1 };
        int r = in_extent ? oracle_alloc_in_extent(&p->o, n_bytes, block.id, &theirs)
                          : oracle_alloc(&p->o, n_bytes, block.id, &theirs);

        if ((in_extent ? bfc_alloc_in_extent(p->b, n_bytes, &block.handle, &mine)
                       : bfc_alloc(p->b, n_bytes, &block.handle, &mine)) != r)
                return "an allocation's result differs";
        if (mine != theirs)
                return "an allocation's offset differs";
        if (r != 0)
                return NULL;
        p->last_id++;
        p->n_ok[in_extent ? PAIR_ALLOC_IN_EXTENT : PAIR_ALLOC]++;
        keep_live(p, block);
        return NULL;
}

static const char *step_free(struct pair *p, uint64_t value)
{
        struct pair_block block;
        size_t i;

        if (p->n_live == 0)
                return NULL;
        i = value % p->n_live;
        block = p->live[i];
        p->live[i] = p->live[--p->n_live];
        if (oracle_dealloc(&p->o, block.id) != 0 || bfc_dealloc(p->b, block.handle) != 0)
                return "a live block cannot be freed";
        p->stale[p->n_stale++ % PAIR_N_STALE] = block.handle;
        p->n_ok[PAIR_FREE]++;
        return NULL;
}

/* Also at places where it cannot be. */
static const char *step_split(struct pair *p, uint64_t value)
{
        struct pair_block *block, high = { 0, p->last_id + 1 };
        struct bfc_info info;
        uint64_t at;
        int r;

        if (p->n_live == 0)
                return NULL;
        block = &p->live[(value & 0xffff) % p->n_live];
        if (bfc_info(p->b, block->handle, &info) != 0)
                return "a live block is not known";
        at = (value >> 16) * BFC_GRANULE % (info.n_bytes + BFC_GRANULE) + (value & 7) / 7;
        r = oracle_split(&p->o, block->id, at, high.id);
        if (bfc_split(p->b, block->handle, at, &high.handle) != r)
                return "a split's result differs";
        if (r != 0)
                return NULL;
        if (bfc_info(p->b, block->handle, &info) != 0 || info.n_bytes != at || info.n_requested != at)
                return "the low part of a split block is wrong";
        p->last_id++;
        p->n_ok[PAIR_SPLIT]++;
        keep_live(p, high);
        return NULL;
}

static bool same_plan(const struct bfc_growth *a, const struct bfc_growth *b)
{
        return a->offset == b->offset && a->n_bytes == b->n_bytes && a->n_requested == b->n_requested &&
               a->new_bytes == b->new_bytes && a->span.begin == b->span.begin && a->span.end == b->span.end &&
               a->in_extent == b->in_extent;
}

static const char *step_grow(struct pair *p, uint64_t n_bytes, bool in_extent)
{
        struct bfc_growth mine = { 0 }, theirs = { 0 }, wrong;
        struct pair_block block = { 0, p->last_id + 1 };
        uint64_t budget = n_bytes + 2 * p->o.extent_bytes;
        int r = in_extent ? oracle_plan_growth_in_extent(&p->o, n_bytes, budget, &theirs)
                          : oracle_plan_growth(&p->o, n_bytes, budget, &theirs);

        if ((in_extent ? bfc_plan_growth_in_extent(p->b, n_bytes, budget, &mine)
                       : bfc_plan_growth(p->b, n_bytes, budget, &mine)) != r)
                return "a growth plan's result differs";
        if (!same_plan(&mine, &theirs))
                return "a growth plan differs";
        if ((r != 0 && r != BFC_OVER_BUDGET) || p->n_pending == PAIR_MAX_RANGES)
                return NULL;
        wrong = mine;
        wrong.offset += BFC_GRANULE;
        if (bfc_grow_begin(p->b, &wrong, &block.handle) != -EINVAL)
                return "a wrong plan was accepted";
        if (bfc_grow_begin(p->b, &mine, &block.handle) != 0)
                return "a fresh plan was refused";
        oracle_grow_begin(&p->o, &theirs, block.id);
        p->last_id++;
        p->pending[p->n_pending++] = block;
        p->n_ok[in_extent ? PAIR_GROW_IN_EXTENT : PAIR_GROW]++;
        if (bfc_dealloc(p->b, block.handle) != -EINVAL)
                return "a pending block was freed";
        if (bfc_split(p->b, block.handle, BFC_GRANULE, &block.handle) != -EINVAL)
                return "a pending block was split";
        return NULL;
}

static const char *step_pending(struct pair *p, uint64_t value, bool commit)
{
        struct pair_block block;
        size_t i;

        if (p->n_pending == 0)
                return NULL;
        i = value % p->n_pending;
        block = p->pending[i];
        p->pending[i] = p->pending[--p->n_pending];
        if ((commit ? bfc_grow_commit(p->b, block.handle) : bfc_grow_cancel(p->b, block.handle)) != 0)
                return "a pending block was refused";
        if (commit) {
                oracle_grow_commit(&p->o, block.id);
                keep_live(p, block);
        } else {
                oracle_grow_cancel(&p->o, block.id);
                p->stale[p->n_stale++ % PAIR_N_STALE] = block.handle;
        }
        if (bfc_grow_commit(p->b, block.handle) != -EINVAL || bfc_grow_cancel(p->b, block.handle) != -EINVAL)
                return "a block was pending twice";
        p->n_ok[commit ? PAIR_COMMIT : PAIR_CANCEL]++;
        return NULL;
}

/* ---- release -------------------------------------------------------------------------- */

static bool disjoint(struct bfc_range a, struct bfc_range b)
{
        return a.end <= b.begin || b.end <= a.begin;
}

/* The whole free extents outside `span`, summed up. */
static uint64_t releasable(const struct oracle *o, struct bfc_range span)
{
        uint64_t sum = 0;

        for (size_t i = 0; i < o->n_extents; i++)
                if (disjoint(o->extents[i].range, span) && oracle_is_free(o, o->extents[i].range))
                        sum += o->extents[i].range.end - o->extents[i].range.begin;
        return sum;
}

static const struct extent *extent_at(const struct oracle *o, uint64_t offset)
{
        for (size_t i = 0; i < o->n_extents; i++)
                if (o->extents[i].range.begin <= offset && offset < o->extents[i].range.end)
                        return &o->extents[i];
        return NULL;
}

/* Whether what was planned is what bfc.h says about it. */
static const char *judge_release(const struct pair *p, const struct bfc_range *ranges, size_t n,
                                 uint64_t want, uint64_t sum, struct bfc_range span)
{
        uint64_t n_bytes = 0, all = releasable(&p->o, span), smallest = UINT64_MAX, regular = 0, other = 0;

        for (size_t i = 0; i < n; i++) {
                if (!oracle_is_whole(&p->o, ranges[i]) || !oracle_is_free(&p->o, ranges[i]))
                        return "a range to release is not made of whole free extents";
                if (!disjoint(ranges[i], span))
                        return "a range to release is to be kept";
                if (i > 0 && ranges[i].end > ranges[i - 1].begin)
                        return "ranges to release do not fall";
                n_bytes += ranges[i].end - ranges[i].begin;
                for (uint64_t at = ranges[i].begin; at < ranges[i].end;) {
                        const struct extent *e = extent_at(&p->o, at);
                        uint64_t size = e->range.end - e->range.begin;

                        smallest = size < smallest ? size : smallest;
                        regular += size == p->o.extent_bytes;
                        other += size != p->o.extent_bytes;
                        at = e->range.end;
                }
        }
        if (n_bytes != sum)
                return "ranges to release do not add up";
        if (n_bytes < (want < all ? want : all))
                return "not enough to release was found";
        if (want <= all && n > 0 && n_bytes - smallest >= want)
                return "more than needed is to be released";
        /* Of extents of the usual size the highest ones; where another is needed too, what its size
         * makes superfluous is given up at either end of a range. */
        for (size_t i = p->o.n_extents; other == 0 && want <= all && i-- > 0 && regular > 0;) {
                const struct bfc_range e = p->o.extents[i].range;
                bool chosen = false;

                if (e.end - e.begin != p->o.extent_bytes || !disjoint(e, span) || !oracle_is_free(&p->o, e))
                        continue;
                for (size_t k = 0; k < n; k++)
                        chosen = chosen || !disjoint(ranges[k], e);
                if (!chosen)
                        return "a lower extent is to be released before a higher one";
                regular--;
        }
        return NULL;
}

static const char *step_release(struct pair *p, uint64_t value)
{
        struct bfc_range ranges[PAIR_MAX_RANGES];
        struct bfc_growth keep = { .offset = 0 };
        uint64_t sum = 1, want = (value & 0x1ff) * BFC_GRANULE;
        bool kept = oracle_plan_growth(&p->o, (value >> 16 & 0xff) * BFC_GRANULE, UINT64_MAX, &keep) == 0;
        size_t n = bfc_plan_release(p->b, want, kept ? &keep : NULL, ranges, PAIR_MAX_RANGES, &sum);
        const char *why = judge_release(p, ranges, n, want, sum, keep.span);

        for (size_t i = 0; !why && i < n && p->n_retiring < PAIR_MAX_RANGES; i++) {
                if (oracle_release_begin(&p->o, ranges[i]) != 0 || bfc_release_begin(p->b, ranges[i]) != 0)
                        return "a planned range was refused";
                p->retiring[p->n_retiring++] = ranges[i];
                p->n_ok[PAIR_RELEASE]++;
        }
        return why;
}

/* Some run of extents, which may or may not be one region's. */
static struct bfc_range some_extents(const struct pair *p, uint64_t value)
{
        size_t first = value % p->o.n_extents, last = first + (value >> 16) % 4;

        last = last < p->o.n_extents ? last : p->o.n_extents - 1;
        return (struct bfc_range){ p->o.extents[first].range.begin, p->o.extents[last].range.end };
}

static const char *step_release_any(struct pair *p, uint64_t value)
{
        struct bfc_range range = some_extents(p, value);
        int r;

        if (p->n_retiring == PAIR_MAX_RANGES)
                return NULL;
        if (value >> 32 & 1)
                range.begin += BFC_GRANULE;
        r = oracle_release_begin(&p->o, range);
        if (bfc_release_begin(p->b, range) != r)
                return "the begin of a release differs";
        if (r == 0) {
                p->retiring[p->n_retiring++] = range;
                p->n_ok[PAIR_RELEASE_ANY]++;
        }
        return NULL;
}

static const char *step_retired(struct pair *p, uint64_t value)
{
        struct bfc_range range;
        size_t i;

        if (p->n_retiring == 0)
                return bfc_release_commit(p->b, some_extents(p, value)) == -EINVAL ? NULL
                                                                                   : "nothing was retiring";
        i = value % p->n_retiring;
        range = p->retiring[i];
        p->retiring[i] = p->retiring[--p->n_retiring];
        if (oracle_release_commit(&p->o, range) != 0 || bfc_release_commit(p->b, range) != 0)
                return "a retiring range was refused";
        p->n_ok[PAIR_RETIRED]++;
        return NULL;
}

static const char *step_back(struct pair *p, uint64_t value)
{
        struct bfc_range range = some_extents(p, value);
        int r;

        if (value >> 32 & 1)
                range.end -= BFC_GRANULE;
        r = oracle_back(&p->o, range);
        p->n_ok[PAIR_BACK] += r == 0;
        return bfc_back(p->b, range) == r ? NULL : "backing differs";
}

static const char *step_stale(struct pair *p, uint64_t value)
{
        bfc_handle h = value;

        /* A number from outside must not name a block by chance. */
        for (size_t i = 0; i < p->n_live; i++)
                if (p->live[i].handle == h)
                        return NULL;
        for (size_t i = 0; i < p->n_pending; i++)
                if (p->pending[i].handle == h)
                        return NULL;
        if (bfc_dealloc(p->b, h) != -EINVAL || bfc_split(p->b, h, BFC_GRANULE, &h) != -EINVAL)
                return "a foreign handle was accepted";
        if (p->n_stale > 0) {
                h = p->stale[value % (p->n_stale < PAIR_N_STALE ? p->n_stale : PAIR_N_STALE)];
                if (bfc_dealloc(p->b, h) != -EINVAL || bfc_grow_cancel(p->b, h) != -EINVAL)
                        return "a stale handle was accepted";
        }
        p->n_ok[PAIR_STALE]++;
        return NULL;
}

static const char *step_region(struct pair *p, uint64_t value)
{
        struct pair_region *region = &p->regions[value % p->n_regions];
        int r;

        if (bfc_remove_region(p->b, region->base + BFC_GRANULE) !=
            oracle_remove_region(&p->o, region->base + BFC_GRANULE))
                return "a region was removed that is none";
        if (region->away) {
                bool backed = (value >> 16 & 1) != 0;

                r = oracle_add_zoned_region(&p->o, region->base, region->n_bytes, &region->zones, backed);
                if (bfc_add_zoned_region(p->b, region->base, region->n_bytes, &region->zones, backed) != r)
                        return "adding a region again differs";
                region->away = r != 0;
                return NULL;
        }
        if (p->o.n_regions == 1)
                return NULL; /* others expect an extent */
        r = oracle_remove_region(&p->o, region->base);
        if (bfc_remove_region(p->b, region->base) != r)
                return "removing a region differs";
        region->away = r == 0;
        p->n_ok[PAIR_REGION] += r == 0;
        return NULL;
}

const char *pair_step(struct pair *p, enum pair_op op, uint64_t value)
{
        switch (op) {
        case PAIR_ALLOC:
        case PAIR_ALLOC_IN_EXTENT:
                return step_alloc(p, value, op == PAIR_ALLOC_IN_EXTENT);
        case PAIR_FREE:
                return step_free(p, value);
        case PAIR_GROW:
        case PAIR_GROW_IN_EXTENT:
                return step_grow(p, value, op == PAIR_GROW_IN_EXTENT);
        case PAIR_COMMIT:
        case PAIR_CANCEL:
                return step_pending(p, value, op == PAIR_COMMIT);
        case PAIR_RELEASE:
                return step_release(p, value);
        case PAIR_RELEASE_ANY:
                return step_release_any(p, value);
        case PAIR_RETIRED:
                return step_retired(p, value);
        case PAIR_BACK:
                return step_back(p, value);
        case PAIR_STALE:
                return step_stale(p, value);
        case PAIR_REGION:
                return step_region(p, value);
        case PAIR_SPLIT:
                return step_split(p, value);
        case PAIR_CLEAR_PEAKS:
                bfc_clear_peaks(p->b);
                oracle_clear_peaks(&p->o);
                p->n_ok[op]++;
                return NULL;
        case PAIR_N_OPS:
                break;
        }
        return "no such operation";
}

/* ---- comparing --------------------------------------------------------------------------- */

struct compared {
        const struct oracle *o;
        size_t at;
};

/* Every chunk is a segment. */
static int compare_chunk(void *userdata, char kind, struct bfc_range range)
{
        struct compared *c = userdata;
        const struct segment *s = &c->o->segments[c->at++];

        return c->at > c->o->n_segments || s->kind != kind || s->range.begin != range.begin ||
               s->range.end != range.end;
}

const char *pair_compare(const struct pair *p)
{
        struct compared c = { &p->o, 0 };
        struct bfc_stats mine, theirs;
        const char *why = "";

        if (bfc_check(p->b, &why) != 0)
                return why;
        if (bfc_walk(p->b, compare_chunk, &c) != 0 || c.at != p->o.n_segments)
                return "chunks differ";
        bfc_read_stats(p->b, &mine);
        oracle_read_stats(&p->o, &theirs);
        if (mine.num_chunks != p->o.n_segments || mine.metadata_bytes < mine.num_chunks * 32)
                return "chunks are counted wrongly";
        mine.num_chunks = theirs.num_chunks;
        mine.metadata_bytes = theirs.metadata_bytes;
        if (memcmp(&mine, &theirs, sizeof(mine)) != 0)
                return "statistics differ";
        for (size_t i = 0; i < p->n_live; i += 1 + p->n_live / 8) {
                struct bfc_info info;

                if (bfc_info(p->b, p->live[i].handle, &info) != 0 || info.pending)
                        return "a live block is not known";
        }
        return NULL;
}
