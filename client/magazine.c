/* Magazines; see magazine.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Order of locks: the caller's, then the magazines' in their order. A thread that has one of
 * these takes no other, unless it has the caller's.
 *
 * Invariants, for each: n_small and n_small_bytes are those of the lists; the list of a size is
 * empty exactly where its bit in `filled` is 0. The first n_large of `large` are set, in the
 * order in which they were parked. n_bytes is the sum of both kinds. */
#include "client/magazine.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define GRANULE       256u
#define N_SIZES       (MAGAZINE_SMALL_BYTES / GRANULE)
#define MIN_MAGAZINES 16u
#define MAX_MAGAZINES 64u
#define MAX_CREDIT    (2 * MAGAZINE_BLOCK_BYTES)
#define N_SPINS       100u
#define N_YIELDS      10u
#define MAX_SLEEP_NS  1000000

_Static_assert(N_SIZES == 64, "a bit of `filled` for each size");
_Static_assert(MAGAZINE_BLOCK_BYTES / GRANULE <= UINT16_MAX, "large_sizes");

struct magazine {
        bool is_locked; /* atomic */
        uint16_t n_small;
        uint16_t n_large;
        uint64_t credit;
        uint64_t n_allocs;
        uint64_t n_frees;
        uint64_t n_requested; /* given less taken back; modulo 2^64 */
        uint64_t n_bytes;
        struct pages_parked *shown; /* where n_bytes and ages are told; NULL: nowhere */
        uint64_t filled;
        uint64_t n_small_bytes;
        struct ages ages; /* of the blocks that were given less those taken back */
        struct record *tops[N_SIZES];
        uint16_t large_sizes[MAGAZINE_LARGE_BLOCKS]; /* as size_of() */
        struct record *large[MAGAZINE_LARGE_BLOCKS];
} __attribute__((aligned(128)));

struct magazines {
        uint64_t max_small, max_large; /* bytes, in each */
        unsigned n;                    /* a power of two */
        unsigned n_touched;            /* atomic: those behind were never used, and have nothing */
        /* bound <= peak, for both sums. These three change only while all locks are held. */
        uint64_t peak __attribute__((aligned(128)));
        uint64_t all_peak;
        bool sums_all; /* the sum over all partitions is kept; else it is the own one */
        uint64_t bound __attribute__((aligned(128)));
        uint64_t all_bound __attribute__((aligned(128))); /* atomic, as is bound */
        struct magazine items[];
};

static unsigned n_threads; /* atomic: that have a magazine */

/* 1 + the magazine that this thread used last, of any client; 0: none. Initial-exec uses four bytes of the
 * static TLS that the C library reserves: a call for each access would cost more than the lock. */
static __thread unsigned home __attribute__((tls_model("initial-exec")));

static uint64_t at_most(uint64_t n, uint64_t max)
{
        return n < max ? n : max;
}

int magazines_new(uint64_t max_bytes, struct magazines **ret)
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
        *m = (struct magazines){ .n = n, .n_touched = 1 };
        m->max_small = at_most(max_bytes / n / 8, MAGAZINE_MAX_SMALL);
        m->max_large = at_most(max_bytes / n - m->max_small, MAGAZINE_MAX_LARGE);
        for (unsigned i = 0; i < n; i++)
                m->items[i] = (struct magazine){ .shown = NULL };
        *ret = m;
        return 0;
}

struct magazines *magazines_free(struct magazines *m)
{
        free(m);
        return NULL;
}

uint64_t magazines_max_block(const struct magazines *m)
{
        if (m->max_large == 0)
                return 0;
        return at_most(m->max_large > MAGAZINE_SMALL_BYTES ? m->max_large / GRANULE * GRANULE
                                                           : MAGAZINE_SMALL_BYTES,
                       MAGAZINE_BLOCK_BYTES);
}

/* ---- locks -------------------------------------------------------------------- */

/* Held for some tens of instructions, mostly by the same thread. So there is no list of waiting threads, and
 * unlock() is a plain store: a mutex would take half of the time of a malloc and free. */
static bool try_lock(struct magazine *z)
{
        return !__atomic_load_n(&z->is_locked, __ATOMIC_RELAXED) &&
               !__atomic_exchange_n(&z->is_locked, true, __ATOMIC_ACQUIRE);
}

