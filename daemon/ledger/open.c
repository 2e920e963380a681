/* SPDX-License-Identifier: Apache-2.0 */
/* Opens the ledger of a previous daemon; see ledger.h.
 *
 * Every record is checked before it is used: no index is followed that is outside of its
 * table, or of a record that is free or was found bad. So the tables are opened in an order
 * in which each one relies only on those before it. The schema says what must hold in each
 * table; what it cannot express is in the table's fault function. A ledger that passed all
 * of this satisfies ledger_check() once its lists are built.
 *
 * The daemon can be killed here too, and the next opening must find the rest still to do.
 * An arena is closed before the record for which it is closed is cleared. A half-done
 * publication is cleared by clearing its id. All other words are links, which are rebuilt anyway.
 * Two records with one id, or one pair, are both bad: it is not known which one is right. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/ledger/open.h"
#include "daemon/ledger/sort.h"
#include "daemon/ledger/table.h"

#define SEALS_NEEDED (F_SEAL_GROW | F_SEAL_SHRINK)

/* Not a fault: the record is cleared without a message. */
static const char UNUSED[] = "";

/* ---- faults ---------------------------------------------------------------- */

static void tell(struct opening *o, const char *table, uint32_t index, uint64_t id, uint32_t quota,
                 const char *why)
{
        struct ledger_fault fault = { table, index, id, quota, why };

        o->n_faults++;
        if (o->on_fault)
                o->on_fault(o->userdata, &fault);
}

/* Clears a bad record and closes no quota. */
static void clear_bad(struct opening *o, int kind, uint32_t index, uint32_t quota, const char *why)
{
        const struct table *t = table_of(o, kind);
        uint64_t id = record_id(t, index);

        uncommit(t, index);
        tell(o, LEDGER_KINDS[kind].name, index, id, quota, why);
}

static void close_tenant(struct opening *o, const char *tenant)
{
        const struct table *t = table_of(o, TABLE_QUOTA);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_quota *q = record(t, i);

                if (!tenant || strcmp(q->tenant, tenant) == 0)
                        ledger_quota_close(o->l, i);
        }
}

/* Closes each quota that a bad record may belong to, and clears the record. */
static void reject(struct opening *o, int kind, uint32_t index, uint32_t quota, uint32_t session,
                   const char *why)
{
        bool is_known = is_used(o, TABLE_QUOTA, quota);

        if (is_known)
                ledger_quota_close(o->l, quota);
        else if (is_used(o, TABLE_SESSION, session))
                close_tenant(o, ledger_session_at(o->l, session)->tenant);
        else
                close_tenant(o, NULL);
        clear_bad(o, kind, index, is_known ? quota : LEDGER_NONE, why);
}

/* ---- helpers ----------------------------------------------------------------- */

static bool is_name(const char name[LEDGER_NAME_BYTES])
{
        return name[0] != '\0' && memchr(name, '\0', LEDGER_NAME_BYTES);
}

/* Whether session and quota have the same tenant. A bad quota has no name. */
static bool is_tenants(struct opening *o, uint32_t session, uint32_t quota)
{
        const char *tenant = ledger_quota_at(o->l, quota)->tenant;

        return tenant[0] == '\0' || strcmp(ledger_session_at(o->l, session)->tenant, tenant) == 0;
}

static uint64_t field_of(const void *record, struct field f)
{
        uint64_t wide = 0;
        uint32_t word = 0;

        if (f.n_bytes == sizeof(word)) {
                memcpy(&word, (const char *)record + f.offset, sizeof(word));
                return word;
        }
        if (f.n_bytes == sizeof(wide))
                memcpy(&wide, (const char *)record + f.offset, sizeof(wide));
        return wide;
}

