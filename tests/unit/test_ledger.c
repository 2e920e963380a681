/* SPDX-License-Identifier: Apache-2.0 */
/* The ledger against a plain model, at its limits, and under SIGKILL. */
#include "daemon/ledger/ledger.h"
#include "tests/suite.h"
#include "tests/unit/killed.h"
#include "tests/checks.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ALL_SEALS (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)

/* xorshift64*: the same operations on every machine. */
static uint64_t next_random(uint64_t *state)
{
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        return *state * UINT64_C(2685821657736338717);
}

static uint32_t random_below(uint64_t *state, uint32_t n)
{
        return (uint32_t)(next_random(state) >> 33) % n;
}

static void assert_sound(const struct ledger *l)
{
        const char *why = "";
        int r = ledger_check(l, &why);

        if (r != 0)
                ck_abort_msg("ledger_check: %d: %s", r, why);
}

static struct ledger *make(uint32_t n_quotas, uint32_t n_sessions, uint32_t n_extents, uint32_t n_exports,
                           uint32_t n_blocks)
{
        struct ledger_limits limits = { n_quotas, n_sessions, n_extents, n_exports, n_blocks, 0, 0, 0, 0 };
        struct ledger *l = NULL;

        ck_assert_int_eq(ledger_new(&limits, &l), 0);
        assert_sound(l);
        return l;
}

static uint32_t add_quota(struct ledger *l)
{
        struct ledger_quota q = { .tenant = "vision", .partition = "train", .extent_bytes = 2 << 20 };
        uint32_t i = LEDGER_NONE;

        ck_assert_int_eq(ledger_quota_add(l, &q, &i), 0);
        return i;
}

static uint32_t add_session(struct ledger *l)
{
        struct ledger_session s = { .secret = "fifteen letters", .pid = 7, .uid = 8, .tenant = "vision" };
        uint32_t i = LEDGER_NONE;

        ck_assert_int_eq(ledger_session_add(l, &s, &i), 0);
        return i;
}

static uint32_t add_block(struct ledger *l, uint32_t session, uint32_t quota)
{
        struct ledger_block b = { .n_bytes = 256, .n_requested = 200, .session = session, .quota = quota };
        uint32_t i = LEDGER_NONE;

        ck_assert_int_eq(ledger_block_add(l, &b, &i), 0);
        return i;
}

/* ---- against a model ------------------------------------------------------ */

enum { M_QUOTAS = 3, M_SESSIONS = 9, M_EXTENTS = 17, M_EXPORTS = 60, M_BLOCKS = 120, M_OPERATIONS = 60000 };
enum { M_SHARED = 11, M_REFS = 30 };

/* What must be in the ledger, at the same indices; id 0: nothing. */
struct model {
        struct ledger_session sessions[M_SESSIONS];
        struct ledger_extent extents[M_EXTENTS];
        struct ledger_export exports[M_EXPORTS];
        struct ledger_block blocks[M_BLOCKS];
        struct ledger_shared shared[M_SHARED];
        struct ledger_ref refs[M_REFS];
        uint32_t n_sessions, n_extents, n_exports, n_blocks, n_shared, n_refs;
        uint64_t last_session, last_extent, last_export; /* the highest id seen */
        uint64_t last_block[M_BLOCKS];                   /* the last id at each index */
};

/* One hold less; the last one takes the block with it, which is cleared first. */
static void clear_ref(struct model *m, struct ledger *l, uint32_t i)
{
        uint32_t shared = m->refs[i].shared, block = m->shared[shared].block, n = 0;

        for (uint32_t k = 0; k < M_REFS; k++)
                n += m->refs[k].id != 0 && m->refs[k].shared == shared;
        if (n == 1)
                ledger_block_clear(l, block);
        ledger_ref_clear(l, i);
        m->refs[i].id = 0;
        m->n_refs--;
        if (n > 1)
                return;
        ledger_shared_clear(l, shared);
        m->shared[shared].id = 0;
        m->n_shared--;
        m->blocks[block].id = 0;
        m->n_blocks--;
}

static void clear_blocks(struct model *m, struct ledger *l, uint32_t session)
{
        for (uint32_t i = 0; i < M_REFS; i++)
                if (m->refs[i].id != 0 && m->refs[i].session == session)
                        clear_ref(m, l, i);
        for (uint32_t i = 0; i < M_BLOCKS; i++) {
                if (m->blocks[i].id == 0 || m->blocks[i].session != session)
                        continue;
                ledger_block_clear(l, i);
                m->blocks[i].id = 0;
                m->n_blocks--;
        }
}

