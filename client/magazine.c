/* Magazines; see magazine.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Order of locks: the caller's, then the magazines' in their order. A thread that has one of
 * these takes no other, unless it has the caller's.
 *
 * Invariants, for each: n_blocks and n_bytes are those of the lists; the list of a size is
 * empty exactly where its bit in `filled` is 0. */
#include "client/magazine.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#define GRANULE       256u
#define N_SIZES       (MAGAZINE_BLOCK_BYTES / GRANULE)
#define MIN_MAGAZINES 16u
#define MAX_MAGAZINES 64u
#define MAX_CREDIT    (UINT64_C(1) << 20)

_Static_assert(N_SIZES == 64, "a bit of `filled` for each size");

struct magazine {
        pthread_mutex_t lock;
        uint64_t credit;
        uint64_t n_allocs;
        uint64_t n_frees;
        uint64_t n_requested; /* given less taken back; modulo 2^64 */
        uint64_t n_bytes;
        _Atomic uint64_t *shown; /* where n_bytes is told */
        _Atomic uint64_t unseen; /* to nobody, so far */
        unsigned n_blocks;
        uint64_t filled;
        struct record *tops[N_SIZES];
} __attribute__((aligned(128)));

struct magazines {
        uint64_t bytes_each;
        unsigned n;         /* a power of two */
        unsigned n_touched; /* atomic: those behind were never used, and have nothing */
        /* bound <= peak; peak changes only while all locks are held. */
        uint64_t peak __attribute__((aligned(128)));
        uint64_t bound __attribute__((aligned(128)));
        struct magazine items[];
};

static unsigned n_threads;     /* atomic: that have a home */
static __thread unsigned home; /* the magazine that was used last, of whichever client, and 1; 0: none yet */

int magazines_new(uint64_t max_bytes, uint64_t max_bytes_each, struct magazines **ret)
{
        long n_processors = sysconf(_SC_NPROCESSORS_CONF);
        struct magazines *m;
        unsigned n = MIN_MAGAZINES;
        size_t size;

        while (n < MAX_MAGAZINES && n < 2 * n_processors)
                n *= 2;
        size = sizeof(*m) + n * sizeof(m->items[0]);
        m = aligned_alloc(_Alignof(struct magazines), size);
        if (!m)
                return -ENOMEM;
        *m = (struct magazines){ .n = n,
                                 .n_touched = 1,
                                 .bytes_each =
                                         max_bytes / n < max_bytes_each ? max_bytes / n : max_bytes_each };
        for (unsigned i = 0; i < n; i++) {
                m->items[i] = (struct magazine){ .shown = &m->items[i].unseen };
                pthread_mutex_init(&m->items[i].lock, NULL);
        }
        *ret = m;
        return 0;
}

struct magazines *magazines_free(struct magazines *m)
{
        for (unsigned i = 0; m && i < m->n; i++)
                pthread_mutex_destroy(&m->items[i].lock);
        free(m);
        return NULL;
}

/* Who has the first one's lock may raise n_touched: so it is constant while all are locked. */
static void touch(struct magazines *m, unsigned at)
{
        pthread_mutex_lock(&m->items[0].lock);
        if (m->n_touched <= at)
                __atomic_store_n(&m->n_touched, at + 1, __ATOMIC_RELAXED);
        pthread_mutex_unlock(&m->items[0].lock);
}

/* The thread's own is somebody else's now, who may sleep: another one that is free. */
static struct magazine *lock_another(struct magazines *m, unsigned at)
{
        unsigned n = __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED);

        for (unsigned i = 1; i < n; i++) {
                unsigned next = (at + i) % n;

                if (pthread_mutex_trylock(&m->items[next].lock) != 0)
                        continue;
                home = next + 1;
                return &m->items[next];
        }
        pthread_mutex_lock(&m->items[at].lock);
        return &m->items[at];
}

static struct magazine *lock_one(struct magazines *m)
{
        unsigned at;

        if (home == 0)
                home = __atomic_fetch_add(&n_threads, 1, __ATOMIC_RELAXED) % MAX_MAGAZINES + 1;
        at = (home - 1) & (m->n - 1);
        if (at >= __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED))
                touch(m, at);
        if (pthread_mutex_trylock(&m->items[at].lock) == 0)
                return &m->items[at];
        return lock_another(m, at);
}

static void lock_all(struct magazines *m)
{
        pthread_mutex_lock(&m->items[0].lock);
        for (unsigned i = 1; i < m->n_touched; i++)
                pthread_mutex_lock(&m->items[i].lock);
}

static void unlock_all(struct magazines *m)
{
        for (unsigned i = m->n_touched; i > 0; i--)
                pthread_mutex_unlock(&m->items[i - 1].lock);
}

/* ---- the sum ------------------------------------------------------------------ */

/* False: that would pass the peak. The caller has the lock of a magazine, or is one at a time. */
static bool raise_bound(struct magazines *m, uint64_t n_bytes)
{
        uint64_t peak = m->peak, bound = __atomic_load_n(&m->bound, __ATOMIC_RELAXED);

        while (n_bytes <= peak - bound)
                if (__atomic_compare_exchange_n(&m->bound, &bound, bound + n_bytes, true, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED))
                        return true;
        return false;
}

