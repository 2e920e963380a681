/* SPDX-License-Identifier: Apache-2.0 */
#include "ledger_life.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/suite.h"

static const char *const TENANTS[LIFE_QUOTAS] = { "vision", "vision", "audio" };
static const char *const PARTITIONS[LIFE_QUOTAS] = { "train", "infer", "train" };

static uint64_t mix(uint64_t x)
{
        x = (x ^ x >> 31) * UINT64_C(0x9e3779b97f4a7c15);
        return x ^ x >> 29;
}

uint32_t life_random(struct life *life, uint32_t below)
{
        life->random = life->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (uint32_t)(life->random >> 33) % below;
}

struct ledger *life_ledger(void)
{
        static const struct ledger_limits LIMITS = { LIFE_QUOTAS,  LIFE_SESSIONS, LIFE_EXTENTS,
                                                     LIFE_EXPORTS, LIFE_BLOCKS,   LIFE_SHARED,
                                                     LIFE_REFS,    LIFE_METADATA, 0 };
        struct ledger *l = NULL;

        ck_assert_int_eq(ledger_new(&LIMITS, &l), 0);
        for (int i = 0; i < LIFE_QUOTAS; i++) {
                struct ledger_quota q = { .extent_bytes = LIFE_CELLS_PER_PLACE * LIFE_CELL_BYTES };
                uint32_t index;

                snprintf(q.tenant, sizeof(q.tenant), "%s", TENANTS[i]);
                snprintf(q.partition, sizeof(q.partition), "%s", PARTITIONS[i]);
                ck_assert_int_eq(ledger_quota_add(l, &q, &index), 0);
        }
        return l;
}

static bool is_used(const struct life *life, int kind, uint32_t index)
{
        return in_use(&life->l->tables[kind], index);
}

static void end_extent(struct ledger *l, uint32_t index)
{
        ledger_extent_leave(l, index);
        while (ledger_extent_at(l, index)->links.first_export != LEDGER_NONE)
                ledger_export_clear(l, ledger_extent_at(l, index)->links.first_export);
        ledger_extent_clear(l, index);
}

void life_join(struct life *life, struct ledger *l, uint64_t seed)
{
        memset(life, 0xff, sizeof(*life));
        life->l = l;
        life->random = mix(seed + 1);
        for (uint32_t i = 0; i < LIFE_EXTENTS; i++) {
                const struct ledger_extent *e =
                        is_used(life, TABLE_EXTENT, i) ? ledger_extent_at(l, i) : NULL;

                if (e && e->is_leaving) /* the one before was killed in it */
                        end_extent(l, i);
                else if (e)
                        life->extents[e->quota][e->offset / (LIFE_CELLS_PER_PLACE * LIFE_CELL_BYTES)] = i;
        }
        for (uint32_t i = 0; i < LIFE_BLOCKS; i++) {
                const struct ledger_block *b = is_used(life, TABLE_BLOCK, i) ? ledger_block_at(l, i) : NULL;

                for (uint64_t n = 0; b && n < b->n_bytes / LIFE_CELL_BYTES; n++)
                        life->cells[b->quota][b->offset / LIFE_CELL_BYTES + n] = i;
        }
}

/* A random record in use, or LEDGER_NONE. */
static uint32_t pick(struct life *life, int kind)
{
        const struct table *t = &life->l->tables[kind];
        uint32_t i = t->n_touched > 0 ? table_next(t, life_random(life, t->n_touched)) : LEDGER_NONE;

        return i != LEDGER_NONE ? i : table_next(t, 0);
}

static bool is_tenants(struct life *life, uint32_t session, uint32_t quota)
{
        return strcmp(ledger_session_at(life->l, session)->tenant, TENANTS[quota]) == 0;
}

/* ---- blocks ------------------------------------------------------------------ */

/* What a block of so many cells had when it was given: a later part of it has the same. */
static uint64_t origin_of(uint32_t quota, uint32_t first, uint32_t n)
{
        return (uint64_t)first << 16 | (uint64_t)n << 8 | quota;
}

