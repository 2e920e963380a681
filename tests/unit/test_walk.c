/* A random walk over all that sessions can do, beside a model that is too simple
 * to be wrong: which session has which block, how large, under which name, with which references.
 *
 * Reproducible: one seed decides everything, the clock's hands included. It is
 * printed, with the step, when something does not hold. BFC_TEST_SEED and
 * BFC_TEST_STEPS choose others. To add an operation, write it and give it a row
 * in the table `operations`; what its reply must be goes into answered() of walk_model.c.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/memory/queue.h"
#include "daemon/session/lease.h"
#include "daemon/session/reload.h"
#include "daemon/session/hello.h"
#include "daemon/session/recall.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"
#define SUITE_TIMEOUT 3600.0
#include "tests/suite.h"
#include "tests/unit/walk_model.h"

#define CHECK_EVERY 256u

/* Limits that a reload changes: of a in p, of b and its reserve, blocks of a, sessions of a in q. */
static const char config_words[] =
        "timeouts: {reclaim: 40ms, quarantine: 1s}\n"
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

int __wrap_clock_gettime(clockid_t clock, struct timespec *ret);
int __wrap_clock_gettime(clockid_t clock, struct timespec *ret)
{
        (void)clock;
        ret->tv_sec = (time_t)(walk_now_ns / 1000000000u);
        ret->tv_nsec = (long)(walk_now_ns % 1000000000u);
        return 0;
}

static void write_config(unsigned a_mib, unsigned a_blocks, unsigned q_sessions, unsigned b_mib,
                         unsigned reserve_mib)
{
        snprintf(config_text, sizeof(config_text), config_words, a_mib, a_blocks, q_sessions, b_mib,
                 reserve_mib);
}

static void limits_are(unsigned a_mib, unsigned b_mib)
{
        w.limits[0][0] = a_mib * MIB;
        w.limits[0][1] = 12 * MIB;
        w.limits[1][0] = b_mib * MIB;
        w.limits[2][0] = 16 * MIB;
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
        const char *group;

        if (s->peer)
                return;
        s->peer = peer_new(w.b, (uid_t)(1 + dice(5)), false);
        group = walk_some_group();
        s->peer->session->who.cgroup = group ? strdup(group) : NULL;
        s->peer->auto_ack = dice(4) > 0;
        s->peer->wants_events = dice(8) > 0;
        s->peer->wants_pages = s->peer->wants_events && dice(2) == 0;
        s->n_pending = 0;
        s->n_missed = 0;
        session_set_watched(s->peer->session, dice(4) > 0);
        memset(s->direct, 0, sizeof(s->direct));
        memset(s->asked, 0, sizeof(s->asked));
}

static void op_hello(struct slot *s)
{
        static const char *const tenants[] = { "", "", "", "a", "b", "nobody" };
        static const char *const partitions[] = { "", "", "p", "q", "nowhere" };

        if (!s->peer || s->peer->session->state != SESSION_NEW)
                return;
        if (s->peer->session->hello.n < SESSION_MAX_HELLOS)
                (void)peer_hello(s->peer, tenants[dice(6)], partitions[dice(5)]);
        else
                (void)session_hang_up(s->peer->session, NULL); /* or it would never leave */
        if (s->peer->session->state == SESSION_LIVE)
                walk_joined(s->peer->session);
}

static void op_malloc(struct slot *s)
{
        static const char *const tags[] = { NULL, NULL, "", "weights" };
        uint64_t n_bytes = 1 + dice(UINT64_C(256) << dice(17));
        struct pending *q;

        if (!can_ask(s) || w.n_blocks > N_BLOCKS - N_SLOTS * N_PENDING)
                return;
        q = expect(s, MALLOC, -1);
        q->share = (uint32_t)dice(s->peer->session->n_shares);
        q->n_bytes = n_bytes;
        if (dice(4) == 0) {
                if (n_bytes > EXTENT_MIN_BYTES) /* an exact block: extents of these limits have no more */
                        q->n_bytes = (n_bytes + EXTENT_MIN_BYTES - 1) / EXTENT_MIN_BYTES * EXTENT_MIN_BYTES;
                (void)peer_malloc_flags(s->peer, q->share, n_bytes,
                                        BFCD__MALLOC_FLAG__MALLOC_FLAG_ONE_EXTENT);
        } else if (dice(4) == 0 && tags[dice(4)])
                (void)peer_malloc_tag(s->peer, q->share, n_bytes, "tag");
        else if (dice(3) == 0)
                (void)peer_malloc_wait(s->peer, q->share, n_bytes, (uint32_t)dice(2000));
        else
                (void)peer_malloc(s->peer, q->share, n_bytes);
}

