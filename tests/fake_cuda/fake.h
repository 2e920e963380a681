/* What the files of the fake driver share.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 *   settings.c the environment, the devices
 *   object.c   physical memory: files in the state folder
 *   fault.c    the way into every function: counting, faults, lost devices
 *   driver.c   cuInit, devices, error texts, cuGetProcAddress
 *   context.c  primary contexts and each thread's stack of current ones
 *   address.c  the addresses that devices' memory is mapped at
 *   memory.c   the table of ranges, cuMemAlloc and its like
 *   ipc.c      legacy IPC handles
 *   vmm.c      cuMemCreate, handles and fds;  map.c  addresses and access
 *   queue.c    queues of work and the threads that do it;  stream.c  streams
 *   copy.c     copies and fills;  pinned.c  registered host memory
 *   made.c     contexts that the program makes
 *   array.c    arrays;  managed.c  managed memory;  pool.c  memory pools
 *   graph.c    graphs and their memory
 *   extra.c    what only the proxy of the driver asks for
 *   event.c    events;  capture.c: what stream capture forbids
 *
 * Locks: fake_memory_lock guards the ranges, the VMM handles and the contexts;
 * stream.c has one of its own. A thread holds one of them at a time, except
 * that work being done holds the memory lock for reading. */
#ifndef FAKE_CUDA_FAKE_H
#define FAKE_CUDA_FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "device/cuda_api.h"

#define API              __attribute__((visibility("default")))
#define FAKE_GRANULARITY ((size_t)2 << 20)
#define FAKE_MAX_DEVICES 16
#define FAKE_MAX_FOREIGN 32

/* ---- fault.c ------------------------------------------------------------- */

#define F(symbol, base, version, arguments) FN_##symbol,
enum fake_function {
#include "device/cuda_functions.h"
        N_FUNCTIONS
};
#undef F

struct fake_function_name {
        const char *symbol, *base;
        int version;
};
extern const struct fake_function_name fake_functions[N_FUNCTIONS];
/* A function of extra.c for cuGetProcAddress(). NULL: none. */
void *fake_extra(const char *base, int version, bool is_per_thread);

/* The first line of every exported function: counts the call, and returns where
 * it shall fail, or where the driver is not initialised. */