/* LEDGER_NONE: of any */
static void clear_exports(struct model *m, struct ledger *l, uint32_t session, uint32_t extent)
{
        for (uint32_t i = 0; i < M_EXPORTS; i++) {
                if (m->exports[i].id == 0 || (session != LEDGER_NONE && m->exports[i].session != session) ||
                    (extent != LEDGER_NONE && m->exports[i].extent != extent))
                        continue;
                ledger_export_clear(l, i);
                m->exports[i].id = 0;
                m->n_exports--;
        }
}

static void model_session(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t i = random_below(rnd, M_SESSIONS);
        struct ledger_session facts = { .pid = (uint32_t)next_random(rnd), .start_time = next_random(rnd) };

        if (m->sessions[i].id != 0 && random_below(rnd, 8) == 0) {
                clear_blocks(m, l, i);
                clear_exports(m, l, i, LEDGER_NONE);
                ledger_session_clear(l, i);
                m->sessions[i].id = 0;
                m->n_sessions--;
        } else if (m->n_sessions == M_SESSIONS) {
                ck_assert_int_eq(ledger_session_add(l, &facts, &i), -ENOSPC);
        } else {
                ck_assert_int_eq(ledger_session_add(l, &facts, &i), 0);
                ck_assert(i < M_SESSIONS && m->sessions[i].id == 0);
                facts.id = ledger_session_at(l, i)->id;
                ck_assert(facts.id > m->last_session);
                m->last_session = facts.id;
                m->sessions[i] = facts;
                m->n_sessions++;
        }
}

static void model_extent(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t i = random_below(rnd, M_EXTENTS);
        struct ledger_extent facts = { .offset = next_random(rnd),
                                       .n_bytes = next_random(rnd),
                                       .quota = random_below(rnd, M_QUOTAS),
                                       .fd = (int32_t)random_below(rnd, 1000) };

        if (m->extents[i].id != 0 && random_below(rnd, 4) == 0) {
                clear_exports(m, l, LEDGER_NONE, i);
                ledger_extent_clear(l, i);
                m->extents[i].id = 0;
                m->n_extents--;
        } else if (m->n_extents == M_EXTENTS) {
                ck_assert_int_eq(ledger_extent_add(l, &facts, &i), -ENOSPC);
        } else {
                ck_assert_int_eq(ledger_extent_add(l, &facts, &i), 0);
                ck_assert(i < M_EXTENTS && m->extents[i].id == 0);
                facts.id = ledger_extent_at(l, i)->id;
                ck_assert(facts.id > m->last_extent);
                m->last_extent = facts.id;
                m->extents[i] = facts;
                m->n_extents++;
        }
}

static void model_export(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t session = random_below(rnd, M_SESSIONS);
        uint32_t extent = random_below(rnd, M_EXTENTS);
        uint32_t i = random_below(rnd, M_EXPORTS);

        if (m->exports[i].id != 0 && random_below(rnd, 2) == 0) {
                ledger_export_clear(l, i);
                m->exports[i].id = 0;
                m->n_exports--;
        } else if (m->sessions[session].id == 0 || m->extents[extent].id == 0) {
                return;
        } else if (m->n_exports == M_EXPORTS) {
                ck_assert_int_eq(ledger_export_add(l, session, extent, &i), -ENOSPC);
        } else {
                ck_assert_int_eq(ledger_export_add(l, session, extent, &i), 0);
                ck_assert(i < M_EXPORTS && m->exports[i].id == 0);
                m->exports[i].id = ledger_export_at(l, i)->id;
                ck_assert(m->exports[i].id > m->last_export);
                m->last_export = m->exports[i].id;
                m->exports[i].session = session;
                m->exports[i].extent = extent;
                m->n_exports++;
        }
}

static void model_block(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t session = random_below(rnd, M_SESSIONS);
        uint32_t i = random_below(rnd, M_BLOCKS);
        struct ledger_block facts = { .offset = next_random(rnd),
                                      .n_bytes = next_random(rnd),
                                      .n_requested = next_random(rnd),
                                      .born_ms = next_random(rnd),
                                      .session = session,
                                      .quota = random_below(rnd, M_QUOTAS),
                                      .handle = next_random(rnd) };

        if (m->blocks[i].id != 0 && m->blocks[i].session != LEDGER_NONE && random_below(rnd, 2) == 0) {
                ck_assert_uint_eq(ledger_block_find(l, m->blocks[i].id), i);
                ledger_block_clear(l, i);
                m->blocks[i].id = 0;
                m->n_blocks--;
        } else if (m->sessions[session].id == 0) {
                return;
        } else if (m->n_blocks == M_BLOCKS) {
                ck_assert_int_eq(ledger_block_add(l, &facts, &i), -ENOSPC);
        } else {
                ck_assert_int_eq(ledger_block_add(l, &facts, &i), 0);
                ck_assert(i < M_BLOCKS && m->blocks[i].id == 0);
                facts.id = ledger_block_at(l, i)->id;
                facts.shared = LEDGER_NONE;             /* whatever the facts said */
                ck_assert(facts.id > m->last_block[i]); /* never the same again */
                m->last_block[i] = facts.id;
                m->blocks[i] = facts;
                m->n_blocks++;
        }
}

