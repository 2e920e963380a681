/* bfcclient.h: memory from bfcd, the broker that owns a machine's devices.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A client is one process's session with the daemon. Every function may be
 * called from any thread; calls on one client run side by side. A client has one or
 * two threads of its own, which take no signals. Sizes are in bytes. Functions return 0 or
 * a negative errno:
 *
 *   -EINVAL      an argument is wrong (size 0, a pointer that is not a block, more
 *                than an extent has where the block must lie in one)
 *   -EDQUOT      the tenant's own limit does not hold the request, or it has
 *                as many blocks or sessions as it may have (max_blocks,
 *                max_sessions; also the daemon's own max_sessions); the process has
 *                1,024 shared blocks (bfc_publish, bfc_attach), or 32 calls that wait
 *                for a name (bfc_attach)
 *   -ENOMEM      the partition is full (or this process is out of memory)
 *   -EACCES      no tenant matches this user, or not the one asked for; or the
 *                socket's mode does not let it in
 *   -ENOENT      no such partition, or the tenant has no quota in it; no socket
 *                at that path; no shared block of that name (bfc_attach); no such
 *                GPU (bfc_partition_for_device)
 *   -EEXIST      the tenant has a shared block of that name (bfc_publish)
 *   -EINTR       a wait was interrupted (bfc_malloc_with, bfc_attach and bfc_attach_with with a wait_ms): a signal
 *                handler ran in the waiting thread, or cancel_fd is readable
 *   -ETIMEDOUT   nobody published the name in time (bfc_attach)
 *   -EMFILE      this process is at its limit of open files, so that memory could not be passed to it:
 *                raise RLIMIT_NOFILE (ulimit -n). The session goes on
 *   -ECONNREFUSED  nobody listens at that socket
 *   -ENAMETOOLONG  the socket's path is longer than 107 bytes
 *   -ENODEV      the device is lost, or this process does not see it
 *   -ENOTSUP     the driver does not open the memory for this process, as another user's or in a
 *                container; where the partition has "share: cuda-ipc", "share: fd" may help
 *                (bfc_malloc and its kind, bfc_attach)
 *   -EBUSY       an operator drains the device, for a reset or the like: later (bfc_malloc and
 *                its kind);
 *                a CUDA stream is being captured (bfc_detach, bfc_write, bfc_read,
 *                bfc_end_stream, bfc_poll; bfc_free and bfc_pool_free where it says so);
 *                another client is recording into that file (bfc_connect)
 *   -EIO         this process's CUDA context is broken (bfc_write, bfc_read,
 *                bfc_malloc_async), or the driver failed to wait (bfc_free, bfc_detach,
 *                bfc_pool_free)
 *   -ECONNRESET  the daemon ended the session, or is gone and did not come back in time (struct
 *                bfc_options). The client's thread sees that by itself, and no cache serves anything
 *                after it; with BFC_NO_THREAD it is noticed when the daemon is next asked
 *   -EIDRM       an operator evicted the session; bfc_last_error() has the reason. Its blocks are lost
 *                to this process, and the client does not connect again by itself
 *   -EPROTO      the other end does not speak the protocol
 *   -ECHILD      the client belongs to the parent of this forked process
 *
 * bfc_connect() may also return other errnos of socket(2), connect(2) and open(2).
 * bfc_last_error() has the sentence with the figures. Outputs are touched only
 * when 0 is returned. */
#ifndef BFCCLIENT_H
#define BFCCLIENT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bfc_client bfc_client;

/* How to connect. Zero-initialise, set `struct_size` to sizeof, fill what you
 * need; NULL means the environment's word (BFC_SOCKET, BFC_PARTITION,
 * BFC_TENANT), and then the default. */
struct bfc_options {
        size_t struct_size;
        const char *socket;        /* path; default /run/bfcd/bfcd.sock */
        const char *partition;     /* default: the first in which the tenant has a quota */
        const char *tenant;        /* which tenant, where the user matches several */
        const char *name;          /* what bfcctl shows; default: the program's name */
        uint64_t flags;            /* BFC_NO_THREAD, BFC_POLL, BFC_NO_CACHE, BFC_INHERIT */
        const char *trace;         /* file to record into, BFC_TRACE; default, and "": none */
        uint64_t cache_idle_bytes; /* in each partition; 0: the default */
        uint64_t cache_slab_bytes; /* 0: 2 MiB */
        uint32_t return_ms;        /* see below; BFC_RETURN_MS; 0: 30,000 */
        uint32_t unused;           /* 0 */
};

