/* Clients that resume at a restarted daemon with arbitrary claims: which session they are,
 * what they hold, in whatever order, twice, with what is another's. After each statement every
 * invariant holds, and at the end nothing is left.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/session/resume.h"
#include "daemon/session/hello.h"
#include "daemon/session/session_states.h"
#include "daemon/session/shared.h"
#include "proto/message.h"
#include "tests/fake_store.h"
#include "tests/peer.h"
#include "tests/checks.h"

#define N_BEFORE 3u /* sessions of the daemon before */
#define N_PEERS  4u
#define N_IDS    32u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 16MiB\n"
                                  "    partitions: [{name: p, limit: 12MiB}, {name: q, limit: 4MiB}]\n"
                                  "tenants:\n"
                                  "  - name: t\n"
                                  "    match: {uid: [0, 1]}\n"
                                  "    quotas: [{partition: p, limit: 10MiB}, {partition: q, limit: 4MiB}]\n"
                                  "  - name: u\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas: [{partition: p, limit: 8MiB}]\n";

static uint64_t ids[N_BEFORE];
static uint8_t secrets[N_BEFORE][16];

struct input {
        const uint8_t *at;
        size_t n;
};

static uint64_t take(struct input *in)
{
        if (in->n == 0)
                return 0;
        in->n--;
        return *in->at++;
}

/* What the daemon before handed out: blocks with ids 1 << 32 | 0 and on, some of them shared. */
static void live_before(struct broker *b)
{
        struct peer *peers[N_BEFORE];

        for (size_t i = 0; i < N_BEFORE; i++) {
                struct peer *p = peers[i] = peer_new(b, (uid_t)i, false);

                p->auto_ack = p->wants_return = true;
                (void)peer_hello(p, "", "");
                ids[i] = p->session->id;
                memcpy(secrets[i], p->secret, sizeof(p->secret));
                for (unsigned k = 0; k < 5; k++)
                        (void)peer_malloc(p, i < 2 ? k / 4 : 0, UINT64_C(1000) << 3 * k);
                (void)peer_charge(p, 0, 16 + i, 0);
                peer_settle(b);
        }
        for (uint32_t k = 0; k < 2; k++)
                (void)peer_publish(peers[0], UINT64_C(1) << 32 | k, k == 0 ? "a" : "b");
        (void)peer_attach(peers[1], "a", 0);
        (void)peer_attach(peers[1], "a", 0);
        for (size_t i = 0; i < N_BEFORE; i++)
                peer_drop(peers[i]);
}

static int say_hello(struct peer *p, struct input *in)
{
        uint64_t how = take(in);

        if (p->session->hello.n == SESSION_MAX_HELLOS)
                return -1;
        if (p->session->state != SESSION_NEW)
                return 0;
        p->wants_return = how & 0x80;
        p->return_id = how & 0x40 ? how : ids[how % N_BEFORE];
        memcpy(p->secret, secrets[how % N_BEFORE], sizeof(p->secret));
        p->secret[3] ^= (how & 0x30) == 0x30;
        (void)peer_hello(p, "", how & 8 ? "q" : "");
        return 0;
}

static int hold(struct peer *p, struct input *in)
{
        uint64_t extents[N_IDS], blocks[N_IDS], how = take(in);
        Bfcd__HeldShared shared[N_IDS], *pointers[N_IDS];
        Bfcd__HeldCharge charge = BFCD__HELD_CHARGE__INIT, *charges[] = { &charge, &charge };
        Bfcd__Held held = BFCD__HELD__INIT;
        Bfcd__Request r = REQUEST(HELD, held, &held);

        if (p->session->state == SESSION_NEW || session_is_closing(p->session))
                return 0;
        for (size_t i = 0; i < how % N_IDS; i++) {
                uint64_t id = take(in);

                if (id < 0x60) {
                        extents[held.n_extent_ids++] = id;
                } else if (id < 0xe0) {
                        blocks[held.n_block_ids++] = (1 + (id >> 4) % 2) << 32 | (id & 15);
                } else {
                        bfcd__held_shared__init(&shared[held.n_shared]);
                        shared[held.n_shared].block_id = UINT64_C(1) << 32 | (id & 3);
                        shared[held.n_shared].count = (uint32_t)(id >> 2) % 4;
                        pointers[held.n_shared] = &shared[held.n_shared];
                        held.n_shared++;
                }
        }
        if (how & 0x40) {
                charge.n_bytes = take(in);
                charge.partition = (uint32_t)charge.n_bytes / 64 % 3;
                held.n_charges = 1 + (how & 0x20) / 0x20;
        }
        held.charges = charges;
        held.extent_ids = extents;
        held.block_ids = blocks;
        held.shared = pointers;
        held.is_last = how & 0x80;
        return peer_send(p, &r, NULL);
}

