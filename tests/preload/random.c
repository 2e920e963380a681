/* Random calls beside a model of what a driver does: a list of blocks.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/preload/job.h"

#define MAX_BLOCKS 200

struct model_block {
        CUdeviceptr at;
        size_t n_bytes;
        unsigned char value; /* that its bytes have */
};

struct model {
        struct model_block blocks[MAX_BLOCKS];
        size_t n_blocks, n_bytes;
        size_t n_limit; /* 0: other threads allocate, too */
        uint64_t random;
};

static uint64_t below(struct model *m, uint64_t n)
{
        m->random = m->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (m->random >> 33) % n;
}

static void add(struct model *m, CUdeviceptr at, size_t n_bytes)
{
        struct model_block *b = &m->blocks[m->n_blocks];

        CHECK(at % 256 == 0);
        for (size_t i = 0; i < m->n_blocks; i++)
                CHECK(at + n_bytes <= m->blocks[i].at || m->blocks[i].at + m->blocks[i].n_bytes <= at);
        *b = (struct model_block){ at, n_bytes, (unsigned char)below(m, 256) };
        OK(cu.cuMemsetD8_v2(at, b->value, n_bytes));
        m->n_blocks++;
        m->n_bytes += n_bytes;
}

/* A request for more than is left fails, and leaves all as it was. One for less can fail, too: free space may be in
 * pieces. */
static void allocate(struct model *m)
{
        size_t n_bytes = (size_t)(1 + below(m, below(m, 8) ? 100000 : 6 * MIB));
        CUdeviceptr at = 0;
        CUresult result;

        if (m->n_blocks == MAX_BLOCKS)
                return;
        result = below(m, 4) ? cu.cuMemAlloc_v2(&at, n_bytes) : cu.own_cuMemAllocAsync(&at, n_bytes, NULL);
        if (result == CUDA_SUCCESS) {
                CHECK(!m->n_limit || m->n_bytes + n_bytes <= m->n_limit);
                add(m, at, n_bytes);
        } else {
                CHECK(result == CUDA_ERROR_OUT_OF_MEMORY);
                CHECK(!m->n_limit || m->n_bytes + n_bytes > m->n_limit / 2);
        }
}

static void release(struct model *m, size_t i)
{
        struct model_block *b = &m->blocks[i];
        unsigned char ends[2];

        OK(cu.cuMemcpyDtoH_v2(&ends[0], b->at, 1));
        OK(cu.cuMemcpyDtoH_v2(&ends[1], b->at + b->n_bytes - 1, 1));
        CHECK(ends[0] == b->value && ends[1] == b->value);
        OK(cu.cuMemFree_v2(b->at));
        m->n_bytes -= b->n_bytes;
        *b = m->blocks[--m->n_blocks];
}

static void ask_range(struct model *m)
{
        struct model_block *b = &m->blocks[below(m, m->n_blocks)];
        CUdeviceptr base;
        size_t n;

        OK(cu.cuMemGetAddressRange_v2(&base, &n, b->at + below(m, b->n_bytes)));
        CHECK(base == b->at && n == b->n_bytes);
}

/* Each leaves all as it was. */
static void make_errors(struct model *m)
{
        struct model_block *b = &m->blocks[below(m, m->n_blocks)];
        CUdeviceptr none = 12345, stale = b->at + b->n_bytes / 2;
        size_t n_limit = m->n_limit ? m->n_limit : (size_t)1 << 40;

        if (stale != b->at)
                GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemFree_v2(stale));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.cuMemAlloc_v2(&none, n_limit - m->n_bytes + 1));
        GIVES(CUDA_ERROR_OUT_OF_MEMORY, cu.own_cuMemAllocAsync(&none, n_limit + 1, NULL));
        GIVES(CUDA_ERROR_INVALID_VALUE, cu.cuMemAlloc_v2(&none, 0));
        CHECK(none == 12345);
}

static void ask_info(struct model *m)
{
        size_t n_free, n_total;

        OK(cu.cuMemGetInfo_v2(&n_free, &n_total));
        CHECK(!m->n_limit || (n_total == m->n_limit && n_free + m->n_bytes <= n_total));
}

void run_random(unsigned seed, unsigned n_steps, size_t n_limit)
{
        struct model *m = calloc(1, sizeof(*m));

        CHECK(m);
        m->random = seed;
        m->n_limit = n_limit;
        for (unsigned i = 0; i < n_steps; i++) {
                uint64_t what = below(m, 11);

                if (what < 5 || m->n_blocks == 0)
                        allocate(m);
                else if (what < 8)
                        release(m, below(m, m->n_blocks));
                else if (what < 9)
                        ask_range(m);
                else if (what < 10)
                        make_errors(m);
                else
                        ask_info(m);
        }
        while (m->n_blocks > 0)
                release(m, m->n_blocks - 1);
        free(m);
}
