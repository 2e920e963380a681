/* Sessions fed with anything: raw frames as a hostile client sends them, and
 * well-formed requests in any order, with the device answering when the input
 * says so; among them those that share blocks, wait for names, and let time pass. Some inputs are played on a device that cannot empty mappings: there
 * sessions are told to let go of extents, and answer, or lie, or do not answer.
 * After each input nothing may be left and every invariant holds.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "proto/message.h"
#include "tests/peer.h"
#include "tests/checks.h"
#include "daemon/session/hello.h"
#include "daemon/session/recall.h"
#include "daemon/session/request.h"
#include "daemon/session/shared.h"

#define N_PEERS     4
#define STICKY      0x80 /* in the first byte: a device that cannot empty mappings */
#define EVENTS      0x40 /* in the byte that begins a peer: it asks for events */
#define ANSWER_FROM 0xe0 /* a generation that no block has */
#define FLAGS_FROM  0xc0u
#define SHARE_FROM  0xa0 /* a generation that no block has */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data);

static const char config_text[] = "devices:\n"
                                  "  - id: host\n"
                                  "    size: 16MiB\n"
                                  "    partitions:\n"
                                  "      - {name: p, limit: 12MiB}\n"
                                  "      - {name: q, limit: 4MiB, growth: preallocate}\n"
                                  "tenants:\n"
                                  "  - name: t\n"
                                  "    match: {uid: [0, 1]}\n"
                                  "    quotas:\n"
                                  "      - {partition: p, limit: 10MiB, max_blocks: 20}\n"
                                  "      - {partition: q, limit: 4MiB, max_sessions: 1}\n"
                                  "  - name: u\n"
                                  "    match: {uid: 2}\n"
                                  "    quotas: [{partition: p, limit: 8MiB, reserve: 2MiB}]\n";

struct input {
        const uint8_t *at;
        size_t n;
};

static uint64_t take(struct input *in, size_t n_bytes)
{
        uint64_t value = 0;

        for (size_t i = 0; i < n_bytes && in->n > 0; i++, in->at++, in->n--)
                value |= (uint64_t)*in->at << (8 * i);
        return value;
}

/* A frame's payload as it would come off the wire. Returns the session's word. */
static int send_raw(struct peer *p, struct message_arena *arena, struct input *in)
{
        size_t n = (size_t)take(in, 1);
        const uint8_t *payload = in->at;
        Bfcd__Request *request;
        const char *why;

        if (n > in->n)
                n = in->n;
        in->at += n;
        in->n -= n;
        request = message_unpack_request(arena, payload, n);
        return request ? session_handle(p->session, request, &why) : -1;
}

/* What a client may say on its events socket: the answer to an open Retire (low
 * numbers), or anything. The session's word. */
static int answer_event(struct peer *p, uint64_t what)
{
        if (what < p->n_retires)
                return peer_answer(p, p->retires[what].sequence);
        return peer_answer(p, what);
}

/* One statement each: the order in which arguments are evaluated is the compiler's. */
static void ask_for_block(struct peer *p, struct input *in)
{
        uint32_t partition = (uint32_t)take(in, 1);
        uint64_t flags =
                partition >= FLAGS_FROM ? partition / 3 % 4 : 0; /* one that is known, one that is not */
        uint64_t n = take(in, 1);

        n <<= take(in, 1) % 56;
        (void)peer_malloc_flags(p, partition % 3, n, flags);
}

static void ask_for_charge(struct peer *p, uint64_t how, struct input *in)
{
        uint64_t n = take(in, 1);

        n <<= take(in, 1) % 56;
        if (how & 4)
                (void)peer_uncharge(p, (uint32_t)(how / 8 % 3), n);
        else if (p->session->requests.n < SESSION_MAX_PENDING)
                (void)peer_charge(p, (uint32_t)(how / 8 % 3), n, (uint32_t)take(in, 1) * 50);
}

