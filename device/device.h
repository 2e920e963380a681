/* A device makes, shares, opens and destroys extents.
 *
 * An extent is memory that the device can share only as a whole. Backends are const function tables:
 * host.c (sealed memfds), and cuda.c with cuda_range.c. The daemon's side makes and destroys extents; the
 * client's side reserves a region's address space and maps extents into it. Calls of the daemon's side
 * take milliseconds, so they run on a worker, never on an event loop. They are thread-safe for different
 * extents. No policy, no log.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_DEVICE_H
#define BFC_DEVICE_DEVICE_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the daemon's side --------------------------------------------------- */

struct device;

/* How an extent is shared with clients. */
enum device_share {
        DEVICE_SHARE_FD,       /* by a file descriptor; mapped at any address */
        DEVICE_SHARE_CUDA_IPC, /* by a cudaIpcMemHandle_t; the driver chooses the address */
};

/* How host memory is made; ignored for a GPU. */
struct device_supply {
        bool is_bound; /* to this NUMA node */
        uint32_t node;
        void (*collapse)(int fd, uint64_t n_bytes); /* as host_pages_collapse(), in less time; NULL: that */
};

#define DEVICE_MAKES        8u
#define DEVICE_HANDLE_BYTES 64u
#define DEVICE_UUID_BYTES   16u

/* An extent as its device made it, or as a client received it (then without `native`). Empty: n_bytes 0,
 * fd -1. */
struct device_extent {
        int fd; /* the shared fd, owned; -1 if a handle is shared */
        enum device_share share;
        uint8_t handle[DEVICE_HANDLE_BYTES]; /* DEVICE_SHARE_CUDA_IPC */
        uint64_t n_bytes;
        uint64_t native;     /* the backend's own identifier of the memory */
        uint64_t huge_bytes; /* host: bytes made in pages of 2 MiB */
        bool is_read_only;   /* in a client: it is mapped without write access */
        bool clears;         /* destroy() zeroes it before the release, for devices that may not do so */
        bool was_lent;       /* other processes may have it: destroy() looks whether they do */
};
#define DEVICE_EXTENT_EMPTY ((struct device_extent){ .fd = -1 })

static inline bool device_extent_is_made(const struct device_extent *e)
{
        return e->fd >= 0 || e->native != 0;
}

static inline uint64_t device_extents_bytes(const struct device_extent *extents, size_t n)
{
        uint64_t n_bytes = 0;

        while (n > 0)
                n_bytes += extents[--n].n_bytes;
        return n_bytes;
}

/* What the GPUs have registered of the host extents of one owner, such as a partition. */
struct device_pins {
        _Atomic uint64_t n_bytes; /* now; once for each GPU */
        _Atomic int error;        /* why an extent could not be registered, the last one; 0: all could */
};

/* A copy between an extent of a device (DEVICE_SHARE_FD) and one of the host device, which differ. */
struct device_copy {
        const struct device_extent *extent;
        uint64_t offset; /* in the extent */
        const struct device_extent *host;
        uint64_t host_offset;
        uint64_t n_bytes;
        bool to_host; /* else from the host's extent */
        /* Not NULL: a GPU registers the host's extent and copies directly, if it can. Unregistered by destroy()
         * or device_unpin(). *pins outlives both devices. */
        struct device_pins *pins;
};

/* What a process has of a device from its driver. */
struct device_use {
        uint64_t pid;
        uint64_t n_bytes;
};
#define DEVICE_USES 64u /* of a call */

/* What a device reports about itself. */
struct device_facts {
        char name[64]; /* the vendor's name */
        uint8_t uuid[DEVICE_UUID_BYTES];
        uint64_t bytes_total; /* 0: not bounded by the device (host) */
        uint64_t bytes_free;  /* now, as the driver reports */
        bool shares[2];       /* by enum device_share: the modes that make() supports */
};