static void lower_bound(struct magazines *m, uint64_t n_bytes)
{
        __atomic_sub_fetch(&m->bound, n_bytes, __ATOMIC_RELAXED);
}

/* All locks are held: then the bound is what is in use. */
static uint64_t collect_credits(struct magazines *m)
{
        for (unsigned i = 0; i < m->n_touched; i++) {
                lower_bound(m, m->items[i].credit);
                m->items[i].credit = 0;
        }
        return m->bound;
}

void magazines_count_alloc(struct magazines *m, uint64_t n_bytes)
{
        if (raise_bound(m, n_bytes))
                return;
        lock_all(m);
        m->bound = collect_credits(m) + n_bytes;
        if (m->bound > m->peak)
                m->peak = m->bound;
        unlock_all(m);
}

void magazines_count_free(struct magazines *m, uint64_t n_bytes)
{
        lower_bound(m, n_bytes);
}

void magazines_reset_peak(struct magazines *m)
{
        lock_all(m);
        m->peak = collect_credits(m);
        unlock_all(m);
}

void magazines_read(struct magazines *m, struct magazine_sums *ret)
{
        *ret = (struct magazine_sums){ 0 };
        lock_all(m);
        ret->bytes_in_use = m->bound;
        for (unsigned i = 0; i < m->n_touched; i++) {
                ret->bytes_in_use -= m->items[i].credit;
                ret->num_allocs += m->items[i].n_allocs;
                ret->num_frees += m->items[i].n_frees;
                ret->bytes_requested += m->items[i].n_requested;
                ret->bytes_parked += m->items[i].n_bytes;
        }
        ret->peak_bytes_in_use = m->peak;
        unlock_all(m);
}

/* ---- blocks ------------------------------------------------------------------- */

/* Index of a size. */
static unsigned size_of(uint64_t n_bytes)
{
        return (unsigned)((n_bytes - 1) / GRANULE);
}

unsigned magazines_show(struct magazines *m, struct pages_parked *parked, unsigned n_places)
{
        unsigned n = m->n < n_places ? m->n : n_places;

        for (unsigned i = 0; i < n; i++)
                m->items[i].shown = &parked[i].n_bytes;
        return n;
}

void magazines_hold(struct magazines *m)
{
        lock_all(m);
}

void magazines_release(struct magazines *m)
{
        unlock_all(m);
}

/* Its lock is held. */
static void set_bytes(struct magazine *z, uint64_t n_bytes)
{
        z->n_bytes = n_bytes;
        atomic_store_explicit(z->shown, n_bytes, memory_order_relaxed);
}

/* Its lock is held. */
static struct record *empty(struct magazine *z)
{
        struct record *list = NULL;

        for (; z->filled; z->filled &= z->filled - 1) {
                struct record *r = z->tops[__builtin_ctzll(z->filled)], *last = r;

                while (last->below)
                        last = last->below;
                last->below = list;
                list = r;
                z->tops[__builtin_ctzll(z->filled)] = NULL;
        }
        z->n_blocks = 0;
        set_bytes(z, 0);
        return list;
}

struct record *magazines_get(struct magazines *m, uint64_t n_requested)
{
        unsigned size = size_of(n_requested);
        uint64_t n_bytes = (size + UINT64_C(1)) * GRANULE;
        struct magazine *z = lock_one(m);
        struct record *r = z->tops[size];

        if (r && z->credit >= n_bytes)
                z->credit -= n_bytes;
        else if (r && !raise_bound(m, n_bytes))
                r = NULL;
        if (r) {
                z->tops[size] = r->below;
                z->filled &= ~((uint64_t)!r->below << size);
                z->n_blocks--;
                set_bytes(z, z->n_bytes - n_bytes);
                z->n_allocs++;
                z->n_requested += n_requested;
        }
        pthread_mutex_unlock(&z->lock);
        if (r)
                blocks_unpark(r, n_requested);
        return r;
}

struct record *magazines_put(struct magazines *m, struct record *record)
{
        uint64_t n_bytes = record->block.n_bytes, n_requested = record->block.n_requested;
        unsigned size = size_of(n_bytes);
        struct magazine *z = lock_one(m);
        struct record *full = NULL;

        z->n_frees++;
        z->n_requested -= n_requested;
        z->credit += n_bytes;
        if (z->credit > MAX_CREDIT) {
                lower_bound(m, z->credit);
                z->credit = 0;
        }
        record->below = z->tops[size];
        z->tops[size] = record;
        z->filled |= UINT64_C(1) << size;
        set_bytes(z, z->n_bytes + n_bytes);
        if (++z->n_blocks > MAGAZINE_BLOCKS || z->n_bytes > m->bytes_each)
                full = empty(z);
        pthread_mutex_unlock(&z->lock);
        return full;
}

struct record *magazines_take_all(struct magazines *m)
{
        unsigned n = __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED);
        struct record *all = NULL, *list, *last;

        for (unsigned i = 0; i < n; i++) {
                pthread_mutex_lock(&m->items[i].lock);
                list = empty(&m->items[i]);
                pthread_mutex_unlock(&m->items[i].lock);
                for (last = list; last && last->below; last = last->below)
                        ;
                if (last) {
                        last->below = all;
                        all = list;
                }
        }
        return all;
}
