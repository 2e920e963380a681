/* bfcclient.hpp: memory from bfcd for C++17 and later, over bfcclient.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Sizes are in bytes. Any thread may call any function of a client and of the memory resources, at the same time; a
 * `block` is like a std::unique_ptr, which one thread at a time may use. All functions of bfcclient.h can be used
 * beside these classes: bfc::check(bfc_trim(client.get(), SIZE_MAX)).
 *
 * The session with the daemon is shared: a client is a handle of it, and each copy, block and resource has another. The
 * last handle ends the session. Destructors do not throw: a block that could not be freed, for example during the
 * capture of a CUDA stream, stays allocated until the session ends. A forked child may use no object of its parent;
 * destructors do nothing there.
 *
 * bfc::device_memory_resource is defined where the headers of CUDA (cuda_runtime_api.h) and CCCL (cuda/memory_resource)
 * are found, and then BFC_HAS_CUDA is. With CCCL before 3.1 that header needs
 * LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE. With BFC_NO_CUDA they are not included. */
#ifndef BFCCLIENT_HPP
#define BFCCLIENT_HPP

#include <bfcclient.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#if !defined(BFC_NO_CUDA) && __has_include(<cuda_runtime_api.h>) && __has_include(<cuda/memory_resource>)
#include <cuda/version>
#if CCCL_VERSION >= 3001000 || defined(LIBCUDACXX_ENABLE_EXPERIMENTAL_MEMORY_RESOURCE)
#include <cuda/memory_resource>
#define BFC_HAS_CUDA 1
#endif
#endif

namespace bfc
{

/* ---- errors ---- */

/* A call failed. what() has the library's sentence. code() is the errno, which bfcclient.h explains:
 * `e.code() == std::errc::no_such_file_or_directory`. */
class error : public std::system_error
{
public:
        explicit error(std::system_error e) : std::system_error(std::move(e)) {}
};

/* There is no memory: ENOMEM, the partition is full. Also of the resources for an alignment above 256: EINVAL. */
class bad_alloc : public std::bad_alloc
{
public:
        explicit bad_alloc(std::system_error e) : error_(std::move(e)) {}
        const char *what() const noexcept override { return error_.what(); }
        const std::error_code &code() const noexcept { return error_.code(); }

private:
        std::system_error error_;
};

/* EDQUOT: the request exceeds a limit of the tenant. */
class quota_exceeded : public bad_alloc
{
public:
        using bad_alloc::bad_alloc;
};

/* Returns the result of a function of bfcclient.h, or throws quota_exceeded, bad_alloc or error if it is negative. Call it
 * in the thread that called the function: the sentence is bfc_last_error(). */
inline int check(int result)
{
        if (result >= 0)
                return result;
        std::system_error e(-result, std::generic_category(), bfc_last_error());
        if (result == -EDQUOT)
                throw quota_exceeded(e);
        if (result == -ENOMEM)
                throw bad_alloc(e);
        throw error(e);
}

/* ---- clients and blocks ---- */

namespace detail
{
using session = std::shared_ptr<bfc_client>;

struct block_free {
        session owner;
        void operator()(void *ptr) const noexcept { bfc_free(owner.get(), ptr); }
};

[[noreturn]] inline void fail(int err, const std::string &what)
{
        throw error(std::system_error(err, std::generic_category(), what));
}
} // namespace detail

/* A block of memory, which its destructor frees: it waits as bfc_free() does. It keeps the session. Movable; a
 * default-constructed one is empty. */
class block
{
public:
        block() noexcept = default;

        /* The address, aligned to 256; nullptr if empty. On a GPU it is a device pointer. It belongs to the block. */
        void *data() const noexcept { return ptr_.get(); }

        /* Bytes as requested, or as the publisher requested them; 0 if empty. */
        std::size_t size() const noexcept { return ptr_ ? n_bytes_ : 0; }

        explicit operator bool() const noexcept { return ptr_ != nullptr; }

        /* Copies n_bytes to `offset` in the block, or from there, on any device. The copy is complete on return. Throws
         * error (EINVAL) if they are not all in the block. */
        void write(const void *src, std::size_t n_bytes, std::size_t offset = 0) const
        {
                check(bfc_write(owner(), at(offset, n_bytes), src, n_bytes));
        }
        void read(void *dst, std::size_t n_bytes, std::size_t offset = 0) const
        {
                check(bfc_read(owner(), dst, at(offset, n_bytes), n_bytes));
        }

        /* Shares the block with other processes of the tenant under a name: bfc_publish(). Allocate it with BFC_WHOLE. */
        void publish(const char *name) const { check(bfc_publish(owner(), data(), name)); }

        /* Frees the block; empty blocks do nothing. If it throws, the block is as before. */
        void free()
        {
                check(ptr_ ? bfc_free(owner(), data()) : 0);
                release();
        }

        /* The caller owns the memory now, and frees it by bfc_free() while the session lives. */
        void *release() noexcept
        {
                void *ptr = ptr_.release();

                ptr_.get_deleter().owner.reset();
                return ptr;
        }

private:
        friend class client;
        block(const detail::session &session, void *ptr, std::size_t n_bytes)
            : ptr_(ptr, detail::block_free{ session }), n_bytes_(n_bytes)
        {
        }

