/* Killed in every state: a session is walked through step by step and its process
 * killed at each, on all devices; afterwards the ledger is empty, nothing is
 * charged, and a bystander was served.
 *
 * Two walks. One is by hand: each state that the protocol has, half frames
 * included. The other knows nothing of states: a real client's life is stopped at
 * every one of its system calls, before it and after it, and ends there.
 *
 * SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "tests/integration/tools.h"

/* Of a life that has more stops every so manyth is tried; BFC_TEST_STOPS says how many. */
#define MAX_STOPS 60u

static const struct rig_config two_tenants = {
        .top = "timeouts: {quarantine: 60m, reclaim: 100ms}\n",
        .size = "256MiB",
        .partitions = "      - {name: train, limit: 192MiB, growth: on-demand}\n",
        .tenants =
                "  - {name: red, match: {uid: @UID@}, quotas: [{partition: train, limit: 160MiB}]}\n"
                "  - {name: blue, match: {uid: @UID@}, quotas: [{partition: train, limit: 160MiB}]}\n" TENANT(
                        "bystander", "@UID@", "train, limit: 32MiB, reserve: 32MiB"),
};

struct scene {
        struct rig *rig;
        struct raw *bystander;
        struct gate up;
        unsigned step; /* of the child */
        bool by_library;
};

static struct scene scene_new(void)
{
        struct scene s = { .rig = rig_start(&two_tenants), .up = gate_new() };
        Bfcd__Block block;

        s.bystander = raw_connect(s.rig->socket, "bystander");
        ck_assert_ptr_nonnull(s.bystander);
        ck_assert_int_eq(raw_malloc(s.bystander, 0, MIB, &block), 0);
        return s;
}

static void scene_end(struct scene *s)
{
        session_end(s->bystander);
        rig_stop(s->rig);
}

/* The bystander and its block alone are left. */
static bool is_over(struct rig *rig, struct rig_counts *ret)
{
        *ret = rig_count(rig);
        return ret->n_sessions == 1 && ret->n_blocks == 1 && ret->n_quarantined == 0 &&
               ret->bytes_pending == 0 && rig_charge(rig, "red", "train") == 0 &&
               rig_charge(rig, "blue", "train") == 0;
}

static void assert_over(struct scene *s, const char *where, unsigned step)
{
        struct rig_counts n;
        Bfcd__Block block;

        ck_assert_msg(WAIT_FOR(is_over(s->rig, &n), SETTLE_MS),
                      "killed %s (%u): %llu sessions, %llu blocks, %llu quarantined, %llu bytes charged",
                      where, step, (unsigned long long)n.n_sessions, (unsigned long long)n.n_blocks,
                      (unsigned long long)n.n_quarantined,
                      (unsigned long long)rig_charge(s->rig, "red", "train"));
        ck_assert_uint_eq(rig_stats(s->rig, "red", "train").bytes_unreclaimed, 0);
        ck_assert_int_eq(raw_malloc(s->bystander, 0, 1000, &block), 0);
        ck_assert_int_eq(raw_free(s->bystander, block.block_id), 0);
}

/* ---- by hand --------------------------------------------------------------- */

/* What a child has come to; each step goes on from the one before it. */
struct walk {
        const struct scene *scene;
        struct raw *raw;
        Bfcd__Block small, large;
        uint64_t retire_sequence;
        uint64_t retired_ids[64];
        size_t n_retired;
};

static size_t malloc_frame(struct walk *w, uint64_t n_bytes, uint8_t *frame)
{
        Bfcd__Malloc body = BFCD__MALLOC__INIT;
        Bfcd__Request r = REQUEST(MALLOC, malloc, &body);

        body.n_bytes = n_bytes;
        r.id = w->raw->next_id++;
        return raw_pack(&r, frame);
}

static void do_connect(struct walk *w)
{
        REQUIRE(raw_open(w->scene->rig->socket, &w->raw) == 0, "no connection");
        w->raw->wants_events = true;
}