static void add_ref(struct model *m, struct ledger *l, uint32_t session, uint32_t shared)
{
        uint32_t i = 77;

        if (m->n_refs == M_REFS) {
                ck_assert_int_eq(ledger_ref_add(l, session, shared, &i), -ENOSPC);
                ck_assert_uint_eq(i, 77);
                return;
        }
        ck_assert_int_eq(ledger_ref_add(l, session, shared, &i), 0);
        ck_assert(i < M_REFS && m->refs[i].id == 0);
        ck_assert_uint_eq(ledger_ref_at(l, i)->count, 1);
        m->refs[i].id = ledger_ref_at(l, i)->id;
        m->refs[i].session = session;
        m->refs[i].shared = shared;
        m->n_refs++;
}

static void model_publish(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t block = random_below(rnd, M_BLOCKS), session = m->blocks[block].session, i = 77;
        struct ledger_shared facts = { .block = block, .born_ms = next_random(rnd), .name = "weights" };

        if (m->blocks[block].id == 0 || session == LEDGER_NONE || m->n_refs == M_REFS)
                return;
        if (m->n_shared == M_SHARED) {
                ck_assert_int_eq(ledger_shared_add(l, &facts, &i), -ENOSPC);
                return;
        }
        ck_assert_int_eq(ledger_shared_add(l, &facts, &i), 0);
        ck_assert(i < M_SHARED && m->shared[i].id == 0);
        facts.id = ledger_shared_at(l, i)->id;
        m->shared[i] = facts;
        m->n_shared++;
        add_ref(m, l, session, i);
        ledger_block_share(l, block, i);
        m->blocks[block].session = LEDGER_NONE;
        m->blocks[block].shared = i;
}

static void model_hold(struct model *m, struct ledger *l, uint64_t *rnd)
{
        uint32_t session = random_below(rnd, M_SESSIONS), shared = random_below(rnd, M_SHARED);
        uint32_t i = random_below(rnd, M_REFS);

        if (m->refs[i].id != 0 && random_below(rnd, 2) == 0)
                clear_ref(m, l, i);
        else if (m->sessions[session].id != 0 && m->shared[shared].id != 0)
                add_ref(m, l, session, shared);
}

static void compare_shared(const struct model *m, struct ledger *l)
{
        for (uint32_t i = 0; i < M_SHARED; i++) {
                const struct ledger_shared *s = ledger_shared_get(l, i);

                ck_assert((s != NULL) == (m->shared[i].id != 0));
                if (s)
                        ck_assert(s->id == m->shared[i].id && s->block == m->shared[i].block &&
                                  s->born_ms == m->shared[i].born_ms && strcmp(s->name, "weights") == 0);
        }
        for (uint32_t i = 0; i < M_REFS; i++)
                if (m->refs[i].id != 0)
                        ck_assert(ledger_ref_at(l, i)->session == m->refs[i].session &&
                                  ledger_ref_at(l, i)->shared == m->refs[i].shared);
}

static void compare_block(const struct model *m, struct ledger *l, uint32_t i)
{
        const struct ledger_block *want = &m->blocks[i];
        const struct ledger_block *b;

        if (want->id == 0) {
                ck_assert_uint_eq(ledger_block_find(l, m->last_block[i]), LEDGER_NONE);
                return;
        }
        ck_assert_uint_eq(ledger_block_find(l, want->id), i);
        b = ledger_block_at(l, i);
        ck_assert(b->offset == want->offset && b->n_bytes == want->n_bytes &&
                  b->n_requested == want->n_requested && b->born_ms == want->born_ms &&
                  b->session == want->session && b->quota == want->quota && b->handle == want->handle &&
                  b->shared == want->shared);
}