/* Why its first quota gives it nothing at all: a lease that has ended, where it had no block yet, or none could be
 * chosen. */
static int error_of_first(const struct session *s)
{
        const struct quota *q = s->shares[0].quota;

        if (s->shares[0].is_barred)
                return EACCES;
        return q->lease && lease_model_of(q->lease)->is_ended && !s->shares[0].joined ? ENOENT : EDQUOT;
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
                q = expect(s, MALLOC, error_of_first(s->peer->session));
                (void)peer_malloc(s->peer, 0, 33 * MIB + dice(UINT64_C(1) << 62));
                break;
        }
        (void)q;
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

static void op_charge(struct slot *s)
{
        struct pending *q;

        if (!can_ask(s))
                return;
        q = expect(s, CHARGE, -1);
        q->share = (uint32_t)dice(s->peer->session->n_shares);
        q->n_bytes = 1 + dice(UINT64_C(256) << dice(16));
        (void)peer_charge(s->peer, q->share, q->n_bytes, dice(3) ? 0 : (uint32_t)dice(2000));
}

static bool is_charging(const struct slot *s)
{
        for (size_t i = 0; i < s->n_pending; i++)
                if (s->pending[i].what == CHARGE)
                        return true;
        return false;
}

/* Some of it, all of it, or more. */
static void op_uncharge(struct slot *s)
{
        struct pending *q;
        uint32_t share;
        bool is_wrong;

        if (!can_ask(s))
                return;
        share = (uint32_t)dice(s->peer->session->n_shares);
        is_wrong = dice(8) == 0 && !is_charging(s);
        if (!is_wrong && s->direct[share] == 0)
                return;
        q = expect(s, UNCHARGE, is_wrong ? EINVAL : 0);
        q->share = share;
        q->n_bytes = is_wrong      ? s->direct[share] + 1 + dice(UINT64_C(1) << dice(62))
                     : dice(2) > 0 ? s->direct[share]
                                   : 1 + dice(s->direct[share]);
        (void)peer_uncharge(s->peer, share, q->n_bytes);
}

static void op_charge_wrong(struct slot *s)
{
        if (!can_ask(s))
                return;
        if (dice(2)) {
                (void)expect(s, CHARGE, EINVAL);
                (void)peer_charge(s->peer, 0, 0, 0);
        } else {
                (void)expect(s, CHARGE, error_of_first(s->peer->session));
                (void)peer_charge(s->peer, 0, 33 * MIB + dice(UINT64_C(1) << 62), (uint32_t)dice(2000));
        }
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
        (void)peer_publish(s->peer, block->id, walk_names[name]);
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
        (void)peer_attach(s->peer, walk_names[q->name], wait_ms);
}

static void op_ack(struct slot *s)
{
        if (!is_live(s) || s->peer->to_ack <= s->peer->session->delivery.acked_sequence)
                return;
        HOLDS(peer_ack(s->peer, s->peer->to_ack) == 0, "ack");
}

static void send_list(struct peer *p, uint64_t cursor)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &list);

        list.kind = (Bfcd__List__Kind)dice(7);
        list.cursor = cursor;
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
        Bfcd__Usage usage = BFCD__USAGE__INIT;
        Bfcd__Request r = REQUEST(USAGE, usage, &usage);
        struct pending *q;

        if (!can_ask(s))
                return;
        q = expect(s, USAGE, 0);
        q->share = usage.partition = (uint32_t)dice(N_SHARES + 1);
        q->error = q->share < s->peer->session->n_shares ? 0 : ENOENT;
        HOLDS(peer_send(s->peer, &r, NULL) == 0, "usage");
}

static bool has_quota_in(const struct session *s, const char *partition)
{
        for (size_t i = 0; i < s->n_shares; i++)
                if (!partition[0] || strcmp(s->shares[i].quota->partition->name, partition) == 0)
                        return true;
        return false;
}

static void op_explain(struct slot *s)
{
        static const char *const partitions[] = { "", "p", "q", "nowhere" };
        Bfcd__Explain explain = BFCD__EXPLAIN__INIT;
        Bfcd__Request r = REQUEST(EXPLAIN, explain, &explain);
        const char *partition = partitions[dice(4)];

        if (!can_ask(s))
                return;
        (void)expect(s, EXPLAIN, has_quota_in(s->peer->session, partition) ? 0 : ENOENT);
        explain.partition = (char *)(uintptr_t)partition;
        explain.cursor = dice(4) ? dice(2) << 32 | dice(4) : random_next(&w.random);
        HOLDS(peer_send(s->peer, &r, NULL) == 0, "explain");
}