static void make_block(struct ledger_block *b, uint64_t origin, uint64_t offset, uint64_t n_bytes)
{
        uint64_t end = ((origin >> 16) + (origin >> 8 & 0xff)) * LIFE_CELL_BYTES;

        *b = (struct ledger_block){
                .quota = (uint32_t)(origin & 0xff), .offset = offset, .n_bytes = n_bytes, .born_ms = origin
        };
        b->n_requested = n_bytes - (offset + n_bytes == end ? mix(origin) % 200 : 0);
        snprintf(b->tag, sizeof(b->tag), "%llx", (unsigned long long)mix(origin));
}

static void add_block(struct life *life)
{
        uint32_t session = pick(life, TABLE_SESSION), quota = life_random(life, LIFE_QUOTAS);
        uint32_t first = life_random(life, LIFE_CELLS), n = 1 + life_random(life, 4), index;
        struct ledger_block b;

        if (session == LEDGER_NONE || !is_tenants(life, session, quota) || first + n > LIFE_CELLS)
                return;
        for (uint32_t i = first; i < first + n; i++)
                if (life->cells[quota][i] != LEDGER_NONE ||
                    life->extents[quota][i / LIFE_CELLS_PER_PLACE] == LEDGER_NONE)
                        return;
        make_block(&b, origin_of(quota, first, n), (uint64_t)first * LIFE_CELL_BYTES,
                   (uint64_t)n * LIFE_CELL_BYTES);
        b.session = session;
        if (ledger_block_add(life->l, &b, &index) < 0)
                return;
        for (uint32_t i = first; i < first + n; i++)
                life->cells[quota][i] = index;
}

static void split_block(struct life *life)
{
        uint32_t index = pick(life, TABLE_BLOCK), high, n, at;
        const struct ledger_block *b;

        if (index == LEDGER_NONE)
                return;
        b = ledger_block_at(life->l, index);
        n = (uint32_t)(b->n_bytes / LIFE_CELL_BYTES);
        if (b->shared != LEDGER_NONE || n < 2)
                return;
        at = 1 + life_random(life, n - 1);
        if (ledger_block_split(life->l, index, (uint64_t)at * LIFE_CELL_BYTES, 0, &high) < 0)
                return;
        for (uint64_t i = b->offset / LIFE_CELL_BYTES + at; n > at; n--)
                life->cells[b->quota][i++] = high;
}

static void clear_block(struct life *life, uint32_t index)
{
        const struct ledger_block *b = ledger_block_at(life->l, index);
        uint32_t first = (uint32_t)(b->offset / LIFE_CELL_BYTES),
                 n = (uint32_t)(b->n_bytes / LIFE_CELL_BYTES);

        for (uint32_t i = first; i < first + n; i++)
                life->cells[b->quota][i] = LEDGER_NONE;
        ledger_block_clear(life->l, index);
}

/* ---- shared blocks --------------------------------------------------------------- */

/* The bytes follow from their number. */
static size_t make_metadata(size_t n_bytes, unsigned char *ret)
{
        for (size_t i = 0; i < n_bytes; i++)
                ret[i] = (unsigned char)mix(n_bytes + i);
        return n_bytes;
}

static void publish(struct life *life)
{
        uint32_t block = pick(life, TABLE_BLOCK), shared, ref;
        struct ledger_shared facts = { .block = block,
                                       .born_ms = 5,
                                       .keep_ms = life_random(life, 8) / 7 * 9 };
        unsigned char metadata[LEDGER_METADATA_BYTES];
        size_t n = make_metadata(1 + life_random(life, LEDGER_METADATA_BYTES), metadata);
        const struct ledger_block *b;

        if (block == LEDGER_NONE)
                return;
        b = ledger_block_at(life->l, block);
        snprintf(facts.name, sizeof(facts.name), "block %llx", (unsigned long long)b->id);
        if (b->shared != LEDGER_NONE || ledger_shared_add(life->l, &facts, &shared) < 0)
                return;
        if (life_random(life, 2) == 0)
                (void)ledger_shared_describe(life->l, shared, metadata, n);
        if (ledger_ref_add(life->l, b->session, shared, &ref) < 0)
                ledger_shared_clear(life->l, shared);
        else
                ledger_block_share(life->l, block, shared);
}