/* What a walk over the lists finds is what the model holds. */
static void compare_session(const struct model *m, struct ledger *l, uint32_t i)
{
        const struct ledger_session *s;
        uint32_t n_blocks = 0;
        uint32_t n_exports = 0;

        if (m->sessions[i].id == 0)
                return;
        s = ledger_session_at(l, i);
        ck_assert(s->pid == m->sessions[i].pid && s->start_time == m->sessions[i].start_time);
        for (uint32_t b = s->links.first_block; b != LEDGER_NONE;
             b = ledger_block_at(l, b)->links.next_of_session) {
                ck_assert(m->blocks[b].id != 0 && m->blocks[b].session == i);
                n_blocks++;
        }
        for (uint32_t x = s->links.first_export; x != LEDGER_NONE;
             x = ledger_export_at(l, x)->links.next_of_session) {
                ck_assert(m->exports[x].id != 0 && m->exports[x].session == i);
                n_exports++;
        }
        ck_assert_uint_eq(n_blocks, s->links.n_blocks);
        ck_assert_uint_eq(n_exports, s->links.n_exports);
}

static void compare_walks(const struct model *m, struct ledger *l)
{
        uint32_t n = 0;

        for (uint32_t i = 0; i < ledger_block_end(l); i++) {
                const struct ledger_block *b = ledger_block_get(l, i);

                ck_assert(!b == (m->blocks[i].id == 0));
                n += b != NULL;
        }
        ck_assert_uint_eq(n, m->n_blocks);
        ck_assert_ptr_null(ledger_block_get(l, ledger_block_end(l)));
}

static void compare(const struct model *m, struct ledger *l)
{
        struct ledger_counts c;

        ledger_count(l, &c);
        ck_assert_uint_eq(c.n_quotas, M_QUOTAS);
        ck_assert_uint_eq(c.n_sessions, m->n_sessions);
        ck_assert_uint_eq(c.n_extents, m->n_extents);
        ck_assert_uint_eq(c.n_exports, m->n_exports);
        ck_assert_uint_eq(c.n_blocks, m->n_blocks);
        ck_assert_uint_eq(c.n_shared, m->n_shared);
        ck_assert_uint_eq(c.n_refs, m->n_refs);
        compare_shared(m, l);
        for (uint32_t i = 0; i < M_BLOCKS; i++)
                compare_block(m, l, i);
        for (uint32_t i = 0; i < M_SESSIONS; i++)
                compare_session(m, l, i);
        compare_walks(m, l);
}

LOOP_TEST(test_random_operations, 3)
{
        struct ledger_limits limits = { M_QUOTAS, M_SESSIONS, M_EXTENTS, M_EXPORTS, M_BLOCKS,
                                        M_SHARED, M_REFS,     0,         0 };
        struct ledger *l = NULL;
        struct model *m = calloc(1, sizeof(*m));
        uint64_t rnd = UINT64_C(20240607) + (uint64_t)_i;

        ck_assert_ptr_nonnull(m);
        ck_assert_int_eq(ledger_new(&limits, &l), 0);
        for (int i = 0; i < M_QUOTAS; i++)
                add_quota(l);
        for (unsigned i = 0, n = suite_steps(M_OPERATIONS); i < n; i++) {
                uint32_t what = random_below(&rnd, 64);

                if (what == 0)
                        model_session(m, l, &rnd);
                else if (what < 3)
                        model_extent(m, l, &rnd);
                else if (what < 20)
                        model_export(m, l, &rnd);
                else if (what < 24)
                        model_publish(m, l, &rnd);
                else if (what < 32)
                        model_hold(m, l, &rnd);
                else
                        model_block(m, l, &rnd);
                assert_sound(l);
                if (i % 16 == 0)
                        compare(m, l);
        }
        compare(m, l);
        free(m);
        ledger_free(l);
}

/* ---- at its limits -------------------------------------------------------- */

TEST(test_limits_refused)
{
        struct ledger_limits none[] = {
                { 0, 1, 1, 1, 1, 1, 1, 1, 1 },           { 1, 0, 1, 1, 1, 1, 1, 1, 1 },
                { 1, 1, 0, 1, 1, 1, 1, 1, 1 },           { 1, 1, 1, 0, 1, 1, 1, 1, 1 },
                { 1, 1, 1, 1, LEDGER_NONE, 0, 0, 0, 1 }, { 1, 1, 1, 1, 1, LEDGER_NONE, 0, 0, 1 },
                { 1, 1, 1, 1, 1, 1, LEDGER_NONE, 0, 1 }, { 1, 1, 1, 1, 1, 1, 1, LEDGER_NONE, 1 },
                { 1, 1, 1, 1, 1, 1, 1, 1, LEDGER_NONE }
        };
        struct ledger *l = NULL;

        for (size_t i = 0; i < sizeof(none) / sizeof(none[0]); i++) {
                ck_assert_int_eq(ledger_new(&none[i], &l), -EINVAL);
                ck_assert_ptr_null(l);
        }
        ck_assert_ptr_null(ledger_free(NULL));
}

