/* The cache against a plain model: a walk at random over two partitions of several regions
 * each, with a broker that puts its blocks anywhere and refuses.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * The model is a map of each region by granules: not held, held and free, or used. */
#include "client/cache.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/suite.h"

#define GRANULE      256u
#define N_PARTITIONS 2u
#define N_REGIONS    3u    /* of each */
#define N_GRANULES   4096u /* of a region */
#define REGION_BYTES (N_GRANULES * GRANULE)
#define SLAB_BYTES   (16 * KIB)
#define EXTENT_BYTES (16 * KIB)
#define IDLE_BYTES   (384 * KIB)
#define MAX_BLOCKS   600u
#define MAX_SLABS    1024u

struct held { /* a block of the broker's */
        bool is_held;
        unsigned partition, region;
        uint64_t offset, n_bytes;
        uint64_t idle_since; /* 0: in use */
};

static struct cache *cache;
static uint8_t map[N_PARTITIONS][N_REGIONS][N_GRANULES]; /* 0, 'f' or 'u' */
static char *memory[N_PARTITIONS][N_REGIONS];
static struct held held[MAX_SLABS]; /* by id % MAX_SLABS */
static uint64_t n_slots;            /* so many were ever used */
static uint64_t n_given, now;
static struct block blocks[MAX_BLOCKS]; /* ptr NULL: none */
static uint64_t n_refusals, n_wrong, n_shrunk;

static const struct cache_sizes sizes[N_PARTITIONS] = { { SLAB_BYTES, IDLE_BYTES, false },
                                                        { SLAB_BYTES, IDLE_BYTES, true } };

static void setup(void)
{
        ck_assert_int_eq(cache_new(sizes, N_PARTITIONS, &cache), 0);
        for (unsigned p = 0; p < N_PARTITIONS; p++)
                for (unsigned i = 0; i < N_REGIONS; i++)
                        ck_assert_ptr_nonnull(memory[p][i] = calloc(1, REGION_BYTES));
}

static void teardown(void)
{
        cache = cache_free(cache);
        for (unsigned p = 0; p < N_PARTITIONS; p++)
                for (unsigned i = 0; i < N_REGIONS; i++)
                        free(memory[p][i]);
}

FIXTURE(cache, setup, teardown);

static unsigned chance(unsigned n)
{
        static uint64_t state = 0x9e3779b97f4a7c15;

        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return (unsigned)((state >> 20) % n);
}

static void assert_sound(void)
{
        const char *why = "";

        ck_assert_msg(cache_check(cache, &why) == 0, "%s", why);
}

/* ---- the model ------------------------------------------------------------- */

static bool map_is(unsigned partition, unsigned region, uint64_t offset, uint64_t n_bytes, uint8_t what)
{
        for (uint64_t i = offset / GRANULE; i < (offset + n_bytes) / GRANULE; i++)
                if (map[partition][region][i] != what)
                        return false;
        return true;
}

static void map_set(unsigned partition, unsigned region, uint64_t offset, uint64_t n_bytes, uint8_t what)
{
        memset(map[partition][region] + offset / GRANULE, what, n_bytes / GRANULE);
}

static uint64_t longest_run(unsigned partition, uint8_t what)
{
        uint64_t longest = 0;

        for (unsigned r = 0; r < N_REGIONS; r++)
                for (unsigned i = 0, n = 0; i < N_GRANULES; i++) {
                        n = map[partition][r][i] == what ? n + 1 : 0;
                        longest = n > longest ? n : longest;
                }
        return longest * GRANULE;
}

/* Says of each of the broker's blocks since when nothing lies in it. */
static void note_idle(void)
{
        now++;
        for (uint64_t i = 0; i < n_slots; i++) {
                struct held *h = &held[i];

                if (!h->is_held || !map_is(h->partition, h->region, h->offset, h->n_bytes, 'f'))
                        h->idle_since = 0;
                else if (h->idle_since == 0)
                        h->idle_since = now;
        }
}

/* ---- the broker ------------------------------------------------------------ */

static uint64_t new_id(void)
{
        uint64_t slot = 0;

        while (held[slot].is_held)
                ck_assert_uint_lt(++slot, MAX_SLABS);
        n_slots = slot < n_slots ? n_slots : slot + 1;
        return ++n_given * MAX_SLABS + slot;
}

/* Somewhere in the partition, often right at the edge of a region. False: no room, or no
 * wish. */
