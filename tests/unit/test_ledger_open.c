/* SPDX-License-Identifier: Apache-2.0 */
/* A successor opens a ledger: after a clean end, after kills, and damaged. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "ledger_life.h"
#include "tests/suite.h"
#include "tests/checks.h"
#include "tests/unit/killed.h"

enum { KILLS = 400, DAMAGES = 3000 };

static void assert_sound(const struct ledger *l)
{
        const char *why = "";

        ck_assert_msg(ledger_check(l, &why) == 0, "%s", why);
}

static void fail_on_fault(void *userdata, const struct ledger_fault *fault)
{
        (void)userdata;
        ck_abort_msg("%s %u is bad: %s", fault->table, fault->index, fault->why);
}

/* The same memory for a successor; the old process is no more. */
static struct ledger *hand_over(struct ledger *old)
{
        int fd = fcntl(ledger_fd(old), F_DUPFD_CLOEXEC, 0);
        struct ledger *l = NULL;

        ck_assert_int_ge(fd, 0);
        ledger_free(old);
        ck_assert_int_eq(ledger_open(fd, fail_on_fault, NULL, &l), 0);
        assert_sound(l);
        return l;
}

/* ---- after a clean end ---------------------------------------------------------- */

/* All facts, one table after the other. */
static size_t copy_facts(const struct ledger *l, unsigned char *to)
{
        static const size_t N_BYTES[N_TABLES] = {
                [TABLE_QUOTA] = sizeof(struct ledger_quota),
                [TABLE_SESSION] = offsetof(struct ledger_session, links),
                [TABLE_EXTENT] = offsetof(struct ledger_extent, fd),
                [TABLE_EXPORT] = offsetof(struct ledger_export, links),
                [TABLE_BLOCK] = offsetof(struct ledger_block, handle),
                [TABLE_SHARED] = offsetof(struct ledger_shared, links),
                [TABLE_REF] = offsetof(struct ledger_ref, links),
                [TABLE_METADATA] = offsetof(struct ledger_metadata, bytes),
                [TABLE_REGION] = sizeof(struct ledger_region),
        };
        size_t n = 0;

        for (int kind = 0; kind < N_TABLES; kind++) {
                const struct table *t = &l->tables[kind];

                for (uint32_t i = 0; i < t->n_touched; i++) {
                        memset(to + n, 0, N_BYTES[kind]);
                        if (in_use(t, i))
                                memcpy(to + n, record(t, i), N_BYTES[kind]);
                        n += N_BYTES[kind];
                }
        }
        return n;
}

LOOP_TEST(test_all_facts_stay, 3)
{
        static unsigned char before[1 << 20], after[sizeof(before)];
        struct ledger *l = life_ledger();
        uint64_t n_blocks = 0, n_refs = 0;
        struct ledger_counts counts;
        struct life life;

        for (uint64_t n = 0; n < 300; n++) {
                size_t n_bytes;

                life_join(&life, l, n * 3 + (uint64_t)_i);
                for (int i = 0; i < 200; i++)
                        life_step(&life);
                assert_sound(l);
                n_bytes = copy_facts(l, before);
                l = hand_over(l);
                ck_assert_uint_eq(copy_facts(l, after), n_bytes);
                ck_assert_int_eq(memcmp(before, after, n_bytes), 0);
                ledger_count(l, &counts);
                n_blocks += counts.n_blocks;
                n_refs += counts.n_refs;
        }
        ck_assert_uint_gt(n_blocks, 300 * 5);
        ck_assert_uint_gt(n_refs, 300);
        ledger_free(l);
}

TEST(ids_are_not_reused_after_reopen)
{
        struct ledger *l = life_ledger();
        struct ledger_session s = { .tenant = "vision" };
        struct ledger_extent e = { .n_bytes = 1 << 20 };
        uint64_t session_id, extent_id, block_id;
        uint32_t session, extent, block;

        ck_assert_int_eq(ledger_session_add(l, &s, &session), 0);
        ck_assert_int_eq(ledger_extent_add(l, &e, &extent), 0);
        ck_assert_int_eq(
                ledger_block_add(l, &(struct ledger_block){ .n_bytes = 256, .session = session }, &block), 0);
        session_id = ledger_session_at(l, session)->id;
        extent_id = ledger_extent_at(l, extent)->id;
        block_id = ledger_block_at(l, block)->id;
        ledger_block_clear(l, block);
        ledger_session_clear(l, session);
        ledger_extent_clear(l, extent);
        l = hand_over(l);
        ck_assert_uint_eq(ledger_block_find(l, block_id), LEDGER_NONE);
        ck_assert_int_eq(ledger_session_add(l, &s, &session), 0);
        ck_assert_int_eq(ledger_extent_add(l, &e, &extent), 0);
        ck_assert_int_eq(
                ledger_block_add(l, &(struct ledger_block){ .n_bytes = 256, .session = session }, &block), 0);
        ck_assert_uint_gt(ledger_session_at(l, session)->id, session_id);
        ck_assert_uint_gt(ledger_extent_at(l, extent)->id, extent_id);
        ck_assert_uint_eq((uint32_t)block_id, block);
        ck_assert_uint_gt(ledger_block_at(l, block)->id, block_id);
        ledger_free(l);
}

