/* The client's table of blocks against a plain model.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "client/blocks.h"

#include <errno.h>
#include <stdbool.h>

#include "tests/suite.h"

#define N_PLACES 3000

TEST(table_against_a_model)
{
        static bool in[N_PLACES];
        struct blocks b = { 0 };
        struct block got;
        unsigned seed = 3;
        size_t n_in = 0;

        ck_assert_ptr_null(blocks_find(&b, (void *)256));
        ck_assert_int_eq(blocks_take(&b, (void *)256, &got), -ENOENT);
        for (int i = 0; i < 60000; i++) {
                seed = seed * 1103515245u + 12345u;
                size_t at = (seed >> 8) % N_PLACES;
                const void *ptr = (const void *)(uintptr_t)(0x7f0000000000u + at * 256 * (1 + at % 3 * 1024));
                struct block block = { .ptr = ptr, .block_id = at };

                if (blocks_find(&b, ptr) == NULL) {
                        ck_assert(!in[at]);
                        ck_assert_int_eq(blocks_add(&b, &block), 0);
                        ck_assert_int_eq(blocks_add(&b, &block), -EEXIST);
                        n_in++;
                } else {
                        ck_assert(in[at]);
                        ck_assert_int_eq(blocks_take(&b, ptr, &got), 0);
                        ck_assert_uint_eq(got.block_id, at);
                        ck_assert_int_eq(blocks_take(&b, ptr, &got), -ENOENT);
                        n_in--;
                }
                in[at] = !in[at];
                ck_assert_uint_eq(b.n_used, n_in);
        }
        blocks_clear(&b);
        ck_assert_uint_eq(b.n_used, 0);
}

/* Neighbours, the first and last byte of each, and what leads over a border. */
TEST(find_by_interior_pointer)
{
        static const struct {
                uintptr_t at;
                uint64_t n_bytes, id; /* 0: none */
        } cases[] = {
                { 0x1000, 1, 1 },        { 0x1000, 256, 1 }, { 0x1000, 257, 0 }, { 0x10ff, 1, 1 },
                { 0x10ff, 2, 0 },        { 0x1100, 512, 2 }, { 0x1101, 511, 2 }, { 0x1101, 512, 0 },
                { 0x0fff, 1, 0 },        { 0x0fff, 2, 0 },   { 0x1300, 1, 0 },   { 0x2000, 1, 0 },
                { 0x1001, SIZE_MAX, 0 }, { 1, 1, 0 },        { 0, 1, 0 },
        };
        const struct block one = { .ptr = (void *)0x1000, .block_id = 1, .n_bytes = 256 };
        const struct block two = { .ptr = (void *)0x1100, .block_id = 2, .n_bytes = 512 };
        struct blocks b = { 0 };

        ck_assert_ptr_null(blocks_find_around(&b, (void *)0x1000, 1));
        ck_assert_int_eq(blocks_add(&b, &two), 0);
        ck_assert_int_eq(blocks_add(&b, &one), 0);
        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                const struct block *found = blocks_find_around(&b, (void *)cases[i].at, cases[i].n_bytes);

                ck_assert_msg((found ? found->block_id : 0) == cases[i].id, "case %zu", i);
        }
        blocks_clear(&b);
}

/* Blocks come and go in a hundred places of 64 KiB, beside a plain list of them. */
TEST(interior_pointers_while_blocks_change)
{
        uint64_t lengths[100] = { 0 };
        struct blocks b = { 0 };
        struct block got;
        uint32_t seed = 1;

        for (unsigned step = 0; step < 200000; step++) {
                uint32_t word = seed = seed * 1664525u + 1013904223u;
                unsigned place = (word >> 8) % 100;
                uintptr_t begin = 0x100000 + place * UINT64_C(0x10000);
                uintptr_t at = begin + (word >> 16) % 0x10000;
                struct block block = { .ptr = (void *)begin, .block_id = place };
                const struct block *found;

                block.n_bytes = 256 * (1 + (word >> 12) % 256);
                if (step % 3 == 0 && lengths[place] == 0) {
                        ck_assert_int_eq(blocks_add(&b, &block), 0);
                        lengths[place] = block.n_bytes;
                } else if (step % 3 == 0) {
                        ck_assert_int_eq(blocks_take(&b, block.ptr, &got), 0);
                        lengths[place] = 0;
                }
                found = blocks_find_around(&b, (void *)at, 1);
                ck_assert_msg((found != NULL) == (at - begin < lengths[place]), "step %u", step);
                ck_assert(!found || found->block_id == place);
        }
        blocks_clear(&b);
}