static bool broker_give(unsigned partition, uint64_t n_bytes, struct cache_grant *ret)
{
        ck_assert_uint_eq(n_bytes % GRANULE, 0);
        if (chance(40) == 0 || n_bytes > REGION_BYTES)
                return false;
        for (int tries = 0; tries < 30; tries++) {
                unsigned region = chance(N_REGIONS);
                uint64_t last = (REGION_BYTES - n_bytes) / GRANULE, offset, id;

                offset = chance(6) == 0 ? last : chance((unsigned)last + 1);
                /* Next to what is held, where it can. */
                while (tries % 2 == 0 && offset > 0 && map[partition][region][offset - 1] == 0)
                        offset--;
                if (!map_is(partition, region, offset * GRANULE, n_bytes, 0))
                        continue;
                id = new_id();
                held[id % MAX_SLABS] = (struct held){ true, partition, region, offset * GRANULE, n_bytes, 0 };
                map_set(partition, region, offset * GRANULE, n_bytes, 'f');
                *ret = (struct cache_grant){ id,           100 + region,
                                             REGION_BYTES, offset * GRANULE,
                                             n_bytes,      memory[partition][region] + offset * GRANULE };
                return true;
        }
        return false;
}

/* At its original bounds, with nothing in it. */
static void broker_take(unsigned partition, uint64_t id)
{
        struct held *h = &held[id % MAX_SLABS];

        ck_assert(h->is_held);
        ck_assert_uint_eq(h->partition, partition);
        ck_assert(map_is(h->partition, h->region, h->offset, h->n_bytes, 'f'));
        map_set(h->partition, h->region, h->offset, h->n_bytes, 0);
        h->is_held = false;
}

static uint64_t give_back(unsigned partition, uint64_t want_bytes, size_t max)
{
        uint64_t ids[64], n_bytes, sum = 0, oldest = 0;
        size_t n = cache_take_idle(cache, partition, NULL, want_bytes, ids, max, &n_bytes);

        for (size_t i = 0; i < n; i++) {
                const struct held *h = &held[ids[i] % MAX_SLABS];

                ck_assert_uint_ge(h->idle_since, oldest);
                oldest = h->idle_since;
                ck_assert_uint_lt(sum, want_bytes); /* no more than is needed */
                sum += h->n_bytes;
                broker_take(partition, ids[i]);
        }
        ck_assert_uint_eq(sum, n_bytes);
        for (uint64_t i = 0; n < max && sum < want_bytes && i < n_slots; i++)
                ck_assert(!held[i].is_held || held[i].partition != partition || held[i].idle_since == 0);
        return n_bytes;
}

/* ---- the walk -------------------------------------------------------------- */

static void fill(const struct block *b)
{
        memset((void *)(uintptr_t)b->ptr, (int)(b->handle * 37 % 251), b->n_bytes);
}

static bool is_intact(const struct block *b)
{
        const uint8_t *bytes = b->ptr;

        for (uint64_t i = 0; i < b->n_bytes; i++)
                if (bytes[i] != b->handle * 37 % 251)
                        return false;
        return true;
}

static void take_block(unsigned partition, struct block *b)
{
        unsigned region = (unsigned)b->region_id - 100;
        const struct held *h = &held[b->block_id % MAX_SLABS];

        ck_assert_uint_eq(b->partition, partition);
        ck_assert(map_is(partition, region, b->offset, b->n_bytes, 'f'));
        ck_assert_ptr_eq(b->ptr, memory[partition][region] + b->offset);
        ck_assert(h->is_held);
        ck_assert_uint_eq(h->partition, partition);
        ck_assert_uint_eq(h->region, region);
        ck_assert_uint_eq(cache_offset(b), b->offset - h->offset);
        ck_assert_uint_lt(cache_offset(b), h->n_bytes);
        map_set(partition, region, b->offset, b->n_bytes, 'u');
        fill(b);
}

/* As a client does on a miss, and sometimes as after a refusal. False: the broker refused. */
static bool fetch(unsigned partition, uint64_t n_bytes, struct block *ret)
{
        uint64_t want = cache_want(cache, partition, n_bytes);
        struct cache_grant given;
        int r;

        ck_assert_uint_ge(want, n_bytes);
        if (chance(2) == 0 && cache_want_least(cache, partition, n_bytes) < n_bytes)
                want = cache_want_least(cache, partition, n_bytes);
        for (int i = 0; i < 2; i++) {
                if (!broker_give(partition, want, &given))
                        return false;
                ck_assert_int_eq(cache_add(cache, partition, &given), 0);
                r = cache_alloc(cache, partition, n_bytes, ret);
                if (r == 0)
                        return true;
                ck_assert_int_eq(r, CACHE_MISS);
                ck_assert(i == 0 && want < n_bytes);
                ck_assert_int_eq(cache_take_mismatched(cache, partition, given.block_id), 0);
                broker_take(partition, given.block_id);
                n_wrong++;
                want = cache_want(cache, partition, n_bytes);
        }
        return false;
}

