/* A device makes, shares, opens and destroys extents.
 *
 * An extent is one piece of memory that the device can share only as a whole.
 * Backends are const tables of functions: host.c (sealed memfds), and cuda.c with
 * cuda_range.c beside it. The daemon's end makes and destroys; the client's end
 * reserves a region's address space and maps extents into it. Calls of the
 * daemon's end take milliseconds (backing memory): they belong on a worker, never
 * on an event loop. They are thread-safe for different extents. Nothing here logs or
 * decides.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_DEVICE_DEVICE_H
#define BFC_DEVICE_DEVICE_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the daemon's end ---------------------------------------------------- */

struct device;

/* How others are given an extent. */
enum device_share {
        DEVICE_SHARE_FD,       /* by a file descriptor; mapped anywhere */
        DEVICE_SHARE_CUDA_IPC, /* by a cudaIpcMemHandle_t; the driver chooses where it opens */
};

/* Which pages host memory is made of. */
enum device_pages {
        DEVICE_PAGES_AUTO,     /* of 2 MiB where the kernel has them, else of 4 KiB */
        DEVICE_PAGES_RESERVED, /* of 2 MiB, from those that the operator reserved for hugetlbfs */
        DEVICE_PAGES_SMALL,    /* of 4 KiB */
};

/* How memory of the host is made; a GPU has no choice. */
struct device_supply {
        enum device_pages pages;
        bool is_bound; /* to this NUMA node */
        uint32_t node;
};

#define DEVICE_HANDLE_BYTES 64u
#define DEVICE_UUID_BYTES   16u

/* An extent as its device made it, or as a client was given it (then without
 * `native`). Empty: n_bytes 0, fd -1. */
struct device_extent {
        int fd; /* what is shared; owned; -1 where a handle is */
        enum device_share share;
        uint8_t handle[DEVICE_HANDLE_BYTES]; /* DEVICE_SHARE_CUDA_IPC */
        uint64_t n_bytes;
        uint64_t native;     /* the backend's own name for the memory */
        uint64_t huge_bytes; /* host: so much was made in pages of 2 MiB */
        bool clears;         /* destroy() zeroes it before it gives it back, where the device may not do so */
};
#define DEVICE_EXTENT_EMPTY ((struct device_extent){ .fd = -1 })

/* What a device says of itself. */
struct device_facts {
        char name[64]; /* the maker's */
        uint8_t uuid[DEVICE_UUID_BYTES];
        uint64_t bytes_total; /* 0: not bounded by the device (host) */
        uint64_t bytes_free;  /* now, by the driver's word */
        bool shares[2];       /* by enum device_share: what make() can do */
};

struct device_ops {
        const char *name;
        struct device *(*free)(struct device *d);
        /* Every extent's size is a multiple of this many bytes. */
        uint64_t (*granularity)(const struct device *d);
        /* Makes an extent with memory behind every byte, zeroed, to be shared in
         * that way. -ENOMEM (the machine has no more), -EMFILE, -EINVAL (size),
         * -ENOTSUP (cannot share so), -ENODEV (the device is lost), -EIO (what nobody
         * expects of it), -ENOBUFS (a memory limit of the daemon's control group), -ENOSPC (no reserved
         * pages of 2 MiB). */
        int (*make)(struct device *d, const struct device_supply *supply, enum device_share share,
                    uint64_t n_bytes, struct device_extent *ret);
        /* Gives the memory back and closes. *e is empty afterwards whatever is
         * returned; an error says that memory may not have come back (-ENODEV:
         * the device is lost; -EBUSY: somebody still holds it, so it escaped). */
        int (*destroy)(struct device *d, struct device_extent *e);
        /* Takes over an extent that this device made for a process that is no more, by the fd
         * that is shared, which is the extent's on success. -EPROTO: it is none, or not of this
         * size, or another device's. -ENODEV, -ENOMEM, -EIO. NULL: an fd alone does not keep
         * this device's memory. */
        int (*adopt)(struct device *d, int fd, uint64_t n_bytes, struct device_extent *ret);
        /* An fd of an extent (DEVICE_SHARE_FD) for another process, which the caller closes.
         * NULL: a duplicate of the extent's own. -EMFILE, -ENFILE, -ENOMEM. */
        int (*lend)(struct device *d, const struct device_extent *e);
        /* Whether no process has the extent open or mapped any more but by what this one keeps: a fact
         * of the kernel, whatever processes do. False also where that cannot be known. Waits for nothing,
         * so it may be called on an event loop. NULL: it can never be known. */
        bool (*is_alone)(struct device *d, const struct device_extent *e);
        int (*facts)(struct device *d, struct device_facts *ret); /* -ENODEV */
        /* How many bytes are in use and in no extent: what escaped and is still held
         * is among them, so it is not more. May be NULL. -ENODEV, -EIO. */
        int (*others)(struct device *d, uint64_t *ret_bytes);
        /* Gives up all by which this process keeps the device busy, when no extent of it is left:
         * it may be reset then, or changed. Until it is opened again only granularity(),
         * others() (-ENODEV) and free() may be called. NULL: it keeps nothing busy. */
        void (*close)(struct device *d);
        /* Has it again as it is now; what it says of itself may be different. On failure it
         * stays closed, with a sentence as device_cuda_new() has, and its errors. -ENOTSUP:
         * its granularity is another one. NULL with close(). */
        int (*open)(struct device *d, char *ret_sentence, size_t n_sentence);
};