/* A daemon that is started anew. Where it keeps its memory over that (bfcd(8)), the client comes back to
 * it by itself, and everything goes on: blocks, pointers, names, streams. Calls that ask the
 * daemon take as long as it is away; nothing else notices. bfc_client_stats.num_returns counts it.
 * return_ms is how long it is tried; after that, or where the daemon does not take the process back, the
 * session is over as without. */

/* Recording. The lifetimes of the client's blocks, with the sizes as they were asked for,
 * are written into `trace`, which bfc-replay reads. What is in the file is replaced. In
 * its name %p becomes the pid, %n a number that no other recording client of the process
 * has, and %% a percent sign. bfc_connect() fails where the file cannot be written (errnos
 * of open(2)), where its name has another % or is no regular file's (-EINVAL), and
 * where another client, of any process, is recording into it (-EBUSY). The file is
 * complete after bfc_disconnect() and after exit(3), where the blocks that were still held
 * end; a process that is killed leaves whole lines, of lives that were over. When writing
 * fails later, recording stops, all else goes on, and bfc_disconnect() leaves the reason
 * in bfc_last_error(). */

/* Without the thread that answers the daemon's events. Then the daemon cannot
 * have memory of a GPU back from this client while it lives: where it needs such
 * memory, it ends the session. On the host device nothing is lost. */
#define BFC_NO_THREAD UINT64_C(1)

/* Every bfc_malloc() and bfc_free() asks the daemon; BFC_CACHE=off in the environment does the
 * same. Otherwise what the daemon gave is kept and cut by the client: freed memory stays with it,
 * up to cache_idle_bytes (by default all of it), for the next bfc_malloc(), or until the
 * daemon asks for it because others need it. A request of at most half of cache_slab_bytes is
 * cut from a block of that size. With BFC_NO_THREAD there is no cache unless BFC_CACHE=on or one
 * of the sizes asks for one: the daemon cannot ask such a client. */
#define BFC_NO_CACHE UINT64_C(2)

/* Without the thread; the program itself calls bfc_poll(), whenever bfc_poll_fd() is readable:
 * then the daemon can have memory back as from any other. With BFC_NO_THREAD the same. */
#define BFC_POLL UINT64_C(4)

/* Forked children read and write the host blocks that this client has at the time of the fork, by the
 * parent's pointers; BFC_INHERIT=on in the environment does the same, also for bfc_default().
 * Library calls on the client stay -ECHILD in a child. When the parent frees a block, or calls
 * bfc_disconnect(), the library zeroes it, and children read zeros. They must not use it after that:
 * the memory belongs to the tenant again, and the tenant's next block there is seen by them, until
 * the daemon empties the memory for others. Memory that another tenant gets is never reached through
 * a child's mapping. Blocks in memory that was mapped after the fork are not the child's, and a
 * shared block (bfc_publish) is not zeroed while others may have it. Without the flag, and for all
 * else of the client's addresses, a child finds reserved addresses: a touch is a SIGSEGV. On a GPU the
 * flag changes nothing, since CUDA does not survive fork(). */
#define BFC_INHERIT UINT64_C(8)

/* Connects and says hello. options may be NULL. The caller owns *ret_client and
 * ends it with bfc_disconnect(). */
int bfc_connect(const struct bfc_options *options, bfc_client **ret_client);

/* Gives everything back and ends the session; every pointer of this client is
 * invalid afterwards. No other thread may be inside a call. Takes NULL. In a
 * forked child it only forgets the client. */
void bfc_disconnect(bfc_client *client);

/* With BFC_POLL: does what the daemon has asked for unasked: memory that it takes back is
 * unmapped, idle memory is returned. Where the daemon is gone, comes back to it. Waits for the daemon's answers, and
 * otherwise for nothing. Call it within a tenth of a second: who does not answer a
 * request for idle memory in time (timeouts.reclaim of the daemon) is not waited for the next
 * time. From any thread, also beside other calls. -EBUSY: the driver refuses to unmap now, beside a
 * capture: call it again soon, whatever the fd says. -EINVAL: a client without BFC_POLL. */
int bfc_poll(bfc_client *client);

