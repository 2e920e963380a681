/* bfcclient.h: memory from bfcd, the broker that owns a machine's devices.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A client is one process's session with the daemon. Any thread may call any function; calls on one
 * client run in parallel. A client has one or two threads, which block all signals. Sizes are in bytes.
 * Functions return 0 or a negative errno:
 *
 *   -EINVAL      an argument is wrong (size 0, a pointer that is not a block, a size above that of
 *                an extent for a block that must be in one)
 *   -EDQUOT      the request exceeds the tenant's own limit, or the number of blocks or sessions is
 *                reached (max_blocks, max_sessions; also the daemon's own max_sessions); the process
 *                has 1,024 shared blocks (bfc_publish, bfc_attach), or 32 calls that wait for a name
 *                (bfc_attach)
 *   -ENOMEM      the partition is full (or this process is out of memory)
 *   -EACCES      no tenant matches this user, or the requested one does not; or the socket's mode
 *                does not admit this user; the block is attached read-only (bfc_write)
 *   -ENOENT      no such partition, or the tenant has no quota in it; no socket at that path; no
 *                shared block of that name (bfc_attach, bfc_forget); no such GPU
 *                (bfc_partition_for_device); no more partitions (bfc_partition_info)
 *   -EEXIST      the tenant has a shared block of that name (bfc_publish)
 *   -EINTR       a wait was interrupted (bfc_malloc_with, bfc_attach, bfc_attach_with, bfc_wake,
 *                bfc_use_begin and similar with a wait_ms): a signal handler ran in the waiting
 *                thread, or cancel_fd is readable
 *   -ETIMEDOUT   no block with that name was published in time (bfc_attach)
 *   -EMFILE      this process has reached its limit of open files, so memory could not be passed to
 *                it: raise RLIMIT_NOFILE (ulimit -n). The session continues
 *   -ECONNREFUSED  no daemon listens at that socket
 *   -ENAMETOOLONG  the socket's path is longer than 107 bytes
 *   -ENODEV      the device is lost, or this process does not see it
 *   -ENOTSUP     the driver does not open the memory in this process, for example for another user
 *                or in a container; if the partition has "share: cuda-ipc", "share: fd" may help
 *                (bfc_malloc and similar, bfc_attach); a partition with "share: cuda-ipc" has no
 *                read-only access (bfc_attach_with)
 *   -EBUSY       an operator drains the device, for a reset for example: try later (bfc_malloc and
 *                similar, bfc_wake); the block is parked (bfc_write, bfc_read,
 *                bfc_publish), or in use (bfc_park, bfc_park_tag);
 *                a CUDA stream is being captured (bfc_detach, bfc_write, bfc_read, bfc_end_stream and
 *                bfc_poll; bfc_free and bfc_pool_free where documented);
 *                another client is recording into that file (bfc_connect);
 *                the same extents are mapped read-only, or writable, by this client (BFC_ATTACH_READ_ONLY)
 *   -EIO         this process's CUDA context is broken (bfc_write, bfc_read, bfc_malloc_async), or
 *                the driver failed to wait (bfc_free, bfc_detach, bfc_pool_free)
 *   -ECONNRESET  the daemon ended the session, or is gone and the session was not resumed in time
 *                (struct bfc_options). The client's thread notices that by itself, and no cache serves
 *                requests after it; with BFC_NO_THREAD the next request to the daemon notices it
 *   -EIDRM       an operator evicted the session; bfc_last_error() has the reason. Its blocks are lost,
 *                and the client does not reconnect
 *   -EPROTO      the peer does not speak the protocol
 *   -ECHILD      the client belongs to the parent of this forked process
 *
 * bfc_connect() may also return other errnos of socket(2), connect(2) and open(2). bfc_last_error() has a
 * sentence with the details. Outputs are set only when 0 is returned. */
#ifndef BFCCLIENT_H
#define BFCCLIENT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bfc_client bfc_client;

/* How to connect. Zero-initialise, set `struct_size` to sizeof, and fill what you need. NULL: the
 * environment variable (BFC_SOCKET, BFC_PARTITION, BFC_TENANT), else the default. */
struct bfc_options {
        size_t struct_size;
        const char *socket;        /* path; default /run/bfcd/client/bfcd.sock */
        const char *partition;     /* default: the first in which the tenant has a quota */
        const char *tenant;        /* which tenant, if the user matches several */
        const char *name;          /* what bfcctl shows; default: the program's name */
        uint64_t flags;            /* BFC_NO_THREAD, BFC_POLL, BFC_NO_CACHE, BFC_INHERIT */
        const char *trace;         /* file to record into, BFC_TRACE; default, and "": none */
        uint64_t cache_idle_bytes; /* in each partition; 0: the default */
        uint64_t cache_slab_bytes; /* 0: 2 MiB */
        uint32_t return_ms;        /* see below; BFC_RETURN_MS; 0: 30,000 */
        uint32_t unused;           /* 0 */
};

/* If the daemon is restarted and keeps its memory (bfcd(8)), the client resumes its session by itself.
 * Blocks, pointers, names and streams stay valid, and calls that need the daemon take until it is back.
 * bfc_client_stats.num_returns counts this. return_ms is the time-out; after it, or if the daemon
 * refuses, the session ends. For as long bfc_connect() tries again if the daemon hangs up before it answers. */

/* Recording. The lifetimes of the client's blocks, with the requested sizes, are written into `trace`,
 * which bfc-replay reads. An existing file is overwritten. In its name %p becomes the pid, %n a number
 * that is unique among the recording clients of the process, and %% a percent sign. bfc_connect() fails
 * if the file cannot be written (errnos of open(2)), if its name has another % or is no regular file's
 * (-EINVAL), and if another client, of any process, is recording into it (-EBUSY). bfc_disconnect() and
 * exit(3) end the remaining blocks in it. If the process is killed, the file has every completed call. If
 * writing fails later, recording stops, everything else continues, and bfc_disconnect() leaves the reason
 * in bfc_last_error(). */

/* Without the thread that answers the daemon's events. Then the daemon cannot reclaim GPU memory from
 * this client: if it needs such memory, it ends the session. On the host device the flag has no such
 * effect. */
#define BFC_NO_THREAD UINT64_C(1)

