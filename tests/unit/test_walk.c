/* A random walk over all that sessions can do, beside a model that is too simple
 * to be wrong: who has which block, how large, under which name, held by whom.
 *
 * Reproducible: one seed decides everything, the clock's hands included. It is
 * printed, with the step, when something does not hold. BFC_TEST_SEED and
 * BFC_TEST_STEPS choose others. To add an operation, write it and give it a row
 * in the table `operations`; what its reply must be goes into `answered`.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/clock.h"
#include "daemon/reload.h"
#include "tests/peer.h"
#include "tests/random.h"
#include "tests/suite.h"

#define MIB         (UINT64_C(1) << 20)
#define N_SLOTS     12u
#define N_BLOCKS    1024u /* of all, in the model */
#define N_PENDING   48u   /* of a session */
#define N_NAMES     6u
#define N_TENANTS   3u
#define CHECK_EVERY 256u

/* Limits that a reload changes: of a in p, of b and its reserve, blocks of a, sessions of a in q. */
static const char config_words[] =
        "timeouts: {reclaim: 40ms, release: 300ms, quarantine: 1s}\n"
        "max_sessions: 10\n"
        "devices:\n"
        "  - id: host\n"
        "    size: 64MiB\n"
        "    partitions:\n"
        "      - {name: p, limit: 40MiB}\n"
        "      - {name: q, limit: 16MiB}\n"
        "tenants:\n"
        "  - name: a\n"
        "    match: {uid: [1, 2]}\n"
        "    quotas:\n"
        "      - {partition: p, limit: %uMiB, max_blocks: %u}\n"
        "      - {partition: q, limit: 12MiB, max_sessions: %u}\n"
        "  - {name: b, match: {uid: 3}, quotas: [{partition: p, limit: %uMiB, reserve: %uMiB}]}\n"
        "  - {name: c, match: {uid: 4}, quotas: [{partition: q, limit: 16MiB, max_blocks: 20}]}\n";

static char config_text[sizeof(config_words) + 64];

static const char *const names[N_NAMES] = { "one", "two", "weights", "x", "y", "a name" };

struct block {
        uint64_t id, region, offset, n_bytes, n_requested;
        uint32_t quota;          /* in the ledger */
        unsigned tenant;         /* index */
        int owner;               /* a slot; -1: it is shared */
        int name;                /* where it is shared */
        uint64_t holds[N_SLOTS]; /* where it is shared */
};

enum request { NONE, MALLOC, FREE, PUBLISH, ATTACH, LIST, EXPLAIN, USAGE, GOODBYE };

struct pending {
        uint64_t id;
        enum request what;
        uint64_t n_bytes;
        uint32_t share;
        uint64_t block_id;
        int name;
        int error; /* that it must be refused with; 0: must not; -1: who knows */
};

struct slot {
        struct peer *peer; /* NULL: nobody */
        struct pending pending[N_PENDING];
        size_t n_pending;
        uint64_t stale_id; /* a block that it freed */
};

struct walk {
        uint64_t seed, random, step;
        bool sticky;
        struct broker *b;
        struct peer *admin;
        struct slot slots[N_SLOTS];
        struct block blocks[N_BLOCKS];
        size_t n_blocks;
        uint64_t n_done[16]; /* replies, by request */
        uint64_t n_refused, n_reloads;
};

static struct walk w;
static uint64_t now_ns; /* of the only clock there is */

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
        (void)clock;
        ret->tv_sec = (time_t)(now_ns / 1000000000u);
        ret->tv_nsec = (long)(now_ns % 1000000000u);
        return 0;
}

