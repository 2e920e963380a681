/* Magazines; see magazine.h.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * Order of locks: the caller's, then the magazines' in their order. A thread that has one of
 * these takes no other, unless it has the caller's.
 *
 * Invariants, for each: n_small is the number of blocks in the lists; the list of a size is empty
 * where its bit in `filled` is 0. The first n_large of `large` are set, in the order in which they
 * were stashed. n_large_bytes is the sum of these and of the huge one, n_bytes the sum of all.
 *
 * Nearly all calls are of small blocks, and meet nothing that is rare. They have a path of their own,
 * which calls no other function: so it has no registers to save. */
#include "client/magazine.h"

#include <errno.h>
#include <stdlib.h>

#include "client/biased_lock.h"

#define GRANULE    256u
#define N_SIZES    (MAGAZINE_SMALL_BYTES / GRANULE)
#define MAX_CREDIT (2 * MAGAZINE_LARGE_BYTES)

_Static_assert(N_SIZES == 64, "a bit of `filled` for each size");
_Static_assert(MAGAZINE_LARGE_BYTES / GRANULE <= UINT16_MAX, "large_sizes");

struct magazine {
        struct biased_lock lock;
        uint16_t n_small;
        uint16_t n_large;
        uint64_t credit;
        uint64_t n_allocs;
        struct pages_stashed *shown; /* where n_bytes and ages are told; NULL: nowhere */
        uint64_t n_requested;        /* given less taken back; modulo 2^64 */
        uint64_t filled;
        uint64_t n_bytes;
        uint64_t n_large_bytes;
        uint64_t n_frees;
        struct ages ages; /* of the blocks that were given less those taken back */
        struct record *tops[N_SIZES];
        uint16_t large_sizes[MAGAZINE_LARGE_BLOCKS]; /* as size_of() */
        struct record *large[MAGAZINE_LARGE_BLOCKS];
        struct record *huge; /* NULL: none */
        unsigned huge_size;  /* of the last huge one that was requested, as size_of() */
        unsigned
                n_huge_turns; /* of requests and frees of that size, each after the other; odd: the last was a request */
} __attribute__((aligned(128)));

struct magazines {
        uint64_t max_small, max_large; /* bytes, in each */
        uint64_t max_huge;             /* the largest huge one */
        unsigned n;                    /* one for each thread slot, which is the owner of its lock */
        unsigned n_touched;            /* atomic: those behind were never used, and have nothing */
        /* bound <= peak, for both sums. These three change only while all locks are held. */
        uint64_t peak __attribute__((aligned(128)));
        uint64_t all_peak;
        bool sums_all; /* the sum over all partitions is kept; else it is the own one */
        uint64_t bound __attribute__((aligned(128)));
        uint64_t all_bound __attribute__((aligned(128))); /* atomic, as is bound */
        struct magazine items[];
};

/* How this thread has a magazine's lock: by biased_lock_enter(), or by other functions. */
enum how { ENTERED, LOCKED };

/* Of a thread without a magazine of its own: the one that it used last, of any client. */
static __thread unsigned guest_of __attribute__((tls_model("initial-exec")));

static uint64_t at_most(uint64_t n, uint64_t max)
{
        return n < max ? n : max;
}

int magazines_new(uint64_t max_bytes, struct magazines **ret)
{
        unsigned n = thread_slots();
        struct magazines *m = aligned_alloc(_Alignof(struct magazines), sizeof(*m) + n * sizeof(m->items[0]));

        if (!m)
                return -ENOMEM;
        *m = (struct magazines){ .n = n, .n_touched = 1 };
        m->max_small = at_most(max_bytes / n / 8, MAGAZINE_MAX_SMALL);
        m->max_large = at_most(max_bytes / n - m->max_small, MAGAZINE_MAX_LARGE);
        m->max_huge = at_most(max_bytes / n - m->max_small - m->max_large, MAGAZINE_HUGE_BYTES);
        for (unsigned i = 0; i < n; i++)
                m->items[i] = (struct magazine){ .shown = NULL };
        biased_lock_register();
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
        if (m->max_huge > MAGAZINE_LARGE_BYTES)
                return m->max_huge / GRANULE * GRANULE;
        return at_most(m->max_large > MAGAZINE_SMALL_BYTES ? m->max_large / GRANULE * GRANULE
                                                           : MAGAZINE_SMALL_BYTES,
                       MAGAZINE_LARGE_BYTES);
}