/* The records in use, sorted by two fields; the caller frees the keys. */
static int sort_table(struct opening *o, int kind, struct field a, struct field b, struct ledger_key **ret,
                      size_t *ret_n)
{
        const struct table *t = table_of(o, kind);
        struct ledger_key *keys;
        size_t n = 0;

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                n++;
        keys = calloc(n > 0 ? n : 1, sizeof(*keys));
        if (!keys)
                return -ENOMEM;
        n = 0;
        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                keys[n++] = (struct ledger_key){ field_of(record(t, i), a), field_of(record(t, i), b), i };
        if (ledger_sort(keys, n) < 0) {
                free(keys);
                return -ENOMEM;
        }
        *ret = keys;
        *ret_n = n;
        return 0;
}

/* ---- quotas and sessions -------------------------------------------------------- */

/* It stays, so that what is charged to it is still known as one arena's. */
static void reject_quota(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct table *t = table_of(o, kind);
        struct ledger_quota *q = record(t, index);
        uint64_t id = q->id;

        ledger_quota_close(o->l, index);
        memset(q->tenant, 0, sizeof(q->tenant));
        memset(q->partition, 0, sizeof(q->partition));
        atomic_thread_fence(memory_order_release);
        commit(t, index, next_id(t));
        tell(o, LEDGER_KINDS[kind].name, index, id, index, why);
}

static const char *quota_fault(struct opening *o, uint32_t index)
{
        const struct ledger_quota *q = record(table_of(o, TABLE_QUOTA), index);
        bool is_nameless = q->is_closed && q->tenant[0] == '\0' && q->partition[0] == '\0';

        return is_nameless || (is_name(q->tenant) && is_name(q->partition)) ? NULL : "it has no name";
}

/* Records that refer to it are bad, too, and close their quotas. */
static void reject_alone(struct opening *o, int kind, uint32_t index, const char *why)
{
        clear_bad(o, kind, index, LEDGER_NONE, why);
}

/* That of a quota that is gone, or closed, is ignored later. */
static const char *direct_fault(struct opening *o, uint32_t session, const struct ledger_direct *d)
{
        const struct table *t = table_of(o, TABLE_QUOTA);
        uint32_t i = table_next(t, 0);

        if (d->n_bytes == 0)
                return NULL;
        if (d->n_bytes > LEDGER_DIRECT_MAX)
                return "its direct charge is too large";
        while (i != LEDGER_NONE && record_id(t, i) != d->quota_id)
                i = table_next(t, i + 1);
        return i == LEDGER_NONE || is_tenants(o, session, i)
                       ? NULL
                       : "it and the quota of its direct charge belong to different tenants";
}

static const char *directs_fault(struct opening *o, uint32_t index)
{
        const struct ledger_session *s = record(table_of(o, TABLE_SESSION), index);
        const char *why = NULL;

        for (size_t i = 0; !why && i < LEDGER_SESSION_DIRECT; i++) {
                why = direct_fault(o, index, &s->direct[i]);
                for (size_t k = 0; !why && s->direct[i].n_bytes > 0 && k < i; k++)
                        if (s->direct[k].n_bytes > 0 && s->direct[k].quota_id == s->direct[i].quota_id)
                                why = "it has two direct charges in one quota";
        }
        return why;
}

static const char *session_fault(struct opening *o, uint32_t index)
{
        const struct ledger_session *s = record(table_of(o, TABLE_SESSION), index);

        if (s->tenant[0] == '\0')
                return UNUSED; /* an operator's: it has no memory and is not resumed */
        if (!is_name(s->tenant))
                return "its tenant has no name";
        return memchr(s->name, '\0', sizeof(s->name)) ? directs_fault(o, index)
                                                      : "its name is not terminated";
}

/* ---- leases ------------------------------------------------------------------------- */

static void reject_lease(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_lease *lease = record(table_of(o, kind), index);

        reject(o, kind, index, lease->quota, LEDGER_NONE, why);
}