TEST(test_full_tables)
{
        struct ledger *l = make(1, 2, 1, 2, 3);
        struct ledger_quota q = { .extent_bytes = 1 };
        struct ledger_session s = { .pid = 1 };
        struct ledger_extent e = { .n_bytes = 1 };
        struct ledger_block b = { .n_bytes = 1 };
        uint32_t i = 77;

        add_quota(l);
        ck_assert_int_eq(ledger_quota_add(l, &q, &i), -ENOSPC);
        add_session(l);
        add_session(l);
        ck_assert_int_eq(ledger_session_add(l, &s, &i), -ENOSPC);
        ck_assert_int_eq(ledger_extent_add(l, &e, &i), 0);
        i = 77;
        ck_assert_int_eq(ledger_extent_add(l, &e, &i), -ENOSPC);
        ck_assert_int_eq(ledger_export_add(l, 0, 0, &(uint32_t){ 0 }), 0);
        ck_assert_int_eq(ledger_export_add(l, 1, 0, &(uint32_t){ 0 }), 0);
        ck_assert_int_eq(ledger_export_add(l, 1, 0, &i), -ENOSPC);
        for (uint32_t n = 0; n < 3; n++)
                ck_assert_uint_eq(add_block(l, n % 2, 0), n);
        ck_assert_int_eq(ledger_block_add(l, &b, &i), -ENOSPC);
        ck_assert_uint_eq(i, 77); /* untouched on failure */
        assert_sound(l);
        ledger_block_clear(l, 1);
        ck_assert_uint_eq(add_block(l, 0, 0), 1);
        assert_sound(l);
        ledger_free(l);
}

TEST(test_facts_are_copied)
{
        struct ledger *l = make(2, 2, 2, 2, 2);
        struct ledger_quota q = { .id = 99, .extent_bytes = 5, .life = { .peak_in_use = 6 } };
        struct ledger_session s = { .id = 99, .uid = 3, .links = { 1, 1, 1, 1, 1, 1 } };
        uint32_t i;

        memset(q.tenant, 'x', sizeof(q.tenant)); /* no NUL */
        memset(q.partition, 'y', sizeof(q.partition));
        memset(s.tenant, 'z', sizeof(s.tenant));
        ck_assert_int_eq(ledger_quota_add(l, &q, &i), 0);
        ck_assert_uint_eq(ledger_quota_at(l, i)->id, 1);
        ck_assert_uint_eq(ledger_quota_at(l, i)->extent_bytes, 5);
        ck_assert_uint_eq(ledger_quota_at(l, i)->life.peak_in_use, 6);
        ck_assert_uint_eq(strlen(ledger_quota_at(l, i)->tenant), LEDGER_NAME_BYTES - 1);
        ck_assert_uint_eq(strlen(ledger_quota_at(l, i)->partition), LEDGER_NAME_BYTES - 1);
        ck_assert_int_eq(ledger_session_add(l, &s, &i), 0);
        ck_assert_uint_eq(ledger_session_at(l, i)->uid, 3);
        ck_assert_uint_eq(ledger_session_at(l, i)->links.first_block, LEDGER_NONE);
        ck_assert_uint_eq(ledger_session_at(l, i)->links.n_exports, 0);
        ck_assert_uint_eq(strlen(ledger_session_at(l, i)->tenant), LEDGER_NAME_BYTES - 1);
        ledger_free(l);
}

TEST(test_quota_reused)
{
        struct ledger *l = make(2, 1, 1, 1, 1);
        struct ledger_counts c;

        ck_assert_uint_eq(add_quota(l), 0);
        ck_assert_uint_eq(add_quota(l), 1);
        ledger_quota_clear(l, 0);
        assert_sound(l);
        ck_assert_uint_eq(add_quota(l), 0);
        ck_assert_uint_eq(ledger_quota_at(l, 0)->id, 3);
        ck_assert_uint_eq(ledger_quota_at(l, 0)->extent_bytes, 2 << 20);
        ledger_count(l, &c);
        ck_assert_uint_eq(c.n_quotas, 2);
        assert_sound(l);
        ledger_free(l);
}

TEST(test_secret_is_wiped)
{
        struct ledger *l = make(1, 1, 1, 1, 1);
        const uint8_t nothing[16] = { 0 };
        const struct ledger_session *s = ledger_session_at(l, add_session(l));

        ck_assert_mem_ne(s->secret, nothing, sizeof(nothing));
        ledger_session_clear(l, 0);
        ck_assert_mem_eq(s->secret, nothing, sizeof(nothing));
        ledger_free(l);
}