#define HOLDS(condition, ...)                                                                                \
        do {                                                                                                 \
                if (!(condition)) {                                                                          \
                        fprintf(stderr, "seed %" PRIu64 ", step %" PRIu64 ": %s: ", w.seed, w.step,          \
                                #condition);                                                                 \
                        fprintf(stderr, "" __VA_ARGS__);                                                     \
                        fputc('\n', stderr);                                                                 \
                        abort();                                                                             \
                }                                                                                            \
        } while (0)

static uint64_t dice(uint64_t n)
{
        return random_next(&w.random) % n;
}

static void write_config(unsigned a_mib, unsigned a_blocks, unsigned q_sessions, unsigned b_mib,
                         unsigned reserve_mib)
{
        snprintf(config_text, sizeof(config_text), config_words, a_mib, a_blocks, q_sessions, b_mib,
                 reserve_mib);
}

/* ---- the model ------------------------------------------------------------- */

static unsigned slot_index(const struct slot *s)
{
        return (unsigned)(s - w.slots);
}

static unsigned tenant_index(const struct session *s)
{
        return (unsigned)(s->tenant - w.b->tenants);
}

static struct block *block_by_id(uint64_t id)
{
        for (size_t i = 0; i < w.n_blocks; i++)
                if (w.blocks[i].id == id)
                        return &w.blocks[i];
        return NULL;
}

static struct block *block_by_name(unsigned tenant, int name)
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

static bool has(const struct slot *s, const struct block *block)
{
        return block->owner < 0 ? block->holds[slot_index(s)] > 0 : block->owner == (int)slot_index(s);
}

/* One that the session has, own or shared; NULL: none. */
static struct block *some_block(const struct slot *s)
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

/* All that a session had is gone. */
static void forget_blocks(unsigned slot)
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
              "'%s' is another block", names[q->name]);
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

static void collect(void)
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

/* Its reply is looked for from now on; peers number requests from 1. */
static struct pending *expect(struct slot *s, enum request what, int error)
{
        struct pending *q = &s->pending[s->n_pending++];

        *q = (struct pending){ .id = s->peer->next_id + 1, .what = what, .error = error, .name = -1 };
        return q;
}

/* ---- operations ------------------------------------------------------------ */

static bool is_live(const struct slot *s)
{
        return s->peer && s->peer->session->state == SESSION_LIVE && !s->peer->aborted;
}

static bool can_ask(const struct slot *s)
{
        return is_live(s) && s->n_pending < N_PENDING;
}

static void op_connect(struct slot *s)
{
        if (s->peer)
                return;
        s->peer = peer_new(w.b, (uid_t)(1 + dice(5)), false);
        s->peer->auto_ack = dice(4) > 0;
        s->peer->wants_events = w.sticky && dice(8) > 0;
        s->n_pending = 0;
}

static void op_hello(struct slot *s)
{
        static const char *const tenants[] = { "", "", "", "a", "b", "nobody" };
        static const char *const partitions[] = { "", "", "p", "q", "nowhere" };

        if (s->peer && s->peer->session->state == SESSION_NEW &&
            s->peer->session->n_hellos < SESSION_MAX_HELLOS)
                (void)peer_hello(s->peer, tenants[dice(6)], partitions[dice(5)]);
}

static void op_malloc(struct slot *s)
{
        static const char *const tags[] = { NULL, NULL, "", "weights" };
        uint64_t n_bytes = 1 + dice(UINT64_C(256) << dice(17));
        struct pending *q;

        if (!can_ask(s) || w.n_blocks > N_BLOCKS - N_SLOTS * N_PENDING)
                return;
        q = expect(s, MALLOC, -1);
        q->share = (uint32_t)dice(s->peer->session->tenant->n_quotas);
        q->n_bytes = n_bytes;
        if (dice(4) == 0)
                (void)peer_malloc_flags(s->peer, q->share, n_bytes,
                                        BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT);
        else if (dice(4) == 0 && tags[dice(4)])
                (void)peer_malloc_tag(s->peer, q->share, n_bytes, "tag");
        else
                (void)peer_malloc(s->peer, q->share, n_bytes);
}

static void op_malloc_wrong(struct slot *s)
{
        struct pending *q;

        if (!can_ask(s))
                return;
        switch (dice(3)) {
        case 0:
                q = expect(s, MALLOC, EINVAL);
                (void)peer_malloc(s->peer, 0, 0);
                break;
        case 1:
                q = expect(s, MALLOC, ENOENT);
                (void)peer_malloc(s->peer, 2 + (uint32_t)dice(UINT32_MAX - 2), 1);
                break;
        default:
                q = expect(s, MALLOC, EDQUOT);
                (void)peer_malloc(s->peer, 0, 33 * MIB + dice(UINT64_C(1) << 62));
                break;
        }
        (void)q;
}