/* The last store of a change is made here if it was not. */
static const char *lease_fault(struct opening *o, uint32_t index)
{
        struct ledger_lease *lease = record(table_of(o, TABLE_LEASE), index);

        if (!is_name(lease->name))
                return "it has no name";
        if (lease->kind < LEASE_CGROUP || lease->kind >= LEASE_KINDS)
                return "what it matches is invalid";
        if (lease->maker >= LEASE_MAKERS || (lease->maker == LEASE_BY_CONFIG && lease->kind != LEASE_CGROUP))
                return "its maker is invalid";
        if (!memchr(lease->match, '\0', sizeof(lease->match)) ||
            !memchr(lease->place, '\0', sizeof(lease->place)))
                return "its match is not terminated";
        if (lease->kind == LEASE_SOCKET && !ledger_is_socket_name(lease->match))
                return "its socket has no valid name";
        if (lease->limit_bytes == 0 || lease->limit_bytes % LEDGER_STEP_BYTES != 0 ||
            lease->reserve_bytes % LEDGER_STEP_BYTES != 0)
                return "its limit or reserve is invalid";
        if (lease->reserve_bytes > lease->limit_bytes)
                lease->reserve_bytes = lease->limit_bytes;
        return ledger_quota_at(o->l, lease->quota)->is_lease ? NULL : "its quota is not that of a lease";
}

/* ---- regions ------------------------------------------------------------------------ */

static void reject_region(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_region *r = record(table_of(o, kind), index);

        reject(o, kind, index, r->quota, LEDGER_NONE, why);
}

static const char *region_fault(struct opening *o, uint32_t index)
{
        const struct ledger_region *r = record(table_of(o, TABLE_REGION), index);

        return r->first_extent_bytes > r->n_bytes ? "its first extent does not fit in it" : NULL;
}

/* ---- extents and exports --------------------------------------------------------- */

static void reject_extent(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_extent *e = record(table_of(o, kind), index);
        uint32_t quota = is_used(o, TABLE_QUOTA, e->quota) ? e->quota : LEDGER_NONE;

        o->is_bad_extent[index] = quota != LEDGER_NONE;
        if (quota != LEDGER_NONE)
                ledger_quota_close(o->l, quota);
        clear_bad(o, kind, index, quota, why);
}

static const char *extent_fault(struct opening *o, uint32_t index)
{
        const struct ledger_extent *e = record(table_of(o, TABLE_EXTENT), index);

        return e->is_leaving > 1 ? "its release state is invalid" : NULL;
}

static void reject_export(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct table *extents = table_of(o, TABLE_EXTENT);
        const struct ledger_export *x = record(table_of(o, kind), index);
        bool has_extent =
                x->extent < extents->n_touched && (in_use(extents, x->extent) || o->is_bad_extent[x->extent]);

        reject(o, kind, index,
               has_extent ? ((const struct ledger_extent *)record(extents, x->extent))->quota : LEDGER_NONE,
               x->session, why);
}

static const char *export_fault(struct opening *o, uint32_t index)
{
        const struct ledger_export *x = record(table_of(o, TABLE_EXPORT), index);

        return is_tenants(o, x->session, ledger_extent_at(o->l, x->extent)->quota)
                       ? NULL
                       : "its session and its extent belong to different tenants";
}

/* ---- blocks ------------------------------------------------------------------------- */

/* An index whose generation is unknown is never used again. */
void opening_reject_block(struct opening *o, uint32_t index, const char *why)
{
        struct ledger_block *b = record(table_of(o, TABLE_BLOCK), index);
        uint64_t id = b->id;

        if ((uint32_t)id != index || b->links.generation <= (uint32_t)(id >> 32))
                b->links.generation = 0;
        reject(o, TABLE_BLOCK, index, b->quota, b->session, why);
}

static void reject_block(struct opening *o, int kind, uint32_t index, const char *why)
{
        (void)kind;
        opening_reject_block(o, index, why);
}

/* NULL, or what is wrong with the session or shared record of a block. The last stores of a
 * publication are made here if they were not. */
static const char *block_owner_fault(struct opening *o, struct ledger_block *b, uint32_t index)
{
        const struct table *shared = table_of(o, TABLE_SHARED);

        if (b->shared != LEDGER_NONE) {
                if (!in_use(shared, b->shared)) /* a copy is cleared after its block and the shared record */
                        return b->parked == LEDGER_IS_COPY ? UNUSED : "its shared record is not in use";
                if ((((const struct ledger_shared *)record(shared, b->shared))->block == index) ==
                    (b->parked == LEDGER_IS_COPY))
                        return "its shared record belongs to another block";
                b->session = LEDGER_NONE;
                return NULL;
        }
        if (!is_used(o, TABLE_SESSION, b->session))
                return "its session is not in use";
        return is_tenants(o, b->session, b->quota) ? NULL
                                                   : "its session and its quota belong to different "
                                                     "tenants";
}