static void unlock(struct magazine *z)
{
        __atomic_store_n(&z->is_locked, false, __ATOMIC_RELEASE);
}

/* The owner may have been preempted, also by this thread if it has a higher priority: so this sleeps in the
 * end. */
static void __attribute__((noinline)) lock(struct magazine *z)
{
        struct timespec step = { 0, 1000 };

        for (unsigned i = 0; !try_lock(z); i++) {
                if (i < N_SPINS)
                        continue;
                if (i < N_SPINS + N_YIELDS) {
                        sched_yield();
                        continue;
                }
                nanosleep(&step, NULL);
                if (step.tv_nsec < MAX_SLEEP_NS)
                        step.tv_nsec *= 2;
        }
}

/* The owner of the first lock may raise n_touched: so it is constant while all are locked. */
static void __attribute__((noinline)) touch(struct magazines *m, unsigned at)
{
        lock(&m->items[0]);
        if (m->n_touched <= at)
                __atomic_store_n(&m->n_touched, at + 1, __ATOMIC_RELAXED);
        unlock(&m->items[0]);
}

/* Another thread has this thread's magazine, and may sleep: takes another one that is free. */
static struct magazine *__attribute__((noinline)) lock_another(struct magazines *m, unsigned at)
{
        unsigned n = __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED);

        for (unsigned i = 1; i < n; i++) {
                unsigned next = (at + i) % n;

                if (!try_lock(&m->items[next]))
                        continue;
                home = next + 1;
                return &m->items[next];
        }
        lock(&m->items[at]);
        return &m->items[at];
}

static inline __attribute__((always_inline)) struct magazine *lock_one(struct magazines *m)
{
        unsigned at;

        if (home == 0)
                home = __atomic_fetch_add(&n_threads, 1, __ATOMIC_RELAXED) % MAX_MAGAZINES + 1;
        at = (home - 1) & (m->n - 1);
        if (at >= __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED))
                touch(m, at);
        if (try_lock(&m->items[at]))
                return &m->items[at];
        return lock_another(m, at);
}

static void lock_all(struct magazines *m)
{
        lock(&m->items[0]);
        for (unsigned i = 1; i < m->n_touched; i++)
                lock(&m->items[i]);
}

static void unlock_all(struct magazines *m)
{
        for (unsigned i = m->n_touched; i > 0; i--)
                unlock(&m->items[i - 1]);
}

/* ---- the sum ------------------------------------------------------------------ */

/* False: that would pass the peak. */
static inline __attribute__((always_inline)) bool raise_one(uint64_t *bound_at, uint64_t peak,
                                                            uint64_t n_bytes)
{
        uint64_t bound = __atomic_load_n(bound_at, __ATOMIC_RELAXED);

        while (n_bytes <= peak - bound)
                if (__atomic_compare_exchange_n(bound_at, &bound, bound + n_bytes, true, __ATOMIC_RELAXED,
                                                __ATOMIC_RELAXED))
                        return true;
        return false;
}

/* False: that would pass a peak. The caller has a magazine's lock, or the caller's lock. */
static inline __attribute__((always_inline)) bool raise_bound(struct magazines *m, uint64_t n_bytes)
{
        if (!raise_one(&m->bound, m->peak, n_bytes))
                return false;
        if (__builtin_expect(!m->sums_all, 1) || raise_one(&m->all_bound, m->all_peak, n_bytes))
                return true;
        __atomic_sub_fetch(&m->bound, n_bytes, __ATOMIC_RELAXED);
        return false;
}

/* The same. */
static void lower_bound(struct magazines *m, uint64_t n_bytes)
{
        __atomic_sub_fetch(&m->bound, n_bytes, __ATOMIC_RELAXED);
        if (__builtin_expect(m->sums_all, 0))
                __atomic_sub_fetch(&m->all_bound, n_bytes, __ATOMIC_RELAXED);
}

/* All locks are held: then the bounds are what is in use. */
static void collect_credits(struct magazines *m)
{
        for (unsigned i = 0; i < m->n_touched; i++) {
                lower_bound(m, m->items[i].credit);
                m->items[i].credit = 0;
        }
        if (!m->sums_all) {
                m->all_bound = m->bound;
                m->all_peak = m->peak;
        }
}