struct device_ops {
        const char *name;
        struct device *(*free)(struct device *d);
        /* Every extent's size is a multiple of this. */
        uint64_t (*granularity)(const struct device *d);
        /* Makes n extents (at most DEVICE_MAKES) of the n_bytes that they have, with all pages allocated and zeroed, for
         * this share mode: all of them or none, and then their other members are undefined. A GPU fills them together. -ENOMEM (the machine has no more), -EMFILE, -EINVAL (size), -ENOTSUP (share mode not supported), -ENODEV (the device
         * is lost), -ENOTRECOVERABLE (this process can make no more on it until the device is closed and opened again,
         * or the process is started again; others use it as before), -EIO (unexpected), -ENOBUFS (a memory limit of the daemon's control group). */
        int (*make)(struct device *d, const struct device_supply *supply, enum device_share share,
                    struct device_extent *extents, size_t n);
        /* Releases the memory and closes the fd. *e is empty afterwards, or (-EBUSY, the host) it is as before, because a
         * process still has it open or mapped: call this again later. Any other error means that the memory may not have
         * been returned (-ENODEV: the device is lost; -ENOTRECOVERABLE: as make(); -EBUSY: a process still references
         * it, so it is unreclaimed). */
        int (*destroy)(struct device *d, struct device_extent *e);
        /* Imports an extent that this device made for a previous process, by its shared fd, which belongs
         * to the extent on success. -EPROTO: not an extent, not of this size, or of another device.
         * -ENODEV, -ENOTRECOVERABLE, -ENOMEM, -EIO. NULL: an fd alone is not enough. */
        int (*adopt)(struct device *d, int fd, uint64_t n_bytes, struct device_extent *ret);
        /* An extent that was made for a previous process, by its `native`. -ENOENT: there is none; -EPROTO: not of this
         * size; -ENODEV, -ENOMEM, -EMFILE. NULL: this device keeps nothing. */
        int (*take)(struct device *d, uint64_t native, uint64_t n_bytes, struct device_extent *ret);
        /* Destroys what was made for a previous process and not taken. NULL together with take(). */
        void (*drop_rest)(struct device *d);
        /* An fd of an extent (DEVICE_SHARE_FD) for another process; the caller closes it. is_read_only: the
         * fd gives no write access. NULL: a duplicate of the extent's own is used, and each process maps it
         * as it was told. -EMFILE, -ENFILE, -ENOMEM, -EACCES. */
        int (*lend)(struct device *d, const struct device_extent *e, bool is_read_only);
        /* True: no other process has the extent open or mapped, as the kernel proves. False also if that
         * is unknown. Does not wait, so it may be called on an event loop. NULL: it is never known. */
        bool (*is_alone)(struct device *d, const struct device_extent *e);
        /* Called by device_copy(). NULL: not supported. */
        int (*copy)(struct device *d, const struct device_copy *copies, size_t n);
        int (*facts)(struct device *d, struct device_facts *ret); /* -ENODEV */
        /* The bytes in use outside of this process's extents: an upper bound of unreclaimed memory. May
         * be NULL. -ENODEV, -EIO. */
        int (*others)(struct device *d, uint64_t *ret_bytes);
        /* What processes have of it from the driver: DEVICE_USES at most, in the order of their pids, from those above `pid`
         * on, without the one that makes extents. Memory counts for the process that made it. May be NULL. -ENOENT: it is not
         * known; -EAGAIN: not at present; -ENODEV, -ENOMEM. */
        int (*uses)(struct device *d, uint64_t pid, struct device_use ret[static DEVICE_USES], size_t *ret_n);
        /* Releases everything by which this process keeps the device busy, when it has no extents: then
         * the device may be reset or changed. Until it is opened again only granularity(), others()
         * (-ENODEV) and free() may be called. NULL: it keeps nothing busy, or only its process's end releases it. */
        void (*close)(struct device *d);
        /* Opens the device again; its facts may have changed. On failure it stays closed, with the errors
         * and the sentence of device_cuda_new(). -ENOTSUP: its granularity has changed. NULL together
         * with close(). */
        int (*open)(struct device *d, char *ret_sentence, size_t n_sentence);
        /* See device_end(); is_ending is set. Does not wait. May be NULL. */
        void (*end)(struct device *d);
        /* An fd, borrowed, that is readable when the device may have been lost although nothing is asked of it; then
         * has_ended() says whether that is so, once. Any thread; does not wait. NULL: only calls show it. */
        int (*watched)(const struct device *d);
        bool (*has_ended)(struct device *d);
};