static const char *block_fault(struct opening *o, uint32_t index)
{
        struct ledger_block *b = record(table_of(o, TABLE_BLOCK), index);

        if (b->n_requested == 0 || b->n_requested > b->n_bytes)
                return "it is smaller than its requested size";
        if (!memchr(b->tag, '\0', sizeof(b->tag)))
                return "its tag is not terminated";
        return block_owner_fault(o, b, index);
}

/* Whether extents of its quota that are not being released back all of the block. Those in the place of a
 * parked block are to leave; no other block may have a part of them. *at: the first of
 * o->extents that can; blocks come in the same order. */
static bool is_backed(struct opening *o, const struct ledger_block *b, size_t *at)
{
        const struct table *t = table_of(o, TABLE_EXTENT);
        uint64_t up_to = b->offset, end = b->offset + b->n_bytes;
        bool is_parked = ledger_block_is_parked(b);

        for (; *at < o->n_extents; (*at)++) {
                const struct ledger_extent *e = record(t, o->extents[*at].index);

                if (e->quota > b->quota || (e->quota == b->quota && e->offset + e->n_bytes > b->offset))
                        break;
        }
        for (size_t i = *at; i < o->n_extents && up_to < end; i++) {
                const struct ledger_extent *e = record(t, o->extents[i].index);

                if (e->quota != b->quota || e->offset > (is_parked ? end - 1 : up_to) ||
                    (e->is_leaving && !is_parked))
                        break;
                up_to = e->offset + e->n_bytes;
                if (is_parked && (e->offset < b->offset || up_to > end))
                        return false;
        }
        return is_parked || up_to >= end;
}

/* The session's own block with this id; NULL: it is gone. */
static struct ledger_block *find_own_block(struct opening *o, uint32_t session, uint64_t id)
{
        const struct table *t = table_of(o, TABLE_BLOCK);
        uint32_t index = (uint32_t)id;
        struct ledger_block *b;

        if (id == 0 || index >= t->n_touched || record_id(t, index) != id)
                return NULL;
        b = record(t, index);
        return b->session == session && b->shared == LEDGER_NONE ? b : NULL;
}

/* A kill may have left the last split of each session half done. */
static void finish_splits(struct opening *o)
{
        const struct table *t = table_of(o, TABLE_SESSION);

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const struct ledger_session *s = record(t, i);
                struct ledger_block *low = find_own_block(o, i, s->split_id);
                const struct ledger_block *high = find_own_block(o, i, s->split_off_id);

                if (!low || !high || low->quota != high->quota || high->offset <= low->offset)
                        continue;
                if (high->offset - low->offset < low->n_requested)
                        uncommit(table_of(o, TABLE_BLOCK), (uint32_t)s->split_off_id);
                else if (high->offset - low->offset == low->n_requested)
                        low->n_bytes = low->n_requested;
        }
}

/* ---- shared blocks -------------------------------------------------------------------- */

/* Also its block, if that names it: without a name or a reference no session could free it. Other blocks
 * that name it are rejected when they are checked. */
void opening_reject_shared(struct opening *o, uint32_t index, const char *why)
{
        uint32_t block = opening_block_of_shared(o, index);

        if (block != LEDGER_NONE)
                opening_reject_block(o, block, "its shared record is bad");
        clear_bad(o, TABLE_SHARED, index, LEDGER_NONE, why);
}

static void reject_shared(struct opening *o, int kind, uint32_t index, const char *why)
{
        (void)kind;
        opening_reject_shared(o, index, why);
}