static bool is_being_freed(const struct slot *s, uint64_t id)
{
        for (size_t i = 0; i < s->n_pending; i++)
                if (s->pending[i].block_id == id)
                        return true;
        return false;
}

static void op_free(struct slot *s)
{
        struct block *block = can_ask(s) ? some_block(s) : NULL;

        if (!block || is_being_freed(s, block->id))
                return;
        expect(s, FREE, 0)->block_id = block->id;
        (void)peer_free_block(s->peer, block->id);
}

static void op_free_wrong(struct slot *s)
{
        const struct block *block = w.n_blocks ? &w.blocks[dice(w.n_blocks)] : NULL;
        uint64_t id = random_next(&w.random);

        if (!can_ask(s))
                return;
        if (dice(2) == 0 && block && !has(s, block))
                id = block->id; /* another's */
        else if (dice(2) == 0 && s->stale_id && !block_by_id(s->stale_id))
                id = s->stale_id;
        (void)expect(s, FREE, EINVAL);
        (void)peer_free_block(s->peer, id);
}

static void op_publish(struct slot *s)
{
        const struct block *block = can_ask(s) ? some_block(s) : NULL;
        int name = (int)dice(N_NAMES);
        struct pending *q;

        if (!block)
                return;
        q = expect(s, PUBLISH,
                   block->owner < 0                                      ? EINVAL
                   : block_by_name(tenant_index(s->peer->session), name) ? EEXIST
                                                                         : 0);
        q->name = name;
        q->block_id = block->id;
        (void)peer_publish(s->peer, block->id, names[name]);
}

static void op_attach(struct slot *s)
{
        uint32_t wait_ms = dice(3) ? 0 : (uint32_t)dice(500);
        struct pending *q;

        if (!can_ask(s))
                return;
        q = expect(s, ATTACH, -1);
        q->name = (int)dice(N_NAMES);
        if (wait_ms == 0 && !block_by_name(tenant_index(s->peer->session), q->name))
                q->error = ENOENT;
        (void)peer_attach(s->peer, names[q->name], wait_ms);
}

static void op_ack(struct slot *s)
{
        if (!is_live(s) || s->peer->to_ack <= s->peer->session->acked_sequence)
                return;
        HOLDS(peer_ack(s->peer, s->peer->to_ack) == 0, "ack");
}

static void send_list(struct peer *p, uint64_t cursor)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__List list = BFCD__LIST__INIT;

        list.kind = (Bfcd__List__Kind)dice(7);
        list.cursor = cursor;
        r.body_case = BFCD__REQUEST__BODY_LIST;
        r.list = &list;
        HOLDS(peer_send(p, &r, NULL) == 0, "list");
}

static void op_list(struct slot *s)
{
        if (!can_ask(s))
                return;
        (void)expect(s, LIST, 0);
        send_list(s->peer, dice(2) ? 0 : random_next(&w.random) >> dice(64));
}

static void op_usage(struct slot *s)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Usage usage = BFCD__USAGE__INIT;

        if (!can_ask(s))
                return;
        (void)expect(s, USAGE, 0);
        r.body_case = BFCD__REQUEST__BODY_USAGE;
        r.usage = &usage;
        HOLDS(peer_send(s->peer, &r, NULL) == 0, "usage");
}

static void op_explain(struct slot *s)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__Explain explain = BFCD__EXPLAIN__INIT;

        if (!can_ask(s))
                return;
        (void)expect(s, EXPLAIN, -1);
        explain.partition = (char *)(uintptr_t)(dice(2) ? "p" : "");
        r.body_case = BFCD__REQUEST__BODY_EXPLAIN;
        r.explain = &explain;
        HOLDS(peer_send(s->peer, &r, NULL) == 0, "explain");
}

static void op_admin(struct slot *s)
{
        Bfcd__Request r = BFCD__REQUEST__INIT;
        Bfcd__ResetPeaks reset = BFCD__RESET_PEAKS__INIT;

        (void)s;
        if (dice(4)) {
                send_list(w.admin, 0);
                return;
        }
        r.body_case = BFCD__REQUEST__BODY_RESET_PEAKS;
        r.reset_peaks = &reset;
        HOLDS(peer_send(w.admin, &r, NULL) == 0, "reset_peaks");
}