static void get(struct block *ret)
{
        unsigned partition = chance(N_PARTITIONS);
        uint64_t n_bytes = 1 + chance(chance(8) == 0 ? 200 * KIB : chance(3) == 0 ? 20 * KIB : 600);
        uint64_t n_block = (n_bytes + GRANULE - 1) / GRANULE * GRANULE;
        int r = cache_alloc(cache, partition, n_bytes, ret);

        if (r == CACHE_MISS) {
                ck_assert_uint_lt(longest_run(partition, 'f'), n_block);
                if (!fetch(partition, n_bytes, ret)) {
                        n_refusals++;
                        give_back(partition, UINT64_MAX, 64);
                        ret->ptr = NULL;
                        return;
                }
        } else {
                ck_assert_int_eq(r, 0);
        }
        ck_assert_uint_eq(ret->n_bytes, n_block);
        take_block(partition, ret);
}

static void put(struct block *b)
{
        unsigned partition = b->partition;
        uint64_t n_excess;

        ck_assert(is_intact(b));
        cache_dealloc(b);
        map_set(partition, (unsigned)b->region_id - 100, b->offset, b->n_bytes, 'f');
        b->ptr = NULL;
        note_idle();
        n_excess = cache_excess(cache, partition);
        if (n_excess > 0)
                give_back(partition, n_excess, 64);
        ck_assert_uint_eq(cache_excess(cache, partition == 0), 0); /* the other's is its own */
}

static bool model_lies_in(unsigned region, uint64_t offset, uint64_t n_bytes)
{
        for (unsigned p = 0; p < N_PARTITIONS; p++)
                for (uint64_t i = offset / GRANULE; i < (offset + n_bytes + GRANULE - 1) / GRANULE; i++)
                        if (map[p][region][i] != 0)
                                return true;
        return false;
}

static void look(void)
{
        unsigned region = chance(N_REGIONS);
        uint64_t offset = chance(N_GRANULES) * GRANULE, n_bytes = (1 + chance(64)) * GRANULE;

        if (offset + n_bytes > REGION_BYTES)
                n_bytes = REGION_BYTES - offset;
        ck_assert_int_eq(cache_lies_in(cache, 100 + region, offset, n_bytes),
                         model_lies_in(region, offset, n_bytes));
        ck_assert(!cache_lies_in(cache, 99, offset, n_bytes));
}

/* The broker's extents, of EXTENT_BYTES each. */
static bool broker_extent(void *userdata, uint64_t region_id, uint64_t offset, uint64_t *ret_begin,
                          uint64_t *ret_end)
{
        (void)userdata;
        (void)region_id;
        *ret_begin = offset / EXTENT_BYTES * EXTENT_BYTES;
        *ret_end = *ret_begin + EXTENT_BYTES;
        return true;
}

static uint64_t broker_split(uint64_t id, uint64_t n_bytes)
{
        struct held *low = &held[id % MAX_SLABS], high = *low;
        uint64_t id_high = new_id();

        ck_assert(low->is_held && n_bytes > 0 && n_bytes < low->n_bytes);
        high.offset += n_bytes;
        high.n_bytes -= n_bytes;
        low->n_bytes = n_bytes;
        held[id_high % MAX_SLABS] = high;
        return id_high;
}

/* Extents in which nothing is used and something is held. */
static unsigned count_free_extents(unsigned partition)
{
        unsigned n = 0;

        for (unsigned r = 0; r < N_REGIONS; r++)
                for (uint64_t at = 0; at < REGION_BYTES; at += EXTENT_BYTES)
                        n += !memchr(map[partition][r] + at / GRANULE, 'u', EXTENT_BYTES / GRANULE) &&
                             memchr(map[partition][r] + at / GRANULE, 'f', EXTENT_BYTES / GRANULE);
        return n;
}

/* Now and then the broker refuses, or a thread takes a block meanwhile. What no extent in use has is all that
 * stays, if neither happened. */
