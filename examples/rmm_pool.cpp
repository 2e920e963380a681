/* A memory pool of RMM (26.10) over a GPU's memory from bfcd. docs/cpp.md has the commands.
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.hpp>
#include <rmm/cuda_stream.hpp>
#include <rmm/device_buffer.hpp>
#include <rmm/mr/pool_memory_resource.hpp>
#include <iostream>

int main()
try {
        constexpr std::size_t mib = 1 << 20;
        bfc::client client;
        bfc::device_memory_resource gpu(client);
        /* The pool keeps a copy of the resource, which keeps the session. It grows up to 48 MiB. */
        rmm::mr::pool_memory_resource pool(gpu, 16 * mib, 48 * mib);
        rmm::cuda_stream stream;

        for (int step = 0; step < 100; step++)
                rmm::device_buffer batch(8 * mib, stream, pool); /* from the pool: no call of bfcd */
        std::cout << pool.pool_size() / mib << " MiB in the pool\n";
        try {
                rmm::device_buffer large(1024 * mib, stream, pool);
        } catch (const std::bad_alloc &e) { /* rmm::out_of_memory, with bfcd's sentence where bfcd refused */
                std::cout << e.what() << "\n";
        }
        gpu.end_stream(stream.value()); /* before it is destroyed */
        return 0;
} catch (const std::exception &e) {
        std::cerr << e.what() << "\n";
        return 1;
}