static void op_retired(struct slot *s)
{
        if (is_live(s) && s->peer->n_retires > 0)
                HOLDS(peer_retired(s->peer, s->peer->retires[dice(s->peer->n_retires)].sequence) == 0,
                      "retired");
}

/* ---- ends ------------------------------------------------------------------ */

static void op_goodbye(struct slot *s)
{
        if (!can_ask(s) || dice(32) > 0)
                return;
        s->n_pending = 0; /* what waits gets no reply */
        (void)expect(s, GOODBYE, 0);
        (void)peer_goodbye(s->peer);
}

static void op_hang_up(struct slot *s)
{
        if (!s->peer || dice(64) > 0)
                return;
        if (s->peer->session->state == SESSION_LIVE || s->peer->session->state == SESSION_NEW) {
                s->n_pending = 0;
                (void)session_hang_up(s->peer->session);
        }
}

/* A violation ends the connection, as the connection would. */
static void op_violate(struct slot *s)
{
        if (!is_live(s) || dice(128) > 0)
                return;
        HOLDS(peer_ack(s->peer, s->peer->session->sequence + 1 + dice(9)) == -EPROTO, "a lie was believed");
        s->n_pending = 0;
        (void)session_hang_up(s->peer->session);
}

static void op_exit(struct slot *s)
{
        if (!s->peer || dice(2) > 0)
                return;
        if (s->peer->session->state == SESSION_QUARANTINED || s->peer->aborted) {
                s->n_pending = 0;
                peer_exit(s->peer);
        }
}

/* What a slice has freed of what a closing session had. */
static void forget_freed(unsigned slot)
{
        for (size_t i = w.n_blocks; i-- > 0;) {
                const struct block *block = &w.blocks[i];

                if ((block->owner == (int)slot || (block->owner < 0 && block->holds[slot] > 0)) &&
                    ledger_block_find(w.b->ledger, block->id) == LEDGER_NONE)
                        block_remove(&w.blocks[i]);
        }
}

/* A slice of what is left of a session; in the end nothing is. */
static void op_reap(struct slot *s)
{
        int r;

        if (!s->peer || s->peer->session->state != SESSION_CLOSING)
                return;
        r = session_reap(s->peer->session, 1 + (size_t)dice(6));
        forget_freed(slot_index(s));
        if (r == SESSION_MORE)
                return;
        collect(); /* the goodbye's */
        forget_blocks(slot_index(s));
        if (r == SESSION_LINGERS && dice(2))
                return;
        s->n_pending = 0;
        s->stale_id = 0;
        s->peer = peer_free(s->peer);
}

/* ---- the loop's part ------------------------------------------------------- */

static void op_poll(struct slot *s)
{
        (void)s;
        broker_poll(w.b);
}

static void op_turn(struct slot *s)
{
        (void)s;
        broker_turn(w.b);
        shared_turn(w.b);
}

static void op_tick(struct slot *s)
{
        (void)s;
        now_ns += dice(UINT64_C(60000000));
        broker_tick(w.b);
        retire_tick(w.b, clock_ms());
        shared_tick(w.b, clock_ms());
}

static void op_settle(struct slot *s)
{
        (void)s;
        peer_settle(w.b);
}

/* Limits go down as well, below what is held; or to what cannot be, and nothing changes. */
static void op_reload(struct slot *s)
{
        const struct config_machine machine = { .serves = true, .running = w.b->config };
        FILE *words = fopen("/dev/null", "we");
        struct config *next = NULL;
        bool dry = dice(8) == 0;

        (void)s;
        if (dice(4) == 0)
                write_config(32, 200, 2, 24, 8);
        else
                write_config(2 + 2 * (unsigned)dice(16), 1 + (unsigned)dice(200), 1 + (unsigned)dice(4),
                             8 + 2 * (unsigned)dice(9), 2 * (unsigned)dice(5));
        if (config_parse("next.yaml", config_text, strlen(config_text), &machine, words, &next) == 0 &&
            (reload_config(w.b, next, dry, words, words) < 0 || dry))
                config_free(next);
        fclose(words);
        w.n_reloads++;
}