/* What processes have charged on a device and take by themselves; the daemon's. What others use there beside that and beside
 * unreclaimed memory was so much when it was last sampled, the newest first: contexts of processes. */
#define DEVICE_DIRECT_SAMPLES 8u
struct device_direct {
        uint64_t n_bytes;
        uint64_t unreclaimed_bytes; /* of all arenas */
        uint64_t others[DEVICE_DIRECT_SAMPLES];
        unsigned n;        /* samples */
        unsigned n_due;    /* that are still to be taken */
        uint64_t taken_ms; /* when the newest was */
};

/* Every backend's struct starts with this. */
struct device {
        const struct device_ops *ops;
        bool is_cuda; /* an extent costs about a millisecond, whatever its size */
        /* The kernel charges memory of make() to this process and may kill it for that. */
        bool charges_process;
        bool has_no_memory; /* extents are sizes only */
        /* Set by device_end() when the process ends, which releases everything: destroy() then skips the check for
         * unreclaimed memory, which takes time. Atomic: any thread. */
        bool is_ending;
        /* When the call under way began, in ns of CLOCK_MONOTONIC; 0: none is, or the calls are this process's own. Atomic:
         * any thread. */
        uint64_t call_began_ns;
        /* The daemon's loop: what device_foreign_bytes() said last while memory was unreclaimed (0: none is), and how
         * much of its falls since was not credited to anybody. */
        uint64_t foreign_bytes, foreign_fallen;
        struct device_direct direct;
};

/* What an error of make() means, for messages. */
const char *device_error(int error);

/* The host device: sealed memfds with all pages allocated. */
int device_host_new(struct device **ret);

/* A device of sizes only, for plans: "host", or any other id for a GPU, which need not be in this machine. No page is
 * allocated and no driver is loaded. -ENOMEM. */
int device_no_memory_new(const char *id, struct device **ret);

/* What this machine lacks for this supply; see device/host_pages.h. */
int device_host_check(const struct device_supply *supply, char *ret_clause, size_t n_clause);

/* A GPU by the config's id: "cuda:0", "GPU-<uuid>", "MIG-<uuid>". The first call loads the driver and
 * sets environment variables, so make it before there are other threads. On failure a sentence that says
 * what is missing: -ENODEV (no driver, no such device), -EBUSY (a compute mode or MPS that does not
 * permit sharing), -EINVAL (the id), -ENOTSUP, -ENOMEM, -EIO. */
int device_cuda_new(const char *id, struct device **ret, char *ret_sentence, size_t n_sentence);

/* From now on GPUs are opened also where MPS is in use. This process never becomes a client of it, so call this before
 * the first device_cuda_new(), and before there are other threads. */
void device_cuda_allow_mps(void);

static inline struct device *device_free(struct device *d)
{
        return d ? d->ops->free(d) : NULL;
}
static inline uint64_t device_granularity(const struct device *d)
{
        return d->ops->granularity(d);
}
static inline int device_make_all(struct device *d, const struct device_supply *supply,
                                  enum device_share share, struct device_extent *extents, size_t n)
{
        return d->ops->make(d, supply, share, extents, n);
}
static inline int device_make_of(struct device *d, const struct device_supply *supply,
                                 enum device_share share, uint64_t n_bytes, struct device_extent *ret)
{
        struct device_extent e = { .fd = -1, .n_bytes = n_bytes };
        int r = device_make_all(d, supply, share, &e, 1);

        if (r == 0)
                *ret = e;
        return r;
}
static inline int device_make(struct device *d, enum device_share share, uint64_t n_bytes,
                              struct device_extent *ret)
{
        static const struct device_supply any = { 0 };