/* Every bfc_malloc() and bfc_free() is a request to the daemon; BFC_CACHE=off in the environment does the
 * same. Otherwise the client caches memory of the daemon and divides it: freed memory is kept, up to
 * cache_idle_bytes (by default all of it), for the next bfc_malloc(), or until the daemon asks for it. A
 * request of at most half of cache_slab_bytes is served from a slab of that size. With BFC_NO_THREAD
 * there is no cache unless BFC_CACHE=on or one of the sizes is set, because the daemon cannot ask such a
 * client. */
#define BFC_NO_CACHE UINT64_C(2)

/* Without the thread; the program calls bfc_poll() whenever bfc_poll_fd() is readable, so the daemon can
 * reclaim memory as usual. BFC_NO_THREAD may be set as well. */
#define BFC_POLL UINT64_C(4)

/* Forked children read and write the host blocks that this client has at the time of the fork, by the
 * parent's pointers; BFC_INHERIT=on in the environment does the same, also for bfc_default(). Library
 * calls on the client still return -ECHILD in a child. When the parent frees a block, or calls
 * bfc_disconnect(), the library zeroes it, and children read zeros. They must not use it after that: the
 * memory belongs to the tenant again, and they see the tenant's next block there, until the daemon
 * releases the memory. A child's mapping never gives access to another tenant's memory. The addresses of
 * memory that is mapped after the fork are only reserved in the child, and a published block
 * (bfc_publish) is not zeroed. Without the flag all of the client's addresses are only reserved in a
 * child: an access raises SIGSEGV. On a GPU the flag has no effect, because CUDA does not survive fork(). */
#define BFC_INHERIT UINT64_C(8)

/* Connects to the daemon. options may be NULL. The caller owns *ret_client and ends it with
 * bfc_disconnect(). */
int bfc_connect(const struct bfc_options *options, bfc_client **ret_client);

/* Frees everything and ends the session; every pointer of this client is invalid afterwards. No other
 * thread may be inside a call. Takes NULL. In a forked child it only frees the client structure. */
void bfc_disconnect(bfc_client *client);

/* With BFC_POLL: handles the daemon's events: unmaps memory that the daemon reclaims, and returns idle
 * memory. If the daemon was restarted, resumes the session. Waits only for the daemon's answers. Call it
 * within a tenth of a second after the fd is readable: the daemon does not wait again for a client that
 * misses timeouts.reclaim, until it answers. Any thread may call it, also beside other calls. -EBUSY: the
 * driver refuses to unmap during a capture: call it again soon, whether the fd is readable or not.
 * -EINVAL: a client without BFC_POLL. */
int bfc_poll(bfc_client *client);

/* The fd for poll(2) with POLLIN; it belongs to the library and is valid until bfc_disconnect(). */
int bfc_poll_fd(const bfc_client *client);

/* A block of at least n_bytes in the client's partition, aligned to 256 bytes. On the host device the
 * pointer is ordinary memory, accessible only to processes of the tenant. On a GPU it is a device
 * pointer, valid for kernels and every call of the CUDA runtime; this process must see that GPU. The
 * contents are undefined. The caller owns the block and frees it with bfc_free(). */
int bfc_malloc(bfc_client *client, size_t n_bytes, void **ret_ptr);

/* bfc_malloc() in a named partition. NULL: the client's own. */
int bfc_malloc_in(bfc_client *client, const char *partition, size_t n_bytes, void **ret_ptr);

/* bfc_malloc_in() with flags (0: none). */
#define BFC_ONE_EXTENT UINT64_C(1)
#define BFC_WHOLE      UINT64_C(2)
#define BFC_PARKABLE   UINT64_C(4)
#define BFC_SHAREABLE  UINT64_C(8)
int bfc_malloc_flags(bfc_client *client, const char *partition, size_t n_bytes, uint64_t flags,
                     void **ret_ptr);

/* bfc_malloc() with options. Zero-initialise, set `struct_size` to sizeof, and fill what you need. */
struct bfc_malloc_options {
        size_t struct_size;
        const char *partition; /* by name; NULL: the client's own */
        uint64_t flags;        /* BFC_ONE_EXTENT, BFC_WHOLE, BFC_PARKABLE, BFC_SHAREABLE */
        uint32_t wait_ms;      /* how long to wait for room; at most 10 minutes */
        const char *tag;       /* a label that bfcctl shows; at most 31 bytes, printable ASCII */
        int cancel_fd;         /* interrupts a wait when it is readable; 0: none */
};

/* options: NULL for none. If there is no room, the request waits up to wait_ms; the request that has
 * waited longest is served first. After the wait it is refused as without. A request that waits when the
 * daemon is restarted continues to wait for the rest of its wait_ms.
 *
 * A signal handler that runs in the waiting thread interrupts the wait, with or without SA_RESTART:
 * -EINTR. The request is then removed from the daemon's queue, and nothing is allocated. A signal that
 * arrives just before the wait begins does not interrupt it. cancel_fd closes that gap: the wait is
 * interrupted as soon as the fd is readable, also if it was readable before. Use an eventfd to which the
 * handler writes. The library only polls it. Fd 0 cannot be used, and a negative number is -EINVAL. A
 * wait for a daemon that is being restarted (struct bfc_options) is interrupted in the same way; the
 * session is resumed nevertheless. Calls without a wait_ms are not interrupted.
 *
 * A block with a tag or a flag is a block of the daemon, not a part of a slab. -EINVAL also for a tag
 * that is too long. */
int bfc_malloc_with(bfc_client *client, size_t n_bytes, const struct bfc_malloc_options *options,
                    void **ret_ptr);