        bfc_client *owner() const noexcept { return ptr_.get_deleter().owner.get(); }
        void *at(std::size_t offset, std::size_t n_bytes) const
        {
                if (offset > size() || n_bytes > size() - offset)
                        detail::fail(EINVAL, std::to_string(n_bytes) + " bytes at " + std::to_string(offset) +
                                                     " are outside of a block of " + std::to_string(size()));
                return static_cast<char *>(data()) + offset;
        }

        std::unique_ptr<void, detail::block_free> ptr_;
        std::size_t n_bytes_ = 0;
};

/* A session with the daemon. Copies are the same session. */
class client
{
public:
        /* Connects as the environment says: BFC_SOCKET, BFC_PARTITION, BFC_TENANT. */
        client() : client(bfc_options{}) {}

        /* Connects with options; struct_size is set here. */
        explicit client(bfc_options options)
        {
                bfc_client *connected;

                options.struct_size = sizeof(options);
                check(bfc_connect(&options, &connected));
                session_.reset(connected, bfc_disconnect);
        }

        /* The client of the whole process, bfc_default(), whose session ends with the process. */
        static client of_process()
        {
                bfc_client *shared;

                check(bfc_default(&shared));
                return client(detail::session(shared, [](bfc_client *) {}));
        }

        /* A client that is moved from keeps its session. */
        client(const client &) = default;
        client &operator=(const client &) = default;

        /* For functions of bfcclient.h. It belongs to this object: never bfc_disconnect() it. */
        bfc_client *get() const noexcept { return session_.get(); }

        /* A block of at least n_bytes, with the options of bfc_malloc_with(): partition, flags, tag, wait_ms; struct_size
         * is set here. Its contents are undefined. */
        block allocate(std::size_t n_bytes, bfc_malloc_options options = {}) const
        {
                void *ptr;

                options.struct_size = sizeof(options);
                check(bfc_malloc_with(get(), n_bytes, &options, &ptr));
                return adopt(ptr, n_bytes);
        }

        /* Takes over a block of n_bytes of this session, from bfc_malloc() and similar. */
        block adopt(void *ptr, std::size_t n_bytes) const { return block(session_, ptr, n_bytes); }

        /* A reference to the tenant's shared block of this name, which is waited for: bfc_attach(). */
        block attach(const char *name, std::uint32_t wait_ms = 0) const
        {
                std::size_t n_bytes;
                void *ptr;

                check(bfc_attach(get(), name, wait_ms, &ptr, &n_bytes));
                return adopt(ptr, n_bytes);
        }

        /* Names that are valid while the session lives: the tenant, its own partition, and its first partition on the GPU
         * that this process knows as CUDA device `ordinal`. */
        const char *tenant() const noexcept { return bfc_tenant(get()); }
        const char *partition() const noexcept { return bfc_partition(get()); }
        const char *partition_for_device(int ordinal) const
        {
                const char *name;

                check(bfc_partition_for_device(get(), ordinal, &name));
                return name;
        }

        /* Usage and limit of the tenant in a partition, by default its own, over all its sessions: bfc_usage(). */
        bfc_tenant_usage usage(const char *partition = nullptr) const
        {
                bfc_tenant_usage usage{};

                usage.struct_size = sizeof(usage);
                check(bfc_usage(get(), partition, &usage));
                return usage;
        }

private:
        explicit client(detail::session session) : session_(std::move(session)) {}

        detail::session session_;
};

/* ---- memory resources ---- */

namespace detail
{
/* A partition of a client, and allocations in it. Blocks are aligned to 256 bytes. 0 bytes are allocated as 1, so that each
 * pointer is another. */
struct place {
        place(const client &client, const char *partition, bool on_gpu) : owner(client)
        {
                const std::string wanted = partition ? partition : client.partition();
                struct bfc_partition_info info {
                };

                info.struct_size = sizeof(info);
                for (std::size_t i = 0; name == nullptr; i++) {
                        int r = bfc_partition_info(client.get(), i, &info);
                        if (r == -ENOENT)
                                fail(ENOENT, "the tenant has no quota in partition '" + wanted + "'");
                        check(r);
                        if (info.partition == wanted)
                                name = info.partition;
                }
                if ((std::strcmp(info.device_uuid, "host") != 0) != on_gpu)
                        fail(EINVAL,
                             "partition '" + wanted + "' is " + (on_gpu ? "host memory" : "on a GPU"));
        }

        bool operator==(const place &other) const noexcept
        {
                return owner.get() == other.owner.get() && std::strcmp(name, other.name) == 0;
        }

        void *allocate(std::size_t n_bytes, std::size_t alignment, std::uint32_t wait_ms = 0) const
        {
                bfc_malloc_options options{};

                options.partition = name;
                options.wait_ms = wait_ms;
                check_alignment(alignment);
                return owner.allocate(n_bytes ? n_bytes : 1, options).release();
        }