/* Every backend's struct starts with this. */
struct device {
        const struct device_ops *ops;
        /* destroy() takes the memory also from those who still have it mapped. If
         * not, nobody may have it mapped any more when destroy() is called. */
        bool empties_mappings;
        /* make() takes memory that the kernel charges to this process: it may be killed for it. */
        bool charges_process;
        /* Set where the process ends, which gives everything back: destroy() need
         * not find out what escaped, for that takes time. Atomic: any thread. */
        bool is_ending;
};

/* What an error of make() means, for people. */
const char *device_error(int error);

/* The host-memory device: sealed memfds with a page behind every byte. */
int device_host_new(struct device **ret);

/* What this machine lacks to make n_bytes so; see device/host_pages.h. */
int device_host_check(const struct device_supply *supply, uint64_t n_bytes, char *ret_clause,
                      size_t n_clause);

/* A GPU by the config's id: "cuda:0", "GPU-<uuid>", "MIG-<uuid>". Loads the
 * driver at the first call, which sets environment variables: not beside other
 * threads; later calls may be. On failure a sentence that says what is missing, for people: -ENODEV
 * (no driver, no such device), -EBUSY (a compute mode, or MPS, in which it cannot
 * be shared), -EINVAL (the id), -ENOTSUP, -ENOMEM, -EIO. */
int device_cuda_new(const char *id, struct device **ret, char *ret_sentence, size_t n_sentence);