static size_t hello_frame(struct walk *w, uint8_t *frame)
{
        Bfcd__Hello body = BFCD__HELLO__INIT;
        Bfcd__Request r = REQUEST(HELLO, hello, &body);

        body.version = 1;
        body.wants_events = true;
        body.tenant = (char *)(uintptr_t) "red";
        r.id = w->raw->next_id++;
        return raw_pack(&r, frame);
}

static void send_half_a_hello(struct walk *w)
{
        uint8_t frame[256];

        (void)raw_send_bytes(w->raw, frame, hello_frame(w, frame) / 2);
}

/* Steps that leave the connection in the middle of a message connect again. */
static void reconnect(struct walk *w)
{
        raw_close(w->raw);
        do_connect(w);
}

static void send_hello(struct walk *w)
{
        uint8_t frame[256];

        reconnect(w);
        (void)raw_send_bytes(w->raw, frame, hello_frame(w, frame));
}

static void read_hello(struct walk *w)
{
        reconnect(w);
        REQUIRE(raw_hello(w->raw, "red", NULL) == 0, "%s", raw_refusal());
}

static void send_half_a_malloc(struct walk *w)
{
        uint8_t frame[64];
        size_t n = malloc_frame(w, 1000, frame);

        (void)raw_send_bytes(w->raw, frame, n / 2);
        (void)raw_send_bytes(w->raw, frame + n / 2, n - n / 2); /* the next step needs a whole one */
}

static void send_malloc(struct walk *w)
{
        uint8_t frame[64];

        w->raw->ack = false;
        (void)raw_send_bytes(w->raw, frame, malloc_frame(w, 3 * MIB, frame));
}

static void wait_for_extents(struct walk *w)
{
        Bfcd__Reply *reply;

        for (unsigned i = 0; i < 2; i++) { /* of both mallocs */
                REQUIRE(raw_receive(w->raw, RAW_TIMEOUT_MS, &reply) == 0, "no block");
                REQUIRE(reply->body_case == BFCD__REPLY__BODY_BLOCK, "no block");
                w->small = *reply->block;
                bfcd__reply__free_unpacked(reply, NULL);
        }
        REQUIRE(w->raw->n_extents > 0 && w->raw->last_sequence > 0, "no extents");
}

static void map_extents(struct walk *w)
{
        for (size_t i = 0; i < w->raw->n_extents && rig_device() == ON_HOST; i++)
                REQUIRE(mmap(NULL, w->raw->extents[i].n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
                             w->raw->extents[i].fd, 0) != MAP_FAILED,
                        "%s", strerror(errno));
}

static void send_ack(struct walk *w)
{
        Bfcd__Ack ack = BFCD__ACK__INIT;
        Bfcd__Request r = REQUEST(ACK, ack, &ack);

        ack.sequence = w->raw->last_sequence;
        REQUIRE(raw_send(w->raw, &r) == 0, "ack");
        w->raw->ack = true;
}

static void take_the_large(struct walk *w)
{
        read_hello(w);
        REQUIRE(raw_malloc(w->raw, 0, 40 * MIB, &w->large) == 0, "%s", raw_refusal());
        REQUIRE(raw_malloc(w->raw, 0, 1000, &w->small) == 0, "%s", raw_refusal());
}

static void send_free(struct walk *w)
{
        Bfcd__Free body = BFCD__FREE__INIT;
        Bfcd__Request r = REQUEST(FREE, free, &body);

        body.block_id = w->small.block_id;
        REQUIRE(raw_send(w->raw, &r) == 0, "free");
}

static void read_free(struct walk *w)
{
        Bfcd__Reply *reply;

        REQUIRE(raw_receive(w->raw, RAW_TIMEOUT_MS, &reply) == 0, "free");
        bfcd__reply__free_unpacked(reply, NULL);
}

static void free_half(struct walk *w)
{
        REQUIRE(raw_free(w->raw, w->large.block_id) == 0, "%s", raw_refusal());
}