/* ---- after kills ----------------------------------------------------------------- */

static void live(void *life)
{
        for (;;)
                life_step(life);
}

static void live_and_be_killed(struct ledger *l, uint64_t seed, long delay_ns)
{
        struct life life;

        life_join(&life, l, seed);
        run_and_kill(live, &life, delay_ns);
}

/* What a kill left of publications and of shared blocks that ended. */
static uint32_t count_halves(const struct ledger *l)
{
        const struct table *t = &l->tables[TABLE_SHARED], *blocks = &l->tables[TABLE_BLOCK];
        uint32_t n = 0;

        for (uint32_t i = 0; i < t->n_records; i++) {
                const struct ledger_shared *s = record(t, i);

                if (s->id == 0)
                        continue;
                n += record_id(blocks, s->block) == 0 ||
                     ((const struct ledger_block *)record(blocks, s->block))->shared != i;
        }
        return n;
}

/* Blocks that lie over each other: what a kill left of splits. */
static uint32_t count_half_splits(const struct ledger *l)
{
        const struct table *t = &l->tables[TABLE_BLOCK];
        uint32_t n = 0;

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_block *b = record(t, i);

                n += b->n_bytes - b->n_requested >= LIFE_CELL_BYTES;
                for (uint32_t k = table_next(t, 0); k != LEDGER_NONE; k = table_next(t, k + 1)) {
                        const struct ledger_block *in = record(t, k);

                        n += i != k && b->quota == in->quota && in->offset - b->offset < b->n_requested;
                }
        }
        return n;
}

/* One ledger lives through all of them. */
TEST(test_kills)
{
        struct ledger *l = life_ledger();
        uint64_t last_id = 0, random = 4711;
        uint32_t n_halves = 0, n_half_splits = 0;

        for (uint64_t n = 0; n < KILLS; n++) {
                const char *why;
                uint64_t id;

                random = random * UINT64_C(6364136223846793005) + 1;
                live_and_be_killed(l, n, (long)(random >> 33) % 1000000);
                n_halves += count_halves(l);
                n_half_splits += count_half_splits(l);
                l = hand_over(l);
                why = life_check(l);
                ck_assert_msg(!why, "kill %lu: %s", (unsigned long)n, why);
                ck_assert_uint_eq(count_halves(l), 0);
                ck_assert_uint_eq(count_half_splits(l), 0);
                id = atomic_load(&l->tables[TABLE_EXTENT].shared->next_id);
                ck_assert_uint_ge(id, last_id);
                last_id = id;
                ck_assert_uint_eq(l->tables[TABLE_BLOCK].n_retired, 0); /* no index is lost */
        }
        ck_assert_uint_gt(last_id, 1); /* the children did work, how much depends on the machine */
        fprintf(stderr, "# %d kills; repaired: %u half-done publications or ends, %u splits\n", KILLS,
                n_halves, n_half_splits);
        ledger_free(l);
}

/* Stops before each store of a split but the first, of a record that no one can see yet. */
LOOP_TEST(test_half_a_split, 3)
{
        enum { HIGH_IS_COMMITTED, LOW_IS_SHORTER, DONE };
        struct ledger *l = life_ledger();
        struct ledger_session session = { .pid = 7, .tenant = "vision", .name = "job" };
        struct ledger_extent extent = { .quota = 0, .n_bytes = 2 << 20, .store_key = 1 };
        struct ledger_block block = { .quota = 0, .n_bytes = 1 << 20, .n_requested = (1 << 20) - 9 }, was;
        uint64_t n_bytes = block.n_bytes, at = 256 << 10;
        uint32_t i, high;
        struct ledger_block *b;

        ck_assert_int_eq(ledger_session_add(l, &session, &block.session), 0);
        ck_assert_int_eq(ledger_extent_add(l, &extent, &i), 0);
        ck_assert_int_eq(ledger_block_add(l, &block, &i), 0);
        was = *ledger_block_at(l, i);
        ck_assert_uint_eq(ledger_block_split_off(l, i, at), LEDGER_NONE);
        ck_assert_int_eq(ledger_block_split(l, i, at, 4711, &high), 0);
        ck_assert_uint_eq(ledger_block_at(l, high)->handle, 4711);
        ck_assert_uint_eq(ledger_block_split_off(l, i, at), high);
        b = ledger_block_at(l, i);
        if (_i == HIGH_IS_COMMITTED)
                b->n_requested = was.n_requested;
        if (_i != DONE)
                b->n_bytes = was.n_bytes;

        l = hand_over(l);
        b = ledger_block_at(l, i);
        ck_assert_uint_eq(b->id, was.id);
        ck_assert_uint_eq(b->n_bytes, _i == HIGH_IS_COMMITTED ? n_bytes : at);
        ck_assert_uint_eq(b->n_requested, _i == HIGH_IS_COMMITTED ? was.n_requested : at);
        ck_assert_uint_eq(ledger_block_split_off(l, i, at), _i == HIGH_IS_COMMITTED ? LEDGER_NONE : high);
        ck_assert((ledger_block_get(l, high) == NULL) == (_i == HIGH_IS_COMMITTED));
        if (_i != HIGH_IS_COMMITTED) {
                b = ledger_block_at(l, high);
                ck_assert_uint_eq(b->offset, at);
                ck_assert_uint_eq(b->n_bytes, n_bytes - at);
                ck_assert_uint_eq(b->n_requested, was.n_requested - at);
                ledger_block_clear(l, high);
                ck_assert_uint_eq(ledger_block_split_off(l, i, at), LEDGER_NONE);
                l = hand_over(l); /* what was split off is gone, and is no sign of a half */
                ck_assert_uint_eq(ledger_block_at(l, i)->n_bytes, at);
        }
        ledger_free(l);
}