/* BFC_ONE_EXTENT: the whole block is in one extent, the smallest memory that the device can share.
 * Registration with NCCL or for RDMA, and other code, fail on a buffer that spans several. In a partition with "share:
 * cuda-ipc" every block is in one extent. With "share: fd" a block of 32 MiB or more, or of more than the tenant's
 * largest extents have (a 256th of its limit or up to twice that; with a limit of 4 GiB or less, up to four
 * times; at least 2 MiB), gets an extent of its own, of its size rounded up to 2 MiB. It is made for the block
 * and returned to the device when the block is freed (while a client without events has it, it stays with the
 * tenant), so each such block costs calls of the device. More than 256 of them that are smaller than the largest
 * extents are in such extents. Of host memory nothing is larger than 1 GiB or the largest extents, and with "growth:
 * preallocate" than the latter: -EINVAL for more, with the sizes in bfc_last_error(). A block may need a new
 * extent where other blocks would fit into the remaining space of several.
 *
 * BFC_WHOLE: the block is a block of the daemon, not a part of a slab, so that bfc_publish() can share
 * it.
 *
 * BFC_PARKABLE: the block can be parked. It gets extents of its own, which are charged whole. In partitions with "growth:
 * on-demand", of host memory or of a GPU with "share: fd", not with BFC_NO_THREAD alone; -ENOTSUP elsewhere. With
 * BFC_ONE_EXTENT the block has one extent whenever it is awake, which must be its own, as above: any other, as most with
 * less than 32 MiB, is refused with -ENOTSUP. */

/* BFC_SHAREABLE, with BFC_ONE_EXTENT: where the block gets an extent of its own, bfc_extent_fd() gives fds of it. The
 * client keeps one open until the block is freed. -EINVAL without BFC_ONE_EXTENT. */

/* An fd of a block's extent, close-on-exec, which the caller closes. On a GPU it is the driver's, as of
 * cuMemExportToShareableHandle(): any process can import it by cuMemImportFromShareableHandle(), also without this library.
 * Memory that a process still has when the block is freed stays charged to the tenant until it is gone.
 *
 * -EINVAL: not a block of this client. -ENOTSUP: not one of a GPU with BFC_SHAREABLE and an extent of its own. -EMFILE. */
int bfc_extent_fd(bfc_client *client, const void *ptr, int *ret_fd);

/* Parks a block of bfc_malloc_flags() with BFC_PARKABLE: its memory is released and no longer charged, and its
 * address stays reserved. Until bfc_wake() any access to the block raises SIGSEGV, bfc_read() and bfc_write()
 * fail with -EBUSY, and it can only be woken or freed.
 *
 * BFC_BACKUP: the contents are copied to the partition with this name, which must be host memory; the copy is a
 * block of this client there. BFC_DISCARD: the contents are lost, and the block is zero after bfc_wake();
 * `partition` is ignored.
 *
 * No other thread or process may use the block meanwhile, also no forked child (BFC_INHERIT). On a GPU the call
 * waits for the work of this process as bfc_free() does; -EBUSY while a known stream is being captured. Graphs that
 * use the block stay valid, and may be launched while it is awake. The daemon copies in the background; the call
 * returns when the copy is complete. If it fails, the block is as before. With BFC_POLL the memory of a GPU is
 * released by a later bfc_poll().
 *
 * A shared block is parked when all processes that have it have called this (64 at most; else -EBUSY). Before that
 * the call only says that this process does not use the block until it wakes it: it returns 0, the block is unmapped here,
 * and the memory stays for the others, who may change the contents. The last one's call copies, to its partition;
 * if there is no room, that call fails. If the last process that has not called it detaches the block or ends, the
 * daemon copies to the partition of the latest call; without room there the memory stays. bfc_usage() says what is
 * really parked. BFC_DISCARD is -EINVAL. Any of them can wake it; each wakes it for itself. bfc_attach() of a parked
 * block wakes it, and waits for room for its wait_ms; a kept block (bfc_publish_with) may stay parked without any process.
 *
 * -EINVAL: not such a block, or `partition` is on a GPU, or the block's own. -EALREADY: it is parked. -EBUSY: it is in
 * use, also by a bfc_read() or bfc_write(). -EDQUOT, -ENOMEM: no room for the copy; or the tenant's parked blocks would exceed four
 * times its limit. -ENOENT: no such partition. */
#define BFC_BACKUP  1u
#define BFC_DISCARD 2u
int bfc_park(bfc_client *client, void *ptr, unsigned how, const char *partition);

/* Wakes a parked block: gets new memory at the same address, copies the contents back and frees the copy. It
 * waits for room as an allocation with this wait_ms does. If there is none (-EDQUOT, -ENOMEM), or the memory
 * from which the block was parked has not been released yet (-EBUSY), the block stays parked. A signal handler that
 * runs in the waiting thread interrupts the wait (-EINTR), also in the functions below that wait; what woke stays
 * awake. A block that is not parked is left as it is. -EINVAL: as above. -EIO: the copy was lost with its partition. */
int bfc_wake(bfc_client *client, void *ptr, uint32_t wait_ms);

/* bfc_park() and bfc_wake() for all blocks of this client that were allocated with BFC_PARKABLE and this tag
 * (bfc_malloc_with()); NULL: all with BFC_PARKABLE. Blocks that are parked, or awake, already stay so. There may be
 * none.
 *
 * Blocks that were attached have the tag of their publisher.
 *
 * bfc_park_tag() parks the blocks one by one. It returns -EBUSY if one was in use, and the others are parked. With
 * another error it ends at once, and the blocks that it parked stay parked.
 *
 * bfc_wake_tag() asks for all of them at once, and up to 64 blocks in a partition wait until there is room for all
 * of them: so jobs that wake many blocks take turns, and do not get a part of their blocks each. It returns an error
 * of one of them. Blocks that woke stay awake. Where the limit can never have all, some are refused at once. */
int bfc_park_tag(bfc_client *client, const char *tag, unsigned how, const char *partition);
int bfc_wake_tag(bfc_client *client, const char *tag, uint32_t wait_ms);

/* Uses of parkable blocks. A block in use is not parked: bfc_park() fails with -EBUSY. bfc_use_begin() wakes the
 * block if it is parked, waiting as bfc_wake() does, and counts a use. Each needs one bfc_use_end(). Any thread may
 * call them: while a thread parks or wakes the block, another waits for the result; only if that one waits for
 * room, for at most its own wait_ms, and then fails with -EBUSY. After a failure the use is not counted.
 * bfc_use_end() of a block that is not in use is -EINVAL.
 *
 * The _tag functions do it for all blocks with the tag, as above. bfc_use_begin_tag() counts a use of each, or
 * after a failure of none; blocks that woke stay awake. Without such blocks both return 0. bfc_use_end_tag() ends one use of each that is in use. */