/* ---- operators --------------------------------------------------------------- */

static void admin_come_in(void)
{
        w.admin = peer_new(w.b, 0, true);
        (void)peer_hello(w.admin, "", "");
        w.order_id = 0; /* the last one is not answered */
}

static void op_admin(struct slot *s)
{
        Bfcd__ResetPeaks reset = BFCD__RESET_PEAKS__INIT;
        Bfcd__Request r = REQUEST(RESET_PEAKS, reset_peaks, &reset);

        (void)s;
        switch (dice(8)) {
        case 0:
                HOLDS(peer_send(w.admin, &r, NULL) == 0, "reset_peaks");
                break;
        case 1:
                peer_free(w.admin);
                admin_come_in();
                break;
        default:
                send_list(w.admin, 0);
        }
}

/* One is asked at a time, and hears of it later. */
static void op_trim_now(struct slot *s)
{
        static const char *const tenants[] = { "", "", "a", "b", "c", "nobody" };
        static const char *const partitions[] = { "", "", "p", "q", "nowhere" };
        Bfcd__TrimNow trim = BFCD__TRIM_NOW__INIT;
        Bfcd__Request r = REQUEST(TRIM_NOW, trim_now, &trim);
        const char *tenant = tenants[dice(6)], *partition = partitions[dice(5)];
        bool exists = strcmp(tenant, "nobody") != 0 && strcmp(partition, "nowhere") != 0 &&
                      !(strcmp(tenant, "b") == 0 && strcmp(partition, "q") == 0) &&
                      !(strcmp(tenant, "c") == 0 && strcmp(partition, "p") == 0);
        uint64_t id;

        (void)s;
        trim.tenant = (char *)(uintptr_t)tenant;
        trim.partition = (char *)(uintptr_t)partition;
        trim.n_bytes = dice(2) ? 0 : random_next(&w.random) >> dice(64);
        HOLDS(peer_send(w.admin, &r, &id) == 0, "trim");
        if (w.order_id || !exists) {
                HOLDS(peer_error(w.admin, id) == (w.order_id ? EBUSY : ENOENT), "%d",
                      peer_error(w.admin, id));
                return;
        }
        w.order_id = id;
        w.order_ms = now_ms();
}

/* Its connection ends, later: the walk hangs up or exits for it. */
static void op_evict(struct slot *s)
{
        Bfcd__Evict evict = BFCD__EVICT__INIT;
        Bfcd__Request r = REQUEST(EVICT, evict, &evict);
        bool is_there = s->peer && s->peer->session->state == SESSION_LIVE;
        uint64_t id;

        if (is_there && dice(16) > 0)
                return;
        evict.session_id = s->peer ? s->peer->session->id : random_next(&w.random);
        HOLDS(peer_send(w.admin, &r, &id) == 0, "evict");
        HOLDS(peer_error(w.admin, id) == (is_there ? 0 : ENOENT), "%d", peer_error(w.admin, id));
        HOLDS(!is_there || s->peer->aborted, "it was evicted and goes on");
        w.n_evicted += is_there;
}

/* ---- events ------------------------------------------------------------------ */

static void op_retired(struct slot *s)
{
        if (!is_live(s) || s->peer->n_retires == 0)
                return;
        HOLDS(peer_answer(s->peer, s->peer->retires[dice(s->peer->n_retires)].sequence) == 0, "retired");
        w.n_retired++;
}

/* A violation ends the connection, as the connection would. */
static void is_caught(struct slot *s, int r)
{
        HOLDS(r == -EPROTO, "a lie was believed");
        collect();
        s->n_pending = 0;
        (void)session_hang_up(s->peer->session, NULL);
        w.n_lies++;
}

static void op_violate(struct slot *s)
{
        uint64_t n = 1 + dice(9);

        if (!is_live(s) || dice(128) > 0)
                return;
        switch (dice(3)) {
        case 0:
                is_caught(s, peer_answer(s->peer, s->peer->event_sequence + n));
                break;
        case 1:
                is_caught(s, peer_answer(s->peer, 0));
                break;
        default:
                is_caught(s, peer_ack(s->peer, s->peer->session->delivery.sequence + n));
        }
}

/* Frees what it has in the ranges, as far as it can ask for it. */
static void oblige(struct slot *s, const struct peer_trim *t)
{
        for (size_t i = w.n_blocks; i-- > 0;) {
                const struct block *block = &w.blocks[i];
                bool is_asked_for = false;

                for (size_t k = 0; k < t->n_ranges; k++)
                        is_asked_for = is_asked_for || lies_in(block, t->ranges[k].region_id,
                                                               t->ranges[k].offset, t->ranges[k].n_bytes);
                if (!is_asked_for || !can_ask(s) || block->owner != (int)slot_index(s) ||
                    is_being_freed(s, block->id))
                        continue;
                expect(s, FREE, 0)->block_id = block->id;
                (void)peer_free_block(s->peer, block->id);
        }
}