/* ---- damaged ----------------------------------------------------------------------- */

/* A ledger with some of everything: session 0 and 1 of vision, 2 of audio; in each quota
 * two extents side by side, given to all that may have them, and a block over both.
 * Session 0 has the blocks of quotas 0 and 1; that of quota 2 is shared by session 2. */
static struct ledger *make_ledger(void)
{
        struct ledger *l = life_ledger();
        uint32_t i;

        for (uint32_t n = 0; n < 3; n++) {
                struct ledger_session s = { .pid = n + 1 };

                strcpy(s.tenant, n < 2 ? "vision" : "audio");
                ck_assert_int_eq(ledger_session_add(l, &s, &i), 0);
        }
        for (uint32_t n = 0; n < 6; n++) {
                struct ledger_region g = { .base = n % 2 << 20,
                                           .n_bytes = 1 << 20,
                                           .quota = n / 2,
                                           .number = n % 2,
                                           .first_extent_bytes = 1 << 20 };

                ck_assert_int_eq(ledger_region_add(l, &g, &i), 0);
        }
        for (uint32_t n = 0; n < 6; n++) {
                struct ledger_extent e = { .quota = n / 2, .offset = n % 2 << 20, .n_bytes = 1 << 20 };

                ck_assert_int_eq(ledger_extent_add(l, &e, &i), 0);
                ck_assert_int_eq(ledger_export_add(l, n / 2 == 2 ? 2 : 0, i, &i), 0);
        }
        for (uint32_t n = 0; n < 3; n++) {
                struct ledger_block b = { .quota = n, .n_bytes = 2 << 20, .n_requested = 5 };

                b.session = n == 2 ? 2 : 0;
                ck_assert_int_eq(ledger_block_add(l, &b, &i), 0);
        }
        ck_assert_int_eq(ledger_shared_add(l, &(struct ledger_shared){ .block = 2, .name = "model" }, &i), 0);
        ck_assert_int_eq(ledger_shared_describe(l, 0, "shapes", 6), 0);
        ck_assert_int_eq(ledger_ref_add(l, 2, 0, &i), 0);
        ledger_block_share(l, 2, 0);
        assert_sound(l);
        return l;
}

enum { Q0 = 1, Q1 = 2, Q2 = 4, VISION = Q0 | Q1, AUDIO = Q2, ALL = VISION | AUDIO };

static uint32_t closed_quotas(struct ledger *l)
{
        uint32_t closed = 0;

        for (uint32_t i = 0; i < LIFE_QUOTAS; i++)
                closed |= ledger_quota_at(l, i)->is_closed ? 1u << i : 0;
        return closed;
}

struct first_fault {
        struct ledger_fault fault;
        uint32_t n;
};

static void note_fault(void *userdata, const struct ledger_fault *fault)
{
        struct first_fault *first = userdata;

        if (first->n++ == 0)
                first->fault = *fault;
}

/* The damaged ledger is opened: its first bad record is this one, and these quotas are
 * closed for all that are bad. They stay so. */
static void expect_fault(struct ledger *damaged, const char *table, uint32_t index, uint32_t closed)
{
        int fd = fcntl(ledger_fd(damaged), F_DUPFD_CLOEXEC, 0);
        struct first_fault first = { .n = 0 };
        struct ledger *l = NULL;

        ledger_free(damaged);
        ck_assert_int_eq(ledger_open(fd, note_fault, &first, &l), LEDGER_HAS_FAULTS);
        ck_assert_str_eq(first.fault.table, table);
        ck_assert_uint_eq(first.fault.index, index);
        ck_assert_ptr_nonnull(first.fault.why);
        assert_sound(l);
        ck_assert_msg(closed_quotas(l) == closed, "closed are %x, not %x: %s", closed_quotas(l), closed,
                      first.fault.why);
        l = hand_over(l);
        ck_assert_uint_eq(closed_quotas(l), closed);
        ledger_free(l);
}

#define AT(kind, index) (*ledger_##kind##_at(l, index))
#define DAMAGE_OF(made, change, table, index, closed)                                                        \
        do {                                                                                                 \
                struct ledger *l = made;                                                                     \
                                                                                                             \
                change;                                                                                      \
                expect_fault(l, table, index, closed);                                                       \
        } while (0)
#define DAMAGE(change, table, index, closed) DAMAGE_OF(make_ledger(), change, table, index, closed)