        return device_make_of(d, &any, share, n_bytes, ret);
}
static inline int device_destroy(struct device *d, struct device_extent *e)
{
        return d->ops->destroy(d, e);
}
static inline int device_adopt(struct device *d, int fd, uint64_t n_bytes, struct device_extent *ret)
{
        return d->ops->adopt ? d->ops->adopt(d, fd, n_bytes, ret) : -ENOTSUP;
}
static inline bool device_keeps(const struct device *d)
{
        return d->ops->take;
}
static inline int device_take(struct device *d, uint64_t native, uint64_t n_bytes, struct device_extent *ret)
{
        return d->ops->take ? d->ops->take(d, native, n_bytes, ret) : -ENOTSUP;
}
static inline void device_drop_rest(struct device *d)
{
        if (d->ops->drop_rest)
                d->ops->drop_rest(d);
}
int device_lend(struct device *d, const struct device_extent *e, bool is_read_only);
static inline bool device_is_alone(struct device *d, const struct device_extent *e)
{
        return d->ops->is_alone && d->ops->is_alone(d, e);
}

/* Copies at most so many parts, and returns when all is done. A GPU overlaps them, and maps an extent once for parts
 * of it that are neighbours in the list. Processes that change the host's memory meanwhile change what is
 * copied, and nothing else. -EINVAL: too many, or outside of an extent; -ENOTSUP: not with this device or share mode;
 * -ENODEV; -ENOTRECOVERABLE; -ENOMEM; -EIO; -ECANCELED: device_end() was called. After an error the destinations have arbitrary parts of the sources. */
#define DEVICE_COPIES 32u
int device_copy(struct device *d, const struct device_copy *copies, size_t n);

/* A GPU has registered the host's extent. Any thread; does not wait. */
bool device_is_pinned(const struct device_extent *host);

/* Unregisters the host's extent everywhere, which must precede the release of its memory by anything but
 * destroy(). Calls the driver. -EBUSY: a GPU still uses the pages, so the memory is unreclaimed. */
int device_unpin(const struct device_extent *host);

static inline int device_foreign_bytes(struct device *d, uint64_t *ret_bytes)
{
        return d->ops->others ? d->ops->others(d, ret_bytes) : -ENOTSUP;
}
static inline int device_uses(struct device *d, uint64_t pid, struct device_use ret[static DEVICE_USES],
                              size_t *ret_n)
{
        return d->ops->uses ? d->ops->uses(d, pid, ret, ret_n) : -ENOENT;
}
static inline void device_close(struct device *d)
{
        if (d->ops->close)
                d->ops->close(d);
}
static inline int device_open(struct device *d, char *ret_sentence, size_t n_sentence)
{
        return d->ops->open ? d->ops->open(d, ret_sentence, n_sentence) : 0;
}
static inline void device_end(struct device *d)
{
        __atomic_store_n(&d->is_ending, true, __ATOMIC_RELAXED);
        if (d->ops->end)
                d->ops->end(d);
}
static inline int device_watched(const struct device *d)
{
        return d->ops->watched ? d->ops->watched(d) : -1;
}
static inline bool device_has_ended(struct device *d)
{
        return d->ops->has_ended && d->ops->has_ended(d);
}
static inline uint64_t device_call_began_ns(const struct device *d)
{
        return __atomic_load_n(&d->call_began_ns, __ATOMIC_RELAXED);
}
static inline int device_facts(struct device *d, struct device_facts *ret)
{
        return d->ops->facts(d, ret);
}

/* ---- the client's side --------------------------------------------------- */

/* The device of a region, as the daemon describes it. */
struct device_view {
        bool is_cuda;       /* else the host */
        bool has_no_memory; /* no driver is needed */
        uint8_t uuid[DEVICE_UUID_BYTES];
        enum device_share share;
        uint64_t peers; /* by bit: GPUs of this process that may use the memory too; DEVICE_SHARE_FD */
        bool is_pinned; /* the host: extents are registered with CUDA where this process uses it */
};

/* Work of a device can use the memory after the call that queued it has returned. */
static inline bool device_view_has_work(const struct device_view *view)
{
        return view->is_cuda || view->is_pinned;
}

struct device_range; /* the address space of one region */