/* ---- locks -------------------------------------------------------------------- */

static bool is_own(unsigned at)
{
        return thread_slot == at + 1;
}

/* Who has the first lock may raise n_touched: so it is constant while all are locked. */
static void __attribute__((noinline)) touch(struct magazines *m, unsigned at)
{
        biased_lock_lock(&m->items[0].lock, is_own(0));
        if (m->n_touched <= at)
                __atomic_store_n(&m->n_touched, at + 1, __ATOMIC_RELAXED);
        biased_lock_unlock(&m->items[0].lock);
}

/* Another thread has the magazine `at`, and may sleep: takes another one that is free. Without a slot the
 * thread moves on, even to one of an owner, which is perhaps idle. */
static struct magazine *__attribute__((noinline)) lock_another(struct magazines *m, unsigned at)
{
        unsigned n = __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED);

        for (unsigned i = 1; i < n; i++) {
                unsigned next = (at + i) % n;

                if (!biased_lock_try(&m->items[next].lock, false))
                        continue;
                guest_of = next;
                return &m->items[next];
        }
        if (!is_own(at) || biased_lock_is_inside(&m->items[at].lock))
                guest_of = at = (at + 1) % n;
        biased_lock_lock(&m->items[at].lock, is_own(at));
        return &m->items[at];
}

static struct magazine *__attribute__((noinline)) lock_one(struct magazines *m)
{
        unsigned at;

        thread_slot_take();
        at = thread_slot - 1;
        if (at >= m->n)
                at = guest_of % m->n;
        if (at >= __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED))
                touch(m, at);
        if (biased_lock_try(&m->items[at].lock, is_own(at)))
                return &m->items[at];
        return lock_another(m, at);
}

/* The thread's own one. NULL: it has none yet, it is not biased, or another thread has it. */
static inline __attribute__((always_inline)) struct magazine *enter_own(struct magazines *m)
{
        unsigned at = thread_slot - 1;

        return at < __atomic_load_n(&m->n_touched, __ATOMIC_RELAXED) && biased_lock_enter(&m->items[at].lock)
                       ? &m->items[at]
                       : NULL;
}

static inline __attribute__((always_inline)) void unlock(struct magazine *z, enum how how)
{
        if (how == ENTERED)
                biased_lock_leave(&z->lock);
        else
                biased_lock_unlock(&z->lock);
}

static void lock_all(struct magazines *m)
{
        bool is_biased = biased_lock_close(&m->items[0].lock, is_own(0));

        for (unsigned i = 1; i < m->n_touched; i++)
                is_biased |= biased_lock_close(&m->items[i].lock, is_own(i));
        if (is_biased)
                biased_lock_barrier();
        for (unsigned i = 0; i < m->n_touched; i++)
                biased_lock_revoke(&m->items[i].lock, is_own(i));
}

