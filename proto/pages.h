/* Pages: statistics that one process writes and another reads in shared memory, without messages.
 *
 * The usage page belongs to a tenant: the daemon writes it and every client of the tenant may read it. It
 * has an entry for each of the tenant's quotas, in the order of HelloReply.partitions. The client page
 * belongs to a session: its client writes it and the daemon reads it.
 *
 * The daemon makes and seals both memfds, so neither side can make the other's mapping fault or grow, and
 * only the daemon can write the usage page. Neither side trusts the other's page: values are shown and
 * compared with known ones, but no address or offset depends on them.
 *
 * All words have 64 bits in the machine's byte order. Version 1; a reader ignores a page of another
 * version. New statistics are only appended, with a larger entry_bytes.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#ifndef BFC_PROTO_PAGES_H
#define BFC_PROTO_PAGES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/ages.h"

#define PAGES_VERSION        UINT64_C(1)
#define PAGES_USAGE_MAGIC    UINT64_C(0x6567617375636662) /* "bfcusage" on little-endian machines */
#define PAGES_CLIENT_MAGIC   UINT64_C(0x646c656873636662) /* "bfcsheld" */
#define PAGES_MAX_PARTITIONS 16u                          /* with an entry of their own in a client page */
#define PAGES_MAX_STASHED    64u
#define PAGES_AGES           (PAGES_MAX_PARTITIONS + 2u) /* like `held`, and small blocks */
#define PAGES_SMALL          (PAGES_MAX_PARTITIONS + 1u) /* the index of small blocks, which can be stashed */
#define PAGES_AGE_GRANULE    256u
#define PAGES_MAX_BYTES      (UINT64_C(1) << 24)
#define PAGES_TRIES          64u /* of a read; a few microseconds in total */

/* The statistics of an entry, with the names of Statistics in bfcd.proto. */
enum pages_stat {
        PAGES_BYTES_LIMIT,
        PAGES_BYTES_RESERVED,
        PAGES_PEAK_BYTES_RESERVED,
        PAGES_BYTES_IN_USE,
        PAGES_PEAK_BYTES_IN_USE,
        PAGES_BYTES_REQUESTED,
        PAGES_NUM_BLOCKS,
        PAGES_NUM_SESSIONS,
        PAGES_LARGEST_FREE_BLOCK_BYTES,
        PAGES_LIFETIME_PEAK_BYTES_IN_USE,
        PAGES_LIFETIME_PEAK_BYTES_RESERVED,
        PAGES_BYTES_DIRECT,
        PAGES_N_STATS,
};
#define PAGES_ROOM 15u /* capacity of an entry */

/* sequence is odd while the entry is being written, and permanently once it is closed. */
struct pages_entry {
        _Alignas(128) _Atomic uint64_t sequence;
        _Atomic uint64_t stats[PAGES_ROOM];
};

struct pages_usage {
        uint64_t magic; /* the header is complete before another process gets the page */
        uint64_t version;
        uint64_t n_entries;
        uint64_t entry_bytes;
        struct pages_entry entries[];
};

/* The cache's statistics in a client page, as the client reports them. Each word is updated by itself: a
 * reader may see values of different moments. */
struct pages_held {
        _Atomic uint64_t bytes_slabs;   /* slabs: blocks of the daemon that the client divides */
        _Atomic uint64_t bytes_cut;     /* allocated in slabs, stashed or in use */
        _Atomic uint64_t bytes_whole;   /* blocks of the daemon that the program has undivided */
        _Atomic uint64_t bytes_streams; /* of these two: free for a stream's next work, or pending */
};

/* The ages of the program's blocks without a tag (ages.h). During an update `begun` is ahead of `done`.
 * 0: not reported. */
struct pages_ages {
        _Atomic uint64_t done; /* the tick to which the counters are valid */
        _Atomic uint64_t bytes[AGES_CLASSES];
        _Atomic uint64_t begun;
};

/* Freed bytes that are stashed for the next request of their size, and the ages of blocks that were
 * allocated or freed here, in units of 256 bytes modulo 2^32. There are several places, each on its own
 * cache lines, so that concurrent threads write to different ones. */
struct pages_stashed {
        _Alignas(128) _Atomic uint64_t n_bytes;
        _Atomic uint32_t done;
        _Atomic uint32_t granules[AGES_CLASSES];
        _Atomic uint32_t begun;
};

/* Blocks that could be parked now: parkable, awake and not in use. */
struct pages_idle {
        _Atomic uint64_t bytes;
        _Atomic uint64_t since_ms; /* the oldest last use of one of them, by CLOCK_MONOTONIC */
};

struct pages_client {
        _Atomic uint64_t magic; /* written last: the header is valid from then on */
        _Atomic uint64_t version;
        _Atomic uint64_t stashed_partition;               /* of all stashed blocks */
        _Atomic uint64_t n_stashed;                       /* places in use */
        struct pages_held held[PAGES_MAX_PARTITIONS + 1]; /* the last one: all further partitions together */
        struct pages_stashed stashed[PAGES_MAX_STASHED];
        struct pages_ages ages[PAGES_AGES];
        struct pages_idle idle[PAGES_MAX_PARTITIONS]; /* of further partitions nothing is known */
        _Atomic uint64_t has_pressure_fn;             /* not 0: the program gives memory back when asked */
        /* Memory of the partition's device that the process has without bfcd; the last one as of `held`. */
        _Atomic uint64_t bytes_outside[PAGES_MAX_PARTITIONS + 1];
};

