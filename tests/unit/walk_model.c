/* The model of the random walk; see walk_model.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include "daemon/memory/broker_lease.h"
#include "tests/checks.h"
#include "daemon/session/recall.h"
#include "daemon/session/session_states.h"
#include "daemon/session/trim.h"
#include "tests/unit/walk_model.h"

#include <string.h>

const char *const walk_names[N_NAMES] = { "one", "two", "weights", "x", "y", "a name" };

struct walk w;
uint64_t walk_now_ns;

/* ---- the model ------------------------------------------------------------- */

unsigned slot_index(const struct slot *s)
{
        return (unsigned)(s - w.slots);
}

unsigned tenant_index(const struct session *s)
{
        return (unsigned)(s->tenant - w.b->tenants);
}

struct block *block_by_id(uint64_t id)
{
        for (size_t i = 0; i < w.n_blocks; i++)
                if (w.blocks[i].id == id)
                        return &w.blocks[i];
        return NULL;
}

struct block *block_by_name(unsigned tenant, int name)
{
        for (size_t i = 0; i < w.n_blocks; i++)
                if (w.blocks[i].owner < 0 && w.blocks[i].tenant == tenant && w.blocks[i].name == name)
                        return &w.blocks[i];
        return NULL;
}

static void block_remove(struct block *block)
{
        *block = w.blocks[--w.n_blocks];
}

bool has(const struct slot *s, const struct block *block)
{
        return block->owner < 0 ? block->refs[slot_index(s)] > 0 : block->owner == (int)slot_index(s);
}

struct block *some_block(const struct slot *s)
{
        size_t start = w.n_blocks ? (size_t)dice(w.n_blocks) : 0;

        for (size_t i = 0; i < w.n_blocks; i++) {
                struct block *block = &w.blocks[(start + i) % w.n_blocks];

                if (has(s, block))
                        return block;
        }
        return NULL;
}

static bool is_held(const struct block *block)
{
        for (size_t i = 0; i < N_SLOTS; i++)
                if (block->refs[i] > 0)
                        return true;
        return false;
}

static bool is_held_by_the_living(const struct block *block)
{
        for (size_t i = 0; i < N_SLOTS; i++)
                if (block->refs[i] > 0 && !session_is_closing(w.slots[i].peer->session))
                        return true;
        return false;
}

void forget_blocks(unsigned slot)
{
        for (size_t i = w.n_blocks; i-- > 0;) {
                struct block *block = &w.blocks[i];

                block->refs[slot] = 0;
                if (block->owner == (int)slot || (block->owner < 0 && !is_held(block)))
                        block_remove(block);
        }
}

static void check_apart(const struct block *x)
{
        for (size_t i = 0; i < w.n_blocks; i++) {
                const struct block *y = &w.blocks[i];

                HOLDS(x == y || x->quota != y->quota || x->region != y->region ||
                              x->offset + x->n_bytes <= y->offset || y->offset + y->n_bytes <= x->offset,
                      "blocks %" PRIx64 " and %" PRIx64 " overlap", x->id, y->id);
                HOLDS(x == y || x->id != y->id, "two blocks with one id");
        }
}

void forget_freed(unsigned slot)
{
        for (size_t i = w.n_blocks; i-- > 0;) {
                const struct block *block = &w.blocks[i];

                if ((block->owner == (int)slot || (block->owner < 0 && block->refs[slot] > 0)) &&
                    ledger_block_find(w.b->ledger, block->id) == LEDGER_NONE)
                        block_remove(&w.blocks[i]);
        }
}

bool is_being_freed(const struct slot *s, uint64_t id)
{
        for (size_t i = 0; i < s->n_pending; i++)
                if (s->pending[i].block_id == id)
                        return true;
        return false;
}

bool lies_in(const struct block *block, uint64_t region, uint64_t offset, uint64_t n_bytes)
{
        return block->region == region && block->offset < offset + n_bytes &&
               offset < block->offset + block->n_bytes;
}

/* ---- statistics ------------------------------------------------------------ */

/* What the model knows of a tenant in one of its partitions. */
struct sums {
        uint64_t n_blocks, n_bytes, n_requested;
        uint64_t n_asked;              /* blocks that are asked for */
        uint64_t n_direct, n_charging; /* direct charges, and those that are asked for */
        uint64_t n_peers;              /* its sessions */
        uint64_t n_holders;            /* those of them that have a block there */
        bool is_all;                   /* no other tenant can have memory */
};

