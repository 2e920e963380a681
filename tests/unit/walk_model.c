/* The model of the random walk; see walk_model.h.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include "tests/unit/walk_model.h"

const char *const walk_names[N_NAMES] = { "one", "two", "weights", "x", "y", "a name" };

struct walk w;

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
        return block->owner < 0 ? block->holds[slot_index(s)] > 0 : block->owner == (int)slot_index(s);
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
                if (block->holds[i] > 0)
                        return true;
        return false;
}

static bool is_held_by_the_living(const struct block *block)
{
        for (size_t i = 0; i < N_SLOTS; i++)
                if (block->holds[i] > 0 && w.slots[i].peer->session->state != SESSION_CLOSING)
                        return true;
        return false;
}

void forget_blocks(unsigned slot)
{
        for (size_t i = w.n_blocks; i-- > 0;) {
                struct block *block = &w.blocks[i];

                block->holds[slot] = 0;
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

                if ((block->owner == (int)slot || (block->owner < 0 && block->holds[slot] > 0)) &&
                    ledger_block_find(w.b->ledger, block->id) == LEDGER_NONE)
                        block_remove(&w.blocks[i]);
        }
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
        block->holds[slot_index(s)]++;
}

static void freed(struct slot *s, const struct pending *q)
{
        struct block *block = block_by_id(q->block_id);

        HOLDS(block && has(s, block), "it had no block %" PRIx64, q->block_id);
        s->stale_id = block->id;
        if (block->owner < 0 && (--block->holds[slot_index(s)] > 0 || is_held_by_the_living(block)))
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
                block->holds[slot_index(s)] = 1;
                break;
        case ATTACH:
                attached(s, q, reply);
                break;
        case LIST:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_LIST, "list");
                break;
        case EXPLAIN:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_EXPLAIN, "explain");
                break;
        case USAGE:
                HOLDS(reply->body_case == BFCD__REPLY__BODY_USAGE, "usage");
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
                if (s->peer)
                        peer_forget_replies(s->peer);
        }
        peer_forget_replies(w.admin);
}

struct pending *expect(struct slot *s, enum request what, int error)
{
        struct pending *q = &s->pending[s->n_pending++];

        *q = (struct pending){ .id = s->peer->next_id + 1, .what = what, .error = error, .name = -1 };
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
        HOLDS(session->bytes_in_use >= n_bytes && (s->n_pending > 0 || session->bytes_in_use == n_bytes),
              "slot %u has other bytes", slot_index(s));
}

void check_all(void)
{
        const char *why = "";

        HOLDS(broker_check(w.b, &why) == 0, "%s", why);
        HOLDS(retire_check(w.b, &why) == 0, "%s", why);
        for (size_t i = 0; i < N_SLOTS; i++)
                if (w.slots[i].peer)
                        check_session(&w.slots[i]);
        for (size_t i = 0; i < w.n_blocks; i++)
                HOLDS(ledger_block_find(w.b->ledger, w.blocks[i].id) != LEDGER_NONE, "a block is gone");
}