static inline struct device *device_free(struct device *d)
{
        return d ? d->ops->free(d) : NULL;
}
static inline uint64_t device_granularity(const struct device *d)
{
        return d->ops->granularity(d);
}
static inline int device_make_of(struct device *d, const struct device_supply *supply,
                                 enum device_share share, uint64_t n_bytes, struct device_extent *ret)
{
        return d->ops->make(d, supply, share, n_bytes, ret);
}
static inline int device_make(struct device *d, enum device_share share, uint64_t n_bytes,
                              struct device_extent *ret)
{
        static const struct device_supply any = { .pages = DEVICE_PAGES_AUTO };

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
int device_lend(struct device *d, const struct device_extent *e);
static inline bool device_is_alone(struct device *d, const struct device_extent *e)
{
        return d->ops->is_alone && d->ops->is_alone(d, e);
}
static inline int device_others(struct device *d, uint64_t *ret_bytes)
{
        return d->ops->others ? d->ops->others(d, ret_bytes) : -ENOTSUP;
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
}
static inline int device_facts(struct device *d, struct device_facts *ret)
{
        return d->ops->facts(d, ret);
}

/* ---- the client's end ---------------------------------------------------- */

/* Which device a region is on, as the daemon tells it. */
struct device_view {
        bool is_cuda; /* else the host */
        uint8_t uuid[DEVICE_UUID_BYTES];
        enum device_share share;
};

struct device_range; /* address space of one region */

struct device_range_ops {
        const char *name;
        /* Unmaps everything. Waits for no work, which finish() does before, where there can be some. */
        struct device_range *(*free)(struct device_range *r);
        /* What is mapped stays so until the process ends, also after free(): for who cannot know that no
         * work goes on there. NULL: there is no work that free() could disturb. */
        void (*leave)(struct device_range *r);
        /* Where the range begins in this process. Where the driver chooses the
         * address (DEVICE_SHARE_CUDA_IPC): NULL before the one extent is mapped. */
        void *(*base)(const struct device_range *r);
        /* Maps the extent at base + offset, over whatever was there; checks that
         * it is what it should be (size, seals). The caller keeps the extent's
         * fd. -EINVAL: outside of the range or misaligned; -EPROTO: not such an
         * extent; -ENOMEM; -ENODEV. No work may touch what was there. CUDA: -EBUSY (an older
         * extent of the same address is still open: later); -ENOTSUP (the driver does not open it for this
         * process: it made it itself, it is of another user or PID namespace, or
         * the process that made it is gone); -EIO. */
        int (*map)(struct device_range *r, uint64_t offset, const struct device_extent *extent);
        /* Takes away what map() put at exactly this place; the addresses stay
         * reserved. Waits for no work: finish() does. -EINVAL: nothing was mapped
         * so. -EIO: this process's context is broken, so it stays mapped. -EBUSY: the driver refuses beside
         * a capture. */
        int (*unmap)(struct device_range *r, uint64_t offset, uint64_t n_bytes);
        /* Waits until no work that this process gave to the device, or to another
         * that reaches its memory, can touch the range any more. -EBUSY: that cannot be known now, because a stream is
         * being captured into a graph (the capture goes on): later. Only of streams that wait for the
         * default stream that is seen here. The capture of any other is spoilt by this: who calls has asked
         * those that it knows before. -ENODEV: the
         * device is lost. -EIO: this process's context is broken; the device goes on.
         * In both cases no work of this process does. Another thread may
         * map and unmap meanwhile. */
        int (*finish)(struct device_range *r);
        /* Copies between this process's memory and the range, where every byte of
         * [offset, offset + n_bytes) must be mapped; done on return, and seen by whoever
         * reads the extent by then. Ordered with this process's work as cudaMemcpy is.
         * -EINVAL: outside of the range. -EBUSY: a stream is being captured that the copy
         * would have to wait for. -ENODEV, -EIO as finish(). Another thread may map and
         * unmap meanwhile, elsewhere in the range. */
        int (*read)(struct device_range *r, uint64_t offset, uint64_t n_bytes, void *ret);
        int (*write)(struct device_range *r, uint64_t offset, const void *bytes, uint64_t n_bytes);
};

struct device_range {
        const struct device_range_ops *ops;
};

/* Reserves address space without memory. A forked child inherits a host range and what is mapped in
 * it, and of a GPU's memory nothing.
 * -EINVAL (size), -ENOMEM, -ENODEV (this process does not see the device). */
int device_range_new(const struct device_view *view, uint64_t n_bytes, struct device_range **ret);

/* The UUID of what this process knows as CUDA device `ordinal`. -ENODEV: it sees
 * no such device, or has no driver. */
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

/* ---- streams: when work is done ------------------------------------------ */

/* A stream is an order in which a program gives work to a device; here it is a number: a
 * cudaStream_t, CUDA's 0, 1 (the default stream) and 2 (each thread's own) among them. On the
 * host any number is one, and none has work of its own (host_stream.h). */
#define DEVICE_STREAM_PER_THREAD ((uintptr_t)2)

struct device_streams; /* those of one device, as this process uses it */
struct device_event;   /* a point in one of them; belongs to the device_streams */

enum { DEVICE_PENDING = 1 };

struct device_streams_ops {
        const char *name;
        struct device_streams *(*free)(struct device_streams *d); /* all events are gone before */
        /* 1: it is being captured into a graph; of the default stream also where another
         * stream is whose capture it would spoil. 0: it is not. Errors as record(). */
        int (*is_captured)(struct device_streams *d, uintptr_t stream);
        /* Notes the point up to which the stream has been given work. *event: NULL for a new
         * one, or one to be used again; the caller's, to end with forget(), also after a
         * failure, if not NULL. -EBUSY: the stream is being captured, so its work is none yet:
         * later. -EINVAL: no stream of this device. -ENOMEM, -EAGAIN: the driver could not:
         * later. -ENODEV: the device is lost. -EIO: this process's context is broken. In both
         * cases no work of this process goes on. A stream that was destroyed is -EINVAL, or ends the
         * process: it is not to be named here. */
        int (*record)(struct device_streams *d, uintptr_t stream, struct device_event **event);
        /* 0: all work up to there is done. DEVICE_PENDING. -EBUSY: a capture forbids to ask:
         * later. -ESTALE: the stream was being captured when it was recorded, so it is to be
         * recorded once more. -EINVAL: the driver knows it no more. -EAGAIN, -ENODEV, -EIO as record(). The
         * stream itself is not touched: it may be gone. */
        int (*query)(struct device_streams *d, struct device_event *event);
        struct device_event *(*forget)(struct device_streams *d, struct device_event *event); /* takes NULL */
};

struct device_streams {
        const struct device_streams_ops *ops;
};

/* Any thread may use it, but one event only one at a time. -ENODEV (this process does not see
 * the device), -ENOMEM, -EIO. */
int device_streams_new(const struct device_view *view, struct device_streams **ret);

static inline struct device_streams *device_streams_free(struct device_streams *d)
{
        return d ? d->ops->free(d) : NULL;
}
static inline int device_stream_is_captured(struct device_streams *d, uintptr_t stream)
{
        return d->ops->is_captured(d, stream);
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