        void *allocate_async(std::uintptr_t stream, std::size_t n_bytes, std::size_t alignment) const
        {
                void *ptr;

                check_alignment(alignment);
                check(bfc_malloc_async_in(owner.get(), name, n_bytes ? n_bytes : 1, stream, &ptr));
                return ptr;
        }

        void free(void *ptr) const noexcept { bfc_free(owner.get(), ptr); }

        /* Without memory for its own notes, the library can still wait for the device and free. */
        void free_async(std::uintptr_t stream, void *ptr) const noexcept
        {
                if (bfc_free_async(owner.get(), ptr, stream) == -ENOMEM)
                        free(ptr);
        }

        static void check_alignment(std::size_t n)
        {
                if (n > 256)
                        throw bad_alloc(std::system_error(EINVAL, std::generic_category(),
                                                          "an alignment of " + std::to_string(n) + " bytes"));
        }

        client owner;
        const char *name = nullptr; /* of the session */
};
} // namespace detail

/* Host memory for the containers of std::pmr, in a partition of the host, by default the client's own. It keeps the
 * session. An allocation waits for room for up to wait_ms, and throws as check() does. Containers must not outlive it. The
 * constructor looks at the tenant's partitions, which loads CUDA's driver if one before this is on a GPU. */
class host_memory_resource final : public std::pmr::memory_resource
{
public:
        explicit host_memory_resource(const client &client, const char *partition = nullptr,
                                      std::uint32_t wait_ms = 0)
            : place_(client, partition, false), wait_ms_(wait_ms)
        {
        }

private:
        void *do_allocate(std::size_t n_bytes, std::size_t alignment) override
        {
                return place_.allocate(n_bytes, alignment, wait_ms_);
        }
        void do_deallocate(void *ptr, std::size_t, std::size_t) override { place_.free(ptr); }
        bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
        {
                const auto *same = dynamic_cast<const host_memory_resource *>(&other);

                return same != nullptr && same->place_ == place_;
        }

        detail::place place_;
        std::uint32_t wait_ms_;
};

#ifdef BFC_HAS_CUDA
/* Memory of a GPU in the order of CUDA streams, in a partition there, by default the client's own, for RMM and CCCL:
 * cuda::mr::resource_with<bfc::device_memory_resource, cuda::mr::device_accessible>; with CCCL before 3.1
 * async_resource_with. It keeps the session, and copies are equal, so it can be passed by value. The process must see the
 * GPU. Allocations throw as check() does; deallocations never. Streams must be of that GPU, in the primary context.
 *
 * Memory that is freed on a stream is reused there at once, and elsewhere when the stream's work so far is complete. Call
 * end_stream() before you destroy a stream. bfcclient.h has more about streams and captures. */
class device_memory_resource
{
public:
        explicit device_memory_resource(const client &client, const char *partition = nullptr)
            : place_(client, partition, true)
        {
        }

        /* Call it after the last work was queued on a stream, before the stream is destroyed: bfc_end_stream(). */
        void end_stream(cuda::stream_ref stream) const
        {
                check(bfc_end_stream(place_.owner.get(), to_number(stream)));
        }

        friend bool operator==(const device_memory_resource &a, const device_memory_resource &b) noexcept
        {
                return a.place_ == b.place_;
        }
        friend bool operator!=(const device_memory_resource &a, const device_memory_resource &b) noexcept
        {
                return !(a == b);
        }
        friend void get_property(const device_memory_resource &, cuda::mr::device_accessible) noexcept {}

        /* Without a stream: memory that is free for any work, and a free that waits for all work of this process on the
         * GPU. In the order of a stream: memory for its later work, and a free after the work so far. */
#if CCCL_VERSION >= 3001000
        void *allocate_sync(std::size_t n_bytes, std::size_t align = 256)
        {
                return place_.allocate(n_bytes, align);
        }
        void deallocate_sync(void *ptr, std::size_t, std::size_t = 256) noexcept
        {
                place_.free(ptr);
        }
        void *allocate(cuda::stream_ref stream, std::size_t n_bytes, std::size_t align = 256)
        {
                return place_.allocate_async(to_number(stream), n_bytes, align);
        }
        void deallocate(cuda::stream_ref stream, void *ptr, std::size_t, std::size_t = 256) noexcept
        {
                place_.free_async(to_number(stream), ptr);
        }
#else
        void *allocate(std::size_t n_bytes, std::size_t align = 256)
        {
                return place_.allocate(n_bytes, align);
        }
        void deallocate(void *ptr, std::size_t, std::size_t = 256) noexcept
        {
                place_.free(ptr);
        }
        void *allocate_async(std::size_t n_bytes, std::size_t align, cuda::stream_ref stream)
        {
                return place_.allocate_async(to_number(stream), n_bytes, align);
        }
        void deallocate_async(void *ptr, std::size_t, std::size_t, cuda::stream_ref stream) noexcept
        {
                place_.free_async(to_number(stream), ptr);
        }
#endif

private:
        static std::uintptr_t to_number(cuda::stream_ref stream) noexcept
        {
                return reinterpret_cast<std::uintptr_t>(stream.get());
        }

        detail::place place_;
};
#endif /* BFC_HAS_CUDA */

} // namespace bfc
#endif /* BFCCLIENT_HPP */