TEST(test_find_foreign)
{
        struct ledger *l = make(1, 1, 1, 1, 16);
        uint64_t rnd = 4711;
        uint64_t id;

        add_quota(l);
        add_session(l);
        for (int i = 0; i < 4; i++)
                add_block(l, 0, 0);
        id = ledger_block_at(l, 3)->id;
        ck_assert_uint_eq(ledger_block_find(l, id), 3);
        ck_assert_uint_eq(ledger_block_find(l, 0), LEDGER_NONE);
        ck_assert_uint_eq(ledger_block_find(l, 3), LEDGER_NONE); /* generation 0 */
        ck_assert_uint_eq(ledger_block_find(l, id + (UINT64_C(1) << 32)), LEDGER_NONE);
        ck_assert_uint_eq(ledger_block_find(l, id + 1), LEDGER_NONE);  /* never touched */
        ck_assert_uint_eq(ledger_block_find(l, id + 13), LEDGER_NONE); /* outside of the table */
        ck_assert_uint_eq(ledger_block_find(l, UINT64_MAX), LEDGER_NONE);
        ledger_block_clear(l, 3);
        ck_assert_uint_eq(ledger_block_find(l, id), LEDGER_NONE); /* freed */
        ck_assert_uint_eq(ledger_block_find(l, 3), LEDGER_NONE);
        ck_assert_uint_eq(ledger_block_find(l, 0), LEDGER_NONE);
        ck_assert_uint_eq(add_block(l, 0, 0), 3);
        ck_assert_uint_eq(ledger_block_find(l, id), LEDGER_NONE); /* somebody else's by now */
        ledger_block_clear(l, 0);
        ck_assert_uint_eq(ledger_block_find(l, 0), LEDGER_NONE); /* the id of a free record is 0 */
        for (int i = 0; i < 100000; i++) {
                uint32_t index = ledger_block_find(l, next_random(&rnd));

                ck_assert(index == LEDGER_NONE || index < 4);
        }
        ledger_free(l);
}

TEST(test_generation_wraps)
{
        struct ledger *l = make(1, 1, 1, 1, 2);
        struct ledger_block b = { .n_bytes = 1 };
        struct ledger_counts c;
        uint32_t i;

        add_quota(l);
        add_session(l);
        add_block(l, 0, 0);
        ledger_block_at(l, 0)->links.generation = UINT32_MAX; /* as after 2^32 - 2 lives */
        ledger_block_clear(l, 0);
        assert_sound(l);
        ck_assert_uint_eq(add_block(l, 0, 0), 0);
        ck_assert_uint_eq(ledger_block_at(l, 0)->id, (uint64_t)UINT32_MAX << 32);
        assert_sound(l);
        ledger_block_clear(l, 0); /* retired */
        assert_sound(l);
        ck_assert_uint_eq(add_block(l, 0, 0), 1);
        ck_assert_int_eq(ledger_block_add(l, &b, &i), -ENOSPC);
        ledger_block_clear(l, 1);
        ck_assert_uint_eq(add_block(l, 0, 0), 1);
        ledger_count(l, &c);
        ck_assert_uint_eq(c.n_blocks, 1);
        assert_sound(l);
        ledger_free(l);
}

TEST(test_sealed_and_sparse)
{
        struct ledger *l = make(1024, 65536, 65536, 1 << 20, 16777216);
        int seals = fcntl(ledger_fd(l), F_GET_SEALS);
        struct stat st;

        ck_assert_int_eq(seals & ALL_SEALS, ALL_SEALS);
        ck_assert_int_eq(fcntl(ledger_fd(l), F_GETFD), FD_CLOEXEC);
        ck_assert_int_eq(ftruncate(ledger_fd(l), 0), -1);
        add_quota(l);
        add_session(l);
        for (int i = 0; i < 1000; i++)
                add_block(l, 0, 0);
        ck_assert_int_eq(fstat(ledger_fd(l), &st), 0);
        ck_assert(st.st_size > (off_t)16777216 * 72);
        ck_assert(st.st_blocks * 512 < 256 * 1024); /* 72 kB of blocks and a few pages */
        assert_sound(l);
        ledger_free(l);
}