/* On a GPU a session with free extents is told when another tenant needs the room. */
static void be_told_to_let_go(struct walk *w)
{
        struct raw *blue;
        Bfcd__Event *event;
        uint8_t frame[64];

        if (rig_device() == ON_HOST)
                return;
        blue = raw_connect(w->scene->rig->socket, "blue");
        REQUIRE(blue, "no session");
        (void)raw_send_bytes(blue, frame, malloc_frame(w, 120 * MIB, frame));
        REQUIRE(raw_event(w->raw, RAW_TIMEOUT_MS, &event) == 0, "no event");
        w->retire_sequence = event->sequence;
        bfcd__event__free_unpacked(event, NULL);
}

static void let_go(struct walk *w)
{
        if (w->retire_sequence)
                (void)raw_answer(w->raw, w->retire_sequence);
}

static void send_half_an_event_reply(struct walk *w)
{
        (void)!send(w->raw->events_fd, "\4\0\0\0\022", 5, MSG_NOSIGNAL);
}

static void ask_and_read_nothing(struct walk *w)
{
        Bfcd__List list = BFCD__LIST__INIT;
        Bfcd__Request r = REQUEST(LIST, list, &list);

        list.kind = BFCD__LIST__KIND__BLOCKS;
        for (unsigned i = 0; i < 200; i++, r.id = 0)
                REQUIRE(raw_send(w->raw, &r) == 0, "list");
}

static void send_goodbye(struct walk *w)
{
        Bfcd__Goodbye body = BFCD__GOODBYE__INIT;
        Bfcd__Request r = REQUEST(GOODBYE, goodbye, &body);

        read_hello(w);
        REQUIRE(raw_malloc(w->raw, 0, 1000, &w->small) == 0, "%s", raw_refusal());
        REQUIRE(raw_send(w->raw, &r) == 0, "goodbye");
}

static void read_goodbye(struct walk *w)
{
        Bfcd__Reply *reply;

        if (raw_receive(w->raw, RAW_TIMEOUT_MS, &reply) == 0)
                bfcd__reply__free_unpacked(reply, NULL);
}

/* More extents than the window takes: the block waits in the daemon. */
static void stay_in_the_window(struct walk *w)
{
        uint8_t frame[64];

        read_hello(w);
        w->raw->ack = false;
        (void)raw_send_bytes(w->raw, frame, malloc_frame(w, 140 * MIB, frame));
        usleep(20000); /* any moment of it will do */
}

static const struct {
        const char *where;
        void (*act)(struct walk *w);
} steps[] = {
        { "after the connect", do_connect },
        { "in the middle of a hello", send_half_a_hello },
        { "after a hello", send_hello },
        { "after the hello's reply", read_hello },
        { "in the middle of a malloc", send_half_a_malloc },
        { "after a malloc", send_malloc },
        { "after its extents, before the ack", wait_for_extents },
        { "with extents mapped, before the ack", map_extents },
        { "after the ack", send_ack },
        { "holding blocks, after a hang-up", take_the_large },
        { "in the middle of a free", send_free },
        { "after a free", read_free },
        { "with extents wholly free", free_half },
        { "when told to unmap", be_told_to_let_go },
        { "after it unmapped", let_go },
        { "in the middle of an answer to an event", send_half_an_event_reply },
        { "with replies unread", ask_and_read_nothing },
        { "after a goodbye", send_goodbye },
        { "after the goodbye's reply", read_goodbye },
        { "with a block that waits for acks", stay_in_the_window },
};
#define N_STEPS (sizeof(steps) / sizeof(steps[0]))

static void walk_to(void *arg)
{
        const struct scene *s = arg;
        struct walk w = { .scene = s };

        for (unsigned i = 0; i <= s->step; i++)
                steps[i].act(&w);
        gate_open((struct gate *)(uintptr_t)&s->up);
        pause();
}

TEST(killed_in_every_state)
{
        struct scene s = scene_new();

        for (s.step = 0; s.step < N_STEPS; s.step++) {
                pid_t pid = child_start(walk_to, &s);

                ck_assert_msg(gate_wait(&s.up, SETTLE_MS), "%s: it did not come there", steps[s.step].where);
                child_kill(pid);
                assert_over(&s, steps[s.step].where, s.step);
        }
        scene_end(&s);
}