int bfc_use_begin(bfc_client *client, void *ptr, uint32_t wait_ms);
int bfc_use_end(bfc_client *client, void *ptr);
int bfc_use_begin_tag(bfc_client *client, const char *tag, uint32_t wait_ms);
int bfc_use_end_tag(bfc_client *client, const char *tag);

/* The daemon asks this client for memory that others wait for: the function is called with the partition and the
 * bytes that are wanted. It may call any function of the library: free blocks, park or wake them, call bfc_trim(). Its
 * bfc_disconnect() takes effect when it has returned; with BFC_POLL it must not call that. What the cache holds idle afterwards is returned to the daemon. If the config says so (`park:`
 * in bfcd.yaml(5)), parkable blocks that were not used for a while are parked then, until the bytes are reached.
 *
 * The function is called on a thread of the library, "bfc-park", with all signals blocked; with BFC_POLL by
 * bfc_poll(). One call at a time, and again, several times a second, while requests wait. If it does not return, the client is no longer asked, and bfc_disconnect() waits
 * for it.
 *
 * fn: NULL for none. pressure: valid during the call. A later call of bfc_on_pressure() replaces function and userdata;
 * when it returns, the one before is not running any more, unless it made this call. -EINVAL: the client takes no
 * events (BFC_NO_THREAD without BFC_POLL). */
struct bfc_pressure {
        size_t struct_size;
        const char *partition;
        uint64_t n_bytes; /* wanted */
};
typedef void (*bfc_pressure_fn)(void *userdata, const struct bfc_pressure *pressure);
int bfc_on_pressure(bfc_client *client, bfc_pressure_fn fn, void *userdata);

/* Frees a block. ptr: as bfc_malloc() returned it; NULL does nothing. -EINVAL for anything else, also for
 * a second free. On a GPU it waits, as cudaFree does, for all work that this process has queued on the
 * device.
 *
 * Waiting would invalidate the capture of a stream. So the client first checks the default stream, which
 * covers all streams that synchronize with it. Other streams cannot be checked: a stream counts as being
 * captured if it was when a call last named it. If one is being captured the block is put aside: the
 * pointer is invalid, and the memory is reused after the capture and all work (by bfc_trim(), or when
 * memory is short). A capture that no call has seen is invalidated, as by cudaFree.
 *
 * -EBUSY: a stream is being captured, and the block is shared, or there is no memory to put it aside.
 * -ENOMEM, -EIO: the driver failed to wait. In all three cases the block stays allocated. */
int bfc_free(bfc_client *client, void *ptr);

/* Frees a block without a wait, also during captures: no work that is queued uses the block, nor does a graph. Also
 * for shared blocks. A block that the call could not free stays allocated. */
int bfc_free_unused(bfc_client *client, void *ptr);

/* Copies n_bytes between this process's memory and a block, on any device. ptr: the block's address or a
 * place inside it; -EINVAL: not all of the bytes are in one block of this client. The copy is complete on
 * return. On a GPU it waits as cudaMemcpy does, and fails with -EBUSY while a stream for which it would
 * have to wait is being captured. Do not free the block meanwhile. 0 bytes do nothing. */
int bfc_write(bfc_client *client, void *ptr, const void *src, size_t n_bytes);
int bfc_read(bfc_client *client, void *dst, const void *ptr, size_t n_bytes);

/* Shared blocks: one copy of a large object, such as a model's weights, for many processes of a tenant.
 * One process publishes a block under a name; others attach it by that name, and all read and write the
 * same memory. The block is freed when the last process with a reference drops it or ends; the publisher
 * is one of them. It is charged to the tenant once and is not part of any session's usage (bfcctl shared
 * lists it; bfc_stats() of each process counts it). No other tenant can attach it or learn that it
 * exists. Publish after writing: processes must synchronize later writes themselves.
 *
 * Names belong to the tenant, in all its partitions: 1 to 63 bytes of printable ASCII. A name is free
 * again when its block is freed. */

/* ptr: a block of bfc_malloc_flags() with BFC_WHOLE, or any block that is not a part of a larger one. The
 * process continues to use it, and drops its reference by bfc_detach() or bfc_free(). -EEXIST: the tenant
 * has a shared block of that name. -EINVAL: an invalid name, not such a block, or shared already.
 * -EBUSY: it is parked. -EDQUOT: the process has 1,024 shared blocks. */
int bfc_publish(bfc_client *client, void *ptr, const char *name);

/* Options of bfc_publish_with(): zero-initialise them, set `struct_size` to sizeof, fill what you need. */
#define BFC_KEEP_FOREVER UINT64_MAX
struct bfc_publish_options {
        size_t struct_size;
        uint64_t keep_ms;        /* how long the block stays after its last reference; 0: not at all */
        const void *metadata;    /* for processes that attach the block; NULL: none */
        size_t n_metadata_bytes; /* at most 4,096 */
};

/* bfc_publish() with options (NULL: none). A kept block stays after its last reference: for keep_ms, or with
 * BFC_KEEP_FOREVER until bfc_forget(). It survives the end of its publisher and restarts of the daemon. It stays
 * charged to the tenant, and no request reclaims it. It is freed early if the tenant loses its quota or the
 * device is drained. -EINVAL also: too much metadata. -EDQUOT also: the tenant has 256 shared blocks that are
 * kept or have metadata. */
int bfc_publish_with(bfc_client *client, void *ptr, const char *name,
                     const struct bfc_publish_options *options);

/* Attaches the block, or waits until the name is published, at most wait_ms (10 minutes at most; 0: does
 * not wait). The pointer is valid for all calls on blocks, such as bfc_write() and bfc_block_info(); it
 * differs between processes. A second attach in the same process returns the same pointer, and needs a
 * second bfc_detach(). ret_n_bytes: the size that the publisher requested; may be NULL. A signal
 * interrupts the wait as in bfc_malloc_with(). -ENOENT: there is no such name. -ETIMEDOUT: it was not
 * published in time. -EINVAL: an invalid name. -EDQUOT: as bfc_publish(), or too many sessions in that
 * partition. -ENODEV: it is on a device that this process does not see, or that is lost. */
int bfc_attach(bfc_client *client, const char *name, uint32_t wait_ms, void **ret_ptr, size_t *ret_n_bytes);