static void shrink(void)
{
        unsigned partition = chance(N_PARTITIONS);
        bool is_disturbed = chance(3) == 0;
        struct cache_place places[256];
        size_t n = cache_find_splits(cache, partition, NULL, broker_extent, NULL, UINT64_MAX, places, 256);

        for (size_t i = 0; i < n; i++) {
                uint64_t id, n_bytes;
                struct block *b = &blocks[chance(MAX_BLOCKS)];
                int r = cache_split_begin(cache, partition, &places[i], &id, &n_bytes);

                ck_assert(r == 0 || (r == -ENOENT && is_disturbed));
                if (is_disturbed && !b->ptr)
                        get(b);
                if (r == 0 && (!is_disturbed || chance(4) > 0))
                        cache_split_commit(cache, partition, &places[i], broker_split(id, n_bytes));
        }
        cache_split_end(cache, partition);
        note_idle();
        assert_sound();
        while (give_back(partition, UINT64_MAX, 64) > 0)
                ;
        if (is_disturbed || n + 2 > 256)
                return;
        ck_assert_uint_eq(count_free_extents(partition), 0);
        n_shrunk += n;
}

TEST(random_walk_against_invariants)
{
        for (int i = 0; i < 60000; i++) {
                struct block *b = &blocks[chance(i / 5000 % 2 ? 40 : MAX_BLOCKS)];

                if (b->ptr)
                        put(b);
                else
                        get(b);
                note_idle();
                look();
                if (chance(200) == 0)
                        give_back(chance(N_PARTITIONS), chance(100 * KIB), 1 + chance(64));
                if (chance(400) == 0)
                        shrink();
                if (i % 50 == 0)
                        assert_sound();
        }
        ck_assert_uint_gt(n_refusals, 100);
        ck_assert_uint_gt(n_wrong, 10);
        ck_assert_uint_gt(n_shrunk, 100);
        for (unsigned i = 0; i < MAX_BLOCKS; i++)
                if (blocks[i].ptr)
                        put(&blocks[i]);
        for (unsigned p = 0; p < N_PARTITIONS; p++)
                while (give_back(p, UINT64_MAX, 64) > 0)
                        ;
        for (unsigned i = 0; i < MAX_SLABS; i++)
                ck_assert(!held[i].is_held);
        assert_sound();
}

/* ---- single cases ----------------------------------------------------------- */

static struct cache_grant at(uint64_t id, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        return (struct cache_grant){ id,     region_id, REGION_BYTES,
                                     offset, n_bytes,   memory[0][region_id - 100] + offset };
}

static int add(uint64_t id, uint64_t region_id, uint64_t offset, uint64_t n_bytes)
{
        struct cache_grant given = at(id, region_id, offset, n_bytes);

        return cache_add(cache, 0, &given);
}

TEST(neighbours_merge)
{
        uint64_t ids[3], n_bytes;
        struct block b, c;

        ck_assert_int_eq(add(1, 100, 0, 1024), 0);
        ck_assert_int_eq(add(2, 100, 2048, 1024), 0);
        ck_assert_int_eq(cache_alloc(cache, 0, 1025, &b), CACHE_MISS);
        ck_assert_int_eq(add(3, 100, 1024, 1024), 0);
        ck_assert_int_eq(cache_alloc(cache, 0, 3000, &b), 0);
        ck_assert_uint_eq(b.block_id, 1);
        ck_assert_uint_eq(cache_take_idle(cache, 0, NULL, UINT64_MAX, ids, 3, &n_bytes), 0);
        assert_sound();
        cache_dealloc(&b);
        ck_assert_int_eq(cache_alloc(cache, 0, 1000, &c), 0); /* in the first of them */
        ck_assert_uint_eq(cache_take_idle(cache, 0, NULL, UINT64_MAX, ids, 3, &n_bytes), 2);
        ck_assert_uint_eq(n_bytes, 2048);
        assert_sound();
        cache_dealloc(&c);
        ck_assert_uint_eq(cache_take_idle(cache, 0, NULL, UINT64_MAX, ids, 3, &n_bytes), 1);
        ck_assert_uint_eq(ids[0], 1);
}