/* ---- at every system call -------------------------------------------------- */

/* A life of a real client that does everything once. */
static void live(void *arg)
{
        const struct scene *s = arg;
        struct bfc_options options = { .struct_size = sizeof(options),
                                       .socket = s->rig->socket,
                                       .tenant = "red",
                                       .flags = BFC_NO_THREAD };
        struct bfc_tenant_usage usage = { .struct_size = sizeof(usage) };
        bfc_client *client;
        void *a, *b, *c, *no;

        REQUIRE(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0, "%s", strerror(errno));
        raise(SIGSTOP);
        REQUIRE(bfc_connect(&options, &client) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 1000, &a) == 0, "%s", bfc_last_error());
        *(volatile char *)a = 1;
        REQUIRE(bfc_malloc(client, 5 * MIB, &b) == 0, "%s", bfc_last_error());
        *(volatile char *)b = 1;
        REQUIRE(bfc_malloc(client, 1000, &c) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_malloc(client, 1000 * MIB, &no) == -EDQUOT, "%s", bfc_last_error());
        REQUIRE(bfc_usage(client, NULL, &usage) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, b) == 0, "%s", bfc_last_error());
        REQUIRE(bfc_free(client, a) == 0, "%s", bfc_last_error());
        bfc_disconnect(client);
}

/* Lets it live up to so many stops; true: it was killed there, false: it ended before. */
static bool live_until(struct scene *s, unsigned n_stops, unsigned *ret_n_stops)
{
        pid_t pid = child_start(live, s);
        int status = 0, signal_number = 0;

        *ret_n_stops = 0;
        ck_assert_int_eq(waitpid(pid, &status, 0), pid);
        ck_assert_msg(WIFSTOPPED(status), "it cannot be traced: status %x", (unsigned)status);
        (void)ptrace(PTRACE_SETOPTIONS, pid, NULL, PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL);
        for (;;) {
                ck_assert_int_eq(ptrace(PTRACE_SYSCALL, pid, NULL, (void *)(intptr_t)signal_number), 0);
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                if (!WIFSTOPPED(status))
                        break;
                signal_number = WSTOPSIG(status) == (SIGTRAP | 0x80) ? 0 : WSTOPSIG(status);
                if (signal_number != 0 || ++*ret_n_stops < n_stops)
                        continue;
                kill(pid, SIGKILL);
                ck_assert_int_eq(waitpid(pid, &status, 0), pid);
                return true;
        }
        ck_assert_msg(WIFEXITED(status) && WEXITSTATUS(status) == 0, "it ended with status %x",
                      (unsigned)status);
        return false;
}

static bool may_trace(void)
{
        pid_t pid = fork();
        int status = 0;

        if (pid == 0)
                _exit(ptrace(PTRACE_TRACEME, 0, NULL, NULL) == 0 ? 0 : 1);
        (void)waitpid(pid, &status, 0);
        return status == 0;
}

TEST(killed_at_every_system_call)
{
        const char *text = getenv("BFC_TEST_STOPS");
        unsigned n_all, n, n_kills = 0, stride;
        struct scene s;

        if (!may_trace()) {
                printf("# this process may not trace its children: not run\n");
                return;
        }
        s = scene_new();
        ck_assert(!live_until(&s, UINT32_MAX, &n_all));
        assert_over(&s, "not at all", 0);
        stride = n_all / (text ? (unsigned)atoi(text) : MAX_STOPS) + 1;
        for (unsigned at = 1; at <= n_all; at += stride) {
                if (!live_until(&s, at, &n)) /* a life may differ a little from the one before */
                        break;
                n_kills++;
                assert_over(&s, "at a system call", at);
        }
        printf("# %u stops in a life, killed at %u of them\n", n_all, n_kills);
        ck_assert_uint_gt(n_kills, 20);
        scene_end(&s);
}