bool keeps_direct(const struct slot *s)
{
        return s->peer->session->state == SESSION_LIVE || session_waits_for_exit(s->peer->session);
}

/* Of a tenant's quota with its leases, or of a lease. */
static void sum_up(unsigned tenant, uint32_t share, const struct quota *q, struct sums *ret)
{
        bool refs[N_SLOTS] = { false };

        *ret = (struct sums){ .is_all = true };
        for (size_t i = 0; i < w.n_blocks; i++) {
                const struct block *block = &w.blocks[i];

                if (quota_parent(q) ? block->quota != q->index
                                    : block->tenant != tenant || block->share != share)
                        continue;
                ret->n_blocks++;
                ret->n_bytes += block->n_bytes;
                ret->n_requested += block->n_requested;
                if (block->owner >= 0 && block->quota == q->index)
                        refs[block->owner] = true;
        }
        for (size_t i = 0; i < N_SLOTS; i++) {
                const struct slot *s = &w.slots[i];

                if (!s->peer || !s->peer->session->tenant || tenant_index(s->peer->session) != tenant ||
                    (quota_parent(q) && s->peer->session->shares[share].quota != q))
                        continue;
                ret->n_peers++;
                ret->n_holders += refs[i];
                ret->is_all = ret->is_all && s->peer->session->state == SESSION_LIVE;
                if (keeps_direct(s))
                        ret->n_direct += s->direct[share];
                for (size_t k = 0; k < s->n_pending; k++) {
                        ret->n_asked += s->pending[k].what == MALLOC && s->pending[k].share == share;
                        ret->n_charging += s->pending[k].what == CHARGE && s->pending[k].share == share;
                }
        }
        ret->n_asked += ret->n_charging;
        ret->is_all = ret->is_all && ret->n_asked == 0;
}

/* 0: unknown, because the lease has ended. */
static uint64_t limit_of(unsigned tenant, uint32_t share, const struct quota *q)
{
        const struct lease_model *m = q->lease ? lease_model_of(q->lease) : NULL;

        HOLDS(m || !q->lease, "lease '%s'", q->lease);
        return !m ? w.limits[tenant][share] : m->is_ended ? 0 : m->limit;
}

static void check_stats(unsigned tenant, uint32_t share, const struct quota *q, const Bfcd__Statistics *f)
{
        uint64_t limit = limit_of(tenant, share, q);
        struct sums sums;

        HOLDS(limit == 0 || f->bytes_limit == limit, "limit: %" PRIu64, f->bytes_limit);
        sum_up(tenant, share, q, &sums);
        HOLDS(f->num_blocks >= sums.n_blocks && f->bytes_in_use >= sums.n_bytes &&
                      f->bytes_requested >= sums.n_requested,
              "blocks that are there are not counted");
        HOLDS(!sums.is_all || (f->num_blocks == sums.n_blocks && f->bytes_in_use == sums.n_bytes &&
                               f->bytes_requested == sums.n_requested),
              "%" PRIu64 " blocks, %" PRIu64 " bytes instead of %" PRIu64 ", %" PRIu64, f->num_blocks,
              f->bytes_in_use, sums.n_blocks, sums.n_bytes);
        HOLDS(f->bytes_direct >= sums.n_direct && (!sums.is_all || f->bytes_direct == sums.n_direct),
              "%" PRIu64 " bytes charged directly instead of %" PRIu64, f->bytes_direct, sums.n_direct);
        HOLDS(f->num_sessions >= sums.n_holders && f->num_sessions <= sums.n_peers, "sessions");
        HOLDS(f->bytes_in_use + f->bytes_direct <= f->bytes_reserved &&
                      f->largest_free_block_bytes <= f->bytes_free,
              "sums");
        HOLDS(f->peak_bytes_in_use >= f->bytes_in_use && f->peak_bytes_reserved >= f->bytes_reserved,
              "peaks");
        HOLDS(f->lifetime_peak_bytes_in_use >= f->peak_bytes_in_use, "peaks");
}

static void answered_usage(const struct slot *s, const struct pending *q, const Bfcd__UsageReply *m)
{
        unsigned tenant = tenant_index(s->peer->session);

        check_stats(tenant, q->share, s->peer->session->shares[q->share].quota, m->stats);
}

static const struct slot *slot_of_session(uint64_t id)
{
        for (size_t i = 0; i < N_SLOTS; i++)
                if (w.slots[i].peer && w.slots[i].peer->session->id == id)
                        return &w.slots[i];
        return NULL;
}