/* Publishes, attaches, charges, or lets waiting requests time out. */
static void share(struct broker *b, struct peer *p, uint64_t how, struct input *in)
{
        static const char *const names[] = { "a", "b", "c", "", "\x7f" };
        const char *name = names[how / 4 % 5];

        if (how % 4 == 3) {
                shared_tick(b, clock_ms() + take(in, 1) * 100);
                shared_expire_kept(b, clock_ms() + how * 10);
        } else if (p->session->state != SESSION_LIVE)
                return;
        else if (how % 4 == 0) {
                uint64_t generation = take(in, 1), block = generation << 32 | take(in, 1);

                if (how < 32)
                        (void)peer_publish(p, block, name);
                else
                        (void)peer_publish_kept(p, block, name, (how - 32) * 10, "xy", how % 3);
        } else if (how % 4 == 2 && how >= 48)
                ask_for_charge(p, how, in);
        else if (how % 4 == 1 && how >= 48)
                (void)peer_forget(p, "", name);
        else if (how % 4 == 1 && how >= 32)
                (void)peer_metadata(p, take(in, 1) << 32 | take(in, 1));
        else if (p->session->requests.n < SESSION_MAX_PENDING)
                (void)peer_attach(p, name, (uint32_t)take(in, 1) * 50);
}

static int act(struct broker *b, struct peer *p, struct message_arena *arena, struct input *in)
{
        uint64_t generation = take(in, 1);

        switch (take(in, 1) % 7) {
        case 0:
                return send_raw(p, arena, in);
        case 1:
                if (p->session->state == SESSION_LIVE)
                        ask_for_block(p, in);
                return 0;
        case 2: /* ids are generation << 32 | index: this meets real ones */
                if (p->session->state == SESSION_LIVE)
                        (void)peer_free_block(p, generation << 32 | take(in, 1));
                return 0;
        case 3:
                if (generation >= ANSWER_FROM)
                        return p->wants_events ? answer_event(p, take(in, 1)) : 0;
                return peer_ack(p, take(in, 1));
        case 4:
                if (generation >= ANSWER_FROM)
                        recall_tick(b, clock_ms() + RETIRE_TIMEOUT_MS);
                broker_poll(b);
                broker_turn(b);
                shared_turn(b);
                return p->aborted ? -1 : 0;
        case 5:
                if (p->session->hello.n == SESSION_MAX_HELLOS)
                        return -1;
                if (p->session->state == SESSION_NEW)
                        (void)peer_hello(p, "", take(in, 1) % 2 ? "q" : "");
                return 0;
        default:
                if (generation < SHARE_FROM)
                        return -1;
                share(b, p, generation - SHARE_FROM, in);
                return 0;
        }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_data)
{
        struct input in = { data, n_data };
        struct config *config;
        bool sticky = n_data > 0 && data[0] & STICKY;
        struct broker *b =
                sticky ? peer_broker_sticky(config_text, &config) : peer_broker(config_text, &config);
        struct peer *peers[N_PEERS] = { NULL };
        struct message_arena *arena;
        const char *why = "";

        if (message_arena_new(MESSAGE_ARENA_BYTES, &arena) < 0)
                abort();
        while (in.n > 0) {
                uint8_t who = (uint8_t)take(&in, 1);
                struct peer **p = &peers[who % N_PEERS];

                if (!*p) {
                        *p = peer_new(b, (uid_t)(who >> 4) % 4, who & 8);
                        (*p)->auto_ack = who & 4;
                        (*p)->wants_events = who & EVENTS;
                }
                if (act(b, *p, arena, &in) < 0 || session_is_closing((*p)->session) ||
                    (*p)->n_replies > PEER_MAX_REPLIES / 2)
                        *p = peer_free(*p);
                if (broker_check(b, &why) < 0 || retire_check(b, &why) < 0 || shared_check(b, &why) < 0) {
                        fprintf(stderr, "check: %s\n", why);
                        abort();
                }
        }
        for (size_t i = 0; i < N_PEERS; i++)
                peer_free(peers[i]);
        message_arena_free(arena);
        peer_broker_free(b, config);
        return 0;
}