/* bfc_attach() with options: zero-initialise, set `struct_size` to sizeof, and fill what you need. NULL:
 * does not wait. -EINVAL also if cancel_fd is below 0. */
struct bfc_attach_options {
        size_t struct_size;
        uint32_t wait_ms;
        int cancel_fd;  /* interrupts the wait when it is readable; 0: none; see bfc_malloc_with() */
        uint64_t flags; /* BFC_ATTACH_READ_ONLY; programs built without this member have none */
};

/* BFC_ATTACH_READ_ONLY: this client gets no write access to the block. On the host the memory is mapped from a
 * file descriptor without write access, so mprotect() cannot change that, and a process of another user than the
 * daemon's cannot open it again for writing. On a GPU the library maps it without write access, and trusts this
 * process. bfc_write() fails with -EACCES. Memory is shared in extents, which blocks have in common: while a client
 * has a block read-only, a block in the same extents is refused with -EBUSY. So use a client of its own for
 * blocks that are only read. -EBUSY: this client has, or had, write access to the same extents, as a publisher has.
 * -ENOTSUP: the partition has "share: cuda-ipc". */
#define BFC_ATTACH_READ_ONLY UINT64_C(1)
int bfc_attach_with(bfc_client *client, const char *name, const struct bfc_attach_options *options,
                    void **ret_ptr, size_t *ret_n_bytes);

/* Drops one reference to a shared block; bfc_free() does the same. For the last reference of this process
 * it waits for the process's work on a GPU as bfc_free() does, and may fail like it: then the reference
 * stays. NULL does nothing. -EINVAL: not a shared block of this client. */
int bfc_detach(bfc_client *client, void *ptr);

/* Copies the metadata of a shared block of this client, as much as the buffer holds; 4,096 bytes hold all.
 * *ret_n_bytes: how much there is; 0: none. buffer: may be NULL if n_buffer_bytes is 0. -EINVAL: ptr is not a
 * shared block of this client. */
int bfc_shared_metadata(bfc_client *client, void *ptr, void *buffer, size_t n_buffer_bytes,
                        size_t *ret_n_bytes);

/* A shared block of the tenant. Later versions may add members at the end: struct_size tells. The texts are
 * valid during the call of the function that gets it. */
struct bfc_shared_info {
        size_t struct_size;
        const char *name;
        const char *partition;
        uint64_t n_bytes;        /* as its publisher asked for it */
        uint64_t num_references; /* processes that have it */
        uint64_t keep_ms;        /* as published, or 0 after bfc_forget() */
        uint64_t left_ms;        /* without references: the remaining time; BFC_KEEP_FOREVER: no end */
        uint64_t n_metadata_bytes;
};
typedef int (*bfc_shared_fn)(void *userdata, const struct bfc_shared_info *info);

/* Calls fn for each shared block of the tenant, in no order. Asks the daemon in pages, so a block that is
 * published or freed meanwhile may be missing. fn may call functions of the library. What fn returns ends the
 * list and is returned, unless it is 0. */
int bfc_list_shared(bfc_client *client, bfc_shared_fn fn, void *userdata);

/* Ends the keeping of the tenant's block of this name: it is freed now if no process has it, else with its last
 * reference. -ENOENT: there is no such block. */
int bfc_forget(bfc_client *client, const char *name);

/* ---- streams ----
 *
 * Memory in the order of a stream's work. Memory freed on a stream is reused there at once, because later
 * work of the stream runs after the free; it is reused elsewhere when the work that may access it is
 * complete, and no call waits. `stream` is a cudaStream_t as a number; 0, 1 and 2 (CUDA's legacy default
 * stream, and the per-thread one) are streams too. It must be a stream of the partition's device, in the
 * primary context, which the runtime API uses. On the host device it is any number, and no stream has
 * work.
 *
 * End of streams. The library uses a stream only during a call that names it, so a program may destroy it at
 * any time after the call, but must not name a destroyed one: a driver ends the process for that. Call
 * bfc_end_stream() before you destroy a stream that was named in any of these calls. Otherwise memory that
 * the stream used may be reused elsewhere only when the library has waited for all work of the process on
 * the device: in bfc_trim(), or when memory is short. Drivers before CUDA 12.0 cannot tell a new stream with the
 * same handle from the old one: without bfc_end_stream() two streams may then use the same memory at the
 * same time. Streams that were named in the calls of PyTorch (below) must be ended.
 *
 * Captures. Work captured from a stream runs at each launch of the graph: do not free its memory while
 * the graph may be launched. During the capture no event is recorded in the stream, so memory freed then is
 * reused elsewhere after the capture. The library sees the end of a capture at the next call that names the
 * stream, in bfc_end_stream(), or 10 seconds after the last such call. Until then no memory is free by waiting
 * for all work.
 *
 * Failures. If the device is lost, or this process's context is broken, none of its work continues, and
 * its freed memory is free. */

/* A block of at least n_bytes for work in this stream; otherwise like bfc_malloc(). If there is no room
 * and other streams have freed memory whose work is not complete, it waits for that work, at most 2
 * seconds, or for all work (see above). -EINVAL also if it is no stream of the device. */
int bfc_malloc_async(bfc_client *client, size_t n_bytes, uintptr_t stream, void **ret_ptr);
int bfc_malloc_async_in(bfc_client *client, const char *partition, size_t n_bytes, uintptr_t stream,
                        void **ret_ptr);

/* Frees a block after the work that is queued on the stream so far; does not wait. ptr: from
 * bfc_malloc_async() or bfc_malloc(), not shared. The stream may differ from the one of the allocation.
 * All work with the block, in any stream, must be ordered before this point, or that stream be named by
 * bfc_record_stream(). -EINVAL and -ENOMEM: the block stays allocated. bfc_free() accepts such blocks
 * too, and waits as usual. */
int bfc_free_async(bfc_client *client, void *ptr, uintptr_t stream);

/* Work in this stream uses the block too, until it is freed. After the free, its memory is not reused
 * until the work queued on this stream at that time is complete, which is seen when a later call names the
 * stream, or all work has been waited for. ptr: from bfc_malloc_async(). -EINVAL
 * also for stream 2 of a GPU. */
int bfc_record_stream(bfc_client *client, void *ptr, uintptr_t stream);