TEST(test_bad_quotas_and_sessions)
{
        DAMAGE(AT(quota, 1).id = 99, "quota", 1, Q1);
        DAMAGE(AT(quota, 1).id = AT(quota, 0).id, "quota", 0, Q0 | Q1);
        DAMAGE(AT(quota, 2).tenant[0] = '\0', "quota", 2, Q2);
        DAMAGE(memset(AT(quota, 0).partition, 'x', LEDGER_NAME_BYTES), "quota", 0, Q0);
        DAMAGE(AT(session, 1).id = 99, "session", 1, 0); /* it had nothing */
        DAMAGE(AT(session, 0).id = 99, "session", 0, VISION);
        DAMAGE(memset(AT(session, 2).tenant, 'x', LEDGER_NAME_BYTES), "session", 2, AUDIO);
        DAMAGE(AT(session, 0).id = AT(session, 1).id, "session", 0, VISION);
        DAMAGE(memset(AT(session, 2).name, 'x', LEDGER_NAME_BYTES), "session", 2, AUDIO);
}

static void set_direct(struct ledger *l, size_t place, uint32_t quota, uint64_t n_bytes)
{
        struct ledger_direct *d = &AT(session, 0).direct[place];

        d->quota_id = quota == LEDGER_NONE ? 12345 : AT(quota, quota).id;
        d->n_bytes = n_bytes;
}

TEST(bad_direct_charges)
{
        DAMAGE(set_direct(l, 3, 2, 1), "session", 0, VISION); /* another tenant's */
        DAMAGE(set_direct(l, 3, 0, LEDGER_DIRECT_MAX + 1), "session", 0, VISION);
        DAMAGE((set_direct(l, 3, 0, 1), set_direct(l, 15, 0, 1)), "session", 0, VISION);
}

/* Also of a quota that is gone. */
TEST(direct_charges_stay)
{
        struct ledger *l = make_ledger();

        set_direct(l, 3, LEDGER_NONE, 1);
        set_direct(l, 4, 2, 0);
        set_direct(l, 15, 0, LEDGER_DIRECT_MAX);
        l = hand_over(l);
        ck_assert_uint_eq(closed_quotas(l), 0);
        ck_assert_uint_eq(AT(session, 0).direct[15].n_bytes, LEDGER_DIRECT_MAX);
        ck_assert_uint_eq(AT(session, 0).direct[3].n_bytes, 1);
        ledger_free(l);
}

static struct ledger_region *region(struct ledger *l, uint32_t index)
{
        return record(&l->tables[TABLE_REGION], index);
}

TEST(test_bad_regions)
{
        DAMAGE(region(l, 2)->id = 99, "region", 2, Q1);
        DAMAGE(region(l, 2)->n_bytes = 0, "region", 2, Q1);
        DAMAGE(region(l, 2)->n_bytes++, "region", 3, Q1); /* overlaps it */
        DAMAGE(region(l, 3)->base = UINT64_MAX - 9, "region", 3, Q1);
        DAMAGE(region(l, 3)->first_extent_bytes++, "region", 3, Q1);
        DAMAGE(region(l, 5)->number = 0, "region", 4, Q2);
        DAMAGE(region(l, 5)->quota = 99, "region", 5, ALL);
}

TEST(test_bad_extents_and_exports)
{
        DAMAGE(AT(extent, 0).id = 99, "extent", 0, Q0);
        DAMAGE(AT(extent, 0).id = AT(extent, 2).id, "extent", 0, Q0 | Q1);
        DAMAGE(AT(extent, 0).n_bytes = 0, "extent", 0, Q0);
        DAMAGE(AT(extent, 1).offset = UINT64_MAX - 5, "extent", 1, Q0);
        DAMAGE(AT(extent, 1).offset--, "extent", 1, Q0);  /* overlaps extent 0 */
        DAMAGE(AT(extent, 3).offset++, "block", 1, Q1);   /* nothing behind a byte of it */
        DAMAGE(AT(extent, 4).n_bytes--, "block", 2, Q2);  /* nor here */
        DAMAGE(AT(extent, 4).quota = 3, "extent", 4, Q2); /* by its block */
        DAMAGE(AT(extent, 5).quota = LEDGER_NONE, "extent", 5, Q2);
        DAMAGE(AT(extent, 2).is_leaving = 2, "extent", 2, Q1);
        DAMAGE(AT(extent, 2).is_leaving = 1, "block", 1, Q1); /* an extent that is released has no blocks */
        DAMAGE(AT(extent, 3).is_leaving = 1, "block", 1, Q1);
        DAMAGE(AT(extent, 3).store_key = AT(extent, 4).store_key = 7, "extent", 3, Q1 | Q2);
        DAMAGE(AT(export, 0).id = 99, "export", 0, Q0);
        DAMAGE(AT(export, 0).extent = 4, "export", 0, Q2);     /* another tenant's */
        DAMAGE(AT(export, 0).extent = 6, "export", 0, VISION); /* by its session */
        DAMAGE(AT(export, 0).session = LEDGER_NONE, "export", 0, Q0);
        DAMAGE(AT(export, 0).extent = 1, "export", 0, Q0); /* twice */
        DAMAGE((AT(export, 0).extent = 99, AT(export, 0).session = 99), "export", 0, ALL);
}

/* All of it but 256 bytes, from there on: then it shares an extent. */
static void park_part(struct ledger *l, uint32_t block, uint64_t from)
{
        ledger_block_at(l, block)->offset += from;
        ledger_block_at(l, block)->n_bytes -= 256;
        ledger_block_park(l, block, LEDGER_DISCARDED);
}