static void check_holder(unsigned tenant, uint32_t share, const struct quota *q, const Bfcd__Holder *h)
{
        const struct slot *s = slot_of_session(h->session_id);
        uint64_t n_blocks = 0, n_bytes = 0, n_asked = 0;

        HOLDS(s && tenant_index(s->peer->session) == tenant, "a stranger is told of");
        HOLDS(strcmp(h->state, session_state_name(s->peer->session)) == 0, "it is not %s", h->state);
        for (size_t i = 0; i < w.n_blocks; i++) {
                const struct block *block = &w.blocks[i];

                if (block->owner != (int)slot_index(s) || block->quota != q->index)
                        continue;
                n_blocks++;
                n_bytes += block->n_bytes;
        }
        for (size_t i = 0; i < s->n_pending; i++)
                n_asked += s->pending[i].what == MALLOC && s->pending[i].share == share;
        HOLDS(h->num_blocks >= n_blocks && h->bytes_in_use >= n_bytes, "slot %u has more", slot_index(s));
        HOLDS(h->largest_block_bytes <= h->bytes_in_use, "slot %u", slot_index(s));
        if (s->peer->session->state == SESSION_LIVE)
                HOLDS(h->num_blocks <= n_blocks + n_asked, "slot %u has less", slot_index(s));
}

static void answered_explain(const struct slot *s, const Bfcd__ExplainReply *m)
{
        const struct session *session = s->peer->session;
        unsigned tenant = tenant_index(session);

        HOLDS(m->n_rows <= 1, "%zu rows", m->n_rows);
        for (size_t i = 0; i < m->n_rows; i++) {
                const Bfcd__ExplainRow *row = m->rows[i];
                const struct quota *q;
                uint32_t share = 0;
                struct sums sums;

                while (share < session->n_shares &&
                       strcmp(session->shares[share].quota->partition->name, row->partition) != 0)
                        share++;
                HOLDS(share < session->n_shares, "it is told of partition '%s'", row->partition);
                q = row->lease[0] ? lease_find(w.b, row->lease)->quota : w.b->tenants[tenant].quotas[share];
                sum_up(tenant, share, q, &sums);
                HOLDS(row->num_waiting <= sums.n_asked || !sums.is_all, "%" PRIu64 " wait", row->num_waiting);
                HOLDS(row->fragmentation >= 0 && row->fragmentation <= 1, "%f", row->fragmentation);
                if (!row->tenant[0])
                        continue; /* the partition in all */
                HOLDS(strcmp(row->tenant, session->tenant->name) == 0, "it is told of '%s'", row->tenant);
                check_stats(tenant, share, q, row->stats);
                HOLDS(!row->occupancy[0] || strlen(row->occupancy) == 100, "'%s'", row->occupancy);
                for (size_t k = 0; k < row->n_holders; k++)
                        check_holder(tenant, share, q, row->holders[k]);
        }
}

/* ---- Trims ----------------------------------------------------------------- */

/* Those that came since the last time; and those that were answered are none. */
static void learn_trims(struct slot *s)
{
        for (uint32_t share = 0; share < N_SHARES; share++) {
                struct asked *asked = &s->asked[share];
                const struct peer_trim *t = NULL;

                for (size_t i = 0; i < s->peer->n_trims; i++)
                        if (s->peer->trims[i].partition == share)
                                t = &s->peer->trims[i];
                if (!t) {
                        *asked = (struct asked){ 0 };
                } else if (t->sequence != asked->sequence) {
                        *asked = (struct asked){ t->sequence, now_ms(), false };
                        w.n_trims++;
                }
        }
}

static void check_trims(const struct slot *s)
{
        const struct session *session = s->peer->session;

        const struct recall_queue *trims = &session->recall.queues[RECALL_TRIM];

        HOLDS(trims->n_events == s->peer->n_trimmed && trims->n_missed == s->n_missed,
              "slot %u: %" PRIu64 " Trims of %" PRIu64 " were missed, not %" PRIu64, slot_index(s),
              trims->n_missed, trims->n_events, s->n_missed);
        for (size_t i = 0; i < session->n_shares; i++) {
                const struct recall *trim = &session->shares[i].trim.asked.recall;

                HOLDS(trim->sequence == s->asked[i].sequence, "slot %u: another Trim is open", slot_index(s));
                HOLDS(trim->sequence == 0 || recall_is_overdue(trim) == s->asked[i].is_unresponsive,
                      "slot %u: unresponsive", slot_index(s));
        }
}