struct device_range_ops {
        const char *name;
        /* Unmaps everything. Does not wait for work; call finish() before if there can be some. */
        struct device_range *(*free)(struct device_range *r);
        /* Mappings stay until the process ends, also after free(), for callers that cannot wait for the
         * work there. NULL: no work can be affected by free(). */
        void (*leave)(struct device_range *r);
        /* The range's address in this process. If the driver chooses the address (DEVICE_SHARE_CUDA_IPC):
         * NULL before the only extent is mapped. */
        void *(*base)(const struct device_range *r);
        /* Maps the extent at base + offset, replacing any older mapping, after checks of size and seals.
         * The caller keeps the extent's fd. No work may use the old mapping. -EINVAL: outside of the
         * range or misaligned; -EPROTO: not such an extent; -ENOMEM; -ENODEV. CUDA: -EBUSY (an older
         * extent of the same address is still open; try later); -ENOTSUP (the driver does not open it in
         * this process, because this process made it, it belongs to another user or PID namespace, or its
         * maker has exited); -EIO. */
        int (*map)(struct device_range *r, uint64_t offset, const struct device_extent *extent);
        /* Unmaps exactly one earlier map(); the addresses stay reserved. Does not wait for work; call
         * finish() before. -EINVAL: no such mapping. -EIO: this process's context is broken, so it stays
         * mapped. -EBUSY: the driver refuses during a capture. */
        int (*unmap)(struct device_range *r, uint64_t offset, uint64_t n_bytes);
        /* Gives another GPU of this process access to all that is, and will be, mapped. -ENOTSUP: the two GPUs do not
         * reach each other, or the driver refuses; what is mapped may have access nevertheless. NULL: it is not
         * needed. */
        int (*enable_peer)(struct device_range *r, int ordinal);
        /* Waits until work that this process queued on the device, or on another device that can access
         * its memory, no longer uses the range. Another thread may map and unmap meanwhile. -EBUSY: a
         * stream that synchronizes with the default stream is being captured; the capture continues; try
         * later. The capture of any other stream is invalidated, so the caller must query the streams
         * that it knows before. -ENODEV: the device is lost. -EIO: this process's context is broken; the
         * device itself works. In both cases no work of this process continues. */
        int (*finish)(struct device_range *r);
        /* Copies between this process's memory and the range, where all of [offset, offset + n_bytes)
         * must be mapped. The copy is complete on return and visible to later readers of the extent. It
         * is ordered with this process's work as cudaMemcpy is. Another thread may map and unmap
         * elsewhere in the range meanwhile. -EINVAL: outside of the range. -EBUSY: the copy would have to
         * wait for a stream that is being captured. -ENODEV, -EIO as finish(). */
        int (*read)(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret);
        int (*write)(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes);
        /* Registers with CUDA what could not be registered before. NULL: nothing ever is. */
        void (*pin)(struct device_range *r);
        /* The bytes that are registered with CUDA now. Any thread. NULL: none ever are. */
        uint64_t (*pinned)(const struct device_range *r);
};

struct device_range {
        const struct device_range_ops *ops;
};

/* Reserves address space without memory. A forked child inherits a host range with its mappings, and
 * nothing of a GPU range. -EINVAL (size), -ENOMEM, -ENODEV (this process does not see the device). */
int device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);

/* Before the process has its first range or stream there; see cuda_driver_charge_context(). -ENOMEM: the limit has no room for
 * its context. -ENODEV, -EIO. */
int device_prepare(const struct device_view *view);

/* Whether CUDA device `peer` of this process reaches the memory of device `ordinal`. -ENOTSUP: it does not. */
int device_cuda_check_peer(int ordinal, int peer);

/* The UUID of CUDA device `ordinal` of this process. -ENODEV: no such device, or no driver. */
int device_cuda_ordinal_uuid(int ordinal, uint8_t ret[static DEVICE_UUID_BYTES]);