/* All locks are held, and the credits collected. */
static void raise_with_peak(uint64_t *bound, uint64_t *peak, uint64_t n_bytes)
{
        *bound += n_bytes;
        if (*bound > *peak)
                *peak = *bound;
}

void magazines_count_alloc(struct magazines *m, uint64_t n_bytes)
{
        if (raise_bound(m, n_bytes))
                return;
        lock_all(m);
        collect_credits(m);
        raise_with_peak(&m->bound, &m->peak, n_bytes);
        raise_with_peak(&m->all_bound, &m->all_peak, n_bytes);
        unlock_all(m);
}

void magazines_count_free(struct magazines *m, uint64_t n_bytes)
{
        lower_bound(m, n_bytes);
}

void magazines_count_other_alloc(struct magazines *m, uint64_t n_bytes)
{
        if (m->sums_all && raise_one(&m->all_bound, m->all_peak, n_bytes))
                return;
        lock_all(m);
        collect_credits(m);
        m->sums_all = true;
        raise_with_peak(&m->all_bound, &m->all_peak, n_bytes);
        unlock_all(m);
}

void magazines_count_other_free(struct magazines *m, uint64_t n_bytes)
{
        __atomic_sub_fetch(&m->all_bound, n_bytes, __ATOMIC_RELAXED);
}

void magazines_reset_peak(struct magazines *m)
{
        lock_all(m);
        collect_credits(m);
        m->peak = m->bound;
        m->all_peak = m->all_bound;
        unlock_all(m);
}

void magazines_read(struct magazines *m, struct magazine_sums *ret)
{
        uint64_t credits = 0;

        *ret = (struct magazine_sums){ 0 };
        lock_all(m);
        for (unsigned i = 0; i < m->n_touched; i++) {
                credits += m->items[i].credit;
                ret->num_allocs += m->items[i].n_allocs;
                ret->num_frees += m->items[i].n_frees;
                ret->bytes_requested += m->items[i].n_requested;
                ret->bytes_parked += m->items[i].n_bytes;
        }
        ret->bytes_in_use = m->bound - credits;
        ret->peak_bytes_in_use = m->peak;
        ret->all_bytes_in_use = (m->sums_all ? m->all_bound : m->bound) - credits;
        ret->all_peak_bytes_in_use = m->sums_all ? m->all_peak : m->peak;
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
                m->items[i].shown = &parked[i];
        return n;
}

void magazines_lock(struct magazines *m)
{
        lock_all(m);
}

void magazines_unlock(struct magazines *m)
{
        unlock_all(m);
}

/* The lock is held. */
static void set_bytes(struct magazine *z, uint64_t n_bytes)
{
        z->n_bytes = n_bytes;
        if (z->shown)
                atomic_store_explicit(&z->shown->n_bytes, n_bytes, memory_order_relaxed);
}

static void __attribute__((noinline)) count_old_age(struct magazine *z, uint32_t born, uint64_t n_bytes)
{
        bool moved;
        unsigned c = ages_count(&z->ages, born, n_bytes, &moved);

        if (z->shown && moved)
                pages_show_parked_ages(z->shown, &z->ages);
        else if (z->shown)
                pages_show_parked_class(z->shown, &z->ages, c);
}

/* The same. Most blocks are allocated and freed within a tick. */
static inline __attribute__((always_inline)) void count_age(struct magazine *z, uint32_t born,
                                                            uint64_t n_bytes)
{
        if (born != z->ages.tick) {
                count_old_age(z, born, n_bytes);
                return;
        }
        z->ages.bytes[0] += n_bytes;
        if (z->shown)
                pages_show_parked_class(z->shown, &z->ages, 0);
}

/* The lock is held. */
static struct record *empty_small(struct magazine *z, struct record *list)
{
        for (; z->filled; z->filled &= z->filled - 1) {
                struct record *r = z->tops[__builtin_ctzll(z->filled)], *last = r;

                while (last->below)
                        last = last->below;
                last->below = list;
                list = r;
                z->tops[__builtin_ctzll(z->filled)] = NULL;
        }
        z->n_small = 0;
        set_bytes(z, z->n_bytes - z->n_small_bytes);
        z->n_small_bytes = 0;
        return list;
}