/* ledger_check() is only worth something if it finds damage. */
TEST(test_check_finds_damage)
{
        struct ledger *l = make(2, 2, 2, 4, 8);
        struct ledger_extent e = { .n_bytes = 1 };
        const char *why = NULL;
        uint32_t i;

        add_quota(l);
        add_session(l);
        add_session(l);
        for (int n = 0; n < 4; n++)
                add_block(l, 0, 0);
        ck_assert_int_eq(ledger_extent_add(l, &e, &i), 0);
        ck_assert_int_eq(ledger_export_add(l, 0, 0, &i), 0);
        assert_sound(l);

        ledger_block_at(l, 2)->session = 1;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ck_assert_ptr_nonnull(strstr(why, "list of blocks"));
        ledger_block_at(l, 2)->session = 0;
        ledger_block_at(l, 2)->links.prev_of_session = 0;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ck_assert_ptr_nonnull(strstr(why, "list of blocks"));
        ledger_block_at(l, 2)->links.prev_of_session = 3;
        ledger_session_at(l, 0)->links.n_blocks = 3;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ledger_session_at(l, 0)->links.n_blocks = 4;
        ledger_block_at(l, 2)->id++;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ck_assert_ptr_nonnull(strstr(why, "names another index"));
        ledger_block_at(l, 2)->id--;
        ledger_extent_at(l, 0)->links.n_exports = 0;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ledger_extent_at(l, 0)->links.n_exports = 1;
        ledger_extent_at(l, 0)->id = 9;
        ck_assert_int_eq(ledger_check(l, &why), -EBADMSG);
        ck_assert_ptr_nonnull(strstr(why, "never assigned"));
        ledger_extent_at(l, 0)->id = 1;
        assert_sound(l);
        ledger_free(l);
}

/* ---- under SIGKILL -------------------------------------------------------- */

enum { KILLS = 120, K_BLOCKS = 4, K_SESSIONS = 2 };

static uint64_t mix(uint64_t x)
{
        x *= UINT64_C(0x9e3779b97f4a7c15);
        return x ^ x >> 29;
}

/* Each fact follows from the offset, so a torn record shows. */
static void make_block(struct ledger_block *b, uint64_t seed)
{
        b->offset = seed;
        b->n_bytes = mix(seed + 1);
        b->n_requested = mix(seed + 2);
        b->born_ms = mix(seed + 3);
        b->handle = mix(seed + 4);
}

static bool block_is_whole(const struct ledger_block *b)
{
        struct ledger_block want = { 0 };

        make_block(&want, b->offset);
        return b->n_bytes == want.n_bytes && b->n_requested == want.n_requested &&
               b->born_ms == want.born_ms && b->handle == want.handle;
}

static void make_session(struct ledger_session *s, uint64_t seed)
{
        s->start_time = seed;
        for (size_t i = 0; i < sizeof(s->secret); i++)
                s->secret[i] = (uint8_t)mix(seed + i);
        s->pid = (uint32_t)mix(seed + 100);
        s->uid = (uint32_t)mix(seed + 101);
        s->gid = (uint32_t)mix(seed + 102);
        memset(s->tenant, 'a' + (int)(seed % 26), sizeof(s->tenant) - 1);
}

static bool session_is_whole(const struct ledger_session *s)
{
        struct ledger_session want = { 0 };

        make_session(&want, s->start_time);
        return s->pid == want.pid && s->uid == want.uid && s->gid == want.gid &&
               memcmp(s->secret, want.secret, sizeof(s->secret)) == 0 &&
               memcmp(s->tenant, want.tenant, sizeof(s->tenant)) == 0;
}

/* Replaces records as fast as it can until it is killed. */
static void mutate(void *userdata)
{
        struct ledger *l = userdata;
        struct ledger_session s = { 0 };
        struct ledger_block b = { 0 };
        uint64_t seed = 1;
        uint32_t i;

        for (;;) {
                uint32_t victim = (uint32_t)(mix(seed) % K_BLOCKS);

                ledger_block_clear(l, victim);
                make_block(&b, ++seed);
                if (ledger_block_add(l, &b, &i) != 0 || i != victim)
                        _exit(1);
                if (seed % 4 != 0)
                        continue;
                ledger_session_clear(l, 1);
                make_session(&s, ++seed);
                if (ledger_session_add(l, &s, &i) != 0 || i != 1)
                        _exit(1);
        }
}

static void fill_for_crash(struct ledger *l)
{
        struct ledger_session s = { 0 };
        struct ledger_block b = { 0 };
        uint32_t i;

        add_quota(l);
        for (uint64_t n = 0; n < K_SESSIONS; n++) {
                make_session(&s, n);
                ck_assert_int_eq(ledger_session_add(l, &s, &i), 0);
        }
        for (uint64_t n = 0; n < K_BLOCKS; n++) {
                make_block(&b, n);
                ck_assert_int_eq(ledger_block_add(l, &b, &i), 0);
        }
}

/* Maps the memfd anew, as a successor would, and finds the page that shows the
 * same memory as p: a test must not know the layout to read the records. */