TEST(test_bad_blocks)
{
        DAMAGE(AT(block, 0).id++, "block", 0, Q0);
        DAMAGE(AT(block, 0).id = 0 | AT(block, 0).id >> 40 | 1u << 31, "block", 0, Q0);
        DAMAGE(AT(block, 0).id += UINT64_C(1) << 32, "block", 0, Q0);
        DAMAGE(AT(block, 0).n_bytes = 0, "block", 0, Q0);
        DAMAGE(AT(block, 0).n_bytes++, "block", 0, Q0);
        DAMAGE(AT(block, 0).n_bytes = UINT64_MAX, "block", 0, Q0);
        DAMAGE(AT(block, 1).offset = UINT64_MAX - 255, "block", 1, Q1);
        DAMAGE(AT(block, 0).n_requested = 0, "block", 0, Q0);
        DAMAGE(AT(block, 0).n_requested = (2 << 20) + 1, "block", 0, Q0);
        DAMAGE(memset(AT(block, 0).tag, 'x', LEDGER_TAG_BYTES), "block", 0, Q0);
        DAMAGE(AT(block, 0).quota = 2, "block", 0, Q2);      /* another tenant's */
        DAMAGE(AT(block, 1).quota = 0, "block", 1, Q0);      /* overlaps block 0 */
        DAMAGE(AT(block, 0).quota = 77, "block", 0, VISION); /* by its session */
        DAMAGE(AT(block, 0).session = 7, "block", 0, Q0);
        DAMAGE(AT(block, 0).session = LEDGER_NONE, "block", 0, Q0);
        DAMAGE((AT(block, 0).session = 7, AT(block, 0).quota = 7), "block", 0, ALL);
        DAMAGE(AT(block, 0).shared = 0, "block", 0, Q0); /* it is block 2's */
        DAMAGE(AT(block, 0).shared = 7, "block", 0, Q0);
        DAMAGE(AT(block, 2).shared = 7, "block", 2, Q2);
        DAMAGE(AT(block, 2).shared = LEDGER_NONE, "block", 2, Q2); /* without owner */
        DAMAGE(park_part(l, 0, 0), "block", 0, Q0);
        DAMAGE(park_part(l, 1, 256), "block", 1, Q1);
        DAMAGE(AT(block, 2).parked = LEDGER_IS_COPY, "block", 2, Q2); /* of itself */
}

TEST(test_bad_sharing)
{
        DAMAGE(AT(shared, 0).id = 99, "block", 2, Q2); /* named first: it ends with its record */
        DAMAGE(AT(shared, 0).name[0] = '\0', "block", 2, Q2);
        DAMAGE(memset(AT(shared, 0).name, 'x', LEDGER_NAME_BYTES), "block", 2, Q2);
        DAMAGE(AT(shared, 0).block = 1, "block", 2, Q2);
        DAMAGE(AT(shared, 0).block = 99, "shared record", 0, Q2);
        DAMAGE(AT(shared, 0).metadata = 1, "block", 2, Q2);
        DAMAGE(AT(shared, 0).metadata = 99, "block", 2, Q2);
        DAMAGE(AT(metadata, 0).id = 99, "metadata", 0, Q2);
        DAMAGE(AT(metadata, 0).n_bytes = 0, "metadata", 0, Q2);
        DAMAGE(AT(metadata, 0).n_bytes = LEDGER_METADATA_BYTES + 1, "metadata", 0, Q2);
        DAMAGE(AT(metadata, 0).shared = 1, "block", 2, Q2);
        DAMAGE(AT(ref, 0).id = 99, "reference", 0, Q2);
        DAMAGE(AT(ref, 0).session = 0, "reference", 0, Q2); /* another tenant's */
        DAMAGE(AT(ref, 0).session = 99, "reference", 0, Q2);
        DAMAGE(AT(ref, 0).count = 0, "reference", 0, Q2);
        DAMAGE(AT(ref, 0).shared = 99, "reference", 0, Q2);
}

/* make()'s ledger, in which quota 1 is that of a lease. */
static struct ledger *make_lease(void)
{
        static const struct ledger_limits ROOM = { .n_leases = 2 };
        struct ledger_lease lease = { .name = "job",
                                      .quota = 1,
                                      .kind = LEASE_USER,
                                      .limit_bytes = 4 << 20,
                                      .reserve_bytes = 2 << 20 };
        struct ledger *small = make_ledger(), *l = NULL;
        uint32_t i;

        ck_assert_int_eq(ledger_grow(small, &ROOM, &l), 0);
        ledger_free(small);
        AT(quota, 1).is_lease = 1;
        ck_assert_int_eq(ledger_lease_add(l, &lease, &i), 0);
        return l;
}

#define DAMAGE_LEASE(change, closed) DAMAGE_OF(make_lease(), change, "lease", 0, closed)

