/* The pool of RMM 25.02, the last version that is in headers, with CCCL's concepts of before 3.1: async_resource. The pools
 * of later versions are in a library, which needs NVIDIA's runtime.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "checks.hpp"

#include <rmm/cuda_stream.hpp>
#include <rmm/device_buffer.hpp>
#include <rmm/mr/device/pool_memory_resource.hpp>

using resource = bfc::device_memory_resource;

static_assert(cuda::mr::async_resource_with<resource, cuda::mr::device_accessible>);
static_assert(cuda::mr::resource_with<resource, cuda::mr::device_accessible>);
static_assert(!cuda::mr::async_resource_with<resource, cuda::mr::host_accessible>);

int main()
{
        bfc::client client;
        {
                resource gpu(client);
                rmm::mr::pool_memory_resource<resource> pool(rmm::device_async_resource_ref(gpu), 16 * mib);
                rmm::cuda_stream one, other;

                CHECK(n_blocks(client) == 1);
                for (int step = 0; step < 100; step++) {
                        rmm::device_buffer a(6 * mib, one, pool), b(6 * mib, other, pool);
                        CHECK(a.data() != b.data());
                }
                CHECK(n_blocks(client) == 1 && pool.pool_size() == 16 * mib);

                /* It grows up to the tenant's limit, and then says so. */
                std::vector<rmm::device_buffer> kept;
                CHECK(throws<rmm::out_of_memory>(
                        [&] {
                                while (kept.size() < 100)
                                        kept.emplace_back(6 * mib, one, pool);
                        },
                        "pool size"));
                CHECK(kept.size() >= 7 && client.usage().bytes_reserved <= 64 * mib);
                kept.clear();
                rmm::device_buffer after(6 * mib, other, pool);
                one.synchronize();
                other.synchronize();
                gpu.end_stream(one.value());
                gpu.end_stream(other.value());
        }
        CHECK(n_blocks(client) == 0);
        std::puts("done");
        return 0;
}