/* Everything that is its own, as an honest client would. */
static int hold_all(struct peer *p)
{
        uint64_t extents[64], blocks[64];
        Bfcd__Held held = BFCD__HELD__INIT;
        Bfcd__Request r = REQUEST(HELD, held, &held);
        struct ledger *l = p->session->broker->ledger;
        uint32_t i;

        if (p->session->state != SESSION_LISTING)
                return 0;
        i = ledger_session_at(l, p->session->index)->links.first_export;
        for (; i != LEDGER_NONE && held.n_extent_ids < 64; i = ledger_export_at(l, i)->links.next_of_session)
                extents[held.n_extent_ids++] = ledger_extent_at(l, ledger_export_at(l, i)->extent)->id;
        i = ledger_session_at(l, p->session->index)->links.first_block;
        for (; i != LEDGER_NONE && held.n_block_ids < 64; i = ledger_block_at(l, i)->links.next_of_session)
                blocks[held.n_block_ids++] = ledger_block_at(l, i)->id;
        held.extent_ids = extents;
        held.block_ids = blocks;
        held.is_last = true;
        return peer_send(p, &r, NULL);
}

static int work(struct broker *b, struct peer *p, struct input *in)
{
        uint64_t how = take(in);

        broker_poll(b);
        broker_turn(b);
        shared_turn(b);
        if (p->session->state != SESSION_LIVE)
                return 0;
        if (how & 1)
                (void)peer_malloc(p, how & 2 ? 1 : 0, UINT64_C(1) << how % 24);
        else if (how & 2)
                (void)peer_free_block(p, (1 + how / 128) << 32 | (how >> 2 & 15));
        else
                (void)peer_publish(p, UINT64_C(1) << 32 | (how >> 2 & 15), how & 0x80 ? "a" : "c");
        return 0;
}

static int act(struct broker *b, struct peer *p, struct input *in)
{
        const char *why;

        if (p->session->state == SESSION_RESUMING) /* its connection reads nothing then */
                return resume_step(p->session, 1 + take(in) % 2, &why) < 0 ? -1 : 0;
        switch (take(in) % 6) {
        case 0:
        case 1:
                return say_hello(p, in);
        case 2:
                return hold(p, in);
        case 3:
                return hold_all(p);
        case 4:
                return work(b, p, in);
        default:
                return -1;
        }
}

/* Its connection is gone: what came back is awaited again, and no peer has it. */
static struct peer *hang_up(struct peer *p)
{
        if (p->session->state != SESSION_LISTING && p->session->state != SESSION_RESUMING)
                return peer_free(p);
        (void)session_hang_up(p->session, NULL);
        return peer_drop(p);
}

static void must(int r, const char *why)
{
        if (r >= 0)
                return;
        fprintf(stderr, "check: %s\n", why);
        abort();
}

static void check(const struct broker *b)
{
        const char *why = "";

        must(broker_check(b, &why), why);
        must(retire_check(b, &why), why);
        must(shared_check(b, &why), why);
        must(trim_check(b, &why), why);
}

/* Sessions that no client resumed. */
static void end_suspended(struct broker *b)
{
        for (size_t i = 0; i < b->sessions.n_slots; i++) {
                struct session *s = b->sessions.table[i];

                if (!s)
                        continue;
                session_close(s, "test");
                while (session_reap(s, 3) == SESSION_MORE)
                        ;
                session_end_linger(s);
                (void)session_reap(s, 1);
                session_free(s);
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        struct input in = { data, n_data };
        struct store *store = fake_store_new();
        struct config *config;
        struct broker *b = peer_broker_kept(config_text, NULL, NULL, store, &config);
        struct peer *peers[N_PEERS] = { NULL };

        live_before(b);
        fake_store_die(store);
        peer_broker_leave(b, config);
        b = peer_broker_kept(config_text, NULL, NULL, store, &config);
        check(b);
        while (in.n > 0) {
                uint64_t who = take(&in);
                struct peer **p = &peers[who % N_PEERS];

                if (!*p) {
                        *p = peer_new(b, (uid_t)(who >> 4) % 3, false);
                        (*p)->auto_ack = true;
                        (*p)->wants_events = who & 8;
                }
                if (act(b, *p, &in) < 0 || (*p)->n_replies > PEER_MAX_REPLIES / 2)
                        *p = hang_up(*p);
                check(b);
        }
        for (size_t i = 0; i < N_PEERS; i++)
                peers[i] = peers[i] ? hang_up(peers[i]) : NULL;
        end_suspended(b);
        peer_broker_free(b, config);
        fake_store_free(store);
        return 0;
}