static inline struct device_range *device_range_free(struct device_range *r)
{
        return r ? r->ops->free(r) : NULL;
}
static inline void device_range_leave(struct device_range *r)
{
        if (r->ops->leave)
                r->ops->leave(r);
}
static inline void *device_range_base(const struct device_range *r)
{
        return r->ops->base(r);
}
static inline int device_range_map(struct device_range *r, uint64_t offset,
                                   const struct device_extent *extent)
{
        return r->ops->map(r, offset, extent);
}
static inline int device_range_unmap(struct device_range *r, uint64_t offset, uint64_t n_bytes)
{
        return r->ops->unmap(r, offset, n_bytes);
}
static inline int device_range_enable_peer(struct device_range *r, int ordinal)
{
        return r->ops->enable_peer ? r->ops->enable_peer(r, ordinal) : 0;
}
static inline int device_range_finish(struct device_range *r)
{
        return r->ops->finish(r);
}
static inline int device_range_read(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret)
{
        return r->ops->read(r, offset, n_bytes, ret);
}
static inline int device_range_write(struct device_range *r, uint64_t offset, const void *bytes,
                                     uint64_t n_bytes)
{
        return r->ops->write(r, offset, bytes, n_bytes);
}

static inline void device_range_pin(struct device_range *r)
{
        if (r->ops->pin)
                r->ops->pin(r);
}
static inline uint64_t device_range_pinned(const struct device_range *r)
{
        return r->ops->pinned ? r->ops->pinned(r) : 0;
}

/* ---- streams: completion of work ----------------------------------------- */

/* A stream is a queue of work for a device, identified by a number: a cudaStream_t, or CUDA's 0, 1 (the
 * default stream) and 2 (the per-thread one). On the host any number is a stream, and none has work of
 * its own. */
#define DEVICE_STREAM_PER_THREAD ((uintptr_t)2)

struct device_streams; /* the streams of one device in this process */
struct device_event;   /* a point in a stream; belongs to the device_streams */

enum { DEVICE_PENDING = 1 };

struct device_streams_ops {
        const char *name;
        struct device_streams *(*free)(struct device_streams *d); /* call forget() for all events before */
        /* 1: the stream is being captured into a graph, or it is the default stream and another stream is
         * captured that it would invalidate. 0: it is not, and *ret_id is different for each stream of the
         * process's life. Otherwise *ret_id is 0: unknown. Errors as record(). */
        int (*is_captured)(struct device_streams *d, uintptr_t stream, uint64_t *ret_id);
        /* Records the point up to which work is queued on the stream. *event: NULL for a new event, or
         * one to reuse; the caller ends it with forget() if it is not NULL, also after a failure. -EBUSY:
         * the stream is being captured; try later. -EINVAL: no stream of this device. -ENOMEM, -EAGAIN:
         * the driver failed; try later. -ENODEV: the device is lost. -EIO: this process's context is
         * broken. In the last two cases no work of this process continues. A destroyed stream ends the
         * process, here and in is_captured(). */
        int (*record)(struct device_streams *d, uintptr_t stream, struct device_event **event);
        /* 0: all work up to the event is complete. DEVICE_PENDING. -EBUSY: a capture forbids the query;
         * try later. -ESTALE: the stream was being captured at the record; record again. -EINVAL: unknown
         * to the driver. -EAGAIN, -ENODEV, -EIO as record(). Does not use the stream itself, which may be
         * destroyed. */
        int (*query)(struct device_streams *d, struct device_event *event);
        struct device_event *(*forget)(struct device_streams *d, struct device_event *event); /* takes NULL */
};

struct device_streams {
        const struct device_streams_ops *ops;
        bool are_permanent; /* streams are never destroyed */
};

/* Any thread may use it, but each event only one thread at a time. -ENODEV (this process does not see the
 * device), -ENOMEM, -EIO. */
int device_streams_new(const struct device_view *view, struct device_streams **ret);

static inline struct device_streams *device_streams_free(struct device_streams *d)
{
        return d ? d->ops->free(d) : NULL;
}
static inline int device_stream_check_captured(struct device_streams *d, uintptr_t stream, uint64_t *ret_id)
{
        return d->ops->is_captured(d, stream, ret_id);
}
static inline int device_event_record(struct device_streams *d, uintptr_t stream, struct device_event **event)
{
        return d->ops->record(d, stream, event);
}
static inline int device_event_query(struct device_streams *d, struct device_event *event)
{
        return d->ops->query(d, event);
}
static inline struct device_event *device_event_forget(struct device_streams *d, struct device_event *event)
{
        return event ? d->ops->forget(d, event) : NULL;
}

#endif