static void unlock_all(struct magazines *m)
{
        for (unsigned i = m->n_touched; i > 0; i--)
                biased_lock_unlock(&m->items[i - 1].lock);
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
                ret->bytes_stashed += m->items[i].n_bytes;
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

unsigned magazines_show(struct magazines *m, struct pages_stashed *stashed, unsigned n_places)
{
        unsigned n = m->n < n_places ? m->n : n_places;

        for (unsigned i = 0; i < n; i++)
                m->items[i].shown = &stashed[i];
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
                pages_show_stashed_ages(z->shown, &z->ages);
        else if (z->shown)
                pages_show_stashed_class(z->shown, &z->ages, c);
}

/* count_old_age() for a block that was allocated in the current tick: most are freed within it. */
static inline __attribute__((always_inline)) void count_young(struct magazine *z, uint64_t n_bytes)
{
        z->ages.bytes[0] += n_bytes;
        if (z->shown)
                pages_show_stashed_class(z->shown, &z->ages, 0);
}

static void count_age(struct magazine *z, uint32_t born, uint64_t n_bytes)
{
        if (born == z->ages.tick)
                count_young(z, n_bytes);
        else
                count_old_age(z, born, n_bytes);
}

/* The lock is held. */
static struct record *__attribute__((noinline)) empty_small(struct magazine *z, struct record *list)
{
        for (; z->filled; z->filled &= z->filled - 1) {
                struct record *r = z->tops[__builtin_ctzll(z->filled)], *below;

                z->tops[__builtin_ctzll(z->filled)] = NULL;
                for (; r; r = below) {
                        below = r->below;
                        r->below = list;
                        list = r;
                }
        }
        z->n_small = 0;
        set_bytes(z, z->n_large_bytes);
        return list;
}

/* The huge one as well. The lock is held. */
static struct record *__attribute__((noinline)) empty_large(struct magazine *z, struct record *list)
{
        if (z->huge) {
                z->huge->below = list;
                list = z->huge;
                z->huge = NULL;
        }
        while (z->n_large > 0) {
                struct record *r = z->large[--z->n_large];

                r->below = list;
                list = r;
        }
        set_bytes(z, z->n_bytes - z->n_large_bytes);
        z->n_large_bytes = 0;
        return list;
}

/* Of the large blocks of a size, the last that was stashed; -1: there is none. The lock is held. */
static int find_large(const struct magazine *z, unsigned size)
{
        int i = z->n_large;

        while (--i >= 0 && z->large_sizes[i] != size)
                ;
        return i;
}

static struct record *take_large(struct magazine *z, int at)
{
        struct record *r = z->large[at];

        z->n_large--;
        for (int i = at; i < z->n_large; i++) {
                z->large[i] = z->large[i + 1];
                z->large_sizes[i] = z->large_sizes[i + 1];
        }
        z->n_large_bytes -= r->block.n_bytes;
        return r;
}

static bool is_huge(unsigned size)
{
        return size >= MAGAZINE_LARGE_BYTES / GRANULE;
}

/* Notes the request. NULL: there is none. The lock is held. */
static struct record *find_huge(struct magazine *z, unsigned size)
{
        z->n_huge_turns = size == z->huge_size && z->n_huge_turns % 2 == 0 ? z->n_huge_turns + 1 : 1;
        z->huge_size = size;
        return z->huge && size_of(z->huge->block.n_bytes) == size ? z->huge : NULL;
}

static struct record *take_huge(struct magazine *z)
{
        struct record *r = z->huge;

        z->huge = NULL;
        z->n_large_bytes -= r->block.n_bytes;
        return r;
}

/* Of a block that was taken out; n_bytes: of the block. Unlocks. */
static inline __attribute__((always_inline)) struct record *give(struct magazine *z, enum how how,
                                                                 struct record *r, uint64_t n_requested,
                                                                 uint64_t n_bytes, uint32_t born)
{
        z->n_allocs++;
        z->n_requested += n_requested;
        set_bytes(z, z->n_bytes - n_bytes);
        unlock(z, how);
        return blocks_unstash(r, n_requested, born);
}

static struct record *take_small(struct magazine *z, unsigned size)
{
        struct record *r = z->tops[size];

        z->tops[size] = r->below;
        z->n_small--;
        return r;
}

/* The lock is held. */
static struct record *__attribute__((noinline))
get_any(struct magazines *m, struct magazine *z, enum how how, uint64_t n_requested, uint32_t born)
{
        unsigned size = size_of(n_requested);
        uint64_t n_bytes = (size + UINT64_C(1)) * GRANULE;
        int at = size < N_SIZES || is_huge(size) ? -1 : find_large(z, size);

        if (size < N_SIZES ? !z->tops[size] : is_huge(size) ? !find_huge(z, size) : at < 0) {
                unlock(z, how);
                return NULL;
        }
        if (z->credit >= n_bytes) {
                z->credit -= n_bytes;
        } else if (!raise_bound(m, n_bytes)) {
                unlock(z, how);
                return NULL;
        }
        count_age(z, born, n_bytes);
        return give(z, how,
                    size < N_SIZES  ? take_small(z, size)
                    : is_huge(size) ? take_huge(z)
                                    : take_large(z, at),
                    n_requested, n_bytes, born);
}

/* The lock is held. */
static struct record *__attribute__((noinline))
get_usual(struct magazines *m, struct magazine *z, uint64_t n_requested, uint32_t born)
{
        unsigned size = size_of(n_requested);
        uint64_t n_bytes = (size + UINT64_C(1)) * GRANULE;

        if (size >= N_SIZES || !z->tops[size] || z->credit < n_bytes || born != z->ages.tick)
                return get_any(m, z, ENTERED, n_requested, born);
        z->credit -= n_bytes;
        count_young(z, n_bytes);
        return give(z, ENTERED, take_small(z, size), n_requested, n_bytes, born);
}

struct record *magazines_get(struct magazines *m, uint64_t n_requested)
{
        uint32_t born = ages_now();
        struct magazine *z = enter_own(m);

        return z ? get_usual(m, z, n_requested, born) : get_any(m, lock_one(m), LOCKED, n_requested, born);
}

/* The next five: the magazine's lock is held. put_…() return the blocks that do not stay. */
static inline __attribute__((always_inline)) void count_put(struct magazine *z, const struct record *record)
{
        uint64_t n_bytes = record->block.n_bytes;

        z->credit += n_bytes;
        set_bytes(z, z->n_bytes + n_bytes);
        z->n_requested -= record->block.n_requested;
        z->n_frees++;
}

static inline __attribute__((always_inline)) void add_small(struct magazine *z, unsigned size,
                                                            struct record *record)
{
        record->below = z->tops[size];
        z->tops[size] = record;
        z->filled |= UINT64_C(1) << size;
        z->n_small++;
}

static struct record *put_large(const struct magazines *m, struct magazine *z, unsigned size,
                                struct record *record)
{
        uint64_t huge_bytes = z->huge ? z->huge->block.n_bytes : 0;

        z->n_large_bytes += record->block.n_bytes;
        if (z->n_large == MAGAZINE_LARGE_BLOCKS || z->n_large_bytes - huge_bytes > m->max_large) {
                record->below = NULL;
                return empty_large(z, record);
        }
        z->large[z->n_large] = record;
        z->large_sizes[z->n_large++] = (uint16_t)size;
        return NULL;
}

static struct record *put_huge(struct magazine *z, unsigned size, struct record *record)
{
        struct record *leaves = record;

        z->n_huge_turns = size == z->huge_size && z->n_huge_turns % 2 == 1 ? z->n_huge_turns + 1 : 0;
        z->n_large_bytes += record->block.n_bytes;
        if (z->n_huge_turns >= 2 * MAGAZINE_HUGE_AFTER) {
                leaves = z->huge;
                z->huge = record;
        }
        if (!leaves)
                return NULL;
        leaves->below = NULL;
        z->n_large_bytes -= leaves->block.n_bytes;
        set_bytes(z, z->n_bytes - leaves->block.n_bytes);
        return leaves;
}

static struct record *__attribute__((noinline))
put_any(struct magazines *m, struct magazine *z, enum how how, struct record *record)
{
        unsigned size = size_of(record->block.n_bytes);
        struct record *full = NULL;

        count_put(z, record);
        if (record->block.born != 0)
                count_age(z, record->block.born, -record->block.n_bytes);
        if (z->credit > MAX_CREDIT) {
                lower_bound(m, z->credit);
                z->credit = 0;
        }
        if (is_huge(size))
                full = put_huge(z, size, record);
        else if (size >= N_SIZES)
                full = put_large(m, z, size, record);
        else
                add_small(z, size, record);
        if (z->n_small > MAGAZINE_BLOCKS || z->n_bytes - z->n_large_bytes > m->max_small)
                full = empty_small(z, full);
        unlock(z, how);
        return full;
}

/* The lock is held. */
static struct record *__attribute__((noinline))
put_usual(struct magazines *m, struct magazine *z, struct record *record)
{
        uint64_t n_bytes = record->block.n_bytes;
        unsigned size = size_of(n_bytes);

        if (size >= N_SIZES || record->block.born != z->ages.tick || record->block.born == 0 ||
            z->credit + n_bytes > MAX_CREDIT || z->n_small >= MAGAZINE_BLOCKS ||
            z->n_bytes - z->n_large_bytes + n_bytes > m->max_small)
                return put_any(m, z, ENTERED, record);
        count_put(z, record);
        count_young(z, -n_bytes);
        add_small(z, size, record);
        unlock(z, ENTERED);
        return NULL;
}

struct record *magazines_put(struct magazines *m, struct record *record)
{
        struct magazine *z = enter_own(m);

        return z ? put_usual(m, z, record) : put_any(m, lock_one(m), LOCKED, record);
}

struct record *magazines_take_all(struct magazines *m)
{
        struct record *all = NULL;

        lock_all(m);
        for (unsigned i = 0; i < m->n_touched; i++) {
                all = empty_small(&m->items[i], all);
                all = empty_large(&m->items[i], all);
        }
        unlock_all(m);
        return all;
}
