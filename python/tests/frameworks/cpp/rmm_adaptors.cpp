/* Resources of RMM 26.10 that call no CUDA runtime, from its library, over bfc::device_memory_resource.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "checks.hpp"

#include <rmm/mr/failure_callback_resource_adaptor.hpp>
#include <rmm/mr/limiting_resource_adaptor.hpp>
#include <rmm/mr/statistics_resource_adaptor.hpp>
#include <rmm/resource_ref.hpp>

int main()
{
        const cuda::stream_ref stream{ cudaStream_t{} };
        bfc::client client;
        bfc::device_memory_resource gpu(client);
        rmm::device_async_resource_ref ref = gpu;
        rmm::mr::statistics_resource_adaptor counted(gpu);
        rmm::mr::limiting_resource_adaptor limited(counted, 16 * mib);

        void *a = limited.allocate(stream, 10 * mib, 256);
        CHECK(counted.get_bytes_counter().value == static_cast<std::int64_t>(10 * mib));
        CHECK(client.usage().bytes_requested == 10 * mib);
        CHECK(throws<rmm::out_of_memory>([&] { (void)limited.allocate(stream, 10 * mib, 256); }, "limit"));
        limited.deallocate(stream, a, 10 * mib, 256);
        CHECK(n_blocks(client) == 0);

        /* bfcd's refusal, as a program that frees memory of its own and tries again sees it. */
        void *spare = ref.allocate(stream, 40 * mib, 256);
        auto free_spare = [&](std::size_t) {
                ref.deallocate(stream, std::exchange(spare, nullptr), 40 * mib, 256);
                return true;
        };
        rmm::mr::failure_callback_resource_adaptor<std::bad_alloc> retries(
                gpu, [](std::size_t n, void *f) { return (*static_cast<decltype(free_spare) *>(f))(n); },
                &free_spare);
        void *b = retries.allocate(stream, 40 * mib, 256);
        CHECK(spare == nullptr && b != nullptr);
        retries.deallocate(stream, b, 40 * mib, 256);
        CHECK(n_blocks(client) == 0);
        std::puts("done");
        return 0;
}
