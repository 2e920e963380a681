/* What bfcclient.hpp promises of clients, blocks and host memory. test_examples.c compiles it in each standard and runs it
 * under sanitizers. The tenant has 32 MiB in `train`, which is its own partition, and in `ram`.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <bfcclient.hpp>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <list>
#include <memory>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define CHECK(what)                                                                                          \
        do {                                                                                                 \
                if (!(what)) {                                                                               \
                        std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what);                      \
                        std::exit(1);                                                                        \
                }                                                                                            \
        } while (0)

constexpr std::size_t mib = 1 << 20;

static_assert(std::is_nothrow_move_constructible_v<bfc::block> && !std::is_copy_constructible_v<bfc::block>);
static_assert(std::is_nothrow_copy_constructible_v<bfc::bad_alloc>);
static_assert(std::is_nothrow_copy_constructible_v<bfc::error>);
#if defined(BFC_HAS_CUDA)
#error "this program is compiled without CUDA's headers"
#endif

/* The exception of a call; its sentence has this part. */
template <class E, class F> static std::error_code thrown(const F &call, const char *part)
{
        try {
                call();
        } catch (const E &e) {
                if (std::string(e.what()).find(part) == std::string::npos)
                        std::fprintf(stderr, "%s\n", e.what());
                CHECK(std::string(e.what()).find(part) != std::string::npos);
                return e.code();
        }
        std::fprintf(stderr, "nothing was thrown that says '%s'\n", part);
        std::exit(1);
}

static std::uint64_t n_blocks(const bfc::client &client)
{
        struct bfc_client_stats stats = {};

        stats.struct_size = sizeof(stats);
        bfc::check(bfc_stats(client.get(), &stats));
        return stats.num_blocks;
}

static void test_errors(const bfc::client &client)
{
        bfc_options nowhere{};
        nowhere.socket = "/nonexistent/bfcd.sock";
        CHECK(thrown<bfc::error>([&] { bfc::client c(nowhere); }, "/nonexistent/bfcd.sock") ==
              std::errc::no_such_file_or_directory);
        CHECK(thrown<bfc::error>([&] { client.allocate(0); }, "") == std::errc::invalid_argument);
        CHECK(thrown<bfc::quota_exceeded>([&] { client.allocate(33 * mib); }, "limit").value() == EDQUOT);
        /* Generic code sees the standard's types. */
        try {
                client.allocate(33 * mib);
                CHECK(false);
        } catch (const std::bad_alloc &e) {
                CHECK(std::string(e.what()).find("tenant 'red'") != std::string::npos);
        }
        CHECK(thrown<std::system_error>([&] { client.attach("nothing"); }, "nothing") ==
              std::errc::no_such_file_or_directory);
        CHECK(thrown<bfc::error>([&] { client.attach("nothing", 1); }, "") == std::errc::timed_out);
        CHECK(thrown<bfc::error>([&] { (void)client.partition_for_device(0); }, "") ==
              std::errc::no_such_file_or_directory);
        CHECK(bfc::check(0) == 0 && bfc::check(7) == 7);
        CHECK(thrown<bfc::bad_alloc>([] { bfc::check(-ENOMEM); }, "") == std::errc::not_enough_memory);
}

static void test_blocks(const bfc::client &client)
{
        bfc::block empty, a = client.allocate(1000), b = client.allocate(2000);
        char text[6] = "";

        CHECK(!empty && empty.data() == nullptr && empty.size() == 0);
        CHECK(a && a.size() == 1000 && reinterpret_cast<std::uintptr_t>(a.data()) % 256 == 0);
        a.write("hello", 6, 994);
        a.read(text, 6, 994);
        CHECK(std::string(text) == "hello");
        CHECK(thrown<bfc::error>([&] { a.write("hello", 6, 995); }, "block of 1000") ==
              std::errc::invalid_argument);
        thrown<bfc::error>([&] { a.read(text, 1, SIZE_MAX); }, "block of 1000");
        thrown<bfc::error>([&] { empty.write("", 1); }, "block of 0");
        thrown<bfc::error>([&] { empty.publish("empty"); }, "");

        CHECK(n_blocks(client) == 2);
        b = std::move(a); /* frees what b had */
        CHECK(n_blocks(client) == 1 && !a && a.size() == 0 && b.size() == 1000);
        void *own = b.release();
        CHECK(!b && n_blocks(client) == 1);
        bfc::block again = client.adopt(own, 1000);
        again.free();
        CHECK(!again && n_blocks(client) == 0);
        again.free();
        /* What cannot be freed stays owned, and says why. */
        bfc::block stranger = client.adopt(text, 1);
        thrown<bfc::error>([&] { stranger.free(); }, "");
        CHECK(stranger.release() == text);
}

static void test_sharing(const bfc::client &client)
{
        bfc_malloc_options whole{};
        whole.flags = BFC_WHOLE;
        whole.partition = "ram";
        bfc::block published = client.allocate(4096, whole);
        bfc::client other;

        published.write("shared", 7);
        published.publish("weights");
        bfc::block attached = other.attach("weights", 10000);
        char text[7];
        attached.read(text, 7);
        CHECK(attached.size() == 4096 && std::string(text) == "shared");
        published.free();
        attached.read(text, 7); /* the last reference keeps it */
}