TEST(invalid_requests)
{
        struct cache_grant odd_place = at(9, 100, 4096, 1024);
        struct cache_grant large = at(9, 101, 0, 1024);
        struct block b;

        ck_assert_int_eq(add(1, 100, 1024, 1024), 0);
        ck_assert_int_eq(add(2, 100, 1024, 1024), -EEXIST);
        ck_assert_int_eq(add(2, 100, 0, 2048), -EEXIST);
        ck_assert_int_eq(add(2, 100, 1792, 256), -EEXIST);
        ck_assert_int_eq(add(2, 100, 100, 1024), -EINVAL);
        ck_assert_int_eq(add(2, 100, 0, 1000), -EINVAL);
        ck_assert_int_eq(add(2, 100, 0, 0), -EINVAL);
        ck_assert_int_eq(add(2, 100, REGION_BYTES, 256), -EINVAL);
        ck_assert_int_eq(add(2, 100, REGION_BYTES - 256, 512), -EINVAL);
        ck_assert_int_eq(add(2, 100, 256, UINT64_MAX - 255), -EINVAL);
        odd_place.ptr = memory[0][0];
        ck_assert_int_eq(cache_add(cache, 0, &odd_place), -EINVAL);
        large.region_bytes = UINT64_C(1) << 40;
        ck_assert_int_eq(cache_add(cache, 0, &large), -ENOSPC);
        assert_sound();
        ck_assert_int_eq(add(2, 100, REGION_BYTES - 256, 256), 0); /* the edge is fine */
        ck_assert_int_eq(add(3, 101, REGION_BYTES - 256, 256), 0);
        ck_assert_int_eq(cache_alloc(cache, 0, UINT64_MAX, &b), CACHE_MISS);
        ck_assert_int_eq(cache_alloc(cache, 1, 1, &b), CACHE_MISS);
        ck_assert_uint_eq(cache_want(cache, 0, UINT64_MAX), UINT64_MAX);
        assert_sound();
}

TEST(requested_bytes_are_counted)
{
        struct block b;

        ck_assert_uint_eq(cache_want(cache, 0, 1), SLAB_BYTES);
        ck_assert_uint_eq(cache_want(cache, 0, 4096 * KIB), 4096 * KIB);
        ck_assert_uint_eq(cache_want(cache, 1, 4096 * KIB - 1), 4096 * KIB);
        ck_assert_uint_eq(cache_want(cache, 1, 4096 * KIB + 1), 4096 * KIB + 256);
        ck_assert_uint_eq(cache_want(cache, 0, SLAB_BYTES / 2), SLAB_BYTES);
        ck_assert_uint_eq(cache_want(cache, 0, SLAB_BYTES / 2 + 1), SLAB_BYTES / 2 + 256);
        ck_assert_uint_eq(cache_want(cache, 0, 100 * KIB + 1), 100 * KIB + 256);
        /* After a refusal only what is missing. */
        ck_assert_int_eq(add(1, 100, 0, 64 * KIB), 0);
        ck_assert_uint_eq(cache_want(cache, 0, 100 * KIB), 100 * KIB);
        ck_assert_uint_eq(cache_want_least(cache, 0, 100 * KIB), 36 * KIB);
        ck_assert_uint_eq(cache_want_least(cache, 0, 65 * KIB), 1 * KIB);
        ck_assert_uint_eq(cache_want_least(cache, 1, 100 * KIB), 100 * KIB);
        ck_assert_int_eq(add(2, 100, 128 * KIB, 36 * KIB), 0);
        ck_assert_int_eq(cache_alloc(cache, 0, 100 * KIB, &b), CACHE_MISS);
        ck_assert_int_eq(cache_take_mismatched(cache, 0, 2), 0);
        ck_assert_int_eq(cache_take_mismatched(cache, 0, 2), -ENOMEM); /* there is none */
        assert_sound();
}

/* A block that is all of its slab leaves with it, from between its neighbours; others stay. */
TEST(whole_slabs_leave)
{
        uint64_t ids[4], n_bytes;
        struct block b[4];

        for (uint64_t i = 0; i < 3; i++)
                ck_assert_int_eq(add(1 + i, 100, i * 4096, 4096), 0);
        for (int i = 0; i < 2; i++)
                ck_assert_int_eq(cache_alloc(cache, 0, 4096, &b[i]), 0);
        ck_assert_int_eq(cache_alloc(cache, 0, 256, &b[2]), 0);
        ck_assert_int_eq(cache_take_whole(&b[2]), -EINVAL);
        cache_dealloc(&b[2]);
        cache_dealloc(&b[0]);
        ck_assert_int_eq(cache_take_whole(&b[1]), 0); /* free space on both sides */
        assert_sound();
        ck_assert_int_eq(cache_alloc(cache, 0, 8192, &b[3]), CACHE_MISS); /* a gap between them */
        ck_assert(!cache_lies_in(cache, 100, b[1].offset, 4096));
        ck_assert_int_eq(add(9, 100, b[1].offset, 4096), 0); /* as if it had come back */
        ck_assert_int_eq(cache_alloc(cache, 0, 8192, &b[3]), 0);
        ck_assert_int_eq(cache_take_whole(&b[3]), -EINVAL); /* over two slabs */
        cache_dealloc(&b[3]);
        assert_sound();
        ck_assert_uint_eq(cache_take_idle(cache, 0, NULL, UINT64_MAX, ids, 4, &n_bytes), 3);
        assert_sound();
}