static void *map_anew(const struct ledger *l, const void *p, const void *end, unsigned char **ret_map,
                      size_t *ret_bytes)
{
        size_t n = (size_t)((const unsigned char *)end - (const unsigned char *)p);
        struct stat st;

        ck_assert_int_eq(fstat(ledger_fd(l), &st), 0);
        *ret_bytes = (size_t)st.st_size;
        *ret_map = mmap(NULL, *ret_bytes, PROT_READ, MAP_SHARED, ledger_fd(l), 0);
        ck_assert_ptr_ne(*ret_map, MAP_FAILED);
        for (size_t at = 0; at + n <= *ret_bytes; at += 4096)
                if (memcmp(*ret_map + at, p, n) == 0)
                        return *ret_map + at;
        ck_abort_msg("the memfd does not hold the table");
        return NULL;
}

TEST(test_kill_leaves_whole_records)
{
        uint64_t rnd = 1234567;
        uint64_t n_given = 0;

        for (int n = 0; n < KILLS; n++) {
                struct ledger *l = make(1, K_SESSIONS, 1, 1, K_BLOCKS);
                unsigned char *maps[2];
                size_t n_bytes;
                const struct ledger_session *s;
                const struct ledger_block *b;

                fill_for_crash(l);
                s = ledger_session_at(l, 0);
                b = ledger_block_at(l, 0);
                run_and_kill(mutate, l, (long)random_below(&rnd, 2000000));
                s = map_anew(l, s, s + K_SESSIONS, &maps[0], &n_bytes);
                b = map_anew(l, b, b + K_BLOCKS, &maps[1], &n_bytes);
                for (uint32_t i = 0; i < K_BLOCKS; i++) {
                        if (b[i].id == 0)
                                continue;
                        ck_assert_uint_eq((uint32_t)b[i].id, i);
                        ck_assert_msg(block_is_whole(&b[i]), "kill %d tore block %u", n, i);
                        /* no later id at this index can be this one */
                        ck_assert(b[i].links.generation > (uint32_t)(b[i].id >> 32));
                        n_given += b[i].id >> 32;
                }
                for (uint32_t i = 0; i < K_SESSIONS; i++)
                        if (s[i].id != 0)
                                ck_assert_msg(session_is_whole(&s[i]), "kill %d tore session %u", n, i);
                munmap(maps[0], n_bytes);
                munmap(maps[1], n_bytes);
                ledger_free(l);
        }
        ck_assert(n_given > KILLS); /* the children did work */
}

/* ---- threads ---------------------------------------------------------------------- */

#define N_ADDED 1000u

struct growth {
        struct ledger *ledger;
        atomic_uint n; /* relaxed: it orders nothing else */
        atomic_bool is_over;
};

static void *grow(void *arg)
{
        struct growth *g = arg;

        while (!atomic_load_explicit(&g->is_over, memory_order_relaxed)) {
                ledger_quota_grows(g->ledger, 0, 5, 1);
                ledger_quota_grows(g->ledger, 0, 2 << 20, 1);
                ledger_quota_has_grown(g->ledger, 0, 5);
                ledger_quota_has_grown(g->ledger, 0, 2 << 20);
                atomic_fetch_add_explicit(&g->n, 1, memory_order_relaxed);
        }
        return NULL;
}

/* Workers note that a quota grows, two beside each other, while the loop adds others. Only ThreadSanitizer sees a race. */
TEST(a_quota_grows_beside_others_that_are_added)
{
        struct growth g = { .ledger = make(N_ADDED + 1, 1, 1, 1, 1) };
        pthread_t threads[2];

        ck_assert_uint_eq(add_quota(g.ledger), 0);
        ledger_quota_grows(g.ledger, 0, 9, 1);
        for (unsigned i = 0; i < 2; i++)
                ck_assert_int_eq(pthread_create(&threads[i], NULL, grow, &g), 0);
        for (unsigned i = 0; i < N_ADDED; i++) {
                while (atomic_load_explicit(&g.n, memory_order_relaxed) < i)
                        sched_yield();
                (void)add_quota(g.ledger);
        }
        atomic_store_explicit(&g.is_over, true, memory_order_relaxed);
        for (unsigned i = 0; i < 2; i++)
                ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        ck_assert_uint_eq(ledger_quota_at(g.ledger, 0)->growing_mib, 1); /* the first one goes on */
        ledger_quota_grows(g.ledger, 0, 1, 7);
        ck_assert_uint_eq(ledger_quota_at(g.ledger, 0)->oom_kills, 1);
        ledger_quota_has_grown(g.ledger, 0, UINT64_MAX);
        ck_assert_uint_eq(ledger_quota_at(g.ledger, 0)->growing_mib, 0);
        assert_sound(g.ledger);
        ledger_free(g.ledger);
}