static const struct {
        const char *name;
        unsigned weight;
        void (*act)(struct slot *s);
} operations[] = {
        { "connect", 40, op_connect }, { "hello", 40, op_hello },
        { "malloc", 250, op_malloc },  { "malloc wrongly", 8, op_malloc_wrong },
        { "free", 200, op_free },      { "free wrongly", 12, op_free_wrong },
        { "publish", 30, op_publish }, { "attach", 50, op_attach },
        { "ack", 120, op_ack },        { "list", 8, op_list },
        { "usage", 4, op_usage },      { "explain", 4, op_explain },
        { "admin", 4, op_admin },      { "retired", 60, op_retired },
        { "goodbye", 20, op_goodbye }, { "hang up", 20, op_hang_up },
        { "violate", 10, op_violate }, { "exit", 60, op_exit },
        { "reap", 120, op_reap },      { "poll", 120, op_poll },
        { "turn", 120, op_turn },      { "tick", 10, op_tick },
        { "settle", 2, op_settle },    { "reload", 2, op_reload },
};
#define N_OPERATIONS (sizeof(operations) / sizeof(operations[0]))

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

static void check_all(void)
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

static uint64_t number_from(const char *variable, uint64_t fallback)
{
        const char *text = getenv(variable);
        uint64_t n = text ? strtoull(text, NULL, 0) : 0;

        return n > 0 ? n : fallback;
}

static void act(void)
{
        uint64_t sum = 0, at;
        size_t i = 0;

        for (size_t k = 0; k < N_OPERATIONS; k++)
                sum += operations[k].weight;
        for (at = dice(sum); at >= operations[i].weight; i++)
                at -= operations[i].weight;
        operations[i].act(&w.slots[dice(N_SLOTS)]);
}

static void walk(bool sticky)
{
        uint64_t n_steps = number_from("BFC_TEST_STEPS", 200000) / 2;
        struct config *config;
        int n_fds = suite_count_fds();

        memset(&w, 0, sizeof(w));
        now_ns = UINT64_C(1000000000000);
        w.seed = w.random = number_from("BFC_TEST_SEED", 1);
        w.sticky = sticky;
        write_config(32, 200, 2, 24, 8);
        w.b = sticky ? peer_broker_sticky(config_text, &config) : peer_broker(config_text, &config);
        w.admin = peer_new(w.b, 0, true);
        (void)peer_hello(w.admin, "", "");
        for (w.step = 0; w.step < n_steps; w.step++) {
                act();
                collect();
                if (w.step % CHECK_EVERY == 0)
                        check_all();
        }
        for (size_t i = 0; i < N_SLOTS; i++)
                w.slots[i].peer = peer_free(w.slots[i].peer);
        peer_free(w.admin);
        peer_broker_free(w.b, config);
        ck_assert_int_eq(suite_count_fds(), n_fds);
        printf("# seed %" PRIu64 ", %" PRIu64 " steps: %" PRIu64 " mallocs, %" PRIu64 " frees, %" PRIu64
               " published, %" PRIu64 " attached, %" PRIu64 " goodbyes, %" PRIu64 " reloads, %" PRIu64
               " refusals\n",
               w.seed, n_steps, w.n_done[MALLOC], w.n_done[FREE], w.n_done[PUBLISH], w.n_done[ATTACH],
               w.n_done[GOODBYE], w.n_reloads, w.n_refused);
        for (int i = MALLOC; i <= GOODBYE; i++)
                ck_assert_uint_gt(w.n_done[i], 0);
}

START_TEST(on_a_device_that_empties_mappings)
{
        walk(false);
}
END_TEST

START_TEST(on_one_that_asks_for_them)
{
        walk(true);
}
END_TEST

int main(void)
{
        Suite *suite = suite_create("walk");
        TCase *tc = tcase_create("walk");

        tcase_set_timeout(tc, 3600);
        tcase_add_test(tc, on_a_device_that_empties_mappings);
        tcase_add_test(tc, on_one_that_asks_for_them);
        suite_add_tcase(suite, tc);
        return suite_run(suite);
}
