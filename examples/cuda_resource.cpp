/* Memory of a GPU from bfcd, behind the memory resources of CUDA's C++ libraries (CCCL 3.1 or later). docs/cpp.md has the commands.
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.hpp>
#include <cuda/memory_resource>
#include <cuda_runtime_api.h>
#include <iostream>
#include <vector>

int main()
try {
        bfc::client client;
        bfc::device_memory_resource gpu(client, client.partition_for_device(0));
        /* What takes memory resources takes this one: by value, as here, or as cuda::mr::resource_ref. */
        cuda::mr::any_resource<cuda::mr::device_accessible> resource = gpu;
        std::vector<float> in(1000, 0.5f), out(1000);
        const std::size_t n_bytes = in.size() * sizeof(float);
        cudaStream_t stream;

        if (cudaStreamCreate(&stream) != cudaSuccess)
                throw std::runtime_error("cudaStreamCreate failed");
        void *batch = resource.allocate(stream, n_bytes, 256);
        cudaMemcpyAsync(batch, in.data(), n_bytes, cudaMemcpyHostToDevice, stream);
        cudaMemcpyAsync(out.data(), batch, n_bytes, cudaMemcpyDeviceToHost, stream);
        resource.deallocate(stream, batch, n_bytes, 256); /* after the copies; waits for nothing */
        if (cudaStreamSynchronize(stream) != cudaSuccess || out != in)
                throw std::runtime_error("the copies failed");
        gpu.end_stream(stream); /* before it is destroyed */
        cudaStreamDestroy(stream);
        std::cout << "copied " << n_bytes << " bytes\n";
        return 0;
} catch (const std::exception &e) {
        std::cerr << e.what() << "\n";
        return 1;
}