/* A daemon matches processes by these records and lists them, so it accepts no value that it does not know. */
TEST(test_bad_leases)
{
        struct ledger *sound = hand_over(make_lease());

        ck_assert_str_eq(ledger_lease_at(sound, 0)->name, "job");
        ledger_free(sound);
        DAMAGE_LEASE(AT(lease, 0).id = 99, Q1);
        DAMAGE_LEASE(AT(lease, 0).name[0] = '\0', Q1);
        DAMAGE_LEASE(memset(AT(lease, 0).name, 'x', LEDGER_NAME_BYTES), Q1);
        DAMAGE_LEASE(AT(lease, 0).quota = 0, Q0); /* which is not a lease's */
        DAMAGE_LEASE(AT(lease, 0).quota = 99, ALL);
        DAMAGE_LEASE(AT(lease, 0).kind = 0, Q1);
        DAMAGE_LEASE(AT(lease, 0).kind = LEASE_KINDS, Q1);
        DAMAGE_LEASE(AT(lease, 0).maker = LEASE_MAKERS, Q1);
        DAMAGE_LEASE(AT(lease, 0).maker = LEASE_BY_CONFIG, Q1); /* only control groups have such leases */
        DAMAGE_LEASE(memset(AT(lease, 0).match, 'x', LEDGER_PLACE_BYTES), Q1);
        DAMAGE_LEASE(memset(AT(lease, 0).place, 'x', LEDGER_PLACE_BYTES), Q1);
        DAMAGE_LEASE(AT(lease, 0).limit_bytes = 0, Q1);
        DAMAGE_LEASE(AT(lease, 0).limit_bytes++, Q1);
        DAMAGE_LEASE(AT(lease, 0).reserve_bytes--, Q1);
}

/* Two blocks of a tenant with one name; one that a session holds twice. */
TEST(duplicate_ids)
{
        struct ledger *l = make_ledger();
        struct ledger_shared s = { .block = 0, .name = "model" };
        uint32_t i;

        for (s.block = 0; s.block < 2; s.block++) {
                ck_assert_int_eq(ledger_shared_add(l, &s, &i), 0);
                ck_assert_int_eq(ledger_ref_add(l, 0, i, &i), 0);
                ledger_block_share(l, s.block, s.block + 1);
        }
        expect_fault(l, "block", 0, VISION);
        l = make_ledger();
        ck_assert_int_eq(ledger_ref_add(l, 2, 0, &i), 0);
        expect_fault(l, "reference", 0, Q2);
}

TEST(undamaged_records_survive)
{
        struct ledger *l = make_ledger(), *opened = NULL;
        uint64_t good = AT(block, 2).id, bad = AT(block, 0).id;
        struct first_fault first = { .n = 0 };
        int fd = fcntl(ledger_fd(l), F_DUPFD_CLOEXEC, 0);

        AT(block, 0).n_requested = 0;
        ledger_free(l);
        ck_assert_int_eq(ledger_open(fd, note_fault, &first, &opened), LEDGER_HAS_FAULTS);
        ck_assert_uint_eq(first.n, 1);
        ck_assert_uint_eq(first.fault.id, bad);
        ck_assert_uint_eq(first.fault.quota, 0);
        ck_assert_uint_eq(ledger_block_find(opened, bad), LEDGER_NONE);
        ck_assert_uint_eq(ledger_block_find(opened, good), 2);
        ck_assert_uint_eq(ledger_session_at(opened, 0)->links.n_blocks, 1);
        ledger_free(opened);
}

/* What a successor has to know of an extent and of those before it. */
/* In the place of a parked block extents may be missing, leave, or are to be released by the successor. No other
 * block may have a part of them. */
TEST(parked_blocks_need_no_extents)
{
        struct ledger *l = make_ledger();

        ledger_extent_leave(l, 1);
        ledger_block_park(l, 0, LEDGER_DISCARDED);
        l = hand_over(l);
        ck_assert_uint_eq(AT(block, 0).parked, LEDGER_DISCARDED);
        for (uint32_t i = 0; i < 6; i++)
                ck_assert_uint_eq(AT(extent, i).is_leaving, i == 1);
        while (AT(extent, 0).links.first_export != LEDGER_NONE)
                ledger_export_clear(l, AT(extent, 0).links.first_export);
        ledger_extent_clear(l, 0);
        ledger_block_park(l, 1, ledger_block_at(l, 0)->id);
        l = hand_over(l);
        ck_assert_uint_eq(AT(extent, 1).is_leaving, 1);
        ck_assert_uint_eq(AT(extent, 2).is_leaving, 0);
        ledger_block_park(l, 1, LEDGER_AWAKE);
        ledger_free(hand_over(l));
}

/* Block 0 is shared by session 0, which agrees to park it, and has a copy in quota 1. Returns the copy's id. */
static uint64_t share_and_copy(struct ledger *l)
{
        struct ledger_block copy = { .quota = 1,
                                     .n_bytes = 2 << 20,
                                     .n_requested = 2 << 20,
                                     .session = LEDGER_NONE,
                                     .parked = LEDGER_IS_COPY };
        uint32_t shared, ref, i;

        ledger_block_clear(l, 1);
        ck_assert_int_eq(
                ledger_shared_add(l, &(struct ledger_shared){ .block = 0, .name = "weights" }, &shared), 0);
        ck_assert_int_eq(ledger_ref_add(l, 0, shared, &ref), 0);
        ledger_block_share(l, 0, shared);
        copy.shared = shared;
        ledger_ref_set_parks_to(l, ref, 2);
        ck_assert_int_eq(ledger_block_add(l, &copy, &i), 0);
        return ledger_block_at(l, i)->id;
}