static void attach(struct life *life)
{
        uint32_t shared = pick(life, TABLE_SHARED), session = pick(life, TABLE_SESSION), i;
        uint32_t block;

        if (shared == LEDGER_NONE || session == LEDGER_NONE)
                return;
        block = ledger_shared_at(life->l, shared)->block;
        if (!is_tenants(life, session, ledger_block_at(life->l, block)->quota))
                return;
        i = ledger_session_at(life->l, session)->links.first_ref;
        while (i != LEDGER_NONE && ledger_ref_at(life->l, i)->shared != shared)
                i = ledger_ref_at(life->l, i)->links.next_of_session;
        if (i != LEDGER_NONE)
                ledger_ref_at(life->l, i)->count++;
        else
                (void)ledger_ref_add(life->l, session, shared, &i);
}

/* A kept block without references. */
static void forget(struct life *life)
{
        uint32_t shared = pick(life, TABLE_SHARED);
        const struct ledger_shared *s = shared != LEDGER_NONE ? ledger_shared_at(life->l, shared) : NULL;

        if (!s)
                return;
        if (s->links.n_refs > 0) {
                ledger_shared_keep(life->l, shared, 0);
                return;
        }
        clear_block(life, s->block);
        ledger_shared_clear(life->l, shared);
}

/* All of a session's count. */
static void clear_ref(struct life *life, uint32_t ref)
{
        uint32_t shared = ledger_ref_at(life->l, ref)->shared;
        bool is_last = ledger_shared_at(life->l, shared)->links.n_refs == 1;

        if (is_last && ledger_shared_at(life->l, shared)->keep_ms > 0) {
                ledger_shared_keep_until(life->l, shared, 7);
                is_last = false;
        }
        if (is_last)
                clear_block(life, ledger_shared_at(life->l, shared)->block);
        ledger_ref_clear(life->l, ref);
        if (is_last)
                ledger_shared_clear(life->l, shared);
}

static void detach(struct life *life)
{
        uint32_t ref = pick(life, TABLE_REF);

        if (ref == LEDGER_NONE)
                return;
        if (ledger_ref_at(life->l, ref)->count > 1)
                ledger_ref_at(life->l, ref)->count--;
        else
                clear_ref(life, ref);
}

/* ---- sessions and extents ---------------------------------------------------------- */

static void make_session(struct ledger_session *s, uint32_t pid)
{
        *s = (struct ledger_session){ .pid = pid, .uid = pid / 2, .gid = pid / 3, .start_time = mix(pid) };
        s->born_ms = mix(pid + 1);
        s->has_events = (uint32_t)mix(pid + 2);
        s->can_resume = (uint32_t)mix(pid + 3);
        snprintf(s->name, sizeof(s->name), "job %u", pid);
        for (size_t i = 0; i < sizeof(s->secret); i++)
                s->secret[i] = (uint8_t)mix(pid + i);
        snprintf(s->tenant, sizeof(s->tenant), "%s", pid % 2 ? "audio" : "vision");
}

static void add_session(struct life *life)
{
        struct ledger_session s;
        uint32_t index;

        make_session(&s, 1 + life_random(life, 30000));
        (void)ledger_session_add(life->l, &s, &index);
}

static void end_session(struct life *life)
{
        uint32_t i = pick(life, TABLE_SESSION);
        struct ledger_session *s = i != LEDGER_NONE ? ledger_session_at(life->l, i) : NULL;

        while (s && s->links.first_block != LEDGER_NONE)
                clear_block(life, s->links.first_block);
        while (s && s->links.first_ref != LEDGER_NONE)
                clear_ref(life, s->links.first_ref);
        while (s && s->links.first_export != LEDGER_NONE)
                ledger_export_clear(life->l, s->links.first_export);
        if (s)
                ledger_session_clear(life->l, i);
}

static void change_extent(struct life *life)
{
        uint32_t quota = life_random(life, LIFE_QUOTAS), place = life_random(life, LIFE_PLACES);
        uint64_t n_bytes = LIFE_CELLS_PER_PLACE * LIFE_CELL_BYTES;
        struct ledger_extent facts = { .quota = quota, .offset = place * n_bytes, .n_bytes = n_bytes };
        uint32_t *at = &life->extents[quota][place];

        if (*at == LEDGER_NONE) {
                facts.store_key = life->l->tables[TABLE_EXTENT].shared->next_id; /* no other has it */
                /* Not by Check, whose pipe would be left torn where this process is killed in it. */
                if (ledger_extent_add(life->l, &facts, at) != 0)
                        abort();
                return;
        }
        if (life_random(life, 8) != 0)
                return;
        for (uint32_t i = place * LIFE_CELLS_PER_PLACE; i < (place + 1) * LIFE_CELLS_PER_PLACE; i++)
                if (life->cells[quota][i] != LEDGER_NONE)
                        return;
        end_extent(life->l, *at);
        *at = LEDGER_NONE;
}