/* Checked before blocks are. */
static const char *shared_fault(struct opening *o, uint32_t index)
{
        const struct ledger_shared *s = record(table_of(o, TABLE_SHARED), index);

        if (!is_name(s->name))
                return "it has no name";
        if (s->metadata != LEDGER_NONE && (!is_used(o, TABLE_METADATA, s->metadata) ||
                                           ledger_metadata_at(o->l, s->metadata)->shared != index))
                return "its metadata is not in use, or belongs to another block";
        return s->block < table_of(o, TABLE_BLOCK)->n_touched ? NULL : "its block was never used";
}

static void reject_ref(struct opening *o, int kind, uint32_t index, const char *why)
{
        const struct ledger_ref *h = record(table_of(o, kind), index);

        reject(o, kind, index, opening_quota_of_shared(o, h->shared), h->session, why);
}

static const char *ref_fault(struct opening *o, uint32_t index)
{
        const struct ledger_ref *h = record(table_of(o, TABLE_REF), index);

        if (h->shared >= table_of(o, TABLE_SHARED)->n_touched)
                return "its shared block was never used";
        if (!is_used(o, TABLE_SHARED, h->shared))
                return UNUSED; /* its block was never published, or was freed */
        if (!is_used(o, TABLE_SESSION, h->session))
                return "its session is not in use";
        if (h->count == 0)
                return "its count is 0";
        return is_tenants(o, h->session, opening_quota_of_shared(o, h->shared))
                       ? NULL
                       : "its session and its block belong to different tenants";
}

/* A shared record that names bad metadata is bad itself. */
static const char *metadata_fault(struct opening *o, uint32_t index)
{
        const struct ledger_metadata *m = record(table_of(o, TABLE_METADATA), index);

        return m->n_bytes > 0 && m->n_bytes <= sizeof(m->bytes) ? NULL : "its size is invalid";
}

/* ---- every table ------------------------------------------------------------------------ */

/* What the schema does not say of a table. */
static const struct {
        const char *(*fault)(struct opening *o, uint32_t index); /* NULL, UNUSED, or what is wrong */
        void (*reject)(struct opening *o, int kind, uint32_t index, const char *why);
} CHECKS[N_TABLES] = {
        [TABLE_QUOTA] = { quota_fault, reject_quota },       [TABLE_REGION] = { region_fault, reject_region },
        [TABLE_SESSION] = { session_fault, reject_alone },   [TABLE_EXTENT] = { extent_fault, reject_extent },
        [TABLE_EXPORT] = { export_fault, reject_export },    [TABLE_SHARED] = { shared_fault, reject_shared },
        [TABLE_BLOCK] = { block_fault, reject_block },       [TABLE_REF] = { ref_fault, reject_ref },
        [TABLE_METADATA] = { metadata_fault, reject_alone }, [TABLE_LEASE] = { lease_fault, reject_lease },
};

static const char *record_fault(struct opening *o, int kind, uint32_t index)
{
        const struct kind *k = &LEDGER_KINDS[kind];
        const struct table *t = table_of(o, kind);
        const char *why = ledger_id_fault(t, index);
        uint64_t offset, n_bytes;

        for (size_t i = 0; !why && i < MAX_OWNERS; i++)
                if (k->refs[i].index.n_bytes > 0 &&
                    !is_used(o, k->refs[i].table, (uint32_t)field_of(record(t, index), k->refs[i].index)))
                        why = LEDGER_KINDS[k->refs[i].table].unused;
        offset = field_of(record(t, index), k->offset);
        n_bytes = field_of(record(t, index), k->n_bytes);
        if (!why && k->n_bytes.n_bytes > 0 &&
            (n_bytes == 0 || __builtin_add_overflow(offset, n_bytes, &offset)))
                why = "its address or size is invalid";
        return why ? why : CHECKS[kind].fault(o, index);
}

/* Rejects all records whose values another one has too. */
static int reject_twins(struct opening *o, int kind, const struct unique *u)
{
        struct ledger_key *keys;
        size_t n;
        int r = sort_table(o, kind, u->a, u->b, &keys, &n);

        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                bool same = i > 0 && keys[i].a == keys[i - 1].a && keys[i].b == keys[i - 1].b;

                same = same || (i + 1 < n && keys[i].a == keys[i + 1].a && keys[i].b == keys[i + 1].b);
                if (same && (u->b.n_bytes > 0 || keys[i].a != 0))
                        CHECKS[kind].reject(o, kind, keys[i].index, u->why);
        }
        free(keys);
        return 0;
}