/* The fd to wait on by poll(2) for POLLIN; the library's, valid until bfc_disconnect(). */
int bfc_poll_fd(const bfc_client *client);

/* A block of at least n_bytes in the client's partition, aligned to 256 bytes.
 * On the host device the pointer is ordinary memory, shared with nobody outside
 * the tenant. On a GPU it is a device pointer, good for kernels and every call
 * of the CUDA runtime; this process must see that GPU. Its contents are not defined. The caller owns the block and gives
 * it back with bfc_free(). */
int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr);

/* The same in a partition by name. NULL: the client's own. */
int bfc_malloc_in(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr);

/* The same with flags (0: none). */
#define BFC_ONE_EXTENT UINT64_C(1)
#define BFC_WHOLE      UINT64_C(2)
int bfc_malloc_flags(bfc_client *client, const char *partition, size_t n_bytes, uint64_t flags,
                     void **ret_ptr);

/* The same with more to say. Zero-initialise, set `struct_size` to sizeof, fill what you
 * need. */
struct bfc_malloc_options {
        size_t struct_size;
        const char *partition; /* by name; NULL: the client's own */
        uint64_t flags;        /* BFC_ONE_EXTENT, BFC_WHOLE */
        uint32_t wait_ms;      /* how long it may wait for room; 10 minutes at most count */
        const char *tag;       /* what bfcctl shows of the block; at most 31 bytes, printable ASCII */
        int cancel_fd;         /* interrupts a wait when it is readable; 0: none */
};

/* options: NULL for none. Where there is no room, and nobody gives any back at once, it waits for
 * as long as wait_ms says, and is served as soon as there is room, who has waited longer first;
 * then it is refused as without.
 *
 * A signal handler that runs in the waiting thread interrupts the wait, with or without SA_RESTART: -EINTR.
 * The request has left the daemon's queue then, and nothing was allocated. A signal that comes just before
 * the wait begins interrupts nothing. cancel_fd closes that gap: the wait is interrupted as soon as the fd
 * is readable, also if it was so before. Use an eventfd to which the handler writes. The library
 * only polls it. Fd 0 cannot be used, and a negative number is -EINVAL. The wait for a daemon that is
 * being restarted (struct bfc_options) is interrupted alike; the session is resumed nevertheless. Calls without
 * a wait_ms are not interrupted.
 *
 * A block with a tag or a flag is the daemon's own, never cut
 * from what the client has. -EINVAL also for a tag that is too long. */
int bfc_malloc_with(bfc_client *client, size_t n_bytes, const struct bfc_malloc_options *options,
                    void **ret_ptr);

/* BFC_ONE_EXTENT: the whole block lies in one extent, one piece of memory that the
 * device shares as a whole. Some code fails on a buffer that spans several, NCCL and
 * RDMA's registration among it. In a partition with "share: cuda-ipc" every block
 * is in one extent. With "share: fd" the block can be as large as the largest extents of
 * this tenant: a 256th of its limit or up to twice that (with a limit of 4 GiB or less, up
 * to four times), and at least 2 MiB; -EINVAL for more, with
 * the figures in bfc_last_error(). It may cost a new extent where other blocks
 * would fill up what is left of several.
 *
 * BFC_WHOLE: the block is one of the daemon's own, never cut from what the client has: so it
 * can be shared by bfc_publish(). */

/* Gives a block back. ptr: as bfc_malloc() returned it; NULL does nothing.
 * -EINVAL for anything else, also for a second free. On a GPU it waits, as
 * cudaFree does, for all work that this process has given to the device.
 *
 * While a stream is being captured that would spoil the capture. So the client asks first: the default
 * stream, for all streams that wait for it, and each stream that was named in a call and has not
 * ended. Where one is captured the block is put aside: it is no block any more, and others get its
 * memory after the capture, when all work could be waited for (by bfc_trim(), or where memory is
 * short). A capture of any other stream is spoilt, as by cudaFree.
 *
 * -EBUSY: a stream is being captured, and the block is shared, or there is no memory to put it
 * aside. -ENOMEM, -EIO: the driver fails to wait. In all three the block stays. */
int bfc_free(bfc_client *client, void *ptr);

/* Copies n_bytes between this process's memory and a block, on whatever device it
 * is: a GPU's memory the processor cannot touch. ptr: the block's begin or a place
 * inside of it; -EINVAL: not all of the bytes lie in one block of this client. Done
 * when it returns; on a GPU the copy waits for what cudaMemcpy waits for, and is
 * -EBUSY while a stream of that kind is being captured. The block must not be freed
 * meanwhile. 0 bytes do nothing. */