TEST(block_that_is_being_freed)
{
        struct block block = { .ptr = (void *)4096, .region_id = 7, .offset = 512, .n_bytes = 256 }, got;
        struct blocks b = { 0 };

        ck_assert_int_eq(blocks_leave(&b, block.ptr, &got), -ENOENT);
        ck_assert_int_eq(blocks_add(&b, &block), 0);
        ck_assert_int_eq(blocks_leave(&b, block.ptr, &got), 0);
        ck_assert_uint_eq(got.offset, 512);
        ck_assert_int_eq(blocks_leave(&b, block.ptr, &got), -ENOENT);
        ck_assert_ptr_null(blocks_find(&b, block.ptr));
        ck_assert(blocks_lie_in(&b, 7, 0, 4096));
        ck_assert_uint_eq(b.n_used, 1);
        blocks_stay(&b, block.ptr);
        ck_assert_ptr_nonnull(blocks_find(&b, block.ptr));
        ck_assert_int_eq(blocks_leave(&b, block.ptr, &got), 0);
        ck_assert_int_eq(blocks_take(&b, block.ptr, &got), 0);
        ck_assert(!blocks_lie_in(&b, 7, 0, 4096));
        ck_assert_uint_eq(b.n_used, 0);
        blocks_clear(&b);
}

/* The first block of a slab has its address. Searches by a pointer find the block, also with the tree. */
TEST(slab_of_a_stream)
{
        const struct block slab = {
                .ptr = (void *)4096, .block_id = 1, .region_id = 7, .n_bytes = 8192, .is_slab = true
        };
        const struct block first = { .ptr = (void *)4096, .block_id = 2, .region_id = 8, .n_bytes = 256 };
        struct blocks b = { 0 };
        struct block got;
        size_t cursor = 0;

        for (unsigned has_tree = 0; has_tree < 2; has_tree++, cursor = 0) {
                ck_assert_int_eq(blocks_add(&b, &slab), 0);
                ck_assert_int_eq(blocks_add(&b, &slab), -EEXIST);
                ck_assert_ptr_null(blocks_find(&b, slab.ptr));
                ck_assert_ptr_null(blocks_find_around(&b, (void *)4352, 1));
                ck_assert_ptr_null(blocks_next(&b, &cursor));
                ck_assert_int_eq(blocks_take(&b, slab.ptr, &got), -ENOENT);
                ck_assert(blocks_lie_in(&b, 7, 4096, 256));
                ck_assert_int_eq(blocks_add(&b, &first), 0);
                ck_assert_int_eq(blocks_add(&b, &first), -EEXIST);
                ck_assert_uint_eq(blocks_find_around(&b, (void *)4097, 1)->block_id, 2);
                cursor = 0;
                ck_assert_uint_eq(
                        blocks_next_kept(&b, &cursor)->block_id + blocks_next_kept(&b, &cursor)->block_id, 3);
                ck_assert_ptr_null(blocks_next_kept(&b, &cursor));
                ck_assert_int_eq(blocks_take_slab(&b, slab.ptr, &got), 0);
                ck_assert_uint_eq(got.block_id, 1);
                ck_assert_int_eq(blocks_take_slab(&b, slab.ptr, &got), -ENOENT);
                ck_assert(!blocks_lie_in(&b, 7, 0, 8192));
                ck_assert_uint_eq(blocks_find(&b, first.ptr)->block_id, 2);
                ck_assert_int_eq(blocks_take(&b, first.ptr, &got), 0);
                ck_assert_uint_eq(b.n_used, 0);
        }
        blocks_clear(&b);
}

/* An extent with a byte of a block must not be taken from the client, wherever the block begins and ends. */
TEST(blocks_in_an_extent)
{
        static const struct {
                uint64_t offset, n_bytes;
                bool lies_in; /* in the extent from 4096 to 8192 */
        } cases[] = {
                { 4096, 256, true },  { 4352, 256, true }, { 7936, 256, true }, { 4096, 4096, true },
                { 3840, 512, true },  { 7936, 512, true }, { 0, 16384, true },  { 3840, 256, false },
                { 8192, 256, false }, { 0, 4096, false },
        };

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                const struct block block = { .ptr = (void *)4096,
                                             .region_id = 7,
                                             .offset = cases[i].offset,
                                             .n_bytes = cases[i].n_bytes };
                struct blocks b = { 0 };

                ck_assert_int_eq(blocks_add(&b, &block), 0);
                ck_assert_msg(blocks_lie_in(&b, 7, 4096, 4096) == cases[i].lies_in, "case %zu", i);
                ck_assert(!blocks_lie_in(&b, 8, 4096, 4096)); /* another region */
                blocks_clear(&b);
        }
}