/* It frees and answers, only answers, late, or never. */
static void op_trimmed(struct slot *s)
{
        struct peer_trim t;

        if (!is_live(s) || s->peer->n_trims == 0 || dice(4) == 0)
                return;
        t = s->peer->trims[dice(s->peer->n_trims)];
        if (dice(2) == 0)
                oblige(s, &t);
        HOLDS(peer_answer(s->peer, t.sequence) == 0, "an answer to a Trim");
        w.n_answers++;
        if (dice(64) == 0) /* twice */
                is_caught(s, peer_answer(s->peer, t.sequence));
}

/* Its page says what it could park, and whether its program has a function. */
static void op_show_idle(struct slot *s)
{
        if (is_live(s) && s->peer->page_fds[1] >= 0)
                peer_show_idle(s->peer, (uint32_t)dice(N_SHARES), random_next(&w.random) >> dice(64),
                               now_ms() - dice(1000), dice(4) > 0);
}

/* As a Trim: here some of its blocks in the partition are what its program can spare. */
static void op_relieved(struct slot *s)
{
        struct peer_pressure p;
        uint64_t n_bytes = 0;
        bool lies = dice(2) == 0;

        if (!is_live(s) || s->peer->n_pressures == 0 || dice(4) == 0)
                return;
        p = s->peer->pressures[dice(s->peer->n_pressures)];
        for (size_t i = w.n_blocks; !lies && i-- > 0 && n_bytes < p.n_bytes;) {
                const struct block *block = &w.blocks[i];

                if (!can_ask(s) || block->owner != (int)slot_index(s) || block->share != p.partition ||
                    is_being_freed(s, block->id))
                        continue;
                n_bytes += block->n_bytes;
                expect(s, FREE, 0)->block_id = block->id;
                (void)peer_free_block(s->peer, block->id);
        }
        HOLDS(peer_answer(s->peer, p.sequence) == 0, "an answer to a Pressure");
        w.n_relieved++;
        if (dice(64) == 0) /* twice */
                is_caught(s, peer_answer(s->peer, p.sequence));
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
                (void)session_hang_up(s->peer->session, NULL);
        }
}

static void op_exit(struct slot *s)
{
        if (!s->peer || dice(2) > 0)
                return;
        if (s->peer->session->state == SESSION_QUARANTINED || s->peer->aborted ||
            session_waits_for_exit(s->peer->session)) {
                if (s->peer->session->goodbye.id == 0) /* it is answered nevertheless */
                        s->n_pending = 0;
                peer_exit(s->peer);
        }
}

/* A slice of what is left of a session; in the end nothing is. */
static void op_reap(struct slot *s)
{
        int r;

        if (!s->peer || !session_is_closing(s->peer->session))
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
        walk_now_ns += dice(UINT64_C(60000000));
        broker_tick(w.b);
        recall_tick(w.b, clock_ms());
        shared_tick(w.b, clock_ms());
        lease_tick(w.b, clock_ms());
        time_passed();
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
        bool dry = dice(8) == 0, is_usual = dice(4) == 0;
        unsigned a_mib = is_usual ? 32 : 2 + 2 * (unsigned)dice(16);
        unsigned b_mib = is_usual ? 24 : 8 + 2 * (unsigned)dice(9);

        (void)s;
        if (is_usual)
                write_config(a_mib, 200, 2, b_mib, 8);
        else
                write_config(a_mib, 1 + (unsigned)dice(200), 1 + (unsigned)dice(4), b_mib,
                             2 * (unsigned)dice(5));
        if (config_parse("next.yaml", config_text, strlen(config_text), &machine, words, &next) == 0) {
                if (reload_config(w.b, next, dry, words, words) < 0 || dry)
                        config_free(next);
                else
                        limits_are(a_mib, b_mib);
        }
        fclose(words);
        w.n_reloads++;
}

static void count_growths(void)
{
        const struct running_growth *growth;
        const struct quota *q;

        for (size_t i = 0; i < w.b->n_partitions; i++)
                TAILQ_FOREACH(q, &w.b->partitions[i].quotas, lists.of_partition)
                {
                        unsigned n = 0;

                        TAILQ_FOREACH(growth, &q->growth.running, link)
                        n++;
                        w.n_growths = n > w.n_growths ? n : w.n_growths;
                }
}