/* Killed before the block names the copy, after that, after it is awake again, after it was freed, and after its shared
 * record was cleared. */
LOOP_TEST(copies_of_shared_blocks, 5)
{
        struct ledger *l = make_ledger();
        uint64_t copy = share_and_copy(l), block = AT(block, 0).id;
        struct ledger_counts counts;
        uint32_t index;

        if (_i > 0)
                ledger_block_park(l, 0, copy);
        if (_i == 2)
                ledger_block_park(l, 0, LEDGER_AWAKE);
        if (_i >= 3)
                ledger_block_clear(l, 0);
        if (_i == 4) {
                ledger_ref_clear(l, 1);
                ledger_shared_clear(l, 1);
        }
        l = hand_over(l);
        index = ledger_block_find(l, copy);
        ck_assert_uint_eq(index != LEDGER_NONE, _i == 1);
        ck_assert_uint_eq(ledger_block_find(l, block) != LEDGER_NONE, _i < 3);
        ledger_count(l, &counts);
        ck_assert_uint_eq(counts.n_shared, _i < 3 ? 2 : 1);
        ck_assert_uint_eq(counts.n_refs, _i < 3 ? 2 : 1);
        if (_i == 1) {
                ck_assert_uint_eq(AT(block, 0).parked, copy);
                ck_assert_uint_eq(AT(block, 0).session, LEDGER_NONE);
                ck_assert_uint_eq(AT(block, index).session, LEDGER_NONE);
                ck_assert_uint_eq(AT(ref, 1).parks_to, 2);
                AT(ref, 1).parks_to = 0; /* no session uses a parked block */
                l = hand_over(l);
                ck_assert_uint_ne(AT(ref, 1).parks_to, 0);
        }
        ledger_free(l);
}

/* Killed before a kept block without references is forgotten, and after that, before it is freed. */
LOOP_TEST(a_forgotten_block, 2)
{
        struct ledger *l = make_ledger();
        struct ledger_counts counts;

        ledger_shared_keep(l, 0, LEDGER_FOREVER);
        ledger_ref_clear(l, 0);
        if (_i == 1)
                ledger_shared_keep(l, 0, 0);
        l = hand_over(l);
        ledger_count(l, &counts);
        ck_assert_uint_eq(counts.n_shared, _i == 0);
        ck_assert_uint_eq(counts.n_metadata, _i == 0);
        ck_assert_uint_eq(ledger_block_get(l, 2) != NULL, _i == 0);
        ledger_free(l);
}

/* The record of block 0 names a copy in memory of another tenant. */
TEST(a_copy_is_its_tenants)
{
        struct ledger *l = make_ledger();

        ledger_block_park(l, 0, share_and_copy(l));
        strcpy(AT(quota, 1).tenant, "audio");
        while (AT(extent, 2).links.first_export != LEDGER_NONE)
                ledger_export_clear(l, AT(extent, 2).links.first_export);
        while (AT(extent, 3).links.first_export != LEDGER_NONE)
                ledger_export_clear(l, AT(extent, 3).links.first_export);
        expect_fault(l, "block", 1, Q1);
}

TEST(extent_state_survives_reopen)
{
        struct ledger *l = make_ledger();
        uint32_t first;

        ledger_block_clear(l, 0);
        for (first = 0; first < 2; first++)
                AT(extent, first).store_key = 9 + first;
        ledger_extent_leave(l, 0);
        *ledger_crashes(l) = 3;
        l = hand_over(l);
        ck_assert_uint_eq(AT(extent, 0).is_leaving, 1);
        ck_assert_uint_eq(AT(extent, 1).is_leaving, 0);
        ck_assert_uint_eq(AT(extent, 0).store_key, 9);
        ck_assert_uint_eq(AT(extent, 1).store_key, 10);
        ck_assert_uint_eq(*ledger_crashes(l), 3);
        while (AT(extent, 0).links.first_export != LEDGER_NONE)
                ledger_export_clear(l, AT(extent, 0).links.first_export);
        ledger_extent_clear(l, 0);
        ck_assert_int_eq(ledger_extent_add(l, &(struct ledger_extent){ .n_bytes = 1 << 20 }, &first), 0);
        ck_assert_uint_eq(first, 0);
        ck_assert_uint_eq(AT(extent, 0).is_leaving, 0);
        ledger_free(hand_over(l));
}

/* A copy of the first n_bytes of the ledger's memory, in a memfd of n_total. */
static int copy_memfd(const struct ledger *l, size_t n_bytes, size_t n_total, int seals)
{
        int fd = memfd_create("copy", MFD_CLOEXEC | MFD_ALLOW_SEALING);

        ck_assert_int_ge(fd, 0);
        ck_assert_int_eq(ftruncate(fd, (off_t)n_total), 0);
        ck_assert_int_eq(pwrite(fd, l->header, n_bytes, 0), (ssize_t)n_bytes);
        ck_assert_int_eq(fcntl(fd, F_ADD_SEALS, seals), 0);
        return fd;
}