int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes);
int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes);

/* Shared blocks: one copy of something large, a model's weights for instance, for many
 * processes of a tenant. Who has the block publishes it under a name; the others attach it by
 * that name, and everybody reads and writes the same memory. The block lives until the last
 * process that has it lets go of it, be it by its end, and whoever published it first is no
 * more than one of them. It is charged to the tenant once, and is none of its sessions'
 * use by the daemon's count (bfcctl shared lists it; bfc_stats() of each process has it).
 * No other tenant can attach it or learn that it is there. When the contents are complete
 * processes must tell each other by themselves: publish after writing.
 *
 * Names are the tenant's, in all its partitions: 1 to 63 bytes of printable ASCII. A name
 * is free again when its block is. */

/* ptr: a block as bfc_malloc_flags() with BFC_WHOLE returned it, or any that the client did not
 * cut from a larger one. The process goes on using it, and lets go of it by bfc_detach() or
 * bfc_free(). -EEXIST: the tenant has a shared block of that name. -EINVAL: the name, or not such
 * a block, or it is shared already. -EDQUOT: the process has 1,024 shared blocks. */
int bfc_publish(bfc_client *client, void *ptr, const char *name);

/* Attaches, or waits until somebody publishes the name, wait_ms at most (10 minutes; more counts as
 * that; 0: not at all). The pointer is good for all that a block's is, bfc_write() and
 * bfc_block_info() among it; it is not the same in other processes. Attached again in the same
 * process it is the same pointer, and is to be let go of once for each time. ret_n_bytes: as its
 * publisher asked for it; may be NULL. A signal interrupts the wait as that of bfc_malloc_with().
 * -ENOENT: there is no such name. -ETIMEDOUT: nor came
 * one in time. -EINVAL: the name. -EDQUOT: as in bfc_publish(), or too many sessions in that
 * partition. -ENODEV: it is on a device that this process does not see, or that is lost. */
int bfc_attach(bfc_client *client, const char *name, uint32_t wait_ms, void **ret_ptr, size_t *ret_n_bytes);

/* bfc_attach() with options: zero-initialise them, set `struct_size` to sizeof, fill what you need. NULL: it
 * does not wait. -EINVAL, besides: cancel_fd is below 0. */
struct bfc_attach_options {
        size_t struct_size;
        uint32_t wait_ms;
        int cancel_fd; /* interrupts the wait when it is readable; 0: none; see bfc_malloc_with() */
};
int bfc_attach_with(bfc_client *client, const char *name, const struct bfc_attach_options *options,
                    void **ret_ptr, size_t *ret_n_bytes);

/* Lets go of a shared block, once; bfc_free() does the same. The last time it waits for this
 * process's work on a GPU as bfc_free() does, and may fail as that: then it stays. NULL does nothing.
 * -EINVAL: not a shared block of this client. */
int bfc_detach(bfc_client *client, void *ptr);

/* ---- streams ----
 *
 * Memory in the order of a stream's work. What is freed on a stream is used again there at
 * once, because what the stream is given next comes behind; others get it when the work that
 * may touch it is done, and nobody waits. `stream` is a cudaStream_t, as a number; 0, 1 and 2
 * (CUDA's legacy default stream, and each thread's own) are streams too. It must be a stream of
 * the partition's device, in the primary context, which the runtime API uses. On the host device
 * it is any number, and no stream has work.
 *
 * Ends. A stream that was named in any of these calls is to be ended by bfc_end_stream() before it is
 * destroyed. Until then the library may ask the driver about it at any time, and a driver may
 * answer for a destroyed stream with the end of the process. Where it answers with an error instead,
 * blocks that the stream used are free when all work of the process on that device could be waited
 * for, and not before. But once CUDA has given the handle to another stream, the library takes that one for
 * the first: then two streams may have the same memory at a time.
 *
 * Captures. What a captured stream is given runs when the graph is launched: as often as that
 * may still be, its memory must not be freed. While a stream is captured no event is
 * recorded in it or asked, so what is freed then goes to others after the capture.
 *
 * Failures. When the device is lost, or this process's context is broken, none of its
 * work goes on, and what it freed is free. */