static const struct {
        const char *name;
        unsigned weight;
        void (*act)(struct slot *s);
} operations[] = {
        { "connect", 40, op_connect },
        { "hello", 40, op_hello },
        { "malloc", 250, op_malloc },
        { "malloc wrongly", 8, op_malloc_wrong },
        { "free", 200, op_free },
        { "free wrongly", 12, op_free_wrong },
        { "publish", 30, op_publish },
        { "attach", 50, op_attach },
        { "charge", 30, op_charge },
        { "uncharge", 30, op_uncharge },
        { "charge wrongly", 4, op_charge_wrong },
        { "ack", 120, op_ack },
        { "list", 8, op_list },
        { "usage", 4, op_usage },
        { "explain", 4, op_explain },
        { "admin", 4, op_admin },
        { "retired", 60, op_retired },
        { "goodbye", 20, op_goodbye },
        { "hang up", 20, op_hang_up },
        { "violate", 10, op_violate },
        { "exit", 60, op_exit },
        { "reap", 120, op_reap },
        { "poll", 120, op_poll },
        { "turn", 120, op_turn },
        { "tick", 10, op_tick },
        { "settle", 2, op_settle },
        { "reload", 2, op_reload },
        { "trimmed", 80, op_trimmed },
        { "trim", 2, op_trim_now },
        { "relieved", 80, op_relieved },
        { "idle", 20, op_show_idle },
        { "evict", 10, op_evict },
        { "lease create", 12, op_lease_create },
        { "lease set", 8, op_lease_set },
        { "lease end", 3, op_lease_end },
};
#define N_OPERATIONS (sizeof(operations) / sizeof(operations[0]))

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
        walk_now_ns = UINT64_C(1000000000000);
        w.seed = w.random = number_from("BFC_TEST_SEED", 1);
        w.sticky = sticky;
        write_config(32, 200, 2, 24, 8);
        w.b = sticky ? peer_broker_sticky(config_text, &config) : peer_broker(config_text, &config);
        limits_are(32, 24);
        admin_come_in();
        for (w.step = 0; w.step < n_steps; w.step++) {
                act();
                collect();
                count_growths();
                walk_check_levels();
                if (w.step % CHECK_EVERY == 0)
                        check_all();
        }
        for (size_t i = 0; i < N_SLOTS; i++)
                w.slots[i].peer = peer_free(w.slots[i].peer);
        walk_end_leases();
        peer_free(w.admin);
        peer_broker_free(w.b, config);
        ck_assert_int_eq(suite_count_fds(), n_fds);
        printf("# seed %" PRIu64 ", %" PRIu64 " steps: %" PRIu64 " mallocs, %" PRIu64 " frees, %" PRIu64
               " published, %" PRIu64 " attached, %" PRIu64 " goodbyes, %" PRIu64 " reloads, %" PRIu64
               " refusals\n",
               w.seed, n_steps, w.n_done[MALLOC], w.n_done[FREE], w.n_done[PUBLISH], w.n_done[ATTACH],
               w.n_done[GOODBYE], w.n_reloads, w.n_refused);
        printf("# %" PRIu64 " Trims, %" PRIu64 " answered, %" PRIu64 " not in time, %" PRIu64
               " for operators; %" PRIu64 " evicted, %" PRIu64 " lies; the longest waited %" PRIu64 " ms\n",
               w.n_trims, w.n_answers, w.n_missed, w.n_orders, w.n_evicted, w.n_lies, w.longest_wait_ms);
        printf("# %" PRIu64 " leases, %" PRIu64 " gone, %" PRIu64 " ended with evictions, %" PRIu64
               " commands refused; %" PRIu64 " sessions in leases\n",
               w.n_leases, w.n_leases_gone, w.n_lease_evictions, w.n_leases_refused, w.n_joined);
        ck_assert(w.n_leases_gone > 0 && w.n_lease_evictions > 0 && w.n_leases_refused > 0 && w.n_joined > 0);
        for (int i = MALLOC; i <= GOODBYE; i++)
                ck_assert_uint_gt(w.n_done[i], 0);
        ck_assert_uint_gt(w.n_answers, 0);
        ck_assert_uint_gt(w.n_relieved, 0);
        ck_assert(sticky || w.n_growths > 1); /* rare on the other device: seldom more than one waits */
        ck_assert(!sticky || w.n_retired > 0);
        ck_assert_uint_gt(w.n_missed, 0);
        ck_assert(w.n_orders > 0 && w.n_evicted > 0 && w.n_lies > 0);
}

TEST(on_the_host)
{
        walk(false);
}

TEST(on_a_device_that_sees_who_has_an_extent)
{
        walk(true);
}