/* Call it before you destroy a stream that was named in one of these calls, after its last work was
 * queued. The library does not use the handle after this, and CUDA may reuse it. Remaining blocks stay
 * valid and are freed on other streams; memory that the stream's work still uses is not reused before
 * that work is complete. Does not wait. -EBUSY: the stream is being captured. -ENOMEM: no event could be
 * created. In both cases it has not ended. Streams 0, 1 and 2 are never destroyed and need no end. */
int bfc_end_stream(bfc_client *client, uintptr_t stream);

/* Statistics of one stream of a partition (NULL: the client's own). All are 0 for an unknown stream; one
 * without memory for a long time may be forgotten. `struct_size` as in bfc_options. */
struct bfc_stream_stats {
        size_t struct_size;
        uint64_t num_allocs;
        uint64_t num_frees;
        uint64_t bytes_in_use;
        uint64_t peak_bytes_in_use;
        uint64_t bytes_reserved; /* in use, free for its next work, or pending */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_pending; /* freed, while another stream's work is not complete */
        uint64_t largest_alloc_size;
};
int bfc_stats_stream(bfc_client *client, const char *partition, uintptr_t stream,
                     struct bfc_stream_stats *ret);

/* A pool: one block that is divided into pieces and emptied as a whole, for the temporary memory of a
 * step. */
typedef struct bfc_pool bfc_pool;

/* A pool of n_bytes, rounded up to 256, in the client's partition: one block, so it fails as bfc_malloc()
 * does. The caller owns *ret_pool and ends it with bfc_pool_free() before bfc_disconnect(). */
int bfc_pool_new(bfc_client *client, size_t n_bytes, bfc_pool **ret_pool);

/* A piece of at least n_bytes, rounded up and aligned to 256 bytes. No system call, no lock; any threads
 * at the same time. The piece belongs to the pool and is valid until bfc_pool_reset() or bfc_pool_free();
 * do not pass it to bfc_free(). The contents are undefined. -ENOMEM: the pool has no room for it. */
int bfc_pool_alloc(bfc_pool *pool, size_t n_bytes, void **ret_ptr);

/* Empties the pool: all pieces are invalid. No other thread may be inside a call on this pool. Does not
 * wait, also on a GPU: the caller must ensure that work with the old pieces is complete before work with
 * new ones begins. On one stream the order ensures that; between streams use an event or a wait. */
int bfc_pool_reset(bfc_pool *pool);

/* Frees the block as bfc_free() does: on a GPU it waits for all work of this process there, except during
 * a capture, and can fail with -EBUSY, -ENOMEM or -EIO; then the pool stays valid. After any other result
 * the pool is gone. No other thread may be inside a call on this pool. NULL does nothing. */
int bfc_pool_free(bfc_pool *pool);

/* Statistics of this client, named as in TensorFlow's AllocatorStats. `struct_size` as in bfc_options. */
struct bfc_client_stats {
        size_t struct_size;
        uint64_t num_allocs;
        uint64_t num_frees;
        uint64_t num_blocks;
        uint64_t num_failures; /* failed calls of bfc_malloc(), for any reason */
        uint64_t bytes_in_use; /* block bytes, rounded up to 256 */
        uint64_t peak_bytes_in_use;
        uint64_t bytes_requested;
        uint64_t largest_alloc_size;
        uint64_t bytes_mapped;   /* of extents mapped in this process */
        uint64_t bytes_reserved; /* memory from the daemon: in use or idle */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_idle;   /* == bytes_reserved - bytes_in_use */
        uint64_t num_calls;    /* requests to the daemon, of any kind */
        uint64_t num_returns;  /* resumptions of the session after a restart of the daemon */
        uint64_t bytes_direct; /* charged by bfc_charge(); not in the others */
};
int bfc_stats(bfc_client *client, struct bfc_client_stats *ret);

/* Statistics of one partition (NULL: the client's own). Each peak is the partition's own: the sum of the
 * partitions' peaks may exceed the peak of bfc_stats(). num_calls and num_returns are those of the whole
 * client. -ENOENT: there is no such partition. */
int bfc_stats_in(bfc_client *client, const char *partition, struct bfc_client_stats *ret);

/* Resets the peaks of the client, its partitions and streams to the current values. */
int bfc_reset_peaks(bfc_client *client);

/* Returns idle memory to the daemon: idle slabs, the longest idle first, and then whole extents without a
 * block inside slabs in use, until n_bytes are returned or none is left. SIZE_MAX: all.
 *
 * The daemon then releases extents of the tenant without a block to the device, as many bytes in each
 * partition. The call waits until that is done, at most 10 seconds. So after bfc_trim(client, SIZE_MAX)
 * only extents with live blocks are reserved, except those that the partition preallocates, and
 * those that a session with BFC_NO_THREAD or an unresponsive one has mapped. */
int bfc_trim(bfc_client *client, size_t n_bytes);

/* Usage and limit of the client's tenant in a partition (NULL: the client's own), over all sessions of
 * the tenant. Read from a page that the daemon shares: no system call, no lock, about 20 ns. The values
 * are a consistent snapshot and include every change whose call has returned in any process. If the page
 * is not available, or the daemon writes it again and again, the daemon is asked. After the daemon's end
 * -ECONNRESET; with BFC_NO_THREAD only after another call has failed. */
struct bfc_tenant_usage {
        size_t struct_size;
        uint64_t bytes_limit;    /* extents: the tenant's limit */
        uint64_t bytes_reserved; /* charged now: extents, and by bfc_charge() */
        uint64_t peak_bytes_reserved;
        uint64_t bytes_in_use; /* blocks */
        uint64_t peak_bytes_in_use;
        uint64_t bytes_requested; /* blocks, as requested */
        uint64_t num_blocks;
        uint64_t num_sessions;
        uint64_t largest_free_block_bytes;
        uint64_t lifetime_peak_bytes_in_use; /* not changed by resets */
        uint64_t lifetime_peak_bytes_reserved;
        uint64_t bytes_direct; /* of bytes_reserved: charged by bfc_charge() */
};
int bfc_usage(bfc_client *client, const char *partition, struct bfc_tenant_usage *ret);