static void refuse_fd(int fd)
{
        struct first_fault first = { .n = 0 };
        struct ledger *l = NULL;

        ck_assert_int_eq(ledger_open(fd, note_fault, &first, &l), -EBADMSG);
        ck_assert_uint_eq(first.n, 1);
        ck_assert_str_eq(first.fault.table, "header");
        ck_assert_ptr_null(l);
        ck_assert_int_eq(close(fd), 0); /* still ours */
}

TEST(test_bad_header)
{
        const int seals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
        struct ledger *l = make_ledger();
        struct header *h = l->header, good;
        size_t n = l->n_bytes;

        memcpy(&good, h, sizeof(good));
        refuse_fd(copy_memfd(l, n, n, F_SEAL_GROW));
        refuse_fd(copy_memfd(l, n, n, F_SEAL_SHRINK));
        refuse_fd(copy_memfd(l, n, n + 4096, seals));
        refuse_fd(copy_memfd(l, 100, 100, seals));
        refuse_fd(open("/dev/zero", O_RDWR | O_CLOEXEC));
        for (int i = 0; i < 10; i++) {
                struct header_table *t = &h->tables[TABLE_EXTENT];

                switch (i) {
                case 0:
                        h->magic++;
                        break;
                case 1:
                        h->layout++;
                        break;
                case 2:
                        h->n_tables--;
                        break;
                case 3:
                        h->n_bytes += 4096;
                        break;
                case 4:
                        t->offset += 4096;
                        break;
                case 5:
                        t->record_bytes += 8;
                        break;
                case 6:
                        t->n_records = 0;
                        break;
                case 7:
                        t->n_touched = t->n_records + 1;
                        break;
                case 8:
                        h->tables[TABLE_REGION].n_records++;
                        break;
                default:
                        t->next_id = 0;
                        break;
                }
                refuse_fd(copy_memfd(l, n, n, seals));
                memcpy(h, &good, sizeof(good));
        }
        ledger_free(hand_over(l));
}

/* Whatever bytes there are: what is opened is sound, and was repaired for good. */
TEST(test_random_damage)
{
        const int seals = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
        struct ledger *l = life_ledger(), *opened;
        unsigned n_refused = 0, n_faulty = 0;
        struct life life;
        size_t n;

        life_join(&life, l, 1);
        for (int i = 0; i < 3000; i++)
                life_step(&life);
        n = l->n_bytes;
        for (int round = 0; round < DAMAGES; round++) {
                struct first_fault first = { .n = 0 };
                int fd = copy_memfd(l, n, n, seals);
                int r;

                for (uint32_t i = 0; i <= (uint32_t)round % 8; i++) {
                        uint32_t at = life_random(&life, 8) == 0
                                              ? life_random(&life, 300)
                                              : 4096 + life_random(&life, (uint32_t)n - 4096);
                        uint8_t byte = (uint8_t)(life_random(&life, 2) ? life_random(&life, 256) : 0xff);

                        ck_assert_int_eq(pwrite(fd, &byte, 1, at), 1);
                }
                r = ledger_open(fd, note_fault, &first, &opened);
                ck_assert_msg(r == 0 || r == LEDGER_HAS_FAULTS || r == -EBADMSG, "%d", r);
                if (r < 0) {
                        n_refused++;
                        close(fd);
                        continue;
                }
                ck_assert_int_eq(first.n > 0, r == LEDGER_HAS_FAULTS);
                n_faulty += first.n > 0;
                assert_sound(opened);
                ledger_free(hand_over(opened));
        }
        ck_assert_uint_gt(n_refused, 10);
        ck_assert_uint_gt(n_faulty, 100);
        ledger_free(l);
}

/* The time that a large ledger takes, which clients wait for at a restart. */
TEST(test_large)
{
        const struct ledger_limits limits = { 1, 1000, 256, 1000, 200000, 0, 0, 0, 0 };
        struct ledger_quota q = { .tenant = "vision", .partition = "train" };
        struct ledger_session s = { .tenant = "vision" };
        struct ledger_extent e = { .n_bytes = 1 << 20 };
        struct timespec begin, end;
        struct ledger *l = NULL;
        uint32_t index;

        ck_assert_int_eq(ledger_new(&limits, &l), 0);
        ck_assert_int_eq(ledger_quota_add(l, &q, &index), 0);
        for (int i = 0; i < 1000; i++)
                ck_assert_int_eq(ledger_session_add(l, &s, &index), 0);
        for (e.offset = 0; e.offset < UINT64_C(200) << 20; e.offset += e.n_bytes)
                ck_assert_int_eq(ledger_extent_add(l, &e, &index), 0);
        for (uint64_t i = 0; i < 100000; i++) {
                struct ledger_block b = { .offset = i * 48271 % 100000 * 2048,
                                          .n_bytes = 2048,
                                          .n_requested = 2000,
                                          .session = (uint32_t)(i % 1000) };

                ck_assert_int_eq(ledger_block_add(l, &b, &index), 0);
        }
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &begin);
        l = hand_over(l);
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &end);
        fprintf(stderr,
                "# 1,000 sessions with 100,000 blocks: opened and checked in %ld ms of the processor\n",
                (long)(end.tv_sec - begin.tv_sec) * 1000 + (end.tv_nsec - begin.tv_nsec) / 1000000);
        ledger_free(l);
}