/* A block of at least n_bytes for work in this stream; like a bfc_malloc() otherwise. Where there
 * is no room and other streams have freed what is not done yet, it waits for these, for 2 seconds
 * at most. -EINVAL also for what is no stream of the device. */
int bfc_malloc_async(bfc_client *client, size_t n_bytes, uintptr_t stream, void **ret_ptr);
int bfc_malloc_async_in(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        void **ret_ptr);

/* Gives a block back behind the work that the stream has been given by now; waits for nothing. ptr:
 * from bfc_malloc_async() or bfc_malloc(), not shared. The stream need not be the one that it was allocated on;
 * but all work with the block, in whatever stream, must be ordered before this point, or that
 * stream be told of by bfc_record_stream(). -EINVAL and -ENOMEM: the block stays. bfc_free()
 * takes such blocks too, and waits as ever. */
int bfc_free_async(bfc_client *client, void *ptr, uintptr_t stream);

/* Work in this stream uses the block too, until it is freed: it is nobody's before the work that
 * this stream has been given by then is done. ptr: from bfc_malloc_async(). -EINVAL also for
 * stream 2 of a GPU. */
int bfc_record_stream(bfc_client *client, void *ptr, uintptr_t stream);

/* To be called before a stream is destroyed that was named in one of these calls, when it has been given
 * its last work. The library does not touch the handle after this, and CUDA may give it to another
 * stream, of which nothing is known. Blocks that are left stay good, and are freed on other streams;
 * memory that the stream's work still uses is given to no other before that work is done. Waits for nothing.
 * -EBUSY: the stream is being captured. -ENOMEM: no event could be had. In both it has not ended. Streams
 * 0, 1 and 2 are never destroyed, and need no end. */
int bfc_end_stream(bfc_client *client, uintptr_t stream);

/* What was allocated on one stream of a partition (NULL: the client's own). All are 0 for a
 * stream that nothing is known of; one that has had nothing for long may be forgotten.
 * `struct_size` as in bfc_options. */
struct bfc_stream_stats {
        size_t struct_size;
        uint64_t num_allocs;
        uint64_t num_frees;
        uint64_t bytes_in_use;
        uint64_t peak_bytes_in_use;
        uint64_t bytes_reserved; /* that the stream holds: in use, free for its next work, or pending */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_pending; /* freed, while another stream's work is not done */
        uint64_t largest_alloc_size;
};
int bfc_stats_stream(bfc_client *client, const char *partition, uintptr_t stream,
                     struct bfc_stream_stats *ret);

/* A pool: one block from which pieces are cut, and which is emptied at once. For the
 * temporaries of a step. */
typedef struct bfc_pool bfc_pool;

/* A pool of n_bytes, rounded up to 256, in the client's partition: one block, so fails as
 * bfc_malloc() does. The caller owns *ret_pool and ends it with bfc_pool_free() before
 * bfc_disconnect(). */
int bfc_pool_new(bfc_client *client, size_t n_bytes, bfc_pool **ret_pool);

/* A piece of at least n_bytes, aligned to 256 bytes; it takes up whole 256 bytes. No
 * system call, no lock; any threads at the same time. The piece is the pool's: it is good
 * until bfc_pool_reset() or bfc_pool_free(), and bfc_free() does not know it. Contents are
 * not defined. -ENOMEM: the pool has no room for it. */
int bfc_pool_alloc(bfc_pool *pool, size_t n_bytes, void **ret_ptr);

/* Empties the pool: all pieces are invalid. No other thread may be inside a call on this
 * pool. It waits for nothing, on a GPU neither: the caller sees to it that work given to
 * the device with the old pieces is done before work with the new ones begins. On one
 * stream that is so by itself; between streams it takes an event or a wait. */
int bfc_pool_reset(bfc_pool *pool);

/* Gives the block back, as bfc_free() does: on a GPU it waits for all work of this process
 * there, but in a capture, and fails with -EBUSY, -ENOMEM or -EIO as it does; then the pool stays as it was.
 * After anything else the pool is gone. No other thread may be inside a call on this
 * pool. NULL does nothing. */
int bfc_pool_free(bfc_pool *pool);

/* What this client itself has: bytes as TensorFlow's AllocatorStats names them.
 * `struct_size` as in bfc_options. */