/* How much this client can still get in a partition (NULL: the client's own), and the most that the
 * tenant may have there: its limit, or the partition's if that is lower. Asks the daemon. Free is the sum
 * of:
 *   - idle memory of this client's cache, except memory that a stream keeps for itself;
 *   - free space in the tenant's extents;
 *   - new extents, as far as both limits have room beside the other tenants' guarantees, counting
 *     memory that is being released as free, without what waiting requests claim.
 *
 * Blocks of that total size can be allocated if no other process allocates. A single block can be that
 * large if the free space is contiguous, as it is for a client without blocks; otherwise it may be
 * refused below that size. A request can also get more, since it reclaims idle memory of other sessions
 * and tenants. 0 while the device is drained or lost. */
int bfc_mem_get_info(bfc_client *client, const char *partition, size_t *ret_free_bytes,
                     size_t *ret_total_bytes);

/* Direct charges: memory of the partition's device that this process takes by other means than bfcd, for example from the
 * driver, counts against the tenant's limit there as blocks do. Call bfc_charge() before you take the memory, and
 * bfc_uncharge() after you returned it; n_bytes need not be the same, only the sum is kept. partition: NULL is the
 * client's own.
 *
 * If there is no room, the request waits up to wait_ms, in the same queue as blocks, and idle memory is reclaimed for it. A
 * signal handler that runs in the waiting thread interrupts the wait: -EINTR, and nothing is charged. Errors as of
 * bfc_malloc_with(). -ENOTSUP: the daemon is of an earlier release. In a partition
 * with "growth: preallocate", too, whose blocks have all of the limit. -EDQUOT also: charges in more than 16 partitions.
 * bfc_uncharge() -EINVAL: this client has not charged as many bytes there.
 *
 * A charge survives a restart of the daemon. What is not uncharged ends with the process: bfc_disconnect() and a lost
 * connection do not end it, because the memory is not the daemon's. After an error that ended the session, such as
 * -ECONNRESET, the charge stays as well, unless the daemon was restarted without its state. A forked child has
 * no charges; those of its parent end with the parent. */
int bfc_charge(bfc_client *client, const char *partition, size_t n_bytes, uint32_t wait_ms);
int bfc_uncharge(bfc_client *client, const char *partition, size_t n_bytes);

/* Tells how much of this client's charges in the partition are CUDA contexts, for bfcctl(1) to show: the sum of all n_bytes,
 * which are negative for contexts that ended. Call it after bfc_charge() and before bfc_uncharge(). No limit depends on
 * it. partition: NULL is the client's own. -EINVAL: the sum would be negative, or more than is charged. Other errors
 * as of bfc_uncharge(). */
int bfc_add_contexts(bfc_client *client, const char *partition, int64_t n_bytes);

/* Tells how much memory of the partition's device this process has by other means than bfcd, and does not charge, for bfcctl(1) to show:
 * the sum of all n_bytes, which are negative for memory that is freed. No limit depends on it. partition: NULL is the
 * client's own. No system call. -ENOENT: there is no such partition. */
int bfc_add_outside(bfc_client *client, const char *partition, int64_t n_bytes);

/* Gives CUDA device `peer` access to this client's memory on CUDA device `device`, both as this process counts them, until
 * bfc_disconnect(): what it has, and what it gets later. cuCtxEnablePeerAccess() and cudaDeviceEnablePeerAccess() do not, with
 * "share: fd", because this memory is not the driver's own allocation; with "share: cuda-ipc" the driver gives access by
 * itself. Under the proxy of the driver (docs/preload.md) both calls, and cuMemPoolSetAccess(), do this. The functions for
 * frameworks below give it to all GPUs whose memory they are asked for. -ENOTSUP: the GPUs do not reach each other, or
 * the driver refuses; a later allocation can fail in the same way. -ENOENT: there is no such GPU. */
int bfc_enable_peer_access(bfc_client *client, int device, int peer);

/* How extents are shared, in struct bfc_block_info. */
#define BFC_SHARE_FD       1u /* by an fd, which the library closes after mapping it */
#define BFC_SHARE_CUDA_IPC 2u /* by a handle */

/* Where a block is, for code that shares it by other means: another process of the tenant opens the whole
 * extent by cudaIpcOpenMemHandle() with the handle, and the block begins extent_offset after the start of
 * that mapping. This process already has it open. Never pass a handle to another tenant's process. */
struct bfc_block_info {
        size_t struct_size;
        uint64_t block_id; /* the daemon's identifier */
        uint64_t region_id;
        uint64_t offset;  /* in the region */
        uint64_t n_bytes; /* rounded up */
        uint64_t n_requested;
        uint64_t share;             /* BFC_SHARE_FD, BFC_SHARE_CUDA_IPC */
        uint64_t extent_bytes;      /* of the extent in which the block begins */
        uint64_t extent_offset;     /* of the block in that extent */
        unsigned char handle[64];   /* the extent's cudaIpcMemHandle_t; zeros with BFC_SHARE_FD */
        uint64_t block_offset;      /* in the daemon's block; the block may continue in the next one */
        void *base;                 /* the address of the block, which has n_bytes */
        const char *partition;      /* its name; valid until bfc_disconnect(), like the next */
        const char *device;         /* as in the daemon's configuration: "host", "cuda:0" */
        int64_t device_ordinal;     /* the GPU's number in this process, as CUDA counts; -1: the host */
        char device_uuid[48];       /* "GPU-" and the UUID, as nvidia-smi prints it; of the host "host" */
        uint64_t is_parked;         /* 1: by bfc_park(), or at the daemon's request; the address faults */
        uint64_t ptr_extent_bytes;  /* of the extent in which `ptr` itself is; 0: the block is parked */
        uint64_t ptr_extent_offset; /* of `ptr` in that extent */
};

/* ptr: any address inside a block; -EINVAL otherwise. The first call with an address other than a block's
 * start builds an index of the client's blocks. From then on such a call takes logarithmic time, and each
 * bfc_malloc() and bfc_free() maintains the index. */
int bfc_block_info(bfc_client *client, const void *ptr, struct bfc_block_info *ret);

/* The client's tenant, and the partition of bfc_malloc(). Valid until bfc_disconnect(). */
const char *bfc_tenant(const bfc_client *client);
const char *bfc_partition(const bfc_client *client);

