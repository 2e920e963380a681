// Allocation functions for PyTorch that throw the daemon's sentence where there is no memory: a NULL would be taken for
// an address. Compiled by bfcd.torch.install() for the libbfcclient that is loaded.
//
// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <stdexcept>
#include <string>
#include <sys/types.h>

struct CUstream_st;
struct bfc_client;

extern "C" {
void *bfc_torch_malloc(ssize_t n_bytes, int device, CUstream_st *stream);
void *bfc_torch_malloc_one_extent(ssize_t n_bytes, int device, CUstream_st *stream);
const char *bfc_last_error(void);
int bfc_default(bfc_client **ret_client);
int bfc_trim(bfc_client *client, size_t n_bytes);

static void *checked(void *p, ssize_t n_bytes)
{
        if (!p && n_bytes > 0)
                throw std::runtime_error(std::string("bfcd: out of memory: ") + bfc_last_error());
        return p;
}

void *bfcd_torch_malloc(ssize_t n_bytes, int device, CUstream_st *stream)
{
        return checked(bfc_torch_malloc(n_bytes, device, stream), n_bytes);
}

void *bfcd_torch_malloc_one_extent(ssize_t n_bytes, int device, CUstream_st *stream)
{
        return checked(bfc_torch_malloc_one_extent(n_bytes, device, stream), n_bytes);
}

// torch.cuda.empty_cache(). The first trim records events on streams with idle memory, and the second one sees that
// they are done.
void bfcd_torch_reset(void)
{
        bfc_client *client;

        if (bfc_default(&client) < 0)
                return;
        bfc_trim(client, SIZE_MAX);
        bfc_trim(client, SIZE_MAX);
}
}