struct bfc_client_stats {
        size_t struct_size;
        uint64_t num_allocs;
        uint64_t num_frees;
        uint64_t num_blocks;
        uint64_t num_failures; /* bfc_malloc() that failed, for whatever reason */
        uint64_t bytes_in_use; /* block bytes, rounded up to 256 */
        uint64_t peak_bytes_in_use;
        uint64_t bytes_requested;
        uint64_t largest_alloc_size;
        uint64_t bytes_mapped;   /* of extents mapped in this process */
        uint64_t bytes_reserved; /* held from the daemon: in use or idle */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_idle;  /* == bytes_reserved - bytes_in_use */
        uint64_t num_calls;   /* requests to the daemon, of any kind */
        uint64_t num_returns; /* to a daemon that was started anew */
};
int bfc_stats(bfc_client *client, struct bfc_client_stats *ret);

/* The same for one partition (NULL: the client's own). Each peak is the partition's own: the sum of the
 * partitions' peaks may be more than the peak of bfc_stats(). num_calls and num_returns are those of
 * the whole client. -ENOENT: there is no such partition. */
int bfc_stats_in(bfc_client *client, const char *partition, struct bfc_client_stats *ret);

/* The client's peaks, and those of its partitions and streams, become what is so now. */
int bfc_reset_peaks(bfc_client *client);

/* Gives idle memory back to the daemon: of what it gave and in which nothing lies, the
 * longest idle first, and then whole extents without a block of what is in use, until that is n_bytes
 * or there is no more. SIZE_MAX: all.
 *
 * Then the daemon releases extents of the tenant without a block to the device, as many bytes
 * in each partition. The call waits until they are back, 10 seconds at most. So after
 * bfc_trim(client, SIZE_MAX) only extents with live blocks are reserved. Extents stay that the
 * partition preallocates. On a GPU those stay that a session with BFC_NO_THREAD has mapped, or one that
 * does not answer. */
int bfc_trim(bfc_client *client, size_t n_bytes);

/* What the client's tenant uses and may use in a partition (NULL: the client's
 * own), by the daemon's count: all sessions of the tenant together. Read from memory that the
 * daemon shares: no system call, no lock, some 20 ns. The figures are of one moment, and a change is
 * there before the call returns that made it, in whatever process. Where the page cannot be
 * had, or the daemon is at it again and again, the daemon is asked. After the daemon's end
 * -ECONNRESET; with BFC_NO_THREAD that is known only once another call failed. */
struct bfc_tenant_usage {
        size_t struct_size;
        uint64_t bytes_limit;    /* extents: the tenant's limit */
        uint64_t bytes_reserved; /* extents charged now */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_in_use; /* blocks */
        uint64_t peak_bytes_in_use;
        uint64_t bytes_requested; /* blocks, as asked for */
        uint64_t num_blocks;
        uint64_t num_sessions;
        uint64_t largest_free_block_bytes;
        uint64_t lifetime_peak_bytes_in_use; /* no operator's reset erases it */
        uint64_t lifetime_peak_bytes_reserved;
};
int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret);

/* What this client can still get in a partition (NULL: the client's own), and the most that the tenant
 * may have there: its limit, or the partition's where that is lower. Asks the daemon. Free is a sum:
 *   - what is idle in this client's cache, but for memory that a stream keeps for itself;
 *   - free space in the tenant's extents;
 *   - new extents, as far as both limits have room beside the other tenants' guarantees, after all
 *     that is on its way back has arrived, and without what waiting requests claim.
 * Blocks of free bytes together can be allocated, if no other process allocates. A single block can be that large
 * where the free space is contiguous, as it is for a client without blocks; else it may be refused
 * with less. A request can also get more, since it reclaims what other sessions and tenants hold
 * idle. 0 while the device is drained or lost. */
int bfc_mem_get_info(bfc_client *client, const char *partition, size_t *ret_free_bytes,
                     size_t *ret_total_bytes);

/* How extents are shared, by struct bfc_block_info. */
#define BFC_SHARE_FD       1u /* by an fd, which the library closes once it is mapped: there is none to have */
#define BFC_SHARE_CUDA_IPC 2u /* by a handle */

/* Where a block lies, for code that shares it by itself: what another process of
 * the tenant opens by cudaIpcOpenMemHandle() with the handle is the whole extent,
 * and the block begins extent_offset behind what it gets. This process has it open
 * already. Never hand a handle to another tenant's process. */