#define ENTER(symbol)                                                                                        \
        do {                                                                                                 \
                CUresult entered_ = fake_enter(FN_##symbol);                                                 \
                if (entered_ != CUDA_SUCCESS)                                                                \
                        return entered_;                                                                     \
        } while (0)
CUresult fake_enter(enum fake_function f);
void fault_setup(void);
void fake_set_initialised(void);

/* ---- settings.c ------------------------------------------------------------- */

struct fake_device {
        unsigned int index; /* on this "machine", whatever CUDA_VISIBLE_DEVICES says */
        uint64_t n_bytes;
        bool is_mig;
        CUuuid uuid;
        CUcontext primary;
        CUresult lost_here; /* for this process, by a fault */
};

struct fake_settings {
        struct fake_device devices[FAKE_MAX_DEVICES];
        unsigned int n_devices;
        struct fake_device *visible[FAKE_MAX_DEVICES];
        unsigned int n_visible;
        uint64_t context_n_bytes, pool_n_bytes, poison_n_bytes;
        unsigned int stream_delay_us;
        int version;
        bool ipc_same_uid, peer_access, forked_dies, fork_keeps, fd_is_socket, is_mps_client, notes_peak,
                create_is_instant;
        CUresult destroyed_stream; /* what calls with one answer; CUDA_SUCCESS: they end the process */
        uint64_t free_late_ms, stack_n_bytes;
        uint64_t ms_per_gib;
        uint64_t foreign[FAKE_MAX_FOREIGN];
        unsigned int n_foreign;
        const char *attributes; /* "20=3,1/102=0" */
        const char *missing;    /* functions that cuGetProcAddress shall not know */
};
extern struct fake_settings fake;

extern char fake_folder[256];

void fake_setup(void);
void fake_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
uint64_t fake_parse_number(const char *text, const char *what);
struct fake_device *fake_device_get(CUdevice ordinal);
struct fake_device *fake_device_by_index(unsigned int index);
CUdevice fake_device_ordinal(const struct fake_device *d);
/* CUDA_SUCCESS, or the error that the device was lost with. */
CUresult fake_device_health(const struct fake_device *d);

/* driver.c; -1: this number is unknown. */
int fake_device_attribute(const struct fake_device *d, CUdevice_attribute which);

/* ---- object.c ------------------------------------------------------------ */

/* A piece of physical memory. */
struct fake_object {
        unsigned int device;
        char kind; /* a: cuMemAlloc, v: cuMemCreate, b: struct fake_bytes, x: freed by its owner */
        uint64_t n_bytes, id;
};
CUresult fake_object_new(const struct fake_device *d, char kind, uint64_t n_bytes, struct fake_object *ret,
                         int *ret_fd);
/* Opens by name, and keeps the object alive through that fd. */
CUresult fake_object_open(const struct fake_object *o, int *ret_fd);
/* What an fd is, judged by its last page. */
CUresult fake_object_of_fd(int fd, struct fake_object *ret);
void fake_object_disown(struct fake_object *o);
void fake_object_drop(const struct fake_object *o);
uint64_t fake_in_use(unsigned int device);
/* Bytes of a device that nothing reads or writes: of contexts, arrays and managed memory. */
struct fake_bytes {
        struct fake_object object;
        void *held; /* a page, which keeps the bytes charged; NULL: there are none */
};
CUresult fake_bytes_take(const struct fake_device *d, uint64_t n_bytes, struct fake_bytes *ret);
void fake_bytes_give_back(struct fake_bytes *b);
/* What was given back by this process and does not show yet; what others have taken. */
uint64_t fake_not_shown(unsigned int device);
uint64_t fake_foreign(void);
/* A mapping that keeps an object alive: a forked child gets it only where settings say so. at NULL:
 * anywhere. NULL: it failed. */
void *fake_object_map(void *at, size_t n_bytes, int protection, int fd);
/* The fds of the functions above are closed in a forked child, until the process gives them to its program. */
void fake_object_close(int fd);
int fake_object_take_fd(int fd);
void fake_guard_forks(void); /* once */
/* What cuMemExportToShareableHandle gives for an object's file: takes it over. -1. And back:
 * a new fd of the file; -1: it is none. */
int fake_fd_wrap(int file);
int fake_fd_unwrap(int fd);

/* ---- context.c ----------------------------------------------------------- */

struct CUctx_st {
        CUcontext next; /* made.c */
        struct fake_device *device;
        unsigned int n_refs, flags;
        bool is_green;
        bool is_reset;                  /* and not retained since: it has no work, memory or use */
        bool reaches[FAKE_MAX_DEVICES]; /* by index: other devices' memory */
        CUresult sticky;
        struct fake_bytes bytes;
        CUstream default_stream;
};

/* The thread's current context, if it is fit for work. */
CUresult fake_context(CUcontext *ret);
CUcontext fake_context_current(void);
void fake_context_stick(CUcontext c, CUresult error);
CUresult fake_context_start(CUcontext c); /* takes its bytes */
void fake_context_end(CUcontext c);
void fake_context_leave(CUcontext c);

/* What was made in a context that ends. */
void fake_pinned_drop_of(CUcontext c);
void fake_arrays_destroy_of(CUcontext c);
void fake_pools_forget(CUcontext c);  /* the memory lock is held */
void fake_graphs_forget(CUcontext c); /* the same */

/* made.c */
bool fake_made_is_alive(CUcontext c);

/* ---- memory.c ------------------------------------------------------------ */

enum fake_range_kind {
        RANGE_ALLOC = 1,
        RANGE_IPC = 2,
        RANGE_RESERVED = 4,
        RANGE_MAPPED = 8, /* within a RANGE_RESERVED */
        RANGE_MANAGED = 16,
        RANGE_POOL = 32, /* what a pool has taken at once, for several allocations */
        RANGE_GRAPH = 64,
};
#define RANGE_MEMORY (RANGE_ALLOC | RANGE_IPC | RANGE_MAPPED | RANGE_MANAGED | RANGE_POOL | RANGE_GRAPH)

struct fake_range {
        struct fake_range *next;
        enum fake_range_kind kind;
        uintptr_t at;
        size_t n_bytes, n_mapped; /* asked for; a multiple of the granularity */
        struct fake_device *device;
        CUcontext context; /* of all that is not RANGE_RESERVED or RANGE_MAPPED */
        struct fake_object object;
        struct fake_bytes on_device;                   /* RANGE_MANAGED: while it is there */
        unsigned int n_refs;                           /* RANGE_IPC: how often it was opened */
        CUmemAccess_flags access;                      /* the widest */
        CUmemAccess_flags access_of[FAKE_MAX_DEVICES]; /* RANGE_MAPPED, by index */
};

extern pthread_rwlock_t fake_memory_lock;
extern struct fake_range *fake_ranges;

struct fake_range *fake_range_find(uintptr_t at, unsigned int kinds);
struct fake_range *fake_range_add(enum fake_range_kind kind, uintptr_t at, size_t n_bytes, size_t n_mapped);
void fake_range_remove(struct fake_range *r);
/* Unmaps, gives the object up, and takes the range off the table. */
void fake_range_destroy(struct fake_range *r);
void fake_ranges_destroy_of(CUcontext c);
bool fake_range_allows(uintptr_t at, size_t n_bytes, bool to_write);
size_t fake_round_up(size_t n_bytes);
/* kind: RANGE_ALLOC or RANGE_POOL. */
CUresult fake_alloc(CUcontext c, enum fake_range_kind kind, size_t n_bytes, CUdeviceptr *ret);

/* pool.c, with the memory lock held: what was allocated at an address of a RANGE_POOL. */
bool fake_pool_find(CUdeviceptr pointer, CUdeviceptr *ret_base, size_t *ret_n_bytes);
bool fake_pool_free(CUdeviceptr pointer); /* false: there is no such allocation */

/* managed.c: memory that the device uses now moves there. */
void fake_managed_use(uintptr_t at, size_t n_bytes);

/* ---- address.c ----------------------------------------------------------- */

/* Addresses without memory; 0: there are none left. */
uintptr_t fake_address_take(size_t n_bytes, size_t alignment);
bool fake_address_take_at(uintptr_t at, size_t n_bytes); /* false: they are not free */
bool fake_address_map(uintptr_t at, size_t n_bytes, int fd, int protection);
bool fake_address_blank(uintptr_t at, size_t n_bytes); /* takes the memory away, keeps the addresses */
void fake_address_give_back(uintptr_t at, size_t n_bytes);

/* vmm.c, with the memory lock held; false: no such handle. */
bool fake_handle_object(CUmemGenericAllocationHandle value, struct fake_object *ret);

/* ---- queue.c, stream.c, event.c, capture.c ---------------------------------------- */

struct fake_mark; /* a point in a stream's work, passed or not */

struct fake_work {
        void *to;
        const void *from;
        size_t n_bytes;
        unsigned char value; /* fills where from is NULL */
        bool is_to_device, is_from_device;
        CUhostFn function; /* called where it is not NULL */
        void *data;
};

/* A stream that was destroyed stays on the list until its work is done; its handle may be
 * another one's by then. */
struct CUstream_st {
        struct CUstream_st *next;
        CUstream handle; /* what the program has; NULL: the default stream, or it was destroyed */
        CUcontext context;
        unsigned int flags;
        unsigned long long id;
        struct fake_job *first, **last;
        struct fake_mark *mark; /* of the work put in last */
        pthread_t thread;
        bool has_thread, is_closing;
        CUstreamCaptureStatus capture;
        CUstreamCaptureMode capture_mode;
        pthread_t capture_thread;
        CUgraph captured;
};

extern pthread_mutex_t fake_stream_lock;
extern struct CUstream_st *fake_streams;

CUresult fake_stream_get(CUstream handle, CUstream *ret);
/* Puts work in; wait: until it is done. work NULL: nothing to do but to get there. */
CUresult fake_stream_put(CUstream s, const struct fake_work *work, bool wait);
CUresult fake_stream_put_marked(CUstream s, struct fake_mark *const *after, struct fake_mark **ret);
CUresult fake_streams_wait(CUcontext c);
/* It takes no more work, does what it has, and frees itself. The lock is held. */
void fake_stream_close(CUstream s);
void fake_streams_wait_for_end(CUcontext c); /* until none is left; the lock is held */
void fake_streams_destroy_of(CUcontext c);   /* returns when their work is done */
bool fake_stream_is_default(const struct CUstream_st *s);
/* A place that keeps a mark, such as an event; no mark there counts as passed. */
bool fake_mark_is_done(struct fake_mark **m);
void fake_mark_wait(struct fake_mark **m);
void fake_mark_replace(struct fake_mark **at, struct fake_mark *m);
bool fake_stream_is_capturing(CUstream s);
/* graph.c. What a captured stream allocates is a node. */
CUgraph fake_graph_new(void);
CUresult fake_graph_add_alloc(CUgraph g, struct fake_device *d, size_t n_bytes, CUdeviceptr *ret);
CUresult fake_graph_add_free(CUgraph g, CUdeviceptr pointer);
bool fake_graph_free(CUdeviceptr pointer); /* the memory lock is held; false: it is not allocated */
/* CUDA_SUCCESS, or 900 and every capture that forbids the call is invalid. */
CUresult fake_capture_allows_unsafe(void);
bool fake_call_is_unsafe(enum fake_function f);
void fake_capture_invalidate(CUstream s);
bool fake_capture_of_blocking(CUcontext c);
CUresult fake_capture_allows_wait(CUcontext c); /* for all its work; a relaxed thread too */
/* To use the default stream is refused (906), and spoils them, while blocking streams are captured.
 * The lock is held. */
CUresult fake_capture_allows_use(const struct CUstream_st *s);
void fake_capture_forget(CUstream s); /* it was destroyed; the lock is held */

#endif