/* Of a range also those that lie across its bounds: without them what is inside is not free. */
TEST(slabs_across_range_bounds)
{
        uint64_t ids[8], n_bytes;
        struct block b;

        for (uint64_t i = 0; i < 6; i++)
                ck_assert_int_eq(add(1 + i, 100, i * 4096, 4096), 0);
        ck_assert_uint_eq(cache_take_idle(cache, 0, &(struct cache_range){ 100, 6144, 8192 }, UINT64_MAX, ids,
                                          8, &n_bytes),
                          3);
        ck_assert_uint_eq(n_bytes, 3 * 4096);
        for (uint64_t i = 0; i < 3; i++)
                ck_assert_uint_eq(ids[i], 2 + i);
        assert_sound();
        /* Not those that only touch it, nor used ones. */
        ck_assert_uint_eq(cache_take_idle(cache, 0, &(struct cache_range){ 100, 4096, 12288 }, UINT64_MAX,
                                          ids, 8, &n_bytes),
                          0);
        ck_assert_int_eq(cache_alloc(cache, 0, 8192, &b), 0);
        ck_assert_uint_eq(cache_take_idle(cache, 0, &(struct cache_range){ 100, 1, UINT64_MAX / 2 },
                                          UINT64_MAX, ids, 8, &n_bytes),
                          1);
        ck_assert_uint_eq(ids[0], 1);
        cache_dealloc(&b);
        assert_sound();
        ck_assert_uint_eq(
                cache_take_idle(cache, 0, &(struct cache_range){ 100, 0, 24576 }, 4097, ids, 8, &n_bytes), 2);
}

/* The peak in use counts from when the pool last had no slab, with the request that missed. */
TEST(surplus_over_the_peak)
{
        const uint64_t mib = UINT64_C(1) << 20, gib = UINT64_C(1) << 30;
        struct cache_grant given = { 1, 100, 16 * gib, 0, 4 * gib, memory[0][0] };
        struct block b;
        uint64_t id, n_bytes;

        ck_assert_int_eq(cache_add(cache, 0, &given), 0);
        ck_assert(!cache_has_surplus(cache, 0, mib, gib)); /* its slabs cannot be split */
        ck_assert_int_eq(cache_add(cache, 1, &given), 0);
        ck_assert(cache_has_surplus(cache, 1, mib, gib));
        ck_assert_int_eq(cache_alloc(cache, 1, 4 * gib, &b), 0);
        ck_assert(!cache_has_surplus(cache, 1, mib, mib));
        cache_dealloc(&b);
        ck_assert(!cache_has_surplus(cache, 1, mib, gib / 8)); /* a 32nd of the peak */
        ck_assert(cache_has_surplus(cache, 1, mib, gib / 8 + GRANULE));
        ck_assert(!cache_has_surplus(cache, 1, 5 * gib, gib + gib / 8));
        ck_assert(!cache_has_surplus(cache, 1, UINT64_MAX, mib));
        ck_assert(!cache_has_surplus(cache, 1, mib, UINT64_MAX));
        ck_assert_uint_eq(cache_take_idle(cache, 1, NULL, 1, &id, 1, &n_bytes), 1);
        ck_assert(!cache_has_surplus(cache, 1, mib, 33 * mib));
        ck_assert(cache_has_surplus(cache, 1, mib, 33 * mib + GRANULE));
}

/* Regions come and go by the thousand; their places are used again. */
TEST(regions_come_and_go)
{
        uint64_t ids[4], n_bytes;

        for (uint64_t i = 1; i < 5000; i++) {
                struct cache_grant given = { i,    i,    (UINT64_C(1) << 37) * (1 + i % 2),
                                             4096, 4096, memory[0][0] + 4096 };

                ck_assert_int_eq(cache_add(cache, 0, &given), 0);
                if (i >= 4)
                        ck_assert_uint_eq(cache_take_idle(cache, 0, NULL, 1, ids, 4, &n_bytes), 1);
        }
        assert_sound();
}