struct bfc_block_info {
        size_t struct_size;
        uint64_t block_id; /* the daemon's name for it */
        uint64_t region_id;
        uint64_t offset;  /* in the region */
        uint64_t n_bytes; /* rounded up */
        uint64_t n_requested;
        uint64_t share;           /* BFC_SHARE_FD, BFC_SHARE_CUDA_IPC */
        uint64_t extent_bytes;    /* of the extent in which the block begins */
        uint64_t extent_offset;   /* of the block in that extent */
        unsigned char handle[64]; /* the extent's cudaIpcMemHandle_t; zeros with BFC_SHARE_FD */
        uint64_t block_offset;    /* in the daemon's block; it may go on in its neighbour */
        void *base;               /* where the block begins; it has n_bytes */
        const char *partition;    /* its name; valid until bfc_disconnect(), as the next */
        const char *device;       /* as the daemon's configuration names it: "host", "cuda:0" */
        int64_t device_ordinal;   /* the GPU's number in this process, as CUDA counts; -1: the host */
        char device_uuid[48];     /* "GPU-" and the UUID, as nvidia-smi prints it; of the host "host" */
};

/* ptr: any address inside of a block, of those that its n_bytes have; -EINVAL otherwise. The first
 * call with an address that is no block's begin makes an index of the client's blocks. From then on
 * such a call takes logarithmic time, and each bfc_malloc() and bfc_free() keeps the index. */
int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret);

/* The tenant that the daemon took this client for, and the partition that
 * bfc_malloc() uses. Valid until bfc_disconnect(). */
const char *bfc_tenant(const bfc_client *client);
const char *bfc_partition(const bfc_client *client);

/* The partition on the GPU that this process knows as CUDA device `ordinal`, so
 * CUDA_VISIBLE_DEVICES counts: the first one, in the order of the tenant's
 * quotas. -ENOENT: there is no such GPU, or no such partition. The name is valid
 * until bfc_disconnect(); pass it to bfc_malloc_in(). */
int bfc_partition_for_device(bfc_client *client, int ordinal, const char **ret_name);

/* The client of the whole process, made from the environment at the first call, by whichever
 * thread is first. It is the library's: never bfc_disconnect() it; it ends with the process.
 * Fails as bfc_connect() does, and the next call tries again. A forked child gets one of its
 * own at its first call; the parent's is -ECHILD there. */
int bfc_default(bfc_client **ret_client);

/* Allocators for PyTorch (torch.cuda.memory.CUDAPluggableAllocator) and CuPy
 * (cupy.cuda.memory.CFunctionAllocator), over bfc_default(), in the shapes that these load
 * by name; docs/frameworks.md shows how. Any thread.
 *
 * Memory comes from the partition on the GPU that this process knows as CUDA device
 * `device`, as bfc_partition_for_device() finds it; in a process that sees no GPU at all,
 * from the client's own partition. What fails returns NULL, also for a GPU on which the
 * tenant has no quota, and the sentence goes to stderr, once for each errno. 0 bytes are NULL.
 *
 * PyTorch's are bfc_malloc_async() and bfc_free_async() on the stream that it names, so a tensor
 * that other streams use must be told of: by bfc_torch_record_stream(), which Tensor.record_stream()
 * calls where it was set. While that stream, or another one that was ever named, is being captured a free keeps the block until the process ends, because the graph may use
 * it each time that it is launched.
 *
 * Streams that are destroyed are to be ended by bfc_end_stream() before, as ever; PyTorch's own never are.
 *
 * CuPy names no stream: its free is a bfc_free(), which on a GPU waits for all work of this process
 * there, and in a capture that is known of keeps the block too. NULL does nothing, and nothing is freed in a
 * forked child that has allocated nothing itself. The size at a free and `param` are not looked
 * at. */
struct CUstream_st;
void *bfc_torch_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream);
void bfc_torch_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream);
void bfc_torch_record_stream(void *ptr, struct CUstream_st *stream);
void *bfc_cupy_malloc(void *param, size_t n_bytes, int device);
void bfc_cupy_free(void *param, void *ptr, int device);

/* The sentence for the last failure in the calling thread, of any client; ""
 * when there was none. Valid until the thread's next call. */
const char *bfc_last_error(void);

/* The library's version, as "1.2.3". */
const char *bfc_version(void);

#ifdef __cplusplus
}
#endif
#endif
