/* Pages: figures that two processes read in each other's memory, without a word.
 *
 * The usage page is a tenant's: the daemon writes it and every client of the tenant may
 * read it. It has an entry for each of the tenant's quotas, in the order of
 * HelloReply.partitions. The client page is a session's: its client writes it and the daemon
 * reads it.
 *
 * Both are memfds that the daemon makes and seals, so that neither end can make the other's
 * mapping fault or grow, and nobody but the daemon can write the usage page. Neither end
 * believes what stands in the other's page: figures are shown, and compared with what is
 * known; where something lies never depends on them.
 *
 * All words are 64 bits wide, in the machine's own order. Version 1; a reader that finds
 * another version leaves the page alone. Figures are only added, behind those there are, with
 * a larger entry_bytes.
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
#define PAGES_MAX_PARKED     64u
#define PAGES_AGES           (PAGES_MAX_PARTITIONS + 2u) /* as `held`, and those that may be parked */
#define PAGES_SMALL          (PAGES_MAX_PARTITIONS + 1u) /* the latter's: with what is counted beside parked */
#define PAGES_AGE_GRANULE    256u
#define PAGES_MAX_BYTES      (UINT64_C(1) << 24)
#define PAGES_TRIES          64u /* of a read; a few microseconds in all */

/* The figures of an entry, as Figures in bfcd.proto names them. */
enum pages_figure {
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
        PAGES_N_FIGURES,
};
#define PAGES_ROOM 15u /* figures for which an entry has room */

/* sequence is odd while the entry is being written, and for good once it is so no longer. */
struct pages_entry {
        _Alignas(128) _Atomic uint64_t sequence;
        _Atomic uint64_t figures[PAGES_ROOM];
};

struct pages_usage {
        uint64_t magic; /* the header is written before the page is given to anybody */
        uint64_t version;
        uint64_t n_entries;
        uint64_t entry_bytes;
        struct pages_entry entries[];
};

/* A client page. By its client's word, and each word for itself: what is read may be of several
 * moments. */
struct pages_held {
        _Atomic uint64_t bytes_slabs; /* blocks of the daemon's that the client cuts */
        _Atomic uint64_t bytes_cut;   /* what is cut out of them, parked or in use */
        _Atomic uint64_t bytes_whole; /* blocks of the daemon's that its program has as they came */
        _Atomic uint64_t
                bytes_streams; /* of these and those cut: free for a stream's next work, or pending */
};

/* The ages of blocks that the program has and to which it gave no tag (ages.h). While the counters move,
 * `begun` is ahead of `done`. 0: nothing is said. */
struct pages_ages {
        _Atomic uint64_t done; /* the tick to which they were brought */
        _Atomic uint64_t bytes[AGES_CLASSES];
        _Atomic uint64_t begun;
};

/* Cut, and free for the next request of its size; and the ages of blocks that came or went here, in units
 * of 256 bytes modulo 2^32. Several places, each on a cache line of its own: threads that run side by side
 * write side by side. */
struct pages_parked {
        _Alignas(128) _Atomic uint64_t n_bytes;
        _Atomic uint32_t done;
        _Atomic uint32_t granules[AGES_CLASSES];
        _Atomic uint32_t begun;
};

struct pages_client {
        _Atomic uint64_t magic; /* the client's last word of the header: before it nothing is said */
        _Atomic uint64_t version;
        _Atomic uint64_t parked_partition;                /* of all that is parked */
        _Atomic uint64_t n_parked;                        /* places in use */
        struct pages_held held[PAGES_MAX_PARTITIONS + 1]; /* the last: all further ones together */
        struct pages_parked parked[PAGES_MAX_PARKED];
        struct pages_ages ages[PAGES_AGES];
};

_Static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "a word is one store");
_Static_assert(sizeof(struct pages_entry) == 128, "layout of an entry");
_Static_assert(offsetof(struct pages_usage, entries) == 128, "layout of a usage page");
_Static_assert(sizeof(struct pages_held) == 32 && offsetof(struct pages_client, held) == 32 &&
                       offsetof(struct pages_client, parked) == 640 &&
                       offsetof(struct pages_client, ages) == 8832 && sizeof(struct pages_client) == 12288,
               "layout of a client page");

/* ---- entries ------------------------------------------------------------- */

/* One thread writes an entry. There is no fence, so that a race detector understands it: each figure is
 * released, so who sees one of a later write also sees that its sequence is odd, or
 * beyond. On x86 these are plain stores and loads. */
static inline void pages_write(struct pages_entry *e, const uint64_t figures[PAGES_N_FIGURES])
{
        uint64_t sequence = atomic_load_explicit(&e->sequence, memory_order_relaxed);

        atomic_store_explicit(&e->sequence, sequence + 1, memory_order_relaxed);
        for (unsigned i = 0; i < PAGES_N_FIGURES; i++)
                atomic_store_explicit(&e->figures[i], figures[i], memory_order_release);
        atomic_store_explicit(&e->sequence, sequence + 2, memory_order_release);
}

/* Whether all of *ret is of one write. Fails while the writer is at it. */
static inline bool pages_try_read(const struct pages_entry *e, uint64_t ret[PAGES_N_FIGURES])
{
        uint64_t sequence = atomic_load_explicit(&e->sequence, memory_order_acquire);

        if (sequence & 1)
                return false;
        for (unsigned i = 0; i < PAGES_N_FIGURES; i++)
                ret[i] = atomic_load_explicit(&e->figures[i], memory_order_acquire);
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

static inline void pages_show_parked_class(struct pages_parked *p, const struct ages *a, unsigned c)
{
        atomic_store_explicit(&p->granules[c], (uint32_t)(a->bytes[c] / PAGES_AGE_GRANULE),
                              memory_order_release);
}

static inline void pages_show_parked_ages(struct pages_parked *p, const struct ages *a)
{
        atomic_store_explicit(&p->begun, (uint32_t)a->tick, memory_order_relaxed);
        for (unsigned c = 0; c < AGES_CLASSES; c++)
                pages_show_parked_class(p, a, c);
        atomic_store_explicit(&p->done, (uint32_t)a->tick, memory_order_release);
}

/* -EAGAIN: the writer was at it each time, has stopped in the middle, or the entry is closed. */
int pages_read(const struct pages_entry *e, uint64_t ret[PAGES_N_FIGURES]);

/* From now on every read fails. */
void pages_close(struct pages_entry *e);

/* ---- making and mapping --------------------------------------------------- */

/* What a usage page of so many entries takes, and a client page: whole pages. */
size_t pages_usage_bytes(size_t n_entries);
size_t pages_client_bytes(void);

/* A guarded memfd (proto/memfd.h) of n_bytes, sealed against a change of its size, and mapped (the
 * caller's, by munmap()) unless ret_map is NULL. is_usage: mapped writable, and sealed against
 * every later writable mapping and every write; else mapped read-only. *ret_fd is the caller's;
 * other processes are given memfd_lend() of it. -EINVAL: this kernel has no such seals
 * (Linux 5.1 has). -EMFILE, -ENFILE, -ENOMEM. */
int pages_make(const char *name, size_t n_bytes, bool is_usage, void **ret_map, int *ret_fd);

/* A usage page as its reader has it. What the header said is copied once: the page may change. */
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

/* Maps what another process made, if it is sealed as it must be and large enough: a usage page
 * read-only, a client page for reading and writing. A forked child inherits them. The fd
 * stays the caller's; the mapping is, by munmap(). -EPROTO: it is no such page. Other -errno of
 * mmap(2). */
int pages_map_usage(int fd, struct pages_view *ret);
int pages_map_client(int fd, struct pages_client **ret);

#endif