/* Rejects records that overlap another one of their quota, and blocks without memory. The extents that
 * stay are left in o->extents. */
static int place_table(struct opening *o, int kind)
{
        const struct kind *k = &LEDGER_KINDS[kind];
        const struct table *t = table_of(o, kind);
        size_t n, n_sound = 0, at = 0;
        struct ledger_key *keys;
        int r = sort_table(o, kind, k->refs[0].index, k->offset, &keys, &n);

        if (r < 0)
                return r;
        for (size_t i = 0; i < n; i++) {
                const struct ledger_key *before = n_sound > 0 ? &keys[n_sound - 1] : NULL;

                if (before && before->a == keys[i].a &&
                    keys[i].b - before->b < field_of(record(t, before->index), k->n_bytes)) {
                        CHECKS[kind].reject(o, kind, keys[i].index, "it overlaps another one");
                        continue;
                }
                if (kind == TABLE_BLOCK && !is_backed(o, record(t, keys[i].index), &at))
                        reject_block(o, kind, keys[i].index, "it is not completely inside extents");
                keys[n_sound++] = keys[i];
        }
        if (kind != TABLE_EXTENT) {
                free(keys);
                return 0;
        }
        o->extents = keys;
        o->n_extents = n_sound;
        return 0;
}

static int open_table(struct opening *o, int kind)
{
        const struct kind *k = &LEDGER_KINDS[kind];
        const struct table *t = table_of(o, kind);
        int r = 0;

        for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1)) {
                const char *why = record_fault(o, kind, i);

                if (why == UNUSED)
                        uncommit(t, i);
                else if (why)
                        CHECKS[kind].reject(o, kind, i, why);
        }
        for (size_t i = 0; r == 0 && i < MAX_UNIQUE && k->unique[i].why; i++)
                r = reject_twins(o, kind, &k->unique[i]);
        return r == 0 && k->n_bytes.n_bytes > 0 ? place_table(o, kind) : r;
}

/* ---- counts, lists, and handles of the process ------------------------------------------ */

static void count_table(struct table *t)
{
        for (uint32_t i = t->n_touched; i-- > 0;) {
                if (in_use(t, i))
                        t->n_used++;
                else if (table_is_retired(t, i))
                        t->n_retired++;
                else
                        table_chain(t, i);
        }
}

static void clear_unused_secrets(const struct table *sessions)
{
        for (uint32_t i = 0; i < sessions->n_touched; i++)
                if (!in_use(sessions, i)) /* the previous daemon was killed before it did this */
                        explicit_bzero(((struct ledger_session *)record(sessions, i))->secret,
                                       sizeof(((struct ledger_session *)0)->secret));
}

/* What only the previous process knew. */
static void forget_process(struct ledger *l)
{
        const struct table *extents = &l->tables[TABLE_EXTENT], *blocks = &l->tables[TABLE_BLOCK],
                           *refs = &l->tables[TABLE_REF];

        for (uint32_t i = table_next(extents, 0); i != LEDGER_NONE; i = table_next(extents, i + 1))
                ((struct ledger_extent *)record(extents, i))->fd = -1;
        for (uint32_t i = table_next(blocks, 0); i != LEDGER_NONE; i = table_next(blocks, i + 1)) {
                struct ledger_block *b = record(blocks, i);

                b->handle = 0;
                b->links.in_delivery = 0;
        }
        for (uint32_t i = table_next(refs, 0); i != LEDGER_NONE; i = table_next(refs, i + 1))
                ((struct ledger_ref *)record(refs, i))->links.n_in_delivery = 0;
}