_Static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "a word is one store");
_Static_assert(sizeof(struct pages_entry) == 128, "layout of an entry");
_Static_assert(offsetof(struct pages_usage, entries) == 128, "layout of a usage page");
_Static_assert(sizeof(struct pages_held) == 32 && offsetof(struct pages_client, held) == 32 &&
                       offsetof(struct pages_client, stashed) == 640 &&
                       offsetof(struct pages_client, ages) == 8832 &&
                       offsetof(struct pages_client, idle) == 12288 &&
                       offsetof(struct pages_client, bytes_outside) == 12552 &&
                       sizeof(struct pages_client) == 12800,
               "layout of a client page");

/* ---- entries ------------------------------------------------------------- */

/* One thread writes an entry. There is no fence, which race detectors would not understand. Instead each
 * value is stored with release semantics: a reader that sees a value of a later write also sees its odd
 * or later sequence. On x86 these are plain stores and loads. */
static inline void pages_write(struct pages_entry *e, const uint64_t stats[PAGES_N_STATS])
{
        uint64_t sequence = atomic_load_explicit(&e->sequence, memory_order_relaxed);

        atomic_store_explicit(&e->sequence, sequence + 1, memory_order_relaxed);
        for (unsigned i = 0; i < PAGES_N_STATS; i++)
                atomic_store_explicit(&e->stats[i], stats[i], memory_order_release);
        atomic_store_explicit(&e->sequence, sequence + 2, memory_order_release);
}

/* True: all of *ret is of one write. False: a write was in progress. */
static inline bool pages_try_read(const struct pages_entry *e, uint64_t ret[PAGES_N_STATS])
{
        uint64_t sequence = atomic_load_explicit(&e->sequence, memory_order_acquire);

        if (sequence & 1)
                return false;
        for (unsigned i = 0; i < PAGES_N_STATS; i++)
                ret[i] = atomic_load_explicit(&e->stats[i], memory_order_acquire);
        return atomic_load_explicit(&e->sequence, memory_order_relaxed) == sequence;
}

/* One thread at a time writes this word of a client page. Wraps around. */
static inline void pages_add(_Atomic uint64_t *word, uint64_t n)
{
        uint64_t before = atomic_load_explicit(word, memory_order_relaxed);

        atomic_store_explicit(word, before + n, memory_order_relaxed);
}

static inline void pages_show_class(struct pages_ages *p, const struct ages *a, unsigned c)
{
        atomic_store_explicit(&p->bytes[c], a->bytes[c], memory_order_release);
}

static inline void pages_show_ages(struct pages_ages *p, const struct ages *a)
{
        atomic_store_explicit(&p->begun, a->tick, memory_order_relaxed);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                pages_show_class(p, a, c);
        atomic_store_explicit(&p->done, a->tick, memory_order_release);
}

static inline void pages_show_stashed_class(struct pages_stashed *p, const struct ages *a, unsigned c)
{
        atomic_store_explicit(&p->granules[c], (uint32_t)(a->bytes[c] / PAGES_AGE_GRANULE),
                              memory_order_release);
}

static inline void pages_show_stashed_ages(struct pages_stashed *p, const struct ages *a)
{
        atomic_store_explicit(&p->begun, (uint32_t)a->tick, memory_order_relaxed);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                pages_show_stashed_class(p, a, c);
        atomic_store_explicit(&p->done, (uint32_t)a->tick, memory_order_release);
}

/* -EAGAIN: each try met a write in progress, the writer stopped in the middle of one, or the entry is
 * closed. */
int pages_read(const struct pages_entry *e, uint64_t ret[PAGES_N_STATS]);

/* All later reads fail. */
void pages_close(struct pages_entry *e);

/* ---- making and mapping --------------------------------------------------- */

/* Bytes of a usage page with n_entries entries, and of a client page, in whole memory pages. */
size_t pages_usage_bytes(size_t n_entries);
size_t pages_client_bytes(void);

/* Makes a guarded memfd (proto/memfd.h) of n_bytes, sealed against changes of its size. It is mapped (the
 * caller unmaps it with munmap()) unless ret_map is NULL. is_usage: mapped writable, and sealed against
 * every later write and writable mapping, and other processes are given memfd_lend() of it; else mapped
 * read-only, and the fd itself is given to another process. The caller owns *ret_fd. -EINVAL: this kernel lacks such seals (Linux 5.1 has them). -EMFILE,
 * -ENFILE, -ENOMEM. */
int pages_make(const char *name, size_t n_bytes, bool is_usage, void **ret_map, int *ret_fd);

/* A usage page as its reader sees it. The header is copied once, because the page may change. */
struct pages_view {
        const struct pages_usage *page; /* NULL: none */
        size_t n_bytes;
        size_t n_entries;
        size_t entry_bytes;
};

/* NULL: there is no such entry. */
static inline const struct pages_entry *pages_view_entry(const struct pages_view *v, size_t i)
{
        if (i >= v->n_entries)
                return NULL;
        return (const struct pages_entry *)(const void *)((const char *)v->page->entries +
                                                          i * v->entry_bytes);
}

/* Maps a page that another process made, if it is sealed as required and large enough: a usage page
 * read-only, a client page for reading and writing. Forked children inherit the mapping. The caller keeps
 * the fd and unmaps with munmap(). -EPROTO: not such a page. Other -errno of mmap(2). */
int pages_map_usage(int fd, struct pages_view *ret);
int pages_map_client(int fd, struct pages_client **ret);

#endif