/* A request whose block waits for an acknowledgement may wait for ever. */
static void check_patience(const struct slot *s)
{
        const struct session *session = s->peer->session;

        for (size_t i = 0; i < s->n_pending && TAILQ_EMPTY(&session->delivery.list); i++) {
                uint64_t waited_ms = now_ms() - s->pending[i].since_ms;

                HOLDS(waited_ms < TIMEOUT_MS, "slot %u waits", slot_index(s));
                w.longest_wait_ms = waited_ms > w.longest_wait_ms ? waited_ms : w.longest_wait_ms;
        }
}

void time_passed(void)
{
        for (size_t i = 0; i < N_SLOTS; i++) {
                struct slot *s = &w.slots[i];

                if (!s->peer || s->peer->session->state != SESSION_LIVE)
                        continue;
                for (size_t k = 0; k < N_SHARES; k++) {
                        struct asked *asked = &s->asked[k];

                        if (asked->sequence == 0 || asked->is_unresponsive ||
                            now_ms() - asked->sent_ms < RECLAIM_MS)
                                continue;
                        asked->is_unresponsive = true;
                        s->n_missed++;
                        w.n_missed++;
                }
                check_patience(s);
        }
        HOLDS(w.order_id == 0 || now_ms() - w.order_ms < TIMEOUT_MS, "an operator waits");
}

/* ---- replies --------------------------------------------------------------- */

static struct block *block_add(const struct slot *s, const Bfcd__Block *m, uint32_t share,
                               uint64_t n_requested)
{
        struct block *block = &w.blocks[w.n_blocks];

        HOLDS(w.n_blocks < N_BLOCKS, "the model is full");
        *block = (struct block){
                .id = m->block_id,
                .region = m->region_id,
                .offset = m->offset,
                .n_bytes = m->n_bytes,
                .n_requested = n_requested,
                .quota = s->peer->session->shares[share].quota->index,
                .tenant = tenant_index(s->peer->session),
                .share = share,
                .owner = (int)slot_index(s),
                .name = -1,
        };
        w.n_blocks++;
        HOLDS(m->n_bytes == (n_requested + 255) / 256 * 256 && m->offset % 256 == 0, "%" PRIu64, n_requested);
        check_apart(block);
        return block;
}

static void attached(struct slot *s, const struct pending *q, const Bfcd__Reply *reply)
{
        const Bfcd__Attached *m = reply->attached;
        struct block *block;

        HOLDS(reply->body_case == BFCD__REPLY__BODY_ATTACHED, "attach");
        block = block_by_name(tenant_index(s->peer->session), q->name);
        HOLDS(block && block->id == m->block->block_id && block->n_requested == m->n_requested &&
                      block->offset == m->block->offset,
              "'%s' is another block", walk_names[q->name]);
        block->refs[slot_index(s)]++;
}

static void freed(struct slot *s, const struct pending *q)
{
        struct block *block = block_by_id(q->block_id);

        HOLDS(block && has(s, block), "it had no block %" PRIx64, q->block_id);
        s->stale_id = block->id;
        if (block->owner < 0 && (--block->refs[slot_index(s)] > 0 || is_held_by_the_living(block)))
                return;
        if (block->owner >= 0 || ledger_block_find(w.b->ledger, block->id) == LEDGER_NONE)
                block_remove(block); /* else one that is closing has it still */
}

/* A reply that is no refusal. */
static void answered(struct slot *s, const struct pending *q, const Bfcd__Reply *reply)
{
        struct block *block;

        switch (q->what) {
        case MALLOC:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_BLOCK, "malloc");
                (void)block_add(s, reply->block, q->share, q->n_bytes);
                break;
        case FREE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_DONE, "free");
                freed(s, q);
                break;
        case PUBLISH:
                block = block_by_id(q->block_id);
                HOLDS(block && block->owner == (int)slot_index(s), "it published what it does not have");
                block->owner = -1;
                block->name = q->name;
                block->refs[slot_index(s)] = 1;
                break;
        case ATTACH:
                attached(s, q, reply);
                break;
        case LIST:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_LIST, "list");
                break;
        case EXPLAIN:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_EXPLAIN, "explain");
                answered_explain(s, reply->explain);
                break;
        case USAGE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_USAGE, "usage");
                answered_usage(s, q, reply->usage);
                break;
        case CHARGE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_DONE, "charge");
                s->direct[q->share] += q->n_bytes;
                break;
        case UNCHARGE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_DONE, "uncharge");
                s->direct[q->share] -= q->n_bytes;
                break;
        case GOODBYE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_DONE, "goodbye");
                break;
        default:
                HOLDS(false, "a reply to nothing");
        }
        w.n_done[q->what]++;
}