static void link_all(struct ledger *l)
{
        for (int kind = 0; kind < N_TABLES; kind++)
                for (uint32_t i = table_next(&l->tables[kind], 0); i != LEDGER_NONE;
                     i = table_next(&l->tables[kind], i + 1))
                        ledger_lists_clear(l, kind, i);
        for (int list = 0; list < N_LISTS; list++) {
                const struct table *t = &l->tables[LEDGER_LISTS[list].member];

                for (uint32_t i = table_next(t, 0); i != LEDGER_NONE; i = table_next(t, i + 1))
                        if (*record_word(t, i, LEDGER_LISTS[list].owner_index) != LEDGER_NONE)
                                ledger_list_add(l, list, i);
        }
}

/* ---- the header -------------------------------------------------------------------------- */

static int open_header(struct opening *o)
{
        struct ledger *l = o->l;
        const char *why = NULL;
        char layout[128];
        struct stat st;
        int seals = fcntl(l->fd, F_GET_SEALS), r;

        if (fstat(l->fd, &st) < 0)
                return -errno;
        /* Without the seals another process could truncate the file later. */
        if (!S_ISREG(st.st_mode) || seals < 0 || (seals & SEALS_NEEDED) != SEALS_NEEDED ||
            (uint64_t)st.st_size < sizeof(struct header))
                why = "it is not a sealed memfd";
        if (!why) {
                l->n_bytes = (size_t)st.st_size;
                r = ledger_map(l);
                if (r < 0)
                        return r;
                if (l->header->magic != LEDGER_MAGIC)
                        why = "it is not a ledger";
                else if (l->header->layout == LEDGER_LAYOUT)
                        why = ledger_header_fault(l);
                else
                        why = layout;
        }
        if (why == layout)
                snprintf(layout, sizeof(layout),
                         "another release of bfcd wrote it, with layout %u, and "
                         "this release reads layout %u",
                         l->header->layout, LEDGER_LAYOUT);
        if (!why)
                return 0;
        tell(o, "header", 0, 0, LEDGER_NONE, why);
        return -EBADMSG;
}

static int open_tables(struct opening *o)
{
        static const int ORDER[N_TABLES] = { TABLE_QUOTA,  TABLE_LEASE,  TABLE_REGION,   TABLE_SESSION,
                                             TABLE_EXTENT, TABLE_EXPORT, TABLE_METADATA, TABLE_SHARED,
                                             TABLE_BLOCK,  TABLE_REF };
        struct ledger *l = o->l;
        int r = 0;

        ledger_find_tables(l);
        for (size_t i = 0; i < N_TABLES; i++)
                l->tables[i].n_touched = l->header->tables[i].n_touched;
        o->is_bad_extent = calloc((size_t)l->tables[TABLE_EXTENT].n_touched + 1, sizeof(bool));
        if (!o->is_bad_extent)
                return -ENOMEM;
        for (size_t i = 0; r == 0 && i < N_TABLES; i++) {
                if (ORDER[i] == TABLE_BLOCK)
                        finish_splits(o);
                if (ORDER[i] == TABLE_REF)
                        r = opening_finish_shared(o);
                if (r == 0)
                        r = open_table(o, ORDER[i]);
        }
        if (r == 0)
                r = opening_check_shared(o);
        if (r < 0)
                return r;
        for (size_t i = 0; i < N_TABLES; i++)
                count_table(&l->tables[i]);
        clear_unused_secrets(&l->tables[TABLE_SESSION]);
        forget_process(l);
        link_all(l);
        return 0;
}

int ledger_open(int fd, void (*on_fault)(void *userdata, const struct ledger_fault *fault), void *userdata,
                struct ledger **ret)
{
        struct opening o = { .on_fault = on_fault, .userdata = userdata };
        int r;

        o.l = calloc(1, sizeof(*o.l));
        if (!o.l)
                return -ENOMEM;
        o.l->fd = fd;
        r = open_header(&o);
        if (r == 0)
                r = open_tables(&o);
        free(o.extents);
        free(o.is_bad_extent);
        if (r < 0) {
                o.l->fd = -1;
                ledger_free(o.l);
                return r;
        }
        *ret = o.l;
        return o.n_faults > 0 ? LEDGER_HAS_FAULTS : 0;
}