/* A partition in which the tenant has a quota. Zero-initialise it, and set `struct_size` to sizeof. */
struct bfc_partition_info {
        size_t struct_size;
        const char *partition;  /* its name; like the next one valid until bfc_disconnect() */
        const char *device;     /* as the daemon's configuration names it: "host", "cuda:0" */
        int64_t device_ordinal; /* the GPU's CUDA device number in this process; -1: the host, or a GPU that
                                 * this process does not see */
        uint64_t share;         /* BFC_SHARE_FD, BFC_SHARE_CUDA_IPC */
        char device_uuid[48];   /* "GPU-" and the UUID, as nvidia-smi prints it; "host" for the host */
        uint64_t is_pinned;     /* 1: host memory that is registered with CUDA in processes that use it */
        uint64_t bytes_pinned; /* registered in this process now. 0: CUDA is not in use here, or it refused */
        /* Of a GPU: what a process that charges its CUDA contexts (the proxy of libcuda does) charges for one that cannot be
         * measured. BFC_NO_CONTEXTS: none is to be charged. */
        uint64_t context_bytes;
};

#define BFC_NO_CONTEXTS UINT64_MAX

/* index: from 0 on, in the order of the tenant's quotas. -ENOENT: there are no more partitions. */
int bfc_partition_info(bfc_client *client, size_t index, struct bfc_partition_info *ret);

/* The partition on the GPU that this process knows as CUDA device `ordinal` (CUDA_VISIBLE_DEVICES is
 * respected): the first one, in the order of the tenant's quotas. -ENOENT: there is no such GPU, or no
 * such partition. The name is valid until bfc_disconnect(); pass it to bfc_malloc_in(). */
int bfc_partition_for_device(bfc_client *client, int ordinal, const char **ret_name);

/* The partition on the GPU with this UUID, as nvidia-smi prints it, "GPU-..." or "MIG-...": the client's own
 * partition if it is on that GPU, else the first one. Does not ask the driver. -ENOENT: the tenant has no quota on
 * such a GPU. */
int bfc_partition_for_uuid(bfc_client *client, const char *uuid, const char **ret_name);

/* The client of the whole process, made from the environment at the first call in any thread. It belongs
 * to the library and ends with the process: never bfc_disconnect() it. Fails as bfc_connect() does, and
 * the next call tries again. A forked child gets its own at its first call; the parent's returns -ECHILD
 * there. */
int bfc_default(bfc_client **ret_client);

/* As bfc_default(), and connects with these options if the process has no client yet. */
int bfc_default_with(const struct bfc_options *options, bfc_client **ret_client);

/* Allocators for PyTorch (torch.cuda.memory.CUDAPluggableAllocator) and CuPy
 * (cupy.cuda.memory.CFunctionAllocator), which load them by name; they use bfc_default().
 * docs/frameworks.md shows how. Any thread.
 *
 * Memory comes from the partition on CUDA device `device` of this process, see
 * bfc_partition_for_device(); in a process that sees no GPU at all, from the client's own partition. A
 * failure returns NULL, also for a GPU on which the tenant has no quota, and prints a sentence to stderr,
 * once for each errno. 0 bytes are NULL.
 *
 * PyTorch's are bfc_malloc_async() and bfc_free_async() on the stream that PyTorch passes. The use of a
 * tensor in other streams must be declared by bfc_torch_record_stream(), which Tensor.record_stream()
 * calls if it was set. While a stream that was named is being captured, a free keeps the block until the
 * process ends, because the graph may use it at each launch. PyTorch's own streams are never destroyed, so
 * the driver may be asked about these streams at any time. Call bfc_end_stream() before you destroy
 * another one (torch.cuda.ExternalStream): the driver may end the process otherwise.
 *
 * CuPy passes no stream: its free is a bfc_free(), which on a GPU waits for all work of this process
 * there, and keeps the block during a known capture. NULL does nothing, and nothing is freed in a forked
 * child that has allocated nothing itself. The size at a free and `param` are ignored.
 *
 * BFC_WAIT_MS: how many milliseconds an allocation waits for memory, as in bfc_malloc_with(). A signal
 * interrupts the wait.
 *
 * The functions with _one_extent allocate with BFC_ONE_EXTENT, which buffers need that are registered with NCCL. */
struct CUstream_st;
void *bfc_torch_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream);
void *bfc_torch_malloc_one_extent(ssize_t n_bytes, int device, struct CUstream_st *stream);
void bfc_torch_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream);
void bfc_torch_record_stream(void *ptr, struct CUstream_st *stream);
/* For a torch.cuda.MemPool, whose cache waits for all work with a block before it frees it: without the
 * order of a stream, so freed memory is available to the tenant at once. */
void *bfc_torch_pool_malloc(ssize_t n_bytes, int device, struct CUstream_st *stream);
void *bfc_torch_pool_malloc_one_extent(ssize_t n_bytes, int device, struct CUstream_st *stream);
void bfc_torch_pool_free(void *ptr, ssize_t n_bytes, int device, struct CUstream_st *stream);
/* Between these calls, of the same thread, bfc_torch_pool_free() only notes the blocks. The second call frees them, with
 * one wait for the device instead of one each: for torch.cuda.empty_cache(). */
void bfc_torch_pool_free_begin(void);
void bfc_torch_pool_free_end(void);
/* Allocators for pools that are parked and woken as a whole. PyTorch's functions get no argument of their pool, so
 * each pool has one of its own, by its number `slot`: it allocates blocks with BFC_PARKABLE and this tag, which is
 * copied and can be changed by another call. Free them by bfc_torch_pool_free(). NULL: the slot or the tag is
 * invalid. */
#define BFC_TORCH_PARKABLE_POOLS 32u
typedef void *(*bfc_torch_malloc_fn)(ssize_t n_bytes, int device, struct CUstream_st *stream);
bfc_torch_malloc_fn bfc_torch_pool_malloc_parkable(unsigned slot, const char *tag);
void *bfc_cupy_malloc(void *param, size_t n_bytes, int device);
void bfc_cupy_free(void *param, void *ptr, int device);

/* A sentence about the last failure in the calling thread, of any client; "" if there was none. Valid
 * until the thread's next call. */
const char *bfc_last_error(void);

/* The library's version, as "1.2.3". */
const char *bfc_version(void);

#ifdef __cplusplus
}
#endif
#endif