/* The tenant's sessions: the daemon ends one some time after its client said goodbye. */
static void wait_for_sessions(const bfc::client &client, std::uint64_t n)
{
        for (int i = 0; client.usage().num_sessions != n; i++) {
                CHECK(i < 12000);
                std::this_thread::sleep_for(std::chrono::milliseconds(10));
        }
}

/* The session ends with its last handle, whatever the order. */
static void test_lifetimes(const bfc::client &observer)
{
        bfc::block block;

        wait_for_sessions(observer, 1);
        std::unique_ptr<bfc::host_memory_resource> memory;
        {
                bfc::client client, moved = std::move(client);
                CHECK(client.get() == moved.get());
                block = client.allocate(1000);
                memory = std::make_unique<bfc::host_memory_resource>(client);
        }
        block.write("x", 1);
        {
                std::pmr::vector<int> v(1000, 1, memory.get());
        }
        memory.reset();
        CHECK(observer.usage().num_sessions == 2);
        block.free(); /* the last handle, although `block` is still there */
        wait_for_sessions(observer, 1);

        bfc::client process = bfc::client::of_process(), same = bfc::client::of_process();
        CHECK(process.get() == same.get());
        block = process.allocate(1000); /* freed after its last client */
}

static void test_memory_resource(const bfc::client &client)
{
        bfc::host_memory_resource train(client), also(client, "train"), ram(client, "ram", 1);
        bfc::client other;
        bfc::host_memory_resource others(other);

        CHECK(train.is_equal(also) && !train.is_equal(ram) && !train.is_equal(others));
        CHECK(!train.is_equal(*std::pmr::new_delete_resource()));
        CHECK(thrown<bfc::error>([&] { bfc::host_memory_resource m(client, "none"); }, "'none'") ==
              std::errc::no_such_file_or_directory);
        CHECK(thrown<bfc::bad_alloc>([&] { (void)train.allocate(512, 512); }, "512") ==
              std::errc::invalid_argument);
        CHECK(thrown<bfc::quota_exceeded>([&] { (void)ram.allocate(40 * mib); }, "'ram'").value() == EDQUOT);

        void *zero = train.allocate(0), *none = train.allocate(0), *aligned = train.allocate(1, 256);
        CHECK(zero != none && reinterpret_cast<std::uintptr_t>(aligned) % 256 == 0);
        CHECK(n_blocks(client) == 3);
        train.deallocate(aligned, 1, 256);
        also.deallocate(none, 0); /* equal resources free each other's memory */
        train.deallocate(zero, 0);

        {
                std::pmr::vector<std::pmr::string> names(&train);
                for (int i = 0; i < 1000; i++)
                        names.emplace_back(static_cast<std::size_t>(20 + i), 'x');
                std::pmr::vector<std::pmr::string> taken = std::move(names); /* no copy */
                CHECK(taken.size() == 1000 && taken[999].size() == 1019 && n_blocks(client) == 1001);
                std::pmr::list<int> elsewhere({ 1, 2, 3 }, &ram);
                CHECK(client.usage("ram").bytes_requested >= 3 * sizeof(int));
                /* A container is as before when there is no memory. */
                std::pmr::vector<char> bytes(100, 'x', &train);
                thrown<bfc::quota_exceeded>([&] { bytes.resize(64 * mib); }, "tenant 'red'");
                CHECK(bytes.size() == 100 && bytes[99] == 'x');
        }
        CHECK(n_blocks(client) == 0);
}

/* A refused request waits, and is served when another session frees memory. */
static void test_waiting(const bfc::client &client)
{
        bfc::host_memory_resource patient(client, "ram", 600000);
        bfc_malloc_options in_ram{};
        in_ram.partition = "ram";
        bfc::block most = bfc::client().allocate(24 * mib, in_ram);
        std::thread frees([&most] {
                std::this_thread::sleep_for(std::chrono::milliseconds(100));
                most.free();
        });

        patient.deallocate(patient.allocate(16 * mib), 16 * mib);
        frees.join();
}

static void test_threads(const bfc::client &client)
{
        bfc::host_memory_resource memory(client);
        std::vector<std::thread> threads;

        for (int i = 0; i < 4; i++)
                threads.emplace_back([&memory, client, i] {
                        for (std::size_t n = 1; n < 300; n++) {
                                std::pmr::vector<int> v(n * 10, i, &memory);
                                bfc::block block = client.allocate(n);
                                CHECK(v.back() == i && block.size() == n);
                        }
                });
        for (std::thread &t : threads)
                t.join();
        CHECK(n_blocks(client) == 0);
}

int main()
{
        bfc::client client;

        CHECK(std::string(client.tenant()) == "red" && std::string(client.partition()) == "train");
        CHECK(client.usage().bytes_limit == 32 * mib && client.usage("ram").bytes_limit == 32 * mib);
        test_errors(client);
        test_blocks(client);
        test_sharing(client);
        test_lifetimes(client);
        test_memory_resource(client);
        test_waiting(client);
        test_threads(client);
        std::puts("done");
        return 0;
}