/* The lock is held. */
static struct record *empty_large(struct magazine *z, struct record *list)
{
        while (z->n_large > 0) {
                struct record *r = z->large[--z->n_large];

                r->below = list;
                list = r;
        }
        set_bytes(z, z->n_small_bytes);
        return list;
}

/* Of the large blocks of a size, the last that was parked; -1: there is none. The lock is held. */
static int find_large(const struct magazine *z, unsigned size)
{
        int i = z->n_large;

        while (--i >= 0 && z->large_sizes[i] != size)
                ;
        return i;
}

static void take_large(struct magazine *z, int at)
{
        z->n_large--;
        for (int i = at; i < z->n_large; i++) {
                z->large[i] = z->large[i + 1];
                z->large_sizes[i] = z->large_sizes[i + 1];
        }
}

static void take_small(struct magazine *z, unsigned size, struct record *r, uint64_t n_bytes)
{
        z->tops[size] = r->below;
        z->filled &= ~((uint64_t)!r->below << size);
        z->n_small--;
        z->n_small_bytes -= n_bytes;
}

struct record *magazines_get(struct magazines *m, uint64_t n_requested)
{
        unsigned size = size_of(n_requested);
        uint64_t n_bytes = (size + UINT64_C(1)) * GRANULE;
        struct magazine *z = lock_one(m);
        struct record *r = NULL;
        uint32_t born = 0;
        int at = 0;

        if (size < N_SIZES)
                r = z->tops[size];
        else if ((at = find_large(z, size)) >= 0)
                r = z->large[at];
        if (r && z->credit >= n_bytes)
                z->credit -= n_bytes;
        else if (r && !raise_bound(m, n_bytes))
                r = NULL;
        if (r) {
                if (size < N_SIZES)
                        take_small(z, size, r, n_bytes);
                else
                        take_large(z, at);
                set_bytes(z, z->n_bytes - n_bytes);
                z->n_allocs++;
                z->n_requested += n_requested;
                born = ages_now();
                count_age(z, born, n_bytes);
        }
        unlock(z);
        if (r)
                blocks_unpark(r, n_requested, born);
        return r;
}

/* The next three: the magazine's lock is held. Return the blocks that do not stay. */
static struct record *put_small(const struct magazines *m, struct magazine *z, unsigned size,
                                struct record *record, uint64_t n_bytes)
{
        record->below = z->tops[size];
        z->tops[size] = record;
        z->filled |= UINT64_C(1) << size;
        z->n_small_bytes += n_bytes;
        if (++z->n_small > MAGAZINE_BLOCKS || z->n_small_bytes > m->max_small)
                return empty_small(z, NULL);
        return NULL;
}

static struct record *put_large(const struct magazines *m, struct magazine *z, unsigned size,
                                struct record *record)
{
        if (z->n_large == MAGAZINE_LARGE_BLOCKS || z->n_bytes - z->n_small_bytes > m->max_large) {
                record->below = NULL;
                return empty_large(z, record);
        }
        z->large[z->n_large] = record;
        z->large_sizes[z->n_large++] = (uint16_t)size;
        return NULL;
}

static void add_credit(struct magazines *m, struct magazine *z, uint64_t n_bytes)
{
        z->credit += n_bytes;
        if (z->credit > MAX_CREDIT) {
                lower_bound(m, z->credit);
                z->credit = 0;
        }
}

struct record *magazines_put(struct magazines *m, struct record *record)
{
        uint64_t n_bytes = record->block.n_bytes, n_requested = record->block.n_requested;
        unsigned size = size_of(n_bytes);
        struct magazine *z = lock_one(m);
        struct record *full;

        z->n_frees++;
        z->n_requested -= n_requested;
        if (record->block.born != 0)
                count_age(z, record->block.born, -n_bytes);
        add_credit(m, z, n_bytes);
        set_bytes(z, z->n_bytes + n_bytes);
        if (size < N_SIZES)
                full = put_small(m, z, size, record, n_bytes);
        else
                full = put_large(m, z, size, record);
        unlock(z);
        return full;
}

struct record *magazines_take_all(struct magazines *m)
{
        unsigned n = __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED);
        struct record *all = NULL;

        for (unsigned i = 0; i < n; i++) {
                struct magazine *z = &m->items[i];

                lock(z);
                all = empty_small(z, all);
                all = empty_large(z, all);
                unlock(z);
        }
        return all;
}
