/* bfc::device_memory_resource with CCCL's concepts and wrappers, on the fake driver. The tenant has 64 MiB in `train`, its
 * own partition, which is on GPU 0, and host memory in `parking`.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "checks.hpp"

using resource = bfc::device_memory_resource;

static_assert(cuda::mr::resource<resource> && cuda::mr::synchronous_resource<resource>);
static_assert(cuda::mr::resource_with<resource, cuda::mr::device_accessible>);
static_assert(!cuda::mr::resource_with<resource, cuda::mr::host_accessible>);
static_assert(noexcept(std::declval<resource>().deallocate(cuda::stream_ref(cudaStream_t{}), nullptr, 0, 0)));
static_assert(std::is_nothrow_move_constructible_v<resource> && std::is_copy_assignable_v<resource>);

static void test_partitions(const bfc::client &client)
{
        CHECK(throws<bfc::error>([&] { resource r(client, "parking"); }, "'parking' is host memory"));
        CHECK(throws<bfc::error>([&] { resource r(client, "none"); }, "'none'"));
        CHECK(throws<bfc::error>([&] { bfc::host_memory_resource r(client); }, "'train' is on a GPU"));
        CHECK(client.partition_for_device(0) == std::string("train"));
        CHECK(resource(client) == resource(client, "train") && resource(client) != resource(client, "infer"));
        CHECK(resource(client) != resource(bfc::client()));
}

static void test_without_a_stream(const bfc::client &client)
{
        resource gpu(client);
        void *a = gpu.allocate_sync(1000, 256), *b = gpu.allocate_sync(0);
        char out[6] = "";

        CHECK(a != b && n_blocks(client) == 2);
        CHECK(cudaMemcpy(a, "hello", 6, cudaMemcpyHostToDevice) == cudaSuccess);
        CHECK(cudaMemcpy(out, a, 6, cudaMemcpyDeviceToHost) == cudaSuccess && out == std::string("hello"));
        gpu.deallocate_sync(a, 1000, 256);
        gpu.deallocate_sync(b, 0);
        CHECK(n_blocks(client) == 0);
        CHECK(throws<bfc::quota_exceeded>([&] { (void)gpu.allocate_sync(65 * mib); }, "in 'train'"));
        CHECK(throws<std::bad_alloc>([&] { (void)gpu.allocate_sync(1, 512); }, "512"));
}

static void test_streams(const bfc::client &client)
{
        resource gpu(client);
        cudaStream_t one, other;

        CHECK(cudaStreamCreate(&one) == cudaSuccess && cudaStreamCreate(&other) == cudaSuccess);
        void *a = gpu.allocate(one, 1000), *b = gpu.allocate(other, 1000, 128);
        gpu.deallocate(one, a, 1000);
        void *again = gpu.allocate(one, 1000); /* reused in the order of the stream */
        CHECK(again == a && again != b);
        gpu.deallocate(one, again, 1000, 256);
        gpu.deallocate(other, b, 1000, 128);
        CHECK(n_blocks(client) == 0);
        CHECK(throws<std::bad_alloc>([&] { (void)gpu.allocate(one, 65 * mib); }, "in 'train'"));
        CHECK(throws<std::bad_alloc>([&] { (void)gpu.allocate(one, 1, 512); }, "512"));

        CHECK(cudaStreamBeginCapture(one, cudaStreamCaptureModeRelaxed) == cudaSuccess);
        CHECK(throws<bfc::error>([&] { gpu.end_stream(one); }, "captured"));
        cudaGraph_t graph;
        CHECK(cudaStreamEndCapture(one, &graph) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess);
        for (cudaStream_t stream : { one, other }) {
                gpu.end_stream(stream);
                CHECK(cudaStreamDestroy(stream) == cudaSuccess);
        }
}

/* CCCL's wrappers own or refer to the resource, which keeps the session. */
static void test_wrappers()
{
        const cuda::stream_ref stream{ cudaStream_t{} };
        bfc::client observer;
        auto make = [] { return resource(bfc::client()); };
        cuda::mr::any_resource<cuda::mr::device_accessible> any = make(), copy = any;
        cuda::mr::resource_ref<cuda::mr::device_accessible> ref = any;
        cuda::mr::synchronous_resource_ref<cuda::mr::device_accessible> sync = any;

        CHECK(any == copy && any == ref);
        void *a = any.allocate(stream, 8 * mib, 256);
        void *b = ref.allocate(stream, 8 * mib, 256);
        void *c = sync.allocate_sync(8 * mib, 256);
        CHECK(observer.usage().bytes_requested >= 24 * mib);
        CHECK(throws<bfc::quota_exceeded>([&] { (void)ref.allocate(stream, 64 * mib, 256); }, "in 'train'"));
        copy.deallocate(stream, a, 8 * mib, 256);
        any.deallocate(stream, b, 8 * mib, 256);
        any.deallocate_sync(c, 8 * mib, 256);
}

static void test_threads(const bfc::client &client)
{
        resource gpu(client);
        std::vector<std::thread> threads;

        for (int i = 0; i < 4; i++)
                threads.emplace_back([gpu]() mutable {
                        cudaStream_t stream;
                        CHECK(cudaStreamCreate(&stream) == cudaSuccess);
                        for (std::size_t n = 1; n < 100; n++) {
                                void *a = gpu.allocate(stream, n * 1000), *b = gpu.allocate_sync(n);
                                gpu.deallocate(stream, a, n * 1000);
                                gpu.deallocate_sync(b, n);
                        }
                        gpu.end_stream(stream);
                        CHECK(cudaStreamDestroy(stream) == cudaSuccess);
                });
        for (std::thread &t : threads)
                t.join();
        CHECK(n_blocks(client) == 0);
}

int main()
{
        bfc::client client;

        test_partitions(client);
        test_without_a_stream(client);
        test_streams(client);
        test_wrappers();
        test_threads(client);
        std::puts("done");
        return 0;
}