static void handle_reply(struct slot *s, const Bfcd__Reply *reply)
{
        bool is_refusal = reply->body_case == BFCD__REPLY__BODY_REFUSAL;
        struct pending q;
        size_t i = 0;

        if (reply->body_case == BFCD__REPLY__BODY_EXTENTS || reply->body_case == BFCD__REPLY__BODY_HELLO)
                return;
        while (i < s->n_pending && s->pending[i].id != reply->id)
                i++;
        if (reply->id == 0 && is_refusal && reply->refusal->error == EIDRM) {
                HOLDS(s->peer->session->eviction, "it was told that it was evicted");
                return;
        }
        if (i == s->n_pending) { /* of a hello */
                HOLDS(is_refusal && s->peer->session->state == SESSION_NEW, "a reply to nothing");
                return;
        }
        q = s->pending[i];
        s->pending[i] = s->pending[--s->n_pending];
        w.n_refused += is_refusal;
        HOLDS(q.error < 0 || is_refusal == (q.error > 0), "request %d: %s", (int)q.what,
              is_refusal ? reply->refusal->message : "it was not refused");
        HOLDS(q.error <= 0 || (int)reply->refusal->error == q.error, "request %d: %s", (int)q.what,
              reply->refusal->message);
        if (!is_refusal)
                answered(s, &q, reply);
}

void collect(void)
{
        for (size_t i = 0; i < N_SLOTS; i++) {
                struct slot *s = &w.slots[i];

                for (size_t k = 0; s->peer && k < s->peer->n_replies; k++)
                        handle_reply(s, s->peer->replies[k]);
                if (!s->peer)
                        continue;
                peer_forget_replies(s->peer);
                learn_trims(s);
        }
        if (w.order_id && peer_reply(w.admin, w.order_id)) {
                HOLDS(peer_error(w.admin, w.order_id) == 0, "an operator's Trim");
                w.order_id = 0;
                w.n_orders++;
        }
        peer_forget_replies(w.admin);
}

struct pending *expect(struct slot *s, enum request what, int error)
{
        struct pending *q = &s->pending[s->n_pending++];

        *q = (struct pending){
                .id = s->peer->next_id + 1, .what = what, .error = error, .name = -1, .since_ms = now_ms()
        };
        return q;
}

/* ---- checks ---------------------------------------------------------------- */

/* What the model knows of a session: no more than the ledger has, and the same where nothing
 * is on its way. */
static void check_session(const struct slot *s)
{
        const struct session *session = s->peer->session;
        uint64_t n_blocks = 0, n_bytes = 0;
        uint32_t n_ledger;

        for (size_t i = 0; keeps_direct(s) && i < session->n_shares; i++)
                HOLDS(session->shares[i].usage.direct.n_bytes >= s->direct[i] &&
                              (s->n_pending > 0 || session->shares[i].usage.direct.n_bytes == s->direct[i]),
                      "slot %u has another direct charge", slot_index(s));
        if (session->state != SESSION_LIVE)
                return;
        for (size_t i = 0; i < w.n_blocks; i++) {
                if (w.blocks[i].owner != (int)slot_index(s))
                        continue;
                n_blocks++;
                n_bytes += w.blocks[i].n_bytes;
        }
        n_ledger = ledger_session_at(w.b->ledger, session->index)->links.n_blocks;
        HOLDS(n_ledger >= n_blocks && n_ledger <= n_blocks + s->n_pending,
              "slot %u: %u blocks, %" PRIu64 " known", slot_index(s), n_ledger, n_blocks);
        HOLDS(session_bytes_in_use(session) >= n_bytes &&
                      (s->n_pending > 0 || session_bytes_in_use(session) == n_bytes),
              "slot %u has other bytes", slot_index(s));
        check_trims(s);
}

void check_all(void)
{
        const char *why = "";

        HOLDS(broker_check(w.b, &why) == 0, "%s", why);
        HOLDS(retire_check(w.b, &why) == 0, "%s", why);
        HOLDS(trim_check(w.b, &why) == 0, "%s", why);
        HOLDS(pressure_check(w.b, &why) == 0, "%s", why);
        for (size_t i = 0; i < N_SLOTS; i++)
                if (w.slots[i].peer)
                        check_session(&w.slots[i]);
        for (size_t i = 0; i < w.n_blocks; i++)
                HOLDS(ledger_block_find(w.b->ledger, w.blocks[i].id) != LEDGER_NONE, "a block is gone");
}