static void add_export(struct life *life)
{
        uint32_t session = pick(life, TABLE_SESSION), extent = pick(life, TABLE_EXTENT), i;

        if (session == LEDGER_NONE || extent == LEDGER_NONE ||
            !is_tenants(life, session, ledger_extent_at(life->l, extent)->quota))
                return;
        i = ledger_session_at(life->l, session)->links.first_export;
        while (i != LEDGER_NONE && ledger_export_at(life->l, i)->extent != extent)
                i = ledger_export_at(life->l, i)->links.next_of_session;
        if (i == LEDGER_NONE)
                (void)ledger_export_add(life->l, session, extent, &i);
}

/* Each number of bytes says in which quota. */
static void change_direct(struct life *life)
{
        uint32_t session = pick(life, TABLE_SESSION), quota = life_random(life, LIFE_QUOTAS);
        uint64_t id = ledger_quota_at(life->l, quota)->id;

        if (session != LEDGER_NONE && is_tenants(life, session, quota))
                (void)ledger_session_set_direct(life->l, session, id,
                                                life_random(life, 3) > 0 ? id * 1000 + life_random(life, 1000)
                                                                         : 0);
}

void life_step(struct life *life)
{
        uint32_t what = life_random(life, 128), block;

        if (what == 0)
                end_session(life);
        else if (what < 4)
                add_session(life);
        else if (what < 8)
                change_extent(life);
        else if (what < 10)
                change_direct(life);
        else if (what < 14)
                add_export(life);
        else if (what < 62)
                add_block(life);
        else if (what < 70)
                split_block(life);
        else if (what < 90)
                publish(life);
        else if (what < 96)
                attach(life);
        else if (what < 120)
                detach(life);
        else if (what < 124)
                forget(life);
        else if ((block = pick(life, TABLE_BLOCK)) != LEDGER_NONE &&
                 ledger_block_at(life->l, block)->shared == LEDGER_NONE)
                clear_block(life, block);
}

const char *life_check(struct ledger *l)
{
        const struct table *t = &l->tables[TABLE_BLOCK];

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_block *b = record(t, i);
                struct ledger_block want;

                make_block(&want, b->born_ms, b->offset, b->n_bytes);
                if (b->quota != want.quota || b->n_requested != want.n_requested ||
                    strcmp(b->tag, want.tag) != 0)
                        return "a block is torn";
        }
        t = &l->tables[TABLE_METADATA];
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_metadata *m = record(t, i);
                unsigned char want[LEDGER_METADATA_BYTES];

                if (memcmp(m->bytes, want, make_metadata(m->n_bytes, want)) != 0)
                        return "metadata is torn";
        }
        t = &l->tables[TABLE_SHARED];
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_shared *s = record(t, i);

                if (s->links.n_refs == 0 && s->until_ms != 7)
                        return "a kept block without references has no end";
        }
        t = &l->tables[TABLE_SESSION];
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_session *s = record(t, i);
                struct ledger_session want;

                make_session(&want, s->pid);
                if (s->uid != want.uid || s->gid != want.gid || s->start_time != want.start_time ||
                    memcmp(s->secret, want.secret, sizeof(s->secret)) != 0 || s->born_ms != want.born_ms ||
                    s->has_events != want.has_events || s->can_resume != want.can_resume ||
                    strcmp(s->name, want.name) != 0 || strcmp(s->tenant, want.tenant) != 0)
                        return "a session is torn";
                for (size_t k = 0; k < LEDGER_SESSION_DIRECT; k++)
                        if (s->direct[k].n_bytes > 0 && s->direct[k].n_bytes / 1000 != s->direct[k].quota_id)
                                return "a direct charge is torn";
        }
        return NULL;
}
